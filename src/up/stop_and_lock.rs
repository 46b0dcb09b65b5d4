//! Owns taking an env away from the processes that run in it.

use std::io::ErrorKind;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::engine::hold::ContainerRecord;
use crate::plan::ids::EnvName;
use crate::store::env::env_named;
use crate::store::{LockedEnv, Store, lock};
use crate::sys::error::{Kind, Result};
use crate::sys::host::system_text;

/// How long the holder of an env may take to stop after being asked.
const PATIENCE: Duration = Duration::from_secs(60);

/// How long to wait before a stronger request.
const POLITE: Duration = Duration::from_secs(1);

/// Commands that run processes in an env, and end them when asked to stop. Other commands end in a moment.
const RUNNING: [&str; 3] = ["up", "exec", "verify"];

/// Locks an env: asks its lock holder to stop, with increasing force, and waits until nothing runs in it. Returns
/// whether anything ran.
pub(crate) fn stop_and_lock<'a>(
    store: &'a Store,
    name: &EnvName,
    verb: &str,
) -> Result<(LockedEnv<'a>, bool)> {
    let started = Instant::now();
    let mut asked = Asked::Nobody;
    let mut ran = false;
    let mut wait = lock::Wait::begin();
    loop {
        // Locking also ends and cleans up the leftovers of a killed command.
        match store.lock_env(name, verb, Duration::ZERO) {
            Ok(env) => return Ok((env, ran)),
            Err(error) if error.kind() == Kind::Busy => {
                ran = true;
                let waited = started.elapsed();
                if waited > PATIENCE {
                    // The error's own help suggests what was just tried.
                    return Err(error.help("wait for that command, then run this one again"));
                }
                let path = lock::env_lock(&store.env_dir(name));
                wait.tell(&path, &env_named(name))?;
                if asked == Asked::Nobody {
                    // `up` stops its step and records where it was.
                    if let Some(holder) = holder(store, name)
                        && RUNNING.contains(&holder.verb.as_str())
                        && let Ok(pid) = i32::try_from(holder.pid)
                        // Its container may outlive it, and another command may have its id.
                        && has_open(&Path::new("/proc").join(pid.to_string()), &path) != Some(false)
                        && is_rockenv(pid)
                    {
                        let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGTERM);
                        asked = Asked::Command;
                    } else if waited > POLITE {
                        asked = Asked::Command;
                    }
                } else if asked == Asked::Command && waited > POLITE {
                    // The command may be gone and its container shared by others, or unresponsive.
                    if let Some(state) = ContainerRecord::read(&store.env_dir(name).join("run")) {
                        state.terminate()?;
                    }
                    asked = Asked::Container;
                } else if asked == Asked::Container && waited > POLITE * 3 {
                    if let Some(state) = ContainerRecord::read(&store.env_dir(name).join("run")) {
                        state.kill(PATIENCE)?;
                    }
                    asked = Asked::Kernel;
                } else if asked == Asked::Kernel && waited > POLITE * 8 {
                    kill_deaf(&store.env_dir(name).join("lock"), is_stopped)?;
                    asked = Asked::Stopped;
                } else if asked == Asked::Stopped && waited > POLITE * 30 {
                    kill_deaf(&store.env_dir(name).join("lock"), is_holder)?;
                    asked = Asked::Holder;
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error),
        }
    }
}

/// The last request to stop.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Asked {
    Nobody,
    Command,
    Container,
    Kernel,
    Stopped,
    Holder,
}

/// Returns whether a process is rockenv: its id may have been reused.
fn is_rockenv(pid: i32) -> bool {
    let process = Path::new("/proc").join(pid.to_string());
    runs_same(Path::new("/proc/self"), &process)
}

/// Returns whether two processes have the same program, perhaps started by different names, or the same name.
/// An upgrade may have replaced the program of one, and a process in its own user namespace, as without root, hides it.
fn runs_same(one: &Path, other: &Path) -> bool {
    let program = |process: &Path| fs_err::read_link(process.join("exe")).ok();
    let name = |process: &Path| fs_err::read(process.join("comm")).ok();
    program(one).is_some_and(|known| Some(known) == program(other))
        || name(one).is_some_and(|known| Some(known) == name(other))
}

/// Returns whether a process has a file open; `None` if that is unknown, as in another user namespace.
fn has_open(process: &Path, file: &Path) -> Option<bool> {
    for open in fs_err::read_dir(process.join("fd")).ok()?.flatten() {
        match fs_err::read_link(open.path()) {
            Ok(to) if to == file => return Some(true),
            Err(error) if error.kind() == ErrorKind::PermissionDenied => return None,
            // Another file, or closed since.
            Ok(_) | Err(_) => {}
        }
    }
    Some(false)
}

pub(crate) fn holder(store: &Store, env: &EnvName) -> Option<lock::Holder> {
    lock::holder(&lock::env_lock(&store.env_dir(env)))
}

/// Kills commands and holders that keep an env locked and do not respond: first those stopped by SIGSTOP, later holders
/// whose containers are gone. The next command that locks the env cleans up after them.
fn kill_deaf(lock: &Path, which: fn(&Path) -> bool) -> Result<()> {
    let lock = fs_err::canonicalize(lock)?;
    for entry in fs_err::read_dir("/proc")?.flatten() {
        let name = entry.file_name();
        let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok()) else {
            continue;
        };
        let keeps = has_open(&entry.path(), &lock) == Some(true);
        if keeps && which(&entry.path()) && (is_holder(&entry.path()) || is_rockenv(pid)) {
            let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
    Ok(())
}

fn is_holder(process: &Path) -> bool {
    let line = fs_err::read(process.join("cmdline")).unwrap_or_default();
    line.split(|byte| *byte == 0).nth(1) == Some(b"__hold")
}

fn is_stopped(process: &Path) -> bool {
    let status = system_text(process.join("status")).unwrap_or_default();
    let state = status.lines().find_map(|line| line.strip_prefix("State:"));
    state.is_some_and(|state| state.trim_start().starts_with('T'))
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::CommandExt as _;

    use super::*;

    #[test]
    fn a_process_that_took_the_id_of_a_lock_holder_is_told_from_it() {
        let directory = tempfile::tempdir().unwrap();
        let place = fs_err::canonicalize(directory.path()).unwrap();
        let [lock, other] = ["lock", "other"].map(|name| place.join(name));
        let _held = lock::Lock::try_exclusive(&lock).unwrap().unwrap();
        fs_err::write(&other, "").unwrap();
        let this = Path::new("/proc/self");
        assert_eq!(has_open(this, &lock), Some(true));
        assert_eq!(has_open(this, &other), Some(false));
        assert_eq!(has_open(Path::new("/proc/0"), &lock), None);
    }

    #[test]
    fn a_command_is_known_by_its_program_or_its_name() {
        let directory = tempfile::tempdir().unwrap();
        let start = |program: &str, name: &str| {
            let place = directory.path().join(program);
            fs_err::create_dir_all(&place).unwrap();
            let place = place.join(name);
            fs_err::os::unix::fs::symlink(Path::new("/bin").join(program), &place).unwrap();
            let mut command = std::process::Command::new(place);
            command.arg0(program).stdin(std::process::Stdio::piped());
            let child = command.arg("--").spawn().unwrap();
            let process = Path::new("/proc").join(child.id().to_string());
            // The kernel sets the name before the arguments.
            while !fs_err::read(process.join("cmdline"))
                .unwrap()
                .ends_with(b"--\0")
            {
                std::thread::yield_now();
            }
            (child, process)
        };
        let (mut first, own) = start("cat", "rockenv");
        // Installed under two names, and replaced by an upgrade.
        let others = [start("cat", "rockenv-1"), start("tee", "rockenv")];
        let same = others.iter().map(|(_, other)| runs_same(&own, other));
        let same: Vec<bool> = same.collect();
        let unrelated = runs_same(&own, Path::new("/proc/self"));
        first.kill().unwrap();
        first.wait().unwrap();
        for (mut other, _) in others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
        assert_eq!((same, unrelated), (vec![true, true], false));
    }
}
