//! Owns access to a store: which users may have written it, and which may enter it.
//!
//! The content of a store decides what is deleted, mounted and ended, so a store is opened only if no user but its
//! owner can have written it. Its directories are closed to other local users, because steps, even root's, may leave
//! setuid programs there.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::unistd::geteuid;

use super::Store;
use super::check::names;
use crate::sys::error::{Error, Result, ResultExt as _, if_exists};
use crate::sys::shell::quoted_path;
use crate::sys::userns;
use crate::tree;

/// Directories that only the store's owner may enter.
pub(super) const PRIVATE: [&str; 6] = ["envs", "images", "layers", "trash", "blobs", "volumes"];
/// Directories that other users may enter if they own files below them.
pub(super) const SHARED: [&str; 3] = ["caches", "outputs", "sources"];
/// Mode of both kinds, before access for single users is added.
pub(super) const MODE: u32 = 0o700;
/// Depth of users' files below each of [`SHARED`]: `caches/<name>`, `outputs/<env>/<name>`, `sources/<name>`.
const DEPTH: [usize; 3] = [1, 2, 1];

/// Makes one of the store's own directories, unless it exists.
pub(super) fn make_directory(path: &Path) -> Result<()> {
    match std::fs::DirBuilder::new().mode(MODE).create(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => Ok(()),
        made => made.context(|| format!("cannot make `{}`", path.display())),
    }
}

/// A file or link in place of one of the store's own directories. A link's target is not rockenv's.
#[derive(Clone, Debug)]
pub struct Obstacle {
    pub path: PathBuf,
    pub message: String,
    pub help: String,
}

impl Obstacle {
    pub(super) fn at(path: &Path) -> Result<Option<Self>> {
        let Some(found) = if_exists(fs::symlink_metadata(path))? else {
            return Ok(None);
        };
        if found.is_dir() {
            return Ok(None);
        }
        let shown = quoted_path(path);
        let (message, what) = match found.is_symlink() {
            true => {
                let to = fs::read_link(path)?;
                (format!("is a link to `{}`", to.display()), "the link")
            }
            false => ("is not a directory".to_owned(), "it"),
        };
        Ok(Some(Self {
            path: path.to_owned(),
            message,
            help: format!("move {what} away: mv {shown} {shown}.old"),
        }))
    }

    /// Refuses an obstacle at a directory's path.
    pub(super) fn check(path: &Path) -> Result<()> {
        Self::at(path)?.map_or(Ok(()), |obstacle| Err(obstacle.error()))
    }

    /// Returns the obstacles in place of the store's own directories.
    pub(super) fn all(root: &Path) -> Result<Vec<Self>> {
        let below = [
            "blobs/sha256",
            "blobs/sha512",
            "blobs/fingerprints",
            "images/refs",
        ];
        let names = PRIVATE.into_iter().chain(SHARED);
        let mut found = Vec::new();
        for name in names.chain(below) {
            match Self::at(&root.join(name)) {
                // An obstacle above it was found already.
                Err(_) if below.contains(&name) && !found.is_empty() => {}
                other => found.extend(other?),
            }
        }
        Ok(found)
    }

    pub(super) fn error(self) -> Error {
        unavailable!(
            "the store's directory `{}` {}",
            self.path.display(),
            self.message
        )
        .help(self.help)
    }
}

/// Refuses a store that another user owns or may write to: its content may be forged.
pub(super) fn check_owner(root: &Path) -> Result<()> {
    for path in [root.to_owned(), root.join("format"), root.join("envs")] {
        let Some(found) = if_exists(fs::symlink_metadata(&path))? else {
            continue;
        };
        let (fault, help) = if found.uid() != geteuid().as_raw() {
            let help = match found.uid() {
                0 => "sudo rockenv ..., or ",
                _ => "use it as its owner, or ",
            };
            let (owner, user) = (found.uid(), geteuid());
            let fault = format!("belongs to user {owner}, not to user {user}");
            (fault, help.to_owned())
        } else if found.is_symlink() {
            ("is a symbolic link".to_owned(), String::new())
        } else if found.mode() & writable(&found) != 0 {
            let mode = found.mode() & 0o7777;
            let path = quoted_path(&path);
            (
                format!("is writable by other users (mode {mode:04o})"),
                format!("if nobody else wrote to it, run `chmod go-w {path}`, or "),
            )
        } else {
            continue;
        };
        return Err(unavailable!(
            "the store at `{}` is not safe to use: `{}` {fault}",
            root.display(),
            path.display()
        )
        .help(format!("{help}name another store: rockenv --home DIR ...")));
    }
    Ok(())
}

/// Returns the permission bits that let others write. On most distributions the group of an ordinary user's files
/// contains only that user, and has write permission.
fn writable(found: &std::fs::Metadata) -> u32 {
    let own_group = found.gid() == nix::unistd::getegid().as_raw();
    match own_group && !userns::is_root() {
        true => 0o002,
        false => 0o022,
    }
}

impl Store {
    /// Refuses a store with an obstacle in place of one of its own directories.
    pub fn check_directories(&self) -> Result<()> {
        let last = Obstacle::all(&self.root)?.pop();
        last.map_or(Ok(()), |obstacle| Err(obstacle.error()))
    }

    /// Closes the store's directories to other local users, except `user` and owners of files in caches, sources and
    /// outputs. Earlier versions left them open. Makes those that somebody removed, for example to free their space.
    pub fn close(&self, user: u32) -> Result<()> {
        // Returns the mode of a directory, and makes a missing one.
        let mode = |path: &Path| -> Result<u32> {
            Obstacle::check(path)?;
            match fs::symlink_metadata(path) {
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    make_directory(path).map(|()| MODE)
                }
                Ok(found) if found.uid() != geteuid().as_raw() => Err(unavailable!(
                    "`{}` is not a directory of the store's owner",
                    path.display()
                )
                .help("rockenv fsck --repair")),
                found => Ok(found?.mode()),
            }
        };
        for name in PRIVATE {
            let path = self.root.join(name);
            if mode(&path)? & 0o077 != 0 {
                fs::set_permissions(&path, std::fs::Permissions::from_mode(MODE))?;
            }
        }
        make_directory(&self.root.join("blobs/sha256"))?;
        for (name, depth) in SHARED.into_iter().zip(DEPTH) {
            let path = self.root.join(name);
            let mode = mode(&path)?;
            let mut people = tree::acl::named_users(&path)?;
            let mut new = user != geteuid().as_raw() && people.insert(user);
            if mode & 0o077 != 0o050 {
                new = true;
                people.extend(owners(&path, depth)?);
                people.remove(&geteuid().as_raw());
            }
            if new {
                tree::acl::grant_access(&path, &people)?;
            }
        }
        Ok(())
    }
}

/// Returns the owners of entries at this depth below a directory.
fn owners(directory: &Path, depth: usize) -> Result<BTreeSet<u32>> {
    let mut found = BTreeSet::new();
    for name in names(directory)? {
        let path = directory.join(name);
        let Ok(data) = fs::symlink_metadata(&path) else {
            continue;
        };
        found.insert(data.uid());
        if depth > 1 && data.is_dir() {
            found.extend(owners(&path, depth - 1)?);
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn directories_that_somebody_removed_are_made_again() {
        let (_directory, store) = Store::scratch();
        for name in PRIVATE.into_iter().chain(SHARED) {
            tree::remove_tree(&store.root.join(name)).unwrap();
        }
        store.close(geteuid().as_raw()).unwrap();
        for name in PRIVATE.into_iter().chain(SHARED) {
            let made = fs::metadata(store.root.join(name)).unwrap();
            assert!(made.is_dir() && made.mode() & 0o026 == 0, "{name}");
        }
        assert!(store.root.join("blobs/sha256").is_dir());
    }
}
