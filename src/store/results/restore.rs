//! Owns restoring step results to output volumes: which results to write, which files block them, and writing them.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::path::{Component, Path, PathBuf};

use super::{ResultState, StepResults, check_mounted, compare, output_writer, outputs};
use crate::plan::ids::LayerId;
use crate::plan::resolve::{Action, Spec, VolumeSource};
use crate::store::Store;
use crate::sys::account::{self, Existing, Rights};
use crate::sys::error::{Error, Result};
use crate::tree::file;
use crate::tree::listing::{Content, Listing, ListingEntry};
use crate::tree::writer::Writer;

/// A result that could not be restored because another file is there.
#[derive(Clone, Debug)]
pub struct BlockedResult {
    pub volume: String,
    /// The volume is the env's own; several envs may share a user's directory.
    pub in_store: bool,
    pub path: PathBuf,
    /// The step whose result is blocked.
    pub step: String,
    /// That step is an export, which does not overwrite the file if it runs again.
    pub is_export: bool,
}

impl BlockedResult {
    /// Describes the problem. The file may have been changed, or another env, even a removed one, may have left it.
    pub fn message(&self) -> String {
        format!("{} is not as step `{}` left it", self.place(), self.step)
    }

    /// Returns whether both are at the same path.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.volume, &self.path) == (&other.volume, &other.path)
    }

    pub fn place(&self) -> String {
        format!(
            "`{}` in output volume `{}`",
            self.path.display(),
            self.volume
        )
    }
}

#[derive(Debug)]
struct Item {
    path: PathBuf,
    entry: ListingEntry,
    layer: LayerId,
    /// The existing entry, which is a result too, and is replaced.
    replaces: Option<ListingEntry>,
    /// Results to remove from the existing directory, innermost first.
    clears: Vec<(PathBuf, ListingEntry)>,
}

/// Everything to write to one output volume.
#[derive(Debug, Default)]
struct VolumeRestore {
    volume: String,
    directory: PathBuf,
    /// All its results.
    listing: Listing,
    /// Listings of layers of the same env.
    ours: Vec<Listing>,
    items: Vec<Item>,
    /// Results whose place is taken by a file that stays.
    stays: BTreeSet<PathBuf>,
}

/// The work to restore results that an env's output lacks.
#[derive(Debug, Default)]
pub struct RestorePlan {
    volumes: Vec<VolumeRestore>,
    pub blocked: Vec<BlockedResult>,
}

impl RestorePlan {
    pub fn layers(&self) -> BTreeSet<LayerId> {
        let items = self.volumes.iter().flat_map(|volume| &volume.items);
        items.map(|item| item.layer.clone()).collect()
    }
}

impl Store {
    /// Decides which results of the steps up to a layer go to the env's output. An existing file is replaced if it is
    /// a result of a layer in `known`, which are layers of the same env, or of one below them. Any other file blocks
    /// the result.
    pub fn plan_restore(
        &self,
        top: &LayerId,
        spec: &Spec,
        known: &[LayerId],
    ) -> Result<RestorePlan> {
        let mut plan = RestorePlan::default();
        if outputs(spec).next().is_none() {
            return Ok(plan);
        }
        let known = self.with_those_below(known);
        for (name, results) in self.results(top, spec)? {
            let Some(volume) = spec.volume(&name) else {
                continue;
            };
            let mut restore = VolumeRestore {
                directory: self.output_dir(spec, volume)?,
                ours: self.ours(&name, &known)?,
                ..VolumeRestore::default()
            };
            for (path, entry, layer) in results.entries() {
                restore.decide(path, entry, layer.clone())?;
            }
            for path in std::mem::take(&mut restore.stays) {
                let layer = &results.layers[&path];
                plan.blocked.push(BlockedResult {
                    step: self.title_of(layer, spec),
                    is_export: self.is_of_export(layer, spec),
                    volume: name.clone(),
                    in_store: volume.source == VolumeSource::Store,
                    path,
                });
            }
            if !restore.items.is_empty() {
                (restore.volume, restore.listing) = (name, results.listing);
                plan.volumes.push(restore);
            }
        }
        Ok(plan)
    }

    /// Returns whether a result of the steps up to a layer is still blocked. Compares content.
    pub fn is_blocked(&self, top: &LayerId, spec: &Spec, result: &BlockedResult) -> Result<bool> {
        let found = self.results(top, spec)?.remove(&result.volume);
        let listing = found.map(|found| found.listing).unwrap_or_default();
        match (
            listing.entries.get(&result.path),
            spec.volume(&result.volume),
        ) {
            (Some(entry), Some(volume)) => {
                let directory = self.output_dir(spec, volume)?;
                Ok(compare(entry, &directory, &result.path, true)? != ResultState::Same)
            }
            _ => Ok(false),
        }
    }

    /// Returns each layer's listing of an output volume, without entries that may not be the step's own.
    pub(super) fn ours(&self, volume: &str, layers: &BTreeSet<LayerId>) -> Result<Vec<Listing>> {
        let mut found = Vec::new();
        for layer in layers {
            let mut left = StepResults::read(&self.results_dir(layer))?.take(volume);
            for path in &left.unsure.0 {
                left.entries.entries.remove(path);
            }
            found.push(left.entries);
        }
        Ok(found)
    }

    pub fn restore_results(&self, plan: RestorePlan, spec: &Spec) -> Result<()> {
        for volume in plan.volumes {
            let directory = &volume.directory;
            if let Some(volume) = spec.volume(&volume.volume) {
                self.output_dir(spec, volume)?;
            }
            let mut parts = directory.components();
            let in_store = directory.starts_with(&self.root)
                && !parts.any(|part| part == Component::ParentDir);
            if !in_store {
                check_mounted(directory, &volume.volume)?;
            }
            let mut writer = match account::caller() {
                // In a user's own directory, root must not write with more rights than that user has.
                rights @ Rights::Of(..) if !in_store => {
                    account::make_directories(rights, directory).map_err(Error::of_profile)?;
                    Writer::for_caller(directory).map_err(Error::of_profile)?
                }
                Rights::Own | Rights::Of(..) => output_writer(directory, spec)?,
            };
            let outcome = volume.items.iter().try_for_each(|item| {
                keep_time_above(&item.path, directory, &volume.listing, &mut writer)?;
                self.restore_result(&volume, item, &mut writer)
            });
            // Even after an error, the directories made so far get their modes: no later restore sets them.
            outcome.and(writer.finish())?;
        }
        Ok(())
    }

    fn restore_result(
        &self,
        volume: &VolumeRestore,
        item: &Item,
        writer: &mut Writer,
    ) -> Result<()> {
        let (path, entry) = (&item.path, &item.entry);
        for (path, old) in &item.clears {
            is_still(old, &volume.directory, path)?;
            writer.remove(path, old.is_directory())?;
        }
        let existing = match &item.replaces {
            Some(old) => {
                is_still(old, &volume.directory, path)?;
                Existing::Replace
            }
            None => Existing::Refuse,
        };
        match &entry.content {
            Content::File { hardlink, .. } => {
                let results = self.results_dir(&item.layer);
                let kept = Path::new(&volume.volume).join(path);
                let from = file::open(&results, &kept)?.ok_or_else(|| {
                    not_found!("`{}` is missing", results.join(&kept).display())
                        .help("rockenv fsck")
                })?;
                writer.link_or_put(path, entry, hardlink.as_deref(), from.as_fd(), existing)
            }
            Content::Directory { .. } | Content::Symlink { .. } | Content::Special(_) => {
                writer.put(path, entry, None, existing)
            }
        }
    }

    fn is_of_export(&self, layer: &LayerId, spec: &Spec) -> bool {
        let layer = self.layer(layer).ok().flatten();
        let key = layer.and_then(|layer| layer.key);
        let steps = spec.steps.iter();
        let mut steps = steps.filter(|step| key.as_ref() == Some(&step.key));
        steps.any(|step| matches!(step.action, Action::Export(_)))
    }
}

/// Lets the directory above a path keep the time that the step gave it.
pub(super) fn keep_time_above(
    path: &Path,
    directory: &Path,
    results: &Listing,
    writer: &mut Writer,
) -> Result<()> {
    let above = path.parent().unwrap_or(Path::new(""));
    match results.entries.get(above) {
        Some(entry) if compare(entry, directory, above, false)? == ResultState::Same => {
            writer.put(above, entry, None, Existing::Refuse)
        }
        _ => Ok(()),
    }
}

/// Refuses to remove or replace an entry that is no longer the result `old`, as it was when the restore was planned:
/// the files before it may have taken minutes.
fn is_still(old: &ListingEntry, directory: &Path, path: &Path) -> Result<()> {
    match compare(old, directory, path, false)?.is_there() {
        true => Ok(()),
        false => Err(busy!(
            "`{}` changed while results were restored; leaving it as it is",
            directory.join(path).display()
        )
        .help("run the command again")),
    }
}

impl VolumeRestore {
    /// Decides about a result. Results come in the order of their paths: a directory before its content.
    fn decide(&mut self, path: &Path, entry: &ListingEntry, layer: LayerId) -> Result<()> {
        // Nothing can be written below a file that stays.
        let above = self.stays.last();
        if above.is_some_and(|above| path.starts_with(above)) {
            return Ok(());
        }
        let exactly = self.has_a_double(path, entry);
        let state = compare(entry, &self.directory, path, exactly)?;
        let mut item = Item {
            path: path.to_owned(),
            entry: entry.clone(),
            layer,
            replaces: None,
            clears: Vec::new(),
        };
        if let Content::File { hardlink, .. } = &mut item.entry.content
            && hardlink
                .take_if(|first| self.stays.contains(first))
                .is_some()
            && state == ResultState::Unlinked
        {
            return Ok(());
        }
        match state {
            ResultState::Same => return Ok(()),
            ResultState::Missing => {}
            ResultState::Unlinked => item.replaces = Some(entry.clone()),
            // An earlier item replaces the blocking entry.
            ResultState::Blocked
                if self.items.iter().any(|above| path.starts_with(&above.path)) => {}
            ResultState::Mode(_) | ResultState::Other(_)
                if let Some(old) = self.ours_at(path, entry, &mut item.clears)? =>
            {
                item.replaces = item.clears.is_empty().then_some(old);
            }
            // The difference does no harm, and `status --check` reports it.
            ResultState::Mode(_) if entry.is_directory() => return Ok(()),
            ResultState::Blocked | ResultState::Mode(_) | ResultState::Other(_) => {
                self.stays.insert(item.path);
                return Ok(());
            }
        }
        self.items.push(item);
        Ok(())
    }

    /// Returns the entry at a path if it is a result too. Adds entries that must be removed before `entry` to `clears`.
    fn ours_at(
        &self,
        path: &Path,
        entry: &ListingEntry,
        clears: &mut Vec<(PathBuf, ListingEntry)>,
    ) -> Result<Option<ListingEntry>> {
        let Some(old) = self.found(path)? else {
            return Ok(None);
        };
        if old.is_directory() == entry.is_directory() {
            return Ok(Some(old));
        }
        if old.is_directory() {
            let inside = Listing::of(&self.directory.join(path))?.entries;
            for below in inside.into_keys().rev() {
                let below = path.join(below);
                let Some(old) = self.found(&below)? else {
                    return Ok(None);
                };
                clears.push((below, old));
            }
        }
        clears.push((path.to_owned(), old.clone()));
        Ok(Some(old))
    }

    /// Returns whether a layer of the env has another file of the same size and time: not every tool sets a new time.
    fn has_a_double(&self, path: &Path, entry: &ListingEntry) -> bool {
        let others = self.ours.iter().filter_map(|ours| ours.entries.get(path));
        let mut others = others.filter(|other| other.mtime == entry.mtime);
        others.any(|other| match (&other.content, &entry.content) {
            (
                Content::File {
                    size: a, sha256: x, ..
                },
                Content::File {
                    size: b, sha256: y, ..
                },
            ) => a == b && x != y,
            _ => false,
        })
    }

    /// Returns the entry at a path if a layer of the env has it. Compares content, because the entry may be replaced.
    fn found(&self, path: &Path) -> Result<Option<ListingEntry>> {
        for ours in &self.ours {
            if let Some(entry) = ours.entries.get(path)
                && compare(entry, &self.directory, path, true)?.is_there()
            {
                return Ok(Some(entry.clone()));
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;
    use crate::plan::resolve;
    use crate::sys::error::Kind;

    #[test]
    fn nothing_is_restored_where_no_disk_is_mounted() {
        let (_home, store) = Store::scratch();
        let text = "schema = 1\nimage = 'debian'\n[[step]]\nname = 'one'\nrun = 'true'\n";
        let profile = crate::profile::from_text("p", text).unwrap();
        let spec = resolve::resolve(&profile, &resolve::tests_inputs()).unwrap();
        let volume = VolumeRestore {
            volume: "out".to_owned(),
            directory: "/media/no-such-disk/out".into(),
            ..VolumeRestore::default()
        };
        let plan = RestorePlan {
            volumes: vec![volume],
            blocked: Vec::new(),
        };
        let error = store.restore_results(plan, &spec).unwrap_err();
        assert_has!(error.message(), "the disk of volume `out` at ");
        assert!(!Path::new("/media/no-such-disk").exists());
    }

    #[test]
    fn what_changes_after_the_decision_stays() {
        let (_home, store) = Store::scratch();
        let directory = tempfile::tempdir().unwrap();
        let [out, new] = ["out", "new"].map(|name| directory.path().join(name));
        fs::create_dir_all(out.join("cleared")).unwrap();
        fs::create_dir(&new).unwrap();
        for (path, text) in [
            ("out/replaced", "old"),
            ("out/cleared/file", "old"),
            ("new/replaced", "newer"),
            ("new/cleared", "newer"),
        ] {
            fs::write(directory.path().join(path), text).unwrap();
        }
        let mut restore = VolumeRestore {
            volume: "out".to_owned(),
            directory: out.clone(),
            ours: vec![Listing::of(&out).unwrap()],
            ..VolumeRestore::default()
        };
        for (path, entry) in &Listing::of(&new).unwrap().entries {
            let layer = "layer".parse().unwrap();
            restore.decide(path, entry, layer).unwrap();
        }
        assert!(restore.stays.is_empty());
        assert_eq!(restore.items.len(), 2);
        for path in ["replaced", "cleared/file"] {
            fs::write(out.join(path), "mine, newest").unwrap();
        }
        let mut writer = Writer::open(&out, false).unwrap();
        for item in &restore.items {
            let error = store.restore_result(&restore, item, &mut writer);
            assert_eq!(error.unwrap_err().kind(), Kind::Busy);
        }
        for path in ["replaced", "cleared/file"] {
            let text = fs::read_to_string(out.join(path)).unwrap();
            assert_eq!(text, "mine, newest");
        }
    }
}
