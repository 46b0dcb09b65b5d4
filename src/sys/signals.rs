//! Owns the user's signals: Ctrl-C and similar ones are blocked and read, so each command ends in its own way.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::Duration;

use nix::sys::signal::{SigSet, Signal};
use nix::sys::signalfd::{SfdFlags, SignalFd};

use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::system_text;
use crate::sys::readable::readable;

/// Signals that are blocked, and readable instead.
#[derive(Debug)]
pub(crate) struct Signals(SignalFd);

/// Returns a bit for each signal that this process was started to ignore, for example by `nohup`.
fn ignored() -> u64 {
    let status = system_text("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok())
        .unwrap_or_default()
}

pub(crate) const STOP: [Signal; 4] = [
    Signal::SIGINT,
    Signal::SIGTERM,
    Signal::SIGHUP,
    Signal::SIGQUIT,
];

/// Blocks signals for the rest of this process.
pub(crate) fn block(signals: &[Signal]) -> Result<Signals> {
    let (mut mask, ignored) = (SigSet::empty(), ignored());
    for signal in signals {
        // A blocked signal is queued even if it is ignored.
        if ignored & (1 << (*signal as i32 - 1)) == 0 {
            mask.add(*signal);
        }
    }
    mask.thread_block()?;
    let flags = SfdFlags::SFD_CLOEXEC | SfdFlags::SFD_NONBLOCK;
    Ok(Signals(SignalFd::with_flags(&mask, flags)?))
}

impl Signals {
    /// Blocks the signals in [`STOP`] for the rest of this process.
    pub(crate) fn take() -> Result<Self> {
        let signals = block(&STOP)?;
        // Usually called once per process; a second descriptor reads the same signals.
        drop(TAKEN.set(signals.as_fd().try_clone_to_owned()?));
        Ok(signals)
    }

    pub(crate) fn pending(&self) -> Result<Option<i32>> {
        Ok(self
            .0
            .read_signal()?
            .and_then(|signal| i32::try_from(signal.ssi_signo).ok()))
    }
}

impl AsFd for Signals {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

/// The signal descriptor of this process, for long waits outside the command that blocked the signals.
static TAKEN: OnceLock<OwnedFd> = OnceLock::new();

/// Returns a descriptor that is readable while a signal waits; `None` if signals end the process as usual.
pub(crate) fn taken() -> Option<BorrowedFd<'static>> {
    TAKEN.get().map(AsFd::as_fd)
}

/// Returns whether a signal waits that the command has not read yet.
pub(crate) fn is_pending() -> bool {
    readable([taken()], Some(Duration::ZERO)) == Ok([true])
}

/// How often the helper thread of [`Cancel::watch`] checks for a signal.
const LOOK: Duration = Duration::from_millis(100);

/// Turns a signal into a flag, for work that polls a flag to know when to stop.
#[derive(Debug)]
pub(crate) struct Cancel<'a> {
    signals: &'a Signals,
    caught: AtomicI32,
    flag: AtomicBool,
}

impl<'a> Cancel<'a> {
    pub(crate) fn new(signals: &'a Signals) -> Self {
        Self {
            signals,
            caught: AtomicI32::new(0),
            flag: AtomicBool::new(false),
        }
    }

    /// Returns the flag, which is set after a signal arrived.
    pub(crate) fn flag(&self) -> &AtomicBool {
        &self.flag
    }

    /// Runs work that only reads the flag: a helper thread sets it, without consuming the signal.
    pub(crate) fn watch<T>(&self, work: impl FnOnce() -> T) -> T {
        let (working, ended) = mpsc::channel::<()>();
        std::thread::scope(|scope| {
            // Without the thread, the work ends before the signal counts.
            drop(std::thread::Builder::new().spawn_scoped(scope, move || {
                while ended.recv_timeout(LOOK) == Err(RecvTimeoutError::Timeout) {
                    if readable([Some(self.signals.as_fd())], Some(Duration::ZERO)) == Ok([true]) {
                        self.flag.store(true, Ordering::Relaxed);
                    }
                }
            }));
            let result = work();
            drop(working);
            if self.flag.load(Ordering::Relaxed) {
                self.poll();
            }
            result
        })
    }

    /// Checks for a signal; the work calls this at intervals.
    pub(crate) fn poll(&self) {
        if let Ok(Some(number)) = self.signals.pending() {
            self.caught.store(number, Ordering::Relaxed);
            self.flag.store(true, Ordering::Relaxed);
        }
    }

    pub(crate) fn caught(&self) -> Option<i32> {
        Some(self.caught.load(Ordering::Relaxed)).filter(|number| *number != 0)
    }

    /// Replaces the error of interrupted work with one that names the signal.
    pub(crate) fn outcome<T>(&self, result: Result<T>) -> Result<T> {
        match (result, self.caught()) {
            (Err(_), Some(number)) => Err(Error::new(Kind::Signal(number), "interrupted")),
            (result, _) => result,
        }
    }
}

pub(crate) fn stop_if_pending() -> Result<()> {
    stop_if(&AtomicBool::new(is_pending()))
}

pub(crate) fn stop_if(cancel: &AtomicBool) -> Result<()> {
    if cancel.load(Ordering::Relaxed) {
        return Err(Error::new(Kind::Signal(2), "interrupted"));
    }
    Ok(())
}
