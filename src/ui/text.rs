//! Owns making foreign text safe to show: names, causes, and output of builds can contain anything.
//!
//! Any character that a terminal would act on is shown as its escape (`\x1b`, `\n`, `\u{202e}`): control characters,
//! the C1 range that some terminals read as escape sequences, and the marks that change the direction of text.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::Write as _;
use std::path::Path;

use unicode_width::UnicodeWidthChar as _;

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

fn escape_where(text: &str, escaped: impl Fn(char) -> bool) -> Cow<'_, str> {
    if !text.chars().any(&escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if escaped(c) {
            push_escape(&mut safe, c);
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

fn push_escape(out: &mut String, c: char) {
    match c {
        '\n' | '\r' | '\t' => out.extend(c.escape_default()),
        c if u32::from(c) < 0x100 => {
            write!(out, "\\x{:02x}", u32::from(c)).expect("a string takes everything");
        }
        c => write!(out, "\\u{{{:x}}}", u32::from(c)).expect("a string takes everything"),
    }
}

/// Returns text of one line, such as a name, with all characters escaped that a terminal acts on.
pub fn escape(text: &str) -> Cow<'_, str> {
    escape_where(text, is_unsafe)
}

/// As [`escape`], but newlines and tabs stay.
pub fn escape_lines(text: &str) -> Cow<'_, str> {
    escape_where(text, |c| is_unsafe(c) && c != '\n' && c != '\t')
}

/// Returns a path to show; bytes that are not UTF-8 are escaped as well.
pub fn path(path: &Path) -> String {
    os(path.as_os_str())
}

/// Returns an operating system string to show; bytes that are not UTF-8 are escaped as well.
pub fn os(text: &OsStr) -> String {
    let mut safe = String::new();
    for chunk in text.as_encoded_bytes().utf8_chunks() {
        safe.push_str(&escape(chunk.valid()));
        for byte in chunk.invalid() {
            write!(safe, "\\x{byte:02x}").expect("a string takes everything");
        }
    }
    safe
}

/// Returns JSON with the same characters written as JSON escapes; they can only be inside strings.
pub(super) fn escape_json(json: &str) -> Cow<'_, str> {
    let escaped = |c: char| is_unsafe(c) && c != '\n';
    if !json.chars().any(escaped) {
        return Cow::Borrowed(json);
    }
    let mut safe = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if escaped(c) {
            write!(safe, "\\u{:04x}", u32::from(c)).expect("a string takes everything");
        } else {
            safe.push(c);
        }
    }
    Cow::Owned(safe)
}

/// Returns the start of `text` that fits in `columns`, with an ellipsis if that is not all of it.
pub(super) fn fit(text: &str, columns: usize) -> Cow<'_, str> {
    let mut used = 0;
    let mut cut = 0;
    for (at, c) in text.char_indices() {
        used += c.width().unwrap_or(0);
        if used > columns {
            return if columns == 0 {
                Cow::Borrowed("")
            } else {
                Cow::Owned(format!("{}…", &text[..cut]))
            };
        }
        if used < columns {
            cut = at + c.len_utf8();
        }
    }
    Cow::Borrowed(text)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;

    use super::*;

    #[test]
    fn nothing_reaches_the_terminal_unescaped() {
        for (text, safe) in [
            ("plain ünï 日本", "plain ünï 日本"),
            (
                "\x1b[31mred\x1b]0;title\x07",
                "\\x1b[31mred\\x1b]0;title\\x07",
            ),
            ("two\nlines\r\tand", "two\\nlines\\r\\tand"),
            ("c1 \u{9b}31m \u{7f}", "c1 \\x9b31m \\x7f"),
            ("a\u{202e}cba", "a\\u{202e}cba"),
        ] {
            assert_eq!(escape(text), safe);
        }
        assert_eq!(escape_lines("a\n\tb\r"), "a\n\tb\\r");
        assert_eq!(os(OsStr::from_bytes(b"a\xff\nb")), "a\\xff\\nb");
        assert_eq!(
            escape_json("{\n\"a\": \"\u{9b}\u{202e}\"}"),
            "{\n\"a\": \"\\u009b\\u202e\"}"
        );
    }

    #[test]
    fn text_is_cut_by_columns() {
        for (columns, cut) in [
            (9, "abc 日本"),
            (8, "abc 日本"),
            (7, "abc 日…"),
            (6, "abc …"),
            (1, "…"),
            (0, ""),
        ] {
            assert_eq!(fit("abc 日本", columns), cut, "{columns}");
        }
    }
}
