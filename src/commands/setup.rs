use crate::context::Context;
use crate::error::Result;
use clap::Args;
#[derive(Debug, Args)]
pub struct SetupArgs {}
pub fn setup(_cx: &Context, _args: &SetupArgs) -> Result<()> {
    Ok(())
}
pub fn install_missing(_cx: &Context) -> Result<()> {
    Ok(())
}
