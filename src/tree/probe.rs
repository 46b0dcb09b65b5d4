//! Owns choosing the method: tests in the store's directory what its file system supports.

use std::os::fd::AsFd as _;
use std::os::unix::fs::FileTypeExt as _;
use std::path::Path;

use nix::sys::statfs::{OVERLAYFS_SUPER_MAGIC, fstatfs};
use nix::sys::statvfs::{FsFlags, fstatvfs};

use super::{Method, btrfs, mounts, overlay, remove_tree, transfer};
use crate::sys::beneath;
use crate::sys::error::{Error, Result};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Probe {
    pub method: Method,
    pub file_system: String,
    /// For each method tried before `method`, a sentence that says why it does not work.
    pub reasons: Vec<String>,
}

/// Finds the best method that works in the directory `dir`, and leaves nothing behind.
pub fn probe(dir: &Path) -> Result<Probe> {
    let fd = beneath::open_path(dir)?;
    let file_system = mounts::file_system(fd.as_fd()).unwrap_or_else(|| "unknown".to_owned());
    // Trees and volumes are bind-mounted, with the flags of this mount.
    if fstatvfs(&fd)?.flags().contains(FsFlags::ST_NOEXEC) {
        let message = "programs in a store cannot run here: the file system is mounted noexec";
        return Err(unavailable!("{message}").help(
            "remount it with `exec`, or set `home` in config.toml to a directory on another file system",
        ));
    }
    let place = tempfile::Builder::new()
        .prefix(".rockenv-probe-")
        .tempdir_in(dir)?
        // TempDir's own cleanup would descend into mounts and protected files that a failed attempt left.
        .keep();
    let result = choose(&place, &file_system);
    let removed = remove_tree(&place);
    let (method, reasons) = result?;
    removed?;
    Ok(Probe {
        method,
        file_system,
        reasons,
    })
}

fn choose(place: &Path, file_system: &str) -> Result<(Method, Vec<String>)> {
    let mut reasons = Vec::new();
    for (method, attempt) in [
        (Method::Btrfs, try_btrfs(place)),
        (Method::Reflink, try_reflink(place)),
    ] {
        match attempt {
            Ok(()) => return Ok((method, reasons)),
            Err(error) => reasons.push(format!("{method}: {}", error.chain().join(": "))),
        }
    }
    match try_overlay(place) {
        Ok(()) => Ok((Method::Overlay, reasons)),
        Err(error) => {
            let message = format!("a store cannot live on this file system ({file_system})");
            let help = error.help_text().unwrap_or(
                "set `home` in config.toml to a directory on btrfs, xfs or ext4, or make one with `rockenv setup --store-image 250G`",
            );
            Err(Error::new(error.kind(), message).help(help).source(error))
        }
    }
}

fn try_btrfs(place: &Path) -> Result<()> {
    if !btrfs::is_btrfs(beneath::open_path(place)?)? {
        return Err(unavailable!("not a btrfs file system"));
    }
    let (tree, snapshot) = (place.join("tree"), place.join("snapshot"));
    btrfs::create(&tree)?;
    btrfs::snapshot(&tree, &snapshot, true)?;
    // An ordinary user may create both, but can neither find out what was written to a subvolume nor delete it in one
    // operation. Cloned files are then just as good, and easier to delete.
    btrfs::written(&tree).map_err(|error| {
        unavailable!("only root can inspect a subvolume's changes, and delete one at once")
            .source(error)
    })?;
    remove_tree(&snapshot)?;
    remove_tree(&tree)?;
    Ok(())
}

fn try_reflink(place: &Path) -> Result<()> {
    let (from, to) = (place.join("from"), place.join("to"));
    // A small file may be stored inside its inode, without extents to share.
    fs_err::write(&from, vec![1; 128 * 1024])?;
    let source = fs_err::File::open(&from)?;
    let target = fs_err::File::create(&to)?;
    transfer::share(source.as_fd(), target.as_fd()).map_err(|error| {
        unavailable!("files cannot share extents (FICLONE)").source(std::io::Error::from(error))
    })
}

fn try_overlay(place: &Path) -> Result<()> {
    if fstatfs(beneath::open_path(place)?)?.filesystem_type() == OVERLAYFS_SUPER_MAGIC {
        return Err(unavailable!(
            "it is an overlay itself, which cannot hold the writable layer of another"
        )
        .help(
            "in a container, mount a volume of the host and set ROCKENV_HOME to a directory in it",
        ));
    }
    let [lower, diff, work, at] = ["lower", "diff", "work", "at"].map(|name| place.join(name));
    for directory in [&lower, &diff, &work, &at] {
        fs_err::create_dir(directory)?;
    }
    fs_err::write(lower.join("file"), "")?;
    overlay::in_throw_away_namespace(|| {
        let upper = overlay::Upper {
            diff: &diff,
            work: &work,
        };
        overlay::mount(std::slice::from_ref(&lower), Some(upper), &at)?;
        fs_err::remove_file(at.join("file"))?;
        Ok::<_, Error>(())
    })??;
    let whiteout = fs_err::symlink_metadata(diff.join("file"))?;
    if !whiteout.file_type().is_char_device() {
        return Err(unavailable!(
            "its overlays do not store deletions in a readable form"
        ));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use nix::mount::MsFlags;

    use super::*;

    #[test]
    fn a_store_needs_programs() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let error = overlay::in_throw_away_namespace(|| {
            let (none, at) = (None::<&str>, directory.path());
            nix::mount::mount(none, at, Some("tmpfs"), MsFlags::MS_NOEXEC, none).unwrap();
            probe(at).unwrap_err()
        });
        let error = error.unwrap();
        assert_has!(error.message(), "mounted noexec");
        // sudo drops ROCKENV_HOME.
        assert_has!(error.help_text().unwrap(), "set `home`");
    }
}
