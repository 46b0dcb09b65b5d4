//! Owns starting a thread. std's own functions panic if the limit of processes is reached, and a panic ends the
//! program.

use std::thread::{Builder, JoinHandle, Scope, ScopedJoinHandle};

use crate::sys::error::{Error, Result};

pub(crate) fn start<T: Send + 'static>(
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<JoinHandle<T>> {
    Builder::new().spawn(work).map_err(refused)
}

pub(crate) fn start_in<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    work: impl FnOnce() -> T + Send + 'scope,
) -> Result<ScopedJoinHandle<'scope, T>> {
    Builder::new().spawn_scoped(scope, work).map_err(refused)
}

/// Returns the result of a joined thread, or resumes its panic.
pub(crate) fn joined<T>(outcome: std::thread::Result<T>) -> T {
    outcome.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

fn refused(error: std::io::Error) -> Error {
    unavailable!("cannot start a thread")
        .source(error)
        .help("end other processes, or raise their limit: ulimit -u")
}
