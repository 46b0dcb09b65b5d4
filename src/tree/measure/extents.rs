//! Owns sharing between clones: files on btrfs, xfs and the like may share blocks, and each block is counted once,
//! for the first root that reaches it.
//!
//! btrfs answers from its own trees, by inode number and without opening the file; a completely walked subvolume takes
//! only a few calls, while querying each file takes several times as long as the rest of the walk. The trees also have
//! the size on disk after compression. Only root gets these answers. For ordinary users, and on other file systems,
//! each
//! file is queried for its extents, and only the shared ones are kept. Data without an address on disk yet belongs to
//! its file alone.
#![expect(unsafe_code, reason = "these ioctls have no safe wrapper")]

mod ioctl;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap};
use std::ffi::CStr;
use std::mem::size_of;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};

use rustix::fs::{FileType, Mode, OFlags, Statx, openat};
use rustix::io::Errno;

use super::{DiskUsage, charge, errno};
use crate::tree::btrfs::{file_system_id, is_btrfs};
use crate::tree::btrfs_search::{EXTENT_DATA, HEADER, Item, Key, Search};

/// Shorter lists are not worth sorting and deduplicating.
const TIDY_FIRST: usize = 1 << 16;

/// Buffer size for btrfs's answers; the extents of one file may need several.
const ANSWER: usize = 16 * 1024;

/// An answer with this much space left is complete: no extent item is longer.
const ROOM: usize = 8 * 1024;

/// Buffer size for answers about a whole subvolume.
const BULK: usize = 256 * 1024;

/// A range of bytes on disk, as reached from one root.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Extent {
    /// The file system. Small files that btrfs stores in its trees have a space of their own.
    space: u32,
    start: u64,
    length: u64,
    root: u32,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct QueryMethod {
    btrfs: bool,
    trees: bool,
    space: u32,
}

impl QueryMethod {
    /// Returns whether entries of this kind can share blocks; btrfs stores symlinks like small files.
    pub(super) fn place(self, kind: FileType) -> bool {
        kind == FileType::RegularFile || (self.btrfs && kind == FileType::Symlink)
    }
}

/// The file systems seen so far. A block has the same address whichever root leads to it.
#[derive(Debug, Default)]
pub(super) struct Spaces(Vec<[u8; 16]>);

impl Spaces {
    /// Determines how to query files below `directory`; `None` if its file system cannot be identified.
    pub(super) fn query_method(
        &mut self,
        directory: BorrowedFd<'_>,
        device: u64,
    ) -> Option<QueryMethod> {
        let btrfs = is_btrfs(directory).ok()?;
        // Each subvolume has its own device number, but they share blocks.
        let id = match btrfs {
            true => file_system_id(directory).ok()?,
            false => u128::from(device).to_ne_bytes(),
        };
        let at = self
            .0
            .iter()
            .position(|known| *known == id)
            .unwrap_or_else(|| {
                self.0.push(id);
                self.0.len() - 1
            });
        Some(QueryMethod {
            btrfs,
            trees: btrfs && may_search(directory),
            space: u32::try_from(at * 2).ok()?,
        })
    }
}

fn may_search(directory: BorrowedFd<'_>) -> bool {
    let mut search = Search::<ANSWER>::new(extents_of(0, 0));
    search.run(directory, u32::MAX) != Err(nix::Error::EPERM)
}

/// Returns the search key of a file's extents, from an offset on.
fn extents_of(inode: u64, from: u64) -> Key {
    Key {
        objectid: [inode; 2],
        offset: [from, u64::MAX],
        kind: [EXTENT_DATA; 2],
        ..Key::default()
    }
}

/// A file to query, in its directory, and the root it is counted for.
#[derive(Clone, Copy)]
pub(super) struct Queried<'a> {
    pub(super) directory: BorrowedFd<'a>,
    pub(super) name: &'a CStr,
    pub(super) stat: &'a Statx,
    pub(super) root: u32,
}

pub(super) struct Extents {
    list: Vec<Extent>,
    /// Files that did not report their compressed size.
    pub(super) squeezed: u64,
    tidy_at: usize,
    answer: Box<Search<ANSWER>>,
    map: Box<ioctl::Map>,
}

impl Extents {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            squeezed: 0,
            tidy_at: TIDY_FIRST,
            answer: Search::new(Key::default()),
            map: Box::new(ioctl::Map::new()),
        }
    }

    /// Reads all extents of a subvolume, so that its files need no query each; `None` if btrfs does not answer from its
    /// trees, or the read fails.
    pub(super) fn load(
        method: Option<QueryMethod>,
        directory: BorrowedFd<'_>,
    ) -> Option<Subvolume> {
        if !method?.trees {
            return None;
        }
        // On failure each file is queried, which counts its own failures.
        Subvolume::read(directory).ok()
    }

    /// Records the extents of a file and returns its bytes outside of them.
    pub(super) fn query(
        &mut self,
        method: QueryMethod,
        file: Queried<'_>,
        subvolume: Option<&Subvolume>,
    ) -> Result<u64, Errno> {
        let Queried { stat, root, .. } = file;
        let before = self.list.len();
        let all = stat.stx_blocks * 512;
        let own = if let Some(subvolume) = subvolume {
            Ok(all.saturating_sub(self.look_up(subvolume, method.space, stat, root)))
        } else if method.trees {
            let placed = self.search(method.space, file);
            placed.map(|placed| all.saturating_sub(placed))
        } else if FileType::from_raw_mode(stat.stx_mode.into()) == FileType::Symlink {
            Ok(inline(stat))
        } else {
            self.map(method, file)
        };
        if own.is_err() {
            self.list.truncate(before);
        }
        let own = own?;
        if self.list.len() >= self.tidy_at {
            self.tidy();
            self.tidy_at = TIDY_FIRST.max(self.list.len() * 2);
        }
        Ok(own)
    }

    /// Reads a file's extents from the tree of its btrfs subvolume; returns how many of the file's bytes they hold.
    fn search(&mut self, space: u32, file: Queried<'_>) -> Result<u64, Errno> {
        let Queried { stat, root, .. } = file;
        let mut placed = 0;
        let mut next = 0;
        loop {
            let answer = &mut *self.answer;
            answer.key = extents_of(stat.stx_ino, next);
            answer.run(file.directory, u32::MAX).map_err(errno)?;
            let mut bytes = 0;
            for item in answer.items() {
                bytes += item.body.len() + HEADER;
                next = item.offset + 1;
                if let Some(found) = Placed::parse(&item) {
                    placed += found.note(&mut self.list, space, stat, root);
                }
            }
            if bytes == 0 || bytes + ROOM <= ANSWER {
                return Ok(placed);
            }
        }
    }

    fn look_up(&mut self, subvolume: &Subvolume, space: u32, stat: &Statx, root: u32) -> u64 {
        let all = &subvolume.0;
        let from = all.partition_point(|placed| placed.inode < stat.stx_ino);
        all[from..]
            .iter()
            .take_while(|placed| placed.inode == stat.stx_ino)
            .map(|placed| placed.note(&mut self.list, space, stat, root))
            .sum()
    }

    /// Queries a file's shared extents; returns its bytes outside of them.
    fn map(&mut self, method: QueryMethod, file: Queried<'_>) -> Result<u64, Errno> {
        let Queried { stat, root, .. } = file;
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = openat(file.directory, file.name, flags, Mode::empty())?;
        let all = stat.stx_blocks * 512;
        let mut shared = 0;
        let mut squeezed = false;
        let mut from = 0;
        loop {
            let map = &mut *self.map;
            map.ask(from);
            // SAFETY: `map` is a complete header followed by room for the number of extents that it announces.
            match unsafe { ioctl::fiemap(file.as_fd().as_raw_fd(), (&raw mut *map).cast()) } {
                // A file system without this query cannot share anything.
                Err(nix::Error::EOPNOTSUPP | nix::Error::ENOTTY) => return Ok(all),
                other => other.map_err(errno)?,
            };
            let extents = map.extents();
            for extent in extents {
                if method.btrfs && extent.flags & ioctl::INLINE != 0 {
                    return Ok(inline(stat));
                }
                let encoded = extent.flags & ioctl::ENCODED != 0;
                squeezed |= encoded;
                if extent.flags & ioctl::SHARED == 0 {
                    continue;
                }
                shared += extent.length;
                // A compressed extent is identified by its start: fiemap does not report its length on disk.
                let (space, start) = match encoded {
                    true => (method.space + 1, mix([extent.physical, 0, 0, 0])),
                    false => (method.space, extent.physical),
                };
                self.list.push(Extent {
                    space,
                    start,
                    length: extent.length,
                    root,
                });
            }
            match extents.last() {
                Some(last) if last.flags & ioctl::LAST == 0 => from = last.logical + last.length,
                _ => break,
            }
        }
        self.squeezed += u64::from(squeezed);
        Ok(all.saturating_sub(shared))
    }

    fn tidy(&mut self) {
        self.list.sort_unstable();
        self.list.dedup();
    }

    pub(super) fn append(&mut self, other: Self) {
        if self.list.is_empty() {
            self.list = other.list;
        } else {
            self.list.extend(other.list);
        }
    }

    /// Adds each block to the class of its first root, and to the classes of other roots as counted elsewhere.
    pub(super) fn add_to_classes(
        mut self,
        class_of: &[usize],
        owner_of: &[u32],
        sums: &mut [DiskUsage],
    ) {
        self.tidy();
        for same in self.list.chunk_by(|a, b| a.space == b.space) {
            for run in Runs(same) {
                if run
                    .iter()
                    .all(|extent| (extent.start, extent.length) == (run[0].start, run[0].length))
                {
                    let roots = run.iter().map(|extent| extent.root);
                    charge(run[0].length, true, roots, class_of, owner_of, sums);
                } else {
                    each_overlap(run, |length, active| {
                        let roots = active.keys().copied();
                        charge(length, true, roots, class_of, owner_of, sums);
                    });
                }
            }
        }
    }
}

/// The extents of a btrfs subvolume's files, by inode.
#[derive(Debug)]
pub(super) struct Subvolume(Vec<Placed>);

#[derive(Clone, Copy, Debug)]
struct Placed {
    inode: u64,
    /// The address on disk; for bytes stored in the tree, the transaction that wrote their tree block.
    start: u64,
    length: u64,
    /// How much of the file it contains; `None` if the tree itself stores the whole file.
    used: Option<u64>,
}

impl Placed {
    fn parse(item: &Item<'_>) -> Option<Self> {
        let number = |at: usize| {
            let bytes = item.body.get(at..at + 8)?;
            bytes.try_into().ok().map(u64::from_le_bytes)
        };
        if *item.body.get(20)? == INLINE {
            return Some(Self {
                inode: item.inode,
                start: item.transaction,
                length: item.body.len() as u64,
                used: None,
            });
        }
        // A hole has no address.
        let start = number(21).filter(|start| *start != 0)?;
        Some(Self {
            inode: item.inode,
            start,
            length: number(29)?,
            used: number(45),
        })
    }

    /// Adds the extent to `list`; returns how much of the file's blocks it accounts for.
    fn note(&self, list: &mut Vec<Extent>, space: u32, stat: &Statx, root: u32) -> u64 {
        let Self { start, length, .. } = *self;
        let (space, start, placed) = match self.used {
            Some(used) => (space, start, used),
            // The bytes have no address of their own: their tree block is shared or copied as a whole.
            None => {
                let changed = stat.stx_ctime;
                let seconds = changed.tv_sec.cast_unsigned();
                let start = mix([self.inode, start, seconds, changed.tv_nsec.into()]);
                (space + 1, start, stat.stx_blocks * 512)
            }
        };
        list.push(Extent {
            space,
            start,
            length,
            root,
        });
        placed
    }
}

impl Subvolume {
    fn read(directory: BorrowedFd<'_>) -> Result<Self, Errno> {
        let mut answer = Search::<BULK>::new(Key::default());
        let mut all = Vec::new();
        let mut next = Some((0, 0, 0));
        while let Some((inode, kind, offset)) = next {
            let key = &mut answer.key;
            (key.objectid[0], key.kind[0], key.offset[0]) = (inode, kind, offset);
            answer.run(directory, u32::MAX).map_err(errno)?;
            next = None;
            for item in answer.items() {
                next = item.after();
                if item.kind == EXTENT_DATA {
                    all.extend(Placed::parse(&item));
                }
            }
        }
        Ok(Self(all))
    }
}

/// Splits sorted extents into groups without overlap.
struct Runs<'a>(&'a [Extent]);

impl<'a> Iterator for Runs<'a> {
    type Item = &'a [Extent];

    fn next(&mut self) -> Option<Self::Item> {
        let mut end = 0;
        let mut length = 0;
        for extent in self.0 {
            if length > 0 && extent.start >= end {
                break;
            }
            end = end.max(extent.start.saturating_add(extent.length));
            length += 1;
        }
        let (run, rest) = self.0.split_at(length);
        self.0 = rest;
        (length > 0).then_some(run)
    }
}

/// Visits partly overlapping extents; `each` gets the bytes between two boundaries and the roots there.
fn each_overlap(run: &[Extent], mut each: impl FnMut(u64, &BTreeMap<u32, u32>)) {
    let mut active: BTreeMap<u32, u32> = BTreeMap::new();
    let mut ends = BinaryHeap::new();
    let mut at = run[0].start;
    let mut next = run.iter().peekable();
    loop {
        let end = ends.peek().map(|Reverse((end, _))| *end);
        let Some(border) = next
            .peek()
            .map(|extent| extent.start)
            .into_iter()
            .chain(end)
            .min()
        else {
            return;
        };
        if border > at {
            each(border - at, &active);
            at = border;
        }
        while let Some(Reverse((end, root))) = ends.peek().copied()
            && end == border
        {
            ends.pop();
            if let Some(count) = active.get_mut(&root) {
                *count -= 1;
                if *count == 0 {
                    active.remove(&root);
                }
            }
        }
        while let Some(extent) = next.next_if(|extent| extent.start == border) {
            *active.entry(extent.root).or_default() += 1;
            let end = extent.start.saturating_add(extent.length);
            ends.push(Reverse((end, extent.root)));
        }
    }
}

/// Type of a btrfs extent whose bytes are in the tree.
const INLINE: u8 = 0;

/// Size of the header before these bytes.
const INLINE_HEADER: u64 = 21;

/// Returns the disk space of a file that btrfs stores in its trees, if only its `stat` is known.
fn inline(stat: &Statx) -> u64 {
    (stat.stx_blocks * 512).min(stat.stx_size + INLINE_HEADER)
}

/// Hashes numbers into an address that leaves room above it for a length.
fn mix(numbers: [u64; 4]) -> u64 {
    let mut hash: u64 = 0;
    for number in numbers {
        hash = (hash ^ number).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        hash ^= hash >> 32;
    }
    hash >> 1
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the allocated, exclusive and elsewhere-counted bytes of each root.
    fn add_to_classes(extents: &[(u64, u64, u32)], owner_of: &[u32]) -> Vec<[u64; 3]> {
        let mut all = Extents::new();
        all.list = extents
            .iter()
            .map(|&(start, length, root)| Extent {
                space: 0,
                start,
                length,
                root,
            })
            .collect();
        let class_of: Vec<usize> = (0..owner_of.len()).collect();
        let mut sums = vec![DiskUsage::default(); owner_of.len()];
        all.add_to_classes(&class_of, owner_of, &mut sums);
        let sums = sums.iter();
        sums.map(|one| [one.allocated, one.exclusive, one.counted_elsewhere])
            .collect()
    }

    #[test]
    fn a_block_belongs_to_the_first_root_that_reaches_it() {
        let extents = [(0, 100, 1), (0, 100, 0), (0, 100, 0), (200, 50, 1)];
        let sums = add_to_classes(&extents, &[0, 1]);
        assert_eq!(sums, [[100, 0, 0], [50, 50, 100]]);
    }

    #[test]
    fn extents_that_overlap_in_part_are_cut() {
        // 0..100 by root 1, 50..150 by root 0, 120..130 by root 2, of the same owner as root 0.
        let extents = [(0, 100, 1), (50, 100, 0), (120, 10, 2), (150, 5, 2)];
        let sums = add_to_classes(&extents, &[7, 8, 7]);
        assert_eq!(sums, [[100, 50, 0], [50, 50, 50], [5, 5, 10]]);
    }

    #[test]
    fn nothing_is_lost_or_counted_twice() {
        // Compared with a count of single bytes.
        let mut random = 7u64;
        let mut next = |below: u64| {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            random % below
        };
        for _ in 0..300 {
            let extents: Vec<(u64, u64, u32)> = (0..next(12))
                .map(|_| (next(40), 1 + next(20), next(4) as u32))
                .collect();
            let mut expected = [0; 4];
            for byte in 0..60 {
                let covers = |e: &&(u64, u64, u32)| e.0 <= byte && byte < e.0 + e.1;
                if let Some(first) = extents.iter().filter(covers).map(|e| e.2).min() {
                    expected[first as usize] += 1;
                }
            }
            let sums = add_to_classes(&extents, &[0, 1, 2, 3]);
            for (at, expected) in expected.into_iter().enumerate() {
                assert_eq!(sums[at][0], expected, "{extents:?}");
            }
        }
    }
}
