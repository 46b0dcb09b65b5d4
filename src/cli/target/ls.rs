//! Owns `target ls`.

use super::support_word;
use crate::rocm::target;
use crate::sys::error::Result;
use crate::ui::object;
use crate::ui::table::Table;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let rows = target::all().map(|target| {
        object! {
            target: target.name(),
            product: target.info().product.as_str(),
            kind: target.info().kind,
            support: support_word(target.support()),
            families: &target.info().families,
        }
    });
    let rows: Vec<_> = rows.collect();
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
