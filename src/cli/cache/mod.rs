//! Owns `cache`: one file per verb.

mod clear;
mod ls;
mod prune;

use clap::Subcommand;

use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List caches and what they hold
    #[command(visible_alias = "list")]
    Ls,
    /// Empty caches; steps fill them again
    Clear(clear::ClearArgs),
    /// Remove old snapshots from a registry
    Prune(prune::PruneArgs),
}

pub(crate) fn cache(cx: &Context, command: &CacheCommand) -> Result<()> {
    match command {
        CacheCommand::Ls => ls::ls(cx),
        CacheCommand::Clear(args) => clear::clear(cx, args),
        CacheCommand::Prune(args) => prune::prune(cx, args),
    }
}
