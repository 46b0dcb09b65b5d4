//! Owns the other end of sending files, as a hidden subcommand: an archive on standard input becomes the directory that stands
//! for the sender's, except for what was changed there.
//!
//! `sent.json` says what was sent. Before anything changes it says what is about to be, so that whoever comes after a kill
//! knows both for the sender's. What is replaced or removed is moved to `out/` first, and looked at again there.

use std::io::Write as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::{Deserialize, Serialize};

use super::merge::{Here, Merge, Sent, There, merge};
use super::tree::{Seen, Tree};
use crate::store::lock::Lock;
use crate::sys::atomic;
use crate::sys::error::{Error, Kind, Result, ResultExt as _};
use crate::tree::remove_tree;

/// What of a working directory rockenv looks at, and so is always sent.
pub(crate) const LOOKED_AT: [&str; 3] = ["profiles", "images", "hooks"];
/// What was sent.
const SENT: &str = "sent.json";
/// How long another sender is waited for.
const PATIENCE: Duration = Duration::from_secs(60);

/// What became of what was sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Outcome {
    /// Changed on both machines; if there are any, nothing was done.
    pub(crate) conflicts: Vec<PathBuf>,
    /// Changed there only, and not sent.
    pub(crate) kept: Vec<PathBuf>,
    /// Changed there, gone here, and not removed.
    pub(crate) left: Vec<PathBuf>,
    /// What was there, and its name now.
    pub(crate) aside: Vec<(PathBuf, PathBuf)>,
}

/// Returns whether rockenv looks at what is at `path` below the working directory.
pub(crate) fn is_looked_at(path: &Path) -> bool {
    let ending = path.extension();
    LOOKED_AT
        .iter()
        .any(|directory| path.starts_with(directory))
        || path.components().count() == 1
            && ending.is_some_and(|ending| ending == "toml" || ending == "lock")
}

/// `__receive DIRECTORY refuse|backup PATH...`: takes what is sent, which is what rockenv looks at and what is at these paths,
/// and prints the outcome.
pub(crate) fn receive(arguments: &[String]) -> Result<()> {
    let [place, conflicts, more @ ..] = arguments else {
        return Err(Error::new(
            Kind::Usage,
            "this subcommand is rockenv's own, on another machine",
        ));
    };
    let sent_now =
        |path: &Path| is_looked_at(path) || more.iter().any(|more| path.starts_with(more));
    let aside = conflicts == "backup";
    let place = Path::new(place);
    let outcome = take(
        place,
        std::io::stdin().lock(),
        &sent_now,
        aside,
        &mut || Ok(()),
    )?;
    let text = serde_json::to_string(&outcome)
        .map_err(|error| Error::unexpected("cannot encode the result").source(error))?;
    let mut out = std::io::stdout();
    out.write_all(text.as_bytes())?;
    Ok(out.flush()?)
}

/// Takes an archive; `before` is called ahead of each change, where a test can stop it.
fn take(
    place: &Path,
    archive: impl std::io::BufRead,
    sent_now: &dyn Fn(&Path) -> bool,
    aside: bool,
    before: &mut dyn FnMut() -> Result<()>,
) -> Result<Outcome> {
    let work = place.join("work");
    fs::create_dir_all(&work)?;
    // What is sent may be for nobody else.
    fs::set_permissions(place, std::fs::Permissions::from_mode(0o700))?;
    let what = "the directory that files are sent to";
    let _lock = Lock::exclusive(&place.join("lock"), what, "on", PATIENCE)?;
    let sent: Sent = atomic::read_json(&place.join(SENT))?.unwrap_or_default();
    let mut outcome = Outcome::default();
    let work = Tree::open(&work)?;
    let [incoming, out] = ["in", "out"].map(|name| place.join(name));
    rescue(&sent, &work, &out, &mut outcome)?;
    for directory in [&incoming, &out] {
        remove_tree(directory)?;
        fs::create_dir(directory)?;
    }
    let directories = unpack(archive, &incoming)?;
    let [incoming, out] = [incoming, out].map(|path| Tree::open(&path));
    let receiving = Receiving {
        work,
        incoming: incoming?,
        out: out?,
        sent,
    };
    let mut here = Here::new();
    for path in receiving.incoming.leaves(Path::new(""))? {
        if let Seen::Is(state) = receiving.incoming.look(&path)? {
            here.insert(path, state);
        }
    }
    let merge = merge(&receiving.sent, &here, sent_now, &receiving.work, aside)?;
    if !merge.conflicts.is_empty() && !aside {
        outcome.conflicts = merge.conflicts.into_iter().collect();
        remove_tree(&place.join("in"))?;
        return Ok(outcome);
    }
    let write = |sent: &Sent| atomic::write_json(&place.join(SENT), sent);
    if !merge.changes_nothing() {
        // A file that a machine lost with its power must not look as if somebody had changed it.
        for path in &merge.send {
            receiving.incoming.sync(path)?;
        }
        before()?;
        write(&merge.meanwhile(&receiving.sent, &here))?;
        receiving.apply(&merge, &mut outcome, before)?;
    }
    for directory in directories {
        // Where something else is, no file needs it: that one would be a conflict.
        if receiving.work.look(&directory)? == Seen::Absent {
            receiving.work.make(&directory)?;
        }
    }
    // Before it is forgotten what these were: they would be put back.
    before()?;
    remove_tree(&place.join("out"))?;
    let afterwards = merge.afterwards(&receiving.sent, &here);
    if !merge.changes_nothing() || afterwards != receiving.sent {
        before()?;
        write(&afterwards)?;
    }
    remove_tree(&place.join("in"))?;
    outcome.kept = merge.kept;
    outcome.left = merge.left;
    Ok(outcome)
}

/// Unpacks into an empty directory; returns the directories among it. One line before the archive says how many entries it has.
fn unpack(mut archive: impl std::io::BufRead, into: &Path) -> Result<Vec<PathBuf>> {
    let cut_off = || Error::unexpected("the transfer was cut off");
    let mut line = String::new();
    archive.read_line(&mut line)?;
    let mut missing: usize = line.trim_end().parse().map_err(|_| cut_off())?;
    let mut directories = Vec::new();
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_mtime(true);
    for entry in archive.entries()? {
        let mut entry = entry.context(|| "cannot read the transfer".to_owned())?;
        missing = missing.checked_sub(1).ok_or_else(cut_off)?;
        if entry.header().entry_type().is_dir() {
            // Whoever sends it may be unable to write in it; we have to.
            directories.push(entry.path()?.components().collect());
        } else {
            let path = entry.path()?.into_owned();
            let size = entry.size();
            let unpacked = entry.unpack_in(into);
            if !unpacked.context(|| format!("cannot store `{}`", path.display()))? {
                return Err(Error::invalid(format!(
                    "`{}` is not below the working directory",
                    path.display()
                )));
            }
            let found = fs::symlink_metadata(into.join(&path))?;
            if found.is_file() && found.len() != size {
                return Err(cut_off());
            }
        }
    }
    match missing {
        0 => Ok(directories),
        _ => Err(cut_off()),
    }
}

/// Puts back what a killed sender had moved out of the way, unless that was what had been sent.
fn rescue(sent: &Sent, work: &Tree, out: &Path, outcome: &mut Outcome) -> Result<()> {
    if fs::symlink_metadata(out).is_err() {
        return Ok(());
    }
    let out = Tree::open(out)?;
    for path in out.leaves(Path::new(""))? {
        let was_sent = match out.look(&path)? {
            Seen::Is(state) => sent
                .get(&path)
                .is_some_and(|states| states.contains(&state)),
            _ => false,
        };
        if !was_sent && !out.give(&path, work, &path)? {
            let name = work.set_aside(&path, &out)?;
            outcome.aside.push((path, name));
        }
    }
    Ok(())
}

impl There for Tree {
    fn look(&self, path: &Path) -> Result<Seen> {
        Self::look(self, path)
    }

    fn leaves(&self, path: &Path) -> Result<Vec<PathBuf>> {
        Self::leaves(self, path)
    }
}

struct Receiving {
    work: Tree,
    incoming: Tree,
    out: Tree,
    sent: Sent,
}

impl Receiving {
    fn apply(
        &self,
        merge: &Merge,
        outcome: &mut Outcome,
        before: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        for path in &merge.remove {
            before()?;
            self.withdraw(path)?;
        }
        // A directory among them may have held some of these.
        for path in &merge.conflicts {
            before()?;
            let name = self.work.set_aside(path, &self.work)?;
            outcome.aside.push((path.clone(), name));
        }
        for path in &merge.send {
            match self.work.look(path)? {
                Seen::Absent => {}
                Seen::Directory => self.work.remove_empty(path)?,
                Seen::Is(_) | Seen::Other => {
                    before()?;
                    self.withdraw(path)?;
                }
            }
            before()?;
            if !self.incoming.give(path, &self.work, path)? {
                return Err(meanwhile(path));
            }
        }
        Ok(())
    }

    /// Moves out what was sent, and nothing that was written since it was looked at.
    fn withdraw(&self, path: &Path) -> Result<()> {
        if !self.work.give(path, &self.out, path)? {
            return Err(meanwhile(path));
        }
        let was_sent = match self.out.look(path)? {
            Seen::Is(state) => self
                .sent
                .get(path)
                .is_some_and(|states| states.contains(&state)),
            _ => false,
        };
        if was_sent {
            return Ok(());
        }
        if !self.out.give(path, &self.work, path)? {
            self.work.set_aside(path, &self.out)?;
        }
        Err(meanwhile(path))
    }
}

fn meanwhile(path: &Path) -> Error {
    Error::busy(format!(
        "`{}` was changed on the other machine while files were sent",
        path.display()
    ))
    .help("run it again when no program writes there")
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    /// Two directories that stand for two machines.
    struct Machines {
        directory: tempfile::TempDir,
    }

    impl Machines {
        fn new() -> Self {
            // Every change is written to disk, which is not what is tested.
            let directory = tempfile::tempdir_in("/dev/shm").unwrap();
            fs::create_dir_all(directory.path().join("there/work")).unwrap();
            fs::create_dir(directory.path().join("here")).unwrap();
            Self { directory }
        }

        fn here(&self) -> PathBuf {
            self.directory.path().join("here")
        }

        fn there(&self) -> PathBuf {
            self.directory.path().join("there/work")
        }

        fn archive(&self) -> Vec<u8> {
            let paths = Tree::open(&self.here())
                .unwrap()
                .leaves(Path::new(""))
                .unwrap();
            let mut bytes = format!("{}\n", paths.len()).into_bytes();
            let mut archive = tar::Builder::new(&mut bytes);
            archive.follow_symlinks(false);
            for path in paths {
                archive
                    .append_path_with_name(self.here().join(&path), path)
                    .unwrap();
            }
            archive.finish().unwrap();
            drop(archive);
            bytes
        }

        fn send(&self, aside: bool, before: &mut dyn FnMut() -> Result<()>) -> Result<Outcome> {
            let place = self.directory.path().join("there");
            take(&place, self.archive().as_slice(), &|_| true, aside, before)
        }

        fn sent(&self, aside: bool) -> Outcome {
            self.send(aside, &mut || Ok(())).unwrap()
        }
    }

    fn put(root: &Path, path: &str, text: &str) {
        let path = root.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }

    /// Removes whatever is there; a file on the way to it too.
    fn clear(root: &Path, path: &str) {
        let path = root.join(path);
        for at in path.ancestors().take_while(|at| *at != root) {
            if fs::symlink_metadata(at).is_ok_and(|found| at == path || !found.is_dir()) {
                remove_tree(at).unwrap();
            }
        }
    }

    /// The content of all files.
    fn contents(root: &Path) -> BTreeMap<String, String> {
        let leaves = Tree::open(root).unwrap().leaves(Path::new("")).unwrap();
        let read = |path: PathBuf| {
            let text = fs::read_to_string(root.join(&path)).unwrap();
            (path.display().to_string(), text)
        };
        leaves.into_iter().map(read).collect()
    }

    fn names(paths: &[PathBuf]) -> Vec<String> {
        paths
            .iter()
            .map(|path| path.display().to_string())
            .collect()
    }

    #[test]
    fn what_was_changed_there_stays_until_somebody_decides() {
        let machines = Machines::new();
        let (here, there) = (machines.here(), machines.there());
        for name in ["same", "d/theirs", "both", "goes"] {
            put(&here, name, "sent");
        }
        assert_eq!(machines.sent(false), Outcome::default());
        assert_eq!(contents(&there), contents(&here));
        // Only there.
        put(&there, "d/theirs", "result");
        put(&there, "made", "there");
        let outcome = machines.sent(false);
        assert_eq!(names(&outcome.kept), ["d/theirs"]);
        // On both sides: nothing is done, not even to other files.
        put(&there, "both", "result");
        put(&here, "both", "changed");
        put(&here, "same", "new");
        fs::remove_file(here.join("goes")).unwrap();
        let before = contents(&there);
        let outcome = machines.sent(false);
        assert_eq!(names(&outcome.conflicts), ["both"]);
        assert_eq!(contents(&there), before);
        let outcome = machines.sent(true);
        assert_eq!(outcome.aside, [("both".into(), "both.~1~".into())]);
        let expected = [
            ("both", "changed"),
            ("both.~1~", "result"),
            ("d/theirs", "result"),
            ("made", "there"),
            ("same", "new"),
        ];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(contents(&there), expected.into());
        // Gone here, it belongs to the other side, and is said to once.
        fs::remove_file(here.join("d/theirs")).unwrap();
        assert_eq!(names(&machines.sent(false).left), ["d/theirs"]);
        assert_eq!(machines.sent(false), Outcome::default());
        assert_eq!(contents(&there)["d/theirs"], "result");
        // The same change on both sides is none.
        put(&here, "same", "x");
        put(&there, "same", "x");
        assert_eq!(machines.sent(false), Outcome::default());
    }

    #[test]
    fn links_there_lead_nowhere() {
        let machines = Machines::new();
        let (here, there) = (machines.here(), machines.there());
        let outside = machines.directory.path().join("outside");
        put(&outside, "file", "sent");
        put(&here, "d/file", "sent");
        machines.sent(false);
        remove_tree(&there.join("d")).unwrap();
        fs::os::unix::fs::symlink(&outside, there.join("d")).unwrap();
        put(&here, "d/file", "new");
        assert_eq!(names(&machines.sent(false).conflicts), ["d"]);
        fs::remove_file(here.join("d/file")).unwrap();
        machines.sent(false);
        assert_eq!(contents(&outside)["file"], "sent");
        assert!(fs::read_link(there.join("d")).is_ok());
    }

    #[test]
    fn files_become_directories_and_the_other_way_round() {
        let machines = Machines::new();
        let (here, there) = (machines.here(), machines.there());
        for _ in 0..2 {
            put(&here, "a/b/c", "deep");
            assert_eq!(machines.sent(false), Outcome::default());
            assert_eq!(contents(&there), contents(&here));
            remove_tree(&here.join("a")).unwrap();
            put(&here, "a", "file");
            assert_eq!(machines.sent(false), Outcome::default());
            assert_eq!(contents(&there), contents(&here));
            fs::remove_file(here.join("a")).unwrap();
        }
        put(&here, "a/b/c", "deep");
        machines.sent(false);
        put(&there, "a/made", "there");
        remove_tree(&here.join("a")).unwrap();
        put(&here, "a", "file");
        assert_eq!(names(&machines.sent(false).conflicts), ["a"]);
        machines.sent(true);
        let expected = [("a", "file"), ("a.~1~/made", "there")];
        let expected = expected.map(|(name, text)| (name.to_owned(), text.to_owned()));
        assert_eq!(contents(&there), expected.into());
    }

    #[test]
    fn what_was_cut_off_changes_nothing() {
        let machines = Machines::new();
        for name in ["a", "b", "c"] {
            put(&machines.here(), name, &name.repeat(600));
        }
        machines.sent(false);
        put(&machines.here(), "a", "new");
        let before = contents(&machines.there());
        let archive = machines.archive();
        // All of it but its end, which nobody needs.
        for length in (0..archive.len() - 2048).step_by(256) {
            let place = machines.directory.path().join("there");
            let error = take(&place, &archive[..length], &|_| true, false, &mut || Ok(()));
            assert!(error.is_err(), "{length}");
            assert_eq!(contents(&machines.there()), before);
        }
    }

    const PATHS: [&str; 5] = ["a", "a/b", "c", "d/e", "d/f"];

    #[derive(Clone, Debug)]
    enum Act {
        /// Here or there: a file with a number as content, or none.
        Put(bool, usize, Option<u8>),
        /// Killed ahead of so many changes, or not.
        Send { aside: bool, killed: Option<usize> },
    }

    fn act() -> impl Strategy<Value = Act> {
        let killed = prop::option::of(0usize..8);
        prop_oneof![
            3 => (any::<bool>(), 0..PATHS.len(), prop::option::of(0u8..3)).prop_map(|(here, path, text)| Act::Put(here, path, text)),
            2 => (any::<bool>(), killed).prop_map(|(aside, killed)| Act::Send { aside, killed }),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 150, failure_persistence: None, ..ProptestConfig::default() })]
        /// Whatever is done where, and wherever a sender is killed: what was written there is there, by its name or beside it.
        #[test]
        fn nothing_that_was_written_there_is_lost(acts in prop::collection::vec(act(), 1..30)) {
            let machines = Machines::new();
            // What was written there and not removed there, by path.
            let mut theirs: BTreeMap<String, String> = BTreeMap::new();
            for act in acts {
                match act {
                    Act::Put(is_here, path, text) => {
                        let path = PATHS[path];
                        let root = if is_here { machines.here() } else { machines.there() };
                        clear(&root, path);
                        let related = |other: &str| {
                            Path::new(other).starts_with(path) || Path::new(path).starts_with(other)
                        };
                        if !is_here {
                            theirs.retain(|other, _| !related(other));
                        }
                        if let Some(text) = text {
                            let text = format!("{}{text}", if is_here { "here" } else { "there" });
                            put(&root, path, &text);
                            if !is_here {
                                theirs.insert(path.to_owned(), text);
                            }
                        }
                    }
                    Act::Send { aside, killed } => {
                        let mut left = killed.unwrap_or(usize::MAX);
                        let outcome = machines.send(aside, &mut || {
                            left = left.checked_sub(1).ok_or_else(|| Error::unexpected("killed"))?;
                            Ok(())
                        });
                        let there = contents(&machines.there());
                        let is_killed = outcome.is_err();
                        for (path, text) in &theirs {
                            let mut all = there.iter();
                            // Its directory may be what has another name now.
                            let found = all.any(|(name, found)| found == text && name.starts_with(&path[..1]));
                            prop_assert!(is_killed || found, "{path}: {text} is not in {there:?}");
                        }
                        if outcome.as_ref().is_ok_and(|outcome| outcome.conflicts.is_empty()) {
                            let kept = outcome.unwrap().kept;
                            for (path, text) in contents(&machines.here()) {
                                let is_kept = kept.contains(&PathBuf::from(&path));
                                prop_assert!(is_kept || there.get(&path) == Some(&text), "{path} was not sent: {there:?}");
                            }
                        }
                    }
                }
            }
            machines.sent(true);
            let there = contents(&machines.there());
            for (path, text) in &theirs {
                prop_assert!(there.values().any(|found| found == text), "{path}: {text} is not in {there:?}");
            }
        }
    }
}
