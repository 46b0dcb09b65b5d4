//! Owns the lock files that this store was used with, `locks/<digest of the path>.json`: everything they name is kept
//! while they exist.

use std::collections::BTreeMap;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::{LockedEnv, Store, check};
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::resolve::Spec;
use crate::store::export;
use crate::sys::atomic;
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;

/// A lock file that was written or followed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
struct Known {
    /// Its absolute path.
    file: PathBuf,
    /// Images, layers and downloads that it named when last seen.
    names: Vec<String>,
    /// Topmost directory of the file system that it was on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    top: Option<PathBuf>,
}

impl Known {
    /// Returns whether the file was removed. If its directory is missing too, or on another file system than before,
    /// the file system may just not be mounted: a home directory, a USB disk.
    fn is_gone(&self) -> bool {
        let missing = |error: std::io::Error| error.kind() == std::io::ErrorKind::NotFound;
        let Some(parent) = self.file.parent().filter(|parent| parent.is_dir()) else {
            return false;
        };
        fs::symlink_metadata(&self.file).is_err_and(missing)
            && (self.top.is_none() || self.top == top_of(parent))
    }
}

/// Returns the topmost directory above `directory` on the same file system.
fn top_of(directory: &Path) -> Option<PathBuf> {
    let device = |path: &Path| fs::metadata(path).ok().map(|data| data.dev());
    let own = device(directory)?;
    let above = directory.ancestors();
    let same = above.take_while(|path| device(path) == Some(own));
    same.last().map(Path::to_owned)
}

/// All objects that lock files keep.
#[derive(Clone, Debug, Default)]
pub struct Locked {
    /// Images, layers and downloads, each with the lock file that names it.
    pub names: BTreeMap<String, String>,
    /// Notes about unreadable files; what they named when last seen is kept.
    pub notes: Vec<String>,
}

/// The copy, in an env's directory, of the lock file that it was built from.
pub(super) const COPY: &str = "locked.toml";

impl LockedEnv<'_> {
    /// Keeps a copy of the lock file that the env is built from. The spec that is saved next names it.
    pub fn keep_lock(&self, lock: &Lockfile) -> Result<()> {
        let path = self.directory.join(COPY);
        let text = lock.text()?;
        match fs::read(&path) {
            Ok(old) if old == text.as_bytes() => Ok(()),
            _ => atomic::write(&path, text.as_bytes()),
        }
    }
}

impl Store {
    /// Returns the text of the lock file that an env was built from, if any.
    pub fn locked_text(&self, spec: &Spec) -> Result<Option<String>> {
        let Some(digest) = &spec.lock else {
            return Ok(None);
        };
        let text = fs::read_to_string(self.env_dir(&spec.name).join(COPY))?;
        match hex::encode(Sha256::digest(&text)) == *digest {
            true => Ok(Some(text)),
            false => Err(unexpected!(
                "env `{}` has lost the lock file that it was built from",
                spec.name
            )
            .help("rockenv up ... --locked")),
        }
    }

    /// Returns the SHA-256 of each file in a cache, by path; unfinished downloads are skipped.
    pub fn cache_files(&self, cache: &str) -> Result<BTreeMap<String, String>> {
        let directory = self.root.join("caches").join(cache);
        if !directory.is_dir() {
            return Ok(BTreeMap::new());
        }
        let mut files = BTreeMap::new();
        for path in export::regular(&directory)? {
            if path.extension().is_none_or(|end| end != "part") {
                files.insert(export::names(&path)?, export::digest(&directory, &path)?);
            }
        }
        Ok(files)
    }

    /// Describes the files that differ from the locked ones, in the caches that `within` accepts. Skips missing
    /// files, which are fetched later, and files with a URL, which rockenv may replace.
    pub fn other_cache_files(
        &self,
        lock: &Lockfile,
        within: &dyn Fn(&str) -> bool,
    ) -> Result<Vec<String>> {
        let mut differences = Vec::new();
        for (cache, files) in lock.files.iter().filter(|(cache, _)| within(cache)) {
            if files.values().all(|file| file.url().is_some()) {
                continue;
            }
            let found = self.cache_files(cache)?;
            let others = files.iter().filter(|(path, file)| {
                let differs = |found: &String| found != file.sha256();
                file.url().is_none() && found.get(*path).is_some_and(differs)
            });
            differences.extend(others.map(|(path, _)| {
                format!("file `{path}` in cache `{cache}` differs from the locked content")
            }));
        }
        Ok(differences)
    }

    /// Protects the data that a lock file names from `gc`, from now on. `file` is the lock file's absolute path.
    pub fn remember_lock(&self, file: PathBuf, lock: &Lockfile) -> Result<()> {
        let known = Known {
            names: names(lock),
            top: file.parent().and_then(top_of),
            file,
        };
        let directory = self.root.join("locks");
        fs::create_dir_all(&directory)?;
        let name = hex::encode(Sha256::digest(known.file.as_os_str().as_bytes()));
        let place = directory.join(format!("{name}.json"));
        if atomic::read_json::<Known>(&place).ok().flatten().as_ref() == Some(&known) {
            return Ok(());
        }
        atomic::write_json(&place, &known)
    }

    /// Returns the objects that known lock files name. A removed file names nothing. An unreadable or unreachable
    /// file names what it named when last seen.
    pub fn locked(&self) -> Result<Locked> {
        let mut locked = Locked::default();
        let directory = self.root.join("locks");
        // A file with another name is left by a command that was killed while it wrote.
        let entries = check::names(&directory)?.into_iter();
        for name in entries.filter(|name| name.ends_with(".json")) {
            let place = directory.join(name);
            let known = atomic::read_json::<Known>(&place).map_err(|error| {
                unexpected!("cannot read the list of lock files")
                    .source(error)
                    .help(format!(
                        "rm {}; `rockenv up --locked` creates it again",
                        quoted_path(&place)
                    ))
            })?;
            let Some(known) = known else {
                continue;
            };
            let mut file = known.file.display().to_string();
            let named = match lockfile::read_known(&known.file) {
                Ok(Some(lock)) => names(&lock),
                Ok(None) if known.is_gone() => continue,
                unseen => {
                    let (verb, what) = match unseen {
                        Ok(_) => ("seen", "where its file system is not mounted"),
                        Err(_) => ("read", "as it is"),
                    };
                    locked.notes.push(format!(
                        "lock file `{file}` cannot be {verb} now, {what}: keeping everything that it named; if it is gone for good: rm {}",
                        quoted_path(&place)
                    ));
                    file = format!("{file} (which cannot be {verb} now)");
                    known.names
                }
            };
            for key in named {
                locked.names.entry(key).or_insert_with(|| file.clone());
            }
        }
        Ok(locked)
    }
}

fn names(lock: &Lockfile) -> Vec<String> {
    let steps = lock.steps.iter().map(|step| step.key.as_str().to_owned());
    let fetched = lock.fetched.values().map(|file| file.sha256.clone());
    let files = lock.files.values().flat_map(BTreeMap::values);
    let files = files.filter(|file| file.url().is_some());
    [lock.image.key.to_string()]
        .into_iter()
        .chain(steps)
        .chain(fetched)
        .chain(files.map(|file| file.sha256().clone()))
        .collect()
}
