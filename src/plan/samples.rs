//! Owns samples of a step's resource usage over time, thinned out as they grow, and their text form.
//!
//! Each line is a sample of five numbers: milliseconds since the step began, memory in KiB, processor time so far in
//! milliseconds, jobs, disk in KiB; `-` if not counted. At [`MOST`] lines, pairs are merged and the sampling rate is
//! halved, so a long step's file is no larger than a short step's.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::Serialize;

/// Maximum number of samples kept for one step.
pub(crate) const MOST: usize = 1024;
/// Initial interval of samples.
const PERIOD: Duration = Duration::from_millis(250);

/// A step's resource usage at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Sample {
    /// Since the step began, in milliseconds.
    pub at_ms: u64,
    /// Memory in use without page cache, in bytes; the maximum of merged samples.
    pub memory: Option<u64>,
    /// Processor time since the step began, in milliseconds.
    pub cpu_ms: Option<u64>,
    /// Job slots in use; the maximum of merged samples.
    pub jobs: Option<u32>,
    /// Growth of disk usage since the step began, in bytes, including other processes' writes.
    pub disk: i64,
}

impl Sample {
    /// Merges two consecutive samples.
    fn and(self, next: Self) -> Self {
        Self {
            memory: self.memory.max(next.memory),
            jobs: self.jobs.max(next.jobs),
            ..next
        }
    }
}

impl fmt::Display for Sample {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let field = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), |v| v.to_string());
        let memory = field(self.memory.map(|bytes| bytes >> 10));
        let jobs = field(self.jobs.map(u64::from));
        let (cpu, disk) = (field(self.cpu_ms), self.disk >> 10);
        writeln!(f, "{} {memory} {cpu} {jobs} {disk}", self.at_ms)
    }
}

impl FromStr for Sample {
    type Err = ();

    fn from_str(line: &str) -> Result<Self, ()> {
        let mut fields = line.split(' ');
        let mut next = || fields.next().ok_or(());
        let number = |text: &str| match text {
            "-" => Ok(None),
            _ => text.parse::<u64>().map(Some).map_err(drop),
        };
        Ok(Self {
            at_ms: number(next()?)?.ok_or(())?,
            memory: number(next()?)?.map(|kib| kib.saturating_mul(1024)),
            cpu_ms: number(next()?)?,
            jobs: number(next()?)?.and_then(|jobs| u32::try_from(jobs).ok()),
            disk: next()?.parse::<i64>().map_err(drop)?.saturating_mul(1024),
        })
    }
}

/// The samples of a running step.
#[derive(Debug, Default)]
pub(crate) struct Series {
    kept: Vec<Sample>,
    /// How often all of them were merged.
    halved: u32,
}

impl Series {
    /// Adds a sample; returns whether earlier ones were merged.
    pub(crate) fn push(&mut self, sample: Sample) -> bool {
        let thinned = self.kept.len() >= MOST;
        if thinned {
            let pairs = self.kept.chunks(2);
            self.kept = pairs
                .map(|pair| pair[1..].iter().fold(pair[0], |one, next| one.and(*next)))
                .collect();
            self.halved += 1;
        }
        self.kept.push(sample);
        thinned
    }

    /// Returns the current sampling interval.
    pub(crate) fn period(&self) -> Duration {
        PERIOD * (1 << self.halved)
    }
}

impl fmt::Display for Series {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.kept.iter().try_for_each(|sample| sample.fmt(f))
    }
}

/// Parses the samples of a step, and sorts them by time. Skips a line cut short by a crash.
pub(crate) fn parse(text: &str) -> Vec<Sample> {
    let mut found: Vec<Sample> = text.lines().filter_map(|line| line.parse().ok()).collect();
    found.sort_by_key(|sample| sample.at_ms);
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_is_read_back_and_damage_is_left_out() {
        let whole = Sample {
            at_ms: 250,
            memory: Some(5 << 20),
            cpu_ms: Some(120),
            jobs: Some(3),
            disk: -(4 << 10),
        };
        let bare = Sample {
            at_ms: 0,
            ..Sample::default()
        };
        assert_eq!(bare.to_string(), "0 - - - 0\n");
        let text = format!("{whole}{bare}x y\n500 1 2");
        assert_eq!(parse(&text), [bare, whole]);
    }

    #[test]
    fn a_long_step_keeps_few_samples_its_peak_and_its_end() {
        let mut series = Series::default();
        let (mut at, mut rewritten) = (Duration::ZERO, 0);
        let night = Duration::from_secs(10 * 3600);
        while at < night {
            let at_ms = u64::try_from(at.as_millis()).unwrap();
            rewritten += usize::from(series.push(Sample {
                at_ms,
                memory: Some(if rewritten == 3 { 9 << 30 } else { 1 << 20 }),
                jobs: Some(1),
                ..Sample::default()
            }));
            at += series.period();
        }
        let read = parse(&series.to_string());
        assert!((MOST / 2..=MOST).contains(&read.len()), "{}", read.len());
        assert!(rewritten < 10, "{rewritten}");
        assert!(series.to_string().len() < 64 << 10);
        let peak = read.iter().map(|sample| sample.memory).max().unwrap();
        assert_eq!(peak, Some(9 << 30));
        let last = read.last().unwrap().at_ms;
        assert!(u128::from(last) + series.period().as_millis() >= night.as_millis());
    }
}
