//! Owns `status`.

use std::time::Duration;

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use super::ls::state;
use super::report::word;
use super::{code_of, logs, watch};
use crate::execute::samples_beside;
use crate::plan::ids::EnvName;
use crate::plan::image::Image;
use crate::plan::record::{INTERRUPTED, Outcome, Record};
use crate::plan::resolve::Engine;
use crate::plan::samples::{self, Sample};
use crate::plan::step_log::{StepLog, run_name};
use crate::store::Store;
use crate::sys::error::{Kind, Result};
use crate::ui::table::Table;
use crate::ui::{object, size, text};
use crate::up::context::Context;
use crate::up::results::ResultsSummary;
use crate::up::stop_and_lock::holder;

#[derive(Debug, Args)]
pub struct StatusArgs {
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
    /// Refresh every second until Ctrl-C
    #[arg(long, conflicts_with = "check")]
    watch: bool,
    /// Exit with 8 unless the env is complete and its outputs are unchanged
    #[arg(long)]
    check: bool,
}

pub(crate) fn status(cx: &Context, args: &StatusArgs) -> Result<u8> {
    match args.watch {
        true => watch::watch(cx, |cx| show_status(cx, args)),
        false => show_status(cx, args),
    }
}

fn show_status(cx: &Context, args: &StatusArgs) -> Result<u8> {
    let store = cx.existing_store()?;
    let name = store.named_or_only(args.name.as_ref())?;
    let mut record = store.known(&name)?;
    record.used = store.last_use(&name, &record);
    let holder = holder(&store, &name);
    let image = store.image(&record.image_key)?;
    let results = match args.check {
        true => results(&store, &name, &record)?,
        false => Vec::new(),
    };
    let spec = store.spec(&name).ok().filter(|_| record.complete);
    let handed_over = spec.map(|spec| ResultsSummary::of(&store, &spec));
    let is_whole = record.complete && results.is_empty();
    let code = code_of(!args.check || is_whole, Kind::Drift);
    if cx.json {
        cx.ui.json(&object! {
            // Changed results; the key exists only if there are some.
            #[serde(flatten)] results: (!results.is_empty()).then(|| object! { results: &results }),
            schema: "rockenv/status/1",
            env: &name,
            state: state(&store, &name, &record, holder.as_ref()),
            image_built: image.as_ref().map(|image| image.built),
            image_digest: image.map(|image| image.digest),
            store: store.method().to_string(),
            holder: holder,
            // Location and use of a complete env's results; without them, there is no key.
            #[serde(flatten)] handed_over: handed_over.map(|handed_over| object! { handed_over: handed_over }),
            record: &record,
        })?;
        return Ok(code);
    }
    let image = image.map_or_else(
        || "missing from the store".to_owned(),
        |image| built(&image),
    );
    let targets = match record.targets.as_slice() {
        [] => String::new(),
        targets => format!("targets  {}\n", targets.join(", ")),
    };
    cx.ui.data(&format!(
        "env      {}\nstate    {}\nprofile  {}\n{targets}image    {} ({image})\nstore    {}\ncreated  {}\n",
        name,
        state(&store, &name, &record, holder.as_ref()),
        record.profile,
        record.image,
        store.method(),
        record.created.strftime("%Y-%m-%d %H:%M UTC"),
    ));
    let build = holder.filter(|holder| holder.verb == "up");
    let is_building = build.is_some();
    let now = build.and_then(|build| now(&store, &name, &record, build.since));
    if let Some(Now::Running(step, usage)) = &now {
        cx.ui.data(&format!("now      step {step}{usage}\n"));
    }
    cx.ui.table(&steps(&record, now.as_ref()));
    note_steps(cx, &name, &record);
    if !record.complete && !is_building {
        cx.ui.note(&to_finish(&record));
    }
    if let Some(handed_over) = &handed_over {
        handed_over.note(&cx.ui);
    }
    for changed in &results {
        let (volume, path) = (&changed.volume, &changed.path);
        let path = text::escape(path);
        cx.ui.data(&format!("{volume}: {path} {}\n", changed.what));
    }
    if !results.is_empty() {
        cx.ui.note(&format!(
            "{} changed or removed; move changed files away, then: {}",
            size::count(results.len(), "result"),
            record.up_command()
        ));
    }
    Ok(code)
}

/// Reports why steps were skipped or failed, and how to enter the failed step's tree.
fn note_steps(cx: &Context, name: &EnvName, record: &Record) {
    for step in record
        .steps
        .iter()
        .filter(|step| matches!(step.outcome, Outcome::Skipped | Outcome::Failed))
    {
        if let Some(reason) = &step.reason {
            cx.ui.note(&format!("{}: {reason}", step.name));
        }
    }
    if let Some(failed) = &record.failed {
        cx.ui.note(&format!(
            "the failed tree of `{}` is kept: rockenv shell --failed {name}",
            failed.step
        ));
    }
}

/// Returns where an unfinished env stands, and the command that finishes it.
fn to_finish(record: &Record) -> String {
    let up = record.up_command();
    let head = record.head.layer.as_ref();
    let mut newest_first = record.snapshots.iter().rev();
    match newest_first.find(|snapshot| Some(&snapshot.layer) == head) {
        Some(snapshot) => format!(
            "the env is at snapshot `{}`; to finish it: {up}",
            snapshot.name
        ),
        None => format!("to finish the env: {up}"),
    }
}

/// Returns an image's distribution and age.
fn built(image: &Image) -> String {
    let built = format!("built {}", size::ago(image.built));
    // An image from a directory may have no known distribution.
    match &*image.distribution {
        "" => built,
        distribution => format!("{distribution}, {built}"),
    }
}

/// What an `up` is doing.
enum Now {
    /// Runs this step, with this resource usage, if known.
    Running(String, String),
    /// Has not begun this step, the next one.
    Waiting(String),
}

/// Returns what the `up` that has held the env since `since` is doing. Logs of earlier runs are ignored.
fn now(store: &Store, env: &EnvName, record: &Record, since: Timestamp) -> Option<Now> {
    let newest = logs::all(store, env, None, &run_name(since))
        .ok()?
        .pop_last();
    let is_running = |log: &StepLog| {
        let step = record.steps.iter().find(|step| *step.name == *log.step);
        log.is_since(since) && step.is_none_or(|step| step.outcome == Outcome::Pending)
    };
    if let Some(log) = newest.filter(is_running) {
        let samples = samples_beside(&store.env_dir(env).join(log.to_string()));
        let samples = fs_err::read_to_string(samples).unwrap_or_default();
        let usage = samples::parse(&samples).last().map(usage);
        return Some(Now::Running(log.step, usage.unwrap_or_default()));
    }
    let mut steps = record.steps.iter();
    let next = steps.find(|step| step.outcome == Outcome::Pending)?;
    Some(Now::Waiting(next.name.to_string()))
}

/// Returns the time since a step began and its load, as the end of a line. A full disk has no room for samples.
fn usage(sample: &Sample) -> String {
    let took = size::duration(Duration::from_millis(sample.at_ms));
    let load = size::load(sample.jobs, sample.memory);
    let parts = [took, load].into_iter().filter(|part| !part.is_empty());
    parts.map(|part| format!(", {part}")).collect()
}

/// Returns the table of an env's steps with their costs.
fn steps(record: &Record, now: Option<&Now>) -> Table {
    let mut table = Table::new([
        "step",
        "state",
        "wall",
        "cpu",
        "memory",
        "with page cache",
        "read",
        "written",
        "disk",
    ]);
    // Docker and Podman do not report block I/O.
    let blocks = |bytes| match record.engine == Engine::Nspawn.name() {
        true => size::bytes(bytes),
        false => String::new(),
    };
    for step in &record.steps {
        let state = match now {
            Some(Now::Running(running, _)) if *running == *step.name => "running",
            Some(Now::Waiting(next)) if *next == *step.name => "waiting",
            _ if step.is_interrupted() => INTERRUPTED,
            _ => word(step.outcome),
        };
        let mut cells = vec![step.name.to_string(), state.to_owned()];
        if let Some(cost) = step.cost {
            cells.extend([
                size::duration(Duration::from_millis(cost.wall_ms)),
                cost.usage.cpu().map(size::duration).unwrap_or_default(),
                cost.usage.memory().map(size::bytes).unwrap_or_default(),
                cost.usage.memory_peak.map(size::bytes).unwrap_or_default(),
                blocks(cost.usage.read_bytes),
                blocks(cost.usage.written_bytes),
                size::delta(cost.disk_delta),
            ]);
        }
        cells.resize(9, String::new());
        table.row(cells);
    }
    table
}

/// A changed or removed result in an output volume.
#[derive(Serialize)]
struct Changed {
    volume: String,
    path: String,
    step: String,
    what: String,
}

fn results(store: &Store, env: &EnvName, record: &Record) -> Result<Vec<Changed>> {
    let Some(head) = &record.head.layer else {
        return Ok(Vec::new());
    };
    let spec = store.spec(env)?;
    let differences = store.differences(head, &spec, true)?.into_iter();
    let shown = differences.filter_map(|one| {
        Some(Changed {
            path: one.path.display().to_string(),
            step: store.title_of(&one.layer, &spec),
            what: one.state.words()?.to_owned(),
            volume: one.volume,
        })
    });
    Ok(shown.collect())
}
