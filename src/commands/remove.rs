//! Owns `down` and `rm`.

use std::time::{Duration, Instant};

use clap::Args;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::exec::holder;
use crate::context::Context;
use crate::error::{Error, Kind, Result};
use crate::store::Store;

/// How long whoever holds an env may take to stop after being asked.
const PATIENCE: Duration = Duration::from_secs(15);

/// Arguments of `down`.
#[derive(Debug, Args)]
pub struct DownArgs {
    /// The env
    name: String,
}

/// Arguments of `rm`.
#[derive(Debug, Args)]
pub struct RmArgs {
    /// The envs
    #[arg(required = true)]
    names: Vec<String>,
    /// Stop first what runs in them
    #[arg(short, long)]
    force: bool,
}

/// Stops what runs in an env.
pub fn down(cx: &Context, args: &DownArgs) -> Result<()> {
    cx.host_as_root("stopping an env")?;
    let store = cx.existing_store()?;
    store.known(&args.name)?;
    stop(cx, &store, &args.name)?;
    cx.tidy(&store)
}

/// Asks the holder of an env to stop, and waits until nothing runs in it.
fn stop(cx: &Context, store: &Store, name: &str) -> Result<()> {
    let deadline = Instant::now() + PATIENCE;
    let mut asked = None;
    loop {
        // Taking the lock also ends and cleans up what a killed command left.
        match store.lock_env(name, "down", Duration::ZERO) {
            Ok(_) => {
                let word = if asked.is_some() {
                    "stopped"
                } else {
                    "nothing runs"
                };
                cx.ui.note(&format!("{name}: {word}; everything is kept"));
                return Ok(());
            }
            Err(error) if error.kind() == Kind::Busy => {
                let Some(holder) = holder(store, name) else {
                    continue;
                };
                if Instant::now() > deadline {
                    return Err(error);
                }
                if asked != Some(holder.pid) {
                    end_container(store, name)?;
                    if let Ok(pid) = i32::try_from(holder.pid) {
                        // Only a process that is rockenv's: the number may have gone to somebody else.
                        if is_rockenv(pid) {
                            let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGTERM);
                        }
                    }
                    asked = Some(holder.pid);
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            Err(error) => return Err(error),
        }
    }
}

/// Asks every command in the env's container to end, with the time that gives it.
fn end_container(store: &Store, name: &str) -> Result<()> {
    use crate::engine::hold::State;
    let path = State::path(&store.env_dir(name).join("run"));
    if let Some(state) = crate::store::atomic::read_json::<State>(&path).unwrap_or(None) {
        state.cgroup.terminate();
    }
    Ok(())
}

fn is_rockenv(pid: i32) -> bool {
    let ours = std::env::current_exe().ok();
    let theirs = fs_err::read_link(format!("/proc/{pid}/exe")).ok();
    ours.is_some() && ours == theirs
}

/// Removes envs.
pub fn rm(cx: &Context, args: &RmArgs) -> Result<()> {
    cx.host_as_root("removing an env")?;
    let store = cx.existing_store()?;
    for name in &args.names {
        store.known(name)?;
    }
    let question = format!(
        "remove {}? Sources, caches and outputs stay.",
        args.names.join(", ")
    );
    if !cx.ui.confirm(&question)? {
        return Err(Error::new(Kind::Usage, "not removed"));
    }
    for name in &args.names {
        if args.force {
            stop(cx, &store, name)?;
        }
        let env = store
            .lock_known(name, "rm", Duration::ZERO)
            .map_err(|error| {
                if error.kind() == Kind::Busy {
                    error.help(format!("rockenv rm --force {name}"))
                } else {
                    error
                }
            })?;
        env.remove()?;
        cx.ui.note(&format!("{name}: removed"));
    }
    cx.tidy(&store)
}
