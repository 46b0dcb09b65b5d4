//! Owns `cache clear`.

use clap::Args;

use crate::sys::error::Result;
use crate::sys::suggest;
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
    let known = store.caches()?;
    let names: Vec<String> = match args.all {
        true => known.keys().cloned().collect(),
        false => args.names.clone(),
    };
    if names.is_empty() {
        cx.ui.note("there are no caches");
        return Ok(());
    }
    if let Some(unknown) = names.iter().find(|name| !known.contains_key(*name)) {
        let known = known.keys().map(String::as_str);
        let help = suggest::help(unknown, known, "rockenv cache ls");
        return Err(not_found!("no cache `{unknown}`").help(help));
    }
    cx.confirm(&format!("empty {}?", names.join(", ")))?;
    for name in &names {
        let bytes = store.cache_bytes(name);
        store.clear_cache(name)?;
        cx.ui
            .note(&format!("cache {name}: freed {}", size::bytes(bytes)));
    }
    cx.tidy_full(&store, ballast)
}
