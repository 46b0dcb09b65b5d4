//! Owns `matrix`: several envs with one command. Each is built by a `rockenv up` of its own, so that none can take another
//! down, and all of them keep to the machine's one budget of jobs and memory.

mod write;

use std::collections::VecDeque;
use std::io::{BufRead as _, BufReader};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use serde::{Deserialize, Serialize};

use super::{ephemeral, summary};
use crate::context::Context;
use crate::error::{Error, Kind, Result};
use crate::host::Host;
use crate::matrix::{Cell, Foreseen, Prefix, cells, prefix};
use crate::process::{self, Program};
use crate::signals::{Cancel, Signals};
use crate::store::Store;
use crate::store::ephemeral::Claim;
use crate::ui::event::{Event, Outcome};
use crate::ui::size;
use crate::ui::table::Table;

/// How long an env may take to stop what runs in it: as long as `up` gives a step, and some more.
const GRACE: Duration = Duration::from_secs(30);
/// Columns of the table of envs.
const TITLES: [&str; 6] = ["target", "env", "outcome", ">time", ">disk", "why"];
/// More than any plan.
const PLAN_LIMIT: u64 = 64 << 20;

/// Work with several targets at once.
#[derive(Debug, Subcommand)]
pub enum MatrixCommand {
    /// Bring an env up for each target; what they have in common is built once
    Up(MatrixUpArgs),
    #[command(flatten)]
    Write(write::For),
}

/// Which envs.
#[derive(Debug, Args)]
pub struct Which {
    /// Targets, and families of them
    #[arg(index = 1, value_name = "TARGET|FAMILY", required = true)]
    targets: Vec<String>,
    /// Profile or profile file; may be given again [default: therock]
    #[arg(short, long)]
    profile: Vec<String>,
}

/// Arguments of `matrix up`.
#[derive(Debug, Args)]
pub struct MatrixUpArgs {
    #[command(flatten)]
    which: Which,
    /// Envs to build at once; all share one budget of jobs
    #[arg(long, default_value_t = 2, value_name = "N", value_parser = clap::value_parser!(u8).range(1..))]
    parallel: u8,
    /// Remove all of them when this command ends, in whatever way; outputs, caches and sources stay
    #[arg(long)]
    ephemeral: bool,
    /// Options for each `up`, after `--`
    #[arg(index = 2, last = true, value_name = "OPTION")]
    options: Vec<String>,
}

/// Does what was asked for; returns the exit code.
pub fn matrix(cx: &Context, command: &MatrixCommand) -> Result<u8> {
    match command {
        MatrixCommand::Up(args) => up(cx, args),
        MatrixCommand::Write(form) => write::write(cx, form).map(|()| 0),
    }
}

/// What became of an env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
struct Row {
    target: &'static str,
    /// Its name, once that is known.
    env: Option<String>,
    /// `done`, `hit` (there was nothing to do), `failed`, or `not-run` because what it stands on failed.
    outcome: &'static str,
    /// Milliseconds that its `up` took, without what it has in common with others.
    wall_ms: u64,
    /// Bytes by which the disk got fuller.
    disk_delta: i64,
    /// Why it failed.
    why: Option<String>,
}

/// What all of them have in common, where it had to be built.
#[derive(Clone, Debug, Serialize)]
struct Common {
    /// The env that built it.
    env: String,
    steps: usize,
    wall_ms: u64,
    disk_delta: i64,
}

/// What an `up` said while it ran.
#[derive(Debug, Default)]
struct Told {
    outcome: Option<Outcome>,
    disk_delta: i64,
    /// Whether a step failed.
    failed: bool,
}

impl Told {
    /// Says whether this ended it in a step, as it would end all who run the same step. Else it is the env alone that could not
    /// be built: held by somebody, refused by preflight, interrupted.
    fn would_fail_elsewhere(&self, error: &Error) -> bool {
        let kinds = [Kind::StepFailed, Kind::Drift, Kind::OutOfSpace];
        self.failed && kinds.contains(&error.kind())
    }
}

/// What `plan --json` says, as far as it matters here.
#[derive(Debug, Deserialize)]
struct Shown {
    env: String,
    needs: Needs,
    plan: Steps,
}

#[derive(Debug, Deserialize)]
struct Steps {
    steps: Vec<Foreseen>,
}

/// What an env needs of a machine.
#[derive(Debug, Deserialize)]
struct Needs {
    sizing: Sizing,
    memory: Option<u64>,
    disk: Vec<Disk>,
}

#[derive(Debug, Deserialize)]
struct Sizing {
    jobs: Jobs,
}

#[derive(Debug, Deserialize)]
struct Jobs {
    value: u32,
}

#[derive(Debug, Deserialize)]
struct Disk {
    needed: u64,
}

/// What every `up` is started with.
struct Starter<'a> {
    cx: &'a Context,
    host: Host,
    options: &'a [String],
    cancel: &'a Cancel<'a>,
}

impl Starter<'_> {
    fn program(&self, verb: &str, cell: &Cell) -> Result<Program> {
        let directory = std::env::current_dir()?;
        Ok(Program::at(&self.host.program)
            .inherit_env()
            // What CI systems read is said here, for all of them.
            .env("GITHUB_ACTIONS", "")
            .env("GITLAB_CI", "")
            .directory(directory)
            .grace(GRACE)
            .own_codes()
            .arg("--home")
            .arg(&self.cx.config.home)
            .args([verb])
            .args(&cell.args)
            .args(self.options))
    }

    /// Asks what `up` would do: the env's name, and its steps.
    fn plan(&self, cell: &Cell) -> Result<Shown> {
        let program = self.program("plan", cell)?.arg("--json");
        let text = program.output(PLAN_LIMIT, self.cancel.flag(), &mut |event| {
            if let process::Event::Tick = event {
                self.cancel.look();
            }
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::unexpected("cannot read a plan").source(error))
    }

    /// Runs one `up` and shows what it says, each line with the env's name.
    fn up(&self, cell: &Cell, env: &str, until: Option<&str>) -> (Told, Result<()>) {
        let told = Mutex::new(Told::default());
        let run = || {
            let mut program = self.program("up", cell)?.args(["--progress", "json"]);
            if let Some(until) = until {
                program = program.args(["--until", until]);
            }
            let mut on = |event: process::Event<'_>| match event {
                process::Event::Line(line) => self.cx.ui.note(&format!("{env}: {line}")),
                process::Event::Tick => self.cancel.look(),
            };
            program.stream(self.cancel.flag(), &mut on, |stdout| {
                for line in BufReader::new(stdout).lines() {
                    // Of a later rockenv, at most: nothing depends on it.
                    if let Ok(event) = serde_json::from_str::<Event>(&line?) {
                        let mut told = told.lock().unwrap_or_else(PoisonError::into_inner);
                        self.show(env, &event, &mut told);
                    }
                }
                Ok(())
            })
        };
        let result = run();
        (
            told.into_inner().unwrap_or_else(PoisonError::into_inner),
            result,
        )
    }

    fn show(&self, env: &str, event: &Event, told: &mut Told) {
        let say = |text: String| self.cx.ui.note(&format!("{env}: {text}"));
        match event {
            Event::StepStarted {
                index,
                total,
                name,
                cached: false,
                ..
            } => say(format!("step {index}/{total} {name}")),
            Event::StepFinished {
                name,
                outcome,
                cost,
                ..
            } => {
                told.disk_delta += cost.disk_delta.unwrap_or(0);
                told.failed |= *outcome == Outcome::Failed;
                if *outcome == Outcome::Done {
                    let time = size::duration(Duration::from_millis(cost.wall_ms));
                    say(format!("{name} done in {time}"));
                }
            }
            Event::Image { message, done, .. } if done.is_none() && !message.is_empty() => {
                say(message.clone());
            }
            Event::Warning { message } => say(message.clone()),
            Event::Finished { outcome, message } => {
                told.outcome = Some(*outcome);
                if !message.is_empty() {
                    self.cx.ui.note(message);
                }
            }
            Event::Output { line, .. } => self.cx.ui.detail(&format!("{env}: {line}")),
            _ => {}
        }
    }
}

fn up(cx: &Context, args: &MatrixUpArgs) -> Result<u8> {
    let cells = cells(&args.which.profile, &args.which.targets)?;
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    let starter = Starter {
        cx,
        host: Host::probe()?,
        options: &args.options,
        cancel: &cancel,
    };
    let mut rows: Vec<Row> = cells.iter().map(row).collect();
    let mut ready = Vec::new();
    let mut plans = Vec::new();
    for (index, cell) in cells.iter().enumerate() {
        match cancel.outcome(starter.plan(cell)) {
            Ok(shown) => {
                rows[index].env = Some(shown.env);
                ready.push(index);
                plans.push(shown.plan.steps);
            }
            Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
            Err(error) => fail(&mut rows[index], &error),
        }
    }
    // Until the last of them has ended: each stands on what another built.
    let claims = match args.ephemeral {
        true => claim(cx, &rows, &ready)?,
        false => Vec::new(),
    };
    let common = build(&starter, &cells, &mut rows, ready, plans, args.parallel);
    let mut wrong = None;
    for (store, env, claim) in claims {
        if let Err(error) = ephemeral::end(&store, &env, claim) {
            cx.ui.warn(&error.chain().join(": "));
            wrong = Some(error.help("rockenv gc removes what is left"));
        }
    }
    if let Some(signal) = cancel.caught() {
        let kept = match args.ephemeral {
            true => "the same command again",
            false => "the same command again: finished steps are kept",
        };
        return Err(Error::new(Kind::Signal(signal), "interrupted").help(kept));
    }
    for row in rows.iter().filter(|row| row.outcome == "failed") {
        cx.ui.annotate_failure(
            row.env.as_deref().unwrap_or(row.target),
            row.why.as_deref().unwrap_or_default(),
        );
    }
    summary::of_matrix(cx, &TITLES, &lines(&rows, common.as_ref()));
    show(cx, &rows, common.as_ref())?;
    if let Some(error) = wrong {
        return Err(error);
    }
    let failed = rows
        .iter()
        .any(|row| row.outcome != "done" && row.outcome != "hit");
    Ok(if failed {
        Kind::StepFailed.exit_code()
    } else {
        0
    })
}

/// Makes the envs of these positions end with this command.
fn claim(cx: &Context, rows: &[Row], ready: &[usize]) -> Result<Vec<(Store, String, Claim)>> {
    // Without root each `up` is root of a namespace of its own.
    if !nix::unistd::geteuid().is_root() {
        return Err(Error::unavailable("`matrix up --ephemeral` needs root")
            .help("sudo rockenv matrix up ..."));
    }
    let store = cx.store()?;
    let envs = ready.iter().filter_map(|index| rows[*index].env.clone());
    envs.map(|env| {
        let claim = store.claim(&env)?;
        Ok((store.clone(), env, claim))
    })
    .collect()
}

/// Builds what they have in common in one of them, then each. Returns what was in common.
fn build(
    starter: &Starter<'_>,
    cells: &[Cell],
    rows: &mut [Row],
    mut ready: Vec<usize>,
    mut plans: Vec<Vec<Foreseen>>,
    parallel: u8,
) -> Option<Common> {
    let mut common = None;
    while let Some(prefix) = prefix(&plans)
        && starter.cancel.caught().is_none()
    {
        let by = ready[prefix.by];
        match build_common(starter, &cells[by], &rows[by], &prefix) {
            Ok(built) => {
                common = Some(built);
                break;
            }
            Err((told, error)) => {
                fail(&mut rows[by], &error);
                if told.would_fail_elsewhere(&error) {
                    ready.clear();
                    break;
                }
                ready.remove(prefix.by);
                plans.remove(prefix.by);
            }
        }
    }
    let cx = starter.cx;
    if cx.config.terminal.ci_system.is_some() {
        cx.ui.begin_section(&match rows.len() {
            1 => "1 env".to_owned(),
            count => format!("{count} envs"),
        });
    }
    build_each(starter, cells, rows, &ready, parallel);
    cx.ui.end_section();
    common
}

fn row(cell: &Cell) -> Row {
    Row {
        target: cell.target.name(),
        env: None,
        outcome: "not-run",
        wall_ms: 0,
        disk_delta: 0,
        why: None,
    }
}

/// Writes down why an `up` failed: what it said itself, where it said something.
fn fail(row: &mut Row, error: &Error) {
    let chain = error.chain();
    let said = chain.iter().flat_map(|text| text.lines());
    let own = said
        .filter_map(|line| line.strip_prefix("error: "))
        .next_back();
    row.outcome = "failed";
    row.why = Some(own.unwrap_or_else(|| error.message()).to_owned());
}

fn millis(since: Instant) -> u64 {
    u64::try_from(since.elapsed().as_millis()).unwrap_or(u64::MAX)
}

/// Builds the steps that several envs share, in one of them.
fn build_common(
    starter: &Starter<'_>,
    cell: &Cell,
    row: &Row,
    prefix: &Prefix,
) -> std::result::Result<Common, (Told, Error)> {
    let env = row.env.clone().unwrap_or_default();
    starter.cx.ui.begin_section(&format!(
        "the same for all, up to step `{}`: env {env} builds it",
        prefix.until
    ));
    let began = Instant::now();
    let (told, result) = starter.up(cell, &env, Some(&prefix.until));
    starter.cx.ui.end_section();
    match result {
        Ok(()) => Ok(Common {
            env,
            steps: prefix.steps,
            wall_ms: millis(began),
            disk_delta: told.disk_delta,
        }),
        Err(error) => Err((told, error)),
    }
}

/// Builds the envs of these positions, so many at once; whatever becomes of one, the others go on.
fn build_each(
    starter: &Starter<'_>,
    cells: &[Cell],
    rows: &mut [Row],
    ready: &[usize],
    parallel: u8,
) {
    let waiting: Mutex<VecDeque<usize>> = Mutex::new(ready.iter().copied().collect());
    let ended = Mutex::new(Vec::new());
    let names: Vec<String> = rows
        .iter()
        .map(|row| row.env.clone().unwrap_or_default())
        .collect();
    let next = || {
        let mut waiting = waiting.lock().unwrap_or_else(PoisonError::into_inner);
        waiting
            .pop_front()
            .filter(|_| starter.cancel.caught().is_none())
    };
    std::thread::scope(|scope| {
        for _ in 0..usize::from(parallel).min(ready.len()) {
            scope.spawn(|| {
                while let Some(index) = next() {
                    let began = Instant::now();
                    let (told, result) = starter.up(&cells[index], &names[index], None);
                    let mut ended = ended.lock().unwrap_or_else(PoisonError::into_inner);
                    ended.push((index, millis(began), told, result));
                }
            });
        }
    });
    for (index, wall_ms, told, result) in ended.into_inner().unwrap_or_else(PoisonError::into_inner)
    {
        let row = &mut rows[index];
        row.wall_ms = wall_ms;
        row.disk_delta = told.disk_delta;
        match result {
            Ok(()) if told.outcome == Some(Outcome::Hit) => row.outcome = "hit",
            Ok(()) => row.outcome = "done",
            Err(error) => fail(row, &error),
        }
    }
}

fn show(cx: &Context, rows: &[Row], common: Option<&Common>) -> Result<()> {
    if cx.json {
        #[derive(Serialize)]
        struct Shown<'a> {
            schema: &'static str,
            common: Option<&'a Common>,
            envs: &'a [Row],
        }
        return cx.ui.json(&Shown {
            schema: "rockenv/matrix/1",
            common,
            envs: rows,
        });
    }
    let mut table = Table::new(TITLES);
    for line in lines(rows, common) {
        table.row(line);
    }
    cx.ui.table(&table);
    Ok(())
}

/// Returns the table's rows.
fn lines(rows: &[Row], common: Option<&Common>) -> Vec<Vec<String>> {
    let time = |ms| size::duration(Duration::from_millis(ms));
    let common = common.map(|common| {
        vec![
            "all".to_owned(),
            common.env.clone(),
            "done".to_owned(),
            time(common.wall_ms),
            size::delta(common.disk_delta),
            "what they have in common".to_owned(),
        ]
    });
    let rows = rows.iter().map(|row| {
        vec![
            row.target.to_owned(),
            row.env.clone().unwrap_or_default(),
            row.outcome.replace('-', " "),
            time(row.wall_ms),
            size::delta(row.disk_delta),
            row.why.clone().unwrap_or_default(),
        ]
    });
    common.into_iter().chain(rows).collect()
}
