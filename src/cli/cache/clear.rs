//! Owns `cache clear`.

use clap::Args;

use crate::store::Store;
use crate::sys::error::Result;
use crate::ui::size;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct ClearArgs {
    /// The caches
    #[arg(required_unless_present = "all")]
    names: Vec<String>,
    /// All of them
    #[arg(long, conflicts_with = "names")]
    all: bool,
}

pub(super) fn clear(cx: &Context, args: &ClearArgs) -> Result<()> {
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
    let known = store.caches()?;
    if let Some(unknown) = names.iter().find(|name| !known.contains_key(*name)) {
        return Err(not_found!("no cache `{unknown}`").help("rockenv cache ls"));
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
