//! Owns the ordinary user that rockenv runs as beside a rootless service; the tests themselves stay root, who sees everything.

use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;

use super::loopfs::run;
use super::run::sha256;

/// The user that `tests/service rootless` made.
#[derive(Debug)]
pub(crate) struct Ordinary {
    pub(crate) uid: u32,
    /// A directory of the user's on a disk, with room for stores.
    pub(crate) directory: PathBuf,
}

impl Ordinary {
    /// Returns the user; `None` where the tests run as root only.
    pub(crate) fn get() -> Option<Self> {
        let text = std::env::vars_os()
            .find(|(name, _)| name == "ROCKENV_TEST_USER")?
            .1;
        let text = text.into_string().expect("UID:DIRECTORY");
        let (uid, directory) = text.split_once(':').expect("UID:DIRECTORY");
        Some(Self {
            uid: uid.parse().expect("a number"),
            directory: directory.into(),
        })
    }

    /// Gives a file or directory to the user.
    pub(crate) fn own(&self, path: &Path) {
        chown(path, Some(self.uid), Some(self.uid)).expect("a new owner");
    }

    /// Gives what root has below a directory to the user: what a test wrote there as the user's.
    pub(crate) fn own_all(&self, directory: &Path) {
        let owner = format!("{0}:{0}", self.uid);
        let from = ["-R", "-h", "--from=root", &owner];
        run(Command::new("chown").args(from).arg(directory));
    }

    /// Starts `command` as the user.
    pub(crate) fn become_user(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.uid);
    }

    /// Returns rockenv where the user may read it.
    pub(crate) fn program(&self) -> PathBuf {
        let copy = self.directory.join("rockenv");
        if !copy.exists() {
            // Several tests at once: none sees half of it.
            let new = self
                .directory
                .join(format!("rockenv.{:?}", std::thread::current().id()));
            fs::copy(env!("CARGO_BIN_EXE_rockenv"), &new).expect("a copy of rockenv");
            fs::rename(new, &copy).expect("a copy of rockenv");
        }
        copy
    }

    /// Returns an archive of the tree at `rootfs`, and its digest: the user may not read all of the tree.
    pub(crate) fn archive(&self, rootfs: &Path) -> (PathBuf, String) {
        let path = self.directory.join("base.tar");
        if !path.exists() {
            run(Command::new("tar")
                .arg("-C")
                .arg(rootfs)
                .arg("-cf")
                .arg(&path)
                .arg("."));
        }
        let digest = sha256(&path);
        (path, digest)
    }
}
