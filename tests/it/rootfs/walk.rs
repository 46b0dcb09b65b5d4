//! Reads a tree with all its metadata into a value that can be compared.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use sha2::{Digest as _, Sha256};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct What {
    /// Allocated blocks, which only a snapshot or a shared extent keeps exactly.
    pub(crate) blocks: bool,
    /// Link counts, which a merge of layers raises. Which names share a file is always compared.
    pub(crate) link_counts: bool,
}

/// Returns a line for each path. The path of the tree itself is empty.
pub(crate) fn walk(top: &Path, what: What) -> BTreeMap<PathBuf, String> {
    let mut lines = BTreeMap::new();
    let mut first_names: HashMap<(u64, u64), PathBuf> = HashMap::new();
    let mut paths = vec![PathBuf::new()];
    let mut all = Vec::new();
    while let Some(path) = paths.pop() {
        let full = if path.as_os_str().is_empty() {
            top.to_owned()
        } else {
            top.join(&path)
        };
        let stat = fs_err::symlink_metadata(&full).unwrap();
        if stat.is_dir() {
            for entry in fs_err::read_dir(&full).unwrap() {
                paths.push(path.join(entry.unwrap().file_name()));
            }
        }
        all.push((path, full, stat));
    }
    all.sort_by(|a, b| a.0.cmp(&b.0));
    for (path, full, stat) in all {
        let kind = stat.file_type();
        let mut line = format!(
            "{:o} {}:{} {}.{:09}",
            stat.mode(),
            stat.uid(),
            stat.gid(),
            stat.mtime(),
            stat.mtime_nsec()
        );
        if kind.is_char_device() || kind.is_block_device() {
            write!(line, " device {:x}", stat.rdev()).unwrap();
        }
        if kind.is_symlink() {
            write!(line, " -> {:?}", fs_err::read_link(&full).unwrap()).unwrap();
        }
        if kind.is_file() {
            // Large files here are sparse, so their content is not read.
            let content = if stat.len() > 64 << 20 {
                String::new()
            } else {
                format!("{:x?}", &Sha256::digest(fs_err::read(&full).unwrap())[..8])
            };
            write!(line, " {} bytes {content}", stat.len()).unwrap();
            if what.blocks {
                write!(line, " {} blocks", stat.blocks()).unwrap();
            }
        }
        if !kind.is_dir() {
            let first = first_names
                .entry((stat.dev(), stat.ino()))
                .or_insert_with(|| path.clone());
            write!(line, " is {first:?}").unwrap();
            if what.link_counts {
                write!(line, " {} links", stat.nlink()).unwrap();
            }
        }
        line.push_str(&attributes(&full));
        lines.insert(path, line);
    }
    lines
}

/// Returns every extended attribute of an entry, in order.
fn attributes(path: &Path) -> String {
    let names = read(|into| rustix::fs::llistxattr(path, into));
    let names = names.split(|byte| *byte == 0);
    let mut lines: Vec<String> = names
        // overlayfs's own attributes are not part of the tree.
        .filter(|name| !name.is_empty() && !name.starts_with(b"trusted.overlay."))
        .map(|name| {
            let value = read(|into| rustix::fs::lgetxattr(path, name, into));
            format!(" {}={value:02x?}", String::from_utf8_lossy(name))
        })
        .collect();
    lines.sort_unstable();
    lines.concat()
}

/// Returns the names or the value that a call writes. The kernel limits both to 64 KiB.
fn read(call: impl FnOnce(&mut [u8]) -> rustix::io::Result<usize>) -> Vec<u8> {
    let mut bytes = vec![0; 1 << 16];
    let written = call(&mut bytes).unwrap();
    bytes.truncate(written);
    bytes
}

/// Fails with only the differing lines.
pub(crate) fn assert_same(
    left: &BTreeMap<PathBuf, String>,
    right: &BTreeMap<PathBuf, String>,
    about: &str,
) {
    let mut differences = String::new();
    for path in left.keys().chain(right.keys()) {
        let (old, new) = (left.get(path), right.get(path));
        if old != new {
            writeln!(differences, "{path:?}:\n  {old:?}\n  {new:?}").unwrap();
        }
    }
    assert!(differences.is_empty(), "{about}:\n{differences}");
}
