//! Owns the views that an env has of sources with hooks: overlays on the shared checkout, which stays as it is.
//!
//! `envs/<env>/views/<volume>/` has one layer for each hook, made when the first step that sees it runs, and one that
//! takes what steps write. `stack.json` names them from the bottom up; what it does not name is garbage. The
//! checkout is only ever the lowest layer of an overlay: the kernel writes nothing to it. Services cannot be handed
//! an overlay: they get a copy, see `copied`.

mod copied;
mod stack;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use fs_err as fs;
use sha2::{Digest as _, Sha256};
use stack::{Layer, Stack, Time};

use super::{Ending, Execution};
use crate::engine::View;
use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::hook::{self, Change, Changes, Found, Hook};
use crate::profile::hex;
use crate::rootfs::{self, file, overlay};
use crate::spec::{self, Action, Step, User, Volume, VolumeKind};
use crate::store::{LockedEnv, Store, atomic, random_id};
use crate::ui::event::Event;

fn directory(env: &LockedEnv<'_>, volume: &str) -> PathBuf {
    env.directory().join("views").join(volume)
}

fn stack_file(directory: &Path) -> PathBuf {
    directory.join("stack.json")
}

fn work(directory: &Path) -> PathBuf {
    directory.join("work")
}

/// What an env shows in place of a source with hooks.
#[derive(Clone, Debug)]
pub enum Shown {
    /// The source, with an overlay on it.
    Overlay(View),
    /// Another directory.
    Copy(PathBuf),
}

/// What the views of a container are, by volume.
pub(super) type Views = BTreeMap<String, Shown>;

/// Returns the view of a volume as the last step saw it; nothing where none had hooks.
pub(super) fn existing(env: &LockedEnv<'_>, volume: &str) -> Result<Option<Shown>> {
    let directory = directory(env, volume);
    let Some(stack) = atomic::read_json::<Stack>(&stack_file(&directory))? else {
        return Ok(None);
    };
    let is_copy = env.known_record()?.service.is_some();
    Ok(stack.upper.as_ref().map(|upper| match is_copy {
        true => Shown::Copy(directory.join(upper)),
        false => Shown::Overlay(View {
            layers: stack.lowers(&directory),
            upper: directory.join(upper),
            work: work(&directory),
        }),
    }))
}

impl<'a> Execution<'a, '_> {
    /// Brings the views that `step` sees to the hooks that it is to see, and returns them by volume.
    pub(super) fn views(
        &mut self,
        index: u32,
        step: &Step,
        parent: Option<&str>,
        run: &str,
    ) -> Result<Views> {
        let spec = self.spec;
        let mut views = BTreeMap::new();
        for volume in spec.visible(step) {
            let hooks: Vec<&spec::Hook> = spec.hooks_at(step, &volume.name).collect();
            if volume.kind == VolumeKind::Source && !hooks.is_empty() {
                let view = self.view(index, step, volume, &hooks, parent, run)?;
                views.insert(volume.name.clone(), view);
            }
        }
        Ok(views)
    }

    fn view(
        &mut self,
        index: u32,
        step: &Step,
        volume: &Volume,
        hooks: &[&spec::Hook],
        parent: Option<&str>,
        run: &str,
    ) -> Result<Shown> {
        let directory = directory(self.env, &volume.name);
        fs::create_dir_all(&directory)?;
        let source =
            super::container::directory_of(self.env, self.store, self.spec, volume, self.sources)?;
        no_mounts_inside(volume, &source)?;
        let base = self.fingerprints.get(&volume.name).ok_or_else(|| {
            Error::unexpected(format!("no fingerprint of source `{}`", volume.name))
        })?;
        let digests: Vec<&str> = hooks.iter().map(|hook| hook.digest.as_str()).collect();
        let mut stack: Stack = atomic::read_json(&stack_file(&directory))?.unwrap_or_default();
        let there = stack.fit(base, &digests);
        if self.env.known_record()?.service.is_some() {
            return self.copied(&directory, &mut stack, &source, hooks, there);
        }
        atomic::write_json(&stack_file(&directory), &stack)?;
        collect(self.store, &directory, &stack)?;
        for wanted in &hooks[there..] {
            let hook = self.hook(wanted)?;
            // What steps wrote until now is below the hook, which may change it.
            if let Some(upper) = stack.upper.take()
                && !overlay::is_clean(&directory.join(&upper))?
            {
                stack.layers.push(Layer {
                    id: upper,
                    hook: None,
                });
            }
            let id = random_id()?;
            let made = self.layer(&mut stack, &directory, &id, &source, hook)?;
            if let Some(script) = &hook.work.script {
                let place = Place {
                    directory: &directory,
                    stack: &stack,
                    id: &id,
                    volume,
                };
                self.script(index, step, &place, hook, script, &made, parent, run)?;
            }
            sync(&directory.join(&id))?;
            stack.layers.push(Layer {
                id,
                hook: Some(wanted.digest.clone()),
            });
            atomic::write_json(&stack_file(&directory), &stack)?;
        }
        if stack.upper.is_none() {
            let id = random_id()?;
            make_upper(self.store, &directory, &id, &source)?;
            stack.upper = Some(id);
            atomic::write_json(&stack_file(&directory), &stack)?;
        }
        existing(self.env, &volume.name)?
            .ok_or_else(|| Error::unexpected("the view that was made is not there"))
    }

    /// Makes the layer `id` with what the patches and edits of a hook change, on all the layers there are.
    fn layer(
        &self,
        stack: &mut Stack,
        directory: &Path,
        id: &str,
        source: &Path,
        hook: &Hook,
    ) -> Result<Changes> {
        make_upper(self.store, directory, id, source)?;
        let at = directory.join("at");
        fs::create_dir_all(&at)?;
        let mut lowers = stack.lowers(directory);
        lowers.push(source.to_owned());
        let (diff, work) = (directory.join(id), work(directory));
        let times = &mut stack.times;
        let changes = overlay::in_throw_away_namespace(|| {
            let upper = overlay::Upper {
                diff: &diff,
                work: &work,
            };
            overlay::mount(&lowers, Some(upper), &at, false)?;
            change(&at, hook, times)
        })??;
        self.tell(hook, &changes);
        Ok(changes)
    }

    fn hook(&self, wanted: &spec::Hook) -> Result<&'a Hook> {
        self.hooks
            .get(&wanted.name)
            .ok_or_else(|| Error::unexpected(format!("the hook `{}` was not read", wanted.name)))
    }

    /// Says which patches the source has already.
    fn tell(&self, hook: &Hook, changes: &Changes) {
        for patch in &changes.already {
            self.reporter.emit(&Event::Warning {
                message: format!("hook `{}`: the source has `{patch}` already", hook.name),
            });
        }
    }

    /// Runs a hook's script in a container of the step's kind, on the layer `place.id`.
    #[expect(
        clippy::too_many_arguments,
        reason = "one caller, with all that a container needs"
    )]
    fn script(
        &mut self,
        index: u32,
        step: &Step,
        place: &Place<'_>,
        hook: &Hook,
        script: &hook::Script,
        made: &Changes,
        parent: Option<&str>,
        run: &str,
    ) -> Result<()> {
        let job = Step {
            name: format!("hook-{}", hook.name),
            user: User::Builder,
            workdir: place.volume.target.clone(),
            network: false,
            gpu: false,
            timeout: None,
            inputs: Vec::new(),
            volumes: vec![place.volume.name.clone()],
            action: Action::Run {
                shell: script.shell.clone(),
                script: script.run.clone(),
            },
            ..step.clone()
        };
        let view = View {
            layers: place.stack.lowers(place.directory),
            upper: place.directory.join(place.id),
            work: work(place.directory),
        };
        let views = Views::from([(place.volume.name.clone(), Shown::Overlay(view))]);
        let log = format!("logs/{run}/{index:02}-{}.log", job.name);
        let tree = self.env.thaw(parent)?;
        let ran = self.contain(index, &job, &tree, parent, &log, 1, &views);
        let trees = self.env.directory().join("trees");
        self.store.discard(&trees.join(&tree))?;
        match ran?.ending {
            Ending::Exited { code: 0, .. } => {}
            Ending::Interrupted(signal) => {
                return Err(Error::new(Kind::Signal(signal), "interrupted"));
            }
            Ending::Exited { code, .. } => {
                return Err(Error::new(
                    Kind::StepFailed,
                    format!(
                        "the script of hook `{}` failed with exit code {code}",
                        hook.name
                    ),
                )
                .help(format!("less {}", self.env.directory().join(log).display())));
            }
            Ending::TimedOut | Ending::Lost => {
                return Err(Error::new(
                    Kind::StepFailed,
                    format!("the script of hook `{}` was interrupted", hook.name),
                ));
            }
        }
        let diff = place.directory.join(place.id);
        let changed = changed(&diff, made)?;
        let said: BTreeSet<PathBuf> = script.changes.iter().cloned().collect();
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
            "its script should change {}, and changed {}",
            list(&said),
            list(&changed)
        )))
    }
}

/// Where a script's changes go.
struct Place<'a> {
    directory: &'a Path,
    stack: &'a Stack,
    id: &'a str,
    volume: &'a Volume,
}

/// Makes the changes of a hook's patches and edits in a directory that is the env's own.
fn change(at: &Path, hook: &Hook, times: &mut BTreeMap<PathBuf, Time>) -> Result<Changes> {
    let changes = hook::apply(hook, &|path| found(at, path))?;
    for (path, change) in &changes.files {
        match change {
            Change::Remove => file::remove(at, path)?,
            Change::Write { bytes, executable } => {
                let sha256 = hex(&Sha256::digest(bytes));
                let known = times.get(path).filter(|time| time.sha256 == sha256);
                let known = known.map(|time| (time.seconds, time.nanoseconds));
                let (seconds, nanoseconds) = file::write(at, path, bytes, *executable, known)?;
                let time = Time {
                    sha256,
                    seconds,
                    nanoseconds,
                };
                times.insert(path.clone(), time);
            }
        }
    }
    Ok(changes)
}

fn found(root: &Path, path: &Path) -> Result<Found> {
    Ok(match file::read(root, path)? {
        file::Entry::File { bytes, mode } => Found::File {
            bytes,
            executable: mode & 0o100 != 0,
        },
        file::Entry::Absent => Found::Absent,
        file::Entry::Empty => Found::Unfetched,
    })
}

/// Reads what is at a path of a source, for [`hook::early`].
pub fn look(source: &Path, path: &Path) -> Result<Found> {
    found(source, path)
}

fn make_upper(store: &Store, directory: &Path, id: &str, source: &Path) -> Result<()> {
    let work = work(directory);
    // Of a layer that is frozen by now: each gets a scratch directory of its own.
    store.discard(&work)?;
    let upper = overlay::Upper {
        diff: &directory.join(id),
        work: &work,
    };
    overlay::create_upper(upper, source)
}

/// Throws away what a killed command left, and layers that are no longer part of the view.
fn collect(store: &Store, directory: &Path, stack: &Stack) -> Result<()> {
    let names = stack.names();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name();
        let kept = name.to_str().is_some_and(|name| {
            names.contains(name) || name == "stack.json" || name == "at" || name == "work"
        });
        if !kept {
            store.discard(&entry.path())?;
        }
    }
    Ok(())
}

/// An overlay does not show what is mounted below its lowest layer.
fn no_mounts_inside(volume: &Volume, source: &Path) -> Result<()> {
    let inside = rootfs::mounts_at_or_below(source)?
        .into_iter()
        .find(|point| point != source);
    match inside {
        None => Ok(()),
        Some(point) => Err(Error::invalid(format!(
            "source `{}` has something mounted in it, at `{}`: a view with hooks would not show it",
            volume.name,
            point.display()
        ))
        .help(format!("umount {}", point.display()))),
    }
}

/// Returns the files in a layer that the script changed: not those that are as the hook's patches and edits made them.
fn changed(diff: &Path, made: &Changes) -> Result<BTreeSet<PathBuf>> {
    let mut found = BTreeSet::new();
    let mut left = vec![PathBuf::new()];
    while let Some(below) = left.pop() {
        for entry in fs::read_dir(diff.join(&below))? {
            let entry = entry?;
            let path = below.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                left.push(path);
            } else {
                found.insert(path);
            }
        }
    }
    for (path, change) in &made.files {
        let same = match change {
            Change::Write { bytes, .. } => {
                matches!(file::read(diff, path), Ok(file::Entry::File { bytes: now, .. }) if now == *bytes)
            }
            // A character device stands for what is not there.
            Change::Remove => file::read(diff, path).is_err(),
        };
        if same {
            found.remove(path);
        }
    }
    Ok(found)
}

/// Writes a layer to disk: the overlay it was made by does not, and a hook must not get lost with the power.
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
