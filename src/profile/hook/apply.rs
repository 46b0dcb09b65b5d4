//! Owns deciding what a hook changes: a pure function from the current content of files to the new content.

#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use super::patch::Replayed;
use super::{Edit, FilePatch, Hook};
use crate::sys::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileInSource {
    File {
        bytes: Vec<u8>,
        executable: bool,
    },
    Absent,
    /// Nothing, and its parent directory is empty: a submodule that was not fetched.
    Unfetched,
}

/// The new entry at a path.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HookChange {
    Write {
        bytes: Vec<u8>,
        /// The new executable permission; `None`: unchanged.
        executable: Option<bool>,
    },
    Remove,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HookChanges {
    /// By path below the volume.
    pub files: BTreeMap<PathBuf, HookChange>,
    /// Patches that the source already has, by name.
    pub already: Vec<String>,
}

/// Decides the changes of the patches and edits of `hook`; `read` returns the entry at a path below the volume. The
/// script is not included.
///
/// Each patch and edit sees the changes of earlier ones. Returns an error of kind `Invalid` if a source does not fit.
pub fn apply(hook: &Hook, read: &dyn Fn(&Path) -> Result<FileInSource>) -> Result<HookChanges> {
    let mut changes = HookChanges::default();
    for patch in &hook.work.patches {
        let files = hook.parts(patch)?;
        let mut outcomes = Vec::new();
        for (path, parts) in by_path(&files) {
            let path = patch.directory.join(path);
            let found = changes.file(&path, read)?;
            if found == FileInSource::Unfetched {
                return Err(unfetched(hook, &path));
            }
            let outcome = apply_parts(&parts, &found).map_err(|why| {
                hook.refuses(format!("`{}`: `{}`: {why}", patch.name, path.display()))
            })?;
            outcomes.push((path, outcome));
        }
        let missing = outcomes.iter().filter(|(_, outcome)| outcome.is_none());
        let missing: Vec<&PathBuf> = missing.map(|(path, _)| path).collect();
        match missing[..] {
            [] => {}
            _ if missing.len() == outcomes.len() => changes.already.push(patch.name.clone()),
            [first, ..] => {
                return Err(hook.refuses(format!(
                    "`{}` is partly applied in the source: `{}` already has it",
                    patch.name,
                    first.display()
                )));
            }
        }
        for (path, outcome) in outcomes {
            if let Some(change) = outcome {
                changes.put(path, change);
            }
        }
    }
    for edit in &hook.work.edits {
        let bytes = match changes.file(&edit.file, read)? {
            FileInSource::File { bytes, .. } => bytes,
            FileInSource::Unfetched => return Err(unfetched(hook, &edit.file)),
            FileInSource::Absent => {
                return Err(hook.refuses(format!("there is no `{}`", edit.file.display())));
            }
        };
        let bytes = replaced(edit, &bytes).map_err(|found| {
            let times = |count: usize| match count {
                1 => "once".to_owned(),
                more => format!("{more} times"),
            };
            let found = match found {
                0 => "is missing".to_owned(),
                found => format!("occurs {}", times(found)),
            };
            hook.refuses(format!(
                "`{}` must occur {} in `{}`, but {found}: upstream has changed",
                crate::profile::shorten(&edit.find),
                times(edit.count),
                edit.file.display()
            ))
        })?;
        let executable = None;
        changes.put(edit.file.clone(), HookChange::Write { bytes, executable });
    }
    changes.forget_undone(read)?;
    Ok(changes)
}

/// Returns the parts of a patch for each file, in their order.
fn by_path(files: &[FilePatch]) -> Vec<(&Path, Vec<&FilePatch>)> {
    let mut found: Vec<(&Path, Vec<&FilePatch>)> = Vec::new();
    let mut places: BTreeMap<&Path, usize> = BTreeMap::new();
    for file in files {
        let place = *places.entry(&file.path).or_insert(found.len());
        if place == found.len() {
            found.push((&file.path, Vec::new()));
        }
        found[place].1.push(file);
    }
    found
}

/// Applies all parts of a patch that touch a file, in order, as in a series of commits; `None` if the file already has
/// all of them.
fn apply_parts(
    parts: &[&FilePatch],
    found: &FileInSource,
) -> std::result::Result<Option<HookChange>, String> {
    if let [part] = parts {
        return part.apply(found);
    }
    let mut changes = HookChanges::default();
    let path = Path::new("");
    let mut forward = || -> std::result::Result<usize, String> {
        let mut applied = 0;
        for part in parts {
            let change = changes.files.get(path);
            let now = change.map_or_else(|| found.clone(), |change| change.on(found));
            if let Some(change) = part.apply(&now)? {
                changes.put(path.to_owned(), change);
                applied += 1;
            }
        }
        Ok(applied)
    };
    let applied = forward();
    if applied == Ok(parts.len()) {
        return Ok(changes.files.remove(path));
    }
    // A later part may have changed the result of an earlier part, so the last part is looked for first.
    let mut now = Some(found.clone());
    for part in parts.iter().rev() {
        now = now.and_then(|now| match part.apply(&now) {
            Ok(None) => part.reverted(&now),
            Ok(Some(_)) | Err(_) => None,
        });
    }
    match (now, applied) {
        (Some(_), _) => Ok(None),
        (None, Ok(_)) => Err("the patch is partly applied in the source".to_owned()),
        (None, Err(why)) => Err(why),
    }
}

fn unfetched(hook: &Hook, path: &Path) -> Error {
    hook.refuses(format!(
        "`{}` is in a submodule that is not fetched yet",
        path.display()
    ))
    .help("from-step = \"STEP\" in its hook.toml names a step after the one that fetches it")
}

impl HookChange {
    /// Returns the entry after this change to the source's entry `found`.
    fn on(&self, found: &FileInSource) -> FileInSource {
        let Self::Write { bytes, executable } = self else {
            return FileInSource::Absent;
        };
        let may_run = match found {
            FileInSource::File { executable, .. } => *executable,
            FileInSource::Absent | FileInSource::Unfetched => false,
        };
        FileInSource::File {
            bytes: bytes.clone(),
            executable: executable.unwrap_or(may_run),
        }
    }
}

impl HookChanges {
    /// Returns the entry at a path after these changes.
    pub fn file(
        &self,
        path: &Path,
        read: &dyn Fn(&Path) -> Result<FileInSource>,
    ) -> Result<FileInSource> {
        let found = read(path)?;
        Ok(match self.files.get(path) {
            Some(change) => change.on(&found),
            None => found,
        })
    }

    /// Adds a change. A change that does not set the permission keeps the permission of an earlier change.
    pub(super) fn put(&mut self, path: PathBuf, mut change: HookChange) {
        if let HookChange::Write { executable, .. } = &mut change
            && let Some(HookChange::Write {
                executable: before, ..
            }) = self.files.get(&path)
        {
            *executable = executable.or(*before);
        }
        self.files.insert(path, change);
    }

    /// Drops the removal of files that only an earlier change had created.
    fn forget_undone(&mut self, read: &dyn Fn(&Path) -> Result<FileInSource>) -> Result<()> {
        let removed = self.files.iter();
        let removed = removed.filter(|(_, change)| **change == HookChange::Remove);
        let removed: Vec<PathBuf> = removed.map(|(path, _)| path.clone()).collect();
        for path in removed {
            if read(&path)? == FileInSource::Absent {
                self.files.remove(&path);
            }
        }
        Ok(())
    }
}

/// Replaces every occurrence, or returns their number if it is not the required one.
fn replaced(edit: &Edit, bytes: &[u8]) -> std::result::Result<Vec<u8>, usize> {
    let (mut out, mut rest, mut found) = (Vec::with_capacity(bytes.len()), bytes, 0);
    while let Some(place) = occurrence(edit, rest) {
        out.extend_from_slice(&rest[..place.start]);
        out.extend_from_slice(edit.replace.as_bytes());
        let line = &rest[place.clone()];
        if edit.whole_lines && !edit.replace.is_empty() && !edit.replace.ends_with('\n') {
            out.extend_from_slice(ending(line));
        }
        rest = &rest[place.end..];
        found += 1;
    }
    out.extend_from_slice(rest);
    match found == edit.count {
        true => Ok(out),
        false => Err(found),
    }
}

fn ending(line: &[u8]) -> &[u8] {
    match line {
        [.., b'\r', b'\n'] => b"\r\n",
        [.., b'\n'] => b"\n",
        _ => b"",
    }
}

/// Returns the place of the next occurrence.
fn occurrence(edit: &Edit, bytes: &[u8]) -> Option<Range<usize>> {
    let find = edit.find.as_bytes();
    if !edit.whole_lines {
        let mut windows = bytes.windows(find.len());
        let start = windows.position(|window| window == find)?;
        return Some(start..start + find.len());
    }
    let mut start = 0;
    for line in bytes.split_inclusive(|byte| *byte == b'\n') {
        let after = line.trim_ascii().strip_prefix(find).map(<[u8]>::trim_ascii);
        let is_end =
            |rest: &[u8]| rest.is_empty() || rest.starts_with(b"#") || rest.starts_with(b"//");
        if after.is_some_and(is_end) {
            return Some(start..start + line.len());
        }
        start += line.len();
    }
    None
}

impl FilePatch {
    /// Reverts this part of a patch in a file that has it; `None` if the earlier content is not known.
    fn reverted(&self, found: &FileInSource) -> Option<FileInSource> {
        let (bytes, executable) = match found {
            FileInSource::File { bytes, executable } => (bytes.as_slice(), *executable),
            FileInSource::Absent => (&b""[..], false),
            FileInSource::Unfetched => return None,
        };
        if self.creates {
            return Some(FileInSource::Absent);
        }
        Some(FileInSource::File {
            bytes: self.backward(bytes).ok()?.bytes,
            executable: match self.executable {
                // A deletion names the mode before it, a change the mode after it.
                Some(set) => set == self.removes,
                None => executable,
            },
        })
    }

    /// Applies this part of a patch to a file; `None` if the file already has it.
    fn apply(&self, found: &FileInSource) -> std::result::Result<Option<HookChange>, String> {
        let (bytes, executable) = match (found, self.creates) {
            (FileInSource::File { bytes, executable }, _) => (bytes.as_slice(), *executable),
            (FileInSource::Absent, true) => {
                return Ok(Some(HookChange::Write {
                    bytes: self.forward(b"")?.bytes,
                    executable: self.executable,
                }));
            }
            (FileInSource::Absent, false) if self.removes => return Ok(None),
            (FileInSource::Absent | FileInSource::Unfetched, _) => {
                return Err("there is no such file".to_owned());
            }
        };
        if self.creates {
            return match self.backward(bytes).is_ok_and(|rest| rest.bytes.is_empty()) {
                true => Ok(None),
                false => Err("it creates this file, but another one exists".to_owned()),
            };
        }
        let forward = self.forward(bytes);
        if self.removes {
            return match forward?.bytes.is_empty() {
                true => Ok(Some(HookChange::Remove)),
                false => Err("it removes this file, but the file has other content".to_owned()),
            };
        }
        // A patch that is already applied often fits in a second place too. The better match decides; a tie is an
        // error.
        let weight = |replayed: &Replayed| (replayed.in_place, replayed.matched);
        let with = match (forward, self.backward(bytes)) {
            // Only a change of the mode.
            _ if self.hunks.is_empty() => None,
            (Ok(with), Ok(without)) => match weight(&with).cmp(&weight(&without)) {
                Ordering::Greater => Some(with),
                Ordering::Less => None,
                Ordering::Equal => {
                    return Err("cannot tell whether it is already applied".to_owned());
                }
            },
            (Ok(with), Err(_)) => Some(with),
            (Err(_), Ok(_)) => None,
            (Err(why), Err(_)) => return Err(why),
        };
        let sets_mode = self.executable.is_some_and(|set| set != executable);
        let with = with.map(|with| with.bytes);
        let with = with.or_else(|| sets_mode.then(|| bytes.to_vec()));
        Ok(with.map(|bytes| HookChange::Write {
            bytes,
            executable: self.executable,
        }))
    }
}
