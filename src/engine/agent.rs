//! Owns rockenv's side inside a container: the first process there, which starts commands for clients outside and
//! ends everything when the holder is gone. On SIGTERM it gives its commands a moment to end.
//!
//! The agent has a stream to the holder. The end of that stream reveals at once that the holder was killed, or that
//! systemd-nspawn was, which leaves its payload running. Clients connect to a listening socket that is created outside
//! and passed in, so nothing inside the container can reach it.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::resource::{Resource, getrlimit};
use nix::sys::signal::{Signal, kill, killpg};
use nix::sys::wait::{WaitPidFlag, WaitStatus, waitpid};
use nix::unistd::Pid;

use super::start_command;
use super::wire::{FromAgent, Reply, Request, Then, ToAgent};
use crate::sys::error::Result;
use crate::sys::frames;
use crate::sys::host::system_text;
use crate::sys::readable::which_readable;
use crate::sys::signals::{self, Signals};

/// How long commands may take to exit after the agent receives SIGTERM.
const GRACE: Duration = Duration::from_secs(5);
/// How long the agent waits after it could not accept a client. Another client may leave meanwhile.
const FULL: Duration = Duration::from_millis(10);

/// One client's connection and the command it started.
#[derive(Debug)]
struct Session {
    socket: Option<UnixStream>,
    pid: Option<Pid>,
}

/// Runs until the holder closes its end, or, after a drain, until the last command has ended.
///
/// The stream to the holder is the standard input, or a connection to the socket at `path`.
pub(crate) fn run(path: Option<&Path>) -> Result<()> {
    // A service starts it as the first process. In the machine's process namespace, the end below would kill every
    // process of the machine.
    if path.is_some() && std::process::id() != 1 {
        return Err(unexpected!(
            "the container has no process namespace of its own"
        ));
    }
    let mut agent = Agent::start(path)?;
    while agent.serve_once()? {}
    // Kills everything in this pid namespace except its init and the agent. The init exits with the agent.
    match kill(Pid::from_raw(-1), Signal::SIGKILL) {
        Ok(()) | Err(Errno::ESRCH) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

#[derive(Debug)]
struct Agent {
    holder: UnixStream,
    listener: UnixListener,
    /// Whether Docker or Podman runs the container, rather than systemd-nspawn.
    in_service: bool,
    signals: Signals,
    rest: Rest,
    sessions: Vec<Session>,
    /// Maximum number of sessions with a command. The agent needs descriptors to start commands and to find processes.
    most: usize,
    /// Whether the agent exits after its last command.
    draining: bool,
    /// When the agent exits even if commands still run.
    deadline: Option<Instant>,
}

impl Agent {
    /// Connects to the holder and receives the socket to listen on.
    fn start(path: Option<&Path>) -> Result<Self> {
        let holder = match path {
            Some(path) => UnixStream::connect(path)?,
            None => UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?),
        };
        let Some((ToAgent::Listen { user }, fds)) = frames::receive::<ToAgent>(&holder)? else {
            return Err(unexpected!(
                "the agent is started by `rockenv`, not manually"
            ));
        };
        let listener = fds.into_iter().next();
        let listener = listener.ok_or_else(|| unexpected!("the agent received no socket"))?;
        let listener: UnixListener = listener.into();
        if let Some(user) = user {
            user.ensure(Path::new("/"))?;
        }
        crate::engine::shim::install();
        let signals = signals::block(&[Signal::SIGCHLD, Signal::SIGTERM])?;
        let rest = Rest {
            fresh: traces(),
            ..Rest::default()
        };
        let (open, _) = getrlimit(Resource::RLIMIT_NOFILE)?;
        frames::send(&holder, &FromAgent::Ready, &[])?;
        Ok(Self {
            holder,
            listener,
            in_service: path.is_some(),
            signals,
            rest,
            sessions: Vec::new(),
            most: usize::try_from(open - open / 8).unwrap_or(usize::MAX),
            draining: false,
            deadline: None,
        })
    }

    /// Waits for an event and handles it. Returns whether the agent continues.
    fn serve_once(&mut self) -> Result<bool> {
        if self.is_over()? {
            return Ok(false);
        }
        let ([from_holder, from_listener, signalled], readable) = self.wait()?;
        if signalled {
            self.hear_signals()?;
        }
        if from_holder && !self.hear_holder()? {
            return Ok(false);
        }
        let is_full = self.sessions.len() > self.most;
        for index in readable {
            let session = &mut self.sessions[index];
            serve(session, &mut self.rest, self.in_service, is_full);
        }
        if self.rest.until.is_some() && self.sessions.iter().any(|one| one.pid.is_some()) {
            self.rest.until = None;
            self.send_remaining()?;
        }
        self.sessions
            .retain(|session| session.socket.is_some() || session.pid.is_some());
        if from_listener {
            match self.listener.accept() {
                Ok((socket, _)) => self.sessions.push(Session {
                    socket: Some(socket),
                    pid: None,
                }),
                // One client too many must not end the commands of the others.
                Err(_) => std::thread::sleep(FULL),
            }
        }
        Ok(true)
    }

    /// Returns whether the time is up or the last command has exited. Begins to wait for another command if possible.
    fn is_over(&mut self) -> Result<bool> {
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| now >= deadline) {
            return Ok(true);
        }
        if !self.draining || !self.sessions.is_empty() {
            return Ok(false);
        }
        match self.rest.until {
            None if self.rest.is_possible() => {
                self.rest.until = Some(now + self.rest.limit);
                self.rest.waits += 1;
                frames::send(&self.holder, &FromAgent::Idle(self.rest.waits), &[])?;
                Ok(false)
            }
            None => Ok(true),
            Some(until) => Ok(now >= until),
        }
    }

    /// Waits until a descriptor is readable, or until it is time to exit. Returns whether the holder, the listener and
    /// the signals are readable, and the indices of the sessions that are.
    fn wait(&self) -> Result<([bool; 3], Vec<usize>)> {
        let own = [
            self.holder.as_fd(),
            self.listener.as_fd(),
            self.signals.as_fd(),
        ];
        let sessions = self.sessions.iter().enumerate();
        let sockets =
            sessions.filter_map(|(index, session)| Some((index, session.socket.as_ref()?.as_fd())));
        let (indices, sockets): (Vec<usize>, Vec<BorrowedFd<'_>>) = sockets.unzip();
        let until = self.rest.until.filter(|_| self.sessions.is_empty());
        let until = self.deadline.or(until);
        let limit = until.map(|until| until.saturating_duration_since(Instant::now()));
        let ready = which_readable(&[&own[..], &sockets[..]].concat(), limit)?;
        let sessions = indices.into_iter().zip(&ready[own.len()..]);
        let sessions = sessions.filter_map(|(index, ready)| ready.then_some(index));
        Ok(([ready[0], ready[1], ready[2]], sessions.collect()))
    }

    fn hear_signals(&mut self) -> Result<()> {
        while let Some(number) = self.signals.pending()? {
            if number == Signal::SIGTERM as i32 && self.deadline.is_none() {
                self.draining = true;
                self.rest.retire();
                self.deadline = Some(Instant::now() + GRACE);
                for pid in self.sessions.iter().filter_map(|session| session.pid) {
                    let _: nix::Result<()> = killpg(pid, Signal::SIGTERM);
                }
            }
        }
        let (draining, rest) = (self.draining, &self.rest);
        // SIGTERM stops every command in the container, so a step that then exits with 0 has not finished.
        let ends = self.deadline.is_some();
        reap(
            &mut self.sessions,
            &|is_alone| match ends || draining && is_alone {
                false => Then::Stays,
                true if rest.is_possible() => Then::Waits(rest.waits + 1),
                true => Then::Ends,
            },
        )
    }

    /// Handles a message from the holder. Returns whether the holder is still connected.
    fn hear_holder(&mut self) -> Result<bool> {
        match frames::receive::<ToAgent>(&self.holder)? {
            None => return Ok(false),
            Some((ToAgent::Drain(limit), _)) => {
                self.draining = true;
                self.rest.limit = limit;
                self.send_remaining()?;
            }
            Some((ToAgent::Listen { .. }, _)) => {}
        }
        Ok(true)
    }

    fn send_remaining(&self) -> Result<()> {
        let remaining = FromAgent::Remaining(self.sessions.len());
        frames::send(&self.holder, &remaining, &[])
    }
}

/// The wait for another command after the last one. It pays off because a service takes far longer to start a container
/// than to run a command in it.
#[derive(Debug, Default)]
struct Rest {
    /// Length of the wait; zero disables it.
    limit: Duration,
    /// When the current wait ends.
    until: Option<Instant>,
    /// Number of waits so far.
    waits: u64,
    /// The traces found before the first command.
    fresh: BTreeSet<PathBuf>,
}

impl Rest {
    /// Returns whether the container looks fresh to the next command.
    fn is_possible(&self) -> bool {
        !self.limit.is_zero() && traces() == self.fresh
    }

    /// Ends the current wait, and prevents later ones.
    fn retire(&mut self) {
        self.limit = Duration::ZERO;
        self.until = self.until.map(|_| Instant::now());
    }
}

/// Returns everything that a command may leave behind and that no snapshot contains: processes, files in the
/// container's private directories, System V IPC objects, and the state of the account files.
fn traces() -> BTreeSet<PathBuf> {
    let is_process = |path: &Path| {
        let name = path.file_name().and_then(OsStr::to_str);
        name.is_some_and(|name| name.parse::<u32>().is_ok())
    };
    let shared = [
        "/proc/sysvipc/msg",
        "/proc/sysvipc/sem",
        "/proc/sysvipc/shm",
    ];
    let shared = shared.into_iter().filter_map(|list| {
        let text = fs_err::read_to_string(list).ok()?;
        (text.lines().count() > 1).then(|| PathBuf::from(list))
    });
    // A fresh container gets the build user again, whatever a command did to these files.
    let accounts = ["/etc/group", "/etc/passwd"]
        .into_iter()
        .filter_map(|list| {
            let found = fs_err::symlink_metadata(list).ok()?;
            let (changed, nanoseconds) = (found.ctime(), found.ctime_nsec());
            let state = format!("{list} {} {changed}.{nanoseconds}", found.ino());
            Some(PathBuf::from(state))
        });
    let private = [
        "/dev",
        "/dev/mqueue",
        "/dev/shm",
        "/run",
        "/tmp",
        "/var/tmp",
        "/proc",
    ];
    private
        .into_iter()
        .filter_map(|directory| fs_err::read_dir(directory).ok())
        .flat_map(|entries| entries.flatten().map(|entry| entry.path()))
        .filter(|path| !path.starts_with("/proc") || is_process(path))
        .chain(shared)
        .chain(accounts)
        .collect()
}

/// Handles one frame from a client; a full agent starts no command. If the client has disconnected, kills its command.
fn serve(session: &mut Session, rest: &mut Rest, in_service: bool, is_full: bool) {
    let Some(socket) = &session.socket else {
        return;
    };
    match frames::receive::<Request>(socket) {
        Ok(Some((Request::Run(_), _))) if session.pid.is_none() && is_full => {
            let refused = Reply::NotStarted {
                code: 126,
                message: "too many commands run in the container".to_owned(),
            };
            drop(frames::send(socket, &refused, &[]));
            hang_up(session);
        }
        Ok(Some((Request::Run(command), fds))) if session.pid.is_none() => {
            if frames::send(socket, &Reply::Starting, &[]).is_err() {
                return hang_up(session);
            }
            match start_command::start(&command, fds, in_service) {
                Ok((pid, terminal)) => {
                    session.pid = Some(pid);
                    let fds: Vec<_> = terminal.iter().map(|fd| fd.as_raw_fd()).collect();
                    if frames::send(socket, &Reply::Started, &fds).is_err() {
                        hang_up(session);
                    }
                }
                Err(not_started) => {
                    // A disconnected client needs no answer.
                    drop(frames::send(socket, &not_started, &[]));
                    // The session is over: a drain must not wait for the client to close its end.
                    hang_up(session);
                }
            }
        }
        Ok(Some((Request::Signal(number), _))) => {
            if let (Some(pid), Ok(signal)) = (session.pid, Signal::try_from(number)) {
                // The command may have ended in between.
                let _: std::result::Result<(), Errno> = killpg(pid, signal);
            }
            // A disconnected client needs no answer.
            drop(frames::send(socket, &Reply::Signalled, &[]));
        }
        Ok(Some((Request::Retire, _))) => {
            let waits = rest.until.is_some();
            drop(frames::send(socket, &waits, &[]));
            if waits {
                rest.retire();
            }
            hang_up(session);
        }
        Ok(Some(_)) => {}
        Ok(None) | Err(_) => hang_up(session),
    }
}

fn hang_up(session: &mut Session) {
    session.socket = None;
    if let Some(pid) = session.pid {
        kill_family(pid);
    }
}

/// Kills a command with its session and its descendants: a shell's jobs have process groups of their own.
fn kill_family(leader: Pid) {
    // The next round finds processes forked during this one. A fork bomb ends with the container.
    for _ in 0..16 {
        let family = family(leader);
        if family.is_empty() {
            return;
        }
        for pid in family {
            let _: std::result::Result<(), Errno> = kill(pid, Signal::SIGKILL);
        }
    }
}

/// Returns the live processes in the session of `leader`, and their descendants.
fn family(leader: Pid) -> Vec<Pid> {
    let mut others = Vec::new();
    let mut family = Vec::new();
    for entry in fs_err::read_dir("/proc").into_iter().flatten().flatten() {
        let stat = system_text(entry.path().join("stat")).unwrap_or_default();
        // The name, in parentheses, may contain anything: `pid (name) state ppid group session ...`.
        let process = || {
            let ((pid, _), (_, rest)) = (stat.split_once(" (")?, stat.rsplit_once(") ")?);
            let mut fields = rest.split(' ');
            let (state, parent, session) = (fields.next()?, fields.next()?, fields.nth(1)?);
            let number = |text: &str| text.parse().ok().map(Pid::from_raw);
            Some((state, number(pid)?, number(parent)?, number(session)?))
        };
        let Some((state, pid, parent, session)) = process() else {
            continue;
        };
        if pid == Pid::this() || matches!(state, "Z" | "X") {
        } else if pid == leader || session == leader {
            family.push(pid);
        } else {
            others.push((pid, parent));
        }
    }
    loop {
        let (found, rest): (Vec<_>, Vec<_>) = others
            .into_iter()
            .partition(|(_, parent)| family.contains(parent));
        if found.is_empty() {
            return family;
        }
        family.extend(found.into_iter().map(|(pid, _)| pid));
        others = rest;
    }
}

/// Reaps exited commands and notifies their clients. `after` returns what the container does next, given whether the
/// command was the only one.
fn reap(sessions: &mut [Session], after: &dyn Fn(bool) -> Then) -> Result<()> {
    loop {
        let (pid, code, signal) = match waitpid(Pid::from_raw(-1), Some(WaitPidFlag::WNOHANG)) {
            Ok(WaitStatus::Exited(pid, code)) => (pid, code & 0xff, None),
            Ok(WaitStatus::Signaled(pid, signal, _)) => {
                (pid, 128 + signal as i32, Some(signal as i32))
            }
            Ok(WaitStatus::StillAlive) | Err(Errno::ECHILD) => return Ok(()),
            Ok(_) | Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        let code = u8::try_from(code).unwrap_or(255);
        let is_alone = sessions.len() == 1;
        if let Some(session) = sessions.iter_mut().find(|session| session.pid == Some(pid)) {
            session.pid = None;
            if let Some(socket) = session.socket.take() {
                let then = after(is_alone);
                // A disconnected client needs no answer.
                let reply = Reply::Exited { code, signal, then };
                drop(frames::send(&socket, &reply, &[]));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStrExt as _;
    use std::os::unix::process::CommandExt as _;

    use super::super::wire::{Command, Word};
    use super::*;

    #[test]
    fn a_client_too_many_is_refused_and_the_agent_goes_on() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("agent");
        let (holder, _other) = UnixStream::pair().unwrap();
        let mut agent = Agent {
            holder,
            listener: UnixListener::bind(&path).unwrap(),
            in_service: false,
            signals: signals::block(&[]).unwrap(),
            rest: Rest::default(),
            sessions: Vec::new(),
            most: 0,
            draining: false,
            deadline: None,
        };
        let client = UnixStream::connect(&path).unwrap();
        let command = Command {
            argv: vec![Word::Text("true".to_owned())],
            cwd: "/".to_owned(),
            ..Command::default()
        };
        frames::send(&client, &Request::Run(command), &[]).unwrap();
        assert!(agent.serve_once().unwrap() && agent.serve_once().unwrap());
        let (reply, _) = frames::receive::<Reply>(&client).unwrap().unwrap();
        assert!(matches!(reply, Reply::NotStarted { code: 126, .. }));
        assert!(agent.sessions.is_empty());
    }

    #[test]
    fn an_agent_outside_of_a_container_does_nothing() {
        let error = run(Some(Path::new("/no/socket"))).unwrap_err();
        assert_has!(error.message(), "no process namespace of its own");
    }

    #[test]
    fn a_process_ends_with_its_leader_whatever_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let program = directory.path().join(OsStr::from_bytes(b"caf\xe9"));
        fs_err::os::unix::fs::symlink("/bin/sleep", &program).unwrap();
        let mut command = std::process::Command::new(&program);
        let mut child = command.arg0("sleep").arg("60").spawn().unwrap();
        let leader = Pid::from_raw(child.id().cast_signed());
        let found = family(leader);
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(found.contains(&leader));
    }
}
