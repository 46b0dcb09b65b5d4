//! Owns locks: `flock` on files that are never deleted, with the holder's name inside for messages.
//!
//! Order: an env's lock before the global lock. `fork` and `fsck` take several envs' locks, with a limited wait.

use std::ffi::OsStr;
use std::fs::TryLockError;
use std::io::{ErrorKind, Seek as _, Write as _};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use fs_err as fs;
use serde::{Deserialize, Serialize};

use crate::sys::account::{self, name_of};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, encoded, is_full};
use crate::sys::shell::quoted_path;
use crate::sys::signals::stop_if_pending;
use crate::tree::mounts;

/// How long to wait for an env's lock before the command fails.
pub(crate) const WAIT: Duration = Duration::from_secs(5);

/// How long to wait for the store's lock. Commands hold it briefly, except to unlink trees on a full disk.
pub(super) const STORE_WAIT: Duration = Duration::from_secs(120);

/// How long a command waits for a lock before it reports the wait. Most waits are shorter.
const SILENCE: Duration = Duration::from_secs(1);

type Show = Box<dyn Fn(&str) + Send + Sync>;

static SHOW: OnceLock<Show> = OnceLock::new();

/// Sets, once, the function that shows waits for locks to the user. The code that takes locks does not print.
pub(crate) fn show_waits(show: Show) {
    SHOW.set(show).ok();
}

#[derive(Debug)]
pub(crate) struct Wait {
    begun: Instant,
    is_told: bool,
}

impl Wait {
    pub(crate) fn begin() -> Self {
        Self {
            begun: Instant::now(),
            is_told: false,
        }
    }

    /// Tells the user, once and only if the wait is long, that the command waits for `what`, whose lock is at `path`.
    /// A signal ends a long wait.
    pub(crate) fn tell(&mut self, path: &Path, what: &str) -> Result<()> {
        if let Some(text) = self.text(path, what)
            && let Some(show) = SHOW.get()
        {
            show(&text);
        }
        match self.is_told {
            true => stop_if_pending(),
            false => Ok(()),
        }
    }

    fn text(&mut self, path: &Path, what: &str) -> Option<String> {
        if self.is_told || self.begun.elapsed() < SILENCE {
            return None;
        }
        self.is_told = true;
        Some(format!(
            "waiting for {what}, held by {}",
            holder_named(path)
        ))
    }
}

/// How many times to read the list of locks before no process seems to hold one.
const LOOKS: usize = 3;

#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Holder {
    pub pid: u32,
    /// The command, such as `up`.
    pub verb: String,
    pub since: jiff::Timestamp,
    /// The user behind `sudo`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<u32>,
}

/// A lock that is held until dropped, by every process that has its descriptor.
#[derive(Debug)]
pub struct Lock {
    file: fs::File,
}

impl AsFd for Lock {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.file().as_fd()
    }
}

impl Lock {
    /// Takes the lock at `path` exclusively for `verb`, or fails with the holder's name after `wait`.
    pub fn exclusive(path: &Path, what: &str, verb: &str, wait: Duration) -> Result<Self> {
        let take = || Self::try_exclusive(path);
        retry(take, 5, until(path, what, wait))?.signed(verb)
    }

    /// Takes the lock at `path` exclusively for `verb`, however long another process holds it. Meanwhile calls
    /// `waits` repeatedly with the holder; its error ends the wait.
    pub fn exclusive_waiting(
        path: &Path,
        verb: &str,
        waits: &mut dyn FnMut(&str) -> Result<()>,
    ) -> Result<Self> {
        let take = || Self::try_exclusive(path);
        let waits = || waits(&format!("waits for {}", holder_named(path)));
        retry(take, 100, waits)?.signed(verb)
    }

    /// Takes the lock without waiting; `None` if another process holds it.
    pub fn try_exclusive(path: &Path) -> Result<Option<Self>> {
        Self::try_lock(open(path)?)
    }

    /// Locks a directory itself, as a full disk may have no room for a lock file; `None` if it is locked.
    pub(crate) fn try_directory(path: &Path) -> Result<Option<Self>> {
        Self::try_lock(beneath::open_real_dir(path)?)
    }

    fn try_lock(file: fs::File) -> Result<Option<Self>> {
        let is_taken = is_taken(file.file().try_lock())?;
        Ok(is_taken.then_some(Self { file }))
    }

    pub fn shared(path: &Path, what: &str, wait: Duration) -> Result<Self> {
        let file = open(path)?;
        let take = || Ok(is_taken(file.file().try_lock_shared())?.then_some(()));
        retry(take, 2, until(path, what, wait))?;
        Ok(Self { file })
    }

    /// Records the holder of the lock.
    fn signed(mut self, verb: &str) -> Result<Self> {
        let holder = Holder {
            pid: std::process::id(),
            verb: verb.to_owned(),
            since: jiff::Timestamp::now(),
            user: account::caller().person().map(|person| person.uid),
        };
        let text = encoded(serde_json::to_string(&holder), "lock")?;
        self.file.set_len(0)?;
        self.file.seek(std::io::SeekFrom::Start(0))?;
        match self.file.write_all(text.as_bytes()) {
            // The name is only for messages, and the holder may be about to free space.
            Err(error) if !is_full(&error) => Err(error.into()),
            _ => Ok(self),
        }
    }
}

/// Takes a lock. While another process holds it, calls `waits`, whose error ends the wait, and pauses for some
/// milliseconds.
fn retry<T>(
    mut take: impl FnMut() -> Result<Option<T>>,
    pause: u64,
    mut waits: impl FnMut() -> Result<()>,
) -> Result<T> {
    loop {
        if let Some(taken) = take()? {
            return Ok(taken);
        }
        waits()?;
        std::thread::sleep(Duration::from_millis(pause));
    }
}

/// Returns a function for [`retry`] that tells the user of the wait, and ends it after `wait`.
fn until(path: &Path, what: &str, wait: Duration) -> impl FnMut() -> Result<()> {
    let deadline = Instant::now() + wait;
    let mut wait = Wait::begin();
    move || match Instant::now() < deadline {
        true => wait.tell(path, what),
        false => Err(busy(path, what)),
    }
}

/// Returns whether a lock was taken; false if another process holds it.
pub(super) fn is_taken(tried: std::result::Result<(), TryLockError>) -> Result<bool> {
    match tried {
        Ok(()) => Ok(true),
        Err(TryLockError::WouldBlock) => Ok(false),
        Err(TryLockError::Error(error)) => Err(error.into()),
    }
}

/// Returns the holder of the lock at `path`, if any, without taking it.
pub(crate) fn holder(path: &Path) -> Option<Holder> {
    holder_in(path, lists())
}

/// Reads the kernel's list of locks several times: it lists locks in parts, and skips an entry if another lock ends
/// between two of them.
pub(crate) fn lists() -> impl Iterator<Item = String> {
    (0..LOOKS).filter_map(|_| fs::read_to_string("/proc/locks").ok())
}

/// Returns the holder of the lock at `path` according to these lists, which serve any number of locks.
pub(crate) fn holder_in(
    path: &Path,
    lists: impl IntoIterator<Item = impl AsRef<str>>,
) -> Option<Holder> {
    let holder = signer(path)?;
    let inode = fs::metadata(path).ok()?.ino();
    let holds = |locks: &str| takers(locks, inode, "WRITE").any(|pid| pid == holder.pid);
    let is_held = lists.into_iter().any(|locks| holds(locks.as_ref()));
    is_held.then_some(holder)
}

/// Returns the process that last took the lock at `path` exclusively.
fn signer(path: &Path) -> Option<Holder> {
    serde_json::from_slice(&fs::read(path).ok()?).ok()
}

/// Returns whether the process that last took the lock at `path` is gone: only its children can still hold it.
pub(super) fn signer_is_gone(path: &Path) -> bool {
    signer(path).is_some_and(|holder| !Path::new(&format!("/proc/{}", holder.pid)).exists())
}

/// Returns a process that holds the lock at `path` in shared mode. Readers do not sign it.
fn reader(path: &Path) -> Option<u32> {
    let inode = fs::metadata(path).ok()?.ino();
    let locks = fs::read_to_string("/proc/locks").ok()?;
    takers(&locks, inode, "READ").next()
}

/// Returns the processes with a lock of a kind in `/proc/locks`: `1: FLOCK  ADVISORY  WRITE 4242 fe:00:131 0 EOF`.
///
/// The device is not compared, because btrfs reports another one there than for the file. The process that took the
/// lock is named even if only its children still hold it.
fn takers(locks: &str, inode: u64, kind: &str) -> impl Iterator<Item = u32> {
    locks.lines().filter_map(move |line| {
        let fields: Vec<&str> = line.split_whitespace().collect();
        let [_, "FLOCK", _, access, taker, place, ..] = fields[..] else {
            return None;
        };
        let at = place.rsplit(':').next()?.parse::<u64>().ok()?;
        (access == kind && at == inode).then(|| taker.parse::<u32>().ok())?
    })
}

fn open(path: &Path) -> Result<fs::File> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    fs::OpenOptions::new()
        .read(true)
        .write(true)
        .create(true)
        .truncate(false)
        .mode(0o600)
        .open(path)
        .map_err(|error| read_only(path, error))
}

/// Explains a failure to write at `path` in a store whose file system is read-only.
pub(super) fn read_only(path: &Path, error: std::io::Error) -> Error {
    let mut above = path.ancestors().skip(1);
    let store = above.find(|directory| directory.join("format").exists());
    let (ErrorKind::ReadOnlyFilesystem, Some(store)) = (error.kind(), store) else {
        return error.into();
    };
    let points = mounts::at_or_below(Path::new("/")).unwrap_or_default();
    let points = points.into_iter().filter(|point| store.starts_with(point));
    let point = points.max_by_key(|point| point.components().count());
    let point = point.unwrap_or_else(|| store.to_owned());
    unavailable!("the store at `{}` is mounted read-only", store.display()).help(format!(
        "mount -o remount,rw {}; if the kernel made it read-only after errors, `dmesg` names them",
        quoted_path(&point)
    ))
}

/// Describes the process that holds a lock, or else the last one that took it exclusively, for messages.
///
/// An env's lock is never shared, so the list of locks is not read for it: that takes the kernel up to 15 ms, longer
/// than an `exec` in a running container.
fn holder_named(path: &Path) -> String {
    if env_of(path).is_none()
        && holder(path).is_none()
        && let Some(pid) = reader(path)
    {
        return format!("another command (process {pid})");
    }
    let Some(holder) = signer(path) else {
        return "another command".to_owned();
    };
    let own = account::caller().person().map(|person| person.uid);
    let other = holder.user.filter(|user| Some(*user) != own);
    let of = other.map_or_else(String::new, |user| format!(" of user {}", name_of(user)));
    format!(
        "`rockenv {}` (process {}{of}, since {})",
        holder.verb,
        holder.pid,
        holder.since.strftime("%H:%M:%S UTC")
    )
}

fn busy(path: &Path, what: &str) -> Error {
    let down = env_of(path).map_or_else(String::new, |env| {
        format!(", or `rockenv down {}`", quoted_path(Path::new(env)))
    });
    busy!("{what} is held by {}", holder_named(path)).help(format!(
        "wait for that command, or stop it with Ctrl-C in its terminal{down}"
    ))
}

/// Returns the name of the env whose lock is at `path`.
fn env_of(path: &Path) -> Option<&OsStr> {
    let env = path.parent().filter(|env| env_lock(env) == path)?;
    env.parent().filter(|above| above.ends_with("envs"))?;
    env.file_name()
}

pub(crate) fn env_lock(env: &Path) -> PathBuf {
    env.join("lock")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_second_taker_learns_who_has_it() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let before: Vec<String> = lists().collect();
        let first = Lock::exclusive(&path, "env `a`", "up", WAIT).unwrap();
        let error = Lock::exclusive(&path, "env `a`", "rm", Duration::ZERO).unwrap_err();
        let holder_of_a = "env `a` is held by `rockenv up` (process";
        assert!(error.message().starts_with(holder_of_a), "{error}");
        assert_eq!(error.kind().exit_code(), 6);
        assert_eq!(holder(&path).unwrap().verb, "up");
        // Lists that were read before are not read again.
        assert!(holder_in(&path, &before).is_none());
        let env = directory.path().join("envs/mine");
        fs::create_dir_all(&env).unwrap();
        let _lock = Lock::exclusive(&env_lock(&env), "env `mine`", "up", WAIT).unwrap();
        let named = Lock::exclusive(&env_lock(&env), "env `mine`", "rm", Duration::ZERO);
        for (error, down) in [(&error, false), (&named.unwrap_err(), true)] {
            let help = error.help_text().unwrap();
            assert_eq!(help.contains("rockenv down mine"), down, "{help}");
        }
        let of = r#"{"pid": 1, "verb": "up", "since": "2026-01-02T03:04:05Z", "user": 4321}"#;
        fs::write(&path, of).unwrap();
        let error = busy(&path, "it");
        assert_has!(error.message(), "(process 1 of user 4321, since");
        drop(first);
        // A child of another test inherits the lock until it calls exec.
        drop(Lock::exclusive(&path, "env `a`", "rm", WAIT * 20).unwrap());
        assert_soon!(holder(&path).is_none());
    }

    #[test]
    fn a_long_wait_is_told_once_with_the_holder() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let own = std::process::id();
        let long = || Wait {
            begun: Instant::now().checked_sub(SILENCE).unwrap(),
            is_told: false,
        };
        let first = Lock::exclusive(&path, "the store", "gc", WAIT).unwrap();
        assert_eq!(Wait::begin().text(&path, "the store"), None);
        let mut wait = long();
        let told = wait.text(&path, "the store").unwrap();
        let start = "waiting for the store, held by `rockenv gc` (process";
        let start = format!("{start} {own}, since ");
        assert!(told.starts_with(&start), "{told}");
        assert_eq!(wait.text(&path, "the store"), None);
        drop(first);
        // Readers do not sign, so the last signer is not the holder.
        let _shared = Lock::shared(&path, "the store", WAIT * 20).unwrap();
        let expected = format!("waiting for the store, held by another command (process {own})");
        assert_soon!(long().text(&path, "the store").as_ref() == Some(&expected));
    }

    #[test]
    fn whoever_waits_is_told_for_whom_and_can_give_up() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("lock");
        let mut first = Some(Lock::exclusive(&path, "it", "pull", WAIT).unwrap());
        let stop = |text: &str| {
            let expected = format!("waits for `rockenv pull` (process {}", std::process::id());
            assert!(text.starts_with(&expected), "{text}");
            Err(unexpected!("stop"))
        };
        Lock::exclusive_waiting(&path, "up", &mut { stop }).unwrap_err();
        let mut asked = 0;
        let lock = Lock::exclusive_waiting(&path, "up", &mut |_| {
            // After this test drops the lock, a child of another test may still hold it, until it calls exec.
            asked += u32::from(first.is_some());
            if asked == 2 {
                first = None;
            }
            Ok(())
        });
        assert_eq!((holder(&path).unwrap().verb.as_str(), asked), ("up", 2));
        drop(lock);
    }
}
