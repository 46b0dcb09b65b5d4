//! Owns types for names, which are validated when parsed, and the rule for names in a profile.

use std::fmt;

use super::error::Error;

/// The rule that a name breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidName(pub(crate) &'static str);

pub(crate) const NOT_SHORT: InvalidName = InvalidName(
    "a name is up to 64 of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit",
);

impl fmt::Display for InvalidName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.0)
    }
}

impl std::error::Error for InvalidName {}

impl From<InvalidName> for Error {
    fn from(error: InvalidName) -> Self {
        unexpected!("{error}")
    }
}

/// Returns whether a text is a valid name in a profile: it becomes a file name, a label and part of a command line.
pub(crate) fn is_short_name(text: &str) -> bool {
    let first = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let fine = |byte: u8| first(byte) || b"._-".contains(&byte);
    text.bytes().next().is_some_and(first) && text.len() <= 64 && text.bytes().all(fine)
}

/// Defines types for text that meets a condition, and the error for text that does not.
macro_rules! checked {
    ($($(#[$doc:meta])* $name:ident: $check:ident or $wrong:ident;)*) => {$(
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
        #[serde(try_from = "String")]
        pub struct $name(String);

        impl $name {
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<String> for $name {
            type Error = $crate::sys::name::InvalidName;

            fn try_from(text: String) -> Result<Self, $crate::sys::name::InvalidName> {
                match $check(&text) {
                    true => Ok(Self(text)),
                    false => Err($wrong),
                }
            }
        }

        impl std::str::FromStr for $name {
            type Err = $crate::sys::name::InvalidName;

            fn from_str(text: &str) -> Result<Self, $crate::sys::name::InvalidName> {
                text.to_owned().try_into()
            }
        }

        impl From<$name> for String {
            fn from(name: $name) -> Self {
                name.0
            }
        }

        impl std::ops::Deref for $name {
            type Target = str;

            fn deref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<String> for $name {
            fn borrow(&self) -> &String {
                &self.0
            }
        }

        impl AsRef<std::path::Path> for $name {
            fn as_ref(&self) -> &std::path::Path {
                std::path::Path::new(&self.0)
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

        impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl std::fmt::Debug for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.0.fmt(f)
            }
        }

        impl schemars::JsonSchema for $name {
            fn inline_schema() -> bool {
                true
            }

            fn schema_name() -> std::borrow::Cow<'static, str> {
                String::schema_name()
            }

            fn json_schema(generator: &mut schemars::SchemaGenerator) -> schemars::Schema {
                String::json_schema(generator)
            }
        }
    )*};
}

pub(crate) use checked;

checked! {
    /// Names a step of a profile, its log and its snapshot.
    StepName: is_short_name or NOT_SHORT;
}

impl StepName {
    /// Returns the name of the step that runs a hook's script; no file contains it.
    pub(crate) fn of_hook(hook: &str) -> Result<Self, InvalidName> {
        match is_short_name(hook) {
            true => Ok(Self(format!("hook-{hook}"))),
            false => Err(NOT_SHORT),
        }
    }

    /// Returns the name for a draft's step that has no valid one.
    pub(crate) fn of_draft() -> Self {
        Self("step".to_owned())
    }
}

#[cfg(test)]
impl From<&str> for StepName {
    fn from(text: &str) -> Self {
        text.parse().unwrap()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_steps_name_is_part_of_a_file_name() {
        let longest = "a".repeat(64);
        for good in ["a", "0", "a..b", "build_2-x.y", &longest] {
            assert_eq!(good.parse::<StepName>().unwrap(), good);
        }
        let long = "a".repeat(65);
        for bad in [
            "", ".", "..", ".a", "-a", "a/b", "/a", "A", "a b", "a\n", "é", &long,
        ] {
            assert_eq!(bad.parse::<StepName>(), Err(NOT_SHORT), "{bad:?}");
            assert_eq!(StepName::of_hook(bad), Err(NOT_SHORT), "{bad:?}");
        }
        let hook = StepName::of_hook(&longest).unwrap();
        assert_eq!(hook, format!("hook-{longest}").as_str());
        assert_eq!(serde_json::to_string(&hook).unwrap(), format!("\"{hook}\""));
    }
}
