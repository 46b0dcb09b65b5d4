//! Owns the description of a layer, `layer.json`: plain data.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::ids::{self, EnvId, ImageKey, LayerId, StepKey, TreeId, VolumeId, VolumeName};
use crate::plan::pins::Pins;
use crate::rocm::therock::ArtifactFingerprints;

/// A layer's state of a build volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    Frozen,
    Empty,
    /// Not frozen: the content is in this live volume, if it still exists.
    Live(VolumeId),
    /// Not frozen, and made on another machine.
    Absent,
}

impl VolumeState {
    /// Returns whether the layer holds all of the volume's content.
    pub fn is_kept(&self) -> bool {
        match self {
            Self::Frozen | Self::Empty => true,
            Self::Live(_) | Self::Absent => false,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its directory's name.
    pub id: LayerId,
    /// The step's key, if a step made it.
    #[serde(default)]
    pub key: Option<StepKey>,
    /// The layer below; `None` is the image.
    #[serde(default)]
    pub parent: Option<LayerId>,
    /// Id of the env that made it; `None` for a pulled layer.
    #[serde(with = "ids::or_empty")]
    pub env: Option<EnvId>,
    pub image_key: ImageKey,
    /// The live tree that became this layer: shows whether an interrupted publication was finished.
    #[serde(with = "ids::or_empty")]
    pub tree: Option<TreeId>,
    /// Name of the step or snapshot, for display.
    pub title: String,
    /// When it was frozen.
    pub created: Timestamp,
    /// The boot during which it was frozen. Until the layer is on disk, it is valid only during that boot.
    pub boot: String,
    pub volumes: BTreeMap<VolumeName, VolumeState>,
    /// How the volumes began.
    pub history: History,
    /// The snapshot's image, if a service holds the tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<SnapshotImage>,
    /// The clones in the store and directories of the user that its build volumes were built from, by volume, if known.
    /// Earlier versions recorded clones only.
    #[serde(default, alias = "clones", skip_serializing_if = "Option::is_none")]
    pub origins: Option<BTreeMap<String, String>>,
    /// Key of the unfinished step that began on its build volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub begun: Option<StepKey>,
    /// When the first run of that step began, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub began: Option<Timestamp>,
    /// Cost of making it, if a step did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// Fingerprints that its step found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prints: Option<ArtifactFingerprints>,
    /// Files that its step reported as fetched.
    #[serde(default, skip_serializing_if = "Pins::is_empty")]
    pub pins: Pins,
}

#[cfg(test)]
impl Layer {
    /// Makes a layer on an image that no env made, for tests.
    pub(crate) fn sample(id: LayerId) -> Self {
        let title = id.to_string();
        Self::new(id, "image".into(), title, Timestamp::UNIX_EPOCH)
    }
}

impl Layer {
    /// Makes a layer on an image, with a clean history and nothing else.
    pub(crate) fn new(id: LayerId, image_key: ImageKey, title: String, created: Timestamp) -> Self {
        Self {
            id,
            key: None,
            parent: None,
            env: None,
            image_key,
            tree: None,
            title,
            created,
            boot: String::new(),
            volumes: BTreeMap::new(),
            history: History::Clean,
            kept: None,
            origins: None,
            begun: None,
            began: None,
            cost: None,
            prints: None,
            pins: Pins::new(),
        }
    }

    /// Returns its name in lock files: its step's key, which a rebuilt layer shares, or else its id.
    pub(crate) fn locked_name(&self) -> &str {
        match &self.key {
            Some(key) => key,
            None => &self.id,
        }
    }
}

/// Returns layers and everything below them, as far as `layer` knows their descriptions.
pub(crate) fn with_parents<'a>(
    tops: impl IntoIterator<Item = &'a LayerId>,
    layer: impl Fn(&LayerId) -> Option<&'a Layer>,
) -> BTreeSet<&'a LayerId> {
    let mut found = BTreeSet::new();
    for top in tops {
        let mut next = Some(top);
        while let Some(id) = next
            && found.insert(id)
        {
            next = layer(id).and_then(|layer| layer.parent.as_ref());
        }
    }
    found
}

/// The cost of making a layer, for `gc`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Bytes on disk beyond the parent's; if a service has the tree, only those there.
    pub bytes: u64,
    /// Wall clock of its step, in milliseconds.
    pub wall_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotImage {
    pub socket: PathBuf,
    pub image: String,
}

/// How the build volumes of a layer began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum History {
    /// Each step up to this one began with the build volumes of the previous step, or with empty ones.
    Clean,
    /// A step began with files that another build or an `exec` command had left in the build volumes, or such a
    /// command ran during the step.
    Incremental {
        /// The layer that the other build was based on, if any.
        #[serde(default)]
        on: Option<LayerId>,
        /// The files probably come from an `exec` or `shell` command.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        by_hand: bool,
    },
}

impl History {
    /// Returns why a layer is not clean.
    pub(crate) fn why(&self) -> &'static str {
        match self {
            Self::Incremental { by_hand: true, .. } => {
                "a command of `exec` or `shell` may have changed files of the build"
            }
            _ => "built on files from an earlier build",
        }
    }
}

/// Origin of the content of an env's live build volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumesFrom {
    /// The layer with the same content, except for what an unfinished step added; `None`: they began empty.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// How they began.
    pub history: History,
}

impl VolumesFrom {
    pub const NOTHING: Self = Self {
        layer: None,
        history: History::Clean,
    };

    pub(crate) fn new(layer: Option<LayerId>, history: History) -> Self {
        Self { layer, history }
    }
}

/// What commands of `exec` and `shell` may have done to an env's live build volumes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ByHand {
    /// No commands except those that [`VolumesFrom`] records.
    Nothing,
    /// Commands may have written since the first one began.
    Since(Moment),
}

/// A moment by the clock that the kernel uses for change times.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct Moment {
    /// Change time of a file made then, in nanoseconds since 1970.
    pub time: i64,
    /// Lead of that clock over the boot-time clock, which cannot be set, in nanoseconds.
    pub ahead: i64,
    /// The kernel's boot id; empty if nothing can be compared with this moment.
    pub boot: String,
}
