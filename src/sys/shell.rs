//! Words as a shell reads them.

use std::borrow::Cow;

/// Returns a word as a shell has to read it.
pub(crate) fn quoted(word: &str) -> Cow<'_, str> {
    // No argument of a process can hold the one character that cannot be quoted.
    shlex::try_quote(word).unwrap_or(Cow::Borrowed(word))
}
