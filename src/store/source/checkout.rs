//! Owns reading checkouts that other processes, such as steps, write to: git must run no program that such
//! a repository names.
//!
//! git gets a directory made by rockenv instead of `.git`: links to the objects, references and index, and a
//! configuration with only those repository settings that define the meaning of its files. Filters, hooks, aliases,
//! helpers, drivers and remotes are excluded. git runs with the rights of the checkout's owner, and never as root in
//! another user's checkout.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::sync::Once;
use std::time::Duration;

use fs_err as fs;
use nix::fcntl::OFlag;

use super::git::{Git, Rights, keeps_modes, options};
use super::special_files;
use crate::sys::account;
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _, if_exists};
use crate::sys::process::{Program, TEMPORARY};
use crate::sys::shell::quoted_path;
use crate::tree;

/// The repository settings that define the meaning of its files and objects; none of them names a program.
const SETTINGS: [&str; 15] = [
    "core.attributesfile",
    "core.autocrlf",
    "core.bigfilethreshold",
    "core.checkroundtripencoding",
    "core.eol",
    "core.excludesfile",
    "core.filemode",
    "core.precomposeunicode",
    "core.protecthfs",
    "core.protectntfs",
    "core.repositoryformatversion",
    "core.safecrlf",
    "core.sparsecheckout",
    "core.sparsecheckoutcone",
    "index.sparse",
];
/// Those of them that name a file, which git opens.
const FILES: [&str; 2] = ["core.attributesfile", "core.excludesfile"];
/// Beginnings of the settings that include a file. Other conditions need a repository, and git reads a configuration
/// outside of any.
const INCLUDES: [&str; 2] = ["include.path", "includeif.hasconfig:"];
/// Makes git compare everything that steps see, and nothing else, whatever the repository or the user configured.
const SEES_ALL: [&str; 5] = [
    "core.checkStat=default",
    "core.ignoreCase=false",
    "core.symlinks=true",
    "core.trustCtime=true",
    "status.showStash=false",
];
/// Extensions that git does not get: one names a remote, and the other enables a file of settings, which this module
/// reads. git accepts or refuses all others.
const OTHER_EXTENSIONS: [&str; 2] = ["extensions.partialclone", "extensions.worktreeconfig"];
/// Larger than any `HEAD` or `.git` file, in bytes.
const MAX_FILE: u64 = 16 << 10;
/// Directory where the caller's Git LFS keeps files, and writes when git asks it for the object of a file.
const LFS: &str = "lfs";
/// Prefix of directories that replace `.git`.
const PREFIX: &str = "rockenv-git-";
/// A directory younger than this may have no lock yet.
const NEWBORN: Duration = Duration::from_secs(60);

/// A checkout, opened for reading.
#[derive(Debug)]
pub(crate) struct Checkout<'a> {
    git: &'a Git<'a>,
    work: PathBuf,
    rights: Rights,
    place: Place,
}

impl<'a> Git<'a> {
    /// Opens the checkout in a directory that has a `.git`.
    pub(crate) fn open(&'a self, directory: &Path) -> Result<Checkout<'a>> {
        Checkout::open(self, directory)
            .context(|| format!("cannot read the checkout in `{}`", directory.display()))
    }
}

impl<'a> Checkout<'a> {
    fn open(git: &'a Git<'a>, directory: &Path) -> Result<Self> {
        let work = fs::canonicalize(directory)?;
        let (own, common) = git_directories(&work)?;
        let rights = rights(git, &work)?;
        let checkout = Self {
            git,
            work,
            rights,
            place: Place::new(rights)?,
        };
        let listed = checkout.settings(&own, &common)?;
        // Steps see execute permissions, whatever the repository or the user tells git.
        let is_kept = |name: &str| name != "core.filemode" || !keeps_modes(&checkout.work);
        let shared = checkout.lay_out(&own, &common)?;
        fs::write(checkout.place.path.join("HEAD"), head(&own)?)?;
        let config = shared.join("config");
        fs::write(&config, written(&listed, is_kept))?;
        for path in checkout.paths(&config, &listed, FILES)? {
            refuse_special_file(&checkout.work.join(path))?;
        }
        Ok(checkout)
    }

    pub(crate) fn head(&self) -> Result<String> {
        self.commit()?.ok_or_else(|| {
            invalid!("`{}` has no commit yet", self.work.display())
                .help(format!("git -C {} commit", quoted_path(&self.work)))
        })
    }

    /// Returns the checked-out commit; `None` before the first one.
    pub(super) fn commit(&self) -> Result<Option<String>> {
        match self.text(&["rev-parse", "HEAD"]) {
            Ok(head) => Ok(Some(head.trim().to_owned())),
            Err(_) if self.is_unborn()? => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Returns whether `HEAD` names a branch that does not exist.
    fn is_unborn(&self) -> Result<bool> {
        let head = fs::read_to_string(self.place.path.join("HEAD"))?;
        let Some(branch) = head.strip_prefix("ref:").map(str::trim) else {
            return Ok(false);
        };
        let file = if_exists(fs::symlink_metadata(self.place.path.join(branch)))?;
        let listed = ["for-each-ref", "--format=%(refname)", "--", branch];
        Ok(file.is_none() && self.text(&listed)?.is_empty())
    }

    /// Runs git without changing anything, and returns its output.
    pub(crate) fn text(&self, arguments: &[&str]) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.bytes(arguments)?).into_owned())
    }

    pub(crate) fn bytes(&self, arguments: &[&str]) -> Result<Vec<u8>> {
        self.git.finish(self.program()?, &self.work, arguments)
    }

    /// Returns the status of tracked files, including those that marks in the index tell git to skip.
    pub(super) fn status_of_all(&self) -> Result<Vec<u8>> {
        let place = self.place.path.join("all");
        make_for(&place, self.rights)?;
        let run = |arguments: &[&str]| {
            let program = self.program()?.env("GIT_INDEX_FILE", place.join("index"));
            self.git.finish(program, &self.work, arguments)
        };
        run(&["read-tree", "--no-sparse-checkout", "HEAD"])?;
        run(&[
            "-c",
            "core.sparseCheckout=false",
            "status",
            "--porcelain=v2",
            "-z",
            "--no-renames",
            "--untracked-files=no",
            "--ignore-submodules=all",
        ])
    }

    fn program(&self) -> Result<Program> {
        Ok(self
            .git
            .program(self.rights)?
            .env("GIT_DIR", &self.place.path)
            .env("GIT_WORK_TREE", &self.work)
            // Do not fetch missing objects: the repository itself names the remote and the command for that.
            .env("GIT_NO_LAZY_FETCH", "1")
            // Replacements would change the content of a commit, but not its id.
            .env("GIT_NO_REPLACE_OBJECTS", "1")
            .args(options(&SEES_ALL))
            .args(["-c", "protocol.allow=never"]))
    }

    /// Creates the links of a directory that replaces `.git`. Returns the directory in it for what all work trees
    /// share.
    fn lay_out(&self, own: &Path, common: &Path) -> Result<PathBuf> {
        let place = self.place.path.as_path();
        // In the format `reftable`, another work tree has tables of its own, with its `HEAD`.
        let is_apart = own != common && own.join("reftable").exists();
        let shared = match is_apart {
            true => place.join("common"),
            false => place.to_owned(),
        };
        for directory in [place, shared.as_path()] {
            fs::create_dir_all(directory.join("info"))?;
        }
        let link = |from: &Path, to: &Path, name: &str| match from.join(name).exists() {
            true => symlink(from.join(name), to.join(name)),
            false => Ok(()),
        };
        if is_apart {
            fs::write(place.join("commondir"), "common\n")?;
            link(own, place, "reftable")?;
        }
        for name in [
            "objects",
            "refs",
            "packed-refs",
            "reftable",
            "shallow",
            "info/exclude",
            "info/attributes",
            "info/grafts",
        ] {
            link(common, &shared, name)?;
        }
        for name in [
            "index",
            "logs",
            "FETCH_HEAD",
            "ORIG_HEAD",
            "info/sparse-checkout",
        ] {
            link(own, place, name)?;
        }
        for entry in fs::read_dir(own)? {
            let name = entry?.file_name();
            if let Some(name) = name.to_str()
                && name.starts_with("sharedindex.")
            {
                link(own, place, name)?;
            }
        }
        special_files::refuse_in_git_directory(self.git, place, &shared.join("objects"))?;
        link(common, &shared, LFS)?;
        let lfs = shared.join(LFS);
        if !lfs.exists() {
            make_for(&lfs, self.rights)?;
        }
        Ok(shared)
    }

    fn settings(&self, own: &Path, common: &Path) -> Result<Vec<Setting>> {
        let mut listed = self.list(&common.join("config"))?;
        let per_tree = value(&listed, "extensions.worktreeconfig").is_some_and(|value| {
            value.as_ref().is_none_or(|value| {
                matches!(
                    value.to_ascii_lowercase().as_str(),
                    "true" | "yes" | "on" | "1"
                )
            })
        });
        if per_tree {
            listed.extend(self.list(&own.join("config.worktree"))?);
        }
        Ok(listed)
    }

    /// Reads a git configuration file as git itself does, with its includes.
    fn list(&self, file: &Path) -> Result<Vec<Setting>> {
        match fs::metadata(file) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
            Ok(found) if !found.is_file() => return Err(not_regular(file)),
            Err(error) => return Err(error.into()),
            Ok(_) => {}
        }
        let own = self.read(file, "--no-includes")?;
        let mut left = self.included(file, &own)?;
        if left.is_empty() {
            return Ok(own);
        }
        let mut seen = BTreeSet::new();
        while let Some(path) = left.pop() {
            if refuse_special_file(&path)? && seen.insert(fs::canonicalize(&path)?) {
                let listed = self.read(&path, "--no-includes")?;
                left.extend(self.included(&path, &listed)?);
            }
        }
        self.read(file, "--includes")
    }

    /// Returns the files that a configuration file with the settings `listed` includes.
    fn included(&self, file: &Path, listed: &[Setting]) -> Result<Vec<PathBuf>> {
        let directory = file.parent().unwrap_or(file);
        let named = self.paths(file, listed, INCLUDES)?;
        Ok(named.iter().map(|path| directory.join(path)).collect())
    }

    /// Returns the values of the settings in a file whose names begin with one of `names`, as git expands paths: they
    /// may start in a home or where git is installed.
    fn paths(&self, file: &Path, listed: &[Setting], names: [&str; 2]) -> Result<Vec<PathBuf>> {
        let is_one = |(name, _): &Setting| names.iter().any(|begin| name.starts_with(*begin));
        if !listed.iter().any(is_one) {
            return Ok(Vec::new());
        }
        let pattern = format!("^({})", names.join("|"));
        let arguments = ["--type=path", "--get-regexp", &pattern];
        let found = self.config(file, &arguments)?;
        let path = |entry: &[u8]| {
            let end = entry.iter().position(|byte| *byte == b'\n')?;
            Some(PathBuf::from(OsStr::from_bytes(&entry[end + 1..])))
        };
        Ok(found.split(|byte| *byte == 0).filter_map(path).collect())
    }

    /// Runs `git config` for one file, outside of any repository.
    fn config(&self, file: &Path, arguments: &[&str]) -> Result<Vec<u8>> {
        let Some(file) = file.to_str() else {
            return Err(invalid!("the path `{}` is not UTF-8", file.display()));
        };
        let arguments = [&["config", "--file", file, "--null"][..], arguments].concat();
        self.git
            .finish(self.git.program(self.rights)?, Path::new("/"), &arguments)
    }

    fn read(&self, file: &Path, includes: &str) -> Result<Vec<Setting>> {
        let listed = self.config(file, &[includes, "--list"])?;
        let listed = String::from_utf8_lossy(&listed);
        let entries = listed.split_terminator('\0');
        let setting = |entry: &str| match entry.split_once('\n') {
            Some((name, value)) => (name.to_owned(), Some(value.to_owned())),
            None => (entry.to_owned(), None),
        };
        Ok(entries.map(setting).collect())
    }
}

/// Returns git's rights for a checkout: those of the checkout's owner, unless that is root or the build user, or this
/// process is not root. A build user other than the caller gets none of the caller's variables, which may be secret.
fn rights(git: &Git<'_>, work: &Path) -> Result<Rights> {
    let found = fs::metadata(work)?;
    let (uid, gid) = (found.uid(), found.gid());
    if uid != 0 && uid != git.user.uid && crate::sys::userns::is_root() {
        return Ok(Rights::Owner(uid, gid));
    }
    let caller = account::caller().person().map(|person| person.uid);
    Ok(match git.rights() {
        Rights::BuildUser(uid, gid) if caller != Some(uid) => Rights::Owner(uid, gid),
        rights => rights,
    })
}

/// Returns a checkout's git directory, and the directory that all work trees of the repository share.
pub(crate) fn git_directories(work: &Path) -> Result<(PathBuf, PathBuf)> {
    let own = git_directory(work)?;
    let common = match small_file(&own.join("commondir"))? {
        Some(text) => own.join(text.trim_end()),
        None => own.clone(),
    };
    Ok((own, common))
}

/// Returns a checkout's git directory, which may belong to a submodule or to another work tree.
fn git_directory(work: &Path) -> Result<PathBuf> {
    let place = work.join(".git");
    if fs::metadata(&place)?.is_dir() {
        return Ok(place);
    }
    let text = small_file(&place)?.unwrap_or_default();
    let named = text.strip_prefix("gitdir: ").map(str::trim_end);
    let found = named.map(|named| if_exists(fs::canonicalize(work.join(named))));
    match found.transpose()?.flatten() {
        Some(directory) => Ok(directory),
        // A work tree or its repository was moved, or the file is another program's.
        None => Err(
            invalid!("`{}` does not name a git directory", place.display())
                .help("run `git worktree repair`, clone it again, or remove `.git` to use all of its content"),
        ),
    }
}

/// Reads a short text file; `None` if it is missing. Refuses devices and FIFOs, which may act or block when opened,
/// and links, which may lead to files that only root may read.
pub(crate) fn small_file(path: &Path) -> Result<Option<String>> {
    let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    let Some(found) = if_exists(beneath::open_file(path, flags))? else {
        return Ok(None);
    };
    if !found.metadata()?.is_file() {
        return Err(not_regular(path));
    }
    let file = fs::File::open(format!("/proc/self/fd/{}", found.as_raw_fd()))?;
    let mut text = String::new();
    file.take(MAX_FILE).read_to_string(&mut text)?;
    Ok(Some(text))
}

pub(super) fn not_regular(path: &Path) -> Error {
    invalid!("`{}` is not a regular file", path.display())
        .help("clone the source again: git did not write this file")
}

/// Returns what `HEAD` names: a reference or a commit.
fn head(own: &Path) -> Result<String> {
    let path = own.join("HEAD");
    if let Ok(target) = fs::read_link(&path)
        && target.starts_with("refs")
    {
        return Ok(format!("ref: {}\n", target.display()));
    }
    let text = small_file(&path)?.unwrap_or_default();
    let text = text.trim();
    let is_commit = text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let is_reference = text
        .strip_prefix("ref:")
        .is_some_and(|name| name.trim().starts_with("refs/"));
    match is_commit || is_reference && !text.contains('\n') {
        true => Ok(format!("{text}\n")),
        false => Err(
            invalid!("`{}` names neither a branch nor a commit", path.display())
                .help("clone the source again"),
        ),
    }
}

/// Creates a directory for files that git writes, which may be parts of a private checkout. Refuses a link to a
/// directory, because git must not own its target.
fn make_for(directory: &Path, rights: Rights) -> Result<()> {
    let mut new = std::fs::DirBuilder::new();
    new.mode(0o700)
        .create(directory)
        .context(|| format!("cannot make `{}`", directory.display()))?;
    if let Rights::BuildUser(uid, gid) | Rights::Owner(uid, gid) = rights {
        nix::unistd::chown(directory, Some(uid.into()), Some(gid.into()))?;
    }
    Ok(())
}

/// Returns the configuration for git, with only those repository settings that [`is_setting`] accepts.
fn written(listed: &[Setting], is_kept: impl Fn(&str) -> bool) -> String {
    let kept = listed.iter().filter_map(|(name, value)| {
        let is_one = is_setting(name) && is_kept(name);
        let (section, key) = name.split_once('.').filter(|_| is_one)?;
        Some(match value {
            Some(value) => format!("[{section}]\n\t{key} = {}\n", quoted(value)),
            None => format!("[{section}]\n\t{key}\n"),
        })
    });
    // Without a value here, git would use the user's.
    std::iter::once("[core]\n\tbare = false\n\tfilemode = true\n".to_owned())
        .chain(kept)
        .collect()
}

fn is_setting(name: &str) -> bool {
    let is_extension = name.starts_with("extensions.")
        && name.matches('.').count() == 1
        && !OTHER_EXTENSIONS.contains(&name);
    is_extension || SETTINGS.contains(&name)
}

/// A lowercase name and its value. `None` is a name without a value, which means true.
type Setting = (String, Option<String>);

fn value<'s>(listed: &'s [Setting], name: &str) -> Option<&'s Option<String>> {
    let mut found = listed.iter().rev();
    found.find_map(|(known, value)| (known == name).then_some(value))
}

/// Refuses a FIFO or device. Returns whether the path is a regular file.
fn refuse_special_file(path: &Path) -> Result<bool> {
    match fs::metadata(path) {
        Ok(found) if found.is_file() => Ok(true),
        Ok(found) if !found.is_dir() => Err(not_regular(path)),
        // git reports it, or ignores it.
        Ok(_) | Err(_) => Ok(false),
    }
}

/// Quotes a value for git's configuration.
fn quoted(value: &str) -> String {
    let mut text = String::from("\"");
    for letter in value.chars() {
        match letter {
            '"' | '\\' => text.extend(['\\', letter]),
            '\n' => text.push_str("\\n"),
            '\t' => text.push_str("\\t"),
            '\u{8}' => text.push_str("\\b"),
            other => text.push(other),
        }
    }
    text.push('"');
    text
}

/// A directory that replaces `.git`, removed when dropped.
#[derive(Debug)]
struct Place {
    path: PathBuf,
    /// Held while the directory is in use. The directory of a killed command has no lock holder.
    _lock: fs::File,
}

impl Place {
    /// Creates an empty directory that git can read with `rights`.
    fn new(rights: Rights) -> Result<Self> {
        static ONCE: Once = Once::new();
        ONCE.call_once(remove_left);
        let mode = match rights {
            Rights::Own => 0o700,
            Rights::BuildUser(..) | Rights::Owner(..) => 0o755,
        };
        let path = tempfile::Builder::new()
            .prefix(PREFIX)
            .permissions(std::fs::Permissions::from_mode(mode))
            .tempdir_in(TEMPORARY)?
            .keep();
        let lock = beneath::open_real_dir(&path)?;
        lock.file().try_lock().map_err(std::io::Error::from)?;
        fs::set_permissions(&path, std::fs::Permissions::from_mode(mode))?;
        Ok(Self { path, _lock: lock })
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        // A later command removes what cannot be removed now.
        drop(tree::remove_tree(&self.path));
    }
}

/// Removes the leftovers of killed commands.
fn remove_left() {
    for entry in fs::read_dir(TEMPORARY).into_iter().flatten().flatten() {
        if entry.file_name().to_string_lossy().starts_with(PREFIX) && is_abandoned(&entry.path()) {
            drop(tree::remove_tree(&entry.path()));
        }
    }
}

/// Returns whether this user owns a directory and no command uses it.
fn is_abandoned(path: &Path) -> bool {
    let flags = OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
    let Ok(file) = beneath::open_file(path, flags) else {
        return false;
    };
    let is_old = |found: &std::fs::Metadata| {
        let age = found.modified().ok().and_then(|time| time.elapsed().ok());
        age.is_some_and(|age| age > NEWBORN)
    };
    file.metadata()
        .is_ok_and(|found| found.uid() == nix::unistd::geteuid().as_raw() && is_old(&found))
        && file.file().try_lock().is_ok()
}

#[cfg(test)]
mod tests;
