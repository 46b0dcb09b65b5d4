//! Owns deleting: an immediate rename into `trash/`, then unlinking by a separate process, so that no command waits
//! for it and a kill does no harm.

use std::collections::BTreeSet;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use fs_err as fs;

use super::check::names;
use super::{Lock, Store, access};
use crate::engine::docker::Service;
use crate::sys::error::{Result, ResultExt as _, is_full};
use crate::tree;

/// The descriptions of layers and images. A directory without one is neither.
const DESCRIPTIONS: [&str; 2] = ["layer.json", "image.json"];
/// Name of the description while its directory is unlinked in place. It goes last, so that `gc` finds the rest.
const REST: &str = "gone.json";

/// Errors of data that stays on its file system and cannot be moved to the trash: the directory that a snapshot of btrfs
/// has in place of a subvolume; what is in another subvolume or project, such as a cache with a quota of its own.
const NOT_MOVED: [ErrorKind; 2] = [ErrorKind::DirectoryNotEmpty, ErrorKind::CrossesDevices];

/// Returns whether a directory is the rest of a layer or image whose removal was interrupted.
pub(super) fn is_rest(directory: &Path) -> bool {
    let is_there = |name: &str| directory.join(name).exists();
    is_there(REST) && !DESCRIPTIONS.into_iter().any(is_there)
}

impl Store {
    /// Moves a file or tree of the store to the trash.
    pub fn discard(&self, path: &Path) -> Result<()> {
        let trash = self.root.join("trash");
        // A link's target is not rockenv's to delete.
        access::Obstacle::check(&trash)?;
        match fs::rename(path, trash.join(self.name_in_trash(path)?)) {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                // Without the directory, nothing would ever be deleted.
                if trash.exists() || fs::symlink_metadata(path).is_err() {
                    return Ok(());
                }
                access::make_directory(&trash)?;
                self.discard(path)
            }
            // A full XFS has no room for the new name, but unlinking needs none.
            Err(error) if is_full(&error) || NOT_MOVED.contains(&error.kind()) => self.unlink(path),
            other => Ok(other?),
        }
    }

    /// Moves those entries of a directory to the trash whose names `goes` accepts.
    pub(super) fn discard_in(&self, directory: &Path, goes: impl Fn(&str) -> bool) -> Result<()> {
        let mut names = names(directory)?;
        names.retain(|name| goes(name));
        names
            .iter()
            .try_for_each(|name| self.discard(&directory.join(name)))
    }

    /// Unlinks a file or tree in place. The description goes first, so that no command mistakes a part for the whole.
    fn unlink(&self, path: &Path) -> Result<()> {
        if !fs::symlink_metadata(path)?.is_dir() {
            return Ok(fs::remove_file(path)?);
        }
        self.remove_objects(path);
        for name in DESCRIPTIONS {
            let description = path.join(name);
            match fs::rename(&description, path.join(REST)) {
                Err(error) if error.kind() != ErrorKind::NotFound => fs::remove_file(&description)?,
                _ => {}
            }
        }
        // The key of an image includes its content, so a new build of it takes what is in `root` for the whole.
        drop(fs::rename(path.join("root"), path.join("gone")));
        let mut outcome = Ok(());
        if path.join(REST).exists() {
            for name in names(path)?.iter().filter(|name| *name != REST) {
                outcome = outcome.and(tree::remove_tree(&path.join(name)));
            }
        }
        outcome
            .and_then(|()| tree::remove_tree(path))
            .context(|| format!("cannot remove `{}`", path.display()))
    }

    pub fn has_trash(&self) -> bool {
        fs::read_dir(self.root.join("trash")).is_ok_and(|mut entries| entries.next().is_some())
    }

    /// Empties the trash; returns false if another process does so already. Entries that must be kept stay. An entry
    /// that cannot be removed does not keep the others, and the first failure is returned.
    pub fn empty_trash(&self) -> Result<bool> {
        let trash = self.root.join("trash");
        loop {
            if !trash.exists() {
                return Ok(true);
            }
            access::Obstacle::check(&trash)?;
            let Some(_lock) = Lock::try_directory(&trash)? else {
                return Ok(false);
            };
            let (mut kept, mut gone) = (false, false);
            let mut outcome = Ok(());
            for entry in fs::read_dir(&trash)? {
                let entry = entry?;
                // Keep the files while the service does not answer: only they name its objects.
                if self.remove_objects(&entry.path()) {
                    gone = true;
                    outcome = outcome.and(tree::remove_tree(&entry.path()));
                } else {
                    kept = true;
                }
            }
            drop(_lock);
            outcome.context(|| "cannot empty the trash".to_owned())?;
            // Repeat for entries that were added meanwhile, which would otherwise wait for the next command. Kept
            // entries may be removable now: an image goes only after its descendants.
            if !self.has_trash() || (kept && !gone) {
                return Ok(true);
            }
        }
    }

    /// Returns the sockets of the services that do not answer and must remove objects before the trash is deleted.
    pub fn trash_waits_for(&self) -> Result<BTreeSet<PathBuf>> {
        let objects = self.objects_in(&self.root.join("trash"))?.into_iter();
        let mut sockets: BTreeSet<PathBuf> = objects.map(|object| object.socket).collect();
        sockets.retain(|socket| Service::connect(socket).is_err());
        Ok(sockets)
    }

    /// Starts a process that empties the trash and writes new layers to disk, without waiting for it.
    pub fn start_background(&self, program: &Path) -> Result<()> {
        std::process::Command::new(program)
            .arg("__reap")
            .arg(&self.root)
            .env_clear()
            .current_dir("/")
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .context(|| format!("cannot start `{}`", program.display()))
            .map(drop)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixListener;

    use super::*;

    #[test]
    fn data_that_cannot_be_renamed_to_the_trash_is_deleted() {
        let (_directory, store) = Store::scratch();
        let elsewhere = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = elsewhere.path().join("cache");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("file"), "x").unwrap();
        store.discard(&path).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn a_missing_trash_directory_is_made_by_what_is_deleted_and_by_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        let root = directory.path().join("store");
        let store = Store::open(&root).unwrap();
        let trash = root.join("trash");
        fs::remove_dir(&trash).unwrap();
        // A lock file in its place would break the store for good.
        assert!(store.empty_trash().unwrap());
        assert!(!trash.exists());
        let layer = root.join("layers/aa");
        fs::create_dir(&layer).unwrap();
        store.discard(&layer).unwrap();
        store.discard(&layer).unwrap();
        assert!(!layer.exists() && store.has_trash());
        assert!(store.empty_trash().unwrap() && !store.has_trash());
        // On a full disk, the layer is unlinked in place.
        fs::create_dir_all(layer.join("root/x")).unwrap();
        fs::write(layer.join("layer.json"), "{}").unwrap();
        store.unlink(&layer).unwrap();
        assert!(!layer.exists() && !store.has_trash());
    }

    #[test]
    fn a_list_of_objects_counts_only_where_rockenv_writes_it() {
        let (directory, store) = Store::scratch();
        let socket = directory.path().join("nobody-answers");
        for (discarded, below, counts) in [
            ("layers/aa", "", true),
            ("images/aa", "", true),
            ("images/tmp-pull-aa", "step-0", true),
            ("envs/e/trees/aa", "", true),
            ("envs/e/trees", "aa", true),
            ("envs/e/tree-aa.damaged-1", "", true),
            ("envs/e/trees.damaged-1", "aa", true),
            // Steps, images and sources have files there.
            ("layers/aa", "root", false),
            ("layers/aa", "volumes/build", false),
            ("images/aa", "root", false),
            ("images/tmp-pull-aa", "image/root", false),
            ("envs/e/trees/aa", "root", false),
            ("envs/e/views", "source", false),
            ("volumes/aa-build-bb", "", false),
            ("caches/ccache/a", "", false),
            ("sources/source-aa.part", "", false),
        ] {
            let path = store.root().join(discarded);
            let list = path.join(below);
            fs::create_dir_all(&list).unwrap();
            let tree = "0123456789abcdef".parse().unwrap();
            store.note_tree(&list, &socket, &tree).unwrap();
            store.discard(&path).unwrap();
            assert!(store.empty_trash().unwrap());
            // The service of a list that counts does not answer, so the files wait.
            assert_eq!(store.has_trash(), counts, "{discarded} {below}");
            let waits_for = store.trash_waits_for().unwrap();
            assert_eq!(waits_for.contains(&socket), counts, "{discarded} {below}");
            if counts {
                // Data that another command has just discarded waits for no service that answers.
                let service = UnixListener::bind(&socket).unwrap();
                std::thread::spawn(move || {
                    let (mut request, _) = service.accept().unwrap();
                    assert_ne!(request.read(&mut [0; 4096]).unwrap(), 0);
                    let answer = b"HTTP/1.1 200 OK\r\nApi-Version: 1.41\r\n\r\n";
                    request.write_all(answer).unwrap();
                });
                assert!(store.trash_waits_for().unwrap().is_empty());
                fs::remove_file(&socket).unwrap();
            }
            tree::remove_tree(&store.root().join("trash")).unwrap();
        }
    }
}
