//! Owns what is deleted of an env, and what must stay: the other half of every change that replaces something.
//!
//! Nothing here is outside `envs/`, `layers/` and `volumes/`: sources, caches, outputs and host directories cannot
//! be reached.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;

use fs_err as fs;

use super::check::names;
use super::journal::{self, Entry};
use super::snapshot::no_snapshot;
use super::{LockedEnv, Record, Store, ephemeral};
use crate::plan::ids::LayerId;
use crate::plan::record::Snapshot;
use crate::sys::atomic;
use crate::sys::error::Result;
use crate::tree;

/// What the record of an env is called as soon as the env is being removed: it says what is to go with it.
pub(super) const REMOVED: &str = "removed.json";

impl LockedEnv<'_> {
    /// Forgets a snapshot and removes its layer where nothing else stands on it.
    pub fn remove_snapshot(&mut self, name: &str) -> Result<()> {
        let record = self.known_record()?;
        let snapshot = record
            .snapshot(name)
            .ok_or_else(|| no_snapshot(self.name(), name))?
            .clone();
        self.touch();
        self.forget(&snapshot.layer, |known| known.name == snapshot.name)
    }

    /// Drops snapshots of a layer from the record, and the layer where nobody needs it any more.
    pub(super) fn forget(
        &mut self,
        layer: &LayerId,
        which: impl Fn(&Snapshot) -> bool,
    ) -> Result<()> {
        // With all that goes with it: killed in between, nobody could tell any more what it stood on.
        let mut layers = vec![layer.clone()];
        if let Ok(chain) = self.store.chain(layer) {
            layers.extend(chain.into_iter().map(|below| below.id));
        }
        journal::begin(
            &self.directory,
            &Entry::Forget {
                layers: layers.clone(),
            },
        )?;
        let mut record = self.known_record()?.clone();
        record.snapshots.retain(|known| !which(known));
        self.put(record)?;
        self.store.remove_unused_layers(&layers)?;
        journal::clear(&self.directory)
    }

    /// Throws away this env's live volumes that are not in `keep`.
    pub(super) fn discard_volumes(&self, id: &str, keep: &BTreeSet<String>) -> Result<()> {
        for name in names(&self.store.root.join("volumes"))? {
            if name
                .strip_prefix(id)
                .is_some_and(|rest| rest.starts_with('-'))
                && !keep.contains(&name)
            {
                self.store.discard(&self.store.volume_dir(&name))?;
            }
        }
        Ok(())
    }

    /// Removes the env: its trees, build volumes, logs, and the layers nobody else uses. Never a source, cache,
    /// output or host directory: those are not below anything removed here.
    pub fn remove(mut self) -> Result<()> {
        self.clear()
    }

    pub(super) fn clear(&mut self) -> Result<()> {
        if self.record.is_none() {
            // A command ended, or was killed, before it came to the record.
            return self.clear_directory();
        }
        // From here on it is gone, whatever happens. No file grows for it, and none is made: the disk may be full.
        let rename = || {
            let record = self.directory.join("record.json");
            fs::rename(record, self.directory.join(REMOVED))
        };
        match rename() {
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                self.empty_trees()?;
                rename()?;
            }
            other => other?,
        }
        match fs::File::open(&self.directory)?.sync_all() {
            Err(error) if error.kind() != ErrorKind::StorageFull => return Err(error.into()),
            _ => {}
        }
        self.finish_clearing()
    }

    /// Unlinks what is in the build volumes and live trees of an env that is being removed: on a btrfs whose metadata are full
    /// there is no room for a name, nor to delete a subvolume, until files are gone.
    fn empty_trees(&self) -> Result<()> {
        let record = self.known_record()?;
        let volumes = record.head.volumes.values();
        let mut tops: Vec<_> = volumes.map(|id| self.store.volume_dir(id)).collect();
        for tree in record.trees() {
            let tree = self.directory.join("trees").join(tree);
            tops.extend(["root", "diff"].map(|name| tree.join(name)));
        }
        for top in tops {
            for name in names(&top)? {
                // What cannot go now goes with the rest.
                drop(tree::remove_tree(&top.join(name)));
            }
        }
        Ok(())
    }

    /// Goes on with a removal that was begun; returns whether one was.
    pub(super) fn go_on_clearing(&mut self) -> Result<bool> {
        let begun = fs::symlink_metadata(self.directory.join(REMOVED)).is_ok();
        if begun {
            self.finish_clearing()?;
        }
        Ok(begun)
    }

    fn finish_clearing(&mut self) -> Result<()> {
        let removed = self.directory.join(REMOVED);
        let Ok(Some(record)) = atomic::read_json::<Record>(&removed) else {
            return self.clear_directory();
        };
        let mut layers: BTreeSet<LayerId> = record.layers().cloned().collect();
        for top in layers.clone() {
            // A damaged chain must not keep an env from being removed.
            if let Ok(chain) = self.store.chain(&top) {
                layers.extend(chain.into_iter().map(|layer| layer.id));
            }
        }
        // Also what a killed command published and never recorded.
        layers.extend(self.store.layers_of(&record.id)?);
        let layers = layers.into_iter().collect::<Vec<_>>();
        self.finish_removal(&record.id, &layers)
    }

    pub(super) fn finish_removal(&mut self, id: &str, layers: &[LayerId]) -> Result<()> {
        self.store.discard(&self.directory.join("record.json"))?;
        self.record = None;
        self.discard_volumes(id, &BTreeSet::new())?;
        // Lock files or not: who removes an env wants its space.
        self.store.remove_layers(layers, std::iter::empty())?;
        self.clear_directory()
    }

    fn clear_directory(&self) -> Result<()> {
        for name in names(&self.directory)? {
            // The lock stays: somebody may be waiting for it.
            let stays = ["lock", "journal.jsonl", REMOVED, ephemeral::FILE];
            if !stays.contains(&name.as_str()) {
                self.store.discard(&self.directory.join(name))?;
            }
        }
        journal::clear(&self.directory)?;
        self.store.discard(&self.directory.join(REMOVED))?;
        // Last: until then whoever comes finds what is left to do.
        self.disown()
    }
}

impl Store {
    /// Throws away those of `candidates` and of what they stand on that no env's record, no running command and no lock file
    /// needs, directly or as a parent.
    pub fn remove_unused_layers(&self, candidates: &[LayerId]) -> Result<()> {
        if candidates.is_empty() {
            return Ok(());
        }
        // Where it is not known what is locked, nothing goes; `gc` says so.
        let Ok(locked) = self.locked() else {
            return Ok(());
        };
        let locked = locked.names.into_keys();
        self.remove_layers(candidates, locked.filter_map(|name| name.try_into().ok()))
    }

    /// The same with other reasons to keep layers than lock files.
    fn remove_layers(
        &self,
        candidates: &[LayerId],
        keep: impl Iterator<Item = LayerId>,
    ) -> Result<()> {
        let _lock = self.lock("rm")?;
        // What cannot be read may need any of them; `gc` takes them when it can.
        if !self.unreadable()?.is_empty() {
            return Ok(());
        }
        let mut tops = Vec::new();
        for name in self.envs()? {
            let Some(record) = self.record(&name)? else {
                continue;
            };
            for top in record.layers() {
                tops.push(top.clone());
            }
        }
        let leases = self.leases()?.into_values();
        tops.extend(leases.flat_map(|lease| lease.layers).chain(keep));
        let mut needed = BTreeSet::new();
        for top in tops {
            let mut next = Some(top);
            while let Some(id) = next
                && needed.insert(id.clone())
            {
                next = self.layer(&id)?.and_then(|layer| layer.parent);
            }
        }
        let mut parents: BTreeMap<LayerId, Option<LayerId>> = BTreeMap::new();
        for layer in self.layers()? {
            parents.insert(layer.id, layer.parent);
        }
        // What nobody needs may stand on another such layer, where a command was killed. Then that one goes first, or neither.
        let mut left: BTreeSet<&LayerId> = candidates.iter().collect();
        let mut next = left.pop_first().cloned();
        while let Some(id) = next {
            let stood_on = parents.values().any(|parent| parent.as_ref() == Some(&id));
            let below = match needed.contains(&id) || stood_on {
                true => None,
                false => {
                    self.discard(&self.layer_dir(&id))?;
                    // With it goes what only it stood on.
                    parents.remove(&id).flatten()
                }
            };
            next = below.or_else(|| left.pop_first().cloned());
        }
        Ok(())
    }
}
