//! Owns `At`: a value of a TOML file with its position in the text, for errors that point at it.

use std::cmp::Ordering;
use std::fmt;
use std::ops::{Deref, Range};

use schemars::JsonSchema;
use serde::{Deserialize, Deserializer, Serialize};
use serde_spanned::Spanned;

/// A byte range of a text.
pub(crate) type Place = Range<usize>;

pub(crate) fn line(text: &str, at: usize) -> usize {
    1 + text.get(..at).unwrap_or_default().matches('\n').count()
}

// A value and its position; JSON has only the value. A doc comment would become the description in every schema.
#[derive(Clone, Debug, Serialize, JsonSchema)]
#[serde(transparent)]
pub struct At<T> {
    pub value: T,
    #[serde(skip)]
    pub place: Place,
}

impl<T> Deref for At<T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: PartialEq> PartialEq for At<T> {
    fn eq(&self, other: &Self) -> bool {
        self.value == other.value
    }
}

impl<T: Eq> Eq for At<T> {}

impl<T: PartialOrd> PartialOrd for At<T> {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        self.value.partial_cmp(&other.value)
    }
}

impl<T: Ord> Ord for At<T> {
    fn cmp(&self, other: &Self) -> Ordering {
        self.value.cmp(&other.value)
    }
}

impl<T: fmt::Display> fmt::Display for At<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.value.fmt(f)
    }
}

impl<'de, T: Deserialize<'de>> Deserialize<'de> for At<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let spanned = Spanned::deserialize(deserializer)?;
        let place = spanned.span();
        let value = spanned.into_inner();
        Ok(Self { value, place })
    }
}
