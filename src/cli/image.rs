//! Owns `image`: listing, building and verifying base images.

use std::collections::BTreeMap;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::Serialize;

use super::list::ago;
use crate::image::catalog;
use crate::store::Store;
use crate::sys::error::{Kind, Result};
use crate::sys::signals::Signals;
use crate::ui::event::Outcome;
use crate::ui::table::Table;
use crate::ui::{Format, size};
use crate::up::context::Context;
use crate::up::task::{Subject, Task};

#[derive(Debug, Subcommand)]
pub enum ImageCommand {
    /// List recipes and what was built from them
    #[command(visible_alias = "list")]
    Ls,
    /// Build an image
    Build(BuildArgs),
    /// Build an image again and compare with the first
    Verify(VerifyArgs),
}

#[derive(Debug, Args)]
pub struct BuildArgs {
    /// The image
    name: String,
    /// Build it again with today's packages
    #[arg(long)]
    refresh: bool,
}

#[derive(Debug, Args)]
pub struct VerifyArgs {
    /// The image
    name: String,
}

pub(crate) fn image(cx: &Context, command: ImageCommand) -> Result<u8> {
    match command {
        ImageCommand::Ls => ls(cx).map(|()| 0),
        ImageCommand::Build(args) => build(cx, &args).map(|()| 0),
        ImageCommand::Verify(args) => verify(cx, &args),
    }
}

fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct ImageRow {
        name: String,
        provider: &'static str,
        description: String,
        built: Option<Timestamp>,
        packages: Option<usize>,
        bytes: Option<u64>,
        digest: Option<String>,
        resolved: Option<String>,
        /// Environment variables of the image, for commands that get none from a profile.
        env: Option<BTreeMap<String, String>>,
    }
    let store = Store::open_existing(&cx.config.home)?;
    let mut rows = Vec::new();
    for listed in catalog::list(&cx.config.image_dirs)? {
        let recipe = catalog::find(&cx.config.image_dirs, &listed.name)?;
        let image = match &store {
            Some(store) => store.image_of(&recipe)?,
            None => None,
        };
        rows.push(ImageRow {
            name: listed.name,
            provider: recipe.provider(),
            description: recipe.description.clone(),
            built: image.as_ref().map(|image| image.built),
            packages: image.as_ref().map(|image| image.packages.len()),
            bytes: image.as_ref().map(|image| image.bytes),
            resolved: image.as_ref().and_then(|image| image.resolved.clone()),
            env: image.as_ref().and_then(|image| image.env.clone()),
            digest: image.map(|image| image.digest),
        });
    }
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["image", "provider", "built", "packages", "size", "digest"]);
    for row in rows {
        table.row([
            row.name,
            row.provider.to_owned(),
            row.built.map(ago).unwrap_or_default(),
            row.packages
                .map(|count| count.to_string())
                .unwrap_or_default(),
            row.bytes.map(size::bytes).unwrap_or_default(),
            row.digest
                .map(|digest| digest[..12].to_owned())
                .unwrap_or_default(),
        ]);
    }
    cx.ui.table(&table);
    Ok(())
}

fn build(cx: &Context, args: &BuildArgs) -> Result<()> {
    cx.host_as_root("building an image")?;
    let store = cx.store()?;
    let recipe = catalog::find(&cx.config.image_dirs, &args.name)?;
    let reporter = cx.ui.reporter(Format::Human);
    let old = store.image_of(&recipe)?;
    if !args.refresh
        && let Some(image) = old
    {
        store.use_image(&image.key);
        cx.ui.note(&format!(
            "{}: built {}; `--refresh` builds it again",
            args.name,
            ago(image.built)
        ));
        return Ok(());
    }
    let signals = Signals::take()?;
    let task = Task::new(cx, &signals, &reporter);
    let image = task.build_image(&store, &args.name, &recipe, args.refresh)?;
    let same = old.is_some_and(|old| old.key == image.key);
    let word = if same { "unchanged" } else { "built" };
    let mut message = format!(
        "{}: {word}, {} packages, digest {}",
        args.name,
        image.packages.len(),
        image.digest
    );
    // What to write into the recipe to get the same image later.
    if let Some(resolved) = &image.resolved {
        message = format!("{message}, from {resolved}");
    }
    reporter.finish(Outcome::Done, message);
    cx.tidy(&store)
}

fn verify(cx: &Context, args: &VerifyArgs) -> Result<u8> {
    let store = cx.store_to_change("building an image")?;
    let recipe = catalog::find(&cx.config.image_dirs, &args.name)?;
    let reporter = cx.ui.reporter(Format::Human);
    let signals = Signals::take()?;
    let task = Task::new(cx, &signals, &reporter);
    let (image, differences) = task.with_progress(Subject::Image(&args.name), |means| {
        store.verify_image(&args.name, &recipe, means)
    })?;
    cx.tidy(&store)?;
    let same = differences.is_empty();
    let (outcome, message) = if same {
        (
            Outcome::Done,
            format!("{}: reproduced, digest {}", args.name, image.digest),
        )
    } else {
        (
            Outcome::Failed,
            format!(
                "{}: differs from the image built {}",
                args.name,
                ago(image.built)
            ),
        )
    };
    reporter.finish(outcome, message);
    for difference in &differences {
        cx.ui.data(&format!(
            "{}: {}\n",
            crate::ui::text::path(&difference.path),
            difference.what
        ));
    }
    Ok(if same { 0 } else { Kind::Drift.exit_code() })
}
