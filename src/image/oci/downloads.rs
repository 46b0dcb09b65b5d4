//! Owns downloading layers in parallel with unpacking them: a few arrive at a time, in the order of their use.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};

use futures_util::{StreamExt as _, TryStreamExt as _};

use super::layout_files::Piece;
use crate::image::BuildProgress;
use crate::image::fetch::{self, ByteCounter, POLL};
use crate::sys::error::Result;
use crate::sys::signals::stop_if;
use crate::sys::thread;

/// Maximum number of parallel downloads. More would only share the same bandwidth.
const PARALLEL: usize = 4;

/// Calls `unpack` while a thread downloads the `needed` layers. `download` fetches one layer, by its index.
pub(crate) fn while_downloading(
    needed: Vec<usize>,
    download: impl AsyncFn(usize) -> Result<Piece> + Send,
    counter: &ByteCounter,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(BuildProgress<'_>),
    unpack: impl FnOnce(&mut Downloads<'_>) -> Result<()>,
) -> Result<()> {
    let failed = AtomicBool::new(false);
    let (sender, arrivals) = channel();
    // A separate thread, because the caller's thread may already be running a tokio runtime.
    std::thread::scope(|scope| {
        let downloading = thread::start_in(scope, || {
            let (sender, download) = (sender, download);
            fetch::run(cancel, async {
                let all = futures_util::stream::iter(needed)
                    .map(async |index| {
                        let layer = download(index).await?;
                        // The unpacking thread reports its own error.
                        drop(sender.send((index, layer)));
                        Ok(())
                    })
                    .buffer_unordered(PARALLEL)
                    .try_collect::<()>();
                tokio::select! {
                    outcome = all => outcome,
                    () = fetch::until_set(&failed) => Ok(()),
                }
            })
        })?;
        let outcome = unpack(&mut Downloads {
            arrivals,
            arrived: BTreeMap::new(),
            counter,
            cancel,
            progress,
        });
        failed.store(outcome.is_err(), Ordering::Relaxed);
        // A failed download is the reason why unpacking ended early.
        thread::joined(downloading.join()).and(outcome)
    })
}

pub(crate) struct Downloads<'a> {
    arrivals: Receiver<(usize, Piece)>,
    arrived: BTreeMap<usize, Piece>,
    counter: &'a ByteCounter,
    pub(crate) cancel: &'a AtomicBool,
    pub(crate) progress: &'a mut dyn FnMut(BuildProgress<'_>),
}

impl Downloads<'_> {
    /// Waits for a layer, and shows the progress.
    pub(crate) fn layer(&mut self, index: usize) -> Result<Piece> {
        loop {
            if let Some(layer) = self.arrived.get(&index) {
                return Ok(layer.clone());
            }
            match self.arrivals.recv_timeout(POLL) {
                Ok((index, layer)) => drop(self.arrived.insert(index, layer)),
                Err(RecvTimeoutError::Timeout) => self.look()?,
                // The download thread failed and reports its own error.
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(unexpected!("the download ended early"));
                }
            }
        }
    }

    /// Shows the progress, and checks for cancellation.
    pub(crate) fn look(&mut self) -> Result<()> {
        stop_if(self.cancel)?;
        self.show();
        Ok(())
    }

    pub(crate) fn show(&mut self) {
        let (done, total) = self.counter.read();
        (self.progress)(BuildProgress::Bytes { done, total });
    }
}
