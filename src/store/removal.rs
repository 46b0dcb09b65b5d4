//! Owns removing an env or parts of it, and the objects that a change leaves unused.
//!
//! Deletes only below `envs/`, `layers/` and `volumes/`, never sources, caches, outputs or host directories.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use fs_err as fs;
use sha2::{Digest as _, Sha256};

use super::check::names;
use super::env::remove;
use super::journal::{self, JournalEntry};
use super::snapshot::no_snapshot;
use super::{Layer, LockedEnv, Record, Store, ephemeral};
use crate::plan::ids::{EnvId, LayerId, VolumeId};
use crate::plan::layer::with_parents;
use crate::plan::record::Snapshot;
use crate::sys::atomic;
use crate::sys::error::{Kind, Result, exists, is_full};
use crate::tree;

/// Directory of the marks that name snapshots as removed although the record still lists them. It contains nothing
/// else: XFS keeps a small directory in its inode, and a full disk has no block for a larger one.
const REMOVED_SNAPSHOTS: &str = "gone";
/// Prefixes of a mark's path: in its directory, or beside the record if a full disk has no room for a directory.
const PLACES: [&str; 2] = ["gone/", "gone."];

/// Maximum number of snapshots of one mark. Its name has 16 digits for their digest and one for each four of them.
const MARKED: usize = 900;

/// Marks the record's snapshots that are not in `kept` as removed, if the disk is too full for a new record.
///
/// A mark is a hard link to the record, which takes neither inode nor block. Its name has a bit for each snapshot.
/// If further snapshots are removed, the mark is renamed. A long list has several marks.
fn mark_removed(env: &Path, kept: &[Snapshot]) -> Result<()> {
    let path = env.join("record.json");
    let record = atomic::read_json::<Record>(&path)?;
    let listed = record.map(|record| record.snapshots).unwrap_or_default();
    let known = marks(env)?;
    for some in listed.chunks(MARKED) {
        let digest = digest(some);
        let bits = some.chunks(4).map(|four| {
            let bit = |(index, one)| u32::from(!kept.contains(one)) << index;
            char::from_digit(four.iter().enumerate().map(bit).sum(), 16)
        });
        let new = digest.chars().chain(bits.flatten()).collect::<String>();
        let [own, beside] = PLACES;
        match known.iter().find(|(_, mark)| mark.starts_with(&digest)) {
            Some((place, mark)) => fs::rename(at(env, place, mark), at(env, place, &new))?,
            None if some.iter().all(|one| kept.contains(one)) => {}
            None => {
                let place = match make_directory(env)? {
                    true => own,
                    false => beside,
                };
                fs::hard_link(&path, at(env, place, &new))?;
            }
        }
    }
    Ok(())
}

fn at(env: &Path, place: &str, mark: &str) -> PathBuf {
    env.join(format!("{place}{mark}"))
}

fn marks(env: &Path) -> Result<Vec<(&'static str, String)>> {
    let [own, beside] = PLACES;
    let within = names(&env.join(REMOVED_SNAPSHOTS))?.into_iter();
    let mut marks: Vec<_> = within.map(|mark| (own, mark)).collect();
    let names = names(env)?.into_iter();
    marks.extend(names.filter_map(|name| Some((beside, name.strip_prefix(beside)?.to_owned()))));
    Ok(marks)
}

/// Creates the directory of the mark, unless the env has it. Returns false if there is no room for it.
fn make_directory(env: &Path) -> Result<bool> {
    match fs::create_dir(env.join(REMOVED_SNAPSHOTS)) {
        Err(error) if is_full(&error) => Ok(false),
        Err(error) if error.kind() != ErrorKind::AlreadyExists => Err(error.into()),
        _ => Ok(true),
    }
}

/// Returns a digest of snapshots that a record lists. A mark applies only to those with its digest.
fn digest(listed: &[Snapshot]) -> String {
    let mut hash = Sha256::new();
    for snapshot in listed {
        let (name, layer, created) = (&snapshot.name, &snapshot.layer, &snapshot.created);
        hash.update(format!("{layer}/{created}/{name}\n"));
    }
    hex::encode(&hash.finalize()[..8])
}

/// Removes the marked snapshots from a record.
pub(super) fn leave_out_removed(env: &Path, record: &mut Record) -> Result<()> {
    let marks = marks(env)?;
    if marks.is_empty() {
        return Ok(());
    }
    let mut kept = Vec::new();
    for some in record.snapshots.chunks(MARKED) {
        let digest = digest(some);
        let bits = marks
            .iter()
            .find_map(|(_, mark)| mark.strip_prefix(&digest));
        let is_kept = |index: usize| {
            let four = bits.and_then(|bits| bits.get(index / 4..=index / 4));
            let four = four.and_then(|digit| u8::from_str_radix(digit, 16).ok());
            four.is_none_or(|four| (four >> (index % 4)) & 1 == 0)
        };
        let stays = some.iter().enumerate().filter(|one| is_kept(one.0));
        kept.extend(stays.map(|(_, snapshot)| snapshot.clone()));
    }
    record.snapshots = kept;
    Ok(())
}

/// Removes the marks, after a record without their snapshots was written. Creates the directory if there is room.
pub(super) fn clear_removal_marks(env: &Path) -> Result<()> {
    make_directory(env)?;
    for (place, mark) in marks(env)? {
        fs::remove_file(at(env, place, &mark))?;
    }
    Ok(())
}

/// Name of the record file during the removal of its env: it lists the objects to remove.
pub(super) const REMOVED: &str = "removed.json";

impl LockedEnv<'_> {
    /// Forgets snapshots and removes their layers if nothing else depends on them.
    pub fn remove_snapshots(&mut self, names: &BTreeSet<&str>) -> Result<()> {
        let record = self.known_record()?;
        if let Some(name) = names.iter().find(|name| record.snapshot(name).is_none()) {
            return Err(no_snapshot(self.name(), record, name));
        }
        self.touch();
        let layers = self.forget(|known| names.contains(known.name.as_str()))?;
        self.store.remove_unused_layers(&layers)?;
        journal::clear(&self.directory)
    }

    /// Drops snapshots from the record. Returns their layers and those below, for [`Store::remove_unused_layers`]. The
    /// journal names them until the caller clears it.
    pub(super) fn forget(&mut self, which: impl Fn(&Snapshot) -> bool) -> Result<Vec<LayerId>> {
        let mut record = self.known_record()?.clone();
        let (gone, kept): (Vec<_>, Vec<_>) = record.snapshots.into_iter().partition(which);
        if gone.is_empty() {
            return Ok(Vec::new());
        }
        record.snapshots = kept;
        let tops: Vec<LayerId> = gone.into_iter().map(|snapshot| snapshot.layer).collect();
        // Include unused parents: after a kill, nothing else would name them.
        let mut layers = self.store.with_those_below(&tops);
        layers.extend(tops);
        let layers: Vec<LayerId> = layers.into_iter().collect();
        let entry = JournalEntry::Forget {
            layers: layers.clone(),
        };
        match journal::begin(&self.directory, &entry) {
            // Without the entry, `gc` finds the leftovers of a kill.
            Err(error) if error.kind() == Kind::OutOfSpace => {}
            other => other?,
        }
        match self.put(record.clone()) {
            Err(error) if error.kind() == Kind::OutOfSpace => {
                mark_removed(&self.directory, &record.snapshots)?;
                self.record = Some(record);
            }
            other => other?,
        }
        Ok(layers)
    }

    /// Discards this env's live volumes that are not in `keep`.
    pub(super) fn discard_volumes(&self, id: &EnvId, keep: &BTreeSet<VolumeId>) -> Result<()> {
        let volumes = self.store.root.join("volumes");
        self.store.discard_in(&volumes, |name| {
            let rest = name.strip_prefix(id.as_str());
            rest.is_some_and(|rest| rest.starts_with('-')) && !keep.contains(name)
        })
    }

    /// Removes the env: its trees, build volumes, logs, and the layers that nothing else uses.
    pub fn remove(mut self) -> Result<()> {
        self.clear()
    }

    pub(super) fn clear(&mut self) -> Result<()> {
        if self.record.is_none() {
            // A command ended, or was killed, before it wrote the record.
            return self.clear_directory();
        }
        // After the rename, which takes next to no space, the env is gone, whatever happens.
        let rename = || {
            let record = self.directory.join("record.json");
            fs::rename(record, self.directory.join(REMOVED))
        };
        match rename() {
            Err(error) if is_full(&error) => {
                self.empty_trees()?;
                rename()?;
            }
            other => other?,
        }
        match fs::File::open(&self.directory)?.sync_all() {
            Err(error) if !is_full(&error) => return Err(error.into()),
            _ => {}
        }
        self.finish_clearing()
    }

    /// Unlinks the content of build volumes and live trees of an env that is being removed. A btrfs with full
    /// metadata cannot create a name or delete a subvolume until files are gone.
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
                // Whatever fails to unlink is removed with the rest of the env.
                drop(tree::remove_tree(&top.join(name)));
            }
        }
        Ok(())
    }

    /// Continues a removal in progress; returns whether there was one.
    pub(super) fn resume_clearing(&mut self) -> Result<bool> {
        let begun = exists(&self.directory.join(REMOVED))?;
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
        let tops: Vec<LayerId> = record.layers().cloned().collect();
        let mut layers = self.store.with_those_below(&tops);
        layers.extend(tops);
        // Includes layers that a killed command published and never recorded.
        let made = self.store.layers()?.into_iter();
        let made = made.filter(|layer| layer.env.as_ref() == Some(&record.id));
        layers.extend(made.map(|layer| layer.id));
        let layers = layers.into_iter().collect::<Vec<_>>();
        self.finish_removal(&record.id, &layers)
    }

    pub(super) fn finish_removal(&mut self, id: &EnvId, layers: &[LayerId]) -> Result<()> {
        self.store.discard(&self.directory.join("record.json"))?;
        self.record = None;
        self.discard_volumes(id, &BTreeSet::new())?;
        // Lock files do not count: removing an env is meant to free its space.
        self.store.remove_layers(layers, |_| false)?;
        self.clear_directory()
    }

    fn clear_directory(&self) -> Result<()> {
        // The lock stays: another command may be waiting for it.
        let stays = ["lock", "journal.jsonl", REMOVED, ephemeral::FILE];
        let goes = |name: &str| !stays.contains(&name);
        self.store.discard_in(&self.directory, goes)?;
        journal::clear(&self.directory)?;
        self.store.discard(&self.directory.join(REMOVED))?;
        // Done last: until then, the next command finds the remaining work.
        remove(&self.directory.join(ephemeral::FILE))
    }
}

impl Store {
    /// Discards those of `candidates` and their parents that no env's record, running command or lock file needs.
    pub fn remove_unused_layers(&self, candidates: &[LayerId]) -> Result<()> {
        self.remove_unused_layers_but(candidates, None).map(drop)
    }

    /// Does the same, but also keeps `kept`. Returns the candidates that still exist.
    pub fn remove_unused_layers_but(
        &self,
        candidates: &[LayerId],
        kept: Option<&LayerId>,
    ) -> Result<Vec<LayerId>> {
        // If the locked layers are unknown, remove nothing; `gc` reports the problem.
        if !candidates.is_empty()
            && let Ok(locked) = self.locked()
        {
            self.remove_layers(candidates, |layer| {
                kept == Some(&layer.id) || locked.names.contains_key(layer.locked_name())
            })?;
        }
        let left = candidates.iter().filter(|id| self.layer_dir(id).exists());
        Ok(left.cloned().collect())
    }

    /// Does the same, with the layers that `is_kept` accepts in place of those of lock files.
    fn remove_layers(
        &self,
        candidates: &[LayerId],
        is_kept: impl Fn(&Layer) -> bool,
    ) -> Result<()> {
        let _lock = match self.lock("rm") {
            // `gc` removes them later. The same applies if unreadable objects may need any of them.
            Err(error) if error.kind() == Kind::Busy => return Ok(()),
            lock => lock?,
        };
        let users = self.users()?;
        if !users.unreadable.is_empty() {
            return Ok(());
        }
        let leased = users.leases.values().flat_map(|lease| &lease.layers);
        let recorded = users.records.values().flat_map(Record::layers);
        let kept = users.layers.values().filter(|layer| is_kept(layer));
        let kept = kept.map(|layer| &layer.id);
        let layer = |id: &LayerId| users.layers.get(id);
        let going = with_parents(candidates, layer);
        // After a killed command, an unneeded layer may be based on a candidate. Then both stay.
        let others = users.layers.keys().filter(|id| !going.contains(*id));
        let tops = leased.chain(recorded).chain(kept).chain(others);
        let mut needed = with_parents(tops, layer);
        let going = going.into_iter().filter(|id| !needed.contains(*id));
        let mut going: Vec<&LayerId> = going.collect();
        // Each layer is removed before those below it.
        going.sort_by_cached_key(|id| std::cmp::Reverse(with_parents([*id], layer).len()));
        let mut outcome = Ok(());
        for id in going {
            if needed.contains(id) {
                continue;
            }
            if let Err(error) = self.discard(&self.layer_dir(id)) {
                // A layer that cannot be removed keeps only the layers below it.
                needed.extend(with_parents([id], layer));
                outcome = outcome.and(Err(error));
            }
        }
        outcome
    }
}

#[cfg(test)]
mod tests {
    use jiff::Timestamp;

    use super::*;

    #[test]
    fn any_number_of_snapshots_can_be_marked_as_removed() {
        let directory = tempfile::tempdir().unwrap();
        let env = directory.path();
        let layer = Layer::sample("layer".into());
        let snapshot = |number: usize| Snapshot::of(&layer, format!("s{number}"));
        let record = Record {
            snapshots: (0..2000).map(snapshot).collect(),
            ..Record::sample("id", Timestamp::UNIX_EPOCH)
        };
        atomic::write_json(&env.join("record.json"), &record).unwrap();
        let mut kept = record.snapshots.clone();
        // The first and the last of a mark, one in another mark, and another one of the first.
        for (gone, marks) in [(0, 1), (899, 1), (1999, 2), (5, 2)] {
            kept.retain(|one| one.name != format!("s{gone}"));
            mark_removed(env, &kept).unwrap();
            let mut read = record.clone();
            leave_out_removed(env, &mut read).unwrap();
            assert_eq!(read.snapshots, kept, "{gone}");
            assert_eq!(names(&env.join(REMOVED_SNAPSHOTS)).unwrap().len(), marks);
        }
        clear_removal_marks(env).unwrap();
        let mut read = record.clone();
        leave_out_removed(env, &mut read).unwrap();
        assert_eq!(read, record);
    }
}
