//! Owns reading a foreign layout: locating its parts, and verifying their bytes.
//!
//! Nothing of it is copied: a tar file is scanned once, by its headers, and its parts are read in place.

use std::collections::BTreeMap;
use std::io::{self, BufReader, Read};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;

use fs_err as fs;
use serde::Deserialize;
use sha2::{Digest as _, Sha256};

use super::super::document::{Document, MAX_CONFIG, Manifest};
use super::super::pull::SnapshotRef;
use super::{INDEX, MARK, blob, is_part};
use crate::image::fetch::ByteCounter;
use crate::image::oci::{Descriptor, MAX_MANIFEST, damaged, refused};
use crate::image::tar::{self, Reader, broken, lossy};
use crate::store::export;
use crate::store::shared::Blob;
use crate::sys::error::{Error, Result, if_there};

/// Each image has its own manifest and configuration, and all are checked before the first is imported.
const MAX_IMAGES: usize = 256;
const MAX_PARTS: usize = 16 << 10;
/// Maximum length of a name in a layout.
const MAX_NAME: usize = 128;
const CHUNK: usize = 256 << 10;
/// Bytes that are copied between two looks at the progress.
const COPIED: u64 = 16 << 20;

/// A layout.
#[derive(Debug)]
pub(in crate::share) struct Layout {
    path: PathBuf,
    /// Offsets and sizes of the parts in a tar file.
    places: Option<BTreeMap<String, (u64, u64)>>,
}

/// A range of bytes in a file.
#[derive(Clone, Debug)]
pub(in crate::share) struct Piece {
    path: PathBuf,
    at: u64,
    size: u64,
}

impl Piece {
    /// Returns all of a file.
    pub(in crate::share) fn whole(path: PathBuf) -> Self {
        Self {
            path,
            at: 0,
            size: u64::MAX,
        }
    }

    /// Returns a file with these bytes alone: its own, or else a copy at `place`. `look` may abort.
    pub(in crate::share) fn alone(
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

    pub(in crate::share) fn open(&self) -> Result<Part> {
        Ok(Part {
            file: fs::File::open(&self.path)?,
            at: self.at,
            left: self.size,
        })
    }
}

/// A piece that is being read.
#[derive(Debug)]
pub(in crate::share) struct Part {
    file: fs::File,
    at: u64,
    left: u64,
}

impl Read for Part {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).map_or(buffer.len(), |left| left.min(buffer.len()));
        let amount = self.file.file().read_at(&mut buffer[..most], self.at)?;
        self.at += amount as u64;
        self.left -= amount as u64;
        Ok(amount)
    }
}

/// The parts of an index that are read.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Index {
    schema_version: u32,
    manifests: Vec<Descriptor>,
}

impl Layout {
    /// Locates the parts, without verifying them yet.
    pub(in crate::share) fn open(path: &Path) -> Result<Self> {
        let found = if_there(fs::metadata(path))?.ok_or_else(|| {
            Error::not_found(format!("`{}` does not exist", path.display()))
                .help("rockenv export ENV --snapshots FILE.oci.tar, on the machine that built it")
        })?;
        let layout = Self {
            path: path.to_owned(),
            places: match (found.is_dir(), found.is_file()) {
                (true, _) => None,
                (_, true) => Some(scan(&fs::File::open(path)?)?),
                _ => return Err(none("it is neither a file nor a directory")),
            },
        };
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase")]
        struct Mark {
            image_layout_version: String,
        }
        let mark = layout
            .small(MARK, MAX_MANIFEST)?
            .ok_or_else(|| none(&format!("there is no `{MARK}` in it")))?;
        let mark: Mark = serde_json::from_slice(&mark)
            .map_err(|error| none(&format!("its `{MARK}` is invalid")).source(error))?;
        match mark.image_layout_version.starts_with("1.") {
            true => Ok(layout),
            false => Err(none(&format!(
                "its version is {}, not 1",
                mark.image_layout_version.escape_debug()
            ))),
        }
    }

    /// Returns the entries of the index.
    pub(in crate::share) fn entries(&self) -> Result<Vec<Descriptor>> {
        // Written last, so an interrupted export has none.
        let index = self
            .small(INDEX, MAX_MANIFEST)?
            .ok_or_else(|| none(&format!("there is no `{INDEX}` in it: is it incomplete?")))?;
        let index: Index = serde_json::from_slice(&index)
            .map_err(|error| none(&format!("its `{INDEX}` is not an index")).source(error))?;
        match (index.schema_version, index.manifests.len()) {
            (2, 1..=MAX_IMAGES) => Ok(index.manifests),
            (2, 0) => Err(none("it contains no image")),
            (2, count) => Err(none(&format!(
                "it contains {count} images (limit {MAX_IMAGES})"
            ))),
            (version, _) => Err(none(&format!("its `{INDEX}` has version {version}, not 2"))),
        }
    }

    /// Returns the document of an index entry.
    pub(in crate::share) fn document(&self, entry: &Descriptor) -> Result<Document> {
        let manifest = Manifest::parse(&self.verified(entry, MAX_MANIFEST)?)?;
        let config = self.verified(&manifest.config, MAX_CONFIG)?;
        let document = manifest.with(&config)?;
        for name in entry.names() {
            SnapshotRef::of(name).check(&document)?;
        }
        Ok(document)
    }

    /// Hashes a layer in place.
    pub(in crate::share) async fn layer(
        &self,
        blob: &Blob,
        counter: &ByteCounter,
    ) -> Result<Piece> {
        let (mut part, piece) = self.open_blob(&blob.sha256, blob.size)?;
        let mut hash = Sha256::new();
        let mut buffer = vec![0; CHUNK];
        loop {
            let amount = part.read(&mut buffer)?;
            if amount == 0 {
                break;
            }
            hash.update(&buffer[..amount]);
            counter.done.fetch_add(amount as u64, Ordering::Relaxed);
            // Another task of this thread checks for cancellation.
            tokio::task::yield_now().await;
        }
        match hex::encode(hash.finalize()) {
            found if blob.sha256 == *found => Ok(piece),
            found => Err(damaged("a layer in it", &found, &blob.sha256)),
        }
    }

    fn verified(&self, descriptor: &Descriptor, limit: u64) -> Result<Vec<u8>> {
        let sha256 = descriptor.sha256()?;
        if descriptor.size > limit {
            return Err(refused(format!(
                "`{}` has {} bytes (limit {limit})",
                blob(sha256),
                descriptor.size
            )));
        }
        let (mut part, _) = self.open_blob(sha256, descriptor.size)?;
        let mut bytes = Vec::new();
        part.read_to_end(&mut bytes)?;
        match hex::encode(Sha256::digest(&bytes)) {
            found if found == sha256 => Ok(bytes),
            found => Err(damaged(&format!("`{}`", blob(sha256)), &found, sha256)),
        }
    }

    fn open_blob(&self, sha256: &str, size: u64) -> Result<(Part, Piece)> {
        let name = blob(sha256);
        let (file, piece) = self
            .find(&name)?
            .ok_or_else(|| refused(format!("`{name}` is not in it")))?;
        if piece.size != size {
            return Err(Error::invalid(format!(
                "`{name}` has {} bytes, not {size} as the image says",
                piece.size
            ))
            .help("it is damaged, or was not copied to its end; copy it again"));
        }
        let part = Part {
            file,
            at: piece.at,
            left: piece.size,
        };
        Ok((part, piece))
    }

    /// Reads a part that has no digest; `None` if it is missing.
    fn small(&self, name: &str, limit: u64) -> Result<Option<Vec<u8>>> {
        let Some((file, piece)) = self.find(name)? else {
            return Ok(None);
        };
        if piece.size > limit {
            return Err(none(&format!(
                "its `{name}` has {} bytes (limit {limit})",
                piece.size
            )));
        }
        let mut bytes = Vec::new();
        let mut part = Part {
            file,
            at: piece.at,
            left: piece.size,
        };
        part.read_to_end(&mut bytes)?;
        Ok(Some(bytes))
    }

    fn find(&self, name: &str) -> Result<Option<(fs::File, Piece)>> {
        if let Some(places) = &self.places {
            let Some((at, size)) = places.get(name).copied() else {
                return Ok(None);
            };
            let path = self.path.clone();
            return Ok(Some((fs::File::open(&path)?, Piece { path, at, size })));
        }
        let path = self.path.join(name);
        if if_there(fs::symlink_metadata(&path))?.is_none() {
            return Ok(None);
        }
        // Follows no links: everything read is inside the layout.
        let file = export::open(&self.path, Path::new(name))
            .map_err(|error| none(&format!("`{name}` is not a regular file")).source(error))?;
        let size = file.metadata()?.len();
        Ok(Some((file, Piece { path, at: 0, size })))
    }
}

/// Locates the parts in a tar file.
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
        let path = file.path().display();
        return Err(none("it is compressed").help(format!("{unpack} {path}")));
    }
    let mut reader = Reader::new(BufReader::new(file.file()), MAX_NAME);
    let mut places = BTreeMap::new();
    while let Some(entry) = reader.next_entry()? {
        let shown = lossy(&entry.path);
        let name = shown.strip_prefix("./").unwrap_or(&shown);
        match entry.kind {
            tar::TarEntryKind::Directory
                if ["", ".", "blobs", super::BLOBS].contains(&name.trim_end_matches('/')) => {}
            tar::TarEntryKind::File { size, map: None } if is_part(name) => {
                let at = reader.pass()?;
                if at.checked_add(size).is_none_or(|end| end > length) {
                    return Err(broken(&format!("it ends inside `{name}`")));
                }
                if places.insert(name.to_owned(), (at, size)).is_some() {
                    return Err(broken(&format!("`{name}` is in it twice")));
                }
            }
            _ => {
                return Err(none(&format!(
                    "`{}` does not belong in a layout",
                    shown.escape_debug()
                )));
            }
        }
        if places.len() > MAX_PARTS {
            return Err(none(&format!("it has more than {MAX_PARTS} files")));
        }
    }
    Ok(places)
}

/// The error for something other than a layout.
fn none(why: &str) -> Error {
    Error::invalid(format!("this is not an OCI layout: {why}")).help(
        "rockenv export ENV --snapshots FILE.oci.tar makes one, and so does skopeo copy docker://HOST/NAME:KEY oci:DIR:KEY",
    )
}
