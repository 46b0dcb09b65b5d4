//! Properties of the decision over random stores, and the effect of single rules.

mod random;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use proptest::prelude::*;

use super::cache::CacheKind;
use super::policy::Limits;
use super::{
    Base, Cache, CachedFile, Env, Frozen, GcTarget, Inventory, Lease, Plan, Rule, plan, rooted,
};
use crate::plan::ids::LayerId;
use crate::plan::layer::{self, Layer};
use crate::plan::record::{Failed, Origin, Record, Snapshot};

const DAY: i64 = 24;
const MIB: u64 = 1 << 20;

fn now() -> Timestamp {
    Timestamp::from_second(1_800_000_000).unwrap()
}

fn hours_ago(hours: i64) -> Timestamp {
    now() - SignedDuration::from_hours(hours)
}

fn env(id: &str) -> Env {
    Env {
        record: Record {
            used: hours_ago(1),
            ..Record::sample(id, hours_ago(1000))
        },
        used: hours_ago(1),
        busy: false,
        unsettled: false,
        failed: 0,
        failed_edited: false,
        logs: BTreeMap::new(),
    }
}

fn snapshot(name: &str, layer: &str, origin: Origin, hours: i64) -> Snapshot {
    Snapshot {
        name: name.to_owned(),
        layer: layer.into(),
        key: (origin == Origin::Step).then(|| layer.into()),
        again: false,
        origin,
        created: hours_ago(hours),
    }
}

/// Returns a layer of env `e` that took `seconds` to make.
fn frozen(id: &str, parent: Option<&str>, bytes: u64, seconds: u64) -> Frozen {
    Frozen {
        arrived: None,
        layer: Layer {
            key: Some(id.into()),
            parent: parent.map(LayerId::from),
            env: Some("e".into()),
            created: hours_ago(100),
            cost: Some(layer::Cost {
                bytes,
                wall_ms: seconds * 1000,
            }),
            ..Layer::sample(id.into())
        },
        bytes,
        at_service: 0,
    }
}

/// Returns one env `e` based on `head`, with snapshots of steps `a`, `b` and `c`, each on the bare image.
fn inventory() -> Inventory {
    let mut one = env("e");
    one.record.head.layer = Some("head".into());
    let mut layers = BTreeMap::new();
    for (name, bytes, seconds, hours) in [
        ("a", 100 * MIB, 3600, 30 * DAY),
        ("b", 50 * MIB, 10, 20 * DAY),
        ("c", 10 * MIB, 1, 10 * DAY),
        ("head", 500 * MIB, 1, 2),
    ] {
        layers.insert(name.into(), frozen(name, None, bytes, seconds));
        one.record
            .snapshots
            .push(snapshot(name, name, Origin::Step, hours));
    }
    Inventory {
        now: now(),
        free: 100 * MIB,
        envs: BTreeMap::from([("one".into(), one)]),
        layers,
        images: BTreeMap::from([(
            "image".into(),
            Base {
                name: "base".to_owned(),
                built: hours_ago(1000),
                used: hours_ago(1000),
                current: true,
                bytes: 80 * MIB,
                took_ms: Some(30_000),
            },
        )]),
        ..Inventory::default()
    }
}

fn put(inventory: &mut Inventory, item: Frozen) {
    inventory.layers.insert(item.layer.id.clone(), item);
}

fn older_than(days: u64) -> Limits {
    Limits {
        older_than: Some(Duration::from_secs(days * 24 * 3600)),
        ..Limits::default()
    }
}

fn names(plan: &Plan) -> Vec<&str> {
    plan.items.iter().map(|item| item.name.as_str()).collect()
}

#[test]
fn what_was_pulled_stays_for_a_time_after_it_arrived() {
    let mut inventory = inventory();
    for (name, parent) in [("below", None), ("top", Some("below"))] {
        let mut item = frozen(name, parent, 20 * MIB, 9);
        (item.layer.env, item.arrived) = (None, Some(hours_ago(5 * DAY)));
        // Built long ago elsewhere.
        item.layer.created = hours_ago(400 * DAY);
        put(&mut inventory, item);
    }
    let stays = plan(&inventory, &older_than(7), None);
    assert_eq!(names(&stays), [""; 0]);
    let note = "kept for 7 days after they arrived, unless space is short: \
                2 pulled or imported snapshots (40.0 MiB) that no env needs yet";
    assert_eq!(stays.notes, [note]);
    let pulled = ["pulled snapshot top (top)", "pulled snapshot below (below)"];
    let old = plan(&inventory, &older_than(3), None);
    assert_eq!(names(&old), pulled);
    assert!(old.notes.is_empty(), "{:?}", old.notes);
    // A pulled layer comes back at the speed of a download, not of a build.
    let short = plan(&inventory, &older_than(7), Some(30 * MIB));
    assert_eq!(names(&short)[..1], ["snapshot one/c"]);
    // A layer with an env's snapshot belongs to the env.
    let one = inventory.envs.get_mut("one").unwrap();
    one.record
        .snapshots
        .push(snapshot("mine", "top", Origin::User, 1));
    assert!(plan(&inventory, &older_than(3), None).items.is_empty());
}

#[test]
fn the_most_bytes_for_the_least_time_go_first_not_the_oldest() {
    let found = plan(&inventory(), &Limits::default(), Some(55 * MIB));
    assert_eq!(names(&found), ["snapshot one/c", "snapshot one/b"]);
    assert!(found.items.iter().all(|item| item.rule == Rule::Free));
    assert_eq!(found.spare, 100 * MIB);
    let all = plan(&inventory(), &Limits::default(), Some(1 << 40));
    assert_eq!(names(&all).len(), 3);
    assert_eq!(all.missing, (1 << 40) - 160 * MIB);
    assert_eq!(all.notes.len(), 1);
}

#[test]
fn the_floor_stays_when_others_fill_the_disk_and_somebody_may_go_below_it() {
    let limits = Limits {
        min_free: 900 * MIB,
        keep_at_least: 100 * MIB,
        ..Limits::default()
    };
    let found = plan(&inventory(), &limits, None);
    assert_eq!(names(&found), ["snapshot one/c", "snapshot one/b"]);
    assert_eq!(found.spare, 100 * MIB);
    assert_eq!(found.missing, 740 * MIB);
    assert_has!(found.notes[0], "keep-at-least");
    let asked = plan(&inventory(), &limits, Some(150 * MIB));
    assert_eq!(asked.spare, 0);
    let limits = Limits {
        keep_at_most: Some(0),
        min_free: 0,
        ..limits
    };
    let mut large = inventory();
    large.used = Some(1 << 40);
    let found = plan(&large, &limits, None);
    assert_eq!(found.spare, 100 * MIB);
    let note = &found.notes[0];
    assert_has!(note, "keep-at-most");
    assert_has!(note, "keep-at-least");
}

#[test]
fn age_counts_from_the_last_use_and_a_future_date_is_no_age() {
    let limits = older_than(15);
    let mut inventory = inventory();
    assert!(
        plan(&inventory, &limits, None).items.is_empty(),
        "the env is in use"
    );
    inventory.envs.get_mut("one").unwrap().used = hours_ago(16 * DAY);
    for item in inventory.layers.values_mut() {
        item.layer.created = hours_ago(16 * DAY);
    }
    let found = plan(&inventory, &limits, None);
    assert_eq!(found.items.len(), 3);
    assert!(found.items.iter().all(|item| item.rule == Rule::OlderThan));
    inventory.envs.get_mut("one").unwrap().used = hours_ago(-1000);
    assert!(plan(&inventory, &limits, None).items.is_empty());
}

/// The envs share nothing, and each is a chain: a search of all units for each removal would take minutes.
#[test]
fn ten_thousand_snapshots_are_planned() {
    let mut inventory = inventory();
    for name in 0..100 {
        let mut one = env(&format!("id{name}"));
        one.record.head.layer = Some("head".into());
        for step in 0..100 {
            let id = format!("{name}-{step}");
            let below = (step > 0).then(|| format!("{name}-{}", step - 1));
            let item = frozen(&id, below.as_deref(), MIB * (step + 1), step + 1);
            put(&mut inventory, item);
            let step = snapshot(&format!("s{step}"), &id, Origin::Step, 1);
            one.record.snapshots.push(step);
        }
        // The newest snapshot is kept with all its parents.
        let newest = snapshot("newest", "head", Origin::Step, 0);
        one.record.snapshots.push(newest);
        let name = format!("env{name}");
        inventory.envs.insert(name.as_str().into(), one);
    }
    let plan = plan(&inventory, &Limits::default(), Some(u64::MAX));
    let snapshots = plan.items.iter();
    let snapshots = snapshots.filter(|item| matches!(item.what, GcTarget::Snapshot { .. }));
    assert_eq!(snapshots.count(), 10_000 + 3);
}

#[test]
fn what_is_large_and_cheap_goes_with_what_stands_on_it() {
    let mut inventory = inventory();
    put(&mut inventory, frozen("b", Some("c"), 1, 5));
    put(&mut inventory, frozen("c", None, 200 * MIB, 10));
    let found = plan(&inventory, &Limits::default(), Some(100 * MIB));
    assert_eq!(names(&found), ["snapshot one/b", "snapshot one/c"]);
}

#[test]
fn what_gives_nothing_back_goes_for_other_reasons_than_space() {
    let mut inventory = inventory();
    for item in inventory.layers.values_mut() {
        item.layer.kept = Some(layer::SnapshotImage {
            socket: "/run/docker.sock".into(),
            image: "sha256:0".to_owned(),
        });
        item.bytes = 0;
    }
    let found = plan(&inventory, &Limits::default(), Some(1 << 40));
    assert!(found.items.is_empty(), "{:?}", names(&found));
    let note = found.notes.last().unwrap();
    assert_has!(note, "another file system: 3");
    inventory.envs.get_mut("one").unwrap().used = hours_ago(90 * DAY);
    let limits = Limits {
        keep_at_least: 1 << 40,
        ..older_than(1)
    };
    assert_eq!(plan(&inventory, &limits, None).items.len(), 3);
}

#[test]
fn pins_changes_leases_and_lock_files_hold() {
    let wish = Some(1 << 40);
    let count = |inventory: &Inventory| plan(inventory, &Limits::default(), wish).items.len();
    let mut pinned = inventory();
    for (name, origin) in [("a", Origin::User), ("b", Origin::Auto)] {
        let record = &mut pinned.envs.get_mut("one").unwrap().record;
        let own = snapshot(&format!("my-{name}"), name, origin, 900 * DAY);
        record.snapshots.push(own);
    }
    assert_eq!(count(&pinned), 1);
    let mut leased = inventory();
    let lease = Lease {
        layers: vec!["a".into()],
        image: "image".into(),
    };
    leased.leases.insert("two".into(), lease);
    assert_eq!(count(&leased), 2);
    let mut locked = inventory();
    let key = locked.layers["b"].layer.locked_name().to_owned();
    locked.locked.insert(key, "p.lock".to_owned());
    assert_eq!(count(&locked), 2);
    let why = rooted(&locked, &Limits::default());
    let b = why.iter().find(|row| row.id == "b").unwrap();
    assert_eq!(b.because, ["lock file p.lock names it"]);
    let mut fetched = inventory();
    let kept = CachedFile {
        bytes: 1 << 40,
        used: fetched.now,
    };
    fetched.blobs.insert("blob".to_owned(), kept);
    let unlocked = count(&fetched);
    fetched
        .locked
        .insert("blob".to_owned(), "p.lock".to_owned());
    assert_eq!(count(&fetched), count(&inventory()));
    assert_ne!(unlocked, 0);
    let why = rooted(&fetched, &Limits::default());
    assert!(
        why.iter()
            .any(|row| row.id == "blob" && row.bytes == 1 << 40)
    );
    let mut busy = inventory();
    busy.envs.get_mut("one").unwrap().busy = true;
    assert_eq!(count(&busy), 0);
    let last = Limits {
        keep_last: 3,
        ..Limits::default()
    };
    assert_eq!(names(&plan(&inventory(), &last, wish)), ["snapshot one/a"]);
}

#[test]
fn a_killed_command_s_work_is_kept_for_the_next_one_and_garbage_goes() {
    let mut inventory = inventory();
    put(&mut inventory, frozen("lost", Some("a"), MIB, 9000));
    let limits = Limits::default();
    let found = plan(&inventory, &limits, None);
    assert_eq!(found.items.len(), 1);
    assert_eq!(found.items[0].rule, Rule::Garbage);
    inventory.envs.get_mut("one").unwrap().record.complete = false;
    assert!(plan(&inventory, &limits, None).items.is_empty());
    // Nor does it go together with its parent.
    assert_eq!(names(&plan(&inventory, &limits, Some(1 << 40))).len(), 2);
}

#[test]
fn an_image_goes_with_the_last_that_stands_on_it() {
    let mut inventory = inventory();
    let mut old = inventory.images["image"].clone();
    inventory.images.insert("old".into(), old.clone());
    let limits = Limits::default();
    assert_eq!(names(&plan(&inventory, &limits, Some(1 << 40))).len(), 4);
    for id in ["a", "b"] {
        inventory.layers.get_mut(id).unwrap().layer.image_key = "old".into();
    }
    let all = plan(&inventory, &limits, Some(1 << 40));
    assert_eq!(names(&all).last(), Some(&"image base"));
    old.current = false;
    inventory.images.insert("superseded".into(), old.clone());
    let found = plan(&inventory, &limits, None);
    assert_eq!(names(&found), ["image base"]);
    assert_eq!(found.items[0].rule, Rule::Garbage);
    old.built = hours_ago(0);
    inventory.images.insert("superseded".into(), old);
    assert!(plan(&inventory, &limits, None).items.is_empty());
}

#[test]
fn logs_go_by_age_alone_and_never_those_that_a_step_names() {
    let mut inventory = inventory();
    let one = inventory.envs.get_mut("one").unwrap();
    one.record.failed = Some(Failed {
        step: "c".into(),
        tree: "t".into(),
        parent: None,
        log: "logs/20200101T000000Z/01-c.log".into(),
        code: Some(1),
        shown: None,
    });
    one.failed = 7 * MIB;
    for run in ["20200101T000000Z", "20200102T000000Z", "what is this"] {
        one.logs.insert(run.to_owned(), MIB);
    }
    let all = plan(&inventory, &Limits::default(), Some(1 << 40));
    assert_eq!(names(&all)[0], "tree of failed step one/c");
    assert!(!names(&all).iter().any(|name| name.starts_with("logs")));
    let found = plan(&inventory, &older_than(1), None);
    assert_eq!(names(&found), ["logs one/20200102T000000Z"]);
    inventory.envs.get_mut("one").unwrap().failed_edited = true;
    let all = plan(&inventory, &Limits::default(), Some(1 << 40));
    assert!(!names(&all).contains(&"tree of failed step one/c"));
}

#[test]
fn a_cache_that_its_tool_empties_counts_as_a_whole() {
    let sizes = |kind| {
        let mut inventory = inventory();
        let cache = Cache {
            bytes: 21 * MIB,
            max: 20 * MIB,
            kind: Some(kind),
            at: Some(("one".into(), "/cache".to_owned())),
            busy: None,
        };
        inventory.caches.insert("c".to_owned(), cache);
        let found = plan(&inventory, &Limits::default(), None);
        assert_eq!(found.estimate, found.items[0].bytes);
        (found.items[0].bytes / MIB, found.items[0].reason.clone())
    };
    for kind in [CacheKind::Pip, CacheKind::Apt, CacheKind::Uv] {
        let (size, reason) = sizes(kind);
        assert_eq!(size, 21, "{kind:?}");
        assert!(reason.starts_with("1.0 MiB over its maximum"), "{reason}");
    }
    for kind in [CacheKind::Ccache, CacheKind::Pacman] {
        assert_eq!(sizes(kind).0, 1, "{kind:?}");
    }
}
