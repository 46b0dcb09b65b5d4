//! Owns single files of the calling user that the command line names, read and written with that user's rights.

use std::io::{ErrorKind, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag};
use nix::sys::stat::Mode;

use super::rights::{Rights, is_refusal};
use crate::sys::error::{Error, Result, ResultExt as _, named_path};
use crate::sys::{beneath, trusted_files};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Existing {
    Refuse,
    /// Replace it; a reader sees the old or the new file.
    Replace,
}

/// The location of a file, existing or not: an open directory and a name in it.
#[derive(Debug)]
pub(crate) struct FilePlace<'a> {
    rights: &'a Rights,
    parent: OwnedFd,
    parent_path: PathBuf,
    name: PathBuf,
    path: PathBuf,
}

impl<'a> FilePlace<'a> {
    /// Opens the directory of a file. Symlinks in its path belong to the user and are followed, with the user's rights.
    pub(crate) fn new(rights: &'a Rights, path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(usage!("`{}` is not the name of a file", path.display()));
        };
        // Other programs take it for standard output.
        if path == Path::new("-") {
            return Err(usage!("`-` is not the name of a file").help("name a file, such as ./FILE"));
        }
        let parent_path = beneath::parent(path);
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let parent = rights
            .open_named(parent_path, flags)
            .map_err(|errno| match is_refusal(errno) {
                true => rights.may_not_write(&format!("in `{}`", parent_path.display()), errno),
                false => named_path(parent_path)(errno.into())
                    .help("name a file in an existing directory"),
            })
            .context(|| format!("cannot write to `{}`", path.display()))?;
        Ok(Self {
            rights,
            parent,
            parent_path: parent_path.to_owned(),
            name: name.into(),
            path: path.to_owned(),
        })
    }

    /// Opens the file for reading; `None` if it is missing. Refuses anything but a regular file, including a symlink.
    pub(crate) fn open(&self) -> Result<Option<fs::File>> {
        match self.open_with(OFlag::O_RDONLY, Mode::empty()) {
            Err(Errno::ENOENT) => Ok(None),
            Err(Errno::ELOOP) => Err(self.no_file()),
            Err(errno @ Errno::EACCES) => Err(self.refused(errno)),
            other => {
                let file = other.context(|| format!("cannot read `{}`", self.path.display()))?;
                self.regular(file).map(Some)
            }
        }
    }

    /// Opens the file for reading and appending; creates a missing file.
    pub(crate) fn append(&self) -> Result<fs::File> {
        let flags = OFlag::O_RDWR | OFlag::O_APPEND | OFlag::O_CREAT;
        match self.open_with(flags, Mode::from_bits_truncate(0o666)) {
            // The name belongs to a link, a socket or a directory.
            Err(Errno::ELOOP | Errno::ENXIO | Errno::EISDIR) => Err(self.no_file()),
            Err(errno) => Err(self.refused(errno)),
            Ok(file) => self.regular(file),
        }
    }

    /// Writes the file atomically. A replaced file keeps its mode; a new one has the mode that the caller's umask
    /// leaves. If root writes for itself, the file gets the owner of the replaced file, or else of the directory.
    pub(crate) fn put(&self, bytes: &[u8], existing: Existing) -> Result<()> {
        let cannot = || format!("cannot write `{}`", self.path.display());
        let old = match existing {
            Existing::Refuse => None,
            Existing::Replace => self.open()?,
        };
        let (like, mode) = match &old {
            Some(old) => (old.file().as_fd(), old.metadata()?.mode() & 0o777),
            None => (self.parent.as_fd(), 0o666),
        };
        let owner = self.rights.owner_for_root_files(like).context(cannot)?;
        let id = crate::sys::atomic::random_id()?;
        let part = PathBuf::from(format!(".rockenv-{id}"));
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW;
        let (at, bits) = (self.parent.as_fd(), Mode::from_bits_truncate(mode));
        let resolve = ResolveFlag::RESOLVE_NO_SYMLINKS;
        let made = self.rights.open(Some(at), &part, flags, bits, resolve);
        let file = made.map_err(|errno| self.refused(errno))?;
        let write = || -> Result<()> {
            let mut file = fs::File::from_parts(file.into(), &self.path);
            file.write_all(bytes)?;
            if old.is_some() {
                file.set_permissions(std::fs::Permissions::from_mode(mode))?;
            }
            if let Some((uid, gid)) = owner {
                nix::unistd::fchown(&file, Some(uid.into()), Some(gid.into())).context(cannot)?;
            }
            file.sync_data()?;
            let replace = existing == Existing::Replace;
            match self.rights.rename(at, &part, &self.name, replace) {
                Err(Errno::EEXIST) => Err(self.exists("")),
                // In a directory with the sticky bit, the user cannot replace another user's file.
                other => other.map_err(|errno| self.refused(errno)),
            }
        };
        let written = write();
        if written.is_err() {
            // The first error is the one to report.
            self.rights.unlink(at, &part, false).ok();
        }
        written
    }

    pub(crate) fn remove(&self) -> Result<()> {
        self.rights
            .unlink(self.parent.as_fd(), &self.name, false)
            .context(|| format!("cannot remove `{}`", self.path.display()))
    }

    /// Makes the error for an existing file; `why` completes the sentence.
    pub(crate) fn exists(&self, why: &str) -> Error {
        usage!("`{}` already exists{why}", self.path.display())
    }

    fn open_with(&self, flags: OFlag, mode: Mode) -> nix::Result<OwnedFd> {
        let flags = flags | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
        let (at, resolve) = (self.parent.as_fd(), ResolveFlag::RESOLVE_NO_SYMLINKS);
        self.rights.open(Some(at), &self.name, flags, mode, resolve)
    }

    fn regular(&self, file: OwnedFd) -> Result<fs::File> {
        let file = fs::File::from_parts(file.into(), &self.path);
        match file.metadata()?.is_file() {
            true => Ok(file),
            false => Err(self.no_file()),
        }
    }

    fn no_file(&self) -> Error {
        self.exists(" and is not a regular file")
    }

    fn refused(&self, errno: Errno) -> Error {
        if is_refusal(errno) && self.rights.exists(self.parent.as_fd(), &self.name) {
            let file = format!("`{}`", self.path.display());
            return self.rights.may_not_write(&file, errno);
        }
        self.rights.refused(&self.parent_path, errno)
    }
}

/// Opens a file of the calling user for reading. A home on a network or FUSE file system may be closed to root, so the
/// user's rights are tried too.
pub(crate) fn open(path: &Path) -> std::io::Result<fs::File> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY;
    let opened = beneath::open_file(path, flags);
    let rights = super::caller();
    match opened {
        Err(error)
            if error.kind() == ErrorKind::PermissionDenied && matches!(rights, Rights::Of(..)) =>
        {
            let opened = rights
                .open_named(path, flags)
                .map_err(|errno| match errno {
                    Errno::EACCES => error,
                    other => other.into(),
                })?;
            Ok(fs::File::from_parts(opened.into(), path))
        }
        opened => opened,
    }
}

/// Returns whether the calling user has no file at this path, even in a directory that is closed to root.
pub(crate) fn is_missing(path: &Path) -> bool {
    let found = super::caller().open_named(path, OFlag::O_PATH);
    matches!(found, Err(Errno::ENOENT | Errno::ENOTDIR))
}

/// Makes a directory and missing parents. If root acts for itself, each gets the owner of its parent, like the files
/// that root then writes there.
pub(crate) fn make_directories(rights: &Rights, path: &Path) -> Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
    if rights.open_named(path, flags).is_ok() {
        return Ok(());
    }
    if let Some(parent) = path
        .parent()
        .filter(|parent| !parent.as_os_str().is_empty())
    {
        make_directories(rights, parent)?;
    }
    let place = FilePlace::new(rights, path)?;
    let mode = Mode::from_bits_truncate(0o777);
    match rights.make_directory(place.parent.as_fd(), &place.name, mode) {
        Err(Errno::EEXIST) => return Err(place.exists(" and is not a directory")),
        other => other.map_err(|errno| place.refused(errno))?,
    }
    let cannot = || format!("cannot make `{}`", path.display());
    let owner = rights.owner_for_root_files(place.parent.as_fd());
    if let Some((uid, gid)) = owner.context(cannot)? {
        let made = beneath::open_dir(&place.parent, &place.name).context(cannot)?;
        let found = nix::sys::stat::fstat(&made).context(cannot)?;
        // By now, another directory may have this name: only an empty one is given away.
        let inside = fs::read_dir(beneath::path_of(&made))?.next();
        if inside.is_none() && (found.st_uid, found.st_gid) != (uid, gid) {
            nix::unistd::fchown(&made, Some(uid.into()), Some(gid.into())).context(cannot)?;
        }
    }
    Ok(())
}

/// Resolves a path, following links with the user's rights; returns a missing path unchanged.
pub(crate) fn resolved(rights: &Rights, path: &Path) -> PathBuf {
    let resolve = ResolveFlag::RESOLVE_NO_MAGICLINKS;
    let found = rights.open(None, path, OFlag::O_PATH, Mode::empty(), resolve);
    let resolved = found.ok().and_then(|fd| trusted_files::real(&fd).ok());
    resolved.unwrap_or_else(|| path.to_owned())
}
