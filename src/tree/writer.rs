//! Owns writing entries below a directory that others write to as well: through no symlink, across no mount point, and
//! each entry atomically.

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, OsStr};
use std::hash::{BuildHasher as _, RandomState};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, renameat};
use nix::sys::stat::{Mode, fchmod, fstat, futimens};
use nix::sys::time::TimeSpec;

use super::listing::{Content, ListingEntry, PERMISSIONS, split};
use super::transfer::Transport;
use crate::sys::account::{Existing, Rights, caller};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};

/// The mode of a missing parent directory.
const PARENT: u32 = 0o755;

const TEMPORARY: &str = ".rockenv-";

/// Returns whether an entry has the temporary name of an unfinished one, which a killed command leaves.
pub(crate) fn is_unfinished(path: &Path, entry: &ListingEntry) -> bool {
    let name = path.file_name().and_then(OsStr::to_str);
    let id = name.and_then(|name| name.strip_prefix(TEMPORARY));
    let is_id = |id: &str| id.len() == 16 && id.bytes().all(|byte| byte.is_ascii_hexdigit());
    !entry.is_directory() && id.is_some_and(is_id)
}

/// Writes entries below one directory, without the set-user-ID, set-group-ID and sticky bits.
#[derive(Debug)]
pub(crate) struct Writer {
    rights: &'static Rights,
    root: OwnedFd,
    shown: PathBuf,
    /// Owner of new entries, if it is not the process's own user.
    owner: Option<(u32, u32)>,
    transport: Transport,
    /// Sync every file to disk before it gets its name.
    synced: bool,
    /// The modes and times that [`Writer::finish`] gives to directories.
    directories: BTreeMap<PathBuf, (u32, Option<(i64, i64)>)>,
}

impl Writer {
    /// Opens a directory of the store, or another one that this process accesses with its own rights.
    pub(crate) fn open(directory: &Path, synced: bool) -> Result<Self> {
        Self::with(&Rights::Own, directory, synced)
    }

    /// Opens a directory of the calling user. Symlinks in its path are followed, with the user's rights.
    pub(crate) fn for_caller(directory: &Path) -> Result<Self> {
        Self::with(caller(), directory, true)?.for_owner()
    }

    /// Gives new entries to the directory's owner, if root acts for itself.
    pub(crate) fn for_owner(mut self) -> Result<Self> {
        self.owner = self.rights.owner_for_root_files(self.root.as_fd())?;
        Ok(self)
    }

    fn with(rights: &'static Rights, directory: &Path, synced: bool) -> Result<Self> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let root = rights
            .open_named(directory, flags)
            .map_err(|errno| rights.refused(directory, errno))?;
        Ok(Self {
            owner: None,
            rights,
            root,
            shown: directory.to_owned(),
            transport: Transport::default(),
            synced,
            directories: BTreeMap::new(),
        })
    }

    /// Writes an entry; a file gets the content of the open file `from`. An existing directory gets the entry's mode
    /// and time.
    pub(crate) fn put(
        &mut self,
        path: &Path,
        entry: &ListingEntry,
        from: Option<BorrowedFd<'_>>,
        existing: Existing,
    ) -> Result<()> {
        let outcome = match (&entry.content, from) {
            (Content::Directory { .. }, _) => return self.directory(path, entry),
            (Content::File { .. }, Some(from)) => self.place(path, existing, |this, to, name| {
                this.file(to, name, from, entry)
            }),
            (Content::Symlink { target }, _) => {
                let made = self.place(path, existing, |this, to, name| {
                    let made = this.rights.symlink(target.as_path(), to, name);
                    made.map_err(|errno| match errno {
                        Errno::EPERM | Errno::ENOSYS => Errno::ENOTSUP,
                        other => other,
                    })?;
                    this.set_owner(to, name)?;
                    this.rights.set_time(to, name, entry.mtime)
                });
                if made == Err(Errno::ENOTSUP) {
                    return Err(usage!(
                        "`{}` is a symbolic link, which FAT and some other file systems do not support",
                        self.shown.join(path).display()
                    ));
                }
                made
            }
            (Content::File { .. } | Content::Special(_), _) => Err(Errno::EINVAL),
        };
        self.explain(path, outcome)
    }

    /// Hard-links the file at `first`, which is below the same directory.
    pub(crate) fn link(&mut self, path: &Path, first: &Path, existing: Existing) -> Result<()> {
        let (parent, source) = split(first)?;
        let outcome = self.open_below(parent).and_then(|parent| {
            self.place(path, existing, |this, to, name| {
                this.rights
                    .link(parent.as_fd(), source.as_c_str(), to, name)
            })
        });
        self.explain(path, outcome)
    }

    /// Writes a file with several names. If `first` is one that is below the same directory already, makes a hard link,
    /// or a copy where no link can be: on FAT, and between two subvolumes of btrfs.
    pub(crate) fn link_or_put(
        &mut self,
        path: &Path,
        entry: &ListingEntry,
        first: Option<&Path>,
        from: BorrowedFd<'_>,
        existing: Existing,
    ) -> Result<()> {
        match first {
            Some(first) if self.link(path, first, existing).is_ok() => Ok(()),
            _ => self.put(path, entry, Some(from), existing),
        }
    }

    /// Removes the entry at a path; a directory must be empty.
    pub(crate) fn remove(&mut self, path: &Path, is_directory: bool) -> Result<()> {
        let (parent, name) = split(path)?;
        self.open_below(parent)
            .and_then(|parent| {
                self.rights
                    .unlink(parent.as_fd(), name.as_c_str(), is_directory)
            })
            .context(|| format!("cannot remove `{}`", self.shown.join(path).display()))
    }

    /// Moves the file or symlink at a path to the same path below `to`, on the same file system; replaces an entry
    /// there.
    pub(crate) fn hand_over(&self, path: &Path, to: &mut Self) -> Result<()> {
        let (parent, name) = split(path)?;
        let from = self.open_below(parent);
        let moved = from.and_then(|from| {
            let into = to.make(parent, PARENT)?;
            renameat(&from, name.as_c_str(), &into, name.as_c_str())
        });
        moved.context(|| {
            format!(
                "cannot move `{}` to `{}`",
                self.shown.join(path).display(),
                to.shown.display()
            )
        })
    }

    /// Sets the modes and times of directories, after all entries below them.
    pub(crate) fn finish(self) -> Result<()> {
        // Children first: reaching them may need permissions that the parent's final mode lacks.
        for (path, (mode, mtime)) in self.directories.iter().rev() {
            let finish = || -> nix::Result<()> {
                let directory = self.open_below(path)?;
                if let Some(mtime) = *mtime {
                    self.rights.set_time(directory.as_fd(), ".", mtime)?;
                }
                self.rights.set_mode(directory.as_fd(), ".", *mode)
            };
            finish().context(|| format!("cannot write `{}`", self.shown.join(path).display()))?;
        }
        Ok(())
    }

    fn directory(&mut self, path: &Path, entry: &ListingEntry) -> Result<()> {
        let mode = entry.mode & PERMISSIONS;
        let outcome = self.make(path, mode).map(drop);
        self.explain(path, outcome)?;
        let last = (mode, Some(entry.mtime));
        self.directories.insert(path.to_owned(), last);
        Ok(())
    }

    /// Makes a directory of this mode, and missing parents; returns its descriptor.
    fn make(&mut self, path: &Path, mode: u32) -> nix::Result<OwnedFd> {
        match self.open_below(path) {
            Err(Errno::ENOENT) => {}
            other => return other,
        }
        let mut at = self.open_dir(self.root.as_fd(), c".")?;
        let mut below = PathBuf::new();
        for part in path {
            below.push(part);
            let name = CString::new(part.as_bytes()).map_err(|_| Errno::EINVAL)?;
            at = match self.open_dir(at.as_fd(), &name) {
                Err(Errno::ENOENT) => {
                    let mode = if below == path { mode } else { PARENT };
                    // If this command is killed, `finish` never runs, and the next command does not set this
                    // directory's mode.
                    let first = mode | 0o700;
                    let rights = Mode::from_bits_truncate(first);
                    self.rights
                        .make_directory(at.as_fd(), name.as_c_str(), rights)?;
                    self.set_owner(at.as_fd(), &name)?;
                    self.directories.insert(below.clone(), (mode, None));
                    let made = self.open_dir(at.as_fd(), &name)?;
                    // The umask may have cleared bits.
                    self.rights.set_mode(made.as_fd(), ".", first)?;
                    made
                }
                other => other?,
            };
        }
        Ok(at)
    }

    /// Makes an entry under a temporary name, and renames it once it is complete.
    fn place(
        &mut self,
        path: &Path,
        existing: Existing,
        make: impl FnOnce(&Self, BorrowedFd<'_>, &CStr) -> nix::Result<()>,
    ) -> nix::Result<()> {
        let (parent, name) = split(path).map_err(|_| Errno::EINVAL)?;
        let parent = self.make(parent, PARENT)?;
        // A parallel command may write the same entry.
        let part = format!("{TEMPORARY}{:016x}", RandomState::new().hash_one(0));
        let part = CString::new(part).map_err(|_| Errno::EINVAL)?;
        let at = parent.as_fd();
        let outcome = make(self, at, &part).and_then(|()| {
            let replaces = existing == Existing::Replace;
            self.rights
                .rename(at, part.as_c_str(), name.as_c_str(), replaces)
        });
        if outcome.is_err() {
            // The first error is the one to report.
            self.rights.unlink(at, part.as_c_str(), false).ok();
        }
        outcome
    }

    fn file(
        &self,
        to: BorrowedFd<'_>,
        name: &CStr,
        from: BorrowedFd<'_>,
        entry: &ListingEntry,
    ) -> nix::Result<()> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
        let mode = Mode::S_IRUSR | Mode::S_IWUSR;
        let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS;
        let file = self.rights.open(Some(to), name, flags, mode, resolve)?;
        let size = fstat(from)?.st_size;
        if size > 0 {
            self.transport.transfer(from, file.as_fd(), size)?;
        }
        if let Some((uid, gid)) = self.owner {
            nix::unistd::fchown(&file, Some(uid.into()), Some(gid.into()))?;
        }
        fchmod(&file, Mode::from_bits_truncate(entry.mode & PERMISSIONS))?;
        let time = TimeSpec::new(entry.mtime.0, entry.mtime.1);
        futimens(&file, &time, &time)?;
        match self.synced {
            true => nix::unistd::fdatasync(&file),
            false => Ok(()),
        }
    }

    /// Opens the directory at a path below the root, by the rules of [`beneath`].
    fn open_below(&self, below: &Path) -> nix::Result<OwnedFd> {
        let mut at = self.open_dir(self.root.as_fd(), c".")?;
        for part in below {
            let name = CString::new(part.as_bytes()).map_err(|_| Errno::EINVAL)?;
            at = self.open_dir(at.as_fd(), &name)?;
        }
        Ok(at)
    }

    fn open_dir(&self, at: BorrowedFd<'_>, name: &CStr) -> nix::Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW;
        self.rights
            .open(Some(at), name, flags, Mode::empty(), beneath::STRICT)
    }

    fn set_owner(&self, directory: BorrowedFd<'_>, name: &CStr) -> nix::Result<()> {
        match self.owner {
            Some((uid, gid)) => beneath::set_owner(directory, name, uid, gid),
            None => Ok(()),
        }
    }

    fn explain(&self, path: &Path, outcome: nix::Result<()>) -> Result<()> {
        let place = self.shown.join(path);
        match outcome {
            Err(Errno::EEXIST | Errno::ENOTDIR | Errno::ELOOP) => Err(refusing_overwrite(&place)),
            Err(errno @ (Errno::EACCES | Errno::EPERM | Errno::EROFS)) => {
                let parent = place.parent().unwrap_or(&self.shown);
                Err(self.rights.refused(parent, errno))
            }
            other => other.context(|| format!("cannot write `{}`", place.display())),
        }
    }
}

/// Makes the error for an existing entry that must not be overwritten.
pub(crate) fn refusing_overwrite(place: &Path) -> Error {
    usage!(
        "`{}` exists with other content; refusing to overwrite it",
        place.display()
    )
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use fs_err as fs;

    use super::super::listing::Listing;
    use super::*;

    #[test]
    fn a_file_that_cannot_be_linked_is_copied() {
        let [from, to] = [(); 2].map(|()| tempfile::tempdir().unwrap());
        fs::write(from.path().join("file"), "text").unwrap();
        let file = fs::File::open(from.path().join("file")).unwrap();
        let listing = Listing::of(from.path()).unwrap();
        let entry = &listing.entries[Path::new("file")];
        let mut writer = Writer::open(to.path(), false).unwrap();
        let mut put = |path: &str, first: &str| {
            let (path, first) = (Path::new(path), Some(Path::new(first)));
            let from = file.file().as_fd();
            writer.link_or_put(path, entry, first, from, Existing::Refuse)
        };
        put("a", "missing").unwrap();
        put("b", "a").unwrap();
        put("b", "a").unwrap_err();
        let found = fs::metadata(to.path().join("b")).unwrap();
        assert_eq!((found.nlink(), found.len()), (2, 4));
    }

    #[test]
    fn a_file_system_without_symlinks_is_named() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let from = tempfile::tempdir().unwrap();
        fs::os::unix::fs::symlink("target", from.path().join("link")).unwrap();
        let listing = Listing::of(from.path()).unwrap();
        // `/dev/pts` answers as FAT does.
        let mut writer = Writer::open(Path::new("/dev/pts"), false).unwrap();
        let link = Path::new("link");
        let error = writer.put(link, &listing.entries[link], None, Existing::Refuse);
        assert_has!(
            error.unwrap_err().message(),
            "`/dev/pts/link` is a symbolic link"
        );
    }
}
