//! Owns the reference of the command line, generated from clap's definitions: `docs/reference/cli.md` and the manual page.

use std::fmt::Write as _;

use clap::{Arg, Command};

use crate::cli::help;
use crate::store::config::VARIABLES;
use crate::sys::error::{EXIT_CODES, Result};

fn command() -> Command {
    let mut command = help::command().term_width(100);
    command.build();
    command
}

pub fn markdown() -> String {
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
    for (name, meaning) in VARIABLES {
        line(&mut text, &format!("| `{name}` | {meaning} |"));
    }
    text
}

fn line(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

/// Calls `with` for each visible subcommand, with its full name.
fn each(command: &Command, path: &str, with: &mut dyn FnMut(&str, &Command)) {
    for inner in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        let path = format!("{path} {}", inner.get_name()).trim().to_owned();
        with(&path, inner);
        each(inner, &path, with);
    }
}

/// Returns whether a command is more than a group of subcommands.
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
    options(&mut rows, command.get_opts_and_flags(), false);
    if !rows.is_empty() {
        text.push('\n');
        text.push_str(&rows);
    }
    let examples = help::examples(path);
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

trait Flags {
    fn get_opts_and_flags(&self) -> impl Iterator<Item = &Arg>;
}

impl Flags for Command {
    fn get_opts_and_flags(&self) -> impl Iterator<Item = &Arg> {
        self.get_arguments().filter(|arg| !arg.is_positional())
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

/// Returns an argument as it is typed: `-t, --target <GFX>...`.
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

/// Returns every manual page, with the words of its command.
pub(super) fn pages() -> Result<Vec<(String, Vec<u8>)>> {
    let command = command();
    let mut pages = vec![(String::new(), page(&command, "")?)];
    let mut failed = Ok(());
    each(&command, "", &mut |path, inner| match page(inner, path) {
        Ok(page) => pages.push((path.to_owned(), page)),
        Err(error) => failed = Err(error),
    });
    failed.map(|()| pages)
}

/// Returns the manual page of a command, with its examples at the end.
pub(super) fn page(command: &Command, path: &str) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    let plain = command.clone().after_help("").after_long_help("");
    clap_mangen::Man::new(plain).render(&mut page)?;
    if path.is_empty() {
        page.extend_from_slice(surroundings().as_bytes());
    }
    let examples = help::examples(path);
    if !examples.is_empty() {
        let mut text = String::from(".SH EXAMPLES\n");
        for (line, purpose) in examples {
            entry(&mut text, line, purpose);
        }
        page.extend_from_slice(text.as_bytes());
    }
    Ok(page)
}

/// Returns what the manual's first page says of the program's surroundings.
fn surroundings() -> String {
    let mut extra = String::from(".SH \"EXIT STATUS\"\n");
    for (code, meaning) in EXIT_CODES {
        entry(&mut extra, code, meaning);
    }
    extra.push_str(".SH ENVIRONMENT\n");
    for (name, meaning) in VARIABLES {
        entry(&mut extra, name, meaning);
    }
    extra.push_str(".SH FILES\n");
    entry(
        &mut extra,
        "./rockenv.toml, ~/.config/rockenv/config.toml, /etc/rockenv/config.toml",
        "Configuration; the first wins.",
    );
    entry(
        &mut extra,
        "/var/lib/rockenv",
        "Root's store; ~/.local/share/rockenv for other users.",
    );
    extra
}

fn entry(text: &mut String, term: &str, meaning: &str) {
    let roff = |text: &str| {
        text.replace('\\', "\\e")
            .replace('-', "\\-")
            .replace('`', "")
    };
    let _: std::fmt::Result = write!(text, ".TP\n\\fB{}\\fR\n{}\n", roff(term), roff(meaning));
}
