//! Owns one `up` from what was asked for to how it ended: resolve, lock, plan, execute, and again where what it stood on went away, or
//! where a step told the keys of those after it.

pub(crate) mod checkout;
pub mod context;
pub(crate) mod downloads;
pub(crate) mod ephemeral;
pub(crate) mod hooks;
pub(crate) mod host_writes;
pub(crate) mod locked;
pub mod observe;
pub(crate) mod offline;
pub(crate) mod options;
pub(crate) mod preflight;
pub(crate) mod registry;
pub(crate) mod resolve;
pub(crate) mod segments;
pub(crate) mod seize;
pub(crate) mod select;
pub(crate) mod sources;
pub(crate) mod summary;
pub(crate) mod task;

use std::cell::RefCell;
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use crate::engine::choose::Reason;
use crate::engine::docker::Service;
use crate::engine::ninja;
use crate::execute::{Ended, Execution, Progress};
use crate::plan::gc::Lease;
use crate::plan::lockfile;
use crate::plan::record::{self, Head, Record};
use crate::plan::resolve::{Spec, VolumeKind, VolumeSource};
use crate::plan::{Action, Observed, Options, Plan, plan as decide};
use crate::profile::Profile;
use crate::store::history::Seeker;
use crate::store::images::Image;
use crate::store::source;
use crate::store::{LockedEnv, Store};
use crate::sys::atomic::random_id;
use crate::sys::error::{Error, Result};
use crate::sys::signals::{Cancel, Signals};
use crate::ui::Reporter;
use crate::ui::event::{Chosen, Event, Outcome, Planned};
use crate::ui::metrics::Row;
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::locked::Locked;
use crate::up::observe::{observe, wanted};
use crate::up::options::{UpOptions, options};
use crate::up::preflight::Needs;
use crate::up::registry::{Source, wanted_image};
use crate::up::resolve::Prepared;

/// How often what was found may be removed by somebody else before it is used.
const ATTEMPTS: usize = 5;

/// Resolves, locks, plans and executes; again where what it counted on was removed before it could say so.
pub(crate) fn run_up(
    cx: &Context,
    args: &UpOptions,
    store: &Store,
    mut prepared: Prepared,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<(Option<Ended>, String, String)> {
    let run = Run {
        cx,
        args,
        store,
        source: Source::new(cx, args, signals, reporter)?,
        signals,
        reporter,
        told: RefCell::default(),
    };
    let mut options = options(args);
    let (mut gone, mut begun) = (0, false);
    while gone < ATTEMPTS {
        match attempt(&run, &options, &mut prepared) {
            Ok(Attempt::Done(ended, env, lacking)) => return Ok((ended, env, lacking)),
            Ok(Attempt::Gone) => gone += 1,
            Ok(Attempt::Known(step)) => {
                options = rest(&prepared.profile, &step, options);
                begun = true;
            }
            Err(error) if begun => {
                let ended = Ended::broke(error, signals);
                return Ok((Some(ended), prepared.name, String::new()));
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::busy("base layers keep being removed by another process").help("rockenv up"))
}

/// What is the same in all attempts.
struct Run<'a> {
    cx: &'a Context,
    args: &'a UpOptions,
    store: &'a Store,
    /// A registry, where one is asked.
    source: Option<Source<'a>>,
    signals: &'a Signals,
    reporter: &'a Reporter,
    /// Warnings that were given already: each attempt looks at the sources anew.
    told: RefCell<BTreeSet<String>>,
}

/// What came of one attempt.
enum Attempt {
    /// How it ended, the env, and the steps that lacked a GPU.
    Done(Option<Ended>, String, String),
    /// The image or a layer is gone by the time that the env is locked.
    Gone,
    /// This step has run, and told, or changed, what the keys of those after it depend on.
    Known(String),
}

/// Returns what is left to ask for when `step` has run.
fn rest(profile: &Profile, step: &str, asked: Options) -> Options {
    let at = |name: &str| profile.steps.iter().position(|step| step.name == name);
    let next = at(step).and_then(|position| profile.steps.get(position + 1));
    let rerun = asked.rerun.map(|name| match next {
        Some(next) if at(&name) <= at(step) => next.name.clone(),
        _ => name,
    });
    Options {
        until: asked.until,
        rerun,
        clean: false,
    }
}

/// One attempt: to the end, or to a step that tells the keys of those after it.
fn attempt(run: &Run<'_>, asked: &Options, prepared: &mut Prepared) -> Result<Attempt> {
    let Run {
        cx,
        args,
        store,
        ref source,
        signals,
        reporter,
        ref told,
    } = *run;
    let mut image = image_there(store, prepared)?;
    // What a registry has of the image comes together with the steps that stand on it.
    let is_foretold = match (source, &image) {
        (Some(source), None) => source.stand_on_image(prepared)?,
        _ => false,
    };
    if image.is_none() && !is_foretold {
        image = Some(build_image(cx, args, store, prepared, reporter, signals)?);
    }
    if let Some(image) = &image {
        prepared.stand_on(image.clone());
    }
    let (sources, notes) = sources::prepare(prepared, store, args.offline, signals, reporter)?;
    for message in notes {
        if told.borrow_mut().insert(message.clone()) {
            reporter.emit(&Event::Warning { message });
        }
    }
    locked::check_steps(prepared)?;
    prepared.clean = asked.clean;
    let mut spec = prepared.resolve(Some(store))?;
    if let Some(source) = source {
        // With a step that tells the keys of later ones, these can be asked for.
        while source.pull_steps(store, prepared, &spec, asked)? {
            spec = prepared.resolve(Some(store))?;
        }
        if image.is_none() && image_there(store, prepared)?.is_none() {
            source.pull(store, &wanted_image(prepared), None)?;
        }
    }
    let image = match image {
        Some(image) => image,
        None => match image_there(store, prepared)? {
            Some(image) if image.key == prepared.inputs.image_key => image,
            found => {
                // The registry did not keep what it promised, and all keys stand on that.
                if found.is_none() {
                    build_image(cx, args, store, prepared, reporter, signals)?;
                }
                return Ok(Attempt::Gone);
            }
        },
    };
    locked::follow_sources(&mut spec, prepared, store, &sources);
    spec.lock = prepared.pinned.as_ref().map(Locked::digest).transpose()?;
    let open = opening(&prepared.profile, &spec, asked);
    let options = &Options {
        until: open.clone().or_else(|| asked.until.clone()),
        ..asked.clone()
    };
    let mut env = store.lock_env(&spec.name, "up", Duration::from_secs(5))?;
    env.check_owner()?;
    if args.ephemeral && !env.is_owned()? {
        let what = format!("env `{}` was removed meanwhile", env.name());
        return Err(Error::busy(what).help(args.resume_command()));
    }
    if let Some(pinned) = &prepared.pinned {
        env.keep_lock(&pinned.lock)?;
    }
    let (observed, plan) = plan_for(store, Some(&env), prepared, &spec, options)?;
    locked::check_built(prepared, store, &plan)?;
    env.touch();
    if plan.is_empty() && env.record().is_some() {
        // What is in no key may have changed all the same: variables for using what was built.
        if store.spec(&spec.name).ok().as_ref() != Some(&spec) {
            env.save_spec(&spec)?;
        }
        if !env.known_record()?.complete && args.until.is_none() {
            env.update(|record| record.complete = true)?;
        }
        for step in &plan.steps {
            let outcome = match step.action {
                Action::Hit => Outcome::Hit,
                _ => Outcome::Skipped,
            };
            reporter.measured(|| Row::of(&spec, &step.name, &step.key, outcome));
        }
        let lacking = summary::lacking(&plan, prepared);
        return Ok(Attempt::Done(None, spec.name, lacking));
    }
    if plan.runs() > 0 && !args.force {
        // A new env is judged by all that it will run; what is open in another one may be there already.
        let whole = match env.record() {
            None => Some(plan_for(store, Some(&env), prepared, &spec, asked)?.1),
            Some(_) => None,
        };
        let judged = whole.as_ref().unwrap_or(&plan);
        Needs::of(prepared, &spec, judged, store.root(), env.record())?.preflight()?;
    }
    // What the store forgot is no layer of it yet, and nothing of `gc`'s.
    let known = |layer: &&String| !observed.forgotten.contains(*layer);
    let lease = Lease {
        layers: plan.start.iter().filter(known).cloned().collect(),
        image: image.key.clone(),
    };
    if !env.lease(&lease)? {
        return Ok(Attempt::Gone);
    }
    store.load_ballast()?;
    if env.record().is_none() {
        env.commit(new_record(
            &spec,
            &image.key,
            prepared.choice.service.clone(),
        )?)?;
    } else if env.known_record()?.image_key != image.key {
        // The base changed: every key did too. Snapshots stay, each with the image that it stands on.
        let key = image.key.clone();
        env.keep_changes("before-image")?;
        env.reset()?;
        env.update(|record| {
            record.image_key = key;
            record.image.clone_from(&spec.image);
        })?;
    }
    let (observed, plan) = plan_for(store, Some(&env), prepared, &spec, options)?;
    if let Some(service) = env.service()? {
        store.import_image(&service, &image.key, &mut |message| {
            reporter.emit(&Event::Note {
                message: message.to_owned(),
            });
        })?;
        remember(&env, &service, &observed, &plan, reporter)?;
    }
    if spec.resources.ninja {
        let cancel = Cancel::new(signals);
        let blobs = store.root().join("blobs");
        let own = cx.config.ninja.as_deref();
        cancel.outcome(ninja::place(
            &env.run_dir(),
            own,
            &blobs,
            args.offline,
            cancel.flag(),
        ))?;
    }
    let fetching = Fetching {
        cx,
        store,
        offline: args.offline,
        signals,
        reporter,
    };
    for message in fetching.provide(prepared, &spec, &plan, &sources)? {
        reporter.emit(&Event::Warning { message });
    }
    reporter.emit(&Event::RunStarted {
        env: spec.name.clone(),
        plan: shown(&plan),
        chosen: match prepared.choice.reason {
            Reason::Found(why) => Some(Chosen {
                engine: spec.engine.to_string(),
                reason: why.to_owned(),
            }),
            Reason::Asked | Reason::MadeWith => None,
        },
    });
    let progress = Execution {
        store,
        env: &mut env,
        spec: &spec,
        plan: &plan,
        files: &prepared.files,
        sources: &sources,
        fingerprints: &prepared.inputs.fingerprints,
        locked: prepared.pinned.as_ref().map(|pinned| &pinned.lock),
        hooks: &prepared.hooks,
        host: &prepared.host,
        config: &cx.config,
        gpu: prepared.gpu.as_ref(),
        offline: args.offline,
        apart: &BTreeSet::new(),
        sizing: &prepared.sizing,
        signals,
        reporter,
    }
    .run()?;
    let ended = match progress {
        Progress::Ended(ended) => ended,
        Progress::Changed(step) => return Ok(Attempt::Known(step)),
    };
    if matches!(ended, Ended::Complete)
        && !observed.forgotten.is_empty()
        && let Some(service) = env.service()?
    {
        let done = plan
            .steps
            .iter()
            .filter(|step| step.action != Action::Later);
        let keys: Vec<&str> = done.map(|step| step.key.as_str()).collect();
        store.remove_forgotten(&service, &keys)?;
    }
    if let (Ended::Complete, Some(step)) = (&ended, open) {
        return Ok(Attempt::Known(step));
    }
    let lacking = summary::lacking(&plan, prepared);
    Ok(Attempt::Done(Some(ended), spec.name, lacking))
}

/// Returns the step that has to run before the keys of later ones are known, where later ones are asked for.
fn opening(profile: &Profile, spec: &Spec, asked: &Options) -> Option<String> {
    let at = |name: &str| profile.steps.iter().position(|step| step.name == name);
    let open = spec.open.clone()?;
    let reaches = |until: &String| at(until) > at(&open);
    asked.until.as_ref().is_none_or(reaches).then_some(open)
}

/// Refuses what cannot work before the image is made, which may take long.
fn preflight_early(
    cx: &Context,
    args: &UpOptions,
    store: &Store,
    prepared: &mut Prepared,
) -> Result<()> {
    // What it says of the image and the sources is about to change.
    drop(prepared.predict(cx, Some(store))?);
    let spec = prepared.resolve(Some(store))?;
    for volume in &spec.volumes {
        if let (VolumeKind::Source, VolumeSource::Path(path)) = (volume.kind, &volume.source) {
            source::is_there(&volume.name, path)?;
        }
    }
    let (_, plan) = plan_for(store, None, prepared, &spec, &options(args))?;
    let record = store.record(&spec.name)?;
    Needs::of(prepared, &spec, &plan, store.root(), record.as_ref())?.preflight()
}

/// Takes snapshots into the store again that only the service knows of.
fn remember(
    env: &LockedEnv<'_>,
    service: &Service,
    observed: &Observed,
    plan: &Plan,
    reporter: &Reporter,
) -> Result<()> {
    if observed.forgotten.is_empty() {
        return Ok(());
    }
    let hits = plan.steps.iter().filter(|step| step.action == Action::Hit);
    let steps: Vec<(&str, &str)> = hits
        .map(|step| (step.name.as_str(), step.key.as_str()))
        .collect();
    let count = env.remember(service, &steps)?;
    if count > 0 {
        reporter.emit(&Event::Warning {
            message: format!(
                "{count} snapshots that the store had lost were found at {} by their keys",
                service.flavour
            ),
        });
    }
    Ok(())
}

/// Returns the image if the store has it: the locked one, or what the recipe stands for at present.
fn image_there(store: &Store, prepared: &Prepared) -> Result<Option<Image>> {
    match &prepared.pinned {
        None => store.image_of(&prepared.recipe),
        Some(pinned) => store.image(&pinned.lock.image.key),
    }
}

/// Builds the image: as it was locked, or as its recipe says.
fn build_image(
    cx: &Context,
    args: &UpOptions,
    store: &Store,
    prepared: &mut Prepared,
    reporter: &Reporter,
    signals: &Signals,
) -> Result<Image> {
    if !args.force {
        preflight_early(cx, args, store, prepared)?;
    }
    let (name, recipe) = (&prepared.profile.image.value, &prepared.recipe);
    let Some(pinned) = &prepared.pinned else {
        return crate::up::task::build_image(cx, store, name, recipe, false, signals, reporter);
    };
    let locked = &pinned.lock.image;
    let image = crate::up::task::locked_image(cx, store, recipe, locked, signals, reporter)?;
    match image.key == locked.key {
        true => Ok(image),
        false => Err(pinned.drift(&lockfile::image(locked, &image))),
    }
}

pub(crate) fn new_record(spec: &Spec, image_key: &str, service: Option<PathBuf>) -> Result<Record> {
    let now = jiff::Timestamp::now();
    Ok(Record {
        version: record::VERSION,
        id: random_id()?,
        created: now,
        used: now,
        profile: spec.profile.clone(),
        targets: spec.targets.iter().map(ToString::to_string).collect(),
        image: spec.image.clone(),
        image_key: image_key.to_owned(),
        engine: spec.engine.name().to_owned(),
        service,
        head: Head::default(),
        snapshots: Vec::new(),
        steps: Vec::new(),
        failed: None,
        complete: false,
    })
}

pub(crate) fn plan_for(
    store: &Store,
    env: Option<&LockedEnv<'_>>,
    prepared: &Prepared,
    spec: &Spec,
    options: &Options,
) -> Result<(Observed, Plan)> {
    let wanted = wanted(&prepared.profile, spec);
    let record = match env {
        Some(env) => env.record().cloned(),
        None => store.record(&spec.name)?,
    };
    let seeker = Seeker {
        record: record.as_ref(),
        reuse: prepared.reuse,
        clean: options.clean,
    };
    let observed = observe(
        store,
        env,
        spec,
        &wanted,
        &prepared.inputs.image_key,
        prepared.choice.service.as_deref(),
        &seeker,
    )?;
    let plan = decide(&wanted, &observed, options);
    Ok((observed, plan))
}

fn shown(plan: &Plan) -> Vec<Planned> {
    plan.steps
        .iter()
        .enumerate()
        .map(|(position, step)| Planned {
            index: u32::try_from(position + 1).unwrap_or(u32::MAX),
            name: step.name.clone(),
            key: step.key.clone(),
            cached: step.action == Action::Hit,
            reason: step.why.clone(),
        })
        .collect()
}
