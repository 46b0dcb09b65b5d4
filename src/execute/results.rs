//! Owns results in output volumes during execution. Results of steps that ran are kept with their snapshots. Results of
//! steps that need not run are put into the env's output, where later steps and users look for them.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use super::Execution;
use crate::plan::Plan;
use crate::plan::ids::{EnvName, LayerId, TreeId};
use crate::plan::record::Record;
use crate::plan::resolve::{Spec, Step, VolumeSource};
use crate::profile::Access;
use crate::store::Store;
use crate::store::results::{self, BlockedResult, OutputBefore, StepResults};
use crate::sys::beneath;
use crate::sys::error::{Kind, Result};
use crate::sys::name::StepName;
use crate::tree::listing::Listing;
use crate::tree::writer::{self, Writer};

impl Execution<'_, '_> {
    /// Lists the output volumes that a step can write to, without the files that its unfinished runs left there. Makes
    /// missing directories, so that it is known which ones the step writes to.
    pub(super) fn outputs_before(&self, step: &Step) -> Result<Vec<OutputBefore>> {
        let volumes = results::outputs(self.spec);
        let written = volumes
            .filter(|volume| volume.access != Access::Ro && step.volumes.contains(&volume.name));
        let before = written.map(|volume| {
            let directory = self.container_context().directory_of(volume)?;
            let in_store = volume.source == VolumeSource::Store;
            let taken = SystemTime::now();
            let listing = Listing::of(&directory)?;
            if in_store {
                remove_unfinished(&directory, &listing)?;
            }
            Ok(OutputBefore {
                volume: volume.name.clone(),
                opened: beneath::open_path(&directory)?,
                in_store,
                taken,
                listing,
                unsure: BTreeSet::new(),
            })
        });
        let mut before = before.collect::<Result<Vec<_>>>()?;
        self.env.begin_outputs(&step.key, self.spec, &mut before)?;
        Ok(before)
    }

    fn directory_of(&self, output: &OutputBefore) -> Result<PathBuf> {
        let name = &output.volume;
        let volume = self.spec.volume(name);
        let volume = volume.ok_or_else(|| unexpected!("no volume `{name}`"))?;
        self.store.output_dir(self.spec, volume)
    }

    /// Refuses files in output volumes that no snapshot can hold.
    pub(super) fn refuse_special(&self, before: &[OutputBefore]) -> Result<()> {
        before
            .iter()
            .try_for_each(|before| results::refuse_special(before, &self.directory_of(before)?))
    }

    /// Records the files that a failed or interrupted step left in output volumes. If it is resumed, they are its
    /// results too.
    pub(super) fn leave_results(&self, step: &Step, before: &[OutputBefore]) -> Result<()> {
        let taken = SystemTime::now();
        let left = before.iter().map(|before| {
            // If the user moved the directory, the files at its path are another program's.
            let now = Listing::below(&before.opened, &self.directory_of(before)?)?;
            Ok((before, now.since(&before.listing, before.taken)))
        });
        self.env
            .leave_outputs(&step.key, left.collect::<Result<_>>()?, taken)
    }

    /// Returns whether a step sees other files in place of the results that it is based on: files of another env with
    /// the same directory, or changed files. Files from its own earlier runs do not count.
    pub(super) fn sees_other_files(
        &self,
        step: &Step,
        before: &[OutputBefore],
        parent: Option<&LayerId>,
    ) -> Result<bool> {
        let mut outputs = results::outputs(self.spec);
        let Some(parent) = parent else {
            return Ok(false);
        };
        if !outputs.any(|volume| step.volumes.contains(&volume.name)) {
            return Ok(false);
        }
        let known = self.env.known_record()?.known_layers();
        let blocked = self.store.plan_restore(parent, self.spec, &known)?.blocked;
        let mut others = blocked.iter().filter(|other| {
            let mut before = before.iter().filter(|before| before.volume == other.volume);
            before.all(|before| before.listing.entries.contains_key(&other.path))
        });
        Ok(others.any(|other| step.volumes.contains(&other.volume)))
    }

    /// Keeps the step's results with the tree that becomes its snapshot; `parent` is the layer below. Returns a result
    /// that another program wrote to before it was kept.
    pub(super) fn keep_results(
        &self,
        before: &[OutputBefore],
        tree: &TreeId,
        parent: Option<&LayerId>,
    ) -> Result<Option<PathBuf>> {
        let trees = self.env.directory().join("trees");
        let kept = trees.join(tree).join("results");
        self.store.discard(&kept)?;
        let earlier = match parent {
            Some(parent) if !before.is_empty() => self.store.results(parent, self.spec)?,
            _ => BTreeMap::new(),
        };
        let (mut left, mut written) = (StepResults::default(), None);
        for before in before {
            let earlier = earlier.get(&before.volume);
            let earlier = earlier.map(|results| results.listing.clone());
            let directory = self.directory_of(before)?;
            let now = Listing::below(&before.opened, &directory)?;
            let earlier = earlier.unwrap_or_default();
            written = left
                .keep(&kept, &directory, now, before, &earlier)?
                .or(written);
        }
        left.write(&kept).map(|()| written)
    }

    /// Restores the results of steps that do not run, and moves results of the env's other builds aside. Changed files
    /// stay, but no later step may use them as results.
    pub(super) fn restore_results(&self) -> Result<()> {
        let record = self.env.known_record()?;
        let stays = stays(self.plan);
        let top = top(self.plan, Some(record));
        if stays && (top.is_none() || self.plan.brings.is_empty()) {
            return Ok(());
        }
        let known = record.known_layers();
        // The writes of a failed step cannot be told from those of other programs.
        let attempt = self.store.attempt(self.env.name(), record)?;
        let is_begun = |step: &Step| attempt.as_ref().is_some_and(|begun| begun.key == step.key);
        let blocked = BlockedResults::of(
            self.store,
            self.spec,
            self.plan,
            Some(record),
            self.env.name(),
        )?;
        if let Some((message, help)) = blocked.refusal(&record.up_command()) {
            return Err(drift!("{message}").help(help));
        }
        for other in &blocked.all {
            let message = format!("{}; leaving it as it is", other.message());
            self.reporter.warn(message);
        }
        // A resumed step may rely on the files that it left.
        let first = runs(self.plan, self.spec).next();
        if !stays && !first.is_some_and(|step| is_begun(step) || self.env.has_unfinished(&step.key))
        {
            self.store.move_stale_aside(top, self.spec, &known)?;
        }
        match top {
            Some(top) => {
                let plan = self.store.plan_restore(top, self.spec, &known)?;
                self.store.restore_results(plan, self.spec)
            }
            None => Ok(()),
        }
    }

    /// Removes results of earlier builds that this build has made again, and reports where the others are.
    pub(super) fn drop_remade_results(&self) -> Result<()> {
        if let Some(earlier) = self.store.drop_remade(self.spec)? {
            let place = earlier.display();
            self.reporter
                .warn(format!("results of earlier builds are in `{place}`"));
        }
        Ok(())
    }
}

/// Removes the unfinished copies that a killed command left in an output volume of the store. To a user's directory,
/// another env may be copying at this moment.
fn remove_unfinished(directory: &Path, listing: &Listing) -> Result<()> {
    let mut writer = Writer::open(directory, false)?;
    let mut entries = listing.entries.iter();
    entries.try_for_each(|(path, entry)| match writer::is_unfinished(path, entry) {
        true => writer.remove(path, false),
        false => Ok(()),
    })
}

/// Results that a plan leaves as they are, because other files are in their place.
#[derive(Debug, Default)]
pub(crate) struct BlockedResults {
    pub(crate) all: Vec<BlockedResult>,
    /// Position of the first file that a step of this run would take for the result, and that step.
    used: Option<(usize, StepName)>,
}

impl BlockedResults {
    /// Finds the blocked results of the env `name`.
    pub(crate) fn of(
        store: &Store,
        spec: &Spec,
        plan: &Plan,
        record: Option<&Record>,
        name: &EnvName,
    ) -> Result<Self> {
        let Some(top) = top(plan, record) else {
            return Ok(Self::default());
        };
        let known = record.map_or_else(Vec::new, Record::known_layers);
        let all = match store.plan_restore(top, spec, &known) {
            // A missing layer is reported where it is needed.
            Err(error) if error.kind() == Kind::NoLayer => return Ok(Self::default()),
            found => found?.blocked,
        };
        let attempt = record.map(|record| store.attempt(name, record));
        let attempt = attempt.transpose()?.flatten();
        let resumes =
            attempt.is_some_and(|begun| runs(plan, spec).any(|step| step.key == begun.key));
        let user = |other: &BlockedResult| {
            runs(plan, spec).find(|step| step.volumes.contains(&other.volume))
        };
        let own = all.iter().enumerate();
        let mut own = own.filter(|(_, other)| other.in_store && !resumes);
        let used = own.find_map(|(at, other)| Some((at, user(other)?.name.clone())));
        Ok(Self { all, used })
    }

    /// Returns why `up` refuses them, and the command to type; `up` is the env's own command.
    pub(crate) fn refusal(&self, up: &str) -> Option<(String, String)> {
        let (at, user) = self.used.as_ref()?;
        let other = &self.all[*at];
        let (message, step) = (other.message(), &other.step);
        let help = match other.is_export {
            true => format!("move it away, then run: {up}"),
            false => format!("move it away, or make it again: {up} --rerun {step}"),
        };
        let why = format!("{message}; step `{user}` would use the changed file");
        Some((why, help))
    }
}

/// Returns whether the env stays at its layer, and no step runs.
fn stays(plan: &Plan) -> bool {
    !plan.moves && plan.runs() == 0
}

/// Returns the layer whose results a plan restores.
fn top<'a>(plan: &'a Plan, record: Option<&'a Record>) -> Option<&'a LayerId> {
    match stays(plan) {
        true => record?.head.layer.as_ref(),
        false => plan.start.as_ref(),
    }
}

fn runs<'a>(plan: &'a Plan, spec: &'a Spec) -> impl Iterator<Item = &'a Step> {
    plan.running().filter_map(|step| spec.step(&step.name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn unfinished_copies_are_removed_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let names = [
            ".rockenv-0123456789abcde",
            ".rockenv-0123456789abcdef",
            ".rockenv-mine",
        ];
        for name in names {
            fs_err::write(path.join(name), "").unwrap();
        }
        fs_err::create_dir(path.join(".rockenv-fedcba9876543210")).unwrap();
        remove_unfinished(path, &Listing::of(path).unwrap()).unwrap();
        let left = Listing::of(path).unwrap().entries.into_keys();
        let wanted = [names[0], ".rockenv-fedcba9876543210", names[2]];
        assert_eq!(left.collect::<Vec<_>>(), wanted.map(PathBuf::from));
    }
}
