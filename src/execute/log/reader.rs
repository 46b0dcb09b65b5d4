//! Owns reading a log, also while it grows and its middle becomes a hole.

use std::os::unix::fs::FileExt as _;
use std::path::Path;

use fs_err as fs;
use nix::errno::Errno;
use nix::unistd::Whence;

use super::left_out_line;
use crate::sys::error::Result;

/// Reads lines from its position on.
#[derive(Debug)]
pub(crate) struct Reader {
    file: fs::File,
    at: u64,
    /// The data after the last newline.
    pending: Vec<u8>,
    /// Bytes of a hole skipped since then.
    skipped: u64,
}

impl Reader {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        Ok(Self {
            file: fs::File::open(path)?,
            at: 0,
            pending: Vec::new(),
            skipped: 0,
        })
    }

    /// Returns the whole lines written since the last call, without the last newline; `None` if there are none now.
    pub(crate) fn lines(&mut self) -> Result<Option<Vec<u8>>> {
        let mut buffer = vec![0; 64 << 10];
        loop {
            self.pass_hole()?;
            let count = self.file.file().read_at(&mut buffer, self.at)?;
            if count == 0 {
                return Ok(None);
            }
            self.at += count as u64;
            let mut read = &buffer[..count];
            // Every line begins with its time, so a leading zero byte is the rest of a page with a hole.
            if self.pending.is_empty() {
                let text = read.iter().position(|byte| *byte != 0);
                let zeros = text.unwrap_or(read.len());
                self.skipped += zeros as u64;
                read = &read[zeros..];
                if !read.is_empty() && self.skipped > 0 {
                    let skipped = std::mem::take(&mut self.skipped);
                    self.pending.extend(left_out_line("", skipped).bytes());
                }
            }
            self.pending.extend_from_slice(read);
            if let Some(end) = self.pending.iter().rposition(|byte| *byte == b'\n') {
                let rest = self.pending.split_off(end + 1);
                self.pending.truncate(end);
                return Ok(Some(std::mem::replace(&mut self.pending, rest)));
            }
        }
    }

    /// Returns the data after the last newline, once the log is complete.
    pub(crate) fn rest(&mut self) -> Option<Vec<u8>> {
        (!self.pending.is_empty()).then(|| std::mem::take(&mut self.pending))
    }

    fn pass_hole(&mut self) -> Result<()> {
        let at = i64::try_from(self.at).map_err(|_| Errno::EFBIG)?;
        let data = match nix::unistd::lseek(self.file.file(), at, Whence::SeekData) {
            Ok(data) => u64::try_from(data).unwrap_or(self.at),
            // The end of the file, or a file system without hole detection.
            Err(Errno::ENXIO | Errno::EINVAL | Errno::EOPNOTSUPP) => return Ok(()),
            Err(error) => return Err(error.into()),
        };
        if data > self.at {
            // The rest of a line that was read too late is in the hole.
            self.skipped += data - self.at + std::mem::take(&mut self.pending).len() as u64;
            self.at = data;
        }
        Ok(())
    }
}
