//! Owns hooks' scripts: running one in a container of its env, on the env's own view of the source, and checking its
//! changes.

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;

use super::stack::Times;
use super::{PatchedSource, ViewedStep, Views, modified, write};
use crate::execute::run_container::Attempt;
use crate::execute::{Ending, Execution};
use crate::plan::resolve::{Action, Step, User};
use crate::plan::step_log::StepLog;
use crate::profile::hook::{Hook, HookChange, HookChanges, Script};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::name::StepName;
use crate::sys::shell::quoted;
use crate::tree::{self, file, overlay};

impl Execution<'_, '_> {
    /// Runs a hook's script in a container like the step's, with `shown` in place of the volume.
    pub(super) fn script(
        &mut self,
        viewed: &ViewedStep<'_>,
        hook: &Hook,
        script: &Script,
        shown: PatchedSource,
    ) -> Result<()> {
        let job = Step {
            name: StepName::of_hook(&hook.name)?,
            user: User::Builder,
            workdir: viewed.volume.target.clone(),
            network: false,
            gpu: false,
            timeout: None,
            inputs: Vec::new(),
            volumes: vec![viewed.volume.name.clone()],
            action: Action::Run {
                shell: script.shell.clone(),
                script: script.run.clone(),
            },
            ..viewed.step.clone()
        };
        let (index, parent) = (viewed.index, viewed.parent);
        let views = Views::from([(viewed.volume.name.clone(), shown)]);
        let attempt = Attempt {
            index,
            step: &job,
            tree: self.env.checkout_tree(parent)?,
            parent,
            log: StepLog::first(viewed.run, index, &job.name)
                .to_string()
                .parse()?,
            jobs: 1,
            views: &views,
        };
        let ran = self.run_container(&attempt);
        self.discard_tree(&attempt)?;
        match ran?.ending {
            Ending::Exited { code: 0, .. } => Ok(()),
            Ending::Interrupted(signal) => Err(Error::new(Kind::Signal(signal), "interrupted")),
            Ending::Exited { code, .. } => Err(step_failed!(
                "the script of hook `{}` failed with exit code {code}",
                hook.name
            )
            .help(format!(
                "rockenv logs {} {}",
                self.env.name(),
                quoted(&job.name)
            ))),
            Ending::TimedOut => Err(step_failed!(
                "the script of hook `{}` was interrupted",
                hook.name
            )),
            Ending::Stopped | Ending::Lost => Err(unavailable!(
                "the container of the script of hook `{}` was stopped by another process",
                hook.name
            )),
        }
    }
}

impl Script {
    /// Refuses a script that changed other files than it declares. A file in the directory `inside` that equals the
    /// result of the hook's patches and edits, `made`, was not changed by the script.
    pub(super) fn check(
        &self,
        hook: &Hook,
        made: &HookChanges,
        mut changed: BTreeSet<PathBuf>,
        inside: &Path,
    ) -> Result<()> {
        for (path, change) in &made.files {
            let same = match change {
                HookChange::Write { bytes, .. } => {
                    matches!(file::read(inside, path), Ok(file::FoundEntry::File { bytes: now, .. }) if now == *bytes)
                }
                // In a layer, a character device marks a deleted file.
                HookChange::Remove => {
                    !matches!(file::read(inside, path), Ok(file::FoundEntry::File { .. }))
                }
            };
            if same {
                changed.remove(path);
            }
        }
        let said: BTreeSet<PathBuf> = self.changes.iter().cloned().collect();
        if changed == said {
            return Ok(());
        }
        let list = |paths: &BTreeSet<PathBuf>| match paths.is_empty() {
            true => "nothing".to_owned(),
            false => {
                let names = paths.iter().take(5).map(|path| path.display().to_string());
                names.collect::<Vec<_>>().join(", ")
            }
        };
        Err(hook.refuses(format!(
            "its script should change {}, but changed {}",
            list(&said),
            list(&changed)
        )))
    }

    /// Gives the files that the script changed the known times, if the content is the same, as `change` does.
    pub(super) fn keep_times(&self, inside: &Path, known: &Times, times: &mut Times) -> Result<()> {
        let mut paths: Vec<&PathBuf> = self.changes.iter().collect();
        // Files with new times keep their order: make compares the times of files that the script made from each other.
        paths.sort_by_key(|path| modified(inside, path));
        for path in paths {
            // A file that the script removed, or one that is too large for `change`, has no time.
            if let Ok(file::FoundEntry::File { bytes, .. }) = file::read(inside, path) {
                let time = write(inside, path, &bytes, None, known)?;
                times.insert(path.clone(), time);
            }
        }
        Ok(())
    }
}

/// The files of a directory at one time, each with its inode and change time, which no process can set.
type FileIdentities = BTreeMap<PathBuf, (u64, i64, i64)>;

/// Lists the files of a directory that no process writes to meanwhile.
pub(super) fn identities(top: &Path) -> Result<FileIdentities> {
    let identity = |(path, _): (PathBuf, _)| {
        let stat = fs::symlink_metadata(top.join(&path))?;
        Ok((path, (stat.ino(), stat.ctime(), stat.ctime_nsec())))
    };
    let leaves = tree::leaves(top)?.into_iter();
    leaves.map(identity).collect()
}

/// Returns the files that are in one list only, or differ.
pub(super) fn differences(before: &FileIdentities, after: &FileIdentities) -> BTreeSet<PathBuf> {
    let all = before.keys().chain(after.keys());
    let changed = all.filter(|path| before.get(*path) != after.get(*path));
    changed.cloned().collect()
}

/// Returns the files that a layer changes, makes or removes on top of the layers `below` it, topmost first. `at` is a
/// mount point for that.
pub(super) fn changed_in(layer: &Path, below: &[PathBuf], at: &Path) -> Result<BTreeSet<PathBuf>> {
    let (mut found, mut hidden) = (BTreeSet::new(), Vec::new());
    let mut left = vec![PathBuf::new()];
    while let Some(directory) = left.pop() {
        for entry in fs::read_dir(layer.join(&directory))? {
            let entry = entry?;
            let path = directory.join(entry.file_name());
            let kind = entry.file_type()?;
            if kind.is_dir() {
                if overlay::is_opaque(&entry.path())? {
                    hidden.push(path.clone());
                }
                left.push(path);
            } else if kind.is_char_device() && entry.metadata()?.rdev() == 0 {
                hidden.push(path);
            } else {
                found.insert(path);
            }
        }
    }
    if hidden.is_empty() {
        return Ok(found);
    }
    // A removed or replaced directory stands for all the files that were in it.
    fs::create_dir_all(at)?;
    let gone = overlay::in_throw_away_namespace(|| -> Result<BTreeSet<PathBuf>> {
        overlay::mount(below, None, at)?;
        let mut gone = BTreeSet::new();
        for path in hidden {
            let was = at.join(&path);
            match fs::symlink_metadata(&was) {
                Ok(stat) if stat.is_dir() => {
                    let leaves = tree::leaves(&was)?.into_iter();
                    gone.extend(leaves.map(|(below, _)| path.join(below)));
                }
                Ok(_) => drop(gone.insert(path)),
                // A directory that is new.
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(gone)
    })??;
    found.extend(gone);
    Ok(found)
}
