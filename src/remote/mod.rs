//! Owns running rockenv on another machine: the connection by ssh, the directory there for sent files, and ending
//! commands together with their connection.

mod remote_exec;
mod ssh;
mod transfer;
mod tree;

pub(crate) use crate::remote::remote_exec::{remote_exec, watch};
pub(crate) use crate::remote::ssh::{Machine, SshConnection};
pub(crate) use transfer::{LATEST, Manifest, receive, send, short};
pub(crate) use tree::{Seen, Tree};
