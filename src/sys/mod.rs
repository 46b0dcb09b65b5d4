//! The operating system: errors, processes, signals, users, facts about the host.

pub(crate) mod account;
pub mod atomic;
pub(crate) mod beneath;
pub mod builtin;
pub mod catalog;
pub(crate) mod checked;
pub mod checksum;
pub mod error;
pub(crate) mod frames;
pub mod host;
pub mod process;
pub(crate) mod shell;
pub mod signals;
pub(crate) mod span;
pub(crate) mod suggest;
pub(crate) mod trust;
pub mod userns;
