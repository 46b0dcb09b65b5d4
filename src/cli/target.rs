//! Owns `target`: the supported GPU targets, and those of this machine's GPUs.

use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use fs_err as fs;
use serde::Serialize;

use crate::rocm::gpu::{Gpu, Machine};
use crate::rocm::target::{self, Learned, Support, Target};
use crate::rocm::therock::{self, Checkout};
use crate::store::Store;
use crate::sys::error::{Error, Kind, Result};
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum TargetCommand {
    /// List GPU targets with the products that have them
    #[command(visible_alias = "list")]
    Ls,
    /// Show a target: products, families, support, excluded projects
    Show(ShowArgs),
    /// Show the GPUs of this machine
    Detect,
    /// Compare a checkout of TheRock with rockenv's table
    Check(CheckArgs),
    /// Use the targets of a checkout of TheRock in this store
    Learn(CheckArgs),
    /// Return to the built-in table of targets
    Forget,
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// The checkout; nothing in it is executed
    #[arg(short, long, value_name = "DIR")]
    source: PathBuf,
}

#[derive(Debug, Args)]
pub struct ShowArgs {
    /// The target, such as gfx1103, or a product that has one, such as 780m
    target: String,
}

pub(crate) fn target(cx: &Context, command: &TargetCommand) -> Result<u8> {
    match command {
        TargetCommand::Ls => ls(cx).map(|()| 0),
        TargetCommand::Show(args) => show(cx, Target::named(&args.target)?).map(|()| 0),
        TargetCommand::Detect => detect(cx).map(|()| 0),
        TargetCommand::Check(args) => check(cx, args),
        TargetCommand::Learn(args) => learn(cx, args).map(|()| 0),
        TargetCommand::Forget => forget(cx).map(|()| 0),
    }
}

fn learn(cx: &Context, args: &CheckArgs) -> Result<()> {
    let source = fs::canonicalize(&args.source)?;
    let checkout = Checkout::read(&source)?;
    if checkout.targets.is_empty() {
        let what = format!("`{}` declares no target", source.display());
        return Err(Error::invalid(what).help("rockenv target check --source DIR"));
    }
    let drift = therock::drift(&checkout);
    let store = Store::open(&cx.config.home)?;
    Learned::of(&source, &checkout.targets).save(store.root())?;
    if cx.json {
        #[derive(Serialize)]
        struct LearnReport<'a> {
            schema: &'static str,
            source: &'a Path,
            targets: &'a [therock::Declared],
            drift: &'a [therock::Drift],
        }
        return cx.ui.json(&LearnReport {
            schema: "rockenv/target-learn/1",
            source: &source,
            targets: &checkout.targets,
            drift: &drift,
        });
    }
    for difference in &drift {
        cx.ui.data(&format!("{difference}\n"));
    }
    cx.ui.note(&format!(
        "the store at `{}` now uses the {} targets of `{}`; to undo: rockenv target forget",
        store.root().display(),
        checkout.targets.len(),
        source.display()
    ));
    Ok(())
}

fn forget(cx: &Context) -> Result<()> {
    match fs::remove_file(target::learned_file(&cx.config.home)) {
        Ok(()) => cx.ui.note(&format!(
            "now uses the built-in targets of TheRock {}",
            &target::table_commit()[..12]
        )),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            cx.ui.note("no learned targets to forget");
        }
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// Names the origin of the table.
fn origin() -> String {
    match Learned::installed() {
        Some(learned) => format!("from `{}`", learned.source.display()),
        None => format!("from TheRock {}", &target::table_commit()[..12]),
    }
}

fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let checkout = Checkout::read(&args.source)?;
    for ignored in &checkout.ignored {
        cx.ui.warn(ignored);
    }
    let drift = therock::drift(&checkout);
    let code = match drift.is_empty() {
        true => 0,
        false => Kind::Drift.exit_code(),
    };
    let stages = checkout
        .topology
        .as_ref()
        .map(|topology| topology.stages.len());
    let artifacts = checkout
        .topology
        .as_ref()
        .map(|topology| topology.artifacts.len());
    if cx.json {
        #[derive(Serialize)]
        struct TargetCheckReport<'a> {
            schema: &'static str,
            therock: &'static str,
            targets: &'a [therock::Declared],
            stages: Option<usize>,
            artifacts: Option<usize>,
            drift: &'a [therock::Drift],
        }
        cx.ui.json(&TargetCheckReport {
            schema: "rockenv/target-check/1",
            therock: target::table_commit(),
            targets: &checkout.targets,
            stages,
            artifacts,
            drift: &drift,
        })?;
        return Ok(code);
    }
    for difference in &drift {
        cx.ui.data(&format!("{difference}\n"));
    }
    let topology = match (stages, artifacts) {
        (Some(stages), Some(artifacts)) => format!("{stages} stages and {artifacts} artifacts"),
        _ => "no topology".to_owned(),
    };
    let verdict = match drift.len() {
        0 => "same as rockenv's table".to_owned(),
        count => size::count(count, "difference"),
    };
    cx.ui.note(&format!(
        "{} targets, {topology}: {verdict} ({})",
        checkout.targets.len(),
        origin()
    ));
    Ok(code)
}

/// Returns a word for upstream's support of a target.
fn support_word(support: Option<&Support>) -> &'static str {
    match support {
        Some(support) if support.release_ready => "release",
        Some(support) if support.sanity_tested => "tested",
        Some(support) if support.build_passing => "builds",
        Some(_) => "none",
        None => "unknown",
    }
}

fn ls(cx: &Context) -> Result<()> {
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

/// A project that TheRock does not build for a target.
#[derive(Serialize)]
struct Excluded {
    project: &'static str,
    issue: Option<&'static str>,
    meaning: Option<&'static str>,
}

fn show(cx: &Context, target: Target) -> Result<()> {
    let info = target.info();
    let excluded: Vec<Excluded> = info
        .excluded_projects
        .iter()
        .map(|project| Excluded {
            project,
            issue: info
                .exclusion_issues
                .get(project)
                .and_then(|issue| issue.as_deref()),
            meaning: target::without(project),
        })
        .collect();
    let runs = target::runs(target);
    let (variant, because) = target::advised_variant(info);
    let here: Vec<Gpu> = cx
        .gpus()
        .gpus
        .into_iter()
        .filter(|gpu| gpu.isa == target.name())
        .collect();
    if cx.json {
        #[derive(Serialize)]
        struct TargetReport<'a> {
            schema: &'static str,
            target: &'static str,
            product: &'static str,
            marketing_names: &'static [&'static str],
            release_products: Option<&'static str>,
            kind: target::GpuKind,
            families: &'static [String],
            #[serde(rename = "override")]
            override_version: String,
            support: Option<&'static Support>,
            rccl_buildable: bool,
            excluded_projects: &'a [Excluded],
            variant: &'static str,
            variant_because: &'static str,
            runs: &'a [target::Runs],
            gpus: &'a [Gpu],
            therock: &'static str,
        }
        return cx.ui.json(&TargetReport {
            schema: "rockenv/target/1",
            target: target.name(),
            product: &info.product,
            marketing_names: target.products(),
            release_products: info.release_products.as_deref(),
            kind: info.kind,
            families: &info.families,
            override_version: target.override_version(),
            support: target.support(),
            rccl_buildable: info.rccl_buildable,
            excluded_projects: &excluded,
            variant,
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
        ("product", info.product.clone()),
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
    lines.push(("families", info.families.join(", ")));
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

fn show_runs(cx: &Context, runs: &[target::Runs]) {
    if runs.is_empty() {
        return;
    }
    cx.ui
        .data("\nother code that runs there (reported by others, not tested):\n");
    for alike in runs.chunk_by(|a, b| a.note == b.note) {
        let codes: Vec<&str> = alike.iter().map(|one| one.code.as_str()).collect();
        let one = &alike[0];
        cx.ui.data(&format!("{}: {}\n", codes.join(", "), one.note));
        for source in &one.sources {
            cx.ui.data(&format!("  {source}\n"));
        }
    }
}

fn detect(cx: &Context) -> Result<()> {
    let machine = cx.gpus();
    if cx.json {
        return cx.ui.json(&Detected::new(&machine));
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
                target.info().product.as_str()
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
    }
    Ok(())
}

/// JSON of `target detect`.
#[derive(Serialize)]
struct Detected<'a> {
    schema: &'static str,
    usable: bool,
    lack: Option<&'static str>,
    gpus: Vec<TargetRow<'a>>,
}

#[derive(Serialize)]
struct TargetRow<'a> {
    #[serde(flatten)]
    gpu: &'a Gpu,
    target: Option<Target>,
    product: Option<&'static str>,
}

impl<'a> Detected<'a> {
    fn new(machine: &'a Machine) -> Self {
        Self {
            schema: "rockenv/gpus/1",
            usable: machine.lack().is_none(),
            lack: machine.lack(),
            gpus: machine
                .gpus
                .iter()
                .map(|gpu| TargetRow {
                    gpu,
                    target: gpu.target(),
                    product: gpu.target().map(|target| target.info().product.as_str()),
                })
                .collect(),
        }
    }
}
