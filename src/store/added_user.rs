//! Owns distinguishing the build user's account and home, which rockenv adds to an env's tree, from other changes.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::fs::Metadata;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;

use crate::engine::build_user::MAX_ACCOUNT_FILE;
use crate::plan::resolve::BuildUser;
use crate::sys::error::{Result, if_exists};
use crate::tree;

const ETC: &str = "etc";

/// A tree to which the user may have been added, and those below it.
pub(super) struct AddedUser<'a> {
    user: &'a BuildUser,
    /// The tree, or an overlay's upper directory.
    tree: &'a Path,
    /// The trees below, topmost first.
    below: &'a [PathBuf],
}

impl<'a> AddedUser<'a> {
    pub(super) fn new(user: &'a BuildUser, tree: &'a Path, below: &'a [PathBuf]) -> Self {
        Self { user, tree, below }
    }

    fn home(&self) -> &Path {
        Path::new(self.user.home.trim_start_matches('/'))
    }

    /// Returns whether an overlay's upper directory contains only the added user.
    pub(super) fn is_all(&self) -> Result<bool> {
        let mut waiting = vec![PathBuf::new()];
        while let Some(directory) = waiting.pop() {
            for entry in fs::read_dir(self.tree.join(&directory))? {
                let path = directory.join(entry?.file_name());
                let leads =
                    path == Path::new(ETC) || self.home() != path && self.home().starts_with(&path);
                let is_ours = match leads {
                    true => self.is_old_directory(&path)?,
                    false => self.is_new_home(&path)? || self.is_account_file(&path)?,
                };
                if !is_ours {
                    return Ok(false);
                }
                if leads {
                    waiting.push(path);
                }
            }
        }
        Ok(true)
    }

    /// Returns the inodes of a whole tree that only adding the user changed; empty if anything else changed there.
    pub(super) fn inodes(&self) -> Result<BTreeSet<u64>> {
        let home = self.home();
        let (Some(above), true) = (home.parent(), self.is_new_home(home)?) else {
            return Ok(BTreeSet::new());
        };
        let mut paths = vec![home.to_owned()];
        for (directory, new) in [(Path::new(ETC), None), (above, home.file_name())] {
            let names = |root: &Path| -> Result<BTreeSet<OsString>> {
                let entries = fs::read_dir(root.join(directory))?;
                let names = entries.map(|entry| Ok(entry?.file_name()));
                names.collect()
            };
            let mut before = match self.below(directory)? {
                Some((root, _)) => names(root)?,
                None => return Ok(BTreeSet::new()),
            };
            before.extend(new.map(ToOwned::to_owned));
            if !self.is_old_directory(directory)? || names(self.tree)? != before {
                return Ok(BTreeSet::new());
            }
            paths.push(directory.to_owned());
        }
        for account in self.user.accounts() {
            let path = Path::new(ETC).join(account.file);
            if self.is_account_file(&path)? {
                paths.push(path);
            }
        }
        let found = paths.iter().filter_map(|path| self.here(path).transpose());
        found.map(|found| Ok(found?.ino())).collect()
    }

    fn here(&self, path: &Path) -> Result<Option<Metadata>> {
        if_exists(fs::symlink_metadata(self.tree.join(path)))
    }

    /// Returns the metadata of a path in the trees below, with the tree that has it.
    fn below(&self, path: &Path) -> Result<Option<(&Path, Metadata)>> {
        for root in self.below {
            if let Some(found) = if_exists(fs::symlink_metadata(root.join(path)))? {
                return Ok(Some((root, found)));
            }
        }
        Ok(None)
    }

    /// Returns whether a directory differs from the one below it only in its entries.
    fn is_old_directory(&self, path: &Path) -> Result<bool> {
        let (Some(here), Some((_, below))) = (self.here(path)?, self.below(path)?) else {
            return Ok(false);
        };
        let is_same = here.is_dir() && below.is_dir() && rights(&here) == rights(&below);
        Ok(is_same && !tree::overlay::is_opaque(&self.tree.join(path))?)
    }

    /// Returns whether a path is the home, new and empty.
    fn is_new_home(&self, path: &Path) -> Result<bool> {
        let Some(here) = self.here(path)?.filter(|_| path == self.home()) else {
            return Ok(false);
        };
        let own = (0o755, self.user.uid, self.user.gid);
        Ok(here.is_dir()
            && rights(&here) == own
            && fs::read_dir(self.tree.join(path))?.next().is_none()
            && self.below(path)?.is_none())
    }

    /// Returns whether a path is an account file that only got the user's line.
    fn is_account_file(&self, path: &Path) -> Result<bool> {
        let accounts = self.user.accounts();
        let mut accounts = accounts.iter();
        let account = accounts.find(|account| path == Path::new(ETC).join(account.file));
        let (Some(account), Some(here), Some((root, below))) =
            (account, self.here(path)?, self.below(path)?)
        else {
            return Ok(false);
        };
        if !here.is_file()
            || !below.is_file()
            || rights(&here) != rights(&below)
            || here.len() > MAX_ACCOUNT_FILE
            || below.len() > MAX_ACCOUNT_FILE
        {
            return Ok(false);
        }
        let read = |root: &Path| fs::read(root.join(path));
        let (Ok(here), Ok(below)) = (read(self.tree), read(root)) else {
            return Ok(false);
        };
        Ok(account.added_to(&below).is_some_and(|added| added == here))
    }
}

/// Returns mode, owner and group.
fn rights(found: &Metadata) -> (u32, u32, u32) {
    (found.mode() & 0o7777, found.uid(), found.gid())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_account_file_that_no_user_was_added_to_is_not_read() {
        let directory = tempfile::tempdir().unwrap();
        let [tree, below] = ["tree", "below"].map(|name| directory.path().join(name));
        let user = BuildUser::new(1000, 1000);
        let [_, passwd] = user.accounts();
        for (length, is_ours) in [(1, true), (1 << 20, false)] {
            let before = format!("{}\n", "#".repeat(length)).into_bytes();
            let after = passwd.added_to(&before).unwrap();
            for (root, text) in [(&tree, after), (&below, before)] {
                fs::create_dir_all(root.join(ETC)).unwrap();
                fs::write(root.join(ETC).join(passwd.file), text).unwrap();
            }
            let added = AddedUser::new(&user, &tree, std::slice::from_ref(&below));
            assert_eq!(added.is_all().unwrap(), is_ours);
        }
    }
}
