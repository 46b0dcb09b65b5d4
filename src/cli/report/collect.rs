//! Owns reading the store for a report. Files that builds wrote are untrusted, so reads do not follow links and are
//! limited in size.

use std::collections::BTreeMap;
use std::io::{Read as _, Seek as _, SeekFrom};
use std::path::Path;

use fs_err as fs;
use jiff::Timestamp;

use super::{Build, Cache, Edge, EnvReport, EnvState, Fact, Run, Space, StepRow, locked};
use crate::cli::du::class_word;
use crate::execute::log::text_of;
use crate::execute::samples_beside;
use crate::plan::ids::{EnvName, StepKey};
use crate::plan::record::{Outcome, Record};
use crate::plan::resolve::{Spec, VolumeKind, VolumeSource};
use crate::plan::{ninja_log, samples};
use crate::store::Store;
use crate::store::build_logs::{self, BuildLog};
use crate::store::usage::report::{Inside, UsageReport, count};
use crate::sys::address::without_login;
use crate::sys::error::Result;
use crate::sys::host::{self, Host};
use crate::ui::size;

/// Number of lines shown from the failed step's log.
const TAIL: usize = 20;
const ROWS: usize = 20;

/// Gathers everything that an env's report shows.
pub(crate) fn gather(store: &Store, env: &EnvName) -> Result<EnvReport> {
    let record = store.known(env)?;
    // An env whose first `up` stopped early has no spec.
    let spec = store.spec(env).ok();
    let host = Host::probe()?;
    let verdict = match &record {
        record if record.failed.is_some() => EnvState::Failed,
        record if record.complete => EnvState::Complete,
        _ => EnvState::Unfinished,
    };
    let mut report = EnvReport {
        schema: "rockenv/report/1",
        version: env!("CARGO_PKG_VERSION"),
        written: Timestamp::now(),
        env: env.to_string(),
        profile: record.profile.clone(),
        targets: record.targets.clone(),
        verdict,
        summary: summary(&record),
        cores: host.cores,
        memory_max: spec
            .as_ref()
            .and_then(|spec| Some(spec.resources.memory_max?.of(host.memory))),
        steps: steps(&record),
        runs: runs(store, env, &record),
        tail: tail(&store.env_dir(env), &record),
        ..EnvReport::default()
    };
    builds(store, &record, &mut report);
    if let Some(spec) = &spec {
        report.caches = caches(store, spec)?;
        report.left_out = left_out(spec, &record);
        report.lock = locked::facts(store, &record, spec)?;
    }
    let space = count(store, Some(env), Inside::Directories(2))?;
    report.frees =
        space.freed.get(env.as_str()).copied().unwrap_or(0) + space.freed_at_services(env);
    report.space = spaces(&space);
    report.facts = facts(store, &record, spec.as_ref(), &host)?;
    Ok(report)
}

fn summary(record: &Record) -> String {
    let steps = record.steps.iter();
    let left = steps.filter(|step| step.outcome == Outcome::Pending);
    match (&record.failed, left.count()) {
        (Some(failed), _) => {
            let step = record.steps.iter().find(|step| step.name == failed.step);
            step.and_then(|step| step.reason.clone())
                .unwrap_or_else(|| format!("step `{}` failed", failed.step))
        }
        (None, _) if record.complete => {
            let steps = record.steps.iter();
            let skipped = steps.filter(|step| step.outcome == Outcome::Skipped);
            match skipped.count() {
                0 => "every step is done".to_owned(),
                skipped => format!("done; {} skipped", size::count(skipped, "step")),
            }
        }
        (None, 0) => "every step is done, and this is an earlier snapshot".to_owned(),
        (None, 1) => "1 step is left to do".to_owned(),
        (None, left) => format!("{left} steps are left to do"),
    }
}

fn steps(record: &Record) -> Vec<StepRow> {
    let steps = record.steps.iter().map(|step| StepRow {
        name: step.name.to_string(),
        outcome: step.outcome,
        reason: step.reason.clone(),
        cost: step.cost,
    });
    steps.collect()
}

/// Reads the runs of the env's current steps. A run with another key belongs to another step.
fn runs(store: &Store, env: &EnvName, record: &Record) -> Vec<Run> {
    let places: BTreeMap<&StepKey, usize> = record
        .steps
        .iter()
        .enumerate()
        .filter_map(|(at, step)| Some((step.key.as_ref()?, at)))
        .collect();
    let directory = store.env_dir(env);
    let rows = store.runs(env).into_iter();
    let mut runs: Vec<Run> = rows
        .filter_map(|row| {
            let samples = samples_beside(&directory.join(&row.log));
            let samples = fs::read_to_string(samples).ok();
            Some(Run {
                step: *places.get(&row.key)?,
                ended: row.time,
                wall_ms: row.cost.wall_ms,
                done: row.outcome == Outcome::Done,
                jobs: row.jobs,
                disk_delta: row.cost.disk_delta,
                samples: samples.as_deref().map(samples::parse).unwrap_or_default(),
            })
        })
        .collect();
    runs.sort_by_key(|run| run.ended);
    runs
}

fn tail(directory: &Path, record: &Record) -> Vec<String> {
    const MOST: u64 = 64 << 10;
    let Some(failed) = &record.failed else {
        return Vec::new();
    };
    let read = || -> std::io::Result<Vec<u8>> {
        let mut file = fs::File::open(directory.join(&failed.log))?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(MOST)))?;
        let mut bytes = Vec::new();
        file.take(MOST).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    let bytes = read().unwrap_or_default();
    let lines: Vec<&[u8]> = bytes.split(|byte| *byte == b'\n').collect();
    let lines = lines.iter().filter(|line| !line.is_empty());
    let shown = lines.clone().count().saturating_sub(TAIL);
    lines
        .skip(shown)
        .map(|line| String::from_utf8_lossy(text_of(line)).into_owned())
        .collect()
}

/// Reads the ninja logs in the env's build volumes.
fn builds(store: &Store, record: &Record, report: &mut EnvReport) {
    for (volume, id) in &record.head.volumes {
        let top = store.volume_dir(id);
        for below in build_logs::find(&top) {
            let Some(BuildLog { commands, .. }) = build_logs::read(&top, &below) else {
                continue;
            };
            let directory = Path::new(volume.as_str())
                .join(&below)
                .display()
                .to_string();
            report.builds.push(Build {
                directory: directory.clone(),
                edges: commands.len(),
                busy_ms: commands.iter().map(|command| command.took_ms).sum(),
            });
            let single = commands
                .into_iter()
                .filter(|command| !ninja_log::is_stamp(&command.output));
            report.slowest.extend(single.map(|command| Edge {
                directory: directory.clone(),
                output: command.output,
                took_ms: command.took_ms,
            }));
            // Keeps memory bounded: a full build has a million edges.
            shorten(&mut report.slowest, |edge| edge.took_ms);
        }
    }
    shorten(&mut report.builds, |build| build.busy_ms);
}

/// Keeps the largest rows, largest first.
fn shorten<T>(rows: &mut Vec<T>, size: impl Fn(&T) -> u64) {
    rows.sort_by_key(|row| std::cmp::Reverse(size(row)));
    rows.truncate(ROWS);
}

fn caches(store: &Store, spec: &Spec) -> Result<Vec<Cache>> {
    let mut caches = store.caches()?;
    let mounted = spec
        .volumes
        .iter()
        .filter(|volume| volume.kind == VolumeKind::Cache);
    let caches = mounted.filter_map(|volume| {
        let cache = caches.remove(&volume.name)?;
        Some(Cache {
            content: store.cache_content(&volume.name),
            bytes: store.cache_bytes(&volume.name),
            max: cache.max,
            lookups: store.cache_lookups(&volume.name),
            name: volume.name.clone(),
        })
    });
    Ok(caches.collect())
}

/// Returns the steps and hooks that are missing from the list of steps.
fn left_out(spec: &Spec, record: &Record) -> Vec<Fact> {
    let listed = |name: &str| record.steps.iter().any(|step| step.name == name);
    let steps = spec.skipped.iter().filter(|step| !listed(&step.name));
    let steps = steps.map(|step| Fact::new(format!("step {}", step.name), &step.reason));
    let hooks = spec.hooks_left_out.iter();
    let hooks = hooks.map(|hook| Fact::new(format!("hook {}", hook.name), &hook.reason));
    steps.chain(hooks).collect()
}

/// Returns the largest items, in the store and at services.
fn spaces(found: &UsageReport) -> Vec<Space> {
    let shared = |envs: &[String]| match envs.len() {
        0 | 1 => None,
        many => Some(format!("shared by {many} envs")),
    };
    let rows = found.rows.iter().map(|row| {
        let mut name = format!("{} {}", class_word(row.class), row.name);
        if let Some(inside) = &row.inside {
            name = format!("{name}/{}", inside.display());
        }
        let mut notes: Vec<String> = row.content.clone().into_iter().collect();
        notes.extend(shared(&row.envs));
        if row.class.is_kept() {
            notes.push("kept by `rm`".to_owned());
        }
        Space {
            name: name.trim_end().to_owned(),
            note: notes.join("; "),
            bytes: row.size.allocated,
        }
    });
    let held = found.at_services.iter().map(|held| Space {
        name: format!("{} {}", class_word(held.class), held.name)
            .trim_end()
            .to_owned()
            + " at "
            + &held.engine,
        note: shared(&held.envs).unwrap_or_default(),
        bytes: held.own,
    });
    let mut spaces: Vec<Space> = rows.chain(held).filter(|space| space.bytes > 0).collect();
    shorten(&mut spaces, |space| space.bytes);
    spaces
}

fn facts(store: &Store, record: &Record, spec: Option<&Spec>, host: &Host) -> Result<Vec<Fact>> {
    let machine = format!(
        "{}, {}, {} of memory",
        host::processor().unwrap_or_else(|| "unknown processor".to_owned()),
        size::count(host.cores, "thread"),
        size::bytes(host.memory)
    );
    let kernel = host::kernel().unwrap_or_else(|| "unknown".to_owned());
    let engine = format!("{}, store by {}", record.engine, store.method());
    let image = match store.image(&record.image_key)? {
        Some(image) => format!(
            "{} ({}), {}, built {}, {}",
            image.name,
            image.distribution,
            size::count(image.packages.len(), "package"),
            image.built.strftime("%Y-%m-%d"),
            image.digest
        ),
        None => record.image.clone(),
    };
    let mut facts = vec![
        Fact::new("machine", machine),
        Fact::new("kernel", kernel),
        Fact::new("engine", engine),
        Fact::new("image", image),
    ];
    let Some(spec) = spec else {
        return Ok(facts);
    };
    if let Some(variant) = &spec.variant {
        facts.push(Fact::new("variant", variant));
    }
    facts.push(Fact::new("begins with", &spec.from));
    for volume in &spec.volumes {
        let value = match &volume.source {
            VolumeSource::Git(git) => {
                // A report must not reveal local paths. As in git, a colon ends a host name unless a slash precedes it.
                let name = match git.url.split_once(':') {
                    Some((host, _)) if host != "file" && !host.contains('/') => {
                        without_login(&git.url)
                    }
                    _ => "a local repository".to_owned(),
                };
                match &git.rev {
                    Some(rev) => format!("{name} at {rev}"),
                    None => name,
                }
            }
            VolumeSource::Path(_) if volume.kind == VolumeKind::Source => {
                "a local directory".to_owned()
            }
            VolumeSource::Path(_) | VolumeSource::Store => continue,
        };
        facts.push(Fact::new(format!("source {}", volume.name), value));
    }
    for hook in &spec.hooks {
        facts.push(Fact::new(format!("hook {}", hook.name), &hook.digest));
    }
    Ok(facts)
}
