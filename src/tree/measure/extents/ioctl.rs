//! Owns the structures of the FIEMAP ioctl.

use super::size_of;

/// `struct fiemap_extent`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
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
#[derive(Debug, Default)]
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
pub(super) struct Map {
    header: MapHeader,
    extents: [MapExtent; EXTENTS],
}

impl Map {
    pub(super) fn new() -> Self {
        Self {
            header: MapHeader::default(),
            extents: [MapExtent::default(); EXTENTS],
        }
    }

    pub(super) fn ask(&mut self, from: u64) {
        self.header = MapHeader {
            start: from,
            length: u64::MAX - from,
            count: EXTENTS as u32,
            ..MapHeader::default()
        };
    }

    pub(super) fn extents(&self) -> &[MapExtent] {
        &self.extents[..(self.header.mapped as usize).min(EXTENTS)]
    }
}

// The ioctl number contains the header's size: a wrong one fails with ENOTTY on every machine.
const _: () = assert!(size_of::<MapHeader>() == 32);
const _: () = assert!(size_of::<MapExtent>() == 56);

nix::ioctl_readwrite!(fiemap, b'f', 11, MapHeader);
