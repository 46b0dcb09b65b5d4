//! Words as a shell reads them.

use std::borrow::Cow;
use std::path::Path;

pub(crate) fn quoted(word: &str) -> Cow<'_, str> {
    // The one character that cannot be quoted is NUL, which no process argument can contain.
    shlex::try_quote(word).unwrap_or(Cow::Borrowed(word))
}

pub(crate) fn quoted_path(path: &Path) -> String {
    quoted(&path.to_string_lossy()).into_owned()
}
