//! Owns making untrusted text safe to show: names, error causes and build output can contain anything.
//!
//! Every character that a terminal acts on is shown as its escape (`\x1b`, `\n`, `\u{202e}`): control characters, the
//! C1 range that some terminals read as escape sequences, and the marks that change the direction of text.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fmt::Write as _;

use unicode_width::UnicodeWidthStr as _;

fn is_unsafe(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Replaces each character for which `escaped` holds with the output of `push`.
fn escape_where(
    text: &str,
    escaped: impl Fn(char) -> bool,
    push: impl Fn(&mut String, char) -> std::fmt::Result,
) -> Cow<'_, str> {
    if !text.chars().any(&escaped) {
        return Cow::Borrowed(text);
    }
    let mut safe = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match escaped(c) {
            true => push(&mut safe, c).expect("a string takes everything"),
            false => safe.push(c),
        }
    }
    Cow::Owned(safe)
}

fn push_escape(out: &mut String, c: char) -> std::fmt::Result {
    match c {
        '\n' | '\r' | '\t' => write!(out, "{}", c.escape_default()),
        c if u32::from(c) < 0x100 => write!(out, "\\x{:02x}", u32::from(c)),
        c => write!(out, "\\u{{{:x}}}", u32::from(c)),
    }
}

/// Escapes every character that a terminal acts on, for text on one line such as a name.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    escape_where(text, is_unsafe, push_escape)
}

/// Like [`escape`], but keeps newlines and tabs.
pub(crate) fn escape_lines(text: &str) -> Cow<'_, str> {
    escape_where(
        text,
        |c| is_unsafe(c) && c != '\n' && c != '\t',
        push_escape,
    )
}

/// Returns a path or an argument for display; bytes that are not UTF-8 are escaped as well.
pub(crate) fn os(text: impl AsRef<OsStr>) -> String {
    let mut safe = String::new();
    for chunk in text.as_ref().as_encoded_bytes().utf8_chunks() {
        safe.push_str(&escape(chunk.valid()));
        for byte in chunk.invalid() {
            write!(safe, "\\x{byte:02x}").expect("a string takes everything");
        }
    }
    safe
}

/// Returns `json` with the same characters, and `##[`, as JSON escapes. GitHub's runner executes `##[` anywhere in a
/// line. Both occur only inside strings.
pub(crate) fn escape_json(json: &str) -> Cow<'_, str> {
    let push = |out: &mut String, c| write!(out, "\\u{:04x}", u32::from(c));
    let safe = escape_where(json, |c| is_unsafe(c) && c != '\n', push);
    match safe.contains("##[") {
        true => Cow::Owned(safe.replace("##[", "#\\u0023[")),
        false => safe,
    }
}

/// Text that precedes a rockenv command, unless the command begins the text.
const BEFORE_COMMAND: [&str; 6] = ["`", ": ", "$(", "; ", ", or ", ", then "];

/// Returns `text` with its rockenv commands as the user has to type them: prefixed with `sudo` if set, and with
/// `--home`. Its directory is already quoted: `home` for every command, otherwise `sudo_home` for those with `sudo`.
pub(super) fn as_typed(
    text: &str,
    sudo: bool,
    home: Option<&str>,
    sudo_home: Option<&str>,
) -> String {
    // Commands that the user typed already have the option.
    let [home, sudo_home] =
        [home, home.or(sudo_home)].map(|home| home.filter(|_| !text.contains("--home")));
    let mut out = String::with_capacity(text.len() + 8);
    let mut rest = text;
    while let Some((before, after)) = rest.split_once("rockenv ") {
        out.push_str(before);
        let is_command =
            out.is_empty() || BEFORE_COMMAND.iter().any(|before| out.ends_with(before));
        if is_command && sudo {
            out.push_str("sudo ");
        }
        let home = match out.ends_with("sudo ") {
            true => sudo_home,
            false => home.filter(|_| is_command),
        };
        out.push_str("rockenv ");
        if let Some(home) = home {
            out.extend(["--home ", home, " "]);
        }
        rest = after;
    }
    out.push_str(rest);
    out
}

/// Breaks text at spaces into lines of at most `columns`. Text in backquotes stays on one line so that it can be
/// copied, and numbers stay with their units.
pub(crate) fn wrap(text: &str, columns: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    let mut used = 0;
    let (mut quoted, mut before) = (false, ' ');
    let words = text.split(|c: char| {
        quoted ^= c == '`';
        let breaks = c == ' ' && !quoted && !before.is_ascii_digit();
        before = c;
        breaks
    });
    for word in words {
        let width = word.width();
        let line = lines.last_mut().expect("it begins with one");
        if used > 0 && used + 1 + width > columns {
            lines.push(word.to_owned());
            used = width;
        } else {
            let gap = if line.is_empty() { "" } else { " " };
            used += gap.len() + width;
            line.push_str(gap);
            line.push_str(word);
        }
    }
    lines
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
    fn commands_keep_sudo() {
        // `@` marks where `sudo` is added.
        for marked in [
            "@rockenv ls",
            "sudo rockenv ls",
            "fix it, then: @rockenv up x",
            "free some (`@rockenv gc` shows what rockenv can free)",
            r#"eval "$(@rockenv env x)""#,
            "/home/u/rockenv is a directory",
            "@rockenv up x --pull, or @rockenv pull r:TAG",
            "pacman -Syu, then @rockenv setup",
        ] {
            let typed = as_typed(&marked.replace('@', ""), true, None, None);
            assert_eq!(typed, marked.replace('@', "sudo "));
        }
    }

    #[test]
    fn commands_keep_the_store() {
        for marked in [
            "fix it, then resume with: rockenv @up x; to start clean: rockenv @up x --clean",
            r#"eval "$(rockenv @env x)""#,
            "sudo rockenv @up ... --engine docker",
            "sudo rockenv --home 'a b' ls",
            "name the directory: ROCKENV_HOME=DIR rockenv fsck",
        ] {
            let typed = as_typed(&marked.replace('@', ""), false, Some("'a b'"), Some("/s"));
            assert_eq!(typed, marked.replace('@', "--home 'a b' "));
        }
        for text in ["rockenv ls", "sudo rockenv ls"] {
            for homes in [(Some("/s"), None), (None, Some("/s"))] {
                let typed = as_typed(text, true, homes.0, homes.1);
                assert_eq!(typed, "sudo rockenv --home /s ls");
            }
        }
    }

    #[test]
    fn text_breaks_at_spaces_outside_of_commands() {
        for (text, columns, lines) in [
            ("", 9, &[""][..]),
            ("one two three", 9, &["one two", "three"]),
            ("one two three", 3, &["one", "two", "three"]),
            ("run `a b c`, or d", 9, &["run", "`a b c`,", "or d"]),
            ("run `a b", 5, &["run", "`a b"]),
            ("needs 1.5 GiB", 9, &["needs", "1.5 GiB"]),
            ("日本 日本", 8, &["日本", "日本"]),
        ] {
            assert_eq!(wrap(text, columns), lines, "{text}");
        }
    }
}
