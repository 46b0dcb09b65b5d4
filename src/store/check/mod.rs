//! Owns finding faults in a store: a pure decision over an inventory, with the fix for each fault.

mod containers;
mod inventory;
mod layer_chain;
mod repair;

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;

pub(crate) use containers::ContainerItem;
pub(super) use inventory::{ASIDE, is_busy, names};
pub(crate) use inventory::{EnvItem, ImageItem, Inventory, Read};
use layer_chain::Fault;
pub(super) use repair::has_lost_format;
pub(crate) use repair::{Attempt, repair, repair_format};

use crate::plan::ids::{EnvName, LayerId, TreeId};
use crate::plan::record::{Record, Snapshot};
use crate::sys::shell::quoted_path;
use crate::ui::size::count;

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Problem {
    /// The object, such as "env `gfx1103`".
    pub object: String,
    pub message: String,
    /// Advice, usually a command.
    pub help: String,
    #[serde(skip)]
    pub fix: Fix,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Fix {
    /// Make the directory, or correct its owner and mode.
    Directory(&'static str),
    /// Rename it, so that nothing uses it and nothing is lost. The path is relative to the store.
    SetAside(PathBuf),
    /// Forget a layer's parent, which it does not need because its tree is complete.
    Cut(String),
    /// Set the record aside and rebuild it from the spec and the layers.
    Rebuild(EnvName),
    /// Set the journal aside, then clean up.
    Journal(EnvName),
    /// Set the spec aside, so that `up` writes a new one.
    Spec(EnvName),
    /// Lock the env, which cleans up after a killed command.
    CleanUp(EnvName),
    /// Drop missing objects from the record.
    Forget(EnvName),
    /// Discard files of image builds that are not running.
    ImageWork(String),
    /// Discard an interrupted merge: layer and directory.
    Merge(String, String),
    /// Discard a reference to a missing image.
    Reference(String),
    /// Remove a container that belongs to no env: the service's socket, and the container's id.
    Container(PathBuf, String),
    /// No repair can fix it.
    Nothing,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Findings {
    pub problems: Vec<Problem>,
    /// Notes, each with advice.
    pub notes: Vec<(String, String)>,
}

const REPAIR: &str = "rockenv fsck --repair";

pub(crate) fn examine(store: &Inventory) -> Findings {
    let mut examination = Examination {
        store,
        found: Findings::default(),
    };
    if !store.obstacles.is_empty() {
        examination.obstacles();
        return examination.found;
    }
    examination.directories();
    if !store.foreign.is_empty() {
        examination.foreign();
        return examination.found;
    }
    examination.layers();
    examination.images();
    for (name, env) in &store.envs {
        examination.env(name, env);
    }
    examination.volumes();
    examination.containers();
    examination.rest();
    examination.found
}

struct Examination<'a> {
    store: &'a Inventory,
    found: Findings,
}

impl Examination<'_> {
    fn problem(&mut self, object: impl Into<String>, message: impl Into<String>, fix: Fix) {
        self.found.problems.push(Problem {
            object: object.into(),
            message: message.into(),
            help: REPAIR.to_owned(),
            fix,
        });
    }

    /// Adds a problem that no repair can fix.
    fn unfixable(&mut self, object: String, message: String, help: String) {
        self.found.problems.push(Problem {
            object,
            message,
            help,
            fix: Fix::Nothing,
        });
    }

    fn note(&mut self, message: impl Into<String>, help: impl Into<String>) {
        self.found.notes.push((message.into(), help.into()));
    }

    fn directories(&mut self) {
        for directory in &self.store.directories {
            let object = format!("directory `{}`", directory.name);
            let fix = Fix::Directory(directory.name);
            match directory.found {
                None => self.problem(object, "is missing", fix),
                Some((uid, _)) if uid != self.store.owner => self.problem(
                    object,
                    format!("belongs to user {uid}, not to {}", self.store.owner),
                    fix,
                ),
                Some((_, mode)) if mode & directory.forbidden != 0 => {
                    let risk = match mode & 0o022 {
                        0 => "look into it",
                        _ => "write to it",
                    };
                    let message = format!("others may {risk}: its mode is {mode:04o}");
                    self.problem(object, message, fix);
                }
                Some(_) => {}
            }
        }
    }

    /// Reports obstacles in place of the store's directories. They are not rockenv's, and hide what the store
    /// contains.
    fn obstacles(&mut self) {
        for obstacle in &self.store.obstacles {
            let object = format!("directory `{}`", obstacle.path.display());
            self.unfixable(object, obstacle.message.clone(), obstacle.help.clone());
        }
    }

    /// Reports files of another version. They are not damaged, and files that look unused to this version may be in
    /// use.
    fn foreign(&mut self) {
        for (path, why) in &self.store.foreign {
            let help = "use the version that wrote it, or move the store away and begin a new one";
            let message = format!("was written by another version of rockenv: {why}");
            self.unfixable(format!("`{}`", path.display()), message, help.to_owned());
        }
    }

    fn layers(&mut self) {
        let busy = self.store.is_busy();
        for (id, item) in &self.store.layers {
            let object = format!("layer `{}`", short(id));
            let aside = Fix::SetAside(PathBuf::from("layers").join(id));
            match self.store.layer_fault(id) {
                Some(Fault::Own(message)) => self.problem(object, message, aside),
                Some(Fault::Parent(message)) => {
                    let fix = match self.store.is_whole(id) {
                        true => Fix::Cut(id.clone()),
                        false => aside,
                    };
                    self.problem(object, message, fix);
                }
                None => {
                    if let Read::Fine(layer) = &item.layer
                        && !item.sound
                    {
                        self.note(
                            format!("layer `{}` ({}) was not safely on disk when the machine stopped: rockenv builds it again when needed", short(id), layer.title),
                            "rockenv up PROFILE",
                        );
                    }
                }
            }
            for flat in item.merges.iter().filter(|_| !busy) {
                let object = format!("layer `{}`", short(id));
                let message = format!("`{flat}` was left by an interrupted merge");
                self.problem(object, message, Fix::Merge(id.clone(), flat.clone()));
            }
        }
    }

    fn images(&mut self) {
        for (key, item) in &self.store.images {
            let object = format!("image `{}`", short(key));
            let place = PathBuf::from("images").join(key);
            match &item.image {
                _ if !item.root => self.problem(object, "has no tree", Fix::SetAside(place)),
                Read::Damaged(why) => self.problem(
                    object,
                    format!("image.json is damaged: {why}"),
                    Fix::SetAside(place.join("image.json")),
                ),
                Read::Absent => self.note(
                    format!("image `{}` has no image.json; envs based on it still work; building it again restores the file", short(key)),
                    "rockenv image build NAME",
                ),
                Read::Fine(_) | Read::Foreign(_) => {}
            }
        }
        for (recipe, reference) in &self.store.references {
            let object = format!("image reference `{}`", short(recipe));
            let path = PathBuf::from("images/refs").join(format!("{recipe}.json"));
            match reference {
                Read::Damaged(why) => {
                    self.problem(object, format!("is damaged: {why}"), Fix::SetAside(path));
                }
                Read::Fine(key) if !self.store.images.contains_key(key) => self.problem(
                    object,
                    format!("names image `{}`, which is missing", short(key)),
                    Fix::Reference(recipe.clone()),
                ),
                _ => {}
            }
        }
        for (name, busy) in &self.store.image_work {
            if !busy {
                let message = "was left by an interrupted image build";
                let fix = Fix::ImageWork(name.clone());
                self.problem(format!("`images/{name}`"), message, fix);
            }
        }
    }

    fn env(&mut self, name: &EnvName, env: &EnvItem) {
        let object = format!("env `{name}`");
        let clean = || Fix::CleanUp(name.to_owned());
        let journalled = match &env.journal {
            Read::Damaged(why) if !env.busy => {
                let message = format!("its journal is damaged: {why}");
                self.problem(object.clone(), message, Fix::Journal(name.to_owned()));
                true
            }
            Read::Fine(count) if *count > 0 && !env.busy => {
                let message = "a command was interrupted: its journal is not empty";
                self.problem(object.clone(), message, clean());
                true
            }
            _ => false,
        };
        if env.left && !env.busy {
            let message = "was left by a killed `up --ephemeral`; the next command that changes the store removes it";
            self.problem(object.clone(), message, clean());
        }
        if env.state && !env.busy {
            let message = "a container was left by a killed command (run/state.json)";
            self.problem(object.clone(), message, clean());
        }
        match &env.record {
            Read::Damaged(why) => self.problem(
                object,
                format!("its record is damaged: {why}"),
                Fix::Rebuild(name.to_owned()),
            ),
            Read::Foreign(_) => {}
            Read::Absent => {
                if !env.trees.is_empty() && !env.busy {
                    self.problem(object, "trees of a removed env remain", clean());
                }
            }
            Read::Fine(record) => {
                // The journal may name the tree's new place, so it must be applied first.
                if !journalled {
                    for message in self.store.without_losses(record, env).1 {
                        self.problem(object.clone(), message, Fix::Forget(name.to_owned()));
                    }
                }
                for message in env.lost_results.iter().filter(|_| !env.busy) {
                    let help = record.up_command();
                    self.unfixable(object.clone(), message.clone(), help);
                }
                self.missing_image(&object, record);
                if let Some(why) = &env.damaged_spec {
                    let message = format!("its resolved spec is damaged: {why}");
                    self.problem(object.clone(), message, Fix::Spec(name.to_owned()));
                }
                let live: BTreeSet<&str> = record.trees().map(TreeId::as_str).collect();
                let trees = env.trees.iter();
                let orphans = trees.filter(|tree| !live.contains(tree.as_str())).count();
                if orphans > 0 && !env.busy {
                    let message = format!("{} left by a killed command", count(orphans, "tree"));
                    self.problem(object, message, clean());
                }
            }
        }
    }

    fn missing_image(&mut self, object: &str, record: &Record) {
        // A layer keeps the image that it was made on; the env may have a newer one.
        let layers = record.layers().filter_map(|id| self.store.layer(id));
        let mut keys: BTreeSet<&str> = layers.map(|layer| layer.image_key.as_str()).collect();
        if record.head.layer.is_none() {
            keys.insert(&record.image_key);
        }
        for key in keys {
            if !self.store.images.get(key).is_some_and(|image| image.root) {
                let (key, image) = (short(key), &record.image);
                let message = format!("its base image `{key}` ({image}) is missing");
                self.unfixable(object.to_owned(), message, record.up_command());
            }
        }
    }

    fn volumes(&mut self) {
        // A running command may be creating a volume.
        if self.store.is_busy() {
            return;
        }
        for volume in &self.store.volumes {
            let id = volume.split('-').next().unwrap_or_default();
            let mut records = self.store.fine_records();
            let owner = records.find(|(_, record)| record.id == id);
            let object = format!("volume `{volume}`");
            match owner {
                Some((name, record)) => {
                    let mut known = record.head.volumes.values();
                    if !known.any(|known| **known == **volume) {
                        let message = format!("was left by an earlier state of env `{name}`");
                        self.problem(object, message, Fix::CleanUp(name.clone()));
                    }
                }
                // A repair that rebuilds the record finds the env's volumes again.
                None if self.store.has_damaged_records() => self.note(
                    format!("{object} may belong to an env whose record is damaged"),
                    REPAIR,
                ),
                // It may be all that is left of an env without a record, and hours of work. Only the user may delete
                // it.
                None => {
                    let place = self.store.root.join("volumes").join(volume);
                    let message = format!("{object} belongs to no known env");
                    self.note(message, format!("rm -r {}", quoted_path(&place)));
                }
            }
        }
    }

    fn rest(&mut self) {
        for (path, busy) in &self.store.partial_sources {
            if !busy {
                let state = "is an interrupted clone; the next `up` that needs it starts it again";
                let message = format!("`{}` {state}", path.display());
                self.note(message, format!("rm -r {}", quoted_path(path)));
            }
        }
        for path in &self.store.rest {
            let message = format!("`{path}` was left by an interrupted removal");
            self.note(message, "rockenv gc");
        }
        // A command that discards data starts a process that deletes it. That process may still be at work. If it was
        // killed, nothing is lost.
        if let Some(entries) = self.store.trash.filter(|entries| *entries > 0) {
            let message = format!("the trash contains {} to delete", count(entries, "item"));
            self.note(message, "rockenv gc");
        }
        let mut lost = BTreeSet::new();
        for (name, env) in &self.store.envs {
            if let Some(path) = env.lost_record() {
                lost.insert(path);
                self.note(
                    format!("env `{name}` has lost its record: `rockenv up` rebuilds it from its layers, which `rockenv gc` keeps until then"),
                    format!("rockenv up PROFILE --name {name}; or discard its layers: rm {}", quoted_path(path)),
                );
            }
        }
        let others = self.store.set_aside.iter();
        for path in others.filter(|path| !lost.contains(path.as_path())) {
            let message = format!("`{}` was set aside by a repair", path.display());
            self.note(message, format!("rm -r {}", quoted_path(path)));
        }
    }
}

impl Inventory {
    pub(super) fn is_busy(&self) -> bool {
        self.envs.values().any(|env| env.busy)
    }

    /// Returns whether a repair may rebuild the record of an env, and with it the env's claim to its build volumes.
    pub(super) fn has_damaged_records(&self) -> bool {
        let mut envs = self.envs.values();
        envs.any(|env| matches!(env.record, Read::Damaged(_)))
    }

    /// Returns a record without the missing objects that it names, and a phrase for each of them.
    fn without_losses(&self, record: &Record, env: &EnvItem) -> (Record, Vec<String>) {
        let (mut record, mut losses) = (record.clone(), Vec::new());
        record.snapshots.retain(|snapshot| {
            let fault = self.chain_fault(&snapshot.layer);
            let lost = |fault: &String| format!("snapshot `{}` is lost: {fault}", snapshot.name);
            losses.extend(fault.as_ref().map(lost));
            fault.is_none()
        });
        let fault_below = |layer: &Option<LayerId>| self.chain_fault(layer.as_deref()?);
        let below = fault_below(&record.head.layer);
        losses.extend(below.map(|fault| format!("a layer below it is lost: {fault}")));
        if let Some(tree) = record.head.tree.clone()
            && !env.trees.contains(tree.as_str())
        {
            losses.push(format!("its live tree `{tree}` is missing"));
            record.head.drop_tree();
            self.adopt_published(&mut record, &tree);
        }
        if fault_below(&record.head.layer).is_some() {
            record.head.drop_tree();
            record.head.layer = record.snapshots.last().map(|last| last.layer.clone());
            record.complete = false;
        }
        let known = record.head.volumes.len();
        record.head.volumes.retain(|name, id| {
            let is_there = self.volumes.contains(id.as_str());
            let lost = || format!("its build volume `{name}` (`{id}`) is missing");
            losses.extend((!is_there).then(lost));
            is_there
        });
        if record.head.volumes.len() < known {
            // Another volume takes its place, so the volumes no longer have the content of one layer.
            record.head.volumes_from = None;
        }
        let failed = record.failed.take_if(|failed| {
            fault_below(&failed.parent).is_some() || !env.trees.contains(failed.tree.as_str())
        });
        losses.extend(failed.map(|failed| {
            let step = failed.step;
            format!("the tree of its failed step `{step}` is missing")
        }));
        (record, losses)
    }

    /// Adds the layer that a missing live tree became, if the record does not name it yet.
    fn adopt_published(&self, record: &mut Record, tree: &TreeId) {
        let mut layers = self.fine_layers();
        let layer = layers.find(|layer| layer.tree.as_ref() == Some(tree));
        if let Some(layer) = layer
            && self.chain_fault(&layer.id).is_none()
        {
            let name = record.free_name(&layer.title);
            record.head.layer = Some(layer.id.clone());
            record.snapshots.push(Snapshot::of(layer, name));
        }
    }
}

fn short(id: &str) -> &str {
    match id.char_indices().nth(12) {
        Some((end, _)) if id.is_ascii() && !id.contains('.') => &id[..end],
        _ => id,
    }
}
