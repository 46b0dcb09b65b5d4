//! Owns `shell`: opens a shell in an env, in a new container or in the running one.

use std::ffi::OsString;

use clap::Args;

use crate::plan::ids::EnvName;
use crate::sys::error::Result;
use crate::up::context::Context;
use crate::up::exec::{Job, run};

#[derive(Debug, Args)]
pub struct ShellArgs {
    /// Run as root inside
    #[arg(long)]
    root: bool,
    /// Pass a GPU in: the one that fits the env, or a PCI address, render node or index
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    gpu: Option<String>,
    /// Open the tree that the failed step left
    #[arg(long)]
    failed: bool,
    /// The env [default: the only one]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
}

/// Opens a shell in an env; returns its exit code.
pub(crate) fn shell(cx: &Context, args: ShellArgs) -> Result<u8> {
    // Not a login shell: Debian's `/etc/profile` sets a `PATH` without rockenv's make and ninja.
    // Its errors are on its terminal, if it has one: a shell whose stderr is a file shows no prompt.
    let choose =
        "test -t 1 && exec 2>&1; if command -v bash >/dev/null; then exec bash; else exec sh; fi";
    let job = Job {
        root: args.root,
        gpu: args.gpu,
        failed: args.failed,
        argv: ["/bin/sh", "-c", choose].map(OsString::from).to_vec(),
        ..Job::new(cx, args.name.as_ref())?
    };
    run(cx, &job)
}
