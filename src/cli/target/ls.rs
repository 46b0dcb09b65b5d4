//! Owns `target ls`.

use super::support_word;
use crate::rocm::target;
use crate::sys::error::Result;
use crate::ui::object;
use crate::up::context::Context;

pub(super) fn ls(cx: &Context) -> Result<()> {
    let rows = target::all().map(|target| {
        object! {
            target: target.name(),
            product: target.info().declared.product.as_str(),
            kind: target.info().kind,
            support: support_word(target.support()),
            families: &target.info().declared.families,
        }
    });
    let rows: Vec<_> = rows.collect();
    cx.list(&rows, ["target", "product", "support", "families"], |row| {
        let families = row.families.join(", ");
        [row.target, row.product, row.support, &families].map(str::to_owned)
    })
}
