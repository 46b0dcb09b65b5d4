//! Owns a service's containers: their creation and their life cycle.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use bollard::models::{
    ContainerCreateBody, DeviceMapping, HostConfig, HostConfigLogConfig, Mount, MountBindOptions,
    MountBindOptionsPropagationEnum, MountType, ResourcesUlimits,
};
use bollard::query_parameters::{
    InspectContainerOptionsBuilder, KillContainerOptions, KillContainerOptionsBuilder,
    StartContainerOptions,
};
use nix::sys::resource::{Resource, getrlimit};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::listing::MADE;
use super::objects::{bytes, label};
use super::{EngineImage, Flavour, LATE, Labels, SLOW, SOON, Service, settled};
use crate::engine::cgroup::SLICE;
use crate::engine::hold::Hold;
use crate::engine::{Bind, nspawn, open_files};
use crate::plan::ids::{self, EnvId, StepKey, TreeId};
use crate::rocm::gpu::Device;
use crate::sys::error::{Result, encoded};
use crate::sys::userns;

/// Polling interval for an exiting container, at first and at most.
const PERIOD: Duration = Duration::from_millis(10);
const LONGEST: Duration = Duration::from_millis(100);
/// Directory of the holder's socket inside the container; see [`crate::engine::agent`].
const AGENT_DIRECTORY: &str = "/run/rockenv/agent";
/// The socket's name there.
pub(super) const AGENT_SOCKET: &str = "socket";

/// The tree of a container at a service, and its names.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct ContainerTree {
    pub socket: PathBuf,
    /// Id of the parent image, whose name may be reassigned.
    pub image: String,
    pub name: String,
    /// Label values: the store's root.
    pub store: String,
    /// The store's id.
    #[serde(default)]
    pub id: String,
    /// The env's id; none for a pulled tree.
    #[serde(with = "ids::or_empty")]
    pub env: Option<EnvId>,
    /// The live tree's id.
    pub tree: TreeId,
    /// The key of the step that makes the tree.
    #[serde(with = "ids::or_empty")]
    pub key: Option<StepKey>,
}

impl ContainerTree {
    /// Returns the labels for this tree's objects.
    pub fn labels(&self) -> Labels {
        Labels {
            store: self.store.clone(),
            id: self.id.clone(),
            env: self.env.clone(),
            tree: Some(self.tree.clone()),
            key: self.key.clone(),
            ..Labels::default()
        }
    }
}

/// A service's description of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ContainerState {
    /// Its id: 64 hexadecimal digits.
    pub id: String,
    pub running: bool,
    /// Host pid of its first process; 0 if it is not running.
    pub pid: i64,
    /// Whether the kernel killed a process in it because memory ran out.
    pub oom_killed: bool,
    pub exit_code: i64,
    /// Its setup, from the label.
    pub setup: String,
}

impl Service {
    /// Ensures that the container of `place` exists with the setup for `hold`. Reuses an existing container with the
    /// same setup. Replaces a container with another setup, and carries its changes over. Returns sentences about
    /// limits that cannot be set.
    pub(super) fn prepare(
        &self,
        place: &ContainerTree,
        hold: &Hold,
        agent: &Path,
    ) -> Result<Vec<String>> {
        let body = body(hold, agent, self.flavour)?;
        let setup = setup(&body, &hold.container.devices)?;
        let mut image = self.below(place)?;
        if let Some(state) = self.state(&place.name)? {
            if state.running {
                // The env is locked, so no other command uses this container: it is a leftover.
                self.stop(&place.name)?;
            }
            if state.setup == setup {
                return Ok(Vec::new());
            }
            if self.is_changed(&place.name)? {
                image = self.commit(&place.name, &carried(&place.tree), None)?;
            }
            self.remove_container(&place.name)?;
        }
        let labels = Labels {
            setup,
            ..place.labels()
        };
        match self.create(&place.name, &image, &labels, body)? {
            Some(warnings) => Ok(warnings),
            None if self.image(&image)?.is_none() => Err(not_found!(
                "the base image of env tree `{}` was deleted from {} outside rockenv",
                place.tree,
                self.flavour
            )
            .help("`rockenv up ...` builds missing parts again")),
            None => Err(unexpected!(
                "{} lost an object while creating a container",
                self.flavour
            )),
        }
    }

    /// Returns the id of the image for a container of `place`: the image with the previous container's changes, or else
    /// the parent image. After rockenv was killed during a replacement, the former may be all that is left.
    pub fn below(&self, place: &ContainerTree) -> Result<String> {
        let carried = self.carried(&place.tree)?;
        Ok(carried.map_or_else(|| place.image.clone(), |image| image.id))
    }

    /// Returns the image that carries a tree's changes over to a new container.
    pub fn carried(&self, tree: &TreeId) -> Result<Option<EngineImage>> {
        let name = carried(tree);
        let Some(image) = self.image(&name)? else {
            return Ok(None);
        };
        if label(&image.labels, "rockenv.tree") == Some(tree.as_str()) {
            return Ok(Some(image));
        }
        Err(unexpected!(
            "image `{name}` was not made by rockenv: its name was reassigned outside rockenv"
        )
        .help(format!(
            "{} rmi {name}, then the env continues from its last snapshot",
            self.flavour
        )))
    }

    pub fn start(&self, name: &str) -> Result<()> {
        let request = self
            .client
            .start_container(name, None::<StartContainerOptions>);
        self.ask(SLOW, "start a container", request)
    }

    /// Returns the state of a container; `None` if no container has that name.
    pub fn state(&self, name: &str) -> Result<Option<ContainerState>> {
        let request = settled(|| self.client.inspect_container(name, None));
        let Some(found) = self.found(SOON, "look at a container", request)? else {
            return Ok(None);
        };
        let state = found.state.unwrap_or_default();
        let labels = found.config.and_then(|config| config.labels);
        let setup = labels.and_then(|mut labels| labels.remove("rockenv.setup"));
        Ok(Some(ContainerState {
            id: found.id.unwrap_or_default(),
            running: state.running.unwrap_or(false),
            pid: state.pid.unwrap_or(0),
            oom_killed: state.oom_killed.unwrap_or(false),
            exit_code: state.exit_code.unwrap_or(0),
            setup: setup.unwrap_or_default(),
        }))
    }

    /// Returns the bytes that a container changed in its tree, and the size of the whole tree.
    pub fn sizes(&self, name: &str) -> Result<(u64, u64)> {
        let options = InspectContainerOptionsBuilder::new().size(true).build();
        let request = settled(|| self.client.inspect_container(name, Some(options.clone())));
        let found = self.ask(LATE, "measure a container", request)?;
        Ok((bytes(found.size_rw), bytes(found.size_root_fs)))
    }

    /// Returns whether a container's tree has changed since its creation.
    pub fn is_changed(&self, name: &str) -> Result<bool> {
        let request = settled(|| self.client.container_changes(name));
        let changes = self.found(LATE, "look for changes", request)?.flatten();
        Ok(changes.unwrap_or_default().iter().any(|change| {
            let path = Path::new(&change.path);
            // The service's own files change their parent directory too.
            !MADE
                .iter()
                .any(|made| path.starts_with(made) || Path::new(made).starts_with(path))
        }))
    }

    /// Sends SIGTERM to a container's first process, if that still runs.
    pub fn terminate(&self, name: &str) {
        let options = KillContainerOptionsBuilder::new().signal("SIGTERM").build();
        let request = self.client.kill_container(name, Some(options));
        // Refused if it is no longer running.
        drop(self.found(SOON, "stop a container", request));
    }

    /// Kills a running container, and waits until it has ended.
    pub fn stop(&self, name: &str) -> Result<()> {
        let began = Instant::now();
        while self.state(name)?.is_some_and(|state| state.running) {
            if began.elapsed() > SOON {
                let why = format!("although {} was told to kill it", self.flavour);
                return Err(unexpected!("container `{name}` does not exit {why}"));
            }
            // The container may exit first, which the service reports as a conflict.
            let request = self
                .client
                .kill_container(name, None::<KillContainerOptions>);
            drop(self.found(SOON, "kill a container", request));
            pause(began);
        }
        Ok(())
    }

    /// Waits for a container to exit; kills it after `grace`.
    pub fn wait(&self, name: &str, grace: Duration) -> Result<()> {
        let began = Instant::now();
        while began.elapsed() < grace {
            if !self.state(name)?.is_some_and(|state| state.running) {
                return Ok(());
            }
            pause(began);
        }
        self.stop(name)
    }
}

/// Sleeps between polls of an exiting container: a tenth of the time so far, so the delay stays small.
fn pause(began: Instant) {
    std::thread::sleep((began.elapsed() / 10).clamp(PERIOD, LONGEST));
}

/// Returns the name of the image with a tree's changes while its container is replaced.
fn carried(tree: &TreeId) -> String {
    format!("rockenv/carried-{tree}")
}

/// Returns the request that creates the container, without image and labels.
fn body(hold: &Hold, agent: &Path, flavour: Flavour) -> Result<ContainerCreateBody> {
    let container = &hold.container;
    let own = [
        Bind::read_only(&hold.program, nspawn::PROGRAM),
        Bind::writable(agent, AGENT_DIRECTORY),
    ];
    let mut mounts = Vec::new();
    for bind in own.iter().chain(&container.binds) {
        mounts.push(mount(bind, flavour)?);
    }
    let number = |limit: Option<u64>| limit.and_then(|limit| i64::try_from(limit).ok());
    let memory = number(container.limits.memory_max);
    let tasks = number(container.limits.tasks_max);
    let network = if container.network { "host" } else { "none" };
    let host = HostConfig {
        devices: Some(devices(&container.devices)),
        // What `podman run --group-add keep-groups` requests from crun.
        annotations: container.keep_groups.then(|| {
            let keep = "run.oci.keep_original_groups";
            [(keep.to_owned(), "1".to_owned())].into()
        }),
        network_mode: Some(network.to_owned()),
        // Without a network, Docker lets every user listen on low ports.
        sysctls: (!container.network && flavour == Flavour::Docker).then(|| {
            let low = "net.ipv4.ip_unprivileged_port_start";
            [(low.to_owned(), "1024".to_owned())].into()
        }),
        // The slice of systemd-nspawn's containers, so that the host's settings for the slice apply to all.
        cgroup_parent: hold.systemd.then(|| SLICE.to_owned()),
        memory,
        // Equal to `memory`: no swap on top.
        memory_swap: memory,
        // Without this, Podman applies its own limit.
        pids_limit: Some(tasks.unwrap_or(-1)),
        ..settings(mounts, flavour)?
    };
    let socket = format!("{AGENT_DIRECTORY}/{AGENT_SOCKET}");
    Ok(ContainerCreateBody {
        hostname: Some("rockenv".to_owned()),
        ..running(vec!["__agent".to_owned(), socket], host)
    })
}

/// Returns the settings that all containers have.
pub(super) fn settings(mounts: Vec<Mount>, flavour: Flavour) -> Result<HostConfig> {
    let is_podman = flavour == Flavour::Podman;
    // As under systemd-nspawn, they are empty at each start, and can hold programs. Podman would copy the image's files
    // there, and Docker refuses the option against that.
    let more = if is_podman { ",notmpcopyup" } else { "" };
    let tmpfs = [
        // In memory, so that no snapshot contains `/run`.
        ("/run", "rw,nosuid,nodev,exec,mode=755"),
        // Podman's own keeps its files if the container starts again before Podman has cleaned up after it. The size is
        // systemd-nspawn's: an upper limit, not a reservation.
        ("/dev/shm", "rw,nosuid,nodev,exec,mode=1777,size=10%"),
    ];
    let tmpfs = tmpfs.map(|(path, options)| (path.to_owned(), format!("{options}{more}")));
    let of_podman = |mode: &str| is_podman.then(|| mode.to_owned());
    Ok(HostConfig {
        mounts: Some(mounts),
        tmpfs: Some(tmpfs.into()),
        // The configuration may name other namespaces. The agent kills all processes of its own, and volumes need the
        // owners that the user namespace of the service gives them. If shareable, Docker mounts a `/dev/shm` of 64 MiB
        // beside the one above, in any order.
        ipc_mode: Some("private".to_owned()),
        pid_mode: of_podman("private"),
        userns_mode: of_podman("host"),
        uts_mode: of_podman("private"),
        // Docker's configuration may add a first process, which leaves a file in the tree.
        init: Some(false),
        // systemd gives it to an ordinary user's services. Podman before 4.7 fails to lower it to its default, 0.
        oom_score_adj: (!userns::is_root()).then_some(200),
        ulimits: Some(ulimits(flavour)?),
        // Output goes through rockenv's own descriptors; a log at the service would only grow.
        log_config: Some(HostConfigLogConfig {
            typ: Some("none".to_owned()),
            config: None,
        }),
        // Volumes are the user's files, whose labels must not change.
        security_opt: Some(vec!["label=disable".to_owned()]),
        ..HostConfig::default()
    })
}

/// Returns the request for a container in which root runs rockenv with these arguments.
pub(super) fn running(arguments: Vec<String>, host: HostConfig) -> ContainerCreateBody {
    ContainerCreateBody {
        user: Some("0:0".to_owned()),
        working_dir: Some("/".to_owned()),
        entrypoint: Some(vec![nspawn::PROGRAM.to_owned()]),
        cmd: Some(arguments),
        host_config: Some(host),
        ..ContainerCreateBody::default()
    }
}

/// Podman's service writes mounts as comma-separated lists, without quoting.
const NO_LIST: [char; 3] = [',', '"', '\n'];

pub(super) fn mount(bind: &Bind, flavour: Flavour) -> Result<Mount> {
    let source = bind.source.to_str().ok_or_else(|| {
        invalid!(
            "`{}` cannot be mounted by Docker or Podman: its name is not UTF-8",
            bind.source.display()
        )
    })?;
    let odd = [source, &bind.target]
        .into_iter()
        .find(|path| path.contains(NO_LIST));
    if let (Flavour::Podman, Some(path)) = (flavour, odd) {
        return Err(invalid!(
            "Podman cannot mount `{}`: its name contains a comma, quotation mark or line break",
            crate::ui::text::os(Path::new(path))
        )
        .help("rename it, or use another engine: rockenv up ... --engine docker"));
    }
    Ok(Mount {
        typ: Some(MountType::BIND),
        source: Some(source.to_owned()),
        target: Some(bind.target.clone()),
        read_only: Some(bind.read_only),
        bind_options: Some(MountBindOptions {
            propagation: Some(MountBindOptionsPropagationEnum::RPRIVATE),
            ..MountBindOptions::default()
        }),
        ..Mount::default()
    })
}

fn devices(nodes: &[Device]) -> Vec<DeviceMapping> {
    nodes
        .iter()
        .map(|node| DeviceMapping {
            path_on_host: Some(node.source.to_string_lossy().into_owned()),
            path_in_container: Some(node.path.clone()),
            cgroup_permissions: Some("rw".to_owned()),
        })
        .collect()
}

/// Returns the ulimits to request. A service refuses more than its own, and Podman requests more if none are given.
fn ulimits(flavour: Flavour) -> Result<Vec<ResourcesUlimits>> {
    let mut limits = vec![("nofile", open_files()?)];
    if flavour == Flavour::Podman {
        let (soft, hard) = getrlimit(Resource::RLIMIT_NPROC)?;
        limits.push(("nproc", (soft.min(1 << 15), hard.min(1 << 15))));
    }
    let number = |value: u64| i64::try_from(value).ok();
    let limits = limits
        .into_iter()
        .map(|(name, (soft, hard))| ResourcesUlimits {
            name: Some(name.to_owned()),
            soft: number(soft),
            hard: number(hard),
        });
    Ok(limits.collect())
}

/// Returns a digest of a setup: the request, and the device numbers, which change when a driver is reloaded. Podman
/// creates the nodes once for all starts.
fn setup(body: &ContainerCreateBody, devices: &[Device]) -> Result<String> {
    // A value has its keys in order, unlike the maps in a request.
    let value = encoded(serde_json::to_value(body), "a container")?;
    let mut hash = Sha256::new();
    hash.update(value.to_string());
    for device in devices {
        hash.update(device.major.to_le_bytes());
        hash.update(device.minor.to_le_bytes());
        hash.update(device.gid.to_le_bytes());
        hash.update(device.mode.to_le_bytes());
    }
    Ok(hex::encode(&hash.finalize()[..16]))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn equal_requests_have_one_setup() {
        let setup = || {
            let host = settings(Vec::new(), Flavour::Podman).unwrap();
            setup(&running(Vec::new(), host), &[]).unwrap()
        };
        let setups: std::collections::BTreeSet<_> = (0..20).map(|_| setup()).collect();
        assert_eq!(setups.len(), 1);
    }

    #[test]
    fn neither_configuration_nor_image_changes_a_container() {
        for flavour in [Flavour::Docker, Flavour::Podman] {
            let is_podman = flavour == Flavour::Podman;
            let host = settings(Vec::new(), flavour).unwrap();
            let modes = [host.pid_mode, host.userns_mode, host.uts_mode];
            let wanted = ["private", "host", "private"].map(|mode| is_podman.then_some(mode));
            assert_eq!(modes.each_ref().map(Option::as_deref), wanted);
            assert_eq!(host.init, Some(false));
            assert_eq!(host.ipc_mode.as_deref(), Some("private"));
            for (path, options) in host.tmpfs.unwrap() {
                let has = |name: &str| options.split(',').any(|option| option == name);
                assert!(
                    has("exec") && has("notmpcopyup") == is_podman,
                    "{path}: {options}"
                );
            }
        }
    }
}
