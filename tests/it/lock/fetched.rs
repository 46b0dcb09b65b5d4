//! Files that steps fetch or install: locked, handed back and compared.

use super::*;

#[test]
fn files_of_a_locked_cache_are_named_compared_and_missed() {
    let store = TestStore::new();
    let env = store.env();
    store.profile(
        r#"
[[volume]]
name = "tarballs"
kind = "cache"
locked = true
target = "/cache/tarballs"
[[step]]
name = "fetch"
run = "cd /cache/tarballs; mkdir -p z; [ -e z/a.tar ] || echo fetched > z/a.tar; echo half > b.part"
"#,
    );
    store.up();
    store.rockenv(&["lock", env]).ok();
    let lock = store.work().join(format!("profiles/{env}.lock"));
    let text = fs::read_to_string(&lock).unwrap();
    assert!(
        text.contains("[files.tarballs]\n\"z/a.tar\" = \"") && !text.contains("b.part"),
        "{text}"
    );
    let up = ["up", env, "--locked", "--rerun", "fetch"];
    store.rockenv(&up).ok();
    let file = store.home().join("caches/tarballs/z/a.tar");
    fs::remove_file(&file).unwrap();
    // `lock` keeps the entry of a file that is missing.
    insta::assert_snapshot!(store.shows("up ENV --locked --rerun fetch --offline\nlock ENV"), @"
    $ rockenv up ENV --locked --rerun fetch --offline
    error: `--offline` is set, but these are missing: file `z/a.tar` of cache `tarballs`
    help: run once without --offline
    exit code 4
    $ rockenv lock ENV
    WORK/profiles/ENV.lock: nothing changed
    ");
    store.rockenv(&up).ok();
    fs::write(&file, "other\n").unwrap();
    insta::assert_snapshot!(store.shows("up ENV --locked --rerun fetch"), @"
    error: `WORK/profiles/ENV.lock` does not match: file `z/a.tar` in cache `tarballs` differs from the locked content
    help: remove the file, or lock it with: rockenv lock ENV --update all
    exit code 8
    ");
    assert_eq!(fs::read_to_string(&file).unwrap(), "other\n");
    store.rockenv(&["lock", env, "--update", "all"]).ok();
    store.rockenv(&up).ok();
    // `up` compares fetched files before it makes the step's snapshot.
    fs::remove_file(&file).unwrap();
    let layers = || fs::read_dir(store.home().join("layers")).unwrap().count();
    let before = layers();
    store.rockenv(&up).exits(8).says(&[
        "output of step `fetch` differs from the lock file: file `z/a.tar` in cache `tarballs`",
    ]);
    assert_eq!(layers(), before);
}

/// A step that installs the locked version, or upstream's newest one without a lock.
pub(super) const INSTALL: &str = r#"
[[volume]]
name = "index"
kind = "cache"
target = "/cache/index"
[[step]]
name = "install"
run = """
read -r version < /cache/index/newest
if [ -e /run/rockenv/pins/locked ]; then read -r name version digest < /run/rockenv/pins/locked; fi
cp /cache/index/tool-$version $HOME/tool
digest=$(sha256sum $HOME/tool | cut -c 1-64)
echo "tool $version sha256:$digest" > /run/rockenv/pins/installed
"""
[[step]]
name = "use"
run = "cp $HOME/tool $HOME/used; [ ! -e /run/rockenv/pins/locked ]"
"#;

/// Publishes a version as upstream's newest.
pub(super) fn publish(store: &TestStore, version: &str, content: &str) {
    let index = store.home().join("caches/index");
    fs::create_dir_all(&index).unwrap();
    fs::write(index.join("newest"), format!("{version}\n")).unwrap();
    fs::write(index.join(format!("tool-{version}")), content).unwrap();
}

#[test]
fn what_a_step_installs_is_locked_handed_back_and_compared() {
    let (a, b) = (TestStore::new(), TestStore::new());
    let env = a.env();
    let lock = a.work().join(format!("profiles/{env}.lock"));
    for store in [&a, &b] {
        store.profile_named(env, INSTALL);
        publish(store, "1", "one");
    }
    // A lock file knows what a step installs only after the step has run.
    a.rockenv(&["lock", env]).ok();
    assert!(!fs::read_to_string(&lock).unwrap().contains("tool"));
    a.rockenv(&["up", env, "--locked"]).ok();
    insta::assert_snapshot!(a.shows("lock ENV\nup ENV --locked"), @"
    $ rockenv lock ENV
    installed install/tool added: 1 sha256:ID
    wrote WORK/profiles/ENV.lock: 1 change
    $ rockenv up ENV --locked
    ENV: nothing to do
    ");
    let text = fs::read_to_string(&lock).unwrap();
    assert!(text.contains("[step.pins]\ntool = \"1 sha256:"), "{text}");

    // Upstream moves on. The other store still gets the locked version.
    publish(&a, "2", "two");
    publish(&b, "2", "two");
    fs::copy(&lock, b.work().join(format!("profiles/{env}.lock"))).unwrap();
    b.rockenv(&["up", env, "--locked"]).ok();
    b.sh_in(env, "cat $HOME/used").ok().prints("one");
    assert_eq!(a.keys(env), b.keys(env));

    // Without the lock file, a snapshot under the same key may hold another version.
    a.rockenv(&["up", env, "--rerun", "install"]).ok();
    a.sh_in(env, "cat $HOME/used").ok().prints("two");
    insta::assert_snapshot!(a.shows("up ENV --locked\nplan ENV --locked"), @"
    $ rockenv up ENV --locked
    error: `WORK/profiles/ENV.lock` does not match: `tool` of step `install` is 1 in the lock file, but 2 was installed
    help: rockenv up ENV --locked --rerun install
    exit code 8
    $ rockenv plan ENV --locked
    error: `WORK/profiles/ENV.lock` does not match: `tool` of step `install` is 1 in the lock file, but 2 was installed
    help: rockenv up ENV --locked --rerun install
    exit code 8
    ");
    a.rockenv(&["lock", env]).ok().says(&["nothing changed"]);
    let again = ["up", env, "--locked", "--rerun", "install"];
    a.rockenv(&again).ok();
    a.sh_in(env, "cat $HOME/used").ok().prints("one");

    // The same version with different content fails the step, before later steps build on it.
    publish(&a, "1", "other");
    a.rockenv(&again)
        .exits(8)
        .says(&["`tool` 1 of step `install` differs from the locked content"]);
}
