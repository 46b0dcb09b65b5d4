//! Owns everything rockenv keeps on disk: one root on one file system. `docs/explanation/architecture.md` lists its
//! files.
//!
//! Publish: write under a temporary name, then rename; the record is written last. Delete: rename to `trash/`, then
//! unlink. Data that an env's record does not name is garbage; the env's next command collects it.

pub mod config;
pub(crate) mod export;
pub(crate) mod source;
pub(crate) mod usage;

mod access;
mod added_user;
pub(crate) mod attempt;
pub(crate) mod ballast;
pub(crate) mod build_logs;
mod build_volumes;
pub(crate) mod caches;
pub(crate) mod check;
mod copies;
pub(crate) mod env;
pub(crate) mod ephemeral;
mod estimate_freed;
pub(crate) mod gc_apply;
pub(crate) mod history;
pub(crate) mod images;
pub(crate) mod inventory;
pub(crate) mod is_modified;
pub(crate) mod journal;
pub(crate) mod last_used;
pub(crate) mod layer;
mod lease;
pub(crate) mod lock;
mod lock_files;
mod orphan_snapshots;
pub(crate) mod path_volumes;
mod prune_build_tree;
pub(crate) mod removal;
pub(crate) mod results;
pub(crate) mod service;
pub(crate) mod shared;
pub(crate) mod snapshot;
mod trash;
pub(crate) mod unreadable;

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::unistd::AccessFlags;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::plan::record;
pub(crate) use crate::plan::record::Record;
use access::{PRIVATE, SHARED};
pub use env::LockedEnv;
pub(crate) use layer::Layer;
pub use lock::Lock;

use crate::plan::gc::FINGERPRINTS;
use crate::plan::ids::{EnvName, VolumeId};
use crate::plan::jobs::Past;
use crate::sys::atomic::{self, random_id};
use crate::sys::beneath;
use crate::sys::checksum::is_sha256;
use crate::sys::error::{Error, Kind, Result, if_exists, named_path};
use crate::sys::name::InvalidName;
use crate::sys::suggest;
use crate::tree::{self, Method, mounts};

/// Version of the layout. A newer one is refused, never migrated silently.
const VERSION: u32 = 1;

/// Tells backup programs to skip the store.
const TAG: &str = "CACHEDIR.TAG";
const TAG_TEXT: &str = "Signature: 8a477f597d28d172789f06886806bc55\n# Written by rockenv: back up exported files, not this directory.\n";

/// Returns the error for a store of another user, usually root.
fn not_ours(root: &Path) -> Error {
    unavailable!(
        "the store at `{}` is readable by its owner only",
        root.display()
    )
    .help("sudo rockenv ...; ROCKENV_HOME=DIR names another store")
}

/// Returns whether a directory with this entry may become a store. The store may delete anything in its own
/// directories, so those must be empty, except for downloads.
fn may_be_there(entry: &fs::DirEntry) -> Result<bool> {
    let name = entry.file_name();
    let Some(name) = name.to_str() else {
        return Ok(false);
    };
    if !PRIVATE.contains(&name) {
        // Files that a killed command left, and directories that the store never deletes.
        let known = matches!(name, "id" | "lock" | "jobs" | TAG | "lost+found");
        return Ok(known || SHARED.contains(&name) || name.starts_with('.'));
    }
    for below in fs::read_dir(entry.path())? {
        let below = below?;
        if name != "blobs" || below.file_name() != "sha256" {
            return Ok(false);
        }
        // Downloads that were saved elsewhere, for example by CI. Each use verifies the digest.
        for download in fs::read_dir(below.path())? {
            if !download?.file_name().to_str().is_some_and(is_sha256) {
                return Ok(false);
            }
        }
    }
    Ok(true)
}

#[derive(Clone, Debug, Serialize, Deserialize)]
struct Format {
    version: u32,
    method: Method,
}

impl Format {
    fn write(root: &Path, method: Method) -> Result<()> {
        let version = VERSION;
        atomic::write_json(&root.join("format"), &Self { version, method })
    }
}

#[derive(Clone, Debug)]
pub struct Store {
    root: PathBuf,
    method: Method,
}

/// Help for a store that cannot be at the requested path.
const OTHER_HOME: &str = "choose another directory with --home or ROCKENV_HOME";

#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Refuses a description of a newer rockenv, before its other fields pass for damaged ones.
fn refuse_newer(path: &Path, newest: u32, object: &str) -> Result<()> {
    match atomic::read_json::<Versioned>(path) {
        Ok(Some(Versioned { version })) if version > newest => Err(invalid!(
            "{object} has format {version}, but this rockenv supports only {newest}"
        )
        .help("use the newer rockenv that made it")),
        // The reader of the other fields reports a file that cannot be read.
        Ok(_) | Err(_) => Ok(()),
    }
}

fn no_env(name: &str) -> Error {
    Error::new(Kind::NoEnv, format!("no env `{name}`"))
}

impl Store {
    /// Opens the store at `root`, or creates it if it is missing.
    pub fn open(root: &Path) -> Result<Self> {
        match Self::open_existing(root)? {
            Some(store) => Ok(store),
            None => Self::create(root),
        }
    }

    /// Opens the store at `root`; `None` if it does not exist.
    pub fn open_existing(root: &Path) -> Result<Option<Self>> {
        // Later code compares and mounts paths, so each place needs a single name.
        let root = match fs::canonicalize(root) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return mounts::check_mounted(root, "the store", OTHER_HOME).map(|()| None);
            }
            other => other.map_err(|error| match error.kind() {
                std::io::ErrorKind::PermissionDenied => not_ours(root),
                _ => named_path(root)(error).help(OTHER_HOME),
            })?,
        };
        if !root.is_dir() {
            return Err(usage!("`{}` is not a directory", root.display()).help(OTHER_HOME));
        }
        let root = root.as_path();
        let format = root.join("format");
        // Report another user's inaccessible store before anything fails in it.
        for path in [root, &format, &root.join(PRIVATE[0])] {
            let all = AccessFlags::R_OK;
            if nix::unistd::eaccess(path, all) == Err(nix::Error::EACCES) {
                return Err(not_ours(root));
            }
        }
        if fs::symlink_metadata(&format).is_err() {
            mounts::check_mounted(root, "the store", OTHER_HOME)?;
            if check::has_lost_format(root)? {
                return Err(
                    invalid!("the store at `{}` lost its file `format`", root.display())
                        .help("rockenv fsck --repair"),
                );
            }
            return Ok(None);
        }
        access::check_owner(root)?;
        refuse_newer(&format, VERSION, &format!("store `{}`", root.display()))?;
        let Some(format) = atomic::read_json::<Format>(&format)? else {
            return Ok(None);
        };
        let method = match format.method {
            // A store that was copied to another file system has directories in place of subvolumes.
            Method::Btrfs if !tree::btrfs::is_btrfs(beneath::open_path(root)?)? => Method::Reflink,
            method => method,
        };
        Ok(Some(Self {
            root: root.to_owned(),
            method,
        }))
    }

    /// Returns the earlier costs of a profile's steps, from all its existing envs; oldest first.
    pub fn past(&self, profile: &str) -> Vec<Past> {
        let mut rows = Vec::new();
        for name in self.env_names().unwrap_or_default() {
            let record = self.record(&name).ok().flatten();
            if record.is_some_and(|record| record.profile == profile) {
                rows.extend(self.runs(&name));
            }
        }
        rows.sort_by_key(|row| row.time);
        rows
    }

    /// Returns the runs of an env's steps. Skips lines cut short by a crash or written by another version.
    pub(crate) fn runs(&self, env: &EnvName) -> Vec<Past> {
        let path = self.env_dir(env).join("metrics.jsonl");
        let text = fs::read_to_string(path).unwrap_or_default();
        let rows = text.lines();
        rows.filter_map(|line| serde_json::from_str(line).ok())
            .collect()
    }

    /// Returns the path of the machine's job budget.
    pub fn jobs_file(&self) -> PathBuf {
        self.root.join("jobs")
    }

    /// Returns the file that caches the fingerprint of a source directory.
    pub fn known_fingerprint(&self, source: &Path) -> PathBuf {
        let digest = Sha256::digest(source.as_os_str().as_encoded_bytes());
        self.root
            .join("blobs")
            .join(FINGERPRINTS)
            .join(&hex::encode(digest)[..32])
    }

    fn create(root: &Path) -> Result<Self> {
        // Container engines and rockenv's own processes get paths as text.
        if root.to_str().is_none() {
            let shown = crate::ui::text::os(root);
            return Err(usage!("the store's path `{shown}` is not UTF-8").help(OTHER_HOME));
        }
        if !root.exists() {
            fs::create_dir_all(root).map_err(|error| named_path(root)(error).help(OTHER_HOME))?;
            // Set the mode regardless of the umask.
            fs::set_permissions(root, std::fs::Permissions::from_mode(0o755))?;
        }
        let root = fs::canonicalize(root)?;
        access::check_owner(&root)?;
        for entry in fs::read_dir(&root)? {
            let entry = entry?;
            if may_be_there(&entry)? {
                continue;
            }
            // Another command may have just created the store.
            if let Some(store) = Self::open_existing(&root)? {
                return Ok(store);
            }
            return Err(invalid!(
                "`{}` is not a rockenv store and not empty: `{}` is in the way",
                root.display(),
                entry.path().display()
            )
            .help("choose another directory with ROCKENV_HOME; if it was a store: rockenv fsck"));
        }
        let lock = Lock::exclusive(&root.join("lock"), "the store", "setup", lock::STORE_WAIT)?;
        if let Some(store) = Self::open_existing(&root)? {
            return Ok(store);
        }
        for name in PRIVATE.iter().chain(&SHARED) {
            access::make_directory(&root.join(name))?;
        }
        fs::create_dir_all(root.join("blobs/sha256"))?;
        fs::write(root.join(TAG), TAG_TEXT)?;
        let method = tree::probe(&root)?.method;
        atomic::write(&root.join("id"), random_id()?.as_bytes())?;
        Format::write(&root, method)?;
        drop(lock);
        Ok(Self { root, method })
    }

    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the store's unique id; empty if an older version created the store.
    pub fn id(&self) -> Result<String> {
        let id = if_exists(fs::read_to_string(self.root.join("id")))?;
        Ok(id.unwrap_or_default().trim().to_owned())
    }

    pub fn method(&self) -> Method {
        self.method
    }

    /// Returns whether snapshots include build volumes.
    pub fn freezes_volumes(&self) -> bool {
        self.method != Method::Overlay
    }

    pub fn env_dir(&self, name: &EnvName) -> PathBuf {
        self.root.join("envs").join(name)
    }

    pub fn volume_dir(&self, id: &VolumeId) -> PathBuf {
        self.root.join("volumes").join(id)
    }

    pub fn is_volume_empty(&self, id: &VolumeId) -> bool {
        fs::read_dir(self.volume_dir(id)).is_ok_and(|mut entries| entries.next().is_none())
    }

    fn are_volumes_empty(&self, head: &record::Head) -> bool {
        head.volumes.values().all(|id| self.is_volume_empty(id))
    }

    /// Returns the names of the envs that have a record, sorted.
    pub fn envs(&self) -> Result<Vec<EnvName>> {
        let mut names = self.env_names()?;
        // Reading an inaccessible record reports the reason.
        names.retain(|name| {
            let record = self.env_dir(name).join("record.json");
            !matches!(record.try_exists(), Ok(false))
        });
        Ok(names)
    }

    /// Returns the names of all envs, sorted, including those without a record.
    pub(crate) fn env_names(&self) -> Result<Vec<EnvName>> {
        let names = check::names(&self.root.join("envs"))?.into_iter();
        let names = names.filter_map(|name| EnvName::try_from(name).ok());
        // A stray file is not an env.
        Ok(names.filter(|name| self.env_dir(name).is_dir()).collect())
    }

    /// Reads an env's record without its lock, as the last finished command left it.
    pub fn record(&self, name: &EnvName) -> Result<Option<Record>> {
        let directory = self.env_dir(name);
        let path = directory.join("record.json");
        let read = atomic::read_json::<Record>(&path);
        // A usable record is read once: it may be long, and each command reads it several times.
        if !matches!(&read, Ok(Some(record)) if record.version <= record::VERSION) {
            refuse_newer(&path, record::VERSION, &format!("env `{name}`"))?;
        }
        let Some(mut record) = read? else {
            return Ok(None);
        };
        removal::leave_out_removed(&directory, &mut record)?;
        Ok(Some(record))
    }

    /// Reads an env's record; fails if the env does not exist.
    pub fn known(&self, name: &EnvName) -> Result<Record> {
        self.record(name)?.ok_or_else(|| {
            let envs = self.envs().unwrap_or_default();
            let help = suggest::help(name, envs.iter().map(EnvName::as_str), "rockenv ls");
            no_env(name).help(help)
        })
    }

    /// Returns the env that a command acts on: the named env, or else the store's only env.
    pub fn named_or_only(&self, name: Option<&EnvName>) -> Result<EnvName> {
        if let Some(name) = name {
            return Ok(name.clone());
        }
        let mut envs = self.envs()?;
        match envs.len() {
            0 => Err(Error::new(Kind::NoEnv, "no envs yet").help("rockenv up hip-smoke")),
            1 => Ok(envs.remove(0)),
            _ => Err(usage!("name one of the envs: {}", envs.join(", ")).help("rockenv ls")),
        }
    }

    /// Takes the global lock exclusively, to delete or count what it protects.
    pub fn lock(&self, verb: &str) -> Result<Lock> {
        Lock::exclusive(&self.root.join("lock"), "the store", verb, lock::STORE_WAIT)
    }

    /// Takes the global lock in shared mode. While it is held, no command deletes shared data.
    pub fn lock_shared(&self) -> Result<Lock> {
        Lock::shared(&self.root.join("lock"), "the store", lock::STORE_WAIT)
    }
}

/// Refuses a name that could leave its directory or confuse an engine.
pub(crate) fn check_name(name: &str) -> Result<EnvName> {
    name.parse().map_err(|rule: InvalidName| {
        usage!("`{}` is not a valid name", name.escape_debug()).help(rule.0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    impl Store {
        pub(crate) fn scratch() -> (tempfile::TempDir, Self) {
            let directory = tempfile::tempdir().unwrap();
            let store = Self::open(&directory.path().join("store")).unwrap();
            (directory, store)
        }

        /// Writes the description of a layer, without a tree.
        pub(crate) fn put_layer(&self, layer: &Layer) {
            let directory = self.layer_dir(&layer.id);
            fs::create_dir_all(&directory).unwrap();
            atomic::write_json(&directory.join("layer.json"), layer).unwrap();
        }

        pub(crate) fn put_record(&self, env: &str, record: &Record) {
            let directory = self.env_dir(&env.into());
            fs::create_dir_all(&directory).unwrap();
            atomic::write_json(&directory.join("record.json"), record).unwrap();
        }
    }

    #[test]
    fn a_store_is_made_only_where_it_deletes_nothing_of_anybody() {
        let digest = "0a".repeat(32);
        let cases: [(&str, bool); 12] = [
            ("trash/letter", false),
            ("images/tmp-holiday/beach.jpg", false),
            ("volumes/data/table", false),
            ("blobs/notes", false),
            ("blobs/sha256/notes", false),
            (&format!("blobs/sha256/.{digest}"), false),
            ("notes", false),
            // A command that was killed early leaves such files.
            ("lock", true),
            ("CACHEDIR.TAG", true),
            // Never deleted, so a user may bring them along.
            ("caches/ccache/stats", true),
            (".snapshots/1", true),
            // Saved elsewhere while the store did not exist.
            (&format!("blobs/sha256/{digest}"), true),
        ];
        for (path, fits) in cases {
            let directory = tempfile::tempdir().unwrap();
            let mine = directory.path().join(path);
            fs::create_dir_all(mine.parent().unwrap()).unwrap();
            fs::create_dir_all(directory.path().join("blobs/sha256")).unwrap();
            fs::write(&mine, "").unwrap();
            let store = Store::open(directory.path());
            assert_eq!(store.is_ok(), fits, "{path}: {store:?}");
            assert!(mine.exists(), "{path}");
            let made = directory.path().join("format").exists();
            assert_eq!(made, fits, "{path}");
        }
    }

    /// Root can read everything, except through a link to itself.
    #[test]
    fn data_that_cannot_be_read_is_not_missing() {
        let (_directory, store) = Store::scratch();
        let name = EnvName::from("a");
        let env = store.env_dir(&name);
        let mut record = Record::sample("e", jiff::Timestamp::UNIX_EPOCH);
        record.head.tree = Some("t".into());
        record.head.volumes = [("build".into(), "v".into())].into();
        let obscure = |path: &Path| fs::os::unix::fs::symlink(path, path).unwrap();
        let path = env.join("record.json");
        fs::create_dir_all(env.join("trees/t")).unwrap();
        obscure(&path);
        assert_eq!(store.envs().unwrap(), std::slice::from_ref(&name));
        assert_eq!(store.users().unwrap().unreadable.len(), 1);
        fs::remove_file(&path).unwrap();
        store.put_record("a", &record);
        let record = store.record(&name).unwrap().unwrap();
        obscure(&store.volume_dir(&"v".into()));
        assert_eq!(store.volumes_by_hand(&record).len(), 1);
        obscure(&store.tree_files(&env.join("trees/t")));
        let found = store.inventory().unwrap();
        assert!(found.envs[&name].trees.contains("t"));
        obscure(&env.join("removed.json"));
        let locked = store.lock_env(&name, "up", std::time::Duration::ZERO);
        locked.unwrap_err();
        assert!(path.exists());
        obscure(&env.join("gone"));
        store.record(&name).unwrap_err();
        assert!(check::is_busy(&env.join("gone")));
        assert!(!check::is_busy(&env.join("none")));
    }

    #[test]
    fn a_long_history_of_costs_loses_its_older_half() {
        let (_directory, store) = Store::scratch();
        let name = EnvName::from("a");
        let env = store.lock_env(&name, "up", std::time::Duration::ZERO);
        let env = env.unwrap();
        let add = |step: &str| {
            let row = Past::sample(step, record::Outcome::Done);
            env.add_metrics(&row).unwrap();
        };
        add("old");
        let path = env.directory().join("metrics.jsonl");
        let line = fs::read_to_string(&path).unwrap();
        let most = usize::try_from(env::MOST_METRICS).unwrap();
        fs::write(&path, line.repeat(most / line.len())).unwrap();
        add("new");
        let rows = store.runs(&name);
        let lines = fs::read_to_string(&path).unwrap().lines().count();
        assert_eq!(rows.len(), lines);
        let half = most / line.len() / 2;
        assert!((half - 2..half + 3).contains(&rows.len()), "{}", rows.len());
        assert_eq!(rows.last().unwrap().step, "new");
    }

    #[test]
    fn a_store_that_was_copied_from_btrfs_uses_what_its_file_system_can() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        Store::open(root).unwrap();
        let format = r#"{"version": 1, "method": "btrfs"}"#;
        fs::write(root.join("format"), format).unwrap();
        let is_btrfs = tree::btrfs::is_btrfs(beneath::open_path(root).unwrap()).unwrap();
        let store = Store::open(root).unwrap();
        assert_eq!(store.method() == Method::Btrfs, is_btrfs);
    }

    #[test]
    fn a_store_without_its_format_and_a_directory_is_refused_until_it_is_repaired() {
        let (_home, store) = Store::scratch();
        store.put_layer(&Layer::sample("a".into()));
        fs::remove_file(store.root.join("format")).unwrap();
        fs::remove_dir(store.root.join("images")).unwrap();
        let error = Store::open_existing(&store.root).unwrap_err();
        assert_has!(error.message(), "lost its file `format`");
        assert!(check::repair_format(&store.root, true).unwrap().is_some());
        assert!(Store::open_existing(&store.root).unwrap().is_some());
    }

    #[test]
    fn a_store_has_a_path_that_engines_accept() {
        use std::os::unix::ffi::OsStrExt as _;
        let directory = tempfile::tempdir().unwrap();
        let name = std::ffi::OsStr::from_bytes(b"caf\xe9");
        let root = directory.path().join(name);
        let error = Store::open(&root).unwrap_err();
        assert_has!(error.message(), r"caf\xe9` is not UTF-8");
        assert!(!root.exists());
    }
}
