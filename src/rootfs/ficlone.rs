//! Owns the one ioctl that makes a file share another's extents.

#![expect(unsafe_code, reason = "FICLONE is an ioctl")]

use std::os::fd::{AsRawFd as _, BorrowedFd};

mod ioctl {
    nix::ioctl_write_int!(ficlone, 0x94, 9);
}

/// Makes `to` share all of `from`'s extents, holes included; the previous content is replaced.
pub(super) fn clone_file(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> nix::Result<()> {
    let from =
        nix::libc::c_ulong::try_from(from.as_raw_fd()).map_err(|_| nix::errno::Errno::EBADF)?;
    // SAFETY: both descriptors are open for the length of the call, and the kernel accesses no memory of ours.
    unsafe { ioctl::ficlone(to.as_raw_fd(), from) }.map(drop)
}
