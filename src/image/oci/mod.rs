//! Owns container images: pulled from a registry without a daemon, or read from files.
//!
//! Downloads and extraction overlap. A layer is extracted once its file has the digest in the manifest. Its content
//! must have the digest in the configuration. So a manifest's digest determines the whole tree and the environment.

pub(crate) mod changes;
pub(crate) mod downloads;
pub(crate) mod layers;

mod credentials;
mod endpoint;
mod layout;
pub(crate) mod layout_files;
mod manifest;
mod reference;
mod registry;
mod retry;
mod token_server;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::Ordering;

use super::recipe::Oci;
use super::{BuildContext, BuildProgress};
use crate::image::fetch::{self, ByteCounter, Size};
use crate::image::oci::downloads::while_downloading;
use crate::image::oci::layers::Onto;
use crate::image::tar::unpack::{UnpackOptions, UnpackReport, Unpacker};
use crate::sys::error::{Kind, Result, ResultExt as _};
use layout::Layout;
use layout_files::Piece;
use manifest::{Configuration, Document, MAX_CONFIG, MAX_NESTING, Manifest};
pub(crate) use manifest::{Descriptor, MAX_MANIFEST, damaged, refused};
pub(super) use reference::{NO_DIGEST, Platform};
pub(crate) use reference::{Reference, sha256};
pub(crate) use registry::{Attempts, Operation, Registry, RequestSubject, Tagged, Upload};
pub use retry::Notice;

/// The image that a recipe resolved to.
pub(super) struct Resolved {
    /// Digest with `sha256:`, of the manifest or, if the image has none, of the configuration.
    pub(super) digest: String,
    pub(super) env: BTreeMap<String, String>,
}

pub(super) fn build(table: &Oci, cx: &mut BuildContext<'_>) -> Result<Resolved> {
    let platform =
        Platform::parse(&table.platform).ok_or_else(|| unexpected!("a recipe for no platform"))?;
    match (&table.path, &table.reference) {
        (Some(path), wanted) => from_files(path, wanted.as_deref(), &platform, cx),
        (None, Some(text)) => {
            let reference = Reference::parse(text)
                .map_err(|(message, help)| invalid!("{message}").help(help))?;
            let pulled = pull(&reference, &platform, cx).map_err(|error| match error.kind() {
                // The image usually has another publisher, so the help to push it again does not apply.
                Kind::Drift => error.help(manifest::ANOTHER),
                _ => error,
            });
            pulled.context(|| format!("cannot pull `{text}`"))
        }
        (None, None) => Err(unexpected!("an oci recipe without ref and path")),
    }
}

fn from_files(
    path: &Path,
    wanted: Option<&str>,
    platform: &Platform,
    cx: &mut BuildContext<'_>,
) -> Result<Resolved> {
    let fits = |found: &std::fs::Metadata| found.is_dir() || found.is_file();
    let path = &super::input(path, "oci", "a regular file or a directory", fits)?;
    let shown = path.display();
    let cancel = cx.task.cancel;
    let progress = &mut *cx.task.progress;
    let mut report = |done| progress(BuildProgress::Bytes { done, total: None });
    // Next to the tree, so that it is removed with the tree if this process is killed.
    let scratch = cx.into.parent().unwrap_or(Path::new("/"));
    let layout = Layout::open(path, wanted, platform, scratch, cancel, &mut report)?;
    let options = UnpackOptions::default();
    let mut layers = Unpacker::layers(cx.into, &options, Onto::Nothing, cancel)?;
    for layer in &layout.layers {
        let file = layout.layer(layer, cancel)?;
        layers
            .apply(file, &layer.diff_id, &mut report)
            .context(|| format!("cannot extract layer {} of `{shown}`", layer.diff_id))?;
    }
    let report = layers.finish()?;
    Ok(resolved(&layout.sha256, layout.config, &report, progress))
}

/// Returns the result for a complete image, and reports skipped items.
fn resolved(
    sha256: &str,
    config: Configuration,
    report: &UnpackReport,
    progress: &mut dyn FnMut(BuildProgress<'_>),
) -> Resolved {
    for (what, count) in &report.dropped {
        progress(BuildProgress::Line(&format!("skipped: {what} ({count})")));
    }
    for what in &config.left_out {
        progress(BuildProgress::Line(&format!("skipped: {what}")));
    }
    Resolved {
        digest: format!("sha256:{sha256}"),
        env: config.env,
    }
}

fn pull(reference: &Reference, platform: &Platform, cx: &mut BuildContext<'_>) -> Result<Resolved> {
    // The progress callback checks for signals.
    let registry = Registry::new(reference, Operation::Pull, &mut cx.task)?;
    let (cancel, blobs) = (cx.task.cancel, cx.blobs);
    let progress = &mut *cx.task.progress;
    let work = || fetch::run(cancel, documents(&registry, reference, platform, blobs));
    let (sha256, config, layers) = fetch::in_thread(work, || {
        progress(BuildProgress::Bytes {
            done: 0,
            total: None,
        });
    })?;
    let total = layers
        .iter()
        .fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
    let options = UnpackOptions::default();
    if total > options.limits.bytes {
        return Err(manifest::refused(format!("its layers have {total} bytes")));
    }
    let counter = ByteCounter::default();
    counter.total.store(total, Ordering::Relaxed);
    let download = async |index: usize| {
        let layer = &layers[index];
        let path = registry.obtain(RequestSubject::Blob, layer, u64::MAX, blobs, &counter);
        path.await.map(Piece::whole)
    };
    let needed = (0..layers.len()).collect();
    let mut tree = Unpacker::layers(cx.into, &options, Onto::Nothing, cancel)?;
    while_downloading(needed, download, &counter, cancel, progress, |downloads| {
        for (index, diff_id) in config.diff_ids.iter().enumerate() {
            let archive = downloads.layer(index)?.open()?;
            let count = config.diff_ids.len();
            tree.apply(archive, diff_id, &mut |_| downloads.show())
                .context(|| format!("cannot extract layer {} of {count}", index + 1))?;
        }
        // A small layer may have arrived and been extracted between two updates.
        downloads.show();
        Ok(())
    })?;
    let report = tree.finish()?;
    Ok(resolved(&sha256, config, &report, progress))
}

/// Downloads the documents of an image; returns the manifest's SHA-256, the configuration and the layers.
async fn documents(
    registry: &Registry,
    reference: &Reference,
    platform: &Platform,
    blobs: &Path,
) -> Result<(String, Configuration, Vec<Descriptor>)> {
    // Small downloads do not count as progress.
    let aside = ByteCounter::default();
    let subject = RequestSubject::Manifest;
    let (mut bytes, mut sha256) = match &reference.sha256 {
        // The digest decides. A tag next to it is only informative and may have moved.
        Some(sha256) => {
            let size = Size::AtMost(MAX_MANIFEST);
            let path = registry.obtain_sha256(subject, sha256, size, blobs, &aside);
            (fs_err::read(path.await?)?, sha256.clone())
        }
        None => {
            let tag = reference.tag.as_deref().unwrap_or("latest");
            let (bytes, sha256) = registry.tag(tag).await?;
            fetch::keep(&bytes, &sha256, blobs)?;
            (bytes, sha256)
        }
    };
    let (mut nesting, mut called) = (0, String::new());
    let Manifest { config, layers } = loop {
        let document = Document::parse(&bytes)?;
        document.check_type(&called)?;
        match document {
            Document::Manifest(manifest) => break manifest,
            Document::Index(_) if nesting == MAX_NESTING => {
                return Err(manifest::refused("its index leads to indexes only".into()));
            }
            Document::Index(entries) => {
                nesting += 1;
                let chosen = manifest::choose(&entries, platform)?;
                let path = registry.obtain(subject, chosen, MAX_MANIFEST, blobs, &aside);
                (bytes, sha256) = (fs_err::read(path.await?)?, chosen.sha256()?.to_owned());
                called.clone_from(&chosen.media_type);
            }
        }
    };
    let path = registry
        .obtain(RequestSubject::Blob, &config, MAX_CONFIG, blobs, &aside)
        .await?;
    let config = Configuration::parse(&fs_err::read(path)?, layers.len(), platform)?;
    Ok((sha256, config, layers))
}
