//! Owns observing, between resolving a spec and planning: which snapshots this env can use, and the env's current
//! state. Reads the store, and changes nothing.

use std::collections::BTreeSet;

use crate::engine::docker::Service;
use crate::plan::ids::{EnvName, ImageKey, LayerId, StepKey};
use crate::plan::record::{Outcome, Snapshot, StepRecord};
use crate::plan::resolve::{self, Spec, Step};
use crate::plan::{CachedLayer, Observed, Plan, StepInput, StepOptions, plan as decide};
use crate::profile::Profile;
use crate::store::attempt::Attempt;
use crate::store::history::{History, LayerSearch};
use crate::store::layer::VolumeState;
use crate::store::results::outputs;
use crate::store::{Layer, LockedEnv, Record, Store};
use crate::sys::error::Result;
use crate::up::older_sources::has_older_sources;
use crate::up::resolve::Gathered;

/// Returns the profile's steps in order, with the reason for each step that this env omits.
pub(crate) fn wanted(profile: &Profile, spec: &Spec) -> Vec<StepInput> {
    let steps = profile.steps.iter().filter_map(|step| {
        let found = spec.step(&step.name);
        let mut skipped = spec.skipped.iter();
        Some(StepInput {
            name: step.name.clone(),
            key: found.map(|found| found.key.clone()),
            incremental: found.is_some_and(|found| found.incremental),
            skip: match found {
                Some(_) => None,
                None => Some(skipped.find(|one| one.name == step.name)?.reason.clone()),
            },
            uncached_downstream: found.is_some_and(Step::is_in_no_later_key),
        })
    });
    steps.collect()
}

/// Reads the state of an env and of its steps' layers.
pub(crate) fn observe(
    store: &Store,
    env: Option<&LockedEnv<'_>>,
    spec: &Spec,
    wanted: &[StepInput],
    image_key: Option<&ImageKey>,
    search: &LayerSearch<'_>,
) -> Result<Observed> {
    let service = search.service.map(Service::connect).transpose()?;
    let record = search.record;
    let mut observed = Observed {
        freezes_volumes: store.freezes_volumes(),
        ..Observed::default()
    };
    let stand = record
        .map(|record| Stand::read(store, record, &spec.name, image_key))
        .transpose()?;
    let before = record.and_then(|_| store.spec(&spec.name).ok());
    let writers = stand.as_ref();
    let writers = writers.map(|stand| VolumeWriters::read(store, stand, wanted));
    let mut results = Results {
        store,
        spec,
        head: stand.as_ref().map_or(&[], |stand| &stand.head),
        known: record.map_or_else(Vec::new, Record::known_layers),
        of_head: None,
    };
    let keyed = wanted.iter();
    for (step, key) in keyed.filter_map(|step| Some((step, step.key.as_ref()?))) {
        let served = store.step_layer(key, search)?;
        let is_served = served.is_some();
        let other = match served {
            Some(layer) => Some(layer),
            None => {
                let own = record.and_then(|record| record.of_step(key));
                store.layer(&own.map_or_else(|| key.clone().into(), |own| own.layer.clone()))?
            }
        };
        if let Some(layer) = other {
            let refused = if is_served {
                elsewhere(&layer, service.as_ref())?
            } else {
                let why = layer.history.why();
                Some(format!("its snapshot is incremental: {why}"))
            };
            let is_refused = refused.is_some();
            let unusable = refused
                .or_else(|| unusable(store, &layer, writers.as_ref(), spec, &step.name))
                .or_else(|| stand.as_ref()?.outdated(store, &layer, wanted));
            let frozen = |state| matches!(state, &VolumeState::Frozen);
            let brings = match &unusable {
                None => results.missing(&layer.id)?,
                Some(_) => BTreeSet::new(),
            };
            observed.layers.insert(
                key.clone(),
                CachedLayer {
                    holds_volumes: layer.volumes.values().any(frozen),
                    has_older_files: writers.iter().any(|it| it.are_newer(store, &layer, wanted)),
                    brings,
                    layer: layer.id,
                    unusable,
                    refused: is_refused,
                },
            );
        } else if let (Some(record), Some(before)) = (record, &before)
            && let (Some(old), Some(new)) = (before.step(&step.name), spec.step(&step.name))
            && old.key != new.key
        {
            let is_rebased = Some(&record.image_key) != image_key;
            observed
                .changed
                .insert(key.clone(), changed(old, new, is_rebased));
        }
    }
    if let Some(service) = &service {
        find_orphans(store, service, wanted, &mut observed)?;
    }
    let Some(record) = record.filter(|record| Some(&record.image_key) == image_key) else {
        return Ok(observed);
    };
    observed.exists = true;
    observed.ran = ran(record);
    if let Some(stand) = stand {
        observed.outlived = stand.outlived(store, wanted)?;
        observed.head = stand.head;
        observed.attempt = stand.attempt.map(|begun| begun.key);
    }
    observed.lacking = writers.map_or_else(BTreeSet::new, |writers| writers.lacking(wanted));
    observed.has_older_sources = has_older_sources(store, record, before.as_ref(), spec)?;
    observed.is_modified = match env {
        Some(env) => env.is_modified()?,
        None => record.head.tree.is_some(),
    };
    observed.keeps_volumes = keeps_volumes(env, record, &observed)?;
    observed.has_volumes = record.head.volumes.values().any(|id| {
        fs_err::read_dir(store.volume_dir(id)).is_ok_and(|mut entries| entries.next().is_some())
    });
    Ok(observed)
}

/// Returns whether commands changed build volumes that a layer could replace and no snapshot can contain.
fn keeps_volumes(
    env: Option<&LockedEnv<'_>>,
    record: &Record,
    observed: &Observed,
) -> Result<bool> {
    let mut layers = observed.layers.values();
    if observed.freezes_volumes || !layers.any(|found| found.holds_volumes) {
        return Ok(false);
    }
    match env {
        Some(env) => env.is_changed_by_hand(),
        None => Ok(record.head.by_hand().is_some()),
    }
}

/// Returns the names of the steps that ran in an env, or whose snapshots it had.
fn ran(record: &Record) -> BTreeSet<String> {
    let has_run = |step: &&StepRecord| match step.outcome {
        Outcome::Done | Outcome::Hit | Outcome::Failed => true,
        Outcome::Skipped => false,
        Outcome::Pending => step.is_interrupted(),
    };
    let steps = record.steps.iter().filter(has_run);
    let steps = steps.map(|step| step.name.to_string());
    let snapshots = record.step_snapshots();
    let snapshots = snapshots.map(|snapshot| snapshot.name.clone());
    steps.chain(snapshots).collect()
}

/// Returns why the key of a step changed.
fn changed(old: &Step, new: &Step, is_rebased: bool) -> String {
    let what = resolve::changed(old, new);
    match (what.is_empty(), is_rebased) {
        (false, _) => what.join(", "),
        (true, true) => "the image".to_owned(),
        (true, false) => "a step before it".to_owned(),
    }
}

/// Finds the snapshots that only the service still has.
fn find_orphans(
    store: &Store,
    service: &Service,
    wanted: &[StepInput],
    observed: &mut Observed,
) -> Result<()> {
    let keys = wanted.iter().filter_map(|step| step.key.as_ref());
    let missing: Vec<&StepKey> = keys
        .filter(|key| !observed.layers.contains_key(*key))
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    for frozen in store.orphan_snapshots(service, &missing)? {
        if frozen.whole.is_some() {
            let found = CachedLayer::usable(frozen.key.clone().into());
            observed.layers.insert(frozen.key.clone(), found);
        }
        observed.orphaned.insert(frozen.key);
    }
    Ok(())
}

/// The current state of an env.
struct Stand<'a> {
    record: &'a Record,
    /// Its layers, topmost first.
    head: Vec<LayerId>,
    /// The step that began last, if it did not succeed.
    attempt: Option<Attempt>,
    /// That step's layer, if it has one: the step was to run again.
    redone: Option<LayerId>,
}

impl<'a> Stand<'a> {
    fn read(
        store: &Store,
        record: &'a Record,
        env: &EnvName,
        image_key: Option<&ImageKey>,
    ) -> Result<Self> {
        let mut head = Vec::new();
        if let Some(layer) = &record.head.layer
            && Some(&record.image_key) == image_key
        {
            head.extend(store.chain(layer)?.into_iter().map(|layer| layer.id));
        }
        let attempt = store.attempt(env, record)?;
        let before = attempt
            .as_ref()
            .and_then(|begun| record.of_step(&begun.key));
        let redone = before.map(|snapshot| snapshot.layer.clone());
        Ok(Self {
            record,
            // A rollback to the layer cancels running its step again.
            redone: redone.filter(|layer| !head.contains(layer)),
            head,
            attempt,
        })
    }

    /// Returns the env's layers of steps that are no longer wanted. A layer of a step that is skipped for lack of a GPU
    /// may stay.
    fn outlived(&self, store: &Store, wanted: &[StepInput]) -> Result<Vec<LayerId>> {
        let mut outlived = Vec::new();
        for id in &self.head {
            let Some(layer) = store.layer(id)? else {
                continue;
            };
            let is = |step: &StepInput| match step.key {
                None => *step.name == *layer.title,
                Some(_) => layer.key == step.key,
            };
            if layer.key.is_some() && !wanted.iter().any(is) {
                outlived.push(layer.id);
            }
        }
        Ok(outlived)
    }

    /// Returns why the env must not use a valid layer: `--rerun` has rebuilt a layer below it, or has begun to and
    /// did not get this far.
    fn outdated(&self, store: &Store, layer: &Layer, wanted: &[StepInput]) -> Option<String> {
        if self.head.contains(&layer.id) {
            return None;
        }
        // Layers of another env that this one never used have their own chain. The user chose this env's own chain by
        // `--rerun`.
        let snapshots = &self.record.snapshots;
        let is_own = layer.env.as_ref() == Some(&self.record.id)
            || snapshots.iter().any(|snapshot| snapshot.layer == layer.id);
        // A missing lower layer is reported where it is needed.
        for below in store.chain(&layer.id).ok()? {
            let key = below.key.as_ref();
            let begun = self.attempt.as_ref().map(|begun| &begun.key);
            if self.redone.is_some() && key == begun {
                return Some("did not finish last time".to_owned());
            }
            // If later keys do not depend on a step's result, nothing is built on it.
            let mut uncached_downstream = wanted.iter().filter(|step| step.uncached_downstream);
            let key =
                key.filter(|key| !uncached_downstream.any(|step| step.key.as_ref() == Some(key)));
            let newer = key.and_then(|key| self.record.of_step(key));
            let is_newer = |newer: &Snapshot| {
                let than = match is_own {
                    true => layer.created,
                    false => below.created,
                };
                newer.layer != below.id && newer.created > than && (is_own || newer.again)
            };
            if newer.is_some_and(is_newer) {
                // Another env may have built the layer, under its own name for the step.
                let own = wanted
                    .iter()
                    .find(|step| step.key.as_ref() == below.key.as_ref());
                let title = own.map_or(below.title.as_str(), |step| step.name.as_str());
                return Some(format!("`{title}` was built again since"));
            }
        }
        None
    }
}

/// The last writers to an env's live build volumes, where snapshots do not contain these.
struct VolumeWriters<'a> {
    record: &'a Record,
    /// The layer with the volumes' last content, and the layers below it; `None` if it was removed.
    from: Option<Vec<Layer>>,
    /// The layers of the earlier build whose files the volumes began with, if any; `None` if a layer was removed.
    earlier: Option<Vec<Layer>>,
    head: Vec<LayerId>,
    /// The layers below a step of another build that began on the volumes since and did not succeed.
    begun: Option<Vec<LayerId>>,
}

impl<'a> VolumeWriters<'a> {
    fn read(store: &Store, stand: &Stand<'a>, wanted: &[StepInput]) -> Self {
        let chain = |layer: Option<&LayerId>| match layer {
            Some(layer) => store.chain(layer).ok(),
            None => Some(Vec::new()),
        };
        let volumes_from = stand.record.head.volumes_from();
        let earlier = match &volumes_from.history {
            History::Clean => None,
            History::Incremental { on, .. } => on.as_ref(),
        };
        let is_wanted = |begun: &&Attempt| {
            let mut keys = wanted.iter().filter_map(|step| step.key.as_ref());
            keys.any(|key| *key == begun.key)
        };
        // A step of this build is resumed on the layers below it, and outdates those above.
        let begun = stand.attempt.as_ref();
        let other = begun.filter(|begun| begun.sees_volumes && !is_wanted(begun));
        Self {
            record: stand.record,
            from: chain(volumes_from.layer.as_ref()),
            earlier: chain(earlier),
            head: stand.head.clone(),
            begun: other.map(|begun| {
                let on = chain(begun.on.as_ref()).unwrap_or_default();
                on.into_iter().map(|layer| layer.id).collect()
            }),
        }
    }

    /// Returns whether the volumes are as a layer or a step above it left them.
    fn kept(&self, store: &Store, layer: &Layer) -> bool {
        let is_above = match &self.from {
            Some(from) => {
                let is_there = from.iter().any(|below| below.id == layer.id);
                is_there || is_again(store, layer, from)
            }
            None => self.head.contains(&layer.id),
        };
        let begun = self.begun.as_ref();
        let is_untouched = begun.is_none_or(|begun| begun.contains(&layer.id));
        is_above && is_untouched
    }

    /// Returns whether objects in the volumes may be newer than a wanted step's layer, `layer` or one below it, that
    /// they were not built on: a `copy` step went back to an earlier file. ninja and make would take them for new ones.
    ///
    /// An incremental step's layer counts only if the volumes have that step's work: under another key, or under its
    /// own and an unfinished step of another build began below. Layers of steps that are not wanted do not count:
    /// where TheRock's fingerprints are in keys, the layers below may be of an earlier revision.
    fn are_newer(&self, store: &Store, layer: &Layer, wanted: &[StepInput]) -> bool {
        let from = self.from.as_deref().unwrap_or_default();
        let built = from.iter().map(|on| on.created).max();
        let is_other = |below: &Layer| {
            let is = |step: &&StepInput| step.key.is_some() && step.key == below.key;
            let Some(step) = wanted.iter().find(is) else {
                return false;
            };
            // An unfinished step of another build may have made objects since.
            let begun = self.begun.as_ref();
            let is_begun = begun.is_some_and(|on| !on.contains(&below.id));
            let is_older = built > Some(below.created);
            match step.incremental {
                _ if from.iter().any(|on| on.key == below.key) => is_begun,
                true => is_older && from.iter().any(|on| *on.title == *step.name),
                false => is_older || is_begun,
            }
        };
        let chain = store.chain(&layer.id).unwrap_or_default();
        chain.iter().any(is_other)
    }

    /// Returns the names of incremental steps whose work the volumes lack under any key; none if the volumes' layers
    /// are not known.
    fn lacking(&self, wanted: &[StepInput]) -> BTreeSet<String> {
        let (Some(from), Some(earlier)) = (&self.from, &self.earlier) else {
            return BTreeSet::new();
        };
        let is_there = |step: &StepInput| {
            let mut layers = from.iter().chain(earlier);
            layers.any(|layer| *step.name == *layer.title || step.key == layer.key)
        };
        let steps = wanted.iter().filter(|step| step.incremental);
        let lacking = steps.filter(|step| !is_there(step));
        lacking.map(|step| step.name.to_string()).collect()
    }
}

/// Returns whether the topmost step's layer of `from` has the key of `layer` or of one below it: `--rerun` made a
/// second layer of the step. `Stand::outdated` decides which of the two counts, and a rollback to the older one stays.
fn is_again(store: &Store, layer: &Layer, from: &[Layer]) -> bool {
    let Some(key) = from.iter().find_map(|layer| layer.key.as_ref()) else {
        return false;
    };
    let chain = store.chain(&layer.id).unwrap_or_default();
    chain.iter().any(|below| below.key.as_ref() == Some(key))
}

/// The step results that an env's output volumes lack.
struct Results<'a> {
    store: &'a Store,
    spec: &'a Spec,
    /// The env's layers, topmost first.
    head: &'a [LayerId],
    /// Layers of its current and past states.
    known: Vec<LayerId>,
    /// Missing results at the env's current layer.
    of_head: Option<BTreeSet<StepKey>>,
}

impl Results<'_> {
    /// Returns the keys of steps whose results must be restored for an env at this layer. A layer below the current one
    /// does not undo the results of later steps.
    fn missing(&mut self, layer: &LayerId) -> Result<BTreeSet<StepKey>> {
        let Some(head) = self.head.first().filter(|_| self.head.contains(layer)) else {
            return self.of(layer);
        };
        if self.of_head.is_none() {
            self.of_head = Some(self.of(head)?);
        }
        Ok(self.of_head.clone().unwrap_or_default())
    }

    fn of(&self, top: &LayerId) -> Result<BTreeSet<StepKey>> {
        // A missing lower layer is reported where it is needed.
        if outputs(self.spec).next().is_none() || self.store.chain(top).is_err() {
            return Ok(BTreeSet::new());
        }
        let plan = self.store.plan_restore(top, self.spec, &self.known)?;
        let mut keys = BTreeSet::new();
        for id in plan.layers() {
            keys.extend(self.store.layer(&id)?.and_then(|layer| layer.key));
        }
        Ok(keys)
    }
}

/// Returns why a layer's tree is not available to the env, if it is not.
fn elsewhere(layer: &Layer, service: Option<&Service>) -> Result<Option<String>> {
    Ok(match (&layer.kept, service) {
        (None, None) => None,
        (Some(kept), Some(service)) if kept.socket == service.socket => {
            match service.image(&kept.image)? {
                Some(_) => None,
                None => Some(format!(
                    "its image was deleted from {} outside rockenv",
                    service.flavour
                )),
            }
        }
        _ => Some("its snapshot was made by another engine".to_owned()),
    })
}

/// Returns why this env cannot use a layer, if it cannot.
fn unusable(
    store: &Store,
    layer: &Layer,
    writers: Option<&VolumeWriters<'_>>,
    spec: &Spec,
    step: &str,
) -> Option<String> {
    if !store.is_sound(layer) {
        return Some("its snapshot was not safely on disk when the machine stopped".to_owned());
    }
    let sees = |name: &str| {
        spec.step(step)
            .is_none_or(|step| step.volumes.iter().any(|volume| volume == name))
    };
    let own = writers.map(|writers| &writers.record.head.volumes);
    layer.volumes.iter().find_map(|(name, state)| {
        let is_own = match state {
            VolumeState::Live(id) => own.and_then(|own| own.get(name)) == Some(id),
            VolumeState::Absent => false,
            VolumeState::Frozen | VolumeState::Empty => return None,
        };
        if !sees(name) {
            None
        } else if !is_own {
            Some(format!(
                "its build volume `{name}` is not part of it: this is an overlay store"
            ))
        } else if writers.is_some_and(|writers| !writers.kept(store, layer)) {
            Some(format!(
                "build volume `{name}` has changed since: this is an overlay store"
            ))
        } else {
            None
        }
    })
}

/// Observes the wanted steps, and plans what to do.
pub(crate) fn plan_for(
    store: &Store,
    env: Option<&LockedEnv<'_>>,
    gathered: &Gathered<'_>,
    spec: &Spec,
    options: &StepOptions,
) -> Result<(Observed, Plan)> {
    let selection = gathered.selection;
    let wanted = wanted(&selection.profile, spec);
    let record = match env {
        Some(env) => env.record().cloned(),
        None => store.record(&spec.name)?,
    };
    let search = LayerSearch {
        record: record.as_ref(),
        reuse: selection.reuse,
        service: selection.choice.service.as_deref(),
        clean: options.clean,
    };
    let observed = observe(
        store,
        env,
        spec,
        &wanted,
        gathered.inputs.image.key(),
        &search,
    )?;
    let plan = decide(&wanted, &observed, options);
    Ok((observed, plan))
}

#[cfg(test)]
mod tests;
