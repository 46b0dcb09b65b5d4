//! Owns which files of the current directory count: a stranger may have written them, and what runs here has privileges.
//!
//! A person trusts a directory by `rockenv trust`, which remembers a digest of its `rockenv.toml`, `profiles/`, `images/` and `hooks/` among
//! that person's configuration. Files that change have to be trusted again.

use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::OFlag;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::sys::account::{self, Existing, Place};
use crate::sys::atomic;
use crate::sys::error::{Error, Result};

/// The variable that names trusted directories, for where nobody can be asked.
pub(crate) const VARIABLE: &str = "ROCKENV_TRUSTED_DIRS";
/// The configuration of a directory.
pub(crate) const CONFIGURATION: &str = "rockenv.toml";
/// Directories of a directory that are searched by name.
const DIRECTORIES: [&str; 3] = ["profiles", "images", "hooks"];
/// What anybody may configure.
const HARMLESS: [&str; 2] = ["jobs", "targets"];
/// What a trusted directory may configure beside that: nothing that names a program, a path or a host.
const TRUSTED: [&str; 7] = [
    "disk-floor",
    "engine",
    "gc",
    "idle",
    "pull",
    "push",
    "reuse",
];
/// More files, levels and bytes than anybody looks through before trusting them.
const MOST_FILES: usize = 10_000;
const MOST_LEVELS: usize = 32;
const MOST_BYTES: u64 = 256 << 20;

/// Whether the files of a directory count.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// There is nothing to trust.
    #[default]
    Empty,
    /// They are as they were when they were trusted.
    Trusted,
    /// They have changed since.
    Changed,
    /// Nobody trusted them.
    Untrusted,
}

/// The current directory, and what of it counts.
#[derive(Clone, Debug, Default)]
pub struct Current {
    /// Where it is, without links.
    pub(crate) directory: PathBuf,
    /// Whether its files count.
    pub(crate) state: State,
    /// What it has that does not count, in words.
    pub(crate) unread: Vec<String>,
}

/// What a person trusts, as it is written down.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trusted {
    /// A directory, or a profile's file.
    pub(crate) path: PathBuf,
    /// Digest of a directory's files.
    #[serde(default)]
    pub(crate) digest: Option<String>,
    /// Directories of the host that the steps of a file may write to.
    #[serde(default)]
    pub(crate) writes: Vec<PathBuf>,
}

impl Current {
    /// Looks at the current directory. `user` is the directory of the user's configuration, `listed` the value of [`VARIABLE`].
    pub(crate) fn look(working: &Path, user: &Path, listed: Option<&str>) -> Self {
        // One that cannot be looked at has nothing that counts.
        let Ok(directory) = fs::canonicalize(working) else {
            return Self::default();
        };
        let names = present(&directory);
        let state = match names.is_empty() {
            true => State::Empty,
            false => state(&directory, user, listed),
        };
        let mut current = Self {
            directory,
            state,
            unread: Vec::new(),
        };
        if !current.counts() {
            let names = names.into_iter().filter(|name| *name != CONFIGURATION);
            current.unread.extend(names.map(|name| format!("{name}/")));
        }
        current
    }

    /// Returns whether its files count.
    pub(crate) fn counts(&self) -> bool {
        self.state == State::Trusted
    }

    /// Returns the keys of its configuration that count, and notes the others.
    pub(crate) fn keep(&mut self, table: toml::Table) -> toml::Table {
        let counts = self.counts();
        let (kept, left): (toml::Table, toml::Table) = table.into_iter().partition(|(key, _)| {
            HARMLESS.contains(&key.as_str()) || counts && TRUSTED.contains(&key.as_str())
        });
        let keys: Vec<String> = left.keys().map(|key| format!("`{key}`")).collect();
        if !keys.is_empty() {
            self.unread
                .push(format!("{} of {CONFIGURATION}", keys.join(", ")));
        }
        kept
    }

    /// Says what does not count, and what to type; nothing where all does.
    pub(crate) fn notice(&self) -> Option<String> {
        let unread = self.unread.join(", ");
        let directory = self.directory.display();
        Some(match self.state {
            _ if self.unread.is_empty() => return None,
            State::Trusted | State::Empty => format!(
                "not read: {unread}: programs, paths and hosts are configured in ~/.config/rockenv/config.toml"
            ),
            State::Changed => {
                format!(
                    "not read, since `{directory}` has changed: {unread}; `rockenv trust` trusts it again"
                )
            }
            State::Untrusted => {
                format!(
                    "not read, since `{directory}` is not trusted: {unread}; `rockenv trust` trusts it"
                )
            }
        })
    }
}

/// Returns whether the files of a directory count.
fn state(directory: &Path, user: &Path, listed: Option<&str>) -> State {
    if is_listed(directory, listed) {
        return State::Trusted;
    }
    let Some(known) = Trusted::read(user, directory) else {
        return State::Untrusted;
    };
    match (known.digest, digest(directory)) {
        (Some(known), Ok(now)) if known == now => State::Trusted,
        _ => State::Changed,
    }
}

/// Returns whether a path is in a directory that [`VARIABLE`] names, or is one.
pub(crate) fn is_listed(path: &Path, listed: Option<&str>) -> bool {
    let listed = listed.unwrap_or_default().split(':').map(Path::new);
    listed
        .filter(|one| one.is_absolute())
        .filter_map(|one| fs::canonicalize(one).ok())
        .any(|one| path.starts_with(one))
}

/// Returns what a directory has of rockenv's.
pub(crate) fn present(directory: &Path) -> Vec<&'static str> {
    let has = |name: &str| {
        let entries = fs::read_dir(directory.join(name)).into_iter().flatten();
        entries.take(MOST_FILES).flatten().any(|entry| {
            let path = entry.path();
            match name {
                "hooks" => path.join("hook.toml").exists(),
                _ => path.extension().is_some_and(|end| end == "toml"),
            }
        })
    };
    let mut found: Vec<_> = DIRECTORIES.into_iter().filter(|name| has(name)).collect();
    if fs::symlink_metadata(directory.join(CONFIGURATION)).is_ok() {
        found.push(CONFIGURATION);
    }
    found
}

/// Returns the digest of what a directory has of rockenv's: names, kinds, executable bits and content, through links.
pub(crate) fn digest(directory: &Path) -> Result<String> {
    let mut walk = Walk {
        hash: Sha256::new(),
        files: 0,
        bytes: 0,
    };
    for name in [CONFIGURATION].into_iter().chain(DIRECTORIES) {
        walk.add(directory, Path::new(name), 0)?;
    }
    Ok(hex::encode(walk.hash.finalize()))
}

struct Walk {
    hash: Sha256,
    files: usize,
    bytes: u64,
}

impl Walk {
    fn add(&mut self, top: &Path, name: &Path, level: usize) -> Result<()> {
        let path = top.join(name);
        self.files += 1;
        if self.files > MOST_FILES || level > MOST_LEVELS {
            return Err(too_much(top));
        }
        self.hash.update(name.as_os_str().as_bytes());
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
            for below in names {
                self.add(top, &name.join(below), level + 1)?;
            }
        } else if let Some(bytes) = read(&path, MOST_BYTES + 1)? {
            self.bytes += bytes.len() as u64;
            // What is not read could change unseen.
            if self.bytes > MOST_BYTES {
                return Err(too_much(top));
            }
            let executable = found.permissions().mode() & 0o111 != 0;
            self.hash.update([0, u8::from(executable)]);
            self.hash.update(Sha256::digest(bytes));
        } else {
            self.hash.update(b"\0other\0");
        }
        Ok(())
    }
}

fn too_much(top: &Path) -> Error {
    Error::invalid(format!(
        "`{}` has too much in its profiles, images and hooks to be trusted",
        top.display()
    ))
    .help(format!(
        "name the profile's file: rockenv up {}/NAME.toml",
        top.display()
    ))
}

/// Reads a regular file, at most so many bytes of it; nothing where it is none. Nobody is waited for who should write to it.
pub(crate) fn read(path: &Path, most: u64) -> Result<Option<Vec<u8>>> {
    let flags = OFlag::O_NONBLOCK | OFlag::O_NOCTTY | OFlag::O_CLOEXEC;
    let file = fs::OpenOptions::new()
        .read(true)
        .custom_flags(flags.bits())
        .open(path)?;
    if !file.metadata()?.is_file() {
        return Ok(None);
    }
    let mut bytes = Vec::new();
    file.take(most).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

impl Trusted {
    fn directory(user: &Path) -> PathBuf {
        user.join("trusted")
    }

    fn file(user: &Path, path: &Path) -> PathBuf {
        let name = hex::encode(Sha256::digest(path.as_os_str().as_bytes()));
        Self::directory(user).join(format!("{}.json", &name[..32]))
    }

    /// Reads what is written down of a path.
    pub(crate) fn read(user: &Path, path: &Path) -> Option<Self> {
        // One that is damaged trusts nothing.
        let known = atomic::read_json::<Self>(&Self::file(user, path));
        known.ok().flatten().filter(|known| known.path == path)
    }

    /// Returns all that is written down, by path.
    pub(crate) fn all(user: &Path) -> Result<Vec<Self>> {
        let entries = match fs::read_dir(Self::directory(user)) {
            Err(error) if crate::sys::catalog::is_absent(&error) => return Ok(Vec::new()),
            other => other?,
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "json") {
                all.extend(atomic::read_json::<Self>(&path)?);
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }

    /// Writes it down among the configuration of the person who called, with that person's rights.
    pub(crate) fn write(&self, user: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|error| {
            Error::unexpected("cannot write the list of trusted directories").source(error)
        })?;
        let rights = account::caller();
        account::make_directories(rights, &Self::directory(user))?;
        let place = Place::new(rights, &Self::file(user, &self.path))?;
        place.put(&text, 0o644, None, Existing::Replace)
    }

    /// Forgets a path; returns whether it was known.
    pub(crate) fn forget(user: &Path, path: &Path) -> Result<bool> {
        let known = Self::read(user, path).is_some();
        if known {
            Place::new(account::caller(), &Self::file(user, path))?.remove()?;
        }
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
