//! Owns the one XFS ioctl that rockenv needs: waiting for the space of deleted files.

#![expect(
    unsafe_code,
    reason = "XFS is driven by ioctls, which nix can only declare as unsafe functions"
)]

use std::os::fd::{AsFd, AsRawFd as _};

/// What of the file system is looked through for space; zero is all of it.
#[repr(C)]
#[derive(Default)]
struct Blocks {
    version: u32,
    flags: u32,
    uid: u32,
    gid: u32,
    project: u32,
    padding: u32,
    min_file_size: u64,
    reserved: [u64; 12],
}

const VERSION: u32 = 1;

// The size is part of the ioctl number.
const _: () = assert!(size_of::<Blocks>() == 128);

mod ioctl {
    nix::ioctl_read!(free_eofblocks, b'X', 58, super::Blocks);
}

/// Waits until XFS has freed the files that were deleted before: a thread of the kernel does that later, and `syncfs`
/// does not wait for it. Does nothing on another file system, nor for an ordinary user.
pub(crate) fn wait_for_deleted(fd: impl AsFd) {
    let mut blocks = Blocks {
        version: VERSION,
        ..Blocks::default()
    };
    // SAFETY: the kernel reads a structure of the size that is part of the call's number.
    let freed = unsafe { ioctl::free_eofblocks(fd.as_fd().as_raw_fd(), &raw mut blocks) };
    // Without it, only the number of free bytes is late.
    freed.ok();
}
