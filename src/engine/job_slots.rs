//! Owns the machine's budget of jobs: how many each env may use at once.
//!
//! A slot of the budget is a byte in the store's file `jobs`. A process owns the slot while it has the byte locked. The
//! kernel releases the lock however the process ends, so there is no broker that could die, and nothing to recover. The
//! holders coordinate through the same file: each has a locked entry with its number of slots and its need, and each
//! decides for itself by the same rule (`target`).

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::errno::Errno;
use nix::fcntl::{FcntlArg, fcntl};
use nix::libc;
use serde::{Deserialize, Serialize};

use crate::plan::ids::EnvName;
use crate::sys::error::{Result, ResultExt as _};

/// Length of an entry's record: slots, need, name, and number of jobs that fit into memory.
const ENTRY: u64 = 64;
/// Maximum length of the name in a record.
const NAME: usize = 55;
/// More entries than envs can run at once.
const ENTRIES: u32 = 4096;
/// Maximum budget. A FIFO has room for this many tokens even if it gets only one page.
pub(crate) const MOST_JOBS: u32 = 4096;
/// Mode of the file.
const ONLY_OWNER: u32 = 0o600;
/// Offset of the bytes for slots: after every entry.
const SLOTS: u64 = 1 << 40;

/// The record of another entry.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Other {
    pub env: String,
    pub held: u32,
    need: Need,
    together: u32,
}

/// Whether an env could use more slots.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Need {
    /// It has unused tokens.
    None,
    /// It uses all its slots, and may not have more.
    Enough,
    /// It uses all its slots.
    More,
}

/// An entry in the budget, and the slots that it holds.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Entry {
    slot: u32,
    pub(super) total: u32,
    /// See [`Sizing::together`](crate::plan::jobs::Sizing::together).
    pub(super) together: u32,
    held: Vec<u32>,
    env: EnvName,
}

/// An entry, and the file with its locks.
#[derive(Debug)]
pub(crate) struct SlotClaim {
    file: fs::File,
    pub(super) entry: Entry,
}

/// A [`SlotClaim`] on its way to another process, together with the file's descriptor, which carries the locks.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Ticket {
    #[serde(flatten)]
    pub(super) entry: Entry,
    /// Maximum number of slots for the env.
    pub(super) cap: u32,
    /// Path of the FIFO outside.
    pub(super) fifo: PathBuf,
}

impl SlotClaim {
    /// Takes an entry for `env` in the budget of `total` slots in the store's file `path`. The machine's memory has
    /// room for `together` jobs of this env's size.
    pub(crate) fn open(path: &Path, total: u32, together: u32, env: &EnvName) -> Result<Self> {
        let file = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(ONLY_OWNER)
            .open(path)?;
        // Older versions let every user read the file, and a reader can lock its entries.
        file.set_permissions(std::fs::Permissions::from_mode(ONLY_OWNER))?;
        for slot in 0..ENTRIES {
            if lock(&file, u64::from(slot) * ENTRY)? {
                let entry = Entry {
                    slot,
                    total: total.max(1),
                    together,
                    held: Vec::new(),
                    env: env.clone(),
                };
                let claim = Self { file, entry };
                claim.publish(Need::More)?;
                return Ok(claim);
            }
        }
        Err(busy!(
            "all {ENTRIES} entries of `{}` are taken",
            path.display()
        ))
    }

    /// Takes over a claim from [`SlotClaim::pass`].
    pub(super) fn receive(entry: Entry, file: OwnedFd) -> Self {
        let file = fs::File::from_parts(file.into(), "jobs");
        Self { file, entry }
    }

    /// Takes another slot, if one is free.
    pub(crate) fn take(&mut self) -> Result<bool> {
        for slot in 0..self.entry.total {
            if !self.entry.held.contains(&slot) && lock(&self.file, SLOTS + u64::from(slot))? {
                self.entry.held.push(slot);
                return Ok(true);
            }
        }
        Ok(false)
    }

    pub(super) fn release(&mut self) -> Result<()> {
        if let Some(slot) = self.entry.held.pop() {
            set_lock(&self.file, SLOTS + u64::from(slot), libc::F_UNLCK)?;
        }
        Ok(())
    }

    pub(super) fn count(&self) -> u32 {
        u32::try_from(self.entry.held.len()).unwrap_or(u32::MAX)
    }

    pub(super) fn publish(&self, need: Need) -> Result<()> {
        let mut record = [0; ENTRY as usize];
        record[..4].copy_from_slice(&self.count().to_le_bytes());
        record[4] = need as u8;
        let name = &self.entry.env.as_bytes()[..self.entry.env.len().min(NAME)];
        record[5..5 + name.len()].copy_from_slice(name);
        record[5 + NAME..].copy_from_slice(&self.entry.together.to_le_bytes());
        self.file
            .file()
            .write_all_at(&record, u64::from(self.entry.slot) * ENTRY)?;
        Ok(())
    }

    /// Returns the records of the other entries that are taken.
    pub(crate) fn others(&self) -> Result<Vec<Other>> {
        slot_holders(&self.file, |slot| slot != u64::from(self.entry.slot))
    }

    /// Passes the claim to another process: its description, and the descriptor to send along.
    pub(crate) fn pass(self, cap: u32, fifo: PathBuf) -> (Ticket, OwnedFd) {
        let ticket = Ticket {
            entry: self.entry,
            cap: cap.max(1),
            fifo,
        };
        (ticket, self.file.into_parts().0.into())
    }
}

/// Returns the records of the entries in `file` that are taken and have a wanted number.
fn slot_holders(file: &fs::File, is_wanted: impl Fn(u64) -> bool) -> Result<Vec<Other>> {
    let mut holders = Vec::new();
    for slot in (0..file.metadata()?.len() / ENTRY).filter(|slot| is_wanted(*slot)) {
        if !is_locked(file, slot * ENTRY)? {
            continue;
        }
        let mut record = [0; ENTRY as usize];
        file.file().read_exact_at(&mut record, slot * ENTRY)?;
        let [a, b, c, d, need, name @ .., e, f, g, h] = record;
        let name = name.split(|byte| *byte == 0).next().unwrap_or_default();
        holders.push(Other {
            env: String::from_utf8_lossy(name).into_owned(),
            held: u32::from_le_bytes([a, b, c, d]),
            need: match need {
                0 => Need::None,
                1 => Need::Enough,
                _ => Need::More,
            },
            together: match u32::from_le_bytes([e, f, g, h]) {
                // Older versions do not write this number.
                0 => u32::MAX,
                jobs => jobs,
            },
        });
    }
    Ok(holders)
}

/// Returns how many slots of the budget in `file` an env has, if it has an entry.
pub(super) fn held(file: &fs::File, env: &EnvName) -> Result<Option<u32>> {
    // Names are truncated to the size of an entry's record.
    let name = &env.as_bytes()[..env.len().min(NAME)];
    let mut holders = slot_holders(file, |_| true)?;
    holders.retain(|holder| holder.env.as_bytes() == name);
    let held = holders.into_iter().map(|holder| holder.held);
    Ok(held.reduce(|sum, held| sum + held))
}

/// Locks a byte of the file until this open file is closed; returns whether the byte was free.
pub(super) fn lock(file: &fs::File, at: u64) -> Result<bool> {
    set_lock(file, at, libc::F_WRLCK)
}

fn set_lock(file: &fs::File, at: u64, kind: i32) -> Result<bool> {
    match fcntl(file.file().as_fd(), FcntlArg::F_OFD_SETLK(&range(at, kind))) {
        Ok(_) => Ok(true),
        Err(Errno::EAGAIN | Errno::EACCES) => Ok(false),
        Err(error) => Err(error).context(|| format!("cannot lock `{}`", file.path().display())),
    }
}

/// Returns whether another open file has locked the byte.
pub(super) fn is_locked(file: &fs::File, at: u64) -> Result<bool> {
    let mut range = range(at, libc::F_WRLCK);
    fcntl(file.file().as_fd(), FcntlArg::F_OFD_GETLK(&mut range))
        .context(|| format!("cannot look at `{}`", file.path().display()))?;
    Ok(i32::from(range.l_type) != libc::F_UNLCK)
}

fn range(at: u64, kind: i32) -> libc::flock {
    libc::flock {
        l_type: i16::try_from(kind).unwrap_or_default(),
        l_whence: 0,
        l_start: i64::try_from(at).unwrap_or(i64::MAX),
        l_len: 1,
        l_pid: 0,
    }
}

/// The state of an env, for [`target`].
#[derive(Clone, Copy, Debug)]
pub(super) struct EnvSlots {
    pub(super) held: u32,
    /// Slots that it always keeps.
    pub(super) base: u32,
    /// Maximum number of slots.
    pub(super) limit: u32,
    /// Number of jobs of this env's size that the machine's memory has room for.
    pub(super) together: u32,
    /// Unused tokens.
    pub(super) idle: u32,
    pub(super) need: Need,
}

/// Returns how many jobs of an env fit into memory beside those of `others`, if `together` of them fill the machine's
/// memory.
fn room<'a>(together: u32, others: impl Iterator<Item = &'a Other>) -> u32 {
    const WHOLE: u64 = 1 << 20;
    let part = |other: &Other| u64::from(other.held) * WHOLE / u64::from(other.together.max(1));
    let taken: u64 = others.map(part).sum();
    let room = u64::from(together) * WHOLE.saturating_sub(taken) / WHOLE;
    u32::try_from(room).unwrap_or(u32::MAX)
}

/// Returns how many slots an env should have, for a budget of `total`.
///
/// If no other env asks for more, an env takes the free slots and keeps its unused tokens. Otherwise unused tokens go
/// to the envs that ask, and any env with more than an equal share releases the rest as its jobs end. A slot is free
/// only if memory has room for its job, so an equal share is fewer slots for an env with larger jobs.
pub(super) fn target(total: u32, mine: EnvSlots, others: &[Other]) -> u32 {
    let EnvSlots {
        held,
        base,
        limit,
        together,
        idle,
        need,
    } = mine;
    let limit = limit.max(base);
    if held > limit {
        return limit;
    }
    let taken: u32 = others.iter().map(|other| other.held).sum();
    let fitting = room(together, others.iter()).saturating_sub(held);
    let free = total.saturating_sub(held + taken).min(fitting);
    let (spare, busy): (Vec<&Other>, Vec<&Other>) =
        others.iter().partition(|other| other.need == Need::None);
    let rest = total.saturating_sub(spare.iter().map(|other| other.held).sum());
    let rest = rest.min(room(together, spare.into_iter()));
    let share = (rest / (1 + u32::try_from(busy.len()).unwrap_or(u32::MAX - 1))).max(1);
    // An env may hold more slots than memory has room for: its first job starts without room, and two envs may take the
    // same room at once. Unused tokens need no memory.
    let most = room(together, busy.iter().copied()).max(share).max(base);
    if held > most {
        return most;
    }
    let poor = others.iter().filter(|other| other.need == Need::More);
    let Some(poorest) = poor.map(|other| other.held).min() else {
        // No other env asks: a token that stays here is available at once.
        return limit.min(held + free);
    };
    if need == Need::None {
        return held.saturating_sub(idle).max(base);
    }
    if held > share && poorest < share {
        return share.max(base);
    }
    // The env with the fewest slots may have no room for another of its large jobs.
    if need == Need::More && free > 0 && (held < share || held <= poorest) {
        return limit.min(held + 1);
    }
    held
}

#[cfg(test)]
mod tests {
    use super::*;

    fn other(held: u32, need: Need) -> Other {
        Other {
            env: "b".into(),
            held,
            need,
            together: u32::MAX,
        }
    }

    fn mine(held: u32, idle: u32, need: Need) -> EnvSlots {
        EnvSlots {
            held,
            base: 1,
            limit: 8,
            together: u32::MAX,
            idle,
            need,
        }
    }

    #[test]
    fn alone_an_env_has_all_it_may() {
        assert_eq!(target(8, mine(1, 0, Need::More), &[]), 8);
        assert_eq!(target(16, mine(1, 0, Need::More), &[]), 8);
        assert_eq!(target(8, mine(8, 5, Need::None), &[]), 8);
    }

    #[test]
    fn two_that_are_busy_come_to_equal_shares() {
        let (mut a, mut b) = (8, 1);
        for _ in 0..20 {
            let to = target(8, mine(a, 0, Need::Enough), &[other(b, Need::More)]);
            // At most one token comes back per round.
            a = to.max(a - 1);
            b = target(8, mine(b, 0, Need::More), &[other(a, Need::Enough)]);
        }
        assert_eq!((a, b), (4, 4));
    }

    #[test]
    fn memory_has_room_for_the_jobs_of_all_envs() {
        let mine = |held, need| EnvSlots {
            together: 8,
            ..mine(held, 0, need)
        };
        let large = |held, need| Other {
            together: 8,
            ..other(held, need)
        };
        let (mut a, mut b) = (8, 1);
        for _ in 0..20 {
            let to = target(16, mine(a, Need::Enough), &[large(b, Need::More)]);
            a = to.max(a - 1);
            b = target(16, mine(b, Need::More), &[large(a, Need::Enough)]);
            assert!(a + b <= 8, "{a} {b}");
        }
        assert_eq!((a, b), (4, 4));
        // An env with large jobs and one with small jobs each get half of the memory, whichever began first.
        let busy = |held, together| EnvSlots {
            together,
            limit: together,
            ..mine(held, Need::More)
        };
        let beside = |held, together| Other {
            together,
            ..other(held, Need::More)
        };
        for (mut a, mut b) in [(2, 1), (1, 16)] {
            for _ in 0..20 {
                a = target(16, busy(a, 2), &[beside(b, 16)]).max(a - 1);
                b = target(16, busy(b, 16), &[beside(a, 2)]).max(b - 1);
            }
            assert_eq!((a, b), (1, 8));
        }
        // Jobs of another size, and of an unknown size.
        for (together, held) in [(2, 4), (u32::MAX, 8)] {
            let other = Other {
                together,
                ..other(1, Need::Enough)
            };
            assert_eq!(target(16, mine(1, Need::More), &[other]), held);
        }
    }

    #[test]
    fn unused_slots_go_to_envs_that_need_them() {
        let busy = [other(4, Need::More)];
        assert_eq!(target(8, mine(4, 2, Need::None), &busy), 2);
        assert_eq!(target(8, mine(4, 4, Need::None), &busy), 1);
        // Unused tokens stay if no other env asks for more.
        let content = [other(2, Need::Enough)];
        assert_eq!(target(8, mine(4, 2, Need::None), &content), 6);
        let idle = [other(1, Need::None)];
        assert_eq!(target(8, mine(4, 0, Need::More), &idle), 7);
        // Unused tokens take no memory from jobs of an unknown size either.
        let idle = [Other {
            together: 4,
            ..other(4, Need::None)
        }];
        assert_eq!(target(16, mine(8, 0, Need::Enough), &idle), 8);
    }

    #[test]
    fn an_env_gets_its_first_slot_before_others_get_more() {
        let waits = [other(0, Need::More)];
        assert_eq!(target(4, mine(3, 0, Need::More), &waits), 2);
        assert_eq!(target(4, mine(2, 0, Need::More), &waits), 2);
        let others = [other(1, Need::Enough), other(0, Need::More)];
        assert_eq!(target(2, mine(1, 0, Need::More), &others), 1);
    }

    #[test]
    fn a_limit_that_fell_takes_slots_back() {
        let mut mine = mine(6, 0, Need::Enough);
        mine.limit = 2;
        assert_eq!(target(8, mine, &[]), 2);
        mine.limit = 0;
        assert_eq!(target(8, mine, &[]), 1);
    }

    #[test]
    fn a_slot_is_somebodys_until_its_file_is_closed() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("jobs");
        let mut a = SlotClaim::open(&path, 2, 7, &"a".into()).unwrap();
        let mut b = SlotClaim::open(&path, 2, u32::MAX, &"b".into()).unwrap();
        assert!(a.take().unwrap() && a.take().unwrap());
        assert!(!a.take().unwrap() && !b.take().unwrap());
        a.publish(Need::Enough).unwrap();
        let seen = Other {
            env: "a".into(),
            together: 7,
            ..other(2, Need::Enough)
        };
        assert_eq!(b.others().unwrap(), [seen]);
        a.release().unwrap();
        assert!(b.take().unwrap());
        // The slot stays taken when the claim is passed on. Closing the descriptor frees it, however its process ends.
        let (_, fd) = b.pass(2, PathBuf::new());
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
        let mut c = SlotClaim::open(&path, 2, 1, &"c".into()).unwrap();
        assert!(!c.take().unwrap());
        drop(fd);
        assert_soon!(c.take().unwrap());
        drop(a);
        assert_soon!(c.take().unwrap());
        assert_soon!(c.others().unwrap().is_empty());
        // Any user that can open the file can lock every entry.
        let mode = fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, ONLY_OWNER);
    }
}
