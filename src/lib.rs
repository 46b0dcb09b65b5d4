//! rockenv: reproducible build environments for ROCm.
//!
//! The words: a *target* is a GPU ISA; an *image* is a recipe for a base root file system; a *profile* is what
//! the user wrote; a *spec* is a profile with nothing left to decide; a *plan* is the way from what is to what
//! should be; an *env* is one built instance; a *step* is one unit of work in it and ends in a *snapshot*; a
//! *volume* is a directory mounted into an env; an *engine* runs containers; the *store* is what is on disk.
//!
//! `rockenv up` goes: parse [`profile`], probe [`host`], resolve [`spec`], lock the env in the [`store`],
//! observe, [`plan`], [`execute`], record.

mod account;
pub mod builtin;
pub mod catalog;
pub mod certificates;
pub mod cli;
pub mod commands;
mod complete;
pub mod config;
pub mod context;
pub mod doctor;
pub mod engine;
pub mod error;
pub mod execute;
pub mod export;
mod frames;
pub mod gc;
pub mod gpu;
pub mod hook;
pub mod host;
pub mod image;
pub mod inside;
pub mod jobs;
pub mod lockfile;
pub mod matrix;
pub mod metrics;
pub mod ninja;
pub mod ninja_log;
pub mod observe;
pub mod pins;
pub mod plan;
pub mod process;
pub mod profile;
mod program;
pub mod reference;
mod remote;
pub mod report;
pub mod rootfs;
pub mod samples;
pub mod savings;
pub mod setup;
pub mod share;
pub mod shim;
pub mod signals;
pub mod source;
pub mod spec;
pub mod store;
mod suggest;
pub mod target;
pub mod therock;
mod trust;
pub mod ui;
pub mod usage;
pub mod userns;

use std::process::ExitCode;

/// Runs the program; the process ends with the returned code.
pub fn run() -> ExitCode {
    program::run()
}
