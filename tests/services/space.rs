//! What `gc` removes for space if the service keeps its images on another disk than the store's.

use crate::assert_nothing_left_at;
use crate::restart::Own;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use rockenv::testing::Service;
use serde_json::Value;

#[test]
fn nothing_goes_for_the_space_of_another_disk() {
    // Mounted before the service starts, which would not see it otherwise.
    let disk = LoopFs::new(Kind::Btrfs);
    let own = Own::start();
    let store = TestStore::on(&disk);
    let env = store.env();
    // Each round uses new step names: the earlier snapshots stay in the record.
    for round in [1, 2] {
        store.profile(&format!(
            "volume = [{{ name = 'b', kind = 'build', target = '/b' }}]
             [[step]]\nname = 'root{round}'\nrun = 'head -c 3M /dev/urandom > ~/root{round}'
             [[step]]\nname = 'volume{round}'\nrun = 'head -c 5M /dev/urandom > /b/{round}; head -c 3M /dev/urandom > ~/more'
             [[step]]\nname = 'last{round}'\nrun = 'rm -f /b/*'\n"
        ));
        own.run(&store, &["up", env]).ok();
    }
    let gc = |arguments: &[&str]| -> Value {
        let mut words = vec!["--yes", "--json", "gc", "--preset", "ci"];
        words.extend(arguments);
        serde_json::from_slice(&own.run(&store, &words).out).unwrap()
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
    // Of the snapshots, only their build volumes are on the store's disk. Removing a snapshot also removes those based
    // on it.
    assert_eq!(sizes, [("last1", 0), ("volume1", 5)], "{dry:#}");
    let notes = dry["notes"].to_string();
    assert!(notes.contains("another file system: 1"), "{notes}");
    let done = gc(&["--free", "1T"]);
    assert_eq!(done["removed"].as_array().unwrap().len(), 2, "{done:#}");
    assert!(done["freed"].as_i64().unwrap() >> 20 >= 4, "{done:#}");
    own.run(&store, &["rm", "--yes", env]).ok();
    let service = Service::connect(&own.socket()).unwrap();
    assert_nothing_left_at(&service, &store);
}
