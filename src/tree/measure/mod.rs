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
    /// A directory, or a single file; a symlink counts as itself.
    pub path: PathBuf,
    /// Any number; roots of the same class are summed together.
    pub class: u32,
    /// Any number; roots of the same owner would be deleted together.
    pub owner: u32,
}

impl Root {
    /// Makes a root that is its own owner.
    pub fn new(path: impl Into<PathBuf>, class: u32) -> Self {
        Self {
            path: path.into(),
            class,
            owner: class,
        }
    }

    /// Assigns it to an owner.
    #[must_use]
    pub fn owned_by(self, owner: u32) -> Self {
        Self { owner, ..self }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct MeasureOptions {
    /// Number of threads; default: depends on this machine.
    pub threads: Option<NonZero<usize>>,
    /// Count blocks that several files share once, if the file system reports them. Costs a query for each file.
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
    /// The part of `allocated` that no hard link or clone outside the roots of the same owner holds: what deleting
    /// the owner can free.
    pub exclusive: u64,
    /// Disk space reached by a hard link or clone from here but counted in an earlier class: `allocated` plus this is
    /// the size of the class alone.
    pub counted_elsewhere: u64,
    /// Files, directories and other entries, each inode once.
    pub entries: u64,
}

impl DiskUsage {
    /// Returns the space on disk that something outside this owner holds as well.
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

/// A path that could not be read.
#[derive(Debug)]
pub struct Problem {
    /// The path, starting with its root's.
    pub path: PathBuf,
    pub error: io::Error,
}

/// The result of [`scan`].
#[derive(Debug, Default)]
pub struct Usage {
    /// By class; one entry for every requested class.
    pub classes: BTreeMap<u32, DiskUsage>,
    /// Paths that could not be read, so that the sums are too small; includes missing roots.
    pub unreadable: u64,
    /// The first few of them.
    pub problems: Vec<Problem>,
    /// Entries that were listed but gone when they were examined.
    pub vanished: u64,
    pub mounts_skipped: u64,
    /// Files that do not report shared blocks or their compressed size, and count as if they had neither.
    pub unshared: u64,
    /// The newest change time of an entry, in nanoseconds since 1970.
    pub newest_change: i64,
}

/// How many problems are kept: enough to see the pattern.
const PROBLEMS_KEPT: usize = 8;

impl Usage {
    /// Returns the sums of a class; zero for one that was not requested.
    pub fn class(&self, class: u32) -> DiskUsage {
        self.classes.get(&class).copied().unwrap_or_default()
    }

    /// Returns the sums over all classes. `exclusive` then is a lower bound: space shared by two classes is in
    /// neither.
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

/// Counts one tree with the default options.
pub fn scan_one(path: &Path) -> Usage {
    scan(&[Root::new(path, 0)], &MeasureOptions::default())
}
