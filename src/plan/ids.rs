//! Owns the identifiers of the store's objects. Each becomes part of a path, so parsing checks it: no stored file can
//! lead out of its directory.

use std::path::{Component, Path};

use serde::{Deserialize as _, Deserializer};
use sha2::{Digest as _, Sha256};

use crate::sys::checksum::is_lower_sha256;
use crate::sys::name::{InvalidName, NOT_SHORT, checked, is_short_name};

const LEADS_OUT: InvalidName = InvalidName("a name in it is empty or leads out of its directory");
const NO_SHA256: InvalidName = InvalidName("a key or digest is 64 hexadecimal digits");

/// Maximum length of a file name on all file systems.
const LONGEST: usize = 255;

/// Returns whether a text can name a directory entry: one component of letters, digits and `. _ - +`.
fn is_name(text: &str) -> bool {
    let fine = |byte: u8| byte.is_ascii_alphanumeric() || b"._-+".contains(&byte);
    !text.is_empty() && text.len() <= LONGEST && text.bytes().all(fine) && !text.starts_with('.')
}

/// Returns whether a text can name an env. Engines use the name too.
fn is_env_name(text: &str) -> bool {
    is_short_name(text) && !text.contains("..")
}

/// Returns whether a path stays below the directory that it is joined to.
fn is_below(text: &str) -> bool {
    let mut parts = Path::new(text).components().peekable();
    parts.peek().is_some() && parts.all(|part| matches!(part, Component::Normal(_)))
}

checked! {
    /// Names a layer's directory in `layers/`: the key of its step, or random digits.
    LayerId: is_name or LEADS_OUT;
    /// Names a live tree's directory in `envs/<name>/trees/`.
    TreeId: is_name or LEADS_OUT;
    /// Random and never reused: prefix of the names of an env's build volumes.
    EnvId: is_name or LEADS_OUT;
    /// Identifies the content of a snapshot: a SHA-256 in lower-case hexadecimal.
    StepKey: is_lower_sha256 or NO_SHA256;
    /// Names an image's directory in `images/`: recipe, resolved inputs, packages and content.
    ImageKey: is_name or LEADS_OUT;
    /// Names a live build volume's directory in `volumes/`.
    VolumeId: is_name or LEADS_OUT;
    /// Names a volume of a profile, and its frozen state in a layer.
    VolumeName: is_name or LEADS_OUT;
    /// Names an env: its directory in `envs/`, and its containers.
    EnvName: is_env_name or NOT_SHORT;
    /// A SHA-256 in lower-case hexadecimal.
    Sha256Hex: is_lower_sha256 or NO_SHA256;
    /// Names a layer of an env's view of a source.
    ViewLayerId: is_name or LEADS_OUT;
    /// A path below a directory of the store.
    PathBelow: is_below or LEADS_OUT;
}

impl From<StepKey> for LayerId {
    fn from(key: StepKey) -> Self {
        Self(key.0)
    }
}

impl StepKey {
    /// Returns the key of `content` on top of the key `parent`.
    pub(super) fn hash(parent: &str, content: &str) -> Self {
        let mut hash = Sha256::new();
        hash.update(parent);
        // A parent contains no NUL, so two different pairs never hash the same bytes.
        hash.update([0]);
        hash.update(content);
        Self(hex::encode(hash.finalize()))
    }

    /// Returns a key of no step, for a snapshot of this key's step that was made from other sources.
    pub(crate) fn of_no_step(&self) -> Self {
        Self::hash(&self.0, "made from other sources")
    }
}

/// Reads and checks a volume name; returns it as text.
pub(crate) fn volume_name<'de, D: Deserializer<'de>>(from: D) -> Result<String, D::Error> {
    VolumeName::deserialize(from).map(Into::into)
}

/// Reads and writes an optional name; `None` is an empty text.
pub(crate) mod or_empty {
    use std::fmt::Display;
    use std::str::FromStr;

    use serde::de::Error as _;
    use serde::{Deserialize as _, Deserializer, Serializer};

    #[expect(clippy::ref_option, reason = "the signature that serde calls")]
    pub(crate) fn serialize<T: Display, S: Serializer>(
        name: &Option<T>,
        to: S,
    ) -> Result<S::Ok, S::Error> {
        match name {
            Some(name) => to.collect_str(name),
            None => to.serialize_str(""),
        }
    }

    pub(crate) fn deserialize<'de, T: FromStr<Err: Display>, D: Deserializer<'de>>(
        from: D,
    ) -> Result<Option<T>, D::Error> {
        match String::deserialize(from)?.as_str() {
            "" => Ok(None),
            text => text.parse().map(Some).map_err(D::Error::custom),
        }
    }
}

#[cfg(test)]
macro_rules! parsed_in_tests {
    ($($name:ident)*) => {$(
        impl From<&str> for $name {
            fn from(text: &str) -> Self {
                text.parse().unwrap()
            }
        }
    )*};
}

#[cfg(test)]
parsed_in_tests! { LayerId TreeId EnvId EnvName ImageKey VolumeId VolumeName PathBelow }

/// Makes a key from any text, for tests.
#[cfg(test)]
impl From<&str> for StepKey {
    fn from(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self::hash("test", text))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_one_component() {
        for good in ["a", "0f", "c++", "1234-build-5678", "A.b_c", "a..b"] {
            assert!(is_name(good), "{good}");
        }
        let long = "a".repeat(256);
        for bad in ["", ".", "..", "a/b", "/a", ".a", "a\0", "a\n", &long] {
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
            assert_eq!(is_below(path), good, "{path}");
        }
    }
}
