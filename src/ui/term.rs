//! Owns the moving lines: one per running step, with its current work. The only user of indicatif.

use std::collections::HashMap;
use std::io::Write as _;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use console::truncate_str;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::event::Event;
use super::osc::TerminalState;
use super::plain::{Plain, title};
use super::run_progress::{RunProgress, boxed};
use super::text::{escape, escape_lines};
use super::{Paint, UiSettings, lock, paint, size};

/// The elapsed time has a resolution of seconds.
const TICK: Duration = Duration::from_millis(250);

/// Identifies a moving line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    /// The whole run; always the last line.
    Run,
    Step(u32),
    /// An image build, by the image's name, or a transfer, by its label.
    Work(String),
}

/// The moving lines of one run.
#[derive(Debug)]
pub(super) struct Bars {
    multi: MultiProgress,
    state: Mutex<State>,
    verbose: bool,
    color: bool,
}

#[derive(Debug)]
struct State {
    lines: HashMap<Key, Moving>,
    /// The permanent lines above the moving ones.
    plain: Plain,
    progress: RunProgress,
    terminal: TerminalState,
    closed: bool,
    /// The closing message, written after the last moving line is gone.
    finished: String,
}

impl Drop for Bars {
    // A run that fails with an error emits no `Finished` event.
    fn drop(&mut self) {
        self.close();
        let sequences = lock(&self.state).terminal.clear();
        if !sequences.is_empty() {
            // A failed write to stderr cannot be reported.
            drop(std::io::stderr().write_all(sequences.as_bytes()));
        }
    }
}

#[derive(Debug)]
struct Moving {
    bar: ProgressBar,
    /// The line below, which shows the latest output.
    below: Option<ProgressBar>,
    /// Done and total: ninja's edges or bytes.
    count: Option<(u64, Option<u64>)>,
    rate: Rate,
    /// Jobs and memory in use.
    load: String,
    output: String,
}

/// Transfer speed.
#[derive(Debug, Default)]
struct Rate {
    since: Option<(Instant, u64)>,
    per_second: Option<u64>,
}

impl Rate {
    /// Takes the bytes so far; returns the bytes per second over the last few seconds.
    fn update(&mut self, done: u64, now: Instant) -> Option<u64> {
        let (then, before) = *self.since.get_or_insert((now, done));
        let millis = now.saturating_duration_since(then).as_millis();
        if millis >= 1000 {
            let recent = u128::from(done.saturating_sub(before)) * 1000 / millis;
            let recent = u64::try_from(recent).unwrap_or(u64::MAX);
            self.per_second = Some(match self.per_second {
                Some(earlier) => earlier / 2 + recent / 2,
                None => recent,
            });
            self.since = Some((now, done));
        }
        self.per_second
    }
}

/// Formats the bytes so far with the speed and the time left.
fn transferred(done: u64, total: Option<u64>, speed: Option<u64>) -> String {
    let mut text = size::progress(done, total);
    if let Some(speed) = speed.filter(|speed| *speed > 0) {
        text.extend([", ", &size::bytes(speed), "/s"]);
        if let Some(rest) = total.and_then(|total| total.checked_sub(done)) {
            let left = size::duration(Duration::from_secs(rest.div_ceil(speed)));
            text.extend([", ", &left, " left"]);
        }
    }
    text
}

impl Bars {
    pub(super) fn on_stderr(settings: &UiSettings) -> Self {
        Self::new(settings, ProgressDrawTarget::stderr_with_hz(10))
    }

    fn new(settings: &UiSettings, target: ProgressDrawTarget) -> Self {
        Self {
            multi: MultiProgress::with_draw_target(target),
            state: Mutex::new(State {
                lines: HashMap::new(),
                plain: Plain::new(settings),
                progress: RunProgress::default(),
                terminal: TerminalState::new(settings.integration),
                closed: false,
                finished: String::new(),
            }),
            verbose: settings.verbose > 0,
            color: settings.color(settings.terminals.stderr),
        }
    }

    /// Writes text above the moving lines.
    pub(super) fn print(&self, text: &str) {
        // A failed write to the terminal cannot be reported.
        drop(self.multi.println(text.strip_suffix('\n').unwrap_or(text)));
    }

    /// Shows an event. Returns terminal sequences that do not move the cursor.
    pub(super) fn event(&self, event: &Event) -> String {
        let now = Instant::now();
        let mut state = lock(&self.state);
        if !state.closed {
            self.show(&mut state, event, now);
        }
        let (percent, elapsed) = (state.progress.percent(now), state.progress.elapsed(now));
        state.terminal.event(event, percent, elapsed)
    }

    fn show(&self, state: &mut State, event: &Event, now: Instant) {
        state.progress.event(event, now);
        let over = match event {
            Event::StepFinished { index, .. } => Some(Key::Step(*index)),
            Event::ImageFinished { image: name, .. }
            | Event::TransferFinished { what: name, .. } => Some(Key::Work(name.clone())),
            _ => None,
        };
        if let Some(key) = over {
            self.remove(state, &key);
        }
        let stays = match event {
            Event::ImageFinished { .. } | Event::TransferFinished { .. } => {
                state.plain.event(event, now)
            }
            event => state.plain.important(event).unwrap_or_default(),
        };
        if let Event::Finished { .. } = event {
            state.finished = stays;
            return;
        }
        if !stays.is_empty() {
            self.print(&stays);
        }
        self.moving(state, event, now);
        if let Some(run) = state.lines.get(&Key::Run) {
            run.bar.set_message(state.progress.line(now));
        }
    }

    /// Updates the moving line that the event belongs to.
    fn moving(&self, state: &mut State, event: &Event, now: Instant) {
        match event {
            Event::RunStarted { env, plan, .. }
                if plan.iter().filter(|step| !step.cached).count() > 1 =>
            {
                self.remove(state, &Key::Run);
                let moving = self.add(state, escape(env).into_owned());
                state.lines.insert(Key::Run, moving);
            }
            Event::StepStarted {
                index, total, name, ..
            } => {
                let mut moving = self.add(state, title(*index, *total, name));
                if !self.verbose {
                    moving.below = Some(self.add_below(&moving.bar));
                }
                state.lines.insert(Key::Step(*index), moving);
            }
            Event::Ninja {
                index, done, total, ..
            } => {
                if let Some(moving) = state.lines.get_mut(&Key::Step(*index)) {
                    moving.count = Some((*done, Some(*total)));
                }
                show_step(state, *index, now);
            }
            Event::Load {
                index,
                jobs,
                memory,
            } => {
                if let Some(moving) = state.lines.get_mut(&Key::Step(*index)) {
                    moving.load = size::load(*jobs, *memory);
                    if let Some(below) = &moving.below {
                        below.set_message(self.below(moving));
                    }
                }
                show_step(state, *index, now);
            }
            Event::Image {
                image,
                message,
                done,
                total,
            } => {
                let key = Key::Work(image.clone());
                let title = || format!("image {}", escape(image));
                let moving = self.entry(state, key, title);
                moving.output = escape(message).into_owned();
                self.show_bytes(moving, done.map(|done| (done, *total)), now);
            }
            Event::Transfer {
                what,
                message,
                done,
                total,
            } => {
                let key = Key::Work(what.clone());
                let moving = self.entry(state, key, || escape(what).into_owned());
                moving.output = escape(message).into_owned();
                let count = message.is_empty().then_some((*done, *total));
                self.show_bytes(moving, count, now);
            }
            _ => {}
        }
    }

    /// Shows several lines of output with one draw: a draw per line would take longer than the build.
    pub(super) fn output(&self, index: u32, lines: &[String]) {
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        if self.verbose {
            self.print(&escape_lines(&lines.join("\n")));
        } else if let (Some(moving), Some(line)) =
            (state.lines.get_mut(&Key::Step(index)), lines.last())
            && let Some(below) = &moving.below
        {
            moving.output.clear();
            moving.output.push_str(&escape(line));
            below.set_message(self.below(moving));
        }
    }

    /// Removes the line of an image or a transfer.
    pub(super) fn end_line(&self, name: &str) {
        self.remove(&mut lock(&self.state), &Key::Work(name.to_owned()));
    }

    /// Removes all moving lines and returns the closing message.
    pub(super) fn close(&self) -> String {
        let mut state = lock(&self.state);
        state.closed = true;
        let keys: Vec<Key> = state.lines.keys().cloned().collect();
        for key in keys {
            self.remove(&mut state, &key);
        }
        drop(self.multi.clear());
        std::mem::take(&mut state.finished)
    }

    fn entry<'s>(
        &self,
        state: &'s mut State,
        key: Key,
        title: impl FnOnce() -> String,
    ) -> &'s mut Moving {
        if !state.lines.contains_key(&key) {
            let moving = self.add(state, title());
            state.lines.insert(key.clone(), moving);
        }
        state.lines.get_mut(&key).expect("it was added")
    }

    /// Adds a line above that of the whole run.
    fn add(&self, state: &State, title: String) -> Moving {
        let style = ProgressStyle::with_template("{spinner} {prefix}  {took}  {wide_msg}")
            .expect("the template is fixed")
            .tick_chars("⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏ ")
            .with_key(
                "took",
                |state: &ProgressState, out: &mut dyn std::fmt::Write| {
                    let seconds = Duration::from_secs(state.elapsed().as_secs());
                    let text = match seconds.as_secs() {
                        short @ 0..60 => format!("{short} s"),
                        _ => size::duration(seconds),
                    };
                    out.write_str(&text).expect("a string takes everything");
                },
            );
        let bar = ProgressBar::new_spinner();
        let bar = match state.lines.get(&Key::Run) {
            Some(run) => self.multi.insert_before(&run.bar, bar),
            None => self.multi.add(bar),
        };
        bar.set_style(style);
        bar.set_prefix(paint(self.color, Paint::Bold, &title));
        bar.enable_steady_tick(TICK);
        Moving {
            bar,
            below: None,
            count: None,
            rate: Rate::default(),
            load: String::new(),
            output: String::new(),
        }
    }

    /// Returns the step's load and its latest output.
    fn below(&self, moving: &Moving) -> String {
        // No screen shows more, and indicatif measures the whole text at each draw.
        let output = truncate_str(&moving.output, 400, "…");
        let gap = if moving.load.is_empty() { "" } else { "  " };
        format!(
            "{}{gap}{}",
            moving.load,
            paint(self.color, Paint::Dim, &output)
        )
    }

    /// Adds the line for a step's latest output.
    fn add_below(&self, bar: &ProgressBar) -> ProgressBar {
        let below = self.multi.insert_after(bar, ProgressBar::new_spinner());
        let style = ProgressStyle::with_template("  {wide_msg}").expect("the template is fixed");
        below.set_style(style);
        below
    }

    fn remove(&self, state: &mut State, key: &Key) {
        if let Some(moving) = state.lines.remove(key) {
            for bar in moving.below.iter().chain([&moving.bar]) {
                bar.finish_and_clear();
                self.multi.remove(bar);
            }
        }
    }

    /// Shows the bytes so far and the current work.
    fn show_bytes(&self, moving: &mut Moving, count: Option<(u64, Option<u64>)>, now: Instant) {
        let mut parts = Vec::new();
        if let Some((done, total)) = count {
            let speed = moving.rate.update(done, now);
            parts.extend(total.map(|total| boxed(done, total)));
            parts.push(transferred(done, total, speed));
        }
        if !moving.output.is_empty() {
            let output = truncate_str(&moving.output, 400, "…");
            parts.push(paint(self.color, Paint::Dim, &output));
        }
        moving.bar.set_message(parts.join(" "));
    }
}

fn show_step(state: &State, index: u32, now: Instant) {
    if let Some(moving) = state.lines.get(&Key::Step(index)) {
        let left = state.progress.step_left(index, now);
        let left = left.filter(|left| !left.1.is_zero());
        let left = left.map(|(least, most)| size::left(least, most));
        let count = moving.count.and_then(|(done, total)| Some((done, total?)));
        let mut parts = Vec::new();
        if count.is_some() || left.is_some() {
            parts.push(boxed(state.progress.step_share(index, now), 1000));
        }
        let count = count.map(|(done, total)| format!("{done}/{total}"));
        let figures: Vec<String> = count.into_iter().chain(left).collect();
        if !figures.is_empty() {
            parts.push(figures.join(", "));
        }
        if moving.below.is_none() && !moving.load.is_empty() {
            parts.push(format!(" {}", moving.load));
        }
        moving.bar.set_message(parts.join(" "));
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use indicatif::TermLike;

    use super::super::event::{Cost, Outcome, samples};
    use super::*;

    /// An 80-column terminal that records its output.
    #[derive(Clone, Debug, Default)]
    struct Screen(Arc<Mutex<String>>);

    impl TermLike for Screen {
        fn width(&self) -> u16 {
            80
        }
        fn move_cursor_up(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_down(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_right(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn move_cursor_left(&self, _: usize) -> io::Result<()> {
            Ok(())
        }
        fn write_line(&self, line: &str) -> io::Result<()> {
            lock(&self.0).push_str(line);
            lock(&self.0).push('\n');
            Ok(())
        }
        fn write_str(&self, text: &str) -> io::Result<()> {
            lock(&self.0).push_str(text);
            Ok(())
        }
        fn clear_line(&self) -> io::Result<()> {
            Ok(())
        }
        fn flush(&self) -> io::Result<()> {
            Ok(())
        }
    }

    fn run(verbose: u8) -> (String, String) {
        let screen = Screen::default();
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(screen.clone()), 255);
        let settings = UiSettings {
            verbose,
            ..UiSettings::default()
        };
        let bars = Bars::new(&settings, target);
        let plan = (1..=5).map(|index| samples::planned(index, index < 2, None));
        bars.event(&samples::run("gfx1103", plan.collect()));
        bars.event(&samples::started(2, 5));
        bars.event(&Event::Load {
            index: 2,
            jobs: Some(8),
            memory: Some(5 << 30),
        });
        bars.event(&Event::Ninja {
            index: 2,
            done: 12,
            total: 345,
            left_ms: Some(61_000),
            range_ms: None,
        });
        bars.output(2, &[format!("first \x1b[2J {}", "long ".repeat(100))]);
        std::thread::sleep(TICK * 2);
        bars.print("a warning\n");
        let cost = Cost {
            wall_ms: 3200,
            peak_memory: Some(1 << 30),
            disk_delta: Some(-4096),
            ..Cost::default()
        };
        bars.event(&samples::ended(2, 5, Outcome::Done, cost));
        bars.event(&samples::finished(Outcome::Done, "`gfx1103` is ready"));
        let last = bars.close();
        let text = lock(&screen.0).clone();
        (text, last)
    }

    #[test]
    fn a_step_shows_what_it_does_and_leaves_one_line() {
        let (text, last) = run(0);
        for part in [
            "step 2/5 compile",
            "▕▍           ▏ 12/345, about 1 min 01 s left",
            "8 jobs, 5.0 GiB",
            "gfx1103",
            "1/5 steps  more than 1 min",
            "first \\x1b[2J long",
            "a warning",
            "step 2/5 compile … done in 3.2 s, memory 1.0 GiB, disk -4.0 KiB",
        ] {
            assert_has!(text, part);
        }
        assert!(!text.contains('\x1b'), "{text:?}");
        assert_eq!(last, "`gfx1103` is ready\n");
    }

    #[test]
    fn work_without_an_event_for_its_end_leaves_no_line() {
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(Screen::default()), 255);
        let bars = Bars::new(&UiSettings::default(), target);
        bars.event(&Event::Transfer {
            what: "pull from r".to_owned(),
            message: String::new(),
            done: 0,
            total: None,
        });
        bars.event(&Event::Image {
            image: "base".to_owned(),
            message: "unpacking".to_owned(),
            done: None,
            total: None,
        });
        bars.end_line("pull from r");
        let left: Vec<Key> = lock(&bars.state).lines.keys().cloned().collect();
        assert_eq!(left, [Key::Work("base".to_owned())]);
        bars.end_line("base");
        assert!(lock(&bars.state).lines.is_empty());
    }

    #[test]
    fn bytes_have_a_speed() {
        let begun = Instant::now();
        let mut rate = Rate::default();
        let at = |millis| begun + Duration::from_millis(millis);
        assert_eq!(rate.update(0, at(0)), None);
        assert_eq!(rate.update(100, at(500)), None);
        assert_eq!(rate.update(4 << 20, at(2000)), Some(2 << 20));
        assert_eq!(rate.update(4 << 20, at(2100)), Some(2 << 20));
        assert_eq!(rate.update(4 << 20, at(4000)), Some(1 << 20));
        assert_eq!(
            transferred(1 << 30, Some(2 << 30), Some(1 << 20)),
            "1.0 GiB of 2.0 GiB (50 %), 1.0 MiB/s, 17 min 04 s left"
        );
        assert_eq!(transferred(1 << 30, None, Some(0)), "1.0 GiB");
    }

    #[test]
    fn verbose_output_stays_above() {
        let (text, _) = run(1);
        assert_has!(text.replace('\n', ""), &"long ".repeat(99));
    }
}
