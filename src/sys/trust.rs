//! Owns which files of the current directory apply: anyone may have written them, and rockenv runs with privileges.
//!
//! A user trusts a directory with `rockenv trust`, which stores a digest of its `rockenv.toml`, `profiles/`, `images/`
//! and `hooks/` in the user's configuration. Changed files must be trusted again.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fs_err as fs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};
use toml::de::DeTable;

use crate::sys::account::{self, Existing, FilePlace};
use crate::sys::atomic;
use crate::sys::builtin;
use crate::sys::catalog::Directory;
use crate::sys::error::{Result, if_exists};
use crate::sys::trusted_files::{Checked, MOST_FILES};

/// The variable that lists trusted directories, for use without a terminal.
pub(crate) const VARIABLE: &str = "ROCKENV_TRUSTED_DIRS";
/// The variable with the digest of the trusted current directory: `rockenv on` sets it on the other machine.
pub(crate) const DIGEST_VARIABLE: &str = "ROCKENV_TRUSTED_DIGEST";
pub(crate) const CONFIGURATION: &str = "rockenv.toml";
/// Subdirectories that are searched for profiles, images and hooks.
pub(crate) const DIRECTORIES: [&str; 3] = ["profiles", "images", "hooks"];
/// Keys that apply even in an untrusted directory.
const HARMLESS: [&str; 2] = ["jobs", "targets"];
/// Further keys that apply in a trusted directory: none of them names a program, a path or a host.
const TRUSTED: [&str; 7] = [
    "disk-floor",
    "engine",
    "gc",
    "idle",
    "pull",
    "push",
    "reuse",
];

/// Whether the user trusts a directory's files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum TrustState {
    #[default]
    Empty,
    Trusted,
    Changed,
    Untrusted,
}

/// The current directory, and which of its files apply.
#[derive(Clone, Debug, Default)]
pub struct Current {
    /// Its path, with symlinks resolved.
    pub(crate) directory: PathBuf,
    pub(crate) state: TrustState,
    /// Files and keys that do not apply.
    pub(crate) unread: Vec<String>,
    /// What was read to compute the digest.
    pub(crate) checked: Option<Arc<Checked>>,
}

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
    /// Examines the current directory. `user` is the user's configuration directory, `listed` the value of
    /// [`VARIABLE`], `sent` that of [`DIGEST_VARIABLE`].
    pub(crate) fn read(
        working: &Path,
        user: &Path,
        listed: Option<&str>,
        sent: Option<&str>,
    ) -> Self {
        // Nothing applies in an unreadable directory.
        let Ok(directory) = fs::canonicalize(working) else {
            return Self::default();
        };
        let names = present(&directory);
        let (state, checked) = match names.is_empty() {
            true => (TrustState::Empty, None),
            false => state(&directory, user, listed, sent),
        };
        let mut current = Self {
            directory,
            state,
            unread: Vec::new(),
            checked: checked.map(Arc::new),
        };
        if !current.counts() {
            // Built-in names always win, so a directory with only those, such as rockenv's checkout, needs no notice.
            let adds = |kind: &&str| {
                *kind != CONFIGURATION
                    && names_in(&current.directory, kind).any(|name| !is_builtin(kind, &name))
            };
            let kinds: Vec<_> = names.into_iter().filter(adds).collect();
            let kinds = kinds.into_iter().map(|kind| format!("{kind}/"));
            current.unread.extend(kinds);
        }
        current
    }

    pub(crate) fn as_directory(&self) -> Directory {
        Directory {
            path: self.directory.clone(),
            current: true,
            checked: self.checked.clone(),
        }
    }

    /// Returns whether the directory's files apply.
    pub(crate) fn counts(&self) -> bool {
        self.state == TrustState::Trusted
    }

    /// Returns the digest of the directory's files if they apply.
    pub(crate) fn digest(&self) -> Result<Option<String>> {
        match &self.checked {
            Some(checked) => Ok(Some(checked.digest.clone())),
            None if self.counts() => digest(&self.directory).map(Some),
            None => Ok(None),
        }
    }

    /// Returns whether a file, given by its resolved path, was trusted and has not changed since.
    pub(crate) fn covers(&self, file: &Path) -> bool {
        let has = |checked: &Arc<Checked>| checked.has(file);
        self.counts() && (self.contains(file) || self.checked.as_ref().is_some_and(has))
    }

    /// Returns whether a file is in one of the [`DIRECTORIES`].
    pub(crate) fn contains(&self, file: &Path) -> bool {
        let contains = |name| file.starts_with(self.directory.join(name));
        DIRECTORIES.into_iter().any(contains)
    }

    /// Removes the configuration keys that do not apply, and records them.
    pub(crate) fn keep(&mut self, table: &mut DeTable<'_>) {
        let counts = self.counts();
        let applies = |key: &str| HARMLESS.contains(&key) || counts && TRUSTED.contains(&key);
        let keys = table.keys().map(|key| key.get_ref().to_string());
        let left: Vec<String> = keys.filter(|key| !applies(key)).collect();
        for key in &left {
            table.remove(key.as_str());
        }
        if !left.is_empty() {
            let keys: Vec<String> = left.iter().map(|key| format!("`{key}`")).collect();
            self.unread
                .push(format!("{} of {CONFIGURATION}", keys.join(", ")));
        }
    }

    /// Returns a notice about files and keys that do not apply, with the command to type; `None` if all apply.
    pub(crate) fn notice(&self) -> Option<String> {
        let unread = self.unread.join(", ");
        let directory = self.directory.display();
        Some(match self.state {
            _ if self.unread.is_empty() => return None,
            TrustState::Trusted | TrustState::Empty => format!(
                "ignored: {unread}: configure programs, paths and hosts in ~/.config/rockenv/config.toml"
            ),
            TrustState::Changed => {
                format!(
                    "ignored because `{directory}` has changed: {unread}; `rockenv trust` trusts it again"
                )
            }
            TrustState::Untrusted => {
                format!(
                    "ignored because `{directory}` is not trusted: {unread}; `rockenv trust` trusts it"
                )
            }
        })
    }
}

/// Returns whether the files of a directory apply, and what was read to decide.
fn state(
    directory: &Path,
    user: &Path,
    listed: Option<&str>,
    sent: Option<&str>,
) -> (TrustState, Option<Checked>) {
    if is_listed(directory, listed) {
        return (TrustState::Trusted, None);
    }
    let known = Trusted::read(user, directory);
    if known.is_none() && sent.is_none() {
        return (TrustState::Untrusted, None);
    }
    let known = known.and_then(|known| known.digest);
    match Checked::read(directory) {
        Ok(now) if known.as_ref() == Some(&now.digest) || sent == Some(&now.digest) => {
            (TrustState::Trusted, Some(now))
        }
        _ => (TrustState::Changed, None),
    }
}

/// Returns whether a path is at or below a directory that [`VARIABLE`] lists.
pub(crate) fn is_listed(path: &Path, listed: Option<&str>) -> bool {
    let listed = listed.unwrap_or_default().split(':').map(Path::new);
    listed
        .filter(|one| one.is_absolute())
        .filter_map(|one| fs::canonicalize(one).ok())
        .any(|one| path.starts_with(one))
}

/// Returns the names of rockenv's files in a directory.
pub(crate) fn present(directory: &Path) -> Vec<&'static str> {
    let has = |kind: &&str| names_in(directory, kind).next().is_some();
    let mut found: Vec<_> = DIRECTORIES.into_iter().filter(has).collect();
    if fs::symlink_metadata(directory.join(CONFIGURATION)).is_ok() {
        found.push(CONFIGURATION);
    }
    found
}

fn names_in(directory: &Path, kind: &str) -> impl Iterator<Item = String> {
    let entries = fs::read_dir(directory.join(kind)).into_iter().flatten();
    let are_hooks = kind == "hooks";
    entries.take(MOST_FILES).flatten().filter_map(move |entry| {
        let path = entry.path();
        let name = match are_hooks {
            true => path.join("hook.toml").exists().then(|| path.file_name()),
            false => path
                .extension()
                .filter(|end| *end == "toml")
                .map(|_| path.file_stem()),
        };
        Some(name??.to_string_lossy().into_owned())
    })
}

fn is_builtin(kind: &str, name: &str) -> bool {
    let file = format!("{name}.toml");
    match kind {
        "profiles" => builtin::PROFILES.contains(file),
        "images" => builtin::IMAGES.contains(file),
        _ => builtin::HOOKS.contains(name),
    }
}

/// Returns the digest of a directory's files for rockenv.
pub(crate) fn digest(directory: &Path) -> Result<String> {
    Ok(Checked::read(directory)?.digest)
}

impl Trusted {
    fn directory(user: &Path) -> PathBuf {
        user.join("trusted")
    }

    fn file(user: &Path, path: &Path) -> PathBuf {
        let name = hex::encode(Sha256::digest(path.as_os_str().as_bytes()));
        Self::directory(user).join(format!("{}.json", &name[..32]))
    }

    pub(crate) fn read(user: &Path, path: &Path) -> Option<Self> {
        let text = account::open(&Self::file(user, path)).and_then(std::io::read_to_string);
        // A damaged file trusts nothing.
        let known: Option<Self> = serde_json::from_str(&text.ok()?).ok();
        known.filter(|known| known.path == path)
    }

    pub(crate) fn all(user: &Path) -> Result<Vec<Self>> {
        let Some(entries) = if_exists(fs::read_dir(Self::directory(user)))? else {
            return Ok(Vec::new());
        };
        let mut all = Vec::new();
        for entry in entries {
            let path = entry?.path();
            if path.extension().is_some_and(|end| end == "json") {
                // A damaged file trusts nothing.
                all.extend(atomic::read_json::<Self>(&path).ok().flatten());
            }
        }
        all.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(all)
    }

    /// Writes the decision to the calling user's configuration, with that user's rights.
    pub(crate) fn write(&self, user: &Path) -> Result<()> {
        let text = serde_json::to_vec_pretty(self).map_err(|error| {
            unexpected!("cannot write the list of trusted directories").source(error)
        })?;
        let rights = account::caller();
        account::make_directories(rights, &Self::directory(user))?;
        let place = FilePlace::new(rights, &Self::file(user, &self.path))?;
        place.put(&text, Existing::Replace)
    }

    /// Removes a trust decision; returns whether there was one.
    pub(crate) fn forget(user: &Path, path: &Path) -> Result<bool> {
        let known = Self::read(user, path).is_some();
        if known {
            FilePlace::new(account::caller(), &Self::file(user, path))?.remove()?;
        }
        Ok(known)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_damaged_decision_hides_no_other() {
        let user = tempfile::tempdir().unwrap();
        let place = Trusted::directory(user.path());
        fs::create_dir(&place).unwrap();
        let good = Trusted {
            path: "/a".into(),
            ..Trusted::default()
        };
        atomic::write_json(&place.join("a.json"), &good).unwrap();
        fs::write(place.join("b.json"), "").unwrap();
        assert_eq!(Trusted::all(user.path()).unwrap(), [good]);
    }

    #[test]
    fn a_directory_of_built_in_names_alone_needs_no_notice() {
        let place = tempfile::tempdir().unwrap();
        let directory = place.path().join("checkout");
        for file in [
            "profiles/therock.toml",
            "images/debian-forky.toml",
            "hooks/torch-without-rccl/hook.toml",
        ] {
            let file = directory.join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, "").unwrap();
        }
        let look = || Current::read(&directory, place.path(), None, None);
        assert_eq!(look().state, TrustState::Untrusted);
        assert_eq!(look().notice(), None);
        fs::write(directory.join("images/mine.toml"), "").unwrap();
        assert_eq!(look().unread, ["images/"]);
    }
}
