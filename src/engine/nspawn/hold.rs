//! Owns the holder's side of a container under systemd-nspawn: its mounts in a private namespace, starting it, and
//! its usage.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::fcntl::{AT_FDCWD, OFlag, ResolveFlag};
use nix::mount::{MntFlags, MsFlags, umount2};
use nix::sys::signal::Signal;
use nix::sys::stat::{SFlag, fstat};
use nix::sys::time::{TimeVal, TimeValLike as _};

use crate::engine::cgroup::{Cgroup, Figures};
use crate::engine::hold::{
    Connections, ContainerRecord, Hold, PATIENCE, Watch, check_binds, supervise, tree_lock,
};
use crate::engine::jobserver::Server;
use crate::engine::wire::ToAgent;
use crate::engine::{Bind, Container, Root, Usage, View, open_files};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::sockets::SocketRules;
use crate::sys::{frames, host};
use crate::tree::{mounts, overlay};

/// Mounts the container's tree and volumes, runs it and waits until it has ended; returns its usage.
pub(in crate::engine) fn hold(
    hold: &Hold,
    state: &mut ContainerRecord,
    connections: Connections<'_>,
) -> Result<Usage> {
    let container = &hold.container;
    let root = hold.run.join("root");
    overlay::enter_mount_namespace()?;
    match &container.root {
        Root::Directory(tree) => {
            mounts::mount_with(Some(tree), &root, MsFlags::MS_BIND)
                .context(|| format!("cannot mount tree `{}`", tree.display()))?;
        }
        Root::Overlay(view) => mount_view(view, &view.layers, &root)?,
        Root::Service(_) => return Err(unexpected!("a service mounts its own trees")),
    }
    check_binds(&hold.container)?;
    // Root of the container may have created device nodes in the tree. systemd-nspawn mounts its own `/dev`.
    mounts::add_flags(&root, MsFlags::MS_NODEV)
        .context(|| format!("cannot mount `{}` without devices", root.display()))?;
    let mut hold = with_volumes(hold)?;
    hold.container.show_certificates(Some(&root), &hold.run)?;
    show_name_servers(&mut hold.container, &root)?;
    let hold = &hold;
    state.lock = Some(tree_lock(&root)?);
    // Mounts end with this process, but `run_engine` creates things that outlive it.
    state.save(&hold.run)?;
    let result = run_engine(hold, state, connections, &root);
    if let Err(nix::Error::EBUSY) = umount2(&root, MntFlags::empty()) {
        let _: nix::Result<()> = umount2(&root, MntFlags::MNT_DETACH);
    }
    for at in hold.container.binds.iter().map(|bind| &bind.source) {
        if at.parent() == Some(&hold.run) && is_volume(at) {
            let _: nix::Result<()> = umount2(at, MntFlags::MNT_DETACH);
            drop(fs::remove_dir(at).or_else(|_| fs::remove_file(at)));
        }
    }
    // nspawn locks the directory by a file beside it.
    drop(fs::remove_file(hold.run.join(".#root.lck")));
    result
}

fn mount_view(view: &View, lowers: &[PathBuf], at: &Path) -> Result<()> {
    let upper = overlay::Upper {
        diff: &view.upper,
        work: &view.work,
    };
    overlay::mount(lowers, Some(upper), at)
}

/// Opens the source of a bind. Does not follow a symlink that appeared in a real path: a step may have created it.
fn open_source(bind: &Bind) -> Result<OwnedFd> {
    let rules = match bind.is_real {
        true => ResolveFlag::RESOLVE_NO_SYMLINKS | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        false => ResolveFlag::empty(),
    };
    beneath::open_by(AT_FDCWD, &bind.source, OFlag::O_PATH, rules)
        .context(|| format!("cannot mount `{}`", bind.target))
}

/// Prefix of the mount points of volumes in an env's `run` directory.
const VOLUME: &str = "volume-";

fn is_volume(at: &Path) -> bool {
    let name = at.file_name().and_then(|name| name.to_str());
    name.is_some_and(|name| name.starts_with(VOLUME))
}

/// Flags of the mounts of volumes: setuid programs gain no rights, and device nodes cannot be opened.
const VOLUME_FLAGS: MsFlags = MsFlags::MS_NOSUID.union(MsFlags::MS_NODEV);

/// Mounts the volumes, or their views, in this namespace, and returns the request with these mounts as sources.
fn with_volumes(hold: &Hold) -> Result<Hold> {
    let mut hold = hold.clone();
    for (index, bind) in hold.container.binds.iter_mut().enumerate() {
        // The run directory has rockenv's own files and directories for the container, and no volumes.
        if bind.source.parent() == Some(&hold.run) {
            continue;
        }
        let wrong = || format!("cannot mount `{}`", bind.target);
        let at = hold.run.join(format!("{VOLUME}{index}"));
        let opened = open_source(bind)?;
        match beneath::kind(&fstat(&opened).context(wrong)?) == SFlag::S_IFDIR {
            true => fs::create_dir_all(&at)?,
            false => drop(fs::File::create(&at)?),
        }
        match &bind.view {
            Some(view) => {
                let lowers = [&view.layers[..], &[beneath::path_of(&opened)]].concat();
                mount_view(view, &lowers, &at)
                    .context(|| format!("cannot mount `{}` with its hooks", bind.target))?;
            }
            None => {
                let flags = MsFlags::MS_BIND | MsFlags::MS_REC;
                mounts::mount_with(Some(&beneath::path_of(&opened)), &at, flags).context(wrong)?;
            }
        }
        // A bind is recursive, so mounts below the directory came along.
        let mut mounted = mounts::at_or_below(&fs::canonicalize(&at)?)?;
        mounted.push(at.clone());
        for at in mounted {
            mounts::add_flags(&at, VOLUME_FLAGS).context(wrong)?;
        }
        bind.source = at;
    }
    Ok(hold)
}

const NAME_SERVERS: &str = "/etc/resolv.conf";

/// Mounts the host's list of name servers where a link at its place in the tree leads. The package of systemd-resolved
/// makes a link into `/run`, which is empty. systemd-nspawn makes the directories there for a bind, but not for
/// `--resolv-conf`.
fn show_name_servers(container: &mut Container, root: &Path) -> Result<()> {
    let tree = beneath::open_path(root)?;
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
    let found = beneath::open_by(&tree, "etc/resolv.conf", flags, beneath::IN_ROOT);
    let is_link = found
        .and_then(|found| fstat(&found))
        .is_ok_and(|found| beneath::kind(&found) == SFlag::S_IFLNK);
    if container.network
        && is_link
        && let Ok(list) = fs::canonicalize(NAME_SERVERS)
    {
        container.binds.push(Bind::read_only(list, NAME_SERVERS));
    }
    Ok(())
}

/// Makes the views forget the files that they showed. A view goes on showing such a file, or that a name is missing,
/// even if an editor or git changes the source below it. Reconfiguring a file system drops what no process uses.
fn forget_shown(binds: &[Bind]) -> nix::Result<()> {
    let mut views = binds.iter().filter(|bind| bind.view.is_some());
    let flags = MsFlags::MS_REMOUNT | VOLUME_FLAGS;
    views.try_for_each(|bind| mounts::mount_with(None, &bind.source, flags))
}

fn run_engine(
    hold: &Hold,
    state: &mut ContainerRecord,
    connections: Connections<'_>,
    root: &Path,
) -> Result<Usage> {
    if let Some(user) = &hold.container.user {
        user.ensure(root)?;
    }
    let missing = state
        .cgroup
        .create(&hold.container.limits, &hold.container.devices)?;
    let mut noise = tempfile::tempfile_in(&hold.run)?;
    let (ours, theirs) = UnixStream::pair()?;
    let mut child = spawn(hold, state, root, theirs, &noise)?;
    // This starts a thread, so it must come after the fork.
    let jobs = Server::start(hold, connections.jobs, &state.cgroup)?;
    let listen = ToAgent::Listen { user: None };
    frames::send(&ours, &listen, &[connections.listener.as_raw_fd()])?;
    drop(connections.listener);
    let mut ended = |_| Ok(child.try_wait()?.is_some());
    let mut before = Figures::default();
    let killed = host::oom_kills();
    let cgroup = state.cgroup.clone();
    let outcome = supervise(
        ours,
        connections.signals,
        connections.starter,
        missing,
        Watch {
            tie: hold.tie,
            has_ended: &mut ended,
            dismiss: &mut || before = cgroup.figures(),
            idle: &mut |waits| {
                jobs.rest(waits.is_some());
                // Before the wait is recorded: the last command returns then, and the next one may follow.
                if waits.is_some() && forget_shown(&hold.container.binds).is_err() {
                    cgroup.terminate();
                }
                state.note_idle(&hold.run, waits);
            },
        },
    );
    // systemd removes a scope and its counters with its last process, possibly between two reads.
    let last = cgroup.figures();
    let figures = Figures {
        cpu_us: last.cpu_us.or(before.cpu_us),
        memory_peak: last.memory_peak.or(before.memory_peak),
        oom_kills: last.oom_kills.max(before.oom_kills),
    };
    let killed = host::oom_kills().saturating_sub(killed);
    end(&mut child, &cgroup)?;
    let memory_held = jobs.finish();
    let own = nix::sys::resource::getrusage(nix::sys::resource::UsageWho::RUSAGE_CHILDREN)?;
    let time = |value: TimeVal| u64::try_from(value.num_microseconds()).unwrap_or(0);
    let blocks = |count: i64| u64::try_from(count).unwrap_or(0) * 512;
    match outcome {
        Ok(true) => Ok(Usage {
            cpu_us: figures
                .cpu_us
                .unwrap_or_else(|| time(own.user_time()) + time(own.system_time())),
            memory_peak: figures.memory_peak,
            memory_held,
            read_bytes: blocks(own.block_reads()),
            written_bytes: blocks(own.block_writes()),
            oom_kills: figures.oom_kills.unwrap_or(killed),
        }),
        Ok(false) => Err(engine_error(&mut noise)),
        Err(error) => Err(error),
    }
}

/// Kills the engine and its container, and waits for both, but not forever: the kernel may hold them.
fn end(child: &mut Child, cgroup: &Cgroup) -> Result<()> {
    // Before it enters its scope, `systemd-run` may wait for systemd outside of the control group.
    child.kill()?;
    cgroup.kill(PATIENCE)?;
    let until = Instant::now() + PATIENCE;
    while child.try_wait()?.is_none() {
        if Instant::now() > until {
            return Err(unexpected!("systemd-nspawn was killed but does not exit"));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    Ok(())
}

/// Builds the error for an engine that exited before the agent answered, from the engine's output.
#[expect(clippy::disallowed_types, reason = "the file has no name")]
fn engine_error(noise: &mut std::fs::File) -> Error {
    use std::io::{Read as _, Seek as _, SeekFrom};
    let mut text = Vec::new();
    let read = noise
        .seek(SeekFrom::Start(0))
        .and_then(|_| noise.take(4096).read_to_end(&mut text));
    let text = String::from_utf8_lossy(&text);
    let said = match read {
        Ok(_) if !text.trim().is_empty() => text.trim().to_owned(),
        _ => "it printed nothing".to_owned(),
    };
    unavailable!("systemd-nspawn did not start the container")
        .source(said)
        .help("rockenv doctor")
}

#[expect(
    unsafe_code,
    reason = "the child enters its control group between fork and exec"
)]
#[expect(clippy::disallowed_types, reason = "the file has no name")]
fn spawn(
    hold: &Hold,
    state: &ContainerRecord,
    root: &Path,
    agent: UnixStream,
    noise: &std::fs::File,
) -> Result<Child> {
    let mut argv = state
        .cgroup
        .launcher(&hold.container.limits, &hold.container.devices);
    let has_device_rules = state.cgroup.has_device_rules();
    argv.extend(super::argv(
        &hold.container,
        root,
        &hold.program,
        has_device_rules,
        open_files()?,
    ));
    let procs_files = state.cgroup.procs_files().into_iter();
    let procs_files = procs_files.map(|path| fs::OpenOptions::new().write(true).open(path));
    let procs_files = procs_files.collect::<std::io::Result<Vec<_>>>()?;
    let mut command = std::process::Command::new(&argv[0]);
    command
        .args(&argv[1..])
        .env_clear()
        .envs(super::ENVIRONMENT)
        .current_dir("/")
        .stdin(Stdio::from(OwnedFd::from(agent)))
        .stdout(Stdio::from(noise.try_clone()?))
        .stderr(Stdio::from(noise.try_clone()?));
    let mut sockets = SocketRules::new()?;
    // SAFETY: between fork and exec the closure only makes system calls, on files opened before: it takes no lock that
    // another thread could hold, and allocates nothing but for an error.
    unsafe {
        command.pre_exec(move || {
            nix::sys::prctl::set_pdeathsig(Signal::SIGKILL)?;
            for entrance in &procs_files {
                nix::unistd::write(entrance, b"0")?;
            }
            sockets.enforce()
        });
    }
    command.spawn().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            unavailable!("`{}` is not installed", argv[0]).help("rockenv setup")
        }
        _ => unexpected!("cannot start `{}`", argv[0]).source(error),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_outside_its_control_group_ends_too() {
        let mut sleep = std::process::Command::new("sleep");
        let mut child = sleep.arg("1000").spawn().unwrap();
        end(&mut child, &Cgroup::default()).unwrap();
    }

    #[test]
    fn name_servers_are_shown_where_the_link_of_an_image_leads() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path();
        fs::create_dir(root.join("etc")).unwrap();
        let list = root.join("etc/resolv.conf");
        let shown = |network| {
            let mut container = super::super::tests::container();
            container.binds.clear();
            container.network = network;
            show_name_servers(&mut container, root).unwrap();
            container.binds.len()
        };
        fs::write(&list, "").unwrap();
        assert_eq!(shown(true), 0);
        fs::remove_file(&list).unwrap();
        fs::os::unix::fs::symlink("../run/systemd/resolve/stub-resolv.conf", &list).unwrap();
        let is_on_host = usize::from(Path::new(NAME_SERVERS).exists());
        assert_eq!((shown(true), shown(false)), (is_on_host, 0));
    }

    #[test]
    fn a_link_that_appeared_on_the_way_is_not_followed() {
        let directory = tempfile::tempdir().unwrap();
        let top = fs::canonicalize(directory.path()).unwrap();
        fs::create_dir_all(top.join("real/source")).unwrap();
        fs::os::unix::fs::symlink("real", top.join("link")).unwrap();
        let bind = |name: &str, is_real| Bind {
            is_real,
            ..Bind::read_only(top.join(name), "/src")
        };
        let opened = open_source(&bind("real/source", true)).unwrap();
        let shown = fs::read_link(beneath::path_of(&opened)).unwrap();
        assert_eq!(shown, top.join("real/source"));
        assert!(open_source(&bind("link/source", false)).is_ok());
        let error = open_source(&bind("link/source", true)).unwrap_err();
        assert_has!(error.message(), "cannot mount `/src`");
    }
}
