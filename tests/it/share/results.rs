//! Results in output volumes come with their snapshots: to another env, after a loss, and to another machine.

use std::path::PathBuf;

use fs_err as fs;
use serde_json::Value;

use super::Two;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::wait_until;

const STEPS: &str = r#"
[[volume]]
name = "out"
kind = "output"
target = "/v/out"
[[step]]
name = "make"
run = "mkdir -p /v/out/sub; echo one > /v/out/sub/one; echo all > /v/out/all"
[[step]]
name = "use"
run = "cat /v/out/sub/one > ~/used"
[[step]]
name = "add"
run = "echo more >> /v/out/all"
"#;

fn out(store: &TestStore, env: &str) -> PathBuf {
    store.home().join("outputs").join(env).join("out")
}

/// Returns the contents of `sub/one` and `all` in an output.
fn found(store: &TestStore, env: &str) -> Vec<String> {
    let read = |name: &str| fs::read_to_string(out(store, env).join(name)).unwrap_or_default();
    ["sub/one", "all"].map(read).to_vec()
}

#[test]
fn results_come_with_the_snapshots() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let two = Two::new(TestStore::new(), TestStore::on(&disk));
    let name = two.pushed(STEPS);
    let whole = ["one\n", "all\nmore\n"];
    assert_eq!(found(&two.one, name), whole);

    // Another env gets the results although no step runs in it.
    let second = format!("{name}-b");
    let up = |words: &[&str]| {
        let words = [&["up", name, "--name", &second], words].concat();
        two.one.rockenv(&words)
    };
    let plan = ["plan", name, "--name", &second];
    let planned = two.one.rockenv(&plan).ok().text();
    assert!(
        planned.contains("its results go to this env's output"),
        "{planned}"
    );
    up(&[]).ok().says(&["3 steps, 3 done before"]);
    assert_eq!(found(&two.one, &second), whole);
    up(&[]).ok().says(&["nothing to do"]);

    // Lost results come back. A user's files stay, even in the place of a result.
    let place = out(&two.one, &second);
    fs::remove_file(place.join("sub/one")).unwrap();
    fs::write(place.join("mine"), "mine").unwrap();
    up(&[]).ok();
    assert_eq!(found(&two.one, &second), whole);
    fs::write(place.join("sub/one"), "other").unwrap();
    let said = two.one.shows(
        "up ENV --name ENV-b
        up ENV --name ENV-b --rerun use
        export ENV-b exported",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv up ENV --name ENV-b
    warning: `sub/one` in output volume `out` is not as step `make` left it
    error: env `ENV-b` is done, but 1 result is not this build's: `sub/one` in output volume `out`
    help: move the files away, then run: rockenv up ENV --name ENV-b; or make them again: rockenv up ENV --name ENV-b --rerun make
    exit code 8
    $ rockenv up ENV --name ENV-b --rerun use
    ENV-b: 3 steps, 1 done before
    error: `sub/one` in output volume `out` is not as step `make` left it; step `use` would use the changed file
    help: move it away, or make it again: rockenv up ENV --name ENV-b --rerun make
    exit code 8
    $ rockenv export ENV-b exported
    error: `STORE/outputs/ENV-b/out/sub/one` differs from the result of a step of env `ENV-b`: it has different content
    help: move it away: `rockenv up ENV --name ENV-b` restores the step's file
    exit code 8
    ");
    assert_eq!(found(&two.one, &second), ["other", whole[1]]);
    let directory = two.one.work().join("exported");
    up(&["--rerun", "make"]).ok();
    fs::remove_file(place.join("sub/one")).unwrap();
    insta::assert_snapshot!(two.one.shows("export ENV-b exported"), @"
    error: `out/sub/one`, written by a step of env `ENV-b`, is missing from its output
    help: rockenv up ENV --name ENV-b restores it
    exit code 8
    ");
    assert!(!directory.exists());
    up(&[]).ok();
    assert_eq!(found(&two.one, &second), whole);
    // `export` writes only results.
    insta::assert_snapshot!(two.one.shows("export ENV-b exported"), @"
    warning: left out, because no step of env `ENV-b` as it is now left it: `out/mine`
    warning: env `ENV-b` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV`, then `rockenv up ENV --name ENV-b --locked`
    exported 2 files; exported/ENV-b.provenance.json describes them
    ");
    assert!(!directory.join("out/mine").exists());
    assert_eq!(fs::read_to_string(place.join("mine")).unwrap(), "mine");

    // A fork, and another machine that has nothing yet and another kind of store.
    let fork = format!("{name}-f");
    two.one.rockenv(&["fork", name, &fork]).ok();
    two.one.rockenv(&["up", name, "--name", &fork]).ok();
    assert_eq!(found(&two.one, &fork), whole);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["3 done before"]);
    assert_eq!(found(&two.other, name), whole);
    two.run(&two.other, &["push", name])
        .ok()
        .says(&["0 layers sent"]);
    for store in [&two.one, &two.other] {
        store.rockenv(&["fsck"]).ok();
    }
}

/// The manifest names the last step, and the export has no files that this step did not leave.
#[test]
fn an_env_that_was_built_up_to_a_step_can_be_exported() {
    let store = TestStore::new();
    let name = store.env();
    store.profile_named(name, STEPS);
    store.rockenv(&["up", name, "--until", "make"]).ok();
    fs::write(out(&store, name).join("later"), "of another build").unwrap();
    let directory = store.work().join("exported");
    let export = ["export", name, directory.to_str().unwrap()];
    store.rockenv(&export).ok();
    let text = fs::read(directory.join(format!("{name}.provenance.json"))).unwrap();
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    let subjects = manifest["subject"].as_array().unwrap().iter();
    let names: Vec<&str> = subjects
        .map(|file| file["name"].as_str().unwrap())
        .collect();
    assert_eq!(names, ["out/all", "out/sub/one"]);
    let internal = &manifest["predicate"]["buildDefinition"]["internalParameters"];
    assert_eq!(internal["until"], "make");
    let steps = internal["steps"].as_array().unwrap();
    assert_eq!(steps.len(), 1, "{internal}");
    // After a rollback to the same step, the env counts as unfinished.
    store.rockenv(&["up", name]).ok();
    store.rockenv(&["rollback", name, "make"]).ok();
    insta::assert_snapshot!(store.shows("export ENV other"), @"
    error: env `ENV` is not finished: the inputs of its outputs are not known yet
    help: rockenv up ENV, or rockenv status ENV
    exit code 8
    ");
}

#[test]
fn envs_with_one_directory_for_their_output_do_not_stop_each_other() {
    let store = TestStore::new();
    let shared = store.work().join("shared");
    fs::create_dir(&shared).unwrap();
    std::os::unix::fs::chown(&shared, Some(1234), Some(1234)).unwrap();
    let path = format!("kind = \"output\"\npath = {shared:?}\n");
    store.profile(&STEPS.replace("kind = \"output\"\n", &path));
    store.up();
    // The steps continue with what another env, for another target say, left there.
    let all = || fs::read_to_string(shared.join("all")).unwrap();
    fs::write(shared.join("all"), "another one's\n").unwrap();
    store
        .rockenv(&["up", store.env(), "--rerun", "use"])
        .ok()
        .says(&["`all` in output volume `out` is not as step `make` left it; leaving it as it is"]);
    assert_eq!(all(), "another one's\nmore\n");
    // Other envs cannot use the snapshots of these steps.
    let listed = store.rockenv(&["snapshot", "ls", store.env()]).ok().text();
    assert_eq!(listed.matches("incremental").count(), 2, "{listed}");
    let other = format!("{}-other", store.env());
    let plan = ["plan", store.env(), "--name", &other];
    let planned = store.rockenv(&plan).ok().text();
    assert!(planned.contains("`up` would run 2 steps"), "{planned}");
}

/// Not every tool sets a new time, and a new version often has the same size.
#[test]
fn a_file_of_the_same_size_and_time_is_told_apart_by_its_content() {
    let store = TestStore::new();
    let env = store.env();
    store.profile(
        "[params]\nv = 'AAA'\n[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
         [[step]]\nname = 'make'\nrun = 'printf %s ${v} > /v/out/f; touch -d @0 /v/out/f'\n",
    );
    let is = |env: &str| fs::read_to_string(out(&store, env).join("f")).unwrap();
    let up = |env: &str, v: &str| {
        let param = format!("v={v}");
        store.rockenv(&["up", store.env(), "--param", &param, "--name", env])
    };
    // The first env builds the snapshots that the others then hit.
    let envs = ["other", "second", "third"].map(|name| format!("{env}-{name}"));
    let [other, second, third] = envs.each_ref().map(String::as_str);
    up(other, "BBB").ok();
    up(second, "AAA").ok();
    assert_eq!(is(second), "AAA");
    up(second, "BBB").ok();
    assert_eq!(is(second), "BBB");
    store.rockenv(&["status", second, "--check"]).ok();
    // A user's file that looks like the step's result is still the user's.
    up(third, "AAA").ok();
    let file = out(&store, third).join("f");
    fs::write(&file, "CCC").unwrap();
    let opened = fs::File::options().write(true).open(&file).unwrap();
    let times = std::fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
    opened.file().set_times(times).unwrap();
    up(third, "BBB").exits(8).says(&["leaving it as it is"]);
    assert_eq!(is(third), "CCC");
    store.rockenv(&["--yes", "rm", other, second, third]).ok();
}

const OUT: &str = "[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n";

/// Returns the names in an env's output.
fn names(store: &TestStore, env: &str) -> Vec<String> {
    let entries = fs::read_dir(out(store, env)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

/// A resumed step does not rewrite what it wrote before it failed.
#[test]
fn results_of_a_failed_run_are_results_of_the_resumed_step() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    let (env, other) = (store.env(), format!("{}-other", store.env()));
    store.profile(&format!(
        "{OUT}[[volume]]\nname = 'b'\nkind = 'build'\ntarget = '/v/b'\n[[step]]\nname = 'make'\nrun = '''\n\
         [ -e /v/out/a ] || echo a > /v/out/a; mkdir -p /v/out/d\n\
         if [ ! -e /v/b/go ]; then touch /v/b/go; exit 1; fi\n\
         if [ ! -e /v/b/on ]; then touch /v/b/on; echo b > /v/out/b; sleep 1000; fi\necho c > /v/out/c'''\n"
    ));
    store.rockenv(&["up", env]).exits(5);
    fs::write(out(&store, env).join("notes"), "mine").unwrap();
    // The second run is killed, so nothing records the files at its end.
    let up = store.start(&["up", env]);
    let b = out(&store, env).join("b");
    wait_until("the step to write", || {
        fs::read(&b).is_ok_and(|text| text == b"b\n")
    });
    up.signal(nix::sys::signal::Signal::SIGKILL);
    up.wait();
    fs::write(out(&store, env).join("meanwhile"), "mine").unwrap();
    store.up();
    let said = store.rockenv(&["up", env, "--name", &other]).ok();
    said.says(&["1 step, 1 done before"]);
    assert_eq!(names(&store, &other), ["a", "b", "c", "d", "meanwhile"]);
    // The next build also keeps every file that may be the user's.
    store.rockenv(&["up", env, "--rerun", "make"]).exits(5);
    assert_eq!(names(&store, env), ["a", "b", "d", "meanwhile", "notes"]);
    store.rockenv(&["fsck"]).ok();
    store.rockenv(&["--yes", "rm", &other]).ok();
}

/// `cp -u`, `rsync` and `cmake --install` work like this.
#[test]
fn a_step_that_leaves_unchanged_files_alone_has_all_its_results() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    let (env, other) = (store.env(), format!("{}-other", store.env()));
    store.profile(&format!(
        "[params]\nv = '1'\n{OUT}[[volume]]\nname = 'b'\nkind = 'build'\ntarget = '/v/b'\n\
         [[step]]\nname = 'build'\nrun = 'echo library > /v/b/lib.so; touch -d 2020-01-01 /v/b/lib.so'\n\
         [[step]]\nname = 'install'\nrun = 'cp -pu /v/b/lib.so /v/out/lib.so; echo ${{v}} > /v/out/version'\n"
    ));
    let up = |words: &[&str]| store.rockenv(&[&["up", env], words].concat()).ok();
    up(&[]);
    up(&["--param", "v=2"]);
    assert_eq!(names(&store, env), ["lib.so", "version"]);
    up(&["--param", "v=2", "--name", &other]).says(&["2 steps, 2 done before"]);
    assert_eq!(names(&store, &other), ["lib.so", "version"]);
    // A fork gets the results of the rerun.
    up(&["--param", "v=2", "--rerun", "install"]);
    let fork = format!("{env}-fork");
    store.rockenv(&["fork", env, &fork]).ok();
    assert_eq!(names(&store, &fork), ["lib.so", "version"]);
    up(&["--param", "v=2", "--name", &fork]).says(&["nothing to do"]);
    assert_eq!(names(&store, &fork), ["lib.so", "version"]);
    store.rockenv(&["--yes", "rm", &other, &fork]).ok();
}

#[test]
fn no_step_sees_results_of_an_older_build() {
    let store = TestStore::new();
    let (env, other) = (store.env(), format!("{}-other", store.env()));
    let steps = format!(
        "{OUT}[[step]]\nname = 'one'\nrun = 'mkdir -p /v/out/v1/empty; echo x > /v/out/v1/lib; ln -s lib /v/out/v1/link; [ ! -e /v/out/mine ] || echo step >> /v/out/mine; echo v1 > /v/out/both'\n\
         [[step]]\nname = 'two'\nrun = 'cd /v/out; find . | sort > ~/list; cp ~/list .'\n"
    );
    store.profile(&steps);
    store.up();
    // Files that the user made or changed stay.
    let place = out(&store, env);
    for (name, text) in [("mine", "mine"), ("v1/mine", "mine"), ("v1/lib", "changed")] {
        fs::write(place.join(name), text).unwrap();
    }
    // The step also writes to this file, but did not create it.
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o666);
    fs::set_permissions(place.join("mine"), mode).unwrap();
    for build in ["v2", "v3"] {
        store.profile(&steps.replace("v1", build));
        store.up();
        assert_eq!(names(&store, env), ["both", "list", "mine", "v1", build]);
        let inside = fs::read_dir(place.join("v1")).unwrap();
        let inside = inside.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut inside: Vec<String> = inside.collect();
        inside.sort();
        assert_eq!(inside, ["lib", "mine"]);
        assert_eq!(fs::read(place.join("v1/lib")).unwrap(), b"changed");
    }
    // `.earlier` has the results that no later build made again, and no others.
    let earlier = place.join("../.earlier/out");
    assert_eq!(fs::read(earlier.join("v2/lib")).unwrap(), b"x\n");
    assert!(earlier.join("v1/link").is_symlink() && !earlier.join("both").exists());
    assert!(!earlier.join("v3").exists());
    store.rockenv(&["du"]).ok();
    store.rockenv(&["fsck"]).ok();
    // Once the user's files are gone, a build is like the first one.
    fs::remove_dir_all(place.join("v1")).unwrap();
    fs::remove_file(place.join("mine")).unwrap();
    store.profile(&steps.replace("v1", "v4"));
    store.up();
    let said = store.rockenv(&["up", env, "--name", &other]).ok();
    said.says(&["2 steps, 2 done before"]);
    let list = fs::read_to_string(out(&store, &other).join("list")).unwrap();
    assert_eq!(list, ".\n./both\n./v4\n./v4/empty\n./v4/lib\n./v4/link\n");
    // The same if no step runs.
    store.profile(&steps.replace("v1", "v5"));
    store.rockenv(&["up", env, "--name", &other]).ok();
    assert_eq!(names(&store, env), ["both", "list", "v4"]);
    store.up().says(&["2 steps, 2 done before"]);
    assert_eq!(names(&store, env), ["both", "list", "v5"]);
    store.rockenv(&["--yes", "rm", &other]).ok();
}
