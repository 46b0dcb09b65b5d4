//! Owns the `chattr` flags that protect a file from deletion.

#![expect(unsafe_code, reason = "inode flags are read and written by ioctls")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::libc::{c_int, c_long};

const APPEND_ONLY: c_int = 0x20;
const IMMUTABLE: c_int = 0x10;

mod ioctl {
    use super::{c_int, c_long};
    // The numbers are defined with `long`, but the kernel transfers an `int`.
    nix::ioctl_read_bad!(
        get,
        nix::request_code_read!(b'f', 1, size_of::<c_long>()),
        c_int
    );
    nix::ioctl_write_ptr_bad!(
        set,
        nix::request_code_write!(b'f', 2, size_of::<c_long>()),
        c_int
    );
}

/// Clears immutable and append-only; returns the old flags if one was set, to [`restore`] them.
pub(super) fn make_deletable(fd: BorrowedFd<'_>) -> nix::Result<Option<c_int>> {
    let mut flags = 0;
    // SAFETY: `flags` is a valid place for the integer that the kernel writes.
    unsafe { ioctl::get(fd.as_raw_fd(), &raw mut flags) }?;
    if flags & (APPEND_ONLY | IMMUTABLE) == 0 {
        return Ok(None);
    }
    restore(fd, flags & !(APPEND_ONLY | IMMUTABLE))?;
    Ok(Some(flags))
}

pub(super) fn restore(fd: BorrowedFd<'_>, flags: c_int) -> nix::Result<()> {
    // SAFETY: `flags` is an integer that outlives the call.
    unsafe { ioctl::set(fd.as_raw_fd(), &raw const flags) }.map(drop)
}
