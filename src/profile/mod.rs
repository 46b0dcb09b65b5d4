//! Profiles: TOML text in, `Profile` out. Knows nothing of machines, engines or stores.
//!
//! `load` finds and reads, `shape` checks the structure, `merge` applies `extends`, `file` has the types of what is written,
//! `check` gives values their meaning.
//! What is still open in a `Profile` (targets, parameters, `${...}`) is for `spec`.

pub mod hook;

mod check;
mod copy;
mod file;
mod lint;
mod load;
mod merge;
mod report;
mod resources;
mod shape;
mod template;
#[cfg(test)]
mod tests;
pub(crate) mod text;
pub mod value;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub(crate) use check::host_path;
pub use copy::{CopiedFile, CopiedItem, CopyFiles, Entry, copy_files, copy_key};
pub use file::{Access, CopyItem, Engine, ExportItem, User, VolumeKind, When, schema};
pub use lint::check;
#[cfg(test)]
pub(crate) use load::from_text;
pub use load::{Listed, Origin, is_path, list, load};
pub(crate) use report::{Problem, invalid};
pub use resources::Resources;
pub(crate) use shape::shorten;
pub use template::template;
pub use value::MemoryMax;

use crate::rocm::gpu::Extras;
use crate::rocm::target::Target;
use crate::sys::span::At;

/// A profile with all that it extends, checked.
#[derive(Clone, Debug)]
pub struct Profile {
    /// Name of the file without `.toml`.
    pub name: String,
    /// One line for people.
    pub description: String,
    /// Name of the image.
    pub image: At<String>,
    /// Targets, in the order of the table; may be empty.
    pub targets: Vec<Target>,
    /// Names of the hooks, in order.
    pub hooks: Vec<String>,
    /// Names of variables that come from the host.
    pub env_from_host: Vec<String>,
    /// Parameters and their defaults.
    pub params: BTreeMap<String, String>,
    /// Variant that is built unless another is asked for; none where there are no variants.
    pub variant: Option<String>,
    /// Variants by name.
    pub variants: BTreeMap<String, Choice>,
    /// Ways to begin with something that is built already, by name; `source`, which builds everything, is not among them.
    pub from: BTreeMap<String, Choice>,
    /// Needs and limits.
    pub resources: Resources,
    /// What steps with the GPU get beside it.
    pub gpu: Extras,
    /// Parts of what is built, in the order of the profile.
    pub components: Vec<Component>,
    /// Variables of every step, not expanded.
    pub env: BTreeMap<String, At<String>>,
    /// Variables of what was built, not expanded.
    pub runtime_env: BTreeMap<String, At<String>>,
    /// What variables of what was built are for.
    pub runtime_notes: BTreeMap<String, String>,
    /// Volumes in the order written.
    pub volumes: Vec<Volume>,
    /// Steps in order.
    pub steps: Vec<Step>,
    pub(crate) sources: report::Sources,
}

impl Profile {
    /// Returns where the profile was found.
    pub fn origin(&self) -> &Origin {
        &self.sources[0].origin
    }

    /// Returns its name and those of the profiles it extends.
    pub fn names(&self) -> impl Iterator<Item = String> {
        let stem = |path: &std::path::Path| {
            let stem = path.file_stem().unwrap_or_default();
            stem.to_string_lossy().into_owned()
        };
        self.sources.iter().map(move |source| match &source.origin {
            Origin::Builtin(path) => stem(path.as_ref()),
            Origin::File(path) => stem(path),
        })
    }

    /// Returns the files it was made from with their text, its own first, then what that extends.
    pub fn files(&self) -> impl Iterator<Item = (&Origin, &str)> {
        self.sources
            .iter()
            .map(|source| (&source.origin, source.text.as_str()))
    }
}

/// The way of `--from` that builds everything.
pub const FROM_SOURCE: &str = "source";

/// What a variant, or a way of `--from`, changes.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    /// One line for people.
    pub description: String,
    /// Parameters that get another value.
    pub params: BTreeMap<String, String>,
    /// Free disk space that `up` asks for, in bytes, in place of the profile's and its volumes'.
    pub disk: Option<u64>,
    /// Hooks beside the profile's.
    pub hooks: Vec<String>,
}

/// A part of what is built, as far as it matters whether parts fit together.
#[derive(Clone, Debug)]
pub struct Component {
    /// Its name.
    pub name: At<String>,
    /// The name by which TheRock leaves it out of targets.
    pub project: String,
    /// Names of what it links.
    pub links: Vec<String>,
    /// Targets that it is built for beside the env's, not expanded.
    pub extra: Vec<At<String>>,
    /// Something that does nothing stands in for it where it is not built.
    pub stub: bool,
    /// Conditions.
    pub when: When,
}

/// What somebody published of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Published {
    /// How long it takes.
    pub time: Option<Duration>,
    /// Disk that it fills, in bytes.
    pub disk: Option<u64>,
    /// Who says so, and of what machine.
    pub source: String,
}

/// A volume, its source not expanded.
#[derive(Clone, Debug)]
pub struct Volume {
    /// Name.
    pub name: String,
    /// What it is for.
    pub kind: VolumeKind,
    /// Absolute path in the env.
    pub target: String,
    /// What is mounted.
    pub source: VolumeSource,
    /// Size above which `gc` shrinks a cache.
    pub max: Option<u64>,
    /// The lock file names its files.
    pub locked: bool,
    /// What a cache is filled with beforehand.
    pub downloads: Option<Downloads>,
    /// Size it grows to.
    pub disk: Option<u64>,
    /// Whether steps may write.
    pub access: Access,
}

/// What a cache has before steps run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Downloads {
    /// The source volume that declares them.
    pub source: String,
    /// The steps that need them; nothing for all.
    pub needed_by: Option<Vec<String>>,
}

impl Downloads {
    /// Returns whether a step needs them.
    pub fn needed_by(&self, step: &str) -> bool {
        let steps = self.needed_by.as_ref();
        steps.is_none_or(|steps| steps.iter().any(|name| name == step))
    }
}

/// What a volume shows.
#[derive(Clone, Debug)]
pub enum VolumeSource {
    /// A directory of the host.
    Path(At<String>),
    /// A repository, cloned into the store.
    Git {
        /// Its location.
        url: At<String>,
        /// Commit, tag or branch.
        rev: Option<At<String>>,
        /// Commits to fetch.
        depth: Option<u32>,
        /// With submodules.
        submodules: bool,
    },
    /// A directory of the store.
    Store,
}

/// A step, not expanded.
#[derive(Clone, Debug)]
pub struct Step {
    /// Name.
    pub name: String,
    /// What it does.
    pub action: Action,
    /// Who does it.
    pub user: User,
    /// Where a script starts.
    pub workdir: Option<At<String>>,
    /// With a network.
    pub network: bool,
    /// Time limit.
    pub timeout: Option<Duration>,
    /// Memory that the machine must have for it, in bytes.
    pub memory: Option<u64>,
    /// Source volumes, and paths in them, that are part of its key, sorted.
    pub inputs: Vec<String>,
    /// Build volume and directory in it where TheRock's fingerprints are found when it has run.
    pub fingerprints: Option<Fingerprints>,
    /// Stages of TheRock whose fingerprints are part of its key; all where there are none.
    pub stages: Vec<String>,
    /// Build volumes stay as they are when it runs again.
    pub incremental: bool,
    /// Variables of its own.
    pub env: BTreeMap<String, At<String>>,
    /// With the GPU.
    pub gpu: bool,
    /// Conditions.
    pub when: When,
    /// What somebody published of it.
    pub published: Option<Published>,
}

/// Where a step leaves TheRock's fingerprints.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
pub struct Fingerprints {
    /// The build volume.
    pub volume: String,
    /// TheRock's build directory in it; nothing for the volume itself.
    pub path: PathBuf,
}

/// Splits an input of a step into the volume and a path in it, which is empty for the whole volume.
pub fn input(text: &str) -> (&str, &str) {
    text.split_once('/').unwrap_or((text, ""))
}

/// What a step does.
#[derive(Clone, Debug)]
pub enum Action {
    /// Runs a script.
    Run {
        /// The script.
        script: At<String>,
        /// Program and arguments before it.
        shell: Vec<String>,
    },
    /// Installs packages.
    Packages(Vec<At<String>>),
    /// Brings files in.
    Copy(Vec<CopyItem>),
    /// Hands results out.
    Export(Vec<ExportItem>),
}
