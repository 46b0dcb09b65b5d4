//! Owns the closing message of `up`: the outcome, and the next command to type.

use std::path::PathBuf;

use crate::execute::Ended;
use crate::plan::{Action, Plan};
use crate::store::history::History;
use crate::store::results::BlockedResult;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::event::{Event, Outcome};
use crate::ui::{Reporter, size};
use crate::up::Finished;
use crate::up::context::Context;
use crate::up::options::UpOptions;
use crate::up::select::Selection;

/// Names the steps skipped for lack of a GPU, for the last line; empty if there are none.
pub(crate) fn skipped_steps(plan: &Plan, selection: &Selection) -> String {
    let Some(why) = &selection.inputs.without_gpu else {
        return String::new();
    };
    let names: Vec<&str> = plan
        .steps
        .iter()
        .filter(|step| step.action == Action::Skip && step.why == *why)
        .map(|step| step.name.as_str())
        .collect();
    if names.is_empty() {
        return String::new();
    }
    let steps = size::count(names.len(), "step");
    format!("; {steps} skipped because {why}: {}", names.join(", "))
}

/// Maximum number of foreign results to name.
const NAMED: usize = 3;

/// Names the results that are not this build's, if any.
pub(crate) fn not_its_own(blocked: &[BlockedResult]) -> Option<String> {
    let names = blocked.iter().take(NAMED).map(BlockedResult::place);
    let names: Vec<String> = names.collect();
    let more = match blocked.len() {
        0 => return None,
        count if count > NAMED => format!(" and {} more", count - NAMED),
        _ => String::new(),
    };
    let are = if blocked.len() == 1 { "is" } else { "are" };
    let results = size::count(blocked.len(), "result");
    Some(format!(
        "{results} {are} not this build's: {}{more}",
        names.join(", ")
    ))
}

/// Returns the help for files in the place of results.
fn way_out(blocked: &[BlockedResult], args: &UpOptions) -> String {
    let again = args.resume_command();
    let mut help = format!("move the files away, then run: {again}");
    let own: Vec<&BlockedResult> = blocked.iter().filter(|result| result.in_store).collect();
    // An export does not overwrite the files, and a step after `--until` does not run.
    let is_remade = args.plan.until.is_none() && own.iter().all(|result| !result.is_export);
    if let Some(first) = own.first().filter(|_| is_remade) {
        let step = first.step.as_str();
        help = format!("{help}; or make them again: {again} --rerun {step}");
    }
    help
}

/// The future of the env.
#[derive(Debug)]
pub(crate) enum Fate {
    Stays,
    /// It was removed, as the text says, or `matrix up` removes it.
    Ends(String),
}

impl Fate {
    /// Decides from the removal of an ephemeral env, if there was one. With `is_parents`, the env ends with this
    /// command's parent.
    pub(super) fn of(
        cx: &Context,
        removed: Option<Result<Vec<PathBuf>>>,
        is_parents: bool,
        has_failed: bool,
    ) -> Result<Self> {
        match removed {
            None if is_parents => Ok(Self::Ends(String::new())),
            None => Ok(Self::Stays),
            Some(Ok(outputs)) => Ok(Self::Ends(format!("; {}", removed_text(&outputs)))),
            // The reason for the failure comes first; the next command removes the env.
            Some(Err(error)) if has_failed => {
                cx.ui.warn(&error.chain().join(": "));
                Ok(Self::Stays)
            }
            Some(Err(error)) => Err(error.help("to remove the rest, run: rockenv gc")),
        }
    }
}

/// Reports how the `up` ended, on the screen and as exit code.
pub(crate) fn say(
    cx: &Context,
    reporter: &Reporter,
    finished: Finished,
    fate: &Fate,
    args: &UpOptions,
) -> Result<u8> {
    let again = args.resume_command();
    let (name, lacking, blocked) = (&finished.env, &finished.lacking, &finished.blocked);
    let last = |outcome, message: String| {
        let lacking = lacking.trim_start_matches("; ").to_owned();
        reporter.emit(&Event::Finished {
            outcome,
            message,
            lacking,
        });
    };
    let next = match fate {
        Fate::Stays => format!("; to enter it: rockenv shell {name}"),
        Fate::Ends(text) => text.clone(),
    };
    let foreign = not_its_own(blocked);
    match finished.ended {
        None | Some(Ended::Complete) if blocked.iter().any(|result| result.in_store) => {
            last(Outcome::Failed, String::new());
            let foreign = foreign.unwrap_or_default();
            Err(drift!("env `{name}` is done, but {foreign}").help(way_out(blocked, args)))
        }
        None => {
            last(Outcome::Hit, format!("{name}: nothing to do{lacking}"));
            Ok(0)
        }
        Some(Ended::Complete) => {
            let message = match (lacking.is_empty(), fate) {
                // Another env may write to the same directory.
                _ if let Some(foreign) = foreign => format!("{name}: done, but {foreign}{lacking}"),
                (true, _) => format!("{name}: done{next}"),
                (false, Fate::Stays) => format!("{name}: done{lacking}"),
                (false, Fate::Ends(_)) => format!("{name}: done{lacking}{next}"),
            };
            last(Outcome::Done, message);
            Ok(0)
        }
        Some(Ended::Interrupted(signal)) => {
            let message = match fate {
                Fate::Stays => format!("{name}: stopped; finished steps are kept"),
                Fate::Ends(_) => format!("{name}: stopped{next}"),
            };
            last(Outcome::Interrupted, message);
            Err(Error::new(Kind::Signal(signal), "interrupted").help(again))
        }
        Some(Ended::Broke(error)) => Err(error),
        Some(Ended::Failed(failure)) => {
            let failure = *failure;
            last(Outcome::Failed, String::new());
            for line in &failure.tail {
                cx.ui.note(&format!("  {line}"));
            }
            let error = Error::new(failure.kind, failure.message);
            match fate {
                Fate::Stays => {
                    cx.ui.note(&format!("log: {}", failure.log.display()));
                    if failure.is_kept {
                        cx.ui
                            .note(&format!("inspect: rockenv shell --failed {name}"));
                    }
                    Err(error.help(match failure.history {
                        _ if failure.kind == Kind::Unavailable => {
                            format!("{again}: the step starts again and keeps its build volumes")
                        }
                        History::Clean => format!("fix it, then resume with: {again}"),
                        History::Incremental { by_hand, .. } => {
                            let whose = match by_hand {
                                true => "that a command of `exec` or `shell` may have written",
                                false => "from an earlier build",
                            };
                            format!(
                                "fix it, then resume with: {again}; build volumes contain files {whose}; to start clean: \
                                 {again} --clean"
                            )
                        }
                    }))
                }
                Fate::Ends(_) => {
                    cx.ui.note(&format!("{name}: failed{next}"));
                    Err(error.help("run again without --ephemeral to keep the env for inspection"))
                }
            }
        }
    }
}

/// Describes the removal of an env, and names the outputs that stay.
pub(super) fn removed_text(outputs: &[PathBuf]) -> String {
    let paths = outputs.iter().map(|path| path.display().to_string());
    let paths: Vec<String> = paths.collect();
    match paths.is_empty() {
        true => "removed (--ephemeral)".to_owned(),
        false => format!("removed (--ephemeral); outputs kept: {}", paths.join(", ")),
    }
}
