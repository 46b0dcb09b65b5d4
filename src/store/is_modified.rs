//! Owns detecting manual changes in an env, and keeping them before a step would drop them.

use super::LockedEnv;
use crate::plan::record::{Origin, Record};
use crate::sys::error::Result;
use crate::tree::{self, Method};

impl LockedEnv<'_> {
    /// Returns whether the live tree, or a build volume that a rollback restores, may have changed since the
    /// snapshot.
    ///
    /// With shared extents nothing proves that: a clone's inodes are all new, and their times depend on the clock.
    /// There, any command that ran counts as a change, because an unneeded snapshot is better than a lost file.
    pub fn is_touched(&self) -> Result<bool> {
        let record = self.known_record()?;
        let Some(tree) = &record.head.tree else {
            return Ok(false);
        };
        if let Some(service) = self.service()? {
            return self.is_changed_at(&service, tree);
        }
        let directory = self.directory.join("trees").join(tree);
        match self.store.method() {
            Method::Overlay => Ok(!tree::overlay::is_clean(&directory.join("diff"))?),
            Method::Btrfs => {
                let below = match &record.head.layer {
                    Some(layer) => self.store.layer_dir(layer).join("root"),
                    None => self.store.image_root(&record.image_key),
                };
                Ok(tree::btrfs::differs(&directory.join("root"), &below)?
                    || self.are_volumes_touched(record)?)
            }
            Method::Reflink => Ok(true),
        }
    }

    /// Returns whether a build volume differs from the state that its layer froze.
    fn are_volumes_touched(&self, record: &Record) -> Result<bool> {
        for (name, id) in &record.head.volumes {
            let frozen = record
                .head
                .layer
                .as_ref()
                .map(|layer| self.store.layer_dir(layer).join("volumes").join(name))
                .filter(|frozen| frozen.exists());
            let touched = match frozen {
                Some(frozen) => tree::btrfs::differs(&self.store.volume_dir(id), &frozen)?,
                None => !self.store.is_volume_empty(id),
            };
            if touched {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Keeps changes of the live tree, which the caller is about to drop, as a snapshot. Returns its name.
    pub fn keep_changes(&mut self, why: &str) -> Result<Option<String>> {
        if !self.is_touched()? {
            return Ok(None);
        }
        let name = self.known_record()?.free_name(why);
        self.snapshot(&name, Origin::Auto)?;
        Ok(Some(name))
    }
}
