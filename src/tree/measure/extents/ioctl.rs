//! Owns the structures of queries for extents, and of their answers.

use super::size_of;

/// `struct btrfs_ioctl_fs_info_args`.
#[repr(C)]
pub(super) struct FsInfo {
    pub(super) devices: [u64; 2],
    pub(super) id: [u8; 16],
    pub(super) rest: [u8; 992],
}

/// `struct btrfs_ioctl_search_args_v2`, without its buffer.
#[repr(C)]
pub(super) struct Search {
    tree: u64,
    min_objectid: u64,
    max_objectid: u64,
    min_offset: u64,
    max_offset: u64,
    min_transid: u64,
    max_transid: u64,
    min_type: u32,
    max_type: u32,
    items: u32,
    unused: [u32; 9],
    size: u64,
}

/// A search and its answer.
#[repr(C)]
pub(super) struct Answer<const N: usize> {
    search: Search,
    bytes: [u8; N],
}

impl<const N: usize> std::fmt::Debug for Answer<N> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Answer").finish_non_exhaustive()
    }
}

/// One item of an answer.
pub(super) struct Item<'a> {
    pub(super) transaction: u64,
    pub(super) inode: u64,
    kind: u32,
    pub(super) offset: u64,
    pub(super) body: &'a [u8],
}

impl Item<'_> {
    pub(super) fn is_extent(&self) -> bool {
        self.kind == EXTENT_DATA
    }

    /// The first key after this item's.
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

/// `BTRFS_EXTENT_DATA_KEY`.
const EXTENT_DATA: u32 = 108;
/// `struct btrfs_ioctl_search_header`.
pub(super) const HEADER: usize = 32;

impl<const N: usize> Answer<N> {
    pub(super) fn new() -> Self {
        Self {
            search: Search {
                // That of the descriptor.
                tree: 0,
                min_objectid: 0,
                max_objectid: 0,
                min_offset: 0,
                max_offset: u64::MAX,
                min_transid: 0,
                max_transid: u64::MAX,
                min_type: EXTENT_DATA,
                max_type: EXTENT_DATA,
                items: 0,
                unused: [0; 9],
                size: N as u64,
            },
            bytes: [0; N],
        }
    }

    pub(super) fn ask_extents(&mut self, inode: u64, from: u64) {
        self.search.min_objectid = inode;
        self.search.max_objectid = inode;
        self.search.min_offset = from;
        self.search.items = u32::MAX;
        self.search.size = N as u64;
    }

    pub(super) fn ask_all(&mut self, (inode, kind, offset): (u64, u32, u64)) {
        self.search.min_objectid = inode;
        self.search.min_type = kind;
        self.search.min_offset = offset;
        self.search.max_objectid = u64::MAX;
        self.search.max_type = u32::MAX;
        self.search.items = u32::MAX;
        self.search.size = N as u64;
    }

    pub(super) fn items(&self) -> impl Iterator<Item = Item<'_>> {
        let mut left = self.search.items;
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

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub(super) struct MapExtent {
    pub(super) logical: u64,
    pub(super) physical: u64,
    pub(super) length: u64,
    reserved64: [u64; 2],
    pub(super) flags: u32,
    reserved: [u32; 3],
}

/// `struct fiemap`, without its extents.
#[repr(C)]
#[derive(Debug)]
pub(super) struct MapHeader {
    start: u64,
    length: u64,
    flags: u32,
    mapped: u32,
    count: u32,
    reserved: u32,
}

pub(super) const LAST: u32 = 0x1;
pub(super) const ENCODED: u32 = 0x8;
pub(super) const INLINE: u32 = 0x200;
pub(super) const SHARED: u32 = 0x2000;
const EXTENTS: usize = 128;

/// A query for extents and its answer.
#[repr(C)]
#[derive(Debug)]
pub(super) struct Map {
    header: MapHeader,
    extents: [MapExtent; EXTENTS],
}

impl Map {
    pub(super) fn new() -> Self {
        let none = MapExtent {
            logical: 0,
            physical: 0,
            length: 0,
            reserved64: [0; 2],
            flags: 0,
            reserved: [0; 3],
        };
        let header = MapHeader {
            start: 0,
            length: 0,
            flags: 0,
            mapped: 0,
            count: 0,
            reserved: 0,
        };
        Self {
            header,
            extents: [none; EXTENTS],
        }
    }

    pub(super) fn ask(&mut self, from: u64) {
        self.header = MapHeader {
            start: from,
            length: u64::MAX - from,
            flags: 0,
            mapped: 0,
            count: EXTENTS as u32,
            reserved: 0,
        };
    }

    pub(super) fn extents(&self) -> &[MapExtent] {
        &self.extents[..(self.header.mapped as usize).min(EXTENTS)]
    }
}

// The sizes are part of the ioctl numbers: wrong ones would fail with ENOTTY on every machine.
const _: () = assert!(size_of::<FsInfo>() == 1024);
const _: () = assert!(size_of::<Search>() == 112);
const _: () = assert!(size_of::<MapHeader>() == 32);
const _: () = assert!(size_of::<MapExtent>() == 56);

nix::ioctl_readwrite!(tree_search, 0x94, 17, Search);
nix::ioctl_read!(fs_info, 0x94, 31, FsInfo);
nix::ioctl_readwrite!(fiemap, b'f', 11, MapHeader);
