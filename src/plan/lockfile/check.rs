//! Owns comparing a lock file with the current state: pure, with messages that name the difference.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use super::steps::words;
use super::{Fetched, LockedFingerprints, LockedImage, LockedSource, LockedStep, Lockfile, sums};
use crate::plan::ids::ImageKey;
use crate::plan::image::Image;
use crate::plan::pins::{self, Pins};
use crate::plan::resolve::{self, Spec, Step, VolumeKind, VolumeSource};
use crate::rocm::target::{self, Target};
use crate::rocm::therock::ArtifactFingerprints;
use crate::sys::address::{shown_value, without_login};
use crate::sys::error::Error;
use crate::sys::shell::quoted_path;

/// Maximum number of differences in an error.
const SHOWN: usize = 5;

/// Makes the error for differences from the lock file at `path`; `command` rewrites the file.
pub(crate) fn drift(path: &Path, differences: &[String], command: &str) -> Error {
    let shown = some(differences);
    drift!("`{}` does not match: {shown}", path.display()).help(command)
}

/// Joins the first differences, and counts the rest.
pub(crate) fn some(differences: &[String]) -> String {
    let mut shown: Vec<&str> = differences.iter().take(SHOWN).map(String::as_str).collect();
    let more = format!("and {} more", differences.len().saturating_sub(SHOWN));
    if differences.len() > SHOWN {
        shown.push(&more);
    }
    shown.join("; ")
}

/// Compares a step's outputs with the locked ones.
pub(crate) fn left(
    locked: &LockedStep,
    found: Option<&ArtifactFingerprints>,
    pins: &Pins,
) -> Vec<String> {
    let mut differences = match locked.pins.is_empty() {
        true => Vec::new(),
        false => pins::differences(&locked.name, &locked.pins, pins),
    };
    let found = found.map(LockedFingerprints::new);
    if let (Some(prints), Some(found)) = (&locked.prints, found) {
        let other = resolve::differing(&prints.artifacts, &found.artifacts);
        differences.extend(other.map(|name| {
            format!(
                "TheRock's fingerprint of `{name}` after step `{}` differs from the lock file",
                locked.name
            )
        }));
        if prints.stages != found.stages {
            differences.push(format!(
                "TheRock's stages after step `{}` differ from the lock file",
                locked.name
            ));
        }
    }
    differences
}

/// Compares the choices of a build: profile, targets, variant, starting point and parameters.
pub(crate) fn choices(lock: &Lockfile, now: &Choices<'_>) -> Vec<String> {
    let mut found = Vec::new();
    let mut differs = |what: &str, locked: &str, now: &str| {
        if locked != now {
            // The name of a parameter tells whether its value is secret.
            let shown = |value: &str| shown_value(what.trim_end_matches('`'), value);
            let (was, is) = (shown(locked), shown(now));
            found.push(match (locked, now) {
                ("", _) => format!("{what} is not set in the lock file, but is `{is}` here"),
                (_, "") => format!("{what} is `{was}` in the lock file, but is not set here"),
                _ => format!("{what} is `{was}` in the lock file, but `{is}` here"),
            });
        }
    };
    let targets = target::joined(now.targets, " ");
    differs("the profile", &lock.profile, now.profile);
    differs("the target", &lock.targets.join(" "), &targets);
    differs(
        "the variant",
        lock.variant.as_deref().unwrap_or_default(),
        now.variant.unwrap_or_default(),
    );
    differs("the starting point (`--from`)", &lock.from, now.from);
    // Without parameters on the command line, those of the lock file apply.
    if !now.params.is_empty() {
        for name in resolve::differing(&lock.params, now.params) {
            let what = format!("parameter `{name}`");
            let value = |params: &BTreeMap<String, String>| params.get(name).cloned();
            let (locked, now) = (value(&lock.params), value(now.params));
            differs(&what, &locked.unwrap_or_default(), &now.unwrap_or_default());
        }
    }
    found
}

/// The choices that `up` builds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Choices<'a> {
    pub profile: &'a str,
    pub targets: &'a [Target],
    pub variant: Option<&'a str>,
    /// Starting point.
    pub from: &'a str,
    pub params: &'a BTreeMap<String, String>,
}

/// Compares the source volumes that the profile declares.
pub(crate) fn sources(lock: &Lockfile, volumes: &[resolve::Volume]) -> Vec<String> {
    let mut found = Vec::new();
    let is_source = |volume: &&resolve::Volume| volume.kind == VolumeKind::Source;
    let mut left: BTreeSet<&str> = lock.source.keys().map(String::as_str).collect();
    for volume in volumes.iter().filter(is_source) {
        left.remove(volume.name.as_str());
        let Some(locked) = lock.source.get(&volume.name) else {
            found.push(format!("source `{}` is not in the lock file", volume.name));
            continue;
        };
        let (git, rev) = match &volume.source {
            VolumeSource::Git(git) => (Some(&git.url), git.rev.as_ref()),
            VolumeSource::Path(_) | VolumeSource::Store => (None, None),
        };
        if (locked.git.as_ref(), locked.rev.as_ref()) != (git, rev) {
            let shown = |git: Option<&String>, rev: Option<&String>| match (git, rev) {
                (None, _) => "a directory".to_owned(),
                (Some(git), None) => format!("`{}`", without_login(git)),
                (Some(git), Some(rev)) => format!("`{rev}` of `{}`", without_login(git)),
            };
            found.push(format!(
                "source `{}` is {} in the lock file, but {} in the profile",
                volume.name,
                shown(locked.git.as_ref(), locked.rev.as_ref()),
                shown(git, rev)
            ));
        }
    }
    let left = left.into_iter();
    let gone = |name| format!("source `{name}` is in the lock file, but not in the profile");
    found.extend(left.map(gone));
    found
}

/// Compares a source's current fingerprint with the locked one. Returns the difference, and help where `lock` does not
/// adopt it.
pub(crate) fn source(
    name: &str,
    locked: &LockedSource,
    directory: &Path,
    print: &str,
) -> Option<(String, Option<String>)> {
    let wanted = locked.fingerprint();
    if print == wanted {
        return None;
    }
    let place = directory.display();
    let git = format!("git -C {}", quoted_path(directory));
    let (head, dirty) = match print.strip_prefix("git:") {
        Some(rest) => match rest.split_once('+') {
            Some((head, _)) => (head, true),
            None => (rest, false),
        },
        None => {
            let message = format!("source `{name}` in `{place}` differs from the locked content");
            return Some((message, None));
        }
    };
    Some(match &locked.commit {
        Some(commit) if head == commit && dirty => (
            format!("source `{name}` in `{place}` is at the locked commit, but has changes"),
            Some(format!("{git} status")),
        ),
        Some(commit) => (
            format!("source `{name}` in `{place}` is at commit {head}, but {commit} is locked"),
            // `lock` keeps the commit of a repository that rockenv cloned.
            (dirty || locked.git.is_some()).then(|| format!("{git} checkout {commit}")),
        ),
        None => (
            format!("source `{name}` in `{place}` was a plain directory, but is now a repository"),
            dirty.then(|| format!("{git} status")),
        ),
    })
}

/// Describes how an image built from a locked recipe differs from the locked one.
pub(crate) fn image(locked: &LockedImage, image: &Image) -> Vec<String> {
    let now = super::packages(&image.packages);
    let shown = |version: Option<&String>| version.map_or("none", String::as_str).to_owned();
    let mut found = Vec::new();
    for name in resolve::differing(&locked.packages, &now) {
        found.push(format!(
            "package `{name}` of image `{}` is {} in the lock file, but available as {}",
            locked.name,
            shown(locked.packages.get(name)),
            shown(now.get(name))
        ));
    }
    if found.is_empty() {
        found.push(format!(
            "image `{}` was built with different content: {} instead of {}",
            locked.name, image.digest, locked.digest
        ));
    }
    found
}

pub(crate) fn hooks(lock: &Lockfile, now: &BTreeMap<String, String>) -> Vec<String> {
    named("hook", &lock.hooks, now)
}

/// Compares the files that rockenv itself fetches.
pub(crate) fn fetched(lock: &Lockfile, now: &BTreeMap<String, Fetched>) -> Vec<String> {
    named("fetched file", &sums(&lock.fetched), &sums(now))
}

fn named(
    what: &str,
    locked: &BTreeMap<String, String>,
    now: &BTreeMap<String, String>,
) -> Vec<String> {
    let differs = |name: &String| match (locked.get(name), now.get(name)) {
        (Some(_), Some(_)) => format!("{what} `{name}` differs from the lock file"),
        (Some(_), None) => format!("{what} `{name}` is in the lock file, but not in use"),
        (None, _) => format!("{what} `{name}` is not in the lock file"),
    };
    resolve::differing(locked, now).map(differs).collect()
}

/// Compares the steps of a spec that was resolved from the lock file. Names only the first difference, because later
/// keys depend on it.
pub(crate) fn steps(lock: &Lockfile, spec: &Spec) -> Vec<String> {
    let names: BTreeSet<&str> = lock.steps.iter().map(|step| step.name.as_str()).collect();
    for (at, step) in spec.steps.iter().enumerate() {
        let locked = lock.steps.get(at);
        let message = match locked {
            Some(locked) if locked.name == step.name && locked.key == step.key => continue,
            Some(locked) if locked.name == step.name => {
                let own = resolve::differing(&locked.parts, &step.parts).cloned();
                let own: Vec<String> = own.collect();
                let what = match own.is_empty() {
                    true => "the profile, a parameter or a file that it copies has".to_owned(),
                    false if own.len() == 1 => words(&own) + " has",
                    false => words(&own) + " have",
                };
                format!(
                    "step `{}` differs from the lock file: {what} changed",
                    step.name
                )
            }
            _ if !names.contains(step.name.as_str()) => {
                format!("step `{}` is not in the lock file", step.name)
            }
            Some(locked) => format!(
                "step `{}` is in the place of the locked step `{}`",
                step.name, locked.name
            ),
            None => format!("step `{}` is repeated", step.name),
        };
        return vec![message];
    }
    match lock.steps.get(spec.steps.len()) {
        Some(missing) => vec![format!(
            "step `{}` is in the lock file, but not in the profile",
            missing.name
        )],
        None => Vec::new(),
    }
}

/// Describes how an env differs from a lock file: choices, image, sources, and steps.
pub(crate) fn built(lock: &Lockfile, spec: &Spec, image_key: &ImageKey) -> Vec<String> {
    let now = Choices {
        profile: &spec.profile,
        targets: &spec.targets,
        variant: spec.variant.as_deref(),
        from: &spec.from,
        params: &BTreeMap::new(),
    };
    let mut found = choices(lock, &now);
    if lock.image.key != *image_key {
        let name = &lock.image.name;
        found.push(format!("image `{name}` differs from the lock file"));
    }
    for (name, locked) in &lock.source {
        // The key of a step covers its part of a source, which has its own fingerprint.
        if let Some(print) = spec.fingerprints.get(name)
            && *print != locked.fingerprint()
        {
            found.push(format!(
                "source `{name}` is {} in the lock file, but {print} here",
                locked.fingerprint()
            ));
        }
    }
    let user = format!("{}:{}", spec.user.uid, spec.user.gid);
    if user != lock.build_user {
        // Nearly all step keys contain the build user.
        found.push(format!(
            "the build user is {} in the lock file, but {user} here",
            lock.build_user
        ));
        return found;
    }
    let left_out = |name: &str| spec.skipped.iter().any(|step| step.name == name);
    let mut steps = spec.steps.iter();
    // Steps after a skipped one have other keys, and so do those with TheRock's fingerprints in their keys.
    let mut comparable = true;
    for locked in &lock.steps {
        if left_out(&locked.name) {
            comparable = false;
            continue;
        }
        let name = &locked.name;
        found.push(match steps.next() {
            None => format!("step `{name}` is in the lock file, but not in the env"),
            Some(step) if step.name != *name => {
                let own = &step.name;
                format!("step `{own}` is in the place of the locked step `{name}`")
            }
            Some(step) if comparable && step.key != locked.key => {
                format!("step `{name}` differs from the lock file")
            }
            Some(step) => {
                comparable &= step.fingerprints.is_none();
                continue;
            }
        });
        return found;
    }
    let new = |step: &Step| format!("step `{}` is not in the lock file", step.name);
    found.extend(steps.next().map(new));
    found
}

#[cfg(test)]
mod tests {
    use super::super::tests::example;
    use super::*;
    use crate::sys::error::Kind;

    fn one(found: &[String]) -> &str {
        let [one] = found else {
            panic!("{found:?}");
        };
        one
    }

    #[test]
    fn what_was_asked_for_is_compared_by_name() {
        let lock = example();
        let targets = [Target::parse("gfx1103").unwrap()];
        let none = BTreeMap::new();
        let now = Choices {
            profile: "p",
            targets: &targets,
            variant: Some("lean"),
            from: "source",
            params: &none,
        };
        assert!(choices(&lock, &now).is_empty());
        let params = &BTreeMap::from([("jobs".to_owned(), "8".to_owned())]);
        let token = [("jobs", "4"), ("hf-token", "secret")];
        let token = &BTreeMap::from(token.map(|(name, value)| (name.to_owned(), value.to_owned())));
        let (variant, targets) = (None, &[][..]);
        for (now, said) in [
            (
                Choices { variant, ..now },
                "the variant is `lean` in the lock file, but is not set here",
            ),
            (
                Choices { targets, ..now },
                "the target is `gfx1103` in the lock file, but is not set here",
            ),
            (
                Choices { params, ..now },
                "parameter `jobs` is `4` in the lock file, but `8` here",
            ),
            (
                Choices {
                    params: token,
                    ..now
                },
                "parameter `hf-token` is not set in the lock file, but is `***` here",
            ),
        ] {
            assert_eq!(one(&choices(&lock, &now)), said);
        }
    }

    #[test]
    fn a_moved_and_a_changed_source_are_told_apart() {
        let lock = example();
        let locked = &lock.source["therock"];
        let place = Path::new("/s");
        let commit = "a".repeat(40);
        let is = |print: &str| source("therock", locked, place, print);
        assert_eq!(is(&format!("git:{commit}")), None);
        let (changed, help) = is(&format!("git:{commit}+00")).unwrap();
        assert_has!(changed, "has changes");
        assert_eq!(help.unwrap(), "git -C /s status");
        let moved = is(&format!("git:{}", "c".repeat(40))).unwrap();
        assert_eq!(moved.1.unwrap(), format!("git -C /s checkout {commit}"));
        let (content, help) = is("content:00").unwrap();
        assert_has!(content, "differs from the locked content");
        assert_eq!(help, None);
    }

    #[test]
    fn hooks_are_missing_new_or_other() {
        let lock = example();
        let mut now = lock.hooks.clone();
        assert!(hooks(&lock, &now).is_empty());
        now.insert("h".to_owned(), "0".to_owned());
        let said = "hook `h` differs from the lock file";
        assert_eq!(one(&hooks(&lock, &now)), said);
        now = [("i".to_owned(), "0".to_owned())].into();
        let gone = "hook `h` is in the lock file, but not in use";
        let new = "hook `i` is not in the lock file";
        assert_eq!(hooks(&lock, &now), [gone, new]);
    }

    #[test]
    fn what_a_step_left_is_compared_as_far_as_it_is_locked() {
        let lock = example();
        let none = Pins::new();
        // Values that were unknown when it was locked are not compared.
        let first = lock.step("z-first").unwrap();
        assert!(left(first, Some(&ArtifactFingerprints::none()), &first.pins).is_empty());
        let said = "`meson` of step `z-first` is 1.7.0 in the lock file, but nothing was installed";
        assert_eq!(one(&left(first, None, &none)), said);
        let second = lock.step("a-second").unwrap();
        let mut prints = second.prints.as_ref().unwrap().fingerprints();
        assert_eq!(prints.artifacts["blas"], None);
        assert!(left(second, Some(&prints), &none).is_empty());
        let artifacts = &mut prints.artifacts;
        artifacts.insert("blas".to_owned(), Some("0".to_owned()));
        let said =
            "TheRock's fingerprint of `blas` after step `a-second` differs from the lock file";
        assert_eq!(one(&left(second, Some(&prints), &none)), said);
    }

    #[test]
    fn an_error_tells_of_some_and_counts_the_rest() {
        let many: Vec<String> = (0..7).map(|number| format!("d{number}")).collect();
        let error = drift(Path::new("p.lock"), &many, "rockenv lock p");
        assert_eq!(error.kind(), Kind::Drift);
        let said = "`p.lock` does not match: d0; d1; d2; d3; d4; and 2 more";
        assert_eq!(error.message(), said);
    }
}
