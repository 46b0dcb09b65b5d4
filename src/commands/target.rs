//! Owns `target`: the GPU targets that can be built for.

use clap::Subcommand;
use serde::Serialize;

use crate::context::Context;
use crate::error::Result;
use crate::target;
use crate::ui::table::Table;

/// What to do with targets.
#[derive(Debug, Subcommand)]
pub enum TargetCommand {
    /// List GPU targets with the products that have them
    Ls,
}

/// Works with targets.
pub fn target(cx: &Context, command: &TargetCommand) -> Result<()> {
    match command {
        TargetCommand::Ls => ls(cx),
    }
}

fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct Row {
        target: &'static str,
        product: &'static str,
        families: &'static [String],
    }
    let rows: Vec<Row> = target::all()
        .map(|target| Row {
            target: target.name(),
            product: &target.info().product,
            families: &target.info().families,
        })
        .collect();
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["target", "product", "families"]);
    for row in rows {
        table.row([row.target, row.product, &row.families.join(", ")]);
    }
    cx.ui.table(&table);
    Ok(())
}
