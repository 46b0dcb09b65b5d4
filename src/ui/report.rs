//! Owns reporting a run: passes its events to the moving lines, to plain lines or to JSON.

use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

use clap::ValueEnum;
use jiff::Timestamp;

use super::event::{Event, Outcome, Stream};
use super::lines::{Line, Lines};
use super::ninja::{Estimate, TimeLeft, Tracker};
use super::plain::{Plain, title};
use super::tail::Tail;
use super::term::Bars;
use super::text::escape;
use super::{Ui, json, lock};
use crate::ui::metrics::{Row, Rows};

/// How a run is reported.
// No documentation comments below: they would become help of `--progress`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Format {
    // Moving lines on a terminal, plain lines elsewhere.
    #[value(name = "auto")]
    Human,
    // One JSON object per line, on stdout.
    Json,
}

/// Reports the events of one run. Usable from any thread.
#[derive(Clone, Debug)]
pub(crate) struct Reporter {
    ui: Ui,
    kind: Kind,
    metrics: Option<Arc<Rows>>,
}

// A closed set: a new way to show a run is a new variant here.
#[derive(Clone, Debug)]
enum Kind {
    Json,
    Bars(Arc<Bars>),
    Plain(Arc<Mutex<Plain>>),
}

impl Reporter {
    pub(super) fn new(ui: &Ui, format: Format) -> Self {
        let settings = ui.settings();
        let moving = settings.terminals.stderr && !settings.dumb && !settings.ci && !settings.quiet;
        let kind = match format {
            Format::Json => Kind::Json,
            Format::Human if moving => Kind::Bars(Arc::new(Bars::on_stderr(settings))),
            Format::Human => Kind::Plain(Arc::new(Mutex::new(Plain::new(settings)))),
        };
        if let Kind::Bars(bars) = &kind {
            // Warnings from other code must not land in the middle of a bar.
            lock(&ui.err).bars = Arc::downgrade(bars);
        }
        Self {
            ui: ui.clone(),
            kind,
            metrics: None,
        }
    }

    /// Also writes each step's cost to a file.
    #[must_use]
    pub(crate) fn with_metrics(mut self, rows: Option<Rows>) -> Self {
        self.metrics = rows.map(Arc::new);
        self
    }

    /// Returns whether step costs are recorded.
    pub(crate) fn measures(&self) -> bool {
        self.metrics.is_some()
    }

    /// Records a step's cost if `--metrics` is on. A failed write to the file must not stop the build.
    pub(crate) fn measured(&self, row: impl FnOnce() -> Row) {
        if let Some(Err(error)) = self.metrics.as_ref().map(|rows| rows.add(row())) {
            self.warn(error.chain().join(": "));
        }
    }

    pub(crate) fn note(&self, message: impl Into<String>) {
        let message = message.into();
        self.emit(&Event::Note { message });
    }

    pub(crate) fn warn(&self, message: impl Into<String>) {
        let message = message.into();
        self.emit(&Event::Warning { message });
    }

    pub(crate) fn finish(&self, outcome: Outcome, message: impl Into<String>) {
        self.emit(&Event::Finished {
            outcome,
            message: message.into(),
            lacking: String::new(),
        });
    }

    /// Removes the moving line of an image or a transfer. Some transfers end without an event, for example when the
    /// registry has nothing to transfer.
    pub(crate) fn end_line(&self, name: &str) {
        if let Kind::Bars(bars) = &self.kind {
            bars.end_line(name);
        }
    }

    pub(crate) fn emit(&self, event: &Event) {
        self.emit_all(std::slice::from_ref(event));
    }

    /// Shows several events with one write: a build prints thousands of lines at once.
    fn emit_all(&self, events: &[Event]) {
        match &self.kind {
            Kind::Json => {
                let now = Timestamp::now();
                let text: String = events.iter().map(|event| json::line(event, now)).collect();
                self.ui.write_out(text.as_bytes());
                self.ui.flush();
            }
            Kind::Bars(bars) => {
                for event in events {
                    // The sequences do not move the cursor, so they may bypass the bars.
                    let sequences = bars.event(event);
                    if !sequences.is_empty() {
                        lock(&self.ui.err).write(&sequences);
                    }
                }
                if let Some(Event::Finished { .. }) = events.last() {
                    lock(&self.ui.err).bars = Weak::new();
                    self.ui.write_err(&bars.close());
                }
            }
            Kind::Plain(plain) => {
                let mut plain = lock(plain);
                if self.ui.settings().ci_system.is_some()
                    && let [event] = events
                    && self.emit_to_ci(event)
                {
                    return;
                }
                let now = Instant::now();
                let text: String = events.iter().map(|event| plain.event(event, now)).collect();
                if !text.is_empty() {
                    self.ui.write_err(&text);
                }
            }
        }
    }

    /// Writes section markers for a CI system. Returns whether the event needs no further output.
    fn emit_to_ci(&self, event: &Event) -> bool {
        match event {
            Event::StepStarted {
                index, total, name, ..
            } => self.ui.begin_section(&title(*index, *total, name)),
            Event::StepFinished { .. } | Event::Finished { .. } => self.ui.end_section(),
            Event::Warning { message } => {
                self.ui.warn(&escape(message));
                return true;
            }
            _ => {}
        }
        false
    }

    fn output(&self, index: u32, stream: Stream, lines: Vec<String>) {
        if let Kind::Bars(bars) = &self.kind {
            return bars.output(index, &lines);
        }
        let events: Vec<Event> = lines
            .into_iter()
            .map(|line| Event::Output {
                index,
                stream,
                line,
            })
            .collect();
        self.emit_all(&events);
    }

    pub(crate) fn step_output(&self, index: u32) -> StepOutput {
        StepOutput {
            reporter: self.clone(),
            index,
            stdout: Lines::default(),
            stderr: Lines::default(),
            ninja: Tracker::default(),
            estimate: Estimate::default(),
            left: None,
            started: Instant::now(),
            reported: None,
            loaded: None,
            tail: Tail::default(),
        }
    }
}

/// Minimum interval of ninja's progress, which changes thousands of times per second in an up-to-date build.
const NINJA_EVERY: Duration = Duration::from_millis(200);

/// Minimum interval of a step's load reports.
const LOAD_EVERY: Duration = Duration::from_secs(1);

/// Consumes a step's output, reports lines and progress, and keeps the tail.
#[derive(Debug)]
pub(crate) struct StepOutput {
    reporter: Reporter,
    index: u32,
    stdout: Lines,
    stderr: Lines,
    ninja: Tracker,
    estimate: Estimate,
    /// Estimate from the build's commands, and the time of the estimate.
    left: Option<(TimeLeft, Instant)>,
    started: Instant,
    reported: Option<Instant>,
    loaded: Option<Instant>,
    tail: Tail,
}

impl StepOutput {
    /// Takes the next bytes, which may split lines and characters.
    pub(crate) fn push(&mut self, stream: Stream, bytes: &[u8]) {
        self.with_lines(stream, |lines, each| lines.push(bytes, each));
    }

    /// Ends both streams and reports the rest. Must run before the step is reported as finished.
    pub(crate) fn finish(&mut self) {
        for stream in [Stream::Stdout, Stream::Stderr] {
            self.with_lines(stream, |lines, each| lines.finish(each));
        }
        self.report_ninja(true);
    }

    /// Returns the tail of the output, escaped for display.
    pub(crate) fn tail(&self) -> &Tail {
        &self.tail
    }

    /// Returns the counts of the step's builds so far.
    pub(crate) fn ninja(&self) -> &Tracker {
        &self.ninja
    }

    /// Reports the remaining time of the step's build.
    pub(crate) fn expect(&mut self, left: TimeLeft) {
        self.left = Some((left, Instant::now()));
        self.report_ninja(false);
    }

    fn with_lines(
        &mut self,
        stream: Stream,
        feed: impl FnOnce(&mut Lines, &mut dyn FnMut(Line<'_>)),
    ) {
        let Self {
            reporter,
            index,
            stdout,
            stderr,
            ninja,
            tail,
            ..
        } = self;
        let lines = match stream {
            Stream::Stdout => stdout,
            Stream::Stderr => stderr,
        };
        let mut batch = Vec::new();
        // JSON and `-v` show every line; otherwise only the latest is shown.
        let all = matches!(reporter.kind, Kind::Json) || reporter.ui.settings().verbose > 0;
        let mut overwritten = None;
        let (mut seen, mut counted) = (false, false);
        feed(lines, &mut |line| {
            counted |= ninja.line(line.text).is_some();
            if line.overwritten {
                overwritten = Some(line.text.to_owned());
                return;
            }
            overwritten = None;
            seen = true;
            tail.push(line.text);
            if all {
                batch.push(line.text.to_owned());
            }
        });
        if !all {
            // A person sees only the last line of this chunk.
            let last =
                overwritten.or_else(|| tail.last().next_back().filter(|_| seen).map(str::to_owned));
            batch.extend(last);
        }
        if !batch.is_empty() {
            reporter.output(*index, stream, batch);
        }
        if counted {
            self.report_ninja(false);
        }
    }

    pub(crate) fn load(&mut self, jobs: Option<u32>, memory: Option<u64>) {
        let now = Instant::now();
        let is_due = |then| now.duration_since(then) >= LOAD_EVERY;
        if !self.loaded.is_none_or(is_due) {
            return;
        }
        self.loaded = Some(now);
        self.reporter.emit(&Event::Load {
            index: self.index,
            jobs,
            memory,
        });
    }

    fn report_ninja(&mut self, now: bool) {
        let at = Instant::now();
        let recent = self
            .reported
            .is_some_and(|before| at.duration_since(before) < NINJA_EVERY);
        let progress = self.ninja.progress();
        if progress.total == 0 || (recent && !now) {
            return;
        }
        self.reported = Some(at);
        let paced = self.estimate.update(at - self.started, progress);
        let millis = |left: Duration| u64::try_from(left.as_millis()).unwrap_or(u64::MAX);
        // An expired estimate is useless: the step may have moved on to a build that is not watched.
        let known = self.left.filter(|(left, known)| left.most > at - *known);
        let known = known.map(|(left, known)| {
            let rest = |left: Duration| millis(left.saturating_sub(at - known));
            (rest(left.likely), (rest(left.least), rest(left.most)))
        });
        self.reporter.emit(&Event::Ninja {
            index: self.index,
            done: progress.done,
            total: progress.total,
            left_ms: known.map(|(likely, _)| likely).or(paced.map(millis)),
            range_ms: known.map(|(_, range)| range),
        });
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::{Cost, Outcome, samples};
    use super::super::plain::ninja;
    use super::super::tests::ui;
    use super::super::{Terminals, UiSettings};
    use super::*;

    fn run(ui: &Ui, format: Format) -> Vec<String> {
        let reporter = ui.reporter(format);
        let plan = vec![samples::planned(1, false, None)];
        reporter.emit(&samples::run("gfx1103", plan));
        reporter.emit(&samples::started(1, 1));
        let mut output = reporter.step_output(1);
        output.push(Stream::Stdout, b"[1/2] a\x1b[31m\n[2/2");
        output.push(Stream::Stderr, b"warning \xff\n");
        output.push(Stream::Stdout, b"] b\n50%\r100%");
        for number in 0..30 {
            output.push(Stream::Stderr, format!("line {number}\n").as_bytes());
        }
        output.finish();
        ui.warn("from elsewhere");
        let cost = Cost {
            wall_ms: 245_000,
            ..Cost::default()
        };
        reporter.emit(&samples::ended(1, 1, Outcome::Failed, cost));
        reporter.finish(Outcome::Failed, "step `compile` failed");
        output.tail().why()
    }

    #[test]
    fn plain_lines_tell_a_run() {
        let (ui, out, err) = ui(UiSettings::default());
        let tail = run(&ui, Format::Human);
        assert_eq!(out.text(), "");
        insta::assert_snapshot!(err.text(), @r"
        gfx1103: 1 step, 0 done before
        step 1/1 compile …
        warning: from elsewhere
        step 1/1 compile … failed after 4 min 05 s
        step `compile` failed
        ");
        assert_eq!(tail.len(), 20);
        assert_eq!(
            (tail[0].as_str(), tail[18].as_str()),
            ("line 11", "line 29")
        );
        assert_eq!(tail[19], "100%");
    }

    #[test]
    fn verbose_shows_the_output_and_quiet_only_what_went_wrong() {
        let (verbose, _, err) = ui(UiSettings {
            verbose: 1,
            ..UiSettings::default()
        });
        run(&verbose, Format::Human);
        assert_has!(err.text(), "\n[1/2] a\nwarning \u{fffd}\n[2/2] b\nline 0\n");
        assert!(!err.text().contains("50%"));
        let (quiet, _, err) = ui(UiSettings {
            quiet: true,
            ..UiSettings::default()
        });
        run(&quiet, Format::Human);
        assert_eq!(
            err.text(),
            "warning: from elsewhere\nstep 1/1 compile … failed after 4 min 05 s\n"
        );
    }

    #[test]
    fn json_goes_to_stdout_one_event_a_line() {
        let (ui, out, err) = ui(UiSettings::default());
        run(&ui, Format::Json);
        assert_eq!(err.text(), "warning: from elsewhere\n");
        let events: Vec<Event> = out
            .text()
            .lines()
            .map(|line| serde_json::from_str(line).unwrap())
            .collect();
        let mut counts = events.iter().rev().filter_map(|event| match event {
            Event::Ninja { done, total, .. } => Some((*done, *total)),
            _ => None,
        });
        assert_eq!(counts.next(), Some((2, 2)));
        assert!(matches!(events.last(), Some(Event::Finished { .. })));
        let lines = |event: &&Event| matches!(event, Event::Output { .. });
        assert_eq!(events.iter().filter(lines).count(), 34);
    }

    #[test]
    fn a_time_left_that_ran_out_is_not_shown() {
        let (ui, out, _) = ui(UiSettings::default());
        let mut output = ui.reporter(Format::Json).step_output(1);
        output.push(Stream::Stdout, b"[1/4] a\n");
        let mut range = |left: Duration| {
            output.expect(TimeLeft {
                least: left,
                likely: left,
                most: left,
            });
            output.finish();
            let text = out.text();
            let events = text.lines().map(serde_json::from_str::<Event>);
            let mut ranges = events.filter_map(|event| match event.unwrap() {
                Event::Ninja { range_ms, .. } => Some(range_ms),
                _ => None,
            });
            ranges.next_back().unwrap()
        };
        assert!(range(Duration::from_secs(60)).is_some());
        assert_eq!(range(Duration::ZERO), None);
        assert_eq!(ninja(1, 4, Some((0, 0))), "1/4");
        assert_eq!(ninja(1, 4, Some((0, 2000))), "1/4, 0–2 s left");
    }

    #[test]
    fn messages_are_written_directly_once_a_run_is_over_or_given_up() {
        let (ui, _, err) = ui(UiSettings {
            terminals: Terminals {
                stderr: true,
                ..Terminals::default()
            },
            no_color: true,
            ..UiSettings::default()
        });
        let reporter = ui.reporter(Format::Human);
        ui.note("goes to the terminal itself");
        assert_eq!(err.text(), "");
        drop(reporter);
        ui.note("seen");
        assert_eq!(err.text(), "seen\n");
    }
}
