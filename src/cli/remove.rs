//! Owns `down` and `rm`.

use std::time::Duration;

use clap::Args;

use crate::sys::error::{Kind, Result};
use crate::up::context::Context;
use crate::up::seize::seize;

/// Arguments of `down`.
#[derive(Debug, Args)]
pub struct DownArgs {
    /// The env
    name: String,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The envs
    #[arg(required = true)]
    names: Vec<String>,
    /// Stop first what runs in them
    #[arg(short, long)]
    force: bool,
}

/// Stops what runs in an env.
pub fn down(cx: &Context, args: &DownArgs) -> Result<()> {
    let store = cx.store_to_change("stopping an env")?;
    store.known(&args.name)?;
    let (_, stopped) = seize(&store, &args.name, "down")?;
    let word = if stopped { "stopped" } else { "nothing runs" };
    cx.ui
        .note(&format!("{}: {word}; everything is kept", args.name));
    cx.tidy(&store)
}

/// Removes envs.
pub fn rm(cx: &Context, args: &RmArgs) -> Result<()> {
    cx.host_as_root("removing an env")?;
    let store = cx.existing_store()?;
    for name in &args.names {
        store.known(name)?;
    }
    let question = format!(
        "remove {}? Sources, caches and outputs stay.",
        args.names.join(", ")
    );
    cx.confirm(&question)?;
    // Before anything is written, a lock's holder included.
    let ballast = store.drop_ballast()?;
    // May take one of them, which then is as wished.
    cx.reap(&store)?;
    for name in &args.names {
        let env = match args.force {
            true => seize(&store, name, "rm")?.0,
            false => store
                .lock_env(name, "rm", Duration::ZERO)
                .map_err(|error| match error.kind() {
                    Kind::Busy => error.help(format!("rockenv rm --force {name}")),
                    _ => error,
                })?,
        };
        if env.record().is_some() {
            env.remove()?;
            cx.ui.note(&format!("{name}: removed"));
        }
    }
    cx.tidy_full(&store, ballast)
}
