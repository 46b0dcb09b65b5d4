//! Real file systems for tests: ext4, btrfs or xfs in a sparse file, mounted through a loop device.
//!
//! The mount lives in a mount namespace of the calling thread (threads and commands that it starts share it, others do
//! not), the file is unlinked once it is mounted, and the loop device frees itself with the last mount. So nothing is
//! left behind, even by a panic or SIGKILL.

#![allow(dead_code, reason = "each test program uses a part")]

use std::cell::Cell;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sched::{CloneFlags, unshare};

use super::ordinary::Ordinary;

/// 4 GB.
pub(super) const SIZE: u64 = 4 << 30;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    Ext4,
    Btrfs,
    /// With shared extents.
    Xfs,
}

impl Kind {
    pub(crate) const ALL: [Self; 3] = [Self::Ext4, Self::Btrfs, Self::Xfs];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Btrfs => "btrfs",
            Self::Xfs => "xfs",
        }
    }
}

/// Fails a test that needs root, with a message that says so.
pub(crate) fn need_root() {
    assert!(
        nix::unistd::geteuid().is_root(),
        "this test mounts file systems and needs root: run the tests with sudo"
    );
}

thread_local! {
    static PRIVATE: Cell<bool> = const { Cell::new(false) };
}

/// Gives the calling thread its own mount namespace, once. Its mounts end with the thread.
pub(crate) fn private_mounts() {
    need_root();
    if PRIVATE.replace(true) {
        return;
    }
    unshare(CloneFlags::CLONE_FS | CloneFlags::CLONE_NEWNS).expect("a mount namespace");
    let flags = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    mount(None::<&str>, "/", None::<&str>, flags, None::<&str>).expect("private mounts");
}

/// A mounted file system, unmounted when dropped.
#[derive(Debug)]
pub(crate) struct LoopFs {
    // Declared before the directory, so that it is unmounted before the directory is removed.
    mount: Mount,
    _directory: tempfile::TempDir,
}

impl LoopFs {
    /// Makes an empty file system of 4 GB in a sparse file.
    pub(crate) fn new(kind: Kind) -> Self {
        Self::sized(kind, SIZE)
    }

    /// Makes an empty file system. xfs needs at least 300 MB, btrfs 110.
    pub(crate) fn sized(kind: Kind, bytes: u64) -> Self {
        Self::mounted(kind, |image| format(kind, bytes, image))
    }

    /// Makes a file system of 4 GB with a store in `store` and image `base` already built, as a copy of a template.
    pub(crate) fn with_base(kind: Kind) -> Self {
        // An ordinary user's stores are on another disk.
        if Ordinary::get().is_some() {
            return Self::new(kind);
        }
        let template = super::template::disk(kind);
        Self::mounted(kind, |image| {
            let mut copy = Command::new("cp");
            run(copy
                .arg("--sparse=always")
                .args([template.as_path(), image]));
            // Several copies are mounted at the same time, and btrfs identifies file systems by UUID.
            if kind == Kind::Btrfs {
                run(Command::new("btrfstune").arg("-m").arg(image));
            }
        })
    }

    /// Mounts the file system that `make` writes to a file.
    fn mounted(kind: Kind, make: impl FnOnce(&Path)) -> Self {
        private_mounts();
        let directory = tempfile::Builder::new()
            .prefix("rockenv-loopfs-")
            .tempdir()
            .expect("a temporary directory");
        let image = directory.path().join("image");
        make(&image);
        let mount = mount_file(kind, &image, directory.path().join("fs"));
        fs_err::remove_file(&image).expect("the image is removed");
        Self {
            mount,
            _directory: directory,
        }
    }

    /// Makes a file system in memory, for tests that write much and would wait for the disk at every sync.
    pub(crate) fn in_memory(bytes: u64) -> Self {
        private_mounts();
        let directory = tempfile::Builder::new()
            .prefix("rockenv-memory-")
            .tempdir()
            .expect("a temporary directory");
        let at = directory.path().join("fs");
        fs_err::create_dir(&at).expect("a mount point");
        let size = format!("size={bytes},mode=755");
        let none = Some("none");
        let kind = Some("tmpfs");
        mount(none, &at, kind, MsFlags::empty(), Some(size.as_str())).expect("a tmpfs");
        Self {
            mount: Mount(at),
            _directory: directory,
        }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.mount.0
    }

    /// Returns a path in the file system.
    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.mount.0.join(name)
    }
}

/// Makes an empty file system in a new file.
pub(super) fn format(kind: Kind, bytes: u64, image: &Path) {
    let file = fs_err::File::create(image).expect("an image file");
    file.set_len(bytes).expect("a sparse image file");
    let arguments: &[&str] = match kind {
        // Extended attributes fit into inodes of 512 bytes. Outside the inode, files with equal attributes share a
        // block,
        // which counts into the size of each file.
        Kind::Ext4 => &["mkfs.ext4", "-q", "-F", "-I", "512"],
        Kind::Btrfs => &["mkfs.btrfs", "-q"],
        Kind::Xfs => &["mkfs.xfs", "-q", "-m", "reflink=1"],
    };
    run(Command::new(arguments[0]).args(&arguments[1..]).arg(image));
}

/// Mounts the file system in a file at a new directory.
pub(super) fn mount_file(kind: Kind, image: &Path, at: PathBuf) -> Mount {
    fs_err::create_dir(&at).expect("a mount point");
    let options = match kind {
        // The original of this copy may be mounted too.
        Kind::Xfs => "loop,nouuid",
        Kind::Ext4 | Kind::Btrfs => "loop",
    };
    let mut command = Command::new("mount");
    run(command.args(["-o", options]).arg(image).arg(&at));
    Mount(at)
}

/// A mount of the test, unmounted when dropped.
#[derive(Debug)]
pub(crate) struct Mount(pub(crate) PathBuf);

impl Drop for Mount {
    fn drop(&mut self) {
        // Lazy, because a failed test may have files open. The namespace ends with the thread in any case.
        let _ = umount2(&self.0, MntFlags::MNT_DETACH);
    }
}

/// Bind-mounts `from` at `at`.
pub(crate) fn bind(from: &Path, at: &Path) -> Mount {
    private_mounts();
    mount(Some(from), at, None::<&str>, MsFlags::MS_BIND, None::<&str>).expect("a bind mount");
    Mount(at.to_owned())
}

/// Runs a command that must succeed, and returns its standard output.
pub(crate) fn run(command: &mut Command) -> String {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    String::from_utf8_lossy(&output.stdout).into_owned()
}
