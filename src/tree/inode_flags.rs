//! Owns the `chattr` flags that protect a file from deletion.

use std::os::fd::BorrowedFd;

use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::errno;

/// Clears immutable and append-only; returns the old flags if one was set, to [`restore`] them.
pub(super) fn make_deletable(fd: BorrowedFd<'_>) -> nix::Result<Option<IFlags>> {
    let protection = IFlags::APPEND | IFlags::IMMUTABLE;
    let flags = errno(ioctl_getflags(fd))?;
    if !flags.intersects(protection) {
        return Ok(None);
    }
    restore(fd, flags & !protection)?;
    Ok(Some(flags))
}

pub(super) fn restore(fd: BorrowedFd<'_>, flags: IFlags) -> nix::Result<()> {
    errno(ioctl_setflags(fd, flags))
}
