//! Owns fingerprints of sources: a checkout's commit and the differences from it, or a digest of all content.

use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::fcntl::OFlag;
use sha2::{Digest as _, Sha256};

use super::Git;
use super::checkout::Checkout;
use super::unchanged::{self, Stamp};
use crate::plan::resolve::{UNTRACKED, is_untracked};
use crate::sys::beneath;
use crate::sys::error::{Result, if_exists};

/// Number of bytes of a file that are hashed between two checks for a signal.
const PIECE: usize = 64 << 10;

impl Git<'_> {
    /// Returns the fingerprint of a source, from the file `known` if the source has not changed since.
    pub(crate) fn known_fingerprint(&self, directory: &Path, known: &Path) -> Result<String> {
        match unchanged::recall(known, directory) {
            Some(fingerprint) => Ok(fingerprint),
            None => self.fingerprint(directory),
        }
    }

    /// Returns the current fingerprint of a source, and caches it in the file `known` if that is safe.
    pub(crate) fn remembered_fingerprint(&self, directory: &Path, known: &Path) -> Result<String> {
        remembered(directory, known, || self.fingerprint(directory))
    }

    /// Returns the fingerprint of a source: its commit and a digest of the differences, or a digest of all content.
    pub(crate) fn fingerprint(&self, directory: &Path) -> Result<String> {
        if !directory.join(".git").exists() {
            return self.content_digest(directory);
        }
        let checkout = self.open(directory)?;
        let Some(head) = checkout.commit()? else {
            let is_git = |name: &Path| name == Path::new(".git");
            return self.content_digest_without(directory, is_git);
        };
        self.refuse_special_files(&checkout, directory)?;
        // Otherwise git starts another git in each submodule, which obeys the configuration there.
        let status = checkout.bytes(&[
            "status",
            "--porcelain=v2",
            "-z",
            // To recognise a rename, git would read the commit's file, which a partial clone may lack.
            "--no-renames",
            "--untracked-files=all",
            "--ignore-submodules=dirty",
        ])?;
        let listed = checkout.bytes(&["ls-files", "--stage", "-v", "-z"])?;
        let mut modified = self.modified_submodules(&listed, directory)?;
        let unseen = unseen_changes(&checkout, &listed)?;
        if status.is_empty() && modified.is_empty() && unseen.is_empty() {
            return Ok(format!("git:{head}"));
        }
        let mut untracked = modified.values().any(|print| is_untracked(print));
        let mut hash = Sha256::new();
        hash.update(&status);
        // The status has the differing paths, with the ids of staged content; the digest covers that of the files.
        for change in changes(&status) {
            untracked |= change.untracked;
            let path = directory.join(std::ffi::OsStr::from_bytes(change.path));
            let found = hash_kind(change.path, &path, &mut hash);
            if found.is_some_and(|found| found.is_dir()) {
                hash.update(match modified.remove(change.path) {
                    Some(print) => print,
                    None => self.fingerprint(&path)?,
                });
            } else {
                self.hash_file(&path, &mut hash)?;
            }
        }
        // TheRock asks git, and does not see them either.
        untracked |= !unseen.is_empty();
        for name in &unseen {
            let path = directory.join(std::ffi::OsStr::from_bytes(name));
            if hash_kind(name, &path, &mut hash).is_none_or(|found| !found.is_dir()) {
                self.hash_file(&path, &mut hash)?;
            }
        }
        for (path, print) in &modified {
            hash.update(path);
            hash.update([0]);
            hash.update(print);
        }
        let untracked = if untracked { UNTRACKED } else { "" };
        let digest = hex::encode(hash.finalize());
        Ok(format!("git:{head}+{digest}{untracked}"))
    }

    /// Returns the fingerprints of submodules that differ from their commits in the index, by path.
    fn modified_submodules(
        &self,
        listed: &[u8],
        directory: &Path,
    ) -> Result<BTreeMap<Vec<u8>, String>> {
        let mut modified = BTreeMap::new();
        for Listed { id, name, .. } in entries(listed).filter(Listed::is_submodule) {
            let (commit, path) = (id, directory.join(std::ffi::OsStr::from_bytes(name)));
            if !path.join(".git").exists() {
                // git ignores the content of a submodule without a repository.
                let is_directory = fs::symlink_metadata(&path).is_ok_and(|found| found.is_dir());
                if is_directory && fs::read_dir(&path)?.next().is_some() {
                    let print = self.content_digest(&path)? + UNTRACKED;
                    modified.insert(name.to_vec(), print);
                }
                continue;
            }
            let print = self.fingerprint(&path)?;
            if !self.is_of_commit(directory, &path, commit, &print)? {
                modified.insert(name.to_vec(), print);
            }
        }
        Ok(modified)
    }

    /// Hashes names, kinds, permissions to execute and contents below a directory; ignores times. A checkout counts
    /// with its commit instead of its git directory, which differs in each clone and changes when git only reads.
    pub(super) fn content_digest(&self, directory: &Path) -> Result<String> {
        self.content_digest_without(directory, |_| false)
    }

    fn content_digest_without(
        &self,
        directory: &Path,
        is_left_out: impl Fn(&Path) -> bool,
    ) -> Result<String> {
        let mut hash = Sha256::new();
        let mut left = vec![PathBuf::new()];
        while let Some(relative) = left.pop() {
            let entries = match fs::read_dir(directory.join(&relative)) {
                // Editors and git remove files and directories while this runs.
                Err(error) if error.kind() == ErrorKind::NotFound && relative != Path::new("") => {
                    continue;
                }
                entries => entries?,
            };
            let mut entries = entries.collect::<std::io::Result<Vec<_>>>()?;
            entries.sort_by_key(fs_err::DirEntry::file_name);
            for entry in entries {
                self.stop_if_cancelled()?;
                let name = relative.join(entry.file_name());
                if is_left_out(&name) {
                    continue;
                }
                let Some(found) = if_exists(fs::symlink_metadata(entry.path()))? else {
                    continue;
                };
                hash.update(name.as_os_str().as_bytes());
                hash.update([0]);
                if entry.file_name() == ".git"
                    && let Some(commit) = self.commit_in(&directory.join(&relative))?
                {
                    hash.update(commit);
                    continue;
                }
                hash.update(mode_in_git(&found).to_le_bytes());
                if found.is_dir() {
                    left.push(name);
                } else {
                    self.hash_file(&entry.path(), &mut hash)?;
                }
            }
        }
        Ok(format!("content:{}", hex::encode(hash.finalize())))
    }

    /// Returns the checked-out commit, which is empty before the first one; `None` if git cannot read the checkout.
    fn commit_in(&self, directory: &Path) -> Result<Option<String>> {
        match self.open(directory).and_then(|checkout| checkout.commit()) {
            Ok(commit) => Ok(Some(commit.unwrap_or_default())),
            Err(_) => self.stop_if_cancelled().map(|()| None),
        }
    }

    fn hash_file(&self, path: &Path, hash: &mut Sha256) -> Result<()> {
        let Some(found) = if_exists(fs::symlink_metadata(path))? else {
            hash.update(b"absent");
            return Ok(());
        };
        if found.is_symlink() {
            let target = fs::read_link(path)?;
            // Without the length, the end of a target could pass for the beginning of the next name.
            hash.update((target.as_os_str().len() as u64).to_le_bytes());
            hash.update(target.as_os_str().as_bytes());
        } else if found.is_file() {
            // A step of another env may have put a link or a FIFO there by now.
            let flags = OFlag::O_NOFOLLOW | OFlag::O_NONBLOCK;
            self.hash_content(beneath::open_file(path, flags)?, hash)?;
        }
        Ok(())
    }

    /// Hashes a length and the content of a file, which may be sparse and terabytes long.
    pub(super) fn hash_content(&self, mut file: fs::File, hash: &mut Sha256) -> Result<()> {
        // NFS asks the server for the length when a file is opened.
        hash.update(file.metadata()?.len().to_le_bytes());
        let mut piece = vec![0; PIECE];
        loop {
            self.stop_if_cancelled()?;
            match file.read(&mut piece)? {
                0 => return Ok(()),
                amount => hash.update(&piece[..amount]),
            }
        }
    }
}

/// Returns the fingerprint of a directory from the file `known` if the directory has not changed since. Otherwise
/// computes it with `read`, and caches it there if that is safe.
pub(super) fn remembered(
    directory: &Path,
    known: &Path,
    read: impl Fn() -> Result<String>,
) -> Result<String> {
    if let Some(fingerprint) = unchanged::recall(known, directory) {
        return Ok(fingerprint);
    }
    let before = Stamp::of(directory);
    let fingerprint = read()?;
    // A change during the read, or in the same clock tick as the last change, would go unnoticed.
    if let Some(stamp) = before.filter(Stamp::is_settled)
        && stamp.holds(directory)
    {
        stamp.remember(known, &fingerprint)?;
    }
    Ok(fingerprint)
}

/// A difference from a commit.
#[derive(Debug, PartialEq, Eq)]
struct Change<'a> {
    /// A file, or a submodule.
    path: &'a [u8],
    /// It is untracked, or contains untracked files.
    untracked: bool,
}

/// Parses the output of `git status --porcelain=v2 --no-renames -z`.
fn changes(status: &[u8]) -> Vec<Change<'_>> {
    let mut changes = Vec::new();
    for entry in status.split(|byte| *byte == 0) {
        // Number of words before the path.
        let words = match entry.first() {
            Some(b'?') => 1,
            Some(b'1') => 8,
            Some(b'u') => 10,
            _ => continue,
        };
        // The third word describes a submodule. Its last letter is `U` if there are untracked files.
        let submodule = entry.get(5..9).filter(|_| words > 1);
        changes.push(Change {
            path: entry
                .splitn(words + 1, |byte| *byte == b' ')
                .last()
                .unwrap_or_default(),
            untracked: words == 1 || submodule.is_some_and(|state| state.ends_with(b"U")),
        });
    }
    changes
}

/// An entry of the index.
struct Listed<'a> {
    /// `H`, or another letter if git does not compare the entry with the file.
    tag: u8,
    mode: &'a [u8],
    id: &'a [u8],
    name: &'a [u8],
}

impl Listed<'_> {
    fn is_submodule(&self) -> bool {
        self.mode == b"160000"
    }
}

/// Parses the output of `git ls-files --stage -v -z`.
fn entries(listed: &[u8]) -> impl Iterator<Item = Listed<'_>> {
    listed.split(|byte| *byte == 0).filter_map(|entry| {
        let tab = entry.iter().position(|byte| *byte == b'\t')?;
        let mut words = entry[..tab].split(|byte| *byte == b' ');
        Some(Listed {
            tag: *words.next()?.first()?,
            mode: words.next()?,
            id: words.next()?,
            name: &entry[tab + 1..],
        })
    })
}

/// Returns files that differ from the commit and that git skips: those marked assume-unchanged or skip-worktree, and
/// those outside a sparse checkout. Marks of submodules do not count. If objects are replaced (`git replace`),
/// returns all differing files, because git takes a checked-out replacement for the commit's file.
fn unseen_changes(checkout: &Checkout<'_>, listed: &[u8]) -> Result<BTreeSet<Vec<u8>>> {
    let marked = entries(listed).filter(|entry| {
        let is_marked = entry.tag == b'S' || entry.tag.is_ascii_lowercase();
        is_marked && !entry.is_submodule()
    });
    let marked: BTreeSet<&[u8]> = marked.map(|entry| entry.name).collect();
    let replaced = ["for-each-ref", "--count=1", "--", "refs/replace/"];
    let is_replaced = !checkout.bytes(&replaced)?.is_empty();
    if marked.is_empty() && !is_replaced {
        return Ok(BTreeSet::new());
    }
    let status = checkout.status_of_all()?;
    let differing = changes(&status).into_iter().map(|change| change.path);
    let unseen = differing.filter(|path| is_replaced || marked.contains(path));
    Ok(unseen.map(<[u8]>::to_vec).collect())
}

/// Returns the type of an entry with the permissions that git would give it. Its real permissions depend on the umask
/// of the user who copied the files.
fn mode_in_git(found: &std::fs::Metadata) -> u32 {
    let permissions = match found.mode() & 0o100 {
        _ if found.is_symlink() => 0o777,
        0 => 0o644,
        _ => 0o755,
    };
    (found.mode() & 0o170_000) | permissions
}

/// Hashes a path, with the type and the execute permission of the entry there.
fn hash_kind(name: &[u8], path: &Path, hash: &mut Sha256) -> Option<std::fs::Metadata> {
    hash.update(name);
    hash.update([0]);
    let found = fs::symlink_metadata(path).ok();
    // git tracks no other mode bits, and reports none for untracked files.
    let mode = found.as_ref().map_or(0, |found| found.mode() & 0o170_100);
    hash.update(mode.to_le_bytes());
    found
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::sync::atomic::{AtomicBool, Ordering};

    use super::super::tests::{add_submodule, me, repository, run};
    use super::*;
    use crate::sys::error::Kind;

    #[test]
    fn the_target_of_a_link_ends_where_it_ends() {
        let digests = [[("a", "t"), ("bc", "u")], [("a", "tb"), ("c", "u")]].map(|links| {
            let directory = tempfile::tempdir().unwrap();
            for (name, target) in links {
                std::os::unix::fs::symlink(target, directory.path().join(name)).unwrap();
            }
            Git::new(me()).content_digest(directory.path()).unwrap()
        });
        assert_ne!(digests[0], digests[1]);
    }

    #[test]
    fn what_an_editor_removes_meanwhile_is_no_error() {
        let (directory, git) = (tempfile::tempdir().unwrap(), Git::new(me()));
        let path = directory.path();
        fs::create_dir(path.join("d")).unwrap();
        for name in ["a", "e"] {
            fs::write(path.join(name), "one").unwrap();
        }
        let wanted = git.content_digest(path).unwrap();
        fs::write(path.join("b.swp"), "").unwrap();
        let remove = |name: &Path| {
            match name.to_str() {
                Some("a") => fs::remove_file(path.join("b.swp")).unwrap(),
                // It was examined, but not read yet.
                Some("e") => fs::remove_dir(path.join("d")).unwrap(),
                _ => {}
            }
            false
        };
        let found = git.content_digest_without(path, remove);
        assert_eq!(found.unwrap(), wanted);
        fs::remove_dir_all(path).unwrap();
        assert!(git.content_digest(path).is_err());
    }

    #[test]
    fn what_is_untracked_is_known_to_be_and_submodules_count_by_content() {
        let (directory, inner) = (repository(), repository());
        let path = directory.path();
        let git = Git::new(me());
        add_submodule(path, inner.path(), "sub dir");
        run(path, &["commit", "--quiet", "-m", "s"]);
        let clean = git.fingerprint(path).unwrap();
        assert!(clean.starts_with("git:") && !clean.contains('+'), "{clean}");
        let mut seen = vec![clean.clone()];
        for text in ["two", "six"] {
            fs::write(path.join("sub dir/a"), text).unwrap();
            seen.push(git.fingerprint(path).unwrap());
            assert!(!is_untracked(seen.last().unwrap()));
        }
        for name in ["sub dir/new", "new"] {
            fs::write(path.join(name), "").unwrap();
            seen.push(git.fingerprint(path).unwrap());
            assert!(is_untracked(seen.last().unwrap()), "{name}");
        }
        let different: std::collections::BTreeSet<_> = seen.iter().collect();
        assert_eq!(different.len(), seen.len(), "{seen:?}");
        fs::remove_file(path.join("new")).unwrap();
        fs::remove_file(path.join("sub dir/new")).unwrap();
        fs::write(path.join("sub dir/a"), "one").unwrap();
        assert_eq!(git.fingerprint(path).unwrap(), clean);
        git.run(path, &["mv", "a", "b c"]).unwrap();
        assert!(!is_untracked(&git.fingerprint(path).unwrap()));
        let status = b"1 A. N... 0 1 1 h h b c\0? d e\0";
        let found = changes(status);
        let found = found.iter().map(|one| (one.path.to_vec(), one.untracked));
        let found: Vec<_> = found.collect();
        assert_eq!(found, [(b"b c".to_vec(), false), (b"d e".to_vec(), true)]);
    }

    #[test]
    fn files_of_a_commit_that_a_partial_clone_lacks_are_not_read() {
        let (directory, git) = (repository(), Git::new(me()));
        let path = directory.path();
        let id = git.run(path, &["rev-parse", "HEAD:a"]).unwrap();
        let (begin, end) = id.trim().split_at(2);
        fs::remove_file(path.join(".git/objects").join(begin).join(end)).unwrap();
        git.run(path, &["mv", "a", "b"]).unwrap();
        let mut seen = BTreeSet::new();
        for staged in ["one more", "one less"] {
            fs::write(path.join("b"), staged).unwrap();
            git.run(path, &["add", "b"]).unwrap();
            assert!(seen.insert(git.fingerprint(path).unwrap()));
            fs::write(path.join("b"), "edited").unwrap();
            assert!(seen.insert(git.fingerprint(path).unwrap()));
        }
    }

    #[test]
    fn what_git_is_told_not_to_look_at_counts_all_the_same() {
        let (directory, inner) = (repository(), repository());
        let path = directory.path();
        let git = Git::new(me());
        let run = |arguments: &[&str]| run(path, arguments);
        fs::create_dir(path.join("d")).unwrap();
        fs::write(path.join("d/b"), "b").unwrap();
        std::os::unix::fs::symlink("a", path.join("link")).unwrap();
        add_submodule(path, inner.path(), "sub");
        run(&["add", "d", "link"]);
        run(&["commit", "--quiet", "-m", "more"]);
        run(&["submodule", "--quiet", "deinit", "--force", "sub"]);
        let clean = git.fingerprint(path).unwrap();
        assert!(!clean.contains('+'), "{clean}");
        let mut seen = BTreeSet::from([clean.clone()]);
        for (mark, text) in [("--assume-unchanged", "two"), ("--skip-worktree", "six")] {
            run(&["update-index", mark, "a", "d/b", "link"]);
            assert_eq!(git.fingerprint(path).unwrap(), clean);
            fs::write(path.join("a"), text).unwrap();
            let print = git.fingerprint(path).unwrap();
            assert!(seen.insert(print.clone()) && is_untracked(&print));
            fs::remove_file(path.join("d/b")).unwrap();
            assert!(seen.insert(git.fingerprint(path).unwrap()));
            fs::write(path.join("d/b"), "b").unwrap();
            fs::write(path.join("a"), "one").unwrap();
            assert_eq!(git.fingerprint(path).unwrap(), clean);
            let none = mark.replacen("--", "--no-", 1);
            run(&["update-index", &none, "a", "d/b", "link"]);
        }
        run(&["update-index", "--refresh"]);
        run(&["sparse-checkout", "set", "--no-cone", "/a"]);
        assert!(!path.join("d/b").exists());
        assert!(seen.insert(git.fingerprint(path).unwrap()));
        run(&["sparse-checkout", "disable"]);
        assert_eq!(git.fingerprint(path).unwrap(), clean);
        run(&["config", "core.fileMode", "false"]);
        assert_eq!(git.fingerprint(path).unwrap(), clean);
        let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
        fs::set_permissions(path.join("a"), mode(0o755)).unwrap();
        assert!(seen.insert(git.fingerprint(path).unwrap()));
        fs::set_permissions(path.join("a"), mode(0o644)).unwrap();
        // git would take the new file for the tracked one.
        run(&["config", "core.ignoreCase", "true"]);
        fs::write(path.join("A"), "").unwrap();
        let print = git.fingerprint(path).unwrap();
        assert!(seen.insert(print.clone()) && is_untracked(&print));
        fs::remove_file(path.join("A")).unwrap();
        // git takes files in place of a submodule for the submodule's.
        fs::create_dir_all(path.join("sub")).unwrap();
        assert_eq!(git.fingerprint(path).unwrap(), clean);
        fs::write(path.join("sub/a"), "one").unwrap();
        let print = git.fingerprint(path).unwrap();
        assert!(seen.insert(print.clone()) && is_untracked(&print));
        fs::write(path.join("sub/a"), "two").unwrap();
        assert!(seen.insert(git.fingerprint(path).unwrap()));
    }

    #[test]
    fn a_repository_without_a_commit_is_known_by_its_content() {
        let (outer, git) = (repository(), Git::new(me()));
        let nested = outer.path().join("nested");
        fs::create_dir(&nested).unwrap();
        git.run(&nested, &["init", "--quiet"]).unwrap();
        for path in [&nested, outer.path()] {
            let mut seen = BTreeSet::new();
            for text in ["one", "two"] {
                fs::write(nested.join("a"), text).unwrap();
                assert!(seen.insert(git.fingerprint(path).unwrap()));
            }
            // Neither writing the same again nor staging the file makes a difference.
            fs::write(nested.join("a"), "two").unwrap();
            git.run(&nested, &["add", "a"]).unwrap();
            assert!(!seen.insert(git.fingerprint(path).unwrap()));
            git.run(&nested, &["rm", "--quiet", "--cached", "a"])
                .unwrap();
        }
        let error = git.head(&nested).unwrap_err();
        assert_eq!(error.kind().exit_code(), 3);
        assert_has!(error.chain().join(" "), "has no commit yet");
        // A damaged reference is not a missing one.
        fs::write(outer.path().join(".git/HEAD"), "ref: refs/heads/x\n").unwrap();
        fs::write(outer.path().join(".git/refs/heads/x"), "damaged\n").unwrap();
        assert!(git.fingerprint(outer.path()).is_err());
    }

    #[test]
    fn a_checkout_in_other_content_counts_with_its_commit() {
        let (outer, inner, git) = (tempfile::tempdir().unwrap(), repository(), Git::new(me()));
        let url = inner.path().to_str().unwrap();
        let [one, two] = ["one", "two"].map(|name| outer.path().join(name));
        for path in [&one, &two] {
            fs::create_dir(path).unwrap();
            git.run(path, &["clone", "--quiet", "--", url, "nested"])
                .unwrap();
        }
        let print = |path: &Path| git.content_digest(path).unwrap();
        assert_eq!(print(&one), print(&two));
        run(
            &two.join("nested"),
            &["commit", "--quiet", "--allow-empty", "-m", "next"],
        );
        assert_ne!(print(&one), print(&two));
        // What git cannot read is content.
        let before = print(&one);
        fs::write(one.join(".git"), "").unwrap();
        let empty = print(&one);
        fs::write(one.join(".git"), "more").unwrap();
        assert!(before != empty && empty != print(&one));
    }

    #[test]
    fn a_signal_ends_the_reading_of_a_huge_file() {
        let directory = tempfile::tempdir().unwrap();
        let file = fs::File::create(directory.path().join("sparse")).unwrap();
        file.set_len(2 * PIECE as u64).unwrap();
        let (cancel, ticks) = (AtomicBool::new(false), Cell::new(0));
        let git = Git {
            user: me(),
            cancel: &cancel,
            tick: Box::new(|| {
                ticks.set(ticks.get() + 1);
                cancel.store(ticks.get() == 3, Ordering::Relaxed);
            }),
        };
        let error = git.fingerprint(directory.path()).unwrap_err();
        assert_eq!(error.kind(), Kind::Signal(2));
    }
}
