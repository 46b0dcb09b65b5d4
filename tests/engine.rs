//! Containers as people use them: real systemd-nspawn, real control groups, real signals. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

#[path = "engine/commands.rs"]
mod commands;
#[path = "engine/devices.rs"]
mod devices;
#[path = "engine/ending.rs"]
mod ending;
#[path = "engine/ephemeral.rs"]
mod ephemeral;
#[path = "engine/isolation.rs"]
mod isolation;
#[path = "engine/limits.rs"]
mod limits;
#[path = "engine/steps.rs"]
mod steps;
#[path = "engine/terminal.rs"]
mod terminal;
