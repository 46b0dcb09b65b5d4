//! Owns `cache ls`.

use clap::Args;
use serde::Serialize;

use crate::plan::gc::cache::CacheKind as Tool;
use crate::plan::gc::policy::Policy;
use crate::sys::error::Result;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct LsArgs {}

pub(super) fn ls(cx: &Context) -> Result<()> {
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
