//! Owns the `chattr` flags that protect a file from deletion.

use std::os::fd::BorrowedFd;

use nix::errno::Errno;
use rustix::fs::{IFlags, ioctl_getflags, ioctl_setflags};

use super::errno;

/// Clears immutable and append-only; returns the old flags if one was set, to [`restore`] them.
pub(super) fn make_deletable(fd: BorrowedFd<'_>) -> nix::Result<Option<IFlags>> {
    let protection = IFlags::APPEND | IFlags::IMMUTABLE;
    let flags = match errno(ioctl_getflags(fd)) {
        // A file system without flags. The caller tries again, and reports its own error.
        Err(Errno::ENOTTY | Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(None),
        flags => flags?,
    };
    if !flags.intersects(protection) {
        return Ok(None);
    }
    restore(fd, flags & !protection)?;
    Ok(Some(flags))
}

pub(super) fn restore(fd: BorrowedFd<'_>, flags: IFlags) -> nix::Result<()> {
    errno(ioctl_setflags(fd, flags))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_file_system_without_flags_protects_nothing() {
        let (pipe, _end) = nix::unistd::pipe().unwrap();
        assert_eq!(make_deletable(pipe.as_fd()), Ok(None));
    }
}
