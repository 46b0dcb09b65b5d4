//! Owns the store's side of sharing: a layer's digests at registries, in `shared.json` beside it, and adding pulled
//! layers and images.
//!
//! Arriving data is collected in `images/tmp-pull-<id>/`, under one lock for the whole store, and renamed into place
//! once it is complete. The next holder of the lock discards leftovers of a killed command.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::images::{Image, TaskContext};
use super::layer::Layer;
use super::{Lock, Store};
use crate::plan::ids::{ImageKey, LayerId, Sha256Hex, VolumeName};
use crate::sys::atomic;
use crate::sys::error::{Result, if_exists};

const FILE: &str = "shared.json";
/// Prefix of directories for arriving data.
pub(super) const ARRIVING: &str = "tmp-pull-";

/// The archive of a layer at registries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// SHA-256 of the archive.
    pub diff_id: Sha256Hex,
    /// SHA-256 of the compressed archive.
    pub sha256: Sha256Hex,
    /// Size of the compressed archive.
    pub size: u64,
    /// Size of the archive, if its maker declared it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unpacked: Option<u64>,
}

/// The registry's description of a layer or an image of the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// Determines every byte of the layer and of all below it.
    pub chain: String,
    /// The tree, or its difference from the parent's.
    pub tree: Option<Blob>,
    /// The same for each frozen build volume.
    pub volumes: BTreeMap<VolumeName, Blob>,
    /// The step's results in output volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<Blob>,
    /// Whether it was pulled or imported without a verified signature; `None` if version 0.1.0 wrote this, which
    /// verified none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unverified: Option<bool>,
}

impl Shared {
    fn read(directory: &Path) -> Result<Option<Self>> {
        atomic::read_json(&directory.join(FILE))
    }

    pub fn save(&self, directory: &Path) -> Result<()> {
        atomic::write_json(&directory.join(FILE), self)
    }

    /// Records that a signature of the directory's layer or image was verified. Replaces a damaged description.
    pub fn mark_verified(directory: &Path) -> Result<()> {
        let mut shared = match Self::read(directory) {
            Ok(Some(shared)) if shared.unverified != Some(false) => shared,
            Ok(_) => return Ok(()),
            Err(_) => Self::default(),
        };
        shared.unverified = Some(false);
        shared.save(directory)
    }
}

/// A place to assemble data from a registry.
#[derive(Debug)]
pub struct IncomingLayers<'a> {
    store: &'a Store,
    /// Its directory, on the store's file system.
    pub work: PathBuf,
    _lock: Lock,
}

impl Store {
    pub fn shared_layer(&self, id: &LayerId) -> Result<Option<Shared>> {
        Shared::read(&self.layer_dir(id))
    }

    pub fn shared_image(&self, key: &ImageKey) -> Result<Option<Shared>> {
        Shared::read(&self.image_dir(key))
    }

    /// Returns whether a layer was pulled or imported without a verified signature. If its description is missing or
    /// damaged, or does not tell, this holds for layers that no env made.
    pub fn is_unverified(&self, layer: &Layer) -> bool {
        let shared = self.shared_layer(&layer.id).ok().flatten();
        let known = shared.and_then(|shared| shared.unverified);
        known.unwrap_or(layer.env.is_none())
    }

    /// Does the same for an image. An image without a description was built here, and so may be one whose description
    /// does not tell.
    pub fn is_image_unverified(&self, key: &ImageKey) -> bool {
        match self.shared_image(key) {
            Ok(shared) => shared.is_some_and(|shared| shared.unverified == Some(true)),
            Err(_) => true,
        }
    }

    /// Returns the layers known at registries whose trees this service keeps, or else the store, by their chain
    /// digest.
    pub fn layers_by_chain(&self, service: Option<&Path>) -> Result<BTreeMap<String, Layer>> {
        let mut found = BTreeMap::new();
        for layer in self.layers()? {
            // A damaged description counts as none.
            let shared = self.shared_layer(&layer.id).ok().flatten();
            if let Some(shared) = shared
                && layer.is_kept_at(service)
                && self.is_sound(&layer)
            {
                found.insert(shared.chain, layer);
            }
        }
        Ok(found)
    }

    /// Creates a directory for arriving data. Waits while another command has one, which may bring the same data.
    pub fn incoming(&self, cx: &mut TaskContext<'_>) -> Result<IncomingLayers<'_>> {
        let images = self.root.join("images");
        fs::create_dir_all(images.join("refs"))?;
        let lock = cx.lock(&images.join("refs/pull.lock"), "pull")?;
        Ok(IncomingLayers {
            store: self,
            work: self.fresh_directory(ARRIVING)?,
            _lock: lock,
        })
    }
}

impl IncomingLayers<'_> {
    /// Publishes an image whose tree is `root` in `place`, as the current image of its recipe if there is none.
    pub fn publish_image(&self, place: &Path, image: &Image, shared: &Shared) -> Result<()> {
        shared.save(place)?;
        self.store.publish_image(place, image)?;
        // It was built long ago, and nothing is based on it yet, so mark it as used.
        self.store.use_image(&image.key);
        self.store.refer(image)
    }

    /// Publishes layers whose trees are in these directories, each on the one before. They get their ids only now,
    /// because another command may have finished the same steps meanwhile, and later layers must not be based on a
    /// layer with another history. The parent of the lowest must still exist.
    pub fn publish_layers(&self, layers: Vec<(PathBuf, Layer, Shared)>) -> Result<()> {
        for (place, _, shared) in &layers {
            shared.save(place)?;
        }
        // No command may remove the parent between the check and the renames.
        let _shared = self.store.lock_shared()?;
        if let Some((_, lowest, _)) = layers.first() {
            let there = match &lowest.parent {
                Some(parent) => self.store.layer(parent)?.is_some(),
                None => self.store.image(&lowest.image_key)?.is_some(),
            };
            if !there {
                let error = busy!("a layer below the pulled one was removed in the meantime");
                return Err(error.help("run the command again"));
            }
        }
        let mut below: Option<LayerId> = None;
        for (place, mut layer, _) in layers {
            layer.parent = below.or(layer.parent);
            loop {
                layer.id = self.store.free_id(&layer)?;
                if self.store.place(&place, &layer)? {
                    break;
                }
            }
            below = Some(layer.id);
        }
        Ok(())
    }

    pub fn drop_blob(&self, sha256: &Sha256Hex) -> Result<()> {
        if_exists(fs::remove_file(self.store.blob(sha256))).map(drop)
    }

    /// Discards the rest of the directory and releases its lock.
    pub fn finish(self) -> Result<()> {
        self.store.discard(&self.work)
    }
}
