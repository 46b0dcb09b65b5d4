//! rockenv: reproducible build environments for ROCm.
//!
//! Vocabulary: a *target* is a GPU ISA; an *image* is a recipe for a base root file system; a *profile* is a file
//! that the user writes; a *spec* is a fully resolved profile; a *plan* lists the actions that turn the current state
//! into the desired one; an *env* is a built instance; a *step* is a unit of work in an env and ends in a *snapshot*;
//! a *volume* is a directory mounted into an env; an *engine* runs containers; the *store* holds all data on disk.
//!
//! Each folder here is a room. A room imports only from the rooms below it: `cli`, `up`, `matrix`, `remote`,
//! `execute`, `share`, `store`, `engine`, `plan`, `profile`, `image`, `rocm`, `tree`, `ui`, `sys`.
//! `docs/explanation/architecture.md` has the map.

/// Asserts that a text contains a part, and prints both on failure.
#[cfg(test)]
macro_rules! assert_has {
    ($text:expr, $part:expr $(,)?) => {
        match &$text {
            text => assert!(text.contains($part), "{:?} in {text:?}", $part),
        }
    };
}

/// Asserts that a condition holds soon. A child of another test inherits every lock until it calls exec.
#[cfg(test)]
macro_rules! assert_soon {
    ($condition:expr) => {{
        let begun = std::time::Instant::now();
        while !$condition {
            assert!(begun.elapsed() < std::time::Duration::from_secs(100));
        }
    }};
}

#[macro_use]
mod sys;

mod cli;
mod engine;
mod execute;
mod image;
mod matrix;
mod plan;
mod profile;
mod remote;
mod rocm;
mod share;
mod store;
mod tree;
mod ui;
mod up;

use std::process::ExitCode;

/// Runs the program and returns the exit code of the process.
pub fn run() -> ExitCode {
    cli::program::run()
}

/// The parts that `tests/` and `fuzz/` use.
#[doc(hidden)]
pub mod testing {
    pub use crate::cli::Cli;
    pub use crate::cli::help::examples;
    pub use crate::cli::man::{command, each};
    pub use crate::cli::testing::{READERS, Reader, fuzz};
    pub use crate::engine::cgroup::Hierarchies;
    pub use crate::engine::docker::{Flavour, Service};
    pub use crate::image::oci::Notice;
    pub use crate::image::tar::unpack;
    pub use crate::image::{
        BuildContext, BuildProgress, Built, Logins, Recipe, TaskContext, build, catalog,
    };
    pub use crate::matrix::jobs::Runners;
    pub use crate::plan::gc::cache;
    pub use crate::plan::ids::StepKey;
    pub use crate::plan::record;
    pub use crate::plan::resolve::{BuildUser, Spec};
    pub use crate::profile::hook;
    pub use crate::store::caches::entries;
    pub use crate::store::config;
    pub use crate::store::images::Image;
    pub use crate::store::snapshot::Freeze;
    pub use crate::store::{Lock, LockedEnv, Store};
    pub use crate::sys::atomic::random_id;
    pub use crate::sys::error;
    pub use crate::tree::{
        Method, btrfs, clone_tree, copy_tree, create_tree, digest, flatten, measure, overlay,
        probe, remove_tree,
    };

    pub mod profile {
        pub use crate::cli::testing::check_profile as check;
        pub use crate::profile::load;
    }
}
