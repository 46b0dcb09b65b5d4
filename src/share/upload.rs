//! Owns sending one layer. The layer is packed, compressed and hashed while it is sent, so it needs no second copy on
//! the disk and only a few megabytes of memory.

use std::io::{self, BufWriter, Read, Write};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use bytes::Bytes;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::sync::oneshot;
use zstd::zstd_safe::CParameter;

use super::place::Destination;
use crate::image::fetch::long_patience;
use crate::image::oci::changes::{LayerContent, pack};
use crate::image::oci::{Attempts, Upload};
use crate::store::shared::Blob;
use crate::sys::checksum::Hashed;
use crate::sys::error::Result;
use crate::sys::thread;
use crate::ui::size;

const CHUNK: usize = 256 << 10;
/// Chunks buffered between the compressing thread and the receiver.
const IN_FLIGHT: usize = 8;
/// The level that Docker and others use for layers.
const LEVEL: i32 = 3;
/// Bytes that each thread compresses at a time. The default takes four times as much memory as everything else
/// together.
const JOB: u32 = 1 << 20;
/// Maximum number of compressing threads. More would only wait for the disk.
const MAX_THREADS: usize = 4;

pub(super) struct Sent {
    pub(super) blob: Blob,
    /// Sockets, which an archive cannot hold.
    pub(super) left_out: u64,
}

/// The writing end of a layer's stream.
pub(super) struct Chunked {
    sender: Sender<io::Result<Bytes>>,
    threads: usize,
}

/// The reading end of a layer's stream.
pub(super) type Pieces = Receiver<io::Result<Bytes>>;

type Archive = Hashed<zstd::Encoder<'static, Hashed<BufWriter<Chunks>>>>;

/// Sends a layer, and packs it again whenever the registry did not take it. `done` counts the bytes read. `alone`: no
/// other layer is being sent.
pub(super) async fn send(
    to: &Destination<'_>,
    changes: &LayerContent,
    done: &Arc<AtomicU64>,
    alone: bool,
) -> Result<Sent> {
    let mut attempts = Attempts::default();
    let mut measured = None;
    loop {
        if to.wants_digests() && measured.is_none() {
            let (mut pieces, packing) = packed(changes, done, alone)?;
            while pieces.recv().await.is_some() {}
            measured = packing.outcome().await?.map(|sent| sent.blob);
        }
        let (pieces, packing) = packed(changes, done, alone)?;
        let outcome = async || packing.outcome().await;
        let known = measured.as_ref();
        if let Some(sent) = transfer(to, pieces, outcome, known, &mut attempts).await? {
            return Ok(sent);
        }
    }
}

/// A thread that packs a layer. It stops when its result is no longer needed.
struct Packing {
    outcome: oneshot::Receiver<Result<Option<Sent>>>,
    stop: Arc<AtomicBool>,
}

impl Packing {
    async fn outcome(mut self) -> Result<Option<Sent>> {
        let panicked = |_| unexpected!("a thread that packed a layer panicked");
        (&mut self.outcome).await.map_err(panicked)?
    }
}

impl Drop for Packing {
    fn drop(&mut self) {
        self.stop.store(true, Ordering::Relaxed);
    }
}

fn packed(changes: &LayerContent, done: &Arc<AtomicU64>, alone: bool) -> Result<(Pieces, Packing)> {
    let (chunked, pieces) = chunked(alone);
    let stop = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&stop);
    let (ended, outcome) = oneshot::channel();
    let (changes, done) = (changes.clone(), Arc::clone(done));
    thread::start(move || {
        let outcome = chunked.compress(|archive| {
            let mut before = 0;
            let mut progress = |now: u64| {
                done.fetch_add(now - before, Ordering::Relaxed);
                before = now;
            };
            pack(&changes, archive, &flag, &mut progress)
        });
        // The receiver may have stopped waiting.
        drop(ended.send(outcome));
    })?;
    Ok((pieces, Packing { outcome, stop }))
}

/// Returns both ends of a layer's stream. A layer that is not sent `alone` is compressed by a single thread.
pub(super) fn chunked(alone: bool) -> (Chunked, Pieces) {
    let (sender, pieces) = channel(IN_FLIGHT);
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = if alone { cores.min(MAX_THREADS) } else { 1 };
    (Chunked { sender, threads }, pieces)
}

/// Sends the stream. `outcome` is the producing thread's result; `measured` describes its bytes if they are known.
/// `None`: the registry did not take the layer, but may take it when sent again.
pub(super) async fn transfer(
    to: &Destination<'_>,
    pieces: Pieces,
    outcome: impl AsyncFnOnce() -> Result<Option<Sent>>,
    measured: Option<&Blob>,
    attempts: &mut Attempts,
) -> Result<Option<Sent>> {
    let mut sent = None;
    let digest = async || {
        let outcome = outcome().await?;
        let blob = outcome.as_ref().map(|sent| &sent.blob);
        let digest = blob.map(|blob| (blob.sha256.to_string(), blob.size));
        sent = outcome;
        Ok(digest)
    };
    match to {
        Destination::Registry(registry) => {
            let taken = Arc::new(AtomicU64::new(0));
            let counted = Arc::clone(&taken);
            let stream = futures_util::stream::unfold(pieces, move |mut pieces: Pieces| {
                counted.fetch_add(1, Ordering::Relaxed);
                async {
                    let chunk: io::Result<Bytes> = pieces.recv().await?;
                    Some((chunk, pieces))
                }
            });
            let body = reqwest::Body::wrap_stream(stream);
            let sending = async {
                match measured {
                    None => registry.upload(body, digest, attempts).await,
                    Some(Blob { sha256, size, .. }) => {
                        let upload = registry.upload_whole(body, sha256, *size, attempts).await;
                        // A local read error is the cause of the broken connection.
                        if !matches!(upload, Ok(Upload::Again)) {
                            digest().await?;
                        }
                        upload
                    }
                }
            };
            let upload = tokio::select! {
                upload = sending => upload?,
                () = stalled(&taken) => {
                    let patience = size::duration(long_patience());
                    return Err(unavailable!("the registry accepted no data for {patience}")
                        .help("run the command again to resume with this layer"));
                }
            };
            if upload == Upload::Again {
                return Ok(None);
            }
        }
        Destination::Layout(draft) => draft.lock().await.layer(pieces, digest).await?,
    }
    match sent {
        Some(sent) => Ok(Some(sent)),
        None => Err(unexpected!("a layer was sent without its digest")),
    }
}

/// Returns once the registry has accepted no data for a long time.
async fn stalled(taken: &AtomicU64) {
    let mut before = None;
    loop {
        let now = Some(taken.load(Ordering::Relaxed));
        if now == before {
            return;
        }
        before = now;
        tokio::time::sleep(long_patience()).await;
    }
}

impl Chunked {
    /// Sends an existing archive, which must have this digest.
    pub(super) fn copy(
        self,
        from: &mut dyn Read,
        diff_id: &str,
        done: &AtomicU64,
    ) -> Result<Option<Sent>> {
        self.compress(|mut archive| {
            let mut buffer = vec![0; CHUNK];
            loop {
                let amount = from.read(&mut buffer)?;
                if amount == 0 {
                    break;
                }
                archive.write_all(&buffer[..amount])?;
                done.fetch_add(amount as u64, Ordering::Relaxed);
            }
            match archive.digest() {
                found if found == diff_id => Ok((archive, 0)),
                found => Err(unexpected!(
                    "a layer has SHA-256 {found}, but should have {diff_id}"
                )),
            }
        })
    }

    /// Compresses what `fill` writes. `None`: the receiver stopped and knows the reason.
    fn compress(
        self,
        fill: impl FnOnce(Archive) -> Result<(Archive, u64)>,
    ) -> Result<Option<Sent>> {
        let sender = self.sender.clone();
        match self.through(fill) {
            Err(_) if sender.is_closed() => Ok(None),
            Err(error) => {
                // Otherwise the registry would take the truncated data for the whole layer.
                let broken = io::Error::other("a layer could not be read");
                drop(sender.blocking_send(Err(broken)));
                Err(error)
            }
            Ok(sent) => Ok(Some(sent)),
        }
    }

    fn through(self, fill: impl FnOnce(Archive) -> Result<(Archive, u64)>) -> Result<Sent> {
        let chunks = BufWriter::with_capacity(CHUNK, Chunks(self.sender));
        let mut encoder = zstd::Encoder::new(Hashed::new(chunks), LEVEL)?;
        encoder.multithread(u32::try_from(self.threads).unwrap_or(1))?;
        encoder.set_parameter(CParameter::JobSize(JOB))?;
        encoder.include_checksum(true)?;
        let (archive, left_out) = fill(Hashed::new(encoder))?;
        let (encoder, diff_id, unpacked) = archive.finish();
        let (mut chunks, sha256, size) = encoder.finish()?.finish();
        chunks.flush()?;
        Ok(Sent {
            blob: Blob {
                diff_id: diff_id.parse()?,
                sha256: sha256.parse()?,
                size,
                unpacked: Some(unpacked),
            },
            left_out,
        })
    }
}

/// Passes chunks to the network or to a writer.
struct Chunks(Sender<io::Result<Bytes>>);

impl Write for Chunks {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let sent = self.0.blocking_send(Ok(Bytes::copy_from_slice(bytes)));
        sent.map_err(|_| io::Error::other("the connection ended"))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_layer_has_the_same_bytes_on_any_number_of_cores() {
        // Text for several jobs, which continues across their borders.
        let numbers = (0..JOB).flat_map(|number| (number / 3).to_le_bytes());
        let text: Vec<u8> = numbers.collect();
        let sums = [1, MAX_THREADS].map(|threads| {
            let (sender, mut pieces) = channel(IN_FLIGHT);
            let receiver = std::thread::spawn(move || while pieces.blocking_recv().is_some() {});
            let sent = Chunked { sender, threads }.compress(|mut archive| {
                archive.write_all(&text)?;
                Ok((archive, 0))
            });
            receiver.join().unwrap();
            sent.unwrap().unwrap().blob.sha256
        });
        assert_eq!(sums[0], sums[1]);
    }
}
