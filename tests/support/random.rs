//! Owns reproducible random numbers: a failed test prints its seed.

use std::time::UNIX_EPOCH;

/// A sequence of numbers determined by a seed.
#[derive(Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// Begins the sequence of a seed.
    pub(crate) fn new(seed: u64) -> Self {
        // Zero would be followed by zeros only.
        Self(seed | 1)
    }

    /// Begins a different sequence in each run; a failed test's output contains the seed.
    #[expect(clippy::print_stderr, reason = "a failure is repeated by it")]
    pub(crate) fn seeded() -> Self {
        let seed = seed();
        eprintln!("seed {seed}");
        Self::new(seed)
    }

    /// Returns a number below `limit`.
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % limit
    }
}

/// Returns the seed in `ROCKENV_TEST_SEED`, to repeat a failure, or else a different one in each run.
pub(crate) fn seed() -> u64 {
    let now = || UNIX_EPOCH.elapsed().expect("a clock").as_nanos() as u64 | 1;
    number("ROCKENV_TEST_SEED").unwrap_or_else(now)
}

/// Returns the number in an environment variable.
pub(crate) fn number(variable: &str) -> Option<u64> {
    let value = std::env::vars_os().find(|(name, _)| name == variable)?.1;
    let text = value.to_str().expect("a number");
    Some(text.parse().expect("a number"))
}
