//! Owns the escape sequences that show a run outside of the terminal's text: progress in the task bar or tab, the
//! title, and a notification when a long run ends.

use std::time::Duration;

use super::event::{Event, Outcome};
use super::text::escape;

/// A run that takes longer than this ends with a notification.
const LONG: Duration = Duration::from_secs(60);

/// Escape sequences that the terminal supports.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Integration {
    /// Progress and notifications, with OSC 9.
    pub progress: bool,
    /// Window title, with OSC 2.
    pub title: bool,
}

impl Integration {
    /// Detects support from the terminal's variables. Unknown terminals get no OSC 9;4, which some would show as a
    /// notification.
    pub fn detect(read: impl Fn(&str) -> Option<String>) -> Self {
        let is = |name: &str, value: &str| read(name).as_deref() == Some(value);
        let is_iterm = is("TERM_PROGRAM", "iTerm.app")
            && read("TERM_FEATURES").is_some_and(|features| features.contains('P'));
        let term = read("TERM").unwrap_or_default();
        Self {
            progress: read("WT_SESSION").is_some()
                || is("ConEmuANSI", "ON")
                || is("TERM_PROGRAM", "WezTerm")
                || is("TERM_PROGRAM", "ghostty")
                || is_iterm,
            title: !matches!(term.as_str(), "" | "dumb" | "linux"),
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct TerminalState {
    integration: Integration,
    env: String,
    percent: Option<u64>,
    title: Option<String>,
}

impl TerminalState {
    pub(super) fn new(integration: Integration) -> Self {
        Self {
            integration,
            ..Self::default()
        }
    }

    /// Returns the sequences for an event. `percent` is the finished part of the run, `elapsed` its duration so far.
    pub(super) fn event(&mut self, event: &Event, percent: u64, elapsed: Duration) -> String {
        let mut out = String::new();
        match event {
            Event::RunStarted { env, .. } => {
                self.env = escape(env).into_owned();
                // A retry of the run must not push a second title, which would stay on the stack.
                if self.integration.title && self.title.is_none() {
                    // Saves the current title on the terminal's stack.
                    out.push_str("\x1b[22;2t");
                    self.title = Some(String::new());
                }
                self.show_title(&mut out, "up");
            }
            Event::StepStarted {
                index, total, name, ..
            } => self.show_title(&mut out, &format!("{index}/{total} {}", escape(name))),
            Event::Finished { outcome, .. } => {
                out.push_str(&self.clear());
                if self.integration.progress && elapsed >= LONG {
                    let word = match outcome {
                        Outcome::Failed => "failed",
                        Outcome::Interrupted => "interrupted",
                        Outcome::Done | Outcome::Hit | Outcome::Skipped => "done",
                    };
                    out.extend(["\x1b]9;rockenv: ", &self.env, " ", word, "\x1b\\"]);
                }
                return out;
            }
            _ => {}
        }
        let is_run = !self.env.is_empty();
        if is_run && self.integration.progress && self.percent != Some(percent) {
            self.percent = Some(percent);
            out.extend(["\x1b]9;4;1;", &percent.to_string(), "\x1b\\"]);
        }
        out
    }

    /// Returns the sequences that reset progress and title.
    pub(super) fn clear(&mut self) -> String {
        let mut out = String::new();
        if self.percent.take().is_some() {
            out.push_str("\x1b]9;4;0;\x1b\\");
        }
        if self.title.take().is_some() {
            out.push_str("\x1b[23;2t");
        }
        out
    }

    fn show_title(&mut self, out: &mut String, what: &str) {
        if let Some(title) = &mut self.title {
            let text = format!("rockenv {}: {what}", self.env);
            if *title != text {
                out.extend(["\x1b]2;", &text, "\x1b\\"]);
                *title = text;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::event::samples;
    use super::*;

    #[test]
    fn only_terminals_that_understand_get_progress() {
        let of = |variables: &[(&str, &str)]| {
            let read = |name: &str| {
                let found = variables.iter().find(|(known, _)| *known == name);
                found.map(|(_, value)| (*value).to_owned())
            };
            let found = Integration::detect(read);
            (found.progress, found.title)
        };
        for (variables, expected) in [
            (&[][..], (false, false)),
            (&[("TERM", "linux")], (false, false)),
            (&[("TERM", "xterm")], (false, true)),
            (&[("TERM", "xterm"), ("WT_SESSION", "1")], (true, true)),
            (&[("TERM_PROGRAM", "WezTerm")], (true, false)),
            (&[("TERM_PROGRAM", "iTerm.app")], (false, false)),
            (
                &[("TERM_PROGRAM", "iTerm.app"), ("TERM_FEATURES", "AP")],
                (true, false),
            ),
        ] {
            assert_eq!(of(variables), expected, "{variables:?}");
        }
    }

    #[test]
    fn what_is_shown_is_taken_back() {
        let started = samples::run("e\x1b]", Vec::new());
        let finished = samples::finished(Outcome::Failed, "");
        let mut state = TerminalState::new(Integration {
            progress: true,
            title: true,
        });
        let text = state.event(&started, 5, Duration::ZERO);
        assert_eq!(
            text,
            "\x1b[22;2t\x1b]2;rockenv e\\x1b]: up\x1b\\\x1b]9;4;1;5\x1b\\"
        );
        let note = Event::Note {
            message: String::new(),
        };
        assert_eq!(state.event(&note, 5, Duration::ZERO), "");
        assert_eq!(state.event(&note, 6, Duration::ZERO), "\x1b]9;4;1;6\x1b\\");
        // A retry keeps the title that the terminal had before the first attempt.
        assert_eq!(state.event(&started, 6, Duration::ZERO), "");
        assert_eq!(
            state.event(&finished, 6, LONG),
            "\x1b]9;4;0;\x1b\\\x1b[23;2t\x1b]9;rockenv: e\\x1b] failed\x1b\\"
        );
        assert_eq!(state.clear(), "");
        let mut silent = TerminalState::default();
        assert_eq!(silent.event(&started, 5, Duration::ZERO), "");
        assert_eq!(silent.event(&finished, 5, LONG), "");
    }
}
