//! Owns opening entries below a directory, and nowhere else: crosses no mount point and follows no symlink.

use std::ffi::{CStr, CString};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::NixPath;
use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, OpenHow, RenameFlags, ResolveFlag, renameat, renameat2};
use nix::sys::stat::{FileStat, Mode, SFlag, UtimensatFlags, fstat, fstatat, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{UnlinkatFlags, Whence, fchownat, linkat, lseek, unlinkat};

use crate::sys::error::{Result, ResultExt as _};

/// Follows no symlink and never leaves the directory.
pub(crate) const BELOW: ResolveFlag = ResolveFlag::RESOLVE_BENEATH
    .union(ResolveFlag::RESOLVE_NO_SYMLINKS)
    .union(ResolveFlag::RESOLVE_NO_MAGICLINKS);

/// Like [`BELOW`], and crosses no mount point. `RESOLVE_NO_XDEV` compares mounts, not `st_dev`: it refuses a bind mount
/// of the same file system (`EXDEV`), and enters a btrfs subvolume, which is not a mount.
pub(crate) const STRICT: ResolveFlag = BELOW.union(ResolveFlag::RESOLVE_NO_XDEV);

/// Symlinks resolve as for a process whose root directory this is.
pub(crate) const IN_ROOT: ResolveFlag =
    ResolveFlag::RESOLVE_IN_ROOT.union(ResolveFlag::RESOLVE_NO_MAGICLINKS);

/// Opens the entry at `path` in a directory. Fails with `EXDEV` at a mount point, `ELOOP` at a symlink, and `ENOTDIR`
/// if `flags` request a directory and the entry is none.
pub(crate) fn open<P: ?Sized + NixPath>(
    parent: impl AsFd,
    path: &P,
    flags: OFlag,
) -> nix::Result<OwnedFd> {
    open_by(parent, path, flags | OFlag::O_NOFOLLOW, STRICT)
}

/// Like [`open`], with other rules for resolving.
pub(crate) fn open_by<P: ?Sized + NixPath>(
    parent: impl AsFd,
    path: &P,
    flags: OFlag,
    resolve: ResolveFlag,
) -> nix::Result<OwnedFd> {
    let how = OpenHow::new().flags(flags | OFlag::O_CLOEXEC);
    openat2(parent, path, how.resolve(resolve))
}

/// Creates a file that only its owner may open; fails with `EEXIST` if the name is taken, even by a symlink.
pub(crate) fn create<P: ?Sized + NixPath>(parent: impl AsFd, name: &P) -> nix::Result<OwnedFd> {
    let flags =
        OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_EXCL | OFlag::O_NOFOLLOW | OFlag::O_CLOEXEC;
    nix::fcntl::openat(parent, name, flags, Mode::S_IRUSR | Mode::S_IWUSR)
}

/// Renames an entry to a free name. Fails with `EEXIST` if the name is taken; never replaces an entry, on any file
/// system.
pub(crate) fn rename_new<F: ?Sized + NixPath, T: ?Sized + NixPath>(
    at: impl AsFd,
    from: &F,
    into: impl AsFd,
    to: &T,
) -> nix::Result<()> {
    match renameat2(&at, from, &into, to, RenameFlags::RENAME_NOREPLACE) {
        // NFS, and most FUSE file systems.
        Err(Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSUP) => {}
        other => return other,
    }
    match linkat(&at, from, &into, to, AtFlags::empty()) {
        Ok(()) => unlinkat(at, from, UnlinkatFlags::NoRemoveDir),
        // A directory, or a file system without hard links: FAT, object stores and SFTP servers through FUSE, shared
        // folders of virtual machines.
        Err(Errno::EPERM | Errno::EINVAL | Errno::ENOSYS | Errno::ENOTSUP) => {
            rename_to_claimed(at, from, into, to)
        }
        other => other,
    }
}

/// Claims a free name with an empty file, and replaces that. A directory needs no claim: it replaces only an empty one.
fn rename_to_claimed<F: ?Sized + NixPath, T: ?Sized + NixPath>(
    at: impl AsFd,
    from: &F,
    into: impl AsFd,
    to: &T,
) -> nix::Result<()> {
    if kind(&stat(&at, from)?) == SFlag::S_IFDIR {
        return match stat(&into, to) {
            Ok(_) => Err(Errno::EEXIST),
            Err(_) => renameat(at, from, into, to),
        };
    }
    drop(create(&into, to)?);
    let renamed = renameat(at, from, &into, to);
    // A network file system may report an error after it has renamed: then the name belongs to the file.
    if renamed.is_err() && stat(&into, to).is_ok_and(|found| found.st_size == 0) {
        // The first error is the one to report.
        unlinkat(into, to, UnlinkatFlags::NoRemoveDir).ok();
    }
    renamed
}

/// Opens a path below a directory by the rules of `how`. Retries on `EAGAIN`: the kernel gives up if a rename or mount
/// anywhere on the machine kept it from ruling out an escape.
pub(crate) fn openat2<P: ?Sized + NixPath>(
    directory: impl AsFd,
    path: &P,
    how: OpenHow,
) -> nix::Result<OwnedFd> {
    loop {
        match nix::fcntl::openat2(&directory, path, how) {
            Err(Errno::EINTR | Errno::EAGAIN) => {}
            other => return other,
        }
    }
}

pub(crate) fn open_dir<P: ?Sized + NixPath>(parent: impl AsFd, path: &P) -> nix::Result<OwnedFd> {
    open(parent, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)
}

/// Maximum length of a path given to one system call; the kernel's limit is 4096.
const PATH_STEP: usize = 4000;

/// Opens the directory at the relative path `below`, of any length, with the rules of [`open`] for each part.
pub(crate) fn open_below(root: impl AsFd, below: &Path) -> nix::Result<OwnedFd> {
    let mut at = open_dir(root, c".")?;
    let mut step = PathBuf::new();
    for part in below {
        if step.as_os_str().len() + part.len() > PATH_STEP {
            at = open_dir(at, &step)?;
            step.clear();
        }
        step.push(part);
    }
    if step.as_os_str().is_empty() {
        Ok(at)
    } else {
        open_dir(at, &step)
    }
}

/// Opens the entry at the relative path `below`, of any length, with the rules of [`open`] for each part.
pub(crate) fn open_entry_below(
    root: impl AsFd,
    below: &Path,
    flags: OFlag,
) -> nix::Result<OwnedFd> {
    match (below.parent(), below.file_name()) {
        (Some(parent), Some(name)) if below.as_os_str().len() > PATH_STEP => {
            open(open_below(root, parent)?, name, flags)
        }
        _ => open(root, below, flags),
    }
}

/// Reopens a path-only descriptor of a regular file for reading or writing. Returns any other descriptor unchanged:
/// opening a device or a FIFO may have side effects.
pub(crate) fn open_regular(found: OwnedFd, flags: OFlag) -> nix::Result<OwnedFd> {
    match kind(&fstat(&found)?) {
        SFlag::S_IFREG => {
            nix::fcntl::open(&path_of(&found), flags | OFlag::O_CLOEXEC, Mode::empty())
        }
        _ => Ok(found),
    }
}

/// Returns a path to an open file or directory, valid until that is closed, even if its name changes.
pub(crate) fn path_of(opened: &impl AsRawFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", opened.as_raw_fd()))
}

/// Reads the metadata of an entry, never that of a symlink's target.
pub(crate) fn stat<P: ?Sized + NixPath>(parent: impl AsFd, name: &P) -> nix::Result<FileStat> {
    fstatat(parent, name, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Sets the owner of an entry, never that of a symlink's target.
pub(crate) fn set_owner<P: ?Sized + NixPath>(
    parent: impl AsFd,
    name: &P,
    uid: u32,
    gid: u32,
) -> nix::Result<()> {
    let (uid, gid) = (Some(uid.into()), Some(gid.into()));
    fchownat(parent, name, uid, gid, AtFlags::AT_SYMLINK_NOFOLLOW)
}

/// Sets the modification time of an entry; for a symlink, of the link itself.
pub(crate) fn set_mtime<P: ?Sized + NixPath>(
    parent: impl AsFd,
    name: &P,
    mtime: &TimeSpec,
) -> nix::Result<()> {
    let link_itself = UtimensatFlags::NoFollowSymlink;
    utimensat(parent, name, &TimeSpec::UTIME_OMIT, mtime, link_itself)
}

pub(crate) fn kind(stat: &FileStat) -> SFlag {
    SFlag::from_bits_truncate(stat.st_mode) & SFlag::S_IFMT
}

/// Returns whether `name` is a real entry, not `.` or `..`.
pub(crate) fn is_entry(name: &CStr) -> bool {
    !matches!(name.to_bytes(), b"." | b"..")
}

/// Returns the entries of a directory that is open for reading, each with its type if the file system lists it. Threads
/// must not share the descriptor, because this moves its read position.
pub(crate) fn entries(directory: impl AsFd) -> nix::Result<Vec<(CString, Option<Type>)>> {
    let directory = directory.as_fd();
    // A duplicate shares the position. Opening the directory again would need the right to search it.
    lseek(directory, 0, Whence::SeekSet)?;
    let duplicate = directory.try_clone_to_owned();
    let mut reader = Dir::from_fd(duplicate.map_err(|_| Errno::EMFILE)?)?;
    let mut found = Vec::new();
    for entry in reader.iter() {
        let entry = entry?;
        if is_entry(entry.file_name()) {
            found.push((entry.file_name().to_owned(), entry.file_type()));
        }
    }
    Ok(found)
}

pub(crate) fn open_file(path: &Path, flags: OFlag) -> std::io::Result<fs_err::File> {
    use fs_err::os::unix::fs::OpenOptionsExt as _;
    let mut options = fs_err::OpenOptions::new();
    options.read(true).custom_flags(flags.bits()).open(path)
}

/// Opens the directory at `path`, but not through a link in its place.
pub(crate) fn open_real_dir(path: &Path) -> std::io::Result<fs_err::File> {
    open_file(path, OFlag::O_DIRECTORY | OFlag::O_NOFOLLOW)
}

/// Opens the directory at `path`; symlinks in the path belong to the caller and are followed.
pub(crate) fn open_path(path: &Path) -> Result<OwnedFd> {
    let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    nix::fcntl::open(path, flags, Mode::empty())
        .context(|| format!("cannot open directory `{}`", path.display()))
}

/// Returns the parent directory of a path; `.` for a plain name.
pub(crate) fn parent(path: &Path) -> &Path {
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// Splits `path` into its open parent directory and its last name, so that later operations use the descriptor.
pub(crate) fn split(path: &Path) -> Result<(OwnedFd, CString)> {
    let name = path
        .file_name()
        .ok_or_else(|| unexpected!("`{}` has no name of its own", path.display()))?;
    let name = CString::new(name.as_bytes())
        .map_err(|_| unexpected!("`{}` contains a NUL", path.display()))?;
    Ok((open_path(parent(path))?, name))
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicBool, Ordering};

    use fs_err as fs;

    use super::*;

    #[test]
    fn a_file_system_without_links_replaces_no_entry_either() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        fs::write(at("file"), "ours").unwrap();
        fs::write(at("taken"), "theirs").unwrap();
        fs::create_dir(at("directory")).unwrap();
        let top = open_path(directory.path()).unwrap();
        let rename = |from: &str, to: &str| rename_to_claimed(&top, from, &top, to);
        for from in ["file", "directory"] {
            assert_eq!(rename(from, "taken"), Err(Errno::EEXIST));
            rename(from, &format!("new {from}")).unwrap();
        }
        // A file on another file system cannot be renamed. The claim goes.
        let elsewhere = open_path(Path::new("/proc")).unwrap();
        let failed = rename_to_claimed(elsewhere, "version", &top, "new");
        assert_eq!(failed, Err(Errno::EXDEV));
        assert_eq!(fs::read(at("taken")).unwrap(), b"theirs");
        assert_eq!(fs::read(at("new file")).unwrap(), b"ours");
        assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 3);
    }

    #[test]
    fn renames_elsewhere_do_not_disturb() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name);
        for name in ["root", "root/etc", "root/lib", "moves"] {
            fs::create_dir(at(name)).unwrap();
        }
        fs::write(at("root/lib/release"), "").unwrap();
        // The kernel checks for concurrent renames only on `..`.
        fs::os::unix::fs::symlink("../lib/release", at("root/etc/release")).unwrap();
        let root = fs::File::open(at("root")).unwrap();
        let resolve = ResolveFlag::RESOLVE_BENEATH;
        let open = || open_by(root.file(), "etc/release", OFlag::O_RDONLY, resolve);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while !done.load(Ordering::Relaxed) {
                    fs::rename(at("moves"), at("moved")).unwrap();
                    fs::rename(at("moved"), at("moves")).unwrap();
                }
            });
            let outcome = (0..20_000).try_for_each(|_| open().map(drop));
            done.store(true, Ordering::Relaxed);
            outcome.unwrap();
        });
    }
}
