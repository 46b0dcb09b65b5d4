//! Owns which variables of a container image become defaults that the profile overrides, and in which form.

use std::collections::BTreeMap;

use crate::profile::{BIN, references};

/// Returns whether only rockenv may set a variable. An image decides neither the user nor the jobs of a build.
fn is_own(name: &str) -> bool {
    let own = [
        "HOME",
        "USER",
        "LOGNAME",
        "PWD",
        "OLDPWD",
        "container",
        "MAKEFLAGS",
    ];
    own.contains(&name) || name.starts_with("ROCKENV_")
}

/// Returns the defaults, in late form.
pub(super) fn defaults(image: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let taken = image.iter().filter(|(name, _)| !is_own(name));
    taken
        .map(|(name, value)| match name.as_str() {
            "PATH" => (
                name.clone(),
                references::escape_all(&format!("{BIN}:{value}")),
            ),
            _ => (name.clone(), references::escape_all(value)),
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::resolve::{Facts, finish};

    #[test]
    fn values_are_text_and_what_is_rockenv_s_stays_rockenv_s() {
        let image = [
            ("PATH", "/opt/bin:/bin"),
            ("PS1", "${jobs} $${memory} $"),
            ("LINES_", "a\nb"),
            ("HOME", "/nowhere"),
            ("MAKEFLAGS", "-j"),
            ("ROCKENV_ENV", "other"),
        ];
        let image = image.map(|(name, value)| (name.to_owned(), value.to_owned()));
        let found = defaults(&image.into());
        let facts = Facts {
            jobs: 8,
            link_jobs: 1,
            tensile_jobs: 1,
            memory: 1,
        };
        let found: Vec<(&str, String)> = found
            .iter()
            .map(|(name, value)| (name.as_str(), finish(value, &facts)))
            .collect();
        let expected = [
            ("LINES_", "a\nb"),
            ("PATH", "/run/rockenv/bin:/opt/bin:/bin"),
            ("PS1", "${jobs} $${memory} $"),
        ];
        assert_eq!(
            found,
            expected.map(|(name, value)| (name, value.to_owned()))
        );
    }
}
