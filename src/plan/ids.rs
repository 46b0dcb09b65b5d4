//! Owns the identifiers of the store's objects. Each becomes part of a path, so each is checked when it is parsed: no
//! file that is read can lead out of a directory.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::checked::{self, is_name};
use crate::sys::error::Error;

/// What is wrong with a name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidName(&'static str);

const LEADS_OUT: InvalidName = InvalidName(checked::LEADS_OUT);
const NO_KEY: InvalidName = InvalidName("a key is 64 hexadecimal digits");

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for InvalidName {}

impl From<InvalidName> for Error {
    fn from(error: InvalidName) -> Self {
        Self::unexpected(error.to_string())
    }
}

fn is_sha256(text: &str) -> bool {
    let digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    text.len() == 64 && text.bytes().all(digit)
}

macro_rules! checked {
    ($($(#[$doc:meta])* $name:ident: $check:ident or $wrong:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = InvalidName;

            fn try_from(text: String) -> Result<Self, InvalidName> {
                match $check(&text) {
                    true => Ok(Self(text)),
                    false => Err($wrong),
                }
            }
        }

        impl FromStr for $name {
            type Err = InvalidName;

            fn from_str(text: &str) -> Result<Self, InvalidName> {
                text.to_owned().try_into()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl AsRef<Path> for $name {
            fn as_ref(&self) -> &Path {
                Path::new(&self.0)
            }
        }

        impl PartialEq<str> for $name {
            fn eq(&self, other: &str) -> bool {
                self.0 == other
            }
        }

        impl PartialEq<&str> for $name {
            fn eq(&self, other: &&str) -> bool {
                self.0 == *other
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.fmt(f)
            }
        }

        impl JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                String::schema_name()
            }

            fn json_schema(generator: &mut SchemaGenerator) -> Schema {
                String::json_schema(generator)
            }
        }
    )*};
}

checked! {
    /// Names a layer's directory in `layers/`: the key of its step, or random digits.
    LayerId: is_name or LEADS_OUT;
    /// Names a live tree's directory in `envs/<name>/trees/`.
    TreeId: is_name or LEADS_OUT;
    /// Random and never reused: prefix of the names of an env's build volumes.
    EnvId: is_name or LEADS_OUT;
    /// Identifies the content of a snapshot: a SHA-256 in lower-case hexadecimal.
    StepKey: is_sha256 or NO_KEY;
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
        // A parent has no NUL, so no two pairs are hashed alike.
        hash.update([0]);
        hash.update(content);
        Self(hex::encode(hash.finalize()))
    }
}

/// Reads and writes an optional name, with an empty text for `None`.
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
impl From<&str> for LayerId {
    fn from(text: &str) -> Self {
        text.parse().unwrap()
    }
}

#[cfg(test)]
impl From<&str> for TreeId {
    fn from(text: &str) -> Self {
        text.parse().unwrap()
    }
}

#[cfg(test)]
impl From<&str> for EnvId {
    fn from(text: &str) -> Self {
        text.parse().unwrap()
    }
}

/// Makes a key from any text, for tests.
#[cfg(test)]
impl From<&str> for StepKey {
    fn from(text: &str) -> Self {
        text.parse().unwrap_or_else(|_| Self::hash("test", text))
    }
}
