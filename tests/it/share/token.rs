//! Registries that require tokens, as most do, and whose tokens end.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use super::Two;
use super::proxy::{Fault, Proxy};
use crate::support::env::TestStore;
use crate::support::transcript::measured;

/// Returns the value of a request's header.
fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(": "));
    let found = lines.find(|(found, _)| found.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value)
}

#[test]
fn a_layer_that_takes_longer_than_its_token_is_pushed() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile("[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n");
    two.one.rockenv(&["up", name]).ok();
    let late = Arc::new(AtomicUsize::new(0));
    let (refused, issued, ended) = (Arc::clone(&late), AtomicUsize::new(0), AtomicUsize::new(0));
    let proxy = Proxy::start(&two.registry.host, move |head| {
        if head.starts_with("GET /token?") {
            let number = issued.fetch_add(1, Ordering::Relaxed) + 1;
            // Docker Hub and Harbor use both names.
            let answer = format!(r#"{{"token":"t{number}","access_token":"t{number}"}}"#);
            return Fault::Says(200, String::new(), answer);
        }
        let token = field(head, "authorization").and_then(|value| value.strip_prefix("Bearer t"));
        match token.and_then(|number| number.parse().ok()) {
            Some(number) if number > ended.load(Ordering::Relaxed) => {
                // Every upload outlasts the token that it begins with.
                if head.starts_with("PATCH ") {
                    ended.store(number, Ordering::Relaxed);
                }
                Fault::None
            }
            _ => {
                let is_late = head.starts_with("PUT ") && head.contains("/blobs/uploads/");
                refused.fetch_add(usize::from(is_late), Ordering::Relaxed);
                let host = field(head, "host").unwrap();
                let realm = match token {
                    // Harbor names its token server only to clients without a token.
                    Some(_) => r#"Basic realm="harbor""#.to_owned(),
                    None => format!(r#"Bearer realm="http://{host}/token",service="test""#),
                };
                Fault::Says(401, format!("www-authenticate: {realm}\r\n"), String::new())
            }
        }
    });
    let push = two.with(&two.one, &["push", name], &proxy.repository());
    insta::assert_snapshot!(measured(two.one.shown(&push)), @"
    push to 127.0.0.1:PORT/team/rocm … SIZE
    ENV: 1 snapshot at 127.0.0.1:PORT/team/rocm; 2 layers sent (SIZE), 0 already there, in TIME
    ");
    // Once for the image and once for the step.
    assert_eq!(late.load(Ordering::Relaxed), 2);
    two.with(&two.other, &["up", name, "--pull"], &proxy.repository())
        .ok()
        .says(&["pulled one from", "1 done before"]);
    two.assert_same(name);
}
