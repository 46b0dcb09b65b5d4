//! Owns the end of a step's output for its failure message: the last lines, and the output of the failed command if the
//! build continued after it.

use std::collections::VecDeque;

use super::ninja;

/// Number of last lines kept.
const LAST: usize = 20;
/// Number of lines shown from the failed command's first error on.
const FROM_ERROR: usize = 12;
/// Number of last lines shown beside the failed command's.
const BESIDE: usize = 6;

/// The end of a step's output, in bounded memory.
#[derive(Debug, Default)]
pub(crate) struct Tail {
    last: VecDeque<String>,
    failed: Failed,
}

/// State of the search for the first failed ninja command with an error message.
#[derive(Debug, Default)]
enum Failed {
    /// No command has failed.
    #[default]
    None,
    /// Ninja's line that names the failed command, whose output follows.
    Named(String),
    /// Ninja's line, the error, and the lines after it. The number is how many more lines to take.
    Saying(Vec<String>, usize),
}

impl Tail {
    /// Takes one line, safe to show.
    pub(crate) fn push(&mut self, line: &str) {
        // The newest line reuses the oldest one's buffer, so a gigabyte of output allocates nothing.
        let mut kept = match self.last.len() {
            LAST => self.last.pop_front().unwrap_or_default(),
            _ => String::new(),
        };
        kept.clear();
        kept.push_str(line);
        self.last.push_back(kept);
        self.failed.push(line);
    }

    pub(crate) fn last(&self) -> impl DoubleEndedIterator<Item = &str> {
        self.last.iter().map(String::as_str)
    }

    /// Returns the failed command's lines, even if they do not say why it failed, and all of the last lines.
    pub(crate) fn all(&self) -> impl Iterator<Item = &str> {
        let said: &[String] = match &self.failed {
            Failed::None => &[],
            Failed::Named(line) => std::slice::from_ref(line),
            Failed::Saying(said, _) => said,
        };
        said.iter().map(String::as_str).chain(self.last())
    }

    /// Returns the lines that show why the step failed: the last lines, or the failed command's lines and a few of the
    /// last ones if those do not include the former.
    pub(crate) fn why(&self) -> Vec<String> {
        let is_last = |line| self.last.contains(line);
        let mut lines = match &self.failed {
            Failed::Saying(said, _) if !said.iter().all(is_last) => said.clone(),
            _ => return self.last.iter().cloned().collect(),
        };
        lines.push("...".to_owned());
        let skipped = self.last.len().saturating_sub(BESIDE);
        lines.extend(self.last.iter().skip(skipped).cloned());
        lines
    }
}

impl Failed {
    fn push(&mut self, line: &str) {
        match self {
            Self::Saying(_, 0) => {}
            // The command's output ends where ninja's next count begins.
            Self::Saying(_, left) if ninja::parse(line).is_some() => *left = 0,
            Self::Saying(said, left) => {
                said.push(line.to_owned());
                *left -= 1;
            }
            // A failure reported later, by a nested ninja, is closer to the cause.
            Self::None | Self::Named(_) if is_failed(line) => *self = Self::Named(line.to_owned()),
            Self::Named(named) if is_error(line) => {
                let said = vec![std::mem::take(named), line.to_owned()];
                *self = Self::Saying(said, FROM_ERROR - 1);
            }
            Self::None | Self::Named(_) => {}
        }
    }
}

/// Returns whether this is ninja's line about a failed command, after any labels.
fn is_failed(line: &str) -> bool {
    let mut rest = line;
    while let Some((_, after)) = rest
        .strip_prefix('[')
        .and_then(|text| text.split_once("] "))
    {
        rest = after;
    }
    rest.starts_with("FAILED: ")
}

/// Returns whether this is an error of a compiler, linker or CMake, and not an option such as `-Werror=all` in the
/// command that ninja prints.
fn is_error(line: &str) -> bool {
    [
        "error: ",
        "CMake Error",
        "undefined reference to",
        "Traceback (most recent",
    ]
    .iter()
    .any(|mark| line.contains(mark))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn why(lines: impl IntoIterator<Item = String>) -> Vec<String> {
        let mut tail = Tail::default();
        for line in lines {
            tail.push(&line);
        }
        tail.why()
    }

    fn lines(text: &str) -> impl Iterator<Item = String> + '_ {
        text.lines().map(str::to_owned)
    }

    fn others(count: usize) -> impl Iterator<Item = String> {
        (0..count).map(|at| format!("[other] [{at}/9999] Building {at}.o"))
    }

    /// Output of TheRock's build: the outer ninja, the command, then the inner ninja's output.
    const NESTED: &str = "\
FAILED: math-libs/stamp/build.stamp
cmake --build . -- -Werror=all
[rocBLAS] [1/9] Building a.o
[rocBLAS] FAILED: b.o
[rocBLAS] c++ -Werror=all b.cpp
[rocBLAS] b.cpp:1:2: error: no such thing
[rocBLAS] note: here
[7/40] Building sub-project other";

    #[test]
    fn the_command_that_failed_is_shown_although_others_went_on() {
        let shown = why(lines(NESTED)
            .chain(others(100))
            .chain(lines("ninja: build stopped: subcommand failed.")));
        let expected = [
            "[rocBLAS] FAILED: b.o",
            "[rocBLAS] b.cpp:1:2: error: no such thing",
            "[rocBLAS] note: here",
            "...",
        ];
        assert_eq!(shown[..4], expected);
        assert_eq!(shown.len(), 4 + BESIDE);
        assert_eq!(shown[9], "ninja: build stopped: subcommand failed.");
    }

    #[test]
    fn what_the_last_lines_have_is_not_shown_twice() {
        let shown = why(lines(NESTED));
        assert_eq!(shown, lines(NESTED).collect::<Vec<_>>());
        let shown = why(others(100));
        assert_eq!(shown, others(100).skip(80).collect::<Vec<_>>());
    }

    #[test]
    fn the_first_error_is_the_one_and_it_ends() {
        let many = (0..100).map(|at| format!("b.cpp:{at}: error: again"));
        let shown = why(lines("FAILED: b.o")
            .chain(many)
            .chain(lines(NESTED))
            .chain(others(50)));
        assert_eq!(shown.len(), 1 + FROM_ERROR + 1 + BESIDE);
        assert_eq!(shown[12], "b.cpp:11: error: again");
    }

    #[test]
    fn a_command_that_does_not_say_why_hides_nothing() {
        let shown = why(lines("FAILED: a.o\nc++ -Werror=all a.cpp").chain(others(30)));
        assert_eq!(shown, others(30).skip(10).collect::<Vec<_>>());
    }

    #[test]
    fn a_command_that_was_killed_is_known_although_others_went_on() {
        let mut tail = Tail::default();
        let killed = "FAILED: [code=137] a.o";
        for line in lines(killed).chain(others(30)) {
            tail.push(&line);
        }
        assert_eq!(tail.all().next(), Some(killed));
        assert_eq!(tail.all().count(), 1 + LAST);
    }
}
