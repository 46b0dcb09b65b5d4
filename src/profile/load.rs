//! Owns finding and reading profiles, in the user's directories and among the built-in ones, and the chain of
//! `extends`.

use std::fmt;
use std::path::{Path, PathBuf};

use serde::{Deserialize as _, Serialize};

use super::file::File;
use super::report::{Problem, Sources, invalid};
use super::shape::shorten;
use super::{Profile, check, merge, shape, value};
use crate::sys::catalog::Directory;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::span::At;
use crate::sys::suggest;
use crate::sys::{builtin, catalog, checked};

/// Maximum size: profiles are written by hand, so a larger file is a mistake, or an attack on the parser.
const LARGEST: u64 = 256 * 1024;

/// Maximum number of files in one chain of `extends`.
const LONGEST: usize = 16;

/// The origin of a profile.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Built in: path inside `profiles/`.
    Builtin(String),
    /// A file of the host.
    File(PathBuf),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Builtin(path) => write!(f, "profiles/{path} (built in)"),
            Self::File(path) => path.display().fmt(f),
        }
    }
}

/// A line of `rockenv profile ls`.
#[derive(Clone, Debug, Serialize)]
pub struct Listed {
    /// Name to use on the command line.
    pub name: String,
    /// The profile's description.
    pub description: String,
    /// Where it is.
    pub origin: Origin,
    /// Why it cannot be used, in a line; `rockenv profile check` shows more.
    pub problem: Option<String>,
}

/// Reads a profile by name or path, with everything that it extends, and checks it.
pub fn load(dirs: &[Directory], name_or_path: &str) -> Result<Profile> {
    let found = match is_path(name_or_path) {
        true => Origin::File(PathBuf::from(name_or_path)),
        false => find(dirs, name_or_path, None)?.ok_or_else(|| unknown(dirs, name_or_path))?,
    };
    let name = stem(&found)?;
    let sources = chain(dirs, &name, found)?;
    assemble(name, sources)
}

/// Checks a profile's text without reading anything that it extends.
#[cfg(test)]
pub(crate) fn from_text(name: &str, text: &str) -> Result<Profile> {
    let origin = Origin::File(PathBuf::from(format!("/p/{name}.toml")));
    let mut sources = Sources::default();
    sources.push(origin, text.to_owned());
    check_last(name, &sources)?;
    assemble(name.to_owned(), sources)
}

/// Returns whether the argument means a file: names contain neither a slash nor `.toml`.
pub fn is_path(argument: &str) -> bool {
    argument.contains('/')
        || Path::new(argument)
            .extension()
            .is_some_and(|end| end == "toml")
}

/// Returns every profile that `load` finds by name, sorted; the first one of a name wins.
pub fn list(dirs: &[Directory]) -> Result<Vec<Listed>> {
    let builtin = builtin::toml_files(&builtin::PROFILES);
    let names = builtin.iter().map(|(name, _)| *name);
    let found = catalog::list(dirs, names, catalog::toml_file)?;
    let text = |name: &str| builtin.iter().find(|(known, _)| *known == name);
    Ok(found
        .into_iter()
        .map(|entry| match entry.path {
            Some(path) => {
                let origin = Origin::File(path.clone());
                match value::name("profile", &entry.name) {
                    Ok(()) => listed(entry.name, origin, read(dirs, &path).map(|(_, text)| text)),
                    Err(refused) => {
                        listed(entry.name, origin, Err(Error::invalid(refused.message)))
                    }
                }
            }
            None => {
                let origin = Origin::Builtin(format!("{}.toml", entry.name));
                let text = text(&entry.name).map_or("", |(_, text)| text);
                listed(entry.name, origin, Ok(text.to_owned()))
            }
        })
        .collect())
}

/// Reads only the description: a list must not fail because of one entry.
fn listed(name: String, origin: Origin, text: Result<String>) -> Listed {
    let table = text.and_then(|text| {
        let table = text.parse::<toml::Table>();
        table.map_err(|error| Error::invalid(error.message().to_owned()))
    });
    let (description, problem) = match &table {
        Ok(table) => (table.get("description").and_then(toml::Value::as_str), None),
        Err(error) => (None, Some(error.message().to_owned())),
    };
    Listed {
        name,
        description: description.unwrap_or_default().to_owned(),
        origin,
        problem,
    }
}

/// Looks a name up; `behind` continues the search after that one, so that a profile can extend the one it shadows.
fn find(dirs: &[Directory], name: &str, behind: Option<&Origin>) -> Result<Option<Origin>> {
    if let Err(refused) = value::name("profile", name) {
        let error = Error::invalid(refused.message);
        return Err(match refused.help {
            Some(help) => error.help(help),
            None => error,
        });
    }
    let file = format!("{name}.toml");
    let mut candidates = Vec::new();
    let builtin = builtin::PROFILES.get_file(&file).is_some();
    for dir in dirs.iter().filter(|dir| !(dir.current && builtin)) {
        let path = dir.path.join(&file);
        match fs_err::symlink_metadata(&path) {
            Ok(_) => candidates.push(Origin::File(path)),
            Err(error) if catalog::is_absent(&error) => {}
            Err(error) => return Err(error.into()),
        }
    }
    if builtin {
        candidates.push(Origin::Builtin(file));
    }
    let skip = behind.and_then(|behind| {
        candidates
            .iter()
            .position(|candidate| same(candidate, behind))
    });
    Ok(candidates
        .into_iter()
        .nth(skip.map_or(0, |index| index + 1)))
}

/// Returns whether both are the same file.
fn same(a: &Origin, b: &Origin) -> bool {
    match (a, b) {
        (Origin::File(a), Origin::File(b)) => {
            match (fs_err::canonicalize(a), fs_err::canonicalize(b)) {
                (Ok(a), Ok(b)) => a == b,
                _ => a == b,
            }
        }
        _ => a == b,
    }
}

fn unknown(dirs: &[Directory], name: &str) -> Error {
    let error = Error::not_found(format!("no profile `{}`", shorten(name)));
    let known = list(dirs).unwrap_or_default();
    match suggest::closest(name, known.iter().map(|listed| listed.name.as_str())) {
        Some(close) => error.help(format!("did you mean `{close}`?")),
        None => error.help("`rockenv profile ls` shows them all"),
    }
}

fn stem(origin: &Origin) -> Result<String> {
    let path = match origin {
        Origin::Builtin(path) => Path::new(path),
        Origin::File(path) => path,
    };
    let stem = path.file_stem().unwrap_or_default().to_string_lossy();
    match value::name("profile", &stem) {
        Ok(()) => Ok(stem.into_owned()),
        Err(refused) => Err(
            Error::invalid(format!("{origin}: {}", refused.message)).help(format!(
                "rename the file: {}.toml with {}",
                "NAME",
                refused.help.unwrap_or_default()
            )),
        ),
    }
}

/// Reads a file of the host, with a limit, and nothing that is not a regular file; returns the path that does not depend on the
/// working directory, too.
fn read(dirs: &[Directory], path: &Path) -> Result<(PathBuf, String)> {
    let about = || format!("cannot read the profile {}", path.display());
    match fs_err::metadata(path) {
        Err(error) if catalog::is_absent(&error) => {
            return Err(Error::not_found(format!("no profile {}", path.display()))
                .help("`rockenv profile ls` shows those that have a name"));
        }
        other => other.context(about)?,
    };
    let found = checked::read(dirs, path, LARGEST + 1)?
        .ok_or_else(|| Error::invalid(format!("{} is not a regular file", path.display())))?;
    if found.bytes.len() as u64 > LARGEST {
        return Err(Error::invalid(format!(
            "{} is larger than {} KiB",
            path.display(),
            LARGEST / 1024
        )));
    }
    let text = String::from_utf8(found.bytes).map_err(|error| {
        let line = error.as_bytes()[..error.utf8_error().valid_up_to()]
            .iter()
            .filter(|byte| **byte == b'\n')
            .count()
            + 1;
        Error::invalid(format!("{}: line {line} is not UTF-8", path.display()))
    })?;
    Ok((found.real, text))
}

/// Reads a profile and everything that it extends.
fn chain(dirs: &[Directory], name: &str, first: Origin) -> Result<Sources> {
    let mut sources = Sources::default();
    let mut next = Some(first);
    while let Some(origin) = next.take() {
        let (origin, text) = open(dirs, origin)?;
        sources.push(origin, text);
        if let Some(extends) = check_last(name, &sources)? {
            match parent(dirs, &sources, &extends) {
                Ok(origin) => next = Some(origin),
                Err(problem) => return Err(invalid(name, &sources, vec![*problem])),
            }
        }
    }
    Ok(sources)
}

/// Reads a file and gives it a path that does not depend on the working directory.
fn open(dirs: &[Directory], origin: Origin) -> Result<(Origin, String)> {
    match origin {
        Origin::File(path) => {
            let (path, text) = read(dirs, &path)?;
            Ok((Origin::File(path), text))
        }
        Origin::Builtin(path) => {
            let file = builtin::PROFILES
                .get_file(&path)
                .and_then(|file| file.contents_utf8());
            let text =
                file.ok_or_else(|| Error::not_found(format!("no built-in profile `{path}`")))?;
            Ok((Origin::Builtin(path), text.to_owned()))
        }
    }
}

fn parent(
    dirs: &[Directory],
    sources: &Sources,
    extends: &At<String>,
) -> std::result::Result<Origin, Box<Problem>> {
    let problem =
        |message: String, label: &str| Box::new(Problem::new(&extends.place, message, label));
    let shown = shorten(extends);
    let own = &sources.file(&extends.place).origin;
    let found = if Path::new(&extends.value)
        .extension()
        .is_some_and(|end| end == "toml")
    {
        let Origin::File(path) = own else {
            return Err(problem(
                "a built-in profile extends by name".to_owned(),
                "a path",
            ));
        };
        if extends.starts_with('/') || extends.starts_with('~') {
            return Err(problem(
                format!("`{shown}` is not relative to this file"),
                "an absolute path",
            ));
        }
        let path = path.with_file_name("").join(&extends.value);
        if !path.is_file() {
            return Err(problem(
                format!("there is no file {}", path.display()),
                "not found",
            ));
        }
        Origin::File(path)
    } else {
        // The same name means the one that this file shadows.
        let behind = stem(own)
            .ok()
            .filter(|name| *name == extends.value)
            .map(|_| own);
        let found = find(dirs, extends, behind).map_err(|error| {
            let refused = problem(error.message().to_owned(), "not a name");
            Box::new(refused.help("the name of a profile, or a path ending in `.toml`"))
        })?;
        match found {
            Some(origin) => origin,
            None if behind.is_some() => {
                return Err(problem(format!("`{shown}` extends itself"), "here"));
            }
            None => {
                let unknown = unknown(dirs, extends);
                let refused = problem(unknown.message().to_owned(), "not found");
                return Err(Box::new(
                    refused.help(unknown.help_text().unwrap_or_default()),
                ));
            }
        }
    };
    if let Some(first) = sources
        .iter()
        .position(|source| same(&source.origin, &found))
    {
        let names: Vec<_> = sources[first..]
            .iter()
            .map(|source| source.origin.to_string())
            .collect();
        let message = format!("`extends` forms a cycle: {} -> {found}", names.join(" -> "));
        return Err(problem(message, "closes the cycle"));
    }
    if sources.len() >= LONGEST {
        return Err(problem(
            format!("more than {LONGEST} profiles extend each other"),
            "one too many",
        ));
    }
    Ok(found)
}

/// Checks the structure of the last of `sources`, and returns what it extends.
fn check_last(name: &str, sources: &Sources) -> Result<Option<At<String>>> {
    let Some(source) = sources.last() else {
        return Ok(None);
    };
    let (table, errors) = merge::parse(source);
    let not_toml = errors.iter().map(|error| {
        let span = error.span().unwrap_or(0..0);
        let place = source.start + span.start..source.start + span.end;
        let message = format!("this is not TOML: {}", error.message());
        Problem::new(&place, message, "here")
    });
    let mut problems: Vec<_> = not_toml.collect();
    if problems.is_empty() {
        problems = shape::check(source.start, &table);
    }
    match problems.is_empty() {
        true => Ok(merge::text_at(table.get_ref(), "extends")),
        false => Err(invalid(name, sources, problems)),
    }
}

fn assemble(name: String, sources: Sources) -> Result<Profile> {
    let mut problems = Vec::new();
    let merged = merge::merge(&sources, &mut problems);
    let profile = match File::deserialize(toml::de::Deserializer::from(merged)) {
        Ok(file) => check::finish(name.clone(), sources.clone(), file, &mut problems),
        // serde found an error that `shape` did not: still an error with a place, only less friendly.
        Err(error) => {
            let place = error.span().unwrap_or(0..0);
            problems.push(Problem::new(&place, error.message(), "here"));
            None
        }
    };
    match profile {
        Some(profile) if problems.is_empty() => Ok(profile),
        _ => Err(invalid(&name, &sources, problems)),
    }
}
