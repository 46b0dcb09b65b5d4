//! Owns the processes of a matrix: a separate rockenv plans and builds each env, so that no env can take another down.

use std::io::{BufRead as _, BufReader};
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::matrix::Cell;
use crate::matrix::jobs::take_option;
use crate::plan::PlanStep;
use crate::plan::ids::EnvName;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::{Host, working_directory};
use crate::sys::name::StepName;
use crate::sys::process::{self, Program};
use crate::sys::signals::Cancel;
use crate::ui::event::{Event, Outcome};
use crate::ui::size;
use crate::up::context::Context;
use crate::up::preflight::Needs;

/// How long a process may take to stop: as long as `up` gives a step, plus a margin. Also for Slurm to cancel jobs.
pub(super) const GRACE: Duration = Duration::from_secs(30);
/// Maximum size of a plan, in bytes.
const PLAN_LIMIT: u64 = 64 << 20;

/// The part of `plan --json` that a matrix needs.
#[derive(Debug, Deserialize)]
pub(super) struct EnvPlan {
    pub env: EnvName,
    pub needs: Needs,
    pub plan: Steps,
}

#[derive(Debug, Deserialize)]
pub(super) struct Steps {
    pub steps: Vec<PlanStep>,
}

/// What the events of one `up` reported, and how long its process took.
#[derive(Debug, Default)]
pub(super) struct UpEvents {
    pub outcome: Option<Outcome>,
    /// What the env lacks although its `up` succeeded.
    pub lacking: Option<String>,
    pub wall_ms: u64,
    pub disk_delta: i64,
    failed: Option<StepName>,
}

impl UpEvents {
    /// Returns the step that failed, if it would fail in every env that has it. `None` if only this env could not be
    /// built: locked, refused by preflight, interrupted.
    pub(super) fn failed_for_all(&self, error: &Error) -> Option<&str> {
        let kinds = [Kind::StepFailed, Kind::Drift, Kind::OutOfSpace];
        let failed = self.failed.as_deref();
        failed.filter(|_| kinds.contains(&error.kind()))
    }
}

/// How to start rockenv for each env.
pub(super) struct RockenvCommand<'a> {
    pub cx: &'a Context,
    pub host: Host,
    pub options: &'a [String],
    pub cancel: &'a Cancel<'a>,
}

impl RockenvCommand<'_> {
    fn program(&self, cell: &Cell, options: &[String]) -> Result<Program> {
        let directory = working_directory()?;
        let home = &self.cx.config.home;
        let path = self.cx.config.host_variable("PATH").unwrap_or_default();
        let program = Program::at(&self.host.program)
            .inherit_env()
            // `up` searches it for credential helpers.
            .env("PATH", path)
            // This command itself writes for the CI system, on behalf of all envs.
            .env("GITHUB_ACTIONS", "")
            .env("GITLAB_CI", "")
            // It also reads the lines, and escapes control characters when it shows them.
            .env("CLICOLOR_FORCE", "")
            .directory(directory)
            .grace(GRACE)
            .rockenv()
            .args(self.cx.ui.settings().yes.then_some("--yes"));
        // The hints of `up` contain the option only if the user gave it.
        let program = match self.cx.names_home {
            true => program.arg("--home").arg(home),
            false => program.env("ROCKENV_HOME", home),
        };
        Ok(program.arg("up").args(&cell.args).args(options))
    }

    /// Returns the plan of `up`: the env's name and its steps. `plan` would lack some of the options.
    pub(super) fn plan(&self, cell: &Cell) -> Result<EnvPlan> {
        let program = self.program(cell, self.options)?;
        let program = program.args(["--dry-run", "--json"]);
        let text = program.output(PLAN_LIMIT, self.cancel.flag(), &mut |event| {
            if let process::Event::Tick = event {
                self.cancel.poll();
            }
        })?;
        serde_json::from_slice(&text)
            .map_err(|error| unexpected!("cannot read a plan").source(error))
    }

    /// Runs one `up` and shows its output, each line with the env's name.
    pub(super) fn up(&self, cell: &Cell, env: &str, until: Option<&str>) -> (UpEvents, Result<()>) {
        let mut events = UpEvents::default();
        let mut run = || {
            let program = match until {
                None => self.program(cell, self.options)?,
                Some(until) => {
                    // Each env's own `up` runs a step again.
                    let (options, _) = take_option(self.options, "--rerun");
                    self.program(cell, &options)?.args(["--until", until])
                }
            };
            let program = program.args(["--progress", "json"]);
            let mut on = |event: process::Event<'_>| match event {
                process::Event::Line(line) => self.cx.ui.note(&format!("{env}: {line}")),
                process::Event::Tick => self.cancel.poll(),
            };
            program.stream(self.cancel.flag(), &mut on, |stdout| {
                for line in BufReader::new(stdout).lines() {
                    // An unknown event can only come from a later rockenv; nothing depends on it.
                    if let Ok(event) = serde_json::from_str::<Event>(&line?) {
                        self.show(env, &event, &mut events);
                    }
                }
                Ok(())
            })
        };
        let began = Instant::now();
        let result = run();
        events.wall_ms = u64::try_from(began.elapsed().as_millis()).unwrap_or(u64::MAX);
        (events, result)
    }

    fn show(&self, env: &str, event: &Event, events: &mut UpEvents) {
        let say = |text: String| self.cx.ui.note(&format!("{env}: {text}"));
        match event {
            Event::StepStarted {
                index, total, name, ..
            } => say(format!("step {index}/{total} {name}")),
            Event::StepFinished {
                name,
                outcome,
                cost,
                ..
            } => {
                events.disk_delta += cost.disk_delta.unwrap_or(0);
                if *outcome == Outcome::Failed {
                    events.failed = Some(name.clone());
                }
                if *outcome == Outcome::Done {
                    let time = size::duration(Duration::from_millis(cost.wall_ms));
                    say(format!("{name} done in {time}"));
                }
            }
            Event::Image { message, done, .. } if done.is_none() && !message.is_empty() => {
                say(message.clone());
            }
            Event::Note { message } => say(message.clone()),
            Event::Warning { message } => self.cx.ui.warn(&format!("{env}: {message}")),
            Event::Finished {
                outcome,
                message,
                lacking,
            } => {
                events.outcome = Some(*outcome);
                events.lacking = Some(lacking.clone()).filter(|text| !text.is_empty());
                if !message.is_empty() {
                    self.cx.ui.note(message);
                }
            }
            Event::Output { line, .. } => self.cx.ui.detail(&format!("{env}: {line}")),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;

    use super::*;
    use crate::matrix::cells;
    use crate::store::config::Config;
    use crate::sys::signals::Signals;
    use crate::ui::{Ui, UiSettings};

    #[test]
    fn each_up_searches_the_directories_of_the_caller() {
        let variables = [("PATH".to_owned(), "/mine".to_owned())];
        let (config, _) = Config::of(variables.into(), None).unwrap();
        let (out, err) = (Box::new(io::sink()), Box::new(io::sink()));
        let cx = Context {
            config,
            ui: Ui::with_writers(UiSettings::default(), out, err),
            json: false,
            names_home: false,
        };
        let signals = Signals::take().unwrap();
        let rockenv = RockenvCommand {
            cx: &cx,
            host: Host::probe().unwrap(),
            options: &[],
            cancel: &Cancel::new(&signals),
        };
        let cell = cells(&[], &["gfx1103".to_owned()]).unwrap().remove(0);
        let program = rockenv.program(&cell, &[]).unwrap();
        assert_has!(format!("{program:?}"), r#"("PATH", "/mine")"#);
    }
}
