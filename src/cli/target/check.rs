//! Owns `target check`.

use std::path::PathBuf;

use clap::Args;

use crate::cli::code_of;
use crate::rocm::target::{self, Learned};
use crate::rocm::therock::{self, Checkout};
use crate::sys::error::{Kind, Result};
use crate::ui::{object, size};
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The checkout; nothing in it is executed
    #[arg(short, long, value_name = "DIR")]
    pub(super) source: PathBuf,
}

pub(super) fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let checkout = Checkout::read(&args.source)?;
    for ignored in &checkout.ignored {
        cx.ui.warn(ignored);
    }
    let drift = therock::drift(&checkout);
    let code = code_of(drift.is_empty(), Kind::Drift);
    let topology = checkout.topology.as_ref();
    let stages = topology.map(|topology| topology.stages.len());
    let artifacts = topology.map(|topology| topology.artifacts.len());
    if cx.json {
        cx.ui.json(&object! {
            schema: "rockenv/target-check/1",
            therock: target::table_commit(),
            targets: &checkout.targets,
            stages: stages,
            artifacts: artifacts,
            drift: &drift,
        })?;
        return Ok(code);
    }
    for difference in &drift {
        cx.ui.data(&format!("{difference}\n"));
    }
    let topology = match (stages, artifacts) {
        (Some(stages), Some(artifacts)) => format!(
            "{} and {}",
            size::count(stages, "stage"),
            size::count(artifacts, "artifact")
        ),
        _ => "no topology".to_owned(),
    };
    let result = match drift.len() {
        0 => "same as rockenv's table".to_owned(),
        count => size::count(count, "difference"),
    };
    cx.ui.note(&format!(
        "{}, {topology}: {result} ({})",
        size::count(checkout.targets.len(), "target"),
        origin()
    ));
    Ok(code)
}

/// Returns the origin of the target table.
fn origin() -> String {
    match Learned::installed() {
        Some(learned) => format!("from `{}`", learned.source.display()),
        None => format!("from TheRock {}", &target::table_commit()[..12]),
    }
}
