//! Owns waiting for descriptors to become readable.

use std::os::fd::BorrowedFd;
use std::time::Duration;

use nix::errno::Errno;
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};

/// Waits until one of the descriptors is readable or at its end, at most for `limit`. Returns which of them are.
pub(crate) fn readable<const N: usize>(
    descriptors: [Option<BorrowedFd<'_>>; N],
    limit: Option<Duration>,
) -> nix::Result<[bool; N]> {
    let given: Vec<BorrowedFd<'_>> = descriptors.iter().flatten().copied().collect();
    let mut ready = which_readable(&given, limit)?.into_iter();
    Ok(descriptors.map(|descriptor| descriptor.is_some() && ready.next() == Some(true)))
}

/// Does the same for any number of descriptors.
pub(crate) fn which_readable(
    descriptors: &[BorrowedFd<'_>],
    limit: Option<Duration>,
) -> nix::Result<Vec<bool>> {
    let mut fds: Vec<PollFd<'_>> = descriptors
        .iter()
        .map(|fd| PollFd::new(*fd, PollFlags::POLLIN))
        .collect();
    // Rounds up to avoid spinning through the last millisecond.
    let timeout = limit.map_or(PollTimeout::NONE, |limit| {
        PollTimeout::try_from(limit.as_nanos().div_ceil(1_000_000)).unwrap_or(PollTimeout::MAX)
    });
    while let Err(error) = poll(&mut fds, timeout) {
        if error != Errno::EINTR {
            return Err(error);
        }
    }
    Ok(fds.iter().map(|fd| fd.any().unwrap_or(true)).collect())
}
