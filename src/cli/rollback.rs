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
    let mut env = store.lock_known(&args.env, "rollback", lock::WAIT)?;
    let kept = env.rollback(&args.snapshot)?;
    if let Some(kept) = &kept {
        cx.ui.note(&format!(
            "changes that were in no snapshot are kept as snapshot `{kept}`"
        ));
    }
    cx.ui
        .note(&format!("{}: at snapshot `{}`", args.env, args.snapshot));
    if !store.freezes_volumes() && !env.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("build volumes unchanged: an overlay store cannot restore them");
    }
    drop(env);
    match kept {
        Some(_) => cx.flush_in_background(&store),
        None => cx.tidy(&store),
    }
}
