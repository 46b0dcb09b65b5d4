//! Owns the outputs of a step beside its snapshot: fingerprints for the keys of later steps, and files that it
//! fetched, some of them into caches. With a lock file, all must match it.

use super::{Execution, container};
use crate::plan::lockfile;
use crate::plan::pins::{self, Pins};
use crate::plan::resolve::Step;
use crate::rocm::therock::{ArtifactFingerprints, Checkout};
use crate::sys::error::Result;

#[derive(Debug, Default)]
pub(super) struct StepOutputs {
    pub(super) prints: Option<ArtifactFingerprints>,
    pub(super) pins: Pins,
    /// Differences from the lock file.
    pub(super) drift: Vec<String>,
}

impl StepOutputs {
    /// Explains why its step failed.
    pub(super) fn explain(&self, step: &Step) -> String {
        format!(
            "output of step `{}` differs from the lock file: {}",
            step.name,
            lockfile::some(&self.drift)
        )
    }
}

impl Execution<'_, '_> {
    /// Provides a step with the locked files that it would otherwise fetch.
    pub(super) fn provide_locked_files(&self, step: &Step) -> Result<()> {
        let directory = self.env.run_dir().join(pins::NAME);
        container::discard(self.store, &directory)?;
        let locked = self.locked.and_then(|lock| lock.step(&step.name));
        let locked = locked.map(|locked| &locked.pins);
        pins::write(&directory, locked.filter(|pins| !pins.is_empty()))
    }

    pub(super) fn step_outputs(&self, step: &Step) -> Result<StepOutputs> {
        let directory = self.env.run_dir().join(pins::NAME);
        let (prints, pins) = (self.prints(step)?, pins::read(&directory, &step.name)?);
        container::discard(self.store, &directory)?;
        let locked = self.locked.and_then(|lock| lock.step(&step.name));
        let mut drift = locked.map_or_else(Vec::new, |locked| {
            lockfile::left(locked, prints.as_ref(), &pins)
        });
        if let Some(lock) = self.locked {
            let sees = |cache: &str| self.spec.visible(step).any(|volume| volume.name == cache);
            drift.extend(self.store.other_cache_files(lock, &sees)?);
        }
        Ok(StepOutputs {
            prints,
            pins,
            drift,
        })
    }

    /// Reads the fingerprints that a step has left for the keys of later steps.
    fn prints(&self, step: &Step) -> Result<Option<ArtifactFingerprints>> {
        let Some(at) = &step.fingerprints else {
            return Ok(None);
        };
        let volumes = &self.env.known_record()?.head.volumes;
        let Some(id) = volumes.get(&at.volume) else {
            return Ok(None);
        };
        let source = step.inputs.iter().find_map(|name| {
            let source = self.sources.get(name)?;
            Checkout::is_one(source).then_some(source.as_path())
        });
        let read = ArtifactFingerprints::read(&self.store.volume_dir(id).join(&at.path), source);
        Ok(Some(read.unwrap_or_else(|error| {
            let message = format!(
                "step `{}` left no fingerprints of TheRock ({}); using the source's",
                step.name,
                error.chain().join(": ")
            );
            self.reporter.warn(message);
            ArtifactFingerprints::none()
        })))
    }
}
