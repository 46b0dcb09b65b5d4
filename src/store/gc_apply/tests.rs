//! Tests of applying decisions of `gc`.

use super::*;
use crate::plan::record::Origin::{Step, User};
use crate::plan::record::Snapshot;
use crate::store::inventory::InventoryOptions;
use crate::store::layer::Cost;
use crate::store::{Layer, Record};

/// A question to the user may stand between the decision and this.
#[test]
fn what_a_lock_file_names_since_the_decision_stays() {
    let (_directory, store) = Store::scratch();
    let key = "5".repeat(64);
    let [image, blob, locks] =
        ["images", "blobs/sha256", "locks"].map(|name| store.root().join(name));
    fs::create_dir(image.join(&key)).unwrap();
    fs::write(blob.join(&key), "").unwrap();
    fs::create_dir(&locks).unwrap();
    for id in [key.as_str(), "newer"] {
        add_layer(&store, id, None);
    }
    add_env(&store, "a", &[(key.as_str(), Step), ("newer", Step)]);
    // A lock file on a disk that is not mounted counts too.
    let known = format!(r#"{{"file": "/nowhere/p.lock", "names": ["{key}"]}}"#);
    fs::write(locks.join("p.json"), known).unwrap();
    let targets = [
        GcTarget::Image {
            image: key.parse().unwrap(),
        },
        GcTarget::Download { blob: key.clone() },
        GcTarget::Snapshot {
            layer: key.as_str().into(),
        },
    ];
    for removal in store.gc_apply(&targets, 0) {
        assert!(
            matches!(&removal, Removal::Stays(why) if why.contains("/nowhere/p.lock")),
            "{removal:?}"
        );
    }
    assert_eq!(snapshots_of(&store, "a"), [key.as_str(), "newer"]);
    fs::remove_file(locks.join("p.json")).unwrap();
    let removals = store.gc_apply(&targets, 0);
    assert_eq!(removals, [Removal::Gone, Removal::Gone, Removal::Gone]);
}

/// A source at a new place, such as the checkout of a CI job, adds a fingerprint.
#[test]
fn gc_removes_fingerprints_and_partial_downloads_and_nothing_beside_them() {
    let (_directory, store) = Store::scratch();
    let blobs = store.root().join("blobs");
    let digits = "5".repeat(128);
    let [download, link, notes, more] =
        ["sha256/", "sha512/", "sha512/notes", "fingerprints/notes"].map(|name| blobs.join(name));
    let (download, link) = (download.join(&digits[..64]), link.join(&digits));
    let fingerprint = store.known_fingerprint(Path::new("/src"));
    let partial = link.with_file_name(format!(".{digits}.partial"));
    let goes = [&download, &partial, &fingerprint];
    for path in goes.into_iter().chain([&notes, &more]) {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "x").unwrap();
    }
    fs::os::unix::fs::symlink("../sha256/other", &link).unwrap();
    let found = inventory(&store, false).blobs;
    let targets = found.into_keys().map(|blob| GcTarget::Download { blob });
    let targets: Vec<GcTarget> = targets.collect();
    let removals = store.gc_apply(&targets, 0);
    assert_eq!(removals, [Removal::Gone, Removal::Gone, Removal::Gone]);
    assert!(goes.iter().all(|path| !path.exists()));
    assert!(notes.exists() && more.exists() && link.is_symlink());
}

/// Reads the store; with `everything`, also measures objects that stay.
fn inventory(store: &Store, everything: bool) -> crate::plan::gc::Inventory {
    let options = InventoryOptions {
        everything,
        ..InventoryOptions::default()
    };
    store.gc_inventory(&options, 0).unwrap()
}

fn add_layer(store: &Store, id: &str, parent: Option<&str>) {
    store.put_layer(&Layer {
        parent: parent.map(LayerId::from),
        image_key: "used".into(),
        ..Layer::sample(id.into())
    });
}

#[test]
fn a_layer_with_a_recorded_figure_frees_its_results_too() {
    let (_directory, store) = Store::scratch();
    let (bytes, wall_ms) = (5, 1);
    store.put_layer(&Layer {
        env: Some("e".into()),
        cost: Some(Cost { bytes, wall_ms }),
        ..Layer::sample("a".into())
    });
    let layer = store.layer_dir(&"a".into());
    let bytes = || inventory(&store, true).layers["a"].bytes;
    assert_eq!(bytes(), 5);
    fs::create_dir_all(layer.join("results/out")).unwrap();
    fs::write(layer.join("results/out/package"), vec![1; 1 << 20]).unwrap();
    assert!(bytes() > 1 << 20);
}

#[test]
fn a_merged_layer_holds_nothing_of_those_below() {
    let (_directory, store) = Store::scratch();
    if store.method() != Method::Overlay {
        return;
    }
    add_layer(&store, "below", None);
    add_layer(&store, "top", Some("below"));
    let [below, top] = ["below", "top"].map(|id| store.layer_dir(&id.into()));
    for made in [below.join("diff"), top.join("diff"), top.join("flat")] {
        fs::create_dir(made).unwrap();
    }
    for (layer, size) in [(&below, 1 << 20), (&top, 64 << 10)] {
        let file = layer.join("diff/x");
        fs::write(&file, vec![1; size]).unwrap();
        fs::hard_link(file, top.join("flat").join(size.to_string())).unwrap();
    }
    let found = inventory(&store, true).layers;
    assert!(found["below"].bytes >= 1 << 20);
    let own = found["top"].bytes;
    assert!((64 << 10..1 << 20).contains(&own), "{own}");
}

/// On a full disk, layers and images are unlinked in place.
#[test]
fn gc_removes_the_rest_of_an_interrupted_removal() {
    let (_directory, store) = Store::scratch();
    for id in ["a", "c"] {
        add_layer(&store, id, None);
        fs::create_dir_all(store.layer_dir(&id.into()).join("diff/x")).unwrap();
    }
    // A killed removal had renamed the description of layer `a`. A user's directory has no description.
    let path = |name: &str| store.layer_dir(&"a".into()).join(name);
    fs::rename(path("layer.json"), path("gone.json")).unwrap();
    fs::create_dir(store.layer_dir(&"mine".into())).unwrap();
    let found = store.inventory().unwrap();
    let notes = crate::store::check::examine(&found).notes;
    let note = "`layers/a` was left by an interrupted removal";
    assert!(notes.contains(&(note.to_owned(), "rockenv gc".to_owned())));
    let strays = inventory(&store, false).strays.into_keys();
    let targets: Vec<GcTarget> = strays.map(|path| GcTarget::Stray { path }).collect();
    // The second call finds the layer removed.
    for _ in 0..2 {
        assert_eq!(store.gc_apply(&targets, 0), [Removal::Gone]);
    }
    assert_eq!(names(&store.root().join("layers")).unwrap(), ["c", "mine"]);
    let left = GcTarget::Stray {
        path: "layers/c".to_owned(),
    };
    assert_eq!(store.gc_apply([&left], 0), [Removal::needed_by_now()]);
}

/// Adds an env with snapshots of these layers, oldest first.
fn add_env(store: &Store, name: &str, snapshots: &[(&str, Origin)]) {
    let snapshots = snapshots.iter().map(|(layer, origin)| Snapshot {
        origin: *origin,
        ..Snapshot::of(&Layer::sample((*layer).into()), (*layer).to_owned())
    });
    let record = Record {
        image_key: format!("of-{name}").parse().unwrap(),
        snapshots: snapshots.collect(),
        ..Record::sample(name, jiff::Timestamp::UNIX_EPOCH)
    };
    store.put_record(name, &record);
}

fn snapshots_of(store: &Store, name: &str) -> Vec<String> {
    let record = store.known(&name.into()).unwrap();
    let snapshots = record.snapshots.into_iter();
    snapshots.map(|snapshot| snapshot.name).collect()
}

fn stays(why: &str) -> Removal {
    Removal::Stays(why.to_owned())
}

#[test]
fn many_snapshots_go_with_few_readings_and_each_is_checked() {
    const MANY: usize = 60;
    let (_directory, store) = Store::scratch();
    let ids: Vec<String> = (0..MANY).map(|number| format!("l{number:02}")).collect();
    for (at, id) in ids.iter().enumerate() {
        // A chain, layers of their own, and l40 on l39.
        let below = at.checked_sub(1).filter(|_| at < MANY / 2 || at == 40);
        add_layer(&store, id, below.map(|below| ids[below].as_str()));
    }
    let own: Vec<_> = ids.iter().map(|id| (id.as_str(), Step)).collect();
    add_env(&store, "a", &own);
    add_env(&store, "busy", &[("l40", Step)]);
    add_env(&store, "user", &[("l41", User), ("l42", Step)]);
    add_env(&store, "based", &[]);
    let mut based = store.known(&"based".into()).unwrap();
    based.head.layer = Some("l38".into());
    store.put_record("based", &based);
    add_layer(&store, "orphan", None);
    add_layer(&store, "parent", None);
    add_layer(&store, "child", Some("parent"));
    // Only a damaged store has layers that are based on each other.
    add_layer(&store, "circle", Some("ring"));
    add_layer(&store, "ring", Some("circle"));
    let held = store.lock_known(&"busy".into(), "up", Duration::ZERO);
    let held = held.unwrap();
    let snapshots = ids.iter().map(|id| GcTarget::Snapshot {
        layer: id.as_str().into(),
    });
    let others = ["orphan", "circle", "ring", "parent"];
    let others = others.map(|id| GcTarget::Layer { layer: id.into() });
    let targets: Vec<GcTarget> = snapshots.chain(others).collect();
    let before = atomic::READS.get();
    let removals = store.gc_apply(&targets, 0);
    let reads = atomic::READS.get() - before;
    assert!(reads < 8 * MANY, "{reads}");
    let mut expected = vec![Removal::Gone; MANY];
    expected[38] = Removal::needed_by_now();
    expected[39] = Removal::needed_by_now();
    expected[40] = stays("in use by a command in env busy");
    expected[41] = stays("snapshot l41 of env user: you took it");
    expected[42] = stays("newest snapshot of env user: l42");
    expected[MANY - 1] = stays("newest snapshot of env a: l59");
    expected.extend([Removal::Gone, Removal::Gone, Removal::Gone]);
    expected.push(Removal::needed_by_now());
    assert_eq!(removals, expected);
    // No env forgot a layer that another one keeps, or one below it.
    let left = ["l38", "l39", "l40", "l41", "l42", "l59"];
    assert_eq!(snapshots_of(&store, "a"), left);
    let layers = names(&store.root().join("layers")).unwrap();
    assert_eq!(layers, [&["child"][..], &left, &["parent"]].concat());
    assert!(!store.env_dir(&"a".into()).join("journal.jsonl").exists());
    drop(held);
    // A file that cannot be read may need any of them.
    let damaged = store.layer_dir(&"child".into()).join("layer.json");
    fs::write(&damaged, "{").unwrap();
    assert_eq!(
        store.gc_apply(&targets[40..41], 0),
        [stays("layer `child` may need it")]
    );
    // Nothing uses a layer that a repair set aside.
    let aside = store.layer_dir(&"child.damaged-1".into());
    fs::rename(damaged.parent().unwrap(), aside).unwrap();
    let notes = inventory(&store, false).notes.join("\n");
    assert_has!(notes, "child.damaged-1` (");
    let images = ["of-a", "used", "unused"];
    for image in images {
        fs::create_dir(store.image_dir(&image.into())).unwrap();
    }
    let images = images.map(|image| GcTarget::Image {
        image: image.into(),
    });
    let expected = [
        Removal::needed_by_now(),
        Removal::needed_by_now(),
        Removal::Gone,
    ];
    assert_eq!(store.gc_apply(&images, 0), expected);
}

#[test]
fn a_layer_of_more_envs_than_are_locked_at_a_time_goes_by_itself() {
    let (_directory, store) = Store::scratch();
    for id in ["old", "shared"] {
        add_layer(&store, id, None);
    }
    let own = ["old", "shared"].map(|id| (id, Step));
    add_env(&store, "a", &own);
    for number in 0..MOST_LOCKED {
        add_env(&store, &format!("e{number}"), &own[1..]);
    }
    let targets = ["shared", "old"].map(|id| GcTarget::Snapshot { layer: id.into() });
    let removals = store.gc_apply(&targets, 0);
    assert!(matches!(removals[0], Removal::Stays(_)), "{removals:?}");
    assert_eq!(removals[1], Removal::Gone);
    assert_eq!(snapshots_of(&store, "a"), ["shared"]);
}

#[test]
fn snapshots_that_are_removed_together_take_one_reading() {
    const MANY: usize = 30;
    let (_directory, store) = Store::scratch();
    let ids: Vec<String> = (0..MANY).map(|number| format!("l{number:02}")).collect();
    for id in &ids {
        add_layer(&store, id, None);
    }
    let own: Vec<_> = ids.iter().map(|id| (id.as_str(), User)).collect();
    add_env(&store, "a", &own);
    let env = store.lock_known(&"a".into(), "snapshot rm", Duration::ZERO);
    let mut env = env.unwrap();
    let before = atomic::READS.get();
    let gone: BTreeSet<&str> = ids[1..].iter().map(String::as_str).collect();
    env.remove_snapshots(&gone).unwrap();
    let reads = atomic::READS.get() - before;
    assert!(reads < 4 * MANY, "{reads}");
    // All of them go, or none.
    let unknown = BTreeSet::from(["l00", "l01"]);
    env.remove_snapshots(&unknown).unwrap_err();
    assert_eq!(snapshots_of(&store, "a"), ["l00"]);
    assert_eq!(names(&store.root().join("layers")).unwrap(), ["l00"]);
}

#[test]
fn the_tree_of_a_step_that_failed_since_the_decision_stays() {
    let (_directory, store) = Store::scratch();
    let env = EnvName::from("a");
    let tree = store.env_dir(&env).join("trees/new");
    fs::create_dir_all(&tree).unwrap();
    let mut record = Record::sample("e", jiff::Timestamp::UNIX_EPOCH);
    let failed = r#"{"step": "s", "tree": "new", "log": "log", "code": 1}"#;
    record.failed = serde_json::from_str(failed).unwrap();
    record.complete = false;
    store.put_record("a", &record);
    for (decided, stays) in [("old", true), ("new", false)] {
        let what = GcTarget::Failed {
            env: env.clone(),
            tree: decided.into(),
        };
        assert_eq!(store.gc_apply([&what], 0), [Removal::Gone]);
        assert_eq!(store.known(&env).unwrap().failed.is_some(), stays);
        assert_eq!(tree.exists(), stays);
    }
}
