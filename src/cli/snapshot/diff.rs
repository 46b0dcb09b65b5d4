//! Owns `snapshot diff`.

use clap::Args;

use crate::execute::inspect;
use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The env
    env: EnvName,
    /// The older snapshot
    from: String,
    /// The newer snapshot [default: the env as it is now]
    to: Option<String>,
}

pub(super) fn diff(cx: &Context, args: &DiffArgs) -> Result<()> {
    let store = cx.store_to_change("comparing snapshots")?;
    let mut env = store.lock_known(&args.env, "snapshot diff", lock::WAIT)?;
    let changes = inspect::diff(&store, &mut env, &args.from, args.to.as_deref())?;
    if cx.json {
        return cx.ui.json(&changes);
    }
    for change in &changes {
        cx.ui.data(&format!(
            "{} {}\n",
            change.kind.mark(),
            crate::ui::text::os(&change.path)
        ));
    }
    Ok(())
}
