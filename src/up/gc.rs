//! Owns the rounds of `gc`: it decides, asks, removes, and looks again if less was freed than estimated.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::plan::gc::policy::Limits;
use crate::plan::gc::{GcItem, GcTarget, Inventory, Plan, Rule, plan};
use crate::store::Store;
use crate::store::gc_apply::Removal;
use crate::store::inventory::InventoryOptions;
use crate::sys::error::{Error, Result};
use crate::sys::host::{Host, Space, free_space, space};
use crate::sys::process::Program;
use crate::sys::shell::quoted_path;
use crate::sys::userns;
use crate::ui::size;
use crate::up::context::Context;

/// Maximum number of rounds. A further one follows if the last one freed less than requested.
const ROUNDS: usize = 3;

/// Interval of checks whether enough space is free. Each check first waits for removals to reach the disk.
const LOOK: Duration = Duration::from_secs(2);

/// Removes unused data, and then what the limits allow until `asked` more bytes are free. Fails if the user declines.
/// A failure after the first removal is in the result.
pub(crate) fn collect(
    cx: &Context,
    store: &Store,
    options: InventoryOptions,
    limits: &Limits,
    asked: Option<u64>,
) -> Result<Done> {
    cx.host_as_root("removing unused data")?;
    // The ballast goes before any write, even before a lock holder is recorded.
    store.check_directories()?;
    let ballast = store.drop_ballast()?;
    if ballast.is_some() {
        cx.ui.note("the disk is full: dropping the ballast first");
    }
    // Neither recent deletions by others nor the ballast count as freed by `gc`.
    store.wait_for_free_space()?;
    let before = unused(store)?;
    let had_trash = store.has_trash();
    cx.reap(store)?;
    for error in store.recover_envs()? {
        cx.ui.warn(&error.chain().join(": "));
    }
    let mut done = Done {
        had_trash,
        ..Done::default()
    };
    let outcome = remove(cx, store, options, limits, asked, before, &mut done);
    let outcome = outcome.and(store.reclaim());
    for socket in store.trash_waits_for()? {
        done.notes.push(format!(
            "removed data waits until the service at `{}` answers and removes its images; if the service was uninstalled, run `rockenv gc` again after: find {} -maxdepth 3 -name objects.json -delete",
            socket.display(),
            quoted_path(&store.root().join("trash"))
        ));
    }
    // Other processes may have written more than was freed.
    done.freed = unused(store)?.saturating_sub(before);
    drop(ballast);
    let outcome = outcome.and(store.load_ballast());
    if done.removed.is_empty() {
        outcome?;
    } else {
        done.failure = outcome.err();
    }
    Ok(done)
}

/// Decides and removes, `before` being the free bytes at the start. Looks again if less was freed than estimated.
fn remove(
    cx: &Context,
    store: &Store,
    mut options: InventoryOptions,
    limits: &Limits,
    asked: Option<u64>,
    before: u64,
    done: &mut Done,
) -> Result<()> {
    let mut agreed = BTreeSet::new();
    for round in 0..ROUNDS {
        // An entry that stays in the trash keeps nothing else. The call after the rounds reports it.
        drop(store.reclaim());
        let gained = unused(store)?.saturating_sub(before);
        let left = asked.map(|asked| asked.saturating_sub(gained));
        // A tool that left more than requested would do so again.
        options.caches = round == 0;
        let decision = decide(store, &options, limits, left, 0)?;
        if round == 0 {
            done.trash = gained;
        }
        if !confirm(cx, &decision.plan, &mut agreed)? {
            if round == 0 {
                return Err(usage!("nothing changed"));
            }
            break;
        }
        let goal = Goal {
            unused: asked.map(|asked| before.saturating_add(asked)),
            free: limits.min_free,
        };
        let removed = done.removed.len();
        apply(cx, store, &decision, limits, &goal, done)?;
        done.notes = decision.plan.notes;
        // Look again only if space is still short and this round removed something.
        if removed == done.removed.len() || left.is_none_or(|left| left == 0) {
            break;
        }
    }
    Ok(())
}

pub(crate) struct Decision {
    pub inventory: Inventory,
    pub plan: Plan,
}

/// Reads the store and decides. Recorded sizes come first; if they lead to removals or leave space short, measured
/// sizes decide. `trash` is the number of bytes in the trash, which are freed first.
pub(crate) fn decide(
    store: &Store,
    options: &InventoryOptions,
    limits: &Limits,
    asked: Option<u64>,
    trash: u64,
) -> Result<Decision> {
    let mut inventory = store.gc_inventory(options, limits.keep_last)?;
    inventory.free += trash;
    inventory.used = inventory.used.map(|used| used.saturating_sub(trash));
    let mut decided = plan(&inventory, limits, asked);
    let matters = !decided.items.is_empty() || decided.missing > 0 || inventory.used.is_some();
    if matters && store.estimate_shared(&mut inventory, options, limits.keep_last)? {
        decided = plan(&inventory, limits, asked);
    }
    Ok(Decision {
        inventory,
        plan: decided,
    })
}

/// Returns the free bytes of the file system, including root's reserve: their growth is the space freed, even on a full
/// disk.
fn unused(store: &Store) -> Result<u64> {
    let Space { total, used, .. } = space(store.root())?;
    Ok(total - used)
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

#[derive(Debug, Default, Serialize)]
pub(crate) struct Done {
    pub removed: Vec<GcItem>,
    pub stayed: Vec<SkippedItem>,
    #[serde(skip)]
    pub had_trash: bool,
    /// Bytes that were waiting in the trash.
    pub trash: u64,
    /// Sum of the removed items' bytes.
    pub estimate: u64,
    /// Bytes freed according to the file system.
    pub freed: u64,
    pub notes: Vec<String>,
    /// The failure that ended it after some removals.
    #[serde(skip)]
    pub failure: Option<Error>,
}

impl Done {
    /// Adds the outcome for an item, in place of that of an earlier round.
    fn add(&mut self, item: &GcItem, removal: Removal) {
        self.stayed.retain(|known| known.what != item.what);
        match removal {
            Removal::Gone => {
                self.estimate += item.bytes;
                self.removed.push(item.clone());
            }
            Removal::Stays(why) => self.stayed.push(SkippedItem {
                what: item.what.clone(),
                name: item.name.clone(),
                why,
            }),
        }
    }
}

#[derive(Debug, Serialize)]
pub(crate) struct SkippedItem {
    #[serde(skip)]
    what: GcTarget,
    pub name: String,
    pub why: String,
}

/// Asks before items go that take time to rebuild, and again if a later round adds items.
fn confirm(cx: &Context, plan: &Plan, agreed: &mut BTreeSet<GcTarget>) -> Result<bool> {
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
    cx.is_confirmed(&format!(
        "{more}remove {} ({}; making them again would take {})?",
        size::count(new.len(), "item"),
        size::bytes(new.iter().map(|item| item.bytes).sum()),
        size::duration(Duration::from_millis(time))
    ))
}

/// Removes the planned items until enough is free.
fn apply(
    cx: &Context,
    store: &Store,
    decision: &Decision,
    limits: &Limits,
    goal: &Goal,
    done: &mut Done,
) -> Result<()> {
    let mut looked = Instant::now();
    let mut waiting = decision.plan.items.as_slice();
    while let Some(first) = waiting.first() {
        // Estimates may be too low: remove nothing for space that is free already.
        if first.rule.wants_space() && looked.elapsed() > LOOK {
            drop(store.reclaim());
            looked = Instant::now();
            let short = still_short(waiting, |rule| goal.is_reached(rule, store))?;
            if short.len() < waiting.len() {
                waiting = short;
                continue;
            }
        }
        let (batch, later) = waiting.split_at(batch(waiting));
        waiting = later;
        let removals = match &first.what {
            GcTarget::Cache { cache, max } => {
                let shrunk = shrink(cx, store, &decision.inventory, cache, *max);
                vec![Removal::of(shrunk)]
            }
            _ => store.gc_apply(batch.iter().map(|item| &item.what), limits.keep_last),
        };
        for (item, removal) in batch.iter().zip(removals) {
            cx.ui.detail(&match &removal {
                Removal::Gone => format!("removed {}", item.name),
                Removal::Stays(why) => format!("{} stays: {why}", item.name),
            });
            done.add(item, removal);
        }
    }
    Ok(())
}

/// Returns how many of the items to remove at once, which reads the store once. Items that want space go an eighth at a
/// time, so that few are removed in vain if the first ones free more than estimated.
fn batch(items: &[GcItem]) -> usize {
    let most = match items.iter().position(|item| item.rule.wants_space()) {
        Some(0) => items.len().div_ceil(8),
        Some(before) => before,
        None => items.len(),
    };
    let is_cache = |item: &GcItem| matches!(item.what, GcTarget::Cache { .. });
    let caches = items[..most].iter().position(is_cache);
    // The tool of a cache runs by itself.
    caches.unwrap_or(most).max(1)
}

/// Leaves out the first items, if enough space is free for their rules, and the layers that would go because of them.
fn still_short(items: &[GcItem], is_reached: impl Fn(Rule) -> Result<bool>) -> Result<&[GcItem]> {
    let mut rest = items;
    while let Some(first) = rest.first()
        && is_reached(first.rule)?
    {
        let is_other = |item: &GcItem| item.rule != first.rule && item.rule != Rule::Garbage;
        let end = rest.iter().position(is_other);
        rest = &rest[end.unwrap_or(rest.len())..];
    }
    Ok(rest)
}

/// Runs a cache's own tool to shrink it to `max` bytes, in the env that the inventory names.
fn shrink(
    cx: &Context,
    store: &Store,
    inventory: &Inventory,
    name: &str,
    max: u64,
) -> Result<Removal> {
    let Some(cache) = inventory.caches.get(name) else {
        return Ok(Removal::Gone);
    };
    let (Some(kind), Some((env, target))) = (cache.kind, &cache.at) else {
        return Ok(Removal::Stays("no env mounts it".to_owned()));
    };
    // A build may have begun since the inventory was made.
    let caches = store.caches()?;
    if let Some(env) = caches.get(name).and_then(|cache| cache.busy(store)) {
        return Ok(Removal::Stays(format!("in use by a command in env {env}")));
    }
    // `--apart`: files that the tool leaves beside the cache must not be kept as a change of the env.
    let mut command = Program::at(&Host::probe()?.program)
        .args(["--quiet", "--home"])
        .arg(&cx.config.home)
        .args(["exec", "--apart"]);
    if kind.is_root() {
        command = command.arg("--root");
    }
    // It cannot know by itself that it is root of a user namespace, where the machine's root has other files.
    if !userns::is_root() {
        command = command.arg("--inside-userns");
        if let Some(directory) = cx.config.user_dir.parent() {
            command = command.env("XDG_CONFIG_HOME", directory);
        }
    }
    let max = max.to_string();
    let inside = [env, "--", "sh", "-ec", kind.script(), "sh", target, &max];
    command
        .args(inside)
        .directory(Path::new("/"))
        .output(1 << 20, &AtomicBool::new(false), &mut |_| {})
        .map_err(|error| {
            unavailable!("`{}` in env {env} failed", kind.tool())
                .source(error)
                .help(format!("rockenv cache clear {name}"))
        })?;
    Ok(Removal::Gone)
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;

    #[test]
    fn a_dry_run_counts_the_trash_as_free_and_not_as_used() {
        let (_directory, store) = Store::scratch();
        let waits = store.root().join("trash/0123456789abcdef");
        fs::create_dir(&waits).unwrap();
        fs::write(waits.join("x"), vec![1; 1 << 20]).unwrap();
        let trash = store.trash_bytes().unwrap();
        assert!(trash >= 1 << 20, "{trash}");
        let options = InventoryOptions {
            used: true,
            ..InventoryOptions::default()
        };
        let used = |trash| {
            let decision = decide(&store, &options, &Limits::default(), None, trash);
            decision.unwrap().inventory.used.unwrap()
        };
        assert_eq!(used(0), used(trash) + trash);
    }

    fn item(rule: Rule, what: GcTarget) -> GcItem {
        GcItem {
            what,
            name: String::new(),
            bytes: 1,
            rebuild_ms: 0,
            rule,
            reason: String::new(),
        }
    }

    fn blob(rule: Rule) -> GcItem {
        let blob = String::new();
        item(rule, GcTarget::Download { blob })
    }

    #[test]
    fn batches_are_few_and_those_that_want_space_get_smaller() {
        let cache = GcTarget::Cache {
            cache: "ccache".to_owned(),
            max: 0,
        };
        let mut items: Vec<GcItem> = (0..1000).map(|_| blob(Rule::Garbage)).collect();
        items.push(item(Rule::CacheMax, cache));
        items.extend((0..1000).map(|_| blob(Rule::Free)));
        let mut waiting = items.as_slice();
        let mut sizes = Vec::new();
        while !waiting.is_empty() {
            sizes.push(batch(waiting));
            waiting = &waiting[batch(waiting)..];
        }
        assert_eq!(sizes[..4], [1000, 1, 125, 110]);
        assert_eq!(sizes.last(), Some(&1));
        assert!(sizes.len() < 60, "{sizes:?}");
        // Without removals for space there is no need to look.
        assert_eq!(batch(&items[..1000]), 1000);
    }

    #[test]
    fn an_item_is_reported_once_whatever_earlier_rounds_did() {
        let mut done = Done::default();
        let busy = || Removal::Stays("in use".to_owned());
        for (removal, reported) in [(busy(), (1, 0)), (busy(), (1, 0)), (Removal::Gone, (0, 1))] {
            done.add(&blob(Rule::Free), removal);
            assert_eq!((done.stayed.len(), done.removed.len()), reported);
        }
        // Images of one recipe have one name.
        let images = ["old", "new"].map(|image| GcTarget::Image {
            image: image.into(),
        });
        for image in images {
            done.add(&item(Rule::Free, image), busy());
        }
        assert_eq!(done.stayed.len(), 2);
    }

    #[test]
    fn all_items_of_a_rule_stay_once_its_space_is_free() {
        use Rule::{Free, Garbage, MinFree, OlderThan};
        let items = [Free, Garbage, Free, MinFree, Garbage, OlderThan].map(blob);
        let cases: [(&[Rule], usize); 4] = [
            (&[], 6),
            (&[Free], 3),
            // No item of the next rule goes before its own space is looked at.
            (&[Free, MinFree], 1),
            (&[MinFree], 6),
        ];
        for (reached, left) in cases {
            let short = still_short(&items, |rule| Ok(reached.contains(&rule))).unwrap();
            assert_eq!(short, &items[6 - left..]);
        }
        assert!(still_short(&items[..3], |_| Ok(true)).unwrap().is_empty());
    }
}
