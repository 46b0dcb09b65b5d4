//! Owns the exported files: finding them, copying without replacing anything, and comparing them with a manifest.
//!
//! A build's output is untrusted: a link in it is exported as a link, and never followed.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::os::fd::AsFd as _;
use std::path::{Component, Path, PathBuf};

use fs_err as fs;
use nix::fcntl::OFlag;

use super::manifest::Manifest;
use crate::sys::account::{self, Existing, caller};
use crate::sys::beneath;
use crate::sys::checksum;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::tree::leaves;
use crate::tree::listing::{Content, Listing, ListingEntry, PathState, path_state};
use crate::tree::writer as tree;
use crate::tree::writer::Writer;

/// Help of errors. The caller puts in the env's name.
pub(super) const ELSEWHERE: &str = "rockenv export ENV NEW-DIRECTORY";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct OutputItem {
    /// Directory that contains the entry.
    pub root: PathBuf,
    /// Path below `root`.
    pub from: PathBuf,
    /// Path below the destination.
    pub to: PathBuf,
    /// Its kind; a hard link names a path below `root`, exported or not.
    pub entry: ListingEntry,
}

/// An entry as a manifest describes it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum ExportedEntry {
    /// A regular file, by SHA-256.
    File(String),
    /// A symbolic link, by target.
    Symlink(String),
    /// An empty directory.
    Directory,
}

/// Lists everything below a directory, each directory before its content, as items below `to`.
pub(crate) fn list(directory: &Path, to: &Path) -> Result<Vec<OutputItem>> {
    let entries = Listing::of(directory)?.entries.into_iter();
    let items = entries.map(|(from, entry)| OutputItem {
        root: directory.to_owned(),
        to: to.join(&from),
        from,
        entry,
    });
    Ok(items.collect())
}

fn not_for_a_manifest(path: &Path) -> Error {
    let path = path.display();
    invalid!("`{path}` is not a regular file, so the manifest cannot have a digest of it")
        .help("change the step that makes it to write a regular file, or remove it")
}

/// Returns the paths of the regular files below a directory, sorted by component; refuses anything else.
pub(crate) fn regular(directory: &Path) -> Result<Vec<PathBuf>> {
    let leaves = leaves(directory)?.into_iter();
    let regular = leaves.map(|(path, kind)| match kind.is_file() {
        true => Ok(path),
        false => Err(not_for_a_manifest(&directory.join(path))),
    });
    regular.collect()
}

/// Returns the name of a path in a manifest; refuses one that is not UTF-8.
pub(crate) fn names(path: &Path) -> Result<String> {
    let name = path.to_str().ok_or_else(|| {
        let path = path.display();
        invalid!("`{path}` has a name that is not UTF-8, which a manifest cannot hold")
    })?;
    Ok(name.to_owned())
}

/// Returns the entries of items for a manifest, and the items that a directory lacks. Identical files stay; any other
/// existing file is refused.
pub(crate) fn compare<'a>(
    items: &'a [OutputItem],
    directory: &Path,
) -> Result<(BTreeMap<String, ExportedEntry>, Vec<&'a OutputItem>)> {
    let mut all = BTreeMap::new();
    let mut fresh = Vec::new();
    for item in items {
        let named = item.named()?;
        match path_state(directory, &item.to)? {
            PathState::Free => fresh.push(item),
            PathState::Taken(found) if is_same(&named, &found, directory, &item.to)? => {}
            PathState::Taken(_) => return Err(refusing_overwrite(&directory.join(&item.to))),
            PathState::Blocked => {
                return Err(refusing_overwrite(&on_the_way(directory, &item.to)?));
            }
        }
        all.insert(names(&item.to)?, named);
    }
    // A directory with content is implied by that content.
    let full = items.iter().filter_map(|item| item.to.parent()?.to_str());
    let full: BTreeSet<&str> = full.collect();
    all.retain(|name, named| *named != ExportedEntry::Directory || !full.contains(name.as_str()));
    Ok((all, fresh))
}

/// Copies items into a directory that lacks them, then compares it with all files in `all`.
pub(crate) fn copy(
    fresh: &[&OutputItem],
    all: &BTreeMap<String, ExportedEntry>,
    directory: &Path,
) -> Result<()> {
    let mut writer = Writer::for_caller(directory)?;
    // Link only to files that this export wrote. The first name of a file may be left out of the export.
    let mut written: BTreeMap<(&Path, &Path), &Path> = BTreeMap::new();
    let outcome = fresh.iter().try_for_each(|item| {
        let Content::File { hardlink, .. } = &item.entry.content else {
            return writer.put(&item.to, &item.entry, None, Existing::Refuse);
        };
        let first_name = hardlink.as_ref().unwrap_or(&item.from);
        let file = (item.root.as_path(), first_name.as_path());
        let from = open(&item.root, &item.from)?;
        let first = written.get(&file).copied();
        let from = from.file().as_fd();
        writer.link_or_put(&item.to, &item.entry, first, from, Existing::Refuse)?;
        written.insert(file, &item.to);
        Ok(())
    });
    // Even after an error, the directories made so far get their modes.
    let finished = writer.finish();
    outcome.map_err(|error: Error| error.help(ELSEWHERE))?;
    finished?;
    for (name, named) in all {
        // The build may still be writing, and disks fail: the exported file must match the manifest.
        if let ExportedEntry::File(sum) = named
            && digest(directory, Path::new(name))? != *sum
        {
            return Err(drift!("`{name}` changed while it was being copied")
                .help("run the command again when no program is writing there"));
        }
    }
    Ok(())
}

/// Returns the first entry in a path that is not a directory.
fn on_the_way(directory: &Path, path: &Path) -> Result<PathBuf> {
    let mut above: Vec<&Path> = path.ancestors().skip(1).collect();
    above.pop();
    for above in above.into_iter().rev() {
        match path_state(directory, above)? {
            PathState::Taken(found) if found.is_directory() => {}
            PathState::Taken(_) | PathState::Free | PathState::Blocked => {
                return Ok(directory.join(above));
            }
        }
    }
    Ok(directory.join(path))
}

impl OutputItem {
    fn named(&self) -> Result<ExportedEntry> {
        Ok(match &self.entry.content {
            Content::File { .. } => ExportedEntry::File(digest(&self.root, &self.from)?),
            Content::Symlink { target } => ExportedEntry::Symlink(names(target)?),
            Content::Directory { .. } => ExportedEntry::Directory,
            Content::Special(_) => return Err(not_for_a_manifest(&self.root.join(&self.from))),
        })
    }
}

fn is_same(
    named: &ExportedEntry,
    found: &ListingEntry,
    directory: &Path,
    path: &Path,
) -> Result<bool> {
    Ok(match (named, &found.content) {
        (ExportedEntry::File(sum), Content::File { .. }) => digest(directory, path)? == *sum,
        (ExportedEntry::Symlink(wanted), Content::Symlink { target }) => {
            *target == Path::new(wanted)
        }
        (ExportedEntry::Directory, Content::Directory { .. }) => true,
        (ExportedEntry::File(_) | ExportedEntry::Symlink(_) | ExportedEntry::Directory, _) => false,
    })
}

/// Returns whether a directory lacks a file; refuses a file with content other than `text`.
pub(crate) fn is_missing(directory: &Path, name: &str, text: &str) -> Result<bool> {
    let path = directory.join(name);
    let place = account::FilePlace::new(caller(), &path)?;
    let Ok(there) = place.open() else {
        return Err(refusing_overwrite(&path));
    };
    let Some(mut there) = there else {
        return Ok(true);
    };
    let mut old = Vec::new();
    there.read_to_end(&mut old)?;
    match old == text.as_bytes() {
        true => Ok(false),
        false => Err(refusing_overwrite(&path)),
    }
}

/// Writes a file with `text` unless it exists with that content.
pub(crate) fn write(directory: &Path, name: &str, text: &str) -> Result<()> {
    if is_missing(directory, name, text)? {
        let place = account::FilePlace::new(caller(), &directory.join(name))?;
        place.put(text.as_bytes(), account::Existing::Refuse)?;
    }
    Ok(())
}

fn refusing_overwrite(place: &Path) -> Error {
    tree::refusing_overwrite(place).help(ELSEWHERE)
}

/// Opens a regular file below a directory, without following links on the way. Opens no device that a step made there.
pub(crate) fn open(directory: &Path, below: &Path) -> Result<fs::File> {
    let path = directory.join(below);
    let root = fs::File::open(directory)?;
    let file = beneath::open_by(root.file(), below, OFlag::O_PATH, beneath::BELOW)
        .and_then(|found| beneath::open_regular(found, OFlag::O_RDONLY))
        .context(|| format!("cannot open `{}`", path.display()))?;
    let file = fs::File::from_parts(file.into(), path);
    if !file.metadata()?.is_file() {
        let path = file.path().display();
        return Err(invalid!("`{path}` is not a regular file"));
    }
    Ok(file)
}

/// Returns the SHA-256 of a regular file below a directory, without following links.
pub(crate) fn digest(directory: &Path, below: &Path) -> Result<String> {
    // `fs_err` names the file in the error.
    Ok(hex::encode(checksum::sha256(open(directory, below)?)?.0))
}

/// Compares the files below `directory` with a manifest; returns the differences as phrases.
pub(crate) fn check(directory: &Path, manifest: &Manifest) -> Result<Vec<String>> {
    let mut differences = Vec::new();
    let mut known = BTreeMap::new();
    for subject in &manifest.subject {
        let path = Path::new(&subject.name);
        let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
        if !path.components().all(plain) || path.as_os_str().is_empty() {
            let named = format!("the manifest names `{}`", subject.name.escape_debug());
            return Err(invalid!("{named}, which is outside its directory"));
        }
        known.insert(path.to_owned(), subject.named()?);
    }
    for (path, wanted) in &known {
        let what = match (path_state(directory, path)?, wanted) {
            (PathState::Free, _) => "is missing".to_owned(),
            (PathState::Blocked, _) => "is behind a link or a file".to_owned(),
            (PathState::Taken(found), _) if is_same(wanted, &found, directory, path)? => continue,
            (PathState::Taken(found), ExportedEntry::File(_)) => match found.content {
                Content::File { .. } => "has different content".to_owned(),
                Content::Directory { .. } | Content::Symlink { .. } | Content::Special(_) => {
                    "is not a regular file".to_owned()
                }
            },
            (PathState::Taken(_), ExportedEntry::Symlink(target)) => {
                format!("is not a symbolic link to `{target}`")
            }
            (PathState::Taken(_), ExportedEntry::Directory) => "is not a directory".to_owned(),
        };
        differences.push(format!("{} {what}", path.display()));
    }
    Ok(differences)
}
