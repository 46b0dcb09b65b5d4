//! Owns files that users edited by hand in a view, through `exec` and `shell`: they are moved aside before their layer
//! is removed.
//!
//! A step can make its own files again, but manual edits cannot be made again. The file `hand` gets a line when a
//! command begins, and another with both times when it ends. A file whose change time lies between the two was changed
//! by that command. Steps may change these times later, so when a command ends, its files are listed beside their
//! layer, in `<layer>.hand`.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs::Metadata;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use jiff::Timestamp;

use super::{AT, WORK};
use crate::sys::error::{Result, if_exists};
use crate::sys::host::clock_ahead;

/// The file that lists the commands.
pub(super) const COMMANDS: &str = "hand";
/// Suffix of the file that lists a layer's manually edited files.
pub(super) const LIST: &str = ".hand";
/// Prefix of directories for files moved aside.
pub(super) const KEPT: &str = "kept-";
/// How far a file system's clock may be behind, in nanoseconds.
pub(super) const BEHIND: i128 = 20_000_000;
/// Maximum length of a list, in bytes.
const LIST_MAX: usize = 4 << 20;

/// A command that may write to the views of an env, from its start to its end.
#[derive(Debug)]
pub(crate) struct ByHand {
    files: Vec<PathBuf>,
    began: i128,
    /// How far the clock was ahead then; see [`clock_ahead`].
    ahead: Option<i64>,
}

impl ByHand {
    /// Records that a command begins.
    pub(crate) fn begin(env: &Path) -> Result<Self> {
        let (began, ahead) = (now(), clock_ahead());
        let mut files = Vec::new();
        for view in entries(&env.join("views"))? {
            let file = view.join(COMMANDS);
            append(&file, format!("{began}\n").as_bytes())?;
            files.push(file);
        }
        Ok(Self {
            files,
            began,
            ahead,
        })
    }

    /// Lists the files that the command changed, and records its end. Without this record the command counts as
    /// running, and all later changes count as its own. The record is left out if the list would become too long.
    pub(crate) fn end(self) -> Result<()> {
        // Before the clock was set back, files got times up to that much after the end, and afterwards times up to that
        // much before the beginning.
        let back = self.set_back();
        for file in &self.files {
            let (began, ended) = (self.began - back, now() + back);
            let Some(commands) = if_exists(fs::read_to_string(file))? else {
                continue;
            };
            let mut times = times(&commands);
            times.retain(|(_, end)| *end != i128::MAX);
            times.push((began, ended));
            if list(&Edits::at(times), file, LIST_MAX)? {
                if back > 0 {
                    append(file, format!("{began} {ended}\n").as_bytes())?;
                }
                append(file, format!("{} {ended}\n", self.began).as_bytes())?;
            }
        }
        Ok(())
    }

    /// Returns by how much the clock was set back since the beginning, in nanoseconds.
    fn set_back(&self) -> i128 {
        let clocks = self.ahead.zip(clock_ahead());
        let back = clocks.map_or(0, |(then, now)| i128::from(then) - i128::from(now));
        // Two readings differ a little although no process set the clock.
        if back > BEHIND { back } else { 0 }
    }
}

/// Lists the files of a view's layers that match `edits`. Returns false if a list would become too long.
fn list(edits: &Edits, commands: &Path, max: usize) -> Result<bool> {
    let view = commands.parent().unwrap_or(commands);
    for layer in entries(view)? {
        let name = layer.file_name().unwrap_or_default().to_string_lossy();
        if name == WORK || name == AT || name.starts_with(KEPT) || !layer.is_dir() {
            continue;
        }
        let known = listed(&layer)?;
        let mut new = Vec::new();
        edits.find(&layer, Path::new(""), &mut |path, _| {
            if !known.contains(path) {
                // An entry may have been cut short, so each entry also begins with a separator.
                new.push(0);
                new.extend_from_slice(path.as_os_str().as_bytes());
                new.push(0);
            }
            Ok(())
        })?;
        if new.is_empty() {
            continue;
        }
        let lengths = known.iter().map(|path| path.as_os_str().len() + 2);
        if lengths.sum::<usize>() + new.len() > max {
            return Ok(false);
        }
        append(&list_of(&layer), &new)?;
    }
    Ok(true)
}

fn list_of(layer: &Path) -> PathBuf {
    let mut path = layer.as_os_str().to_owned();
    path.push(LIST);
    path.into()
}

/// Returns the listed files of a layer, relative to it.
fn listed(layer: &Path) -> Result<BTreeSet<PathBuf>> {
    let bytes = if_exists(fs::read(list_of(layer)))?.unwrap_or_default();
    let paths = bytes.split(|byte| *byte == 0);
    let paths = paths.filter(|path| !path.is_empty());
    Ok(paths.map(|path| OsStr::from_bytes(path).into()).collect())
}

fn append(file: &Path, bytes: &[u8]) -> Result<()> {
    let mut options = fs::OpenOptions::new();
    match options.create(true).append(true).open(file) {
        // Another command may have removed the view since.
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        file => Ok(file?.write_all(bytes)?),
    }
}

fn now() -> i128 {
    Timestamp::now().as_nanosecond()
}

pub(super) fn entries(directory: &Path) -> Result<Vec<PathBuf>> {
    let Some(found) = if_exists(fs::read_dir(directory))? else {
        return Ok(Vec::new());
    };
    let paths = found.map(|entry| Ok(entry?.path()));
    paths.collect()
}

/// Returns the views of an env with files changed by hand, and how many files each has, including those moved aside.
pub(crate) fn count(env: &Path) -> Result<Vec<(PathBuf, usize)>> {
    let mut found = Vec::new();
    for view in entries(&env.join("views"))? {
        let commands = if_exists(fs::read_to_string(view.join(COMMANDS)))?.unwrap_or_default();
        let mut files = BTreeSet::new();
        for layer in entries(&view)? {
            let name = layer.file_name().unwrap_or_default().to_string_lossy();
            if name == WORK || name == AT || !layer.is_dir() {
                continue;
            }
            let is_aside = name.starts_with(KEPT);
            let edits = match is_aside {
                true => Edits::all(),
                false => Edits::of(&commands, &layer)?,
            };
            if edits.is_empty() {
                continue;
            }
            let aside = is_aside.then(|| layer.clone());
            edits.find(&layer, Path::new(""), &mut |path, found| {
                if found.is_file() || found.is_symlink() {
                    files.insert((aside.clone(), path.to_owned()));
                }
                Ok(())
            })?;
        }
        if !files.is_empty() {
            found.push((view, files.len()));
        }
    }
    found.sort();
    Ok(found)
}

/// Moves the layer's files that were changed by hand below `into`, which is created for the first file. Returns whether
/// there were any.
pub(super) fn keep(commands: &str, layer: &Path, into: &Path) -> Result<bool> {
    let edits = Edits::of(commands, layer)?;
    if edits.is_empty() || !fs::symlink_metadata(layer)?.is_dir() {
        return Ok(false);
    }
    let mut any = false;
    edits.find(layer, Path::new(""), &mut |path, found| {
        // Markers of deleted files are not kept.
        if found.is_file() || found.is_symlink() {
            let to = into.join(path);
            fs::create_dir_all(to.parent().unwrap_or(into))?;
            fs::rename(layer.join(path), to)?;
            any = true;
        }
        Ok(())
    })?;
    Ok(any)
}

/// The manual edits of a layer.
struct Edits {
    /// Separate intervals, oldest first, for a binary search: an env sees many commands in its life.
    times: Vec<(i128, i128)>,
    /// Files that count whatever their times are.
    listed: BTreeSet<PathBuf>,
}

impl Edits {
    fn of(commands: &str, layer: &Path) -> Result<Self> {
        let listed = listed(layer)?;
        Ok(Self {
            listed,
            ..Self::at(times(commands))
        })
    }

    fn at(mut times: Vec<(i128, i128)>) -> Self {
        times.sort_unstable();
        let mut separate: Vec<(i128, i128)> = Vec::new();
        for (began, ended) in times {
            let began = began - BEHIND;
            match separate.last_mut().filter(|last| began <= last.1) {
                Some(last) => last.1 = last.1.max(ended),
                None => separate.push((began, ended)),
            }
        }
        Self {
            times: separate,
            listed: BTreeSet::new(),
        }
    }

    /// Returns edits that every file matches.
    fn all() -> Self {
        Self::at(vec![(i128::MIN + BEHIND, i128::MAX)])
    }

    fn is_empty(&self) -> bool {
        self.times.is_empty() && self.listed.is_empty()
    }

    /// Calls `each` with each edited file below a layer, and its path in the layer. A step may be writing there
    /// meanwhile.
    fn find(
        &self,
        layer: &Path,
        below: &Path,
        each: &mut dyn FnMut(&Path, &Metadata) -> Result<()>,
    ) -> Result<()> {
        for from in entries(&layer.join(below))? {
            let Some(found) = if_exists(fs::symlink_metadata(&from))? else {
                continue;
            };
            let path = below.join(from.file_name().unwrap_or_default());
            if found.is_dir() {
                self.find(layer, &path, each)?;
            } else if self.is_edited(&found) || self.listed.contains(&path) {
                each(&path, &found)?;
            }
        }
        Ok(())
    }

    fn is_edited(&self, found: &Metadata) -> bool {
        let changed = changed_at(found);
        let begun = self.times.partition_point(|(began, _)| *began <= changed);
        let last = begun.checked_sub(1).map(|at| self.times[at]);
        last.is_some_and(|(_, ended)| changed <= ended)
    }
}

/// Returns the change time in nanoseconds since 1970.
pub(super) fn changed_at(found: &Metadata) -> i128 {
    i128::from(found.ctime()) * 1_000_000_000 + i128::from(found.ctime_nsec())
}

/// Returns the beginning and the end of each command. Commands without an end come last.
fn times(commands: &str) -> Vec<(i128, i128)> {
    let (mut times, mut running) = (Vec::new(), BTreeSet::new());
    for line in commands.lines() {
        let mut numbers = line.split(' ').map_while(|number| number.parse().ok());
        let Some(began) = numbers.next() else {
            continue;
        };
        if let Some(end) = numbers.next() {
            running.remove(&began);
            times.push((began, end));
        } else {
            running.insert(began);
        }
    }
    times.extend(running.into_iter().map(|began| (began, i128::MAX)));
    times
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_ends_once_and_one_that_was_killed_never() {
        assert_eq!(times(""), []);
        assert_eq!(times("5\n5 7\n"), [(5, 7)]);
        assert_eq!(times("5\n6\n6 9\nx\n"), [(6, 9), (5, i128::MAX)]);
    }

    /// A script may call `exec` thousands of times a day, and an env lives for years.
    #[test]
    fn many_commands_slow_no_command_down() {
        const SECOND: i128 = 1_000_000_000;
        let times_of = |at: i128| (10 * at * SECOND, (10 * at + 5) * SECOND);
        let lines = (1..=100_000).map(times_of);
        let lines = lines.map(|(began, ended)| format!("{began}\n{began} {ended}\n"));
        let commands: String = lines.collect();
        let begun = std::time::Instant::now();
        let edits = Edits::at(times(&commands));
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("now");
        fs::write(&path, "").unwrap();
        let found = fs::metadata(&path).unwrap();
        for _ in 0..20_000 {
            assert!(!edits.is_edited(&found));
        }
        assert!(begun.elapsed() < std::time::Duration::from_secs(10));
        let now = changed_at(&found);
        for (times, edited) in [
            (vec![(now - 9, now - 8), (now - 5, now)], true),
            (vec![(now - 9, now + 9), (now - 8, now - 7)], true),
            (vec![(now + BEHIND, now + SECOND)], true),
            (vec![(now + BEHIND + 1, now + SECOND)], false),
            (vec![(now - 9, now - 1)], false),
            (vec![], false),
        ] {
            assert_eq!(
                Edits::at(times.clone()).is_edited(&found),
                edited,
                "{times:?}"
            );
        }
    }

    #[test]
    fn a_clock_that_is_set_back_hides_no_edit() {
        const HOUR: i64 = 3_600_000_000_000;
        let directory = tempfile::tempdir().unwrap();
        let view = directory.path();
        let (layer, file) = (view.join("layer"), view.join(COMMANDS));
        fs::create_dir(&layer).unwrap();
        fs::write(layer.join("step"), "").unwrap();
        std::thread::sleep(std::time::Duration::from_millis(60));
        let command = ByHand {
            files: vec![file.clone()],
            began: now() + i128::from(HOUR),
            ahead: clock_ahead().map(|ahead| ahead + HOUR),
        };
        append(&file, format!("{}\n", command.began).as_bytes()).unwrap();
        fs::write(layer.join("mine"), "").unwrap();
        command.end().unwrap();
        assert_eq!(listed(&layer).unwrap(), [PathBuf::from("mine")].into());
        let commands = fs::read_to_string(&file).unwrap();
        assert!(times(&commands).iter().all(|(_, end)| *end != i128::MAX));
        fs::remove_file(list_of(&layer)).unwrap();
        assert!(keep(&commands, &layer, &view.join("kept-1")).unwrap());
        assert!(layer.join("step").exists() && view.join("kept-1/mine").exists());
    }

    #[test]
    fn what_a_command_changed_is_moved_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let env = directory.path();
        let view = env.join("views/src");
        let layer = view.join("layer");
        fs::create_dir_all(layer.join("d/e")).unwrap();
        for name in ["d/step", "d/mine", "d/again"] {
            fs::write(layer.join(name), "step").unwrap();
        }
        let pause = || std::thread::sleep(std::time::Duration::from_millis(60));
        let touch = |name: &str| {
            let mode = |mode| std::os::unix::fs::PermissionsExt::from_mode(mode);
            fs::set_permissions(layer.join(name), mode(0o600)).unwrap();
            fs::set_permissions(layer.join(name), mode(0o644)).unwrap();
        };
        let edit = |name: &str| {
            pause();
            let command = ByHand::begin(env).unwrap();
            fs::write(layer.join(name), "mine").unwrap();
            command.end().unwrap();
            pause();
        };
        edit("d/mine");
        edit("d/again");
        edit("d/again");
        // A list that was cut short costs no later entry.
        append(&view.join("layer.hand"), b"\0d/cut").unwrap();
        edit("d/e/new");
        // What a step touches later stays a manual edit.
        for name in ["d/step", "d/mine", "d/again", "d/e/new"] {
            touch(name);
        }
        fs::write(layer.join("later"), "step").unwrap();
        let list = fs::read(view.join("layer.hand")).unwrap();
        let text = String::from_utf8(list).unwrap();
        assert_eq!(text.matches("d/again").count(), 1, "{text:?}");
        let commands = fs::read_to_string(view.join(COMMANDS)).unwrap();
        let into = view.join("kept-1");
        let counted = || count(env).unwrap();
        assert_eq!(counted(), [(view.clone(), 3)]);
        assert!(keep(&commands, &layer, &into).unwrap());
        assert_eq!(counted(), [(view.clone(), 3)]);
        for name in ["d/mine", "d/again", "d/e/new"] {
            assert_eq!(fs::read_to_string(into.join(name)).unwrap(), "mine");
        }
        assert!(layer.join("d/step").exists() && layer.join("later").exists());
        assert!(!into.join("d/step").exists() && !into.join("later").exists());
        assert!(!keep(&commands, &layer, &env.join("none")).unwrap());
        assert!(!env.join("none").exists());
        // Another command may have removed the view by then.
        let command = ByHand::begin(env).unwrap();
        fs::remove_dir_all(env.join("views")).unwrap();
        command.end().unwrap();
    }

    #[test]
    fn too_many_files_for_a_list_leave_the_command_without_an_end() {
        let directory = tempfile::tempdir().unwrap();
        let view = directory.path();
        let layer = view.join("layer");
        fs::create_dir(&layer).unwrap();
        fs::write(layer.join("mine"), "").unwrap();
        let (all, commands) = (Edits::all(), view.join(COMMANDS));
        assert!(!list(&all, &commands, 5).unwrap());
        assert!(listed(&layer).unwrap().is_empty());
        assert!(list(&all, &commands, 6).unwrap());
        assert!(list(&all, &commands, 6).unwrap(), "nothing is new");
        assert!(listed(&layer).unwrap().contains(Path::new("mine")));
    }
}
