//! Owns "did you mean": finding the known name closest to a mistyped one.

/// Maximum number of known names compared with a mistyped one: there may be thousands.
pub(crate) const MOST_COMPARED: usize = 200;

/// Returns the known name closest to `typed`, or else the only one that begins with it. Considers only the first
/// [`MOST_COMPARED`] names.
pub(crate) fn closest<'a>(
    typed: &str,
    known: impl IntoIterator<Item = &'a str>,
) -> Option<&'a str> {
    // The distance takes quadratic time, and a name of this length is not a typing error.
    if typed.len() > 128 {
        return None;
    }
    let typed = typed.to_ascii_lowercase();
    let limit = match typed.chars().count() {
        0..=2 => 1,
        3..=5 => 2,
        _ => 3,
    };
    let known: Vec<(String, &str)> = known
        .into_iter()
        .take(MOST_COMPARED)
        .map(|name| (name.to_ascii_lowercase(), name))
        .collect();
    let near = known
        .iter()
        .map(|(lower, name)| (strsim::osa_distance(&typed, lower), *name))
        .filter(|(distance, _)| *distance <= limit)
        // Swapped letters are likelier than wrong ones.
        .min_by_key(|(distance, name)| (*distance, sorted(name) != sorted(&typed)));
    if let Some((_, name)) = near {
        return Some(name);
    }
    // The user may have typed a profile's name for its env's, which also contains the target.
    let mut longer = known.iter().filter(|(lower, _)| lower.starts_with(&typed));
    match (longer.next(), longer.next()) {
        (Some((_, name)), None) if typed.len() > 2 => Some(name),
        _ => None,
    }
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
pub(crate) fn choices_help(typed: &str, known: &[&str], what: &str) -> String {
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
    fn far_names_are_not_suggested() {
        assert_eq!(closest("volum", ["step", "volume"]), Some("volume"));
        let known = ["gfx1100", "gfx1030", "gfx1103"];
        assert_eq!(closest("gfx1130", known), Some("gfx1103"));
        assert_eq!(closest("GFX1103", ["gfx1103"]), Some("gfx1103"));
        assert_eq!(closest("colour", ["step", "volume"]), None);
        assert_eq!(closest(&"x".repeat(1_000_000), ["step"]), None);
    }

    #[test]
    fn of_many_names_the_first_are_compared() {
        let behind = |count| std::iter::repeat_n("step", count).chain(["volume"]);
        let last = MOST_COMPARED - 1;
        assert_eq!(closest("volum", behind(last)), Some("volume"));
        assert_eq!(closest("volum", behind(last + 1)), None);
    }

    #[test]
    fn the_only_name_that_begins_so_is_suggested() {
        let known = ["mine-gfx1103", "mine-gfx90a", "smoke-gfx1103"];
        assert_eq!(closest("smoke", known), Some("smoke-gfx1103"));
        assert_eq!(closest("SMOKE-g", known), Some("smoke-gfx1103"));
        assert_eq!(closest("mine", known), None);
        assert_eq!(closest("s", known), None);
        assert_eq!(closest("", ["smoke-gfx1103"]), None);
    }
}
