//! Words as a shell reads them.

use std::borrow::Cow;
use std::path::Path;

/// Returns a word as a shell has to read it.
pub(crate) fn quoted(word: &str) -> Cow<'_, str> {
    // No argument of a process can hold the one character that cannot be quoted.
    shlex::try_quote(word).unwrap_or(Cow::Borrowed(word))
}

/// Returns a path as a shell has to read it.
pub(crate) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy()).into_owned()
}
