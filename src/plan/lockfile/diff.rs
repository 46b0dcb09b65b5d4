//! Owns comparing two lock files, for display and as data.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;

use super::{Lockfile, steps, sums, values};
use crate::plan::resolve;
use crate::sys::address::{hide_secrets, shown_value};

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Verb {
    /// It is only in the second file.
    Added,
    /// It is only in the first file.
    Removed,
    /// It is in both, but differs.
    Changed,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct LockChange {
    /// Kind of entry: `package`, `source`, `submodule`, ...
    pub kind: &'static str,
    /// Its name; a submodule's is `source/path`.
    pub name: String,
    pub change: Verb,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub to: Option<String>,
    /// For a step: its own parts that differ.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub own: Vec<String>,
    /// For a step without own differences: the step before or the image, as `step NAME`, that caused the change.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
}

impl LockChange {
    /// Describes a value that was added, removed or changed.
    pub(super) fn new(
        kind: &'static str,
        name: &str,
        from: Option<String>,
        to: Option<String>,
    ) -> Self {
        Self {
            kind,
            name: name.to_owned(),
            change: match (&from, &to) {
                (None, _) => Verb::Added,
                (_, None) => Verb::Removed,
                _ => Verb::Changed,
            },
            from,
            to,
            own: Vec::new(),
            follows: None,
        }
    }
}

/// Kind of a choice made for `lock`. Its name is enough for display.
const CHOICE: &str = "choice";
/// Kind of a parameter, whose name tells whether its value is secret.
const PARAMETER: &str = "parameter";
/// Kind of a source's repository and revision.
const PLACE: &str = "source from";

impl fmt::Display for LockChange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { kind, name, .. } = self;
        let name = match *kind {
            CHOICE => name.clone(),
            kind => format!("{kind} {name}"),
        };
        let shown = |value: &Option<String>| match value.as_deref() {
            // The first digits are enough to distinguish digests and commits.
            Some(value)
                if value.len() >= 40 && value.bytes().all(|byte| byte.is_ascii_hexdigit()) =>
            {
                value[..12].to_owned()
            }
            Some("") | None => "none".to_owned(),
            Some(value) => value.to_owned(),
        };
        match self.change {
            Verb::Added => write!(f, "{name} added: {}", shown(&self.to)),
            Verb::Removed => write!(f, "{name} removed: {}", shown(&self.from)),
            Verb::Changed if !self.own.is_empty() => {
                write!(f, "{name}: {} changed", steps::words(&self.own))
            }
            Verb::Changed => write!(f, "{name}: {} -> {}", shown(&self.from), shown(&self.to)),
        }
    }
}

/// Formats changes for display. Steps that only follow others are counted, not listed.
pub(crate) fn describe(changes: &[LockChange]) -> Vec<String> {
    let own = changes.iter().filter(|change| change.follows.is_none());
    let lines = own.map(ToString::to_string);
    lines.chain(steps::followers(changes)).collect()
}

/// Returns the changes from `a` to `b`, in the order of the file. Ignores facts about a machine.
pub(crate) fn changes(a: &Lockfile, b: &Lockfile) -> Vec<LockChange> {
    let pairs = entries(a).into_iter().zip(entries(b));
    let found = pairs.flat_map(|((kind, old), (_, new))| compare(kind, &old, &new));
    // Added and removed sources are reported already.
    let found = found.filter(|change| change.kind != PLACE || change.change == Verb::Changed);
    found.map(hidden).chain(steps::changes(a, b)).collect()
}

/// Returns the values of each kind of entry except steps, by name.
fn entries(lock: &Lockfile) -> [(&'static str, BTreeMap<String, String>); 13] {
    let pairs = |pairs: &[(&str, String)]| {
        let pairs = pairs.iter().filter(|(_, value)| !value.is_empty());
        let pairs = pairs.map(|(name, value)| ((*name).to_owned(), value.clone()));
        pairs.collect::<BTreeMap<_, _>>()
    };
    let chosen = [
        ("profile", lock.profile.clone()),
        ("targets", lock.targets.join(" ")),
        ("machine-targets", lock.machine_targets.join(" ")),
        ("variant", lock.variant.clone().unwrap_or_default()),
        ("from", lock.from.clone()),
        ("build-user", lock.build_user.clone()),
    ];
    let image = [
        ("name", lock.image.name.clone()),
        ("recipe", lock.image.recipe.clone()),
        ("digest", lock.image.digest.clone()),
        ("resolved", lock.image.resolved.clone().unwrap_or_default()),
        ("snapshot", lock.image.snapshot.clone().unwrap_or_default()),
    ];
    let sources = values(&lock.source, |source| {
        let at = source.commit.as_ref().or(source.content.as_ref());
        at.cloned().unwrap_or_default()
    });
    let places = values(&lock.source, |source| {
        let rev = source.rev.as_ref().map(|rev| format!(" {rev}"));
        let git = source.git.as_deref().unwrap_or("a directory");
        git.to_owned() + &rev.unwrap_or_default()
    });
    let submodules = lock.source.iter();
    let submodules = submodules.map(|(name, source)| (name, source.submodules.clone()));
    let files = lock.files.iter().map(|(cache, files)| {
        let sums = values(files, |file| file.sha256().clone());
        (cache, sums)
    });
    let steps = lock.steps.iter();
    let pins = steps.clone().map(|step| (&step.name, step.pins.clone()));
    let prints =
        steps.filter_map(|step| Some((&step.name, step.prints.as_ref()?.artifacts.clone())));
    [
        (CHOICE, pairs(&chosen)),
        (PARAMETER, lock.params.clone()),
        ("image", pairs(&image)),
        ("image variable", lock.image.env.clone()),
        ("package", lock.image.packages.clone()),
        ("source", sources),
        (PLACE, places),
        ("submodule", flat(submodules)),
        ("hook", lock.hooks.clone()),
        ("fetched", sums(&lock.fetched)),
        ("file", flat(files)),
        ("installed", flat(pins)),
        ("fingerprint", flat(prints)),
    ]
}

/// Hides secrets: a changed password is a change, but is not shown.
fn hidden(change: LockChange) -> LockChange {
    let shown = |value: &Option<String>| {
        let value = value.as_deref()?;
        Some(match change.kind {
            PARAMETER => shown_value(&change.name, value),
            PLACE => hide_secrets(value),
            _ => value.to_owned(),
        })
    };
    LockChange {
        from: shown(&change.from),
        to: shown(&change.to),
        ..change
    }
}

fn flat<Name: fmt::Display>(
    tables: impl Iterator<Item = (Name, BTreeMap<String, String>)>,
) -> BTreeMap<String, String> {
    let entries = tables.flat_map(|(first, table)| {
        let entries = table.into_iter();
        entries.map(move |(name, value)| (format!("{first}/{name}"), value))
    });
    entries.collect()
}

fn compare(
    kind: &'static str,
    old: &BTreeMap<String, String>,
    new: &BTreeMap<String, String>,
) -> Vec<LockChange> {
    let change = |name: &String| {
        let value = |values: &BTreeMap<String, String>| values.get(name).cloned();
        LockChange::new(kind, name, value(old), value(new))
    };
    resolve::differing(old, new).map(change).collect()
}

#[cfg(test)]
mod tests {
    use super::super::CacheFile;
    use super::super::tests::example;
    use super::*;

    #[test]
    fn a_password_is_a_change_and_not_shown() {
        let (a, mut b) = (example(), example());
        let source = b.source.get_mut("therock").unwrap();
        let address = "https://me:secret@example.org/therock";
        source.git = Some(address.to_owned());
        for (name, value) in [("from", address), ("hf-token", "secret")] {
            b.params.insert(name.to_owned(), value.to_owned());
        }
        let found = changes(&a, &b);
        assert_eq!(found.len(), 3);
        assert!(!format!("{found:?}").contains("secret"), "{found:?}");
    }

    #[test]
    fn every_change_is_said_in_words() {
        let a = example();
        assert!(changes(&a, &a).is_empty());
        let mut b = example();
        b.observed.kernel = "7.0".to_owned();
        assert!(changes(&a, &b).is_empty());
        b.targets = vec!["gfx1201".to_owned()];
        b.params.clear();
        b.image.snapshot = None;
        b.image.packages.remove("zlib1g");
        for (name, version) in [("bash", "5.3-1 amd64"), ("gcc", "15-1 amd64")] {
            let packages = &mut b.image.packages;
            packages.insert(name.to_owned(), version.to_owned());
        }
        let source = b.source.get_mut("therock").unwrap();
        source.commit = Some("c".repeat(40));
        source.rev = None;
        let half = source.submodules.get_mut("base/half").unwrap();
        *half = "d".repeat(40);
        b.hooks.clear();
        let tarballs = b.files.get_mut("tarballs").unwrap();
        tarballs.insert("new.tgz".to_owned(), CacheFile::Sha256("7".repeat(64)));
        for step in &mut b.steps {
            step.key = format!("new {}", step.name).as_str().into();
        }
        let parts = &mut b.steps[0].parts;
        parts.insert("input therock".to_owned(), "0".repeat(12));
        assert_eq!(
            describe(&changes(&a, &b)),
            [
                "targets: gfx1103 -> gfx1201",
                "parameter jobs removed: 4",
                "image snapshot removed: 20260101T000000Z",
                "package bash: 5.2.37-2 amd64 -> 5.3-1 amd64",
                "package gcc added: 15-1 amd64",
                "package zlib1g removed: 1.3-1 amd64",
                "source therock: aaaaaaaaaaaa -> cccccccccccc",
                "source from therock: https://example.org/therock main -> https://example.org/therock",
                "submodule therock/base/half: bbbbbbbbbbbb -> dddddddddddd",
                "hook h removed: 444444444444",
                "file tarballs/new.tgz added: 777777777777",
                "step z-first: its input `therock` changed",
                "and the step after `z-first`: `a-second`",
            ]
        );
    }
}
