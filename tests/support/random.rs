//! Owns numbers that repeat: a test that fails says its seed.

use std::time::UNIX_EPOCH;

/// A sequence of numbers that a seed decides.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Begins the sequence of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        // Zero would follow zero for ever.
        Self(seed | 1)
    }

    /// Begins a sequence that differs from run to run; its seed is in the output of a test that fails.
    #[expect(clippy::print_stderr, reason = "a failure is repeated by it")]
    pub(crate) fn seeded() -> Self {
        let seed = UNIX_EPOCH.elapsed().expect("a clock").subsec_nanos();
        eprintln!("seed {seed}");
        Self::new(seed.into())
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}
