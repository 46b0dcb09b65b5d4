//! Owns which variables of a container image become defaults that the profile overrides, and in which form.

use std::collections::BTreeMap;

use crate::profile::BIN;
use crate::profile::references::escape;

/// Returns whether only rockenv may set a variable. An image decides neither the user nor the jobs of a build.
fn is_own(name: &str) -> bool {
    let own = "HOME USER LOGNAME PWD OLDPWD container MAKEFLAGS";
    own.split(' ').any(|own| own == name) || name.starts_with("ROCKENV_")
}

/// Returns the defaults, in late form.
pub(super) fn defaults(image: &BTreeMap<String, String>) -> BTreeMap<String, String> {
    let taken = image.iter().filter(|(name, _)| !is_own(name));
    let value = |(name, value): (&String, &String)| match name.as_str() {
        "PATH" => (name.clone(), escape(&format!("{BIN}:{value}"))),
        _ => (name.clone(), escape(value)),
    };
    taken.map(value).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_rockenv_s_stays_rockenv_s() {
        let image =
            ["HOME", "MAKEFLAGS", "ROCKENV_ENV"].map(|name| (name.to_owned(), String::new()));
        assert_eq!(defaults(&image.into()), BTreeMap::new());
    }
}
