//! Owns one `up`, from the request to its end. `run_up` repeats `attempt`, which tells the story.

pub(crate) mod base;
pub(crate) mod checkout;
pub(crate) mod claim;
pub mod context;
pub(crate) mod downloads;
pub(crate) mod ephemeral;
pub(crate) mod execute;
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
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use crate::execute::{Ended, Progress};
use crate::plan::resolve::Spec;
use crate::plan::{Action, Observed, Options, Plan};
use crate::profile::Profile;
use crate::store::images::Image;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Error, Result};
use crate::sys::signals::Signals;
use crate::ui::Reporter;
use crate::ui::event::{Event, Outcome};
use crate::ui::metrics::Row;
use crate::up::context::Context;
use crate::up::locked::Locked;
use crate::up::observe::plan_for;
use crate::up::options::{UpOptions, options};
use crate::up::preflight::Needs;
use crate::up::registry::Source;
use crate::up::resolve::Prepared;

/// Maximum of attempts when others remove what was found before it can be used.
const ATTEMPTS: usize = 5;

/// Resolves, locks, plans and executes; again if a needed layer was removed before this command could lease it.
pub(crate) fn run_up(
    cx: &Context,
    args: &UpOptions,
    store: &Store,
    mut prepared: Prepared,
    signals: &Signals,
    reporter: &Reporter,
) -> Result<Finished> {
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
            Ok(Attempt::Done(finished)) => return Ok(finished),
            Ok(Attempt::Gone) => gone += 1,
            Ok(Attempt::Known(step)) => {
                options = rest(&prepared.profile, &step, options);
                begun = true;
            }
            Err(error) if begun => {
                return Ok(Finished {
                    ended: Some(Ended::broke(error, signals)),
                    env: prepared.name,
                    lacking: String::new(),
                });
            }
            Err(error) => return Err(error),
        }
    }
    Err(Error::busy("base layers keep being removed by another process").help("rockenv up"))
}

/// How an `up` ended.
pub(crate) struct Finished {
    /// How the steps ended; `None` if there was nothing to do.
    pub(crate) ended: Option<Ended>,
    pub(crate) env: String,
    /// The steps that lacked a GPU, as the last line names them.
    pub(crate) lacking: String,
}

/// Everything that is the same in all attempts.
struct Run<'a> {
    cx: &'a Context,
    args: &'a UpOptions,
    store: &'a Store,
    /// The registry, if one is used.
    source: Option<Source<'a>>,
    signals: &'a Signals,
    reporter: &'a Reporter,
    /// Warnings given already: each attempt examines the sources anew.
    told: RefCell<BTreeSet<String>>,
}

/// The outcome of one attempt.
enum Attempt {
    Done(Finished),
    /// The image or a layer was removed before the env was locked.
    Gone,
    /// This step has run. The keys of later steps depend on its result, or on a source that it changed.
    Known(String),
}

/// Returns the options that remain after `step` has run.
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

/// What an attempt builds, and from what. Before this is known, nothing of the env is read or changed.
struct Resolved {
    spec: Spec,
    image: Image,
    sources: BTreeMap<String, PathBuf>,
    /// How far this attempt goes.
    options: Options,
    /// The step that ends the attempt, because the keys of later requested steps depend on its result.
    open: Option<String>,
}

/// One attempt: to the end, or to a step whose result decides later keys.
fn attempt(run: &Run<'_>, asked: &Options, prepared: &mut Prepared) -> Result<Attempt> {
    let image = base::find(run, prepared)?;
    let sources = prepare_sources(run, prepared)?;
    locked::check_steps(prepared)?;
    let spec = resolve_and_pull(run, asked, prepared)?;
    let Some(image) = base::settle(run, prepared, image)? else {
        return Ok(Attempt::Gone);
    };
    let resolved = Resolved::new(run, asked, prepared, spec, image, sources)?;
    let mut env = claim::lock(run, prepared, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env, prepared)?;
    locked::check_built(prepared, run.store, &plan)?;
    env.touch();
    if plan.is_empty() && env.record().is_some() {
        nothing_to_do(run, &resolved, &mut env, &plan)?;
        return Ok(Attempt::Done(resolved.finished(None, &plan, prepared)));
    }
    preflight(run, asked, prepared, &resolved, &env, &plan)?;
    if !claim::lease(&env, &resolved, &observed, &plan)? {
        return Ok(Attempt::Gone);
    }
    run.store.load_ballast()?;
    claim::record(&mut env, prepared, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env, prepared)?;
    match execute::execute(run, prepared, &resolved, &mut env, &observed, &plan)? {
        Progress::Changed(step) => Ok(Attempt::Known(step)),
        Progress::Ended(ended) => match (&ended, &resolved.open) {
            (Ended::Complete, Some(step)) => Ok(Attempt::Known(step.clone())),
            _ => Ok(Attempt::Done(resolved.finished(
                Some(ended),
                &plan,
                prepared,
            ))),
        },
    }
}

/// Makes missing sources; reports each note about them once.
fn prepare_sources(run: &Run<'_>, prepared: &mut Prepared) -> Result<BTreeMap<String, PathBuf>> {
    let offline = run.args.offline;
    let (sources, notes) =
        sources::prepare(prepared, run.store, offline, run.signals, run.reporter)?;
    for message in notes {
        if run.told.borrow_mut().insert(message.clone()) {
            run.reporter.emit(&Event::Warning { message });
        }
    }
    Ok(sources)
}

/// Resolves the profile, and pulls the steps that a registry has.
fn resolve_and_pull(run: &Run<'_>, asked: &Options, prepared: &mut Prepared) -> Result<Spec> {
    prepared.clean = asked.clean;
    let mut spec = prepared.resolve(Some(run.store))?;
    if let Some(source) = &run.source {
        // A pulled step may decide the keys of later ones, which can then be pulled too.
        while source.pull_steps(run.store, prepared, &spec, asked)? {
            spec = prepared.resolve(Some(run.store))?;
        }
    }
    Ok(spec)
}

impl Resolved {
    fn new(
        run: &Run<'_>,
        asked: &Options,
        prepared: &Prepared,
        mut spec: Spec,
        image: Image,
        sources: BTreeMap<String, PathBuf>,
    ) -> Result<Self> {
        locked::follow_sources(&mut spec, prepared, run.store, &sources);
        spec.lock = prepared.pinned.as_ref().map(Locked::digest).transpose()?;
        let open = opening(&prepared.profile, &spec, asked);
        let options = Options {
            until: open.clone().or_else(|| asked.until.clone()),
            ..asked.clone()
        };
        Ok(Self {
            spec,
            image,
            sources,
            options,
            open,
        })
    }

    /// Observes what exists, and plans what to do.
    fn plan(
        &self,
        run: &Run<'_>,
        env: &LockedEnv<'_>,
        prepared: &Prepared,
    ) -> Result<(Observed, Plan)> {
        plan_for(run.store, Some(env), prepared, &self.spec, &self.options)
    }

    fn finished(&self, ended: Option<Ended>, plan: &Plan, prepared: &Prepared) -> Finished {
        Finished {
            ended,
            env: self.spec.name.clone(),
            lacking: summary::lacking(plan, prepared),
        }
    }
}

/// Returns the step that must run before the keys of later ones are known, if later ones are requested.
fn opening(profile: &Profile, spec: &Spec, asked: &Options) -> Option<String> {
    let at = |name: &str| profile.steps.iter().position(|step| step.name == name);
    let open = spec.open.clone()?;
    let reaches = |until: &String| at(until) > at(&open);
    asked.until.as_ref().is_none_or(reaches).then_some(open)
}

/// Ends an `up` whose env is complete.
fn nothing_to_do(
    run: &Run<'_>,
    resolved: &Resolved,
    env: &mut LockedEnv<'_>,
    plan: &Plan,
) -> Result<()> {
    let spec = &resolved.spec;
    // Variables for using the results are in no key, so they may have changed all the same.
    if run.store.spec(&spec.name).ok().as_ref() != Some(spec) {
        env.save_spec(spec)?;
    }
    if !env.known_record()?.complete && run.args.until.is_none() {
        env.update(|record| record.complete = true)?;
    }
    for step in &plan.steps {
        let outcome = match step.action {
            Action::Hit => Outcome::Hit,
            _ => Outcome::Skipped,
        };
        let row = || Row::of(spec, &step.name, step.key.as_ref(), outcome);
        run.reporter.measured(row);
    }
    Ok(())
}

/// Refuses what cannot succeed, before anything runs.
fn preflight(
    run: &Run<'_>,
    asked: &Options,
    prepared: &Prepared,
    resolved: &Resolved,
    env: &LockedEnv<'_>,
    plan: &Plan,
) -> Result<()> {
    if plan.runs() == 0 || run.args.force {
        return Ok(());
    }
    let (spec, store) = (&resolved.spec, run.store);
    // A new env is judged by everything that it will run. An existing one may have some of that already.
    let whole = match env.record() {
        None => Some(plan_for(store, Some(env), prepared, spec, asked)?.1),
        Some(_) => None,
    };
    let judged = whole.as_ref().unwrap_or(plan);
    Needs::of(prepared, spec, judged, store.root(), env.record())?.preflight()
}
