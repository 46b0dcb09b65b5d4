//! Owns writing a tar stream: the entries that the parent module reads, with extended headers for everything that plain
//! headers cannot express.
//!
//! Times have nanoseconds, attributes are written as `SCHILY.xattr`, and holes in GNU's sparse format 1.0. Docker, GNU
//! tar and libarchive read all of these. A tree always gives the same bytes, and a copy too if it has the same holes.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, Mode, SFlag};
use tar::{EntryType, Header};

use super::unpack::Limits;
use super::{BLOCK, pax};
use crate::image::oci::layers::{OPAQUE, WHITEOUT};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::root_fs::{join, read_at};
use crate::tree::transfer::next_data;
use crate::tree::xattr::XattrFile;

/// Help for files that are too large.
pub(crate) const HOLES: &str =
    "holes in sparse files are counted; remove such files in the step that makes them";
/// The largest number in an octal field of eleven digits. Larger numbers go into an extended header.
const MAX_OCTAL: u64 = 0o777_7777_7777;
const MAX_ID: u32 = 0o777_7777;
/// Maximum number of data segments of a sparse file. A file with more is written in full.
const MAX_SEGMENTS: usize = 4096;
const CHUNK: usize = 256 << 10;

pub(crate) struct Packer<'a, W> {
    out: W,
    /// The first name of each hard-linked file.
    links: HashMap<(u64, u64), Vec<u8>>,
    buffer: Vec<u8>,
    entries: u64,
    /// Bytes of names, link targets and attributes.
    names: u64,
    /// Size of all files, with their holes.
    size: u64,
    cancel: &'a AtomicBool,
    /// Bytes of files written so far, for progress.
    done: u64,
    progress: &'a mut (dyn FnMut(u64) + Send),
    /// Number of skipped sockets. An archive cannot hold them, and they are useless without their process.
    pub(crate) left_out: u64,
}

impl<'a, W: Write> Packer<'a, W> {
    pub(crate) fn new(
        out: W,
        cancel: &'a AtomicBool,
        progress: &'a mut (dyn FnMut(u64) + Send),
    ) -> Self {
        Self {
            out,
            links: HashMap::new(),
            buffer: vec![0; CHUNK],
            entries: 0,
            names: 0,
            size: 0,
            cancel,
            done: 0,
            progress,
            left_out: 0,
        }
    }

    /// Writes an open directory. The root's path is empty.
    pub(crate) fn directory(
        &mut self,
        directory: BorrowedFd<'_>,
        path: &[u8],
        stat: &FileStat,
    ) -> Result<()> {
        stop_if(self.cancel)?;
        let name = path.rsplit(|byte| *byte == b'/').next();
        check_name(name.unwrap_or(path), path)?;
        let mut name = if path.is_empty() { b"." } else { path }.to_vec();
        name.push(b'/');
        let mut extended = Extended::default();
        extended.attributes(XattrFile::Open(directory), path)?;
        self.header(EntryType::Directory, &name, b"", stat, extended)
    }

    /// Writes an entry other than a directory.
    pub(crate) fn entry(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
        stat: &FileStat,
    ) -> Result<()> {
        stop_if(self.cancel)?;
        check_name(name, path)?;
        let kind = beneath::kind(stat);
        if kind == SFlag::S_IFSOCK {
            self.left_out += 1;
            return Ok(());
        }
        if stat.st_nlink > 1 {
            let inode = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.links.get(&inode).cloned() {
                return self.header(EntryType::Link, path, &first, stat, Extended::default());
            }
            self.links.insert(inode, path.to_vec());
        }
        if kind == SFlag::S_IFREG {
            return self.file(parent, name, path, stat);
        }
        let mut extended = Extended::default();
        extended.attributes(XattrFile::Entry(parent, name), path)?;
        let target;
        let (kind, link): (_, &[u8]) = match kind {
            SFlag::S_IFLNK => {
                use std::os::unix::ffi::OsStringExt as _;
                target = nix::fcntl::readlinkat(parent, name)
                    .context(|| cannot(path))?
                    .into_vec();
                (EntryType::Symlink, &target)
            }
            SFlag::S_IFIFO => (EntryType::Fifo, b""),
            SFlag::S_IFCHR => (EntryType::Char, b""),
            _ => (EntryType::Block, b""),
        };
        self.header(kind, path, link, stat, extended)
    }

    /// Writes the deletion of lower layers' content under this name.
    pub(crate) fn deletion(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        check_name(name, &join(parent, name))?;
        self.mark(parent, &[WHITEOUT, name].concat())
    }

    /// Writes the mark of a directory that hides all content of lower layers.
    pub(crate) fn opaque(&mut self, directory: &[u8]) -> Result<()> {
        self.mark(directory, OPAQUE)
    }

    fn mark(&mut self, parent: &[u8], name: &[u8]) -> Result<()> {
        let path = join(parent, name);
        let mut extended = Extended::default();
        let mut header = blank(EntryType::Regular, &path, &mut extended);
        header.set_mode(0);
        self.write_header(&path, &extended, &mut header)
    }

    fn header(
        &mut self,
        kind: EntryType,
        path: &[u8],
        link: &[u8],
        stat: &FileStat,
        mut extended: Extended,
    ) -> Result<()> {
        let size = match kind {
            EntryType::Regular => u64::try_from(stat.st_size).unwrap_or(0),
            _ => 0,
        };
        let mut header = blank(kind, path, &mut extended);
        let place = &mut header.as_old_mut().linkname;
        write_name(link, place, b"linkpath", &mut extended);
        header.set_mode(stat.st_mode & 0o7777);
        for (id, key, set) in [
            (stat.st_uid, "uid", Header::set_uid as fn(&mut Header, u64)),
            (stat.st_gid, "gid", Header::set_gid),
        ] {
            if id > MAX_ID {
                extended.add(key.as_bytes(), id.to_string().as_bytes());
            }
            set(&mut header, u64::from(if id > MAX_ID { 0 } else { id }));
        }
        if kind != EntryType::Link {
            extended.time(stat.st_mtime, stat.st_mtime_nsec);
        }
        let seconds = u64::try_from(stat.st_mtime).unwrap_or(0);
        header.set_mtime(if seconds > MAX_OCTAL { 0 } else { seconds });
        if size > MAX_OCTAL {
            extended.add(b"size", size.to_string().as_bytes());
        }
        header.set_size(if size > MAX_OCTAL { 0 } else { size });
        if matches!(kind, EntryType::Char | EntryType::Block) {
            let number = |of: fn(u64) -> u64| u32::try_from(of(stat.st_rdev)).unwrap_or(u32::MAX);
            let major = header.set_device_major(number(nix::sys::stat::major));
            major.context(|| cannot(path))?;
            let minor = header.set_device_minor(number(nix::sys::stat::minor));
            minor.context(|| cannot(path))?;
        }
        self.write_header(path, &extended, &mut header)
    }

    fn write_header(
        &mut self,
        path: &[u8],
        extended: &Extended,
        header: &mut Header,
    ) -> Result<()> {
        let limits = Limits::default();
        if path.len() > limits.path {
            return Err(invalid!(
                "`/{}...` cannot be shared: its path has {} bytes (limit {})",
                String::from_utf8_lossy(&path[..64]),
                path.len(),
                limits.path
            ));
        }
        self.entries += 1;
        if self.entries > limits.entries {
            return Err(too_many(&format!("{} entries", limits.entries)));
        }
        let link = header.link_name_bytes().map_or(0, |link| link.len());
        self.names += (path.len() + link + extended.0.len()) as u64;
        if self.names > limits.names {
            let what = format!("{} bytes of names and attributes", limits.names);
            return Err(too_many(&what));
        }
        if !extended.0.is_empty() {
            let mut before = blank(EntryType::XHeader, b"PaxHeader", &mut Extended::default());
            before.set_mode(0o644);
            before.set_size(extended.0.len() as u64);
            before.set_cksum();
            self.write(before.as_bytes())?;
            self.write(&extended.0)?;
            self.pad(extended.0.len() as u64)?;
        }
        header.set_cksum();
        self.write(header.as_bytes())
    }

    fn file(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
        stat: &FileStat,
    ) -> Result<()> {
        let file = open_file(parent, name).context(|| cannot(path))?;
        let mut extended = Extended::default();
        extended.attributes(XattrFile::Open(file.as_fd()), path)?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        self.size = self.size.saturating_add(size);
        let most = Limits::default().bytes;
        if self.size > most {
            let path = String::from_utf8_lossy(path);
            return Err(invalid!(
                "`/{path}` cannot be shared: the files up to it have more than {most} bytes"
            )
            .help(HOLES));
        }
        let Some(segments) = segments(&file, stat).context(|| cannot(path))? else {
            self.header(EntryType::Regular, path, b"", stat, extended)?;
            self.copy(&file, 0, size, path)?;
            return self.pad(size);
        };
        let mut map = format!("{}\n", segments.len()).into_bytes();
        for (offset, length) in &segments {
            map.extend_from_slice(format!("{offset}\n{length}\n").as_bytes());
        }
        map.resize(map.len().next_multiple_of(BLOCK as usize), 0);
        let held: u64 = segments.iter().map(|(_, length)| length).sum();
        extended.add(b"GNU.sparse.major", b"1");
        extended.add(b"GNU.sparse.minor", b"0");
        extended.add(b"GNU.sparse.name", path);
        extended.add(b"GNU.sparse.realsize", size.to_string().as_bytes());
        let mut written = *stat;
        written.st_size = i64::try_from(held + map.len() as u64).unwrap_or(i64::MAX);
        self.header(EntryType::Regular, path, b"", &written, extended)?;
        self.write(&map)?;
        for (offset, length) in segments {
            self.copy(&file, offset, length, path)?;
        }
        self.pad(held)
    }

    fn copy(&mut self, file: &OwnedFd, offset: u64, length: u64, path: &[u8]) -> Result<()> {
        let (mut at, end) = (offset, offset + length);
        while at < end {
            stop_if(self.cancel)?;
            let wanted = usize::try_from(end - at)
                .unwrap_or(CHUNK)
                .min(self.buffer.len());
            let place = i64::try_from(at).unwrap_or(i64::MAX);
            let amount = read_at(file, &mut self.buffer[..wanted], place);
            let amount = amount.context(|| cannot(path))?;
            if amount == 0 {
                return Err(unexpected!(
                    "`/{}` became shorter while it was read",
                    String::from_utf8_lossy(path)
                ));
            }
            self.out.write_all(&self.buffer[..amount])?;
            at += amount as u64;
            self.done += amount as u64;
            (self.progress)(self.done);
        }
        Ok(())
    }

    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        Ok(self.out.write_all(bytes)?)
    }

    fn pad(&mut self, length: u64) -> Result<()> {
        let rest = (BLOCK - length % BLOCK) % BLOCK;
        self.write(&[0; BLOCK as usize][..usize::try_from(rest).unwrap_or(0)])
    }

    /// Ends the archive and returns the writer.
    pub(crate) fn finish(mut self) -> Result<W> {
        self.write(&[0; 2 * BLOCK as usize])?;
        Ok(self.out)
    }
}

/// Returns the error for more than a reader accepts.
pub(crate) fn too_many(most: &str) -> Error {
    invalid!("more than {most} cannot be shared").help("remove files in the step that makes them")
}

/// Refuses a name that has a special meaning in a layer.
fn check_name(name: &[u8], path: &[u8]) -> Result<()> {
    match name.starts_with(WHITEOUT) {
        false => Ok(()),
        true => Err(invalid!(
            "`/{}` cannot be shared: in a layer its name means a deletion",
            String::from_utf8_lossy(path)
        )
        .help("remove or rename it in the step that makes it")),
    }
}

pub(crate) fn cannot(path: &[u8]) -> String {
    format!("cannot read `/{}`", String::from_utf8_lossy(path))
}

/// Opens a file for reading, without following a link.
pub(crate) fn open_file(parent: BorrowedFd<'_>, name: &[u8]) -> nix::Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC;
    nix::fcntl::openat(parent, name, flags, Mode::empty())
}

/// Returns the data segments of a file with holes; `None` for a file without holes.
fn segments(file: &OwnedFd, stat: &FileStat) -> nix::Result<Option<Vec<(u64, u64)>>> {
    let size = stat.st_size;
    if stat.st_blocks * 512 >= size {
        return Ok(None);
    }
    let mut found = Vec::new();
    let mut at = 0;
    while let Some((start, end)) = next_data(file.as_fd(), at, size)? {
        let whole = |value: i64| u64::try_from(value).unwrap_or(0);
        let piece = (whole(start), whole(end) - whole(start));
        // Readers disagree about padding, so segments must be whole blocks, except at the end.
        if found.len() == MAX_SEGMENTS || (end < size && !piece.1.is_multiple_of(BLOCK)) {
            return Ok(None);
        }
        found.push(piece);
        at = end;
    }
    // The file is small, or the file system compressed it.
    let is_whole = found == [(0, u64::try_from(size).unwrap_or(0))];
    Ok((!is_whole).then_some(found))
}

/// Returns the header of an empty entry without a mode. The owner is root, and the time is 1970.
fn blank(kind: EntryType, path: &[u8], extended: &mut Extended) -> Header {
    let mut header = Header::new_ustar();
    header.set_entry_type(kind);
    header.set_uid(0);
    header.set_gid(0);
    header.set_mtime(0);
    header.set_size(0);
    write_name(path, &mut header.as_old_mut().name, b"path", extended);
    header
}

/// Writes a name into a header's field, and into the extended header if it does not fit.
fn write_name(name: &[u8], field: &mut [u8; 100], key: &[u8], extended: &mut Extended) {
    let fits = name.len().min(field.len());
    field[..fits].copy_from_slice(&name[..fits]);
    if name.len() > field.len() {
        extended.add(key, name);
    }
}

/// An extended header: records of a key and a value, each preceded by its length.
#[derive(Default)]
struct Extended(Vec<u8>);

impl Extended {
    fn add(&mut self, key: &[u8], value: &[u8]) {
        let rest = key.len() + value.len() + 3;
        let mut length = rest + 1;
        // The length includes its own digits.
        while rest + length.to_string().len() != length {
            length = rest + length.to_string().len();
        }
        self.0.extend_from_slice(length.to_string().as_bytes());
        for part in [b" ", key, b"=", value, b"\n"] {
            self.0.extend_from_slice(part);
        }
    }

    fn attributes(&mut self, file: XattrFile<'_>, path: &[u8]) -> Result<()> {
        for (name, value) in file.content().context(|| cannot(path))? {
            self.add(&pax::attribute_key(&name), &value);
        }
        Ok(())
    }

    fn time(&mut self, seconds: i64, nanoseconds: i64) {
        let text = match (seconds, nanoseconds) {
            (0.., 0) if u64::try_from(seconds).is_ok_and(|seconds| seconds <= MAX_OCTAL) => return,
            (0.., _) => format!("{seconds}.{nanoseconds:09}"),
            (_, 0) => seconds.to_string(),
            // The fraction of a negative time counts down, too.
            (-1, _) => format!("-0.{:09}", 1_000_000_000 - nanoseconds),
            _ => format!("{}.{:09}", seconds + 1, 1_000_000_000 - nanoseconds),
        };
        self.add(b"mtime", text.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image::tar::pax::Pax;
    use crate::tree::root_fs::Tree;

    static CANCEL: AtomicBool = AtomicBool::new(false);

    #[test]
    fn a_path_that_no_reader_accepts_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let tree = Tree::open(root.path()).unwrap();
        let stat = nix::sys::stat::fstat(tree.fd()).unwrap();
        let mut progress = |_: u64| ();
        let mut packer = Packer::new(Vec::new(), &CANCEL, &mut progress);
        // A directory's name ends with a slash.
        packer.directory(tree.fd(), &[b'd'; 4094], &stat).unwrap();
        let refused = packer.directory(tree.fd(), &[b'd'; 4095], &stat);
        assert_has!(refused.unwrap_err().message(), "4096 bytes (limit 4095)");
        assert!(packer.opaque(&[b'd'; 4090]).is_err());
    }

    #[test]
    fn more_than_a_reader_accepts_is_refused() {
        let root = tempfile::tempdir().unwrap();
        let file = fs_err::File::create(root.path().join("holes")).unwrap();
        file.set_len(300 << 30).unwrap();
        let tree = Tree::open(root.path()).unwrap();
        let stat = nix::sys::stat::fstat(file.file()).unwrap();
        let mut progress = |_: u64| ();
        let mut packer = Packer::new(Vec::new(), &CANCEL, &mut progress);
        let entry =
            |packer: &mut Packer<'_, Vec<u8>>| packer.entry(tree.fd(), b"holes", b"holes", &stat);
        entry(&mut packer).unwrap();
        let refused = entry(&mut packer).unwrap_err();
        assert_has!(refused.message(), "`/holes` cannot be shared");
        packer.entries = Limits::default().entries;
        let refused = packer.opaque(b"d").unwrap_err();
        assert_has!(refused.message(), "more than 8000000 entries");
        packer.entries = 0;
        packer.names = Limits::default().names;
        let refused = packer.opaque(b"d").unwrap_err();
        assert_has!(refused.message(), "bytes of names and attributes");
    }

    #[test]
    fn times_before_1970_come_back() {
        for time in [
            (0, 1),
            (1_700_000_000, 123_456_789),
            (-1, 250_000_000),
            (-2, 750_000_000),
            (-5, 0),
        ] {
            let mut extended = Extended::default();
            extended.time(time.0, i64::from(time.1));
            assert_eq!(Pax::parse(&extended.0).unwrap().mtime, Some(time));
        }
    }

    #[test]
    fn a_record_counts_its_own_digits() {
        for length in 1..1100 {
            let mut extended = Extended::default();
            extended.add(b"path", &vec![b'x'; length]);
            assert_eq!(
                Pax::parse(&extended.0).unwrap().path.map(|path| path.len()),
                Some(length)
            );
        }
    }
}
