//! Owns the two kinds of places for snapshots: a registry's repository, and a layout in files.

use std::path::Path;

use tokio::sync::Mutex;

use super::layout::{Layout, LayoutDraft};
use crate::image::fetch::{ByteCounter, Size};
use crate::image::oci::layout_files::Piece;
use crate::image::oci::{Registry, RequestSubject};
use crate::store::shared::{Blob, IncomingLayers};
use crate::sys::error::Result;

pub(super) enum Destination<'a> {
    Registry(&'a Registry),
    Layout(Box<Mutex<LayoutDraft>>),
}

impl Destination<'_> {
    pub(super) async fn has(&self, sha256: &str, size: u64) -> Result<bool> {
        match self {
            Self::Registry(registry) => registry.has_blob(sha256, size).await,
            Self::Layout(draft) => Ok(draft.lock().await.has(sha256)),
        }
    }

    /// Returns whether a layer's digest must be known before it is sent.
    pub(super) fn wants_digests(&self) -> bool {
        matches!(self, Self::Registry(registry) if registry.wants_digests())
    }

    pub(super) fn verb(&self) -> &'static str {
        match self {
            Self::Registry(_) => "push",
            Self::Layout(_) => "export",
        }
    }
}

#[derive(Clone, Copy)]
pub(super) enum SnapshotSource<'a> {
    /// The registry, and the directory that layers are downloaded to.
    Registry(&'a Registry, &'a Path),
    Layout(&'a Layout),
}

impl SnapshotSource<'_> {
    /// Returns a layer's location once the layer is complete and verified.
    pub(super) async fn layer(self, blob: &Blob, counter: &ByteCounter) -> Result<Piece> {
        match self {
            Self::Registry(registry, blobs) => {
                let (subject, size) = (RequestSubject::Blob, Size::Exactly(blob.size));
                let path = registry.obtain_sha256(subject, &blob.sha256, size, blobs, counter);
                path.await.map(Piece::whole)
            }
            Self::Layout(layout) => layout.layer(blob, counter).await,
        }
    }

    /// Returns how many more bytes of a layer must be stored before it can be unpacked.
    pub(super) fn missing_bytes(self, blob: &Blob) -> u64 {
        match self {
            Self::Registry(_, blobs) => {
                // The names of complete and partial downloads.
                let names = [blob.sha256.to_string(), format!(".{}.partial", blob.sha256)];
                let found = names.map(|name| fs_err::metadata(blobs.join("sha256").join(name)));
                let sizes = found.iter().flatten().map(std::fs::Metadata::len);
                blob.size.saturating_sub(sizes.max().unwrap_or_default())
            }
            Self::Layout(_) => 0,
        }
    }

    /// Returns how many bytes a layer's copy takes while a service unpacks it.
    pub(super) fn copied(self, blob: &Blob) -> u64 {
        match self {
            Self::Registry(..) => 0,
            Self::Layout(_) => blob.size,
        }
    }

    /// Removes a downloaded layer that is no longer needed. Files of the user stay.
    pub(super) fn forget(self, incoming: &IncomingLayers<'_>, blob: &Blob) -> Result<()> {
        match self {
            Self::Registry(..) => incoming.drop_blob(&blob.sha256),
            Self::Layout(_) => Ok(()),
        }
    }
}
