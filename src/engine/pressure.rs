//! Owns deciding how many jobs memory allows at the moment: a pure function of the figures of the host and the control
//! groups.

use super::memory::Limited;
use crate::sys::host::MemoryNow;

/// How short memory is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    /// There is room for more.
    Calm,
    /// The number of jobs should stay.
    Fair,
    /// Jobs must end before others start.
    High,
}

/// Judges the machine, and the control groups around the env that have a limit. `stalled` is the share of time, in
/// percent, in which the env itself waited for memory, if the kernel counts that.
pub(super) fn level(machine: &MemoryNow, stalled: Option<f64>, groups: &[Limited]) -> Level {
    let above = |value: f64, fair: f64, high: f64| match value {
        value if value >= high => Level::High,
        value if value >= fair => Level::Fair,
        _ => Level::Calm,
    };
    let share = |part: u64, whole: u64| part as f64 * 100.0 / whole.max(1) as f64;
    let taken = machine.total.saturating_sub(machine.available);
    let taken = share(taken, machine.total);
    // While more than half of the machine's memory is free, another program may be waiting at its own memory limit.
    let own = stalled.filter(|_| taken < 50.0).unwrap_or(100.0);
    let stalled = machine
        .stalled
        .map_or(Level::Calm, |share| above(share.min(own), 5.0, 15.0));
    let machine = above(taken, 90.0, 95.0);
    let groups = groups.iter();
    let fullest = groups.map(|group| above(share(group.used, group.limit), 80.0, 90.0));
    let fullest = fullest.max().unwrap_or(Level::Calm);
    stalled.max(machine).max(fullest)
}

/// The number of allowed jobs. It falls by a quarter each time that memory is short, and rises by an eighth of the cap,
/// at least one, each time that there is room.
#[derive(Debug)]
pub(super) struct Throttle {
    cap: u32,
    pub(super) allowed: u32,
}

impl Throttle {
    /// Begins with all of `cap` jobs.
    pub(super) fn new(cap: u32) -> Self {
        Self { cap, allowed: cap }
    }

    /// Records an observation made while `used` jobs ran.
    pub(super) fn observe(&mut self, level: Level, used: u32) {
        match level {
            Level::High => {
                let now = self.allowed.min(used);
                self.allowed = (now - now.div_ceil(4)).max(1);
            }
            Level::Fair => {}
            Level::Calm => self.allowed = self.cap.min(self.allowed + 1.max(self.cap / 8)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn machine(available: u64, stalled: Option<f64>) -> MemoryNow {
        MemoryNow {
            total: 64 * GIB,
            available,
            stalled,
        }
    }

    fn level(machine: &MemoryNow, groups: &[Limited]) -> Level {
        super::level(machine, None, groups)
    }

    #[test]
    fn the_worst_of_machine_stalls_and_limits_counts() {
        assert_eq!(level(&machine(32 * GIB, None), &[]), Level::Calm);
        assert_eq!(level(&machine(32 * GIB, Some(20.0)), &[]), Level::High);
        assert_eq!(level(&machine(5 * GIB, Some(0.0)), &[]), Level::Fair);
        assert_eq!(level(&machine(2 * GIB, None), &[]), Level::High);
        let calm = machine(60 * GIB, Some(0.0));
        let of_16 = |used: u64| Limited {
            used: used * GIB,
            limit: 16 * GIB,
        };
        let stalled = machine(60 * GIB, Some(99.0));
        for (own, expected) in [
            (None, Level::High),
            (Some(20.0), Level::High),
            (Some(1.0), Level::Calm),
        ] {
            assert_eq!(super::level(&stalled, own, &[]), expected, "{own:?}");
        }
        let full = machine(20 * GIB, Some(99.0));
        assert_eq!(super::level(&full, Some(1.0), &[]), Level::High);
        assert_eq!(level(&calm, &[of_16(15)]), Level::High);
        assert_eq!(level(&calm, &[of_16(8)]), Level::Calm);
        assert_eq!(level(&calm, &[of_16(8), of_16(13)]), Level::Fair);
        assert_eq!(level(&calm, &[of_16(15), of_16(8)]), Level::High);
    }

    #[test]
    fn jobs_go_down_fast_and_come_back() {
        let mut throttle = Throttle::new(16);
        throttle.observe(Level::High, 12);
        assert_eq!(throttle.allowed, 9);
        for _ in 0..20 {
            throttle.observe(Level::High, 16);
        }
        assert_eq!(throttle.allowed, 1);
        throttle.observe(Level::Fair, 1);
        assert_eq!(throttle.allowed, 1);
        for _ in 0..8 {
            throttle.observe(Level::Calm, 1);
        }
        assert_eq!(throttle.allowed, 16);
    }
}
