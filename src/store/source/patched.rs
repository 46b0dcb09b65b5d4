//! Owns recognising the patches that releases of TheRock before 10.0 apply to submodules when they are fetched.
//!
//! The patches are files of the superproject, so its commit covers them.

use std::ffi::OsString;
use std::path::Path;

use fs_err as fs;
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY};

use super::Git;
use super::checkout::git_directories;
use crate::sys::error::Result;
use crate::tree::file;

/// Committer of the patches that `fetch_sources.py` applies.
const PATCHER: &str = "therockbot@amd.com";
/// Directory of the patches, as `TAG/SUBMODULE/*.patch`.
const PATCHES: &str = "patches";
/// Maximum size of a patch, and of the script's note about a submodule, in bytes.
const LARGEST: u64 = 16 << 20;

impl Git<'_> {
    /// Returns whether a submodule with the fingerprint `print` is at `commit`, with the current patches of its
    /// superproject on top if a fetch applied any. Those that another commit of the superproject had are still there if
    /// the submodule's own commit is the same.
    pub(super) fn is_of_commit(
        &self,
        superproject: &Path,
        submodule: &Path,
        commit: &[u8],
        print: &str,
    ) -> Result<bool> {
        let is_at_commit = print.strip_prefix("git:").map(str::as_bytes) == Some(commit);
        let name = submodule.file_name().unwrap_or_default();
        let mut note = OsString::from(".");
        note.push(name);
        note.push(".smrev");
        // The second line is `COMMIT+PATCHED:DIGEST`. A fetch patches and notes only the submodules that it is told to
        // fetch.
        let note = content(submodule.parent().unwrap_or(submodule), Path::new(&note))?;
        let line = note.split(|byte| *byte == b'\n').nth(1).unwrap_or_default();
        let of_commit = line.strip_prefix(commit);
        let Some(noted) = of_commit.and_then(|rest| rest.strip_prefix(b"+PATCHED:")) else {
            return Ok(is_at_commit);
        };
        let digests = digests(superproject, submodule)?;
        if is_at_commit {
            // The patches are gone again, as after `git submodule update`.
            return Ok(digests.is_empty());
        }
        if print.contains('+') || !digests.iter().any(|digest| digest.as_bytes() == noted) {
            return Ok(false);
        }
        // A commit by another committer did not come from `fetch_sources.py`.
        let committer = self.open(submodule)?.text(&["log", "-1", "--format=%ce"])?;
        Ok(committer.trim() == PATCHER)
    }
}

/// Returns the digests of the patches that a superproject has for a submodule, of each tag's, as `fetch_sources.py`
/// notes them.
fn digests(superproject: &Path, submodule: &Path) -> Result<Vec<String>> {
    // The path of a submodule may have another name.
    let (own, _) = git_directories(submodule)?;
    let name = own.file_name().unwrap_or_default();
    let names = |below: &Path| {
        // Files and unreadable directories have no patches.
        let entries = fs::read_dir(superproject.join(below));
        let names = entries.into_iter().flatten().flatten();
        names.map(|entry| entry.file_name()).collect::<Vec<_>>()
    };
    let mut found = Vec::new();
    for tag in names(Path::new(PATCHES)) {
        let below = Path::new(PATCHES).join(tag).join(name);
        let mut patches: Vec<_> = names(&below).iter().map(|name| below.join(name)).collect();
        patches.retain(|path| path.extension() == Some("patch".as_ref()));
        patches.sort();
        if patches.is_empty() {
            continue;
        }
        let mut hash = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
        for patch in &patches {
            hash.update(&content(superproject, patch)?);
        }
        found.push(hex::encode(hash.finish()));
    }
    Ok(found)
}

/// Reads a regular file below a directory; no content if there is none.
fn content(directory: &Path, below: &Path) -> Result<Vec<u8>> {
    Ok(file::read_up_to(directory, below, LARGEST)?.unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::super::tests::{me, repository, run};
    use super::*;

    #[test]
    fn patches_that_therock_applies_to_a_submodule_are_its_own_commits() {
        let (directory, inner) = (repository(), repository());
        let path = directory.path();
        let git = Git::new(me());
        let commit = |place: &Path, email: &str| {
            let email = format!("user.email={email}");
            let commit = ["commit", "--quiet", "--all", "--allow-empty", "-m", "s"];
            run(place, &[&["-c", &email], &commit[..]].concat());
        };
        let url = inner.path().to_str().unwrap();
        let add = ["submodule", "--quiet", "add", "--name", "project"];
        run(path, &[&add[..], &["--", url, "sub"]].concat());
        fs::write(path.join(".gitignore"), ".*.smrev\n").unwrap();
        let patches = path.join("patches/amd-mainline/project");
        fs::create_dir_all(&patches).unwrap();
        fs::write(path.join("patches/README.md"), "").unwrap();
        fs::write(patches.join("1.patch"), "one\n").unwrap();
        fs::write(patches.join("2.patch"), "two\n").unwrap();
        run(path, &["add", ".gitignore", "patches"]);
        commit(path, "t@example.org");
        let before = git.fingerprint(path).unwrap();
        let sub = path.join("sub");
        let pin = git.run(&sub, &["rev-parse", "HEAD"]).unwrap();
        // `fetch_sources.py` does the same. Both digests are of `sha1sum`.
        let (both, first) = (
            "c708d7ef841f7e1748436b8ef5670d0b2de1a227",
            "c7059bb19433cc3cabaa6236c83d56668a843dd2",
        );
        let note = |commit: &str, digest: &str| {
            let text = format!("{url}\n{commit}+PATCHED:{digest}\n");
            fs::write(path.join(".sub.smrev"), text).unwrap();
        };
        fs::write(sub.join("a"), "patched").unwrap();
        commit(&sub, PATCHER);
        run(path, &["update-index", "--skip-worktree", "--", "sub"]);
        assert_ne!(git.fingerprint(path).unwrap(), before);
        note(pin.trim(), both);
        assert_eq!(git.fingerprint(path).unwrap(), before);
        // The superproject's other commit has one patch less: neither has the patches of the other.
        run(
            path,
            &["rm", "--quiet", "patches/amd-mainline/project/2.patch"],
        );
        commit(path, "t@example.org");
        assert_has!(git.fingerprint(path).unwrap(), "+");
        note(pin.trim(), first);
        let other = git.fingerprint(path).unwrap();
        assert!(!other.contains('+'), "{other}");
        run(path, &["checkout", "--quiet", "HEAD~1"]);
        assert_ne!(git.fingerprint(path).unwrap(), before);
        note(pin.trim(), both);
        fs::write(sub.join("a"), "by hand").unwrap();
        assert_ne!(git.fingerprint(path).unwrap(), before);
        commit(&sub, "t@example.org");
        assert_ne!(git.fingerprint(path).unwrap(), before);
        // A note about another commit proves nothing.
        run(&sub, &["checkout", "--quiet", "HEAD~1"]);
        assert_eq!(git.fingerprint(path).unwrap(), before);
        note(&"0".repeat(40), both);
        assert_ne!(git.fingerprint(path).unwrap(), before);
        // A fetch whose options leave the submodule out does not patch it, and notes nothing.
        run(&sub, &["checkout", "--quiet", pin.trim()]);
        fs::remove_file(path.join(".sub.smrev")).unwrap();
        fs::write(path.join(".git/rockenv-fetched"), "").unwrap();
        assert_eq!(git.fingerprint(path).unwrap(), before);
        // `git submodule update` removes the patches, but not the note.
        note(pin.trim(), both);
        assert_ne!(git.fingerprint(path).unwrap(), before);
        // A step may leave a FIFO there, and no process writes to it.
        run(&sub, &["checkout", "--quiet", "-"]);
        fs::remove_file(path.join(".sub.smrev")).unwrap();
        let pipe = path.join(".sub.smrev");
        nix::unistd::mkfifo(&pipe, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_ne!(git.fingerprint(path).unwrap(), before);
    }
}
