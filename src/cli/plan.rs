//! Owns `plan`: shows what `up` would do and why, and what each starting point would save.

mod show;

use std::collections::BTreeSet;

use clap::Args;
use serde::Serialize;

use crate::engine::choose::{Reason, is_nspawn_installed};
use crate::execute::{BlockedResults, EMPTIED};
use crate::plan::record::Record;
use crate::plan::resolve::{Engine, Volume, VolumeKind};
use crate::plan::savings::{self, StartingPoint};
use crate::plan::{Action, Observed, Plan, PlanStep, Volumes, plan as decide};
use crate::rocm::gpu;
use crate::store::{Store, source};
use crate::sys::error::{Kind, Result};
use crate::up::context::Context;
use crate::up::host_writes::HostWrites;
use crate::up::observe::{plan_for, wanted};
use crate::up::options::{OUTPUT, PlanOptions, options};
use crate::up::other_users::OthersVolumes;
use crate::up::preflight::{Needs, Refused};
use crate::up::registry::{self, Source};
use crate::up::resolve::{FingerprintUse, Gathered, MissingInputs};
use crate::up::select::Selection;
use crate::up::summary::not_its_own;
use crate::up::task::Task;
use crate::up::{gpu_code, locked, offline};

#[derive(Debug, Args)]
pub struct PlanArgs {
    #[command(flatten)]
    plan: PlanOptions,
    /// Exit with 9 if `up` would refuse
    #[arg(long, help_heading = OUTPUT)]
    check: bool,
}

pub(crate) fn plan(cx: &Context, args: PlanArgs) -> Result<u8> {
    show_plan(cx, &args.plan, false, args.check)
}

/// Shows what `up` would do, with `--force` if `is_forced`; returns the exit code.
pub(crate) fn show_plan(
    cx: &Context,
    args: &PlanOptions,
    is_forced: bool,
    is_check: bool,
) -> Result<u8> {
    let selection = args.select(cx, "plan")?;
    let store = Store::open_existing(&cx.config.home)?;
    let (mut gathered, missing) = Gathered::predict(&selection, store.as_ref(), args.clean)?;
    locked::check_steps(&selection, &gathered.inputs)?;
    let mut spec = gathered.resolve(store.as_ref())?;
    let mut remote = None;
    if args.pulls(&cx.config) {
        let task = Task::start(cx)?;
        if let Some(source) = Source::new(&task, args)? {
            (spec, remote) = registry::remote(&source, store.as_ref(), &mut gathered, args, spec)?;
        }
    }
    let mut observed = match &store {
        Some(store) => plan_for(store, None, &gathered, &spec, &options(args))?.0,
        None => Observed::default(),
    };
    observed.remote = remote;
    let plan = decide(
        &wanted(&selection.profile, &spec),
        &observed,
        &options(args),
    );
    let up = args.up_command();
    if let Some(store) = &store {
        locked::check_built(&selection, store, &spec, &plan, &up)?;
    }
    let fingerprints = gathered.fingerprint_uses(&spec);
    let (root, record) = match &store {
        Some(store) => (store.root(), store.record(&spec.name)?),
        None => (cx.config.home.as_path(), None),
    };
    let needs = Needs::of(&selection, &spec, &plan, root, record.as_ref())?;
    let blocked = match &store {
        Some(store) => BlockedResults::of(store, &spec, &plan, record.as_ref(), &spec.name)?,
        None => BlockedResults::default(),
    };
    let new = args.new_env_command();
    let others = OthersVolumes::of(store.as_ref(), &spec, &plan, record.as_ref(), &new);
    let short = needs.refused();
    let short = short.filter(|_| plan.runs() > 0 && !is_forced);
    let offline = offline_refusal(cx, args, store.as_ref(), &selection);
    let further = [offline, others.refusal, blocked.refusal(&up)];
    let refused = refused(&selection, &missing, short, further, &up);
    let mut notes = missing.notes;
    notes.extend(plan.notes.iter().cloned());
    notes.extend(others.warnings);
    notes.extend(not_its_own(&blocked.all));
    notes.extend(losses(store.as_ref(), &plan, record.as_ref()));
    if let (Some(store), Some(image)) = (&store, gathered.inputs.image.key()) {
        notes.extend(gpu_code::notes(store, &spec, plan.start.as_ref(), image));
    }
    let ways = savings::starting_points(&selection.profile, &spec, &selection.past);
    let gpu = selection
        .gpu
        .as_ref()
        .filter(|_| spec.steps.iter().any(|step| step.gpu));
    let host_writes = HostWrites::new(cx, &selection)?.filter(|found| !found.writes.is_empty());
    let report = PlanReport {
        schema: "rockenv/plan/1",
        env: &spec.name,
        refused: refused.as_ref(),
        image: &spec.image,
        engine: spec.engine,
        needs: &needs,
        gpu: gpu.map(|grant| &grant.gpu),
        host_writes: host_writes.as_ref(),
        plan: &plan,
        fingerprints: &fingerprints,
        from: &spec.from,
        ways: &ways,
        notes: &notes,
        other_choices: savings::other_choices(&selection.profile, &spec),
    };
    let code = super::code_of(!is_check || refused.is_none(), Kind::Preflight);
    if cx.json {
        cx.ui.json(&report)?;
        return Ok(code);
    }
    let is_verbose = cx.ui.settings().verbose > 0;
    show::show(&cx.ui, &report, &selection, store.as_ref(), is_verbose);
    let is_build = |volume: &Volume| volume.kind == VolumeKind::Build;
    let replaces = plan.moves && plan.volumes != Volumes::Live;
    if (plan.runs() > 0 || replaces) && spec.volumes.iter().any(is_build) {
        notes.push(show::build_volumes(&plan));
    }
    for note in notes {
        cx.ui.note(&note);
    }
    cx.note_roots_store(store.is_some());
    Ok(code)
}

/// Returns what `--offline` lacks, and the way out.
fn offline_refusal(
    cx: &Context,
    args: &PlanOptions,
    store: Option<&Store>,
    selection: &Selection,
) -> Option<(String, String)> {
    let checked = match store {
        _ if !args.offline => Ok(()),
        Some(store) => offline::check(cx, store, selection),
        None => offline::refuse(&[format!("image `{}`", selection.image)]),
    };
    let error = checked.err()?;
    let help = error.help_text().unwrap_or_default().to_owned();
    Some((error.message().to_owned(), help))
}

/// Returns every reason why `up` would refuse.
fn refused(
    selection: &Selection,
    missing: &MissingInputs,
    short: Option<Refused>,
    further: [Option<(String, String)>; 3],
    up: &str,
) -> Option<Refused> {
    let mut reasons = missing.refused.clone();
    let mut help = Vec::new();
    if !reasons.is_empty() {
        help.push(source::MISSING.to_owned());
    }
    if let Reason::Absent(absence) = &selection.choice.reason {
        reasons.push(absence.why.clone());
        let needs_root = is_nspawn_installed() && !selection.host.root;
        help.push(match &absence.help {
            Some(help) => help.clone(),
            None if needs_root => format!("run `sudo {up}`"),
            None => "`rockenv doctor` shows how to get an engine".to_owned(),
        });
    } else if selection.choice.engine == Engine::Nspawn && !selection.host.root {
        reasons.push("building an env with systemd-nspawn needs root".to_owned());
        help.push(format!("run `sudo {up}`"));
    }
    if let Some(short) = short {
        reasons.extend(short.reasons);
        help.push(short.help);
    }
    for (reason, way_out) in further.into_iter().flatten() {
        reasons.push(reason);
        help.push(way_out);
    }
    (!reasons.is_empty()).then(|| Refused {
        reasons,
        help: help.join("; "),
    })
}

/// Returns notes about what `up` replaces, empties or moves aside.
fn losses(store: Option<&Store>, plan: &Plan, record: Option<&Record>) -> Vec<String> {
    let (Some(store), Some(record)) = (store, record) else {
        return Vec::new();
    };
    let mut notes: Vec<String> = replaced(plan, record).into_iter().collect();
    if plan.empties_volumes() && !store.freezes_volumes() {
        let kept = store.volumes_by_hand(record);
        for name in &kept {
            notes.push(format!(
                "build volume `{name}` has changes made by `exec` or `shell`: `up` moves it to another directory, \
                 which it names, and keeps it"
            ));
        }
        let is_lost = store.has_older_edits(record, &kept);
        notes.extend(is_lost.then(|| EMPTIED.to_owned()));
    }
    notes
}

/// Returns a note with the snapshots that `up` replaces by new ones of the same step.
fn replaced(plan: &Plan, record: &Record) -> Option<String> {
    let is_replaced = |step: &&PlanStep| {
        let snapshot = record
            .step_snapshots()
            .find(|known| *known.name == *step.name);
        snapshot.is_some_and(|snapshot| match step.action {
            Action::Run | Action::Pull => true,
            Action::Hit => plan.moves && snapshot.key != step.key,
            Action::Skip | Action::Later => false,
        })
    };
    let names = plan.steps.iter().filter(is_replaced);
    let names: Vec<&str> = names.map(|step| step.name.as_str()).collect();
    match *names {
        [] => None,
        [name] => Some(format!("`up` replaces the snapshot {name}")),
        _ => Some(format!("`up` replaces the snapshots {}", names.join(", "))),
    }
}

#[derive(Debug, Serialize)]
struct PlanReport<'a> {
    schema: &'static str,
    env: &'a str,
    refused: Option<&'a Refused>,
    image: &'a str,
    engine: Engine,
    needs: &'a Needs,
    gpu: Option<&'a gpu::Gpu>,
    /// Host directories that the user has not agreed to yet.
    host_writes: Option<&'a HostWrites>,
    plan: &'a Plan,
    fingerprints: &'a [FingerprintUse],
    from: &'a str,
    ways: &'a [StartingPoint],
    notes: &'a [String],
    /// Steps of other variants or starting points.
    #[serde(skip)]
    other_choices: BTreeSet<&'a str>,
}
