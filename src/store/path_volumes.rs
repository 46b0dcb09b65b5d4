//! Owns resolving a directory that a profile names by `path`: where links in the path lead, and which are refused.
//!
//! A step can put a link in place of a directory that another volume names, such as `dist` in a source that it may
//! write to. Reads and writes would then go somewhere else on the host.

use std::ffi::OsString;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;

use crate::plan::resolve::{Access, Spec, VolumeSource};
use crate::sys::error::Result;

/// The kernel follows this many links.
const MOST_LINKS: usize = 40;

/// Returns where a volume's `path` leads. Refuses a link in the path that a step of the env may have made.
pub(crate) fn real_path(spec: &Spec, path: &Path) -> Result<PathBuf> {
    let written: Vec<PathBuf> = written_by_steps(spec).collect();
    let is_written = |at: &Path| written.iter().any(|directory| at.starts_with(directory));
    follow(path, &|entry| {
        // A missing entry, or one that is not a link, stays in the path.
        let Ok(target) = fs::read_link(entry) else {
            return Ok(None);
        };
        if entry.parent().is_some_and(is_written) {
            return Err(invalid!(
                "`{}` is a link in a directory that steps of env `{}` can write to: a step may have made it",
                entry.display(),
                spec.name
            )
            .help(format!(
                "replace the link with a directory, or name the intended directory in the profile instead of `{}`",
                path.display()
            )));
        }
        Ok(Some(target))
    })
}

/// Resolves the links of an absolute path, which need not exist. `target_of` returns the target of an entry of the
/// path, if the entry is a link.
pub(crate) fn follow(
    path: &Path,
    target_of: &dyn Fn(&Path) -> Result<Option<PathBuf>>,
) -> Result<PathBuf> {
    let mut at = PathBuf::from("/");
    let mut left: Vec<OsString> = parts(path);
    let mut links = 0;
    while let Some(part) = left.pop() {
        if part == ".." {
            at.pop();
            continue;
        }
        let next = at.join(&part);
        let Some(target) = target_of(&next)? else {
            at = next;
            continue;
        };
        links += 1;
        if links > MOST_LINKS {
            let path = path.display();
            return Err(invalid!("`{path}` has too many links on the way"));
        }
        if target.is_absolute() {
            at = PathBuf::from("/");
        }
        left.extend(parts(&target));
    }
    Ok(at)
}

/// Returns the directories of the host that steps can write to.
fn written_by_steps(spec: &Spec) -> impl Iterator<Item = PathBuf> {
    let volumes = spec.volumes.iter();
    volumes.filter_map(|volume| match (&volume.access, &volume.source) {
        (Access::Rw, VolumeSource::Path(path)) => fs::canonicalize(path).ok(),
        (Access::Rw, VolumeSource::Git(_) | VolumeSource::Store) | (Access::Ro, _) => None,
    })
}

/// Returns the parts of a path in reverse order.
fn parts(path: &Path) -> Vec<OsString> {
    let parts = path.components().rev();
    let parts = parts.filter_map(|part| match part {
        Component::Normal(_) | Component::ParentDir => Some(part.as_os_str().to_owned()),
        Component::Prefix(_) | Component::RootDir | Component::CurDir => None,
    });
    parts.collect()
}
