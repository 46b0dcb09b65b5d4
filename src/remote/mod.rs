//! Owns another machine that rockenv runs on: the `way` there by ssh, what both sides do so that files sent there are written
//! over nobody's work (`tree`, `merge`, `receive`), and that commands there end with their connection (`attend`).

mod merge;
mod receive;
mod remote_exec;
mod ssh;
mod tree;

pub(crate) use crate::remote::remote_exec::{attend, watch};
pub(crate) use crate::remote::ssh::{Machine, Way};
pub(crate) use receive::{LOOKED_AT, Outcome, is_looked_at, receive};
pub(crate) use tree::{Seen, Tree};
