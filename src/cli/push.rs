//! Owns `push`: selects an env's shareable snapshots, and sends them.

use std::time::Instant;

use clap::Args;

use crate::engine::docker::Service;
use crate::plan::record::{Origin, Snapshot};
use crate::share::{self, Push, Pushed, Repository, ServiceImage};
use crate::store::history::Reuse;
use crate::store::images::Image;
use crate::store::{Layer, Record, Store};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::Signals;
use crate::ui::event::Outcome;
use crate::ui::{Format, Reporter, size};
use crate::up::context::Context;
use crate::up::registry;
use crate::up::task::{Subject, Task};

#[derive(Debug, Args)]
pub struct PushArgs {
    /// The env
    env: String,
    /// Destination: `HOST/NAME`, and `:TAG` as another name for the last snapshot [default: `registry` in the
    /// configuration]
    #[arg(value_name = "REF")]
    reference: Option<String>,
    /// Last step whose snapshot is pushed
    #[arg(long, value_name = "STEP")]
    until: Option<String>,
    /// Also push snapshots that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
}

pub(crate) fn push(cx: &Context, args: &PushArgs) -> Result<()> {
    cx.host_as_root("pushing snapshots")?;
    let repository = registry::repository(cx, args.reference.as_deref())?;
    let store = cx.existing_store()?;
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(Format::Human);
    let until = args.until.as_deref();
    let reuse = cx.config.reuse.or_asked(args.allow_incremental);
    let what = Chosen::of(&store, &args.env, until, reuse, &reporter)?;
    let task = Task::new(cx, &signals, &reporter);
    let (pushed, message) = send(task, &store, &args.env, &repository, what)?;
    let outcome = match pushed.tags {
        0 => Outcome::Hit,
        _ => Outcome::Done,
    };
    reporter.finish(outcome, message);
    if cx.json {
        return cx.ui.json(&pushed);
    }
    Ok(())
}

/// Pushes the shareable snapshots; returns the closing message.
pub(crate) fn send(
    task: Task<'_>,
    store: &Store,
    env: &str,
    repository: &Repository,
    what: Chosen,
) -> Result<(Pushed, String)> {
    let Chosen {
        record,
        image,
        layers,
        kept,
    } = what;
    let started = Instant::now();
    let what = Push {
        image: &image,
        layers: &layers,
        kept: kept.as_ref(),
        profile: &record.profile,
        tag: repository.tag(),
    };
    let shown = format!("push to {repository}");
    let pushed = task.with_progress(Subject::Transfer(&shown), |means| {
        share::push(store, repository, &what, means)
    })?;
    said_of_sockets(&pushed, task.reporter);
    let message = format!(
        "{env}: {} snapshots at {repository}; {} layers sent ({}), {} already there, in {}",
        layers.len(),
        pushed.sent,
        size::bytes(pushed.sent_bytes),
        pushed.there,
        size::duration(started.elapsed()),
    );
    Ok((pushed, message))
}

/// The shareable part of an env.
pub(crate) struct Chosen {
    pub(crate) record: Record,
    pub(crate) image: Image,
    /// The lowest first.
    pub(crate) layers: Vec<Layer>,
    /// Where a service keeps their trees.
    pub(crate) kept: Option<ServiceImage>,
}

impl Chosen {
    /// Chooses the shareable part; reports what cannot be shared, and why.
    pub(crate) fn of(
        store: &Store,
        env: &str,
        until: Option<&str>,
        reuse: Reuse,
        reporter: &Reporter,
    ) -> Result<Self> {
        let record = store.known(env)?;
        let last = match until {
            Some(until) => steps(&record).rfind(|snapshot| snapshot.name == until),
            None => last_step(&record),
        };
        let last = last.ok_or_else(|| match until {
            Some(until) => {
                Error::not_found(format!("env `{env}` has no snapshot of a step `{until}`"))
                    .help(format!("rockenv snapshot ls {env}"))
            }
            None => Error::not_found(format!("no step of env `{env}` has a snapshot yet"))
                .help(format!("rockenv up {env}")),
        })?;
        let mut layers = store.chain(&last.layer)?;
        layers.reverse();
        let (kept, limit) = match &record.service {
            None => (None, None),
            Some(socket) => {
                let (kept, why) = ServiceImage::of(&Service::connect(socket)?, &layers)?;
                let limit = why.map(|why| (kept.len(), why));
                (Some(kept), limit)
            }
        };
        let first_incremental = match reuse {
            Reuse::Clean => layers.iter().position(|layer| !layer.is_clean()),
            Reuse::Incremental => None,
        };
        let end = limit.as_ref().map_or(layers.len(), |(count, _)| *count);
        let shareable = shareable(&layers[..first_incremental.map_or(end, |first| end.min(first))]);
        if shareable < layers.len() {
            let layer = &layers[shareable].title;
            let (why, help) = match limit {
                _ if first_incremental == Some(shareable) => (
                    "it is incremental: built on files from an earlier build".to_owned(),
                    format!(
                        "rockenv up {env} --clean makes a clean one; to share it anyway: --allow-incremental"
                    ),
                ),
                Some((count, why)) if count == shareable => {
                    (why, format!("rockenv up {env} --rerun {layer}"))
                }
                _ => (
                    reason(&layers[shareable]),
                    "rockenv setup --store-image SIZE makes a store that freezes them".to_owned(),
                ),
            };
            if shareable == 0 {
                return Err(Error::new(
                    Kind::Usage,
                    format!("no snapshot of env `{env}` can be shared: {why}"),
                )
                .help(help));
            }
            reporter.warn(format!(
                "snapshot `{layer}` and those after it cannot be shared: {why}; {help}"
            ));
            layers.truncate(shareable);
        }
        let image = &record.image_key;
        let image = layers.first().map_or(image, |layer| &layer.image_key);
        let image = store.image(image)?.ok_or_else(|| {
            Error::not_found(format!(
                "the description of the image of env `{env}` is gone"
            ))
            .help("rockenv fsck")
        })?;
        Ok(Self {
            record,
            image,
            layers,
            kept,
        })
    }
}

fn steps(record: &Record) -> impl DoubleEndedIterator<Item = &Snapshot> {
    let snapshots = record.snapshots.iter();
    snapshots.filter(|snapshot| snapshot.origin == Origin::Step)
}

/// Returns the snapshot of the last step that has one, in step order: it may be older than the snapshots of earlier
/// steps.
pub(crate) fn last_step(record: &Record) -> Option<&Snapshot> {
    record
        .steps
        .iter()
        .rev()
        .filter(|step| step.key.is_some())
        .find_map(|step| steps(record).find(|snapshot| snapshot.key == step.key))
}

/// Warns of sockets, which no archive can hold.
pub(crate) fn said_of_sockets(pushed: &Pushed, reporter: &Reporter) {
    if pushed.left_out > 0 {
        reporter.warn(format!(
            "{} sockets left out: an archive cannot hold them",
            pushed.left_out
        ));
    }
}

/// Returns how many layers, from the lowest, are complete without this store.
fn shareable(layers: &[Layer]) -> usize {
    let live = |layer: &Layer| {
        let mut states = layer.volumes.values();
        states.any(|state| !state.is_kept())
    };
    // A layer whose build volume was not kept is useless elsewhere. A later layer that has the volume again contains
    // all of it.
    let whole = |layer: &Layer| layer.key.is_some() && !live(layer);
    match layers.iter().position(|layer| layer.key.is_none()) {
        Some(made_by_hand) => layers[..made_by_hand].iter().rposition(whole),
        None => layers.iter().rposition(whole),
    }
    .map_or(0, |last| last + 1)
}

fn reason(layer: &Layer) -> String {
    let mut volumes = layer.volumes.iter();
    match volumes.find(|(_, state)| !state.is_kept()) {
        Some((name, _)) => {
            format!("its build volume `{name}` is not part of it, because this is an overlay store")
        }
        None => "it was created manually and has no key".to_owned(),
    }
}
