//! Owns outcomes: of one run of a step, with its message, its record and its row of metrics, and of a whole execution.

use std::path::PathBuf;

use jiff::Timestamp;
use nix::sys::signal::Signal;

use super::Ending;
use super::disk_guard::FullDisk;
use crate::plan::ids::{PathBelow, StepKey};
use crate::plan::record::{Cost, Outcome, StepRecord};
use crate::plan::resolve::{Engine, Spec, Step};
use crate::store::history::History;
use crate::sys::error::{Error, Kind};
use crate::sys::name::StepName;
use crate::sys::signals::Signals;
use crate::ui::event;
use crate::ui::metrics::{Row, SCHEMA};
use crate::ui::size::{bytes, duration};

/// How far execution went.
#[derive(Debug)]
pub(crate) enum ExecutionProgress {
    Ended(Ended),
    /// A source in the keys of later steps changed; names the last step that ended, if any.
    Changed(Option<StepName>),
}

#[derive(Debug)]
pub(crate) enum Ended {
    /// Every step of the plan ran, or was skipped.
    Complete,
    /// A step failed; the env stands on the step before it.
    Failed(Box<Failure>),
    /// The user stopped it.
    Interrupted(i32),
    /// rockenv could not continue after it had begun steps.
    Broke(Error),
}

impl Ended {
    /// Returns how execution ended if rockenv could not continue. A pending signal counts as the cause: the user's
    /// Ctrl-C may have ended a tool too.
    pub(crate) fn failed(error: Error, signals: &Signals) -> Self {
        let signal = match error.kind() {
            Kind::Signal(signal) => Some(signal),
            _ => signals.pending().ok().flatten(),
        };
        signal.map_or(Self::Broke(error), Self::Interrupted)
    }
}

#[derive(Debug)]
pub(crate) struct Failure {
    pub step: StepName,
    pub message: String,
    pub kind: Kind,
    /// The history of the build volumes that it failed on.
    pub history: History,
    /// The last lines it wrote.
    pub tail: Vec<String>,
    pub is_kept: bool,
    pub log: PathBuf,
}

/// The outcome of one run of a step.
#[derive(Debug)]
pub(super) struct Ran {
    pub(super) ending: Ending,
    pub(super) cost: Cost,
    /// Size of its layer without the layers below, in bytes.
    pub(super) frozen: u64,
    /// The last lines it wrote.
    pub(super) tail: Vec<String>,
    /// Its log, relative to the env's directory.
    pub(super) log: PathBelow,
    pub(super) full: Option<FullDisk>,
}

impl Ran {
    /// Returns the outcome of a step that was stopped before it began.
    pub(super) fn interrupted(signal: i32, log: &PathBelow) -> Self {
        Self {
            ending: Ending::Interrupted(signal),
            cost: Cost::default(),
            frozen: 0,
            tail: Vec::new(),
            log: log.clone(),
            full: None,
        }
    }

    pub(super) fn out_of_memory(&self) -> bool {
        let ended = matches!(self.ending, Ending::Exited { code: 1.., .. });
        ended && self.cost.usage.oom_kills > 0
    }

    /// Returns a warning if it succeeded although one of its processes was killed.
    pub(super) fn hidden_kill(&self, step: &Step) -> Option<String> {
        (self.cost.usage.oom_kills > 0).then(|| {
            format!(
                "a process of step `{}` was killed for lack of memory, but the step succeeded",
                step.name
            )
        })
    }

    /// Explains why it failed with `jobs` jobs, under a memory limit of `limit` bytes. `retry` is the number of jobs of
    /// its next run.
    pub(super) fn explain(
        &self,
        step: &Step,
        jobs: u32,
        limit: Option<u64>,
        retry: Option<u32>,
    ) -> (Kind, String) {
        let name = &step.name;
        let usage = &self.cost.usage;
        if usage.oom_kills > 0 {
            // Samples may have missed the peak.
            let peak = usage
                .memory()
                .filter(|peak| limit.is_none_or(|limit| *peak >= limit / 2));
            // A limit is enforced only where memory is counted.
            let limit = limit.filter(|_| usage.memory().is_some());
            let limit = reached(limit, usage.memory_peak.or(usage.memory_held));
            let peak = peak.map_or_else(String::new, |peak| format!(" (it held {})", bytes(peak)));
            let end = match (retry, jobs) {
                (Some(retry), _) => format!("{jobs} jobs; retrying with {retry}"),
                (None, 1) => "1 job: one job alone needs more".to_owned(),
                (None, _) => format!("{jobs} jobs; try `--jobs {}`", jobs / 2),
            };
            let message =
                format!("step `{name}` ran out of memory: {limit} was reached{peak} with {end}");
            return (Kind::OutOfSpace, message);
        }
        if let Some(full) = &self.full {
            let mut message = format!(
                "step `{name}` ran out of disk: `{}` is full, and the step used {} of it",
                full.path.display(),
                bytes(full.taken)
            );
            if full.is_store {
                message.push_str("; `rockenv gc --dry-run` shows what can be freed");
            }
            return (Kind::OutOfSpace, message);
        }
        let message = match self.ending {
            Ending::TimedOut => {
                let limit = step.timeout.unwrap_or_default();
                format!("step `{name}` timed out after {}", duration(limit))
            }
            Ending::Exited {
                signal: Some(signal),
                ..
            } => format!("step `{name}` was killed by signal {signal}"),
            Ending::Exited { code, .. } => format!("step `{name}` failed with exit code {code}"),
            Ending::Interrupted(_) => format!("step `{name}` was interrupted"),
            Ending::Stopped | Ending::Lost => {
                let message =
                    format!("the container of step `{name}` was stopped by another process");
                return (Kind::Unavailable, message);
            }
        };
        (Kind::StepFailed, message)
    }

    /// Returns the entry for the env's record.
    pub(super) fn record(
        &self,
        step: &Step,
        outcome: Outcome,
        reason: Option<String>,
    ) -> StepRecord {
        StepRecord {
            name: step.name.clone(),
            key: Some(step.key.clone()),
            outcome,
            reason,
            log: Some(self.log.clone()),
            cost: Some(self.cost),
        }
    }
}

impl event::Cost {
    /// Returns a step's cost without the values that were not counted, which are 0 in the record.
    pub(super) fn of(cost: Cost, engine: Engine) -> Self {
        let usage = cost.usage;
        // Docker and Podman do not report block I/O.
        let blocks = |bytes| (engine == Engine::Nspawn).then_some(bytes);
        Self {
            wall_ms: cost.wall_ms,
            cpu_ms: (usage.cpu_us > 0).then_some(usage.cpu_us / 1000),
            peak_memory: usage.memory(),
            peak_memory_with_cache: usage.memory_peak,
            read_bytes: blocks(usage.read_bytes),
            written_bytes: blocks(usage.written_bytes),
            disk_delta: Some(cost.disk_delta),
        }
    }
}

impl Row {
    /// Returns the row of `up --metrics` for a step that did not run.
    pub(crate) fn of(
        spec: &Spec,
        step: &StepName,
        key: Option<&StepKey>,
        outcome: event::Outcome,
    ) -> Self {
        let targets: Vec<&str> = spec.targets.iter().map(|target| target.name()).collect();
        Self {
            schema: SCHEMA,
            time: Timestamp::now(),
            env: spec.name.to_string(),
            profile: spec.profile.clone(),
            target: targets.join(","),
            engine: spec.engine.name().to_owned(),
            step: step.clone(),
            key: key.map(ToString::to_string).unwrap_or_default(),
            outcome,
            jobs: None,
            cost: event::Cost::default(),
            cache_hits: None,
            cache_misses: None,
            slurm_job: None,
        }
    }
}

/// Returns whether a compiler or linker of a failed step reports that memory ran out, or a program that a signal ended
/// another. Programs such as earlyoom kill processes themselves, so the kernel does not count these.
pub(super) fn lacked_memory<'a>(ending: Ending, mut lines: impl Iterator<Item = &'a str>) -> bool {
    // SIGTERM to the step's own command is not earlyoom's, and `timeout`, which exits with 124, sends it too.
    let has_failed = matches!(
        ending,
        Ending::Exited { code: 1..=123 | 125.., signal } if signal != Some(Signal::SIGTERM as i32)
    );
    // Messages of gcc, collect2, clang, gcc's two allocators, GNU ld, and LLVM. earlyoom sends SIGTERM first. clang
    // compiles a single file in its own process, whose end only its caller reports: ninja 1.13, make, cargo, or joblib.
    // ninja takes SIGTERM for the user's, who has not interrupted a step that ends by itself.
    let marks = [
        "Killed signal terminated program ",
        "Terminated signal terminated program ",
        " terminated with signal 9 [Killed]",
        " terminated with signal 15 [Terminated]",
        "unable to execute command: Killed",
        "unable to execute command: Terminated",
        " bytes after a total of ",
        "virtual memory exhausted",
        "final link failed: memory exhausted",
        "LLVM ERROR: out of memory",
        "FAILED: [code=137] ",
        "FAILED: [code=143] ",
        "ninja: build stopped: interrupted by user",
        "(signal: 9, SIGKILL",
        "(signal: 15, SIGTERM",
        "exit codes of the workers are {SIGKILL(-9)",
        "exit codes of the workers are {SIGTERM(-15)",
    ];
    let by_make = |line: &str| {
        line.contains(": *** [") && (line.ends_with("] Killed") || line.ends_with("] Terminated"))
    };
    has_failed && lines.any(|line| by_make(line) || marks.iter().any(|mark| line.contains(mark)))
}

/// Returns the warning for a step whose processes waited for memory for `share` percent of the last five minutes.
/// `limit` and `peak` are in bytes.
pub(super) fn starved(step: &str, share: f64, limit: Option<u64>, peak: Option<u64>) -> String {
    format!(
        "step `{step}` is slow: its processes waited for memory {share:.0}% of the last 5 minutes, and {} \
         is reached; try a larger `memory-max` or fewer `--jobs`",
        reached(limit, peak)
    )
}

/// Returns the warning for a step that goes on although one of its processes was killed for lack of memory. Python's
/// `multiprocessing.Pool`, as in Tensile, waits forever for what a killed process would have returned.
pub(super) fn goes_on(step: &str) -> String {
    format!(
        "a process of step `{step}` was killed for lack of memory, and the step goes on; if it hangs, stop it and use \
         fewer `--jobs`"
    )
}

/// Names the limit that was reached. If the step's peak is below its own limit, other processes used the rest.
fn reached(limit: Option<u64>, peak: Option<u64>) -> String {
    match limit {
        None => "the machine's memory".to_owned(),
        Some(limit) if peak.is_some_and(|peak| peak < limit / 100 * 95) => {
            "the memory of the machine or of a control group around the env".to_owned()
        }
        Some(limit) => format!("its limit of {}", bytes(limit)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::record::Usage;

    #[test]
    fn a_value_that_was_not_counted_is_absent() {
        let cost = |engine, cpu_us| {
            let usage = Usage {
                cpu_us,
                ..Usage::default()
            };
            let cost = Cost {
                usage,
                ..Cost::default()
            };
            let shown = event::Cost::of(cost, engine);
            (shown.cpu_ms, shown.read_bytes, shown.written_bytes)
        };
        assert_eq!(cost(Engine::Nspawn, 2000), (Some(2), Some(0), Some(0)));
        assert_eq!(cost(Engine::Podman, 0), (None, None, None));
    }

    #[test]
    fn compilers_tell_that_memory_ran_out() {
        let told = [
            "c++: fatal error: Killed signal terminated program cc1plus",
            "c++: fatal error: Terminated signal terminated program cc1plus",
            "collect2: fatal error: ld terminated with signal 9 [Killed]",
            "collect2: fatal error: ld terminated with signal 15 [Terminated]",
            "clang++: error: unable to execute command: Killed",
            "clang++: error: unable to execute command: Terminated",
            "cc1plus: out of memory allocating 65536 bytes after a total of 1 bytes",
            "LLVM ERROR: out of memory",
            "FAILED: [code=137] lib/a.o ",
            "ninja: build stopped: interrupted by user.",
            "make[2]: *** [Makefile:76: a.o] Killed",
            "make: *** [Makefile:2: all] Terminated",
            "  process didn't exit successfully: `rustc a.rs` (signal: 9, SIGKILL: kill)",
            "The exit codes of the workers are {SIGKILL(-9)}",
            "/usr/bin/ld: final link failed: memory exhausted",
        ];
        let not_told = [
            "FAILED: [code=1] lib/a.o ",
            "make: *** [Makefile:2: all] Error 1",
            "[info] Terminated all servers",
            "ninja: build stopped: subcommand failed.",
            "Segmentation fault signal terminated program cc1plus",
            "HIP out of memory",
            "test: out of memory allocating a device buffer",
        ];
        let told = told.map(|line| (line, true)).into_iter();
        for (line, told) in told.chain(not_told.map(|line| (line, false))) {
            for (code, signal, told) in [
                (1, None, told),
                (130, None, told),
                (134, Some(6), told),
                // `timeout`, and a signal to the step's own command, which make repeats.
                (124, None, false),
                (143, Some(15), false),
                (0, None, false),
            ] {
                let ending = Ending::Exited { code, signal };
                let found = lacked_memory(ending, [line].into_iter());
                assert_eq!(found, told, "{line} {code}");
            }
        }
    }

    #[test]
    fn a_limit_was_reached_if_the_peak_is_about_as_high() {
        let mib = 1 << 20;
        let own = "its limit of 300.0 MiB";
        let other = "the memory of the machine or of a control group around the env";
        for (peak, told) in [(None, own), (Some(299), own), (Some(200), other)] {
            assert_eq!(reached(Some(300 * mib), peak.map(|peak| peak * mib)), told);
        }
        assert_eq!(reached(None, Some(mib)), "the machine's memory");
    }
}
