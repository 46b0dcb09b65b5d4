//! Owns a step's log: each line with its time and stream, for any bytes, in constant memory and bounded space.
//!
//! A log keeps its first and its last lines. While it grows, the middle becomes a hole in the file, so that readers
//! keep their position; at the end the file is rewritten without the hole.

mod reader;

use std::collections::VecDeque;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

pub(crate) use self::reader::Reader;
use crate::sys::error::{Result, is_full};
use crate::ui::event::Stream;
use crate::ui::size;

/// Longer lines are written in pieces, in bytes.
const LONGEST: usize = 64 << 10;
const BUFFER: usize = 128 << 10;
/// Minimum for a log's limit, in bytes: the part kept at the end must be larger than the buffered part.
pub(crate) const LEAST: u64 = 1 << 20;

#[derive(Debug)]
pub(crate) struct Log {
    file: std::io::BufWriter<fs::File>,
    pending: [Vec<u8>; 2],
    stamp: (i64, String),
    /// Maximum size of the file, in bytes.
    limit: u64,
    written: u64,
    /// Where the first lines end and the last lines begin, once lines between them are dropped.
    hole: Option<(u64, u64)>,
    /// Starts of lines up to which the hole may grow.
    marks: VecDeque<u64>,
    /// Bytes that were not written because the file system cannot make holes.
    dropped: Option<u64>,
    /// Lines were dropped because the disk was full: the step itself may succeed without more space.
    pub lossy: bool,
}

impl Log {
    /// Creates the log. Only the store's owner can enter its directory: a build may print secrets by accident.
    pub(crate) fn create(path: &Path, limit: u64) -> Result<Self> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        let mut options = fs::OpenOptions::new();
        let file = options.read(true).write(true).create(true).truncate(true);
        Ok(Self {
            file: std::io::BufWriter::with_capacity(BUFFER, file.open(path)?),
            limit: limit.max(LEAST),
            written: 0,
            hole: None,
            marks: VecDeque::new(),
            dropped: None,
            pending: [Vec::new(), Vec::new()],
            stamp: (i64::MIN, String::new()),
            lossy: false,
        })
    }

    /// Adds output of a stream: complete lines, and lines too long to wait for, go to the file.
    pub(crate) fn write(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let slot = stream as usize;
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let line = piece.strip_suffix(b"\n");
            if let Some(line) = line
                && self.pending[slot].is_empty()
                && line.len() <= LONGEST
            {
                self.put(stream, line)?;
                continue;
            }
            self.pending[slot].extend_from_slice(line.unwrap_or(piece));
            if line.is_some() || self.pending[slot].len() >= LONGEST {
                let mut whole = std::mem::take(&mut self.pending[slot]);
                for part in whole.chunks(LONGEST) {
                    self.put(stream, part)?;
                }
                whole.clear();
                self.pending[slot] = whole;
            }
        }
        Ok(())
    }

    /// Writes last lines that lack a newline, flushes the file, and closes the hole.
    pub(crate) fn finish(&mut self) -> Result<()> {
        for stream in [Stream::Stdout, Stream::Stderr] {
            let rest = std::mem::take(&mut self.pending[stream as usize]);
            if !rest.is_empty() {
                self.put(stream, &rest)?;
            }
        }
        if let Some(dropped) = self.dropped.take().filter(|dropped| *dropped > 0) {
            let line = left_out_line(&self.stamp.1, dropped);
            let written = self.file.write_all(line.as_bytes());
            self.unless_full(written)?;
        }
        self.flush()?;
        match self.hole.take() {
            Some((start, end)) if end > start => {
                let joined = self.without_hole(start, end);
                self.unless_full(joined)
            }
            _ => Ok(()),
        }
    }

    /// Rewrites the file, with one line in place of the hole.
    fn without_hole(&self, start: u64, end: u64) -> std::io::Result<()> {
        let mut file = self.file.get_ref().file();
        let name = self.file.get_ref().path();
        let path = name.with_extension("log.tmp");
        let mut write = || {
            let mut joined = fs::File::create(&path)?.into_parts().0;
            file.seek(SeekFrom::Start(0))?;
            std::io::copy(&mut file.take(start), &mut joined)?;
            joined.write_all(left_out_line(&self.stamp.1, end - start).as_bytes())?;
            file.seek(SeekFrom::Start(end))?;
            std::io::copy(&mut file, &mut joined)?;
            fs::rename(&path, name)
        };
        write().inspect_err(|_| drop(fs::remove_file(&path)))
    }

    /// Grows the hole, so that the file stays within its limit.
    fn bound(&mut self) -> Result<()> {
        let half = self.limit / 2;
        if self.written < half {
            return Ok(());
        }
        let (start, end) = *self.hole.get_or_insert((self.written, self.written));
        if self.written - self.marks.back().unwrap_or(&end) >= half / 8 {
            self.marks.push_back(self.written);
        }
        let is_early = |mark: &&u64| self.written - **mark >= half / 4 * 3;
        if self.marks.front().filter(is_early).is_none() {
            return Ok(());
        }
        let Some(end) = self.marks.pop_front() else {
            return Ok(());
        };
        let signed = |value: u64| i64::try_from(value).map_err(|_| Errno::EFBIG);
        let how = FallocateFlags::FALLOC_FL_PUNCH_HOLE | FallocateFlags::FALLOC_FL_KEEP_SIZE;
        let file = self.file.get_ref().file();
        let punched = fallocate(file, how, signed(start)?, signed(end - start)?);
        self.punched(punched, (start, end))
    }

    /// Takes the outcome of making a hole, for which the disk may be too full.
    fn punched(&mut self, outcome: nix::Result<()>, hole: (u64, u64)) -> Result<()> {
        match outcome {
            Ok(()) => self.hole = Some(hole),
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => {
                (self.hole, self.dropped) = (None, Some(0));
            }
            Err(error) => return self.unless_full(Err(error.into())),
        }
        Ok(())
    }

    /// Flushes buffered lines, so that `logs -f` sees them.
    pub(crate) fn flush(&mut self) -> Result<()> {
        let flushed = self.file.flush();
        self.unless_full(flushed)
    }

    fn unless_full(&mut self, written: std::io::Result<()>) -> Result<()> {
        match written {
            Err(error) if is_full(&error) => {
                self.lossy = true;
                Ok(())
            }
            other => Ok(other?),
        }
    }

    fn put(&mut self, stream: Stream, line: &[u8]) -> Result<()> {
        if let Some(dropped) = &mut self.dropped {
            *dropped += line.len() as u64;
            return Ok(());
        }
        let now = Timestamp::now();
        if now.as_millisecond() != self.stamp.0 {
            let text = now.strftime("%Y-%m-%dT%H:%M:%S%.3fZ").to_string();
            self.stamp = (now.as_millisecond(), text);
        }
        let mark = match stream {
            Stream::Stdout => b" | ",
            Stream::Stderr => b" ! ",
        };
        // In one piece, so that a full disk drops whole lines only.
        let whole = [self.stamp.1.as_bytes(), mark, line, b"\n"].concat();
        let written = self.file.write_all(&whole);
        if written.is_ok() {
            self.written += whole.len() as u64;
        }
        self.unless_full(written)?;
        self.bound()
    }
}

/// Returns the line that replaces the dropped lines, in the log's format.
fn left_out_line(stamp: &str, bytes: u64) -> String {
    let bytes = size::bytes(bytes);
    format!("{stamp:24} ~ [{bytes} omitted here: the log reached `log-max`]\n")
}

/// Strips the time and the stream's mark from a log line.
pub(crate) fn text_of(line: &[u8]) -> &[u8] {
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
        let mut log = Log::create(&path, 1 << 30).unwrap();
        for (stream, bytes) in [
            (Stream::Stdout, &b"one\ntw"[..]),
            (Stream::Stderr, b"\xff\xfe\n"),
            (Stream::Stdout, b"o\n\nlast"),
        ] {
            log.write(stream, bytes).unwrap();
        }
        log.finish().unwrap();
        let text = fs::read(&path).unwrap();
        let lines = text.split(|byte| *byte == b'\n');
        let lines = lines.filter(|line| !line.is_empty()).map(text_of);
        let lines: Vec<_> = lines.collect();
        assert_eq!(lines, [&b"one"[..], b"\xff\xfe", b"two", b"", b"last"]);
    }

    #[test]
    fn a_full_disk_or_quota_costs_lines_and_not_the_step() {
        use std::io::ErrorKind::{PermissionDenied, QuotaExceeded, StorageFull};
        let directory = tempfile::tempdir().unwrap();
        for (kind, is_lossy) in [
            (StorageFull, true),
            (QuotaExceeded, true),
            (PermissionDenied, false),
        ] {
            let mut log = Log::create(&directory.path().join("log"), 1 << 30).unwrap();
            let kept = log.unless_full(Err(kind.into()));
            assert_eq!((kept.is_ok(), log.lossy), (is_lossy, is_lossy), "{kind}");
        }
        let mut log = Log::create(&directory.path().join("log"), 1 << 30).unwrap();
        log.punched(Err(Errno::ENOSPC), (0, 1)).unwrap();
        assert_eq!(log.hole, None);
        assert!(log.punched(Err(Errno::EIO), (0, 1)).is_err());
    }

    #[test]
    fn a_line_without_end_does_not_fill_memory() {
        let directory = tempfile::tempdir().unwrap();
        let mut log = Log::create(&directory.path().join("log"), 1 << 30).unwrap();
        let piece = vec![b'x'; 1 << 16];
        for _ in 0..64 {
            log.write(Stream::Stdout, &piece).unwrap();
            assert!(log.pending[0].capacity() <= 4 * LONGEST);
        }
    }

    fn numbered(lines: u32, mut each: impl FnMut(u32, &mut Log)) -> Log {
        let directory = tempfile::tempdir().unwrap().keep();
        let mut log = Log::create(&directory.join("01-step.log"), LEAST).unwrap();
        for line in 0..lines {
            let text = format!("line {line} {}\n", "x".repeat(100));
            log.write(Stream::Stdout, text.as_bytes()).unwrap();
            each(line, &mut log);
        }
        log
    }

    fn path(log: &Log) -> std::path::PathBuf {
        log.file.get_ref().path().to_owned()
    }

    fn read(path: &Path) -> Vec<String> {
        let mut reader = Reader::open(path).unwrap();
        let mut shown = Vec::new();
        while let Some(lines) = reader.lines().unwrap() {
            let text = String::from_utf8(lines).unwrap();
            let lines = text.lines().map(|line| text_of(line.as_bytes()).to_vec());
            shown.extend(lines.map(|line| String::from_utf8(line).unwrap()));
        }
        assert!(reader.rest().is_none());
        shown
    }

    /// Checks that head and tail are in order, with one line in place of the lines between them.
    fn check(shown: &[String], all: u32) {
        let number = |line: &String| line.split(' ').nth(1).unwrap().parse::<u32>().ok();
        let gap = shown.iter().position(|line| line.starts_with('[')).unwrap();
        assert_has!(shown[gap], "omitted here");
        let (head, tail) = (&shown[..gap], &shown[gap + 1..]);
        let numbers: Vec<_> = head.iter().map_while(number).collect();
        let end = u32::try_from(head.len()).unwrap();
        assert_eq!(numbers, (0..end).collect::<Vec<_>>());
        let numbers: Vec<_> = tail.iter().map_while(number).collect();
        let first = all - u32::try_from(tail.len()).unwrap();
        assert_eq!(numbers, (first..all).collect::<Vec<_>>());
        assert!(head.len() > 3000 && tail.len() > 2000 && first > 4000);
    }

    #[test]
    fn a_log_keeps_its_begin_and_its_end() {
        use std::os::unix::fs::MetadataExt as _;
        let mut largest = 0;
        let mut log = numbered(100_000, |line, log| {
            if line % 1000 == 0 {
                let taken = log.file.get_ref().metadata().unwrap().blocks() * 512;
                largest = largest.max(taken);
            }
        });
        assert!(largest <= LEAST + (64 << 10), "{largest}");
        // First as after a kill, then as after the step's end.
        log.flush().unwrap();
        let path = path(&log);
        check(&read(&path), 100_000);
        log.finish().unwrap();
        check(&read(&path), 100_000);
        let whole = fs::read(&path).unwrap();
        assert!(!whole.contains(&0) && whole.len() as u64 <= LEAST);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
        fs::remove_dir_all(path.parent().unwrap()).unwrap();
    }

    #[test]
    fn who_follows_a_log_sees_all_of_it_or_that_something_is_missing() {
        for every in [1, 500, 20_000] {
            let mut reader = None;
            let mut shown = String::new();
            let mut take = |reader: &mut Option<Reader>| {
                while let Some(lines) = reader.as_mut().unwrap().lines().unwrap() {
                    shown.push_str(std::str::from_utf8(&lines).unwrap());
                    shown.push('\n');
                }
            };
            let mut log = numbered(50_000, |line, log| {
                if reader.is_none() {
                    reader = Some(Reader::open(&path(log)).unwrap());
                }
                if line % every == 0 {
                    log.flush().unwrap();
                    take(&mut reader);
                }
            });
            log.finish().unwrap();
            take(&mut reader);
            let (lines, gaps) = shown.lines().fold((0, 0), |(lines, gaps), line| {
                match line.contains("omitted here") {
                    true => (lines, gaps + 1),
                    false => (lines + 1, gaps),
                }
            });
            assert_eq!(
                (lines == 50_000, gaps > 0),
                (every < 1000, every > 1000),
                "{every}: {lines} and {gaps}"
            );
            assert!(!shown.contains('\0'));
            fs::remove_dir_all(path(&log).parent().unwrap()).unwrap();
        }
    }
}
