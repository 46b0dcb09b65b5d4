//! Owns refusing checkouts in which git would block forever: it opens some files by name, whatever their type.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Read as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::fcntl::OFlag;

use super::Git;
use super::checkout::{Checkout, not_regular};
use crate::sys::beneath;
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;
use crate::sys::trusted_files::without_dots;

/// Files that git opens in each directory that it examines, and the list of submodules at the top.
const OPENED: [&str; 3] = [".gitignore", ".gitattributes", ".gitmodules"];

impl Git<'_> {
    /// Refuses FIFOs and devices that git would open. Skips ignored directories and other repositories, as git does.
    pub(super) fn refuse_special_files(
        &self,
        checkout: &Checkout<'_>,
        directory: &Path,
    ) -> Result<()> {
        let mut found = Vec::new();
        let mut left = vec![PathBuf::new()];
        while let Some(below) = left.pop() {
            self.stop_if_cancelled()?;
            // git itself reports what it cannot read.
            let Ok(entries) = fs::read_dir(directory.join(&below)) else {
                continue;
            };
            let (mut special, mut directories) = (Vec::new(), Vec::new());
            let mut is_other = false;
            for entry in entries.flatten() {
                let (name, Ok(kind)) = (entry.file_name(), entry.file_type()) else {
                    continue;
                };
                if name == ".git" {
                    is_other = !below.as_os_str().is_empty();
                } else if kind.is_dir() {
                    directories.push(below.join(name));
                } else if OPENED.iter().any(|opened| name == *opened)
                    && !(kind.is_file() || kind.is_symlink())
                {
                    special.push(below.join(name));
                }
            }
            if !is_other {
                found.append(&mut special);
                left.append(&mut directories);
            }
        }
        // Start at the top: to find out whether a directory is ignored, git opens these files above it.
        found.sort_by_key(|path| path.components().count());
        for path in found {
            let parent = path.parent().and_then(Path::to_str).unwrap_or_default();
            let is_ignored = ["check-ignore", "--quiet", "--", parent];
            if parent.is_empty() || checkout.text(&is_ignored).is_err() {
                self.stop_if_cancelled()?;
                let path = directory.join(path);
                return Err(invalid!("`{}` is not a regular file", path.display())
                    .help(format!("rm {}", quoted_path(&path))));
            }
        }
        Ok(())
    }
}

/// Maximum length of the list of other directories with objects, in bytes. git writes a line for each `--reference`.
const LONGEST_LIST: u64 = 1 << 20;

/// Refuses FIFOs and devices, which git would open and wait for: among the links in `place`, in the directories that
/// they lead to, and in the directories that `objects` names for more objects.
pub(super) fn refuse_in_git_directory(git: &Git<'_>, place: &Path, objects: &Path) -> Result<()> {
    let mut seen = BTreeSet::new();
    let mut objects = vec![objects.to_owned()];
    let mut left = vec![place.to_owned()];
    loop {
        while let Some(directory) = left.pop() {
            // A link in place of the objects may lead to everything.
            git.stop_if_cancelled()?;
            // git itself reports what it cannot read.
            for entry in fs::read_dir(&directory).into_iter().flatten().flatten() {
                let (path, Ok(kind)) = (entry.path(), entry.file_type()) else {
                    continue;
                };
                let is_link = kind.is_symlink();
                let kind = match is_link {
                    true => fs::metadata(&path).map(|found| found.file_type()),
                    false => Ok(kind),
                };
                match kind {
                    Ok(kind) if kind.is_dir() => {
                        // A link may lead above itself.
                        let is_new = |real| seen.insert(real);
                        if !is_link || fs::canonicalize(&path).is_ok_and(is_new) {
                            left.push(path);
                        }
                    }
                    Ok(kind) if !kind.is_file() => {
                        return Err(not_regular(&fs::canonicalize(path)?));
                    }
                    Ok(_) | Err(_) => {}
                }
            }
        }
        let Some(directory) = objects.pop() else {
            return Ok(());
        };
        for path in alternates(&directory)? {
            if seen.insert(path.clone()) {
                objects.push(path.clone());
                left.push(path);
            }
        }
    }
}

/// Returns the other directories with objects that one names in `info/alternates`, as git finds them.
fn alternates(objects: &Path) -> Result<Vec<PathBuf>> {
    let path = objects.join("info/alternates");
    let file = beneath::open_file(&path, OFlag::O_NONBLOCK);
    let (Ok(file), Ok(objects)) = (file, fs::canonicalize(objects)) else {
        return Ok(Vec::new());
    };
    let found = file.metadata()?;
    if !found.is_file() || found.len() > LONGEST_LIST {
        return Err(not_regular(&path));
    }
    let mut list = Vec::new();
    file.take(LONGEST_LIST).read_to_end(&mut list)?;
    let mut named = Vec::new();
    for line in list.split(|byte| *byte == b'\n') {
        match line.first() {
            None | Some(b'#') => {}
            // git would read it, but writes none.
            Some(b'"') => {
                return Err(invalid!("`{}` has a quoted path", path.display())
                    .help("write the path without quotes"));
            }
            Some(_) => {
                // By name, as git does, even if that is a link.
                named.push(without_dots(&objects.join(OsStr::from_bytes(line))));
            }
        }
    }
    Ok(named)
}
