//! The documentation against the program: every example parses, every link leads somewhere, no command is missing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use rockenv::cli::Cli;
use rockenv::image::Recipe;
use rockenv::matrix::jobs::Runners;
use rockenv::profile;
use rockenv::profile::hook;
use rockenv::store::config;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");

struct Document {
    /// Relative to the repository.
    name: String,
    text: String,
}

/// A fenced block.
struct Block {
    /// File and line, for messages.
    place: String,
    language: String,
    text: String,
}

impl Document {
    fn read(name: &str) -> Self {
        Self {
            name: name.to_owned(),
            text: fs_err::read_to_string(Path::new(ROOT).join(name)).unwrap(),
        }
    }

    fn blocks(&self) -> Vec<Block> {
        let mut blocks = Vec::new();
        let mut lines = self.text.lines().enumerate();
        while let Some((number, line)) = lines.next() {
            let Some(language) = line.strip_prefix("```") else {
                continue;
            };
            let text: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line)
                .take_while(|line| *line != "```")
                .collect();
            blocks.push(Block {
                place: format!("{}:{}", self.name, number + 1),
                language: language.to_owned(),
                text: text.join("\n") + "\n",
            });
        }
        blocks
    }

    /// The text without fenced blocks, by lines.
    fn prose(&self) -> Vec<&str> {
        let mut fenced = false;
        self.text
            .lines()
            .filter(|line| {
                let fence = line.starts_with("```");
                fenced ^= fence;
                !fenced && !fence
            })
            .collect()
    }

    /// What is between backticks in prose.
    fn code_spans(&self) -> Vec<&str> {
        let lines = self.prose();
        let spans = lines
            .into_iter()
            .flat_map(|line| line.split('`').skip(1).step_by(2));
        spans.collect()
    }

    /// The lines between a heading and the next one.
    fn section(&self, heading: &str) -> Vec<&str> {
        let lines: Vec<&str> = self
            .text
            .lines()
            .skip_while(|line| *line != heading)
            .skip(1)
            .take_while(|line| !line.starts_with("## "))
            .collect();
        assert!(!lines.is_empty(), "{} has no `{heading}`", self.name);
        lines
    }
}

fn documents() -> Vec<Document> {
    fn add(directory: &Path, found: &mut Vec<Document>) {
        for entry in fs_err::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() && directory != Path::new(ROOT) {
                add(&path, found);
            } else if path.extension().is_some_and(|end| end == "md") {
                let name = path.strip_prefix(ROOT).unwrap().to_str().unwrap();
                found.push(Document::read(name));
            }
        }
    }
    let mut found = Vec::new();
    for directory in ["", "docs", "images", "profiles", "hooks"] {
        add(&Path::new(ROOT).join(directory), &mut found);
    }
    found
}

fn is_page(document: &Document) -> bool {
    document.name.starts_with("docs/")
}

/// Splits a line as a shell does, up to the first thing that is not an argument of the first command.
fn words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let (mut word, mut inside, mut quote) = (String::new(), false, None);
    for letter in line.chars() {
        match (quote, letter) {
            (Some(open), _) if letter == open => quote = None,
            (Some(_), _) => word.push(letter),
            (None, '\'' | '"') => (quote, inside) = (Some(letter), true),
            (None, ' ') => {
                if std::mem::take(&mut inside) {
                    words.push(std::mem::take(&mut word));
                }
            }
            (None, '|' | '>' | '<' | ';' | '&') => break,
            (None, '#') if !inside => break,
            (None, _) => {
                word.push(letter);
                inside = true;
            }
        }
    }
    if inside {
        words.push(word);
    }
    words
}

/// Returns what is wrong with a command line that starts `rockenv`; other commands are none of our business.
///
/// Where it is only `named` in a sentence, required arguments may be missing.
fn refused(line: &str, named: bool) -> Option<String> {
    let mut words = words(line);
    let assignment = |word: &String| {
        word.split_once('=')
            .is_some_and(|(name, _)| !name.is_empty())
    };
    while words
        .first()
        .is_some_and(|word| word == "sudo" || assignment(word))
    {
        words.remove(0);
    }
    if words.first()? != "rockenv" {
        return None;
    }
    match Cli::try_parse_from(&words) {
        Err(error) if named && error.kind() == ErrorKind::MissingRequiredArgument => None,
        Err(error) if named && error.kind() == ErrorKind::MissingSubcommand => None,
        Err(error) if error.use_stderr() => Some(error.to_string()),
        _ => None,
    }
}

#[test]
fn commands_parse() {
    assert!(
        refused(
            "sudo A=b rockenv exec e -- sh -c 'x | y' > file # comment",
            false
        )
        .is_none()
    );
    assert!(refused("rockenv no-such-command", true).is_some());
    let mut wrong = Vec::new();
    let mut seen = 0;
    let mut check = |place: &str, line: &str, named| {
        seen += 1;
        wrong.extend(refused(line, named).map(|error| format!("{place}: {line}\n{error}")));
    };
    for document in documents() {
        for block in document.blocks() {
            if block.language == "console" {
                let typed = block
                    .text
                    .lines()
                    .filter_map(|line| line.strip_prefix("$ "));
                typed.for_each(|line| check(&block.place, line, false));
            }
        }
        for line in document.prose() {
            if let Some(line) = line.strip_prefix("    ") {
                check(&document.name, line, false);
            }
        }
        for span in document.code_spans() {
            // Not what shows a form: `rockenv plan ...`.
            if span.starts_with("rockenv ")
                && !span.contains(['[', '|', '…'])
                && !span.contains("...")
            {
                check(&document.name, span, true);
            }
        }
    }
    assert!(seen > 10, "{seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn toml_is_valid() {
    let directory = tempfile::tempdir().unwrap();
    // The reference of profiles shows parts of profiles; the tests of `profile` read it.
    for document in documents()
        .iter()
        .filter(|document| document.name != "docs/reference/profile.md")
    {
        for Block { place, text, .. } in document
            .blocks()
            .iter()
            .filter(|block| block.language == "toml")
        {
            let outcome = if text.starts_with("build = ") {
                Runners::parse(text)
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else if !text.contains("schema = 1") {
                toml::from_str::<config::File>(text)
                    .map(drop)
                    .map_err(|error| error.to_string())
            } else if text.contains("why = ") {
                let hook = directory.path().join("example");
                fs_err::create_dir_all(&hook).unwrap();
                fs_err::write(hook.join("hook.toml"), text).unwrap();
                hook::load(&[directory.path().to_owned().into()], "example")
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else if text.contains("provider = ") {
                Recipe::parse(text, place, Path::new(ROOT))
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else {
                let path: PathBuf = directory.path().join("example.toml");
                fs_err::write(&path, text).unwrap();
                match profile::check(&[], path.to_str().unwrap()) {
                    Ok((_, advice)) if advice.is_empty() => Ok(()),
                    Ok((_, advice)) => Err(advice.join("\n")),
                    Err(error) => Err(error.chain().join("\n")),
                }
            };
            if let Err(error) = outcome {
                panic!("{place}: {error}");
            }
        }
    }
}

#[test]
fn the_readme_holds_a_whole_profile() {
    let blocks = Document::read("README.md").blocks();
    let whole =
        |block: &Block| block.text.contains("schema = 1") && block.text.contains("[[step]]");
    assert!(blocks.iter().any(whole));
}

#[test]
fn the_readme_lists_every_command() {
    let readme = Document::read("README.md");
    let rows: Vec<&str> = readme
        .section("## Commands")
        .into_iter()
        .filter_map(|line| line.strip_prefix("| `"))
        .collect();
    let listed: BTreeSet<&str> = rows
        .iter()
        .map(|row| row.split([' ', '`']).next().unwrap())
        .collect();
    let command = Cli::command();
    let there: BTreeSet<&str> = command
        .get_subcommands()
        .filter(|command| !command.is_hide_set())
        .map(clap::Command::get_name)
        .collect();
    assert_eq!(listed, there);
    for parent in command.get_subcommands() {
        let row = |child: &str| {
            rows.iter().any(|row| {
                row.split([' ', '`']).next() == Some(parent.get_name())
                    && row.split([' ', '`', ',']).any(|word| word == child)
            })
        };
        for child in parent
            .get_subcommands()
            .filter(|child| !child.is_hide_set())
        {
            let child = child.get_name();
            assert!(row(child), "{} {child} is not listed", parent.get_name());
        }
    }
}

#[test]
fn the_readme_lists_every_exit_code() {
    let readme = Document::read("README.md");
    let rows = readme.section("## Exit codes");
    for (code, meaning) in rockenv::sys::error::EXIT_CODES {
        let row = format!("| {code} | {meaning} |");
        assert!(rows.contains(&row.as_str()), "missing: {row}");
    }
}

#[test]
fn the_readme_is_short() {
    assert!(Document::read("README.md").text.lines().count() <= 200);
}

#[test]
fn every_room_has_its_line() {
    let document = Document::read("docs/explanation/architecture.md");
    let rows = document.section("## Rooms").join("\n");
    let lib = fs_err::read_to_string(Path::new(ROOT).join("src/lib.rs")).unwrap();
    for line in lib.lines() {
        let line = line.trim_start_matches("pub ");
        if let Some(module) = line.strip_prefix("mod ") {
            let module = module.trim_end_matches(';');
            assert!(
                rows.contains(&format!("`{module}`")) || rows.contains(&format!("`{module}/`")),
                "docs/explanation/architecture.md has no line for `{module}`"
            );
        }
    }
}

#[test]
fn make_targets_exist() {
    let makefile = fs_err::read_to_string(Path::new(ROOT).join("Makefile")).unwrap();
    for document in documents() {
        let blocks = document.blocks();
        let typed = blocks
            .iter()
            .flat_map(|block| block.text.lines())
            .filter_map(|line| line.strip_prefix("$ "));
        for line in document.code_spans().into_iter().chain(typed) {
            let words = words(line);
            let Some(make) = words.iter().position(|word| word == "make") else {
                continue;
            };
            if words[..make].iter().any(|word| word == "rockenv") {
                continue;
            }
            for target in words[make + 1..].iter().filter(|word| !word.contains('=')) {
                assert!(
                    makefile
                        .lines()
                        .any(|line| line.starts_with(&format!("{target}:"))),
                    "{}: `make {target}`: no such target",
                    document.name
                );
            }
        }
    }
}

/// What a heading is called in a link.
fn anchor(heading: &str) -> String {
    let kept = heading
        .trim_start_matches('#')
        .trim()
        .chars()
        .filter(|letter| letter.is_alphanumeric() || matches!(letter, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

#[test]
fn links_lead_somewhere() {
    for document in documents() {
        let here = Path::new(ROOT).join(&document.name);
        for line in document.prose() {
            for link in line
                .split("](")
                .skip(1)
                .filter_map(|rest| rest.split(')').next())
            {
                if link.starts_with("https://") {
                    continue;
                }
                let (file, section) = link.split_once('#').unwrap_or((link, ""));
                let path = match file {
                    "" => here.clone(),
                    file => here.parent().unwrap().join(file),
                };
                assert!(path.exists(), "{}: no `{link}`", document.name);
                if !section.is_empty() {
                    let text = fs_err::read_to_string(&path).unwrap();
                    let headings = text.lines().filter(|line| line.starts_with('#'));
                    assert!(
                        headings.map(anchor).any(|anchor| anchor == section),
                        "{}: no section `{link}`",
                        document.name
                    );
                }
            }
        }
    }
}

#[test]
fn the_book_has_every_page_once() {
    let summary = Document::read("docs/SUMMARY.md");
    let mut listed: Vec<String> = summary
        .text
        .split("](")
        .skip(1)
        .filter_map(|rest| rest.split(')').next())
        .map(|page| format!("docs/{page}"))
        .collect();
    let mut pages: Vec<String> = documents()
        .into_iter()
        .filter(|document| is_page(document) && document.name != summary.name)
        .map(|document| document.name)
        .collect();
    listed.sort();
    pages.sort();
    assert_eq!(listed, pages);
}
