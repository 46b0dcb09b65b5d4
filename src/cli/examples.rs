//! Owns the examples at the end of each command's help and manual page.

use std::sync::LazyLock;

/// Command lines, each with its purpose.
type Examples = Vec<(&'static str, &'static str)>;

/// Examples by command path.
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

/// Returns the examples of a command, by its path.
pub fn examples(path: &str) -> &'static [(&'static str, &'static str)] {
    let found = EXAMPLES.iter().find(|(known, _)| *known == path);
    found.map_or(&[], |(_, examples)| examples)
}
