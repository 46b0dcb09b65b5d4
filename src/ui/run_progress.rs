//! Owns the progress of a whole run: its steps, the time left, and the line that shows both.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::event::{Event, Outcome};
use super::size;

#[derive(Debug, Default)]
struct Step {
    /// Duration by the step's earlier runs.
    expected: Option<Duration>,
    state: State,
    /// Done and total edges of the step's ninja.
    count: Option<(u64, u64)>,
    /// Time left of the step's build, and the time of that estimate.
    left: Option<(Left, Instant)>,
    /// `left` comes from the build's commands, not from its pace.
    exact: bool,
}

/// The least and the most time left.
type Left = (Duration, Duration);

#[derive(Debug, Default)]
enum State {
    #[default]
    Waiting,
    Running(Instant),
    Over,
}

#[derive(Debug, Default)]
pub(super) struct RunProgress {
    steps: BTreeMap<u32, Step>,
    begun: Option<Instant>,
}

impl RunProgress {
    pub(super) fn event(&mut self, event: &Event, now: Instant) {
        match event {
            Event::RunStarted { plan, .. } => {
                // A retry of the run emits a new plan.
                self.begun.get_or_insert(now);
                let steps = plan.iter().map(|planned| {
                    let step = Step {
                        expected: planned.expected_ms.map(Duration::from_millis),
                        // A step that is expected to take no time will not run.
                        state: if planned.cached || planned.expected_ms == Some(0) {
                            State::Over
                        } else {
                            State::Waiting
                        },
                        ..Step::default()
                    };
                    (planned.index, step)
                });
                self.steps = steps.collect();
            }
            Event::StepStarted { index, .. } => {
                if let Some(step) = self.steps.get_mut(index) {
                    step.state = State::Running(now);
                }
            }
            Event::Ninja {
                index,
                done,
                total,
                left_ms,
                range_ms,
            } => {
                if let Some(step) = self.steps.get_mut(index) {
                    step.count = Some((*done, *total));
                    let left = range_ms.or(left_ms.map(|left| (left, left)));
                    let left = left.map(|(least, most)| {
                        (Duration::from_millis(least), Duration::from_millis(most))
                    });
                    step.left = left.map(|left| (left, now));
                    step.exact = range_ms.is_some();
                }
            }
            Event::StepFinished { index, outcome, .. } => {
                if let Some(step) = self.steps.get_mut(index)
                    && !matches!(outcome, Outcome::Failed | Outcome::Interrupted)
                {
                    step.state = State::Over;
                }
            }
            _ => {}
        }
    }

    pub(super) fn elapsed(&self, now: Instant) -> Duration {
        self.begun
            .map_or(Duration::ZERO, |begun| now.saturating_duration_since(begun))
    }

    /// Returns the time left for a step: by its build's commands, else by its earlier runs, else by its pace.
    pub(super) fn step_left(&self, index: u32, now: Instant) -> Option<Left> {
        self.steps.get(&index)?.left(now)
    }

    /// Returns the finished part of a step, out of 1000.
    pub(super) fn step_share(&self, index: u32, now: Instant) -> u64 {
        self.steps.get(&index).map_or(0, |step| step.share(now))
    }

    /// Returns the finished part of the run in percent. Each step weighs its earlier duration; unknown ones weigh the
    /// average.
    pub(super) fn percent(&self, now: Instant) -> u64 {
        let known: Vec<u64> = self
            .steps
            .values()
            .filter_map(|step| Some(step.expected?.as_millis() as u64))
            .collect();
        let usual = match known.len() as u64 {
            0 => 1000,
            count => (known.iter().sum::<u64>() / count).max(1),
        };
        let (mut done, mut all) = (0, 0);
        for step in self.steps.values() {
            let weight = step.expected.map_or(usual, |time| time.as_millis() as u64);
            done += weight.saturating_mul(step.share(now)) / 1000;
            all += weight;
        }
        match all {
            0 => 0,
            all => done * 100 / all,
        }
    }

    /// Returns the line for the whole run: `3/16 steps  ████  5–6 h left`.
    pub(super) fn line(&self, now: Instant) -> String {
        let is_over = |step: &&Step| matches!(step.state, State::Over);
        let over = self.steps.values().filter(is_over).count();
        let bar = boxed(self.percent(now), 100);
        let text = format!("{bar} {over}/{}", size::count(self.steps.len(), "step"));
        let (mut least, mut most) = Left::default();
        let mut unknown = 0;
        for step in self.steps.values().filter(|step| !is_over(step)) {
            match step.left(now) {
                Some(time) => (least, most) = (least + time.0, most + time.1),
                None => unknown += 1,
            }
        }
        if most.is_zero() {
            return text;
        }
        let left = match unknown {
            0 => size::left(least, most),
            // Less than a minute is meaningless beside steps of unknown duration.
            _ if least < Duration::from_secs(60) => return text,
            _ => format!("more than {} left", size::duration(least)),
        };
        format!("{text}  {left}")
    }
}

impl Step {
    fn left(&self, now: Instant) -> Option<Left> {
        let by_build = self.left.map(|((least, most), at)| {
            let since = now.saturating_duration_since(at);
            (least.saturating_sub(since), most.saturating_sub(since))
        });
        let exactly = |left| (left, left);
        match (&self.state, self.expected) {
            (State::Over, _) => Some(Left::default()),
            (State::Waiting, expected) => expected.map(exactly),
            (State::Running(begun), Some(expected)) if !self.exact => {
                let left = expected.checked_sub(now.saturating_duration_since(*begun));
                // The step exceeds its earlier duration, so its pace is the better estimate.
                left.map(exactly).or(by_build)
            }
            (State::Running(_), _) => by_build,
        }
    }

    fn share(&self, now: Instant) -> u64 {
        match (&self.state, self.count, self.expected) {
            (State::Over, ..) => 1000,
            (State::Waiting, ..) => 0,
            (State::Running(begun), None, Some(expected)) => {
                let taken = now.saturating_duration_since(*begun).as_millis() as u64;
                let expected = (expected.as_millis() as u64).max(1);
                // A running step never shows as complete.
                (taken.saturating_mul(1000) / expected).min(990)
            }
            (State::Running(_), Some((done, total)), _) if total > 0 => {
                done.min(total).saturating_mul(1000) / total
            }
            (State::Running(_), ..) => 0,
        }
    }
}

/// Returns a bar of fixed width.
pub(super) fn boxed(part: u64, whole: u64) -> String {
    let bar = size::bar(part, whole);
    format!("▕{bar:<width$}▏", width = size::BAR as usize)
}

#[cfg(test)]
mod tests {
    use super::super::event::Cost;
    use super::super::event::samples::{self, planned, started};
    use super::*;

    #[test]
    fn time_left_is_from_earlier_runs_else_from_the_pace() {
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        let mut run = RunProgress::default();
        let plan = vec![
            planned(1, true, None),
            planned(2, false, Some(100_000)),
            planned(3, false, None),
        ];
        run.event(&samples::run("e", plan), begun);
        assert_eq!(
            run.line(begun),
            "▕███▉        ▏ 1/3 steps  more than 1 min 40 s left"
        );
        run.event(&started(2, 3), begun);
        assert_eq!(run.percent(at(50)), 50);
        let left = Duration::from_secs(40);
        assert_eq!(run.step_left(2, at(60)), Some((left, left)));
        assert_eq!(run.step_left(2, at(200)), None);
        let ended = samples::ended(2, 3, Outcome::Done, Cost::default());
        run.event(&ended, at(100));
        run.event(&started(3, 3), at(100));
        run.event(
            &Event::Ninja {
                index: 3,
                done: 1,
                total: 4,
                left_ms: Some(30_000),
                range_ms: None,
            },
            at(110),
        );
        assert_eq!(run.step_share(3, at(110)), 250);
        assert_eq!(
            run.line(at(120)),
            "▕█████████   ▏ 2/3 steps  about 20.0 s left"
        );
        assert_eq!(run.elapsed(at(120)), Duration::from_secs(120));
        // With the build's commands known, the estimate is a range that narrows.
        run.event(
            &Event::Ninja {
                index: 3,
                done: 2,
                total: 4,
                left_ms: Some(200_000),
                range_ms: Some((150_000, 300_000)),
            },
            at(120),
        );
        let line = run.line(at(130));
        assert!(line.ends_with("  2–5 min left"), "{line}");
    }
}
