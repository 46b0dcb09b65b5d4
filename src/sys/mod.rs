//! The operating system: errors, names, processes, signals, users, facts about the host.

#[macro_use]
pub mod error;

pub(crate) mod account;
pub(crate) mod address;
pub(crate) mod atomic;
pub(crate) mod beneath;
pub(crate) mod builtin;
pub(crate) mod catalog;
pub(crate) mod checksum;
pub(crate) mod chunks;
pub(crate) mod frames;
pub(crate) mod host;
pub(crate) mod name;
pub(crate) mod process;
pub(crate) mod readable;
pub(crate) mod shell;
pub(crate) mod signals;
pub(crate) mod sockets;
pub(crate) mod span;
pub(crate) mod suggest;
pub(crate) mod thread;
pub(crate) mod trust;
pub(crate) mod trusted_files;
pub(crate) mod userns;
