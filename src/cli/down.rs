//! Owns `down`.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::sys::error::Result;
use crate::up::context::Context;
use crate::up::stop_and_lock::stop_and_lock;

#[derive(Debug, Args)]
pub struct DownArgs {
    /// The env
    #[arg(value_name = "ENV")]
    name: EnvName,
}

pub(crate) fn down(cx: &Context, args: &DownArgs) -> Result<()> {
    let store = cx.store_to_change("stopping an env")?;
    store.known(&args.name)?;
    let (_, stopped) = stop_and_lock(&store, &args.name, "down")?;
    let word = if stopped { "stopped" } else { "nothing runs" };
    cx.ui
        .note(&format!("{}: {word}; everything is kept", args.name));
    cx.tidy(&store)
}
