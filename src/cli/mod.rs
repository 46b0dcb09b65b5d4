//! Owns the shape of the command line. Each verb's file runs its command.

mod cache;
mod completions;
mod dispatch;
mod doctor;
mod down;
mod du;
mod env;
mod exec;
mod export;
mod fork;
mod fsck;
mod gc;
pub(crate) mod help;
mod hook;
mod image;
mod import;
mod job_summary;
mod lock;
mod logs;
mod ls;
pub(crate) mod man;
mod matrix;
mod on;
mod plan;
mod profile;
pub(crate) mod program;
mod pull;
mod push;
mod report;
mod rm;
mod rollback;
mod schema;
mod setup;
mod shell;
mod snapshot;
mod status;
mod target;
pub(crate) mod testing;
mod trust;
mod up;
mod verify;
mod watch;

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::remote::RemoteRequest;
use crate::sys::error::Kind;
use crate::up::options::UpOptions;

/// Returns the exit code of a check.
fn code_of(is_good: bool, otherwise: Kind) -> u8 {
    match is_good {
        true => 0,
        false => otherwise.exit_code(),
    }
}

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
#[command(next_help_heading = "Global options")]
pub struct GlobalArgs {
    /// Print more; repeat for even more
    #[arg(short, long, global = true, hide_short_help = true, action = clap::ArgAction::Count)]
    pub verbose: u8,
    /// Print warnings and errors only
    #[arg(short, long, global = true, hide_short_help = true)]
    pub quiet: bool,
    /// Answer questions with yes
    #[arg(short, long, global = true, hide_short_help = true)]
    pub yes: bool,
    /// Print results as JSON
    #[arg(long, global = true, hide_short_help = true)]
    pub json: bool,
    /// The store's root [default: /var/lib/rockenv for root]
    #[arg(long, global = true, hide_short_help = true, value_name = "DIR")]
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
    Ls,
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
    /// Rebuild steps of an env from clean, and compare them with their snapshots
    Verify(verify::VerifyArgs),
    /// Go back to a snapshot
    Rollback(rollback::RollbackArgs),
    /// Create an env from the current state of another
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
    /// Run a rockenv command on another machine, over ssh
    On(RemoteRequest),
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
    Doctor,
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
