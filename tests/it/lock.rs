//! Tests for lock files: what they name, what `up --locked` refuses, and that two stores build the same from one file.

use std::path::Path;
use std::process::Command;

use crate::support::env::{TestStore, is_service};
use crate::support::git::{Daemon, git, repository};
use crate::support::loopfs::{LoopFs, bind};
use crate::support::run::finish;
use crate::support::template::write_recipe;
use crate::support::transcript::measured;
use fs_err as fs;

mod fetched;
mod followed;

/// Makes a repository on branch `main` with a submodule, which clones do not check out. Returns its commit.
fn upstream(directory: &Path) -> String {
    let inner = directory.join("inner");
    let outer = directory.join("outer");
    for path in [&inner, &outer] {
        repository(path, "a", "one\n");
    }
    let from = inner.display().to_string();
    git(&outer, &["submodule", "--quiet", "add", &from, "sub"]);
    git(&outer, &["commit", "--quiet", "-m", "submodule"]);
    git(&outer, &["rev-parse", "HEAD"])
}

fn steps(daemon: &Daemon) -> String {
    format!(
        r#"
hooks = ["louder"]
[params]
word = "done"
[[volume]]
name = "src"
kind = "source"
git = "git://127.0.0.1:{}/outer"
rev = "main"
target = "/v/src"
[[volume]]
name = "out"
kind = "output"
target = "/v/out"
[[step]]
name = "before"
run = "echo before > $HOME/before; echo out > /v/out/file"
[[step]]
name = "read"
inputs = ["src"]
run = "cat /v/src/a > $HOME/a; echo ${{word}} >> $HOME/a"
[[step]]
name = "gpu"
gpu = true
run = "true"
[[step]]
name = "after"
run = "cat $HOME/a > $HOME/after"
"#,
        daemon.port()
    )
}

/// Gives the store's user a profile that builds from that repository, and the hook `louder`.
fn user(store: TestStore, name: &str, daemon: &Daemon) -> TestStore {
    store.profile_named(name, &steps(daemon));
    let hook = store.work().join("hooks/louder");
    fs::create_dir_all(&hook).unwrap();
    fs::write(
        hook.join("hook.toml"),
        "schema = 1\ndescription = \"d\"\nwhy = \"w\"\nvolume = \"src\"\n\
         [[edit]]\nfile = \"a\"\nfind = \"one\"\nreplace = \"ONE\"\n",
    )
    .unwrap();
    store
}

/// Checks that the manifest omits a submodule that is not checked out: nothing was built from it.
fn manifest_names_what_is_checked_out(store: &TestStore, name: &str, outer: &Path) {
    let named = |to: &str| {
        store.rockenv(&["export", name, to]).ok();
        let manifest = store
            .work()
            .join(to)
            .join(format!("{name}.provenance.json"));
        let text = fs::read_to_string(manifest).unwrap();
        assert!(text.contains("\"source/src\""), "{text}");
        text.contains("\"source/src/sub\"")
    };
    assert!(!named("without"));
    let sources = store.home().join("sources");
    let mut checkouts = fs::read_dir(sources)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let checkout = checkouts.find(|path| path.join(".git").exists()).unwrap();
    fs::create_dir_all(checkout.join("sub")).unwrap();
    fs::copy(outer.join("sub/.git"), checkout.join("sub/.git")).unwrap();
    assert!(named("with"));
    fs::remove_file(checkout.join("sub/.git")).unwrap();
}

#[test]
fn two_stores_with_one_lock_file_have_equal_step_keys() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(directory.path());
    let first = upstream(directory.path());
    let a = TestStore::new();
    let name = a.env().to_owned();
    drop(a);
    let a = user(TestStore::new(), &name, &daemon);
    let elsewhere = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // `up --locked` builds this store's image.
    let b = TestStore::at(&elsewhere.path().join("store"));
    let b = user(b, &name, &daemon);
    let lock = a.work().join(format!("profiles/{name}.lock"));
    let shown = |words: &[&str]| a.shown(&a.rockenv(words)).replace(&name, "NAME");
    insta::assert_snapshot!(shown(&["up", &name, "--locked"]), @"
    error: there is no lock file `WORK/profiles/NAME.lock`
    help: rockenv lock NAME
    exit code 7
    ");
    a.rockenv(&["lock", &name])
        .ok()
        .says(&["1 source, 1 hook, 4 steps"]);
    let text = fs::read_to_string(&lock).unwrap();
    let inner = git(&directory.path().join("inner"), &["rev-parse", "HEAD"]);
    for part in [
        format!("commit = \"{first}\""),
        format!("sub = \"{inner}\""),
        "louder = \"".to_owned(),
        "name = \"gpu\"".to_owned(),
    ] {
        assert!(text.contains(&part), "{part} is not in\n{text}");
    }
    // Locking again writes the same bytes: locked inputs stay, whatever upstream does.
    let outer = directory.path().join("outer");
    fs::write(outer.join("a"), "one more\n").unwrap();
    git(&outer, &["commit", "--quiet", "-am", "second"]);
    a.rockenv(&["lock", &name]).ok().says(&["nothing changed"]);
    assert_eq!(fs::read_to_string(&lock).unwrap(), text);

    a.rockenv(&["up", &name, "--locked"]).ok();
    manifest_names_what_is_checked_out(&a, &name, &outer);
    fs::copy(&lock, b.work().join(format!("profiles/{name}.lock"))).unwrap();
    b.rockenv(&["up", &name, "--locked", "--offline"])
        .exits(4)
        .says(&["image `base`; source `src` from `git://", &first]);
    b.rockenv(&["up", &name, "--locked"]).ok();
    assert_eq!(a.keys(&name), b.keys(&name));
    for store in [&a, &b] {
        store
            .sh_in(&name, "cat $HOME/after")
            .ok()
            .prints("ONE\ndone");
        store
            .rockenv(&["up", &name, "--locked", "--offline"])
            .ok()
            .says(&["nothing to do"]);
    }
    // Without the lock file, `up` checks out upstream's current commit beside the locked one.
    b.rockenv(&["up", &name]).ok();
    assert_ne!(a.keys(&name), b.keys(&name));
    b.rockenv(&["up", &name, "--locked", "--offline"]).ok();
    assert_eq!(a.keys(&name), b.keys(&name));

    // Only `--update` takes a new commit.
    let old = a.work().join("old.lock");
    fs::copy(&lock, &old).unwrap();
    insta::assert_snapshot!(shown(&["lock", &name, "--update", "scr"]), @"
    error: profile `NAME` has no image or source `scr` to update
    help: choose one of: base, src, all
    exit code 7
    ");
    let second = git(&outer, &["rev-parse", "HEAD"]);
    let said = a.rockenv(&["lock", &name, "--update", "src"]).ok().text();
    let change = format!("source src: {} -> {}\n", &first[..12], &second[..12]);
    assert!(said.contains(&change), "{said}");
    let diff = ["lock", "diff", "old.lock", lock.to_str().unwrap()];
    let said = a.rockenv(&diff).ok().text();
    // The lock file has the GPU step even if the locking machine has no GPU.
    let steps = "step read: its input `src` changed\nand the 2 steps after `read`\n";
    assert_eq!(said, format!("{change}{steps}"));
    let diff = a.rockenv(&[&diff[..], &["--json"]].concat()).ok().json();
    assert_eq!(diff["changes"][0]["kind"], "source");
    assert_eq!(diff["changes"][0]["to"], second);
    assert_eq!(diff["changes"][1]["own"][0], "input src");
    assert_eq!(diff["changes"][3]["name"], "after");
    assert_eq!(diff["changes"][3]["follows"], "step read");
    a.rockenv(&["up", &name, "--locked"]).ok();
    a.sh_in(&name, "cat $HOME/after")
        .ok()
        .prints("ONE more\ndone");
}

#[test]
fn what_differs_from_the_lock_file_is_refused_by_name_and_left_alone() {
    if is_service() {
        // Nothing here reaches an engine.
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(directory.path());
    upstream(directory.path());
    let name = "locked";
    let store = user(TestStore::new(), name, &daemon);
    store.rockenv(&["lock", name]).ok();
    let refused = || {
        let [up, plan] = ["up", "plan"].map(|verb| store.shows(&format!("{verb} locked --locked")));
        assert_eq!(up, plan);
        assert!(!store.home().join("envs").join(name).exists());
        up
    };
    let profile = steps(&daemon);
    let mut said = String::new();
    for (from, to) in [
        ("echo before", "echo other"),
        ("word = \"done\"", "word = \"ready\""),
        ("rev = \"main\"", "rev = \"other\""),
        ("hooks = [\"louder\"]", ""),
        ("name = \"after\"", "name = \"later\""),
    ] {
        assert!(profile.contains(from));
        store.profile_named(name, &profile.replace(from, to));
        said += &refused();
    }
    store.profile_named(name, &format!("targets = [\"gfx1103\"]\n{profile}"));
    said += &refused();
    store.profile_named(name, &profile);
    said += &store.shows("up locked --locked --param word=x");
    let hook = store.work().join("hooks/louder/hook.toml");
    let text = fs::read_to_string(&hook).unwrap();
    fs::write(&hook, text.replace("ONE", "TWO")).unwrap();
    said += &refused();
    fs::write(&hook, text).unwrap();
    let recipe = store.work().join("images/base.toml");
    let text = fs::read_to_string(&recipe).unwrap();
    fs::write(&recipe, text.replace("rootfs", "other")).unwrap();
    said += &refused();
    fs::write(&recipe, text).unwrap();

    // The checkout may hold the user's work: `up --locked` refuses it and never repairs it.
    let sources = fs::read_dir(store.home().join("sources")).unwrap();
    let checkout = sources
        .map(|entry| entry.unwrap().path())
        .find(|path| path.join(".git").exists())
        .unwrap();
    let head = git(&checkout, &["rev-parse", "HEAD"]);
    fs::write(checkout.join("a"), "mine\n").unwrap();
    said += &refused();
    said += &store.shows("lock locked --file other.lock");
    insta::assert_snapshot!(said, @"
    error: `WORK/profiles/locked.lock` does not match: step `before` differs from the lock file: its script has changed
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: step `read` differs from the lock file: its script has changed
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: source `src` is `main` of `git://127.0.0.1:PORT/outer` in the lock file, but `other` of `git://127.0.0.1:PORT/outer` in the profile
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: hook `louder` is in the lock file, but not in use
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: step `later` is not in the lock file
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: the target is not set in the lock file, but is `gfx1103` here
    help: rockenv lock locked --update all
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: parameter `word` is not set in the lock file, but is `x` here
    help: rockenv lock locked --param 'word=x'
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: hook `louder` differs from the lock file
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: the recipe of image `base` has changed, or its `path` is in another directory
    help: rockenv lock locked
    exit code 8
    error: `WORK/profiles/locked.lock` does not match: source `src` in `STORE/sources/src-ID` is at the locked commit, but has changes
    help: git -C STORE/sources/src-ID status
    exit code 8
    error: source `src` in `STORE/sources/src-ID` has uncommitted changes, which a lock file cannot record
    help: git -C STORE/sources/src-ID status
    exit code 8
    ");
    assert_eq!(fs::read_to_string(checkout.join("a")).unwrap(), "mine\n");
    git(&checkout, &["checkout", "--quiet", "a"]);
    store.rockenv(&["plan", name, "--locked"]).ok();
    // `lock` overwrites neither the lock file of another build nor a file that is no lock file.
    let said = store.shows(
        "lock locked --target gfx1103 --file profiles/locked.lock
        lock locked --file images/base.toml",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv lock locked --target gfx1103 --file profiles/locked.lock
    error: `profiles/locked.lock` is the lock file of another build: the target is not set in the lock file, but is `gfx1103` here
    help: rockenv lock locked --target gfx1103 --file NEW.lock
    exit code 2
    $ rockenv lock locked --file images/base.toml
    error: `images/base.toml` is not a rockenv lock file
      caused by: it has no `version`
    help: rockenv lock PROFILE --file NEW.lock
    exit code 3
    ");
    assert_eq!(git(&checkout, &["rev-parse", "HEAD"]), head);
}

#[test]
fn an_image_that_comes_out_otherwise_is_thrown_away() {
    if is_service() {
        return;
    }
    let elsewhere = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let (a, b) = (
        TestStore::new(),
        TestStore::at(&elsewhere.path().join("store")),
    );
    let tree = a.work().join("tree/etc");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("os-release"), "ID=small\n").unwrap();
    for store in [&a, &b] {
        let recipe = store.work().join("images/small.toml");
        write_recipe(&recipe, &a.work().join("tree"));
        let profile = "schema = 1\nimage = \"small\"\n[[step]]\nname = \"one\"\nrun = \"true\"\n";
        fs::write(store.work().join("profiles/locked.toml"), profile).unwrap();
    }
    a.rockenv(&["lock", "locked"]).ok();
    let lock = "profiles/locked.lock";
    fs::copy(a.work().join(lock), b.work().join(lock)).unwrap();
    // A store that has not built the image yet plans the same key.
    let plan = |store: &TestStore| {
        let plan = store.rockenv(&["plan", "locked", "--locked", "--json"]);
        let plan = plan.ok().json();
        plan["plan"]["steps"][0]["key"].as_str().unwrap().to_owned()
    };
    assert_eq!(plan(&a), plan(&b));
    fs::write(tree.join("os-release"), "ID=other\n").unwrap();
    b.rockenv(&["up", "locked", "--locked"]).exits(8).says(&[
        "image `small` was built with different content",
        "help: rockenv lock locked --update small",
    ]);
    let images = fs::read_dir(b.home().join("images")).unwrap();
    let names: Vec<_> = images.map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, ["refs"]);
    // Only `--update` locks the new image.
    a.rockenv(&["lock", "locked"])
        .ok()
        .says(&["nothing changed"]);
    let said = a
        .rockenv(&["lock", "locked", "--update", "small"])
        .ok()
        .text();
    assert!(said.contains("image digest: "), "{said}");
}

#[test]
fn what_a_lock_file_names_is_kept_as_long_as_the_file_is_there() {
    let store = TestStore::new();
    let env = store.env();
    let step =
        |text: &str| format!("[[step]]\nname = \"one\"\nrun = \"echo {text} > $HOME/one\"\n");
    store.profile(&step("old"));
    store.rockenv(&["lock", env]).ok();
    store.rockenv(&["up", env, "--locked"]).ok();
    store.up_with(&step("new"));
    // A machine that stopped during a write leaves such a file.
    fs::write(store.home().join("locks/.tmp-a"), "").unwrap();
    // `gc` frees what it can, and fails because that is less than requested.
    store.rockenv(&["gc", "--free", "900T"]).exits(10);
    let roots = store.rockenv(&["gc", "--roots"]).ok().text();
    let lock = store.work().join(format!("profiles/{env}.lock"));
    let why = format!("lock file {} names it", lock.display());
    assert!(
        roots
            .lines()
            .any(|line| line.contains("(one)") && line.contains(&why)),
        "{roots}"
    );
    store.profile(&step("old"));
    insta::assert_snapshot!(store.shows("up ENV --locked"), @"
    ENV: 1 step, 1 done before
    ENV: done; to enter it: rockenv shell ENV
    ");
    // A damaged lock file still keeps what it named when it was last read.
    fs::write(&lock, "version = 1\n").unwrap();
    let unread = store.rockenv(&["gc", "--roots"]).ok();
    let why = |verb: &str| {
        format!(
            "lock file {} (which cannot be {verb} now) names it",
            lock.display()
        )
    };
    assert!(unread.text().contains(&why("read")), "{unread:?}");
    store.rockenv(&["up", env]).ok();
    // The same holds while the lock file's directory is not mounted.
    let away = store.work().join("away");
    fs::rename(store.work().join("profiles"), &away).unwrap();
    let unseen = store.rockenv(&["gc", "--roots"]).ok();
    assert!(unseen.text().contains(&why("seen")), "{unseen:?}");
    let help = format!("rm {}/locks/", store.home().display());
    assert!(unseen.err.contains(&help), "{unseen:?}");
    let swept = store.rockenv(&["gc", "--free", "900T"]).exits(10);
    assert!(swept.err.contains("cannot be seen now"), "{swept:?}");
    fs::rename(&away, store.work().join("profiles")).unwrap();
    fs::remove_file(&lock).unwrap();
    let roots = store.rockenv(&["gc", "--roots"]).ok().text();
    assert!(!roots.contains("lock file"), "{roots}");
}

/// Lock files name keys. A layer that was built again has a new id under the same key.
#[test]
fn what_was_built_again_is_kept_by_its_key() {
    let store = TestStore::new();
    let env = store.env();
    let step = |text: &str| format!("[[step]]\nname = 'one'\nrun = 'echo {text} > $HOME/one'\n");
    store.up_with(&step("old"));
    store.rockenv(&["up", env, "--rerun", "one"]).ok();
    store.rockenv(&["lock", env]).ok();
    store.up_with(&step("new"));
    store.rockenv(&["gc", "--free", "900T"]).exits(10);
    store.profile(&step("old"));
    store
        .rockenv(&["up", env, "--locked"])
        .ok()
        .says(&["1 done before"]);
    // A build that is refused does not replace the lock file that the env was built from.
    let needs = "[resources]\ndisk = '1000T'\n";
    store.profile(&format!("{needs}{}", step("other")));
    store.rockenv(&["lock", env]).ok();
    store.rockenv(&["up", env, "--locked"]).exits(9);
    store.rockenv(&["verify", env]).ok();
}

#[test]
fn a_lock_file_on_a_stick_keeps_what_it_names_while_that_is_unplugged() {
    let store = TestStore::new();
    let stick = LoopFs::in_memory(1 << 20);
    let at = store.work().join("stick");
    fs::create_dir(&at).unwrap();
    std::os::unix::fs::chown(stick.path(), Some(1234), Some(1234)).unwrap();
    let plugged = bind(stick.path(), &at);
    let file = at.join("one.lock").display().to_string();
    store.profile("[[step]]\nname = \"one\"\nrun = \"true\"\n");
    store.rockenv(&["lock", store.env(), "--file", &file]).ok();
    store.up();
    let kept = || store.rockenv(&["gc", "--roots"]).ok().text();
    let named = format!("lock file {file}");
    assert!(kept().contains(&format!("{named} names it")));
    drop(plugged);
    assert!(kept().contains(&format!("{named} (which cannot be seen now) names it")));
    let plugged = bind(stick.path(), &at);
    fs::remove_file(&file).unwrap();
    assert!(!kept().contains(&named));
    drop(plugged);
}

#[test]
fn offline_steps_have_no_network() {
    let store = TestStore::new();
    let env = store.env();
    store.profile("[[step]]\nname = \"ask\"\nrun = \"cat /sys/class/net/*/address > $HOME/net; [ $(grep -c . $HOME/net) = 1 ]\"\n");
    store.rockenv(&["image", "build", "base"]).ok();
    store.rockenv(&["up", env, "--offline"]).ok();
    store
        .sh_in(env, "cat $HOME/net")
        .ok()
        .prints("00:00:00:00:00:00");
    store.profile("[[step]]\nname = \"fetch\"\nrun = \"false\"\n");
    insta::assert_snapshot!(measured(store.shows("up ENV --offline")), @"
    ENV: 1 step, 0 done before
    step 1/1 fetch …
    step 1/1 fetch … failed after TIME, cpu TIME, memory SIZE, disk +SIZE
    log: STORE/envs/ENV/logs/DATE/01-fetch.log
    inspect: rockenv shell --failed ENV
    error: step `fetch` failed with exit code 1; it had no network because of `--offline`
    help: fix it, then resume with: rockenv up ENV
    exit code 5
    ");
}

#[test]
fn the_repository_that_rockenv_is_started_from_stays_as_it_is() {
    let directory = tempfile::tempdir().unwrap();
    let daemon = Daemon::start(directory.path());
    let first = upstream(directory.path());
    let store = TestStore::new();
    let env = store.env().to_owned();
    let store = user(store, &env, &daemon);
    let own = store.work().join("own");
    repository(&own, "mine", "first\n");
    fs::write(own.join("mine"), "staged\n").unwrap();
    git(&own, &["add", "mine"]);
    fs::write(own.join("mine"), "not staged\n").unwrap();
    // git runs as the build user.
    let given = Command::new("chown")
        .args(["-R", "1234:1234"])
        .arg(&own)
        .status();
    assert!(given.unwrap().success());
    let state = || {
        let asked = [
            &["diff", "HEAD"][..],
            &["diff", "--cached"],
            &["status", "--porcelain=v2", "--branch"],
            &["for-each-ref"],
            &["config", "--local", "--list"],
        ];
        asked.map(|arguments| git(&own, arguments))
    };
    let before = state();
    // git sets these variables for hooks of `git commit --all` and in linked worktrees.
    let mut command = store.command(&["lock", &env]);
    command
        .env("GIT_DIR", own.join(".git"))
        .env("GIT_WORK_TREE", &own)
        .env("GIT_INDEX_FILE", own.join(".git/index"))
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "core.autocrlf")
        .env("GIT_CONFIG_VALUE_0", "true");
    let locked = finish("lock".to_owned(), command);
    assert_eq!(state(), before, "{}", locked.err);
    locked.ok();
    let lock = store.work().join(format!("profiles/{env}.lock"));
    let text = fs::read_to_string(lock).unwrap();
    assert!(text.contains(&first), "{text}");
    // Keys contain only the commit of a clone, so the clone must not have the caller's line endings.
    let sources = fs::read_dir(store.home().join("sources")).unwrap();
    let mut files = sources.map(|entry| entry.unwrap().path().join("a"));
    let file = files.find(|file| file.exists()).unwrap();
    assert_eq!(fs::read_to_string(file).unwrap(), "one\n");
}
