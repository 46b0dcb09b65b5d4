//! Owns the btrfs ioctls: subvolumes, snapshots, deletion including nested subvolumes, and changes since a snapshot.
//!
//! A snapshot does not include the subvolumes nested in its source: it has an empty directory in their place.

#![expect(
    unsafe_code,
    reason = "btrfs is driven by ioctls, which nix can only declare as unsafe functions"
)]

use std::collections::{BTreeSet, HashSet};
use std::ffi::CStr;
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::statfs::{BTRFS_SUPER_MAGIC, fstatfs};

use super::btrfs_search::{EXTENT_DATA, Key, Search};
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

/// The inode number of the root directory of every subvolume.
const SUBVOLUME_ROOT: u64 = 256;
/// The inode number of the empty directory that a snapshot has in place of each subvolume nested in its source.
const PLACEHOLDER: u64 = 2;
const SNAPSHOT_READ_ONLY: u64 = 1 << 1;
/// The parent UUID of a subvolume that is not a snapshot.
const NO_PARENT: [u8; 16] = [0; 16];
const DESTROY_BY_ID: u64 = 1 << 4;

#[repr(C)]
struct Args {
    fd: i64,
    name: [u8; 4088],
}

#[repr(C)]
struct ArgsV2 {
    fd: i64,
    transid: u64,
    flags: u64,
    unused: [u64; 4],
    /// A name, or a subvolume id in the first eight bytes.
    name: [u8; 4040],
}

#[repr(C)]
struct Info {
    id: u64,
    name: [u8; 256],
    parent_id: u64,
    directory_id: u64,
    generation: u64,
    flags: u64,
    uuid: [u8; 16],
    parent_uuid: [u8; 16],
    received_uuid: [u8; 16],
    transids: [u64; 4],
    /// Times and reserved space.
    rest: [u64; 16],
}

impl Info {
    /// Returns the generation at which one of two subvolumes became a snapshot of the other; `None` if neither is.
    fn snapshot_at(&self, other: &Self) -> Option<u64> {
        let mut pairs = [(self, other), (other, self)].into_iter();
        // The top level of a file system of an old mkfs has a UUID of zeros, like the parent of no snapshot.
        let found =
            pairs.find(|(new, old)| new.parent_uuid != NO_PARENT && new.parent_uuid == old.uuid);
        found.map(|(new, _)| new.transids[1])
    }
}

#[repr(C)]
struct FsInfo {
    max_id: u64,
    devices: u64,
    id: [u8; 16],
    rest: [u64; 124],
}

#[repr(C)]
struct RootRefs {
    min_id: u64,
    refs: [(u64, u64); 255],
    count: u8,
    align: [u8; 7],
}

// The ioctl numbers contain these sizes: a wrong one fails with ENOTTY on every machine.
const _: () = assert!(size_of::<Args>() == 4096);
const _: () = assert!(size_of::<ArgsV2>() == 4096);
const _: () = assert!(size_of::<Info>() == 504);
const _: () = assert!(size_of::<RootRefs>() == 4096);
const _: () = assert!(size_of::<FsInfo>() == 1024);

mod ioctl {
    use super::{Args, ArgsV2, FsInfo, Info, RootRefs};
    nix::ioctl_none!(sync, 0x94, 8);
    nix::ioctl_write_ptr!(subvolume_create, 0x94, 14, Args);
    nix::ioctl_write_ptr!(destroy, 0x94, 15, Args);
    nix::ioctl_write_ptr!(snapshot, 0x94, 23, ArgsV2);
    nix::ioctl_read!(get_flags, 0x94, 25, u64);
    nix::ioctl_write_ptr!(set_flags, 0x94, 26, u64);
    nix::ioctl_read!(fs_info, 0x94, 31, FsInfo);
    nix::ioctl_read!(info, 0x94, 60, Info);
    nix::ioctl_readwrite!(root_refs, 0x94, 61, RootRefs);
    nix::ioctl_write_ptr!(destroy_v2, 0x94, 63, ArgsV2);
}

pub fn is_btrfs(fd: impl AsFd) -> nix::Result<bool> {
    Ok(fstatfs(fd)?.filesystem_type() == BTRFS_SUPER_MAGIC)
}

/// Returns the id of the btrfs that `fd` is on, the same in all its subvolumes.
pub(super) fn file_system_id(fd: BorrowedFd<'_>) -> nix::Result<[u8; 16]> {
    if !is_btrfs(fd)? {
        return Err(Errno::ENOTTY);
    }
    // SAFETY: `FsInfo` is integers and arrays of integers, for which all zeros is a valid value.
    let mut info: Box<FsInfo> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: `info` is valid for writes of the size in the ioctl number.
    unsafe { ioctl::fs_info(fd.as_raw_fd(), &raw mut *info) }?;
    Ok(info.id)
}

pub fn is_subvolume_fd(fd: impl AsFd) -> nix::Result<bool> {
    let stat = nix::sys::stat::fstat(&fd)?;
    Ok(stat.st_ino == SUBVOLUME_ROOT && is_btrfs(fd)?)
}

pub fn is_subvolume(path: &Path) -> Result<bool> {
    is_subvolume_fd(beneath::open_path(path)?)
        .context(|| format!("cannot examine `{}`", path.display()))
}

/// Returns whether a directory only takes the place of a subvolume, whose content the snapshot around it lacks.
pub(super) fn is_placeholder(path: &Path) -> Result<bool> {
    Ok(fs_err::metadata(path)?.ino() == PLACEHOLDER && is_btrfs(beneath::open_path(path)?)?)
}

pub(super) fn has_nested(path: &Path) -> Result<bool> {
    let fd = beneath::open_path(path)?;
    let found = nested(fd.as_fd()).context(|| format!("cannot examine `{}`", path.display()))?;
    Ok(!found.is_empty())
}

pub fn create(path: &Path) -> Result<()> {
    let (parent, name) = beneath::split(path)?;
    let args = Args {
        fd: 0,
        name: padded(&name)?,
    };
    // SAFETY: `args` is a complete structure of the size in the ioctl number and outlives the call.
    unsafe { ioctl::subvolume_create(parent.as_raw_fd(), &raw const args) }
        .context(|| format!("cannot create the btrfs subvolume `{}`", path.display()))?;
    Ok(())
}

/// Makes `to` a snapshot of the subvolume `from`, in one transaction that is on disk when this returns.
pub fn snapshot(from: &Path, to: &Path, read_only: bool) -> Result<()> {
    let source = beneath::open_path(from)?;
    let (parent, name) = beneath::split(to)?;
    let args = ArgsV2 {
        fd: i64::from(source.as_raw_fd()),
        transid: 0,
        flags: if read_only { SNAPSHOT_READ_ONLY } else { 0 },
        unused: [0; 4],
        name: padded(&name)?,
    };
    // SAFETY: `args` is a complete structure of the size in the ioctl number; it and `source` outlive the call.
    unsafe { ioctl::snapshot(parent.as_raw_fd(), &raw const args) }.context(|| {
        format!(
            "cannot snapshot the btrfs subvolume `{}` as `{}`",
            from.display(),
            to.display()
        )
    })?;
    Ok(())
}

/// Returns whether two subvolumes differ in content, ignoring access times. One must be a snapshot of the other; if
/// `other` is the snapshot, it must have been read-only since.
///
/// Every change to a file's content, names or attributes updates its inode. The kernel reports the inodes written since
/// the snapshot, and each must be equal in the other subvolume. Flushes unwritten data to disk first. Unrelated
/// subvolumes count as different, and so do directories, which a copied store has in their place.
pub fn differs(path: &Path, other: &Path) -> Result<bool> {
    differs_except(path, other, &BTreeSet::new())
}

/// Like [`differs`], ignoring the inodes in `except`.
pub(crate) fn differs_except(path: &Path, other: &Path, except: &BTreeSet<u64>) -> Result<bool> {
    let (fd, other_fd) = (beneath::open_path(path)?, beneath::open_path(other)?);
    let look = || {
        // Inodes are written when a transaction is committed.
        nix::unistd::syncfs(&fd)?;
        let (own, theirs) = (info(fd.as_fd())?, info(other_fd.as_fd())?);
        match own.snapshot_at(&theirs) {
            Some(made) => inodes_differ(fd.as_fd(), made, other_fd.as_fd(), except),
            None => Ok(true),
        }
    };
    look().context(|| {
        format!(
            "cannot compare the btrfs subvolumes `{}` and `{}`",
            path.display(),
            other.display()
        )
    })
}

/// Returns the disk space of file data written to the subvolume since its creation.
///
/// Excludes data shared with its source, and deleted data. Flushes unwritten data to disk first. The time taken grows
/// with the amount written, not with the size of the tree.
pub fn written(path: &Path) -> Result<u64> {
    let fd = beneath::open_path(path)?;
    let read = || {
        // Extents are allocated at writeback.
        nix::unistd::syncfs(&fd)?;
        let info = info(fd.as_fd())?;
        // Creating a snapshot commits, so later data has a higher generation. An empty subvolume has no older data.
        let made = match info.parent_uuid {
            NO_PARENT => info.transids[1].saturating_sub(1),
            _ => info.transids[1],
        };
        extents_since(fd.as_fd(), made)
    };
    read().context(|| {
        format!(
            "cannot read what was written to the btrfs subvolume `{}`",
            path.display()
        )
    })
}

const INODE_ITEM: u32 = 1;
const ANSWER: usize = 4096;

/// Returns whether any inode of a subvolume newer than `generation` differs from the other subvolume's, or is missing
/// there.
fn inodes_differ(
    fd: BorrowedFd<'_>,
    generation: u64,
    other: BorrowedFd<'_>,
    except: &BTreeSet<u64>,
) -> nix::Result<bool> {
    let mut search = Search::<ANSWER>::new(Key {
        objectid: [SUBVOLUME_ROOT, u64::MAX],
        // Lets the kernel skip older branches of the tree.
        generation: [generation + 1, u64::MAX],
        kind: [INODE_ITEM; 2],
        ..Key::default()
    });
    loop {
        search.run(fd, u32::MAX)?;
        let mut last = None;
        for item in search.items() {
            last = Some(item.inode);
            // A new branch contains old inodes too. Other items are skipped: each change updates the inode too.
            if item.kind == INODE_ITEM
                && number(item.body, 8) > generation
                && !except.contains(&item.inode)
                && inode(other, item.inode)?.as_deref() != Some(&without_access(item.body)[..])
            {
                return Ok(true);
            }
        }
        match last {
            Some(last) => search.key.objectid[0] = last.saturating_add(1),
            None => return Ok(false),
        }
    }
}

/// Returns an inode of a subvolume, without the fields that an access changes.
fn inode(fd: BorrowedFd<'_>, object: u64) -> nix::Result<Option<Vec<u8>>> {
    let mut search = Search::<ANSWER>::new(Key {
        objectid: [object; 2],
        kind: [INODE_ITEM; 2],
        ..Key::default()
    });
    search.run(fd, 1)?;
    let found = search.items().next();
    Ok(found.map(|item| without_access(item.body)))
}

/// Returns an inode with its transaction and access time zeroed.
fn without_access(item: &[u8]) -> Vec<u8> {
    let mut item = item.to_vec();
    for range in [8..16, 112..124] {
        if let Some(bytes) = item.get_mut(range) {
            bytes.fill(0);
        }
    }
    item
}

/// Adds up the file extents of a subvolume that are newer than the generation.
fn extents_since(fd: BorrowedFd<'_>, generation: u64) -> nix::Result<u64> {
    let mut search = Search::<ANSWER>::new(Key {
        // Lets the kernel skip older branches of the tree.
        generation: [generation + 1, u64::MAX],
        kind: [EXTENT_DATA; 2],
        ..Key::default()
    });
    let mut seen = HashSet::new();
    let mut total = 0;
    loop {
        search.run(fd, u32::MAX)?;
        let mut next = None;
        for item in search.items() {
            next = Some(match (item.kind < EXTENT_DATA, item.offset) {
                // An inode's extents sort after its items of lower types.
                (true, _) => (item.inode, 0),
                (false, u64::MAX) => (item.inode.saturating_add(1), 0),
                (false, offset) => (item.inode, offset + 1),
            });
            // A `btrfs_file_extent_item`. A new branch also contains old items and items of other types.
            let body = item.body;
            if item.kind == EXTENT_DATA && number(body, 0) > generation {
                total += match body.get(20) {
                    // Inline: the content follows.
                    Some(0) => body.len() as u64 - 21,
                    // A hole has no address on disk; references to parts of one extent have the same address.
                    _ if number(body, 21) != 0 && seen.insert(number(body, 21)) => number(body, 29),
                    _ => 0,
                };
            }
        }
        let Some(next) = next else {
            return Ok(total);
        };
        (search.key.objectid[0], search.key.offset[0]) = next;
    }
}

/// Reads a little-endian number; zero if it is out of bounds.
fn number(bytes: &[u8], at: usize) -> u64 {
    let found = bytes
        .get(at..at + 8)
        .and_then(|bytes| bytes.try_into().ok());
    found.map_or(0, u64::from_le_bytes)
}

/// Deletes the subvolume `name` of `parent` with all subvolumes nested in it, innermost first, and returns their
/// number. Each disappears immediately; the kernel frees the space in the background.
///
/// Finds nested subvolumes by btrfs's own references and deletes them by id, not by path: no mount or link placed
/// inside can redirect the deletion. An ordinary user gets `EPERM`, and nothing is deleted, unless the subvolume
/// contains no other and the file system is mounted with `user_subvol_rm_allowed`.
pub(super) fn destroy(parent: BorrowedFd<'_>, name: &CStr) -> nix::Result<()> {
    let top = beneath::open_dir(parent, name)?;
    if !is_subvolume_fd(&top)? {
        return Err(Errno::EINVAL);
    }
    // Parents come before their children, so the reverse order is innermost first.
    let mut ids = Vec::new();
    let mut queue = vec![info(top.as_fd())?.id];
    while let Some(id) = queue.pop() {
        let subvolume = match open_by_id(top.as_fd(), id) {
            Err(Errno::EPERM) if ids.is_empty() && nested(top.as_fd())?.is_empty() => {
                top.try_clone().map_err(|_| Errno::EMFILE)?
            }
            other => other?,
        };
        // A read-only subvolume refuses deletions inside it.
        make_writable(subvolume.as_fd())?;
        queue.extend(nested(subvolume.as_fd())?);
        ids.push(id);
    }
    for &id in ids.iter().skip(1).rev() {
        let mut args = ArgsV2 {
            fd: 0,
            transid: 0,
            flags: DESTROY_BY_ID,
            unused: [0; 4],
            name: [0; 4040],
        };
        args.name[..8].copy_from_slice(&id.to_ne_bytes());
        // SAFETY: `args` is a complete structure of the size in the ioctl number and outlives the call.
        unsafe { ioctl::destroy_v2(top.as_raw_fd(), &raw const args) }?;
    }
    drop(top);
    let args = Args {
        fd: 0,
        name: padded(name).map_err(|_| Errno::ENAMETOOLONG)?,
    };
    // SAFETY: `args` is a complete structure of the size in the ioctl number and outlives the call.
    unsafe { ioctl::destroy(parent.as_raw_fd(), &raw const args) }?;
    Ok(())
}

/// Makes the subvolume of `fd` writable, so that it can be emptied.
pub(super) fn make_writable(fd: BorrowedFd<'_>) -> nix::Result<()> {
    let mut flags = 0;
    // SAFETY: `flags` is a valid place for the integer that the kernel writes.
    unsafe { ioctl::get_flags(fd.as_raw_fd(), &raw mut flags) }?;
    if flags & SNAPSHOT_READ_ONLY != 0 {
        flags &= !SNAPSHOT_READ_ONLY;
        // SAFETY: `flags` is an integer that outlives the call.
        unsafe { ioctl::set_flags(fd.as_raw_fd(), &raw const flags) }?;
    }
    Ok(())
}

/// Waits until the kernel has freed the space of deleted subvolumes, up to a time limit.
pub fn wait_for_deleted(fd: impl AsFd, patience: Duration) -> Result<()> {
    let fd = fd.as_fd();
    let started = Instant::now();
    let wait = || {
        loop {
            // Checked before the call, which completes everything freed so far and wakes the kernel's cleaner.
            let last = !has_deleted(fd)? || started.elapsed() > patience;
            // SAFETY: the call has no argument.
            unsafe { ioctl::sync(fd.as_raw_fd()) }?;
            if last {
                return Ok(());
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    };
    let outcome: nix::Result<()> = wait();
    outcome.context(|| "cannot wait for btrfs to free deleted subvolumes".to_owned())
}

/// Returns whether the file system has a deleted subvolume that is not freed yet; false if the caller may not know.
fn has_deleted(fd: BorrowedFd<'_>) -> nix::Result<bool> {
    const ROOT_TREE: u64 = 1;
    const ORPHANS: u64 = u64::MAX - 4;
    const ORPHAN_ITEM: u32 = 48;
    let mut search = Search::<ANSWER>::new(Key {
        tree: ROOT_TREE,
        objectid: [ORPHANS; 2],
        kind: [ORPHAN_ITEM; 2],
        ..Key::default()
    });
    match search.run(fd, 1) {
        Err(Errno::EPERM) => Ok(false),
        other => other.map(|()| search.items().next().is_some()),
    }
}

fn info(fd: BorrowedFd<'_>) -> nix::Result<Box<Info>> {
    // SAFETY: `Info` is integers and arrays of integers, for which all zeros is a valid value.
    let mut info: Box<Info> = Box::new(unsafe { std::mem::zeroed() });
    // SAFETY: `info` is valid for writes of the size in the ioctl number.
    unsafe { ioctl::info(fd.as_raw_fd(), &raw mut *info) }?;
    Ok(info)
}

/// Returns the ids of the subvolumes directly nested in the subvolume of `fd`.
fn nested(fd: BorrowedFd<'_>) -> nix::Result<Vec<u64>> {
    let mut ids = Vec::new();
    let mut args = Box::new(RootRefs {
        min_id: 0,
        refs: [(0, 0); 255],
        count: 0,
        align: [0; 7],
    });
    loop {
        // SAFETY: `args` is a valid structure of the size in the ioctl number, which the kernel reads and fills.
        let more = match unsafe { ioctl::root_refs(fd.as_raw_fd(), &raw mut *args) } {
            Ok(_) => false,
            // The list is full; the kernel has set `min_id` to where it continues.
            Err(Errno::EOVERFLOW) => true,
            Err(error) => return Err(error),
        };
        ids.extend(args.refs[..usize::from(args.count)].iter().map(|r| r.0));
        if !more {
            return Ok(ids);
        }
    }
}

/// Opens the root directory of a subvolume by its id, anywhere in the file system of `fd`.
fn open_by_id(fd: BorrowedFd<'_>, id: u64) -> nix::Result<OwnedFd> {
    /// `struct btrfs_fid` without a parent, after the kernel's `struct file_handle`.
    #[repr(C)]
    struct Handle {
        bytes: u32,
        kind: i32,
        inode: [u8; 8],
        root: [u8; 8],
        generation: [u8; 4],
    }
    let mut handle = Handle {
        bytes: 20,
        kind: 0x4d,
        inode: SUBVOLUME_ROOT.to_ne_bytes(),
        root: id.to_ne_bytes(),
        generation: [0; 4],
    };
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    // SAFETY: `handle` has the layout of `struct file_handle` followed by the `bytes` it announces.
    let opened = unsafe {
        nix::libc::open_by_handle_at(fd.as_raw_fd(), (&raw mut handle).cast(), flags.bits())
    };
    let opened = Errno::result(opened)?;
    // SAFETY: the call above returned a new descriptor that nothing else owns.
    Ok(unsafe { OwnedFd::from_raw_fd(opened) })
}

fn padded<const N: usize>(name: &CStr) -> Result<[u8; N]> {
    let bytes = name.to_bytes();
    if bytes.len() >= N {
        return Err(unexpected!(
            "`{}` is too long for the name of a subvolume",
            name.to_string_lossy()
        ));
    }
    let mut padded = [0; N];
    padded[..bytes.len()].copy_from_slice(bytes);
    Ok(padded)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_snapshot_has_a_source() {
        // SAFETY: `Info` is integers and arrays of integers, for which all zeros is a valid value.
        let [mut old, mut new]: [Info; 2] = unsafe { std::mem::zeroed() };
        // Two directories in the top level of a file system of an old mkfs.
        assert_eq!(new.snapshot_at(&old), None);
        old.uuid = [1; 16];
        assert_eq!(new.snapshot_at(&old), None);
        (new.parent_uuid, new.transids[1]) = ([1; 16], 7);
        let found = [new.snapshot_at(&old), old.snapshot_at(&new)];
        assert_eq!(found, [Some(7); 2]);
    }
}
