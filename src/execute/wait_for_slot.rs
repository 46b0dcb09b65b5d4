//! Owns waiting for an env's first job: a step does not start while all job slots of the machine are in use.

use std::os::fd::AsFd as _;
use std::time::Duration;

use super::Execution;
use crate::engine::job_slots::SlotClaim;
use crate::plan::resolve::Step;
use crate::sys::error::Result;
use crate::sys::readable::readable;

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

impl Execution<'_, '_> {
    /// Waits for one of the machine's job slots for a step, and warns once with the names of the current holders.
    pub(super) fn wait_for_slot(&self, step: &Step) -> Result<SlotWait> {
        let (file, sizing) = (self.store.jobs_file(), self.sizing);
        let total = sizing.budget.value;
        let mut claim = SlotClaim::open(&file, total, sizing.together, self.env.name())?;
        let mut told = false;
        while !claim.take()? {
            if !told {
                told = true;
                let others = claim.others()?;
                let holders = others.iter().filter(|other| other.held > 0);
                let names = holders.map(|other| other.env.as_str());
                let waits = waiting(total, &names.collect::<Vec<_>>());
                self.reporter.warn(format!("step `{}` {waits}", step.name));
            }
            readable([Some(self.signals.as_fd())], Some(PERIOD))?;
            if let Some(signal) = self.signals.pending()? {
                return Ok(SlotWait::Interrupted(signal));
            }
        }
        Ok(SlotWait::Granted(claim))
    }
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
