//! Owns the holder of a service's container: it starts the container, and passes the listening socket to the agent
//! inside, which is not its child.

use std::collections::BTreeMap;
use std::os::fd::{AsFd as _, AsRawFd as _};
use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use fs_err as fs;

use super::container::{AGENT_SOCKET, mount};
use super::{ContainerTree, Flavour, Service};
use crate::engine::cgroup::{Cgroup, Figures};
use crate::engine::hold::{Connections, ContainerRecord, Hold, Watch, check_binds, supervise};
use crate::engine::jobserver::Server;
use crate::engine::session::short_path;
use crate::engine::wire::ToAgent;
use crate::engine::{Bind, Container, Usage};
use crate::rocm::gpu::probe::AccessLayer;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::readable::readable;
use crate::sys::{frames, host};
use crate::tree::{mounts, remove_tree};
use crate::ui::text;

/// Limit from the start of a container until its agent answers.
const START: Duration = Duration::from_secs(180);
/// Polling interval for a container that does not answer.
const PERIOD: Duration = Duration::from_millis(200);
/// How long a service may be down when a container has ended.
const RESTART: Duration = Duration::from_secs(60);
/// How long to wait for a service to finish creating a container after the starter is gone.
const ANSWER: Duration = Duration::from_secs(5);
/// How long a container may take to end after its agent.
const GRACE: Duration = Duration::from_secs(3);

/// Runs the container until it ends; returns its usage.
pub(in crate::engine) fn hold(
    hold: &Hold,
    place: &ContainerTree,
    state: &mut ContainerRecord,
    connections: Connections<'_>,
) -> Result<Usage> {
    let mut service = Service::connect(&place.socket)?;
    let mut hold = hold.clone();
    hold.container.show_certificates(None, &hold.run)?;
    let mounted = mounts::at_or_below(Path::new("/"))?;
    let (inside, writable) = read_only_inside(&hold.container.binds, &mounted, service.flavour);
    hold.container.binds.extend(inside);
    let hold = &hold;
    check_binds(&hold.container)?;
    let directory = hold.run.join("agent");
    fs::create_dir_all(&directory)?;
    // Only root may enter it inside, so that the build user cannot impersonate the agent.
    fs::set_permissions(&directory, std::fs::Permissions::from_mode(0o700))?;
    let path = directory.join(AGENT_SOCKET);
    // Root of an earlier container may have created anything there, even a directory.
    remove_tree(&path)?;
    let entrance = UnixListener::bind(short_path(&directory, AGENT_SOCKET)?.1)
        .context(|| format!("cannot listen at `{}`", path.display()))?;
    state.save(&hold.run)?;
    // A container whose starter is gone is not needed. Still wait a little for its creation: otherwise it would appear
    // later and stay until a command looks for leftovers.
    service.starter = Some(connections.starter.try_clone()?);
    service.grace = Some(ANSWER);
    let mut missing = service.prepare(place, hold, &directory)?;
    missing.extend(writable);
    // The container exists under its name by now, so its start need not be waited for.
    service.grace = Some(Duration::ZERO);
    service
        .start(&place.name)
        .map_err(|error| refused_node(error, &hold.container))?;
    let agent = accept(&entrance, &service, &place.name)?;
    service.grace = None;
    drop(entrance);
    fs::remove_file(&path)?;
    if let Some(found) = service.state(&place.name)? {
        state.cgroup = Cgroup::of_container(found.pid, &found.id).unwrap_or_default();
        state.save(&hold.run)?;
    }
    let jobs = Server::start(hold, connections.jobs, &state.cgroup)?;
    let listen = ToAgent::Listen {
        user: hold.container.user.clone(),
    };
    frames::send(&agent, &listen, &[connections.listener.as_raw_fd()])?;
    drop(connections.listener);
    let mut figures = Figures::default();
    let cgroup = state.cgroup.clone();
    let before = cgroup.figures().oom_kills.is_none().then(host::oom_kills);
    let ready = supervise(
        agent,
        connections.signals,
        connections.starter,
        missing,
        Watch {
            tie: hold.tie,
            // The container is not a child process: it ends when the agent's stream does.
            has_ended: &mut |agent_is_gone| Ok(agent_is_gone),
            // The service removes the control group with the container's last process.
            dismiss: &mut || figures = cgroup.figures(),
            idle: &mut |waits| {
                jobs.rest(waits.is_some());
                state.note_idle(&hold.run, waits);
            },
        },
    )?;
    wait(&service, &place.name)?;
    let memory_held = jobs.finish();
    let ended = service.state(&place.name)?;
    if !ready {
        let code = ended.map_or(-1, |state| state.exit_code);
        return Err(unexpected!(
            "the agent in container `{}` exited before it was ready (exit code {code})",
            place.name
        )
        .help("rockenv doctor"));
    }
    let killed = u64::from(ended.is_some_and(|state| state.oom_killed));
    let since = before.map(|before| host::oom_kills().saturating_sub(before));
    Ok(Usage {
        cpu_us: figures.cpu_us.unwrap_or(0),
        memory_peak: figures.memory_peak,
        memory_held,
        oom_kills: figures.oom_kills.or(since).unwrap_or(0).max(killed),
        ..Usage::default()
    })
}

/// Returns read-only binds of the file systems at the points `mounted` that are inside read-only binds, and a sentence
/// for each that stays writable. Docker before 25 and Podman leave these writable; systemd-nspawn does not.
fn read_only_inside(
    binds: &[Bind],
    mounted: &[PathBuf],
    flavour: Flavour,
) -> (Vec<Bind>, Vec<String>) {
    let (mut found, mut writable) = (BTreeMap::new(), Vec::new());
    for bind in binds.iter().filter(|bind| bind.read_only) {
        for point in mounted.iter().filter(|point| **point != bind.source) {
            let Ok(inside) = point.strip_prefix(&bind.source) else {
                continue;
            };
            let target = Path::new(&bind.target).join(inside);
            let is_hidden = binds.iter().any(|other| {
                other.target != bind.target
                    && Path::new(&other.target).starts_with(&bind.target)
                    && target.starts_with(&other.target)
            });
            if is_hidden {
                continue;
            }
            let inner = Bind::read_only(point, target.to_string_lossy());
            let possible = match point.try_exists() {
                Ok(true) => mount(&inner, flavour).map(drop),
                // A later mount hides it.
                Ok(false) => continue,
                // A FUSE file system whose server is gone, or which only its user may enter.
                Err(error) => Err(error.into()),
            };
            match possible {
                Ok(()) => drop(found.insert(inner.target.clone(), inner)),
                // The service would refuse the whole container.
                Err(error) => writable.push(format!(
                    "`{}` is not read-only: {}",
                    text::os(&target),
                    error.message()
                )),
            }
        }
    }
    (found.into_values().collect(), writable)
}

/// Waits until the container has exited, even across a restart of the service, which must not cost hours of work.
fn wait(service: &Service, name: &str) -> Result<()> {
    let deadline = Instant::now() + RESTART;
    loop {
        match service.wait(name, GRACE) {
            Err(error) if error.kind() == Kind::Unavailable && Instant::now() < deadline => {
                std::thread::sleep(PERIOD);
            }
            other => return other,
        }
    }
}

/// Names the access layer that refused a device node. crun creates the node under the container's device rules, and
/// fails there. runc continues, and the GPU check finds the problem.
fn refused_node(error: Error, container: &Container) -> Error {
    let said = error.chain().join(": ");
    let refused = said.contains("mknod") && said.contains("peration not permitted");
    match container
        .devices
        .iter()
        .find(|node| refused && said.contains(&node.path))
    {
        Some(node) => unavailable!("the GPU cannot be used inside")
            .source(format!(
                "`{}`: operation not permitted: device rules of a control group exclude it",
                node.path
            ))
            .help(AccessLayer::DeviceCgroup.fix(&node.path, container.keep_groups)),
        None => error,
    }
}

/// Waits for the agent to connect.
fn accept(entrance: &UnixListener, service: &Service, name: &str) -> Result<UnixStream> {
    let deadline = Instant::now() + START;
    loop {
        if readable([Some(entrance.as_fd())], Some(PERIOD))? == [true] {
            return Ok(entrance.accept()?.0);
        }
        let state = service.state(name)?;
        if !state.as_ref().is_some_and(|state| state.running) || Instant::now() > deadline {
            let code = state.map_or(-1, |state| state.exit_code);
            return Err(no_answer(name, code, host::has_apparmor()));
        }
    }
}

/// Makes the error for an agent that did not connect, whose own message nothing records. Since Linux 6.17, AppArmor
/// permits no Unix socket to a profile that names no ABI, as those of older services.
fn no_answer(name: &str, code: i64, apparmor: bool) -> Error {
    unexpected!("the agent in container `{name}` does not answer (exit code {code})").help(match apparmor {
        true => "rockenv doctor; if `sudo journalctl -k -g apparmor` shows a denied socket, update Docker or Podman",
        false => "rockenv doctor",
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agent_that_does_not_answer_under_apparmor_points_to_the_kernels_log() {
        for (apparmor, command) in [(true, "journalctl -k -g apparmor"), (false, "doctor")] {
            let error = no_answer("a", 1, apparmor);
            assert_has!(error.help_text().unwrap(), command);
        }
    }

    #[test]
    fn a_mount_inside_a_read_only_volume_is_read_only_too() {
        let directory = tempfile::tempdir().unwrap();
        let top = directory.path();
        for name in ["ro/a/b", "ro/other/c", "ro/x,y", "rw/d"] {
            fs::create_dir_all(top.join(name)).unwrap();
        }
        let binds = [
            Bind::read_only(top.join("ro"), "/v"),
            Bind::writable(top.join("rw"), "/w"),
            Bind::writable(top.join("else"), "/v/other"),
        ];
        // A file system that cannot be entered.
        let closed = format!("ro/{}", "x".repeat(300));
        let mounted = [
            "",
            "ro",
            "ro/a/b",
            "ro/a",
            "ro/a",
            "ro/hidden",
            closed.as_str(),
            "ro/x,y",
            "ro/other/c",
            "roll",
            "rw/d",
        ];
        let mounted = mounted.map(|name| top.join(name));
        let (found, writable) = read_only_inside(&binds, &mounted, Flavour::Podman);
        assert_eq!(writable.len(), 2, "{writable:?}");
        assert_has!(writable[0], "xxx` is not read-only: ");
        assert_has!(
            writable[1],
            "`/v/x,y` is not read-only: Podman cannot mount"
        );
        let found = found.iter().map(|bind| {
            assert!(bind.read_only);
            (bind.source.as_path(), bind.target.as_str())
        });
        let (a, b) = (top.join("ro/a"), top.join("ro/a/b"));
        assert!(found.eq([(a.as_path(), "/v/a"), (b.as_path(), "/v/a/b")]));
    }
}
