//! Owns finding the changed steps of a lock file: whether each changed by itself or only because of an earlier step or
//! the image, with a description.

use std::collections::BTreeSet;

use super::diff::LockChange;
use super::{LockedStep, Lockfile};
use crate::plan::resolve;

/// Returns the steps that are in only one file or have other keys: removed ones first, then the others in order.
pub(super) fn changes(a: &Lockfile, b: &Lockfile) -> Vec<LockChange> {
    let change = |name: &str, old: Option<&LockedStep>, new: Option<&LockedStep>| {
        let key = |step: &LockedStep| step.key.to_string();
        LockChange::new("step", name, old.map(key), new.map(key))
    };
    let gone = a.steps.iter().filter(|step| b.step(&step.name).is_none());
    let mut found: Vec<LockChange> = gone
        .map(|step| change(&step.name, Some(step), None))
        .collect();
    // The cause of a change in a step without changes of its own.
    let mut cause = (a.image.key != b.image.key).then(|| format!("image {}", b.image.name));
    let mut before = None;
    for step in &b.steps {
        let old = a.step(&step.name);
        let mut one = change(&step.name, old, Some(step));
        if let Some(old) = old {
            // Its predecessor is another step, or gone.
            if let Some(other) = moved(a, old, before, b) {
                cause.get_or_insert(format!("step {other}"));
            }
            if old.key != step.key {
                one.own = resolve::differing(&old.parts, &step.parts)
                    .cloned()
                    .collect();
                if one.own.is_empty() {
                    one.follows.clone_from(&cause);
                }
            }
        }
        before = Some(step.name.as_str());
        if let Some(old) = old.filter(|old| old.key == step.key) {
            // The pins and fingerprints come from another kind of build.
            if old.incremental != step.incremental {
                let word = |step: &LockedStep| match step.incremental {
                    true => "incremental".to_owned(),
                    false => "clean".to_owned(),
                };
                (one.from, one.to) = (Some(word(old)), Some(word(step)));
                found.push(one);
            }
            continue;
        }
        if one.follows.is_none() {
            cause = Some(format!("step {}", step.name));
        }
        found.push(one);
    }
    found
}

/// Returns the step that preceded this one and is gone, or the step that now does.
fn moved<'a>(
    a: &'a Lockfile,
    old: &LockedStep,
    before: Option<&'a str>,
    b: &Lockfile,
) -> Option<&'a str> {
    let at = a.steps.iter().position(|step| step.name == old.name)?;
    let stood = at.checked_sub(1).map(|at| a.steps[at].name.as_str());
    match stood {
        stood if stood == before => None,
        Some(gone) if b.step(gone).is_none() => Some(gone),
        _ => before.or(stood),
    }
}

/// Names parts of a step: "its script and its input `src`".
pub(super) fn words(parts: &[String]) -> String {
    let word = |part: &String| match part.as_str() {
        "fingerprints" => "TheRock's fingerprints".to_owned(),
        "user" => "its build user".to_owned(),
        "settings" => "its working directory, network or GPU".to_owned(),
        part => match part.split_once(' ') {
            Some((kind, name)) => format!("its {kind} `{name}`"),
            None => format!("its {part}"),
        },
    };
    let words: Vec<String> = parts.iter().map(word).collect();
    match words.split_last() {
        Some((last, rest)) if !rest.is_empty() => format!("{} and {last}", rest.join(", ")),
        _ => words.concat(),
    }
}

/// Counts in one line the steps that only follow others; `None` without such steps.
pub(super) fn followers(changes: &[LockChange]) -> Option<String> {
    let mut causes = BTreeSet::new();
    let mut names = Vec::new();
    for change in changes {
        if let Some(cause) = &change.follows {
            causes.insert(cause.as_str());
            names.push(change.name.as_str());
        }
    }
    let causes: Vec<&str> = causes.into_iter().collect();
    let place = match causes[..] {
        [] => return None,
        [one] => match one.split_once(' ') {
            Some(("image", name)) => format!("on image `{name}`"),
            _ => format!("after `{}`", one.trim_start_matches("step ")),
        },
        _ => "after these".to_owned(),
    };
    Some(match names[..] {
        [one] => format!("and the step {place}: `{one}`"),
        _ => format!("and the {} steps {place}", names.len()),
    })
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::super::{changes, describe};
    use super::*;

    /// Returns a lock file with these steps, each a name and a digit, its script. The script is a step's only part, and
    /// its key depends on the steps before it too.
    fn with(image: &str, steps: &str) -> Lockfile {
        let mut lock = example();
        lock.image.key = image.repeat(64).as_str().into();
        let mut all = image.to_owned();
        let step = |step: &str| {
            let (name, script) = step.split_at(1);
            all = format!("{all} {script}");
            let parts = [("script", script), ("settings", "0")];
            LockedStep {
                name: name.into(),
                key: all.as_str().into(),
                parts: parts.map(|(name, is)| (name.into(), is.into())).into(),
                pins: crate::plan::pins::Pins::new(),
                prints: None,
                incremental: false,
            }
        };
        lock.steps = steps.split(' ').map(step).collect();
        lock
    }

    fn described(a: &Lockfile, b: &Lockfile) -> String {
        describe(&changes(a, b)).join("; ")
    }

    #[test]
    fn what_changed_by_itself_is_told_from_what_follows() {
        let old = with("1", "a1 b1 c1 d1");
        let [a, b, c] = ["a", "b", "c"].map(|step| format!("step {step}: its script changed; "));
        for (image, steps, said) in [
            ("1", "a1 b2 c1 d1", b.clone() + "and the 2 steps after `b`"),
            ("1", "a1 b2 c2 d1", b + &c + "and the step after `c`: `d`"),
            ("1", "a2 b1 c2 d1", a + &c + "and the 2 steps after these"),
            (
                "2",
                "a1 b1 c1 d1",
                "and the 4 steps on image `debian`".into(),
            ),
        ] {
            assert_eq!(described(&old, &with(image, steps)), said);
        }
    }

    #[test]
    fn steps_that_came_went_or_moved_are_what_others_follow() {
        let (old, gone) = (with("1", "a1 b2 c3"), with("1", "a1 c3"));
        let key = &old.step("b").unwrap().key[..12];
        for (from, to, verb) in [(&old, &gone, "removed"), (&gone, &old, "added")] {
            let said = format!("step b {verb}: {key}; and the step after `b`: `c`");
            assert_eq!(described(from, to), said);
        }
        let changes = changes(&old, &with("1", "b2 a1 c3"));
        assert!(
            changes.iter().all(|change| change.follows.is_some()),
            "{changes:?}"
        );
    }

    #[test]
    fn parts_have_names_for_people() {
        let parts = ["fingerprints", "input src", "variables"].map(str::to_owned);
        assert_eq!(
            words(&parts),
            "TheRock's fingerprints, its input `src` and its variables"
        );
        assert_eq!(words(&parts[2..]), "its variables");
    }
}
