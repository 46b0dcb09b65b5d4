//! Owns comparing two states of an env, for `snapshot diff`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::Serialize;

use crate::engine::docker::{ArchiveEntry, Service};
use crate::plan::record::Snapshot;
use crate::store::snapshot::no_snapshot;
use crate::store::{LockedEnv, Store};
use crate::sys::error::Result;
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
    compare(Some(&before), &after, Path::new("/"), &mut changes)?;
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
    // As for other engines, files in a deleted or replaced directory are not listed.
    let is_directory = |entry: &ArchiveEntry| entry.kind == tar::EntryType::Directory.as_byte();
    let gone = |path: &PathBuf| {
        path.ancestors()
            .skip(1)
            .any(|above| before.contains_key(above) && !after.get(above).is_some_and(is_directory))
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
    let lowers = store.lowers(Some(&snapshot.layer), &record.image_key)?;
    mounted(&lowers, env.run_dir().join(at))
}

fn mounted(lowers: &[PathBuf], place: PathBuf) -> Result<PathBuf> {
    fs::create_dir_all(&place)?;
    overlay::mount(lowers, None, &place)?;
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
    mounted(&lowers, env.run_dir().join("after"))
}

fn entries(directory: &Path) -> Result<BTreeMap<OsString, Metadata>> {
    let entries = fs::read_dir(directory)?.map(|entry| {
        let entry = entry?;
        Ok((entry.file_name(), entry.metadata()?))
    });
    entries.collect()
}

/// Adds the changes below the directory `path`; without `before`, all of it is new.
fn compare(
    before: Option<&Path>,
    after: &Path,
    path: &Path,
    changes: &mut Vec<PathChange>,
) -> Result<()> {
    let old = before.map(entries).transpose()?.unwrap_or_default();
    let new = entries(after)?;
    let names: BTreeSet<_> = old.keys().chain(new.keys()).collect();
    for name in names {
        let (old, new) = (old.get(name), new.get(name));
        let kind = match (old, new) {
            (_, None) => Some(ChangeKind::Deleted),
            (None, Some(_)) => Some(ChangeKind::Added),
            (Some(old), Some(new)) => (!is_same(old, new)).then_some(ChangeKind::Changed),
        };
        let path = path.join(name);
        if let Some(kind) = kind {
            let path = path.clone();
            changes.push(PathChange { kind, path });
        }
        if new.is_some_and(Metadata::is_dir) {
            let below = before.filter(|_| old.is_some_and(Metadata::is_dir));
            let below = below.map(|below| below.join(name));
            compare(below.as_deref(), &after.join(name), &path, changes)?;
        }
    }
    Ok(())
}

fn is_same(a: &Metadata, b: &Metadata) -> bool {
    let content = |of: &Metadata| (of.size(), of.mtime(), of.mtime_nsec(), of.rdev());
    (a.mode(), a.uid(), a.gid()) == (b.mode(), b.uid(), b.gid())
        && (a.is_dir() || content(a) == content(b))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_in_the_place_of_a_file_has_new_files() {
        let directory = tempfile::tempdir().unwrap();
        let [before, after] = ["before", "after"].map(|name| directory.path().join(name));
        for path in ["before/to-file/d", "after/from-file", "after/from-link"] {
            fs::create_dir_all(directory.path().join(path)).unwrap();
        }
        for path in ["before/from-file", "after/from-file/new", "after/to-file"] {
            fs::write(directory.path().join(path), "").unwrap();
        }
        fs_err::os::unix::fs::symlink(directory.path(), before.join("from-link")).unwrap();
        let mut changes = Vec::new();
        compare(Some(&before), &after, Path::new("/"), &mut changes).unwrap();
        let shown = changes.iter().map(|change| {
            let path = change.path.display();
            format!("{} {path}\n", change.kind.mark())
        });
        let wanted = "C /from-file\nA /from-file/new\nC /from-link\nC /to-file\n";
        assert_eq!(shown.collect::<String>(), wanted);
    }
}
