//! Owns `lock`: writes the exact inputs of a profile to a lock file, and shows what changed between two lock files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};

use crate::plan::lockfile::{self, LockChange, Lockfile, VERSION};
use crate::plan::resolve::VolumeKind;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::Signals;
use crate::ui::size::count;
use crate::ui::{Format, object};
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::lock::{ALL, Locking};
use crate::up::locked;
use crate::up::request::SelectArgs;
use crate::up::select::Selection;
use crate::up::task::Task;

const LOCK: &str = "Lock file";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct LockArgs {
    #[command(subcommand)]
    command: Option<LockCommand>,
    #[command(flatten)]
    select: SelectArgs,
    /// Image or source to lock again at its current version, or `all`; may be given again
    #[arg(short, long, value_name = "NAME", help_heading = LOCK)]
    update: Vec<String>,
    /// Also lock outputs of steps that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long, help_heading = LOCK)]
    allow_incremental: bool,
    /// The lock file [default: ENV.lock beside the profile, or here for a built-in one]
    #[arg(long, value_name = "FILE", help_heading = LOCK)]
    file: Option<PathBuf>,
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
    let request = args.select.request("lock");
    let mut selection = Selection::new(cx, &request)?;
    selection.reuse = selection.reuse.or_asked(args.allow_incremental);
    // An env's own layers are of no use to others.
    selection.own = false;
    let path = match &args.file {
        Some(file) => file.clone(),
        None => locked::place(&selection)?,
    };
    let old = lockfile::read(&path)?;
    if let Some(old) = &old {
        fits(cx, &path, old, &mut selection)?;
    }
    check_names(args, &selection)?;
    selection.note_absent_engine(cx);
    let is_rootless = selection.choice.service.is_some();
    // Its packages are known when it has been built.
    let what = format!("locking the packages of image `{}`", selection.image);
    match is_rootless {
        true => cx.host_as_rootless(&what)?,
        false => cx.host_as_root(&what)?,
    };
    let store = cx.store()?;
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(Format::Human);
    let locking = Locking {
        with: Fetching {
            task: Task::new(cx, &signals, &reporter),
            store: &store,
            offline: false,
        },
        update: &args.update,
        old: old.as_ref(),
    };
    let command = locked::command(&request, args.file.as_deref());
    let outcome = locking.lock(&mut selection, &path, command);
    cx.tidy(&store)?;
    let lock = match (outcome, signals.pending()?) {
        (Err(_), Some(signal)) => return Err(Error::new(Kind::Signal(signal), "interrupted")),
        (outcome, _) => outcome?,
    };
    let changes = old.as_ref().map(|old| lockfile::changes(old, &lock));
    // A changed machine description alone is no reason to rewrite the file.
    let is_older = old.as_ref().is_some_and(|old| old.version < VERSION);
    if is_older || changes.as_ref().is_none_or(|changes| !changes.is_empty()) {
        lockfile::write(&path, &lock)?;
    }
    store.remember_lock(&path, &lock)?;
    say(cx, &path, &lock, changes, is_older)
}

/// Refuses to overwrite the lock file of another profile. Without parameters on the command line, those of the lock
/// file apply.
fn fits(cx: &Context, path: &Path, old: &Lockfile, selection: &mut Selection) -> Result<()> {
    let mut now = locked::choices(selection);
    let none = BTreeMap::new();
    now.params = &none;
    let differences = lockfile::choices(old, &now);
    if let Some(first) = differences.first() {
        return Err(Error::usage(format!(
            "`{}` is the lock file of another profile: {first}",
            path.display()
        ))
        .help("rockenv lock ... --file OTHER.lock"));
    }
    if selection.inputs.params.is_empty() {
        selection.use_params(cx, old.params.clone())?;
    }
    Ok(())
}

fn check_names(args: &LockArgs, selection: &Selection) -> Result<()> {
    let mut known = vec![selection.image.clone()];
    let sources = selection.profile.volumes.iter();
    known.extend(
        sources
            .filter(|volume| volume.kind == VolumeKind::Source)
            .map(|volume| volume.name.clone()),
    );
    known.push(ALL.to_owned());
    match args.update.iter().find(|name| !known.contains(name)) {
        None => Ok(()),
        Some(name) => Err(Error::not_found(format!(
            "profile `{}` has no image or source `{name}` to update",
            selection.profile.name
        ))
        .help(format!("there is {}", known.join(", ")))),
    }
}

fn say(
    cx: &Context,
    path: &Path,
    lock: &Lockfile,
    changes: Option<Vec<LockChange>>,
    was_older: bool,
) -> Result<()> {
    let is_new = changes.is_none();
    let changes = changes.unwrap_or_default();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/lock/1",
            file: path,
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
        (false, true) if was_older => format!("wrote {file}: only its format changed"),
        (false, true) => format!("{file}: nothing changed"),
        (false, false) => {
            // A change that follows from another is not counted.
            let own = changes.iter().filter(|change| change.follows.is_none());
            format!("wrote {file}: {}", count(own.count().max(1), "change"))
        }
    });
    Ok(())
}

fn tell(cx: &Context, changes: &[LockChange]) {
    for line in lockfile::told(changes) {
        cx.ui.data(&format!("{line}\n"));
    }
}

fn diff(cx: &Context, args: &DiffArgs) -> Result<()> {
    let read = |path: &Path| {
        lockfile::read(path)?.ok_or_else(|| {
            Error::not_found(format!("there is no lock file `{}`", path.display()))
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
