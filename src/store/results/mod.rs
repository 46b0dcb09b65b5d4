//! Owns step results in output volumes, which are not part of any snapshot: a step's layer has a copy,
//! `results/<volume>`, and every env with that layer gets it.
//!
//! Anything else in an output directory belongs to somebody else. Links are kept as text and never followed.

mod stale;
mod step_results;
mod unfinished;

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::AsFd as _;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;

pub(crate) use step_results::{StepResults, VolumeResults, refuse_special};
pub(crate) use unfinished::OutputBefore;

use super::Store;
use crate::plan::ids::LayerId;
use crate::plan::resolve::{Action, Spec, Volume, VolumeKind, VolumeSource};
use crate::store::export;
use crate::store::path_volumes::real_path;
use crate::sys::account::{self, Existing, Rights};
use crate::sys::error::{Error, Result};
use crate::tree::file;
use crate::tree::listing::{Content, Listing, ListingEntry, PathState, path_state};
use crate::tree::writer::Writer;

/// The results in one output volume, of several steps.
#[derive(Clone, Debug, Default)]
pub struct Results {
    /// The combined listing.
    pub listing: Listing,
    /// The layer that has each of them.
    layers: BTreeMap<PathBuf, LayerId>,
}

/// How an output directory differs from a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResultState {
    /// Not at all.
    Same,
    /// It is missing.
    Missing,
    /// Something on the way to it is not a directory.
    Blocked,
    /// It has the same content, but is not the expected hard link.
    Unlinked,
    /// It has other permissions, as a phrase.
    Mode(String),
    /// Something else is there, as a phrase.
    Other(String),
}

impl ResultState {
    /// Returns the difference as a phrase.
    pub fn words(&self) -> Option<&str> {
        match self {
            Self::Same => None,
            Self::Missing => Some("is missing"),
            Self::Blocked => Some("is behind a link or a file"),
            Self::Unlinked => Some("is no longer a hard link to the same file"),
            Self::Mode(what) | Self::Other(what) => Some(what),
        }
    }
}

/// A result that an env's output lacks, or has in another state.
#[derive(Clone, Debug)]
pub struct Difference {
    pub volume: String,
    /// The path below it.
    pub path: PathBuf,
    /// The layer that has the result.
    pub layer: LayerId,
    /// What was found.
    pub state: ResultState,
}

/// A result that could not be restored because another file is there.
#[derive(Clone, Debug)]
pub struct BlockedResult {
    pub volume: String,
    /// The volume is the env's own; several envs may share a user's directory.
    pub in_store: bool,
    /// The existing file.
    pub path: PathBuf,
    /// The step whose result is blocked.
    pub step: String,
    /// That step is an export, which does not write over the file if it runs again.
    pub is_export: bool,
}

impl BlockedResult {
    /// Says so. The file may have been changed, or be one that a removed env or another one has left.
    pub fn message(&self) -> String {
        format!("{} is not as step `{}` left it", self.place(), self.step)
    }

    /// Returns whether both are in the same place.
    pub fn is_same(&self, other: &Self) -> bool {
        (&self.volume, &self.path) == (&other.volume, &other.path)
    }

    /// Names the file.
    pub fn place(&self) -> String {
        format!(
            "`{}` in output volume `{}`",
            self.path.display(),
            self.volume
        )
    }
}

/// A result to write.
#[derive(Debug)]
struct Item {
    path: PathBuf,
    entry: ListingEntry,
    layer: LayerId,
    /// The existing entry is a result too, and is replaced.
    replaces: bool,
    /// The same for the content of the existing directory, innermost first.
    clears: Vec<(PathBuf, bool)>,
}

/// Everything to write to one output volume.
#[derive(Debug)]
struct VolumeRestore {
    volume: String,
    directory: PathBuf,
    items: Vec<Item>,
    /// All its results.
    listing: Listing,
}

/// Everything to do about results that an env's output lacks.
#[derive(Debug, Default)]
pub struct RestorePlan {
    volumes: Vec<VolumeRestore>,
    /// Results that cannot be restored.
    pub blocked: Vec<BlockedResult>,
}

impl RestorePlan {
    /// Returns the layers that have the results to write.
    pub fn layers(&self) -> BTreeSet<LayerId> {
        let items = self.volumes.iter().flat_map(|volume| &volume.items);
        items.map(|item| item.layer.clone()).collect()
    }
}

/// Returns the output volumes of an env.
pub(crate) fn outputs(spec: &Spec) -> impl Iterator<Item = &Volume> {
    let volumes = spec.volumes.iter();
    volumes.filter(|volume| volume.kind == VolumeKind::Output)
}

impl Store {
    /// Returns the directory of an output volume. Refuses one that a step may have put a link in place of.
    pub fn output_dir(&self, spec: &Spec, volume: &Volume) -> Result<PathBuf> {
        match &volume.source {
            VolumeSource::Path(path) => real_path(spec, path).map(|_| path.clone()),
            VolumeSource::Git(_) | VolumeSource::Store => {
                let outputs = self.root.join("outputs");
                Ok(outputs.join(&spec.name).join(&volume.name))
            }
        }
    }

    /// Returns a layer's directory of results, which has a directory for each output volume.
    pub fn results_dir(&self, layer: &LayerId) -> PathBuf {
        self.layer_dir(layer).join("results")
    }

    /// Returns the results of the steps up to a layer, by output volume. If several steps wrote a file, the last
    /// one's.
    pub fn results(&self, top: &LayerId, spec: &Spec) -> Result<BTreeMap<String, Results>> {
        let mut found: BTreeMap<String, Results> = outputs(spec)
            .map(|volume| (volume.name.clone(), Results::default()))
            .collect();
        for layer in self.chain(top)?.into_iter().rev() {
            let mut left = StepResults::read(&self.results_dir(&layer.id))?;
            for (volume, results) in &mut found {
                let VolumeResults {
                    entries, removed, ..
                } = left.take(volume);
                for path in &removed.0 {
                    results.listing.remove(path);
                }
                let paths = entries.entries.keys();
                let paths = paths.map(|path| (path.clone(), layer.id.clone()));
                results.layers.extend(paths);
                results.listing.extend(entries);
            }
        }
        Ok(found)
    }

    /// Compares an env's output volumes with the results of the steps up to a layer. `exactly`: by content, even if
    /// size and time are the same.
    pub fn differences(
        &self,
        top: &LayerId,
        spec: &Spec,
        exactly: bool,
    ) -> Result<Vec<Difference>> {
        let mut differences = Vec::new();
        for (volume, results) in self.results(top, spec)? {
            let Some(directory) = spec.volume(&volume) else {
                continue;
            };
            let directory = self.output_dir(spec, directory)?;
            for (path, entry, layer) in results.entries() {
                let state = compare(entry, &directory, path, exactly)?;
                if state != ResultState::Same {
                    differences.push(Difference {
                        volume: volume.clone(),
                        path: path.to_owned(),
                        layer: layer.clone(),
                        state,
                    });
                }
            }
        }
        Ok(differences)
    }

    /// Decides which results of the steps up to a layer go to the env's output. An existing file is replaced if one
    /// of `known`, layers of the same env, has it, or one below them; else it is in the way.
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
            let directory = self.output_dir(spec, volume)?;
            let mut comparison = VolumeComparison {
                ours: self.ours(&name, &known)?,
                directory,
                items: Vec::new(),
                stays: BTreeSet::new(),
                blocked: None,
            };
            for (path, entry, layer) in results.entries() {
                comparison.decide(path, entry, layer.clone())?;
            }
            for path in comparison.stays {
                let layer = &results.layers[&path];
                plan.blocked.push(BlockedResult {
                    step: self.title_of(layer, spec),
                    is_export: self.is_of_export(layer, spec),
                    volume: name.clone(),
                    in_store: volume.source == VolumeSource::Store,
                    path,
                });
            }
            if !comparison.items.is_empty() {
                plan.volumes.push(VolumeRestore {
                    volume: name,
                    directory: comparison.directory,
                    items: comparison.items,
                    listing: results.listing,
                });
            }
        }
        Ok(plan)
    }

    /// Returns whether a result of the steps up to a layer is still blocked, by content.
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

    /// Returns each layer's listing of an output volume.
    fn ours(&self, volume: &str, layers: &BTreeSet<LayerId>) -> Result<Vec<Listing>> {
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

    /// Restores results.
    pub fn restore_results(&self, plan: RestorePlan, spec: &Spec) -> Result<()> {
        for volume in plan.volumes {
            let directory = &volume.directory;
            if let Some(volume) = spec.volume(&volume.volume) {
                self.output_dir(spec, volume)?;
            }
            let mut parts = directory.components();
            let in_store = directory.starts_with(&self.root)
                && !parts.any(|part| part == Component::ParentDir);
            let mut writer = match account::caller() {
                // In a user's own directory, root must not write with more rights than that user has.
                rights @ Rights::Of(..) if !in_store => {
                    account::make_directories(rights, directory).map_err(Error::of_profile)?;
                    Writer::for_caller(directory, None, true).map_err(Error::of_profile)?
                }
                Rights::Own | Rights::Of(..) => output_writer(directory, spec)?,
            };
            for item in &volume.items {
                // The parent directory keeps the time that the step gave it.
                let above = item.path.parent().unwrap_or(Path::new(""));
                if let Some(entry) = volume.listing.entries.get(above)
                    && compare(entry, directory, above, false)? == ResultState::Same
                {
                    writer.put(above, entry, None, Existing::Refuse)?;
                }
                self.restore_result(&volume.volume, item, &mut writer)?;
            }
            writer.finish()?;
        }
        Ok(())
    }

    fn restore_result(&self, volume: &str, item: &Item, writer: &mut Writer) -> Result<()> {
        for (path, is_directory) in &item.clears {
            writer.remove(path, *is_directory)?;
        }
        let existing = match item.replaces {
            true => Existing::Replace,
            false => Existing::Refuse,
        };
        let (path, entry) = (&item.path, &item.entry);
        match &entry.content {
            Content::File {
                hardlink: Some(first),
                ..
            } => writer.link(path, first, existing),
            Content::File { .. } => {
                let results = self.results_dir(&item.layer);
                let kept = Path::new(volume).join(path);
                let from = file::open(&results, &kept)?.ok_or_else(|| {
                    not_found!("`{}` is missing", results.join(&kept).display())
                        .help("rockenv fsck")
                })?;
                writer.put(path, entry, Some(from.as_fd()), existing)
            }
            Content::Directory { .. } | Content::Symlink { .. } | Content::Special(_) => {
                writer.put(path, entry, None, existing)
            }
        }
    }

    /// Returns the name of a layer's step, for messages: another env, which made it, may have another one.
    pub fn title_of(&self, layer: &LayerId, spec: &Spec) -> String {
        let Some(layer) = self.layer(layer).ok().flatten() else {
            return String::new();
        };
        let mut steps = spec.steps.iter();
        let step = steps.find(|step| layer.key.as_ref() == Some(&step.key));
        step.map_or(layer.title, |step| step.name.to_string())
    }

    /// Returns whether a layer is of an export step.
    fn is_of_export(&self, layer: &LayerId, spec: &Spec) -> bool {
        let layer = self.layer(layer).ok().flatten();
        let key = layer.and_then(|layer| layer.key);
        let mut steps = spec
            .steps
            .iter()
            .filter(|step| key.as_ref() == Some(&step.key));
        steps.any(|step| matches!(step.action, Action::Export(_)))
    }
}

impl Results {
    /// Returns what was left, with the layer that has it.
    fn entries(&self) -> impl Iterator<Item = (&Path, &ListingEntry, &LayerId)> {
        let entries = self.listing.entries.iter();
        entries.map(|(path, entry)| (path.as_path(), entry, &self.layers[path]))
    }
}

/// Decides about the results in one output volume, each directory before its content.
struct VolumeComparison {
    directory: PathBuf,
    /// Listings of layers of the same env.
    ours: Vec<Listing>,
    items: Vec<Item>,
    /// Results whose place is taken by a file that stays.
    stays: BTreeSet<PathBuf>,
    /// The last of those, below which nothing can be written.
    blocked: Option<PathBuf>,
}

impl VolumeComparison {
    fn decide(&mut self, path: &Path, entry: &ListingEntry, layer: LayerId) -> Result<()> {
        if let Some(above) = &self.blocked
            && path.starts_with(above)
        {
            return Ok(());
        }
        let exactly = self.has_a_double(path, entry);
        let state = compare(entry, &self.directory, path, exactly)?;
        let mut item = Item {
            path: path.to_owned(),
            entry: entry.clone(),
            layer,
            replaces: false,
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
            ResultState::Unlinked => item.replaces = true,
            // The blocking entry goes first.
            ResultState::Blocked
                if self.items.iter().any(|above| path.starts_with(&above.path)) => {}
            ResultState::Mode(_) | ResultState::Other(_)
                if self.is_ours(path, entry, &mut item.clears)? =>
            {
                item.replaces = item.clears.is_empty();
            }
            // The difference does no harm, and `status --check` reports it.
            ResultState::Mode(_) if entry.is_directory() => return Ok(()),
            ResultState::Blocked | ResultState::Mode(_) | ResultState::Other(_) => {
                self.blocked = Some(item.path.clone());
                self.stays.insert(item.path);
                return Ok(());
            }
        }
        self.items.push(item);
        Ok(())
    }

    /// Returns whether the entry at a path is a result too, and what must be removed before `entry` can be there.
    fn is_ours(
        &self,
        path: &Path,
        entry: &ListingEntry,
        clears: &mut Vec<(PathBuf, bool)>,
    ) -> Result<bool> {
        let PathState::Taken(there) = path_state(&self.directory, path)? else {
            return Ok(false);
        };
        if !self.has(path)? {
            return Ok(false);
        }
        if there.is_directory() == entry.is_directory() {
            return Ok(true);
        }
        if there.is_directory() {
            let inside = Listing::of(&self.directory.join(path))?.entries;
            for (below, entry) in inside.iter().rev() {
                let below = path.join(below);
                if !self.has(&below)? {
                    return Ok(false);
                }
                clears.push((below, entry.is_directory()));
            }
        }
        clears.push((path.to_owned(), there.is_directory()));
        Ok(true)
    }

    /// Returns whether a layer of the env has another file of that size and time: not every tool sets a new time.
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

    /// Returns whether a layer of the env has the entry at a path. By content, because it may be replaced then.
    fn has(&self, path: &Path) -> Result<bool> {
        for ours in &self.ours {
            if let Some(entry) = ours.entries.get(path) {
                match compare(entry, &self.directory, path, true)? {
                    ResultState::Same | ResultState::Unlinked => return Ok(true),
                    ResultState::Missing
                    | ResultState::Blocked
                    | ResultState::Mode(_)
                    | ResultState::Other(_) => {}
                }
            }
        }
        Ok(false)
    }
}

/// Compares the entry at a path below a directory with a result. `exactly`: a file's content, even if size and time
/// are the same.
pub(crate) fn compare(
    entry: &ListingEntry,
    directory: &Path,
    path: &Path,
    exactly: bool,
) -> Result<ResultState> {
    let there = match path_state(directory, path)? {
        PathState::Free => return Ok(ResultState::Missing),
        PathState::Blocked => return Ok(ResultState::Blocked),
        PathState::Taken(there) => there,
    };
    let (sha256, hardlink) = match (&entry.content, &there.content) {
        (Content::File { size, .. }, Content::File { size: found, .. }) if size != found => {
            return Ok(ResultState::Other("has different content".to_owned()));
        }
        (
            Content::File {
                sha256, hardlink, ..
            },
            Content::File { .. },
        ) => (sha256, hardlink),
        (Content::Directory { .. }, Content::Directory { .. }) => (&None, &None),
        (Content::Symlink { target }, Content::Symlink { target: found }) => {
            return Ok(match target == found {
                true => ResultState::Same,
                false => ResultState::Other(format!(
                    "links to `{}`, not to `{}`",
                    found.display(),
                    target.display()
                )),
            });
        }
        (_, found) => {
            let (found, wanted) = (found.name(), entry.content.name());
            return Ok(ResultState::Other(format!("is {found}, not {wanted}")));
        }
    };
    let is_file = matches!(entry.content, Content::File { .. });
    if is_file && (exactly || entry.mtime != there.mtime) {
        // Older versions recorded no digest, so the time must do.
        let same = match sha256 {
            Some(sha256) => export::digest(directory, path)? == *sha256,
            None => entry.mtime == there.mtime,
        };
        if !same {
            return Ok(ResultState::Other("has different content".to_owned()));
        }
    }
    if entry.mode != there.mode {
        let (found, wanted) = (there.mode, entry.mode);
        return Ok(ResultState::Mode(format!(
            "has mode {found:04o}, not {wanted:04o}"
        )));
    }
    match hardlink {
        Some(first) => match path_state(directory, first)? {
            PathState::Taken(first) if first.is_same_file(&there) => Ok(ResultState::Same),
            PathState::Taken(_) | PathState::Free | PathState::Blocked => Ok(ResultState::Unlinked),
        },
        None => Ok(ResultState::Same),
    }
}

/// Opens an output directory, made if it is missing.
fn output_writer(directory: &Path, spec: &Spec) -> Result<Writer> {
    if directory.exists() {
        return Writer::open(directory, export::owner(directory)?, true);
    }
    fs::create_dir_all(directory)?;
    let owner = export::owner(directory)?.and(Some((spec.user.uid, spec.user.gid)));
    export::set_owner(fs::File::open(directory)?.file(), owner)?;
    Writer::open(directory, owner, true)
}

#[cfg(test)]
mod tests;
