//! Owns an env's views of sources with hooks: overlays on the shared checkout, which stays unchanged.
//!
//! `envs/<env>/views/<volume>/` has one layer for each hook, created when the first step that sees it runs, and one
//! layer for steps' writes. `stack.json` lists the layers from the bottom up; unlisted layers are garbage. The checkout
//! is only ever the lowest layer of an overlay: the kernel writes nothing to it. Services cannot be given an overlay,
//! so they get a copy (see `copied`). Hooks' scripts run on either (see `script`).

mod copied;
mod manual_edits;
mod script;
mod stack;
mod written;

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

pub(crate) use crate::execute::view::manual_edits::{ByHand, count as count_manual_edits};
use fs_err as fs;
use sha2::{Digest as _, Sha256};
use stack::{Stack, StackLayer, Time, Times};

use super::Execution;
use crate::engine::View;
use crate::plan::ids::{LayerId, ViewLayerId};
use crate::plan::resolve::{Access, Step, Volume, VolumeKind};
use crate::plan::{self, resolve};
use crate::profile::hook::{self, FileInSource, Hook, HookChange, HookChanges};
use crate::store::{LockedEnv, Store};
use crate::sys::atomic::random_id;
use crate::sys::error::{Result, ResultExt as _, if_exists};
use crate::sys::shell::quoted_path;
use crate::tree::{self, file, mounts, overlay};

fn directory(env: &LockedEnv<'_>, volume: &str) -> PathBuf {
    env.directory().join("views").join(volume)
}

/// Directory of an env's views of volumes without hooks that must stay unchanged.
pub(crate) const APART: &str = "apart";

/// Names in the directory of a view.
const STACK: &str = "stack.json";
const WORK: &str = "work";
/// Mount point for overlays that only rockenv itself reads, each in its own namespace.
const AT: &str = "at";

fn work(directory: &Path) -> PathBuf {
    directory.join(WORK)
}

/// The directory that an env shows in place of a source with hooks.
#[derive(Clone, Debug)]
pub(crate) enum PatchedSource {
    /// The source, with an overlay on it.
    Overlay(View),
    /// Another directory.
    Copy(PathBuf),
    /// The source itself, read-only: a command ended before all hooks were applied.
    Unfinished,
}

/// The views of a container, by volume.
pub(super) type Views = BTreeMap<String, PatchedSource>;

/// Returns the view of a volume as the last step saw it; `None` if it had no hooks.
pub(super) fn existing(env: &LockedEnv<'_>, volume: &str) -> Result<Option<PatchedSource>> {
    let directory = directory(env, volume);
    let Some(stack) = Stack::read(&directory)? else {
        return Ok(None);
    };
    let Some(upper) = &stack.upper else {
        return Ok(Some(PatchedSource::Unfinished));
    };
    if env.known_record()?.service.is_some() {
        return Ok(Some(PatchedSource::Copy(directory.join(upper))));
    }
    // A command that was killed while it made another layer may have removed it.
    fs::create_dir_all(work(&directory))?;
    let view = stack.view(&directory, upper);
    Ok(Some(PatchedSource::Overlay(view)))
}

/// Returns whether a file that hooks changed in an env's view of a source is older in the source than the last step on
/// the view, which may have built objects from the changed file. The changed file's own time does not count, because it
/// can be older than both.
pub(crate) fn is_older(env: &Path, volume: &str, source: &Path) -> Result<bool> {
    let directory = env.join("views").join(volume);
    let Some(stack) = Stack::read(&directory)? else {
        return Ok(false);
    };
    // rockenv writes this file when a step begins on the view, and when the step succeeds.
    let found = fs::metadata(directory.join(STACK))?;
    let last = (found.mtime(), found.mtime_nsec());
    let mut paths = stack.times.keys();
    Ok(paths.any(|path| modified(source, path).is_some_and(|own| own < last)))
}

/// Returns the layer of the last step on an env's view of a source, if any.
pub(crate) fn last_layer(env: &Path, volume: &str) -> Result<Option<LayerId>> {
    let stack = Stack::read(&env.join("views").join(volume))?;
    Ok(stack.and_then(|stack| stack.written.from?.parse().ok()))
}

/// Returns the modification time of a regular file, in seconds and nanoseconds.
fn modified(top: &Path, path: &Path) -> Option<(i64, i64)> {
    let found = file::open(top, path).ok()??.metadata().ok()?;
    Some((found.mtime(), found.mtime_nsec()))
}

struct ViewedStep<'s> {
    /// The step that sees it, and its number.
    step: &'s Step,
    index: u32,
    volume: &'s Volume,
    parent: Option<&'s LayerId>,
    /// Name of the run, for logs.
    run: &'s str,
}

impl<'a> Execution<'a, '_> {
    /// Brings the views for `step` up to its hooks, and returns them by volume. If a view has files that a clean build
    /// would not have, also returns whether a command of `exec` or `shell` may have changed some.
    pub(super) fn views(
        &mut self,
        index: u32,
        step: &Step,
        parent: Option<&LayerId>,
        run: &str,
    ) -> Result<(Views, Option<bool>)> {
        let spec = self.spec;
        let mut views = BTreeMap::new();
        let mut foreign = None;
        for volume in spec.visible(step) {
            let hooks: Vec<&resolve::Hook> = spec.hooks_at(step, &volume.name).collect();
            if volume.kind == VolumeKind::Source && !hooks.is_empty() {
                let viewed = ViewedStep {
                    step,
                    index,
                    volume,
                    parent,
                    run,
                };
                let (view, by_hand) = self.view(&viewed, &hooks)?;
                foreign = foreign.max(by_hand);
                views.insert(volume.name.clone(), view);
            } else if self.apart.contains(&volume.name) {
                views.insert(volume.name.clone(), self.apart(volume)?);
            }
            if spec.hooks.iter().all(|hook| hook.volume != volume.name) {
                self.forget_view(&volume.name)?;
            }
        }
        Ok((views, foreign))
    }

    /// Returns a view of a volume that is removed with the env, together with what steps wrote to it.
    fn apart(&self, volume: &Volume) -> Result<PatchedSource> {
        const UPPER: &str = "upper";
        let directory = self.env.directory().join(APART).join(&volume.name);
        let source = self.container_context().directory_of(volume)?;
        let upper = directory.join(UPPER);
        let is_file = source.is_file();
        let is_copy = is_file || self.env.known_record()?.service.is_some();
        if !upper.exists() {
            fs::create_dir_all(&directory)?;
            if !is_file {
                no_mounts_inside(volume, &source)?;
            }
            match (is_file, is_copy) {
                (true, _) => {
                    let found = fs::metadata(&source)?;
                    fs::copy(&source, &upper)?;
                    std::os::unix::fs::chown(&upper, Some(found.uid()), Some(found.gid()))?;
                    fs::File::open(&upper)?.set_modified(found.modified()?)?;
                }
                (false, true) => drop(tree::copy_tree(&source, &upper)?),
                (false, false) => make_upper(self.store, &directory, UPPER, &source)?,
            }
        }
        Ok(match is_copy {
            true => PatchedSource::Copy(upper),
            false => PatchedSource::Overlay(View {
                layers: Vec::new(),
                upper,
                work: work(&directory),
            }),
        })
    }

    fn view(
        &mut self,
        viewed: &ViewedStep<'_>,
        hooks: &[&resolve::Hook],
    ) -> Result<(PatchedSource, Option<bool>)> {
        let volume = viewed.volume;
        let directory = directory(self.env, &volume.name);
        fs::create_dir_all(&directory)?;
        let source = self.container_context().directory_of(volume)?;
        no_mounts_inside(volume, &source)?;
        let base = self.base(viewed)?;
        let digests: Vec<&str> = hooks.iter().map(|hook| hook.digest.as_str()).collect();
        let mut stack = Stack::read(&directory)?.unwrap_or_default();
        let is_there = |name: &&str| directory.join(name).exists();
        let is_whole = stack.names().iter().all(is_there);
        // A layer was deleted outside rockenv, or a stale step wrote to the view: it begins anew.
        if !is_whole || stack.is_stale && self.stale.is_none() {
            stack.base.clear();
        }
        stack.is_stale = self.stale.is_some();
        stack.fit(&base, &digests);
        let foreign = self.begin_on_view(viewed, &directory, &mut stack)?;
        stack.write(&directory)?;
        if self.env.known_record()?.service.is_some() {
            let copy = self.copied(viewed, &directory, &mut stack, &source, hooks)?;
            return Ok((copy, foreign));
        }
        self.collect(&directory, &stack)?;
        let known = stack.times.clone();
        let settled = self.settled(&known, &volume.name, hooks)?;
        for wanted in &hooks[stack.hooks()..] {
            let hook = self.hook(wanted)?;
            // Steps' earlier writes become a layer below the hook, which may change them.
            if let Some(upper) = stack.upper.take()
                && !overlay::is_clean(&directory.join(&upper))?
            {
                stack.layers.push(StackLayer {
                    id: Some(upper),
                    hook: None,
                });
            }
            let id: ViewLayerId = random_id()?.try_into()?;
            make_upper(self.store, &directory, &id, &source)?;
            let made = in_layer(&mut stack, &directory, &id, &source, |at, times| {
                change(at, hook, &known, times)
            })?;
            self.tell(hook, &made);
            if let Some(script) = &hook.work.script {
                let view = stack.view(&directory, &id);
                let mut below = view.layers.clone();
                below.push(source.clone());
                self.script(viewed, hook, script, PatchedSource::Overlay(view))?;
                let changed =
                    script::changed_in(&directory.join(&id), &below, &directory.join(AT))?;
                script.check(hook, &made, changed, &directory.join(&id))?;
                script.keep_times(&directory.join(&id), &known, &mut stack.times)?;
            }
            let mut tops = stack.lowers(&directory);
            tops.push(directory.join(&id));
            let is_made = |path: &PathBuf| {
                let time = stack.times.get(path);
                time.is_some_and(|time| is_in(&tops, path, time))
            };
            if stack.hooks() + 1 == hooks.len() && !settled.keys().all(is_made) {
                in_layer(&mut stack, &directory, &id, &source, |at, times| {
                    renew(at, &settled, times)
                })?;
            }
            sync(&directory.join(&id))?;
            stack.layers.push(StackLayer {
                id: Some(id),
                hook: Some(wanted.digest.clone()),
            });
            stack.write(&directory)?;
        }
        if self.has_all(&volume.name, stack.hooks()) {
            forget_times(&directory, &mut stack);
        }
        if stack.upper.is_none() {
            let id: ViewLayerId = random_id()?.try_into()?;
            make_upper(self.store, &directory, &id, &source)?;
            stack.upper = Some(id);
            stack.write(&directory)?;
        }
        let view = existing(self.env, &volume.name)?
            .ok_or_else(|| unexpected!("the view of the source is missing"))?;
        Ok((view, foreign))
    }

    /// Returns the fingerprint of the source below the view. A step of this run that sees the source itself, before the
    /// first hook, may have fetched files into it. The hooks must then apply to the new content.
    fn base(&self, viewed: &ViewedStep<'_>) -> Result<String> {
        let name = &viewed.volume.name;
        let writes = |step: &Step| {
            self.spec
                .visible(step)
                .any(|volume| volume.name == *name && volume.access != Access::Ro)
                && self.spec.hooks_at(step, name).next().is_none()
        };
        let written = self
            .plan
            .steps
            .iter()
            .take_while(|planned| planned.name != viewed.step.name)
            .filter(|planned| planned.action == plan::Action::Run)
            .filter_map(|planned| self.spec.step(&planned.name))
            .any(writes);
        if !written {
            let known = self.spec.fingerprints.get(name).cloned();
            return known.ok_or_else(|| unexpected!("no fingerprint of source `{name}`"));
        }
        self.print_now(name)
    }

    /// Resets a view, so that it begins anew if its source gets hooks again.
    fn forget_view(&self, volume: &str) -> Result<()> {
        let directory = directory(self.env, volume);
        match Stack::read(&directory)? {
            Some(stack) if stack != Stack::default() => Stack::default().write(&directory),
            _ => Ok(()),
        }
    }

    /// Returns the known times of the files that no hook of a later step changes. After `hooks`, the times of these
    /// files are final.
    fn settled(&self, known: &Times, volume: &str, hooks: &[&resolve::Hook]) -> Result<Times> {
        let mut settled = known.clone();
        let all = self.spec.hooks.iter();
        for later in all.filter(|hook| hook.volume == volume && !hooks.contains(hook)) {
            let hook = self.hook(later)?;
            let scripted = hook.work.script.iter().flat_map(|script| &script.changes);
            let mut files = hook::files(hook)?;
            files.extend(scripted.cloned());
            settled.retain(|path, _| !files.contains(path));
        }
        Ok(settled)
    }

    /// Returns whether a volume has no more than this number of hooks. Otherwise later hooks may still change any file.
    fn has_all(&self, volume: &str, hooks: usize) -> bool {
        let all = self.spec.hooks.iter();
        hooks >= all.filter(|hook| hook.volume == volume).count()
    }

    fn hook(&self, wanted: &resolve::Hook) -> Result<&'a Hook> {
        self.hooks
            .get(&wanted.name)
            .ok_or_else(|| unexpected!("the hook `{}` was not read", wanted.name))
    }

    /// Removes leftovers of a killed command, and layers that are no longer part of the view, except for files
    /// changed by hand.
    fn collect(&self, directory: &Path, stack: &Stack) -> Result<()> {
        let names = stack.names();
        let commands = if_exists(fs::read_to_string(directory.join(manual_edits::COMMANDS)))?
            .unwrap_or_default();
        let entries = fs::read_dir(directory)?.map(|entry| Ok(entry?.path()));
        let mut entries = entries.collect::<Result<Vec<_>>>()?;
        // Each layer before its list of files changed by hand.
        entries.sort();
        for path in entries {
            let name = path.file_name().unwrap_or_default();
            let kept = name.to_str().is_some_and(|name| {
                names.contains(name.strip_suffix(manual_edits::LIST).unwrap_or(name))
                    || name.starts_with(manual_edits::KEPT)
                    || [STACK, WORK, AT, manual_edits::COMMANDS].contains(&name)
            });
            if kept {
                continue;
            }
            let aside = directory.join(format!("{}{}", manual_edits::KEPT, name.to_string_lossy()));
            if manual_edits::keep(&commands, &path, &aside)? {
                let why = match self.clean {
                    true => "the view begins anew",
                    false => "its source or an earlier hook changed",
                };
                let (files, aside) = ("manually edited files of the view", aside.display());
                let message = format!("{why}: {files} were moved to `{aside}`");
                self.reporter.warn(message);
            }
            self.store.discard(&path)?;
        }
        Ok(())
    }

    /// Reports patches that the source already has.
    fn tell(&self, hook: &Hook, changes: &HookChanges) {
        for patch in &changes.already {
            let message = format!("hook `{}`: the source already has `{patch}`", hook.name);
            self.reporter.warn(message);
        }
    }
}

/// Changes files in the topmost layer `id`, mounted on all existing layers, and their times.
fn in_layer<T: Send>(
    stack: &mut Stack,
    directory: &Path,
    id: &str,
    source: &Path,
    change: impl FnOnce(&Path, &mut Times) -> Result<T> + Send,
) -> Result<T> {
    let at = directory.join(AT);
    fs::create_dir_all(&at)?;
    let mut lowers = stack.lowers(directory);
    lowers.push(source.to_owned());
    let (diff, work) = (directory.join(id), work(directory));
    let times = &mut stack.times;
    overlay::in_throw_away_namespace(|| {
        let upper = overlay::Upper {
            diff: &diff,
            work: &work,
        };
        overlay::mount(&lowers, Some(upper), &at)?;
        change(&at, times)
    })?
}

/// Forgets the times of files that no hook changes any more. If a hook changes such a file again, the file must be
/// newer than everything that was built without the hook.
fn forget_times(directory: &Path, stack: &mut Stack) {
    let tops = stack.names().into_iter().map(|id| directory.join(id));
    let tops: Vec<PathBuf> = tops.collect();
    stack.times.retain(|path, time| is_in(&tops, path, time));
}

/// Returns whether one of the layers has the file with this time.
fn is_in(layers: &[PathBuf], path: &Path, time: &Time) -> bool {
    let mut found = layers.iter().map(|layer| modified(layer, path));
    found.any(|found| found == Some(time.modified()))
}

/// Gives new times to the files that hooks changed before and no hook changes now: the source's own files are older
/// than everything that was built from the changed ones. `known` has the times from before, and `times` those of the
/// files that hooks change now.
fn renew(at: &Path, known: &Times, times: &mut Times) -> Result<()> {
    for path in known.keys() {
        let time = times.get(path).map(Time::modified);
        if time.is_some() && time == modified(at, path) {
            continue;
        }
        match file::read(at, path) {
            Ok(file::FoundEntry::File { bytes, .. }) => {
                let time = write(at, path, &bytes, None, known)?;
                times.insert(path.clone(), time);
            }
            // A hook created the file, or the file is too large for a hook.
            _ => drop(times.remove(path)),
        }
    }
    Ok(())
}

/// Applies the changes of a hook's patches and edits in a directory of the env. `known` has the times of the files from
/// before, and `times` gets the new ones.
fn change(at: &Path, hook: &Hook, known: &Times, times: &mut Times) -> Result<HookChanges> {
    let changes = hook::apply(hook, &|path| file_in_source(at, path))?;
    for (path, change) in &changes.files {
        match change {
            HookChange::Remove => file::remove(at, path)?,
            HookChange::Write { bytes, executable } => {
                let time = write(at, path, bytes, *executable, known)?;
                times.insert(path.clone(), time);
            }
        }
    }
    Ok(changes)
}

/// Writes a file. If `known` has the same content, the file gets the known time.
fn write(
    at: &Path,
    path: &Path,
    bytes: &[u8],
    executable: Option<bool>,
    known: &Times,
) -> Result<Time> {
    let sha256 = hex::encode(Sha256::digest(bytes));
    let known = known.get(path).filter(|time| time.sha256 == sha256);
    let known = known.map(Time::modified);
    let (seconds, nanoseconds) = file::write(at, path, bytes, executable, known)?;
    Ok(Time {
        sha256,
        seconds,
        nanoseconds,
    })
}

/// Reads the entry at a path of a source.
pub(crate) fn file_in_source(root: &Path, path: &Path) -> Result<FileInSource> {
    Ok(match file::read(root, path)? {
        file::FoundEntry::File { bytes, mode } => FileInSource::File {
            bytes,
            executable: mode & 0o100 != 0,
        },
        file::FoundEntry::Absent => FileInSource::Absent,
        file::FoundEntry::Empty => FileInSource::Unfetched,
    })
}

fn make_upper(store: &Store, directory: &Path, id: &str, source: &Path) -> Result<()> {
    let work = work(directory);
    // A layer that is frozen by now left its scratch directory. Each layer gets its own.
    store.discard(&work)?;
    let upper = overlay::Upper {
        diff: &directory.join(id),
        work: &work,
    };
    overlay::create_upper(upper, source)
}

/// Refuses a source with mounts inside, because neither an overlay nor a copy shows them.
fn no_mounts_inside(volume: &Volume, source: &Path) -> Result<()> {
    let inside = mounts::at_or_below(source)?
        .into_iter()
        .find(|point| point != source);
    match inside {
        None => Ok(()),
        Some(point) => Err(invalid!(
            "another file system is mounted in volume `{}`, at `{}`: steps would not see it, because a hook or `verify` replaces this volume",
            volume.name,
            point.display()
        )
        .help(format!("umount {}", quoted_path(&point)))),
    }
}

/// Syncs a layer to disk. The overlay that made it does not, and a hook must survive a power failure.
fn sync(directory: &Path) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let kind = entry.file_type()?;
        if kind.is_dir() {
            sync(&entry.path())?;
        } else if kind.is_file() {
            fs::File::open(entry.path())?.sync_all()?;
        }
    }
    fs::File::open(directory)?
        .sync_all()
        .context(|| format!("cannot write `{}` to disk", directory.display()))
}
