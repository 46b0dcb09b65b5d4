//! Owns moving something out of an untrusted tree: by one rename, through no link and over no mount point.

use std::ffi::CString;
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;

use nix::errno::Errno;

use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};

/// Moves the entry at `below` in the directory `root` to `to`, on the same file system. A missing entry is a success.
pub(crate) fn take_below(root: &Path, below: &Path, to: &Path) -> Result<()> {
    let shown = || format!("cannot remove `{}`", root.join(below).display());
    let (Some(parent), Some(name)) = (below.parent(), below.file_name()) else {
        return Err(Error::unexpected(format!(
            "`{}` is not a name",
            below.display()
        )));
    };
    let name =
        CString::new(name.as_bytes()).map_err(|error| Error::unexpected(shown()).source(error))?;
    let top = beneath::open_path(root)?;
    let holder = match beneath::open_below(&top, parent) {
        Err(Errno::ENOENT) => return Ok(()),
        other => other.context(shown)?,
    };
    let (trash, new) = beneath::split(to)?;
    match nix::fcntl::renameat(&holder, name.as_c_str(), &trash, new.as_c_str()) {
        Err(Errno::ENOENT) => Ok(()),
        other => other.context(shown),
    }
}

/// Returns whether there is a directory at `below` in the directory `root`, without a link or a mount point on the
/// way.
pub(crate) fn is_directory_below(root: &Path, below: &Path) -> bool {
    beneath::open_path(root).is_ok_and(|top| beneath::open_below(&top, below).is_ok())
}
