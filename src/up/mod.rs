//! Owns one `up`, from the request to its end. `attempt` does the build, and `up` everything around it.

pub(crate) mod base_image;
pub(crate) mod check;
pub(crate) mod checkout;
pub(crate) mod context;
pub(crate) mod downloads;
pub(crate) mod env_origin;
pub(crate) mod ephemeral;
pub(crate) mod exec;
pub(crate) mod execute;
pub(crate) mod gc;
pub(crate) mod gpu_code;
pub(crate) mod hook_revisions;
pub(crate) mod hooks;
pub(crate) mod host_writes;
pub(crate) mod lock;
pub(crate) mod lock_env;
pub(crate) mod lock_inputs;
pub(crate) mod locked;
pub(crate) mod matrix;
pub(crate) mod observe;
pub(crate) mod offline;
mod older_sources;
pub(crate) mod options;
pub(crate) mod other_users;
pub(crate) mod preflight;
pub(crate) mod push;
pub(crate) mod registry;
pub(crate) mod request;
pub(crate) mod resolve;
pub(crate) mod results;
pub(crate) mod segments;
pub(crate) mod select;
pub(crate) mod stop_and_lock;
pub(crate) mod summary;
pub(crate) mod task;
pub(crate) mod verify;

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::mpsc::Sender;

use crate::execute::{BlockedResults, Ended, ExecutionProgress};
use crate::plan::ids::EnvName;
use crate::plan::record::{Outcome as StepOutcome, Record};
use crate::plan::resolve::{Engine, Spec};
use crate::plan::{Action, Plan, StepOptions};
use crate::store::ephemeral::OwnerLock;
use crate::store::results::BlockedResult;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::name::StepName;
use crate::sys::signals::Signals;
use crate::ui::Format;
use crate::ui::event::Outcome;
use crate::ui::metrics::{Row, Rows};
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::observe::plan_for;
use crate::up::options::{UpOptions, options, rest};
use crate::up::other_users::OthersVolumes;
use crate::up::preflight::Needs;
use crate::up::push::Background;
use crate::up::registry::Source;
use crate::up::resolve::{Gathered, Resolved, resolve_and_pull};
use crate::up::results::ResultsSummary;
use crate::up::select::Selection;
use crate::up::summary::Fate;
use crate::up::task::Task;

/// Maximum number of attempts while other processes remove layers or change sources, and of runs of one step.
const ATTEMPTS: usize = 5;

/// Brings an env up: refuses requests that cannot work, builds, pushes and reports. Calls `summarise` after the steps,
/// while the env still exists. Returns the exit code.
pub(crate) fn up(
    cx: &Context,
    args: &UpOptions,
    summarise: &dyn Fn(&Store, &EnvName),
) -> Result<u8> {
    let begun = begin(cx, args).inspect_err(|error| {
        // Readers of the events wait for the last event, `finished`.
        if args.progress == Format::Json {
            let outcome = match error.kind() {
                Kind::Signal(_) => Outcome::Interrupted,
                _ => Outcome::Failed,
            };
            cx.ui.reporter(Format::Json).finish(outcome, "");
        }
    });
    let Begun {
        selection,
        store,
        task,
        claim,
    } = begun?;
    let (task, reporter) = (&task, &task.reporter);
    selection.notes.iter().for_each(|note| reporter.warn(note));
    let name = &selection.name;
    let reuse = args.plan.reuse(&cx.config);
    let pushing = args.pushes(&cx.config);
    // A failure to start comes again at the end.
    let background = pushing.then(|| Background::start(task, &store, name, reuse));
    let background = background.and_then(Result::ok);
    let recorded = background.as_ref().map(|background| &background.recorded);
    let mut outcome = build(task, args, &store, &selection, recorded);
    let has_begun = outcome.is_ok();
    if has_begun {
        summarise(&store, name);
    }
    match &outcome {
        Ok(finished) if pushing && !finished.is_interrupted() => {
            let pushed = push::finished_steps(task, &store, name, reuse, background);
            // The reason why a step failed comes first.
            if let (true, Err(error)) = (finished.is_done(), pushed) {
                outcome = Err(error);
            }
        }
        _ => background
            .into_iter()
            .for_each(|background| background.stop(reporter)),
    }
    // Finished steps are pushed by now, so a broken build can end as an error like any other.
    let outcome = outcome.and_then(Finished::unless_broken);
    let is_done = outcome.as_ref().is_ok_and(Finished::is_done);
    let removed = claim.map(|claim| ephemeral::end(&store, name, claim));
    let tidied = cx.tidy(&store);
    let is_parents = store.is_ephemeral(name);
    let fate = Fate::of(cx, removed, is_parents, !is_done);
    // The reason why a step failed comes first.
    let outcome = outcome.and_then(|finished| match is_done {
        true => Ok((finished, tidied.and(fate)?)),
        false => Ok((finished, fate?)),
    });
    let (finished, fate) = match outcome {
        Ok(finished) => finished,
        Err(error) => {
            let signal = match (task.signals.pending()?, error.kind()) {
                // The work that the signal stopped has read it.
                (None, Kind::Signal(signal)) => Some(signal),
                // The same Ctrl-C ended the failed tool.
                (pending, _) => pending,
            };
            let Some(signal) = signal else {
                reporter.finish(Outcome::Failed, "");
                return Err(error);
            };
            reporter.finish(Outcome::Interrupted, "");
            let again = match has_begun {
                true => args.resume_command(),
                false => args.repeat_command(),
            };
            return Err(Error::new(Kind::Signal(signal), "interrupted").help(again));
        }
    };
    let has_run = finished.ended.is_some();
    let code = summary::say(cx, reporter, finished, &fate, args)?;
    if let (Fate::Stays, true, Ok(spec)) = (&fate, is_done, store.spec(name)) {
        ResultsSummary::of(&store, &spec).note(&cx.ui);
        if let (true, Some(record)) = (has_run, store.record(name)?) {
            let layer = record.head.layer.as_ref();
            let notes = gpu_code::notes(&store, &spec, layer, &record.image_key);
            notes.iter().for_each(|note| cx.ui.note(note));
        }
    }
    Ok(code)
}

/// A request that may work, and what its stages share.
struct Begun<'a> {
    selection: Selection,
    store: Store,
    task: Task<'a>,
    /// Of an ephemeral env.
    claim: Option<OwnerLock>,
}

/// Refuses requests that cannot work; opens the store and the file of metrics, and claims an ephemeral env.
fn begin<'a>(cx: &'a Context, args: &UpOptions) -> Result<Begun<'a>> {
    let selection = args.plan.select(cx, "up")?;
    check_rights(cx, args, &selection)?;
    let store = cx.store()?;
    let slurm_job = cx.config.host_variable("SLURM_JOB_ID");
    let slurm_job = slurm_job.filter(|job| !job.is_empty());
    let metrics = args.metrics.as_deref();
    let metrics = metrics.map(|path| Rows::open(path, slurm_job));
    let metrics = metrics.transpose()?;
    if args.plan.offline {
        offline::check(cx, &store, &selection)?;
    }
    locked::check_files(&selection, &store)?;
    if let Some(locked) = &selection.locked {
        store.remember_lock(locked::lasting_path(&locked.path)?, &locked.lock)?;
    }
    let signals = Signals::take()?;
    let name = &selection.name;
    let claim = args
        .ephemeral
        .then(|| store.create_ephemeral(name, "up --ephemeral"));
    let claim = claim.transpose()?;
    let reporter = cx.ui.reporter(args.progress).with_metrics(metrics);
    let task = Task {
        cx,
        signals,
        reporter,
    };
    Ok(Begun {
        selection,
        store,
        task,
        claim,
    })
}

/// Refuses a request that this user, this machine or the configuration cannot serve.
fn check_rights(cx: &Context, args: &UpOptions, selection: &Selection) -> Result<()> {
    host_writes::confirm(cx, selection)?;
    if selection.choice.engine == Engine::Nspawn && !selection.host.root {
        let error = unavailable!("building an env with systemd-nspawn needs root");
        return Err(error.help(&cx.config.sudo_command));
    }
    // An ordinary user's only engine is their own Podman.
    cx.host_as_rootless("building an env")?;
    if args.pushes(&cx.config) {
        registry::repository_to_push(cx, None, None)?;
    }
    Ok(())
}

/// Resolves, locks, plans and executes. `recorded` is told the step of each new snapshot.
fn build(
    task: &Task<'_>,
    args: &UpOptions,
    store: &Store,
    selection: &Selection,
    recorded: Option<&Sender<StepName>>,
) -> Result<Finished> {
    let run = Run {
        with: Fetching {
            task,
            store,
            offline: args.plan.offline,
        },
        args,
        source: Source::new(task, &args.plan)?,
        recorded,
        told: RefCell::default(),
    };
    let mut has_run = false;
    match attempts(&run, selection, &mut has_run) {
        // Finished steps are still pushed.
        Err(error) if has_run => Ok(Finished {
            ended: Some(Ended::failed(error, &task.signals)),
            env: selection.name.clone(),
            lacking: String::new(),
            blocked: Vec::new(),
        }),
        outcome => outcome,
    }
}

/// Makes attempts up to the end of the build. Tries again if a needed layer was removed before this command could lease
/// it. Sets `has_run` if an attempt ran steps.
fn attempts(run: &Run<'_>, selection: &Selection, has_run: &mut bool) -> Result<Finished> {
    let mut options = options(&run.args.plan);
    let mut gone = 0;
    let mut runs = BTreeMap::new();
    let mut missing = None;
    while gone < ATTEMPTS {
        match attempt(run, &options, selection) {
            Ok(Attempt::Done(finished)) => return Ok(finished),
            Ok(Attempt::Gone) => gone += 1,
            Ok(Attempt::Stale) => {
                gone += 1;
                let changing = busy!("a source of env `{}` keeps changing", selection.name);
                missing = Some(changing.help("run the command again"));
            }
            Ok(Attempt::Known(step)) => {
                let times: &mut usize = runs.entry(step.clone()).or_default();
                *times += 1;
                if *times == ATTEMPTS {
                    return Err(unsettled(&step, &selection.name));
                }
                options = rest(&selection.profile, &step, options);
                *has_run = true;
            }
            // Another command may also remove a layer between the plan and the lease.
            Err(error) if error.kind() == Kind::NoLayer && !*has_run => {
                gone += 1;
                missing = Some(error);
            }
            Err(error) => return Err(error),
        }
    }
    // In a damaged store, every attempt fails with the same error.
    let busy = || busy!("base layers keep being removed by another process");
    Err(missing.unwrap_or_else(|| busy().help("run the command again")))
}

/// Makes the error for a step after one that changes its own source whenever it runs: both would run forever.
fn unsettled(step: &str, env: &EnvName) -> Error {
    step_failed!(
        "step `{step}` ran {ATTEMPTS} times, because a step before it changes its own source whenever it runs"
    )
    .help(format!(
        "a step with that source in its `inputs` must leave the same files whenever it runs: rockenv logs {env}"
    ))
}

/// How an `up` ended.
pub(crate) struct Finished {
    /// How the steps ended; `None` if there was nothing to do.
    pub(crate) ended: Option<Ended>,
    pub(crate) env: EnvName,
    /// The skipped GPU steps and the number of steps after `--until`, as text for the last line.
    pub(crate) lacking: String,
    /// Results that are not this build's.
    pub(crate) blocked: Vec<BlockedResult>,
}

impl Finished {
    fn is_done(&self) -> bool {
        matches!(self.ended, None | Some(Ended::Complete))
    }

    fn is_interrupted(&self) -> bool {
        matches!(self.ended, Some(Ended::Interrupted(_)))
    }

    fn unless_broken(self) -> Result<Self> {
        match self.ended {
            Some(Ended::Broke(error)) => Err(error),
            _ => Ok(self),
        }
    }
}

/// The context that all attempts share.
struct Run<'a> {
    with: Fetching<'a>,
    args: &'a UpOptions,
    source: Option<Source<'a>>,
    /// Is told the step of each new snapshot.
    recorded: Option<&'a Sender<StepName>>,
    /// Warnings given so far: each attempt examines the sources and volumes again.
    told: RefCell<BTreeSet<String>>,
}

impl Run<'_> {
    fn warn_once(&self, message: String) {
        if self.told.borrow_mut().insert(message.clone()) {
            self.with.task.reporter.warn(message);
        }
    }
}

enum Attempt {
    Done(Finished),
    /// The image or a layer was removed before the env was locked, or the step that decides later keys was run.
    Gone,
    /// A source changed before the first step ran.
    Stale,
    /// This step has run. The keys of later steps depend on its result, or on a source that it changed.
    Known(StepName),
}

/// Makes one attempt, which ends with the build or after a step whose result decides later keys.
fn attempt(run: &Run<'_>, asked: &StepOptions, selection: &Selection) -> Result<Attempt> {
    let mut gathered = Gathered::new(selection, asked.clean);
    base_image::find(run, &mut gathered)?;
    for message in gathered.fetch(run.with)? {
        run.warn_once(message);
    }
    locked::check_steps(selection, &gathered.inputs)?;
    let Some(resolved) = resolve_and_pull(run, asked, gathered)? else {
        return Ok(Attempt::Gone);
    };
    let mut env = lock_env::lock(run, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env)?;
    let up = run.args.plan.up_command();
    locked::check_built(selection, run.with.store, &resolved.spec, &plan, &up)?;
    env.touch();
    if plan.is_empty()
        && let Some(record) = env.record()
    {
        // Another command has run the step meanwhile, so the keys of later steps are known now.
        if resolved.open.is_some() {
            return Ok(Attempt::Gone);
        }
        if asked.until.is_some() || is_recorded(record, &plan) {
            let blocked = nothing_to_do(run, &resolved, &mut env, &plan)?;
            let finished = resolved.finished(None, &plan, &env, blocked);
            return Ok(Attempt::Done(finished));
        }
    }
    preflight(run, asked, &resolved, &env, &plan)?;
    if !lock_env::lease(&env, &resolved, &observed, &plan)? {
        return Ok(Attempt::Gone);
    }
    run.with.store.load_ballast()?;
    lock_env::record(run, &mut env, &resolved)?;
    let (observed, plan) = resolved.plan(run, &env)?;
    let (store, spec) = (run.with.store, &resolved.spec);
    let before = BlockedResults::of(store, spec, &plan, env.record(), env.name())?.all;
    let ended = match execute::execute(run, &resolved, &mut env, &observed, &plan)? {
        ExecutionProgress::Changed(Some(step)) => return Ok(Attempt::Known(step)),
        ExecutionProgress::Changed(None) => return Ok(Attempt::Stale),
        ExecutionProgress::Ended(ended) => ended,
    };
    let blocked = match (&ended, &resolved.open) {
        (Ended::Complete, Some(step)) => return Ok(Attempt::Known(step.clone())),
        (Ended::Complete, None) => blocked_at_end(run, &resolved.spec, &env, before)?,
        _ => Vec::new(),
    };
    let finished = resolved.finished(Some(ended), &plan, &env, blocked);
    Ok(Attempt::Done(finished))
}

/// Returns whether an env's record has the steps of an empty plan, each done or skipped as planned. Outcomes are out of
/// date if the machine skips a step that ran, or another env built a step that failed here: carrying out the plan
/// updates them.
fn is_recorded(record: &Record, plan: &Plan) -> bool {
    let planned = plan.steps.iter().map(|step| (&step.name, &step.action));
    let recorded = record.steps.iter().map(|step| {
        let action = match step.outcome {
            StepOutcome::Done | StepOutcome::Hit => &Action::Hit,
            StepOutcome::Skipped => &Action::Skip,
            StepOutcome::Failed | StepOutcome::Pending => &Action::Run,
        };
        (&step.name, action)
    });
    record.failed.is_none() && planned.eq(recorded)
}

/// Ends an `up` whose env is complete.
fn nothing_to_do(
    run: &Run<'_>,
    resolved: &Resolved<'_>,
    env: &mut LockedEnv<'_>,
    plan: &Plan,
) -> Result<Vec<BlockedResult>> {
    let spec = &resolved.spec;
    if let Some(locked) = &resolved.gathered.selection.locked {
        env.keep_lock(&locked.lock)?;
    }
    let (record, until) = (env.known_record()?, &run.args.plan.until);
    // If a later step has another key now, an earlier `up` to the end does not make the env complete. The earlier spec
    // stays: it tells the next `up` the sources of the build volumes.
    let keys = plan.steps.iter().map(|step| &step.key);
    let is_same = keys.eq(record.steps.iter().map(|step| &step.key));
    let complete = until.is_none() || record.complete && is_same;
    // Variables for using the results are in no key, so they may have changed.
    let before = run.with.store.spec(&spec.name).ok();
    // The build volumes belong to the user who built last, even if another user has the same steps.
    let owner = before.as_ref().filter(|_| !record.head.volumes.is_empty());
    let user = owner.map_or(&spec.user, |before| &before.user);
    let saved = Spec {
        user: user.clone(),
        ..spec.clone()
    };
    if (until.is_none() || is_same) && before.as_ref() != Some(&saved) {
        env.save_spec(&saved)?;
    }
    let lock_file = resolved.gathered.selection.lock_file();
    let command = Some(run.args.lasting_command(lock_file));
    if record.complete != complete || record.command != command {
        env.update(|record| (record.complete, record.command) = (complete, command))?;
    }
    let blocked = blocked_at_end(run, spec, env, Vec::new())?;
    for other in &blocked {
        run.with.task.reporter.warn(other.message());
    }
    for step in &plan.steps {
        let outcome = match step.action {
            Action::Hit => Outcome::Hit,
            Action::Skip => Outcome::Skipped,
            // These steps have no row, as in an `up` that runs steps.
            Action::Pull | Action::Run | Action::Later => continue,
        };
        let row = || Row::of(spec, &step.name, step.key.as_ref(), outcome);
        run.with.task.reporter.measured(row);
    }
    Ok(blocked)
}

/// Returns the results of the env's layer whose places hold other files. A file in `before` may pass for the result
/// now, because no record tells which build left the file. So the files in `before` are checked again.
fn blocked_at_end(
    run: &Run<'_>,
    spec: &Spec,
    env: &LockedEnv<'_>,
    before: Vec<BlockedResult>,
) -> Result<Vec<BlockedResult>> {
    let (store, record) = (run.with.store, env.known_record()?);
    let Some(head) = &record.head.layer else {
        return Ok(Vec::new());
    };
    let known = record.known_layers();
    let mut blocked = store.plan_restore(head, spec, &known)?.blocked;
    for old in before {
        let is_known = blocked.iter().any(|new| new.is_same(&old));
        if !is_known && store.is_blocked(head, spec, &old)? {
            blocked.push(old);
        }
    }
    Ok(blocked)
}

/// Refuses a build that cannot succeed, before any step runs.
fn preflight(
    run: &Run<'_>,
    asked: &StepOptions,
    resolved: &Resolved<'_>,
    env: &LockedEnv<'_>,
    plan: &Plan,
) -> Result<()> {
    if plan.runs() == 0 {
        return Ok(());
    }
    let (spec, store, gathered) = (&resolved.spec, run.with.store, &resolved.gathered);
    let new = run.args.plan.new_env_command();
    let others = OthersVolumes::of(Some(store), spec, plan, env.record(), &new);
    for warning in others.warnings {
        run.warn_once(warning);
    }
    if let Some((reason, help)) = others.refusal {
        return Err(Error::new(Kind::Preflight, reason).help(help));
    }
    if run.args.force {
        return Ok(());
    }
    // A new env must fit with all of its steps. An existing env may have some of them already.
    let whole = match env.record() {
        None => Some(plan_for(store, Some(env), gathered, spec, asked)?.1),
        Some(_) => None,
    };
    let judged = whole.as_ref().unwrap_or(plan);
    Needs::of(gathered.selection, spec, judged, store.root(), env.record())?.preflight()
}
