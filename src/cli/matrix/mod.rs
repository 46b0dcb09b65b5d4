//! Owns `matrix`: several envs with one command.

mod up;
mod write;

use clap::{Args, Subcommand};

use crate::sys::error::Result;
use crate::up::context::Context;
use crate::up::request::WHAT;

/// Work with several targets at once.
#[derive(Debug, Subcommand)]
pub enum MatrixCommand {
    /// Bring an env up for each target; common steps are built once
    Up(up::MatrixUpArgs),
    #[command(flatten)]
    Write(Box<write::For>),
}

#[derive(Debug, Args)]
pub(crate) struct Which {
    /// Targets and target families [default: those that each profile names]
    #[arg(
        index = 1,
        value_name = "TARGET|FAMILY",
        required_unless_present = "profile"
    )]
    targets: Vec<String>,
    /// Profile or profile file; may be given again [default: therock]
    #[arg(short, long, help_heading = WHAT)]
    profile: Vec<String>,
}

/// Runs a `matrix` command; returns the exit code.
pub(crate) fn matrix(cx: &Context, command: &MatrixCommand) -> Result<u8> {
    match command {
        MatrixCommand::Up(args) => up::up(cx, args),
        MatrixCommand::Write(form) => write::write(cx, form).map(|()| 0),
    }
}
