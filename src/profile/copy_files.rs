//! Owns reading the files of `copy` steps, with the digests for their keys.
//!
//! A profile may come from another user, and rockenv may run as root. So nothing outside the profile's directory is
//! read, and no symbolic link is followed, not even a link that appears while this runs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Read as _;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt as _, OsStringExt as _};
use std::path::{Path, PathBuf};

use include_dir::DirEntry;
use nix::fcntl::{OFlag, readlinkat};
use nix::sys::stat::{FileStat, Mode, SFlag, fstat};
use sha2::{Digest as _, Sha256};

use super::diagnostics::Problem;
use super::load::Origin;
use super::structure::shorten;
use super::{Action, CopyItem, Profile, value};
use crate::sys::catalog::Directory;
use crate::sys::error::Result;
use crate::sys::name::StepName;
use crate::sys::trusted_files::FileRead;
use crate::sys::{beneath, builtin, trusted_files};

/// Limit for all files of a profile together: they are kept in memory until the steps have run.
const MOST_BYTES: u64 = 64 << 20;
/// Limit for the number of files and directories.
const MOST_ENTRIES: usize = 10_000;
/// Limit for the nesting of directories.
const DEEPEST: usize = 64;

/// The files of a profile's `copy` steps.
#[derive(Clone, Debug, Default)]
pub(crate) struct CopyFiles {
    /// One for each entry of each `copy` step, in order.
    pub items: Vec<CopiedItem>,
}

#[derive(Clone, Debug)]
pub(crate) struct CopiedItem {
    pub step: StepName,
    /// As written in the profile.
    pub from: String,
    /// SHA-256 of names, content and executable bits, without times and owners; hexadecimal.
    pub digest: String,
    /// Sorted, a directory before its content.
    pub entries: Vec<CopyEntry>,
}

/// A file, directory or link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct CopyEntry {
    /// Path below the item's `to`; empty for the item itself.
    pub path: PathBuf,
    pub content: CopiedFile,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum CopiedFile {
    /// A directory, mode 755.
    Dir,
    /// A regular file, mode 755 if executable and 644 if not.
    File { executable: bool, bytes: Vec<u8> },
    /// A symbolic link with this target, which was not followed.
    Link(PathBuf),
}

impl CopyFiles {
    /// Returns the digests for `spec::Inputs`.
    pub(crate) fn digests(&self) -> BTreeMap<String, String> {
        let pair = |item: &CopiedItem| (copy_key(&item.step, &item.from), item.digest.clone());
        self.items.iter().map(pair).collect()
    }

    pub(crate) fn item(&self, step: &str, from: &str) -> Option<&CopiedItem> {
        self.items
            .iter()
            .find(|item| item.step == step && item.from == from)
    }
}

/// Returns the name of an item in `spec::Inputs`. A step's name has no colon.
pub(crate) fn copy_key(step: &str, from: &str) -> String {
    format!("{step}:{from}")
}

/// Reads the files that the profile's `copy` steps name. `directories` were searched for the profile.
pub(crate) fn copy_files(directories: &[Directory], profile: &Profile) -> Result<CopyFiles> {
    let (files, problems) = read_files(directories, profile);
    match problems.is_empty() {
        true => Ok(files),
        false => Err(profile.invalid(problems)),
    }
}

/// Reads the files that are readable, and returns the problems with the others.
pub(crate) fn read_files(
    directories: &[Directory],
    profile: &Profile,
) -> (CopyFiles, Vec<Problem>) {
    let mut files = CopyFiles::default();
    let mut problems = Vec::new();
    let mut reader = Reader {
        directories,
        bytes: 0,
        entries: 0,
    };
    for step in &profile.steps {
        let Action::Copy(items) = &step.action else {
            continue;
        };
        for item in items {
            // `check` reports the problem with the path.
            if value::beside(&item.from).is_err() {
                continue;
            }
            match reader.item(&profile.sources.file(&item.from.place).origin, item) {
                Ok(entries) => files.items.push(CopiedItem {
                    step: step.name.clone(),
                    from: item.from.value.clone(),
                    digest: digest(&entries),
                    entries,
                }),
                Err(message) => {
                    let message = format!("cannot copy `{}`: {message}", shorten(&item.from));
                    problems.push(Problem::new(&item.from.place, message, "here"));
                }
            }
        }
    }
    (files, problems)
}

/// Returns the digest of a tree. Lengths precede names, so that different trees are encoded differently.
fn digest(entries: &[CopyEntry]) -> String {
    let mut hash = Sha256::new();
    for entry in entries {
        let (kind, content): (&[u8], &[u8]) = match &entry.content {
            CopiedFile::Dir => (b"d", b""),
            CopiedFile::File { executable, bytes } => match executable {
                true => (b"x", bytes),
                false => (b"f", bytes),
            },
            CopiedFile::Link(target) => (b"l", target.as_os_str().as_bytes()),
        };
        let path = entry.path.as_os_str().as_bytes();
        hash.update(kind);
        hash.update((path.len() as u64).to_le_bytes());
        hash.update(path);
        hash.update((content.len() as u64).to_le_bytes());
        hash.update(content);
    }
    hex::encode(hash.finalize())
}

/// A result whose error is a sentence for the user.
type Read<T> = std::result::Result<T, String>;

struct Reader<'a> {
    directories: &'a [Directory],
    bytes: u64,
    entries: usize,
}

impl Reader<'_> {
    fn item(&mut self, profile: &Origin, item: &CopyItem) -> Read<Vec<CopyEntry>> {
        let mut entries = Vec::new();
        let from = Path::new(&item.from.value);
        match profile {
            Origin::Builtin(profile) => {
                let path = Path::new(profile).with_file_name("").join(from);
                self.builtin(&path, &mut entries)?;
            }
            Origin::File(profile) => {
                let dir = profile.parent().unwrap_or(Path::new("/"));
                let flags = OFlag::O_DIRECTORY | OFlag::O_PATH | OFlag::O_CLOEXEC;
                let root = nix::fcntl::open(dir, flags, Mode::empty())
                    .map_err(|errno| explain(dir, errno))?;
                let base = Base {
                    root: root.as_fd(),
                    dir,
                };
                self.host(&base, from, Path::new(""), 0, &mut entries)?;
            }
        }
        // By components, not by bytes: `a` before `a/b` before `a.b`.
        entries.sort_by(|a, b| a.path.cmp(&b.path));
        Ok(entries)
    }

    fn count(&mut self, bytes: u64) -> Read<()> {
        self.entries += 1;
        self.bytes = self.bytes.saturating_add(bytes);
        if self.entries > MOST_ENTRIES || self.bytes > MOST_BYTES {
            return Err(format!(
                "the profile copies more than {} MiB or {MOST_ENTRIES} files; use a volume of kind `source` for more",
                MOST_BYTES >> 20
            ));
        }
        Ok(())
    }

    fn builtin(&mut self, path: &Path, entries: &mut Vec<CopyEntry>) -> Read<()> {
        let Some(found) = builtin::PROFILES.get_entry(path) else {
            return Err("there is no such built-in file".to_owned());
        };
        let mut left = vec![found];
        while let Some(found) = left.pop() {
            let content = match found {
                DirEntry::Dir(dir) => {
                    self.count(0)?;
                    left.extend(dir.entries());
                    CopiedFile::Dir
                }
                DirEntry::File(file) => {
                    self.count(file.contents().len() as u64)?;
                    CopiedFile::File {
                        // The mode is not compiled in: such a file is executable if it names its interpreter, and a
                        // test enforces this for the repository's files.
                        executable: file.contents().starts_with(b"#!"),
                        bytes: file.contents().to_vec(),
                    }
                }
            };
            let inside = found.path().strip_prefix(path).unwrap_or(found.path());
            entries.push(CopyEntry {
                path: inside.to_owned(),
                content,
            });
        }
        Ok(())
    }

    fn host(
        &mut self,
        base: &Base<'_>,
        from: &Path,
        below: &Path,
        depth: usize,
        entries: &mut Vec<CopyEntry>,
    ) -> Read<()> {
        if depth > DEEPEST {
            return Err(format!("directories more than {DEEPEST} deep"));
        }
        let path = match below.as_os_str().is_empty() {
            true => from.to_owned(),
            false => from.join(below),
        };
        let root = base.root;
        let whole = base.dir.join(&path);
        let same = |checked: Result<()>| checked.map_err(|error| error.message().to_owned());
        let found = open(root, &path, OFlag::O_PATH | OFlag::O_NOFOLLOW)?;
        let stat = fstat(&found).map_err(|errno| explain(&path, errno))?;
        let content = match beneath::kind(&stat) {
            SFlag::S_IFDIR => CopiedFile::Dir,
            SFlag::S_IFLNK if below.as_os_str().is_empty() => {
                return Err("it is a symbolic link".to_owned());
            }
            SFlag::S_IFLNK => {
                let target = readlinkat(&found, "").map_err(|errno| explain(&path, errno))?;
                let target = PathBuf::from(target);
                same(trusted_files::link(self.directories, &whole, &target))?;
                CopiedFile::Link(target)
            }
            SFlag::S_IFREG => {
                // Before reading it, so that a huge file is refused by its size.
                self.count(u64::try_from(stat.st_size).unwrap_or(u64::MAX))?;
                let file = read(found, &stat, &path)?;
                same(trusted_files::file(self.directories, &whole, &file))?;
                CopiedFile::File {
                    executable: file.executable,
                    bytes: file.bytes,
                }
            }
            _ => {
                return Err(format!(
                    "{} is not a file, directory or link",
                    path.display()
                ));
            }
        };
        let is_dir = content == CopiedFile::Dir;
        if !matches!(content, CopiedFile::File { .. }) {
            self.count(0)?;
        }
        entries.push(CopyEntry {
            path: below.to_owned(),
            content,
        });
        if is_dir {
            let names = names(root, &path)?;
            same(trusted_files::names(self.directories, &whole, names.len()))?;
            for name in names {
                self.host(base, from, &below.join(name), depth + 1, entries)?;
            }
        }
        Ok(())
    }
}

/// The directory that a profile's files are in.
struct Base<'a> {
    root: BorrowedFd<'a>,
    dir: &'a Path,
}

fn explain(path: &Path, errno: nix::Error) -> String {
    match errno {
        nix::Error::ENOENT => "there is no such file".to_owned(),
        nix::Error::ELOOP => format!("a symbolic link is on the way to {}", path.display()),
        nix::Error::EXDEV => format!("{} is outside the profile's directory", path.display()),
        errno => format!("{}: {}", path.display(), std::io::Error::from(errno)),
    }
}

fn open(root: BorrowedFd<'_>, path: &Path, flags: OFlag) -> Read<OwnedFd> {
    beneath::open_by(root, path, flags, beneath::BELOW).map_err(|errno| explain(path, errno))
}

/// Reads the file by the descriptor that was examined, not a file that has replaced it since.
fn read(found: OwnedFd, stat: &FileStat, path: &Path) -> Read<FileRead> {
    let file = beneath::open_regular(found, OFlag::O_RDONLY);
    let file = file.map_err(|errno| explain(path, errno))?;
    let mut bytes = Vec::new();
    let real = trusted_files::real(&file).map_err(|error| error.message().to_owned())?;
    let file = fs_err::File::from_parts(file.into(), path.to_owned());
    file.take(MOST_BYTES + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| error.to_string())?;
    // It has grown past the limit since its size was checked.
    match bytes.len() as u64 > MOST_BYTES {
        true => Err(format!(
            "{} changed while it was being read",
            path.display()
        )),
        false => Ok(FileRead {
            bytes,
            executable: stat.st_mode & 0o111 != 0,
            real,
        }),
    }
}

fn names(root: BorrowedFd<'_>, path: &Path) -> Read<Vec<OsString>> {
    let dir = open(root, path, OFlag::O_RDONLY | OFlag::O_DIRECTORY)?;
    let mut dir = nix::dir::Dir::from_fd(dir).map_err(|errno| explain(path, errno))?;
    let mut names = Vec::new();
    for entry in dir.iter() {
        let entry = entry.map_err(|errno| explain(path, errno))?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            names.push(OsString::from_vec(name.to_vec()));
        }
        if names.len() > MOST_ENTRIES {
            return Err(format!(
                "more than {MOST_ENTRIES} files in {}",
                path.display()
            ));
        }
    }
    Ok(names)
}

#[cfg(test)]
mod tests {
    use std::fs::Permissions;
    use std::os::unix::fs::{PermissionsExt as _, symlink};

    use super::*;

    fn profile(dir: &Path, from: &str) -> Profile {
        let text = format!(
            "schema = 1\nimage = \"debian\"\n[[step]]\nname = \"files\"\ncopy = [{{ from = \"{from}\", to = \"/opt/x\" }}]\n"
        );
        fs_err::write(dir.join("p.toml"), text).unwrap();
        super::super::load(&[dir.to_owned().into()], "p").unwrap()
    }

    fn read_one(dir: &Path, from: &str) -> Result<CopiedItem> {
        let mut files = copy_files(&[], &profile(dir, from))?;
        Ok(files.items.remove(0))
    }

    #[test]
    fn trees_files_and_modes() {
        let dir = tempfile::tempdir().unwrap();
        let tree = dir.path().join("tree");
        fs_err::create_dir_all(tree.join("a/b")).unwrap();
        fs_err::write(tree.join("a/run.sh"), "#!/bin/sh\n").unwrap();
        fs_err::write(tree.join("a.txt"), "text").unwrap();
        symlink("/etc/shadow", tree.join("link")).unwrap();
        let first = read_one(dir.path(), "tree").unwrap();
        let paths = first.entries.iter();
        let paths: Vec<_> = paths.map(|entry| entry.path.to_str().unwrap()).collect();
        assert_eq!(paths, ["", "a", "a/b", "a/run.sh", "a.txt", "link"]);
        let link = CopiedFile::Link("/etc/shadow".into());
        assert_eq!(first.entries[5].content, link);

        let digest = |from| read_one(dir.path(), from).unwrap().digest;
        assert_eq!(digest("tree"), first.digest);
        // Only the executable bit of the mode counts as content.
        for (mode, is_same) in [(0o600, true), (0o755, false)] {
            fs_err::set_permissions(tree.join("a.txt"), Permissions::from_mode(mode)).unwrap();
            assert_eq!(digest("tree") == first.digest, is_same);
        }
        let before = digest("tree/a.txt");
        fs_err::write(tree.join("a.txt"), "other").unwrap();
        assert_ne!(digest("tree/a.txt"), before);
        let one = read_one(dir.path(), "tree/a.txt").unwrap();
        assert_eq!(one.entries[0].path, Path::new(""));
    }

    #[test]
    fn nothing_outside_is_read() {
        let dir = tempfile::tempdir().unwrap();
        symlink("/etc", dir.path().join("etc")).unwrap();
        symlink("/etc/passwd", dir.path().join("passwd")).unwrap();
        fs_err::create_dir(dir.path().join("tree")).unwrap();
        nix::unistd::mkfifo(&dir.path().join("tree/fifo"), Mode::S_IRWXU).unwrap();
        for (from, want) in [
            ("etc/passwd", "a symbolic link is on the way to etc/passwd"),
            ("passwd", "it is a symbolic link"),
            ("gone", "there is no such file"),
            ("tree", "tree/fifo is not a file, directory or link"),
        ] {
            let error = read_one(dir.path(), from).unwrap_err();
            let message = error.message();
            assert_has!(message, &format!("cannot copy `{from}`: {want}"));
            assert_has!(message, "p.toml:5:18");
        }
    }

    #[test]
    fn size_is_limited() {
        let mut reader = Reader {
            directories: &[],
            bytes: 1,
            entries: 0,
        };
        assert!(reader.count(u64::MAX).is_err());
        assert!(reader.count(0).is_err());
        let dir = tempfile::tempdir().unwrap();
        let file = fs_err::File::create(dir.path().join("sparse")).unwrap();
        file.set_len(1 << 40).unwrap();
        let error = read_one(dir.path(), "sparse").unwrap_err();
        assert_has!(error.message(), "more than 64 MiB");
    }
}
