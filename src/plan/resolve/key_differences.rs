//! Owns the differences between a step and the same step of an earlier build: the ingredients of its key, by name,
//! without values.

use std::collections::{BTreeMap, BTreeSet};

use super::{Action, Step};

/// Returns the changes in a step; empty if only something before it changed.
pub(crate) fn changed(old: &Step, new: &Step) -> Vec<String> {
    let mut found = action(&old.action, &new.action);
    let names = |names: &[String]| names.iter().cloned().collect::<BTreeSet<_>>();
    let differing: Vec<String> = differing(&old.env, &new.env).cloned().collect();
    found.extend(differing.iter().map(|name| format!("variable `{name}`")));
    let settings = [
        ("user", old.user != new.user),
        ("workdir", old.workdir != new.workdir),
        ("network", old.network != new.network),
        ("gpu", old.gpu != new.gpu),
        ("incremental", old.incremental != new.incremental),
    ];
    let settings = settings.iter().filter(|(_, differs)| *differs);
    found.extend(settings.map(|(name, _)| format!("setting `{name}`")));
    let (before, after) = (names(&old.volumes), names(&new.volumes));
    let volumes = before.symmetric_difference(&after);
    found.extend(volumes.map(|name| format!("volume `{name}`")));
    found.extend(parts(old, new, before == after));
    found
}

/// Returns the changes that only digests reveal.
fn parts(old: &Step, new: &Step, same_volumes: bool) -> Vec<String> {
    let name = |part: &String| {
        if let Some(input) = part.strip_prefix("input ") {
            return Some(format!("input `{input}`"));
        }
        match part.as_str() {
            "hooks" => Some("hooks".to_owned()),
            "fingerprints" => Some("fingerprints of TheRock".to_owned()),
            "user" if old.user == new.user => Some("the build user".to_owned()),
            "volumes" if same_volumes => Some("kind or target of a volume".to_owned()),
            _ => None,
        }
    };
    differing(&old.parts, &new.parts).filter_map(name).collect()
}

fn action(old: &Action, new: &Action) -> Vec<String> {
    match (old, new) {
        (Action::Packages(old), Action::Packages(new)) => {
            let one_of = |name: &String| {
                let what = match (old.contains(name), new.contains(name)) {
                    (false, true) => "added",
                    (true, false) => "removed",
                    (true, true) | (false, false) => return None,
                };
                Some(format!("package `{name}` {what}"))
            };
            let all: BTreeSet<&String> = old.iter().chain(new).collect();
            let found: Vec<String> = all.into_iter().filter_map(one_of).collect();
            match found.is_empty() && old != new {
                true => vec!["order of packages".to_owned()],
                false => found,
            }
        }
        (Action::Copy(old), Action::Copy(new)) => {
            let files = |items: &[super::CopyItem]| -> BTreeMap<String, String> {
                let items = items.iter();
                items
                    .map(|item| (item.to.clone(), item.digest.clone()))
                    .collect()
            };
            let (old, new) = (files(old), files(new));
            let names = differing(&old, &new);
            names.map(|name| format!("file `{name}`")).collect()
        }
        (old, new) if old == new => Vec::new(),
        (Action::Run { .. }, Action::Run { .. }) => vec!["script".to_owned()],
        (Action::Export(_), Action::Export(_)) => vec!["exported paths".to_owned()],
        (
            Action::Run { .. } | Action::Packages(_) | Action::Copy(_) | Action::Export(_),
            Action::Run { .. } | Action::Packages(_) | Action::Copy(_) | Action::Export(_),
        ) => vec!["action".to_owned()],
    }
}

/// Returns the names that are in one map only, or have other values.
pub(crate) fn differing<'a, V: PartialEq>(
    old: &'a BTreeMap<String, V>,
    new: &'a BTreeMap<String, V>,
) -> impl Iterator<Item = &'a String> {
    let names: BTreeSet<&String> = old.keys().chain(new.keys()).collect();
    let names = names.into_iter();
    names.filter(|name| old.get(*name) != new.get(*name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_that_came_and_went_are_named() {
        let packages =
            |names: &[&str]| Action::Packages(names.iter().map(|name| (*name).into()).collect());
        let found = action(&packages(&["cmake", "gcc"]), &packages(&["gcc", "ninja"]));
        assert_eq!(found, ["package `cmake` removed", "package `ninja` added"]);
        let found = action(&packages(&["cmake", "gcc"]), &packages(&["gcc", "cmake"]));
        assert_eq!(found, ["order of packages"]);
    }
}
