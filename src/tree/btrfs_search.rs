//! Owns searching btrfs's trees for items by key.

#![expect(
    unsafe_code,
    reason = "btrfs is driven by ioctls, which nix can only declare as unsafe functions"
)]

use std::os::fd::{AsRawFd as _, BorrowedFd};

/// `struct btrfs_ioctl_search_key`, with the first and last value of each field of the search.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    /// Zero means the descriptor's own tree.
    pub(super) tree: u64,
    pub(super) objectid: [u64; 2],
    pub(super) offset: [u64; 2],
    pub(super) generation: [u64; 2],
    pub(super) kind: [u32; 2],
    pub(super) items: u32,
    pub(super) unused: [u32; 9],
}

impl Default for Key {
    fn default() -> Self {
        Self {
            tree: 0,
            objectid: [0, u64::MAX],
            offset: [0, u64::MAX],
            generation: [0, u64::MAX],
            kind: [0, u32::MAX],
            items: 0,
            unused: [0; 9],
        }
    }
}

/// A search and its answer: `struct btrfs_ioctl_search_args_v2`.
#[repr(C)]
pub(super) struct Search<const N: usize> {
    pub(super) key: Key,
    size: u64,
    bytes: [u8; N],
}

/// A search without room for the answer, whose size is not part of the ioctl number.
type Head = Search<0>;

// The ioctl number contains this size: a wrong one fails with ENOTTY on every machine.
const _: () = assert!(size_of::<Head>() == 112);

nix::ioctl_readwrite!(tree_search, 0x94, 17, Head);

/// `BTRFS_EXTENT_DATA_KEY`.
pub(super) const EXTENT_DATA: u32 = 108;
/// `struct btrfs_ioctl_search_header`.
pub(super) const HEADER: usize = 32;

pub(super) struct Item<'a> {
    pub(super) transaction: u64,
    pub(super) inode: u64,
    pub(super) kind: u32,
    pub(super) offset: u64,
    pub(super) body: &'a [u8],
}

impl Item<'_> {
    /// Returns the first key after this item's.
    pub(super) fn after(&self) -> Option<(u64, u32, u64)> {
        if let Some(offset) = self.offset.checked_add(1) {
            return Some((self.inode, self.kind, offset));
        }
        match self.kind {
            0..255 => Some((self.inode, self.kind + 1, 0)),
            _ => Some((self.inode.checked_add(1)?, 0, 0)),
        }
    }
}

impl<const N: usize> Search<N> {
    pub(super) fn new(key: Key) -> Box<Self> {
        Box::new(Self {
            key,
            size: N as u64,
            bytes: [0; N],
        })
    }

    /// Runs the search; the answer holds as many items as fit, at most `most`.
    pub(super) fn run(&mut self, fd: BorrowedFd<'_>, most: u32) -> nix::Result<()> {
        self.key.items = most;
        self.size = N as u64;
        // SAFETY: `self` is a complete structure followed by the `size` bytes that it announces.
        unsafe { tree_search(fd.as_raw_fd(), (&raw mut *self).cast()) }.map(drop)
    }

    pub(super) fn items(&self) -> impl Iterator<Item = Item<'_>> {
        let mut left = self.key.items;
        let mut at = 0;
        std::iter::from_fn(move || {
            left = left.checked_sub(1)?;
            let header = self.bytes.get(at..at + HEADER)?;
            let long = |at: usize| header[at..at + 8].try_into().map_or(0, u64::from_ne_bytes);
            let word = |at: usize| header[at..at + 4].try_into().map_or(0, u32::from_ne_bytes);
            let length = word(28) as usize;
            let body = self.bytes.get(at + HEADER..at + HEADER + length)?;
            at += HEADER + length;
            Some(Item {
                transaction: long(0),
                inode: long(8),
                kind: word(24),
                offset: long(16),
                body,
            })
        })
    }
}
