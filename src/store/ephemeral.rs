//! Owns envs that end with the command that made them: `envs/<name>/ephemeral` says which command that is.
//!
//! That command keeps a lock on the file for as long as it lives. The kernel gives the lock back whatever becomes of the
//! command, so neither another process with its number nor another boot can pass for it, and it does not matter in which
//! namespace numbers are counted. What is written in the file is for people, and for its own children. Whoever locks an env
//! whose command is gone removes the env: nobody can go on with it by mistake.

use std::io::{Read as _, Write as _};
use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::check::names;
use super::layer::boot_id;
use super::{LockedEnv, Store, lock};
use crate::engine::hold::Ended;
use crate::sys::atomic;
use crate::sys::error::{Error, Kind, Result};

/// Name of the file in an env's directory.
pub(super) const FILE: &str = "ephemeral";

/// The command that an env ends with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Owner {
    /// Which boot of the machine it runs in.
    pub boot: String,
    /// Its process id.
    pub pid: u32,
    /// When it began, in the kernel's ticks since that boot.
    pub start: u64,
    /// What was typed.
    #[serde(default = "up")]
    pub command: String,
}

fn up() -> String {
    "up --ephemeral".to_owned()
}

impl Owner {
    fn this(command: &str) -> Self {
        let pid = std::process::id();
        Self {
            boot: boot_id(),
            pid,
            start: start_of(pid).unwrap_or_default(),
            command: command.to_owned(),
        }
    }

    /// Returns whether it is this process or the one that started it.
    fn is_ours(&self) -> bool {
        let parent = nix::unistd::getppid().as_raw().cast_unsigned();
        let near = self.pid == std::process::id() || self.pid == parent;
        near && self.boot == boot_id() && start_of(self.pid) == Some(self.start)
    }
}

/// Returns when a process began.
fn start_of(pid: u32) -> Option<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state ..., and the name may hold anything; the 22nd field counts.
    let (_, rest) = text.rsplit_once(") ")?;
    rest.split(' ').nth(19)?.parse().ok()
}

/// Holds an env's fate: with this value, or the process that has it, the env ends.
#[derive(Debug)]
pub struct Claim(#[expect(dead_code, reason = "its lock is what counts")] fs::File);

/// Whose an env is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays until somebody removes it.
    Kept,
    /// It ends with a command that lives.
    Owned(Option<Owner>),
    /// Its command is gone.
    Left(Option<Owner>),
}

/// Reads whose the env in `directory` is.
fn fate(directory: &Path) -> Result<Fate> {
    let mut file = match fs::File::open(directory.join(FILE)) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Fate::Kept),
        other => other?,
    };
    // Shared: two that ask at once are not in each other's way, and the owner never asks.
    let lives = match file.file().try_lock_shared() {
        Ok(()) => false,
        Err(std::fs::TryLockError::WouldBlock) => true,
        Err(std::fs::TryLockError::Error(error)) => return Err(error.into()),
    };
    let mut text = String::new();
    // That the file is there is enough: its words may be another version's.
    let owner = match file.read_to_string(&mut text) {
        Ok(_) => serde_json::from_str(&text).ok(),
        Err(_) => None,
    };
    Ok(match lives {
        true => Fate::Owned(owner),
        false => Fate::Left(owner),
    })
}

/// An env that was removed because its command is gone.
#[derive(Debug)]
pub struct Reaped {
    /// Its name.
    pub env: String,
    owner: Option<Owner>,
    ended: Ended,
}

impl Reaped {
    pub(super) fn new(env: &str, owner: Option<Owner>, ended: Ended) -> Self {
        Self {
            env: env.to_owned(),
            owner,
            ended,
        }
    }
}

impl std::fmt::Display for Reaped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let command = self
            .owner
            .as_ref()
            .map_or_else(up, |owner| owner.command.clone());
        write!(f, "{}: removed; its `rockenv {command}`", self.env)?;
        match &self.owner {
            Some(owner) if owner.boot == boot_id() => {
                write!(f, " (process {}) was killed", owner.pid)?;
            }
            Some(owner) => write!(f, " (process {}) ended with the machine", owner.pid)?,
            None => write!(f, " is gone")?,
        }
        match self.ended.processes {
            0 => {}
            1 => write!(f, ", and had left a process")?,
            processes => write!(f, ", and had left {processes} processes")?,
        }
        if self.ended.on_gpu > 0 {
            write!(f, ", {} of them with a GPU", self.ended.on_gpu)?;
        }
        Ok(())
    }
}

impl Store {
    /// Makes a new env that ends with this command, which is `up --ephemeral` or the like.
    pub fn claim(&self, name: &str, command: &str) -> Result<Claim> {
        let env = self.lock_env(name, "up", lock::WAIT)?;
        env.check_owner()?;
        if env.record().is_some() {
            return Err(Error::new(
                Kind::Usage,
                format!("env `{name}` exists and is not ephemeral"),
            )
            .help(format!(
                "rockenv up ... --ephemeral --name NEW, or first: rockenv rm {name}"
            )));
        }
        let text = serde_json::to_vec(&Owner::this(command))
            .map_err(|error| Error::unexpected("cannot encode an owner").source(error))?;
        let new = env.directory().join(format!("{}{FILE}", atomic::PREFIX));
        let mut file = fs::File::create(&new)?;
        file.write_all(&text)?;
        // Locked before anybody can see it, and on disk before anything of the env is.
        file.file()
            .try_lock()
            .map_err(|error| Error::unexpected("cannot lock a new file").source(error))?;
        file.sync_all()?;
        fs::rename(&new, env.directory().join(FILE))?;
        fs::File::open(env.directory())?.sync_all()?;
        Ok(Claim(file))
    }

    /// Returns whether an env is still there although the command that it should have ended with is gone.
    pub fn is_left(&self, name: &str) -> bool {
        matches!(fate(&self.env_dir(name)), Ok(Fate::Left(_)))
    }

    /// Returns the envs that are left of ephemeral commands.
    pub fn abandoned(&self) -> Result<Vec<String>> {
        let mut names = names(&self.root().join("envs"))?;
        names.retain(|name| self.is_left(name));
        Ok(names)
    }

    /// Removes what ephemeral commands left that were killed; what is in use still, by an `exec` say, stays for the next
    /// time. Returns what went, and why something could not.
    pub fn reap(&self) -> Result<(Vec<Reaped>, Vec<Error>)> {
        let (mut reaped, mut wrong) = (Vec::new(), Vec::new());
        for name in self.abandoned()? {
            match self.lock_env(&name, "up", lock::WAIT) {
                Ok(env) => reaped.extend(env.reaped),
                Err(error) if error.kind() == Kind::Busy => {}
                Err(error) => wrong.push(error),
            }
        }
        Ok((reaped, wrong))
    }
}

impl LockedEnv<'_> {
    /// Refuses an env that ends with another command.
    pub fn check_owner(&self) -> Result<()> {
        let (command, who) = match self.fate()? {
            Fate::Kept | Fate::Left(_) => return Ok(()),
            Fate::Owned(Some(owner)) if owner.is_ours() => return Ok(()),
            Fate::Owned(Some(owner)) => (owner.command, format!(" (process {})", owner.pid)),
            Fate::Owned(None) => (up(), String::new()),
        };
        Err(Error::busy(format!(
            "env `{}` ends with another `rockenv {command}`{who}",
            self.name()
        ))
        .help("wait for its end, or: rockenv up ... --name NEW"))
    }

    /// Returns whether the env ends with this command: somebody may have removed it, and even made another of its name.
    pub fn is_owned(&self) -> Result<bool> {
        Ok(matches!(self.fate()?, Fate::Owned(Some(owner)) if owner.is_ours()))
    }

    /// Says whose the env is.
    pub(super) fn fate(&self) -> Result<Fate> {
        fate(self.directory())
    }

    /// Makes an env one that stays: the last thing when it is removed.
    pub(super) fn disown(&self) -> Result<()> {
        match fs::remove_file(self.directory().join(FILE)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error.into()),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn write(directory: &Path, owner: &Owner) {
        fs::write(directory.join(FILE), serde_json::to_vec(owner).unwrap()).unwrap();
    }

    #[test]
    fn numbers_alone_keep_nothing() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(fate(directory.path()).unwrap(), Fate::Kept);
        let this = Owner::this(&up());
        assert!(this.is_ours() && this.start > 0);
        // Its number went to this process, or the machine was started again since.
        let reused = Owner {
            start: this.start - 1,
            ..this.clone()
        };
        let rebooted = Owner {
            boot: "another".to_owned(),
            ..this.clone()
        };
        for owner in [reused, rebooted, this] {
            write(directory.path(), &owner);
            assert_eq!(
                fate(directory.path()).unwrap(),
                Fate::Left(Some(owner.clone()))
            );
        }
        fs::write(directory.path().join(FILE), "").unwrap();
        assert_eq!(fate(directory.path()).unwrap(), Fate::Left(None));
    }

    #[test]
    fn a_claim_lasts_as_long_as_its_lock() {
        let directory = tempfile::tempdir().unwrap();
        write(directory.path(), &Owner::this(&up()));
        let file = fs::File::open(directory.path().join(FILE)).unwrap();
        file.file().try_lock().unwrap();
        let claim = Claim(file);
        // However often it is looked at, and by how many at once.
        for _ in 0..2 {
            assert_eq!(
                fate(directory.path()).unwrap(),
                Fate::Owned(Some(Owner::this(&up())))
            );
        }
        drop(claim);
        assert!(matches!(fate(directory.path()).unwrap(), Fate::Left(_)));
    }

    #[test]
    fn only_this_boots_process_with_the_same_start_is_ours() {
        let this = Owner::this(&up());
        let reused = Owner {
            start: this.start + 1,
            ..this.clone()
        };
        let rebooted = Owner {
            boot: String::new(),
            ..this
        };
        assert!(!reused.is_ours() && !rebooted.is_ours());
    }
}
