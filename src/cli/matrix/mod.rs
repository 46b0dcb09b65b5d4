//! Owns `matrix`: several envs with one command. A separate `rockenv up` builds each env, so that none can take
//! another down; all of them share the machine's one budget of jobs and memory.

mod up;
mod write;

use std::io::{BufRead as _, BufReader};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Deserialize;

use crate::matrix::{Cell, PlannedStep};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::process::{self, Program};
use crate::sys::signals::Cancel;
use crate::ui::event::{Event, Outcome};
use crate::ui::size;
use crate::up::context::Context;
use crate::up::request::WHAT;

/// How long an env may take to stop: as long as `up` gives a step, plus a margin. Also for Slurm to cancel jobs.
const GRACE: Duration = Duration::from_secs(30);
/// Larger than any plan.
const PLAN_LIMIT: u64 = 64 << 20;

/// Work with several targets at once.
#[derive(Debug, Subcommand)]
pub enum MatrixCommand {
    /// Bring an env up for each target; common steps are built once
    Up(up::MatrixUpArgs),
    #[command(flatten)]
    Write(Box<write::For>),
}

#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Targets, and families of them [default: those that each profile names]
    #[arg(
        index = 1,
        value_name = "TARGET|FAMILY",
        required_unless_present = "profile"
    )]
    targets: Vec<String>,
    /// Profile or profile file; may be given again [default: therock]
    #[arg(short, long, help_heading = WHAT)]
    profile: Vec<String>,
}

/// Runs a `matrix` command; returns the exit code.
pub(crate) fn matrix(cx: &Context, command: &MatrixCommand) -> Result<u8> {
    match command {
        MatrixCommand::Up(args) => up::up(cx, args),
        MatrixCommand::Write(form) => write::write(cx, form).map(|()| 0),
    }
}

/// Events of one `up`.
#[derive(Debug, Default)]
struct Told {
    outcome: Option<Outcome>,
    disk_delta: i64,
    failed: Option<String>,
}

impl Told {
    /// Returns the step that failed, if it would fail in every env that has it. `None` if only this env could not be
    /// built: locked, refused by preflight, interrupted.
    fn failed_for_all(&self, error: &Error) -> Option<&str> {
        let kinds = [Kind::StepFailed, Kind::Drift, Kind::OutOfSpace];
        let failed = self.failed.as_deref();
        failed.filter(|_| kinds.contains(&error.kind()))
    }
}

/// The part of `plan --json` that is used here.
#[derive(Debug, Deserialize)]
struct MatrixReport {
    env: String,
    needs: Needs,
    plan: Steps,
}

#[derive(Debug, Deserialize)]
struct Steps {
    steps: Vec<PlannedStep>,
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
            // This command writes for the CI system, on behalf of all of them.
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
    fn plan(&self, cell: &Cell) -> Result<MatrixReport> {
        let program = self.program("plan", cell)?.arg("--json");
        let text = program.output(PLAN_LIMIT, self.cancel.flag(), &mut |event| {
            if let process::Event::Tick = event {
                self.cancel.look();
            }
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| Error::unexpected("cannot read a plan").source(error))
    }

    /// Runs one `up` and shows its output, each line with the env's name.
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
                    // An unknown event can only come from a later rockenv; nothing depends on it.
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
                if *outcome == Outcome::Failed {
                    told.failed = Some(name.clone());
                }
                if *outcome == Outcome::Done {
                    let time = size::duration(Duration::from_millis(cost.wall_ms));
                    say(format!("{name} done in {time}"));
                }
            }
            Event::Image { message, done, .. } if done.is_none() && !message.is_empty() => {
                say(message.clone());
            }
            Event::Note { message } | Event::Warning { message } => say(message.clone()),
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
