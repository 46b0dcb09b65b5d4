//! Owns extraction: turns archive entries into files below one directory, and nowhere else.
//!
//! Every call names a single component relative to an open directory, and directories are opened with `openat2` without
//! following links. Directories get their attributes at the end, because a read-only directory could not be filled, and
//! filling it would change its times.

use std::collections::{BTreeMap, HashMap};
use std::io::{self, BufRead, Read};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag};
use nix::sys::stat::{Mode, SFlag};
use nix::unistd::UnlinkatFlags;

use super::apply::{Attributes, copy_data};
use crate::image::compression::decompressed;
use crate::image::oci::layers::{LayerEntries, WHITEOUT};
use crate::image::tar::{Reader, TarEntry, TarEntryKind, broken, lossy};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::root_fs::Tree;
use crate::tree::xattr;

/// Limits for an archive. An archive that exceeds them is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Sum of file sizes, including holes.
    pub bytes: u64,
    pub entries: u64,
    /// Bytes of all names, link targets and extended attributes, which rockenv keeps in memory.
    pub names: u64,
    /// Components in a path.
    pub depth: usize,
    /// Bytes in a path or link target.
    pub path: usize,
    /// Decompressed size over compressed size.
    pub ratio: u64,
    /// Decompressed size in bytes.
    pub unpacked: u64,
}

impl Default for Limits {
    /// Ten times the largest ROCm image, and the kernel's limits for paths.
    fn default() -> Self {
        Self {
            bytes: 512 << 30,
            entries: 8_000_000,
            names: 1 << 30,
            depth: 256,
            path: 4095,
            ratio: 250,
            unpacked: u64::MAX,
        }
    }
}

impl Limits {
    /// Returns the limits for a snapshot's layer: the declared size with any compression ratio, because the layer is a
    /// step's output. Without a declared size, the limits of an image.
    pub(crate) fn of_snapshot(unpacked: Option<u64>) -> Self {
        match unpacked {
            Some(unpacked) => Self {
                ratio: u64::MAX,
                unpacked,
                ..Self::default()
            },
            None => Self::default(),
        }
    }
}

/// Which device nodes are made. Engines provide `/dev`, so an image needs no device nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Devices {
    /// Skip and report each device node.
    Skip,
    /// Make all, except the character device 0:0, which marks a deleted file for overlayfs.
    Make,
}

#[derive(Clone, Debug)]
pub struct UnpackOptions {
    pub limits: Limits,
    /// Leading path components to drop. Entries without remaining components are skipped.
    pub strip_components: u32,
    /// Give files the owners in the archive, which needs root. Otherwise the process owns them, without setuid bits.
    pub ownership: bool,
    pub devices: Devices,
    /// Paths outside the tree. Entries for them and below them are skipped.
    pub left_out: &'static [&'static str],
}

impl Default for UnpackOptions {
    fn default() -> Self {
        Self {
            limits: Limits::default(),
            strip_components: 0,
            ownership: nix::unistd::geteuid().is_root(),
            devices: Devices::Skip,
            left_out: &[],
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct UnpackReport {
    pub entries: u64,
    pub bytes: u64,
    /// Number of dropped items by kind: `device node`, `xattr trusted.x`, ...
    pub dropped: BTreeMap<String, u64>,
}

impl UnpackReport {
    pub(crate) fn drop(&mut self, what: String) {
        *self.dropped.entry(what).or_default() += 1;
    }
}

/// Extracts an archive (tar, plain or compressed by gzip, zstd or xz) into an existing directory.
///
/// `progress` gets the number of bytes written so far. Existing files in the directory stay.
pub fn unpack(
    archive: impl Read + Send,
    into: &Path,
    options: &UnpackOptions,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<UnpackReport> {
    let mut unpacker = Unpacker::new(into, options, cancel)?;
    decompressed(archive, &options.limits, |mut stream| {
        unpacker.archive(&mut stream, progress)?;
        // A program that pipes into rockenv must not die of SIGPIPE while it writes the last padding.
        drop(io::copy(&mut stream.take(1 << 20), &mut io::sink()));
        unpacker.finish()
    })
    .context(|| "cannot read the archive".into())?
}

pub(crate) struct Unpacker<'a> {
    pub(crate) root: Tree,
    /// The open directories from the root to the last parent. Most archives are in the order of a tree walk.
    pub(crate) stack: Vec<(Vec<u8>, OwnedFd)>,
    pub(crate) directories: HashMap<Vec<u8>, Attributes>,
    pub(crate) newest: i64,
    /// Bytes of the names and attributes so far.
    names: u64,
    pub(crate) options: &'a UnpackOptions,
    cancel: &'a AtomicBool,
    pub(crate) report: UnpackReport,
    pub(crate) layer: LayerEntries,
}

impl<'a> Unpacker<'a> {
    pub(crate) fn new(
        into: &Path,
        options: &'a UnpackOptions,
        cancel: &'a AtomicBool,
    ) -> Result<Self> {
        Ok(Self {
            root: Tree::open(into)?,
            stack: Vec::new(),
            directories: HashMap::new(),
            newest: 0,
            names: 0,
            options,
            cancel,
            report: UnpackReport::default(),
            layer: LayerEntries::default(),
        })
    }

    /// Makes all entries of an archive. [`Self::finish`] sets the attributes of directories.
    pub(crate) fn archive(
        &mut self,
        stream: impl BufRead,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let mut reader = Reader::new(stream, self.options.limits.path);
        while let Some(entry) = reader.next_entry()? {
            stop_if(self.cancel)?;
            self.entry(&mut reader, entry, progress)?;
        }
        Ok(())
    }

    fn entry<R: BufRead>(
        &mut self,
        reader: &mut Reader<R>,
        mut entry: TarEntry,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let limits = &self.options.limits;
        self.report.entries += 1;
        if self.report.entries > limits.entries {
            return Err(broken!("it has more than {} entries", limits.entries));
        }
        self.names += names_of(&entry);
        if self.names > limits.names {
            let most = limits.names;
            return Err(broken!(
                "its names and attributes have more than {most} bytes"
            ));
        }
        if let TarEntryKind::File { size, .. } = entry.kind {
            self.report.bytes = self.report.bytes.saturating_add(size);
            if self.report.bytes > limits.bytes {
                return Err(
                    broken!("its files have more than {} bytes", limits.bytes).help(
                        "holes in sparse files are counted; leave such files out of the archive",
                    ),
                );
            }
        }
        let spelled = entry.path.clone();
        let Some(components) = self.components(&spelled, &spelled)? else {
            return Ok(());
        };
        if self.is_left_out(&components) {
            return Ok(());
        }
        if self.layer.is_layer && self.whiteout(&components, &spelled)? {
            return Ok(());
        }
        for what in std::mem::take(&mut entry.ignored) {
            self.report.drop(what.into());
        }
        let report = &mut self.report;
        entry.xattrs.retain(|(name, _)| {
            let keep = xattr::is_content(name);
            if !keep {
                report.drop(format!("xattr {}", lossy(name)));
            }
            keep
        });
        if !self.options.ownership {
            let kept = entry.mode & 0o1777;
            if kept != entry.mode && entry.kind != TarEntryKind::Directory {
                self.report.drop("setuid or setgid bit".into());
            }
            entry.mode = kept;
        }
        self.newest = self.newest.max(entry.mtime.0);
        let Some((name, parents)) = components.split_last() else {
            return self.root_entry(entry);
        };
        self.enter(parents, &entry.path)?;
        let path = components.join(&b'/');
        self.note_made(&path);
        match &entry.kind {
            TarEntryKind::Directory => self.directory(name, path, entry),
            TarEntryKind::HardLink(target) => {
                let target = target.clone();
                self.hard_link(name, &path, &target, &entry.path)
            }
            _ => self.file(reader, &path, &entry, progress),
        }
    }

    /// Returns whether an entry, or the path that it deletes, must be skipped.
    fn is_left_out(&self, components: &[&[u8]]) -> bool {
        let mut path = components.to_vec();
        if let Some(last) = path.last_mut() {
            *last = self.file_name(last);
        }
        self.options.left_out.iter().any(|left_out| {
            let mut parts = left_out.as_bytes().split(|byte| *byte == b'/');
            let mut names = path.iter();
            parts.all(|part| names.next() == Some(&part))
        })
    }

    /// Returns a name without a layer's mark of a deletion.
    fn file_name<'p>(&self, name: &'p [u8]) -> &'p [u8] {
        match self.layer.is_layer {
            true => name.strip_prefix(WHITEOUT).unwrap_or(name),
            false => name,
        }
    }

    /// Applies an entry `./`, which has the attributes of the extraction directory.
    fn root_entry(&mut self, entry: TarEntry) -> Result<()> {
        match entry.kind {
            TarEntryKind::Directory => {
                self.remember(Vec::new(), entry);
                Ok(())
            }
            _ => Err(broken!(
                "entry `{}` would replace the root directory",
                lossy(&entry.path)
            )),
        }
    }

    /// Splits a path into components; `None` if stripping leaves none.
    fn components<'p>(&self, path: &'p [u8], entry: &[u8]) -> Result<Option<Vec<&'p [u8]>>> {
        if path.is_empty() {
            return Err(broken!("entry `{}` has an empty name", lossy(entry)));
        }
        let strip = self.options.strip_components;
        let (mut components, mut parts) = (Vec::new(), 0);
        for part in path.split(|byte| *byte == b'/') {
            match part {
                b"" => continue,
                b".." => {
                    return Err(broken!("entry `{}` leaves the directory", lossy(entry)));
                }
                part if self.file_name(part).len() > 255 => {
                    return Err(broken!(
                        "entry `{}...` has a name of {} bytes (limit 255)",
                        lossy(&part[..32]),
                        part.len()
                    ));
                }
                _ => parts += 1,
            }
            // GNU tar counts a `.` component, too.
            if parts > strip && part != b"." {
                components.push(part);
            }
        }
        if components.len() > self.options.limits.depth {
            return Err(broken!(
                "entry `{}...` is {} directories deep (limit {})",
                lossy(&path[..64.min(path.len())]),
                components.len(),
                self.options.limits.depth
            ));
        }
        Ok((strip == 0 || parts > strip).then_some(components))
    }

    /// Opens the directory with these components as the top of the stack, making missing directories.
    pub(crate) fn enter(&mut self, components: &[&[u8]], entry: &[u8]) -> Result<()> {
        let common = self
            .stack
            .iter()
            .zip(components)
            .take_while(|((name, _), want)| name == *want)
            .count();
        self.stack.truncate(common);
        for (depth, name) in components.iter().enumerate().skip(common) {
            let parent = self.parent();
            let fd = match open_path(parent, name) {
                Err(Errno::ENOENT) => {
                    nix::sys::stat::mkdirat(parent, *name, Mode::S_IRWXU)
                        .context(|| cannot("make the directory of", entry))?;
                    let opened = open_path(parent, name);
                    self.directories
                        .insert(components[..=depth].join(&b'/'), Attributes::implied());
                    opened
                }
                other => other,
            };
            let fd = fd.map_err(|error| match error {
                Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV => broken!(
                    "entry `{}` goes through `{}`, which is {}",
                    lossy(entry),
                    lossy(&components[..=depth].join(&b'/')),
                    if error == Errno::EXDEV {
                        "on another file system"
                    } else {
                        "not a directory"
                    }
                ),
                error => Error::from(std::io::Error::from(error)),
            })?;
            self.note_made(&components[..=depth].join(&b'/'));
            self.stack.push((name.to_vec(), fd));
        }
        Ok(())
    }

    pub(crate) fn parent(&self) -> BorrowedFd<'_> {
        self.stack
            .last()
            .map_or(self.root.fd(), |(_, fd)| fd.as_fd())
    }

    fn remember(&mut self, path: Vec<u8>, entry: TarEntry) {
        self.directories.insert(
            path,
            Attributes {
                mode: entry.mode,
                owner: (entry.uid, entry.gid),
                mtime: Some(entry.mtime),
                xattrs: entry.xattrs,
            },
        );
    }

    fn directory(&mut self, name: &[u8], path: Vec<u8>, entry: TarEntry) -> Result<()> {
        // An existing directory stays and gets new attributes. A link to a directory is replaced, never followed.
        if open_path(self.parent(), name).is_err() {
            self.replacing(name, &path, |parent| {
                nix::sys::stat::mkdirat(parent, name, Mode::S_IRWXU)
            })?;
        }
        self.remember(path, entry);
        Ok(())
    }

    /// Removes the entry that is replaced: a file, an empty directory, or a directory that lower layers filled.
    fn clear(&mut self, name: &[u8], path: &[u8]) -> Result<()> {
        match nix::unistd::unlinkat(self.parent(), name, UnlinkatFlags::NoRemoveDir) {
            Err(Errno::EISDIR) => {}
            other => return other.context(|| cannot("replace", path)),
        }
        if self.is_upper() {
            let parent = self.parent().try_clone_to_owned()?;
            self.remove_lower(parent.as_fd(), name, path)?;
        }
        match nix::unistd::unlinkat(self.parent(), name, UnlinkatFlags::RemoveDir) {
            Ok(()) => {
                self.directories.remove(path);
                Ok(())
            }
            Err(Errno::ENOTEMPTY | Errno::EEXIST) => Err(broken!(
                "entry `{}` would replace a directory that is not empty",
                lossy(path)
            )),
            Err(error) => Err(error).context(|| cannot("replace", path)),
        }
    }

    /// Calls `make`. If the name exists, removes it and calls `make` again.
    fn replacing<T>(
        &mut self,
        name: &[u8],
        path: &[u8],
        make: impl Fn(BorrowedFd<'_>) -> nix::Result<T>,
    ) -> Result<T> {
        match make(self.parent()) {
            Err(Errno::EEXIST) => {
                self.clear(name, path)?;
                make(self.parent()).context(|| cannot("make", path))
            }
            other => other.context(|| cannot("make", path)),
        }
    }

    fn hard_link(&mut self, name: &[u8], path: &[u8], target: &[u8], entry: &[u8]) -> Result<()> {
        let described = || {
            broken!(
                "hard link `{}` to `{}`, which is not in the archive before it as a file",
                lossy(entry),
                lossy(target)
            )
        };
        let components = self.components(target, entry)?.unwrap_or_default();
        let Some((target_name, parents)) = components.split_last() else {
            return Err(described());
        };
        // A link to itself is valid, but replacing the name would destroy the file.
        if components.join(&b'/') == path {
            return Ok(());
        }
        let parents = parents.join(&b'/');
        let directory = match open_path(self.root.fd(), or_root(&parents)) {
            Err(Errno::ENOENT | Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV) => {
                return Err(described());
            }
            other => other.context(|| cannot("find the target of", entry))?,
        };
        let inode = |fd: BorrowedFd<'_>, name: &[u8]| {
            beneath::stat(fd, name).map(|stat| (stat.st_dev, stat.st_ino))
        };
        let found = inode(directory.as_fd(), target_name).map_err(|_| described())?;
        if open_path(directory.as_fd(), target_name).is_ok() {
            return Err(described());
        }
        if inode(self.parent(), name) == Ok(found) {
            return Ok(());
        }
        self.replacing(name, path, |parent| {
            nix::unistd::linkat(&directory, *target_name, parent, name, AtFlags::empty())
        })
    }

    /// Makes an entry other than a directory, and sets its attributes.
    fn file<R: BufRead>(
        &mut self,
        reader: &mut Reader<R>,
        path: &[u8],
        entry: &TarEntry,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let name = path.rsplit(|byte| *byte == b'/').next().unwrap_or(path);
        match &entry.kind {
            TarEntryKind::File { size, map } => {
                let file = self.replacing(name, path, |parent| beneath::create(parent, name))?;
                let map = map.as_deref();
                copy_data(reader, &file, *size, map, &entry.path, self.cancel)?;
                self.finish_file(&file, entry)?;
                progress(self.report.bytes);
                return Ok(());
            }
            TarEntryKind::Symlink(target) => {
                self.replacing(name, path, |parent| {
                    nix::unistd::symlinkat(target.as_slice(), parent, name)
                })?;
            }
            TarEntryKind::Fifo => {
                self.replacing(name, path, |parent| {
                    nix::unistd::mkfifoat(parent, name, Mode::S_IRUSR)
                })?;
            }
            TarEntryKind::Character(major, minor) | TarEntryKind::Block(major, minor) => {
                let is_whiteout = matches!(entry.kind, TarEntryKind::Character(0, 0));
                if self.options.devices == Devices::Skip || is_whiteout {
                    if beneath::stat(self.parent(), name).is_ok() {
                        // The archive replaces it, although not by anything that is made here.
                        self.clear(name, path)?;
                    }
                    self.report.drop("device node".into());
                    return Ok(());
                }
                let kind = if matches!(entry.kind, TarEntryKind::Block(..)) {
                    SFlag::S_IFBLK
                } else {
                    SFlag::S_IFCHR
                };
                let device = nix::sys::stat::makedev(*major, *minor);
                let made = self.replacing(name, path, |parent| {
                    match nix::sys::stat::mknodat(parent, name, kind, Mode::S_IRUSR, device) {
                        Err(Errno::EPERM) => Ok(false),
                        other => other.map(|()| true),
                    }
                })?;
                if !made {
                    self.report.drop("device node".into());
                    return Ok(());
                }
            }
            TarEntryKind::Directory | TarEntryKind::HardLink(_) => {}
        }
        self.finish_by_name(name, entry)
    }
}

fn names_of(entry: &TarEntry) -> u64 {
    let link = match &entry.kind {
        TarEntryKind::Symlink(target) | TarEntryKind::HardLink(target) => target.len(),
        _ => 0,
    };
    let attributes = entry.xattrs.iter();
    let attributes = attributes.map(|(name, value)| name.len() + value.len());
    (entry.path.len() + link + attributes.sum::<usize>()) as u64
}

/// Opens a directory without read permission. `path` may have several components.
pub(crate) fn open_path(parent: BorrowedFd<'_>, path: &[u8]) -> nix::Result<OwnedFd> {
    beneath::open(parent, path, OFlag::O_PATH | OFlag::O_DIRECTORY)
}

/// Returns a path in the tree, which is `.` for the root.
pub(crate) fn or_root(path: &[u8]) -> &[u8] {
    if path.is_empty() { b"." } else { path }
}

pub(crate) fn cannot(what: &str, path: &[u8]) -> String {
    format!("cannot {what} `{}`", lossy(path))
}
