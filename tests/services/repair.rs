//! A repair of the store: what it sets aside stays at the service too.

use fs_err as fs;

use crate::support::env::TestStore;
use crate::{TWO, assert_nothing_left, service};

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
