//! Owns deleting trees: in parallel, across no mount point and through no symlink. A second call completes the first.
//!
//! Every operation uses a directory's file descriptor and one name in it, so concurrent renames cannot lead the
//! deletion out of the tree. A directory keeps its descriptor until its children are gone; a subtree that would go too
//! deep is first moved to the top of the tree.

use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use nix::errno::Errno;
use nix::fcntl::{OFlag, RenameFlags, renameat2};
use nix::sys::stat::{SFlag, fstat};
use nix::unistd::{UnlinkatFlags, unlinkat};
use rustix::fs::{FileType, RawDir, SeekFrom, seek};

use super::work_queue::Queue;
use super::{btrfs, errno, inode_flags, mounts};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _, exists};
use crate::sys::shell::quoted_path;

/// Maximum depth of open descriptors. Multiplied by the threads it stays below the usual limit of 1024 descriptors.
const MAX_DEPTH: usize = 40;
/// Buffer size of a listing call: one to two thousand entries.
const LISTING: usize = 64 * 1024;
/// How often a directory is read again because of entries added meanwhile.
const MAX_RESCANS: usize = 8;

/// Deletes `path` and everything below it. A missing path is a success: this may complete a killed deletion.
///
/// Refuses before touching anything if a mount is at or below `path`; a mount that appears later stops the deletion,
/// and nothing below it is touched. Other failures do not stop the rest; the first is returned.
pub fn remove_tree(path: &Path) -> Result<()> {
    let (holder, name) = match beneath::split(path) {
        Ok(split) => split,
        Err(error) => match path.parent() {
            Some(parent) if exists(parent)? => return Err(error),
            _ => return Ok(()),
        },
    };
    refuse_mounts(path, holder.as_fd(), &name)?;
    let on_btrfs =
        btrfs::is_btrfs(&holder).context(|| format!("cannot examine `{}`", path.display()))?;
    let holder = Arc::new(Directory {
        fd: holder,
        name: CString::default(),
        parent: None,
        depth: 0,
        pending: AtomicUsize::new(1),
        rescans: AtomicUsize::new(0),
    });
    let stat = match beneath::stat(&holder.fd, name.as_c_str()) {
        Ok(stat) => stat,
        Err(Errno::ENOENT) => return Ok(()),
        Err(error) => return Err(error).context(|| format!("cannot examine `{}`", path.display())),
    };
    let removal = Removal {
        path,
        on_btrfs,
        queue: Queue::new(),
        hoisted: AtomicUsize::new(0),
    };
    if beneath::kind(&stat) != SFlag::S_IFDIR {
        removal.unlink(&holder, &name, &mut Vec::new());
        return removal.finish();
    }
    removal.queue.push([Task {
        parent: holder,
        name,
    }]);
    removal
        .queue
        .run(|task, (): &mut ()| removal.enter(&task), drop);
    removal.finish()
}

/// Refuses with a clear message before anything is deleted, based on the mounts of this namespace. The actual
/// safeguard is `RESOLVE_NO_XDEV` on each directory.
fn refuse_mounts(path: &Path, holder: BorrowedFd<'_>, name: &CStr) -> Result<()> {
    let Ok(place) = fs_err::read_link(format!("/proc/self/fd/{}", holder.as_raw_fd())) else {
        return Ok(());
    };
    let top = place.join(OsStr::from_bytes(name.to_bytes()));
    match mounts::at_or_below(&top)?.first() {
        None => Ok(()),
        Some(mount) => Err(mounted(path, mount)),
    }
}

fn mounted(path: &Path, mount: &Path) -> Error {
    busy!(
        "refusing to delete `{}`: `{}` is a mount point",
        path.display(),
        mount.display()
    )
    .help(format!(
        "nothing below the mount was changed; run `umount {}` and try again",
        quoted_path(mount)
    ))
}

struct Directory {
    fd: OwnedFd,
    name: CString,
    parent: Option<Arc<Self>>,
    /// 0 is the directory that contains the tree, 1 the tree's top.
    depth: usize,
    /// Remaining child directories, plus one for the scan of the directory itself.
    pending: AtomicUsize,
    rescans: AtomicUsize,
}

/// The directory `name` of `parent`, not opened yet: a queued task holds no descriptor.
struct Task {
    parent: Arc<Directory>,
    name: CString,
}

struct Removal<'a> {
    path: &'a Path,
    on_btrfs: bool,
    queue: Queue<Task>,
    hoisted: AtomicUsize,
}

impl Removal<'_> {
    fn finish(self) -> Result<()> {
        match self.queue.into_failure() {
            None => Ok(()),
            Some((error, 1)) => Err(error),
            Some((error, more)) => Err(error).context(|| {
                format!(
                    "cannot delete `{}` ({more} entries remain, the first with this error)",
                    self.path.display()
                )
            }),
        }
    }

    /// Opens a task's directory and deletes everything in it except directories, which become tasks.
    fn enter(&self, task: &Task) {
        let Task { parent, name } = task;
        if parent.depth >= MAX_DEPTH && self.hoist(parent, name) {
            return self.child_done(parent);
        }
        let fd = match beneath::open_dir(&parent.fd, name.as_c_str()) {
            Ok(fd) => fd,
            Err(Errno::ENOENT) => return self.child_done(parent),
            // The directory was replaced since it was listed.
            Err(Errno::ELOOP | Errno::ENOTDIR) => {
                self.unlink(parent, name, &mut Vec::new());
                return self.child_done(parent);
            }
            Err(Errno::EMFILE | Errno::ENFILE) if parent.depth > 1 && self.hoist(parent, name) => {
                return self.child_done(parent);
            }
            Err(error) => {
                self.fail(parent, name, error);
                return self.child_done(parent);
            }
        };
        if self.on_btrfs && btrfs::is_subvolume_fd(&fd).unwrap_or(false) {
            let outcome = match btrfs::destroy(parent.fd.as_fd(), name) {
                // An ordinary user may empty the subvolume and remove it as a directory.
                Err(Errno::EPERM) => btrfs::make_writable(fd.as_fd()).map(|()| false),
                other => other.map(|()| true),
            };
            match outcome {
                Ok(false) => {}
                Ok(true) => return self.child_done(parent),
                Err(error) => {
                    self.fail(parent, name, error);
                    return self.child_done(parent);
                }
            }
        }
        let directory = Arc::new(Directory {
            fd,
            name: name.clone(),
            parent: Some(Arc::clone(parent)),
            depth: parent.depth + 1,
            pending: AtomicUsize::new(1),
            rescans: AtomicUsize::new(0),
        });
        self.scan(&directory);
        self.child_done(&directory);
    }

    fn scan(&self, directory: &Arc<Directory>) {
        let mut children = Vec::new();
        if let Err(error) = self.scan_entries(directory, &mut children) {
            self.fail(directory, c".", error);
        }
        if children.is_empty() {
            return;
        }
        directory
            .pending
            .fetch_add(children.len(), Ordering::AcqRel);
        // Tasks are taken from the back: reversed, they run in directory order, which is often the order on disk.
        self.queue.push(children.into_iter().rev().map(|name| Task {
            parent: Arc::clone(directory),
            name,
        }));
    }

    fn scan_entries(
        &self,
        directory: &Arc<Directory>,
        children: &mut Vec<CString>,
    ) -> nix::Result<()> {
        // Rewinds, because the directory may be read again.
        errno(seek(&directory.fd, SeekFrom::Start(0)))?;
        let mut listing = Box::new_uninit_slice(LISTING);
        let mut entries = RawDir::new(&directory.fd, &mut listing);
        while let Some(entry) = entries.next() {
            let entry = errno(entry)?;
            let name = entry.file_name();
            if !beneath::is_entry(name) {
                continue;
            }
            let is_dir = match entry.file_type() {
                FileType::Unknown => match beneath::stat(&directory.fd, name) {
                    Ok(stat) => beneath::kind(&stat) == SFlag::S_IFDIR,
                    Err(Errno::ENOENT) => continue,
                    Err(error) => {
                        self.fail(directory, name, error);
                        continue;
                    }
                },
                kind => kind == FileType::Directory,
            };
            if is_dir {
                children.push(name.to_owned());
            } else {
                self.unlink(directory, name, children);
            }
        }
        Ok(())
    }

    fn unlink(&self, directory: &Arc<Directory>, name: &CStr, children: &mut Vec<CString>) {
        let unlink = || unlinkat(&directory.fd, name, UnlinkatFlags::NoRemoveDir);
        let result = match unlink() {
            Err(Errno::EPERM) => unlink_protected(directory, name, unlink),
            other => other,
        };
        match result {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(Errno::EISDIR) => children.push(name.to_owned()),
            Err(error) => self.fail(directory, name, error),
        }
    }

    /// Records that a child or the scan of `directory` is done; after the last, deletes it and turns to its parent.
    fn child_done(&self, directory: &Arc<Directory>) {
        let mut directory = Arc::clone(directory);
        while directory.pending.fetch_sub(1, Ordering::AcqRel) == 1 {
            let Some(parent) = directory.parent.clone() else {
                return;
            };
            match remove_empty(&directory, &parent) {
                Ok(()) | Err(Errno::ENOENT) => {}
                Err(Errno::ENOTEMPTY) if self.queue.has_failed() => {}
                Err(Errno::ENOTEMPTY)
                    if directory.rescans.fetch_add(1, Ordering::Relaxed) < MAX_RESCANS =>
                {
                    directory.pending.store(1, Ordering::Release);
                    self.scan(&directory);
                    continue;
                }
                Err(error) => self.fail(&parent, &directory.name, error),
            }
            directory = parent;
        }
    }

    /// Moves the directory to the top of the tree, to reduce its depth. Returns whether it moved.
    fn hoist(&self, parent: &Arc<Directory>, name: &CStr) -> bool {
        let mut top = parent;
        while top.depth > 1 {
            match &top.parent {
                Some(above) => top = above,
                None => return false,
            }
        }
        loop {
            let number = self.hoisted.fetch_add(1, Ordering::Relaxed);
            let Ok(new) = CString::new(format!(".rockenv-deep-{number}")) else {
                return false;
            };
            let flags = RenameFlags::RENAME_NOREPLACE;
            match renameat2(&parent.fd, name, &top.fd, new.as_c_str(), flags) {
                Ok(()) => {
                    top.pending.fetch_add(1, Ordering::AcqRel);
                    self.queue.push_last(Task {
                        parent: Arc::clone(top),
                        name: new,
                    });
                    return true;
                }
                Err(Errno::EEXIST) => {}
                // The directory is gone, a mount point, or the disk is full: entering it in place reports which.
                Err(_) => return false,
            }
        }
    }

    fn fail(&self, directory: &Directory, name: &CStr, error: Errno) {
        let path = self.path_of(directory, name);
        let is_mount = matches!(error, Errno::EXDEV | Errno::EBUSY);
        let error = match error {
            Errno::EXDEV | Errno::EBUSY => mounted(self.path, &path),
            Errno::ENOSYS => unavailable!(
                "cannot delete `{}` safely: the kernel has no openat2",
                self.path.display()
            )
            .help("use Linux 5.6 or later; in a container, allow the system call openat2"),
            error => {
                let message = format!("cannot delete `{}`", path.display());
                let failed = Error::from(error).explained(message);
                match error {
                    Errno::EPERM => failed.help(format!("see `lsattr -d {}`", quoted_path(&path))),
                    _ => failed,
                }
            }
        };
        if is_mount {
            // The tree is in use, so nothing more may be deleted.
            self.queue.abort(error);
        } else {
            self.queue.fail(error);
        }
    }

    fn path_of(&self, directory: &Directory, name: &CStr) -> PathBuf {
        let mut names = vec![name];
        let mut at = Some(directory);
        while let Some(directory) = at.filter(|directory| directory.depth > 0) {
            names.push(&directory.name);
            at = directory.parent.as_deref();
        }
        // The last name is the tree itself, whose full path is known.
        names.pop();
        let mut path = self.path.to_owned();
        path.extend(
            names
                .iter()
                .rev()
                .filter(|name| beneath::is_entry(name))
                .map(|name| OsStr::from_bytes(name.to_bytes())),
        );
        path
    }
}

/// Deletes the emptied directory, clearing `chattr +i` if that prevents it.
fn remove_empty(directory: &Directory, parent: &Directory) -> nix::Result<()> {
    let name = directory.name.as_c_str();
    let remove = || unlinkat(&parent.fd, name, UnlinkatFlags::RemoveDir);
    match remove() {
        Err(Errno::EPERM) => {
            inode_flags::make_deletable(directory.fd.as_fd())?;
            make_deletable_inside(parent)?;
            remove()
        }
        other => other,
    }
}

/// Deletes a file that is immutable or append-only, or whose directory is.
fn unlink_protected(
    directory: &Directory,
    name: &CStr,
    unlink: impl Fn() -> nix::Result<()>,
) -> nix::Result<()> {
    make_deletable_inside(directory)?;
    if beneath::kind(&beneath::stat(&directory.fd, name)?) != SFlag::S_IFREG {
        return unlink();
    }
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_NOATIME;
    let file = beneath::open(&directory.fd, name, flags)?;
    let old = inode_flags::make_deletable(file.as_fd())?;
    let result = unlink();
    // Another name outside the tree keeps the file's protection.
    if let Some(old) = old
        && fstat(&file)?.st_nlink > 0
    {
        inode_flags::restore(file.as_fd(), old)?;
    }
    result
}

/// Clears the flags of a directory inside the tree, never those of the directory that contains the tree.
fn make_deletable_inside(directory: &Directory) -> nix::Result<()> {
    if directory.depth > 0 {
        inode_flags::make_deletable(directory.fd.as_fd())?;
    }
    Ok(())
}
