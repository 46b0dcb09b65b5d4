//! Owns estimating the time left in a build: predicts the time of each command from an earlier build or from similar
//! commands that have ended, then simulates the order in which ninja runs them. Pure.
//!
//! A command that never ran gets the usual time of its kind, corrected by the ratio of actual to usual time among ended
//! commands: all of them, those of its kind, of its directory, and those with a similar name. A closer group counts
//! more, and the more so the larger it is.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::time::Duration;

use super::build_graph::{BuildGraph, Edge, EdgeKind};
use super::ninja_log::is_stamp;
use crate::ui::ninja::TimeLeft;

/// Number of groups that a command belongs to, from the widest.
const LEVELS: usize = 6;
/// Index of the first group that is limited to one directory.
const DIRECTORY: usize = 3;
/// Maximum time with which a command counts in wider groups, relative to its usual time. A few commands that take
/// minutes, such as LLVM's tables for AMDGPU, say nothing about a thousand others.
const LARGEST: f64 = 30.0;
/// Weight of the next wider group at each level, in commands.
const WEIGHT: [f64; LEVELS] = [0.5, 1.0, 1.0, 2.0, 2.0, 2.0];
/// Spread of the times in one group, relative to their mean.
const SPREAD: f64 = 0.9;
/// The same for commands that ran before.
const SPREAD_KNOWN: f64 = 0.25;
/// Maximum number of commands running beyond the number of jobs, according to a log, which may be wrong.
const SLOTS: usize = 256;
/// Bounds of the range, relative to the estimate.
const RANGE: (f64, f64) = (0.1, 1.5);

/// Actual and expected seconds of a group's commands.
#[derive(Clone, Copy, Debug, Default)]
struct Group {
    actual: f64,
    expected: f64,
    count: f64,
}

#[derive(Debug)]
struct Work {
    /// Usual or earlier time, in seconds.
    usual: f64,
    /// Whether it ran before.
    known: bool,
    /// Whether the build has to run it: not if it only names others, or ran before a resumed build.
    runs: bool,
    member: bool,
    groups: [usize; LEVELS],
    /// Priority as in ninja: the number of commands on the longest chain from this one to a result.
    priority: u32,
    needs: Vec<usize>,
    needed_by: Vec<usize>,
    /// When the command began and ended, in seconds since the build began. Negative if an earlier ninja of the step ran
    /// the command.
    ended: Option<(f64, f64)>,
}

/// Known and predicted times of a build's commands.
#[derive(Debug)]
pub(crate) struct BuildForecast {
    work: Vec<Work>,
    names: HashMap<String, usize>,
    groups: Vec<Group>,
    /// Whether the set of the build's commands is known.
    exact: bool,
    /// Number of commands, if known.
    total: Option<usize>,
}

impl BuildForecast {
    /// Starts the forecast of a build of `total` commands by a `script`. `past` returns the milliseconds that the
    /// command with an output took before; `ran` returns whether it ran in this build's directory.
    pub(crate) fn new(
        graph: BuildGraph,
        total: Option<usize>,
        script: &str,
        past: impl Fn(&str) -> Option<u64>,
        ran: impl Fn(&str) -> bool,
    ) -> Self {
        let ran: Vec<bool> = graph.edges.iter().map(|edge| ran(&edge.output)).collect();
        let members = graph.members(total, script, &ran);
        let mut ids = HashMap::new();
        let mut groups: Vec<Group> = Vec::new();
        let mut work = Vec::new();
        for (at, edge) in graph.edges.iter().enumerate() {
            let before = past(&edge.output).map(|ms| (ms as f64 / 1e3).max(0.001));
            let usual = usual(edge);
            let mut find = |known| {
                names_of_groups(edge, known).map(|name| {
                    *ids.entry(name).or_insert_with(|| {
                        groups.push(Group::default());
                        groups.len() - 1
                    })
                })
            };
            let (own, new) = (find(before.is_some()), find(false));
            if let (Some(before), Some(_)) = (before, edge.kind) {
                // New commands in a known project resemble its known ones.
                for (level, group) in new.into_iter().enumerate().skip(1) {
                    groups[group].add(counted(level, &edge.output, before, usual), usual);
                }
            }
            let member = members.as_ref().is_none_or(|members| members[at]);
            work.push(Work {
                usual: before.unwrap_or(usual),
                known: before.is_some(),
                // Nothing waits for commands that a resumed build leaves out.
                runs: edge.kind.is_some() && (member || !ran[at]),
                member,
                groups: own,
                priority: 0,
                needs: edge.needs.clone(),
                needed_by: Vec::new(),
                ended: None,
            });
        }
        let names = graph.edges.into_iter().map(|edge| edge.output).zip(0..);
        let mut forecast = Self {
            work,
            names: names.collect(),
            groups,
            exact: members.is_some(),
            total,
        };
        forecast.rank();
        forecast
    }

    /// Links each command to the commands that wait for it, and ranks them as ninja does.
    fn rank(&mut self) {
        let mut waiting = vec![0; self.work.len()];
        for at in 0..self.work.len() {
            for need in self.work[at].needs.clone() {
                self.work[need].needed_by.push(at);
                waiting[need] += 1;
            }
        }
        // From the results back to the sources.
        let mut open: Vec<usize> = (0..waiting.len()).filter(|at| waiting[*at] == 0).collect();
        while let Some(at) = open.pop() {
            let own = self.work[at].priority + u32::from(self.work[at].runs);
            self.work[at].priority = own;
            for need in self.work[at].needs.clone() {
                self.work[need].priority = self.work[need].priority.max(own);
                waiting[need] -= 1;
                if waiting[need] == 0 {
                    open.push(need);
                }
            }
        }
    }

    /// Records how long the command with this first output took, and its end since the build began.
    pub(crate) fn ended(&mut self, output: &str, took: Duration, end: Duration) {
        let Some(at) = self.names.get(output) else {
            return;
        };
        let work = &mut self.work[*at];
        let (took, end) = (took.as_secs_f64(), end.as_secs_f64());
        if work.ended.replace((end - took, end)).is_none() && work.runs {
            for (level, group) in work.groups.into_iter().enumerate() {
                let actual = counted(level, output, took, work.usual);
                self.groups[group].add(actual, work.usual);
            }
        }
    }

    /// Returns the number of jobs for the rest of the build. If more commands could run than jobs were `used` lately,
    /// memory or other envs need the other jobs, and `used` stays. Otherwise it is the maximum, `jobs`.
    pub(crate) fn jobs(&self, jobs: usize, used: Option<usize>) -> usize {
        let used = used.filter(|used| Frontier::of(&self.work).ready.len() > *used);
        used.map_or(jobs, |used| used.min(jobs))
    }

    /// Returns the time left at `now`, since the build began, after `done` commands, with this many jobs.
    pub(crate) fn left(&self, now: Duration, done: usize, jobs: usize) -> TimeLeft {
        let now = now.as_secs_f64();
        let seconds = self.predict();
        let mut frontier = Frontier::of(&self.work);
        let mut ready = std::mem::take(&mut frontier.ready).into_sorted_vec();
        let mut running = Vec::new();
        for began in self.slots(jobs, now) {
            let elapsed = |at: usize| {
                let needs = self.work[at].needs.iter();
                let ended = needs.filter_map(|need| self.work[*need].ended);
                (now - ended.fold(began, |latest, (_, end)| latest.max(end))).max(0.0)
            };
            // The next command in ninja's order that can have been running this long, or else the longest.
            let fits = |&(_, Reverse(at)): &(u32, Reverse<usize>)| seconds[at] * 1.5 >= elapsed(at);
            let longest = || {
                let longer = |one: &usize, other: &usize| {
                    let second = |position: usize| seconds[ready[position].1.0];
                    second(*one).total_cmp(&second(*other))
                };
                (0..ready.len()).max_by(longer)
            };
            let Some(position) = ready.iter().rposition(fits).or_else(longest) else {
                break;
            };
            let (_, Reverse(at)) = ready.remove(position);
            running.push((at, elapsed(at)));
        }
        frontier.ready = ready.into();
        let likely = match self.exact {
            true => frontier.simulate(&seconds, running, jobs),
            false => self.share(&seconds, done, jobs),
        };
        let range = self.uncertainty(&seconds).clamp(RANGE.0, RANGE.1);
        let duration = |seconds: f64| Duration::from_secs_f64(seconds.clamp(0.0, 1e9));
        TimeLeft {
            least: duration(likely / (1.0 + range)),
            likely: duration(likely),
            most: duration(likely * (1.0 + range)),
        }
    }

    /// Returns when each job began its current command, earliest first.
    fn slots(&self, jobs: usize, now: f64) -> Vec<f64> {
        let mut ended: Vec<(f64, f64)> = self.work.iter().filter_map(|work| work.ended).collect();
        ended.sort_by(|one, other| one.0.total_cmp(&other.0));
        let mut slots: Vec<f64> = Vec::new();
        for (start, end) in ended {
            // The tolerance covers ninja's own time between two commands.
            let full = slots.len() > jobs.saturating_add(SLOTS);
            let free = slots.iter_mut().filter(|free| **free <= start + 0.05);
            match free.max_by(|one, other| one.total_cmp(other)) {
                Some(free) => *free = end,
                None if full => {}
                None => slots.push(end),
            }
        }
        slots.sort_by(|one, other| other.total_cmp(one));
        slots.truncate(jobs);
        slots.resize(jobs, 0.0);
        slots.reverse();
        slots.iter().map(|free| free.min(now)).collect()
    }

    /// Returns the predicted time of each command, in seconds.
    fn predict(&self) -> Vec<f64> {
        let predict = |work: &Work| {
            let mut ratio = 1.0;
            for (group, weight) in work.groups.iter().zip(WEIGHT) {
                let group = self.groups[*group];
                if group.count > 0.0 {
                    let weight = weight * f64::max(group.expected / group.count, 0.01);
                    ratio = (group.actual + weight * ratio) / (group.expected + weight);
                }
            }
            work.usual * ratio
        };
        self.work.iter().map(predict).collect()
    }

    /// Estimates the time left from the number of remaining commands alone.
    fn share(&self, seconds: &[f64], done: usize, jobs: usize) -> f64 {
        let left = self.total.map_or(0, |total| total.saturating_sub(done)) as f64;
        let sum = |known: bool| {
            let rest = self.work.iter().zip(seconds);
            let rest = rest
                .filter(|(work, _)| work.runs && work.ended.is_none() && (work.known || !known));
            rest.fold((0.0, 0.0), |(count, sum), (_, time)| {
                (count + 1.0, sum + time)
            })
        };
        // Commands that ran before are the likely ones, if there are enough of them.
        let known = Some(sum(true)).filter(|(count, _)| *count >= left);
        let (count, time) = known.unwrap_or_else(|| sum(false));
        time * (left / f64::max(count, 1.0)) / jobs.max(1) as f64
    }

    /// Returns the relative error of the prediction.
    fn uncertainty(&self, seconds: &[f64]) -> f64 {
        // Commands of one directory share their error.
        let mut sums: HashMap<usize, (f64, f64)> = HashMap::new();
        let mut all = 0.0;
        for (work, time) in self.work.iter().zip(seconds) {
            if work.runs && work.member && work.ended.is_none() {
                let spread = if work.known { SPREAD_KNOWN } else { SPREAD };
                sums.entry(work.groups[DIRECTORY])
                    .or_insert((0.0, spread))
                    .0 += time;
                all += time;
            }
        }
        let errors = sums.iter().map(|(group, (sum, spread))| {
            let error = sum * spread / (self.groups[*group].count + 1.0).sqrt();
            error * error
        });
        errors.sum::<f64>().sqrt() / f64::max(all, 1e-9)
    }
}

/// The state of a build: the commands that can run, and for each other command the number of needs that it waits for.
#[derive(Debug)]
struct Frontier<'f> {
    work: &'f [Work],
    waiting: Vec<usize>,
    /// The commands that can run, in ninja's order.
    ready: BinaryHeap<(u32, Reverse<usize>)>,
}

impl<'f> Frontier<'f> {
    /// Returns the state after the commands that have ended.
    fn of(work: &'f [Work]) -> Self {
        let mut frontier = Self {
            work,
            waiting: work.iter().map(|work| work.needs.len()).collect(),
            ready: BinaryHeap::new(),
        };
        for (at, work) in work.iter().enumerate() {
            if work.needs.is_empty() && frontier.reach(at) {
                frontier.end(at);
            }
        }
        frontier
    }

    /// Takes a command that waits for nothing. Returns whether it need not run.
    fn reach(&mut self, at: usize) -> bool {
        let work = &self.work[at];
        let is_over = !work.runs || work.ended.is_some();
        if !is_over && work.member {
            self.ready.push((work.priority, Reverse(at)));
        }
        is_over
    }

    /// Ends a command, and then those that wait for nothing else and need not run.
    fn end(&mut self, at: usize) {
        let work = self.work;
        let mut over = vec![at];
        while let Some(at) = over.pop() {
            for &next in &work[at].needed_by {
                self.waiting[next] -= 1;
                if self.waiting[next] == 0 && self.reach(next) {
                    over.push(next);
                }
            }
        }
    }

    /// Simulates the rest of the build as ninja runs it, and returns its time.
    fn simulate(mut self, seconds: &[f64], begun: Vec<(usize, f64)>, jobs: usize) -> f64 {
        // Integer microseconds, because floats have no total order.
        let micros = |seconds: f64| (seconds * 1e6) as u64;
        let mut running = BinaryHeap::new();
        for (at, elapsed) in begun {
            // The longer a command has been running, the longer it still takes.
            let more = if self.work[at].known { 0.1 } else { 0.3 };
            let left = (seconds[at] - elapsed).max(elapsed * more);
            running.push(Reverse((micros(left), at)));
        }
        let mut now: u64 = 0;
        loop {
            while running.len() < jobs
                && let Some((_, Reverse(at))) = self.ready.pop()
            {
                running.push(Reverse((now.saturating_add(micros(seconds[at])), at)));
            }
            let Some(Reverse((end, at))) = running.pop() else {
                return now as f64 / 1e6;
            };
            now = end;
            self.end(at);
        }
    }
}

/// Returns the part of a command's time that counts in a group. All of it counts only in groups of its directory, or if
/// the command builds a whole sub-project, each of which has its own directory.
fn counted(level: usize, output: &str, actual: f64, usual: f64) -> f64 {
    match level < DIRECTORY && !is_stamp(output) {
        true => actual.min(LARGEST * usual),
        false => actual,
    }
}

impl Group {
    fn add(&mut self, actual: f64, expected: f64) {
        self.actual += actual;
        self.expected += expected;
        self.count += 1.0;
    }
}

/// Returns the names of a command's groups: all, its kind, its directory, and the first words of its name.
fn names_of_groups(edge: &Edge, known: bool) -> [String; LEVELS] {
    let (directory, name) = edge.output.rsplit_once('/').unwrap_or(("", &edge.output));
    let mut words = name
        .match_indices(['-', '_', '.'])
        .map(|(at, _)| &name[..at]);
    let first = words.next().unwrap_or(name);
    let two = words.next().unwrap_or(first);
    let kind = format!("{known} {:?}", edge.kind);
    let top = directory.split('/').next().unwrap_or_default();
    let top = format!("{kind} {top}");
    let directory = format!("{kind} {directory}");
    [
        format!("{known}"),
        kind,
        top,
        directory.clone(),
        format!("{directory}/{first}"),
        format!("{directory}/{first} {two}"),
    ]
}

/// Returns the usual time of a command, in seconds. Only ratios matter, and only before other commands have ended.
fn usual(edge: &Edge) -> f64 {
    match edge.kind {
        None => 0.0,
        Some(EdgeKind::C) => 0.7,
        Some(EdgeKind::Cxx) => 4.0,
        Some(EdgeKind::Device) => 15.0,
        Some(EdgeKind::Archive) => 0.1,
        Some(EdgeKind::Link) => 0.7,
        Some(EdgeKind::Other) => 0.3,
    }
}

#[cfg(test)]
mod tests;
