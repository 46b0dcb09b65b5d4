//! Owns the one XFS ioctl that rockenv needs: waiting for the space of deleted files.

#![expect(
    unsafe_code,
    reason = "XFS is driven by ioctls, which nix can only declare as unsafe functions"
)]

use std::os::fd::{AsFd, AsRawFd as _};

/// Selects which files to free blocks of; all zeros selects everything.
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

// The ioctl number contains this size.
const _: () = assert!(size_of::<Blocks>() == 128);

mod ioctl {
    nix::ioctl_read!(free_eofblocks, b'X', 58, super::Blocks);
}

/// Waits until XFS has freed the files deleted so far: a kernel thread does that in the background, and `syncfs` does
/// not wait for it. Does nothing on another file system, or for an ordinary user.
pub(crate) fn wait_for_deleted(fd: impl AsFd) {
    let mut blocks = Blocks {
        version: VERSION,
        ..Blocks::default()
    };
    // SAFETY: the kernel reads a structure of the size in the ioctl number.
    let freed = unsafe { ioctl::free_eofblocks(fd.as_fd().as_raw_fd(), &raw mut blocks) };
    // On failure, only the number of free bytes is late.
    freed.ok();
}
