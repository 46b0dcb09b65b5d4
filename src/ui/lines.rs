//! Owns turning a step's output into displayable lines: arbitrary bytes in, safe text of bounded length out.

use std::borrow::Cow;

/// Maximum length of a displayed line; a build may print 100 MB without a newline. The log is not truncated.
const LINE_MAX: usize = 4096;

#[derive(Debug, Default)]
pub(crate) struct Lines {
    line: Vec<u8>,
    cut: bool,
    /// The last byte was a carriage return: the line is complete, and the next byte decides whether it was overwritten.
    returned: bool,
}

/// A line of output without its newline, with escape sequences removed and everything else made safe.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Line<'a> {
    pub text: &'a str,
    /// The next line overwrote this one after a carriage return: a progress display, not worth keeping.
    pub overwritten: bool,
}

impl Lines {
    /// Takes the next bytes and calls `each` for the completed lines.
    pub(crate) fn push(&mut self, mut bytes: &[u8], mut each: impl FnMut(Line<'_>)) {
        while let Some(&first) = bytes.first() {
            if self.returned && first != b'\r' {
                self.returned = false;
                self.end(first != b'\n', &mut each);
                if first == b'\n' {
                    bytes = &bytes[1..];
                    continue;
                }
            }
            let Some(at) = bytes.iter().position(|byte| matches!(byte, b'\n' | b'\r')) else {
                return self.keep(bytes);
            };
            self.keep(&bytes[..at]);
            match bytes[at] {
                b'\n' => self.end(false, &mut each),
                _ => self.returned = true,
            }
            bytes = &bytes[at + 1..];
        }
    }

    /// Calls `each` for the text after the last newline.
    pub(crate) fn finish(&mut self, mut each: impl FnMut(Line<'_>)) {
        self.returned = false;
        if !self.line.is_empty() {
            self.end(false, &mut each);
        }
    }

    fn keep(&mut self, bytes: &[u8]) {
        let room = LINE_MAX - self.line.len();
        self.cut |= bytes.len() > room;
        self.line.extend_from_slice(&bytes[..bytes.len().min(room)]);
    }

    fn end(&mut self, overwritten: bool, each: &mut impl FnMut(Line<'_>)) {
        // `\r` at the start of a line overwrites nothing.
        if !(overwritten && self.line.is_empty()) {
            let mut text = clean(&self.line);
            if self.cut {
                // The limit may be inside a character.
                let whole = text.trim_end_matches(char::REPLACEMENT_CHARACTER).len();
                text.to_mut().truncate(whole);
                text.to_mut().push('…');
            }
            each(Line {
                text: &text,
                overwritten,
            });
        }
        self.line.clear();
        self.cut = false;
    }
}

/// Removes escape sequences and control characters; bytes that are not UTF-8 become the replacement character.
fn clean(bytes: &[u8]) -> Cow<'_, str> {
    let plain = |bytes: &[u8]| bytes.iter().all(|byte| (b' '..0x7f).contains(byte));
    if plain(bytes) {
        return String::from_utf8_lossy(bytes);
    }
    let mut text = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let Some((&byte, after)) = rest.split_first() {
        rest = match byte {
            0x1b => skip_escape(after),
            b'\t' => {
                text.push(b' ');
                after
            }
            0..b' ' | 0x7f => after,
            _ => {
                text.push(byte);
                after
            }
        };
    }
    let text = String::from_utf8_lossy(&text);
    Cow::Owned(super::text::escape(&text).into_owned())
}

/// Returns the bytes after an escape sequence. `bytes` starts after the ESC.
fn skip_escape(bytes: &[u8]) -> &[u8] {
    match bytes {
        // CSI: parameters, then one final byte.
        [b'[', rest @ ..] => {
            let end = rest.iter().position(|byte| !(0x20..0x40).contains(byte));
            end.map_or(&[], |at| &rest[at + 1..])
        }
        // OSC, DCS, SOS, PM, APC: text up to BEL or ST. Without a terminator the sequence runs to the end of the line.
        [b']' | b'P' | b'X' | b'^' | b'_', rest @ ..] => {
            let end = rest.iter().position(|byte| matches!(byte, 0x07 | 0x1b));
            end.map_or(&[], |at| match &rest[at..] {
                [0x1b, b'\\', after @ ..] | [0x07, after @ ..] => after,
                // A new sequence ends this one.
                other => other,
            })
        }
        // Intermediate bytes, then one final byte.
        rest => {
            let end = rest.iter().position(|byte| !(0x20..0x30).contains(byte));
            end.map_or(&[], |at| &rest[at + 1..])
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn cut(chunks: &[&[u8]]) -> Vec<(String, bool)> {
        let mut lines = Lines::default();
        let mut out = Vec::new();
        let mut each = |line: Line<'_>| out.push((line.text.to_owned(), line.overwritten));
        for chunk in chunks {
            lines.push(chunk, &mut each);
        }
        lines.finish(&mut each);
        out
    }

    fn one(bytes: &[u8]) -> String {
        let lines = cut(&[bytes]);
        assert_eq!(lines.len(), 1, "{lines:?}");
        lines[0].0.clone()
    }

    #[test]
    fn lines_end_where_a_terminal_ends_them() {
        let kept = |text: &str| (text.to_owned(), false);
        let over = |text: &str| (text.to_owned(), true);
        for (input, lines) in [
            (&b"a\nb\n"[..], vec![kept("a"), kept("b")]),
            (b"a\r\nb", vec![kept("a"), kept("b")]),
            (b"\n\n", vec![kept(""), kept("")]),
            (b"10%\r20%\r\n", vec![over("10%"), kept("20%")]),
            (b"\r\r10%\r\r\n", vec![kept("10%")]),
            (b"end\r", vec![kept("end")]),
            (b"", vec![]),
        ] {
            assert_eq!(cut(&[input]), lines, "{input:?}");
            let bytes: Vec<&[u8]> = input.chunks(1).collect();
            assert_eq!(cut(&bytes), lines, "{input:?} byte by byte");
        }
    }

    #[test]
    fn escape_sequences_and_broken_text_are_harmless() {
        for (input, text) in [
            (&b"\x1b[1;31mred\x1b[0m"[..], "red"),
            (b"\x1b]0;title\x07after", "after"),
            (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
            (b"a\x1b]0;never ended", "a"),
            (b"a\x1b[12;", "a"),
            (b"a\x1b", "a"),
            (b"\x1b(Bx\x1b=y", "xy"),
            (b"\x1bP payload \x1b[31mb", "b"),
            (b"a\tb\x08\x00c", "a bc"),
            (b"caf\xe9 \xc3\xa9", "caf\u{fffd} é"),
            (b"\xc2\x9b31m", "\\x9b31m"),
        ] {
            assert_eq!(one(input), text, "{input:?}");
        }
    }

    #[test]
    fn a_line_without_end_takes_little_memory() {
        let mut lines = Lines::default();
        let chunk = vec![b'x'; 1 << 20];
        for _ in 0..100 {
            lines.push(&chunk, |_| panic!("no line yet"));
        }
        assert!(lines.line.capacity() <= 2 * LINE_MAX);
        let mut length = 0;
        lines.push(b"\n", |line| {
            length = line.text.len();
            assert!(line.text.ends_with("x…"));
        });
        assert_eq!(length, LINE_MAX + '…'.len_utf8());
        let mut last = String::new();
        let text = format!("x{}\n", "é".repeat(LINE_MAX));
        lines.push(text.as_bytes(), |line| last = line.text.to_owned());
        assert!(last.ends_with("é…"), "{last}");
    }

    proptest! {
        #[test]
        fn any_bytes_in_any_pieces_give_the_same_safe_lines(
            bytes in proptest::collection::vec(
                prop_oneof![any::<u8>(), Just(b'\n'), Just(b'\r'), Just(0x1b), Just(b'[')], 0..300),
            at in 0_usize..300,
        ) {
            let at = at.min(bytes.len());
            let whole = cut(&[&bytes]);
            prop_assert_eq!(&whole, &cut(&[&bytes[..at], &bytes[at..]]));
            for (text, _) in whole {
                prop_assert!(!text.chars().any(char::is_control), "{:?}", text);
            }
        }
    }
}
