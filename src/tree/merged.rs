//! Owns reading stacked layers without mounting them. Follows no symlink out of them, and runs nothing.

use std::collections::BTreeSet;
use std::ffi::CString;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;

use nix::errno::Errno;

use super::flatten::{Kind, kind_of};
use super::root_fs::Tree;
use super::xattr::XattrFile;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

/// Maximum number of entries read per directory and layer: a step may have written any number.
const MAX_ENTRIES: usize = 100_000;

/// A directory as an overlay of the layers shows it: the layers' own directories, top first. Empty if it is missing.
#[derive(Debug, Default)]
pub(crate) struct MergedDir(Vec<OwnedFd>);

impl MergedDir {
    /// Opens the root of the tree that these layers form, top first.
    pub(crate) fn open<P: AsRef<Path>>(layers: &[P]) -> Result<Self> {
        let layers = layers.iter().map(|path| beneath::open_path(path.as_ref()));
        layers.collect::<Result<_>>().map(Self)
    }

    /// Returns the directory at a relative path; symlinks in the path are not followed.
    pub(crate) fn enter(&self, path: &str) -> Result<Self> {
        let mut found: Option<Self> = None;
        for name in path.split('/') {
            let next = found.as_ref().unwrap_or(self).enter_one(name);
            found = Some(next.context(|| format!("cannot read `{path}` in a layer"))?);
        }
        Ok(found.unwrap_or_default())
    }

    fn enter_one(&self, name: &str) -> nix::Result<Self> {
        let name = CString::new(name).map_err(|_| Errno::EINVAL)?;
        let mut found = Vec::new();
        for layer in &self.0 {
            match beneath::stat(layer, name.as_c_str()).map(|stat| Kind::of(&stat)) {
                Err(Errno::ENOENT) => {}
                Ok(Kind::Directory) => {
                    let directory = beneath::open_dir(layer, name.as_c_str())?;
                    let hides_below = XattrFile::Open(directory.as_fd()).is_opaque()?;
                    found.push(directory);
                    if hides_below {
                        break;
                    }
                }
                Ok(Kind::Whiteout | Kind::Other) => break,
                Err(error) => return Err(error),
            }
        }
        Ok(Self(found))
    }

    /// Returns the names in the directory, sorted, without names that are not UTF-8.
    pub(crate) fn names(&self) -> Result<BTreeSet<String>> {
        let (mut names, mut hidden) = (BTreeSet::new(), BTreeSet::new());
        for layer in &self.0 {
            let mut directory = nix::dir::Dir::from_fd(beneath::open_dir(layer, c".")?)?;
            for entry in directory.iter().take(MAX_ENTRIES) {
                let entry = entry?;
                if let Ok(name) = entry.file_name().to_str()
                    && beneath::is_entry(entry.file_name())
                    && !hidden.contains(name)
                {
                    match kind_of(layer.as_fd(), entry.file_name(), entry.file_type())? {
                        Kind::Whiteout => hidden.insert(name.to_owned()),
                        Kind::Directory | Kind::Other => names.insert(name.to_owned()),
                    };
                }
            }
        }
        Ok(names)
    }

    /// Reads a regular file of at most `limit` bytes at a relative path; `None` for anything else.
    pub(crate) fn read(&self, path: &str, limit: usize) -> Result<Option<Vec<u8>>> {
        let (parent, name) = path.rsplit_once('/').unwrap_or((".", path));
        let entry = CString::new(name).map_err(|_| Errno::EINVAL)?;
        for layer in self.enter(parent)?.0 {
            match beneath::stat(&layer, entry.as_c_str()) {
                Err(Errno::ENOENT) => {}
                Err(error) => return Err(error.into()),
                Ok(_) => return Tree::of(layer).read(name, limit),
            }
        }
        Ok(None)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs_err as fs;

    #[test]
    fn a_stack_is_read_as_an_overlay_shows_it() {
        let scratch = tempfile::tempdir().unwrap();
        let [upper, lower] = ["upper", "lower"].map(|name| scratch.path().join(name));
        for path in ["lower/a/both", "lower/b", "upper/a"] {
            fs::create_dir_all(scratch.path().join(path)).unwrap();
        }
        for (path, text) in [
            ("lower/a/one", "lower"),
            ("lower/a/gone", "lower"),
            ("upper/a/one", "upper"),
            ("lower/b/file", "lower"),
        ] {
            fs::write(scratch.path().join(path), text).unwrap();
        }
        std::os::unix::fs::symlink("/", upper.join("out")).unwrap();
        let whiteout = |path: &str| {
            use nix::sys::stat::{Mode, SFlag, mknod};
            mknod(&upper.join(path), SFlag::S_IFCHR, Mode::empty(), 0).unwrap();
        };
        whiteout("a/gone");
        whiteout("b");
        let tree = MergedDir::open(&[upper, lower]).unwrap();
        let names = |path: &str| Vec::from_iter(tree.enter(path).unwrap().names().unwrap());
        assert_eq!(names("a"), ["both", "one"]);
        assert!(names("b").is_empty() && names("out").is_empty() && names("a/none").is_empty());
        let read = |path: &str| tree.read(path, 100).unwrap();
        assert_eq!(read("a/one").as_deref(), Some(b"upper".as_slice()));
        for path in ["a/gone", "b/file", "out/etc/passwd", "a/both", "none"] {
            assert_eq!(read(path), None, "{path}");
        }
    }
}
