//! Owns the content of a lock file: the image, the sources, the files and the steps, as locked or as they are now.

use std::collections::BTreeMap;
use std::path::Path;

use jiff::Timestamp;

use crate::image::Recipe;
use crate::image::recipe::{Pin, snapshot_id};
use crate::plan::layer::Layer;
use crate::plan::lockfile::{
    CacheFile, LockedFingerprints, LockedImage, LockedSource, LockedStep, Lockfile, Observed,
    VERSION,
};
use crate::plan::pins::Pins;
use crate::plan::resolve::{self, Step, VolumeKind, VolumeSource};
use crate::store::history::{LayerSearch, Reuse};
use crate::store::source::{self, Git, Repository};
use crate::sys::error::Result;
use crate::sys::host;
use crate::sys::shell::quoted_path;
use crate::sys::signals::Cancel;
use crate::up::downloads::Fetching;
use crate::up::locked::{self, Locked};
use crate::up::resolve::Gathered;
use crate::up::select::Selection;

/// The `--update` value for everything.
pub(crate) const ALL: &str = "all";

/// Finds the exact inputs of a profile: those of the old lock file, and new ones.
pub(crate) struct Locking<'a> {
    pub(crate) with: Fetching<'a>,
    /// The images and sources to lock again.
    pub(crate) update: &'a [String],
    pub(crate) old: Option<&'a Lockfile>,
}

impl Locking<'_> {
    fn updates(&self, name: &str) -> bool {
        self.update
            .iter()
            .any(|asked| asked == name || asked == ALL)
    }

    fn warn(&self, message: String) {
        self.with.task.reporter.warn(message);
    }

    pub(crate) fn lock(
        &self,
        selection: &mut Selection,
        path: &Path,
        command: String,
    ) -> Result<Lockfile> {
        for message in std::mem::take(&mut selection.notes) {
            self.warn(message);
        }
        let image = self.image(selection)?;
        let source = self.sources(selection)?;
        let choices = locked::choices(selection);
        let user = &selection.inputs.user;
        let hooks = selection.inputs.hooks.iter();
        let mut lock = Lockfile {
            version: VERSION,
            profile: choices.profile.to_owned(),
            targets: choices.targets.iter().map(ToString::to_string).collect(),
            machine_targets: self.machine_targets(selection),
            variant: choices.variant.map(str::to_owned),
            from: choices.from.to_owned(),
            build_user: match self.old {
                Some(old) => old.build_user.clone(),
                None => format!("{}:{}", user.uid, user.gid),
            },
            params: selection.inputs.params.clone(),
            image,
            source,
            hooks: hooks
                .map(|(name, facts)| (name.clone(), facts.digest.clone()))
                .collect(),
            fetched: locked::fetched(self.with.task.cx, selection)?,
            files: self.files(selection)?,
            steps: Vec::new(),
            observed: Observed {
                time: Timestamp::from_second(Timestamp::now().as_second()).unwrap_or_default(),
                rockenv: env!("CARGO_PKG_VERSION").to_owned(),
                engine: selection.inputs.engine.name().to_owned(),
                kernel: host::kernel().unwrap_or_default(),
                amdgpu: host::amdgpu(),
            },
        };
        let adopted = Locked {
            path: path.to_owned(),
            lock: lock.clone(),
            command,
        };
        // From here on, the code is that of `up --locked`, so `lock` writes nothing that `up` would refuse.
        locked::apply_choices(self.with.task.cx, selection, adopted, Vec::new())?;
        let mut gathered = Gathered::new(selection, false);
        for message in gathered.fetch(self.with)? {
            self.warn(message);
        }
        let cancel = Cancel::new(&self.with.task.signals);
        let git = Git::until(&selection.inputs.user, &cancel);
        for volume in resolve::volumes(&gathered.selection.profile, &gathered.inputs)? {
            let inside = matches!(&volume.source, VolumeSource::Git(git) if git.submodules);
            if let (Some(locked), Some(directory)) = (
                lock.source.get_mut(&volume.name),
                gathered.sources.get(&volume.name),
            ) && locked.commit.is_some()
            {
                locked.submodules = cancel.outcome(git.submodules(directory, inside))?;
            }
        }
        lock.steps = self.steps(&mut gathered, &lock)?;
        let notes = self
            .with
            .lock(gathered.selection, &gathered.sources, &mut lock)?;
        notes.into_iter().for_each(|message| self.warn(message));
        // Submodules, steps and downloads were read from the sources after their comparison.
        for (volume, directory) in &gathered.sources {
            let known = self.with.store.known_fingerprint(directory);
            let read = |path: &Path| git.known_fingerprint(path, &known);
            cancel.outcome(gathered.compare(volume, directory, &read))?;
        }
        Ok(lock)
    }

    /// Returns the steps, with outputs from this machine's runs, or else from the old lock file.
    fn steps(&self, gathered: &mut Gathered<'_>, lock: &Lockfile) -> Result<Vec<LockedStep>> {
        let mut left = BTreeMap::new();
        let mut refused = Vec::new();
        for step in gathered.resolve(Some(self.with.store))?.steps {
            let find = |reuse| {
                let search = LayerSearch {
                    reuse,
                    ..LayerSearch::default()
                };
                self.with.store.step_layer(&step.key, &search)
            };
            match find(gathered.selection.reuse)? {
                Some(layer) => drop(left.insert(step.name, layer)),
                None => {
                    let incremental = find(Reuse::Incremental)?;
                    let has_fetched =
                        |layer: &Layer| !layer.pins.is_empty() || layer.prints.is_some();
                    if incremental.is_some_and(|layer| has_fetched(&layer)) {
                        refused.push(step.name);
                    }
                }
            }
        }
        if !refused.is_empty() {
            self.warn(format!(
                "the files fetched by {} are not locked, because those steps were not clean builds; rebuild with `up --clean`, or lock them with `--allow-incremental`",
                refused.join(", ")
            ));
        }
        // Locked values stay, as everywhere.
        let old = self.old.filter(|_| !self.updates(ALL));
        let prints = |step: &Step| {
            old.and_then(|old| locked::locked_fingerprints(old, step))
                .or_else(|| left.get(&step.name)?.prints.clone())
        };
        let spec = locked::resolve(&gathered.selection.profile, &gathered.inputs, lock, &prints)?;
        let locked = spec.steps.into_iter().map(|step| {
            let layer = left.get(&step.name);
            let old = old.and_then(|old| old.of_key(&step.key));
            let old = old.filter(|old| !old.pins.is_empty());
            let found = step.fingerprints.as_ref().and_then(|_| prints(&step));
            let (pins, incremental) = match (old, layer) {
                (Some(old), _) => (old.pins.clone(), old.incremental),
                (None, Some(layer)) => {
                    let says_something = !layer.pins.is_empty() || found.is_some();
                    (layer.pins.clone(), says_something && !layer.is_clean())
                }
                (None, None) => (Pins::new(), false),
            };
            LockedStep {
                incremental,
                prints: found.as_ref().map(LockedFingerprints::new),
                pins,
                name: step.name,
                key: step.key,
                parts: step.parts,
            }
        });
        Ok(locked.collect())
    }

    /// Returns the locked machine targets until everything is locked again, because the machine's list may grow.
    fn machine_targets(&self, selection: &Selection) -> Vec<String> {
        match self.old {
            Some(old) if !self.updates(ALL) => old.machine_targets.clone(),
            _ => selection
                .inputs
                .machine_targets
                .iter()
                .map(ToString::to_string)
                .collect(),
        }
    }

    /// Returns the image as it was locked, or builds and describes it.
    fn image(&self, selection: &Selection) -> Result<LockedImage> {
        let name = &selection.image;
        let recipe = &selection.recipe;
        let digest = recipe.digest();
        let update = self.updates(name);
        if let Some(old) = self.old
            && !update
            && (&old.image.name, &old.image.recipe) == (name, &digest)
        {
            return Ok(old.image.clone());
        }
        let snapshot = recipe
            .dated_mirror()
            .filter(|mirror| self.with.task.cx.config.mirrors.contains_key(mirror))
            .and_then(|_| snapshot_id(Timestamp::now().as_second()));
        let pin = Pin {
            snapshot: snapshot.as_deref(),
            resolved: None,
        };
        let dated = recipe.pinned(pin);
        let store = self.with.store;
        let ensure = |recipe: &Recipe, refresh: bool| match store.image_of(recipe)? {
            Some(image) if !refresh => Ok(image),
            _ => self.with.task.build_image(store, name, recipe, refresh),
        };
        let mut image = ensure(&dated, update)?;
        let resolved = dated.pinned(Pin {
            snapshot: None,
            resolved: image.resolved.as_deref(),
        });
        if resolved != dated {
            image = ensure(&resolved, false)?;
        }
        if let Some(mirror) = dated.dated_mirror() {
            self.warn(format!(
                "the packages of image `{name}` are locked by version, and the archive will drop these versions; set the mirror \
                 `{mirror}` to keep them available"
            ));
        }
        Ok(LockedImage::new(name, &digest, dated.snapshot(), &image))
    }

    /// Returns each source as it was locked, or as it is now.
    fn sources(&self, selection: &Selection) -> Result<BTreeMap<String, LockedSource>> {
        let cancel = Cancel::new(&self.with.task.signals);
        let git = Git::until(&selection.inputs.user, &cancel);
        let mut sources = BTreeMap::new();
        for volume in resolve::volumes(&selection.profile, &selection.inputs)? {
            if volume.kind != VolumeKind::Source {
                continue;
            }
            let locked = match &volume.source {
                VolumeSource::Git(source) => {
                    let repository = Repository::new(&volume.name, source);
                    cancel.outcome(self.repository(&repository, &git))?
                }
                VolumeSource::Path(path) => {
                    source::is_there(&volume.name, path)?;
                    let print = cancel.outcome(git.fingerprint(path))?;
                    by_fingerprint(&volume.name, path, &print)?
                }
                VolumeSource::Store => continue,
            };
            sources.insert(volume.name, locked);
        }
        Ok(sources)
    }

    /// Returns the cache files that the profile locks: those already locked, and new ones.
    fn files(
        &self,
        selection: &Selection,
    ) -> Result<BTreeMap<String, BTreeMap<String, CacheFile>>> {
        let mut all = BTreeMap::new();
        let volumes = selection.profile.volumes.iter();
        for volume in volumes.filter(|volume| volume.locked) {
            let found = self.with.store.cache_files(&volume.name)?.into_iter();
            let mut files: BTreeMap<_, _> = found
                .map(|(path, sha256)| (path, CacheFile::Sha256(sha256)))
                .collect();
            if let Some(old) = self.old.and_then(|old| old.files.get(&volume.name))
                && !self.updates(ALL)
            {
                // Files that rockenv itself fetches are looked up again: the source decides.
                let old = old.iter().filter(|(_, file)| file.url().is_none());
                files.extend(old.map(|(path, file)| (path.clone(), file.clone())));
            }
            if !files.is_empty() {
                all.insert(volume.name.clone(), files);
            }
        }
        Ok(all)
    }

    fn repository(&self, repository: &Repository, git: &Git<'_>) -> Result<LockedSource> {
        let Repository { name, origin } = repository;
        let place = (Some(&origin.url), origin.rev.as_ref());
        let update = self.updates(name);
        if let Some(old) = self
            .old
            .and_then(|old| old.source.get(name))
            .filter(|old| !update && (old.git.as_ref(), old.rev.as_ref()) == place)
        {
            return Ok(old.clone());
        }
        let newest = match update {
            true => git.newest(&origin.url, origin.rev.as_deref())?,
            false => None,
        };
        let mut locked = match newest {
            Some(commit) => LockedSource {
                commit: Some(commit),
                ..LockedSource::default()
            },
            // A commit does not change, and envs are built from the store's copy.
            None => {
                let mut say = |message: &str| self.with.task.reporter.note(message);
                let directory = repository.prepare(self.with.store, git, false, &mut say)?;
                let print = git.fingerprint(&directory)?;
                by_fingerprint(name, &directory, &print)?
            }
        };
        locked.git = Some(origin.url.clone());
        locked.rev.clone_from(&origin.rev);
        Ok(locked)
    }
}

/// Locks by fingerprint. Refuses uncommitted changes, which no other machine could fetch.
fn by_fingerprint(name: &str, directory: &Path, print: &str) -> Result<LockedSource> {
    let (kind, rest) = print.split_once(':').unwrap_or_default();
    if rest.contains('+') {
        return Err(drift!(
            "source `{name}` in `{}` has uncommitted changes, which a lock file cannot record",
            directory.display()
        )
        .help(format!("git -C {} status", quoted_path(directory))));
    }
    let only = |wanted: &str| (kind == wanted).then(|| rest.to_owned());
    Ok(LockedSource {
        commit: only("git"),
        content: only("content"),
        ..LockedSource::default()
    })
}
