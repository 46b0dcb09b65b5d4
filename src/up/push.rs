//! Owns sending an env's snapshots, to a registry or to a file.

use std::path::Path;
use std::time::Instant;

use crate::plan::ids::EnvName;
use crate::plan::record::Record;
use crate::share::{self, Pushed, Repository, Shareable};
use crate::store::Store;
use crate::store::history::Reuse;
use crate::store::images::TaskContext;
use crate::sys::error::{Kind, Result};
use crate::ui::size;
use crate::up::registry;
use crate::up::task::{Subject, Task};

/// Pushes the shareable snapshots; returns the closing message.
pub(crate) fn to_registry(
    task: Task<'_>,
    store: &Store,
    repository: &Repository,
    what: &Shareable,
) -> Result<(Pushed, String)> {
    let started = Instant::now();
    let label = format!("push to {repository}");
    let pushed = send(task, &label, |cx| share::push(store, repository, what, cx))?;
    let named = repository
        .single_snapshot()
        .map_or_else(String::new, |tag| format!(", the last one as `{tag}`"));
    let message = format!(
        "{}: {} at {repository}{named}; {} sent ({}), {} already there, in {}",
        what.env,
        size::count(what.layers.len(), "snapshot"),
        size::count(pushed.sent, "layer"),
        size::bytes(pushed.sent_bytes),
        pushed.there,
        size::duration(started.elapsed()),
    );
    Ok((pushed, message))
}

/// Writes the shareable snapshots to a file or a directory; returns the closing message.
pub(crate) fn to_file(
    task: Task<'_>,
    store: &Store,
    place: &Path,
    what: &Shareable,
) -> Result<(Pushed, String)> {
    let started = Instant::now();
    let label = format!("export to {}", place.display());
    let pushed = send(task, &label, |cx| share::export(store, place, what, cx))?;
    let message = format!(
        "{}: wrote the image and {} to {} ({}) in {}; read them with `rockenv import`",
        what.env,
        what.steps().join(", "),
        place.display(),
        size::bytes(pushed.sent_bytes),
        size::duration(started.elapsed()),
    );
    Ok((pushed, message))
}

fn send(
    task: Task<'_>,
    label: &str,
    send: impl FnOnce(&mut TaskContext<'_>) -> Result<Pushed>,
) -> Result<Pushed> {
    let pushed = task.with_progress(Subject::Transfer(label), send)?;
    if pushed.left_out > 0 {
        let sockets = size::count(pushed.left_out, "socket");
        let message = format!("left out {sockets}, which no archive can hold");
        task.reporter.warn(message);
    }
    if pushed.immutable > 0 {
        task.reporter.warn(match pushed.immutable {
            1 => "1 tag stays as it was: the registry does not let it move".to_owned(),
            more => format!("{more} tags stay as they were: the registry does not let them move"),
        });
    }
    Ok(pushed)
}

/// Pushes the finished steps after an `up`. A registry's refusal undoes nothing; only a signal is an error.
pub(super) fn finished_steps(
    task: Task<'_>,
    store: &Store,
    name: &EnvName,
    reuse: Reuse,
) -> Result<()> {
    let Task { cx, reporter, .. } = task;
    let push = || {
        let record = store.record(name)?;
        if record.as_ref().and_then(Record::last_step).is_none() {
            return Ok(None);
        }
        let repository = registry::repository_to_push(cx, None, None)?;
        let what = Shareable::of(store, name, None, reuse, reporter)?;
        to_registry(task, store, &repository, &what).map(Some)
    };
    match push() {
        Ok(sent) => sent.iter().for_each(|(_, message)| cx.ui.note(message)),
        Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
        Err(error) => reporter.warn(error.chain().join(": ")),
    }
    Ok(())
}
