//! Owns detecting that sources no longer match the keys of steps: a step of this run wrote to a source, or a user
//! edited it during the build.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use jiff::Timestamp;

use super::Execution;
use crate::plan::Action;
use crate::plan::resolve::{Access, Step, VolumeSource};
use crate::profile;
use crate::store::source::{self, Git};
use crate::sys::error::{Kind, Result};
use crate::sys::name::StepName;
use crate::sys::signals::Cancel;

/// A step of this run that was built from other sources than its key states, or whose results may not be its own.
#[derive(Debug)]
pub(crate) struct StaleStep {
    step: StepName,
    /// The source, or the result.
    input: String,
}

/// The fingerprints of a step's inputs when it begins.
pub(super) type InputsBefore = BTreeMap<String, String>;

impl Execution<'_, '_> {
    /// Returns whether a source changed, so that the keys from `step` on must be recomputed before it runs.
    ///
    /// If an earlier step has the source as well, its key would change too, and this run's work would be repeated. In
    /// that case the run continues, and warns at its end. Locked inputs must not change: a changed directory of the
    /// user is refused. Before the first step, the next attempt compares all sources with the lock file instead: steps
    /// of another env may have fetched into a checkout of the store.
    pub(super) fn is_stale_before(&self, step: &Step, has_run: bool) -> Result<bool> {
        if has_run && self.locked.is_some() {
            let own = step.inputs.iter().filter(|input| self.is_users_own(input));
            return match self.changed(own)?.first() {
                Some(input) => Err(drift!(
                    "`{input}` changed before step `{}` began, and differs from the lock file",
                    step.name
                )
                .help(format!(
                    "undo the change, then: {}",
                    self.env.known_record()?.up_command()
                ))),
                None => Ok(false),
            };
        }
        if self.changed(&step.inputs)?.is_empty() {
            return Ok(false);
        }
        let before: BTreeSet<&String> = self
            .spec
            .steps
            .iter()
            .take_while(|earlier| has_run && earlier.name != step.name)
            .flat_map(|earlier| &earlier.inputs)
            .collect();
        Ok(self.changed(before)?.is_empty())
    }

    /// Warns about inputs of a step that their sources lack: no change of the intended file would run the step again. An
    /// earlier step may have made an input that the key counts as missing.
    pub(super) fn warn_absent_inputs(&self, step: &Step) -> Result<()> {
        for input in &step.inputs {
            let known = self.spec.fingerprints.get(input);
            if known.is_some_and(|print| source::is_absent(print))
                && source::is_absent(&self.print_now(input)?)
            {
                self.reporter.warn(format!(
                    "step `{}`: input `{input}` does not exist in the source: check its name, \
                     because other files do not run the step again",
                    step.name
                ));
            }
        }
        Ok(())
    }

    fn is_users_own(&self, input: &str) -> bool {
        let volume = self.spec.volume(profile::input(input).0);
        volume.is_some_and(|volume| matches!(volume.source, VolumeSource::Path(_)))
    }

    /// Returns the fingerprints of a step's inputs if a lock file fixes them: an earlier step may have changed them.
    pub(super) fn inputs_before(&self, step: &Step) -> Result<InputsBefore> {
        let inputs = step.inputs.iter().filter(|_| self.locked.is_some());
        let before = inputs.map(|input| Ok((input.clone(), self.print_now(input)?)));
        before.collect()
    }

    /// Returns an input of a step that has just ended whose fingerprint differs from the one in the step's key, if any.
    /// With a lock file, returns an input that changed while the step ran.
    pub(super) fn changed_while(
        &self,
        step: &Step,
        before: &InputsBefore,
    ) -> Result<Option<String>> {
        for input in &step.inputs {
            let expected = before
                .get(input)
                .or_else(|| self.spec.fingerprints.get(input));
            let is_changed = match self.print_now(input) {
                Ok(print) => expected != Some(&print),
                Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
                // The source, or a file of it, was removed.
                Err(_) => true,
            };
            if is_changed {
                return Ok(Some(input.clone()));
            }
        }
        Ok(None)
    }

    /// Returns a source of the user that another process wrote to while a step ran, if any. The source is as before,
    /// but the step may have read other content.
    pub(super) fn touched_while(&self, step: &Step, began: Timestamp) -> Result<Option<String>> {
        let cancel = Cancel::new(self.signals);
        let git = Git::until(&self.spec.user, &cancel);
        for input in step.inputs.iter().filter(|input| self.is_users_own(input)) {
            let (name, path) = profile::input(input);
            let volume = self.spec.volume(name);
            let steps_write = volume.is_some_and(|volume| volume.access == Access::Rw);
            if let Some(source) = self.sources.get(name) {
                let place = match path {
                    "" => source.clone(),
                    path => source.join(path),
                };
                let known = self.store.known_fingerprint(&place);
                let touched = git.is_touched(source, &place, &known, began.into(), steps_write);
                match cancel.outcome(touched) {
                    Ok(false) => {}
                    Err(error) if matches!(error.kind(), Kind::Signal(_)) => return Err(error),
                    // As in `changed_while`.
                    Ok(true) | Err(_) => return Ok(Some(input.clone())),
                }
            }
        }
        Ok(None)
    }

    /// Marks a step that was built from other sources, or whose results another program changed: neither it nor the
    /// steps based on it are results of their keys.
    pub(super) fn mark_stale(&mut self, step: &Step, input: String) -> Result<()> {
        let step = step.name.clone();
        self.stale.get_or_insert(StaleStep { step, input });
        self.mark_stale_views()
    }

    /// Warns at the end which step the next `up` will run again, because its sources changed after it began.
    pub(super) fn warn_stale(&self) -> Result<()> {
        if let Some(stale) = &self.stale {
            self.warn_again(&stale.step, &stale.input);
            return Ok(());
        }
        let steps = self.plan.steps.iter();
        let built = steps.filter(|step| matches!(step.action, Action::Hit | Action::Run));
        for step in built.filter_map(|planned| self.spec.step(&planned.name)) {
            if let Some(input) = self.changed_while(step, &InputsBefore::new())? {
                self.warn_again(&step.name, &input);
                break;
            }
        }
        Ok(())
    }

    fn warn_again(&self, step: &str, input: &str) {
        self.reporter.warn(format!(
            "`{input}` changed after step `{step}` began: the next `up` builds again from there"
        ));
    }

    /// Returns the inputs whose fingerprint differs from their fingerprint in the keys.
    pub(crate) fn changed<'a>(
        &self,
        inputs: impl IntoIterator<Item = &'a String>,
    ) -> Result<Vec<&'a str>> {
        let mut changed = Vec::new();
        for input in inputs {
            if self.spec.fingerprints.get(input) != Some(&self.print_now(input)?) {
                changed.push(input.as_str());
            }
        }
        Ok(changed)
    }

    /// Returns the current fingerprint of a source, or of a path in one.
    pub(super) fn print_now(&self, input: &str) -> Result<String> {
        let (volume, path) = profile::input(input);
        let source = self.sources.get(volume).ok_or_else(|| {
            unexpected!("source `{volume}` is an input, but no directory provides it")
        })?;
        let cancel = Cancel::new(self.signals);
        let git = Git::until(&self.spec.user, &cancel);
        cancel.outcome(match path {
            "" => git.remembered_fingerprint(source, &self.store.known_fingerprint(source)),
            path => {
                let known = self.store.known_fingerprint(&source.join(path));
                git.fingerprint_of(source, Path::new(path), Some(&known))
            }
        })
    }
}
