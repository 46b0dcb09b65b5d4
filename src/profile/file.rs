//! Owns the types of a profile exactly as it is written in TOML. The JSON schema and the structural check of
//! `shape` are made from them, so a doc comment here is what editors show.
//!
//! No `flatten`, `untagged` or `tag`: they lose the position of errors.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_spanned::Spanned;

/// A profile: what an environment is made of and the steps that build it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(title = "rockenv profile")]
pub(crate) struct File {
    /// Version of this format: 1.
    #[schemars(with = "i64", range(min = 1, max = 1))]
    pub(crate) schema: Spanned<i64>,
    /// One line for `rockenv profile ls`.
    pub(crate) description: Option<String>,
    /// Profile that this one changes: its name, or a path ending in `.toml`, relative to this file.
    #[schemars(with = "Option<String>")]
    pub(crate) extends: Option<Spanned<String>>,
    /// Image that the first step starts from, by name.
    #[schemars(with = "Option<String>")]
    pub(crate) image: Option<Spanned<String>>,
    /// GPU targets such as `gfx1103`; `--target` replaces them.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) targets: Option<Vec<Spanned<String>>>,
    /// Hooks to apply, by name, in this order.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hooks: Option<Vec<Spanned<String>>>,
    /// Variables handed through from the host. Never stored, never logged, in no key: the place for secrets and proxies.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) env_from_host: Option<Vec<Spanned<String>>>,
    /// Parameters and their defaults; `--param name=value` replaces them, `${name}` stands for them.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) params: BTreeMap<Spanned<String>, Spanned<String>>,
    /// Variant that is built unless `--variant` says which.
    #[schemars(with = "Option<String>")]
    pub(crate) variant: Option<Spanned<String>>,
    /// What `--variant` can name.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, Choice>")]
    pub(crate) variants: BTreeMap<Spanned<String>, Choice>,
    /// What `--from` can name, beside `source`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, Choice>")]
    pub(crate) from: BTreeMap<Spanned<String>, Choice>,
    /// What the env needs of the machine, and its limits.
    #[serde(default)]
    pub(crate) resources: Resources,
    /// Which steps get the GPU.
    #[serde(default)]
    pub(crate) gpu: Gpu,
    /// Variables of every step. They are part of every key: keep what depends on the target in a step's own `env`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) env: BTreeMap<Spanned<String>, Spanned<String>>,
    /// Variables that `rockenv env` prints for using what was built; in no key.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) runtime_env: BTreeMap<Spanned<String>, Spanned<String>>,
    /// Parts of what is built, for the question whether they fit together: a library needs code for each target of
    /// what links it.
    #[serde(default)]
    pub(crate) component: Vec<Component>,
    /// What variables of `[runtime-env]` are for.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) runtime_notes: BTreeMap<Spanned<String>, Spanned<String>>,
    /// Directories mounted into the env.
    #[serde(default)]
    pub(crate) volume: Vec<Volume>,
    /// The work, in order; every step ends in a snapshot.
    #[serde(default)]
    pub(crate) step: Vec<Step>,
}

/// What a variant, or a way of `--from`, changes; steps name it in their `when`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Choice {
    /// One line for people.
    #[schemars(with = "Option<String>")]
    pub(crate) description: Option<Spanned<String>>,
    /// Parameters that get another value.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) params: BTreeMap<Spanned<String>, Spanned<String>>,
    /// Free disk space that `up` asks for, in place of `[resources]` and of what volumes say.
    #[schemars(with = "Option<String>")]
    pub(crate) disk: Option<Spanned<String>>,
    /// Hooks to apply after the profile's own.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) hooks: Option<Vec<Spanned<String>>>,
}

/// What the env needs of the machine, and its limits.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Resources {
    /// Free disk space that `up` asks for before it starts, such as "230G".
    #[schemars(with = "Option<String>")]
    pub(crate) disk: Option<Spanned<String>>,
    /// Memory that one compile job takes; the number of jobs is the smaller of cores and memory divided by this.
    #[schemars(with = "Option<String>")]
    pub(crate) memory_per_job: Option<Spanned<String>>,
    /// Memory that one link takes; decides `${link-jobs}`.
    #[schemars(with = "Option<String>")]
    pub(crate) memory_per_link_job: Option<Spanned<String>>,
    /// Memory that one process of TensileLite takes; decides `${tensile-jobs}`.
    #[schemars(with = "Option<String>")]
    pub(crate) memory_per_tensile_job: Option<Spanned<String>>,
    /// Memory that the machine must have; `up` refuses one with less.
    #[schemars(with = "Option<String>")]
    pub(crate) memory: Option<Spanned<String>>,
    /// Puts a ninja that keeps to the machine's jobs, also when it is started by another, first on the path.
    #[schemars(with = "Option<bool>")]
    pub(crate) ninja: Option<Spanned<bool>>,
    /// Limit of the env's memory: a size, or a share of the machine's such as "90%".
    #[schemars(with = "Option<String>")]
    pub(crate) memory_max: Option<Spanned<String>>,
    /// Limit of the env's processes and threads.
    #[schemars(with = "Option<i64>", range(min = 1))]
    pub(crate) tasks_max: Option<Spanned<i64>>,
}

/// Which steps get the GPU.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Gpu {
    /// Steps that get the GPU's devices; the same as `gpu = true` in each.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) needed_by: Option<Vec<Spanned<String>>>,
    /// These steps get `/dev/accel/*` too: accelerators for inference beside the GPU.
    #[schemars(with = "Option<bool>")]
    pub(crate) accel: Option<Spanned<bool>>,
    /// These steps get `/dev/dma_heap/*` too: buffers shared between devices.
    #[schemars(with = "Option<bool>")]
    pub(crate) dma_heap: Option<Spanned<bool>>,
}

/// What a volume is for; decides where it lies, who may delete it, and what is frozen with a snapshot.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema,
)]
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
    /// Returns whether the files in such a volume are the user's, and nothing that `copy` replaces.
    pub fn is_theirs(self) -> bool {
        matches!(self, Self::Source | Self::Output | Self::Host)
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
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// What the volume is for.
    #[schemars(with = "Option<VolumeKind>")]
    pub(crate) kind: Option<Spanned<VolumeKind>>,
    /// Where it appears in the env: an absolute path.
    #[schemars(with = "Option<String>")]
    pub(crate) target: Option<Spanned<String>>,
    /// Directory of the host: absolute, `~/...`, or relative to this file. For `host`, `source` and `output`.
    #[schemars(with = "Option<String>")]
    pub(crate) path: Option<Spanned<String>>,
    /// Repository to clone. For `source`.
    #[schemars(with = "Option<String>")]
    pub(crate) git: Option<Spanned<String>>,
    /// Commit, tag or branch to check out. For `git`.
    #[schemars(with = "Option<String>")]
    pub(crate) rev: Option<Spanned<String>>,
    /// Number of commits to fetch instead of the whole history. For `git`.
    #[schemars(with = "Option<i64>", range(min = 1))]
    pub(crate) depth: Option<Spanned<i64>>,
    /// Check out submodules as well. For `git`.
    #[schemars(with = "Option<bool>")]
    pub(crate) submodules: Option<Spanned<bool>>,
    /// Size above which `rockenv gc` shrinks it. For `cache`.
    #[schemars(with = "Option<String>")]
    pub(crate) max: Option<Spanned<String>>,
    /// Its files are published ones that never change: the lock file names each with its digest. For `cache`.
    #[schemars(with = "Option<bool>")]
    pub(crate) locked: Option<Spanned<bool>>,
    /// Source volume, a checkout of TheRock, whose third-party tarballs are fetched into it beforehand. For `cache`.
    #[schemars(with = "Option<String>")]
    pub(crate) downloads: Option<Spanned<String>>,
    /// The steps before which that happens; any without. For `downloads`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) needed_by: Option<Vec<Spanned<String>>>,
    /// Space that it grows to; `up` refuses a file system with less.
    #[schemars(with = "Option<String>")]
    pub(crate) disk: Option<Spanned<String>>,
    /// `ro` or `rw`; a `host` volume is `ro` unless this says otherwise, the others `rw`.
    #[schemars(with = "Option<Access>")]
    pub(crate) access: Option<Spanned<Access>>,
}

/// A part of what is built.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Component {
    /// Name of the component.
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// The project by which TheRock leaves it out of targets; the component's name unless given.
    pub(crate) project: Option<String>,
    /// Components that it links, and that so must be built for each of its targets.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) links: Vec<Spanned<String>>,
    /// Targets that it is built for beside the env's, so that the library exists where it has no code for any of them; each
    /// may be several with `;` between them, or none.
    #[serde(default)]
    #[schemars(with = "Vec<String>")]
    pub(crate) extra_targets: Vec<Spanned<String>>,
    /// A stub stands in for it where it is not built.
    #[serde(default)]
    pub(crate) stub: bool,
    /// Conditions that must all hold, or it is not built.
    pub(crate) when: Option<When>,
    /// Drop the component of this name that the extended profile has: it is not built.
    #[serde(default)]
    pub(crate) remove: bool,
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
    /// Returns the name as people write it.
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
    #[schemars(with = "String")]
    pub(crate) name: Spanned<String>,
    /// Script to run.
    #[schemars(with = "Option<String>")]
    pub(crate) run: Option<Spanned<String>>,
    /// Packages to install with the image's package manager.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) packages: Option<Spanned<Vec<Spanned<String>>>>,
    /// Files to bring in from beside the profile.
    #[schemars(with = "Option<Vec<Copy>>")]
    pub(crate) copy: Option<Spanned<Vec<Copy>>>,
    /// Results to copy to `output` volumes.
    #[schemars(with = "Option<Vec<Export>>")]
    pub(crate) export: Option<Spanned<Vec<Export>>>,
    /// Program and arguments that get the script as their last argument; `["/bin/sh", "-eu", "-c"]` unless given.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) shell: Option<Spanned<Vec<Spanned<String>>>>,
    /// `builder` (unless given) or `root`; `packages` always run as root.
    #[schemars(with = "Option<User>")]
    pub(crate) user: Option<Spanned<User>>,
    /// Directory that the script starts in; the user's home unless given.
    #[schemars(with = "Option<String>")]
    pub(crate) workdir: Option<Spanned<String>>,
    /// Whether the step has a network; true unless given.
    #[schemars(with = "Option<bool>")]
    pub(crate) network: Option<Spanned<bool>>,
    /// Time after which the step is stopped and has failed, such as "2h 30m".
    #[schemars(with = "Option<String>")]
    pub(crate) timeout: Option<Spanned<String>>,
    /// Memory that the machine must have for this step; `up` refuses one with less, where the step would run.
    #[schemars(with = "Option<String>")]
    pub(crate) memory: Option<Spanned<String>>,
    /// Source volumes, or paths in them such as `src/requirements.txt`, whose content is part of this step's key.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) inputs: Option<Vec<Spanned<String>>>,
    /// Build directory of TheRock that this step configures. The fingerprints that TheRock writes there take the place of
    /// this step's `inputs` in the keys of later steps.
    #[schemars(with = "Option<String>")]
    pub(crate) fingerprints: Option<Spanned<String>>,
    /// Stages of TheRock: only the fingerprints of what they build are in this step's key, instead of all.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) stages: Option<Vec<Spanned<String>>>,
    /// Keep build volumes as they are when the step runs again, instead of the parent snapshot's.
    #[schemars(with = "Option<bool>")]
    pub(crate) incremental: Option<Spanned<bool>>,
    /// Variables of this step, added to the profile's `env`.
    #[serde(default)]
    #[schemars(with = "BTreeMap<String, String>")]
    pub(crate) env: BTreeMap<Spanned<String>, Spanned<String>>,
    /// The step gets the GPU's devices, and is skipped where there is no GPU.
    #[schemars(with = "Option<bool>")]
    pub(crate) gpu: Option<Spanned<bool>>,
    /// Conditions that must all hold, or the step is left out.
    pub(crate) when: Option<When>,
    /// What somebody published of this step: how long it takes and what disk it fills.
    pub(crate) published: Option<Published>,
    /// Step that this one is placed behind. For a profile that extends another.
    #[schemars(with = "Option<String>")]
    pub(crate) after: Option<Spanned<String>>,
    /// Drop the step of this name that the extended profile has.
    #[schemars(with = "Option<bool>")]
    pub(crate) remove: Option<Spanned<bool>>,
}

/// What somebody published of a step.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Published {
    /// How long it takes, such as "1h".
    #[schemars(with = "Option<String>")]
    pub(crate) time: Option<Spanned<String>>,
    /// Disk that it fills, such as "30G".
    #[schemars(with = "Option<String>")]
    pub(crate) disk: Option<Spanned<String>>,
    /// Who says so, and of what machine.
    #[schemars(with = "String")]
    pub(crate) source: Spanned<String>,
}

/// Conditions on the target, the engine and what was chosen; each lists the values that satisfy it.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct When {
    /// TheRock's families, such as `gfx110X-all` or `igpu-all`: a target of the env must be in one of them.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) family: Option<Vec<Spanned<String>>>,
    /// A target of the env must be one of these.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) target: Option<Vec<Spanned<String>>>,
    /// The engine must be one of these.
    pub(crate) engine: Option<Vec<Engine>>,
    /// The variant must be one of these.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) variant: Option<Vec<Spanned<String>>>,
    /// The way of `--from` must be one of these: `source`, or one of `[from]`.
    #[schemars(with = "Option<Vec<String>>")]
    pub(crate) from: Option<Vec<Spanned<String>>>,
}

/// A file or directory to bring in.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Copy {
    /// Path relative to the profile's directory, inside it. Symbolic links on the way are refused.
    #[schemars(with = "String")]
    pub(crate) from: Spanned<String>,
    /// Absolute path that it gets in the env.
    #[schemars(with = "String")]
    pub(crate) to: Spanned<String>,
}

/// A file or directory to hand out.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Export {
    /// Absolute path in the env.
    #[schemars(with = "String")]
    pub(crate) from: Spanned<String>,
    /// Name of a volume of kind `output`.
    #[schemars(with = "String")]
    pub(crate) to: Spanned<String>,
}

/// Returns the JSON schema of a profile, for editors and for `rockenv schema`.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}
