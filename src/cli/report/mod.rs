//! Owns the content of `rockenv report`: what was built, how long each step took, and which resources it used.
//!
//! `gather` reads the store, `locked` the lock file. The rest is pure: `timeline` places runs on one axis, `html` and
//! `markdown` write the page. A page is a single file without network access, fonts or libraries.

pub(crate) mod command;

pub(crate) mod collect;
mod html;
mod locked;
pub(crate) mod markdown;
mod plot;
mod timeline;

use std::time::Duration;

use jiff::Timestamp;
use serde::Serialize;

pub(crate) use html::html;
pub(crate) use markdown::markdown;

use crate::plan::record::{Cost, Outcome};
use crate::plan::samples::Sample;
use crate::ui::size;

/// Mark at the beginning of every report. A report replaces only files with this mark.
pub(crate) const MARK: &str = "rockenv report";

#[derive(Clone, Debug, Default, Serialize)]
pub(crate) struct EnvReport {
    /// Version of the report format.
    pub schema: &'static str,
    /// Version of the rockenv that wrote the report.
    pub version: &'static str,
    pub written: Timestamp,
    pub env: String,
    pub profile: String,
    pub targets: Vec<String>,
    pub verdict: EnvState,
    /// The state in a sentence.
    pub summary: String,
    /// Number of this machine's processors; the steps may have run on another machine.
    pub cores: u32,
    /// The env's memory limit, in bytes.
    pub memory_max: Option<u64>,
    pub steps: Vec<StepRow>,
    /// All runs of these steps, oldest first.
    pub runs: Vec<Run>,
    /// Last lines of the failed step's log.
    pub tail: Vec<String>,
    /// Ninja builds, one per directory.
    pub builds: Vec<Build>,
    /// The slowest compile and link commands, slowest first.
    pub slowest: Vec<Edge>,
    pub caches: Vec<Cache>,
    /// The largest items of disk usage, largest first.
    pub space: Vec<Space>,
    pub frees: u64,
    /// Steps and hooks that are not part of the env, and why.
    pub left_out: Vec<Fact>,
    /// Build environment and inputs.
    pub facts: Vec<Fact>,
    /// Inputs that the lock file pins, and differences from it; empty without a lock file.
    pub lock: Vec<Fact>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum EnvState {
    Complete,
    Failed,
    #[default]
    Unfinished,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct StepRow {
    pub name: String,
    pub outcome: Outcome,
    /// Reason of the outcome, if it needs one.
    pub reason: Option<String>,
    /// Cost of the step; `None` if it did not run, or ran for another env.
    pub cost: Option<Cost>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Run {
    /// Index of the step in the report.
    pub step: usize,
    pub ended: Timestamp,
    pub wall_ms: u64,
    pub done: bool,
    /// Number of jobs granted.
    pub jobs: u32,
    /// Growth of the env, in bytes.
    pub disk_delta: i64,
    pub samples: Vec<Sample>,
}

impl Run {
    /// Returns the start in milliseconds since 1970.
    fn began_ms(&self) -> i64 {
        let wall = i64::try_from(self.wall_ms).unwrap_or(i64::MAX);
        self.ended.as_millisecond().saturating_sub(wall)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Build {
    /// The build directory: the volume's name and the path in it.
    pub directory: String,
    pub edges: usize,
    /// Sum of the edges' times in milliseconds.
    pub busy_ms: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Edge {
    /// Directory of the ninja build.
    pub directory: String,
    /// The file that the command produced.
    pub output: String,
    pub took_ms: u64,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Cache {
    pub name: String,
    /// Kind of content, if known.
    pub content: Option<String>,
    pub bytes: u64,
    /// Maximum size in bytes.
    pub max: Option<u64>,
    /// Hits and misses, if the cache counts them.
    pub lookups: Option<(u64, u64)>,
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Space {
    pub name: String,
    pub note: String,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Fact {
    pub name: String,
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

impl EnvState {
    fn name(self) -> &'static str {
        match self {
            Self::Complete => "complete",
            Self::Failed => "failed",
            Self::Unfinished => "unfinished",
        }
    }
}

impl EnvReport {
    fn targets(&self) -> String {
        match self.targets.as_slice() {
            [] => "no target".to_owned(),
            targets => targets.join(", "),
        }
    }

    /// Returns the figures at the top of the page, with their names.
    fn totals(&self) -> Vec<(&'static str, String)> {
        let costs = || self.steps.iter().filter_map(|step| step.cost);
        let mut totals = vec![(
            "steps' time",
            millis(costs().map(|cost| cost.wall_ms).sum()),
        )];
        let used = costs().filter_map(|cost| cost.usage.cpu());
        if let Some(used) = used.reduce(|sum, one| sum + one) {
            totals.push(("processor time", size::duration(used)));
        }
        if let Some(memory) = costs().filter_map(|cost| cost.usage.memory()).max() {
            totals.push(("most memory", size::bytes(memory)));
        }
        // A step that frees more than it writes counts as zero.
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

/// Formats a step's cost: time, processor time, memory without and with page cache, disk.
fn took(cost: Cost) -> [String; 5] {
    let with_cache = cost.usage.memory_peak.filter(|bytes| *bytes > 0);
    [
        millis(cost.wall_ms),
        cost.usage.cpu().map(size::duration).unwrap_or_default(),
        cost.usage.memory().map(size::bytes).unwrap_or_default(),
        with_cache.map(size::bytes).unwrap_or_default(),
        size::delta(cost.disk_delta),
    ]
}

/// Returns the word for a step's outcome.
pub(super) fn word(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Done => "done",
        Outcome::Hit => "from snapshot",
        Outcome::Failed => "failed",
        Outcome::Skipped => "skipped",
        Outcome::Pending => "not done",
    }
}
