//! Owns the files of an OCI layout, in a directory or in a tar file: finding them, and verifying their bytes.
//!
//! Nothing is copied: a tar file's headers are scanned once, and its parts are read in place.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::fcntl::ResolveFlag;
use sha2::{Digest as _, Sha256};

use super::manifest::{Descriptor, damaged, refused};
use crate::image::tar::{self, Reader, broken, lossy};
use crate::sys::beneath;
use crate::sys::checksum::is_lower_sha256;
use crate::sys::error::{Error, Result, if_exists};
use crate::sys::shell::quoted_path;
use crate::tree::root_fs::Tree;

/// File that marks a layout and has its version.
pub(crate) const MARK: &str = "oci-layout";
/// File that lists the images of a layout.
pub(crate) const INDEX: &str = "index.json";
/// Directory of all other files, named by digest.
pub(crate) const BLOBS: &str = "blobs/sha256";

const MAX_PARTS: usize = 16 << 10;
const MAX_NAME: usize = 128;
/// Bytes to copy between two calls of `look`.
const COPIED: u64 = 16 << 20;

pub(crate) fn blob(sha256: &str) -> String {
    format!("{BLOBS}/{sha256}")
}

/// Returns whether a file belongs in a layout.
fn is_part(name: &str) -> bool {
    match name.strip_prefix(BLOBS) {
        Some(rest) => rest.strip_prefix('/').is_some_and(is_lower_sha256),
        None => name == MARK || name == INDEX,
    }
}

#[derive(Debug)]
pub(crate) struct LayoutFiles {
    path: PathBuf,
    form: Form,
}

#[derive(Debug)]
enum Form {
    /// The flag decides whether links are followed. Either way, no path leaves the layout.
    Directory(Tree, ResolveFlag),
    /// Offsets and sizes of the parts.
    Tar(BTreeMap<String, (u64, u64)>),
}

/// A range of bytes in a file.
#[derive(Clone, Debug)]
pub(crate) struct Piece {
    path: PathBuf,
    at: u64,
    size: u64,
}

impl Piece {
    pub(crate) fn whole(path: PathBuf) -> Self {
        Self {
            path,
            at: 0,
            size: u64::MAX,
        }
    }

    /// Returns a file with only these bytes: the file itself, or a copy at `place`. An error of `look` stops copying.
    pub(crate) fn alone(
        &self,
        place: &Path,
        look: &mut dyn FnMut() -> Result<()>,
    ) -> Result<PathBuf> {
        if self.size == u64::MAX {
            return Ok(self.path.clone());
        }
        let (mut from, mut to) = (self.open()?, fs::File::create_new(place)?);
        while io::copy(&mut from.by_ref().take(COPIED), &mut to)? > 0 {
            look()?;
        }
        Ok(place.to_owned())
    }

    pub(crate) fn open(&self) -> Result<Part> {
        self.part(fs::File::open(&self.path)?)
    }

    /// Returns the bytes in the open file, from the first.
    pub(super) fn part(&self, mut file: fs::File) -> Result<Part> {
        file.seek(SeekFrom::Start(self.at))?;
        Ok(file.take(self.size))
    }
}

pub(crate) type Part = io::Take<fs::File>;

impl LayoutFiles {
    /// Locates the parts in a directory or a tar file without verifying them.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let found = fs::metadata(path)?;
        let form = match (found.is_dir(), found.is_file()) {
            (true, _) => Form::Directory(Tree::open(path)?, beneath::BELOW),
            (_, true) => Form::Tar(scan(&fs::File::open(path)?)?),
            _ => return Err(no_layout("it is neither a file nor a directory")),
        };
        Ok(Self {
            path: path.to_owned(),
            form,
        })
    }

    /// Opens a directory whose links are followed inside it. Older Docker writes equal layers once and links to them.
    pub(super) fn with_links(path: &Path) -> Result<Self> {
        Ok(Self {
            path: path.to_owned(),
            form: Form::Directory(Tree::open(path)?, beneath::IN_ROOT),
        })
    }

    /// Reads a file without verifying it; `None` if it does not exist.
    pub(crate) fn read(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let Some((file, piece)) = self.find(name)? else {
            return Ok(None);
        };
        if piece.size > limit {
            return Err(too_large(name, piece.size, limit));
        }
        let mut bytes = Vec::new();
        piece.part(file)?.read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    /// Reads a document by its descriptor, and verifies it.
    pub(crate) fn verified(&self, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>> {
        let sha256 = descriptor.sha256()?;
        let name = blob(sha256);
        if descriptor.size > limit {
            return Err(too_large(&name, descriptor.size, limit));
        }
        let (mut part, _) = self.part(&name, Some(descriptor.size))?;
        let mut bytes = Vec::new();
        part.read_to_end(&mut bytes)?;
        match hex::encode(Sha256::digest(&bytes)) {
            found if found == sha256 => Ok(bytes),
            found => Err(damaged(&format!("`{name}`"), &found, sha256)),
        }
    }

    /// Opens a file, which must exist and have this size, if known.
    pub(crate) fn part(&self, name: &str, size: Option<u64>) -> Result<(Part, Piece)> {
        let shown = name.escape_debug();
        let (file, piece) = self
            .find(name)?
            .ok_or_else(|| refused(format!("`{shown}` is not in it")))?;
        if let Some(size) = size.filter(|size| *size != piece.size) {
            return Err(invalid!(
                "`{shown}` has {} bytes, not {size} as the image says",
                piece.size
            )
            .help("it is damaged, or was not copied to its end; copy it again"));
        }
        Ok((piece.part(file)?, piece))
    }

    fn find(&self, name: &str) -> Result<Option<(fs::File, Piece)>> {
        let path = self.path.join(name);
        let file = match &self.form {
            Form::Tar(places) => {
                let Some((at, size)) = places.get(name).copied() else {
                    return Ok(None);
                };
                let path = self.path.clone();
                return Ok(Some((fs::File::open(&path)?, Piece { path, at, size })));
            }
            Form::Directory(tree, resolve) => tree.open_file(name, *resolve)?,
        };
        let Some(file) = file else {
            // Another kind of entry has the name, such as a link.
            let is_other = matches!(&self.form, Form::Directory(_, resolve) if *resolve == beneath::BELOW)
                && if_exists(fs::symlink_metadata(&path))?.is_some();
            return match is_other {
                true => Err(no_layout(&format!("`{name}` is not a regular file"))),
                false => Ok(None),
            };
        };
        let file = fs::File::from_parts(file.into(), path.clone());
        let size = file.metadata()?.len();
        Ok(Some((file, Piece { path, at: 0, size })))
    }
}

fn scan(file: &fs::File) -> Result<BTreeMap<String, (u64, u64)>> {
    let length = file.metadata()?.len();
    let mut start = [0; 6];
    let amount = file.file().read_at(&mut start, 0)?;
    let unpack = match &start[..amount] {
        [0x1f, 0x8b, ..] => Some("gunzip"),
        [0x28, 0xb5, 0x2f, 0xfd, ..] => Some("unzstd"),
        [0xfd, b'7', b'z', b'X', b'Z', 0] => Some("unxz"),
        _ => None,
    };
    if let Some(unpack) = unpack {
        let path = quoted_path(file.path());
        return Err(no_layout("it is compressed").help(format!("{unpack} {path}")));
    }
    let mut reader = Reader::new(BufReader::new(file.file()), MAX_NAME);
    let mut places = BTreeMap::new();
    while let Some(entry) = reader.next_entry()? {
        let shown = lossy(&entry.path);
        let name = shown.strip_prefix("./").unwrap_or(&shown);
        match entry.kind {
            tar::TarEntryKind::Directory
                if ["", ".", "blobs", BLOBS].contains(&name.trim_end_matches('/')) => {}
            tar::TarEntryKind::File { size, map: None } if is_part(name) => {
                let at = reader.pass()?;
                if at.checked_add(size).is_none_or(|end| end > length) {
                    return Err(broken!("it ends inside `{name}`"));
                }
                if places.insert(name.to_owned(), (at, size)).is_some() {
                    return Err(broken!("`{name}` is in it twice"));
                }
            }
            _ => {
                let name = shown.escape_debug();
                return Err(no_layout(&format!("`{name}` does not belong in a layout")));
            }
        }
        if places.len() > MAX_PARTS {
            return Err(no_layout(&format!("it has more than {MAX_PARTS} files")));
        }
    }
    Ok(places)
}

fn too_large(name: &str, size: u64, limit: u64) -> Error {
    let name = name.escape_debug();
    refused(format!("`{name}` has {size} bytes (limit {limit})"))
}

pub(crate) fn no_layout(why: &str) -> Error {
    invalid!("this is not an OCI layout: {why}").help(
        "rockenv export ENV --snapshots FILE.oci.tar makes one, and so does skopeo copy docker://HOST/NAME:KEY oci:DIR:KEY",
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_layouts_own_files_are_parts_of_it() {
        let digits = "0123456789abcdef".repeat(4);
        for part in [MARK, INDEX, &blob(&digits)] {
            assert!(is_part(part), "{part}");
        }
        for other in [
            "",
            "manifest.json",
            "oci-layout/x",
            "blobs/sha256",
            "blobs/sha256/",
            "blobs/sha256/../../index.json",
            "blobs/sha512/00",
            &format!("/{}", blob(&digits)),
            &format!("{}/x", blob(&digits)),
            &blob(&digits[1..]),
            &blob(&digits.to_uppercase()),
        ] {
            assert!(!is_part(other), "{other}");
        }
    }
}
