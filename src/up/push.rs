//! Owns sending an env's snapshots, to a registry or to a file.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crate::image::BuildProgress;
use crate::image::oci::Notice;
use crate::plan::ids::EnvName;
use crate::plan::record::Record;
use crate::share::{self, Pushed, Repository, Shareable};
use crate::store::Store;
use crate::store::history::Reuse;
use crate::store::images::TaskContext;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::name::StepName;
use crate::sys::signals::stop_if;
use crate::sys::thread;
use crate::ui::{Reporter, size};
use crate::up::registry;
use crate::up::task::{Subject, Task};

/// Pushes the shareable snapshots that a push in the background has not sent; returns the closing message.
pub(crate) fn to_registry(
    task: &Task<'_>,
    store: &Store,
    repository: &Repository,
    what: &Shareable,
    background: Option<Background>,
) -> Result<(Pushed, String)> {
    let started = Instant::now();
    let label = format!("push to {repository}");
    let pushed = send(task, &label, |cx| {
        let earlier = background.map(|background| background.wait(cx));
        let earlier = earlier.transpose()?.unwrap_or_default();
        let pushed = share::push(store, repository, what, cx)?;
        Ok(pushed.after(&earlier))
    })?;
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
    task: &Task<'_>,
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
    task: &Task<'_>,
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

/// Added to the nice value of a push in the background.
const NICE: i32 = 10;

/// How often the end of a push in the background is looked for.
const LOOK: Duration = Duration::from_millis(100);

/// A thread that pushes each finished step of an `up` while later steps run. The push at the end of `up` reports what
/// failed, and pushes it again.
#[derive(Debug)]
pub(crate) struct Background {
    /// Takes the step of each new snapshot of the env.
    pub(super) recorded: Sender<StepName>,
    /// Number of bytes that the current push has read.
    done: Arc<AtomicU64>,
    cancel: Arc<AtomicBool>,
    /// Returns what was sent, and the first failure since the last successful push.
    thread: JoinHandle<(Pushed, Option<Error>)>,
}

impl Background {
    pub(super) fn start(
        task: &Task<'_>,
        store: &Store,
        name: &EnvName,
        reuse: Reuse,
    ) -> Result<Self> {
        // The user's tag moves only at the end, to the last snapshot.
        let repository = registry::repository_to_push(task.cx, None, None)?.untagged();
        let (config, store, name) = (task.cx.config.clone(), store.clone(), name.clone());
        let (recorded, steps) = channel::<StepName>();
        let (done, cancel) = (Arc::<AtomicU64>::default(), Arc::<AtomicBool>::default());
        let (count, stop) = (Arc::clone(&done), Arc::clone(&cancel));
        let thread = thread::start(move || {
            // The build comes first. Threads that pack layers inherit this.
            rustix::process::nice(NICE).ok();
            let (mut sent, mut failed) = (Pushed::default(), None);
            while let Ok(mut step) = steps.recv() {
                // One push takes all new snapshots, and the push at the end takes the last ones.
                let next = loop {
                    match steps.try_recv() {
                        Ok(newer) => step = newer,
                        Err(next) => break next,
                    }
                };
                if next == TryRecvError::Disconnected {
                    break;
                }
                let mut progress = |progress: BuildProgress<'_>| {
                    if let BuildProgress::Bytes { done, .. } = progress {
                        count.store(done, Ordering::Relaxed);
                    }
                };
                let mut cx = TaskContext {
                    mirrors: &config.mirrors,
                    logins: &config.logins,
                    notice: Notice::default(),
                    env: &config.proxies,
                    progress: &mut progress,
                    cancel: &stop,
                };
                // Snapshots of later steps are older: this `up` replaces them.
                let what = Shareable::of(&store, &name, Some(&*step), reuse, &|_| ());
                match what.and_then(|what| share::push(&store, &repository, &what, &mut cx)) {
                    Ok(pushed) => (sent, failed) = (pushed.after(&sent), None),
                    Err(error) => failed = failed.or(Some(error)),
                }
            }
            (sent, failed)
        })?;
        Ok(Self {
            recorded,
            done,
            cancel,
            thread,
        })
    }

    /// Waits for the current push. Returns what all of them sent.
    fn wait(self, cx: &mut TaskContext<'_>) -> Result<Pushed> {
        drop(self.recorded);
        while !self.thread.is_finished() {
            let done = self.done.load(Ordering::Relaxed);
            (cx.progress)(BuildProgress::Bytes { done, total: None });
            let is_cancelled = cx.cancel.load(Ordering::Relaxed);
            self.cancel.store(is_cancelled, Ordering::Relaxed);
            std::thread::sleep(LOOK);
        }
        stop_if(cx.cancel)?;
        Ok(thread::joined(self.thread.join()).0)
    }

    /// Stops the current push, and reports why an earlier one failed, because no other push follows.
    pub(super) fn stop(self, reporter: &Reporter) {
        self.cancel.store(true, Ordering::Relaxed);
        drop(self.recorded);
        let (_, failed) = thread::joined(self.thread.join());
        let failed = failed.filter(|error| !matches!(error.kind(), Kind::Signal(_)));
        if let Some(error) = failed {
            reporter.warn(error.chain().join(": "));
        }
    }
}

/// Pushes the finished steps after an `up`. A registry's refusal undoes nothing; only a signal is an error.
pub(super) fn finished_steps(
    task: &Task<'_>,
    store: &Store,
    name: &EnvName,
    reuse: Reuse,
    background: Option<Background>,
) -> Result<()> {
    let Task { cx, reporter, .. } = task;
    let push = || {
        let record = store.record(name)?;
        if record.as_ref().and_then(Record::last_step).is_none() {
            return Ok(None);
        }
        let repository = registry::repository_to_push(cx, None, None)?;
        let what = Shareable::of(store, name, None, reuse, &|text| reporter.warn(text))?;
        to_registry(task, store, &repository, &what, background).map(Some)
    };
    match push() {
        Ok(sent) => sent.iter().for_each(|(_, message)| cx.ui.note(message)),
        Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
        Err(error) => reporter.warn(error.chain().join(": ")),
    }
    Ok(())
}
