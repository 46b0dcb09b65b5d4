//! Owns reading the kernel's mount table and `/etc/fstab`, to name mounts and file systems in messages, and changing a
//! mount's flags.

use std::ffi::OsString;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::ffi::OsStringExt as _;
use std::path::{Path, PathBuf};

use nix::mount::{MsFlags, mount};
use nix::sys::statvfs::{FsFlags, statvfs};

use crate::sys::error::Result;
use crate::sys::host::mounted_as;
use crate::sys::shell::quoted_path;

/// Returns the mount points at or below the absolute path `top` in this thread's namespace.
pub(crate) fn at_or_below(top: &Path) -> Result<Vec<PathBuf>> {
    let mounted = mounted()?.into_iter().map(|(point, _)| point);
    Ok(mounted.filter(|point| point.starts_with(top)).collect())
}

/// Returns the mount points in this thread's namespace, each with the device and the directory that are mounted there.
pub(crate) fn mounted() -> Result<Vec<(PathBuf, String)>> {
    // Namespaces belong to threads, hence not `self`.
    let table = fs_err::read("/proc/thread-self/mountinfo")?;
    Ok(points(&table).collect())
}

/// Fails if the file system that `path` is meant for is not mounted. A directory that is made there fills another disk,
/// and hides behind the first one once that is mounted again. `what` has the path, and `otherwise` is another help.
pub(crate) fn check_mounted(path: &Path, what: &str, otherwise: &str) -> Result<()> {
    if let Some(point) = unmounted(path) {
        return Err(unavailable!(
            "the file system of {what} at `{}` is not mounted at `{}`",
            path.display(),
            point.display()
        )
        .help(format!("mount {}, or {otherwise}", quoted_path(&point))));
    }
    if is_on_absent_disk(path) {
        return Err(
            unavailable!("the disk of {what} at `{}` is not mounted", path.display()).help(
                format!(
                    "mount the disk, or {otherwise}; to have it without that disk: mkdir -p {}",
                    quoted_path(path)
                ),
            ),
        );
    }
    Ok(())
}

/// Returns the mount point at or above `path` for which `/etc/fstab` has a file system that is not mounted. Looks no
/// higher than the mount that `path` is on: a data disk in `/mnt`, or a home directory in a container.
pub(crate) fn unmounted(path: &Path) -> Option<PathBuf> {
    let table = fs_err::read("/etc/fstab").ok()?;
    let path = std::path::absolute(path).ok()?;
    // The kernel lists mount points without symlinks. fstab may have either path.
    let mut above = path.ancestors();
    let real = above.find_map(|above| fs_err::canonicalize(above).ok())?;
    let mounted = at_or_below(Path::new("/")).ok()?;
    let is_mounted = |at: &Path| fs_err::canonicalize(at).is_ok_and(|at| mounted.contains(&at));
    [path.as_path(), real.as_path()]
        .into_iter()
        .find_map(|path| {
            let mut points = path.ancestors().take_while(|at| !is_mounted(at));
            // The root of a chroot is not in the list.
            let found = points.find(|at| at.parent().is_some() && is_in_table(&table, at));
            found.map(Path::to_owned)
        })
}

/// Returns whether `path` is missing and on a removable disk that is not mounted. A directory that exists there was
/// made on purpose: desktops remove a mount point with the mount.
fn is_on_absent_disk(path: &Path) -> bool {
    let (Ok(path), Ok(mounted)) = (std::path::absolute(path), at_or_below(Path::new("/"))) else {
        return false;
    };
    !path.exists()
        && is_below_disks(&path, |at| {
            fs_err::canonicalize(at).is_ok_and(|at| mounted.contains(&at))
        })
}

/// Returns whether `path` is below a directory in which desktops mount removable disks, without a line in `/etc/fstab`,
/// and neither on one of them nor on a disk at that directory itself.
fn is_below_disks(path: &Path, is_mounted: impl Fn(&Path) -> bool) -> bool {
    ["/run/media", "/media"].iter().any(|disks| {
        let disks = Path::new(disks);
        let mut below = path.ancestors().take_while(|at| at.starts_with(disks));
        path != disks && path.starts_with(disks) && !below.any(&is_mounted)
    })
}

/// Returns whether a table like `/etc/fstab` has a file system for this mount point.
pub(crate) fn is_in_table(table: &[u8], at: &Path) -> bool {
    let at = escape(at);
    String::from_utf8_lossy(table).lines().any(|line| {
        let mut fields = line.split([' ', '\t']).filter(|field| !field.is_empty());
        let comment = fields.next().is_none_or(|first| first.starts_with('#'));
        !comment && fields.next() == Some(at.as_str())
    })
}

/// Escapes a path for `/etc/fstab`: blanks separate fields, and `#` begins a comment.
pub(crate) fn escape(path: &Path) -> String {
    let mut text = String::new();
    for letter in path.to_string_lossy().chars() {
        match letter {
            ' ' => text.push_str("\\040"),
            '\t' => text.push_str("\\011"),
            '\n' => text.push_str("\\012"),
            '#' => text.push_str("\\043"),
            '\\' => text.push_str("\\134"),
            other => text.push(other),
        }
    }
    text
}

/// Returns the type of the file system of `fd`, according to the mount table.
pub(crate) fn file_system(fd: BorrowedFd<'_>) -> Option<String> {
    mounted_as(fd)?.split(' ').next().map(str::to_owned)
}

/// Returns whether files below `path` may take less disk space than their size.
pub(crate) fn compresses(path: &Path) -> bool {
    let described = crate::sys::beneath::open_path(path)
        .ok()
        .and_then(|fd| mounted_as(fd.as_fd()));
    described.is_some_and(|described| is_compressing(&described))
}

/// Judges by type, source and options, which reveal compression only on some file systems.
fn is_compressing(described: &str) -> bool {
    let mut fields = described.split(' ');
    let kind = fields.next().unwrap_or_default();
    let mut options = fields.nth(1).unwrap_or_default().split(',');
    matches!(kind, "zfs" | "bcachefs" | "f2fs")
        || options.any(|option| option.starts_with("compress"))
}

/// Makes a bind mount of `from`, or with `None` gives the mount at a path other flags.
pub(crate) fn mount_with(from: Option<&Path>, at: &Path, flags: MsFlags) -> nix::Result<()> {
    mount(from, at, None::<&str>, flags, None::<&str>)
}

/// Adds flags to a mount in this thread's namespace, keeping its other flags, some of which a user namespace may not
/// remove.
pub(crate) fn add_flags(at: &Path, flags: MsFlags) -> nix::Result<()> {
    let found = statvfs(at)?.flags();
    let mut flags = MsFlags::MS_REMOUNT | MsFlags::MS_BIND | flags;
    for (is, keeps) in [
        (FsFlags::ST_RDONLY, MsFlags::MS_RDONLY),
        (FsFlags::ST_NODEV, MsFlags::MS_NODEV),
        (FsFlags::ST_NOSUID, MsFlags::MS_NOSUID),
        (FsFlags::ST_NOEXEC, MsFlags::MS_NOEXEC),
        (FsFlags::ST_NOATIME, MsFlags::MS_NOATIME),
        (FsFlags::ST_NODIRATIME, MsFlags::MS_NODIRATIME),
        (FsFlags::ST_RELATIME, MsFlags::MS_RELATIME),
    ] {
        if found.contains(is) {
            flags |= keeps;
        }
    }
    mount_with(None, at, flags)
}

fn points(table: &[u8]) -> impl Iterator<Item = (PathBuf, String)> {
    table.split(|byte| *byte == b'\n').filter_map(|line| {
        let mut fields = line.split(|byte| *byte == b' ').skip(2);
        let what = [fields.next()?, fields.next()?].join(&b' ');
        let point = PathBuf::from(OsString::from_vec(unescape(fields.next()?)));
        Some((point, String::from_utf8_lossy(&what).into_owned()))
    })
}

/// Decodes the kernel's octal escapes for blanks, tabs, newlines and backslashes.
fn unescape(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((&first, tail)) = rest.split_first() {
        if first == b'\\'
            && let Some(digits) = tail.get(..3)
            && let Ok(digits) = std::str::from_utf8(digits)
            && let Ok(byte) = u8::from_str_radix(digits, 8)
        {
            bytes.push(byte);
            rest = &tail[3..];
        } else {
            bytes.push(first);
            rest = tail;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compression_is_an_option_or_the_file_systems_own() {
        for (described, expected) in [
            ("btrfs /dev/a rw,ssd,compress=zstd:1,subvol=/", true),
            ("btrfs /dev/a rw,compress-force=lzo", true),
            ("btrfs /dev/compress rw,ssd,subvol=/compress", false),
            ("ext4 /dev/a rw", false),
            ("zfs tank rw,xattr", true),
            ("", false),
        ] {
            assert_eq!(is_compressing(described), expected, "{described}");
        }
    }

    #[test]
    fn a_disk_is_absent_if_nothing_is_mounted_on_the_way() {
        let mounted = ["/", "/run", "/media/me/disk", "/media/cdrom"].map(Path::new);
        for (path, expected) in [
            ("/media/me/other/store", true),
            ("/run/media/me/disk", true),
            ("/media/me/disk/store", false),
            ("/media/cdrom/a/store", false),
            ("/media", false),
            ("/mediator/store", false),
            ("/srv/store", false),
        ] {
            assert_eq!(
                is_below_disks(Path::new(path), |at| mounted.contains(&at)),
                expected,
                "{path}"
            );
        }
        let is_mounted = |at: &Path| at == Path::new("/media");
        assert!(!is_below_disks(Path::new("/media/store"), is_mounted));
        // An existing directory is meant. Not every machine lets the test make one.
        if let Ok(made) = tempfile::tempdir_in("/media") {
            check_mounted(made.path(), "it", "").unwrap();
        }
    }

    #[test]
    fn points_are_unescaped() {
        let table =
            b"22 1 0:5 / /proc rw - proc proc rw\n23 1 0:6 /d /a\\040b\\134c rw - tmpfs t rw\n";
        let found: Vec<_> = points(table).collect();
        let expected = [("/proc", "0:5 /"), ("/a b\\c", "0:6 /d")];
        assert_eq!(
            found,
            expected.map(|(at, what)| (PathBuf::from(at), what.to_owned()))
        );
    }
}
