//! Owns the manual pages, generated from clap's definitions.

use std::fmt::Write as _;

use clap::Command;
use clap::builder::Resettable;

use crate::cli::{examples, help};
use crate::store::config::variables;
use crate::sys::error::{Result, exit_codes};

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

/// Returns a command's manual page, with examples at the end.
pub(super) fn page(command: &Command, path: &str) -> Result<Vec<u8>> {
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
    let examples = examples::examples(path);
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
