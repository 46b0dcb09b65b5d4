//! Owns the last words of `up`: how it ended, and what to type next.

use std::path::PathBuf;

use crate::execute::Ended;
use crate::plan::{Action, Plan};
use crate::store::history::History;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::Reporter;
use crate::ui::event::{Event, Outcome};
use crate::up::context::Context;
use crate::up::resolve::Prepared;

/// Names the steps that are left out for want of a GPU, for the last line; empty where there are none.
pub(crate) fn lacking(plan: &Plan, prepared: &Prepared) -> String {
    let why = prepared.inputs.without_gpu.as_ref();
    let names: Vec<&str> = plan
        .steps
        .iter()
        .filter(|step| step.action == Action::Skip && Some(&step.why) == why)
        .map(|step| step.name.as_str())
        .collect();
    if names.is_empty() {
        return String::new();
    }
    format!(
        "not run and not passed for want of a GPU: {}",
        names.join(", ")
    )
}

/// What becomes of the env.
#[derive(Debug)]
pub(crate) enum Fate {
    /// It stays.
    Stays,
    /// It was removed; where its outputs are.
    Removed(Vec<PathBuf>),
}

/// Says how it ended, on the screen and as exit code.
pub(crate) fn say(
    cx: &Context,
    reporter: &Reporter,
    ended: Option<Ended>,
    name: &str,
    fate: &Fate,
    lacking: &str,
    again: &str,
) -> Result<u8> {
    let last = |outcome, message: String| reporter.emit(&Event::Finished { outcome, message });
    let next = match fate {
        Fate::Stays => format!("; `rockenv shell {name}` goes inside"),
        Fate::Removed(outputs) => removed(outputs),
    };
    match ended {
        None => {
            let but = if lacking.is_empty() { "" } else { ", but " };
            last(Outcome::Hit, format!("{name}: nothing to do{but}{lacking}"));
            Ok(0)
        }
        Some(Ended::Complete) => {
            let message = match (lacking.is_empty(), fate) {
                (true, _) => format!("{name}: done{next}"),
                (false, Fate::Stays) => format!("{name}: done, but {lacking}"),
                (false, Fate::Removed(_)) => format!("{name}: done, but {lacking}{next}"),
            };
            last(Outcome::Done, message);
            Ok(0)
        }
        Some(Ended::Interrupted(signal)) => {
            let message = match fate {
                Fate::Stays => format!("{name}: stopped; finished steps are kept"),
                Fate::Removed(_) => format!("{name}: stopped{next}"),
            };
            last(Outcome::Failed, message);
            Err(Error::new(Kind::Signal(signal), "interrupted").help(again))
        }
        Some(Ended::Broke(error)) => Err(error),
        Some(Ended::Failed(failure)) => {
            last(Outcome::Failed, String::new());
            for line in &failure.tail {
                cx.ui.note(&format!("  {line}"));
            }
            let error = Error::new(failure.kind, failure.message);
            match fate {
                Fate::Stays => {
                    cx.ui.note(&format!("log: {}", failure.log.display()));
                    cx.ui.note(&format!("look: rockenv shell --failed {name}"));
                    Err(error.help(match failure.history {
                        History::Clean => format!("mend it, then go on with: {again}"),
                        History::Incremental { .. } => format!(
                            "mend it, then go on with: {again}; its build volumes hold what another build left: start clean with: \
                             {again} --clean"
                        ),
                    }))
                }
                Fate::Removed(_) => {
                    cx.ui.note(&format!("{name}: failed{next}"));
                    Err(error.help("without --ephemeral the env stays, to be looked at"))
                }
            }
        }
    }
}

fn removed(outputs: &[PathBuf]) -> String {
    let paths: Vec<String> = outputs
        .iter()
        .map(|path| path.display().to_string())
        .collect();
    match paths.is_empty() {
        true => "; removed, as asked for".to_owned(),
        false => format!(
            "; removed, as asked for, but its outputs: {}",
            paths.join(", ")
        ),
    }
}
