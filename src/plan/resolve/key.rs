//! Owns keys: the ingredients of a step's identity, and their encoding.
//!
//! A key identifies the content of a snapshot. So it excludes a step's name, time limit, the host paths behind volumes,
//! the engine, limits and variables from the host, and includes everything that a step can see or declares. It includes
//! a target only if the step mentions one: before the first mention, all targets share their snapshots.

use std::collections::BTreeMap;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::{Action, BaseImage, BuildUser, Step, User, Volume, VolumeKind};
pub(crate) use crate::plan::ids::StepKey;
use crate::rocm::gpu::Extras;

/// Prefix of every base key. A new number changes every key, and rebuilds all envs.
const FORMAT: &str = "rockenv-1";

impl StepKey {
    /// Returns the key of the image, the parent of the first step.
    pub(crate) fn base(image: &BaseImage) -> Self {
        Self::hash(FORMAT, &image.to_string())
    }
}

/// The ingredients of a key besides the parent. The order of fields is part of the format.
#[derive(Serialize)]
pub(super) struct Content<'a> {
    action: Act<'a>,
    /// `None` for root. Ownership is content, so the build user's ids count.
    builder: Option<&'a BuildUser>,
    /// Owner of copied files, if not the build user. Omitted for other steps, so that their keys stay the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    owner: Option<&'static str>,
    workdir: Option<&'a str>,
    network: bool,
    gpu: bool,
    // Omitted if empty, so that keys from versions without extras stay the same.
    #[serde(skip_serializing_if = "Extras::is_none")]
    gpu_extras: Extras,
    // A snapshot made on top of an earlier attempt differs from one made from scratch.
    incremental: bool,
    env: &'a BTreeMap<String, String>,
    volumes: Vec<(&'a str, VolumeKind, &'a str)>,
    /// The step's `inputs` with their fingerprints.
    pub(super) inputs: &'a [(String, String)],
    /// Digests of the hooks whose changes this step is the first to see. Later steps inherit them through their parent's
    /// key.
    hooks: Vec<&'a str>,
    /// TheRock's fingerprints of what the step builds, by artifact.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    prints: &'a [(String, String)],
}

#[derive(Serialize)]
#[serde(rename_all = "lowercase")]
enum Act<'a> {
    Run {
        shell: &'a [String],
        script: &'a str,
    },
    Packages(&'a [String]),
    Copy(Vec<(&'a str, &'a str)>),
    Export(Vec<(&'a str, &'a str)>),
}

impl Content<'_> {
    /// Returns the key of a step with this content on top of `parent`.
    pub(super) fn key(&self, parent: &StepKey) -> StepKey {
        StepKey::hash(parent.as_str(), &json(self))
    }
}

/// Returns digest prefixes of a key's ingredients besides the parent, by name.
pub(super) fn parts(content: &Content<'_>) -> BTreeMap<String, String> {
    let mut parts = BTreeMap::new();
    let mut add = |name: &str, text: String| {
        let digest = hex::encode(Sha256::digest(text));
        parts.insert(name.to_owned(), digest[..12].to_owned());
    };
    let action = match content.action {
        Act::Run { .. } => "script",
        Act::Packages(_) => "packages",
        Act::Copy(_) => "files",
        Act::Export(_) => "export",
    };
    add(action, json(&content.action));
    let settings = (
        content.workdir,
        content.network,
        content.gpu,
        content.gpu_extras,
        content.incremental,
    );
    add("settings", json(&settings));
    if let Some(builder) = content.builder {
        add("user", json(builder));
    }
    if let Some(owner) = content.owner {
        add("user", json(owner));
    }
    if !content.env.is_empty() {
        add("variables", json(content.env));
    }
    if !content.volumes.is_empty() {
        add("volumes", json(&content.volumes));
    }
    for (name, print) in content.inputs {
        add(&format!("input {name}"), json(print));
    }
    if !content.hooks.is_empty() {
        add("hooks", json(&content.hooks));
    }
    if !content.prints.is_empty() {
        add("fingerprints", json(content.prints));
    }
    parts
}

/// Returns the ingredients of a step's key, as far as the step sees `volumes`. Does not read `step.key`.
pub(super) fn content<'a>(
    step: &'a Step,
    volumes: &'a [Volume],
    inputs: &'a [(String, String)],
    prints: &'a [(String, String)],
    hooks: Vec<&'a str>,
    user: &'a BuildUser,
    gpu: Extras,
) -> Content<'a> {
    let action = match &step.action {
        Action::Run { shell, script } => Act::Run { shell, script },
        Action::Packages(packages) => Act::Packages(packages),
        Action::Copy(items) => Act::Copy(
            items
                .iter()
                .map(|item| (item.to.as_str(), item.digest.as_str()))
                .collect(),
        ),
        Action::Export(items) => Act::Export(
            items
                .iter()
                .map(|item| (item.from.as_str(), item.to.as_str()))
                .collect(),
        ),
    };
    let visible = volumes.iter().filter(|volume| step.sees(volume));
    Content {
        builder: (step.user == User::Builder).then_some(user),
        owner: (step.user == User::Root && matches!(action, Act::Copy(_))).then_some("root"),
        // Only scripts use a working directory; for other actions it would be the build user's home, without a meaning.
        workdir: matches!(action, Act::Run { .. }).then_some(&step.workdir),
        action,
        network: step.network,
        gpu: step.gpu,
        gpu_extras: match step.gpu {
            true => gpu,
            false => Extras::default(),
        },
        incremental: step.incremental,
        env: &step.env,
        volumes: visible
            .map(|volume| (volume.name.as_str(), volume.kind, volume.target.as_str()))
            .collect(),
        inputs,
        hooks,
        prints,
    }
}

#[expect(
    clippy::expect_used,
    reason = "strings, numbers and maps with string keys always serialize"
)]
fn json(content: &(impl Serialize + ?Sized)) -> String {
    serde_json::to_string(content).expect("key content is JSON")
}
