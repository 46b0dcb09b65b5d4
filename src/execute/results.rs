//! Owns results in output volumes during execution. Results of steps that ran are kept with their snapshots. Results
//! of steps that need not run are put into the env's output, where later steps and people look for them.

use std::collections::{BTreeMap, BTreeSet};

use super::Execution;
use crate::plan::Action;
use crate::plan::ids::{LayerId, TreeId};
use crate::plan::resolve::{Step, VolumeSource};
use crate::profile::Access;
use crate::store::results::{self, OutputBefore, RestorePlan, StepResults};
use crate::sys::error::{Error, Kind, Result};
use crate::tree::listing::Listing;

impl Execution<'_, '_> {
    /// Lists the output volumes that a step can write to, without what its unfinished runs left there.
    pub(super) fn outputs_before(&self, step: &Step) -> Result<Vec<OutputBefore>> {
        let volumes = results::outputs(self.spec);
        let written = volumes
            .filter(|volume| volume.access != Access::Ro && step.volumes.contains(&volume.name));
        let before = written.map(|volume| {
            let directory = self.store.output_dir(self.spec, volume)?;
            Ok(OutputBefore {
                volume: volume.name.clone(),
                in_store: volume.source == VolumeSource::Store,
                listing: Listing::of(&directory)?,
                unsure: BTreeSet::new(),
            })
        });
        let mut before = before.collect::<Result<Vec<_>>>()?;
        self.env.begin_outputs(&step.key, self.spec, &mut before)?;
        Ok(before)
    }

    /// Refuses files in them that no snapshot can hold.
    pub(super) fn refuse_special(&self, before: &[OutputBefore]) -> Result<()> {
        for before in before {
            if let Some(volume) = self.spec.volume(&before.volume) {
                let directory = self.store.output_dir(self.spec, volume)?;
                results::refuse_special(&before.listing, &directory)?;
            }
        }
        Ok(())
    }

    /// Records what a step that did not end well left in them: if it is resumed, those are its results too.
    pub(super) fn leave_results(&self, step: &Step, before: &[OutputBefore]) -> Result<()> {
        let mut left = Vec::new();
        for before in before {
            if let Some(volume) = self.spec.volume(&before.volume) {
                let directory = self.store.output_dir(self.spec, volume)?;
                left.push((before, Listing::of(&directory)?.since(&before.listing)));
            }
        }
        self.env.leave_outputs(&step.key, left)
    }

    /// Returns whether a step sees other files in the place of results that it is based on: those of another env with
    /// the same directory, or changed ones. What its own earlier runs left is its own.
    pub(super) fn sees_other_files(
        &self,
        step: &Step,
        before: &[OutputBefore],
        parent: Option<&LayerId>,
    ) -> Result<bool> {
        let mut outputs = results::outputs(self.spec);
        let Some(parent) = parent else {
            return Ok(false);
        };
        if !outputs.any(|volume| step.volumes.contains(&volume.name)) {
            return Ok(false);
        }
        let layers = self.env.known_record()?.snapshots.iter();
        let known: Vec<LayerId> = layers.map(|snapshot| snapshot.layer.clone()).collect();
        let blocked = self.store.plan_restore(parent, self.spec, &known)?.blocked;
        let mut others = blocked.iter().filter(|other| {
            let mut before = before.iter().filter(|before| before.volume == other.volume);
            before.all(|before| before.listing.entries.contains_key(&other.path))
        });
        Ok(others.any(|other| step.volumes.contains(&other.volume)))
    }

    /// Keeps the step's results with the tree that becomes its snapshot; `parent` is the layer below.
    pub(super) fn keep_results(
        &self,
        before: &[OutputBefore],
        tree: &TreeId,
        parent: Option<&LayerId>,
    ) -> Result<()> {
        let kept = self
            .env
            .directory()
            .join("trees")
            .join(tree)
            .join("results");
        self.store.discard(&kept)?;
        let earlier = match parent {
            Some(parent) if !before.is_empty() => self.store.results(parent, self.spec)?,
            _ => BTreeMap::new(),
        };
        let mut left = StepResults::default();
        for before in before {
            let name = &before.volume;
            let Some(volume) = self.spec.volume(name) else {
                continue;
            };
            let directory = self.store.output_dir(self.spec, volume)?;
            let earlier = earlier.get(name).map(|results| &results.listing);
            let earlier = earlier.cloned().unwrap_or_default();
            left.keep(&kept, &directory, before, &earlier)?;
        }
        left.write(&kept)
    }

    /// Restores the results of steps that do not run, and moves those of the env's other builds aside. Changed files stay,
    /// but no later step may use them as results.
    pub(super) fn restore_results(&self) -> Result<()> {
        let record = self.env.known_record()?;
        let stays = !self.plan.moves && self.runs().next().is_none();
        let top = match stays {
            true => record.head.layer.as_ref(),
            false => self.plan.start.as_ref(),
        };
        if stays && (top.is_none() || self.plan.brings.is_empty()) {
            return Ok(());
        }
        let layers = record.snapshots.iter();
        let known: Vec<LayerId> = layers.map(|snapshot| snapshot.layer.clone()).collect();
        // The writes of a failed step cannot be told from anybody else's.
        let attempt = self.store.attempt(self.env.name(), record);
        let is_begun = |step: &Step| attempt.as_ref() == Some(&step.key);
        if let Some(top) = top {
            let plan = self.store.plan_restore(top, self.spec, &known)?;
            self.check_blocked(&plan, self.runs().any(is_begun))?;
        }
        // A step that is resumed may count on what it has left.
        let mut runs = self.runs();
        let first = runs.next();
        if !stays && !first.is_some_and(|step| is_begun(step) || self.env.has_unfinished(&step.key))
        {
            let head = record.head.layer.iter();
            let known: Vec<LayerId> = known.iter().chain(head).cloned().collect();
            self.store.move_stale_aside(top, self.spec, &known)?;
        }
        match top {
            Some(top) => {
                let plan = self.store.plan_restore(top, self.spec, &known)?;
                self.store.restore_results(plan, self.spec)
            }
            None => Ok(()),
        }
    }

    /// Removes results of other builds that this one has made again, and names the place of the others.
    pub(super) fn drop_remade_results(&self) -> Result<()> {
        if let Some(earlier) = self.store.drop_remade(self.spec)? {
            let place = earlier.display();
            self.reporter
                .warn(format!("results of earlier builds are in `{place}`"));
        }
        Ok(())
    }

    /// Returns the steps that run.
    fn runs(&self) -> impl Iterator<Item = &Step> {
        let steps = self.plan.steps.iter();
        let runs = steps.filter(|step| step.action == Action::Run);
        runs.filter_map(|step| self.spec.step(&step.name))
    }

    /// Refuses changed files in the place of results that a step would use; warns of others.
    fn check_blocked(&self, plan: &RestorePlan, resumes: bool) -> Result<()> {
        for other in &plan.blocked {
            let message = other.message();
            let volume = self.spec.volume(&other.volume);
            // Several envs may share a user's directory as output.
            let own = volume.is_some_and(|volume| volume.source == VolumeSource::Store);
            let mut readers = self.runs();
            let reader = readers.find(|step| step.volumes.contains(&other.volume));
            match reader.filter(|_| own && !resumes) {
                Some(step) => {
                    let message =
                        format!("{message}; step `{}` would use the changed file", step.name);
                    return Err(Error::new(Kind::Drift, message).help(format!(
                        "move it away, or make it again: rockenv up ... --rerun {}",
                        other.step
                    )));
                }
                None => {
                    let message = format!("{message}; leaving it as it is");
                    self.reporter.warn(message);
                }
            }
        }
        Ok(())
    }
}
