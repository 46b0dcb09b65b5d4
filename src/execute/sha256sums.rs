//! Owns the manifest of an output volume, `SHA256SUMS`: the files that `export` steps left there.
//!
//! A comment before the lines of an export has their number and their SHA-256, so that no line from another program is
//! taken for one of them, wherever it is added.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write as _;
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use sha2::{Digest as _, Sha256};

use crate::store::export;
use crate::sys::account::{Existing, FilePlace, Rights};
use crate::sys::checksum;
use crate::sys::error::{Result, if_exists};
use crate::tree::listing;

/// Name of the manifest, whose format is that of `sha256sum`.
pub(super) const MANIFEST: &str = "SHA256SUMS";
/// The beginning of the comment before the lines of an export.
const MARK: &str = "# exported by rockenv: ";

/// The entry that an export left at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Exported {
    /// A file, by SHA-256.
    File(String),
    /// A link, by target.
    Link(PathBuf),
}

impl Exported {
    /// Returns its line in a manifest. For `sha256sum`, the line of a link is a comment, and a line with escapes in the
    /// name begins with a backslash.
    fn line(&self, name: &Path) -> Vec<u8> {
        let sum = match self {
            Self::File(sum) => sum,
            Self::Link(target) => {
                return format!("# {} -> {}\n", word(name), word(target)).into_bytes();
            }
        };
        let name = name.as_os_str().as_bytes();
        let mut line = Vec::new();
        if name.contains(&b'\n') || name.contains(&b'\\') {
            line.push(b'\\');
        }
        line.extend([sum.as_bytes(), b"  "].concat());
        for byte in name {
            match byte {
                b'\n' => line.extend(b"\\n"),
                b'\\' => line.extend(b"\\\\"),
                other => line.push(*other),
            }
        }
        line.push(b'\n');
        line
    }

    fn parse(line: &[u8]) -> Option<(PathBuf, Self)> {
        if let Some(link) = line.strip_prefix(b"# ") {
            let (name, target) = std::str::from_utf8(link).ok()?.split_once(" -> ")?;
            let target = listing::path::decode(target)?;
            return Some((listing::path::decode(name)?, Self::Link(target)));
        }
        let escaped = line.strip_prefix(b"\\");
        let (sum, name) = escaped.unwrap_or(line).split_at_checked(64)?;
        let sum = std::str::from_utf8(sum).ok()?;
        let name = name.strip_prefix(b"  ")?;
        let name = match escaped {
            Some(_) => unescaped(name)?,
            None => name.to_vec(),
        };
        let name = OsString::from_vec(name);
        checksum::is_sha256(sum).then(|| (name.into(), Self::File(sum.to_owned())))
    }
}

/// Returns lines with their comment before them; empty if there are no lines.
fn marked(lines: &[Vec<u8>]) -> Vec<u8> {
    if lines.is_empty() {
        return Vec::new();
    }
    let text = lines.concat();
    let (count, sum) = (lines.len(), hex::encode(Sha256::digest(&text)));
    [format!("{MARK}{count} {sum}\n").into_bytes(), text].concat()
}

/// Returns the entries that exports left, if `lines` begin with a comment and the lines that it covers.
fn exported(lines: &[&[u8]]) -> Option<Vec<(PathBuf, Exported)>> {
    let (mark, rest) = lines.split_first()?;
    let count = std::str::from_utf8(mark.strip_prefix(MARK.as_bytes())?).ok()?;
    let ours = rest.get(..count.split_once(' ')?.0.parse().ok()?)?;
    let whole = ours.iter().map(|line| [line, &b"\n"[..]].concat());
    let whole: Vec<_> = whole.collect();
    if !marked(&whole).starts_with(&[mark, &b"\n"[..]].concat()) {
        return None;
    }
    ours.iter().map(|line| Exported::parse(line)).collect()
}

/// Decodes a name from an escaped line of `sha256sum`.
fn unescaped(name: &[u8]) -> Option<Vec<u8>> {
    let mut bytes = name.iter();
    let mut plain = Vec::new();
    while let Some(byte) = bytes.next() {
        plain.push(match byte {
            b'\\' => match bytes.next()? {
                b'n' => b'\n',
                b'\\' => b'\\',
                _ => return None,
            },
            other => *other,
        });
    }
    Some(plain)
}

/// Encodes a path without white space.
fn word(path: &Path) -> String {
    let mut word = String::new();
    for character in listing::path::encode(path).chars() {
        match character {
            ' ' | '\t' | '\n' | '\r' => {
                word.extend(['\\', 'x']);
                word.push_str(&hex::encode(character.to_string().as_bytes()));
            }
            other => word.push(other),
        }
    }
    word
}

/// How often a manifest is opened that another export replaces each time.
const MOST_ATTEMPTS: u32 = 100;

/// Opens the manifest for appending, and locks it against exports of other envs to the same directory, if its file
/// system can lock it. The directory may be locked by the user: `flock DIRECTORY rockenv up ENV`.
pub(super) fn lock(target: &Path) -> Result<fs::File> {
    let path = target.join(MANIFEST);
    let mut attempts = 1;
    loop {
        let file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(&path)?;
        file.file().lock().ok();
        // The other export may have replaced the file. Some FUSE file systems never give it the same number twice.
        let (locked, now) = (file.metadata()?, if_exists(fs::symlink_metadata(&path))?);
        let is_it = now.is_some_and(|now| (now.dev(), now.ino()) == (locked.dev(), locked.ino()));
        if is_it || attempts == MOST_ATTEMPTS {
            return Ok(file);
        }
        attempts += 1;
    }
}

/// The manifest of an output volume: everything that exports left there.
pub(super) struct Manifest {
    /// Lines that no export wrote.
    others: Vec<Vec<u8>>,
    /// Exported files by path: two versions if an export was killed while replacing one.
    left: BTreeMap<PathBuf, Vec<Exported>>,
    /// Files that this export wrote.
    written: BTreeMap<PathBuf, Vec<Exported>>,
    /// Whether its last line lacks a newline.
    is_open: bool,
}

impl Manifest {
    pub(super) fn read(target: &Path) -> Result<Self> {
        let text = if_exists(fs::read(target.join(MANIFEST)))?.unwrap_or_default();
        let mut manifest = Self {
            others: Vec::new(),
            left: BTreeMap::new(),
            written: BTreeMap::new(),
            is_open: !text.is_empty() && !text.ends_with(b"\n"),
        };
        let whole = text.strip_suffix(b"\n").unwrap_or(&text);
        let lines = whole.split(|byte| *byte == b'\n');
        let lines: Vec<&[u8]> = lines.filter(|_| !text.is_empty()).collect();
        let mut rest = &lines[..];
        while let Some((line, below)) = rest.split_first() {
            let Some(ours) = exported(rest) else {
                manifest.others.push((*line).to_owned());
                rest = below;
                continue;
            };
            rest = &below[ours.len()..];
            for (name, left) in ours {
                manifest.left.entry(name).or_default().push(left);
            }
        }
        Ok(manifest)
    }

    /// Refuses to replace a file that no export left or that was changed since, unless the content is the same.
    pub(super) fn may_replace(&self, target: &Path, name: &Path, with: &Exported) -> Result<()> {
        let place = target.join(name);
        let there = match fs::symlink_metadata(&place) {
            Ok(old) if old.is_file() => Some(Exported::File(export::digest(target, name)?)),
            Ok(old) if old.is_symlink() => Some(Exported::Link(fs::read_link(&place)?)),
            // No export leaves a directory in place of a file, or a FIFO, socket or device.
            Ok(_) => None,
            Err(_) => return Ok(()),
        };
        let left = self.left.get(name);
        if let Some(there) = there
            && (*with == there || left.is_some_and(|left| left.contains(&there)))
        {
            return Ok(());
        }
        let why = match left {
            Some(_) => "was changed since an export wrote it",
            None => "exists and was not written by an export",
        };
        Err(
            step_failed!("`{}` {why}; not overwriting it", place.display())
                .help("move it away in the output volume, and run `up` again"),
        )
    }

    /// Adds a line before the file exists. Without the line, the next export would refuse to replace the file.
    pub(super) fn announce(&mut self, target: &Path, name: &Path, left: &Exported) -> Result<()> {
        // `write` replaces the file, and would lose a line that is added to the old one.
        let mut file = lock(target)?;
        let end = if self.is_open { "\n" } else { "" };
        self.is_open = false;
        let line = marked(&[left.line(name)]);
        Ok(file.write_all(&[end.as_bytes(), &line].concat())?)
    }

    /// Records a file that was written.
    pub(super) fn wrote(&mut self, name: &Path, left: Exported) {
        self.written.insert(name.to_owned(), vec![left]);
    }

    /// Writes the manifest. Lines of this export replace old lines of the same files. Lines of exported files that are
    /// gone are left out. Other lines stay, as do those that another program added since, and the file's mode.
    pub(super) fn write(self, target: &Path) -> Result<()> {
        let _lock = lock(target)?;
        let mut now = Self::read(target)?;
        // This export has replaced such a file.
        let is_old = |line: &[u8]| {
            Exported::parse(line).is_some_and(|(name, _)| self.written.contains_key(&name))
        };
        let others = now.others.iter().filter(|line| !is_old(line));
        let others: Vec<_> = others.map(|line| [line, &b"\n"[..]].concat()).collect();
        now.left.extend(self.written);
        let left = now.left.iter().filter(|(name, _)| {
            let found = fs::symlink_metadata(target.join(name));
            !found.is_err_and(|error| error.kind() == std::io::ErrorKind::NotFound)
        });
        let left = left.flat_map(|(name, left)| left.iter().map(|left| left.line(name)));
        let left: Vec<_> = left.collect();
        let text = [others.concat(), marked(&left)].concat();
        FilePlace::new(&Rights::Own, &target.join(MANIFEST))?.put(&text, Existing::Replace)
    }
}
