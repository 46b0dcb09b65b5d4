//! Commands of a test: what they said, how they ended, and what runs on the machine meanwhile.

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, ExitStatus};
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// What a command said and how it ended.
#[derive(Debug)]
pub(crate) struct Ran {
    line: String,
    /// Exit code; 128 and the signal's number for one that a signal ended.
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

    /// Returns standard output as the JSON document that it is.
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

    /// Fails unless standard error has each of `texts`.
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

/// Runs a command to its end; `line` is what it is called.
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
    /// Starts it.
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

    /// Sends a signal to it alone.
    pub(crate) fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.pid()), signal).expect("the signal is sent");
    }

    /// Returns its standard input.
    pub(crate) fn stdin(&mut self) -> std::process::ChildStdin {
        let child = self.child.as_mut().expect("not waited for");
        child.stdin.take().expect("a pipe")
    }

    /// Returns whether it has not ended.
    pub(crate) fn runs(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for");
        child.try_wait().expect("a child").is_none()
    }

    /// Waits for its end.
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

/// After how long something hangs. It is the same on every machine, since none is as slow.
pub(crate) const HANGS: Duration = Duration::from_secs(600);

/// Waits until `done`, or fails with what it says is missing.
#[track_caller]
pub(crate) fn wait_for(what: &str, mut done: impl FnMut() -> Result<(), String>) {
    let started = Instant::now();
    loop {
        let look = Instant::now();
        match done() {
            Ok(()) => return,
            Err(left) => assert!(started.elapsed() < HANGS, "{what} after {HANGS:?}:\n{left}"),
        }
        // A look at all processes takes longer than 10 ms: most of a processor is for what it waits for.
        std::thread::sleep(Duration::from_millis(10).max(3 * look.elapsed()));
    }
}

/// Waits until `done` is true.
#[track_caller]
pub(crate) fn wait_until(what: &str, mut done: impl FnMut() -> bool) {
    wait_for(what, || if done() { Ok(()) } else { Err(String::new()) });
}

/// Waits for what a command on a store leaves behind to write its snapshots to disk and to empty the trash.
pub(crate) fn settle(home: &Path) {
    let home = home.to_string_lossy();
    wait_for("it still writes or deletes", || {
        let mut left = processes();
        left.retain(|(pid, line)| match line.is_empty() {
            // It may be about to get its arguments.
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

/// Returns the processes of the machine with their command lines, arguments apart by one space.
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

/// Copies rockenv by a process of its own: what this one has open for writing, a child that another test starts just now has
/// too, and Linux runs no such file ("text file busy").
pub(crate) fn copy_program(to: &Path) {
    super::loopfs::run(
        Command::new("cp")
            .arg(env!("CARGO_BIN_EXE_rockenv"))
            .arg(to),
    );
}

/// Returns the digest of a file, by another program than rockenv.
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

/// Returns what a process has used at most, in bytes.
pub(crate) fn peak_memory(pid: i32) -> u64 {
    memory(pid, "VmHWM:")
}

/// Returns what a process uses now of memory that is no file's, in bytes: the program itself does not count, which
/// is large in a debug build.
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

/// Gives the command the default reaction to signals: a shell starts what runs in its background deaf to Ctrl-C.
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
