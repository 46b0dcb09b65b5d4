//! Owns help: commands in groups, options under headings, examples at the end, and suggestions for command words of
//! other tools.

use std::fmt::Write as _;
use std::sync::LazyLock;

use clap::builder::StyledStr;
use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{Args, CommandFactory as _, FromArgMatches as _};

use crate::cli::Cli;
use crate::rocm::target::Target;
use crate::sys::error::{Error, Result};
use crate::sys::suggest;
use crate::ui::text;
use crate::up::context::Context;

/// The commands in the order of `--help`.
const GROUPS: [(&str, &str); 5] = [
    (
        "Environments",
        "up plan ls status shell exec env logs report down rm",
    ),
    (
        "Snapshots",
        "snapshot rollback fork verify push pull export import",
    ),
    (
        "Profiles, images, hooks, targets",
        "profile image hook target lock",
    ),
    ("Several builds and machines", "matrix on"),
    (
        "The machine",
        "setup doctor du gc cache fsck trust completions man schema help",
    ),
];

/// Returns the command words of other tools, with the rockenv command for each.
fn words() -> impl Iterator<Item = (&'static str, &'static str)> {
    include_str!("synonyms.txt")
        .lines()
        .filter_map(|line| line.split_once(": "))
}

/// Command lines, each with its purpose.
type Examples = Vec<(&'static str, &'static str)>;

/// Examples by command path.
static EXAMPLES: LazyLock<Vec<(&str, Examples)>> = LazyLock::new(|| {
    let mut all: Vec<(&str, Examples)> = Vec::new();
    for line in include_str!("examples.txt").lines() {
        if let Some(path) = line
            .strip_prefix('[')
            .and_then(|line| line.strip_suffix(']'))
        {
            all.push((path, Vec::new()));
        } else if let (Some((_, last)), Some(example)) = (all.last_mut(), line.split_once("  # ")) {
            last.push(example);
        }
    }
    all
});

/// Returns the examples of a command, by its path.
pub fn examples(path: &str) -> &'static [(&'static str, &'static str)] {
    let found = EXAMPLES.iter().find(|(known, _)| *known == path);
    found.map_or(&[], |(_, examples)| examples)
}

#[derive(Debug, Args)]
pub struct HelpArgs {
    /// The command, such as `up` or `snapshot diff`
    #[arg(value_name = "COMMAND")]
    pub(super) command: Vec<String>,
}

/// Returns the clap command with everything that its help shows.
pub(crate) fn command() -> clap::Command {
    let command = with_examples(Cli::command(), "");
    let options = clap::Command::new("rockenv")
        .disable_version_flag(true)
        .disable_help_flag(true)
        .args(
            command
                .get_arguments()
                .map(|one| one.clone().hide_short_help(false)),
        )
        .help_template("{all-args}")
        .render_help();
    let template = format!(
        "{{about-with-newline}}\n{{usage-heading}} {{usage}}\n{}\n{}{{after-help}}",
        groups(&command),
        options.ansi().to_string().trim_end()
    );
    command.help_template(template)
}

/// Parses the command line. For an unknown command, the error suggests the intended command.
pub(super) fn parse() -> std::result::Result<Cli, Unparsed> {
    // Building the help takes longer than parsing, and most command lines do not need it.
    let parsed = Cli::command().try_get_matches();
    let parsed = parsed.or_else(|error| match error.kind() {
        ErrorKind::DisplayVersion => Err(error),
        _ => command().try_get_matches(),
    });
    let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
    parsed.map_err(|mut error| {
        keep_close(&mut error);
        match (error.kind(), error.get(ContextKind::InvalidSubcommand)) {
            (ErrorKind::InvalidSubcommand, Some(ContextValue::String(word)))
                if is_first_command(word) =>
            {
                suggestion(word).map_or(Unparsed::Usage(error), Unparsed::Meant)
            }
            (ErrorKind::InvalidUtf8, _) => {
                let bad = std::env::args_os().find(|word| word.to_str().is_none());
                bad.map_or(Unparsed::Usage(error), |word| {
                    let error = usage!("argument `{}` is not UTF-8", text::os(word));
                    Unparsed::Meant(
                        error.help("only paths and the command of `exec` may contain any bytes"),
                    )
                })
            }
            _ => Unparsed::Usage(error),
        }
    })
}

/// Returns whether the word is the first command on the command line.
fn is_first_command(word: &str) -> bool {
    let known = Cli::command();
    let mut before = std::env::args_os()
        .skip(1)
        .take_while(|other| other != word);
    before.all(|other| known.find_subcommand(other).is_none())
}

/// Drops clap's suggestions that are too different from the word, such as `on` for `nonsense`.
fn keep_close(error: &mut clap::Error) {
    let (Some(ContextValue::String(word)), Some(ContextValue::Strings(names))) = (
        error.get(ContextKind::InvalidSubcommand),
        error.get(ContextKind::SuggestedSubcommand),
    ) else {
        return;
    };
    match suggest::closest(word, names.iter().map(String::as_str)).map(str::to_owned) {
        Some(close) => error.insert(
            ContextKind::SuggestedSubcommand,
            ContextValue::Strings(vec![close]),
        ),
        None => {
            // clap would print the empty list of tips as an empty line.
            error.remove(ContextKind::Suggested);
            error.remove(ContextKind::SuggestedSubcommand)
        }
    };
}

/// Why a command line was not parsed.
pub(super) enum Unparsed {
    /// A usage error, or `--help` or `--version`.
    Usage(clap::Error),
    /// An unknown word, with the command to use instead.
    Meant(Error),
}

/// Returns the error for a word of another tool, or for a target in place of a command.
fn suggestion(word: &str) -> Option<Error> {
    let help = match words().find(|(known, _)| *known == word) {
        Some((_, help)) => help.to_owned(),
        None => {
            let target = Target::named(word).ok()?;
            format!("`rockenv up {target}` builds for it")
        }
    };
    Some(usage!("no command `{}`", word.escape_debug()).help(help))
}

/// Prints a command's help, like its `--help`.
pub(super) fn help(cx: &Context, args: &HelpArgs) -> Result<()> {
    let mut command = find(command(), &args.command)?;
    cx.ui.styled(&command.render_long_help());
    Ok(())
}

/// Returns a command by its path: `snapshot`, `diff`.
pub(super) fn find(mut command: clap::Command, words: &[String]) -> Result<clap::Command> {
    command.build();
    for (at, word) in words.iter().enumerate() {
        let Some(inner) = command.find_subcommand(word) else {
            if at == 0
                && let Some(error) = suggestion(word)
            {
                return Err(error);
            }
            let shown = words[..=at].join(" ");
            let message = format!("no command `{}`", shown.escape_debug());
            let all = match at {
                0 => "rockenv --help".to_owned(),
                _ => format!("rockenv {} --help", words[..at].join(" ")),
            };
            let known = command.get_subcommands().map(clap::Command::get_name);
            return Err(usage!("{message}").help(suggest::help(word, known, &all)));
        };
        command = inner.clone();
    }
    Ok(command)
}

fn with_examples(command: clap::Command, path: &str) -> clap::Command {
    let command = command.mut_subcommands(|one| {
        let inner = format!("{path} {}", one.get_name());
        with_examples(one, inner.trim_start())
    });
    let examples = examples(path);
    if examples.is_empty() {
        return command;
    }
    let width = examples.iter().map(|(line, _)| line.len()).max();
    let width = width.unwrap_or_default();
    let mut text = heading("Examples");
    for (line, purpose) in examples {
        let _: std::fmt::Result = write!(text, "\n  {line:width$}  # {purpose}");
    }
    let short = match path {
        "" => text.clone(),
        _ => format!("`rockenv help {path}` shows all options, and examples."),
    };
    command
        .after_help(StyledStr::from(short))
        .after_long_help(StyledStr::from(text))
}

/// Returns every command with its description, group by group.
fn groups(command: &clap::Command) -> String {
    let mut text = String::new();
    let width = command.get_subcommands().map(|one| one.get_name().len());
    let width = width.max().unwrap_or_default();
    for (title, names) in GROUPS {
        let _: std::fmt::Result = write!(text, "\n{}\n", heading(title));
        for name in names.split(' ') {
            let inner = command.find_subcommand(name);
            let about = inner.and_then(clap::Command::get_about);
            let about = about.map(ToString::to_string).unwrap_or_default();
            let _: std::fmt::Result = writeln!(text, "  \x1b[1m{name:width$}\x1b[0m  {about}");
        }
    }
    text
}

/// Formats a heading in clap's style.
fn heading(title: &str) -> String {
    format!("\x1b[1m\x1b[4m{title}:\x1b[0m")
}

#[cfg(test)]
mod tests {
    use super::super::man::each;
    use super::*;

    #[test]
    fn every_command_is_in_one_group() {
        let command = Cli::command();
        let mut named: Vec<&str> = GROUPS
            .iter()
            .flat_map(|(_, names)| names.split(' '))
            .collect();
        let mut there: Vec<&str> = command
            .get_subcommands()
            .map(clap::Command::get_name)
            .collect();
        named.sort_unstable();
        there.sort_unstable();
        assert_eq!(named, there);
    }

    #[test]
    fn every_command_has_examples_that_parse() {
        let mut paths = vec![String::new()];
        each(&Cli::command(), "", &mut |path, command| {
            // A group of commands does nothing by itself and needs no example.
            if !(command.has_subcommands() && command.is_subcommand_required_set()) {
                paths.push(path.to_owned());
            }
        });
        for (path, examples) in EXAMPLES.iter() {
            assert!(
                paths.iter().any(|known| known == path),
                "no command `{path}`"
            );
            for (line, _) in examples {
                let words = shlex::split(line).unwrap();
                assert!(words[1..].join(" ").starts_with(path), "{line}");
                let parsed = command().try_get_matches_from(&words);
                let parsed = parsed.and_then(|matches| Cli::from_arg_matches(&matches));
                assert!(parsed.is_ok(), "{line}: {}", parsed.unwrap_err());
                assert!(line.len() <= 60, "{line}");
            }
        }
        for path in paths {
            assert!(!examples(&path).is_empty(), "`{path}` has no example");
        }
    }

    #[test]
    fn many_options_are_under_headings() {
        each(&Cli::command(), "", &mut |path, command| {
            let own = command.get_arguments().filter(|one| !one.is_positional());
            let own: Vec<_> = own.filter(|one| !one.is_global_set()).collect();
            let bare: Vec<_> = own
                .iter()
                .filter(|one| one.get_help_heading().is_none())
                .map(|one| one.get_id().as_str())
                .collect();
            assert!(own.len() <= 8 || bare.is_empty(), "{path}: {bare:?}");
        });
    }

    #[test]
    fn words_of_other_tools_name_commands() {
        for (word, help) in words() {
            assert!(Cli::command().find_subcommand(word).is_none(), "{word}");
            // A hint would prefix a sentence after a colon with `sudo`.
            assert!(!help.contains(": rockenv "), "{help}");
            // Every command that the suggestions mention exists.
            for line in help
                .split('`')
                .skip(1)
                .step_by(2)
                .filter(|one| one.starts_with("rockenv"))
            {
                let words: Vec<&str> = line.split(' ').skip(1).collect();
                let first = words.first().unwrap();
                let command = Cli::command();
                assert!(
                    first.starts_with('-') || command.find_subcommand(first).is_some(),
                    "{line}"
                );
            }
        }
        assert!(words().is_sorted());
    }
}
