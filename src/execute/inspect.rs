//! Owns comparing two states of an env, for `snapshot diff`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::engine::docker::Service;
use crate::plan::record::Snapshot;
use crate::store::snapshot::no_snapshot;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Result, if_exists};
use crate::tree::{Method, listing, overlay};

/// What happened to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum ChangeKind {
    Added,
    Changed,
    Deleted,
}

impl ChangeKind {
    /// Returns the letter that other tools use.
    pub(crate) fn mark(self) -> char {
        match self {
            Self::Added => 'A',
            Self::Changed => 'C',
            Self::Deleted => 'D',
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct PathChange {
    pub kind: ChangeKind,
    /// Absolute path in the env.
    #[serde(with = "listing::path")]
    pub path: PathBuf,
}

/// Compares snapshot `from` with snapshot `to`, or with the env's current state; returns the paths in order.
///
/// Mounts the trees in a mount namespace of its own, which ends with the process.
pub(crate) fn diff(
    store: &Store,
    env: &mut LockedEnv<'_>,
    from: &str,
    to: Option<&str>,
) -> Result<Vec<PathChange>> {
    if let Some(service) = env.service()? {
        return diff_at(&service, env, from, to);
    }
    overlay::enter_mount_namespace()?;
    let before = frozen(store, env, from, "before")?;
    let after = match to {
        Some(name) => frozen(store, env, name, "after")?,
        None => live(store, env)?,
    };
    let mut changes = Vec::new();
    compare(&before, &after, Path::new("/"), &mut changes)?;
    Ok(changes)
}

/// Compares trees that a service stores.
fn diff_at(
    service: &Service,
    env: &LockedEnv<'_>,
    from: &str,
    to: Option<&str>,
) -> Result<Vec<PathChange>> {
    let list = |name: &str| env.list_image(service, Some(&snapshot(env, name)?.layer));
    let before = list(from)?;
    let after = match to {
        Some(name) => list(name)?,
        None => env.list_live(service)?,
    };
    let paths: BTreeSet<&PathBuf> = before.keys().chain(after.keys()).collect();
    let change = |path: &PathBuf| {
        let kind = match (before.get(path), after.get(path)) {
            (Some(_), None) => ChangeKind::Deleted,
            (None, Some(_)) => ChangeKind::Added,
            (old, new) if old != new => ChangeKind::Changed,
            _ => return None,
        };
        Some(PathChange {
            kind,
            path: path.clone(),
        })
    };
    // As for other engines, files in a deleted directory are not listed.
    let gone = |path: &PathBuf| {
        path.ancestors()
            .skip(1)
            .any(|above| before.contains_key(above) && !after.contains_key(above))
    };
    let changes = paths.into_iter().filter(|path| !gone(path));
    Ok(changes.filter_map(change).collect())
}

fn snapshot<'a>(env: &'a LockedEnv<'_>, name: &str) -> Result<&'a Snapshot> {
    let record = env.known_record()?;
    let found = record.snapshot(name);
    found.ok_or_else(|| no_snapshot(env.name(), record, name))
}

fn frozen(store: &Store, env: &LockedEnv<'_>, name: &str, at: &str) -> Result<PathBuf> {
    let record = env.known_record()?;
    let snapshot = snapshot(env, name)?;
    if store.method() != Method::Overlay {
        return Ok(store.layer_dir(&snapshot.layer).join("root"));
    }
    let place = env.run_dir().join(at);
    fs::create_dir_all(&place)?;
    overlay::mount(
        &store.lowers(Some(&snapshot.layer), &record.image_key)?,
        None,
        &place,
    )?;
    Ok(place)
}

fn live(store: &Store, env: &mut LockedEnv<'_>) -> Result<PathBuf> {
    let tree = env.live_tree()?;
    let directory = env.directory().join("trees").join(tree);
    if store.method() != Method::Overlay {
        return Ok(directory.join("root"));
    }
    let record = env.known_record()?;
    let mut lowers = vec![directory.join("diff")];
    lowers.extend(store.lowers(record.head.layer.as_ref(), &record.image_key)?);
    let place = env.run_dir().join("after");
    fs::create_dir_all(&place)?;
    overlay::mount(&lowers, None, &place)?;
    Ok(place)
}

fn entries(directory: &Path) -> Result<BTreeMap<OsString, std::fs::Metadata>> {
    let mut found = BTreeMap::new();
    for entry in if_exists(fs::read_dir(directory))?.into_iter().flatten() {
        let entry = entry?;
        found.insert(entry.file_name(), entry.metadata()?);
    }
    Ok(found)
}

fn compare(before: &Path, after: &Path, path: &Path, changes: &mut Vec<PathChange>) -> Result<()> {
    let (old, new) = (entries(before)?, entries(after)?);
    let mut names: Vec<_> = old.keys().chain(new.keys()).collect();
    names.sort_unstable();
    names.dedup();
    for name in names {
        let path = path.join(name);
        let add = |kind, changes: &mut Vec<PathChange>| {
            changes.push(PathChange {
                kind,
                path: path.clone(),
            });
        };
        match (old.get(name), new.get(name)) {
            (Some(_), None) => add(ChangeKind::Deleted, changes),
            (None, Some(found)) => {
                add(ChangeKind::Added, changes);
                if found.is_dir() {
                    // `before` has nothing of that name.
                    compare(&before.join(name), &after.join(name), &path, changes)?;
                }
            }
            (Some(a), Some(b)) if a.is_dir() && b.is_dir() => {
                if !same_attributes(a, b) {
                    add(ChangeKind::Changed, changes);
                }
                compare(&before.join(name), &after.join(name), &path, changes)?;
            }
            (Some(a), Some(b)) => {
                let same = same_attributes(a, b)
                    && a.size() == b.size()
                    && (a.mtime(), a.mtime_nsec()) == (b.mtime(), b.mtime_nsec())
                    && a.rdev() == b.rdev();
                if !same {
                    add(ChangeKind::Changed, changes);
                }
            }
            (None, None) => {}
        }
    }
    Ok(())
}

fn same_attributes(a: &std::fs::Metadata, b: &std::fs::Metadata) -> bool {
    (a.mode(), a.uid(), a.gid()) == (b.mode(), b.uid(), b.gid())
}
