//! Build volumes of an env at a service: the store freezes them with its snapshots, and the service only mounts them.
//! The service keeps its images on a different disk than the store's.

use crate::assert_nothing_left_at;
use crate::restart::Own;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use rockenv::testing::Service;
use serde_json::Value;

#[test]
fn build_volumes_follow_snapshots_and_only_their_space_counts() {
    // Mounted before the service starts, which would not see it otherwise.
    let disk = LoopFs::with_base(Kind::Btrfs);
    let own = Own::start();
    let store = TestStore::on(&disk);
    build_volumes_are_rolled_back_and_forked(&own, &store);
    gc_removes_nothing_for_space_on_another_disk(&own, &store);
}

/// Fails unless nothing of the env is left once it is removed.
fn remove(own: &Own, store: &TestStore, envs: &[&str]) {
    own.run(store, &[&["rm", "--yes"], envs].concat()).ok();
    let service = Service::connect(&own.socket()).unwrap();
    assert_nothing_left_at(&service, store);
}

fn build_volumes_are_rolled_back_and_forked(own: &Own, store: &TestStore) {
    store.profile(
        "volume = [{ name = 'b', kind = 'build', target = '/b' }]
         [[step]]\nname = 'one'\nrun = 'echo one > /b/state; echo one > ~/state'
         [[step]]\nname = 'two'\nrun = 'echo two > /b/state; echo two > ~/state'\n",
    );
    let fork = format!("{}-fork", store.env());
    let env = store.env();
    let both = |name: &str| {
        let cat = ["exec", name, "--", "cat", "/b/state", "state"];
        own.run(store, &cat).ok().text()
    };
    own.run(store, &["up", env]).ok();
    own.run(store, &["--yes", "rollback", env, "one"]).ok();
    assert_eq!(both(env), "one\none\n");
    own.run(store, &["fork", env, &fork]).ok();
    let write = "echo mine > /b/state";
    own.run(store, &["exec", env, "--", "sh", "-c", write]).ok();
    assert_eq!(
        (both(env), both(&fork)),
        ("mine\none\n".into(), "one\none\n".into())
    );
    // An existing snapshot, with its volume, is not built again.
    let up = own.run(store, &["up", env]).ok();
    assert!(!up.err.contains("step 2/2 two … done"), "{up:?}");
    assert_eq!(both(env), "two\ntwo\n");
    remove(own, store, &[env, &fork]);
}

fn gc_removes_nothing_for_space_on_another_disk(own: &Own, store: &TestStore) {
    let env = store.env();
    // Each round uses new step names: the earlier snapshots stay in the record.
    for round in [1, 2] {
        store.profile(&format!(
            "volume = [{{ name = 'b', kind = 'build', target = '/b' }}]
             [[step]]\nname = 'root{round}'\nrun = 'head -c 3M /dev/urandom > ~/root{round}'
             [[step]]\nname = 'volume{round}'\nrun = 'head -c 5M /dev/urandom > /b/{round}; head -c 3M /dev/urandom > ~/more'
             [[step]]\nname = 'last{round}'\nrun = 'rm -f /b/*'\n"
        ));
        own.run(store, &["up", env]).ok();
    }
    let gc = |arguments: &[&str]| -> Value {
        let mut words = vec!["--yes", "--json", "gc", "--preset", "ci"];
        words.extend(arguments);
        own.run(store, &words).json()
    };
    let dry = gc(&["--dry-run", "--free", "1T"]);
    let items = dry["items"].as_array().unwrap();
    let sizes: Vec<(&str, u64)> = items
        .iter()
        .map(|item| {
            let name = item["name"].as_str().unwrap().split('/').next_back();
            (name.unwrap(), item["bytes"].as_u64().unwrap() >> 20)
        })
        .collect();
    // Only the build volumes of the snapshots are on the store's disk. Removing a snapshot also removes those based on
    // it.
    assert_eq!(sizes, [("last1", 0), ("volume1", 5)], "{dry:#}");
    let notes = dry["notes"].to_string();
    assert!(notes.contains("another file system: 1"), "{notes}");
    let done = gc(&["--free", "1T"]);
    assert_eq!(done["removed"].as_array().unwrap().len(), 2, "{done:#}");
    assert!(done["freed"].as_i64().unwrap() >> 20 >= 4, "{done:#}");
    remove(own, store, &[env]);
}
