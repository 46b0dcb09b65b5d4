//! Owns everything that `up`, `plan` and `profile` gather before they resolve a profile.

use std::cell::OnceCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::select::UpRequest;
use super::{checkout, hooks};
use crate::engine::choose::{Choice, choose};
use crate::image::{Recipe, catalog};
use crate::plan::jobs::{self, Past, Sizing};
use crate::plan::lockfile;
use crate::plan::resolve::{self, Inputs, Spec, VolumeKind, VolumeSource, is_untracked};
use crate::profile::hook::Hook;
use crate::profile::{self, CopyFiles, Profile};
use crate::rocm::gpu;
use crate::rocm::target::Target;
use crate::rocm::therock::Prints;
use crate::store::Store;
use crate::store::history::{Reuse, Seeker};
use crate::store::images::Image;
use crate::store::source::{Git, Repository};
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::up::context::Context;
use crate::up::locked::Locked;

/// How the keys after a step use TheRock's fingerprints.
#[derive(Debug, Serialize)]
pub(crate) struct Said {
    /// The step that configures TheRock.
    step: String,
    /// Number of artifacts with a fingerprint; `None` if the step must run first.
    therock: Option<usize>,
    /// Artifacts without one: the source's fingerprint stands in.
    own: Vec<String>,
}

impl std::fmt::Display for Said {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self.therock {
            None => write!(
                f,
                "later steps are planned after `{}` runs; some may already be built",
                self.step
            ),
            Some(count) => {
                write!(
                    f,
                    "after `{}` keys have TheRock's fingerprints of {count} artifacts",
                    self.step
                )?;
                match self.own.is_empty() {
                    true => Ok(()),
                    false => write!(f, ", and the source's own for {}", self.own.join(", ")),
                }
            }
        }
    }
}

/// Everything that is known before the env is locked.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) name: String,
    pub(crate) profile: Profile,
    /// The profile's file, if it was named by that.
    pub(crate) file: Option<PathBuf>,
    pub(crate) files: CopyFiles,
    /// The profile's hooks, by name.
    pub(crate) hooks: BTreeMap<String, Hook>,
    pub(crate) recipe: Recipe,
    pub(crate) inputs: Inputs,
    pub(crate) host: Host,
    pub(crate) sizing: Sizing,
    /// Earlier cost of steps.
    pub(crate) past: Vec<Past>,
    pub(crate) choice: Choice,
    /// The GPU that the env gets.
    pub(crate) gpu: Option<gpu::Grant>,
    /// Notes for the user about the GPU.
    pub(crate) notes: Vec<String>,
    /// The lock file to follow, if any.
    pub(crate) pinned: Option<Locked>,
    /// Which layers of other envs this one may use.
    pub(crate) reuse: Reuse,
    /// Begin clean, whatever exists.
    pub(crate) clean: bool,
    /// Use the env's own layers too, not only shared ones.
    pub(crate) own: bool,
}

fn machine_targets(cx: &Context) -> Result<Vec<Target>> {
    let names = cx.config.targets.iter();
    names
        .map(|name| Target::parse(name))
        .collect::<Result<_>>()
        .context(|| "`targets` in the configuration".to_owned())
}

/// Returns the profile to build if only targets were given, or nothing at all. A profile may be named after a single
/// target.
fn unnamed(
    request: &UpRequest<'_>,
    targets: Vec<Target>,
    machine: &gpu::Machine,
) -> Result<(&'static str, Vec<Target>)> {
    let command = |isa: &str| {
        let what = Some(isa);
        UpRequest { what, ..*request }.command(request.verb, &[("--name", request.name)])
    };
    Ok(match targets[..] {
        [] => (machine.target(command)?.name(), targets),
        [one] => (one.name(), Vec::new()),
        [..] => (resolve::DEFAULT_PROFILE, targets),
    })
}

impl Prepared {
    /// Reads the profile and the machine.
    pub(crate) fn new(cx: &Context, request: &UpRequest<'_>) -> Result<Self> {
        let host = Host::probe()?;
        let targets = request
            .targets
            .iter()
            .map(|name| Target::parse(name))
            .collect::<Result<Vec<_>>>()?;
        let listed = profile::list(&cx.config.profile_dirs)?;
        let machine = cx.gpus();
        let (what, targets) = match request.what {
            Some(what) => (what, targets),
            None => unnamed(request, targets, &machine)?,
        };
        let named = resolve::choose(
            what,
            &targets,
            request.name,
            listed.iter().map(|profile| profile.name.as_str()),
        )?;
        let profile = profile::load(&cx.config.profile_dirs, &named.profile)?;
        let file = profile::is_path(&named.profile).then(|| PathBuf::from(&named.profile));
        let files = profile::copy_files(&profile)?;
        let chosen = resolve::Chosen::new(&profile, request.variant, request.from)?;
        let hooks = hooks::read(cx, &profile, &chosen.hooks())?;
        let recipe = catalog::find(&cx.config.image_dirs, &profile.image.value)?;
        let mut params = BTreeMap::new();
        for text in request.params {
            let (name, value) = text.split_once('=').ok_or_else(|| {
                Error::new(Kind::Usage, format!("`{text}` is not NAME=VALUE")).help(format!(
                    "rockenv {} PROFILE --param NAME=VALUE",
                    request.verb
                ))
            })?;
            params.insert(name.to_owned(), value.to_owned());
        }
        let wanted = match named.targets[..] {
            [] => &profile.targets,
            _ => &named.targets,
        };
        let mut notes = Vec::new();
        let (gpu, without_gpu) = match machine.choose(&request.gpu.into(), wanted, profile.gpu)? {
            gpu::Choice::Gpu { grant, note } => {
                // Irrelevant if no step uses it.
                notes.extend(note.filter(|_| profile.steps.iter().any(|step| step.gpu)));
                (Some(*grant), None)
            }
            gpu::Choice::Without { why } => (None, Some(why)),
        };
        let name = resolve::env_name(
            named.env_name.as_deref(),
            named.stem.as_deref(),
            &profile.name,
            &named.targets,
            &resolve::choices(&profile, request.variant, request.from),
        )?;
        let past = Store::open_existing(&cx.config.home)
            .ok()
            .flatten()
            .map_or_else(Vec::new, |store| store.past(&profile.name));
        let sizing = jobs::size(&jobs::Given {
            resources: &profile.resources,
            cores: host.cores,
            memory: host.memory,
            configured: cx.config.jobs,
            asked: request.jobs,
            past: &past,
        });
        let choice = engine(cx, request, &host, &name)?;
        let inputs = Inputs {
            env_name: named.env_name,
            stem: named.stem,
            targets: named.targets,
            machine_targets: machine_targets(cx)?,
            variant: request.variant.map(str::to_owned),
            from: request.from.map(str::to_owned),
            params,
            engine: choice.engine,
            without_gpu,
            user: cx.config.user.clone(),
            host_home: cx.config.host_home.clone(),
            image_key: String::new(),
            image_env: BTreeMap::new(),
            file_digests: files.digests(),
            fingerprints: BTreeMap::new(),
            prints: BTreeMap::new(),
            excluded: None,
            hooks: hooks::facts(&hooks)?,
        };
        Ok(Self {
            name,
            profile,
            file,
            files,
            hooks,
            recipe,
            inputs,
            host,
            sizing,
            past,
            choice,
            gpu,
            notes,
            pinned: None,
            reuse: cx.config.reuse,
            clean: false,
            own: true,
        })
    }

    /// Fills in the current image and sources without making any; returns notes about missing ones.
    pub(crate) fn predict(&mut self, cx: &Context, store: Option<&Store>) -> Result<Vec<String>> {
        let mut notes = std::mem::take(&mut self.notes);
        let image = match (store, &self.pinned) {
            (Some(store), None) => store.image_of(&self.recipe)?,
            (Some(store), Some(pinned)) => store.image(&pinned.lock.image.key)?,
            (None, _) => None,
        };
        if image.is_none() {
            notes.push(format!(
                "image `{}` is not built yet",
                self.profile.image.value
            ));
        }
        match (image, &self.pinned) {
            (Some(image), _) => self.stand_on(image),
            // Its key is known before it is built.
            (None, Some(_)) => {}
            (None, None) => self.inputs.image_key = format!("unbuilt {}", self.recipe.digest()),
        }
        let git = Git::new(&cx.config.user);
        let mut sources = BTreeMap::new();
        for volume in resolve::volumes(&self.profile, &self.inputs)? {
            let directory = match &volume.source {
                VolumeSource::Git(source) => {
                    let repository = Repository::new(&volume.name, source);
                    let pinned = self.pinned.as_ref();
                    match (store, pinned.and_then(|pinned| pinned.commit(&volume.name))) {
                        (None, _) => None,
                        (Some(store), None) => Some(repository.directory(store)),
                        (Some(store), Some(commit)) => {
                            Some(repository.directory_at(store, &git, commit)?)
                        }
                    }
                }
                VolumeSource::Path(path) => Some(path.clone()),
                VolumeSource::Store => None,
            };
            if volume.kind == VolumeKind::Source {
                match directory.filter(|path| path.exists()) {
                    Some(path) => {
                        let known = store.map(|store| store.known_fingerprint(&path));
                        let read = once(|path: &Path| match &known {
                            Some(known) => git.known_fingerprint(path, known),
                            None => git.fingerprint(path),
                        });
                        self.fingerprint(&volume.name, &path, &git, &read)?;
                        self.compare(&volume.name, &path, &read)?;
                        sources.insert(volume.name.clone(), path);
                    }
                    None => {
                        notes.push(match &volume.source {
                            VolumeSource::Path(path) => format!(
                                "`up` would refuse: source `{}` is missing from `{}`",
                                volume.name,
                                path.display()
                            ),
                            _ => format!("source `{}` is not fetched yet", volume.name),
                        });
                        for input in self.inputs_in(&volume.name) {
                            // The lock file knows it without the source.
                            let print = self.inputs.fingerprints.entry(input);
                            print.or_insert_with(|| "absent".to_owned());
                        }
                    }
                }
            }
        }
        if let Some(store) = store {
            hooks::known_patches(&mut self.hooks, store)?;
        }
        notes.extend(checkout::settle(self, &sources)?);
        hooks::apply_to_inputs(self, &sources, &git)?;
        notes.extend(hooks::ask(self, &sources)?);
        Ok(notes)
    }

    /// Uses the key and the variables of an image.
    pub(crate) fn stand_on(&mut self, image: Image) {
        self.inputs.image_key = image.key;
        self.inputs.image_env = image.env.unwrap_or_default();
    }

    /// Returns the inputs of steps that are part of a source, and the source itself if hooks change it.
    fn inputs_in(&self, volume: &str) -> BTreeSet<String> {
        let inputs = self.profile.steps.iter().flat_map(|step| &step.inputs);
        let mut inputs: BTreeSet<String> = inputs
            .filter(|name| profile::input(name).0 == volume)
            .cloned()
            .collect();
        if self.hooks.values().any(|hook| hook.work.volume == volume) {
            inputs.insert(volume.to_owned());
        }
        inputs
    }

    /// Reads a source's fingerprints that steps and hooks need; `whole` reads the one of the whole source.
    pub(crate) fn fingerprint(
        &mut self,
        volume: &str,
        at: &Path,
        git: &Git<'_>,
        whole: &dyn Fn(&Path) -> Result<String>,
    ) -> Result<()> {
        for input in self.inputs_in(volume) {
            let print = match profile::input(&input).1 {
                "" => whole(at)?,
                path => git.fingerprint_of(&at.join(path))?,
            };
            self.inputs.fingerprints.insert(input, print);
        }
        Ok(())
    }

    /// Reports which fingerprints are in the keys.
    pub(crate) fn fingerprints_said(&self, spec: &Spec) -> Vec<Said> {
        let mut said = Vec::new();
        for step in spec.steps.iter().filter(|step| step.fingerprints.is_some()) {
            let known = self.inputs.prints.get(&step.key);
            let prints = step
                .inputs
                .iter()
                .filter_map(|name| self.inputs.fingerprints.get(name));
            let blind = prints.into_iter().any(|print| is_untracked(print));
            let own: Vec<String> = known.map_or_else(Vec::new, |prints| {
                let all = prints.artifacts.iter();
                let own = all.filter(|(_, print)| blind || print.is_none());
                own.map(|(name, _)| name.clone()).collect()
            });
            said.push(Said {
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
            let spec = resolve::resolve(&self.profile, &self.inputs)?;
            let open = spec.open.as_ref().and_then(|name| spec.step(name));
            let (Some(step), Some(store)) = (open, store) else {
                return Ok(spec);
            };
            let record = match self.own {
                true => store.record(&spec.name)?,
                false => None,
            };
            let seeker = Seeker {
                record: record.as_ref(),
                reuse: self.reuse,
                clean: self.clean,
            };
            let Some(layer) = store.step_layer(&step.key, &seeker)? else {
                return Ok(spec);
            };
            let prints = layer.prints.unwrap_or_else(Prints::none);
            self.inputs.prints.insert(step.key.clone(), prints);
        }
    }
}

/// Reads the fingerprint of a whole source on first use, once.
pub(crate) fn once(read: impl Fn(&Path) -> Result<String>) -> impl Fn(&Path) -> Result<String> {
    let known = OnceCell::new();
    move |path| {
        if let Some(known) = known.get() {
            return Ok(String::clone(known));
        }
        let print = read(path)?;
        Ok(known.get_or_init(|| print).clone())
    }
}

impl Prepared {
    /// Refuses a source that differs from the lock file.
    pub(crate) fn compare(
        &self,
        volume: &str,
        directory: &Path,
        whole: &dyn Fn(&Path) -> Result<String>,
    ) -> Result<()> {
        let Some(pinned) = &self.pinned else {
            return Ok(());
        };
        let print = whole(directory)?;
        let locked = pinned.lock.source.get(volume);
        let difference =
            locked.and_then(|locked| lockfile::source(volume, locked, directory, &print));
        match difference {
            Some(difference) => Err(pinned.drift(&[difference])),
            None => Ok(()),
        }
    }
}

fn engine(cx: &Context, request: &UpRequest<'_>, host: &Host, env: &str) -> Result<Choice> {
    // Without a readable store there is no earlier env to keep the engine of.
    let store = Store::open_existing(&cx.config.home).ok().flatten();
    // An env that is about to be removed does not count.
    let store = store.filter(|store| !store.is_left(env));
    let record = store.and_then(|store| store.record(env).ok().flatten());
    let made_with = record
        .as_ref()
        .map(|record| (record.engine.as_str(), record.service.clone()));
    let nspawn = host.root && which::which_in("systemd-nspawn", Some("/usr/bin:/bin"), "/").is_ok();
    let asked = request.engine.or(cx.config.engine.as_deref());
    let choice = choose(asked, made_with, nspawn, &cx.config.sockets)?;
    if let Some(record) = record
        && record.engine != choice.engine.name()
    {
        return Err(Error::new(
            Kind::Usage,
            format!(
                "env `{env}` was created with {} and cannot change its engine",
                record.engine
            ),
        )
        .help(format!(
            "rockenv up ... --engine {} --name NEW",
            choice.engine
        )));
    }
    Ok(choice)
}
