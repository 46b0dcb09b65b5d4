//! Properties of every store, tested on random ones.

use super::*;

/// Generates stores: chains of layers, several envs with all kinds of snapshots, downloads.
fn inventories() -> impl Strategy<Value = Inventory> {
    let layer = (
        any::<prop::sample::Index>(),
        any::<bool>(),
        0..200u64,
        0..100u64,
        0..400i64,
        0..2usize,
    );
    let snap = (any::<prop::sample::Index>(), 0..4u8, 0..400i64);
    let one = (
        prop::collection::vec(snap, 0..6),
        any::<prop::sample::Index>(),
        0..10u8,
        0..400i64,
    );
    (
        prop::collection::vec(layer, 1..25),
        prop::collection::vec(one, 1..4),
        prop::collection::vec(0..50u64, 0..4),
        0..500u64,
    )
        .prop_map(|(layers, envs, blobs, free)| {
            let id = |at: usize| format!("l{at:02}");
            let mut inventory = Inventory {
                now: now(),
                free: free * MIB,
                used: Some(900 * MIB),
                ..inventory()
            };
            inventory.layers.clear();
            inventory.envs.clear();
            inventory
                .images
                .insert("other".into(), inventory.images["image"].clone());
            for (at, (parent, bottom, bytes, seconds, hours, image)) in layers.iter().enumerate() {
                let parent = (!bottom && at > 0).then(|| id(parent.index(at)));
                let mut item = frozen(&id(at), parent.as_deref(), bytes * MIB, *seconds);
                item.layer.created = hours_ago(*hours * DAY);
                if seconds % 5 == 0 {
                    item.arrived = Some(hours_ago(*hours * DAY / 2));
                }
                item.layer.image_key = match &parent {
                    Some(parent) => inventory.layers[parent.as_str()].layer.image_key.clone(),
                    None => ["image", "other"][*image].into(),
                };
                put(&mut inventory, item);
            }
            for (number, (snaps, head, state, hours)) in envs.iter().enumerate() {
                let mut one = env(&format!("e{number}"));
                one.busy = *state == 0;
                one.unsettled = *state == 1;
                one.record.complete = *state > 4;
                one.used = hours_ago(*hours * DAY);
                one.record.head.layer =
                    (*state > 2).then(|| id(head.index(layers.len())).as_str().into());
                one.failed = 3 * MIB;
                if *state == 5 {
                    one.record.failed = Some(Failed {
                        step: "f".into(),
                        tree: "t".into(),
                        parent: Some(id(head.index(layers.len())).as_str().into()),
                        log: "log".into(),
                        code: None,
                        shown: None,
                    });
                }
                for (at, (layer, origin, hours)) in snaps.iter().enumerate() {
                    let origin = match origin {
                        0 => Origin::User,
                        1 => Origin::Auto,
                        _ => Origin::Step,
                    };
                    let layer = id(layer.index(layers.len()));
                    one.record.snapshots.push(snapshot(
                        &format!("s{at}"),
                        &layer,
                        origin,
                        *hours * DAY,
                    ));
                }
                let name = format!("env{number}");
                inventory.envs.insert(name.as_str().into(), one);
            }
            for (at, bytes) in blobs.iter().enumerate() {
                let kept = CachedFile {
                    bytes: bytes * MIB,
                    used: hours_ago(3),
                };
                inventory.blobs.insert(format!("b{at}"), kept);
            }
            inventory
        })
}

fn limits() -> impl Strategy<Value = (Limits, Option<u64>)> {
    (
        prop::option::of(0..1000u64),
        0..400u64,
        0..1000u64,
        prop::option::of(0..400u64),
        0..4usize,
        prop::option::of(0..2000u64),
    )
        .prop_map(|(most, least, free, days, last, asked)| {
            let limits = Limits {
                keep_at_most: most.map(|mib| mib * MIB),
                keep_at_least: least * MIB,
                min_free: free * MIB,
                older_than: days.map(|days| Duration::from_secs(days * 24 * 3600)),
                keep_last: last,
            };
            (limits, asked.map(|mib| mib * MIB))
        })
}

/// Returns `tops` and the layers below each of them.
fn below<'a>(
    inventory: &'a Inventory,
    tops: impl IntoIterator<Item = &'a LayerId>,
) -> BTreeSet<&'a LayerId> {
    let mut found = BTreeSet::new();
    for top in tops {
        let mut next = Some(top);
        while let Some(id) = next {
            found.insert(id);
            next = inventory.layers[id].layer.parent.as_ref();
        }
    }
    found
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn nothing_that_is_needed_goes((limits, asked) in limits(), inventory in inventories()) {
        let found = plan(&inventory, &limits, asked);
        let gone: Vec<&GcTarget> = found.items.iter().map(|item| &item.what).collect();
        let unique: BTreeSet<&&GcTarget> = gone.iter().collect();
        prop_assert_eq!(unique.len(), gone.len(), "something goes twice");
        let layers: Vec<&LayerId> = gone.iter().filter_map(|what| what.layer()).collect();
        // Computed without the decision's own code.
        let mut tops: Vec<&LayerId> = Vec::new();
        for env in inventory.envs.values() {
            tops.extend(&env.record.head.layer);
            let snapshots = env.record.snapshots.iter();
            tops.extend(
                snapshots
                    .clone()
                    .filter(|snapshot| env.busy || snapshot.origin != Origin::Step)
                    .map(|snapshot| &snapshot.layer),
            );
            let newest = snapshots
                .filter(|snapshot| snapshot.origin == Origin::Step)
                .map(|snapshot| snapshot.created)
                .max();
            if let Some(newest) = newest {
                let mut of_that_time = env.record.snapshots.iter().filter(|snapshot| {
                    snapshot.origin == Origin::Step && snapshot.created == newest
                });
                prop_assert!(
                    of_that_time.any(|snapshot| !layers.contains(&&snapshot.layer)),
                    "the newest of an env goes"
                );
            }
        }
        let kept = below(&inventory, tops);
        for layer in &layers {
            prop_assert!(!kept.contains(layer), "{layer} is needed");
        }
        // No remaining layer is based on a removed one, and descendants go before their parents.
        let going: BTreeSet<&LayerId> = layers.iter().copied().collect();
        for (id, item) in &inventory.layers {
            if let Some(parent) = item.layer.parent.as_ref()
                && going.contains(parent)
            {
                prop_assert!(going.contains(id), "{id} stands on {parent}");
                let at = |wanted: &LayerId| layers.iter().position(|layer| *layer == wanted);
                prop_assert!(at(id) < at(parent));
            }
        }
        for what in &gone {
            match what {
                GcTarget::Image { image } => {
                    prop_assert!(inventory.envs.values().all(|env| env.record.image_key != *image));
                    for (id, item) in &inventory.layers {
                        prop_assert!(item.layer.image_key != *image || going.contains(id));
                    }
                }
                GcTarget::Failed { env, .. } => prop_assert!(!inventory.envs[env].busy),
                _ => {}
            }
        }
        for (name, env) in &inventory.envs {
            let stands = env.record.failed.as_ref().and_then(|failed| failed.parent.as_ref());
            if let Some(parent) = stands && going.contains(parent) {
                let failed = GcTarget::Failed { env: name.clone(), tree: "t".into() };
                prop_assert!(gone.contains(&&failed));
            }
        }
    }

    #[test]
    fn limits_hold_and_what_is_left_is_counted((limits, asked) in limits(), inventory in inventories()) {
        let found = plan(&inventory, &limits, asked);
        prop_assert_eq!(found.estimate, found.items.iter().map(|item| item.bytes).sum::<u64>());
        let mut free = inventory.free;
        for item in &found.items {
            if item.rule == Rule::MinFree {
                prop_assert!(free < limits.min_free, "more goes than is needed");
            }
            free += item.bytes;
        }
        let everything = plan(&inventory, &limits, Some(1 << 50));
        prop_assert!(everything.spare <= found.spare);
        let for_space = |item: &crate::plan::gc::GcItem| matches!(item.rule, Rule::MinFree | Rule::KeepAtMost);
        if found.items.iter().any(for_space) && asked.is_none() {
            prop_assert!(found.spare >= limits.keep_at_least);
        }
        if let Some(asked) = asked {
            prop_assert!(found.estimate >= asked || found.spare == everything.spare);
        }
        if found.missing == 0 {
            prop_assert!(inventory.free + found.estimate >= limits.min_free);
        }
    }

    #[test]
    fn a_second_plan_after_the_first_asks_for_nothing((limits, _) in limits(), inventory in inventories()) {
        let first = plan(&inventory, &limits, None);
        let mut after = inventory.clone();
        after.free += first.estimate;
        after.used = after.used.map(|used| used.saturating_sub(first.estimate));
        for item in &first.items {
            if let Some(layer) = item.what.layer() {
                after.layers.remove(layer);
                for env in after.envs.values_mut() {
                    env.record.snapshots.retain(|snapshot| snapshot.layer != *layer);
                }
                continue;
            }
            match &item.what {
                GcTarget::Failed { env, .. } => after.envs.get_mut(env).unwrap().record.failed = None,
                GcTarget::Image { image } => {
                    after.images.remove(image);
                }
                GcTarget::Download { blob } => {
                    after.blobs.remove(blob);
                }
                other => prop_assert!(false, "{other:?}"),
            }
        }
        let second = plan(&after, &limits, None);
        prop_assert!(second.items.is_empty(), "{:?}", second.items);
    }
}
