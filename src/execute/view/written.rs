//! Owns deciding whether the files that steps wrote to a view are those of a clean build: written by the steps below,
//! and by no other build and no command of `exec` or `shell`.

use std::path::Path;

use fs_err as fs;

use super::ViewedStep;
use super::manual_edits::{BEHIND, COMMANDS, changed_at, entries};
use super::stack::{Stack, Written};
use crate::execute::Execution;
use crate::plan::ids::LayerId;
use crate::sys::error::{Result, if_exists};
use crate::tree::overlay;

impl Execution<'_, '_> {
    /// Records that a step begins on a view. Returns `None` if the files in it are those of a clean build, or else
    /// whether a command of `exec` or `shell` may have changed some.
    pub(super) fn begin_on_view(
        &self,
        viewed: &ViewedStep<'_>,
        directory: &Path,
        stack: &mut Stack,
    ) -> Result<Option<bool>> {
        let (parent, key) = (viewed.parent.map_or("", LayerId::as_str), &viewed.step.key);
        let is_copy = self.env.known_record()?.service.is_some();
        let commands = if_exists(fs::read_to_string(directory.join(COMMANDS)))?;
        let commands = commands.unwrap_or_default();
        // With `--clean`: the step that has not ended may have begun on other sources.
        let mut is_dropped = self.clean && stack.written.begun.is_some();
        if !is_dropped && is_written(stack, directory, is_copy)? {
            let by_hand = is_changed_by_hand(stack, directory, &commands)?;
            if by_hand || !stack.written.is_before(parent, key) {
                if !self.clean {
                    return Ok(Some(by_hand));
                }
                is_dropped = true;
            }
        }
        if is_dropped {
            stack.layers.clear();
            stack.upper = None;
        }
        stack.written = Written {
            from: Some(parent.to_owned()),
            begun: Some(key.clone()),
            commands: commands.lines().count(),
            copied: stack.written.copied,
        };
        Ok(None)
    }

    /// Records that a step on `parent` became a layer, to which the content of the views now belongs.
    pub(in crate::execute) fn end_on_views(
        &self,
        parent: Option<&LayerId>,
        layer: &LayerId,
    ) -> Result<()> {
        let parent = parent.map_or("", LayerId::as_str);
        self.change_stacks(|stack| {
            if stack.written.from.as_deref() == Some(parent) {
                stack.written.from = Some(layer.as_str().to_owned());
                stack.written.begun = None;
            }
        })
    }

    /// Lets the next command make the views anew.
    pub(in crate::execute) fn mark_stale_views(&self) -> Result<()> {
        self.change_stacks(|stack| stack.is_stale = true)
    }

    fn change_stacks(&self, change: impl Fn(&mut Stack)) -> Result<()> {
        for directory in entries(&self.env.directory().join("views"))? {
            let Some(stack) = Stack::read(&directory)? else {
                continue;
            };
            let mut changed = stack.clone();
            change(&mut changed);
            if changed != stack {
                changed.write(&directory)?;
            }
        }
        Ok(())
    }
}

/// Returns whether steps may have written to a view.
pub(super) fn is_written(stack: &Stack, directory: &Path, is_copy: bool) -> Result<bool> {
    match &stack.upper {
        _ if stack.layers.iter().any(|layer| layer.hook.is_none()) => Ok(true),
        Some(upper) if is_copy => match stack.written.copied {
            Some(made) => is_changed_since(&directory.join(upper), i128::from(made) + 1),
            None => Ok(true),
        },
        Some(upper) => Ok(!overlay::is_clean(&directory.join(upper))?),
        None => Ok(false),
    }
}

/// Returns whether a file in the upper directory changed after the start of a command that no step has seen.
fn is_changed_by_hand(stack: &Stack, directory: &Path, commands: &str) -> Result<bool> {
    let lines = commands.lines().skip(stack.written.commands);
    let times = lines.filter_map(|line| line.split(' ').next()?.parse::<i128>().ok());
    match (times.min(), &stack.upper) {
        (Some(began), Some(upper)) => is_changed_since(&directory.join(upper), began - BEHIND),
        _ => Ok(false),
    }
}

fn is_changed_since(directory: &Path, time: i128) -> Result<bool> {
    let mut left = vec![directory.to_owned()];
    while let Some(path) = left.pop() {
        let found = fs::symlink_metadata(&path)?;
        if changed_at(&found) >= time {
            return Ok(true);
        }
        if found.is_dir() {
            for entry in fs::read_dir(&path)? {
                left.push(entry?.path());
            }
        }
    }
    Ok(false)
}
