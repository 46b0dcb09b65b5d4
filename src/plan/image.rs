//! Owns the description of a built image, `image.json`: plain data.

use std::collections::BTreeMap;

use jiff::Timestamp;
use serde::{Deserialize, Serialize};

use super::ids::{ImageKey, Sha256Hex};
use crate::image::Package;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Image {
    /// Names its directory: recipe, resolved inputs, packages and content.
    pub key: ImageKey,
    /// Recipe's name when it was built.
    pub name: String,
    pub recipe: Sha256Hex,
    /// Digest of the manifest that the recipe resolved to, for a container image.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resolved: Option<String>,
    /// Environment variables of a container image; `None` for other images.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<BTreeMap<String, String>>,
    pub digest: String,
    pub built: Timestamp,
    /// Latest modification time in the tree, in seconds since 1970; rebuilding with it gives the same tree.
    pub source_date: i64,
    /// Distribution, as its os-release names it.
    pub distribution: String,
    pub packages: Vec<Package>,
    /// Apparent size of its files, in bytes.
    pub bytes: u64,
    /// Build time, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub took_ms: Option<u64>,
}
