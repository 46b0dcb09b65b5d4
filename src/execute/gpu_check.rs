//! Owns checking that a command can use its devices: rockenv's probe runs in the container first, as the same user
//! with the same groups, and its result decides.

use std::io::{ErrorKind, Read as _};
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use nix::fcntl::{FcntlArg, OFlag, fcntl};

use super::Ending;
use crate::engine::nspawn::PROGRAM;
use crate::engine::session::{Client, Running};
use crate::engine::wire::{Command, Reply, Word};
use crate::rocm::gpu::Device;
use crate::rocm::gpu::probe::{self, AccessLayer, Finding};
use crate::sys::error::Result;
use crate::sys::readable::readable;
use crate::sys::signals::Signals;

/// Limit for the probe. A hanging driver would hang the command too.
const PATIENCE: Duration = Duration::from_secs(60);
/// Limit until the container accepts the probe: another command or a service may still be starting the container.
const START: Duration = Duration::from_secs(600);
/// Maximum size of a report, in bytes.
const MAX_REPORT: u64 = 1 << 16;

/// The result, if nothing failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GpuCheck {
    Passed,
    Gone,
    Interrupted(i32),
}

/// Checks that `command` can use `devices`. The error for an unusable device names the layer that refuses it, and the
/// fix.
pub(crate) fn check(
    client: &Client,
    devices: &[Device],
    command: &Command,
    signals: Option<&Signals>,
) -> Result<GpuCheck> {
    let mut argv = vec![PROGRAM.to_owned(), "__probe-gpu".to_owned()];
    argv.extend(probe::arguments(devices));
    let probe = Command {
        argv: argv.into_iter().map(Word::Text).collect(),
        env: Vec::new(),
        cwd: "/".to_owned(),
        tty: false,
        ..command.clone()
    };
    let nothing = OwnedFd::from(fs_err::File::open("/dev/null")?.into_parts().0);
    let (report, report_end) = nix::unistd::pipe2(OFlag::O_CLOEXEC)?;
    let streams = [nothing.as_fd(), report_end.as_fd(), nothing.as_fd()];
    let sent = client.run(probe, &streams);
    drop(report_end);
    if sent.is_err() {
        return Ok(GpuCheck::Gone);
    }
    let mut deadline = Instant::now() + START;
    let mut starting = false;
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() && !starting {
            return Err(unavailable!("the container does not answer")
                .help("stop the env with `rockenv down ENV`, then run the command again"));
        }
        if left.is_zero() {
            return Err(unavailable!(
                "the GPU's driver does not answer: opening its device nodes hangs"
            )
            .help("sudo journalctl -k -g amdgpu"));
        }
        let given = [Some(client.as_fd()), signals.map(AsFd::as_fd)];
        let [answered, signalled] = readable(given, Some(left))?;
        if signalled
            && let Some(signals) = signals
            && let Some(number) = signals.pending()?
        {
            return Ok(GpuCheck::Interrupted(number));
        }
        if !answered {
            continue;
        }
        match client.receive()? {
            Some((Reply::Starting, _)) if !starting => {
                (starting, deadline) = (true, Instant::now() + PATIENCE);
            }
            Some((Reply::Starting | Reply::Started | Reply::Signalled, _)) => {}
            Some((Reply::Exited { .. }, _)) => {
                // The engine provides the groups only for an ordinary user.
                return result(&read(report)?, devices, command.groups.is_none());
            }
            Some((Reply::NotStarted { message, .. }, _)) => {
                return Err(
                    unexpected!("cannot check the GPU inside the container").source(message)
                );
            }
            None => return Ok(GpuCheck::Gone),
        }
    }
}

/// Checks the devices of a step whose container was just started; returns an ending if the step must not begin.
pub(crate) fn step(
    running: &mut Running,
    devices: &[Device],
    command: &Command,
    signals: &Signals,
    warn: &mut dyn FnMut(String),
) -> Result<Option<Ending>> {
    if devices.is_empty() {
        return Ok(None);
    }
    // A service may take minutes to start the container, and the holder reports that.
    if let Some(ending) = hear(running, signals, warn, Running::is_ready)? {
        return Ok(Some(ending));
    }
    let checked = match running.connect() {
        Ok(client) => check(&client, devices, command, Some(signals))?,
        Err(_) => GpuCheck::Gone,
    };
    match checked {
        GpuCheck::Passed => Ok(None),
        GpuCheck::Interrupted(signal) => Ok(Some(Ending::Interrupted(signal))),
        // The container ended; its holder has the reason.
        GpuCheck::Gone => hear(running, signals, warn, |_| false),
    }
}

/// Reads the holder's messages until `enough` is true or a signal arrives.
fn hear(
    running: &mut Running,
    signals: &Signals,
    warn: &mut dyn FnMut(String),
    enough: fn(&Running) -> bool,
) -> Result<Option<Ending>> {
    while !enough(running) {
        let [said, signalled] = readable([running.link(), signals.as_fd()].map(Some), None)?;
        if signalled && let Some(number) = signals.pending()? {
            return Ok(Some(Ending::Interrupted(number)));
        }
        if said {
            running.hear(warn)?;
        }
    }
    Ok(None)
}

/// Reads the report of a finished probe: a few hundred bytes, which fit into the pipe. Does not wait for the end of the
/// pipe: root of the container may keep it open.
#[expect(clippy::disallowed_types, reason = "a pipe has no path")]
fn read(report: OwnedFd) -> Result<Vec<u8>> {
    fcntl(&report, FcntlArg::F_SETFL(OFlag::O_NONBLOCK))?;
    let mut text = Vec::new();
    let mut report = std::fs::File::from(report).take(MAX_REPORT);
    match report.read_to_end(&mut text) {
        Err(error) if error.kind() != ErrorKind::WouldBlock => Err(error.into()),
        _ => Ok(text),
    }
}

/// Judges a report about `devices`; `rootless` tells whether an ordinary user runs the container.
fn result(report: &[u8], devices: &[Device], rootless: bool) -> Result<GpuCheck> {
    let findings: Vec<Finding> = serde_json::from_slice(report)
        .map_err(|error| unexpected!("the GPU check inside the container failed").source(error))?;
    let failed: Vec<&Finding> = findings.iter().filter(|finding| !finding.ok).collect();
    let Some(first) = failed.first() else {
        return Ok(GpuCheck::Passed);
    };
    let each: Vec<String> = failed
        .iter()
        .map(|finding| {
            let error = finding.error.as_deref().unwrap_or("it does not work");
            format!("`{}`: {error}", finding.path)
        })
        .collect();
    let error = unavailable!("the GPU cannot be used inside").source(each.join("; "));
    let absent = |finding: &&Finding| finding.layer == Some(AccessLayer::Absent);
    // The container must not choose the command that the user types on the host.
    let device = devices.iter().find(|device| device.path == first.path);
    Err(match (first.layer, device) {
        // The nodes existed when the container was defined.
        _ if failed.iter().all(absent) => error.help(
            "the container runs without the GPU; stop the env with `rockenv down ENV`, then run the command again",
        ),
        (Some(layer), Some(device)) => error.help(layer.fix(&device.path, rootless)),
        _ => error,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::Kind;

    #[test]
    fn a_report_is_judged_by_what_failed_first() {
        let ok = r#"{"path":"/dev/kfd","ok":true,"driver":"kfd 1.17"}"#;
        let group =
            r#"{"path":"/dev/dri/renderD128","ok":false,"layer":"group","error":"no","mend":"do"}"#;
        let absent =
            r#"{"path":"/dev/kfd","ok":false,"layer":"absent","error":"gone","mend":"load"}"#;
        let other = r#"{"path":"/dev/kfd; do","ok":false,"layer":"group","mend":"do"}"#;
        let devices = ["/dev/kfd", "/dev/dri/renderD128"].map(|path| Device {
            path: path.to_owned(),
            ..Device::default()
        });
        let result = |findings: &[&str]| {
            let report = format!("[{}]", findings.join(","));
            super::result(report.as_bytes(), &devices, false)
        };
        assert_eq!(result(&[ok, ok]).unwrap(), GpuCheck::Passed);
        let error = result(&[ok, group]).unwrap_err();
        assert_eq!(error.kind(), Kind::Unavailable);
        // The fix depends on the layer alone, not on the container's suggestion.
        let fix = AccessLayer::Group.fix("/dev/dri/renderD128", false);
        assert_eq!(error.help_text(), Some(fix.as_str()));
        assert_eq!(error.chain()[1], "`/dev/dri/renderD128`: no");
        let error = result(&[absent, group]).unwrap_err();
        assert_eq!(error.help_text(), Some("sudo modprobe amdgpu"));
        assert_eq!(result(&[other]).unwrap_err().help_text(), None);
        let error = result(&[absent, absent]).unwrap_err();
        assert!(error.help_text().unwrap().contains("`rockenv down ENV`"));
        let error = super::result(b"Segmentation fault", &devices, false).unwrap_err();
        assert_eq!(error.kind(), Kind::Unexpected);
    }

    #[test]
    fn who_keeps_the_report_open_keeps_nobody_waiting() {
        let (report, kept) = nix::unistd::pipe2(OFlag::O_CLOEXEC).unwrap();
        nix::unistd::write(&kept, b"[]").unwrap();
        assert_eq!(read(report).unwrap(), b"[]");
        drop(kept);
    }
}
