//! Owns `hook check`: checks hooks, and at which revisions of a source each applies.

use std::path::PathBuf;

use clap::Args;
use serde::Serialize;

use crate::cli::code_of;
use crate::profile::hook::{self, Hook};
use crate::store::Store;
use crate::sys::error::{Kind, Result};
use crate::up::context::Context;
use crate::up::hook_revisions::{AtRevision, RevisionSource};
use crate::up::hooks;

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Revisions of the source, `FROM..TO` or a single one [default: the working tree, with uncommitted changes]
    #[arg(value_name = "REVISIONS", requires = "source")]
    revisions: Option<String>,
    /// Directory of the source; nothing in it is changed
    #[arg(short, long, value_name = "DIR")]
    source: Option<PathBuf>,
    /// Hook to check; may be given again [default: every hook there is]
    #[arg(long, value_name = "NAME")]
    hook: Vec<String>,
}

/// The result for one hook.
#[derive(Debug, Serialize)]
struct Checked {
    hook: String,
    /// The hook is valid and applies at the last examined revision.
    ok: bool,
    error: Option<String>,
    /// The first revision, and each revision at which the result changes.
    revisions: Vec<AtRevision>,
    /// The hook has a script, which `hook check` does not run.
    script: bool,
}

pub(super) fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let mut names = args.hook.clone();
    if names.is_empty() {
        let listed = hook::list(&cx.config.hook_dirs)?;
        names.extend(listed.into_iter().map(|hook| hook.name));
    }
    let source = args
        .source
        .as_ref()
        .map(|path| RevisionSource::open(cx, path))
        .transpose()?;
    let mut reports = Vec::new();
    for name in names {
        let looked = hook::load(&cx.config.hook_dirs, &name).and_then(|mut hook| {
            take_patches(cx, &mut hook)?;
            hook::files(&hook)?;
            let script = hook.work.script.is_some();
            let revisions = match &source {
                Some(source) => source.history(&hook, args.revisions.as_deref())?,
                None => Vec::new(),
            };
            Ok((revisions, script))
        });
        let ((revisions, script), error) = match looked {
            Ok(found) => (found, None),
            // A missing revision is the user's mistake, not the hook's.
            Err(error) if error.kind() != Kind::Invalid => return Err(error),
            Err(error) => (Default::default(), Some(error.chain().join("\n"))),
        };
        reports.push(Checked {
            hook: name,
            ok: error.is_none() && revisions.last().is_none_or(|at| at.applies),
            error,
            revisions,
            script,
        });
    }
    let code = code_of(reports.iter().all(|report| report.ok), Kind::Invalid);
    if cx.json {
        cx.ui.json(&reports)?;
        return Ok(code);
    }
    for report in &reports {
        cx.ui.data(&words(report, source.is_some()));
    }
    Ok(code)
}

fn words(report: &Checked, with_source: bool) -> String {
    let name = &report.hook;
    let mut lines = Vec::new();
    if let Some(error) = &report.error {
        lines.push(format!("{name}: {error}"));
    } else if !with_source {
        lines.push(format!("{name}: ok"));
    }
    for (index, at) in report.revisions.iter().enumerate() {
        let place = match (&at.revision, &at.date, &at.subject) {
            (Some(revision), Some(date), Some(subject)) => {
                let short: String = revision.chars().take(12).collect();
                format!(" at {short} ({date}, {subject})")
            }
            _ => String::new(),
        };
        let word = match (at.applies, index) {
            (true, 0) => "applies",
            // Results alternate, so the second one is the first of its kind.
            (true, 1) => "begins to apply",
            (true, _) => "applies again",
            (false, 0) => "does not apply",
            (false, _) => "stops applying",
        };
        lines.push(format!("{name}: {word}{place}"));
        lines.extend(at.why.iter().map(|why| format!("  {why}")));
    }
    if report.script && report.ok {
        lines.push(format!("{name}: only `up` runs its script"));
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Loads the hook's patches from those fetched earlier. A patch that is not fetched yet is an error.
fn take_patches(cx: &Context, hook: &mut Hook) -> Result<()> {
    if let Some(store) = Store::open_existing(&cx.config.home).ok().flatten() {
        hooks::known_patches([&mut *hook], &store)?;
    }
    match hook.work.patches.iter().find(|patch| patch.bytes.is_none()) {
        None => Ok(()),
        Some(patch) => Err(invalid!(
            "hook `{}`: patch `{}` is not fetched yet; `up` fetches it",
            hook.name,
            patch.name
        )),
    }
}
