//! Owns `image build`.

use clap::Args;

use crate::image::catalog;
use crate::sys::error::Result;
use crate::ui::event::Outcome;
use crate::ui::size;
use crate::up::context::Context;
use crate::up::task::Task;

#[derive(Debug, Args)]
pub struct BuildArgs {
    /// The image
    name: String,
    /// Build it again with today's packages
    #[arg(long)]
    refresh: bool,
}

pub(super) fn build(cx: &Context, args: &BuildArgs) -> Result<()> {
    cx.host_as_root("building an image")?;
    let store = cx.store()?;
    let recipe = catalog::find(&cx.config.image_dirs, &args.name)?;
    let old = store.image_of(&recipe)?;
    if !args.refresh
        && let Some(image) = old
    {
        store.use_image(&image.key);
        cx.ui.note(&format!(
            "{}: built {}; `--refresh` builds it again",
            args.name,
            size::ago(image.built)
        ));
        return Ok(());
    }
    let task = Task::start(cx)?;
    let built = task.build_image(&store, &args.name, &recipe, args.refresh);
    // A failed build leaves even more in the trash. Its error takes precedence over one from the cleanup.
    let tidied = cx.tidy(&store);
    let image = built?;
    tidied?;
    let same = old.is_some_and(|old| old.key == image.key);
    let word = if same { "unchanged" } else { "built" };
    let mut message = format!(
        "{}: {word}, {}, digest {}",
        args.name,
        size::count(image.packages.len(), "package"),
        image.digest
    );
    // The value that reproduces this image when written into the recipe.
    if let Some(resolved) = &image.resolved {
        message = format!("{message}, from {resolved}");
    }
    task.reporter.finish(Outcome::Done, message);
    Ok(())
}
