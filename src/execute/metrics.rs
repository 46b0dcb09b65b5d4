//! Owns the row of `up --metrics` for a step.

use jiff::Timestamp;

use crate::plan::ids::StepKey;
use crate::plan::resolve::Spec;
use crate::sys::name::StepName;
use crate::ui::event::{Cost, Outcome};
use crate::ui::metrics::{Row, SCHEMA};

impl Row {
    /// Returns the row of a step that did not run.
    pub(crate) fn of(
        spec: &Spec,
        step: &StepName,
        key: Option<&StepKey>,
        outcome: Outcome,
    ) -> Self {
        let targets: Vec<&str> = spec.targets.iter().map(|target| target.name()).collect();
        Self {
            schema: SCHEMA,
            time: Timestamp::now(),
            env: spec.name.to_string(),
            profile: spec.profile.clone(),
            target: targets.join(","),
            engine: spec.engine.name().to_owned(),
            step: step.clone(),
            key: key.map(ToString::to_string).unwrap_or_default(),
            outcome,
            jobs: None,
            cost: Cost::default(),
            cache_hits: None,
            cache_misses: None,
            slurm_job: None,
        }
    }
}
