//! Owns the GPUs of this machine: the compute driver's list, the device nodes, choosing a GPU for an env, and proving
//! in the container that it can be used.
//!
//! All paths are below a root directory, so that tests can simulate other machines.

pub(crate) mod probe;
pub(crate) mod select;
#[cfg(test)]
mod tests;
mod topology;

use std::collections::{BTreeMap, BTreeSet};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde::{Deserialize, Serialize};

pub(crate) use select::{Choice, Selector};

use crate::rocm::target::Target;
use crate::sys::error::Result;
use crate::sys::host::names_in;

/// The compute driver's node, shared by all GPUs.
pub(crate) const KFD: &str = "/dev/kfd";
const DRI: &str = "/dev/dri";

/// A GPU as the compute driver lists it. Each partition of an accelerator counts as a GPU.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Gpu {
    /// Position in the driver's list. HIP uses the same numbering.
    pub index: usize,
    /// Name of the ISA, such as `gfx1103`. TheRock need not support it.
    pub isa: String,
    /// PCI address, such as `0000:03:00.0`.
    pub pci: String,
    /// Partition number, if the device is partitioned.
    pub partition: Option<u32>,
    /// Name of the render node, such as `renderD128`.
    pub render: String,
    /// The GPU's own memory, in bytes. For an integrated GPU, the memory that the firmware reserves; in newer kernels
    /// the memory that the kernel lends it, if that is more.
    pub memory: u64,
    pub compute_units: u32,
}

impl Gpu {
    /// Returns the target to build for, if TheRock supports the ISA.
    pub(crate) fn target(&self) -> Option<Target> {
        Target::parse(&self.isa).ok()
    }

    pub(crate) fn render_node(&self) -> String {
        format!("{DRI}/{}", self.render)
    }
}

impl std::fmt::Display for Gpu {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} ({}, {})", self.pci, self.isa, self.render)
    }
}

/// Device nodes that a profile can request in addition to the GPU's own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Extras {
    /// `/dev/accel/*`: inference accelerators.
    #[serde(default)]
    pub accel: bool,
    /// `/dev/dma_heap/*`: buffers shared between devices.
    #[serde(default)]
    pub dma_heap: bool,
}

impl Extras {
    pub fn is_none(&self) -> bool {
        *self == Self::default()
    }

    fn directories(self) -> impl Iterator<Item = &'static str> {
        let all = [(self.accel, "/dev/accel"), (self.dma_heap, "/dev/dma_heap")];
        all.into_iter()
            .filter_map(|(wanted, path)| wanted.then_some(path))
    }
}

#[derive(Clone, Debug, Serialize)]
pub(crate) struct Machine {
    /// The GPUs that the compute driver lists, in its order. Without those that have no node, if others have one.
    pub gpus: Vec<Gpu>,
    pub kfd: bool,
    /// The first GPU's render node, if no GPU has one.
    #[serde(skip)]
    pub missing_node: Option<String>,
    /// The bus's AMD display devices and accelerators that the compute driver does not list, by address, with their
    /// drivers.
    pub unlisted: BTreeMap<String, Option<String>>,
    /// The device rules of a control group keep a GPU out of the list.
    pub hidden: bool,
    /// The machine is WSL, which has `/dev/dxg` instead of `/dev/kfd`.
    pub wsl: bool,
    /// The root directory that was examined.
    #[serde(skip)]
    pub root: PathBuf,
}

impl Machine {
    pub(crate) fn detect(root: &Path) -> Self {
        let there = |path: &str| below(root, path).exists();
        let pci = root.join("sys/bus/pci/devices");
        let nodes = root.join("sys/class/kfd/kfd/topology/nodes");
        let (mut gpus, hidden) = topology::read(&nodes, &pci);
        let unlisted = names_in(&pci)
            .into_iter()
            .filter(|address| is_amd_gpu(&pci.join(address)))
            .filter(|address| !gpus.iter().any(|gpu| gpu.pci == *address))
            .map(|address| {
                let driver = driver_of(&pci.join(&address));
                (address, driver)
            })
            .collect();
        // In a container, the driver may list GPUs whose nodes are not there. HIP does not count them.
        let has_node = |gpu: &Gpu| there(&gpu.render_node());
        let mut missing_node = gpus.first().map(Gpu::render_node);
        if gpus.iter().any(has_node) {
            missing_node = None;
            gpus.retain(has_node);
            let numbered = gpus.iter_mut().enumerate();
            numbered.for_each(|(index, gpu)| gpu.index = index);
        }
        Self {
            gpus,
            kfd: there(KFD),
            missing_node,
            unlisted,
            hidden,
            wsl: there("/dev/dxg"),
            root: root.to_owned(),
        }
    }

    /// Returns the machine's target if its GPUs have only one. `command` returns the command line with another target,
    /// for the help text.
    pub(crate) fn target(&self, command: impl Fn(&str) -> String) -> Result<Target> {
        let isas = self.isas();
        let first = self.gpus.iter().find_map(Gpu::target);
        let error = match (&isas[..], first) {
            ([_], Some(one)) => return Ok(one),
            ([], _) => unavailable!("no target given, and {}", self.lack().unwrap_or_default()),
            ([one], None) => {
                unavailable!("this machine's GPU is {one}, which TheRock does not build for")
            }
            ([..], _) => usage!("the GPUs in this machine differ: {}", isas.join(", ")),
        };
        Err(error.help(match first {
            Some(target) => command(target.name()),
            None => format!(
                "{}, or another one of `rockenv target ls`",
                command("gfx1103")
            ),
        }))
    }

    fn isas(&self) -> Vec<&str> {
        let isas: BTreeSet<&str> = self.gpus.iter().map(|gpu| gpu.isa.as_str()).collect();
        isas.into_iter().collect()
    }

    /// Returns why this machine cannot run GPU code; `None` if it can.
    pub(crate) fn lack(&self) -> Option<String> {
        let driver = self.unlisted.values().min().map(Option::as_deref);
        let lack = match (self.kfd, self.gpus.is_empty(), driver) {
            (true, false, _) => {
                let node = self.missing_node.as_ref();
                return node.map(|node| format!("this machine has no {node}"));
            }
            (false, ..) if self.wsl => "WSL has no /dev/kfd",
            (true, true, _) if self.hidden => "device rules of a control group hide the GPU",
            (_, true, Some(Some(other))) if other != "amdgpu" => {
                return Some(format!("the GPU's driver is {other}, not amdgpu"));
            }
            (true, true, Some(_)) => "the compute driver lists no GPU",
            (false, true, Some(None)) => "the GPU's driver is not loaded: `modprobe amdgpu`",
            // The kernel has no compute driver, or this is a container without the node.
            (false, false, _) | (false, true, Some(Some(_))) => "this machine has no /dev/kfd",
            (_, true, None) => "this machine has no GPU",
        };
        Some(lack.to_owned())
    }

    /// Returns a note about the GPUs of the bus that the compute driver does not list, unless a container hides others'
    /// GPUs.
    pub(crate) fn skipped(&self) -> Option<String> {
        let each = self.unlisted.keys().map(|pci| format!("GPU {pci}"));
        let each: Vec<String> = each.collect();
        (!self.hidden && !each.is_empty())
            .then(|| format!("the compute driver does not list {}", each.join(", ")))
    }

    fn nodes_in(&self, directory: &str) -> Vec<String> {
        let names = names_in(&below(&self.root, directory)).into_iter();
        names.map(|name| format!("{directory}/{name}")).collect()
    }
}

/// A grant for an env: one GPU, and the additional nodes of its profile.
#[derive(Clone, Debug)]
pub(crate) struct Grant {
    root: PathBuf,
    pub gpu: Gpu,
    extras: Extras,
}

impl Grant {
    /// Returns the current device nodes. Called at each start, because groups differ between machines, and reloading
    /// the driver changes the major number of `/dev/kfd` and the order of render nodes: the GPU is the one at its
    /// address.
    pub(crate) fn devices(&self) -> Result<Vec<Device>> {
        let machine = Machine::detect(&self.root);
        let is_same = |gpu: &&Gpu| gpu.pci == self.gpu.pci && gpu.partition == self.gpu.partition;
        let Some(gpu) = machine.gpus.iter().find(is_same) else {
            let error = unavailable!("GPU {} is gone", self.gpu).help("rockenv doctor");
            return Err(match machine.lack() {
                Some(lack) => error.source(lack),
                None => error,
            });
        };
        let mut paths = vec![KFD.to_owned(), gpu.render_node()];
        for directory in self.extras.directories() {
            paths.extend(machine.nodes_in(directory));
        }
        paths.iter().map(|path| device(&self.root, path)).collect()
    }
}

/// A host device node in a container, as it was when the container was defined.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct Device {
    /// Absolute path in the container.
    pub path: String,
    /// Absolute path on the host, with links resolved.
    pub source: PathBuf,
    /// Major number, which may change when the driver is reloaded.
    pub major: u64,
    pub minor: u64,
    pub gid: u32,
    pub mode: u32,
}

/// Returns the groups that can open `devices`, except root's. A node that only root can open needs fixing, see `probe`.
pub(crate) fn groups(devices: &[Device]) -> Vec<u32> {
    let mut groups: Vec<u32> = devices.iter().map(|device| device.gid).collect();
    groups.retain(|gid| *gid != 0);
    groups.sort_unstable();
    groups.dedup();
    groups
}

/// Examines one node. Its host path may be a link; in the container it has its real name.
fn device(root: &Path, path: &str) -> Result<Device> {
    let place = below(root, path);
    let found = fs::canonicalize(&place).and_then(|source| {
        let found = fs::metadata(&source)?;
        Ok((source, found))
    });
    let (source, found) = found.map_err(|error| {
        unavailable!("the GPU's device node `{path}` is gone")
            .source(error)
            .help(probe::AccessLayer::Absent.fix(path, false))
    })?;
    if !found.file_type().is_char_device() {
        return Err(
            unavailable!("`{}` is not a device node", place.display()).help("rockenv doctor")
        );
    }
    Ok(Device {
        path: path.to_owned(),
        source,
        major: nix::sys::stat::major(found.rdev()),
        minor: nix::sys::stat::minor(found.rdev()),
        gid: found.gid(),
        mode: found.mode() & 0o7777,
    })
}

pub(crate) fn all_devices(machine: &Machine) -> Vec<Device> {
    let mut paths = vec![KFD.to_owned()];
    paths.extend(machine.gpus.iter().map(Gpu::render_node));
    let devices = paths.iter().map(|path| device(&machine.root, path));
    devices.filter_map(Result::ok).collect()
}

fn below(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

/// Returns whether a directory of the bus is that of an AMD display controller, or of a processing accelerator such as
/// the MI series.
fn is_amd_gpu(device: &Path) -> bool {
    let is = |file: &str, start: &str| {
        fs::read_to_string(device.join(file)).is_ok_and(|text| text.starts_with(start))
    };
    is("vendor", "0x1002") && (is("class", "0x03") || is("class", "0x12"))
}

/// Returns the driver that has claimed a device of the bus.
fn driver_of(device: &Path) -> Option<String> {
    let text = fs::read_to_string(device.join("uevent")).ok()?;
    let mut lines = text.lines();
    lines.find_map(|line| Some(line.strip_prefix("DRIVER=")?.to_owned()))
}
