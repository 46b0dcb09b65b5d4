//! Owns that a command on another machine ends with its connection: nobody would see how it goes on. Hidden subcommands there.
//!
//! sshd tells a command without a terminal nothing. When the connection ends, so does its process, and the pipe that the
//! command writes its messages to has no reader any more; with connections shared by several (`ControlMaster`) only the latter.
//! nix has no calls for descriptors of processes, hence rustix.

use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::sys::host::Host;
use crate::sys::trust;

/// `__attend PID TRUSTED ARGUMENT...`: becomes rockenv with these arguments, which gets SIGTERM when the process ends. Where TRUSTED is
/// not empty, the files that were sent count: they did where they came from.
pub(crate) fn attend(arguments: &[String]) -> Result<()> {
    let [session, trusted, arguments @ ..] = arguments else {
        return Err(usage());
    };
    let program = Host::probe()?.program;
    let own = std::process::id().to_string();
    Command::new(&program)
        .args(["__watch", session, &own])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context(|| "cannot start rockenv".to_owned())?;
    // The process stays the same, so signals, the terminal and the exit code are its own.
    let mut command = Command::new(&program);
    command.arg0("rockenv").args(arguments);
    if !trusted.is_empty() {
        command.env(trust::VARIABLE, std::env::current_dir()?);
    }
    Err(command.exec()).context(|| "cannot start rockenv".to_owned())
}

/// `__watch SESSION PID`: sends SIGTERM to process PID when process SESSION ends, or nobody reads our standard error.
pub(crate) fn watch(arguments: &[String]) -> Result<()> {
    let [session, command] = arguments else {
        return Err(usage());
    };
    // A terminal's signals are not for us.
    let _: nix::Result<nix::unistd::Pid> = nix::unistd::setsid();
    let open = |text: &str| {
        let pid = text.parse().ok().and_then(Pid::from_raw);
        let pid = pid.ok_or_else(usage)?;
        Ok::<_, Error>(pidfd_open(pid, PidfdFlags::empty()).ok())
    };
    let Some(command) = open(command)? else {
        return Ok(());
    };
    if let Some(session) = open(session)? {
        let messages = std::io::stderr();
        let mut fds = [
            PollFd::new(command.as_fd(), PollFlags::POLLIN),
            PollFd::new(session.as_fd(), PollFlags::POLLIN),
            // Errors are reported unasked.
            PollFd::new(messages.as_fd(), PollFlags::empty()),
        ];
        while let Err(nix::Error::EINTR) = poll(&mut fds, PollTimeout::NONE) {}
        if fds[0].any() == Some(true) {
            return Ok(());
        }
    }
    match pidfd_send_signal(&command, Signal::TERM) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(std::io::Error::from(error).into()),
    }
}

fn usage() -> Error {
    Error::new(
        Kind::Usage,
        "this subcommand is rockenv's own, on another machine",
    )
}
