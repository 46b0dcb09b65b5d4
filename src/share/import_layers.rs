//! Owns importing a snapshot's missing layers and making trees from them, whatever method either store uses.
//!
//! Foreign data goes through the same extraction as images. Every byte is hashed, and nothing gets a name in the store
//! before it is complete.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use fs_err as fs;

use super::document::{Document, SharedVolume, foreign};
use super::place::SnapshotSource;
use super::pull::Pulled;
use super::unverified;
use crate::engine::BuildUser;
use crate::engine::docker::Service;
use crate::image::BuildProgress;
use crate::image::fetch::ByteCounter;
use crate::image::oci::downloads::{Downloads, while_downloading};
use crate::image::oci::layers::Onto;
use crate::image::tar::unpack::{Devices, Limits, UnpackOptions, Unpacker};
use crate::plan::ids::{TreeId, VolumeName};
use crate::share::service_image::{self, Arrived};
use crate::store::history::Reuse;
use crate::store::images::TaskContext;
use crate::store::layer::{VolumeState, boot_id};
use crate::store::service::SnapshotImage;
use crate::store::shared::{IncomingLayers, Shared};
use crate::store::{Layer, Store};
use crate::sys::atomic::random_id;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host;
use crate::tree::{self, Method};
use crate::ui::size;

/// Destination and filter of an import.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Import<'a> {
    pub store: &'a Store,
    /// The owner of build volumes.
    pub user: &'a BuildUser,
    /// The service that keeps the trees of steps in place of the store.
    pub service: Option<&'a Service>,
    pub reuse: Reuse,
}

impl Import<'_> {
    /// Imports the missing layers of a document. `verified`: its signature was verified.
    pub(super) fn run(
        self,
        source: SnapshotSource<'_>,
        mut document: Document,
        verified: bool,
        cx: &mut TaskContext<'_>,
    ) -> Result<Pulled> {
        let incremental = match self.reuse {
            Reuse::Clean => document.cut_incremental(),
            Reuse::Incremental => Vec::new(),
        };
        let incoming = self.store.incoming(cx)?;
        let pulled = Pull::new(self, &incoming, &document, verified)
            .and_then(|mut pull| pull.finish(source, incremental, cx));
        // On a full disk only the downloads may stay, because the next attempt reuses them.
        let finished = incoming.finish();
        let pulled = pulled?;
        finished?;
        Ok(pulled)
    }
}

struct Pull<'a> {
    to: Import<'a>,
    incoming: &'a IncomingLayers<'a>,
    document: &'a Document,
    chains: Vec<String>,
    verified: bool,
    needs_image: bool,
    /// The first step whose snapshot is missing.
    first: usize,
    /// The snapshot of the step before `first`.
    base: Option<Layer>,
    /// Layers to download, in the order of use.
    needed: Vec<usize>,
}

/// A step whose layer is being made: its position, the layer's new directory, and that of the layer below.
#[derive(Clone, Copy)]
struct ImportedStep<'a> {
    at: usize,
    place: &'a Path,
    below: Option<&'a Path>,
}

impl<'a> Pull<'a> {
    fn new(
        to: Import<'a>,
        incoming: &'a IncomingLayers<'a>,
        document: &'a Document,
        verified: bool,
    ) -> Result<Self> {
        let Import { store, service, .. } = to;
        let chains = document.chains();
        let steps = &document.snapshot.steps;
        let mut known = store.layers_by_chain(service.map(|service| service.socket.as_path()))?;
        if let Some(service) = service {
            known.retain(|_, layer| {
                let image = layer.kept.as_ref().map(|kept| service.image(&kept.image));
                matches!(image, Some(Ok(Some(_))))
            });
        }
        let top = (0..steps.len()).rev().find_map(|at| {
            let layer = known.get(&chains[at])?;
            // The requested step is looked up by its key. If another layer has that key, such as a layer of another
            // engine, a second copy would not be found either.
            let key = &steps[at].key;
            let found = at + 1 < steps.len()
                || *layer.id == **key
                || store.layer_dir(&key.clone().into()).exists();
            found.then_some(&layer.id)
        });
        let mut there = top.map_or_else(|| Ok(Vec::new()), |top| store.chain(top))?;
        there.reverse();
        let image = &document.snapshot.image;
        if verified {
            unverified::verify_image(store, image)?;
            unverified::verify_layers(store, &mut there, steps)?;
            // Needed even if nothing is missing, because the requested step is looked up by its key.
            let from = there.len().min(steps.len().saturating_sub(1));
            unverified::make_way(store, &steps[from..], there.last())?;
        }
        let (first, base) = (there.len(), there.pop());
        let mut pull = Self {
            to,
            incoming,
            document,
            chains,
            verified,
            needs_image: base.is_none() && store.image(&image.key)?.is_none(),
            first,
            base,
            needed: Vec::new(),
        };
        if pull.needs_image {
            pull.needed.push(0);
        }
        for at in pull.first..steps.len() {
            pull.needed.push(steps[at].layer);
            pull.needed.extend(steps[at].results);
            for name in steps[at].volumes.keys() {
                for below in pull.volume_layers(name, at) {
                    pull.needed.extend(steps[below].volume(name));
                }
            }
        }
        Ok(pull)
    }

    fn finish(
        &mut self,
        source: SnapshotSource<'_>,
        incremental: Vec<String>,
        cx: &mut TaskContext<'_>,
    ) -> Result<Pulled> {
        self.run(source, cx)?;
        for index in &self.needed {
            source.forget(self.incoming, &self.document.blobs[*index])?;
        }
        let snapshot = &self.document.snapshot;
        let steps = snapshot.steps[self.first..].iter();
        Ok(Pulled {
            image: snapshot.image.key.to_string(),
            image_pulled: self.needs_image,
            steps: steps.map(|step| step.name.clone()).collect(),
            incremental,
            bytes: self.bytes(),
        })
    }

    /// Returns the steps whose changes turn what exists by then into the build volume's state after step `at`. If the
    /// store does not freeze volumes, only the last snapshot gets them, so the disk holds one copy.
    fn volume_layers(&self, name: &str, at: usize) -> std::ops::Range<usize> {
        let steps = &self.document.snapshot.steps;
        if steps[at].volume(name).is_none() {
            return at..at;
        }
        if self.to.store.freezes_volumes() {
            return at..at + 1;
        }
        if at + 1 < steps.len() {
            return at..at;
        }
        let mut from = at;
        while from > 0
            && steps[from - 1].volume(name).is_some()
            && !(from == self.first && self.base_has(name))
        {
            from -= 1;
        }
        from..at + 1
    }

    fn base_has(&self, name: &str) -> bool {
        let base = self.base.as_ref();
        base.is_some_and(|base| base.volumes.get(name) == Some(&VolumeState::Frozen))
    }

    fn bytes(&self) -> u64 {
        let blobs = self.needed.iter().map(|index| &self.document.blobs[*index]);
        let sizes = blobs.map(|blob| blob.size);
        sizes.fold(0, u64::saturating_add)
    }

    /// Refuses a pull that does not fit on the disk. Downloads stay until everything is unpacked.
    fn check_room(&self, source: SnapshotSource<'_>) -> Result<()> {
        let root = self.to.store.root();
        let blobs = self.needed.iter().map(|index| &self.document.blobs[*index]);
        let downloads = blobs.map(|blob| source.missing_bytes(blob));
        // A service has its own disk for the trees of steps.
        let elsewhere = |index: &usize| {
            let mut steps = self.document.snapshot.steps.iter();
            self.to.service.is_some() && steps.any(|step| step.layer == *index)
        };
        let copies = self.needed.iter().filter(|index| elsewhere(index));
        let copies = copies.map(|index| source.copied(&self.document.blobs[*index]));
        let downloads = downloads.fold(copies.max().unwrap_or_default(), u64::saturating_add);
        let here = self.needed.iter().filter(|index| !elsewhere(index));
        let unpacked = match tree::compresses(root) {
            // The unpacked size is unknown.
            true => 0,
            false => here
                .filter_map(|index| self.document.blobs[*index].unpacked)
                .fold(0, u64::saturating_add),
        };
        let (needed, free) = (downloads.saturating_add(unpacked), host::free_space(root)?);
        if needed <= free {
            return Ok(());
        }
        Err(Error::new(
            Kind::OutOfSpace,
            format!(
                "it needs {} ({} compressed, {} unpacked), but only {} are free at `{}`",
                size::bytes(needed),
                size::bytes(downloads),
                size::bytes(unpacked),
                size::bytes(free),
                root.display()
            ),
        )
        .help("rockenv gc"))
    }

    fn run(&mut self, source: SnapshotSource<'_>, cx: &mut TaskContext<'_>) -> Result<()> {
        let counter = ByteCounter::default();
        counter.total.store(self.bytes(), Ordering::Relaxed);
        self.check_room(source)?;
        let document = self.document;
        let download = async |index: usize| source.layer(&document.blobs[index], &counter).await;
        let (needed, progress) = (self.needed.clone(), &mut *cx.progress);
        let unpack = |downloads: &mut Downloads<'_>| self.unpack(downloads);
        while_downloading(needed, download, &counter, cx.cancel, progress, unpack)
    }

    fn unpack(&self, downloads: &mut Downloads<'_>) -> Result<()> {
        let image = &self.document.snapshot.image;
        let work = &self.incoming.work;
        let image_place = work.join("image");
        if self.needs_image {
            fs::create_dir(&image_place)?;
            let root = image_place.join("root");
            tree::create_tree(self.to.store.method(), &root)?;
            self.unpack_layer(downloads, 0, &root, Onto::Nothing)?;
            let found = tree::digest::digest(&root, downloads.cancel)?.digest;
            if found != image.digest {
                let wanted = &image.digest;
                let what = format!("the tree of its image has digest {found}, not {wanted}");
                return Err(foreign(what));
            }
        }
        if let Some(service) = self.to.service.filter(|_| self.base.is_none()) {
            if self.needs_image {
                self.publish_image(&image_place)?;
            }
            let progress = &mut *downloads.progress;
            let say = &mut |line: &str| progress(BuildProgress::Line(line));
            self.to.store.import_image(service, &image.key, say)?;
        }
        let mut made: Vec<(PathBuf, Layer, Shared)> = Vec::new();
        for at in self.first..self.document.snapshot.steps.len() {
            let place = work.join(format!("step-{at}"));
            fs::create_dir(&place)?;
            let below = match (made.last(), &self.base) {
                (Some((place, _, _)), _) => Some(place.clone()),
                (None, Some(base)) => Some(self.to.store.layer_dir(&base.id)),
                (None, None) => None,
            };
            let last = made.last().map(|(_, layer, _)| layer);
            let below_layer = last.or(self.base.as_ref());
            let tree: TreeId = random_id()?.try_into()?;
            let step = ImportedStep {
                at,
                place: &place,
                below: below.as_deref(),
            };
            let kept = match self.to.service {
                Some(service) => {
                    Some(self.service_image(service, step, &tree, below_layer, downloads)?)
                }
                None => {
                    self.tree(step, downloads)?;
                    None
                }
            };
            if let Some(index) = self.document.snapshot.steps[at].results {
                let into = place.join("results");
                fs::create_dir(&into)?;
                self.unpack_layer(downloads, index, &into, Onto::Nothing)?;
            }
            let volumes = self.volumes(step, downloads)?;
            let layer = Layer {
                tree: Some(tree),
                kept,
                ..self.describe(at, volumes)
            };
            made.push((place, layer, self.shared(at)));
        }
        if self.needs_image && self.to.service.is_none() {
            self.publish_image(&image_place)?;
        }
        self.incoming.publish_layers(made)
    }

    fn publish_image(&self, place: &Path) -> Result<()> {
        let image = &self.document.snapshot.image;
        let shared = Shared {
            chain: image.digest.clone(),
            tree: Some(self.document.blobs[0].clone()),
            unverified: Some(!self.verified),
            ..Shared::default()
        };
        self.incoming.publish_image(place, image, &shared)
    }

    fn unpack_layer(
        &self,
        downloads: &mut Downloads<'_>,
        index: usize,
        into: &Path,
        onto: Onto,
    ) -> Result<()> {
        let archive = downloads.layer(index)?;
        let blob = &self.document.blobs[index];
        // Devices are made as in the original store. The engine decides which of them a container may open.
        let options = UnpackOptions {
            devices: Devices::Make,
            limits: Limits::of_snapshot(blob.unpacked),
            ..UnpackOptions::default()
        };
        let mut layers = Unpacker::layers(into, &options, onto, downloads.cancel)?;
        layers
            .apply(archive.open()?, &blob.diff_id, &mut |_| downloads.show())
            .and_then(|()| layers.finish().map(drop))
            .context(|| self.cannot_unpack(index))
    }

    fn cannot_unpack(&self, index: usize) -> String {
        let count = self.document.blobs.len();
        format!("cannot unpack layer {} of {count}", index + 1)
    }

    /// Makes the root file system after a step, or its changes.
    fn tree(&self, step: ImportedStep<'_>, downloads: &mut Downloads<'_>) -> Result<()> {
        let ImportedStep { at, place, below } = step;
        let index = self.document.snapshot.steps[at].layer;
        let method = self.to.store.method();
        let (name, onto) = match method {
            Method::Overlay => ("diff", Onto::Overlay),
            Method::Btrfs | Method::Reflink => ("root", Onto::Tree),
        };
        let image = &self.document.snapshot.image.key;
        let from = match below {
            Some(below) => below.join(name),
            None if self.needs_image => self.incoming.work.join("image/root"),
            None => self.to.store.image_root(image),
        };
        let into = place.join(name);
        match onto {
            Onto::Overlay => tree::overlay::create_layer(&into, &from)?,
            Onto::Tree | Onto::Nothing => drop(tree::clone_tree(method, &from, &into)?),
        }
        self.unpack_layer(downloads, index, &into, onto)
    }

    fn service_image(
        &self,
        service: &Service,
        step: ImportedStep<'_>,
        tree: &TreeId,
        below: Option<&Layer>,
        downloads: &mut Downloads<'_>,
    ) -> Result<SnapshotImage> {
        let ImportedStep { at, place, .. } = step;
        let key = &self.document.snapshot.image.key;
        let below = match below {
            Some(below) => below.kept.as_ref().map(|kept| kept.image.clone()),
            None => self.to.store.imported_id(&service.socket, key)?,
        };
        let below =
            below.ok_or_else(|| unexpected!("{} has no image below it", service.flavour))?;
        let index = self.document.snapshot.steps[at].layer;
        let piece = downloads.layer(index)?;
        let mut look = || downloads.look();
        // A service mounts whole files, and may not see the disk that a layout is on.
        let copy = place.join("layer");
        let archive = piece.alone(&copy, &mut look)?;
        let arrived = Arrived {
            directory: place,
            tree,
            below,
            archive: &archive,
            blob: &self.document.blobs[index],
        };
        let kept = service_image::make(self.to.store, service, arrived, &mut look)
            .context(|| self.cannot_unpack(index))?;
        if archive == copy {
            fs::remove_file(copy)?;
        }
        Ok(kept)
    }

    fn volumes(
        &self,
        step: ImportedStep<'_>,
        downloads: &mut Downloads<'_>,
    ) -> Result<BTreeMap<VolumeName, VolumeState>> {
        let ImportedStep { at, place, below } = step;
        let steps = &self.document.snapshot.steps;
        let (method, mut made) = (self.to.store.method(), BTreeMap::new());
        for (name, volume) in &steps[at].volumes {
            let into = place.join("volumes").join(name);
            let changed = self.volume_layers(name, at);
            let state = match volume {
                SharedVolume::Absent => VolumeState::Absent,
                SharedVolume::Empty if !self.to.store.freezes_volumes() => VolumeState::Empty,
                SharedVolume::Empty => {
                    fs::create_dir_all(place.join("volumes"))?;
                    tree::create_tree(method, &into)?;
                    let user = self.to.user;
                    nix::unistd::chown(&into, Some(user.uid.into()), Some(user.gid.into()))?;
                    VolumeState::Frozen
                }
                SharedVolume::Layer(_) if changed.is_empty() => VolumeState::Absent,
                SharedVolume::Layer(_) => {
                    fs::create_dir_all(place.join("volumes"))?;
                    let before = changed.start.checked_sub(1);
                    let is_diff = before.is_some_and(|before| steps[before].volume(name).is_some());
                    // If volumes are not frozen, the volume's content is in a layer from before this pull.
                    let on_base = changed.start == self.first && self.base_has(name);
                    let base = self.base.as_ref().filter(|_| on_base);
                    let from = match (base, below) {
                        (Some(base), _) => Some(self.to.store.layer_dir(&base.id)),
                        (None, below) => below.map(Path::to_owned),
                    };
                    let from = from.map(|from| from.join("volumes").join(name));
                    match from.filter(|from| is_diff && from.is_dir()) {
                        Some(from) => drop(tree::clone_tree(method, &from, &into)?),
                        None if is_diff => {
                            return Err(unexpected!(
                                "build volume `{name}` is not in the snapshot below `{}`",
                                steps[at].name
                            ));
                        }
                        None => tree::create_tree(method, &into)?,
                    }
                    for (number, step) in changed.enumerate() {
                        let index = steps[step].volume(name).unwrap_or_default();
                        let onto = match is_diff || number > 0 {
                            true => Onto::Tree,
                            false => Onto::Nothing,
                        };
                        self.unpack_layer(downloads, index, &into, onto)?;
                    }
                    VolumeState::Frozen
                }
            };
            made.insert(name.clone(), state);
        }
        Ok(made)
    }

    /// Describes a layer. `publish_layers` sets the final id and, except for the lowest layer, the parent.
    fn describe(&self, at: usize, volumes: BTreeMap<VolumeName, VolumeState>) -> Layer {
        let step = &self.document.snapshot.steps[at];
        // Provisional: `publish_layers` picks another id if this one is taken.
        let id = step.key.clone().into();
        let image = self.document.snapshot.image.key.clone();
        Layer {
            key: Some(step.key.clone()),
            parent: self.base.as_ref().map(|base| base.id.clone()),
            boot: boot_id(),
            volumes,
            history: step.history.clone(),
            cost: step.cost,
            prints: step.prints.clone(),
            pins: step.pins.clone(),
            ..Layer::new(id, image, step.name.clone(), step.created)
        }
    }

    fn shared(&self, at: usize) -> Shared {
        let step = &self.document.snapshot.steps[at];
        let blob = |index: usize| self.document.blobs[index].clone();
        let volumes = step.volumes.keys();
        Shared {
            chain: self.chains[at].clone(),
            tree: Some(blob(step.layer)),
            volumes: volumes
                .filter_map(|name| Some((name.clone(), blob(step.volume(name)?))))
                .collect(),
            results: step.results.map(blob),
            unverified: Some(!self.verified),
        }
    }
}
