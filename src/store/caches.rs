//! Owns the caches of the store: listing them, finding the envs that mount them, and emptying one. Only `cache clear`
//! and configured limits ever remove anything from them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::Store;
use super::check::names;
use crate::plan::gc::Inventory;
use crate::plan::gc::cache::{self, CacheKind, Entries};
use crate::plan::ids::EnvName;
use crate::plan::resolve::VolumeKind;
use crate::store::inventory::allocated;
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;
use crate::tree::{self, file};

#[derive(Clone, Debug)]
pub struct StoreCache {
    /// The tool that made it, if its files show that.
    pub kind: Option<CacheKind>,
    /// The envs that mount it, with the mount point.
    pub users: BTreeMap<EnvName, String>,
    /// The largest limit that a profile sets, in bytes.
    pub max: Option<u64>,
}

impl StoreCache {
    /// Returns an env that mounts it and runs a command.
    pub fn busy(&self, store: &Store) -> Option<&EnvName> {
        let mut users = self.users.keys();
        users.find(|env| store.is_env_busy(env))
    }
}

/// ccache's file of statistics.
const STATS: &str = "stats";
/// Maximum number of bytes read from it: ccache writes some hundred.
const LARGEST: u64 = 64 << 10;

/// Lists the entries that identify a cache's tool: in its directory, and in those subdirectories that may tell more.
/// Skips unreadable ones.
pub fn entries(directory: &Path) -> Entries {
    let mut found = Entries::default();
    list(directory, "", &mut found.0);
    found
}

fn list(directory: &Path, below: &str, found: &mut BTreeSet<String>) {
    let entries = fs::read_dir(directory).into_iter().flatten();
    for entry in entries.flatten() {
        // No known layout has names that are not UTF-8.
        let name = entry.file_name().to_string_lossy().into_owned();
        // Links are not followed.
        let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
        if is_directory && below.is_empty() && cache::identifies_tool(&name) {
            list(&entry.path(), &format!("{name}/"), found);
        }
        // ccache has its statistics there since 4.8; listing its content would take long.
        if is_directory && !below.is_empty() && has_stats(&entry.path()) {
            found.insert(format!("{below}{name}/{STATS}"));
        }
        let slash = if is_directory { "/" } else { "" };
        found.insert(format!("{below}{name}{slash}"));
    }
}

fn has_stats(directory: &Path) -> bool {
    fs::symlink_metadata(directory.join(STATS)).is_ok_and(|found| found.is_file())
}

/// Reads a file of statistics. Steps write to caches, so it may be of any type.
fn stats(cache: &Path, below: &Path) -> Option<String> {
    let bytes = file::read_up_to(cache, &below.join(STATS), LARGEST).ok()??;
    String::from_utf8(bytes).ok()
}

impl Store {
    pub(crate) fn cache_dir(&self, name: &str) -> PathBuf {
        self.root.join("caches").join(name)
    }

    pub fn caches(&self) -> Result<BTreeMap<String, StoreCache>> {
        let mut caches = BTreeMap::new();
        for name in names(&self.root.join("caches"))? {
            let directory = self.cache_dir(&name);
            // A user may have put a link in place of a cache.
            if !fs::symlink_metadata(&directory).is_ok_and(|data| data.is_dir()) {
                continue;
            }
            let cache = StoreCache {
                kind: CacheKind::of(&entries(&directory)),
                users: BTreeMap::new(),
                max: None,
            };
            caches.insert(name, cache);
        }
        for env in self.envs()? {
            // An env that was never resolved mounts nothing; `fsck` reports a damaged spec.
            let Ok(spec) = self.spec(&env) else {
                continue;
            };
            let volumes = spec.volumes.iter();
            for volume in volumes.filter(|volume| volume.kind == VolumeKind::Cache) {
                if let Some(cache) = caches.get_mut(&volume.name) {
                    cache.users.insert(env.clone(), volume.target.clone());
                    cache.max = cache.max.max(volume.max);
                }
            }
        }
        Ok(caches)
    }

    pub fn cache_bytes(&self, name: &str) -> u64 {
        allocated(&self.cache_dir(name))
    }

    /// Describes a cache's content and hit rate, if its files show them.
    pub fn cache_content(&self, name: &str) -> Option<String> {
        let entries = entries(&self.cache_dir(name));
        match CacheKind::of(&entries) {
            Some(CacheKind::Ccache) => {
                let (hits, misses) = self.ccache_hits(name);
                let all = hits.saturating_add(misses);
                Some(match hits.saturating_mul(100).checked_div(all) {
                    Some(percent) => format!("ccache, {percent} % hits"),
                    None => "ccache".to_owned(),
                })
            }
            Some(kind) => Some(kind.tool().to_owned()),
            None => cache::content(entries.names()).map(str::to_owned),
        }
    }

    /// Returns a cache's hits and misses, if its files show them.
    pub fn cache_lookups(&self, name: &str) -> Option<(u64, u64)> {
        let kind = CacheKind::of(&entries(&self.cache_dir(name)));
        (kind == Some(CacheKind::Ccache)).then(|| self.ccache_hits(name))
    }

    /// Returns hits and misses of a ccache, whose statistics are in one or two levels of directories.
    fn ccache_hits(&self, name: &str) -> (u64, u64) {
        let cache = self.cache_dir(name);
        let mut files = Vec::new();
        let mut left = vec![(PathBuf::new(), 0)];
        while let Some((directory, depth)) = left.pop() {
            files.extend(stats(&cache, &directory));
            if depth < 2 {
                let digits = "0123456789abcdef".chars();
                left.extend(digits.map(|digit| (directory.join(digit.to_string()), depth + 1)));
            }
        }
        cache::ccache_hits(files.iter().map(String::as_str))
    }

    pub(super) fn add_caches(
        &self,
        inventory: &mut Inventory,
        limits: &BTreeMap<String, u64>,
    ) -> Result<()> {
        let caches = self.caches()?;
        let unknown = limits.keys().filter(|name| !caches.contains_key(*name));
        inventory.notes.extend(unknown.map(|name| {
            format!("[gc.cache.{name}] of the configuration is for no cache of this store: rockenv cache ls")
        }));
        for (name, cache) in caches {
            let Some(max) = limits.get(&name).copied().or(cache.max) else {
                continue;
            };
            let busy = cache.busy(self).cloned();
            let mut users = cache.users.into_iter();
            let idle = match busy {
                None => users.find(|(env, _)| inventory.envs.contains_key(env)),
                Some(_) => None,
            };
            let cache = crate::plan::gc::Cache {
                busy,
                bytes: self.cache_bytes(&name),
                max,
                kind: cache.kind,
                at: idle,
            };
            inventory.caches.insert(name, cache);
        }
        Ok(())
    }

    /// Empties a cache. The directory stays, because it may be mounted.
    pub fn clear_cache(&self, name: &str) -> Result<()> {
        let caches = self.caches()?;
        let cache = caches
            .get(name)
            .ok_or_else(|| not_found!("no cache `{name}`").help("rockenv cache ls"))?;
        if let Some(env) = cache.busy(self) {
            let error = busy!("cache `{name}` is in use: a command runs in env `{env}`");
            return Err(error.help(format!("rockenv down {env}")));
        }
        let directory = self.cache_dir(name);
        if let Some(mount) = tree::mounts_below(&fs::canonicalize(&directory)?).first() {
            let place = mount.display();
            let error = busy!("cache `{name}` cannot be cleared: `{place}` is a mount point");
            return Err(error.help(format!("umount {}", quoted_path(mount))));
        }
        for entry in fs::read_dir(&directory)? {
            self.discard(&entry?.path())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_regular_statistics_are_read() {
        let cache = tempfile::tempdir().unwrap();
        let at = |name: &str| cache.path().join(name);
        for name in ["0", "1", "2", "3"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("0/stats"), "1\n").unwrap();
        fs::os::unix::fs::symlink("/dev/zero", at("1/stats")).unwrap();
        nix::unistd::mkfifo(&at("2/stats"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::write(at("3/stats"), "0".repeat(1 << 20)).unwrap();
        fs::os::unix::fs::symlink("0", at("4")).unwrap();
        let read = |name: &str| stats(cache.path(), Path::new(name));
        assert_eq!(read("0").as_deref(), Some("1\n"));
        for name in ["1", "2", "4", "5"] {
            assert_eq!(read(name), None, "{name}");
        }
        assert_eq!(read("3").unwrap().len() as u64, LARGEST);
        let found = entries(cache.path());
        let names: Vec<&str> = found.names().collect();
        assert_eq!(names, ["0", "1", "2", "3", "4"]);
        assert!(has_stats(&at("0")) && !has_stats(&at("1")) && !has_stats(&at("2")));
    }
}
