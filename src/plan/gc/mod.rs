//! Owns deciding what `gc` removes: a pure function of an inventory of the store, a policy and a request.
//!
//! Unusable items always go. Items that can be rebuilt go if they were unused for long, or if space is short: first
//! those that free the most bytes for the least rebuild time, and never the parent of a remaining item. [`roots`]
//! decides what stays and why. Sources, outputs and host directories are not even in the inventory.

pub mod cache;
mod decide;
pub(crate) mod policy;
pub(crate) mod roots;
#[cfg(test)]
mod tests;
mod units;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::plan::ids::{EnvName, ImageKey, LayerId, TreeId};
use crate::plan::layer::Layer;
use crate::plan::record::Record;
pub(crate) use decide::plan;
use policy::Limits;
use roots::{Roots, Why};
use units::short;

/// Directory of the fingerprints of sources, below `blobs`. Each new place of a source adds a file.
pub(crate) const FINGERPRINTS: &str = "fingerprints/";

/// A younger image is kept: the command that built it may not have recorded an env on it yet.
const FRESH: Duration = Duration::from_secs(3600);

/// The items to decide about. Each has the bytes that its removal frees once its descendants are gone, as far as known.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    pub now: Timestamp,
    /// Bytes that an ordinary user could still write.
    pub free: u64,
    /// Size of the whole store; `None` if no limit needs it.
    pub used: Option<u64>,
    pub envs: BTreeMap<EnvName, Env>,
    /// Leases of running commands, by env.
    pub leases: BTreeMap<EnvName, Lease>,
    pub layers: BTreeMap<LayerId, Frozen>,
    pub images: BTreeMap<ImageKey, Base>,
    pub blobs: BTreeMap<String, CachedFile>,
    /// Files that no command will ever use: path in the store, reason, and bytes.
    pub strays: BTreeMap<String, (String, u64)>,
    /// Caches with a limit, by name.
    pub caches: BTreeMap<String, Cache>,
    /// Removable sub-projects of TheRock: env, build volume, and path in it.
    pub projects: BTreeMap<(EnvName, String, String), Project>,
    /// Layers and images that lock files name, with the file.
    pub locked: BTreeMap<String, String>,
    /// Unreadable objects, which may need any layer and image.
    pub unreadable: Vec<String>,
    /// Further notes for the user: items of unknown owners, which stay.
    pub notes: Vec<String>,
}

impl Inventory {
    fn layer(&self, id: &LayerId) -> Option<&Layer> {
        Some(&self.layers.get(id)?.layer)
    }
}

#[derive(Clone, Debug)]
pub struct Env {
    pub record: Record,
    pub used: Timestamp,
    pub busy: bool,
    /// A killed command left a journal, which must be finished first.
    pub unsettled: bool,
    /// Bytes of the failed step's tree.
    pub failed: u64,
    /// Whether a command of `shell --failed` changed that tree.
    pub failed_edited: bool,
    /// Bytes of each run's logs, by its time.
    pub logs: BTreeMap<String, u64>,
}

/// Layers and image that a running command is about to use.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Lease {
    pub layers: Vec<LayerId>,
    pub image: ImageKey,
}

#[derive(Clone, Debug)]
pub struct Frozen {
    pub layer: Layer,
    /// When it came from another machine, if it did.
    pub arrived: Option<Timestamp>,
    /// Bytes that only the layer and its descendants hold.
    pub bytes: u64,
    /// Part of them that a service holds.
    pub at_service: u64,
}

#[derive(Clone, Debug)]
pub struct Base {
    /// Recipe's name.
    pub name: String,
    pub built: Timestamp,
    /// When an env on it was last used, or when it was built.
    pub used: Timestamp,
    /// Whether it is the current image of its recipe.
    pub current: bool,
    pub bytes: u64,
    /// Build time, in milliseconds.
    pub took_ms: Option<u64>,
}

/// A file that can be fetched again.
#[derive(Clone, Copy, Debug)]
pub struct CachedFile {
    pub bytes: u64,
    /// When it was last written or read.
    pub used: Timestamp,
}

#[derive(Clone, Debug)]
pub struct Cache {
    pub bytes: u64,
    pub max: u64,
    /// Its tool, if its files identify one.
    pub kind: Option<cache::CacheKind>,
    /// An idle env that mounts it, and the mount point; `None` while one is busy.
    pub at: Option<(EnvName, String)>,
    /// An env that mounts it and runs a command, whose files the tool might remove.
    pub busy: Option<EnvName>,
}

/// A sub-project in a build volume whose files an artifact contains too.
#[derive(Clone, Copy, Debug)]
pub struct Project {
    /// Bytes that removing it frees, without hard links to artifacts.
    pub bytes: u64,
    /// Total milliseconds of its commands, if ninja recorded them.
    pub took_ms: Option<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum GcTarget {
    /// A snapshot of a step, in every env that has it, and its layer.
    Snapshot {
        layer: LayerId,
    },
    /// A layer that no env names.
    Layer {
        layer: LayerId,
    },
    /// A layer that was pulled or imported, and that no env has needed yet.
    Pulled {
        layer: LayerId,
    },
    /// The tree of a failed step.
    Failed {
        env: EnvName,
        #[serde(skip)]
        tree: TreeId,
    },
    Logs {
        env: EnvName,
        run: String,
    },
    Image {
        image: ImageKey,
    },
    Download {
        /// The download's name below `blobs/sha256`, or the path of another file below `blobs`.
        blob: String,
    },
    /// A file that no command will ever use.
    Stray {
        /// Its path in the store.
        path: String,
    },
    /// The files of a sub-project in a build volume that `+expunge` removes.
    Project {
        env: EnvName,
        volume: String,
        /// Its path in the volume.
        path: String,
    },
    /// The excess content of a cache.
    Cache {
        cache: String,
        /// The size that its own tool must shrink it to, in bytes.
        max: u64,
    },
}

impl GcTarget {
    /// Returns the layer that goes, if one does.
    pub(crate) fn layer(&self) -> Option<&LayerId> {
        match self {
            Self::Snapshot { layer } | Self::Layer { layer } | Self::Pulled { layer } => {
                Some(layer)
            }
            _ => None,
        }
    }
}

/// The rule behind a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Rule {
    /// No command can use it.
    Garbage,
    CacheMax,
    OlderThan,
    KeepAtMost,
    MinFree,
    Free,
}

impl Rule {
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::CacheMax => "cache max",
            Self::OlderThan => "older-than",
            Self::KeepAtMost => "keep-at-most",
            Self::MinFree => "min-free",
            Self::Free => "--free",
        }
    }

    /// Returns whether it ends as soon as enough space is free.
    pub(crate) fn wants_space(self) -> bool {
        matches!(self, Self::MinFree | Self::Free)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct GcItem {
    #[serde(flatten)]
    pub what: GcTarget,
    pub name: String,
    /// Estimated bytes that it frees.
    pub bytes: u64,
    /// Time to rebuild it, in milliseconds.
    pub rebuild_ms: u64,
    pub rule: Rule,
    /// As a sentence.
    pub reason: String,
}

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct Plan {
    /// The removals, in order: descendants first.
    pub items: Vec<GcItem>,
    /// Estimated bytes that the items free.
    pub estimate: u64,
    /// Bytes of removable items that stay.
    pub spare: u64,
    /// Bytes still missing after all removals.
    pub missing: u64,
    pub notes: Vec<String>,
}

/// Returns the age of something; zero for times in the future, set by a wrong clock.
fn age(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct KeptItem {
    pub name: String,
    /// Layer, image or download.
    pub id: String,
    pub bytes: u64,
    pub because: Vec<String>,
}

/// Lists the items that always stay, with the reasons.
pub(crate) fn rooted(inventory: &Inventory, limits: &Limits) -> Vec<KeptItem> {
    let roots = Roots::of(inventory, limits.keep_last);
    let kept = |name: String, id: &str, bytes: u64, reasons: &BTreeSet<Why>| KeptItem {
        name,
        id: id.to_owned(),
        bytes,
        because: reasons.iter().map(ToString::to_string).collect(),
    };
    let layers = roots.layers.iter().filter_map(|(id, reasons)| {
        let item = inventory.layers.get(id)?;
        let name = format!("layer {} ({})", short(id), item.layer.title);
        Some(kept(name, id, item.bytes, reasons))
    });
    let images = roots.images.iter().filter_map(|(key, reasons)| {
        let image = inventory.images.get(key)?;
        let name = format!("image {}", image.name);
        Some(kept(name, key, image.bytes, reasons))
    });
    let blobs = roots.blobs.iter().filter_map(|(name, reasons)| {
        let blob = inventory.blobs.get(name)?;
        let title = format!("download {}", short(name));
        Some(kept(title, name, blob.bytes, reasons))
    });
    images.chain(layers).chain(blobs).collect()
}
