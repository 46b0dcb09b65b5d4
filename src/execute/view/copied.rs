//! Owns views for services: a service mounts by itself, in a namespace that rockenv is not in, and is handed a copy of the
//! source that belongs to the env. Blocks are shared where the file system of the store can.
//!
//! The copy that steps write to is the stack's upper. Before later hooks are applied it is frozen, and they are applied to
//! a copy of it, so that what steps wrote before them can be gone back to. A copy is in the stack only when all is in it.

use std::path::Path;

use super::script::Look;
use super::stack::{Layer, Stack};
use super::{Shown, Sight, change, stack_file};
use crate::execute::Execution;
use crate::plan::resolve;
use crate::sys::atomic::{self, random_id};
use crate::sys::error::Result;
use crate::tree;
use crate::ui::event::Event;

impl Execution<'_, '_> {
    /// Brings the copy to the hooks that a step is to see, of which the stack has the first `there`.
    pub(super) fn copied(
        &mut self,
        sight: &Sight<'_>,
        directory: &Path,
        stack: &mut Stack,
        source: &Path,
        hooks: &[&resolve::Hook],
        mut there: usize,
    ) -> Result<Shown> {
        if let (Some(upper), true) = (&stack.upper, there == hooks.len()) {
            self.collect(directory, stack)?;
            return Ok(Shown::Copy(directory.join(upper)));
        }
        let from = match (stack.upper.take(), stack.layers.last_mut()) {
            (Some(upper), Some(last)) => {
                last.id.clone_from(&upper);
                directory.join(upper)
            }
            (None, Some(last)) if !last.id.is_empty() => directory.join(&last.id),
            // Between hooks of one step there is no copy: no step saw the first without the second.
            _ => {
                stack.layers.clear();
                there = 0;
                source.to_owned()
            }
        };
        atomic::write_json(&stack_file(directory), stack)?;
        self.collect(directory, stack)?;
        let id = random_id()?;
        let copy = directory.join(&id);
        let made = tree::copy_tree(&from, &copy)?;
        if made.copied_bytes > 0 {
            self.reporter.emit(&Event::Warning {
                message: format!(
                    "{} of `{}` copied for the hooks: with systemd-nspawn, or where files can share blocks, nothing is",
                    crate::ui::size::bytes(made.copied_bytes),
                    source.display()
                ),
            });
        }
        for wanted in &hooks[there..] {
            let hook = self.hook(wanted)?;
            let made = change(&copy, hook, &mut stack.times)?;
            self.tell(hook, &made);
            if let Some(script) = &hook.work.script {
                let before = Look::at(&copy)?;
                self.script(sight, hook, script, Shown::Copy(copy.clone()))?;
                let changed = before.differences(&Look::at(&copy)?);
                script.check(hook, &made, changed, &copy)?;
            }
            stack.layers.push(Layer {
                id: String::new(),
                hook: Some(wanted.digest.clone()),
            });
        }
        if let Some(last) = stack.layers.last_mut()
            && last.id.is_empty()
        {
            last.id.clone_from(&id);
        }
        stack.upper = Some(id);
        atomic::write_json(&stack_file(directory), stack)?;
        self.collect(directory, stack)?;
        Ok(Shown::Copy(copy))
    }
}
