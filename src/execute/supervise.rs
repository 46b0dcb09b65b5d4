//! Owns waiting for a step's command: its output, its end, the timeout and the user's signals, in one loop of one
//! thread, so that memory stays constant whatever it prints.

use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::Signal;

use super::log::Log;
use crate::engine::hold::FromHolder;
use crate::engine::session::{Client, Running};
use crate::engine::wire::{Command, Reply};
use crate::execute::disk_guard::Room;
use crate::execute::redact::Mask;
use crate::execute::sampler::Meter;
use crate::sys::error::{Error, Result};
use crate::sys::signals::Signals;
use crate::ui::StepOutput;
use crate::ui::event::Stream;

/// How long a step may take to end after being asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How often buffered log lines are flushed, whether or not the step writes.
const FLUSH: Duration = Duration::from_millis(250);

/// How a step's command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// It ended by itself, with this code (128 plus the number for a signal).
    Exited {
        code: u8,
        /// The signal, if one ended it.
        signal: Option<i32>,
    },
    TimedOut,
    Interrupted(i32),
    /// Its container disappeared.
    Lost,
}

/// The inputs of a step's command, and where its output goes.
#[expect(missing_debug_implementations, reason = "holds a callback")]
pub struct Attended<'a> {
    pub command: Command,
    pub stdin: BorrowedFd<'a>,
    /// The longest it may take.
    pub timeout: Option<Duration>,
    /// Hides credentials in its output.
    pub mask: &'a mut Mask,
    pub log: &'a mut Log,
    /// Shows its output.
    pub output: &'a mut StepOutput,
    /// Guards its disk space.
    pub room: &'a mut Room,
    /// Records its resource usage.
    pub meter: &'a mut Meter,
    /// Returns advice about too little disk space.
    pub advice: &'a dyn Fn() -> String,
    /// Receives warnings about limits that could not be set, and about disk space.
    pub warn: &'a mut dyn FnMut(String),
}

/// Runs the command in the container and waits for its end.
pub fn attend(running: &mut Running, signals: &Signals, step: Attended<'_>) -> Result<Ending> {
    let (stdout, stdout_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (stderr, stderr_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let sent = running.connect().and_then(|client| {
        client.run(
            step.command,
            &[step.stdin, stdout_end.as_fd(), stderr_end.as_fd()],
        )?;
        Ok(client)
    });
    let client = match sent {
        Ok(client) => client,
        // A container that failed at once took its socket with it; its holder has the reason.
        Err(error) => loop {
            match running.hear() {
                Ok(FromHolder::Waits(_)) => {}
                Ok(FromHolder::Failed { reason }) => return Err(reason.into()),
                Err(killed) => return Err(killed),
                Ok(FromHolder::Ready(_) | FromHolder::Shared | FromHolder::Ended(_)) => {
                    return Err(error);
                }
            }
        },
    };
    drop((stdout_end, stderr_end));
    for pipe in [&stdout, &stderr] {
        fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    let mut pipes = [
        (Stream::Stdout, Some(reader(stdout))),
        (Stream::Stderr, Some(reader(stderr))),
    ];
    let mut buffer = vec![0u8; 64 << 10];
    let mut deadline = step.timeout.map(|timeout| Instant::now() + timeout);
    let mut looked = Instant::now();
    let mut stopping: Option<(Ending, Instant)> = None;
    let mut flushed = Instant::now();
    // Until then its holder is still moving into the control group, and pausing would freeze it for ever.
    let mut ready = false;
    let ending = loop {
        let now = Instant::now();
        if ready && stopping.is_none() && step.room.look(step.advice, step.warn)? {
            // The timeout does not count while the step is paused.
            deadline = deadline.map(|deadline| deadline + (now - looked));
        }
        looked = now;
        step.meter.look(step.room.grown());
        let wake = [
            deadline.filter(|_| stopping.is_none()),
            stopping.map(|(_, until)| until),
            Some(now + step.room.period()),
        ];
        let wake = wake.into_iter().flatten().min();
        let events = wait(running, &client, signals, &pipes, wake)?;
        for (slot, (stream, pipe)) in pipes.iter_mut().enumerate() {
            if events.pipes[slot]
                && !drain(pipe, &mut buffer, |bytes| {
                    keep(step.mask, step.log, step.output, *stream, bytes)
                })?
            {
                *pipe = None;
            }
        }
        if flushed.elapsed() > FLUSH {
            step.log.flush()?;
            flushed = Instant::now();
        }
        if events.holder {
            match running.hear()? {
                FromHolder::Ready(missing) => {
                    ready = true;
                    missing.into_iter().for_each(&mut *step.warn);
                }
                FromHolder::Waits(text) => (step.warn)(text),
                FromHolder::Failed { reason } => return Err(reason.into()),
                FromHolder::Ended(_) | FromHolder::Shared => {
                    return Err(Error::unavailable("the container ended before its step"));
                }
            }
        }
        if events.signal
            && let Some(number) = signals.pending()?
        {
            match stopping {
                Some((ending, _)) => break ending,
                None => stopping = Some((Ending::Interrupted(number), Instant::now() + GRACE)),
            }
            // A frozen process receives no signal.
            step.room.release();
            drop(client.signal(Signal::SIGTERM as i32));
        }
        if events.client {
            match client.hear()? {
                Some((Reply::Started, _)) => {}
                Some((Reply::NotStarted { code, message }, _)) => {
                    keep(
                        step.mask,
                        step.log,
                        step.output,
                        Stream::Stderr,
                        message.as_bytes(),
                    )?;
                    break Ending::Exited { code, signal: None };
                }
                // Another process stopped the container.
                Some((
                    Reply::Exited {
                        signal: Some(_),
                        last: true,
                        ..
                    },
                    _,
                )) if stopping.is_none() => {
                    break Ending::Lost;
                }
                Some((Reply::Exited { code, signal, .. }, _)) => {
                    break stopping.map_or(Ending::Exited { code, signal }, |(ending, _)| ending);
                }
                None => break stopping.map_or(Ending::Lost, |(ending, _)| ending),
            }
        }
        let now = Instant::now();
        match stopping {
            Some((ending, until)) if now >= until => break ending,
            None if deadline.is_some_and(|deadline| now >= deadline) => {
                stopping = Some((Ending::TimedOut, now + GRACE));
                drop(client.signal(Signal::SIGTERM as i32));
            }
            _ => {}
        }
    };
    // Collects the last output. Children left behind may hold the pipes open for ever.
    for (stream, pipe) in &mut pipes {
        drain(pipe, &mut buffer, |bytes| {
            keep(step.mask, step.log, step.output, *stream, bytes)
        })?;
    }
    for stream in [Stream::Stdout, Stream::Stderr] {
        let rest = step.mask.rest(stream);
        step.output.push(stream, &rest);
        step.log.write(stream, &rest)?;
    }
    step.log.finish()?;
    if step.log.lossy {
        (step.warn)("the disk was full: the step's log lacks lines".to_owned());
    }
    step.output.finish();
    Ok(ending)
}

fn keep(
    mask: &mut Mask,
    log: &mut Log,
    output: &mut StepOutput,
    stream: Stream,
    bytes: &[u8],
) -> Result<()> {
    let bytes = mask.hide(stream, bytes);
    output.push(stream, &bytes);
    log.write(stream, &bytes)
}

#[derive(Debug)]
struct Events {
    pipes: [bool; 2],
    client: bool,
    holder: bool,
    signal: bool,
}

type Pipe = Option<fs_err::File>;

fn wait(
    running: &Running,
    client: &Client,
    signals: &Signals,
    pipes: &[(Stream, Pipe); 2],
    wake: Option<Instant>,
) -> Result<Events> {
    let mut fds = vec![
        PollFd::new(client.as_fd(), PollFlags::POLLIN),
        PollFd::new(signals.as_fd(), PollFlags::POLLIN),
    ];
    let holder_at = running.link().map(|fd| {
        fds.push(PollFd::new(fd, PollFlags::POLLIN));
        fds.len() - 1
    });
    let pipes_at = [0, 1].map(|slot: usize| {
        pipes[slot].1.as_ref().map(|pipe| {
            fds.push(PollFd::new(pipe.file().as_fd(), PollFlags::POLLIN));
            fds.len() - 1
        })
    });
    let patience = wake.map_or(FLUSH, |wake| {
        wake.saturating_duration_since(Instant::now()).min(FLUSH)
    });
    let timeout =
        PollTimeout::try_from(patience + Duration::from_millis(1)).unwrap_or(PollTimeout::MAX);
    match poll(&mut fds, timeout) {
        Ok(_) | Err(nix::Error::EINTR) => {}
        Err(error) => return Err(error.into()),
    }
    let happened = |at: Option<usize>| at.is_some_and(|at| fds[at].any().unwrap_or(false));
    Ok(Events {
        pipes: pipes_at.map(happened),
        client: happened(Some(0)),
        holder: happened(holder_at),
        signal: happened(Some(1)),
    })
}

/// Reads the available output. Returns whether the stream is still open.
fn drain(
    pipe: &mut Pipe,
    buffer: &mut [u8],
    mut take: impl FnMut(&[u8]) -> Result<()>,
) -> Result<bool> {
    let Some(file) = pipe else { return Ok(false) };
    // A bounded number of reads, so that one busy stream does not starve the others.
    for _ in 0..16 {
        match file.read(buffer) {
            Ok(0) => return Ok(false),
            Ok(count) => take(&buffer[..count])?,
            Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(true)
}

#[expect(clippy::disallowed_types, reason = "a pipe has no path")]
fn reader(pipe: OwnedFd) -> fs_err::File {
    fs_err::File::from_parts(std::fs::File::from(pipe), "output of the step")
}
