//! Owns working without root: this process becomes root of a user namespace, in which the invoking user's subordinate
//! ids are the other users, as in Podman. The store can therefore contain trees and volumes with files of any owner.

use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use nix::sched::{CloneFlags, unshare};

use crate::sys::account;
use crate::sys::error::{Error, Result, ResultExt as _, if_exists};
use crate::sys::host::system_text;
use crate::sys::process::{PATH, Program};
use crate::sys::shell::quoted;

/// Whether this process, or its parent, has entered a user namespace.
static ENTERED: AtomicBool = AtomicBool::new(false);

/// A range of ids that a user may map into namespaces: the first, and how many.
type Range = (u32, u32);

/// Returns whether this process is the machine's root, not only a namespace's.
pub(crate) fn is_root() -> bool {
    nix::unistd::geteuid().is_root() && !ENTERED.load(Ordering::Relaxed)
}

/// Records that the parent process has entered a user namespace.
pub(crate) fn inherit() {
    ENTERED.store(true, Ordering::Relaxed);
}

/// Makes this process root of a user namespace, unless it is root already. The process must have only one thread.
pub(crate) fn enter() -> Result<()> {
    if nix::unistd::geteuid().is_root() {
        return Ok(());
    }
    let (uid, gid) = (nix::unistd::geteuid(), nix::unistd::getegid());
    // Checked first, because a process cannot leave its namespace again.
    let (users, groups) = subordinate_ids()?;
    if let Some((reason, command)) = obstacle() {
        return Err(unavailable!("cannot work in a user namespace: {reason}")
            .help(format!("sudo {command}, or sudo rockenv ...")));
    }
    // A process inside can map only its own id. The shell stays outside meanwhile, and gets only numbers.
    let script = format!(
        "read -r _ && newuidmap {pid} {} && newgidmap {pid} {}",
        map(uid.as_raw(), &users),
        map(gid.as_raw(), &groups),
        pid = std::process::id(),
    );
    let cannot = || "cannot make a user namespace".to_owned();
    let mut outside = Command::new("/bin/sh")
        .args(["-c", &script])
        .env_clear()
        .env("PATH", PATH)
        .stdin(Stdio::piped())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .context(cannot)?;
    let entered = unshare(CloneFlags::CLONE_NEWUSER | CloneFlags::CLONE_NEWNS);
    let mut go = outside.stdin.take();
    if let (Ok(()), Some(go)) = (entered, &mut go) {
        go.write_all(b"\n").context(cannot)?;
    }
    drop(go);
    let mapped = outside.wait_with_output().context(cannot)?;
    if let Err(error) = entered {
        return Err(unavailable!("cannot make a user namespace")
            .source(error)
            .help("sudo rockenv ..."));
    }
    if !mapped.status.success() {
        return Err(unavailable!("cannot make a user namespace")
            .source(String::from_utf8_lossy(&mapped.stderr).trim().to_owned())
            .help("see /etc/subuid and /etc/subgid, or sudo rockenv ..."));
    }
    ENTERED.store(true, Ordering::Relaxed);
    account::rights::set_umask();
    Ok(())
}

/// Returns the ranges of the calling user, who is not root, and of the user's groups. Fails without a program that maps
/// them.
fn subordinate_ids() -> Result<(Vec<Range>, Vec<Range>)> {
    let uid = nix::unistd::geteuid().as_raw();
    let name = account::name_of(uid);
    let users = ranges("/etc/subuid", &[], &name, uid)?;
    let groups = ranges("/etc/subgid", &["-g"], &name, uid)?;
    if !["newuidmap", "newgidmap"]
        .iter()
        .all(|name| Program::find(name, "user namespaces").is_ok())
    {
        return Err(
            unavailable!("cannot make a user namespace: there is no newuidmap").help(
                "install newuidmap (package uidmap, shadow-utils or shadow), or sudo rockenv ...",
            ),
        );
    }
    Ok((users, groups))
}

/// Returns why the calling user has no ids for a user namespace, unless that is root.
pub(crate) fn lack_of_ids() -> Option<Error> {
    match nix::unistd::geteuid().is_root() {
        true => None,
        false => subordinate_ids().err(),
    }
}

/// Ubuntu's setting that takes the rights in user namespaces from programs without an AppArmor profile. They can still
/// make one.
const APPARMOR: &str = "kernel.apparmor_restrict_unprivileged_userns";

/// The only setting that applies to root too.
const MOST: &str = "user.max_user_namespaces";

/// Settings, each with the value that forbids user namespaces and one that permits them. No kernel has all of them.
const SETTINGS: [(&str, &str, &str); 3] = [
    ("kernel.unprivileged_userns_clone", "0", "1"),
    (APPARMOR, "1", "0"),
    (MOST, "0", "15000"),
];

fn setting(name: &str) -> String {
    let file = format!("/proc/sys/{}", name.replace('.', "/"));
    let text = system_text(file).unwrap_or_default();
    text.trim().to_owned()
}

/// Returns why this process cannot work in a user namespace, and the command that permits it.
pub(crate) fn obstacle() -> Option<(&'static str, String)> {
    let label = system_text("/proc/self/attr/current").unwrap_or_default();
    obstacle_of(nix::unistd::geteuid().is_root(), &label, setting)
}

/// Returns the same for a process with this AppArmor label.
fn obstacle_of(
    root: bool,
    label: &str,
    setting: impl Fn(&str) -> String,
) -> Option<(&'static str, String)> {
    let applies = |name: &str| match name {
        MOST => true,
        APPARMOR => !root && label.trim() == "unconfined",
        _ => !root,
    };
    let forbid = SETTINGS
        .iter()
        .filter(|(name, forbids, _)| applies(name) && setting(name) == *forbids);
    let words: Vec<String> = forbid
        .map(|(name, _, permits)| format!("{name}={permits}"))
        .collect();
    let reason = match &words[..] {
        [] => return None,
        [only] if only.starts_with(APPARMOR) => {
            "AppArmor gives programs without a profile no rights in one"
        }
        _ => "the kernel's settings forbid it",
    };
    Some((reason, format!("sysctl -w {}", words.join(" "))))
}

/// Returns arguments that map `own` to the namespace's root, and the ranges to the ids after it, in order.
fn map(own: u32, ranges: &[Range]) -> String {
    let mut words = vec![format!("0 {own} 1")];
    let mut inside = 1_u32;
    for (start, count) in ranges {
        words.push(format!("{inside} {start} {count}"));
        inside = inside.saturating_add(*count);
    }
    words.join(" ")
}

/// How many subordinate ids a user gets.
const EACH: u32 = 65_536;

/// Returns a user's ranges in `file`, or those that `getsubids` with these options has from a directory server.
fn ranges(file: &str, options: &[&str], name: &str, uid: u32) -> Result<Vec<Range>> {
    let text = if_exists(system_text(file))?.unwrap_or_default();
    let mut found = ranges_of(&text, name, uid);
    if found.is_empty()
        && let Some(said) = account::ask_system("getsubids", &[options, &[name]].concat())
    {
        found = ranges_of(&as_in_file(&said), name, uid);
    }
    if found.is_empty() {
        let taken =
            ["/etc/subuid", "/etc/subgid"].map(|file| system_text(file).unwrap_or_default());
        return Err(unavailable!(
            "user `{name}` has no subordinate ids in `{file}`; without them only root can build"
        )
        .help(add_range(name, &taken.join("\n"))));
    }
    Ok(found)
}

/// Returns the command that gives a user a free range. `usermod` refuses a user of a directory server, and missing
/// files.
fn add_range(name: &str, taken: &str) -> String {
    let line = format!("{name}:{}:{EACH}", first_free(taken));
    let line = quoted(&line);
    format!("printf '%s\\n' {line} | sudo tee -a /etc/subuid /etc/subgid")
}

/// Returns the first of as many free ids as a user gets: users who share ids can change each other's files. Podman's
/// manual gives `containers` all of the upper half.
fn first_free(taken: &str) -> u32 {
    let mut ranges: Vec<Range> = lines(taken).map(|(_, range)| range).collect();
    ranges.sort_unstable();
    ranges.iter().fold(100_000_u32, |first, (start, count)| {
        match start.saturating_sub(first) >= EACH {
            true => first,
            false => first.max(start.saturating_add(*count)),
        }
    })
}

/// Parses lines such as `ann:100000:65536`, which identify the user by name or id.
fn lines(text: &str) -> impl Iterator<Item = (&str, Range)> {
    text.lines().filter_map(|line| {
        let mut fields = line.trim().split(':');
        let user = fields.next()?;
        let mut numbers = fields.map(str::parse::<u32>);
        Some((user, (numbers.next()?.ok()?, numbers.next()?.ok()?)))
    })
}

/// Turns lines of `getsubids` such as `0: ann 100000 65536` into those of a file.
fn as_in_file(said: &str) -> String {
    let ranges = said.lines().filter_map(|line| {
        let behind = line.trim_start_matches(|digit: char| digit.is_ascii_digit());
        Some(behind.strip_prefix(": ")?.replace(' ', ":"))
    });
    ranges.collect::<Vec<_>>().join("\n")
}

fn ranges_of(text: &str, name: &str, uid: u32) -> Vec<Range> {
    let own = lines(text).filter(|(user, _)| *user == name || user.parse() == Ok(uid));
    own.map(|(_, range)| range)
        .filter(|(_, count)| *count > 0)
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_are_found_by_name_and_number_and_mapped_in_order() {
        let text = "ann:100000:65536\nbob:200000:1\n# no\n1001:300000:10\nann:bad:1\nann:400000:0\nann:500000:5\n";
        let ann = ranges_of(text, "ann", 1000);
        assert_eq!(map(1000, &ann), "0 1000 1 1 100000 65536 65537 500000 5");
        assert_eq!(ranges_of(text, "eve", 1001), [(300_000, 10)]);
        assert!(ranges_of(text, "eve", 1002).is_empty());
        let said = "note: ann 9 5\n0: ann 2147549184 65536\n1: ann 7 5\nError: ann 8 5\n";
        let ann = [(2_147_549_184, 65_536), (7, 5)];
        assert_eq!(ranges_of(&as_in_file(said), "ann", 1000), ann);
        assert_eq!(first_free(text), 200_001);
        let podman = "containers:2147483647:2147483648\nann:100000:65536\nbob:165536:65536\n";
        assert_eq!(first_free(podman), 231_072);
        assert_eq!(
            first_free("ann:100000:65536\n\nann:100000:65536\n"),
            165_536
        );
        assert_eq!(first_free("# no\nlow:1:5\n"), 100_000);
        // The `echo` of some shells would read the backslash as an escape.
        assert_eq!(
            add_range(r"HQ\ann", podman),
            r#"printf '%s\n' "HQ\\ann:231072:65536" | sudo tee -a /etc/subuid /etc/subgid"#
        );
    }

    #[test]
    fn only_settings_that_forbid_namespaces_here_are_changed() {
        let ubuntu = |name: &str| {
            let value = match name {
                APPARMOR | "kernel.unprivileged_userns_clone" => "1",
                "user.max_user_namespaces" => "127235",
                _ => "",
            };
            value.to_owned()
        };
        let apparmor = "sysctl -w kernel.apparmor_restrict_unprivileged_userns=0";
        let (reason, command) = obstacle_of(false, "unconfined\n", ubuntu).unwrap();
        assert_has!(reason, "AppArmor");
        assert_eq!(command, apparmor);
        assert_eq!(obstacle_of(false, "rockenv (unconfined)\n", ubuntu), None);
        assert_eq!(obstacle_of(true, "unconfined\n", ubuntu), None);
        let fedora = |_: &str| String::new();
        assert_eq!(obstacle_of(false, "unconfined\n", fedora), None);
        let hardened = |name: &str| String::from(if name == APPARMOR { "" } else { "0" });
        for (root, command) in [
            (
                false,
                "sysctl -w kernel.unprivileged_userns_clone=1 user.max_user_namespaces=15000",
            ),
            (true, "sysctl -w user.max_user_namespaces=15000"),
        ] {
            let (reason, found) = obstacle_of(root, "unconfined\n", hardened).unwrap();
            assert_has!(reason, "settings");
            assert_eq!(found, command);
        }
    }
}
