//! Owns the record of files that unfinished steps left in an env's output volumes, `envs/<name>/unfinished.json`.
//! They are results of a resumed step too, although they existed before its last run.

use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::SystemTime;

use serde::{Deserialize, Serialize};

use crate::plan::ids::StepKey;
use crate::plan::resolve::Spec;
use crate::store::LockedEnv;
use crate::sys::atomic::{self, Survives};
use crate::sys::error::Result;
use crate::tree::listing::{Listing, Marks, Paths};

const UNFINISHED: &str = "unfinished.json";

/// An output volume before a step ran.
#[derive(Debug)]
pub(crate) struct OutputBefore {
    pub volume: String,
    /// Its directory. While it is open, no other directory gets its inode number.
    pub opened: OwnedFd,
    /// Whether it is in the store, where results of the env's other builds were moved aside.
    pub in_store: bool,
    /// When its content was listed.
    pub taken: SystemTime,
    /// Its content, without what earlier runs of the step left.
    pub listing: Listing,
    /// Entries that may come from those runs or from other programs: rockenv was killed, so no listing shows which.
    pub unsure: BTreeSet<PathBuf>,
}

/// By key and volume.
type Steps = BTreeMap<String, BTreeMap<String, Unfinished>>;

/// State of one output volume in a step's unfinished run.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Unfinished {
    /// It is running or was killed: the entries that existed before.
    Before(Marks),
    /// It ended: the entries that it left.
    Left {
        all: Marks,
        #[serde(default)]
        unsure: Paths,
    },
}

impl LockedEnv<'_> {
    fn unfinished(&self) -> Steps {
        // A power failure may have lost the file. Without it, the entries count as other programs'.
        let read = atomic::read_json(&self.directory.join(UNFINISHED));
        read.ok().flatten().unwrap_or_default()
    }

    fn write_unfinished(&self, steps: &Steps) -> Result<()> {
        let path = self.directory.join(UNFINISHED);
        if steps.is_empty() {
            return super::super::env::remove(&path);
        }
        atomic::replace(&path, &atomic::json(&path, steps)?, Survives::Either)
    }

    /// Returns whether earlier runs of a step did not succeed.
    pub(crate) fn has_unfinished(&self, key: &StepKey) -> bool {
        self.unfinished().contains_key(key.as_str())
    }

    /// Records that a step begins with these output volumes. Takes entries of its earlier runs out of their listings.
    pub(crate) fn begin_outputs(
        &self,
        key: &StepKey,
        spec: &Spec,
        outputs: &mut [OutputBefore],
    ) -> Result<()> {
        let mut steps = self.unfinished();
        let old = steps.len();
        steps.retain(|known, _| spec.steps.iter().any(|step| step.key.as_str() == known));
        if outputs.is_empty() && steps.len() == old {
            return Ok(());
        }
        let known = steps.remove(key.as_str()).unwrap_or_default();
        for output in outputs.iter_mut() {
            let listing = &mut output.listing;
            match known.get(&output.volume) {
                None => {}
                Some(Unfinished::Before(before)) => {
                    let stayed = before.unchanged(listing);
                    let entries = listing.entries.keys();
                    let new = entries.filter(|path| !stayed.contains(*path));
                    output.unsure = new.cloned().collect();
                    listing.entries.retain(|path, _| stayed.contains(path));
                }
                Some(Unfinished::Left { all, unsure }) => {
                    let left = all.unchanged(listing);
                    let unsure = unsure.0.iter().filter(|path| left.contains(*path));
                    output.unsure = unsure.cloned().collect();
                    listing.entries.retain(|path, _| !left.contains(path));
                }
            }
        }
        if !outputs.is_empty() {
            let before = outputs.iter().map(|output| {
                let marks = Marks::of(&output.listing, output.taken, false);
                (output.volume.clone(), Unfinished::Before(marks))
            });
            steps.insert(key.to_string(), before.collect());
        }
        self.write_unfinished(&steps)
    }

    /// Records what a step that did not succeed left in its output volumes, listed at `taken`.
    pub(crate) fn leave_outputs(
        &self,
        key: &StepKey,
        left: Vec<(&OutputBefore, Listing)>,
        taken: SystemTime,
    ) -> Result<()> {
        if left.is_empty() {
            return Ok(());
        }
        let left = left.into_iter().map(|(before, left)| {
            let unfinished = Unfinished::Left {
                all: Marks::of(&left, taken, true),
                unsure: Paths(before.unsure.iter().cloned().collect()),
            };
            (before.volume.clone(), unfinished)
        });
        let mut steps = self.unfinished();
        steps.insert(key.to_string(), left.collect());
        self.write_unfinished(&steps)
    }

    /// Forgets the unfinished runs of a step that succeeded.
    pub(crate) fn end_outputs(&self, key: &StepKey) -> Result<()> {
        let mut steps = self.unfinished();
        match steps.remove(key.as_str()) {
            Some(_) => self.write_unfinished(&steps),
            None => Ok(()),
        }
    }
}
