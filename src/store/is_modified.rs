//! Owns detecting manual changes in an env, and keeping them before a step would drop them.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::added_user::AddedUser;
use super::history::{ByHand, History, Moment};
use super::layer::boot_id;
use super::snapshot::Freeze;
use super::{LockedEnv, Store};
use crate::plan::ids::{EnvName, VolumeId, VolumeName};
use crate::plan::record::{Origin, Record};
use crate::sys::atomic::random_id;
use crate::sys::error::{Kind, Result, exists};
use crate::sys::host::clock_ahead;
use crate::tree::{self, Method, measure, mounts};

/// File systems on which every change of a file sets its change time, even a change through mapped memory.
const TELLING: [&str; 3] = ["btrfs", "ext4", "xfs"];
/// How far two readings of the clocks may differ although no process set one, in nanoseconds. No command writes that
/// soon after its container starts.
const INEXACT: u64 = 5_000_000;

impl Moment {
    /// Returns the current moment for files below a directory; not comparable if change times are unreliable there.
    fn now(directory: &Path) -> Self {
        let of_new_file = || {
            let file = tempfile::tempfile_in(directory).ok()?;
            let kind = mounts::file_system(file.as_fd())?;
            let found = file.metadata().ok()?;
            TELLING.contains(&kind.as_str()).then_some(())?;
            Some(Self {
                time: found.ctime() * 1_000_000_000 + found.ctime_nsec(),
                ahead: clock_ahead()?,
                boot: boot_id(),
            })
        };
        of_new_file().unwrap_or_default()
    }

    /// Returns whether later change times can be compared with it: the clock was not set, which a reboot may do too.
    fn is_comparable(&self) -> bool {
        let same = |ahead: i64| ahead.abs_diff(self.ahead) <= INEXACT;
        !self.boot.is_empty() && self.boot == boot_id() && clock_ahead().is_some_and(same)
    }
}

/// Returns whether a directory or anything in it changed since, or may have changed.
fn is_changed_since(directory: &Path, since: &Moment) -> bool {
    let found = measure::scan_one(directory);
    let unseen = found.unreadable + found.vanished + found.mounts_skipped;
    unseen > 0 || found.newest_change >= since.time
}

impl Store {
    /// Returns whether a `shell --failed` command changed the tree of an env's failed step, or may have changed it.
    pub(super) fn is_failed_edited(&self, env: &EnvName, record: &Record) -> bool {
        let Some(failed) = &record.failed else {
            return false;
        };
        let directory = self.tree_files(&self.tree_dir(env, &failed.tree));
        // At a service, the step's own changes hide those of a command.
        failed.shown.as_ref().is_some_and(|since| {
            record.service.is_some()
                || !since.is_comparable()
                || is_changed_since(&directory, since)
        })
    }

    /// Returns the filled build volumes that `exec` or `shell` commands may have changed since a step ran on them.
    pub(crate) fn volumes_by_hand(&self, record: &Record) -> Vec<VolumeName> {
        let Some(since) = record.head.by_hand() else {
            return Vec::new();
        };
        let volumes = record.head.volumes.iter().filter(|(_, id)| {
            let directory = self.volume_dir(id);
            // A killed command may have moved it already.
            !matches!(directory.try_exists(), Ok(false))
                && !self.is_volume_empty(id)
                && (!since.is_comparable() || is_changed_since(&directory, &since))
        });
        volumes.map(|(name, _)| name.clone()).collect()
    }

    /// Returns whether build volumes, except those in `kept`, may have files that `exec` or `shell` commands wrote
    /// before a step ran on them. Such files are indistinguishable from the step's.
    pub(crate) fn has_older_edits(&self, record: &Record, kept: &[VolumeName]) -> bool {
        let mut volumes = record.head.volumes.iter();
        record.head.volumes_from().history != History::Clean
            && volumes.any(|(name, id)| !kept.contains(name) && !self.is_volume_empty(id))
    }
}

impl LockedEnv<'_> {
    /// Records that a `shell --failed` command is about to get the tree of the failed step.
    pub fn show_failed(&mut self) -> Result<()> {
        let Some(failed) = &self.known_record()?.failed else {
            return Ok(());
        };
        let moment = match &failed.shown {
            None => Moment::now(&self.directory.join("trees")),
            Some(known) if known.is_comparable() => return Ok(()),
            // The clock was set, so files written since may have any change time.
            Some(_) => Moment::default(),
        };
        self.update(|record| {
            if let Some(failed) = &mut record.failed {
                failed.shown = Some(moment);
            }
        })
    }

    /// Keeps the tree of a failed step that `shell --failed` changed as a snapshot; returns its name. The env stays.
    pub fn keep_failed(&mut self, why: &str) -> Result<Option<String>> {
        let record = self.known_record()?;
        let Some(failed) = record.failed.clone() else {
            return Ok(None);
        };
        let is_there = match record.service {
            Some(_) => failed.shown.is_some() && self.without_container(&failed.tree)?.is_none(),
            None => exists(&self.tree_dir(&failed.tree))?,
        };
        if !is_there || !self.store.is_failed_edited(self.name(), record) {
            return Ok(None);
        }
        let (name, head) = (record.free_name(why), record.head.clone());
        let parent = failed.parent.as_ref();
        let freeze = Freeze::without_step(&failed.tree, parent, &name, Origin::Auto);
        self.freeze(&freeze, |record| {
            record.head = head;
            record.failed = None;
        })?;
        Ok(Some(name))
    }

    /// Records that an `exec` or `shell` command is about to get the live build volumes, or had them.
    pub fn show_volumes(&mut self) -> Result<()> {
        let moment = match self.known_record()?.head.by_hand() {
            None => Moment::now(&self.store.root().join("volumes")),
            Some(known) if known == Moment::default() || known.is_comparable() => return Ok(()),
            // The clock was set, so files written since may have any change time.
            Some(_) => Moment::default(),
        };
        self.update(|record| record.head.by_hand = Some(ByHand::Since(moment)))
    }

    /// Returns whether an `exec` or `shell` command may have changed the live build volumes since a step ran on them.
    pub fn is_changed_by_hand(&self) -> Result<bool> {
        let head = &self.known_record()?.head;
        let Some(since) = head.by_hand() else {
            return Ok(false);
        };
        let mut volumes = head.volumes.values();
        Ok(!since.is_comparable()
            || volumes.any(|id| is_changed_since(&self.store.volume_dir(id), &since)))
    }

    /// Returns whether the live tree, or a volume that a rollback restores, may have changed since the snapshot.
    ///
    /// With reflinks, nothing proves the absence of changes: a clone's inodes are new, and their times depend on the
    /// clock. There, any command counts as a change, because an unneeded snapshot is better than a lost file.
    pub fn is_modified(&self) -> Result<bool> {
        let record = self.known_record()?;
        let Some(tree) = &record.head.tree else {
            // A command in the tree of a failed step can write to the volumes too.
            return self.are_volumes_edited();
        };
        if let Some(service) = self.service()? {
            return Ok(self.is_changed_at(&service, tree)? || self.are_volumes_edited()?);
        }
        let directory = self.tree_dir(tree);
        match self.store.method() {
            Method::Overlay => {
                let diff = directory.join("diff");
                Ok(!tree::overlay::is_clean(&diff)? && !self.has_only_user(&diff)?)
            }
            Method::Btrfs => {
                let below = match &record.head.layer {
                    Some(layer) => self.store.layer_dir(layer).join("root"),
                    None => self.store.image_root(&record.image_key),
                };
                // As in an overlay store, a missing image must not stop `up`, which builds another.
                if !exists(&below)? {
                    return Ok(true);
                }
                let root = directory.join("root");
                let added = || self.added_inodes(&root, below.clone());
                Ok(tree::btrfs::differs(&root, &below)?
                    && tree::btrfs::differs_except(&root, &below, &added()?)?
                    || self.are_volumes_touched(record)?)
            }
            Method::Reflink => Ok(true),
        }
    }

    /// Returns whether an overlay's upper directory contains only the build user, whom every container adds.
    fn has_only_user(&self, diff: &Path) -> Result<bool> {
        // A repair set a damaged spec aside, and only the next `up` writes another.
        let Ok(spec) = self.store.spec(self.name()) else {
            return Ok(false);
        };
        let record = self.known_record()?;
        let layer = record.head.layer.as_ref();
        let below = match self.store.lowers(layer, &record.image_key) {
            // Without the image, nothing shows where a file came from.
            Err(error) if error.kind() == Kind::NotFound => return Ok(false),
            other => other?,
        };
        AddedUser::new(&spec.user, diff, &below).is_all()
    }

    /// Returns the inodes of a tree whose only change is the added build user.
    fn added_inodes(&self, root: &Path, below: PathBuf) -> Result<BTreeSet<u64>> {
        let Ok(spec) = self.store.spec(self.name()) else {
            return Ok(BTreeSet::new());
        };
        AddedUser::new(&spec.user, root, &[below]).inodes()
    }

    /// Returns whether commands changed build volumes that a snapshot would contain, or may have changed them.
    fn are_volumes_edited(&self) -> Result<bool> {
        let has_volumes = !self.known_record()?.head.volumes.is_empty();
        Ok(has_volumes && self.store.freezes_volumes() && self.is_changed_by_hand()?)
    }

    /// Returns whether a build volume differs from the state that its layer froze.
    fn are_volumes_touched(&self, record: &Record) -> Result<bool> {
        for (name, id) in &record.head.volumes {
            let layer = record.head.layer.as_ref();
            let changed = match self.store.frozen_volume(layer, name) {
                Some(frozen) => tree::btrfs::differs(&self.live_volume(name, id)?, &frozen)?,
                None => !self.store.is_volume_empty(id),
            };
            if changed {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether build volumes that a rollback restores may have files of an unfinished step or earlier build.
    pub(super) fn has_unsaved_volumes(&self) -> Result<bool> {
        let record = self.known_record()?;
        let head = &record.head;
        if !self.store.freezes_volumes() || self.store.are_volumes_empty(head) {
            return Ok(false);
        }
        if self.store.method() == Method::Btrfs {
            return self.are_volumes_touched(record);
        }
        let from = head.volumes_from().layer;
        // A user's snapshot of unchanged volumes has the volumes of the step before.
        let mut at = head.layer.clone();
        while at != from {
            let layer = self.store.layer_if(at.as_ref())?;
            match layer.filter(|layer| layer.key.is_none()) {
                Some(layer) => at = layer.parent,
                None => return Ok(true),
            }
        }
        Ok(head.by_hand().is_some() || self.store.attempt(self.name(), record)?.is_some())
    }

    /// Keeps changes of the live tree, which the caller is about to drop, as a snapshot. Returns its name.
    pub fn keep_changes(&mut self, why: &str) -> Result<Option<String>> {
        match self.is_modified()? {
            true => self.keep(why).map(Some),
            false => Ok(None),
        }
    }

    /// Keeps build volumes that `exec` or `shell` commands changed, or may have changed, before they would be
    /// emptied. Gives them ids of no env, because no snapshot can contain them. Returns their names and new paths.
    pub fn set_volumes_aside(&mut self) -> Result<Vec<(VolumeName, PathBuf)>> {
        let mut record = self.known_record()?.clone();
        let mut aside = Vec::new();
        for name in self.store.volumes_by_hand(&record) {
            let Some(old) = record.head.volumes.remove(&name) else {
                continue;
            };
            let id: VolumeId = format!("{}-{name}-{}", random_id()?, random_id()?).try_into()?;
            let to = self.store.volume_dir(&id);
            fs::rename(self.store.volume_dir(&old), &to)?;
            aside.push((name, to));
        }
        if !aside.is_empty() {
            self.commit(record)?;
        }
        Ok(aside)
    }

    /// Keeps the current state as a snapshot. Returns its name.
    pub(super) fn keep(&mut self, why: &str) -> Result<String> {
        let name = self.known_record()?.free_name(why);
        self.snapshot(&name, Origin::Auto)?;
        Ok(name)
    }
}
