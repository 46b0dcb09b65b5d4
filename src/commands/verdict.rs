//! Owns the last words of `up`: how it ended, and what to type next.

use super::prepare::Prepared;
use crate::context::Context;
use crate::error::{Error, Kind, Result};
use crate::execute::Ended;
use crate::plan::{Action, Plan};
use crate::ui::Reporter;
use crate::ui::event::{Event, Outcome};

/// Names the steps that are left out for want of a GPU, for the last line; empty where there are none.
pub(super) fn lacking(plan: &Plan, prepared: &Prepared) -> String {
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

/// Says how it ended, on the screen and as exit code.
pub(super) fn say(
    cx: &Context,
    reporter: &Reporter,
    ended: Option<Ended>,
    name: &str,
    lacking: &str,
    again: &str,
) -> Result<u8> {
    let last = |outcome, message: String| reporter.emit(&Event::Finished { outcome, message });
    match ended {
        None => {
            let but = if lacking.is_empty() { "" } else { ", but " };
            last(Outcome::Hit, format!("{name}: nothing to do{but}{lacking}"));
            Ok(0)
        }
        Some(Ended::Complete) if lacking.is_empty() => {
            last(
                Outcome::Done,
                format!("{name}: done; `rockenv shell {name}` goes inside"),
            );
            Ok(0)
        }
        Some(Ended::Complete) => {
            last(Outcome::Done, format!("{name}: done, but {lacking}"));
            Ok(0)
        }
        Some(Ended::Interrupted(signal)) => {
            last(
                Outcome::Failed,
                format!("{name}: stopped; finished steps are kept"),
            );
            Err(Error::new(Kind::Signal(signal), "interrupted").help(again))
        }
        Some(Ended::Failed(failure)) => {
            last(Outcome::Failed, String::new());
            for line in &failure.tail {
                cx.ui.note(&format!("  {line}"));
            }
            cx.ui.note(&format!("log: {}", failure.log.display()));
            cx.ui.note(&format!("look: rockenv shell --failed {name}"));
            Err(Error::new(failure.kind, failure.message)
                .help(format!("mend it, then go on with: {again}")))
        }
    }
}
