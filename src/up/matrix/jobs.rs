//! Owns the jobs that build several envs on another system, by the envs' current plans.

use std::cmp::Reverse;
use std::path::Path;

use fs_err as fs;

use super::check_options;
use super::rockenv_command::{EnvPlan, GRACE, RockenvCommand};
use crate::matrix::jobs::{Env, Job, NEEDED, Runners, jobs, shortage, take_option};
use crate::matrix::pipeline::{Calls, Pipeline, Share, Size, words};
use crate::matrix::slurm::{NO_QUEUE, QUEUED};
use crate::matrix::{Cell, check_names, common};
use crate::plan::resolve;
use crate::profile::{self, Origin};
use crate::sys::error::{Error, Kind, Result, ResultExt as _, named_path};
use crate::sys::host::{Host, working_directory};
use crate::sys::process::{self, Program};
use crate::sys::signals::{Cancel, Signals};
use crate::sys::trusted_files;
use crate::up::context::Context;

/// Maximum size of the ids of one submission, in bytes.
const IDS_LIMIT: u64 = 1 << 20;
/// Maximum size of the file that lists the machines, in bytes.
const LARGEST_RUNNERS: u64 = 1 << 20;

pub(crate) struct PipelineRequest<'a> {
    pub cells: &'a [Cell],
    pub runners: &'a Runners,
    /// The `--gpu` value for jobs with a GPU, unless the options name another.
    pub gpu: &'a str,
    pub calls: Calls,
    pub share: Share,
    /// Put the envs whose steps take longest first, as far as their times are known; otherwise they stay as named.
    pub longest_first: bool,
}

/// Returns the jobs of envs without planning them.
pub(crate) fn without_plans(cx: &Context, cells: &[Cell], runners: &Runners) -> Result<Vec<Job>> {
    jobs_for(cx, &envs(cx, cells, runners)?, runners, NEEDED)
}

/// Decides the jobs by the current plans of the envs.
pub(crate) fn pipeline(cx: &Context, request: PipelineRequest<'_>) -> Result<Pipeline> {
    let (mut calls, share, runners) = (request.calls, request.share, request.runners);
    check_options(&calls.options)?;
    let (options, asked) = take_option(&calls.options, "--gpu");
    calls.options = options;
    let options = planning_options(&calls.options, &share);
    let mut planned = plans(cx, request.cells, &options)?;
    if request.longest_first {
        planned.sort_by_key(|(_, plan)| Reverse(plan.needs.known_ms()));
    }
    let (cells, plans): (Vec<Cell>, Vec<EnvPlan>) = planned.into_iter().unzip();
    let mut envs = envs(cx, &cells, runners)?;
    for (env, plan) in envs.iter_mut().zip(&plans) {
        // The options may change the name, and `rm` needs the right one.
        plan.env.as_str().clone_into(&mut env.name);
    }
    let gpu = asked.as_deref().unwrap_or(request.gpu);
    let jobs = jobs_for(cx, &envs, runners, gpu)?;
    let steps: Vec<_> = plans.iter().map(|plan| plan.plan.steps.clone()).collect();
    let common = match (common(&steps), cells.first(), jobs.first()) {
        (count @ 1.., Some(cell), Some(first)) => Some(Job {
            name: "common steps".to_owned(),
            up: [&cell.args[..], &["--gpu".to_owned(), "none".to_owned()]].concat(),
            until: Some(steps[0][count - 1].name.to_string()),
            ..first.clone()
        }),
        _ => None,
    };
    let pipeline = Pipeline::new(calls, size(&plans), common, jobs, share)?;
    check_machines(cx, &pipeline, &plans, runners)?;
    Ok(pipeline)
}

/// Refuses profiles outside of the working directory, because the jobs have only that checkout.
pub(crate) fn check_checkout(cx: &Context, cells: &[Cell]) -> Result<()> {
    let checkout = fs::canonicalize(working_directory()?)?;
    for cell in cells {
        let name = cell.profile.as_deref().unwrap_or(resolve::DEFAULT_PROFILE);
        let profile = profile::load(&cx.config.profile_dirs, name)?;
        for (origin, _) in profile.files() {
            let Origin::File(path) = origin else { continue };
            let found = fs::canonicalize(path)?;
            if Path::new(name).is_absolute() || !found.starts_with(&checkout) {
                let stem = path.file_stem().unwrap_or_default().display();
                let path = path.display();
                let error = usage!("profile `{stem}` is at `{path}`, which the jobs do not see");
                let help = "copy it into ./profiles, or name it relative to the repository";
                return Err(error.help(help));
            }
        }
    }
    Ok(())
}

/// Reads the file that lists the machines.
pub(crate) fn runners(path: &Path) -> Result<Runners> {
    let help = "--runners takes a file that names the build machines: `build = [\"self-hosted\"]`";
    let read = || {
        let found = fs::metadata(path).map_err(|error| named_path(path)(error).help(help))?;
        let found = match found.is_file() {
            true => trusted_files::open(path, LARGEST_RUNNERS)?,
            false => None,
        };
        let found = found.ok_or_else(|| usage!("it is not a regular file").help(help))?;
        let text = std::str::from_utf8(&found.bytes);
        Runners::parse(text.map_err(|_| invalid!("it is not text").help(help))?)
    };
    read().context(|| format!("cannot read `{}`", path.display()))
}

/// Runs a script that submits the jobs, and returns their ids.
pub(crate) fn submit(cx: &Context, script: &str) -> Result<String> {
    let path = cx.config.host_variable("PATH").unwrap_or_default();
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    let missing = ["squeue", "sbatch", "scancel"].into_iter().find(|name| {
        let mut places = std::env::split_paths(path);
        !places.any(|place| place.join(name).is_file())
    });
    if let Some(name) = missing {
        let error = unavailable!("cannot submit the jobs to Slurm: there is no `{name}` here");
        let help =
            "run rockenv on a machine of the cluster, or write the script without `--submit`";
        return Err(error.help(help));
    }
    let (mut lines, mut queued, mut answers) = (Vec::new(), None, true);
    let submitted = Program::at("/bin/sh")
        .inherit_env()
        .env("PATH", path)
        .directory(working_directory()?)
        .grace(GRACE)
        .arg("-c")
        .arg(script)
        .output(IDS_LIMIT, cancel.flag(), &mut |event| match event {
            process::Event::Line(line) => {
                queued = queued
                    .take()
                    .or_else(|| line.strip_prefix(QUEUED).map(str::to_owned));
                answers &= line != NO_QUEUE;
                lines.push(line.to_owned());
            }
            process::Event::Tick => cancel.poll(),
        });
    // The error of a failed submission has these lines as its cause.
    if submitted.is_ok() || cancel.caught().is_some() {
        lines.iter().for_each(|line| cx.ui.note(line));
    }
    let submitted = cancel.outcome(submitted).map_err(|error| {
        let (kind, help) = match (error.kind(), queued) {
            (kind @ Kind::Signal(_), _) => (kind, None),
            (_, Some(found)) => {
                let jobs = found.split(':').next().unwrap_or_default();
                (Kind::Busy, Some(format!("scancel {jobs}, or wait for it")))
            }
            _ => {
                let help = match answers {
                    true => "check `--gres` and `--sbatch`; sinfo shows what the cluster has",
                    false => "`scontrol ping` shows whether Slurm answers",
                };
                (Kind::Unavailable, Some(help.to_owned()))
            }
        };
        Error::new(kind, "cannot submit the jobs to Slurm")
            .source(error)
            .help_if(help)
    })?;
    Ok(String::from_utf8_lossy(&submitted).into_owned())
}

/// Returns the envs, named as `up` names them by default.
fn envs(cx: &Context, cells: &[Cell], runners: &Runners) -> Result<Vec<Env>> {
    cells
        .iter()
        .map(|cell| {
            let name = cell.profile.as_deref().unwrap_or(resolve::DEFAULT_PROFILE);
            let profile = profile::load(&cx.config.profile_dirs, name)?;
            let stem = cell.target.filter(|_| cell.profile.is_none());
            let targets = cell.targets(&profile.targets)?;
            let asked = cell.target.as_slice();
            Ok(Env {
                name: resolve::env_name(
                    None,
                    stem.map(|target| target.name()),
                    &profile.name,
                    asked,
                    &[],
                )?
                .into(),
                target: runners
                    .choose(&targets)
                    .ok_or_else(|| unexpected!("an env has no target"))?,
                gpu: profile.steps.iter().any(|step| step.gpu),
                cell: cell.clone(),
            })
        })
        .collect()
}

/// Returns the jobs, and warns about steps that no job runs.
fn jobs_for(cx: &Context, envs: &[Env], runners: &Runners, gpu: &str) -> Result<Vec<Job>> {
    check_names(envs.iter().map(|env| (env.name.as_str(), &env.cell)))?;
    let (jobs, homeless) = jobs(envs, runners, gpu)?;
    if !homeless.is_empty() {
        let steps = format!("the steps with a GPU for {}", homeless.join(", "));
        let message = format!("no job runs {steps}: no runner has such a GPU");
        cx.ui.note(&message);
    }
    Ok(jobs)
}

/// Returns the largest needs among these envs.
fn size<'a>(plans: impl IntoIterator<Item = &'a EnvPlan>) -> Size {
    let mut size = Size {
        cpus: 1,
        ..Size::default()
    };
    for EnvPlan { needs, .. } in plans {
        let disk = needs.disk.first().map(|disk| disk.needed);
        size.cpus = size.cpus.max(needs.sizing.jobs.value);
        size.memory = size.memory.max(needs.memory);
        size.disk = size.disk.max(disk.filter(|needed| *needed > 0));
    }
    size
}

/// Warns about jobs that do not fit on their machines. Refuses them if the user did not name these machines.
fn check_machines(
    cx: &Context,
    pipeline: &Pipeline,
    plans: &[EnvPlan],
    runners: &Runners,
) -> Result<()> {
    for job in pipeline.common.iter().chain(&pipeline.jobs) {
        let plan = plans.iter().filter(|plan| *plan.env == *job.env);
        let Some(short) = shortage(&job.runner, size(plan)) else {
            continue;
        };
        let message = format!("{}: needs {short}", job.name);
        if !runners.names(&job.runner) {
            return Err(Error::new(Kind::Preflight, message).help(
                "list larger machines in a file and pass it with `--runners FILE`: `build = [\"self-hosted\"]`",
            ));
        }
        cx.ui.warn(&message);
    }
    Ok(())
}

/// Returns the options for plans. They do not ask a registry, whose current content does not change the jobs.
fn planning_options(options: &[String], share: &Share) -> Vec<String> {
    let mut options = options.to_vec();
    if let Share::Registry(_) = share {
        options.retain(|option| {
            let name = option.split('=').next();
            !matches!(name, Some("--pull" | "--push"))
        });
        options.push("--pull=false".to_owned());
    }
    options
}

fn plans(cx: &Context, cells: &[Cell], options: &[String]) -> Result<Vec<(Cell, EnvPlan)>> {
    let signals = Signals::take()?;
    let cancel = Cancel::new(&signals);
    let rockenv = RockenvCommand {
        cx,
        host: Host::probe()?,
        options,
        cancel: &cancel,
    };
    cells
        .iter()
        .map(|cell| match cancel.outcome(rockenv.plan(cell)) {
            Ok(plan) => Ok((cell.clone(), plan)),
            Err(error) if matches!(error.kind(), Kind::Signal(_)) => Err(error),
            // The error of `rockenv up` has its own words.
            Err(error) => {
                let up = format!("cannot plan `rockenv up {}`", words(&cell.args));
                let said = error.chain().pop().unwrap_or_default();
                Err(Error::new(error.kind(), up).source(said))
            }
        })
        .collect()
}
