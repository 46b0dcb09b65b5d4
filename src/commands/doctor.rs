use crate::context::Context;
use crate::error::Result;
use clap::Args;
#[derive(Debug, Args)]
pub struct DoctorArgs {}
pub fn doctor(_cx: &Context, _args: &DoctorArgs) -> Result<u8> {
    Ok(0)
}
