//! Owns a step's log: each line with its time and stream, whatever bytes it has, in constant memory.

use std::io::Write as _;
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;

use crate::error::Result;
use crate::ui::event::Stream;

/// A longer line is written in pieces, in bytes.
const LONGEST: usize = 64 << 10;

/// A log file being written.
#[derive(Debug)]
pub struct Log {
    file: std::io::BufWriter<fs::File>,
    pending: [Vec<u8>; 2],
    stamp: (i64, String),
    /// Lines were dropped for want of space: the step itself may manage without more of it.
    pub lossy: bool,
}

impl Log {
    /// Creates the log; only root reads it, since it may hold what a build printed by accident.
    pub fn create(path: &Path) -> Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        Ok(Self {
            file: std::io::BufWriter::with_capacity(128 << 10, fs::File::create(path)?),
            pending: [Vec::new(), Vec::new()],
            stamp: (i64::MIN, String::new()),
            lossy: false,
        })
    }

    /// Adds what a stream brought: lines that are complete, or too long to wait for, go to the file.
    pub fn write(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let end = rest.iter().position(|byte| *byte == b'\n');
            let (piece, after) = match end {
                Some(end) => (&rest[..end], &rest[end + 1..]),
                None => (rest, &rest[rest.len()..]),
            };
            rest = after;
            let slot = slot(stream);
            if end.is_some() && self.pending[slot].is_empty() && piece.len() <= LONGEST {
                self.put(stream, piece)?;
                continue;
            }
            self.pending[slot].extend_from_slice(piece);
            if end.is_some() || self.pending[slot].len() >= LONGEST {
                let whole = std::mem::take(&mut self.pending[slot]);
                for part in whole
                    .chunks(LONGEST)
                    .chain(whole.is_empty().then_some(&[][..]))
                {
                    self.put(stream, part)?;
                }
                self.pending[slot] = whole;
                self.pending[slot].clear();
            }
        }
        Ok(())
    }

    /// Writes what had no newline at the end, and everything to the file.
    pub fn finish(&mut self) -> Result<()> {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let rest = std::mem::take(&mut self.pending[slot(stream)]);
            if !rest.is_empty() {
                self.put(stream, &rest)?;
            }
        }
        self.flush()
    }

    /// Writes buffered lines out, so that `logs -f` sees them.
    pub fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        self.unless_full(flushed)
    }

    fn unless_full(&mut self, written: std::io::Result<()>) -> Result<()> {
        match written {
            Err(error) if error.kind() == std::io::ErrorKind::StorageFull => {
                self.lossy = true;
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn put(&mut self, stream: Stream, line: &[u8]) -> Result<()> {
        let now = Timestamp::now();
        if now.as_millisecond() != self.stamp.0 {
            self.stamp = (
                now.as_millisecond(),
                now.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string(),
            );
        }
        let mark: &[u8] = if stream == Stream::Stderr {
            b" ! "
        } else {
            b" | "
        };
        let parts = [self.stamp.1.as_bytes(), mark, line, b"\n"];
        let written = parts
            .into_iter()
            .try_for_each(|part| self.file.write_all(part));
        self.unless_full(written)
    }
}

fn slot(stream: Stream) -> usize {
    usize::from(stream == Stream::Stderr)
}

/// Takes the time and the stream's mark off a log line.
pub fn text_of(line: &[u8]) -> &[u8] {
    // 2026-11-20T18:49:53.123Z | text
    line.get(27..)
        .filter(|_| line[24] == b' ' && line[26] == b' ')
        .unwrap_or(line)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_keep_their_bytes_and_pieces_are_joined() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("a/log");
        let mut log = Log::create(&path).unwrap();
        for (stream, bytes) in [
            (Stream::Stdout, &b"one\ntw"[..]),
            (Stream::Stderr, b"\xff\xfe\n"),
            (Stream::Stdout, b"o\n\nlast"),
        ] {
            log.write(stream, bytes).unwrap();
        }
        log.finish().unwrap();
        let text = fs::read(&path).unwrap();
        let lines: Vec<_> = text
            .split(|byte| *byte == b'\n')
            .filter(|line| !line.is_empty())
            .map(text_of)
            .collect();
        assert_eq!(lines, [&b"one"[..], b"\xff\xfe", b"two", b"", b"last"]);
    }

    #[test]
    fn a_line_without_end_does_not_fill_memory() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = Log::create(&directory.path().join("log")).unwrap();
        let piece = vec![b'x'; 1 << 16];
        for _ in 0..64 {
            log.write(Stream::Stdout, &piece).unwrap();
            assert!(log.pending[0].capacity() <= 4 * LONGEST);
        }
    }
}
