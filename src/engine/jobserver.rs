//! Owns the FIFO that tells the tools in an env how many jobs they may start: GNU make's protocol, served from
//! outside.
//!
//! Each env has its own FIFO, with a token for each of its slots of the [`budget`] except the first, which every client
//! has implicitly. So tokens of a killed client are lost at most until the container ends, and an env that forges
//! tokens takes nothing from other envs.
//!
//! [`budget`]: crate::engine::job_slots

use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::libc;

use super::cgroup::Cgroup;
use super::hold::Hold;
use super::memory::Limited;
use super::pressure::{self, Throttle};
use crate::engine::job_slots::{EnvSlots, Need, SlotClaim, Ticket, held, target};
use crate::plan::ids::EnvName;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::readable::readable;

/// Path of the FIFO inside every env.
pub(crate) const INSIDE: &str = "/run/rockenv/jobserver";
/// How often a holder checks its FIFO and the other entries.
const PERIOD: Duration = Duration::from_millis(50);
/// How long an env asks for no slots after it returned unused tokens.
const REST: Duration = Duration::from_secs(1);
/// How often memory is checked.
const MEMORY: Duration = Duration::from_secs(1);
/// How often lost tokens are looked for.
const RECOUNT: Duration = Duration::from_secs(2);

/// Returns the value of `MAKEFLAGS` inside.
///
/// make takes a word after `--` for a variable. So a make without `-j` stays serial as its author intended, and a make
/// before 4.4 does not fail on a FIFO. Other tools (ninja since 1.13, cargo, gcc) look only for the word. `make -jN`
/// joins through the shim.
pub(crate) fn makeflags() -> String {
    format!(" -- --jobserver-auth=fifo:{INSIDE}")
}

/// Creates the FIFO of an env, unless it exists.
pub(crate) fn make_fifo(path: &Path) -> Result<()> {
    if !fs::symlink_metadata(path).is_ok_and(|found| found.file_type().is_fifo()) {
        match nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU) {
            Err(Errno::EEXIST) => {}
            made => made.context(|| format!("cannot make `{}`", path.display()))?,
        }
    }
    // The build user's tools write tokens back.
    fs::set_permissions(path, std::fs::Permissions::from_mode(0o666))?;
    Ok(())
}

/// Serves an env's FIFO from its holder, until it is stopped.
#[derive(Debug)]
pub(crate) struct Server {
    thread: JoinHandle<Option<u64>>,
    /// A byte makes the thread rest (1) or continue (0); closing it ends the thread.
    tell: OwnedFd,
}

impl Server {
    /// Starts serving the container in `cgroup`; `file` carries its claim.
    ///
    /// Called before the agent accepts commands, so that the first client finds its tokens.
    pub(super) fn start(hold: &Hold, file: OwnedFd, cgroup: &Cgroup) -> Result<Self> {
        let memory_max = hold.container.limits.memory_max;
        let mut env = Env::open(hold.jobs.clone(), file, cgroup.clone(), memory_max)?;
        env.adjust_tokens()?;
        let (told, tell) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
        let builder = std::thread::Builder::new().name("jobserver".to_owned());
        let thread = builder.spawn(move || {
            // Without the server the env continues with the tokens it has.
            drop(env.serve(&told));
            env.peak
        })?;
        Ok(Self { thread, tell })
    }

    /// Makes the server release its slots and sleep while nothing runs in the env, or continue.
    pub(crate) fn rest(&self, rests: bool) {
        // Without the server the env continues with the tokens it has.
        let _: nix::Result<usize> = nix::unistd::write(&self.tell, &[u8::from(rests)]);
    }

    /// Stops, releases everything, and returns the peak of memory without page cache, in bytes, if it is counted.
    pub(crate) fn finish(self) -> Option<u64> {
        drop(self.tell);
        self.thread.join().unwrap_or(None)
    }
}

/// Measures from outside the holder how many jobs an env runs.
#[derive(Debug)]
pub(crate) struct Gauge {
    fifo: fs::File,
    jobs: fs::File,
    env: EnvName,
}

impl Gauge {
    /// Opens the machine's budget in `jobs`, and the FIFO of `env`; `None` if one is missing.
    pub(crate) fn open(jobs: &Path, fifo: &Path, env: &EnvName) -> Option<Self> {
        let mut options = fs::OpenOptions::new();
        options.read(true).custom_flags(libc::O_NONBLOCK);
        Some(Self {
            fifo: options.open(fifo).ok()?,
            jobs: fs::File::open(jobs).ok()?,
            env: env.clone(),
        })
    }

    /// Returns how many slots are in use: the env's slots minus the tokens in its FIFO.
    pub(crate) fn used(&self) -> Option<u32> {
        let held = held(&self.jobs, &self.env).ok()??;
        Some(held.saturating_sub(waiting(&self.fifo).ok()?))
    }
}

/// The server's state of its env.
#[derive(Debug)]
struct Env {
    claim: SlotClaim,
    fifo: fs::File,
    cgroup: Cgroup,
    memory_max: Option<u64>,
    /// Slots without a token: a step's own, which its first client has implicitly.
    base: u32,
    cap: u32,
    throttle: Throttle,
    peak: Option<u64>,
    rests_until: Option<Instant>,
    memory_seen: Option<Instant>,
    recounted: Instant,
    /// Whether slots wait for their tokens to come back.
    collects: bool,
}

impl Env {
    fn open(
        ticket: Ticket,
        file: OwnedFd,
        cgroup: Cgroup,
        memory_max: Option<u64>,
    ) -> Result<Self> {
        // Opened for writing too: make blocks when it opens the FIFO until there is a writer.
        let fifo = fs::OpenOptions::new()
            .read(true)
            .write(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(&ticket.fifo)?;
        let cap = ticket.cap;
        let claim = SlotClaim::receive(ticket.entry, file);
        Ok(Self {
            base: claim.count().min(1),
            claim,
            fifo,
            cgroup,
            memory_max,
            cap,
            throttle: Throttle::new(cap),
            peak: None,
            rests_until: None,
            memory_seen: None,
            recounted: Instant::now(),
            collects: false,
        })
    }

    fn serve(&mut self, told: &OwnedFd) -> Result<()> {
        let mut rests = false;
        loop {
            let fifo = (self.collects && !rests).then(|| self.fifo.file().as_fd());
            let limit = (!rests).then_some(PERIOD);
            let [is_told, _] = readable([Some(told.as_fd()), fifo], limit)?;
            if is_told {
                let mut word = [0];
                if nix::unistd::read(told, &mut word)? == 0 {
                    return Ok(());
                }
                rests = word == [1];
            }
            match rests {
                true => self.release()?,
                false => self.adjust_tokens()?,
            }
        }
    }

    /// Releases everything. No process is left that could return a token.
    fn release(&mut self) -> Result<()> {
        while self.read()? {}
        while self.claim.count() > self.base {
            self.claim.release()?;
        }
        self.claim.publish(Need::None)
    }

    /// Checks everything once, and adds or removes tokens.
    fn adjust_tokens(&mut self) -> Result<()> {
        let now = Instant::now();
        let granted = self.claim.count().saturating_sub(self.base);
        let mut idle = waiting(&self.fifo)?;
        while idle > granted && self.read()? {
            // A process inside wrote extra tokens.
            idle -= 1;
        }
        if now.duration_since(self.recounted) >= RECOUNT {
            self.recounted = now;
            if idle < granted && self.nobody_holds()? {
                for _ in idle..granted {
                    self.write()?;
                }
                idle = granted;
            }
        }
        if self
            .memory_seen
            .is_none_or(|seen| now.duration_since(seen) >= MEMORY)
        {
            self.memory_seen = Some(now);
            let used = self.cgroup.anonymous();
            self.peak = self.peak.max(used);
            let mut groups = self.cgroup.around();
            let own = used.zip(self.memory_max);
            groups.extend(own.map(|(used, limit)| Limited { used, limit }));
            let stalled = self.cgroup.stalled("some ", "avg10=");
            let level = pressure::level(&crate::sys::host::memory_now(), stalled, &groups);
            self.throttle
                .observe(level, self.claim.count() - idle.min(granted));
        }
        let limit = self.cap.min(self.throttle.allowed);
        let need = if idle > 0 || self.rests_until.is_some_and(|until| now < until) {
            Need::None
        } else if self.claim.count() >= limit {
            Need::Enough
        } else {
            Need::More
        };
        let mine = EnvSlots {
            held: self.claim.count(),
            base: self.base,
            limit,
            together: self.claim.entry.together,
            idle,
            need,
        };
        let target = target(self.claim.entry.total, mine, &self.claim.others()?);
        while self.claim.count() < target && self.claim.take()? {
            if self.claim.count() > self.base {
                self.write()?;
            }
        }
        while self.claim.count() > target && self.read()? {
            self.claim.release()?;
            if need == Need::None {
                self.rests_until = Some(now + REST);
            }
        }
        self.collects = self.claim.count() > target;
        self.claim.publish(need)
    }

    fn read(&self) -> Result<bool> {
        match nix::unistd::read(self.fifo.file(), &mut [0]) {
            Ok(count) => Ok(count == 1),
            Err(Errno::EAGAIN | Errno::EINTR) => Ok(false),
            Err(error) => Err(error.into()),
        }
    }

    fn write(&self) -> Result<()> {
        nix::unistd::write(self.fifo.file(), b"+")?;
        Ok(())
    }

    /// Returns whether no process in the container has the FIFO open, so that no token can come back.
    fn nobody_holds(&self) -> Result<bool> {
        let own = self.fifo.metadata()?;
        let processes = self.cgroup.processes();
        let holds = |pid: &i32| -> std::io::Result<bool> {
            for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
                let found = fs::metadata(entry?.path());
                if found.is_ok_and(|found| found.dev() == own.dev() && found.ino() == own.ino()) {
                    return Ok(true);
                }
            }
            Ok(false)
        };
        for pid in &processes {
            match holds(pid) {
                Ok(false) => {}
                Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
                Err(error) if error.raw_os_error() == Some(libc::ESRCH) => {}
                // An unreadable process may have it open.
                Ok(true) | Err(_) => return Ok(false),
            }
        }
        Ok(!processes.is_empty())
    }
}

/// Returns the number of tokens in a FIFO.
fn waiting(fifo: &fs::File) -> Result<u32> {
    let count = rustix::io::ioctl_fionread(fifo).map_err(std::io::Error::from)?;
    Ok(u32::try_from(count).unwrap_or(0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tokens_follow_the_slots_and_lost_ones_are_made_up() {
        let directory = tempfile::tempdir().unwrap();
        let (path, fifo) = (directory.path().join("jobs"), directory.path().join("fifo"));
        make_fifo(&fifo).unwrap();
        let mut claim = SlotClaim::open(&path, 4, u32::MAX, &"a".into()).unwrap();
        assert!(claim.take().unwrap());
        let (ticket, fd) = claim.pass(3, fifo);
        let mut env = Env::open(ticket, fd, Cgroup::default(), None).unwrap();
        // The machine may be short of memory while the test runs.
        env.memory_seen = Some(Instant::now() + Duration::from_secs(3600));
        env.adjust_tokens().unwrap();
        let seen = |env: &Env| (env.claim.count(), waiting(&env.fifo).unwrap());
        assert_eq!(seen(&env), (3, 2));
        // A token made inside is removed.
        env.write().unwrap();
        env.adjust_tokens().unwrap();
        assert_eq!(seen(&env).1, 2);
        // Nothing runs in the env: it releases its slots for others, and takes them again later.
        env.release().unwrap();
        assert_eq!(seen(&env), (1, 0));
        env.adjust_tokens().unwrap();
        assert_eq!(seen(&env), (3, 2));
        // Another env asks for slots: it gets the unused ones.
        let b = SlotClaim::open(&path, 4, u32::MAX, &"b".into()).unwrap();
        b.publish(Need::More).unwrap();
        env.adjust_tokens().unwrap();
        assert_eq!(seen(&env), (1, 0));
    }
}
