//! Owns unpacking layers as their downloads arrive.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Receiver, RecvTimeoutError};

use super::document::Document;
use crate::image::BuildProgress;
use crate::image::fetch::{ByteCounter, POLL};
use crate::image::oci::layers::{Deletions, Layers};
use crate::image::oci::layout_files::Piece;
use crate::image::tar::unpack::{Devices, Limits, UnpackOptions};
use crate::sys::error::{Result, ResultExt as _};

pub(super) fn cannot_unpack(document: &Document, index: usize) -> String {
    let count = document.blobs.len();
    format!("cannot unpack layer {} of {count}", index + 1)
}

/// What a layer is unpacked onto.
#[derive(Clone, Copy)]
pub(super) enum On {
    /// An empty directory. The layer is complete by itself.
    Nothing,
    /// A tree that the layer changes.
    Tree,
    /// An empty directory that an overlay mounts above others.
    Overlay,
}

/// Downloads as they arrive.
pub(super) struct Downloaded<'a> {
    pub(super) news: Receiver<(usize, Piece)>,
    pub(super) counter: &'a ByteCounter,
    pub(super) cancel: &'a AtomicBool,
    pub(super) arrived: BTreeMap<usize, Piece>,
    pub(super) progress: &'a mut dyn FnMut(BuildProgress<'_>),
}

impl Downloaded<'_> {
    pub(super) fn unpack(
        &mut self,
        document: &Document,
        index: usize,
        into: &Path,
        on: On,
    ) -> Result<()> {
        let piece = self.piece(index)?;
        // Devices are made as in the original store. The engine decides which of them a container may open.
        let options = UnpackOptions {
            devices: Devices::Make,
            limits: Limits::of_snapshot(document.blobs[index].unpacked),
            ..UnpackOptions::default()
        };
        let mut layers = match on {
            On::Nothing => Layers::new(into, &options)?,
            On::Tree => Layers::upon(into, &options, Deletions::Apply)?,
            On::Overlay => Layers::upon(into, &options, Deletions::Keep)?,
        };
        let (counter, progress) = (self.counter, &mut *self.progress);
        let mut report = |_| {
            let (done, total) = counter.read();
            progress(BuildProgress::Bytes { done, total });
        };
        let diff_id = &document.blobs[index].diff_id;
        layers
            .apply(piece.open()?, diff_id, self.cancel, &mut report)
            .and_then(|()| layers.finish().map(drop))
            .context(|| cannot_unpack(document, index))
    }

    /// Waits for a layer, with the progress shown.
    pub(super) fn piece(&mut self, index: usize) -> Result<Piece> {
        loop {
            if let Some(piece) = self.arrived.get(&index) {
                return Ok(piece.clone());
            }
            match self.news.recv_timeout(POLL) {
                Ok((index, piece)) => drop(self.arrived.insert(index, piece)),
                Err(RecvTimeoutError::Timeout) => self.examine_partial()?,
                // The download thread failed and reports its own error.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(unexpected!("the download ended early"));
                }
            }
        }
    }

    /// Shows the download's progress and checks for cancellation.
    pub(super) fn examine_partial(&mut self) -> Result<()> {
        crate::sys::signals::stop_if(self.cancel)?;
        let (done, total) = self.counter.read();
        (self.progress)(BuildProgress::Bytes { done, total });
        Ok(())
    }
}
