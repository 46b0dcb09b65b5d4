//! Owns `export`: copies an env's results with a manifest of their inputs, checks such copies, and writes snapshots
//! to files for machines without a common registry.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use clap::Args;
use fs_err as fs;
use serde::Serialize;

use super::push;
use crate::plan::ids::StepKey;
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::record::{Outcome as Step, StepRecord};
use crate::plan::resolve::Spec;
use crate::profile::hook;
use crate::share::{self, Push, Repository};
use crate::store::export::{self, Env, Named};
use crate::store::history::Reuse;
use crate::store::results::{self, ResultState};
use crate::store::{LockedEnv, Store};
use crate::sys::account;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::Signals;
use crate::tree::listing::{Place, look};
use crate::ui::event::Outcome;
use crate::ui::{Format, size};
use crate::up::context::Context;
use crate::up::sources;
use crate::up::task::{Subject, Task};

/// Suffix of the manifest's name; the prefix is the env's name.
const MANIFEST: &str = ".provenance.json";

#[derive(Debug, Args)]
pub struct ExportArgs {
    /// The env
    #[arg(required_unless_present = "check")]
    env: Option<String>,
    /// Directory to write to, created if missing; existing files are never replaced
    #[arg(value_name = "DIR", required_unless_present_any = ["check", "snapshots"])]
    directory: Option<PathBuf>,
    /// Output volume to export instead of all; may be given again
    #[arg(long, value_name = "NAME")]
    volume: Vec<String>,
    /// Export the env's snapshots instead, for `import` on another machine: an OCI image layout, as a file where the name ends in
    /// `.tar`, else as a directory
    #[arg(long, value_name = "FILE|DIR", conflicts_with_all = ["directory", "volume"])]
    snapshots: Option<PathBuf>,
    /// Last step whose snapshot is exported
    #[arg(long, value_name = "STEP", requires = "snapshots")]
    until: Option<String>,
    /// Compare exported files with their manifest
    #[arg(long, value_name = "DIR", conflicts_with_all = ["env", "directory", "volume", "snapshots"])]
    check: Option<PathBuf>,
    /// Also export outputs that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
}

/// Exports, or checks; returns the exit code.
pub(crate) fn export(cx: &Context, args: &ExportArgs) -> Result<u8> {
    if let Some(directory) = &args.check {
        return check(cx, directory);
    }
    if let (Some(env), Some(place)) = (&args.env, &args.snapshots) {
        let reuse = cx.config.reuse.or_asked(args.allow_incremental);
        return snapshots(cx, env, place, args.until.as_deref(), reuse).map(|()| 0);
    }
    let (Some(name), Some(directory)) = (&args.env, &args.directory) else {
        return Err(Error::unexpected("give an env, or a directory to check"));
    };
    let store = cx.store_to_change("reading an env")?;
    store.known(name)?;
    // Locked, so that no step writes while files are read.
    let env = store.lock_known(name, "export", Duration::from_secs(5))?;
    let incremental = incremental(&store, &env)?;
    if cx.config.reuse.or_asked(args.allow_incremental) == Reuse::Clean
        && let Some(step) = incremental.values().next()
    {
        return Err(Error::new(
            Kind::Drift,
            format!(
                "env `{name}` is incremental: step `{step}` was built on files from an earlier build"
            ),
        )
        .help(format!(
            "rockenv up {name} --clean makes a clean one; to export it anyway: --allow-incremental"
        )));
    }
    let mut spec = store.spec(name)?;
    let until = match env.known_record()?.complete {
        true => None,
        false => Some(reached(&store, &env)?),
    };
    let mut items = items(&store, &env, &spec, &args.volume)?;
    as_left(
        cx,
        &store,
        &env,
        &spec,
        &args.volume,
        &mut items,
        until.is_some(),
    )?;
    if let Some(until) = &until {
        // Later steps have no part in these files.
        let last = spec.steps.iter().position(|step| step.name == *until);
        spec.steps.truncate(last.map_or(0, |last| last + 1));
        let steps: Vec<String> = spec.steps.iter().map(|step| step.name.clone()).collect();
        spec.hooks.retain(|hook| steps.contains(&hook.from));
    }
    let text = store.locked_text(&spec)?;
    let lock = match &text {
        Some(text) => Some(lockfile::parse(text, "the env's lock file")?),
        None => None,
    };
    let image_key = &env.known_record()?.image_key;
    let image = store
        .image(image_key)?
        .ok_or_else(|| Error::not_found(format!("the image of env `{name}` is gone")))?;
    // The digest covers what hooks do, so a missing description is no loss.
    let hooks = spec.hooks.iter().filter_map(|hook| {
        let found = hook::load(&cx.config.hook_dirs, &hook.name).ok()?;
        (found.digest().ok()? == hook.digest).then(|| (hook.name.clone(), found))
    });
    let known = Env {
        spec: &spec,
        image: &image,
        hooks: &hooks.collect(),
        submodules: &checked_out(&store, &spec, lock.as_ref()),
        lock: lock.as_ref().zip(spec.lock.as_deref()),
        until: until.as_deref(),
        incremental: &incremental,
    };
    let owner = prepare(directory)?;
    let files = export::copy(&items, directory, owner)?;
    if let Some(text) = &text {
        export::write(directory, &format!("{name}.lock"), text.as_bytes(), owner)?;
    }
    let manifest = export::manifest(&known, &files).text()?;
    let place = format!("{name}{MANIFEST}");
    export::write(directory, &place, manifest.as_bytes(), owner)?;
    if lock.is_none() {
        cx.ui.warn(&format!(
            "env `{name}` was not built from a lock file: the manifest says what is known without one; `rockenv lock`, then \
             `rockenv up --locked`"
        ));
    }
    show(cx, &directory.join(&place), &files)?;
    Ok(0)
}

/// Returns the keys and names of the env's steps that differ from a clean build.
fn incremental(store: &Store, env: &LockedEnv<'_>) -> Result<BTreeMap<StepKey, String>> {
    let chain = match &env.known_record()?.head.layer {
        Some(head) => store.chain(head)?,
        None => Vec::new(),
    };
    let incremental = chain.into_iter().filter(|layer| !layer.is_clean());
    Ok(incremental
        .filter_map(|layer| Some((layer.key?, layer.title)))
        .collect())
}

fn show(cx: &Context, manifest: &Path, entries: &BTreeMap<String, Named>) -> Result<()> {
    #[derive(Serialize)]
    struct Shown<'a> {
        schema: &'static str,
        manifest: &'a Path,
        files: BTreeMap<&'a str, &'a str>,
        links: BTreeMap<&'a str, &'a str>,
        directories: Vec<&'a str>,
    }
    let mut shown = Shown {
        schema: "rockenv/export/1",
        manifest,
        files: BTreeMap::new(),
        links: BTreeMap::new(),
        directories: Vec::new(),
    };
    for (name, named) in entries {
        match named {
            Named::File(sha256) => drop(shown.files.insert(name, sha256)),
            Named::Symlink(target) => drop(shown.links.insert(name, target)),
            Named::Directory => shown.directories.push(name),
        }
    }
    if cx.json {
        return cx.ui.json(&shown);
    }
    let counts = [
        (shown.files.len(), "file", "files"),
        (shown.links.len(), "link", "links"),
        (
            shown.directories.len(),
            "empty directory",
            "empty directories",
        ),
    ];
    let counts = counts.into_iter().filter(|(count, _, _)| *count > 0);
    let counts: Vec<String> = counts
        .map(|(count, one, many)| format!("{count} {}", if count == 1 { one } else { many }))
        .collect();
    cx.ui.note(&format!(
        "exported {}; {} describes them",
        counts.join(", "),
        manifest.display()
    ));
    Ok(())
}

/// Returns the submodules that a lock file names and that are checked out. The build read nothing of the others.
fn checked_out(store: &Store, spec: &Spec, lock: Option<&Lockfile>) -> BTreeSet<(String, String)> {
    let mut found = BTreeSet::new();
    for (name, directory) in sources::directories(store, spec) {
        let locked = lock.and_then(|lock| lock.source.get(&name));
        for path in locked.iter().flat_map(|locked| locked.submodules.keys()) {
            let git = Path::new(path).join(".git");
            if matches!(look(&directory, &git), Ok(Place::Taken(_))) {
                found.insert((name.clone(), path.clone()));
            }
        }
    }
    found
}

/// Writes shareable snapshots to a file or a directory.
fn snapshots(
    cx: &Context,
    env: &str,
    place: &Path,
    until: Option<&str>,
    reuse: Reuse,
) -> Result<()> {
    #[derive(Serialize)]
    struct Shown<'a> {
        schema: &'static str,
        snapshots: &'a Path,
        key: Option<&'a str>,
        steps: Vec<&'a str>,
        layers: u64,
        bytes: u64,
        left_out: u64,
    }
    cx.host_as_root("exporting snapshots")?;
    let store = cx.existing_store()?;
    let signals = Signals::take()?;
    let reporter = cx.ui.reporter(Format::Human);
    let chosen = push::Chosen::of(&store, env, until, reuse, &reporter)?;
    let last = chosen.layers.last();
    // For `podman load`; not every env name is a valid image name.
    let name = last.map(|layer| format!("localhost/{env}:{}", layer.title));
    let name = name.filter(|name| Repository::parse(name).is_ok());
    let what = Push {
        image: &chosen.image,
        layers: &chosen.layers,
        kept: chosen.kept.as_ref(),
        profile: &chosen.record.profile,
        tag: name.as_deref(),
    };
    let started = Instant::now();
    let shown = format!("export to {}", place.display());
    let task = Task::new(cx, &signals, &reporter);
    let pushed = task.with_progress(Subject::Transfer(&shown), |means| {
        share::export(&store, place, &what, means)
    })?;
    push::said_of_sockets(&pushed, &reporter);
    let steps: Vec<&str> = chosen.layers.iter().map(|layer| &*layer.title).collect();
    let message = format!(
        "{env}: wrote the image and {} to {} ({}) in {}; read them with `rockenv import`",
        steps.join(", "),
        place.display(),
        size::bytes(pushed.sent_bytes),
        size::duration(started.elapsed()),
    );
    reporter.finish(Outcome::Done, message);
    if cx.json {
        cx.ui.json(&Shown {
            schema: "rockenv/export-snapshots/1",
            snapshots: place,
            key: last.and_then(|layer| layer.key.as_deref()),
            steps,
            layers: pushed.sent,
            bytes: pushed.sent_bytes,
            left_out: pushed.left_out,
        })?;
    }
    Ok(())
}

/// Returns the last step of an env that was built up to it and no further, as by `--until`. Refuses any other
/// unfinished env.
fn reached(store: &Store, env: &LockedEnv<'_>) -> Result<String> {
    let record = env.known_record()?;
    let stands = || {
        let open = |step: &&StepRecord| step.outcome == Step::Pending;
        let done = record.steps.iter().take_while(|step| !open(step));
        let later = record.steps.iter().skip_while(|step| !open(step));
        let passes = |step: &StepRecord| matches!(step.outcome, Step::Done | Step::Hit);
        let passed = done
            .clone()
            .all(|step| passes(step) || step.outcome == Step::Skipped);
        let last = done.filter(|step| passes(step)).last()?;
        let snapshot = record.snapshot(&last.name)?;
        let fits = snapshot.key.is_some()
            && snapshot.key == last.key
            && record.head.layer.as_ref() == Some(&snapshot.layer)
            && record.failed.is_none()
            && store.attempt(env.name(), record).is_none();
        (fits && passed && later.clone().all(|step| open(&step))).then(|| last.name.clone())
    };
    stands().ok_or_else(|| {
        let name = env.name();
        Error::new(
            Kind::Drift,
            format!("env `{name}` is not finished: the inputs of its outputs are not known yet"),
        )
        .help(format!("rockenv up {name}, or rockenv status {name}"))
    })
}

/// Checks that files are as the steps of the manifest left them. With `only`, also that no other files are exported:
/// steps that are not part of the env any more may have made those.
fn as_left(
    cx: &Context,
    store: &Store,
    env: &LockedEnv<'_>,
    spec: &Spec,
    volumes: &[String],
    items: &mut Vec<export::Item>,
    only: bool,
) -> Result<()> {
    let Some(head) = &env.known_record()?.head.layer else {
        return Ok(());
    };
    let mut results = store.results(head, spec)?;
    results.retain(|volume, _| volumes.is_empty() || volumes.contains(volume));
    let mut left = BTreeSet::new();
    for (volume, results) in &results {
        let paths = results.listing.entries.keys();
        left.extend(paths.map(|path| Path::new(volume).join(path)));
    }
    let name = env.name();
    for difference in store.differences(head, spec, true)? {
        let place = Path::new(&difference.volume).join(&difference.path);
        match (&difference.state, difference.state.words()) {
            (_, None) => {}
            _ if !left.contains(&place) => {}
            (ResultState::Missing, _) => cx.ui.warn(&format!(
                "`{}`, written by a step of env `{name}`, is missing from its output: `rockenv up` restores it",
                place.display()
            )),
            (ResultState::Unlinked, Some(what)) => cx.ui.warn(&format!(
                "`{}`, written by a step of env `{name}`, {what}: `rockenv up` links it again",
                place.display()
            )),
            (_, Some(what)) => {
                let volume = spec.volume(&difference.volume);
                let directory = volume.map(|volume| store.output_dir(name, volume));
                return Err(Error::new(
                    Kind::Drift,
                    format!(
                        "`{}` was changed after a step of env `{name}` wrote it: it {what}",
                        directory.unwrap_or_default().join(&difference.path).display()
                    ),
                )
                .help("move it away: `rockenv up` restores the step's file"));
            }
        }
    }
    // Snapshots of older versions do not list a step's outputs.
    if only && !left.is_empty() {
        // Directories that lead to an existing item are expected.
        let leads = |item: &export::Item| left.iter().any(|path| path.starts_with(&item.to));
        items.retain(|item| left.contains(&item.to) || item.entry.is_directory() && leads(item));
    }
    Ok(())
}

fn items(
    store: &Store,
    env: &LockedEnv<'_>,
    spec: &Spec,
    only: &[String],
) -> Result<Vec<export::Item>> {
    let name = env.name();
    let outputs = || results::outputs(spec);
    if let Some(unknown) = only
        .iter()
        .find(|only| !outputs().any(|volume| volume.name == **only))
    {
        let names: Vec<&str> = outputs().map(|volume| volume.name.as_str()).collect();
        return Err(
            Error::not_found(format!("env `{name}` has no output volume `{unknown}`"))
                .help(format!("there is {}", names.join(", "))),
        );
    }
    let mut items = Vec::new();
    for volume in outputs().filter(|volume| only.is_empty() || only.contains(&volume.name)) {
        let place = store.output_dir(name, volume);
        if place.is_dir() {
            items.extend(export::list(&place, Path::new(&volume.name))?);
        }
    }
    match items.is_empty() {
        false => Ok(items),
        true => Err(Error::not_found(format!(
            "env `{name}` has no files in its output volumes"
        ))
        .help("a step with `export`, or one that writes to a volume of kind `output`, puts it there")),
    }
}

/// Makes the directory. Returns the owner for new files if root writes for itself.
fn prepare(directory: &Path) -> Result<Option<(u32, u32)>> {
    account::make_directories(account::caller(), directory)?;
    export::owner(directory)
}

fn check(cx: &Context, directory: &Path) -> Result<u8> {
    #[derive(Serialize)]
    struct Checked {
        manifest: PathBuf,
        files: usize,
        differences: Vec<String>,
    }
    let mut found = Vec::new();
    let mut entries = fs::read_dir(directory)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs_err::DirEntry::file_name);
    for entry in entries {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(MANIFEST) {
            let path = entry.path();
            let manifest = export::parse(&fs::read(&path)?, &path.display().to_string())?;
            found.push(Checked {
                differences: export::check(directory, &manifest)?,
                files: manifest.subject.len(),
                manifest: path,
            });
        }
    }
    if found.is_empty() {
        return Err(Error::not_found(format!(
            "there is no manifest (`ENV{MANIFEST}`) in `{}`",
            directory.display()
        ))
        .help(format!("rockenv export ENV {}", directory.display())));
    }
    let same = found.iter().all(|checked| checked.differences.is_empty());
    if cx.json {
        cx.ui.json(&found)?;
    } else {
        for checked in &found {
            for difference in &checked.differences {
                cx.ui.data(&format!("{difference}\n"));
            }
            let (total, other) = (checked.files, checked.differences.len());
            cx.ui.note(&format!(
                "{}: {} of {total} files match",
                checked.manifest.display(),
                total - other
            ));
        }
    }
    Ok(if same { 0 } else { Kind::Drift.exit_code() })
}
