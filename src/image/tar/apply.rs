//! Owns setting up a file once its name exists: data, owner, mode, attributes and times, in an order in which no
//! operation undoes another.

use std::io::BufRead;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::sys::stat::{FchmodatFlags, Mode};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid};

use super::unpack::{UnpackReport, Unpacker, cannot, or_root};
use crate::image::tar::{Reader, TarEntry, TarEntryKind, broken, lossy};
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::xattr::{Pairs, XattrFile};

/// Attributes that a directory gets when the extraction ends.
#[derive(Debug)]
pub(crate) struct Attributes {
    pub(crate) mode: u32,
    pub(crate) owner: (u32, u32),
    /// `None` if the archive has no entry for the directory.
    pub(crate) mtime: Option<(i64, u32)>,
    pub(crate) xattrs: Pairs,
}

impl Attributes {
    /// Returns the attributes of an existing directory.
    pub(crate) fn of(directory: BorrowedFd<'_>) -> Result<Self> {
        let found = nix::sys::stat::fstat(directory)?;
        let nanoseconds = u32::try_from(found.st_mtime_nsec).unwrap_or(0);
        Ok(Self {
            mode: found.st_mode & 0o7777,
            owner: (found.st_uid, found.st_gid),
            mtime: Some((found.st_mtime, nanoseconds)),
            xattrs: XattrFile::Open(directory).content()?,
        })
    }

    /// Returns the attributes of a directory that has no entry.
    pub(super) fn implied() -> Self {
        Self {
            mode: 0o755,
            owner: (0, 0),
            mtime: None,
            xattrs: Vec::new(),
        }
    }
}

impl Unpacker<'_> {
    pub(crate) fn finish_file(&mut self, file: &OwnedFd, entry: &TarEntry) -> Result<()> {
        let fail = || cannot("set the attributes of", &entry.path);
        // The order matters: a change of owner clears setuid bits and capabilities.
        if self.options.ownership {
            let (uid, gid) = (Uid::from_raw(entry.uid), Gid::from_raw(entry.gid));
            let changed = nix::unistd::fchown(file, Some(uid), Some(gid));
            owned(changed, &entry.path, (entry.uid, entry.gid))?;
        }
        let (place, acl) = (XattrFile::Open(file.as_fd()), "system.posix_acl_access");
        let mut names = entry.xattrs.iter().map(|(name, _)| name);
        if self.is_upper() && !names.any(|name| name == acl.as_bytes()) {
            // The ACL is inherited from a lower layer's directory.
            place.remove(acl).context(fail)?;
        }
        nix::sys::stat::fchmod(file, Mode::from_bits_truncate(entry.mode)).context(fail)?;
        self.set_xattrs(&entry.path, &entry.xattrs, place)?;
        nix::sys::stat::futimens(file, &TimeSpec::UTIME_OMIT, &timespec(entry.mtime)).context(fail)
    }

    pub(crate) fn finish_by_name(&mut self, name: &[u8], entry: &TarEntry) -> Result<()> {
        let fail = || cannot("set the attributes of", &entry.path);
        // The file has just been created exclusively, so its name is a link only if the entry is a link.
        let is_link = matches!(entry.kind, TarEntryKind::Symlink(_));
        let parent = self.parent().try_clone_to_owned().context(fail)?;
        if self.options.ownership {
            let changed = beneath::set_owner(&parent, name, entry.uid, entry.gid);
            owned(changed, &entry.path, (entry.uid, entry.gid))?;
        }
        if !is_link {
            let mode = Mode::from_bits_truncate(entry.mode);
            nix::sys::stat::fchmodat(&parent, name, mode, FchmodatFlags::FollowSymlink)
                .context(fail)?;
        }
        let place = XattrFile::Entry(parent.as_fd(), name);
        self.set_xattrs(&entry.path, &entry.xattrs, place)?;
        beneath::set_mtime(&parent, name, &timespec(entry.mtime)).context(fail)
    }

    fn set_xattrs(
        &mut self,
        path: &[u8],
        xattrs: &[(Vec<u8>, Vec<u8>)],
        place: XattrFile<'_>,
    ) -> Result<()> {
        for (name, value) in xattrs {
            let Err(error) = place.set(name.as_slice(), value) else {
                continue;
            };
            // The file system supports no attributes, or not for this kind of file, or setting them needs root.
            match error {
                Errno::EOPNOTSUPP | Errno::EPERM | Errno::EINVAL => {
                    self.report.drop(format!("xattr {}", lossy(name)));
                }
                _ => return Err(error).context(|| cannot("set an attribute of", path)),
            }
        }
        Ok(())
    }

    /// Applies the directories' attributes, innermost first; returns the report.
    pub(crate) fn finish(mut self) -> Result<UnpackReport> {
        self.stack.clear();
        let newest = self.newest;
        // Without its own entry the root gets the time of the newest entry, like other implied directories. Any other
        // time would vary between extractions.
        self.directories
            .entry(Vec::new())
            .or_insert_with(Attributes::implied);
        let mut directories: Vec<_> = std::mem::take(&mut self.directories).into_iter().collect();
        directories.sort_unstable_by(|a, b| b.0.cmp(&a.0));
        for (path, attributes) in directories {
            let fail = || cannot("set the attributes of", &path);
            let directory = beneath::open_dir(self.root.fd(), or_root(&path)).context(fail)?;
            if self.options.ownership {
                let (uid, gid) = attributes.owner;
                let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                let changed = nix::unistd::fchown(&directory, Some(uid), Some(gid));
                owned(changed, &path, attributes.owner)?;
            }
            let place = XattrFile::Open(directory.as_fd());
            if self.is_upper() {
                // The directory may come from a lower layer, with other attributes.
                let mut had = place.content().context(fail)?;
                had.retain(|(had, _)| attributes.xattrs.iter().all(|(name, _)| name != had));
                for (name, _) in had {
                    place.remove(name).context(fail)?;
                }
            }
            self.set_xattrs(&path, &attributes.xattrs, place)?;
            nix::sys::stat::fchmod(&directory, Mode::from_bits_truncate(attributes.mode))
                .context(fail)?;
            let mtime = timespec(attributes.mtime.unwrap_or((newest, 0)));
            nix::sys::stat::futimens(&directory, &TimeSpec::UTIME_OMIT, &mtime).context(fail)?;
        }
        Ok(self.report)
    }
}

/// Explains why an owner was refused. Files that a domain's user built have ids beyond the 65,536 of most users.
fn owned(changed: nix::Result<()>, path: &[u8], (uid, gid): (u32, u32)) -> Result<()> {
    match changed {
        Err(Errno::EINVAL) => Err(unavailable!(
            "`{}` belongs to {uid}:{gid}, and the user namespace does not have these ids",
            lossy(path)
        )
        .help("sudo rockenv ..., or larger ranges in /etc/subuid and /etc/subgid")),
        other => other.context(|| cannot("set the attributes of", path)),
    }
}

pub(crate) fn copy_data<R: BufRead>(
    reader: &mut Reader<R>,
    file: &OwnedFd,
    size: u64,
    map: Option<&[(u64, u64)]>,
    path: &[u8],
    cancel: &AtomicBool,
) -> Result<()> {
    let whole = [(0, size)];
    for (offset, length) in map.unwrap_or(&whole).iter().copied() {
        let mut at = offset;
        let end = offset.saturating_add(length);
        while at < end {
            let chunk = reader.chunk()?;
            let left = usize::try_from(end - at).unwrap_or(usize::MAX);
            let amount = chunk.len().min(left);
            if amount == 0 {
                return Err(broken!("the data of entry `{}` is truncated", lossy(path)));
            }
            let place = i64::try_from(at).unwrap_or(i64::MAX);
            let written = match nix::sys::uio::pwrite(file, &chunk[..amount], place) {
                Err(Errno::EINTR) => continue,
                other => other.context(|| cannot("write", path))?,
            };
            reader.consume(written);
            at += written as u64;
            stop_if(cancel)?;
        }
    }
    if map.is_some() {
        // The last hole has no data that extends the file.
        nix::unistd::ftruncate(file, i64::try_from(size).unwrap_or(i64::MAX))
            .context(|| cannot("write", path))?;
    }
    Ok(())
}

fn timespec((seconds, nanoseconds): (i64, u32)) -> TimeSpec {
    TimeSpec::new(seconds, i64::from(nanoseconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::Kind;

    #[test]
    fn an_owner_that_no_subordinate_id_stands_for_is_named() {
        let refused = owned(Err(Errno::EINVAL), b"opt/lib", (1_776_653_678, 0)).unwrap_err();
        assert_eq!(refused.kind(), Kind::Unavailable);
        assert_has!(refused.message(), "`opt/lib` belongs to 1776653678:0");
    }
}
