//! Owns copying a tree with all metadata: owners, modes, times, attributes, hard links and holes. Shares file data
//! with the source if the file system can.

use std::collections::HashMap;
use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::fcntl::OFlag;
use nix::sys::stat::{FileStat, Mode, SFlag};
use nix::unistd::{Gid, Uid, getegid, geteuid};

use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::flatten::Kind;
use crate::tree::metadata;
use crate::tree::reflink::{create_special, link_below};
use crate::tree::root_fs::{self, Tree};
use crate::tree::transfer::{copy_range, next_data};
use crate::tree::xattr::{self, Attributes};

/// Copies the content of `from` into the existing directory `into`, without following symlinks or entering mounts.
pub(crate) fn copy(
    from: &Path,
    into: &Path,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<()> {
    let inside = fs_err::canonicalize(into)?.starts_with(fs_err::canonicalize(from)?);
    if inside {
        return Err(invalid!(
            "`{}` is inside `{}`, so it cannot become a copy of it",
            into.display(),
            from.display()
        ));
    }
    let (source, target) = (Tree::open(from)?, Tree::open(into)?);
    let mut copy = Copy {
        source: source.fd(),
        target: target.fd(),
        left: Vec::new(),
        names: HashMap::new(),
        owner: (!geteuid().is_root()).then(|| (geteuid(), getegid())),
        attributes: Attributes::default(),
        bytes: 0,
        cancel,
        progress,
    };
    let stat = nix::sys::stat::fstat(source.fd())?;
    copy.left.push(Directory::Enter(Vec::new(), stat));
    copy.all()
        .context(|| format!("cannot copy `{}`", from.display()))
}

/// How many bytes of a file are copied between progress reports and checks for Ctrl-C.
const CHUNK: i64 = 64 << 20;

/// A directory that exists in the copy, by its path.
enum Directory {
    Enter(Vec<u8>, FileStat),
    /// Its content is copied; its metadata is not.
    Finish(Vec<u8>, FileStat),
}

struct Copy<'a> {
    source: BorrowedFd<'a>,
    target: BorrowedFd<'a>,
    /// Each directory is opened only when its turn comes, so depth is not limited by descriptors.
    left: Vec<Directory>,
    /// The first copied name of each file with several names.
    names: HashMap<(u64, u64), Vec<u8>>,
    /// The owner of everything in the copy, unless root makes it.
    owner: Option<(Uid, Gid)>,
    attributes: Attributes,
    bytes: u64,
    cancel: &'a AtomicBool,
    progress: &'a mut dyn FnMut(u64),
}

impl Copy<'_> {
    fn all(&mut self) -> Result<()> {
        while let Some(directory) = self.left.pop() {
            let (Directory::Enter(path, stat) | Directory::Finish(path, stat)) = &directory;
            let (path, stat) = (path.clone(), *stat);
            let fail = || format!("cannot copy `{}`", String::from_utf8_lossy(&path));
            let from = open_source(self.source, &path, OFlag::O_DIRECTORY, &path)?;
            let into = beneath::open_below(self.target, as_path(&path)).context(fail)?;
            if matches!(directory, Directory::Enter(..)) {
                self.left.push(Directory::Finish(path.clone(), stat));
                self.directory(from.as_fd(), into.as_fd(), &path)?;
            } else {
                self.attributes(from.as_fd(), into.as_fd(), stat)
                    .context(fail)?;
            }
        }
        Ok(())
    }

    fn directory(&mut self, from: BorrowedFd<'_>, into: BorrowedFd<'_>, path: &[u8]) -> Result<()> {
        for name in root_fs::names(from)? {
            stop_if(self.cancel)?;
            self.entry(from, into, &name, &root_fs::join(path, &name))?;
        }
        Ok(())
    }

    fn entry(
        &mut self,
        from: BorrowedFd<'_>,
        into: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
    ) -> Result<()> {
        let fail = || format!("cannot copy `{}`", String::from_utf8_lossy(path));
        let stat = beneath::stat(from, name).context(fail)?;
        let kind = beneath::kind(&stat);
        // A socket without its process is useless, and the device 0:0 marks a deletion to overlayfs.
        if kind == SFlag::S_IFSOCK || matches!(Kind::of(&stat), Kind::Whiteout) {
            return Ok(());
        }
        let file = (stat.st_dev, stat.st_ino);
        if stat.st_nlink > 1 && kind != SFlag::S_IFDIR {
            if let Some(first) = self.names.get(&file) {
                return link_below(self.target, as_path(first), into, name).context(fail);
            }
            self.names.insert(file, path.to_vec());
        }
        match kind {
            SFlag::S_IFDIR => {
                nix::sys::stat::mkdirat(into, name, Mode::S_IRWXU).context(fail)?;
                self.left.push(Directory::Enter(path.to_vec(), stat));
                Ok(())
            }
            SFlag::S_IFREG => {
                let source = open_source(from, name, OFlag::O_NONBLOCK, path)?;
                let target = beneath::create(into, name).context(fail)?;
                self.data(&source, &target, stat.st_size).context(fail)?;
                self.attributes(source.as_fd(), target.as_fd(), stat)
                    .context(fail)
            }
            _ => {
                match create_special(from, &stat, into, name) {
                    // Device nodes need root; engines bring their own. A skipped node must not be the target of a hard
                    // link.
                    Err(Errno::EPERM) if kind != SFlag::S_IFLNK => {
                        self.names.remove(&file);
                        return Ok(());
                    }
                    other => other.context(fail)?,
                }
                let stat = self.metadata(stat);
                metadata::copy_entry(from, &stat, into, name, &mut self.attributes, is_wanted)
                    .context(fail)
            }
        }
    }

    fn data(&mut self, source: &OwnedFd, target: &OwnedFd, size: i64) -> Result<()> {
        let mut at = 0;
        while let Some((start, end)) = next_data(source.as_fd(), at, size)? {
            at = start;
            while at < end {
                stop_if(self.cancel)?;
                let amount = copy_range(source.as_fd(), target.as_fd(), at, end.min(at + CHUNK))?;
                if amount == 0 {
                    return Err(unexpected!("it became shorter while it was being copied"));
                }
                at += amount.cast_signed();
                self.bytes += amount;
                (self.progress)(self.bytes);
            }
        }
        Ok(nix::unistd::ftruncate(target, size)?)
    }

    /// Returns the metadata for the copy, which an ordinary user owns completely.
    fn metadata(&self, mut stat: FileStat) -> FileStat {
        if let Some((owner, group)) = self.owner {
            (stat.st_uid, stat.st_gid) = (owner.as_raw(), group.as_raw());
        }
        stat
    }

    fn attributes(
        &mut self,
        from: BorrowedFd<'_>,
        into: BorrowedFd<'_>,
        stat: FileStat,
    ) -> nix::Result<()> {
        let stat = self.metadata(stat);
        metadata::copy_open(from, &stat, into, &mut self.attributes, is_wanted)
    }
}

fn is_wanted(attribute: &CStr) -> bool {
    xattr::is_content(attribute.to_bytes())
}

fn as_path(path: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(path))
}

fn open_source(parent: BorrowedFd<'_>, below: &[u8], flags: OFlag, path: &[u8]) -> Result<OwnedFd> {
    let described = || String::from_utf8_lossy(path).into_owned();
    let opened = match below.is_empty() {
        true => beneath::open_dir(parent, c"."),
        false => beneath::open_entry_below(parent, as_path(below), flags),
    };
    match opened {
        Err(Errno::EXDEV) => Err(invalid!("`{}` is a mount point", described())
            .help("unmount it: an image contains one file system")),
        other => other.context(|| format!("cannot open `{}`", described())),
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use fs_err as fs;

    use super::*;

    #[test]
    fn a_socket_and_the_mark_of_a_deletion_are_left_out_by_each_of_their_names() {
        let directory = tempfile::tempdir().unwrap();
        let [from, into] = ["from", "into"].map(|name| directory.path().join(name));
        fs::create_dir(&from).unwrap();
        fs::create_dir(&into).unwrap();
        drop(UnixListener::bind(from.join("socket")).unwrap());
        fs::hard_link(from.join("socket"), from.join("same")).unwrap();
        let mark = from.join("deleted");
        nix::sys::stat::mknod(&mark, SFlag::S_IFCHR, Mode::S_IRUSR, 0).unwrap();
        fs::hard_link(mark, from.join("gone")).unwrap();
        fs::write(from.join("file"), "text").unwrap();
        copy(&from, &into, &AtomicBool::new(false), &mut |_| ()).unwrap();
        let names = fs::read_dir(&into).unwrap();
        let names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, ["file"]);
    }
}
