use crate::context::Context;
use crate::error::Result;
use clap::Args;
#[derive(Debug, Args)]
pub struct DuArgs {}
pub fn du(_cx: &Context, _args: &DuArgs) -> Result<()> {
    Ok(())
}
