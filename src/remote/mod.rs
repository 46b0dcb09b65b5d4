//! Owns another machine that rockenv runs on: the way there by ssh, the directory there that files are sent to, and that
//! commands there end with their connection.

mod remote_exec;
mod ssh;
mod transfer;
mod tree;

pub(crate) use crate::remote::remote_exec::{attend, watch};
pub(crate) use crate::remote::ssh::{Machine, Way};
pub(crate) use transfer::{LATEST, Manifest, receive, send, short};
pub(crate) use tree::{Seen, Tree};
