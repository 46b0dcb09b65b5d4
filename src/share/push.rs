//! Owns pushing: sending the layers that a registry lacks, and setting the tags when all of them are there; and the
//! same into files.
//!
//! A layer that was pushed before has a known digest, so the registry is only asked whether it has it. Tags come last
//! and from the bottom up: a reader that finds one finds all of its parents. An interrupted push resumes with the current
//! layer.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::document::{Document, MANIFEST, Manifest, SharedSnapshot, SharedStep, SharedVolume};
use super::layout::LayoutDraft;
use super::place::Destination;
use super::pull::find;
use super::upload::{send, took_nothing};
use super::{Repository, Shareable, recipe_tag, watched};
use crate::image::fetch::{ByteCounter, long_patience};
use crate::image::oci::Operation;
use crate::image::oci::changes::LayerContent;
use crate::plan::ids::VolumeName;
use crate::share::service_image;
use crate::store::images::Means;
use crate::store::layer::VolumeState;
use crate::store::shared::{Blob, Shared};
use crate::store::{Layer, Store};
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::tree::Method;

/// The result of a push.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Pushed {
    /// Snapshots that had no tag before.
    pub tags: u64,
    /// Layers that were sent.
    pub sent: u64,
    /// Their bytes, compressed.
    pub sent_bytes: u64,
    /// Layers that were already there.
    pub there: u64,
    /// Sockets that no archive can hold.
    pub left_out: u64,
}

/// Pushes snapshots, with everything below them.
pub(crate) fn push(
    store: &Store,
    repository: &Repository,
    what: &Shareable,
    means: &mut Means<'_>,
) -> Result<Pushed> {
    let registry = repository.open(Operation::Push, means)?;
    let tag = repository.tag();
    send_all(store, Destination::Registry(&registry), what, tag, means)
        .context(|| format!("cannot push to `{repository}`"))
}

/// Writes snapshots to a new file or directory, with everything below them.
pub(crate) fn export(
    store: &Store,
    place: &Path,
    what: &Shareable,
    means: &mut Means<'_>,
) -> Result<Pushed> {
    // Timestamps depend on the content, so that the same snapshots give the same file.
    let created = what.layers.last().map(|layer| layer.created.as_second());
    let time = created.and_then(|seconds| u64::try_from(seconds).ok());
    let draft = LayoutDraft::new(place, time.unwrap_or_default())?;
    let to = Destination::Layout(Box::new(draft));
    // For `podman load`; not every env name is a valid image name.
    let last = what.layers.last();
    let name = last.map(|layer| format!("localhost/{}:{}", what.env, layer.title));
    let name = name.filter(|name| Repository::parse(name).is_ok());
    send_all(store, to, what, name.as_deref(), means)
        .context(|| format!("cannot export to `{}`", place.display()))
}

fn send_all(
    store: &Store,
    to: Destination<'_>,
    what: &Shareable,
    tag: Option<&str>,
    means: &mut Means<'_>,
) -> Result<Pushed> {
    let done = Arc::new(AtomicU64::new(0));
    let counter = ByteCounter::default();
    let mut pushing = Pushing {
        store,
        to,
        what,
        tag,
        done: Arc::clone(&done),
        document: Document {
            snapshot: SharedSnapshot {
                schema: 1,
                image: what.image.clone(),
                steps: Vec::new(),
            },
            blobs: Vec::new(),
        },
        pushed: Pushed::default(),
        trees: Vec::new(),
    };
    let progress = &mut *means.progress;
    let mut shown = |_: crate::image::BuildProgress<'_>| {
        progress(crate::image::BuildProgress::Bytes {
            done: done.load(Ordering::Relaxed),
            total: None,
        });
    };
    watched(means.cancel, &counter, &mut shown, async move || {
        pushing.all().await?;
        if let Destination::Layout(draft) = pushing.to {
            draft.finish()?;
        }
        Ok(pushing.pushed)
    })
}

struct Pushing<'a> {
    store: &'a Store,
    to: Destination<'a>,
    what: &'a Shareable,
    /// Another tag for the last snapshot; in a file, the name to load it under.
    tag: Option<&'a str>,
    /// Bytes that were read.
    done: Arc<AtomicU64>,
    document: Document,
    pushed: Pushed,
    /// The changes of each snapshot, if a service keeps them.
    trees: Vec<Blob>,
}

impl Pushing<'_> {
    async fn all(&mut self) -> Result<()> {
        self.image().await?;
        if let Some(kept) = &self.what.kept {
            let (layers, pushed) = (&self.what.layers, &mut self.pushed);
            self.trees =
                service_image::send(self.store, &mut self.to, kept, layers, &self.done, pushed)
                    .await?;
        }
        for at in 0..self.what.layers.len() {
            self.layer(at).await?;
        }
        if let Some(tag) = self.tag {
            self.publish(tag, true).await?;
        }
        Ok(())
    }

    async fn image(&mut self) -> Result<()> {
        let image = &self.what.image;
        let store = self.store;
        let known = store.shared_image(&image.key).ok().flatten();
        let remembered = known.and_then(|shared| shared.tree);
        let known = match &remembered {
            Some(blob) => Some(blob.clone()),
            // Another machine may have pushed it: the image's key determines its content, and pulling verifies that.
            None => self.pushed_image().await,
        };
        let changes = LayerContent::Whole(store.image_root(&image.key));
        let there = || Ok(store.image(&image.key)?.is_some());
        let blob = self
            .blob(known, changes, there)
            .await
            .context(|| format!("cannot push image `{}`", image.name))?;
        if remembered.as_ref() != Some(&blob) {
            let shared = Shared {
                chain: image.digest.clone(),
                tree: Some(blob.clone()),
                ..Shared::default()
            };
            unless_full(store.remember_image(&image.key, &shared))?;
        }
        self.document.blobs.push(blob);
        self.publish(&image.key, false).await?;
        self.publish(&recipe_tag(&image.recipe), true).await
    }

    /// Returns the image's layer that the registry has under its key; a faulty one counts as missing.
    async fn pushed_image(&self) -> Option<Blob> {
        let Destination::Registry(registry) = &self.to else {
            return None;
        };
        let key = &self.what.image.key;
        let _downloads = self.store.keep_downloads().ok()?;
        let blobs = self.store.root().join("blobs");
        let document = find(registry, key, &blobs).await.ok().flatten()?;
        let is_right = document.snapshot.image.key == *key;
        document.blobs.into_iter().next().filter(|_| is_right)
    }

    /// Pushes the changes of one step, and sets the step's tag.
    async fn layer(&mut self, at: usize) -> Result<()> {
        let (store, what) = (self.store, self.what);
        let layer = &what.layers[at];
        let below = at.checked_sub(1).map(|below| &what.layers[below]);
        let key = layer
            .key
            .as_ref()
            .ok_or_else(|| Error::unexpected("a snapshot without a key is to be pushed"))?;
        let remembered = store.shared_layer(&layer.id).ok().flatten();
        let remembered = remembered.unwrap_or_default();
        let mut shared = Shared::default();
        let place = |layer: &Layer, tree: &str| store.layer_dir(&layer.id).join(tree);
        let changes = match self.store.method() {
            Method::Overlay => LayerContent::Upper(place(layer, "diff")),
            Method::Btrfs | Method::Reflink => {
                let old = match below {
                    Some(below) => place(below, "root"),
                    None => self.store.image_root(&self.what.image.key),
                };
                self.between(old, place(layer, "root"))
            }
        };
        let there = || {
            let mut all = [Some(layer), below].into_iter().flatten();
            Ok(all.all(|layer| place(layer, "layer.json").exists()))
        };
        let failed = || format!("cannot push snapshot `{}`", layer.title);
        let blob = match self.trees.get(at) {
            Some(sent) => sent.clone(),
            None => {
                let tree = remembered.tree.clone();
                self.blob(tree, changes, there).await.context(failed)?
            }
        };
        let index = self.document.blobs.len();
        shared.tree = Some(blob.clone());
        self.document.blobs.push(blob);
        let mut volumes = BTreeMap::new();
        for (name, state) in &layer.volumes {
            let state = match state {
                VolumeState::Empty => SharedVolume::Empty,
                VolumeState::Live(_) | VolumeState::Absent | VolumeState::Frozen => {
                    SharedVolume::Absent
                }
            };
            volumes.insert(name.clone(), state);
        }
        for (name, changes) in self.frozen_volumes(layer, below) {
            let known = remembered.volumes.get(&name).cloned();
            let blob = self.blob(known, changes, there).await.context(failed)?;
            volumes.insert(name.clone(), SharedVolume::Layer(self.document.blobs.len()));
            shared.volumes.insert(name, blob.clone());
            self.document.blobs.push(blob);
        }
        let results = place(layer, "results");
        let results = match results.is_dir() {
            true => {
                let known = remembered.results.clone();
                let blob = self.blob(known, LayerContent::Whole(results), there).await;
                let blob = blob.context(failed)?;
                shared.results = Some(blob.clone());
                self.document.blobs.push(blob);
                Some(self.document.blobs.len() - 1)
            }
            false => None,
        };
        self.document.snapshot.steps.push(SharedStep {
            key: key.clone(),
            name: layer.title.clone(),
            created: layer.created,
            cost: layer.cost,
            prints: layer.prints.clone(),
            pins: layer.pins.clone(),
            layer: index,
            volumes,
            history: Some(layer.history()),
            results,
        });
        shared.chain = self.document.chains().pop().unwrap_or_default();
        if shared != remembered {
            unless_full(self.store.remember_layer(&layer.id, &shared))?;
        }
        let last = &self.document.snapshot.steps[at];
        if last
            .volumes
            .values()
            .any(|volume| *volume == SharedVolume::Absent)
        {
            // It can only be the parent of others, so it gets no tag.
            return Ok(());
        }
        self.publish(key, false).await
    }

    /// Returns the changes of a layer's frozen build volumes, by name.
    fn frozen_volumes(
        &self,
        layer: &Layer,
        below: Option<&Layer>,
    ) -> Vec<(VolumeName, LayerContent)> {
        let mut all = Vec::new();
        for (name, state) in &layer.volumes {
            let volume = |layer: &Layer| {
                let layer = self.store.layer_dir(&layer.id);
                layer.join("volumes").join(name)
            };
            let is_frozen = |layer: &&Layer| layer.volumes.get(name) == Some(&VolumeState::Frozen);
            if *state == VolumeState::Frozen {
                let changes = match below.filter(is_frozen) {
                    Some(below) => self.between(volume(below), volume(layer)),
                    None => LayerContent::Whole(volume(layer)),
                };
                all.push((name.clone(), changes));
            }
        }
        all
    }

    fn between(&self, old: std::path::PathBuf, new: std::path::PathBuf) -> LayerContent {
        LayerContent::Between {
            old,
            new,
            inodes: self.store.method() == Method::Btrfs,
        }
    }

    /// Makes sure that the other side has a layer. `there`: its source was not removed meanwhile.
    async fn blob(
        &mut self,
        known: Option<Blob>,
        changes: LayerContent,
        there: impl Fn() -> Result<bool>,
    ) -> Result<Blob> {
        if let Some(blob) = known
            && self.to.has(&blob.sha256, blob.size).await?
        {
            self.pushed.there += 1;
            return Ok(blob);
        }
        let sent = send(&mut self.to, changes, Arc::clone(&self.done)).await?;
        if !there()? {
            return Err(Error::busy("it was removed while it was read").help("rockenv ls"));
        }
        self.pushed.sent += 1;
        self.pushed.sent_bytes += sent.blob.size;
        self.pushed.left_out += sent.left_out;
        Ok(sent.blob)
    }

    /// Stores the current document under a tag; an existing one for the same key stays, unless this one `moves` it.
    async fn publish(&mut self, tag: &str, moves: bool) -> Result<()> {
        let (config, manifest) = self.document.encode(&self.what.profile)?;
        let registry = match &mut self.to {
            Destination::Registry(registry) => *registry,
            Destination::Layout(draft) => {
                // One image: the last description includes all lower ones, and most programs look for just one.
                draft.describe(self.document.key(), self.tag, config, manifest);
                self.pushed.tags = 1;
                return Ok(());
            }
        };
        if let Some((there, sha256)) = registry.find_tag(tag).await? {
            let same_key = || {
                let manifest = Manifest::parse(&there).ok();
                // The result of a clean build replaces another one.
                manifest.is_some_and(|manifest| {
                    manifest.key() == Some(self.document.key())
                        && (manifest.is_clean() || !self.document.is_clean())
                })
            };
            if sha256 == hex::encode(Sha256::digest(&manifest)) || (!moves && same_key()) {
                return Ok(());
            }
        }
        let sha256 = hex::encode(Sha256::digest(&config));
        let size = config.len() as u64;
        if !registry.has_blob(&sha256, size).await? {
            let digest = async || Ok(Some((sha256, size)));
            let sent = registry.upload(config.into(), digest);
            tokio::time::timeout(long_patience(), sent)
                .await
                .map_err(|_| took_nothing())??;
        }
        registry.publish(tag, MANIFEST, &manifest).await?;
        self.pushed.tags += 1;
        Ok(())
    }
}

/// Remembered digests only save queries and packing: a full disk must not prevent a push.
pub(super) fn unless_full(remembered: Result<()>) -> Result<()> {
    match remembered {
        Err(error) if error.kind() == Kind::OutOfSpace => Ok(()),
        other => other,
    }
}
