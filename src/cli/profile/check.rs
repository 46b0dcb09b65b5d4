//! Owns `profile check`.

use clap::Args;

use crate::profile::{self};
use crate::sys::error::{Error, Kind, Result};
use crate::ui::{object, size};
use crate::up::check::{self as profile_check, ProfileCheck};
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Profiles, targets or profile files [default: every profile there is]
    #[arg(value_name = "PROFILE|TARGET|FILE.toml")]
    what: Vec<String>,
    /// Target to resolve for instead of the profile's own; may be given again
    #[arg(short, long, value_name = "GFX")]
    target: Vec<String>,
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
        let (targets, steps): (Vec<String>, usize) = spec.map_or_else(Default::default, |spec| {
            let targets = spec.targets.iter().map(ToString::to_string).collect();
            (targets, spec.steps.len() + spec.skipped.len())
        });
        let causes: Vec<String> = errors.iter().flat_map(Error::chain).collect();
        let advice = if ok { advice } else { Vec::new() };
        if ok && !cx.json {
            show(cx, &what, &targets, steps, &advice);
        }
        reports.push(object! {
            profile: what,
            ok: ok,
            targets: targets,
            steps: steps,
            advice: advice,
            error: (!ok).then(|| causes.join("\n")),
            help: errors.iter().find_map(Error::help_text).map(str::to_owned),
        });
    }
    if cx.json {
        cx.ui.json(&reports)?;
    }
    Ok(code)
}

fn show(cx: &Context, profile: &str, targets: &[String], steps: usize, advice: &[String]) {
    let targets = match targets {
        [] => String::new(),
        some => format!(", for {}", some.join(" ")),
    };
    let steps = size::count(steps, "step");
    cx.ui.data(&format!("{profile}: ok, {steps}{targets}\n"));
    for advice in advice {
        cx.ui.data(&format!("  advice: {advice}\n"));
    }
}
