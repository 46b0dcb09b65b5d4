//! Owns copying owner, mode, extended attributes and times, in the order that preserves all of them.
//!
//! A change of owner clears setuid bits and capabilities, an ACL contains a part of the mode, and changes of content
//! update the modification time. Hence: owner, mode, attributes, times.

use std::ffi::CStr;
use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{
    FchmodatFlags, FileStat, Mode, UtimensatFlags, fchmod, fchmodat, fstat, futimens, utimensat,
};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, fchown, fchownat, getegid};

use super::xattr::{Attributes, XattrFile};
use crate::sys::beneath;

fn owner(stat: &FileStat) -> (Option<Uid>, Option<Gid>) {
    (Some(stat.st_uid.into()), Some(stat.st_gid.into()))
}

fn mode(stat: &FileStat) -> Mode {
    Mode::from_bits_truncate(stat.st_mode)
}

fn times(stat: &FileStat) -> (TimeSpec, TimeSpec) {
    (
        TimeSpec::new(stat.st_atime, stat.st_atime_nsec),
        TimeSpec::new(stat.st_mtime, stat.st_mtime_nsec),
    )
}

/// Gives the open file or directory `to` the metadata of `from`, except attributes that are not `wanted`.
pub(super) fn copy_open(
    from: BorrowedFd<'_>,
    stat: &FileStat,
    to: BorrowedFd<'_>,
    attributes: &mut Attributes,
    wanted: impl Fn(&CStr) -> bool,
) -> nix::Result<()> {
    let (uid, gid) = owner(stat);
    // Most files already have the right owner, and a change costs a transaction on some file systems.
    let made = fstat(to)?;
    if (made.st_uid, made.st_gid) != (stat.st_uid, stat.st_gid) {
        fchown(to, uid, gid)?;
    }
    fchmod(to, mode(stat))?;
    attributes.copy(XattrFile::Open(from), XattrFile::Open(to), wanted)?;
    let (atime, mtime) = times(stat);
    futimens(to, &atime, &mtime)
}

/// Like [`copy_open`] for an entry `name` that cannot be opened: a symlink, device, FIFO or socket.
pub(super) fn copy_entry(
    from: BorrowedFd<'_>,
    stat: &FileStat,
    to: BorrowedFd<'_>,
    name: &[u8],
    attributes: &mut Attributes,
    wanted: impl Fn(&CStr) -> bool,
) -> nix::Result<()> {
    let (uid, gid) = owner(stat);
    fchownat(to, name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW)?;
    if beneath::kind(stat) != nix::sys::stat::SFlag::S_IFLNK {
        // Symlinks have no mode, and for other entries there is nothing to follow.
        fchmodat(to, name, mode(stat), FchmodatFlags::FollowSymlink)?;
    }
    let place = |directory| XattrFile::Entry(directory, name);
    attributes.copy(place(from), place(to), wanted)?;
    let (atime, mtime) = times(stat);
    utimensat(to, name, &atime, &mtime, UtimensatFlags::NoFollowSymlink)
}

/// Clears the ACLs and the group that a new directory inherits from its parent, so that its content does not inherit
/// them.
pub(super) fn clear_inherited(directory: BorrowedFd<'_>) -> nix::Result<()> {
    let made = fstat(directory)?;
    let inherited = mode(&made);
    if inherited.contains(Mode::S_ISGID) {
        fchown(directory, None, Some(getegid()))?;
        fchmod(directory, inherited.difference(Mode::S_ISGID))?;
    }
    let place = XattrFile::Open(directory);
    for name in [c"system.posix_acl_default", c"system.posix_acl_access"] {
        match place.remove(name) {
            Err(Errno::EACCES | Errno::EPERM) | Ok(()) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}
