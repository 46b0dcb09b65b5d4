//! Owns watching a running step's builds to predict how long they still take: finds the directories in its build
//! volumes where ninja works, and reads from their logs which commands have ended.
//!
//! Unreadable data is left out and never causes a failure.

use std::collections::{BTreeMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant, SystemTime};

use nix::time::{ClockId, clock_gettime};

use crate::plan::build_graph::BuildGraph;
use crate::plan::ids::VolumeName;
use crate::plan::ninja_log::Command;
use crate::plan::time_left::BuildForecast;
use crate::store::Store;
use crate::store::build_logs::{self, BuildLog};
use crate::sys::signals;
use crate::ui::ninja::{TimeLeft, Tracker};

/// Minimum interval between looks at the builds.
const PERIOD: Duration = Duration::from_secs(2);
/// A look takes at most one part in `SHARE` of a processor's time, and one in `SHARE_WAITING` of the elapsed time.
const SHARE: u32 = 100;
const SHARE_WAITING: u32 = 20;
/// Once a look has taken this long, further logs and graphs wait for the next look.
const LONGEST: Duration = Duration::from_secs(1);
/// Commands that must have ended before an estimate is shown.
const KNOWN: usize = 3;
/// The largest number of jobs in use at this many looks counts, because a job is unused between two commands.
const RECENT: usize = 4;

#[derive(Debug)]
pub(crate) struct BuildWatch<'a> {
    store: &'a Store,
    /// The build volumes that the step sees.
    volumes: Vec<(VolumeName, PathBuf)>,
    builds: BTreeMap<(usize, PathBuf), Build>,
    /// The step's script.
    script: String,
    jobs: usize,
    /// The number of jobs in use at the last looks; zero if unknown.
    used: [usize; RECENT],
    /// Whether more than one job was in use at once. A ninja with `-j` does not join the jobserver, so its step seems
    /// to use one job.
    joined: bool,
    due: Instant,
}

#[derive(Debug, Default)]
struct Build {
    /// Whether its `build.ninja` is too large for any build.
    too_large: bool,
    /// The commands in its log when the step began.
    before: Vec<Command>,
    /// The number of commands, if known, and the forecast for them.
    forecast: Option<(Option<usize>, BuildForecast)>,
    /// When its log was last read.
    modified: Option<SystemTime>,
    /// The number of commands that the current ninja has ended.
    ended: usize,
    /// Whether an earlier ninja of this step ran in the same directory.
    again: bool,
    /// How long its ninja had been running when its log was read, and when that was. Measured from then on with a
    /// monotonic clock, which stops during suspend.
    ran: Option<(Duration, Instant)>,
}

impl<'a> BuildWatch<'a> {
    /// Begins watching the builds in these volumes, which run with `jobs` jobs.
    pub(crate) fn start(
        store: &'a Store,
        volumes: Vec<(VolumeName, PathBuf)>,
        script: String,
        jobs: u32,
    ) -> Self {
        let mut builds = BTreeMap::new();
        for (at, (_, top)) in volumes.iter().enumerate() {
            for below in build_logs::find(top) {
                if signals::is_pending() {
                    break;
                }
                let log = build_logs::read(top, &below);
                let build = Build {
                    modified: log.as_ref().map(|log| log.modified),
                    before: log.map(|log| log.commands).unwrap_or_default(),
                    ..Build::default()
                };
                builds.insert((at, below), build);
            }
        }
        Self {
            store,
            volumes,
            builds,
            script,
            jobs: jobs as usize,
            used: [0; RECENT],
            joined: false,
            due: Instant::now(),
        }
    }

    /// Returns how long the step's builds still take, if a look is due and an estimate is possible. `used` returns how
    /// many jobs the step uses now.
    pub(crate) fn time_left(
        &mut self,
        counts: &Tracker,
        used: impl Fn() -> Option<u32>,
    ) -> Option<TimeLeft> {
        let began = Instant::now();
        if counts.progress().total == 0 || began < self.due {
            return None;
        }
        let worked = processor_time();
        self.used.rotate_right(1);
        self.used[0] = used().unwrap_or(0) as usize;
        self.joined |= self.used[0] > 1;
        self.read();
        let left = self.estimate(counts);
        let worked = processor_time().saturating_sub(worked);
        self.due = Instant::now() + pause(worked, began.elapsed());
        left
    }

    /// Reads the logs that have grown.
    fn read(&mut self) {
        for (at, (_, top)) in self.volumes.iter().enumerate() {
            let found = build_logs::find(top);
            let until = Instant::now() + LONGEST;
            for below in found {
                let modified = build_logs::modified(top, &below);
                let build = self.builds.entry((at, below.clone())).or_default();
                if modified != build.modified
                    && Instant::now() < until
                    && let Some(log) = build_logs::read(top, &below)
                {
                    build.take(log, SystemTime::now());
                }
            }
        }
    }

    fn estimate(&mut self, counts: &Tracker) -> Option<TimeLeft> {
        let until = Instant::now() + LONGEST;
        let known: Vec<(usize, PathBuf)> = self.builds.keys().cloned().collect();
        let used = self.used.into_iter().max().filter(|used| *used > 0);
        let used = used.filter(|_| self.joined);
        let mut all: Option<TimeLeft> = None;
        for ((at, below), build) in &mut self.builds {
            if build.ran.is_none() {
                continue;
            }
            if build.too_large || Instant::now() > until {
                return None;
            }
            let is_above = |(volume, other): &(usize, PathBuf)| {
                volume == at && other != below && below.starts_with(other)
            };
            let total = counts.total(below, !known.iter().any(is_above));
            let total = total.map(|total| total as usize);
            if build.is_outdated(total) {
                let (volume, top) = &self.volumes[*at];
                let file = build_logs::text(top, &below.join("build.ninja"))?;
                let earlier = self.store.earlier_builds(volume, below);
                let mut earlier = earlier.unwrap_or_default();
                let before = build.before.iter();
                let before: HashSet<&str> = before.map(|command| &*command.output).collect();
                let took = build.before.iter();
                earlier.extend(took.map(|command| (command.output.clone(), command.took_ms)));
                let Some(graph) = BuildGraph::parse(&file) else {
                    build.too_large = true;
                    return None;
                };
                let past = |output: &str| earlier.get(output).copied();
                let ran = |output: &str| before.contains(output);
                let forecast = BuildForecast::new(graph, total, &self.script, past, ran);
                build.forecast = Some((total, forecast));
                // Read it again, for the new forecast.
                build.modified = None;
                let log = build_logs::read(top, below)?;
                build.take(log, SystemTime::now());
            }
            let (_, forecast) = build.forecast.as_ref()?;
            if build.ended < KNOWN && build.before.is_empty() {
                continue;
            }
            let since = build.since(Instant::now())?;
            let left = forecast.left(since, build.ended, forecast.jobs(self.jobs, used));
            // Nested builds share the jobs, and the outer one waits for them.
            if all.is_none_or(|most| most.likely < left.likely) {
                all = Some(left);
            }
        }
        all
    }
}

/// Returns how long to wait after a look that used `worked` of processor time and `took` of elapsed time.
fn pause(worked: Duration, took: Duration) -> Duration {
    PERIOD.max(worked * SHARE).max(took * SHARE_WAITING)
}

fn processor_time() -> Duration {
    let time = clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID);
    time.map(Duration::from).unwrap_or_default()
}

impl Build {
    /// Returns whether a forecast for `total` commands must be made. `total` becomes unknown when a ninja begins in
    /// another directory. The ninja in this directory is over then, and its commands are the same.
    fn is_outdated(&self, total: Option<usize>) -> bool {
        let forecast = self.forecast.as_ref();
        forecast.is_none_or(|(known, _)| *known != total && (total.is_some() || self.again))
    }

    /// Returns how long its ninja has been running.
    fn since(&self, now: Instant) -> Option<Duration> {
        let (ran, read) = self.ran?;
        Some(ran + now.saturating_duration_since(read))
    }

    /// Records the commands that have ended since the step began, from a log that was read at `now`.
    fn take(&mut self, log: BuildLog, now: SystemTime) {
        self.modified = Some(log.modified);
        let before: HashSet<&Command> = self.before.iter().collect();
        let new = log.commands.iter();
        let new: Vec<&Command> = new.filter(|command| !before.contains(command)).collect();
        // ninja writes its commands in the order of their ends, with times since its own start. An earlier end is that
        // of another ninja.
        let mut pairs = new.windows(2);
        let restart = pairs.rposition(|pair| pair[1].ended_ms < pair[0].ended_ms);
        let first = restart.map_or(0, |at| at + 1);
        if let Some((_, forecast)) = &mut self.forecast {
            for (at, command) in new.iter().enumerate() {
                let took = Duration::from_millis(command.took_ms);
                let end = if at < first { 0 } else { command.ended_ms };
                forecast.ended(&command.output, took, Duration::from_millis(end));
            }
        }
        if let Some(last) = new.last() {
            self.ended = new.len() - first;
            self.again = first > 0;
            // ninja wrote the log's last line when that command ended.
            let began = log
                .modified
                .checked_sub(Duration::from_millis(last.ended_ms));
            let ran = began.map(|began| now.duration_since(began).unwrap_or_default());
            self.ran = ran.map(|ran| (ran, Instant::now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_look_that_waited_does_not_put_off_the_next_for_long() {
        let ms = Duration::from_millis;
        assert_eq!(pause(ms(1), ms(100)), PERIOD);
        assert_eq!(pause(ms(1), ms(500)), ms(10_000));
        assert_eq!(pause(ms(50), ms(50)), ms(5000));
    }

    fn log(modified: SystemTime, ended_ms: &[u64]) -> BuildLog {
        let command = |ended_ms: &u64| Command {
            output: format!("{ended_ms}.o"),
            ended_ms: *ended_ms,
            took_ms: 1000,
        };
        BuildLog {
            modified,
            commands: ended_ms.iter().map(command).collect(),
        }
    }

    #[test]
    fn a_second_ninja_counts_from_its_own_start() {
        let graph = "build 60000.o: cc\nbuild 4000.o: cc\nbuild 5000.o: cc\nbuild 9.o: cc\n";
        let graph = BuildGraph::parse(graph).unwrap();
        let forecast = BuildForecast::new(graph, None, "", |_| None, |_| false);
        let mut build = Build {
            forecast: Some((Some(1), forecast)),
            ..Build::default()
        };
        let modified = SystemTime::now();
        build.take(log(modified, &[60_000]), modified);
        // Once another ninja begins in another directory, the number of commands is unknown.
        assert!(!build.is_outdated(None) && build.is_outdated(Some(2)));
        build.take(log(modified, &[60_000, 4000, 5000]), modified);
        assert!(build.is_outdated(None));
        let (ran, _) = build.ran.unwrap();
        assert_eq!((ran, build.ended), (Duration::from_secs(5), 2));
        // The last command has just begun, and takes a second like the others.
        let (_, forecast) = build.forecast.unwrap();
        let left = forecast.left(ran, 2, 1).likely;
        assert!(left.abs_diff(Duration::from_secs(1)) < Duration::from_millis(300));
    }

    #[test]
    fn a_build_does_not_run_while_the_machine_is_suspended() {
        let modified = SystemTime::now();
        let seconds = Duration::from_secs;
        let log = log(modified, &[4000]);
        let mut build = Build::default();
        assert_eq!(build.since(Instant::now()), None);
        build.take(log, modified + seconds(1));
        // Independent of the time of day.
        let (_, read) = build.ran.unwrap();
        assert_eq!(build.since(read), Some(seconds(5)));
        assert_eq!(build.since(read + seconds(60)), Some(seconds(65)));
    }
}
