//! Owns `hook`: one file per verb.

mod check;
mod ls;

use clap::Subcommand;

use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum HookCommand {
    /// List hooks
    #[command(visible_alias = "list")]
    Ls,
    /// Check hooks for mistakes, and against a source or a range of its revisions
    Check(check::CheckArgs),
}

/// Works with hooks; returns the exit code.
pub(crate) fn hook(cx: &Context, command: &HookCommand) -> Result<u8> {
    match command {
        HookCommand::Ls => ls::ls(cx).map(|()| 0),
        HookCommand::Check(args) => check::check(cx, args),
    }
}
