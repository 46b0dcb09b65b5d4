//! Owns merging several overlay layers into an equivalent one.
//!
//! Files of the layers are hard-linked, not copied: frozen layers are never written, so two may share an inode. A
//! program inside sees a higher link count until the old layers are removed. Directories are created anew. No
//! descriptor is held between directories, so neither depth nor the number of layers is limited.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::{CStr, CString, OsStr};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use nix::dir::Type;
use nix::errno::Errno;
use nix::fcntl::AtFlags;
use nix::sys::stat::{FileStat, Mode, SFlag, fstat, mkdirat, mknodat};
use nix::unistd::linkat;

use super::metadata;
use super::reflink::Worker;
use super::transfer::Transport;
use super::work_queue::Queue;
use super::xattr::{Attributes, OPAQUE, XattrFile};
use crate::sys::beneath;
use crate::sys::error::{Error, Result, ResultExt as _};

/// Merges the layers `diffs` into the new directory `into` on their file system, so that `into` on `below` shows what
/// `diffs` show on `below`. Both are given bottom first; the first of `below` is the image.
///
/// The result is valid on these lower layers only. It keeps a whiteout only if they have the deleted entry: in a
/// directory without a lower layer, the kernel lists a whiteout as an entry that cannot be opened.
///
/// After an error the caller must remove the partial result.
pub fn flatten(below: &[PathBuf], diffs: &[PathBuf], into: &Path) -> Result<()> {
    let (holder, name) = beneath::split(into)?;
    let open = |paths: &[PathBuf]| {
        let top_first = paths.iter().rev();
        top_first
            .map(|path| beneath::open_path(path))
            .collect::<Result<Vec<_>>>()
    };
    let (layers, below) = (open(diffs)?, open(below)?);
    if layers.is_empty() {
        return Err(unexpected!("no layers to merge into `{}`", into.display()));
    }
    mkdirat(&holder, name.as_c_str(), Mode::S_IRWXU)
        .context(|| format!("cannot create directory `{}`", into.display()))?;
    let target = beneath::open_path(into)?;
    metadata::clear_inherited(target.as_fd())
        .context(|| format!("cannot prepare `{}`", into.display()))?;
    let merge = Merge {
        layers,
        below,
        target,
        into,
        transport: Transport::default(),
        queue: Queue::new(),
    };
    merge.queue.push([Merged {
        path: PathBuf::new(),
        layers: (0..merge.layers.len()).collect(),
        below: (0..merge.below.len()).collect(),
        hides_below: false,
        closed: false,
    }]);
    let work = |merged, worker: &mut Worker| merge.directory(&merged, worker);
    merge.queue.run(work, drop);
    merge.queue.into_result()
}

struct Merge<'a> {
    /// Top first.
    layers: Vec<OwnedFd>,
    /// The layers below the result, top first.
    below: Vec<OwnedFd>,
    target: OwnedFd,
    into: &'a Path,
    transport: Transport,
    queue: Queue<Merged>,
}

/// A directory of the result, already created and still empty.
struct Merged {
    path: PathBuf,
    /// The layers whose directories at this path are merged, top first.
    layers: Vec<usize>,
    /// The same for the layers below the result.
    below: Vec<usize>,
    /// Whether the parent directory hides all lower layers.
    hides_below: bool,
    /// Whether the last of `layers` sits on an entry other than a directory, which hides everything further down.
    closed: bool,
}

/// The layers' entries for a name so far.
enum Found {
    /// A file, a symlink or a whiteout: hides everything in lower layers.
    Other,
    Directory {
        layers: Vec<usize>,
        closed: bool,
    },
}

impl Merge<'_> {
    fn directory(&self, merged: &Merged, worker: &mut Worker) {
        if let Err((name, error)) = self.merge(merged, worker) {
            let path = self.into.join(&merged.path).join(name);
            let message = format!("cannot merge layers into `{}`", path.display());
            let failed = Error::from(error).explained(message);
            self.queue.abort(match error {
                // The layer refers to a lower one, which rockenv's mounts neither produce nor follow.
                Errno::EUCLEAN => failed.help("the layer was written with other overlay options than rockenv's: remove the env"),
                _ => failed,
            });
        }
    }

    fn merge(
        &self,
        merged: &Merged,
        worker: &mut Worker,
    ) -> std::result::Result<(), (PathBuf, Errno)> {
        let own = |error| (PathBuf::new(), error);
        let at = |name: &CStr, error| (PathBuf::from(OsStr::from_bytes(name.to_bytes())), error);
        let target = beneath::open_below(&self.target, &merged.path).map_err(own)?;
        let mut closed = merged.closed;
        let mut found: HashMap<CString, Found> = HashMap::new();
        let mut whiteouts = Vec::new();
        let mut top = None;
        for &layer in &merged.layers {
            let source = beneath::open_below(&self.layers[layer], &merged.path).map_err(own)?;
            let opaque = is_opaque(source.as_fd(), &mut worker.attributes).map_err(own)?;
            for (name, listed) in beneath::entries(&source).map_err(own)? {
                let kind = kind_of(source.as_fd(), &name, listed);
                let kind = kind.map_err(|error| at(&name, error))?;
                match found.entry(name.clone()) {
                    Entry::Vacant(vacant) => match kind {
                        Kind::Directory => {
                            vacant.insert(Found::Directory {
                                layers: vec![layer],
                                closed: false,
                            });
                        }
                        Kind::Whiteout => {
                            vacant.insert(Found::Other);
                            whiteouts.push(name);
                        }
                        Kind::Other => {
                            vacant.insert(Found::Other);
                            self.link(source.as_fd(), target.as_fd(), &name, worker)
                                .map_err(|error| at(&name, error))?;
                        }
                    },
                    Entry::Occupied(mut occupied) => {
                        if let Found::Directory { layers, closed } = occupied.get_mut()
                            && !*closed
                        {
                            match kind {
                                Kind::Directory => layers.push(layer),
                                Kind::Whiteout | Kind::Other => *closed = true,
                            }
                        }
                    }
                }
            }
            if top.is_none() {
                top = Some(source);
            }
            if opaque {
                closed = true;
                break;
            }
        }
        let hides_below = merged.hides_below || closed;
        let below = if hides_below {
            Vec::new()
        } else {
            self.open_below(merged, worker).map_err(own)?
        };
        for name in &whiteouts {
            if shown(&below, name).map_err(|error| at(name, error))? {
                // A whiteout has no metadata of its own.
                mknodat(&target, name.as_c_str(), SFlag::S_IFCHR, Mode::empty(), 0)
                    .map_err(|error| at(name, error))?;
            }
        }
        let mut children = Vec::new();
        for (name, found) in found {
            if let Found::Directory { layers, closed } = found {
                mkdirat(&target, name.as_c_str(), Mode::S_IRWXU)
                    .map_err(|error| at(&name, error))?;
                let below = directories(&below, &name).map_err(|error| at(&name, error))?;
                children.push(Merged {
                    path: merged.path.join(OsStr::from_bytes(name.to_bytes())),
                    layers,
                    below,
                    hides_below,
                    closed,
                });
            }
        }
        let needs_opaque = closed && !merged.hides_below;
        let source = top.ok_or_else(|| own(Errno::ENOENT))?;
        finish(source.as_fd(), target.as_fd(), needs_opaque, worker).map_err(own)?;
        self.queue.push(children);
        Ok(())
    }

    /// Opens the merged directory's lower directories, top first.
    fn open_below(
        &self,
        merged: &Merged,
        worker: &mut Worker,
    ) -> nix::Result<Vec<(usize, OwnedFd)>> {
        let mut open = Vec::new();
        for &layer in &merged.below {
            let directory = beneath::open_below(&self.below[layer], &merged.path)?;
            let opaque = is_opaque(directory.as_fd(), &mut worker.attributes)?;
            open.push((layer, directory));
            if opaque {
                break;
            }
        }
        Ok(open)
    }

    fn link(
        &self,
        from: BorrowedFd<'_>,
        to: BorrowedFd<'_>,
        name: &CStr,
        worker: &mut Worker,
    ) -> nix::Result<()> {
        match linkat(from, name, to, name, AtFlags::empty()) {
            Err(Errno::EMLINK | Errno::EPERM | Errno::EXDEV) => {
                worker.copy_entry(from, to, name, &self.transport)
            }
            other => other,
        }
    }
}

#[derive(Clone, Copy)]
pub(super) enum Kind {
    Directory,
    /// A deletion, stored as the character device 0:0.
    Whiteout,
    Other,
}

impl Kind {
    pub(super) fn of(stat: &FileStat) -> Self {
        match beneath::kind(stat) {
            SFlag::S_IFDIR => Self::Directory,
            SFlag::S_IFCHR if stat.st_rdev == 0 => Self::Whiteout,
            _ => Self::Other,
        }
    }
}

pub(super) fn kind_of(
    directory: BorrowedFd<'_>,
    name: &CStr,
    listed: Option<Type>,
) -> nix::Result<Kind> {
    match listed {
        Some(Type::Directory) => Ok(Kind::Directory),
        Some(Type::CharacterDevice) | None => Ok(Kind::of(&beneath::stat(directory, name)?)),
        Some(_) => Ok(Kind::Other),
    }
}

/// Returns whether the directories, top first, show an entry of this name.
fn shown(directories: &[(usize, OwnedFd)], name: &CStr) -> nix::Result<bool> {
    for (_, directory) in directories {
        match beneath::stat(directory, name) {
            Ok(stat) => return Ok(!matches!(Kind::of(&stat), Kind::Whiteout)),
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(false)
}

/// Returns the layers whose directories of this name are merged, top first.
fn directories(parents: &[(usize, OwnedFd)], name: &CStr) -> nix::Result<Vec<usize>> {
    let mut layers = Vec::new();
    for (layer, directory) in parents {
        match beneath::stat(directory, name) {
            Ok(stat) => match Kind::of(&stat) {
                Kind::Directory => layers.push(*layer),
                Kind::Whiteout | Kind::Other => break,
            },
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(layers)
}

/// Returns whether the layer's directory hides lower ones. Fails with `EUCLEAN` for a layer that refers to others,
/// because it cannot be merged.
pub(super) fn is_opaque(
    directory: BorrowedFd<'_>,
    attributes: &mut Attributes,
) -> nix::Result<bool> {
    let mut opaque = false;
    let all = |_: &CStr| true;
    attributes.each(XattrFile::Open(directory), all, |name, value| {
        match name.to_bytes() {
            b"trusted.overlay.opaque" if value == b"y" => opaque = true,
            b"trusted.overlay.opaque"
            | b"trusted.overlay.redirect"
            | b"trusted.overlay.metacopy" => return Err(Errno::EUCLEAN),
            _ => {}
        }
        Ok(())
    })?;
    Ok(opaque)
}

/// Gives a merged directory the metadata of the topmost one.
fn finish(
    from: BorrowedFd<'_>,
    to: BorrowedFd<'_>,
    needs_opaque: bool,
    worker: &mut Worker,
) -> nix::Result<()> {
    let stat = fstat(from)?;
    metadata::copy_open(from, &stat, to, &mut worker.attributes, is_content)?;
    if needs_opaque {
        // Setting it changes only the change time.
        XattrFile::Open(to).set(OPAQUE, b"y")?;
    }
    Ok(())
}

/// Returns whether an attribute belongs to the tree, not to the layer's place in a stack.
///
/// An overlay inside the env writes `overlay.overlay`; `protattr` is a `chattr` flag.
pub(super) fn is_content(name: &CStr) -> bool {
    let name = name.to_bytes();
    !name.starts_with(b"trusted.overlay.")
        || name.starts_with(b"trusted.overlay.overlay.")
        || name == b"trusted.overlay.protattr"
}
