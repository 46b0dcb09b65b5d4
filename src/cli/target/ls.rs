//! Owns `target ls`.

use serde::Serialize;

use super::support_word;
use crate::rocm::target::{self};
use crate::sys::error::Result;
use crate::ui::table::Table;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct TargetRow {
        target: &'static str,
        product: &'static str,
        kind: target::GpuKind,
        support: &'static str,
        families: &'static [String],
    }
    let rows: Vec<TargetRow> = target::all()
        .map(|target| TargetRow {
            target: target.name(),
            product: &target.info().product,
            kind: target.info().kind,
            support: support_word(target.support()),
            families: &target.info().families,
        })
        .collect();
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["target", "product", "support", "families"]);
    for row in rows {
        table.row([
            row.target,
            row.product,
            row.support,
            &row.families.join(", "),
        ]);
    }
    cx.ui.table(&table);
    Ok(())
}
