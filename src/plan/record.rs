//! Owns the store's record of an env, `envs/<name>/record.json`. It is written last and by rename, so it alone decides
//! which trees, volumes and layers are alive.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ids::{
    self, EnvId, ImageKey, LayerId, PathBelow, StepKey, TreeId, VolumeId, VolumeName,
};
use crate::plan::layer::{ByHand, Layer, Moment, VolumesFrom};
use crate::plan::resolve::Spec;
use crate::sys::name::StepName;
use crate::sys::shell::quoted;

/// Version of the record's format. A newer version is refused.
pub const VERSION: u32 = 1;

/// The record of an env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Record {
    /// Format version.
    pub version: u32,
    /// Random and never reused: names the env's volumes.
    pub id: EnvId,
    /// When it was made.
    pub created: Timestamp,
    /// When a command last changed it, except to clean up.
    pub used: Timestamp,
    /// Profile it came from.
    pub profile: String,
    /// Targets it builds for.
    pub targets: Vec<String>,
    /// Image recipe's name.
    pub image: String,
    /// Key of its image.
    pub image_key: ImageKey,
    /// Engine it was made with.
    pub engine: String,
    /// Socket of the service that has its trees; none with systemd-nspawn.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service: Option<PathBuf>,
    /// Its current state.
    pub head: Head,
    /// Frozen states, oldest first.
    pub snapshots: Vec<Snapshot>,
    /// The steps of the last `up`, in order.
    pub steps: Vec<StepRecord>,
    /// The tree of a failed step, kept for inspection.
    pub failed: Option<Failed>,
    /// Whether `up` reached its end.
    pub complete: bool,
    /// The command that brings it up to date.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

/// The env's current state.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Head {
    /// Its layer; `None` is the bare image.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// Live tree, made on the first write.
    #[serde(default)]
    pub tree: Option<TreeId>,
    /// Live volumes of kind `build`: name to directory in `volumes/`.
    pub volumes: BTreeMap<VolumeName, VolumeId>,
    /// Origin of their content; [`Head::volumes_from`] interprets a missing value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub volumes_from: Option<VolumesFrom>,
    /// Commands that may have written to them since; [`Head::by_hand`] interprets a missing value.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by_hand: Option<ByHand>,
}

/// Why a snapshot exists.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// A step ended.
    Step,
    /// A user created it.
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
    /// The step's key, if a step made it.
    #[serde(default)]
    pub key: Option<StepKey>,
    /// Why it exists.
    pub origin: Origin,
    /// Its step ran although its key had a layer, at the user's request.
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
    /// Its layer existed already.
    Hit,
    /// It failed.
    Failed,
    /// It was skipped, so it has neither passed nor failed.
    Skipped,
    /// It was stopped or never reached.
    Pending,
}

/// A step of the last `up`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct StepRecord {
    /// Name in the profile.
    pub name: StepName,
    /// Its key, where it has one.
    #[serde(with = "ids::or_empty")]
    #[schemars(with = "String")]
    pub key: Option<StepKey>,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, in a sentence, if there is more to say.
    pub reason: Option<String>,
    /// Its log, relative to the env's directory.
    pub log: Option<PathBelow>,
    /// Its cost.
    pub cost: Option<Cost>,
}

/// Reason of a pending step that a signal from the user stopped.
pub const INTERRUPTED: &str = "interrupted";

impl Outcome {
    /// Returns whether the step has a snapshot.
    pub(crate) fn is_done(self) -> bool {
        matches!(self, Self::Done | Self::Hit)
    }
}

impl StepRecord {
    /// Returns whether a signal from the user stopped the step.
    pub fn is_interrupted(&self) -> bool {
        self.outcome == Outcome::Pending && self.reason.as_deref() == Some(INTERRUPTED)
    }
}

/// The cost of a step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Cost {
    /// Wall clock, in milliseconds.
    pub wall_ms: u64,
    /// Resource usage of its container.
    pub usage: Usage,
    /// Growth of the tree and of the build volumes it sees, in allocated bytes.
    pub disk_delta: i64,
    /// Peak of disk usage of the store's file system above the level at its start, in bytes, including what others
    /// wrote meanwhile.
    #[serde(default)]
    pub disk_peak: u64,
}

/// The remains of a failed step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Failed {
    /// The step.
    pub step: StepName,
    /// Its tree.
    pub tree: TreeId,
    /// The tree's parent layer.
    #[serde(default)]
    pub parent: Option<LayerId>,
    /// Its log, relative to the env's directory.
    pub log: PathBelow,
    /// Exit code of its script.
    pub code: Option<u8>,
    /// When a command of `shell --failed` first got it, if one did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shown: Option<Moment>,
}

#[cfg(test)]
impl Record {
    /// Makes the record of a complete env, for tests.
    pub(crate) fn sample(id: &str, made: Timestamp) -> Self {
        Self {
            profile: "p".to_owned(),
            image: "base".to_owned(),
            engine: "nspawn".to_owned(),
            complete: true,
            ..Self::empty(id.into(), "image".into(), made)
        }
    }
}

impl Snapshot {
    /// Makes the snapshot of a layer that no record names.
    pub(crate) fn of(layer: &Layer, name: String) -> Self {
        Self {
            name,
            layer: layer.id.clone(),
            key: layer.key.clone(),
            origin: match layer.key {
                Some(_) => Origin::Step,
                None => Origin::User,
            },
            again: false,
            created: layer.created,
        }
    }
}

impl Record {
    /// Makes the record of an env in which no step ran yet.
    pub(crate) fn new(spec: &Spec, id: EnvId, image_key: ImageKey, now: Timestamp) -> Self {
        Self {
            profile: spec.profile.clone(),
            targets: spec.targets.iter().map(ToString::to_string).collect(),
            image: spec.image.clone(),
            engine: spec.engine.name().to_owned(),
            ..Self::empty(id, image_key, now)
        }
    }

    fn empty(id: EnvId, image_key: ImageKey, now: Timestamp) -> Self {
        Self {
            version: VERSION,
            id,
            created: now,
            used: now,
            profile: String::new(),
            targets: Vec::new(),
            image: String::new(),
            image_key,
            engine: String::new(),
            service: None,
            head: Head::default(),
            snapshots: Vec::new(),
            steps: Vec::new(),
            failed: None,
            complete: false,
            command: None,
        }
    }

    pub fn snapshot(&self, name: &str) -> Option<&Snapshot> {
        self.snapshots.iter().find(|snapshot| snapshot.name == name)
    }

    /// Returns the command that brings the env up to date.
    pub(crate) fn up_command(&self) -> String {
        let own = self.command.clone();
        own.unwrap_or_else(|| format!("rockenv up {}", quoted(&self.profile)))
    }

    /// Returns the command that locks the same inputs.
    pub(crate) fn lock_command(&self) -> String {
        let words = shlex::split(&self.up_command()).unwrap_or_default();
        let mut words = words.into_iter().skip(2);
        let mut text = "rockenv lock".to_owned();
        while let Some(word) = words.next() {
            match word.as_str() {
                // `lock` has neither option.
                "--name" | "--gpu" => drop(words.next()),
                _ => text.extend([" ", &quoted(&word)]),
            }
        }
        text
    }

    /// Returns the newest snapshot of the step with that key.
    pub fn of_step(&self, key: &StepKey) -> Option<&Snapshot> {
        let mut newest_first = self.snapshots.iter().rev();
        newest_first.find(|snapshot| snapshot.key.as_ref() == Some(key))
    }

    /// Returns the snapshots of steps, oldest first.
    pub fn step_snapshots(&self) -> impl DoubleEndedIterator<Item = &Snapshot> {
        let snapshots = self.snapshots.iter();
        snapshots.filter(|snapshot| snapshot.origin == Origin::Step)
    }

    /// Returns the snapshot of the last step that has one, in step order: it may be older than the snapshots of
    /// earlier steps.
    pub fn last_step(&self) -> Option<&Snapshot> {
        let mut keys = self.steps.iter().rev().filter_map(|step| step.key.as_ref());
        keys.find_map(|key| {
            self.step_snapshots()
                .find(|found| found.key.as_ref() == Some(key))
        })
    }

    /// Returns the last step that is done.
    pub(crate) fn last_done(&self) -> Option<&StepRecord> {
        let mut steps = self.steps.iter().rev();
        steps.find(|step| step.outcome.is_done())
    }

    /// Returns the layers that the record names. The env needs their parents too.
    pub fn layers(&self) -> impl Iterator<Item = &LayerId> {
        let failed = self.failed.iter();
        let failed = failed.filter_map(|failed| failed.parent.as_ref());
        let layers = self.snapshots.iter().map(|snapshot| &snapshot.layer);
        layers.chain(&self.head.layer).chain(failed)
    }

    /// Returns the layers of the env's current and past states: the env owns what their steps left in outputs.
    pub fn known_layers(&self) -> Vec<LayerId> {
        let layers = self.snapshots.iter().map(|snapshot| &snapshot.layer);
        self.head.layer.iter().chain(layers).cloned().collect()
    }

    /// Returns every live tree.
    pub fn trees(&self) -> impl Iterator<Item = &TreeId> {
        let failed = self.failed.iter().map(|failed| &failed.tree);
        self.head.tree.iter().chain(failed)
    }

    /// Returns an unused snapshot name based on `base`.
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

/// Resource usage of a container, from start to end.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Usage {
    /// Processor time, in microseconds; 0 if no control group counts it.
    pub cpu_us: u64,
    /// Peak of memory in bytes, including page cache; `None` if no control group counts it.
    pub memory_peak: Option<u64>,
    /// Peak of memory without page cache, over all samples; `None` if no control group counts it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_held: Option<u64>,
    /// Bytes read from block devices; 0 with Docker and Podman, which do not report them.
    pub read_bytes: u64,
    /// Bytes written towards block devices; 0 with Docker and Podman.
    pub written_bytes: u64,
    /// Processes killed because memory ran out; at least 1 if a compiler or linker said that it did.
    pub oom_kills: u64,
}

impl Usage {
    /// Returns the processor time if it was counted.
    pub fn cpu(&self) -> Option<Duration> {
        (self.cpu_us > 0).then(|| Duration::from_micros(self.cpu_us))
    }

    /// Returns the figure that is called memory everywhere: the peak without page cache, or with it if only that is
    /// known.
    pub fn memory(&self) -> Option<u64> {
        self.memory_held
            .or(self.memory_peak)
            .filter(|bytes| *bytes > 0)
    }
}
