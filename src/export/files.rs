//! Owns the exported files: finding them, copying without replacing anything, and comparing them with a manifest.
//!
//! What a build wrote is not trusted: no link in it is followed, and none is handed out.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::fd::AsFd;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use nix::fcntl::{OFlag, OpenHow, ResolveFlag};
use sha2::{Digest as _, Sha256};
use tempfile::NamedTempFile;

use super::Manifest;
use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::profile::hex;
use crate::rootfs::openat2;

/// A file to hand out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// Directory that it is below.
    pub root: PathBuf,
    /// Path below that.
    pub from: PathBuf,
    /// Path below the directory that it goes to.
    pub to: PathBuf,
}

/// Lists the regular files below a directory, sorted, as items below `to`. Anything else is refused, links too.
pub fn list(directory: &Path, to: &Path) -> Result<Vec<Item>> {
    let mut items = Vec::new();
    for from in regular(directory)? {
        items.push(Item {
            root: directory.to_owned(),
            to: to.join(&from),
            from,
        });
    }
    Ok(items)
}

/// Returns the paths of the regular files below a directory, sorted part by part; anything else is refused.
pub(crate) fn regular(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    walk(directory, Path::new(""), &mut found)?;
    Ok(found)
}

fn walk(directory: &Path, below: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    let mut entries = fs::read_dir(directory.join(below))?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs_err::DirEntry::file_name);
    for entry in entries {
        let (name, kind) = (below.join(entry.file_name()), entry.file_type()?);
        if kind.is_dir() {
            walk(directory, &name, found)?;
        } else if kind.is_file() {
            found.push(name);
        } else {
            let path = directory.join(&name);
            return Err(Error::new(
                Kind::Invalid,
                format!(
                    "`{}` is no regular file, and cannot be named with a digest",
                    path.display()
                ),
            )
            .help("let the step that makes it write a file in its place, or remove it"));
        }
    }
    Ok(())
}

/// Returns the name that a path has in a manifest; refuses one that is not UTF-8.
pub fn names(path: &Path) -> Result<String> {
    let name = path.to_str().ok_or_else(|| {
        Error::invalid(format!(
            "`{}` has a name that is not UTF-8, which a manifest cannot hold",
            path.display()
        ))
    })?;
    Ok(name.to_owned())
}

/// Copies items into a directory, and returns their SHA-256 in the order of the items. A file that is there already with the
/// same content stays; one with another content is refused before anything is written. With `owner` the new files are theirs.
pub fn copy(items: &[Item], directory: &Path, owner: Option<(u32, u32)>) -> Result<Vec<String>> {
    let mut sums = Vec::new();
    let mut fresh = Vec::new();
    for item in items {
        let sum = digest(&item.root, &item.from)?;
        let place = directory.join(&item.to);
        match fs::symlink_metadata(&place) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => fresh.push(item),
            Err(error) => return Err(error.into()),
            Ok(found) if found.is_file() && digest(directory, &item.to)? == sum => {}
            Ok(_) => return Err(in_the_way(&place)),
        }
        sums.push(sum);
    }
    for item in fresh {
        let mut from = open(&item.root, &item.from)?;
        put(directory, &item.to, owner, 0o644, &mut |to| {
            std::io::copy(from.file_mut(), to.as_file_mut()).map(drop)
        })?;
    }
    for (item, sum) in items.iter().zip(&sums) {
        // The build may have gone on writing, and disks lie: what is handed out is what the manifest says.
        if digest(directory, &item.to)? != *sum {
            return Err(Error::new(
                Kind::Drift,
                format!(
                    "`{}` changed while it was copied",
                    item.root.join(&item.from).display()
                ),
            )
            .help("run it again when nothing writes there"));
        }
    }
    Ok(sums)
}

/// Writes a file of `text` unless it is there with that content.
pub(crate) fn write(
    directory: &Path,
    name: &str,
    text: &[u8],
    owner: Option<(u32, u32)>,
) -> Result<()> {
    let place = directory.join(name);
    match fs::symlink_metadata(&place) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            put(directory, Path::new(name), owner, 0o644, &mut |to| {
                to.write_all(text)
            })
        }
        Err(error) => Err(error.into()),
        Ok(found) if found.is_file() && fs::read(&place)? == text => Ok(()),
        Ok(_) => Err(in_the_way(&place)),
    }
}

/// Copies a file to the same path below another directory, where none is yet, with its mode and times; blocks are shared where the
/// file system can.
pub(crate) fn put_copy(
    root: &Path,
    path: &Path,
    directory: &Path,
    owner: Option<(u32, u32)>,
) -> Result<()> {
    let mut from = open(root, path)?;
    let found = from.metadata()?;
    let mode = found.mode() & 0o777;
    put(directory, path, owner, mode, &mut |to| {
        std::io::copy(from.file_mut(), to.as_file_mut())?;
        to.as_file().set_modified(found.modified()?)
    })
}

/// Makes a file whole or not at all, and never in the place of another.
fn put(
    directory: &Path,
    name: &Path,
    owner: Option<(u32, u32)>,
    mode: u32,
    fill: &mut dyn FnMut(&mut NamedTempFile) -> std::io::Result<()>,
) -> Result<()> {
    let parent = make(directory, name.parent().unwrap_or(Path::new("")), owner)?;
    let place = directory.join(name);
    let cannot = || format!("cannot write `{}`", place.display());
    let mut file = tempfile::Builder::new()
        .prefix(".rockenv-")
        .tempfile_in(parent)
        .context(cannot)?;
    fill(&mut file).context(cannot)?;
    file.as_file()
        .set_permissions(std::fs::Permissions::from_mode(mode))
        .context(cannot)?;
    give(file.as_file(), owner).context(cannot)?;
    file.as_file().sync_data().context(cannot)?;
    match file.persist_noclobber(&place) {
        Ok(_) => Ok(()),
        Err(error) if error.error.kind() == std::io::ErrorKind::AlreadyExists => {
            Err(in_the_way(&place))
        }
        Err(error) => Err(error.error).context(cannot),
    }
}

/// Makes a directory below another, part by part; a link on the way could lead out of it.
fn make(directory: &Path, below: &Path, owner: Option<(u32, u32)>) -> Result<PathBuf> {
    let mut at = directory.to_owned();
    for part in below.components() {
        at.push(part);
        match fs::create_dir(&at) {
            Ok(()) => give(fs::File::open(&at)?.file(), owner)?,
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
                if !fs::symlink_metadata(&at)?.is_dir() {
                    return Err(in_the_way(&at));
                }
            }
            Err(error) => return Err(error.into()),
        }
    }
    Ok(at)
}

/// Gives a new file to whom it belongs.
pub(crate) fn give(file: impl AsFd, owner: Option<(u32, u32)>) -> std::io::Result<()> {
    match owner {
        Some((uid, gid)) => Ok(nix::unistd::fchown(
            file,
            Some(uid.into()),
            Some(gid.into()),
        )?),
        None => Ok(()),
    }
}

fn in_the_way(place: &Path) -> Error {
    Error::new(
        Kind::Usage,
        format!(
            "`{}` is there already, and another; nothing is written over it",
            place.display()
        ),
    )
    .help("rockenv export ENV NEW-DIRECTORY")
}

/// Opens a regular file below a directory; no link on the way is followed, and a pipe not waited for.
pub(crate) fn open(directory: &Path, below: &Path) -> Result<fs::File> {
    let path = directory.join(below);
    let how = OpenHow::new()
        .flags(OFlag::O_RDONLY | OFlag::O_NONBLOCK | OFlag::O_CLOEXEC)
        .resolve(
            ResolveFlag::RESOLVE_BENEATH
                | ResolveFlag::RESOLVE_NO_SYMLINKS
                | ResolveFlag::RESOLVE_NO_MAGICLINKS,
        );
    let root = fs::File::open(directory)?;
    let file =
        openat2(root.file(), below, how).context(|| format!("cannot open `{}`", path.display()))?;
    let file = fs::File::from_parts(file.into(), path);
    if !file.metadata()?.is_file() {
        return Err(Error::invalid(format!(
            "`{}` is no regular file",
            file.path().display()
        )));
    }
    Ok(file)
}

/// Returns the SHA-256 of a regular file below a directory, where no link leads.
pub(crate) fn digest(directory: &Path, below: &Path) -> Result<String> {
    let mut file = open(directory, below)?;
    let mut hash = Sha256::new();
    let mut buffer = vec![0u8; 256 << 10];
    loop {
        // `fs_err` says which file it was.
        let count = file.read(&mut buffer)?;
        if count == 0 {
            return Ok(hex(&hash.finalize()));
        }
        hash.update(&buffer[..count]);
    }
}

/// Compares the files below `directory` with a manifest; returns what differs, in words.
pub fn check(directory: &Path, manifest: &Manifest) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let mut known = BTreeMap::new();
    for subject in &manifest.subject {
        let path = Path::new(&subject.name);
        let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
        if !path.components().all(plain) || path.as_os_str().is_empty() {
            return Err(Error::invalid(format!(
                "the manifest names `{}`, which is outside its directory",
                subject.name.escape_debug()
            )));
        }
        known.insert(path.to_owned(), &subject.digest["sha256"]);
    }
    for (path, wanted) in &known {
        let place = directory.join(path);
        match fs::symlink_metadata(&place) {
            Err(error)
                if matches!(
                    error.kind(),
                    std::io::ErrorKind::NotFound | std::io::ErrorKind::NotADirectory
                ) =>
            {
                differences.push(format!("{} is missing", path.display()));
            }
            Err(error) => return Err(error.into()),
            Ok(found) if !found.is_file() => {
                differences.push(format!("{} is no regular file", path.display()));
            }
            Ok(_) if digest(directory, path)? != **wanted => {
                differences.push(format!("{} has another content", path.display()));
            }
            Ok(_) => {}
        }
    }
    Ok(differences)
}

/// Returns whom new files in a directory belong to, where that is not who makes them.
pub(crate) fn owner(directory: &Path) -> Result<Option<(u32, u32)>> {
    let found = fs::metadata(directory)?;
    Ok(nix::unistd::geteuid()
        .is_root()
        .then(|| (found.uid(), found.gid())))
}
