//! Owns `fork`.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The env
    env: EnvName,
    /// Name of the new env
    new: EnvName,
}

pub(crate) fn fork(cx: &Context, args: &ForkArgs) -> Result<()> {
    let store = cx.store_to_change("forking an env")?;
    let taken = || {
        usage!("env `{}` exists already", args.new).help(format!(
            "rockenv fork {} NEW, with a name that is free",
            args.env
        ))
    };
    if args.env == args.new {
        return Err(taken());
    }
    let mut from = store.lock_known(&args.env, "fork", lock::WAIT)?;
    let mut new = store.lock_env(&args.new, "fork", lock::WAIT)?;
    new.check_owner()?;
    if new.record().is_some() {
        return Err(taken());
    }
    new.fork_from(&mut from)?;
    cx.ui.note(&format!("{}: a copy of {}", args.new, args.env));
    if !store.freezes_volumes() && !from.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("its build volumes start empty: an overlay store cannot copy them");
    }
    let spec = store.spec(&args.new)?;
    if let Some(head) = &new.known_record()?.head.layer {
        let plan = store.plan_restore(head, &spec, &[])?;
        for other in &plan.blocked {
            let message = format!("{}; leaving it as it is", other.message());
            cx.ui.warn(&message);
        }
        store.restore_results(plan, &spec)?;
    }
    drop((from, new));
    cx.flush_in_background(&store)
}
