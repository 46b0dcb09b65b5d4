//! Owns the terminal of `exec` and `shell`. Descriptors are passed to the command directly if that is safe. The
//! user's terminal must not enter a container, so it is copied through pipes.

use std::io::{IsTerminal as _, Read as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;
use nix::sys::stat::{SFlag, fstat};
use nix::sys::termios::{SetArg, Termios, cfmakeraw, tcgetattr, tcsetattr};
use rustix::termios::{tcgetwinsize, tcsetwinsize};

use crate::engine::session::Client;
use crate::engine::wire::{Command, Reply, Then};
use crate::sys::beneath;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::signals::{self, STOP, Signals};

/// How long a container may take to answer a request to signal a command.
const ANSWER: Duration = Duration::from_secs(10);
/// How long a command may take to start before the user is told.
const PATIENCE: Duration = Duration::from_secs(5);
/// How many bytes are copied at once.
const PIECE: usize = 16 << 10;
/// Maximum number of pieces that an exited command may have left: more than fit into a pipe or a terminal.
const LAST_PIECES: usize = 64;

/// How a command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Exit {
    pub code: u8,
    /// The state of the container after the command.
    pub then: Then,
    /// Whether a signal told the command to end.
    pub interrupted: bool,
}

/// Runs a command and passes on input, output, signals and window size. Calls `waits` if the command has to wait for
/// the container, which another command or a service may still be starting. Returns how the command ended, or `None` if
/// the container was gone before the command could start.
pub(crate) fn run(client: &Client, command: Command, waits: &dyn Fn()) -> Result<Option<Exit>> {
    // They stay blocked after the command, so later waits, such as for the env's lock, must look for them.
    drop(Signals::take()?);
    let signals = signals::block(&[&STOP[..], &[Signal::SIGWINCH]].concat())?;
    let mut copies = Vec::new();
    let tty = command.tty;
    match send(client, command, &mut copies) {
        Err(error) if error.kind() == Kind::Unavailable => return Ok(None),
        other => other?,
    }
    let mut raw = None;
    // Whether the command may run by now, and whether it is known to run.
    let (mut starting, mut started) = (false, false);
    let mut interrupted = false;
    // A signal that the container has not answered.
    let mut asked: Option<(i32, Instant)> = None;
    let mut terminal: Option<OwnedFd> = None;
    let mut patience = Some(Instant::now() + PATIENCE);
    loop {
        let until = asked.map(|(_, until)| until).into_iter().chain(patience);
        let (from_client, signalled, ready) = wait(client, &signals, &copies, until.min())?;
        if patience
            .take_if(|until| !from_client && Instant::now() >= *until)
            .is_some()
        {
            waits();
        }
        if let Some((number, until)) = asked.filter(|_| !from_client)
            && Instant::now() >= until
        {
            return Err(no_answer(number));
        }
        for index in ready.into_iter().rev() {
            if !copies[index].step()? {
                copies.remove(index);
            }
        }
        if signalled {
            while let Some(number) = signals.pending()? {
                match number {
                    number if number == Signal::SIGWINCH as i32 => resize(terminal.as_ref())?,
                    // A stopped container (SIGSTOP) never answers: the second Ctrl-C ends the wait.
                    number if interrupted && !started => return Err(no_answer(number)),
                    number => {
                        interrupted = true;
                        asked = asked.or(Some((number, Instant::now() + ANSWER)));
                        drop(client.signal(number));
                    }
                }
            }
        }
        if !from_client {
            continue;
        }
        match client.receive()? {
            None if starting || started => {
                drop(raw);
                let message = "the container ended, and the command with it";
                return Err(Error::new(Kind::Command(137), message));
            }
            None => return Ok(None),
            Some((Reply::Starting, _)) => (starting, patience) = (true, None),
            Some((Reply::Signalled, _)) => asked = None,
            // Root of the container may send this again, or a terminal that was not requested: the user's would stay
            // raw.
            Some((Reply::Started, _)) if started => {}
            Some((Reply::Started, fds)) => {
                started = true;
                if let Some(outer) = fds.into_iter().next().filter(|_| tty) {
                    raw = Some(Raw::enter()?);
                    copies.extend(Copy::both_ways(&outer)?);
                    resize(Some(&outer))?;
                    terminal = Some(outer);
                }
            }
            Some((Reply::NotStarted { code, message }, _)) => {
                drop(raw);
                return Err(Error::new(Kind::Command(code), message));
            }
            Some((Reply::Exited { code, then, .. }, _)) => {
                // Its last output is still on the way; input is no longer needed.
                for copy in copies.iter_mut().filter(|copy| copy.is_output) {
                    copy.flush()?;
                }
                drop(raw);
                return Ok(Some(Exit {
                    code,
                    then,
                    interrupted,
                }));
            }
        }
    }
}

/// Hands the command and its standard streams to the container.
fn send(client: &Client, command: Command, copies: &mut Vec<Copy>) -> Result<()> {
    if command.tty {
        // The terminal inside replaces only the user's terminal: a file keeps the errors.
        let stderr = std::io::stderr();
        check_kind(stderr.as_fd())?;
        let apart = (!stderr.is_terminal()).then(|| stderr.as_fd());
        return client.run(command, apart.as_slice());
    }
    let ends = standard_ends(copies)?;
    client.run(command, &ends.each_ref().map(AsFd::as_fd))
}

fn no_answer(signal: i32) -> Error {
    let message = "interrupted: the container does not answer";
    Error::new(Kind::Signal(signal), message)
}

/// Returns the standard descriptors for the command; terminals are replaced by pipes.
fn standard_ends(copies: &mut Vec<Copy>) -> Result<[OwnedFd; 3]> {
    let mut end = |stream: BorrowedFd<'_>, is_input: bool| -> Result<OwnedFd> {
        let fd = stream.try_clone_to_owned()?;
        check_kind(stream)?;
        if !nix::unistd::isatty(stream)? {
            return Ok(fd);
        }
        let (read, write) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        if is_input {
            copies.push(Copy::input(fd, write)?);
            return Ok(read);
        }
        copies.push(Copy::output(read, fd));
        Ok(write)
    };
    Ok([
        end(std::io::stdin().as_fd(), true)?,
        end(std::io::stdout().as_fd(), false)?,
        end(std::io::stderr().as_fd(), false)?,
    ])
}

/// Refuses a directory: a host directory inside would be a way out of the container.
fn check_kind(stream: BorrowedFd<'_>) -> Result<()> {
    if beneath::kind(&fstat(stream)?) == SFlag::S_IFDIR {
        return Err(usage!("standard input or output is a directory")
            .help("rockenv exec ENV -- CMD </dev/null"));
    }
    Ok(())
}

/// Waits until a descriptor is ready. Returns whether the client and the signals can be read, and the positions of the
/// copies that can continue.
fn wait(
    client: &Client,
    signals: &Signals,
    copies: &[Copy],
    until: Option<Instant>,
) -> Result<(bool, bool, Vec<usize>)> {
    let mut fds = vec![
        PollFd::new(client.as_fd(), PollFlags::POLLIN),
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
    ];
    fds.extend(copies.iter().map(Copy::waits_for));
    let timeout = until.map_or(PollTimeout::NONE, |until| {
        let left = until.saturating_duration_since(Instant::now());
        PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
    });
    match poll(&mut fds, timeout) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let ready: Vec<bool> = fds.iter().map(|fd| fd.any().unwrap_or(false)).collect();
    let copies = (2..ready.len()).filter(|&at| ready[at]).map(|at| at - 2);
    Ok((ready[0], ready[1], copies.collect()))
}

/// Copies bytes from one descriptor to another.
#[derive(Debug)]
struct Copy {
    from: fs_err::File,
    to: fs_err::File,
    /// Bytes read and not written yet.
    pending: Vec<u8>,
    is_output: bool,
}

impl Copy {
    /// Copies to the command. Non-blocking, because a program that does not read its input must not keep its output
    /// from being shown. No other process has this end of the pipe, so its mode may change.
    fn input(from: OwnedFd, to: OwnedFd) -> Result<Self> {
        fcntl(&to, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
        Ok(Self {
            is_output: false,
            ..Self::output(from, to)
        })
    }

    /// Copies to the user's terminal. Other programs have it open too, so its mode must not change.
    fn output(from: OwnedFd, to: OwnedFd) -> Self {
        let [from, to] =
            [from, to].map(|fd| fs_err::File::from_parts(fd.into(), "a standard stream"));
        Self {
            from,
            to,
            pending: Vec::new(),
            is_output: true,
        }
    }

    /// Copies between the user's terminal and the command's.
    fn both_ways(outer: &OwnedFd) -> Result<[Self; 2]> {
        let input = std::io::stdin().as_fd().try_clone_to_owned()?;
        let output = std::io::stdout().as_fd().try_clone_to_owned()?;
        let input = Self::input(input, outer.try_clone()?)?;
        Ok([input, Self::output(outer.try_clone()?, output)])
    }

    fn waits_for(&self) -> PollFd<'_> {
        if self.pending.is_empty() {
            PollFd::new(self.from.file().as_fd(), PollFlags::POLLIN)
        } else {
            PollFd::new(self.to.file().as_fd(), PollFlags::POLLOUT)
        }
    }

    /// Copies available data as far as the reader takes it; returns whether there can be more.
    fn step(&mut self) -> Result<bool> {
        if self.pending.is_empty() {
            let mut buffer = [0u8; PIECE];
            // Not through `fs_err`, whose errors have no errno.
            match self.from.file().read(&mut buffer) {
                Ok(0) => return Ok(false),
                // The other end of a terminal whose last program ended.
                Err(error) if error.raw_os_error() == Some(nix::libc::EIO) => return Ok(false),
                Err(error) if is_momentary(&error) => return Ok(true),
                Err(error) => return Err(error.into()),
                Ok(count) => self.pending.extend_from_slice(&buffer[..count]),
            }
        }
        while !self.pending.is_empty() {
            match self.to.file().write(&self.pending) {
                Ok(count) => drop(self.pending.drain(..count)),
                Err(error) if is_momentary(&error) => return Ok(true),
                Err(error) => match error.raw_os_error() {
                    // The reader is gone.
                    Some(nix::libc::EPIPE | nix::libc::EIO) => return Ok(false),
                    _ => return Err(error.into()),
                },
            }
        }
        Ok(true)
    }

    /// Copies the rest of a finished command's output. A process that it left behind may write forever.
    fn flush(&mut self) -> Result<()> {
        for _ in 0..LAST_PIECES {
            let ready = poll(&mut [self.waits_for()], PollTimeout::ZERO)? > 0;
            if !ready || !self.step()? {
                break;
            }
        }
        Ok(())
    }
}

fn is_momentary(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{Interrupted, WouldBlock};
    matches!(error.kind(), WouldBlock | Interrupted)
}

/// The user's terminal in raw mode, restored when dropped.
struct Raw(Termios);

impl Raw {
    fn enter() -> Result<Self> {
        let before = tcgetattr(std::io::stdin().as_fd())?;
        let mut raw = before.clone();
        cfmakeraw(&mut raw);
        tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, &raw)?;
        Ok(Self(before))
    }
}

impl Drop for Raw {
    fn drop(&mut self) {
        let _: nix::Result<()> = tcsetattr(std::io::stdin().as_fd(), SetArg::TCSANOW, &self.0);
    }
}

/// Gives the inner terminal the size of the outer.
fn resize(terminal: Option<&OwnedFd>) -> Result<()> {
    if let Some(terminal) = terminal
        && let Ok(size) = tcgetwinsize(std::io::stdin())
    {
        tcsetwinsize(terminal, size).map_err(std::io::Error::from)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd as _;
    use std::os::unix::net::{UnixListener, UnixStream};

    use super::*;
    use crate::sys::frames;

    /// Returns a client with the other end of its connection, and their directory.
    fn connected() -> (tempfile::TempDir, Client, UnixStream) {
        let directory = tempfile::tempdir().unwrap();
        let listener = UnixListener::bind(directory.path().join("control.sock")).unwrap();
        let client = Client::join(directory.path()).unwrap().unwrap();
        let (agent, _) = listener.accept().unwrap();
        (directory, client, agent)
    }

    fn command() -> Command {
        Command {
            cwd: "/".to_owned(),
            no_new_privs: true,
            ..Command::default()
        }
    }

    fn exited(code: u8) -> Reply {
        Reply::Exited {
            code,
            signal: None,
            then: Then::Stays,
        }
    }

    #[test]
    fn a_container_gets_no_terminal_for_a_command_that_wants_none() {
        let (_directory, client, agent) = connected();
        let (outer, _inner) = UnixStream::pair().unwrap();
        for (reply, fds) in [
            (Reply::Started, &[outer.as_raw_fd()][..]),
            (Reply::Started, &[outer.as_raw_fd()]),
            (exited(3), &[]),
        ] {
            frames::send(&agent, &reply, fds).unwrap();
        }
        // Standard input may not be a terminal here, so it cannot be made raw.
        let exit = run(&client, command(), &|| {}).unwrap().unwrap();
        assert_eq!(exit.code, 3);
        // A signal after the command ends a wait for a lock.
        nix::sys::signal::raise(Signal::SIGTERM).unwrap();
        assert!(signals::stop_if_pending().is_err());
        // The next test may run in the same thread.
        let taken = Signals::take().unwrap();
        assert_eq!(taken.pending().unwrap(), Some(Signal::SIGTERM as i32));
    }

    #[test]
    fn a_container_that_takes_long_to_start_is_named() {
        let (_directory, client, agent) = connected();
        let told = std::cell::Cell::new(0);
        let waits = || {
            told.set(told.get() + 1);
            for reply in [Reply::Starting, Reply::Started, exited(0)] {
                frames::send(&agent, &reply, &[]).unwrap();
            }
        };
        assert_eq!(run(&client, command(), &waits).unwrap().unwrap().code, 0);
        assert_eq!(told.get(), 1);
    }

    #[test]
    fn output_of_a_process_that_was_left_behind_keeps_nobody_waiting() {
        let endless = fs_err::File::open("/dev/zero").unwrap();
        let mut options = fs_err::OpenOptions::new();
        let nowhere = options.write(true).open("/dev/null").unwrap();
        let [endless, nowhere] = [endless, nowhere].map(|file| file.into_parts().0.into());
        Copy::output(endless, nowhere).flush().unwrap();
    }
}
