//! Owns the content of an OCI layer for a tree: the whole tree, an overlay's upper directory, or the differences from
//! the tree that it was cloned from.
//!
//! Parent directories of changes are included with their current attributes, because the topmost layer's attributes
//! win. Hard links stay together: if one name changed, all names are written, so that extracting them yields a single
//! file again.

use std::collections::HashMap;
use std::io::Write;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::sys::stat::{FileStat, SFlag, fstat};

use crate::image::tar::pack::{HOLES, Packer, cannot, open_file, too_many};
use crate::image::tar::unpack::Limits;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::measure::scan_one;
use crate::tree::root_fs::{Tree, join, names, read_at};
use crate::tree::xattr::XattrFile;

#[derive(Clone, Debug)]
pub(crate) enum LayerContent {
    Whole(PathBuf),
    /// An overlay's upper directory, with the kernel's deletion marks.
    Upper(PathBuf),
    /// The differences from another tree.
    Between {
        /// The tree that `new` was cloned from.
        old: PathBuf,
        new: PathBuf,
        /// Whether an untouched file has the same inode number and change time in both trees. True for btrfs snapshots.
        inodes: bool,
    },
}

/// Writes the archive; returns the writer, and the number of skipped sockets.
pub(crate) fn pack<W: Write>(
    changes: &LayerContent,
    out: W,
    cancel: &AtomicBool,
    progress: &mut (dyn FnMut(u64) + Send),
) -> Result<(W, u64)> {
    let packer = Packer::new(out, cancel, progress);
    let (new, old, upper, inodes) = match changes {
        LayerContent::Whole(new) => (new, None, false, false),
        LayerContent::Upper(new) => (new, None, true, false),
        LayerContent::Between { old, new, inodes } => (new, Some(old), false, *inodes),
    };
    refuse_larger(&Limits::default(), new, old.map(PathBuf::as_path))?;
    let new = Tree::open(new)?;
    let old = old.map(|old| Tree::open(old)).transpose()?;
    let mut walk = Walk {
        packer,
        cancel,
        upper,
        inodes,
        groups: HashMap::new(),
        pending: Vec::new(),
    };
    let below = |tree: &Tree| beneath::open_dir(tree.fd(), c".");
    let old = old.as_ref().map(below).transpose();
    let top = Pair {
        old: old.context(|| cannot(b""))?,
        new: below(&new).context(|| cannot(b""))?,
        path: Vec::new(),
        depth: 0,
    };
    if top.old.is_some() {
        walk.group(&top)?;
    }
    // Every layer includes the root directory with its current attributes, so no layer is empty.
    walk.enter(&top)?;
    walk.flush()?;
    walk.inside(&top)?;
    let left_out = walk.packer.left_out;
    Ok((walk.packer.finish()?, left_out))
}

/// Refuses changes that are certainly larger than a reader accepts, before hours of packing. The packer finds the rest.
fn refuse_larger(limits: &Limits, new: &Path, old: Option<&Path>) -> Result<()> {
    let mut found = scan_one(new).total();
    if found.entries <= limits.entries && found.apparent <= limits.bytes {
        return Ok(());
    }
    if let Some(old) = old {
        // At most everything in the old tree is unchanged.
        let before = scan_one(old).total();
        found.entries = found.entries.saturating_sub(before.entries);
        found.apparent = found.apparent.saturating_sub(before.apparent);
    }
    if found.entries > limits.entries {
        return Err(too_many(&format!("{} entries", limits.entries)));
    }
    match found.apparent > limits.bytes {
        true => {
            Err(invalid!("files of more than {} bytes cannot be shared", limits.bytes).help(HOLES))
        }
        false => Ok(()),
    }
}

/// A file with hard links in the new tree.
struct Group {
    /// Inode of the file in the old tree, if it exists there.
    old: Option<u64>,
    changed: bool,
}

struct Walk<'a, W> {
    packer: Packer<'a, W>,
    cancel: &'a AtomicBool,
    upper: bool,
    inodes: bool,
    /// Hard-linked files that may differ from the old tree, by inode.
    groups: HashMap<u64, Group>,
    /// Open directories from the root to the current one. `None`: the entry is already written.
    pending: Vec<Option<(OwnedFd, Vec<u8>, FileStat)>>,
}

/// A directory of the new tree, and its counterpart in the old tree.
struct Pair {
    old: Option<OwnedFd>,
    new: OwnedFd,
    path: Vec<u8>,
    depth: usize,
}

/// An entry of the new tree's directory.
struct Found<'a> {
    above: &'a Pair,
    /// The name in both directories.
    name: &'a [u8],
    path: Vec<u8>,
    stat: FileStat,
    /// Status of the old tree's entry with the same name.
    before: Option<FileStat>,
}

impl<'a> Found<'a> {
    fn at(above: &'a Pair, name: &'a [u8]) -> Result<Self> {
        let path = join(&above.path, name);
        let stat = beneath::stat(&above.new, name).context(|| cannot(&path))?;
        let before = match above.old.as_ref().map(|old| beneath::stat(old, name)) {
            None | Some(Err(Errno::ENOENT)) => None,
            Some(other) => Some(other.context(|| cannot(&path))?),
        };
        Ok(Self {
            above,
            name,
            path,
            stat,
            before,
        })
    }

    /// Opens the directory, and its counterpart if that is a directory too.
    fn open(&self) -> Result<Pair> {
        let open = |parent| beneath::open_dir(parent, self.name).context(|| cannot(&self.path));
        let is_directory = self.before.as_ref().is_some_and(is_directory);
        let old = self.above.old.as_ref().filter(|_| is_directory);
        Ok(Pair {
            old: old.map(open).transpose()?,
            new: open(&self.above.new)?,
            path: self.path.clone(),
            depth: self.above.depth + 1,
        })
    }
}

fn is_directory(stat: &FileStat) -> bool {
    beneath::kind(stat) == SFlag::S_IFDIR
}

impl<W: Write> Walk<'_, W> {
    fn check_depth(&self, directory: &Pair) -> Result<()> {
        stop_if(self.cancel)?;
        let (path, limit) = (&directory.path, Limits::default().depth);
        if directory.depth >= limit {
            return Err(invalid!(
                "`/{}...` cannot be shared: it is more than {limit} directories deep",
                String::from_utf8_lossy(&path[..64.min(path.len())])
            ));
        }
        Ok(())
    }

    /// Records a directory, which is written before its first changed entry, or at once if it is new or changed.
    fn enter(&mut self, directory: &Pair) -> Result<()> {
        let Pair { old, new, path, .. } = directory;
        let stat = fstat(new).context(|| cannot(path))?;
        self.pending
            .push(Some((new.try_clone()?, path.clone(), stat)));
        let same = match old {
            Some(old) => self.same_directory(old, new, &stat, path)?,
            None => false,
        };
        match same {
            true => Ok(()),
            false => self.flush(),
        }
    }

    fn flush(&mut self) -> Result<()> {
        for place in &mut self.pending {
            if let Some((directory, path, stat)) = place.take() {
                self.packer.directory(directory.as_fd(), &path, &stat)?;
            }
        }
        Ok(())
    }

    fn same_directory(
        &self,
        old: &OwnedFd,
        new: &OwnedFd,
        stat: &FileStat,
        path: &[u8],
    ) -> Result<bool> {
        let before = fstat(old).context(|| cannot(path))?;
        if self.is_same_inode(&before, stat) {
            return Ok(true);
        }
        let attributes = |file: &OwnedFd| {
            let place = XattrFile::Open(file.as_fd());
            place.content().context(|| cannot(path))
        };
        Ok(same_attributes(&before, stat) && attributes(old)? == attributes(new)?)
    }

    fn is_same_inode(&self, old: &FileStat, new: &FileStat) -> bool {
        self.inodes
            && (old.st_ino, old.st_ctime, old.st_ctime_nsec)
                == (new.st_ino, new.st_ctime, new.st_ctime_nsec)
    }

    fn inside(&mut self, directory: &Pair) -> Result<()> {
        self.check_depth(directory)?;
        let Pair { old, new, path, .. } = directory;
        if self.upper
            && XattrFile::Open(new.as_fd())
                .is_opaque()
                .context(|| cannot(path))?
        {
            self.packer.opaque(path)?;
        }
        let present = names(new)?;
        if let Some(old) = old {
            for name in names(old)? {
                if present.binary_search(&name).is_err() {
                    self.flush()?;
                    self.packer.deletion(path, &name)?;
                }
            }
        }
        for name in present {
            let found = Found::at(directory, &name)?;
            let stat = &found.stat;
            if self.upper && beneath::kind(stat) == SFlag::S_IFCHR && stat.st_rdev == 0 {
                self.packer.deletion(path, &name)?;
            } else if is_directory(stat) {
                let below = found.open()?;
                self.enter(&below)?;
                self.inside(&below)?;
                self.pending.pop();
            } else if !self.same(&found)? {
                self.flush()?;
                self.packer.entry(new.as_fd(), &name, &found.path, stat)?;
            }
        }
        Ok(())
    }

    fn same(&self, found: &Found<'_>) -> Result<bool> {
        let stat = &found.stat;
        match &found.before {
            None => return Ok(false),
            Some(before) if self.is_same_inode(before, stat) => return Ok(true),
            Some(_) => {}
        }
        match self.groups.get(&stat.st_ino).filter(|_| stat.st_nlink > 1) {
            Some(group) => Ok(!group.changed),
            None => self.equal(found),
        }
    }

    /// Compares two entries other than directories by everything that a tree's digest covers.
    fn equal(&self, found: &Found<'_>) -> Result<bool> {
        let Found {
            name, path, stat, ..
        } = found;
        let Pair { old, new, .. } = found.above;
        let (Some(old), Some(before)) = (old, &found.before) else {
            return Ok(false);
        };
        // Without comparing link counts, names that no longer share a file would share one again.
        if !same_attributes(before, stat)
            || before.st_nlink != stat.st_nlink
            || before.st_rdev != stat.st_rdev
            || before.st_size != stat.st_size
        {
            return Ok(false);
        }
        let read = |parent: &OwnedFd| {
            let place = XattrFile::Entry(parent.as_fd(), name);
            place.content().context(|| cannot(path))
        };
        if read(old)? != read(new)? {
            return Ok(false);
        }
        match beneath::kind(stat) {
            SFlag::S_IFLNK => {
                let target =
                    |parent| nix::fcntl::readlinkat(parent, *name).context(|| cannot(path));
                Ok(target(old)? == target(new)?)
            }
            SFlag::S_IFREG => {
                let open =
                    |parent: &OwnedFd| open_file(parent.as_fd(), name).context(|| cannot(path));
                self.same_content(&open(old)?, &open(new)?)
            }
            _ => Ok(true),
        }
    }

    fn same_content(&self, old: &OwnedFd, new: &OwnedFd) -> Result<bool> {
        let (mut one, mut other) = (vec![0; 128 << 10], vec![0; 128 << 10]);
        let mut at = 0_i64;
        loop {
            stop_if(self.cancel)?;
            let amount = read_at(old, &mut one, at)?;
            if read_at(new, &mut other, at)? != amount || one[..amount] != other[..amount] {
                return Ok(false);
            }
            if amount < one.len() {
                return Ok(true);
            }
            at += i64::try_from(amount).unwrap_or(0);
        }
    }

    /// Finds hard-linked files, and whether all of their names are unchanged.
    fn group(&mut self, directory: &Pair) -> Result<()> {
        self.check_depth(directory)?;
        for name in names(&directory.new)? {
            let found = Found::at(directory, &name)?;
            let stat = &found.stat;
            if is_directory(stat) {
                self.group(&found.open()?)?;
                continue;
            }
            let before = found.before.as_ref();
            if stat.st_nlink < 2 || before.is_some_and(|before| self.is_same_inode(before, stat)) {
                continue;
            }
            let changed = match (before, self.groups.get(&stat.st_ino)) {
                (None, _) => true,
                (Some(before), Some(group)) => {
                    group.changed
                        || group.old != Some(before.st_ino)
                        || before.st_nlink != stat.st_nlink
                }
                (Some(_), None) => !self.equal(&found)?,
            };
            let old = before.map(|before| before.st_ino);
            let group = Group { old, changed };
            let group = self.groups.entry(stat.st_ino).or_insert(group);
            group.changed |= changed;
        }
        Ok(())
    }
}

fn same_attributes(old: &FileStat, new: &FileStat) -> bool {
    let of = |stat: &FileStat| {
        (
            (stat.st_mode, stat.st_uid, stat.st_gid),
            (stat.st_mtime, stat.st_mtime_nsec),
        )
    };
    of(old) == of(new)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_that_no_reader_accepts_are_refused_before_packing() {
        let (new, old) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let make = |tree: &tempfile::TempDir, name: &str, size| {
            let file = fs_err::File::create(tree.path().join(name)).unwrap();
            file.set_len(size).unwrap();
        };
        let limits = Limits {
            entries: 2,
            bytes: 1 << 30,
            ..Limits::default()
        };
        let check = |old: Option<&tempfile::TempDir>| {
            let refused = refuse_larger(&limits, new.path(), old.map(tempfile::TempDir::path));
            refused.err().map(|error| error.message().to_owned())
        };
        make(&new, "a", 1 << 30);
        assert_eq!(check(None), None);
        make(&new, "a", (1 << 30) + 1);
        assert_has!(check(None).unwrap(), "more than 1073741824 bytes");
        make(&old, "a", 1);
        assert_eq!(check(Some(&old)), None);
        // The root directory is an entry too.
        make(&new, "b", 0);
        assert_has!(check(None).unwrap(), "more than 2 entries");
        assert_eq!(check(Some(&old)), None);
    }
}
