//! Owns `plan`: shows what `up` would do, with reasons, and what each starting point would save.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Serialize;

use crate::engine::choose::Reason;
use crate::plan::record;
use crate::plan::resolve::{Engine, Spec, Volume, VolumeKind};
use crate::plan::savings::{self, Figure, Way};
use crate::plan::{Action, Observed, Plan, Volumes, plan as decide};
use crate::profile::FROM_SOURCE;
use crate::rocm::gpu;
use crate::store::Store;
use crate::sys::error::Result;
use crate::sys::signals::Signals;
use crate::ui::table::Table;
use crate::ui::{Format, size};
use crate::up::context::Context;
use crate::up::locked;
use crate::up::observe::plan_for;
use crate::up::observe::wanted;
use crate::up::options::{PlanOptions, options};
use crate::up::preflight::Needs;
use crate::up::registry::{self, Source};
use crate::up::resolve::{Gathered, Said};

/// Shows what `up` would do.
pub fn plan(cx: &Context, args: PlanOptions) -> Result<()> {
    let selection = args.select(cx, "plan")?;
    let store = Store::open_existing(&cx.config.home)?;
    let (mut gathered, mut notes) = Gathered::predict(&selection, store.as_ref(), args.clean)?;
    locked::check_steps(&selection, &gathered.inputs)?;
    let mut spec = gathered.resolve(store.as_ref())?;
    let mut remote = None;
    if args.pulls(&cx.config) {
        let (signals, reporter) = (Signals::take()?, cx.ui.reporter(Format::Human));
        if let Some(source) = Source::new(cx, &args, &signals, &reporter)? {
            let found = registry::remote(&source, store.as_ref(), &mut gathered, &args, spec)?;
            (spec, remote) = (found.spec, found.last);
        }
    }
    let mut observed = match &store {
        Some(store) => plan_for(store, None, &gathered, &spec, &options(&args))?.0,
        None => Observed::default(),
    };
    observed.remote = remote;
    let plan = decide(
        &wanted(&selection.profile, &spec),
        &observed,
        &options(&args),
    );
    if let Some(store) = &store {
        locked::check_built(&selection, store, &plan)?;
    }
    notes.extend(plan.notes.iter().cloned());
    let fingerprints = gathered.fingerprints_said(&spec);
    let (root, record) = match &store {
        Some(store) => (store.root(), store.record(&spec.name)?),
        None => (cx.config.home.as_path(), None),
    };
    let needs = Needs::of(&selection, &spec, &plan, root, record.as_ref())?;
    if let (true, Err(refused)) = (plan.runs() > 0, needs.preflight()) {
        let advice = refused.help_text().unwrap_or_default();
        notes.push(format!(
            "`up` would refuse: {}; {advice}",
            refused.message()
        ));
    }
    let ways = match &store {
        Some(store) => savings::ways(&selection.profile, &spec, &recorded(store, &spec)?),
        None => savings::ways(&selection.profile, &spec, &BTreeMap::new()),
    };
    let gpu = selection
        .gpu
        .as_ref()
        .filter(|_| spec.steps.iter().any(|step| step.gpu));
    let report = PlanReport {
        schema: "rockenv/plan/1",
        env: &spec.name,
        image: &spec.image,
        engine: spec.engine,
        needs: &needs,
        gpu: gpu.map(|grant| &grant.gpu),
        plan: &plan,
        fingerprints: &fingerprints,
        from: &spec.from,
        ways: &ways,
        notes: &notes,
    };
    if cx.json {
        return cx.ui.json(&report);
    }
    let store = store.as_ref().map_or_else(
        || "no store yet".to_owned(),
        |store| format!("{} store at {}", store.method(), store.root().display()),
    );
    show(cx, &report, &selection.choice.reason, &store);
    let is_build = |volume: &Volume| volume.kind == VolumeKind::Build;
    if plan.runs() > 0 && spec.volumes.iter().any(is_build) {
        let word = match plan.volumes {
            Volumes::Live => "are kept",
            Volumes::Restored => "are restored from the previous snapshot",
            Volumes::Fresh => "start empty",
        };
        notes.push(format!("build volumes {word}"));
    }
    for note in notes {
        cx.ui.note(&note);
    }
    Ok(())
}

/// The result of `plan`.
#[derive(Debug, Serialize)]
struct PlanReport<'a> {
    schema: &'static str,
    env: &'a str,
    image: &'a str,
    engine: Engine,
    needs: &'a Needs,
    gpu: Option<&'a gpu::Gpu>,
    plan: &'a Plan,
    fingerprints: &'a [Said],
    from: &'a str,
    ways: &'a [Way],
    notes: &'a [String],
}

/// Shows everything but the notes, for people.
fn show(cx: &Context, report: &PlanReport<'_>, reason: &Reason, store: &str) {
    cx.ui.data(&format!(
        "env    {}\nimage  {}\nengine {} ({reason}), {store}\n{}gpu    {}\n",
        report.env,
        report.image,
        report.engine,
        report.needs.lines(),
        report
            .gpu
            .map_or_else(|| "none".to_owned(), ToString::to_string),
    ));
    for said in report.fingerprints {
        cx.ui.data(&format!("keys   {said}\n"));
    }
    let mut table = Table::new(["step", "plan", "why"]);
    for step in &report.plan.steps {
        let word = match step.action {
            Action::Hit => "have",
            Action::Pull => "pull",
            Action::Run => "run",
            Action::Skip => "skip",
            Action::Later => "later",
        };
        table.row([step.name.as_str(), word, step.why.as_str()]);
    }
    cx.ui.table(&table);
    if report.from == FROM_SOURCE && report.plan.runs() > 0 && !report.ways.is_empty() {
        cx.ui.data("\n");
        cx.ui.table(&shown_ways(report.ways));
    }
}

/// Returns the cost of this profile's steps on this machine, by step.
fn recorded(store: &Store, spec: &Spec) -> Result<BTreeMap<String, Figure>> {
    let mut found = BTreeMap::new();
    for env in store.envs()? {
        let Ok(Some(record)) = store.record(&env) else {
            continue;
        };
        let own = record.profile == spec.profile;
        let same = |ran: &record::StepRecord| {
            let step = spec.step(&ran.name);
            own || step.is_some_and(|step| ran.key.as_ref() == Some(&step.key))
        };
        for step in &record.steps {
            if step.outcome == record::Outcome::Done
                && let Some(cost) = step.cost.filter(|_| same(step))
            {
                let figure = Figure {
                    step: step.name.clone(),
                    seconds: Some(cost.wall_ms.div_ceil(1000)),
                    disk: u64::try_from(cost.disk_delta).ok(),
                    source: format!("env {env}, on this machine"),
                };
                found.insert(step.name.clone(), figure);
            }
        }
    }
    Ok(found)
}

fn shown_ways(ways: &[Way]) -> Table {
    let mut table = Table::new(["--from", "saves", "disk", "by"]);
    for way in ways {
        let (seconds, disk) = way.sums();
        let known = |value: u64, text: String| if value == 0 { String::new() } else { text };
        let by = way.figures.iter().map(|figure| {
            let time = figure.seconds.map(|seconds| {
                let text = size::duration(Duration::from_secs(seconds));
                format!(" {text}")
            });
            let disk = figure.disk.map(|bytes| format!(" {}", size::bytes(bytes)));
            let (time, disk) = (time.unwrap_or_default(), disk.unwrap_or_default());
            format!("{}{time}{disk} ({})", figure.step, figure.source)
        });
        // One line per figure, so that the sums can be judged.
        let mut by = by.collect::<Vec<_>>().into_iter();
        table.row([
            way.name.clone(),
            known(seconds, size::duration(Duration::from_secs(seconds))),
            known(disk, size::bytes(disk)),
            by.next().unwrap_or_default(),
        ]);
        for line in by {
            table.row(["", "", "", line.as_str()]);
        }
    }
    table
}
