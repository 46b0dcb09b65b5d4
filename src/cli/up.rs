//! Owns `up`: from the command line to an env that matches its profile.

use super::{job_summary, plan};
use crate::sys::error::Result;
use crate::ui::Format;
use crate::up;
use crate::up::context::Context;
use crate::up::options::UpOptions;

/// Brings an env up; returns the exit code.
pub(crate) fn up(cx: &Context, args: &UpOptions) -> Result<u8> {
    if args.dry_run {
        if args.progress == Format::Json {
            let help = "`--dry-run --json` writes the plan as JSON";
            return Err(usage!("`--dry-run` has no events for `--progress json`").help(help));
        }
        return plan::show_plan(cx, &args.plan, args.force, false);
    }
    if cx.json {
        let help = "`--progress json` writes one event a line, `--dry-run --json` the plan";
        return Err(usage!("`up` has no `--json`").help(help));
    }
    if args.setup {
        super::setup::command::install_missing(cx)?;
    }
    up::up(cx, args, &|store, env| job_summary::of_env(cx, store, env))
}
