//! Owns `matrix json`, `github` and the others: writes the jobs for several envs in the format of a CI system or
//! scheduler.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use clap::builder::NonEmptyStringValueParser as NonEmpty;
use clap::{Args, Subcommand};
use fs_err as fs;

use super::Which;
use crate::image::fetch;
use crate::matrix::github::{self, Action};
use crate::matrix::jobs::{NEEDED, Runners, Shard, hosted, take_option};
use crate::matrix::kubernetes::{self, Cluster};
use crate::matrix::pipeline::{Calls, Pipeline, Secret, Share, quote, whole, words};
use crate::matrix::slurm::{self, Site};
use crate::matrix::{Cell, cells, gitlab};
use crate::plan::resolve::DEFAULT_PROFILE;
use crate::profile;
use crate::share::Repository;
use crate::store::config::variables;
use crate::sys::error::Result;
use crate::sys::host::Host;
use crate::sys::shell::quoted;
use crate::ui::object;
use crate::ui::text::escape_json;
use crate::up::context::Context;
use crate::up::matrix::jobs::{self, PipelineRequest};
use crate::up::request::WHAT;

/// The action that installs this version of rockenv.
const THIS: &str = concat!("rockenv/rockenv@v", env!("CARGO_PKG_VERSION"));

/// Variables without the prefix `ROCKENV_` that rockenv reads as root in a job on GitHub's own runners.
const FOR_ROOT: &str = "CI CLICOLOR_FORCE CONTAINER_HOST COSIGN_PASSWORD DOCKER_HOST FTP_PROXY GITHUB_ACTIONS \
     GITHUB_STEP_SUMMARY HTTPS_PROXY HTTP_PROXY NO_COLOR NO_PROXY REGISTRY_AUTH_FILE TMPDIR ftp_proxy http_proxy \
     https_proxy no_proxy";

const MACHINES: &str = "Machines";
const JOBS: &str = "Jobs";

/// The system that the jobs are written for.
#[derive(Debug, Subcommand)]
pub enum For {
    /// Print the jobs of a CI system: one for each env, and one for its steps with a GPU
    Json(JsonArgs),
    /// Print a workflow for GitHub Actions
    Github(GithubArgs),
    /// Print a pipeline for GitLab
    Gitlab(GitlabArgs),
    /// Print a script that submits the envs to Slurm, or run it
    Slurm(SlurmArgs),
    /// Print a JobSet or an Argo Workflow for Kubernetes
    Kubernetes(KubernetesArgs),
}

#[derive(Debug, Args)]
pub(super) struct Part {
    #[command(flatten)]
    which: Which,
    /// Only this part of the envs, such as 2/4
    #[arg(long, value_name = "I/N", help_heading = WHAT)]
    shard: Option<Shard>,
}

#[derive(Debug, Args)]
pub struct JsonArgs {
    #[command(flatten)]
    part: Part,
    /// File that lists the build machines and those with a GPU
    #[arg(long, value_name = "FILE", help_heading = MACHINES)]
    runners: Option<PathBuf>,
}

/// How jobs call rockenv.
#[derive(Debug, Args)]
pub(super) struct Call {
    /// Command that starts rockenv in a job [default: `rockenv`; with `sudo` on GitHub's own runners]
    #[arg(long, value_name = "COMMAND", value_parser = NonEmpty::new(), help_heading = JOBS)]
    rockenv: Option<String>,
    /// Shell command to run at the start of each script of a job, such as one that installs rockenv
    #[arg(long, value_name = "COMMAND", value_parser = NonEmpty::new(), help_heading = JOBS)]
    setup: Option<String>,
    /// Registry repository that jobs push snapshots to and pull them from
    #[arg(long, value_name = "REPOSITORY", help_heading = JOBS)]
    registry: Option<String>,
    /// Set variable ENV in the jobs from the CI system's secret NAME; may be given again
    #[arg(long = "secret", value_name = "ENV=NAME", help_heading = JOBS)]
    secrets: Vec<Secret>,
    /// Time limit of a job, in minutes
    #[arg(long, value_name = "MINUTES", default_value_t = 1440, value_parser = clap::value_parser!(u32).range(1..), help_heading = JOBS)]
    timeout: u32,
    /// Options for each `up`, after `--`
    #[arg(index = 2, last = true, value_name = "OPTION")]
    options: Vec<String>,
}

#[derive(Debug, Args)]
pub(super) struct PipelineArgs {
    #[command(flatten)]
    part: Part,
    /// File that lists the build machines and those with a GPU
    #[arg(long, value_name = "FILE", help_heading = MACHINES)]
    runners: Option<PathBuf>,
    #[command(flatten)]
    call: Call,
    /// All machines use one store: common steps are built first, and steps with a GPU are jobs of their own
    #[arg(long, conflicts_with = "registry", help_heading = MACHINES)]
    one_store: bool,
}

#[derive(Debug, Args)]
pub struct GithubArgs {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Action that installs this rockenv, such as `rockenv/rockenv@COMMIT` [default: that of this version on GitHub's
    /// own runners, unless `--setup` is given]
    #[arg(long, value_name = "REPOSITORY@COMMIT", value_parser = action, help_heading = JOBS)]
    action: Option<String>,
}

/// Parses an action's name with its commit or tag.
fn action(text: &str) -> std::result::Result<String, String> {
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-@".contains(c);
    match text.contains('@') && text.chars().all(plain) {
        true => Ok(text.to_owned()),
        false => Err("an action is written `OWNER/REPOSITORY@COMMIT`".to_owned()),
    }
}

#[derive(Debug, Args)]
pub struct GitlabArgs {
    #[command(flatten)]
    pipeline: PipelineArgs,
    /// Path of the file in the repository: with `--one-store` the pipeline includes it a second time
    #[arg(long, value_name = "PATH", default_value = ".gitlab-ci.yml", value_parser = yaml_path, help_heading = JOBS)]
    path: String,
}

/// Parses a file name that GitLab accepts for a pipeline.
fn yaml_path(text: &str) -> std::result::Result<String, String> {
    let yaml = text.ends_with(".yml") || text.ends_with(".yaml");
    match yaml && !text.chars().any(|c| c.is_whitespace() || c.is_control()) {
        true => Ok(text.to_owned()),
        false => Err("GitLab accepts a file name that ends in .yml, without spaces".to_owned()),
    }
}

#[derive(Debug, Args)]
pub struct SlurmArgs {
    #[command(flatten)]
    part: Part,
    #[command(flatten)]
    call: Call,
    #[command(flatten)]
    site: Site,
    /// Submit the jobs, and print their ids
    #[arg(long, help_heading = "Slurm")]
    submit: bool,
}

#[derive(Debug, Args)]
pub struct KubernetesArgs {
    #[command(flatten)]
    part: Part,
    #[command(flatten)]
    call: Call,
    #[command(flatten)]
    cluster: Cluster,
}

pub(super) fn write(cx: &Context, form: &For) -> Result<()> {
    if cx.json && !matches!(form, For::Json(_)) {
        return Err(usage!("this command writes no JSON")
            .help("leave out --json; `rockenv matrix json` prints jobs as JSON"));
    }
    let text = match form {
        For::Json(args) => args.line(cx)?,
        For::Github(args) => args.workflow(cx)?,
        For::Gitlab(args) => {
            gitlab::pipeline(&args.pipeline.pipeline(cx, Runners::any)?, &args.path)?
        }
        For::Slurm(args) if args.submit => jobs::submit(cx, &args.script(cx)?)?,
        For::Slurm(args) => args.script(cx)?,
        For::Kubernetes(args) => {
            check_home(cx, &args.call)?;
            let pipeline = scheduled(cx, &args.part, &args.call, NEEDED, false)?;
            kubernetes::manifest(&pipeline, &args.cluster)
        }
    };
    cx.ui.data(&text);
    Ok(())
}

/// Refuses `--home` for jobs on other machines, because it names a directory of this machine.
fn check_home(cx: &Context, call: &Call) -> Result<()> {
    let home = match take_option(&call.options, "--home") {
        (_, Some(home)) => home,
        _ if cx.names_home => cx.config.home.to_string_lossy().into_owned(),
        _ => return Ok(()),
    };
    let setup = format!("export ROCKENV_HOME={}", quote(&home));
    let error = usage!("`--home` names the store of this machine, which these jobs do not see");
    Err(error.help(format!("--setup {} names the jobs' store", quoted(&setup))))
}

impl JsonArgs {
    /// Returns the jobs on one line, which CI systems require of a step's output.
    fn line(&self, cx: &Context) -> Result<String> {
        let runners = runners(self.runners.as_deref(), Runners::default)?;
        let include = jobs::without_plans(cx, &self.part.cells()?, &runners)?;
        serde_json::to_string(&object! { include: include })
            .map(|json| escape_json(&json).into_owned())
            .map_err(|error| unexpected!("cannot write the matrix").source(error))
    }
}

impl Call {
    /// Returns how jobs call rockenv; `home` is the store for the `--home` option.
    fn calls(&self, home: Option<&Path>) -> Calls {
        let arguments = std::env::args_os().skip(1);
        let arguments = arguments.map(|word| word.to_string_lossy().into_owned());
        let arguments: Vec<String> = std::iter::once("rockenv".to_owned())
            .chain(arguments)
            .collect();
        let mut rockenv = self.rockenv.clone().unwrap_or_else(|| "rockenv".to_owned());
        if let Some(home) = home {
            rockenv = format!("{rockenv} --home {}", quote(&home.to_string_lossy()));
        }
        Calls {
            written_by: words(&arguments),
            rockenv,
            on_hosted: None,
            setup: self.setup.clone(),
            secrets: self.secrets.clone(),
            options: self.options.clone(),
            minutes: self.timeout,
        }
    }

    fn share(&self, otherwise: Share) -> Result<Share> {
        let Some(registry) = &self.registry else {
            return Ok(otherwise);
        };
        Repository::parse(registry)?;
        Ok(Share::Registry(registry.clone()))
    }
}

impl SlurmArgs {
    fn script(&self, cx: &Context) -> Result<String> {
        if let Some(Secret { variable, name }) = self.call.secrets.first() {
            let error = usage!("`--secret {variable}={name}`: these jobs get no secrets");
            let help = "export the variable before you submit: `sbatch` passes its environment on";
            return Err(error.help(help));
        }
        // Without `--gres`, a task may run on a node without a GPU.
        let gpu = match self.site.gres {
            Some(_) => NEEDED,
            None => "auto",
        };
        // The tasks of an array start in the order of their indices.
        let mut pipeline = scheduled(cx, &self.part, &self.call, gpu, true)?;
        if self.site.gres.is_none() {
            pipeline.jobs = whole(pipeline.jobs);
        }
        Ok(slurm::script(&pipeline, &self.site))
    }
}

impl GithubArgs {
    fn workflow(&self, cx: &Context) -> Result<String> {
        let pipeline = self.pipeline.pipeline(cx, Runners::default)?;
        let label = pipeline.jobs.iter().find_map(|job| hosted(&job.runner));
        if let (Some(label), Share::Store) = (label, &pipeline.share) {
            let error = usage!("`--one-store`: each job on `{label}` gets a new machine");
            let help =
                "list machines of your own in a file for `--runners FILE`, or use `--registry`";
            return Err(error.help(help));
        }
        let action = match (&self.action, label, &pipeline.calls.setup) {
            (Some(action), ..) => Some(action.as_str()),
            (None, Some(_), None) => Some(THIS),
            (None, Some(label), Some(_)) => {
                cx.ui.warn(&format!(
                    "nothing but `--setup` installs rockenv on `{label}`; to install it there: --action {THIS}"
                ));
                None
            }
            (None, None, _) => None,
        };
        let action = match action {
            Some(uses) => {
                let program = fs::File::open(Host::probe()?.program)?;
                Some(Action {
                    uses: uses.to_owned(),
                    sha256: fetch::sha256_of(program, &AtomicBool::new(false))?,
                    everywhere: self.action.is_some(),
                })
            }
            None => None,
        };
        Ok(github::workflow(&pipeline, action.as_ref()))
    }
}

impl PipelineArgs {
    fn pipeline(&self, cx: &Context, without_file: fn() -> Runners) -> Result<Pipeline> {
        check_home(cx, &self.call)?;
        let cells = self.part.some_cells()?;
        jobs::check_checkout(cx, &cells)?;
        let runners = runners(self.runners.as_deref(), without_file)?;
        let share = match self.one_store {
            true => Share::Store,
            false => Share::Nothing,
        };
        let mut calls = self.call.calls(None);
        if self.call.rockenv.is_none() {
            calls.on_hosted = Some(as_root(cx, &cells)?);
        }
        let request = PipelineRequest {
            cells: &cells,
            runners: &runners,
            gpu: NEEDED,
            calls,
            share: self.call.share(share)?,
            longest_first: false,
        };
        jobs::pipeline(cx, request)
    }
}

/// Returns the command on GitHub's own runners. Root gets the variables that rockenv or a profile reads, and no other
/// secret of the job.
fn as_root(cx: &Context, cells: &[Cell]) -> Result<String> {
    let own = variables().map(|(name, _)| name);
    let own = own.filter(|name| name.starts_with("ROCKENV_"));
    let mut names: BTreeSet<String> = own.chain(FOR_ROOT.split(' ')).map(str::to_owned).collect();
    for cell in cells {
        let name = cell.profile.as_deref().unwrap_or(DEFAULT_PROFILE);
        names.extend(profile::load(&cx.config.profile_dirs, name)?.env_from_host);
    }
    let names: Vec<String> = names.into_iter().collect();
    Ok(format!("sudo --preserve-env={} rockenv", names.join(",")))
}

fn runners(path: Option<&Path>, without_file: fn() -> Runners) -> Result<Runners> {
    path.map_or_else(|| Ok(without_file()), jobs::runners)
}

/// Builds the pipeline for a scheduler that chooses the machines, which share one store.
fn scheduled(
    cx: &Context,
    part: &Part,
    call: &Call,
    gpu: &str,
    longest_first: bool,
) -> Result<Pipeline> {
    let runners = Runners::scheduled();
    let request = PipelineRequest {
        cells: &part.some_cells()?,
        runners: &runners,
        gpu,
        calls: call.calls(cx.names_home.then_some(&cx.config.home)),
        share: call.share(Share::Store)?,
        longest_first,
    };
    jobs::pipeline(cx, request)
}

impl Part {
    /// Returns the envs of the shard, possibly none.
    fn cells(&self) -> Result<Vec<Cell>> {
        let cells = cells(&self.which.profile, &self.which.targets)?;
        Ok(match self.shard {
            Some(shard) => shard.of(cells),
            None => cells,
        })
    }

    /// Returns the envs of the shard. Fails for an empty shard: a file without jobs is invalid, and submitting nothing
    /// is a mistake.
    fn some_cells(&self) -> Result<Vec<Cell>> {
        if let Some(shard) = self.shard {
            shard.check(cells(&self.which.profile, &self.which.targets)?.len())?;
        }
        self.cells()
    }
}
