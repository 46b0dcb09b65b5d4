//! Owns writing small files atomically: a reader, or a machine after a power failure, sees the old or the new file.

use std::io::Write as _;
use std::os::unix::fs::FileExt as _;
use std::path::Path;

use fs_err as fs;
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::sys::error::{Result, ResultExt as _, damaged, if_exists};

/// Prefix of temporary files during a write.
pub(crate) const PREFIX: &str = ".tmp-";

/// Which content a power failure leaves in a file that was just replaced.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Survives {
    New,
    /// The old or the new file, complete.
    Either,
    /// Any content: the file is not read after a reboot.
    Nothing,
}

/// Replaces `path` with `bytes`; the new file survives a power failure.
pub(crate) fn write(path: &Path, bytes: &[u8]) -> Result<()> {
    replace(path, bytes, Survives::New)
}

/// Replaces `path` with `bytes`: temporary file, sync, rename, sync of the directory. Skips each sync that `survives`
/// does not need.
pub(crate) fn replace(path: &Path, bytes: &[u8], survives: Survives) -> Result<()> {
    let parent = path
        .parent()
        .ok_or_else(|| unexpected!("a file needs a directory"))?;
    let mut file = tempfile::Builder::new()
        .prefix(PREFIX)
        .tempfile_in(parent)
        .context(|| format!("cannot write in `{}`", parent.display()))?;
    let cannot = || format!("cannot write `{}`", path.display());
    file.write_all(bytes).context(cannot)?;
    if survives != Survives::Nothing {
        file.as_file().sync_data().context(cannot)?;
    }
    file.persist(path)
        .map_err(|error| error.error)
        .context(|| format!("cannot replace `{}`", path.display()))?;
    if survives == Survives::New {
        fs::File::open(parent)?.sync_data()?;
    }
    Ok(())
}

/// Replaces `path` with the value as JSON; the new file survives a power failure.
pub(crate) fn write_json(path: &Path, value: &impl Serialize) -> Result<()> {
    write(path, &json(path, value)?)
}

pub(crate) fn json(path: &Path, value: &impl Serialize) -> Result<Vec<u8>> {
    let mut bytes = serde_json::to_vec_pretty(value)
        .map_err(|error| unexpected!("cannot encode `{}`", path.display()).source(error))?;
    bytes.push(b'\n');
    Ok(bytes)
}

#[cfg(test)]
thread_local! {
    /// Number of calls of [`read_json`] in this thread, for tests that limit the work of a command.
    pub(crate) static READS: std::cell::Cell<usize> = const { std::cell::Cell::new(0) };
}

/// Reads JSON; `None` if the file does not exist.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    #[cfg(test)]
    READS.set(READS.get() + 1);
    let Some(bytes) = if_exists(fs::read(path))? else {
        return Ok(None);
    };
    let read = serde_json::from_slice(&bytes).map(Some);
    read.map_err(damaged(path))
}

/// Appends a line by a single write to a file that is open for reading and appending. A line that a full disk cut off
/// stays a line of its own.
pub(crate) fn append_line(mut file: &fs::File, line: &[u8]) -> Result<()> {
    let mut last = *b"\n";
    if let Some(at) = file.metadata()?.len().checked_sub(1) {
        file.file().read_at(&mut last, at)?;
    }
    let start: &[u8] = if last == *b"\n" { b"" } else { b"\n" };
    Ok(file.write_all(&[start, line, b"\n"].concat())?)
}

pub fn random_id() -> Result<String> {
    use std::io::Read as _;
    let mut bytes = [0u8; 8];
    fs::File::open("/dev/urandom")?.read_exact(&mut bytes)?;
    Ok(format!("{:016x}", u64::from_be_bytes(bytes)))
}
