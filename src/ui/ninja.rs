//! Owns a build's progress as parsed from its output: finds `[12/345]` in lines and adds nested builds up.
//!
//! TheRock's build is a ninja whose edges run ninjas of their own. Their lines are interleaved. Most have the
//! sub-project in front (`[amd-llvm] [3/40] Building ...`), some do not (LLVM builds its runtimes in a ninja inside its
//! ninja). Counts are tracked per prefix, and the progress is their sum: the outer edges plus the known inner ones. Has
//! no clock and no output.

use std::collections::HashMap;
use std::ffi::OsStr;
use std::path::Path;
use std::time::Duration;

/// Edges over all builds seen so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct NinjaProgress {
    /// Finished edges; never falls.
    pub done: u64,
    /// Known edges; grows when a nested build begins.
    pub total: u64,
}

/// A line's count and its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Count<'a> {
    /// Labels in front, as written: empty for the outer build.
    pub prefix: &'a str,
    pub done: u64,
    pub total: u64,
}

/// More edges than any build has. Larger numbers in brackets are not counts.
const EDGES_MAX: u64 = 10_000_000;

/// Maximum number of prefixes. TheRock has about 120; the limit bounds memory for output with random prefixes.
const BUILDS_MAX: usize = 1024;

/// Maximum number of nested or consecutive builds under one prefix.
const NESTED_MAX: usize = 64;

/// Maximum length of a label or count. Longer brackets are ordinary text.
const BRACKET_MAX: usize = 80;

/// Parses a count at the start of a line, after any labels in brackets.
pub(crate) fn parse(line: &str) -> Option<Count<'_>> {
    let start = line.len() - line.trim_start().len();
    let mut at = start;
    // Four brackets are enough: lines full of brackets are not progress.
    for _ in 0..4 {
        let rest = &line[at..];
        let inside = bracket(rest)?;
        if let Some((done, total)) = fraction(inside).or_else(|| percent(inside)) {
            return Some(Count {
                prefix: line[start..at].trim_end(),
                done,
                total,
            });
        }
        let after = &rest[inside.len() + 2..];
        at = line.len() - after.trim_start().len();
    }
    None
}

/// Returns the text inside the bracket that `text` starts with.
fn bracket(text: &str) -> Option<&str> {
    let inside = text.strip_prefix('[')?;
    let mut bytes = inside.bytes().take(BRACKET_MAX);
    let end = bytes.position(|byte| byte == b']' || byte == b'[')?;
    (inside.as_bytes()[end] == b']').then(|| &inside[..end])
}

/// Parses `12/345` as a separate word in a status such as `12/345 | 3 running` or `3.5% 12/345`.
fn fraction(inside: &str) -> Option<(u64, u64)> {
    inside
        .split([' ', '|', '(', ')', ',', ':'])
        .find_map(|word| {
            let (done, total) = word.split_once('/')?;
            let (done, total) = (number(done)?, number(total)?);
            (done <= total && total > 0 && total <= EDGES_MAX).then_some((done, total))
        })
}

/// Parses ` 12%`, which CMake's makefiles print. The edge count is unknown, so a build counts as 100 edges.
fn percent(inside: &str) -> Option<(u64, u64)> {
    let done = number(inside.trim().strip_suffix('%')?)?;
    (done <= 100).then_some((done, 100))
}

fn number(text: &str) -> Option<u64> {
    // `parse` alone would accept a sign.
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    digits.then(|| text.parse().ok()).flatten()
}

#[derive(Clone, Copy, Debug)]
struct Run {
    done: u64,
    total: u64,
    /// The last printed total. It identifies the run even after `close` changed `total`.
    printed: u64,
}

impl Run {
    /// Marks the run as complete: no further edges are expected.
    fn close(&mut self) {
        self.total = self.done;
    }
}

/// The runs of one prefix, outermost first.
type Build = Vec<Run>;

/// Sums the counts in one step's output.
#[derive(Debug, Default)]
pub(crate) struct Tracker {
    builds: HashMap<String, Build>,
    /// Sum over the runs that are no longer tracked separately.
    folded: NinjaProgress,
    sum: NinjaProgress,
}

impl Tracker {
    /// Parses one line of output without escape sequences. Returns the new sum if it changed.
    pub(crate) fn line(&mut self, line: &str) -> Option<NinjaProgress> {
        if let Some(count) = parse(line) {
            self.count(count);
        } else if let Some(prefix) = stopped(line) {
            // The next run is a retry, whose total is the remaining edges.
            if let Some(run) = self
                .builds
                .get_mut(prefix)
                .and_then(|build| build.last_mut())
            {
                run.close();
            }
        } else if let Some(label) = completed(line) {
            if let Some(build) = self.builds.get_mut(&format!("[{label}]")) {
                build.iter_mut().for_each(Run::close);
            }
        } else {
            return None;
        }
        let mut sum = self.folded;
        for run in self.builds.values().flatten() {
            sum.done += run.done;
            sum.total += run.total;
        }
        let changed = sum != self.sum;
        self.sum = sum;
        changed.then_some(sum)
    }

    /// Returns the sum. A total of zero means that the output contained no build.
    pub(crate) fn progress(&self) -> NinjaProgress {
        self.sum
    }

    /// Returns the number of commands of the build in `directory`: of the prefix that names a part of its path, or
    /// else, if it `is_outer`, of the lines without prefix. `None` if several builds ran under that prefix.
    pub(crate) fn total(&self, directory: &Path, is_outer: bool) -> Option<u64> {
        let labelled = |name: &OsStr| self.builds.get(&format!("[{}]", name.display()));
        let named = directory.iter().rev().find_map(labelled);
        let outer = || self.builds.get("").filter(|_| is_outer);
        match named.or_else(outer)?.as_slice() {
            [run] => Some(run.printed),
            _ => None,
        }
    }

    fn count(&mut self, count: Count<'_>) {
        if self.builds.len() < BUILDS_MAX && !self.builds.contains_key(count.prefix) {
            self.builds.insert(count.prefix.to_owned(), Build::new());
        }
        let Some(build) = self.builds.get_mut(count.prefix) else {
            return;
        };
        // The total identifies a run. This finds a run that restarts, or continues after a nested one.
        if let Some(at) = build.iter().rposition(|run| run.printed == count.total) {
            if count.done >= build[at].done {
                build[at].done = count.done;
                build[at].total = count.total;
                // The outer run has advanced, so the runs nested in it are over.
                build[at + 1..].iter_mut().for_each(Run::close);
            }
            return;
        }
        let run = Run {
            done: count.done,
            total: count.total,
            printed: count.total,
        };
        match build.last_mut() {
            // Ninja changes its own total as it finds edges up to date.
            Some(last) if last.done <= count.done && last.done < last.total => *last = run,
            _ => {
                if build.len() >= NESTED_MAX {
                    let first = build.remove(0);
                    self.folded.done += first.done;
                    self.folded.total += first.done;
                }
                build.push(run);
            }
        }
    }
}

/// Returns the prefix of the build that ninja reports as stopped.
fn stopped(line: &str) -> Option<&str> {
    line.split_once("ninja: build stopped")
        .map(|(prefix, _)| prefix.trim())
}

/// Parses the label of a finished sub-project: `[amd-llvm completed in 12 seconds]`.
fn completed(line: &str) -> Option<&str> {
    let inside = bracket(line.trim_start())?;
    let (label, _) = inside.split_once(" completed in ")?;
    Some(label)
}

/// Estimate of a build's remaining time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TimeLeft {
    pub least: Duration,
    pub likely: Duration,
    pub most: Duration,
}

/// Estimates the time left from the rate of the last few minutes, for a build whose commands are unknown.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Estimate {
    first: Option<(Duration, u64)>,
    last: (Duration, u64),
    /// Edges per second.
    rate: f64,
}

/// Time constant of the moving average, in seconds. A build's phases differ, and one long link must not look like the
/// end.
const MEMORY: f64 = 120.0;

/// Minimum time before the first estimate.
const SETTLE: Duration = Duration::from_secs(10);

impl Estimate {
    /// Takes the progress at `now`, measured from any fixed point, and returns the time left.
    pub(crate) fn update(&mut self, now: Duration, progress: NinjaProgress) -> Option<Duration> {
        let (start, begun_with) = *self.first.get_or_insert_with(|| {
            self.last = (now, progress.done);
            (now, progress.done)
        });
        let elapsed = now.saturating_sub(start);
        let step = now.saturating_sub(self.last.0).as_secs_f64();
        // While no command ends, a long command or work after the build does not lower the rate.
        if step >= 1.0 && progress.done != self.last.1 {
            let recent = progress.done.saturating_sub(self.last.1) as f64 / step;
            // Early on this is the plain average.
            let weight = (1.0 - (-step / MEMORY).exp()).max(step / elapsed.as_secs_f64());
            self.rate += (recent - self.rate) * weight.min(1.0);
            self.last = (now, progress.done);
        }
        let known = elapsed >= SETTLE && progress.done >= begun_with + 10 && self.rate > 1e-6;
        known.then(|| {
            let left = progress.total.saturating_sub(progress.done) as f64 / self.rate;
            Duration::from_secs_f64(left.min(1e9))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn counts_are_found_where_builds_print_them() {
        for (line, found) in [
            ("[12/345] Building CXX object a.o", Some(("", 12, 345))),
            ("[12/345 | 3 running] CXX a.o", Some(("", 12, 345))),
            ("[ 3.5% 12/345] CXX", Some(("", 12, 345))),
            ("  [0/1] Re-running CMake...", Some(("", 0, 1))),
            ("[12/345]", Some(("", 12, 345))),
            ("[amd-llvm] [3/40] Building", Some(("[amd-llvm]", 3, 40))),
            ("[a] [b c] [3/40] x", Some(("[a] [b c]", 3, 40))),
            ("[ 12%] Building C object", Some(("", 12, 100))),
            (
                "[rocBLAS] [100%] Built target",
                Some(("[rocBLAS]", 100, 100)),
            ),
            ("[12/345", None),
            ("[345/12] more than all", None),
            ("[0/0]", None),
            ("[2026/11/20] a date", None),
            ("[src/12/34] a path", None),
            ("[+1/2]", None),
            ("[1/99999999999]", None),
            ("[99999999999999999999/99999999999999999999]", None),
            ("text [1/2]", None),
            ("[a] text [1/2]", None),
            ("[a[1/2]]", None),
            ("[a][b][c][d][1/2]", None),
            ("[140%]", None),
            ("", None),
            ("[", None),
            ("[é/ü]", None),
        ] {
            let got = parse(line).map(|count| (count.prefix, count.done, count.total));
            assert_eq!(got, found, "{line}");
        }
    }

    #[test]
    fn counts_add_up() {
        // Each line is followed by the sum after it.
        for (case, lines) in [
            (
                "nested builds",
                "[1/10] Building sub-project amd-llvm => 1/10
                [amd-llvm] -- Configuring done => 1/10
                [amd-llvm] [1/40] Building => 2/50
                [rocm-cmake] [1/2] Building => 3/52
                [amd-llvm] [40/40] Linking => 42/52
                [rocm-cmake] [2/2] Installing => 43/52
                [2/10] next => 44/52",
            ),
            (
                "a build inside a build without a name is told by its total",
                "[90/100] Performing build step for 'runtimes' => 90/100
                [1/30] Building => 91/130
                [20/30] Building => 110/130
                [91/100] back outside => 111/120
                [100/100] end => 120/120",
            ),
            (
                "running again does not go back",
                "[x] [30/40] a => 30/40
                [x] [1/40] started over => 30/40
                [x] [31/40] caught up => 31/40
                [x] ninja: build stopped: subcommand failed. => 31/31
                [x] [1/9] the rest => 32/40
                [x] [9/9] end => 40/40",
            ),
            (
                "a finished project expects nothing more",
                "[x] [30/40] a => 30/40
                [x completed in 12 seconds] => 30/30
                [x] [1/2] installing => 31/32
                [x] [30/40] and again => 31/41",
            ),
            (
                "ninja may learn that there is less to do",
                "[1/400] a => 1/400\n[2/380] b => 2/380\n[3/20] c => 3/20",
            ),
        ] {
            let mut tracker = Tracker::default();
            for (line, sum) in lines.lines().map(|line| line.split_once(" => ").unwrap()) {
                tracker.line(line.trim_start());
                let NinjaProgress { done, total } = tracker.progress();
                assert_eq!(format!("{done}/{total}"), sum, "{case}: {line}");
            }
        }
    }

    #[test]
    fn each_build_has_its_own_number_of_commands() {
        let mut tracker = Tracker::default();
        let total = |tracker: &Tracker, directory: &str, is_outer| {
            tracker.total(Path::new(directory), is_outer)
        };
        for line in ["[1/10] a", "[amd-llvm] [20/40] b"] {
            tracker.line(line);
        }
        assert_eq!(total(&tracker, "", true), Some(10));
        assert_eq!(total(&tracker, "compiler/amd-llvm/build", false), Some(40));
        // It has printed nothing yet.
        assert_eq!(total(&tracker, "math-libs/rocBLAS/build", false), None);
        // LLVM's runtimes have the same prefix.
        tracker.line("[amd-llvm] [1/7] c");
        assert_eq!(total(&tracker, "compiler/amd-llvm/build", false), None);
    }

    #[test]
    fn output_that_makes_things_up_fills_no_memory() {
        let mut tracker = Tracker::default();
        for number in 0..10_000_u64 {
            tracker.line(&format!("[{number}] x"));
            tracker.line(&format!("[l{number}] [1/2] x"));
            tracker.line(&format!("[1/{}] x", number + 1));
        }
        assert!(tracker.builds.len() <= BUILDS_MAX);
        assert!(
            tracker
                .builds
                .values()
                .all(|build| build.len() <= NESTED_MAX)
        );
    }

    #[test]
    fn the_estimate_follows_the_rate() {
        let mut estimate = Estimate::default();
        let mut left_after = |seconds: std::ops::Range<u64>, done: fn(u64) -> u64| {
            let left = seconds.fold(None, |_, second| {
                let progress = NinjaProgress {
                    done: done(second),
                    total: 6000,
                };
                let left = estimate.update(Duration::from_secs(second), progress);
                assert!(second >= 10 || left.is_none());
                left
            });
            left.unwrap().as_secs_f64()
        };
        let steady = left_after(0..600, |second| second * 5);
        assert_has!((600.0..602.0), &steady);
        // Ten minutes at a tenth of the rate: the average has forgotten the old rate.
        let slow = left_after(600..1200, |second| 2995 + (second - 599) / 2);
        assert_has!((4500.0..5500.0), &slow);
        // An hour without output, with an update each second.
        let silent = left_after(1200..4800, |_| 3295);
        assert_has!((4500.0..5500.0), &silent);
    }

    proptest! {
        #[test]
        fn no_output_makes_it_panic_or_count_backwards(
            lines in proptest::collection::vec(
                prop_oneof![
                    any::<Vec<u8>>().prop_map(|bytes| String::from_utf8_lossy(&bytes).into_owned()),
                    "(\\[[ab]\\] )?\\[[0-9]{1,2}/[0-9]{1,2}\\]",
                    Just("[a] ninja: build stopped: x".to_owned()),
                    Just("[a completed in 3 seconds]".to_owned()),
                    "\\[.{0,100}\\] ?\\[.*",
                ],
                0..200,
            ),
        ) {
            let mut tracker = Tracker::default();
            let mut estimate = Estimate::default();
            let mut before = NinjaProgress::default();
            for (second, line) in (0..).zip(&lines) {
                tracker.line(line);
                let now = tracker.progress();
                prop_assert!(now.done <= now.total);
                prop_assert!(now.done >= before.done);
                estimate.update(Duration::from_secs(second), now);
                before = now;
            }
        }
    }
}
