//! Owns what is said about a mistake in a profile: the place, the snippet with its caret, the advice.
//!
//! Rendered without colour: it travels in an error's message, to terminals, logs and JSON alike.

use std::fmt;
use std::ops::{Deref, Range};
use std::sync::Arc;

use miette::{
    GraphicalReportHandler, GraphicalTheme, LabeledSpan, MietteDiagnostic, NamedSource, Report,
};

use super::load::Origin;
use crate::sys::error::{Error, Kind};

/// One file that a profile was read from.
#[derive(Debug)]
pub(crate) struct SourceFile {
    pub(crate) origin: Origin,
    pub(crate) text: String,
}

/// The files of a profile and those it extends, the profile itself first.
pub(crate) type Sources = Vec<Arc<SourceFile>>;

/// Bytes of one of the files.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) source: usize,
    pub(crate) span: Range<usize>,
}

/// A value and where it was written.
#[derive(Clone, Debug)]
pub struct At<T> {
    pub(crate) value: T,
    pub(crate) place: Place,
}

impl<T> At<T> {
    pub(crate) fn new(source: usize, spanned: serde_spanned::Spanned<T>) -> Self {
        let span = spanned.span();
        let value = spanned.into_inner();
        let place = Place { source, span };
        Self { value, place }
    }

    pub(crate) fn map<U>(self, change: impl FnOnce(T) -> U) -> At<U> {
        let value = change(self.value);
        At {
            value,
            place: self.place,
        }
    }
}

impl<T> Deref for At<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for At<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: fmt::Display> fmt::Display for At<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

/// One mistake.
#[derive(Clone, Debug)]
pub(crate) struct Problem {
    pub(crate) place: Place,
    pub(crate) message: String,
    pub(crate) label: String,
    pub(crate) help: Option<String>,
}

impl Problem {
    /// `label` says at the caret what is wrong there; `message` is the sentence above the snippet.
    pub(crate) fn new(place: &Place, message: impl Into<String>, label: impl Into<String>) -> Self {
        Self {
            place: place.clone(),
            message: message.into(),
            label: label.into(),
            help: None,
        }
    }

    #[must_use]
    pub(crate) fn help(mut self, help: impl Into<String>) -> Self {
        self.help = Some(help.into());
        self
    }

    fn render(&self, sources: &Sources) -> String {
        let source = &sources[self.place.source];
        let span = clamp(&source.text, &self.place.span);
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
            // Formatting into a string fails only if miette has a bug; the sentence is still worth having.
            Err(fmt::Error) => format!("  {}: {}", source.origin, self.message),
        }
    }
}

/// Keeps a caret on one line: a mark over a whole script or table hides what it points at.
fn clamp(text: &str, span: &Range<usize>) -> Range<usize> {
    let start = span.start.min(text.len());
    let end = span.end.clamp(start, text.len());
    let line = text.get(start..end).and_then(|marked| marked.find('\n'));
    start..line.map_or(end, |length| start + length)
}

/// How many mistakes of one file are worth reading at once.
const SHOWN: usize = 15;

/// Makes the error that shows all of the mistakes.
pub(crate) fn invalid(name: &str, sources: &Sources, mut problems: Vec<Problem>) -> Error {
    problems.sort_by_key(|problem| (problem.place.source, problem.place.span.start));
    problems.dedup_by(|a, b| a.place == b.place && a.message == b.message);
    let count = match problems.len() {
        1 => String::new(),
        count => format!(": {count} errors"),
    };
    let mut message = format!("profile `{name}` is invalid{count}");
    for problem in problems.iter().take(SHOWN) {
        message.push('\n');
        message.push_str(&problem.render(sources));
    }
    if problems.len() > SHOWN {
        message.push_str("\n  and more, not shown");
    }
    Error::new(Kind::Invalid, message)
}
