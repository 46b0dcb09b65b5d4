//! Owns the maps of sparse files, in all of tar's formats.

use std::io::BufRead;

use tar::{GnuExtSparseHeader, GnuSparseHeader, Header};

use super::{BLOCK, Reader, broken, number};
use crate::image::tar::pax::Sparse;
use crate::sys::error::Result;

/// Each takes 24 bytes of memory. A file with more fragments is an attack or badly fragmented.
const MAX_SEGMENTS: usize = 1 << 20;

impl<R: BufRead> Reader<R> {
    /// Reads GNU's first sparse format: four map entries in the header, 21 more in each following block.
    pub(super) fn old_sparse(
        &mut self,
        header: &Header,
        size: u64,
    ) -> Result<(u64, Vec<(u64, u64)>)> {
        let gnu = header
            .as_gnu()
            .ok_or_else(|| broken!("a sparse entry without a GNU header"))?;
        let mut map = Vec::new();
        let mut add = |blocks: &[GnuSparseHeader]| -> Result<()> {
            let is_used = |block: &&GnuSparseHeader| block.offset[0] != 0 || block.numbytes[0] != 0;
            for block in blocks.iter().filter(is_used) {
                let offset = number(&block.offset, "sparse offset")?;
                map.push((offset, number(&block.numbytes, "sparse length")?));
            }
            if map.len() > MAX_SEGMENTS {
                return Err(broken!("a sparse entry has too many fragments"));
            }
            Ok(())
        };
        add(&gnu.sparse)?;
        let mut more = gnu.is_extended();
        while more {
            let mut next = GnuExtSparseHeader::new();
            if !self.block(next.as_mut_bytes())? {
                return Err(broken!("it ends inside a sparse map"));
            }
            add(next.sparse())?;
            more = next.is_extended();
        }
        // The map's blocks do not count in the entry's size.
        self.start(size);
        Ok((number(&gnu.realsize, "size")?, map))
    }

    /// Reads the PAX sparse formats. 0.0 and 0.1 have the map in the header, 1.0 has it as lines before the data.
    pub(super) fn pax_sparse(&mut self, sparse: &Sparse) -> Result<(u64, Vec<(u64, u64)>)> {
        let real = sparse
            .real_size
            .ok_or_else(|| broken!("a sparse entry does not declare its size"))?;
        match (sparse.major, sparse.minor) {
            (None | Some(0), _) => {
                if !sparse.numbers.len().is_multiple_of(2) {
                    return Err(broken!("a sparse map has an odd number of fields"));
                }
                let pairs = sparse.numbers.chunks_exact(2);
                Ok((real, pairs.map(|pair| (pair[0], pair[1])).collect()))
            }
            (Some(1), Some(0)) => {
                let mut used = 0_u64;
                let count = self.decimal_line(&mut used)?;
                if count > MAX_SEGMENTS as u64 {
                    return Err(broken!("a sparse entry has too many fragments"));
                }
                let mut map = Vec::new();
                for _ in 0..count {
                    map.push((self.decimal_line(&mut used)?, self.decimal_line(&mut used)?));
                }
                for _ in used..used.next_multiple_of(BLOCK) {
                    self.byte()?;
                }
                Ok((real, map))
            }
            (major, minor) => Err(broken!("unknown sparse format {major:?}.{minor:?}")),
        }
    }

    fn byte(&mut self) -> Result<u8> {
        let byte = self.chunk()?.first().copied();
        let byte = byte.ok_or_else(|| broken!("a sparse map is truncated"))?;
        self.consume(1);
        Ok(byte)
    }

    fn decimal_line(&mut self, used: &mut u64) -> Result<u64> {
        let mut value = 0_u64;
        let mut digits = 0;
        loop {
            *used += 1;
            match self.byte()? {
                byte @ b'0'..=b'9' if digits < 20 => {
                    digits += 1;
                    value = value
                        .checked_mul(10)
                        .and_then(|value| value.checked_add(u64::from(byte - b'0')))
                        .ok_or_else(|| broken!("a number in a sparse map is too large"))?;
                }
                b'\n' if digits > 0 => return Ok(value),
                _ => {
                    return Err(broken!(
                        "a sparse map contains something that is not a number"
                    ));
                }
            }
        }
    }
}

pub(super) fn check_map(
    map: &[(u64, u64)],
    real: u64,
    data: u64,
) -> std::result::Result<(), &'static str> {
    if i64::try_from(real).is_err() {
        return Err("its size is too large for a file");
    }
    let mut end = 0_u64;
    let mut total = 0_u64;
    for (offset, length) in map.iter().filter(|(_, length)| *length > 0) {
        if *offset < end {
            return Err("the fragments of a sparse file overlap or are out of order");
        }
        // Fragments start on block boundaries. Readers disagree about other padding.
        if !total.is_multiple_of(BLOCK) {
            return Err("a fragment of a sparse file is not a whole number of blocks");
        }
        end = offset
            .checked_add(*length)
            .ok_or("a sparse map is too large")?;
        total += length;
    }
    match (end <= real, total == data) {
        (true, true) => Ok(()),
        (false, _) => Err("a sparse map reaches beyond the file's size"),
        (_, false) => Err("a sparse map does not match the data that follows"),
    }
}
