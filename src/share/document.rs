//! Owns a snapshot's documents in a registry: the manifest, and the configuration with facts for other stores.
//!
//! Both follow OCI. rockenv's own data is an additional field of the configuration. Build volumes are layers with their
//! own media type, which are not part of the root file system.

use std::collections::{BTreeMap, BTreeSet};

use crate::image::oci::{Descriptor, refused, sha256};
use crate::plan::ids::{StepKey, VolumeName};
use crate::plan::pins::Pins;
use crate::rocm::therock::ArtifactFingerprints;
use crate::store::Layer;
use crate::store::history::History;
use crate::store::images::Image;
use crate::store::layer::Cost;
use crate::store::shared::Blob;
use crate::sys::checksum::is_lower_sha256;
use crate::sys::error::{Error, Kind, Result, encoded};
use crate::sys::host;
use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

pub(super) const MANIFEST: &str = "application/vnd.oci.image.manifest.v1+json";
pub(super) const CONFIG: &str = "application/vnd.oci.image.config.v1+json";
const LAYER: &str = "application/vnd.oci.image.layer.v1.tar+zstd";
const VOLUME: &str = "application/vnd.rockenv.volume.v1.tar+zstd";
/// Layer annotation: the uncompressed size in bytes.
const UNPACKED: &str = "rockenv.unpacked";
/// Manifest annotation: how the build volumes of its steps began.
const HISTORY: &str = "rockenv.history";
const CLEAN: &str = "clean";
/// Version of rockenv's own data. Newer versions are refused.
const SCHEMA: u32 = 1;
pub(super) const MAX_CONFIG: u64 = 16 << 20;
/// Maximum bytes, and milliseconds, that a step or the image may claim as its cost. Their sums must not overflow.
const MAX_COST: u64 = 1 << 50;
const MAX_LAYERS: usize = 1024;

/// rockenv's own data in a configuration.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SharedSnapshot {
    pub(super) schema: u32,
    /// The base image, which is the lowest layer.
    pub(super) image: Image,
    /// The steps in order. Empty for a bare image.
    pub(super) steps: Vec<SharedStep>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct SharedStep {
    pub(super) key: StepKey,
    pub(super) name: String,
    pub(super) created: Timestamp,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) cost: Option<Cost>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) prints: Option<ArtifactFingerprints>,
    #[serde(default)]
    pub(super) pins: Pins,
    /// Index of the layer with the step's changes.
    pub(super) layer: usize,
    pub(super) volumes: BTreeMap<VolumeName, SharedVolume>,
    /// How the build volumes began, as in a layer of the store.
    pub(super) history: History,
    /// Index of the layer with the step's results in output volumes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) results: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum SharedVolume {
    Empty,
    /// Index of the layer with the step's changes, or with the whole volume if the previous step has no layer for it.
    Layer(usize),
    /// The volume was not kept, so the step can only be a parent of other steps.
    Absent,
}

impl SharedStep {
    pub(super) fn volume(&self, name: &str) -> Option<usize> {
        match self.volumes.get(name)? {
            SharedVolume::Layer(index) => Some(*index),
            SharedVolume::Empty | SharedVolume::Absent => None,
        }
    }

    fn is_clean(&self) -> bool {
        self.history == History::Clean
    }

    /// Returns whether the store describes a layer with the same content the same way.
    pub(super) fn describes(&self, layer: &Layer) -> bool {
        (&self.name, self.created, self.cost, &self.history)
            == (&layer.title, layer.created, layer.cost, &layer.history)
            && (&self.prints, &self.pins) == (&layer.prints, &layer.pins)
    }

    /// Returns the layers that are not part of the root file system.
    fn beside(&self) -> impl Iterator<Item = usize> {
        let volumes = self.volumes.keys().filter_map(|name| self.volume(name));
        volumes.chain(self.results)
    }
}

/// Everything behind one tag.
#[derive(Clone, Debug)]
pub(super) struct Document {
    pub(super) snapshot: SharedSnapshot,
    /// The layers, with the digest of their uncompressed content.
    pub(super) blobs: Vec<Blob>,
}

#[derive(Serialize, Deserialize)]
struct Config {
    architecture: String,
    os: String,
    #[serde(default)]
    config: Run,
    rootfs: RootFs,
    rockenv: SharedSnapshot,
}

/// The part of a configuration that all versions have.
#[derive(Deserialize)]
struct AnySchema {
    rockenv: Versioned,
}

#[derive(Deserialize)]
struct Versioned {
    schema: u32,
}

/// Configuration of containers made from the image: its variables. rockenv itself reads those of `Image` instead.
#[derive(Default, Serialize, Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Run {
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    env: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct RootFs {
    r#type: String,
    diff_ids: Vec<String>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Manifest {
    schema_version: u32,
    #[serde(default)]
    media_type: String,
    pub(super) config: Descriptor,
    layers: Vec<Descriptor>,
    #[serde(default)]
    annotations: BTreeMap<String, String>,
}

impl Document {
    /// Returns the key that the tag stands for: the last step's, or the image's.
    pub(super) fn key(&self) -> &str {
        let last = self.snapshot.steps.last();
        last.map_or(&self.snapshot.image.key, |step| &step.key)
    }

    /// Returns whether every step is the result of a clean build.
    pub(super) fn is_clean(&self) -> bool {
        self.snapshot.steps.iter().all(SharedStep::is_clean)
    }

    /// Removes the first step that is not the result of a clean build, and all later ones; returns their names.
    pub(super) fn cut_incremental(&mut self) -> Vec<String> {
        let steps = &mut self.snapshot.steps;
        let clean = steps.iter().position(|step| !step.is_clean());
        let cut = steps.split_off(clean.unwrap_or(steps.len()));
        cut.into_iter().map(|step| step.name).collect()
    }

    /// Returns, for each step, a digest that determines everything up to it: equal digests mean equal trees and
    /// volumes.
    pub(super) fn chains(&self) -> Vec<String> {
        let mut chains: Vec<String> = Vec::new();
        let diff_id = |index: usize| self.blobs[index].diff_id.as_str();
        for step in &self.snapshot.steps {
            let mut hash = Sha256::new();
            let parent = chains.last().unwrap_or(&self.snapshot.image.digest);
            for part in [parent.as_str(), &step.key, diff_id(step.layer)] {
                hash.update(part);
                hash.update([0]);
            }
            for (name, volume) in &step.volumes {
                let content = match volume {
                    SharedVolume::Empty => "empty",
                    SharedVolume::Layer(index) => diff_id(*index),
                    SharedVolume::Absent => "absent",
                };
                for part in [name, content] {
                    hash.update(part);
                    hash.update([0]);
                }
            }
            if let Some(index) = step.results {
                hash.update(diff_id(index));
            }
            chains.push(hex::encode(hash.finalize()));
        }
        chains
    }

    /// Returns the configuration, and the manifest for it.
    pub(super) fn encode(&self, profile: &str) -> Result<(Vec<u8>, Vec<u8>)> {
        let env = self.snapshot.image.env.iter().flatten();
        let diff_ids = self.blobs.iter().map(|blob| digest(&blob.diff_id));
        let config = Config {
            architecture: host::architecture().to_owned(),
            os: "linux".to_owned(),
            config: Run {
                env: env.map(|(name, value)| format!("{name}={value}")).collect(),
            },
            rootfs: RootFs {
                r#type: "layers".to_owned(),
                diff_ids: diff_ids.collect(),
            },
            rockenv: self.snapshot.clone(),
        };
        let config = encoded(serde_json::to_vec(&config), "a snapshot")?;
        let steps = self.snapshot.steps.iter();
        let volumes: BTreeSet<usize> = steps.flat_map(SharedStep::beside).collect();
        let layers = self.blobs.iter().enumerate().map(|(index, blob)| {
            let kind = if volumes.contains(&index) {
                VOLUME
            } else {
                LAYER
            };
            let mut layer =
                json!({ "mediaType": kind, "digest": digest(&blob.sha256), "size": blob.size });
            if let Some(unpacked) = blob.unpacked {
                layer["annotations"] = json!({ UNPACKED: unpacked.to_string() });
            }
            layer
        });
        let layers: Vec<_> = layers.collect();
        let mut annotations = BTreeMap::from([
            ("rockenv.key", self.key().to_owned()),
            ("rockenv.image", self.snapshot.image.name.clone()),
        ]);
        if let (Some(step), Some(chain)) = (self.snapshot.steps.last(), self.chains().last()) {
            let history = if self.is_clean() {
                CLEAN
            } else {
                "incremental"
            };
            let created = step.created.strftime("%Y-%m-%dT%H:%M:%SZ");
            annotations.extend([
                ("rockenv.step", step.name.clone()),
                ("rockenv.profile", profile.to_owned()),
                ("rockenv.tree", chain.clone()),
                (HISTORY, history.to_owned()),
                ("org.opencontainers.image.created", created.to_string()),
            ]);
        }
        let manifest = json!({
            "schemaVersion": 2, "mediaType": MANIFEST, "config": descriptor(CONFIG, &config),
            "layers": layers, "annotations": annotations,
        });
        let manifest = encoded(serde_json::to_vec(&manifest), "a snapshot")?;
        Ok((config, manifest))
    }
}

fn digest(sha256: &str) -> String {
    format!("sha256:{sha256}")
}

/// Returns the descriptor of a document.
pub(super) fn descriptor(kind: &str, bytes: &[u8]) -> Value {
    let digest = digest(&hex::encode(Sha256::digest(bytes)));
    json!({ "mediaType": kind, "digest": digest, "size": bytes.len() })
}

/// Returns the error for content that does not match its description.
pub(super) fn foreign(message: impl Into<String>) -> Error {
    Error::new(Kind::Drift, message.into()).help(
        "it is damaged or was tampered with; push or export it again on the machine that built it",
    )
}

impl Manifest {
    pub(super) fn parse(bytes: &[u8]) -> Result<Self> {
        let wrong = || refused("its manifest does not describe a snapshot".into());
        let manifest: Self =
            serde_json::from_slice(bytes).map_err(|error| wrong().source(error))?;
        if manifest.schema_version != 2
            || !["", MANIFEST].contains(&manifest.media_type.as_str())
            || manifest.layers.len() > MAX_LAYERS
        {
            return Err(wrong());
        }
        for layer in &manifest.layers {
            if ![LAYER, VOLUME].contains(&layer.media_type.as_str()) {
                let kind = layer.media_type.escape_debug();
                let what = format!("a layer is of the type `{kind}`, which no snapshot has");
                return Err(refused(what));
            }
        }
        Ok(manifest)
    }

    /// Returns the key that the manifest claims.
    pub(super) fn key(&self) -> Option<&str> {
        self.annotations.get("rockenv.key").map(String::as_str)
    }

    /// Returns whether the manifest claims that every step is the result of a clean build. Those of images have none.
    pub(super) fn is_clean(&self) -> bool {
        let history = self.annotations.get(HISTORY);
        history.is_none_or(|history| history == CLEAN)
    }

    /// Joins the manifest with its configuration. Refuses names in either that would escape a store directory.
    pub(super) fn with(self, config: &[u8]) -> Result<Document> {
        // A newer version may have other fields.
        if let Ok(AnySchema {
            rockenv: Versioned { schema },
        }) = serde_json::from_slice(config)
            && schema > SCHEMA
        {
            return Err(invalid!(
                "it was pushed by a newer rockenv: its schema is {schema}, but this one supports only up to {SCHEMA}"
            )
            .help("use the newer rockenv that pushed it"));
        }
        let config: Config = serde_json::from_slice(config).map_err(|error| {
            refused("it is not a snapshot that `rockenv push` or `rockenv export` made".into())
                .source(error)
        })?;
        let snapshot = config.rockenv;
        // Machines of two architectures take turns with a recipe's tag. `up` builds what the registry lacks.
        if config.architecture != host::architecture() {
            let (there, here) = (config.architecture.escape_debug(), host::architecture());
            return Err(not_found!("it is for {there}, but this machine is {here}"));
        }
        if config.rootfs.diff_ids.len() != self.layers.len() {
            return Err(refused(
                "its manifest and its configuration have different numbers of layers".into(),
            ));
        }
        let mut blobs = Vec::new();
        for (layer, diff_id) in self.layers.iter().zip(&config.rootfs.diff_ids) {
            let diff_id = sha256(diff_id)
                .ok_or_else(|| refused("a layer is not identified by a SHA-256".into()))?;
            let unpacked = layer.annotation(UNPACKED);
            blobs.push(Blob {
                diff_id: diff_id.parse()?,
                sha256: layer.sha256()?.parse()?,
                size: layer.size,
                unpacked: unpacked.and_then(|bytes| bytes.parse().ok()),
            });
        }
        let document = Document { snapshot, blobs };
        document.check()?;
        if let Some(said) = self.key()
            && said != document.key()
        {
            let (said, key) = (said.escape_debug(), document.key());
            let what = format!("its manifest declares key {said}, but its key is {key}");
            return Err(foreign(what));
        }
        Ok(document)
    }
}

impl Document {
    fn check(&self) -> Result<()> {
        let image = &self.snapshot.image;
        if self.blobs.is_empty() || !is_lower_sha256(&image.digest) {
            return Err(refused("it does not name its base image".into()));
        }
        if [&image.name, &image.distribution]
            .iter()
            .any(|text| text.contains(char::is_control))
        {
            return Err(refused(
                "the description of its image has control characters".into(),
            ));
        }
        if image.key != image.computed_key()? {
            return Err(foreign(
                "the key of its image does not match its description",
            ));
        }
        if image.took_ms.is_some_and(|took| took > MAX_COST) {
            return Err(refused("its image claims an impossible cost".into()));
        }
        let mut keys = BTreeSet::new();
        for step in &self.snapshot.steps {
            let mut used = step.beside().chain([step.layer]);
            if used.any(|index| index >= self.blobs.len()) {
                return Err(refused("a step names a missing layer".into()));
            }
            if !keys.insert(&step.key) {
                return Err(refused("its steps have no keys of their own".into()));
            }
            if let Some(cost) = step.cost
                && cost.bytes.max(cost.wall_ms) > MAX_COST
            {
                return Err(refused("a step claims an impossible cost".into()));
            }
            let volumes = step.volumes.keys().map(VolumeName::as_str);
            for name in volumes.chain([step.name.as_str()]) {
                crate::store::check_name(name)
                    .map_err(|error| refused("it contains an invalid name".into()).source(error))?;
            }
        }
        Ok(())
    }
}
