//! Owns the order of removals: garbage, oversized caches, old items, and if space is short, those that free the most
//! for the least rebuild time.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::time::Duration;

use jiff::Timestamp;

use super::policy::Limits;
use super::roots::Roots;
use super::units::{Unit, guess, units};
use super::{GcItem, GcTarget, Inventory, Plan, Rule, age};

/// Decides what to remove. `asked` is what the user wants freed in any case, in bytes.
pub(crate) fn plan(inventory: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
    let roots = Roots::of(inventory, limits.keep_last);
    let mut decider = Decider::new(units(inventory, &roots));
    decider.garbage(inventory);
    decider.caches(inventory);
    if let Some(limit) = limits.older_than {
        decider.old(inventory.now, limit, limits.keep_at_least);
    }
    let freed = |plan: &Plan| plan.estimate;
    if let (Some(most), Some(used)) = (limits.keep_at_most, inventory.used) {
        let over = used
            .saturating_sub(freed(&decider.plan))
            .saturating_sub(most);
        decider.pressure(Rule::KeepAtMost, over, limits.keep_at_least);
    }
    // `--free` may go below the floor, because it is the user's decision now.
    if let Some(asked) = asked {
        let missing = asked.saturating_sub(freed(&decider.plan));
        decider.pressure(Rule::Free, missing, 0);
    }
    let will_be = inventory.free.saturating_add(freed(&decider.plan));
    let short = limits.min_free.saturating_sub(will_be);
    if short > 0 {
        decider.pressure(Rule::MinFree, short, limits.keep_at_least);
    }
    if let Some(limit) = limits.older_than {
        decider.old(inventory.now, limit, limits.keep_at_least);
    }
    decider.finish(inventory, limits, asked)
}

struct Decider {
    units: Vec<Unit>,
    /// All units, descendants before what they stand on.
    order: Vec<usize>,
    gone: Vec<bool>,
    /// How many remaining units stand directly on each.
    above: Vec<usize>,
    /// Bytes of removable items that were kept.
    left: u64,
    plan: Plan,
}

impl Decider {
    fn new(units: Vec<Unit>) -> Self {
        let mut above = vec![0; units.len()];
        for below in units.iter().filter_map(|unit| unit.below) {
            above[below] += 1;
        }
        let depth =
            |at: &usize| std::iter::successors(units[*at].below, |at| units[*at].below).count();
        let mut order: Vec<usize> = (0..units.len()).collect();
        order.sort_by_cached_key(|at| std::cmp::Reverse(depth(at)));
        Self {
            order,
            gone: vec![false; units.len()],
            above,
            left: units.iter().map(Unit::reusable_bytes).sum(),
            plan: Plan::default(),
            units,
        }
    }

    fn take(&mut self, at: usize, rule: Rule, reason: String) {
        let unit = &self.units[at];
        self.gone[at] = true;
        if let Some(below) = unit.below {
            self.above[below] -= 1;
        }
        self.left -= unit.reusable_bytes();
        self.plan.estimate += unit.bytes;
        self.plan.items.push(GcItem {
            what: unit.what.clone(),
            name: unit.name.clone(),
            bytes: unit.bytes,
            rebuild_ms: unit.rebuild_ms,
            rule,
            reason,
        });
    }

    fn garbage(&mut self, inventory: &Inventory) {
        for (path, (why, bytes)) in &inventory.strays {
            self.plan.estimate += bytes;
            self.plan.items.push(GcItem {
                what: GcTarget::Stray { path: path.clone() },
                name: path.clone(),
                bytes: *bytes,
                rebuild_ms: 0,
                rule: Rule::Garbage,
                reason: why.clone(),
            });
        }
        for at in self.order.clone() {
            if let Some(why) = self.units[at].garbage.clone() {
                self.take(at, Rule::Garbage, why);
            }
        }
    }

    fn caches(&mut self, inventory: &Inventory) {
        for (name, cache) in &inventory.caches {
            let over = cache.bytes.saturating_sub(cache.max);
            if over == 0 {
                continue;
            }
            match (cache.kind, &cache.at) {
                (Some(kind), Some((env, _))) => {
                    let (how, all) = kind.shrinks();
                    let bytes = if all { cache.bytes } else { over };
                    self.plan.estimate += bytes;
                    self.plan.items.push(GcItem {
                        what: GcTarget::Cache {
                            cache: name.clone(),
                            max: cache.max,
                        },
                        name: format!("cache {name}"),
                        bytes,
                        rebuild_ms: guess(bytes),
                        rule: Rule::CacheMax,
                        reason: format!(
                            "{} over its maximum: `{}` in env {env} {how}",
                            crate::ui::size::bytes(over),
                            kind.tool()
                        ),
                    });
                }
                (kind, _) => {
                    let clear = format!("`rockenv cache clear {name}` empties it");
                    let why = match (kind, &cache.busy) {
                        (None, _) => format!("its tool is unknown: {clear}"),
                        (_, Some(env)) => format!(
                            "in use by a command in env {env}: run `rockenv gc` again later"
                        ),
                        (_, None) => format!("no env mounts it: {clear}"),
                    };
                    self.plan
                        .notes
                        .push(format!("cache {name} is over its maximum, and {why}"));
                }
            }
        }
    }

    /// Removes items that were not used for `limit`, as long as `floor` bytes stay.
    fn old(&mut self, now: Timestamp, limit: Duration, floor: u64) {
        let taken = self.plan.items.len();
        let mut young: BTreeSet<usize> = BTreeSet::new();
        for at in self.order.clone() {
            if self.gone[at] {
                continue;
            }
            let unit = &self.units[at];
            let since = age(now, unit.used);
            let goes = since >= limit
                && !young.contains(&at)
                && (unit.reusable_bytes() == 0
                    || self.left - unit.reusable_bytes() - self.followers(at) >= floor);
            if goes {
                let days = since.as_secs() / 86_400;
                self.take(at, Rule::OlderThan, format!("not used for {days} days"));
            } else if let Some(below) = unit.below {
                young.insert(below);
            }
        }
        self.orphans();
        // What was kept for something young may have lost it as an orphan.
        if self.plan.items.len() > taken {
            self.old(now, limit, floor);
        }
    }

    /// Removes `wanted` bytes, the most for the least time first, as long as `floor` bytes stay.
    fn pressure(&mut self, rule: Rule, wanted: u64, floor: u64) {
        let mut freed = 0;
        let mut refused: BTreeSet<usize> = BTreeSet::new();
        while freed < wanted {
            // Each unit's sum over itself and its descendants.
            let mut sums: Vec<(u64, u64)> = vec![(0, 0); self.units.len()];
            let mut best: Option<usize> = None;
            for &at in &self.order {
                let unit = &self.units[at];
                if self.gone[at] || unit.by_age {
                    continue;
                }
                sums[at].0 += unit.bytes;
                sums[at].1 += unit.rebuild_ms.max(1);
                if let Some(below) = unit.below {
                    sums[below].0 += sums[at].0;
                    sums[below].1 += sums[at].1;
                }
                if sums[at].0 == 0 || refused.contains(&at) {
                    continue;
                }
                let better = best.is_none_or(|best| {
                    let (this, other) = (sums[at], sums[best]);
                    // Compares bytes per second without dividing.
                    let worth = |a: (u64, u64), b: (u64, u64)| u128::from(a.0) * u128::from(b.1);
                    let older =
                        (unit.used, &unit.what) < (self.units[best].used, &self.units[best].what);
                    match worth(this, other).cmp(&worth(other, this)) {
                        Ordering::Greater => true,
                        Ordering::Equal => older,
                        Ordering::Less => false,
                    }
                });
                if better {
                    best = Some(at);
                }
            }
            let Some(best) = best else {
                return;
            };
            if self.left - sums[best].0 - self.followers(best) < floor {
                refused.insert(best);
                continue;
            }
            for at in self.with(best) {
                if freed >= wanted {
                    break;
                }
                let unit = &self.units[at];
                let per = unit.bytes / unit.rebuild_ms.max(1).div_ceil(1000);
                let reason = format!(
                    "{} for each second of rebuild time",
                    crate::ui::size::bytes(per)
                );
                freed += unit.bytes;
                self.take(at, rule, reason);
            }
            freed += self.orphans();
        }
    }

    /// Returns the remaining unit and descendants, in the order to remove them.
    fn with(&self, bottom: usize) -> Vec<usize> {
        let mut found = vec![false; self.units.len()];
        found[bottom] = true;
        for &at in self.order.iter().rev() {
            found[at] |= self.units[at].below.is_some_and(|below| found[below]);
        }
        let goes = |at: &usize| found[*at] && !self.gone[*at];
        self.order.iter().copied().filter(goes).collect()
    }

    /// Returns the bytes of the unnamed layers that go together with this unit and its descendants.
    fn followers(&self, top: usize) -> u64 {
        let (mut bytes, mut top) = (0, top);
        while let Some(below) = self.units[top].below {
            let nameless = matches!(self.units[below].what, GcTarget::Layer { .. });
            if !nameless || self.above[below] > 1 {
                break;
            }
            bytes += self.units[below].reusable_bytes();
            top = below;
        }
        bytes
    }

    /// Takes the unnamed layers whose descendants are all gone; returns their bytes.
    fn orphans(&mut self) -> u64 {
        let mut freed = 0;
        for at in self.order.clone() {
            let nameless = matches!(self.units[at].what, GcTarget::Layer { .. });
            if nameless && !self.gone[at] && self.above[at] == 0 {
                freed += self.units[at].bytes;
                self.take(
                    at,
                    Rule::Garbage,
                    "nothing depends on it any more".to_owned(),
                );
            }
        }
        freed
    }

    /// Counts removable layers that free nothing because a service has them elsewhere.
    fn elsewhere(&self, inventory: &Inventory) -> usize {
        let kept = |unit: &Unit| match &unit.what {
            GcTarget::Snapshot { layer } | GcTarget::Layer { layer } => {
                unit.bytes == 0 && inventory.layers[layer].layer.kept.is_some()
            }
            _ => false,
        };
        let left = self
            .units
            .iter()
            .zip(&self.gone)
            .filter(|(_, gone)| !**gone);
        left.filter(|(unit, _)| kept(unit)).count()
    }

    fn finish(mut self, inventory: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
        let size = crate::ui::size::bytes;
        self.plan.spare = self.left;
        self.plan.notes.extend(inventory.notes.iter().cloned());
        let will_be = inventory.free.saturating_add(self.plan.estimate);
        let goal = limits
            .min_free
            .max(asked.map_or(0, |asked| inventory.free.saturating_add(asked)));
        self.plan.missing = goal.saturating_sub(will_be);
        if self.plan.missing > 0 {
            let floor = asked.is_none() && limits.keep_at_least > 0;
            let why = if floor && self.left > 0 {
                format!(
                    "only {} can be rebuilt (`keep-at-least` is {}); the rest is in use or not managed by rockenv",
                    size(self.left),
                    size(limits.keep_at_least)
                )
            } else {
                "everything else is in use or not managed by rockenv".to_owned()
            };
            self.plan.notes.push(format!(
                "{} short: {why}; `rockenv du` shows disk usage, `rockenv rm ENV` and `rockenv cache clear` free more",
                size(self.plan.missing)
            ));
        }
        let elsewhere = self.elsewhere(inventory);
        if self.plan.missing > 0 && elsewhere > 0 {
            self.plan.notes.push(format!(
                "snapshots kept because Docker or Podman stores them on another file system: {elsewhere}"
            ));
        }
        if let (Some(most), Some(used)) = (limits.keep_at_most, inventory.used)
            && used.saturating_sub(self.plan.estimate) > most
        {
            let why = if limits.keep_at_least > 0 && self.left > 0 {
                format!(
                    "only {} can be rebuilt (`keep-at-least` is {})",
                    size(self.left),
                    size(limits.keep_at_least)
                )
            } else {
                "everything else is in use".to_owned()
            };
            self.plan.notes.push(format!(
                "the store stays larger than `keep-at-most` ({}): {why}",
                size(most)
            ));
        }
        self.plan
    }
}
