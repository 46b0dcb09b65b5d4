//! Owns envs that end with the command that made them: `envs/<name>/ephemeral` names that command.
//!
//! The command keeps a lock on the file for as long as it lives. The kernel releases the lock however the command
//! ends, so neither a process with a reused id nor another boot can pass for it, and pid namespaces do not matter.
//! The file's content is for people, and for the command's own children. A command that locks an env whose owning
//! command is gone removes the env, so that no user continues with it by mistake.

use std::io::Write as _;
use std::path::Path;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::layer::boot_id;
use super::{LockedEnv, Store, lock};
use crate::engine::hold::Ended;
use crate::plan::ids::EnvName;
use crate::sys::atomic;
use crate::sys::error::{Error, Kind, Result, encoded, if_exists};
use crate::sys::host::system_text;

pub(super) const FILE: &str = "ephemeral";

/// The command that owns an ephemeral env.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Owner {
    pub boot: String,
    pub pid: u32,
    /// When it began, in the kernel's ticks since that boot.
    pub start: u64,
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

    /// Returns whether it is this process or its parent.
    fn is_ours(&self) -> bool {
        let parent = nix::unistd::getppid().as_raw().cast_unsigned();
        let near = self.pid == std::process::id() || self.pid == parent;
        near && self.boot == boot_id() && start_of(self.pid) == Some(self.start)
    }
}

fn start_of(pid: u32) -> Option<u64> {
    let text = system_text(format!("/proc/{pid}/stat")).ok()?;
    // pid (name) state ..., and the name may contain anything; the start time is the 22nd field.
    let (_, rest) = text.rsplit_once(") ")?;
    rest.split(' ').nth(19)?.parse().ok()
}

/// Ties an env's life to this value, or to the process that holds it.
#[derive(Debug)]
pub struct OwnerLock(#[expect(dead_code, reason = "its lock is what counts")] fs::File);

/// Whether an env stays.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Fate {
    /// It stays until a user removes it.
    Kept,
    /// It ends with a running command.
    Owned(Option<Owner>),
    /// Its command is gone.
    Left(Option<Owner>),
}

fn fate(directory: &Path) -> Result<Fate> {
    let Some(file) = if_exists(fs::File::open(directory.join(FILE)))? else {
        return Ok(Fate::Kept);
    };
    // In shared mode, because readers must not disturb each other. The owner never checks.
    let is_left = lock::is_taken(file.file().try_lock_shared())?;
    // The file's existence suffices: another version may have written other content.
    let text = std::io::read_to_string(&file).ok();
    let owner = text.and_then(|text| serde_json::from_str(&text).ok());
    Ok(match is_left {
        true => Fate::Left(owner),
        false => Fate::Owned(owner),
    })
}

/// An env that was removed because its command is gone.
#[derive(Debug)]
pub struct Reaped {
    pub env: EnvName,
    pub(super) owner: Option<Owner>,
    pub(super) ended: Ended,
}

impl std::fmt::Display for Reaped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let owner = self.owner.as_ref();
        let command = owner.map_or_else(up, |owner| owner.command.clone());
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
            1 => write!(f, ", and left a process running")?,
            processes => write!(f, ", and left {processes} processes running")?,
        }
        if self.ended.on_gpu > 0 {
            write!(f, ", {} of them with a GPU", self.ended.on_gpu)?;
        }
        Ok(())
    }
}

impl Store {
    /// Creates a new env that ends with this command, which is `up --ephemeral` or similar.
    pub fn create_ephemeral(&self, name: &EnvName, command: &str) -> Result<OwnerLock> {
        let env = self.lock_env(name, "up", lock::WAIT)?;
        env.check_owner()?;
        if env.record().is_some() {
            let error = usage!("env `{name}` exists and is not ephemeral");
            let other = "rockenv up ... --ephemeral --name NEW";
            return Err(error.help(format!("{other}, or first: rockenv rm {name}")));
        }
        let text = encoded(serde_json::to_vec(&Owner::this(command)), "an owner")?;
        let new = env.directory().join(format!("{}{FILE}", atomic::PREFIX));
        let mut file = fs::File::create(&new)?;
        file.write_all(&text)?;
        // Lock it before other processes can see it, and sync it before any of the env's data.
        file.file()
            .try_lock()
            .map_err(|error| unexpected!("cannot lock a new file").source(error))?;
        file.sync_all()?;
        fs::rename(&new, env.directory().join(FILE))?;
        fs::File::open(env.directory())?.sync_all()?;
        Ok(OwnerLock(file))
    }

    /// Returns whether the env ends with this command or its parent.
    pub(crate) fn is_ephemeral(&self, name: &EnvName) -> bool {
        matches!(fate(&self.env_dir(name)), Ok(Fate::Owned(Some(owner))) if owner.is_ours())
    }

    /// Returns whether an env still exists although its owning command is gone.
    pub fn is_abandoned(&self, name: &EnvName) -> bool {
        matches!(fate(&self.env_dir(name)), Ok(Fate::Left(_)))
    }

    pub fn abandoned(&self) -> Result<Vec<EnvName>> {
        let mut names = self.env_names()?;
        names.retain(|name| self.is_abandoned(name));
        Ok(names)
    }

    /// Removes envs that killed ephemeral commands left, except those in use. Returns the removed envs, and errors.
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
        Err(busy!(
            "env `{}` belongs to a running `rockenv {command}`{who}, which removes it at its end",
            self.name()
        )
        .help("wait until it ends, or build another env: rockenv up ... --name NEW"))
    }

    /// Returns whether the env still ends with this command: it may have been removed, and even recreated.
    pub fn is_owned(&self) -> Result<bool> {
        Ok(matches!(self.fate()?, Fate::Owned(Some(owner)) if owner.is_ours()))
    }

    pub(super) fn fate(&self) -> Result<Fate> {
        fate(self.directory())
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
        // The program's name may be in any encoding.
        let name = fs::read("/proc/self/comm").unwrap();
        fs::write("/proc/self/comm", b"caf\xe9").unwrap();
        let this = Owner::this(&up());
        assert!(this.is_ours() && this.start > 0);
        fs::write("/proc/self/comm", name.trim_ascii_end()).unwrap();
        // Its process id was reused, or the machine was rebooted since.
        let reused = Owner {
            start: this.start - 1,
            ..this.clone()
        };
        let rebooted = Owner {
            boot: "another".to_owned(),
            ..this.clone()
        };
        assert!(!reused.is_ours() && !rebooted.is_ours());
        for owner in [reused, rebooted, this] {
            write(directory.path(), &owner);
            let left = Fate::Left(Some(owner));
            assert_eq!(fate(directory.path()).unwrap(), left);
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
        let claim = OwnerLock(file);
        // Checking the file does not release it.
        for _ in 0..2 {
            let owned = Fate::Owned(Some(Owner::this(&up())));
            assert_eq!(fate(directory.path()).unwrap(), owned);
        }
        drop(claim);
        assert_soon!(matches!(fate(directory.path()).unwrap(), Fate::Left(_)));
    }
}
