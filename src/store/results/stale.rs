//! Owns moving the results of an env's other builds out of its output volumes: a later step would take them for results
//! of its own build. They stay beside the volumes until a build has made them again. Files that a user put or changed
//! there stay in any case: `envs/<name>/earlier.json` lists those that rockenv moved, with their digests.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::slice;

use fs_err as fs;

use super::restore::keep_time_above;
use super::{compare, output_writer, outputs};
use crate::plan::ids::LayerId;
use crate::plan::resolve::{Spec, VolumeSource};
use crate::store::{Store, env};
use crate::sys::atomic::{self, Survives};
use crate::sys::error::Result;
use crate::tree::listing::{Content, Listing, ListingEntry};

const EARLIER: &str = "earlier.json";

impl Store {
    /// Returns the list of files that were moved aside, by volume, and its place. A power failure may have lost it.
    /// Without it, the files count as the user's.
    fn moved_aside(&self, spec: &Spec) -> (BTreeMap<String, Listing>, PathBuf) {
        let path = self.env_dir(&spec.name).join(EARLIER);
        let read = atomic::read_json(&path);
        (read.ok().flatten().unwrap_or_default(), path)
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
        let (mut moved, list) = self.moved_aside(spec);
        for volume in volumes {
            let directory = self.output_dir(spec, volume)?;
            if directory.is_dir() {
                let stale = self.ours(&volume.name, &known)?;
                let stay = stay.remove(&volume.name).unwrap_or_default().listing;
                let stale = stale_entries(&directory, &stale, &stay)?;
                let aside = self.earlier_results(spec).join(&volume.name);
                let own = moved.entry(volume.name.clone()).or_default();
                let mut files = stale.clone();
                files.retain(|_, entry| !entry.is_directory());
                for (path, entry) in &files {
                    let place = aside.join(path);
                    if place.symlink_metadata().is_ok()
                        && result_at(&aside, path, slice::from_ref(own))?.is_none()
                    {
                        let place = place.display();
                        return Err(drift!(
                            "cannot move an earlier result to `{place}`: another file is there"
                        )
                        .help("move it away, then run the command again"));
                    }
                    own.entries.insert(path.to_path_buf(), (*entry).clone());
                }
                // A command that is killed later must not have moved files that no list has.
                if !files.is_empty() {
                    atomic::replace(&list, &atomic::json(&list, &moved)?, Survives::Either)?;
                }
                move_aside(&directory, &aside, &stale, &stay, spec)?;
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
        let (moved, list) = self.moved_aside(spec);
        for volume in outputs(spec).filter(|volume| volume.source == VolumeSource::Store) {
            let (earlier, now) = (aside.join(&volume.name), self.output_dir(spec, volume)?);
            if !earlier.is_dir() {
                continue;
            }
            let mut writer = output_writer(&earlier, spec)?;
            let own = moved.get(&volume.name).map_or(&[][..], slice::from_ref);
            // Visit the content of a directory before the directory.
            for (path, entry) in Listing::of(&earlier)?.entries.iter().rev() {
                let is_directory = entry.is_directory();
                let goes = match is_directory {
                    true => fs::read_dir(earlier.join(path))?.next().is_none(),
                    false => {
                        now.join(path).symlink_metadata().is_ok()
                            && result_at(&earlier, path, own)?.is_some()
                    }
                };
                if goes {
                    writer.remove(path, is_directory)?;
                }
            }
            // Succeeds only if the directory is empty.
            fs::remove_dir(&earlier).ok();
        }
        if fs::remove_dir(&aside).is_err() {
            return Ok(Some(aside));
        }
        env::remove(&list)?;
        Ok(None)
    }
}

/// Returns the stale results that are exactly as their steps left them.
fn stale_entries<'a>(
    directory: &Path,
    stale: &'a [Listing],
    stay: &Listing,
) -> Result<BTreeMap<&'a Path, &'a ListingEntry>> {
    let paths: BTreeSet<&PathBuf> = stale.iter().flat_map(|left| left.entries.keys()).collect();
    let mut found = BTreeMap::new();
    for path in paths {
        if !stay.entries.contains_key(path)
            && let Some(entry) = result_at(directory, path, stale)?
        {
            found.insert(path.as_path(), entry);
        }
    }
    Ok(found)
}

fn move_aside(
    directory: &Path,
    aside: &Path,
    stale: &BTreeMap<&Path, &ListingEntry>,
    stay: &Listing,
    spec: &Spec,
) -> Result<()> {
    let mut writer = output_writer(directory, spec)?;
    let mut to = None;
    // Visit the content of a directory before the directory.
    for (path, entry) in stale.iter().rev() {
        let is_directory = entry.is_directory();
        // Reading the content of all of them may have taken minutes.
        if !compare(entry, directory, path, false)?.is_there()
            || is_directory && !is_empty(directory, path, stay)?
        {
            continue;
        }
        keep_time_above(path, directory, stay, &mut writer)?;
        if is_directory {
            writer.remove(path, true)?;
            continue;
        }
        let to = match &mut to {
            Some(to) => to,
            none => none.insert(output_writer(aside, spec)?),
        };
        writer.hand_over(path, to)?;
    }
    if let Some(to) = to {
        to.finish()?;
    }
    writer.finish()
}

/// Returns the one of these results that is at a path exactly as its step left it.
fn result_at<'a>(
    directory: &Path,
    path: &Path,
    results: &'a [Listing],
) -> Result<Option<&'a ListingEntry>> {
    for entry in results.iter().filter_map(|left| left.entries.get(path)) {
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
