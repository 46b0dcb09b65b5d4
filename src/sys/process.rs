//! Owns running external programs: found in the system's directories, with a clean environment, in a session of their
//! own, and killed when rockenv ends. So rockenv handles Ctrl-C, and no program asks at the terminal: in a background
//! group of the terminal's session, the kernel would stop an ssh that asks about a host's key.
//!
//! Calls block the thread. A program dies with the *thread* that started it, which waits here: the kernel's
//! parent-death signal is per thread.

mod isolated;
mod output;

use std::collections::VecDeque;
use std::ffi::{OsStr, OsString};
use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::process::{CommandExt as _, ExitStatusExt as _};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use nix::errno::Errno;
use nix::sys::signal::{SigSet, Signal, killpg};
use nix::sys::stat::{Mode, umask};
use nix::unistd::Pid;

use crate::sys::account::Person;
use crate::sys::account::rights::{caller_umask, start_as};
use crate::sys::address::hide_secrets;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::readable::readable;
use crate::sys::thread;
pub(crate) use output::Output;

/// Search path for programs. The caller's `PATH` is not trusted, because they may run as root. NixOS has its programs
/// in the last two directories only, of which the first has those with setuid bits.
pub(crate) const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin:\
    /run/wrappers/bin:/run/current-system/sw/bin";
/// Directory for temporary files that programs of other users read. `TMPDIR` may name one that only the caller can
/// enter, as `pam_tmpdir` does.
pub(crate) const TEMPORARY: &str = "/tmp";
const POLL: Duration = Duration::from_millis(100);
const TAIL_LINES: usize = 15;
const MAX_LINE: usize = 4096;
/// How long a program may take to stop after SIGTERM, or by itself after its reader failed.
const GRACE: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) enum Event<'a> {
    /// The program wrote a line to stderr.
    Line(&'a str),
    /// About a tenth of a second has passed.
    Tick,
}

#[derive(Debug, Default)]
#[must_use]
pub(crate) struct Program {
    name: String,
    path: PathBuf,
    args: Vec<OsString>,
    env: Vec<(OsString, OsString)>,
    directory: PathBuf,
    isolated: bool,
    user: Option<Person>,
    inherit_env: bool,
    without: &'static [&'static str],
    tolerated: Option<i32>,
    is_rockenv: bool,
    grace: Duration,
    input: Vec<u8>,
}

/// Makes a command receive `signal` when the thread that starts it ends. The command starts with no signal blocked,
/// with the umask `mask` if given, and in a session of its own if `without_terminal`.
pub(crate) fn end_with_parent(
    command: &mut Command,
    signal: Signal,
    mask: Option<Mode>,
    without_terminal: bool,
) {
    let parent = nix::unistd::getpid();
    let prepare = move || {
        // std lets the child inherit blocked signals.
        SigSet::empty().thread_set_mask()?;
        if let Some(mask) = mask {
            umask(mask);
        }
        if without_terminal {
            nix::unistd::setsid()?;
        }
        nix::sys::prctl::set_pdeathsig(signal)?;
        // The parent may have died before the parent-death signal was set.
        match nix::unistd::getppid() == parent {
            true => Ok(()),
            false => Err(std::io::Error::from(Errno::ESRCH)),
        }
    };
    #[expect(
        unsafe_code,
        reason = "the standard library has no safe way to set a parent-death signal"
    )]
    // SAFETY: between fork and exec the closure makes five system calls and neither allocates nor locks.
    unsafe {
        command.pre_exec(prepare);
    }
}

impl Program {
    /// Finds a program; `needed_for` completes "... is needed for".
    pub(crate) fn find(name: &str, needed_for: &str) -> Result<Self> {
        match which::which_in(name, Some(PATH), "/") {
            Ok(path) => Ok(Self::at(path)),
            Err(_) => Err(
                unavailable!("`{name}` is not installed; it is needed for {needed_for}")
                    .help("rockenv setup"),
            ),
        }
    }

    pub(crate) fn at(path: impl Into<PathBuf>) -> Self {
        let path = path.into();
        Self {
            name: path
                .file_name()
                .unwrap_or(path.as_os_str())
                .to_string_lossy()
                .into_owned(),
            path,
            env: vec![
                ("PATH".into(), PATH.into()),
                ("LC_ALL".into(), "C.UTF-8".into()),
            ],
            directory: "/".into(),
            grace: GRACE,
            ..Self::default()
        }
    }

    pub(crate) fn arg(mut self, arg: impl AsRef<OsStr>) -> Self {
        self.args.push(arg.as_ref().into());
        self
    }

    pub(crate) fn args<A: AsRef<OsStr>>(mut self, args: impl IntoIterator<Item = A>) -> Self {
        self.args
            .extend(args.into_iter().map(|arg| arg.as_ref().into()));
        self
    }

    /// Sets a variable. The only others are `PATH` and a UTF-8 locale, both fixed.
    pub(crate) fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.env.push((name.as_ref().into(), value.as_ref().into()));
        self
    }

    /// Passes on the caller's variables except `PATH` and the locale, for tools that read the user's settings.
    pub(crate) fn inherit_env(mut self) -> Self {
        self.inherit_env = true;
        self
    }

    /// Removes these variables of the caller.
    pub(crate) fn without(mut self, names: &'static [&'static str]) -> Self {
        self.without = names;
        self
    }

    /// Runs the program as this user. Needs root.
    pub(crate) fn user(mut self, user: Person) -> Self {
        self.user = Some(user);
        self
    }

    /// Sets its standard input, at most 64 KiB, which fits into a pipe. Default: empty.
    pub(crate) fn input(mut self, bytes: impl Into<Vec<u8>>) -> Self {
        self.input = bytes.into();
        self
    }

    /// Sets the working directory; default: `/`.
    pub(crate) fn directory(mut self, directory: impl AsRef<Path>) -> Self {
        self.directory = directory.as_ref().into();
        self
    }

    /// Runs it as PID 1 of its own PID and mount namespaces: when it ends or is killed, the kernel kills its processes
    /// and removes its mounts. It sees the host name of steps. Needs root.
    pub(crate) fn isolated(mut self) -> Self {
        self.isolated = true;
        self
    }

    /// Sets how long it may take to stop after SIGTERM, before it is killed.
    pub(crate) fn grace(mut self, grace: Duration) -> Self {
        self.grace = grace;
        self
    }

    /// Runs the program to its end and returns its stdout, at most `limit` bytes.
    pub(crate) fn output(
        &self,
        limit: u64,
        cancel: &AtomicBool,
        on: &mut dyn FnMut(Event<'_>),
    ) -> Result<Vec<u8>> {
        self.stream(cancel, on, |stdout| {
            let mut data = Vec::new();
            let name = &self.name;
            stdout
                .take(limit + 1)
                .read_to_end(&mut data)
                .context(|| format!("cannot read from `{name}`"))?;
            match data.len() as u64 > limit {
                true => Err(unexpected!("`{name}` wrote more than {limit} bytes")),
                false => Ok(data),
            }
        })
    }

    pub(crate) fn allow_exit_code(mut self, status: i32) -> Self {
        self.tolerated = Some(status);
        self
    }

    /// States that it is rockenv: it writes files for the caller, and its exit status determines the kind of the error.
    pub(crate) fn rockenv(mut self) -> Self {
        self.is_rockenv = true;
        self
    }

    /// Runs it while `consume` reads its stdout on another thread. An error of either stops the other.
    pub(crate) fn stream<T: Send>(
        &self,
        cancel: &AtomicBool,
        on: &mut dyn FnMut(Event<'_>),
        consume: impl FnOnce(Output) -> Result<T> + Send,
    ) -> Result<T> {
        let mut child = self.spawn()?;
        if let Some(mut stdin) = child.stdin.take() {
            // A program that ends without reading its input does not need it.
            drop(stdin.write_all(&self.input));
        }
        let (Some(stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
            return Err(unexpected!("a pipe is missing"));
        };
        // Kept open until the end: otherwise a program whose reader failed would die of SIGPIPE, and that would be
        // reported as the cause.
        let held = stdout.as_fd().try_clone_to_owned();
        let failed = AtomicBool::new(false);
        let ended = Arc::new(AtomicBool::new(false));
        let stdout = Output::new(stdout, Arc::clone(&ended));
        std::thread::scope(|scope| {
            let consumer = thread::start_in(scope, || {
                let outcome = consume(stdout);
                failed.store(outcome.is_err(), Ordering::Release);
                outcome
            });
            // Without a reader the program is stopped.
            failed.fetch_or(consumer.is_err(), Ordering::Release);
            let mut lines = Lines {
                partial: Vec::new(),
                tail: VecDeque::new(),
                on,
            };
            let end = self.supervise(&mut child, &stderr.into(), cancel, &failed, &mut lines);
            ended.store(true, Ordering::Release);
            drop(held);
            let consumed = consumer.and_then(|consumer| thread::joined(consumer.join()));
            match (end?, consumed) {
                (End::Cancelled, _) => Err(Error::new(
                    Kind::Signal(2),
                    format!("`{}` was interrupted", self.name),
                )),
                (End::Exited(status), consumed)
                    if status.success()
                        || status.code().is_some() && status.code() == self.tolerated =>
                {
                    consumed
                }
                (End::Stopped, Err(error)) => Err(error),
                (End::Exited(status), _) => Err(self.failure(status, lines.tail)),
                (End::Stopped, Ok(_)) => Err(unexpected!("`{}` was stopped", self.name)),
            }
        })
    }

    fn failure(&self, status: ExitStatus, tail: VecDeque<String>) -> Error {
        let how = match (status.code(), status.signal()) {
            (Some(code), _) => format!("with status {code}"),
            (None, Some(signal)) => format!("by signal {signal}"),
            (None, None) => "in an unknown way".into(),
        };
        let code = status.code().filter(|_| self.is_rockenv);
        let kind = code
            .and_then(|code| u8::try_from(code).ok())
            .map_or(Kind::Unexpected, Kind::of_exit_code);
        let error = Error::new(kind, format!("`{}` failed {how}", self.name));
        match tail.is_empty() {
            true => error,
            false => error.source(Vec::from(tail).join("\n")),
        }
    }

    fn spawn(&self) -> Result<Child> {
        let mut command = match self.isolated {
            true => isolated::command(&self.path)?,
            false => Command::new(&self.path),
        };
        if !self.inherit_env {
            command.env_clear();
        }
        for name in self.without {
            command.env_remove(name);
        }
        command
            .args(&self.args)
            .envs(self.env.iter().map(|(name, value)| (name, value)))
            .stdin(match self.input.is_empty() {
                true => Stdio::null(),
                false => Stdio::piped(),
            })
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        match &self.user {
            Some(user) => start_as(&mut command, user, &self.directory)?,
            None => {
                command.current_dir(&self.directory);
            }
        }
        // Another program's output must not depend on the caller's umask.
        let mask = match self.is_rockenv {
            true => caller_umask(),
            false => Some(Mode::from_bits_truncate(0o022)),
        };
        end_with_parent(&mut command, Signal::SIGKILL, mask, true);
        command.spawn().map_err(|error| match error.kind() {
            std::io::ErrorKind::NotFound => {
                unavailable!("`{}` is not installed", self.name).help("rockenv setup")
            }
            std::io::ErrorKind::PermissionDenied if self.isolated => {
                unavailable!("cannot isolate `{}`", self.name)
                    .source(error)
                    .help("in a container, this needs `--privileged`")
            }
            _ => unexpected!("cannot start `{}`", self.name).source(error),
        })
    }

    fn supervise(
        &self,
        child: &mut Child,
        stderr: &OwnedFd,
        cancel: &AtomicBool,
        failed: &AtomicBool,
        lines: &mut Lines<'_>,
    ) -> Result<End> {
        let mut open = true;
        let mut give_up: Option<Instant> = None;
        loop {
            let exited = child
                .try_wait()
                .context(|| format!("cannot wait for `{}`", self.name))?;
            if exited.is_none() && cancel.load(Ordering::Relaxed) {
                self.stop(child)?;
                return Ok(End::Cancelled);
            }
            if exited.is_none() && failed.load(Ordering::Acquire) {
                // If the program is about to fail by itself, its message is more useful.
                let deadline = *give_up.get_or_insert_with(|| Instant::now() + GRACE / 4);
                if Instant::now() > deadline {
                    self.stop(child)?;
                    return Ok(End::Stopped);
                }
            }
            // The last output is in the pipe already; a daemon left behind may keep the pipe open.
            let limit = exited.map_or(POLL, |_| Duration::ZERO);
            let ready = open && readable([Some(stderr.as_fd())], Some(limit)) == Ok([true]);
            if ready {
                open = lines.read(stderr);
            } else if let Some(status) = exited {
                lines.flush();
                return Ok(End::Exited(status));
            } else if !open {
                std::thread::sleep(Duration::from_millis(20));
            }
            (lines.on)(Event::Tick);
        }
    }

    fn stop(&self, child: &mut Child) -> Result<()> {
        let group = Pid::from_raw(i32::try_from(child.id()).unwrap_or(i32::MAX));
        let wait = || format!("cannot wait for `{}`", self.name);
        if !self.isolated {
            // The group may be gone already.
            let _gone = killpg(group, Signal::SIGTERM);
            let deadline = Instant::now() + self.grace;
            while Instant::now() < deadline {
                if child.try_wait().context(wait)?.is_some() {
                    break;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        }
        let _gone = killpg(group, Signal::SIGKILL);
        child.wait().context(wait)?;
        // Its own children may take longer to die. The first process of a PID namespace waits for all others in it.
        let deadline = Instant::now() + GRACE;
        while killpg(group, None) != Err(Errno::ESRCH) && Instant::now() < deadline {
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(())
    }
}

enum End {
    Exited(ExitStatus),
    /// The program was stopped because its reader failed.
    Stopped,
    Cancelled,
}

/// Splits output into lines, also at carriage returns, hides secrets in addresses, and keeps the last lines.
struct Lines<'a> {
    partial: Vec<u8>,
    tail: VecDeque<String>,
    on: &'a mut dyn FnMut(Event<'_>),
}

impl Lines<'_> {
    /// Reads once; returns false at the end.
    fn read(&mut self, fd: &OwnedFd) -> bool {
        let mut buffer = [0; 8192];
        let amount = match nix::unistd::read(fd, &mut buffer) {
            Ok(0) => return false,
            Ok(amount) => amount,
            Err(nix::errno::Errno::EINTR) => return true,
            Err(_) => return false,
        };
        for byte in &buffer[..amount] {
            match byte {
                b'\n' | b'\r' => self.flush(),
                _ if self.partial.len() < MAX_LINE => self.partial.push(*byte),
                _ => {}
            }
        }
        true
    }

    fn flush(&mut self) {
        let bytes = std::mem::take(&mut self.partial);
        let line = hide_secrets(&String::from_utf8_lossy(bytes.trim_ascii_end()));
        if line.is_empty() {
            return;
        }
        (self.on)(Event::Line(&line));
        self.tail.push_back(line);
        if self.tail.len() > TAIL_LINES {
            self.tail.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sh(script: &str) -> Program {
        Program::at("/bin/sh").arg("-c").arg(script)
    }

    fn run(program: &Program) -> Result<Vec<u8>> {
        program.output(1 << 20, &AtomicBool::new(false), &mut |_| {})
    }

    #[test]
    fn stdout_is_returned_and_stderr_comes_as_lines() {
        let mut lines = Vec::new();
        let out = sh("printf out; printf 'a\\rb\\n' >&2; printf http://c:d@e >&2").output(
            9,
            &AtomicBool::new(false),
            &mut |event| {
                if let Event::Line(line) = event {
                    lines.push(line.to_string());
                }
            },
        );
        assert_eq!(out.unwrap(), b"out");
        assert_eq!(lines, ["a", "b", "http://***@e"]);
    }

    #[test]
    fn a_failure_names_the_status_and_shows_the_end_of_stderr() {
        let error = run(&sh("seq 100 >&2; exit 7")).unwrap_err();
        assert_eq!(error.message(), "`sh` failed with status 7");
        assert!(error.chain()[1].ends_with("99\n100") && error.chain()[1].starts_with("86\n"));
        assert_eq!(
            run(&sh("kill -9 $$")).unwrap_err().message(),
            "`sh` failed by signal 9"
        );
    }

    #[test]
    fn a_missing_program_is_unavailable_and_helps() {
        let error = Program::find("no-such-tool", "nothing").unwrap_err();
        assert_eq!(
            (error.kind(), error.help_text()),
            (Kind::Unavailable, Some("rockenv setup"))
        );
    }

    #[test]
    fn the_system_s_directories_are_those_of_nixos_too() {
        let directories: Vec<_> = PATH.split(':').collect();
        assert!(directories.iter().all(|one| one.starts_with('/')));
        let nixos = ["/run/wrappers/bin", "/run/current-system/sw/bin"];
        assert_eq!(directories[directories.len() - 2..], nixos);
    }

    #[test]
    fn the_environment_is_not_inherited() {
        let out = String::from_utf8(run(&sh("env").env("EXTRA", "1")).unwrap()).unwrap();
        let mut names: Vec<_> = out
            .lines()
            .filter_map(|line| line.split('=').next())
            .collect();
        names.sort_unstable();
        assert_eq!(names, ["EXTRA", "LC_ALL", "PATH", "PWD"]);
    }

    #[test]
    fn a_program_has_a_session_of_its_own() {
        let fields = "read -r pid name state parent group session rest </proc/self/stat";
        run(&sh(&format!("{fields}; test $pid = $session"))).unwrap();
    }

    #[test]
    fn cancel_stops_the_whole_group_quickly() {
        let cancel = AtomicBool::new(false);
        let start = Instant::now();
        let outcome = sh("trap '' TERM; sleep 60 & sleep 61").output(9, &cancel, &mut |_| {
            if start.elapsed() > Duration::from_millis(100) {
                cancel.store(true, Ordering::Relaxed);
            }
        });
        assert_eq!(outcome.unwrap_err().kind(), Kind::Signal(2));
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn an_error_of_the_reader_stops_the_program_and_is_the_one_reported() {
        let outcome: Result<()> =
            sh("yes; sleep 60").stream(&AtomicBool::new(false), &mut |_| {}, |_| {
                Err(invalid!("refused"))
            });
        assert_eq!(outcome.unwrap_err().message(), "refused");
    }

    #[test]
    fn a_daemon_that_keeps_the_output_open_does_not_hold_us() {
        let start = Instant::now();
        let out = run(&sh("setsid sleep 60 & printf out")).unwrap();
        assert_eq!(out, b"out");
        assert!(start.elapsed() < Duration::from_secs(30));
    }

    #[test]
    fn isolated_programs_leave_no_process_and_no_mount() {
        if !nix::unistd::geteuid().is_root() {
            let error = run(&sh("true").isolated()).unwrap_err();
            assert_eq!(error.message(), "cannot isolate `sh`");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let script = format!(
            "mount -t tmpfs none {} && (setsid sleep 4711.{} &) && echo $$ && uname -n",
            crate::sys::shell::quoted_path(dir.path()),
            std::process::id()
        );
        let out = run(&sh(&script).isolated()).unwrap();
        assert_eq!(out, b"1\nrockenv\n");
        let mounts = fs_err::read_to_string("/proc/self/mounts").unwrap();
        assert!(!mounts.contains(dir.path().to_str().unwrap()));
        let sleeper = format!("sleep\x004711.{}\0", std::process::id());
        for entry in fs_err::read_dir("/proc").unwrap() {
            let line = fs_err::read(entry.unwrap().path().join("cmdline")).unwrap_or_default();
            assert!(!line.starts_with(sleeper.as_bytes()));
        }
    }
}
