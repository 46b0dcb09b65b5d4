//! Owns `push`: sends an env's shareable snapshots to a registry.

use std::path::PathBuf;

use clap::Args;

use crate::plan::ids::EnvName;
use crate::share::Shareable;
use crate::sys::error::Result;
use crate::ui::event::Outcome;
use crate::ui::object;
use crate::up::context::Context;
use crate::up::task::Task;
use crate::up::{push, registry};

#[derive(Debug, Args)]
pub struct PushArgs {
    /// The env
    env: EnvName,
    /// Destination: `HOST/NAME`, and `:TAG` as another name for the last snapshot [default: `registry` in the
    /// configuration]
    #[arg(value_name = "REF")]
    reference: Option<String>,
    /// Last step whose snapshot is pushed
    #[arg(long, value_name = "STEP")]
    until: Option<String>,
    /// Also push snapshots that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
    /// Sign the snapshots with this private key, as `cosign generate-key-pair` makes it; its password is in
    /// COSIGN_PASSWORD [default: `sign-key` in the configuration]
    #[arg(long, value_name = "KEY")]
    sign: Option<PathBuf>,
    /// Also sign snapshots that were pulled or imported without a verified signature
    #[arg(long)]
    sign_unverified: bool,
}

pub(crate) fn push(cx: &Context, args: &PushArgs) -> Result<()> {
    cx.host_as_root("pushing snapshots")?;
    let (named, key) = (args.reference.as_deref(), args.sign.as_deref());
    let mut repository = registry::repository_to_push(cx, named, key)?;
    if args.sign_unverified && repository.signs.is_none() {
        return Err(usage!("`--sign-unverified` needs a key to sign with")
            .help("add `--sign KEY`, or set `sign-key` in the configuration"));
    }
    repository.signs_unverified = args.sign_unverified;
    let store = cx.existing_store()?;
    let task = Task::start(cx)?;
    let until = args.until.as_deref();
    let reuse = cx.config.reuse.or_incremental(args.allow_incremental);
    let warn = |text| task.reporter.warn(text);
    let what = Shareable::of(&store, &args.env, until, reuse, &warn)?;
    let (pushed, message) = push::to_registry(&task, &store, &repository, &what, None)?;
    let outcome = match pushed.tags {
        0 => Outcome::Hit,
        _ => Outcome::Done,
    };
    task.reporter.finish(outcome, message);
    if cx.json {
        return cx
            .ui
            .json(&object! { schema: "rockenv/push/1", #[serde(flatten)] pushed: &pushed });
    }
    Ok(())
}
