//! Owns deciding what `up` does: a pure function of the wanted steps and the observed state.

pub(crate) mod checked;
pub mod gc;
pub mod ids;
pub mod image;
pub mod jobs;
pub mod layer;
pub mod lockfile;
pub mod ninja_log;
pub mod pins;
pub mod record;
pub mod resolve;
pub mod samples;
pub mod savings;

use std::collections::{BTreeMap, BTreeSet};

use serde::Serialize;

use ids::{LayerId, StepKey};

/// The part of a step that planning needs.
#[derive(Clone, Debug)]
pub struct Wanted {
    pub name: String,
    /// Its key; a step that is skipped is in nobody's key, and has none.
    pub key: Option<StepKey>,
    /// Keeps build volumes live when its key changed.
    pub incremental: bool,
    /// Why it is not run here, for a step that is skipped.
    pub skip: Option<String>,
    /// It is in no later step's key.
    pub uncached_downstream: bool,
}

/// A layer found for a step's key.
#[derive(Clone, Debug)]
pub struct Found {
    pub layer: LayerId,
    /// Why this env cannot use it, if so.
    pub unusable: Option<String>,
    /// It differs from a clean build, so it does not count: a registry may have a clean one.
    pub refused: bool,
    /// It contains the build volumes, although this store does not freeze them.
    pub holds_volumes: bool,
    /// Keys of the steps up to it whose results this env's output volumes lack, or have from an earlier build of this
    /// env.
    pub brings: BTreeSet<StepKey>,
}

/// The observed state.
#[derive(Clone, Debug, Default)]
pub struct Observed {
    /// Whether the env has a record.
    pub exists: bool,
    /// The env's layers, topmost first; empty on the bare image.
    pub head: Vec<LayerId>,
    /// Those of steps that the profile has no more, or has changed.
    pub outlived: Vec<LayerId>,
    /// Layers by step key.
    pub layers: BTreeMap<StepKey, Found>,
    /// What changed in steps since the last `up`, by their key.
    pub changed: BTreeMap<StepKey, String>,
    /// Keys of orphaned snapshots at a service; those among `layers` can be used.
    pub forgotten: BTreeSet<StepKey>,
    /// The last step's key for which a registry has a layer, and the registry.
    pub remote: Option<(StepKey, String)>,
    /// Key of the step begun last that did not end well.
    pub attempt: Option<StepKey>,
    /// Whether the live tree has changes since its snapshot.
    pub touched: bool,
    /// Whether any build volume of the env has content.
    pub has_volumes: bool,
    /// Whether the store freezes build volumes.
    pub freezes_volumes: bool,
}

/// Options of the command line.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Last step to run.
    pub until: Option<String>,
    /// Step to run again, with all later ones.
    pub rerun: Option<String>,
    /// Start each step from its parent's state, including volumes.
    pub clean: bool,
}

/// What happens to a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Action {
    /// Its layer exists.
    Hit,
    /// Its layer comes from a registry.
    Pull,
    /// It runs.
    Run,
    /// It is skipped, so it has neither passed nor failed.
    Skip,
    /// It comes after `--until`.
    Later,
}

/// One step of the plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Planned {
    pub name: String,
    /// Key, where it has one.
    #[serde(serialize_with = "ids::or_empty::serialize")]
    pub key: Option<StepKey>,
    pub action: Action,
    /// The reason, in a few words.
    pub why: String,
    /// It runs even if its snapshot exists, so another env's must not be used.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub again: bool,
}

/// Origin of the build volumes when the first step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Volumes {
    /// They stay as they are.
    Live,
    /// They are restored from the snapshot that the step starts on.
    Restored,
    /// They are emptied.
    Fresh,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Plan {
    pub steps: Vec<Planned>,
    /// The env's layer when the first step runs, or at the end; `None` is the image.
    pub start: Option<LayerId>,
    /// Whether the env must first be moved to `start`.
    pub moves: bool,
    /// What happens to the build volumes.
    pub volumes: Volumes,
    /// Whether changes in the live tree are first kept as a snapshot.
    pub keep_changes: bool,
    /// Steps with a snapshot whose results are restored to the env's output.
    pub brings: Vec<String>,
    /// Notes for the user.
    pub notes: Vec<String>,
}

impl Plan {
    pub fn is_empty(&self) -> bool {
        let work = [Action::Run, Action::Pull];
        !self.moves
            && self.brings.is_empty()
            && !self.steps.iter().any(|step| work.contains(&step.action))
    }

    pub fn runs(&self) -> usize {
        self.steps
            .iter()
            .filter(|step| step.action == Action::Run)
            .count()
    }
}

/// Decides what to do. `options` name existing steps.
pub fn plan(wanted: &[Wanted], observed: &Observed, options: &Options) -> Plan {
    let mut notes = Vec::new();
    let last = options
        .until
        .as_ref()
        .and_then(|until| wanted.iter().position(|step| step.name == *until))
        .unwrap_or_else(|| wanted.len().saturating_sub(1));
    let rerun = options
        .rerun
        .as_ref()
        .and_then(|name| wanted.iter().position(|step| step.name == *name));
    // Live volumes that cannot be restored can only be clean by starting from the first step.
    let afresh = options.clean && !observed.freezes_volumes && observed.has_volumes;

    // A layer includes everything below it: the last usable one decides, and gaps before it do not matter.
    let found = |index: usize| observed.layers.get(wanted[index].key.as_ref()?);
    let usable = |index: usize| {
        let found = found(index)?;
        (found.unusable.is_none() && rerun.is_none_or(|rerun| index < rerun) && !afresh)
            .then_some(&found.layer)
    };
    let reached =
        || (0..wanted.len()).filter(|&index| index <= last && wanted[index].skip.is_none());
    // Later layers prove nothing about a step that is not in their keys: it runs, and they are made again on it.
    let first_lacking =
        reached().find(|&index| wanted[index].uncached_downstream && usable(index).is_none());
    let base = reached()
        .filter(|&index| first_lacking.is_none_or(|lacking| index < lacking))
        .filter_map(|index| Some((index, usable(index)?.clone())))
        .next_back();
    let start = base.as_ref().map(|(_, layer)| layer.clone());
    let restores = observed.freezes_volumes
        || base.as_ref().is_some_and(|(index, _)| {
            let found = found(*index);
            found.is_some_and(|found| found.holds_volumes)
        });

    let brought = base.as_ref().and_then(|(index, _)| {
        let found = found(*index);
        found.map(|found| &found.brings)
    });

    let remote = observed.remote.as_ref();
    let pulled = remote.and_then(|(key, _)| {
        reached().find(|index| {
            wanted[*index].key.as_ref() == Some(key) && rerun.is_none_or(|at| *index < at)
        })
    });

    let mut steps = Vec::new();
    let mut brings = Vec::new();
    let mut first_run: Option<&Wanted> = None;
    for (index, step) in wanted.iter().enumerate() {
        let (action, why) = if index > last {
            (
                Action::Later,
                format!("after `--until {}`", wanted[last].name),
            )
        } else if let Some(reason) = &step.skip {
            (Action::Skip, reason.clone())
        } else if base.as_ref().is_some_and(|(base, _)| index <= *base) {
            if step
                .key
                .as_ref()
                .is_some_and(|key| brought.is_some_and(|brought| brought.contains(key)))
            {
                brings.push(step.name.clone());
                let why = "snapshot is there; its results go to this env's output";
                (Action::Hit, why.to_owned())
            } else {
                (Action::Hit, "snapshot is there".to_owned())
            }
        } else if let (Some((_, registry)), true) = (remote, pulled >= Some(index)) {
            (Action::Pull, format!("pulled from {registry}"))
        } else {
            let changed = || observed.changed.get(step.key.as_ref()?);
            let why = match found(index) {
                _ if first_run.is_some() => "a step before it runs".to_owned(),
                _ if rerun == Some(index) => "requested by `--rerun`".to_owned(),
                _ if afresh => "requested by `--clean`".to_owned(),
                Some(Found {
                    unusable: Some(why),
                    ..
                }) => why.clone(),
                _ if observed.attempt.is_some() && observed.attempt == step.key => {
                    "did not finish last time".to_owned()
                }
                _ => match changed() {
                    Some(what) => format!("changed: {what}"),
                    None if !observed.exists => "new".to_owned(),
                    None => {
                        "no snapshot with its key: it, or something before it, changed".to_owned()
                    }
                },
            };
            first_run.get_or_insert(step);
            (Action::Run, why)
        };
        steps.push(Planned {
            name: step.name.clone(),
            key: step.key.clone(),
            again: action == Action::Run && (afresh || rerun.is_some_and(|rerun| index >= rerun)),
            action,
            why,
        });
    }

    let on_start = match &start {
        Some(layer) => observed.head.contains(layer),
        None => observed.exists && observed.head.is_empty(),
    };
    let (moves, volumes) = match first_run {
        // Everything exists. An env that continued from its last step (by `exec` or a snapshot) stays, unless it
        // stands on a step that is no longer wanted, or a step was begun on its volumes.
        None => {
            let dirty = observed.attempt.is_some() && restores;
            let mut above = observed
                .head
                .iter()
                .take_while(|id| Some(*id) != start.as_ref());
            // With `--until`, later layers may still be wanted.
            let outlived =
                options.until.is_none() && above.any(|id| observed.outlived.contains(id));
            let stays = on_start && !dirty && !outlived;
            (
                start.is_some() && !stays,
                if stays {
                    Volumes::Live
                } else {
                    Volumes::Restored
                },
            )
        }
        Some(step) => {
            let at_start = observed.head.first() == start.as_ref();
            let resumes = observed.attempt.is_some() && observed.attempt == step.key;
            let volumes = if afresh {
                Volumes::Fresh
            } else if !options.clean && (resumes || step.incremental && observed.has_volumes)
                || (at_start && observed.attempt.is_none() && !observed.touched)
            {
                Volumes::Live
            } else if start.is_some() {
                Volumes::Restored
            } else {
                Volumes::Fresh
            };
            // It starts from its parent's snapshot, not from manual changes since.
            let as_it_is = at_start && !observed.touched && volumes == Volumes::Live;
            (!as_it_is || !observed.exists, volumes)
        }
    };
    let volumes = if restores || afresh || volumes == Volumes::Live {
        volumes
    } else {
        if observed.has_volumes && first_run.is_some() {
            notes.push(
                "this store cannot restore build volumes (overlay): the step continues with the current ones; \
                 `--clean` empties them and runs every step again"
                    .to_owned(),
            );
        }
        Volumes::Live
    };
    let moves = moves
        && (first_run.is_none()
            || observed.touched
            || observed.head.first() != start.as_ref()
            || volumes != Volumes::Live);
    let keep_changes = observed.touched && (moves || first_run.is_some());
    Plan {
        steps,
        start,
        moves,
        volumes,
        keep_changes,
        brings,
        notes,
    }
}

#[cfg(test)]
mod tests;
