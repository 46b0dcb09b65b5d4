//! Owns what is said of where the store's space went.
//!
//! Every byte is in exactly one row. A row belongs to an env where that env alone needs it; a layer that several envs
//! stand on is in a row of its own that names them. What `rm` would free is told beside, since blocks may be shared
//! between rows too, by hard links and clones: they are in the row that comes first.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::inside::Part;
pub use super::places::{Inside, count};
use super::service::Held;
use crate::store::Store;
use crate::sys::error::{Result, ResultExt as _};
use crate::tree::Method;
use crate::tree::measure::Sums;

/// What a row is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Class {
    /// Frozen layers.
    Snapshots,
    /// Build volumes as layers froze them.
    Frozen,
    /// The tree that `exec` and `shell` write to.
    Live,
    /// Live build volumes.
    Build,
    /// The tree of a failed step.
    Failed,
    /// Logs of steps.
    Logs,
    /// An env's record and what else is in its directory.
    Records,
    /// Base images.
    Image,
    /// Caches.
    Cache,
    /// Sources.
    Source,
    /// What envs exported.
    Output,
    /// Downloads.
    Blobs,
    /// What waits to be unlinked.
    Trash,
    /// Trees, layers and volumes that no record names.
    Unused,
    /// Everything else below the store's root.
    Other,
}

/// The bytes of one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Size {
    /// Length of the files.
    pub apparent: u64,
    /// Space on disk.
    pub allocated: u64,
    /// Space on disk that nothing outside this row's owner holds.
    pub exclusive: u64,
    /// Space on disk that this row uses and another one has counted.
    pub counted_elsewhere: u64,
    /// Files, directories and everything else.
    pub entries: u64,
}

impl Size {
    /// Returns the space on disk that something outside this row's owner holds as well.
    pub fn shared(&self) -> u64 {
        self.allocated.saturating_sub(self.exclusive)
    }
}

impl From<Sums> for Size {
    fn from(sums: Sums) -> Self {
        Self {
            apparent: sums.apparent,
            allocated: sums.allocated,
            exclusive: sums.exclusive,
            counted_elsewhere: sums.counted_elsewhere,
            entries: sums.entries,
        }
    }
}

impl std::ops::AddAssign for Size {
    fn add_assign(&mut self, other: Self) {
        self.apparent += other.apparent;
        self.allocated += other.allocated;
        self.exclusive += other.exclusive;
        self.counted_elsewhere += other.counted_elsewhere;
        self.entries += other.entries;
    }
}

impl std::iter::Sum for Size {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::default(), |mut sum, size| {
            sum += size;
            sum
        })
    }
}

/// One thing that takes space.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Row {
    /// What it is.
    pub class: Class,
    /// Its name: of the snapshot, volume, image, cache or source; empty where there is only one.
    pub name: String,
    /// The snapshot that froze it, for a frozen volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// The directory in it, for a row of a part of it; the row of the whole then holds what is in none of those.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<PathBuf>,
    /// What it is of TheRock's build tree, for a row of all directories that are alike; as `inside`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<Part>,
    /// What it is, where names in it tell.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The envs that need it; for a cache or source those that mount it, for an output the env that made it.
    pub envs: Vec<String>,
    /// Its bytes.
    pub size: Size,
}

impl Class {
    /// Returns whether it stays when the envs that use it are removed.
    pub fn is_kept(self) -> bool {
        matches!(self, Self::Cache | Self::Source | Self::Output)
    }
}

impl Row {
    pub(crate) fn new(class: Class, name: String, envs: Vec<String>) -> Self {
        Self {
            class,
            name,
            snapshot: None,
            inside: None,
            part: None,
            content: None,
            envs,
            size: Size::default(),
        }
    }

    /// Returns whether this is no part of something that has a row too.
    pub fn is_whole(&self) -> bool {
        self.inside.is_none() && self.part.is_none()
    }
}

/// Where the space went.
#[derive(Debug, Serialize)]
pub struct Report {
    /// Version of this description.
    pub schema: &'static str,
    /// The store's root.
    pub store: PathBuf,
    /// The env, where only one was asked for.
    pub env: Option<String>,
    /// How snapshots are made here.
    pub method: Method,
    /// What was counted, in the order that decides who has shared bytes.
    pub rows: Vec<Row>,
    /// What `rm` would free in the store, by env.
    pub freed: BTreeMap<String, u64>,
    /// What services of containers hold, which is not in the store.
    pub at_services: Vec<Held>,
    /// Services that did not answer, and why.
    pub silent_services: Vec<String>,
    /// The sum of the rows.
    pub total: Size,
    /// The file system.
    pub file_system: FileSystem,
    /// Whether blocks shared by clones were looked for.
    pub extents: bool,
    /// Files that would not say what they share or how small they were compressed: sizes are then at most what is said.
    pub unshared: u64,
    /// Paths that could not be read: sizes are then at least what is said.
    pub unreadable: u64,
    /// The first of those.
    pub problems: Vec<String>,
    /// Mounts below the store that were left out.
    pub mounts_skipped: u64,
}

/// What the file system says of itself.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct FileSystem {
    /// Its size in bytes.
    pub size: u64,
    /// What is in use, by the store and others, its own bookkeeping included.
    pub used: u64,
    /// What an ordinary user could still write.
    pub free: u64,
}

impl FileSystem {
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let found = nix::sys::statvfs::statvfs(path)
            .context(|| format!("cannot ask for free space at `{}`", path.display()))?;
        let unit = found.fragment_size();
        Ok(Self {
            size: found.blocks() * unit,
            used: found.blocks().saturating_sub(found.blocks_free()) * unit,
            free: found.blocks_available() * unit,
        })
    }
}

impl Report {
    /// Sums what services hold for exactly these envs: own bytes.
    pub fn held(&self, class: Class, envs: &[String]) -> u64 {
        let held = self.at_services.iter();
        held.filter(|held| held.class == class && held.envs == envs)
            .map(|held| held.own)
            .sum()
    }

    /// Sums what services hold that goes with `env`: own bytes.
    pub fn freed_at_services(&self, env: &str) -> u64 {
        let held = self.at_services.iter();
        held.filter(|held| held.class != Class::Image && held.envs == [env])
            .map(|held| held.own)
            .sum()
    }

    /// Sums the rows of one class that `env` alone needs.
    pub fn own(&self, env: &str, class: Class) -> Size {
        self.rows
            .iter()
            .filter(|row| row.class == class && row.envs == [env])
            .map(|row| row.size)
            .sum()
    }
}

/// Counts the whole store, or with `only` what concerns one env, with the directories down to `depth` in rows of their own.
pub fn report(store: &Store, only: Option<&str>, depth: usize) -> Result<Report> {
    count(store, only, Inside::Directories(depth))
}
