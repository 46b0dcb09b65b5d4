//! Owns directory trees on disk: making, cloning, stacking, merging and removing them, by one of three methods that the
//! store's file system supports.

pub(crate) mod copy_tree;
pub mod digest;
pub mod measure;
pub(crate) mod root_fs;

pub(crate) mod acl;
pub mod btrfs;
mod btrfs_search;
pub(crate) mod file;
mod flatten;
mod inode_flags;
pub(crate) mod listing;
pub(crate) mod merged;
mod metadata;
pub(crate) mod mounts;
pub mod overlay;
mod probe;
mod reflink;
mod remove;
mod transfer;
pub(crate) mod work_queue;
pub(crate) mod writer;
pub(crate) mod xattr;
pub(crate) mod xfs;

use std::fmt;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use serde::{Deserialize, Serialize};

pub use flatten::flatten;
pub(crate) use mounts::{at_or_below as mounts_at_or_below, compresses};
pub use probe::probe;
pub use reflink::{Cloned, copy_tree};
pub use remove::remove_tree;

use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};

fn errno<T>(outcome: rustix::io::Result<T>) -> nix::Result<T> {
    outcome.map_err(|error| nix::Error::from_raw(error.raw_os_error()))
}

/// How a store keeps trees.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    /// A frozen layer is a directory of differences, stacked on the image by an overlay mount.
    Overlay,
    /// Trees are subvolumes; a clone is a snapshot.
    Btrfs,
    /// Trees are directories, cloned file by file with shared extents.
    Reflink,
}

impl Method {
    fn name(self) -> &'static str {
        match self {
            Self::Overlay => "overlay",
            Self::Btrfs => "btrfs",
            Self::Reflink => "reflink",
        }
    }
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Method {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [Self::Overlay, Self::Btrfs, Self::Reflink]
            .into_iter()
            .find(|method| method.name() == text)
            .ok_or_else(|| {
                invalid!("unknown store method `{text}`").help("one of: overlay, btrfs, reflink")
            })
    }
}

/// Returns the mount points at or below a path in this process's namespace; empty if the kernel does not report them.
pub(crate) fn mounts_below(path: &Path) -> Vec<PathBuf> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    mounts::at_or_below(&absolute).unwrap_or_default()
}

/// A mounted file system. Paths with equal values share its free space.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum FileSystem {
    /// Each subvolume has a device number of its own.
    Btrfs([u8; 16]),
    Device(u64),
}

impl FileSystem {
    /// Returns the file system that a path is on.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let found = fs_err::metadata(path)?;
        let id = match found.is_dir() {
            true => beneath::open_path(path).ok(),
            false => None,
        };
        let id = id.and_then(|fd| btrfs::file_system_id(fd.as_fd()).ok());
        Ok(id.map_or_else(|| Self::Device(found.dev()), Self::Btrfs))
    }
}

/// Makes an empty tree: a subvolume on btrfs, else a directory. It inherits no ACL from the store's directory, because
/// ACLs are part of a tree's content.
pub fn create_tree(method: Method, path: &Path) -> Result<()> {
    match method {
        Method::Btrfs => btrfs::create(path)?,
        Method::Overlay | Method::Reflink => fs_err::create_dir(path)?,
    }
    metadata::clear_inherited(beneath::open_path(path)?.as_fd())
        .context(|| format!("cannot prepare `{}`", path.display()))
}

/// Makes `to`, which must not exist, a writable clone of the tree `from`, and returns how.
///
/// On btrfs this is one snapshot, whatever the size: it is on disk when this returns, and has empty directories in
/// place of subvolumes nested in `from`. If `from` is a plain directory, and with the other methods, the clone is a
/// copy that shares extents if the file system can.
pub fn clone_tree(method: Method, from: &Path, to: &Path) -> Result<Cloned> {
    if method != Method::Btrfs {
        return copy_tree(from, to);
    }
    if btrfs::is_subvolume(from)? {
        btrfs::snapshot(from, to, false)?;
        return Ok(Cloned {
            snapshot: true,
            ..Cloned::default()
        });
    }
    btrfs::create(to)?;
    reflink::copy_into(from, to)
}

#[cfg(test)]
mod tests {
    use super::xattr::XattrFile;
    use super::*;

    #[test]
    fn a_new_tree_inherits_no_acl() {
        let store = tempfile::tempdir().unwrap();
        let directory = beneath::open_path(store.path()).unwrap();
        // Version 2, and all rights for the owner, the group and all others.
        let mut rights = vec![2_u8, 0, 0, 0];
        for tag in [0x01, 0x04, 0x20] {
            rights.extend([tag, 0, 7, 0, 0xff, 0xff, 0xff, 0xff]);
        }
        let place = XattrFile::Open(directory.as_fd());
        if place.set("system.posix_acl_default", &rights).is_err() {
            // The file system has no ACLs.
            return;
        }
        let path = store.path().join("tree");
        create_tree(Method::Reflink, &path).unwrap();
        let tree = beneath::open_path(&path).unwrap();
        assert_eq!(XattrFile::Open(tree.as_fd()).content().unwrap(), []);
    }
}
