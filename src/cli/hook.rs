//! Owns `hook`: lists hooks, and checks at which revisions of a source each applies.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use clap::{Args, Subcommand};
use serde::Serialize;

use crate::execute;
use crate::image::fetch;
use crate::profile::hook::{self, FileInSource, Hook};
use crate::store::Store;
use crate::store::source::{Checkout, Git};
use crate::sys::error::{Error, Kind, Result};
use crate::ui::table::Table;
use crate::up::context::Context;

#[derive(Debug, Subcommand)]
pub enum HookCommand {
    /// List hooks
    #[command(visible_alias = "list")]
    Ls,
    /// Check hooks for mistakes, and against a source or a range of its revisions
    Check(CheckArgs),
}

#[derive(Debug, Args)]
pub struct CheckArgs {
    /// Revisions of the source, as `FROM..TO` or a single one; without, what is checked out with all changes
    #[arg(value_name = "REVISIONS", requires = "source")]
    revisions: Option<String>,
    /// Directory of the source; nothing in it is changed
    #[arg(short, long, value_name = "DIR")]
    source: Option<PathBuf>,
    /// Hook to check; may be given again [default: every hook there is]
    #[arg(long, value_name = "NAME")]
    hook: Vec<String>,
}

/// Works with hooks; returns the exit code.
pub(crate) fn hook(cx: &Context, command: &HookCommand) -> Result<u8> {
    match command {
        HookCommand::Ls => ls(cx).map(|()| 0),
        HookCommand::Check(args) => check(cx, args),
    }
}

fn ls(cx: &Context) -> Result<()> {
    #[derive(Serialize)]
    struct HookRow {
        name: String,
        description: String,
        why: String,
        links: Vec<String>,
        volume: String,
        applies: hook::Applies,
        digest: String,
        built_in: bool,
        path: Option<PathBuf>,
    }
    let mut rows = Vec::new();
    for listed in hook::list(&cx.config.hook_dirs)? {
        let hook = hook::load(&cx.config.hook_dirs, &listed.name)?;
        rows.push(HookRow {
            digest: hook.digest()?,
            name: hook.name,
            description: hook.description,
            why: hook.why.split_whitespace().collect::<Vec<_>>().join(" "),
            links: hook.links,
            volume: hook.work.volume,
            applies: hook.applies,
            built_in: hook.path.is_none(),
            path: hook.path,
        });
    }
    if cx.json {
        return cx.ui.json(&rows);
    }
    let mut table = Table::new(["hook", "changes", "description", "where"]);
    for row in &rows {
        let place = match &row.path {
            Some(path) => path.display().to_string(),
            None => "built in".to_owned(),
        };
        table.row([&row.name, &row.volume, &row.description, &place]);
    }
    cx.ui.table(&table);
    Ok(())
}

/// The result for one hook at one revision.
#[derive(Debug, Serialize)]
struct At {
    /// `None` for the checked-out files.
    revision: Option<String>,
    date: Option<String>,
    subject: Option<String>,
    applies: bool,
    /// Why it does not apply, or a remark.
    why: Option<String>,
}

/// The result for one hook.
#[derive(Debug, Serialize)]
struct Checked {
    hook: String,
    /// It is valid, and applies at the last examined revision.
    ok: bool,
    error: Option<String>,
    /// The first revision, and each at which the answer changes.
    revisions: Vec<At>,
    /// It has a script, which is not run here.
    script: bool,
}

fn check(cx: &Context, args: &CheckArgs) -> Result<u8> {
    let mut names = args.hook.clone();
    if names.is_empty() {
        let listed = hook::list(&cx.config.hook_dirs)?;
        names.extend(listed.into_iter().map(|hook| hook.name));
    }
    let source = args
        .source
        .as_ref()
        .map(|path| Source::open(cx, path))
        .transpose()?;
    let mut reports = Vec::new();
    for name in names {
        let looked = hook::load(&cx.config.hook_dirs, &name).and_then(|mut hook| {
            take_patches(cx, &mut hook)?;
            let script = hook.work.script.is_some();
            let revisions = match &source {
                Some(source) => source.history(&hook, args.revisions.as_deref())?,
                None => Vec::new(),
            };
            Ok((revisions, script))
        });
        reports.push(match looked {
            Ok((revisions, script)) => Checked {
                hook: name,
                ok: revisions.last().is_none_or(|at| at.applies),
                error: None,
                revisions,
                script,
            },
            // A missing revision is the user's mistake, not the hook's.
            Err(error) if error.kind() != Kind::Invalid => return Err(error),
            Err(error) => Checked {
                hook: name,
                ok: false,
                error: Some(error.chain().join("\n")),
                revisions: Vec::new(),
                script: false,
            },
        });
    }
    let code = match reports.iter().all(|report| report.ok) {
        true => 0,
        false => Kind::Invalid.exit_code(),
    };
    if cx.json {
        cx.ui.json(&reports)?;
        return Ok(code);
    }
    for report in &reports {
        cx.ui.data(&words(report, source.is_some()));
    }
    Ok(code)
}

fn words(report: &Checked, with_source: bool) -> String {
    let name = &report.hook;
    let mut lines = Vec::new();
    if let Some(error) = &report.error {
        lines.push(format!("{name}: {error}"));
    } else if !with_source {
        lines.push(format!("{name}: ok"));
    }
    for (index, at) in report.revisions.iter().enumerate() {
        let place = match (&at.revision, &at.date, &at.subject) {
            (Some(revision), Some(date), Some(subject)) => {
                let short: String = revision.chars().take(12).collect();
                format!(" at {short} ({date}, {subject})")
            }
            _ => String::new(),
        };
        let word = match (at.applies, index) {
            (true, 0) => "applies",
            // Answers alternate, so the second one is the first of its kind.
            (true, 1) => "begins to apply",
            (true, _) => "applies again",
            (false, 0) => "does not apply",
            (false, _) => "stops applying",
        };
        lines.push(format!("{name}: {word}{place}"));
        lines.extend(at.why.iter().map(|why| format!("  {why}")));
    }
    if report.script && report.ok {
        lines.push(format!("{name}: only `up` runs its script"));
    }
    lines.iter().map(|line| format!("{line}\n")).collect()
}

/// Uses patches that were fetched before. A patch that was not fetched is an error.
fn take_patches(cx: &Context, hook: &mut Hook) -> Result<()> {
    let store = Store::open_existing(&cx.config.home).ok().flatten();
    for patch in &mut hook.work.patches {
        if patch.bytes.is_some() {
            continue;
        }
        let blob = store
            .as_ref()
            .map(|store| store.root().join("blobs/sha256").join(&patch.sha256))
            .filter(|blob| blob.is_file());
        let Some(blob) = blob else {
            return Err(Error::invalid(format!(
                "hook `{}`: patch `{}` is not fetched yet; `up` fetches it",
                hook.name, patch.name
            )));
        };
        fetch::verify(&blob, &patch.sha256, &AtomicBool::new(false))?;
        patch.bytes = Some(fs_err::read(blob)?);
    }
    Ok(())
}

struct Source<'a> {
    directory: PathBuf,
    git: Git<'a>,
}

impl<'a> Source<'a> {
    fn open(cx: &'a Context, directory: &Path) -> Result<Self> {
        if !directory.is_dir() {
            return Err(Error::not_found(format!(
                "no source directory `{}`",
                directory.display()
            )));
        }
        Ok(Self {
            directory: fs_err::canonicalize(directory)?,
            git: Git::new(&cx.config.user),
        })
    }

    /// Returns the first answer, and each that differs from the one before.
    fn history(&self, hook: &Hook, revisions: Option<&str>) -> Result<Vec<At>> {
        let Some(revisions) = revisions else {
            let found = hook::apply(hook, &|path| execute::look(&self.directory, path));
            return Ok(vec![answer(None, found)?]);
        };
        let (from, to) = match revisions.split_once("..") {
            Some((from, to)) => (from, if to.is_empty() { "HEAD" } else { to }),
            None => (revisions, revisions),
        };
        let checkout = self.git.open(&self.directory)?;
        let (from, to) = (self.commit(&checkout, from)?, self.commit(&checkout, to)?);
        let mut all = vec![from.clone()];
        let range = format!("{from}..{to}");
        let mut arguments = vec![
            "rev-list",
            "--reverse",
            "--first-parent",
            range.as_str(),
            "--",
        ];
        let mut paths = Vec::new();
        for file in hook::files(hook)? {
            paths.push(tracked(&checkout, &to, &file)?);
        }
        arguments.extend(paths.iter().map(String::as_str));
        if from != to && !paths.is_empty() {
            let listed = checkout.text(&arguments)?;
            all.extend(listed.lines().map(str::to_owned));
        }
        let mut answers: Vec<At> = Vec::new();
        for commit in all {
            let read = |path: &Path| self.at(&checkout, &self.directory, &commit, path);
            let now = answer(Some(&commit), hook::apply(hook, &read))?;
            if answers
                .last()
                .is_none_or(|last| last.applies != now.applies)
            {
                answers.push(dated(&checkout, &commit, now)?);
            }
        }
        Ok(answers)
    }

    fn commit(&self, checkout: &Checkout<'_>, revision: &str) -> Result<String> {
        let name = format!("{revision}^{{commit}}");
        let found = checkout.text(&[
            "rev-parse",
            "--quiet",
            "--verify",
            "--end-of-options",
            &name,
        ]);
        match found {
            Ok(commit) => Ok(commit.trim().to_owned()),
            Err(error) => Err(Error::not_found(format!(
                "`{}` has no revision `{}`",
                self.directory.display(),
                revision.escape_debug()
            ))
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
        match entry(checkout, commit, path)? {
            Some((mode, object)) if mode.starts_with("100") => {
                let bytes = checkout.bytes(&["cat-file", "blob", &object])?;
                return Ok(FileInSource::File {
                    bytes,
                    executable: mode == "100755",
                });
            }
            Some(_) => return Ok(FileInSource::Absent),
            None => {}
        }
        for parent in path
            .ancestors()
            .skip(1)
            .filter(|path| !path.as_os_str().is_empty())
        {
            if let Some((mode, object)) = entry(checkout, commit, parent)?
                && mode == "160000"
            {
                let inside = directory.join(parent);
                let rest = path.strip_prefix(parent).unwrap_or(path);
                let known = ["cat-file", "-e", object.as_str()];
                if !inside.join(".git").exists() {
                    return Ok(FileInSource::Unfetched);
                }
                let below = self.git.open(&inside)?;
                return match below.text(&known).is_ok() {
                    true => self.at(&below, &inside, &object, rest),
                    false => Ok(FileInSource::Unfetched),
                };
            }
        }
        Ok(FileInSource::Absent)
    }
}

fn dated(checkout: &Checkout<'_>, commit: &str, at: At) -> Result<At> {
    let arguments = [
        "show",
        "--no-patch",
        "--no-show-signature",
        "--format=%cs %s",
        commit,
    ];
    let line = checkout.text(&arguments)?;
    let (date, subject) = line.trim().split_once(' ').unwrap_or((line.trim(), ""));
    Ok(At {
        date: Some(date.to_owned()),
        subject: Some(subject.to_owned()),
        ..at
    })
}

/// Returns the path that the repository itself tracks: for a file in a submodule, the submodule.
fn tracked(checkout: &Checkout<'_>, commit: &str, file: &Path) -> Result<String> {
    for path in file.ancestors().filter(|path| !path.as_os_str().is_empty()) {
        if let Some((mode, _)) = entry(checkout, commit, path)?
            && mode == "160000"
        {
            return Ok(path.display().to_string());
        }
    }
    Ok(file.display().to_string())
}

fn entry(checkout: &Checkout<'_>, commit: &str, path: &Path) -> Result<Option<(String, String)>> {
    let path = path.display().to_string();
    let arguments = ["--literal-pathspecs", "ls-tree", "-z", commit, "--", &path];
    let line = checkout.text(&arguments)?;
    let mut words = line.split([' ', '\t']);
    Ok(match (words.next(), words.next(), words.next()) {
        (Some(mode), Some(_), Some(object)) => Some((mode.to_owned(), object.to_owned())),
        _ => None,
    })
}

/// Turns the outcome of applying into an answer. Errors that are not about the hook stay errors.
fn answer(commit: Option<&str>, outcome: Result<hook::HookChanges>) -> Result<At> {
    let at = |applies, why| At {
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
