//! Owns `snapshot`, `rollback` and `fork`.

use std::time::Duration;

use clap::{Args, Subcommand};
use jiff::Timestamp;
use serde::Serialize;

use super::list::ago;
use crate::execute::inspect;
use crate::plan::ids::{LayerId, StepKey};
use crate::plan::record::Origin;
use crate::store::history::History;
use crate::store::lock;
use crate::store::snapshot::no_snapshot;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum SnapshotCommand {
    /// Freeze an env as it is now
    Create(CreateArgs),
    /// List an env's snapshots
    #[command(visible_alias = "list")]
    Ls(LsArgs),
    /// Show the changes between two snapshots, or since one
    Diff(DiffArgs),
    /// Remove a snapshot
    #[command(visible_alias = "remove")]
    Rm(RmArgs),
}

#[derive(Debug, Args)]
pub struct CreateArgs {
    /// The env
    env: String,
    /// The snapshot's name
    name: String,
}

#[derive(Debug, Args)]
pub struct LsArgs {
    /// The env [default: the only one]
    env: Option<String>,
}

#[derive(Debug, Args)]
pub struct DiffArgs {
    /// The env
    env: String,
    /// The older snapshot
    from: String,
    /// The newer snapshot [default: the env as it is now]
    to: Option<String>,
}

#[derive(Debug, Args)]
pub struct RmArgs {
    /// The env
    env: String,
    /// The snapshots
    #[arg(required = true)]
    names: Vec<String>,
}

#[derive(Debug, Args)]
pub struct RollbackArgs {
    /// The env
    env: String,
    /// The snapshot
    snapshot: String,
}

#[derive(Debug, Args)]
pub struct ForkArgs {
    /// The env
    env: String,
    /// Name of the new env
    new: String,
}

pub(crate) fn snapshot(cx: &Context, command: SnapshotCommand) -> Result<()> {
    match command {
        SnapshotCommand::Create(args) => {
            let store = cx.store_to_change("taking a snapshot")?;
            let mut env = store.lock_known(&args.env, "snapshot", lock::WAIT)?;
            env.snapshot(&args.name, Origin::User)?;
            cx.ui
                .note(&format!("{}: snapshot `{}`", args.env, args.name));
            if !store.freezes_volumes() && !env.known_record()?.head.volumes.is_empty() {
                cx.ui.warn(
                    "without build volumes: an overlay store freezes only the root file system",
                );
            }
            cx.tidy(&store)
        }
        SnapshotCommand::Ls(args) => ls(cx, &args),
        SnapshotCommand::Diff(args) => diff(cx, &args),
        SnapshotCommand::Rm(args) => {
            let (store, ballast) = cx.store_to_free("removing a snapshot")?;
            let mut env = store.lock_known(&args.env, "snapshot rm", lock::WAIT)?;
            for name in &args.names {
                env.remove_snapshot(name)?;
                cx.ui
                    .note(&format!("{}: snapshot `{name}` removed", args.env));
            }
            drop(env);
            cx.tidy_full(&store, ballast)
        }
    }
}

fn ls(cx: &Context, args: &LsArgs) -> Result<()> {
    #[derive(Serialize)]
    struct SnapshotRow {
        name: String,
        origin: Origin,
        created: Timestamp,
        layer: LayerId,
        key: Option<StepKey>,
        current: bool,
        history: Option<History>,
    }
    let store = cx.existing_store()?;
    let record = store.known(&store.named_or_only(args.env.as_deref())?)?;
    let rows: Vec<SnapshotRow> = record
        .snapshots
        .iter()
        .map(|snapshot| SnapshotRow {
            name: snapshot.name.clone(),
            origin: snapshot.origin,
            created: snapshot.created,
            layer: snapshot.layer.clone(),
            key: snapshot.key.clone(),
            current: record.head.layer.as_ref() == Some(&snapshot.layer),
            history: store
                .layer(&snapshot.layer)
                .ok()
                .flatten()
                .map(|layer| layer.history()),
        })
        .collect();
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["", "snapshot", "origin", "created", "layer"]);
    for row in rows {
        let origin = match row.origin {
            Origin::Step if matches!(row.history, Some(History::Incremental { .. })) => {
                "step, incremental"
            }
            Origin::Step => "step",
            Origin::User => "user",
            Origin::Auto => "kept",
        };
        table.row([
            if row.current { "*" } else { "" },
            &row.name,
            origin,
            &ago(row.created),
            &row.layer[..12],
        ]);
    }
    cx.ui.table(&table);
    Ok(())
}

fn diff(cx: &Context, args: &DiffArgs) -> Result<()> {
    let store = cx.store_to_change("comparing snapshots")?;
    let mut env = store.lock_known(&args.env, "snapshot diff", lock::WAIT)?;
    let changes = inspect::diff(&store, &mut env, &args.from, args.to.as_deref())?;
    if cx.json {
        return cx.ui.json(&changes);
    }
    for change in &changes {
        cx.ui.data(&format!(
            "{} {}\n",
            change.kind.mark(),
            crate::ui::text::path(&change.path)
        ));
    }
    Ok(())
}

pub(crate) fn rollback(cx: &Context, args: &RollbackArgs) -> Result<()> {
    let store = cx.store_to_change("going back to a snapshot")?;
    let record = store.known(&args.env)?;
    if record.snapshot(&args.snapshot).is_none() {
        return Err(no_snapshot(&args.env, &record, &args.snapshot));
    }
    let question = format!(
        "go back to snapshot `{}` of {}? Changes since its last snapshot are dropped.",
        args.snapshot, args.env
    );
    cx.confirm(&question)?;
    let mut env = store.lock_known(&args.env, "rollback", lock::WAIT)?;
    env.rollback(&args.snapshot)?;
    cx.ui
        .note(&format!("{}: at snapshot `{}`", args.env, args.snapshot));
    if !store.freezes_volumes() && !env.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("build volumes unchanged: an overlay store cannot restore them");
    }
    drop(env);
    cx.tidy(&store)
}

pub(crate) fn fork(cx: &Context, args: &ForkArgs) -> Result<()> {
    let store = cx.store_to_change("forking an env")?;
    let mut from = store.lock_known(&args.env, "fork", lock::WAIT)?;
    let mut new = store.lock_env(&args.new, "fork", Duration::ZERO)?;
    new.check_owner()?;
    if new.record().is_some() {
        return Err(
            Error::new(Kind::Usage, format!("env `{}` exists already", args.new))
                .help(format!("rockenv rm {}", args.new)),
        );
    }
    new.fork_from(&mut from)?;
    cx.ui.note(&format!("{}: a copy of {}", args.new, args.env));
    if !store.freezes_volumes() && !from.known_record()?.head.volumes.is_empty() {
        cx.ui
            .warn("its build volumes start empty: an overlay store cannot copy them");
    }
    drop((from, new));
    cx.settle(&store)
}
