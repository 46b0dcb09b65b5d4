//! Owns reading a foreign layout: its images, and their verified layers.

use std::path::Path;
use std::sync::atomic::Ordering;

use fs_err as fs;
use serde::Deserialize;

use super::super::document::{Document, MAX_CONFIG, Manifest};
use super::super::pull::SnapshotRef;
use crate::image::fetch::{ByteCounter, hashed};
use crate::image::oci::layout_files::{INDEX, LayoutFiles, MARK, Piece, blob, no_layout};
use crate::image::oci::{Descriptor, MAX_MANIFEST, damaged};
use crate::store::shared::Blob;
use crate::sys::checksum::Algorithm;
use crate::sys::error::{Result, if_exists};

/// Each image has its own manifest and configuration, and all of them are checked before the first import.
const MAX_IMAGES: usize = 256;

#[derive(Debug)]
pub(in crate::share) struct Layout(LayoutFiles);

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
}

impl Layout {
    /// Locates the parts without verifying them.
    pub(in crate::share) fn open(path: &Path) -> Result<Self> {
        if_exists(fs::metadata(path))?.ok_or_else(|| {
            not_found!("`{}` does not exist", path.display())
                .help("rockenv export ENV --snapshots FILE.oci.tar, on the machine that built it")
        })?;
        let files = LayoutFiles::open(path)?;
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Mark {
            image_layout_version: String,
        }
        let mark = files
            .read(MARK, MAX_MANIFEST)?
            .ok_or_else(|| no_layout(&format!("there is no `{MARK}` in it")))?;
        let mark: Mark = serde_json::from_slice(&mark)
            .map_err(|error| no_layout(&format!("its `{MARK}` is invalid")).source(error))?;
        match mark.image_layout_version.starts_with("1.") {
            true => Ok(Self(files)),
            false => {
                let version = mark.image_layout_version.escape_debug();
                Err(no_layout(&format!("its version is {version}, not 1")))
            }
        }
    }

    pub(in crate::share) fn entries(&self) -> Result<Vec<Descriptor>> {
        // The index is written last, so an interrupted export has no index.
        let index = self
            .0
            .read(INDEX, MAX_MANIFEST)?
            .ok_or_else(|| no_layout(&format!("there is no `{INDEX}` in it: is it incomplete?")))?;
        let index: Index = serde_json::from_slice(&index)
            .map_err(|error| no_layout(&format!("its `{INDEX}` is not an index")).source(error))?;
        let wrong = |why: String| Err(no_layout(&why));
        match (index.schema_version, index.manifests.len()) {
            (2, 1..=MAX_IMAGES) => Ok(index.manifests),
            (2, 0) => Err(no_layout("it contains no image")),
            (2, count) => wrong(format!("it contains {count} images (limit {MAX_IMAGES})")),
            (version, _) => wrong(format!("its `{INDEX}` has version {version}, not 2")),
        }
    }

    pub(in crate::share) fn document(&self, entry: &Descriptor) -> Result<Document> {
        let manifest = Manifest::parse(&self.0.verified(entry, MAX_MANIFEST)?)?;
        let config = self.0.verified(&manifest.config, MAX_CONFIG)?;
        let document = manifest.with(&config)?;
        for name in entry.names() {
            SnapshotRef::of(name).check(&document)?;
        }
        Ok(document)
    }

    /// Returns the place of a layer in the layout, after checking its hash.
    pub(in crate::share) async fn layer(
        &self,
        layer: &Blob,
        counter: &ByteCounter,
    ) -> Result<Piece> {
        let (part, piece) = self.0.part(&blob(&layer.sha256), Some(layer.size))?;
        let progress = |amount| {
            counter.done.fetch_add(amount, Ordering::Relaxed);
        };
        let (hash, _) = hashed(part, Algorithm::Sha256, progress).await?;
        match hex::encode(hash.finalize()) {
            found if layer.sha256 == *found => Ok(piece),
            found => Err(damaged("a layer in it", &found, &layer.sha256)),
        }
    }
}
