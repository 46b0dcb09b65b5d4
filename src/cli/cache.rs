//! Owns `cache`: lists caches, empties one, and shrinks one by its own tool inside an env that mounts it.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::plan::gc::Inventory;
use crate::plan::gc::cache::CacheKind as Tool;
use crate::plan::gc::policy::Policy;
use crate::store::Store;
use crate::store::gc_apply::Swept;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::Host;
use crate::sys::process::Program;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum CacheCommand {
    /// List caches with what they hold
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    /// Empty caches; steps fill them again
    Clear(ClearArgs),
}

#[derive(Debug, Args)]
pub struct LsArgs {}

#[derive(Debug, Args)]
pub struct ClearArgs {
    /// The caches
    #[arg(required_unless_present = "all")]
    names: Vec<String>,
    /// All of them
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

pub(crate) fn cache(cx: &Context, command: &CacheCommand) -> Result<()> {
    match command {
        CacheCommand::Ls(_) => ls(cx),
        CacheCommand::Clear(args) => clear(cx, args),
    }
}

fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct CacheRow {
        name: String,
        tool: Option<Tool>,
        content: Option<String>,
        bytes: u64,
        max: Option<u64>,
        envs: Vec<String>,
    }
    let policy = Policy::new(&cx.config.gc, None)?;
    let store = cx.store_to_read()?;
    let rows: Vec<CacheRow> = store
        .caches()?
        .into_iter()
        .map(|(name, shelf)| CacheRow {
            tool: shelf.kind,
            content: store.cache_content(&name),
            bytes: store.cache_bytes(&name),
            max: policy.cache_max.get(&name).copied().or(shelf.max),
            envs: shelf.users.into_keys().collect(),
            name,
        })
        .collect();
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["cache", "content", ">on disk", ">max", "mounted by"]);
    for row in rows {
        table.row([
            row.name.as_str(),
            row.content.as_deref().unwrap_or("-"),
            &size::bytes(row.bytes),
            &row.max.map_or_else(|| "-".to_owned(), size::bytes),
            &row.envs.join(", "),
        ]);
    }
    cx.ui.table(&table);
    Ok(())
}

fn clear(cx: &Context, args: &ClearArgs) -> Result<()> {
    let (store, ballast) = cx.store_to_free("emptying a cache")?;
    let names: Vec<String> = if args.all {
        store.caches()?.into_keys().collect()
    } else {
        args.names.clone()
    };
    if names.is_empty() {
        cx.ui.note("there are no caches");
        return Ok(());
    }
    cx.confirm(&format!("empty {}?", names.join(", ")))?;
    for name in &names {
        clear_one(cx, &store, name)?;
    }
    cx.tidy_full(&store, ballast)
}

fn clear_one(cx: &Context, store: &Store, name: &str) -> Result<()> {
    let bytes = store.cache_bytes(name);
    store.clear_cache(name)?;
    cx.ui
        .note(&format!("cache {name}: freed {}", size::bytes(bytes)));
    Ok(())
}

/// Runs a cache's own tool to shrink it to `max` bytes, in the env that the inventory names.
pub(crate) fn shrink(
    cx: &Context,
    store: &Store,
    inventory: &Inventory,
    name: &str,
    max: u64,
) -> Result<Swept> {
    let Some(cache) = inventory.caches.get(name) else {
        return Ok(Swept::Gone);
    };
    let (Some(kind), Some((env, target))) = (cache.kind, &cache.at) else {
        return Ok(Swept::Stays("no env mounts it".to_owned()));
    };
    // A build may have begun since the inventory was made.
    let shelves = store.caches()?;
    if let Some(env) = shelves.get(name).and_then(|shelf| shelf.busy(store)) {
        return Ok(Swept::Stays(format!("in use by a command in env {env}")));
    }
    let home = cx.config.home.display().to_string();
    // `--apart`: files that the tool leaves beside the cache must not be kept as a change of the env.
    let mut command =
        Program::at(&Host::probe()?.program).args(["--quiet", "--home", &home, "exec", "--apart"]);
    if kind.is_root() {
        command = command.arg("--root");
    }
    let max = max.to_string();
    let inside = [env, "--", "sh", "-ec", kind.script(), "sh", target, &max];
    command
        .args(inside)
        .directory(Path::new("/"))
        .output(1 << 20, &AtomicBool::new(false), &mut |_| {})
        .map_err(|error| {
            Error::new(
                Kind::Unavailable,
                format!("`{}` in env {env} failed", kind.tool()),
            )
            .source(error)
            .help(format!("rockenv cache clear {name}"))
        })?;
    Ok(Swept::Gone)
}
