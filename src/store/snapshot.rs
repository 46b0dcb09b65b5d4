//! Owns an env's snapshots: freezing its state, returning it to a frozen state, and copying another env's state.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;

use super::attempt::{ATTEMPT, RUNNING};
use super::history::{ByHand, History, VolumesFrom};
use super::journal::{self, JournalEntry};
use super::layer::{Layer, VolumeState, boot_id};
use super::{LockedEnv, check_name, lock_files};
use crate::plan::ids::{LayerId, StepKey, TreeId, VolumeId, VolumeName};
use crate::plan::pins::Pins;
use crate::plan::record::{Head, Origin, Outcome, Record, Snapshot};
use crate::rocm::therock::ArtifactFingerprints;
use crate::sys::atomic::random_id;
use crate::sys::error::{Error, Kind, Result, exists};
use crate::sys::suggest;
use crate::tree;

#[derive(Debug)]
pub struct Freeze<'a> {
    pub tree: &'a TreeId,
    pub parent: Option<&'a LayerId>,
    /// Name of the snapshot in the env.
    pub name: &'a str,
    /// The step's key, if a step made it.
    pub key: Option<&'a StepKey>,
    pub origin: Origin,
    /// The step ran although its key had a layer.
    pub again: bool,
    pub cost: Option<super::layer::Cost>,
    /// Fingerprints that the step found.
    pub prints: Option<ArtifactFingerprints>,
    /// Files that the step reports to have fetched.
    pub pins: Pins,
    /// Its history, if it differs from that of the build volumes.
    pub history: Option<History>,
}

impl<'a> Freeze<'a> {
    /// Describes a snapshot that no step makes.
    pub(super) fn without_step(
        tree: &'a TreeId,
        parent: Option<&'a LayerId>,
        name: &'a str,
        origin: Origin,
    ) -> Self {
        Self {
            tree,
            parent,
            name,
            key: None,
            origin,
            again: false,
            cost: None,
            prints: None,
            pins: Pins::new(),
            history: None,
        }
    }
}

impl LockedEnv<'_> {
    /// Freezes a tree as a layer and moves the env to its snapshot. `change` makes further changes in the same commit.
    pub fn freeze(
        &mut self,
        freeze: &Freeze<'_>,
        change: impl FnOnce(&mut Record),
    ) -> Result<LayerId> {
        let mut record = self.known_record()?.clone();
        let directory = self.tree_dir(freeze.tree);
        // An interrupted freeze may have left frozen volumes.
        self.store.discard(&directory.join("volumes"))?;
        let volumes = record.head.volumes.iter();
        let volumes = volumes
            .map(|(name, id)| Ok((name.clone(), self.freeze_volume(&directory, name, id)?)))
            .collect::<Result<_>>()?;
        let history = self.history_of(freeze)?;
        // Volumes that neither a step nor a command wrote to still have the content of the layer below.
        let is_changed = freeze.key.is_none() && self.is_changed_by_hand()?;
        let unchanged = (freeze.key.is_none() && !is_changed).then(|| record.head.volumes_from());
        let unsaved = is_changed && !self.store.freezes_volumes();
        let kept = match &record.service {
            Some(socket) => {
                let is_empty = self.store.are_volumes_empty(&record.head);
                let bare = is_empty && history == History::Clean;
                Some(self.commit_tree(socket, freeze, bare)?)
            }
            None => None,
        };
        // Under the global lock, no command deletes a layer between the check and the record that names it.
        let shared = self.store.lock_shared()?;
        let begun = self.store.attempt(self.name(), &record)?;
        let begun = begun.filter(|_| freeze.key.is_none());
        let mut layer = Layer {
            id: self.store.random_layer_id()?,
            key: freeze.key.cloned(),
            parent: freeze.parent.cloned(),
            env: Some(record.id.clone()),
            image_key: self.store.image_below(freeze.parent, &record.image_key)?,
            tree: Some(freeze.tree.clone()),
            origins: self.origins()?,
            begun: begun.as_ref().map(|begun| begun.key.clone()),
            began: begun.and_then(|begun| begun.began),
            title: freeze.name.to_owned(),
            created: Timestamp::now(),
            boot: boot_id(),
            volumes,
            history: history.clone(),
            kept,
            cost: freeze.cost,
            prints: freeze.prints.clone(),
            pins: freeze.pins.clone(),
        };
        let snapshot = loop {
            layer.id = self.store.free_id(&layer)?;
            let snapshot = Snapshot {
                origin: freeze.origin,
                again: freeze.again,
                ..Snapshot::of(&layer, freeze.name.to_owned())
            };
            if record.trees().any(|known| known == freeze.tree) {
                let (tree, snapshot) = (freeze.tree.clone(), snapshot.clone());
                let entry = JournalEntry::Freeze { tree, snapshot };
                journal::begin(&self.directory, &entry)?;
            }
            if self.store.publish(&directory, &layer)? {
                break snapshot;
            }
        };
        let id = layer.id;
        let live = record.head.tree.clone().filter(|tree| tree != freeze.tree);
        let replaced = record.snapshot(freeze.name).map(|old| old.layer.clone());
        let replaced = replaced.filter(|old| *old != id);
        push_snapshot(&mut record, snapshot, history, unsaved);
        if let Some(from) = unchanged {
            record.head.volumes_from = Some(from);
        }
        change(&mut record);
        let dropped = live.filter(|tree| record.head.tree.as_ref() != Some(tree));
        match freeze.key.is_some() && replaced.is_none() {
            true => self.commit_step(record)?,
            false => self.commit(record)?,
        }
        drop(shared);
        self.remove_frozen(freeze.tree);
        journal::clear(&self.directory)?;
        if let Some(tree) = dropped {
            self.store.discard(&self.tree_dir(&tree))?;
        }
        if let Some(layer) = replaced {
            self.store.remove_unused_layers(&[layer])?;
        }
        Ok(id)
    }

    /// Returns the origins of the build volumes' sources, if known: a rollback does not restore the spec.
    fn origins(&self) -> Result<Option<BTreeMap<String, String>>> {
        let (store, name) = (self.store, self.name());
        let Ok(last) = store.spec(name) else {
            return Ok(None);
        };
        store.origins_in_volumes(name, self.known_record()?, &last)
    }

    fn freeze_volume(&self, tree: &Path, name: &str, id: &VolumeId) -> Result<VolumeState> {
        let live = self.live_volume(name, id)?;
        if self.store.freezes_volumes() {
            fs::create_dir_all(tree.join("volumes"))?;
            tree::clone_tree(self.store.method(), &live, &tree.join("volumes").join(name))?;
            return Ok(VolumeState::Frozen);
        }
        Ok(if self.store.is_volume_empty(id) {
            VolumeState::Empty
        } else {
            VolumeState::Live(id.clone())
        })
    }

    /// Moves the env to an existing layer and adds `snapshots` to the record. With `restore`, the volumes come from
    /// the layer, if it has them; otherwise they stay. The caller decides whether the env is complete there.
    pub fn move_to_layer(
        &mut self,
        snapshots: Vec<Snapshot>,
        layer: &LayerId,
        restore: bool,
    ) -> Result<()> {
        let removed = || {
            not_found!("layer `{layer}` was removed in the meantime").help("run the command again")
        };
        let found = self.store.layer(layer)?.ok_or_else(removed)?;
        let mut record = self.known_record()?.clone();
        record.head.drop_tree();
        record.head.layer = Some(layer.clone());
        record.complete = false;
        if restore {
            // Stores that cannot freeze volumes keep them, unless the layer came from a store that can.
            if self.store.freezes_volumes() {
                record.head.volumes.clear();
                record.head.by_hand = None;
            }
            let frozen = |name: &VolumeName| found.volumes.get(name) == Some(&VolumeState::Frozen);
            for name in found.volumes.keys().filter(|name| frozen(name)) {
                let id = self.new_volume_id(name)?;
                let frozen = self.store.layer_dir(layer).join("volumes").join(name);
                tree::clone_tree(self.store.method(), &frozen, &self.store.volume_dir(&id))?;
                record.head.volumes.insert(name.clone(), id);
            }
            if record.head.volumes.keys().all(frozen) {
                let from = VolumesFrom::new(Some(found.id.clone()), found.history.clone());
                record.head.volumes_from = Some(from);
            }
        }
        let mut replaced = Vec::new();
        for snapshot in snapshots {
            replaced.extend(record.snapshot(&snapshot.name).map(|old| old.layer.clone()));
            record.snapshots.retain(|known| known.name != snapshot.name);
            record.snapshots.push(snapshot);
        }
        // Locked only now, because copying volumes takes longer. Under the lock, no command deletes the layer before
        // the record names it.
        let shared = self.store.lock_shared()?;
        self.store.layer(layer)?.ok_or_else(removed)?;
        self.commit(record)?;
        drop(shared);
        self.store.remove_unused_layers(&replaced)?;
        self.collect_garbage()
    }

    /// Moves the env to the bare image. The content of the volumes is lost unless a snapshot has it.
    pub fn reset(&mut self) -> Result<()> {
        self.update(|record| {
            record.head = Head::default();
            record.complete = false;
        })?;
        self.collect_garbage()
    }

    /// Moves the env to the bare image and keeps its live volumes.
    pub fn reset_root(&mut self) -> Result<()> {
        self.update(|record| {
            record.head.layer = None;
            record.head.drop_tree();
            record.complete = false;
        })?;
        self.collect_garbage()
    }

    pub fn snapshot(&mut self, name: &str, origin: Origin) -> Result<()> {
        check_name(name)?;
        if self.known_record()?.snapshot(name).is_some() {
            let (env, create) = (self.name(), "rockenv snapshot create");
            let error = usage!("env `{env}` already has a snapshot `{name}`");
            return Err(error.help(format!("{create} {env} NAME, with a name that is free")));
        }
        let tree = self.live_tree()?;
        let parent = self.known_record()?.head.layer.clone();
        let freeze = Freeze::without_step(&tree, parent.as_ref(), name, origin);
        self.freeze(&freeze, |_| {})?;
        Ok(())
    }

    /// Renames manual snapshots that a step's snapshot would replace. Returns the old and the new names.
    pub fn make_room(&mut self, steps: &BTreeSet<&str>) -> Result<Vec<(String, String)>> {
        let mut record = self.known_record()?.clone();
        let mut renamed = Vec::new();
        for position in 0..record.snapshots.len() {
            let known = &record.snapshots[position];
            let old = known.name.clone();
            if known.origin == Origin::Step || !steps.contains(old.as_str()) {
                continue;
            }
            let mut new = record.free_name(&old);
            while steps.contains(new.as_str()) {
                new = record.free_name(&format!("{new}-2"));
            }
            record.snapshots[position].name.clone_from(&new);
            renamed.push((old, new));
        }
        if !renamed.is_empty() {
            self.commit(record)?;
        }
        Ok(renamed)
    }

    /// Goes back to a snapshot. Keeps state that no snapshot contains as a new one, and returns its name.
    pub fn rollback(&mut self, name: &str) -> Result<Option<String>> {
        let record = self.known_record()?;
        let snapshot = record.snapshot(name);
        let snapshot = snapshot.ok_or_else(|| no_snapshot(self.name(), record, name))?;
        let layer = snapshot.layer.clone();
        // Before the env leaves a state that works.
        self.store
            .chain(&layer)
            .map_err(|error| match error.kind() {
                Kind::NoLayer => {
                    not_found!("snapshot `{name}` has lost a layer").help("rockenv fsck --repair")
                }
                _ => error,
            })?;
        let key = record.last_done().and_then(|step| step.key.as_ref());
        let last = key.and_then(|key| record.of_step(key));
        // `up` decides whether an earlier state is complete.
        let is_complete = record.complete && last.is_some_and(|last| last.layer == layer);
        let kept = match self.is_modified()? || self.has_unsaved_volumes()? {
            true => Some(self.keep("before-rollback")?),
            false => None,
        };
        // A volume that no snapshot contains has no other copy.
        let head = &self.known_record()?.head;
        let restore = self.store.freezes_volumes() || self.store.are_volumes_empty(head);
        self.move_to_layer(Vec::new(), &layer, restore)?;
        self.update(|record| record.complete = is_complete)?;
        Ok(kept)
    }

    /// Makes this new env a copy of the current state of `from`.
    pub fn fork_from(&mut self, from: &mut LockedEnv<'_>) -> Result<()> {
        // Read first: the spec may be damaged.
        let mut spec = from.store.spec(from.name())?;
        from.keep_changes("before-fork")?;
        let mut record = from.known_record()?.clone();
        record.id = random_id()?.try_into()?;
        record.created = Timestamp::now();
        record.failed = None;
        let (command, own) = (record.up_command(), format!(" --name {}", from.name()));
        let (before, after) = command.split_once(&own).unwrap_or((command.as_str(), ""));
        record.command = Some(format!("{before} --name {}{after}", self.name()));
        record.head.drop_tree();
        record.head.volumes = BTreeMap::new();
        for step in &mut record.steps {
            // Logs stay with the env that wrote them, and so does the tree of a failed step.
            step.log = None;
            if step.outcome == Outcome::Failed {
                step.outcome = Outcome::Pending;
                (step.reason, step.cost) = (None, None);
            }
        }
        // Until the record exists, only this entry names the volumes.
        let undo = JournalEntry::Remove {
            id: record.id.clone(),
            layers: Vec::new(),
        };
        journal::begin(&self.directory, &undo)?;
        self.record = Some(record.clone());
        if self.store.freezes_volumes() {
            for (name, live) in &from.known_record()?.head.volumes {
                let id = self.new_volume_id(name)?;
                let (live, own) = (from.live_volume(name, live)?, self.store.volume_dir(&id));
                tree::clone_tree(self.store.method(), &live, &own)?;
                record.head.volumes.insert(name.clone(), id);
            }
        } else {
            record.head.by_hand = None;
        }
        self.record = None;
        // Copy views of sources. They are small, except for files that steps wrote there.
        let views = from.directory.join("views");
        if exists(&views)? {
            let own = self.directory.join("views");
            self.store.discard(&own)?;
            tree::copy_tree(&views, &own)?;
            // The record of a begun step: it names the build volumes of `from`.
            self.copy_file(from, ATTEMPT)?;
        }
        self.name().clone_into(&mut spec.name);
        self.save_spec(&spec)?;
        self.copy_file(from, lock_files::COPY)?;
        self.copy_file(from, RUNNING)?;
        // A command that removes layers under the store's lock has to find this record before `from` changes its own.
        let shared = self.store.lock_shared()?;
        self.commit(record)?;
        drop(shared);
        // The copies of build volumes include the partial work of an unfinished step.
        let (store, name, record) = (from.store, from.name(), from.known_record()?);
        if store.freezes_volumes()
            && let Some(begun) = store.attempt(name, record)?
        {
            let began = store.began(name, record, &begun.key, true)?;
            self.begin_attempt(&begun.key, true, began)?;
            if from.is_joined()? {
                self.store.join_attempt(self.name())?;
            }
        }
        journal::clear(&self.directory)
    }
}

/// Adds a snapshot and moves the env to it. `unsaved`: it does not contain what a command wrote to build volumes,
/// because they are not frozen.
pub(super) fn push_snapshot(
    record: &mut Record,
    snapshot: Snapshot,
    history: History,
    unsaved: bool,
) {
    let by_hand = record.head.by_hand().filter(|_| unsaved);
    record.head.layer = Some(snapshot.layer.clone());
    record.head.volumes_from = Some(VolumesFrom::new(record.head.layer.clone(), history));
    (record.head.tree, record.head.by_hand) = (None, by_hand.map(ByHand::Since));
    record.snapshots.retain(|known| known.name != snapshot.name);
    record.snapshots.push(snapshot);
}

pub(crate) fn no_snapshot(env: &str, record: &Record, name: &str) -> Error {
    let known = record.snapshots.iter().map(|known| known.name.as_str());
    let help = suggest::help(name, known, &format!("rockenv snapshot ls {env}"));
    not_found!("env `{env}` has no snapshot `{name}`").help(help)
}
