//! Removing old snapshots from a real registry, with a proxy that imitates pages and refusals.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fs_err as fs;
use serde_json::{Value, json};

use super::proxy::{Fault, Proxy};
use super::{MANIFEST, Two, get, put};
use crate::support::env::TestStore;
use crate::support::run::Ran;
use crate::support::terminal::Terminal;
use crate::support::transcript::measured;

const INDEX: &str = "application/vnd.oci.image.index.v1+json";

fn body(text: &str) -> String {
    format!(
        "[[step]]\nname = 'one'\nrun = 'echo {text} > $HOME/one'\n[[step]]\nname = 'two'\nrun = 'echo {text} > $HOME/two'\n"
    )
}

/// An env that is pushed with its first profile, and then with its second.
struct Pushed {
    two: Two,
    /// Keys of the first profile, and of the second in `new`.
    old: Vec<String>,
    new: Vec<String>,
}

impl Pushed {
    fn new() -> Self {
        let two = Two::new(TestStore::new(), TestStore::new());
        let keys = |text: &str| {
            let name = two.pushed(&body(text));
            let keys = two.one.keys(name).into_iter();
            keys.map(|(_, key)| key).collect::<Vec<_>>()
        };
        let (old, new) = (keys("old"), keys("new"));
        // Makes everything older than a second.
        std::thread::sleep(std::time::Duration::from_millis(1500));
        Self { two, old, new }
    }

    fn prune(&self, store: &TestStore, words: &[&str], repository: &str) -> Ran {
        let all = [
            &["cache", "prune", "--registry", repository, "--json"],
            words,
        ]
        .concat();
        self.two.with(store, &all, "127.0.0.1:9/unused")
    }

    fn tags(&self) -> Vec<String> {
        let tags = get(&self.two.registry.host, "tags/list");
        let tags: Value = serde_json::from_slice(&tags).unwrap();
        let mut tags: Vec<String> = serde_json::from_value(tags["tags"].clone()).unwrap();
        tags.sort();
        tags
    }

    /// Tags an index of these manifests by hand.
    fn tag_index(&self, tag: &str, manifests: &[&str]) {
        let manifests = manifests.iter().map(|digest| {
            json!({
                "mediaType": MANIFEST,
                "digest": digest, "size": self.two.manifest(digest).len(),
            })
        });
        let manifests: Vec<Value> = manifests.collect();
        let index = json!({ "schemaVersion": 2, "mediaType": INDEX, "manifests": manifests });
        let host = &self.two.registry.host;
        put(host, tag, INDEX, index.to_string().as_bytes());
    }

    fn digest(&self, reference: &str) -> String {
        format!("sha256:{}", super::sha256(&self.two.manifest(reference)))
    }
}

fn removed(ran: Ran) -> Vec<String> {
    let report = ran.ok().json();
    let removed = report["removed"].as_array().unwrap().iter();
    let mut tags: Vec<String> = removed
        .map(|tag| tag["tag"].as_str().unwrap().to_owned())
        .collect();
    tags.sort();
    tags
}

fn sorted(keys: &[String]) -> Vec<String> {
    let mut keys = keys.to_vec();
    keys.sort();
    keys
}

#[test]
fn what_no_env_lock_file_or_recent_build_names_is_removed() {
    let pushed = Pushed::new();
    let (two, repository) = (&pushed.two, pushed.two.repository());
    let all = pushed.tags();
    let old = ["--older-than", "1s"];
    // Recent snapshots are kept, and those that an env of this machine names.
    let recent = pushed.prune(&two.one, &["--older-than", "1h"], &repository);
    assert_eq!(removed(recent), [""; 0]);
    let dry = pushed.prune(&two.one, &[&old[..], &["-n"]].concat(), &repository);
    assert_eq!(removed(dry), sorted(&pushed.old));
    assert_eq!(pushed.tags(), all);
    // A lock file keeps what it names, on a machine without the env.
    let name = two.one.env();
    two.one.rockenv(&["lock", name]).ok();
    let lock = two.one.work().join(format!("profiles/{name}.lock"));
    let words = [&old[..], &["-n", "--keep-lock", lock.to_str().unwrap()]].concat();
    let locked = pushed.prune(&two.other, &words, &repository);
    assert_eq!(removed(locked), sorted(&pushed.old));
    let absent = pushed.prune(
        &two.other,
        &[&old[..], &["--keep-lock", "absent.lock"]].concat(),
        &repository,
    );
    absent.exits(7).says(&["`absent.lock` does not exist"]);
    // Taking the tag for a limit would be a misunderstanding.
    let tagged = pushed.prune(&two.other, &old, &format!("{repository}:x"));
    tagged.exits(2).says(&["names a single snapshot"]);
    // A user's tag and a foreign index keep what they refer to.
    let named = format!("{repository}:nightly");
    two.one.rockenv(&["push", name, &named]).ok();
    pushed.tag_index("theirs", &[&pushed.digest(&pushed.old[0])]);
    let other = pushed.prune(&two.other, &[&old[..], &["-n"]].concat(), &repository);
    assert_eq!(removed(other), [pushed.old[1].clone()]);
    // The same without `-n`.
    let done = pushed.prune(&two.one, &old, &repository);
    assert_eq!(removed(done), [pushed.old[1].clone()]);
    let mut left = all;
    left.retain(|tag| *tag != pushed.old[1]);
    left.extend(["nightly".to_owned(), "theirs".to_owned()]);
    assert_eq!(pushed.tags(), sorted(&left));
    two.run(
        &two.other,
        &["pull", &format!("{repository}:{}", pushed.old[1])],
    )
    .exits(7);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, two from", "2 done before"]);
    two.assert_same(name);
    let text = ["cache", "prune", "--registry", "--older-than", "1s"];
    two.run(&two.one, &text)
        .ok()
        .prints("nothing to remove; 6 of rockenv kept, 1 of others");
    assert_eq!(pushed.new.len(), 2);
}

/// Cases that remove nothing share one push.
#[test]
fn where_nothing_is_removed_all_tags_stay() {
    let pushed = Pushed::new();
    let tags = pushed.tags();
    let cases: [fn(&Pushed); 4] = [
        ctrl_c_ends_the_question,
        nothing_is_removed_while_a_description_cannot_be_read,
        a_list_in_pages_is_read_to_its_end,
        a_registry_that_removes_nothing_is_said,
    ];
    for case in cases {
        case(&pushed);
        assert_eq!(pushed.tags(), tags);
    }
    what_a_tag_moves_to_meanwhile_stays(&pushed);
}

fn ctrl_c_ends_the_question(pushed: &Pushed) {
    let words = ["cache", "prune", "--registry", "--older-than", "1s"];
    let mut command = pushed.two.one.command(&words);
    command.env("ROCKENV_REGISTRY", pushed.two.repository());
    let mut terminal = Terminal::start(command, 33, 101);
    terminal.expect("[y/N]");
    terminal.write("\x03");
    terminal.wait(130);
}

/// Between the survey and the removal, another user points a kept tag at an old snapshot.
fn what_a_tag_moves_to_meanwhile_stays(pushed: &Pushed) {
    let two = &pushed.two;
    let repository = two.repository();
    let named = format!("{repository}:nightly");
    two.one.rockenv(&["push", two.one.env(), &named]).ok();
    let (host, old) = (two.registry.host.clone(), two.manifest(&pushed.old[1]));
    let lists = AtomicUsize::new(0);
    let proxy = Proxy::start(&two.registry.host, move |head| {
        let is_list = head.contains("/tags/list");
        // The survey lists the tags once, and the removal once more.
        if is_list && lists.fetch_add(1, Ordering::Relaxed) == 1 {
            put(&host, "nightly", MANIFEST, &old);
        }
        Fault::None
    });
    let tags = pushed.tags();
    let done = pushed.prune(&two.one, &["--older-than", "1s"], &proxy.repository());
    let report = done.ok().json();
    assert_eq!(report["removed"], json!([]));
    assert_eq!(report["bytes"], 0);
    assert_eq!(report["kept"], tags.len());
    assert_eq!(pushed.tags(), tags);
    assert_eq!(pushed.digest("nightly"), pushed.digest(&pushed.old[1]));
    // Nothing moves now. The tag keeps the whole snapshot.
    let again = pushed.prune(&two.one, &["--older-than", "1s"], &repository);
    assert_eq!(removed(again), [""; 0]);
}

/// A snapshot that cannot be read at the moment may depend on any other.
fn nothing_is_removed_while_a_description_cannot_be_read(pushed: &Pushed) {
    let last = pushed.two.manifest(&pushed.new[1]);
    let last: Value = serde_json::from_slice(&last).unwrap();
    let config = last["config"]["digest"].as_str().unwrap().to_owned();
    let proxy = Proxy::start(&pushed.two.registry.host, move |head| {
        let is_config = head.starts_with("GET ") && head.contains(&config);
        Fault::Says(403, String::new(), String::new()).when(is_config)
    });
    pushed
        .prune(
            &pushed.two.other,
            &["--older-than", "1s"],
            &proxy.repository(),
        )
        .exits(4);
}

fn a_list_in_pages_is_read_to_its_end(pushed: &Pushed) {
    let repository = pushed.two.repository();
    let whole = removed(pushed.prune(&pushed.two.one, &["--older-than", "1s", "-n"], &repository));
    assert_eq!(whole, sorted(&pushed.old));
    let tags = pushed.tags();
    // The registry gives the next page by path, or by a URL with an internal host name, or with a path that Nexus only
    // serves at another port.
    for origin in [
        "",
        "http://registry.internal:5000",
        "/repository/docker-hosted",
    ] {
        let (listed, pages) = (tags.clone(), Arc::new(AtomicUsize::new(0)));
        let counter = Arc::clone(&pages);
        let proxy = Proxy::start(&pushed.two.registry.host, move |head| {
            let path = head.split(' ').nth(1).unwrap();
            // The registry has no catalog, so nothing else lists tags.
            if !path.starts_with("/v2/team/rocm/") {
                return Fault::Says(404, String::new(), String::new());
            }
            let Some(query) = path.strip_prefix("/v2/team/rocm/tags/list?") else {
                return Fault::None;
            };
            counter.fetch_add(1, Ordering::Relaxed);
            let last = query.split('&').find_map(|part| part.strip_prefix("last="));
            let from = last.map_or(0, |last| {
                listed.iter().position(|tag| tag == last).unwrap() + 1
            });
            let page = &listed[from..listed.len().min(from + 2)];
            let link = match page.last() {
                Some(last) if from + 2 < listed.len() => format!(
                    "link: <{origin}/v2/team/rocm/tags/list?last={last}&n=2>; rel=\"next\"\r\n"
                ),
                _ => String::new(),
            };
            Fault::Says(
                200,
                link,
                json!({ "name": "team/rocm", "tags": page }).to_string(),
            )
        });
        let words = ["--older-than", "1s", "-n"];
        let found = pushed.prune(&pushed.two.one, &words, &proxy.repository());
        assert_eq!(removed(found), whole, "{origin}");
        assert_eq!(pages.load(Ordering::Relaxed), tags.len().div_ceil(2));
    }
    // Without all tags, nothing is removed.
    let first = json!({ "name": "team/rocm", "tags": tags[..2] }).to_string();
    let proxy = Proxy::start(&pushed.two.registry.host, move |head| {
        match head.starts_with("GET /v2/team/rocm/tags/list?n=1000 ") {
            true => Fault::Says(
                200,
                "link: <?last=x>; rel=next\r\n".to_owned(),
                first.clone(),
            ),
            false => Fault::Says(404, String::new(), String::new()).when(head.contains("?last=x ")),
        }
    });
    pushed
        .prune(
            &pushed.two.one,
            &["--older-than", "1s", "-n"],
            &proxy.repository(),
        )
        .exits(4)
        .says(&["cannot list the tags of", "the registry answered 404"]);
}

fn a_registry_that_removes_nothing_is_said(pushed: &Pushed) {
    for (status, body) in [
        (405, ""),
        (404, "404 page not found"),
        (
            400,
            r#"{"errors":[{"code":"UNSUPPORTED","message":"The operation is unsupported."}]}"#,
        ),
        (
            400,
            r#"{"errors":[{"code":"GOOGLE_MANIFEST_DANGLING_TAG","message":"Manifest is still referenced by tag: v1"}]}"#,
        ),
    ] {
        let proxy = Proxy::start(&pushed.two.registry.host, move |head| {
            let fault = Fault::Says(status, String::new(), body.to_owned());
            fault.when(head.starts_with("DELETE "))
        });
        let one = &pushed.two.one;
        let ran = pushed.prune(one, &["--older-than", "1s"], &proxy.repository());
        insta::allow_duplicates! {
            insta::assert_snapshot!(measured(one.shown(&ran)), @"
            look at 127.0.0.1:PORT/team/rocm … SIZE
            error: cannot remove snapshots from `127.0.0.1:PORT/team/rocm`
              caused by: registry `127.0.0.1:PORT` does not let clients remove anything
            help: allow it there (`storage: delete: enabled: true` in a `registry`), or use the registry's own cleanup rules
            exit code 4
            ");
        }
    }
    // A repository that does not exist has nothing to remove.
    let absent = format!("{}/absent", pushed.two.registry.host);
    let found = pushed.prune(&pushed.two.one, &["--older-than", "1s"], &absent);
    assert_eq!(removed(found), [""; 0]);
    fs::metadata(pushed.two.registry.data()).unwrap();
}
