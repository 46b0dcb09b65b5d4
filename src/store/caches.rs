//! Owns the caches of the store: what there is, what mounts it, and emptying one. Only `cache clear` and the limits that
//! somebody set take anything from them.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::check::names;
use super::{Store, check_name};
use crate::plan::gc::Inventory;
use crate::plan::gc::cache::{self, Entries, Kind};
use crate::plan::resolve::VolumeKind;
use crate::store::inventory::allocated;
use crate::sys::error::{Error, Result};

/// A cache.
#[derive(Clone, Debug)]
pub struct Shelf {
    /// What made it, where its files tell.
    pub kind: Option<Kind>,
    /// The envs that mount it, with the directory there.
    pub users: BTreeMap<String, String>,
    /// The largest limit that a profile sets, in bytes.
    pub max: Option<u64>,
}

impl Shelf {
    /// Returns an env that mounts it and in which a command runs.
    pub fn busy(&self, store: &Store) -> Option<&str> {
        let mut users = self.users.keys().map(String::as_str);
        users.find(|env| store.is_env_busy(env))
    }
}

/// Where ccache counts.
const STATS: &str = "stats";

/// Lists what tells whose a cache is: what is in its directory, and in those directories there that may tell more. What cannot
/// be read tells nothing.
pub fn entries(directory: &Path) -> Entries {
    let mut found = Vec::new();
    list(directory, "", &mut found);
    found.into_iter().collect()
}

fn list(directory: &Path, below: &str, found: &mut Vec<String>) {
    let entries = fs::read_dir(directory).into_iter().flatten();
    for entry in entries.flatten() {
        // A name that is no text is in nobody's layout.
        let name = entry.file_name().to_string_lossy().into_owned();
        // A link leads elsewhere.
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory && below.is_empty() && cache::tells(&name) {
            list(&entry.path(), &format!("{name}/"), found);
        }
        // ccache counts there since 4.8; listing what it keeps would take long.
        if is_directory && !below.is_empty() && entry.path().join(STATS).is_file() {
            found.push(format!("{below}{name}/{STATS}"));
        }
        let slash = if is_directory { "/" } else { "" };
        found.push(format!("{below}{name}{slash}"));
    }
}

impl Store {
    fn cache_dir(&self, name: &str) -> PathBuf {
        self.root.join("caches").join(name)
    }

    /// Returns the caches by name.
    pub fn caches(&self) -> Result<BTreeMap<String, Shelf>> {
        let mut shelves = BTreeMap::new();
        for name in names(&self.root.join("caches"))? {
            let directory = self.cache_dir(&name);
            // A link is somebody's own arrangement.
            if !fs::symlink_metadata(&directory).is_ok_and(|data| data.is_dir()) {
                continue;
            }
            let shelf = Shelf {
                kind: Kind::of(&entries(&directory)),
                users: BTreeMap::new(),
                max: None,
            };
            shelves.insert(name, shelf);
        }
        for env in self.envs()? {
            // An env that was never resolved mounts nothing; a damaged one is for `fsck`.
            let Ok(spec) = self.spec(&env) else {
                continue;
            };
            let caches = spec
                .volumes
                .iter()
                .filter(|volume| volume.kind == VolumeKind::Cache);
            for volume in caches {
                if let Some(shelf) = shelves.get_mut(&volume.name) {
                    shelf.users.insert(env.clone(), volume.target.clone());
                    shelf.max = shelf.max.max(volume.max);
                }
            }
        }
        Ok(shelves)
    }

    /// Returns the bytes of a cache.
    pub fn cache_bytes(&self, name: &str) -> u64 {
        allocated(&self.cache_dir(name))
    }

    /// Says what a cache holds, and how often it helped, where its files tell.
    pub fn cache_content(&self, name: &str) -> Option<String> {
        let entries = entries(&self.cache_dir(name));
        match Kind::of(&entries) {
            Some(Kind::Ccache) => {
                let (hits, misses) = self.ccache_hits(name);
                Some(match (hits * 100).checked_div(hits + misses) {
                    Some(percent) => format!("ccache, {percent} % hits"),
                    None => "ccache".to_owned(),
                })
            }
            Some(kind) => Some(kind.tool().to_owned()),
            None => cache::content(entries.names()).map(str::to_owned),
        }
    }

    /// Returns the lookups that a cache answered and those that it did not, where its files tell.
    pub fn cache_lookups(&self, name: &str) -> Option<(u64, u64)> {
        let kind = Kind::of(&entries(&self.cache_dir(name)));
        (kind == Some(Kind::Ccache)).then(|| self.ccache_hits(name))
    }

    /// Returns hits and misses of a ccache, which counts in one or two levels of directories.
    fn ccache_hits(&self, name: &str) -> (u64, u64) {
        let mut files = Vec::new();
        let mut left = vec![(self.cache_dir(name), 0)];
        while let Some((directory, depth)) = left.pop() {
            files.extend(fs::read_to_string(directory.join(STATS)));
            if depth < 2 {
                let digits = "0123456789abcdef".chars();
                left.extend(digits.map(|digit| (directory.join(digit.to_string()), depth + 1)));
            }
        }
        cache::ccache_hits(files.iter().map(String::as_str))
    }

    pub(super) fn cache_stock(
        &self,
        stock: &mut Inventory,
        limits: &BTreeMap<String, u64>,
    ) -> Result<()> {
        for (name, shelf) in self.caches()? {
            let Some(max) = limits.get(&name).copied().or(shelf.max) else {
                continue;
            };
            let busy = shelf.busy(self).map(str::to_owned);
            let mut users = shelf.users.into_iter();
            let idle = match busy {
                None => users.find(|(env, _)| stock.envs.contains_key(env)),
                Some(_) => None,
            };
            let cache = crate::plan::gc::Cache {
                busy,
                bytes: self.cache_bytes(&name),
                max,
                kind: shelf.kind,
                at: idle,
            };
            stock.caches.insert(name, cache);
        }
        Ok(())
    }

    /// Empties a cache; the directory stays, for it may be mounted.
    pub fn clear_cache(&self, name: &str) -> Result<()> {
        check_name(name)?;
        let shelves = self.caches()?;
        let shelf = shelves.get(name).ok_or_else(|| {
            Error::not_found(format!("no cache `{name}`")).help("rockenv cache ls")
        })?;
        if let Some(env) = shelf.busy(self) {
            return Err(Error::busy(format!(
                "cache `{name}` is in use: a command runs in env `{env}`"
            ))
            .help(format!("rockenv down {env}")));
        }
        let directory = self.cache_dir(name);
        for entry in fs::read_dir(&directory)? {
            self.discard(&entry?.path())?;
        }
        Ok(())
    }
}
