//! Owns building several envs at once: each by its own `up`, in the order of the scheduler. All share the machine's
//! budget of jobs and memory.

pub(crate) mod jobs;
mod rockenv_command;

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::mpsc;

use clap::Args;
use serde::Serialize;

use self::rockenv_command::{EnvPlan, RockenvCommand, UpEvents};
use crate::matrix::scheduler::{ScheduledUp, Scheduler};
use crate::matrix::{Cell, check_names, check_outputs};
use crate::plan::PlanStep;
use crate::plan::ids::EnvName;
use crate::profile;
use crate::store::Store;
use crate::store::ephemeral::OwnerLock;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::signals::{Cancel, Signals};
use crate::sys::thread;
use crate::ui::event::Outcome;
use crate::ui::size;
use crate::up::context::Context;
use crate::up::ephemeral;
use crate::up::summary::removed_text;

#[derive(Debug, Args)]
pub(crate) struct MatrixRequest {
    /// Envs to build at once; all share one budget of jobs
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    parallel: u8,
    /// Remove all envs when this command ends, even if it is killed; outputs, caches and sources stay; needs root
    #[arg(long)]
    ephemeral: bool,
    /// Options for each `up`, after `--`
    #[arg(index = 2, last = true, value_name = "OPTION")]
    options: Vec<String>,
}

pub(crate) struct MatrixResult {
    pub common: Vec<CommonSteps>,
    pub envs: Vec<EnvResult>,
    pub removed: Result<()>,
}

impl MatrixResult {
    /// Returns 0, the exit code that all failed envs share, or that of a failed step if they differ.
    pub(crate) fn exit_code(&self) -> u8 {
        let mut codes = self.envs.iter().filter_map(|env| env.failure);
        let first = codes.next().map_or(0, Kind::exit_code);
        match codes.all(|kind| kind.exit_code() == first) {
            true => first,
            false => Kind::StepFailed.exit_code(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum EnvOutcome {
    Done,
    /// There was nothing to do.
    Hit,
    Failed,
    /// A shared step failed.
    NotRun,
}

impl EnvOutcome {
    pub(crate) fn text(self) -> &'static str {
        match self {
            Self::Done => "done",
            Self::Hit => "hit",
            Self::Failed => "failed",
            Self::NotRun => "not run",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct EnvResult {
    /// The target; several targets of one profile are joined by commas.
    pub target: String,
    pub env: Option<EnvName>,
    pub outcome: EnvOutcome,
    /// Milliseconds of its `up`, without steps built for others.
    pub wall_ms: u64,
    /// Growth of disk usage in bytes.
    pub disk_delta: i64,
    /// Why it failed or did not run, or which of its steps were skipped for lack of a GPU or are left after `--until`.
    pub why: Option<String>,
    #[serde(skip)]
    failure: Option<Kind>,
}

impl EnvResult {
    fn new(cx: &Context, cell: &Cell) -> Result<Self> {
        let own = match (cell.target, &cell.profile) {
            (None, Some(name)) => profile::load(&cx.config.profile_dirs, name)?.targets,
            _ => Vec::new(),
        };
        let targets = cell.targets(&own)?;
        let names: Vec<&str> = targets.iter().map(|target| target.name()).collect();
        Ok(Self {
            target: names.join(","),
            env: None,
            outcome: EnvOutcome::NotRun,
            wall_ms: 0,
            disk_delta: 0,
            why: None,
            failure: None,
        })
    }

    fn name(&self) -> &str {
        self.env.as_deref().unwrap_or(&self.target)
    }

    fn is_failed(&self) -> bool {
        self.outcome == EnvOutcome::Failed
    }

    /// Records why an `up` failed, in its own words if it gave any.
    fn fail(&mut self, error: &Error) {
        let chain = error.chain();
        let said = chain.iter().flat_map(|text| text.lines());
        let own = said
            .filter_map(|line| line.strip_prefix("error: "))
            .next_back();
        self.outcome = EnvOutcome::Failed;
        self.failure = Some(error.kind());
        self.why = Some(own.unwrap_or_else(|| error.message()).to_owned());
    }
}

/// Steps that several envs share, and that one of them has built.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct CommonSteps {
    pub env: String,
    pub envs: Vec<String>,
    until: String,
    steps: usize,
    pub wall_ms: u64,
    pub disk_delta: i64,
}

/// The state of all envs, and its display.
struct Progress<'a> {
    cx: &'a Context,
    envs: Vec<EnvResult>,
    common: Vec<CommonSteps>,
    /// Whether a CI system's section is open for envs that are built side by side.
    beside: bool,
}

/// Options of `up` that change its output, which this command reads, that build nothing, or that name another store.
const NOT_PASSED: [&str; 7] = [
    "--dry-run",
    "-d",
    "--json",
    "--progress",
    "--help",
    "-h",
    "--home",
];

/// Refuses options that cannot be passed to each `up`.
fn check_options(options: &[String]) -> Result<()> {
    let mut names = options.iter().filter_map(|one| one.split('=').next());
    let Some(option) = names.find(|option| NOT_PASSED.contains(option)) else {
        return Ok(());
    };
    let help = match option {
        "--home" => "all envs are in one store: rockenv --home DIR matrix ...",
        _ => "`rockenv plan TARGET` shows one env; `rockenv up --help` the options",
    };
    Err(usage!("`{option}` cannot be passed to each `up`").help(help))
}

/// Brings all envs up.
pub(crate) fn up(cx: &Context, cells: &[Cell], request: &MatrixRequest) -> Result<MatrixResult> {
    check_options(&request.options)?;
    if cells.len() > 1 && request.options.iter().any(|one| one == "--ephemeral") {
        cx.ui.warn(
            "with `-- --ephemeral` each env builds the common steps again; `matrix up --ephemeral` builds them once",
        );
    }
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    let rockenv = RockenvCommand {
        cx,
        host: Host::probe()?,
        options: &request.options,
        cancel: &cancel,
    };
    let envs = cells.iter().map(|cell| EnvResult::new(cx, cell));
    let mut progress = Progress {
        cx,
        envs: envs.collect::<Result<_>>()?,
        common: Vec::new(),
        beside: false,
    };
    let scheduler = Scheduler::new(&plan_all(&rockenv, cells, &mut progress.envs)?);
    // Kept until the last env has ended: each builds on steps that another built.
    let claims = match request.ephemeral {
        true => create_ephemeral_envs(cx, &progress.envs)?,
        false => Vec::new(),
    };
    build(&rockenv, cells, request.parallel, &mut progress, scheduler);
    let count = size::count(claims.len(), "env");
    let removed = end_ephemeral_envs(cx, claims);
    if let (true, Ok(outputs)) = (request.ephemeral, &removed) {
        cx.ui.note(&format!("{count} {}", removed_text(outputs)));
    }
    if let Some(signal) = cancel.caught() {
        let kept = match request.ephemeral {
            true => "run the command again",
            false => "run the command again: finished steps are kept",
        };
        return Err(Error::new(Kind::Signal(signal), "interrupted").help(kept));
    }
    for env in progress.envs.iter().filter(|env| env.is_failed()) {
        cx.ui
            .annotate_failure(env.name(), env.why.as_deref().unwrap_or_default());
    }
    Ok(MatrixResult {
        common: progress.common,
        envs: progress.envs,
        removed: removed.map(drop),
    })
}

/// Plans each env; an env that cannot be planned has failed.
fn plan_all(
    rockenv: &RockenvCommand<'_>,
    cells: &[Cell],
    envs: &mut [EnvResult],
) -> Result<Vec<Option<Vec<PlanStep>>>> {
    let mut plans = Vec::new();
    let mut told = BTreeSet::new();
    let mut outputs = Vec::new();
    for (env, cell) in envs.iter_mut().zip(cells) {
        plans.push(match rockenv.cancel.outcome(rockenv.plan(cell)) {
            Ok(EnvPlan {
                env: name,
                plan,
                needs,
            }) => {
                outputs.extend(needs.outputs.into_iter().map(|path| (path, name.clone())));
                env.env = Some(name);
                Some(plan.steps)
            }
            Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
            Err(error) => {
                env.fail(&error);
                // An invalid profile is invalid for all of its targets.
                for text in error.chain().into_iter().skip(1) {
                    if told.insert(text.clone()) {
                        let lines = text.lines().map(|line| format!("{}: {line}", env.name()));
                        lines.for_each(|line| rockenv.cx.ui.note(&line));
                    }
                }
                None
            }
        });
    }
    let named = envs.iter().zip(cells);
    check_names(named.filter_map(|(env, cell)| Some((env.env.as_deref()?, cell))))?;
    check_outputs(&outputs)?;
    Ok(plans)
}

/// An env that ends with this command.
type Claim = (Store, EnvName, OwnerLock);

/// Ties the envs that can be built to the lifetime of this command, all or none.
fn create_ephemeral_envs(cx: &Context, envs: &[EnvResult]) -> Result<Vec<Claim>> {
    // Without root, each `up` is root in its own user namespace.
    if !nix::unistd::geteuid().is_root() {
        return Err(
            unavailable!("`matrix up --ephemeral` needs root").help("sudo rockenv matrix up ...")
        );
    }
    let store = cx.store()?;
    let mut claims = Vec::new();
    for env in envs.iter().filter_map(|env| env.env.clone()) {
        match store.create_ephemeral(&env, "up --ephemeral") {
            Ok(claim) => claims.push((store.clone(), env, claim)),
            Err(error) => {
                drop(end_ephemeral_envs(cx, claims));
                return Err(error);
            }
        }
    }
    Ok(claims)
}

/// Removes these envs, and warns about those that stay. Returns the directories of their outputs.
fn end_ephemeral_envs(cx: &Context, claims: Vec<Claim>) -> Result<Vec<PathBuf>> {
    let mut removed = Ok(Vec::new());
    for (store, env, claim) in claims {
        match (ephemeral::end(&store, &env, claim), &mut removed) {
            (Ok(outputs), Ok(all)) => all.extend(outputs),
            (Ok(_), Err(_)) => {}
            (Err(error), _) => {
                cx.ui.warn(&error.chain().join(": "));
                removed = Err(error.help("to remove the rest, run: rockenv gc"));
            }
        }
    }
    removed
}

/// Builds the envs, several at a time.
fn build(
    rockenv: &RockenvCommand<'_>,
    cells: &[Cell],
    parallel: u8,
    progress: &mut Progress<'_>,
    mut scheduler: Scheduler,
) {
    std::thread::scope(|scope| {
        let (ended, ends) = mpsc::channel();
        let mut running = 0;
        loop {
            while running < parallel
                && rockenv.cancel.caught().is_none()
                && let Some(up) = scheduler.start_next()
            {
                progress.begin(&up);
                running += 1;
                let env = progress.envs[up.env].name().to_owned();
                let (not_begun, sender) = (up.clone(), ended.clone());
                let thread = thread::start_in(scope, move || {
                    let until = up.shared.as_ref().map(|shared| shared.until.as_str());
                    let (events, result) = rockenv.up(&cells[up.env], &env, until);
                    // The receiver is gone only at the end.
                    drop(sender.send((up, events, result)));
                });
                if let Err(error) = thread {
                    drop(ended.send((not_begun, UpEvents::default(), Err(error))));
                }
            }
            if running == 0 {
                break;
            }
            let Ok((up, events, result)) = ends.recv() else {
                break;
            };
            running -= 1;
            progress.end(&up, events, result, &mut scheduler);
        }
    });
    rockenv.cx.ui.end_section();
}

impl Progress<'_> {
    /// Announces an `up`. A step common to all remaining envs is built alone in its own section; envs built side by
    /// side share a section.
    fn begin(&mut self, up: &ScheduledUp) {
        let ui = &self.cx.ui;
        let shared = up.shared.as_ref();
        let title = shared.map(|shared| {
            let whose = match self.is_all(&shared.envs) {
                true => "all".to_owned(),
                false => self.names(&shared.envs).join(", "),
            };
            let env = self.envs[up.env].name();
            let until = &shared.until;
            format!("common to {whose} up to step `{until}`: env {env} builds it")
        });
        let alone = shared.is_some_and(|shared| self.is_all(&shared.envs));
        if let (true, Some(title)) = (alone, &title) {
            ui.end_section();
            return ui.begin_section(title);
        }
        if self.cx.config.terminal.ci_system.is_some() && !self.beside {
            ui.end_section();
            ui.begin_section(&size::count(self.envs.len(), "env"));
            self.beside = true;
        }
        if let Some(title) = title {
            ui.note(&title);
        }
    }

    /// Returns whether these are all envs that can still succeed.
    fn is_all(&self, envs: &[usize]) -> bool {
        let lost = self.envs.iter().filter(|env| env.is_failed());
        envs.len() + lost.count() == self.envs.len()
    }

    fn names(&self, envs: &[usize]) -> Vec<String> {
        let envs = envs.iter().map(|env| self.envs[*env].name().to_owned());
        envs.collect()
    }

    /// Records how an `up` ended, and its effect on envs that share its steps.
    fn end(
        &mut self,
        up: &ScheduledUp,
        events: UpEvents,
        result: Result<()>,
        scheduler: &mut Scheduler,
    ) {
        let env = self.envs[up.env].name().to_owned();
        if let (Some(shared), Ok(())) = (&up.shared, &result) {
            scheduler.succeeded(up);
            self.common.push(CommonSteps {
                env,
                envs: self.names(&shared.envs),
                until: shared.until.to_string(),
                steps: shared.steps,
                wall_ms: events.wall_ms,
                disk_delta: events.disk_delta,
            });
            return;
        }
        let own = &mut self.envs[up.env];
        own.wall_ms = events.wall_ms;
        own.disk_delta = events.disk_delta;
        match result {
            Ok(()) => {
                scheduler.succeeded(up);
                own.outcome = match events.outcome {
                    Some(Outcome::Hit) => EnvOutcome::Hit,
                    _ => EnvOutcome::Done,
                };
                own.why = events.lacking;
            }
            Err(error) => {
                own.fail(&error);
                match events.failed_for_all(&error) {
                    None => scheduler.dropped(up),
                    Some(step) => {
                        for other in scheduler.failed(up) {
                            self.envs[other].why =
                                Some(format!("step `{step}` failed in env {env}"));
                        }
                    }
                }
            }
        }
    }
}
