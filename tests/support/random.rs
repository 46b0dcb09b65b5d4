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

/// Returns the seed that `ROCKENV_TEST_SEED` names, to repeat a failure; otherwise one that differs from run to run.
pub(crate) fn seed() -> u64 {
    let now = || UNIX_EPOCH.elapsed().expect("a clock").as_nanos() as u64 | 1;
    number("ROCKENV_TEST_SEED").unwrap_or_else(now)
}

/// Returns the number in a variable of the environment.
pub(crate) fn number(variable: &str) -> Option<u64> {
    let value = std::env::vars_os().find(|(name, _)| name == variable)?.1;
    let text = value.to_str().expect("a number");
    Some(text.parse().expect("a number"))
}
