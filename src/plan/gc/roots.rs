//! Owns what `gc` must not remove, and why: everything that an env is based on, that a user named, or that a running
//! command needs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::Inventory;
use crate::plan::ids::{EnvName, ImageKey, LayerId};
use crate::plan::layer::with_parents;
use crate::plan::record::{Origin, Record, Snapshot};

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Why {
    Running(EnvName),
    Lease(EnvName),
    Head(EnvName),
    Newest(EnvName, String),
    Pinned(EnvName, String),
    Changes(EnvName, String),
    /// A command may have changed the tree of a failed step that is based on it.
    Shown(EnvName),
    Last(EnvName, String),
    /// A killed `up` finished it for this env and could not record it.
    Unrecorded(EnvName),
    /// No step can rebuild it and no env names it: its env may have lost its record.
    Nameless,
    Locked(String),
    Unreadable(String),
    /// It was built a moment ago, and its builder may be about to use it.
    Fresh,
}

impl fmt::Display for Why {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Running(env) => write!(f, "in use by a command in env {env}"),
            Self::Lease(env) => write!(f, "a running command builds env {env} on it"),
            Self::Head(env) => write!(f, "env {env} depends on it"),
            Self::Newest(env, name) => write!(f, "newest snapshot of env {env}: {name}"),
            Self::Pinned(env, name) => {
                write!(f, "snapshot {name} of env {env}: you took it")
            }
            Self::Changes(env, name) => {
                write!(
                    f,
                    "snapshot {name} of env {env} keeps what `exec` or `shell` changed"
                )
            }
            Self::Shown(env) => {
                write!(
                    f,
                    "the tree of a failed step of env {env}, which `shell --failed` opened, is based on it"
                )
            }
            Self::Last(env, name) => write!(f, "`keep-last`: snapshot {name} of env {env}"),
            Self::Unrecorded(env) => write!(f, "the next `up` of env {env} continues from it"),
            Self::Nameless => {
                f.write_str("no env names it and no step makes it again: an env may have lost it")
            }
            Self::Locked(file) => write!(f, "lock file {file} names it"),
            Self::Unreadable(object) => {
                write!(
                    f,
                    "{object} is unreadable and may need it: rockenv fsck --repair"
                )
            }
            Self::Fresh => f.write_str("built within the last hour"),
        }
    }
}

/// Everything that stays, with the reasons.
#[derive(Clone, Debug, Default)]
pub(crate) struct Roots {
    /// Layers by id, including the parents of named ones.
    pub layers: BTreeMap<LayerId, BTreeSet<Why>>,
    pub images: BTreeMap<ImageKey, BTreeSet<Why>>,
    pub blobs: BTreeMap<String, BTreeSet<Why>>,
}

/// Returns the topmost layers that an idle env keeps, with the reason for each.
pub(crate) fn tops(env: &EnvName, record: &Record, keep_last: usize) -> Vec<(LayerId, Why)> {
    let mut tops = Vec::new();
    let mut add = |layer: &LayerId, why: Why| tops.push((layer.clone(), why));
    let name = || env.to_owned();
    if let Some(head) = &record.head.layer {
        add(head, Why::Head(name()));
    }
    if let Some(failed) = &record.failed
        && let (Some(parent), Some(_)) = (&failed.parent, &failed.shown)
    {
        add(parent, Why::Shown(name()));
    }
    let mut steps: Vec<&Snapshot> = Vec::new();
    for snapshot in &record.snapshots {
        let title = snapshot.name.clone();
        match snapshot.origin {
            Origin::User => add(&snapshot.layer, Why::Pinned(name(), title)),
            Origin::Auto => add(&snapshot.layer, Why::Changes(name(), title)),
            Origin::Step => steps.push(snapshot),
        }
    }
    // The record's order breaks ties, because the clock may have stood still.
    steps.reverse();
    steps.sort_by_key(|snapshot| std::cmp::Reverse(snapshot.created));
    for (at, snapshot) in steps.into_iter().enumerate() {
        let why = match at {
            0 => Why::Newest,
            _ if at < keep_last => Why::Last,
            _ => break,
        };
        add(&snapshot.layer, why(name(), snapshot.name.clone()));
    }
    tops
}

impl Roots {
    pub(crate) fn of(inventory: &Inventory, keep_last: usize) -> Self {
        let mut roots = Self::default();
        for (name, env) in &inventory.envs {
            let record = &env.record;
            if env.busy {
                for layer in record.layers() {
                    roots.layer(inventory, layer, &Why::Running(name.clone()));
                }
                roots.image(&record.image_key, Why::Running(name.clone()));
            }
            for (layer, why) in tops(name, record, keep_last) {
                roots.layer(inventory, &layer, &why);
            }
            roots.image(&record.image_key, Why::Head(name.clone()));
        }
        for (env, lease) in &inventory.leases {
            for layer in &lease.layers {
                roots.layer(inventory, layer, &Why::Lease(env.clone()));
            }
            roots.image(&lease.image, Why::Lease(env.clone()));
        }
        for (key, file) in &inventory.locked {
            let why = Why::Locked(file.clone());
            if let Some((image, _)) = inventory.images.get_key_value(key.as_str()) {
                roots.image(image, why.clone());
            }
            roots.blobs.entry(key.clone()).or_default().insert(why);
        }
        for (id, item) in &inventory.layers {
            if let Some(file) = inventory.locked.get(item.layer.locked_name()) {
                roots.layer(inventory, id, &Why::Locked(file.clone()));
            }
        }
        let envs = inventory.envs.values();
        let recorded: BTreeSet<&LayerId> = envs.flat_map(|env| env.record.layers()).collect();
        let makers = inventory.envs.iter();
        let makers: BTreeMap<_, _> = makers
            .map(|(name, env)| (&env.record.id, (name, env)))
            .collect();
        for (id, item) in &inventory.layers {
            let maker = item.layer.env.as_ref().and_then(|id| makers.get(id));
            if let Some((name, env)) = maker
                && !recorded.contains(id)
                && (env.busy || env.unsettled || !env.record.complete)
            {
                roots.layer(inventory, id, &Why::Unrecorded((*name).clone()));
            }
        }
        // A parent of a recorded layer is not nameless: it goes together with that layer.
        let named = with_parents(recorded, |id| inventory.layer(id));
        for (id, item) in &inventory.layers {
            if item.layer.key.is_none() && !named.contains(id) {
                roots.layer(inventory, id, &Why::Nameless);
            }
        }
        for object in &inventory.unreadable {
            let why = Why::Unreadable(object.clone());
            for id in inventory.layers.keys() {
                roots.layer(inventory, id, &why);
            }
            for key in inventory.images.keys() {
                roots.image(key, why.clone());
            }
        }
        for (key, image) in &inventory.images {
            if super::age(inventory.now, image.built) < super::FRESH {
                roots.image(key, Why::Fresh);
            }
        }
        roots
    }

    /// Keeps a layer, its parents, and the image at the bottom.
    fn layer(&mut self, inventory: &Inventory, top: &LayerId, why: &Why) {
        let mut next = Some(top);
        while let Some((id, item)) = next.and_then(|id| inventory.layers.get_key_value(id)) {
            let reasons = self.layers.entry(id.clone()).or_default();
            let known = !reasons.is_empty();
            // Layers below the top need only one reason.
            if !known || id == top {
                reasons.insert(why.clone());
            }
            if known {
                return;
            }
            self.image(&item.layer.image_key, why.clone());
            next = item.layer.parent.as_ref();
        }
    }

    fn image(&mut self, key: &ImageKey, why: Why) {
        self.images.entry(key.to_owned()).or_default().insert(why);
    }
}
