//! Owns "did you mean": finding the known name closest to a mistyped one.

/// Returns the known name closest to `typed`, unless even that one is too different.
pub(crate) fn closest<'a>(
    typed: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // The distance is quadratic, and nobody mistypes a name of this length.
    if typed.len() > 128 {
        return None;
    }
    let typed = typed.to_ascii_lowercase();
    let limit = match typed.chars().count() {
        0..=2 => 1,
        3..=5 => 2,
        _ => 3,
    };
    known
        .into_iter()
        .map(|name| (distance(&typed, &name.to_ascii_lowercase()), name))
        .filter(|(distance, _)| *distance <= limit)
        .min_by_key(|(distance, _)| *distance)
        .map(|(_, name)| name)
}

/// Returns the number of insertions, deletions, substitutions and swaps of neighbours from `a` to `b`.
fn distance(a: &str, b: &str) -> usize {
    let (a, b): (Vec<char>, Vec<char>) = (a.chars().collect(), b.chars().collect());
    let mut before = vec![0; b.len() + 1];
    let mut last: Vec<usize> = (0..=b.len()).collect();
    for i in 1..=a.len() {
        let mut row = vec![i; b.len() + 1];
        for j in 1..=b.len() {
            let same = usize::from(a[i - 1] != b[j - 1]);
            row[j] = (last[j] + 1).min(row[j - 1] + 1).min(last[j - 1] + same);
            if i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] {
                row[j] = row[j].min(before[j - 2] + 1);
            }
        }
        before = std::mem::replace(&mut last, row);
    }
    last[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn distances() {
        for (a, b, want) in [
            ("", "", 0),
            ("a", "", 1),
            ("volmue", "volume", 1),
            ("ccache", "cache", 1),
            ("gfx1103", "gfx1130", 1),
            ("kitten", "sitting", 3),
        ] {
            assert_eq!(distance(a, b), want, "{a} {b}");
            assert_eq!(distance(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn far_names_are_not_suggested() {
        assert_eq!(closest("volum", ["step", "volume"]), Some("volume"));
        assert_eq!(closest("GFX1103", ["gfx1103"]), Some("gfx1103"));
        assert_eq!(closest("colour", ["step", "volume"]), None);
        assert_eq!(closest(&"x".repeat(1_000_000), ["step"]), None);
    }
}
