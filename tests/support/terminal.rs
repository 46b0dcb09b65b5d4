//! A test's command on a terminal of its own, as a user would see it.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::os::unix::process::CommandExt as _;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use nix::sys::termios::{LocalFlags, tcgetattr};

/// A command on a terminal of its own.
#[derive(Debug)]
pub(crate) struct Terminal {
    pub(crate) child: Child,
    pub(crate) outer: fs_err::File,
    pub(crate) inner: OwnedFd,
    seen: String,
}

impl Terminal {
    pub(crate) fn start(mut command: Command, rows: u16, columns: u16) -> Self {
        let size = nix::pty::Winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        let pty = nix::pty::openpty(&size, None).expect("a terminal");
        for end in [&pty.master, &pty.slave] {
            // The terminal could not hang up while the command under test holds a copy of these descriptors.
            nix::fcntl::fcntl(
                end,
                nix::fcntl::FcntlArg::F_SETFD(nix::fcntl::FdFlag::FD_CLOEXEC),
            )
            .expect("a terminal");
        }
        let stdio = || Stdio::from(pty.slave.try_clone().expect("a terminal"));
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
        let child = command.spawn().expect("a terminal");
        let flags = nix::fcntl::OFlag::O_NONBLOCK;
        nix::fcntl::fcntl(&pty.master, nix::fcntl::FcntlArg::F_SETFL(flags)).expect("a terminal");
        #[expect(clippy::disallowed_types, reason = "a terminal has no path")]
        let outer = fs_err::File::from_parts(std::fs::File::from(pty.master), "terminal");
        Self {
            child,
            outer,
            inner: pty.slave,
            seen: String::new(),
        }
    }

    pub(crate) fn write(&mut self, text: &str) {
        self.outer.write_all(text.as_bytes()).expect("a terminal");
    }

    /// Reads until `text` appears, and discards the output up to its end.
    #[track_caller]
    pub(crate) fn expect(&mut self, text: &str) {
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
                started.elapsed() < super::run::HANGS,
                "no `{text}` in:\n{}",
                self.seen
            );
        }
    }

    pub(crate) fn resize(&self, rows: u16, columns: u16) {
        nix::ioctl_write_ptr_bad!(set_size, nix::libc::TIOCSWINSZ, nix::libc::winsize);
        let size = nix::libc::winsize {
            ws_row: rows,
            ws_col: columns,
            ws_xpixel: 0,
            ws_ypixel: 0,
        };
        #[expect(unsafe_code, reason = "the window size ioctl has no safe wrapper")]
        // SAFETY: the call reads the one `winsize` it is given.
        unsafe { set_size(self.outer.as_raw_fd(), &raw const size) }.expect("a terminal");
    }

    pub(crate) fn is_cooked(&self) -> bool {
        tcgetattr(self.inner.as_fd())
            .expect("a terminal")
            .local_flags
            .contains(LocalFlags::ICANON | LocalFlags::ECHO)
    }

    #[track_caller]
    pub(crate) fn wait(mut self, expected: i32) {
        let code = self
            .child
            .wait()
            .expect("a terminal")
            .code()
            .expect("an exit code");
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
