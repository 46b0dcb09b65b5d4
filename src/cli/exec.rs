//! Owns `exec`: runs a command in an env, in a new container or in the one that is running.

use std::ffi::OsString;

use clap::Args;

use crate::plan::ids::EnvName;
use crate::sys::error::Result;
use crate::sys::host::is_variable_name;
use crate::up::context::Context;
use crate::up::exec::{Job, run};

#[derive(Debug, Args)]
#[command(
    override_usage = "rockenv exec [OPTIONS] <ENV> <CMD>...\n       rockenv exec [OPTIONS] [ENV] -- <CMD>..."
)]
pub struct ExecArgs {
    /// Run as root inside
    #[arg(long)]
    root: bool,
    /// Pass a GPU in: the one that fits the env, or a PCI address, render node or index
    #[arg(long, value_name = "WHICH", num_args = 0..=1, require_equals = true, default_missing_value = "auto")]
    gpu: Option<String>,
    /// Working directory inside [default: the build user's home]
    #[arg(short = 'C', long, value_name = "DIR")]
    workdir: Option<String>,
    /// Set a variable inside
    #[arg(short, long, value_name = "NAME=VALUE")]
    env: Vec<String>,
    /// Run in a private copy of the env's snapshot, which is dropped afterwards; for `gc`
    #[arg(long, hide = true)]
    apart: bool,
    /// The env [default: the only one, if `--` follows]
    #[arg(value_name = "ENV")]
    name: Option<EnvName>,
    /// The command and its arguments
    #[arg(
        value_name = "CMD",
        num_args = 1..,
        allow_hyphen_values = true,
        requires = "name"
    )]
    words: Vec<OsString>,
    /// The same, after `--`
    #[arg(
        last = true,
        required_unless_present = "words",
        conflicts_with = "words",
        value_name = "CMD"
    )]
    command: Vec<OsString>,
}

/// Runs a command in an env; returns its exit code.
pub(crate) fn exec(cx: &Context, args: ExecArgs) -> Result<u8> {
    let mut variables = Vec::new();
    for text in &args.env {
        let parts = text.split_once('=');
        let (name, value) = parts
            .filter(|(name, _)| is_variable_name(name))
            .ok_or_else(|| {
                usage!("`{text}` is not NAME=VALUE")
                    .help("rockenv exec --env NAME=VALUE ENV -- CMD")
            })?;
        variables.push((name.to_owned(), value.to_owned()));
    }
    let job = Job {
        root: args.root,
        gpu: args.gpu,
        apart: args.apart,
        argv: [args.words, args.command].concat(),
        workdir: args.workdir,
        variables,
        ..Job::new(cx, args.name.as_ref())?
    };
    run(cx, &job)
}
