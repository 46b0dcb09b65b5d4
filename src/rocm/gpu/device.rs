//! Owns what a device node is, outside and inside.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A device node of the host inside a container, as it was when the container was described.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Absolute path inside.
    pub path: String,
    /// Absolute path outside, without links on the way.
    pub source: PathBuf,
    /// Major number, which the kernel may give to another driver when this one is loaded again.
    pub major: u64,
    /// Minor number.
    pub minor: u64,
    /// The group that may open it.
    pub gid: u32,
    /// Permission bits.
    pub mode: u32,
}
