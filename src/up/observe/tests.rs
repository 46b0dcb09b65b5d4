//! Owns the tests of which objects may be newer than a snapshot that comes back.

use jiff::Timestamp;

use super::*;

#[test]
fn a_layer_that_comes_back_may_be_older_than_the_objects() {
    let (_directory, store) = Store::scratch();
    let write = |id: &str, below: Option<&str>, seconds: i64| {
        let (title, _) = id.split_once('-').unwrap();
        let layer = Layer {
            key: Some(id.into()),
            parent: below.map(LayerId::from),
            created: Timestamp::from_second(seconds).unwrap(),
            title: title.to_owned(),
            ..Layer::sample(id.into())
        };
        store.put_layer(&layer);
        layer
    };
    write("copy-1", None, 1);
    write("compiler-1", Some("copy-1"), 2);
    write("copy-2", None, 3);
    write("configure-1", Some("copy-2"), 4);
    write("configure-2", Some("copy-2"), 5);
    let objects = write("build-2", Some("configure-2"), 6);
    write("copy-3", None, 7);
    write("build-3", Some("copy-1"), 8);
    write("configure-3", Some("copy-2"), 9);
    let record = Record::sample("e", Timestamp::UNIX_EPOCH);
    let mut writers = VolumeWriters {
        record: &record,
        from: Some(store.chain(&objects.id).unwrap()),
        earlier: None,
        head: Vec::new(),
        begun: None,
    };
    let step = |key: &str| StepInput {
        name: key.split_once('-').unwrap().0.into(),
        key: Some(key.into()),
        incremental: !key.starts_with("copy"),
        skip: None,
        uncached_downstream: false,
    };
    for (layer, wanted, begun, may_be) in [
        ("copy-1", "copy-1", None, true),
        ("copy-2", "copy-2", None, false),
        ("copy-3", "copy-3", None, false),
        ("build-2", "copy-2 configure-2 build-2", None, false),
        // The layer is newer, but the one below it is not.
        ("build-3", "copy-1 build-3", None, true),
        // TheRock's fingerprints: another `copy` ran, and the step's key is as before.
        ("compiler-1", "copy-2 compiler-1", None, false),
        // The volumes were configured again.
        ("configure-1", "copy-2 configure-1", None, true),
        // A step failed on another layer.
        ("copy-2", "copy-2", Some("copy-3"), true),
        ("copy-2", "copy-2", Some("copy-2"), false),
        // `configure` failed under another key, or is new to the volumes.
        ("configure-2", "copy-2 configure-2", Some("copy-2"), true),
        ("configure-3", "copy-2 configure-3", Some("copy-2"), false),
    ] {
        writers.begun = begun.map(|on| vec![on.into()]);
        let wanted: Vec<StepInput> = wanted.split(' ').map(step).collect();
        let layer = store.layer(&layer.into()).unwrap().unwrap();
        let found = writers.are_newer(&store, &layer, &wanted);
        assert_eq!(found, may_be, "{} {begun:?}", layer.id);
    }
}
