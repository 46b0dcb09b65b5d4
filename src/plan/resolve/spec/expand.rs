//! Owns expanding the texts of a profile: limits their length, and blames the profile or the command line for refusals.

use std::collections::BTreeMap;

use super::Resolver;
use crate::profile::Problem;
use crate::profile::references::Fault;
use crate::profile::value::Refused;
use crate::sys::error::Result;
use crate::sys::span::At;

/// Maximum length of all expanded texts together, in bytes, so that a small file cannot exhaust memory.
const LONGEST_TOGETHER: usize = 64 << 20;

impl Resolver<'_> {
    /// Returns the final text. The result is validated again, because a parameter may have changed its meaning.
    pub(super) fn text(
        &mut self,
        text: &At<String>,
        meaning: impl Fn(&str) -> std::result::Result<(), Refused>,
    ) -> Option<String> {
        let expanded = self.scope.expand(text);
        let expanded = self.expanded(text, expanded)?;
        match meaning(&expanded) {
            Ok(()) => Some(expanded),
            Err(refused) => {
                self.refuse(text, refused);
                None
            }
        }
    }

    pub(super) fn late(&mut self, text: &At<String>, beside: usize) -> Option<String> {
        let expanded = self.scope.expand_for_runtime(text, beside);
        self.expanded(text, expanded)
    }

    /// Returns an expanded text, unless it has a fault or the total is too long.
    fn expanded(
        &mut self,
        text: &At<String>,
        expanded: std::result::Result<String, Fault>,
    ) -> Option<String> {
        match expanded {
            Ok(expanded) => {
                self.length += expanded.len();
                self.is_short().then_some(expanded)
            }
            Err(fault) => {
                let problem = fault.problem(&text.place, &self.profile.sources);
                self.problems.push(problem);
                None
            }
        }
    }

    /// Returns whether all expanded texts together are within the limit.
    pub(super) fn is_short(&self) -> bool {
        self.length <= LONGEST_TOGETHER
    }

    pub(super) fn late_env(
        &mut self,
        env: &BTreeMap<String, At<String>>,
    ) -> BTreeMap<String, String> {
        env.iter()
            .filter_map(|(name, value)| {
                let value = self.late(value, name.len() + "=".len())?;
                Some((name.clone(), value))
            })
            .collect()
    }

    /// Refuses an expanded text. Blames the command line if it set one of the text's parameters.
    fn refuse(&mut self, text: &At<String>, refused: Refused) {
        let Some(param) = self.chosen.asked_in(text) else {
            let problem = Problem::refused(&text.place, refused, "after expansion");
            self.problems.push(problem);
            return;
        };
        let line = self.profile.sources.line(&text.place);
        let error = usage!(
            "parameter `{param}` is not valid in {line}: {}",
            refused.message
        );
        self.usage.get_or_insert(error.help_if(refused.help));
    }

    /// Refuses texts that are too long together, and returns the first refusal of the command line.
    pub(super) fn refused(&mut self) -> Result<()> {
        if !self.is_short() {
            let message = "the expanded texts of all steps are longer than 64 MiB";
            let problem = Problem::new(&(0..0), message, "in this file or one it extends");
            self.problems
                .push(problem.help("shorter variables, or fewer steps"));
        }
        self.usage.take().map_or(Ok(()), Err)
    }
}
