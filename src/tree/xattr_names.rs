//! Owns extended attributes: which ones belong to a tree's content, and reading and writing them by descriptor.
//!
//! nix has no calls for them, hence rustix.

use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::PathBuf;

use rustix::fs::XattrFlags;
use rustix::io::Errno;

/// Returns whether an attribute is content, to be kept in copies and digests.
///
/// `trusted.*` and overlayfs's own attributes would be instructions to the kernel that mounts the tree; security
/// labels belong to the host's policy.
pub(crate) fn is_content(name: &[u8]) -> bool {
    let is_overlay = name.starts_with(b"user.overlay.") || name.starts_with(b"user.fuseoverlayfs.");
    let is_kept = name == b"security.capability"
        || name == b"system.posix_acl_access"
        || name == b"system.posix_acl_default"
        || name.starts_with(b"user.");
    is_kept && !is_overlay
}

/// Returns the content attributes of an open file, sorted by name.
pub(crate) fn read(file: impl AsFd) -> std::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let file = file.as_fd();
    collect(
        |list| rustix::fs::flistxattr(file, list),
        |name, value| rustix::fs::fgetxattr(file, name, value),
    )
}

/// Returns the content attributes of `name` in a directory, without following it, sorted by name.
pub(crate) fn read_at(
    parent: BorrowedFd<'_>,
    name: &[u8],
) -> std::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let path = place(parent, name);
    collect(
        |list| rustix::fs::llistxattr(&path, list),
        |name, value| rustix::fs::lgetxattr(&path, name, value),
    )
}

/// overlayfs's mark of a directory that hides lower layers' content.
const OPAQUE: &str = "trusted.overlay.opaque";

/// Returns whether a directory of an overlay's layer hides lower layers' content.
pub(crate) fn is_opaque(directory: impl AsFd) -> std::io::Result<bool> {
    let mut value = [0_u8; 8];
    match rustix::fs::fgetxattr(directory, OPAQUE, &mut value) {
        Ok(length) => Ok(&value[..length] == b"y"),
        Err(Errno::NODATA | Errno::NOTSUP) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Makes a directory of an overlay's layer hide lower layers' content.
pub(crate) fn make_opaque(directory: impl AsFd) -> std::io::Result<()> {
    Ok(rustix::fs::fsetxattr(
        directory,
        OPAQUE,
        b"y",
        XattrFlags::empty(),
    )?)
}

/// Removes an attribute of an open file, if it exists.
pub(crate) fn remove(file: impl AsFd, name: &[u8]) -> std::io::Result<()> {
    match rustix::fs::fremovexattr(file, name) {
        Ok(()) | Err(Errno::NODATA | Errno::NOTSUP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

pub(crate) fn write(file: impl AsFd, name: &[u8], value: &[u8]) -> std::io::Result<()> {
    Ok(rustix::fs::fsetxattr(
        file,
        name,
        value,
        XattrFlags::empty(),
    )?)
}

/// Sets an attribute of `name` in a directory, without following it.
pub(crate) fn write_at(
    parent: BorrowedFd<'_>,
    name: &[u8],
    attribute: &[u8],
    value: &[u8],
) -> std::io::Result<()> {
    Ok(rustix::fs::lsetxattr(
        place(parent, name),
        attribute,
        value,
        XattrFlags::empty(),
    )?)
}

// There are no *at() calls for attributes before Linux 6.13; the descriptor's own link in /proc is equivalent.
fn place(parent: BorrowedFd<'_>, name: &[u8]) -> PathBuf {
    let mut path = PathBuf::from(format!("/proc/self/fd/{}", parent.as_raw_fd()));
    path.push(std::ffi::OsStr::from_bytes(name));
    path
}

fn collect(
    list: impl Fn(&mut [u8]) -> rustix::io::Result<usize>,
    get: impl Fn(&[u8], &mut [u8]) -> rustix::io::Result<usize>,
) -> std::io::Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut names = [0_u8; 1024];
    let listed = match list(&mut names) {
        Ok(0) | Err(Errno::NOTSUP) => return Ok(Vec::new()),
        Ok(length) => names[..length].to_vec(),
        Err(Errno::RANGE) => {
            // 64 KiB is the kernel's limit for the list as for a value.
            let mut names = vec![0_u8; 64 << 10];
            let length = list(&mut names)?;
            names.truncate(length);
            names
        }
        Err(error) => return Err(error.into()),
    };
    let mut attributes = Vec::new();
    for name in listed
        .split(|byte| *byte == 0)
        .filter(|name| is_content(name))
    {
        let mut value = vec![0_u8; 64 << 10];
        match get(name, &mut value) {
            Ok(length) => {
                value.truncate(length);
                attributes.push((name.to_vec(), value));
            }
            // Removed between the two calls.
            Err(Errno::NODATA) => {}
            Err(error) => return Err(error.into()),
        }
    }
    attributes.sort();
    Ok(attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

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
}
