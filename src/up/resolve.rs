//! Owns resolving: the inputs of keys, gathered from the image, the sources and the hooks, and the resulting spec.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::downloads::Fetching;
use super::locked::Locked;
use super::observe::plan_for;
use super::select::Selection;
use super::{Finished, Run, base_image, checkout, hooks, locked, summary};
use crate::execute::Ended;
use crate::plan::resolve::{self, BaseImage, Inputs, Spec, VolumeKind, VolumeSource, is_untracked};
use crate::plan::{Action, Observed, Plan, PlanStep, StepOptions, lockfile};
use crate::profile::hook::Hook;
use crate::profile::{self, Profile};
use crate::rocm::therock::ArtifactFingerprints;
use crate::store::history::LayerSearch;
use crate::store::images::Image;
use crate::store::results::BlockedResult;
use crate::store::source::{self, Git, Repository};
use crate::store::{LockedEnv, Store};
use crate::sys::error::Result;
use crate::sys::name::StepName;
use crate::sys::signals::Cancel;
use crate::ui::size;

/// How the keys after a step use TheRock's fingerprints.
#[derive(Debug, Serialize)]
pub(crate) struct FingerprintUse {
    /// The step that configures TheRock.
    step: StepName,
    /// Number of artifacts with a fingerprint; `None` if the step must run first.
    therock: Option<usize>,
    /// Artifacts without a fingerprint, for which the source's stands in.
    own: Vec<String>,
}

impl std::fmt::Display for FingerprintUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let step = &self.step;
        let Some(count) = self.therock else {
            let later = "some may already be built";
            return write!(f, "later steps are planned after `{step}` runs; {later}");
        };
        let artifacts = size::count(count, "artifact");
        write!(
            f,
            "after `{step}` keys have TheRock's fingerprints of {artifacts}"
        )?;
        match self.own.is_empty() {
            true => Ok(()),
            false => write!(f, ", and the source's own for {}", self.own.join(", ")),
        }
    }
}

/// The inputs of keys: those of the selection, and what the image, the sources and the hooks add.
#[derive(Debug)]
pub(crate) struct Gathered<'a> {
    pub(crate) selection: &'a Selection,
    pub(crate) inputs: Inputs,
    pub(crate) hooks: BTreeMap<String, Hook>,
    /// The directory of each source that exists.
    pub(crate) sources: BTreeMap<String, PathBuf>,
    /// The image; `None` until it is built or a registry delivers it.
    pub(crate) image: Option<Image>,
    /// Whether the build starts clean, and so accepts only clean layers.
    clean: bool,
}

/// The missing inputs of a prediction.
#[derive(Debug, Default)]
pub(crate) struct MissingInputs {
    /// Images and sources that `up` makes, and other notes.
    pub(crate) notes: Vec<String>,
    /// Sources that only the user can provide.
    pub(crate) refused: Vec<String>,
}

impl<'a> Gathered<'a> {
    /// Begins with the inputs of the selection. With a lock file, these have all data of the image that the keys need.
    /// Without one, the image's key is unknown until `base_on` or `announce`.
    pub(crate) fn new(selection: &'a Selection, clean: bool) -> Self {
        Self {
            selection,
            inputs: selection.inputs.clone(),
            hooks: selection.hooks.clone(),
            sources: BTreeMap::new(),
            image: None,
            clean,
        }
    }

    /// Gathers the existing image and sources without making any; returns the missing ones too.
    pub(crate) fn predict(
        selection: &'a Selection,
        store: Option<&Store>,
        clean: bool,
    ) -> Result<(Self, MissingInputs)> {
        let mut missing = MissingInputs::default();
        missing.notes.clone_from(&selection.notes);
        let image = match store {
            Some(store) => base_image::there(store, selection)?,
            None => None,
        };
        let mut gathered = Self::new(selection, clean);
        if let Some(image) = image {
            gathered.base_on(image);
        } else {
            let name = &selection.image;
            let note = format!("image `{name}` is not built yet");
            missing.notes.push(note);
        }
        let git = Git::new(&selection.inputs.user);
        let volumes = resolve::volumes(&selection.profile, &gathered.inputs)?.into_iter();
        for volume in volumes.filter(|volume| volume.kind == VolumeKind::Source) {
            let name = &volume.name;
            let directory = match (&volume.source, store) {
                (VolumeSource::Git(source), Some(store)) => {
                    let repository = Repository::new(name, source);
                    Some(repository.directory_at(store, &git, selection.commit(name))?)
                }
                (VolumeSource::Path(path), _) => Some(path.clone()),
                (VolumeSource::Git(_), None) | (VolumeSource::Store, _) => None,
            };
            let Some(path) = directory.filter(|path| path.is_dir()) else {
                match &volume.source {
                    VolumeSource::Path(path) => {
                        let error = source::is_there(name, path).err();
                        let message = error.map(|error| error.message().to_owned());
                        missing.refused.extend(message);
                    }
                    VolumeSource::Git(_) | VolumeSource::Store => missing
                        .notes
                        .push(format!("source `{name}` is not fetched yet")),
                }
                for input in gathered.inputs_in(name) {
                    // A lock file may have provided the fingerprint without the source.
                    let print = gathered.inputs.fingerprints.entry(input);
                    print.or_insert(None);
                }
                continue;
            };
            let known = store.map(|store| store.known_fingerprint(&path));
            let read = |path: &Path| match &known {
                Some(known) => git.known_fingerprint(path, known),
                None => git.fingerprint(path),
            };
            gathered.add_source(volume.name, path, &git, read)?;
        }
        if let Some(store) = store {
            hooks::known_patches(gathered.hooks.values_mut(), store)?;
        }
        let notes = checkout::use_target_table(&mut gathered)?;
        missing.notes.extend(notes);
        hooks::apply_to_inputs(&mut gathered, &git)?;
        missing.notes.extend(hooks::ask(&gathered)?);
        Ok((gathered, missing))
    }

    /// Gathers all inputs but the image: fetches missing sources and patches, reads the fingerprints that steps need,
    /// and asks the sources whether the hooks will apply. Returns notes for the user.
    pub(super) fn fetch(&mut self, with: Fetching<'_>) -> Result<Vec<String>> {
        let (store, offline) = (with.store, with.offline);
        let selection = self.selection;
        let volumes = resolve::volumes(&selection.profile, &self.inputs)?.into_iter();
        let cancel = Cancel::new(&with.task.signals);
        let git = Git::until(&selection.inputs.user, &cancel);
        for volume in volumes.filter(|volume| volume.kind == VolumeKind::Source) {
            let directory = match volume.source {
                VolumeSource::Git(source) => {
                    let mut say = |message: &str| with.task.reporter.note(message);
                    let repository = Repository::new(&volume.name, &source);
                    let commit = selection.commit(&volume.name);
                    let directory = repository.prepare_at(store, &git, commit, offline, &mut say);
                    cancel.outcome(directory)?
                }
                VolumeSource::Path(path) => {
                    source::is_there(&volume.name, &path)?;
                    path
                }
                VolumeSource::Store => continue,
            };
            let known = store.known_fingerprint(&directory);
            let read = |path: &Path| git.remembered_fingerprint(path, &known);
            cancel.outcome(self.add_source(volume.name, directory, &git, read))?;
        }
        let mut notes = checkout::use_target_table(self)?;
        let fetched = hooks::fetch_patches(&mut self.hooks, store, offline, &cancel);
        cancel.outcome(fetched)?;
        cancel.outcome(hooks::apply_to_inputs(self, &git))?;
        notes.extend(hooks::ask(self)?);
        Ok(notes)
    }

    /// Uses an image of the store.
    pub(super) fn base_on(&mut self, image: Image) {
        self.announce(&image);
        self.image = Some(image);
    }

    /// Uses the key and the variables of an image that is not in the store, but at a registry.
    pub(super) fn announce(&mut self, image: &Image) {
        self.inputs.image = BaseImage::Known(image.key.clone());
        self.inputs.image_env = image.env.clone().unwrap_or_default();
    }

    /// Returns the inputs of steps that are part of a source, and the source itself if hooks change it.
    fn inputs_in(&self, volume: &str) -> BTreeSet<String> {
        let steps = self.selection.profile.steps.iter();
        let inputs = steps.flat_map(|step| &step.inputs);
        let inputs = inputs.filter(|name| profile::input(name).0 == volume);
        let mut inputs: BTreeSet<String> = inputs.cloned().collect();
        if self.hooks.values().any(|hook| hook.work.volume == volume) {
            inputs.insert(volume.to_owned());
        }
        inputs
    }

    /// Adds an existing source with the fingerprints that steps and hooks need; `whole` reads the one of the whole
    /// source. Refuses a source that differs from the lock file.
    fn add_source(
        &mut self,
        volume: String,
        at: PathBuf,
        git: &Git<'_>,
        whole: impl Fn(&Path) -> Result<String>,
    ) -> Result<()> {
        let whole = once(whole);
        for input in self.inputs_in(&volume) {
            let print = match profile::input(&input).1 {
                "" => whole(&at)?,
                path => git.fingerprint_of(&at, Path::new(path), None)?,
            };
            self.inputs.fingerprints.insert(input, Some(print));
        }
        self.compare(&volume, &at, &whole)?;
        self.sources.insert(volume, at);
        Ok(())
    }

    /// Reports which fingerprints are in the keys.
    pub(crate) fn fingerprint_uses(&self, spec: &Spec) -> Vec<FingerprintUse> {
        let mut said = Vec::new();
        for step in spec.steps.iter().filter(|step| step.fingerprints.is_some()) {
            let known = self.inputs.prints.get(&step.key);
            let inputs = step.inputs.iter();
            let mut prints = inputs.filter_map(|name| self.inputs.fingerprints.get(name)?.as_ref());
            let blind = prints.any(|print| is_untracked(print));
            let own: Vec<String> = known.map_or_else(Vec::new, |prints| {
                let all = prints.artifacts.iter();
                let own = all.filter(|(_, print)| blind || print.is_none());
                own.map(|(name, _)| name.clone()).collect()
            });
            said.push(FingerprintUse {
                step: step.name.clone(),
                therock: known.map(|prints| prints.artifacts.len() - own.len()),
                own,
            });
            if spec.open.as_ref() == Some(&step.name) {
                break;
            }
        }
        said
    }

    /// Resolves the profile, with the TheRock fingerprints that the store has.
    pub(crate) fn resolve(&mut self, store: Option<&Store>) -> Result<Spec> {
        loop {
            let spec = resolve::resolve(&self.selection.profile, &self.inputs)?;
            let open = spec.open.as_ref().and_then(|name| spec.step(name));
            let (Some(step), Some(store)) = (open, store) else {
                return Ok(spec);
            };
            let record = match self.selection.own {
                true => store.record(&spec.name)?,
                false => None,
            };
            let search = LayerSearch {
                record: record.as_ref(),
                reuse: self.selection.reuse,
                service: self.selection.choice.service.as_deref(),
                clean: self.clean,
            };
            let Some(layer) = store.step_layer(&step.key, &search)? else {
                return Ok(spec);
            };
            let prints = layer.prints.unwrap_or_else(ArtifactFingerprints::none);
            self.inputs.prints.insert(step.key.clone(), prints);
        }
    }

    /// Refuses a source that differs from the lock file.
    pub(crate) fn compare(
        &self,
        volume: &str,
        directory: &Path,
        whole: &dyn Fn(&Path) -> Result<String>,
    ) -> Result<()> {
        let Some(locked) = &self.selection.locked else {
            return Ok(());
        };
        let print = whole(directory)?;
        let source = locked.lock.source.get(volume);
        let difference =
            source.and_then(|source| lockfile::source(volume, source, directory, &print));
        match difference {
            Some((difference, help)) => Err(locked.drift(&[difference]).help_if(help)),
            None => Ok(()),
        }
    }
}

/// Reads the fingerprint of a whole source on first use, once.
fn once(read: impl Fn(&Path) -> Result<String>) -> impl Fn(&Path) -> Result<String> {
    let known = OnceCell::new();
    move |path| {
        if let Some(known) = known.get() {
            return Ok(String::clone(known));
        }
        let print = read(path)?;
        Ok(known.get_or_init(|| print).clone())
    }
}

/// What an attempt builds, and its inputs. Nothing of the env is read or changed before these are known.
pub(super) struct Resolved<'a> {
    pub(super) gathered: Gathered<'a>,
    pub(super) spec: Spec,
    pub(super) image: Image,
    /// The options, limited to the steps of this attempt.
    pub(super) options: StepOptions,
    /// The step that ends the attempt, because the keys of later requested steps depend on its result.
    pub(super) open: Option<StepName>,
}

/// Resolves the profile, and pulls the steps that a registry has; `None` if the image is gone.
pub(super) fn resolve_and_pull<'a>(
    run: &Run<'_>,
    asked: &StepOptions,
    mut gathered: Gathered<'a>,
) -> Result<Option<Resolved<'a>>> {
    let mut spec = gathered.resolve(Some(run.with.store))?;
    if let Some(source) = &run.source {
        // A pulled step may decide the keys of later ones, which can then be pulled too.
        let (store, mut pulled) = (run.with.store, None);
        while source.pull_steps(store, &gathered, &spec, asked, &mut pulled)? {
            spec = gathered.resolve(Some(store))?;
        }
    }
    let Some(image) = base_image::ensure_pulled(run, &gathered)? else {
        return Ok(None);
    };
    let selection = gathered.selection;
    locked::follow_sources(&mut spec, selection, run.with.store, &gathered.sources);
    spec.lock = selection.locked.as_ref().map(Locked::digest).transpose()?;
    let open = opening(&selection.profile, &spec, asked);
    let options = StepOptions {
        until: open.clone().map(Into::into).or_else(|| asked.until.clone()),
        ..asked.clone()
    };
    Ok(Some(Resolved {
        gathered,
        spec,
        image,
        options,
        open,
    }))
}

impl Resolved<'_> {
    /// Observes what exists, and plans what to do.
    pub(super) fn plan(&self, run: &Run<'_>, env: &LockedEnv<'_>) -> Result<(Observed, Plan)> {
        plan_for(
            run.with.store,
            Some(env),
            &self.gathered,
            &self.spec,
            &self.options,
        )
    }

    pub(super) fn finished(
        &self,
        ended: Option<Ended>,
        plan: &Plan,
        env: &LockedEnv<'_>,
        blocked: Vec<BlockedResult>,
    ) -> Finished {
        let mut lacking = summary::skipped_steps(plan, self.gathered.selection);
        let is_complete = env.record().is_some_and(|record| record.complete);
        if let Some(until) = &self.options.until
            && self.open.is_none()
            && !is_complete
        {
            lacking.push_str(&steps_left(plan, until));
        }
        Finished {
            ended,
            env: self.spec.name.clone(),
            lacking,
            blocked,
        }
    }
}

/// Formats the number of steps after the last requested one, for the last line; empty if it is zero.
fn steps_left(plan: &Plan, until: &str) -> String {
    let later = |step: &&PlanStep| step.action == Action::Later;
    match plan.steps.iter().filter(later).count() {
        0 => String::new(),
        1 => format!("; 1 step after `{until}` is left"),
        count => format!("; {count} steps after `{until}` are left"),
    }
}

/// Returns the step that must run before the keys of later ones are known, if later ones are requested.
fn opening(profile: &Profile, spec: &Spec, asked: &StepOptions) -> Option<StepName> {
    let at = |name: &str| profile.steps.iter().position(|step| step.name == name);
    let open = spec.open.clone()?;
    let reaches = |until: &String| at(until) > at(&open);
    asked.until.as_ref().is_none_or(reaches).then_some(open)
}
