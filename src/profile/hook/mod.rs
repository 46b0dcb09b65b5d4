//! Hooks: named, checked changes of a source volume. `hooks/<name>/hook.toml` says what, why and where.
//!
//! `file` is the format, `catalog` finds and reads, `apply` decides what changes (pure), `patch` knows unified diffs,
//! `early` asks the sources before anything is built. Making the changes, in a view that belongs to one env, is
//! `execute`'s.

mod apply;
mod catalog;
mod early;
mod file;
mod patch;

use std::path::PathBuf;

use serde::Serialize;
use sha2::{Digest as _, Sha256};

use crate::rocm::target::Target;
use crate::sys::error::{Error, Result};
pub use apply::{Change, Changes, Found, apply};
pub use catalog::{list, load};
pub(crate) use early::files;
pub use early::{Early, early};
pub use file::schema;
pub use patch::{FilePatch, parse as parse_patch};

/// A hook, read and checked.
#[derive(Clone, Debug)]
pub struct Hook {
    /// Its name: that of its directory.
    pub name: String,
    /// What it changes, in a line.
    pub description: String,
    /// Why that is needed.
    pub why: String,
    /// Where upstream speaks of it.
    pub links: Vec<String>,
    /// The `hook.toml`, or nothing where it is compiled in.
    pub path: Option<PathBuf>,
    /// Where it applies.
    pub applies: Applies,
    /// What it does.
    pub work: Work,
}

/// Where a hook applies. An empty list means everywhere.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Applies {
    /// Profiles that may name it, or that those extend.
    pub profiles: Vec<String>,
    /// Targets or families of which the env must have one.
    pub targets: Vec<String>,
    /// First commit of the source that it is for.
    pub since: Option<String>,
    /// First commit of the source that it is no longer for.
    pub until: Option<String>,
}

impl Applies {
    /// Says why the hook has nothing to do in an env for `targets`, where it has not.
    pub fn not_for(&self, targets: &[Target]) -> Option<String> {
        let inside = |target: &Target| self.targets.iter().any(|name| target.is_in(name));
        if self.targets.is_empty() || targets.iter().any(inside) {
            return None;
        }
        let names: Vec<&str> = targets.iter().map(Target::name).collect();
        let shown = match names.is_empty() {
            true => "no target".to_owned(),
            false => names.join(", "),
        };
        Some(format!(
            "only for {}, not for {shown}",
            self.targets.join(", ")
        ))
    }
}

/// What a hook does, in the order of the fields. All of it is in the hook's digest.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Work {
    /// Source volume that it changes.
    pub volume: String,
    /// Step from which on it is applied; the first one with the volume among its `inputs` unless given.
    pub from_step: Option<String>,
    /// Patches.
    pub patches: Vec<Patch>,
    /// Edits.
    pub edits: Vec<Edit>,
    /// Script.
    pub script: Option<Script>,
}

/// A text to replace, as often as it must be there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edit {
    /// Path below the volume.
    pub file: PathBuf,
    /// Text that is there, byte for byte.
    pub find: String,
    /// Text that comes in its place.
    pub replace: String,
    /// How often.
    pub count: usize,
}

/// A patch and where it is from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Patch {
    /// What messages call it: the file's name or the address. Not what it is: its digest is.
    #[serde(skip)]
    pub name: String,
    /// Digest of its bytes, in hexadecimal digits.
    pub sha256: String,
    /// Directory below the volume that its paths are relative to.
    pub directory: PathBuf,
    /// Leading parts of its paths that do not count.
    pub strip: usize,
    /// Its bytes, where they are known without a download.
    #[serde(skip)]
    pub bytes: Option<Vec<u8>>,
}

/// A script that runs inside the env, on the view.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Script {
    /// Text.
    pub run: String,
    /// Program and arguments before it.
    pub shell: Vec<String>,
    /// The files that it changes, makes or removes: all of them, and no others.
    pub changes: Vec<PathBuf>,
}

impl Hook {
    /// Names what it does: an edit of its description or of where it applies changes no key.
    pub fn digest(&self) -> Result<String> {
        let text = serde_json::to_vec(&self.work)
            .map_err(|error| Error::unexpected("cannot encode a hook").source(error))?;
        Ok(hex::encode(Sha256::digest(text)))
    }

    /// Makes an error about this hook.
    pub(crate) fn refuses(&self, message: impl std::fmt::Display) -> Error {
        Error::invalid(format!("hook `{}`: {message}", self.name)).help(format!(
            "rockenv hook check --hook {} --source DIR REVISIONS finds the revision that broke it",
            self.name
        ))
    }
}
