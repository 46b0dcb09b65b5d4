//! Owns waiting for an env's first job: a step does not start while all job slots of the machine are in use.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use crate::engine::job_slots::SlotClaim;
use crate::sys::error::Result;
use crate::sys::readable::readable;
use crate::sys::signals::Signals;

/// Polling interval.
const PERIOD: Duration = Duration::from_millis(100);

/// Whether the step may start.
#[derive(Debug)]
pub(super) enum SlotWait {
    /// With its first job.
    Granted(SlotClaim),
    /// The user stopped the wait.
    Interrupted(i32),
}

/// Waits for one of the `total` jobs of the budget in `path`; `say` is called once with the current holders.
pub(super) fn wait_for_slot(
    path: &Path,
    total: u32,
    env: &str,
    signals: &Signals,
    say: &mut dyn FnMut(String),
) -> Result<SlotWait> {
    let mut claim = SlotClaim::open(path, total, env)?;
    let mut told = false;
    while !claim.take()? {
        if !told {
            told = true;
            let others = claim.others()?;
            let holders = others.iter().filter(|other| other.held > 0);
            let names: Vec<String> = holders.map(|other| format!("`{}`", other.env)).collect();
            say(format!(
                "is waiting for a job slot: all {total} of this machine are in use by {}",
                names.join(", ")
            ));
        }
        readable([Some(signals.as_fd())], Some(PERIOD))?;
        if let Some(signal) = signals.pending()? {
            return Ok(SlotWait::Interrupted(signal));
        }
    }
    Ok(SlotWait::Granted(claim))
}
