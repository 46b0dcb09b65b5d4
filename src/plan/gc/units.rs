//! Owns the removable items: each with its bytes, the cost of making it again, and its parent.

use std::collections::{BTreeMap, BTreeSet};

use jiff::Timestamp;

use super::roots::Roots;
use super::{Env, FINGERPRINTS, GcTarget, Inventory};
use crate::plan::ids::{EnvName, ImageKey, LayerId, StepKey};
use crate::plan::layer::with_parents;
use crate::plan::step_log;

/// Assumed rebuild speed of items without a recorded time, in bytes per second: that of a download.
const GUESS: u64 = 10 << 20;

pub(super) struct Unit {
    pub(super) what: GcTarget,
    pub(super) name: String,
    pub(super) bytes: u64,
    pub(super) rebuild_ms: u64,
    pub(super) used: Timestamp,
    /// Why it is garbage, if it is.
    pub(super) garbage: Option<String>,
    /// Its parent, if that is removable too.
    pub(super) below: Option<usize>,
    /// Removed only by age: its bytes are not worth the loss.
    pub(super) by_age: bool,
}

impl Unit {
    /// Makes a unit that is not garbage, has no parent, and takes as long as a download to rebuild.
    fn new(what: GcTarget, name: String, bytes: u64, used: Timestamp) -> Self {
        Self {
            what,
            name,
            bytes,
            rebuild_ms: guess(bytes),
            used,
            garbage: None,
            below: None,
            by_age: false,
        }
    }

    /// Returns its bytes; 0 for garbage and logs, which no command reuses.
    pub(super) fn reusable_bytes(&self) -> u64 {
        if self.garbage.is_none() && !self.by_age {
            self.bytes
        } else {
            0
        }
    }
}

pub(super) fn guess(bytes: u64) -> u64 {
    1000 + bytes / (GUESS / 1000)
}

pub(super) fn units(inventory: &Inventory, roots: &Roots) -> Vec<Unit> {
    let mut units = Vec::new();
    let mut images: BTreeMap<&str, usize> = BTreeMap::new();
    let all = inventory.layers.values();
    let used: BTreeSet<&ImageKey> = all.map(|item| &item.layer.image_key).collect();
    for (key, image) in &inventory.images {
        if roots.images.contains_key(key) {
            continue;
        }
        images.insert(key, units.len());
        let what = GcTarget::Image { image: key.clone() };
        let name = format!("image {}", image.name);
        let mut unit = Unit::new(what, name, image.bytes, image.used);
        unit.rebuild_ms = image.took_ms.unwrap_or(unit.rebuild_ms);
        unit.garbage = (!image.current && !used.contains(key))
            .then(|| "its recipe was built again and nothing depends on it".to_owned());
        units.push(unit);
    }
    let layers = layers(inventory, roots, &mut units);
    for (id, at) in &layers {
        let item = &inventory.layers[*id];
        units[*at].below = match &item.layer.parent {
            Some(parent) => layers.get(parent).copied(),
            None => images.get(item.layer.image_key.as_str()).copied(),
        };
    }
    let envs = inventory.envs.iter();
    for (name, env) in envs.filter(|(_, env)| !env.busy && !env.unsettled) {
        env_units(name, env, inventory.now, &layers, &mut units);
    }
    for ((env, volume, path), project) in &inventory.projects {
        let what = GcTarget::Project {
            env: env.clone(),
            volume: volume.clone(),
            path: path.clone(),
        };
        let name = format!("sub-project {env}/{volume}/{path}");
        let used = inventory.envs.get(env).map(|env| env.used);
        let used = used.unwrap_or(inventory.now);
        let mut unit = Unit::new(what, name, project.bytes, used);
        unit.rebuild_ms = project.took_ms.unwrap_or(unit.rebuild_ms);
        units.push(unit);
    }
    for (name, blob) in &inventory.blobs {
        if roots.blobs.contains_key(name) {
            continue;
        }
        let what = GcTarget::Download { blob: name.clone() };
        let name = match name.strip_prefix(FINGERPRINTS) {
            Some(name) => format!("fingerprint {}", short(name)),
            None => format!("download {}", short(name)),
        };
        units.push(Unit::new(what, name, blob.bytes, blob.used));
    }
    units
}

/// Adds the tree of an env's failed step, and the logs that its record does not name.
fn env_units(
    name: &EnvName,
    env: &Env,
    now: Timestamp,
    layers: &BTreeMap<&LayerId, usize>,
    units: &mut Vec<Unit>,
) {
    let failed = &env.record.failed;
    // Manual changes cannot be rebuilt.
    if let Some(failed) = failed
        && !env.failed_edited
    {
        let below = failed.parent.as_ref().and_then(|id| layers.get(id));
        let what = GcTarget::Failed {
            env: name.to_owned(),
            tree: failed.tree.clone(),
        };
        let name = format!("tree of failed step {name}/{}", failed.step);
        units.push(Unit {
            rebuild_ms: 0,
            below: below.copied(),
            ..Unit::new(what, name, env.failed, env.used)
        });
    }
    let steps = env.record.steps.iter();
    let logs = steps.filter_map(|step| step.log.as_deref());
    let logs = logs.chain(failed.as_ref().map(|failed| failed.log.as_str()));
    let named: BTreeSet<&str> = logs.filter_map(|log| log.split('/').nth(1)).collect();
    let logs = env.logs.iter();
    for (run, bytes) in logs.filter(|(run, _)| !named.contains(run.as_str())) {
        let what = GcTarget::Logs {
            env: name.to_owned(),
            run: run.clone(),
        };
        let used = step_log::began(run).unwrap_or(now);
        units.push(Unit {
            rebuild_ms: 0,
            by_age: true,
            ..Unit::new(what, format!("logs {name}/{run}"), *bytes, used)
        });
    }
}

/// Adds the removable layers; returns the position of each.
fn layers<'a>(
    inventory: &'a Inventory,
    roots: &Roots,
    units: &mut Vec<Unit>,
) -> BTreeMap<&'a LayerId, usize> {
    // For each layer: its names in records, and when those envs were last used.
    let mut users: BTreeMap<&LayerId, (Timestamp, Vec<String>)> = BTreeMap::new();
    let mut times: BTreeMap<&StepKey, u64> = BTreeMap::new();
    for (name, env) in &inventory.envs {
        for snapshot in &env.record.snapshots {
            let entry = users
                .entry(&snapshot.layer)
                .or_insert((env.used, Vec::new()));
            entry.0 = entry.0.max(env.used);
            entry.1.push(format!("{name}/{}", snapshot.name));
        }
        for step in &env.record.steps {
            if let (Some(key), Some(cost)) = (&step.key, &step.cost) {
                times.insert(key, cost.wall_ms);
            }
        }
    }
    let envs = inventory.envs.values();
    let layer = |id: &LayerId| inventory.layer(id);
    let needed = with_parents(envs.flat_map(|env| env.record.layers()), layer);
    // Pulled layers wait for a new env. `rm` of an env that used them removes them.
    let pulled = inventory.layers.iter();
    let pulled = pulled.filter(|(id, item)| item.arrived.is_some() && !needed.contains(id));
    let awaited = with_parents(pulled.map(|(id, _)| id), layer);
    let mut places = BTreeMap::new();
    for (id, item) in &inventory.layers {
        if roots.layers.contains_key(id) {
            continue;
        }
        let layer = &item.layer;
        let recorded = layer.cost.map(|cost| cost.wall_ms);
        let known = layer.key.as_ref().and_then(|key| times.get(key).copied());
        let known_users = users.get(id).cloned();
        let (used, names) = known_users.unwrap_or((layer.created, Vec::new()));
        // A pulled layer below an env's snapshot still counts as pulled. Otherwise this plan would keep layers for it
        // that the next plan removes.
        let arrived = item.arrived.filter(|_| names.is_empty());
        let (short, title) = (short(id), &layer.title);
        let (what, name) = match (arrived, names.is_empty()) {
            (Some(_), _) => (
                GcTarget::Pulled { layer: id.clone() },
                format!("pulled snapshot {title} ({short})"),
            ),
            (None, true) => (
                GcTarget::Layer { layer: id.clone() },
                format!("layer {short} ({title})"),
            ),
            (None, false) => (
                GcTarget::Snapshot { layer: id.clone() },
                format!("snapshot {}", names.join(", ")),
            ),
        };
        let built = recorded.or(known).filter(|_| arrived.is_none());
        places.insert(id, units.len());
        let used = arrived.unwrap_or(used.max(layer.created));
        let mut unit = Unit::new(what, name, item.bytes, used);
        unit.rebuild_ms = built.unwrap_or(unit.rebuild_ms);
        unit.garbage =
            (!needed.contains(id) && !awaited.contains(id)).then(|| "no env needs it".to_owned());
        units.push(unit);
    }
    places
}

pub(super) fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}
