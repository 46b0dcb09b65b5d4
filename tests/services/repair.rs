//! A repair of the store: what it sets aside stays at the service too.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

use fs_err as fs;
use rockenv::testing::record::Origin;
use rockenv::testing::{Freeze, Store};

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::ordinary::Ordinary;
use crate::support::run::{HANGS, finish};
use crate::{TWO, assert_nothing_left, service};

#[test]
fn a_copy_of_the_store_leaves_the_objects_of_the_first_alone() {
    let store = TestStore::new();
    // The stores of other tests have the id of the same template, and would pass for copies.
    fs::write(store.home().join("id"), store.env()).unwrap();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    let (service, home) = (service(), store.home().to_str().unwrap());
    let images = || service.images("store", home).unwrap().len();
    let before = images();
    let copied = |from: &Path, to: &Path| {
        store.settle();
        run(Command::new("cp").args(["-a", "-T"]).arg(from).arg(to));
    };
    let at = |name: &str| store.home().with_file_name(name);
    let in_copy = |name: &str, arguments: &[&str]| {
        let mut command = store.command(arguments);
        command.env("ROCKENV_HOME", at(name));
        finish(arguments.join(" "), command)
    };
    copied(store.home(), &at("copy"));
    in_copy("copy", &["exec", store.env(), "--", "true"])
        .exits(4)
        .says(&["belongs to the store at `"]);
    in_copy("copy", &["rm", "--yes", store.env()]).ok();
    in_copy("copy", &["gc", "--yes", "--preset", "ci"]).ok();
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&["fsck"]).ok();
    assert_eq!(images(), before);

    // The first store finds a copy that has objects of its own.
    copied(store.home(), &at("used"));
    let other = format!("{}-other", store.env());
    in_copy("used", &["up", store.env(), "--name", &other]).ok();
    in_copy("used", &["exec", &other, "--", "true"]).ok();
    // If that cannot be read, it may mention anything: objects stay, and the env can be used.
    let layers = at("used").join("layers");
    fs::rename(&layers, at("layers")).unwrap();
    fs::write(&layers, "").unwrap();
    for _ in 0..2 {
        let back = ["--yes", "rollback", store.env(), "two"];
        store.rockenv(&back).ok();
        store.settle();
        store.sh("true").ok();
    }
    store.rockenv(&["fsck"]).ok();
    fs::remove_file(&layers).unwrap();
    fs::rename(at("layers"), &layers).unwrap();
    // The last of the two removes the container.
    copied(&store.env_dir(), &at("used").join("envs").join(store.env()));
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    store.settle();
    assert_eq!(service.containers("store", home).unwrap().len(), 1);
    store.rockenv(&["fsck"]).ok();
    in_copy("used", &["rm", "--yes", store.env(), &other]).ok();
    assert_nothing_left(&store);
}

#[test]
fn changes_in_a_container_outlive_a_damaged_record() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    fs::write(store.env_dir().join("record.json"), "{").unwrap();
    store.rockenv(&["fsck", "--repair"]).ok();
    store.sh("test ! -e ~/mine").ok();
    // The env's new container, and the one with the changes.
    let home = store.home().to_str().unwrap();
    let containers = service().containers("store", home).unwrap();
    assert_eq!(containers.len(), 2, "{containers:?}");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

/// `docker system prune` may remove a step's container just before the snapshot is made.
#[test]
fn a_step_whose_container_is_gone_gets_no_snapshot() {
    if Ordinary::get().is_some() {
        // The test, which is root, must not open the user's store.
        return;
    }
    let store = TestStore::new();
    store.up_with(TWO);
    let opened = Store::open_existing(store.home()).unwrap().unwrap();
    let name = store.env().parse().unwrap();
    let mut env = opened.lock_env(&name, "test", HANGS).unwrap();
    let tree = env.live_tree().unwrap();
    let before = env.record().unwrap().clone();
    let last = before.snapshots.last().unwrap();
    let freeze = Freeze {
        tree: &tree,
        parent: Some(&last.layer),
        name: "two",
        key: last.key.as_ref(),
        origin: Origin::Step,
        again: false,
        cost: None,
        prints: None,
        pins: BTreeMap::new(),
        history: None,
    };
    let error = env.freeze(&freeze, |_| {}).unwrap_err();
    assert!(
        error.message().contains("was removed outside rockenv"),
        "{error:?}"
    );
    assert_eq!(*env.record().unwrap(), before);
    drop(env);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}
