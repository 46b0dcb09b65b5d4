//! Owns a layer's record of its step's results: their listing, `results/.listing.json`, beside a tree of them for
//! each output volume. Both may come from another machine, so links in them are never followed.

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::sys::stat::fstat;
use serde::{Deserialize, Serialize};

use super::{OutputBefore, ResultState, compare};
use crate::store::export;
use crate::sys::atomic;
use crate::sys::error::{Result, ResultExt as _, encoded, exists, if_exists};
use crate::tree::file;
use crate::tree::listing::{Content, Listing, PathState, Paths, path_state};

use crate::sys::account::Existing;
use crate::tree::writer::Writer;
use crate::ui::size;

/// No volume can have this name.
const LISTING: &str = ".listing.json";

/// Maximum size of a listing, in bytes: some hundred thousand files.
const LARGEST: usize = 64 << 20;

/// The results of a step in its output volumes.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct StepResults {
    #[serde(default)]
    volumes: BTreeMap<String, VolumeResults>,
}

/// The results of a step in one output volume.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct VolumeResults {
    /// New and changed files.
    pub entries: Listing,
    /// Results of earlier steps that it removed.
    #[serde(default)]
    pub removed: Paths,
    /// Entries that may not be the step's own, and are never removed from an output: files that were there before and
    /// that the step wrote to or set the mode of, and files found when the step was resumed after rockenv was killed.
    #[serde(default, skip_serializing_if = "Paths::is_empty")]
    pub unsure: Paths,
}

impl StepResults {
    /// Reads the directory `results` of a layer.
    pub(crate) fn read(results: &Path) -> Result<Self> {
        if !exists(results)? {
            return Ok(Self::default());
        }
        let path = results.join(LISTING);
        let damaged =
            || unexpected!("`{}` is missing or damaged", path.display()).help("rockenv fsck");
        let file = file::open(results, Path::new(LISTING))?.ok_or_else(damaged)?;
        let mut text = Vec::new();
        file.take(LARGEST as u64 + 1)
            .read_to_end(&mut text)
            .context(|| format!("cannot read `{}`", path.display()))?;
        if text.len() > LARGEST {
            return Err(invalid!(
                "`{}` has more than {}",
                path.display(),
                size::bytes(LARGEST as u64)
            )
            .help("rockenv fsck"));
        }
        serde_json::from_slice(&text).map_err(|error| damaged().source(error))
    }

    pub(crate) fn take(&mut self, volume: &str) -> VolumeResults {
        self.volumes.remove(volume).unwrap_or_default()
    }

    /// Keeps a copy of a step's results in an output volume. `output` is its directory, `now` its state, `before` its
    /// state before the step, and `earlier` has the results of the steps below. Returns a file that another program
    /// wrote to in the meantime, so that the copy may not be the step's result.
    pub(crate) fn keep(
        &mut self,
        results: &Path,
        output: &Path,
        now: Listing,
        before: &OutputBefore,
        earlier: &Listing,
    ) -> Result<Option<PathBuf>> {
        let OutputBefore {
            volume,
            listing: there,
            taken,
            ..
        } = before;
        let removed =
            |path: &&PathBuf| there.entries.contains_key(*path) && !now.entries.contains_key(*path);
        let removed = earlier.entries.keys().filter(removed).cloned().collect();
        let mut left = VolumeResults {
            removed: Paths(removed),
            entries: now.since(there, *taken),
            unsure: Paths::default(),
        };
        let is_unsure = |path: &&PathBuf| {
            let was_there = there.entries.get(*path);
            before.unsure.contains(*path)
                || before.in_store
                    && was_there.is_some_and(|entry| !entry.is_directory())
                    && !earlier.entries.contains_key(*path)
        };
        let unsure = left.entries.entries.keys().filter(is_unsure);
        left.unsure = Paths(unsure.cloned().collect());
        if left.entries.entries.is_empty() && left.removed.0.is_empty() {
            return Ok(None);
        }
        let mut written = None;
        fs::create_dir_all(results)?;
        let mut writer = Writer::open(results, false)?;
        let mut sums: BTreeMap<PathBuf, Option<String>> = BTreeMap::new();
        for (path, entry) in &mut left.entries.entries {
            let place = Path::new(volume).join(path);
            match &mut entry.content {
                Content::File {
                    sha256,
                    hardlink: Some(first),
                    ..
                } => {
                    writer.link(&place, &Path::new(volume).join(&*first), Existing::Refuse)?;
                    *sha256 = sums.get(first).cloned().flatten();
                }
                Content::File { .. } => {
                    let from = export::open(output, path)?;
                    writer.put(&place, entry, Some(from.file().as_fd()), Existing::Refuse)?;
                    let sum = Some(export::digest(results, &place)?);
                    sums.insert(path.clone(), sum.clone());
                    if let ResultState::Other(_) = compare(entry, output, path, false)? {
                        written = Some(output.join(path));
                    }
                    if let Content::File { size, sha256, .. } = &mut entry.content {
                        *size = fs::metadata(results.join(&place))?.len();
                        *sha256 = sum;
                    }
                }
                Content::Directory { .. } | Content::Symlink { .. } | Content::Special(_) => {
                    writer.put(&place, entry, None, Existing::Refuse)?;
                }
            }
        }
        self.volumes.insert(volume.to_owned(), left);
        writer.finish().map(|()| written)
    }

    pub(crate) fn write(&self, results: &Path) -> Result<()> {
        if self.volumes.is_empty() {
            return Ok(());
        }
        let text = encoded(serde_json::to_vec(self), "the listing of results")?;
        if text.len() > LARGEST {
            return Err(step_failed!(
                "too many files in output volumes: their listing has {}, more than {}",
                size::bytes(text.len() as u64),
                size::bytes(LARGEST as u64)
            )
            .help("change the step to leave an archive of them, or use a build volume"));
        }
        atomic::write(&results.join(LISTING), &text)
    }

    /// Compares the copies with the listing; returns the faults as phrases.
    pub(crate) fn check(&self, results: &Path) -> Result<Vec<String>> {
        let mut faults = Vec::new();
        for (volume, left) in &self.volumes {
            match path_state(results, Path::new(volume))? {
                PathState::Taken(found) if found.is_directory() => {}
                PathState::Taken(_) | PathState::Free | PathState::Blocked => {
                    let nothing = left.entries.entries.is_empty();
                    faults.extend((!nothing).then(|| format!("`{volume}` is missing")));
                    continue;
                }
            }
            for (path, entry) in &left.entries.entries {
                let state = compare(entry, &results.join(volume), path, false)?;
                if let Some(what) = state.words() {
                    let place = Path::new(volume).join(path);
                    faults.push(format!("`{}` {what}", place.display()));
                }
            }
        }
        Ok(faults)
    }
}

/// Refuses files that no snapshot can hold, if a step added them to an output volume. `before` is its earlier state.
/// Also refuses a volume that was removed, or replaced by another directory: the step's results are not there, and its
/// snapshot would have none.
pub(crate) fn refuse_special(before: &OutputBefore, output: &Path) -> Result<()> {
    let written = fstat(&before.opened)?;
    let now = if_exists(fs::metadata(output))?;
    if now.is_none_or(|now| (now.dev(), now.ino()) != (written.st_dev, written.st_ino)) {
        let output = output.display();
        let lost = format!("`{output}` was removed or renamed while the step ran");
        return Err(step_failed!("{lost}, with the step's results"));
    }
    for (path, entry) in Listing::of(output)?
        .since(&before.listing, before.taken)
        .entries
    {
        if let Content::Special(_) = entry.content {
            let (path, kind) = (output.join(path), entry.content.name());
            let is = format!("`{}` is {kind}", path.display());
            return Err(step_failed!("{is}, which cannot be kept as a result"));
        }
    }
    Ok(())
}
