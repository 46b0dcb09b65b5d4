//! Owns the examples at the end of each command's help and manual page.

use std::sync::LazyLock;

/// Lines to type, each with its purpose.
type Examples = Vec<(&'static str, &'static str)>;

/// The examples of each command, by its words.
pub(super) static EXAMPLES: LazyLock<Vec<(&str, Examples)>> = LazyLock::new(|| {
    let mut all: Vec<(&str, Examples)> = Vec::new();
    for line in include_str!("examples.txt").lines() {
        if let Some(path) = line
            .strip_prefix('[')
            .and_then(|line| line.strip_suffix(']'))
        {
            all.push((path, Vec::new()));
        } else if let (Some((_, last)), Some(example)) = (all.last_mut(), line.split_once("  # ")) {
            last.push(example);
        }
    }
    all
});

/// Returns the examples of a command, by its words.
pub fn examples(path: &str) -> &'static [(&'static str, &'static str)] {
    let found = EXAMPLES.iter().find(|(known, _)| *known == path);
    found.map_or(&[], |(_, examples)| examples)
}
