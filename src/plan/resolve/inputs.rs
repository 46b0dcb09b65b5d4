//! Owns the inputs of resolving, besides the profile.

use std::collections::BTreeMap;
use std::fmt;
use std::path::PathBuf;

use super::choices_in_effect::Chosen;
use super::hooks::HookFacts;
use super::key::StepKey;
use super::{BuildUser, Engine, env_name};
use crate::plan::ids::{EnvName, ImageKey};
use crate::profile::Profile;
use crate::rocm::target::Target;
use crate::rocm::therock::{ArtifactFingerprints, Declared};
use crate::sys::error::Result;

/// Everything that `resolve` needs besides the profile.
#[derive(Clone, Debug)]
pub(crate) struct Inputs {
    pub env_name: Option<String>,
    /// Name of the env instead of `<profile>` or `<profile>-<targets>`.
    pub stem: Option<String>,
    /// Targets instead of the profile's, in the order of the table, without duplicates.
    pub targets: Vec<Target>,
    /// Configured targets of all envs on this machine: `${machine.targets}` is these plus the env's own.
    pub machine_targets: Vec<Target>,
    /// Variant instead of the profile's.
    pub variant: Option<String>,
    /// Starting point; default: source.
    pub from: Option<String>,
    /// Values instead of the profile's defaults.
    pub params: BTreeMap<String, String>,
    /// The engine that will run the steps.
    pub engine: Engine,
    /// Why the env gets no GPU, if it gets none. Steps with `gpu` are then skipped, and so have not passed.
    pub without_gpu: Option<String>,
    /// The user that the steps run as.
    pub user: BuildUser,
    /// Expansion of `~`: the invoking user's home, also under sudo.
    pub host_home: PathBuf,
    /// The image that keys are based on.
    pub image: BaseImage,
    pub image_env: BTreeMap<String, String>,
    /// Digests of copied files: `profile::copy_files(..)?.digests()`.
    pub file_digests: BTreeMap<String, String>,
    /// Fingerprints of steps' `inputs`; `None` for a source that does not exist yet: the keys of steps will change.
    pub fingerprints: BTreeMap<String, Option<String>>,
    /// TheRock's fingerprints, by the key of the step that made them.
    pub prints: BTreeMap<StepKey, ArtifactFingerprints>,
    /// The named targets as a checkout declares them.
    pub declared: Vec<Target>,
    /// All targets of the checkout, for their exclusions; default: the built-in ones.
    pub checkout: Option<Vec<Declared>>,
    /// Facts about the profile's hooks, by name.
    pub hooks: BTreeMap<String, HookFacts>,
}

/// The image below the first step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum BaseImage {
    /// It is built, or named by a lock file or a registry.
    Known(ImageKey),
    /// Only its recipe is known, by digest: the keys of steps will change.
    Unbuilt(String),
}

impl BaseImage {
    pub(crate) fn key(&self) -> Option<&ImageKey> {
        match self {
            Self::Known(key) => Some(key),
            Self::Unbuilt(_) => None,
        }
    }
}

/// The form in keys.
impl fmt::Display for BaseImage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Known(key) => key.fmt(f),
            Self::Unbuilt(recipe) => write!(f, "unbuilt {recipe}"),
        }
    }
}

impl Inputs {
    /// Returns the variant, release and starting point.
    pub(crate) fn chosen<'a>(&'a self, profile: &'a Profile) -> Result<Chosen<'a>> {
        let (variant, from) = (self.variant.as_deref(), self.from.as_deref());
        Chosen::new(profile, variant, from, &self.params)
    }

    pub(crate) fn name_of_env(&self, profile: &Profile) -> Result<EnvName> {
        let (name, stem) = (self.env_name.as_deref(), self.stem.as_deref());
        let choices = self.chosen(profile)?.in_name();
        env_name(name, stem, &profile.name, &self.targets, &choices)
    }

    /// Returns the targets to build for, as the checkout declares them.
    pub(crate) fn targets_of(&self, profile: &Profile) -> Vec<Target> {
        let targets = self.asked_targets(profile).iter();
        targets.map(|target| self.as_declared(*target)).collect()
    }

    /// Returns the targets that the request names, else the profile's.
    pub(crate) fn asked_targets<'a>(&'a self, profile: &'a Profile) -> &'a [Target] {
        match self.targets.is_empty() {
            true => &profile.targets,
            false => &self.targets,
        }
    }

    pub(super) fn as_declared(&self, target: Target) -> Target {
        let declared = self.declared.iter();
        let declared = declared.copied().find(|known| *known == target);
        declared.unwrap_or(target)
    }
}
