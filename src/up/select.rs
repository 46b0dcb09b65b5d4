//! Owns the selection: the meaning of a request on this machine, before any image, layer or source is read.

use std::collections::BTreeMap;
use std::path::Path;

use super::hooks;
use super::request::UpRequest;
use crate::engine::choose::{Choice, Reason, choose, choose_to_plan, is_nspawn_installed};
use crate::image::{Recipe, catalog};
use crate::plan::ids::EnvName;
use crate::plan::jobs::{self, Past, Sizing};
use crate::plan::record::Record;
use crate::plan::resolve::{self, BaseImage, Engine, Inputs};
use crate::profile::hook::Hook;
use crate::profile::{self, CopyFiles, Origin, Profile};
use crate::rocm::gpu;
use crate::rocm::target::Target;
use crate::store::Store;
use crate::store::history::Reuse;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::sys::shell::quoted;
use crate::up::context::Context;
use crate::up::locked::Locked;

/// What a request selects: the profile, the engine, the GPU and the lock file. The stages of `up` only read it.
#[derive(Debug)]
pub(crate) struct Selection {
    pub(crate) name: EnvName,
    pub(crate) profile: Profile,
    pub(crate) files: CopyFiles,
    /// The profile's hooks, by name.
    pub(crate) hooks: BTreeMap<String, Hook>,
    pub(crate) image: String,
    pub(crate) recipe: Recipe,
    /// The inputs of keys, as far as the request, the profile and the lock file decide them.
    pub(crate) inputs: Inputs,
    pub(crate) host: Host,
    pub(crate) sizing: Sizing,
    /// Earlier cost of steps.
    pub(crate) past: Vec<Past>,
    pub(crate) choice: Choice,
    pub(crate) gpu: Option<gpu::Grant>,
    pub(crate) notes: Vec<String>,
    /// The last step to run, if not all.
    pub(crate) until: Option<String>,
    /// The lock file to follow, if any.
    pub(crate) locked: Option<Locked>,
    /// Which layers of other envs this one may use.
    pub(crate) reuse: Reuse,
    /// Whether to use the env's own layers too, not only shared ones.
    pub(crate) own: bool,
}

pub(super) fn machine_targets(cx: &Context) -> Result<Vec<Target>> {
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

impl Selection {
    /// Reads the profile and the machine.
    pub(crate) fn new(cx: &Context, request: &UpRequest<'_>) -> Result<Self> {
        let host = Host::probe()?;
        let select = request.select;
        let (variant, from) = (select.variant.as_deref(), select.from.as_deref());
        let targets = select.target.iter().map(|name| Target::named(name));
        let targets = targets.collect::<Result<Vec<_>>>()?;
        let names = profile::names(&cx.config.profile_dirs)?;
        let machine = cx.gpus();
        let (what, targets) = match request.what {
            Some(what) => (what, targets),
            None => unnamed(request, targets, &machine)?,
        };
        let profiles = names.iter().map(String::as_str);
        let named = resolve::profile_or_target(what, &targets, profiles)
            .map_err(|error| perhaps_env(cx, what, &names, error))?;
        let profile = profile::load(&cx.config.profile_dirs, &named.profile)?;
        let files = profile::copy_files(&cx.config.profile_dirs, &profile)?;
        let params = params(request, &profile)?;
        let chosen = resolve::Chosen::new(&profile, variant, from, &params)?;
        let hooks = hooks::read(cx, &profile, &chosen.hooks())?;
        let image = chosen.image()?;
        let recipe = catalog::find(&cx.config.image_dirs, &image)?;
        let wanted = match named.targets[..] {
            [] => &profile.targets,
            _ => &named.targets,
        };
        let choice = machine.choose(&request.gpu.into(), wanted, profile.gpu)?;
        let (gpu, without_gpu, note) = match choice {
            gpu::Choice::Gpu { grant, note } => (Some(*grant), None, note),
            gpu::Choice::Without { why } => (None, Some(why), None),
        };
        // The note is irrelevant if no step uses a GPU.
        let note = note.filter(|_| profile.steps.iter().any(|step| step.gpu));
        let name = resolve::env_name(
            request.name,
            named.stem.as_deref(),
            &profile.name,
            &named.targets,
            &chosen.in_name(),
        )?;
        let store = Store::open_existing(&cx.config.home).ok().flatten();
        let past = store.map_or_else(Vec::new, |store| store.past(&profile.name));
        let sizing = jobs::size(&jobs::SizingInputs {
            resources: &profile.resources,
            cores: host.cores,
            memory: host.memory,
            configured: cx.config.jobs,
            asked: request.jobs,
            past: &past,
        });
        // A lock file may name another env.
        let choice = engine(cx, request, &host, (!request.locked).then_some(&name))?;
        let inputs = Inputs {
            env_name: request.name.map(str::to_owned),
            stem: named.stem,
            targets: named.targets,
            machine_targets: machine_targets(cx)?,
            variant: select.variant.clone(),
            from: select.from.clone(),
            params,
            engine: choice.engine,
            without_gpu,
            user: cx.config.user.clone(),
            host_home: cx.config.host_home.clone(),
            image: BaseImage::Unbuilt(recipe.digest()),
            image_env: BTreeMap::new(),
            file_digests: files.digests(),
            fingerprints: BTreeMap::new(),
            prints: BTreeMap::new(),
            checkout: None,
            declared: Vec::new(),
            hooks: hooks::facts(&hooks)?,
        };
        Ok(Self {
            name,
            profile,
            files,
            hooks,
            image,
            recipe,
            inputs,
            host,
            sizing,
            past,
            choice,
            gpu,
            notes: note.into_iter().collect(),
            until: None,
            locked: None,
            reuse: cx.config.reuse,
            own: true,
        })
    }

    /// Replaces the parameters, and updates what depends on them.
    pub(crate) fn use_params(
        &mut self,
        cx: &Context,
        params: BTreeMap<String, String>,
    ) -> Result<()> {
        self.inputs.params = params;
        let chosen = self.inputs.chosen(&self.profile)?;
        let names = chosen.hooks();
        self.image = chosen.image()?;
        self.hooks = hooks::read(cx, &self.profile, &names)?;
        self.inputs.hooks = hooks::facts(&self.hooks)?;
        self.recipe = catalog::find(&cx.config.image_dirs, &self.image)?;
        self.name = self.inputs.name_of_env(&self.profile)?;
        Ok(())
    }

    /// Chooses the engine again, for the env that a lock file names.
    pub(crate) fn choose_engine(&mut self, cx: &Context, request: &UpRequest<'_>) -> Result<()> {
        self.choice = engine(cx, request, &self.host, Some(&self.name))?;
        self.inputs.engine = self.choice.engine;
        Ok(())
    }

    /// Returns the path of the lock file to follow, if any.
    pub(crate) fn lock_file(&self) -> Option<&Path> {
        self.locked.as_ref().map(|locked| locked.path.as_path())
    }

    /// Returns the commit of a source in the lock file, if any.
    pub(super) fn commit(&self, volume: &str) -> Option<&str> {
        let lock = &self.locked.as_ref()?.lock;
        lock.source.get(volume)?.commit.as_deref()
    }

    /// Returns whether the last step to run comes before the one at `position` in the profile.
    pub(crate) fn stops_before(&self, position: Option<usize>) -> bool {
        let steps = &self.profile.steps;
        let last = self.until.as_ref();
        let last = last.and_then(|last| steps.iter().position(|step| step.name == **last));
        last.is_some_and(|last| position.is_some_and(|position| last < position))
    }

    /// Names the engine that was planned for, if none works here.
    pub(crate) fn note_absent_engine(&self, cx: &Context) {
        if let Reason::Absent(_) = self.choice.reason {
            let engine = self.choice.engine;
            let message = format!("planned for {engine}, which cannot be used here");
            cx.ui.note(&message);
        }
    }
}

/// Adds the command for an env to the error, if the argument names an env and not a profile. Otherwise suggests a file
/// of that name.
fn perhaps_env(cx: &Context, what: &str, profiles: &[String], error: Error) -> Error {
    if error.kind() != Kind::NotFound {
        return error;
    }
    match command_of_env(cx, what, profiles) {
        Some(command) => {
            let message = format!("`{what}` is an env, not a profile or target");
            Error::new(error.kind(), message).help(command)
        }
        None => profile::suggest_file(what, error),
    }
}

/// Returns the command that builds an env from here, with its profile's path if the name is not found here.
fn command_of_env(cx: &Context, what: &str, profiles: &[String]) -> Option<String> {
    let store = Store::open_existing(&cx.config.home).ok().flatten()?;
    let env = what.parse().ok()?;
    let record = store.known(&env).ok()?;
    // An older record has no command.
    let command = record.command?;
    let by_name = format!("rockenv up {}", quoted(&record.profile));
    let rest = command.strip_prefix(&by_name);
    let rest = rest.filter(|rest| rest.is_empty() || rest.starts_with(' '));
    let origin = store.spec(&env).ok().map(|spec| spec.origin);
    Some(match (rest, origin) {
        (Some(rest), Some(Origin::File(path))) if !profiles.contains(&record.profile) => {
            format!("rockenv up {}{rest}", quoted(&path.to_string_lossy()))
        }
        _ => command,
    })
}

fn params(request: &UpRequest<'_>, profile: &Profile) -> Result<BTreeMap<String, String>> {
    let mut params = BTreeMap::new();
    for text in &request.select.param {
        let (name, value) = text
            .split_once('=')
            .ok_or_else(|| usage!("`{text}` is not NAME=VALUE").help("--param NAME=VALUE"))?;
        params.insert(name.to_owned(), value.to_owned());
    }
    if let Some(release) = &request.select.release {
        let Some(param) = &profile.release_param else {
            return Err(
                usage!("profile `{}` has no releases", profile.name).help("leave out --release")
            );
        };
        let other = params.insert(param.clone(), release.clone());
        if let Some(other) = other.filter(|other| other != release) {
            let error = usage!("`--release {release}` contradicts `--param {param}={other}`");
            return Err(error.help("leave out one of them"));
        }
    }
    Ok(params)
}

/// Chooses the engine: the env's, if the env is known and exists.
fn engine(
    cx: &Context,
    request: &UpRequest<'_>,
    host: &Host,
    env: Option<&EnvName>,
) -> Result<Choice> {
    let record = env.and_then(|env| {
        // Without a readable store there is no earlier env to keep the engine of.
        let store = Store::open_existing(&cx.config.home).ok().flatten()?;
        // An env that is about to be removed does not count.
        let stays = !store.is_abandoned(env);
        stays.then(|| store.record(env).ok().flatten()).flatten()
    });
    let made_with = record
        .as_ref()
        .map(|record| (record.engine.as_str(), record.service.clone()));
    let nspawn_installed = is_nspawn_installed();
    let nspawn = host.root && nspawn_installed;
    let asked = request.select.engine.as_ref();
    let asked = asked.or(cx.config.engine.as_ref()).map(String::as_str);
    let choose = match request.verb {
        "up" => choose,
        // `plan` and `lock` start no containers of the env, and so need no engine.
        _ => choose_to_plan,
    };
    let choice = choose(asked, made_with, nspawn, &cx.config.sockets).map_err(|error| {
        let sudo_helps = !host.root && asked.is_none() && nspawn_installed;
        match sudo_helps && error.kind() == Kind::Unavailable {
            true => error.help(&cx.config.sudo_command),
            false => error,
        }
    })?;
    if let (Some(env), Some(record)) = (env, &record) {
        check_engine(env, record, choice.engine, request)?;
    }
    Ok(choice)
}

/// Refuses an env that was created with another engine.
pub(super) fn check_engine(
    env: &EnvName,
    record: &Record,
    engine: Engine,
    request: &UpRequest<'_>,
) -> Result<()> {
    if record.engine == engine.name() {
        return Ok(());
    }
    Err(usage!(
        "env `{env}` was created with {} and cannot change its engine",
        record.engine
    )
    .help(request.command("up", &[("--name", Some("NEW"))])))
}
