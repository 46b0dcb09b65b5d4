//! Owns access to a root file system's files by descriptor: no symlink in the tree can make these calls touch a file
//! outside of it.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use nix::unistd::UnlinkatFlags;

use super::file::into_file;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

#[derive(Debug)]
pub(crate) struct Tree {
    root: OwnedFd,
}

impl Tree {
    pub(crate) fn of(root: OwnedFd) -> Self {
        Self { root }
    }

    pub(crate) fn open(path: &Path) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let root = nix::fcntl::open(path, flags, Mode::empty())
            .context(|| format!("cannot open directory `{}`", path.display()))?;
        Ok(Self { root })
    }

    /// Opens without following any symlink; `None` if the file is missing, or a symlink is in the way.
    fn open_strictly(&self, path: &str, flags: OFlag) -> Result<Option<OwnedFd>> {
        self.open_with(path, flags, beneath::STRICT)
    }

    /// Reads a regular file of at most `limit` bytes, resolving symlinks as a program inside would.
    ///
    /// `None` for anything else: a missing file, a directory, a FIFO, a symlink that leads out or in a circle.
    pub(crate) fn read(&self, path: &str, limit: usize) -> Result<Option<Vec<u8>>> {
        // RESOLVE_IN_ROOT makes absolute links start at the tree's root.
        let Some(file) = self.open_file(path, beneath::IN_ROOT)? else {
            return Ok(None);
        };
        let size = match regular(&fstat(&file)?) {
            Some(size) if size <= limit => size,
            Some(size) => {
                return Err(invalid!("`{path}` in the image is too large: {size} bytes"));
            }
            None => return Ok(None),
        };
        let mut data = Vec::with_capacity(size);
        into_file(file)
            .take(limit as u64)
            .read_to_end(&mut data)
            .context(|| format!("cannot read `{path}` in the image"))?;
        Ok(Some(data))
    }

    /// Opens a regular file by the rules of [`beneath`]; `None` for anything else.
    pub(crate) fn open_file(&self, path: &str, resolve: ResolveFlag) -> Result<Option<OwnedFd>> {
        match self.open_with(path, OFlag::O_PATH, resolve)? {
            Some(found) if regular(&fstat(&found)?).is_some() => {
                let file = beneath::open_regular(found, OFlag::O_RDONLY);
                file.map(Some)
                    .context(|| format!("cannot open `{path}` in the image"))
            }
            _ => Ok(None),
        }
    }

    /// Replaces the content of an existing regular file, keeping owner, mode and links to it.
    pub(crate) fn rewrite(&self, path: &str, content: &[u8]) -> Result<()> {
        let Some(found) = self.open_strictly(path, OFlag::O_PATH)? else {
            return Ok(());
        };
        if regular(&fstat(&found)?).is_none() {
            return Ok(());
        }
        let file = beneath::open_regular(found, OFlag::O_WRONLY)
            .context(|| format!("cannot open `{path}` in the image"))?;
        nix::unistd::ftruncate(&file, 0)?;
        into_file(file)
            .write_all(content)
            .context(|| format!("cannot write `{path}` in the image"))
    }

    /// Removes a file other than a directory, if it exists and no symlink is in the way.
    pub(crate) fn remove(&self, path: &str) -> Result<()> {
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        let Some(parent) = self.open_strictly(parent, OFlag::O_PATH | OFlag::O_DIRECTORY)? else {
            return Ok(());
        };
        match nix::unistd::unlinkat(&parent, name, UnlinkatFlags::NoRemoveDir) {
            Ok(()) | Err(Errno::ENOENT | Errno::EISDIR) => Ok(()),
            Err(error) => Err(error).context(|| format!("cannot remove `{path}` from the image")),
        }
    }

    /// Removes a file, or a directory with its content, if it exists and no symlink is in the way.
    pub(crate) fn remove_all(&self, path: &str) -> Result<()> {
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        match self.open_strictly(parent, OFlag::O_PATH | OFlag::O_DIRECTORY)? {
            Some(parent) => remove_below(parent.as_fd(), name.as_bytes())
                .context(|| format!("cannot remove `{path}` from the image")),
            None => Ok(()),
        }
    }

    /// Returns the names in a directory, sorted; empty if the directory is missing.
    pub(crate) fn list(&self, path: &str) -> Result<Vec<Vec<u8>>> {
        match self.open_strictly(path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)? {
            Some(directory) => names(directory),
            None => Ok(Vec::new()),
        }
    }

    pub(crate) fn fd(&self) -> BorrowedFd<'_> {
        self.root.as_fd()
    }

    fn open_with(&self, path: &str, flags: OFlag, resolve: ResolveFlag) -> Result<Option<OwnedFd>> {
        match beneath::open_by(&self.root, path, flags, resolve) {
            Ok(file) => Ok(Some(file)),
            Err(
                Errno::ENOENT
                | Errno::ENOTDIR
                | Errno::ELOOP
                | Errno::EXDEV
                | Errno::EISDIR
                | Errno::ENXIO,
            ) => Ok(None),
            Err(error) => Err(error).context(|| format!("cannot open `{path}` in the image")),
        }
    }
}

fn remove_below(parent: BorrowedFd<'_>, name: &[u8]) -> Result<()> {
    match nix::unistd::unlinkat(parent, name, UnlinkatFlags::NoRemoveDir) {
        Ok(()) | Err(Errno::ENOENT) => return Ok(()),
        Err(Errno::EISDIR | Errno::EPERM) => {}
        Err(error) => return Err(error.into()),
    }
    let directory = beneath::open_dir(parent, name)?;
    for name in names(&directory)? {
        remove_below(directory.as_fd(), &name)?;
    }
    nix::unistd::unlinkat(parent, name, UnlinkatFlags::RemoveDir)?;
    Ok(())
}

/// Returns the names in an open directory, sorted by bytes, without `.` and `..`.
pub(crate) fn names(directory: impl AsFd) -> Result<Vec<Vec<u8>>> {
    let entries = beneath::entries(directory)?.into_iter();
    let mut names: Vec<Vec<u8>> = entries.map(|(name, _)| name.into_bytes()).collect();
    names.sort_unstable();
    Ok(names)
}

/// Joins a relative path, which is empty for the root, and a name.
pub(crate) fn join(directory: &[u8], name: &[u8]) -> Vec<u8> {
    match directory {
        b"" => name.to_vec(),
        _ => [directory, b"/", name].concat(),
    }
}

fn regular(stat: &FileStat) -> Option<usize> {
    (beneath::kind(stat) == SFlag::S_IFREG)
        .then(|| usize::try_from(stat.st_size).unwrap_or(usize::MAX))
}

/// Fills the buffer from this position on, or up to the file's end; returns the number of bytes.
pub(crate) fn read_at(file: impl AsFd, buffer: &mut [u8], at: i64) -> nix::Result<usize> {
    let mut filled = 0;
    while filled < buffer.len() {
        let place = at + i64::try_from(filled).map_err(|_| Errno::EFBIG)?;
        match nix::sys::uio::pread(&file, &mut buffer[filled..], place) {
            Ok(0) => break,
            Ok(amount) => filled += amount,
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(filled)
}
