//! Owns the question whether a source is as it was, answered by nothing but names, inodes, sizes, modes and change times.
//!
//! Nobody can set a change time: content that was written and given its old time and size, too, is seen to have changed.

use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime};

use fs_err as fs;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Statx, StatxFlags, openat, statx};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use crate::profile::hex;
use crate::usage::queue::{Leave, Queue};

/// Changes closer to one another than this may have the same time, whatever the file system's clock.
const SETTLED: Duration = Duration::from_secs(2);
/// What of git's own directories says nothing of what is checked out, or changes when it is only read.
const GIT_OWN: [&[u8]; 7] = [
    b"objects",
    b"logs",
    b"lfs",
    b"rr-cache",
    b"FETCH_HEAD",
    b"ORIG_HEAD",
    b"COMMIT_EDITMSG",
];
/// One listing call returns this much.
const LISTING: usize = 64 * 1024;
const MOST_THREADS: usize = 8;
const WANTED: StatxFlags = StatxFlags::TYPE
    .union(StatxFlags::MODE)
    .union(StatxFlags::INO)
    .union(StatxFlags::SIZE)
    .union(StatxFlags::CTIME);

/// A fingerprint and what the source looked like when it was read.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Known {
    pub(super) stamp: String,
    pub(super) fingerprint: String,
}

/// What a source looks like.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    pub(super) digest: String,
    /// When the last change was, in seconds since 1970.
    newest: i64,
}

/// What one thread has seen: each directory with the digest of its entries, and the newest change.
#[derive(Debug, Default)]
struct Seen {
    directories: Vec<(PathBuf, [u8; 32])>,
    newest: i64,
    /// Something could not be looked at, or lies outside.
    failed: bool,
}

impl Stamp {
    /// Looks at everything below a directory; nothing where that cannot tell, as with a checkout whose git directory is elsewhere.
    pub(super) fn of(root: &Path) -> Option<Self> {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = threads.min(MOST_THREADS);
        let queue = Queue::new(vec![PathBuf::new()], threads);
        let all = Mutex::new(Seen::default());
        std::thread::scope(|scope| {
            for _ in 0..threads {
                scope.spawn(|| {
                    let _leave = Leave(&queue);
                    let mut seen = Seen::default();
                    let mut listing = Vec::with_capacity(LISTING);
                    while let Some(task) = queue.take() {
                        let mut stack = vec![task];
                        while let Some(directory) = stack.pop() {
                            seen.look(root, directory, &mut listing, &mut stack);
                            if stack.len() > 1 && queue.hungry() {
                                queue.give(stack.drain(..stack.len() / 2));
                            }
                        }
                    }
                    let mut all = all
                        .lock()
                        .unwrap_or_else(std::sync::PoisonError::into_inner);
                    all.directories.append(&mut seen.directories);
                    all.newest = all.newest.max(seen.newest);
                    all.failed |= seen.failed;
                });
            }
        });
        let mut seen = all
            .into_inner()
            .unwrap_or_else(std::sync::PoisonError::into_inner);
        if seen.failed {
            return None;
        }
        seen.directories.sort_unstable();
        let mut hash = Sha256::new();
        for (path, digest) in &seen.directories {
            hash.update(path.as_os_str().as_bytes());
            hash.update([0]);
            hash.update(digest);
        }
        Some(Self {
            digest: hex(&hash.finalize()),
            newest: seen.newest,
        })
    }

    /// Says whether its last change is so long ago that another one now would have another time.
    pub(super) fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let newest = Duration::from_secs(u64::try_from(self.newest).unwrap_or(0));
        now.is_ok_and(|now| now > newest + SETTLED)
    }
}

impl Seen {
    fn look(
        &mut self,
        root: &Path,
        directory: PathBuf,
        listing: &mut Vec<u8>,
        stack: &mut Vec<PathBuf>,
    ) {
        let Ok(mut entries) = read(&root.join(&directory), listing) else {
            self.failed = true;
            return;
        };
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let inside_git = directory
            .components()
            .any(|part| part.as_os_str() == ".git");
        let mut hash = Sha256::new();
        for (name, stat) in entries {
            if inside_git && (GIT_OWN.contains(&name.as_slice()) || name.ends_with(b".lock")) {
                continue;
            }
            let mode = u32::from(stat.stx_mode);
            hash.update(&name);
            hash.update([0]);
            hash.update(mode.to_le_bytes());
            hash.update(stat.stx_ino.to_le_bytes());
            let path = directory.join(std::ffi::OsStr::from_bytes(&name));
            if FileType::from_raw_mode(mode) == FileType::Directory {
                stack.push(path);
                continue;
            }
            self.newest = self.newest.max(stat.stx_ctime.tv_sec);
            hash.update(stat.stx_ctime.tv_sec.to_le_bytes());
            hash.update(stat.stx_ctime.tv_nsec.to_le_bytes());
            hash.update(stat.stx_size.to_le_bytes());
            // A submodule's, or that of a work tree whose repository is elsewhere.
            if name == b".git" && !leads_inside(root, &path) {
                self.failed = true;
            }
        }
        self.directories.push((directory, hash.finalize().into()));
    }
}

/// Returns the entries of a directory.
fn read(path: &Path, listing: &mut Vec<u8>) -> rustix::io::Result<Vec<(Vec<u8>, Statx)>> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let fd = openat(rustix::fs::CWD, path, flags, Mode::empty())?;
    let mut entries = Vec::new();
    let mut raw = RawDir::new(&fd, listing.spare_capacity_mut());
    while let Some(entry) = raw.next() {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_bytes() != b"." && name.to_bytes() != b".." {
            let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
            let stat = statx(&fd, name, flags, WANTED)?;
            entries.push((name.to_bytes().to_owned(), stat));
        }
    }
    Ok(entries)
}

/// Says whether a file `.git` names a directory below `root`.
fn leads_inside(root: &Path, file: &Path) -> bool {
    let file = root.join(file);
    let target = || {
        let text = fs::read_to_string(&file).ok()?;
        let named = text.strip_prefix("gitdir: ")?.trim_end();
        fs::canonicalize(file.parent()?.join(named)).ok()
    };
    let root = fs::canonicalize(root);
    target().is_some_and(|target| root.is_ok_and(|root| target.starts_with(root)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::Git;
    use super::super::tests::{me, repository};
    use super::*;

    /// Sets a file's time of modification, as `touch` and `cp -p` do.
    fn set_modified(path: &Path, time: SystemTime) {
        let file = fs::OpenOptions::new().write(true).open(path).unwrap();
        file.file().set_modified(time).unwrap();
    }

    /// Makes every kind of edit, one after the other, and compares what is remembered with what is there.
    fn edit(source: &Path, git: &Git<'_>) {
        let cache = tempfile::tempdir().unwrap();
        let known = cache.path().join("known/source.json");
        for (name, text) in [
            ("kept", "one"),
            ("gone", "two"),
            ("moved", "same"),
            ("other", "same"),
        ] {
            fs::write(source.join(name), text).unwrap();
        }
        fs::create_dir(source.join("below")).unwrap();
        fs::write(source.join("below/deep"), "deep").unwrap();
        std::os::unix::fs::symlink("kept", source.join("link")).unwrap();
        while !Stamp::of(source).unwrap().is_settled() {
            // Too young to be remembered, and not remembered.
            git.remembered_fingerprint(source, &known).unwrap();
            assert!(!known.exists() || Stamp::of(source).unwrap().is_settled());
            std::thread::sleep(Duration::from_millis(100));
        }
        let before = git.remembered_fingerprint(source, &known).unwrap();
        assert!(known.exists());
        assert_eq!(before, git.fingerprint(source).unwrap());
        // It is what answers: another answer in it is believed, as long as nothing was touched.
        let mut planted: Known = serde_json::from_slice(&fs::read(&known).unwrap()).unwrap();
        "planted".clone_into(&mut planted.fingerprint);
        fs::write(&known, serde_json::to_vec(&planted).unwrap()).unwrap();
        for read in [Git::known_fingerprint, Git::remembered_fingerprint] {
            assert_eq!(read(git, source, &known).unwrap(), "planted");
        }
        let mut last = before;
        let mut after = |what: &str, edit: &dyn Fn()| {
            edit();
            let found = git.known_fingerprint(source, &known).unwrap();
            assert_eq!(found, git.fingerprint(source).unwrap(), "{what}");
            assert_ne!(found, last, "{what}");
            last = found;
        };
        let at = |name: &str| source.join(name);
        after("same size, and its old time of modification", &|| {
            let time = fs::metadata(at("kept")).unwrap().modified().unwrap();
            fs::write(at("kept"), "six").unwrap();
            set_modified(&at("kept"), time);
            assert_eq!(fs::metadata(at("kept")).unwrap().modified().unwrap(), time);
        });
        after("deep below", &|| {
            fs::write(at("below/deep"), "deer").unwrap();
        });
        after("a rename", &|| {
            fs::rename(at("moved"), at("moved away")).unwrap();
        });
        after("one put over another", &|| {
            fs::write(at("new"), "not the same").unwrap();
            fs::rename(at("new"), at("other")).unwrap();
        });
        after("a deletion", &|| fs::remove_file(at("gone")).unwrap());
        after("a new file", &|| fs::write(at("below/new"), "").unwrap());
        after("a mode", &|| {
            fs::set_permissions(at("kept"), std::fs::Permissions::from_mode(0o755)).unwrap();
        });
        after("a link's target", &|| {
            fs::remove_file(at("link")).unwrap();
            std::os::unix::fs::symlink("other", at("link")).unwrap();
        });
        after("a file in place of a directory", &|| {
            fs::remove_dir_all(at("below")).unwrap();
            fs::write(at("below"), "x").unwrap();
        });
    }

    #[test]
    fn a_directory_that_was_edited_is_not_the_one_remembered() {
        let source = tempfile::tempdir().unwrap();
        edit(source.path(), &Git::new(&me()));
    }

    #[test]
    fn a_checkout_that_was_edited_is_not_the_one_remembered() {
        let source = repository();
        edit(source.path(), &Git::new(&me()));
    }

    #[test]
    fn a_commit_and_what_is_staged_count_and_reading_does_not() {
        let (source, me) = (repository(), me());
        let (path, git) = (source.path(), Git::new(&me));
        let stamp = Stamp::of(path);
        git.fingerprint(path).unwrap();
        assert_eq!(Stamp::of(path), stamp);
        let user = ["-c", "user.name=t", "-c", "user.email=t@example.org"];
        let commit = ["commit", "--quiet", "--allow-empty", "-m", "next"];
        git.run(path, &[&user[..], &commit].concat()).unwrap();
        let next = Stamp::of(path);
        assert_ne!(next, stamp);
        git.run(path, &["rm", "--quiet", "--cached", "a"]).unwrap();
        assert_ne!(Stamp::of(path), next);
    }

    #[test]
    fn a_work_tree_of_a_repository_elsewhere_is_never_remembered() {
        let (source, me) = (repository(), me());
        let git = Git::new(&me);
        let elsewhere = tempfile::tempdir().unwrap();
        let tree = elsewhere.path().join("tree");
        let add = [
            "worktree",
            "add",
            "--quiet",
            "--detach",
            tree.to_str().unwrap(),
        ];
        git.run(source.path(), &add).unwrap();
        assert_eq!(Stamp::of(&tree), None);
        let known = elsewhere.path().join("known");
        git.remembered_fingerprint(&tree, &known).unwrap();
        assert!(!known.exists());
    }
}
