//! Owns the names of steps' logs, `logs/RUN/NN-STEP.log` in an env's directory, and their order.

use std::cmp::Ordering;
use std::fmt;

use jiff::Timestamp;
use jiff::civil::DateTime;
use jiff::tz::TimeZone;

/// Names a run, for the directory of its logs: `20260102T030405.678Z`. No two runs of an env begin in one millisecond.
pub(crate) fn run_name(begun: Timestamp) -> String {
    begun.strftime("%Y%m%dT%H%M%S%.3fZ").to_string()
}

/// Parses the start time of a run from its name.
pub(crate) fn began(run: &str) -> Option<Timestamp> {
    let time = DateTime::strptime("%Y%m%dT%H%M%S%.fZ", run).ok()?;
    let time = time.to_zoned(TimeZone::UTC).ok()?;
    Some(time.timestamp())
}

/// One attempt to run a step. Sorts by the time that it began.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepLog {
    /// Directory of the run. The names sort by start time.
    pub run: String,
    /// The step's number in its run, from 1.
    pub number: u32,
    pub step: String,
    /// From 1; a second attempt follows if memory ran out.
    pub attempt: u32,
}

impl StepLog {
    /// Names the log of a step's first attempt.
    pub(crate) fn first(run: &str, number: u32, step: &str) -> Self {
        Self {
            run: run.to_owned(),
            number,
            step: step.to_owned(),
            attempt: 1,
        }
    }

    /// Parses the name of a run's directory and of a file in it; `None` for other files.
    pub(crate) fn parse(run: &str, file: &str) -> Option<Self> {
        let (place, step) = file.strip_suffix(".log")?.split_once('-')?;
        let (number, attempt) = place.split_once('.').unwrap_or((place, "1"));
        Some(Self {
            run: run.to_owned(),
            number: number.parse().ok()?,
            step: step.to_owned(),
            attempt: attempt.parse().ok()?,
        })
    }

    /// Returns whether its run began at that time or later. Run names have millisecond precision.
    pub(crate) fn is_since(&self, time: Timestamp) -> bool {
        began(&self.run).is_some_and(|run| run.as_millisecond() >= time.as_millisecond())
    }

    /// Returns its place in a run. Hook scripts come before their step.
    pub(crate) fn place(&self) -> (u32, bool) {
        (self.number, !self.step.starts_with("hook-"))
    }
}

impl Ord for StepLog {
    fn cmp(&self, other: &Self) -> Ordering {
        let order = |log: &Self| (log.place(), log.attempt);
        let runs = self.run.cmp(&other.run);
        let steps = runs.then_with(|| order(self).cmp(&order(other)));
        steps.then_with(|| self.step.cmp(&other.step))
    }
}

impl PartialOrd for StepLog {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

/// The path below the env's directory.
impl fmt::Display for StepLog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "logs/{}/{:02}", self.run, self.number)?;
        if self.attempt > 1 {
            write!(f, ".{}", self.attempt)?;
        }
        write!(f, "-{}.log", self.step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_s_name_is_when_it_began() {
        for time in ["2026-01-02T03:04:05.678Z", "2026-01-02T03:04:05Z"] {
            let time: Timestamp = time.parse().unwrap();
            assert_eq!(began(&run_name(time)), Some(time));
        }
        assert_eq!(began("other"), None);
    }

    #[test]
    fn names_are_read_as_they_are_written_and_sort_by_time() {
        let names = [
            "a/01-hook-fix.log",
            "a/01-build.log",
            "a/01.2-build.log",
            "a/02-again-2.0.log",
            "a/99-x.log",
            "a/100-a.log",
            "b/01-build.log",
        ];
        let logs = names.map(|name| {
            let (run, file) = name.split_once('/').unwrap();
            StepLog::parse(run, file).unwrap()
        });
        assert!(logs.is_sorted());
        assert_eq!(
            logs.each_ref().map(ToString::to_string),
            names.map(|name| format!("logs/{name}"))
        );
        assert_eq!((&*logs[2].step, logs[2].attempt), ("build", 2));
        assert_eq!(logs[3].step, "again-2.0");
        for other in "01-build.samples|01-build.log.tmp|x-build.log|01build.log".split('|') {
            assert_eq!(StepLog::parse("a", other), None);
        }
    }
}
