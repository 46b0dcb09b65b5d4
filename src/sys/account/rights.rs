//! Owns the rights for opening and changing the calling user's files.
//!
//! Root called through `sudo` never walks a path of that user: between two accesses the user, or a step that runs as
//! the user, could place a symlink there. Instead root asks a process that runs as the user, which makes the system
//! calls that take a path and sends descriptors back. No descriptor that only root could open is sent to that process.

use std::ffi::{CString, OsStr};
use std::os::fd::{AsFd as _, AsRawFd, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::{Mutex, OnceLock, PoisonError};

use nix::NixPath;
use nix::errno::Errno;
use nix::fcntl::{AT_FDCWD, AtFlags, OFlag, OpenHow, ResolveFlag};
use nix::sys::stat::{Mode, UtimensatFlags, umask, utimensat};
use nix::sys::time::TimeSpec;
use nix::unistd::{Gid, Uid, UnlinkatFlags};
use serde::{Deserialize, Serialize};

use super::Person;

use crate::sys::beneath::{self, openat2};
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::sys::frames;

/// The hidden subcommand of the process that runs as the user.
pub(crate) const SUBCOMMAND: &str = "__as-caller";

/// Whose rights apply. Every path is below an open directory; [`Rights::open`] and [`Rights::open_named`] also take a
/// path that the user named.
#[derive(Debug)]
pub(crate) enum Rights {
    Own,
    /// The rights of the user behind `sudo`, with the connection to a process of that user once it runs.
    Of(Person, Mutex<Option<UnixStream>>),
}

/// A system call; descriptors of the directories that its paths are below are sent with it.
#[derive(Debug, Serialize, Deserialize)]
enum Call {
    Open {
        path: Vec<u8>,
        flags: i32,
        mode: u32,
        resolve: u64,
    },
    MakeDirectory {
        path: Vec<u8>,
        mode: u32,
    },
    Symlink {
        target: Vec<u8>,
        path: Vec<u8>,
    },
    Link {
        from: Vec<u8>,
        to: Vec<u8>,
    },
    SetTime {
        path: Vec<u8>,
        mtime: (i64, i64),
    },
    SetMode {
        path: Vec<u8>,
        mode: u32,
    },
    Rename {
        from: Vec<u8>,
        to: Vec<u8>,
        replace: bool,
    },
    Unlink {
        path: Vec<u8>,
        is_directory: bool,
    },
    RemoveTree {
        path: Vec<u8>,
    },
}

/// The error number, or 0; a descriptor may be sent with it.
type Answer = i32;

/// The kernel's id for users and groups that a user namespace has no id for.
const OVERFLOW: u32 = 65_534;

const ROOTS_UMASK: Mode = Mode::S_IWGRP.union(Mode::S_IWOTH);
/// The caller's umask, if root's own has replaced it.
static UMASK: OnceLock<Mode> = OnceLock::new();

/// Sets the umask of root, also of a user namespace. Files that root makes in the store, in containers and for git must
/// be readable by the build user and writable only by their owner, independent of the caller's umask. Files of the
/// caller still get the caller's umask.
pub(crate) fn set_umask() {
    UMASK.get_or_init(|| umask(ROOTS_UMASK));
}

pub(crate) fn caller_umask() -> Option<Mode> {
    UMASK.get().copied()
}

/// Sets the caller's umask again, for a command that only writes the caller's files.
pub(super) fn restore_umask() {
    if let Some(own) = caller_umask() {
        umask(own);
    }
}

impl Rights {
    /// Returns the mode for creating a file of the caller, less the caller's umask if the kernel does not clear all of
    /// it. In a directory with a default access control list, the kernel clears nothing, and the list limits the mode.
    fn masked(&self, mode: Mode) -> u32 {
        let own = caller_umask().unwrap_or(Mode::empty());
        match self {
            Self::Own if !ROOTS_UMASK.contains(own) => mode.difference(own).bits(),
            Self::Own | Self::Of(..) => mode.bits(),
        }
    }

    /// Returns the user behind `sudo`, if these are that user's rights.
    pub(crate) fn person(&self) -> Option<&Person> {
        match self {
            Self::Own => None,
            Self::Of(person, _) => Some(person),
        }
    }

    /// Opens a path below `at`, or relative to the working directory.
    pub(crate) fn open<P: ?Sized + NixPath>(
        &self,
        at: Option<BorrowedFd<'_>>,
        path: &P,
        flags: OFlag,
        mode: Mode,
        resolve: ResolveFlag,
    ) -> nix::Result<OwnedFd> {
        // The kernel refuses O_NOCTTY together with O_PATH.
        let flags = match flags.contains(OFlag::O_PATH) {
            true => flags,
            false => flags | OFlag::O_NOCTTY,
        };
        let call = Call::Open {
            path: bytes(path)?,
            flags: (flags | OFlag::O_CLOEXEC).bits(),
            mode: self.masked(mode),
            resolve: resolve.bits(),
        };
        let directories: Vec<_> = at.into_iter().collect();
        self.make(&call, &directories)?.ok_or(Errno::EBADF)
    }

    /// Opens an existing path that the user named, following its links.
    pub(crate) fn open_named(&self, path: &Path, flags: OFlag) -> nix::Result<OwnedFd> {
        self.open(None, path, flags, Mode::empty(), ResolveFlag::empty())
    }

    pub(crate) fn make_directory<P: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        path: &P,
        mode: Mode,
    ) -> nix::Result<()> {
        let (path, mode) = (bytes(path)?, self.masked(mode));
        self.make(&Call::MakeDirectory { path, mode }, &[at])
            .map(drop)
    }

    pub(crate) fn symlink<T: ?Sized + NixPath, P: ?Sized + NixPath>(
        &self,
        target: &T,
        at: BorrowedFd<'_>,
        path: &P,
    ) -> nix::Result<()> {
        let (target, path) = (bytes(target)?, bytes(path)?);
        self.make(&Call::Symlink { target, path }, &[at]).map(drop)
    }

    pub(crate) fn link<F: ?Sized + NixPath, T: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        from: &F,
        below: BorrowedFd<'_>,
        to: &T,
    ) -> nix::Result<()> {
        let (from, to) = (bytes(from)?, bytes(to)?);
        self.make(&Call::Link { from, to }, &[at, below]).map(drop)
    }

    /// Renames an entry of a directory. Without `replace`, an existing entry is never replaced, on any file system.
    pub(crate) fn rename<F: ?Sized + NixPath, T: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        from: &F,
        to: &T,
        replace: bool,
    ) -> nix::Result<()> {
        let (from, to) = (bytes(from)?, bytes(to)?);
        self.make(&Call::Rename { from, to, replace }, &[at])
            .map(drop)
    }

    /// Sets an entry's modification time, never that of a symlink's target.
    pub(crate) fn set_time<P: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        path: &P,
        mtime: (i64, i64),
    ) -> nix::Result<()> {
        let path = bytes(path)?;
        self.make(&Call::SetTime { path, mtime }, &[at]).map(drop)
    }

    /// Sets a directory's mode. Its set-group-ID bit stays: the user set it, or the parent directory has it, and it
    /// gives new files the directory's group, which may be a team's.
    pub(crate) fn set_mode<P: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        path: &P,
        mode: u32,
    ) -> nix::Result<()> {
        let path = bytes(path)?;
        self.make(&Call::SetMode { path, mode }, &[at]).map(drop)
    }

    pub(crate) fn unlink<P: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        path: &P,
        is_directory: bool,
    ) -> nix::Result<()> {
        let call = Call::Unlink {
            path: bytes(path)?,
            is_directory,
        };
        self.make(&call, &[at]).map(drop)
    }

    pub(crate) fn remove_tree<P: ?Sized + NixPath>(
        &self,
        at: BorrowedFd<'_>,
        path: &P,
    ) -> nix::Result<()> {
        let path = bytes(path)?;
        self.make(&Call::RemoveTree { path }, &[at]).map(drop)
    }

    pub(crate) fn exists<P: ?Sized + NixPath>(&self, at: BorrowedFd<'_>, path: &P) -> bool {
        let flags = OFlag::O_PATH | OFlag::O_NOFOLLOW;
        self.open(Some(at), path, flags, Mode::empty(), ResolveFlag::empty())
            .is_ok()
    }

    /// Returns the owner for files that root creates in a directory or in place of a file: the same as its owner, if
    /// root acts for itself.
    pub(crate) fn owner_for_root_files(
        &self,
        like: BorrowedFd<'_>,
    ) -> nix::Result<Option<(u32, u32)>> {
        let found = nix::sys::stat::fstat(like)?;
        // In a user namespace, ids outside it are shown as this one, which is a subordinate id of the caller inside.
        // rockenv in a container does not know whether it is in one.
        let is_outside = [found.st_uid, found.st_gid].contains(&OVERFLOW);
        let gives = matches!(self, Self::Own) && nix::unistd::geteuid().is_root() && !is_outside;
        Ok(gives.then_some((found.st_uid, found.st_gid)))
    }

    fn make(&self, call: &Call, directories: &[BorrowedFd<'_>]) -> nix::Result<Option<OwnedFd>> {
        match self {
            Self::Own => call.make(directories),
            Self::Of(person, way) => {
                let mut way = way.lock().unwrap_or_else(PoisonError::into_inner);
                let way = match &mut *way {
                    Some(way) => way,
                    none => none.insert(start(person).map_err(|_| Errno::ECHILD)?),
                };
                let numbers: Vec<RawFd> = directories.iter().map(AsRawFd::as_raw_fd).collect();
                frames::send(way, call, &numbers).map_err(|_| Errno::EPIPE)?;
                match frames::receive::<Answer>(way) {
                    Ok(Some((0, descriptors))) => Ok(descriptors.into_iter().next()),
                    Ok(Some((errno, _))) => Err(Errno::from_raw(errno)),
                    Ok(None) | Err(_) => Err(Errno::EPIPE),
                }
            }
        }
    }

    /// Makes the error for a path that the user named but may not write to; `place` completes "cannot write".
    pub(super) fn may_not_write(&self, place: &str, errno: Errno) -> Error {
        let message = match self {
            Self::Own => format!("cannot write {place}"),
            Self::Of(person, _) => {
                let name = super::name_of(person.uid);
                format!("user {name} cannot write {place}; rockenv writes files as this user")
            }
        };
        let error = usage!("{message}").source(std::io::Error::from(errno));
        error.help("name a directory of your own")
    }

    /// Makes the error for a failed access in a directory.
    pub(crate) fn refused(&self, directory: &Path, errno: Errno) -> Error {
        let shown = directory.display();
        if is_refusal(errno) {
            return self.may_not_write(&format!("to directory `{shown}`"), errno);
        }
        Error::from(errno).explained(format!("cannot write in `{shown}`"))
    }
}

pub(super) fn is_refusal(errno: Errno) -> bool {
    matches!(errno, Errno::EACCES | Errno::EPERM | Errno::EROFS)
}

fn bytes<P: ?Sized + NixPath>(path: &P) -> nix::Result<Vec<u8>> {
    path.with_nix_path(|path| path.to_bytes().to_vec())
}

impl Call {
    fn make(&self, directories: &[BorrowedFd<'_>]) -> nix::Result<Option<OwnedFd>> {
        let at = directories.first().copied().unwrap_or(AT_FDCWD);
        match self {
            Self::Open {
                path,
                flags,
                mode,
                resolve,
            } => {
                let how = OpenHow::new()
                    .flags(OFlag::from_bits_retain(*flags))
                    .mode(Mode::from_bits_truncate(*mode))
                    .resolve(ResolveFlag::from_bits_retain(*resolve));
                return openat2(at, &path[..], how).map(Some);
            }
            Self::MakeDirectory { path, mode } => {
                nix::sys::stat::mkdirat(at, &path[..], Mode::from_bits_truncate(*mode))?;
            }
            Self::Symlink { target, path } => {
                nix::unistd::symlinkat(&target[..], at, &path[..])?;
            }
            Self::Link { from, to } => {
                let below = directories.get(1).copied().unwrap_or(at);
                nix::unistd::linkat(at, &from[..], below, &to[..], AtFlags::empty())?;
            }
            Self::SetTime { path, mtime } => {
                let time = TimeSpec::new(mtime.0, mtime.1);
                let follow = UtimensatFlags::NoFollowSymlink;
                utimensat(at, &path[..], &time, &time, follow)?;
            }
            Self::SetMode { path, mode } => {
                let flags = OFlag::O_RDONLY | OFlag::O_DIRECTORY;
                let directory = beneath::open_by(at, &path[..], flags, beneath::BELOW)?;
                let old = nix::sys::stat::fstat(&directory)?.st_mode;
                // If the user is not in the directory's group, the kernel clears the bit whenever the mode is set.
                if old & 0o777 != *mode {
                    let new = mode | (old & Mode::S_ISGID.bits());
                    nix::sys::stat::fchmod(&directory, Mode::from_bits_truncate(new))?;
                }
            }
            Self::Rename { from, to, replace } => match replace {
                true => nix::fcntl::renameat(at, &from[..], at, &to[..])?,
                false => beneath::rename_new(at, &from[..], at, &to[..])?,
            },
            Self::Unlink { path, is_directory } => {
                let kind = match is_directory {
                    true => UnlinkatFlags::RemoveDir,
                    false => UnlinkatFlags::NoRemoveDir,
                };
                nix::unistd::unlinkat(at, &path[..], kind)?;
            }
            Self::RemoveTree { path } => {
                let path = beneath::path_of(&at).join(OsStr::from_bytes(path));
                #[expect(
                    clippy::disallowed_methods,
                    reason = "a new directory of rockenv's, with no more than the person's own rights"
                )]
                std::fs::remove_dir_all(&path).map_err(|_| Errno::EIO)?;
            }
        }
        Ok(None)
    }
}

/// Starts a process that becomes the user before it does anything else.
fn start(person: &Person) -> Result<UnixStream> {
    let (ours, theirs) = UnixStream::pair()?;
    let mask = caller_umask().unwrap_or(Mode::empty()).bits();
    let numbers = [person.uid, person.gid, mask].into_iter();
    let numbers = numbers.chain(person.groups.iter().copied());
    // A process group of its own, because a terminal's Ctrl-C is for the command, which may have something to undo.
    Command::new("/proc/self/exe")
        .arg(SUBCOMMAND)
        .args(numbers.map(|number| number.to_string()))
        .env_clear()
        .process_group(0)
        .stdin(Stdio::from(OwnedFd::from(theirs)))
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .context(|| format!("cannot start a process of user {}", person.uid))?;
    Ok(ours)
}

/// Becomes a user irrevocably, with the user's groups and none of root's privileges.
pub(crate) fn become_person(person: &Person) -> Result<()> {
    let groups: Vec<Gid> = person.groups.iter().copied().map(Gid::from_raw).collect();
    set_ids(person.uid, person.gid, Some(&groups))?;
    nix::sys::prctl::set_no_new_privs()?;
    Ok(())
}

/// Sets the ids of this process, and its groups if given. Safe between fork and exec.
pub(crate) fn set_ids(uid: u32, gid: u32, groups: Option<&[Gid]>) -> nix::Result<()> {
    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
    if let Some(groups) = groups {
        nix::unistd::setgroups(groups)?;
    }
    nix::unistd::setresgid(gid, gid, gid)?;
    nix::unistd::setresuid(uid, uid, uid)
}

/// Makes a command start as a user, with the user's groups, which the standard library would drop, and in `directory`,
/// which may be closed to all but the user or one of these groups.
pub(crate) fn start_as(command: &mut Command, person: &Person, directory: &Path) -> Result<()> {
    let groups: Vec<Gid> = person.groups.iter().copied().map(Gid::from_raw).collect();
    let (uid, gid) = (person.uid, person.gid);
    let directory = CString::new(directory.as_os_str().as_bytes())
        .map_err(|error| unexpected!("a path contains a NUL").source(error))?;
    let prepare = move || -> std::io::Result<()> {
        set_ids(uid, gid, Some(&groups))?;
        nix::unistd::chdir(directory.as_c_str())?;
        Ok(())
    };
    #[expect(
        unsafe_code,
        reason = "the standard library has no stable way to set supplementary groups"
    )]
    // SAFETY: between fork and exec the closure makes four system calls and neither allocates nor locks.
    unsafe {
        command.pre_exec(prepare);
    }
    Ok(())
}

/// Serves calls as the user until the command that asks has ended, which closes standard input.
pub(crate) fn serve(arguments: &[String]) -> Result<()> {
    let numbers = arguments.iter().filter_map(|text| text.parse().ok());
    let numbers: Vec<u32> = numbers.collect();
    let [uid, gid, mask, ref groups @ ..] = numbers[..] else {
        return Err(unexpected!("this is started by `rockenv`, not manually"));
    };
    become_person(&Person {
        uid,
        gid,
        groups: groups.to_vec(),
    })?;
    umask(Mode::from_bits_truncate(mask));
    let way = UnixStream::from(std::io::stdin().as_fd().try_clone_to_owned()?);
    while let Some((call, descriptors)) = frames::receive::<Call>(&way)? {
        let directories: Vec<_> = descriptors.iter().map(OwnedFd::as_fd).collect();
        let (answer, descriptor): (Answer, _) = match call.make(&directories) {
            Ok(descriptor) => (0, descriptor),
            Err(errno) => (errno as Answer, None),
        };
        let numbers: Vec<RawFd> = descriptor.iter().map(AsRawFd::as_raw_fd).collect();
        frames::send(&way, &answer, &numbers)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
    use std::sync::atomic::AtomicBool;

    use super::*;
    use crate::sys::account::make_directories;
    use crate::sys::process::{Program, TEMPORARY};

    #[test]
    fn root_in_a_container_gives_no_file_to_a_user_outside() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir().unwrap();
        let opened = beneath::open_path(directory.path()).unwrap();
        for (gid, wanted) in [(4242, Some((4321, 4242))), (OVERFLOW, None)] {
            std::os::unix::fs::chown(directory.path(), Some(4321), Some(gid)).unwrap();
            let owner = Rights::Own.owner_for_root_files(opened.as_fd());
            assert_eq!(owner.unwrap(), wanted);
            let made = directory.path().join(format!("{gid}/below"));
            make_directories(&Rights::Own, &made).unwrap();
            let found = fs_err::metadata(made).unwrap();
            assert_eq!((found.uid(), found.gid()), wanted.unwrap_or((0, 0)));
        }
    }

    #[test]
    fn a_directory_that_has_its_mode_already_is_left_alone() {
        let directory = tempfile::tempdir().unwrap();
        let opened = beneath::open_path(directory.path()).unwrap();
        let mode = || nix::sys::stat::fstat(&opened).unwrap().st_mode & 0o7777;
        for (before, wanted, after) in [(0o1755, 0o755, 0o1755), (0o1755, 0o700, 0o700)] {
            let before = std::fs::Permissions::from_mode(before);
            fs_err::set_permissions(directory.path(), before).unwrap();
            Rights::Own.set_mode(opened.as_fd(), ".", wanted).unwrap();
            assert_eq!(mode(), after);
        }
    }

    #[test]
    fn a_user_s_program_enters_a_directory_of_the_user_s_group() {
        if !nix::unistd::geteuid().is_root() {
            return;
        }
        let directory = tempfile::tempdir_in(TEMPORARY).unwrap();
        std::os::unix::fs::chown(directory.path(), Some(0), Some(4242)).unwrap();
        let mode = std::fs::Permissions::from_mode(0o750);
        fs_err::set_permissions(directory.path(), mode).unwrap();
        let program = Program::at("/bin/sh")
            .args(["-c", "id -G && ls -d ."])
            .directory(directory.path())
            .user(Person {
                uid: 4321,
                gid: 4321,
                groups: vec![4321, 4242],
            });
        let said = program.output(1 << 10, &AtomicBool::new(false), &mut |_| {});
        assert_eq!(said.unwrap(), b"4321 4242\n.\n");
    }
}
