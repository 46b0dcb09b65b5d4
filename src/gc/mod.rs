//! Owns the decision what `gc` removes: a pure function of an inventory of the store, a policy and a wish.
//!
//! What nobody can use any more goes always. What could be made again goes when it was not used for long, or when space is
//! short: most bytes for the least time to make them again first, and never what something that stays stands on. What stays
//! and why is in [`roots`]. Sources, outputs and host directories are not even in the inventory.

pub mod cache;
pub mod policy;
pub mod roots;
#[cfg(test)]
mod tests;

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

use crate::store::{Layer, Record};
use policy::Limits;
use roots::{Roots, Why};

/// An image younger than this is kept: its builder may not have said yet what stands on it.
const FRESH: Duration = Duration::from_secs(3600);
/// How fast what was never timed is taken to be made again, in bytes a second: a download.
const GUESS: u64 = 10 << 20;

/// What there is to decide about; bytes are what removing the thing alone would free, as far as known.
#[derive(Clone, Debug, Default)]
pub struct Inventory {
    /// When it was read.
    pub now: Timestamp,
    /// Bytes of the file system.
    pub size: u64,
    /// Bytes that an ordinary user could still write.
    pub free: u64,
    /// Bytes of the whole store; none where no limit needs them.
    pub used: Option<u64>,
    /// Envs by name.
    pub envs: BTreeMap<String, Env>,
    /// What running commands count on beyond their env's record, by env.
    pub leases: BTreeMap<String, Lease>,
    /// Layers by id.
    pub layers: BTreeMap<String, Frozen>,
    /// Images by key.
    pub images: BTreeMap<String, Base>,
    /// Downloads by name.
    pub blobs: BTreeMap<String, Kept>,
    /// What no command will ever use: path in the store, why, and its bytes.
    pub strays: BTreeMap<String, (String, u64)>,
    /// Caches by name that have a limit.
    pub caches: BTreeMap<String, Cache>,
    /// Layers and images that lock files name, with the file.
    pub locked: BTreeMap<String, String>,
}

/// An env.
#[derive(Clone, Debug)]
pub struct Env {
    /// Its record.
    pub record: Record,
    /// A command holds it.
    pub busy: bool,
    /// A killed command left a journal, which comes first.
    pub unsettled: bool,
    /// Bytes of the failed step's tree.
    pub failed: u64,
    /// Bytes of the logs of each run, by its time.
    pub logs: BTreeMap<String, u64>,
}

/// What a running command is about to use.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, serde::Deserialize)]
pub struct Lease {
    /// Layers by id.
    pub layers: Vec<String>,
    /// The image's key.
    pub image: String,
}

/// A layer.
#[derive(Clone, Debug)]
pub struct Frozen {
    /// Its description.
    pub layer: Layer,
    /// Bytes that only it holds.
    pub bytes: u64,
}

/// A base image.
#[derive(Clone, Debug)]
pub struct Base {
    /// Recipe's name.
    pub name: String,
    /// When it was built.
    pub built: Timestamp,
    /// Its recipe still stands for it.
    pub current: bool,
    /// Its bytes.
    pub bytes: u64,
    /// Milliseconds that building it took.
    pub took_ms: Option<u64>,
}

/// A file that can be fetched again.
#[derive(Clone, Copy, Debug)]
pub struct Kept {
    /// Its bytes.
    pub bytes: u64,
    /// When it was last written or read.
    pub used: Timestamp,
}

/// A cache with a limit.
#[derive(Clone, Debug)]
pub struct Cache {
    /// What it holds now.
    pub bytes: u64,
    /// What it may hold.
    pub max: u64,
    /// What it is, where its files tell.
    pub kind: Option<cache::Kind>,
    /// An env that mounts it and that nothing runs in, and the directory there.
    pub at: Option<(String, String)>,
}

/// What to remove.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "lowercase", tag = "kind")]
pub enum What {
    /// A snapshot of a step, in every env that has it, and its layer.
    Snapshot {
        /// The layer.
        layer: String,
    },
    /// A layer that no env names.
    Layer {
        /// The layer.
        layer: String,
    },
    /// The tree that a failed step left.
    Failed {
        /// The env.
        env: String,
    },
    /// The logs of one run.
    Logs {
        /// The env.
        env: String,
        /// The run.
        run: String,
    },
    /// A base image.
    Image {
        /// Its key.
        image: String,
    },
    /// A download.
    Download {
        /// Its name below `blobs/sha256`.
        blob: String,
    },
    /// What no command will ever use.
    Stray {
        /// Its path in the store.
        path: String,
    },
    /// What is too much in a cache.
    Cache {
        /// The cache.
        cache: String,
        /// What its own tool is to leave, in bytes.
        max: u64,
    },
}

/// Which rule asks for a removal.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Rule {
    /// Nobody can use it.
    Garbage,
    /// `cache.NAME.max`.
    CacheMax,
    /// `older-than`.
    OlderThan,
    /// `keep-at-most`.
    KeepAtMost,
    /// `min-free`.
    MinFree,
    /// `--free`.
    Free,
}

impl Rule {
    /// Returns its name in the configuration.
    pub fn name(self) -> &'static str {
        match self {
            Self::Garbage => "garbage",
            Self::CacheMax => "cache max",
            Self::OlderThan => "older-than",
            Self::KeepAtMost => "keep-at-most",
            Self::MinFree => "min-free",
            Self::Free => "--free",
        }
    }

    /// Says whether enough free space ends it.
    pub fn wants_space(self) -> bool {
        matches!(self, Self::MinFree | Self::Free)
    }
}

/// One removal.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Item {
    /// What.
    #[serde(flatten)]
    pub what: What,
    /// Its name for people.
    pub name: String,
    /// What it should free, in bytes.
    pub bytes: u64,
    /// How long it would take to make it again, in milliseconds.
    pub rebuild_ms: u64,
    /// The rule that asks for it.
    pub rule: Rule,
    /// Why, in a sentence.
    pub reason: String,
}

/// What `gc` does.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Plan {
    /// The removals, in order: what stands on something goes before it.
    pub items: Vec<Item>,
    /// What the items should free, in bytes.
    pub estimate: u64,
    /// What could be removed and stays, in bytes.
    pub spare: u64,
    /// Bytes that are still missing when all is done.
    pub missing: u64,
    /// What the user should know.
    pub notes: Vec<String>,
}

/// Returns how long ago something was; nothing for what a wrong clock put into the future.
fn age(now: Timestamp, then: Timestamp) -> Duration {
    Duration::try_from(now.duration_since(then)).unwrap_or_default()
}

/// A thing that may be removed.
struct Unit {
    what: What,
    name: String,
    bytes: u64,
    rebuild_ms: u64,
    used: Timestamp,
    /// Why nobody can use it.
    garbage: Option<String>,
    /// The one it stands on, if that may be removed too.
    below: Option<usize>,
    /// Goes by age only: it is not worth the loss for its bytes.
    by_age: bool,
}

impl Unit {
    /// Returns its bytes where it could be made again: garbage and history cannot.
    fn worth(&self) -> u64 {
        if self.garbage.is_none() && !self.by_age {
            self.bytes
        } else {
            0
        }
    }
}

fn guess(bytes: u64) -> u64 {
    1000 + bytes / (GUESS / 1000)
}

/// Decides what to remove. `asked` is what the user wants to have freed in any case, in bytes.
pub fn plan(stock: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
    let roots = Roots::of(stock, limits.keep_last);
    let mut sweep = Sweep {
        units: units(stock, &roots),
        gone: Vec::new(),
        left: 0,
        plan: Plan::default(),
    };
    sweep.gone = vec![false; sweep.units.len()];
    sweep.left = sweep.units.iter().map(Unit::worth).sum();
    sweep.garbage(stock);
    sweep.caches(stock);
    if let Some(limit) = limits.older_than {
        sweep.old(stock.now, limit, limits.keep_at_least);
    }
    let freed = |plan: &Plan| plan.estimate;
    if let (Some(most), Some(used)) = (limits.keep_at_most, stock.used) {
        let over = used.saturating_sub(freed(&sweep.plan)).saturating_sub(most);
        sweep.pressure(Rule::KeepAtMost, over, limits.keep_at_least);
    }
    // What `--free` asks for may go below the floor: somebody decided so, now.
    if let Some(asked) = asked {
        let missing = asked.saturating_sub(freed(&sweep.plan));
        sweep.pressure(Rule::Free, missing, 0);
    }
    let will_be = stock.free.saturating_add(freed(&sweep.plan));
    let short = limits.min_free.saturating_sub(will_be);
    if short > 0 {
        sweep.pressure(Rule::MinFree, short, limits.keep_at_least);
    }
    sweep.finish(stock, limits, asked)
}

struct Sweep {
    units: Vec<Unit>,
    gone: Vec<bool>,
    /// Bytes of what could be removed and was not.
    left: u64,
    plan: Plan,
}

impl Sweep {
    fn take(&mut self, at: usize, rule: Rule, reason: String) {
        let unit = &self.units[at];
        self.gone[at] = true;
        self.left -= unit.worth();
        self.plan.estimate += unit.bytes;
        self.plan.items.push(Item {
            what: unit.what.clone(),
            name: unit.name.clone(),
            bytes: unit.bytes,
            rebuild_ms: unit.rebuild_ms,
            rule,
            reason,
        });
    }

    /// Units with what stands on them before them.
    fn top_down(&self) -> Vec<usize> {
        let mut depths: Vec<(usize, usize)> = (0..self.units.len())
            .map(|at| {
                let mut depth = 0;
                let mut next = self.units[at].below;
                while let Some(below) = next {
                    depth += 1;
                    next = self.units[below].below;
                }
                (usize::MAX - depth, at)
            })
            .collect();
        depths.sort_unstable();
        depths.into_iter().map(|(_, at)| at).collect()
    }

    fn garbage(&mut self, stock: &Inventory) {
        for (path, (why, bytes)) in &stock.strays {
            self.plan.estimate += bytes;
            self.plan.items.push(Item {
                what: What::Stray { path: path.clone() },
                name: path.clone(),
                bytes: *bytes,
                rebuild_ms: 0,
                rule: Rule::Garbage,
                reason: why.clone(),
            });
        }
        for at in self.top_down() {
            if let Some(why) = self.units[at].garbage.clone() {
                self.take(at, Rule::Garbage, why);
            }
        }
    }

    fn caches(&mut self, stock: &Inventory) {
        for (name, cache) in &stock.caches {
            let over = cache.bytes.saturating_sub(cache.max);
            if over == 0 {
                continue;
            }
            match (cache.kind, &cache.at) {
                (Some(kind), Some((env, _))) => {
                    self.plan.estimate += over;
                    self.plan.items.push(Item {
                        what: What::Cache {
                            cache: name.clone(),
                            max: cache.max,
                        },
                        name: format!("cache {name}"),
                        bytes: over,
                        rebuild_ms: guess(over),
                        rule: Rule::CacheMax,
                        reason: format!(
                            "over its maximum: `{}` in env {env} shrinks it",
                            kind.tool()
                        ),
                    });
                }
                (kind, _) => {
                    let why = if kind.is_none() {
                        "what made it is not known"
                    } else {
                        "no idle env has it mounted"
                    };
                    self.plan.notes.push(format!(
                        "cache {name} is over its maximum, and {why}: `rockenv cache clear {name}` empties it"
                    ));
                }
            }
        }
    }

    /// Removes what was not used for `limit`, as long as `floor` bytes stay.
    fn old(&mut self, now: Timestamp, limit: Duration, floor: u64) {
        let order = self.top_down();
        let mut young: BTreeSet<usize> = BTreeSet::new();
        for at in order {
            if self.gone[at] {
                continue;
            }
            let unit = &self.units[at];
            let since = age(now, unit.used);
            let goes = since >= limit
                && !young.contains(&at)
                && (unit.worth() == 0 || self.left - unit.worth() - self.followers(at) >= floor);
            if goes {
                let days = since.as_secs() / 86_400;
                self.take(at, Rule::OlderThan, format!("not used for {days} days"));
            } else if let Some(below) = unit.below {
                young.insert(below);
            }
        }
        self.orphans();
    }

    /// Removes `wanted` bytes, the most for the least time first, as long as `floor` bytes stay.
    fn pressure(&mut self, rule: Rule, wanted: u64, floor: u64) {
        let mut freed = 0;
        let order = self.top_down();
        let mut refused: BTreeSet<usize> = BTreeSet::new();
        while freed < wanted {
            // What goes with each unit, itself included.
            let mut sums: Vec<(u64, u64)> = vec![(0, 0); self.units.len()];
            let mut best: Option<usize> = None;
            for &at in &order {
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
                    // Bytes for a second, without dividing.
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
            for at in self.with(best, &order) {
                if freed >= wanted {
                    break;
                }
                let unit = &self.units[at];
                let per = unit.bytes / unit.rebuild_ms.max(1).div_ceil(1000);
                let reason = format!(
                    "{} for each second of making it again",
                    crate::ui::size::bytes(per)
                );
                freed += unit.bytes;
                self.take(at, rule, reason);
            }
            freed += self.orphans();
        }
    }

    /// Returns what is left of a unit and of what stands on it, in the order to remove it; `order` is from the top down.
    fn with(&self, bottom: usize, order: &[usize]) -> Vec<usize> {
        let mut found = vec![false; self.units.len()];
        found[bottom] = true;
        for &at in order.iter().rev() {
            found[at] |= self.units[at].below.is_some_and(|below| found[below]);
        }
        let goes = |at: &usize| found[*at] && !self.gone[*at];
        order.iter().copied().filter(goes).collect()
    }

    /// Returns the bytes of the layers without a name that go when this unit does, and what stands on it with it.
    fn followers(&self, top: usize) -> u64 {
        let (mut bytes, mut top) = (0, top);
        while let Some(below) = self.units[top].below {
            let stays =
                |at: usize| at != top && self.units[at].below == Some(below) && !self.gone[at];
            let nameless = matches!(self.units[below].what, What::Layer { .. });
            if !nameless || (0..self.units.len()).any(stays) {
                break;
            }
            bytes += self.units[below].worth();
            top = below;
        }
        bytes
    }

    /// Takes the layers without a name of which everything that stood on them is gone; returns their bytes.
    fn orphans(&mut self) -> u64 {
        let mut freed = 0;
        for at in self.top_down() {
            let nameless = matches!(self.units[at].what, What::Layer { .. });
            let mut above = (0..self.units.len()).filter(|top| self.units[*top].below == Some(at));
            if nameless && !self.gone[at] && above.all(|top| self.gone[top]) {
                freed += self.units[at].bytes;
                self.take(
                    at,
                    Rule::Garbage,
                    "nothing stands on it any more".to_owned(),
                );
            }
        }
        freed
    }

    fn finish(mut self, stock: &Inventory, limits: &Limits, asked: Option<u64>) -> Plan {
        let size = crate::ui::size::bytes;
        self.plan.spare = self.left;
        let will_be = stock.free.saturating_add(self.plan.estimate);
        let goal = limits
            .min_free
            .max(asked.map_or(0, |asked| stock.free.saturating_add(asked)));
        self.plan.missing = goal.saturating_sub(will_be);
        if self.plan.missing > 0 {
            let floor = asked.is_none() && limits.keep_at_least > 0;
            let why = if floor && self.left > 0 {
                format!(
                    "what could be made again is down to {} (`keep-at-least` is {}), the rest is in use or not rockenv's",
                    size(self.left),
                    size(limits.keep_at_least)
                )
            } else {
                "everything else is in use, or not rockenv's".to_owned()
            };
            self.plan.notes.push(format!(
                "{} are still missing: {why}; `rockenv du` shows who has it, `rockenv rm ENV` and `rockenv cache clear` free more",
                size(self.plan.missing)
            ));
        }
        if let (Some(most), Some(used)) = (limits.keep_at_most, stock.used)
            && used.saturating_sub(self.plan.estimate) > most
        {
            self.plan.notes.push(format!(
                "the store stays larger than `keep-at-most` ({}): everything else is in use",
                size(most)
            ));
        }
        self.plan
    }
}

/// Collects what may be removed.
fn units(stock: &Inventory, roots: &Roots) -> Vec<Unit> {
    let mut units = Vec::new();
    let mut images: BTreeMap<&str, usize> = BTreeMap::new();
    for (key, image) in &stock.images {
        if roots.images.contains_key(key) {
            continue;
        }
        images.insert(key, units.len());
        let used = stock
            .layers
            .values()
            .any(|item| item.layer.image_key == *key);
        units.push(Unit {
            what: What::Image { image: key.clone() },
            name: format!("image {}", image.name),
            bytes: image.bytes,
            rebuild_ms: image.took_ms.unwrap_or_else(|| guess(image.bytes)),
            used: image.built,
            garbage: (!image.current && !used)
                .then(|| "its recipe stands for a newer one, and nothing stands on it".to_owned()),
            below: None,
            by_age: false,
        });
    }
    let layers = layers(stock, roots, &mut units);
    for (id, at) in &layers {
        let item = &stock.layers[*id];
        units[*at].below = match &item.layer.parent {
            Some(parent) => layers.get(parent.as_str()).copied(),
            None => images.get(item.layer.image_key.as_str()).copied(),
        };
    }
    for (name, env) in stock
        .envs
        .iter()
        .filter(|(_, env)| !env.busy && !env.unsettled)
    {
        let failed = &env.record.failed;
        if let Some(failed) = failed {
            let below = failed.parent.as_deref().and_then(|id| layers.get(id));
            units.push(Unit {
                what: What::Failed { env: name.clone() },
                name: format!("tree of failed step {name}/{}", failed.step),
                bytes: env.failed,
                rebuild_ms: 0,
                used: env.record.used,
                garbage: None,
                below: below.copied(),
                by_age: false,
            });
        }
        let named: BTreeSet<&str> = env
            .record
            .steps
            .iter()
            .filter_map(|step| step.log.as_deref())
            .chain(failed.as_ref().map(|failed| failed.log.as_str()))
            .filter_map(|log| log.split('/').nth(1))
            .collect();
        for (run, bytes) in env
            .logs
            .iter()
            .filter(|(run, _)| !named.contains(run.as_str()))
        {
            units.push(Unit {
                what: What::Logs {
                    env: name.clone(),
                    run: run.clone(),
                },
                name: format!("logs {name}/{run}"),
                bytes: *bytes,
                rebuild_ms: 0,
                used: started(run).unwrap_or(stock.now),
                garbage: None,
                below: None,
                by_age: true,
            });
        }
    }
    for (name, blob) in &stock.blobs {
        units.push(Unit {
            what: What::Download { blob: name.clone() },
            name: format!("download {}", short(name)),
            bytes: blob.bytes,
            rebuild_ms: guess(blob.bytes),
            used: blob.used,
            garbage: None,
            below: None,
            by_age: false,
        });
    }
    units
}

/// Adds the layers that may be removed; returns where each is.
fn layers<'a>(
    stock: &'a Inventory,
    roots: &Roots,
    units: &mut Vec<Unit>,
) -> BTreeMap<&'a str, usize> {
    // Who has each layer in its record, what it is called there, and when that env was last used.
    let mut users: BTreeMap<&str, (Timestamp, Vec<String>)> = BTreeMap::new();
    let mut times: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, env) in &stock.envs {
        for snapshot in &env.record.snapshots {
            let entry = users
                .entry(&snapshot.layer)
                .or_insert((env.record.used, Vec::new()));
            entry.0 = entry.0.max(env.record.used);
            entry.1.push(format!("{name}/{}", snapshot.name));
        }
        for step in &env.record.steps {
            if let Some(cost) = &step.cost {
                times.insert(&step.key, cost.wall_ms);
            }
        }
    }
    let mut needed: BTreeSet<&str> = BTreeSet::new();
    for env in stock.envs.values() {
        for top in env.record.layers() {
            let mut next = Some(top);
            while let Some(id) = next
                && needed.insert(id)
            {
                next = stock
                    .layers
                    .get(id)
                    .and_then(|item| item.layer.parent.as_deref());
            }
        }
    }
    let mut places = BTreeMap::new();
    for (id, item) in &stock.layers {
        if roots.layers.contains_key(id) {
            continue;
        }
        let layer = &item.layer;
        let recorded = layer.cost.map(|cost| cost.wall_ms);
        let known = layer.key.as_deref().and_then(|key| times.get(key).copied());
        let (used, names) = users
            .get(id.as_str())
            .cloned()
            .unwrap_or((layer.created, Vec::new()));
        places.insert(id.as_str(), units.len());
        units.push(Unit {
            what: if names.is_empty() {
                What::Layer { layer: id.clone() }
            } else {
                What::Snapshot { layer: id.clone() }
            },
            name: if names.is_empty() {
                format!("layer {} ({})", short(id), layer.title)
            } else {
                format!("snapshot {}", names.join(", "))
            },
            bytes: item.bytes,
            rebuild_ms: recorded.or(known).unwrap_or_else(|| guess(item.bytes)),
            used: used.max(layer.created),
            garbage: (!needed.contains(id.as_str())).then(|| "no env needs it".to_owned()),
            below: None,
            by_age: false,
        });
    }
    places
}

fn short(id: &str) -> &str {
    id.get(..12).unwrap_or(id)
}

/// Reads the time in the name of a run's logs, `20260102T030405Z`.
fn started(run: &str) -> Option<Timestamp> {
    let time = jiff::civil::DateTime::strptime("%Y%m%dT%H%M%SZ", run).ok()?;
    time.to_zoned(jiff::tz::TimeZone::UTC)
        .ok()
        .map(|time| time.timestamp())
}

/// One thing that stays, and why.
#[derive(Clone, Debug, Serialize)]
pub struct Rooted {
    /// Its name for people.
    pub name: String,
    /// Layer or image.
    pub id: String,
    /// Its bytes.
    pub bytes: u64,
    /// Why.
    pub because: Vec<String>,
}

/// Lists what stays whatever the pressure, with the reasons.
pub fn rooted(stock: &Inventory, limits: &Limits) -> Vec<Rooted> {
    let roots = Roots::of(stock, limits.keep_last);
    let say = |reasons: &BTreeSet<Why>| reasons.iter().map(ToString::to_string).collect();
    let layers = roots.layers.iter().filter_map(|(id, reasons)| {
        let item = stock.layers.get(id)?;
        Some(Rooted {
            name: format!("layer {} ({})", short(id), item.layer.title),
            id: id.clone(),
            bytes: item.bytes,
            because: say(reasons),
        })
    });
    let images = roots.images.iter().filter_map(|(key, reasons)| {
        let image = stock.images.get(key)?;
        Some(Rooted {
            name: format!("image {}", image.name),
            id: key.clone(),
            bytes: image.bytes,
            because: say(reasons),
        })
    });
    images.chain(layers).collect()
}
