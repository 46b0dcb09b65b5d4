//! Owns `import`: reads snapshots from a file or directory that another machine's `export` wrote.

use std::path::PathBuf;

use clap::Args;

use crate::share::{self, Import, Pulled};
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;
use crate::up::registry;
use crate::up::task::{Subject, Task};

#[derive(Debug, Args)]
pub struct ImportArgs {
    /// File or directory written by `rockenv export ENV --snapshots FILE`
    #[arg(value_name = "FILE|DIR")]
    from: PathBuf,
    /// Engine whose envs get the snapshots: auto, nspawn, docker or podman
    #[arg(short, long)]
    engine: Option<String>,
    /// Also take snapshots that were built on files from an earlier build [default: `reuse` in the configuration]
    #[arg(long)]
    allow_incremental: bool,
}

pub(crate) fn import(cx: &Context, args: &ImportArgs) -> Result<()> {
    let engine = args.engine.as_deref();
    registry::host_for(cx, engine, "importing snapshots")?;
    let service = registry::service(cx, engine)?;
    let task = Task::start(cx)?;
    let store = cx.store()?;
    let from = args.from.display();
    let shown = format!("import {from}");
    let to = Import {
        store: &store,
        user: &cx.config.user,
        service: service.as_ref(),
        reuse: cx.config.reuse.or_incremental(args.allow_incremental),
    };
    let taken = task.with_progress(Subject::Transfer(&shown), |cx| {
        share::import(to, &args.from, cx)
    });
    cx.flush_in_background(&store)?;
    let taken = taken?;
    for pulled in &taken {
        registry::note_incremental(pulled, &task.reporter);
        let image = store.image(&pulled.image.parse()?)?;
        if let Some(image) = image.filter(|image| !store.is_current(image).unwrap_or(false)) {
            cx.ui.warn(&format!(
                "this machine has a different image of `{}`, so `up` will not find the imported snapshots; use the lock file of the machine that built them: rockenv up PROFILE --locked --lock-file FILE",
                image.name
            ));
        }
    }
    let all = taken.iter().fold(Pulled::default(), |mut all, one| {
        all.image_pulled |= one.image_pulled;
        all.steps.extend(one.steps.iter().cloned());
        all.incremental.extend(one.incremental.iter().cloned());
        all.bytes += one.bytes;
        all
    });
    registry::finish("imported", &all, &from, &task.reporter);
    if cx.json {
        cx.ui
            .json(&object! { schema: "rockenv/import/1", snapshots: &taken })?;
    }
    Ok(())
}
