//! Owns overlay mounts: the options, the limit on layers, and the checks of an upper directory.
//!
//! `index=off`, `metacopy=off` and `redirect_dir=nofollow` keep a layer self-contained: it can be renamed, stacked on
//! others and merged with its neighbours, because it never refers to a layer below. The price: writing one name of a
//! lower layer's hard link breaks the link, and renaming a lower directory copies it. Inode numbers and link counts
//! inside may change when an upper is frozen; modification times do not.
//!
//! Unmounting takes time: it drops each inode (about a second for 200,000), and without `volatile` writes out the
//! file system first. Renaming the upper of an unused mount and mounting the next takes a millisecond.

use std::fmt::Write as _;
use std::os::fd::{AsFd as _, AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::mount::{MsFlags, mount as sys_mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::stat::{Mode, fstat};

use super::flatten::{self, is_content};
use super::xattr::Attributes;
use super::{metadata, mounts};
use crate::sys::beneath;
use crate::sys::error::{Error, Kind, Result, ResultExt as _, if_exists};
use crate::sys::{thread, userns};

/// Maximum number of stacked layers, including the image; longer chains are flattened.
///
/// Measured on Linux 6.18 with a Debian `/usr` of 114,000 files below layers that all touch the same eight
/// directories: the first `find` with stat took 1.1 s on 1 layer, 1.2 on 10, 1.3 on 20, 2.4 on 30, 3.2 on 60, 5.7 on
/// 120; a lookup of a missing name (as compilers do along the include path) 6 us, 20, 31, 50, 150, 360. After the
/// first lookup, the depth costs nothing.
pub const MAX_LAYERS: usize = 20;

/// Prevents kernels from following forged references between layers.
const OPTIONS: &str = "index=off,metacopy=off,redirect_dir=nofollow";

/// The writable part of an overlay. Both directories are on one file system, and `work` belongs to this upper alone.
#[derive(Clone, Copy, Debug)]
pub struct Upper<'a> {
    /// Receives the changes; becomes a layer when frozen.
    pub diff: &'a Path,
    pub work: &'a Path,
}

/// Mounts `lowers` (top first, the image last) and `upper` at `at` in the caller's mount namespace.
///
/// The mount is volatile: nothing inside waits for the disk, and unmounting does not write out the store's whole file
/// system, which may have gigabytes of unrelated unwritten data. Freezing the upper must sync it.
///
/// Without `upper` the mount is read-only. The caller holds the lock that keeps `upper` from being mounted twice: the
/// kernel allows a second mount and calls the result undefined.
pub fn mount(lowers: &[PathBuf], upper: Option<Upper<'_>>, at: &Path) -> Result<()> {
    if let ([only], None) = (lowers, upper) {
        return bind_read_only(only, at);
    }
    if lowers.is_empty() || lowers.len() > MAX_KERNEL_LAYERS {
        return Err(unexpected!(
            "cannot mount an overlay of {} layers at `{}`",
            lowers.len(),
            at.display()
        ));
    }
    // Directories are passed as descriptors: they are short, so more fit into the one page of options, and `:` and `,`
    // in paths need no escaping.
    let mut held = Vec::new();
    let mut options = String::from("lowerdir=");
    for (index, lower) in lowers.iter().enumerate() {
        if index > 0 {
            options.push(':');
        }
        push_directory(&mut options, lower, &mut held)?;
    }
    if let Some(upper) = upper {
        options.push_str(",upperdir=");
        push_directory(&mut options, upper.diff, &mut held)?;
        options.push_str(",workdir=");
        push_directory(&mut options, upper.work, &mut held)?;
    }
    options.push(',');
    options.push_str(OPTIONS);
    if let Some(upper) = upper {
        forget_volatile(upper.work)?;
    }
    // `xino` gives all files one device number; kernels refuse it on exotic file systems. `volatile` needs Linux 5.10.
    let (flags, extras) = match upper {
        Some(_) => (
            MsFlags::empty(),
            [",volatile,xino=auto", ",volatile", ",xino=auto", ""].as_slice(),
        ),
        None => (MsFlags::MS_RDONLY, [",xino=auto", ""].as_slice()),
    };
    let mut result = Err(Errno::EINVAL);
    for extra in extras {
        let options = format!("{options}{extra}");
        let options = Some(options.as_str());
        result = sys_mount(Some("rockenv"), at, Some("overlay"), flags, options);
        if result != Err(Errno::EINVAL) {
            break;
        }
    }
    result.map_err(|error| explain(error, lowers, upper, at))
}

/// Removes the kernel's mark of an earlier volatile mount, which prevents another mount. The store itself tracks
/// whether the upper survived a power failure.
fn forget_volatile(work: &Path) -> Result<()> {
    let mark = work.join("work/incompat/volatile");
    if_exists(fs_err::remove_file(mark.join("dirty")))?;
    if_exists(fs_err::remove_dir(mark))?;
    Ok(())
}

/// The kernel allows 500, but a mount's options have to fit into one page.
const MAX_KERNEL_LAYERS: usize = 190;

fn push_directory(options: &mut String, path: &Path, held: &mut Vec<OwnedFd>) -> Result<()> {
    let flags = OFlag::O_PATH | OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let fd = nix::fcntl::open(path, flags, Mode::empty())
        .context(|| format!("cannot open the overlay layer `{}`", path.display()))?;
    write!(options, "/proc/self/fd/{}", fd.as_raw_fd())
        .map_err(|_| unexpected!("cannot write to a string"))?;
    held.push(fd);
    Ok(())
}

fn explain(error: Errno, lowers: &[PathBuf], upper: Option<Upper<'_>>, at: &Path) -> Error {
    let message = format!("cannot mount an overlay at `{}`", at.display());
    let cause = std::io::Error::from(error);
    match (error, upper) {
        (Errno::EPERM | Errno::EACCES, _) => unavailable!("{message}")
            .source(cause)
            .help(rights(userns::is_root())),
        (Errno::ENODEV, _) => unavailable!("{message}")
            .source(cause)
            .help("the kernel has no overlay file system: try `modprobe overlay`"),
        (Errno::ENOSPC | Errno::EDQUOT, _) => Error::new(Kind::OutOfSpace, message).source(cause),
        (Errno::EBUSY, Some(upper)) => busy!(
            "{message}: another process has mounted `{}`",
            upper.diff.display()
        )
        .source(cause),
        // FAT and other file systems without case cannot be the lowest layer, which may be a user's source, and network
        // file systems and ZFS before 2.2 not the upper one. Without help, a caller can add its own.
        (Errno::EINVAL, Some(upper)) => unavailable!(
            "{message}: `{}` and `{}` must be on file systems such as ext4, xfs or btrfs; the kernel log has the reason",
            lowers.last().map_or(at, PathBuf::as_path).display(),
            upper.diff.display()
        )
        .source(cause),
        _ => unexpected!("{message}").source(cause),
    }
}

/// Returns the help for a process that may not mount. Root may, except in an ordinary container.
fn rights(root: bool) -> &'static str {
    match root {
        true => "in a container, mounting needs `--privileged`",
        false => "mounting needs root: run rockenv with sudo",
    }
}

/// The kernel refuses an overlay of a single layer without an upper.
fn bind_read_only(from: &Path, at: &Path) -> Result<()> {
    mounts::mount_with(Some(from), at, MsFlags::MS_BIND)
        .and_then(|()| mounts::add_flags(at, MsFlags::MS_RDONLY))
        .context(|| format!("cannot mount `{}` at `{}`", from.display(), at.display()))
}

/// Makes the two directories of an upper, which must not exist, on the layer `below`.
pub fn create_upper(upper: Upper<'_>, below: &Path) -> Result<()> {
    create_layer(upper.diff, below)?;
    Ok(fs_err::create_dir(upper.work)?)
}

/// Makes the directory of a layer, which must not exist. An overlay's root shows the metadata of its topmost layer, so
/// the new one gets owner, mode, attributes and times of `below`, the layer under it.
pub(crate) fn create_layer(diff: &Path, below: &Path) -> Result<()> {
    let source = beneath::open_path(below)?;
    fs_err::create_dir(diff)?;
    let target = beneath::open_path(diff)?;
    let copy = || {
        let stat = fstat(&source)?;
        let (from, to) = (source.as_fd(), target.as_fd());
        metadata::clear_inherited(to)?;
        metadata::copy_open(from, &stat, to, &mut Attributes::default(), is_content)
    };
    copy().context(|| format!("cannot prepare the overlay layer `{}`", diff.display()))
}

/// Returns whether the upper directory is empty, so that freezing it would record no change.
///
/// Ignores changes to the root directory itself (its mode, owner or extended attributes).
pub fn is_clean(upper: &Path) -> Result<bool> {
    match fs_err::read_dir(upper)?.next() {
        None => Ok(true),
        Some(entry) => entry.map(|_| false).map_err(Error::from),
    }
}

/// Returns whether a directory of a layer hides the content of lower layers.
pub fn is_opaque(directory: &Path) -> Result<bool> {
    let open = beneath::open_path(directory)?;
    let found = flatten::is_opaque(open.as_fd(), &mut Attributes::default());
    found.context(|| format!("cannot read the attributes of `{}`", directory.display()))
}

/// Gives the process a mount namespace: the host's unmounts propagate into it, its own mounts do not propagate out.
pub(crate) fn enter_mount_namespace() -> Result<()> {
    unshare(CloneFlags::CLONE_NEWNS).context(|| "cannot make a mount namespace".to_owned())?;
    let slave = MsFlags::MS_REC | MsFlags::MS_SLAVE;
    Ok(mounts::mount_with(None, Path::new("/"), slave)?)
}

/// Runs `work` on a thread with its own mount namespace. Nothing propagates out of the namespace, and it is gone with
/// all its mounts when this returns.
pub fn in_throw_away_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> Result<T> {
    let run = || -> Result<T> {
        unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS)
            .and_then(|()| {
                let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
                mounts::mount_with(None, Path::new("/"), private)
            })
            .map_err(|error| {
                unavailable!("cannot make a mount namespace")
                    .source(std::io::Error::from(error))
                    .help(rights(userns::is_root()))
            })?;
        Ok(work())
    };
    std::thread::scope(|scope| thread::joined(thread::start_in(scope, run)?.join()))
}

#[cfg(test)]
mod tests {
    use nix::sys::statvfs::FsFlags;

    use super::*;

    #[test]
    fn a_single_layer_keeps_the_flags_of_its_file_system() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let [disk, at] = ["disk", "at"].map(|name| directory.path().join(name));
        fs_err::create_dir(&disk).unwrap();
        fs_err::create_dir(&at).unwrap();
        let flags = in_throw_away_namespace(|| {
            let (none, flags) = (None::<&str>, MsFlags::MS_NOSUID | MsFlags::MS_NODEV);
            sys_mount(none, &disk, Some("tmpfs"), flags, none).unwrap();
            mount(std::slice::from_ref(&disk), None, &at).unwrap();
            nix::sys::statvfs::statvfs(&at).unwrap().flags()
        });
        let wanted = FsFlags::ST_RDONLY | FsFlags::ST_NOSUID | FsFlags::ST_NODEV;
        assert!(flags.unwrap().contains(wanted));
    }

    #[test]
    fn root_is_not_told_to_use_sudo() {
        let refused = explain(Errno::EPERM, &[], None, Path::new("/x"));
        assert_eq!(refused.help_text(), Some(rights(userns::is_root())));
        assert!(rights(false).contains("sudo") && !rights(true).contains("sudo"));
    }

    #[test]
    fn a_layer_on_an_unsuitable_file_system_is_named() {
        let upper = Upper {
            diff: Path::new("/store/diff"),
            work: Path::new("/store/work"),
        };
        let lowers = ["/store/hook", "/media/source"].map(PathBuf::from);
        let error = explain(Errno::EINVAL, &lowers, Some(upper), Path::new("/x"));
        assert_has!(
            error.message(),
            "`/media/source` and `/store/diff` must be on"
        );
        // The probe of a store's file system names another place for the store.
        assert_eq!(error.help_text(), None);
    }
}
