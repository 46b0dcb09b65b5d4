//! Owns writing a layout. An incomplete layout has a temporary name, nothing is overwritten, and the next export
//! removes a killed command's leftovers.
//!
//! Layers are packed while they are written. In a tar file the size precedes the bytes, so it is filled in afterwards.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::TryLockError;
use std::io::{self, ErrorKind, Seek as _, SeekFrom, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use fs_err as fs;
use nix::fcntl::OFlag;
use nix::sys::stat::Mode;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};
use tokio::sync::mpsc::Receiver;

use super::super::document::{MANIFEST, descriptor};
use super::{Form, INDEX_TYPE, MARK_TEXT, NAME, TAG};
use crate::image::oci::layout_files::{BLOBS, INDEX, MARK, blob};
use crate::sys::account::{self, Rights};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::shell::quoted_path;

const BLOCK: u64 = 512;
/// Maximum length of a file name, in bytes.
const MAX_NAME: usize = 255;
/// Name of a layer in a directory until its digest is known.
const NEXT: &str = "blobs/next";

/// A layout in progress. Dropping it before `finish` leaves nothing behind.
#[derive(Debug)]
pub(in crate::share) struct LayoutDraft {
    /// Its final path.
    place: PathBuf,
    spot: Spot,
    /// The temporary directory; `None` for a tar file.
    top: Option<OwnedFd>,
    /// The tar file, or the mark in the directory. Its lock tells it from a killed command's leftover.
    file: fs::File,
    /// Owner of new files, if it is not the process's own user.
    owner: Option<(u32, u32)>,
    /// Modification time for the entries of a tar file.
    time: u64,
    /// SHA-256 of each layer.
    blobs: BTreeSet<String>,
    image: Option<Image>,
}

#[derive(Debug)]
struct Image {
    names: BTreeMap<&'static str, String>,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

/// Returns the temporary name for a layout. It is always the same, so that the next export finds a leftover.
fn partial_name(name: &str) -> String {
    let partial = format!(".{name}.rockenv-partial");
    match partial.len() > MAX_NAME {
        true => format!(".{}.rockenv-partial", hex::encode(Sha256::digest(name))),
        false => partial,
    }
}

impl LayoutDraft {
    pub(in crate::share) fn new(place: &Path, time: u64) -> Result<Self> {
        let form = Form::of(place)?;
        let name = place.file_name().unwrap_or_default();
        let parent = beneath::parent(place);
        let rights = account::caller();
        let place = parent.join(name);
        let flags = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let parent = match rights.open_named(parent, flags) {
            Err(nix::Error::ENOENT | nix::Error::ENOTDIR) => {
                let error = not_found!("directory `{}` does not exist", parent.display());
                return Err(error.help(format!("mkdir -p {}", quoted_path(parent))));
            }
            other => other.map_err(|errno| rights.refused(parent, errno))?,
        };
        let owner = rights.owner_for_root_files(parent.as_fd())?;
        if rights.exists(parent.as_fd(), name) {
            return Err(refusing_overwrite(&place));
        }
        let partial = partial_name(&name.to_string_lossy());
        let spot = Spot {
            rights,
            parent,
            path: place.with_file_name(&partial),
            partial,
        };
        let (file, top) = match form {
            Form::Archive => (spot.open_archive()?, None),
            Form::Directory => spot.open_directory()?,
        };
        let mut draft = Self {
            place,
            spot,
            top,
            file,
            owner,
            time,
            blobs: BTreeSet::new(),
            image: None,
        };
        draft.begin()?;
        Ok(draft)
    }

    fn begin(&mut self) -> Result<()> {
        self.set_owner(self.file.file().as_fd())?;
        match &self.top {
            None => {
                self.member(MARK, MARK_TEXT)?;
                for directory in ["blobs/", "blobs/sha256/"] {
                    let header = self.header(EntryType::Directory, directory, 0)?;
                    self.file.write_all(header.as_bytes())?;
                }
            }
            Some(top) => {
                self.file.write_all(MARK_TEXT)?;
                for directory in ["blobs", BLOBS] {
                    let mode = Mode::from_bits_truncate(0o777);
                    self.spot
                        .rights
                        .make_directory(top.as_fd(), directory, mode)
                        .context(|| self.cannot())?;
                }
                for directory in [".", "blobs", BLOBS] {
                    self.set_owner(self.directory(top, directory)?.as_fd())?;
                }
            }
        }
        Ok(())
    }

    pub(in crate::share) fn has(&self, sha256: &str) -> bool {
        self.blobs.contains(sha256)
    }

    /// Writes a layer as it arrives, and asks for its digest after the last byte.
    pub(in crate::share) async fn layer(
        &mut self,
        chunks: Receiver<io::Result<Bytes>>,
        digest: impl AsyncFnOnce() -> Result<Option<(String, u64)>>,
    ) -> Result<()> {
        let written = self.fill(chunks).await;
        // If reading failed, `digest` returns that error, which is the cause.
        let digest = digest().await?;
        let large = written.as_ref().err().map(io::Error::kind) == Some(ErrorKind::FileTooLarge);
        let help = large.then_some(
            "the file system does not allow larger files; export to a directory with one file per layer: --snapshots DIR",
        );
        let written = written.context(|| self.cannot());
        let (at, size) = written.map_err(|error| error.help_if(help))?;
        let (sha256, _) = digest.ok_or_else(|| unexpected!("a layer was truncated"))?;
        match &self.top {
            None if self.has(&sha256) => {
                self.file.seek(SeekFrom::Start(at))?;
            }
            None => {
                let header = self.header(EntryType::Regular, &blob(&sha256), size)?;
                self.file.file().write_all_at(header.as_bytes(), at)?;
                self.pad(size)?;
            }
            Some(top) => {
                let rights = self.spot.rights;
                rights
                    .rename(top.as_fd(), NEXT, blob(&sha256).as_str(), true)
                    .context(|| self.cannot())?;
            }
        }
        self.blobs.insert(sha256);
        Ok(())
    }

    /// Writes a layer, in a tar file after a gap for its header; returns the gap's position and the layer's size.
    async fn fill(&mut self, mut chunks: Receiver<io::Result<Bytes>>) -> io::Result<(u64, u64)> {
        let next = self.top.as_ref().map(|top| self.create(top, NEXT));
        let next = next.transpose().map_err(io::Error::other)?;
        let at = self.file.stream_position()?;
        if next.is_none() {
            self.file.seek(SeekFrom::Start(at + BLOCK))?;
        }
        let mut file = next.as_ref().unwrap_or(&self.file);
        let mut size = 0;
        while let Some(chunk) = chunks.recv().await {
            let chunk = chunk?;
            file.write_all(&chunk)?;
            size += chunk.len() as u64;
        }
        if next.is_some() {
            file.sync_data()?;
        }
        Ok((at, size))
    }

    /// Describes the layout's image, replacing an earlier description.
    pub(in crate::share) fn describe(
        &mut self,
        key: &str,
        name: Option<&str>,
        config: Vec<u8>,
        manifest: Vec<u8>,
    ) {
        let mut names = BTreeMap::from([(TAG, key.to_owned())]);
        names.extend(name.map(|name| (NAME, name.to_owned())));
        self.image = Some(Image {
            names,
            config,
            manifest,
        });
    }

    /// Gives the layout its final name once all of it is on the disk.
    pub(in crate::share) fn finish(mut self) -> Result<()> {
        let image = self.image.take();
        let image = image.ok_or_else(|| unexpected!("a layout without an image"))?;
        for bytes in [&image.config, &image.manifest] {
            let sha256 = hex::encode(Sha256::digest(bytes));
            self.member(&blob(&sha256), bytes)?;
        }
        let mut manifest = descriptor(MANIFEST, &image.manifest);
        manifest["annotations"] = json!(image.names);
        let index = json!({
            "schemaVersion": 2, "mediaType": INDEX_TYPE, "manifests": [manifest],
        });
        self.member(INDEX, index.to_string().as_bytes())?;
        if self.top.is_none() {
            self.file.write_all(&[0; 2 * BLOCK as usize])?;
            let end = self.file.stream_position()?;
            // Bytes of a skipped duplicate layer may follow the end.
            self.file.set_len(end)?;
        }
        self.file.sync_all()?;
        if let Some(top) = &self.top {
            for directory in [BLOBS, "blobs", "."] {
                sync(self.directory(top, directory)?.as_fd())?;
            }
        }
        self.publish()?;
        let (at, flags) = (&self.spot.parent, OFlag::O_RDONLY | OFlag::O_DIRECTORY);
        // A directory may be writable but not readable.
        if let Ok(parent) = self.spot.open(at, ".", flags) {
            sync(parent.as_fd())?;
        }
        Ok(())
    }

    fn member(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let size = bytes.len() as u64;
        match &self.top {
            None => {
                let header = self.header(EntryType::Regular, name, size)?;
                self.file.write_all(header.as_bytes())?;
                self.file.write_all(bytes)?;
                self.pad(size)
            }
            Some(top) => {
                let mut file = self.create(top, name)?;
                file.write_all(bytes)?;
                Ok(file.sync_data()?)
            }
        }
    }

    fn pad(&mut self, size: u64) -> Result<()> {
        let padding = usize::try_from(size.next_multiple_of(BLOCK) - size).unwrap_or_default();
        Ok(self.file.write_all(&[0; BLOCK as usize][..padding])?)
    }

    fn header(&self, kind: EntryType, name: &str, size: u64) -> Result<Header> {
        let mut header = Header::new_gnu();
        header.set_path(name).context(|| self.cannot())?;
        header.set_entry_type(kind);
        header.set_mode(match kind {
            EntryType::Directory => 0o755,
            _ => 0o644,
        });
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(self.time);
        header.set_size(size);
        header.set_cksum();
        Ok(header)
    }

    /// Renames the layout to its final name, which must still be free.
    fn publish(&self) -> Result<()> {
        let Spot {
            rights,
            parent,
            partial,
            ..
        } = &self.spot;
        let (at, partial) = (parent.as_fd(), partial.as_str());
        let name = self.place.file_name().unwrap_or_default();
        match rights.rename(at, partial, name, false) {
            Err(nix::Error::EEXIST) => Err(refusing_overwrite(&self.place)),
            other => other.context(|| self.cannot()),
        }
    }

    fn directory(&self, top: &OwnedFd, below: &str) -> Result<OwnedFd> {
        let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
        let opened = self.spot.open(top, below, flags);
        opened.context(|| self.cannot())
    }

    /// Creates a file in the directory, or truncates the file that an earlier layer left.
    fn create(&self, top: &OwnedFd, below: &str) -> Result<fs::File> {
        let flags = OFlag::O_WRONLY | OFlag::O_CREAT | OFlag::O_TRUNC;
        let file = self.spot.open(top, below, flags);
        let file = file.context(|| self.cannot())?;
        self.set_owner(file.as_fd())?;
        Ok(fs::File::from_parts(file.into(), self.place.join(below)))
    }

    fn set_owner(&self, made: BorrowedFd<'_>) -> Result<()> {
        match self.owner {
            Some((uid, gid)) => nix::unistd::fchown(made, Some(uid.into()), Some(gid.into()))
                .context(|| self.cannot()),
            None => Ok(()),
        }
    }

    fn cannot(&self) -> String {
        format!("cannot write `{}`", self.place.display())
    }
}

impl Drop for LayoutDraft {
    fn drop(&mut self) {
        // After `publish` the temporary name no longer exists. The next command removes what cannot be removed now.
        let (at, partial) = (self.spot.parent.as_fd(), self.spot.partial.as_str());
        match self.top {
            None => drop(self.spot.rights.unlink(at, partial, false)),
            Some(_) => drop(self.spot.rights.remove_tree(at, partial)),
        }
    }
}

/// The parent directory and temporary name of a new layout.
#[derive(Debug)]
struct Spot {
    /// The user's rights, because the user chose the path.
    rights: &'static Rights,
    parent: OwnedFd,
    partial: String,
    /// Its path in messages.
    path: PathBuf,
}

impl Spot {
    fn open(&self, at: &OwnedFd, name: &str, flags: OFlag) -> nix::Result<OwnedFd> {
        let mode = match flags.contains(OFlag::O_CREAT) {
            true => Mode::from_bits_truncate(0o666),
            false => Mode::empty(),
        };
        let flags = flags | OFlag::O_NOFOLLOW;
        self.rights
            .open(Some(at.as_fd()), name, flags, mode, beneath::BELOW)
    }

    fn cannot(&self) -> String {
        format!("cannot write `{}`", self.path.display())
    }

    fn open_archive(&self) -> Result<fs::File> {
        let flags = OFlag::O_RDWR | OFlag::O_CREAT | OFlag::O_NONBLOCK;
        let file = match self.open(&self.parent, &self.partial, flags) {
            Err(errno @ (nix::Error::EACCES | nix::Error::EPERM | nix::Error::EROFS)) => {
                let parent = self.path.parent().unwrap_or(Path::new("."));
                return Err(self.rights.refused(parent, errno));
            }
            // A link, a directory or a socket.
            Err(nix::Error::ELOOP | nix::Error::EISDIR | nix::Error::ENXIO) => {
                return Err(refusing_overwrite(&self.path));
            }
            other => other.context(|| self.cannot())?,
        };
        let file = fs::File::from_parts(file.into(), &self.path);
        let found = file.metadata()?;
        if !found.is_file() || found.nlink() > 1 {
            return Err(refusing_overwrite(&self.path));
        }
        lock(&file)?;
        // A killed command's leftover begins like every archive. Anything else belongs to the user.
        let mut start = [0; MARK.len()];
        let length = file.file().read_at(&mut start, 0)?;
        if start[..length] != MARK.as_bytes()[..length] {
            return Err(refusing_overwrite(&self.path));
        }
        // The previous lock holder may have renamed the file in the meantime.
        let named = self.open(&self.parent, &self.partial, OFlag::O_PATH);
        let named = named.and_then(|named| nix::sys::stat::fstat(&named));
        if !named.is_ok_and(|named| (named.st_dev, named.st_ino) == (found.dev(), found.ino())) {
            return Err(busy(&self.path));
        }
        file.set_len(0)?;
        Ok(file)
    }

    /// Makes the directory with its locked mark.
    fn open_directory(&self) -> Result<(fs::File, Option<OwnedFd>)> {
        let mode = Mode::from_bits_truncate(0o777);
        let directory = OFlag::O_PATH | OFlag::O_DIRECTORY;
        let marked = OFlag::O_RDWR | OFlag::O_NONBLOCK;
        let file = |mark: OwnedFd| fs::File::from_parts(mark.into(), self.path.join(MARK));
        let (parent, partial) = (self.parent.as_fd(), self.partial.as_str());
        // The first attempt may only remove a killed command's leftover.
        for _ in 0..2 {
            let made = self.rights.make_directory(parent, partial, mode);
            let top = match made {
                Ok(()) | Err(nix::Error::EEXIST) => {
                    match self.open(&self.parent, partial, directory) {
                        Err(nix::Error::ELOOP | nix::Error::ENOTDIR) => {
                            return Err(refusing_overwrite(&self.path));
                        }
                        other => other.context(|| self.cannot())?,
                    }
                }
                Err(errno) => {
                    let parent = self.path.parent().unwrap_or(Path::new("."));
                    return Err(self.rights.refused(parent, errno));
                }
            };
            if made.is_ok() {
                let new = marked | OFlag::O_CREAT | OFlag::O_EXCL;
                let mark = self.open(&top, MARK, new).context(|| self.cannot())?;
                let mark = file(mark);
                lock(&mark)?;
                return Ok((mark, Some(top)));
            }
            match self.open(&top, MARK, marked) {
                Ok(mark) => {
                    let mark = file(mark);
                    lock(&mark)?;
                    self.rights
                        .remove_tree(parent, partial)
                        .context(|| self.cannot())?;
                }
                // The command was killed before it made its first file.
                Err(nix::Error::ENOENT) => self
                    .rights
                    .unlink(parent, partial, true)
                    .context(|| self.cannot())?,
                Err(error) => return Err(error).context(|| self.cannot()),
            }
        }
        Err(busy(&self.path))
    }
}

/// Syncs a directory, if its file system can. Shared folders of virtual machines cannot.
fn sync(directory: BorrowedFd<'_>) -> nix::Result<()> {
    match nix::unistd::fsync(directory) {
        Err(nix::Error::EINVAL) => Ok(()),
        other => other,
    }
}

/// Locks a file for this process. The kernel unlocks it when the process dies. Some removable disks do not support
/// locks.
fn lock(file: &fs::File) -> Result<()> {
    match file.file().try_lock() {
        Err(TryLockError::WouldBlock) => Err(busy(file.path())),
        _ => Ok(()),
    }
}

fn busy(partial: &Path) -> Error {
    busy!("another export is writing `{}`", partial.display())
        .help("wait for that export, or choose another name")
}

fn refusing_overwrite(place: &Path) -> Error {
    usage!(
        "`{}` already exists; refusing to overwrite it",
        place.display()
    )
    .help("rockenv export ENV --snapshots NEW-NAME")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_that_cannot_be_synced_is_no_failure() {
        // The kernel has no operation for this either.
        let (pipe, _end) = nix::unistd::pipe().unwrap();
        sync(pipe.as_fd()).unwrap();
    }
}
