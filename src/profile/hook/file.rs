//! Owns the types of a `hook.toml` exactly as it is written.

use schemars::JsonSchema;
use serde::Deserialize;

use crate::sys::span::At;

/// A hook: a checked change of a source volume.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
#[schemars(title = "rockenv hook")]
pub(super) struct File {
    /// Version of this format: 1.
    #[schemars(range(min = 1, max = 1))]
    pub(super) schema: At<i64>,
    /// What it changes, in a line.
    pub(super) description: String,
    /// Why that is needed, and when it will not be any more.
    pub(super) why: String,
    /// Where upstream speaks of it.
    #[serde(default)]
    pub(super) links: Vec<String>,
    /// Source volume that it changes, by name.
    pub(super) volume: At<String>,
    /// Step from which on it is applied; unless given, the first one that has the volume among its `inputs`.
    pub(super) from_step: Option<At<String>>,
    /// Where it applies.
    #[serde(default)]
    pub(super) applies: Applies,
    /// Patches, applied first.
    #[serde(default)]
    pub(super) patch: Vec<Patch>,
    /// Replacements of text, after the patches.
    #[serde(default)]
    pub(super) edit: Vec<Edit>,
    /// A script, run inside the env after the edits.
    pub(super) script: Option<Script>,
}

/// Where a hook applies; what is not said is no condition.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Applies {
    /// Profiles that may name the hook, or extend one that may.
    #[serde(default)]
    pub(super) profiles: Vec<String>,
    /// Targets or families of TheRock: the env must have one of them, else the hook is left out.
    #[serde(default)]
    pub(super) targets: Vec<At<String>>,
    /// First commit of the source that the hook is for, all 40 digits.
    pub(super) since: Option<At<String>>,
    /// First commit of the source that the hook is no longer for, all 40 digits.
    pub(super) until: Option<At<String>>,
}

/// A text to replace.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Edit {
    /// File, relative to the volume.
    pub(super) file: At<String>,
    /// Text that is in it, byte for byte.
    pub(super) find: At<String>,
    /// Text that comes in its place.
    pub(super) replace: String,
    /// How often the text is there: 1 unless given. Any other number is an error.
    #[schemars(range(min = 1))]
    pub(super) count: Option<At<i64>>,
}

/// A patch in unified form: a file beside `hook.toml`, or an address with the digest of what is there.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Patch {
    /// Name of a file in the hook's directory.
    pub(super) file: Option<At<String>>,
    /// Address, beginning with `https://`; kept in the store once it was fetched.
    pub(super) url: Option<At<String>>,
    /// SHA-256 of what is at the address.
    pub(super) sha256: Option<At<String>>,
    /// Directory below the volume that the patch's paths are relative to.
    pub(super) directory: Option<At<String>>,
    /// Leading parts of the patch's paths that do not count: 1 unless given, as git writes them.
    #[schemars(range(min = 0, max = 16))]
    pub(super) strip: Option<At<i64>>,
}

/// A script that runs inside the env as the build user, in the volume's directory, without a network.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Script {
    /// Text.
    pub(super) run: String,
    /// Program and arguments that get the script as their last argument; `["/bin/sh", "-eu", "-c"]` unless given.
    pub(super) shell: Option<Vec<String>>,
    /// The files that it changes, makes or removes, relative to the volume: all of them, and no others.
    pub(super) changes: Vec<At<String>>,
}

/// Returns the JSON schema of a hook.
pub fn schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}
