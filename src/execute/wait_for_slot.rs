//! Owns waiting for an env's first job: a step does not start while all job slots of the machine are in use.

use std::os::fd::AsFd as _;
use std::path::Path;
use std::time::Duration;

use crate::engine::job_slots::SlotClaim;
use crate::plan::ids::EnvName;
use crate::plan::jobs::Sizing;
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

/// Waits for one of the jobs of the budget in `path`; `say` is called once with the current holders.
pub(super) fn wait_for_slot(
    path: &Path,
    sizing: &Sizing,
    env: &EnvName,
    signals: &Signals,
    say: &mut dyn FnMut(String),
) -> Result<SlotWait> {
    let total = sizing.budget.value;
    let mut claim = SlotClaim::open(path, total, sizing.together, env)?;
    let mut told = false;
    while !claim.take()? {
        if !told {
            told = true;
            let others = claim.others()?;
            let holders = others.iter().filter(|other| other.held > 0);
            let names = holders.map(|other| other.env.as_str());
            say(waiting(total, &names.collect::<Vec<_>>()));
        }
        readable([Some(signals.as_fd())], Some(PERIOD))?;
        if let Some(signal) = signals.pending()? {
            return Ok(SlotWait::Interrupted(signal));
        }
    }
    Ok(SlotWait::Granted(claim))
}

/// Returns the message. A holder may have exited meanwhile, or may not have written its name yet.
fn waiting(total: u32, envs: &[&str]) -> String {
    let names = envs.iter().filter(|env| !env.is_empty());
    let names: Vec<String> = names.map(|env| format!("`{env}`")).collect();
    let by = match names.is_empty() {
        true => String::new(),
        false => format!(" by {}", names.join(", ")),
    };
    let slots = match total {
        1 => "the only one of this machine is".to_owned(),
        total => format!("all {total} of this machine are"),
    };
    format!("is waiting for a job slot: {slots} in use{by}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_holder_without_a_name_is_not_named() {
        for (total, envs, told) in [
            (1, &[][..], "the only one of this machine is in use"),
            (1, &[""][..], "the only one of this machine is in use"),
            (
                2,
                &["a", "b"][..],
                "all 2 of this machine are in use by `a`, `b`",
            ),
        ] {
            let told = format!("is waiting for a job slot: {told}");
            assert_eq!(waiting(total, envs), told);
        }
    }
}
