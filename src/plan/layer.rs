//! Owns what is known of a layer, `layer.json`: plain data.

use std::collections::BTreeMap;
use std::path::PathBuf;

use jiff::Timestamp;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::checked;
use super::ids::{LayerId, StepKey};
use crate::plan::pins::Pins;
use crate::rocm::therock::Prints;

/// What a layer remembers of a build volume.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeState {
    /// Frozen with the layer.
    Frozen,
    /// The volume was empty.
    Empty,
    /// Not frozen: the content is in this live volume, if it is still there.
    Live(String),
}

/// A layer's description, `layer.json`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Layer {
    /// Its directory's name.
    pub id: LayerId,
    /// Step key, for a step's.
    #[serde(default)]
    pub key: Option<StepKey>,
    /// The layer below; `None` is the image.
    #[serde(default)]
    pub parent: Option<LayerId>,
    /// Id of the env that made it.
    #[serde(deserialize_with = "checked::name_if_any")]
    pub env: String,
    /// The image at the bottom.
    #[serde(deserialize_with = "checked::names")]
    pub image_key: String,
    /// The live tree it was, which tells a finished publication from one that never happened.
    #[serde(deserialize_with = "checked::name_if_any")]
    pub tree: String,
    /// The step or snapshot, for people.
    pub title: String,
    /// When it was frozen.
    pub created: Timestamp,
    /// The boot during which it was frozen: until it is on disk, it counts only while that boot lasts.
    pub boot: String,
    /// Build volumes by name.
    #[serde(deserialize_with = "checked::names")]
    pub volumes: BTreeMap<String, VolumeState>,
    /// How they began; [`Layer::history`] says what it means where it is not written down.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub history: Option<History>,
    /// The image, where a service has the tree.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kept: Option<Kept>,
    /// What it took to make it, for a step's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cost: Option<Cost>,
    /// The fingerprints that its step found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prints: Option<Prints>,
    /// What its step says that it fetched by itself.
    #[serde(default, skip_serializing_if = "Pins::is_empty")]
    pub pins: Pins,
}

/// What it took to make a layer, which `gc` weighs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Cost {
    /// Bytes on disk that the layer holds and what it stands on does not; where a service has the tree, those there alone.
    pub bytes: u64,
    /// Wall clock of its step, in milliseconds.
    pub wall_ms: u64,
}

/// A snapshot's image.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// The service's socket.
    pub socket: PathBuf,
    /// The image's id.
    pub image: String,
}

/// How the build volumes of a layer began.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum History {
    /// Each step up to it began with the build volumes that the step before left, or with empty ones.
    Clean,
    /// A step began with what another build, or a command of `exec`, had left in them.
    Incremental {
        /// The layer on which that build stood, where it had one.
        #[serde(default)]
        on: Option<LayerId>,
    },
}

/// Where the content of an env's live build volumes comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct VolumesFrom {
    /// The layer that has the same, but for what an unfinished step added; `None`: they began empty.
    #[serde(default)]
    pub layer: Option<LayerId>,
    /// How they began.
    pub history: History,
}

impl VolumesFrom {
    /// Empty volumes.
    pub const NOTHING: Self = Self {
        layer: None,
        history: History::Clean,
    };
}
