//! Owns `snapshot`: one file per verb.

mod create;
mod diff;
mod ls;
mod rm;

use clap::Subcommand;

use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Freeze an env as it is now
    Create(create::CreateArgs),
    /// List an env's snapshots
    #[command(visible_alias = "list")]
    Ls(ls::LsArgs),
    /// Show the changes between two snapshots, or since one
    Diff(diff::DiffArgs),
    /// Remove a snapshot
    #[command(visible_alias = "remove")]
    Rm(rm::RmArgs),
}

pub(crate) fn snapshot(cx: &Context, command: &SnapshotCommand) -> Result<()> {
    match command {
        SnapshotCommand::Create(args) => create::create(cx, args),
        SnapshotCommand::Ls(args) => ls::ls(cx, args),
        SnapshotCommand::Diff(args) => diff::diff(cx, args),
        SnapshotCommand::Rm(args) => rm::rm(cx, args),
    }
}
