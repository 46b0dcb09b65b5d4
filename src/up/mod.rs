//! Owns one `up`, from the request to its end. `run_up` repeats `attempt`, which tells the story.

pub(crate) mod base;
pub(crate) mod check;
pub(crate) mod checkout;
pub(crate) mod claim;
pub(crate) mod context;
pub(crate) mod downloads;
pub(crate) mod ephemeral;
pub(crate) mod execute;
pub(crate) mod gpu_code;
pub(crate) mod hooks;
pub(crate) mod host_writes;
pub(crate) mod lock;
pub(crate) mod locked;
pub(crate) mod observe;
pub(crate) mod offline;
pub(crate) mod options;
pub(crate) mod preflight;
pub(crate) mod registry;
pub(crate) mod request;
pub(crate) mod resolve;
pub(crate) mod results;
pub(crate) mod segments;
pub(crate) mod seize;
pub(crate) mod select;
pub(crate) mod sources;
pub(crate) mod summary;
pub(crate) mod task;
pub(crate) mod verify;

use std::cell::RefCell;
use std::collections::BTreeSet;

use crate::execute::{Ended, Progress};
use crate::plan::resolve::Spec;
use crate::plan::{Action, Observed, Options, Plan};
use crate::profile::Profile;
use crate::store::images::Image;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Error, Result};
use crate::ui::event::Outcome;
use crate::ui::metrics::Row;
use crate::up::downloads::Fetching;
use crate::up::locked::Locked;
use crate::up::observe::plan_for;
use crate::up::options::{UpOptions, options};
use crate::up::preflight::Needs;
use crate::up::registry::Source;
use crate::up::resolve::Gathered;
use crate::up::select::Selection;
use crate::up::task::Task;

/// Maximum of attempts when others remove what was found before it can be used.
const ATTEMPTS: usize = 5;

/// Resolves, locks, plans and executes; again if a needed layer was removed before this command could lease it.
pub(crate) fn run_up(
    task: Task<'_>,
    args: &UpOptions,
    store: &Store,
    selection: &Selection,
) -> Result<Finished> {
    let run = Run {
        with: Fetching {
            task,
            store,
            offline: args.plan.offline,
        },
        args,
        source: Source::new(task, &args.plan)?,
        told: RefCell::default(),
    };
    let mut options = options(&args.plan);
    let (mut gone, mut begun) = (0, false);
    while gone < ATTEMPTS {
        match attempt(&run, &options, selection) {
            Ok(Attempt::Done(finished)) => return Ok(finished),
            Ok(Attempt::Gone) => gone += 1,
            Ok(Attempt::Known(step)) => {
                options = rest(&selection.profile, &step, options);
                begun = true;
            }
            Err(error) if begun => {
                return Ok(Finished {
                    ended: Some(Ended::broke(error, task.signals)),
                    env: selection.name.clone(),
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
    with: Fetching<'a>,
    args: &'a UpOptions,
    /// The registry, if one is used.
    source: Option<Source<'a>>,
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
struct Resolved<'a> {
    gathered: Gathered<'a>,
    spec: Spec,
    image: Image,
    /// How far this attempt goes.
    options: Options,
    /// The step that ends the attempt, because the keys of later requested steps depend on its result.
    open: Option<String>,
}

/// One attempt: to the end, or to a step whose result decides later keys.
fn attempt(run: &Run<'_>, asked: &Options, selection: &Selection) -> Result<Attempt> {
    let base = base::find(run, selection)?;
    let gathered = gather_sources(run, Gathered::on(selection, base, asked.clean))?;
    locked::check_steps(selection, &gathered.inputs)?;
    let Some(resolved) = resolve_and_pull(run, asked, gathered)? else {
        return Ok(Attempt::Gone);
    };
    let mut env = claim::lock(run, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env)?;
    locked::check_built(selection, run.with.store, &plan)?;
    env.touch();
    if plan.is_empty() && env.record().is_some() {
        nothing_to_do(run, &resolved, &mut env, &plan)?;
        return Ok(Attempt::Done(resolved.finished(None, &plan)));
    }
    preflight(run, asked, &resolved, &env, &plan)?;
    if !claim::lease(&env, &resolved, &observed, &plan)? {
        return Ok(Attempt::Gone);
    }
    run.with.store.load_ballast()?;
    claim::record(&mut env, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env)?;
    match execute::execute(run, &resolved, &mut env, &observed, &plan)? {
        Progress::Changed(step) => Ok(Attempt::Known(step)),
        Progress::Ended(ended) => match (&ended, &resolved.open) {
            (Ended::Complete, Some(step)) => Ok(Attempt::Known(step.clone())),
            _ => Ok(Attempt::Done(resolved.finished(Some(ended), &plan))),
        },
    }
}

/// Makes missing sources; reports each note about them once.
fn gather_sources<'a>(run: &Run<'_>, gathered: Gathered<'a>) -> Result<Gathered<'a>> {
    let (gathered, notes) = sources::gather(gathered, run.with)?;
    for message in notes {
        if run.told.borrow_mut().insert(message.clone()) {
            run.with.task.reporter.warn(message);
        }
    }
    Ok(gathered)
}

/// Resolves the profile, and pulls the steps that a registry has; `None` if the image is gone.
fn resolve_and_pull<'a>(
    run: &Run<'_>,
    asked: &Options,
    mut gathered: Gathered<'a>,
) -> Result<Option<Resolved<'a>>> {
    let mut spec = gathered.resolve(Some(run.with.store))?;
    if let Some(source) = &run.source {
        // A pulled step may decide the keys of later ones, which can then be pulled too.
        while source.pull_steps(run.with.store, &gathered, &spec, asked)? {
            spec = gathered.resolve(Some(run.with.store))?;
        }
    }
    let Some(image) = base::settle(run, &gathered)? else {
        return Ok(None);
    };
    let selection = gathered.selection;
    locked::follow_sources(&mut spec, selection, run.with.store, &gathered.sources);
    spec.lock = selection.locked.as_ref().map(Locked::digest).transpose()?;
    let open = opening(&selection.profile, &spec, asked);
    let options = Options {
        until: open.clone().or_else(|| asked.until.clone()),
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
    fn plan(&self, run: &Run<'_>, env: &LockedEnv<'_>) -> Result<(Observed, Plan)> {
        plan_for(
            run.with.store,
            Some(env),
            &self.gathered,
            &self.spec,
            &self.options,
        )
    }

    fn finished(&self, ended: Option<Ended>, plan: &Plan) -> Finished {
        Finished {
            ended,
            env: self.spec.name.clone(),
            lacking: summary::lacking(plan, self.gathered.selection),
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
    resolved: &Resolved<'_>,
    env: &mut LockedEnv<'_>,
    plan: &Plan,
) -> Result<()> {
    let spec = &resolved.spec;
    // Variables for using the results are in no key, so they may have changed all the same.
    if run.with.store.spec(&spec.name).ok().as_ref() != Some(spec) {
        env.save_spec(spec)?;
    }
    if !env.known_record()?.complete && run.args.plan.until.is_none() {
        env.update(|record| record.complete = true)?;
    }
    for step in &plan.steps {
        let outcome = match step.action {
            Action::Hit => Outcome::Hit,
            Action::Pull | Action::Run | Action::Skip | Action::Later => Outcome::Skipped,
        };
        let row = || Row::of(spec, &step.name, step.key.as_ref(), outcome);
        run.with.task.reporter.measured(row);
    }
    Ok(())
}

/// Refuses what cannot succeed, before anything runs.
fn preflight(
    run: &Run<'_>,
    asked: &Options,
    resolved: &Resolved<'_>,
    env: &LockedEnv<'_>,
    plan: &Plan,
) -> Result<()> {
    if plan.runs() == 0 || run.args.force {
        return Ok(());
    }
    let (spec, store, gathered) = (&resolved.spec, run.with.store, &resolved.gathered);
    // A new env is judged by everything that it will run. An existing one may have some of that already.
    let whole = match env.record() {
        None => Some(plan_for(store, Some(env), gathered, spec, asked)?.1),
        Some(_) => None,
    };
    let judged = whole.as_ref().unwrap_or(plan);
    Needs::of(gathered.selection, spec, judged, store.root(), env.record())?.preflight()
}
