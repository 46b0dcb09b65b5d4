//! Owns the listing of a directory: the entry at each path below it. Follows no links and enters no mount points.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Component, Path, PathBuf};
use std::time::{Duration, SystemTime};

use nix::errno::Errno;
use nix::fcntl::{OFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstat};
use serde::{Deserialize, Serialize};

use super::writer;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _, exists};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase", tag = "type")]
pub enum Content {
    File {
        /// In bytes.
        size: u64,
        /// SHA-256 of the content, once it was read.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        sha256: Option<String>,
        /// The first name of the same file in this listing, for a hard link.
        #[serde(
            default,
            skip_serializing_if = "Option::is_none",
            with = "optional_path"
        )]
        hardlink: Option<PathBuf>,
    },
    Directory {
        /// Whether it existed before the step that left these results.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        existed: bool,
    },
    Symlink {
        #[serde(with = "path")]
        target: PathBuf,
    },
    /// An entry of a type whose content cannot be kept.
    #[serde(skip)]
    Special(SFlag),
}

impl Content {
    pub fn name(&self) -> &'static str {
        match self {
            Self::File { .. } => "a regular file",
            Self::Directory { .. } => "a directory",
            Self::Symlink { .. } => "a symbolic link",
            Self::Special(SFlag::S_IFIFO) => "a FIFO",
            Self::Special(SFlag::S_IFSOCK) => "a socket",
            Self::Special(_) => "a device",
        }
    }
}

/// Identifies one version of an entry: a write changes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
struct Mark {
    device: u64,
    inode: u64,
    /// Whether the file has several names. Otherwise its inode number proves nothing: FAT and many FUSE file systems
    /// give the number of a file that left the kernel's cache to another one.
    is_linked: bool,
    ctime: (i64, i64),
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListingEntry {
    #[serde(flatten)]
    pub content: Content,
    /// Permission bits; a link has none of its own.
    #[serde(deserialize_with = "permissions")]
    pub mode: u32,
    /// Modification time, in seconds and nanoseconds.
    pub mtime: (i64, i64),
    #[serde(skip)]
    mark: Mark,
}

/// The bits of a mode that an entry keeps: rights, but neither set-user-ID, set-group-ID nor sticky.
pub(super) const PERMISSIONS: u32 = 0o777;

/// A listing may come from another machine, so other bits are dropped.
fn permissions<'de, D: serde::Deserializer<'de>>(from: D) -> std::result::Result<u32, D::Error> {
    Ok(u32::deserialize(from)? & PERMISSIONS)
}

impl ListingEntry {
    fn new(content: Content, stat: &FileStat) -> Self {
        let is_link = matches!(content, Content::Symlink { .. });
        Self {
            content,
            mode: match is_link {
                true => PERMISSIONS,
                false => stat.st_mode & PERMISSIONS,
            },
            mtime: (stat.st_mtime, stat.st_mtime_nsec),
            mark: Mark {
                device: stat.st_dev,
                inode: stat.st_ino,
                is_linked: stat.st_nlink > 1,
                ctime: (stat.st_ctime, stat.st_ctime_nsec),
            },
        }
    }

    pub fn is_directory(&self) -> bool {
        matches!(self.content, Content::Directory { .. })
    }

    /// Returns whether the last change was so long before a listing at `taken` that a later one has another time.
    fn is_settled(&self, taken: SystemTime) -> bool {
        const SETTLED: Duration = Duration::from_secs(2);
        let changed = Duration::from_secs(u64::try_from(self.mark.ctime.0).unwrap_or(0));
        let taken = taken.duration_since(SystemTime::UNIX_EPOCH);
        taken.is_ok_and(|taken| taken > changed + SETTLED)
    }

    /// Returns whether this is still the settled entry `old`, whose change time was `ctime`, whatever its inode number.
    /// FAT and many FUSE file systems number an entry that left the kernel's cache anew, and report its modification
    /// time as its change time.
    fn is_still(&self, old: &Self, ctime: (i64, i64)) -> bool {
        (self.mark.ctime == ctime || self.mark.ctime == self.mtime)
            && (self.mtime, self.mode) == (old.mtime, old.mode)
            && self.content == old.content
    }

    /// Returns whether two entries found on disk are names of the same file.
    pub fn is_same_file(&self, other: &Self) -> bool {
        self.mark.is_linked && self.mark == other.mark
    }
}

#[derive(Clone, Debug)]
pub(crate) enum PathState {
    Free,
    /// A symlink, file or mount point is in the way.
    Blocked,
    Taken(ListingEntry),
}

/// The entries below a directory, each directory before its content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Listing {
    /// By path below the directory.
    pub entries: BTreeMap<PathBuf, ListingEntry>,
}

impl Listing {
    /// Reads a directory; a missing one has no entries.
    pub fn of(directory: &Path) -> Result<Self> {
        match beneath::open_path(directory) {
            Err(_) if !exists(directory)? => Ok(Self::default()),
            top => Self::below(&top?, directory),
        }
    }

    /// Reads an open directory; a removed one has no entries. Errors name it `directory`.
    pub(crate) fn below(top: &OwnedFd, directory: &Path) -> Result<Self> {
        let shown = |below: &Path| format!("cannot read `{}`", directory.join(below).display());
        let mut listing = Self::default();
        // One descriptor per level would run out: a step decides the depth.
        let mut waiting = vec![PathBuf::new()];
        while let Some(below) = waiting.pop() {
            let open = beneath::open_below(top, &below);
            let found = match open.and_then(|open| entries(&open)) {
                Err(Errno::EXDEV | Errno::ENOENT) => continue,
                other => other.context(|| shown(&below))?,
            };
            for (name, entry) in found {
                let path = below.join(OsStr::from_bytes(name.as_bytes()));
                if entry.is_directory() {
                    waiting.push(path.clone());
                }
                listing.entries.insert(path, entry);
            }
        }
        listing.find_hard_links();
        Ok(listing)
    }

    fn find_hard_links(&mut self) {
        let mut first = HashMap::new();
        for (path, entry) in &mut self.entries {
            if let Content::File { hardlink, .. } = &mut entry.content
                && entry.mark.is_linked
            {
                let known = first.entry(entry.mark).or_insert_with(|| path.clone());
                *hardlink = (*known != *path).then(|| known.clone());
            }
        }
    }

    /// Returns the entries that are new or were written to since the listing `before`, taken at `taken`, without
    /// unfinished ones.
    pub fn since(mut self, before: &Self, taken: SystemTime) -> Self {
        self.entries.retain(|path, entry| {
            if writer::is_unfinished(path, entry) {
                return false;
            }
            let old = before.entries.get(path);
            let is_new = old.is_none_or(|old| {
                entry.mark != old.mark
                    && !(old.is_settled(taken) && entry.is_still(old, old.mark.ctime))
            });
            if let (Content::Directory { existed }, Some(old)) = (&mut entry.content, old) {
                *existed = old.is_directory() && old.mode == entry.mode;
            }
            is_new
        });
        let names: BTreeSet<PathBuf> = self.entries.keys().cloned().collect();
        for entry in self.entries.values_mut() {
            if let Content::File { hardlink, .. } = &mut entry.content {
                hardlink.take_if(|first| !names.contains(first));
            }
        }
        self
    }

    /// Adds the results of a later step.
    pub fn extend(&mut self, later: Self) {
        for (path, mut entry) in later.entries {
            if let Content::Directory { existed: true } = entry.content {
                // An existing directory is a result only if an earlier step created it.
                match self.entries.get(&path) {
                    Some(old) if old.is_directory() => entry.content = old.content.clone(),
                    _ => continue,
                }
            }
            if !entry.is_directory() {
                self.remove(&path);
            }
            self.entries.insert(path, entry);
        }
    }

    /// Removes an entry and everything below it.
    pub fn remove(&mut self, path: &Path) {
        // Paths below a directory follow it directly: looking at all paths for each would be quadratic.
        let from_here = self
            .entries
            .range(path.to_owned()..)
            .map(|(known, _)| known);
        let gone = from_here.take_while(|known| known.starts_with(path));
        for known in gone.cloned().collect::<Vec<_>>() {
            self.entries.remove(&known);
        }
    }
}

/// The marks of some entries, to detect later writes. They survive a reboot, which changes device numbers.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Marks(Vec<MarkedPath>);

#[derive(Clone, Debug, Serialize, Deserialize)]
struct MarkedPath {
    #[serde(with = "path")]
    path: PathBuf,
    inode: u64,
    /// `None` for a directory, whose ctime changes with the names in it.
    ctime: Option<(i64, i64)>,
    /// The file or link itself, unless it had just changed: its inode number may change too.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    settled: Option<ListingEntry>,
}

impl Marks {
    /// Returns the marks of entries of a listing taken at `taken`; with `made`, skips directories that existed before.
    pub(crate) fn of(listing: &Listing, taken: SystemTime, made: bool) -> Self {
        let entries = listing.entries.iter();
        let entries = entries.filter(|(_, entry)| {
            !(made && matches!(entry.content, Content::Directory { existed: true }))
        });
        let marked = entries.map(|(path, entry)| {
            let is_kept = matches!(
                entry.content,
                Content::File { .. } | Content::Symlink { .. }
            );
            MarkedPath {
                path: path.clone(),
                inode: entry.mark.inode,
                ctime: (!entry.is_directory()).then_some(entry.mark.ctime),
                settled: (is_kept && entry.is_settled(taken)).then(|| entry.clone()),
            }
        });
        Self(marked.collect())
    }

    /// Returns the paths whose entries in a listing have these marks.
    pub(crate) fn unchanged(&self, now: &Listing) -> BTreeSet<PathBuf> {
        let is_unchanged = |known: &&MarkedPath| {
            now.entries.get(&known.path).is_some_and(|entry| {
                let is_still = |(old, ctime)| entry.is_still(old, ctime);
                entry.mark.inode == known.inode
                    && known.ctime == (!entry.is_directory()).then_some(entry.mark.ctime)
                    || known
                        .settled
                        .as_ref()
                        .zip(known.ctime)
                        .is_some_and(is_still)
            })
        };
        let unchanged = self.0.iter().filter(is_unchanged);
        unchanged.map(|known| known.path.clone()).collect()
    }
}

pub(crate) fn path_state(directory: &Path, path: &Path) -> Result<PathState> {
    let shown = || format!("cannot read `{}`", directory.join(path).display());
    let top = match beneath::open_path(directory) {
        Err(_) if !exists(directory)? => return Ok(PathState::Free),
        other => other?,
    };
    let (parent, name) = split(path)?;
    let parent = match beneath::open_below(&top, parent) {
        Err(Errno::ENOENT) => return Ok(PathState::Free),
        Err(Errno::ELOOP | Errno::ENOTDIR | Errno::EXDEV) => return Ok(PathState::Blocked),
        other => other.context(shown)?,
    };
    match entry(&parent, &name) {
        Err(Errno::ENOENT) => Ok(PathState::Free),
        other => Ok(PathState::Taken(other.context(shown)?)),
    }
}

/// Splits a path below a directory into its parent and its name; refuses a path that leads elsewhere.
pub(super) fn split(path: &Path) -> Result<(&Path, CString)> {
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    let name = path.file_name().map(|name| CString::new(name.as_bytes()));
    match (path.parent(), name) {
        (Some(parent), Some(Ok(name))) if path.components().all(plain) => Ok((parent, name)),
        _ => Err(invalid!(
            "`{}` is not a path below a directory",
            path.display()
        )),
    }
}

fn entries(directory: &OwnedFd) -> nix::Result<Vec<(CString, ListingEntry)>> {
    let mut found = Vec::new();
    for (name, _) in beneath::entries(directory)? {
        match entry(directory, &name) {
            // The entry was removed after it was listed.
            Err(Errno::ENOENT) => {}
            other => found.push((name, other?)),
        }
    }
    Ok(found)
}

fn entry(directory: impl AsFd, name: &std::ffi::CStr) -> nix::Result<ListingEntry> {
    let directory = directory.as_fd();
    let mut stat = beneath::stat(directory, name)?;
    let content = match beneath::kind(&stat) {
        SFlag::S_IFREG => Content::File {
            size: u64::try_from(stat.st_size).unwrap_or(0),
            sha256: None,
            hardlink: None,
        },
        SFlag::S_IFDIR => {
            // A subvolume's root has another inode number seen from inside, and the mark must have that one.
            match beneath::open(directory, name, OFlag::O_PATH | OFlag::O_DIRECTORY) {
                Ok(opened) => stat = fstat(&opened)?,
                Err(Errno::EXDEV) => {}
                Err(error) => return Err(error),
            }
            Content::Directory { existed: false }
        }
        SFlag::S_IFLNK => Content::Symlink {
            target: readlinkat(directory, name)?.into(),
        },
        kind => Content::Special(kind),
    };
    Ok(ListingEntry::new(content, &stat))
}

/// Encodes a path as text, with backslashes and bytes that are not UTF-8 as `\xNN`.
pub(crate) mod path {
    use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
    use std::path::{Path, PathBuf};

    use serde::{Deserialize as _, Deserializer, Serializer};

    pub(crate) fn encode(path: &Path) -> String {
        let mut text = String::new();
        for chunk in path.as_os_str().as_bytes().utf8_chunks() {
            text.push_str(&chunk.valid().replace('\\', "\\x5c"));
            for byte in chunk.invalid() {
                text.extend(['\\', 'x']);
                text.push_str(&hex::encode([*byte]));
            }
        }
        text
    }

    pub(crate) fn decode(text: &str) -> Option<PathBuf> {
        let mut pieces = text.split('\\');
        let mut bytes = pieces.next()?.as_bytes().to_vec();
        for piece in pieces {
            let digits = piece.strip_prefix('x')?.get(..2)?;
            bytes.push(u8::from_str_radix(digits, 16).ok()?);
            bytes.extend(&piece.as_bytes()[3..]);
        }
        Some(std::ffi::OsString::from_vec(bytes).into())
    }

    pub(crate) fn serialize<S: Serializer>(path: &Path, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&encode(path))
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
        parse(String::deserialize(from)?)
    }

    pub(super) fn parse<E: serde::de::Error>(text: String) -> Result<PathBuf, E> {
        decode(&text).ok_or_else(|| E::custom(format!("`{text}` is not an escaped path")))
    }
}

mod optional_path {
    use super::{PathBuf, path};
    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::ref_option, reason = "the signature is serde's")]
    pub(super) fn serialize<S: Serializer>(
        value: &Option<PathBuf>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        value.as_deref().map(path::encode).serialize(to)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<PathBuf>, D::Error> {
        let text = Option::<String>::deserialize(from)?;
        text.map(path::parse).transpose()
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Paths(pub Vec<PathBuf>);

impl Paths {
    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Serialize for Paths {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.0.iter().map(|one| path::encode(one)))
    }
}

impl<'de> Deserialize<'de> for Paths {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let decode = |text: String| {
            let found = path::decode(&text).filter(|path| split(path).is_ok());
            found.ok_or_else(|| {
                serde::de::Error::custom(format!("`{text}` is not a path below a directory"))
            })
        };
        let texts = Vec::<String>::deserialize(from)?;
        let paths: std::result::Result<_, D::Error> = texts.into_iter().map(decode).collect();
        Ok(Self(paths?))
    }
}

#[derive(Serialize, Deserialize)]
struct Line {
    #[serde(with = "path")]
    path: PathBuf,
    #[serde(flatten)]
    entry: ListingEntry,
}

impl Serialize for Listing {
    fn serialize<S: serde::Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        let lines = self.entries.iter().map(|(path, entry)| Line {
            path: path.clone(),
            entry: entry.clone(),
        });
        to.collect_seq(lines)
    }
}

impl<'de> Deserialize<'de> for Listing {
    fn deserialize<D: serde::Deserializer<'de>>(from: D) -> std::result::Result<Self, D::Error> {
        let mut entries = BTreeMap::new();
        for Line { path, entry } in Vec::<Line>::deserialize(from)? {
            let linked = match &entry.content {
                Content::File { hardlink, .. } => hardlink.as_deref(),
                Content::Directory { .. } | Content::Symlink { .. } | Content::Special(_) => None,
            };
            for path in [Some(path.as_path()), linked].into_iter().flatten() {
                split(path).map_err(serde::de::Error::custom)?;
            }
            entries.insert(path, entry);
        }
        Ok(Self { entries })
    }
}

#[cfg(test)]
mod tests;
