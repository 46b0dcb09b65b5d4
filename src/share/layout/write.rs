//! Owns writing a layout: what is not whole has another name, nothing is written over, and what a killed command left is cleaned
//! away by the next one.
//!
//! Layers are written while they are packed. In a tar file the size stands before the bytes, so it is written when they are there.

use std::collections::BTreeMap;
use std::fs::TryLockError;
use std::io::{self, ErrorKind, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{FileExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use bytes::Bytes;
use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::libc;
use rustix::fs::{CWD, RenameFlags, renameat_with};
use rustix::io::Errno;
use serde_json::json;
use sha2::{Digest as _, Sha256};
use tar::{EntryType, Header};
use tokio::sync::mpsc::Receiver;

use super::super::document::MANIFEST;
use super::{BLOBS, Form, INDEX, INDEX_TYPE, MARK, MARK_TEXT, NAME, TAG, blob};
use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::export;
use crate::image::hex;
use crate::rootfs;

const BLOCK: u64 = 512;
/// What a layer is called in a directory before its digest is known.
const NEXT: &str = "blobs/next";

/// A layout that is not whole yet. Dropped before it is, it leaves nothing.
#[derive(Debug)]
pub(in crate::share) struct Draft {
    /// What it will be called.
    place: PathBuf,
    /// What it is called until then.
    partial: PathBuf,
    form: Form,
    /// The tar file, or the mark in the directory: locked, so that nobody takes it for what a killed command left.
    file: fs::File,
    /// Whom new files belong to, where that is not who makes them.
    owner: Option<(u32, u32)>,
    /// What the files of a tar file say of their age.
    time: u64,
    /// The SHA-256 of what is in it, and the sizes.
    blobs: BTreeMap<String, u64>,
    image: Option<Image>,
}

/// The image in it.
#[derive(Debug)]
struct Image {
    names: BTreeMap<&'static str, String>,
    config: Vec<u8>,
    manifest: Vec<u8>,
}

impl Draft {
    /// Begins one.
    pub(in crate::share) fn new(place: &Path, time: u64) -> Result<Self> {
        let form = Form::of(place)?;
        let name = place.file_name().unwrap_or_default();
        let parent = match place.parent() {
            Some(parent) if !parent.as_os_str().is_empty() => parent,
            _ => Path::new("."),
        };
        if !parent.is_dir() {
            return Err(
                Error::not_found(format!("there is no directory `{}`", parent.display()))
                    .help(format!("mkdir {}", parent.display())),
            );
        }
        let owner = export::owner(parent)?;
        let place = parent.join(name);
        if fs::symlink_metadata(&place).is_ok() {
            return Err(in_the_way(&place));
        }
        let partial = parent.join(format!(".{}.rockenv-partial", name.to_string_lossy()));
        let file = match form {
            Form::Archive => open_archive(&partial)?,
            Form::Directory => open_directory(&partial)?,
        };
        let mut draft = Self {
            place,
            partial,
            form,
            file,
            owner,
            time,
            blobs: BTreeMap::new(),
            image: None,
        };
        draft.begin()?;
        Ok(draft)
    }

    fn begin(&mut self) -> Result<()> {
        export::give(self.file.file(), self.owner).context(|| self.cannot())?;
        match self.form {
            Form::Archive => {
                self.member(MARK, MARK_TEXT)?;
                for directory in ["blobs/", "blobs/sha256/"] {
                    let header = self.header(EntryType::Directory, directory, 0)?;
                    self.file.write_all(header.as_bytes())?;
                }
            }
            Form::Directory => {
                self.file.write_all(MARK_TEXT)?;
                for directory in ["blobs", BLOBS] {
                    fs::create_dir(self.partial.join(directory))?;
                }
                for directory in ["", "blobs", BLOBS] {
                    let directory = fs::File::open(self.partial.join(directory))?;
                    export::give(directory.file(), self.owner).context(|| self.cannot())?;
                }
            }
        }
        Ok(())
    }

    /// Says whether something is in it.
    pub(in crate::share) fn has(&self, sha256: &str) -> bool {
        self.blobs.contains_key(sha256)
    }

    /// Writes a layer as it comes; its digest is asked for when all of it is there.
    pub(in crate::share) async fn layer(
        &mut self,
        chunks: Receiver<io::Result<Bytes>>,
        digest: impl AsyncFnOnce() -> Result<Option<String>>,
    ) -> Result<()> {
        let written = match self.form {
            Form::Archive => self.append(chunks).await,
            Form::Directory => self.fill(chunks).await,
        };
        // What could not be read is why it ended.
        let digest = digest().await?;
        let (at, size) = written.map_err(|error| too_large(&self.place, error))?;
        let sha256 = digest.ok_or_else(|| Error::unexpected("a layer ended before its end"))?;
        match self.form {
            Form::Archive if self.has(&sha256) => {
                self.file.seek(SeekFrom::Start(at))?;
            }
            Form::Archive => {
                let header = self.header(EntryType::Regular, &blob(&sha256), size)?;
                self.file.file().write_all_at(header.as_bytes(), at)?;
                self.pad(size)?;
            }
            Form::Directory => {
                fs::rename(self.partial.join(NEXT), self.partial.join(blob(&sha256)))?;
            }
        }
        self.blobs.insert(sha256, size);
        Ok(())
    }

    /// Writes a layer behind the place of its header; returns that place, and the size.
    async fn append(&mut self, mut chunks: Receiver<io::Result<Bytes>>) -> io::Result<(u64, u64)> {
        let at = self.file.stream_position()?;
        self.file.seek(SeekFrom::Start(at + BLOCK))?;
        let mut size = 0;
        while let Some(chunk) = chunks.recv().await {
            let chunk = chunk?;
            self.file.write_all(&chunk)?;
            size += chunk.len() as u64;
        }
        Ok((at, size))
    }

    async fn fill(&mut self, mut chunks: Receiver<io::Result<Bytes>>) -> io::Result<(u64, u64)> {
        let mut file = fs::File::create(self.partial.join(NEXT))?;
        export::give(file.file(), self.owner)?;
        let mut size = 0;
        while let Some(chunk) = chunks.recv().await {
            let chunk = chunk?;
            file.write_all(&chunk)?;
            size += chunk.len() as u64;
        }
        file.sync_data()?;
        Ok((0, size))
    }

    /// Says what the image in it is, in place of what was said before.
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

    /// Gives it its name, when all of it is on the disk; returns how many bytes it has.
    pub(in crate::share) fn finish(mut self) -> Result<u64> {
        let Image {
            names,
            config,
            manifest,
        } = self
            .image
            .take()
            .ok_or_else(|| Error::unexpected("a layout without an image"))?;
        let mut sizes = Vec::new();
        for bytes in [&config, &manifest] {
            let sha256 = hex(&Sha256::digest(bytes));
            self.member(&blob(&sha256), bytes)?;
            sizes.push((sha256, bytes.len() as u64));
        }
        let index = json!({
            "schemaVersion": 2, "mediaType": INDEX_TYPE,
            "manifests": [{
                "mediaType": MANIFEST, "digest": format!("sha256:{}", sizes[1].0), "size": sizes[1].1,
                "annotations": names,
            }],
        });
        self.member(INDEX, index.to_string().as_bytes())?;
        let total = self
            .blobs
            .values()
            .chain(sizes.iter().map(|(_, size)| size));
        let total = total.sum();
        if self.form == Form::Archive {
            self.file.write_all(&[0; 2 * BLOCK as usize])?;
            let end = self.file.stream_position()?;
            // Behind a layer that was there already, some of it may be left.
            self.file.set_len(end)?;
        }
        self.file.sync_all()?;
        if self.form == Form::Directory {
            for directory in [BLOBS, "blobs", ""] {
                fs::File::open(self.partial.join(directory))?.sync_all()?;
            }
        }
        self.publish()?;
        if let Some(parent) = self.place.parent() {
            fs::File::open(parent)?.sync_all()?;
        }
        Ok(total)
    }

    /// Writes a small part.
    fn member(&mut self, name: &str, bytes: &[u8]) -> Result<()> {
        let size = bytes.len() as u64;
        match self.form {
            Form::Archive => {
                let header = self.header(EntryType::Regular, name, size)?;
                self.file.write_all(header.as_bytes())?;
                self.file.write_all(bytes)?;
                self.pad(size)
            }
            Form::Directory => {
                let mut file = fs::File::create(self.partial.join(name))?;
                export::give(file.file(), self.owner).context(|| self.cannot())?;
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

    /// Gives it its name, which nothing else may have by now.
    fn publish(&self) -> Result<()> {
        let taken = |_| in_the_way(&self.place);
        match renameat_with(CWD, &self.partial, CWD, &self.place, RenameFlags::NOREPLACE) {
            Ok(()) => return Ok(()),
            Err(Errno::EXIST) => return Err(in_the_way(&self.place)),
            // A file system that has only the old way: there a new name of a file never replaces anything, and a directory
            // only an empty one.
            Err(Errno::INVAL | Errno::NOSYS | Errno::NOTSUP) => {}
            Err(error) => return Err(io::Error::from(error)).context(|| self.cannot()),
        }
        if self.form == Form::Archive {
            match fs::hard_link(&self.partial, &self.place) {
                Ok(()) => return Ok(fs::remove_file(&self.partial)?),
                Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                    return Err(taken(error));
                }
                // FAT by way of FUSE has no links.
                Err(_) => {}
            }
        }
        if fs::symlink_metadata(&self.place).is_ok() {
            return Err(in_the_way(&self.place));
        }
        fs::rename(&self.partial, &self.place).context(|| self.cannot())
    }

    fn cannot(&self) -> String {
        format!("cannot write `{}`", self.place.display())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // Gone already where it has its name; what cannot be removed now, the next one does.
        match self.form {
            Form::Archive => drop(fs::remove_file(&self.partial)),
            Form::Directory => drop(rootfs::remove_tree(&self.partial)),
        }
    }
}

fn open_archive(partial: &Path) -> Result<fs::File> {
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true).create(true);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    let file = options.open(partial)?;
    let found = file.metadata()?;
    if !found.is_file() || found.nlink() > 1 {
        return Err(in_the_way(partial));
    }
    lock(&file)?;
    // What a killed command left begins as every archive does; anything else is somebody's file.
    let mut start = [0; MARK.len()];
    let length = file.file().read_at(&mut start, 0)?;
    if start[..length] != MARK.as_bytes()[..length] {
        return Err(in_the_way(partial));
    }
    // Whoever had it may have given it its name meanwhile.
    if !fs::symlink_metadata(partial).is_ok_and(|named| is(&file, &named)) {
        return Err(busy(partial));
    }
    file.set_len(0)?;
    Ok(file)
}

fn is(file: &fs::File, named: &std::fs::Metadata) -> bool {
    let open = file.metadata();
    open.is_ok_and(|open| (open.dev(), open.ino()) == (named.dev(), named.ino()))
}

/// Makes the directory with its mark, which is locked.
fn open_directory(partial: &Path) -> Result<fs::File> {
    let mark = partial.join(MARK);
    let mut options = fs::OpenOptions::new();
    options.read(true).write(true);
    options.custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK);
    // Once for what a killed command left.
    for _ in 0..2 {
        match fs::create_dir(partial) {
            Ok(()) => {
                let file = options.create_new(true).open(&mark)?;
                lock(&file)?;
                return Ok(file);
            }
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error.into()),
            Err(_) if !fs::symlink_metadata(partial)?.is_dir() => {
                return Err(in_the_way(partial));
            }
            Err(_) => {}
        }
        match options.open(&mark) {
            Ok(file) => {
                lock(&file)?;
                rootfs::remove_tree(partial)?;
            }
            // Killed before its first file.
            Err(error) if error.kind() == ErrorKind::NotFound => fs::remove_dir(partial)?,
            Err(error) => return Err(error.into()),
        }
    }
    Err(busy(partial))
}

/// Takes a file for this process; the kernel frees it if the process dies. Not every disk that is carried about can lock.
fn lock(file: &fs::File) -> Result<()> {
    match file.file().try_lock() {
        Err(TryLockError::WouldBlock) => Err(busy(file.path())),
        _ => Ok(()),
    }
}

fn busy(partial: &Path) -> Error {
    Error::busy(format!("another export is writing `{}`", partial.display()))
        .help("wait for it, or take another name")
}

fn in_the_way(place: &Path) -> Error {
    Error::new(
        Kind::Usage,
        format!(
            "`{}` is there already; nothing is written over it",
            place.display()
        ),
    )
    .help("rockenv export ENV --snapshots NEW-NAME")
}

fn too_large(place: &Path, error: io::Error) -> Error {
    let large = error.kind() == ErrorKind::FileTooLarge;
    let failed: Result<()> = Err(error).context(|| format!("cannot write `{}`", place.display()));
    let error = failed
        .err()
        .unwrap_or_else(|| Error::unexpected("nothing failed"));
    match large {
        true => error.help(
            "this file system takes no larger file; a directory has one for each layer: --snapshots DIR",
        ),
        false => error,
    }
}
