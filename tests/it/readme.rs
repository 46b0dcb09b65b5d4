//! The documentation against the program: every example parses, every link resolves, no command is missing.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;

use clap::error::ErrorKind;
use clap::{CommandFactory as _, Parser as _};
use rockenv::testing::Cli;
use rockenv::testing::Recipe;
use rockenv::testing::Runners;
use rockenv::testing::config;
use rockenv::testing::hook;
use rockenv::testing::profile;

const ROOT: &str = env!("CARGO_MANIFEST_DIR");
/// Generated pages, by `tests/cli_reference.rs` and `tests/bench/run`.
const GENERATED: [&str; 2] = ["docs/reference/cli.md", "docs/explanation/benchmarks.md"];
/// Completes a fragment of a profile.
const HEAD: &str = "schema = 1\nimage = \"debian-forky\"\n";

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
            // A block in a list is indented.
            let indent = line.len() - line.trim_start().len();
            let Some(language) = line.trim_start().strip_prefix("```") else {
                continue;
            };
            let text: Vec<&str> = lines
                .by_ref()
                .map(|(_, line)| line.get(indent..).unwrap_or_default())
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

    /// Returns the lines outside fenced blocks.
    fn prose(&self) -> Vec<&str> {
        let mut fenced = false;
        self.text
            .lines()
            .filter(|line| {
                let fence = line.trim_start().starts_with("```");
                fenced ^= fence;
                !fenced && !fence
            })
            .collect()
    }

    /// Returns the text between backticks in prose.
    fn code_spans(&self) -> Vec<&str> {
        let lines = self.prose();
        let spans = lines
            .into_iter()
            .flat_map(|line| line.split('`').skip(1).step_by(2));
        spans.collect()
    }

    /// Returns the lines between a heading and the next one.
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

/// Splits a line as a shell does, up to the end of the first command.
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

/// Returns the error of a command line that starts `rockenv`, and `None` for other commands.
///
/// A command that is only `named` in a sentence may lack required arguments.
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
    // Names are lower case, and placeholders such as ENV are not.
    let is_placeholder = |word: &&mut String| word.bytes().all(|byte| byte.is_ascii_uppercase());
    for word in words.iter_mut().filter(is_placeholder) {
        word.make_ascii_lowercase();
    }
    // `matrix` passes what follows `--` to `up`.
    let ups = match words.get(1).is_some_and(|verb| verb == "matrix") {
        true => words.split(|word| word == "--").nth(1).unwrap_or_default(),
        false => &[],
    };
    let up = [&["rockenv".to_owned(), "up".to_owned()], ups].concat();
    match Cli::try_parse_from(&words).and_then(|_| Cli::try_parse_from(up)) {
        Err(error) if named && error.kind() == ErrorKind::MissingRequiredArgument => None,
        Err(error) if named && error.kind() == ErrorKind::MissingSubcommand => None,
        Err(error) if error.use_stderr() => Some(error.to_string()),
        _ => None,
    }
}

/// Returns the commands of a shell line with their arguments: between separators, and in `$(...)`.
fn commands(line: &str) -> impl Iterator<Item = &str> {
    let (first, inner) = line.split_once("$(").unwrap_or((line, ""));
    let inner = inner.split(')').next().unwrap_or_default();
    [first, inner]
        .into_iter()
        .flat_map(|part| part.split(['|', ';', '&']))
        .map(str::trim)
}

/// Returns what a reader types from a block: the lines after a prompt, or a whole script, with continued lines joined.
fn typed(block: &Block) -> Vec<String> {
    let text = block.text.replace("\\\n", " ");
    let lines = text.lines();
    let lines: Vec<&str> = match block.language.as_str() {
        "console" => lines.filter_map(|line| line.strip_prefix("$ ")).collect(),
        "sh" => lines.collect(),
        _ => Vec::new(),
    };
    lines.into_iter().map(str::to_owned).collect()
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
    assert!(refused("rockenv matrix up gfx1100 -- --until a", false).is_none());
    assert!(refused("rockenv matrix up gfx1100 -- --nonsense", false).is_some());
    let found: Vec<&str> = commands("cat x | rockenv ls; eval \"$(sudo rockenv env e)\"").collect();
    assert_eq!(
        found,
        ["cat x", "rockenv ls", "eval \"", "sudo rockenv env e"]
    );
    let mut wrong = Vec::new();
    let mut seen = 0;
    let mut check = |place: &str, line: &str, named| {
        seen += 1;
        wrong.extend(refused(line, named).map(|error| format!("{place}: {line}\n{error}")));
    };
    for document in documents() {
        for block in document.blocks() {
            for line in typed(&block) {
                for command in commands(&line) {
                    check(&block.place, command, false);
                }
            }
        }
        for line in document.prose() {
            assert!(
                !line.starts_with("    "),
                "{}: an indented block, which no test reads: {line}",
                document.name
            );
        }
        for span in document.code_spans() {
            // Skips synopses such as `rockenv plan ...`.
            if span.starts_with("rockenv ")
                && !span.contains(['[', '|', '…'])
                && !span.contains("...")
            {
                check(&document.name, span, true);
            }
        }
    }
    assert!(seen > 200, "{seen}");
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Returns whether a block without a version belongs to a profile, not to the configuration.
fn is_part_of_a_profile(text: &str) -> bool {
    [
        "[[component]]",
        "[[volume]]",
        "[[step]]",
        "hooks = ",
        "env-from-host = ",
    ]
    .iter()
    .any(|start| text.lines().any(|line| line.starts_with(start)))
}

#[test]
fn toml_is_valid() {
    let directory = tempfile::tempdir().unwrap();
    let directories = [directory.path().to_owned().into()];
    for document in documents() {
        let is_reference = document.name == "docs/reference/profile.md";
        if is_reference {
            // A later block extends the first one.
            let blocks = document.blocks();
            let mut blocks = blocks.iter().filter(|block| block.language == "toml");
            let file = directory.path().join("mylib.toml");
            fs_err::write(file, &blocks.next().unwrap().text).unwrap();
            assert!(blocks.count() > 10);
        }
        for Block { place, text, .. } in document
            .blocks()
            .iter()
            .filter(|block| block.language == "toml")
        {
            let outcome = if text.starts_with("build = ") {
                Runners::parse(text)
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else if !text.contains("schema = 1") && (is_reference || is_part_of_a_profile(text)) {
                let path: PathBuf = directory.path().join("part.toml");
                let step = match text.contains("[[step]]") {
                    true => "",
                    false => "\n[[step]]\nname = \"step\"\nrun = \"true\"\n",
                };
                fs_err::write(&path, format!("{HEAD}{text}{step}")).unwrap();
                profile::load(&[], path.to_str().unwrap())
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
                hook::load(&directories, "example")
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else if text.contains("provider = ") {
                Recipe::parse(text, place, Path::new(ROOT))
                    .map(drop)
                    .map_err(|error| error.chain().join("\n"))
            } else {
                let path: PathBuf = directory.path().join("example.toml");
                fs_err::write(&path, text).unwrap();
                match profile::check(&directories, path.to_str().unwrap()) {
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
fn a_tutorial_holds_a_whole_profile() {
    let blocks = Document::read("docs/tutorials/library.md").blocks();
    let whole =
        |block: &Block| block.text.contains("schema = 1") && block.text.contains("[[step]]");
    assert!(blocks.iter().any(whole));
}

#[test]
fn every_command_has_its_row() {
    let page = Document::read("docs/reference/commands.md");
    let rows: Vec<&str> = page
        .prose()
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
fn every_exit_code_has_its_row() {
    let page = Document::read("docs/reference/exit-codes.md");
    let rows = page.prose();
    for (code, meaning) in rockenv::testing::error::exit_codes() {
        let row = format!("| {code} | {meaning} |");
        assert!(rows.contains(&row.as_str()), "missing: {row}");
    }
}

#[test]
fn the_readme_is_short() {
    assert!(Document::read("README.md").text.lines().count() < 150);
}

#[test]
fn every_room_has_its_line() {
    let document = Document::read("docs/explanation/architecture.md");
    let rows = document.section("## Rooms").join("\n");
    let lib = fs_err::read_to_string(Path::new(ROOT).join("src/lib.rs")).unwrap();
    for line in lib.lines() {
        let line = line.trim_start_matches("pub ");
        let module = line.strip_prefix("mod ");
        // Skips inline modules.
        if let Some(module) = module.and_then(|module| module.strip_suffix(';')) {
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
        let typed = blocks.iter().flat_map(typed);
        let spans = document.code_spans().into_iter().map(str::to_owned);
        for line in spans.chain(typed) {
            let words = words(&line);
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

/// Returns the anchor of a heading.
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
fn every_configuration_key_has_its_row() {
    let page = Document::read("docs/reference/configuration.md");
    let schema = schemars::schema_for!(config::File);
    let keys = schema.get("properties").and_then(|keys| keys.as_object());
    for key in keys.unwrap().keys() {
        let row = |line: &&str| {
            line.starts_with(&format!("| `{key}` |")) || line.starts_with(&format!("| `[{key}]` |"))
        };
        assert!(
            page.prose().iter().any(row),
            "{} has no row for `{key}`",
            page.name
        );
    }
}

#[test]
fn the_first_lines_of_the_profile_reference_run() {
    let page = Document::read("docs/reference/profile.md");
    let block = &page.blocks()[0];
    assert_eq!(block.language, "sh", "{}", block.place);
    let directory = tempfile::tempdir().unwrap();
    let program = Path::new(env!("CARGO_BIN_EXE_rockenv")).parent().unwrap();
    let out = Command::new("sh")
        .args(["-exc", &block.text])
        .current_dir(directory.path())
        .env_clear()
        .env(
            "PATH",
            format!("{}:/usr/sbin:/usr/bin:/sbin:/bin", program.display()),
        )
        .env("HOME", directory.path())
        .env("XDG_CONFIG_HOME", directory.path())
        .env("ROCKENV_HOME", directory.path().join("store"))
        .env("ROCKENV_ENGINE", "nspawn")
        .output()
        .unwrap();
    assert!(
        out.status.success(),
        "{}",
        String::from_utf8_lossy(&out.stderr)
    );
    let written = fs_err::read_to_string(directory.path().join("mine.toml")).unwrap();
    assert!(written.contains("[[step]]"), "{written}");
}

#[test]
fn prose_has_one_sentence_a_line() {
    let two = |line: &str| {
        let letters: Vec<char> = line.chars().collect();
        letters.windows(4).any(|window| {
            let ends = window[0].is_lowercase() || matches!(window[0], ')' | '`' | '*');
            ends && window[1..3] == ['.', ' '] && window[3].is_uppercase()
        })
    };
    assert!(two("It is done. Go on.") && !two("1. Go on, for example with `a`."));
    let mut wrong = Vec::new();
    for document in documents() {
        let ours = is_page(&document) || document.name == "README.md";
        if !ours || GENERATED.contains(&document.name.as_str()) {
            continue;
        }
        let prose = document.prose();
        let sentences = prose
            .iter()
            .filter(|line| !line.trim_start().starts_with('|'));
        for line in sentences {
            if two(line) || line.chars().count() > 120 {
                wrong.push(format!("{}: {line}", document.name));
            }
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn the_book_stands_alone() {
    for document in documents().iter().filter(|document| is_page(document)) {
        let here = Path::new(&document.name).parent().unwrap();
        let depth = here.components().count() - 1;
        for link in document.text.split("](").skip(1) {
            let up = link.split(')').next().unwrap().matches("../").count();
            assert!(
                up <= depth,
                "{}: a link out of docs/: {link}",
                document.name
            );
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
