//! Owns access to a directory in which other processes write too: examining a file, and moving a file to a free name.
//! Follows no links and replaces nothing.

use std::ffi::CString;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use crate::sys::error::{Result, ResultExt as _};
use crate::sys::{beneath, checksum};
use crate::tree;
use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::{OFlag, readlinkat};
use nix::sys::stat::{Mode, SFlag, mkdirat};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Kind {
    File,
    Executable,
    Link,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Seen {
    Absent,
    /// A file or a link, with the properties that are compared.
    Is {
        kind: Kind,
        size: u64,
        /// Digest of the file's content, or of the link's target.
        sha256: String,
    },
    Directory,
    /// A pipe, a socket or an unreadable file, none of which is ever sent.
    Other,
}

impl Seen {
    /// Returns the size of the file's content in bytes.
    pub(crate) fn size(&self) -> u64 {
        match self {
            Self::Is { size, .. } => *size,
            Self::Absent | Self::Directory | Self::Other => 0,
        }
    }
}

/// An open directory.
#[derive(Debug)]
pub(crate) struct Tree {
    path: PathBuf,
    fd: OwnedFd,
}

impl Tree {
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let file = fs::File::open(path)?;
        Ok(Self {
            path: path.to_owned(),
            fd: file.into_parts().0.into(),
        })
    }

    /// Examines `below`. Paths below a file or a link count as absent.
    pub(crate) fn stat(&self, below: &Path) -> Result<Seen> {
        let cannot = || format!("cannot look at `{}`", self.path.join(below).display());
        let (parent, name) = match self.parent(below) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) => return Ok(Seen::Absent),
            other => other.context(cannot)?,
        };
        let stat = match beneath::stat(&parent, name.as_c_str()) {
            Err(Errno::ENOENT) => return Ok(Seen::Absent),
            other => other.context(cannot)?,
        };
        let kind = beneath::kind(&stat);
        let state = |kind, size, sha256: [u8; 32]| {
            let sha256 = hex::encode(sha256);
            Seen::Is { kind, size, sha256 }
        };
        if kind == SFlag::S_IFDIR {
            return Ok(Seen::Directory);
        }
        if kind == SFlag::S_IFLNK {
            let to = readlinkat(&parent, name.as_c_str()).context(cannot)?;
            let sha256 = Sha256::digest(to.as_bytes()).into();
            return Ok(state(Kind::Link, to.len() as u64, sha256));
        }
        if kind != SFlag::S_IFREG {
            return Ok(Seen::Other);
        }
        let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
        let file = match nix::fcntl::openat(&parent, name.as_c_str(), flags, Mode::empty()) {
            Err(Errno::ENOENT) => return Ok(Seen::Absent),
            Err(Errno::EACCES | Errno::EPERM) => return Ok(Seen::Other),
            other => other.context(cannot)?,
        };
        let file = fs::File::from_parts(file.into(), self.path.join(below));
        let kind = match stat.st_mode & 0o100 {
            0 => Kind::File,
            _ => Kind::Executable,
        };
        let (sha256, size) = checksum::sha256(file)?;
        Ok(state(kind, size, sha256))
    }

    pub(crate) fn sync(&self, below: &Path) -> Result<()> {
        let path = self.path.join(below);
        match fs::symlink_metadata(&path)?.is_file() {
            true => Ok(fs::File::open(path)?.sync_data()?),
            false => Ok(()),
        }
    }

    /// Lists all entries below the directory `below`, except directories.
    pub(crate) fn leaves(&self, below: &Path) -> Result<Vec<PathBuf>> {
        let leaves = tree::leaves(&self.path.join(below))?.into_iter();
        Ok(leaves.map(|(path, _)| below.join(path)).collect())
    }

    /// Moves the entry at `below` to the same place in another tree on the same file system. Returns false if that
    /// place is taken.
    pub(crate) fn move_to(&self, below: &Path, to: &Self) -> Result<bool> {
        let shown = || {
            let [from, to] = [self, to].map(|tree| tree.path.join(below));
            format!("cannot move `{}` to `{}`", from.display(), to.display())
        };
        to.make_directories(below.parent()).context(shown)?;
        let (from_dir, name) = self.parent(below).context(shown)?;
        let (to_dir, _) = to.parent(below).context(shown)?;
        match beneath::rename_new(&from_dir, name.as_c_str(), &to_dir, name.as_c_str()) {
            Ok(()) => Ok(true),
            Err(Errno::EEXIST) => Ok(false),
            Err(error) => Err(error).context(shown),
        }
    }

    /// Creates the directory `below` and its parents.
    pub(crate) fn make(&self, below: &Path) -> Result<()> {
        let cannot = || format!("cannot make `{}`", self.path.join(below).display());
        self.make_directories(Some(below)).context(cannot)
    }

    fn make_directories(&self, below: Option<&Path>) -> nix::Result<()> {
        let mut at: Vec<&Path> = below.iter().flat_map(|below| below.ancestors()).collect();
        at.pop();
        for directory in at.into_iter().rev() {
            let (parent, name) = self.parent(directory)?;
            match mkdirat(&parent, name.as_c_str(), Mode::from_bits_truncate(0o755)) {
                Ok(()) | Err(Errno::EEXIST) => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn parent(&self, below: &Path) -> nix::Result<(OwnedFd, CString)> {
        let name = below.file_name().ok_or(Errno::EINVAL)?;
        let name = CString::new(name.to_owned().into_vec()).map_err(|_| Errno::EINVAL)?;
        let parent = beneath::parent(below);
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let parent = beneath::open_by(&self.fd, parent, flags, beneath::BELOW)?;
        Ok((parent, name))
    }
}
