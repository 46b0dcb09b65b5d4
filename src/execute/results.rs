//! Owns results in output volumes during execution. Results of steps that ran are kept with their snapshots. Results
//! of steps that need not run are put into the env's output, where later steps and people look for them.

use std::collections::BTreeMap;

use super::Execution;
use crate::plan::Action;
use crate::plan::ids::{LayerId, TreeId};
use crate::plan::resolve::{Step, VolumeSource};
use crate::profile::Access;
use crate::store::results::{self, StepResults};
use crate::sys::error::{Error, Kind, Result};
use crate::tree::listing::Listing;

/// The content of a step's output volumes before it ran, by name.
pub(super) type Before = Vec<(String, Listing)>;

impl Execution<'_, '_> {
    /// Lists the output volumes that a step can write to.
    pub(super) fn outputs_before(&self, step: &Step) -> Result<Before> {
        let volumes = results::outputs(self.spec);
        let written = volumes
            .filter(|volume| volume.access != Access::Ro && step.volumes.contains(&volume.name));
        written
            .map(|volume| {
                let directory = self.store.output_dir(self.spec, volume)?;
                Ok((volume.name.clone(), Listing::of(&directory)?))
            })
            .collect()
    }

    /// Refuses files in them that no snapshot can hold.
    pub(super) fn refuse_special(&self, before: &Before) -> Result<()> {
        for (name, before) in before {
            if let Some(volume) = self.spec.volume(name) {
                let directory = self.store.output_dir(self.spec, volume)?;
                results::refuse_special(before, &directory)?;
            }
        }
        Ok(())
    }

    /// Keeps the step's results with the tree that becomes its snapshot; `parent` is the layer below.
    pub(super) fn keep_results(
        &self,
        before: &Before,
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
        for (name, before) in before {
            let Some(volume) = self.spec.volume(name) else {
                continue;
            };
            let directory = self.store.output_dir(self.spec, volume)?;
            let earlier = earlier.get(name).map(|results| &results.listing);
            let earlier = earlier.cloned().unwrap_or_default();
            left.keep(&kept, name, &directory, before, &earlier)?;
        }
        left.write(&kept)
    }

    /// Restores the results of steps that do not run. Changed files stay, but no later step may use them as results.
    pub(super) fn restore_results(&self) -> Result<()> {
        let runs = || {
            let steps = self.plan.steps.iter();
            let runs = steps.filter(|step| step.action == Action::Run);
            runs.filter_map(|step| self.spec.step(&step.name))
        };
        let record = self.env.known_record()?;
        let stays = !self.plan.moves && runs().next().is_none();
        let top = match stays {
            true => &record.head.layer,
            false => &self.plan.start,
        };
        let Some(top) = top else {
            return Ok(());
        };
        if stays && self.plan.brings.is_empty() {
            return Ok(());
        }
        // The writes of a failed step cannot be told from anybody else's.
        let attempt = self.store.attempt(self.env.name(), record);
        let resumes = attempt.is_some_and(|key| runs().any(|step| step.key == key));
        let layers = record.snapshots.iter();
        let known: Vec<LayerId> = layers.map(|snapshot| snapshot.layer.clone()).collect();
        let plan = self.store.plan_restore(top, self.spec, &known)?;
        for other in &plan.blocked {
            let message = format!(
                "`{}` in output volume `{}` was changed after step `{}` wrote it",
                other.path.display(),
                other.volume,
                other.step
            );
            let volume = self.spec.volume(&other.volume);
            // Several envs may share a user's directory as output.
            let own = volume.is_some_and(|volume| volume.source == VolumeSource::Store);
            let mut readers = runs().filter(|step| step.volumes.contains(&other.volume));
            match readers.next().filter(|_| own && !resumes) {
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
        self.store.restore_results(plan, self.spec)
    }
}
