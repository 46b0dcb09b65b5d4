//! Owns the types of a profile exactly as it is written in TOML. The JSON schema and the structural check of
//! `structure` are generated from them, so editors show the doc comments here.
//!
//! No `flatten`, `untagged` or `tag`: they lose the position of errors.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::resources;
use crate::sys::span::At;

/// A profile: what an environment is made of and the steps that build it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(title = "rockenv profile")]
pub(crate) struct File {
    /// Version of this format: 1.
    #[schemars(required, range(min = 1, max = 1))]
    #[expect(
        dead_code,
        reason = "`structure` and `merge` read it before there are types"
    )]
    schema: Option<i64>,
    /// One line for `rockenv profile ls`.
    pub(crate) description: Option<String>,
    /// Profile that this one extends: its name, or a path ending in `.toml`, relative to this file.
    #[expect(dead_code, reason = "`merge` reads it before there are types")]
    extends: Option<String>,
    /// Image that the first step starts from, by name; may contain parameters.
    pub(crate) image: Option<At<String>>,
    /// GPU targets such as `gfx1103`; `--target` replaces them.
    pub(crate) targets: Option<Vec<At<String>>>,
    /// Hooks to apply, by name, in this order.
    pub(crate) hooks: Option<Vec<At<String>>>,
    /// Variables passed through from the host. Never stored, in no key: the place for secrets and proxies. Passwords in
    /// URLs, and values of variables such as `HF_TOKEN`, are hidden in the output of steps.
    pub(crate) env_from_host: Option<Vec<At<String>>>,
    /// Parameters and their defaults; `--param name=value` replaces them, `${name}` stands for them.
    #[serde(default)]
    pub(crate) params: BTreeMap<At<String>, At<String>>,
    /// Variant that is built by default.
    pub(crate) variant: Option<At<String>>,
    /// Variants for `--variant`.
    #[serde(default)]
    pub(crate) variants: BTreeMap<At<String>, Choice>,
    /// Parameter that selects one of `[releases]` by its name; `--release` sets it.
    pub(crate) release_param: Option<At<String>>,
    /// Releases of what is built. The parameters of the selected one stand in for those that are empty.
    #[serde(default)]
    pub(crate) releases: BTreeMap<At<String>, Choice>,
    /// Starting points for `--from`, besides `source`.
    #[serde(default)]
    pub(crate) from: BTreeMap<At<String>, Choice>,
    /// Requirements on the machine, and limits of the env.
    #[serde(default)]
    pub(crate) resources: resources::Written,
    /// Which steps get the GPU.
    #[serde(default)]
    pub(crate) gpu: Gpu,
    /// Variables of every step. They are part of every key: put variables that depend on the target into a step's own
    /// `env`.
    #[serde(default)]
    pub(crate) env: BTreeMap<At<String>, At<String>>,
    /// Variables that `rockenv env` prints for using the results; in no key.
    #[serde(default)]
    pub(crate) runtime_env: BTreeMap<At<String>, At<String>>,
    /// Components of the build, to check that they fit together: a library needs code for each target of the
    /// components that link it.
    #[serde(default)]
    pub(crate) component: Vec<Component>,
    /// Descriptions of the variables in `[runtime-env]`.
    #[serde(default)]
    pub(crate) runtime_notes: BTreeMap<At<String>, At<String>>,
    /// Directories mounted into the env.
    #[serde(default)]
    pub(crate) volume: Vec<Volume>,
    /// The work, in order; every step ends in a snapshot.
    #[serde(default)]
    pub(crate) step: Vec<Step>,
}

/// The changes of a variant, a release or a starting point (`--from`).
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Choice {
    /// One line for people.
    pub(crate) description: Option<String>,
    /// Parameters with other values.
    #[serde(default)]
    pub(crate) params: BTreeMap<At<String>, At<String>>,
    /// Free disk space that `up` requires, instead of that of `[resources]` and volumes.
    pub(crate) disk: Option<At<String>>,
    /// Hooks to apply after the profile's own.
    pub(crate) hooks: Option<Vec<At<String>>>,
}

/// Which steps get the GPU.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Gpu {
    /// Steps that get the GPU's devices; the same as `gpu = true` in each.
    pub(crate) needed_by: Option<Vec<At<String>>>,
    /// These steps also get `/dev/accel/*`: inference accelerators besides the GPU.
    pub(crate) accel: Option<bool>,
    /// These steps also get `/dev/dma_heap/*`: buffers shared between devices.
    pub(crate) dma_heap: Option<bool>,
}

/// What a volume is for; decides where it lies, who may delete it, and what is frozen with a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum VolumeKind {
    /// Source code: a directory of the host or a git repository, shared by all envs.
    Source,
    /// Build tree: belongs to one env and is frozen with its snapshots where the store can.
    Build,
    /// Cache: shared by all envs, may be emptied at any time.
    Cache,
    /// Results: kept when the env is removed.
    Output,
    /// Any other directory of the host.
    Host,
}

impl VolumeKind {
    /// Returns whether the files in such a volume are the user's, so that `copy` must not replace them.
    pub fn is_users_own(self) -> bool {
        match self {
            Self::Source | Self::Output | Self::Host => true,
            Self::Build | Self::Cache => false,
        }
    }

    /// Returns the access of steps if the profile sets none.
    pub fn default_access(self) -> Access {
        match self {
            Self::Host => Access::Ro,
            Self::Source | Self::Build | Self::Cache | Self::Output => Access::Rw,
        }
    }
}

/// Whether steps may write to a volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Access {
    /// Read only.
    Ro,
    /// Read and write.
    Rw,
}

/// A directory mounted into the env.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Volume {
    /// Name of the volume; a cache of this name is shared by all envs.
    pub(crate) name: At<String>,
    /// What the volume is for.
    pub(crate) kind: Option<At<VolumeKind>>,
    /// Where it appears in the env: an absolute path.
    pub(crate) target: Option<At<String>>,
    /// Directory of the host: absolute, `~/...`, or relative to this file. For `host`, `source` and `output`.
    pub(crate) path: Option<At<String>>,
    /// Repository to clone. For `source`.
    pub(crate) git: Option<At<String>>,
    /// Commit, tag or branch to check out. For `git`.
    pub(crate) rev: Option<At<String>>,
    /// Number of commits to fetch instead of the whole history. For `git`.
    #[schemars(range(min = 1))]
    pub(crate) depth: Option<At<i64>>,
    /// Check out submodules as well. For `git`.
    pub(crate) submodules: Option<At<bool>>,
    /// Size above which `rockenv gc` shrinks it. For `cache`.
    pub(crate) max: Option<At<String>>,
    /// Its files are published and never change: the lock file names each with its digest. For `cache`.
    pub(crate) locked: Option<At<bool>>,
    /// Source volume, a checkout of TheRock, whose third-party tarballs are fetched into this volume in advance; empty
    /// for none. For `cache`.
    pub(crate) downloads: Option<At<String>>,
    /// Steps that need these downloads; default: all. For `downloads`.
    pub(crate) needed_by: Option<Vec<At<String>>>,
    /// Space that it grows to; `up` refuses a file system with less.
    pub(crate) disk: Option<At<String>>,
    /// `ro` or `rw`; default: `ro` for a `host` volume, `rw` for others.
    pub(crate) access: Option<At<Access>>,
}

/// A component of the build.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Component {
    /// Name of the component.
    pub(crate) name: At<String>,
    /// TheRock's project name, for exclusions; default: the component's name.
    pub(crate) project: Option<String>,
    /// Components that it links, which must therefore be built for each of its targets.
    #[serde(default)]
    pub(crate) links: Vec<At<String>>,
    /// Targets that it is built for besides the env's, so that the library exists even if it supports none of those;
    /// each entry may be several targets separated by `;`, or none.
    #[serde(default)]
    pub(crate) extra_targets: Vec<At<String>>,
    /// A stub replaces it where it is not built.
    #[serde(default)]
    pub(crate) stub: bool,
    /// Conditions that must all hold for it to be built.
    pub(crate) when: Option<When>,
    /// Remove the extended profile's component of this name: it is not built.
    #[serde(default)]
    #[expect(dead_code, reason = "`merge` reads it before there are types")]
    remove: bool,
}

/// Who a step runs as.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum User {
    /// The invoking user's uid and gid.
    #[default]
    Builder,
    /// Root of the env.
    Root,
}

/// What runs containers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Engine {
    /// systemd-nspawn.
    Nspawn,
    /// Docker.
    Docker,
    /// Podman.
    Podman,
}

impl Engine {
    pub const ALL: [Self; 3] = [Self::Nspawn, Self::Docker, Self::Podman];
    /// The engines that run containers in a service, in order of preference.
    pub const SERVICES: [Self; 2] = [Self::Docker, Self::Podman];

    pub fn name(&self) -> &'static str {
        match self {
            Self::Nspawn => "nspawn",
            Self::Docker => "docker",
            Self::Podman => "podman",
        }
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// One unit of work: exactly one of `run`, `packages`, `copy` and `export`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Step {
    /// Name of the step, unique in the profile.
    pub(crate) name: At<String>,
    /// Script to run.
    pub(crate) run: Option<At<String>>,
    /// Packages to install with the image's package manager.
    pub(crate) packages: Option<Vec<At<String>>>,
    /// Files to copy in from the profile's directory.
    pub(crate) copy: Option<Vec<CopyItem>>,
    /// Results to copy to `output` volumes.
    pub(crate) export: Option<Vec<ExportItem>>,
    /// Program and arguments that get the script as their last argument; default: `["/bin/sh", "-eu", "-c"]`.
    pub(crate) shell: Option<At<Vec<At<String>>>>,
    /// `builder` (default) or `root`; `packages` always run as root.
    pub(crate) user: Option<At<User>>,
    /// Directory that the script starts in; default: the user's home.
    pub(crate) workdir: Option<At<String>>,
    /// Whether the step has a network; default: true.
    pub(crate) network: Option<bool>,
    /// Time limit after which the step is stopped and fails, such as "2h 30m".
    pub(crate) timeout: Option<At<String>>,
    /// Memory that the machine must have for this step; `up` refuses to run it on a smaller one.
    pub(crate) memory: Option<At<String>>,
    /// Source volumes, or paths in them such as `src/requirements.txt`, whose content is part of this step's key.
    pub(crate) inputs: Option<Vec<At<String>>>,
    /// Build directory of TheRock that this step configures. In the keys of later steps, the fingerprints that
    /// TheRock writes there replace this step's `inputs`.
    pub(crate) fingerprints: Option<At<String>>,
    /// Stages of TheRock: this step's key contains only the fingerprints of what they build, instead of all.
    pub(crate) stages: Option<Vec<String>>,
    /// Keep the current build volumes when the step runs again, instead of restoring the parent snapshot's.
    pub(crate) incremental: Option<bool>,
    /// Variables of this step, added to the profile's `env`.
    #[serde(default)]
    pub(crate) env: BTreeMap<At<String>, At<String>>,
    /// The step gets the GPU's devices, and is skipped without a GPU.
    pub(crate) gpu: Option<At<bool>>,
    /// Conditions that must all hold, or the step is skipped.
    pub(crate) when: Option<When>,
    /// Published figures of this step: its time and its disk space.
    pub(crate) published: Option<Published>,
    /// Step after which this one is placed. For a profile that extends another.
    #[expect(dead_code, reason = "`merge` reads it before there are types")]
    after: Option<String>,
    /// Remove the extended profile's step of this name.
    #[expect(dead_code, reason = "`merge` reads it before there are types")]
    remove: Option<bool>,
}

/// Published figures of a step.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Published {
    /// How long it takes, such as "1h".
    pub(crate) time: Option<At<String>>,
    /// Disk that it fills, such as "30G".
    pub(crate) disk: Option<At<String>>,
    /// `true`: the time is a limit that nobody measured.
    #[serde(default)]
    pub(crate) limit: bool,
    /// Who measured it, and on which machine.
    pub(crate) source: String,
}

/// Conditions on the target, the engine and the user's choices; each lists the values that satisfy it.
#[derive(Clone, Debug, Default, PartialEq, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct When {
    /// TheRock's families, such as `gfx110X-all` or `igpu-all`: a target of the env must be in one of them.
    pub family: Option<Vec<At<String>>>,
    /// A target of the env must be one of these.
    pub target: Option<Vec<At<String>>>,
    /// The engine must be one of these.
    pub engine: Option<Vec<Engine>>,
    /// The variant must be one of these.
    pub variant: Option<Vec<At<String>>>,
    /// The starting point must be one of these: `source`, or one of `[from]`.
    pub from: Option<Vec<At<String>>>,
}

/// A file or directory to copy in.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "Copy")]
pub struct CopyItem {
    /// Path relative to the profile's directory, inside it. Symbolic links on the way are refused.
    pub from: At<String>,
    /// Its absolute path in the env.
    pub to: At<String>,
}

/// A file or directory to export.
#[derive(Clone, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(rename = "Export")]
pub struct ExportItem {
    /// Absolute path in the env.
    pub from: At<String>,
    /// Name of a volume of kind `output`.
    pub to: At<String>,
}

pub(crate) fn schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}
