//! Owns the options of `up` and `plan`.

use std::path::{Path, PathBuf};

use clap::Args;

use super::context::Context;
use super::request::{SelectArgs, UpRequest, WHAT};
use super::select::Selection;
use super::{env_origin, locked};
use crate::plan::StepOptions;
use crate::profile::{Profile, is_path};
use crate::store::Store;
use crate::store::config::Config;
use crate::store::history::Reuse;
use crate::sys::error::Result;
use crate::sys::shell::quoted;
use crate::sys::suggest;
use crate::ui::Format;

/// The options of `plan`, which are those of `up` that decide what would be done.
#[derive(Debug, Args)]
pub(crate) struct PlanOptions {
    #[command(flatten)]
    pub(crate) select: SelectArgs,
    /// Name of the env [default: the profile's name, with the targets, variant, release and starting point that are
    /// given]
    #[arg(short, long, help_heading = WHAT)]
    pub(crate) name: Option<String>,
    /// Last step to run
    // `matrix up` adds its own to the options for each `up`.
    #[arg(
        long,
        value_name = "STEP",
        overrides_with = "until",
        help_heading = STEPS
    )]
    pub(crate) until: Option<String>,
    /// Run a step again, and all after it
    #[arg(long, value_name = "STEP", help_heading = STEPS)]
    pub(crate) rerun: Option<String>,
    /// Start from the last clean snapshot, and reset build volumes to it
    #[arg(long, help_heading = STEPS)]
    pub(crate) clean: bool,
    /// Also start from other envs' snapshots that were built on files from an earlier build [default: `reuse` in the
    /// configuration]
    #[arg(long, help_heading = STEPS, hide_short_help = true)]
    pub(crate) allow_incremental: bool,
    /// Maximum number of jobs for a step [default: by cores, memory and earlier runs]
    #[arg(
        short,
        long,
        help_heading = MACHINE,
        value_parser = at_least_one
    )]
    pub(crate) jobs: Option<u32>,
    /// GPU for steps with `gpu`: a PCI address, render node or index. If there is none, `auto` skips these steps and
    /// `required` fails; `none` always skips them
    #[arg(
        long,
        default_value = "auto",
        value_name = "auto|required|none|PCI|renderDN|INDEX",
        help_heading = MACHINE,
        hide_short_help = true
    )]
    pub(crate) gpu: String,
    /// Build exactly what the lock file names, and refuse differences
    #[arg(long, help_heading = SOURCES)]
    pub(crate) locked: bool,
    /// The lock file [default: where `lock` writes it]
    #[arg(
        long,
        value_name = "FILE",
        requires = "locked",
        help_heading = SOURCES,
        hide_short_help = true
    )]
    pub(crate) lock_file: Option<PathBuf>,
    /// Fetch nothing: images and sources must be present, and steps get no network
    #[arg(long, help_heading = SOURCES)]
    pub(crate) offline: bool,
    /// Pull what the store lacks from the registry, and build the rest [default: `pull` in the configuration]
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        help_heading = SOURCES,
        hide_short_help = true
    )]
    pub(crate) pull: Option<bool>,
}

#[derive(Debug, Args)]
pub struct UpOptions {
    #[command(flatten)]
    pub(crate) plan: PlanOptions,
    /// Remove the env when this command ends, even if it is killed; outputs, caches and sources stay
    #[arg(long, help_heading = STEPS, hide_short_help = true)]
    pub(crate) ephemeral: bool,
    /// Push each snapshot to the registry while later steps run [default: `push` in the configuration]
    #[arg(
        long,
        value_name = "BOOL",
        num_args = 0..=1,
        default_missing_value = "true",
        require_equals = true,
        help_heading = SOURCES,
        hide_short_help = true
    )]
    pub(crate) push: Option<bool>,
    /// Continue even if the machine has too little disk or memory
    #[arg(long, help_heading = MACHINE, hide_short_help = true)]
    pub(crate) force: bool,
    /// Show the plan and change nothing
    #[arg(short = 'd', long, help_heading = OUTPUT)]
    pub(crate) dry_run: bool,
    /// Install what is missing on the host first
    #[arg(long, help_heading = MACHINE, hide_short_help = true)]
    pub(crate) setup: bool,
    /// Append a line of JSON to this file for each step, with its time, memory and disk
    #[arg(long, value_name = "FILE", help_heading = OUTPUT, hide_short_help = true)]
    pub(crate) metrics: Option<PathBuf>,
    /// How progress is shown
    #[arg(
        long,
        default_value = "auto",
        value_name = "auto|json",
        help_heading = OUTPUT,
        hide_short_help = true
    )]
    pub(crate) progress: Format,
}

const STEPS: &str = "Steps";
const MACHINE: &str = "Machine";
const SOURCES: &str = "Inputs and snapshots from elsewhere";
pub(crate) const OUTPUT: &str = "Output";

impl PlanOptions {
    pub(crate) fn request(&self, verb: &'static str) -> UpRequest<'_> {
        UpRequest {
            name: self.name.as_deref(),
            jobs: self.jobs,
            gpu: &self.gpu,
            locked: self.locked,
            ..self.select.request(verb)
        }
    }

    /// Returns `rockenv up` for the same env.
    pub(crate) fn up_command(&self) -> String {
        self.command(&self.request("up"), self.lock_file.as_deref())
    }

    /// Returns `rockenv up` for another env of the same profile.
    pub(crate) fn new_env_command(&self) -> String {
        self.request("up").command("up", &[("--name", Some("NEW"))])
    }

    fn command(&self, request: &UpRequest<'_>, lock_file: Option<&Path>) -> String {
        let gpu = (self.gpu != "auto").then_some(self.gpu.as_str());
        let mut text = request.command("up", &[("--name", self.name.as_deref()), ("--gpu", gpu)]);
        text.extend(self.locked.then_some(" --locked"));
        if let Some(file) = lock_file {
            let file = file.to_string_lossy();
            text.extend([" --lock-file ", &quoted(&file)]);
        }
        text
    }

    /// Returns whether missing steps are pulled from a registry.
    pub(crate) fn pulls(&self, config: &Config) -> bool {
        self.pull.unwrap_or(config.pull) && !self.offline
    }

    /// Returns the rules for using and sharing snapshots of others.
    pub(crate) fn reuse(&self, config: &Config) -> Reuse {
        config.reuse.or_incremental(self.allow_incremental)
    }

    /// Reads the profile and the machine, and applies the lock file if requested.
    pub(crate) fn select(&self, cx: &Context, verb: &'static str) -> Result<Selection> {
        let request = self.request(verb);
        let mut selection = Selection::new(cx, &request)?;
        check_names(&selection.profile, self)?;
        selection.reuse = self.reuse(&cx.config);
        selection.until.clone_from(&self.until);
        if self.locked {
            locked::follow(cx, &mut selection, &request, self.lock_file.as_deref())?;
        }
        // Without a readable store there is no env to continue.
        if let Some(store) = Store::open_existing(&cx.config.home).ok().flatten() {
            let note = env_origin::check(&store, &selection, &request)?;
            selection.notes.extend(note);
        }
        Ok(selection)
    }
}

impl UpOptions {
    /// Returns the command that brings the env up to date from any directory. `lock` is the lock file that it follows:
    /// that of a built-in profile is in the working directory, any other is beside its profile.
    pub(super) fn lasting_command(&self, lock: Option<&Path>) -> String {
        let request = self.plan.request("up");
        let absolute = |file: &Path| std::path::absolute(file).unwrap_or_else(|_| file.to_owned());
        let what = request.what.filter(|what| is_path(what));
        let what = what.map(|what| absolute(Path::new(what)));
        let what = what.as_ref().map(|what| what.to_string_lossy());
        let lock = lock.filter(|lock| lock.is_relative());
        let lock_file = self.plan.lock_file.as_deref().or(lock).map(absolute);
        let request = UpRequest {
            what: what.as_deref().or(request.what),
            ..request
        };
        self.plan.command(&request, lock_file.as_deref())
    }

    /// Returns the command that resumes where this one ended. It omits `--offline`, which may have made a step fail.
    pub(crate) fn resume_command(&self) -> String {
        let plan = &self.plan;
        let mut text = plan.up_command();
        if let Some(step) = &plan.until {
            text.extend([" --until ", &quoted(step)]);
        }
        if let Some(jobs) = plan.jobs {
            text.extend([" --jobs ", &jobs.to_string()]);
        }
        for (flag, value) in [(" --pull", plan.pull), (" --push", self.push)] {
            if let Some(value) = value {
                text.extend([flag, if value { "" } else { "=false" }]);
            }
        }
        text.extend(plan.allow_incremental.then_some(" --allow-incremental"));
        // The machine will not have more memory by then.
        text.extend(self.force.then_some(" --force"));
        text.extend(self.ephemeral.then_some(" --ephemeral"));
        text
    }

    /// Returns the command that repeats all of this, after an end before the first step.
    pub(super) fn repeat_command(&self) -> String {
        let mut text = self.resume_command();
        if let Some(step) = &self.plan.rerun {
            text.extend([" --rerun ", &quoted(step)]);
        }
        text.extend(self.plan.clean.then_some(" --clean"));
        text.extend(self.plan.offline.then_some(" --offline"));
        text
    }

    /// Returns whether new snapshots are pushed to a registry.
    pub(crate) fn pushes(&self, config: &Config) -> bool {
        self.push.unwrap_or(config.push && !self.plan.offline)
    }
}

fn at_least_one(text: &str) -> std::result::Result<u32, String> {
    match text.parse() {
        Ok(0) => Err("must be at least 1".to_owned()),
        Ok(jobs) => Ok(jobs),
        Err(error) => Err(error.to_string()),
    }
}

fn check_names(profile: &Profile, args: &PlanOptions) -> Result<()> {
    let position = |name: &String| profile.steps.iter().position(|step| step.name == **name);
    for name in args.until.iter().chain(&args.rerun) {
        if position(name).is_none() {
            let names: Vec<&str> = profile
                .steps
                .iter()
                .map(|step| step.name.as_str())
                .collect();
            let error = not_found!("profile `{}` has no step `{name}`", profile.name);
            return Err(error.help(suggest::choices_help(name, &names, "its steps are")));
        }
    }
    match (&args.rerun, &args.until) {
        (Some(rerun), Some(until)) if position(rerun) > position(until) => Err(usage!(
            "`--rerun {rerun}` is after `--until {until}`, so nothing would run"
        )
        .help(format!("--rerun {rerun}, or --until {rerun}"))),
        _ => Ok(()),
    }
}

pub(crate) fn options(args: &PlanOptions) -> StepOptions {
    StepOptions {
        until: args.until.clone(),
        rerun: args.rerun.clone(),
        clean: args.clean,
    }
}

/// Returns the options that remain after `step` has run.
pub(super) fn rest(profile: &Profile, step: &str, asked: StepOptions) -> StepOptions {
    let at = |name: &str| profile.steps.iter().position(|step| step.name == name);
    let next = at(step).and_then(|position| profile.steps.get(position + 1));
    let rerun = asked.rerun.map(|name| match next {
        Some(next) if at(&name) <= at(step) => next.name.to_string(),
        _ => name,
    });
    StepOptions {
        until: asked.until,
        rerun,
        clean: false,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser as _;

    use super::*;
    use crate::sys::shell::quoted_path;

    #[derive(Debug, clap::Parser)]
    struct Line {
        #[command(flatten)]
        up: UpOptions,
    }

    fn up(line: &str) -> UpOptions {
        Line::try_parse_from(line.split(' ')).unwrap().up
    }

    #[test]
    fn a_resumed_command_keeps_its_options_and_only_a_repeated_one_runs_steps_again() {
        let kept = "p --until a --jobs 2 --pull=false --push --allow-incremental";
        for (given, resumed, more) in [
            ("p", "p", ""),
            ("p --ephemeral --force", "p --force --ephemeral", ""),
            (kept, kept, ""),
            (
                "p --jobs 2 --rerun a --offline --clean",
                "p --jobs 2",
                " --rerun a --clean --offline",
            ),
        ] {
            let up = up(&format!("rockenv {given}"));
            assert_eq!(up.resume_command(), format!("rockenv up {resumed}"));
            assert_eq!(up.repeat_command(), format!("rockenv up {resumed}{more}"));
        }
    }

    #[test]
    fn a_lasting_command_works_in_any_directory() {
        let here = |file: &str| quoted_path(&std::env::current_dir().unwrap().join(file));
        let (profile, lock) = (here("p.toml"), here("p.lock"));
        let file = Some(Path::new("p.lock"));
        let given = up("rockenv ./p.toml --locked --lock-file p.lock");
        let lasting = format!("rockenv up {profile} --locked --lock-file {lock}");
        assert_eq!(given.lasting_command(file), lasting);
        let named = up("rockenv p --locked");
        let lasting = format!("rockenv up p --locked --lock-file {lock}");
        assert_eq!(named.lasting_command(file), lasting);
        let beside = Some(Path::new("/profiles/p.lock"));
        assert_eq!(named.lasting_command(beside), "rockenv up p --locked");
    }
}
