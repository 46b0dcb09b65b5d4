//! The spec: a profile with nothing left to decide. `plan` compares it, `execute` acts on it, and the env saves it.
//!
//! `resolve` is pure: facts about the machine come in `Inputs`. Only the number of jobs and the memory stay open,
//! because they may vary from run to run without changing the result: see `finish`.

mod chain;
mod choices_in_effect;
pub(crate) mod component_targets;
mod hooks;
mod image_env;
mod inputs;
mod key;
mod key_differences;
mod profile_or_target;
mod spec;
#[cfg(test)]
mod tests;
#[cfg(test)]
pub(crate) use tests::inputs as tests_inputs;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use crate::plan::resolve::inputs::{BaseImage, Inputs};
pub(crate) use crate::plan::resolve::spec::{draft, resolve, volumes};
pub(crate) use choices_in_effect::{Chosen, by_version, version};
pub(crate) use hooks::HookFacts;
pub(crate) use key::StepKey;
pub(crate) use key_differences::{changed, differing};
pub(crate) use profile_or_target::{DEFAULT_PROFILE, env_name, profile_or_target};
use serde::{Deserialize, Serialize};

use crate::plan::ids::{self, EnvName};
pub(crate) use crate::profile::references::{Facts, finish};
pub(crate) use crate::profile::{
    Access, Engine, Fingerprints, Origin, Resources, User, VolumeKind,
};
use crate::rocm::gpu::Extras;
use crate::rocm::target::Target;
pub use crate::sys::account::BuildUser;
use crate::sys::name::StepName;
use crate::sys::shell::quoted;
pub(crate) use chain::{UNTRACKED, is_untracked};

/// Version of the saved form.
pub(crate) const VERSION: u32 = 1;

/// A fully resolved environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spec {
    pub version: u32,
    pub name: EnvName,
    pub profile: String,
    /// Where the profile comes from.
    pub origin: Origin,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub variant: Option<String>,
    /// Starting point.
    #[serde(default = "from_source")]
    pub from: String,
    /// The requested parameters, including a release. Specs of older versions lack them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub params: BTreeMap<String, String>,
    /// Targets, in the order of the table; may be empty.
    pub targets: Vec<Target>,
    pub image: String,
    pub engine: Engine,
    /// Parent key of the first step.
    pub base_key: StepKey,
    /// Names of variables to take from the host when a step starts. Their values are never saved.
    pub env_from_host: Vec<String>,
    /// The user behind `User::Builder`.
    pub user: BuildUser,
    pub resources: Resources,
    /// Further settings of steps with the GPU.
    #[serde(default, skip_serializing_if = "Extras::is_none")]
    pub gpu: Extras,
    /// Fingerprints of sources, by volume, as far as needed.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub fingerprints: BTreeMap<String, String>,
    /// SHA-256 of the lock file behind this spec.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lock: Option<String>,
    /// The image's share of `env`, in late form.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub image_env: BTreeMap<String, String>,
    /// Variables of every step, the image's below the profile's, in late form: see `finish`.
    pub env: BTreeMap<String, String>,
    /// Variables for using the results.
    pub runtime_env: BTreeMap<String, String>,
    /// Descriptions of these variables.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub runtime_notes: BTreeMap<String, String>,
    pub hooks: Vec<Hook>,
    /// Hooks of the profile that are not for this env.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub hooks_left_out: Vec<Skipped>,
    /// Volumes, a parent directory before mounts inside it.
    pub volumes: Vec<Volume>,
    pub steps: Vec<Step>,
    /// Steps skipped because of `when` or a missing GPU.
    pub skipped: Vec<Skipped<StepName>>,
    /// The first step with unknown fingerprints: it must run before later keys are known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub open: Option<StepName>,
}

impl Spec {
    pub fn volume(&self, name: &str) -> Option<&Volume> {
        self.volumes.iter().find(|volume| volume.name == name)
    }

    pub fn step(&self, name: &str) -> Option<&Step> {
        self.steps.iter().find(|step| step.name == name)
    }

    /// Returns the command that builds the env.
    pub(crate) fn up_command(&self) -> String {
        let mut words = vec![quoted(&self.origin.argument()).into_owned()];
        let targets = self.targets.iter();
        words.extend(targets.map(|target| format!("--target {target}")));
        let params = self.params.iter();
        let params = params.map(|(name, value)| format!("{name}={value}"));
        words.extend(params.map(|param| format!("--param {}", quoted(&param))));
        let variant = self.variant.iter();
        words.extend(variant.map(|variant| format!("--variant {variant}")));
        let from = Some(&self.from).filter(|from| **from != from_source());
        words.extend(from.map(|from| format!("--from {from}")));
        format!("rockenv up {} --name {}", words.join(" "), self.name)
    }

    /// Returns the hooks that are applied to `volume` when `step` runs, in order.
    pub fn hooks_at<'a>(&'a self, step: &Step, volume: &'a str) -> impl Iterator<Item = &'a Hook> {
        let position = |name: &str| self.steps.iter().position(|step| step.name == name);
        let now = position(&step.name);
        self.hooks
            .iter()
            .filter(move |hook| hook.volume == volume && position(&hook.from) <= now)
    }

    pub fn build_volumes(&self) -> Vec<String> {
        let volumes = self.volumes.iter();
        let build = volumes.filter(|volume| volume.kind == VolumeKind::Build);
        build.map(|volume| volume.name.clone()).collect()
    }

    /// Returns the volumes that a step sees, in mount order.
    pub fn visible(&self, step: &Step) -> impl Iterator<Item = &Volume> {
        self.volumes.iter().filter(|volume| step.sees(volume))
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Hook {
    pub name: String,
    /// Digest of its effect.
    pub digest: String,
    /// The source volume that it changes.
    pub volume: String,
    /// The first step that sees the change, and has its digest in its key.
    pub from: StepName,
}

/// A directory to mount.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Volume {
    #[serde(deserialize_with = "ids::volume_name")]
    pub name: String,
    pub kind: VolumeKind,
    /// Absolute path in the env.
    pub target: String,
    /// Whether steps may write.
    pub access: Access,
    /// Size above which `gc` shrinks a cache, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max: Option<u64>,
    /// Whether the lock file names its files.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub locked: bool,
    /// Size it grows to, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<u64>,
    pub source: VolumeSource,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VolumeSource {
    /// A directory of the host, absolute.
    Path(PathBuf),
    /// A repository, cloned into the store.
    Git(Git),
    Store,
}

/// A repository and what to check out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Git {
    pub url: String,
    /// Commit, tag or branch; default: the repository's default branch.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rev: Option<String>,
    /// Number of commits to fetch; default: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub depth: Option<u32>,
    pub submodules: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Step {
    pub name: StepName,
    pub key: StepKey,
    /// The key's ingredients besides the parent: beginnings of digests, by names such as `script` and `input NAME`.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub parts: BTreeMap<String, String>,
    pub user: User,
    pub workdir: String,
    pub network: bool,
    pub gpu: bool,
    /// Whether build volumes stay when it runs again.
    pub incremental: bool,
    /// Time limit, in seconds when saved.
    #[serde(default, skip_serializing_if = "Option::is_none", with = "seconds")]
    pub timeout: Option<Duration>,
    /// Volumes, and paths in them, whose content is part of the key.
    pub inputs: Vec<String>,
    /// Where it leaves TheRock's fingerprints.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fingerprints: Option<Fingerprints>,
    /// Stages of TheRock whose fingerprints are part of the key, as far as they exist.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub stages: Vec<String>,
    /// Names of the volumes it sees.
    pub volumes: Vec<String>,
    /// All its variables except those from the host, in late form: see `finish`.
    pub env: BTreeMap<String, String>,
    pub action: Action,
}

impl Step {
    /// Returns whether it is in no later key. A step that needs a GPU is skipped without one, and later steps must be
    /// the same on every machine. A configuring step affects later keys in any case.
    pub fn is_in_no_later_key(&self) -> bool {
        self.gpu && self.fingerprints.is_none()
    }

    fn sees(&self, volume: &Volume) -> bool {
        self.volumes.contains(&volume.name)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    Run {
        /// Program and arguments before the script.
        shell: Vec<String>,
        /// The script, in late form: see `finish`.
        script: String,
    },
    Packages(Vec<String>),
    /// Copies files in.
    Copy(Vec<CopyItem>),
    Export(Vec<ExportItem>),
}

/// A file or directory to copy in; `profile::copy_files` has its content.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CopyItem {
    /// Path beside the profile, as written there.
    pub from: String,
    /// Absolute path in the env.
    pub to: String,
    pub digest: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ExportItem {
    /// Absolute path in the env.
    pub from: String,
    /// Name of an output volume.
    pub to: String,
}

/// A step or hook that is not part of this env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped<Name = String> {
    pub name: Name,
    /// The reason, as the text after "skipped: ".
    pub reason: String,
}

fn from_source() -> String {
    crate::profile::FROM_SOURCE.to_owned()
}

/// Saves a time in seconds.
pub(crate) mod seconds {
    use std::time::Duration;

    use serde::{Deserialize as _, Deserializer, Serialize as _, Serializer};

    #[expect(clippy::ref_option, reason = "serde's signature")]
    pub(crate) fn serialize<S: Serializer>(
        time: &Option<Duration>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        time.map(|time| time.as_secs()).serialize(to)
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<Duration>, D::Error> {
        Ok(Option::<u64>::deserialize(from)?.map(Duration::from_secs))
    }
}
