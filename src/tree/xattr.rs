//! Owns extended attributes, which nix lacks: they store ACLs and capabilities.

#![expect(unsafe_code, reason = "nix wraps no extended attribute calls")]

use std::ffi::{CStr, CString};
use std::os::fd::{AsRawFd as _, BorrowedFd};

use nix::errno::Errno;
use nix::libc;

/// The kernel's limit for a list and for a value.
const LIMIT: usize = 64 * 1024;

/// The file that has the attributes.
#[derive(Clone, Copy)]
pub(super) enum Place<'a> {
    /// A file or directory opened for reading or writing.
    Open(BorrowedFd<'a>),
    /// The entry of an open directory; a link itself rather than its target.
    Entry(BorrowedFd<'a>, &'a CStr),
}

impl Place<'_> {
    /// Before 6.13 the kernel has no calls relative to a directory, but a path through /proc is equivalent.
    fn path(directory: BorrowedFd<'_>, name: &CStr) -> nix::Result<CString> {
        let mut path = format!("/proc/self/fd/{}/", directory.as_raw_fd()).into_bytes();
        path.extend_from_slice(name.to_bytes());
        CString::new(path).map_err(|_| Errno::EINVAL)
    }

    fn list(self, into: &mut [u8]) -> nix::Result<usize> {
        let (to, size) = (into.as_mut_ptr().cast(), into.len());
        let length = match self {
            // SAFETY: `to` points to `size` writable bytes.
            Self::Open(fd) => unsafe { libc::flistxattr(fd.as_raw_fd(), to, size) },
            Self::Entry(directory, name) => {
                let path = Self::path(directory, name)?;
                // SAFETY: `path` ends in NUL, `to` points to `size` writable bytes.
                unsafe { libc::llistxattr(path.as_ptr(), to, size) }
            }
        };
        Errno::result(length).map(isize::unsigned_abs)
    }

    pub(super) fn get(self, attribute: &CStr, into: &mut [u8]) -> nix::Result<usize> {
        let (key, to, size) = (attribute.as_ptr(), into.as_mut_ptr().cast(), into.len());
        let length = match self {
            // SAFETY: `key` ends in NUL, `to` points to `size` writable bytes.
            Self::Open(fd) => unsafe { libc::fgetxattr(fd.as_raw_fd(), key, to, size) },
            Self::Entry(directory, name) => {
                let path = Self::path(directory, name)?;
                // SAFETY: `path` and `key` end in NUL, `to` points to `size` writable bytes.
                unsafe { libc::lgetxattr(path.as_ptr(), key, to, size) }
            }
        };
        Errno::result(length).map(isize::unsigned_abs)
    }

    pub(super) fn set(self, attribute: &CStr, value: &[u8]) -> nix::Result<()> {
        let (key, from, size) = (attribute.as_ptr(), value.as_ptr().cast(), value.len());
        let result = match self {
            // SAFETY: `key` ends in NUL, `from` points to `size` readable bytes.
            Self::Open(fd) => unsafe { libc::fsetxattr(fd.as_raw_fd(), key, from, size, 0) },
            Self::Entry(directory, name) => {
                let path = Self::path(directory, name)?;
                // SAFETY: `path` and `key` end in NUL, `from` points to `size` readable bytes.
                unsafe { libc::lsetxattr(path.as_ptr(), key, from, size, 0) }
            }
        };
        Errno::result(result).map(drop)
    }

    /// Removes an attribute if it exists.
    pub(super) fn remove(self, attribute: &CStr) -> nix::Result<()> {
        let key = attribute.as_ptr();
        let result = match self {
            // SAFETY: `key` ends in NUL.
            Self::Open(fd) => unsafe { libc::fremovexattr(fd.as_raw_fd(), key) },
            Self::Entry(directory, name) => {
                let path = Self::path(directory, name)?;
                // SAFETY: `path` and `key` end in NUL.
                unsafe { libc::lremovexattr(path.as_ptr(), key) }
            }
        };
        match Errno::result(result) {
            Ok(_) | Err(Errno::ENODATA | Errno::EOPNOTSUPP) => Ok(()),
            Err(error) => Err(error),
        }
    }
}

/// Buffers for names and a value, reused for each file.
pub(super) struct Attributes {
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
    /// Calls `with` for each attribute.
    pub(super) fn each(
        &mut self,
        place: Place<'_>,
        mut with: impl FnMut(&CStr, &[u8]) -> nix::Result<()>,
    ) -> nix::Result<()> {
        let length = match place.list(&mut self.names) {
            Err(Errno::EOPNOTSUPP) => 0,
            other => other?,
        };
        for name in self.names[..length].split_inclusive(|byte| *byte == 0) {
            let name = CStr::from_bytes_with_nul(name).map_err(|_| Errno::EINVAL)?;
            let size = match place.get(name, &mut self.value) {
                // Some are listed but cannot be read.
                Err(Errno::ENODATA | Errno::EOPNOTSUPP) => continue,
                other => other?,
            };
            with(name, &self.value[..size])?;
        }
        Ok(())
    }

    /// Copies the attributes for which `wanted` holds.
    pub(super) fn copy(
        &mut self,
        from: Place<'_>,
        to: Place<'_>,
        wanted: impl Fn(&CStr) -> bool,
    ) -> nix::Result<()> {
        self.each(from, |name, value| {
            if wanted(name) {
                to.set(name, value)
            } else {
                Ok(())
            }
        })
    }
}
