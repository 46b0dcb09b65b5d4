//! Owns `target show`.

use clap::Args;

use super::support_word;
use crate::rocm::gpu::Gpu;
use crate::rocm::target::{self, Target};
use crate::sys::error::Result;
use crate::ui::object;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The target, such as gfx1103, or a product that has one, such as 780m
    target: String,
}

pub(super) fn show(cx: &Context, args: &ShowArgs) -> Result<()> {
    let target = Target::named(&args.target)?;
    let info = target.info();
    let excluded = info.declared.excluded.iter().map(|one| {
        object! {
            project: one.project.as_str(),
            issue: one.issue.as_deref(),
            meaning: target::without(&one.project),
        }
    });
    let excluded: Vec<_> = excluded.collect();
    let runs = target::runs(target);
    let (variant, because) = target::advised_variant(info);
    let here: Vec<Gpu> = cx
        .gpus()
        .gpus
        .into_iter()
        .filter(|gpu| gpu.isa == target.name())
        .collect();
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/target/1",
            target: target.name(),
            product: &info.declared.product,
            marketing_names: target.products(),
            release_products: info.release_products.as_deref(),
            kind: info.kind,
            families: &info.declared.families,
            r#override: target.override_version(),
            support: target.support(),
            rccl_buildable: info.rccl_buildable(),
            excluded_projects: &excluded,
            variant: variant,
            variant_because: because,
            runs: &runs,
            gpus: &here,
            therock: target::table_commit(),
        });
    }
    show_facts(cx, target, &format!("{variant}: {because}"), &here);
    if !excluded.is_empty() {
        cx.ui.data("\nprojects that TheRock excludes for it:\n");
        let mut table = Table::new(["project", "issue", "without it"]);
        for one in &excluded {
            let issue = one.issue.unwrap_or("none named");
            table.row([one.project, issue, one.meaning.unwrap_or_default()]);
        }
        cx.ui.table(&table);
    }
    show_runs(cx, &runs);
    Ok(())
}

fn show_facts(cx: &Context, target: Target, variant: &str, here: &[Gpu]) {
    let info = target.info();
    let mut lines = vec![
        ("target", target.name().to_owned()),
        ("product", info.declared.product.clone()),
    ];
    let mut names = target.products().to_vec();
    names.extend(info.release_products.as_deref());
    if !names.is_empty() {
        lines.push(("names", names.join(", ")));
    }
    let kind = match info.kind {
        target::GpuKind::Dgpu => "graphics card",
        target::GpuKind::Igpu => "in a processor",
        target::GpuKind::Dcgpu => "accelerator",
    };
    let architecture = target.support().map(|support| &support.architecture);
    lines.push((
        "kind",
        architecture.map_or_else(|| kind.to_owned(), |name| format!("{kind}, {name}")),
    ));
    lines.push(("families", info.declared.families.join(", ")));
    lines.push(("override", target.override_version()));
    let support = match support_word(target.support()) {
        "release" => "built, tested on hardware and ready for use",
        "tested" => "built, and a short test on hardware passes",
        "builds" => "built, not tested on hardware",
        "none" => "not built",
        _ => "not documented upstream",
    };
    lines.push(("support", support.to_owned()));
    lines.push(("variant", variant.to_owned()));
    for gpu in here {
        lines.push(("here", format!("{} as {}", gpu.pci, gpu.render)));
    }
    let width = lines.iter().map(|(name, _)| name.len()).max().unwrap_or(0);
    let text: String = lines
        .iter()
        .map(|(name, value)| format!("{name:width$}  {value}\n"))
        .collect();
    cx.ui.data(&text);
}

fn show_runs(cx: &Context, runs: &[target::Compatible]) {
    if runs.is_empty() {
        return;
    }
    cx.ui
        .data("\ncode for these targets also runs on it (reported by others, not tested):\n");
    for alike in runs.chunk_by(|a, b| a.note == b.note) {
        let codes: Vec<&str> = alike.iter().map(|one| one.code.as_str()).collect();
        let one = &alike[0];
        cx.ui.data(&format!("{}: {}\n", codes.join(", "), one.note));
        for source in &one.sources {
            cx.ui.data(&format!("  {source}\n"));
        }
    }
}
