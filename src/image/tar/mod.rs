//! Owns reading a tar stream: from blocks to entries with all extended headers applied.
//!
//! The `tar` crate's own iterator is unsuitable: it keeps extended headers of any size in memory, leaves PAX sparse
//! files in their condensed form and ignores global headers. Only its header accessors are used. The result is the tree
//! that GNU tar would make. Archives that GNU tar refuses, and archives that contradict themselves (a long name with a
//! different PAX path, a sparse map that does not fit its data), are refused.

pub(crate) mod apply;
pub(crate) mod pack;
pub(crate) mod pax;
pub mod unpack;

mod sparse;

use std::io::{BufRead, Read as _, Seek};

use sparse::check_map;
use tar::{EntryType, Header};

use crate::image::tar::pax::Pax;
use crate::sys::error::{Result, ResultExt as _};

/// Makes the error for a refused archive, from the arguments of `format!`.
macro_rules! broken {
    ($($message:tt)*) => {
        invalid!("refused archive: {}", format_args!($($message)*))
            .help("it is damaged, was tampered with, or is not a tar archive; use another")
    };
}
pub(crate) use broken;

const BLOCK: u64 = 512;
/// Maximum size of an extended header, which contains names and attributes. The kernel limits one attribute to 64 KiB.
const MAX_EXTENSION: u64 = 1 << 20;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum TarEntryKind {
    /// A regular file of `size` bytes. For a sparse file, `map` lists the stored parts as offset and length.
    File {
        size: u64,
        map: Option<Vec<(u64, u64)>>,
    },
    Directory,
    Symlink(Vec<u8>),
    HardLink(Vec<u8>),
    Character(u64, u64),
    Block(u64, u64),
    Fifo,
}

/// An entry with the archive's untrusted names.
#[derive(Clone, Debug)]
pub(crate) struct TarEntry {
    pub(crate) path: Vec<u8>,
    pub(crate) kind: TarEntryKind,
    pub(super) mode: u32,
    pub(super) uid: u32,
    pub(super) gid: u32,
    pub(super) mtime: (i64, u32),
    pub(super) xattrs: Vec<(Vec<u8>, Vec<u8>)>,
    /// Valid metadata that this reader does not apply, to be reported.
    pub(super) ignored: Vec<&'static str>,
}

#[derive(Debug)]
pub(crate) struct Reader<R> {
    input: R,
    /// Unread bytes of the current entry's data, and of the padding after it.
    remaining: u64,
    padding: u64,
    globals: Pax,
    started: bool,
    max_path: usize,
}

impl<R: BufRead> Reader<R> {
    pub(crate) fn new(input: R, max_path: usize) -> Self {
        Self {
            input,
            remaining: 0,
            padding: 0,
            globals: Pax::default(),
            started: false,
            max_path,
        }
    }

    /// Returns the next entry, skipping the rest of the current one.
    pub(crate) fn next_entry(&mut self) -> Result<Option<TarEntry>> {
        // If several headers of one kind precede an entry, the last one wins.
        let mut pax: Option<Pax> = None;
        let mut long_name = None;
        let mut long_link = None;
        loop {
            self.skip_rest()?;
            let Some(header) = self.header()? else {
                // GNU tar accepts this silently, although a file is missing: the archive is truncated or its end is
                // forged.
                if pax.is_some() || long_name.is_some() || long_link.is_some() {
                    return Err(broken!(
                        "an extended header describes an entry that does not follow"
                    ));
                }
                return Ok(None);
            };
            let size = number(&header.as_old().size, "size")?;
            match header.entry_type() {
                EntryType::XGlobalHeader => {
                    let data = self.extension(size)?;
                    self.globals.parse_global(&data)?;
                }
                EntryType::XHeader => pax = Some(Pax::parse(&self.extension(size)?)?),
                EntryType::GNULongName => long_name = Some(until_nul(&self.extension(size)?)),
                EntryType::GNULongLink => long_link = Some(until_nul(&self.extension(size)?)),
                // Solaris had extended headers before POSIX.
                kind if kind.as_byte() == b'X' => pax = Some(Pax::parse(&self.extension(size)?)?),
                // A volume label names nothing in the file system.
                kind if kind.as_byte() == b'V' => self.start(size),
                _ => {
                    let names = (long_name, long_link);
                    return self
                        .entry(&header, size, pax.unwrap_or_default(), names)
                        .map(Some);
                }
            }
        }
    }

    /// Reads the data of an extended header.
    fn extension(&mut self, size: u64) -> Result<Vec<u8>> {
        if size > MAX_EXTENSION {
            return Err(broken!("an extended header has {size} bytes"));
        }
        self.start(size);
        let mut data = Vec::new();
        loop {
            let chunk = self.chunk()?;
            if chunk.is_empty() {
                return Ok(data);
            }
            data.extend_from_slice(chunk);
            let amount = chunk.len();
            self.consume(amount);
        }
    }

    /// Returns part of the current entry's data. Empty at the end.
    pub(super) fn chunk(&mut self) -> Result<&[u8]> {
        if self.remaining == 0 {
            return Ok(&[]);
        }
        let remaining = usize::try_from(self.remaining).unwrap_or(usize::MAX);
        let buffer = fill(&mut self.input)?;
        if buffer.is_empty() {
            return Err(broken!("it ends inside the data of an entry"));
        }
        Ok(&buffer[..buffer.len().min(remaining)])
    }

    /// Marks `amount` bytes of the last chunk as consumed.
    pub(super) fn consume(&mut self, amount: usize) {
        self.input.consume(amount);
        self.remaining = self.remaining.saturating_sub(amount as u64);
    }

    fn start(&mut self, size: u64) {
        self.remaining = size;
        self.padding = (BLOCK - size % BLOCK) % BLOCK;
    }

    fn skip_rest(&mut self) -> Result<()> {
        self.remaining += std::mem::take(&mut self.padding);
        while self.remaining > 0 {
            let amount = self.chunk()?.len();
            self.consume(amount);
        }
        Ok(())
    }

    /// Fills one block. Returns false at the end of the stream, which some writers use as the end of the archive.
    fn block(&mut self, block: &mut [u8; 512]) -> Result<bool> {
        let mut found = Vec::with_capacity(block.len());
        let read = self.input.by_ref().take(BLOCK).read_to_end(&mut found);
        read.context(|| "cannot read the archive".into())?;
        if !found.is_empty() && found.len() < block.len() {
            return Err(broken!("it ends inside a block"));
        }
        block[..found.len()].copy_from_slice(&found);
        Ok(!found.is_empty())
    }

    fn header(&mut self) -> Result<Option<Header>> {
        let mut header = Header::new_old();
        if !self.block(header.as_mut_bytes())? {
            return match self.started {
                true => Ok(None),
                false => Err(broken!("it is empty")),
            };
        }
        self.started = true;
        let bytes = header.as_bytes();
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        // The checksum covers the header with its own field blank. Some old archivers added up the bytes as signed
        // numbers.
        let sum = |value: fn(u8) -> i64| {
            let counted = bytes[..148].iter().chain(&bytes[156..]);
            counted.map(|byte| value(*byte)).sum::<i64>() + 8 * i64::from(b' ')
        };
        let sums = [sum(i64::from), sum(|byte| i64::from(byte.cast_signed()))];
        if !signed(&header.as_old().cksum, "checksum").is_ok_and(|stated| sums.contains(&stated)) {
            return Err(broken!(
                "a header has the wrong checksum: damaged, or not a tar archive"
            ));
        }
        Ok(Some(header))
    }

    fn entry(
        &mut self,
        header: &Header,
        size: u64,
        pax: Pax,
        long: (Option<Vec<u8>>, Option<Vec<u8>>),
    ) -> Result<TarEntry> {
        let (path, link) = self.names(header, &pax, long)?;
        let size = pax.size.unwrap_or(size);
        if i64::try_from(size).is_err() {
            return Err(broken!(
                "entry `{}`: its size is too large for a file",
                lossy(&path)
            ));
        }
        let old = header.as_old();
        Ok(TarEntry {
            kind: self.kind(header, size, &pax, &path, link)?,
            mode: u32::try_from(number(&old.mode, "mode")? & 0o7777).unwrap_or(0),
            uid: owner(pax.uid.or(self.globals.uid), &old.uid, &path)?,
            gid: owner(pax.gid.or(self.globals.gid), &old.gid, &path)?,
            mtime: match pax.mtime.or(self.globals.mtime) {
                Some(time) => time,
                None => (signed(&old.mtime, "mtime")?, 0),
            },
            xattrs: pax.xattrs,
            ignored: pax.ignored,
            path,
        })
    }

    /// Returns the name of an entry and its link target.
    fn names(
        &self,
        header: &Header,
        pax: &Pax,
        (long_name, long_link): (Option<Vec<u8>>, Option<Vec<u8>>),
    ) -> Result<(Vec<u8>, Vec<u8>)> {
        let field = |pax: Option<&Vec<u8>>, long: Option<Vec<u8>>, what: &str| match (pax, long) {
            (Some(pax), Some(long)) if *pax != long => Err(broken!(
                "an entry has two different {what}s: `{}` and `{}`",
                lossy(pax),
                lossy(&long)
            )),
            (Some(pax), _) => Ok(Some(pax.clone())),
            (None, long) => Ok(long),
        };
        let long_name = field(pax.path.as_ref(), long_name, "name")?;
        let path = match (&pax.sparse.name, long_name) {
            (Some(name), _) => name.clone(),
            (None, Some(path)) => path,
            (None, None) => header.path_bytes().into_owned(),
        };
        let link = match field(pax.link.as_ref(), long_link, "link target")? {
            Some(link) => link,
            None => header
                .link_name_bytes()
                .map(std::borrow::Cow::into_owned)
                .unwrap_or_default(),
        };
        for (name, what) in [(&path, "name"), (&link, "link target")] {
            if name.contains(&0) {
                return Err(broken!(
                    "entry `{}`: its {what} contains a NUL byte",
                    lossy(&path)
                ));
            }
            if name.len() > self.max_path {
                return Err(broken!(
                    "an entry has a {what} of {} bytes (limit {}): `{}...`",
                    name.len(),
                    self.max_path,
                    lossy(&name[..64.min(name.len())])
                ));
            }
        }
        Ok((path, link))
    }

    /// Returns the kind of an entry, and positions the reader at its data.
    fn kind(
        &mut self,
        header: &Header,
        size: u64,
        pax: &Pax,
        path: &[u8],
        link: Vec<u8>,
    ) -> Result<TarEntryKind> {
        let refuse = |what: &str| Err(broken!("entry `{}`: {what}", lossy(path)));
        let kind = header.entry_type();
        let is_file = matches!(
            kind,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse
        );
        if is_file && (pax.sparse.is_used || kind == EntryType::GNUSparse) {
            self.start(size);
            let (real, map) = if kind == EntryType::GNUSparse {
                self.old_sparse(header, size)?
            } else {
                self.pax_sparse(&pax.sparse)?
            };
            return match check_map(&map, real, self.remaining) {
                Err(what) => refuse(what),
                Ok(()) => Ok(TarEntryKind::File {
                    size: real,
                    map: Some(map),
                }),
            };
        }
        // Before ustar there was no type for directories, and a trailing slash marked them.
        if is_file && !path.ends_with(b"/") {
            self.start(size);
            return Ok(TarEntryKind::File { size, map: None });
        }
        // In an incremental archive the data of a directory is the list of its files.
        let is_dump = kind.as_byte() == b'D';
        // Other kinds have no data. A size in such a header is meaningless: the next block must be a header, or it is
        // refused.
        self.start(if is_dump { size } else { 0 });
        Ok(match kind {
            EntryType::Directory | EntryType::Regular | EntryType::Continuous => {
                TarEntryKind::Directory
            }
            _ if is_dump => TarEntryKind::Directory,
            EntryType::Symlink if link.is_empty() => {
                return refuse("a symbolic link to nothing");
            }
            EntryType::Symlink => TarEntryKind::Symlink(link),
            EntryType::Link => TarEntryKind::HardLink(link),
            EntryType::Char => {
                device(header).map(|(major, minor)| TarEntryKind::Character(major, minor))?
            }
            EntryType::Block => {
                device(header).map(|(major, minor)| TarEntryKind::Block(major, minor))?
            }
            EntryType::Fifo => TarEntryKind::Fifo,
            other => {
                return refuse(&format!(
                    "unknown entry type {:?}",
                    char::from(other.as_byte())
                ));
            }
        })
    }
}

/// Parses a user or group id. `chown` takes the largest id as "leave unchanged", so such entries belong to root.
fn owner(pax: Option<u64>, field: &[u8], path: &[u8]) -> Result<u32> {
    let id = match pax {
        Some(id) => id,
        None => number(field, "owner")?,
    };
    match u32::try_from(id) {
        Ok(u32::MAX) => Ok(0),
        Ok(id) => Ok(id),
        Err(_) => Err(broken!(
            "entry `{}`: owner {id} is not a user or group id",
            lossy(path)
        )),
    }
}

fn device(header: &Header) -> Result<(u64, u64)> {
    let (major, minor) = match (header.as_ustar(), header.as_gnu()) {
        (Some(ustar), _) => (&ustar.dev_major, &ustar.dev_minor),
        (_, Some(gnu)) => (&gnu.dev_major, &gnu.dev_minor),
        _ => return Ok((0, 0)),
    };
    Ok((number(major, "device")?, number(minor, "device")?))
}

impl<R: BufRead + Seek> Reader<R> {
    /// Skips the current entry's data without reading it; returns its offset in the archive. The caller must check that
    /// the data is complete.
    pub(crate) fn pass(&mut self) -> Result<u64> {
        let cannot = || "cannot read the archive".to_owned();
        let at = self.input.stream_position().context(cannot)?;
        let over = self.remaining.saturating_add(self.padding);
        let over = i64::try_from(over).map_err(|_| broken!("an entry is larger than any file"))?;
        self.input.seek_relative(over).context(cannot)?;
        (self.remaining, self.padding) = (0, 0);
        Ok(at)
    }
}

fn fill(input: &mut impl BufRead) -> Result<&[u8]> {
    // The borrow of a successful `fill_buf` would outlive the loop, so `fill_buf` is called again.
    loop {
        match input.fill_buf() {
            Ok(_) => break,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error).context(|| "cannot read the archive".into()),
        }
    }
    input
        .fill_buf()
        .context(|| "cannot read the archive".into())
}

pub(crate) fn lossy(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

fn until_nul(data: &[u8]) -> Vec<u8> {
    data.split(|byte| *byte == 0)
        .next()
        .unwrap_or_default()
        .to_vec()
}

/// Parses a header's number: octal digits, or 0x80 and big-endian bytes.
fn number(field: &[u8], what: &str) -> Result<u64> {
    u64::try_from(signed(field, what)?).map_err(|_| broken!("a header has a negative {what}"))
}

fn signed(field: &[u8], what: &str) -> Result<i64> {
    let fail = || broken!("a header's {what} is not a number");
    if let Some(first) = field.first().filter(|first| **first & 0x80 != 0) {
        // 0xff starts a negative number, in two's complement.
        let start = if *first == 0xff {
            -1_i128
        } else {
            i128::from(first & 0x7f)
        };
        let value = field[1..].iter().try_fold(start, |value, byte| {
            value
                .checked_mul(256)
                .map(|value| value | i128::from(*byte))
        });
        return i64::try_from(value.ok_or_else(fail)?).map_err(|_| fail());
    }
    let text = field
        .split(|byte| *byte == 0)
        .next()
        .unwrap_or_default()
        .trim_ascii();
    if text.len() > 12 || !text.iter().all(|byte| (b'0'..=b'7').contains(byte)) {
        return Err(fail());
    }
    Ok(text
        .iter()
        .fold(0_i64, |value, byte| value * 8 + i64::from(byte - b'0')))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_numbers() {
        for (field, value) in [
            (&b"0000644\0"[..], Some(0o644)),
            (b"  644 \0\0", Some(0o644)),
            (b"\0\0\0\0", Some(0)),
            (b"\x80\0\0\0\0\0\0\x01\0\0\0\0", Some(1 << 32)),
            (&[0xff; 12], Some(-1)),
            (b"12x\0", None),
            (b"-12\0", None),
            (b"\xbf\xff\xff\xff\xff\xff\xff\xff\xff\0\0\0", None),
        ] {
            assert_eq!(signed(field, "x").ok(), value, "{field:?}");
        }
        assert!(number(&[0xff; 12], "x").is_err());
    }
}
