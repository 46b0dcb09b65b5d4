//! rockenv: reproducible build environments for ROCm.
//!
//! `rockenv up` goes: parse profile, probe host, resolve spec, lock env, observe, plan, execute, record.

pub mod error;
pub mod image;
pub mod process;
