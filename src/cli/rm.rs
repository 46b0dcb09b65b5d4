//! Owns `rm`.

use clap::Args;

use crate::execute::count_manual_edits;
use crate::plan::ids::EnvName;
use crate::store::lock;
use crate::sys::error::{Kind, Result};
use crate::ui::size;
use crate::up::context::Context;
use crate::up::stop_and_lock::stop_and_lock;

#[derive(Debug, Args)]
pub struct RmArgs {
    /// The envs
    #[arg(required = true, value_name = "ENV")]
    names: Vec<EnvName>,
    /// First stop everything that runs in them
    #[arg(short, long)]
    force: bool,
}

pub(crate) fn rm(cx: &Context, args: &RmArgs) -> Result<()> {
    cx.host_as_root("removing an env")?;
    let store = cx.existing_store()?;
    store.check_directories()?;
    for name in &args.names {
        store.known(name)?;
    }
    let mut question = vec![format!(
        "remove {}? Sources, caches and outputs stay.",
        args.names.join(", ")
    )];
    let mut shown = Vec::new();
    for name in &args.names {
        // Manual edits cannot be rebuilt.
        let edits = count_manual_edits(&store.env_dir(name))?;
        for (view, files) in &edits {
            question.push(format!(
                "{} changed by hand in `{}` {} deleted.",
                size::count(*files, "file"),
                view.display(),
                if *files == 1 { "is" } else { "are" }
            ));
        }
        shown.push(edits);
    }
    cx.confirm(&question.join(" "))?;
    // Frees the ballast before any write, even that of a lock holder.
    let ballast = store.drop_ballast()?;
    // Reaping may already remove one of the named envs.
    cx.reap(&store)?;
    for (name, shown) in args.names.iter().zip(shown) {
        let env = match args.force {
            true => stop_and_lock(&store, name, "rm")?.0,
            false => {
                store
                    .lock_env(name, "rm", lock::WAIT)
                    .map_err(|error| match error.kind() {
                        Kind::Busy => error.help(format!("rockenv rm --force {name}")),
                        _ => error,
                    })?
            }
        };
        if env.record().is_some() {
            if !args.force && count_manual_edits(&store.env_dir(name))? != shown {
                return Err(busy!(
                    "files of env `{name}` were changed by hand meanwhile; not removing it"
                )
                .help("run the command again"));
            }
            env.remove()?;
            cx.ui.note(&format!("{name}: removed"));
        }
    }
    cx.tidy_full(&store, ballast)
}
