//! Owns `target`: one file per verb.

mod check;
mod detect;
mod learn;
mod ls;
mod show;

use clap::Subcommand;

use crate::rocm::target::Support;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum TargetCommand {
    /// List GPU targets with the products that have them
    #[command(visible_alias = "list")]
    Ls,
    /// Show a target: products, families, support, excluded projects
    Show(show::ShowArgs),
    /// Show the GPUs of this machine
    Detect,
    /// Compare a checkout of TheRock with rockenv's table
    Check(check::CheckArgs),
    /// Use the targets of a checkout of TheRock in this store
    Learn(check::CheckArgs),
    /// Return to the built-in table of targets
    Forget,
}

pub(crate) fn target(cx: &Context, command: &TargetCommand) -> Result<u8> {
    match command {
        TargetCommand::Ls => ls::ls(cx).map(|()| 0),
        TargetCommand::Show(args) => show::show(cx, args).map(|()| 0),
        TargetCommand::Detect => detect::detect(cx).map(|()| 0),
        TargetCommand::Check(args) => check::check(cx, args),
        TargetCommand::Learn(args) => learn::learn(cx, args).map(|()| 0),
        TargetCommand::Forget => learn::forget(cx).map(|()| 0),
    }
}

/// Returns the word for upstream's support of a target.
fn support_word(support: Option<&Support>) -> &'static str {
    match support {
        Some(support) if support.release_ready => "release",
        Some(support) if support.sanity_tested => "tested",
        Some(support) if support.build_passing => "builds",
        Some(_) => "none",
        None => "unknown",
    }
}
