//! Owns checking whether a source is unchanged, by names, inodes, sizes, modes and change times only.
//!
//! No process can set a change time, so content that was rewritten with its old time and size is detected too. A
//! directory with an unchanged change time has the same names: the check queries its files by name, without listing
//! or sorting.

use std::ffi::{CStr, OsStr};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime};

use fs_err as fs;
use rustix::fs::{AtFlags, FileType, Mode, OFlags, RawDir, Statx, StatxFlags, openat, statx};
use sha2::{Digest as _, Sha256};

use super::checkout::small_file;
use crate::sys::atomic;
use crate::sys::error::Result;
use crate::tree::work_queue::Queue;

/// Changes closer together than this may get the same time, whatever the granularity of the file system's clock.
const SETTLED: Duration = Duration::from_secs(2);
/// Entries of git directories that do not affect the checkout, or that change when git only reads.
const GIT_OWN: [&[u8]; 8] = [
    b"hooks",
    b"objects",
    b"logs",
    b"lfs",
    b"rr-cache",
    b"FETCH_HEAD",
    b"ORIG_HEAD",
    b"COMMIT_EDITMSG",
];
/// Beginning of the names of shared parts of an index. The name has the digest of the content, and is in the index.
/// git sets the file's time whenever it reads it.
const SHARED_INDEX: &[u8] = b"sharedindex.";
/// Location of the git directories of submodules.
const MODULES: &[u8] = b".git/modules/";
/// Buffer size of one listing call.
const LISTING: usize = 64 * 1024;
const MOST_THREADS: usize = 8;
/// Number of directories that a thread takes at a time.
const SHARE: usize = 16;
const WANTED: StatxFlags = StatxFlags::TYPE
    .union(StatxFlags::MODE)
    .union(StatxFlags::INO)
    .union(StatxFlags::SIZE)
    .union(StatxFlags::CTIME);
/// Asks the server of a network file system. The kernel's cache is up to a minute old, and lacks edits from another
/// machine, which a step would see: it gets the new content when it opens the file.
const FRESH: AtFlags = AtFlags::STATX_FORCE_SYNC;
const DIRECTORY: OFlags = OFlags::DIRECTORY
    .union(OFlags::NOFOLLOW)
    .union(OFlags::CLOEXEC);
/// Header of the file that caches a fingerprint, with the version of the file's format and of fingerprints. Versions up
/// to 3 covered fewer changes, version 4 covered all permissions, and version 5 missed changes behind links in git
/// directories.
const MAGIC: &[u8] = b"rockenv source 6\n";

/// Recorded state of a source: a sequence of records, one for each directory.
///
/// ```text
/// length of what follows, 4 bytes; change time, 12; digest of its files' inodes, sizes, modes and change times, 32;
/// inode, 8; mode, 4;
/// path below the source, files' names, an empty name, directories' names: each with a zero at its end
/// ```
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Stamp {
    records: Vec<u8>,
    /// Time of the last change, in seconds since 1970.
    newest: i64,
}

/// Findings of one thread: a record of each directory, and the newest change.
#[derive(Debug, Default)]
struct Seen {
    records: Vec<Vec<u8>>,
    newest: i64,
    /// An entry could not be examined, or leads outside the source.
    failed: bool,
}

/// The recorded state of a directory.
#[derive(Debug)]
struct Record<'a> {
    /// When an entry was last added or removed.
    changed: &'a [u8],
    /// All fields after `changed`.
    rest: &'a [u8],
    digest: &'a [u8],
    /// Inode and mode.
    own: &'a [u8],
    path: &'a CStr,
    /// Files' names, and after an empty one, those of directories.
    names: &'a [u8],
}

impl Stamp {
    /// Examines everything below a directory. Returns `None` if that proves nothing, as for a checkout whose git
    /// directory is elsewhere.
    pub(super) fn of(root: &Path) -> Option<Self> {
        let top = open(root)?;
        let queue = Queue::new();
        queue.push([b".\0".to_vec()]);
        let mut all = Seen::default();
        queue.run_on(
            threads(),
            || (Seen::default(), Vec::with_capacity(LISTING)),
            |task, (seen, listing)| {
                let mut stack = vec![task];
                while let Some(path) = stack.pop() {
                    let looked = seen.scan_directory(root, &top, &path, listing, &mut stack);
                    seen.failed |= looked.is_none();
                    if stack.len() > 1 && queue.has_idle_thread() {
                        queue.push(stack.drain(..stack.len() / 2));
                    }
                }
            },
            |(mut seen, _)| {
                all.records.append(&mut seen.records);
                all.newest = all.newest.max(seen.newest);
                all.failed |= seen.failed;
            },
        );
        (!all.failed).then(|| Self {
            records: all.records.concat(),
            newest: all.newest,
        })
    }

    /// Returns whether the last change is old enough that a new change would get another time.
    pub(super) fn is_settled(&self) -> bool {
        let now = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
        let newest = Duration::from_secs(u64::try_from(self.newest).unwrap_or(0));
        now.is_ok_and(|now| now > newest + SETTLED)
    }

    /// Returns whether everything below a directory still matches the stamp.
    pub(super) fn holds(&self, root: &Path) -> bool {
        holds(&self.records, root)
    }

    /// Writes the stamp to a file, with the source's fingerprint.
    pub(super) fn remember(&self, file: &Path, fingerprint: &str) -> Result<()> {
        if let Some(parent) = file.parent() {
            fs::create_dir_all(parent)?;
        }
        let length = self.records.len().to_le_bytes();
        let parts = [MAGIC, fingerprint.as_bytes(), b"\0", &length, &self.records];
        atomic::write(file, &parts.concat())
    }
}

/// Returns the fingerprint from a file, if everything below a directory still matches the stamp there.
pub(super) fn recall(file: &Path, root: &Path) -> Option<String> {
    let bytes = fs::read(file).ok()?;
    let after = bytes.strip_prefix(MAGIC)?;
    let fingerprint = CStr::from_bytes_until_nul(after).ok()?.to_str().ok()?;
    let (length, records) = after.get(fingerprint.len() + 1..)?.split_first_chunk()?;
    if records.len() != usize::from_le_bytes(*length) {
        return None;
    }
    holds(records, root).then(|| fingerprint.to_owned())
}

/// Returns whether all directories match their records. A new directory needs no record: it is a new name in a
/// recorded one.
fn holds(records: &[u8], root: &Path) -> bool {
    let (Some(records), Some(top)) = (split(records), open(root)) else {
        return false;
    };
    let (queue, changed) = (Queue::new(), AtomicBool::new(false));
    queue.push(records.chunks(SHARE));
    let look = |share: &[&[u8]], (): &mut ()| {
        let holds = |record: &&[u8]| {
            let record = Record::read(record);
            record.and_then(|record| record.holds(root, &top)) == Some(true)
        };
        if !changed.load(Ordering::Relaxed) && !share.iter().all(holds) {
            changed.store(true, Ordering::Relaxed);
        }
    };
    let most = records.len().div_ceil(SHARE);
    queue.run_on(threads().min(most), || (), look, drop);
    !changed.into_inner() && !records.is_empty()
}

/// Returns the records; `None` if one is cut short.
fn split(mut bytes: &[u8]) -> Option<Vec<&[u8]>> {
    let mut records = Vec::new();
    while !bytes.is_empty() {
        let (length, rest) = bytes.split_first_chunk()?;
        let (record, rest) = rest.split_at_checked(u32::from_le_bytes(*length).try_into().ok()?)?;
        records.push(record);
        bytes = rest;
    }
    Some(records)
}

impl<'a> Record<'a> {
    fn read(bytes: &'a [u8]) -> Option<Self> {
        let (changed, rest) = bytes.split_at_checked(12)?;
        let (digest, after) = rest.split_at_checked(32)?;
        let (own, after) = after.split_at_checked(12)?;
        let path = CStr::from_bytes_until_nul(after).ok()?;
        Some(Self {
            changed,
            rest,
            digest,
            own,
            path,
            names: after.get(path.count_bytes() + 1..)?,
        })
    }

    /// Returns whether the directory is unchanged; `None` if that could not be determined.
    fn holds(&self, root: &Path, top: &OwnedFd) -> Option<bool> {
        let fd = openat(top, self.path, DIRECTORY | OFlags::PATH, Mode::empty()).ok()?;
        let stat = statx(&fd, c"", AtFlags::EMPTY_PATH | FRESH, WANTED).ok()?;
        if own(&stat) != self.own {
            return Some(false);
        }
        if changed(&stat) != self.changed {
            // An entry was added or removed. It may be one that does not count, or the names may be the same again.
            let mut seen = Seen::default();
            let mut listing = Vec::with_capacity(LISTING);
            seen.scan_directory(
                root,
                top,
                self.path.to_bytes_with_nul(),
                &mut listing,
                &mut Vec::new(),
            )?;
            let now = seen.records.first()?;
            return Some(!seen.failed && now.get(4 + 12..)? == self.rest);
        }
        let mut hash = Sha256::new();
        let mut names = self.names;
        loop {
            let name = CStr::from_bytes_until_nul(names).ok()?;
            if name.is_empty() {
                return Some(hash.finalize().as_slice() == self.digest);
            }
            names = names.get(name.count_bytes() + 1..)?;
            hash.update(looks(&entry(&fd, name).ok()?));
        }
    }
}

impl Seen {
    /// Examines the files of a directory, and pushes its subdirectories onto the stack.
    fn scan_directory(
        &mut self,
        root: &Path,
        top: &OwnedFd,
        path: &[u8],
        listing: &mut Vec<u8>,
        stack: &mut Vec<Vec<u8>>,
    ) -> Option<()> {
        let at = CStr::from_bytes_with_nul(path).ok()?;
        let fd = openat(top, at, DIRECTORY, Mode::empty()).ok()?;
        let directory = statx(&fd, c"", AtFlags::EMPTY_PATH | FRESH, WANTED).ok()?;
        let mut entries = list(&fd, listing).ok()?;
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        let path = at.to_bytes();
        let inside_git = path.split(|byte| *byte == b'/').any(|part| part == b".git");
        let is_git_directory = inside_git && is_git_directory(path, &entries);
        let mut hash = Sha256::new();
        let (mut files, mut directories) = (Vec::new(), Vec::new());
        self.newest = self.newest.max(directory.stx_ctime.tv_sec);
        for (name, stat) in entries {
            let plain = name.strip_suffix(b"\0")?;
            let kind = FileType::from_raw_mode(u32::from(stat.stx_mode));
            let is_directory = kind == FileType::Directory;
            let is_lock = inside_git && !is_directory && plain.ends_with(b".lock");
            let is_own = GIT_OWN.contains(&plain) || plain.starts_with(SHARED_INDEX);
            if is_lock || is_git_directory && is_own {
                continue;
            }
            if is_directory {
                directories.extend_from_slice(&name);
                stack.push(match path {
                    b"." => name,
                    _ => [path, b"/", &name].concat(),
                });
                continue;
            }
            self.newest = self.newest.max(stat.stx_ctime.tv_sec);
            hash.update(looks(&stat));
            files.extend_from_slice(&name);
            // A submodule has a `.git` file, and so has a work tree whose repository is elsewhere. Other programs link
            // parts of one git directory to another.
            let leads = plain == b".git" || inside_git && kind == FileType::Symlink;
            if leads && !leads_inside(root, path, plain) {
                self.failed = true;
            }
        }
        let digest = hash.finalize();
        let (changed, own) = (changed(&directory), own(&directory));
        let parts: [&[u8]; 7] = [
            &changed,
            &digest,
            &own,
            at.to_bytes_with_nul(),
            &files,
            b"\0",
            &directories,
        ];
        let length = parts.iter().map(|part| part.len()).sum::<usize>();
        let length = u32::try_from(length).ok()?.to_le_bytes();
        self.records.push([&length[..], &parts.concat()].concat());
        Some(())
    }
}

/// Returns whether a directory at or below `.git` is a git directory itself. The other directories there contain
/// names of branches and submodules.
fn is_git_directory(path: &[u8], entries: &[(Vec<u8>, Statx)]) -> bool {
    let has = |wanted: &[u8]| entries.iter().any(|(name, _)| name == wanted);
    let is_module = || path.windows(MODULES.len()).any(|part| part == MODULES);
    path == b".git"
        || path.ends_with(b"/.git")
        || is_module()
            && [&b"HEAD\0"[..], b"config\0", b"objects\0", b"refs\0"]
                .into_iter()
                .all(has)
}

fn threads() -> usize {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    threads.min(MOST_THREADS)
}

fn open(root: &Path) -> Option<OwnedFd> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    openat(rustix::fs::CWD, root, flags, Mode::empty()).ok()
}

/// Returns the entries of a directory, with NUL-terminated names.
fn list(fd: &OwnedFd, listing: &mut Vec<u8>) -> rustix::io::Result<Vec<(Vec<u8>, Statx)>> {
    let mut entries = Vec::new();
    let mut raw = RawDir::new(fd, listing.spare_capacity_mut());
    while let Some(found) = raw.next() {
        let found = found?;
        let name = found.file_name();
        if name != c"." && name != c".." {
            entries.push((name.to_bytes_with_nul().to_owned(), entry(fd, name)?));
        }
    }
    Ok(entries)
}

fn entry(fd: impl AsFd, name: &CStr) -> rustix::io::Result<Statx> {
    let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT | FRESH;
    statx(fd, name, flags, WANTED)
}

/// Returns the metadata of a file that reveals a change.
fn looks(stat: &Statx) -> [u8; 32] {
    let mut bytes = [0; 32];
    bytes[..12].copy_from_slice(&own(stat));
    bytes[12..24].copy_from_slice(&changed(stat));
    bytes[24..].copy_from_slice(&stat.stx_size.to_le_bytes());
    bytes
}

fn own(stat: &Statx) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&stat.stx_ino.to_le_bytes());
    bytes[8..].copy_from_slice(&u32::from(stat.stx_mode).to_le_bytes());
    bytes
}

fn changed(stat: &Statx) -> [u8; 12] {
    let mut bytes = [0; 12];
    bytes[..8].copy_from_slice(&stat.stx_ctime.tv_sec.to_le_bytes());
    bytes[8..].copy_from_slice(&stat.stx_ctime.tv_nsec.to_le_bytes());
    bytes
}

/// Returns whether the `.git` file of a directory, or a link in it, points below `root`.
fn leads_inside(root: &Path, directory: &[u8], name: &[u8]) -> bool {
    let directory = root.join(OsStr::from_bytes(directory));
    let path = directory.join(OsStr::from_bytes(name));
    let target = || {
        if name != b".git" {
            return fs::canonicalize(&path).ok();
        }
        let text = small_file(&path).ok()??;
        let named = text.strip_prefix("gitdir: ")?.trim_end();
        fs::canonicalize(directory.join(named)).ok()
    };
    let root = fs::canonicalize(root);
    target().is_some_and(|target| root.is_ok_and(|root| target.starts_with(root)))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::super::Git;
    use super::super::tests::{add_submodule, me, repository, run, set_modified};
    use super::*;

    /// Makes every kind of edit, one after the other, and compares cached fingerprints with actual ones.
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
            // The source is too young to be cached.
            git.remembered_fingerprint(source, &known).unwrap();
            assert!(!known.exists() || Stamp::of(source).unwrap().is_settled());
            std::thread::sleep(Duration::from_millis(100));
        }
        let before = git.remembered_fingerprint(source, &known).unwrap();
        assert!(known.exists());
        assert_eq!(before, git.fingerprint(source).unwrap());
        // A forged cache entry shows that the cache is used while nothing changes.
        let real = fs::read(&known).unwrap();
        Stamp::of(source)
            .unwrap()
            .remember(&known, "planted")
            .unwrap();
        for read in [Git::known_fingerprint, Git::remembered_fingerprint] {
            assert_eq!(read(git, source, &known).unwrap(), "planted");
        }
        // A truncated file is ignored.
        for length in (0..real.len()).step_by(7).chain([real.len() - 1]) {
            fs::write(&known, &real[..length]).unwrap();
            assert_eq!(recall(&known, source), None, "{length}");
        }
        let earlier = [b"rockenv source 3\n".as_slice(), &real[MAGIC.len()..]].concat();
        fs::write(&known, earlier).unwrap();
        assert_eq!(recall(&known, source), None);
        fs::write(&known, &real).unwrap();
        assert_eq!(recall(&known, source).unwrap(), before);
        // Adding and removing a name changes only the directory.
        fs::write(source.join("passing"), "").unwrap();
        assert_eq!(recall(&known, source), None);
        fs::remove_file(source.join("passing")).unwrap();
        assert_eq!(recall(&known, source).unwrap(), before);
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
        edit(source.path(), &Git::new(me()));
    }

    #[test]
    fn a_checkout_that_was_edited_is_not_the_one_remembered() {
        let source = repository();
        edit(source.path(), &Git::new(me()));
    }

    #[test]
    fn a_commit_and_what_is_staged_count_and_reading_does_not() {
        let (source, git) = (repository(), Git::new(me()));
        let path = source.path();
        git.run(path, &["update-index", "--split-index"]).unwrap();
        let stamp = Stamp::of(path).unwrap();
        git.fingerprint(path).unwrap();
        assert!(stamp.holds(path));
        // Files that git itself writes do not count either.
        for name in ["FETCH_HEAD", "index.lock"] {
            fs::write(path.join(".git").join(name), "").unwrap();
            assert!(stamp.holds(path), "{name}");
        }
        fs::remove_file(path.join(".git/index.lock")).unwrap();
        run(path, &["commit", "--quiet", "--allow-empty", "-m", "next"]);
        assert!(!stamp.holds(path));
        let next = Stamp::of(path).unwrap();
        git.run(path, &["rm", "--quiet", "--cached", "a"]).unwrap();
        assert!(!next.holds(path));
    }

    #[test]
    fn a_branch_with_the_name_of_one_of_git_s_own_directories_counts() {
        let (outer, inner, git) = (repository(), repository(), Git::new(me()));
        let path = outer.path();
        for name in ["sub", "logs"] {
            add_submodule(path, inner.path(), name);
        }
        run(path, &["commit", "--quiet", "-m", "submodules"]);
        for below in ["", "sub", "logs"] {
            let path = path.join(below);
            for name in ["logs", "objects", "x/lfs", "x/rr-cache"] {
                run(&path, &["checkout", "--quiet", "-b", name]);
                run(&path, &["commit", "--quiet", "--allow-empty", "-m", "next"]);
                let stamp = Stamp::of(outer.path()).unwrap();
                git.fingerprint(outer.path()).unwrap();
                assert!(stamp.holds(outer.path()), "{below} {name}");
                run(&path, &["reset", "--quiet", "--soft", "HEAD~1"]);
                assert!(!stamp.holds(outer.path()), "{below} {name}");
            }
        }
        // Files that change when git only reads do not count.
        let stamp = Stamp::of(path).unwrap();
        for name in [
            ".git/logs/x",
            ".git/modules/sub/logs/x",
            ".git/modules/logs/logs/x",
        ] {
            fs::write(path.join(name), "").unwrap();
            assert!(stamp.holds(path), "{name}");
        }
    }

    #[test]
    fn a_work_tree_of_a_repository_elsewhere_is_never_remembered() {
        let (source, git) = (repository(), Git::new(me()));
        let elsewhere = tempfile::tempdir().unwrap();
        let tree = elsewhere.path().join("tree");
        let add = ["worktree", "add", "--quiet", "--detach"];
        let add = [&add[..], &[tree.to_str().unwrap()]].concat();
        git.run(source.path(), &add).unwrap();
        assert_eq!(Stamp::of(&tree), None);
        let known = elsewhere.path().join("known");
        git.remembered_fingerprint(&tree, &known).unwrap();
        assert!(!known.exists());
        // Neither is a git directory with links to another one.
        let linked = elsewhere.path().join("linked");
        fs::create_dir_all(linked.join(".git/hooks")).unwrap();
        let link = |to: &str, name: &str| {
            let to = source.path().join(".git").join(to);
            std::os::unix::fs::symlink(to, linked.join(".git").join(name)).unwrap();
        };
        link("HEAD", "hooks/pre-commit");
        assert!(Stamp::of(&linked).is_some());
        link("refs", "refs");
        assert_eq!(Stamp::of(&linked), None);
        // Nothing waits for a writer to a FIFO in its place.
        let other = elsewhere.path().join("other");
        fs::create_dir(&other).unwrap();
        let pipe = other.join(".git");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(Stamp::of(&other), None);
    }
}
