//! Owns step results in output volumes, which are not part of any snapshot: a step's layer has a copy,
//! `results/<volume>`, and every env with that layer gets it.
//!
//! Other files in an output directory are not rockenv's. Links are kept as text and never followed.

mod restore;
mod stale;
mod step_results;
mod unfinished;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fs_err as fs;

pub(crate) use restore::BlockedResult;
pub(crate) use step_results::{StepResults, VolumeResults, refuse_special};
pub(crate) use unfinished::OutputBefore;

use super::Store;
use crate::plan::ids::LayerId;
use crate::plan::resolve::{Spec, Volume, VolumeKind, VolumeSource};
use crate::store::export;
use crate::store::path_volumes::real_path;
use crate::sys::error::Result;
use crate::tree::listing::{Content, Listing, ListingEntry, PathState, path_state};
use crate::tree::writer::Writer;
use crate::tree::{self, mounts};

/// The results in one output volume, of several steps.
#[derive(Clone, Debug, Default)]
pub struct Results {
    pub listing: Listing,
    /// The layer that has each result.
    layers: BTreeMap<PathBuf, LayerId>,
}

/// How an output directory differs from a result.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ResultState {
    Same,
    Missing,
    /// An entry in its path is not a directory.
    Blocked,
    /// It has the same content, but is not the expected hard link.
    Unlinked,
    /// It has other permissions, as a phrase.
    Mode(String),
    /// Another kind of entry or other content is there, as a phrase.
    Other(String),
}

impl ResultState {
    fn is_there(&self) -> bool {
        matches!(self, Self::Same | Self::Unlinked)
    }

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
    /// Path below the volume.
    pub path: PathBuf,
    pub layer: LayerId,
    pub state: ResultState,
}

pub(crate) fn outputs(spec: &Spec) -> impl Iterator<Item = &Volume> {
    let volumes = spec.volumes.iter();
    volumes.filter(|volume| volume.kind == VolumeKind::Output)
}

/// Fails if the disk of a volume's `path` is not mounted.
pub(crate) fn check_mounted(path: &Path, volume: &str) -> Result<()> {
    let what = format!("volume `{volume}`");
    mounts::check_mounted(path, &what, "name another directory in the profile")
}

/// Refuses a file in place of the directory that a volume's `path` names.
pub(crate) fn check_directory(path: &Path, volume: &str) -> Result<()> {
    match fs::metadata(path) {
        Ok(found) if !found.is_dir() => {
            let path = path.display();
            Err(
                invalid!("`{path}`, the `path` of volume `{volume}`, is not a directory")
                    .help("name a directory in the profile, or move the file away"),
            )
        }
        _ => Ok(()),
    }
}

impl Store {
    /// Returns the directory of an output volume. Refuses one that a step may have replaced with a link, and a file.
    pub fn output_dir(&self, spec: &Spec, volume: &Volume) -> Result<PathBuf> {
        match &volume.source {
            VolumeSource::Path(path) => {
                real_path(spec, path)?;
                check_directory(path, &volume.name)?;
                Ok(path.clone())
            }
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

    /// Returns the results of the steps up to a layer, by output volume. If several steps wrote a file, the last one
    /// wins.
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

    /// Compares an env's output volumes with the results of the steps up to a layer. With `exactly`, compares content
    /// even if size and time are the same.
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

    /// Returns the name of a layer's step, for messages. The env that made the layer may call the step by another
    /// name.
    pub fn title_of(&self, layer: &LayerId, spec: &Spec) -> String {
        let Some(layer) = self.layer(layer).ok().flatten() else {
            return String::new();
        };
        let mut steps = spec.steps.iter();
        let step = steps.find(|step| layer.key.as_ref() == Some(&step.key));
        step.map_or(layer.title, |step| step.name.to_string())
    }
}

impl Results {
    fn entries(&self) -> impl Iterator<Item = (&Path, &ListingEntry, &LayerId)> {
        let entries = self.listing.entries.iter();
        entries.map(|(path, entry)| (path.as_path(), entry, &self.layers[path]))
    }
}

/// Compares the entry at a path below a directory with a result. With `exactly`, compares a file's content even if
/// size and time are the same.
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
        // Older versions recorded no digest, so the time must match.
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

/// Opens an output directory, creating it if it is missing.
fn output_writer(directory: &Path, spec: &Spec) -> Result<Writer> {
    tree::create_directory_for(directory, spec.user.uid, spec.user.gid)?;
    Writer::open(directory, true)?.for_owner()
}

#[cfg(test)]
mod tests;
