//! Owns finding and reading profiles, in the user's directories and among the built-in ones, and the chain of
//! `extends`.

use std::borrow::Cow;
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde::{Deserialize as _, Serialize};

use super::diagnostics::{Problem, SourceFile, Sources, UnreadPart, invalid};
use super::file::File;
use super::structure::shorten;
use super::{Profile, check, merge, value};
use crate::sys::catalog::{CatalogEntry, Directory};
use crate::sys::error::{Error, Result, ResultExt as _, if_exists, is_absent};
use crate::sys::shell::quoted_path;
use crate::sys::span::{self, At};
use crate::sys::suggest;
use crate::sys::{builtin, catalog, trusted_files};

/// Maximum size: profiles are written by hand, so a larger file is a mistake, or an attack on the parser.
const LARGEST: u64 = 256 * 1024;

/// Maximum number of files in one chain of `extends`.
const LONGEST: usize = 16;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, serde::Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Origin {
    /// Built in: path inside `profiles/`.
    Builtin(String),
    /// A file of the host.
    File(PathBuf),
}

impl Origin {
    /// Returns its name without `.toml`.
    pub(super) fn stem(&self) -> Cow<'_, str> {
        let path = match self {
            Self::Builtin(path) => Path::new(path),
            Self::File(path) => path,
        };
        path.file_stem().unwrap_or_default().to_string_lossy()
    }

    /// Returns the argument that names the profile on the command line.
    pub(crate) fn argument(&self) -> Cow<'_, str> {
        match self {
            Self::Builtin(path) => path.trim_end_matches(".toml").into(),
            Self::File(path) => path.to_string_lossy(),
        }
    }
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
pub(crate) struct ProfileListing {
    /// Name to use on the command line.
    pub name: String,
    pub description: String,
    pub origin: Origin,
    /// Why it cannot be used, in a line; `rockenv profile check` shows more.
    pub problem: Option<String>,
}

/// The readable part of a profile, and all problems with it.
#[derive(Debug)]
pub(crate) struct ProfileDraft {
    name: String,
    sources: Sources,
    /// The profile without its faulty parts; `None` if nothing is left.
    pub(crate) profile: Option<Profile>,
    /// Whether there are steps, including faulty ones.
    pub(crate) has_steps: bool,
    problems: Vec<Problem>,
    /// The largest part that could not be read.
    unread: Option<UnreadPart>,
}

impl ProfileDraft {
    /// Adds problems, except for those that may follow from an unread part.
    pub(crate) fn add(&mut self, problems: Vec<Problem>) {
        let unread = self.unread;
        let certain = problems.into_iter();
        self.problems
            .extend(certain.filter(|problem| problem.is_certain(unread)));
    }

    pub(crate) fn is_valid(&self) -> bool {
        self.problems.is_empty()
    }

    /// Returns the profile if it has no problems.
    pub(crate) fn finished(self) -> Result<Profile> {
        match self.profile {
            Some(profile) if self.problems.is_empty() => Ok(profile),
            _ => {
                let what = format!("profile `{}`", self.name);
                Err(invalid(&what, &self.sources, self.problems))
            }
        }
    }
}

/// Reads a profile by name or path, with everything that it extends, and checks it.
pub fn load(dirs: &[Directory], name_or_path: &str) -> Result<Profile> {
    draft(dirs, name_or_path)?.finished()
}

/// Reads a profile like `load`; mistakes in its text are no errors.
pub(crate) fn draft(dirs: &[Directory], name_or_path: &str) -> Result<ProfileDraft> {
    let found = match is_path(name_or_path) {
        true => Origin::File(PathBuf::from(name_or_path)),
        false => named(dirs, name_or_path)?,
    };
    let name = stem(&found)?;
    let (sources, broken) = chain(dirs, found)?;
    Ok(assemble(name, sources, broken))
}

/// Checks a profile's text without reading anything that it extends.
#[cfg(test)]
pub(crate) fn from_text(name: &str, text: &str) -> Result<Profile> {
    let origin = Origin::File(PathBuf::from(format!("/p/{name}.toml")));
    let mut sources = Sources::default();
    sources.push(origin, text.to_owned());
    assemble(name.to_owned(), sources, None).finished()
}

/// Returns whether the argument means a file: names contain neither a slash nor `.toml`.
pub(crate) fn is_path(argument: &str) -> bool {
    argument.contains('/') || is_toml(argument)
}

fn is_toml(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|end| end == "toml")
}

/// Returns the names of all profiles that `load` finds by name, sorted.
pub(crate) fn names(dirs: &[Directory]) -> Result<Vec<String>> {
    Ok(entries(dirs)?.into_iter().map(|entry| entry.name).collect())
}

fn entries(dirs: &[Directory]) -> Result<Vec<CatalogEntry>> {
    let builtin = builtin::toml_files(&builtin::PROFILES);
    let names = builtin.iter().map(|(name, _)| *name);
    catalog::list(dirs, names, catalog::toml_file)
}

/// Returns every profile that `load` finds by name, sorted, with the description in its file.
pub(crate) fn list(dirs: &[Directory]) -> Result<Vec<ProfileListing>> {
    let entries = entries(dirs)?.into_iter();
    Ok(entries.map(|entry| listed(dirs, entry)).collect())
}

/// Reads only the description: a list must not fail because of one entry.
fn listed(dirs: &[Directory], CatalogEntry { name, path }: CatalogEntry) -> ProfileListing {
    let origin = match path {
        Some(path) => Origin::File(path),
        None => Origin::Builtin(format!("{name}.toml")),
    };
    let named = value::name("profile", &name);
    let named = named.map_err(|refused| invalid!("{}", refused.message));
    let text = named.and_then(|()| open(dirs, origin.clone()));
    let table = text.and_then(|(_, text)| {
        let table = text.parse::<toml::Table>();
        table.map_err(|error| invalid!("{}", error.message().to_owned()))
    });
    let (description, problem) = match &table {
        Ok(table) => (table.get("description").and_then(toml::Value::as_str), None),
        Err(error) => (None, Some(error.message().to_owned())),
    };
    ProfileListing {
        name,
        description: description.unwrap_or_default().to_owned(),
        origin,
        problem,
    }
}

/// Looks a name up. A name that no profile can have is unknown, unless a file has it.
fn named(dirs: &[Directory], name: &str) -> Result<Origin> {
    let unknown = || suggest_file(name, unknown(dirs, name));
    if value::name("profile", name).is_err() && !names(dirs)?.iter().any(|known| known == name) {
        return Err(unknown());
    }
    find(dirs, name, None)?.ok_or_else(unknown)
}

/// Looks a name up; `behind` continues the search after that file, so that a profile can extend the profile it shadows.
fn find(dirs: &[Directory], name: &str, behind: Option<&Origin>) -> Result<Option<Origin>> {
    if let Err(refused) = value::name("profile", name) {
        return Err(invalid!("{}", refused.message).help_if(refused.help));
    }
    let file = format!("{name}.toml");
    let mut candidates = Vec::new();
    let builtin = builtin::PROFILES.get_file(&file).is_some();
    for dir in dirs.iter().filter(|dir| !(dir.current && builtin)) {
        let path = dir.path.join(&file);
        if if_exists(fs_err::symlink_metadata(&path))?.is_some() {
            candidates.push(Origin::File(path));
        }
    }
    if builtin {
        candidates.push(Origin::Builtin(file));
    }
    let is_behind = |behind| candidates.iter().position(|found| same(found, behind));
    let first = behind.and_then(is_behind).map_or(0, |index| index + 1);
    Ok(candidates.into_iter().nth(first))
}

/// Returns whether both are the same file.
fn same(a: &Origin, b: &Origin) -> bool {
    if let (Origin::File(a), Origin::File(b)) = (a, b)
        && let (Ok(a), Ok(b)) = (fs_err::canonicalize(a), fs_err::canonicalize(b))
    {
        return a == b;
    }
    a == b
}

fn unknown(dirs: &[Directory], name: &str) -> Error {
    let known = names(dirs).unwrap_or_default();
    let known = known.iter().map(String::as_str);
    let help = suggest::help(name, known, "`rockenv profile ls` shows them all");
    not_found!("no profile `{}`", shorten(name)).help(help)
}

/// Suggests `NAME.toml` if that is a file.
pub(crate) fn suggest_file(name: &str, error: Error) -> Error {
    let file = PathBuf::from(format!("{name}.toml"));
    match file.is_file() {
        true => error.help(format!("did you mean `{}`?", quoted_path(&file))),
        false => error,
    }
}

fn stem(origin: &Origin) -> Result<String> {
    let stem = origin.stem();
    match value::name("profile", &stem) {
        Ok(()) => Ok(stem.into_owned()),
        Err(refused) => {
            let rule = refused.help.unwrap_or_default();
            Err(invalid!("{origin}: {}", refused.message)
                .help(format!("rename the file: NAME.toml with {rule}")))
        }
    }
}

/// Reads a regular file of the host, up to a limit. Also returns its path, which does not depend on the working
/// directory.
fn read(dirs: &[Directory], path: &Path) -> Result<(PathBuf, String)> {
    let about = || format!("cannot read the profile {}", path.display());
    match fs_err::metadata(path) {
        Err(error) if is_absent(&error) => {
            let error = not_found!("no profile file `{}`", path.display())
                .help("`rockenv profile ls` lists the profiles that have names");
            return Err(suggest_file(&path.to_string_lossy(), error));
        }
        other => other.context(about)?,
    };
    let found = trusted_files::read(dirs, path, LARGEST + 1)?.ok_or_else(|| {
        let error = invalid!("`{}` is not a regular file", path.display());
        error.help("name the profile's file, such as `DIR/PROFILE.toml`")
    })?;
    if found.bytes.len() as u64 > LARGEST {
        return Err(invalid!(
            "{} is larger than {} KiB",
            path.display(),
            LARGEST / 1024
        ));
    }
    let text = String::from_utf8(found.bytes).map_err(|error| {
        let text = String::from_utf8_lossy(error.as_bytes());
        let line = span::line(&text, error.utf8_error().valid_up_to());
        invalid!("{}: line {line} is not UTF-8", path.display())
    })?;
    // The shell of a step would take the carriage returns of an editor on Windows for parts of its commands.
    Ok((found.real, text.replace("\r\n", "\n")))
}

/// Reads a profile and the profiles it extends, as far as they are TOML and can be found. Returns the problem with the
/// last `extends`, if any.
fn chain(dirs: &[Directory], first: Origin) -> Result<(Sources, Option<Problem>)> {
    let mut sources = Sources::default();
    let mut next = first;
    loop {
        let (origin, text) = open(dirs, next)?;
        sources.push(origin, text);
        let Some(extends) = sources.last().and_then(|last| extends(last)) else {
            return Ok((sources, None));
        };
        match parent(dirs, &sources, &extends) {
            Ok(origin) => next = origin,
            Err(problem) => return Ok((sources, Some(*problem))),
        }
    }
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
            let text = file.ok_or_else(|| not_found!("no built-in profile `{path}`"))?;
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
    let found = if is_toml(extends) {
        let Origin::File(path) = own else {
            let message = "a built-in profile extends by name".to_owned();
            return Err(problem(message, "a path"));
        };
        if extends.starts_with('/') || extends.starts_with('~') {
            let message = format!("`{shown}` is not relative to this file");
            return Err(problem(message, "an absolute path"));
        }
        let path = path.with_file_name("").join(&extends.value);
        if !path.is_file() {
            let message = format!("there is no file {}", path.display());
            return Err(problem(message, "not found"));
        }
        Origin::File(path)
    } else {
        // The same name means the profile that this file shadows.
        let behind = (own.stem() == extends.value).then_some(own);
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
                let help = unknown.help_text().unwrap_or_default();
                return Err(Box::new(refused.help(help)));
            }
        }
    };
    let first = |source: &Arc<SourceFile>| same(&source.origin, &found);
    if let Some(first) = sources.iter().position(first) {
        let names = sources[first..].iter();
        let names: Vec<_> = names.map(|source| source.origin.to_string()).collect();
        let message = format!("`extends` forms a cycle: {} -> {found}", names.join(" -> "));
        return Err(problem(message, "closes the cycle"));
    }
    if sources.len() >= LONGEST {
        let message = format!("more than {LONGEST} profiles extend each other");
        return Err(problem(message, "one too many"));
    }
    Ok(found)
}

fn extends(source: &SourceFile) -> Option<At<String>> {
    let (table, errors) = merge::parse(source);
    merge::text_at(table.get_ref(), "extends").filter(|_| errors.is_empty())
}

/// Interprets the files; `broken` is the problem that ended their chain.
fn assemble(name: String, sources: Sources, broken: Option<Problem>) -> ProfileDraft {
    let broken = broken.map(|problem| (UnreadPart::File, problem));
    let (mut unread, mut found) = (Vec::from_iter(broken), Vec::new());
    let merged = merge::merge(&sources, &mut unread, &mut found);
    let mut has_steps = false;
    let profile = match File::deserialize(toml::de::Deserializer::from(merged)) {
        Ok(file) => {
            has_steps = !file.step.is_empty();
            let (name, sources) = (name.clone(), sources.clone());
            Some(check::finish(name, sources, file, &mut found))
        }
        // serde found an error that `structure` did not: still an error with a place, only less friendly.
        Err(error) => {
            let place = error.span().unwrap_or(0..0);
            found.push(Problem::new(&place, error.message(), "here"));
            None
        }
    };
    let (parts, problems): (Vec<_>, _) = unread.into_iter().unzip();
    let mut draft = ProfileDraft {
        name,
        sources,
        profile,
        has_steps,
        problems,
        unread: parts.into_iter().max(),
    };
    draft.add(found);
    draft
}
