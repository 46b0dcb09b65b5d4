//! Owns the command line's shape. Each verb's file runs its command.

pub(crate) mod cache;
pub(crate) mod completions;
pub(crate) mod dispatch;
pub(crate) mod doctor;
pub(crate) mod down;
pub(crate) mod du;
pub(crate) mod env;
mod examples;
pub(crate) mod exec;
pub(crate) mod export;
pub(crate) mod fork;
pub(crate) mod fsck;
pub(crate) mod gc;
pub(crate) mod help;
pub(crate) mod hook;
pub(crate) mod image;
pub(crate) mod import;
pub(crate) mod job_summary;
pub(crate) mod lock;
pub(crate) mod logs;
pub(crate) mod ls;
pub(crate) mod man;
pub(crate) mod manual;
pub(crate) mod matrix;
pub(crate) mod on;
pub(crate) mod plan;
pub(crate) mod profile;
pub(crate) mod program;
pub(crate) mod pull;
pub(crate) mod push;
pub(crate) mod report;
pub(crate) mod rm;
pub(crate) mod rollback;
pub(crate) mod schema;
pub(crate) mod setup;
pub(crate) mod shell;
pub(crate) mod snapshot;
pub(crate) mod status;
pub(crate) mod target;
pub(crate) mod testing;
pub(crate) mod trust;
pub(crate) mod up;
pub(crate) mod verify;
pub(crate) mod watch;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::up::options::UpOptions;

/// Reproducible build environments for ROCm, in systemd-nspawn and containers.
#[derive(Debug, Parser)]
#[command(
    name = "rockenv",
    version,
    propagate_version = true,
    max_term_width = 100,
    disable_help_subcommand = true
)]
pub struct Cli {
    #[command(flatten)]
    pub global: GlobalArgs,
    #[command(subcommand)]
    pub command: Command,
}

#[derive(Clone, Debug, Default, Args)]
pub struct GlobalArgs {
    /// Print more; repeat for even more
    #[arg(short, long, global = true, help_heading = "Global options", hide_short_help = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Print errors only
    #[arg(
        short,
        long,
        global = true,
        help_heading = "Global options",
        hide_short_help = true
    )]
    pub quiet: bool,
    /// Answer questions with yes
    #[arg(
        short,
        long,
        global = true,
        help_heading = "Global options",
        hide_short_help = true
    )]
    pub yes: bool,
    /// Print results as JSON
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        hide_short_help = true
    )]
    pub json: bool,
    /// The store's root [default: /var/lib/rockenv for root]
    #[arg(
        long,
        global = true,
        help_heading = "Global options",
        hide_short_help = true,
        value_name = "DIR"
    )]
    pub home: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub enum Command {
    /// Build an env, or bring it up to date
    Up(UpOptions),
    /// Show what `up` would do
    Plan(plan::PlanArgs),
    /// Stop all processes in an env; nothing is removed
    Down(down::DownArgs),
    #[command(visible_alias = "remove")]
    /// Remove an env; never a source, cache, output or host directory
    Rm(rm::RmArgs),
    #[command(visible_alias = "list")]
    /// List envs
    Ls(ls::LsArgs),
    /// Show an env: its steps, snapshots, image and age
    Status(status::StatusArgs),
    #[command(visible_alias = "enter")]
    /// Open a shell in an env
    Shell(shell::ShellArgs),
    /// Run a command in an env
    Exec(exec::ExecArgs),
    /// Print the variables for using what an env built
    Env(env::EnvArgs),
    /// Show a step's log
    Logs(logs::LogsArgs),
    /// Work with snapshots
    #[command(subcommand)]
    Snapshot(snapshot::SnapshotCommand),
    /// Build steps of an env again, from clean, and compare with their snapshots
    Verify(verify::VerifyArgs),
    /// Go back to a snapshot
    Rollback(rollback::RollbackArgs),
    /// Make a new env from an env's present state
    Fork(fork::ForkArgs),
    /// Push an env's snapshots to a registry, for other machines
    Push(push::PushArgs),
    /// Pull snapshots from a registry, for `up` to find
    Pull(pull::PullArgs),
    /// Show where the disk space went
    Du(du::DuArgs),
    /// Write a report of an env's steps: time, memory, disk, cache hits
    Report(report::command::ReportArgs),
    /// Free disk space: unused data first, then what the policy allows
    Gc(gc::GcArgs),
    /// Work with caches
    #[command(subcommand)]
    Cache(cache::CacheCommand),
    /// Work with base images
    #[command(subcommand)]
    Image(image::ImageCommand),
    /// Work with profiles
    #[command(subcommand)]
    Profile(profile::ProfileCommand),
    /// Work with hooks: checked changes of sources
    #[command(subcommand)]
    Hook(hook::HookCommand),
    /// Run a command of rockenv on another machine, by ssh
    On(on::OnArgs),
    /// Work with several targets at once
    #[command(subcommand)]
    Matrix(matrix::MatrixCommand),
    /// Show GPU targets
    #[command(subcommand)]
    Target(target::TargetCommand),
    /// Lock the exact inputs of an env, for `up --locked`
    Lock(lock::LockArgs),
    /// Export an env's outputs with a manifest of their inputs, or its snapshots as a file
    Export(export::ExportArgs),
    /// Import snapshots that another machine exported, for `up` to find
    Import(import::ImportArgs),
    /// Trust a directory's files: rockenv.toml, profiles/, images/ and hooks/
    Trust(trust::TrustArgs),
    /// Install what the host needs
    Setup(setup::command::SetupArgs),
    /// Check what this machine supports and what is missing
    Doctor(doctor::command::DoctorArgs),
    /// Check the store, and repair it
    Fsck(fsck::FsckArgs),
    /// Print a completion script
    Completions(completions::CompletionsArgs),
    /// Print the manual page, or write one for each command
    Man(man::ManArgs),
    /// Print a JSON schema
    Schema(schema::SchemaArgs),
    /// Print the help of a command
    Help(help::HelpArgs),
}
