//! Owns the ballast: a file that is there to be given up, so that `gc` can write the little it must on a full disk.

use std::io::Write as _;

use fs_err as fs;
use nix::fcntl::{FallocateFlags, fallocate};

use super::Store;
use crate::error::Result;
use crate::host::free_space;

const NAME: &str = ".ballast";
/// Its size in bytes: records, journals and directories of any number of removals.
const SIZE: u64 = 16 << 20;
/// It is laid down only where this many of it would fit.
const ROOM: u64 = 64;
/// Less than this many free bytes are as good as none.
const LITTLE: u64 = 4 << 20;

impl Store {
    /// Lays the ballast down where it is missing and there is room.
    pub fn load_ballast(&self) -> Result<()> {
        let path = self.root.join(NAME);
        let there = fs::metadata(&path).is_ok_and(|data| data.len() >= SIZE);
        if there || free_space(&self.root)? < SIZE * ROOM {
            return Ok(());
        }
        let mut file = fs::File::create(&path)?;
        let length = i64::try_from(SIZE).unwrap_or(i64::MAX);
        if fallocate(file.file(), FallocateFlags::empty(), 0, length).is_err() {
            // ext3 and others; not zeros, which some file systems do not store.
            let block: Vec<u8> = (0..=255).cycle().take(1 << 20).collect();
            for _ in 0..SIZE >> 20 {
                file.write_all(&block)?;
            }
        }
        Ok(())
    }

    /// Gives the ballast up where the disk is full. Says whether it did.
    pub fn drop_ballast(&self) -> Result<bool> {
        if free_space(&self.root)? >= LITTLE {
            return Ok(false);
        }
        match fs::remove_file(self.root.join(NAME)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(false),
            other => Ok(other.map(|()| true)?),
        }
    }
}
