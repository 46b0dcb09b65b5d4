//! Owns fingerprints of single paths in a source, which steps may name as their inputs.

use std::os::fd::{AsRawFd as _, OwnedFd};
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::errno::Errno;
use nix::fcntl::{OFlag, ResolveFlag, readlinkat};
use nix::sys::stat::{FileStat, SFlag, fstat};
use sha2::{Digest as _, Sha256};

use super::Git;
use super::fingerprint::remembered;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

/// What the fingerprint of a missing path is a digest of.
const ABSENT: &[u8] = b"absent";

/// Returns whether a source has nothing at the path with this fingerprint.
pub(crate) fn is_absent(fingerprint: &str) -> bool {
    fingerprint == format!("content:{}", hex::encode(Sha256::digest(ABSENT)))
}

impl Git<'_> {
    /// Returns the fingerprint of a path in a source: of its content, or of its absence. A link counts with its
    /// target in the source. The file `known` may cache the fingerprint of a directory, as for a whole source.
    pub(crate) fn fingerprint_of(
        &self,
        source: &Path,
        below: &Path,
        known: Option<&Path>,
    ) -> Result<String> {
        let top = beneath::open_path(source)?;
        let mut hash = Sha256::new();
        let mut found = inside(&top, below, OFlag::O_NOFOLLOW)?;
        let link = found.as_ref().map(Entry::link).transpose()?.flatten();
        if let Some(text) = &link {
            hash.update(text);
            hash.update([0]);
            found = inside(&top, below, OFlag::empty())?;
        }
        match found {
            None if link.is_none() => hash.update(ABSENT),
            Some(entry) if entry.kind() == SFlag::S_IFDIR => {
                let read = || self.content_digest(&entry.path());
                let print = match known.filter(|_| link.is_none()) {
                    Some(known) => remembered(&entry.path(), known, read)?,
                    None => read()?,
                };
                if link.is_none() {
                    return Ok(print);
                }
                hash.update(print);
            }
            Some(entry) if entry.kind() == SFlag::S_IFREG => {
                self.hash_content(fs::File::open(entry.path())?, &mut hash)?;
                // As in git, only the owner's permission to execute counts: the others depend on the umask of the user
                // who copied the file.
                if entry.stat.st_mode & 0o100 != 0 {
                    hash.update(0o111_u32.to_le_bytes());
                }
            }
            Some(_) => hash.update(b"special"),
            None => {}
        }
        Ok(format!("content:{}", hex::encode(hash.finalize())))
    }
}

/// An entry of a source, opened with `O_PATH`.
struct Entry {
    place: OwnedFd,
    stat: FileStat,
}

impl Entry {
    /// Returns a path in `/proc` that leads to the entry.
    fn path(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.place.as_raw_fd()))
    }

    fn kind(&self) -> SFlag {
        beneath::kind(&self.stat)
    }

    fn link(&self) -> Result<Option<Vec<u8>>> {
        Ok(match self.kind() == SFlag::S_IFLNK {
            true => Some(readlinkat(&self.place, c"")?.into_encoded_bytes()),
            false => None,
        })
    }
}

/// Opens an entry of a source; `None` if it is missing, or if links lead outside.
fn inside(top: &OwnedFd, below: &Path, flags: OFlag) -> Result<Option<Entry>> {
    let rules = ResolveFlag::RESOLVE_BENEATH | ResolveFlag::RESOLVE_NO_MAGICLINKS;
    match beneath::open_by(top, below, OFlag::O_PATH | flags, rules) {
        Ok(place) => {
            let stat = fstat(&place)?;
            Ok(Some(Entry { place, stat }))
        }
        Err(Errno::ENOENT | Errno::ENOTDIR | Errno::EXDEV | Errno::ELOOP) => Ok(None),
        Err(error) => Err(error).context(|| format!("cannot read `{}`", below.display())),
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::me;
    use super::*;

    #[test]
    fn a_path_counts_with_its_permission_to_execute_and_with_what_a_link_leads_to() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let (directory, outside) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let path = directory.path();
        let git = Git::new(me());
        let print = |name: &str| {
            let known = outside.path().join("known");
            let print = git.fingerprint_of(path, Path::new(name), None).unwrap();
            for _ in 0..2 {
                let again = git.fingerprint_of(path, Path::new(name), Some(&known));
                assert_eq!(again.unwrap(), print);
            }
            if known.exists() {
                fs::remove_file(known).unwrap();
            }
            print
        };
        fs::create_dir_all(path.join("v1/below")).unwrap();
        fs::write(path.join("v1/file"), "one").unwrap();
        fs::write(outside.path().join("file"), "one").unwrap();
        symlink("v1/file", path.join("file")).unwrap();
        symlink("v1", path.join("directory")).unwrap();
        symlink("file", path.join("chain")).unwrap();
        symlink("/v1/file", path.join("absolute")).unwrap();
        symlink(outside.path(), path.join("out")).unwrap();
        symlink(outside.path().join("file"), path.join("outer")).unwrap();
        let names = [
            "v1/file",
            "v1",
            "file",
            "directory",
            "chain",
            "directory/file",
        ];
        let others = ["absolute", "out", "outer", "out/file", "none"];
        let all = |names: &[&str]| names.iter().map(|name| print(name)).collect::<Vec<_>>();
        let (before, apart) = (all(&names), all(&others));
        assert_eq!(before[0], before[5]);
        assert_eq!(print("out/file"), print("none"));
        assert!(is_absent(&print("none")) && !is_absent(&print("outer")));
        let differ = |then: &[String]| {
            for ((name, then), now) in names.iter().zip(then).zip(all(&names)) {
                assert_ne!(*then, now, "{name}");
            }
        };
        fs::write(path.join("v1/file"), "two").unwrap();
        fs::write(outside.path().join("file"), "two").unwrap();
        differ(&before);
        let then = all(&names);
        let mode = std::fs::Permissions::from_mode(0o755);
        fs::set_permissions(path.join("v1/file"), mode).unwrap();
        differ(&then);
        assert_eq!(all(&others), apart);
        // Write permission for the group depends only on the umask of the user who copied the files.
        let then = all(&names);
        for name in ["v1/file", "v1/below", "v1"] {
            let mode = std::fs::Permissions::from_mode(0o775);
            fs::set_permissions(path.join(name), mode).unwrap();
        }
        assert_eq!(all(&names), then);
        // The same content through another link target.
        let then = print("directory");
        fs::rename(path.join("v1"), path.join("v2")).unwrap();
        fs::remove_file(path.join("directory")).unwrap();
        symlink("v2", path.join("directory")).unwrap();
        assert_ne!(print("directory"), then);
        // No process writes to the FIFO, so reading it would block.
        nix::unistd::mkfifo(&path.join("fifo"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        fs::create_dir(path.join("empty")).unwrap();
        symlink("absent", path.join("dangling")).unwrap();
        symlink("fifo", path.join("link")).unwrap();
        let names = ["fifo", "none", "empty", "dangling", "link"];
        let different: std::collections::BTreeSet<_> = names.into_iter().map(print).collect();
        assert_eq!(different.len(), names.len(), "{different:?}");
    }
}
