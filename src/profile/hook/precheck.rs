//! Owns checking whether hooks will apply to the sources before the build: pure, except for `read`.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::{FileInSource, Hook, HookChanges, apply};
use crate::sys::error::Result;

/// The result of an early check.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Precheck {
    /// Patches that the source already has, as `(hook, patch)`.
    pub already: Vec<(String, String)>,
    /// Hooks that cannot be checked yet: they follow a script, or are for submodules that are not fetched.
    pub later: Vec<String>,
}

/// Decides in memory what `hooks` would do one after the other; `read` returns the entry at a path of a volume.
///
/// A hook that does not fit is an error now rather than after hours.
pub fn precheck(
    hooks: &[&Hook],
    read: &dyn Fn(&str, &Path) -> Result<FileInSource>,
) -> Result<Precheck> {
    let mut found = Precheck::default();
    let mut states: BTreeMap<&str, HookChanges> = BTreeMap::new();
    let mut scripted = BTreeSet::new();
    for hook in hooks {
        let volume = hook.work.volume.as_str();
        let fetched = hook.work.patches.iter().all(|patch| patch.bytes.is_some());
        if scripted.contains(volume) || !fetched || unfetched(hook, read)? {
            found.later.push(hook.name.clone());
            scripted.insert(volume);
            continue;
        }
        let state = states.entry(volume).or_default();
        let below = |path: &Path| read(volume, path);
        let changes = apply(hook, &|path| state.file(path, &below))?;
        let already = changes.already.into_iter();
        found
            .already
            .extend(already.map(|patch| (hook.name.clone(), patch)));
        for (path, change) in changes.files {
            state.put(path, change);
        }
        if hook.work.script.is_some() {
            scripted.insert(volume);
        }
    }
    Ok(found)
}

fn unfetched(hook: &Hook, read: &dyn Fn(&str, &Path) -> Result<FileInSource>) -> Result<bool> {
    for path in files(hook)? {
        if read(&hook.work.volume, &path)? == FileInSource::Unfetched {
            return Ok(true);
        }
    }
    Ok(false)
}

/// Returns the files that a hook's patches and edits name.
pub(crate) fn files(hook: &Hook) -> Result<BTreeSet<std::path::PathBuf>> {
    let edits = hook.work.edits.iter();
    let mut files: BTreeSet<_> = edits.map(|edit| edit.file.clone()).collect();
    for patch in &hook.work.patches {
        let parts = hook.parts(patch)?;
        files.extend(parts.iter().map(|part| patch.directory.join(&part.path)));
    }
    Ok(files)
}
