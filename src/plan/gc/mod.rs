//! Owns the decision what `gc` removes: a pure function of an inventory of the store, a policy and a wish.
//!
//! What nobody can use any more goes always. What could be made again goes when it was not used for long, or when space is
//! short: most bytes for the least time to make them again first, and never what something that stays stands on. What stays
//! and why is in [`roots`]. Sources, outputs and host directories are not even in the inventory.

pub mod cache;
mod decide;
pub mod policy;
pub mod roots;
#[cfg(test)]
mod tests;
mod units;

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::plan::ids::LayerId;
use crate::plan::layer::Layer;
use crate::plan::record::Record;
pub use decide::plan;
use policy::Limits;
use roots::{Roots, Why};
use units::short;

/// An image younger than this is kept: its builder may not have said yet what stands on it.
const FRESH: Duration = Duration::from_secs(3600);

/// What there is to decide about; bytes are what removing the thing would free once what stands on it is gone, as far as known.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// When it was read.
    pub now: Timestamp,
    /// Bytes of the file system.
    pub size: u64,
    /// Bytes that an ordinary user could still write.
    pub free: u64,
    /// Bytes of the whole store; none where no limit needs them.
    pub used: Option<u64>,
    /// Envs by name.
    pub envs: BTreeMap<String, Env>,
    /// What running commands count on beyond their env's record, by env.
    pub leases: BTreeMap<String, Lease>,
    /// Layers by id.
    pub layers: BTreeMap<LayerId, Frozen>,
    /// Images by key.
    pub images: BTreeMap<String, Base>,
    /// Downloads by name.
    pub blobs: BTreeMap<String, Kept>,
    /// What no command will ever use: path in the store, why, and its bytes.
    pub strays: BTreeMap<String, (String, u64)>,
    /// Caches by name that have a limit.
    pub caches: BTreeMap<String, Cache>,
    /// Sub-projects of TheRock that may be given up: env, build volume, and path in it.
    pub projects: BTreeMap<(String, String, String), Project>,
    /// Layers and images that lock files name, with the file.
    pub locked: BTreeMap<String, String>,
    /// What cannot be read, and so may stand on any layer and image.
    pub unreadable: Vec<String>,
    /// What else the user should know: what stays because nobody can tell whose it is.
    pub notes: Vec<String>,
}

/// An env.
#[derive(Clone, Debug)]
pub struct Env {
    /// Its record.
    pub record: Record,
    /// When it was last used.
    pub used: Timestamp,
    /// A command holds it.
    pub busy: bool,
    /// A killed command left a journal, which comes first.
    pub unsettled: bool,
    /// Bytes of the failed step's tree.
    pub failed: u64,
    /// Bytes of the logs of each run, by its time.
    pub logs: BTreeMap<String, u64>,
}

/// What a running command is about to use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Lease {
    /// Layers by id.
    pub layers: Vec<LayerId>,
    /// The image's key.
    #[serde(deserialize_with = "crate::plan::checked::names")]
    pub image: String,
}

/// A layer.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Its description.
    pub layer: Layer,
    /// Bytes that only it holds, and what stands on it.
    pub bytes: u64,
    /// Those of them that a service has.
    pub at_service: u64,
}

/// A base image.
#[derive(Clone, Debug)]
pub struct Base {
    /// Recipe's name.
    pub name: String,
    /// When it was built.
    pub built: Timestamp,
    /// When an env on it was last used, or it was built.
    pub used: Timestamp,
    /// Its recipe still stands for it.
    pub current: bool,
    /// Its bytes.
    pub bytes: u64,
    /// Milliseconds that building it took.
    pub took_ms: Option<u64>,
}

/// A file that can be fetched again.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Its bytes.
    pub bytes: u64,
    /// When it was last written or read.
    pub used: Timestamp,
}

/// A cache with a limit.
#[derive(Clone, Debug)]
pub struct Cache {
    /// What it holds now.
    pub bytes: u64,
    /// What it may hold.
    pub max: u64,
    /// What it is, where its files tell.
    pub kind: Option<cache::Kind>,
    /// An env that mounts it and that nothing runs in, and the directory there; none while one is busy.
    pub at: Option<(String, String)>,
    /// An env that mounts it and in which a command runs: the tool would take files from under it.
    pub busy: Option<String>,
}

/// A sub-project in a build volume that an artifact holds too.
#[derive(Clone, Copy, Debug)]
pub struct Project {
    /// What giving it up frees: not what artifacts hold by hard links.
    pub bytes: u64,
    /// Milliseconds that its commands took one after the other, where its ninja wrote that down.
    pub took_ms: Option<u64>,
}

/// What to remove.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum What {
    /// A snapshot of a step, in every env that has it, and its layer.
    Snapshot {
        /// The layer.
        layer: LayerId,
    },
    /// A layer that no env names.
    Layer {
        /// The layer.
        layer: LayerId,
    },
    /// The tree that a failed step left.
    Failed {
        /// The env.
        env: String,
    },
    /// The logs of one run.
    Logs {
        /// The env.
        env: String,
        /// The run.
        run: String,
    },
    /// A base image.
    Image {
        /// Its key.
        image: String,
    },
    /// A download.
    Download {
        /// Its name below `blobs/sha256`.
        blob: String,
    },
    /// What no command will ever use.
    Stray {
        /// Its path in the store.
        path: String,
    },
    /// What `+expunge` removes of a sub-project in a build volume.
    Project {
        /// The env.
        env: String,
        /// The volume's name.
        volume: String,
        /// Its path in the volume.
        path: String,
    },
    /// What is too much in a cache.
    Cache {
        /// The cache.
        cache: String,
        /// What its own tool is to leave, in bytes.
        max: u64,
    },
}

/// Which rule asks for a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// Nobody can use it.
    Garbage,
    /// `cache.NAME.max`.
    CacheMax,
    /// `older-than`.
    OlderThan,
    /// `keep-at-most`.
    KeepAtMost,
    /// `min-free`.
    MinFree,
    /// `--free`.
    Free,
}

impl Rule {
    /// Returns its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::CacheMax => "cache max",
            Self::OlderThan => "older-than",
            Self::KeepAtMost => "keep-at-most",
            Self::MinFree => "min-free",
            Self::Free => "--free",
        }
    }

    /// Returns whether enough free space ends it.
    pub fn wants_space(self) -> bool {
        matches!(self, Self::MinFree | Self::Free)
    }
}

/// One removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What.
    #[serde(flatten)]
    pub what: What,
    /// Its name for people.
    pub name: String,
    /// What it should free, in bytes.
    pub bytes: u64,
    /// How long it would take to make it again, in milliseconds.
    pub rebuild_ms: u64,
    /// The rule that asks for it.
    pub rule: Rule,
    /// Why, in a sentence.
    pub reason: String,
}

/// What `gc` does.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Plan {
    /// The removals, in order: what stands on something goes before it.
    pub items: Vec<Item>,
    /// What the items should free, in bytes.
    pub estimate: u64,
    /// What could be removed and stays, in bytes.
    pub spare: u64,
    /// Bytes that are still missing when all is done.
    pub missing: u64,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Returns how long ago something was; nothing for what a wrong clock put into the future.
fn age(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// One thing that stays, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Rooted {
    /// Its name for people.
    pub name: String,
    /// Layer, image or download.
    pub id: String,
    /// Its bytes.
    pub bytes: u64,
    /// Why.
    pub because: Vec<String>,
}

/// Lists what stays whatever the pressure, with the reasons.
pub fn rooted(stock: &Inventory, limits: &Limits) -> Vec<Rooted> {
    let roots = Roots::of(stock, limits.keep_last);
    let say = |reasons: &BTreeSet<Why>| reasons.iter().map(ToString::to_string).collect();
    let layers = roots.layers.iter().filter_map(|(id, reasons)| {
        let item = stock.layers.get(id)?;
        Some(Rooted {
            name: format!("layer {} ({})", short(id), item.layer.title),
            id: id.to_string(),
            bytes: item.bytes,
            because: say(reasons),
        })
    });
    let images = roots.images.iter().filter_map(|(key, reasons)| {
        let image = stock.images.get(key)?;
        Some(Rooted {
            name: format!("image {}", image.name),
            id: key.clone(),
            bytes: image.bytes,
            because: say(reasons),
        })
    });
    let blobs = roots.blobs.iter().filter_map(|(name, reasons)| {
        let blob = stock.blobs.get(name)?;
        Some(Rooted {
            name: format!("download {}", short(name)),
            id: name.clone(),
            bytes: blob.bytes,
            because: say(reasons),
        })
    });
    images.chain(layers).chain(blobs).collect()
}
