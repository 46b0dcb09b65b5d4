//! Owns output for CI systems: foldable sections and annotations.
//!
//! GitHub's runner executes every line that looks like a workflow command, whatever its origin, and steps may write
//! anything. While a section is open, the runner ignores commands until it reads a secret word. Outside of sections,
//! text that looks like a command is escaped.

use std::borrow::Cow;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use jiff::Timestamp;

use super::text::escape;

/// Length at which GitHub's runner cuts an annotation, in the job's log as well.
const LONGEST_ANNOTATION: usize = 4096;

/// A CI system that interprets the output.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum System {
    Github,
    Gitlab,
}

impl System {
    pub(crate) const ALL: [Self; 2] = [Self::Github, Self::Gitlab];

    /// Returns the variable that is `true` in this system's jobs.
    pub(crate) fn variable(self) -> &'static str {
        match self {
            Self::Github => "GITHUB_ACTIONS",
            Self::Gitlab => "GITLAB_CI",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Level {
    Warning,
    Error,
}

/// Section state of one process's output.
#[derive(Debug)]
pub(super) struct Sections {
    system: Option<System>,
    /// Resumes the runner's command processing when the section ends.
    word: String,
    /// Number of sections so far, the open one included.
    count: u32,
    /// The open section's name.
    open: Option<String>,
}

impl Sections {
    pub(super) fn new(system: Option<System>) -> Self {
        // The standard library's hash keys are random and cannot be derived from the output.
        let random = || RandomState::new().build_hasher().finish();
        Self {
            system,
            word: format!("rockenv-{:016x}{:016x}", random(), random()),
            count: 0,
            open: None,
        }
    }

    /// Returns the lines that begin a section, or an empty string without a CI system.
    pub(super) fn begin(&mut self, title: &str, now: Timestamp) -> String {
        let Some(system) = self.system else {
            return String::new();
        };
        let ended = self.end(now);
        self.count += 1;
        // A job may run rockenv more than once, and section names must be unique.
        let name = format!(
            "rockenv_{}_{}",
            now.as_millisecond().unsigned_abs(),
            self.count
        );
        let begun = match system {
            System::Github => format!(
                "::group::{}\n::stop-commands::{}\n",
                data(&escape(title)),
                self.word
            ),
            System::Gitlab => format!(
                "\x1b[0Ksection_start:{}:{name}[collapsed=true]\r\x1b[0K{}\n",
                now.as_second(),
                escape(title)
            ),
        };
        self.open = Some(name);
        ended + &begun
    }

    /// Returns the lines that end the open section, if there is one.
    pub(super) fn end(&mut self, now: Timestamp) -> String {
        match (self.open.take(), self.system) {
            (Some(_), Some(System::Github)) => format!("::{}::\n::endgroup::\n", self.word),
            (Some(name), Some(System::Gitlab)) => {
                format!("\x1b[0Ksection_end:{}:{name}\r\x1b[0K\n", now.as_second())
            }
            _ => String::new(),
        }
    }

    /// Returns the lines that annotate the job, if the system supports annotations.
    pub(super) fn annotation(&self, level: Level, message: &str) -> Option<String> {
        if self.system != Some(System::Github) {
            return None;
        }
        let level = match level {
            Level::Warning => "warning",
            Level::Error => "error",
        };
        // The last line is the help. What the runner would cut is ordinary output instead.
        let (message, rest) = match message.split_once('\n') {
            Some((first, rest)) if message.len() > LONGEST_ANNOTATION => (first, rest),
            _ => (message, ""),
        };
        let line = format!("::{level} title=rockenv::{}\n", data(message));
        let word = &self.word;
        let mut text = match &self.open {
            Some(_) => format!("::{word}::\n{line}::stop-commands::{word}\n"),
            None => line,
        };
        if !rest.is_empty() {
            text.push_str(&self.without_commands(rest));
            text.push('\n');
        }
        Some(text)
    }

    pub(super) fn without_commands<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.system != Some(System::Github) || self.open.is_some() {
            true => Cow::Borrowed(text),
            false => without_commands(text),
        }
    }
}

/// Escapes text that GitHub's runner would execute as a command.
pub(super) fn without_commands(text: &str) -> Cow<'_, str> {
    let lines = text.split_inclusive('\n');
    let orders = |line: &str| line.trim_start().starts_with("::") || line.contains("##[");
    if !lines.clone().any(orders) {
        return Cow::Borrowed(text);
    }
    let lines = lines.map(|line| {
        let line = line.replace("##[", "#\\x23[");
        match line.trim_start().starts_with("::") {
            true => line.replacen("::", "\\x3a:", 1),
            false => line,
        }
    });
    Cow::Owned(lines.collect())
}

/// Escapes a command's argument for the runner.
fn data(text: &str) -> String {
    text.replace('%', "%25")
        .replace('\r', "%0D")
        .replace('\n', "%0A")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sections(system: System) -> Sections {
        let word = "word".to_owned();
        Sections {
            word,
            ..Sections::new(Some(system))
        }
    }

    #[test]
    fn github_hears_nothing_while_a_section_is_open() {
        let now = Timestamp::UNIX_EPOCH;
        let mut github = sections(System::Github);
        assert_eq!(
            github.begin("a 50 %\n::b", now),
            "::group::a 50 %25\\n::b\n::stop-commands::word\n"
        );
        assert_eq!(github.without_commands("::error::x\n"), "::error::x\n");
        assert_eq!(
            github.annotation(Level::Error, "one\n::two%").unwrap(),
            "::word::\n::error title=rockenv::one%0A::two%25\n::stop-commands::word\n"
        );
        assert_eq!(github.end(now), "::word::\n::endgroup::\n");
        assert_eq!(github.end(now), "");
        assert_eq!(
            github.annotation(Level::Warning, "x").unwrap(),
            "::warning title=rockenv::x\n"
        );
        let long = format!("{}::b", "a\n".repeat(2048));
        let shown = github.annotation(Level::Error, &long).unwrap();
        assert_has!(shown, "::error title=rockenv::a\na\n");
        assert!(shown.ends_with("a\n\\x3a:b\n"), "{shown}");
        for (text, safe) in [
            ("a :: b\n", "a :: b\n"),
            ("a\n \t::set-env::b::c\nd", "a\n \t\\x3a:set-env::b::c\nd"),
            ("a ##[command]", "a #\\x23[command]"),
            ("\u{a0}::x", "\u{a0}\\x3a:x"),
        ] {
            assert_eq!(github.without_commands(text), safe);
        }
    }

    #[test]
    fn a_section_ends_where_the_next_begins() {
        let now: Timestamp = "2026-11-20T18:30:00Z".parse().unwrap();
        let mut gitlab = sections(System::Gitlab);
        assert_eq!(
            gitlab.begin("one\r", now),
            "\x1b[0Ksection_start:1795199400:rockenv_1795199400000_1[collapsed=true]\r\x1b[0Kone\\r\n"
        );
        let next = gitlab.begin("two", now);
        assert!(
            next.starts_with("\x1b[0Ksection_end:1795199400:rockenv_1795199400000_1\r\x1b[0K\n\x1b[0Ksection_start:"),
            "{next:?}"
        );
        assert_eq!(gitlab.annotation(Level::Error, "x"), None);
        assert_eq!(gitlab.without_commands("::error::x"), "::error::x");
    }

    #[test]
    fn elsewhere_nothing_is_added() {
        let mut none = Sections::new(None);
        assert_eq!(none.begin("a", Timestamp::UNIX_EPOCH), "");
        assert_eq!(none.end(Timestamp::UNIX_EPOCH), "");
        assert_eq!(none.annotation(Level::Error, "x"), None);
        assert_eq!(none.without_commands("::x"), "::x");
        assert_ne!(Sections::new(None).word, none.word);
    }
}
