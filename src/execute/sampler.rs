//! Owns recording a step's resource usage: a few numbers at intervals, beside its log. Whatever cannot be recorded is
//! omitted and never causes a failure.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;

use crate::engine::cgroup::Cgroup;
use crate::engine::hold::ContainerRecord;
use crate::engine::jobserver::Gauge;
use crate::plan::samples::{Sample, Series};

/// A step is slow for lack of memory if all of its processes waited for memory for this share of five minutes, in
/// percent. Two programs that read 200 MiB at random under a limit of 40 MiB wait 57% of the time, and reach this share
/// after four minutes.
const STARVED: f64 = 30.0;
/// How long a step may go on after one of its processes was killed for lack of memory. Most end at once, and ninja ends
/// with the commands that run.
const PATIENCE: Duration = Duration::from_secs(60);

#[derive(Debug)]
pub(crate) struct Sampler {
    path: PathBuf,
    file: Option<fs::File>,
    run: PathBuf,
    jobs: Option<Gauge>,
    cgroup: Option<Cgroup>,
    series: Series,
    begun: Instant,
    due: Instant,
    /// The peak memory of all samples without page cache, in bytes.
    pub(crate) most_memory: Option<u64>,
    is_told: bool,
    /// When a process was first seen to be killed for lack of memory.
    killed: Option<Instant>,
    is_told_of_kill: bool,
}

impl Sampler {
    /// Begins a file at `path` for a step whose container has its state in `run`. `jobs` measures its jobs.
    pub(crate) fn start(path: &Path, run: &Path, jobs: Option<Gauge>) -> Self {
        let now = Instant::now();
        Self {
            path: path.to_owned(),
            file: fs::File::create(path).ok(),
            run: run.to_owned(),
            jobs,
            cgroup: None,
            series: Series::default(),
            begun: now,
            due: now,
            most_memory: None,
            is_told: false,
            killed: None,
            is_told_of_kill: false,
        }
    }

    /// Takes a sample if it is time to; `grown` is the growth of disk usage in bytes.
    pub(crate) fn sample_if_due(&mut self, grown: i64) -> Option<Sample> {
        (Instant::now() >= self.due).then(|| self.sample(grown))
    }

    pub(crate) fn sample(&mut self, grown: i64) -> Sample {
        if self.cgroup.is_none() {
            // Known once the container runs. Without root there may be none.
            let state = ContainerRecord::read(&self.run).map(|state| state.cgroup);
            self.cgroup = state.filter(|cgroup| !cgroup.directories.is_empty());
        }
        let figures = self.cgroup.as_ref().map(Cgroup::figures);
        let cpu_us = figures.and_then(|figures| figures.cpu_us);
        let is_killed = figures.and_then(|figures| figures.oom_kills) > Some(0);
        self.killed = self.killed.or_else(|| is_killed.then(Instant::now));
        let sample = Sample {
            at_ms: u64::try_from(self.begun.elapsed().as_millis()).unwrap_or(u64::MAX),
            memory: self.cgroup.as_ref().and_then(Cgroup::anonymous),
            cpu_ms: cpu_us.map(|us| us / 1000),
            jobs: self.jobs(),
            disk: grown,
        };
        self.most_memory = self.most_memory.max(sample.memory);
        let thinned = self.series.push(sample);
        self.due = Instant::now() + self.series.period();
        let Some(file) = &mut self.file else {
            return sample;
        };
        let written = if thinned {
            self.rewrite()
        } else {
            file.write_all(sample.to_string().as_bytes())
        };
        if written.is_err() {
            self.file = None;
        }
        sample
    }

    /// Returns how many jobs the step uses now.
    pub(crate) fn jobs(&self) -> Option<u32> {
        self.jobs.as_ref().and_then(Gauge::used)
    }

    /// If the step is slow for lack of memory, returns once for how many percent of the last five minutes it waited,
    /// and its peak in bytes, including page cache.
    pub(crate) fn starved(&mut self) -> Option<(f64, Option<u64>)> {
        let cgroup = self.cgroup.as_ref().filter(|_| !self.is_told)?;
        let share = cgroup.stalled("full ", "avg300=");
        let share = share.filter(|share| *share >= STARVED)?;
        self.is_told = true;
        Some((share, cgroup.figures().memory_peak))
    }

    /// Returns once whether the step goes on although one of its processes was killed for lack of memory.
    pub(crate) fn goes_on(&mut self) -> bool {
        let is_long = self
            .killed
            .is_some_and(|killed| killed.elapsed() >= PATIENCE);
        is_long && !std::mem::replace(&mut self.is_told_of_kill, true)
    }

    /// Rewrites all samples atomically, so that a concurrent reader sees a complete file.
    fn rewrite(&mut self) -> std::io::Result<()> {
        let new = self.path.with_extension("samples.new");
        let mut file = fs::File::create(&new)?;
        file.write_all(self.series.to_string().as_bytes())?;
        fs::rename(&new, &self.path)?;
        self.file = Some(file);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a sampler of the control group that `place` stands for.
    fn sampler_of(place: &Path) -> Sampler {
        let mut sampler = Sampler::start(&place.join("samples"), place, None);
        sampler.cgroup = Some(Cgroup {
            unit: None,
            directories: vec![(String::new(), place.to_owned())],
        });
        sampler
    }

    #[test]
    fn a_step_that_waits_for_memory_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        let mut sampler = sampler_of(place);
        assert_eq!(sampler.starved(), None);
        fs::write(place.join("memory.peak"), "7\n").unwrap();
        for (share, told) in [(29.5, None), (31.5, Some((31.5, Some(7)))), (99.0, None)] {
            let text = format!("some avg300=99.00 total=9\nfull avg300={share} total=9\n");
            fs::write(place.join("memory.pressure"), text).unwrap();
            assert_eq!(sampler.starved(), told);
        }
    }

    #[test]
    fn a_step_that_goes_on_without_a_killed_process_is_told_once() {
        let directory = tempfile::tempdir().unwrap();
        let place = directory.path();
        let mut sampler = sampler_of(place);
        for kills in [0, 1] {
            fs::write(place.join("memory.events"), format!("oom_kill {kills}\n")).unwrap();
            sampler.sample(0);
            assert_eq!(sampler.killed.is_some(), kills > 0);
            assert!(!sampler.goes_on());
        }
        sampler.killed = Instant::now().checked_sub(PATIENCE);
        assert!(sampler.goes_on() && !sampler.goes_on());
    }
}
