//! Reads a tree with all its metadata into a value that can be compared.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest as _, Sha256};

use crate::support::loopfs::run;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct What {
    /// Allocated blocks, which only a snapshot or a shared extent keeps exactly.
    pub(crate) blocks: bool,
    /// Link counts, which a merge of layers raises; which names are one file is always compared.
    pub(crate) link_counts: bool,
}

/// A line for each path; the path of the tree itself is empty.
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
    let attributes = attributes(top);
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
            // Large files here are sparse: their holes need not be read.
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
        if let Some(attributes) = attributes.get(&path) {
            line.push_str(attributes);
        }
        lines.insert(path, line);
    }
    lines
}

/// Every extended attribute of every entry, as getfattr(1) prints them.
fn attributes(top: &Path) -> HashMap<PathBuf, String> {
    use std::os::unix::ffi::OsStringExt as _;
    let output = run(Command::new("getfattr")
        .args(["-R", "-h", "-d", "-m", "-", "-e", "hex", "."])
        .current_dir(top));
    let mut found = HashMap::new();
    for block in output.split("\n\n") {
        let mut lines = block.lines();
        let Some(name) = lines.next().and_then(|line| line.strip_prefix("# file: ")) else {
            continue;
        };
        let mut bytes = Vec::new();
        let mut rest = name.as_bytes();
        while let Some((&first, tail)) = rest.split_first() {
            if first == b'\\' {
                let digits = std::str::from_utf8(&tail[..3]).unwrap();
                bytes.push(u8::from_str_radix(digits, 8).unwrap());
                rest = &tail[3..];
            } else {
                bytes.push(first);
                rest = tail;
            }
        }
        let path = PathBuf::from(std::ffi::OsString::from_vec(bytes));
        let path = path.strip_prefix(".").unwrap_or(&path).to_owned();
        let mut lines: Vec<_> = lines
            // What an overlay writes into its layers is no part of the tree.
            .filter(|line| !line.starts_with("trusted.overlay."))
            .collect();
        lines.sort_unstable();
        found.insert(path, format!(" {}", lines.join(" ")));
    }
    found.retain(|_, line| line.len() > 1);
    found
}

/// Fails with the differing lines only.
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
