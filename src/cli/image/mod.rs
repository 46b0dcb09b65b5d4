//! Owns `image`: one file per verb.

mod build;
mod ls;
mod verify;

use clap::Subcommand;

use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// List recipes and what was built from them
    #[command(visible_alias = "list")]
    Ls,
    /// Build an image
    Build(build::BuildArgs),
    /// Build an image again and compare with the first
    Verify(verify::VerifyArgs),
}

pub(crate) fn image(cx: &Context, command: ImageCommand) -> Result<u8> {
    match command {
        ImageCommand::Ls => ls::ls(cx).map(|()| 0),
        ImageCommand::Build(args) => build::build(cx, &args).map(|()| 0),
        ImageCommand::Verify(args) => verify::verify(cx, &args),
    }
}
