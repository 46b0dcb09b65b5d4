//! Owns the identity of the caller: the user behind `sudo`, the user's entry in `/etc/passwd`, and the rights for the
//! user's files.

mod place;
pub(crate) mod rights;

use std::collections::BTreeMap;
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::sys::error::Result;
use crate::sys::host::system_text;
use crate::sys::process::PATH;
use crate::sys::readable::readable;
use crate::sys::userns;
use serde::{Deserialize, Serialize};

pub(crate) use place::{Existing, FilePlace, is_missing, make_directories, open, resolved};
pub(crate) use rights::Rights;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Person {
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    pub(crate) groups: Vec<u32>,
}

impl Person {
    /// Returns a user with the groups that the system lists.
    pub(crate) fn of(uid: u32, gid: u32) -> Self {
        let groups = groups_of(uid, gid);
        Self { uid, gid, groups }
    }
}

static CALLER: OnceLock<Rights> = OnceLock::new();

/// Sets, once, the rights that [`caller`] returns: root called by an ordinary user acts for that user. Also sets root's
/// umask.
pub(crate) fn set_caller(user: &BuildUser) {
    if !nix::unistd::geteuid().is_root() {
        return;
    }
    rights::set_umask();
    if user.uid != 0 {
        // A second call reads the same environment, so its value is the same.
        let person = Person::of(user.uid, user.gid);
        drop(CALLER.set(Rights::Of(person, Mutex::default())));
    }
}

/// Returns the rights of the calling user, for reading and writing that user's files outside the store.
pub(crate) fn caller() -> &'static Rights {
    CALLER.get().unwrap_or(&Rights::Own)
}

/// Drops root's rights if another user called, for a command that does not need root.
pub(crate) fn become_caller() -> Result<()> {
    rights::restore_umask();
    match caller() {
        Rights::Own => Ok(()),
        Rights::Of(person, _) => rights::become_person(person),
    }
}

/// Returns the user behind `sudo`, `run0`, `pkexec` or `doas` according to their variables, or else the user of this
/// process. `doas` is a name.
pub(crate) fn invoking_user(
    sudo_uid: Option<&String>,
    sudo_gid: Option<&String>,
    pkexec: Option<&String>,
    doas: Option<&String>,
) -> Result<BuildUser> {
    let number = |text: &String| {
        text.parse::<u32>().map_err(|_| {
            invalid!("`{text}` is not a user or group id").help("unset SUDO_UID SUDO_GID")
        })
    };
    let uid = match sudo_uid.or(pkexec) {
        // Only root acts for another user; without root the variables are leftovers.
        _ if !nix::unistd::geteuid().is_root() => None,
        Some(uid) => Some(number(uid)?),
        None => doas.map(|name| uid_of(name)).transpose()?,
    };
    if let Some(uid) = uid {
        let gid = match sudo_gid {
            Some(gid) => number(gid)?,
            None => passwd_line(uid)
                .and_then(|line| line.split(':').nth(3)?.parse().ok())
                .unwrap_or(uid),
        };
        return Ok(BuildUser::new(uid, gid));
    }
    let (uid, gid) = (nix::unistd::getuid(), nix::unistd::getgid());
    Ok(BuildUser::new(uid.as_raw(), gid.as_raw()))
}

/// Returns a user's line of `/etc/passwd`, or the one that NSS has for a user of a directory server or of
/// systemd-homed. Reads the file directly, because a static binary has no NSS.
fn passwd_line(uid: u32) -> Option<String> {
    line_or_ask(&local_users(), UID, &uid.to_string())
}

fn uid_of(name: &str) -> Result<u32> {
    let uid = line_or_ask(&local_users(), NAME, name)
        .and_then(|line| line.split(':').nth(UID)?.parse().ok());
    uid.ok_or_else(|| invalid!("DOAS_USER: no user `{name}`").help("unset DOAS_USER"))
}

/// Fields of a line of `/etc/passwd`.
const NAME: usize = 0;
const UID: usize = 2;

fn line_or_ask(passwd: &str, field: usize, value: &str) -> Option<String> {
    line_of(passwd, field, value).or_else(|| {
        let said = once(value, || ask_system("getent", &["passwd", value]))?;
        line_of(&said, field, value)
    })
}

/// Asks the system about a user, once per process: the answer may come from a server, and each call of git needs it.
fn once(user: &str, ask: impl FnOnce() -> Option<String>) -> Option<String> {
    static ANSWERS: Mutex<BTreeMap<String, Option<String>>> = Mutex::new(BTreeMap::new());
    let mut answers = ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    answers.entry(user.to_owned()).or_insert_with(ask).clone()
}

pub(crate) fn is_local(uid: u32) -> bool {
    line_of(&local_users(), UID, &uid.to_string()).is_some()
}

fn local_users() -> String {
    system_text("/etc/passwd").unwrap_or_default()
}

fn line_of(passwd: &str, field: usize, value: &str) -> Option<String> {
    let mut lines = passwd.lines();
    let found = lines.find(|line| line.split(':').nth(field) == Some(value));
    found.map(str::to_owned)
}

/// How long a name service may take to answer: it may wait for a server that is gone.
const PATIENCE: Duration = Duration::from_secs(30);
const LONGEST: usize = 1 << 20;

pub(super) fn ask_system(program: &str, arguments: &[&str]) -> Option<String> {
    answer(program, arguments, PATIENCE)
}

/// Returns a program's output if it is complete within the limit. Starts no thread: a process with several cannot enter
/// a user namespace.
fn answer(program: &str, arguments: &[&str], limit: Duration) -> Option<String> {
    let deadline = Instant::now() + limit;
    let mut child = Command::new(program)
        .args(arguments)
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .ok()?;
    let mut output = child.stdout.take()?;
    let (mut said, mut part) = (Vec::new(), [0; 4096]);
    let is_complete = loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if readable([Some(output.as_fd())], Some(left)) != Ok([true]) {
            break false;
        }
        match output.read(&mut part) {
            Ok(0) => break true,
            Ok(length) if said.len() + length <= LONGEST => said.extend_from_slice(&part[..length]),
            _ => break false,
        }
    };
    child.kill().ok();
    child.wait().ok();
    is_complete.then(|| String::from_utf8_lossy(&said).into_owned())
}

/// Returns the name of a user, or the uid if it has none.
pub(crate) fn name_of(uid: u32) -> String {
    let line = passwd_line(uid);
    let name = line.as_deref().and_then(|line| line.split(':').next());
    name.map_or_else(|| uid.to_string(), str::to_owned)
}

pub(crate) fn home_of(uid: u32) -> Option<PathBuf> {
    passwd_line(uid)?
        .split(':')
        .nth(5)
        .filter(|home| !home.is_empty())
        .map(PathBuf::from)
}

/// Resolves a path written in a file of `directory`; `~` stands for `home`.
pub(crate) fn path_in_file(path: &Path, directory: &Path, home: &Path) -> PathBuf {
    match path.strip_prefix("~") {
        Ok(rest) => home.join(rest),
        Err(_) => directory.join(path),
    }
}

/// Returns the groups of a user according to `/etc/passwd` and `/etc/group`, and to NSS if the user is not in
/// `/etc/passwd`. In a user namespace, returns only `gid`, because the ids in these files mean other groups there.
fn groups_of(uid: u32, gid: u32) -> Vec<u32> {
    let mut groups = vec![gid];
    let line = userns::is_root().then(|| passwd_line(uid)).flatten();
    let Some(line) = line else {
        return groups;
    };
    let mut fields = line.split(':');
    let name = fields.next().unwrap_or_default();
    groups.extend(fields.nth(2).and_then(|gid| gid.parse::<u32>().ok()));
    let text = system_text("/etc/group").unwrap_or_default();
    groups.extend(members(&text, name));
    if line_of(&local_users(), NAME, name).is_none()
        && let Some(said) = once(&format!("-G {name}"), || ask_system("id", &["-G", name]))
    {
        groups.extend(
            said.split_whitespace()
                .filter_map(|id| id.parse::<u32>().ok()),
        );
    }
    groups
}

/// Returns the ids of the groups that list a user.
fn members<'a>(groups: &'a str, name: &'a str) -> impl Iterator<Item = u32> + 'a {
    groups.lines().filter_map(move |line| {
        let mut fields = line.split(':').skip(2);
        let gid = fields.next()?.parse().ok()?;
        let mut members = fields.next()?.split(',');
        (!name.is_empty() && members.any(|member| member == name)).then_some(gid)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_user_who_is_not_in_the_file_is_looked_up_by_the_system() {
        let file = "root:x:1:0::/wrong:\nann:x:0:0::/ann:\n";
        assert_eq!(line_or_ask(file, UID, "0").unwrap(), "ann:x:0:0::/ann:");
        for (field, value) in [(UID, "0"), (NAME, "root")] {
            let asked = line_or_ask("", field, value).unwrap();
            assert!(asked.starts_with("root:"), "{asked}");
        }
        assert_eq!(line_or_ask("", NAME, "0"), None);
        assert!(once("0", || unreachable!("asked again")).is_some());
    }

    #[test]
    fn a_name_service_that_hangs_or_never_ends_has_no_answer() {
        assert_eq!(answer("sleep", &["60"], Duration::from_millis(20)), None);
        assert_eq!(answer("yes", &[], PATIENCE), None);
        assert_eq!(answer("echo", &["a"], PATIENCE).as_deref(), Some("a\n"));
    }

    #[test]
    fn groups_are_those_that_name_the_user() {
        let text = "root:x:0:\nvideo:x:44:ann,bob\nrender:x:109:bob\nbad:x:no:bob\nempty:x:7:\n";
        assert_eq!(members(text, "bob").collect::<Vec<_>>(), [44, 109]);
        assert_eq!(members(text, "").count(), 0);
        // The primary group is in `/etc/passwd` only.
        if userns::is_root() {
            assert!(groups_of(0, 7).starts_with(&[7, 0]));
        }
    }
}

/// The user that runs steps and owns their files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BuildUser {
    /// Name in the env.
    pub name: String,
    pub uid: u32,
    pub gid: u32,
    /// Home in the env.
    pub home: String,
}

impl BuildUser {
    /// Returns the build user of every env, with the invoking user's ids.
    pub fn new(uid: u32, gid: u32) -> Self {
        Self {
            name: "builder".to_owned(),
            uid,
            gid,
            home: "/home/builder".to_owned(),
        }
    }
}
