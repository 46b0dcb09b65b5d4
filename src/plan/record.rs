//! Owns what the store remembers of an env: `envs/<name>/record.json`, written last and by rename, so that it
//! is the one place that decides which trees, volumes and layers are alive.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checked;
use super::ids::{self, LayerId, StepKey};
use crate::plan::layer::VolumesFrom;

/// Version of the record's format; a newer one is refused.
pub const VERSION: u32 = 1;

/// What is known of an env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Record {
    /// Format version.
    pub version: u32,
    /// Random, never used again: names the env's volumes.
    #[serde(deserialize_with = "checked::names")]
    pub id: String,
    /// When it was made.
    pub created: Timestamp,
    /// When a command last changed it, other than to clean up.
    pub used: Timestamp,
    /// Profile it came from.
    pub profile: String,
    /// Targets it builds for.
    pub targets: Vec<String>,
    /// Image recipe's name.
    pub image: String,
    /// Key of the image it stands on.
    #[serde(deserialize_with = "checked::names")]
    pub image_key: String,
    /// Engine it was made with.
    pub engine: String,
    /// Socket of the service that has its trees; none with systemd-nspawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<PathBuf>,
    /// What it is now.
    pub head: Head,
    /// Frozen states, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// What the last `up` knew of each step, in order.
    pub steps: Vec<StepRecord>,
    /// The tree of a failed step, kept for inspection.
    pub failed: Option<Failed>,
    /// Whether `up` came to its end.
    pub complete: bool,
}

/// The env's present state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Head {
    /// Layer it stands on; `None` is the bare image.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// Live tree, made when something first writes.
    #[serde(default, deserialize_with = "checked::names")]
    pub tree: Option<String>,
    /// Live volumes of kind `build`: name to directory in `volumes/`.
    #[serde(deserialize_with = "checked::names")]
    pub volumes: BTreeMap<String, String>,
    /// Where their content comes from; [`Head::volumes_from`] says what it means where it is not written down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes_from: Option<VolumesFrom>,
}

/// Why a snapshot exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A step ended.
    Step,
    /// Somebody asked for it.
    User,
    /// rockenv kept changes that a command would have dropped.
    Auto,
}

/// A frozen state of the env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Snapshot {
    /// Name, unique in the env.
    pub name: String,
    /// Directory in `layers/`.
    pub layer: LayerId,
    /// Step key, for a step's.
    #[serde(default)]
    pub key: Option<StepKey>,
    /// Why it exists.
    pub origin: Origin,
    /// Its step ran although a layer of its key was there: the user asked for that.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub again: bool,
    /// When it was taken.
    pub created: Timestamp,
}

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Outcome {
    /// It ran and succeeded.
    Done,
    /// Its layer was there already.
    Hit,
    /// It failed.
    Failed,
    /// It was not run, and not passed.
    Skipped,
    /// It was stopped or never reached.
    Pending,
}

/// What the last `up` knew of a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepRecord {
    /// Name in the profile.
    pub name: String,
    /// Its key, where it has one.
    #[serde(with = "ids::or_empty")]
    #[schemars(with = "String")]
    pub key: Option<StepKey>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, in a sentence, where that needs saying.
    pub reason: Option<String>,
    /// Its log, relative to the env's directory.
    #[serde(default, deserialize_with = "checked::below")]
    pub log: Option<String>,
    /// What it cost.
    pub cost: Option<Cost>,
}

/// What a step cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cost {
    /// Wall clock, in milliseconds.
    pub wall_ms: u64,
    /// What its container used.
    pub usage: Usage,
    /// Growth of the tree and of the build volumes it sees, in allocated bytes.
    pub disk_delta: i64,
    /// Most disk in use over what was in use when it began, in bytes; what others wrote meanwhile counts too.
    #[serde(default)]
    pub disk_peak: u64,
}

/// A failed step's remains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Failed {
    /// The step.
    pub step: String,
    /// Its tree.
    #[serde(deserialize_with = "checked::names")]
    pub tree: String,
    /// The layer that the tree stands on.
    #[serde(default)]
    pub parent: Option<LayerId>,
    /// Its log, relative to the env's directory.
    #[serde(deserialize_with = "checked::below")]
    pub log: String,
    /// Exit code of its script.
    pub code: Option<u8>,
}

impl Record {
    /// Returns the snapshot of that name.
    pub fn snapshot(&self, name: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }

    /// Returns the newest snapshot of the step with that key.
    pub fn of_step(&self, key: &StepKey) -> Option<&Snapshot> {
        let mut newest_first = self.snapshots.iter().rev();
        newest_first.find(|snapshot| snapshot.key.as_ref() == Some(key))
    }

    /// Returns every layer that the env needs by name; their parents are needed too.
    pub fn layers(&self) -> impl Iterator<Item = &LayerId> {
        let failed = self
            .failed
            .iter()
            .filter_map(|failed| failed.parent.as_ref());
        self.snapshots
            .iter()
            .map(|snapshot| &snapshot.layer)
            .chain(&self.head.layer)
            .chain(failed)
    }

    /// Returns every live tree.
    pub fn trees(&self) -> impl Iterator<Item = &str> {
        self.head
            .tree
            .as_deref()
            .into_iter()
            .chain(self.failed.iter().map(|failed| failed.tree.as_str()))
    }

    /// Returns a snapshot name made from `base` that is not taken.
    pub fn free_name(&self, base: &str) -> String {
        let mut name = base.to_owned();
        let mut number = 2;
        while self.snapshot(&name).is_some() {
            name = format!("{base}-{number}");
            number += 1;
        }
        name
    }
}

/// What a container used, from its start to its end.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema,
)]
pub struct Usage {
    /// Processor time, in microseconds.
    pub cpu_us: u64,
    /// Highest memory use in bytes, page cache included; `None` where no control group counts it.
    pub memory_peak: Option<u64>,
    /// Highest memory use without page cache, as samples saw it; `None` where no control group counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_held: Option<u64>,
    /// Bytes read from block devices.
    pub read_bytes: u64,
    /// Bytes written towards block devices.
    pub written_bytes: u64,
    /// Processes killed because memory ran out.
    pub oom_kills: u64,
}

impl Usage {
    /// Returns the figure that is called memory everywhere: the highest use without page cache, or with it where only that is known.
    pub fn memory(&self) -> Option<u64> {
        self.memory_held
            .or(self.memory_peak)
            .filter(|bytes| *bytes > 0)
    }
}
