//! Owns `profile`: one file per verb.

mod check;
mod ls;
mod new;
mod show;

use clap::Subcommand;

use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    /// List profiles
    #[command(visible_alias = "list")]
    Ls,
    /// Show a profile's files, or the resolved spec
    Show(show::ShowArgs),
    /// Check profiles for mistakes
    Check(check::CheckArgs),
    /// Create a new profile
    New(new::NewArgs),
}

pub(crate) fn profile(cx: &Context, command: ProfileCommand) -> Result<u8> {
    match command {
        ProfileCommand::Ls => ls::ls(cx).map(|()| 0),
        ProfileCommand::Show(args) => show::show(cx, &args).map(|()| 0),
        ProfileCommand::Check(args) => check::check(cx, &args),
        ProfileCommand::New(args) => new::new(cx, &args).map(|()| 0),
    }
}
