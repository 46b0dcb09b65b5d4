//! Owns `cache`: lists caches, and empties them.

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::plan::gc::cache::CacheKind as Tool;
use crate::plan::gc::policy::Policy;
use crate::store::Store;
use crate::sys::error::Result;
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
