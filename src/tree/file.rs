//! Owns single files of a tree: reading and changing the file at a path below a directory. Follows no symlink and
//! crosses no mount point, because the tree is untrusted.

use std::ffi::{CStr, CString};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, renameat};
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, futimens, mkdirat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, fchown, unlinkat};

use super::listing::split;
use super::transfer::Transport;
use crate::sys::atomic::random_id;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

/// Maximum size of a file to change: hooks patch source code.
const LARGEST: i64 = 64 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum FoundEntry {
    File {
        bytes: Vec<u8>,
        mode: u32,
    },
    Absent,
    /// No entry exists, and the nearest parent directory is empty.
    Empty,
}

pub(crate) fn read(root: &Path, below: &Path) -> Result<FoundEntry> {
    let shown = || format!("cannot read `{}`", root.join(below).display());
    let top = beneath::open_path(root)?;
    let (parent, name) = split(below)?;
    let file = match open_regular_below(&top, parent, &name, OFlag::O_RDONLY) {
        Err(Errno::ENOENT | Errno::ENOTDIR) => return absent(&top, parent),
        other => other.context(shown)?,
    };
    let stat = fstat(&file)?;
    if beneath::kind(&stat) != SFlag::S_IFREG || stat.st_size > LARGEST {
        return Err(invalid!(
            "`{}` is not a regular file of at most {LARGEST} bytes",
            root.join(below).display()
        ));
    }
    let mut bytes = Vec::new();
    into_file(file).read_to_end(&mut bytes).context(shown)?;
    Ok(FoundEntry::File {
        bytes,
        mode: stat.st_mode & 0o7777,
    })
}

/// Opens a regular file; returns a path-only descriptor for anything else.
fn open_regular(directory: &OwnedFd, name: &CStr, flags: OFlag) -> nix::Result<OwnedFd> {
    beneath::open_regular(beneath::open(directory, name, OFlag::O_PATH)?, flags)
}

fn open_regular_below(
    top: &OwnedFd,
    parent: &Path,
    name: &CStr,
    flags: OFlag,
) -> nix::Result<OwnedFd> {
    open_regular(&beneath::open_below(top, parent)?, name, flags)
}

/// Returns `Empty` if the nearest existing parent of an absent path has no content.
fn absent(top: &OwnedFd, parent: &Path) -> Result<FoundEntry> {
    for directory in parent.ancestors() {
        if let Ok(found) = beneath::open_below(top, directory) {
            // An empty submodule may still contain `.git`.
            let mut entries = nix::dir::Dir::from_fd(found)?;
            let empty = entries.iter().all(|entry| {
                entry.is_ok_and(|entry| {
                    matches!(entry.file_name().to_bytes(), b"." | b".." | b".git")
                })
            });
            let inside = !directory.as_os_str().is_empty();
            return Ok(if empty && inside {
                FoundEntry::Empty
            } else {
                FoundEntry::Absent
            });
        }
    }
    Ok(FoundEntry::Absent)
}

/// Writes the content of the file at `below`. An existing file keeps owner and mode, a new one gets its directory's
/// owner. `executable` sets or clears the execute permission. The modification time is `time` in seconds and
/// nanoseconds, or now; returns it.
pub(crate) fn write(
    root: &Path,
    below: &Path,
    bytes: &[u8],
    executable: Option<bool>,
    time: Option<(i64, i64)>,
) -> Result<(i64, i64)> {
    let shown = || format!("cannot write `{}`", root.join(below).display());
    let top = beneath::open_path(root)?;
    let (parent, name) = split(below)?;
    let directory = make_directories(&top, parent).context(shown)?;
    let flags = OFlag::O_WRONLY | OFlag::O_TRUNC;
    let file = match open_regular(&directory, &name, flags) {
        Err(Errno::ENOENT) => create(&directory, &name).context(shown)?,
        other => other.context(shown)?,
    };
    let stat = fstat(&file)?;
    if beneath::kind(&stat) != SFlag::S_IFREG {
        return Err(invalid!(
            "`{}` is not a regular file",
            root.join(below).display()
        ));
    }
    if let Some(executable) = executable {
        // Execute for every class that may read.
        let bits = (stat.st_mode & 0o444) >> 2;
        let mode = match executable {
            true => stat.st_mode | bits,
            false => stat.st_mode & !0o111,
        };
        fchmod(&file, Mode::from_bits_truncate(mode)).context(shown)?;
    }
    let mut file = into_file(file);
    file.write_all(bytes).context(shown)?;
    if let Some((seconds, nanoseconds)) = time {
        let time = TimeSpec::new(seconds, nanoseconds);
        futimens(&file, &TimeSpec::UTIME_OMIT, &time).context(shown)?;
    }
    let stat = fstat(&file)?;
    Ok((stat.st_mtime, stat.st_mtime_nsec))
}

/// Opens the regular file at `below` for reading; `None` if no such file exists.
#[expect(
    clippy::disallowed_types,
    reason = "the file was opened by its name in a directory"
)]
pub(crate) fn open(root: &Path, below: &Path) -> Result<Option<std::fs::File>> {
    let shown = || format!("cannot read `{}`", root.join(below).display());
    let top = beneath::open_path(root)?;
    let (parent, name) = split(below)?;
    let file = match open_regular_below(&top, parent, &name, OFlag::O_RDONLY) {
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(None),
        other => other.context(shown)?,
    };
    let regular = beneath::kind(&fstat(&file)?) == SFlag::S_IFREG;
    Ok(regular.then(|| into_file(file)))
}

/// Reads at most `limit` bytes of the regular file at `below`; `None` if no such file exists.
pub(crate) fn read_up_to(root: &Path, below: &Path, limit: u64) -> Result<Option<Vec<u8>>> {
    let Some(file) = open(root, below)? else {
        return Ok(None);
    };
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// Writes the content of `from` to `below` atomically, with shared blocks if the file system supports them. Replaces an
/// existing file; the owner is the directory's.
pub(crate) fn place(root: &Path, below: &Path, from: BorrowedFd<'_>) -> Result<()> {
    let shown = || format!("cannot write `{}`", root.join(below).display());
    let top = beneath::open_path(root)?;
    let (parent, name) = split(below)?;
    let directory = make_directories(&top, parent).context(shown)?;
    // A parallel command may place the same file, and a longer name may be too long.
    let part = CString::new(format!(".rockenv-{}", random_id()?)).map_err(std::io::Error::from)?;
    let outcome = (|| {
        let file = create(&directory, &part)?;
        let size = fstat(from)?.st_size;
        Transport::default().transfer(from, file.as_fd(), size)?;
        renameat(&directory, part.as_c_str(), &directory, name.as_c_str())
    })();
    if outcome.is_err() {
        // The first error is the one to report.
        unlinkat(&directory, part.as_c_str(), UnlinkatFlags::NoRemoveDir).ok();
    }
    outcome.context(shown)
}

pub(crate) fn shorten(root: &Path, below: &Path, length: u64) -> Result<()> {
    let shown = || format!("cannot write `{}`", root.join(below).display());
    let top = beneath::open_path(root)?;
    let (parent, name) = split(below)?;
    let file = open_regular_below(&top, parent, &name, OFlag::O_WRONLY).context(shown)?;
    into_file(file).set_len(length).context(shown)
}

pub(crate) fn remove(root: &Path, below: &Path) -> Result<()> {
    let shown = || format!("cannot remove `{}`", root.join(below).display());
    let (parent, name) = split(below)?;
    let top = beneath::open_path(root)?;
    let directory = beneath::open_below(&top, parent).context(shown)?;
    unlinkat(&directory, name.as_c_str(), UnlinkatFlags::NoRemoveDir).context(shown)
}

/// Moves the entry at `below` to `to`, on the same file system, by one rename. A missing entry is a success.
pub(crate) fn move_out(root: &Path, below: &Path, to: &Path) -> Result<()> {
    let shown = || format!("cannot remove `{}`", root.join(below).display());
    let (parent, name) = split(below)?;
    let top = beneath::open_path(root)?;
    let holder = match beneath::open_below(&top, parent) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other.context(shown)?,
    };
    let (trash, new) = beneath::split(to)?;
    match renameat(&holder, name.as_c_str(), &trash, new.as_c_str()) {
        Err(Errno::ENOENT) => Ok(()),
        other => other.context(shown),
    }
}

pub(crate) fn is_directory(root: &Path, below: &Path) -> bool {
    beneath::open_path(root).is_ok_and(|top| beneath::open_below(&top, below).is_ok())
}

fn make_directories(top: &OwnedFd, below: &Path) -> nix::Result<OwnedFd> {
    let mut at = beneath::open_dir(top, c".")?;
    for part in below {
        at = match beneath::open_dir(&at, part) {
            Err(Errno::ENOENT) => {
                mkdirat(&at, part, Mode::from_bits_truncate(0o755))?;
                let made = beneath::open_dir(&at, part)?;
                set_owner(made.as_fd(), at.as_fd())?;
                made
            }
            other => other?,
        };
    }
    Ok(at)
}

fn create(directory: &OwnedFd, name: &CStr) -> nix::Result<OwnedFd> {
    let file = beneath::create(directory, name)?;
    fchmod(&file, Mode::from_bits_truncate(0o644))?;
    set_owner(file.as_fd(), directory.as_fd())?;
    Ok(file)
}

fn set_owner(made: BorrowedFd<'_>, directory: BorrowedFd<'_>) -> nix::Result<()> {
    let owner = fstat(directory)?;
    let found = fstat(made)?;
    if (found.st_uid, found.st_gid) == (owner.st_uid, owner.st_gid) {
        return Ok(());
    }
    fchown(made, Some(owner.st_uid.into()), Some(owner.st_gid.into()))
}

#[expect(
    clippy::disallowed_types,
    reason = "the file was opened by its name in a directory"
)]
pub(super) fn into_file(fd: OwnedFd) -> std::fs::File {
    fd.into()
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn devices_are_not_opened() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let tree = tempfile::tempdir().unwrap();
        let (root, node) = (tree.path(), Path::new("node"));
        // The device number has no driver, so opening it would fail.
        let number = nix::sys::stat::makedev(240, 77);
        nix::sys::stat::mknod(&root.join(node), SFlag::S_IFCHR, Mode::S_IRWXU, number).unwrap();
        assert!(open(root, node).unwrap().is_none());
        for refused in [
            read(root, node).map(drop),
            write(root, node, b"", None, None).map(drop),
        ] {
            assert_has!(
                refused.unwrap_err().chain().join(": "),
                "is not a regular file"
            );
        }
    }

    #[test]
    fn files_are_read_written_and_removed_below_the_root_only() {
        let outside = tempfile::tempdir().unwrap();
        fs::write(outside.path().join("f"), "theirs").unwrap();
        let tree = tempfile::tempdir().unwrap();
        let root = tree.path();
        std::os::unix::fs::symlink(outside.path(), root.join("link")).unwrap();
        std::os::unix::fs::symlink(outside.path().join("f"), root.join("f")).unwrap();
        for path in ["link/f", "f", "../f"] {
            let path = Path::new(path);
            // A symlink in the way is not a directory, so the path counts as absent.
            let found = read(root, path);
            assert!(found.is_err() || path == Path::new("link/f"), "{found:?}");
            assert!(
                write(root, path, b"ours", None, None).is_err(),
                "{}",
                path.display()
            );
        }
        assert!(remove(root, Path::new("link/f")).is_err());
        assert_eq!(fs::read(outside.path().join("f")).unwrap(), b"theirs");

        let new = Path::new("a/b/c");
        assert_eq!(read(root, new).unwrap(), FoundEntry::Absent);
        write(root, new, b"one", Some(true), None).unwrap();
        let their = fs::File::open(outside.path().join("f")).unwrap();
        for path in ["link/f", "../g"] {
            assert!(place(root, Path::new(path), their.as_fd()).is_err());
            assert!(!matches!(open(root, Path::new(path)), Ok(Some(_))));
        }
        // A symlink is replaced like any file, not followed.
        std::os::unix::fs::symlink(outside.path().join("new"), root.join("a/b/l")).unwrap();
        let longest = format!("a/b/e/{}", "n".repeat(255));
        for path in ["a/b/l", "a/b/e/f", "a/b/e/f", &longest].map(Path::new) {
            place(root, path, their.as_fd()).unwrap();
            let mut text = String::new();
            let mut file = open(root, path).unwrap().unwrap();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "theirs");
        }
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 1);
        assert_eq!(fs::read_dir(root.join("a/b/e")).unwrap().count(), 2);
        fs::remove_dir_all(root.join("a/b/e")).unwrap();
        fs::remove_file(root.join("a/b/l")).unwrap();
        let time = Some((1_000_000_000, 7));
        assert_eq!(
            write(root, new, b"x", None, time).unwrap(),
            (1_000_000_000, 7)
        );
        let FoundEntry::File { bytes, mode } = read(root, new).unwrap() else {
            panic!("a file was written");
        };
        assert_eq!((bytes.as_slice(), mode), (b"x".as_slice(), 0o755));
        remove(root, new).unwrap();
        assert_eq!(read(root, new).unwrap(), FoundEntry::Empty);
        fs::write(root.join("a/b/.git"), "gitdir: x").unwrap();
        assert_eq!(read(root, &new.join("d")).unwrap(), FoundEntry::Empty);
        fs::write(root.join("a/b/other"), "").unwrap();
        assert_eq!(read(root, new).unwrap(), FoundEntry::Absent);
    }
}
