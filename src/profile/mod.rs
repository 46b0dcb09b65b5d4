//! Profiles: TOML text in, `Profile` out. Independent of machines, engines and stores.
//!
//! `load` finds and reads files, `structure` checks the structure, `merge` applies `extends`, `file` has the types of
//! the TOML text, `check` interprets values. `spec` resolves the open choices in a `Profile` (targets, parameters,
//! `${...}`).

pub mod hook;

mod check;
mod copy_files;
mod diagnostics;
mod file;
mod lint;
mod load;
mod merge;
pub(crate) mod references;
mod resources;
pub(crate) mod runtime_variable;
mod structure;
mod template;
#[cfg(test)]
pub(crate) mod tests;
pub(crate) mod value;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use check::host_path;
pub(crate) use copy_files::{CopiedFile, CopyFiles, copy_files, copy_key, read_files};
pub(crate) use diagnostics::{Problem, Sources, UnreadPart, invalid};
pub(crate) use file::{Access, CopyItem, Engine, ExportItem, User, VolumeKind, When, schema};
pub(crate) use lint::advice;
#[cfg(test)]
pub(crate) use load::from_text;
pub use load::load;
pub(crate) use load::{Origin, ProfileDraft, draft, is_path, list, names, suggest_file};
pub(crate) use resources::Resources;
pub(crate) use structure::{check_as, shorten};
pub(crate) use template::template;
pub(crate) use value::Amount;

use crate::rocm::gpu::Extras;
use crate::rocm::target::Target;
use crate::sys::error::Error;
use crate::sys::name::StepName;
use crate::sys::span::At;

/// A profile with everything that it extends, checked.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name of the file without `.toml`.
    pub name: String,
    pub description: String,
    /// Name of the image, not expanded; empty in a draft without one.
    pub image: At<String>,
    /// Targets, in the order of the table; may be empty.
    pub targets: Vec<Target>,
    pub hooks: Vec<At<String>>,
    pub env_from_host: Vec<String>,
    /// Parameters and their defaults.
    pub params: BTreeMap<String, String>,
    /// Default variant; `None` without variants.
    pub variant: Option<String>,
    pub variants: BTreeMap<String, Choice>,
    /// The parameter that selects a release; `None` without releases.
    pub release_param: Option<String>,
    /// Releases of what is built, by name.
    pub releases: BTreeMap<String, Choice>,
    /// Starting points with prebuilt parts, by name; without `source`, which builds everything.
    pub from: BTreeMap<String, Choice>,
    pub resources: Resources,
    /// Further devices for steps with the GPU.
    pub gpu: Extras,
    pub components: Vec<Component>,
    /// Variables of every step, not expanded.
    pub env: BTreeMap<String, At<String>>,
    /// Variables for using the results, not expanded.
    pub runtime_env: BTreeMap<String, At<String>>,
    /// Descriptions of these variables.
    pub runtime_notes: BTreeMap<String, String>,
    pub volumes: Vec<Volume>,
    pub steps: Vec<Step>,
    pub(crate) sources: diagnostics::Sources,
}

impl Profile {
    pub fn origin(&self) -> &Origin {
        &self.sources[0].origin
    }

    /// Returns the names of the profile and of the profiles it extends.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let sources = self.sources.iter();
        sources.map(|source| source.origin.stem().into_owned())
    }

    /// Returns the error that shows all of these mistakes.
    pub(crate) fn invalid(&self, problems: Vec<Problem>) -> Error {
        invalid(&format!("profile `{}`", self.name), &self.sources, problems)
    }

    /// Returns its files with their text, its own first, then those it extends.
    pub fn files(&self) -> impl Iterator<Item = (&Origin, &str)> {
        self.sources
            .iter()
            .map(|source| (&source.origin, source.text.as_str()))
    }
}

/// Program and arguments that run a script by default.
const SHELL: [&str; 3] = ["/bin/sh", "-eu", "-c"];

/// The starting point that builds everything.
pub(crate) const FROM_SOURCE: &str = "source";

/// Variables that rockenv sets in every step, which no value from the host may replace.
pub(crate) const OWN_VARIABLES: [&str; 8] = [
    "HOME",
    "LANG",
    "LOGNAME",
    "MAKEFLAGS",
    "PATH",
    "ROCKENV_ENV",
    "USER",
    "container",
];

/// Directory of rockenv's own programs inside, at the start of every `PATH` except a profile's.
pub(crate) const BIN: &str = "/run/rockenv/bin";

/// The changes of a variant, a release or a starting point.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    pub description: String,
    /// Parameters with other values.
    pub params: BTreeMap<String, String>,
    /// Free disk space that `up` requires, in bytes, instead of that of the profile and its volumes.
    pub disk: Option<u64>,
    /// Hooks in addition to the profile's.
    pub hooks: Vec<At<String>>,
}

/// A component of the build, for the check that components fit together.
#[derive(Clone, Debug)]
pub struct Component {
    pub name: At<String>,
    /// TheRock's project name, for exclusions.
    pub project: String,
    pub links: Vec<String>,
    /// Targets that it is built for besides the env's, not expanded.
    pub extra: Vec<At<String>>,
    /// Whether a stub replaces it where it is not built.
    pub stub: bool,
    pub when: When,
}

/// Published figures of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    pub time: Option<Duration>,
    /// Disk that it fills, in bytes.
    pub disk: Option<u64>,
    /// Whether the time is a limit instead of a measurement.
    pub limit: bool,
    /// The author of the figures, and the machine.
    pub source: String,
}

/// A volume, its source not expanded.
#[derive(Clone, Debug)]
pub struct Volume {
    pub name: String,
    pub kind: VolumeKind,
    /// Absolute path in the env.
    pub target: String,
    pub source: VolumeSource,
    /// Size above which `gc` shrinks a cache.
    pub max: Option<u64>,
    /// Whether the lock file names its files.
    pub locked: bool,
    /// Downloads to put into a cache in advance.
    pub downloads: Option<Downloads>,
    /// Size it grows to.
    pub disk: Option<u64>,
    pub access: Access,
}

/// Downloads of a cache before steps run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloads {
    /// The source volume that declares them.
    pub source: String,
    /// The steps that need them; `None` for all.
    pub needed_by: Option<Vec<String>>,
}

impl Downloads {
    pub fn needed_by(&self, step: &str) -> bool {
        let steps = self.needed_by.as_ref();
        steps.is_none_or(|steps| steps.iter().any(|name| name == step))
    }
}

#[derive(Clone, Debug)]
pub enum VolumeSource {
    /// A directory of the host.
    Path(At<String>),
    /// A repository, cloned into the store.
    Git {
        url: At<String>,
        /// Commit, tag or branch.
        rev: Option<At<String>>,
        /// Number of commits to fetch.
        depth: Option<u32>,
        submodules: bool,
    },
    Store,
}

/// A step, not expanded.
#[derive(Clone, Debug)]
pub struct Step {
    pub name: StepName,
    pub action: Action,
    pub user: User,
    pub workdir: Option<At<String>>,
    pub network: bool,
    pub timeout: Option<Duration>,
    /// Memory that the machine must have for it, in bytes.
    pub memory: Option<u64>,
    /// Source volumes, and paths in them, that are part of its key, sorted.
    pub inputs: Vec<String>,
    /// Where it leaves TheRock's fingerprints.
    pub fingerprints: Option<Fingerprints>,
    /// Stages of TheRock whose fingerprints are part of its key; empty for all.
    pub stages: Vec<String>,
    /// Whether build volumes are kept when it runs again.
    pub incremental: bool,
    pub env: BTreeMap<String, At<String>>,
    pub gpu: bool,
    pub when: When,
    pub published: Option<Published>,
}

/// Where a step leaves TheRock's fingerprints.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Fingerprints {
    pub volume: String,
    /// TheRock's build directory in it; empty for the volume itself.
    pub path: PathBuf,
}

/// Splits an input of a step into the volume and a path in it, which is empty for the whole volume.
pub(crate) fn input(text: &str) -> (&str, &str) {
    text.split_once('/').unwrap_or((text, ""))
}

/// Lists names for a message.
pub(crate) fn joined(names: &[At<String>]) -> String {
    let names: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
    names.join(", ")
}

#[derive(Clone, Debug)]
pub enum Action {
    Run {
        script: At<String>,
        /// Program and arguments before the script.
        shell: Vec<String>,
    },
    Packages(Vec<At<String>>),
    Copy(Vec<CopyItem>),
    Export(Vec<ExportItem>),
}
