//! Owns what `rockenv report` tells of an env: what was built, how long each step took, and what it used meanwhile.
//!
//! `gather` reads the store, and `locked` the lock file; from there on everything is pure: `timeline` puts runs of steps on one
//! axis, `html` and `markdown` write the page. A page is one file that needs nothing else: no network, no fonts, no library.

pub mod command;

pub mod gather;
mod html;
mod locked;
pub mod markdown;
mod plot;
mod timeline;

use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

pub use html::html;
pub use markdown::markdown;

use crate::plan::record::{Cost, Outcome};
use crate::plan::samples::Sample;
use crate::ui::size;

/// In the beginning of every report, so that one may be replaced by the next, and nothing else is.
pub const MARK: &str = "rockenv report";

/// What there is to tell of an env.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Report {
    /// Version of this description.
    pub schema: &'static str,
    /// Version of the rockenv that wrote it.
    pub version: &'static str,
    /// When it was written.
    pub written: Timestamp,
    /// The env.
    pub env: String,
    /// Its profile.
    pub profile: String,
    /// Its targets.
    pub targets: Vec<String>,
    /// How it stands.
    pub verdict: Verdict,
    /// The same in a sentence.
    pub summary: String,
    /// The machine's processors, where steps ran on this one.
    pub cores: u32,
    /// The env's limit of memory, in bytes.
    pub memory_max: Option<u64>,
    /// Its steps, in order.
    pub steps: Vec<Step>,
    /// Every run of these steps, oldest first.
    pub runs: Vec<Run>,
    /// The end of the failed step's log.
    pub tail: Vec<String>,
    /// What ninjas built, one for each directory.
    pub builds: Vec<Build>,
    /// What took longest to compile or link, the longest first.
    pub slowest: Vec<Edge>,
    /// Caches that the env mounts.
    pub caches: Vec<Cache>,
    /// What takes most space, the largest first.
    pub space: Vec<Space>,
    /// Bytes that removing the env would free.
    pub frees: u64,
    /// Steps and hooks that are not part of the env, and why.
    pub left_out: Vec<Fact>,
    /// Where and of what it was built.
    pub facts: Vec<Fact>,
    /// What its lock file pins, and what is not as it says; empty where there is none.
    pub lock: Vec<Fact>,
}

/// How an env stands.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Verdict {
    /// Everything ran.
    Complete,
    /// A step failed.
    Failed,
    /// There are steps to do.
    #[default]
    Unfinished,
}

/// A step.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    /// Its name.
    pub name: String,
    /// How it ended.
    pub outcome: Outcome,
    /// Why, where that needs saying.
    pub reason: Option<String>,
    /// What it took; nothing where it did not run, or for another env.
    pub cost: Option<Cost>,
}

/// One run of a step.
#[derive(Clone, Debug, Serialize)]
pub struct Run {
    /// The step's place in the report.
    pub step: usize,
    /// When it ended.
    pub ended: Timestamp,
    /// How long it took, in milliseconds.
    pub wall_ms: u64,
    /// It succeeded.
    pub done: bool,
    /// Jobs that it was allowed.
    pub jobs: u32,
    /// By how much it made the env larger, in bytes.
    pub disk_delta: i64,
    /// What it used meanwhile.
    pub samples: Vec<Sample>,
}

impl Run {
    /// Returns when it began, in milliseconds since 1970.
    fn began_ms(&self) -> i64 {
        let wall = i64::try_from(self.wall_ms).unwrap_or(i64::MAX);
        self.ended.as_millisecond().saturating_sub(wall)
    }
}

/// What one ninja built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Build {
    /// Its directory: the volume's name, and the path in it.
    pub directory: String,
    /// Edges that it ran.
    pub edges: usize,
    /// Sum of their times, in milliseconds.
    pub busy_ms: u64,
}

/// A command that a ninja ran.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Edge {
    /// The directory of its ninja.
    pub directory: String,
    /// What it made.
    pub output: String,
    /// How long it took, in milliseconds.
    pub took_ms: u64,
}

/// A cache.
#[derive(Clone, Debug, Serialize)]
pub struct Cache {
    /// Its name.
    pub name: String,
    /// What it holds, where that is known.
    pub content: Option<String>,
    /// Bytes.
    pub bytes: u64,
    /// Most bytes it may have.
    pub max: Option<u64>,
    /// Lookups that it answered, and that it did not, where it counts them.
    pub lookups: Option<(u64, u64)>,
}

/// Something that takes space.
#[derive(Clone, Debug, Serialize)]
pub struct Space {
    /// What it is.
    pub name: String,
    /// What is known of it.
    pub note: String,
    /// Bytes on disk.
    pub bytes: u64,
}

/// A name and what there is to say of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fact {
    /// The name.
    pub name: String,
    /// What it is.
    pub value: String,
}

impl Fact {
    fn new(name: impl Into<String>, value: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            value: value.into(),
        }
    }
}

impl Verdict {
    fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Unfinished => "unfinished",
        }
    }
}

impl Report {
    fn targets(&self) -> String {
        match self.targets.as_slice() {
            [] => "no target".to_owned(),
            targets => targets.join(", "),
        }
    }

    /// Returns the figures that a page begins with, by name.
    fn totals(&self) -> Vec<(&'static str, String)> {
        let costs = || self.steps.iter().filter_map(|step| step.cost);
        let mut totals = vec![
            (
                "steps' time",
                millis(costs().map(|cost| cost.wall_ms).sum()),
            ),
            (
                "processor time",
                millis(costs().map(|cost| cost.usage.cpu_us).sum::<u64>() / 1000),
            ),
        ];
        if let Some(memory) = costs().filter_map(|cost| cost.usage.memory()).max() {
            totals.push(("most memory", size::bytes(memory)));
        }
        // A step that removes more than it writes took nothing.
        let written = costs().filter_map(|cost| u64::try_from(cost.disk_delta).ok());
        totals.push(("written to disk", size::bytes(written.sum())));
        totals.push(("freed by removal", size::bytes(self.frees)));
        let lookups = self.caches.iter().filter_map(|cache| cache.lookups);
        let (hits, misses) = lookups.fold((0, 0), |sum, one| (sum.0 + one.0, sum.1 + one.1));
        if let Some(percent) = (hits * 100).checked_div(hits + misses) {
            totals.push(("cache hits", format!("{percent} %")));
        }
        totals
    }

    fn written_by(&self) -> String {
        let time = self.written.strftime("%Y-%m-%d %H:%M UTC");
        format!("Written by rockenv {} on {time}.", self.version)
    }
}

fn millis(millis: u64) -> String {
    size::duration(Duration::from_millis(millis))
}

/// Returns what a step took: time, processor time, memory without page cache and with it, disk.
fn took(cost: Cost) -> [String; 5] {
    let with_cache = cost.usage.memory_peak.filter(|bytes| *bytes > 0);
    [
        millis(cost.wall_ms),
        millis(cost.usage.cpu_us / 1000),
        cost.usage.memory().map(size::bytes).unwrap_or_default(),
        with_cache.map(size::bytes).unwrap_or_default(),
        size::delta(cost.disk_delta),
    ]
}

/// Returns the word for how a step ended.
fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Hit => "from snapshot",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
        Outcome::Pending => "not done",
    }
}
