//! Owns what the store remembers of sharing: what a layer is called at registries, `shared.json` beside it; and taking in what
//! came from one.
//!
//! What arrives is made in `images/tmp-pull-<id>/`, under one lock for the whole store, and renamed to where it belongs when all of
//! it is there. Whoever takes the lock next throws away what a killed command left.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::images::{Image, Means};
use super::layer::Layer;
use super::{Lock, Store, random_id};
use crate::plan::checked;
use crate::plan::ids::LayerId;
use crate::sys::atomic;
use crate::sys::error::{Error, Result};

const FILE: &str = "shared.json";
/// How directories begin in which something arrives.
pub(super) const ARRIVING: &str = "tmp-pull-";

/// A layer as registries have it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blob {
    /// SHA-256 of the archive.
    #[serde(deserialize_with = "checked::names")]
    pub diff_id: String,
    /// SHA-256 of the compressed archive.
    #[serde(deserialize_with = "checked::names")]
    pub sha256: String,
    /// Size of the compressed archive.
    pub size: u64,
    /// Size of the archive, where who made it has said so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unpacked: Option<u64>,
}

/// What a layer of the store, or an image, is at registries.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Shared {
    /// Decides every byte of the layer and of all below it.
    pub chain: String,
    /// The tree, or what is different in it.
    pub tree: Option<Blob>,
    /// The same of frozen build volumes.
    pub volumes: BTreeMap<String, Blob>,
    /// What the step left in output volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<Blob>,
}

/// Where something is made that came from a registry.
#[derive(Debug)]
pub struct Arrival<'a> {
    store: &'a Store,
    /// Its directory, on the store's file system.
    pub work: PathBuf,
    _lock: Lock,
}

impl Store {
    /// Returns what is remembered of a layer.
    pub fn shared_layer(&self, id: &LayerId) -> Result<Option<Shared>> {
        atomic::read_json(&self.layer_dir(id).join(FILE))
    }

    /// Returns what is remembered of an image.
    pub fn shared_image(&self, key: &str) -> Result<Option<Shared>> {
        atomic::read_json(&self.image_dir(key).join(FILE))
    }

    /// Remembers what a layer is at registries.
    pub fn remember_layer(&self, id: &LayerId, shared: &Shared) -> Result<()> {
        atomic::write_json(&self.layer_dir(id).join(FILE), shared)
    }

    /// Remembers what an image is at registries.
    pub fn remember_image(&self, key: &str, shared: &Shared) -> Result<()> {
        atomic::write_json(&self.image_dir(key).join(FILE), shared)
    }

    /// Returns the layers that are known at registries, by what decides all of them: those of which a service keeps the trees, or
    /// the store.
    pub fn layers_by_chain(&self, service: Option<&Path>) -> Result<BTreeMap<String, Layer>> {
        let mut found = BTreeMap::new();
        for layer in self.layers()? {
            // A damaged note is as good as none.
            let shared = self.shared_layer(&layer.id).ok().flatten();
            if let Some(shared) = shared
                && layer.kept.as_ref().map(|kept| kept.socket.as_path()) == service
                && self.is_sound(&layer)
            {
                found.insert(shared.chain, layer);
            }
        }
        Ok(found)
    }

    /// Makes a directory for what arrives; waits while another command has one, which may bring the same.
    pub fn arrival(&self, means: &mut Means<'_>) -> Result<Arrival<'_>> {
        let images = self.root.join("images");
        fs::create_dir_all(images.join("refs"))?;
        let lock = means.lock(&images.join("refs/pull.lock"), "pull")?;
        for entry in fs::read_dir(&images)? {
            let entry = entry?;
            if entry.file_name().to_string_lossy().starts_with(ARRIVING) {
                self.discard(&entry.path())?;
            }
        }
        let work = images.join(format!("{ARRIVING}{}", random_id()?));
        fs::create_dir(&work)?;
        Ok(Arrival {
            store: self,
            work,
            _lock: lock,
        })
    }
}

impl Arrival<'_> {
    /// Publishes an image whose tree is `root` in `place`; its recipe stands for it where nothing else is known.
    pub fn publish_image(&self, place: &Path, image: &Image, shared: &Shared) -> Result<()> {
        atomic::write_json(&place.join(FILE), shared)?;
        self.store.publish_image(place, image)?;
        self.store.refer(image)
    }

    /// Publishes layers whose trees are in these directories, each on the one before. Only now they get their ids, as another command
    /// may have finished the same steps meanwhile: what came about otherwise is not what the next ones stand on. What the lowest
    /// stands on must still be there.
    pub fn publish_layers(&self, layers: Vec<(PathBuf, Layer, Shared)>) -> Result<()> {
        for (place, _, shared) in &layers {
            atomic::write_json(&place.join(FILE), shared)?;
        }
        // Nobody removes what they stand on between the look and the renames.
        let _shared = self.store.lock_shared()?;
        if let Some((_, lowest, _)) = layers.first() {
            let there = match &lowest.parent {
                Some(parent) => self.store.layer(parent)?.is_some(),
                None => self.store.image(&lowest.image_key)?.is_some(),
            };
            if !there {
                return Err(
                    Error::busy("a layer below the pulled one was removed meanwhile")
                        .help("run the command again"),
                );
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

    /// Removes a download that is not needed any more.
    pub fn drop_blob(&self, sha256: &str) -> Result<()> {
        match fs::remove_file(self.store.root.join("blobs/sha256").join(sha256)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }

    /// Ends it, whatever is left in its directory.
    pub fn finish(self) -> Result<()> {
        self.store.discard(&self.work)
    }
}
