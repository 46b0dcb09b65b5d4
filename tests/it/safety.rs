//! The test that decides whether rockenv can be trusted, cut to a test's length. `make soak` runs the long version.

mod corpus;
mod hammer;
use crate::support::loopfs::Kind;
use crate::support::random;
use hammer::hammer;

#[test]
fn kill_at_random_moments_on_ext4() {
    hammer(Kind::Ext4, "overlay", 100, random::seed());
}

#[test]
fn kill_at_random_moments_on_btrfs() {
    hammer(Kind::Btrfs, "btrfs", 100, random::seed());
}

#[test]
fn kill_at_random_moments_on_xfs() {
    hammer(Kind::Xfs, "reflink", 40, random::seed());
}
