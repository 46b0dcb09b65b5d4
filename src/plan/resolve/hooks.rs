//! Owns deciding which hooks an env gets, and from which step on.

use super::{Hook, Skipped, Step};
use crate::plan::resolve::inputs::Inputs;
use crate::profile::hook::Applies;
use crate::profile::{self, Problem, Profile, UnreadPart, VolumeKind};
use crate::rocm::target::Target;
use crate::sys::error::Result;
use crate::sys::name::StepName;
use crate::sys::span::At;

/// The facts about a hook that `resolve` needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HookFacts {
    /// Digest of its effect.
    pub digest: String,
    pub volume: String,
    /// The first step to apply it at, if it names one.
    pub from_step: Option<StepName>,
    pub applies: Applies,
    /// Why the source's revision does not need it, if known.
    pub not_now: Option<String>,
}

impl HookFacts {
    /// Returns the position of the profile's first step that sees the change; `None` if no step does.
    pub(crate) fn first_step(&self, profile: &Profile) -> Option<usize> {
        let sees = |step: &profile::Step| match &self.from_step {
            Some(name) => step.name == *name,
            None => {
                let mut volumes = step.inputs.iter().map(|name| profile::input(name).0);
                volumes.any(|volume| volume == self.volume)
            }
        };
        profile.steps.iter().position(sees)
    }
}

/// Decides which hooks apply and from which step on, and which are skipped.
pub(super) fn hooks(
    profile: &Profile,
    inputs: &Inputs,
    targets: &[Target],
    steps: &[Step],
    names: &[At<String>],
    problems: &mut Vec<Problem>,
) -> Result<(Vec<Hook>, Vec<Skipped>)> {
    let (mut hooks, mut left_out) = (Vec::new(), Vec::new());
    for At { value: name, place } in names {
        let facts = inputs
            .hooks
            .get(name)
            .ok_or_else(|| unexpected!("hook `{name}` was not loaded"))?;
        let first = match first_step(profile, facts) {
            Ok(first) => first,
            Err((message, help)) => {
                let message = format!("hook `{name}` {message}");
                let problem = Problem::new(place, message, "this one").help(help);
                problems.push(problem.unless(UnreadPart::Part));
                continue;
            }
        };
        // The first remaining step: conditions may exclude the named one.
        let from = profile.steps[first..]
            .iter()
            .find_map(|own| steps.iter().find(|step| step.name == own.name));
        let reason = facts.not_now.clone();
        let reason = reason.or_else(|| facts.applies.not_for(targets));
        let name = name.clone();
        match (from, reason) {
            (Some(from), None) => {
                let hook = Hook {
                    name,
                    digest: facts.digest.clone(),
                    volume: facts.volume.clone(),
                    from: from.name.clone(),
                };
                hooks.push((first, hook));
            }
            (_, reason) => {
                let skipped = || "the steps that it is for are skipped".to_owned();
                let reason = reason.unwrap_or_else(skipped);
                left_out.push(Skipped { name, reason });
            }
        }
    }
    // Each hook changes what the earlier steps saw. In another order, the result would differ under the same keys.
    hooks.sort_by_key(|(first, _)| *first);
    let hooks = hooks.into_iter().map(|(_, hook)| hook).collect();
    Ok((hooks, left_out))
}

/// Returns the position of the first step that sees the change, or why the profile cannot have the hook, and help.
fn first_step(
    profile: &Profile,
    facts: &HookFacts,
) -> std::result::Result<usize, (String, String)> {
    let HookFacts {
        volume, from_step, ..
    } = facts;
    let meant = &facts.applies.profiles;
    if !meant.is_empty() && !profile.names().any(|own| meant.contains(&own)) {
        return Err((
            format!("is only for {}", meant.join(", ")),
            "take it out of `hooks`, or extend one of these profiles".to_owned(),
        ));
    }
    let is_source = |one: &profile::Volume| one.name == *volume && one.kind == VolumeKind::Source;
    if !profile.volumes.iter().any(is_source) {
        return Err((
            format!("changes `{volume}`, which is not a `source` volume"),
            "rockenv hook ls".to_owned(),
        ));
    }
    facts.first_step(profile).ok_or_else(|| match from_step {
        Some(step) => (
            format!("starts at unknown step `{step}`"),
            "rockenv hook ls".to_owned(),
        ),
        None => (
            format!("would never be applied: no step has `{volume}` among its `inputs`"),
            format!("add `inputs = [\"{volume}\"]` to the first step that reads it"),
        ),
    })
}
