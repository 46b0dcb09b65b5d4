//! Owns detecting that sources no longer match the keys of steps: a step of this run wrote to one, or somebody edited
//! one during the build.

use std::collections::BTreeSet;

use super::Execution;
use crate::plan::Action;
use crate::plan::resolve::Step;
use crate::profile;
use crate::store::source::Git;
use crate::sys::error::Result;
use crate::sys::signals::Cancel;

impl Execution<'_, '_> {
    /// Returns whether a source changed, so that the keys from `step` on must be computed anew before it runs.
    ///
    /// If an earlier step has the source as well, its key would change too, and what was just built would be built
    /// again. In that case the run continues, and warns at its end. Locked inputs stay as they are.
    pub(super) fn is_stale_before(&self, step: &Step) -> Result<bool> {
        if self.locked.is_some() || self.changed(&step.inputs)?.is_empty() {
            return Ok(false);
        }
        let before: BTreeSet<&String> = self
            .spec
            .steps
            .iter()
            .take_while(|earlier| earlier.name != step.name)
            .flat_map(|earlier| &earlier.inputs)
            .collect();
        Ok(self.changed(before)?.is_empty())
    }

    /// Warns at the end which step the next `up` will run again, because its sources changed after it began.
    pub(super) fn warn_stale(&self) -> Result<()> {
        for planned in &self.plan.steps {
            let Some(step) = self.spec.step(&planned.name) else {
                continue;
            };
            if !matches!(planned.action, Action::Hit | Action::Run) {
                continue;
            }
            if let Some(input) = self.changed(&step.inputs)?.first() {
                let message = format!(
                    "`{input}` changed after step `{}` began: the next `up` builds again from there",
                    step.name
                );
                self.reporter.warn(message);
                break;
            }
        }
        Ok(())
    }

    /// Returns the inputs whose fingerprint differs from the one in the keys.
    pub(crate) fn changed<'a>(
        &self,
        inputs: impl IntoIterator<Item = &'a String>,
    ) -> Result<Vec<&'a str>> {
        let mut changed = Vec::new();
        for input in inputs {
            if self.fingerprints.get(input) != Some(&self.print_now(input)?) {
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
            path => git.fingerprint_of(&source.join(path)),
        })
    }
}
