//! Owns the chain of keys. Each step's key is based on the previous step that every machine runs, up to a step whose
//! TheRock fingerprints are unknown.

use super::key::{self, StepKey};
use super::{Hook, Step, Volume};
use crate::plan::resolve::inputs::Inputs;
use crate::profile::Profile;
use crate::rocm::therock::ArtifactFingerprints;
use crate::sys::error::Result;
use crate::sys::name::StepName;

/// Gives the steps their keys; returns the step that must run before later keys are final.
pub(super) fn chain(
    steps: &mut [Step],
    base: &StepKey,
    profile: &Profile,
    inputs: &Inputs,
    volumes: &[Volume],
    hooks: &[Hook],
) -> Result<Option<StepName>> {
    let mut parent = base.clone();
    let configuring = steps.iter().filter(|step| step.fingerprints.is_some());
    let standing_in: Vec<String> = configuring.flat_map(|step| step.inputs.clone()).collect();
    // The parent's key without the part that TheRock's fingerprints replace.
    let mut bare = base.clone();
    let (mut prints, mut own, mut open) = (None, String::new(), None);
    // Whether the source has changes that TheRock does not see: it asks git for them, and git's answer omits some.
    let mut blind = false;
    // The preceding steps that are in no later key. Hooks that begin at them are in the next step's key.
    let mut uncached_downstream: Vec<StepName> = Vec::new();
    for step in steps {
        let content = fingerprints(step, inputs)?;
        let rest: Vec<_> = content
            .iter()
            .filter(|(name, _)| !standing_in.contains(name))
            .cloned()
            .collect();
        let uses = prints.map_or_else(Vec::new, |prints: &ArtifactFingerprints| {
            prints.of(&step.stages, &own, blind)
        });
        let starts =
            |hook: &&Hook| hook.from == step.name || uncached_downstream.contains(&hook.from);
        let digests = hooks.iter().filter(starts).map(|hook| hook.digest.as_str());
        let (digests, user) = (digests.collect(), &inputs.user);
        let mut whole = key::content(step, volumes, &content, &uses, digests, user, profile.gpu);
        let (own_key, parts) = (whole.key(&parent), key::parts(&whole));
        whole.inputs = &rest;
        let without = whole.key(&bare);
        step.parts = parts;
        if step.is_in_no_later_key() {
            uncached_downstream.push(step.name.clone());
            step.key = own_key;
            continue;
        }
        uncached_downstream.clear();
        bare = without;
        parent = own_key.clone();
        if step.fingerprints.is_some() && open.is_none() {
            match inputs.prints.get(&own_key) {
                Some(known) => {
                    blind = content.iter().any(|(_, print)| is_untracked(print));
                    own = content.into_iter().map(|(_, print)| print).collect();
                    prints = Some(known);
                    parent = bare.clone();
                }
                None => open = Some(step.name.clone()),
            }
        }
        step.key = own_key;
    }
    Ok(open)
}

fn fingerprints(step: &Step, inputs: &Inputs) -> Result<Vec<(String, String)>> {
    let print = |name: &String| match inputs.fingerprints.get(name) {
        Some(print) => {
            let print = print.as_deref().unwrap_or("absent");
            Ok((name.clone(), print.to_owned()))
        }
        None => Err(unexpected!("no fingerprint of the volume `{name}`")),
    };
    step.inputs.iter().map(print).collect()
}

/// Suffix of a fingerprint of a checkout with untracked files, or with changes that git is told not to check.
pub(crate) const UNTRACKED: &str = "?";

/// Returns whether a fingerprint is of a checkout with such files, including its submodules'.
pub(crate) fn is_untracked(fingerprint: &str) -> bool {
    fingerprint.ends_with(UNTRACKED)
}
