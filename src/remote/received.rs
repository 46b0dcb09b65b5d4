//! Owns unpacking what another machine sends for `--fetch`. That machine is untrusted: only the requested path and
//! entries below it are accepted, and only as much as fits on the disk.

use std::cell::Cell;
use std::io::{self, Read};
use std::path::{Component, Path, PathBuf};

use crate::sys::host::free_space;

/// Limit in bytes for an archive without its file content, because the tar crate keeps this part in memory. Enough for
/// a million entries.
const HEADERS: u64 = 1 << 30;

/// Fails once the remaining byte budget is used up.
struct Metered<'a, R> {
    from: R,
    left: &'a Cell<u64>,
}

impl<R: Read> Read for Metered<'_, R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let left = usize::try_from(self.left.get()).unwrap_or(usize::MAX);
        if left == 0 && !into.is_empty() {
            return Err(damaged("it has too many entries".to_owned()));
        }
        let length = left.min(into.len());
        let count = self.from.read(&mut into[..length])?;
        self.left.set(self.left.get() - count as u64);
        Ok(count)
    }
}

fn damaged(why: String) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}

/// Unpacks an archive of the path `wanted` into an empty directory. Refuses other paths, entries that are no file,
/// directory or link, and more bytes than the disk has free.
pub(super) fn unpack(pipe: impl Read, directory: &Path, wanted: &Path) -> io::Result<()> {
    let parts = wanted.components();
    let wanted: PathBuf = parts.filter(|part| *part != Component::CurDir).collect();
    let mut free = free_space(directory).map_err(io::Error::other)?;
    let left = Cell::new(HEADERS);
    let mut archive = tar::Archive::new(Metered {
        from: pipe,
        left: &left,
    });
    archive.set_preserve_mtime(true);
    let mut directories = Vec::new();
    for entry in archive.entries()? {
        let mut entry = entry?;
        let path = entry.path()?;
        let name = path.to_string_lossy();
        let name = name.escape_debug();
        if !is_below(&path, &wanted) {
            let why = format!("it sent `{name}`, which was not requested");
            return Err(damaged(why));
        }
        let kind = entry.header().entry_type();
        if !is_placed(kind) {
            let why = format!("`{name}` is not a file, directory or link");
            return Err(damaged(why));
        }
        if kind.is_dir() {
            // Directories come last, because their mode may forbid adding content.
            directories.push(entry);
            continue;
        }
        free = free.checked_sub(entry.size()).ok_or_else(|| {
            let why = "it has more bytes than the disk has free";
            io::Error::new(io::ErrorKind::StorageFull, why)
        })?;
        let headers = left.replace(entry.size());
        entry.unpack_in(directory)?;
        left.set(headers);
    }
    // Children precede their parents.
    directories.sort_by(|one, other| other.path_bytes().cmp(&one.path_bytes()));
    for mut entry in directories {
        entry.unpack_in(directory)?;
    }
    Ok(())
}

/// Returns whether entries of this kind are unpacked. The tar crate would create an empty file for a FIFO or a device.
fn is_placed(kind: tar::EntryType) -> bool {
    let is_file = kind.is_file() || kind.is_contiguous() || kind.is_gnu_sparse();
    is_file || kind.is_dir() || kind.is_symlink() || kind.is_hard_link()
}

/// Returns whether a path in the archive is `wanted` or below it.
fn is_below(path: &Path, wanted: &Path) -> bool {
    let mut parts = path.components().filter(|part| *part != Component::CurDir);
    let first = wanted.components().all(|part| parts.next() == Some(part));
    first && parts.all(|part| matches!(part, Component::Normal(_)))
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    fn archive(entries: &[(&str, u64)]) -> Vec<u8> {
        archive_of(entries, tar::EntryType::Regular)
    }

    /// Makes an archive whose entries are of this kind, apart from directories.
    fn archive_of(entries: &[(&str, u64)], kind: tar::EntryType) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        for (name, size) in entries {
            let mut header = tar::Header::new_gnu();
            // `set_path` refuses some of these names.
            header.as_old_mut().name[..name.len()].copy_from_slice(name.as_bytes());
            header.set_size(*size);
            header.set_mode(0o6755);
            header.set_entry_type(match name.ends_with('/') {
                true => tar::EntryType::Directory,
                false => kind,
            });
            header.set_cksum();
            let text = &b"text"[..4.min(usize::try_from(*size).unwrap())];
            builder.append(&header, text).unwrap();
        }
        builder.into_inner().unwrap()
    }

    #[test]
    fn only_what_was_requested_is_accepted() {
        use std::os::unix::fs::PermissionsExt as _;
        for wanted in ["out", "./out", "out/."] {
            let directory = tempfile::tempdir().unwrap();
            let sent = archive(&[("out/", 0), ("./out/a", 4), ("out/./b/c", 4)]);
            unpack(&sent[..], directory.path(), Path::new(wanted)).unwrap();
            let made = directory.path().join("out/b/c");
            assert_eq!(fs::read_to_string(&made).unwrap(), "text");
            let mode = fs::metadata(&made).unwrap().permissions().mode();
            assert_eq!(mode & 0o7777, 0o755);
        }
        let others = "GNUmakefile|.git/hooks/pre-commit|output|/out/a|out/../a|./|ou\x1bt";
        for other in others.split('|') {
            let directory = tempfile::tempdir().unwrap();
            let sent = archive(&[("out/a", 4), (other, 0)]);
            let error = unpack(&sent[..], directory.path(), Path::new("out")).unwrap_err();
            let other = other.escape_debug();
            let wanted = format!("it sent `{other}`, which was not requested");
            assert_eq!(error.to_string(), wanted);
        }
        let directory = tempfile::tempdir().unwrap();
        let sent = archive(&[("a/b", 4)]);
        unpack(&sent[..], directory.path(), Path::new("a/b")).unwrap();
        unpack(&sent[..], directory.path(), Path::new("a/b/c")).unwrap_err();
    }

    #[test]
    fn what_is_no_file_directory_or_link_is_refused() {
        use tar::EntryType::{Block, Char, Fifo};
        for kind in [Fifo, Char, Block] {
            let directory = tempfile::tempdir().unwrap();
            let sent = archive_of(&[("out/odd", 0)], kind);
            let error = unpack(&sent[..], directory.path(), Path::new("out")).unwrap_err();
            let wanted = "`out/odd` is not a file, directory or link";
            assert_eq!(error.to_string(), wanted);
            assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
        }
    }

    #[test]
    fn more_than_fits_is_refused_before_it_is_written() {
        let directory = tempfile::tempdir().unwrap();
        let sent = archive(&[("out", 1 << 60)]);
        let error = unpack(&sent[..], directory.path(), Path::new("out")).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        // Long names count against the limit.
        let mut header = tar::Header::new_gnu();
        header.set_entry_type(tar::EntryType::GNULongName);
        header.set_size(HEADERS * 2);
        header.set_cksum();
        let left = Cell::new(1024);
        let metered = Metered {
            from: header.as_bytes().chain(io::repeat(b'a')),
            left: &left,
        };
        let mut archive = tar::Archive::new(metered);
        let error = archive.entries().unwrap().next().unwrap().err().unwrap();
        assert!(error.to_string().contains("too many entries"), "{error}");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
    }
}
