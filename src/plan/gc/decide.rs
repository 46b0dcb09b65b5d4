//! Owns the order of removals: garbage, oversized caches, old items, and if space is short, the items that free the
//! most for the least rebuild time.

use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::time::Duration;

use jiff::Timestamp;

use super::policy::Limits;
use super::roots::Roots;
use super::units::{Unit, guess, units};
use super::{GcItem, GcTarget, Inventory, Plan, Rule, age};
use crate::ui::size;

/// Decides what to remove. `asked` is the number of bytes that the user wants freed in any case.
pub(crate) fn plan(inventory: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
    let roots = Roots::of(inventory, limits.keep_last);
    let mut decider = Decider::new(units(inventory, &roots));
    decider.garbage(inventory);
    decider.caches(inventory);
    if let Some(limit) = limits.older_than {
        decider.old(inventory.now, limit, limits.keep_at_least);
    }
    if let (Some(most), Some(used)) = (limits.keep_at_most, inventory.used) {
        let over = used
            .saturating_sub(decider.plan.estimate)
            .saturating_sub(most);
        decider.pressure(Rule::KeepAtMost, over, limits.keep_at_least);
    }
    // `--free` may go below the floor, because the user decides.
    if let Some(asked) = asked {
        let missing = asked.saturating_sub(decider.plan.estimate);
        decider.pressure(Rule::Free, missing, 0);
    }
    let will_be = inventory.free.saturating_add(decider.plan.estimate);
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
    /// All units, children before their parents.
    order: Vec<usize>,
    /// The children of each unit.
    above: Vec<Vec<usize>>,
    gone: Vec<bool>,
    /// Number of remaining children of each unit.
    remaining: Vec<usize>,
    /// Units without children that `orphans` has not looked at yet.
    bare: Vec<usize>,
    /// Bytes of removable items that were kept.
    left: u64,
    plan: Plan,
}

impl Decider {
    fn new(units: Vec<Unit>) -> Self {
        let mut above = vec![Vec::new(); units.len()];
        for (at, unit) in units.iter().enumerate() {
            if let Some(below) = unit.below {
                above[below].push(at);
            }
        }
        let mut order: Vec<usize> = (0..units.len())
            .filter(|&at| units[at].below.is_none())
            .collect();
        let mut next = 0;
        while let Some(&at) = order.get(next) {
            order.extend(&above[at]);
            next += 1;
        }
        order.reverse();
        let remaining: Vec<usize> = above.iter().map(Vec::len).collect();
        let bare = order.iter().copied().filter(|&at| remaining[at] == 0);
        Self {
            bare: bare.collect(),
            order,
            above,
            gone: vec![false; units.len()],
            remaining,
            left: units.iter().map(Unit::reusable_bytes).sum(),
            plan: Plan::default(),
            units,
        }
    }

    fn take(&mut self, at: usize, rule: Rule, reason: String) {
        let unit = &self.units[at];
        self.gone[at] = true;
        if let Some(below) = unit.below {
            self.remaining[below] -= 1;
            if self.remaining[below] == 0 {
                self.bare.push(below);
            }
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
                            size::bytes(over),
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

    /// Removes items that were unused for `limit`, as long as `floor` bytes stay.
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
                let since = days(since);
                self.take(at, Rule::OlderThan, format!("not used for {since}"));
            } else if let Some(below) = unit.below {
                young.insert(below);
            }
        }
        self.orphans();
        // A unit kept for a young descendant may have lost it as an orphan.
        if self.plan.items.len() > taken {
            self.old(now, limit, floor);
        }
    }

    /// Removes `wanted` bytes, those with the least rebuild time per byte first, as long as `floor` bytes stay.
    fn pressure(&mut self, rule: Rule, wanted: u64, floor: u64) {
        let mut freed = 0;
        let mut candidates = Candidates::of(self);
        while freed < wanted {
            let Some((best, bytes)) = candidates.best(&self.gone) else {
                return;
            };
            if self.left - bytes - self.followers(best) < floor {
                continue;
            }
            for at in self.with(best) {
                if freed >= wanted {
                    break;
                }
                let unit = &self.units[at];
                let per = unit.bytes / unit.rebuild_ms.max(1).div_ceil(1000);
                let reason = format!("{} for each second of rebuild time", size::bytes(per));
                freed += unit.bytes;
                self.take(at, rule, reason);
            }
            let orphans = self.orphans();
            freed += orphans.iter().map(|&at| self.units[at].bytes).sum::<u64>();
            if freed < wanted {
                for at in std::iter::once(best).chain(orphans) {
                    candidates.remove(&self.units, at);
                }
            }
        }
    }

    /// Returns a unit and its remaining descendants, in the order of removal.
    fn with(&self, bottom: usize) -> Vec<usize> {
        let mut found = vec![bottom];
        let mut next = 0;
        while let Some(&at) = found.get(next) {
            found.extend(self.above[at].iter().filter(|&&at| !self.gone[at]));
            next += 1;
        }
        found.reverse();
        found
    }

    /// Returns the bytes of the unnamed parents that go together with this unit and its descendants.
    fn followers(&self, top: usize) -> u64 {
        let (mut bytes, mut top) = (0, top);
        while let Some(below) = self.units[top].below {
            let nameless = matches!(self.units[below].what, GcTarget::Layer { .. });
            if !nameless || self.remaining[below] > 1 {
                break;
            }
            bytes += self.units[below].reusable_bytes();
            top = below;
        }
        bytes
    }

    /// Takes the unnamed layers whose descendants are all gone, and returns them.
    fn orphans(&mut self) -> Vec<usize> {
        let mut taken = Vec::new();
        while let Some(at) = self.bare.pop() {
            if matches!(self.units[at].what, GcTarget::Layer { .. }) && !self.gone[at] {
                self.take(
                    at,
                    Rule::Garbage,
                    "nothing depends on it any more".to_owned(),
                );
                taken.push(at);
            }
        }
        taken
    }

    fn staying(&self) -> impl Iterator<Item = &Unit> {
        let units = self.units.iter().zip(&self.gone);
        units.filter(|(_, gone)| !**gone).map(|(unit, _)| unit)
    }

    /// Counts removable layers that free nothing because a service stores them on another file system.
    fn elsewhere(&self, inventory: &Inventory) -> usize {
        let empty = self.staying().filter(|unit| unit.bytes == 0);
        let layers = empty.filter_map(|unit| unit.what.layer());
        layers
            .filter(|layer| inventory.layers[*layer].layer.kept.is_some())
            .count()
    }

    /// Returns a note on the layers that stay because they arrived recently.
    fn pulled(&self, limits: &Limits) -> Option<String> {
        let pulled = |unit: &&Unit| matches!(unit.what, GcTarget::Pulled { .. });
        let pulled = self.staying().filter(pulled);
        let bytes: Vec<u64> = pulled.map(|unit| unit.bytes).collect();
        let until = limits.older_than.map_or_else(String::new, |limit| {
            format!(" for {} after they arrived", days(limit))
        });
        (!bytes.is_empty()).then(|| {
            format!(
                "kept{until}, unless space is short: {} ({}) that no env needs yet",
                size::count(bytes.len(), "pulled or imported snapshot"),
                size::bytes(bytes.iter().sum()),
            )
        })
    }

    fn finish(mut self, inventory: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
        self.plan.spare = self.left;
        self.plan.notes.extend(inventory.notes.iter().cloned());
        self.plan.notes.extend(self.pulled(limits));
        let will_be = inventory.free.saturating_add(self.plan.estimate);
        let goal = limits
            .min_free
            .max(asked.map_or(0, |asked| inventory.free.saturating_add(asked)));
        self.plan.missing = goal.saturating_sub(will_be);
        let few = format!(
            "only {} can be rebuilt (`keep-at-least` is {})",
            size::bytes(self.left),
            size::bytes(limits.keep_at_least)
        );
        if self.plan.missing > 0 {
            let floor = asked.is_none() && limits.keep_at_least > 0;
            let why = if floor && self.left > 0 {
                format!("{few}; the rest is in use or not managed by rockenv")
            } else {
                "everything else is in use or not managed by rockenv".to_owned()
            };
            self.plan.notes.push(format!(
                "{} short: {why}; `rockenv du` shows disk usage, `rockenv rm ENV` and `rockenv cache clear NAME` free more",
                size::bytes(self.plan.missing)
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
            let why = match limits.keep_at_least > 0 && self.left > 0 {
                true => few.as_str(),
                false => "everything else is in use",
            };
            self.plan.notes.push(format!(
                "the store stays larger than `keep-at-most` ({}): {why}",
                size::bytes(most)
            ));
        }
        self.plan
    }
}

/// Bytes freed and rebuild time of each unit together with its descendants.
struct Candidates {
    sums: Vec<(u64, u64)>,
    /// Rank of each unit by age, oldest first.
    age: Vec<usize>,
    /// The best unit is on top, the oldest of those with the same worth. An entry is stale if its sums differ from
    /// `sums`.
    queue: BinaryHeap<Candidate>,
}

/// A unit to remove, with its figures when it was queued. The greatest is the best, compared field by field.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Candidate {
    /// Bytes for each millisecond of rebuild time, with 64 binary places: exact up to seven weeks.
    worth: u128,
    age: Reverse<usize>,
    at: usize,
    sums: (u64, u64),
}

impl Candidates {
    fn of(decider: &Decider) -> Self {
        let units = &decider.units;
        let mut by_age: Vec<usize> = (0..units.len()).collect();
        by_age.sort_by_key(|&at| (units[at].used, &units[at].what));
        let mut age = vec![0; units.len()];
        for (place, at) in by_age.into_iter().enumerate() {
            age[at] = place;
        }
        let mut candidates = Self {
            sums: vec![(0, 0); units.len()],
            age,
            queue: BinaryHeap::new(),
        };
        for &at in &decider.order {
            let unit = &units[at];
            if decider.gone[at] || unit.by_age {
                continue;
            }
            candidates.sums[at].0 += unit.bytes;
            candidates.sums[at].1 += unit.rebuild_ms.max(1);
            if let Some(below) = unit.below {
                candidates.sums[below].0 += candidates.sums[at].0;
                candidates.sums[below].1 += candidates.sums[at].1;
            }
            candidates.enter(at);
        }
        candidates
    }

    fn enter(&mut self, at: usize) {
        let (bytes, rebuild_ms) = self.sums[at];
        if bytes > 0 {
            self.queue.push(Candidate {
                worth: (u128::from(bytes) << 64) / u128::from(rebuild_ms.max(1)),
                age: Reverse(self.age[at]),
                at,
                sums: (bytes, rebuild_ms),
            });
        }
    }

    /// Returns the best remaining unit and the bytes that it frees. Each unit is returned once for the same figures.
    fn best(&mut self, gone: &[bool]) -> Option<(usize, u64)> {
        while let Some(Candidate { at, sums, .. }) = self.queue.pop() {
            if !gone[at] && self.sums[at] == sums {
                return Some((at, sums.0));
            }
        }
        None
    }

    /// Subtracts a removed unit and its descendants from the sums of its ancestors.
    fn remove(&mut self, units: &[Unit], top: usize) {
        let (bytes, rebuild_ms) = self.sums[top];
        let mut at = top;
        while let Some(below) = units[at].below
            && !units[at].by_age
        {
            at = below;
            self.sums[at].0 -= bytes;
            self.sums[at].1 -= rebuild_ms;
            self.enter(at);
        }
    }
}

/// Formats a time in whole days, or exactly if it is shorter than one.
fn days(time: Duration) -> String {
    match time.as_secs() / 86_400 {
        0 => size::duration(time),
        days => size::count(days, "day"),
    }
}
