//! Owns the test that decides whether rockenv may be trusted, for as long as a test may take; `make soak` is the long one.

#![expect(
    clippy::unwrap_used,
    clippy::print_stderr,
    reason = "a test, whose seed is shown when it fails"
)]

#[path = "safety/corpus.rs"]
mod corpus;
#[path = "safety/hammer.rs"]
mod hammer;
mod support;

use hammer::hammer;
use support::loopfs::Kind;
use support::random;

#[test]
fn kill_at_random_moments_on_ext4() {
    hammer(Kind::Ext4, "overlay", 200, random::seed());
}

#[test]
fn kill_at_random_moments_on_btrfs() {
    hammer(Kind::Btrfs, "btrfs", 200, random::seed());
}

#[test]
fn kill_at_random_moments_on_xfs() {
    hammer(Kind::Xfs, "reflink", 60, random::seed());
}
