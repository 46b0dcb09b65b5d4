//! rockenv: reproducible build environments for ROCm.
//!
//! `rockenv up` goes: parse profile, probe host, resolve spec, lock env, observe, plan, execute, record.

pub mod builtin;
pub mod error;
pub mod rootfs;
pub mod ui;
pub mod usage;
pub mod image;
pub mod spec;
mod suggest;
pub mod target;
pub mod profile;
pub mod process;
