//! Owns running git: as whom, with which variables, and with nothing that a repository's own hooks could add.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::engine::BuildUser;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::process::{Event, Program};

/// The longest answer of git that is taken, in bytes: the status of a tree where everything changed.
const MAX_OUTPUT: u64 = 256 << 20;

/// What git takes for the repository that it works on, in place of the one in its working directory: hooks of git's have these,
/// and people who keep files of their home in a repository. A clone would be made into the caller's, and move what it has
/// checked out and staged.
const OTHER_REPOSITORY: [&str; 14] = [
    "GIT_ALTERNATE_OBJECT_DIRECTORIES",
    "GIT_COMMON_DIR",
    "GIT_DIR",
    "GIT_GRAFT_FILE",
    "GIT_IMPLICIT_WORK_TREE",
    "GIT_INDEX_FILE",
    "GIT_NAMESPACE",
    "GIT_NO_REPLACE_OBJECTS",
    "GIT_OBJECT_DIRECTORY",
    "GIT_PREFIX",
    "GIT_QUARANTINE_PATH",
    "GIT_REPLACE_REF_BASE",
    "GIT_SHALLOW_FILE",
    "GIT_WORK_TREE",
];

/// The git program.
pub struct Git<'a> {
    /// Whose rights it has, where rockenv is root and a checkout is not somebody else's.
    pub user: &'a BuildUser,
    /// Ends what runs when it becomes true.
    pub cancel: &'a AtomicBool,
    /// Called about ten times a second, so that somebody can set the flag.
    pub tick: &'a dyn Fn(),
}

impl std::fmt::Debug for Git<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Git")
            .field("user", &self.user)
            .finish_non_exhaustive()
    }
}

/// Whose rights git has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Rights {
    /// Those of this process.
    Own,
    /// Those of the build user, with the caller's variables: the caller and the build user are one person.
    BuildUser(u32, u32),
    /// Those of another user, who gets none of the caller's variables, and whose settings do not count.
    Owner(u32, u32),
}

impl<'a> Git<'a> {
    /// One that nothing cancels: for commands that die of their signals.
    pub fn new(user: &'a BuildUser) -> Self {
        static NEVER: AtomicBool = AtomicBool::new(false);
        Self {
            user,
            cancel: &NEVER,
            tick: &|| {},
        }
    }

    /// Returns whether a commit is in the history of what is checked out; nothing where the commit is not known here, as in
    /// a clone without history.
    pub fn contains(&self, directory: &Path, commit: &str) -> Result<Option<bool>> {
        if !directory.join(".git").exists() {
            return Ok(None);
        }
        let checkout = self.open(directory)?;
        let known = format!("{commit}^{{commit}}");
        let known = ["rev-parse", "--quiet", "--verify", known.as_str()];
        if checkout.text(&known).is_err() {
            self.look()?;
            return Ok(None);
        }
        let outside = ["rev-list", "--max-count=1", commit, "--not", "HEAD", "--"];
        Ok(Some(checkout.text(&outside)?.trim().is_empty()))
    }

    /// Runs git in a directory where rockenv makes a repository, or outside of any. What others write to is for [`Git::open`]: there git would
    /// run the programs that its configuration names.
    pub(super) fn run(&self, directory: &Path, arguments: &[&str]) -> Result<String> {
        let program = self.program(self.rights())?;
        let said = self.finish(program, directory, arguments)?;
        Ok(String::from_utf8_lossy(&said).into_owned())
    }

    /// Returns whose rights git has on what belongs to nobody else.
    pub(super) fn rights(&self) -> Rights {
        match nix::unistd::geteuid().is_root() && self.user.uid != 0 {
            true => Rights::BuildUser(self.user.uid, self.user.gid),
            false => Rights::Own,
        }
    }

    /// Makes a call of git that runs no hook and asks nobody.
    pub(super) fn program(&self, rights: Rights) -> Result<Program> {
        let program = Program::find("git", "sources")?;
        let program = match rights {
            Rights::Own => program.inherit_env().without(&OTHER_REPOSITORY),
            Rights::BuildUser(uid, gid) => program
                .inherit_env()
                .without(&OTHER_REPOSITORY)
                .user(uid, gid),
            Rights::Owner(uid, gid) => program
                .env("HOME", "/")
                .env("GIT_CONFIG_GLOBAL", "/dev/null")
                .user(uid, gid),
        };
        Ok(program
            .env("GIT_TERMINAL_PROMPT", "0")
            // A look at a checkout changes nothing of it, not even what git remembers of it.
            .env("GIT_OPTIONAL_LOCKS", "0")
            .args(["-c", "core.fsmonitor=false"])
            .args(["-c", "core.hooksPath=/dev/null"])
            .args(["-c", "protocol.ext.allow=never"]))
    }

    /// Runs a call of git to its end and returns the bytes it writes.
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
                format!(
                    "`git {}` failed in `{}`",
                    arguments.join(" "),
                    directory.display()
                )
            })
    }

    /// Lets the caller look for signals, and stops if one came.
    pub(super) fn look(&self) -> Result<()> {
        (self.tick)();
        match self.cancel.load(Ordering::Relaxed) {
            true => Err(Error::new(
                crate::sys::error::Kind::Signal(2),
                "interrupted",
            )),
            false => Ok(()),
        }
    }
}
