//! Owns a device node, outside and inside.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A device node of the host inside a container, as it was when the container was defined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Absolute path inside.
    pub path: String,
    /// Absolute path outside, with links resolved.
    pub source: PathBuf,
    /// Major number, which may change when the driver is reloaded.
    pub major: u64,
    pub minor: u64,
    /// The group that may open it.
    pub gid: u32,
    pub mode: u32,
}
