//! Owns all output of the program: results on stdout, everything else on stderr.
//!
//! Nothing else prints, and nothing in this module reads the environment: [`UiSettings`] come from `config`.

pub(crate) mod metrics;

pub(crate) mod ci;
pub(crate) mod event;
mod json;
pub(crate) mod lines;
pub(crate) mod ninja;
mod osc;
mod plain;
pub(crate) mod report;
mod run_progress;
pub(crate) mod size;
pub(crate) mod table;
pub(crate) mod tail;
mod term;
pub(crate) mod text;

use std::borrow::Cow;
use std::fmt;
use std::io::{self, BufRead as _, IsTerminal as _, Write};
use std::os::fd::AsFd as _;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use jiff::Timestamp;
use serde::Serialize;

use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::readable::readable;
use crate::sys::signals;
use ci::{Level, Sections};
pub(crate) use json::object;
pub(crate) use osc::Integration;
pub(crate) use report::{Format, Reporter, StepOutput};
use table::Table;
use term::Bars;

/// Output settings. Plain values, so that tests and `config` can set all of them.
#[derive(Clone, Debug, Default)]
pub(crate) struct UiSettings {
    /// `-q`: suppresses notes; warnings and errors remain.
    pub quiet: bool,
    /// Count of `-v`: shows details and every line of a step's output.
    pub verbose: u8,
    /// `--yes`: answers every question with yes.
    pub yes: bool,
    /// `NO_COLOR` is set and not empty; wins over `force_color`.
    pub no_color: bool,
    /// `CLICOLOR_FORCE` is set and not `0`.
    pub force_color: bool,
    /// `TERM` is `dumb` or unset.
    pub dumb: bool,
    /// `CI` is set: no animation.
    pub ci: bool,
    /// The CI system that reads the output, if it supports sections or annotations.
    pub ci_system: Option<ci::System>,
    /// Invoked through sudo; hints then begin with `sudo`.
    pub through_sudo: bool,
    /// The directory of `--home`, shell-quoted, for the commands in hints.
    pub home: Option<String>,
    /// The same of `ROCKENV_HOME`, which sudo does not pass on.
    pub variable_home: Option<String>,
    /// Escape sequences that the terminal supports.
    pub integration: Integration,
    pub terminals: Terminals,
}

/// Which standard streams are terminals.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Terminals {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

impl Terminals {
    pub(crate) fn detect() -> Self {
        Self {
            stdin: io::stdin().is_terminal(),
            stdout: io::stdout().is_terminal(),
            stderr: io::stderr().is_terminal(),
        }
    }
}

impl UiSettings {
    /// Returns `text` with its rockenv commands as the user has to type them.
    pub(crate) fn hint<'a>(&self, text: &'a str) -> Cow<'a, str> {
        let (home, variable) = (self.home.as_deref(), self.variable_home.as_deref());
        match (self.through_sudo, home.or(variable)) {
            (false, None) => Cow::Borrowed(text),
            (sudo, _) => Cow::Owned(text::as_typed(text, sudo, home, variable)),
        }
    }

    /// Returns whether a question gets an answer.
    pub(crate) fn can_answer(&self) -> bool {
        self.yes || (self.terminals.stdin && self.terminals.stderr)
    }

    fn color(&self, terminal: bool) -> bool {
        !self.no_color && (self.force_color || (terminal && !self.dumb))
    }
}

/// The program's output. Clones share one instance, which any thread may use.
#[derive(Clone)]
pub(crate) struct Ui {
    settings: UiSettings,
    out: Arc<Mutex<Out>>,
    err: Arc<Mutex<Messages>>,
}

struct Messages {
    writer: Box<dyn Write + Send>,
    /// While a run's progress lines occupy the bottom of the screen, messages go above them.
    bars: Weak<Bars>,
    sections: Sections,
}

struct Out {
    writer: Box<dyn Write + Send>,
    /// The first write failure; later writes are dropped.
    failed: Option<io::Error>,
    /// The incomplete last line, if GitHub's runner reads the output.
    line: Option<Vec<u8>>,
}

impl Out {
    fn write(&mut self, bytes: &[u8]) {
        if self.failed.is_none() {
            self.failed = self.writer.write_all(bytes).err();
        }
    }

    /// Writes the complete lines with the runner's commands escaped. With `all`, also writes the incomplete last line.
    fn write_lines(&mut self, bytes: &[u8], all: bool) {
        let Some(line) = &mut self.line else {
            return self.write(bytes);
        };
        line.extend_from_slice(bytes);
        let end = line.iter().rposition(|byte| *byte == b'\n');
        let end = if all {
            line.len()
        } else {
            end.map_or(0, |end| end + 1)
        };
        let lines: Vec<u8> = line.drain(..end).collect();
        self.write(ci::without_commands(&String::from_utf8_lossy(&lines)).as_bytes());
    }
}

impl fmt::Debug for Ui {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Ui")
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

/// The bytes that a `Ui` wrote.
#[derive(Clone, Debug, Default)]
pub(crate) struct Recording(Arc<Mutex<Vec<u8>>>);

impl Recording {
    pub(crate) fn bytes(&self) -> Vec<u8> {
        lock(&self.0).clone()
    }
}

impl Write for Recording {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        lock(&self.0).write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[derive(Clone, Copy)]
enum Paint {
    Bold,
    Dim,
    Green,
    Red,
    Yellow,
    Cyan,
}

/// How good a result is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Tone {
    Good,
    Doubtful,
    Bad,
}

impl Tone {
    fn paint(self) -> Paint {
        match self {
            Self::Good => Paint::Green,
            Self::Doubtful => Paint::Yellow,
            Self::Bad => Paint::Red,
        }
    }
}

fn paint(on: bool, paint: Paint, text: &str) -> String {
    let code = match paint {
        _ if !on => return text.to_owned(),
        Paint::Bold => "1",
        Paint::Dim => "2",
        Paint::Green => "1;32",
        Paint::Red => "1;31",
        Paint::Yellow => "1;33",
        Paint::Cyan => "1;36",
    };
    format!("\x1b[{code}m{text}\x1b[0m")
}

impl Ui {
    /// Creates the output to stdout and stderr.
    pub(crate) fn new(settings: UiSettings) -> Self {
        // Listings are written at once: stdout's own line buffering costs a system call per line.
        let out = io::BufWriter::new(io::stdout());
        let ui = Self::with_writers(settings, Box::new(out), Box::new(io::stderr()));
        // GitHub's runner does not read output that goes to a file.
        let status = rustix::fs::fstat(io::stdout());
        let is_file = |mode| rustix::fs::FileType::from_raw_mode(mode).is_file();
        if status.is_ok_and(|status| is_file(status.st_mode)) {
            lock(&ui.out).line = None;
        }
        ui
    }

    /// Creates an output with other writers than stdout and stderr.
    pub(crate) fn with_writers(
        settings: UiSettings,
        out: Box<dyn Write + Send>,
        err: Box<dyn Write + Send>,
    ) -> Self {
        let ci_system = settings.ci_system;
        Self {
            settings,
            out: Arc::new(Mutex::new(Out {
                writer: out,
                failed: None,
                line: (ci_system == Some(ci::System::Github)).then(Vec::new),
            })),
            err: Arc::new(Mutex::new(Messages {
                writer: err,
                bars: Weak::new(),
                sections: Sections::new(ci_system),
            })),
        }
    }

    pub(crate) fn settings(&self) -> &UiSettings {
        &self.settings
    }

    fn write_out(&self, bytes: &[u8]) {
        lock(&self.out).write_lines(bytes, false);
    }

    /// Writes result text for people, escaped, and adds a missing newline at the end.
    pub(crate) fn data(&self, text: &str) {
        let safe = text::escape_lines(text);
        self.write_out(safe.as_bytes());
        if !text.ends_with('\n') && !text.is_empty() {
            self.write_out(b"\n");
        }
    }

    /// Writes the line that introduces one result, coloured by its tone.
    pub(crate) fn headline(&self, tone: Tone, text: &str) {
        self.painted(tone.paint(), text);
    }

    /// Replaces the `before` lines of the previous call with text that another `Ui` has rendered. Leaves out lines that
    /// do not fit on the screen, because the cursor could not return to them. Returns the number of rows written.
    pub(crate) fn redraw(&self, text: &str, before: usize) -> usize {
        let (height, columns) = screen();
        let (mut rows, mut shown) = (0, String::new());
        for line in text.split_inclusive('\n') {
            let width = console::measure_text_width(line.trim_end_matches('\n'));
            let more = width.div_ceil(columns).max(1);
            // The cursor occupies the last row.
            if rows + more >= height {
                break;
            }
            rows += more;
            shown.push_str(line);
        }
        let up = match before {
            0 => String::new(),
            rows => format!("\x1b[{rows}F"),
        };
        self.write_out(format!("{up}\x1b[J{shown}").as_bytes());
        self.flush();
        rows
    }

    /// Writes the title of a group of results.
    pub(crate) fn heading(&self, text: &str) {
        self.painted(Paint::Bold, text);
    }

    fn painted(&self, color: Paint, text: &str) {
        let on = self.settings.color(self.settings.terminals.stdout);
        let text = paint(on, color, &text::escape_lines(text));
        self.write_out(format!("{text}\n").as_bytes());
    }

    /// Writes `  WORD  message` with the word coloured, and wraps the message on a terminal.
    pub(crate) fn finding(&self, tone: Tone, word: &str, message: &str) {
        let on = self.settings.color(self.settings.terminals.stdout);
        let word = paint(on, tone.paint(), &format!("{word:<7}"));
        let message = text::escape_lines(message);
        let columns = match self.settings.terminals.stdout {
            true => 69,
            false => usize::MAX,
        };
        let lines = text::wrap(&message, columns).join("\n           ");
        self.write_out(format!("  {word}  {lines}\n").as_bytes());
    }

    /// Writes a table. The header is bold if colour is on, and the last column is wrapped on a terminal.
    pub(crate) fn table(&self, table: &Table) {
        let text = match self.settings.terminals.stdout {
            true => table.on_screen(screen().1).render(),
            false => table.render(),
        };
        let on = self.settings.color(self.settings.terminals.stdout);
        match text.split_once('\n') {
            Some((header, rows)) if on => {
                let header = paint(on, Paint::Bold, header);
                self.write_out(format!("{header}\n{rows}").as_bytes());
            }
            _ => self.write_out(text.as_bytes()),
        }
    }

    /// Writes help: bold only if colour is on.
    pub(crate) fn styled(&self, text: &clap::builder::StyledStr) {
        let on = self.settings.color(self.settings.terminals.stdout);
        let text = if on {
            text.ansi().to_string()
        } else {
            text.to_string()
        };
        self.write_out(text.as_bytes());
    }

    pub(crate) fn json(&self, value: &impl Serialize) -> Result<()> {
        let json = serde_json::to_string_pretty(value)
            .map_err(|error| unexpected!("cannot write the result as json").source(error))?;
        self.write_out(text::escape_json(&json).as_bytes());
        self.write_out(b"\n");
        Ok(())
    }

    /// Writes bytes that a program may read, such as shell code. They are escaped only for a terminal or GitHub's
    /// runner.
    pub(crate) fn raw(&self, bytes: &[u8]) {
        let is_read = self.settings.terminals.stdout || lock(&self.out).line.is_some();
        if is_read {
            self.lines(bytes);
        } else {
            self.bytes(bytes);
        }
    }

    /// Writes untrusted text, such as logs. Control sequences and bytes that are not UTF-8 are escaped even in a pipe,
    /// which often ends at a terminal.
    pub(crate) fn lines(&self, bytes: &[u8]) {
        for chunk in bytes.utf8_chunks() {
            self.write_out(text::escape_lines(chunk.valid()).as_bytes());
            for byte in chunk.invalid() {
                self.write_out(format!("\\x{byte:02x}").as_bytes());
            }
        }
    }

    /// Writes bytes unchanged, at the user's request.
    pub(crate) fn bytes(&self, bytes: &[u8]) {
        let mut out = lock(&self.out);
        out.write_lines(b"", true);
        out.write(bytes);
    }

    /// Flushes stdout, for commands that follow a log or an env's state.
    pub(crate) fn flush(&self) {
        let mut out = lock(&self.out);
        if out.failed.is_none() {
            out.failed = out.writer.flush().err();
        }
    }

    /// Returns whether stdout has failed, so that commands with long output can stop.
    pub(crate) fn closed(&self) -> bool {
        lock(&self.out).failed.is_some()
    }

    /// Flushes stdout. Fails unless everything was written or the reader closed the pipe (`| head`).
    pub(crate) fn finish(&self) -> Result<()> {
        lock(&self.out).write_lines(b"", true);
        self.flush();
        match lock(&self.out).failed.take() {
            Some(error) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).context(|| "cannot write to standard output".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Reports progress or a result to people, unless `-q`.
    pub(crate) fn note(&self, text: &str) {
        if !self.settings.quiet {
            // Keeps results before the notes about them on a terminal.
            self.flush();
            let text = self.settings.hint(text);
            self.write_err(&format!("{}\n", text::escape_lines(&text)));
        }
    }

    /// Reports a detail if `-v` is given.
    pub(crate) fn detail(&self, text: &str) {
        if self.settings.verbose > 0 && !self.settings.quiet {
            let on = self.settings.color(self.settings.terminals.stderr);
            let text = paint(on, Paint::Dim, &text::escape_lines(text));
            self.write_err(&format!("{text}\n"));
        }
    }

    /// Reports a problem that does not stop the command.
    pub(crate) fn warn(&self, text: &str) {
        let text = &self.settings.hint(text);
        if self.annotate(Level::Warning, &text::escape_lines(text)) {
            return;
        }
        let on = self.settings.color(self.settings.terminals.stderr);
        let label = paint(on, Paint::Yellow, "warning:");
        self.write_err(&format!("{label} {}\n", text::escape_lines(text)));
    }

    /// Reports the command's failure: the message, its causes and the suggested command.
    pub(crate) fn error(&self, error: &Error) {
        let github = self.settings.ci_system == Some(ci::System::Github);
        let on = !github && self.settings.color(self.settings.terminals.stderr);
        let mut lines = Vec::new();
        for (depth, line) in error.chain().iter().enumerate() {
            let line = text::escape_lines(line);
            lines.push(if depth == 0 {
                format!("{} {line}", paint(on, Paint::Red, "error:"))
            } else {
                format!("  caused by: {}", line.replace('\n', "\n    "))
            });
        }
        if let Some(help) = error.help_text() {
            let help = self.settings.hint(help);
            let help = text::escape_lines(&help);
            lines.push(format!("{} {help}", paint(on, Paint::Cyan, "help:")));
        }
        // The failure ends the current work.
        self.end_section();
        let text = lines.join("\n");
        if !self.annotate(Level::Error, text.strip_prefix("error: ").unwrap_or(&text)) {
            self.write_err(&(text + "\n"));
        }
    }

    /// Begins a section that the CI system can fold. Without a CI system, prints the title as a note.
    pub(crate) fn begin_section(&self, title: &str) {
        if self.settings.ci_system.is_none() {
            return self.note(title);
        }
        if !self.settings.quiet {
            let mut err = lock(&self.err);
            let text = err.sections.begin(title, Timestamp::now());
            err.write(&text);
        }
    }

    /// Ends the open section, if any.
    pub(crate) fn end_section(&self) {
        let mut err = lock(&self.err);
        let text = err.sections.end(Timestamp::now());
        err.write(&text);
    }

    /// Annotates the CI job with a failure that is reported elsewhere.
    pub(crate) fn annotate_failure(&self, what: &str, why: &str) {
        let message = format!("{what}: {why}");
        self.annotate(Level::Error, &text::escape_lines(&message));
    }

    /// Adds an annotation to the CI job. Returns whether the CI system supports annotations.
    fn annotate(&self, level: Level, message: &str) -> bool {
        let mut err = lock(&self.err);
        let text = err.sections.annotation(level, message);
        err.write(text.as_deref().unwrap_or_default());
        text.is_some()
    }

    /// Asks a yes-or-no question. `--yes` answers it. Without a terminal it fails, because silence must not delete
    /// anything.
    pub(crate) fn confirm(&self, question: &str) -> Result<bool> {
        if self.settings.yes {
            return Ok(true);
        }
        let question = text::escape_lines(question);
        if !self.settings.can_answer() {
            return Err(
                usage!("cannot ask without a terminal: {question}").help("add `--yes` to proceed")
            );
        }
        self.flush();
        self.write_err(&format!("{question} [y/N] "));
        let stdin = io::stdin();
        // Ctrl-C does not end a command that handles signals itself, so this watches for both.
        let [is_told_to_stop, _] = readable([signals::taken(), Some(stdin.as_fd())], None)?;
        if is_told_to_stop {
            self.write_err("\n");
            return Err(Error::new(Kind::Signal(2), "interrupted"));
        }
        let mut answer = String::new();
        stdin
            .lock()
            .read_line(&mut answer)
            .context(|| "cannot read the answer".to_owned())?;
        Ok(is_yes(&answer))
    }

    pub(crate) fn reporter(&self, format: Format) -> Reporter {
        Reporter::new(self, format)
    }

    // A failed write to stderr cannot be reported.
    fn write_err(&self, text: &str) {
        let mut err = lock(&self.err);
        match err.bars.upgrade() {
            Some(bars) => bars.print(text),
            None => {
                let text = err.sections.without_commands(text);
                err.write(&text);
            }
        }
    }
}

impl Messages {
    fn write(&mut self, text: &str) {
        drop(self.writer.write_all(text.as_bytes()));
        drop(self.writer.flush());
    }
}

fn is_yes(answer: &str) -> bool {
    matches!(answer.trim().to_lowercase().as_str(), "y" | "yes")
}

/// Returns the rows and columns of the terminal that stdout is connected to.
fn screen() -> (usize, usize) {
    let size = rustix::termios::tcgetwinsize(io::stdout());
    let size = size.map_or((0, 0), |size| (size.ws_row, size.ws_col));
    // A serial console reports a size of zero.
    let or = |known: u16, usual| match known {
        0 => usual,
        known => usize::from(known),
    };
    (or(size.0, usize::MAX), or(size.1, 80))
}

#[cfg(test)]
mod tests;
