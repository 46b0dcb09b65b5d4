//! Owns granting single users access to a directory closed to others: POSIX access control lists in the kernel's
//! encoding.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;

use fs_err as fs;
use nix::errno::Errno;

use super::xattr::XattrFile;
use crate::sys::error::{Result, ResultExt as _};

const ATTRIBUTE: &std::ffi::CStr = c"system.posix_acl_access";
const VERSION: u32 = 2;
/// Tags of entries: the owner, a user by id, the owning group, the mask for users and groups, all others.
const OWNER: u16 = 0x01;
const USER: u16 = 0x02;
const GROUP: u16 = 0x04;
const MASK: u16 = 0x10;
const OTHER: u16 = 0x20;
/// The id in entries without one.
const NOBODY: u32 = u32::MAX;
const ENTER: u16 = 0o5;

pub(crate) fn named_users(directory: &Path) -> Result<BTreeSet<u32>> {
    let file = fs::File::open(directory)?;
    let mut value = vec![0; 4096];
    let length = match XattrFile::Open(file.file().as_fd()).get(ATTRIBUTE, &mut value) {
        Err(Errno::ENODATA | Errno::EOPNOTSUPP) => 0,
        other => {
            other.context(|| format!("cannot read who may enter `{}`", directory.display()))?
        }
    };
    let entries = value[..length]
        .get(4..)
        .unwrap_or_default()
        .as_chunks::<8>();
    let users = entries.0.iter().filter_map(|entry| {
        let [a, b, _, _, id @ ..] = *entry;
        (u16::from_le_bytes([a, b]) == USER).then(|| u32::from_le_bytes(id))
    });
    Ok(users.collect())
}

/// Lets only the owner and these users enter a directory. Without ACL support in the file system, any user who knows a
/// name inside may enter.
pub(crate) fn grant_access(directory: &Path, people: &BTreeSet<u32>) -> Result<()> {
    let file = fs::File::open(directory)?;
    let mut value = VERSION.to_le_bytes().to_vec();
    let mut add = |tag: u16, rights: u16, id: u32| {
        value.extend(tag.to_le_bytes());
        value.extend(rights.to_le_bytes());
        value.extend(id.to_le_bytes());
    };
    add(OWNER, 0o7, NOBODY);
    for user in people {
        add(USER, ENTER, *user);
    }
    add(GROUP, 0, NOBODY);
    add(MASK, ENTER, NOBODY);
    add(OTHER, 0, NOBODY);
    match XattrFile::Open(file.file().as_fd()).set(ATTRIBUTE, &value) {
        Err(Errno::EOPNOTSUPP) => {
            let open = std::fs::Permissions::from_mode(0o711);
            Ok(fs::set_permissions(directory, open)?)
        }
        other => other.context(|| format!("cannot close `{}` to others", directory.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_was_admitted_is_read_again_and_others_have_no_rights() {
        let directory = tempfile::tempdir().unwrap();
        let people = BTreeSet::from([1234, 70_000]);
        grant_access(directory.path(), &people).unwrap();
        let mode = fs::metadata(directory.path()).unwrap().permissions().mode();
        // The file system may have no ACL support, which leaves nothing to test.
        if mode & 0o001 == 0 {
            assert_eq!(mode & 0o777, 0o750);
            assert_eq!(super::named_users(directory.path()).unwrap(), people);
        }
    }
}
