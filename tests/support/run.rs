//! Commands of a test: their output, how they ended, and the processes on the machine.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The output of a command and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    line: String,
    /// Exit code, or 128 plus the number of the signal that ended it.
    pub(crate) code: i32,
    /// Its standard output.
    pub(crate) out: Vec<u8>,
    /// Its standard error, as text.
    pub(crate) err: String,
}

impl Ran {
    /// Returns standard output as text.
    pub(crate) fn text(&self) -> String {
        String::from_utf8_lossy(&self.out).into_owned()
    }

    /// Parses standard output as JSON.
    #[track_caller]
    pub(crate) fn json(&self) -> serde_json::Value {
        serde_json::from_slice(&self.out).expect("a JSON document")
    }

    /// Fails unless the command succeeded.
    #[track_caller]
    pub(crate) fn ok(self) -> Self {
        self.exits(0)
    }

    /// Fails unless the command ended with `code`.
    #[track_caller]
    pub(crate) fn exits(self, code: i32) -> Self {
        assert_eq!(
            self.code,
            code,
            "rockenv {}\n{}{}",
            self.line,
            self.text(),
            self.err
        );
        self
    }

    /// Fails unless standard error contains each of `texts`.
    #[track_caller]
    pub(crate) fn says(self, texts: &[&str]) -> Self {
        for text in texts {
            assert!(
                self.err.contains(text),
                "rockenv {} does not say `{text}`:\n{}",
                self.line,
                self.err
            );
        }
        self
    }

    /// Fails unless standard output, without the last newline, is `text`.
    #[track_caller]
    pub(crate) fn prints(self, text: &str) -> Self {
        let out = self.text();
        assert_eq!(
            out.strip_suffix('\n').unwrap_or(&out),
            text,
            "rockenv {}\n{}",
            self.line,
            self.err
        );
        self
    }
}

fn code_of(status: ExitStatus) -> i32 {
    status
        .code()
        .unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

/// Gives a program the variables and the directory of a prepared command, and no other variables.
pub(crate) fn surround<'a>(program: &'a mut Command, command: &Command) -> &'a mut Command {
    let variables = command.get_envs();
    program
        .env_clear()
        .envs(variables.filter_map(|(name, value)| Some((name, value?))))
        .current_dir(command.get_current_dir().expect("a directory"))
}

/// Runs a command to its end; `line` is its name in messages.
pub(crate) fn finish(line: String, mut command: Command) -> Ran {
    let output = command.output().expect("rockenv runs");
    Ran {
        line,
        code: code_of(output.status),
        out: output.stdout,
        err: String::from_utf8_lossy(&output.stderr).into_owned(),
    }
}

/// A command in the background, killed when dropped.
#[derive(Debug)]
pub(crate) struct Background {
    line: String,
    child: Option<std::process::Child>,
}

impl Background {
    pub(crate) fn start(mut command: Command) -> Self {
        let line = format!("{command:?}");
        Self {
            line,
            child: Some(command.spawn().expect("rockenv starts")),
        }
    }

    /// Returns its process id.
    pub(crate) fn pid(&self) -> i32 {
        self.child
            .as_ref()
            .expect("not waited for")
            .id()
            .cast_signed()
    }

    /// Sends a signal to this process alone.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the signal is sent");
    }

    /// Returns its standard input.
    pub(crate) fn stdin(&mut self) -> std::process::ChildStdin {
        let child = self.child.as_mut().expect("not waited for");
        child.stdin.take().expect("a pipe")
    }

    /// Returns whether the command is still running.
    pub(crate) fn runs(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for");
        child.try_wait().expect("a child").is_none()
    }

    /// Waits for the command to end.
    pub(crate) fn wait(mut self) -> Ran {
        let child = self.child.take().expect("not waited for");
        let output = child.wait_with_output().expect("a child");
        Ran {
            line: std::mem::take(&mut self.line),
            code: code_of(output.status),
            out: output.stdout,
            err: String::from_utf8_lossy(&output.stderr).into_owned(),
        }
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            drop(child.kill());
            drop(child.wait());
        }
    }
}

/// The time after which an operation counts as hung. Far longer than any machine needs.
pub(crate) const HANGS: Duration = Duration::from_secs(600);

/// Waits until `done` succeeds; fails with its error after [`HANGS`].
#[track_caller]
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> Result<(), String>) {
    let started = Instant::now();
    loop {
        let look = Instant::now();
        match done() {
            Ok(()) => return,
            Err(left) => assert!(started.elapsed() < HANGS, "{what} after {HANGS:?}:\n{left}"),
        }
        // Scanning all processes takes longer than 10 ms, and most processor time should go to the awaited operation.
        std::thread::sleep(Duration::from_millis(10).max(3 * look.elapsed()));
    }
}

/// Waits until `done` is true.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(what, || if done() { Ok(()) } else { Err(String::new()) });
}

/// Waits for background processes of commands on a store to write snapshots to disk and to empty the trash.
pub(crate) fn settle(home: &Path) {
    let home = home.to_string_lossy();
    wait_for("it still writes or deletes", || {
        let mut left = processes();
        left.retain(|(pid, line)| match line.is_empty() {
            // The process may not have called exec yet.
            true => {
                fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|of| of.ends_with("rockenv"))
            }
            false => line.contains("__reap") && line.contains(&*home),
        });
        if left.is_empty() {
            Ok(())
        } else {
            Err(format!("{left:?}"))
        }
    });
}

/// Returns the machine's processes with their command lines, arguments separated by one space.
pub(crate) fn processes() -> Vec<(i32, String)> {
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc").expect("/proc").flatten() {
        if let Ok(pid) = entry.file_name().to_string_lossy().parse()
            && let Ok(line) = fs::read(entry.path().join("cmdline"))
        {
            let line = line.strip_suffix(b"\0").unwrap_or(&line);
            found.push((pid, String::from_utf8_lossy(line).replace('\0', " ")));
        }
    }
    found
}

/// Returns the processes whose command line is exactly `line`.
pub(crate) fn processes_called(line: &str) -> Vec<i32> {
    let found = processes().into_iter().filter(|(_, found)| found == line);
    found.map(|(pid, _)| pid).collect()
}

/// Waits until a process has this command line.
#[track_caller]
pub(crate) fn wait_for_process(line: &str) {
    wait_until(&format!("`{line}` runs"), || {
        !processes_called(line).is_empty()
    });
}

/// Copies rockenv with a separate process. A descriptor that this process has open for writing could leak into a child
/// of another test, and Linux does not run a file that is open for writing ("text file busy").
pub(crate) fn copy_program(to: &Path) {
    super::loopfs::run(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_rockenv"))
            .arg(to),
    );
}

/// Returns the digest of a file, computed by another program than rockenv.
pub(crate) fn sha256(path: &Path) -> String {
    let text = super::loopfs::run(Command::new("sha256sum").arg(path));
    text[..64].to_owned()
}

/// Returns a process's direct children.
pub(crate) fn children(pid: i32) -> Vec<i32> {
    let found = processes().into_iter().filter(|(child, _)| {
        let text = fs::read_to_string(format!("/proc/{child}/stat")).unwrap_or_default();
        // pid (name) state ppid
        let parent = text
            .rsplit_once(") ")
            .and_then(|(_, rest)| rest.split(' ').nth(1)?.parse().ok());
        parent == Some(pid)
    });
    found.map(|(child, _)| child).collect()
}

/// Returns the peak memory use of a process, in bytes.
pub(crate) fn peak_memory(pid: i32) -> u64 {
    memory(pid, "VmHWM:")
}

/// Returns the anonymous memory that a process uses now, in bytes. The program's own pages do not count, which are
/// many in a debug build.
pub(crate) fn own_memory(pid: i32) -> u64 {
    memory(pid, "RssAnon:")
}

fn memory(pid: i32, field: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix(field));
    let kib = line
        .and_then(|line| line.trim().strip_suffix(" kB"))
        .and_then(|text| text.parse::<u64>().ok());
    kib.unwrap_or(0) * 1024
}

/// Resets the command's signal handlers: a shell starts background commands with Ctrl-C ignored.
#[expect(
    unsafe_code,
    reason = "the child changes its signals between fork and exec"
)]
pub(super) fn hear_signals(command: &mut Command) {
    use nix::sys::signal::{SigHandler, signal};
    use std::os::unix::process::CommandExt as _;
    // SAFETY: three system calls, and no handler is installed.
    unsafe {
        command.pre_exec(|| {
            for number in [Signal::SIGINT, Signal::SIGQUIT, Signal::SIGHUP] {
                signal(number, SigHandler::SigDfl)?;
            }
            Ok(())
        });
    }
}
