//! Owns the moving lines: one for each running step, with its current work. The only user of indicatif.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::sync::Mutex;
use std::time::Duration;

use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};

use super::event::Event;
use super::plain::{Plain, ninja, title};
use super::text::{escape, escape_lines};
use super::{Paint, Settings, lock, paint, size};

/// The elapsed time shows seconds, no more.
const TICK: Duration = Duration::from_millis(250);

/// Identifies a line.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
enum Key {
    Step(u32),
    Image(String),
    Transfer(String),
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
    /// The permanent lines above.
    plain: Plain,
    closed: bool,
    /// The closing message, to be written when nothing moves any more.
    finished: String,
}

impl Drop for Bars {
    // A run that ends with an error reports no end.
    fn drop(&mut self) {
        self.close();
    }
}

#[derive(Debug)]
struct Moving {
    bar: ProgressBar,
    ninja: String,
    output: String,
}

impl Bars {
    pub(super) fn on_stderr(settings: &Settings) -> Self {
        Self::new(settings, ProgressDrawTarget::stderr_with_hz(10))
    }

    fn new(settings: &Settings, target: ProgressDrawTarget) -> Self {
        Self {
            multi: MultiProgress::with_draw_target(target),
            state: Mutex::new(State {
                lines: HashMap::new(),
                plain: Plain::new(settings),
                closed: false,
                finished: String::new(),
            }),
            verbose: settings.verbose > 0,
            color: settings.color(settings.terminals.stderr),
        }
    }

    /// Writes text above the moving lines.
    pub(super) fn print(&self, text: &str) {
        // Without a screen there is nobody to report a failure to.
        drop(self.multi.println(text.strip_suffix('\n').unwrap_or(text)));
    }

    pub(super) fn event(&self, event: &Event) {
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        if let Event::StepFinished { index, .. } = event {
            self.remove(&mut state, &Key::Step(*index));
        }
        if let Event::ImageFinished { image, .. } = event {
            self.remove(&mut state, &Key::Image(image.clone()));
        }
        if let Event::TransferFinished { what, .. } = event {
            self.remove(&mut state, &Key::Transfer(what.clone()));
        }
        let stays = match event {
            Event::ImageFinished { .. } | Event::TransferFinished { .. } => {
                state.plain.event(event, std::time::Instant::now())
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
        match event {
            Event::StepStarted {
                index,
                total,
                name,
                cached: false,
                ..
            } => {
                let moving = self.add(title(*index, *total, name));
                state.lines.insert(Key::Step(*index), moving);
            }
            Event::Output { index, line, .. } => {
                self.output_to(&mut state, *index, std::slice::from_ref(line));
            }
            Event::Ninja {
                index,
                done,
                total,
                left_ms,
            } => {
                if let Some(moving) = state.lines.get_mut(&Key::Step(*index)) {
                    moving.ninja = ninja(*done, *total, *left_ms);
                    self.show(moving);
                }
            }
            Event::Image {
                image,
                message,
                done,
                total,
            } => {
                let moving = state
                    .lines
                    .entry(Key::Image(image.clone()))
                    .or_insert_with(|| self.add(format!("image {}", escape(image))));
                moving.ninja = match (done, total) {
                    (Some(done), total) => size::progress(*done, *total),
                    _ => String::new(),
                };
                moving.output = escape(message).into_owned();
                self.show(moving);
            }
            Event::Transfer {
                what,
                message,
                done,
                total,
            } => {
                let moving = state
                    .lines
                    .entry(Key::Transfer(what.clone()))
                    .or_insert_with(|| self.add(escape(what).into_owned()));
                moving.ninja = match message.is_empty() {
                    true => size::progress(*done, *total),
                    false => String::new(),
                };
                moving.output = escape(message).into_owned();
                self.show(moving);
            }
            _ => {}
        }
    }

    /// Shows several lines of output; drawing for each of them would take longer than the build.
    pub(super) fn output(&self, index: u32, lines: &[String]) {
        let mut state = lock(&self.state);
        if !state.closed {
            self.output_to(&mut state, index, lines);
        }
    }

    fn output_to(&self, state: &mut State, index: u32, lines: &[String]) {
        if self.verbose {
            self.print(&escape_lines(&lines.join("\n")));
        } else if let (Some(moving), Some(line)) =
            (state.lines.get_mut(&Key::Step(index)), lines.last())
        {
            moving.output.clear();
            moving.output.push_str(&escape(line));
            self.show(moving);
        }
    }

    /// Ends all movement; returns the closing message.
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

    fn add(&self, title: String) -> Moving {
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
        let bar = self.multi.add(ProgressBar::new_spinner());
        bar.set_style(style);
        bar.set_prefix(title);
        bar.enable_steady_tick(TICK);
        Moving {
            bar,
            ninja: String::new(),
            output: String::new(),
        }
    }

    fn remove(&self, state: &mut State, key: &Key) {
        if let Some(moving) = state.lines.remove(key) {
            moving.bar.finish_and_clear();
            self.multi.remove(&moving.bar);
        }
    }

    fn show(&self, moving: &Moving) {
        let mut message = moving.ninja.clone();
        if !self.verbose && !moving.output.is_empty() {
            if !message.is_empty() {
                message.push_str("  ");
            }
            // More than a screen's width is never visible, and indicatif measures all of it at each draw.
            let output = super::text::fit(&moving.output, 400);
            let output = paint(self.color, Paint::Dim, &output);
            write!(message, "{output}").expect("a string takes everything");
        }
        moving.bar.set_message(message);
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::Arc;

    use indicatif::TermLike;

    use super::super::event::{Cost, Outcome, Stream};
    use super::*;

    /// A terminal of 80 columns that remembers its output.
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
        let settings = Settings {
            verbose,
            ..Settings::default()
        };
        let bars = Bars::new(&settings, target);
        bars.event(&Event::StepStarted {
            index: 2,
            total: 5,
            name: "compile".to_owned(),
            key: "k".to_owned(),
            cached: false,
        });
        bars.event(&Event::Ninja {
            index: 2,
            done: 12,
            total: 345,
            left_ms: Some(61_000),
        });
        bars.event(&Event::Output {
            index: 2,
            stream: Stream::Stdout,
            line: format!("first \x1b[2J {}", "long ".repeat(100)),
        });
        std::thread::sleep(TICK * 2);
        bars.print("a warning\n");
        bars.event(&Event::StepFinished {
            index: 2,
            total: 5,
            name: "compile".to_owned(),
            outcome: Outcome::Done,
            cost: Cost {
                wall_ms: 3200,
                peak_memory: Some(1 << 30),
                disk_delta: Some(-4096),
                ..Cost::default()
            },
        });
        bars.event(&Event::Finished {
            outcome: Outcome::Done,
            message: "`gfx1103` is ready".to_owned(),
        });
        let last = bars.close();
        let text = lock(&screen.0).clone();
        (text, last)
    }

    #[test]
    fn a_step_shows_what_it_does_and_leaves_one_line() {
        let (text, last) = run(0);
        for part in [
            "step 2/5 compile",
            "12/345, about 1 min 01 s left",
            "first \\x1b[2J long",
            "a warning",
            "step 2/5 compile … done in 3.2 s, memory 1.0 GiB, disk -4.0 KiB",
        ] {
            assert!(text.contains(part), "{part}: {text:?}");
        }
        assert!(!text.contains('\x1b'), "{text:?}");
        assert_eq!(last, "`gfx1103` is ready\n");
    }

    #[test]
    fn verbose_output_stays_above() {
        let (text, _) = run(1);
        assert!(
            text.replace('\n', "").contains(&"long ".repeat(99)),
            "{text:?}"
        );
    }
}
