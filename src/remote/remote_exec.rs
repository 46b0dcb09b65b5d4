//! Owns ending a command on another machine together with its connection, because its further output would be lost.
//! Implements hidden subcommands that run on that machine.
//!
//! sshd does not notify a command without a terminal. When the connection ends, sshd's process ends and the pipe for
//! the command's messages loses its reader. With shared connections (`ControlMaster`) only the pipe loses its reader.
//! nix has no calls for process descriptors, hence rustix.

use std::io::IsTerminal as _;
use std::os::fd::AsFd as _;
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::host::{Host, working_directory};
use crate::sys::trust;
use crate::ui::ci::System;

/// Variables that control colours.
pub(super) const NO_COLOR: &str = "NO_COLOR";
pub(super) const FORCE_COLOR: &str = "CLICOLOR_FORCE";

/// `__remote-exec PID DIGEST SHOWN ARGUMENT...`: becomes rockenv with these arguments, and sends it a signal when
/// process PID ends. If DIGEST is not empty, the received files apply, and must match the files of the sending machine.
/// SHOWN lists variables of the sending machine, separated by commas: that of the CI system, and those for colours.
pub(crate) fn remote_exec(arguments: &[String]) -> Result<()> {
    let [session, digest, shown, arguments @ ..] = arguments else {
        return Err(usage());
    };
    if !digest.is_empty() && trust::digest(&working_directory()?)? != *digest {
        let message =
            "the received profiles, images, hooks and rockenv.toml differ from the trusted files";
        return Err(invalid!("{message}")
            .help("rockenv trust, then run it again; a link must not lead out of the directory"));
    }
    let program = Host::probe()?.program;
    let own = std::process::id().to_string();
    Command::new(&program)
        .args(["__watch", session, &own])
        .stdin(Stdio::null())
        .stdout(Stdio::null())
        .spawn()
        .context(|| "cannot start rockenv".to_owned())?;
    // exec keeps the process, and with it the signals, the terminal and the exit code.
    let mut command = Command::new(&program);
    command.arg0("rockenv").args(arguments);
    command.env(trust::DIGEST_VARIABLE, digest);
    // A CI system executes commands in the output, so the process that writes it must know the system.
    let known = System::ALL.map(System::variable).into_iter();
    for name in known.chain([NO_COLOR, FORCE_COLOR]) {
        if shown.split(',').any(|shown| shown == name) {
            command.env(name, "true");
        }
    }
    Err(command.exec()).context(|| "cannot start rockenv".to_owned())
}

/// `__watch SESSION PID`: signals process PID when process SESSION ends or the watcher's standard error loses its
/// reader. Sends SIGTERM, or SIGHUP at a terminal, because interactive shells ignore SIGTERM.
pub(crate) fn watch(arguments: &[String]) -> Result<()> {
    let [session, command] = arguments else {
        return Err(usage());
    };
    // Detaches from the terminal's signals.
    let _: nix::Result<nix::unistd::Pid> = nix::unistd::setsid();
    let open = |text: &str| {
        let pid = text.parse().ok().and_then(Pid::from_raw);
        Ok::<_, Error>(pidfd_open(pid.ok_or_else(usage)?, PidfdFlags::empty()).ok())
    };
    let signal = match std::io::stderr().is_terminal() {
        true => Signal::HUP,
        false => Signal::TERM,
    };
    let Some(command) = open(command)? else {
        return Ok(());
    };
    if let Some(session) = open(session)? {
        let messages = std::io::stderr();
        let mut fds = [
            PollFd::new(command.as_fd(), PollFlags::POLLIN),
            PollFd::new(session.as_fd(), PollFlags::POLLIN),
            // poll always reports errors, such as a closed reader.
            PollFd::new(messages.as_fd(), PollFlags::empty()),
        ];
        while let Err(nix::Error::EINTR) = poll(&mut fds, PollTimeout::NONE) {}
        if fds[0].any() == Some(true) {
            return Ok(());
        }
    }
    match pidfd_send_signal(&command, signal) {
        Ok(()) | Err(rustix::io::Errno::SRCH) => Ok(()),
        Err(error) => Err(std::io::Error::from(error).into()),
    }
}

pub(super) fn usage() -> Error {
    usage!("this subcommand is for rockenv's own use, on another machine")
}
