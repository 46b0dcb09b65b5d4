//! Owns sending files: they become a fresh directory on the other machine, named after its content. Existing
//! directories are never modified, because commands leave their results among the files.
//!
//! The sender writes one line that lists the files. The receiver answers with a line that lists the missing ones, and
//! the sender follows with an archive of those. The receiver's last line names the directory.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Read as _, Write};
use std::os::fd::AsFd as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::remote_exec;
use super::ssh::SshConnection;
use super::tree::{Seen, Tree};
use crate::store::lock::Lock;
use crate::sys::error::{Result, ResultExt as _};
use crate::sys::trust;
use crate::tree::{file, remove_tree};
use crate::ui::{Ui, size};

/// Symlink to the directory of the last command.
pub(crate) const LATEST: &str = "latest";
/// Transfer size above which a note appears, because sending may take seconds.
const LARGE: u64 = 1 << 20;
/// Maximum length of a line in bytes. A list of a million files takes half of it.
const LONGEST: u64 = 512 << 20;
/// How long to wait for another sender's lock.
const PATIENCE: Duration = Duration::from_secs(60);

/// Files and directories by path.
pub(crate) type Manifest = BTreeMap<PathBuf, Seen>;

/// Where the sent files are.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Received {
    pub(crate) directory: String,
    /// An earlier directory for the same files, and a file in it that has changed since.
    pub(crate) changed: Option<(String, PathBuf)>,
}

/// Returns a short digest of the bytes, for use as a name.
pub(crate) fn short(bytes: &[u8]) -> String {
    hex::encode(Sha256::digest(bytes))[..16].to_owned()
}

/// Sends files below `working` into a directory below `place` on the other machine.
pub(crate) fn send(
    ui: &Ui,
    ssh: &SshConnection<'_>,
    program: &str,
    place: &str,
    working: &Path,
    manifest: &Manifest,
) -> Result<Received> {
    let script = r#"exec "$HOME/$1" __receive "$HOME/$2""#;
    ssh.run_script("store files", script, &[program, place], |pipe, reply| {
        let mut pipe = io::BufWriter::new(pipe);
        write_line(&mut pipe, manifest)?;
        let mut reply = BufReader::new(reply);
        let missing: Vec<PathBuf> = read_line(&mut reply)?;
        let seen = missing.iter().filter_map(|path| manifest.get(path));
        let bytes = seen.map(Seen::size).sum::<u64>();
        if bytes >= LARGE {
            let bytes = size::bytes(bytes);
            ui.note(&format!("sending {bytes} to {}", ssh.machine));
        }
        if !missing.is_empty() {
            let mut archive = tar::Builder::new(&mut pipe);
            archive.follow_symlinks(false);
            for path in missing.iter().filter(|path| manifest.contains_key(*path)) {
                archive.append_path_with_name(working.join(path), path)?;
            }
            archive.finish()?;
        }
        drop(pipe.into_inner()?);
        read_line(&mut reply)
    })
}

/// `__receive PLACE`: receives files into a directory below PLACE.
pub(crate) fn receive(arguments: &[String]) -> Result<()> {
    let [place] = arguments else {
        return Err(remote_exec::usage());
    };
    take(Path::new(place), io::stdin().lock(), io::stdout())
}

fn take(place: &Path, mut from: impl BufRead, mut to: impl Write) -> Result<()> {
    let manifest: Manifest = read_line(&mut from)?;
    fs::create_dir_all(place)?;
    // The files may be private.
    fs::set_permissions(place, std::fs::Permissions::from_mode(0o700))?;
    let what = "the directory that files are sent to";
    let _lock = Lock::exclusive(&place.join("lock"), what, "on", PATIENCE)?;
    let (received, is_there) = choose(place, &manifest)?;
    let directory = place.join(&received.directory);
    let latest = place.join(LATEST);
    let new = place.join("new");
    remove_tree(&new)?;
    let missing = match is_there {
        true => Vec::new(),
        false => copy_unchanged(&latest, &new, &manifest)?,
    };
    write_line(&mut to, &missing)?;
    if !missing.is_empty() {
        unpack(from, &new)?;
        check(&Tree::open(&new)?, &manifest, &missing)?;
    }
    if !is_there {
        fs::rename(new, directory)?;
    }
    let link = place.join("latest.new");
    remove_tree(&link)?;
    symlink(&received.directory, &link)?;
    fs::rename(link, latest)?;
    Ok(write_line(&mut to, &received)?)
}

/// Returns the directory for these files, and whether it exists. A directory in which a command changed a sent file
/// stays as it is and is not reused.
fn choose(place: &Path, manifest: &Manifest) -> Result<(Received, bool)> {
    let digest = short(&encode(manifest)?);
    let (mut last, mut directory) = (None, digest.clone());
    let mut number = 1;
    while fs::symlink_metadata(place.join(&directory)).is_ok() {
        number += 1;
        let next = format!("{digest}-{number}");
        last = Some(std::mem::replace(&mut directory, next));
    }
    let mut changed = None;
    // Only the last directory is compared, because a comparison reads all files: an earlier one had changed before the
    // next one was made.
    if let Some(last) = last {
        match first_difference(&Tree::open(&place.join(&last))?, manifest)? {
            Some(path) => changed = Some((last, path)),
            None => {
                let directory = last;
                return Ok((Received { directory, changed }, true));
            }
        }
    }
    Ok((Received { directory, changed }, false))
}

fn first_difference(tree: &Tree, manifest: &Manifest) -> Result<Option<PathBuf>> {
    for (path, seen) in manifest {
        if tree.stat(path)? != *seen {
            return Ok(Some(path.clone()));
        }
    }
    let is_new = |path: &PathBuf| !manifest.contains_key(path);
    Ok(for_rockenv(tree)?.into_iter().find(is_new))
}

/// Lists the files in a directory that rockenv would read, whether they were sent or not.
fn for_rockenv(tree: &Tree) -> Result<Vec<PathBuf>> {
    let mut found = Vec::new();
    for name in [trust::CONFIGURATION].into_iter().chain(trust::DIRECTORIES) {
        let name = PathBuf::from(name);
        match tree.stat(&name)? {
            Seen::Absent => {}
            Seen::Directory => found.extend(tree.leaves(&name)?),
            Seen::Is { .. } | Seen::Other => found.push(name),
        }
    }
    Ok(found)
}

/// Creates the directories, and copies unchanged files from the last directory, with shared blocks where the file
/// system supports them. Returns the missing files.
fn copy_unchanged(latest: &Path, new: &Path, manifest: &Manifest) -> Result<Vec<PathBuf>> {
    fs::create_dir(new)?;
    let tree = Tree::open(new)?;
    let previous = Tree::open(latest).ok();
    let mut missing = Vec::new();
    for (path, seen) in manifest {
        if *seen == Seen::Directory {
            tree.make(path)?;
            continue;
        }
        let is_same = match &previous {
            Some(previous) => previous.stat(path)? == *seen,
            None => false,
        };
        if is_same && let Some(old) = file::open(latest, path)? {
            file::place(new, path, old.as_fd())?;
            if let Some(copy) = file::open(new, path)? {
                let metadata = old.metadata()?;
                copy.set_permissions(metadata.permissions())?;
                copy.set_modified(metadata.modified()?)?;
            }
        }
        // The file may have changed during the copy.
        if !is_same || tree.stat(path)? != *seen {
            missing.push(path.clone());
        }
    }
    Ok(missing)
}

fn unpack(archive: impl BufRead, into: &Path) -> Result<()> {
    let mut archive = tar::Archive::new(archive);
    archive.set_preserve_mtime(true);
    for entry in archive.entries()? {
        let mut entry = entry.context(|| "cannot read the transfer".to_owned())?;
        let path = entry.path()?.into_owned();
        let unpacked = entry.unpack_in(into);
        if !unpacked.context(|| format!("cannot store `{}`", path.display()))? {
            let path = path.display();
            return Err(invalid!("`{path}` is not below the working directory"));
        }
    }
    // The sender keeps writing until it closes its end.
    io::copy(&mut archive.into_inner(), &mut io::sink())?;
    Ok(())
}

/// Compares the received files with the manifest and syncs them to disk.
fn check(tree: &Tree, manifest: &Manifest, missing: &[PathBuf]) -> Result<()> {
    for path in missing {
        if tree.stat(path)? != manifest[path] {
            return Err(busy!(
                "`{}` changed while it was being sent, or the transfer was interrupted",
                path.display()
            )
            .help("run the command again"));
        }
        // A power failure must not leave a truncated file under its final name.
        tree.sync(path)?;
    }
    Ok(())
}

fn encode(value: &impl Serialize) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(value)?)
}

fn write_line(to: &mut impl Write, value: &impl Serialize) -> io::Result<()> {
    let mut line = encode(value)?;
    line.push(b'\n');
    to.write_all(&line)?;
    to.flush()
}

fn read_line<T: DeserializeOwned>(from: &mut impl BufRead) -> io::Result<T> {
    let mut line = String::new();
    match from.take(LONGEST).read_line(&mut line)? {
        0 => Err(io::ErrorKind::UnexpectedEof.into()),
        _ => Ok(serde_json::from_str(&line)?),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Two directories that stand in for two machines.
    struct Machines(tempfile::TempDir);

    impl Machines {
        fn new() -> Self {
            let directory = tempfile::tempdir().unwrap();
            fs::create_dir(directory.path().join("here")).unwrap();
            Self(directory)
        }

        fn put(&self, path: &str, text: &str) {
            let path = self.0.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }

        fn read(&self, path: &str) -> String {
            fs::read_to_string(self.0.path().join(path)).unwrap()
        }

        /// Returns a sender's output that offers `manifest` and contains `files`.
        fn sent(&self, manifest: &Manifest, files: &[&str]) -> Vec<u8> {
            let mut bytes = Vec::new();
            write_line(&mut bytes, manifest).unwrap();
            let mut archive = tar::Builder::new(bytes);
            for file in files {
                archive
                    .append_path_with_name(self.0.path().join("here").join(file), file)
                    .unwrap();
            }
            archive.into_inner().unwrap()
        }

        fn manifest(&self, files: &[&str]) -> Manifest {
            let here = Tree::open(&self.0.path().join("here")).unwrap();
            let see = |file: &&str| (PathBuf::from(file), here.stat(file.as_ref()).unwrap());
            files.iter().map(see).collect()
        }

        /// Offers `manifest` and sends `files`. Returns the files that were missing, and where the files are.
        fn take(&self, manifest: &Manifest, files: &[&str]) -> (Vec<PathBuf>, Received) {
            let (sent, mut reply) = (self.sent(manifest, files), Vec::new());
            take(&self.0.path().join("there"), sent.as_slice(), &mut reply).unwrap();
            let mut reply = reply.as_slice();
            let missing = read_line(&mut reply).unwrap();
            (missing, read_line(&mut reply).unwrap())
        }

        fn send(&self, files: &[&str]) -> (Vec<PathBuf>, Received) {
            let (missing, received) = self.take(&self.manifest(files), files);
            for file in files {
                let there = format!("there/{}/{file}", received.directory);
                assert_eq!(self.read(&there), self.read(&format!("here/{file}")));
            }
            (missing, received)
        }
    }

    #[test]
    fn each_content_has_a_directory_and_only_changes_are_sent() {
        let machines = Machines::new();
        machines.put("here/same", "sent");
        machines.put("here/d/other", "sent");
        let (missing, first) = machines.send(&["same", "d/other"]);
        assert_eq!(missing.len(), 2);
        // A command's result stays, and the same files lead to the same directory.
        machines.put(&format!("there/{}/made", first.directory), "result");
        let (missing, again) = machines.send(&["same", "d/other"]);
        assert_eq!((missing, &again.directory), (vec![], &first.directory));
        assert_eq!(machines.read("there/latest/made"), "result");
        machines.put("here/d/other", "changed");
        let (missing, second) = machines.send(&["same", "d/other"]);
        assert_eq!(missing, [PathBuf::from("d/other")]);
        let in_first = |name: &str| machines.read(&format!("there/{}/{name}", first.directory));
        assert_eq!(in_first("d/other"), "sent");
        // Files are not hard-linked, so a change on the other machine affects only one directory.
        machines.put(&format!("there/{}/same", second.directory), "theirs");
        assert_eq!(in_first("same"), "sent");
        machines.put("here/d/other", "sent");
        let again = machines.send(&["same", "d/other"]).1;
        assert_eq!(again.directory, first.directory);
    }

    #[test]
    fn what_was_changed_there_stays_beside_a_fresh_directory() {
        let machines = Machines::new();
        machines.put("here/file", "sent");
        let first = machines.send(&["file"]).1;
        let theirs = format!("there/{}/file", first.directory);
        machines.put(&theirs, "result");
        let second = machines.send(&["file"]).1;
        let changed = Some((first.directory.clone(), "file".into()));
        assert_eq!(second.changed, changed);
        assert_ne!(second.directory, first.directory);
        assert_eq!(machines.read(&theirs), "result");
        let third = machines.send(&["file"]).1;
        assert_eq!(third.directory, second.directory);
        assert_eq!(third.changed, None);
        // Only the last directory is compared, because each run of a step that changes its source adds one.
        machines.put(&theirs, "sent");
        assert_eq!(machines.send(&["file"]).1.directory, second.directory);
        // A link in place of a sent file is not followed.
        let outside = machines.0.path().join("outside");
        fs::write(&outside, "outside").unwrap();
        let there = machines.0.path().join("there");
        let link = there.join(&second.directory).join("file");
        fs::remove_file(&link).unwrap();
        symlink(&outside, &link).unwrap();
        machines.send(&["file"]);
        assert_eq!(machines.read("outside"), "outside");
    }

    #[test]
    fn a_profile_that_was_not_sent_is_in_no_directory_that_is_used_again() {
        let machines = Machines::new();
        machines.put("here/profiles/a.toml", "sent");
        let files = ["profiles", "profiles/a.toml"];
        let manifest = machines.manifest(&files);
        let take = || machines.take(&manifest, &files[1..]).1;
        let mut before = take().directory;
        for made in ["profiles/b.toml", "rockenv.toml", "hooks/h/hook.toml"] {
            machines.put(&format!("there/{before}/out/made"), "result");
            assert_eq!(take().directory, before);
            let place = format!("there/{before}/{made}");
            machines.put(&place, "made there");
            let fresh = take();
            assert_eq!(fresh.changed, Some((before.clone(), made.into())));
            assert_ne!(fresh.directory, before);
            assert_eq!(machines.read(&place), "made there");
            before = fresh.directory;
        }
    }

    #[test]
    fn what_was_cut_off_or_is_something_else_becomes_nothing() {
        let machines = Machines::new();
        let there = machines.0.path().join("there");
        for name in ["a", "b", "c"] {
            machines.put(&format!("here/{name}"), &name.repeat(600));
        }
        let manifest = machines.manifest(&["a", "b", "c"]);
        let sent = machines.sent(&manifest, &["a", "b", "c"]);
        let is_refused = |sent: &[u8]| take(&there, sent, io::sink()).is_err();
        // Truncated anywhere before the archive's end marker, which is optional.
        for length in (0..sent.len() - 2048).step_by(256) {
            assert!(is_refused(&sent[..length]), "{length}");
        }
        assert!(is_refused(&machines.sent(&manifest, &["a", "b"])));
        machines.put("here/b", "something else");
        assert!(is_refused(&machines.sent(&manifest, &["a", "b", "c"])));
        let outside = Manifest::from([(PathBuf::from("../x"), Seen::Directory)]);
        assert!(is_refused(&machines.sent(&outside, &[])));
        let names = fs::read_dir(&there).unwrap();
        let mut names: Vec<_> = names.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["lock", "new"]);
        assert!(!machines.0.path().join("x").exists());
        machines.send(&["a", "b", "c"]);
        assert!(!there.join("new").exists());
    }
}
