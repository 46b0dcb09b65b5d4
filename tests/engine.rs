//! Containers as people use them: real systemd-nspawn, real control groups, real signals. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

#[path = "engine/commands.rs"]
mod commands;
