//! Owns extracting a container image's layers over each other. Each layer may delete files of lower layers.
//!
//! A deletion ("whiteout") is an entry `.wh.NAME`, or `.wh..wh..opq` for all content of a directory. It applies only to
//! lower layers, wherever in its own layer it appears, so the current layer's entries must be tracked.

use std::collections::HashSet;
use std::hash::{BuildHasher as _, RandomState};
use std::io::{self, BufReader, Read};
use std::os::fd::{AsFd as _, BorrowedFd};
use std::path::Path;
use std::sync::atomic::AtomicBool;

use nix::errno::Errno;
use nix::sys::stat::{Mode, SFlag};
use nix::unistd::UnlinkatFlags;

use crate::image::compression::{CHUNK, decompressed};
use crate::image::tar::apply::Attributes;
use crate::image::tar::unpack::{UnpackOptions, Unpacker, cannot, open_path, or_root};
use crate::image::tar::{broken, lossy};
use crate::sys::beneath;
use crate::sys::checksum::Hashed;
use crate::sys::error::{Result, ResultExt as _};
use crate::tree::root_fs::{self, join};
use crate::tree::xattr;

pub(crate) const WHITEOUT: &[u8] = b".wh.";
/// aufs stored its own files under such names, and some old images still contain them.
const AUFS: &[u8] = b".wh..wh.";
pub(crate) const OPAQUE: &[u8] = b".wh..wh..opq";

/// The kind of directory that a layer is extracted into.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Onto {
    /// An empty directory. The lowest layer has nothing to delete.
    #[default]
    Nothing,
    /// A tree that the layer changes.
    Tree,
    /// An empty directory that an overlay mounts above others. Deleted files are in lower layers, so deletions become
    /// overlayfs whiteouts.
    Overlay,
}

/// The state of the layer that is being extracted. The default is that of an archive which is no layer: none of its
/// names has a special meaning, and nothing is below it.
#[derive(Debug, Default)]
pub(crate) struct LayerEntries {
    pub(crate) is_layer: bool,
    onto: Onto,
    /// Hashes of paths. Eight bytes each, because an image has hundreds of thousands of entries.
    made: HashSet<u64>,
    hasher: RandomState,
}

impl<'a> Unpacker<'a> {
    /// Starts to extract layers, lowest first, into an existing directory, whose content `onto` describes.
    pub(crate) fn layers(
        into: &Path,
        options: &'a UnpackOptions,
        onto: Onto,
        cancel: &'a AtomicBool,
    ) -> Result<Self> {
        let mut unpacker = Self::new(into, options, cancel)?;
        unpacker.layer = LayerEntries {
            is_layer: true,
            onto,
            ..LayerEntries::default()
        };
        if onto != Onto::Nothing {
            // A service's layer has no entry for the root directory, which stays as it is.
            let root = Attributes::of(unpacker.root.fd())?;
            unpacker.directories.insert(Vec::new(), root);
        }
        for path in options.left_out {
            // Deleting the content of a parent directory must not remove the path either.
            for (at, _) in path.match_indices('/') {
                unpacker.note_made(&path.as_bytes()[..at]);
            }
            unpacker.note_made(path.as_bytes());
        }
        Ok(unpacker)
    }

    /// Extracts the next layer, whose uncompressed bytes must have this SHA-256.
    pub(crate) fn apply(
        &mut self,
        archive: impl Read + Send,
        sha256: &str,
        progress: &mut dyn FnMut(u64),
    ) -> Result<()> {
        let found = decompressed(archive, &self.options.limits, |stream| {
            let mut stream = BufReader::with_capacity(CHUNK, Hashed::new(stream));
            self.archive(&mut stream, progress)?;
            // The digest includes what follows the archive's end.
            let rest = io::copy(&mut stream, &mut io::sink())
                .context(|| "cannot read the layer to its end".into());
            rest.map(|_| stream.into_inner().digest())
        })
        .context(|| "cannot read the layer".into())??;
        if found != sha256 {
            return Err(drift!(
                "the layer's content has SHA-256 {found}, but the image's configuration says {sha256}"
            )
            .help("the image is damaged or was tampered with; use another"));
        }
        // Open directories are cached by name, but each layer may replace them.
        self.stack.clear();
        if self.layer.onto == Onto::Nothing {
            self.layer.onto = Onto::Tree;
        }
        self.layer.made = HashSet::new();
        Ok(())
    }

    /// Records that the current layer contains this path, or an entry below it.
    pub(crate) fn note_made(&mut self, path: &[u8]) {
        if self.is_upper() {
            let hash = self.layer.hasher.hash_one(path);
            self.layer.made.insert(hash);
        }
    }

    /// Returns whether lower layers exist.
    pub(crate) fn is_upper(&self) -> bool {
        self.layer.onto != Onto::Nothing
    }

    fn is_made(&self, path: &[u8]) -> bool {
        let hash = self.layer.hasher.hash_one(path);
        self.layer.made.contains(&hash)
    }

    /// Applies a deletion. Returns false if the entry is not a deletion.
    pub(crate) fn whiteout(&mut self, components: &[&[u8]], entry: &[u8]) -> Result<bool> {
        let Some((name, parents)) = components.split_last() else {
            return Ok(false);
        };
        if parents.iter().any(|part| part.starts_with(WHITEOUT)) {
            return Err(broken!(
                "entry `{}` is inside a deleted directory",
                lossy(entry)
            ));
        }
        let Some(deleted) = name.strip_prefix(WHITEOUT) else {
            return Ok(false);
        };
        if *name != OPAQUE && name.starts_with(AUFS) {
            self.report.drop("aufs's own file".into());
            return Ok(true);
        }
        if matches!(deleted, b"" | b"." | b"..") {
            return Err(broken!(
                "entry `{}` deletes nothing that can be named",
                lossy(entry)
            ));
        }
        if !self.is_upper() {
            return Ok(true);
        }
        if self.layer.onto == Onto::Overlay {
            self.enter(parents, entry)?;
            return self.keep_deletion(name, deleted, entry).map(|()| true);
        }
        let path = parents.join(&b'/');
        let parent = match open_path(self.root.fd(), or_root(&path)) {
            // The deleted entry does not exist.
            Err(Errno::ENOENT) => return Ok(true),
            // Following a link here would delete another file.
            Err(Errno::ENOTDIR | Errno::ELOOP | Errno::EXDEV) => {
                return Err(broken!(
                    "entry `{}` deletes through `{}`, which is not a directory",
                    lossy(entry),
                    lossy(&path)
                ));
            }
            other => other.context(|| cannot("apply", entry))?,
        };
        if *name != OPAQUE {
            self.remove_lower(parent.as_fd(), deleted, &join(&path, deleted))?;
            return Ok(true);
        }
        let directory = beneath::open_dir(parent.as_fd(), c".")?;
        for name in root_fs::names(directory)? {
            self.remove_lower(parent.as_fd(), &name, &join(&path, &name))?;
        }
        Ok(true)
    }

    /// Makes the kernel's deletion mark in the directory of the last `enter`.
    fn keep_deletion(&mut self, name: &[u8], deleted: &[u8], entry: &[u8]) -> Result<()> {
        let fail = || cannot("keep the deletion", entry);
        let parent = self.parent();
        if name == OPAQUE {
            let directory = beneath::open_dir(parent, c".").context(fail)?;
            let place = xattr::XattrFile::Open(directory.as_fd());
            return place.set(xattr::OPAQUE, b"y").context(fail);
        }
        match nix::sys::stat::mknodat(parent, deleted, SFlag::S_IFCHR, Mode::empty(), 0) {
            Err(Errno::EEXIST) => Err(broken!(
                "entry `{}` deletes an entry of its own layer",
                lossy(entry)
            )),
            other => other.context(fail),
        }
    }

    /// Removes lower layers' content under this name. Entries of the current layer stay, with their parents.
    pub(crate) fn remove_lower(
        &mut self,
        parent: BorrowedFd<'_>,
        name: &[u8],
        path: &[u8],
    ) -> Result<()> {
        let fail = || cannot("remove", path);
        let stays = self.is_made(path);
        if !stays {
            match nix::unistd::unlinkat(parent, name, UnlinkatFlags::NoRemoveDir) {
                Ok(()) | Err(Errno::ENOENT) => return Ok(()),
                Err(Errno::EISDIR) => {}
                Err(error) => return Err(error).context(fail),
            }
        }
        let directory = match beneath::open_dir(parent, name) {
            Err(Errno::ENOENT | Errno::ENOTDIR | Errno::ELOOP) if stays => return Ok(()),
            other => other.context(fail)?,
        };
        for name in root_fs::names(&directory)? {
            self.remove_lower(directory.as_fd(), &name, &join(path, &name))?;
        }
        if !stays {
            nix::unistd::unlinkat(parent, name, UnlinkatFlags::RemoveDir).context(fail)?;
            self.directories.remove(path);
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use sha2::{Digest as _, Sha256};

    use super::*;

    #[test]
    fn what_is_left_out_stays_whatever_a_layer_does_around_it() {
        let root = tempfile::tempdir().unwrap();
        let at = |path: &str| root.path().join(path);
        fs_err::create_dir_all(at("etc")).unwrap();
        // Longer names exist in no file system, but with the mark of a deletion this one is longer.
        let long = "n".repeat(255);
        for name in ["etc/hosts", "etc/old", &long] {
            fs_err::write(at(name), "own").unwrap();
        }
        let mut archive = tar::Builder::new(Vec::new());
        let names = [
            "etc/.wh..wh..opq",
            "etc/.wh.hosts",
            "etc/hosts",
            "etc/new",
            "run/a/b",
            &format!(".wh.{long}"),
        ];
        for name in names {
            let mut header = tar::Header::new_ustar();
            header.set_size(4);
            header.set_mode(0o644);
            archive
                .append_data(&mut header, name, b"that".as_slice())
                .unwrap();
        }
        let archive = archive.into_inner().unwrap();
        let attributes = || {
            let found = fs_err::metadata(root.path()).unwrap();
            (found.mode(), found.modified().unwrap())
        };
        let before = attributes();
        let options = UnpackOptions {
            left_out: &["etc/hosts", "run"],
            ..UnpackOptions::default()
        };
        let cancel = AtomicBool::new(false);
        let mut layers = Unpacker::layers(root.path(), &options, Onto::Tree, &cancel).unwrap();
        let digest = hex::encode(Sha256::digest(&archive));
        layers
            .apply(archive.as_slice(), &digest, &mut |_| {})
            .unwrap();
        layers.finish().unwrap();
        let read = |name: &str| fs_err::read_to_string(at(name)).ok();
        let found = ["etc/hosts", "etc/old", "etc/new", "run/a/b", &long].map(read);
        let own = |text: &str| Some(text.to_owned());
        assert_eq!(found, [own("own"), None, own("that"), None, None]);
        // The archive has no entry for the root directory.
        assert_eq!(attributes(), before);
    }
}
