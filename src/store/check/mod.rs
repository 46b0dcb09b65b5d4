//! Owns what can be wrong with a store: a pure decision over an inventory of it, and what would mend each thing.

mod chain;
mod containers;
mod inventory;
mod repair;

use std::collections::BTreeSet;
use std::path::PathBuf;

use serde::Serialize;

use chain::Fault;
pub use containers::ContainerItem;
pub(super) use inventory::{ASIDE, is_busy, names};
pub use inventory::{Directory, EnvItem, ImageItem, Inventory, LayerItem, Read};
pub use repair::{Attempt, repair, repair_format};

use crate::plan::ids::LayerId;
use crate::plan::record::Record;
use crate::tree::Method;

/// Something wrong.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Problem {
    /// What it is about, such as "env `gfx1103`".
    pub object: String,
    /// What is wrong with it.
    pub message: String,
    /// What to type.
    pub help: String,
    /// What mends it.
    #[serde(skip)]
    pub mend: Mend,
}

/// What mends a problem.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Mend {
    /// Make the directory, or give it the owner and mode it should have.
    Directory(&'static str),
    /// Rename it, so that it is neither used nor lost; relative to the store.
    SetAside(PathBuf),
    /// Forget a layer's parent, which it does not need: its tree is whole.
    Cut(String),
    /// Set the record aside and make another from the spec and the layers.
    Rebuild(String),
    /// Set the journal aside, then clean up.
    Journal(String),
    /// Set the spec aside, so that `up` writes another.
    Spec(String),
    /// Lock the env: that cleans up after a killed command.
    CleanUp(String),
    /// Drop from the record what is not there.
    Forget(String),
    /// Throw away what no image build is working on.
    ImageWork(String),
    /// Throw away a merge that was cut off: layer and directory.
    Merge(String, String),
    /// Throw away a reference to an image that is not there.
    Reference(String),
    /// Remove a container of no env: its service's socket, and its id.
    Container(PathBuf, String),
    /// Nothing that could be done here.
    Nothing,
}

/// What was found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Findings {
    /// What is wrong.
    pub problems: Vec<Problem>,
    /// What is worth knowing, with what to type.
    pub notes: Vec<(String, String)>,
}

const REPAIR: &str = "rockenv fsck --repair";

/// Says what is wrong with a store.
pub fn examine(store: &Inventory) -> Findings {
    let mut judge = Judge {
        store,
        found: Findings::default(),
    };
    judge.directories();
    if !store.foreign.is_empty() {
        judge.foreign();
        return judge.found;
    }
    judge.layers();
    judge.images();
    for (name, env) in &store.envs {
        judge.env(name, env);
    }
    judge.volumes();
    judge.containers();
    judge.rest();
    judge.found
}

struct Judge<'a> {
    store: &'a Inventory,
    found: Findings,
}

impl Judge<'_> {
    fn problem(&mut self, object: impl Into<String>, message: impl Into<String>, mend: Mend) {
        self.found.problems.push(Problem {
            object: object.into(),
            message: message.into(),
            help: REPAIR.to_owned(),
            mend,
        });
    }

    fn note(&mut self, message: impl Into<String>, help: impl Into<String>) {
        self.found.notes.push((message.into(), help.into()));
    }

    fn directories(&mut self) {
        for directory in &self.store.directories {
            let object = format!("directory `{}`", directory.name);
            let mend = Mend::Directory(directory.name);
            match directory.found {
                None => self.problem(object, "is missing", mend),
                Some((uid, _)) if uid != self.store.owner => self.problem(
                    object,
                    format!("belongs to user {uid}, not to {}", self.store.owner),
                    mend,
                ),
                Some((_, mode)) if mode & directory.forbidden != 0 => self.problem(
                    object,
                    format!("others may {}: its mode is {mode:04o}", directory.risk()),
                    mend,
                ),
                Some(_) => {}
            }
        }
    }

    /// What another version wrote is not damaged, and what looks superfluous to this one may not be.
    fn foreign(&mut self) {
        for (path, why) in &self.store.foreign {
            self.found.problems.push(Problem {
                object: format!("`{}`", path.display()),
                message: format!("was written by another version of rockenv: {why}"),
                help: "use the version that wrote it, or move the store away and begin a new one"
                    .to_owned(),
                mend: Mend::Nothing,
            });
        }
    }

    fn layers(&mut self) {
        let busy = self.store.is_busy();
        for (id, item) in &self.store.layers {
            let object = format!("layer `{}`", short(id));
            let aside = Mend::SetAside(PathBuf::from("layers").join(id));
            match self.store.layer_fault(id) {
                Some(Fault::Own(message)) => self.problem(object, message, aside),
                Some(Fault::Parent(message)) => {
                    // A merged or cloned tree is whole without what it was made from.
                    let whole = self.store.method != Method::Overlay;
                    let mend = if whole { Mend::Cut(id.clone()) } else { aside };
                    self.problem(object, message, mend);
                }
                None => {
                    if let Read::Fine(layer) = &item.layer
                        && !item.sound
                    {
                        self.note(
                            format!("layer `{}` ({}) was not safely on disk when the machine stopped: it is built again when a command needs it", short(id), layer.title),
                            "rockenv up",
                        );
                    }
                }
            }
            for flat in item.merges.iter().filter(|_| !busy) {
                self.problem(
                    format!("layer `{}`", short(id)),
                    format!("`{flat}` is left of a merge that was cut off"),
                    Mend::Merge(id.clone(), flat.clone()),
                );
            }
        }
    }

    fn images(&mut self) {
        for (key, item) in &self.store.images {
            let object = format!("image `{}`", short(key));
            let place = PathBuf::from("images").join(key);
            match &item.image {
                _ if !item.root => self.problem(object, "has no tree", Mend::SetAside(place)),
                Read::Damaged(why) => self.problem(
                    object,
                    format!("image.json is damaged: {why}"),
                    Mend::SetAside(place.join("image.json")),
                ),
                Read::Absent => self.note(
                    format!("image `{}` has no image.json; envs that stand on it work, and building it again writes it", short(key)),
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
                    self.problem(object, format!("is damaged: {why}"), Mend::SetAside(path));
                }
                Read::Fine(key) if !self.store.images.contains_key(key) => self.problem(
                    object,
                    format!("names image `{}`, which is missing", short(key)),
                    Mend::Reference(recipe.clone()),
                ),
                _ => {}
            }
        }
        for (name, busy) in &self.store.image_work {
            if !busy {
                self.problem(
                    format!("`images/{name}`"),
                    "is left of an image build that was cut off",
                    Mend::ImageWork(name.clone()),
                );
            }
        }
    }

    fn env(&mut self, name: &str, env: &EnvItem) {
        let object = format!("env `{name}`");
        let clean = || Mend::CleanUp(name.to_owned());
        let journalled = match &env.journal {
            Read::Damaged(why) if !env.busy => {
                self.problem(
                    object.clone(),
                    format!("its journal is damaged: {why}"),
                    Mend::Journal(name.to_owned()),
                );
                true
            }
            Read::Fine(count) if *count > 0 && !env.busy => {
                self.problem(
                    object.clone(),
                    "a command was cut off in the middle: its journal is not empty",
                    clean(),
                );
                true
            }
            _ => false,
        };
        if env.left && !env.busy {
            self.problem(
                object.clone(),
                "is left of an `up --ephemeral` that was killed; the next command that changes the store removes it",
                clean(),
            );
        }
        if env.state && !env.busy {
            self.problem(
                object.clone(),
                "a container was left by a killed command (run/state.json)",
                clean(),
            );
        }
        match &env.record {
            Read::Damaged(why) => self.problem(
                object,
                format!("its record is damaged: {why}"),
                Mend::Rebuild(name.to_owned()),
            ),
            Read::Foreign(_) => {}
            Read::Absent => {
                if !env.trees.is_empty() && !env.busy {
                    self.problem(object, "trees are left of an env that was removed", clean());
                }
            }
            Read::Fine(record) => {
                // The journal may say where a tree went; it comes first.
                if !journalled {
                    for message in self.store.losses(record, env) {
                        self.problem(object.clone(), message, Mend::Forget(name.to_owned()));
                    }
                }
                for message in env.lost_results.iter().filter(|_| !env.busy) {
                    self.found.problems.push(Problem {
                        object: object.clone(),
                        message: message.clone(),
                        help: format!("rockenv up ... --name {name}"),
                        mend: Mend::Nothing,
                    });
                }
                self.missing_image(&object, record);
                if let Some(why) = &env.damaged_spec {
                    self.problem(
                        object.clone(),
                        format!("its resolved spec is damaged: {why}"),
                        Mend::Spec(name.to_owned()),
                    );
                }
                let live: BTreeSet<&str> = record.trees().collect();
                let orphans = env
                    .trees
                    .iter()
                    .filter(|tree| !live.contains(tree.as_str()))
                    .count();
                if orphans > 0 && !env.busy {
                    self.problem(
                        object,
                        format!("{} left by a killed command", count(orphans, "tree")),
                        clean(),
                    );
                }
            }
        }
    }

    fn missing_image(&mut self, object: &str, record: &Record) {
        // A layer stays on the image it was made on; the env may have a newer one.
        let mut keys: BTreeSet<&str> = record
            .layers()
            .filter_map(|id| match &self.store.layers.get(id.as_str())?.layer {
                Read::Fine(layer) => Some(layer.image_key.as_str()),
                _ => None,
            })
            .collect();
        if record.head.layer.is_none() {
            keys.insert(&record.image_key);
        }
        for key in keys {
            if !self.store.images.get(key).is_some_and(|image| image.root) {
                self.found.problems.push(Problem {
                    object: object.to_owned(),
                    message: format!(
                        "its base image `{}` ({}) is missing",
                        short(key),
                        record.image
                    ),
                    help: format!("rockenv image build {}", record.image),
                    mend: Mend::Nothing,
                });
            }
        }
    }

    fn volumes(&mut self) {
        // A command that runs may be making one.
        if self.store.is_busy() {
            return;
        }
        for volume in &self.store.volumes {
            let id = volume.split('-').next().unwrap_or_default();
            let owner = self
                .store
                .envs
                .iter()
                .find_map(|(name, env)| match &env.record {
                    Read::Fine(record) if record.id == id => Some((name, record)),
                    _ => None,
                });
            let object = format!("volume `{volume}`");
            match owner {
                Some((name, record)) => {
                    if !record.head.volumes.values().any(|known| known == volume) {
                        let message = format!("is left of an earlier state of env `{name}`");
                        self.problem(object, message, Mend::CleanUp(name.clone()));
                    }
                }
                // It may be all that is left of an env that lost its record, and hours of work: whoever wants the space says so.
                None => self.note(
                    format!("{object} belongs to no known env"),
                    format!(
                        "rm -r {}",
                        self.store.root.join("volumes").join(volume).display()
                    ),
                ),
            }
        }
    }

    fn rest(&mut self) {
        for (path, busy) in &self.store.partial_sources {
            if !busy {
                self.note(
                    format!("`{}` is a clone that was cut off; the next `up` that needs it starts it again", path.display()),
                    format!("rm -r {}", path.display()),
                );
            }
        }
        // Every command that discards something starts a process that deletes it: it may not have come to that yet, and
        // where it was killed, nothing is lost by what is left.
        if let Some(entries) = self.store.trash.filter(|entries| *entries > 0) {
            self.note(
                format!("the trash has {} to delete", count(entries, "thing")),
                "rockenv fsck --repair",
            );
        }
        for (name, env) in &self.store.envs {
            if let Some(path) = env.lost_record() {
                self.note(
                    format!("env `{name}` has lost its record: `rockenv up` makes it again from its layers, which `rockenv gc` does not touch until then"),
                    format!("rockenv up ... --name {name}; or give its layers up: rm {}", path.display()),
                );
            }
        }
        let lost = |path: &&PathBuf| {
            let mut envs = self.store.envs.values();
            envs.any(|env| env.lost_record() == Some(path.as_path()))
        };
        for path in self.store.set_aside.iter().filter(|path| !lost(path)) {
            self.note(
                format!("`{}` was set aside by a repair", path.display()),
                format!("rm -r {}", path.display()),
            );
        }
    }
}

impl Inventory {
    /// Returns whether any env is held by a command.
    pub(super) fn is_busy(&self) -> bool {
        self.envs.values().any(|env| env.busy)
    }

    /// Returns whether there are envs of which nothing reliable is known: a record that was made again may have another id.
    fn lost_records(&self) -> bool {
        self.envs
            .values()
            .any(|env| env.old_record.is_some() || matches!(env.record, Read::Damaged(_)))
    }

    /// Says what a record names and is not there.
    fn losses(&self, record: &Record, env: &EnvItem) -> Vec<String> {
        let mut losses = Vec::new();
        for snapshot in &record.snapshots {
            if let Some(fault) = self.chain_fault(&snapshot.layer) {
                losses.push(format!("snapshot `{}` is lost: {fault}", snapshot.name));
            }
        }
        if let Some(layer) = &record.head.layer
            && let Some(fault) = self.chain_fault(layer)
        {
            losses.push(format!("a layer below it is lost: {fault}"));
        }
        if let Some(tree) = &record.head.tree
            && !env.trees.contains(tree)
        {
            losses.push(format!("its live tree `{tree}` is missing"));
        }
        for (name, id) in &record.head.volumes {
            if !self.volumes.contains(id) {
                losses.push(format!("its build volume `{name}` (`{id}`) is missing"));
            }
        }
        if let Some(failed) = &record.failed {
            let fault = failed
                .parent
                .as_deref()
                .and_then(|layer| self.chain_fault(layer));
            if fault.is_some() || !env.trees.contains(&failed.tree) {
                losses.push(format!(
                    "the tree of its failed step `{}` is missing",
                    failed.step
                ));
            }
        }
        losses
    }

    /// Returns the record without what is not there.
    fn without_losses(&self, record: &Record, env: &EnvItem) -> Record {
        let mut record = record.clone();
        record
            .snapshots
            .retain(|snapshot| self.chain_fault(&snapshot.layer).is_none());
        if let Some(tree) = record.head.tree.clone()
            && !env.trees.contains(&tree)
        {
            record.head.tree = None;
            self.adopt_published(&mut record, &tree);
        }
        let lost = |layer: &Option<LayerId>| {
            layer
                .as_ref()
                .is_some_and(|layer| self.chain_fault(layer).is_some())
        };
        if lost(&record.head.layer) {
            record.head.tree = None;
            record.head.layer = record.snapshots.last().map(|last| last.layer.clone());
            record.complete = false;
        }
        record
            .head
            .volumes
            .retain(|_, id| self.volumes.contains(id));
        if record
            .failed
            .as_ref()
            .is_some_and(|failed| lost(&failed.parent) || !env.trees.contains(&failed.tree))
        {
            record.failed = None;
        }
        record
    }

    /// A live tree that is gone may be a layer by now, of which the record was never told.
    fn adopt_published(&self, record: &mut Record, tree: &str) {
        let layer = self.layers.values().find_map(|item| match &item.layer {
            Read::Fine(layer) if layer.tree == tree => Some(layer),
            _ => None,
        });
        if let Some(layer) = layer
            && self.chain_fault(&layer.id).is_none()
        {
            let name = record.free_name(&layer.title);
            record.head.layer = Some(layer.id.clone());
            record.snapshots.push(crate::plan::record::Snapshot {
                name,
                layer: layer.id.clone(),
                key: layer.key.clone(),
                again: false,
                origin: match layer.key {
                    Some(_) => crate::plan::record::Origin::Step,
                    None => crate::plan::record::Origin::User,
                },
                created: layer.created,
            });
        }
    }
}

fn short(id: &str) -> &str {
    match id.char_indices().nth(12) {
        Some((end, _)) if id.is_ascii() && !id.contains('.') => &id[..end],
        _ => id,
    }
}

fn count(number: usize, what: &str) -> String {
    match number {
        1 => format!("1 {what}"),
        many => format!("{many} {what}s"),
    }
}
