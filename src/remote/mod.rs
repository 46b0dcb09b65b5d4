//! Owns running rockenv on another machine: the ssh connection, the directory there for sent files, and ending commands
//! together with their connection.

mod on;
mod received;
mod remote_exec;
mod ssh;
mod transfer;
mod tree;

use std::path::PathBuf;

use clap::Args;
pub(crate) use on::{on, sent_file};
pub(crate) use remote_exec::{remote_exec, watch};
use ssh::Machine;
pub(crate) use transfer::{LATEST, receive};

#[derive(Debug, Args)]
pub struct RemoteRequest {
    /// The machine
    #[arg(value_name = "ssh://[USER@]HOST[:PORT]")]
    machine: Machine,
    /// Run it there with `sudo -n`
    #[arg(long, requires = "command")]
    sudo: bool,
    /// Also send a file or directory below the working directory; may be given again
    #[arg(long, value_name = "PATH")]
    send: Vec<PathBuf>,
    /// After success, fetch a file or directory, below the working directory on both machines; no file here is
    /// replaced
    #[arg(long, value_name = "PATH")]
    fetch: Vec<PathBuf>,
    /// The rockenv command to run there, such as `up gfx1103`
    #[arg(
        value_name = "COMMAND",
        required_unless_present_any = ["send", "fetch"],
        trailing_var_arg = true,
        allow_hyphen_values = true
    )]
    pub(crate) command: Vec<String>,
    /// The command forwards standard input.
    #[arg(skip)]
    pub(crate) reads_input: bool,
}
