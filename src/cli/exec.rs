//! Owns `exec`: runs a command in an env, in a new container or in the running one.

use std::ffi::OsString;

use clap::Args;

use crate::plan::ids::EnvName;
use crate::sys::address::shown_value;
use crate::sys::error::{Error, Kind, Result};
use crate::sys::host::is_variable_name;
use crate::sys::shell::quoted;
use crate::sys::userns;
use crate::up::context::Context;
use crate::up::exec::{Job, run};

#[derive(Debug, Default, Args)]
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
    /// The caller has entered a user namespace; for `gc`
    #[arg(long, hide = true)]
    inside_userns: bool,
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
    /// The command and its arguments, after `--`
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
    if args.inside_userns {
        userns::inherit();
    }
    let opened = Job::new(cx, args.name.as_ref());
    let opened = opened.map_err(|error| suggest_dashes(cx, &args, error))?;
    let job = Job {
        root: args.root,
        gpu: args.gpu,
        apart: args.apart,
        argv: [args.words, args.command].concat(),
        workdir: args.workdir,
        variables,
        ..opened
    };
    run(cx, &job)
}

/// Suggests the form without an env if the given name is probably the command: the store has a single env with a
/// different name.
fn suggest_dashes(cx: &Context, args: &ExecArgs, error: Error) -> Error {
    let envs = cx.existing_store().and_then(|store| store.envs());
    let is_only = envs.is_ok_and(|envs| envs.len() == 1);
    match &args.name {
        Some(name) if error.kind() == Kind::NoEnv && is_only && !error.names_another() => {
            error.help(without_env(args, name))
        }
        _ => error,
    }
}

/// Returns the command line that runs the same words in the only env, beginning with `first`.
fn without_env(args: &ExecArgs, first: &str) -> String {
    let mut words = vec!["rockenv exec".to_owned()];
    words.extend(args.root.then(|| "--root".to_owned()));
    words.extend(args.gpu.iter().map(|gpu| format!("--gpu={}", quoted(gpu))));
    let workdir = args.workdir.iter();
    words.extend(workdir.map(|directory| format!("--workdir {}", quoted(directory))));
    // If the user ran the command with stars, they would replace the secret in the container. The caller's shell
    // probably has the variable.
    let shown = |text: &String| match text.split_once('=') {
        Some((name, value)) if shown_value(name, value) != value => {
            format!("--env {name}=\"${name}\"")
        }
        _ => format!("--env {}", quoted(text)),
    };
    words.extend(args.env.iter().map(shown));
    words.extend(["--".to_owned(), first.to_owned()]);
    let rest = args.words.iter().chain(&args.command);
    words.extend(rest.map(|word| quoted(&word.to_string_lossy()).into_owned()));
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_suggested_command_line_has_no_secret() {
        let args = ExecArgs {
            env: ["HF_TOKEN=secret", "N=1"].map(str::to_owned).to_vec(),
            ..ExecArgs::default()
        };
        let line = "rockenv exec --env HF_TOKEN=\"$HF_TOKEN\" --env 'N=1' -- make";
        assert_eq!(without_env(&args, "make"), line);
    }
}
