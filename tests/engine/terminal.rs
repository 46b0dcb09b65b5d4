//! Terminals, and the lack of one.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use nix::sys::termios::{LocalFlags, tcgetattr};

use crate::commands::ONE;
use crate::support::env::{TestStore, build_user};
use crate::support::run::{Background, processes_called, wait_until};

/// A command on a terminal of its own, as a person would see it.
struct Terminal {
    child: Child,
    outer: fs_err::File,
    inner: OwnedFd,
    seen: String,
}

impl Terminal {
    fn start(mut command: Command, rows: u16, columns: u16) -> Self {
        let size = nix::pty::Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = nix::pty::openpty(&size, None).unwrap();
        for end in [&pty.master, &pty.slave] {
            // What the command under test has open cannot go away.
            nix::fcntl::fcntl(
                end,
                nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
            )
            .unwrap();
        }
        let stdio = || Stdio::from(pty.slave.try_clone().unwrap());
        command
            .stdin(stdio())
            .stdout(stdio())
            .stderr(stdio())
            .env("TERM", "xterm");
        #[expect(
            unsafe_code,
            reason = "the child takes the terminal between fork and exec"
        )]
        // SAFETY: two system calls.
        unsafe {
            command.pre_exec(|| {
                nix::unistd::setsid()?;
                nix::ioctl_write_int_bad!(tiocsctty, nix::libc::TIOCSCTTY);
                tiocsctty(0, 0)?;
                Ok(())
            });
        }
        let child = command.spawn().unwrap();
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&pty.master, nix::fcntl::FcntlArg::F_SETFL(flags)).unwrap();
        #[expect(clippy::disallowed_types, reason = "a terminal has no path")]
        let outer = fs_err::File::from_parts(std::fs::File::from(pty.master), "terminal");
        Self {
            child,
            outer,
            inner: pty.slave,
            seen: String::new(),
        }
    }

    fn write(&mut self, text: &str) {
        self.outer.write_all(text.as_bytes()).unwrap();
    }

    /// Reads until `text` has come; what came until then is forgotten.
    #[track_caller]
    fn expect(&mut self, text: &str) {
        let started = Instant::now();
        loop {
            if let Some(at) = self.seen.find(text) {
                self.seen.drain(..at + text.len());
                return;
            }
            let mut buffer = [0; 4096];
            match self.outer.read(&mut buffer) {
                Ok(count) => self
                    .seen
                    .push_str(&String::from_utf8_lossy(&buffer[..count])),
                Err(_) => std::thread::sleep(Duration::from_millis(5)),
            }
            assert!(
                started.elapsed() < Duration::from_secs(10),
                "no `{text}` in:\n{}",
                self.seen
            );
        }
    }

    fn resize(&self, rows: u16, columns: u16) {
        nix::ioctl_write_ptr_bad!(set_size, nix::libc::TIOCSWINSZ, nix::libc::winsize);
        let size = nix::libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        #[expect(unsafe_code, reason = "the window size ioctl has no safe wrapper")]
        // SAFETY: the call reads the one `winsize` it is given.
        unsafe { set_size(self.outer.as_raw_fd(), &raw const size) }.unwrap();
    }

    fn is_cooked(&self) -> bool {
        tcgetattr(self.inner.as_fd())
            .unwrap()
            .local_flags
            .contains(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    #[track_caller]
    fn wait(mut self, expected: i32) {
        let code = self.child.wait().unwrap().code().unwrap();
        let mut rest = vec![0; 4096];
        let count = self.outer.read(&mut rest).unwrap_or(0);
        assert_eq!(
            code,
            expected,
            "{}{}",
            self.seen,
            String::from_utf8_lossy(&rest[..count])
        );
        assert!(self.is_cooked(), "the terminal was not put back");
    }
}

#[test]
fn a_shell_has_a_terminal() {
    let store = TestStore::new();
    store.up_with(ONE);
    let mut terminal = Terminal::start(store.command(&["shell", store.env()]), 33, 101);
    terminal.write("PS1='ready> '; stty -echo; tty; stty size; echo user $(id -u)\n");
    terminal.expect("/dev/pts/");
    terminal.expect("33 101");
    terminal.expect(&format!("user {}", build_user().1));
    assert!(!terminal.is_cooked());
    terminal.resize(44, 99);
    terminal.write("sleep 0.2; stty size\n");
    terminal.expect("44 99");
    // Ctrl-C is the inner program's.
    let sleeper = store.sleeper();
    terminal.write(&format!("{sleeper}\n"));
    wait_until("the program runs", || {
        !processes_called(&sleeper).is_empty()
    });
    terminal.write("\x03");
    terminal.write("echo after $?\n");
    terminal.expect("after 130");
    assert!(processes_called(&sleeper).is_empty());
    // Job control works: this is the controlling terminal.
    terminal.write("sleep 1000 & jobs; kill %1\n");
    terminal.expect("Running");
    // A second one joins.
    let mut second = Terminal::start(store.command(&["exec", store.env(), "--", "tty"]), 10, 20);
    second.expect("/dev/pts/");
    second.wait(0);
    // A big paste into a program that talks back does not lock up.
    terminal.write("stty raw; head -c 300000 | tr -d '\\n' | wc -c; stty cooked; echo pasted\n");
    std::thread::sleep(Duration::from_millis(300));
    let mut left = "0123456789".repeat(30_000);
    while !left.is_empty() {
        match std::io::Write::write(&mut terminal.outer, left.as_bytes()) {
            Ok(count) => drop(left.drain(..count)),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    terminal.expect("300000");
    terminal.expect("pasted");
    terminal.write("exit 6\n");
    terminal.wait(6);
}

#[test]
fn a_terminal_that_goes_away_ends_the_shell() {
    let store = TestStore::new();
    store.up_with(ONE);
    let sleeper = store.sleeper();
    let mut terminal = Terminal::start(store.command(&["shell", store.env()]), 24, 80);
    terminal.write(&format!("{sleeper}\n"));
    wait_until("the program runs", || {
        !processes_called(&sleeper).is_empty()
    });
    let Terminal {
        mut child,
        outer,
        inner,
        ..
    } = terminal;
    drop((outer, inner));
    child.wait().unwrap();
    wait_until("the program ends", || processes_called(&sleeper).is_empty());
}

#[test]
fn there_may_be_no_terminal_no_input_and_no_reader() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    let through_sh = |script: &str| {
        let mut command = Command::new("sh");
        let own = store.command::<&str>(&[]);
        command
            .args(["-c", script, "sh"])
            .arg(own.get_program())
            .arg(store.env())
            .env_clear();
        for (name, value) in own.get_envs() {
            command.env(name, value.unwrap());
        }
        command.current_dir(store.work());
        store.become_user(&mut command);
        crate::support::run::finish(script.to_owned(), command)
    };
    through_sh("\"$1\" exec \"$2\" -- sh -c 'cat; echo end' <&-")
        .ok()
        .prints("end");
    through_sh("\"$1\" up \"$2\" --rerun one <&- >&- 2>&-").ok();
    // Whoever reads only the first line gets it, and no complaint.
    let ran = through_sh("{ \"$1\" exec \"$2\" -- yes; echo $? >&2; } | head -1")
        .ok()
        .prints("y");
    assert_eq!(ran.err, "141\n");
    let ran = through_sh("\"$1\" ls | head -c 0; \"$1\" status \"$2\" | head -1 >/dev/null; \"$1\" logs \"$2\" | true").ok();
    assert_eq!(ran.err, "");
    let ran =
        through_sh("\"$1\" up \"$2\" --rerun one 2>&1 >/dev/null | head -c 1 >/dev/null").ok();
    assert_eq!(ran.err, "");
    store.up();
    // A shell without a terminal reads its commands.
    through_sh("echo 'tty; id -u' | \"$1\" shell \"$2\"")
        .prints(&format!("not a tty\n{}", build_user().1));
}

#[test]
fn nohup_survives_a_hangup() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    store.profile(&format!(
        "[[step]]\nname = 'long'\nrun = '{sleeper} & wait; echo done'\n"
    ));
    let mut command = Command::new("nohup");
    let own = store.command(&["up", store.env()]);
    command
        .arg(own.get_program())
        .args(own.get_args())
        .env_clear()
        .current_dir(store.work());
    for (name, value) in own.get_envs() {
        command.env(name, value.unwrap());
    }
    command
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    store.become_user(&mut command);
    let mut up = Background::start(command);
    wait_until("the step runs", || !processes_called(&sleeper).is_empty());
    up.signal(Signal::SIGHUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(up.runs() && !processes_called(&sleeper).is_empty());
    for pid in processes_called(&sleeper) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    }
    up.wait().ok();
}
