//! rockenv: reproducible build environments for ROCm.
//!
//! The words: a *target* is a GPU ISA; an *image* is a recipe for a base root file system; a *profile* is what
//! the user wrote; a *spec* is a profile with nothing left to decide; a *plan* is the way from what is to what
//! should be; an *env* is one built instance; a *step* is one unit of work in it and ends in a *snapshot*; a
//! *volume* is a directory mounted into an env; an *engine* runs containers; the *store* is what is on disk.
//!
//! A room, which is a folder here, imports only from rooms below it: `cli`, `up`, `matrix`, `remote`, `execute`, `share`,
//! `store`, `engine`, `plan`, `profile`, `image`, `rocm`, `tree`, `ui`, `sys`. `docs/explanation/architecture.md` has the map.

pub mod rocm;
pub mod sys;
pub mod up;

pub mod cli;
pub mod engine;
pub mod execute;
pub mod image;
pub mod matrix;
pub mod plan;
pub mod profile;
mod remote;
pub mod share;
pub mod store;
pub mod tree;
pub mod ui;

#[doc(hidden)]
pub use cli::testing;

use std::process::ExitCode;

/// Runs the program; the process ends with the returned code.
pub fn run() -> ExitCode {
    cli::program::run()
}
