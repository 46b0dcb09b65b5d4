//! The tree operations on real file systems. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

#[path = "rootfs/fidelity.rs"]
mod fidelity;
#[path = "rootfs/flatten.rs"]
mod flatten;
#[path = "rootfs/methods.rs"]
mod methods;
#[path = "rootfs/remove.rs"]
mod remove;
#[path = "rootfs/walk.rs"]
mod walk;
