//! Owns waiting for a step's command: its output, its end, the timeout and the user's signals, in one loop of one
//! thread, so that memory stays constant however much the command prints.

use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::mpsc::Receiver;
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};
use nix::sys::signal::Signal;

use super::log::Log;
use crate::engine::hold::FromHolder;
use crate::engine::session::{Client, Running};
use crate::engine::wire::{Command, Reply, Then};
use crate::execute::build_watch::BuildWatch;
use crate::execute::disk_guard::DiskGuard;
use crate::execute::redact::Redactor;
use crate::execute::sampler::Sampler;
use crate::sys::error::Result;
use crate::sys::readable::readable;
use crate::sys::signals::Signals;
use crate::ui::StepOutput;
use crate::ui::event::Stream;

/// How long a step may take to exit after being asked to.
const GRACE: Duration = Duration::from_secs(5);
/// How long a command may take to start in a ready container, beside its timeout, which counts from its start.
const START: Duration = Duration::from_secs(120);
/// How often buffered log lines are flushed, even if the step writes nothing.
const FLUSH: Duration = Duration::from_millis(250);

/// How a step's command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ending {
    /// It ended by itself, with this code (128 plus the number for a signal).
    Exited {
        code: u8,
        signal: Option<i32>,
    },
    TimedOut,
    Interrupted(i32),
    /// Another process stopped the step's container.
    Stopped,
    /// The step's container disappeared.
    Lost,
}

/// The inputs of a step's command, and the destinations of its output.
pub(crate) struct Supervised<'a> {
    pub command: Command,
    pub stdin: BorrowedFd<'a>,
    /// Maximum run time.
    pub timeout: Option<Duration>,
    /// Hides credentials in its output.
    pub redactor: &'a mut Redactor,
    pub log: &'a mut Log,
    pub output: &'a mut StepOutput,
    pub builds: &'a mut BuildWatch<'a>,
    pub guard: &'a mut DiskGuard,
    /// Records its resource usage.
    pub sampler: &'a mut Sampler,
    /// Starts to look for advice about too little disk space.
    pub advice: &'a dyn Fn() -> Receiver<String>,
    /// Returns a warning of [`Sampler::starved`].
    pub starved: &'a dyn Fn(f64, Option<u64>) -> String,
    /// The warning of [`Sampler::goes_on`].
    pub goes_on: &'a str,
    /// Receives warnings about limits that could not be set, about disk space and memory.
    pub warn: &'a mut dyn FnMut(String),
}

impl Supervised<'_> {
    /// Shows and logs a piece of output.
    fn keep(&mut self, stream: Stream, bytes: &[u8]) -> Result<()> {
        let bytes = self.redactor.redact(stream, bytes);
        self.output.push(stream, &bytes);
        self.log.write(stream, &bytes)
    }
}

/// Runs the command in the container and waits for its end.
pub(crate) fn supervise(
    running: &mut Running,
    signals: &Signals,
    step: Supervised<'_>,
) -> Result<Ending> {
    let (stdout, stdout_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let (stderr, stderr_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let streams = [step.stdin, stdout_end.as_fd(), stderr_end.as_fd()];
    let client = send(running, &step.command, &streams)?;
    drop((stdout_end, stderr_end));
    for pipe in [&stdout, &stderr] {
        fcntl(pipe, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    }
    let supervision = Supervision {
        running,
        client,
        signals,
        pipes: [
            (Stream::Stdout, Some(reader(stdout))),
            (Stream::Stderr, Some(reader(stderr))),
        ],
        buffer: vec![0u8; 64 << 10],
        deadline: None,
        has_started: false,
        stopping: None,
        step,
    };
    supervision.run()
}

/// Hands the command and its standard streams to the container.
fn send(running: &mut Running, command: &Command, fds: &[BorrowedFd<'_>; 3]) -> Result<Client> {
    let sent = running.connect().and_then(|client| {
        client.run(command.clone(), fds)?;
        Ok(client)
    });
    let error = match sent {
        Ok(client) => return Ok(client),
        Err(error) => error,
    };
    // The socket of a container that failed at once is gone; its holder has the reason.
    loop {
        match running.receive()? {
            FromHolder::Waits(_) => {}
            FromHolder::Failed { reason } => return Err(reason.into()),
            FromHolder::Ready(_) | FromHolder::Shared | FromHolder::Ended(_) => return Err(error),
        }
    }
}

/// A running command.
struct Supervision<'a, 'step> {
    running: &'a mut Running,
    client: Client,
    signals: &'a Signals,
    step: Supervised<'step>,
    pipes: [(Stream, Option<fs_err::File>); 2],
    buffer: Vec<u8>,
    deadline: Option<Instant>,
    has_started: bool,
    /// Why it was asked to exit, and its deadline.
    stopping: Option<(Ending, Instant)>,
}

impl Supervision<'_, '_> {
    /// Waits for the command's end.
    fn run(mut self) -> Result<Ending> {
        let mut looked = Instant::now();
        let mut flushed = looked;
        let ending = loop {
            let now = Instant::now();
            if self.deadline.is_none() && self.running.is_ready() {
                self.deadline = self.step.timeout.map(|timeout| now + START + timeout);
            }
            // Until then its holder is still setting up the control group, and a pause would block the holder forever.
            if self.running.is_ready()
                && self.stopping.is_none()
                && self.step.guard.check(self.step.advice, self.step.warn)
            {
                // The timeout does not count while the step is paused.
                self.deadline = self.deadline.map(|deadline| deadline + (now - looked));
            }
            looked = now;
            if let Some(sample) = self.step.sampler.sample_if_due(self.step.guard.grown()) {
                self.step.output.load(sample.jobs, sample.memory);
                if let Some((share, peak)) = self.step.sampler.starved() {
                    (self.step.warn)((self.step.starved)(share, peak));
                }
                if self.step.sampler.goes_on() {
                    (self.step.warn)(self.step.goes_on.to_owned());
                }
            }
            let used = || self.step.sampler.jobs();
            if let Some(left) = self.step.builds.time_left(self.step.output.ninja(), used) {
                self.step.output.expect(left);
            }
            let [client, signal, holder, out, err] = self.wait()?;
            for (slot, is_ready) in [out, err].into_iter().enumerate() {
                if is_ready && !self.drain(slot)? {
                    self.pipes[slot].1 = None;
                }
            }
            if flushed.elapsed() > FLUSH {
                self.step.log.flush()?;
                flushed = Instant::now();
            }
            let is_gone = holder && self.running.is_ready();
            if holder && !is_gone {
                self.running.hear(self.step.warn)?;
            }
            let mut ending = None;
            if signal {
                ending = self.hear_signal()?;
            }
            if ending.is_none() && client {
                ending = self.hear_command()?;
            }
            if ending.is_none() && is_gone {
                ending = Some(self.last_word()?);
            }
            if let Some(ending) = ending.or_else(|| self.check_time()) {
                break ending;
            }
        };
        self.finish()?;
        Ok(ending)
    }

    /// Waits until something happens, or until it is time to look at the disk or the clock. Returns which of these can
    /// be read: the command, the signals, the holder, and the command's two streams.
    fn wait(&self) -> Result<[bool; 5]> {
        let until = self.stopping.map(|(_, until)| until).or(self.deadline);
        let left = until.map(|until| until.saturating_duration_since(Instant::now()));
        let period = self.step.guard.period().min(FLUSH);
        let pipes = self.pipes.each_ref();
        let [out, err] = pipes.map(|(_, pipe)| pipe.as_ref().map(|pipe| pipe.file().as_fd()));
        let given = [
            Some(self.client.as_fd()),
            Some(self.signals.as_fd()),
            Some(self.running.link()),
            out,
            err,
        ];
        let patience = left.map_or(period, |left| left.min(period));
        Ok(readable(given, Some(patience))?)
    }

    /// Passes the user's signal on to the command. A second signal ends the wait at once.
    fn hear_signal(&mut self) -> Result<Option<Ending>> {
        let Some(number) = self.signals.pending()? else {
            return Ok(None);
        };
        if let Some((ending, _)) = self.stopping {
            return Ok(Some(ending));
        }
        self.stop(Ending::Interrupted(number));
        Ok(None)
    }

    fn hear_command(&mut self) -> Result<Option<Ending>> {
        let stopped = self.stopping.map(|(ending, _)| ending);
        Ok(match self.client.receive()?.map(|(reply, _)| reply) {
            // Root of the container may send this again: the timeout counts from the first time.
            Some(Reply::Started) if !self.has_started => {
                self.has_started = true;
                let timeout = self.step.timeout;
                self.deadline = timeout.map(|timeout| Instant::now() + timeout);
                None
            }
            Some(Reply::Started | Reply::Starting | Reply::Signalled) => None,
            Some(Reply::NotStarted { code, message }) => {
                self.step.keep(Stream::Stderr, message.as_bytes())?;
                Some(Ending::Exited { code, signal: None })
            }
            // Another process stopped the container, however the command reacted to SIGTERM.
            Some(Reply::Exited {
                then: Then::Ends, ..
            }) => Some(stopped.unwrap_or(Ending::Stopped)),
            None => Some(stopped.unwrap_or(Ending::Lost)),
            Some(Reply::Exited { code, signal, .. }) => {
                Some(stopped.unwrap_or(Ending::Exited { code, signal }))
            }
        })
    }

    /// Returns how the command of a vanished container ended: it may have exited before.
    fn last_word(&mut self) -> Result<Ending> {
        while readable([Some(self.client.as_fd())], Some(Duration::ZERO))? == [true] {
            if let Some(ending) = self.hear_command()? {
                return Ok(ending);
            }
        }
        Ok(self.stopping.map_or(Ending::Lost, |(ending, _)| ending))
    }

    /// Returns the ending if the step had to exit by now; asks the step to exit when its time is up.
    fn check_time(&mut self) -> Option<Ending> {
        let now = Instant::now();
        match self.stopping {
            Some((ending, until)) => (now >= until).then_some(ending),
            None => {
                if self.deadline.is_some_and(|deadline| now >= deadline) {
                    self.stop(Ending::TimedOut);
                }
                None
            }
        }
    }

    /// Asks the command to end.
    fn stop(&mut self, ending: Ending) {
        self.stopping = Some((ending, Instant::now() + GRACE));
        // A frozen process receives no signal.
        self.step.guard.release();
        drop(self.client.signal(Signal::SIGTERM as i32));
    }

    /// Collects the last output.
    fn finish(mut self) -> Result<()> {
        // Children left behind may hold the pipes open forever.
        for slot in [0, 1] {
            self.drain(slot)?;
        }
        let step = self.step;
        for stream in [Stream::Stdout, Stream::Stderr] {
            let rest = step.redactor.rest(stream);
            step.output.push(stream, &rest);
            step.log.write(stream, &rest)?;
        }
        step.log.finish()?;
        if step.log.lossy {
            (step.warn)("the disk was full: the step's log lacks lines".to_owned());
        }
        step.output.finish();
        Ok(())
    }

    /// Reads the available output. Returns whether the stream is still open.
    fn drain(&mut self, slot: usize) -> Result<bool> {
        let stream = self.pipes[slot].0;
        // A bounded number of reads, so that one busy stream does not starve the others.
        for _ in 0..16 {
            let Some(file) = &mut self.pipes[slot].1 else {
                return Ok(false);
            };
            match file.read(&mut self.buffer) {
                Ok(0) => return Ok(false),
                Ok(count) => self.step.keep(stream, &self.buffer[..count])?,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => return Ok(true),
                Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(true)
    }
}

fn reader(pipe: OwnedFd) -> fs_err::File {
    fs_err::File::from_parts(pipe.into(), "output of the step")
}
