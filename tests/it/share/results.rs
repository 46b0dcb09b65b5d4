//! What steps leave in output volumes comes with their snapshots: to another env, after it was lost, and to another machine.

use std::path::PathBuf;

use fs_err as fs;
use serde_json::Value;

use super::Two;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};

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

/// Returns what is in an output, by path.
fn found(store: &TestStore, env: &str) -> Vec<String> {
    let read = |name: &str| fs::read_to_string(out(store, env).join(name)).unwrap_or_default();
    ["sub/one", "all"].map(read).to_vec()
}

#[test]
fn results_come_with_the_snapshots() {
    let disk = LoopFs::new(Kind::Btrfs);
    let two = Two::new(TestStore::new(), TestStore::on(&disk));
    let name = two.pushed(STEPS);
    let whole = ["one\n", "all\nmore\n"];
    assert_eq!(found(&two.one, name), whole);

    // Another env, in which no step runs.
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

    // What was lost comes back; what somebody made stays, in the place of a result too.
    let place = out(&two.one, &second);
    fs::remove_file(place.join("sub/one")).unwrap();
    fs::write(place.join("mine"), "mine").unwrap();
    up(&[]).ok();
    assert_eq!(found(&two.one, &second), whole);
    fs::write(place.join("sub/one"), "other").unwrap();
    up(&[]).ok().says(&["nothing to do"]);
    up(&["--rerun", "use"]).exits(8).says(&[
        "`sub/one` in output volume `out` was changed after step `make` wrote it",
        "--rerun make",
    ]);
    assert_eq!(found(&two.one, &second), ["other", whole[1]]);
    let directory = two.one.work().join("exported");
    let export = ["export", &second, directory.to_str().unwrap()];
    two.one
        .rockenv(&export)
        .exits(8)
        .says(&["is not as a step of env"]);
    up(&["--rerun", "make"]).ok();
    fs::remove_file(place.join("sub/one")).unwrap();
    two.one
        .rockenv(&export)
        .exits(8)
        .says(&["`out/sub/one`, written by a step of env", "restores it"]);
    assert!(!directory.exists());
    up(&[]).ok();
    assert_eq!(found(&two.one, &second), whole);
    // Nothing but results is exported.
    two.one
        .rockenv(&export)
        .ok()
        .says(&["no step of env", "left it: `out/mine`"]);
    assert!(!directory.join("out/mine").exists());
    assert_eq!(fs::read_to_string(place.join("mine")).unwrap(), "mine");

    // A fork, and another machine, that has none of it, whose store is of another kind.
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

/// The manifest says up to which step, and nothing is handed out that later ones have left.
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
    // Not so where it is no step's end.
    store.rockenv(&["up", name]).ok();
    store.rockenv(&["rollback", name, "make"]).ok();
    let other = store.work().join("other");
    store
        .rockenv(&["export", name, other.to_str().unwrap()])
        .exits(8)
        .says(&["is not finished"]);
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
    // Another env, of another target say, goes on with what it finds there.
    let all = || fs::read_to_string(shared.join("all")).unwrap();
    fs::write(shared.join("all"), "another one's\n").unwrap();
    store
        .rockenv(&["up", store.env(), "--rerun", "use"])
        .ok()
        .says(&[
            "`all` in output volume `out` was changed after step `make` wrote it; leaving it as it is",
        ]);
    assert_eq!(all(), "another one's\nmore\n");
}

/// Not every tool sets a new time, and a version often has as many bytes as the last one.
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
    // Another env makes what these find later.
    let envs = ["other", "second", "third"].map(|name| format!("{env}-{name}"));
    let [other, second, third] = envs.each_ref().map(String::as_str);
    up(other, "BBB").ok();
    up(second, "AAA").ok();
    assert_eq!(is(second), "AAA");
    up(second, "BBB").ok();
    assert_eq!(is(second), "BBB");
    store.rockenv(&["status", second, "--check"]).ok();
    // A file of the user's that looks like the step's is the user's.
    up(third, "AAA").ok();
    let file = out(&store, third).join("f");
    fs::write(&file, "CCC").unwrap();
    let opened = fs::File::options().write(true).open(&file).unwrap();
    let times = std::fs::FileTimes::new().set_modified(std::time::SystemTime::UNIX_EPOCH);
    opened.file().set_times(times).unwrap();
    up(third, "BBB").ok().says(&["leaving it as it is"]);
    assert_eq!(is(third), "CCC");
    store.rockenv(&["--yes", "rm", other, second, third]).ok();
}
