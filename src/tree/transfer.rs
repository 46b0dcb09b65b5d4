//! Owns transferring a file's content: by shared extents if possible, else by copying, including holes.

use std::os::fd::BorrowedFd;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::errno::Errno;
use nix::fcntl::copy_file_range;
use nix::libc::off_t;
use nix::sys::stat::fstat;
use nix::sys::uio::pwrite;
use nix::unistd::{Whence, ftruncate, lseek};

use super::errno;
use super::root_fs::read_at;

/// Makes `to` share all of `from`'s extents, including holes; replaces its previous content.
pub(super) fn share(from: BorrowedFd<'_>, to: BorrowedFd<'_>) -> nix::Result<()> {
    errno(rustix::fs::ioctl_ficlone(to, from))
}

/// Transfers content between one pair of file systems, and remembers which operations they lack.
#[derive(Debug, Default)]
pub(super) struct Transport {
    cannot_share: AtomicBool,
}

impl Transport {
    /// Gives the empty file `to` the `size` bytes of `from`. Returns the number of bytes copied, without holes: zero
    /// for shared extents.
    pub(super) fn transfer(
        &self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        size: off_t,
    ) -> nix::Result<u64> {
        let may_share = !self.cannot_share.load(Ordering::Relaxed);
        match may_share && self.has_shared(share(from, to), to, size)? {
            true => Ok(0),
            false => copy(from, to, size),
        }
    }

    /// Returns whether an attempt gave `to` all extents of a file with `size` bytes. If it failed because of a damaged
    /// or full disk, copying fails for the same reason.
    fn has_shared(
        &self,
        attempt: nix::Result<()>,
        to: BorrowedFd<'_>,
        size: off_t,
    ) -> nix::Result<bool> {
        match attempt {
            // ZFS before 2.2.3 reports success when the end of the file is not on disk yet, and leaves it out.
            Ok(()) => Ok(fstat(to)?.st_size >= size),
            Err(Errno::EOPNOTSUPP | Errno::EXDEV | Errno::ENOTTY | Errno::ENOSYS) => {
                self.cannot_share.store(true, Ordering::Relaxed);
                Ok(false)
            }
            // This file alone cannot share: it is a swap file or excluded from copy-on-write, or ZFS has not written
            // it to disk yet (`EAGAIN`).
            Err(_) => Ok(false),
        }
    }
}

/// Copies the data between the holes; returns the number of bytes.
fn copy(from: BorrowedFd<'_>, to: BorrowedFd<'_>, size: off_t) -> nix::Result<u64> {
    ftruncate(to, size)?;
    let mut copied = 0;
    let mut at = 0;
    while let Some((start, end)) = next_data(from, at, size)? {
        copied += copy_range(from, to, start, end)?;
        at = end;
    }
    // A source that became shorter meanwhile would leave zeros at the end of the copy.
    match fstat(from)?.st_size < size {
        true => Err(Errno::EAGAIN),
        false => Ok(copied),
    }
}

/// Returns the beginning and the end of the next data of a file, from offset `at` on; `None` if the rest up to `size`
/// is a hole.
pub(crate) fn next_data(
    file: BorrowedFd<'_>,
    at: off_t,
    size: off_t,
) -> nix::Result<Option<(off_t, off_t)>> {
    if at >= size {
        return Ok(None);
    }
    let (start, end) = match lseek(file, at, Whence::SeekData) {
        Ok(start) => (start, lseek(file, start, Whence::SeekHole)?.min(size)),
        Err(Errno::ENXIO) => return Ok(None),
        // The file system has no hole detection.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP) => (at, size),
        Err(error) => return Err(error),
    };
    Ok((start < end).then_some((start, end)))
}

pub(super) fn copy_range(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    start: off_t,
    end: off_t,
) -> nix::Result<u64> {
    let mut at = start;
    while at < end {
        let length = usize::try_from(end - at).map_err(|_| Errno::EFBIG)?;
        let (mut read, mut written) = (at, at);
        match copy_file_range(from, Some(&mut read), to, Some(&mut written), length) {
            Err(Errno::EINTR) => {}
            // The source was truncated meanwhile, or its file system reports an end where there is none. Of the errors,
            // network file systems and seccomp filters have some of their own; a damaged or full disk fails again.
            Ok(0) | Err(_) => {
                at = copy_by_hand(from, to, at, end)?;
                break;
            }
            Ok(_) => at = read,
        }
    }
    Ok((at - start).unsigned_abs())
}

/// Copies between file systems for which the kernel cannot; returns the position reached.
fn copy_by_hand(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    start: off_t,
    end: off_t,
) -> nix::Result<off_t> {
    let mut buffer = vec![0; 256 * 1024];
    let mut at = start;
    while at < end {
        let wanted = usize::try_from(end - at).map_or(buffer.len(), |left| left.min(buffer.len()));
        let read = read_at(from, &mut buffer[..wanted], at)?;
        if read == 0 {
            break;
        }
        let mut rest = &buffer[..read];
        while !rest.is_empty() {
            match pwrite(to, rest, at) {
                Ok(written) => {
                    rest = &rest[written..];
                    at += off_t::try_from(written).map_err(|_| Errno::EFBIG)?;
                }
                Err(Errno::EINTR) => {}
                Err(error) => return Err(error),
            }
        }
    }
    Ok(at)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::FileExt as _;

    use super::*;

    #[test]
    fn a_file_that_became_shorter_is_not_filled_with_zeros() {
        let [from, to] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        from.write_all_at(b"text", 0).unwrap();
        assert_eq!(copy(from.as_fd(), to.as_fd(), 4), Ok(4));
        assert_eq!(copy(from.as_fd(), to.as_fd(), 5), Err(Errno::EAGAIN));
    }

    #[test]
    fn a_file_that_its_file_system_neither_shares_nor_copies_is_read_and_written() {
        let [from, to] = [(); 2].map(|()| tempfile::tempfile().unwrap());
        from.write_all_at(b"text", 0).unwrap();
        let transport = Transport::default();
        let has_shared = |attempt, size| transport.has_shared(attempt, to.as_fd(), size);
        assert_eq!(has_shared(Err(Errno::EAGAIN), 4), Ok(false));
        assert_eq!(has_shared(Ok(()), 4), Ok(false));
        assert_eq!(has_shared(Ok(()), 0), Ok(true));
        assert!(!transport.cannot_share.load(Ordering::Relaxed));
        // The kernel refuses `copy_file_range` to a file open for appending: `EBADF`.
        let place = tempfile::NamedTempFile::new().unwrap();
        let append = fs_err::OpenOptions::new()
            .append(true)
            .open(place.path())
            .unwrap();
        let copied = copy_range(from.as_fd(), append.file().as_fd(), 0, 4);
        assert_eq!(copied, Ok(4));
        assert_eq!(fs_err::read(place.path()).unwrap(), b"text");
    }

    #[test]
    fn data_ends_at_the_given_size_and_is_found_without_hole_detection() {
        const AT: i64 = 4 << 20;
        let file = tempfile::tempfile().unwrap();
        file.write_all_at(b"text", AT.unsigned_abs()).unwrap();
        for (from, size, found) in [
            (0, AT + 4, Some((AT, AT + 4))),
            (AT + 2, AT + 4, Some((AT + 2, AT + 4))),
            (AT + 4, AT + 4, None),
            // The file has grown past the size.
            (0, 4096, None),
        ] {
            assert_eq!(next_data(file.as_fd(), from, size), Ok(found), "{from}");
        }
        // Files in `/proc` do not support `SEEK_DATA`.
        let status = fs_err::File::open("/proc/self/status").unwrap();
        let found = next_data(status.file().as_fd(), 1, 4);
        assert_eq!(found, Ok(Some((1, 4))));
    }
}
