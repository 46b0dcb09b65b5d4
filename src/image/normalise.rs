//! Owns removing all traces of a build's time and place from a fresh root file system, so that two builds of a recipe
//! have the same digest and no two machines share an identity.
//!
//! Links are never followed, because the tree's links are untrusted.

use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag, fchmod};
use nix::sys::time::TimeSpec;

use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::tree::root_fs::{self, Tree};

/// Logs, caches, backups and keys. A fresh system lacks them or recreates them when needed.
const REMOVED: [&str; 24] = [
    "etc/.pwd.lock",
    "etc/.updated",
    "etc/group-",
    "etc/gshadow-",
    "etc/passwd-",
    "etc/shadow-",
    "etc/subgid-",
    "etc/subuid-",
    "etc/pacman.d/gnupg",
    "var/.updated",
    "var/cache/apt/pkgcache.bin",
    "var/cache/apt/srcpkgcache.bin",
    "var/cache/debconf/config.dat-old",
    "var/cache/debconf/templates.dat-old",
    "var/cache/ldconfig/aux-cache",
    "var/cache/pacman/pkg",
    "var/lib/dbus/machine-id",
    "var/lib/dpkg/available-old",
    "var/lib/dpkg/diversions-old",
    "var/lib/dpkg/lock",
    "var/lib/dpkg/lock-frontend",
    "var/lib/dpkg/statoverride-old",
    "var/lib/dpkg/status-old",
    "var/lib/systemd/random-seed",
];

/// Returns whether a file depends only on the time and place of the build: a log, a cache, a backup or an identity.
pub(crate) fn is_nondeterministic(path: &Path) -> bool {
    let more = [
        "etc/machine-id",
        "var/cache/fontconfig",
        "var/lib/apt/lists",
        "var/lib/pacman/sync",
        "var/log",
    ];
    let mut places = REMOVED.into_iter().chain(more);
    // pacman's `desc` has the time of the installation. The package's name and version are in the directory's name.
    let describes_package = path.starts_with("var/lib/pacman/local") && path.ends_with("desc");
    let text = path.to_str().unwrap_or_default();
    let is_host_key = text.starts_with("etc/ssh/ssh_host_");
    describes_package
        || is_host_key
        || places.any(|place| path != Path::new("var/log") && path.starts_with(place))
}

/// Removes nondeterministic files and limits times to `source_date`.
///
/// `copied_from_host`: the tool copied the host's resolv.conf and hostname into the tree.
pub(super) fn normalise(tree: &Tree, source_date: i64, copied_from_host: bool) -> Result<()> {
    for path in REMOVED {
        tree.remove_all(path)?;
    }
    // An empty file means "first boot", so each env gets its own id.
    tree.rewrite("etc/machine-id", b"")?;
    if copied_from_host {
        tree.remove("etc/hostname")?;
        empty_resolv_conf(tree)?;
    }
    for name in tree.list("etc/ssh")? {
        if name.starts_with(b"ssh_host_") {
            tree.remove(&format!("etc/ssh/{}", String::from_utf8_lossy(&name)))?;
        }
    }
    logs(tree, "var/log")?;
    shadow(tree, source_date)?;
    pacman(tree, source_date)?;
    let time = TimeSpec::new(source_date, 0);
    clamp(tree.fd(), &time)?;
    clamp_one(tree.fd(), b".", &time)
}

/// Replaces the copy of the host's resolv.conf with an empty file of a fixed mode, and creates it if the host has none:
/// the image must not depend on the host. A link at this path belongs to a package, and stays.
fn empty_resolv_conf(tree: &Tree) -> Result<()> {
    let path = "etc/resolv.conf";
    let cannot = || format!("cannot make `{path}` in the image");
    if let Ok(etc) = beneath::open_dir(tree.fd(), "etc") {
        match beneath::create(etc, "resolv.conf") {
            Err(Errno::EEXIST) => {}
            made => drop(made.context(cannot)?),
        }
    }
    if let Some(file) = tree.open_file(path, beneath::STRICT)? {
        fchmod(file, Mode::from_bits_truncate(0o644)).context(cannot)?;
    }
    tree.rewrite(path, b"")
}

/// Removes the logs of package managers, which recreate them. Other logs are only emptied, because a package chose
/// their owner and mode.
fn logs(tree: &Tree, directory: &str) -> Result<()> {
    for name in tree.list(directory)? {
        let name = String::from_utf8_lossy(&name).into_owned();
        let path = format!("{directory}/{name}");
        let is_package_log = directory.ends_with("/apt")
            || [
                "dpkg.log",
                "alternatives.log",
                "bootstrap.log",
                "fontconfig.log",
                "pacman.log",
            ]
            .contains(&name.as_str());
        if is_package_log {
            tree.remove(&path)?;
        } else {
            tree.rewrite(&path, b"")?;
            // Packages create at most two levels of log directories.
            if directory == "var/log" {
                logs(tree, &path)?;
            }
        }
    }
    Ok(())
}

/// Limits the day of each last password change to the day of the build.
fn shadow(tree: &Tree, source_date: i64) -> Result<()> {
    let Some(data) = tree.read("etc/shadow", 16 << 20)? else {
        return Ok(());
    };
    let day = source_date.div_euclid(86_400);
    let text = day.to_string();
    let is_later = |changed: &[u8]| {
        let changed = std::str::from_utf8(changed).ok();
        changed
            .and_then(|changed| changed.parse::<i64>().ok())
            .is_some_and(|changed| changed > day)
    };
    let lines = data.split(|byte| *byte == b'\n').map(|line| {
        let mut fields: Vec<&[u8]> = line.split(|byte| *byte == b':').collect();
        if let Some(changed) = fields.get_mut(2).filter(|changed| is_later(changed)) {
            *changed = text.as_bytes();
        }
        fields.join(&b':')
    });
    let new = lines.collect::<Vec<_>>().join(&b'\n');
    if new != data {
        tree.rewrite("etc/shadow", &new)?;
    }
    Ok(())
}

fn pacman(tree: &Tree, source_date: i64) -> Result<()> {
    let date = source_date.to_string();
    for name in tree.list("var/lib/pacman/sync")? {
        // Like apt's lists, these are outdated before their first use.
        let name = String::from_utf8_lossy(&name);
        tree.remove(&format!("var/lib/pacman/sync/{name}"))?;
    }
    for name in tree.list("var/lib/pacman/local")? {
        let name = String::from_utf8_lossy(&name);
        let path = format!("var/lib/pacman/local/{name}/desc");
        let Some(data) = tree.read(&path, 16 << 20)? else {
            continue;
        };
        // A packager's name may be in any encoding.
        let mut lines: Vec<&[u8]> = data.split(|byte| *byte == b'\n').collect();
        if let Some(at) = lines.iter().position(|line| *line == b"%INSTALLDATE%")
            && let Some(line) = lines.get_mut(at + 1)
        {
            *line = date.as_bytes();
            tree.rewrite(&path, &lines.join(&b'\n'))?;
        }
    }
    Ok(())
}

fn clamp(directory: BorrowedFd<'_>, time: &TimeSpec) -> Result<()> {
    for name in root_fs::names(directory)? {
        let stat = beneath::stat(directory, name.as_slice())?;
        if beneath::kind(&stat) == SFlag::S_IFDIR {
            clamp(beneath::open_dir(directory, name.as_slice())?.as_fd(), time)?;
        }
        if (stat.st_mtime, stat.st_mtime_nsec) > (time.tv_sec(), 0) {
            clamp_one(directory, &name, time)?;
        }
    }
    Ok(())
}

fn clamp_one(directory: BorrowedFd<'_>, name: &[u8], time: &TimeSpec) -> Result<()> {
    beneath::set_mtime(directory, name, time).context(|| {
        let name = String::from_utf8_lossy(name);
        format!("cannot set the time of `{name}` in the image")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    #[test]
    fn what_varies_goes_and_the_rest_stays() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let write = |path: &str, text: &str| {
            fs_err::create_dir_all(root.join(path).parent().unwrap()).unwrap();
            fs_err::write(root.join(path), text).unwrap();
        };
        let read = |path: &str| fs_err::read_to_string(root.join(path)).ok();
        write("etc/machine-id", "b0b0");
        write(
            "etc/shadow",
            "root:*:20777:0:99999:7:::\nold:!:100:0:::::\nweird\n",
        );
        write("etc/hostname", "build-host");
        write("etc/resolv.conf", "nameserver 192.0.2.1");
        let resolv_conf = root.join("etc/resolv.conf");
        let of_the_host = std::fs::Permissions::from_mode(0o600);
        fs_err::set_permissions(&resolv_conf, of_the_host).unwrap();
        write("etc/ssh/ssh_host_rsa_key", "secret");
        write("etc/ssh/sshd_config", "kept");
        write("var/log/apt/history.log", "x");
        write("var/log/dpkg.log", "x");
        write("var/log/wtmp", "x");
        write("var/log/private/app.log", "x");
        write(
            "var/lib/pacman/local/a-1/desc",
            "%NAME%\na\n\n%INSTALLDATE%\n1799999999\n\n%SIZE%\n1\n",
        );
        write("var/lib/pacman/local/b-1/desc", "");
        let latin = root.join("var/lib/pacman/local/b-1/desc");
        fs_err::write(&latin, b"%PACKAGER%\n\xe9\n%INSTALLDATE%\n1\n").unwrap();
        write("var/cache/pacman/pkg/a.pkg", "x");
        normalise(&Tree::open(root).unwrap(), 1_700_000_000, true).unwrap();
        let shadow = "root:*:19675:0:99999:7:::\nold:!:100:0:::::\nweird\n";
        for (path, content) in [
            ("etc/machine-id", Some("")),
            ("etc/shadow", Some(shadow)),
            ("etc/hostname", None),
            ("etc/resolv.conf", Some("")),
            ("etc/ssh/ssh_host_rsa_key", None),
            ("etc/ssh/sshd_config", Some("kept")),
            ("var/log/apt/history.log", None),
            ("var/log/dpkg.log", None),
            ("var/log/wtmp", Some("")),
            ("var/log/private/app.log", Some("")),
        ] {
            assert_eq!(read(path).as_deref(), content, "{path}");
        }
        assert_has!(
            read("var/lib/pacman/local/a-1/desc").unwrap(),
            "%INSTALLDATE%\n1700000000\n"
        );
        let dated = b"%PACKAGER%\n\xe9\n%INSTALLDATE%\n1700000000\n";
        assert_eq!(fs_err::read(latin).unwrap(), dated);
        assert!(!root.join("var/cache/pacman/pkg").exists());
        for path in ["", "etc", "etc/shadow", "var/log/wtmp"] {
            assert_eq!(
                fs_err::metadata(root.join(path)).unwrap().mtime(),
                1_700_000_000,
                "{path}"
            );
        }
        let before = fs_err::metadata(&resolv_conf).unwrap();
        assert_eq!(before.mode() & 0o7777, 0o644);
        // The host has no resolv.conf.
        fs_err::remove_file(&resolv_conf).unwrap();
        normalise(&Tree::open(root).unwrap(), 1_700_000_000, true).unwrap();
        let now = fs_err::metadata(&resolv_conf).unwrap();
        let of = |found: &std::fs::Metadata| (found.mode(), found.len(), found.mtime());
        assert_eq!(of(&now), of(&before));
    }

    #[test]
    fn a_package_that_was_installed_at_another_time_is_the_same() {
        for (path, is_other) in [
            ("var/lib/pacman/local/gcc-15.2-1/desc", false),
            ("var/lib/pacman/local/gcc-15.2-1/files", true),
            ("var/lib/pacman/local/gcc-15.2-1", true),
            ("usr/share/desc", true),
            ("var/lib/pacman/sync/core.db", false),
            ("var/log/pacman.log", false),
            ("var/log", true),
            // With the times of directories.
            ("var/cache/fontconfig/0f-le64.cache-9", false),
            ("var/lib/apt/lists/deb.example_InRelease", false),
            ("etc/ssh/ssh_host_rsa_key.pub", false),
            ("etc/ssh/sshd_config", true),
        ] {
            assert_eq!(!is_nondeterministic(Path::new(path)), is_other, "{path}");
        }
    }

    #[test]
    fn links_that_lead_out_are_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let host = dir.path().join("host");
        let root = dir.path().join("root");
        for path in ["log", "pacman/local/x", "ssh", "gnupg"] {
            fs_err::create_dir_all(host.join(path)).unwrap();
        }
        for path in [
            "log/dpkg.log",
            "pacman/local/x/desc",
            "ssh/ssh_host_key",
            "gnupg/key",
            "machine-id",
            "shadow",
        ] {
            fs_err::write(host.join(path), "%INSTALLDATE%\n1\nroot:*:99999:").unwrap();
        }
        for path in ["etc/pacman.d", "var/lib"] {
            fs_err::create_dir_all(root.join(path)).unwrap();
        }
        for (link, target) in [
            ("var/log", "log"),
            ("var/lib/pacman", "pacman"),
            ("etc/ssh", "ssh"),
            ("etc/pacman.d/gnupg", "gnupg"),
            ("etc/machine-id", "machine-id"),
            ("etc/resolv.conf", "machine-id"),
            ("etc/shadow", "shadow"),
        ] {
            symlink(host.join(target), root.join(link)).unwrap();
        }
        let cancel = std::sync::atomic::AtomicBool::new(false);
        let before = crate::tree::digest::digest(&host, &cancel).unwrap();
        normalise(&Tree::open(&root).unwrap(), 0, true).unwrap();
        assert_eq!(crate::tree::digest::digest(&host, &cancel).unwrap(), before);
    }
}
