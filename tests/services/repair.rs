//! A repair of the store: what it sets aside stays at the service too.

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::finish;
use crate::{TWO, assert_nothing_left, service};

#[test]
fn a_copy_of_the_store_leaves_the_objects_of_the_first_alone() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    let home = store.home().to_str().unwrap();
    let images = || service().images("store", home).unwrap().len();
    let before = images();
    let copy = store.home().with_file_name("copy");
    run(std::process::Command::new("cp")
        .arg("-a")
        .arg(store.home())
        .arg(&copy));
    let in_copy = |arguments: &[&str]| {
        let mut command = store.command(arguments);
        command.env("ROCKENV_HOME", &copy);
        finish(arguments.join(" "), command)
    };
    in_copy(&["exec", store.env(), "--", "true"])
        .exits(4)
        .says(&["belongs to the store at `"]);
    in_copy(&["rm", "--yes", store.env()]).ok();
    in_copy(&["gc", "--yes", "--preset", "ci"]).ok();
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&["fsck"]).ok();
    assert_eq!(images(), before);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
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
