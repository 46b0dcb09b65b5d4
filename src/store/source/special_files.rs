//! Owns refusing work trees in which git would block forever: it opens some files by name, whatever their type.

use std::path::{Path, PathBuf};

use fs_err as fs;

use super::Git;
use super::checkout::Checkout;
use crate::sys::error::Result;
use crate::sys::shell::quoted_path;

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
