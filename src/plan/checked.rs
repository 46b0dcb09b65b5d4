//! Owns reading names from the store's files: each becomes part of a path, so none may lead out of its directory.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};

/// Maximum length of a file name on all file systems.
const LONGEST: usize = 255;

/// Why a file with such a name is not used.
pub(crate) const LEADS_OUT: &str = "a name in it is empty or leads out of its directory";

/// Returns whether a text can be the name of an entry in a directory: one component of letters, digits and `. _ - +`.
pub(crate) fn is_name(text: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
    !text.is_empty()
        && text.len() <= LONGEST
        && text.bytes().all(fine)
        && !text.starts_with('.')
        && !text.contains("..")
}

/// Returns whether a path stays below the directory that it is joined to.
fn is_below(path: &Path) -> bool {
    let mut parts = path.components();
    path.components().next().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

/// A value that contains names.
pub(crate) trait Names {
    fn all(&self, test: fn(&str) -> bool) -> bool;
}

impl Names for String {
    fn all(&self, test: fn(&str) -> bool) -> bool {
        test(self)
    }
}

impl<T: Names> Names for Option<T> {
    fn all(&self, test: fn(&str) -> bool) -> bool {
        self.as_ref().is_none_or(|inner| inner.all(test))
    }
}

impl<T: Names> Names for Vec<T> {
    fn all(&self, test: fn(&str) -> bool) -> bool {
        self.iter().all(|inner| inner.all(test))
    }
}

impl<V: Names> Names for BTreeMap<String, V> {
    fn all(&self, test: fn(&str) -> bool) -> bool {
        self.iter().all(|(key, inner)| test(key) && inner.all(test))
    }
}

pub(crate) fn names<'de, D: Deserializer<'de>, T: Deserialize<'de> + Names>(
    from: D,
) -> Result<T, D::Error> {
    read(from, is_name)
}

/// Reads a path below a directory, as text.
pub(crate) fn below<'de, D: Deserializer<'de>, T: Deserialize<'de> + Names>(
    from: D,
) -> Result<T, D::Error> {
    read(from, |text| is_below(Path::new(text)))
}

pub(crate) fn path_below<'de, D: Deserializer<'de>>(from: D) -> Result<PathBuf, D::Error> {
    let path = PathBuf::deserialize(from)?;
    match is_below(&path) {
        true => Ok(path),
        false => Err(D::Error::custom(LEADS_OUT)),
    }
}

fn read<'de, D: Deserializer<'de>, T: Deserialize<'de> + Names>(
    from: D,
    test: fn(&str) -> bool,
) -> Result<T, D::Error> {
    let value = T::deserialize(from)?;
    match value.all(test) {
        true => Ok(value),
        false => Err(D::Error::custom(LEADS_OUT)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component() {
        for good in ["a", "0f", "c++", "1234-build-5678", "A.b_c"] {
            assert!(is_name(good), "{good}");
        }
        let long = "a".repeat(256);
        for bad in [
            "", ".", "..", "a/b", "/a", "a..b", ".a", "a\0", "a\n", &long,
        ] {
            assert!(!is_name(bad), "{bad:?}");
        }
    }

    #[test]
    fn a_path_stays_below() {
        for (path, good) in [
            ("a/b", true),
            ("logs/2026/x.log", true),
            ("", false),
            ("/a", false),
            ("a/../../b", false),
            ("..", false),
        ] {
            assert_eq!(is_below(Path::new(path)), good, "{path}");
        }
    }
}
