//! Owns `lock`: finds the exact inputs of a profile and writes them to its lock file.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::plan::lockfile::{self, LockChange, Lockfile};
use crate::plan::resolve::VolumeKind;
use crate::sys::error::{Error, Kind, Result};
use crate::up::context::Context;
use crate::up::downloads::Fetching;
use crate::up::lock_inputs::{ALL, Locking};
use crate::up::locked;
use crate::up::request::UpRequest;
use crate::up::select::Selection;
use crate::up::task::Task;

const LOCK: &str = "Lock file";

#[derive(Debug, Args)]
pub(crate) struct LockOptions {
    /// Image or source to lock again at its current version, or `all`; may be given again
    #[arg(short, long, value_name = "NAME", help_heading = LOCK)]
    update: Vec<String>,
    /// Also lock outputs of steps that were built on files from an earlier build [default: `reuse` in the
    /// configuration]
    #[arg(long, help_heading = LOCK)]
    allow_incremental: bool,
    /// The lock file [default: ENV.lock beside the profile, or here for a built-in one]
    #[arg(long, value_name = "FILE", help_heading = LOCK)]
    file: Option<PathBuf>,
}

/// A lock file that is up to date.
pub(crate) struct WrittenLock {
    pub(crate) path: PathBuf,
    pub(crate) lock: Lockfile,
    /// What changed; `None` for a new file.
    pub(crate) changes: Option<Vec<LockChange>>,
}

/// Locks a profile; the file is rewritten only if something in it changed.
pub(crate) fn lock(
    cx: &Context,
    request: &UpRequest<'_>,
    options: &LockOptions,
) -> Result<WrittenLock> {
    let mut selection = Selection::new(cx, request)?;
    selection.reuse = selection.reuse.or_incremental(options.allow_incremental);
    // Other envs cannot use an env's own layers.
    selection.own = false;
    let path = match &options.file {
        Some(file) => file.clone(),
        None => locked::place(&selection)?,
    };
    let old = lockfile::read(&path)?;
    if let Some(old) = &old {
        fits(cx, request, options, (&path, old), &mut selection)?;
    }
    // Before the image is built and sources are cloned, which may take hours.
    lockfile::check_place(&path)?;
    selection.choose_engine(cx, request)?;
    check_names(&options.update, &selection)?;
    selection.note_absent_engine(cx);
    let is_rootless = selection.choice.service.is_some();
    // The image's packages are known only after its build.
    let what = format!("locking the packages of image `{}`", selection.image);
    match is_rootless {
        true => cx.host_as_rootless(&what)?,
        false => cx.host_as_root(&what)?,
    };
    let store = cx.store()?;
    let task = Task::start(cx)?;
    let locking = Locking {
        with: Fetching {
            task: &task,
            store: &store,
            offline: false,
        },
        update: &options.update,
        old: old.as_ref(),
    };
    let command = locked::command(request, options.file.as_deref());
    let outcome = locking.lock(&mut selection, &path, command);
    cx.tidy(&store)?;
    let lock = match (outcome, task.signals.pending()?) {
        (Err(_), Some(signal)) => return Err(Error::new(Kind::Signal(signal), "interrupted")),
        (outcome, _) => outcome?,
    };
    if let Some(message) = lock.login_warning(&path) {
        task.reporter.warn(message);
    }
    let changes = old.as_ref().map(|old| lockfile::changes(old, &lock));
    // A changed machine description alone is no reason to rewrite the file.
    if changes.as_ref().is_none_or(|changes| !changes.is_empty()) {
        lockfile::write(&path, &lock, old.as_ref())?;
    }
    store.remember_lock(locked::lasting_path(&path)?, &lock)?;
    Ok(WrittenLock {
        path,
        lock,
        changes,
    })
}

/// Refuses to overwrite the lock file of another build. Without parameters on the command line, those of the lock
/// file apply.
fn fits(
    cx: &Context,
    request: &UpRequest<'_>,
    options: &LockOptions,
    (path, old): (&Path, &Lockfile),
    selection: &mut Selection,
) -> Result<()> {
    let has_old_targets = locked::has_old_targets(old, selection);
    let updates_all = options.update.iter().any(|name| name == ALL);
    let differences = locked::other_choices(old, selection);
    let command = locked::command(request, options.file.as_deref());
    if let Some(first) = differences.first()
        && !(has_old_targets && updates_all)
    {
        let help = match has_old_targets {
            true => format!("{command} --update {ALL}"),
            false => request.command("lock", &[("--file", Some("NEW.lock"))]),
        };
        let message = format!("`{}` is the lock file of another build", path.display());
        return Err(usage!("{message}: {first}").help(help));
    }
    if selection.inputs.params.is_empty() {
        let used = selection.use_params(cx, old.params.clone());
        used.map_err(|error| locked::of_params(error, path, &command))?;
    }
    Ok(())
}

fn check_names(update: &[String], selection: &Selection) -> Result<()> {
    let mut known = vec![selection.image.clone()];
    let sources = selection.profile.volumes.iter();
    let sources = sources.filter(|volume| volume.kind == VolumeKind::Source);
    known.extend(sources.map(|volume| volume.name.clone()));
    known.push(ALL.to_owned());
    match update.iter().find(|name| !known.contains(name)) {
        None => Ok(()),
        Some(name) => Err(not_found!(
            "profile `{}` has no image or source `{name}` to update",
            selection.profile.name
        )
        .help(format!("choose one of: {}", known.join(", ")))),
    }
}
