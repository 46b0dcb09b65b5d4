//! What `up` takes from a lock file: parameters with their hooks and engine, steps by key, and help that works. Also
//! servers that do not answer.

use super::fetched::{INSTALL, publish};
use super::*;

#[test]
fn a_step_is_compared_by_key_whatever_its_name() {
    let store = TestStore::new();
    let [a, b, c] = ["a", "b", "c"].map(|letter| format!("{}{letter}", store.env()));
    store.profile_named(&a, &INSTALL.replace("\"install\"", "\"alpha\""));
    store.profile_named(&b, &INSTALL.replace("\"install\"", "\"beta\""));
    publish(&store, "1", "one");
    store.rockenv(&["up", &b]).ok();
    store.rockenv(&["lock", &b]).ok();
    store.rockenv(&["rm", "--yes", &b]).ok();
    publish(&store, "2", "two");
    store.rockenv(&["up", &a, "--rerun", "alpha"]).ok();
    insta::assert_snapshot!(store.shows("up ENVb --name ENVc --locked"), @"
    error: `WORK/profiles/ENVb.lock` does not match: `tool` of step `beta` is 1 in the lock file, but 2 was installed
    help: rockenv up ENVb --name ENVc --locked --rerun beta
    exit code 8
    ");
    let up = ["up", &b, "--name", &c, "--locked", "--rerun", "beta"];
    store.rockenv(&up).ok();
    store.sh_in(&c, "cat $HOME/used").ok().prints("one");
}

#[test]
fn parameters_of_a_lock_file_bring_their_hooks_and_engine() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let env = store.env();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), "one\n").unwrap();
    let hook = store.work().join("hooks/louder");
    fs::create_dir_all(&hook).unwrap();
    fs::write(
        hook.join("hook.toml"),
        "schema = 1\ndescription = \"d\"\nwhy = \"w\"\nvolume = \"src\"\n\
         [[edit]]\nfile = \"a\"\nfind = \"one\"\nreplace = \"ONE\"\n",
    )
    .unwrap();
    store.profile(
        r#"
release-param = "version"
[params]
version = "2.1"
[releases."2.0"]
hooks = ["louder"]
[releases."2.1"]
description = "d"
[[volume]]
name = "src"
kind = "source"
path = "../source"
target = "/v/src"
[[step]]
name = "read"
inputs = ["src"]
run = "cat /v/src/a > $HOME/a; echo ${version}"
"#,
    );
    let lock = |version: &str| format!("profiles/{env}-{version}.lock");
    store.up();
    store.rockenv(&["lock", env, "--release", "2.0"]).ok();
    store
        .rockenv(&["lock", env, "--file", &lock("2.0")])
        .ok()
        .says(&["nothing changed"]);
    // The lock file is for env `{env}-2.0`, so the engine recorded for `{env}` does not matter.
    let record = store.env_dir().join("record.json");
    let text = fs::read_to_string(&record).unwrap();
    let other = text.replace("\"engine\": \"nspawn\"", "\"engine\": \"docker\"");
    assert_ne!(other, text);
    fs::write(&record, other).unwrap();
    let up = ["up", env, "--locked", "--lock-file", &lock("2.0")];
    store.rockenv(&up).ok();
    fs::write(&record, text).unwrap();
    store
        .rockenv(&[
            "exec",
            &format!("{env}-2.0"),
            "--",
            "sh",
            "-c",
            "cat $HOME/a",
        ])
        .ok()
        .prints("ONE");
    // Release 2.1 has no hooks.
    store
        .rockenv(&[
            "lock",
            env,
            "--file",
            "other.lock",
            "--param",
            "version=2.1",
        ])
        .ok();
    store
        .rockenv(&["up", env, "--locked", "--lock-file", "other.lock"])
        .ok();
}

#[test]
fn help_for_a_difference_can_be_typed() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let env = store.env();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("a"), "one\n").unwrap();
    git(&source, &["init", "--quiet"]);
    git(&source, &["add", "."]);
    git(&source, &["commit", "--quiet", "-m", "one"]);
    store.profile(
        r#"
variant = "a"
[variants.a]
description = "a"
[variants.b]
description = "b"
[[volume]]
name = "src"
kind = "source"
path = "../source"
target = "/v/src"
[[step]]
name = "read"
inputs = ["src"]
run = "cat /v/src/a"
"#,
    );
    let lock = format!("profiles/{env}.lock");
    store.rockenv(&["lock", env]).ok();
    let up = "up ENV --locked --lock-file profiles/ENV.lock";
    let mut said = store.shows(&format!("{up} --variant b"));
    store
        .rockenv(&["lock", env, "--variant", "b", "--file", "NEW.lock"])
        .ok();
    fs::write(source.join("a"), "two\n").unwrap();
    said += &store.shows(up);
    git(&source, &["commit", "--quiet", "-am", "two"]);
    said += &store.shows(up);
    insta::assert_snapshot!(said, @"
    error: `profiles/ENV.lock` does not match: the variant is `a` in the lock file, but `b` here
    help: rockenv lock ENV --variant b --file NEW.lock, then: rockenv up ENV --variant b --lock-file NEW.lock --locked
    exit code 8
    error: `profiles/ENV.lock` does not match: source `src` in `WORK/profiles/../source` is at the locked commit, but has changes
    help: git -C WORK/profiles/../source status
    exit code 8
    error: `profiles/ENV.lock` does not match: source `src` in `WORK/profiles/../source` is at commit ID, but ID is locked
    help: rockenv lock ENV --file profiles/ENV.lock
    exit code 8
    ");
    store.rockenv(&["lock", env, "--file", &lock]).ok();
    store
        .rockenv(&["up", env, "--locked", "--lock-file", &lock])
        .ok();
    let up = "up ENV --locked --lock-file bad.lock";
    let mut said = String::new();
    for path in ["../../envs/evil", "/abs"] {
        let text = fs::read_to_string(store.work().join(&lock)).unwrap();
        let text = format!("[files.c]\n\"{path}\" = \"{}\"\n\n{text}", "0".repeat(64));
        let (files, rest) = text.split_once("\n\n").unwrap();
        let text = rest.replacen("[image]", &format!("{files}\n\n[image]"), 1);
        fs::write(store.work().join("bad.lock"), text).unwrap();
        said += &store.shows(up);
    }
    let text = fs::read_to_string(store.work().join(&lock)).unwrap();
    let text = text.replacen("\nfrom = ", "\nmachine-targets = [\"gfx0\"]\nfrom = ", 1);
    fs::write(store.work().join("bad.lock"), text).unwrap();
    said += &store.shows(up);
    insta::assert_snapshot!(said, @"
    error: `bad.lock` is not a rockenv lock file
      caused by: `../../envs/evil` is not a path inside a volume
    help: rockenv lock PROFILE --file NEW.lock
    exit code 3
    error: `bad.lock` is not a rockenv lock file
      caused by: `/abs` is not a path inside a volume
    help: rockenv lock PROFILE --file NEW.lock
    exit code 3
    error: `bad.lock` is not a rockenv lock file
      caused by: unknown target `gfx0`
    help: rockenv lock PROFILE --file NEW.lock
    exit code 3
    ");
}

#[test]
fn an_image_is_locked_by_the_name_that_the_profile_has() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let images = store.work().join("images");
    store.rockenv(&["image", "build", "base"]).ok();
    fs::copy(images.join("base.toml"), images.join("base2.toml")).unwrap();
    let profile = "schema = 1\nimage = \"base2\"\n[[step]]\nname = \"one\"\nrun = \"true\"\n";
    fs::write(store.work().join("profiles/locked.toml"), profile).unwrap();
    store
        .rockenv(&["lock", "locked"])
        .ok()
        .says(&["image base2 with"]);
    store.rockenv(&["plan", "locked", "--locked"]).ok();
}

#[test]
fn other_targets_of_a_profile_are_adopted_with_everything() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let profile = |target: &str| {
        let step = "[[step]]\nname = \"one\"\nrun = \"true\"\n";
        store.profile_named("locked", &format!("targets = [\"{target}\"]\n{step}"));
    };
    profile("gfx1103");
    store.rockenv(&["lock", "locked"]).ok();
    profile("gfx1201");
    // `--update` does not turn the file into one for another target.
    let said = store.shows(
        "plan locked --locked
        lock locked
        lock locked --update all --target gfx1100 --file profiles/locked.lock",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv plan locked --locked
    error: `WORK/profiles/locked.lock` does not match: the target is `gfx1103` in the lock file, but `gfx1201` here
    help: rockenv lock locked --update all
    exit code 8
    $ rockenv lock locked
    error: `WORK/profiles/locked.lock` is the lock file of another build: the target is `gfx1103` in the lock file, but `gfx1201` here
    help: rockenv lock locked --update all
    exit code 2
    $ rockenv lock locked --update all --target gfx1100 --file profiles/locked.lock
    error: `profiles/locked.lock` is the lock file of another build: the target is `gfx1103` in the lock file, but `gfx1100` here
    help: rockenv lock locked --target gfx1100 --file NEW.lock
    exit code 2
    ");
    store
        .rockenv(&["lock", "locked", "--update", "all"])
        .ok()
        .says(&["wrote", "profiles/locked.lock"]);
    store.rockenv(&["plan", "locked", "--locked"]).ok();
}

#[test]
fn parameters_of_a_lock_file_that_the_profile_does_not_take_are_the_file_s() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let profile = |param: &str, step: &str| {
        let step = format!("[[step]]\nname = \"one\"\nrun = \"true\"\n{step}");
        store.profile_named("locked", &format!("[params]\n{param} = \"/a\"\n{step}"));
    };
    profile("word", "");
    let lock = "profiles/locked.lock";
    store
        .rockenv(&["lock", "locked", "--param", "word=b", "--file", lock])
        .ok();
    profile("name", "");
    insta::assert_snapshot!(store.shows("plan locked --locked --lock-file profiles/locked.lock\nlock locked --file profiles/locked.lock"), @"
    $ rockenv plan locked --locked --lock-file profiles/locked.lock
    error: `profiles/locked.lock` does not match: profile `locked` has no parameter `word`
    help: rm profiles/locked.lock, then: rockenv lock locked --file profiles/locked.lock
    exit code 8
    $ rockenv lock locked --file profiles/locked.lock
    error: `profiles/locked.lock` does not match: profile `locked` has no parameter `word`
    help: rm profiles/locked.lock, then: rockenv lock locked --file profiles/locked.lock
    exit code 8
    ");
    profile("word", "workdir = \"${word}\"\n");
    insta::assert_snapshot!(store.shows("plan locked --locked --lock-file profiles/locked.lock"), @"
    error: `profiles/locked.lock` does not match: parameter `word=b` is not valid in WORK/profiles/locked.toml:8: `b` is not an absolute path
    help: rm profiles/locked.lock, then: rockenv lock locked --file profiles/locked.lock
    exit code 8
    ");
}

#[test]
fn a_server_that_does_not_answer_is_unavailable_and_its_password_is_not_shown() {
    if is_service() {
        return;
    }
    let store = TestStore::new();
    let env = store.env();
    let profile = "[[volume]]\nname = 'src'\nkind = 'source'\ngit = 'http://me:PASSWORD@127.0.0.1:9/x.git'\n\
         target = '/v/src'\n[[step]]\nname = 'read'\ninputs = ['src']\nrun = 'true'\n";
    store.profile(profile);
    for words in [
        &["up", env][..],
        &["lock", env],
        &["lock", env, "--update", "src"],
    ] {
        let ran = store.rockenv(words).exits(4).says(&[
            "http://127.0.0.1:9/x.git",
            "help: git ls-remote http://127.0.0.1:9/x.git",
        ]);
        assert!(!ran.text().contains("PASSWORD"), "{}", ran.text());
        assert!(!ran.err.contains("PASSWORD"), "{}", ran.err);
    }
    // sudo does not pass on the variable of an ssh agent.
    store.profile(&profile.replace("http://me:PASSWORD@", "ssh://me@"));
    let help = "help: git ls-remote ssh://me@127.0.0.1:9/x.git; if that works: sudo --preserve-env=SSH_AUTH_SOCK";
    store.rockenv(&["up", env]).exits(4).says(&[help]);
}

/// A profile with a source at an address where nobody answers.
const UNREACHABLE: &str = "[[volume]]\nname = 'src'\nkind = 'source'\ngit = 'git://127.0.0.1:9/x'\nrev = 'main'\n\
    target = '/v/src'\n[[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n";

#[test]
fn a_lock_file_that_cannot_be_written_is_refused_before_the_work() {
    let store = TestStore::new();
    store.profile(UNREACHABLE);
    insta::assert_snapshot!(store.shows("lock ENV --file absent/p.lock"), @"
    error: cannot write to `absent/p.lock`
      caused by: `absent` does not exist
    help: name a file in an existing directory
    exit code 7
    ");
}

#[test]
fn a_plan_without_network_names_what_up_would_lack() {
    let store = TestStore::new();
    store.profile(UNREACHABLE);
    let missing = "`--offline` is set, but these are missing: source `src` from";
    store
        .rockenv(&["up", store.env(), "--offline"])
        .exits(4)
        .says(&[missing]);
    let plan = ["plan", store.env(), "--offline", "--check", "--json"];
    let plan = store.rockenv(&plan).exits(9).json();
    let reason = plan["refused"]["reasons"][0].as_str().unwrap().to_owned();
    assert!(reason.starts_with(missing), "{reason}");
}
