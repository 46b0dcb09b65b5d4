//! Owns `target detect`.

use crate::sys::error::Result;
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;

pub(super) fn detect(cx: &Context) -> Result<()> {
    let machine = cx.gpus();
    if cx.json {
        let rows = machine.gpus.iter().map(|gpu| {
            object! {
                #[serde(flatten)] gpu: gpu,
                target: gpu.target(),
                product: gpu.target().map(|target| target.info().declared.product.as_str()),
            }
        });
        return cx.ui.json(&object! {
            schema: "rockenv/gpus/1",
            usable: machine.lack().is_none(),
            lack: machine.lack(),
            gpus: rows.collect::<Vec<_>>(),
        });
    }
    if !machine.gpus.is_empty() {
        let mut table = Table::new([
            ">index", "target", "address", "node", ">memory", ">units", "product",
        ]);
        for gpu in &machine.gpus {
            let address = match gpu.partition {
                Some(partition) => format!("{} partition {partition}", gpu.pci),
                None => gpu.pci.clone(),
            };
            let product = gpu.target().map_or("not a target of TheRock", |target| {
                target.info().declared.product.as_str()
            });
            table.row([
                gpu.index.to_string().as_str(),
                &gpu.isa,
                &address,
                &gpu.render,
                &size::bytes(gpu.memory),
                &gpu.compute_units.to_string(),
                product,
            ]);
        }
        cx.ui.table(&table);
    }
    if let Some(lack) = machine.lack() {
        cx.ui.note(&format!("no AMD GPU can be used here: {lack}"));
    } else if let Some(skipped) = machine.skipped() {
        cx.ui
            .note(&format!("{skipped}: `rockenv doctor` shows why"));
    }
    Ok(())
}
