//! Owns running rockenv on another machine: the ssh connection, the directory there for sent files, and ending commands
//! together with their connection.

mod on;
mod received;
mod remote_exec;
mod ssh;
mod transfer;
mod tree;

pub(crate) use on::{RemoteRequest, on, sent_file};
pub(crate) use remote_exec::{remote_exec, watch};
pub(crate) use ssh::Machine;
pub(crate) use transfer::receive;
