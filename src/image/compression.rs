//! Owns detecting an archive's compression by its first bytes, and decompressing it in parallel with the extraction.
//!
//! The ratio limit is enforced here, where both sizes are known, so that a small file cannot fill the disk.

use std::io::{self, BufRead, BufReader, Read};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::sync_channel;

use bytes::Bytes;

use crate::image::tar::unpack::Limits;
use crate::sys::chunks::Chunks;

pub(super) const CHUNK: usize = 512 << 10;
/// Below this decompressed size any ratio is allowed, because a few kilobytes of text compress very well.
const RATIO_FLOOR: u64 = 64 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Compression {
    /// Uncompressed, or an unknown format.
    None,
    Gzip,
    Zstd,
    Xz,
}

/// Returns the compression of a stream, and the stream from its first byte.
fn detected(mut source: impl Read) -> io::Result<(Compression, impl Read)> {
    let mut head = Vec::new();
    source.by_ref().take(6).read_to_end(&mut head)?;
    let kind = match head.as_slice() {
        [0x1f, 0x8b, ..] => Compression::Gzip,
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Compression::Zstd,
        // A skippable frame. zstd's seekable and split formats start with it.
        [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Compression::Zstd,
        [0xfd, b'7', b'z', b'X', b'Z', 0, ..] => Compression::Xz,
        _ => Compression::None,
    };
    Ok((kind, io::Cursor::new(head).chain(source)))
}

/// State of the compressed input, shared with the decompressing thread.
#[derive(Debug, Default)]
struct Input {
    count: AtomicU64,
    /// Whether reading failed. If so, a decoder error is not the archive's fault.
    failed: AtomicBool,
}

struct Counted<'a, R> {
    inner: R,
    input: &'a Input,
}

impl<R: Read> Read for Counted<'_, R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let failed = |_: &io::Error| self.input.failed.store(true, Ordering::Relaxed);
        let amount = self.inner.read(buffer).inspect_err(failed)?;
        self.input.count.fetch_add(amount as u64, Ordering::Relaxed);
        Ok(amount)
    }
}

/// Calls `consume` with the decompressed stream. Decompression runs in its own thread.
pub(super) fn decompressed<T>(
    source: impl Read + Send,
    limits: &Limits,
    consume: impl FnOnce(&mut dyn BufRead) -> T,
) -> io::Result<T> {
    let (ratio, unpacked) = (limits.ratio, limits.unpacked);
    let (kind, source) = detected(source)?;
    if kind == Compression::None {
        return Ok(consume(&mut BufReader::with_capacity(CHUNK, source)));
    }
    let input = &Input::default();
    let source = Counted {
        inner: source,
        input,
    };
    std::thread::scope(|scope| {
        let (sender, receiver) = sync_channel(4);
        std::thread::Builder::new().spawn_scoped(scope, move || {
            let mut decoder = match decoder(kind, source) {
                Ok(decoder) => decoder,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let mut total = 0_u64;
            loop {
                let mut chunk = Vec::with_capacity(CHUNK);
                let outcome = match decoder.by_ref().take(CHUNK as u64).read_to_end(&mut chunk) {
                    Ok(0) => break,
                    Ok(amount) => {
                        total += amount as u64;
                        let compressed = input.count.load(Ordering::Relaxed).max(1);
                        if total > RATIO_FLOOR && total / compressed > ratio {
                            Err(invalid(format!(
                                "it grows more than {ratio} times when decompressed ({compressed} bytes became {total})"
                            )))
                        } else if total > unpacked {
                            Err(invalid(format!(
                                "it has more than the announced {unpacked} bytes"
                            )))
                        } else {
                            Ok(Bytes::from(chunk))
                        }
                    }
                    Err(error) if input.failed.load(Ordering::Relaxed) => Err(error),
                    Err(error) => Err(invalid(error)),
                };
                let stop = outcome.is_err();
                // The consumer stops reading at the archive's end, or when it refuses the archive.
                if sender.send(outcome).is_err() || stop {
                    break;
                }
            }
        })?;
        let mut chunks = Chunks::new(receiver);
        let outcome = consume(&mut chunks);
        drop(chunks);
        Ok(outcome)
    })
}

/// Returns an error of the archive itself.
fn invalid(why: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Returns a decompressed stream without limits. Only for a service's own archives.
pub(crate) fn plain<'a>(source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    let (kind, source) = detected(source)?;
    decoder(kind, source)
}

fn decoder<'a>(kind: Compression, source: impl Read + 'a) -> io::Result<Box<dyn Read + 'a>> {
    Ok(match kind {
        Compression::None => Box::new(source),
        Compression::Gzip => Box::new(flate2::read::MultiGzDecoder::new(source)),
        Compression::Zstd => {
            let mut decoder = zstd::Decoder::new(source)?;
            // 128 MiB, as `zstd --long` and distributions use. A larger window only wastes memory.
            decoder.window_log_max(27)?;
            Box::new(decoder)
        }
        Compression::Xz => {
            let stream = liblzma::stream::Stream::new_stream_decoder(
                256 << 20,
                liblzma::stream::CONCATENATED,
            )?;
            Box::new(liblzma::read::XzDecoder::new_stream(source, stream))
        }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_may_be_shorter_than_the_bytes_that_tell_its_format() {
        for data in [b"".as_slice(), b"abc"] {
            let read = decompressed(data, &Limits::default(), |stream| {
                let mut read = Vec::new();
                stream.read_to_end(&mut read).map(|_| read)
            });
            assert_eq!(read.unwrap().unwrap(), data);
        }
    }

    #[test]
    fn a_cut_stream_is_an_error() {
        let zstd = zstd::encode_all(&b"some text".repeat(1000)[..], 1).unwrap();
        let outcome = decompressed(&zstd[..zstd.len() - 5], &Limits::default(), |stream| {
            stream.read_to_end(&mut Vec::new())
        })
        .unwrap();
        assert!(outcome.is_err());
    }
}
