//! The rooms of `src/`: their list, that a room imports only from itself and from rooms below it, and that files named
//! in the documentation and tests named in `tests/all` exist.

#![expect(clippy::unwrap_used, reason = "tests")]

use std::path::{Path, PathBuf};

use fs_err as fs;
use proc_macro2::{Delimiter, TokenStream, TokenTree};

/// From top to bottom; `docs/explanation/architecture.md` describes each.
const ROOMS: [&str; 15] = [
    "cli", "up", "matrix", "remote", "execute", "share", "store", "engine", "plan", "profile",
    "image", "rocm", "tree", "ui", "sys",
];

/// Maximum length of a file, to keep it readable at a sitting.
const LINES: usize = 600;

/// Maximum length of a function, including its signature and comments.
const FUNCTION_LINES: usize = 100;

fn rank(room: &str) -> Option<usize> {
    ROOMS.iter().position(|known| *known == room)
}

/// Returns all Rust files below a directory, relative to it.
fn files(below: &str) -> Vec<PathBuf> {
    fn walk(directory: &Path, found: &mut Vec<PathBuf>) {
        for entry in fs::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                walk(&path, found);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                found.push(path);
            }
        }
    }
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join(below);
    let mut found = Vec::new();
    walk(&top, &mut found);
    found.sort();
    found
        .iter()
        .map(|path| path.strip_prefix(&top).unwrap().to_owned())
        .collect()
}

fn text(below: &str, file: &Path) -> String {
    let top = Path::new(env!("CARGO_MANIFEST_DIR"));
    fs::read_to_string(top.join(below).join(file)).unwrap()
}

/// The names of other rooms in a token stream, each with its line.
#[derive(Default)]
struct Mentions {
    found: Vec<(String, usize)>,
}

impl Mentions {
    /// Collects each name after `crate::`, or after as many `super::` as lead from `depth` modules below the crate to
    /// its root.
    fn collect(&mut self, tokens: TokenStream, depth: usize) {
        let tokens: Vec<TokenTree> = tokens.into_iter().collect();
        let mut at = 0;
        while at < tokens.len() {
            match &tokens[at] {
                TokenTree::Ident(word) if word == "crate" || word == "super" => {
                    let mut up = if word == "crate" { depth } else { 1 };
                    at += 1;
                    while follows(&tokens, at) && is(&tokens, at + 2, "super") {
                        up += 1;
                        at += 3;
                    }
                    if follows(&tokens, at) && up == depth {
                        self.first(&tokens[at + 2..]);
                    }
                }
                TokenTree::Group(group) => {
                    let opens = group.delimiter() == Delimiter::Brace;
                    let inner = opens && at >= 2 && is(&tokens, at - 2, "mod");
                    self.collect(group.stream(), depth + usize::from(inner));
                    at += 1;
                }
                TokenTree::Literal(literal) => {
                    // A path in a serde attribute.
                    let literal = literal.to_string();
                    if let Some(path) = literal.strip_prefix("\"crate::") {
                        let room = path.split("::").next().unwrap_or_default();
                        let line = tokens[at].span().start().line;
                        self.found.push((room.to_owned(), line));
                    }
                    at += 1;
                }
                TokenTree::Ident(_) | TokenTree::Punct(_) => at += 1,
            }
        }
    }

    /// Records the next name of a path, or each name of a group.
    fn first(&mut self, tokens: &[TokenTree]) {
        match tokens.first() {
            Some(TokenTree::Ident(word)) => {
                self.found
                    .push((word.to_string(), word.span().start().line));
            }
            Some(TokenTree::Group(group)) => {
                let mut begins = true;
                for token in group.stream() {
                    match &token {
                        TokenTree::Ident(word) if begins => {
                            self.found
                                .push((word.to_string(), word.span().start().line));
                        }
                        _ => {}
                    }
                    begins = matches!(&token, TokenTree::Punct(mark) if mark.as_char() == ',');
                }
            }
            Some(TokenTree::Punct(_) | TokenTree::Literal(_)) | None => {}
        }
    }
}

fn is(tokens: &[TokenTree], at: usize, word: &str) -> bool {
    matches!(tokens.get(at), Some(TokenTree::Ident(ident)) if ident == word)
}

/// Returns whether the tokens at `at` are `::`.
fn follows(tokens: &[TokenTree], at: usize) -> bool {
    let colon =
        |at| matches!(tokens.get(at), Some(TokenTree::Punct(mark)) if mark.as_char() == ':');
    colon(at) && colon(at + 1)
}

/// Returns how many modules below the crate root a file is.
fn depth(file: &Path) -> usize {
    let parts = file.components().count();
    if file.ends_with("mod.rs") {
        parts - 1
    } else {
        parts
    }
}

/// Returns a file's upward imports, as `FILE:LINE: ROOM imports from ROOM`.
fn upward(file: &Path, text: &str) -> Vec<String> {
    let room = file
        .components()
        .next()
        .unwrap()
        .as_os_str()
        .to_str()
        .unwrap();
    let own = rank(room).unwrap_or_else(|| panic!("src/{} is in no room", file.display()));
    let tokens: TokenStream = text.parse().unwrap();
    let mut mentions = Mentions::default();
    mentions.collect(tokens, depth(file));
    let upward = mentions
        .found
        .into_iter()
        .filter(|(name, _)| match rank(name) {
            Some(other) => other < own,
            // Only rooms are below the crate root: any other path would bypass this check.
            None => true,
        });
    upward
        .map(|(name, line)| format!("src/{}:{line}: {room} imports from {name}", file.display()))
        .collect()
}

#[test]
fn imports_run_downward() {
    let all: Vec<String> = files("src")
        .iter()
        .filter(|file| file.components().count() > 1)
        .flat_map(|file| upward(file, &text("src", file)))
        .collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn an_import_that_runs_upward_is_found_however_it_is_written() {
    for (line, found) in [
        ("use crate::up::Context;", "up"),
        ("use crate::{sys::error, cli};", "cli"),
        ("use super::super::store::Store;", "store"),
        (
            "mod tests { use super::super::super::store::Store; }",
            "store",
        ),
        ("fn f() { m!(crate::execute::run()); }", "execute"),
        ("#[serde(with = \"crate::share::x\")] struct A;", "share"),
        ("use crate::run;", "run"),
    ] {
        let text = format!("//! A file.\n\n{line}\n");
        let expected = format!("src/tree/remove.rs:3: tree imports from {found}");
        assert_eq!(upward(Path::new("tree/remove.rs"), &text), [expected]);
    }
    let text = "use crate::sys::error;\nuse super::measure;\nuse super::super::ui;\nuse crate::tree::{clone, remove};\n";
    assert!(upward(Path::new("tree/remove.rs"), text).is_empty());
}

#[test]
fn there_are_these_rooms_and_no_others() {
    let top = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut names: Vec<String> = fs::read_dir(top)
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let mut expected: Vec<String> = ROOMS.iter().map(|room| (*room).to_owned()).collect();
    expected.extend(["lib.rs", "main.rs"].map(str::to_owned));
    expected.sort();
    assert_eq!(names, expected);
}

#[test]
fn files_can_be_read_at_a_sitting() {
    for below in ["src", "tests"] {
        for file in files(below) {
            let lines = text(below, &file).lines().count();
            let file = file.display();
            assert!(lines <= LINES, "{below}/{file} has {lines} lines");
        }
    }
}

/// std panics if the limit of processes is reached, and a panic ends the program.
#[test]
fn a_thread_that_cannot_start_is_an_error() {
    for file in files("src") {
        let text = text("src", &file);
        let text = text.split("#[cfg(test)]").next().unwrap();
        if !file.ends_with("tests.rs") {
            for call in ["std::thread::spawn(", "scope.spawn("] {
                assert!(!text.contains(call), "{}: {call}", file.display());
            }
        }
    }
}

/// Returns the functions longer than `limit`, as `LINE: NAME has N lines`.
fn long_functions(tokens: TokenStream, limit: usize) -> Vec<String> {
    let mut found = Vec::new();
    let mut function: Option<(usize, String)> = None;
    let mut before = String::new();
    for token in tokens {
        match &token {
            TokenTree::Ident(word) if before == "fn" => {
                function = Some((word.span().start().line, word.to_string()));
            }
            TokenTree::Group(group) => {
                if group.delimiter() == Delimiter::Brace
                    && let Some((line, name)) = function.take()
                {
                    let lines = group.span_close().end().line + 1 - line;
                    if lines > limit {
                        found.push(format!("{line}: {name} has {lines} lines"));
                    }
                }
                found.extend(long_functions(group.stream(), limit));
            }
            // A trait function without a body.
            TokenTree::Punct(mark) if mark.as_char() == ';' => function = None,
            TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => {}
        }
        before = token.to_string();
    }
    found
}

#[test]
fn functions_can_be_read_at_a_glance() {
    let all: Vec<String> = files("src")
        .iter()
        .flat_map(|file| {
            let tokens = text("src", file).parse().unwrap();
            let long = long_functions(tokens, FUNCTION_LINES);
            long.into_iter()
                .map(|one| format!("src/{}:{one}", file.display()))
        })
        .collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn a_long_function_is_found_wherever_it_is() {
    let text = "trait A { fn a(); }\nmod b { impl B { fn c(&self) -> [u8; 1] {\n\n} } }\nfn d() {\nfn e() {\n\n\n}\n}";
    let found = long_functions(text.parse().unwrap(), 2);
    assert_eq!(
        found,
        ["2: c has 3 lines", "5: d has 6 lines", "6: e has 4 lines"]
    );
}

#[test]
fn paths_in_the_documentation_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut found = 0;
    for name in ["CONTRIBUTING.md", "docs/explanation/architecture.md"] {
        for line in fs::read_to_string(root.join(name)).unwrap().lines() {
            // The table of rooms: `room/` in the first column, its files in the last.
            let row = line
                .strip_prefix("| `")
                .and_then(|row| row.split_once("/`"));
            let room = root.join("src").join(row.map_or("", |(room, _)| room));
            for code in line.split('`').skip(1).step_by(2) {
                let path = code.split(' ').next().unwrap_or_default();
                let is_source = path.starts_with("src/") || path.starts_with("tests/");
                if path.contains("NAME") || !(is_source || path.ends_with(".rs")) {
                    continue;
                }
                let exists = [root, &room].iter().any(|top| top.join(path).exists());
                assert!(exists, "{name}: no `{path}`");
                found += 1;
            }
        }
    }
    assert!(found > 40, "{found} paths");
}

/// libtest accepts a filter that matches no test.
#[test]
fn filters_of_the_test_run_match_tests() {
    let mut tests = String::new();
    for file in files("tests") {
        let module = file.with_extension("").to_string_lossy().replace('/', "::");
        let source = text("tests", &file);
        let bodies = source.split("#[test]\n").skip(1);
        let names = bodies.filter_map(|body| body.split("fn ").nth(1)?.split('(').next());
        tests.extend(names.map(|name| format!("{module}::{name}\n")));
    }
    let run = text("tests", Path::new("all"));
    let lines = run.lines().map(str::trim_start);
    let code = lines.filter(|line| !line.starts_with('#'));
    let (mut found, mut is_skipped) = (0, false);
    for word in code.flat_map(str::split_whitespace) {
        if is_skipped || word.contains("::") {
            assert!(tests.contains(word), "tests/all: no test matches `{word}`");
            found += 1;
        }
        is_skipped = word == "--skip";
    }
    assert!(found > 50, "{found} filters");
}

/// Programs that begin commands in messages to the user.
const PROGRAMS: [&str; 13] = [
    "rm", "mv", "cp", "mkdir", "chown", "chmod", "touch", "mount", "umount", "lsattr", "git",
    "tar", "rockenv",
];

/// Returns the placeholders of a format string that are words of a command to type: a number for `{}`, the name for
/// `{name}`.
fn command_words(text: &str) -> Vec<String> {
    let (mut found, mut number, mut command) = (Vec::new(), 0, false);
    let mut start = true;
    for word in text.split([' ', '\n']) {
        let begins = start || word.starts_with('`') || word.starts_with('(');
        start = word.ends_with([':', ';', ','])
            || ["&&", "or", "run", "first:", "sudo"].contains(&word);
        if begins {
            command = PROGRAMS.contains(&word.trim_start_matches(['`', '(']));
        }
        for part in word.split('{').skip(1) {
            let name = part.split(['}', ':']).next().unwrap_or_default();
            let place = if name.is_empty() {
                number += 1;
                (number - 1).to_string()
            } else {
                name.to_owned()
            };
            if command {
                found.push(place);
            }
        }
        command &= !(word.ends_with([';', ',', '`']) || word.ends_with("`;"));
    }
    found
}

/// Returns the commands to type into which `tokens` put an unquoted path, as `LINE: WORDS`. `lets` has variables'
/// values.
fn unquoted(tokens: TokenStream, lets: &[(usize, String, String)]) -> Vec<String> {
    let raw = |text: &str| {
        (text.contains("display ()") || text.contains("to_string_lossy"))
            && !text.contains("quoted")
    };
    let tokens: Vec<TokenTree> = tokens.into_iter().collect();
    let arguments: Vec<&[TokenTree]> = tokens
        .split(|token| matches!(token, TokenTree::Punct(mark) if mark.as_char() == ','))
        .collect();
    let mut found = Vec::new();
    for (at, argument) in arguments.iter().enumerate() {
        if let [TokenTree::Literal(literal)] = argument {
            for place in command_words(literal.to_string().trim_matches('"')) {
                let value = match place.parse::<usize>() {
                    Ok(number) => arguments
                        .get(at + 1 + number)
                        .map_or_else(String::new, |value| {
                            value.iter().cloned().collect::<TokenStream>().to_string()
                        }),
                    Err(_) => place.clone(),
                };
                let line = literal.span().start().line;
                let mut before = lets
                    .iter()
                    .rev()
                    .filter(|(at, name, _)| *at <= line && *name == value);
                let named = before.next().is_some_and(|(_, _, text)| raw(text));
                if raw(&value) || named {
                    found.push(format!("{line}: {literal}"));
                }
            }
        }
    }
    let groups = tokens.into_iter().filter_map(|token| match token {
        TokenTree::Group(group) => Some(group.stream()),
        TokenTree::Ident(_) | TokenTree::Punct(_) | TokenTree::Literal(_) => None,
    });
    found.extend(groups.flat_map(|inner| unquoted(inner, lets)));
    found
}

/// Returns the names that a file binds with a plain `let`, each with its line and its value.
fn lets(text: &str) -> Vec<(usize, String, String)> {
    let mut line = 1;
    let mut found = Vec::new();
    for (at, part) in text.split("let ").enumerate() {
        let bound = part
            .split(';')
            .next()
            .and_then(|part| part.split_once(" = "));
        if let (1.., Some((name, value))) = (at, bound) {
            let name = name.trim_start_matches("mut ").to_owned();
            found.push((line, name, value.replace("display()", "display ()")));
        }
        line += part.matches('\n').count();
    }
    found
}

#[test]
fn paths_in_commands_to_type_are_quoted() {
    let all: Vec<String> = files("src")
        .iter()
        .flat_map(|file| {
            let text = text("src", file);
            let found = unquoted(text.parse().unwrap(), &lets(&text));
            found
                .into_iter()
                .map(|one| format!("src/{}:{one}", file.display()))
        })
        .collect();
    assert!(all.is_empty(), "{}", all.join("\n"));
}

#[test]
fn a_path_that_is_not_quoted_is_found_however_it_is_written() {
    for (line, is_found) in [
        ("help(format!(\"rm -r {}\", path.display()))", true),
        (
            "f(\"`{}` stays; to remove it: rm -r {}\", a.display(), b.display())",
            true,
        ),
        (
            "f(\"`{}` stays; to remove it: rm -r {}\", a.display(), quoted_path(b))",
            false,
        ),
        (
            "{ let path = a.display(); f(\"run `umount {path}` and try again\") }",
            true,
        ),
        ("{ let path = quoted_path(a); f(\"rm {path}\") }", false),
        (
            "f(\"mv {0} {0}.old, then again\", a.to_string_lossy())",
            true,
        ),
        ("f(\"rm -r DIR; `{}` stays\", a.display())", false),
        ("f(\"cannot mount `{}`\", a.display())", false),
    ] {
        let found = unquoted(line.parse().unwrap(), &lets(line));
        assert_eq!(!found.is_empty(), is_found, "{line}: {found:?}");
    }
}
