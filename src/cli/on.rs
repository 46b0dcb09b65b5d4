//! Owns `on`: the machine, the files to send and fetch, and the command to run there.

use std::path::PathBuf;

use clap::{Args, Parser as _};

use crate::cli::{Cli, Command, GlobalArgs};
use crate::remote::{self, Machine, RemoteRequest};
use crate::sys::error::Result;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct OnArgs {
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
    command: Vec<String>,
}

impl OnArgs {
    /// Forwards the global options to the command, whether they precede or follow `on`.
    pub(crate) fn hand_on(&mut self, global: &GlobalArgs) {
        let verbose = std::iter::repeat_n("--verbose", global.verbose.into());
        let flags = [
            (global.quiet, "--quiet"),
            (global.yes, "--yes"),
            (global.json, "--json"),
        ];
        let flags = flags.into_iter().filter(|(is_given, _)| *is_given);
        let words = verbose.chain(flags.map(|(_, flag)| flag));
        let mut words: Vec<String> = words.map(str::to_owned).collect();
        if let Some(home) = &global.home {
            words.extend(["--home".to_owned(), home.to_string_lossy().into_owned()]);
        }
        if !self.command.is_empty() {
            self.command.splice(..0, words);
        }
    }
}

pub(crate) fn on(cx: &Context, args: &OnArgs) -> Result<u8> {
    let request = RemoteRequest {
        machine: &args.machine,
        sudo: args.sudo,
        send: &args.send,
        fetch: &args.fetch,
        command: &args.command,
        reads_input: reads_input(&args.command),
    };
    remote::on(&cx.ui, &cx.config, &request)
}

/// Returns whether a rockenv command forwards its input.
fn reads_input(words: &[String]) -> bool {
    let words = std::iter::once("rockenv").chain(words.iter().map(String::as_str));
    let parsed = Cli::try_parse_from(words);
    parsed.is_ok_and(|cli| matches!(cli.command, Command::Exec(_) | Command::Shell(_)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn global_options_are_for_the_command_there() {
        for (line, command) in [
            (
                &["--home", "/s", "--json", "on", "ssh://h", "ls"][..],
                &["--json", "--home", "/s", "ls"][..],
            ),
            (
                &["-vv", "-y", "on", "ssh://h", "rm", "a"],
                &["--verbose", "--verbose", "--yes", "rm", "a"],
            ),
            (&["on", "ssh://h", "--json", "ls"], &["--json", "ls"]),
            (&["--json", "on", "ssh://h", "--fetch", "out"], &[]),
        ] {
            let mut cli = Cli::try_parse_from([&["rockenv"], line].concat()).unwrap();
            let Command::On(args) = &mut cli.command else {
                panic!("{line:?}")
            };
            args.hand_on(&cli.global);
            assert_eq!(args.command, command, "{line:?}");
        }
        let line = ["rockenv", "on", "ssh://h", "--sudo", "--fetch", "out"];
        assert!(Cli::try_parse_from(line).is_err(), "nothing runs there");
    }
}
