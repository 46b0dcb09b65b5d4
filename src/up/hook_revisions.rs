//! Finds the revisions of a source at which a hook applies.

use std::path::{Path, PathBuf};

use serde::Serialize;

use crate::execute;
use crate::profile::hook::{self, FileInSource, Hook};
use crate::store::source::{Checkout, Git};
use crate::sys::error::{Kind, Result};
use crate::sys::shell::quoted_path;
use crate::up::context::Context;

/// The result for one hook at one revision.
#[derive(Debug, Serialize)]
pub(crate) struct AtRevision {
    /// `None` for the checked-out files.
    pub(crate) revision: Option<String>,
    pub(crate) date: Option<String>,
    pub(crate) subject: Option<String>,
    pub(crate) applies: bool,
    /// Why it does not apply, or a remark.
    pub(crate) why: Option<String>,
}

/// A source with revisions to check.
pub(crate) struct RevisionSource<'a> {
    directory: PathBuf,
    git: Git<'a>,
}

impl<'a> RevisionSource<'a> {
    pub(crate) fn open(cx: &'a Context, directory: &Path) -> Result<Self> {
        if !directory.is_dir() {
            return Err(not_found!("no source directory `{}`", directory.display()));
        }
        Ok(Self {
            directory: fs_err::canonicalize(directory)?,
            git: Git::new(&cx.config.user),
        })
    }

    /// Returns the first result, and each result that differs from the one before.
    pub(crate) fn history(&self, hook: &Hook, revisions: Option<&str>) -> Result<Vec<AtRevision>> {
        let Some(revisions) = revisions else {
            let found = hook::apply(hook, &|path| execute::file_in_source(&self.directory, path));
            return Ok(vec![answer(None, found)?]);
        };
        let (from, to) = match revisions.split_once("..") {
            Some((from, to)) => (from, if to.is_empty() { "HEAD" } else { to }),
            None => (revisions, revisions),
        };
        if !self.directory.join(".git").exists() {
            let (place, source) = (self.directory.display(), quoted_path(&self.directory));
            let command = format!("rockenv hook check --source {source}");
            let error = not_found!("`{place}` is not a git repository");
            let help = format!("to check the files without REVISIONS: {command}");
            return Err(error.help(help));
        }
        let checkout = self.git.open(&self.directory)?;
        let (from, to) = (self.commit(&checkout, from)?, self.commit(&checkout, to)?);
        let mut all = vec![from.clone()];
        let range = format!("{from}..{to}");
        let mut arguments = vec![
            "--literal-pathspecs",
            "rev-list",
            "--reverse",
            "--first-parent",
            range.as_str(),
            "--",
        ];
        let mut paths = Vec::new();
        for file in hook::files(hook)? {
            // The repository itself tracks the submodule, not the files in it.
            let found = entry(&checkout, &to, &file)?;
            let path = found.map_or(file, |(path, ..)| path);
            paths.push(path.display().to_string());
        }
        arguments.extend(paths.iter().map(String::as_str));
        if from != to && !paths.is_empty() {
            let listed = checkout.text(&arguments)?;
            all.extend(listed.lines().map(str::to_owned));
        }
        let mut answers: Vec<AtRevision> = Vec::new();
        for commit in all {
            let read = |path: &Path| self.at(&checkout, &self.directory, &commit, path);
            let now = answer(Some(&commit), hook::apply(hook, &read))?;
            let last = answers.last();
            if last.is_none_or(|last| last.applies != now.applies) {
                answers.push(dated(&checkout, &commit, now)?);
            }
        }
        Ok(answers)
    }

    fn commit(&self, checkout: &Checkout<'_>, revision: &str) -> Result<String> {
        let name = format!("{revision}^{{commit}}");
        // git before 2.30 does not end the options of `rev-parse`. None of them is a single revision.
        let found = checkout.text(&["rev-parse", "--quiet", "--verify", &name]);
        match found {
            Ok(commit) => Ok(commit.trim().to_owned()),
            Err(error) => Err(not_found!(
                "`{}` has no revision `{}`",
                self.directory.display(),
                revision.escape_debug()
            )
            .source(error)
            .help("git fetch --unshallow fetches the history of a shallow clone")),
        }
    }

    /// Returns the content of a path at a commit, in checked-out submodules too.
    fn at(
        &self,
        checkout: &Checkout<'_>,
        directory: &Path,
        commit: &str,
        path: &Path,
    ) -> Result<FileInSource> {
        let Some((place, mode, object)) = entry(checkout, commit, path)? else {
            return Ok(FileInSource::Absent);
        };
        if mode.starts_with("100") {
            let help =
                "git fetch --refetch --no-filter fetches the files that a partial clone lacks";
            let bytes = checkout
                .bytes(&["cat-file", "blob", &object])
                .map_err(|error| error.help(help))?;
            return Ok(FileInSource::File {
                bytes,
                executable: mode == "100755",
            });
        }
        if place == path {
            return Ok(FileInSource::Absent);
        }
        let inside = directory.join(&place);
        if !inside.join(".git").exists() {
            return Ok(FileInSource::Unfetched);
        }
        let below = self.git.open(&inside)?;
        match below.text(&["cat-file", "-e", &object]).is_ok() {
            true => {
                let rest = path.strip_prefix(&place).unwrap_or(path);
                self.at(&below, &inside, &object, rest)
            }
            false => Ok(FileInSource::Unfetched),
        }
    }
}

fn dated(checkout: &Checkout<'_>, commit: &str, at: AtRevision) -> Result<AtRevision> {
    let arguments = [
        "show",
        "--no-patch",
        "--no-show-signature",
        "--format=%cs %s",
        commit,
    ];
    let line = checkout.text(&arguments)?;
    let (date, subject) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
    Ok(AtRevision {
        date: Some(date.to_owned()),
        subject: Some(subject.to_owned()),
        ..at
    })
}

/// Returns a commit's entry at a path, or the submodule that contains the path: the entry's path, mode and object.
fn entry(
    checkout: &Checkout<'_>,
    commit: &str,
    file: &Path,
) -> Result<Option<(PathBuf, String, String)>> {
    for path in file.ancestors().filter(|path| !path.as_os_str().is_empty()) {
        let name = path.display().to_string();
        let arguments = ["--literal-pathspecs", "ls-tree", "-z", commit, "--", &name];
        let line = checkout.text(&arguments)?;
        let mut words = line.split([' ', '\t']);
        if let (Some(mode), Some(_), Some(object)) = (words.next(), words.next(), words.next())
            && (path == file || mode == "160000")
        {
            return Ok(Some((path.to_owned(), mode.to_owned(), object.to_owned())));
        }
    }
    Ok(None)
}

/// Turns the outcome of applying into an answer. Errors that are not about the hook stay errors.
fn answer(commit: Option<&str>, outcome: Result<hook::HookChanges>) -> Result<AtRevision> {
    let at = |applies, why| AtRevision {
        revision: commit.map(str::to_owned),
        date: None,
        subject: None,
        applies,
        why,
    };
    match outcome {
        Ok(changes) => {
            let already = changes.already.join(", ");
            let why = format!("the source already has `{already}`");
            Ok(at(true, (!already.is_empty()).then_some(why)))
        }
        Err(error) if error.kind() == Kind::Invalid => {
            Ok(at(false, Some(error.message().to_owned())))
        }
        Err(error) => Err(error),
    }
}
