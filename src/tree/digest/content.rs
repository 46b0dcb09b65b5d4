//! Owns the digest of one file's content.

use std::ffi::OsStr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::unistd::Whence;
use sha2::{Digest as _, Sha256};

use crate::sys::beneath;
use crate::sys::error::Result;
use crate::sys::signals::stop_if;
use crate::tree::root_fs::read_at;

/// Size of a read, and of a block that is skipped if all zeros.
pub(crate) const BLOCK: usize = 256 << 10;
/// From this size on, a file that is mostly zeros is hashed without them: an archive of a few KiB can contain a file
/// larger than any disk.
const LARGE: u64 = 16 << 20;

/// One page, because the constant is part of the binary.
static ZEROS: [u8; 4096] = [0; 4096];

fn is_zeros(block: &[u8]) -> bool {
    let mut pages = block.chunks(ZEROS.len());
    pages.all(|page| page == &ZEROS[..page.len()])
}

/// Returns the SHA-256 of a file's content. For a large file that is mostly zeros, hashes only the other blocks and
/// their positions.
pub(crate) fn hash(
    root: BorrowedFd<'_>,
    path: &[u8],
    buffer: &mut [u8],
    cancel: &AtomicBool,
) -> Result<[u8; 32]> {
    let path = Path::new(OsStr::from_bytes(path));
    let file = beneath::open_entry_below(root, path, OFlag::O_RDONLY | OFlag::O_NONBLOCK)?;
    let size = u64::try_from(nix::sys::stat::fstat(&file)?.st_size).unwrap_or(0);
    let mut sha = Sha256::new();
    if is_mostly_zeros(&file, size, buffer, cancel)? {
        // No file of this size can have exactly these bytes as its content, so digests cannot collide.
        each_block_of_data(&file, size, buffer, cancel, &mut |at, block| {
            sha.update(at.to_le_bytes());
            sha.update(block);
            true
        })?;
        return Ok(sha.finalize().into());
    }
    loop {
        stop_if(cancel)?;
        match nix::unistd::read(&file, buffer) {
            Ok(0) => return Ok(sha.finalize().into()),
            Ok(amount) => sha.update(&buffer[..amount]),
            Err(Errno::EINTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
}

/// Returns whether three quarters of a large file are zero blocks, holes included.
fn is_mostly_zeros(
    file: &OwnedFd,
    size: u64,
    buffer: &mut [u8],
    cancel: &AtomicBool,
) -> Result<bool> {
    if size < LARGE {
        return Ok(false);
    }
    let mut data = 0;
    each_block_of_data(file, size, buffer, cancel, &mut |_, block| {
        data += block.len() as u64;
        data <= size / 4
    })?;
    Ok(data <= size / 4)
}

/// Calls `with` for each block that is not all zeros, until it returns false.
fn each_block_of_data(
    file: &OwnedFd,
    size: u64,
    buffer: &mut [u8],
    cancel: &AtomicBool,
    with: &mut dyn FnMut(u64, &[u8]) -> bool,
) -> Result<()> {
    let offset = |at: u64| i64::try_from(at).map_err(|_| Errno::EFBIG);
    let mut at = 0;
    while at < size {
        stop_if(cancel)?;
        // Not `next_data`: to find the end of the data, the kernel may read through the rest of the file, for each block.
        match nix::unistd::lseek(file, offset(at)?, Whence::SeekData) {
            Ok(data) => at = data.unsigned_abs() / BLOCK as u64 * BLOCK as u64,
            Err(Errno::ENXIO) => return Ok(()),
            // The file system has no hole detection.
            Err(Errno::EINVAL | Errno::EOPNOTSUPP) => {}
            Err(error) => return Err(error.into()),
        }
        let filled = read_at(file, buffer, offset(at)?)?;
        let block = &buffer[..filled];
        if !is_zeros(block) && !with(at, block) {
            return Ok(());
        }
        at += BLOCK as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd as _;
    use std::os::unix::fs::FileExt as _;

    fn of(pieces: &[(u64, &[u8])], size: u64) -> [u8; 32] {
        let dir = tempfile::tempdir().unwrap();
        let file = fs_err::File::create(dir.path().join("file")).unwrap();
        for (at, piece) in pieces {
            file.file().write_all_at(piece, *at).unwrap();
        }
        file.set_len(size).unwrap();
        let root = fs_err::File::open(dir.path()).unwrap();
        let mut buffer = vec![0; BLOCK];
        hash(root.as_fd(), b"file", &mut buffer, &AtomicBool::new(false)).unwrap()
    }

    #[test]
    fn a_large_file_of_zeros_is_read_where_it_has_data() {
        let huge = 1 << 40;
        let one = of(&[(5 << 30, b"x")], huge);
        assert_eq!(one, of(&[(0, &[0; 9000]), (5 << 30, b"x")], huge));
        assert_eq!(one, of(&[(5 << 30, b"x\0"), (huge - 7, &[0; 7])], huge));
        for other in [
            of(&[(5 << 30, b"y")], huge),
            of(&[((5 << 30) + 1, b"x")], huge),
            of(&[(6 << 30, b"x")], huge),
            of(&[], huge),
        ] {
            assert_ne!(one, other);
        }
    }

    #[test]
    fn what_is_smaller_has_the_digest_of_its_content() {
        let content = [vec![0; BLOCK], b"x".to_vec(), vec![0; 3 * BLOCK]].concat();
        let plain: [u8; 32] = Sha256::digest(&content).into();
        assert_eq!(of(&[(BLOCK as u64, b"x")], content.len() as u64), plain);
    }
}
