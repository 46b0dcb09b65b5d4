//! Owns what `up` and `plan` read from a checkout of TheRock among the sources, and what they report about it.
//!
//! The checkout's table replaces the built-in one for the named targets: their families, products and excluded
//! projects.

use crate::plan::resolve::{by_version, version};
use crate::rocm::therock::{Checkout, drift};
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;
use crate::up::resolve::Gathered;

/// Uses the checkout's table of targets; returns notes for the user.
///
/// An unreadable checkout is no error: the built-in table stays in use.
pub(crate) fn use_target_table(gathered: &mut Gathered<'_>) -> Result<Vec<String>> {
    let Some((name, directory)) = gathered
        .sources
        .iter()
        .find(|(_, path)| Checkout::is_one(path))
    else {
        return Ok(Vec::new());
    };
    let hint = format!("rockenv target check --source {}", quoted_path(directory));
    let checkout = match Checkout::read(directory) {
        Ok(checkout) => checkout,
        Err(error) => {
            return Ok(vec![format!(
                "cannot read the table of targets in source `{name}`; using the built-in one: {}; `{hint}` shows where",
                error.message()
            )]);
        }
    };
    let mut notes = Vec::from_iter(release(gathered, name, &checkout)?);
    let inputs = &mut gathered.inputs;
    let targets = inputs.asked_targets(&gathered.selection.profile);
    let mut asked = targets.iter();
    if let Some(target) = asked.find(|target| checkout.target(target.name()).is_none()) {
        return Err(invalid!(
            "source `{name}` has no target `{target}`: this version of TheRock cannot build for it"
        )
        .help(hint));
    }
    let differences = drift(&checkout);
    let named = targets.iter().chain(&inputs.machine_targets);
    let declared =
        named.filter_map(|target| Some(target.declared(checkout.target(target.name())?)));
    inputs.declared = declared.collect();
    inputs.checkout = Some(checkout.targets);
    if let [first, rest @ ..] = differences.as_slice() {
        let more = match rest.len() {
            0 => String::new(),
            count => format!(", and {count} more"),
        };
        notes.push(format!(
            "source `{name}` differs from the built-in table of TheRock; using the checkout's: {first}{more}; `{hint}` shows all"
        ));
    }
    Ok(notes)
}

/// Compares the checkout's version with the profile's selected release. Refuses a checkout that is older than all
/// releases of the profile; returns a note on other mismatches.
fn release(gathered: &Gathered<'_>, source: &str, checkout: &Checkout) -> Result<Option<String>> {
    let profile = &gathered.selection.profile;
    let Some(set) = gathered.inputs.chosen(profile)?.release else {
        return Ok(None);
    };
    let known = by_version(profile.releases.keys().map(String::as_str));
    let (Some(oldest), Some(newest)) = (known.first(), known.last()) else {
        return Ok(None);
    };
    let found = match &checkout.version {
        Some(found) => found.as_str(),
        None => "older than 2025-04",
    };
    let is = |release: &&&str| {
        let rest = found.strip_prefix(**release);
        rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
    };
    match known.iter().find(is) {
        Some(own) if *own == set => Ok(None),
        Some(own) => Ok(Some(format!(
            "source `{source}` is TheRock {found}, but image and parameters are those of {set}: \
             `--release {own}` fits"
        ))),
        None if checkout.version.is_none() || version(found) < version(oldest) => {
            let profile = &profile.name;
            // A release is found by the checkout's version, which the oldest checkouts lack.
            let own = match &checkout.version {
                Some(found) => {
                    let own: Vec<_> = found.split('.').take(2).collect();
                    let own = own.join(".");
                    format!(
                        "name this one a release of your own, `[releases.\"{own}\"]` in a profile that extends `{profile}`"
                    )
                }
                None => "write a profile for this checkout: rockenv profile new NAME".to_owned(),
            };
            Err(invalid!(
                "source `{source}` is TheRock {found}: profile `{profile}` fits {oldest} to {newest}"
            )
            .help(format!(
                "choose a commit of one of these (`--release {oldest}` has one), or {own}"
            )))
        }
        None => Ok(Some(format!(
            "source `{source}` is TheRock {found}, which profile `{profile}` does not know: it fits \
             {oldest} to {newest}",
            profile = profile.name
        ))),
    }
}
