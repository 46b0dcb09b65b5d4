//! Owns moving the results of an env's other builds out of its output volumes: a later step would take them for results
//! of its own build. They stay beside the volumes until a build has made them again. Files that a user put or changed
//! there stay in any case: `envs/<name>/earlier.json` has the marks of those that rockenv moved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use fs_err as fs;

use super::{ResultState, compare, output_writer, outputs};
use crate::plan::ids::LayerId;
use crate::plan::resolve::{Spec, VolumeSource};
use crate::store::Store;
use crate::sys::account::Existing;
use crate::sys::atomic::{self, Survives};
use crate::sys::error::Result;
use crate::tree::listing::{Content, Listing, ListingEntry, Marks};

const EARLIER: &str = "earlier.json";

impl Store {
    /// Returns the marks of the files that were moved aside, by volume. A power failure may have lost them. Without
    /// them, the files count as the user's.
    fn earlier_marks(&self, spec: &Spec) -> BTreeMap<String, Marks> {
        let read = atomic::read_json(&self.env_dir(&spec.name).join(EARLIER));
        read.ok().flatten().unwrap_or_default()
    }

    /// Moves aside the results of `known`, layers of the same env, and of those below them, unless steps up to `top`
    /// left them. A file that differs from the result stays, and a user's own directory is not touched.
    pub fn move_stale_aside(
        &self,
        top: Option<&LayerId>,
        spec: &Spec,
        known: &[LayerId],
    ) -> Result<()> {
        let volumes = outputs(spec).filter(|volume| volume.source == VolumeSource::Store);
        let (volumes, known) = (volumes.collect::<Vec<_>>(), self.with_those_below(known));
        if volumes.is_empty() || known.is_empty() {
            return Ok(());
        }
        let mut stay = match top {
            Some(top) => self.results(top, spec)?,
            None => BTreeMap::new(),
        };
        let mut marks = self.earlier_marks(spec);
        for volume in volumes {
            let directory = self.output_dir(spec, volume)?;
            if directory.is_dir() {
                let stale = self.ours(&volume.name, &known)?;
                let stay = stay.remove(&volume.name).unwrap_or_default().listing;
                let aside = self.earlier_results(spec).join(&volume.name);
                let known = marks.remove(&volume.name).unwrap_or_default();
                let mut own = known.unchanged(&Listing::of(&aside)?);
                let moved = move_aside(&directory, &aside, &stale, &stay, spec, &mut own);
                let taken = SystemTime::now();
                let mut now = Listing::of(&aside)?;
                now.entries.retain(|path, _| own.contains(path));
                marks.insert(volume.name.clone(), Marks::of(&now, taken, false));
                let path = self.env_dir(&spec.name).join(EARLIER);
                atomic::replace(&path, &atomic::json(&path, &marks)?, Survives::Either)?;
                moved?;
            }
        }
        Ok(())
    }

    /// Returns the directory of results that other builds left. No volume can have that name.
    fn earlier_results(&self, spec: &Spec) -> PathBuf {
        self.root.join("outputs").join(&spec.name).join(".earlier")
    }

    /// Removes results that were moved aside and made again since, unless they were changed there. Returns the
    /// directory if other results remain in it.
    pub fn drop_remade(&self, spec: &Spec) -> Result<Option<PathBuf>> {
        let aside = self.earlier_results(spec);
        if !aside.is_dir() {
            return Ok(None);
        }
        let marks = self.earlier_marks(spec);
        for volume in outputs(spec).filter(|volume| volume.source == VolumeSource::Store) {
            let (earlier, now) = (aside.join(&volume.name), self.output_dir(spec, volume)?);
            if !earlier.is_dir() {
                continue;
            }
            let mut writer = output_writer(&earlier, spec)?;
            let listing = Listing::of(&earlier)?;
            let own = marks.get(&volume.name);
            let own = own.map(|marks| marks.unchanged(&listing));
            let own = own.unwrap_or_default();
            // Visit the content of a directory before the directory.
            for (path, entry) in listing.entries.iter().rev() {
                let is_directory = entry.is_directory();
                let goes = match is_directory {
                    true => fs::read_dir(earlier.join(path))?.next().is_none(),
                    false => own.contains(path) && now.join(path).symlink_metadata().is_ok(),
                };
                if goes {
                    writer.remove(path, is_directory)?;
                }
            }
            // Succeeds only if the directory is empty.
            fs::remove_dir(&earlier).ok();
        }
        fs::remove_dir(&aside).ok();
        Ok(aside.is_dir().then_some(aside))
    }
}

/// Moves stale results aside. `own` has the entries that earlier calls moved, and gets those of this one.
fn move_aside(
    directory: &Path,
    aside: &Path,
    stale: &[Listing],
    stay: &Listing,
    spec: &Spec,
    own: &mut BTreeSet<PathBuf>,
) -> Result<()> {
    let mut writer = output_writer(directory, spec)?;
    let mut to = None;
    let paths: BTreeSet<&PathBuf> = stale.iter().flat_map(|left| left.entries.keys()).collect();
    // Visit the content of a directory before the directory.
    for path in paths.into_iter().rev() {
        let is_directory = match stale_entry(directory, path, stale)? {
            Some(entry) if !stay.entries.contains_key(path) => entry.is_directory(),
            _ => continue,
        };
        if is_directory && !is_empty(directory, path, stay)? {
            continue;
        }
        // The parent directory keeps the time that the step gave it.
        let above = path.parent().unwrap_or(Path::new(""));
        if let Some(entry) = stay.entries.get(above)
            && compare(entry, directory, above, false)? == ResultState::Same
        {
            writer.put(above, entry, None, Existing::Refuse)?;
        }
        if is_directory {
            writer.remove(path, true)?;
            continue;
        }
        let to = match &mut to {
            Some(to) => to,
            none => none.insert(output_writer(aside, spec)?),
        };
        let place = aside.join(path);
        if !own.contains(path) && fs::symlink_metadata(&place).is_ok() {
            let place = place.display();
            return Err(drift!("`{place}` is not a result of an earlier build")
                .help("move it away, then run the command again"));
        }
        writer.hand_over(path, to)?;
        own.insert(path.clone());
    }
    if let Some(to) = to {
        to.finish()?;
    }
    writer.finish()
}

/// Returns the result that is at a path exactly as its step left it.
fn stale_entry<'a>(
    directory: &Path,
    path: &Path,
    stale: &'a [Listing],
) -> Result<Option<&'a ListingEntry>> {
    for entry in stale.iter().filter_map(|left| left.entries.get(path)) {
        let is_known = match &entry.content {
            // Older versions recorded no digest, and a time is not enough to remove a file.
            Content::File { sha256, .. } => sha256.is_some(),
            Content::Directory { existed } => !existed,
            Content::Symlink { .. } => true,
            Content::Special(_) => false,
        };
        if is_known && compare(entry, directory, path, true)?.is_there() {
            return Ok(Some(entry));
        }
    }
    Ok(None)
}

/// Returns whether a directory is empty, and no result that stays belongs below it.
fn is_empty(directory: &Path, path: &Path, stay: &Listing) -> Result<bool> {
    let mut below = stay.entries.range(path.to_owned()..);
    let leads = below.next().is_some_and(|(next, _)| next.starts_with(path));
    Ok(!leads && fs::read_dir(directory.join(path))?.next().is_none())
}
