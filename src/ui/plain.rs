//! Owns permanent lines: all output of `up` without animation, and the lines above the bars with it.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use super::event::{Cost, Event, Outcome};
use super::text::escape;
use super::{Paint, UiSettings, paint, size};

/// Interval of progress lines for a step or an image build.
const PROGRESS_EVERY: Duration = Duration::from_secs(30);

#[derive(Debug)]
pub(super) struct Plain {
    color: bool,
    settings: UiSettings,
    titles: HashMap<u32, String>,
    printed: Option<Instant>,
    /// The current work of an image build or a transfer.
    work: String,
}

impl Plain {
    pub(super) fn new(settings: &UiSettings) -> Self {
        Self {
            color: settings.color(settings.terminals.stderr),
            settings: settings.clone(),
            titles: HashMap::new(),
            printed: None,
            work: String::new(),
        }
    }

    /// Returns the event's lines with their newlines; empty for most events.
    pub(super) fn event(&mut self, event: &Event, now: Instant) -> String {
        if let Some(text) = self.important(event) {
            return text;
        }
        if self.settings.quiet {
            return String::new();
        }
        match event {
            Event::StepStarted {
                index, total, name, ..
            } => {
                let title = title(*index, *total, name);
                let text = format!("{title} …\n");
                self.titles.insert(*index, title);
                self.printed = Some(now);
                text
            }
            Event::Output { line, .. } if self.settings.verbose > 0 => {
                format!("{}\n", escape(line))
            }
            Event::Ninja {
                index,
                done,
                total,
                left_ms,
                range_ms,
            } if self.due(now) => {
                let title = self.titles.get(index).map_or("", String::as_str);
                format!(
                    "{title} … {}\n",
                    ninja(*done, *total, range_ms.or(left_ms.map(|left| (left, left))))
                )
            }
            Event::Image {
                image,
                message,
                done,
                total,
            } => {
                let title = format!("image {}", escape(image));
                self.progress(&title, message, *done, *total, now)
            }
            Event::ImageFinished { image, wall_ms } => {
                format!("image {} … {}\n", escape(image), done_in(*wall_ms))
            }
            Event::Transfer {
                what,
                message,
                done,
                total,
            } => self.progress(&escape(what), message, Some(*done), *total, now),
            Event::TransferFinished { what, wall_ms } => {
                format!("{} … {}\n", escape(what), done_in(*wall_ms))
            }
            _ => String::new(),
        }
    }

    /// Returns the progress line for work that counts bytes, unless the same work was reported a moment ago.
    fn progress(
        &mut self,
        title: &str,
        message: &str,
        done: Option<u64>,
        total: Option<u64>,
        now: Instant,
    ) -> String {
        if message == self.work && !self.due(now) {
            return String::new();
        }
        message.clone_into(&mut self.work);
        self.printed = Some(now);
        let text = match done {
            Some(done) if message.is_empty() => size::progress(done, total).into(),
            _ => escape(message),
        };
        format!("{title} … {text}\n")
    }

    fn due(&mut self, now: Instant) -> bool {
        let due = self
            .printed
            .is_none_or(|printed| now.saturating_duration_since(printed) >= PROGRESS_EVERY);
        if due {
            self.printed = Some(now);
        }
        due
    }

    /// Returns the lines that stay on the screen with or without bars below.
    pub(super) fn important(&mut self, event: &Event) -> Option<String> {
        let text = match event {
            Event::Warning { message } => {
                let label = paint(self.color, Paint::Yellow, "warning:");
                let message = self.settings.hint(message);
                return Some(format!("{label} {}\n", escape(&message)));
            }
            Event::StepFinished {
                index,
                total,
                name,
                outcome,
                cost,
            } => {
                self.titles.remove(index);
                let title = title(*index, *total, name);
                let text = format!("{title} … {}\n", self.outcome(*outcome, cost));
                if *outcome == Outcome::Failed {
                    return Some(text);
                }
                text
            }
            Event::Note { message } => format!("{}\n", escape(message)),
            Event::RunStarted { env, plan, chosen } => {
                let cached = plan.iter().filter(|step| step.cached).count();
                let env = escape(env);
                let steps = size::count(plan.len(), "step");
                let engine = chosen.as_ref().map_or_else(String::new, |chosen| {
                    format!("; engine {} ({})", chosen.engine, chosen.reason)
                });
                format!("{env}: {steps}, {cached} done before{engine}\n")
            }
            Event::Finished { message, .. } if !message.is_empty() => {
                format!("{}\n", escape(&self.settings.hint(message)))
            }
            _ => return None,
        };
        Some(if self.settings.quiet {
            String::new()
        } else {
            text
        })
    }

    fn outcome(&self, outcome: Outcome, cost: &Cost) -> String {
        let wall = size::duration(Duration::from_millis(cost.wall_ms));
        let text = match outcome {
            Outcome::Done => done_in(cost.wall_ms),
            Outcome::Failed => {
                let failed = paint(self.color, Paint::Red, "failed");
                format!("{failed} after {wall}")
            }
            Outcome::Interrupted => format!("interrupted after {wall}"),
            Outcome::Skipped => "skipped".to_owned(),
            Outcome::Hit => "done before".to_owned(),
        };
        let mut parts = vec![text];
        if !matches!(outcome, Outcome::Skipped | Outcome::Hit) {
            let cpu = cost.cpu_ms.map(Duration::from_millis);
            let figures = [
                ("cpu", cpu.map(size::duration)),
                ("memory", cost.peak_memory.map(size::bytes)),
                ("disk", cost.disk_delta.map(size::delta)),
            ];
            let known = figures.into_iter();
            parts.extend(known.filter_map(|(name, text)| Some(format!("{name} {}", text?))));
        }
        parts.join(", ")
    }
}

fn done_in(wall_ms: u64) -> String {
    let wall = size::duration(Duration::from_millis(wall_ms));
    format!("done in {wall}")
}

pub(super) fn title(index: u32, total: u32, name: &str) -> String {
    format!("step {index}/{total} {}", escape(name))
}

/// Formats ninja's progress: `1204/3450, 37–46 min left`.
pub(super) fn ninja(done: u64, total: u64, left_ms: Option<(u64, u64)>) -> String {
    match left_ms {
        // An estimate of zero means that the build takes longer than expected.
        Some((least, most)) if done < total && most > 0 => {
            let left = size::left(Duration::from_millis(least), Duration::from_millis(most));
            format!("{done}/{total}, {left}")
        }
        _ => format!("{done}/{total}"),
    }
}
