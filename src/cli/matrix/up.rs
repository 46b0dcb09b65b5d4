//! Owns `matrix up`: builds each env by its own `up`, in turns, and reports the outcomes.

use std::collections::BTreeSet;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::{MatrixReport, Starter, Told, Which};
use crate::cli::job_summary;
use crate::matrix::scheduler::{Turn, Turns};
use crate::matrix::{Cell, cells, check_names};
use crate::profile;
use crate::store::Store;
use crate::store::ephemeral::Claim;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::signals::{Cancel, Signals};
use crate::ui::event::Outcome;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;
use crate::up::ephemeral;

const TITLES: [&str; 6] = ["target", "env", "outcome", ">time", ">disk", "why"];

#[derive(Debug, Args)]
pub struct MatrixUpArgs {
    #[command(flatten)]
    which: Which,
    /// Envs to build at once; all share one budget of jobs
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    parallel: u8,
    /// Remove all envs when this command ends, even if it is killed; outputs, caches and sources stay
    #[arg(long)]
    ephemeral: bool,
    /// Options for each `up`, after `--`
    #[arg(index = 2, last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// The outcome of an env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct JobRow {
    /// The target; several targets of one profile are joined by commas.
    target: String,
    /// The env's name, once known.
    env: Option<String>,
    /// `done`, `hit` (nothing to do), `failed`, or `not-run` because a shared step failed.
    outcome: &'static str,
    /// Milliseconds of its `up`, without steps built for others.
    wall_ms: u64,
    /// Growth of disk usage in bytes.
    disk_delta: i64,
    /// Why it failed or did not run.
    why: Option<String>,
}

impl JobRow {
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
            outcome: "not-run",
            wall_ms: 0,
            disk_delta: 0,
            why: None,
        })
    }

    fn name(&self) -> &str {
        self.env.as_deref().unwrap_or(&self.target)
    }

    /// Records why an `up` failed, in its own words if it gave any.
    fn fail(&mut self, error: &Error) {
        let chain = error.chain();
        let said = chain.iter().flat_map(|text| text.lines());
        let own = said
            .filter_map(|line| line.strip_prefix("error: "))
            .next_back();
        self.outcome = "failed";
        self.why = Some(own.unwrap_or_else(|| error.message()).to_owned());
    }
}

/// Steps that several envs share, and that one of them has built.
#[derive(Clone, Debug, Serialize)]
struct Common {
    env: String,
    /// All envs that share them.
    envs: Vec<String>,
    /// The last of them.
    until: String,
    steps: usize,
    wall_ms: u64,
    disk_delta: i64,
}

/// How a turn ended.
struct End {
    turn: Turn,
    wall_ms: u64,
    told: Told,
    result: Result<()>,
}

struct Board<'a> {
    cx: &'a Context,
    rows: Vec<JobRow>,
    common: Vec<Common>,
    /// Whether a CI system's section is open for envs that are built side by side.
    beside: bool,
}

/// Brings all envs up; returns the exit code.
pub(super) fn up(cx: &Context, args: &MatrixUpArgs) -> Result<u8> {
    let cells = cells(&args.which.profile, &args.which.targets)?;
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    let starter = Starter {
        cx,
        host: Host::probe()?,
        options: &args.options,
        cancel: &cancel,
    };
    let mut board = Board {
        cx,
        rows: cells
            .iter()
            .map(|cell| JobRow::new(cx, cell))
            .collect::<Result<_>>()?,
        common: Vec::new(),
        beside: false,
    };
    let mut plans = Vec::new();
    let mut told = BTreeSet::new();
    for (row, cell) in board.rows.iter_mut().zip(&cells) {
        plans.push(match cancel.outcome(starter.plan(cell)) {
            Ok(MatrixReport { env, plan, .. }) => {
                row.env = Some(env);
                Some(plan.steps)
            }
            Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
            Err(error) => {
                row.fail(&error);
                // An invalid profile is invalid for all of its targets.
                for text in error.chain().into_iter().skip(1) {
                    if told.insert(text.clone()) {
                        let lines = text.lines().map(|line| format!("{}: {line}", row.name()));
                        lines.for_each(|line| cx.ui.note(&line));
                    }
                }
                None
            }
        });
    }
    let named = board.rows.iter().zip(&cells);
    check_names(named.filter_map(|(row, cell)| Some((row.env.as_deref()?, cell))))?;
    // Kept until the last env has ended: each builds on steps that another built.
    let claims = match args.ephemeral {
        true => claim(cx, &board.rows)?,
        false => Vec::new(),
    };
    build(
        &starter,
        &cells,
        &mut board,
        Turns::new(&plans),
        args.parallel,
    );
    let mut wrong = None;
    for (store, env, claim) in claims {
        if let Err(error) = ephemeral::end(&store, &env, claim) {
            cx.ui.warn(&error.chain().join(": "));
            wrong = Some(error.help("to remove the rest, run: rockenv gc"));
        }
    }
    if let Some(signal) = cancel.caught() {
        let kept = match args.ephemeral {
            true => "run the same command again",
            false => "run the same command again: finished steps are kept",
        };
        return Err(Error::new(Kind::Signal(signal), "interrupted").help(kept));
    }
    let failed = |row: &&JobRow| row.outcome == "failed";
    for row in board.rows.iter().filter(failed) {
        cx.ui
            .annotate_failure(row.name(), row.why.as_deref().unwrap_or_default());
    }
    job_summary::of_matrix(cx, &TITLES, &board.lines());
    board.show()?;
    if let Some(error) = wrong {
        return Err(error);
    }
    Ok(match board.rows.iter().any(|row| failed(&row)) {
        true => Kind::StepFailed.exit_code(),
        false => 0,
    })
}

/// Ties the envs that can be built to the life of this command.
fn claim(cx: &Context, rows: &[JobRow]) -> Result<Vec<(Store, String, Claim)>> {
    // Without root, each `up` is root in its own user namespace.
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::unavailable("`matrix up --ephemeral` needs root")
            .help("sudo rockenv matrix up ..."));
    }
    let store = cx.store()?;
    rows.iter()
        .filter_map(|row| row.env.clone())
        .map(|env| {
            let claim = store.claim(&env, "up --ephemeral")?;
            Ok((store.clone(), env, claim))
        })
        .collect()
}

/// Builds the envs in turns, several at a time.
fn build(
    starter: &Starter<'_>,
    cells: &[Cell],
    board: &mut Board<'_>,
    mut turns: Turns,
    parallel: u8,
) {
    std::thread::scope(|scope| {
        let (ended, ends) = mpsc::channel();
        let mut running = 0;
        loop {
            while running < parallel
                && starter.cancel.caught().is_none()
                && let Some(turn) = turns.take()
            {
                board.begin(&turn);
                running += 1;
                let env = board.rows[turn.env].name().to_owned();
                let ended = ended.clone();
                scope.spawn(move || {
                    let began = Instant::now();
                    let until = turn.shared.as_ref().map(|shared| shared.until.as_str());
                    let (told, result) = starter.up(&cells[turn.env], &env, until);
                    let wall_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    let end = End {
                        turn,
                        wall_ms,
                        told,
                        result,
                    };
                    // The receiver is gone only at the end.
                    drop(ended.send(end));
                });
            }
            if running == 0 {
                break;
            }
            let Ok(end) = ends.recv() else { break };
            running -= 1;
            board.end(end, &mut turns);
        }
    });
    starter.cx.ui.end_section();
}

impl Board<'_> {
    /// Announces a turn. A step common to all remaining envs is built alone in its own section; envs built side by
    /// side share a section.
    fn begin(&mut self, turn: &Turn) {
        let ui = &self.cx.ui;
        let shared = turn.shared.as_ref();
        let title = shared.map(|shared| {
            let whose = match self.is_all(&shared.envs) {
                true => "all".to_owned(),
                false => self.names(&shared.envs).join(", "),
            };
            let env = self.rows[turn.env].name();
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
            ui.begin_section(&size::count(self.rows.len(), "env"));
            self.beside = true;
        }
        if let Some(title) = title {
            ui.note(&title);
        }
    }

    /// Returns whether these are all envs that can still succeed.
    fn is_all(&self, envs: &[usize]) -> bool {
        let lost = self.rows.iter().filter(|row| row.outcome == "failed");
        envs.len() + lost.count() == self.rows.len()
    }

    fn names(&self, envs: &[usize]) -> Vec<String> {
        let rows = envs.iter().map(|env| &self.rows[*env]);
        rows.map(|row| row.name().to_owned()).collect()
    }

    /// Records how a turn ended, and its effect on envs that share its steps.
    fn end(&mut self, end: End, turns: &mut Turns) {
        let End {
            turn,
            wall_ms,
            told,
            result,
        } = end;
        let env = self.rows[turn.env].name().to_owned();
        if let (Some(shared), Ok(())) = (&turn.shared, &result) {
            turns.done(&turn);
            self.common.push(Common {
                env,
                envs: self.names(&shared.envs),
                until: shared.until.clone(),
                steps: shared.steps,
                wall_ms,
                disk_delta: told.disk_delta,
            });
            return;
        }
        let row = &mut self.rows[turn.env];
        row.wall_ms = wall_ms;
        row.disk_delta = told.disk_delta;
        match result {
            Ok(()) => {
                turns.done(&turn);
                row.outcome = match told.outcome {
                    Some(Outcome::Hit) => "hit",
                    _ => "done",
                };
            }
            Err(error) => {
                row.fail(&error);
                match told.failed_for_all(&error) {
                    None => turns.dropped(&turn),
                    Some(step) => {
                        for other in turns.failed(&turn) {
                            self.rows[other].why =
                                Some(format!("step `{step}` failed in env {env}"));
                        }
                    }
                }
            }
        }
    }

    fn show(&self) -> Result<()> {
        if self.cx.json {
            #[derive(Serialize)]
            struct MatrixSummary<'a> {
                schema: &'static str,
                common: &'a [Common],
                envs: &'a [JobRow],
            }
            return self.cx.ui.json(&MatrixSummary {
                schema: "rockenv/matrix/1",
                common: &self.common,
                envs: &self.rows,
            });
        }
        let mut table = Table::new(TITLES);
        for line in self.lines() {
            table.row(line);
        }
        self.cx.ui.table(&table);
        Ok(())
    }

    fn lines(&self) -> Vec<Vec<String>> {
        let time = |ms| size::duration(Duration::from_millis(ms));
        let all = self.rows.len();
        let common = self.common.iter().map(|common| {
            let whose = match common.envs.len() {
                count if count == all => "all".to_owned(),
                count => format!("{count} of {all}"),
            };
            vec![
                whose,
                common.env.clone(),
                "done".to_owned(),
                time(common.wall_ms),
                size::delta(common.disk_delta),
                match common.envs.len() {
                    count if count == all => "their common steps".to_owned(),
                    _ => format!("the common steps of {}", common.envs.join(", ")),
                },
            ]
        });
        let rows = self.rows.iter().map(|row| {
            vec![
                row.target.clone(),
                row.env.clone().unwrap_or_default(),
                row.outcome.replace('-', " "),
                time(row.wall_ms),
                size::delta(row.disk_delta),
                row.why.clone().unwrap_or_default(),
            ]
        });
        common.chain(rows).collect()
    }
}
