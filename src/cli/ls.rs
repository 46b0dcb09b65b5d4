//! Owns `ls`.

use clap::Args;
use jiff::Timestamp;
use serde::Serialize;

use crate::plan::record::Record;
use crate::store::{Store, lock};
use crate::sys::error::Result;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;
use crate::up::seize::holder;

#[derive(Debug, Args)]
pub struct LsArgs {}

#[derive(Serialize)]
struct EnvRow {
    env: String,
    state: &'static str,
    profile: String,
    targets: Vec<String>,
    image: String,
    snapshots: usize,
    created: Timestamp,
    used: Timestamp,
    holder: Option<lock::Holder>,
}

pub(crate) fn ls(cx: &Context, _args: &LsArgs) -> Result<()> {
    let mut rows = Vec::new();
    let store = Store::open_existing(&cx.config.home)?;
    if let Some(store) = &store {
        for name in store.envs()? {
            if let Ok(Some(record)) = store.record(&name) {
                rows.push(row(store, name, &record));
            }
        }
        for unreadable in store.unreadable_envs()? {
            cx.ui.warn(&unreadable.to_string());
        }
    }
    if cx.json {
        return cx.ui.json(&rows);
    }
    if rows.is_empty() {
        match &cx.config.roots_store {
            Some(_) => cx.ui.note("no envs of your own"),
            None => cx.ui.note("no envs yet; begin with: rockenv up hip-smoke"),
        }
        cx.note_roots_store(store.is_some());
        return Ok(());
    }
    let mut table = Table::new([
        "env",
        "state",
        "profile",
        "targets",
        "image",
        "snapshots",
        "used",
    ]);
    for row in rows {
        table.row([
            row.env,
            row.state.to_owned(),
            row.profile,
            row.targets.join(","),
            row.image,
            row.snapshots.to_string(),
            size::ago(row.used),
        ]);
    }
    cx.ui.table(&table);
    cx.note_roots_store(true);
    Ok(())
}

fn row(store: &Store, env: String, record: &Record) -> EnvRow {
    let holder = holder(store, &env);
    EnvRow {
        state: state(store, &env, record, holder.as_ref()),
        profile: record.profile.clone(),
        targets: record.targets.clone(),
        image: record.image.clone(),
        snapshots: record.snapshots.len(),
        created: record.created,
        used: store.last_use(&env, record),
        holder,
        env,
    }
}

pub(super) fn state(
    store: &Store,
    env: &str,
    record: &Record,
    holder: Option<&lock::Holder>,
) -> &'static str {
    match holder.map(|holder| holder.verb.as_str()) {
        Some("up") => "building",
        Some(_) if !store.only_waits(env) => "in use",
        _ if record.failed.is_some() => "failed",
        _ if record.complete => "ready",
        _ => "unfinished",
    }
}
