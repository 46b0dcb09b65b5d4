//! Owns the ballast: a file that a full disk gives up, so that `gc` can write the little that it must.

use std::fs::Metadata;
use std::io::Read as _;
use std::os::unix::fs::MetadataExt as _;

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::Store;
use crate::sys::error::{Result, if_exists};
use crate::sys::host::{free_space, space};

const NAME: &str = ".ballast";
/// Largest and smallest size in bytes: room for the records, journals and directories of any number of removals, or
/// of a few.
const MOST: u64 = 16 << 20;
const LEAST: u64 = 4 << 20;
/// One part in this many of the file system, within these limits.
const SHARE: u64 = 64;
/// Created only if free space is this many times its size.
const ROOM: u64 = 8;
/// Number of parts in which it may shrink if there is no room for its full size again: the command's own writes took
/// the rest.
const PARTS: u64 = 4;
/// Less free space than this counts as none.
const LITTLE: u64 = 4 << 20;

/// Shows that the ballast was dropped. Dropping this value creates the ballast again, if there is room.
#[derive(Debug)]
pub struct Dropped(Store);

impl Drop for Dropped {
    fn drop(&mut self) {
        // Ignore failures: without the ballast, a full disk is no worse off.
        if let Ok(size) = self.0.ballast_size() {
            let mut sizes = (1..=PARTS).rev().map(|part| size / PARTS * part);
            let _laid = sizes.any(|size| self.0.lay_ballast(size).is_ok());
        }
    }
}

impl Store {
    fn ballast_size(&self) -> Result<u64> {
        Ok((space(&self.root)?.total / SHARE).clamp(LEAST, MOST))
    }

    fn has_ballast(&self, size: u64) -> bool {
        let found = fs::metadata(self.root.join(NAME));
        found.is_ok_and(|data| data.len() >= size && takes_space(&data))
    }

    /// Creates the ballast if it is missing and there is plenty of room.
    pub fn load_ballast(&self) -> Result<()> {
        let size = self.ballast_size()?;
        if self.has_ballast(size) || free_space(&self.root)? < size * ROOM {
            return Ok(());
        }
        self.lay_ballast(size)
    }

    /// Creates a ballast of this size, or none.
    fn lay_ballast(&self, size: u64) -> Result<()> {
        if self.has_ballast(size) {
            return Ok(());
        }
        let path = self.root.join(NAME);
        let mut file = fs::File::create(&path)?;
        // Sync: until then btrfs counts its space as free, and the next command would misjudge the free space.
        let laid = fill(&mut file, size).and_then(|()| Ok(nix::unistd::syncfs(file.file())?));
        if laid.is_err() {
            fs::remove_file(&path)?;
        }
        Ok(laid?)
    }

    /// Drops the ballast while the returned value lives, if the disk is full.
    pub fn drop_ballast(&self) -> Result<Option<Dropped>> {
        if free_space(&self.root)? >= LITTLE {
            return Ok(None);
        }
        let removed = if_exists(fs::remove_file(self.root.join(NAME)))?;
        Ok(removed.map(|()| Dropped(self.clone())))
    }
}

fn fill(file: &mut fs::File, size: u64) -> std::io::Result<()> {
    let length = i64::try_from(size).unwrap_or(i64::MAX);
    match fallocate(file.file(), FallocateFlags::empty(), 0, length) {
        Ok(()) if takes_space(&file.metadata()?) => Ok(()),
        Err(Errno::ENOSPC) => Err(Errno::ENOSPC.into()),
        // ext3 and others cannot preallocate.
        _ => fill_with_noise(file, size),
    }
}

/// Returns whether a file is not sparse. On ZFS fallocate only looks whether there is room, and makes a sparse file.
/// Blocks are counted roughly there.
fn takes_space(data: &Metadata) -> bool {
    data.blocks() * 512 >= data.len() / 2
}

/// Writes bytes that no file system compresses or has already.
fn fill_with_noise(file: &mut fs::File, size: u64) -> std::io::Result<()> {
    let mut noise = fs::File::open("/dev/urandom")?.take(size);
    std::io::copy(&mut noise, file).map(drop)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn no_two_blocks_of_the_ballast_are_equal() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("ballast");
        let mut file = fs::File::create(&path).unwrap();
        file.set_len(1 << 20).unwrap();
        assert!(!takes_space(&file.metadata().unwrap()));
        fill_with_noise(&mut file, 1 << 20).unwrap();
        let content = fs::read(&path).unwrap();
        let blocks: BTreeSet<&[u8]> = content.chunks(4096).collect();
        assert_eq!(blocks.len(), 256);
    }
}
