//! Limits of registries in use: they delay requests, take no streams, end tokens early, let tags expire or keep them
//! from moving. A proxy before a real registry imitates each.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use jiff::Timestamp;
use jiff::fmt::rfc2822::DateTimePrinter;

use super::proxy::{Fault, Proxy, is_layer};
use super::{MANIFEST, Two};
use crate::support::env::TestStore;
use crate::support::transcript::measured;

const ONE: &str = "[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n";
const TWO: &str = "[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n[[step]]\nname = 'two'\nrun = 'true'\n";

fn says(status: u16, line: &str) -> Fault {
    Fault::Says(status, line.to_owned(), String::new())
}

/// Returns two handles of one counter.
fn counted() -> (Arc<AtomicUsize>, Arc<AtomicUsize>) {
    let counter = Arc::new(AtomicUsize::new(0));
    (Arc::clone(&counter), counter)
}

fn first(counter: &AtomicUsize) -> bool {
    counter.fetch_add(1, Ordering::Relaxed) == 0
}

fn who_asks_to_wait_for_hours_is_not_waited_for(two: &Two, name: &str) {
    let proxy = Proxy::start(&two.registry.host, |_| {
        let body = r#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit."}]}"#;
        Fault::Says(429, "retry-after: 21600\r\n".to_owned(), body.to_owned())
    });
    let started = Instant::now();
    two.with(&two.one, &["push", name], &proxy.repository())
        .exits(4)
        .says(&[
            "the registry answered 429 Too Many Requests: TOOMANYREQUESTS: You have reached your pull rate limit.; it asks to wait 6 h",
        ]);
    assert!(started.elapsed() < Duration::from_secs(60));
}

#[test]
fn a_registry_that_asks_to_wait_is_waited_for_unless_for_hours() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(ONE);
    two.one.rockenv(&["up", name]).ok();
    who_asks_to_wait_for_hours_is_not_waited_for(&two, name);
    let [head, post, patch, put] = std::array::from_fn(|_| AtomicUsize::new(0));
    let host = two.registry.host.clone();
    let proxy = Proxy::start(&two.registry.host, move |request| {
        match request.split(' ').next() {
            Some("GET" | "HEAD") if first(&head) => {
                let then = Timestamp::now() + Duration::from_secs(3);
                let then = DateTimePrinter::new()
                    .timestamp_to_rfc9110_string(&then)
                    .unwrap();
                says(503, &format!("retry-after: {then}\r\n"))
            }
            Some("POST") if first(&post) => says(429, "retry-after: 1\r\n"),
            Some("PATCH") if first(&patch) => says(429, "retry-after: 2\r\n"),
            // A gateway gives up while the registry stores the layer, and does not say how long to wait.
            Some("PUT") if first(&put) => {
                let path = request.split(' ').nth(1).unwrap();
                let stored = crate::support::registry::http(&host, "PUT", path, "", b"");
                assert_eq!(stored.status, 201, "{}", stored.head);
                says(504, "")
            }
            _ => Fault::None,
        }
    });
    let started = Instant::now();
    two.with(&two.one, &["push", name], &proxy.repository())
        .ok()
        .says(&[
            "warning: registry `127.0.0.1:",
            "answered 503 Service Unavailable; waiting",
            "answered 429 Too Many Requests; waiting 2",
            "answered 504 Gateway Timeout; waiting",
            "1 snapshot at",
            "2 layers sent",
        ]);
    assert!(
        started.elapsed() > Duration::from_secs(5),
        "{:?}",
        started.elapsed()
    );
    let layer = AtomicUsize::new(0);
    let proxy = Proxy::start(&two.registry.host, move |request| {
        says(429, "retry-after: 1\r\n").when(is_layer(request) && first(&layer))
    });
    two.with(&two.other, &["up", name, "--pull"], &proxy.repository())
        .ok()
        .says(&[
            "429 Too Many Requests; waiting",
            "pulled one from",
            "1 done before",
        ]);
    two.assert_same(name);
}

#[test]
fn a_registry_without_streams_gets_whole_layers() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(TWO);
    two.one.rockenv(&["up", name]).ok();
    let (counter, streams) = counted();
    let proxy = Proxy::start(&two.registry.host, move |head| {
        match head.starts_with("PATCH ") {
            true => {
                counter.fetch_add(1, Ordering::Relaxed);
                let body = r#"{"errors":[{"code":"UNSUPPORTED","message":"no chunks here"}]}"#;
                Fault::Says(405, String::new(), body.to_owned())
            }
            false => Fault::None,
        }
    });
    let push = two.with(&two.one, &["push", name], &proxy.repository());
    insta::assert_snapshot!(measured(two.one.shown(&push)), @"
    push to 127.0.0.1:PORT/team/rocm … SIZE
    ENV: 2 snapshots at 127.0.0.1:PORT/team/rocm; 3 layers sent (SIZE), 0 already there, in TIME
    ");
    // `push` tries a stream only once.
    assert_eq!(streams.load(Ordering::Relaxed), 1);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, two from", "2 done before"]);
    two.assert_same(name);
    an_upload_goes_on_where_it_began(&two, name);
    // A proxy before the registry takes no large requests, and answers with a web page.
    let proxy = Proxy::start(&two.registry.host, move |head| {
        let page = "<html>413 Request Entity Too Large</html>";
        Fault::Says(413, String::new(), page.to_owned()).when(head.starts_with("PATCH "))
    });
    let repository = proxy.repository().replace("/rocm", "/third");
    two.with(&two.one, &["push", name], &repository)
        .exits(4)
        .says(&["the registry answered 413", "client_max_body_size"]);
}

/// A registry redirects the beginning of an upload to another one, which answers with a relative address.
fn an_upload_goes_on_where_it_began(two: &Two, name: &str) {
    let host = two.registry.host.clone();
    let other = Proxy::start(&two.registry.host, move |head| {
        if !head.starts_with("POST ") {
            return Fault::None;
        }
        let path = head.split(' ').nth(1).unwrap();
        let begun = crate::support::registry::http(&host, "POST", path, "", b"");
        let place = begun.head.lines().find_map(|line| {
            let (name, address) = line.split_once(": ")?;
            let is_place = name.eq_ignore_ascii_case("location");
            address.split_once("/v2/").filter(|_| is_place)
        });
        says(202, &format!("location: /v2/{}\r\n", place.unwrap().1))
    });
    let other = other.repository().replace("/team/rocm", "");
    let proxy = Proxy::start(&two.registry.host, move |head| {
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        match (method, path.contains("/blobs/uploads/")) {
            ("POST", true) => says(307, &format!("location: http://{other}{path}\r\n")),
            (_, is_upload) => says(404, "").when(is_upload),
        }
    });
    let repository = proxy.repository().replace("/rocm", "/other");
    two.with(&two.one, &["push", name], &repository)
        .ok()
        .says(&["2 snapshots at", "3 layers sent"]);
}

#[test]
fn a_token_server_is_waited_for_and_a_token_that_ends_before_a_layer_is_replaced() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(ONE);
    two.one.rockenv(&["up", name]).ok();
    let (counter, late) = counted();
    let (asked, issued, ended, uploads) = (
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
        AtomicUsize::new(0),
    );
    let proxy = Proxy::start(&two.registry.host, move |head| {
        if head.starts_with("GET /token?") {
            match asked.fetch_add(1, Ordering::Relaxed) {
                0 => return says(429, "retry-after: 1\r\n"),
                1 => return says(503, ""),
                _ => {}
            }
            let number = issued.fetch_add(1, Ordering::Relaxed) + 1;
            return Fault::Says(200, String::new(), format!(r#"{{"token":"t{number}"}}"#));
        }
        let field = |name: &str| {
            let mut lines = head.lines().filter_map(|line| line.split_once(": "));
            let found = lines.find(|(found, _)| found.eq_ignore_ascii_case(name));
            found.map(|(_, value)| value.to_owned())
        };
        let token = field("authorization");
        let number = token.and_then(|token| token.strip_prefix("Bearer t")?.parse().ok());
        match number {
            Some(number) if number > ended.load(Ordering::Relaxed) => {
                // Ends the token between the start of an upload and its layer, but not when the upload is repeated.
                if head.starts_with("POST ") && uploads.fetch_add(1, Ordering::Relaxed) % 2 == 0 {
                    ended.store(number, Ordering::Relaxed);
                }
                Fault::None
            }
            _ => {
                counter.fetch_add(usize::from(head.starts_with("PATCH ")), Ordering::Relaxed);
                let host = field("host").unwrap();
                let realm = format!(r#"Bearer realm="http://{host}/token",service="test""#);
                says(401, &format!("www-authenticate: {realm}\r\n"))
            }
        }
    });
    two.with(&two.one, &["push", name], &proxy.repository())
        .ok()
        .says(&[
            "warning: token server `127.0.0.1:",
            "answered 429 Too Many Requests; waiting 1",
            "answered 503 Service Unavailable; waiting",
            "1 snapshot at",
            "2 layers sent",
        ]);
    assert!(late.load(Ordering::Relaxed) > 0);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one from", "1 done before"]);
    two.assert_same(name);
}

#[test]
fn a_tag_that_expires_leaves_the_step_before_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(TWO);
    let last = two.one.keys(name).pop().unwrap().1;
    // The tag is listed, but is gone when it is requested.
    let proxy = Proxy::start(&two.registry.host, move |head| {
        let is_gone = head.starts_with("GET ") && head.contains(&format!("/manifests/{last} "));
        says(404, "").when(is_gone)
    });
    two.with(
        &two.other,
        &["up", name, "--pull", "--allow-incremental"],
        &proxy.repository(),
    )
    .ok()
    .says(&["pulled one from", "1 done before", "step 2/2 two"]);
}

#[test]
fn a_tag_that_may_not_move_is_said() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(TWO);
    two.one.rockenv(&["up", name]).ok();
    let host = two.registry.host.clone();
    let proxy = Proxy::start(&two.registry.host, move |head| {
        let mut words = head.split(' ');
        let (method, path) = (words.next().unwrap(), words.next().unwrap());
        if path.starts_with("/token?") {
            return Fault::Says(200, String::new(), r#"{"token":"t"}"#.to_owned());
        }
        if method != "PUT" || !path.contains("/manifests/") {
            return Fault::None;
        }
        let tag = crate::support::registry::http(
            &host,
            "HEAD",
            path,
            &format!("accept: {MANIFEST}\r\n"),
            b"",
        );
        match (tag.status, head.contains("Bearer t")) {
            (200, true) => Fault::Says(
                403,
                String::new(),
                r#"{"errors":[{"code":"DENIED","message":"requested access to the resource is denied - This tag is already assigned to an image in this repository and cannot be updated due to immutability settings."}]}"#.to_owned(),
            ),
            // The token has expired.
            (200, false) => {
                let mut lines = head.lines().filter_map(|line| line.split_once(": "));
                let proxy = lines.find(|(name, _)| name.eq_ignore_ascii_case("host"));
                let realm = format!("http://{}/token", proxy.unwrap().1);
                says(401, &format!("www-authenticate: Bearer realm=\"{realm}\"\r\n"))
            }
            _ => Fault::None,
        }
    });
    let named = format!("{}:nightly", proxy.repository());
    let push = |words: &[&str]| two.with(&two.one, &[&["push", name], words].concat(), &named);
    let one = ["--until", "one", named.as_str()];
    let said = [&one[..], &one[..], &one[2..]].map(|words| two.one.shown(&push(words)));
    insta::assert_snapshot!(measured(said.concat()), @"
    push to 127.0.0.1:PORT/team/rocm … SIZE
    ENV: 1 snapshot at 127.0.0.1:PORT/team/rocm, the last one as `nightly`; 2 layers sent (SIZE), 0 already there, in TIME
    push to 127.0.0.1:PORT/team/rocm … SIZE
    ENV: 1 snapshot at 127.0.0.1:PORT/team/rocm, the last one as `nightly`; 0 layers sent (SIZE), 2 already there, in TIME
    push to 127.0.0.1:PORT/team/rocm … SIZE
    error: cannot push to `127.0.0.1:PORT/team/rocm`
      caused by: tag `nightly` exists, and the registry does not let it move
    help: push under another tag, or let the registry move tags
    exit code 4
    ");
    // The tags of the steps did not move.
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, two from"]);
}
