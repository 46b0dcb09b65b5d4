//! Owns writing entries below a directory in which others write too: through no link, over no mount point, whole or not at all.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, RenameFlags, openat, renameat, renameat2};
use nix::sys::stat::{Mode, UtimensatFlags, fchmod, fstat, futimens, mkdirat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, fchownat, linkat, symlinkat, unlinkat};

use super::beneath;
use super::content::Transport;
use super::listing::{Content, Entry, split};
use crate::error::{Error, Kind, Result, ResultExt as _};

/// What is done where something is already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Existing {
    /// It stays, and that is an error.
    Refuse,
    /// A file or link is replaced.
    Replace,
}

/// Writes entries below one directory.
#[derive(Debug)]
pub struct Writer {
    root: OwnedFd,
    shown: PathBuf,
    /// Whom new entries belong to, where that is not who makes them.
    owner: Option<(u32, u32)>,
    transport: Transport,
    /// Every file is on disk before it has its name.
    synced: bool,
    /// The mode and time that directories get in the end.
    directories: BTreeMap<PathBuf, (u32, Option<(i64, i64)>)>,
}

impl Writer {
    /// Opens a directory; links on the way to it are the caller's own and are followed.
    pub fn open(directory: &Path, owner: Option<(u32, u32)>, synced: bool) -> Result<Self> {
        Ok(Self {
            root: beneath::open_path(directory)?,
            shown: directory.to_owned(),
            owner,
            transport: Transport::default(),
            synced,
            directories: BTreeMap::new(),
        })
    }

    /// Writes an entry; the content of a file is that of the open file `from`. A directory that is there gets mode and time of the entry.
    pub fn put(
        &mut self,
        path: &Path,
        entry: &Entry,
        from: Option<BorrowedFd<'_>>,
        existing: Existing,
    ) -> Result<()> {
        let outcome = match (&entry.content, from) {
            (Content::Directory { .. }, _) => return self.directory(path, entry),
            (Content::File { .. }, Some(from)) => self.place(path, existing, |this, to, name| {
                this.file(to, name, from, entry)
            }),
            (Content::Symlink { target }, _) => self.place(path, existing, |this, to, name| {
                symlinkat(target.as_path(), to, name)?;
                this.give(to, name)?;
                let time = TimeSpec::new(entry.mtime.0, entry.mtime.1);
                utimensat(to, name, &time, &time, UtimensatFlags::NoFollowSymlink)
            }),
            (Content::File { .. } | Content::Special(_), _) => Err(Errno::EINVAL),
        };
        self.explain(path, outcome)
    }

    /// Makes another name of the file at `first`, which is below the same directory.
    pub fn link(&mut self, path: &Path, first: &Path, existing: Existing) -> Result<()> {
        let (parent, source) = split(first)?;
        let outcome = beneath::open_below(&self.root, parent).and_then(|parent| {
            self.place(path, existing, |_, to, name| {
                linkat(&parent, source.as_c_str(), to, name, AtFlags::empty())
            })
        });
        self.explain(path, outcome)
    }

    /// Removes the entry at a path; a directory has to be empty.
    pub fn remove(&mut self, path: &Path, is_directory: bool) -> Result<()> {
        let (parent, name) = split(path)?;
        let flags = match is_directory {
            true => UnlinkatFlags::RemoveDir,
            false => UnlinkatFlags::NoRemoveDir,
        };
        beneath::open_below(&self.root, parent)
            .and_then(|parent| unlinkat(&parent, name.as_c_str(), flags))
            .context(|| format!("cannot remove `{}`", self.shown.join(path).display()))
    }

    /// Gives directories their modes and times, which no entry below them changes any more.
    pub fn finish(self) -> Result<()> {
        // What is in a directory first, since that may need a mode that it does not keep.
        for (path, (mode, mtime)) in self.directories.iter().rev() {
            let finish = || -> nix::Result<()> {
                let directory = beneath::open_below(&self.root, path)?;
                if let Some((seconds, nanoseconds)) = *mtime {
                    let time = TimeSpec::new(seconds, nanoseconds);
                    futimens(&directory, &time, &time)?;
                }
                fchmod(&directory, Mode::from_bits_truncate(*mode))
            };
            finish().context(|| format!("cannot write `{}`", self.shown.join(path).display()))?;
        }
        Ok(())
    }

    fn directory(&mut self, path: &Path, entry: &Entry) -> Result<()> {
        let outcome = self.make(path).map(drop);
        self.explain(path, outcome)?;
        let last = (entry.mode, Some(entry.mtime));
        self.directories.insert(path.to_owned(), last);
        Ok(())
    }

    /// Makes a directory, and those above it; returns it open.
    fn make(&mut self, path: &Path) -> nix::Result<OwnedFd> {
        match beneath::open_below(&self.root, path) {
            Err(Errno::ENOENT) => {}
            other => return other,
        }
        let mut at = beneath::open_dir(&self.root, c".")?;
        let mut below = PathBuf::new();
        for part in path {
            below.push(part);
            let name = CString::new(part.as_bytes()).map_err(|_| Errno::EINVAL)?;
            at = match beneath::open_dir(&at, &name) {
                Err(Errno::ENOENT) => {
                    mkdirat(&at, name.as_c_str(), Mode::S_IRWXU)?;
                    self.give(at.as_fd(), &name)?;
                    self.directories.insert(below.clone(), (0o755, None));
                    beneath::open_dir(&at, &name)?
                }
                other => other?,
            };
        }
        Ok(at)
    }

    /// Makes an entry under a name of its own, and gives it the right one when it is whole.
    fn place(
        &mut self,
        path: &Path,
        existing: Existing,
        make: impl FnOnce(&Self, BorrowedFd<'_>, &CStr) -> nix::Result<()>,
    ) -> nix::Result<()> {
        let (parent, name) = split(path).map_err(|_| Errno::EINVAL)?;
        let parent = self.make(parent)?;
        // Not another command's, which may write the same.
        let part = format!(".rockenv-{:016x}", RandomState::new().hash_one(0));
        let part = CString::new(part).map_err(|_| Errno::EINVAL)?;
        let outcome = make(self, parent.as_fd(), &part).and_then(|()| match existing {
            Existing::Replace => renameat(&parent, part.as_c_str(), &parent, name.as_c_str()),
            Existing::Refuse => rename_new(parent.as_fd(), &part, &name),
        });
        if outcome.is_err() {
            // Why it failed is what counts.
            unlinkat(&parent, part.as_c_str(), UnlinkatFlags::NoRemoveDir).ok();
        }
        outcome
    }

    fn file(
        &self,
        to: BorrowedFd<'_>,
        name: &CStr,
        from: BorrowedFd<'_>,
        entry: &Entry,
    ) -> nix::Result<()> {
        let flags =
            OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
        let file = openat(to, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)?;
        let size = fstat(from)?.st_size;
        if size > 0 {
            self.transport.transfer(from, file.as_fd(), size)?;
        }
        if let Some((uid, gid)) = self.owner {
            nix::unistd::fchown(&file, Some(uid.into()), Some(gid.into()))?;
        }
        fchmod(&file, Mode::from_bits_truncate(entry.mode))?;
        let time = TimeSpec::new(entry.mtime.0, entry.mtime.1);
        futimens(&file, &time, &time)?;
        match self.synced {
            true => nix::unistd::fdatasync(&file),
            false => Ok(()),
        }
    }

    fn give(&self, directory: BorrowedFd<'_>, name: &CStr) -> nix::Result<()> {
        match self.owner {
            Some((uid, gid)) => fchownat(
                directory,
                name,
                Some(uid.into()),
                Some(gid.into()),
                AtFlags::AT_SYMLINK_NOFOLLOW,
            ),
            None => Ok(()),
        }
    }

    fn explain(&self, path: &Path, outcome: nix::Result<()>) -> Result<()> {
        let place = self.shown.join(path);
        match outcome {
            Err(Errno::EEXIST | Errno::ENOTDIR | Errno::ELOOP) => Err(in_the_way(&place)),
            other => other.context(|| format!("cannot write `{}`", place.display())),
        }
    }
}

/// Renames an entry of a directory to a name that is free.
fn rename_new(directory: BorrowedFd<'_>, from: &CStr, to: &CStr) -> nix::Result<()> {
    match renameat2(
        directory,
        from,
        directory,
        to,
        RenameFlags::RENAME_NOREPLACE,
    ) {
        // NFS and others cannot; a second name, which cannot replace anything either, and then one less.
        Err(Errno::EINVAL) => {
            linkat(directory, from, directory, to, AtFlags::empty())?;
            unlinkat(directory, from, UnlinkatFlags::NoRemoveDir)
        }
        other => other,
    }
}

/// Says that nothing is written over what is at a path.
pub fn in_the_way(place: &Path) -> Error {
    Error::new(
        Kind::Usage,
        format!(
            "`{}` is there already, and another; nothing is written over it",
            place.display()
        ),
    )
}
