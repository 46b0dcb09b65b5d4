//! Owns finding ninja's logs in build volumes, which are untrusted, and those of the same build in other envs.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use fs_err as fs;

use super::Store;
use super::layer::VolumeState;
use crate::plan::ids::VolumeName;
use crate::plan::ninja_log::{self, Command};
use crate::sys::error::Result;
use crate::tree::file;

const LOG: &str = ".ninja_log";
/// Maximum depth of the search: TheRock's builds are four levels down, LLVM's own two more.
const DEPTH: usize = 8;
/// Maximum size of a log or of a `build.ninja`, in bytes.
const LARGEST: u64 = 64 << 20;
/// Maximum number of files and directories that the search visits.
const ENTRIES: usize = 1_000_000;
/// Number of earlier builds, newest first, whose times are used.
const EARLIER: usize = 4;

/// How long ninja's log may be on disk before its outputs: Linux writes files after 30 seconds, on laptops after 60.
const UNWRITTEN: Duration = Duration::from_secs(120);

#[derive(Debug)]
pub(crate) struct BuildLog {
    /// When its last command ended.
    pub modified: SystemTime,
    pub commands: Vec<Command>,
}

/// Returns the directories below `top` in which ninja ran. Skips directories that hold only build results.
pub(crate) fn find(top: &Path) -> Vec<PathBuf> {
    let (mut found, mut left) = (Vec::new(), ENTRIES);
    let mut waiting = vec![PathBuf::new()];
    while let Some(below) = waiting.pop() {
        let entries = fs::read_dir(top.join(&below)).into_iter().flatten();
        for entry in entries.flatten() {
            if left == 0 {
                return found;
            }
            left -= 1;
            let name = entry.file_name();
            let name = name.to_string_lossy();
            let Ok(kind) = entry.file_type() else {
                continue;
            };
            let built = matches!(&*name, "stage" | "dist" | "stamp" | "CMakeFiles");
            if kind.is_file() && name == LOG {
                found.push(below.clone());
            } else if kind.is_dir()
                && below.components().count() < DEPTH
                && !built
                && !name.starts_with('.')
                && !name.starts_with("artifacts")
            {
                waiting.push(below.join(entry.file_name()));
            }
        }
    }
    found
}

/// Returns when the log of a build directory was written.
pub(crate) fn modified(top: &Path, below: &Path) -> Option<SystemTime> {
    let log = file::open(top, &below.join(LOG)).ok()??;
    log.metadata().ok()?.modified().ok()
}

/// Reads the log of a build directory; `None` if it is missing or not a log.
pub(crate) fn read(top: &Path, below: &Path) -> Option<BuildLog> {
    let modified = modified(top, below)?;
    let commands = ninja_log::parse(&text(top, &below.join(LOG))?)?;
    Some(BuildLog { modified, commands })
}

pub(crate) fn text(top: &Path, path: &Path) -> Option<String> {
    let bytes = file::read_up_to(top, path, LARGEST).ok()??;
    Some(String::from_utf8_lossy(&bytes).into_owned())
}

/// Cuts the commands that ended last off the logs below `tops`, so that ninja runs them again.
pub(super) fn cut(tops: &[PathBuf]) {
    let found = tops.iter().flat_map(|top| {
        let logs = find(top).into_iter();
        logs.filter_map(move |below| Some((modified(top, &below)?, top, below.join(LOG))))
    });
    let found: Vec<_> = found.collect();
    let newest = found.iter().map(|(modified, ..)| *modified).max();
    for (modified, top, log) in &found {
        let before = newest.and_then(|newest| newest.duration_since(*modified).ok());
        if before.is_some_and(|before| before <= UNWRITTEN)
            && let Ok(Some(bytes)) = file::read_up_to(top, log, LARGEST)
        {
            let ms = u64::try_from(UNWRITTEN.as_millis()).unwrap_or(u64::MAX);
            let length = ninja_log::length_without_last(&bytes, ms);
            if length < bytes.len() && (bytes.len() as u64) < LARGEST {
                drop(file::shorten(top, log, length as u64));
            }
        }
    }
}

impl Store {
    /// Returns the time of each command in earlier runs of the same build, by its first output, from the newest logs.
    pub(crate) fn earlier_builds(
        &self,
        volume: &VolumeName,
        below: &Path,
    ) -> Result<HashMap<String, u64>> {
        let mut tops = Vec::new();
        for env in self.envs()? {
            let record = self.record(&env).ok().flatten();
            let id = record.and_then(|record| record.head.volumes.get(volume).cloned());
            tops.extend(id.map(|id| self.volume_dir(&id)));
        }
        for layer in self.layers()? {
            if layer.volumes.get(volume) == Some(&VolumeState::Frozen) {
                tops.push(self.layer_dir(&layer.id).join("volumes").join(volume));
            }
        }
        let dated = tops
            .iter()
            .filter_map(|top| Some((modified(top, below)?, top)));
        let mut dated: Vec<_> = dated.collect();
        dated.sort_by_key(|(modified, _)| std::cmp::Reverse(*modified));
        let mut times = HashMap::new();
        for (_, top) in dated.into_iter().take(EARLIER) {
            for command in read(top, below).into_iter().flat_map(|log| log.commands) {
                times.entry(command.output).or_insert(command.took_ms);
            }
        }
        Ok(times)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn logs_are_found_where_builds_are_and_through_no_link() {
        let top = tempfile::tempdir().unwrap();
        for path in [
            "",
            "core/hip/build",
            "core/hip/stage",
            "core/hip/build/CMakeFiles",
        ] {
            fs::create_dir_all(top.path().join(path)).unwrap();
            fs::write(top.path().join(path).join(LOG), "").unwrap();
        }
        fs_err::os::unix::fs::symlink("core", top.path().join("link")).unwrap();
        let elsewhere = top.path().join("core").join(LOG);
        fs_err::os::unix::fs::symlink("/etc/passwd", elsewhere).unwrap();
        let mut found = find(top.path());
        found.sort();
        assert_eq!(found, [Path::new(""), Path::new("core/hip/build")]);
    }

    #[test]
    fn only_logs_of_builds_that_ran_last_are_cut() {
        let top = tempfile::tempdir().unwrap();
        let text = "# ninja log v5\n0\t7\t1\ta.o\taa\n0\t900000\t1\tb.o\tbb\n";
        let logs = ["last", "nested/last", "earlier"].map(|name| top.path().join(name).join(LOG));
        for log in &logs {
            fs::create_dir_all(log.parent().unwrap()).unwrap();
            fs::write(log, text).unwrap();
        }
        let hour = SystemTime::now() - Duration::from_secs(3600);
        let earlier = fs::OpenOptions::new().write(true).open(&logs[2]).unwrap();
        earlier.file().set_modified(hour).unwrap();
        cut(&[top.path().to_owned()]);
        let kept = logs.map(|log| fs::read_to_string(log).unwrap().lines().count());
        assert_eq!(kept, [2, 2, 3]);
    }

    #[test]
    fn a_log_that_is_a_link_is_not_read() {
        let top = tempfile::tempdir().unwrap();
        fs::write(top.path().join("log"), "# ninja log v7\n0\t7\t1\ta.o\taa\n").unwrap();
        fs_err::os::unix::fs::symlink(top.path().join("log"), top.path().join(LOG)).unwrap();
        assert!(read(top.path(), Path::new("")).is_none());
        fs::rename(top.path().join("log"), top.path().join(LOG)).unwrap();
        assert_eq!(read(top.path(), Path::new("")).unwrap().commands.len(), 1);
    }
}
