//! Owns layers: frozen root file systems, `layers/<id>/` with `layer.json`, the tree (`diff` for an overlay, else
//! `root`, or neither if a service has the tree) and, if the method can freeze them, the env's build volumes in
//! `volumes/<name>`.
//!
//! A layer is published by one rename of a tree directory and never written again. Its id is the step's key if the
//! build was clean and the id is free, else a random one.

use std::collections::BTreeSet;
use std::io::{ErrorKind, Write as _};
use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use fs_err as fs;
use rustix::fs::{Mode, OFlags, openat};

use super::Store;
use super::check::names;
use crate::plan::ids::{ImageKey, LayerId};
pub(crate) use crate::plan::layer::{Cost, Layer, VolumeState};
use crate::sys::atomic::{self, random_id};
use crate::sys::error::{Error, Kind, Result, ResultExt as _, encoded, if_exists};
use crate::tree::merged::MergedDir;
use crate::tree::{self, Method};

impl Store {
    pub fn layer_dir(&self, id: &LayerId) -> PathBuf {
        self.root.join("layers").join(id)
    }

    /// Reads a layer; `None` if it does not exist.
    pub fn layer(&self, id: &LayerId) -> Result<Option<Layer>> {
        let path = self.layer_dir(id).join("layer.json");
        match atomic::read_json::<Layer>(&path)? {
            Some(layer) if layer.id != *id => {
                Err(unexpected!("`{}` belongs to another layer", path.display())
                    .help("rockenv fsck"))
            }
            found => Ok(found),
        }
    }

    pub(super) fn layer_if(&self, id: Option<&LayerId>) -> Result<Option<Layer>> {
        id.map_or(Ok(None), |id| self.layer(id))
    }

    /// Returns the ids of all layers. Skips files whose names are not ids.
    pub(super) fn layer_ids(&self) -> Result<Vec<LayerId>> {
        let names = names(&self.root.join("layers"))?.into_iter();
        Ok(names.filter_map(|name| name.try_into().ok()).collect())
    }

    /// Reads all layers. Skips damaged ones, which `fsck` reports: they must not block the removal of an env.
    pub fn layers(&self) -> Result<Vec<Layer>> {
        let ids = self.layer_ids()?.into_iter();
        Ok(ids.filter_map(|id| self.layer(&id).ok()?).collect())
    }

    /// Returns whether a layer may be used as a parent: it is safely on disk, or of the current boot.
    pub fn is_sound(&self, layer: &Layer) -> bool {
        layer.boot == boot_id() || self.layer_dir(&layer.id).join("durable").exists()
    }

    /// Waits until everything written so far is on disk, and marks these layers as durable.
    pub fn make_durable(&self, layers: &[LayerId]) -> Result<()> {
        let opened = self.open_layers(layers)?;
        let directory = fs::File::open(self.root.join("layers"))?;
        nix::unistd::syncfs(directory.file())?;
        opened.iter().try_for_each(mark_durable)
    }

    /// Opens the directories of those layers that exist. While a sync takes its time, another command may remove a
    /// layer and publish one of the same id, which is not on disk yet and must not get the mark.
    fn open_layers(&self, layers: &[LayerId]) -> Result<Vec<fs::File>> {
        let opened = layers.iter().map(|id| fs::File::open(self.layer_dir(id)));
        opened
            .filter_map(|file| if_exists(file).transpose())
            .collect()
    }

    pub fn make_all_durable(&self) -> Result<()> {
        let mut fresh = self.layer_ids()?;
        fresh.retain(|id| {
            !self.layer_dir(id).join("durable").exists()
                && matches!(self.layer(id), Ok(Some(layer)) if layer.boot == boot_id())
        });
        match fresh.is_empty() {
            true => Ok(()),
            false => self.make_durable(&fresh),
        }
    }

    /// Returns the layer and everything below it, topmost first.
    pub fn chain(&self, top: &LayerId) -> Result<Vec<Layer>> {
        let mut chain: Vec<Layer> = Vec::new();
        let mut next = Some(top.clone());
        while let Some(id) = next {
            let layer = self.layer(&id)?.ok_or_else(|| missing(&id))?;
            if chain.iter().any(|known| known.id == layer.id) {
                return Err(unexpected!("layer `{id}` is its own ancestor").help("rockenv fsck"));
            }
            next = layer.parent.clone();
            chain.push(layer);
        }
        Ok(chain)
    }

    /// Returns layers and all layers below them. Skips missing layers, which are reported where they are needed.
    pub(crate) fn with_those_below(&self, layers: &[LayerId]) -> BTreeSet<LayerId> {
        let mut found = BTreeSet::new();
        let mut waiting = layers.to_vec();
        while let Some(id) = waiting.pop() {
            if !found.contains(&id)
                && let Ok(Some(layer)) = self.layer(&id)
            {
                waiting.extend(layer.parent);
                found.insert(id);
            }
        }
        found
    }

    /// Opens the tree of a layer, or of the image if there is no layer; empty if a service has the tree.
    pub(crate) fn look_into(
        &self,
        layer: Option<&LayerId>,
        image_key: &ImageKey,
    ) -> Result<MergedDir> {
        let mut roots = Vec::new();
        let mut next = layer.cloned();
        while let Some(id) = next {
            let directory = self.layer_dir(&id);
            let whole = directory.join("root");
            if whole.exists() {
                return MergedDir::open(&[whole]);
            }
            let found = self.layer(&id)?.ok_or_else(|| missing(&id))?;
            let flat = Some(directory.join("flat")).filter(|flat| flat.exists());
            next = found.parent.filter(|_| flat.is_none());
            roots.push(flat.unwrap_or_else(|| directory.join("diff")));
        }
        roots.push(self.image_root(&self.image_below(layer, image_key)?));
        roots.retain(|root| root.exists());
        MergedDir::open(&roots)
    }

    /// Returns the key of the image below: the layer's own, which may be older than the env's.
    pub(super) fn image_below(
        &self,
        layer: Option<&LayerId>,
        image_key: &ImageKey,
    ) -> Result<ImageKey> {
        match layer {
            None => Ok(image_key.to_owned()),
            Some(id) => Ok(self.layer(id)?.ok_or_else(|| missing(id))?.image_key),
        }
    }

    /// Returns the directories for an overlay on this layer, topmost first, the image last.
    ///
    /// A chain near the kernel's limit is first merged, by hard links, into the directory `flat` of its top layer.
    pub fn lowers(&self, layer: Option<&LayerId>, image_key: &ImageKey) -> Result<Vec<PathBuf>> {
        let mut lowers = Vec::new();
        let mut next = layer.cloned();
        while let Some(id) = next {
            let directory = self.layer_dir(&id);
            let flat = directory.join("flat");
            if flat.exists() {
                lowers.push(flat);
                break;
            }
            let found = self.layer(&id)?.ok_or_else(|| missing(&id))?;
            lowers.push(directory.join("diff"));
            next = found.parent;
        }
        let image = self.known_image_root(&self.image_below(layer, image_key)?)?;
        if lowers.len() >= tree::overlay::MAX_LAYERS
            && let Some(top) = layer
        {
            self.flatten(top, &lowers, &image)?;
            lowers = vec![self.layer_dir(top).join("flat")];
        }
        lowers.push(image);
        Ok(lowers)
    }

    /// Merges the layers from `top` down to the image into `flat` of `top`.
    fn flatten(&self, top: &LayerId, lowers: &[PathBuf], image: &Path) -> Result<()> {
        let mut bottom_up = lowers.to_vec();
        bottom_up.reverse();
        let flat = self.layer_dir(top).join("flat");
        let temporary = self.layer_dir(top).join(format!("flat-{}", random_id()?));
        let merged = tree::flatten(&[image.to_path_buf()], &bottom_up, &temporary)
            .context(|| format!("cannot merge the {} layers below `{top}`", lowers.len()))
            .and_then(|()| Ok(fs::rename(&temporary, &flat)?));
        if merged.is_err() {
            self.discard(&temporary).ok();
        }
        match merged {
            // Another command merged the same chain, and its result is just as good.
            Err(_) if flat.exists() => Ok(()),
            other => other,
        }
    }

    /// Returns the directory with the files of the live tree or the layer in `directory`.
    pub(super) fn tree_files(&self, directory: &Path) -> PathBuf {
        directory.join(match self.method() {
            Method::Overlay => "diff",
            Method::Btrfs | Method::Reflink => "root",
        })
    }

    /// Returns an id for a layer: its step's key, by which other envs find it, or else a random id. Only a clean
    /// build gets the key, and only if no other layer has it.
    pub(super) fn free_id(&self, layer: &Layer) -> Result<LayerId> {
        let named = layer.key.clone().filter(|_| layer.is_clean());
        match named.map(LayerId::from) {
            Some(id) if !self.layer_dir(&id).exists() => Ok(id),
            _ => self.random_layer_id(),
        }
    }

    pub(super) fn random_layer_id(&self) -> Result<LayerId> {
        Ok(format!("{}{}", random_id()?, random_id()?).try_into()?)
    }

    /// Publishes the live tree in `directory`, which must not be mounted, as a layer by one rename. Returns false if
    /// another layer has taken its id. Refuses a tree whose files are gone: no env could use the layer.
    pub fn publish(&self, directory: &Path, layer: &Layer) -> Result<bool> {
        if layer.kept.is_none() && !tree::is_there(&self.tree_files(directory))? {
            return Err(not_found!(
                "the files of snapshot `{}` were deleted outside rockenv before it was made",
                layer.title
            )
            .help("run the command again"));
        }
        if self.method() == Method::Overlay {
            // The kernel keeps whiteouts and partial copies there.
            self.discard(&directory.join("work"))?;
        }
        self.place(directory, layer)
    }

    /// Writes the description into a directory and makes it a layer. Returns false if another layer has taken its id:
    /// two commands may finish the same step at the same time.
    pub(super) fn place(&self, directory: &Path, layer: &Layer) -> Result<bool> {
        let json = encoded(serde_json::to_vec_pretty(layer), "layer")?;
        let mut file = fs::File::create(directory.join("layer.json"))?;
        file.write_all(&json)?;
        // After a power failure, it tells whether the rest was on disk.
        file.sync_data()?;
        // XFS reports another error than other file systems.
        let taken = [ErrorKind::DirectoryNotEmpty, ErrorKind::AlreadyExists];
        match fs::rename(directory, self.layer_dir(&layer.id)) {
            Err(error) if taken.contains(&error.kind()) => Ok(false),
            placed => placed
                .map(|()| true)
                .context(|| format!("cannot publish snapshot `{}`", layer.title)),
        }
    }
}

fn mark_durable(layer: &fs::File) -> Result<()> {
    let flags = OFlags::CREATE | OFlags::WRONLY | OFlags::CLOEXEC;
    let mark = openat(layer.file(), "durable", flags, Mode::RUSR | Mode::WUSR);
    // A layer that was deleted meanwhile takes no file.
    if_exists(mark.map_err(Into::into))
        .map(drop)
        .context(|| format!("cannot mark layer `{}`", layer.path().display()))
}

pub(super) fn missing(id: &LayerId) -> Error {
    let message = format!("layer `{id}` is missing from the store");
    Error::new(Kind::NoLayer, message).help("rockenv fsck")
}

/// Returns the kernel's random id of the current boot.
pub(crate) fn boot_id() -> String {
    static BOOT: LazyLock<String> = LazyLock::new(|| {
        fs::read_to_string("/proc/sys/kernel/random/boot_id")
            .map(|text| text.trim().to_owned())
            .unwrap_or_default()
    });
    BOOT.clone()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::ids::StepKey;

    #[test]
    fn of_two_layers_of_one_key_the_second_gets_another_id() {
        let (directory, store) = Store::scratch();
        let layer = |id: LayerId| Layer {
            key: Some("key".into()),
            boot: boot_id(),
            ..Layer::sample(id)
        };
        let trees = ["a", "b"].map(|name| directory.path().join(name));
        for tree in &trees {
            fs::create_dir(tree).unwrap();
        }
        // Both ids are chosen before either layer exists.
        let ids = [(); 2].map(|()| store.free_id(&layer("new".into())).unwrap());
        let key = LayerId::from(StepKey::from("key"));
        assert_eq!(ids, [key.clone(), key.clone()]);
        assert!(store.place(&trees[0], &layer(key.clone())).unwrap());
        assert!(!store.place(&trees[1], &layer(key.clone())).unwrap());
        assert!(trees[1].exists());
        let other = store.free_id(&layer("new".into())).unwrap();
        assert!(store.place(&trees[1], &layer(other.clone())).unwrap());
        let found = store.layers().unwrap().into_iter().map(|layer| layer.id);
        let found: std::collections::BTreeSet<LayerId> = found.collect();
        assert_eq!(found, [key, other].into());
    }

    #[test]
    fn a_tree_whose_files_are_gone_becomes_no_layer() {
        let (directory, store) = Store::scratch();
        let tree = directory.path().join("tree");
        fs::create_dir(&tree).unwrap();
        let layer = Layer::sample(LayerId::from(StepKey::from("key")));
        store.publish(&tree, &layer).unwrap_err();
        fs::create_dir(store.tree_files(&tree)).unwrap();
        assert!(store.publish(&tree, &layer).unwrap());
    }

    #[test]
    fn a_layer_that_took_the_place_of_another_is_not_marked_with_it() {
        let (_directory, store) = Store::scratch();
        let ids = ["stays", "replaced", "removed"].map(LayerId::from);
        let [stays, replaced, removed] = ids.each_ref().map(|id| store.layer_dir(id));
        for layer in [&stays, &replaced, &removed] {
            fs::create_dir(layer).unwrap();
        }
        let opened = store.open_layers(&ids).unwrap();
        store.discard(&replaced).unwrap();
        fs::create_dir(&replaced).unwrap();
        fs::remove_dir(&removed).unwrap();
        opened.iter().try_for_each(mark_durable).unwrap();
        assert_eq!(names(&stays).unwrap(), ["durable"]);
        assert!(names(&replaced).unwrap().is_empty());
        store.make_durable(&ids).unwrap();
        assert_eq!(names(&replaced).unwrap(), ["durable"]);
        assert!(!removed.exists());
    }

    #[test]
    fn a_merge_of_layers_that_fails_leaves_nothing() {
        let (directory, store) = Store::scratch();
        let top = LayerId::from(StepKey::from("key"));
        let layer = store.layer_dir(&top);
        let (diff, image) = (layer.join("diff"), directory.path().join("image"));
        for made in [&diff, &image] {
            fs::create_dir_all(made).unwrap();
        }
        // Renaming a directory over a symlink fails.
        std::os::unix::fs::symlink("nowhere", layer.join("flat")).unwrap();
        store.flatten(&top, &[diff], &image).unwrap_err();
        assert_eq!(names(&layer).unwrap(), ["diff", "flat"]);
    }
}
