//! Generates `docs/reference/cli.md` from the program: `ROCKENV_UPDATE=1 cargo test --test cli_reference` writes it.

use std::fmt::Write as _;

use clap::{Arg, Command};
use rockenv::testing::config::variables;
use rockenv::testing::error::{Kind, exit_codes};
use rockenv::testing::{command, each, examples};

#[test]
fn docs_cli_md_is_up_to_date() {
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/docs/reference/cli.md");
    let text = markdown();
    #[expect(
        clippy::disallowed_methods,
        reason = "a switch of the test, not of the program"
    )]
    if std::env::var_os("ROCKENV_UPDATE").is_some() {
        fs_err::write(path, &text).unwrap();
    }
    let on_disk = fs_err::read_to_string(path).unwrap_or_default();
    assert!(
        on_disk == text,
        "docs/reference/cli.md is stale: ROCKENV_UPDATE=1 cargo test --test cli_reference"
    );
}

#[test]
fn every_exit_code_is_documented() {
    for kind in [
        Kind::Unexpected,
        Kind::Usage,
        Kind::Invalid,
        Kind::Unavailable,
        Kind::StepFailed,
        Kind::Busy,
        Kind::NotFound,
        Kind::NoEnv,
        Kind::NoLayer,
        Kind::Drift,
        Kind::Preflight,
        Kind::OutOfSpace,
        Kind::Signal(1),
        Kind::Signal(2),
        Kind::Signal(3),
        Kind::Signal(15),
        Kind::Command(127),
    ] {
        let code = kind.exit_code().to_string();
        assert!(
            exit_codes().any(|(codes, _)| codes.split(", ").any(|one| one == code)),
            "{kind:?} has no line in exit_codes.txt"
        );
    }
}

fn markdown() -> String {
    let command = command();
    let mut text = String::from(
        "# Command line\n\n<!-- Generated from the program by `ROCKENV_UPDATE=1 cargo test --test cli_reference`: edit the doc comments in src/. -->\n\n",
    );
    text.push_str("Results go to stdout, everything else to stderr.\n");
    text.push_str("Defaults come from the [configuration](configuration.md).\n");
    text.push_str("[Commands](commands.md) groups the commands by purpose; [exit codes](exit-codes.md) has a page of its own.\n\n");
    text.push_str("## Commands\n\n| command | what it does |\n| --- | --- |\n");
    each(&command, "", &mut |path, command| {
        if does_something(command) {
            let about = about(command);
            line(
                &mut text,
                &format!("| [`{path}`](#{}) | {about} |", anchor(path)),
            );
        }
    });
    text.push_str("\n## Options of every command\n\n");
    options(&mut text, command.get_arguments(), true);
    each(&command, "", &mut |path, command| {
        if does_something(command) {
            section(&mut text, path, command);
        }
    });
    text.push_str("\n## Environment variables\n\n| variable | meaning |\n| --- | --- |\n");
    for (name, meaning) in variables() {
        line(&mut text, &format!("| `{name}` | {meaning} |"));
    }
    text
}

fn line(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

/// Returns whether a command does more than group subcommands.
fn does_something(command: &Command) -> bool {
    command.is_args_conflicts_with_subcommands_set()
        || command.get_subcommands().all(Command::is_hide_set)
}

fn about(command: &Command) -> String {
    command
        .get_about()
        .map(ToString::to_string)
        .unwrap_or_default()
}

fn anchor(path: &str) -> String {
    format!("rockenv-{}", path.replace(' ', "-"))
}

fn section(text: &mut String, path: &str, command: &Command) {
    line(text, &format!("\n## rockenv {path}\n"));
    line(text, &format!("{}.\n", about(command)));
    let usage = command.clone().render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    line(text, &format!("```\n{usage}\n```"));
    let mut rows = String::new();
    options(&mut rows, command.get_positionals(), false);
    let flags = command.get_arguments();
    options(&mut rows, flags.filter(|arg| !arg.is_positional()), false);
    if !rows.is_empty() {
        text.push('\n');
        text.push_str(&rows);
    }
    let examples = examples(path);
    if !examples.is_empty() {
        let width = examples.iter().map(|(line, _)| line.len()).max();
        let width = width.unwrap_or_default();
        line(text, "\n```sh");
        for (example, purpose) in examples {
            line(text, &format!("{example:width$}  # {purpose}"));
        }
        line(text, "```");
    }
}

fn options<'a>(text: &mut String, arguments: impl Iterator<Item = &'a Arg>, global: bool) {
    for argument in arguments {
        let own = matches!(argument.get_id().as_str(), "help" | "version");
        if argument.is_hide_set() || own || argument.is_global_set() != global {
            continue;
        }
        let help = argument
            .get_help()
            .map(ToString::to_string)
            .unwrap_or_default();
        let _: std::fmt::Result = write!(text, "- `{}`: {help}", shape(argument));
        let defaults: Vec<_> = argument
            .get_default_values()
            .iter()
            .map(|value| value.to_string_lossy())
            .collect();
        if !defaults.is_empty() && argument.get_action().takes_values() {
            let _: std::fmt::Result = write!(text, " [default: {}]", defaults.join(" "));
        }
        let values: Vec<_> = argument
            .get_possible_values()
            .iter()
            .filter(|value| !value.is_hide_set())
            .map(|value| format!("`{}`", value.get_name()))
            .collect();
        if !values.is_empty() && argument.get_action().takes_values() {
            let _: std::fmt::Result = write!(text, "; one of {}", values.join(", "));
        }
        text.push('\n');
    }
}

/// Returns an argument in command-line notation: `-t, --target <GFX>...`.
fn shape(argument: &Arg) -> String {
    if argument.is_positional() {
        return argument.to_string();
    }
    let mut text = String::new();
    if let Some(short) = argument.get_short() {
        let _: std::fmt::Result = write!(text, "-{short}, ");
    }
    if let Some(long) = argument.get_long() {
        let _: std::fmt::Result = write!(text, "--{long}");
    }
    if argument.get_action().takes_values() {
        let names = argument.get_value_names().unwrap_or_default();
        for name in names {
            let _: std::fmt::Result = match argument.is_require_equals_set() {
                true => write!(text, "[=<{name}>]"),
                false => write!(text, " <{name}>"),
            };
        }
    }
    text
}
