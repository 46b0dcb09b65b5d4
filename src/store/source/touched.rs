//! Owns detecting writes to the files of a source since a moment, even if the content is the same again.

use std::collections::{BTreeMap, BTreeSet};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;

use super::{Git, unchanged};
use crate::sys::error::{Result, if_exists};

impl Git<'_> {
    /// Returns whether a process wrote to a file of a source since, by change times, which no process can set. Files
    /// that git ignores do not count, nor do git's own. With `steps_write`, as for builds in place, only tracked
    /// files count, which no build changes, and none of nested repositories, which a step may have fetched. `place`
    /// is the source itself or a path in it, and `known` is the file with the recorded state of `place`.
    pub(crate) fn is_touched(
        &self,
        source: &Path,
        place: &Path,
        known: &Path,
        since: SystemTime,
        steps_write: bool,
    ) -> Result<bool> {
        let is_older = |found: std::fs::Metadata| found.modified().is_ok_and(|time| time < since);
        if fs::metadata(known).is_ok_and(is_older) && unchanged::recall(known, place).is_some() {
            return Ok(false);
        }
        for (repository, files) in touched_files(source, place, since, steps_write)? {
            let counts = match repository.join(".git").exists() {
                true => self.counts(&repository, &files, !steps_write)?,
                false => !steps_write,
            };
            if counts {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Returns whether git tracks one of these files of a checkout. With `untracked`, also counts files that git does
    /// not ignore.
    fn counts(&self, checkout: &Path, files: &[PathBuf], untracked: bool) -> Result<bool> {
        let others: &[&str] = match untracked {
            true => &["--others", "--exclude-standard"],
            false => &[],
        };
        let list = ["ls-files", "-z", "--cached"];
        let listed = self.open(checkout)?.bytes(&[&list[..], others].concat())?;
        let listed: BTreeSet<&[u8]> = listed.split(|byte| *byte == 0).collect();
        let mut files = files.iter().map(|file| file.as_os_str().as_bytes());
        Ok(files.any(|file| listed.contains(file)))
    }
}

/// Returns the files that changed since, by the repository that contains them, or else by `place`. With `first_only`,
/// skips repositories inside another one.
fn touched_files(
    source: &Path,
    place: &Path,
    since: SystemTime,
    first_only: bool,
) -> Result<BTreeMap<PathBuf, Vec<PathBuf>>> {
    let since = since
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or(Duration::ZERO);
    let since = (
        i64::try_from(since.as_secs()).unwrap_or(i64::MAX),
        i64::from(since.subsec_nanos()),
    );
    let is_touched = |found: &std::fs::Metadata| (found.ctime(), found.ctime_nsec()) > since;
    let mut touched: BTreeMap<PathBuf, Vec<PathBuf>> = BTreeMap::new();
    let mut left = Vec::new();
    let mut next = Some(place.to_owned());
    while let Some(at) = next.take()
        && let Some(found) = if_exists(fs::symlink_metadata(&at))?
    {
        if found.is_symlink() {
            // A link counts with its target in the source.
            let (top, real) = (fs::canonicalize(source)?, fs::canonicalize(&at).ok());
            next = real.filter(|real| real.starts_with(&top));
        }
        if found.is_dir() {
            left.push((at.clone(), at));
        } else if is_touched(&found) {
            touched.insert(at, Vec::new());
        }
    }
    while let Some((directory, above)) = left.pop() {
        let repository = match directory.join(".git").exists() {
            true if first_only && directory != above && above.join(".git").exists() => continue,
            true => directory.clone(),
            false => above,
        };
        let entries = match fs::read_dir(&directory) {
            // Steps have no more rights than this process.
            Err(error) if error.kind() == ErrorKind::PermissionDenied => continue,
            entries => if_exists(entries)?,
        };
        for entry in entries.into_iter().flatten() {
            let entry = entry?;
            let Some(found) = if_exists(entry.metadata())? else {
                continue;
            };
            if entry.file_name() == ".git" {
                continue;
            }
            if found.is_dir() {
                left.push((entry.path(), repository.clone()));
            } else if is_touched(&found) {
                let path = entry.path();
                let below = path.strip_prefix(&repository).unwrap_or(&path).to_owned();
                touched.entry(repository.clone()).or_default().push(below);
            }
        }
    }
    Ok(touched)
}

#[cfg(test)]
mod tests {
    use std::ffi::OsString;
    use std::os::unix::ffi::OsStringExt as _;

    use super::super::tests::{add_submodule, me, repository};
    use super::*;

    /// Compares with the epoch, so that every file counts as written since.
    fn is_touched(source: &Path, steps_write: bool) -> bool {
        let (none, epoch) = (source.join(".git/none"), SystemTime::UNIX_EPOCH);
        Git::new(me())
            .is_touched(source, source, &none, epoch, steps_write)
            .unwrap()
    }

    #[test]
    fn what_a_step_fetches_into_a_source_is_no_edit() {
        let (outer, inner) = (repository(), repository());
        add_submodule(outer.path(), inner.path(), "sub");
        assert!(is_touched(outer.path(), true));
        for name in ["a", ".gitmodules"] {
            fs::remove_file(outer.path().join(name)).unwrap();
        }
        assert!(!is_touched(outer.path(), true));
        // If no step can write, another process did.
        assert!(is_touched(outer.path(), false));
    }

    #[test]
    fn a_file_with_any_name_counts_unless_git_ignores_it() {
        let source = repository();
        let path = source.path();
        fs::remove_file(path.join("a")).unwrap();
        fs::write(path.join(".git/info/exclude"), "*.o\n").unwrap();
        for (name, counts) in [(&b"x.o"[..], false), (&b"\xff"[..], true)] {
            fs::write(path.join(OsString::from_vec(name.to_vec())), "").unwrap();
            assert_eq!(is_touched(path, false), counts);
            assert!(!is_touched(path, true));
        }
    }

    #[test]
    fn what_a_link_leads_to_counts() {
        let (source, beside) = (repository(), tempfile::tempdir().unwrap());
        let link = beside.path().join("link");
        std::os::unix::fs::symlink(source.path(), &link).unwrap();
        assert!(is_touched(&link, true));
        fs::remove_file(source.path().join("a")).unwrap();
        assert!(!is_touched(&link, true));
    }
}
