use crate::context::Context;
use crate::error::Result;
use clap::Args;
#[derive(Debug, Args)]
pub struct CompletionsArgs {}
#[derive(Debug, Args)]
pub struct ManArgs {}
#[derive(Debug, Args)]
pub struct SchemaArgs {}
pub fn completions(_cx: &Context, _args: &CompletionsArgs) -> Result<()> {
    Ok(())
}
pub fn man(_cx: &Context, _args: &ManArgs) -> Result<()> {
    Ok(())
}
pub fn schema(_cx: &Context, _args: &SchemaArgs) -> Result<()> {
    Ok(())
}
