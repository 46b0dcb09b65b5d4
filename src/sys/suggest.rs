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
        .map(|name| {
            (
                strsim::osa_distance(&typed, &name.to_ascii_lowercase()),
                name,
            )
        })
        .filter(|(distance, _)| *distance <= limit)
        // Letters that changed places are likelier than wrong ones.
        .min_by_key(|(distance, name)| (*distance, sorted(name) != sorted(&typed)))
        .map(|(_, name)| name)
}

/// Returns the help for an unknown name: the closest known one, or else `otherwise`.
pub(crate) fn help<'a>(
    typed: &str,
    known: impl IntoIterator<Item = &'a str>,
    otherwise: &str,
) -> String {
    match closest(typed, known) {
        Some(close) => format!("did you mean `{close}`?"),
        None => otherwise.to_owned(),
    }
}

/// Returns the help for an unknown name among a few: the closest one, and all of them.
pub(crate) fn among(typed: &str, known: &[&str], what: &str) -> String {
    let all = format!("{what}: {}", known.join(", "));
    match closest(typed, known.iter().copied()) {
        Some(close) => format!("did you mean `{close}`? {all}"),
        None => all,
    }
}

fn sorted(text: &str) -> Vec<char> {
    let mut letters: Vec<char> = text.to_ascii_lowercase().chars().collect();
    letters.sort_unstable();
    letters
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
            assert_eq!(strsim::osa_distance(a, b), want, "{a} {b}");
            assert_eq!(strsim::osa_distance(b, a), want, "{b} {a}");
        }
    }

    #[test]
    fn far_names_are_not_suggested() {
        assert_eq!(closest("volum", ["step", "volume"]), Some("volume"));
        let known = ["gfx1100", "gfx1030", "gfx1103"];
        assert_eq!(closest("gfx1130", known), Some("gfx1103"));
        assert_eq!(closest("GFX1103", ["gfx1103"]), Some("gfx1103"));
        assert_eq!(closest("colour", ["step", "volume"]), None);
        assert_eq!(closest(&"x".repeat(1_000_000), ["step"]), None);
    }
}
