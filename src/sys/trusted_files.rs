//! Owns what was read of a trusted directory when its digest was computed. Others may write there, so a later read must
//! return the same bytes.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use nix::fcntl::OFlag;
use sha2::{Digest as _, Sha256};

use crate::sys::beneath;
use crate::sys::catalog::Directory;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::shell::quoted_path;
use crate::sys::trust::{CONFIGURATION, DIRECTORIES};

/// Limits on files, levels and bytes: nobody reviews more before trusting a directory.
pub(super) const MOST_FILES: usize = 10_000;
const MOST_LEVELS: usize = 32;
const MOST_BYTES: u64 = 256 << 20;

#[derive(Debug)]
pub(crate) struct FileRead {
    /// Its content, up to the requested limit.
    pub(crate) bytes: Vec<u8>,
    /// Whether any execute bit is set.
    pub(crate) executable: bool,
    /// Its path, with symlinks resolved.
    pub(crate) real: PathBuf,
}

/// rockenv's files in a directory, by path.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Checked {
    directory: PathBuf,
    pub(crate) digest: String,
    /// Files, by the path they were found at and by their resolved path.
    files: BTreeMap<PathBuf, Known>,
    links: BTreeMap<PathBuf, PathBuf>,
    /// Number of names in each directory.
    names: BTreeMap<PathBuf, usize>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
struct Known {
    real: PathBuf,
    executable: bool,
    digest: [u8; 32],
}

impl Checked {
    /// Reads rockenv's files in a directory: names, kinds, executable bits, content, and symlink targets.
    pub(crate) fn read(directory: &Path) -> Result<Self> {
        let mut walk = Walk {
            hash: Sha256::new(),
            files: 0,
            bytes: 0,
            checked: Self {
                directory: directory.to_owned(),
                ..Self::default()
            },
        };
        for name in [CONFIGURATION].into_iter().chain(DIRECTORIES) {
            walk.add(Path::new(name), 0)?;
        }
        Ok(Self {
            digest: hex::encode(walk.hash.finalize()),
            ..walk.checked
        })
    }

    /// Returns whether a path, which has no `..`, is in a part of the directory that was read.
    fn covers(&self, path: &Path) -> bool {
        let below = path.strip_prefix(&self.directory).ok();
        let first = below.and_then(|below| below.components().next());
        let names = [CONFIGURATION].into_iter().chain(DIRECTORIES);
        first.is_some_and(|first| names.into_iter().any(|name| first.as_os_str() == name))
    }

    /// Returns whether a file was read, by its resolved path or the path it was found at.
    pub(crate) fn has(&self, path: &Path) -> bool {
        self.files.contains_key(path)
    }
}

impl From<&FileRead> for Known {
    fn from(read: &FileRead) -> Self {
        Self {
            real: read.real.clone(),
            executable: read.executable,
            digest: Sha256::digest(&read.bytes).into(),
        }
    }
}

/// Refuses the content of a file that differs from what was checked. Files outside the checked directories pass.
pub(crate) fn file(directories: &[Directory], path: &Path, found: &FileRead) -> Result<()> {
    hold(directories, path, |checked, path| {
        Some(*checked.files.get(path)? == Known::from(found))
    })
}

/// Like [`file()`], for a symlink and its target.
pub(crate) fn link(directories: &[Directory], path: &Path, text: &Path) -> Result<()> {
    hold(directories, path, |checked, path| {
        Some(checked.links.get(path)? == text)
    })
}

/// Like [`file()`], for a directory and its number of names; each entry is checked by itself.
pub(crate) fn names(directories: &[Directory], path: &Path, count: usize) -> Result<()> {
    hold(directories, path, |checked, path| {
        Some(*checked.names.get(path)? == count)
    })
}

/// `is_same` returns `None` for an entry that was missing when the directory was checked.
fn hold(
    directories: &[Directory],
    path: &Path,
    is_same: impl Fn(&Checked, &Path) -> Option<bool>,
) -> Result<()> {
    let plain = without_dots(&std::path::absolute(path)?);
    let mut checked = directories
        .iter()
        .filter_map(|directory| directory.checked.as_ref());
    let is_held = |checked: &Checked| {
        let is_same = is_same(checked, &plain);
        is_same.unwrap_or_else(|| !checked.covers(&plain))
    };
    match checked.all(|checked| is_held(checked)) {
        true => Ok(()),
        false => Err(changed(path)),
    }
}

pub(crate) fn changed(path: &Path) -> Error {
    invalid!(
        "`{}` changed while it was read, and its directory has to be trusted again",
        path.display()
    )
    .help("rockenv trust")
}

/// Removes `..` from a path textually: the paths in `Checked` are made without resolving symlinks.
pub(crate) fn without_dots(path: &Path) -> PathBuf {
    let mut plain = PathBuf::new();
    for part in path.components() {
        match part {
            Component::ParentDir => {
                plain.pop();
            }
            part => plain.push(part),
        }
    }
    plain
}

/// Reads at most `most` bytes of a regular file, and refuses content that differs from what was checked. `None` if it
/// is not a regular file.
pub(crate) fn read(directories: &[Directory], path: &Path, most: u64) -> Result<Option<FileRead>> {
    let found = open(path, most)?;
    if let Some(found) = &found {
        file(directories, path, found)?;
    }
    Ok(found)
}

/// Reads at most `most` bytes of a regular file; `None` if it is not one. Opens no device: that may have effects.
pub(crate) fn open(path: &Path, most: u64) -> Result<Option<FileRead>> {
    let found = beneath::open_file(path, OFlag::O_PATH)?;
    let opened = beneath::open_regular(found.into_file().into(), OFlag::O_RDONLY)
        .context(|| format!("cannot read `{}`", path.display()))?;
    let file = fs::File::from_parts(opened.into(), path);
    let found = file.metadata()?;
    if !found.is_file() {
        return Ok(None);
    }
    let real = real(&file)?;
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(Some(FileRead {
        bytes,
        executable: found.permissions().mode() & 0o111 != 0,
        real,
    }))
}

/// Returns the path of an open file, with symlinks resolved.
pub(crate) fn real(file: &impl std::os::fd::AsRawFd) -> Result<PathBuf> {
    Ok(fs::read_link(beneath::path_of(file))?)
}

struct Walk {
    hash: Sha256,
    files: usize,
    bytes: u64,
    checked: Checked,
}

impl Walk {
    fn add(&mut self, name: &Path, level: usize) -> Result<()> {
        let top = self.checked.directory.clone();
        let path = top.join(name);
        self.files += 1;
        if self.files > MOST_FILES || level > MOST_LEVELS {
            return Err(too_much(&top));
        }
        self.hash.update(name.as_os_str().as_bytes());
        if let Ok(text) = fs::read_link(&path) {
            self.hash.update(b"\0link\0");
            self.hash.update(text.as_os_str().as_bytes());
            self.checked.links.insert(path.clone(), text);
        }
        let Ok(found) = fs::metadata(&path) else {
            self.hash.update(b"\0absent\0");
            return Ok(());
        };
        if found.is_dir() {
            self.hash.update(b"\0directory\0");
            let entries = fs::read_dir(&path)?;
            let names = entries.map(|entry| Ok(entry?.file_name()));
            let mut names = names.collect::<std::io::Result<Vec<_>>>()?;
            names.sort();
            self.checked.names.insert(path, names.len());
            for below in names {
                self.add(&name.join(below), level + 1)?;
            }
        } else if let Some(read) = open(&path, MOST_BYTES + 1)? {
            self.file(path, read)?;
        } else {
            self.hash.update(b"\0other\0");
        }
        Ok(())
    }

    fn file(&mut self, path: PathBuf, read: FileRead) -> Result<()> {
        self.bytes += read.bytes.len() as u64;
        // Unread bytes could change unnoticed.
        if self.bytes > MOST_BYTES {
            return Err(too_much(&self.checked.directory));
        }
        // A file's relative references are resolved at its real location, so the digest includes that location.
        if read.real != path {
            self.hash.update(b"\0at\0");
            // Relative to the directory, whose path may differ on another machine.
            let below = read.real.strip_prefix(&self.checked.directory);
            let place = below.unwrap_or(&read.real).as_os_str();
            self.hash.update(place.as_bytes());
        }
        let known = Known::from(&read);
        self.hash.update([0, u8::from(known.executable)]);
        self.hash.update(known.digest);
        self.checked.files.insert(read.real, known.clone());
        self.checked.files.insert(path, known);
        Ok(())
    }
}

fn too_much(top: &Path) -> Error {
    invalid!(
        "`{}` has too many files in its profiles, images and hooks to be trusted",
        top.display()
    )
    .help(format!(
        "name the profile's file: rockenv up {}",
        quoted_path(&top.join("NAME.toml"))
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::trust::digest;

    #[test]
    fn only_regular_files_are_opened() {
        let directory = tempfile::tempdir().unwrap();
        let socket = directory.path().join("socket");
        // Opening a socket fails.
        let _listener = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(open(&socket, 1).unwrap().is_none());
    }

    #[test]
    fn a_file_that_is_too_long_to_be_read_whole_is_not_trusted() {
        let directory = tempfile::tempdir().unwrap();
        let profiles = directory.path().join("profiles");
        fs::create_dir(&profiles).unwrap();
        let file = fs::File::create(profiles.join("last")).unwrap();
        file.set_len(MOST_BYTES).unwrap();
        assert!(digest(directory.path()).is_ok());
        file.set_len(MOST_BYTES + 1).unwrap();
        let error = digest(directory.path()).unwrap_err();
        assert!(error.help_text().is_some());
    }
}
