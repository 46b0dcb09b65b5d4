//! Owns starting a program in namespaces of its own.

use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use nix::sched::CloneFlags;

use super::Program;
use crate::sys::error::Result;

/// Returns a command that runs `program` as PID 1, with mounts and a host name of its own: packages write the host name
/// into files, and an image must not depend on the machine's. `unshare` cannot set it.
#[expect(
    unsafe_code,
    reason = "the standard library has no safe way to enter a namespace"
)]
pub(super) fn command(program: &Path) -> Result<Command> {
    let unshare = Program::find("unshare", "running programs in isolation")?;
    let options = "--fork --pid --mount --mount-proc --propagation=private --kill-child=KILL";
    let mut command = Command::new(unshare.path);
    command.args(options.split(' ')).arg("--").arg(program);
    // SAFETY: between fork and exec the closure makes two system calls and neither allocates nor locks.
    unsafe {
        command.pre_exec(|| {
            nix::sched::unshare(CloneFlags::CLONE_NEWUTS)?;
            nix::unistd::sethostname("rockenv")?;
            Ok(())
        });
    }
    Ok(command)
}
