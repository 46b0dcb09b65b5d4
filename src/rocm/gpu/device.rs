//! Owns a device node, on the host and in the container.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

/// A host device node in a container, as it was when the container was defined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Device {
    /// Absolute path in the container.
    pub path: String,
    /// Absolute path on the host, with links resolved.
    pub source: PathBuf,
    /// Major number, which may change when the driver is reloaded.
    pub major: u64,
    pub minor: u64,
    /// The node's group.
    pub gid: u32,
    pub mode: u32,
}
