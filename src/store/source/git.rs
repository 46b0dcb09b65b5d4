//! Owns running git: its user and its variables, without the repository's own hooks.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sys::statfs::{
    BTRFS_SUPER_MAGIC, EXT4_SUPER_MAGIC, OVERLAYFS_SUPER_MAGIC, TMPFS_MAGIC, XFS_SUPER_MAGIC,
    statfs,
};

use crate::engine::BuildUser;
use crate::image::certificates;
use crate::sys::account::{self, Person};
use crate::sys::address::{hide_secrets, without_login};
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::process::{Event, Program};
use crate::sys::shell::quoted;
use crate::sys::signals::Cancel;

/// Maximum size of git's output, in bytes: the status of a tree where everything changed.
const MAX_OUTPUT: u64 = 256 << 20;

/// Variables that point git to a repository other than that in its working directory. git sets them for hooks, and
/// some users set them to keep files of their home in a repository. With them, a clone would go into the caller's
/// repository and change its work tree and index, or have other ids.
const OTHER_REPOSITORY: [&str; 16] = [
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DEFAULT_HASH",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_QUARANTINE_PATH",
    "GIT_REFERENCE_BACKEND",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
];

/// Turns off other programs and hooks, including those that the user's configuration defines, as git 2.55 and later
/// allow, for the events of rockenv's commands.
const NO_PROGRAMS: [&str; 7] = [
    "core.fsmonitor=false",
    "core.hooksPath=/dev/null",
    "hook.post-checkout.enabled=false",
    "hook.post-index-change.enabled=false",
    "hook.pre-auto-gc.enabled=false",
    "hook.reference-transaction.enabled=false",
    "protocol.ext.allow=never",
];

/// Makes git write files with the line endings of the commit. Keys contain the commit, but not the line endings that a
/// user configured.
const AS_COMMITTED: [&str; 2] = ["core.autocrlf=false", "core.eol=lf"];

pub(super) fn options<'s>(settings: &'s [&'s str]) -> impl Iterator<Item = &'s str> {
    settings.iter().flat_map(|setting| ["-c", setting])
}

pub(crate) struct Git<'a> {
    /// The user to run as, if rockenv is root and no other user owns the checkout.
    pub user: &'a BuildUser,
    pub cancel: &'a AtomicBool,
    /// Called about ten times a second, so that the caller can set the flag.
    pub tick: Box<dyn Fn() + 'a>,
}

impl std::fmt::Debug for Git<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Git")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// Returns whether a directory is on a file system known to keep execute permissions. Others may give all files the
/// same mode.
pub(super) fn keeps_modes(directory: &Path) -> bool {
    let kept = [
        BTRFS_SUPER_MAGIC,
        EXT4_SUPER_MAGIC,
        OVERLAYFS_SUPER_MAGIC,
        TMPFS_MAGIC,
        XFS_SUPER_MAGIC,
    ];
    statfs(directory).is_ok_and(|found| kept.contains(&found.filesystem_type()))
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// Those of this process.
    Own,
    /// Those of the build user, with the caller's variables: if the build user is the caller, and for clones, which
    /// need the caller's proxies.
    BuildUser(u32, u32),
    /// Those of another user, without the caller's variables, and ignoring that user's settings.
    Owner(u32, u32),
}

impl<'a> Git<'a> {
    /// Returns an instance without cancellation, for commands that signals kill.
    pub(crate) fn new(user: &'a BuildUser) -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self {
            user,
            cancel: &NEVER,
            tick: Box::new(|| {}),
        }
    }

    /// Returns an instance that stops git when a signal arrives.
    pub(crate) fn until(user: &'a BuildUser, cancel: &'a Cancel<'_>) -> Self {
        Self {
            user,
            cancel: cancel.flag(),
            tick: Box::new(|| cancel.poll()),
        }
    }

    /// Returns whether a commit is in the history of the checkout; `None` if that is unknown, as in a shallow clone.
    pub(crate) fn contains(&self, directory: &Path, commit: &str) -> Result<Option<bool>> {
        if !directory.join(".git").exists() {
            return Ok(None);
        }
        let checkout = self.open(directory)?;
        let known = format!("{commit}^{{commit}}");
        let known = ["rev-parse", "--quiet", "--verify", known.as_str()];
        if checkout.text(&known).is_err() {
            self.stop_if_cancelled()?;
            return Ok(None);
        }
        let outside = ["rev-list", "--max-count=1", commit, "--not", "HEAD", "--"];
        if checkout.text(&outside)?.trim().is_empty() {
            return Ok(Some(true));
        }
        // The commits between the two may be missing, unless the commit is a later one.
        let is_shallow = checkout
            .text(&["rev-parse", "--is-shallow-repository"])?
            .trim()
            == "true";
        let is_later = ["merge-base", "--is-ancestor", "HEAD", commit];
        Ok((!is_shallow || checkout.text(&is_later).is_ok()).then_some(false))
    }

    /// Runs git in a directory where rockenv creates a repository, or outside any repository. Use [`Git::open`] for
    /// repositories that other processes write to: here git runs the programs that their configuration names.
    pub(super) fn run(&self, directory: &Path, arguments: &[&str]) -> Result<String> {
        self.run_with(&[], directory, arguments)
    }

    /// Like [`Git::run`], for commands that write files of a commit.
    pub(super) fn check_out(&self, directory: &Path, arguments: &[&str]) -> Result<String> {
        self.run_with(&AS_COMMITTED, directory, arguments)
    }

    fn run_with(&self, settings: &[&str], directory: &Path, arguments: &[&str]) -> Result<String> {
        let mut program = self.program(self.rights())?.args(options(settings));
        let authorities = certificates::list_for_anybody()?;
        if let Some(list) = &authorities {
            program = program.env("GIT_SSL_CAINFO", list.path());
        }
        let said = self.finish(program, directory, arguments)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Returns git's rights for directories that no other user owns.
    pub(super) fn rights(&self) -> Rights {
        match nix::unistd::geteuid().is_root() && self.user.uid != 0 {
            true => Rights::BuildUser(self.user.uid, self.user.gid),
            false => Rights::Own,
        }
    }

    /// Returns a git command that runs no hooks and never prompts.
    pub(super) fn program(&self, rights: Rights) -> Result<Program> {
        let program = Program::find("git", "sources")?;
        let program = match rights {
            Rights::Own => program.inherit_env().without(&OTHER_REPOSITORY),
            Rights::BuildUser(uid, gid) => {
                let program = program
                    .inherit_env()
                    .without(&OTHER_REPOSITORY)
                    .user(Person::of(uid, gid));
                match (account::caller(), account::home_of(uid)) {
                    // sudo sets the home of root.
                    (account::Rights::Of(person, _), Some(home)) if person.uid == uid => {
                        program.env("HOME", home)
                    }
                    _ => program,
                }
            }
            Rights::Owner(uid, gid) => program
                .env("HOME", "/")
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .user(Person::of(uid, gid)),
        };
        Ok(program
            .env("GIT_TERMINAL_PROMPT", "0")
            // Reading a checkout must not change it, not even git's own caches.
            .env("GIT_OPTIONAL_LOCKS", "0")
            .args(options(&NO_PROGRAMS)))
    }

    /// Runs a git command to completion and returns its output.
    pub(super) fn finish(
        &self,
        program: Program,
        directory: &Path,
        arguments: &[&str],
    ) -> Result<Vec<u8>> {
        let mut tick = |_: Event<'_>| (self.tick)();
        program
            .args(arguments)
            .directory(directory)
            .output(MAX_OUTPUT, self.cancel, &mut tick)
            .context(|| {
                let words = arguments.iter().map(|word| without_login(word));
                format!(
                    "`git {}` failed in `{}`",
                    words.collect::<Vec<_>>().join(" "),
                    directory.display()
                )
            })
            .map_err(|error| match (error.kind(), arguments) {
                // The server cannot be reached, or refuses.
                (Kind::Unexpected, ["fetch" | "ls-remote" | "submodule", ..]) => {
                    error.of_kind(Kind::Unavailable)
                }
                _ => error,
            })
    }

    /// Adds help to an error about a server: the command that asks the server of `url` directly.
    pub(super) fn help(url: &str) -> impl FnOnce(Error) -> Error {
        move |error| {
            let is_ssh = url.starts_with("ssh:") || !url.contains("://");
            let shown = match is_ssh {
                // With the user name, which ssh would replace by the caller's.
                true => hide_secrets(url),
                false => without_login(url),
            };
            let ask = format!("git ls-remote {}", quoted(&shown));
            match error.kind() {
                // sudo drops the variable that names the caller's agent.
                Kind::Unavailable if is_ssh && account::caller().person().is_some() => error.help(
                    format!("{ask}; if that works: sudo --preserve-env=SSH_AUTH_SOCK rockenv ..."),
                ),
                Kind::Unavailable | Kind::NotFound => error.help(ask),
                _ => error,
            }
        }
    }

    /// Lets the caller check for signals, and fails if one arrived.
    pub(super) fn stop_if_cancelled(&self) -> Result<()> {
        (self.tick)();
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(Error::new(Kind::Signal(2), "interrupted")),
            false => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::{me, repository, run};
    use super::*;

    #[test]
    fn a_shallow_clone_does_not_tell_what_came_before() {
        let (origin, clone, git) = (repository(), tempfile::tempdir().unwrap(), Git::new(me()));
        let (origin, clone) = (origin.path(), clone.path());
        let commit = |name: &str| {
            run(origin, &["commit", "--quiet", "--allow-empty", "-m", name]);
            run(origin, &["rev-parse", "HEAD"]).trim().to_owned()
        };
        let [old, new] = ["old", "new"].map(commit);
        run(origin, &["config", "uploadpack.allowAnySHA1InWant", "true"]);
        run(clone, &["init", "--quiet"]);
        let url = format!("file://{}", origin.display());
        let fetch = |depth: &str, commit: &str| {
            run(clone, &["fetch", "--quiet", depth, "--", &url, commit])
        };
        fetch("--depth=1", &old);
        fetch("--depth=1", &new);
        let has = |commit: &str, directory: &Path| git.contains(directory, commit).unwrap();
        for (head, in_origin, in_clone) in [
            (&new, [Some(true), Some(true)], [None, Some(true)]),
            (&old, [Some(true), Some(false)], [Some(true), None]),
        ] {
            for (directory, expected) in [(origin, in_origin), (clone, in_clone)] {
                run(directory, &["checkout", "--quiet", "--detach", head]);
                assert_eq!([&old, &new].map(|commit| has(commit, directory)), expected);
            }
        }
        fetch("--depth=2", &new);
        assert_eq!(has(&new, clone), Some(false));
    }

    #[test]
    fn hooks_run_neither_from_a_directory_nor_from_a_configuration() {
        let program = Git::new(me()).program(Rights::Own).unwrap();
        for setting in [
            "core.hooksPath=/dev/null",
            "hook.post-checkout.enabled=false",
        ] {
            let words = format!("\"-c\", \"{setting}\"");
            assert_has!(format!("{program:?}"), &words);
        }
    }
}
