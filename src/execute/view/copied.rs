//! Owns views for services. A service mounts in its own namespace, out of rockenv's reach, so it gets a copy of the
//! source that belongs to the env. The copy shares blocks if the store's file system supports that.
//!
//! The copy that steps write to is the stack's upper. Before later hooks apply, it is frozen, and the hooks apply to a
//! copy of it, so that steps' earlier writes can be restored. A copy enters the stack only once it is complete.

use std::path::Path;

use jiff::Timestamp;

use super::script::{differences, identities};
use super::stack::{Stack, StackLayer};
use super::written::is_written;
use super::{PatchedSource, ViewedStep, change, forget_times, renew};
use crate::execute::Execution;
use crate::plan::ids::ViewLayerId;
use crate::plan::resolve;
use crate::sys::atomic::random_id;
use crate::sys::error::Result;
use crate::tree;

impl Execution<'_, '_> {
    /// Brings the copy up to the hooks that a step must see; the stack has the first of them.
    pub(super) fn copied(
        &mut self,
        viewed: &ViewedStep<'_>,
        directory: &Path,
        stack: &mut Stack,
        source: &Path,
        hooks: &[&resolve::Hook],
    ) -> Result<PatchedSource> {
        let mut there = stack.hooks();
        if let (Some(upper), true) = (&stack.upper, there == hooks.len()) {
            self.collect(directory, stack)?;
            return Ok(PatchedSource::Copy(directory.join(upper)));
        }
        // The stack is all that a later command knows if this one is killed during the copy.
        let is_written = is_written(stack, directory, true)?;
        let from = match stack.freeze_copy(is_written) {
            Some(id) => directory.join(id),
            // Between hooks of one step there is no copy: no step saw the first without the second.
            None => {
                stack.layers.clear();
                there = 0;
                source.to_owned()
            }
        };
        stack.write(directory)?;
        self.collect(directory, stack)?;
        let id: ViewLayerId = random_id()?.try_into()?;
        let copy = directory.join(&id);
        let copied = tree::copy_tree(&from, &copy)?;
        if copied > 0 {
            self.reporter.warn(format!(
                    "copied {} of `{}` for hooks; systemd-nspawn, or a file system with shared blocks, avoids the copy",
                    crate::ui::size::bytes(copied),
                    source.display()
                ));
        }
        let known = stack.times.clone();
        for wanted in &hooks[there..] {
            let hook = self.hook(wanted)?;
            let made = change(&copy, hook, &known, &mut stack.times)?;
            self.tell(hook, &made);
            if let Some(script) = &hook.work.script {
                let before = identities(&copy)?;
                self.script(viewed, hook, script, PatchedSource::Copy(copy.clone()))?;
                let changed = differences(&before, &identities(&copy)?);
                script.check(hook, &made, changed, &copy)?;
                script.keep_times(&copy, &known, &mut stack.times)?;
            }
            stack.layers.push(StackLayer {
                id: None,
                hook: Some(wanted.digest.clone()),
            });
        }
        if let Some(last) = stack.layers.last_mut() {
            last.id.get_or_insert_with(|| id.clone());
        }
        stack.upper = Some(id);
        let settled = self.settled(&known, &viewed.volume.name, hooks)?;
        renew(&copy, &settled, &mut stack.times)?;
        if self.has_all(&viewed.volume.name, stack.hooks()) {
            forget_times(directory, stack);
        }
        // Files that steps write from now on have later change times.
        stack.written.copied = i64::try_from(Timestamp::now().as_nanosecond()).ok();
        stack.write(directory)?;
        self.collect(directory, stack)?;
        Ok(PatchedSource::Copy(copy))
    }
}
