//! Owns the third-party tarballs that a checkout builds from: the calls of `therock_subproject_fetch` in its CMake
//! files, with name, addresses and digest. `parse` is pure; `read` finds the files.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::path::Path;

use super::cmake::{self, Argument, Command};
use super::{error_at, text};
use crate::sys::checksum::Checksum;
use crate::sys::error::Result;

const FUNCTION: &str = "therock_subproject_fetch";
/// Archive suffixes that CMake recognises.
const ENDS: [&str; 10] = [
    ".7z", ".tar", ".tar.bz2", ".tar.gz", ".tar.xz", ".tar.zst", ".tbz2", ".tgz", ".txz", ".zip",
];

/// Maximum length of a variable or an argument, in bytes.
const LONGEST: usize = 64 << 10;
/// Maximum length of all expansions of a file's variables together, in bytes.
const EXPANDED: usize = 4 << 20;

/// Maximum number of downloads in one file. TheRock's files have a few each.
const CALLS: usize = 1000;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Tarball {
    /// TheRock's name for the tarball. It names a CMake target, so it is unique.
    pub name: String,
    pub file: String,
    pub urls: Vec<String>,
    pub checksum: Checksum,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tarballs {
    /// The tarballs, ordered by name.
    pub found: Vec<Tarball>,
    /// Calls that could not be interpreted, with their positions. The build itself downloads these.
    pub unclear: Vec<String>,
}

/// Reads the CMake files of a checkout, except those of its submodules.
pub(crate) fn read(directory: &Path) -> Result<Tarballs> {
    let mut all = Tarballs::default();
    let mut left = vec![String::new()];
    while let Some(below) = left.pop() {
        for entry in fs_err::read_dir(directory.join(&below))? {
            let entry = entry?;
            // TheRock's own names are UTF-8.
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let path = match below.as_str() {
                "" => name.clone(),
                below => format!("{below}/{name}"),
            };
            let kind = entry.file_type()?;
            if kind.is_dir() && !name.starts_with('.') && !entry.path().join(".git").exists() {
                left.push(path);
            } else if kind.is_file() && name == "CMakeLists.txt" {
                let found = match text(directory, &path) {
                    Ok(text) => text.map(|text| parse(&path, &text)).unwrap_or_default(),
                    Err(error) => unclear(&error),
                };
                all.found.extend(found.found);
                all.unclear.extend(found.unclear);
            }
        }
    }
    all.found.sort_by(|a, b| a.name.cmp(&b.name));
    all.unclear.sort();
    Ok(all)
}

/// Parses one CMake file. Knows only variables that the file itself sets.
pub(crate) fn parse(file: &str, text: &str) -> Tarballs {
    // Most files declare no download and need not be parsed.
    if !text.contains(FUNCTION) {
        return Tarballs::default();
    }
    let commands = match cmake::parse(file, text) {
        Ok(commands) => commands,
        Err(error) => return unclear(&error),
    };
    let mut all = Tarballs::default();
    let mut variables = Variables::default();
    for command in &commands {
        match (command.name.as_str(), command.arguments.as_slice()) {
            ("set", [name, values @ ..]) => {
                let is_end = |word: &Argument| !word.quoted && word.text == "CACHE";
                let last = values.iter().position(is_end);
                let words = values[..last.unwrap_or(values.len())]
                    .iter()
                    .map(|word| variables.expand(word));
                let value = words.collect::<Option<Vec<_>>>();
                let value = value.map(|words| words.join(";"));
                match value.filter(|value| value.len() <= LONGEST) {
                    Some(value) => variables.known.insert(name.text.clone(), value),
                    None => variables.known.remove(&name.text),
                };
            }
            (FUNCTION, _) if all.found.len() + all.unclear.len() >= CALLS => {
                all.unclear
                    .push(format!("{file}: more than {CALLS} downloads"));
                break;
            }
            (FUNCTION, _) => match call(command, &variables) {
                Ok(tarball) => all.found.push(tarball),
                Err(why) => {
                    let error = error_at(file, text, command.span.clone(), &why);
                    all.unclear.extend(unclear(&error).unclear);
                }
            },
            _ => {}
        }
    }
    all
}

fn unclear(error: &crate::sys::error::Error) -> Tarballs {
    Tarballs {
        found: Vec::new(),
        unclear: vec![error.message().to_owned()],
    }
}

fn call(command: &Command, variables: &Variables) -> std::result::Result<Tarball, String> {
    let (name, arguments) = command
        .arguments
        .split_first()
        .ok_or("a download without a name")?;
    let known = |word: &Argument| {
        let cannot = || format!("`{}` is set elsewhere, or too long", word.text);
        variables.expand(word).ok_or_else(cannot)
    };
    let behind = |keyword: &str| {
        let is_it = |word: &Argument| !word.quoted && word.text == keyword;
        let at = arguments.iter().position(is_it);
        at.map_or(&[][..], |at| &arguments[at + 1..])
    };
    let mut urls = Vec::new();
    for word in behind("URL") {
        let url = known(word)?;
        // The next word is a keyword.
        if !url.contains("://") {
            break;
        }
        urls.push(url);
    }
    let first = urls.first().ok_or("a download without a `URL`")?;
    let hash = behind("URL_HASH")
        .first()
        .ok_or("a download without a `URL_HASH`")?;
    let hash = known(hash)?;
    let checksum = hash
        .split_once('=')
        .and_then(|(algorithm, digits)| Checksum::new(algorithm, digits))
        .ok_or_else(|| format!("`{hash}` is neither a SHA-256 nor a SHA-512"))?;
    let file = match behind("DOWNLOAD_NAME").first() {
        Some(word) => known(word)?,
        None => {
            file_name(first).ok_or_else(|| format!("`{first}` is not the address of an archive"))?
        }
    };
    let name = known(name)?;
    // Both become file names.
    if let Some(bad) = [&name, &file].into_iter().find(|name| !is_plain(name)) {
        return Err(format!("`{bad}` is not a plain name"));
    }
    Ok(Tarball {
        name,
        file,
        urls,
        checksum,
    })
}

#[derive(Default)]
struct Variables {
    known: BTreeMap<String, String>,
    /// Bytes that variables have expanded to so far.
    expanded: Cell<usize>,
}

impl Variables {
    /// Expands an argument; `None` if it contains an unknown variable or becomes too long.
    fn expand(&self, word: &Argument) -> Option<String> {
        if !word.variable {
            return Some(word.text.clone());
        }
        let mut out = String::new();
        let mut rest = word.text.as_str();
        while let Some((before, behind)) = rest.split_once("${") {
            let (name, after) = behind.split_once('}')?;
            out.push_str(before);
            let value = self.known.get(name)?;
            let expanded = self.expanded.get() + value.len();
            if out.len() + value.len() > LONGEST || expanded > EXPANDED {
                return None;
            }
            self.expanded.set(expanded);
            out.push_str(value);
            rest = after;
        }
        out.push_str(rest);
        // Generator expressions and environment variables are not evaluated.
        (!out.contains("$<") && !out.contains("$ENV{")).then_some(out)
    }
}

/// Returns the file name that CMake gives to the download.
fn file_name(url: &str) -> Option<String> {
    let path = url.split(['?', '#']).next()?;
    let name = path.rsplit('/').next()?;
    let ends = |end: &&str| name.len() > end.len() && name.ends_with(*end);
    ENDS.iter().any(ends).then(|| name.to_owned())
}

fn is_plain(name: &str) -> bool {
    let plain = |c: char| c.is_ascii_alphanumeric() || "._+-".contains(c);
    !name.is_empty() && !name.starts_with('.') && name.len() <= 200 && name.chars().all(plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHA256: &str = "acb1e6f5d832484bf6d32b681e858c38add8b2acdfd42ac5df24b8afb46552b4";

    /// The input resembles TheRock's: variables, comments between the arguments, and other functions around the calls.
    #[test]
    fn calls_are_found_with_what_the_file_sets() {
        let sha512 = "13ec6be1".repeat(16);
        let text = format!(
            r##"
if(NOT CMAKE_SOURCE_DIR STREQUAL CMAKE_CURRENT_SOURCE_DIR)
    set(SQLITE3_AMALGAMATION_VERSION "3510300")
    set(_url "https://deps.example.com/xz-5.8.1.tar.bz2")
    set(_source_dir "${{CMAKE_CURRENT_BINARY_DIR}}/source")
    therock_subproject_fetch(therock-sqlite3-sources
      SOURCE_DIR "${{_source_dir}}"
      # Originally mirrored from: "https://sqlite.org/2026/sqlite-${{SQLITE3_AMALGAMATION_VERSION}}.zip"
      URL "https://deps.example.com/sqlite-amalgamation-${{SQLITE3_AMALGAMATION_VERSION}}.zip"
      URL_HASH "SHA256={}"
      # URL_HASH MD5=853a0c5c0747c5943e7ef4bbb793162d
      TOUCH "${{_download_stamp}}"
    )
    therock_subproject_fetch(therock-liblzma-sources
      URL "${{_url}}" https://other.example.com/xz-5.8.1.tar.bz2
      URL_HASH SHA512={sha512}
      PATCH_COMMAND ${{Python3_EXECUTABLE}} ${{CMAKE_SOURCE_DIR}}/build_tools/patch_third_party_source.py
    )
endif()
therock_cmake_subproject_declare(therock-sqlite3 USE_DIST_AMDGPU_TARGETS)
"##,
            SHA256.to_uppercase()
        );
        let read = parse("third-party/x/CMakeLists.txt", &text);
        assert_eq!(read.unclear, Vec::<String>::new());
        let shown = read.found.iter().map(|one| {
            let (name, file) = (one.name.as_str(), one.file.as_str());
            (name, file, one.urls.len(), one.checksum.to_string())
        });
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                (
                    "therock-sqlite3-sources",
                    "sqlite-amalgamation-3510300.zip",
                    1,
                    format!("sha256:{SHA256}")
                ),
                (
                    "therock-liblzma-sources",
                    "xz-5.8.1.tar.bz2",
                    2,
                    format!("sha512:{sha512}")
                ),
            ]
        );
        assert_eq!(
            read.found[1].urls[1],
            "https://other.example.com/xz-5.8.1.tar.bz2"
        );
    }

    #[test]
    fn what_is_not_understood_is_named_and_left_to_the_build() {
        for (arguments, words) in [
            ("a URL ${FROM} <hash>", "`${FROM}` is set elsewhere"),
            ("a <url>", "without a `URL_HASH`"),
            ("a GIT_REPOSITORY x <hash>", "without a `URL`"),
            ("a <url> URL_HASH MD5=853a0c", "neither a SHA-256 nor"),
            ("a URL https://a.org/ <hash>", "not the address of"),
            ("a <url> <hash> DOWNLOAD_NAME ../a", "not a plain name"),
            ("", "without a name"),
        ] {
            let arguments = arguments
                .replace("<url>", "URL https://a.example.com/a.tar.gz")
                .replace("<hash>", &format!("URL_HASH SHA256={SHA256}"));
            let read = parse("x", &format!("\n{FUNCTION}({arguments})"));
            assert_eq!(read.found, [], "{arguments}");
            let [why] = &read.unclear[..] else {
                panic!("{read:?}");
            };
            assert!(why.starts_with("x:2:1: ") && why.contains(words), "{why}");
        }
        assert_eq!(parse("x", "set(A"), Tarballs::default());
        let broken = parse("x", "therock_subproject_fetch(a");
        assert_has!(broken.unclear[0], "no `)`");
    }

    #[test]
    fn variables_do_not_grow_without_limit() {
        let call =
            format!("{FUNCTION}(a URL https://a.example.com/${{a}}.zip URL_HASH SHA256={SHA256})");
        let doubled = "set(a \"${a}${a}\")\n".repeat(40);
        let listed = "set(a ${a} ${a})\n".repeat(40);
        let many = format!("set(b ${{a}} {})\n", "${a} ".repeat(200));
        let copies = (0..200).map(|at| format!("set(a{at} \"${{long}}\")\n"));
        let copies = copies.collect::<String>();
        let long = format!("set(long {})\n", "x".repeat(LONGEST - 1));
        for text in [doubled, listed, many + "set(a ${b})\n", long + &copies] {
            let read = parse("x", &format!("set(a 0123456789)\n{text}{call}"));
            let all = format!("{read:?}").len();
            assert!(all < 300_000, "{all}");
            let fine = text.starts_with("set(long");
            assert_eq!(read.found.is_empty(), !fine, "{text}");
            assert_eq!(read.unclear.is_empty(), fine, "{text}");
        }
        // Each call expands its own copy of the variable.
        let calls = format!(
            "{FUNCTION}(a {})\n",
            "URL".to_owned() + &" x://${long}".repeat(3)
        )
        .repeat(100);
        let long = format!("set(long {})\n", "x".repeat(LONGEST / 2));
        let read = parse("x", &(long + &calls));
        assert_eq!(read.unclear.len(), 100);
        assert_has!(read.unclear[99], "or too long");
        let calls = parse("x", &format!("{FUNCTION}()\n").repeat(CALLS * 2));
        assert_eq!(calls.unclear.len(), CALLS + 1);
    }

    #[test]
    fn submodules_are_not_looked_into() {
        let checkout = tempfile::tempdir().unwrap();
        let write = |path: &str, name: &str| {
            let path = checkout.path().join(path);
            fs_err::create_dir_all(path.parent().unwrap()).unwrap();
            let call = format!(
                "{FUNCTION}({name} URL https://a.example.com/a.tar.gz URL_HASH SHA256={SHA256})"
            );
            fs_err::write(path, call).unwrap();
        };
        write("third-party/b/CMakeLists.txt", "b");
        write("third-party/a/c/CMakeLists.txt", "a");
        write("third-party/a/c/README", "text");
        write("rocm-systems/x/CMakeLists.txt", "no");
        fs_err::write(checkout.path().join("rocm-systems/.git"), "gitdir: x").unwrap();
        let read = read(checkout.path()).unwrap();
        let names: Vec<&str> = read.found.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["a", "b"]);
    }
}
