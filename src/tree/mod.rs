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
pub(crate) mod transfer;
pub(crate) mod work_queue;
pub(crate) mod writer;
pub(crate) mod xattr;
pub(crate) mod xfs;

use std::fmt;
use std::fs::FileType;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

pub use flatten::flatten;
pub(crate) use mounts::compresses;
pub use probe::probe;
pub use reflink::copy_tree;
pub use remove::remove_tree;

use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _, exists};

fn errno<T>(outcome: rustix::io::Result<T>) -> nix::Result<T> {
    outcome.map_err(|error| nix::Error::from_raw(error.raw_os_error()))
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Method {
    #[default]
    /// A frozen layer is a directory of differences, stacked on the image by an overlay mount.
    Overlay,
    /// Trees are subvolumes; a clone is a snapshot.
    Btrfs,
    /// Trees are directories, cloned file by file with shared extents.
    Reflink,
}

impl fmt::Display for Method {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Overlay => "overlay",
            Self::Btrfs => "btrfs",
            Self::Reflink => "reflink",
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

/// Makes an empty tree: a subvolume on btrfs, else a directory. The tree inherits no ACL and no group from the store's
/// directory, because both are part of a tree's content.
pub fn create_tree(method: Method, path: &Path) -> Result<()> {
    match method {
        Method::Btrfs => btrfs::create(path)?,
        Method::Overlay | Method::Reflink => fs_err::create_dir(path)?,
    }
    metadata::clear_inherited(beneath::open_path(path)?.as_fd())
        .context(|| format!("cannot prepare `{}`", path.display()))
}

/// Creates a directory that belongs to a user. An existing directory keeps its owner, unless a command was killed
/// before it gave the directory away.
pub(crate) fn create_directory_for(path: &Path, uid: u32, gid: u32) -> Result<()> {
    // Until the directory has its owner, it has the sticky bit, which means something only if others may write there.
    const UNFINISHED: u32 = 0o1000;
    let is_unfinished = |found: &std::fs::Metadata| {
        found.mode() & 0o1002 == UNFINISHED && found.uid() == nix::unistd::geteuid().as_raw()
    };
    if fs_err::metadata(path).is_ok_and(|found| !is_unfinished(&found)) {
        return Ok(());
    }
    if let Some(parent) = path.parent() {
        fs_err::create_dir_all(parent)?;
    }
    let cannot = || format!("cannot make `{}`", path.display());
    let mut new = std::fs::DirBuilder::new();
    match new.mode(UNFINISHED | 0o775).create(path) {
        // Another command has just created it, or a killed one.
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.exists() => {}
        other => other.context(cannot)?,
    }
    // Another user may have put a link or a FIFO in its place by now.
    let made = beneath::open_real_dir(path)?;
    let found = made.metadata()?;
    if is_unfinished(&found) && fs_err::read_dir(path)?.next().is_none() {
        nix::unistd::fchown(made.file(), Some(uid.into()), Some(gid.into())).context(cannot)?;
        let mode = found.mode() & 0o7777 & !UNFINISHED;
        made.set_permissions(std::fs::Permissions::from_mode(mode))?;
    }
    Ok(())
}

/// Makes `to`, which must not exist, a writable clone of the tree `from`, and returns the number of bytes copied.
///
/// On btrfs this is one snapshot, whatever the size: it is on disk when this returns. If `from` is a plain directory or
/// contains subvolumes, which a snapshot lacks, and with the other methods, the clone is a copy that shares extents if
/// the file system can. Subvolumes in it become directories.
pub fn clone_tree(method: Method, from: &Path, to: &Path) -> Result<u64> {
    if method != Method::Btrfs {
        return copy_tree(from, to);
    }
    if btrfs::is_subvolume(from)? && !btrfs::has_nested(from)? {
        btrfs::snapshot(from, to, false)?;
        return Ok(0);
    }
    if btrfs::is_placeholder(from)? {
        return Err(not_found!(
            "`{}` is empty: a snapshot of the store does not contain the store's subvolumes",
            from.display()
        )
        .help("rockenv fsck --repair"));
    }
    btrfs::create(to)?;
    reflink::copy_into(from, to)
}

/// Returns whether a tree is there, and not just an empty directory that a snapshot of the store has in its place.
pub(crate) fn is_there(path: &Path) -> Result<bool> {
    Ok(exists(path)? && !btrfs::is_placeholder(path)?)
}

/// Returns everything below a directory except directories, with its type, sorted by path relative to the directory.
pub(crate) fn leaves(top: &Path) -> Result<Vec<(PathBuf, FileType)>> {
    let (mut found, mut left) = (Vec::new(), vec![PathBuf::new()]);
    while let Some(directory) = left.pop() {
        for entry in fs_err::read_dir(top.join(&directory))? {
            let entry = entry?;
            let (path, kind) = (directory.join(entry.file_name()), entry.file_type()?);
            match kind.is_dir() {
                true => left.push(path),
                false => found.push((path, kind)),
            }
        }
    }
    found.sort_by(|(one, _), (other, _)| one.cmp(other));
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::xattr::XattrFile;
    use super::*;

    #[test]
    fn commands_that_create_one_directory_at_once_all_get_it() {
        let directory = tempfile::tempdir().unwrap();
        let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
        for round in 0..200 {
            let path = directory.path().join(round.to_string());
            let start = Barrier::new(4);
            let make = || {
                start.wait();
                create_directory_for(&path, uid.as_raw(), gid.as_raw())
            };
            std::thread::scope(|scope| {
                let all: Vec<_> = (0..4).map(|_| scope.spawn(make)).collect();
                all.into_iter().for_each(|one| one.join().unwrap().unwrap());
            });
        }
    }

    #[test]
    fn a_directory_that_a_killed_command_did_not_give_away_gets_its_owner() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        for (name, mode, is_full, owner) in [
            ("new", None, false, 1234),
            ("killed", Some(0o1755), false, 1234),
            ("existing", Some(0o755), false, 0),
            ("shared", Some(0o1777), false, 0),
            ("full", Some(0o1755), true, 0),
        ] {
            let path = directory.path().join("parent").join(name);
            if let Some(mode) = mode {
                fs_err::create_dir_all(&path).unwrap();
                let mode = std::fs::Permissions::from_mode(mode);
                fs_err::set_permissions(&path, mode).unwrap();
            }
            if is_full {
                fs_err::create_dir(path.join("a")).unwrap();
            }
            create_directory_for(&path, 1234, 1234).unwrap();
            let found = fs_err::metadata(&path).unwrap();
            assert_eq!(found.uid(), owner, "{name}");
            if owner != 0 {
                assert_eq!(found.mode() & 0o1000, 0, "{name}");
            }
        }
    }

    #[test]
    fn a_new_tree_inherits_neither_group_nor_acl() {
        let store = tempfile::tempdir().unwrap();
        let group = nix::unistd::getegid().as_raw();
        if nix::unistd::geteuid().is_root() {
            std::os::unix::fs::chown(store.path(), None, Some(1234)).unwrap();
        }
        let of_a_team = std::fs::Permissions::from_mode(0o2755);
        fs_err::set_permissions(store.path(), of_a_team).unwrap();
        let path = store.path().join("of a team");
        create_tree(Method::Reflink, &path).unwrap();
        let found = fs_err::metadata(path).unwrap();
        assert_eq!((found.mode() & 0o2000, found.gid()), (0, group));
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
