//! Owns pushing: sends the layers that a registry lacks, and sets the tags after all layers have arrived. Exporting to
//! files works the same way.
//!
//! The digest of a layer that was pushed before is known, so the registry is only asked whether it has the layer. Tags
//! are set last and from the bottom up, so a reader that finds a tag also finds all parents. Several layers are sent at
//! once, and an interrupted push resumes with the missing ones.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use futures_util::{StreamExt as _, TryStreamExt as _};
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::document::{Document, MANIFEST, Manifest, SharedSnapshot, SharedStep, SharedVolume};
use super::layout::LayoutDraft;
use super::place::Destination;
use super::pull::find;
use super::upload::send;
use super::{Repository, Shareable, SigningKey, recipe_tag, signature, watched};
use crate::image::oci::changes::LayerContent;
use crate::image::oci::{Operation, Registry, Tagged};
use crate::plan::ids::VolumeName;
use crate::share::service_image;
use crate::store::images::TaskContext;
use crate::store::layer::VolumeState;
use crate::store::shared::{Blob, Shared};
use crate::store::{Layer, Store};
use crate::sys::error::{Kind, Result, ResultExt as _};
use crate::tree::Method;

/// Number of snapshots whose layers are sent at once. Each takes 10 MiB of memory.
const AT_ONCE: usize = 3;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Pushed {
    pub tags: u64,
    pub sent: usize,
    /// Compressed size of the sent layers.
    pub sent_bytes: u64,
    /// Layers that the destination already had.
    pub there: u64,
    /// Sockets, which an archive cannot hold.
    pub left_out: u64,
    /// Tags that stay unchanged because the registry does not let them move.
    pub immutable: u64,
}

impl Pushed {
    /// Adds the layers that earlier pushes of the same env sent: this push found them there.
    pub(crate) fn after(mut self, earlier: &Self) -> Self {
        self.sent += earlier.sent;
        self.sent_bytes += earlier.sent_bytes;
        self.there = self.there.saturating_sub(earlier.sent as u64);
        self.left_out += earlier.left_out;
        self
    }
}

pub(crate) fn push(
    store: &Store,
    repository: &Repository,
    what: &Shareable,
    cx: &mut TaskContext<'_>,
) -> Result<Pushed> {
    if let Some(digest) = repository.digest() {
        let error = usage!("cannot push to a digest: `{repository}@sha256:{digest}`");
        return Err(error.help(format!("{repository}, or {repository}:TAG")));
    }
    if repository.signs.is_some() && !repository.signs_unverified {
        check_origin(store, what)?;
    }
    let registry = repository.open(Operation::Push, cx)?;
    let tag = repository.tag();
    let to = Destination::Registry(&registry);
    send_all(store, to, what, (tag, Some(repository)), cx)
        .context(|| format!("cannot push to `{repository}`"))
}

/// Refuses to sign content that another machine may have made.
fn check_origin(store: &Store, what: &Shareable) -> Result<()> {
    let refuse = |name: &str| {
        Err(
            usage!("cannot sign {name}: it was pulled or imported without a verified signature")
                .help("rockenv pull REF --verify KEY, or push with `--sign-unverified`"),
        )
    };
    let image = &what.image;
    if store.is_image_unverified(&image.key) {
        return refuse(&format!("image `{}`", image.name));
    }
    for layer in &what.layers {
        if store.is_unverified(layer) {
            return refuse(&format!("snapshot `{}`", layer.title));
        }
    }
    Ok(())
}

/// Writes snapshots and everything below them to a new file or directory.
pub(crate) fn export(
    store: &Store,
    place: &Path,
    what: &Shareable,
    cx: &mut TaskContext<'_>,
) -> Result<Pushed> {
    // Timestamps depend only on the content, so the same snapshots give the same file.
    let created = what.layers.last().map(|layer| layer.created.as_second());
    let time = created.and_then(|seconds| u64::try_from(seconds).ok());
    let draft = LayoutDraft::new(place, time.unwrap_or_default())?;
    let to = Destination::Layout(Box::new(draft.into()));
    // The name for `podman load`. Not every env name is a valid image name.
    let last = what.layers.last();
    let name = last.map(|layer| format!("localhost/{}:{}", what.env, layer.title));
    let name = name.filter(|name| Repository::parse(name).is_ok());
    send_all(store, to, what, (name.as_deref(), None), cx)
        .context(|| format!("cannot export to `{}`", place.display()))
}

fn send_all(
    store: &Store,
    to: Destination<'_>,
    what: &Shareable,
    (tag, repository): (Option<&str>, Option<&Repository>),
    cx: &mut TaskContext<'_>,
) -> Result<Pushed> {
    let done = Arc::new(AtomicU64::new(0));
    let mut document = Document {
        snapshot: SharedSnapshot {
            schema: 1,
            image: what.image.clone(),
            steps: Vec::new(),
        },
        blobs: Vec::new(),
    };
    let mut pushing = Pushing {
        store,
        to,
        what,
        tag,
        repository,
        done: Arc::clone(&done),
        sending: Cell::new(0),
        pushed: RefCell::default(),
        trees: Vec::new(),
    };
    watched(cx, Some(&*done), async move || {
        pushing.all(&mut document).await?;
        if let Destination::Layout(draft) = pushing.to {
            draft.into_inner().finish()?;
        }
        Ok(pushing.pushed.into_inner())
    })
}

struct Pushing<'a> {
    store: &'a Store,
    to: Destination<'a>,
    what: &'a Shareable,
    /// Additional tag for the last snapshot. In a file, the name to load it under.
    tag: Option<&'a str>,
    repository: Option<&'a Repository>,
    /// Bytes that were read.
    done: Arc<AtomicU64>,
    sending: Cell<usize>,
    pushed: RefCell<Pushed>,
    /// The layers with each snapshot's changes, if a service keeps the trees.
    trees: Vec<Blob>,
}

impl Pushing<'_> {
    async fn all(&mut self, document: &mut Document) -> Result<()> {
        self.image(document).await?;
        if let Some(kept) = &self.what.kept {
            let (layers, pushed) = (&self.what.layers, self.pushed.get_mut());
            self.trees =
                service_image::send(self.store, &self.to, kept, layers, &self.done, pushed).await?;
        }
        let at_once = match &self.to {
            Destination::Registry(_) => AT_ONCE,
            Destination::Layout(_) => 1,
        };
        let pushing = &*self;
        let layers = (0..self.what.layers.len()).map(async |at| {
            let sent = pushing.send_layer(at).await;
            let title = &pushing.what.layers[at].title;
            sent.map(|shared| (at, shared))
                .context(|| format!("cannot {} snapshot `{title}`", pushing.to.verb()))
        });
        // Sent in any order: the first error drops the other transfers, which stops them. Described from the bottom up.
        let layers = futures_util::stream::iter(layers).buffer_unordered(at_once);
        let mut layers = std::pin::pin!(layers);
        let mut sent = BTreeMap::new();
        let mut next = 0;
        while let Some((at, shared)) = layers.try_next().await? {
            sent.insert(at, shared);
            while let Some(shared) = sent.remove(&next) {
                self.describe(document, next, shared).await?;
                next += 1;
            }
        }
        if let Some(tag) = self.tag {
            self.publish(document, tag, true).await?;
        }
        Ok(())
    }

    async fn image(&self, document: &mut Document) -> Result<()> {
        let image = &self.what.image;
        let store = self.store;
        let remembered = store.shared_image(&image.key).ok().flatten();
        let known = match remembered.and_then(|shared| shared.tree) {
            // Another machine may have pushed the image. Its key determines its content, which pulling verifies.
            None => self.pushed_image().await,
            remembered => remembered,
        };
        let changes = LayerContent::Whole(store.image_root(&image.key));
        let there = || Ok(store.image(&image.key)?.is_some());
        let blob = self.blob(known.clone(), changes, there).await;
        let verb = self.to.verb();
        let blob = blob.context(|| format!("cannot {verb} image `{}`", image.name))?;
        // A layer that others pushed is not remembered, because the next push may sign it.
        if known.as_ref() != Some(&blob) {
            let shared = Shared {
                chain: image.digest.clone(),
                tree: Some(blob.clone()),
                unverified: Some(store.is_image_unverified(&image.key)),
                ..Shared::default()
            };
            unless_full(shared.save(&store.image_dir(&image.key)))?;
        }
        document.blobs.push(blob);
        self.publish(document, &image.key, false).await?;
        let recipe = recipe_tag(&image.recipe);
        self.publish(document, &recipe, true).await
    }

    /// Returns the image's layer in the registry, found by the image's key. A malformed document counts as missing.
    async fn pushed_image(&self) -> Option<Blob> {
        let Destination::Registry(registry) = &self.to else {
            return None;
        };
        // A signature must only cover bytes that this machine sent.
        if self.signs().is_some() {
            return None;
        }
        let key = &self.what.image.key;
        let _downloads = self.store.keep_downloads().ok()?;
        let document = find(registry, key, &self.blobs(), None).await.ok()??;
        let is_right = document.snapshot.image.key == *key;
        document.blobs.into_iter().next().filter(|_| is_right)
    }

    /// Sends a snapshot's layers and remembers their digests.
    async fn send_layer(&self, at: usize) -> Result<Shared> {
        let (store, what) = (self.store, self.what);
        let layer = &what.layers[at];
        let below = at.checked_sub(1).map(|below| &what.layers[below]);
        let remembered = store.shared_layer(&layer.id).ok().flatten();
        let remembered = remembered.unwrap_or_default();
        let mut shared = Shared {
            unverified: Some(store.is_unverified(layer)),
            ..Shared::default()
        };
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
        shared.tree = Some(match self.trees.get(at) {
            Some(sent) => sent.clone(),
            None => self.blob(remembered.tree.clone(), changes, there).await?,
        });
        for (name, changes) in self.frozen_volumes(layer, below) {
            let known = remembered.volumes.get(&name).cloned();
            let blob = self.blob(known, changes, there).await?;
            shared.volumes.insert(name, blob);
        }
        let results = place(layer, "results");
        if results.is_dir() {
            let known = remembered.results.clone();
            let blob = self.blob(known, LayerContent::Whole(results), there).await;
            shared.results = Some(blob?);
        }
        shared.chain.clone_from(&remembered.chain);
        if shared != remembered {
            // A snapshot below may still be in transit, so the chain is not known yet.
            shared.chain.clear();
            unless_full(shared.save(&store.layer_dir(&layer.id)))?;
        }
        Ok(shared)
    }

    /// Describes a snapshot that was sent, and sets its tag.
    async fn describe(&self, document: &mut Document, at: usize, mut shared: Shared) -> Result<()> {
        let layer = &self.what.layers[at];
        let key = layer.key.as_ref();
        let key = key.ok_or_else(|| unexpected!("a snapshot without a key is to be pushed"))?;
        let mut add = |blob: &Blob| {
            document.blobs.push(blob.clone());
            document.blobs.len() - 1
        };
        let tree = shared.tree.as_ref().map(&mut add).unwrap_or_default();
        let mut volumes = BTreeMap::new();
        for (name, state) in &layer.volumes {
            let state = match (shared.volumes.get(name), state) {
                (Some(blob), _) => SharedVolume::Layer(add(blob)),
                (None, VolumeState::Empty) => SharedVolume::Empty,
                (None, VolumeState::Live(_) | VolumeState::Absent | VolumeState::Frozen) => {
                    SharedVolume::Absent
                }
            };
            volumes.insert(name.clone(), state);
        }
        let results = shared.results.as_ref().map(&mut add);
        let is_whole = !volumes.values().any(|state| *state == SharedVolume::Absent);
        document.snapshot.steps.push(SharedStep {
            key: key.clone(),
            name: layer.title.clone(),
            created: layer.created,
            cost: layer.cost,
            prints: layer.prints.clone(),
            pins: layer.pins.clone(),
            layer: tree,
            volumes,
            history: layer.history.clone(),
            results,
        });
        let chain = document.chains().pop().unwrap_or_default();
        if shared.chain != chain {
            shared.chain = chain;
            unless_full(shared.save(&self.store.layer_dir(&layer.id)))?;
        }
        match is_whole {
            true => self.publish(document, key, false).await,
            // An incomplete snapshot can only be a parent of others, so it gets no tag.
            false => Ok(()),
        }
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

    /// Makes sure that the destination has a layer. `there`: the source still exists.
    async fn blob(
        &self,
        known: Option<Blob>,
        changes: LayerContent,
        there: impl Fn() -> Result<bool>,
    ) -> Result<Blob> {
        if let Some(blob) = known
            && self.to.has(&blob.sha256, blob.size).await?
        {
            self.pushed.borrow_mut().there += 1;
            return Ok(blob);
        }
        let others = self.sending.get();
        self.sending.set(others + 1);
        let sent = send(&self.to, &changes, &self.done, others == 0).await;
        self.sending.set(self.sending.get() - 1);
        let sent = sent?;
        if !there()? {
            return Err(busy!("it was removed during the push").help("run the command again"));
        }
        let mut pushed = self.pushed.borrow_mut();
        pushed.sent += 1;
        pushed.sent_bytes += sent.blob.size;
        pushed.left_out += sent.left_out;
        Ok(sent.blob)
    }

    /// Stores the current document under a tag, once in a command. An existing tag for the same key stays, unless this
    /// one `moves` it.
    async fn publish(&self, document: &Document, tag: &str, moves: bool) -> Result<()> {
        let (config, manifest) = document.encode(&self.what.profile)?;
        let registry = match &self.to {
            Destination::Registry(registry) => *registry,
            Destination::Layout(draft) => {
                // One image, because most programs look for only one. The last description includes all lower ones.
                let mut draft = draft.lock().await;
                draft.describe(document.key(), self.tag, config, manifest);
                self.pushed.borrow_mut().tags = 1;
                return Ok(());
            }
        };
        let ours = hex::encode(Sha256::digest(&manifest));
        let repository = self.repository;
        if repository.is_some_and(|repository| repository.has_pushed(tag, &ours)) {
            return Ok(());
        }
        let content = (&*config, &*manifest, &*ours);
        self.set_tag(registry, document, (tag, moves), content)
            .await?;
        if let Some(repository) = repository {
            repository.remember(tag, &ours);
        }
        Ok(())
    }

    async fn set_tag(
        &self,
        registry: &Registry,
        document: &Document,
        (tag, moves): (&str, bool),
        (config, manifest, ours): (&[u8], &[u8], &str),
    ) -> Result<()> {
        if let Some((there, sha256)) = registry.find_tag(tag).await? {
            let same_key = || {
                let manifest = Manifest::parse(&there).ok();
                // A clean result replaces an incremental one.
                manifest.is_some_and(|manifest| {
                    manifest.key() == Some(document.key())
                        && (manifest.is_clean() || !document.is_clean())
                })
            };
            if sha256 == ours {
                return self.sign(registry, ours).await;
            }
            if !moves && same_key() && self.trusts(registry, &sha256).await? {
                return Ok(());
            }
        }
        let sha256 = hex::encode(Sha256::digest(config));
        if !registry.has_blob(&sha256, config.len() as u64).await? {
            registry.upload_bytes(config).await?;
        }
        // The signature comes before the tag: a reader that finds the tag finds the signature.
        self.sign(registry, ours).await?;
        match registry.publish(tag, MANIFEST, manifest).await? {
            Tagged::Set => self.pushed.borrow_mut().tags += 1,
            Tagged::Immutable if self.tag != Some(tag) => self.pushed.borrow_mut().immutable += 1,
            Tagged::Immutable => {
                return Err(unavailable!(
                    "tag `{tag}` exists, and the registry does not let it move"
                )
                .help("push under another tag, or let the registry move tags"));
            }
        }
        Ok(())
    }

    fn signs(&self) -> Option<&SigningKey> {
        self.repository?.signs.as_deref()
    }

    fn blobs(&self) -> std::path::PathBuf {
        self.store.root().join("blobs")
    }

    /// Signs a manifest that this machine made.
    async fn sign(&self, registry: &Registry, manifest: &str) -> Result<()> {
        let (Some(key), Some(repository)) = (self.signs(), self.repository) else {
            return Ok(());
        };
        let name = repository.to_string();
        signature::sign(registry, key, &name, manifest, &self.blobs())
            .await
            .context(|| "cannot sign".to_owned())
    }

    /// Returns whether another machine's manifest may stay: it must have the signature that this machine would add.
    async fn trusts(&self, registry: &Registry, manifest: &str) -> Result<bool> {
        match self.signs() {
            Some(key) => signature::is_signed(registry, key, manifest, &self.blobs()).await,
            None => Ok(true),
        }
    }
}

/// Remembered digests only save queries and packing, so a full disk must not prevent a push.
pub(super) fn unless_full(remembered: Result<()>) -> Result<()> {
    match remembered {
        Err(error) if error.kind() == Kind::OutOfSpace => Ok(()),
        other => other,
    }
}
