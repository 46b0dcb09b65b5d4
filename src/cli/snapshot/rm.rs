//! Owns `snapshot rm`.

use std::collections::BTreeSet;

use clap::Args;

use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::store::snapshot::no_snapshot;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct RmArgs {
    /// The env
    env: EnvName,
    /// The snapshots
    #[arg(required = true)]
    names: Vec<String>,
}

pub(super) fn rm(cx: &Context, args: &RmArgs) -> Result<()> {
    let (store, ballast) = cx.store_to_free("removing a snapshot")?;
    let record = store.known(&args.env)?;
    if let Some(name) = args
        .names
        .iter()
        .find(|name| record.snapshot(name).is_none())
    {
        return Err(no_snapshot(&args.env, &record, name));
    }
    let names: BTreeSet<&str> = args.names.iter().map(String::as_str).collect();
    let shown: Vec<_> = names.iter().map(|name| format!("`{name}`")).collect();
    cx.confirm(&format!("remove {} of {}?", shown.join(", "), args.env))?;
    let mut env = store.lock_known(&args.env, "snapshot rm", lock::WAIT)?;
    env.remove_snapshots(&names)?;
    for name in names {
        cx.ui
            .note(&format!("{}: snapshot `{name}` removed", args.env));
    }
    drop(env);
    cx.tidy_full(&store, ballast)
}
