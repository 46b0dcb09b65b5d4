use crate::context::Context;
use crate::error::Result;
use clap::Subcommand;
#[derive(Debug, Subcommand)]
pub enum ProfileCommand {
    Ls,
}
pub fn profile(_cx: &Context, _c: ProfileCommand) -> Result<()> {
    Ok(())
}
