//! Owns the lock file section of a report: the lock file that the env was built from, or the one beside its profile,
//! and the env's differences from it.

use sha2::{Digest as _, Sha256};

use super::Fact;
use crate::plan::lockfile::{self, Lockfile};
use crate::plan::resolve::Spec;
use crate::store::{Record, Store};
use crate::sys::error::Result;
use crate::ui::size;

/// Returns the facts about the lock file; empty without one.
pub(super) fn facts(store: &Store, record: &Record, spec: &Spec) -> Result<Vec<Fact>> {
    let beside = lockfile::place(&spec.origin, &spec.name);
    // The env was not built from this file, so an unreadable one is ignored.
    let beside = || lockfile::read(&beside).unwrap_or_default();
    let copy = store.locked_text(spec).and_then(|text| {
        let parsed = text.map(|text| lockfile::parse(&text, "the env's lock file"));
        parsed.transpose()
    });
    let (lock, followed) = match copy {
        Ok(Some(lock)) => (lock, true),
        Ok(None) => match beside() {
            Some(lock) => (lock, false),
            None => return Ok(Vec::new()),
        },
        // The rest of the report is still useful. The error itself would reveal a local path.
        Err(_) => {
            let lost = "the env's copy of its lock file is lost or damaged";
            return Ok(vec![Fact::new("lock file", lost)]);
        }
    };
    let mut facts = describe(&lock, followed)?;
    let mut drift = lockfile::built(&lock, spec, &record.image_key);
    if followed
        && let Some(newer) = beside()
        && newer != lock
    {
        drift.push("the lock file was rewritten after the env was built from it".to_owned());
    }
    match drift.is_empty() {
        true => facts.push(Fact::new("drifted", "nothing: the env matches it")),
        false => facts.extend(drift.into_iter().map(|said| Fact::new("drifted", said))),
    }
    Ok(facts)
}

fn describe(lock: &Lockfile, followed: bool) -> Result<Vec<Fact>> {
    let digest = hex::encode(Sha256::digest(lock.text()?));
    let seen = &lock.observed;
    let mut facts = vec![
        Fact::new("lock file", format!("sha256:{digest}")),
        Fact::new(
            "built from it",
            match followed {
                true => "yes",
                false => "no: the last `up` ran without `--locked`",
            },
        ),
        Fact::new(
            "locked",
            format!(
                "{} by rockenv {} with {}, kernel {}",
                seen.time.strftime("%Y-%m-%d %H:%M UTC"),
                seen.rockenv,
                seen.engine,
                seen.kernel
            ),
        ),
        Fact::new(
            "image",
            format!(
                "{}, {}, {}",
                lock.image.name,
                size::count(lock.image.packages.len(), "package"),
                lock.image.digest
            ),
        ),
    ];
    facts.extend(lock.source.iter().map(|(name, source)| {
        let below = match source.submodules.len() {
            0 => String::new(),
            count => format!(", {}", size::count(count, "submodule")),
        };
        Fact::new(
            format!("source {name}"),
            format!("{}{below}", source.fingerprint()),
        )
    }));
    Ok(facts)
}
