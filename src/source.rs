//! Owns `source` volumes: cloning what a profile names by `git`, and fingerprints of what a directory holds.
//!
//! git runs as the build user, never as root: a repository's own configuration can name programs to run.

use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use sha2::{Digest as _, Sha256};

use crate::engine::BuildUser;
use crate::error::{Error, Result, ResultExt as _};
use crate::store::{Lock, Store};

/// How long somebody else's clone of the same repository is waited for.
const CLONE_WAIT: std::time::Duration = std::time::Duration::from_secs(3600);

/// A repository as a profile names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Repository {
    /// Volume's name.
    pub name: String,
    /// Location.
    pub url: String,
    /// Commit, tag or branch; without one the default branch as it was when cloned.
    pub rev: Option<String>,
    /// Commits to fetch.
    pub depth: Option<u32>,
    /// With submodules.
    pub submodules: bool,
}

impl Repository {
    /// Makes it from a spec's volume.
    pub fn new(name: &str, git: &crate::spec::Git) -> Self {
        Self {
            name: name.to_owned(),
            url: git.url.clone(),
            rev: git.rev.clone(),
            depth: git.depth,
            submodules: git.submodules,
        }
    }

    /// Returns its directory in the store: one for each location and revision, so that no env moves another's.
    pub fn directory(&self, store: &Store) -> PathBuf {
        let mut hash = Sha256::new();
        hash.update(&self.url);
        hash.update([0]);
        hash.update(self.rev.as_deref().unwrap_or_default());
        store
            .root()
            .join("sources")
            .join(format!("{}-{}", self.name, &hex(&hash.finalize())[..12]))
    }

    /// Clones it if it is not there, checks that it is what the profile says, and returns its directory.
    ///
    /// A checkout that somebody changed is left as it is: the changes are in the fingerprint.
    pub fn prepare(
        &self,
        store: &Store,
        user: &BuildUser,
        offline: bool,
        progress: &mut dyn FnMut(&str),
    ) -> Result<PathBuf> {
        let directory = self.directory(store);
        if directory.join(".git").exists() {
            self.check(&directory, user)?;
            return Ok(directory);
        }
        if offline {
            return Err(Error::unavailable(format!(
                "source `{}` is not cloned yet and `--offline` forbids it",
                self.name
            ))
            .help("run once without --offline"));
        }
        let mut lock = directory.clone().into_os_string();
        lock.push(".lock");
        let _lock = Lock::exclusive(
            Path::new(&lock),
            &format!("source `{}`", self.name),
            "clone",
            CLONE_WAIT,
        )?;
        if directory.join(".git").exists() {
            return Ok(directory);
        }
        let mut temporary = directory.clone().into_os_string();
        temporary.push(".part");
        let temporary = PathBuf::from(temporary);
        // Only a clone that was cut off can be here, under our lock.
        store.discard(&temporary)?;
        fs::create_dir(&temporary)?;
        nix::unistd::chown(&temporary, Some(user.uid.into()), Some(user.gid.into()))?;
        progress(&format!("cloning {}", self.url));
        self.clone_into(&temporary, user)
            .context(|| format!("cannot clone source `{}` from `{}`", self.name, self.url))?;
        fs::rename(&temporary, &directory)?;
        Ok(directory)
    }

    fn clone_into(&self, directory: &Path, user: &BuildUser) -> Result<()> {
        git(directory, user, &["init", "--quiet"])?;
        git(
            directory,
            user,
            &["remote", "add", "origin", "--", &self.url],
        )?;
        let depth = self.depth.map(|depth| format!("--depth={depth}"));
        let rev = self.rev.as_deref().unwrap_or("HEAD");
        let mut arguments = vec!["fetch", "--quiet", "--no-tags"];
        arguments.extend(depth.as_deref());
        arguments.extend(["--", "origin", rev]);
        if let Err(error) = git(directory, user, &arguments) {
            // Not every server hands out a bare commit: then everything is fetched and the commit looked up.
            git(
                directory,
                user,
                &[
                    "fetch",
                    "--quiet",
                    "--tags",
                    "--",
                    "origin",
                    "+refs/heads/*:refs/remotes/origin/*",
                ],
            )?;
            let found = [rev.to_owned(), format!("origin/{rev}")]
                .into_iter()
                .find(|name| {
                    git(
                        directory,
                        user,
                        &[
                            "rev-parse",
                            "--quiet",
                            "--verify",
                            &format!("{name}^{{commit}}"),
                        ],
                    )
                    .is_ok()
                });
            let Some(found) = found else {
                return Err(error);
            };
            git(
                directory,
                user,
                &["checkout", "--quiet", "--detach", &found],
            )?;
        } else {
            git(
                directory,
                user,
                &["checkout", "--quiet", "--detach", "FETCH_HEAD"],
            )?;
        }
        if self.submodules {
            let mut arguments = vec!["submodule", "--quiet", "update", "--init", "--recursive"];
            arguments.extend(depth.as_deref());
            git(directory, user, &arguments)?;
        }
        Ok(())
    }

    /// Refuses a checkout whose commit is not the one that the profile pins.
    fn check(&self, directory: &Path, user: &BuildUser) -> Result<()> {
        let Some(rev) = &self.rev else { return Ok(()) };
        let hexadecimal = rev.len() >= 7 && rev.bytes().all(|byte| byte.is_ascii_hexdigit());
        let head = git(directory, user, &["rev-parse", "HEAD"])?;
        if hexadecimal && !head.trim().starts_with(&rev.to_ascii_lowercase()) {
            return Err(Error::new(
                crate::error::Kind::Drift,
                format!(
                    "source `{}` is at {}, the profile pins {rev}",
                    self.name,
                    head.trim()
                ),
            )
            .help(format!("git -C {} checkout {rev}", directory.display())));
        }
        Ok(())
    }
}

/// Returns a fingerprint of a source: its commit and a digest of what differs from it, or a digest of all of it.
pub fn fingerprint(directory: &Path, user: &BuildUser) -> Result<String> {
    if !directory.join(".git").exists() {
        return content_digest(directory);
    }
    let head = git(directory, user, &["rev-parse", "HEAD"])?;
    let status = git_bytes(
        directory,
        user,
        &[
            "status",
            "--porcelain=v2",
            "-z",
            "--untracked-files=all",
            "--ignore-submodules=none",
        ],
    )?;
    if status.is_empty() {
        return Ok(format!("git:{}", head.trim()));
    }
    let mut hash = Sha256::new();
    hash.update(&status);
    // The status names what differs, not how: the content of those files decides.
    let changed = git_bytes(
        directory,
        user,
        &[
            "ls-files",
            "-z",
            "--modified",
            "--others",
            "--exclude-standard",
        ],
    )?;
    for name in changed
        .split(|byte| *byte == 0)
        .filter(|name| !name.is_empty())
    {
        let path = directory.join(std::ffi::OsStr::from_bytes(name));
        hash.update(name);
        hash.update([0]);
        if fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir()) {
            hash.update(fingerprint(&path, user)?);
        } else {
            hash_file(&path, &mut hash)?;
        }
    }
    hash.update(git_bytes(
        directory,
        user,
        &[
            "diff",
            "--cached",
            "--no-ext-diff",
            "--no-textconv",
            "--binary",
        ],
    )?);
    Ok(format!("git:{}+{}", head.trim(), hex(&hash.finalize())))
}

/// Hashes names, kinds, permissions and contents below a directory; times do not count.
fn content_digest(directory: &Path) -> Result<String> {
    let mut hash = Sha256::new();
    let mut left = vec![PathBuf::new()];
    while let Some(relative) = left.pop() {
        let mut entries =
            fs::read_dir(directory.join(&relative))?.collect::<std::io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs_err::DirEntry::file_name);
        for entry in entries {
            let name = relative.join(entry.file_name());
            let found = fs::symlink_metadata(entry.path())?;
            hash.update(name.as_os_str().as_bytes());
            hash.update([0]);
            hash.update((found.mode() & 0o170_777).to_le_bytes());
            if found.is_dir() {
                left.push(name);
            } else {
                hash_file(&entry.path(), &mut hash)?;
            }
        }
    }
    Ok(format!("content:{}", hex(&hash.finalize())))
}

fn hash_file(path: &Path, hash: &mut Sha256) -> Result<()> {
    let found = match fs::symlink_metadata(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            hash.update(b"absent");
            return Ok(());
        }
        other => other?,
    };
    if found.is_symlink() {
        hash.update(fs::read_link(path)?.as_os_str().as_bytes());
    } else if found.is_file() {
        hash.update(found.len().to_le_bytes());
        std::io::copy(&mut fs::File::open(path)?, &mut HashWriter(hash))?;
    }
    Ok(())
}

struct HashWriter<'a>(&'a mut Sha256);

impl std::io::Write for HashWriter<'_> {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.update(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

fn git(directory: &Path, user: &BuildUser, arguments: &[&str]) -> Result<String> {
    Ok(String::from_utf8_lossy(&git_bytes(directory, user, arguments)?).into_owned())
}

fn git_bytes(directory: &Path, user: &BuildUser, arguments: &[&str]) -> Result<Vec<u8>> {
    let mut command = Command::new("git");
    command
        .arg("-c")
        .arg("core.fsmonitor=false")
        .arg("-c")
        // A root without an invoking user works on other people's checkouts too.
        .arg("safe.directory=*")
        .args(arguments)
        .current_dir(directory)
        .env("GIT_TERMINAL_PROMPT", "0")
        .env("GIT_CONFIG_COUNT", "1")
        .env("GIT_CONFIG_KEY_0", "safe.directory")
        .env("GIT_CONFIG_VALUE_0", "*")
        .env("LC_ALL", "C.UTF-8")
        .stdin(Stdio::null());
    if nix::unistd::geteuid().is_root() && user.uid != 0 {
        command.uid(user.uid).gid(user.gid);
    }
    let output = command.output().map_err(|error| {
        if error.kind() == std::io::ErrorKind::NotFound {
            Error::unavailable("`git` is not installed; sources need it").help("rockenv setup")
        } else {
            Error::unexpected("cannot run `git`").source(error)
        }
    })?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr);
        return Err(Error::unexpected(format!(
            "`git {}` failed in `{}`",
            arguments.join(" "),
            directory.display()
        ))
        .source(said.trim().to_owned()));
    }
    Ok(output.stdout)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn me() -> BuildUser {
        BuildUser::new(
            nix::unistd::getuid().as_raw(),
            nix::unistd::getgid().as_raw(),
        )
    }

    fn repository() -> tempfile::TempDir {
        let directory = tempfile::tempdir().unwrap();
        let run = |arguments: &[&str]| git(directory.path(), &me(), arguments).unwrap();
        run(&["init", "--quiet"]);
        fs::write(directory.path().join("a"), "one").unwrap();
        run(&["add", "a"]);
        run(&[
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@example.org",
            "commit",
            "--quiet",
            "-m",
            "first",
        ]);
        directory
    }

    #[test]
    fn the_fingerprint_follows_commit_content_and_new_files() {
        let directory = repository();
        let path = directory.path();
        let clean = fingerprint(path, &me()).unwrap();
        assert!(clean.starts_with("git:") && !clean.contains('+'));
        fs::write(path.join("a"), "two").unwrap();
        let dirty = fingerprint(path, &me()).unwrap();
        fs::write(path.join("a"), "six").unwrap();
        let other = fingerprint(path, &me()).unwrap();
        fs::write(path.join("a"), "one").unwrap();
        fs::write(path.join("new"), "").unwrap();
        let untracked = fingerprint(path, &me()).unwrap();
        let all = [&clean, &dirty, &other, &untracked];
        assert_eq!(
            all.iter().collect::<std::collections::BTreeSet<_>>().len(),
            4
        );
        fs::remove_file(path.join("new")).unwrap();
        assert_eq!(fingerprint(path, &me()).unwrap(), clean);
    }

    #[test]
    fn a_plain_directory_is_known_by_its_content() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("a"), "one").unwrap();
        let first = fingerprint(directory.path(), &me()).unwrap();
        fs::write(directory.path().join("a"), "one").unwrap();
        assert_eq!(fingerprint(directory.path(), &me()).unwrap(), first);
        fs::write(directory.path().join("a"), "two").unwrap();
        assert_ne!(fingerprint(directory.path(), &me()).unwrap(), first);
    }

    #[test]
    fn a_pinned_commit_is_cloned_and_a_moved_one_is_refused() {
        let origin = repository();
        let home = tempfile::tempdir().unwrap();
        let store = Store::open(home.path()).unwrap();
        let head = git(origin.path(), &me(), &["rev-parse", "HEAD"])
            .unwrap()
            .trim()
            .to_owned();
        let source = Repository {
            name: "src".into(),
            url: format!("file://{}", origin.path().display()),
            rev: Some(head[..12].to_owned()),
            depth: Some(1),
            submodules: true,
        };
        let directory = source.prepare(&store, &me(), false, &mut |_| {}).unwrap();
        assert_eq!(fs::read_to_string(directory.join("a")).unwrap(), "one");
        assert_eq!(
            fingerprint(&directory, &me()).unwrap(),
            format!("git:{head}")
        );
        git(
            &directory,
            &me(),
            &[
                "-c",
                "user.name=t",
                "-c",
                "user.email=t@example.org",
                "commit",
                "--quiet",
                "--allow-empty",
                "-m",
                "moved",
            ],
        )
        .unwrap();
        let error = source
            .prepare(&store, &me(), true, &mut |_| {})
            .unwrap_err();
        assert_eq!(error.kind(), crate::error::Kind::Drift);
        assert!(error.help_text().unwrap().contains("checkout"));
    }
}
