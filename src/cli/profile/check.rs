//! Owns `profile check`.

use clap::Args;
use serde::Serialize;

use crate::profile::{self};
use crate::sys::error::{Error, Kind, Result};
use crate::ui::size;
use crate::up::check::{self as profile_check, ProfileCheck};
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Profiles or files [default: every profile there is]
    #[arg(value_name = "PROFILE|FILE.toml")]
    what: Vec<String>,
    /// Target to resolve for instead of the profile's own; may be given again
    #[arg(short, long, value_name = "GFX")]
    target: Vec<String>,
}

/// The result of `profile check` for one profile.
#[derive(Debug, Serialize)]
struct CheckReport {
    profile: String,
    ok: bool,
    targets: Vec<String>,
    steps: usize,
    advice: Vec<String>,
    error: Option<String>,
    help: Option<String>,
}

pub(super) fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let mut all = args.what.clone();
    if all.is_empty() {
        all = profile::names(&cx.config.profile_dirs)?;
    }
    let mut code = 0;
    let mut reports = Vec::new();
    for what in all {
        let ProfileCheck {
            spec,
            advice,
            errors,
        } = profile_check::check(cx, &what, &args.target);
        for error in &errors {
            // An invalid profile determines the exit code even if another profile is missing.
            if code != Kind::Invalid.exit_code() {
                code = error.kind().exit_code();
            }
            if !cx.json {
                cx.ui.error(error);
            }
        }
        let ok = spec.is_some();
        let (targets, steps) = spec.map_or_else(Default::default, |spec| {
            let targets = spec.targets.iter().map(ToString::to_string).collect();
            (targets, spec.steps.len() + spec.skipped.len())
        });
        let causes: Vec<String> = errors.iter().flat_map(Error::chain).collect();
        let report = CheckReport {
            profile: what,
            ok,
            targets,
            steps,
            advice: if ok { advice } else { Vec::new() },
            error: (!ok).then(|| causes.join("\n")),
            help: errors.iter().find_map(Error::help_text).map(str::to_owned),
        };
        if ok && !cx.json {
            shown_ok(cx, &report);
        }
        reports.push(report);
    }
    if cx.json {
        cx.ui.json(&reports)?;
    }
    Ok(code)
}

fn shown_ok(cx: &Context, report: &CheckReport) {
    let targets = match report.targets.as_slice() {
        [] => String::new(),
        some => format!(", for {}", some.join(" ")),
    };
    let steps = size::count(report.steps, "step");
    cx.ui
        .data(&format!("{}: ok, {steps}{targets}\n", report.profile));
    for advice in &report.advice {
        cx.ui.data(&format!("  advice: {advice}\n"));
    }
}
