//! Owns `snapshot create`.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::plan::record::Origin;
use crate::store::lock;
use crate::sys::error::Result;
use crate::up::context::Context;
use crate::up::exec::warn_of_lost_changes;

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The env
    env: EnvName,
    /// The snapshot's name
    name: String,
}

pub(super) fn create(cx: &Context, args: &CreateArgs) -> Result<()> {
    let store = cx.store_to_change("taking a snapshot")?;
    let mut env = store.lock_known(&args.env, "snapshot", lock::WAIT)?;
    warn_of_lost_changes(cx, &env, env.known_record()?.head.tree.as_ref())?;
    env.snapshot(&args.name, Origin::User)?;
    cx.ui
        .note(&format!("{}: snapshot `{}`", args.env, args.name));
    if !store.freezes_volumes() && !env.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("without build volumes: an overlay store freezes only the root file system");
    }
    cx.tidy(&store)
}
