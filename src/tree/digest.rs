//! Owns the digest of a tree: one SHA-256 over everything that distinguishes two root file systems, and the list of
//! paths where they differ.
//!
//! Included: type, mode, owner, modification time in ns, size, content, link target, device number, content
//! attributes (see `xattr`), and which names are hard links to one file. Excluded: inode numbers, allocation, access
//! and change times, directory sizes, because they depend on the file system or on reads.

mod content;

use std::collections::HashMap;
use std::ffi::OsStr;
use std::fmt;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use nix::sys::stat::{FileStat, SFlag};
use sha2::{Digest as _, Sha256};

use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::signals::stop_if;
use crate::tree::root_fs::{self, Tree};
use crate::tree::work_queue::Queue;
use crate::tree::xattr::{Pairs, XattrFile};
use content::{BLOCK, hash};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Summary {
    /// SHA-256, hexadecimal.
    pub digest: String,
    /// Number of files and directories, including the root.
    pub entries: u64,
    /// Sum of file sizes; a file with several names counts once.
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Relative to the trees' roots.
    pub path: PathBuf,
    /// The difference, as a phrase: `mode 0644, 0755`.
    pub what: String,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path.display(), self.what)
    }
}

/// Computes the digest of the tree at `root`; `cancel` stops it.
pub fn digest(root: &Path, cancel: &AtomicBool) -> Result<Summary> {
    let nodes = scan(root, cancel)?;
    let mut sha = Sha256::new();
    let mut bytes = 0;
    for node in &nodes {
        if let What::File { size, .. } = node.what {
            bytes += size;
        }
        sha.update(node.record());
    }
    Ok(Summary {
        digest: hex::encode(sha.finalize()),
        entries: nodes.len() as u64,
        bytes,
    })
}

pub(crate) struct Comparing<'a> {
    pub limit: usize,
    pub times: bool,
    /// Selects paths to ignore, relative to the root; the root's own path is empty.
    pub except: &'a (dyn Fn(&Path) -> bool + Sync),
    pub names: [&'a str; 2],
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    pub first: Vec<Difference>,
    pub count: usize,
}

/// Returns the first `limit` paths in which two trees differ, in order.
pub fn compare(a: &Path, b: &Path, limit: usize, cancel: &AtomicBool) -> Result<Vec<Difference>> {
    let exactly = Comparing {
        limit,
        times: true,
        except: &|_| false,
        names: ["the first", "the second"],
    };
    Ok(compare_as(a, b, &exactly, cancel)?.first)
}

/// Returns the paths in which two trees differ, by the given rules.
pub(crate) fn compare_as(
    a: &Path,
    b: &Path,
    how: &Comparing<'_>,
    cancel: &AtomicBool,
) -> Result<Differences> {
    let (left, right) = (scan(a, cancel)?, scan(b, cancel)?);
    let (mut left, mut right) = (left.iter().peekable(), right.iter().peekable());
    let mut found = Differences::default();
    loop {
        let order = match (left.peek(), right.peek()) {
            (None, None) => break,
            (Some(_), None) => std::cmp::Ordering::Less,
            (None, Some(_)) => std::cmp::Ordering::Greater,
            (Some(a), Some(b)) => a.path.cmp(&b.path),
        };
        let one = if order.is_le() { left.next() } else { None };
        let other = if order.is_ge() { right.next() } else { None };
        let (path, what) = match (one, other) {
            (Some(one), Some(other)) => match one.differs(other, how.times) {
                Some(what) => (&one.path, what),
                None => continue,
            },
            (Some(one), None) => (&one.path, format!("only in {}", how.names[0])),
            (None, Some(other)) => (&other.path, format!("only in {}", how.names[1])),
            (None, None) => break,
        };
        let mut path = PathBuf::from(std::ffi::OsString::from_vec(path.clone()));
        if (how.except)(&path) {
            continue;
        }
        found.count += 1;
        if found.first.len() < how.limit {
            if path.as_os_str().is_empty() {
                path.push(".");
            }
            found.first.push(Difference { path, what });
        }
    }
    Ok(found)
}

#[derive(Debug, PartialEq, Eq)]
enum What {
    File {
        size: u64,
        sha256: [u8; 32],
    },
    /// Another name of the file that has this earlier path.
    SameAs(Vec<u8>),
    Directory,
    Symlink(Vec<u8>),
    /// Character and block devices with their number; FIFOs and sockets with none.
    Special(u32, u64),
}

#[derive(Debug)]
struct Node {
    path: Vec<u8>,
    mode: u32,
    owner: (u32, u32),
    mtime: (i64, i64),
    xattrs: Pairs,
    what: What,
}

impl Node {
    /// Returns the canonical form, in which a length precedes every variable part.
    fn record(&self) -> Vec<u8> {
        fn text(out: &mut Vec<u8>, bytes: &[u8]) {
            out.extend_from_slice(&(bytes.len() as u64).to_le_bytes());
            out.extend_from_slice(bytes);
        }
        let mut out = Vec::with_capacity(128 + self.path.len());
        text(&mut out, &self.path);
        for number in [self.mode, self.owner.0, self.owner.1] {
            out.extend_from_slice(&number.to_le_bytes());
        }
        out.extend_from_slice(&self.mtime.0.to_le_bytes());
        out.extend_from_slice(&self.mtime.1.to_le_bytes());
        match &self.what {
            What::File { size, sha256 } => {
                out.push(b'f');
                out.extend_from_slice(&size.to_le_bytes());
                out.extend_from_slice(sha256);
            }
            What::SameAs(path) => {
                out.push(b'h');
                text(&mut out, path);
            }
            What::Directory => out.push(b'd'),
            What::Symlink(target) => {
                out.push(b'l');
                text(&mut out, target);
            }
            What::Special(kind, device) => {
                out.push(b's');
                out.extend_from_slice(&kind.to_le_bytes());
                out.extend_from_slice(&device.to_le_bytes());
            }
        }
        out.extend_from_slice(&(self.xattrs.len() as u64).to_le_bytes());
        for (name, value) in &self.xattrs {
            text(&mut out, name);
            text(&mut out, value);
        }
        out
    }

    fn differs(&self, other: &Self, times: bool) -> Option<String> {
        let kind = |what: &What| match what {
            What::File { .. } => "file",
            What::SameAs(_) => "another name of an earlier file",
            What::Directory => "directory",
            What::Symlink(_) => "symbolic link",
            What::Special(..) => "special file",
        };
        let mut all = Vec::new();
        match (&self.what, &other.what) {
            (a, b) if std::mem::discriminant(a) != std::mem::discriminant(b) => {
                all.push(format!("{}, {}", kind(a), kind(b)));
            }
            (What::File { size: a, .. }, What::File { size: b, .. }) if a != b => {
                all.push(format!("size {a}, {b}"));
            }
            (What::Symlink(a), What::Symlink(b)) | (What::SameAs(a), What::SameAs(b)) if a != b => {
                all.push(format!(
                    "links to `{}`, `{}`",
                    String::from_utf8_lossy(a),
                    String::from_utf8_lossy(b)
                ));
            }
            (What::Special(..), What::Special(..)) if self.what != other.what => {
                all.push("type or device number".into());
            }
            (a, b) if a != b => all.push("content".into()),
            _ => {}
        }
        if self.mode != other.mode {
            all.push(format!("mode {:04o}, {:04o}", self.mode, other.mode));
        }
        if self.owner != other.owner {
            let ((a, b), (c, d)) = (self.owner, other.owner);
            all.push(format!("owner {a}:{b}, {c}:{d}"));
        }
        if times && self.mtime != other.mtime {
            let ((a, b), (c, d)) = (self.mtime, other.mtime);
            all.push(format!("mtime {a}.{b:09}, {c}.{d:09}"));
        }
        if self.xattrs != other.xattrs {
            all.push("extended attributes".into());
        }
        (!all.is_empty()).then(|| all.join("; "))
    }
}

fn scan(root: &Path, cancel: &AtomicBool) -> Result<Vec<Node>> {
    let tree = Tree::open(root)?;
    let stat = nix::sys::stat::fstat(tree.fd())?;
    let xattrs = XattrFile::Open(tree.fd()).content()?;
    let mut walk = Walk {
        nodes: vec![node(Vec::new(), &stat, What::Directory, xattrs)],
        seen: HashMap::new(),
        cancel,
    };
    walk.all(&tree)
        .context(|| format!("cannot read the tree `{}`", root.display()))?;
    let Walk {
        mut nodes, seen, ..
    } = walk;
    nodes.sort_unstable_by(|a, b| a.path.cmp(&b.path));
    name_links(&mut nodes, seen);
    hash_all(&tree, &mut nodes, cancel)?;
    Ok(nodes)
}

struct Walk<'a> {
    nodes: Vec<Node>,
    /// The names of each file with more than one.
    seen: HashMap<(u64, u64), Vec<Vec<u8>>>,
    cancel: &'a AtomicBool,
}

impl Walk<'_> {
    /// Reads all directories; opens each only when its turn comes, so depth is not limited by descriptors.
    fn all(&mut self, tree: &Tree) -> Result<()> {
        let mut left = vec![Vec::new()];
        while let Some(path) = left.pop() {
            let directory = beneath::open_below(tree.fd(), Path::new(OsStr::from_bytes(&path)))
                .context(|| format!("cannot read `{}`", String::from_utf8_lossy(&path)))?;
            stop_if(self.cancel)?;
            for name in root_fs::names(&directory)? {
                let node = self.entry(&directory, &name, root_fs::join(&path, &name))?;
                if node.what == What::Directory {
                    left.push(node.path.clone());
                }
                self.nodes.push(node);
            }
        }
        Ok(())
    }

    fn entry(&mut self, directory: &OwnedFd, name: &[u8], path: Vec<u8>) -> Result<Node> {
        let fail = || format!("cannot read `{}`", String::from_utf8_lossy(&path));
        let stat = beneath::stat(directory, name).context(fail)?;
        let kind = beneath::kind(&stat);
        let what = match kind {
            SFlag::S_IFDIR => What::Directory,
            SFlag::S_IFREG => What::File {
                size: u64::try_from(stat.st_size).unwrap_or(0),
                sha256: [0; 32],
            },
            SFlag::S_IFLNK => {
                let target = nix::fcntl::readlinkat(directory, name).context(fail)?;
                What::Symlink(target.into_vec())
            }
            SFlag::S_IFCHR | SFlag::S_IFBLK => What::Special(kind.bits(), stat.st_rdev),
            _ => What::Special(kind.bits(), 0),
        };
        if stat.st_nlink > 1 && kind != SFlag::S_IFDIR {
            self.seen
                .entry((stat.st_dev, stat.st_ino))
                .or_default()
                .push(path.clone());
        }
        let place = XattrFile::Entry(directory.as_fd(), name);
        let xattrs = place.content().context(fail)?;
        Ok(node(path, &stat, what, xattrs))
    }
}

fn node(path: Vec<u8>, stat: &FileStat, what: What, xattrs: Pairs) -> Node {
    // A symbolic link's mode has no meaning.
    let mode = if matches!(what, What::Symlink(_)) {
        0o777
    } else {
        stat.st_mode & 0o7777
    };
    Node {
        path,
        mode,
        owner: (stat.st_uid, stat.st_gid),
        mtime: (stat.st_mtime, stat.st_mtime_nsec),
        xattrs,
        what,
    }
}

/// Marks every name of a file except the first, in order, as another name of it.
fn name_links(nodes: &mut [Node], seen: HashMap<(u64, u64), Vec<Vec<u8>>>) {
    for mut names in seen.into_values() {
        names.sort_unstable();
        let Some((first, others)) = names.split_first() else {
            continue;
        };
        for other in others {
            if let Ok(at) = nodes.binary_search_by(|node| node.path.cmp(other)) {
                nodes[at].what = What::SameAs(first.clone());
            }
        }
    }
}

/// Hashes the files' content in two threads: machines that build images have at least two cores.
fn hash_all(tree: &Tree, nodes: &mut [Node], cancel: &AtomicBool) -> Result<()> {
    let (queue, mut done) = (Queue::new(), Vec::new());
    let shared: &[Node] = nodes;
    let is_file = |at: &usize| matches!(shared[*at].what, What::File { size: 1.., .. });
    // The queue hands out the last one first.
    queue.push((0..shared.len()).rev().filter(is_file));
    let start = || (vec![0; BLOCK], Vec::new());
    let work = |at: usize, (buffer, done): &mut (Vec<u8>, Vec<(usize, [u8; 32])>)| {
        let path = &shared[at].path;
        let sha256 = hash(tree.fd(), path, buffer, cancel)
            .context(|| format!("cannot read `{}`", String::from_utf8_lossy(path)));
        match sha256 {
            Ok(sha256) => done.push((at, sha256)),
            Err(error) => queue.abort(error),
        }
    };
    queue.run_on(2, start, work, |(_, part)| done.extend(part));
    queue.into_result()?;
    for (at, digest) in done {
        if let What::File { sha256, .. } = &mut nodes[at].what {
            *sha256 = digest;
        }
    }
    // Empty files all have the same digest and need no read.
    let empty: [u8; 32] = Sha256::digest(b"").into();
    for node in nodes {
        if let What::File { size: 0, sha256 } = &mut node.what {
            *sha256 = empty;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use nix::fcntl::AT_FDCWD;
    use nix::sys::stat::{UtimensatFlags, utimensat};
    use nix::sys::time::TimeSpec;

    use super::*;

    fn tree(change: impl FnOnce(&Path)) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        fs_err::create_dir(root.join("a")).unwrap();
        write(root, "a/file", "text");
        write(root, "a-b", "x");
        fs_err::hard_link(root.join("a/file"), root.join("z")).unwrap();
        symlink("file", root.join("a/link")).unwrap();
        change(root);
        still(root);
        dir
    }

    fn write(root: &Path, name: &str, text: &str) {
        fs_err::write(root.join(name), text).unwrap();
    }

    fn remove(root: &Path, name: &str) {
        fs_err::remove_file(root.join(name)).unwrap();
    }

    fn still(path: &Path) {
        if path.is_dir() && !path.is_symlink() {
            for entry in fs_err::read_dir(path).unwrap() {
                still(&entry.unwrap().path());
            }
        }
        set_time(path, 5);
    }

    fn set_time(path: &Path, nanoseconds: i64) {
        let time = TimeSpec::new(1_000_000, nanoseconds);
        let follow = UtimensatFlags::NoFollowSymlink;
        utimensat(AT_FDCWD, path, &time, &time, follow).unwrap();
    }

    fn of(dir: &tempfile::TempDir) -> String {
        digest(dir.path(), &AtomicBool::new(false)).unwrap().digest
    }

    fn differences(a: &tempfile::TempDir, b: &tempfile::TempDir) -> Vec<String> {
        let found = compare(a.path(), b.path(), 9, &AtomicBool::new(false)).unwrap();
        found.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn equal_trees_have_equal_digests() {
        let (a, b) = (tree(|_| {}), tree(|_| {}));
        assert_eq!(of(&a), of(&b));
        assert!(differences(&a, &b).is_empty());
        let summary = digest(a.path(), &AtomicBool::new(false)).unwrap();
        assert_eq!((summary.entries, summary.bytes), (6, 5));
    }

    #[test]
    fn every_change_shows_and_is_named() {
        type Change = fn(&Path);
        let changes: [(Change, &str); 7] = [
            (|root| write(root, "a/file", "TEXT"), "a/file: content"),
            (|root| write(root, "a-b", "xy"), "a-b: size 1, 2"),
            (|root| write(root, "new", ""), "new: only in the second"),
            (|root| remove(root, "a-b"), "a-b: only in the first"),
            (
                |root| {
                    let mode = std::fs::Permissions::from_mode(0o4755);
                    fs_err::set_permissions(root.join("a-b"), mode).unwrap();
                },
                "a-b: mode 0644, 4755",
            ),
            (
                |root| {
                    remove(root, "z");
                    write(root, "z", "text");
                },
                "z: another name of an earlier file, file",
            ),
            (
                |root| {
                    remove(root, "a/link");
                    symlink("other", root.join("a/link")).unwrap();
                },
                "a/link: links to `file`, `other`",
            ),
        ];
        let plain = tree(|_| {});
        for (change, expected) in changes {
            let changed = tree(change);
            assert_ne!(of(&plain), of(&changed), "{expected}");
            assert_eq!(differences(&plain, &changed), [expected]);
        }
    }

    #[test]
    fn a_time_is_compared_to_the_nanosecond() {
        let (a, b) = (tree(|_| {}), tree(|_| {}));
        set_time(&b.path().join("a-b"), 6);
        let expected = ["a-b: mtime 1000000.000000005, 1000000.000000006"];
        assert_eq!(differences(&a, &b), expected);
    }

    #[test]
    fn cancel_stops() {
        let dir = tree(|_| {});
        assert!(digest(dir.path(), &AtomicBool::new(true)).is_err());
    }
}
