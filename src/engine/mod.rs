//! Owns running containers. Engines are a closed set. Each step, `exec` and `shell` gets its own container, or joins
//! the running one.
//!
//! A *holder* process ([`hold`]) creates a container, and owns its mounts, its control group and its end. Inside, an
//! *agent* ([`agent`]) starts commands for clients ([`session`]). If one of them dies, the others see a closed socket
//! and end the container.

pub(crate) mod ninja;
pub(crate) mod shim;

pub(crate) mod agent;
pub(crate) mod build_user;
pub(crate) mod cgroup;
pub(crate) mod choose;
pub(crate) mod docker;
pub(crate) mod hold;
pub(crate) mod job_slots;
pub(crate) mod jobserver;
mod memory;
pub(crate) mod nspawn;
mod pressure;
pub(crate) mod session;
mod start_command;
pub(crate) mod wire;

use std::path::{Path, PathBuf};

use nix::sys::resource::{Resource, getrlimit};
use serde::{Deserialize, Serialize};

use crate::image::certificates::ContainerAuthorities;
pub(crate) use crate::plan::record::Usage;
pub(crate) use crate::rocm::gpu::Device;
use crate::sys::error::Result;

pub(crate) use build_user::BuildUser;
pub(crate) use cgroup::Limits;

/// The tree of a container, and thereby its engine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub enum Root {
    /// A directory or subvolume, used directly.
    Directory(PathBuf),
    /// An overlay of layers alone: the last of them is the directory of the view.
    Overlay(View),
    /// A container of a service, which keeps its own trees.
    Service(docker::ContainerTree),
}

/// A directory or file of the host inside a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Bind {
    /// Absolute path outside.
    pub source: PathBuf,
    /// Absolute path inside.
    pub target: String,
    /// Refuses writes inside.
    pub read_only: bool,
    /// `source` contains no symlink. One that appears later is not followed.
    pub is_real: bool,
    /// An overlay on the directory that receives writes, so that the directory stays unchanged.
    pub view: Option<View>,
}

impl Bind {
    pub(crate) fn writable(source: impl Into<PathBuf>, target: impl Into<String>) -> Self {
        Self {
            source: source.into(),
            target: target.into(),
            read_only: false,
            is_real: false,
            view: None,
        }
    }

    pub(crate) fn read_only(source: impl Into<PathBuf>, target: impl Into<String>) -> Self {
        Self {
            read_only: true,
            ..Self::writable(source, target)
        }
    }
}

/// A view of a directory: an overlay on it, mounted by the holder in its own mount namespace.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct View {
    /// Frozen changes, topmost first.
    // The name in the request of a command that began before an upgrade.
    #[serde(alias = "lowers")]
    pub layers: Vec<PathBuf>,
    /// Directory of further changes.
    pub upper: PathBuf,
    /// The overlay's scratch directory, on the same file system as `upper`.
    pub work: PathBuf,
}

/// Returns the limits of open files in a container, soft and hard: those of this process.
fn open_files() -> Result<(u64, u64)> {
    // Some old programs close every descriptor that could be open.
    const MOST: u64 = 1 << 19;
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE)?;
    Ok((soft.min(MOST), hard.min(MOST)))
}

/// Everything that defines a container.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Container {
    /// Unique name of the machine, control group and scope, at most 64 characters.
    pub id: String,
    pub root: Root,
    /// Host directories inside, in order.
    pub binds: Vec<Bind>,
    /// Device nodes passed through, and no others.
    pub devices: Vec<Device>,
    /// Keep the groups of an ordinary user, which may be needed to open the devices, if the engine runs as that user.
    pub keep_groups: bool,
    /// The host's network, or none at all.
    pub network: bool,
    pub limits: Limits,
    /// The user to add to `/etc/passwd`, if commands run as one.
    pub user: Option<BuildUser>,
    /// Certificate authorities in addition to those of its tree.
    #[serde(default)]
    pub certificates: Option<ContainerAuthorities>,
}

impl Container {
    /// Mounts the configured authorities over the certificate lists of the tree, and creates nothing in the tree.
    pub(crate) fn show_certificates(&mut self, tree: Option<&Path>, run: &Path) -> Result<()> {
        let Some(given) = self.certificates.take() else {
            return Ok(());
        };
        let (source, targets) = given.install(tree, run)?;
        let binds = targets
            .into_iter()
            .map(|target| Bind::read_only(&source, target));
        self.binds.extend(binds);
        Ok(())
    }
}
