//! Owns `ls`.

use crate::plan::ids::EnvName;
use crate::plan::record::{INTERRUPTED, Record, StepRecord};
use crate::store::{Store, lock};
use crate::sys::error::Result;
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;

pub(crate) fn ls(cx: &Context) -> Result<()> {
    let mut rows = Vec::new();
    let mut unreadable = Vec::new();
    let store = Store::open_existing(&cx.config.home)?;
    if let Some(store) = &store {
        let locks: Vec<String> = lock::lists().collect();
        for name in store.envs()? {
            let Ok(Some(record)) = store.record(&name) else {
                continue;
            };
            let holder = lock::holder_in(&lock::env_lock(&store.env_dir(&name)), &locks);
            let state = state(store, &name, &record, holder.as_ref());
            let used = store.last_use(&name, &record);
            rows.push(object! {
                env: name,
                state: state,
                profile: record.profile,
                targets: record.targets,
                image: record.image,
                snapshots: record.snapshots.len(),
                created: record.created,
                used: used,
                holder: holder,
            });
        }
        unreadable = store.unreadable_envs()?;
        for one in &unreadable {
            cx.ui.warn(&one.to_string());
        }
    }
    if cx.json {
        return cx.ui.json(&rows);
    }
    if rows.is_empty() {
        match &cx.config.roots_store {
            _ if !unreadable.is_empty() => {}
            Some(_) => cx.ui.note("no envs of your own"),
            None => cx.ui.note("no envs yet; begin with: rockenv up hip-smoke"),
        }
        cx.note_roots_store(store.is_some());
        return Ok(());
    }
    let header = [
        "env",
        "state",
        "profile",
        "targets",
        "image",
        "snapshots",
        "used",
    ];
    cx.ui.table(&Table::of(header, rows, |row| {
        [
            row.env.into(),
            row.state.to_owned(),
            row.profile,
            row.targets.join(","),
            row.image,
            row.snapshots.to_string(),
            size::ago(row.used),
        ]
    }));
    cx.note_roots_store(true);
    Ok(())
}

pub(super) fn state(
    store: &Store,
    env: &EnvName,
    record: &Record,
    holder: Option<&lock::Holder>,
) -> &'static str {
    match holder.map(|holder| holder.verb.as_str()) {
        Some("up") if store.is_paused(env) => "paused",
        Some("up") => "building",
        Some(_) if !store.has_idle_container(env) => "in use",
        _ if record.failed.is_some() => "failed",
        _ if record.complete => "ready",
        _ if record.steps.iter().any(StepRecord::is_interrupted) => INTERRUPTED,
        _ => "unfinished",
    }
}
