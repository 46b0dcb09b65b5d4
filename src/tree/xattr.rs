//! Owns extended attributes, which include ACLs and capabilities: which of them belong to a tree's content, and reading
//! and writing them. Uses rustix, because nix has no calls for them.

use std::ffi::CStr;
use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use nix::errno::Errno;
use rustix::fs::{self, XattrFlags};
use rustix::path::Arg;

use super::errno;

/// The kernel's limit for a list and for a value.
const LIMIT: usize = 64 * 1024;

/// overlayfs's mark on a directory that hides the content of lower layers.
pub(crate) const OPAQUE: &str = "trusted.overlay.opaque";

pub(crate) type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// Returns whether an attribute is content, to be kept in copies and digests.
///
/// `trusted.*` and overlayfs's own attributes would be instructions to the kernel that mounts the tree;
/// security labels belong to the host's policy.
pub(crate) fn is_content(name: &[u8]) -> bool {
    let is_overlay = name.starts_with(b"user.overlay.") || name.starts_with(b"user.fuseoverlayfs.");
    let is_kept = name == b"security.capability"
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
        || name.starts_with(b"user.");
    is_kept && !is_overlay
}

#[derive(Clone, Copy)]
pub(crate) enum XattrFile<'a> {
    /// A file or directory opened for reading or writing.
    Open(BorrowedFd<'a>),
    /// The entry of an open directory; for a symlink, the link itself.
    Entry(BorrowedFd<'a>, &'a [u8]),
}

impl XattrFile<'_> {
    /// Before 6.13 the kernel lacks calls relative to a directory, but a path through /proc is equivalent.
    fn path(directory: BorrowedFd<'_>, name: &[u8]) -> PathBuf {
        let directory = PathBuf::from(format!("/proc/self/fd/{}", directory.as_raw_fd()));
        directory.join(std::ffi::OsStr::from_bytes(name))
    }

    /// Writes the names of all attributes into the buffer, and returns their length.
    fn list(self, into: &mut [u8]) -> nix::Result<usize> {
        zero_if_unsupported(match self {
            Self::Open(fd) => fs::flistxattr(fd, into),
            Self::Entry(at, name) => fs::llistxattr(Self::path(at, name), into),
        })
    }

    /// Returns whether the file has attributes of any kind. `list` with an empty buffer would always return zero.
    fn has_any(self) -> nix::Result<bool> {
        let length = zero_if_unsupported(match self {
            Self::Open(fd) => fs::flistxattr_query(fd),
            Self::Entry(at, name) => fs::llistxattr_query(Self::path(at, name)),
        });
        Ok(length? > 0)
    }

    pub(crate) fn get(self, attribute: impl Arg, into: &mut [u8]) -> nix::Result<usize> {
        errno(match self {
            Self::Open(fd) => fs::fgetxattr(fd, attribute, into),
            Self::Entry(at, name) => fs::lgetxattr(Self::path(at, name), attribute, into),
        })
    }

    pub(crate) fn set(self, attribute: impl Arg, value: &[u8]) -> nix::Result<()> {
        let flags = XattrFlags::empty();
        errno(match self {
            Self::Open(fd) => fs::fsetxattr(fd, attribute, value, flags),
            Self::Entry(at, name) => fs::lsetxattr(Self::path(at, name), attribute, value, flags),
        })
    }

    pub(crate) fn remove(self, attribute: impl Arg) -> nix::Result<()> {
        let removed = match self {
            Self::Open(fd) => fs::fremovexattr(fd, attribute),
            Self::Entry(at, name) => fs::lremovexattr(Self::path(at, name), attribute),
        };
        match errno(removed) {
            Err(Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(()),
            other => other,
        }
    }

    /// Returns the content attributes, sorted by name.
    pub(crate) fn content(self) -> nix::Result<Pairs> {
        let mut found = Vec::new();
        // Most files have no attributes.
        if self.has_any()? {
            Attributes::default().each(
                self,
                |name| is_content(name.to_bytes()),
                |name, value| {
                    found.push((name.to_bytes().to_vec(), value.to_vec()));
                    Ok(())
                },
            )?;
            found.sort();
        }
        Ok(found)
    }

    /// Returns whether a directory of an overlay layer hides the content of lower layers.
    pub(crate) fn is_opaque(self) -> nix::Result<bool> {
        let mut value = [0_u8; 8];
        match self.get(OPAQUE, &mut value) {
            Err(Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(false),
            length => Ok(&value[..length?] == b"y"),
        }
    }
}

fn zero_if_unsupported(length: rustix::io::Result<usize>) -> nix::Result<usize> {
    match errno(length) {
        Err(Errno::EOPNOTSUPP) => Ok(0),
        other => other,
    }
}

/// Buffers for names and one value, reused for each file.
pub(crate) struct Attributes {
    names: Vec<u8>,
    value: Vec<u8>,
}

impl Default for Attributes {
    fn default() -> Self {
        Self {
            names: vec![0; LIMIT],
            value: vec![0; LIMIT],
        }
    }
}

impl Attributes {
    pub(crate) fn each(
        &mut self,
        place: XattrFile<'_>,
        wanted: impl Fn(&CStr) -> bool,
        mut with: impl FnMut(&CStr, &[u8]) -> nix::Result<()>,
    ) -> nix::Result<()> {
        let length = place.list(&mut self.names)?;
        for name in self.names[..length].split_inclusive(|byte| *byte == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(|_| Errno::EINVAL)?;
            if !wanted(name) {
                continue;
            }
            let size = match place.get(name, &mut self.value) {
                // Some are listed but unreadable; others were removed since.
                Err(Errno::ENODATA | Errno::EOPNOTSUPP) => continue,
                other => other?,
            };
            with(name, &self.value[..size])?;
        }
        Ok(())
    }

    /// Copies the `wanted` attributes, except those that only the source's file system supports, such as btrfs
    /// properties, and labels that the kernel refuses.
    pub(crate) fn copy(
        &mut self,
        from: XattrFile<'_>,
        to: XattrFile<'_>,
        wanted: impl Fn(&CStr) -> bool,
    ) -> nix::Result<()> {
        self.each(from, wanted, |name, value| match to.set(name, value) {
            Err(errno) if is_dispensable(name.to_bytes(), errno) => Ok(()),
            other => other,
        })
    }
}

/// Returns whether a copy may lack an attribute that cannot be set. Only root may set a label of SELinux after a boot
/// without it, and a signature of IMA; a policy refuses labels of another one. The copy has the label of a new file.
fn is_dispensable(name: &[u8], errno: Errno) -> bool {
    let is_label = name.starts_with(b"security.");
    let refused = matches!(errno, Errno::EPERM | Errno::EACCES | Errno::EINVAL);
    !is_content(name) && (errno == Errno::EOPNOTSUPP || is_label && refused)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use super::*;

    #[test]
    fn a_copy_may_lack_only_labels_and_properties() {
        for errno in [Errno::EPERM, Errno::EACCES, Errno::EINVAL] {
            for label in [&b"security.selinux"[..], b"security.ima"] {
                assert!(is_dispensable(label, errno));
            }
            for other in [&b"security.capability"[..], b"user.a", b"trusted.overlay.a"] {
                assert!(!is_dispensable(other, errno));
            }
        }
        assert!(is_dispensable(b"btrfs.compression", Errno::EOPNOTSUPP));
        assert!(!is_dispensable(b"user.a", Errno::EOPNOTSUPP));
        assert!(!is_dispensable(b"security.selinux", Errno::ENOSPC));
    }

    #[test]
    fn policy() {
        let kept: [&[u8]; 3] = [
            b"user.note",
            b"security.capability",
            b"system.posix_acl_access",
        ];
        let dropped: [&[u8]; 5] = [
            b"trusted.overlay.opaque",
            b"trusted.x",
            b"user.overlay.whiteout",
            b"security.selinux",
            b"security.ima",
        ];
        assert!(kept.iter().all(|name| is_content(name)));
        assert!(!dropped.iter().any(|name| is_content(name)));
    }

    #[test]
    fn content_is_what_was_set() {
        let work = tempfile::tempdir().unwrap();
        fs_err::write(work.path().join("f"), "").unwrap();
        let directory = fs_err::File::open(work.path()).unwrap();
        let entry = XattrFile::Entry(directory.as_fd(), b"f");
        assert_eq!(entry.content().unwrap(), []);
        for place in [entry, XattrFile::Open(directory.as_fd())] {
            place.set("user.note", b"kept").unwrap();
            let kept = (b"user.note".to_vec(), b"kept".to_vec());
            assert_eq!(place.content().unwrap(), [kept]);
        }
    }
}
