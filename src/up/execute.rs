//! Owns running a plan in a claimed env: preparing its containers, running the steps, and adopting orphaned snapshots.

use std::collections::BTreeSet;

use super::Run;
use super::resolve::Resolved;
use super::select::Selection;
use crate::engine::choose::Reason;
use crate::engine::docker::Service;
use crate::execute::{Ended, Execution, ExecutionProgress};
use crate::plan::ids::StepKey;
use crate::plan::jobs::forecast;
use crate::plan::{Action, Observed, Plan};
use crate::store::LockedEnv;
use crate::sys::error::Result;
use crate::ui::event::{ChosenEngine, Event, Planned};
use crate::ui::{Reporter, size};

pub(super) fn execute<'a>(
    run: &Run<'a>,
    resolved: &Resolved<'_>,
    env: &mut LockedEnv<'a>,
    observed: &Observed,
    plan: &Plan,
) -> Result<ExecutionProgress> {
    let (spec, gathered) = (&resolved.spec, &resolved.gathered);
    let (selection, reporter) = (gathered.selection, &run.with.task.reporter);
    run.with
        .prepare_containers(env, spec, &resolved.image.key)?;
    if let Some(service) = env.service()? {
        adopt_orphans(env, &service, observed, plan, reporter)?;
    }
    let notes = run.with.provide(selection, spec, plan, &gathered.sources)?;
    notes.into_iter().for_each(|note| reporter.warn(note));
    reporter.emit(&Event::RunStarted {
        env: spec.name.to_string(),
        plan: shown(plan, selection),
        chosen: match selection.choice.reason {
            Reason::Found(why) => Some(ChosenEngine {
                engine: spec.engine.to_string(),
                reason: why.to_owned(),
            }),
            Reason::Asked | Reason::MadeWith | Reason::Absent(_) => None,
        },
    });
    let progress = Execution {
        store: run.with.store,
        env,
        spec,
        plan,
        files: &selection.files,
        sources: &gathered.sources,
        locked: selection.locked.as_ref().map(|locked| &locked.lock),
        hooks: &gathered.hooks,
        host: &selection.host,
        config: &run.with.task.cx.config,
        gpu: selection.gpu.as_ref(),
        offline: run.with.offline,
        apart: &BTreeSet::new(),
        clean: resolved.options.clean,
        stale: None,
        recorded: run.recorded,
        sizing: &selection.sizing,
        signals: &run.with.task.signals,
        reporter,
    }
    .run()?;
    if matches!(progress, ExecutionProgress::Ended(Ended::Complete))
        && !observed.orphaned.is_empty()
        && let Some(service) = env.service()?
    {
        let steps = plan.steps.iter();
        let done = steps.filter(|step| step.action != Action::Later);
        let keys: Vec<&StepKey> = done.filter_map(|step| step.key.as_ref()).collect();
        run.with.store.remove_orphan_snapshots(&service, &keys)?;
    }
    Ok(progress)
}

/// Records snapshots that only the service still has.
fn adopt_orphans(
    env: &LockedEnv<'_>,
    service: &Service,
    observed: &Observed,
    plan: &Plan,
    reporter: &Reporter,
) -> Result<()> {
    if observed.orphaned.is_empty() {
        return Ok(());
    }
    let hits = plan.steps.iter().filter(|step| step.action == Action::Hit);
    let steps: Vec<(&str, &StepKey)> = hits
        .filter_map(|step| Some((step.name.as_str(), step.key.as_ref()?)))
        .collect();
    let count = env.adopt_orphan_snapshots(service, &steps)?;
    if count > 0 {
        let found = size::count(count, "lost snapshot");
        reporter.warn(format!("found {found} at {}", service.flavour));
    }
    Ok(())
}

fn shown(plan: &Plan, selection: &Selection) -> Vec<Planned> {
    let steps = plan.steps.iter();
    let steps = steps.filter_map(|step| Some((step.name.as_str(), step.key.as_deref()?)));
    let forecast = forecast(steps, &selection.past, selection.sizing.jobs.value);
    let expected = |name: &str| {
        let known = forecast.iter().find(|known| known.step == name)?;
        Some(known.wall_ms)
    };
    let shown = (1..).zip(&plan.steps).map(|(index, step)| Planned {
        index,
        name: step.name.clone(),
        key: step.key.clone().map(String::from).unwrap_or_default(),
        cached: step.action == Action::Hit,
        reason: step.why.clone(),
        expected_ms: match step.action {
            Action::Run => expected(&step.name),
            Action::Skip | Action::Later => Some(0),
            Action::Hit | Action::Pull => None,
        },
    });
    shown.collect()
}
