//! Owns files that people edited by hand in a view, by `exec` and `shell`: they are moved aside before their layer is
//! removed.
//!
//! A step makes its own files again; nobody can make manual edits again. The file `hand` has a line when a command
//! begins, and another with both times when it ends. A file whose change time lies between the two was changed by
//! that command.

use std::io::Write as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use jiff::Timestamp;

use crate::sys::error::{Result, if_exists};

/// The file that lists the commands.
pub(super) const COMMANDS: &str = "hand";
/// Prefix of directories for files moved aside.
pub(super) const KEPT: &str = "kept-";
/// How far a file system's clock may be behind, in nanoseconds.
const BEHIND: i128 = 20_000_000;

/// A command that may write to the views of an env, from its start to its end.
#[derive(Debug)]
pub(crate) struct ByHand {
    files: Vec<PathBuf>,
    began: i128,
}

impl ByHand {
    /// Records that a command begins.
    pub(crate) fn begin(env: &Path) -> Result<Self> {
        let began = now();
        let mut files = Vec::new();
        for view in entries(&env.join("views"))? {
            let file = view.join(COMMANDS);
            append(&file, &format!("{began}\n"))?;
            files.push(file);
        }
        Ok(Self { files, began })
    }

    /// Records that it ended. Without this record it counts as running.
    pub(crate) fn end(self) -> Result<()> {
        for file in &self.files {
            append(file, &format!("{} {}\n", self.began, now()))?;
        }
        Ok(())
    }
}

fn append(file: &Path, line: &str) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    match options.create(true).append(true).open(file) {
        // The view was removed after the container that the command joined.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        file => Ok(file?.write_all(line.as_bytes())?),
    }
}

fn now() -> i128 {
    Timestamp::now().as_nanosecond()
}

fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let Some(found) = if_exists(fs::read_dir(directory))? else {
        return Ok(Vec::new());
    };
    let paths = found.map(|entry| Ok(entry?.path()));
    paths.collect()
}

/// Moves the layer's files that were changed by hand below `into`, made for the first one. Returns whether there were
/// any.
pub(super) fn keep(commands: &str, layer: &Path, into: &Path) -> Result<bool> {
    let times = times(commands);
    if times.is_empty() || !fs::symlink_metadata(layer)?.is_dir() {
        return Ok(false);
    }
    keep_below(&times, layer, into)
}

/// Returns the beginning and the end of each command.
fn times(commands: &str) -> Vec<(i128, i128)> {
    let mut times = Vec::new();
    for line in commands.lines() {
        let mut numbers = line.split(' ').map_while(|number| number.parse().ok());
        let Some(began) = numbers.next() else {
            continue;
        };
        if let Some(end) = numbers.next() {
            times.retain(|known| *known != (began, i128::MAX));
            times.push((began, end));
        } else {
            times.push((began, i128::MAX));
        }
    }
    times
}

fn keep_below(times: &[(i128, i128)], from: &Path, into: &Path) -> Result<bool> {
    let mut any = false;
    for path in entries(from)? {
        let Some(name) = path.file_name() else {
            continue;
        };
        let found = fs::symlink_metadata(&path)?;
        if found.is_dir() {
            any |= keep_below(times, &path, &into.join(name))?;
            continue;
        }
        let changed = i128::from(found.ctime()) * 1_000_000_000 + i128::from(found.ctime_nsec());
        let by_hand = times
            .iter()
            .any(|(began, end)| (began - BEHIND..=*end).contains(&changed));
        // Markers of deleted files are not kept.
        if by_hand && (found.is_file() || found.is_symlink()) {
            fs::create_dir_all(into)?;
            fs::rename(&path, into.join(name))?;
            any = true;
        }
    }
    Ok(any)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_once_and_one_that_was_killed_never() {
        assert_eq!(times(""), []);
        assert_eq!(times("5\n5 7\n"), [(5, 7)]);
        assert_eq!(times("5\n6\n6 9\nx\n"), [(5, i128::MAX), (6, 9)]);
    }

    #[test]
    fn what_was_changed_meanwhile_is_moved_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let env = directory.path();
        let layer = env.join("views/src/layer");
        fs::create_dir_all(layer.join("d/e")).unwrap();
        fs::write(layer.join("d/step"), "step").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(60));
        let command = ByHand::begin(env).unwrap();
        fs::write(layer.join("d/e/mine"), "mine").unwrap();
        command.end().unwrap();
        std::thread::sleep(std::time::Duration::from_millis(60));
        fs::write(layer.join("later"), "step").unwrap();
        let commands = fs::read_to_string(env.join("views/src").join(COMMANDS)).unwrap();
        let into = env.join("views/src/kept-1");
        assert!(keep(&commands, &layer, &into).unwrap());
        assert_eq!(fs::read_to_string(into.join("d/e/mine")).unwrap(), "mine");
        assert!(layer.join("d/step").exists() && layer.join("later").exists());
        assert!(!keep(&commands, &layer, &env.join("none")).unwrap());
        assert!(!env.join("none").exists());
        // Another command may have removed the view by then.
        let command = ByHand::begin(env).unwrap();
        fs::remove_dir_all(env.join("views")).unwrap();
        command.end().unwrap();
    }
}
