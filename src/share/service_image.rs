//! Owns sharing snapshots that a service keeps: sends the layers of their images, and makes images at the service from
//! pulled layers.
//!
//! A step's container is based on the previous snapshot, so the step's image has exactly one more layer: the step's
//! changes, with OCI deletions. The service can only export whole images. One export serves all missing layers, and the
//! others are skipped. Build volumes are in the store for every engine.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fs_err as fs;
use tokio::sync::{mpsc, oneshot};

use super::place::Destination;
use super::push::{Pushed, unless_full};
use super::upload::{Pieces, Sent, chunked, transfer};
use crate::engine::docker::{ContainerTree, Service, Unpack};
use crate::image::compression;
use crate::image::oci::Attempts;
use crate::plan::ids::TreeId;
use crate::store::service;
use crate::store::shared::Blob;
use crate::store::{Layer, Store};
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::sys::thread;

/// An empty archive, for a step without changes.
const EMPTY: [u8; 1024] = [0; 1024];
const EMPTY_SHA256: &str = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef";

/// A service's layers for a chain of snapshots.
#[derive(Debug)]
pub(crate) struct ServiceImage {
    socket: PathBuf,
    /// The topmost snapshot's image, which contains all of the layers.
    image: String,
    /// Digest of the layer with each snapshot's changes.
    changes: Vec<String>,
}

impl ServiceImage {
    /// Examines the service's images of these layers, lowest first. Returns the images that add one layer to the
    /// previous one, and the reason why the next image does not.
    pub(crate) fn of(service: &Service, layers: &[Layer]) -> Result<(Self, Option<String>)> {
        let mut kept = Self {
            socket: service.socket.clone(),
            image: String::new(),
            changes: Vec::new(),
        };
        let mut below: Option<Vec<String>> = None;
        for layer in layers {
            let image = layer.kept.as_ref();
            let image = image.filter(|kept| kept.socket == service.socket);
            let image = image.map(|kept| &kept.image);
            let found = match image {
                Some(image) => service.layers(image)?,
                None => None,
            };
            let (Some(image), Some(found)) = (image, found) else {
                let what = format!("its image was deleted from {}", service.flavour);
                return Ok((kept, Some(what)));
            };
            // The lowest layer is the base image's.
            let base = below.as_ref().map_or(1, Vec::len);
            let stands = found.len() >= base && below.is_none_or(|below| found.starts_with(&below));
            let change = match found.get(base..) {
                Some([]) if stands => EMPTY_SHA256,
                Some([one]) if stands => one,
                _ => {
                    let flavour = service.flavour;
                    let what = format!("{flavour} does not have its changes as one layer");
                    return Ok((kept, Some(what)));
                }
            };
            kept.changes.push(change.to_owned());
            kept.image.clone_from(image);
            below = Some(found);
        }
        Ok((kept, None))
    }

    /// Returns the number of shareable snapshots, counted from the bottom.
    pub(crate) fn len(&self) -> usize {
        self.changes.len()
    }
}

/// A layer on its way from the service.
struct Package {
    diff_id: String,
    pieces: Pieces,
    outcome: oneshot::Receiver<Result<Option<Sent>>>,
}

/// Makes sure that a destination has the changes of each snapshot; returns the layers there, in order. Remembers each
/// sent layer at once, so that an interrupted push resumes.
pub(super) async fn send(
    store: &Store,
    to: &Destination<'_>,
    kept: &ServiceImage,
    layers: &[Layer],
    done: &Arc<AtomicU64>,
    pushed: &mut Pushed,
) -> Result<Vec<Blob>> {
    let mut found: Vec<Option<Blob>> = Vec::new();
    let mut missing: BTreeMap<&str, Vec<usize>> = BTreeMap::new();
    for (at, (layer, diff_id)) in layers.iter().zip(&kept.changes).enumerate() {
        let known = store.shared_layer(&layer.id).ok().flatten();
        let known = known.and_then(|shared| shared.tree);
        let there = match &known {
            Some(blob) => to.has(&blob.sha256, blob.size).await?,
            None => false,
        };
        found.push(known.filter(|_| there));
        match there {
            true => pushed.there += 1,
            false => missing.entry(diff_id).or_default().push(at),
        }
    }
    let (sender, mut packages) = mpsc::channel(1);
    let wanted: Vec<String> = missing.keys().map(|&layer| layer.to_owned()).collect();
    if !wanted.is_empty() {
        let (socket, image, done) = (kept.socket.clone(), kept.image.clone(), Arc::clone(done));
        let reading = thread::start(move || read(&socket, &image, wanted, &sender, &done))?;
        let mut outcome = Ok(());
        while let Some(Package {
            diff_id,
            pieces,
            outcome: made,
        }) = packages.recv().await
        {
            let made = async || made.await.unwrap_or(Ok(None));
            let sent = transfer(to, pieces, made, None, &mut Attempts::default()).await;
            // The layer cannot be read from the service a second time.
            let again = || {
                unavailable!("the registry did not take a layer")
                    .help("run the command again, or use a registry that accepts uploads by PATCH")
            };
            match sent.and_then(|sent| sent.ok_or_else(again)) {
                Ok(sent) => {
                    pushed.sent += 1;
                    pushed.sent_bytes += sent.blob.size;
                    for at in missing.remove(diff_id.as_str()).unwrap_or_default() {
                        let id = &layers[at].id;
                        let mut shared = store.shared_layer(id).ok().flatten().unwrap_or_default();
                        shared.unverified = Some(store.is_unverified(&layers[at]));
                        shared.tree = Some(sent.blob.clone());
                        shared.chain.clear();
                        unless_full(shared.save(&store.layer_dir(id)))?;
                        found[at] = Some(sent.blob.clone());
                    }
                }
                Err(error) => {
                    outcome = Err(error);
                    break;
                }
            }
        }
        drop(packages);
        // If reading the layer failed, that is the cause.
        thread::joined(reading.join()).and(outcome)?;
    }
    let all: Option<Vec<Blob>> = found.into_iter().collect();
    all.ok_or_else(|| {
        busy!("a snapshot was removed while it was read").help("run the command again")
    })
}

/// Reads layers from the service one after the other, at the speed of the receiver.
fn read(
    socket: &Path,
    image: &str,
    mut wanted: Vec<String>,
    packages: &mpsc::Sender<Package>,
    done: &AtomicU64,
) -> Result<()> {
    let mut hand_on = |diff_id: &str, from: &mut dyn std::io::Read| {
        let (chunked, pieces) = chunked(true);
        let (tell, outcome) = oneshot::channel();
        let package = Package {
            diff_id: diff_id.to_owned(),
            pieces,
            outcome,
        };
        // The receiver knows why it stopped.
        if packages.blocking_send(package).is_err() {
            return Ok(false);
        }
        let made = compression::plain(from)
            .map_err(Error::from)
            .and_then(|mut from| chunked.copy(&mut from, diff_id, done));
        let goes_on = matches!(made, Ok(Some(_)));
        drop(tell.send(made));
        Ok(goes_on)
    };
    if let Some(at) = wanted.iter().position(|layer| layer == EMPTY_SHA256) {
        wanted.remove(at);
        if !hand_on(EMPTY_SHA256, &mut EMPTY.as_slice())? {
            return Ok(());
        }
    }
    if wanted.is_empty() {
        return Ok(());
    }
    Service::connect(socket)?
        .read_layers(image, &wanted, &mut hand_on)
        .context(|| "cannot read the snapshots".to_owned())
}

/// A pulled layer, to be unpacked at a service.
pub(super) struct Arrived<'a> {
    /// Directory of the layer in the store.
    pub(super) directory: &'a Path,
    pub(super) tree: &'a TreeId,
    /// The image below it.
    pub(super) below: String,
    pub(super) archive: &'a Path,
    pub(super) blob: &'a Blob,
}

pub(super) fn make(
    store: &Store,
    service: &Service,
    arrived: Arrived<'_>,
    look: &mut dyn FnMut() -> Result<()>,
) -> Result<service::SnapshotImage> {
    let (directory, tree) = (arrived.directory, arrived.tree);
    // Noted before the image exists, so that discarding the directory removes the image too.
    store.note_tree(directory, &service.socket, tree)?;
    let place = ContainerTree {
        socket: service.socket.clone(),
        image: arrived.below,
        name: format!("rockenv-pull-{tree}"),
        store: store.root().to_string_lossy().into_owned(),
        id: store.id()?,
        // The container has no env and no key: if it is lost, it can be pulled again.
        env: None,
        tree: tree.clone(),
        key: None,
    };
    let report = directory.join("report");
    let unpack = Unpack {
        place: &place,
        archive: arrived.archive,
        diff_id: &arrived.blob.diff_id,
        unpacked: arrived.blob.unpacked,
        program: &Host::probe()?.program,
        report: &report,
    };
    if let Err(error) = service.unpack(&unpack, look) {
        // If the service itself failed, the next pull removes the container.
        drop(service.remove_container(&place.name));
        return Err(error);
    }
    fs::remove_file(&report)?;
    let kept = store.freeze_container(service, &place, false)?;
    service.remove_container(&place.name)?;
    Ok(kept)
}
