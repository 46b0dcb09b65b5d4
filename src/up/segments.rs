//! Owns deciding, for `verify`, which steps must run to rebuild steps of an env from clean.

use crate::plan::ids::{ImageKey, LayerId, StepKey};
use crate::plan::layer::{Layer, VolumeState};
use crate::plan::record::{Outcome, Record};
use crate::plan::resolve::{Spec, Step};
use crate::plan::{Action, Plan, PlanStep, Volumes};
use crate::store::Store;
use crate::sys::error::Result;
use crate::sys::suggest;

/// Steps that run one after the other.
#[derive(Debug)]
pub(crate) struct Segment {
    /// The layer that the first one starts from; `None` for the image.
    pub(crate) start: Option<LayerId>,
    pub(crate) image_key: ImageKey,
    pub(crate) runs: Vec<StepKey>,
    /// Keys of the steps that are compared.
    pub(crate) compared: Vec<StepKey>,
}

/// Returns the segments that rebuild the named steps, or all steps. A segment that continues the previous one is merged
/// into it.
pub(crate) fn segments(
    store: &Store,
    spec: &Spec,
    record: &Record,
    names: &[String],
) -> Result<Vec<Segment>> {
    let mut segments: Vec<Segment> = Vec::new();
    for step in chosen(spec, record, names)? {
        let segment = segment(store, spec, record, step)?;
        match segments.last_mut() {
            Some(last) if last.start == segment.start && segment.runs.starts_with(&last.runs) => {
                last.runs = segment.runs;
                last.compared.extend(segment.compared);
            }
            _ => segments.push(segment),
        }
    }
    Ok(segments)
}

/// Returns the steps to build again, in order.
fn chosen<'a>(spec: &'a Spec, record: &Record, names: &[String]) -> Result<Vec<&'a Step>> {
    let has = |step: &&Step| record.of_step(&step.key).is_some();
    let known: Vec<&Step> = spec.steps.iter().filter(has).collect();
    for name in names {
        if !known.iter().any(|step| step.name == **name) {
            let mut ran = record.steps.iter();
            let is_skipped =
                ran.any(|step| step.name == **name && step.outcome == Outcome::Skipped);
            let what = match spec.step(name) {
                _ if is_skipped => format!(
                    "step `{name}` of env `{}` has no snapshot: it was skipped",
                    spec.name
                ),
                Some(_) => format!("step `{name}` of env `{}` has no snapshot", spec.name),
                None => format!("env `{}` has no step `{name}`", spec.name),
            };
            let known: Vec<&str> = known.iter().map(|step| step.name.as_str()).collect();
            let help = suggest::choices_help(name, &known, "steps with a snapshot");
            return Err(not_found!("{what}").help(help));
        }
    }
    let is_asked = |step: &&Step| names.is_empty() || names.iter().any(|name| step.name == **name);
    let chosen: Vec<&Step> = known.into_iter().filter(is_asked).collect();
    match chosen.is_empty() {
        true => {
            let message = format!("no step of env `{}` has a snapshot", spec.name);
            Err(not_found!("{message}").help(record.up_command()))
        }
        false => Ok(chosen),
    }
}

/// Returns the segment for a step: the step itself, and earlier ones whose snapshots lack the build volumes of a
/// clean build.
fn segment(store: &Store, spec: &Spec, record: &Record, step: &Step) -> Result<Segment> {
    let key = step.key.clone();
    let layer = &snapshot_layer(record, &key)?;
    let mut chain = store.chain(layer)?.into_iter();
    let image_key = match chain.next() {
        Some(layer) => layer.image_key,
        None => record.image_key.clone(),
    };
    let (mut start, mut runs) = (None, vec![key.clone()]);
    for below in chain {
        if holds_clean(store, &below) {
            start = Some(below.id);
            break;
        }
        let known = below
            .key
            .filter(|key| spec.steps.iter().any(|step| step.key == *key));
        runs.push(known.ok_or_else(|| {
            invalid!(
                "step `{}` cannot be built again: it is based on `{}`, which is not one of the env's steps",
                step.name, below.title
            )
            .help(format!("{} --clean", record.up_command()))
        })?);
    }
    runs.reverse();
    Ok(Segment {
        start,
        image_key,
        runs,
        compared: vec![key],
    })
}

/// Returns whether a clean build can start on a layer.
fn holds_clean(store: &Store, layer: &Layer) -> bool {
    let mut volumes = layer.volumes.values();
    layer.is_clean() && store.is_sound(layer) && volumes.all(VolumeState::is_kept)
}

pub(crate) fn snapshot_layer(record: &Record, key: &StepKey) -> Result<LayerId> {
    let snapshot = record.of_step(key);
    snapshot
        .map(|snapshot| snapshot.layer.clone())
        .ok_or_else(|| unexpected!("a step that was built has no snapshot"))
}

pub(crate) fn runs<'a>(spec: &'a Spec, segment: &'a Segment) -> impl Iterator<Item = &'a Step> {
    let is_run = |step: &&Step| segment.runs.contains(&step.key);
    spec.steps.iter().filter(is_run)
}

pub(crate) fn plan(spec: &Spec, segment: &Segment) -> Plan {
    let is_run = |step: &Step| segment.runs.contains(&step.key);
    let first = spec.steps.iter().position(is_run);
    let steps = spec.steps.iter().enumerate().map(|(position, step)| {
        let (action, why) = match (is_run(step), Some(position) < first) {
            (true, _) => (Action::Run, "built again"),
            (false, true) => (Action::Hit, "taken from its snapshot"),
            (false, false) => (Action::Later, "not asked for"),
        };
        PlanStep {
            name: step.name.clone(),
            key: Some(step.key.clone()),
            action,
            why: why.to_owned(),
            again: false,
        }
    });
    Plan {
        steps: steps.collect(),
        start: segment.start.clone(),
        moves: true,
        volumes: match segment.start {
            Some(_) => Volumes::Restored,
            None => Volumes::Fresh,
        },
        keep_changes: false,
        brings: Vec::new(),
        notes: Vec::new(),
    }
}
