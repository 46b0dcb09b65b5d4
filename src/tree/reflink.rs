//! Owns copying a tree file by file: with shared extents if supported, all metadata, and several threads.
//!
//! Preserved: content with holes, hard links within the tree, owner, mode, access and modification times in
//! nanoseconds, extended attributes with ACLs and capabilities, links, FIFOs, devices, sockets. Not preserved: inode
//! flags (`chattr`), creation and change times, hard links to files outside the tree. Mounts inside the tree are not
//! entered: an empty directory or file takes their place.

use std::collections::HashMap;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

use nix::NixPath;
use nix::dir::{Dir, Type};
use nix::errno::Errno;
use nix::fcntl::{AtFlags, OFlag, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat, mknodat};
use nix::unistd::{linkat, symlinkat};

use super::metadata;
use super::transfer::Transport;
use super::work_queue::Queue;
use super::xattr::Attributes;
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};

/// Makes `to`, which must not exist, a copy of the directory `from`, on the same file system or another.
///
/// Returns the number of bytes copied, without holes and shared extents. Nothing may write to `from` meanwhile. After
/// an error the caller must remove the partial copy.
pub fn copy_tree(from: &Path, to: &Path) -> Result<u64> {
    let (holder, name) = beneath::split(to)?;
    mkdirat(&holder, name.as_c_str(), Mode::S_IRWXU)
        .context(|| format!("cannot create directory `{}`", to.display()))?;
    copy_into(from, to)
}

/// Fills the empty directory `to` like [`copy_tree`].
pub(super) fn copy_into(from: &Path, to: &Path) -> Result<u64> {
    let top = Arc::new(Pair {
        source: beneath::open_path(from)?,
        target: beneath::open_path(to)?,
        path: PathBuf::new(),
    });
    metadata::clear_inherited(top.target.as_fd())
        .context(|| format!("cannot prepare `{}`", to.display()))?;
    let copy = Copy {
        from,
        to,
        top: Arc::clone(&top),
        transport: Transport::default(),
        links: Mutex::default(),
        queue: Queue::new(),
    };
    copy.queue.push([Task::Top(top)]);
    let mut copied = 0;
    let work = |task, worker: &mut Worker| copy.run(task, worker);
    copy.queue.run(work, |worker| copied += worker.copied);
    copy.queue.into_result().map(|()| copied)
}

struct Pair {
    source: OwnedFd,
    target: OwnedFd,
    /// Path of both below their tops.
    path: PathBuf,
}

enum Task {
    Top(Arc<Pair>),
    /// The directory of this name, not opened yet: a queued task holds no descriptor. Its copy exists.
    Below(Arc<Pair>, CString),
}

#[derive(Default)]
pub(super) struct Worker {
    copied: u64,
    pub(super) attributes: Attributes,
}

struct Copy<'a> {
    from: &'a Path,
    to: &'a Path,
    top: Arc<Pair>,
    transport: Transport,
    /// The first copy of each file with several names, by device and inode, until all its names were seen.
    links: Mutex<HashMap<(u64, u64), Link>>,
    queue: Queue<Task>,
}

struct Link {
    /// Path below the top: holding a descriptor for each would exhaust the limit.
    path: PathBuf,
    names_left: u64,
}

impl Copy<'_> {
    fn run(&self, task: Task, worker: &mut Worker) {
        let pair = match task {
            Task::Top(pair) => pair,
            Task::Below(parent, name) => match Self::enter(&parent, &name) {
                Ok(Some(pair)) => Arc::new(pair),
                Ok(None) => return,
                Err(error) => return self.abort(&parent, &name, error),
            },
        };
        if let Err((name, error)) = self.directory(&pair, worker) {
            self.abort(&pair, &name, error);
        }
    }

    fn abort(&self, pair: &Pair, name: &CStr, error: Errno) {
        let mut below = pair.path.clone();
        if beneath::is_entry(name) {
            below.push(OsStr::from_bytes(name.to_bytes()));
        }
        let (from, to) = (self.from.join(&below), self.to.join(&below));
        let message = format!("cannot copy `{}` to `{}`", from.display(), to.display());
        let failed = Error::from(error).explained(message);
        self.queue.abort(match error {
            Errno::EMFILE => failed.help("the tree is very deep: raise the limit with `ulimit -n`"),
            _ => failed,
        });
    }

    /// Opens a directory and its copy; for a mount point, leaves the copy empty and returns `None`.
    fn enter(parent: &Pair, name: &CStr) -> nix::Result<Option<Pair>> {
        let target = beneath::open_dir(&parent.target, name)?;
        match beneath::open_dir(&parent.source, name) {
            Ok(source) => Ok(Some(Pair {
                source,
                target,
                path: parent.path.join(OsStr::from_bytes(name.to_bytes())),
            })),
            Err(Errno::EXDEV) => {
                nix::sys::stat::fchmod(&target, Mode::from_bits_truncate(0o755))?;
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Copies a directory's entries, then its own metadata: later copies in subdirectories do not change its times.
    fn directory(
        &self,
        pair: &Arc<Pair>,
        worker: &mut Worker,
    ) -> std::result::Result<(), (CString, Errno)> {
        let own = |error| (c".".to_owned(), error);
        let mut children = Vec::new();
        let mut entries = beneath::open_dir(&pair.source, c".")
            .and_then(Dir::from_fd)
            .map_err(own)?;
        for entry in entries.iter() {
            let entry = entry.map_err(own)?;
            let name = entry.file_name();
            if beneath::is_entry(name) {
                self.entry(pair, name, entry.file_type(), worker, &mut children)
                    .map_err(|error| (name.to_owned(), error))?;
            }
        }
        drop(entries);
        let mut finish = || {
            let stat = fstat(&pair.source)?;
            let (from, to) = (pair.source.as_fd(), pair.target.as_fd());
            metadata::copy_open(from, &stat, to, &mut worker.attributes, |_| true)
        };
        finish().map_err(own)?;
        let task = |name| Task::Below(Arc::clone(pair), name);
        self.queue.push(children.into_iter().map(task));
        Ok(())
    }

    fn entry(
        &self,
        pair: &Pair,
        name: &CStr,
        listed: Option<Type>,
        worker: &mut Worker,
        children: &mut Vec<CString>,
    ) -> nix::Result<()> {
        let kind = match listed {
            Some(Type::File) => SFlag::S_IFREG,
            Some(Type::Directory) => SFlag::S_IFDIR,
            _ => beneath::kind(&beneath::stat(&pair.source, name)?),
        };
        if kind == SFlag::S_IFDIR {
            mkdirat(&pair.target, name, Mode::S_IRWXU)?;
            children.push(name.to_owned());
            Ok(())
        } else if kind == SFlag::S_IFREG {
            self.file(pair, name, worker)
        } else {
            self.special(pair, name, worker)
        }
    }

    fn file(&self, pair: &Pair, name: &CStr, worker: &mut Worker) -> nix::Result<()> {
        let create = || beneath::create(&pair.target, name);
        let source = match open_source(&pair.source, name) {
            // A mount point.
            Err(Errno::EXDEV) => return create().map(drop),
            other => other?,
        };
        let stat = fstat(&source)?;
        if let Some(target) = self.once(pair, name, &stat, create)? {
            let (from, to) = (source.as_fd(), target.as_fd());
            worker.fill(from, &stat, to, &self.transport)?;
        }
        Ok(())
    }

    fn special(&self, pair: &Pair, name: &CStr, worker: &mut Worker) -> nix::Result<()> {
        let (from, to) = (pair.source.as_fd(), pair.target.as_fd());
        let stat = beneath::stat(from, name)?;
        let create = || create_special(from, &stat, to, name);
        if self.once(pair, name, &stat, create)?.is_none() {
            return Ok(());
        }
        let name = name.to_bytes();
        metadata::copy_entry(from, &stat, to, name, &mut worker.attributes, |_| true)
    }

    /// Creates the copy of a file; if it exists under another name already, links to it and returns `None`.
    ///
    /// The first name is created under the lock and filled later: linking to a file that is still being filled is fine.
    fn once<T>(
        &self,
        pair: &Pair,
        name: &CStr,
        stat: &FileStat,
        create: impl FnOnce() -> nix::Result<T>,
    ) -> nix::Result<Option<T>> {
        if stat.st_nlink < 2 {
            return create().map(Some);
        }
        let key = (stat.st_dev, stat.st_ino);
        let mut links = self.links.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(link) = links.get_mut(&key) else {
            let made = create()?;
            let path = pair.path.join(OsStr::from_bytes(name.to_bytes()));
            let names_left = stat.st_nlink - 1;
            links.insert(key, Link { path, names_left });
            return Ok(Some(made));
        };
        link.names_left -= 1;
        let first = if link.names_left == 0 {
            links.remove(&key).map(|link| link.path)
        } else {
            Some(link.path.clone())
        };
        drop(links);
        let first = first.ok_or(Errno::ENOENT)?;
        let (top, to) = (&self.top.target, &pair.target);
        match linkat(top, first.as_path(), to, name, AtFlags::empty()) {
            Err(Errno::ENAMETOOLONG) => link_below(top, &first, to, name)?,
            other => other?,
        }
        Ok(None)
    }
}

impl Worker {
    /// Gives the new file `to` the content and metadata of `from`.
    fn fill(
        &mut self,
        from: BorrowedFd<'_>,
        stat: &FileStat,
        to: BorrowedFd<'_>,
        transport: &Transport,
    ) -> nix::Result<()> {
        if beneath::kind(stat) != SFlag::S_IFREG {
            return Err(Errno::EAGAIN);
        }
        if stat.st_size > 0 {
            self.copied += transport.transfer(from, to, stat.st_size)?;
        }
        metadata::copy_open(from, stat, to, &mut self.attributes, |_| true)
    }

    /// Copies one entry other than a directory.
    pub(super) fn copy_entry(
        &mut self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &CStr,
        transport: &Transport,
    ) -> nix::Result<()> {
        let stat = beneath::stat(from, name)?;
        if beneath::kind(&stat) == SFlag::S_IFREG {
            let (source, target) = (open_source(from, name)?, beneath::create(to, name)?);
            return self.fill(source.as_fd(), &stat, target.as_fd(), transport);
        }
        create_special(from, &stat, to, name)?;
        let name = name.to_bytes();
        metadata::copy_entry(from, &stat, to, name, &mut self.attributes, |_| true)
    }
}

fn open_source(directory: impl AsFd, name: &CStr) -> nix::Result<OwnedFd> {
    // Nonblocking: the name may belong to a FIFO or device since it was listed.
    let flags = OFlag::O_RDONLY | OFlag::O_NONBLOCK;
    match beneath::open(&directory, name, flags | OFlag::O_NOATIME) {
        Err(Errno::EPERM) => beneath::open(&directory, name, flags),
        other => other,
    }
}

/// Links to the file at a path below a directory.
pub(super) fn link_below<P: ?Sized + NixPath>(
    top: impl AsFd,
    first: &Path,
    to: impl AsFd,
    name: &P,
) -> nix::Result<()> {
    let above = beneath::open_below(top, first.parent().unwrap_or(Path::new("")))?;
    let first = first.file_name().ok_or(Errno::ENOENT)?;
    linkat(above, first, to, name, AtFlags::empty())
}

/// Creates a symlink, device, FIFO or socket like `name` in the directory `from`.
pub(super) fn create_special<P: ?Sized + NixPath>(
    from: BorrowedFd<'_>,
    stat: &FileStat,
    to: BorrowedFd<'_>,
    name: &P,
) -> nix::Result<()> {
    match beneath::kind(stat) {
        SFlag::S_IFLNK => {
            let target = readlinkat(from, name)?.into_vec();
            symlinkat(OsStr::from_bytes(&target), to, name)
        }
        kind => mknodat(to, name, kind, Mode::S_IRUSR, stat.st_rdev),
    }
}
