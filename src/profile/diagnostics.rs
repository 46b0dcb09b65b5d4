//! Owns formatting a mistake in a profile or configuration: the place, the snippet with its caret, the advice.
//!
//! Without colour: the text is part of an error's message, for terminals, logs and JSON alike.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use miette::{
    GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, NamedSource, Report,
};

use super::load::Origin;
use super::value::Refused;
use crate::sys::address::hide_secrets;
use crate::sys::error::Error;
use crate::sys::span::{self, Place};
use crate::sys::suggest;

#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) origin: Origin,
    pub(crate) text: String,
    /// Where the text begins in the concatenation of all files.
    pub(crate) start: usize,
}

/// The files of a profile and of the profiles it extends, its own first. A place is an offset in the concatenation of
/// these files.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sources(Vec<Arc<SourceFile>>);

impl Sources {
    pub(crate) fn push(&mut self, origin: Origin, text: String) {
        let last = self.0.last();
        let start = last.map_or(0, |last| last.start + last.text.len() + 1);
        self.0.push(Arc::new(SourceFile {
            origin,
            text,
            start,
        }));
    }

    pub(crate) fn file(&self, place: &Place) -> &SourceFile {
        let after = self.0.partition_point(|file| file.start <= place.start);
        &self.0[after.saturating_sub(1)]
    }

    /// Returns a place as `FILE:LINE`, for a message about another place.
    pub(crate) fn line(&self, place: &Place) -> String {
        let file = self.file(place);
        let line = span::line(&file.text, file.bytes(place).start);
        format!("{}:{line}", file.origin)
    }
}

impl Deref for Sources {
    type Target = [Arc<SourceFile>];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl SourceFile {
    /// Returns the bytes of a place in this file's text.
    pub(crate) fn bytes(&self, place: &Place) -> Range<usize> {
        let within = |at: usize| at.saturating_sub(self.start).min(self.text.len());
        within(place.start)..within(place.end)
    }
}

/// A part of a profile that could not be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum UnreadPart {
    /// A key or table.
    Part,
    /// A file of the profile, or of a profile that it extends.
    File,
}

#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) place: Place,
    pub(crate) message: String,
    pub(crate) label: String,
    pub(crate) help: Option<String>,
    /// For a missing item: the unread part that may contain it.
    pub(super) doubt: Option<UnreadPart>,
}

impl Problem {
    /// `label` describes the fault at the caret; `message` is the sentence above the snippet.
    pub(crate) fn new(place: &Place, message: impl Into<String>, label: impl Into<String>) -> Self {
        Self {
            place: place.clone(),
            message: message.into(),
            label: label.into(),
            help: None,
            doubt: None,
        }
    }

    /// Marks the problem as doubtful if such a part of the profile could not be read.
    #[must_use]
    pub(crate) fn unless(self, doubt: UnreadPart) -> Self {
        let doubt = Some(doubt);
        Self { doubt, ..self }
    }

    pub(crate) fn is_certain(&self, unread: Option<UnreadPart>) -> bool {
        self.doubt.is_none() || self.doubt > unread
    }

    pub(crate) fn refused(place: &Place, refused: Refused, label: &str) -> Self {
        Self {
            help: refused.help,
            ..Self::new(place, refused.message, label)
        }
    }

    #[must_use]
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    /// Adds the known name that was probably meant, or else `otherwise`.
    #[must_use]
    pub(crate) fn suggest<'n>(
        mut self,
        name: &str,
        known: impl IntoIterator<Item = &'n str>,
        otherwise: Option<&str>,
    ) -> Self {
        self.help = match suggest::closest(name, known) {
            Some(close) => Some(format!("did you mean `{close}`?")),
            None => otherwise.map(str::to_owned),
        };
        self
    }

    /// Returns why a text is not TOML.
    pub(crate) fn not_toml(error: &toml::de::Error, start: usize) -> Self {
        let span = error.span().unwrap_or(0..0);
        let message = format!("this is not TOML: {}", error.message());
        Self::new(&(start + span.start..start + span.end), message, "here")
    }

    fn render(&self, sources: &Sources) -> String {
        let source = sources.file(&self.place);
        let span = clamp(&source.text, source.bytes(&self.place));
        let (before, after) = source.text.as_bytes().split_at(span.start);
        let is_end = |byte: &u8| *byte == b'\n';
        let shown = before
            .rsplit(is_end)
            .take(2)
            .chain(after.split(is_end).take(2));
        if shown.map(<[u8]>::len).sum::<usize>() > LONGEST_SNIPPET {
            let line = before.iter().filter(|byte| is_end(byte)).count() + 1;
            let help = self.help.iter().map(|help| format!("\n   help: {help}"));
            let help: String = help.collect();
            return format!(
                "  × {}\n   in {}, line {line}{help}",
                self.message, source.origin
            );
        }
        let mut diagnostic = MietteDiagnostic::new(&self.message)
            .with_label(LabeledSpan::new_with_span(Some(self.label.clone()), span));
        if let Some(help) = &self.help {
            diagnostic = diagnostic.with_help(help);
        }
        let name = source.origin.to_string();
        let report =
            Report::new(diagnostic).with_source_code(NamedSource::new(name, source.text.clone()));
        let mut text = String::new();
        let handler = GraphicalReportHandler::new_themed(GraphicalTheme::unicode_nocolor())
            .with_width(110)
            .with_context_lines(1)
            .with_links(false);
        match handler.render_report(&mut text, report.as_ref()) {
            Ok(()) => text.trim_end().to_owned(),
            // Formatting into a string fails only if miette has a bug; the sentence is still useful.
            Err(fmt::Error) => format!("  {}: {}", source.origin, self.message),
        }
    }
}

/// Keeps a caret on one line: a mark over a whole script or table hides the fault.
fn clamp(text: &str, bytes: Range<usize>) -> Range<usize> {
    let line = text.get(bytes.clone()).and_then(|text| text.find('\n'));
    bytes.start..line.map_or(bytes.end, |length| bytes.start + length)
}

/// Maximum size of the lines that show a mistake, in bytes.
const LONGEST_SNIPPET: usize = 4096;

/// Maximum number of mistakes shown for one file.
const SHOWN: usize = 15;

/// Returns the error that shows all of the mistakes in `what`, such as "profile `mine`".
pub(crate) fn invalid(what: &str, sources: &Sources, mut problems: Vec<Problem>) -> Error {
    problems.sort_by_key(|problem| problem.place.start);
    problems.dedup_by(|a, b| a.place == b.place && a.message == b.message);
    let count = match problems.len() {
        1 => String::new(),
        count => format!(": {count} errors"),
    };
    let mut message = format!("{what} is invalid{count}");
    for problem in problems.iter().take(SHOWN) {
        message.push('\n');
        message.push_str(&problem.render(sources));
    }
    if problems.len() > SHOWN {
        message.push_str("\n  and more, not shown");
    }
    // The snippets show lines of files that may contain logins.
    invalid!("{}", hide_secrets(&message))
}
