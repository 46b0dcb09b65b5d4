//! Owns what `up` and `plan` read from a checkout of TheRock among the sources, and what they report about it.
//!
//! The checkout's table replaces the built-in one for the named targets: their families, products and excluded
//! projects.

use crate::rocm::therock::{Checkout, drift};
use crate::sys::error::{Error, Result};
use crate::up::resolve::Gathered;

/// Uses the checkout's table of targets; returns notes for the user.
///
/// An unreadable checkout is no error here: the built-in table stays in use.
pub(crate) fn settle(gathered: &mut Gathered<'_>) -> Result<Vec<String>> {
    let Some((name, directory)) = gathered
        .sources
        .iter()
        .find(|(_, path)| Checkout::is_one(path))
    else {
        return Ok(Vec::new());
    };
    let hint = format!("rockenv target check --source {}", directory.display());
    let checkout = match Checkout::read(directory) {
        Ok(checkout) => checkout,
        Err(error) => {
            return Ok(vec![format!(
                "cannot read the table of targets in source `{name}`; using the built-in one: {}; `{hint}` shows where",
                error.message()
            )]);
        }
    };
    let inputs = &mut gathered.inputs;
    let targets = match inputs.targets.is_empty() {
        true => &gathered.selection.profile.targets,
        false => &inputs.targets,
    };
    if let Some(target) = targets
        .iter()
        .find(|target| checkout.target(target.name()).is_none())
    {
        return Err(Error::invalid(format!(
            "source `{name}` has no target `{target}`: this version of TheRock cannot build for it"
        ))
        .help(hint));
    }
    let excluded = checkout.targets.iter().map(|target| {
        let projects = target.excluded.iter();
        let projects = projects.map(|one| (one.project.clone(), one.issue.clone()));
        (target.name.clone(), projects.collect())
    });
    inputs.excluded = Some(excluded.collect());
    let differences = drift(&checkout);
    let named = targets.iter().chain(&inputs.machine_targets);
    let changed = named.filter(|target| differences.iter().any(|drift| drift.is_of(target.name())));
    let declared =
        changed.filter_map(|target| Some(target.declared(checkout.target(target.name())?)));
    inputs.declared = declared.collect();
    Ok(match differences.as_slice() {
        [] => Vec::new(),
        [first, rest @ ..] => {
            let more = match rest.len() {
                0 => String::new(),
                count => format!(", and {count} more"),
            };
            vec![format!(
                "source `{name}` differs from the built-in table of TheRock; using the checkout's: {first}{more}; `{hint}` shows all"
            )]
        }
    })
}
