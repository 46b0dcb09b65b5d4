//! Owns `snapshot ls`.

use clap::Args;

use crate::plan::ids::EnvName;
use crate::plan::record::Origin;
use crate::store::history::History;
use crate::sys::error::Result;
use crate::ui::{object, size};
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct LsArgs {
    /// The env [default: the only one]
    env: Option<EnvName>,
}

pub(super) fn ls(cx: &Context, args: &LsArgs) -> Result<()> {
    let store = cx.existing_store()?;
    let record = store.known(&store.named_or_only(args.env.as_ref())?)?;
    let rows = record.snapshots.iter().map(|snapshot| {
        let layer = store.layer(&snapshot.layer).ok().flatten();
        object! {
            name: &snapshot.name,
            origin: snapshot.origin,
            created: snapshot.created,
            layer: &snapshot.layer,
            key: &snapshot.key,
            current: record.head.layer.as_ref() == Some(&snapshot.layer),
            history: layer.map(|layer| layer.history),
        }
    });
    let rows: Vec<_> = rows.collect();
    cx.list(
        &rows,
        ["", "snapshot", "origin", "created", "layer"],
        |row| {
            let origin = match row.origin {
                Origin::Step if matches!(row.history, Some(History::Incremental { .. })) => {
                    "step, incremental"
                }
                Origin::Step => "step",
                Origin::User => "user",
                Origin::Auto => "kept",
            };
            [
                if row.current { "*" } else { "" }.to_owned(),
                row.name.clone(),
                origin.to_owned(),
                size::ago(row.created),
                row.layer[..12].to_owned(),
            ]
        },
    )
}
