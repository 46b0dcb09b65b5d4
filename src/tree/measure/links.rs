//! Owns inodes with several names: which class each one is counted in.
//!
//! Each worker appends to its own list, and the lists are sorted together at the end. That needs no lock, and the
//! result does not depend on the workers' speed.

use super::{DiskUsage, charge};

/// One inode with several hard links, as seen from one root.
#[derive(Clone, Copy, Debug)]
pub(super) struct Link {
    pub(super) device: u64,
    pub(super) inode: u64,
    /// Position in the caller's list: the bytes count for the lowest.
    pub(super) root: u32,
    /// Names of this inode that were seen under this root.
    pub(super) seen: u32,
    /// Names of this inode anywhere.
    pub(super) names: u32,
    pub(super) apparent: u64,
    pub(super) allocated: u64,
}

/// Shorter lists are not worth sorting and merging.
const TIDY_FIRST: usize = 1 << 16;

#[derive(Debug)]
pub(super) struct Links {
    list: Vec<Link>,
    tidy_at: usize,
}

impl Links {
    pub(super) fn new() -> Self {
        Self {
            list: Vec::new(),
            tidy_at: TIDY_FIRST,
        }
    }

    pub(super) fn push(&mut self, link: Link) {
        self.list.push(link);
        // Bounds memory by the number of inodes, not of names: a store full of forks has few inodes.
        if self.list.len() >= self.tidy_at {
            tidy(&mut self.list);
            self.tidy_at = TIDY_FIRST.max(self.list.len() * 2);
        }
    }

    pub(super) fn append(&mut self, other: Self) {
        if self.list.is_empty() {
            self.list = other.list;
        } else {
            self.list.extend(other.list);
        }
    }

    /// Adds each inode to the class of its first root, and to the classes of other roots as counted elsewhere.
    /// `class_of` maps roots to positions in `sums`.
    pub(super) fn add_to_classes(
        mut self,
        class_of: &[usize],
        owner_of: &[u32],
        sums: &mut [DiskUsage],
    ) {
        tidy(&mut self.list);
        for inode in self
            .list
            .chunk_by(|a, b| (a.device, a.inode) == (b.device, b.inode))
        {
            let first = inode[0];
            let seen: u64 = inode.iter().map(|link| u64::from(link.seen)).sum();
            let all = seen >= u64::from(first.names);
            let roots = inode.iter().map(|link| link.root);
            charge(first.allocated, all, roots, class_of, owner_of, sums);
            let sums = &mut sums[class_of[first.root as usize]];
            sums.entries += 1;
            sums.apparent += first.apparent;
        }
    }
}

/// Sorts by inode, then root, and merges the entries of one inode in one root.
fn tidy(list: &mut Vec<Link>) {
    list.sort_unstable_by_key(|link| (link.device, link.inode, link.root));
    list.dedup_by(|link, kept| {
        let same = (link.device, link.inode, link.root) == (kept.device, kept.inode, kept.root);
        if same {
            kept.seen = kept.seen.saturating_add(link.seen);
        }
        same
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(inode: u64, root: u32, names: u32) -> Link {
        Link {
            device: 1,
            inode,
            root,
            seen: 1,
            names,
            apparent: 10,
            allocated: 512,
        }
    }

    #[test]
    fn the_first_root_gets_the_bytes_whoever_was_faster() {
        let mut links = Links::new();
        for link in [link(7, 2, 3), link(7, 1, 3), link(7, 2, 3), link(8, 2, 2)] {
            links.push(link);
        }
        let mut sums = [DiskUsage::default(); 3];
        links.add_to_classes(&[0, 1, 2], &[0, 1, 2], &mut sums);
        let counted = DiskUsage {
            apparent: 10,
            allocated: 512,
            entries: 1,
            ..DiskUsage::default()
        };
        // Inode 8 has a second name outside: it is counted here, but deleting this root does not free it.
        let last = DiskUsage {
            counted_elsewhere: 512,
            ..counted
        };
        assert_eq!(sums, [DiskUsage::default(), counted, last]);
    }

    #[test]
    fn memory_follows_inodes_not_names() {
        let mut links = Links::new();
        for name in 0..1_000_000 {
            links.push(link(name % 100, 0, 10_000));
        }
        assert!(links.list.capacity() <= 2 * TIDY_FIRST);
        let mut sums = [DiskUsage::default(); 1];
        links.add_to_classes(&[0], &[0], &mut sums);
        assert_eq!((sums[0].entries, sums[0].exclusive), (100, 51_200));
    }
}
