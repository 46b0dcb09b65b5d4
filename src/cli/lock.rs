//! Owns `lock`: writes a profile's exact inputs to a lock file, and compares lock files.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::plan::lockfile::{self, LockChange};
use crate::sys::error::Result;
use crate::ui::object;
use crate::ui::size::count;
use crate::up;
use crate::up::context::Context;
use crate::up::lock::{LockOptions, WrittenLock};
use crate::up::request::SelectArgs;

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct LockArgs {
    #[command(subcommand)]
    command: Option<LockCommand>,
    #[command(flatten)]
    select: SelectArgs,
    #[command(flatten)]
    options: LockOptions,
}

#[derive(Debug, Subcommand)]
pub(crate) enum LockCommand {
    /// Show what changed between two lock files
    Diff(DiffArgs),
}

#[derive(Debug, Args)]
pub(crate) struct DiffArgs {
    /// The older lock file
    old: PathBuf,
    /// The newer lock file
    new: PathBuf,
}

pub(crate) fn lock(cx: &Context, args: &LockArgs) -> Result<()> {
    if let Some(LockCommand::Diff(args)) = &args.command {
        return diff(cx, args);
    }
    let written = up::lock::lock(cx, &args.select.request("lock"), &args.options)?;
    say(cx, written)
}

fn say(cx: &Context, written: WrittenLock) -> Result<()> {
    let WrittenLock {
        path,
        lock,
        changes,
    } = written;
    let is_new = changes.is_none();
    let changes = changes.unwrap_or_default();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/lock/1",
            file: &path,
            new: is_new,
            changes: &changes,
        });
    }
    tell(cx, &changes);
    let file = path.display();
    cx.ui.note(&match (is_new, changes.is_empty()) {
        (true, _) => format!(
            "wrote {file}: image {} with {}, {}, {}, {}",
            lock.image.name,
            count(lock.image.packages.len(), "package"),
            count(lock.source.len(), "source"),
            count(lock.hooks.len(), "hook"),
            count(lock.steps.len(), "step")
        ),
        (false, true) => format!("{file}: nothing changed"),
        (false, false) => {
            // Changes that follow from another change are not counted.
            let own = changes.iter().filter(|change| change.follows.is_none());
            format!("wrote {file}: {}", count(own.count().max(1), "change"))
        }
    });
    Ok(())
}

fn tell(cx: &Context, changes: &[LockChange]) {
    for line in lockfile::describe(changes) {
        cx.ui.data(&format!("{line}\n"));
    }
}

fn diff(cx: &Context, args: &DiffArgs) -> Result<()> {
    let read = |path: &Path| {
        lockfile::read(path)?.ok_or_else(|| {
            not_found!("there is no lock file `{}`", path.display())
                .help("rockenv lock PROFILE --file FILE")
        })
    };
    let changes = lockfile::changes(&read(&args.old)?, &read(&args.new)?);
    if cx.json {
        return cx
            .ui
            .json(&object! { schema: "rockenv/lock-diff/1", changes: &changes });
    }
    tell(cx, &changes);
    if changes.is_empty() {
        cx.ui.note("nothing changed");
    }
    Ok(())
}
