//! Owns `gc`: reads the store, has it decided what to remove, removes it and reports the result.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use clap::Args;
use serde::Serialize;

use super::cache;
use crate::plan::gc::policy::{Limits, Policy, Preset};
use crate::plan::gc::{GcItem, GcTarget, Inventory, Plan, Rule, plan, rooted};
use crate::profile::value;
use crate::store::Store;
use crate::store::gc_apply::Swept;
use crate::store::inventory::Look;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::free_space;
use crate::ui::size;
use crate::ui::table::Table;
use crate::up::context::Context;

/// Maximum of further rounds after one that freed less than estimated.
const ROUNDS: usize = 3;

/// Interval for asking the file system whether enough is free; removals must have reached the disk for that.
const LOOK: Duration = Duration::from_secs(2);

#[derive(Debug, Args)]
pub struct GcArgs {
    /// Show what would be removed and why, and change nothing
    #[arg(short = 'n', long, short_alias = 'd')]
    dry_run: bool,
    /// Continue until this much more space is free
    #[arg(long, value_name = "SIZE")]
    free: Option<String>,
    /// Policy to begin with, in place of the configuration's
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
    let disk = nix::sys::statvfs::statvfs(store.root())
        .map_err(|error| Error::unexpected("cannot ask for free space").source(error))?;
    let limits = policy.limits(disk.blocks() * disk.fragment_size());
    let mut look = Look {
        caches: true,
        cache_max: policy.cache_max.clone(),
        used: limits.keep_at_most.is_some(),
        projects: args.expunge || policy.expunge,
        everything: args.roots,
    };
    if args.roots {
        let mut inventory = store.gc_inventory(&look, limits.keep_last)?;
        store.estimate_shared(&mut inventory, &look, limits.keep_last)?;
        return show_roots(cx, &inventory, &limits);
    }
    if args.dry_run {
        let trash = store.trash_bytes()?;
        let left = asked.map(|asked| asked.saturating_sub(trash));
        let (inventory, plan) = decide(&store, &look, &limits, left, trash)?;
        let free = inventory.free.saturating_sub(trash);
        return show(cx, &policy, &limits, free, trash, &plan);
    }
    cx.host_as_root("removing unused data")?;
    // Before any write, even of a lock's holder.
    let ballast = store.drop_ballast()?;
    if ballast.is_some() {
        cx.ui.note("the disk is full: dropping the ballast first");
    }
    // Neither recent deletions by others nor the ballast count as freed by `gc`.
    store.settle_space()?;
    let before = unused(&store)?;
    cx.reap(&store)?;
    for error in store.settle_envs()? {
        cx.ui.warn(&error.chain().join(": "));
    }
    let mut done = Done::default();
    let mut agreed = BTreeSet::new();
    for round in 0..ROUNDS {
        store.reclaim()?;
        let gained = unused(&store)?.saturating_sub(before);
        let left = asked.map(|asked| asked.saturating_sub(gained));
        // A tool that left more than requested would do so again.
        look.caches = round == 0;
        let (inventory, plan) = decide(&store, &look, &limits, left, 0)?;
        if round == 0 {
            done.trash = gained;
        }
        if !agree(cx, &plan, &mut agreed)? {
            if round == 0 {
                return Err(Error::new(Kind::Usage, "nothing changed"));
            }
            break;
        }
        let goal = Goal {
            unused: asked.map(|asked| before.saturating_add(asked)),
            free: limits.min_free,
        };
        let removed = apply(cx, &store, &plan, &inventory, &limits, &goal, &mut done)?;
        done.notes = plan.notes;
        // Look again only if space is still short and this round removed something.
        if removed == 0 || left.is_none_or(|left| left == 0) {
            break;
        }
    }
    store.reclaim()?;
    // Meanwhile others may have written more than was freed.
    done.freed = unused(&store)?.saturating_sub(before);
    drop(ballast);
    store.load_ballast()?;
    let free = free_space(store.root())?;
    report(cx, &done, asked, free)
}

/// Reads the store and decides. Recorded sizes come first; if they make anything go, or leave space short, measured
/// sizes decide. `trash` is bytes already detached, which are freed first.
fn decide(
    store: &Store,
    look: &Look,
    limits: &Limits,
    asked: Option<u64>,
    trash: u64,
) -> Result<(Inventory, Plan)> {
    let mut inventory = store.gc_inventory(look, limits.keep_last)?;
    inventory.free += trash;
    let mut decided = plan(&inventory, limits, asked);
    let matters = !decided.items.is_empty() || decided.missing > 0 || inventory.used.is_some();
    if matters && store.estimate_shared(&mut inventory, look, limits.keep_last)? {
        decided = plan(&inventory, limits, asked);
    }
    Ok((inventory, decided))
}

/// Returns the free bytes of the file system, root's reserve included: their growth is what was freed, on a full disk
/// too.
fn unused(store: &Store) -> Result<u64> {
    let disk = nix::sys::statvfs::statvfs(store.root())
        .map_err(|error| Error::unexpected("cannot ask for free space").source(error))?;
    Ok(disk.blocks_free() * disk.fragment_size())
}

/// When removals for space may stop.
struct Goal {
    /// Free bytes, root's reserve included, for `--free`.
    unused: Option<u64>,
    /// Bytes that an ordinary user can write, for `min-free`.
    free: u64,
}

impl Goal {
    fn is_reached(&self, rule: Rule, store: &Store) -> Result<bool> {
        match (rule, self.unused) {
            (Rule::Free, Some(goal)) => Ok(unused(store)? >= goal),
            (Rule::MinFree, _) => Ok(free_space(store.root())? >= self.free),
            _ => Ok(false),
        }
    }
}

fn parse_size(text: &str) -> Result<u64> {
    value::size(text)
        .map_err(|refused| Error::new(Kind::Usage, refused.message).help("rockenv gc --free 50G"))
}

#[derive(Debug, Default, Serialize)]
struct Done {
    removed: Vec<GcItem>,
    stayed: Vec<Stayed>,
    /// Bytes that were waiting in the trash.
    trash: u64,
    /// Sum of the removed items' bytes.
    estimate: u64,
    /// Bytes freed according to the file system.
    freed: u64,
    notes: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Stayed {
    name: String,
    why: String,
}

/// Asks before anything goes that takes time to make again, and again if a later look adds items.
fn agree(cx: &Context, plan: &Plan, agreed: &mut BTreeSet<GcTarget>) -> Result<bool> {
    let more = if agreed.is_empty() {
        ""
    } else {
        "less was freed than estimated: "
    };
    let items = plan.items.iter();
    let new: Vec<&GcItem> = items.filter(|item| !agreed.contains(&item.what)).collect();
    agreed.extend(new.iter().map(|item| item.what.clone()));
    let time: u64 = new.iter().map(|item| item.rebuild_ms).sum();
    if time == 0 {
        return Ok(true);
    }
    cx.agrees(&format!(
        "{more}remove {} ({}; making them again would take {})?",
        size::count(new.len(), "thing"),
        size::bytes(new.iter().map(|item| item.bytes).sum()),
        size::duration(Duration::from_millis(time))
    ))
}

/// Removes the planned items until enough is free. Returns how many were removed.
fn apply(
    cx: &Context,
    store: &Store,
    plan: &Plan,
    inventory: &Inventory,
    limits: &Limits,
    goal: &Goal,
    done: &mut Done,
) -> Result<usize> {
    let mut removed = 0;
    let mut looked = Instant::now();
    for item in &plan.items {
        // Estimates may be too low: remove nothing for space that is free already.
        if item.rule.wants_space() && looked.elapsed() > LOOK {
            store.reclaim()?;
            looked = Instant::now();
            if goal.is_reached(item.rule, store)? {
                continue;
            }
        }
        let swept = match &item.what {
            GcTarget::Cache { cache, max } => cache::shrink(cx, store, inventory, cache, *max),
            what => store.sweep(what, limits.keep_last),
        };
        let stays = match swept {
            Ok(Swept::Gone) => {
                cx.ui.detail(&format!("removed {}", item.name));
                removed += 1;
                done.estimate += item.bytes;
                done.removed.push(item.clone());
                continue;
            }
            Ok(Swept::Stays(why)) => why,
            Err(error) => error.chain().join(": "),
        };
        cx.ui.detail(&format!("{} stays: {stays}", item.name));
        done.stayed.push(Stayed {
            name: item.name.clone(),
            why: stays,
        });
    }
    Ok(removed)
}

fn report(cx: &Context, done: &Done, asked: Option<u64>, free: u64) -> Result<()> {
    if cx.json {
        #[derive(Serialize)]
        struct GcReport<'a> {
            schema: &'static str,
            dry_run: bool,
            #[serde(flatten)]
            done: &'a Done,
            free: u64,
        }
        cx.ui.json(&GcReport {
            schema: "rockenv/gc/1",
            dry_run: false,
            done,
            free,
        })?;
    } else {
        cx.ui.data(&format!(
            "removed {}: {} freed ({} estimated); {} free now\n",
            size::count(done.removed.len(), "thing"),
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
        .help("rockenv gc --roots: what is kept and why; rockenv rm ENV, rockenv cache clear")),
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
        #[derive(Serialize)]
        struct GcPlanReport<'a> {
            schema: &'static str,
            dry_run: bool,
            preset: Preset,
            limits: &'a Limits,
            free: u64,
            /// Bytes in the trash, which are freed first.
            trash: u64,
            #[serde(flatten)]
            plan: &'a Plan,
        }
        return cx.ui.json(&GcPlanReport {
            schema: "rockenv/gc/1",
            dry_run: true,
            preset: policy.preset,
            limits,
            free,
            trash,
            plan,
        });
    }
    if plan.items.is_empty() {
        cx.ui.note("nothing to remove");
    } else {
        let mut table = Table::new(["what", ">frees", ">again in", "rule", "why"]);
        for item in &plan.items {
            let again = match item.rebuild_ms {
                0 => "-".to_owned(),
                time => size::duration(Duration::from_millis(time)),
            };
            table.row([
                item.name.as_str(),
                &size::bytes(item.bytes),
                &again,
                item.rule.name(),
                &item.reason,
            ]);
        }
        cx.ui.table(&table);
    }
    cx.ui.data(&format!(
        "{} in total; {} free now; kept: {} that could be rebuilt\n",
        size::bytes(plan.estimate),
        size::bytes(free),
        size::bytes(plan.spare)
    ));
    if trash > 0 {
        cx.ui.note(&format!(
            "{} more in the trash, freed first",
            size::bytes(trash)
        ));
    }
    for note in &plan.notes {
        cx.ui.note(note);
    }
    Ok(())
}

fn show_roots(cx: &Context, inventory: &Inventory, limits: &Limits) -> Result<()> {
    let rows = rooted(inventory, limits);
    if cx.json {
        #[derive(Serialize)]
        struct RootsReport<'a> {
            schema: &'static str,
            roots: &'a [crate::plan::gc::Rooted],
            notes: &'a [String],
        }
        return cx.ui.json(&RootsReport {
            schema: "rockenv/gc-roots/1",
            roots: &rows,
            notes: &inventory.notes,
        });
    }
    let mut table = Table::new(["what", ">holds alone", "stays because"]);
    for row in &rows {
        table.row([
            row.name.as_str(),
            &size::bytes(row.bytes),
            &row.because.join("; "),
        ]);
    }
    cx.ui.table(&table);
    for note in &inventory.notes {
        cx.ui.note(note);
    }
    Ok(())
}
