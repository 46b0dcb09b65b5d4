//! Owns the ordinary user that rockenv runs as with a rootless service. The tests stay root, which sees everything.

use std::ffi::OsStr;
use std::os::unix::fs::chown;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use fs_err as fs;

use super::loopfs::{Mount, bind, run};
use super::run::sha256;

/// The user that `tests/service rootless` made.
#[derive(Debug)]
pub(crate) struct Ordinary {
    pub(crate) uid: u32,
    /// A directory of the user on a disk with room for stores.
    pub(crate) directory: PathBuf,
}

impl Ordinary {
    /// Returns the user; `None` if the tests run only as root.
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

    /// Gives root's files below a directory to the user: the test wrote them on the user's behalf.
    pub(crate) fn own_all(&self, directory: &Path) {
        let owner = format!("{0}:{0}", self.uid);
        let from = ["-R", "-h", "--from=root", &owner];
        run(Command::new("chown").args(from).arg(directory));
    }

    /// Starts `command` as the user.
    pub(crate) fn become_user(&self, command: &mut Command) {
        command.uid(self.uid).gid(self.uid);
    }

    /// Returns a copy of rockenv that the user can read.
    pub(crate) fn program(&self) -> PathBuf {
        self.made_once("rockenv", super::run::copy_program)
    }

    /// Returns an archive of the tree at `rootfs`, and its digest. The user may not read every file of the tree itself.
    pub(crate) fn archive(&self, rootfs: &Path) -> (PathBuf, String) {
        let path = self.made_once("base.tar", |new| {
            let mut tar = Command::new("tar");
            run(tar.arg("-C").arg(rootfs).arg("-cf").arg(new).arg("."));
        });
        let digest = sha256(&path);
        (path, digest)
    }

    /// Returns a file of the user's directory that `make` creates if it is missing. Other tests that need the file at
    /// the same time wait until it is complete. The file is never replaced, because other tests may run it.
    fn made_once(&self, name: &str, make: impl FnOnce(&Path)) -> PathBuf {
        static MAKING: Mutex<()> = Mutex::new(());
        let path = self.directory.join(name);
        let _making = MAKING.lock().expect("files of other tests");
        if !path.exists() {
            make(&path);
        }
        path
    }
}

/// A user with subordinate ids and full sudo rights, who exists only in this thread's mount namespace.
#[derive(Debug)]
pub(crate) struct MadeUp {
    /// The user's home directory.
    pub(crate) home: PathBuf,
    _known: Vec<Mount>,
    _files: tempfile::TempDir,
}

impl MadeUp {
    pub(crate) const UID: u32 = 4321;
    /// The first of the user's subordinate ids.
    pub(crate) const SUBORDINATE: u32 = 400_000;

    /// Creates the user with a home at `home`, and rockenv in it.
    pub(crate) fn at(home: PathBuf) -> Self {
        let files = tempfile::tempdir().expect("a directory");
        let known = [
            (
                "passwd",
                format!("rockenv-made-up:x:{0}:{0}::/:/bin/sh", Self::UID),
            ),
            (
                "subuid",
                format!("rockenv-made-up:{}:65536", Self::SUBORDINATE),
            ),
            (
                "subgid",
                format!("rockenv-made-up:{}:65536", Self::SUBORDINATE),
            ),
            ("shadow", "rockenv-made-up:*:20000:0:99999:7:::".to_owned()),
            (
                "sudoers",
                "rockenv-made-up ALL=(ALL) NOPASSWD: ALL".to_owned(),
            ),
        ];
        let known = known.map(|(name, line)| {
            let (etc, own) = (Path::new("/etc").join(name), files.path().join(name));
            fs::copy(&etc, &own).expect("a copy");
            let text = fs::read_to_string(&own).expect("a text");
            let mode = fs::metadata(&etc).expect("a mode").permissions();
            fs::write(&own, format!("{}\n{line}\n", text.trim_end())).expect("one line more");
            fs::set_permissions(&own, mode).expect("the same mode");
            bind(&own, &etc)
        });
        fs::create_dir(&home).expect("a home");
        chown(&home, Some(Self::UID), Some(Self::UID)).expect("a new owner");
        super::run::copy_program(&home.join("program"));
        Self {
            home,
            _known: known.into(),
            _files: files,
        }
    }

    /// Makes a command that the user runs.
    pub(crate) fn command(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
        let mut command = Command::new(program);
        command
            .args(arguments)
            .env_clear()
            .env("PATH", "/usr/sbin:/usr/bin:/sbin:/bin")
            .env("HOME", &self.home)
            .env("ROCKENV_HOME", self.store())
            .env("XDG_CONFIG_HOME", self.home.join(".config"))
            .current_dir(&self.home)
            .uid(Self::UID)
            .gid(Self::UID);
        command
    }

    /// Runs rockenv as the user; it must succeed.
    pub(crate) fn rockenv(&self, arguments: &[&str]) -> String {
        run(&mut self.command(self.program(), arguments))
    }

    /// Makes a command that the user runs through sudo, as root.
    pub(crate) fn sudo(&self, program: impl AsRef<OsStr>, arguments: &[&str]) -> Command {
        let mut command = self.command("sudo", &["-n", "--preserve-env=ROCKENV_HOME", "--"]);
        command.arg(program.as_ref()).args(arguments);
        command
    }

    pub(crate) fn program(&self) -> PathBuf {
        self.home.join("program")
    }

    pub(crate) fn store(&self) -> PathBuf {
        self.home.join("store")
    }
}
