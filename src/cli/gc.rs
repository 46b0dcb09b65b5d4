//! Owns `gc`: shows what would be removed, or reports what was removed.

use std::time::Duration;

use clap::Args;

use crate::plan::gc::policy::{Limits, Policy, Preset};
use crate::plan::gc::{Inventory, Plan, rooted};
use crate::profile::value;
use crate::store::inventory::InventoryOptions;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::{free_space, space};
use crate::ui::table::Table;
use crate::ui::{object, size};
use crate::up::context::Context;
use crate::up::gc::{Decision, Done, collect, decide};

#[derive(Debug, Args)]
pub struct GcArgs {
    /// Show what would be removed and why, and change nothing
    #[arg(short = 'n', long, short_alias = 'd')]
    dry_run: bool,
    /// Continue until this much more space is free
    #[arg(long, value_name = "SIZE")]
    free: Option<String>,
    /// Policy preset, instead of the configured one
    #[arg(long)]
    preset: Option<Preset>,
    /// Also remove sub-projects of TheRock from build volumes if an artifact holds their installed files
    #[arg(long)]
    expunge: bool,
    /// Show what is never removed, and why
    #[arg(long, conflicts_with_all = ["dry_run", "free"])]
    roots: bool,
}

/// Removes unused data, then what the policy allows.
pub(crate) fn gc(cx: &Context, args: &GcArgs) -> Result<()> {
    let asked = args.free.as_deref().map(parse_size).transpose()?;
    let policy = Policy::new(&cx.config.gc, args.preset)?;
    let store = cx.store_to_read()?;
    let limits = policy.limits(space(store.root())?.total);
    let options = InventoryOptions {
        caches: true,
        cache_max: policy.cache_max.clone(),
        used: limits.keep_at_most.is_some(),
        projects: args.expunge || policy.expunge,
        everything: args.roots,
    };
    if args.roots {
        let mut inventory = store.gc_inventory(&options, limits.keep_last)?;
        store.estimate_shared(&mut inventory, &options, limits.keep_last)?;
        return show_roots(cx, &inventory, &limits);
    }
    if args.dry_run {
        let trash = store.trash_bytes()?;
        let left = asked.map(|asked| asked.saturating_sub(trash));
        let Decision { inventory, plan } = decide(&store, &options, &limits, left, trash)?;
        let free = inventory.free.saturating_sub(trash);
        return show(cx, &policy, &limits, free, trash, &plan);
    }
    let mut done = collect(cx, &store, options, &limits, asked)?;
    let failure = done.failure.take();
    let reported = report(cx, &done, asked, free_space(store.root())?);
    failure.map_or(reported, Err)
}

fn parse_size(text: &str) -> Result<u64> {
    value::size(text).map_err(|refused| usage!("{}", refused.message).help("rockenv gc --free 50G"))
}

fn report(cx: &Context, done: &Done, asked: Option<u64>, free: u64) -> Result<()> {
    if cx.json {
        cx.ui.json(&object! {
            schema: "rockenv/gc/1",
            dry_run: false,
            #[serde(flatten)] done: done,
            free: free,
        })?;
    } else if done.removed.is_empty() {
        let did = match done.had_trash {
            true => format!("emptied the trash: {} freed", size::bytes(done.freed)),
            false => "nothing to remove".to_owned(),
        };
        cx.ui
            .data(&format!("{did}; {} free now\n", size::bytes(free)));
    } else {
        cx.ui.data(&format!(
            "removed {}: {} freed ({} estimated); {} free now\n",
            size::count(done.removed.len(), "item"),
            size::bytes(done.freed),
            size::bytes(done.estimate + done.trash),
            size::bytes(free)
        ));
    }
    for stayed in &done.stayed {
        cx.ui
            .warn(&format!("{} stays: {}", stayed.name, stayed.why));
    }
    for note in &done.notes {
        cx.ui.note(note);
    }
    let freed = done.freed;
    match asked {
        Some(asked) if freed < asked => Err(Error::new(
            Kind::OutOfSpace,
            format!(
                "{} requested, {} could be freed",
                size::bytes(asked),
                size::bytes(freed)
            ),
        )
        .help("`rockenv gc --roots` shows what is kept and why; `rockenv rm ENV` and `rockenv cache clear NAME` free more")),
        _ => Ok(()),
    }
}

fn show(
    cx: &Context,
    policy: &Policy,
    limits: &Limits,
    free: u64,
    trash: u64,
    plan: &Plan,
) -> Result<()> {
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/gc/1",
            dry_run: true,
            preset: policy.preset,
            limits: limits,
            free: free,
            // Bytes in the trash, which are freed first.
            trash: trash,
            #[serde(flatten)] plan: plan,
        });
    }
    let items = plan.items.iter().map(|item| {
        let again = match item.rebuild_ms {
            0 => "-".to_owned(),
            time => size::duration(Duration::from_millis(time)),
        };
        let (name, rule) = (item.name.clone(), item.rule.name().to_owned());
        let reason = item.reason.clone();
        [name, size::bytes(item.bytes), again, rule, reason]
    });
    let in_trash = (trash > 0).then(|| {
        let size = size::bytes(trash);
        ["the trash", &size, "-", "-", "deleted already"].map(str::to_owned)
    });
    let rows: Vec<[String; 5]> = in_trash.into_iter().chain(items).collect();
    if rows.is_empty() {
        cx.ui.note("nothing to remove");
    } else {
        let header = ["what", ">frees", ">again in", "rule", "why"];
        cx.ui.table(&Table::of(header, &rows, Clone::clone));
    }
    let kept = match plan.spare {
        0 => String::new(),
        spare => format!("; kept: {} that could be rebuilt", size::bytes(spare)),
    };
    cx.ui.data(&format!(
        "{} in total; {} free now{kept}\n",
        size::bytes(plan.estimate + trash),
        size::bytes(free),
    ));
    for note in &plan.notes {
        cx.ui.note(note);
    }
    Ok(())
}

fn show_roots(cx: &Context, inventory: &Inventory, limits: &Limits) -> Result<()> {
    let rows = rooted(inventory, limits);
    if cx.json {
        return cx.ui.json(&object! {
            schema: "rockenv/gc-roots/1",
            roots: &rows,
            notes: &inventory.notes,
        });
    }
    let header = ["what", ">holds alone", "stays because"];
    cx.ui.table(&Table::of(header, &rows, |row| {
        let because = row.because.join("; ");
        [row.name.clone(), size::bytes(row.bytes), because]
    }));
    for note in &inventory.notes {
        cx.ui.note(note);
    }
    Ok(())
}
