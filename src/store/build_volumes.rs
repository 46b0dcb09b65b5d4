//! Owns the live build volumes of an env: making them, and finding their directories.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;

use fs_err as fs;

use super::history::VolumesFrom;
use super::{LockedEnv, Store};
use crate::engine::BuildUser;
use crate::plan::ids::{LayerId, VolumeId, VolumeName};
use crate::sys::atomic::random_id;
use crate::sys::error::{Result, ResultExt as _};
use crate::tree;

impl Store {
    /// Returns the directory of a build volume as a layer froze it, if it did.
    pub(super) fn frozen_volume(&self, layer: Option<&LayerId>, name: &str) -> Option<PathBuf> {
        let frozen = self.layer_dir(layer?).join("volumes").join(name);
        frozen.exists().then_some(frozen)
    }

    fn give_empty_volume(&self, id: &VolumeId, user: &BuildUser) -> Result<()> {
        let directory = self.volume_dir(id);
        let found = fs::metadata(&directory)?;
        if (found.uid(), found.gid()) == (user.uid, user.gid) || !self.is_volume_empty(id) {
            return Ok(());
        }
        nix::unistd::chown(&directory, Some(user.uid.into()), Some(user.gid.into()))
            .context(|| format!("cannot give `{}` to the build user", directory.display()))
    }
}

impl LockedEnv<'_> {
    /// Creates missing build volumes: as the env's layer froze them, or else empty. Empty volumes belong to `user`,
    /// because envs with different build users share the layer of a step that runs as root. Refuses an env that lost a
    /// volume, because the next step would continue with an empty one.
    pub fn ensure_volumes(&mut self, volumes: &[String], user: &BuildUser) -> Result<()> {
        let head = &self.known_record()?.head;
        for (name, id) in &head.volumes {
            self.live_volume(name, id)?;
        }
        let layer = head.layer.as_ref().filter(|_| self.store.freezes_volumes());
        let mut made: BTreeMap<VolumeName, VolumeId> = BTreeMap::new();
        let missing = |name: &&String| !head.volumes.contains_key(*name);
        for name in volumes.iter().filter(missing) {
            let id = self.new_volume_id(name)?;
            let (method, directory) = (self.store.method(), self.store.volume_dir(&id));
            match self.store.frozen_volume(layer, name) {
                Some(frozen) => {
                    tree::clone_tree(method, &frozen, &directory)?;
                }
                None => tree::create_tree(method, &directory)?,
            }
            made.insert(name.parse()?, id);
        }
        for id in head.volumes.values().chain(made.values()) {
            self.store.give_empty_volume(id, user)?;
        }
        if made.is_empty() {
            return Ok(());
        }
        self.update(|record| {
            if record.head.volumes.is_empty() {
                record.head.volumes_from = Some(VolumesFrom::NOTHING);
            }
            record.head.volumes.extend(made);
        })
    }

    /// Returns the directory of a live build volume; fails if it was deleted.
    pub(super) fn live_volume(&self, name: &str, id: &VolumeId) -> Result<PathBuf> {
        let directory = self.store.volume_dir(id);
        match tree::is_there(&directory)? {
            true => Ok(directory),
            false => Err(not_found!(
                "build volume `{name}` of env `{}` is missing from the store",
                self.name()
            )
            .help("rockenv fsck --repair")),
        }
    }

    pub(super) fn new_volume_id(&self, name: &str) -> Result<VolumeId> {
        let id = format!("{}-{name}-{}", self.known_record()?.id, random_id()?);
        Ok(id.try_into()?)
    }
}
