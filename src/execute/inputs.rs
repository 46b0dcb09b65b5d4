//! Owns noticing that sources are no longer what the keys of steps say: a step of this run fetched or made something in one, or
//! somebody edits while it is built.

use std::collections::BTreeSet;

use super::Execution;
use crate::plan::Action;
use crate::plan::resolve::Step;
use crate::profile;
use crate::store::source::Git;
use crate::sys::error::{Error, Result};
use crate::sys::signals::Cancel;
use crate::ui::event::Event;

impl Execution<'_, '_> {
    /// Returns whether a source became another, so that the keys from `step` on are to be computed anew before it runs.
    ///
    /// Where a step before it has the source as well, its key would become another too, and what was just built would be built
    /// again: then the run goes on, and says so at its end. What is locked stays as it is.
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

    /// Says at the end which step the next `up` will run again, because its sources are no longer what it began with.
    pub(super) fn say_stale(&self) -> Result<()> {
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
                self.reporter.emit(&Event::Warning { message });
                break;
            }
        }
        Ok(())
    }

    /// Returns those of the inputs whose fingerprint is another than the one in the keys.
    pub fn changed<'a>(
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

    /// Returns the fingerprint of a source, or of a path in one, as it is now.
    pub(super) fn print_now(&self, input: &str) -> Result<String> {
        let (volume, path) = profile::input(input);
        let source = self.sources.get(volume).ok_or_else(|| {
            Error::unexpected(format!(
                "source `{volume}` is an input, but no directory provides it"
            ))
        })?;
        let cancel = Cancel::new(self.signals);
        let git = Git {
            user: &self.spec.user,
            cancel: cancel.flag(),
            tick: &|| cancel.look(),
        };
        cancel.outcome(match path {
            "" => git.remembered_fingerprint(source, &self.store.known_fingerprint(source)),
            path => git.fingerprint_of(&source.join(path)),
        })
    }
}
