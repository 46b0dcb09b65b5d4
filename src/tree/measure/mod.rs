//! Owns measuring the space that directory trees take, for `du`, `gc` and the disk delta of a step.
//!
//! [`scan`] walks a set of roots in parallel and sums them by class. The sum over one root is that of GNU
//! `du -s --block-size=1`; over several roots every byte is still counted once:
//!
//! - an inode with several hard links belongs to the first root, in the order given, that holds one of them;
//! - with [`MeasureOptions::extents`], so does each block that several files share;
//! - a root inside another root is excluded from the outer one, whatever the order;
//! - a root given twice is walked once, for the first.
//!
//! A mount inside a root is not part of it, not even a bind mount of the same file system. A btrfs subvolume is
//! not a mount, although it has its own device number, and is counted.

mod extents;
mod links;
mod walk;

pub use walk::scan;

use std::collections::BTreeMap;
use std::io;
use std::num::NonZero;
use std::path::{Path, PathBuf};

use serde::Serialize;

/// A tree to count, and the class its bytes are added to.
#[derive(Clone, Debug)]
pub struct Root {
    /// A directory or a single file; a symlink is not followed.
    pub path: PathBuf,
    /// Any number; roots of one class are summed together.
    pub class: u32,
    /// Any number; roots of one owner would be deleted together.
    pub owner: u32,
}

impl Root {
    /// Makes a root that its class owns.
    pub fn new(path: impl Into<PathBuf>, class: u32) -> Self {
        Self {
            path: path.into(),
            class,
            owner: class,
        }
    }

    #[must_use]
    pub fn owned_by(self, owner: u32) -> Self {
        Self { owner, ..self }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct MeasureOptions {
    /// Number of threads; default: depends on this machine.
    pub threads: Option<NonZero<usize>>,
    /// Count blocks that several files share only once, if the file system reports them. Costs a query per file.
    pub extents: bool,
}

impl MeasureOptions {
    pub(crate) fn with_extents(extents: bool) -> Self {
        Self {
            extents,
            ..Self::default()
        }
    }
}

/// The sums of one class, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DiskUsage {
    /// Length of regular files and symlinks.
    pub apparent: u64,
    /// Disk space, including directories.
    pub allocated: u64,
    /// The part of `allocated` that no hard link or clone outside the owner's roots holds: deleting the owner frees it.
    pub exclusive: u64,
    /// Disk space that a hard link or clone reaches from here but an earlier class counts: `allocated` plus this is the
    /// size of the class alone.
    pub counted_elsewhere: u64,
    /// Files, directories and other entries, each inode once.
    pub entries: u64,
}

impl DiskUsage {
    /// Returns the disk space that something outside this owner also holds.
    pub(crate) fn shared(&self) -> u64 {
        self.allocated.saturating_sub(self.exclusive)
    }
}

impl std::ops::AddAssign for DiskUsage {
    fn add_assign(&mut self, other: Self) {
        self.apparent += other.apparent;
        self.allocated += other.allocated;
        self.exclusive += other.exclusive;
        self.counted_elsewhere += other.counted_elsewhere;
        self.entries += other.entries;
    }
}

impl std::iter::Sum for DiskUsage {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), |mut sum, size| {
            sum += size;
            sum
        })
    }
}

/// Adds bytes that several roots reach to the class of the first, and to the classes of others as counted elsewhere.
/// `all` tells whether these roots are all that reach them.
fn charge(
    bytes: u64,
    all: bool,
    mut roots: impl Iterator<Item = u32>,
    class_of: &[usize],
    owner_of: &[u32],
    sums: &mut [DiskUsage],
) {
    let Some(first) = roots.next() else { return };
    let (class, owner) = (class_of[first as usize], owner_of[first as usize]);
    let (mut others, mut exclusive) = (Vec::new(), all);
    for root in roots {
        exclusive &= owner_of[root as usize] == owner;
        let other = class_of[root as usize];
        // Several roots of one class count it once.
        if other != class && !others.contains(&other) {
            others.push(other);
            sums[other].counted_elsewhere += bytes;
        }
    }
    sums[class].allocated += bytes;
    if exclusive {
        sums[class].exclusive += bytes;
    }
}

/// Converts an error to the type of the walk's system calls.
fn errno(error: nix::Error) -> rustix::io::Errno {
    rustix::io::Errno::from_raw_os_error(error as i32)
}

#[derive(Debug)]
pub struct Problem {
    /// The path, beginning with that of its root.
    pub path: PathBuf,
    pub error: io::Error,
}

#[derive(Debug, Default)]
pub struct Usage {
    /// By class; one entry for every requested class.
    pub classes: BTreeMap<u32, DiskUsage>,
    /// Paths that could not be read, including missing roots. The sums are too small by them.
    pub unreadable: u64,
    /// The first few unreadable paths.
    pub problems: Vec<Problem>,
    /// Entries that disappeared between being listed and being examined.
    pub vanished: u64,
    pub mounts_skipped: u64,
    /// Files that report neither shared blocks nor their compressed size. They count as unshared and uncompressed.
    pub unshared: u64,
    /// The newest change time of an entry, in nanoseconds since 1970.
    pub newest_change: i64,
}

/// How many problems are kept: enough to show the pattern.
const PROBLEMS_KEPT: usize = 8;

impl Usage {
    /// Returns the sums of a class; zero for a class that was not requested.
    pub fn class(&self, class: u32) -> DiskUsage {
        self.classes.get(&class).copied().unwrap_or_default()
    }

    /// Returns the sums over all classes. `exclusive` is then a lower bound: it lacks space shared by two classes.
    pub fn total(&self) -> DiskUsage {
        self.classes.values().copied().sum()
    }

    fn add(&mut self, other: Self) {
        self.unreadable += other.unreadable;
        self.vanished += other.vanished;
        self.mounts_skipped += other.mounts_skipped;
        self.unshared += other.unshared;
        self.newest_change = self.newest_change.max(other.newest_change);
        self.problems.extend(other.problems);
        self.problems.truncate(PROBLEMS_KEPT);
    }

    fn problem(&mut self, path: impl FnOnce() -> PathBuf, error: io::Error) {
        self.unreadable += 1;
        if self.problems.len() < PROBLEMS_KEPT {
            self.problems.push(Problem {
                path: path(),
                error,
            });
        }
    }
}

pub fn scan_one(path: &Path) -> Usage {
    scan(&[Root::new(path, 0)], &MeasureOptions::default())
}
