//! Owns the build user: the invoking user's ids, named `builder` inside.
//!
//! The tree is untrusted (an image may contain any link), so the kernel resolves every path in it below its root.

use std::io::{Read as _, Write as _};
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::path::Path;

use nix::dir::Dir;
use nix::fcntl::OFlag;
use nix::sys::stat::{Mode, SFlag, fchmod, fstat, mkdirat};
use nix::unistd::{Gid, Uid, UnlinkatFlags, fchown, unlinkat};

pub(crate) use crate::plan::resolve::BuildUser;
use crate::sys::beneath;
use crate::sys::error::{Result, ResultExt as _};

/// Maximum size of an account file, in bytes; a larger one is an attack or an accident.
pub(crate) const MAX_ACCOUNT_FILE: u64 = 1 << 20;

/// Search depth for mount points below a home.
const MAX_DEPTH: usize = 16;

impl BuildUser {
    /// Adds the user to the tree at `root`: passwd and group lines and a home directory.
    pub fn ensure(&self, root: &Path) -> Result<()> {
        let root = beneath::open_path(root)?;
        let etc = below(root.as_fd(), "etc", OFlag::O_PATH | OFlag::O_DIRECTORY)
            .context(|| "cannot open `/etc` of the image".to_owned())?;
        for account in self.accounts() {
            append_account(root.as_fd(), etc.as_fd(), &account)?;
        }
        self.make_home(root.as_fd())
    }

    /// Returns the user's lines in the account files.
    pub(crate) fn accounts(&self) -> [Account; 2] {
        let (name, uid, gid, home) = (&self.name, self.uid, self.gid, &self.home);
        let account = |file, number, line| Account {
            file,
            name: name.clone(),
            number,
            line,
        };
        let passwd = format!("{name}:x:{uid}:{gid}::{home}:/bin/sh");
        [
            account("group", gid, format!("{name}:x:{gid}:")),
            account("passwd", uid, passwd),
        ]
    }

    fn make_home(&self, root: BorrowedFd<'_>) -> Result<()> {
        let (parent, name) = self.home.rsplit_once('/').unwrap_or(("", &self.home));
        let parent = parent.trim_start_matches('/');
        if !parent.is_empty() && below(root, parent, OFlag::O_PATH | OFlag::O_DIRECTORY).is_err() {
            mkdirat(root, parent, Mode::from_bits_truncate(0o755))
                .context(|| format!("cannot make `/{parent}` in the image"))?;
        }
        let path = if parent.is_empty() { "." } else { parent };
        let parent = below(root, path, OFlag::O_PATH | OFlag::O_DIRECTORY)
            .context(|| format!("cannot open `/{parent}` of the image"))?;
        match mkdirat(&parent, name, Mode::from_bits_truncate(0o755)) {
            Err(nix::Error::EEXIST) => self.take_home(&parent, name),
            made => {
                made.context(|| format!("cannot make `{}` in the image", self.home))?;
                self.give_home(&parent, name)
            }
        }
    }

    /// Gives the user a home that root owns only because an engine created it for a mount point below.
    fn take_home(&self, parent: &OwnedFd, name: &str) -> Result<()> {
        let Ok(home) = beneath::open_dir(parent, name) else {
            return Ok(());
        };
        if self.uid == 0 || fstat(&home)?.st_uid != 0 || !is_bare(home, MAX_DEPTH) {
            return Ok(());
        }
        self.give_home(parent, name)
    }

    fn give_home(&self, parent: &OwnedFd, name: &str) -> Result<()> {
        beneath::set_owner(parent, name, self.uid, self.gid)
            .context(|| format!("cannot give `{}` to the build user", self.home))
    }
}

/// Returns whether a directory contains only root's directories, and mount points.
fn is_bare(directory: OwnedFd, depth: usize) -> bool {
    let Ok(mut directory) = Dir::from_fd(directory) else {
        return false;
    };
    let entries: Vec<_> = directory.iter().collect();
    entries.into_iter().all(|entry| {
        let Ok(entry) = entry else { return false };
        if matches!(entry.file_name().to_bytes(), b"." | b"..") {
            return true;
        }
        match beneath::open_dir(&directory, entry.file_name()) {
            Err(nix::Error::EXDEV) => true,
            Err(_) => false,
            Ok(below) => {
                depth > 0
                    && fstat(&below).is_ok_and(|found| found.st_uid == 0)
                    && is_bare(below, depth - 1)
            }
        }
    })
}

/// Opens a path inside the tree, resolving links as if the tree were `/`.
fn below(root: BorrowedFd<'_>, path: &str, flags: OFlag) -> nix::Result<OwnedFd> {
    beneath::open_by(root, path, flags, beneath::IN_ROOT)
}

/// A line of an account file.
pub(crate) struct Account {
    /// The file in `/etc`.
    pub(crate) file: &'static str,
    name: String,
    number: u32,
    line: String,
}

impl Account {
    /// Returns the file's content with the line added; `None` if the file already has the name or the id. Full names in
    /// it may be in any encoding.
    pub(crate) fn added_to(&self, text: &[u8]) -> Option<Vec<u8>> {
        let is_known = String::from_utf8_lossy(text).lines().any(|line| {
            let mut fields = line.split(':');
            fields.next() == Some(&*self.name)
                || fields.nth(1).and_then(|id| id.parse().ok()) == Some(self.number)
        });
        let end: &[u8] = match text.is_empty() || text.ends_with(b"\n") {
            true => b"",
            false => b"\n",
        };
        (!is_known).then(|| [text, end, self.line.as_bytes(), b"\n"].concat())
    }
}

/// Adds a line to an account file unless its name or id exists; replaces the file atomically. In images of Nix it is a
/// link into the Nix store, which stays as it is.
fn append_account(root: BorrowedFd<'_>, etc: BorrowedFd<'_>, account: &Account) -> Result<()> {
    let file = account.file;
    let mut text = Vec::new();
    let mut mode = Mode::from_bits_truncate(0o644);
    let opened = below(root, &format!("etc/{file}"), OFlag::O_PATH)
        .and_then(|found| beneath::open_regular(found, OFlag::O_RDONLY));
    match opened {
        Ok(fd) => {
            let status = fstat(&fd)?;
            if beneath::kind(&status) != SFlag::S_IFREG
                || status.st_size.unsigned_abs() > MAX_ACCOUNT_FILE
            {
                return Err(invalid!(
                    "`/etc/{file}` of the image is not an ordinary account file"
                ));
            }
            mode = Mode::from_bits_truncate(status.st_mode & 0o7777);
            fs_err::File::from_parts(fd.into(), file)
                .take(MAX_ACCOUNT_FILE)
                .read_to_end(&mut text)?;
        }
        Err(nix::Error::ENOENT) => {}
        Err(error) => {
            return Err(error).context(|| format!("cannot read `/etc/{file}` of the image"));
        }
    }
    let Some(text) = account.added_to(&text) else {
        return Ok(());
    };
    let temporary = format!(".{file}.rockenv");
    // The path may hold a leftover of a killed command, or a FIFO or device that root of the container planted.
    match unlinkat(etc, temporary.as_str(), UnlinkatFlags::NoRemoveDir) {
        Err(nix::Error::ENOENT) => {}
        removed => {
            removed.context(|| format!("cannot remove `/etc/{temporary}` of the image"))?;
        }
    }
    let cannot = || format!("cannot write `/etc/{file}` of the image");
    let fd = beneath::create(etc, temporary.as_str()).context(cannot)?;
    fchown(&fd, Some(Uid::from_raw(0)), Some(Gid::from_raw(0)))?;
    fchmod(&fd, mode)?;
    fs_err::File::from_parts(fd.into(), file)
        .write_all(&text)
        .context(cannot)?;
    nix::fcntl::renameat(etc, temporary.as_str(), etc, file)
        .context(|| format!("cannot replace `/etc/{file}` of the image"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use fs_err as fs;

    fn tree() -> tempfile::TempDir {
        let tree = tempfile::tempdir().unwrap();
        fs::create_dir(tree.path().join("etc")).unwrap();
        fs::write(tree.path().join("etc/passwd"), "root:x:0:0::/root:/bin/sh").unwrap();
        fs::write(tree.path().join("etc/group"), "root:x:0:\n").unwrap();
        tree
    }

    #[test]
    fn the_user_is_added_once() {
        let tree = tree();
        let user = BuildUser::new(1000, 1000);
        let passwd = tree.path().join("etc/passwd");
        // A full name in Latin-1.
        let before = b"root:x:0:0:J\xfcrgen:/root:/bin/sh";
        fs::write(&passwd, before).unwrap();
        user.ensure(tree.path()).unwrap();
        user.ensure(tree.path()).unwrap();
        let added = b"\nbuilder:x:1000:1000::/home/builder:/bin/sh\n";
        assert_eq!(fs::read(&passwd).unwrap(), [&before[..], added].concat());
        assert!(tree.path().join("home/builder").is_dir());
    }

    #[test]
    fn a_home_that_only_a_mount_made_is_the_user_s() {
        use std::os::unix::fs::MetadataExt as _;
        let tree = tree();
        let home = tree.path().join("home/builder");
        fs::create_dir_all(home.join("a/b")).unwrap();
        let owner = || fs::metadata(&home).unwrap().uid();
        fs::write(home.join("a/file"), "").unwrap();
        BuildUser::new(1000, 1000).ensure(tree.path()).unwrap();
        assert_eq!(owner(), 0);
        fs::remove_file(home.join("a/file")).unwrap();
        BuildUser::new(1000, 1000).ensure(tree.path()).unwrap();
        assert_eq!(owner(), 1000);
        assert_eq!(fs::metadata(home.join("a")).unwrap().uid(), 0);
    }

    #[test]
    fn root_stays_root_and_gets_the_home() {
        let tree = tree();
        BuildUser::new(0, 0).ensure(tree.path()).unwrap();
        let passwd = fs::read_to_string(tree.path().join("etc/passwd")).unwrap();
        assert_eq!(passwd, "root:x:0:0::/root:/bin/sh");
        assert!(tree.path().join("home/builder").is_dir());
    }

    #[test]
    fn a_link_leads_into_the_tree_and_nowhere_else() {
        let tree = tree();
        let outside = tempfile::tempdir().unwrap();
        let host = outside.path().join("passwd");
        let [link, stored] = ["etc/passwd", "passwd"].map(|path| tree.path().join(path));
        fs::write(&host, "host\n").unwrap();
        let added = "builder:x:1000:1000::/home/builder:/bin/sh\n";
        for (target, before) in [
            (host.as_path(), ""),
            (Path::new("/passwd"), "root:x:0:0:\n"),
        ] {
            fs::write(&stored, before).unwrap();
            fs::remove_file(&link).unwrap();
            fs_err::os::unix::fs::symlink(target, &link).unwrap();
            BuildUser::new(1000, 1000).ensure(tree.path()).unwrap();
            let text = fs::read_to_string(&link).unwrap();
            assert_eq!(text, format!("{before}{added}"));
            assert!(!fs::symlink_metadata(&link).unwrap().is_symlink());
            assert_eq!(fs::read_to_string(&stored).unwrap(), before);
        }
        assert_eq!(fs::read_to_string(&host).unwrap(), "host\n");
    }

    #[test]
    fn what_lies_where_a_file_is_prepared_is_not_opened() {
        use std::os::unix::fs::FileTypeExt as _;
        let tree = tree();
        let etc = tree.path().join("etc");
        let outside = tree.path().join("outside");
        fs::write(&outside, "").unwrap();
        nix::unistd::mkfifo(&etc.join(".passwd.rockenv"), Mode::S_IRWXU).unwrap();
        fs_err::os::unix::fs::symlink(&outside, etc.join(".group.rockenv")).unwrap();
        BuildUser::new(1000, 1000).ensure(tree.path()).unwrap();
        let kind = fs::symlink_metadata(etc.join("passwd"))
            .unwrap()
            .file_type();
        assert!(kind.is_file() && !kind.is_fifo());
        assert_eq!(fs::read_to_string(outside).unwrap(), "");
        assert!(!etc.join(".passwd.rockenv").exists());
    }

    #[test]
    fn only_a_regular_file_is_opened() {
        let tree = tree();
        let passwd = tree.path().join("etc/passwd");
        let refused = || {
            let error = BuildUser::new(1000, 1000).ensure(tree.path());
            assert_has!(error.unwrap_err().message(), "ordinary");
            fs::remove_file(&passwd).unwrap();
        };
        fs::remove_file(&passwd).unwrap();
        nix::unistd::mkfifo(&passwd, Mode::S_IRWXU).unwrap();
        refused();
        // Opening a socket would fail.
        let _listener = std::os::unix::net::UnixListener::bind(&passwd).unwrap();
        refused();
    }
}
