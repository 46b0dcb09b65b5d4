//! Owns `man`: the manual pages, generated from clap's definitions.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use clap::builder::Resettable;
use clap::{Args, Command, ValueHint};
use fs_err as fs;

use crate::cli::help;
use crate::store::config::variables;
use crate::sys::account::become_caller;
use crate::sys::error::{Result, exit_codes, named_path};
use crate::sys::shell::quoted_path;
use crate::up::context::Context;

#[derive(Debug, Args)]
pub struct ManArgs {
    /// The command, such as `gc` or `snapshot diff` [default: rockenv itself]
    #[arg(value_name = "COMMAND", conflicts_with = "dir")]
    command: Vec<String>,
    /// Write one page for each command into this directory
    #[arg(long, value_name = "DIR", value_hint = ValueHint::DirPath)]
    dir: Option<PathBuf>,
}

/// Prints the manual page, or writes one page per command.
pub(crate) fn man(cx: &Context, args: &ManArgs) -> Result<()> {
    let Some(directory) = &args.dir else {
        let command = help::find(help::command(), &args.command)?;
        cx.ui.raw(&page(&command, &args.command.join(" "))?);
        return Ok(());
    };
    // Writing the pages does not need root.
    become_caller()?;
    let write = |path: &Path, done: std::io::Result<()>| {
        done.map_err(|error| named_path(path)(error).help("rockenv man --dir ./man"))
    };
    write(directory, fs::create_dir_all(directory))?;
    for (path, page) in pages()? {
        let name = format!("rockenv {path}");
        let file = format!("{}.1", name.trim_end().replace(' ', "-"));
        let path = directory.join(file);
        write(&path, fs::write(&path, page))?;
    }
    cx.ui.note(&format!(
        "wrote manual pages to {}; read one with: man -l {}",
        directory.display(),
        quoted_path(&directory.join("rockenv-up.1"))
    ));
    Ok(())
}

/// Returns the complete command, as built by clap.
pub fn command() -> Command {
    let mut command = help::command().term_width(100);
    command.build();
    command
}

/// Calls `with` for each visible subcommand, with its full name.
pub fn each(command: &Command, path: &str, with: &mut dyn FnMut(&str, &Command)) {
    for inner in command.get_subcommands().filter(|one| !one.is_hide_set()) {
        let path = format!("{path} {}", inner.get_name()).trim().to_owned();
        with(&path, inner);
        each(inner, &path, with);
    }
}

/// Returns every manual page with its command's path.
fn pages() -> Result<Vec<(String, Vec<u8>)>> {
    let command = command();
    let mut pages = vec![(String::new(), page(&command, "")?)];
    let mut failed = Ok(());
    each(&command, "", &mut |path, inner| match page(inner, path) {
        Ok(page) => pages.push((path.to_owned(), page)),
        Err(error) => failed = Err(error),
    });
    failed.map(|()| pages)
}

/// Returns a command's manual page, with examples at the end.
fn page(command: &Command, path: &str) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    // The manual describes every option, including those that `-h` hides.
    let plain = command
        .clone()
        .after_help(Resettable::Reset)
        .after_long_help(Resettable::Reset)
        .mut_args(|one| one.hide_short_help(false));
    clap_mangen::Man::new(plain)
        .source(concat!("rockenv ", env!("CARGO_PKG_VERSION")))
        .render(&mut page)?;
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

/// Returns the sections of the main page on exit codes, files and the environment.
fn surroundings() -> String {
    let mut extra = String::from(".SH \"EXIT STATUS\"\n");
    for (code, meaning) in exit_codes() {
        entry(&mut extra, code, meaning);
    }
    extra.push_str(".SH ENVIRONMENT\n");
    for (name, meaning) in variables() {
        entry(&mut extra, name, meaning);
    }
    extra.push_str(".SH FILES\n");
    entry(
        &mut extra,
        "./rockenv.toml, ~/.config/rockenv/config.toml, /etc/rockenv/config.toml",
        "Configuration; the first one that sets a key wins.",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_option_has_its_text_in_the_manual() {
        for (path, page) in pages().unwrap() {
            let page = String::from_utf8(page).unwrap();
            for (at, _) in page.match_indices("\n.TP\n") {
                let mut lines = page[at + 5..].lines();
                let (term, text) = (lines.next().unwrap(), lines.next().unwrap());
                assert!(!text.is_empty() && !text.starts_with('.'), "{path}: {term}");
            }
            assert!(!page.contains("SH EXTRA"), "{path}");
        }
    }
}
