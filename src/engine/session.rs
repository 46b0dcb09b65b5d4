//! Owns the client's side: starting a holder or joining one, and running a command in its container.

use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use fs_err as fs;

use super::Usage;
use super::hold::{ContainerRecord, FromHolder, Hold};
use super::wire::{Command, Reply, Request};
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _, if_exists};
use crate::sys::frames;
use crate::sys::process::PATH;
use crate::sys::readable::readable;
use crate::sys::signals;

/// Name of the listening socket in an env's `run` directory.
const SOCKET: &str = "control.sock";

/// How long an agent may take to tell whether its container is idle.
const IDLE: Duration = Duration::from_secs(1);

/// How long an agent may take to read the rest of a frame, or to send it.
const ANSWER: Duration = Duration::from_secs(10);

/// How long the holder may take to end its container once the command was interrupted.
const FAREWELL: Duration = Duration::from_secs(30);

/// A container that this process started.
#[derive(Debug)]
pub(crate) struct Running {
    link: UnixStream,
    holder: Child,
    run: PathBuf,
    ready: bool,
}

/// The holder's last message.
#[derive(Debug)]
pub(crate) enum End {
    Ended(Usage),
    /// Other commands use the container, or may soon.
    Shared,
}

impl Running {
    /// Starts a holder for `hold`. It keeps `lock`, and its claim on jobs, open until the container is gone.
    pub(crate) fn start(hold: &Hold, lock: BorrowedFd<'_>, jobs: OwnedFd) -> Result<Self> {
        fs::create_dir_all(hold.run.join("root"))?;
        let path = hold.run.join(SOCKET);
        if_exists(fs::remove_file(&path))?;
        let listener = UnixListener::bind(short_path(&hold.run, SOCKET)?.1)
            .context(|| format!("cannot listen at `{}`", path.display()))?;
        let (ours, theirs) = UnixStream::pair()?;
        let mut command = std::process::Command::new(&hold.program);
        command
            .arg("__hold")
            .env_clear()
            .env("PATH", PATH)
            .current_dir("/")
            .stdin(Stdio::from(OwnedFd::from(theirs)))
            .stdout(Stdio::null())
            // The holder may outlive this command, and a reader of this command's output waits for every process that
            // could write to it.
            .stderr(Stdio::null());
        leave_session(&mut command);
        let holder = command
            .spawn()
            .context(|| format!("cannot start `{}`", hold.program.display()))?;
        let passed = [lock.as_raw_fd(), listener.as_raw_fd(), jobs.as_raw_fd()];
        frames::send(&ours, hold, &passed)?;
        Ok(Self {
            link: ours,
            holder,
            run: hold.run.clone(),
            ready: false,
        })
    }

    /// Returns the holder's socket, for polling.
    pub(crate) fn link(&self) -> BorrowedFd<'_> {
        self.link.as_fd()
    }

    pub(crate) fn connect(&self) -> Result<Client> {
        let client = Client::join(&self.run)?;
        let client = client.ok_or_else(|| unavailable!("the container ended"))?;
        // The service may still be starting the container, so a write may have to wait.
        client.socket.set_write_timeout(None)?;
        Ok(client)
    }

    /// Returns whether the container was ready for its command. From then on the holder reports only the container's
    /// end.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready
    }

    /// Reads one message of the holder; `Ready` carries the limits that could not be set.
    pub(crate) fn receive(&mut self) -> Result<FromHolder> {
        match frames::receive::<FromHolder>(&self.link)? {
            Some((message, _)) => Ok(message),
            None => Err(
                unavailable!("the process that held the container was killed")
                    .help("`rockenv up` continues from the last snapshot"),
            ),
        }
    }

    /// Reads a message that the holder sends before the container is ready.
    pub(crate) fn hear(&mut self, warn: &mut dyn FnMut(String)) -> Result<()> {
        match self.receive()? {
            FromHolder::Ready(missing) => {
                missing.into_iter().for_each(warn);
                self.ready = true;
            }
            FromHolder::Waits(text) => warn(text),
            FromHolder::Failed { reason } => return Err(reason.into()),
            FromHolder::Ended(_) | FromHolder::Shared => {
                return Err(unavailable!("the container ended before its step"));
            }
        }
        Ok(())
    }

    /// Releases the container and waits for the outcome: its end, or a message that other commands use it. If the
    /// command was `interrupted`, or is interrupted during the wait, a holder that does not answer in time is killed.
    pub(crate) fn finish(mut self, interrupted: bool) -> Result<End> {
        self.link.shutdown(std::net::Shutdown::Write)?;
        let mut until = interrupted.then(|| Instant::now() + FAREWELL);
        let end = loop {
            if !self.answers(&mut until)? {
                self.holder.kill()?;
                self.holder.wait()?;
                let _ended = ContainerRecord::recover(&self.run)?;
                return Ok(End::Ended(Usage::default()));
            }
            match self.receive() {
                Ok(FromHolder::Ready(_) | FromHolder::Waits(_)) => {}
                Ok(FromHolder::Shared) => return Ok(End::Shared),
                Ok(FromHolder::Ended(usage)) => break Ok(End::Ended(usage)),
                Ok(FromHolder::Failed { reason }) => break Err(reason.into()),
                Err(killed) => {
                    // This command has the env's lock, so it cleans up the leftovers.
                    self.holder.wait()?;
                    let _ended = ContainerRecord::recover(&self.run)?;
                    return Err(killed);
                }
            }
        };
        // The holder's mount namespace ends only with the holder.
        self.holder.wait()?;
        end
    }

    /// Waits for a message from the holder, after a signal only for a limited time. Returns whether one arrived.
    fn answers(&self, until: &mut Option<Instant>) -> Result<bool> {
        let signals = signals::block(&signals::STOP)?;
        loop {
            let left = until.map(|until| until.saturating_duration_since(Instant::now()));
            let signals = left.is_none().then(|| signals.as_fd());
            let [answers, _] = readable([Some(self.link()), signals], left)?;
            if answers {
                return Ok(true);
            }
            match until {
                Some(until) if Instant::now() >= *until => return Ok(false),
                Some(_) => {}
                None => *until = Some(Instant::now() + FAREWELL),
            }
        }
    }
}

/// Moves the holder into its own session: the terminal's Ctrl-C is for the starter, which decides what it means.
#[expect(
    unsafe_code,
    reason = "the child leaves the session before a signal can reach it"
)]
fn leave_session(command: &mut std::process::Command) {
    // SAFETY: setsid is one system call.
    unsafe {
        command.pre_exec(|| Ok(nix::unistd::setsid().map(drop)?));
    }
}

/// A connection to the agent in a container: one command.
#[derive(Debug)]
pub(crate) struct Client {
    socket: UnixStream,
}

impl Client {
    /// Connects to the running container of the env with this `run` directory; `None` if no agent listens.
    pub(crate) fn join(run: &Path) -> Result<Option<Self>> {
        use std::io::ErrorKind::{ConnectionRefused, ConnectionReset, NotFound};
        let Ok((_directory, path)) = short_path(run, SOCKET) else {
            return Ok(None);
        };
        match UnixStream::connect(path) {
            Ok(socket) => {
                // Root of the container may stop the agent, at any moment.
                socket.set_read_timeout(Some(ANSWER))?;
                socket.set_write_timeout(Some(ANSWER))?;
                Ok(Some(Self { socket }))
            }
            Err(error) => match error.kind() {
                NotFound | ConnectionRefused | ConnectionReset => Ok(None),
                _ => Err(error)
                    .context(|| format!("cannot reach the container of `{}`", run.display())),
            },
        }
    }

    /// Requests a command; `fds` are its standard streams, as [`Request::Run`] describes.
    pub(crate) fn run(&self, command: Command, fds: &[BorrowedFd<'_>]) -> Result<()> {
        let fds: Vec<_> = fds.iter().map(|fd| fd.as_raw_fd()).collect();
        frames::send(&self.socket, &Request::Run(command), &fds)
    }

    pub(crate) fn signal(&self, number: i32) -> Result<()> {
        frames::send(&self.socket, &Request::Signal(number), &[])
    }

    /// Receives the next answer; `None` when the container is gone.
    pub(crate) fn receive(&self) -> Result<Option<(Reply, Vec<OwnedFd>)>> {
        frames::receive(&self.socket)
    }

    /// Returns the socket, for polling.
    pub(crate) fn as_fd(&self) -> BorrowedFd<'_> {
        self.socket.as_fd()
    }
}

/// Outcome of asking a container to end if it only waits for another command.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Retirement {
    Ends,
    /// A command runs in it.
    Refused,
    /// No answer: there is no container, it is ending, or its agent is stopped or busy.
    Silent,
}

/// Asks the running container of the env with this `run` directory to end if it only waits for another command.
pub(crate) fn retire(run: &Path) -> Result<Retirement> {
    let Some(client) = Client::join(run)? else {
        return Ok(Retirement::Silent);
    };
    // A stopped container (SIGSTOP) does not answer.
    client.socket.set_read_timeout(Some(IDLE))?;
    // The container may be ending at this moment.
    if frames::send(&client.socket, &Request::Retire, &[]).is_err() {
        return Ok(Retirement::Silent);
    }
    Ok(match frames::receive(&client.socket) {
        Ok(Some((true, _))) => Retirement::Ends,
        Ok(Some((false, _))) => Retirement::Refused,
        Ok(None) | Err(_) => Retirement::Silent,
    })
}

/// Returns a path to the socket `name` in `directory` that fits into a socket address (108 bytes) however long the
/// store's path is. Also returns the open directory, which must stay open while the path is used.
pub(super) fn short_path(directory: &Path, name: &str) -> Result<(OwnedFd, PathBuf)> {
    use nix::fcntl::OFlag;
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let opened = nix::fcntl::open(directory, flags, nix::sys::stat::Mode::empty())
        .context(|| format!("cannot open `{}`", directory.display()))?;
    let path = beneath::path_of(&opened).join(name);
    Ok((opened, path))
}
