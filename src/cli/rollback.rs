//! Owns `rollback`.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::store::snapshot::no_snapshot;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// The env
    env: EnvName,
    /// The snapshot
    snapshot: String,
}

pub(crate) fn rollback(cx: &Context, args: &RollbackArgs) -> Result<()> {
    let store = cx.store_to_change("going back to a snapshot")?;
    let record = store.known(&args.env)?;
    if record.snapshot(&args.snapshot).is_none() {
        return Err(no_snapshot(&args.env, &record, &args.snapshot));
    }
    let question = format!(
        "go back to snapshot `{}` of {}? Changes since its last snapshot are dropped.",
        args.snapshot, args.env
    );
    cx.confirm(&question)?;
    let mut env = store.lock_known(&args.env, "rollback", lock::WAIT)?;
    env.rollback(&args.snapshot)?;
    cx.ui
        .note(&format!("{}: at snapshot `{}`", args.env, args.snapshot));
    if !store.freezes_volumes() && !env.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("build volumes unchanged: an overlay store cannot restore them");
    }
    drop(env);
    cx.tidy(&store)
}
