//! Owns who calls: the person behind `sudo`, and what `/etc/passwd` says of them.

use std::path::PathBuf;

use fs_err as fs;

use crate::error::{Error, Result};
use crate::spec::BuildUser;

/// Returns the person behind `sudo` or `pkexec`, by what these say, or else the user of this process.
pub(crate) fn invoking_user(
    sudo_uid: Option<&String>,
    sudo_gid: Option<&String>,
    pkexec: Option<&String>,
) -> Result<BuildUser> {
    let number = |text: &String| {
        text.parse::<u32>().map_err(|_| {
            Error::invalid(format!("`{text}` is not a user or group id"))
                .help("unset SUDO_UID SUDO_GID")
        })
    };
    // Only root acts for somebody else; for others the variables are leftovers.
    if nix::unistd::geteuid().is_root()
        && let Some(uid) = sudo_uid.or(pkexec)
    {
        let uid = number(uid)?;
        let gid = match sudo_gid {
            Some(gid) => number(gid)?,
            None => passwd_line(uid)
                .and_then(|line| line.split(':').nth(3)?.parse().ok())
                .unwrap_or(uid),
        };
        return Ok(BuildUser::new(uid, gid));
    }
    Ok(BuildUser::new(
        nix::unistd::getuid().as_raw(),
        nix::unistd::getgid().as_raw(),
    ))
}

/// Reads `/etc/passwd` itself: a static binary has no NSS.
fn passwd_line(uid: u32) -> Option<String> {
    let text = fs::read_to_string("/etc/passwd").ok()?;
    text.lines()
        .find(|line| line.split(':').nth(2).and_then(|id| id.parse().ok()) == Some(uid))
        .map(str::to_owned)
}

/// Returns the home directory of a user.
pub(crate) fn home_of(uid: u32) -> Option<PathBuf> {
    passwd_line(uid)?
        .split(':')
        .nth(5)
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
}
