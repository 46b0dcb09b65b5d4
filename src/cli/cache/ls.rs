//! Owns `cache ls`.

use crate::plan::gc::policy::Policy;
use crate::sys::error::Result;
use crate::ui::{object, size};
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let policy = Policy::new(&cx.config.gc, None)?;
    let store = cx.store_to_read()?;
    let caches = store.caches()?;
    let rows = caches.iter().map(|(name, cache)| {
        object! {
            name: name.as_str(),
            tool: cache.kind,
            content: store.cache_content(name),
            bytes: store.cache_bytes(name),
            max: policy.cache_max.get(name).copied().or(cache.max),
            envs: cache.users.keys().cloned().collect::<Vec<_>>(),
        }
    });
    let rows: Vec<_> = rows.collect();
    let header = ["cache", "content", ">on disk", ">max", "mounted by"];
    cx.list(&rows, header, |row| {
        [
            row.name.to_owned(),
            row.content.clone().unwrap_or_else(|| "-".to_owned()),
            size::bytes(row.bytes),
            row.max.map_or_else(|| "-".to_owned(), size::bytes),
            row.envs.join(", "),
        ]
    })
}
