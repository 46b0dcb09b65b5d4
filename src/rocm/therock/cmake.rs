//! Owns parsing CMake's syntax: a file is a list of commands with arguments. The parser evaluates nothing.

use std::ops::Range;

use super::error_at;
use crate::sys::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Command {
    /// Name in lower case, because CMake ignores its case.
    pub(super) name: String,
    /// Position of the name.
    pub(super) span: Range<usize>,
    pub(super) arguments: Vec<Argument>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Argument {
    /// Its text, with escapes resolved.
    pub(super) text: String,
    pub(super) span: Range<usize>,
    /// Written in quotation marks or brackets, and so never a keyword.
    pub(super) quoted: bool,
    /// Contains a variable reference, which is not evaluated here.
    pub(super) variable: bool,
    /// The comment that follows on the same line.
    pub(super) comment: Option<String>,
}

pub(super) fn parse(file: &str, text: &str) -> Result<Vec<Command>> {
    let mut reader = Reader { file, text, at: 0 };
    let mut commands = Vec::new();
    loop {
        reader.space()?;
        if reader.rest().is_empty() {
            return Ok(commands);
        }
        commands.push(reader.command()?);
    }
}

struct Reader<'a> {
    file: &'a str,
    text: &'a str,
    at: usize,
}

impl<'a> Reader<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn wrong(&self, span: Range<usize>, message: &str) -> Error {
        error_at(self.file, self.text, span, message)
    }

    fn take(&mut self, accept: impl Fn(char) -> bool) -> &'a str {
        let rest = self.rest();
        let end = rest.find(|c| !accept(c)).unwrap_or(rest.len());
        self.at += end;
        &rest[..end]
    }

    /// Skips blanks and comments.
    fn space(&mut self) -> Result<()> {
        loop {
            self.take(char::is_whitespace);
            if !self.rest().starts_with('#') {
                return Ok(());
            }
            self.comment()?;
        }
    }

    /// Skips a comment that begins at the current position; returns its text.
    fn comment(&mut self) -> Result<String> {
        let start = self.at;
        self.at += 1;
        if let Some(length) = bracket(self.rest()) {
            let text = self.bracketed(start, length)?;
            return Ok(text.trim().to_owned());
        }
        Ok(self.take(|c| c != '\n').trim().to_owned())
    }

    /// Skips `[==[ ... ]==]` with `length` equals signs, and returns its content.
    fn bracketed(&mut self, start: usize, length: usize) -> Result<&'a str> {
        let close = format!("]{}]", "=".repeat(length));
        self.at += length + 2;
        let rest = self.rest();
        let Some(end) = rest.find(&close) else {
            return Err(self.wrong(start..self.at, &format!("no `{close}` ends this")));
        };
        self.at += end + close.len();
        Ok(&rest[..end])
    }

    fn command(&mut self) -> Result<Command> {
        let start = self.at;
        let name = self.take(|c| c.is_ascii_alphanumeric() || c == '_');
        let span = start..self.at;
        if name.is_empty() {
            return Err(self.wrong(start..start + 1, "a command should begin here"));
        }
        self.take(|c| c == ' ' || c == '\t');
        if !self.rest().starts_with('(') {
            return Err(self.wrong(span, "a command without parentheses"));
        }
        self.at += 1;
        let mut arguments: Vec<Argument> = Vec::new();
        let mut depth = 0;
        loop {
            // A comment belongs to the argument before it on the same line.
            self.take(|c| c == ' ' || c == '\t');
            if self.rest().starts_with('#') {
                let comment = self.comment()?;
                if let Some(last) = arguments.last_mut() {
                    last.comment.get_or_insert(comment);
                }
                self.space()?;
                continue;
            }
            let Some(next) = self.rest().chars().next() else {
                return Err(self.wrong(span, "no `)` ends this command"));
            };
            match next {
                ')' if depth == 0 => {
                    self.at += 1;
                    return Ok(Command {
                        name: name.to_ascii_lowercase(),
                        span,
                        arguments,
                    });
                }
                // Conditions contain parentheses.
                '(' | ')' => {
                    depth += if next == '(' { 1 } else { -1 };
                    self.at += 1;
                }
                _ if next.is_whitespace() => self.space()?,
                _ => arguments.push(self.argument()?),
            }
        }
    }

    fn argument(&mut self) -> Result<Argument> {
        let start = self.at;
        let (raw, quoted, literal) = if let Some(length) = bracket(self.rest()) {
            (self.bracketed(start, length)?.to_owned(), true, true)
        } else if self.rest().starts_with('"') {
            (self.string()?, true, false)
        } else {
            (self.word()?, false, false)
        };
        let variable =
            !literal && (raw.contains("${") || raw.contains("$<") || raw.contains("$ENV{"));
        Ok(Argument {
            text: if literal { raw } else { unescape(&raw) },
            span: start..self.at,
            quoted,
            variable,
            comment: None,
        })
    }

    fn string(&mut self) -> Result<String> {
        let start = self.at;
        self.at += 1;
        let rest = self.rest();
        let Some(end) = unescaped(rest, |c| c == '"') else {
            return Err(self.wrong(start..start + 1, "no quotation mark ends this"));
        };
        self.at += end + 1;
        Ok(rest[..end].to_owned())
    }

    fn word(&mut self) -> Result<String> {
        let start = self.at;
        let rest = self.rest();
        let is_end = |c: char| c.is_whitespace() || "()#".contains(c);
        let end = unescaped(rest, |c| c == '"' || is_end(c));
        self.at += end.unwrap_or(rest.len());
        // CMake's legacy syntax allows quotation marks inside a word: `-DX="a b"`.
        if self.rest().starts_with('"') {
            self.string()?;
            self.take(|c| !is_end(c));
        }
        Ok(self.text[start..self.at].to_owned())
    }
}

/// Returns the position of the first character that `is_it` accepts and no backslash escapes.
fn unescaped(text: &str, is_it: impl Fn(char) -> bool) -> Option<usize> {
    let mut escapes = false;
    let found = text.char_indices().find(|(_, c)| {
        let is_escaped = escapes;
        escapes = *c == '\\' && !is_escaped;
        !is_escaped && !escapes && is_it(*c)
    });
    found.map(|(at, _)| at)
}

/// Returns the number of equals signs of an opening bracket.
fn bracket(text: &str) -> Option<usize> {
    let rest = text.strip_prefix('[')?;
    let length = rest.len() - rest.trim_start_matches('=').len();
    rest[length..].starts_with('[').then_some(length)
}

fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('n') => out.push('\n'),
                Some('t') => out.push('\t'),
                // A line continuation.
                Some('\n') | None => {}
                Some(escaped) => out.push(escaped),
            },
            c => out.push(c),
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn words(text: &str) -> Vec<String> {
        let commands = parse("f.cmake", text).unwrap();
        let words = commands.iter().flat_map(|command| {
            let arguments = command.arguments.iter();
            let arguments = arguments.map(|argument| argument.text.clone());
            std::iter::once(command.name.clone()).chain(arguments)
        });
        words.collect()
    }

    #[test]
    fn commands_and_arguments() {
        assert_eq!(
            words("# c\nSet(A \"b \\\"c\\\" d\" e\\ f) # x\n"),
            ["set", "A", "b \"c\" d", "e f"]
        );
        assert_eq!(words("#[[ a\n( ]] set(A [=[x]]y]=])"), ["set", "A", "x]]y"]);
        assert_eq!(
            words("if((A OR B) AND C)\nendif()"),
            ["if", "A", "OR", "B", "AND", "C", "endif"]
        );
        assert_eq!(words("f(-DX=\"a b\"c)"), ["f", "-DX=\"a b\"c"]);
        let commands = parse("f", "f(a # one\n  # not of b\n  b\n  ${c})").unwrap();
        let arguments = &commands[0].arguments;
        let comments = arguments.iter().map(|one| one.comment.as_deref());
        assert!(comments.eq([Some("one"), None, None]), "{arguments:?}");
        assert!(arguments[2].variable);
    }

    #[test]
    fn mistakes_have_a_place() {
        for (text, place, words) in [
            ("\n  f(a", "f:2:3: ", "no `)`"),
            ("f(\"a\n)", "f:1:3: ", "quotation mark"),
            ("set A)", "f:1:1: ", "without parentheses"),
            ("set(A)\n!", "f:2:1: ", "should begin"),
            ("f([[a)", "f:1:3: ", "no `]]`"),
        ] {
            let error = parse("f", text).unwrap_err();
            assert!(error.message().starts_with(place), "{error}");
            assert_has!(error.message(), words);
            assert!(error.chain().join("\n").contains('^'));
        }
    }

    proptest! {
        #[test]
        fn no_text_makes_it_panic(text in "[a-z()\"#\\[\\]=\\\\$\\{\\} \n\t\u{e4}]{0,60}") {
            drop(parse("f", &text));
        }
    }
}
