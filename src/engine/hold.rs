//! Owns the holder: one process per container, outside it, that has the engine create and start the container, waits
//! for it, and cleans up whatever happens.
//!
//! The holder keeps the env's lock open, so no other command gets the env before the container is gone, even if the
//! command that started it was killed.

mod watch;

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use nix::mount::{MntFlags, umount2};
use nix::sys::signal::Signal;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::cgroup::{Cgroup, Hierarchies};
use super::{Container, Device, Root, Usage, docker, nspawn};
use crate::engine::job_slots::{self, Ticket};
use crate::sys::error::{Error, Kind, Result, ResultExt as _, encoded, if_exists};
use crate::sys::signals::{self, Signals};
use crate::sys::{frames, userns};

pub(super) use watch::{Watch, supervise};

/// How long a killed container may take to end before the holder reports it.
pub(super) const PATIENCE: Duration = Duration::from_secs(60);

/// What happens to the container when the command that started it disconnects.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum OnDisconnect {
    /// The container ends at once; for a step.
    Kill,
    /// The container ends with its last command; for `exec` and `shell`, which other commands may have joined. With a
    /// duration, it stays that long for another command, unless the earlier ones left traces.
    Drain(Duration),
}

/// The request that starts a holder; carries the env's lock and the listening socket.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Hold {
    pub container: Container,
    /// What happens when the starter disconnects.
    pub tie: OnDisconnect,
    /// The env's `run` directory, which holds the mount point, the state and temporary directories.
    pub run: PathBuf,
    /// rockenv's own binary, bound into the container.
    pub program: PathBuf,
    /// Whether systemd is PID 1 here.
    pub systemd: bool,
    /// Whether its starter is an ordinary user, and root only in a user namespace.
    pub rootless: bool,
    /// Its claim on the machine's jobs.
    pub jobs: Ticket,
    /// A digest of the container's inputs on this machine; see [`ContainerRecord::made_of`].
    pub made_of: String,
    /// Whether only its starter may use it; see [`ContainerRecord::is_private`].
    pub is_private: bool,
}

/// The holder's connections.
pub(super) struct Connections<'a> {
    /// Where commands connect; the agent accepts them.
    pub listener: UnixListener,
    /// The file with the job slots.
    pub jobs: OwnedFd,
    pub signals: &'a Signals,
    pub starter: &'a UnixStream,
}

/// Messages from the holder to its starter.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) enum FromHolder {
    /// The container runs; sentences about limits, such as `ro`, that could not be set.
    Ready(Vec<String>),
    /// Creating the container takes long; describes the slow request.
    Waits(String),
    /// The container and its holder stay: other commands use it, or may soon.
    Shared,
    Ended(Usage),
    /// The container could not be created, or was lost.
    Failed {
        reason: Reason,
    },
}

/// An error on its way to another process.
#[derive(Debug, Serialize, Deserialize)]
pub struct Reason {
    /// Exit code of its kind.
    code: u8,
    /// The error and its causes.
    chain: Vec<String>,
    /// What to type next.
    help: Option<String>,
}

impl From<&Error> for Reason {
    fn from(error: &Error) -> Self {
        Self {
            code: error.kind().exit_code(),
            chain: error.chain(),
            help: error.help_text().map(str::to_owned),
        }
    }
}

impl From<Reason> for Error {
    fn from(reason: Reason) -> Self {
        let mut chain = reason.chain.into_iter();
        let message = chain
            .next()
            .unwrap_or_else(|| "the container failed".to_owned());
        let mut error = Self::new(Kind::of_exit_code(reason.code), message);
        let causes: Vec<String> = chain.collect();
        if !causes.is_empty() {
            error = error.source(causes.join(": "));
        }
        error.help_if(reason.help)
    }
}

/// Returns a digest of the code that defines an agent's messages: two builds of one version may have different messages.
fn protocol() -> String {
    let code = [include_str!("wire.rs"), include_str!("../sys/frames.rs")];
    hex::encode(Sha256::digest(code.concat()))
}

/// The record of a container that runs, or ran when its holder was killed: `run/state.json`.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct ContainerRecord {
    pub id: String,
    /// The env's `run` directory.
    #[serde(default)]
    pub run: PathBuf,
    /// Digest of the messages of the rockenv in the container; empty before digests were recorded.
    #[serde(default)]
    protocol: String,
    pub cgroup: Cgroup,
    /// systemd-nspawn's lock file for the tree; a killed systemd-nspawn leaves it behind.
    pub lock: Option<PathBuf>,
    /// The container of a service.
    pub place: Option<docker::ContainerTree>,
    /// Whether the container only waits for another command.
    #[serde(default)]
    pub idle: bool,
    /// How many times it began to wait.
    #[serde(default)]
    pub waits: u64,
    /// A digest of the container's inputs on this machine. A command joins a waiting container only if it is unchanged.
    #[serde(default)]
    pub made_of: String,
    /// Whether its tree is not the env's current one, so that no other command may join it.
    #[serde(default)]
    pub is_private: bool,
    /// The container's device nodes, if a service created them: they stay as they were at its start.
    #[serde(default)]
    pub nodes: Vec<Device>,
}

impl ContainerRecord {
    /// Returns the path of the state in an env's `run` directory.
    pub(crate) fn path(run: &Path) -> PathBuf {
        run.join("state.json")
    }

    /// Returns whether the rockenv in the container understands this one's requests.
    pub(crate) fn has_this_protocol(&self) -> bool {
        self.protocol == protocol()
    }

    pub(super) fn save(&self, run: &Path) -> Result<()> {
        let text = encoded(serde_json::to_vec(self), "state")?;
        // Atomically: a concurrent reader would take a partial file for a missing container.
        let new = run.join("state.json.new");
        fs::write(&new, text)?;
        Ok(fs::rename(new, Self::path(run))?)
    }

    /// Records that the container began its `waits`-th wait for another command, or with `None` that it runs one. Only
    /// observers read this.
    pub(super) fn note_idle(&mut self, run: &Path, waits: Option<u64>) {
        self.idle = waits.is_some();
        self.waits = waits.unwrap_or(self.waits);
        drop(self.save(run));
    }

    /// Reads the state of the running container, if any.
    pub(crate) fn read(run: &Path) -> Option<Self> {
        Self::parse(run, &fs::read(Self::path(run)).ok()?)
    }

    /// Parses a state; `None` if it is incomplete, or names anything but a container of this env. In a copy of a store,
    /// it names a container of the first one.
    fn parse(run: &Path, text: &[u8]) -> Option<Self> {
        let state: Self = serde_json::from_slice(text).ok()?;
        let env = run.parent()?.file_name()?.to_str()?;
        let prefix = name_prefix(env);
        let own = |name: &str| {
            name.starts_with(prefix.trim_end_matches('-'))
                && name
                    .bytes()
                    .all(|byte| byte.is_ascii_alphanumeric() || byte == b'-')
        };
        let fits = own(&state.id)
            && is_here(&state.run, run)
            && state.lock.as_deref().is_none_or(is_tree_lock)
            && match &state.place {
                Some(place) => own(&place.name) && state.cgroup.is_of_service(),
                None => state.cgroup.is_of(&state.id),
            };
        fits.then_some(state)
    }

    /// Asks the container's processes to end.
    pub(crate) fn terminate(&self) -> Result<()> {
        match &self.place {
            // Without root the container may have no control group.
            Some(place) if self.cgroup.directories.is_empty() => {
                docker::Service::connect(&place.socket)?.terminate(&place.name);
            }
            _ => self.cgroup.terminate(),
        }
        Ok(())
    }

    /// Kills everything in the container.
    pub(crate) fn kill(&self, patience: Duration) -> Result<()> {
        match &self.place {
            Some(place) if self.cgroup.directories.is_empty() => {
                docker::Service::connect(&place.socket)?.stop(&place.name)
            }
            _ => self.cgroup.kill(patience),
        }
    }

    /// Cleans up after a killed holder: its processes, its control group and the engine's files.
    ///
    /// Returns what was left. The caller holds the env's lock.
    pub(crate) fn recover(run: &Path) -> Result<Option<Ended>> {
        let path = Self::path(run);
        let Some(text) = if_exists(fs::read(&path))? else {
            return Ok(None);
        };
        let mut ended = Ended::default();
        // The record is complete before the container exists, so a partial file means that nothing was started.
        if let Some(state) = Self::parse(run, &text) {
            ended = Ended::count(&state.cgroup);
            state.clear()?;
        }
        fs::remove_file(&path)?;
        Ok(Some(ended))
    }

    /// Removes the record of a container that has ended. That of another container stays: somebody removed the env's
    /// directory while this one waited for a command, and another command made the env again.
    fn forget(&self, run: &Path) -> Result<()> {
        match Self::read(run) {
            Some(found) if found.id != self.id => Ok(()),
            _ => if_exists(fs::remove_file(Self::path(run))).map(drop),
        }
    }

    fn clear(&self) -> Result<()> {
        if let Some(place) = &self.place {
            return match docker::Service::connect(&place.socket) {
                // The service owns the control group.
                Ok(service) => service.stop(&place.name),
                // If the service was uninstalled, the env must still be removable.
                Err(_) => self.kill(PATIENCE),
            };
        }
        self.cgroup.kill(PATIENCE)?;
        self.cgroup.remove()?;
        if let Some(lock) = &self.lock {
            remove_lock(lock)?;
        }
        remove_left(Path::new(NSPAWN), &self.id);
        Ok(())
    }
}

/// Removes what a killed systemd-nspawn leaves in its directory `nspawn`: since systemd 255 a mount in the holder's
/// namespace, which later releases have in a directory of the container.
fn remove_left(nspawn: &Path, id: &str) {
    let own = nspawn.join(id);
    for path in [
        nspawn.join("propagate").join(id),
        nspawn.join("unix-export").join(id),
        own.join("unix-export"),
        own.join("root"),
        own,
    ] {
        let _: nix::Result<()> = umount2(&path, MntFlags::MNT_DETACH | MntFlags::UMOUNT_NOFOLLOW);
        drop(fs::remove_dir(path));
    }
}

/// Returns whether a recorded directory is `run`, perhaps by another path, or is gone because the store was moved.
fn is_here(recorded: &Path, run: &Path) -> bool {
    let place = |path: &Path| {
        let found = fs::metadata(path).ok()?;
        Some((found.dev(), found.ino()))
    };
    place(recorded).is_none_or(|found| Some(found) == place(run))
}

/// Returns the prefix of the names of an env's containers.
pub(crate) fn name_prefix(env: &str) -> String {
    let readable: String = env
        .bytes()
        .take(36)
        .map(|byte| match byte.is_ascii_alphanumeric() {
            true => char::from(byte),
            false => '-',
        })
        .collect();
    format!("rockenv-{}-", readable.trim_matches('-'))
}

/// systemd-nspawn's directory for all containers.
const NSPAWN: &str = "/run/systemd/nspawn";

/// Returns systemd-nspawn's machine-wide lock file for the tree at `root`.
pub(super) fn tree_lock(root: &Path) -> Result<PathBuf> {
    let found = fs::metadata(root)?;
    Ok(lock_file(found.dev(), found.ino()))
}

fn lock_file(device: u64, inode: u64) -> PathBuf {
    Path::new(NSPAWN).join(format!("locks/inode-{device}:{inode}"))
}

/// Returns whether a recorded path is the one that its numbers produce: rockenv removes this file.
fn is_tree_lock(path: &Path) -> bool {
    let lock = || {
        let name = path.file_name()?.to_str()?;
        let (device, inode) = name.strip_prefix("inode-")?.split_once(':')?;
        Some(lock_file(device.parse().ok()?, inode.parse().ok()?))
    };
    // Paths that differ in slashes are equal, so the text is compared.
    lock().is_some_and(|lock| lock.as_os_str() == path.as_os_str())
}

/// The leftovers of a container whose holder was killed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Ended {
    /// Processes in its own control group.
    pub processes: usize,
    /// The processes among them that had a GPU node open.
    pub on_gpu: usize,
}

impl Ended {
    fn count(cgroup: &Cgroup) -> Self {
        let processes = cgroup.processes();
        let on_gpu = processes.iter().filter(|pid| has_gpu(**pid)).count();
        Self {
            processes: processes.len(),
            on_gpu,
        }
    }
}

/// Returns whether a process has a GPU node open.
fn has_gpu(pid: i32) -> bool {
    let open = fs::read_dir(format!("/proc/{pid}/fd"));
    let targets = open.into_iter().flatten().flatten();
    targets
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .any(|target| is_gpu(&target))
}

fn is_gpu(node: &Path) -> bool {
    let node = node.to_string_lossy();
    node == "/dev/kfd" || node.starts_with("/dev/dri/renderD")
}

/// Removes a lock file, unless another tree has the same numbers and is locked by now. systemd locks open files with
/// `fcntl`, which `flock` does not see.
fn remove_lock(path: &Path) -> Result<()> {
    let Some(file) = if_exists(fs::File::open(path))? else {
        return Ok(());
    };
    if !job_slots::is_locked(&file, 0)? {
        if_exists(fs::remove_file(path))?;
    }
    Ok(())
}

/// Runs the holder; its standard input is the starter's socket.
pub(crate) fn run() -> Result<()> {
    let starter = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    if let Some(outcome) = serve(&starter) {
        // A killed starter needs no answer.
        drop(frames::send(&starter, &outcome, &[]));
    }
    Ok(())
}

/// Holds the container that the starter requests; returns `None` if the starter was killed before that.
fn serve(starter: &UnixStream) -> Option<FromHolder> {
    let usage = match frames::receive::<Hold>(starter) {
        Ok(None) => return None,
        Ok(Some((hold, fds))) => {
            if hold.rootless {
                userns::inherit();
            }
            hold_container(&hold, fds, starter)
        }
        Err(unreadable) => Err(unreadable),
    };
    Some(match usage {
        Ok(usage) => FromHolder::Ended(usage),
        Err(error) => FromHolder::Failed {
            reason: (&error).into(),
        },
    })
}

fn hold_container(hold: &Hold, fds: Vec<OwnedFd>, starter: &UnixStream) -> Result<Usage> {
    let [_lock, listener, jobs]: [OwnedFd; 3] = fds
        .try_into()
        .map_err(|_| unexpected!("the holder is started by `rockenv`, not manually"))?;
    let signals = signals::block(&[&signals::STOP[..], &[Signal::SIGCHLD]].concat())?;
    let mut state = ContainerRecord {
        id: hold.container.id.clone(),
        run: hold.run.clone(),
        protocol: protocol(),
        made_of: hold.made_of.clone(),
        is_private: hold.is_private,
        ..ContainerRecord::default()
    };
    let connections = Connections {
        listener: listener.into(),
        jobs,
        signals: &signals,
        starter,
    };
    let result = match &hold.container.root {
        Root::Service(place) => {
            state.place = Some(place.clone());
            state.nodes.clone_from(&hold.container.devices);
            docker::hold(hold, place, &mut state, connections)
        }
        Root::Directory(_) | Root::Overlay(_) => {
            state.cgroup = Cgroup::plan(&state.id, &Hierarchies::probe()?, hold.systemd);
            nspawn::hold(hold, &mut state, connections)
        }
    };
    // If the cleanup fails, the record stays, and the next command that takes the lock continues from it.
    let cleared = state.clear().and_then(|()| state.forget(&hold.run));
    let usage = result?;
    cleared?;
    Ok(usage)
}

/// Refuses missing mount sources. Errors name the target, as the profile does.
pub(super) fn check_binds(container: &Container) -> Result<()> {
    for bind in &container.binds {
        fs::symlink_metadata(&bind.source)
            .context(|| format!("nothing to mount at `{}`", bind.target))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
