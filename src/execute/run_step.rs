//! Owns running one step: its snapshot if it succeeds, a second run with half the jobs if memory ran out, and what
//! remains if it fails.

use jiff::Timestamp;

use super::outcome::Ran;
use super::run_container::Attempt;
use super::step_outputs::StepOutputs;
use super::{Ended, Ending, Execution, Failure, StepEnd, step};
use crate::plan::ids::LayerId;
use crate::plan::jobs::Past;
use crate::plan::record::{Failed, INTERRUPTED, Origin, Outcome, Record, StepRecord};
use crate::plan::resolve::{Step, Volume, VolumeKind};
use crate::plan::step_log::StepLog;
use crate::store::history::History;
use crate::store::layer;
use crate::store::results::OutputBefore;
use crate::store::snapshot::Freeze;
use crate::sys::error::{Kind, Result};
use crate::ui::event;
use crate::ui::metrics::Row;

/// ccache's hits and misses.
type Lookups = (u64, u64);

impl Execution<'_, '_> {
    /// Runs a step whose sources were compared with its key at the moment `began` or later. An error means that it has
    /// not begun, for example because a hook could not be applied.
    pub(super) fn run_step(
        &mut self,
        index: u32,
        step: &Step,
        run: &str,
        began: Timestamp,
    ) -> Result<StepEnd> {
        let parent = self.env.known_record()?.head.layer.clone();
        let began = self.first_began(step, began)?;
        let (views, foreign) = self.views(index, step, parent.as_ref(), run)?;
        let attempt = Attempt {
            index,
            step,
            tree: self.env.checkout_tree(parent.as_ref())?,
            parent: parent.as_ref(),
            log: StepLog::first(run, index, &step.name).to_string().parse()?,
            jobs: self.sizing.jobs.value,
            views: &views,
        };
        let mut seen = self.spec.visible(step);
        let sees_volumes = seen.any(|volume| volume.kind == VolumeKind::Build);
        self.env.begin_step(&step.key, sees_volumes, began)?;
        let ended = self.run_begun(attempt, foreign, run, began);
        Ok(ended.unwrap_or_else(|error| StepEnd::of(error, self.signals)))
    }

    /// Returns when the first of the runs began whose work a step continues, which may have read other sources. `began`
    /// is the beginning of this run.
    fn first_began(&self, step: &Step, began: Timestamp) -> Result<Timestamp> {
        let is_viewed = |name: &str| self.spec.hooks_at(step, name).next().is_some();
        // Whether work is kept outside build volumes.
        let kept = |volume: &Volume| match volume.kind {
            VolumeKind::Build => Some(false),
            VolumeKind::Output => Some(true),
            VolumeKind::Source => is_viewed(&volume.name).then_some(true),
            VolumeKind::Cache | VolumeKind::Host => None,
        };
        let Some(elsewhere) = self.spec.visible(step).filter_map(kept).max() else {
            return Ok(began);
        };
        let (name, record) = (self.env.name(), self.env.known_record()?);
        // A clean build makes its views anew.
        let elsewhere = elsewhere && !self.clean;
        let first = self.store.began(name, record, &step.key, elsewhere)?;
        Ok(first.map_or(began, |first| first.min(began)))
    }

    /// Runs a step that has begun. With `foreign`, its views have files that a clean build would not have; see `views`.
    fn run_begun(
        &mut self,
        mut attempt: Attempt<'_>,
        foreign: Option<bool>,
        run: &str,
        began: Timestamp,
    ) -> Result<StepEnd> {
        let (step, parent) = (attempt.step, attempt.parent);
        let lookups = self.lookups();
        let before = self.outputs_before(step)?;
        let others = self.sees_other_files(step, &before, parent)?;
        let foreign = foreign.or(others.then_some(false));
        let inputs = self.inputs_before(step)?;
        let mut ran = self.run_or_leave(&attempt, &before)?;
        if ran.out_of_memory() && attempt.jobs > 1 {
            self.measure(&attempt, Outcome::Failed, &ran, lookups)?;
            self.halve_jobs(&mut attempt, &ran, run)?;
            ran = self.run_or_leave(&attempt, &before)?;
        }
        let failure = match ran.ending {
            Ending::Interrupted(signal) => {
                let record = ran.record(step, Outcome::Pending, Some(INTERRUPTED.to_owned()));
                self.env.update(|env| put_step(env, record))?;
                self.leave_results(step, &before)?;
                self.discard_tree(&attempt)?;
                return Ok(StepEnd::Stopped(Ended::Interrupted(signal)));
            }
            Ending::Exited { code: 0, .. } => {
                let (outputs, malformed) = match self.step_outputs(step) {
                    Err(error) if error.kind() == Kind::StepFailed => {
                        (StepOutputs::default(), Some(error))
                    }
                    outputs => (outputs?, None),
                };
                let refused = malformed.or_else(|| self.refuse_special(&before).err());
                let changed = self.changed_while(step, &inputs)?;
                match refused {
                    _ if !outputs.drift.is_empty() => (Kind::Drift, outputs.explain(step)),
                    Some(error) => {
                        let why = error.chain().join(": ");
                        (error.kind(), format!("step `{}`: {why}", step.name))
                    }
                    None if let (Some(input), Some(_)) = (&changed, self.locked) => {
                        let why = "changed while it ran, and differs from the lock file";
                        (
                            Kind::Drift,
                            format!("step `{}`: `{input}` {why}", step.name),
                        )
                    }
                    None => {
                        let touched = || self.touched_while(step, began);
                        if let Some(input) = changed.map_or_else(touched, |it| Ok(Some(it)))? {
                            self.mark_stale(step, input)?;
                        }
                        if let Some(message) = ran.hidden_kill(step) {
                            self.reporter.warn(message);
                        }
                        self.measure(&attempt, Outcome::Done, &ran, lookups)?;
                        if let Some(file) = self.keep_results(&before, &attempt.tree, parent)? {
                            self.mark_stale(step, file.display().to_string())?;
                        }
                        return Ok(StepEnd::Frozen(
                            self.freeze(&attempt, &ran, outputs, foreign)?,
                        ));
                    }
                }
            }
            Ending::Exited { .. } | Ending::TimedOut | Ending::Stopped | Ending::Lost => {
                self.explain(&attempt, &ran, None)
            }
        };
        let measured = self
            .measure(&attempt, Outcome::Failed, &ran, lookups)
            .and_then(|()| self.leave_results(step, &before));
        let failure = self.fail(attempt, ran, failure, measured)?;
        Ok(StepEnd::Stopped(Ended::Failed(Box::new(failure))))
    }

    /// Runs a step's container. If that is not possible, records the files left in output volumes.
    fn run_or_leave(&mut self, attempt: &Attempt<'_>, before: &[OutputBefore]) -> Result<Ran> {
        let ran = self.run_container(attempt);
        if ran.is_err() {
            // The first error is reported.
            self.leave_results(attempt.step, before).ok();
        }
        ran
    }

    /// Explains why a step failed; `retry` is the number of jobs of its next run.
    fn explain(&self, attempt: &Attempt<'_>, ran: &Ran, retry: Option<u32>) -> (Kind, String) {
        let limit = step::memory_max(self.spec, self.host);
        ran.explain(attempt.step, attempt.jobs, limit, retry)
    }

    pub(super) fn discard_tree(&self, attempt: &Attempt<'_>) -> Result<()> {
        let trees = self.env.directory().join("trees");
        self.store.discard(&trees.join(&attempt.tree))
    }

    /// Prepares a second run, with half the jobs, of a step that ran out of memory.
    fn halve_jobs(&mut self, attempt: &mut Attempt<'_>, ran: &Ran, run: &str) -> Result<()> {
        let jobs = attempt.jobs / 2;
        let (_, message) = self.explain(attempt, ran, Some(jobs));
        attempt.jobs = jobs;
        self.reporter.warn(message);
        self.discard_tree(attempt)?;
        let second = StepLog {
            attempt: 2,
            ..StepLog::first(run, attempt.index, &attempt.step.name)
        };
        attempt.log = second.to_string().parse()?;
        attempt.tree = self.env.checkout_tree(attempt.parent)?;
        Ok(())
    }

    /// Turns the tree of a successful step into its snapshot.
    fn freeze(
        &mut self,
        attempt: &Attempt<'_>,
        ran: &Ran,
        outputs: StepOutputs,
        foreign: Option<bool>,
    ) -> Result<LayerId> {
        let step = attempt.step;
        let done = ran.record(step, Outcome::Done, None);
        let mut planned = self.plan.steps.iter();
        let key = match &self.stale {
            None => step.key.clone(),
            Some(_) => step.key.of_no_step(),
        };
        let foreign = foreign.or_else(|| self.stale.as_ref().map(|_| false));
        let history = foreign.map(|by_hand| History::Incremental {
            on: attempt.parent.cloned(),
            by_hand,
        });
        let freeze = Freeze {
            tree: &attempt.tree,
            parent: attempt.parent,
            name: &step.name,
            key: Some(&key),
            origin: Origin::Step,
            again: planned.any(|planned| planned.name == step.name && planned.again),
            cost: Some(layer::Cost {
                bytes: ran.frozen,
                wall_ms: ran.cost.wall_ms,
            }),
            prints: outputs.prints,
            pins: outputs.pins,
            history,
        };
        let layer = self.env.freeze(&freeze, |record| put_step(record, done))?;
        self.end_on_views(attempt.parent, &layer)?;
        self.env.end_attempt()?;
        self.env.end_outputs(&step.key)?;
        Ok(layer)
    }

    /// Records a failed step, whose tree stays.
    fn fail(
        &mut self,
        attempt: Attempt<'_>,
        ran: Ran,
        (kind, mut message): (Kind, String),
        measured: Result<()>,
    ) -> Result<Failure> {
        let step = attempt.step;
        if self.offline && step.network {
            message.push_str("; it had no network because of `--offline`");
        }
        let record = ran.record(step, Outcome::Failed, Some(message.clone()));
        let failed = Failed {
            step: step.name.clone(),
            tree: attempt.tree,
            parent: attempt.parent.cloned(),
            log: ran.log.clone(),
            code: match ran.ending {
                Ending::Exited { code, .. } => Some(code),
                Ending::TimedOut | Ending::Interrupted(_) | Ending::Stopped | Ending::Lost => None,
            },
            shown: None,
        };
        let kept = measured.and_then(|()| {
            self.env.update(|env| {
                put_step(env, record);
                env.failed = Some(failed);
            })
        });
        let is_kept = match kept {
            // The disk has no room for the record of the failed tree. The message is the same, and the next `up` starts
            // the step over.
            Err(error) if error.kind() == Kind::OutOfSpace && kind == Kind::OutOfSpace => false,
            other => other.map(|()| true)?,
        };
        Ok(Failure {
            step: step.name.clone(),
            message,
            kind,
            history: self.env.known_record()?.head.volumes_from().history,
            tail: ran.tail,
            is_kept,
            log: self.env.directory().join(&ran.log),
        })
    }

    /// Returns ccache's hits and misses so far, if metrics were requested.
    fn lookups(&self) -> Option<Lookups> {
        if !self.reporter.measures() {
            return None;
        }
        let volumes = self.spec.volumes.iter();
        let caches = volumes.filter(|volume| volume.kind == VolumeKind::Cache);
        caches
            .filter_map(|volume| self.store.cache_lookups(&volume.name))
            .reduce(|(hits, misses), (more, others)| (hits + more, misses + others))
    }

    /// Adds a row to the env's history of step costs.
    fn measure(
        &self,
        attempt: &Attempt<'_>,
        outcome: Outcome,
        ran: &Ran,
        lookups: Option<Lookups>,
    ) -> Result<()> {
        let (step, jobs) = (attempt.step, attempt.jobs);
        self.reporter.measured(|| {
            // The counters start with the cache's first use, and restart when it is emptied.
            let now = self.lookups();
            let (hits, misses) = lookups.unwrap_or_default();
            let ended = match outcome {
                Outcome::Done => event::Outcome::Done,
                _ => event::Outcome::Failed,
            };
            Row {
                jobs: Some(jobs),
                cost: event::Cost::of(ran.cost, self.spec.engine),
                cache_hits: now.map(|now| now.0.saturating_sub(hits)),
                cache_misses: now.map(|now| now.1.saturating_sub(misses)),
                ..Row::of(self.spec, &step.name, Some(&step.key), ended)
            }
        });
        self.env.add_metrics(&Past {
            time: Timestamp::now(),
            env: self.env.name().clone(),
            step: step.name.clone(),
            key: step.key.clone(),
            outcome,
            jobs,
            memory: step::memory_max(self.spec, self.host)
                .unwrap_or(u64::MAX)
                .min(self.host.memory),
            cost: ran.cost,
            log: ran.log.clone(),
        })
    }
}

fn put_step(record: &mut Record, step: StepRecord) {
    match record
        .steps
        .iter_mut()
        .find(|known| known.name == step.name)
    {
        Some(known) => *known = step,
        None => record.steps.push(step),
    }
}
