//! Owns the types of a `hook.toml` exactly as it is written.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

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
    /// Why the change is needed, and when it will become obsolete.
    pub(super) why: String,
    /// Upstream's discussions of it.
    #[serde(default)]
    pub(super) links: Vec<String>,
    /// Source volume that it changes, by name.
    pub(super) volume: At<String>,
    /// Step from which on it is applied; default: the first one that has the volume among its `inputs`.
    pub(super) from_step: Option<At<String>>,
    /// Where it applies.
    #[serde(default)]
    pub(super) applies: Applies,
    /// Patches, applied first.
    #[serde(default)]
    pub(super) patch: Vec<At<Patch>>,
    /// Replacements of text, after the patches.
    #[serde(default)]
    pub(super) edit: Vec<Edit>,
    /// A script, run inside the env after the edits.
    pub(super) script: Option<Script>,
}

/// Where a hook applies; an omitted key is no condition.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub struct Applies {
    /// Profiles that may name the hook, including those that extend them.
    #[serde(default)]
    pub profiles: Vec<String>,
    /// Targets or families of TheRock: the env must have one of them, else the hook is skipped.
    #[serde(default)]
    pub targets: Vec<At<String>>,
    /// First commit of the source that the hook is for, all 40 digits.
    pub since: Option<At<String>>,
    /// First commit of the source that the hook is no longer for, all 40 digits.
    pub until: Option<At<String>>,
}

/// A text to replace.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Edit {
    /// File, relative to the volume.
    pub(super) file: At<String>,
    /// Text that is in it, byte for byte.
    pub(super) find: Option<At<String>>,
    /// Instead of `find`: a line of code that is in it, whatever blanks are around it and comment (`#`, `//`) is after
    /// it. All of that is replaced, with the end of the line.
    pub(super) find_line: Option<At<String>>,
    /// The replacement.
    pub(super) replace: String,
    /// Number of occurrences; default: 1. Any other number is an error.
    #[schemars(range(min = 1))]
    pub(super) count: Option<At<i64>>,
}

/// A patch in unified format: a file beside `hook.toml`, or an address with its SHA-256.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Patch {
    /// Name of a file in the hook's directory.
    pub(super) file: Option<At<String>>,
    /// Address, beginning with `https://`; its content is kept in the store once fetched.
    pub(super) url: Option<At<String>>,
    /// SHA-256 of the content at the address.
    pub(super) sha256: Option<At<String>>,
    /// Directory below the volume that the patch's paths are relative to.
    pub(super) directory: Option<At<String>>,
    /// Leading parts to strip from the patch's paths; default: 1, as git writes them.
    #[schemars(range(min = 0, max = 16))]
    pub(super) strip: Option<At<i64>>,
}

/// A script that runs inside the env as the build user, in the volume's directory, without a network.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Script {
    /// Text.
    pub(super) run: At<String>,
    /// Program and arguments that get the script as their last argument; default: `["/bin/sh", "-eu", "-c"]`.
    pub(super) shell: Option<Vec<String>>,
    /// The files that it changes, makes or removes, relative to the volume: all of them, and no others.
    pub(super) changes: At<Vec<At<String>>>,
}

pub fn schema() -> serde_json::Value {
    schemars::schema_for!(File).to_value()
}
