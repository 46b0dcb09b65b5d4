//! Owns executing a plan: the only code that changes an env by running its steps.
//!
//! Each step gets its own container, and its own tree based on its parent's snapshot. If it succeeds, one rename
//! turns the tree into its snapshot. Until then the env stays as it was.

pub(crate) mod in_container;

pub(crate) mod build_watch;
mod changed_sources;
pub(crate) mod container;
pub(crate) mod disk_guard;
pub(crate) mod gpu_check;
pub(crate) mod inspect;
pub(crate) mod log;
mod outcome;
pub(crate) mod redact;
mod results;
mod run_container;
mod run_step;
mod sampler;
mod sha256sums;
mod step;
mod step_outputs;
pub(crate) mod supervise;
mod sync;
pub(crate) mod terminal;
pub(crate) mod verify;
mod view;
mod wait_for_slot;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::Sender;
use std::time::Instant;

use jiff::Timestamp;

use crate::execute::changed_sources::StaleStep;
pub(crate) use crate::execute::supervise::Ending;
pub(crate) use outcome::{Ended, ExecutionProgress, Failure};
pub(crate) use results::BlockedResults;
pub(crate) use step::{base_environment, host_environment, owner};
pub(crate) use view::{APART, ByHand, count_manual_edits, file_in_source, is_older, last_layer};

use crate::plan::ids::{LayerId, StepKey};
use crate::plan::jobs::Sizing;
use crate::plan::lockfile::Lockfile;
use crate::plan::record::{Origin, Outcome, Snapshot, StepRecord};
use crate::plan::resolve::Spec;
use crate::plan::{Action, Plan, PlanStep, Volumes, step_log};
use crate::profile::CopyFiles;
use crate::profile::hook::Hook;
use crate::rocm::gpu::Grant;
use crate::store::config::Config;
use crate::store::{LockedEnv, Store};
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::name::StepName;
use crate::sys::shell::quoted_path;
use crate::sys::signals::Signals;
use crate::ui::Reporter;
use crate::ui::event::{self, Event};
use crate::ui::metrics::Row;

/// Everything that executing a plan needs.
#[derive(Debug)]
pub(crate) struct Execution<'a, 'store> {
    pub store: &'store Store,
    pub env: &'a mut LockedEnv<'store>,
    pub spec: &'a Spec,
    pub plan: &'a Plan,
    /// Content of `copy` steps.
    pub files: &'a CopyFiles,
    /// Directories of `source` volumes by name.
    pub sources: &'a BTreeMap<String, PathBuf>,
    /// The lock file to match, if any.
    pub locked: Option<&'a Lockfile>,
    pub hooks: &'a BTreeMap<String, Hook>,
    pub host: &'a Host,
    /// The GPU for steps with `gpu`.
    pub gpu: Option<&'a Grant>,
    /// Configuration, for variables from the host.
    pub config: &'a Config,
    /// Steps get no network, even if they request it.
    pub offline: bool,
    /// Volumes that must stay unchanged even if steps write to them.
    pub apart: &'a BTreeSet<String>,
    /// Whether views with files that a clean build would not have start over.
    pub clean: bool,
    /// The first step of this run that was built from other sources than its key states.
    pub stale: Option<StaleStep>,
    /// Is told the step of each new snapshot once the record has it.
    pub recorded: Option<&'a Sender<StepName>>,
    /// Limits on what may run at once.
    pub sizing: &'a Sizing,
    pub signals: &'a Signals,
    pub reporter: &'a Reporter,
}

/// Warns that changes in build volumes are lost, for stores whose snapshots do not contain them.
pub(crate) const EMPTIED: &str = "build volumes start empty: \
    anything that `exec` or `shell` wrote to them before the last step ran is deleted";

enum StepEnd {
    Frozen(LayerId),
    /// The step left no snapshot, and no later step runs.
    Stopped(Ended),
}

impl StepEnd {
    fn of(error: Error, signals: &Signals) -> Self {
        Self::Stopped(Ended::failed(error, signals))
    }
}

/// Ends execution early. A signal before the first step began is an error: the user must repeat the whole command, with
/// `--rerun`.
fn stopped(ended: Ended, has_begun: bool) -> Result<Option<ExecutionProgress>> {
    match ended {
        Ended::Interrupted(signal) if !has_begun => {
            Err(Error::new(Kind::Signal(signal), "interrupted"))
        }
        ended => Ok(Some(ExecutionProgress::Ended(ended))),
    }
}

impl Execution<'_, '_> {
    pub(crate) fn run(mut self) -> Result<ExecutionProgress> {
        self.keep_changes()?;
        self.move_to_start()?;
        self.save_steps()?;
        let volumes = self.spec.build_volumes();
        self.env.ensure_volumes(&volumes, &self.spec.user)?;
        let run = step_log::run_name(Timestamp::now());
        let durable = sync::Durable::start(self.store)?;
        let stopped = self.run_steps(&run, &durable);
        let synced = durable.finish();
        if let Some(stopped) = stopped? {
            // The reason why a step failed comes first.
            if let Err(error) = synced {
                self.reporter.warn(error.chain().join(": "));
            }
            if self.stale.is_some() {
                self.warn_stale()?;
            }
            return Ok(stopped);
        }
        synced?;
        let steps = &self.plan.steps;
        let whole = !steps.iter().any(|step| step.action == Action::Later);
        let ran = steps.iter().any(|step| step.action == Action::Run);
        let is_complete = whole && self.stale.is_none();
        self.env.update(|record| record.complete = is_complete)?;
        if ran {
            self.env.end_run()?;
            self.warn_stale()?;
        }
        if whole && (ran || self.plan.moves) {
            self.drop_remade_results()?;
        }
        Ok(ExecutionProgress::Ended(Ended::Complete))
    }

    /// Runs the steps of the plan; returns how far execution went if it stopped early.
    fn run_steps(
        &mut self,
        run: &str,
        durable: &sync::Durable,
    ) -> Result<Option<ExecutionProgress>> {
        let (plan, spec, reporter) = (self.plan, self.spec, self.reporter);
        let total = u32::try_from(plan.steps.len()).unwrap_or(u32::MAX);
        let mut last: Option<&StepName> = None;
        for (position, planned) in plan.steps.iter().enumerate() {
            let index = u32::try_from(position + 1).unwrap_or(u32::MAX);
            let finished = |outcome, cost| {
                let name = planned.name.clone();
                reporter.emit(&Event::StepFinished {
                    index,
                    total,
                    name,
                    outcome,
                    cost,
                });
            };
            match planned.action {
                Action::Hit => {
                    self.did_not_run(planned, event::Outcome::Hit);
                    continue;
                }
                Action::Pull | Action::Later => continue,
                Action::Skip => {
                    self.did_not_run(planned, event::Outcome::Skipped);
                    finished(event::Outcome::Skipped, event::Cost::default());
                    continue;
                }
                Action::Run => {}
            }
            let step = spec
                .step(&planned.name)
                .ok_or_else(|| unexpected!("the plan names an unknown step"))?;
            // Earlier than the comparison: a view is made of the sources before the step begins.
            let began = Timestamp::now();
            match self.is_stale_before(step, last.is_some()) {
                Ok(false) => {}
                Ok(true) => return Ok(Some(ExecutionProgress::Changed(last.cloned()))),
                Err(error) => return stopped(Ended::failed(error, self.signals), last.is_some()),
            }
            if let Err(error) = self.warn_absent_inputs(step) {
                return stopped(Ended::failed(error, self.signals), last.is_some());
            }
            reporter.emit(&Event::StepStarted {
                index,
                total,
                name: step.name.clone(),
                key: step.key.to_string(),
                cached: false,
            });
            let begun = Instant::now();
            let ended = self.run_step(index, step, run, began);
            let has_begun = last.is_some() || ended.is_ok();
            match ended.unwrap_or_else(|error| StepEnd::of(error, self.signals)) {
                StepEnd::Frozen(layer) => {
                    finished(event::Outcome::Done, self.cost_of(&step.name));
                    if let Some(recorded) = self.recorded {
                        drop(recorded.send(planned.name.clone()));
                    }
                    durable.add(layer);
                    last = Some(&planned.name);
                }
                StepEnd::Stopped(ended) => {
                    let cost = match ended {
                        // Nothing else was measured.
                        Ended::Broke(_) => event::Cost {
                            wall_ms: u64::try_from(begun.elapsed().as_millis()).unwrap_or(u64::MAX),
                            ..event::Cost::default()
                        },
                        _ => self.cost_of(&step.name),
                    };
                    let outcome = match ended {
                        Ended::Interrupted(_) => event::Outcome::Interrupted,
                        _ => event::Outcome::Failed,
                    };
                    finished(outcome, cost);
                    return stopped(ended, has_begun);
                }
            }
        }
        Ok(None)
    }

    /// Reports a step that does not run.
    fn did_not_run(&self, step: &PlanStep, outcome: event::Outcome) {
        self.reporter
            .measured(|| Row::of(self.spec, &step.name, step.key.as_ref(), outcome));
    }

    fn cost_of(&self, name: &str) -> event::Cost {
        let steps = self.env.record().into_iter();
        let mut steps = steps.flat_map(|record| &record.steps);
        let step = steps.find(|step| step.name == name);
        let cost = step.and_then(|step| step.cost).unwrap_or_default();
        event::Cost::of(cost, self.spec.engine)
    }

    fn keep_changes(&mut self) -> Result<()> {
        // Snapshots of an overlay store do not contain build volumes.
        if self.plan.empties_volumes() && !self.store.freezes_volumes() {
            for (name, path) in self.env.set_volumes_aside()? {
                self.reporter.warn(format!(
                    "build volume `{name}` has changes made by `exec` or `shell`, which snapshots of an overlay store \
                     do not contain: it stays at `{}` until you remove it: rm -r {}",
                    path.display(),
                    quoted_path(&path)
                ));
            }
            if self.store.has_older_edits(self.env.known_record()?, &[]) {
                self.reporter.warn(EMPTIED);
            }
        }
        if self.plan.keep_changes
            && let Some(name) = self.env.keep_changes("before-up")?
        {
            let message =
                format!("changes made by `exec` or `shell` are kept as snapshot `{name}`");
            self.reporter.warn(message);
        }
        if let Some(name) = self.env.keep_failed("before-up")? {
            let message = format!("changes made by `shell --failed` are kept as snapshot `{name}`");
            self.reporter.warn(message);
        }
        let steps = self.spec.steps.iter().map(|step| step.name.as_str());
        for (old, new) in self.env.make_room(&steps.collect())? {
            let message =
                format!("snapshot `{old}` renamed to `{new}`: step `{old}` needs its name");
            self.reporter.warn(message);
        }
        Ok(())
    }

    /// Moves the env to the layer where the first step starts.
    fn move_to_start(&mut self) -> Result<()> {
        for note in &self.plan.notes {
            self.reporter.warn(note);
        }
        self.restore_results()?;
        if self.plan.moves {
            match (&self.plan.start, self.plan.volumes) {
                (Some(layer), volumes) => {
                    let snapshots = self.hits(layer)?;
                    self.env
                        .move_to_layer(snapshots, layer, volumes != Volumes::Live)?;
                }
                (None, Volumes::Live) => self.env.reset_root()?,
                (None, _) => self.env.reset()?,
            }
            // The volumes are gone, so an interrupted step's work is done or starts over.
            if self.plan.volumes != Volumes::Live {
                self.env.end_attempt()?;
            }
        }
        Ok(())
    }

    /// Returns snapshots for steps whose layers exist, which are in the chain below `start`.
    fn hits(&self, start: &LayerId) -> Result<Vec<Snapshot>> {
        let chain = self.store.chain(start)?;
        let mut snapshots = Vec::new();
        let steps = self.plan.steps.iter();
        for step in steps.filter(|step| step.action == Action::Hit) {
            let mut layers = chain.iter().filter(|layer| layer.key.is_some());
            if let Some(layer) = layers.find(|layer| layer.key == step.key) {
                let known = self.env.known_record()?.snapshots.iter();
                let mut known = known.filter(|snapshot| snapshot.layer == layer.id);
                snapshots.push(Snapshot {
                    origin: Origin::Step,
                    again: known.any(|snapshot| snapshot.again),
                    ..Snapshot::of(layer, step.name.to_string())
                });
            }
        }
        Ok(snapshots)
    }

    /// Records the spec and the state of each step before the first one runs.
    fn save_steps(&mut self) -> Result<()> {
        if let Some(lock) = self.locked {
            self.env.keep_lock(lock)?;
        }
        self.env.save_spec(self.spec)?;
        let known = self.env.known_record()?.steps.iter();
        let old = known.filter_map(|step| Some((step.key.clone()?, step.clone())));
        let old: BTreeMap<StepKey, StepRecord> = old.collect();
        let steps = self.plan.steps.iter().map(|planned| {
            let known = planned.key.as_ref().and_then(|key| old.get(key));
            let mut step = known
                .filter(|known| planned.action == Action::Hit && known.outcome.is_done())
                .cloned()
                .unwrap_or_else(|| StepRecord {
                    name: planned.name.clone(),
                    key: planned.key.clone(),
                    outcome: Outcome::Hit,
                    reason: None,
                    log: None,
                    cost: None,
                });
            step.name.clone_from(&planned.name);
            match planned.action {
                Action::Hit | Action::Pull => {}
                Action::Run | Action::Later => step.outcome = Outcome::Pending,
                Action::Skip => step.outcome = Outcome::Skipped,
            }
            step.reason = (planned.action != Action::Hit).then(|| planned.why.clone());
            step
        });
        let steps: Vec<StepRecord> = steps.collect();
        let (spec, failed) = (self.spec, self.env.known_record()?.failed.clone());
        self.env.update(|record| {
            record.steps = steps;
            record.failed = None;
            record.complete = false;
            record.targets = spec.targets.iter().map(ToString::to_string).collect();
            record.profile.clone_from(&spec.profile);
        })?;
        if let Some(failed) = failed {
            self.store
                .discard(&self.env.directory().join("trees").join(failed.tree))?;
        }
        Ok(())
    }
}

pub(crate) fn samples_beside(log: &Path) -> PathBuf {
    log.with_extension("samples")
}
