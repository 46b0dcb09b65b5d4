//! Owns the report of the store's disk usage.
//!
//! Every byte is in exactly one row. A row belongs to an env if that env alone needs it; a layer that several envs
//! need has a row of its own that names them. The bytes that `rm` would free are reported separately, because rows
//! may share blocks by hard links and clones. Those count in the first row that has them.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::Serialize;

pub(crate) use super::places::{Inside, count};
use super::service::Held;
use super::subdirectories::BuildTreePart;
use crate::sys::host::Space;
use crate::tree::Method;
use crate::tree::measure::DiskUsage;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Class {
    Snapshots,
    /// Build volumes frozen in layers.
    Frozen,
    /// The tree that `exec` and `shell` write to.
    Live,
    Build,
    /// The tree of a failed step.
    Failed,
    Logs,
    /// An env's record and the other files in its directory.
    Records,
    Image,
    Cache,
    Source,
    /// Results of envs.
    Output,
    Blobs,
    /// Files waiting to be unlinked.
    Trash,
    /// Trees, layers and volumes that no record names.
    Unused,
    /// Everything else below the store's root.
    Other,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct UsageRow {
    pub class: Class,
    /// Name of the snapshot, volume, image, cache or source; empty if there is only one.
    pub name: String,
    /// The snapshot that froze it, for a frozen volume.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub snapshot: Option<String>,
    /// Directory of a part. The row of the whole has the remaining bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub inside: Option<PathBuf>,
    /// Kind of the directories in TheRock's build tree that the row sums up; otherwise like `inside`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub part: Option<BuildTreePart>,
    /// Kind of content, if names in it show that.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    /// The envs that need it; for a cache or source those that mount it, for an output the env that made it.
    pub envs: Vec<String>,
    pub size: DiskUsage,
}

impl Class {
    /// Returns whether it stays when the envs that use it are removed.
    pub(crate) fn is_kept(self) -> bool {
        matches!(self, Self::Cache | Self::Source | Self::Output)
    }

    /// Returns whether `rm` of the only env that uses such data removes the data too.
    pub(super) fn is_removed(self) -> bool {
        !self.is_kept() && self != Self::Image
    }
}

impl UsageRow {
    pub(crate) fn new(class: Class, name: String, envs: Vec<String>) -> Self {
        Self {
            class,
            name,
            snapshot: None,
            inside: None,
            part: None,
            content: None,
            envs,
            size: DiskUsage::default(),
        }
    }

    /// Returns whether this is not part of another row's item.
    pub(crate) fn is_whole(&self) -> bool {
        self.inside.is_none() && self.part.is_none()
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct UsageReport {
    pub schema: &'static str,
    pub store: PathBuf,
    /// The env, if only one was requested.
    pub env: Option<String>,
    pub method: Method,
    /// The rows, in the order that decides which row owns shared bytes.
    pub rows: Vec<UsageRow>,
    /// Bytes that `rm` would free in the store, by env.
    pub freed: BTreeMap<String, u64>,
    /// Data of container services, which is not in the store.
    pub at_services: Vec<Held>,
    /// Services that did not answer, and why.
    pub silent_services: Vec<String>,
    pub total: DiskUsage,
    pub file_system: Space,
    /// Whether blocks shared by clones were detected.
    pub extents: bool,
    /// Files without information about sharing or compression: their sizes are upper bounds.
    pub unshared: u64,
    /// Unreadable paths: sizes are lower bounds.
    pub unreadable: u64,
    /// The first unreadable paths, with their errors.
    pub problems: Vec<String>,
    /// Mounts below the store, which are not counted.
    pub mounts_skipped: u64,
}

impl UsageReport {
    /// Sums up own bytes that services hold for exactly these envs.
    pub(crate) fn held(&self, class: Class, envs: &[String]) -> u64 {
        let held = self.at_services.iter();
        held.filter(|held| held.class == class && held.envs == envs)
            .map(|held| held.own)
            .sum()
    }

    /// Sums up own bytes at services that removing `env` frees.
    pub(crate) fn freed_at_services(&self, env: &str) -> u64 {
        let held = self.at_services.iter();
        held.filter(|held| held.class.is_removed() && held.envs == [env])
            .map(|held| held.own)
            .sum()
    }

    /// Sums up the rows of one class that `env` alone needs.
    pub(crate) fn own(&self, env: &str, class: Class) -> DiskUsage {
        let rows = self.rows.iter();
        let rows = rows.filter(|row| row.class == class && row.envs == [env]);
        rows.map(|row| row.size).sum()
    }
}
