//! Owns the ballast: a file that is there to be given up, so that `gc` can write the little it must on a full disk.

use std::io::Write as _;

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::{FallocateFlags, fallocate};

use super::Store;
use crate::error::Result;
use crate::host::free_space;

const NAME: &str = ".ballast";
/// Its size in bytes: records, journals and directories of any number of removals.
const SIZE: u64 = 16 << 20;
/// It is laid down only where this many of it would fit.
const ROOM: u64 = 64;
/// Where what gave it up made no room, it is laid down again in so many parts of its size: what that wrote is missing.
const PARTS: u64 = 4;
/// Less than this many free bytes are as good as none.
const LITTLE: u64 = 4 << 20;

/// The ballast was given up. However the command ends, it is laid down again then, where there is room.
#[derive(Debug)]
pub struct Dropped(Store);

impl Drop for Dropped {
    fn drop(&mut self) {
        // Without it nothing is worse than it was on a disk that is full again.
        let sizes = (1..=PARTS).rev().map(|part| SIZE / PARTS * part);
        let _laid = sizes
            .into_iter()
            .any(|size| self.0.lay_ballast(size).is_ok());
    }
}

impl Store {
    fn has_ballast(&self) -> bool {
        fs::metadata(self.root.join(NAME)).is_ok_and(|data| data.len() >= SIZE)
    }

    /// Lays the ballast down where it is missing and there is much room.
    pub fn load_ballast(&self) -> Result<()> {
        if self.has_ballast() || free_space(&self.root)? < SIZE * ROOM {
            return Ok(());
        }
        self.lay_ballast(SIZE)
    }

    /// Lays a ballast of this size down, or none.
    fn lay_ballast(&self, size: u64) -> Result<()> {
        if self.has_ballast() {
            return Ok(());
        }
        let path = self.root.join(NAME);
        let mut file = fs::File::create(&path)?;
        // Written out: until then btrfs takes its space for free, and the next command the disk for one with room.
        let laid = fill(&mut file, size).and_then(|()| Ok(nix::unistd::syncfs(file.file())?));
        if laid.is_err() {
            fs::remove_file(&path)?;
        }
        Ok(laid?)
    }

    /// Gives the ballast up where the disk is full, for as long as the value lives.
    pub fn drop_ballast(&self) -> Result<Option<Dropped>> {
        if free_space(&self.root)? >= LITTLE {
            return Ok(None);
        }
        match fs::remove_file(self.root.join(NAME)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
            other => Ok(other.map(|()| Some(Dropped(self.clone())))?),
        }
    }
}

fn fill(file: &mut fs::File, size: u64) -> std::io::Result<()> {
    let length = i64::try_from(size).unwrap_or(i64::MAX);
    match fallocate(file.file(), FallocateFlags::empty(), 0, length) {
        Ok(()) => Ok(()),
        Err(Errno::ENOSPC) => Err(Errno::ENOSPC.into()),
        Err(_) => {
            // ext3 and others; not zeros, which some file systems do not store.
            let block: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
            (0..size >> 20).try_for_each(|_| file.write_all(&block))
        }
    }
}
