//! Hooks: named, checked changes of a source volume. `hooks/<name>/hook.toml` contains the change, its reason and its
//! conditions.
//!
//! `file` is the format, `catalog` finds and reads hooks, `apply` decides the changes (pure), `patch` parses unified
//! diffs, `precheck` checks the sources before the build. `execute` makes the changes, in a view that belongs to one
//! env.

mod apply;
mod catalog;
mod file;
mod patch;
mod precheck;

use std::path::PathBuf;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::profile::joined;
use crate::rocm::target::{self, Target};
use crate::sys::error::{Error, Result, encoded};
use crate::sys::name::StepName;
use crate::sys::span::At;
pub use apply::{FileInSource, HookChange, HookChanges, apply};
pub(crate) use catalog::MAX_PATCH;
pub use catalog::{list, load};
pub use file::{Applies, schema};
pub use patch::{FilePatch, parse as parse_patch};
pub(crate) use precheck::files;
pub use precheck::precheck;

/// A hook, read and checked.
#[derive(Clone, Debug, Default)]
pub struct Hook {
    /// Name of the hook and of its directory.
    pub name: String,
    /// Summary in one line.
    pub description: String,
    pub why: String,
    /// Upstream's discussions of it.
    pub links: Vec<String>,
    /// The `hook.toml`; `None` if it is built in.
    pub path: Option<PathBuf>,
    pub applies: Applies,
    pub work: Work,
}

impl Applies {
    /// Returns why the hook does not apply to an env for `targets`, if so.
    pub fn not_for(&self, targets: &[Target]) -> Option<String> {
        let inside = |target: &Target| self.targets.iter().any(|name| target.is_in(name));
        let is_for = self.targets.is_empty() || targets.iter().any(inside);
        (!is_for).then(|| not_for(&self.targets, targets))
    }
}

/// Formats why something that is only for these targets or families does not apply to an env's.
pub(crate) fn not_for(names: &[At<String>], targets: &[Target]) -> String {
    format!(
        "only for {}, not for {}",
        joined(names),
        target::shown(targets)
    )
}

/// A hook's effect, in the order of the fields. All of it is in the hook's digest.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Source volume that it changes.
    pub volume: String,
    /// Step from which on it is applied; default: the first one with the volume among its `inputs`.
    pub from_step: Option<StepName>,
    pub patches: Vec<Patch>,
    pub edits: Vec<Edit>,
    pub script: Option<Script>,
}

/// A text to replace, with its required number of occurrences.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edit {
    /// Path below the volume.
    pub file: PathBuf,
    /// The old text, byte for byte; with `whole_lines` a line of code.
    pub find: String,
    /// Whether `find` matches whole lines: this text, blanks around it, and a comment after it.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub whole_lines: bool,
    pub replace: String,
    /// Number of occurrences.
    pub count: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Patch {
    /// Its name in messages: the file's name, or the address without secrets. Its identity is its digest.
    #[serde(skip)]
    pub name: String,
    #[serde(skip)]
    pub url: Option<String>,
    /// Digest of its bytes, in hexadecimal digits.
    pub sha256: String,
    /// Directory below the volume that its paths are relative to.
    pub directory: PathBuf,
    /// Leading parts to strip from its paths.
    pub strip: usize,
    /// Its bytes, if known without a download.
    #[serde(skip)]
    pub bytes: Option<Vec<u8>>,
}

/// A script that runs inside the env, on the view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Script {
    pub run: String,
    /// Program and arguments before the script.
    pub shell: Vec<String>,
    /// The files that it changes, creates or removes: all of them, and no others.
    pub changes: Vec<PathBuf>,
}

impl Hook {
    /// Returns the digest of its effect: editing its description or conditions changes no key.
    pub fn digest(&self) -> Result<String> {
        let text = encoded(serde_json::to_vec(&self.work), "a hook")?;
        Ok(hex::encode(Sha256::digest(text)))
    }

    /// Returns the parts of a fetched patch, each for one file.
    fn parts(&self, patch: &Patch) -> Result<Vec<FilePatch>> {
        let bytes = patch.bytes.as_ref();
        let bytes = bytes.ok_or_else(|| unexpected!("patch `{}` was not fetched", patch.name))?;
        parse_patch(bytes, patch.strip)
            .map_err(|error| self.refuses(format!("`{}`: {}", patch.name, error.message())))
    }

    /// Returns an error about this hook.
    pub(crate) fn refuses(&self, message: impl std::fmt::Display) -> Error {
        let name = &self.name;
        let own = match &self.path {
            Some(path) => format!("correct `{}`", path.display()),
            None => format!("put a corrected one into `~/.config/rockenv/hooks/{name}`"),
        };
        invalid!("hook `{name}`: {message}").help(format!(
            "{own}, build a variant without it, or build a revision that it applies to: \
             `rockenv hook check --hook {name} --source DIR REVISIONS` finds the one that broke it"
        ))
    }
}
