//! Owns which files of the current directory apply: a stranger may have written them, and rockenv runs with
//! privileges.
//!
//! A user trusts a directory by `rockenv trust`, which stores a digest of its `rockenv.toml`, `profiles/`, `images/`
//! and `hooks/` in that user's configuration. Changed files must be trusted again.

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

/// The variable that names trusted directories, for use without a terminal.
pub(crate) const VARIABLE: &str = "ROCKENV_TRUSTED_DIRS";
/// The configuration of a directory.
pub(crate) const CONFIGURATION: &str = "rockenv.toml";
/// Subdirectories that are searched by name.
const DIRECTORIES: [&str; 3] = ["profiles", "images", "hooks"];
/// Keys that even an untrusted directory may configure.
const HARMLESS: [&str; 2] = ["jobs", "targets"];
/// Further keys that a trusted directory may configure: none of them names a program, a path or a host.
const TRUSTED: [&str; 7] = [
    "disk-floor",
    "engine",
    "gc",
    "idle",
    "pull",
    "push",
    "reuse",
];
/// Maximum numbers of files, levels and bytes: more than anybody reviews before trusting them.
const MOST_FILES: usize = 10_000;
const MOST_LEVELS: usize = 32;
const MOST_BYTES: u64 = 256 << 20;

/// Whether the files of a directory apply.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum State {
    /// There is nothing to trust.
    #[default]
    Empty,
    /// They are unchanged since they were trusted.
    Trusted,
    /// They have changed since.
    Changed,
    /// Nobody trusted them.
    Untrusted,
}

/// The current directory, and which of its files apply.
#[derive(Clone, Debug, Default)]
pub struct Current {
    /// Its path, without links.
    pub(crate) directory: PathBuf,
    /// Whether its files apply.
    pub(crate) state: State,
    /// Files and keys that do not apply.
    pub(crate) unread: Vec<String>,
}

/// A stored trust decision.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Trusted {
    /// A directory, or a profile's file.
    pub(crate) path: PathBuf,
    /// Digest of a directory's files.
    #[serde(default)]
    pub(crate) digest: Option<String>,
    /// Host directories that the steps of a file may write to.
    #[serde(default)]
    pub(crate) writes: Vec<PathBuf>,
}

impl Current {
    /// Examines the current directory. `user` is the directory of the user's configuration, `listed` the value of
    /// [`VARIABLE`].
    pub(crate) fn look(working: &Path, user: &Path, listed: Option<&str>) -> Self {
        // In an unreadable directory nothing applies.
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

    /// Returns whether its files apply.
    pub(crate) fn counts(&self) -> bool {
        self.state == State::Trusted
    }

    /// Returns the keys of its configuration that apply, and records the others.
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

    /// Returns a message about what does not apply, with the command to type; `None` if everything does.
    pub(crate) fn notice(&self) -> Option<String> {
        let unread = self.unread.join(", ");
        let directory = self.directory.display();
        Some(match self.state {
            _ if self.unread.is_empty() => return None,
            State::Trusted | State::Empty => format!(
                "ignored: {unread}: configure programs, paths and hosts in ~/.config/rockenv/config.toml"
            ),
            State::Changed => {
                format!(
                    "ignored because `{directory}` has changed: {unread}; `rockenv trust` trusts it again"
                )
            }
            State::Untrusted => {
                format!(
                    "ignored because `{directory}` is not trusted: {unread}; `rockenv trust` trusts it"
                )
            }
        })
    }
}

/// Returns whether the files of a directory apply.
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

/// Returns the names of rockenv's files in a directory.
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

/// Returns the digest of a directory's files for rockenv: names, kinds, executable bits and content, through links.
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
            // Unread content could change unnoticed.
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
        "`{}` has too many files in its profiles, images and hooks to be trusted",
        top.display()
    ))
    .help(format!(
        "name the profile's file: rockenv up {}/NAME.toml",
        top.display()
    ))
}

/// Reads a regular file up to a limit; `None` for anything else. Never blocks on a FIFO.
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

    /// Reads the decision about a path.
    pub(crate) fn read(user: &Path, path: &Path) -> Option<Self> {
        // A damaged file trusts nothing.
        let known = atomic::read_json::<Self>(&Self::file(user, path));
        known.ok().flatten().filter(|known| known.path == path)
    }

    /// Returns all decisions, by path.
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

    /// Writes it to the configuration of the calling user, with that user's rights.
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
