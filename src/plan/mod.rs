//! Owns deciding what `up` does: a pure function of the wanted steps and the observed state.

pub(crate) mod build_graph;
pub(crate) mod gc;
pub(crate) mod ids;
pub(crate) mod image;
pub(crate) mod jobs;
pub(crate) mod layer;
pub(crate) mod lockfile;
pub(crate) mod ninja_log;
pub(crate) mod pins;
pub mod record;
pub(crate) mod resolve;
pub(crate) mod samples;
pub(crate) mod savings;
pub(crate) mod step_log;
pub(crate) mod time_left;

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use crate::sys::name::StepName;
use ids::{LayerId, StepKey};

/// The part of a step that planning needs.
#[derive(Clone, Debug)]
pub(crate) struct StepInput {
    pub name: StepName,
    /// Key of the step; `None` for a skipped step, which is in no other step's key.
    pub key: Option<StepKey>,
    /// Keeps build volumes live when its key changed.
    pub incremental: bool,
    /// Why the step is skipped, if it is.
    pub skip: Option<String>,
    /// Whether no later step's key contains this step.
    pub uncached_downstream: bool,
}

/// A layer found for a step's key.
#[derive(Clone, Debug)]
pub(crate) struct CachedLayer {
    pub layer: LayerId,
    /// Why this env cannot use the layer, if it cannot.
    pub unusable: Option<String>,
    /// Incremental, or made by another engine: it does not count, and a registry may have a layer that does.
    pub refused: bool,
    /// Whether it contains build volumes, even if this store does not freeze them.
    pub holds_volumes: bool,
    /// Whether its files may be older than the objects in the env's build volumes, which were built on other layers.
    pub has_older_files: bool,
    /// Keys of the steps up to it whose results the env's output volumes lack or hold from an earlier build of the env.
    pub brings: BTreeSet<StepKey>,
}

impl CachedLayer {
    /// Returns a layer without build volumes that the env can use and that brings no results.
    pub(crate) fn usable(layer: LayerId) -> Self {
        Self {
            layer,
            unusable: None,
            refused: false,
            holds_volumes: false,
            has_older_files: false,
            brings: BTreeSet::new(),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Observed {
    /// Whether the env has a record.
    pub exists: bool,
    /// The env's layers, topmost first; empty on the bare image.
    pub head: Vec<LayerId>,
    /// Layers in `head` whose steps the profile has dropped or changed.
    pub outlived: Vec<LayerId>,
    pub layers: BTreeMap<StepKey, CachedLayer>,
    /// What changed in each step since the last `up`, by step key.
    pub changed: BTreeMap<StepKey, String>,
    /// Names of the steps that ran in the env or whose snapshots it had, under any key.
    pub ran: BTreeSet<String>,
    /// Keys of orphaned snapshots at a service; those also in `layers` are usable.
    pub orphaned: BTreeSet<StepKey>,
    /// Key of the last step for which a registry has a layer, and the registry.
    pub remote: Option<(StepKey, String)>,
    /// Key of the step that began last, if it did not succeed.
    pub attempt: Option<StepKey>,
    /// Whether the live tree has changes since its snapshot.
    pub is_modified: bool,
    /// Whether any build volume of the env has content.
    pub has_volumes: bool,
    /// Names of incremental steps whose work the build volumes lack under any key, such as steps that only another env
    /// ran.
    pub lacking: BTreeSet<String>,
    /// Whether files of changed sources may be older than the objects that were built before the change.
    pub has_older_sources: bool,
    /// Whether commands changed build volumes, and no snapshot can contain the changes.
    pub keeps_volumes: bool,
    pub freezes_volumes: bool,
}

/// Command-line options.
#[derive(Clone, Debug, Default)]
pub(crate) struct StepOptions {
    /// Last step to run.
    pub until: Option<String>,
    /// Step to run again, with all later ones.
    pub rerun: Option<String>,
    /// Start each step from its parent's state, volumes included.
    pub clean: bool,
}

/// What happens to a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Action {
    /// Its layer exists.
    Hit,
    /// Its layer comes from a registry.
    Pull,
    Run,
    /// It is skipped, and so has neither passed nor failed.
    Skip,
    /// It comes after `--until`.
    Later,
}

/// A step of a plan. A matrix reads it from the plan of each env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PlanStep {
    pub name: StepName,
    #[serde(with = "ids::or_empty")]
    pub key: Option<StepKey>,
    pub action: Action,
    /// The reason, in a few words.
    pub why: String,
    /// It runs even if its snapshot exists, so another env's snapshot must not be used.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub again: bool,
}

#[cfg(test)]
impl PlanStep {
    /// Makes a step whose key is `key`, for tests.
    pub(crate) fn sample(name: &str, key: char, action: Action) -> Self {
        Self {
            name: name.into(),
            key: Some(key.to_string().as_str().into()),
            action,
            why: String::new(),
            again: false,
        }
    }
}

/// Origin of the build volumes when the first step runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Volumes {
    /// They stay as they are.
    Live,
    /// They are restored from the snapshot that the step starts on.
    Restored,
    /// They are emptied.
    Fresh,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Plan {
    pub steps: Vec<PlanStep>,
    /// The env's layer before the first step, or at the end if no step runs; `None` is the image.
    pub start: Option<LayerId>,
    /// Whether the env must first be moved to `start`.
    pub moves: bool,
    /// What happens to the build volumes.
    pub volumes: Volumes,
    /// Whether changes in the live tree are first kept as a snapshot.
    pub keep_changes: bool,
    /// Cached steps whose results are restored to the env's output volumes.
    pub brings: Vec<StepName>,
    pub notes: Vec<String>,
}

impl Plan {
    pub(crate) fn is_empty(&self) -> bool {
        let work = [Action::Run, Action::Pull];
        !self.moves
            && self.brings.is_empty()
            && !self.steps.iter().any(|step| work.contains(&step.action))
    }

    /// Returns whether the plan empties the env's build volumes.
    pub(crate) fn empties_volumes(&self) -> bool {
        self.moves && self.volumes == Volumes::Fresh
    }

    /// Returns the steps that run.
    pub(crate) fn running(&self) -> impl Iterator<Item = &PlanStep> {
        let steps = self.steps.iter();
        steps.filter(|step| step.action == Action::Run)
    }

    pub(crate) fn runs(&self) -> usize {
        self.running().count()
    }
}

/// Decides what to do. The steps that `options` name must exist.
pub(crate) fn plan(wanted: &[StepInput], observed: &Observed, options: &StepOptions) -> Plan {
    let decision = Decision::new(wanted, observed, options);
    let base = decision.base();
    let found = base.and_then(|index| decision.found(index));
    let start = found.map(|found| found.layer.clone());
    let holds_volumes = found.is_some_and(|found| found.holds_volumes);
    let restores = observed.freezes_volumes || holds_volumes && !observed.keeps_volumes;
    let (pulled, registry) = decision.pulled().unzip();

    let mut steps = Vec::new();
    let mut brings = Vec::new();
    let mut first_run: Option<&StepInput> = None;
    for (index, step) in wanted.iter().enumerate() {
        let (action, why) = if index > decision.last {
            let last = &wanted[decision.last].name;
            (Action::Later, format!("after `--until {last}`"))
        } else if let Some(reason) = &step.skip {
            (Action::Skip, reason.clone())
        } else if base.is_some_and(|base| index <= base) {
            let is_brought = |key| found.is_some_and(|found| found.brings.contains(key));
            let why = if step.key.as_ref().is_some_and(is_brought) {
                brings.push(step.name.clone());
                "snapshot is there; its results go to this env's output"
            } else {
                "snapshot is there"
            };
            (Action::Hit, why.to_owned())
        } else if let (Some(registry), true) = (registry, pulled >= Some(index)) {
            (Action::Pull, format!("pulled from {registry}"))
        } else {
            let why = match first_run {
                Some(_) => "a step before it runs".to_owned(),
                None => decision.why_it_runs(index),
            };
            first_run.get_or_insert(step);
            (Action::Run, why)
        };
        let is_again = decision.afresh || decision.rerun.is_some_and(|rerun| index >= rerun);
        steps.push(PlanStep {
            name: step.name.clone(),
            key: step.key.clone(),
            again: action == Action::Run && is_again,
            action,
            why,
        });
    }

    let mut notes = Vec::new();
    let (moves, mut volumes) = match first_run {
        None => decision.at_the_end(start.as_ref(), restores),
        Some(step) => decision.before(step, base),
    };
    if !restores && !decision.afresh && volumes != Volumes::Live {
        if observed.has_volumes && first_run.is_some() {
            notes.push(
                "this store cannot restore build volumes (overlay): the step continues with the current ones; \
                 `--clean` empties them and runs every step again"
                    .to_owned(),
            );
        }
        volumes = Volumes::Live;
    }
    if volumes != Volumes::Live
        && !options.clean
        && observed.has_volumes
        && let Some(step) = first_run.filter(|step| step.incremental)
        && let Some(why) = decision.unfit(base)
    {
        notes.push(format!(
            "step `{}` starts with the build volumes of its parent instead of this env's: {why}",
            step.name
        ));
    }
    let moves = moves
        && (first_run.is_none()
            || observed.is_modified
            || observed.head.first() != start.as_ref()
            || volumes != Volumes::Live);
    Plan {
        steps,
        start,
        moves,
        volumes,
        keep_changes: observed.is_modified && (moves || first_run.is_some()),
        brings,
        notes,
    }
}

/// The wanted steps, the observed state, and the steps that the options name.
struct Decision<'a> {
    wanted: &'a [StepInput],
    observed: &'a Observed,
    options: &'a StepOptions,
    /// Position of the last requested step.
    last: usize,
    /// Position of the step to run again.
    rerun: Option<usize>,
    /// `--clean` with live volumes that cannot be restored: only a start from the first step is clean.
    afresh: bool,
}

impl<'a> Decision<'a> {
    fn new(wanted: &'a [StepInput], observed: &'a Observed, options: &'a StepOptions) -> Self {
        let position = |name: &String| wanted.iter().position(|step| step.name == **name);
        let until = options.until.as_ref().and_then(position);
        Self {
            wanted,
            observed,
            options,
            last: until.unwrap_or_else(|| wanted.len().saturating_sub(1)),
            rerun: options.rerun.as_ref().and_then(position),
            afresh: options.clean && !observed.freezes_volumes && observed.has_volumes,
        }
    }

    fn found(&self, index: usize) -> Option<&'a CachedLayer> {
        self.observed.layers.get(self.wanted[index].key.as_ref()?)
    }

    fn is_usable(&self, index: usize) -> bool {
        self.found(index)
            .is_some_and(|found| found.unusable.is_none())
            && self.is_before_rerun(index)
            && !self.afresh
    }

    fn is_before_rerun(&self, index: usize) -> bool {
        self.rerun.is_none_or(|rerun| index < rerun)
    }

    /// Returns the positions of the steps that are requested and not skipped.
    fn reached(&self) -> impl DoubleEndedIterator<Item = usize> {
        let steps = self.wanted.iter().enumerate();
        let reached = steps.filter(|(index, step)| *index <= self.last && step.skip.is_none());
        reached.map(|(index, _)| index)
    }

    /// Returns the step whose layer the env is based on. A layer includes everything below it, so the last usable one
    /// decides, and gaps before it do not matter.
    fn base(&self) -> Option<usize> {
        // Later layers prove nothing about a step outside their keys: the step runs, and they are rebuilt on it.
        let mut alone = self
            .reached()
            .filter(|&index| self.wanted[index].uncached_downstream);
        let first_lacking = alone.find(|&index| !self.is_usable(index));
        self.reached()
            .filter(|&index| first_lacking.is_none_or(|lacking| index < lacking))
            .rfind(|&index| self.is_usable(index))
    }

    /// Returns the last step that a registry has, and the registry.
    fn pulled(&self) -> Option<(usize, &'a str)> {
        let (key, registry) = self.observed.remote.as_ref()?;
        let mut steps = self.reached().filter(|&index| self.is_before_rerun(index));
        let last = steps.find(|&index| self.wanted[index].key.as_ref() == Some(key))?;
        Some((last, registry))
    }

    /// Returns why the first step that runs does so.
    fn why_it_runs(&self, index: usize) -> String {
        let (step, observed) = (&self.wanted[index], self.observed);
        let unusable = self.found(index).and_then(|found| found.unusable.as_ref());
        let changed = step.key.as_ref().and_then(|key| observed.changed.get(key));
        if self.rerun == Some(index) {
            "requested by `--rerun`".to_owned()
        } else if self.afresh {
            "requested by `--clean`".to_owned()
        } else if let Some(why) = unusable {
            why.clone()
        } else if self.is_resumed(step) {
            "did not finish last time".to_owned()
        } else if let Some(what) = changed {
            format!("changed: {what}")
        } else if !observed.exists {
            "new".to_owned()
        } else if !observed.ran.contains(step.name.as_str()) {
            "not built yet".to_owned()
        } else {
            "no snapshot with its key: it was removed, or something changed".to_owned()
        }
    }

    fn is_resumed(&self, step: &StepInput) -> bool {
        self.observed.attempt.is_some() && self.observed.attempt == step.key
    }

    /// Returns whether the env moves, and its volumes, if no step runs. An env that went on from its last step (by
    /// `exec` or a snapshot) stays, unless it is based on a step that is no longer wanted, a step began on its volumes,
    /// or it must be clean.
    fn at_the_end(&self, start: Option<&LayerId>, restores: bool) -> (bool, Volumes) {
        let observed = self.observed;
        let on_start = match start {
            Some(layer) => observed.head.contains(layer),
            None => observed.exists && observed.head.is_empty(),
        };
        // With `--until`, a later step may continue from here, and need the layers above.
        let is_whole = self.last + 1 >= self.wanted.len();
        let dirty = is_whole && restores && observed.attempt.is_some()
            || self.options.clean && observed.is_modified;
        let mut above = observed.head.iter().take_while(|id| Some(*id) != start);
        let outlived =
            self.options.until.is_none() && above.any(|id| observed.outlived.contains(id));
        match on_start && !dirty && !outlived {
            true => (false, Volumes::Live),
            false => (start.is_some(), Volumes::Restored),
        }
    }

    /// Returns why an incremental step on the layer of the step at `base` cannot continue with the live build volumes.
    fn unfit(&self, base: Option<usize>) -> Option<&'static str> {
        let observed = self.observed;
        if observed.has_older_sources {
            return Some("their objects may be newer than the files of another source or hook");
        }
        let found = self.found(base?)?;
        if found.has_older_files {
            return Some("their objects may be newer than the files of an earlier snapshot");
        }
        let mut steps = self.wanted[..=base?].iter();
        let is_ahead = steps.any(|step| observed.lacking.contains(step.name.as_str()));
        (found.holds_volumes && is_ahead)
            .then_some("they lack the work of a step whose snapshot is there")
    }

    /// Returns whether the env moves, and which build volumes it gets, if this step runs first, on the layer of the
    /// step at `base`.
    fn before(&self, step: &StepInput, base: Option<usize>) -> (bool, Volumes) {
        let observed = self.observed;
        let start = base.and_then(|base| self.found(base));
        let start = start.map(|found| &found.layer);
        // A new env, or one whose image changed, has no volumes to continue with.
        let at_start = observed.exists && observed.head.first() == start;
        let fits = || observed.has_volumes && self.unfit(base).is_none();
        let continues = self.is_resumed(step) || step.incremental && fits();
        let volumes = if self.afresh {
            Volumes::Fresh
        } else if !self.options.clean && continues
            || (at_start && observed.attempt.is_none() && !observed.is_modified)
        {
            Volumes::Live
        } else if start.is_some() {
            Volumes::Restored
        } else {
            Volumes::Fresh
        };
        // The step starts from its parent's snapshot, without later manual changes.
        let as_it_is = at_start && !observed.is_modified && volumes == Volumes::Live;
        (!as_it_is || !observed.exists, volumes)
    }
}

#[cfg(test)]
mod tests;
