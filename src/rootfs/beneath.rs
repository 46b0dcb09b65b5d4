//! Owns the one way this module enters a directory below another: a single name, never over a mount
//! point, never through a link.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, ResolveFlag, openat2};
use nix::sys::stat::{FileStat, Mode, SFlag, fstatat};

use crate::error::{Error, Result, ResultExt as _};

/// What `RESOLVE_NO_XDEV` compares is the mount, not `st_dev`: a bind mount of the same file system is refused
/// too (`EXDEV`), and a btrfs subvolume, which is no mount, is entered.
fn resolve() -> ResolveFlag {
    ResolveFlag::RESOLVE_BENEATH
        | ResolveFlag::RESOLVE_NO_XDEV
        | ResolveFlag::RESOLVE_NO_MAGICLINKS
        | ResolveFlag::RESOLVE_NO_SYMLINKS
}

/// Opens the entry `name` of `parent`. `EXDEV`: a mount point; `ELOOP`: a link; `ENOTDIR` where a directory was asked for.
pub(super) fn open(parent: impl AsFd, name: &CStr, flags: OFlag) -> nix::Result<OwnedFd> {
    let how = OpenHow::new()
        .flags(flags | OFlag::O_CLOEXEC | OFlag::O_NOFOLLOW)
        .resolve(resolve());
    loop {
        match openat2(&parent, name, how) {
            // EAGAIN: something was renamed at the same moment and the kernel could not rule out an escape.
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            other => return other,
        }
    }
}

/// Opens the directory `name` of `parent` for reading.
pub(super) fn open_dir(parent: impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
    open(parent, name, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

/// Longest path given to one system call; the kernel's limit is 4096.
const PATH_STEP: usize = 4000;

/// Opens the directory at the relative path `below`, however long, with the rules of [`open`] for each part.
pub(super) fn open_below(root: impl AsFd, below: &Path) -> nix::Result<OwnedFd> {
    let mut at = open_dir(root, c".")?;
    let mut step = PathBuf::new();
    let enter = |at: OwnedFd, step: &Path| {
        let step = CString::new(step.as_os_str().as_bytes()).map_err(|_| Errno::EINVAL)?;
        open_dir(at, &step)
    };
    for part in below {
        if step.as_os_str().len() + part.len() > PATH_STEP {
            at = enter(at, &step)?;
            step.clear();
        }
        step.push(part);
    }
    if step.as_os_str().is_empty() {
        Ok(at)
    } else {
        enter(at, &step)
    }
}

/// Reads the metadata of an entry, never of what a link points to.
pub(super) fn stat(parent: impl AsFd, name: &CStr) -> nix::Result<FileStat> {
    fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Returns the file type bits.
pub(super) fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

/// Says whether `name` is a real entry, not `.` or `..`.
pub(super) fn is_entry(name: &CStr) -> bool {
    !matches!(name.to_bytes(), b"." | b"..")
}

/// Opens the directory at `path`; links on the way to it are the caller's own and are followed.
pub(super) fn open_path(path: &Path) -> Result<OwnedFd> {
    nix::fcntl::open(
        path,
        OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC,
        Mode::empty(),
    )
    .context(|| format!("cannot open directory `{}`", path.display()))
}

/// Splits `path` into the open directory that holds it and its last name, so that what follows is
/// decided on a file descriptor.
pub(super) fn split(path: &Path) -> Result<(OwnedFd, CString)> {
    let name = path
        .file_name()
        .ok_or_else(|| Error::unexpected(format!("`{}` has no name of its own", path.display())))?;
    let parent = match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent.to_owned(),
        _ => PathBuf::from("."),
    };
    let name = CString::new(name.as_bytes())
        .map_err(|_| Error::unexpected(format!("`{}` contains a NUL", path.display())))?;
    Ok((open_path(&parent)?, name))
}
