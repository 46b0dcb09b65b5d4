//! Owns `on`: the machine, the files to send and fetch, and the command to run there.

use clap::Parser as _;

use crate::cli::{Cli, Command, GlobalArgs};
use crate::remote::{self, RemoteRequest};
use crate::sys::error::Result;
use crate::up::context::Context;

impl RemoteRequest {
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

pub(crate) fn on(cx: &Context, mut request: RemoteRequest) -> Result<u8> {
    request.reads_input = reads_input(&request.command);
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
