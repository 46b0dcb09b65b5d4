//! Owns rockenv's work inside an env, as hidden subcommands of the binary mounted there. It unpacks the files of
//! `copy` steps and gathers the results of `export` steps inside the container, so that links cannot lead out of it.

use std::collections::BTreeMap;
use std::os::fd::AsFd as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fs_err as fs;

use super::sha256sums::{Exported, Manifest};
pub(crate) use crate::engine::docker::UNPACK as LAYER;
use crate::image::oci::layers::Onto;
use crate::image::tar::unpack::{Devices, Limits, UnpackOptions, Unpacker};
use crate::sys::account::Existing;
use crate::sys::beneath;
use crate::sys::checksum;
use crate::sys::error::{Error, Result, ResultExt as _};
use crate::tree::listing::{Content, ListingEntry, PathState, path_state};
use crate::tree::writer::Writer;

/// Files that a service creates in every container, which no snapshot contains.
const MADE: [&str; 8] = [
    ".dockerenv",
    "dev",
    "etc/hostname",
    "etc/hosts",
    "etc/resolv.conf",
    "proc",
    "run",
    "sys",
];

/// `__layer ARCHIVE SHA256 REPORT [BYTES]`: unpacks a layer of `BYTES` on the root file system; errors go to the file
/// `REPORT`.
pub(crate) fn layer(arguments: &[String]) -> Result<()> {
    let [archive, diff_id, report, unpacked @ ..] = arguments else {
        return Err(usage());
    };
    let unpacked = unpacked.first().map(|bytes| parse(bytes)).transpose()?;
    let options = UnpackOptions {
        devices: Devices::Make,
        limits: Limits::of_snapshot(unpacked),
        left_out: &MADE,
        ..UnpackOptions::default()
    };
    let unpack = || {
        let archive = fs::File::open(archive)?.into_file();
        let cancel = AtomicBool::new(false);
        let mut layers = Unpacker::layers(Path::new("/"), &options, Onto::Tree, &cancel)?;
        layers.apply(archive, diff_id, &mut |_| {})?;
        layers.finish()
    };
    let outcome = unpack();
    if let Err(error) = &outcome {
        fs::write(report, error.chain().join(": "))?;
    }
    outcome.map(drop)
}

/// `__copy UID GID [THEIRS]...`: unpacks the archive on standard input. Everything that it creates belongs to that
/// user. It writes nothing below `THEIRS`, even through links.
pub(crate) fn copy(arguments: &[String]) -> Result<()> {
    let [uid, gid, theirs @ ..] = arguments else {
        return Err(usage());
    };
    let (uid, gid): (u32, u32) = (parse(uid)?, parse(gid)?);
    let theirs = theirs.iter().map(fs::canonicalize);
    let theirs: Vec<_> = theirs.collect::<std::io::Result<_>>()?;
    let mut archive = tar::Archive::new(std::io::stdin().lock());
    for entry in archive.entries()? {
        let mut entry = entry?;
        let target = Path::new("/").join(entry.path()?);
        refuse_theirs(&target, &theirs)?;
        make_parents(&target, uid, gid)?;
        match entry.header().entry_type() {
            tar::EntryType::Directory => match fs::create_dir(&target) {
                // An existing directory keeps its owner: `/etc` must not become the build user's.
                Err(error)
                    if error.kind() == std::io::ErrorKind::AlreadyExists && target.is_dir() =>
                {
                    continue;
                }
                other => other?,
            },
            tar::EntryType::Symlink => {
                remove_old(&target)?;
                let to = entry
                    .link_name()?
                    .ok_or_else(|| unexpected!("a link without target"))?;
                fs_err::os::unix::fs::symlink(to, &target)?;
            }
            _ => {
                remove_old(&target)?;
                let mut file = fs::File::create(&target)?;
                std::io::copy(&mut entry, &mut file)?;
                file.set_permissions(std::fs::Permissions::from_mode(
                    entry.header().mode()? & 0o777,
                ))?;
            }
        }
        own(&target, uid, gid)?;
    }
    Ok(())
}

/// Refuses a path that is below a user's directory once its links are followed.
fn refuse_theirs(target: &Path, theirs: &[PathBuf]) -> Result<()> {
    // Upwards, because missing directories are created in the deepest existing one.
    for above in target.ancestors().skip(1) {
        let Ok(real) = fs::canonicalize(above) else {
            continue;
        };
        let rest = target.strip_prefix(above).unwrap_or(target);
        let place = real.join(rest);
        let Some(volume) = theirs.iter().find(|volume| place.starts_with(volume)) else {
            return Ok(());
        };
        return Err(step_failed!(
            "`copy` cannot write to `{}`: `{}` does not belong to rockenv",
            target.display(),
            volume.display()
        )
        .help("copy to another path, then use a `run` step to move it there"));
    }
    Ok(())
}

/// Removes the file at a path, but never a directory.
fn remove_old(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Err(step_failed!("`{}` is a directory", path.display())
            .help("copy to an unused path, or remove the directory in an earlier step")),
        Ok(_) => Ok(fs::remove_file(path)?),
        Err(_) => Ok(()),
    }
}

fn make_parents(path: &Path, uid: u32, gid: u32) -> Result<()> {
    let Some(parent) = path.parent() else {
        return Ok(());
    };
    if !parent.exists() {
        make_parents(parent, uid, gid)?;
        fs::create_dir(parent)?;
        own(parent, uid, gid)?;
    }
    Ok(())
}

fn own(path: &Path, uid: u32, gid: u32) -> Result<()> {
    beneath::set_owner(nix::fcntl::AT_FDCWD, path, uid, gid)
        .context(|| format!("cannot change the owner of `{}`", path.display()))
}

/// `__export [TARGET FROM]...`: copies files and directories into output volumes and writes their manifests.
pub(crate) fn export(arguments: &[String]) -> Result<()> {
    let (pairs, []) = arguments.as_chunks::<2>() else {
        return Err(usage());
    };
    for [target, source] in pairs {
        export_item(Path::new(target), Path::new(source))?;
    }
    Ok(())
}

fn export_item(target: &Path, source: &Path) -> Result<()> {
    let name = source.file_name().ok_or_else(usage)?;
    let found = fs::symlink_metadata(source).map_err(|error| {
        step_failed!("nothing to export at `{}`", source.display()).source(error)
    })?;
    let mut exporting = Exporting {
        target,
        manifest: Manifest::read(target)?,
        writer: Writer::open(target, true)?,
        first: BTreeMap::new(),
    };
    let exported = if found.is_dir() {
        if fs::canonicalize(target)?.starts_with(fs::canonicalize(source)?) {
            return Err(step_failed!(
                "cannot export `{}`: the output volume `{}` is inside it",
                source.display(),
                target.display()
            ));
        }
        exporting.directory(source, Path::new(name))
    } else {
        exporting.file(source, Path::new(name))
    };
    exporting.manifest.write(target)?;
    let finished = exporting.writer.finish();
    exported.and(finished)
}

/// An item that is being exported into an output volume.
struct Exporting<'a> {
    target: &'a Path,
    manifest: Manifest,
    writer: Writer,
    /// A name of each file with several, by device, inode and SHA-256: 9P gives files of two disks the same number.
    first: BTreeMap<(u64, u64, String), PathBuf>,
}

impl Exporting<'_> {
    fn directory(&mut self, source: &Path, name: &Path) -> Result<()> {
        // An existing directory may belong to another user.
        if fs::symlink_metadata(self.target.join(name)).is_err() {
            let entry = entry(source)?;
            self.writer.put(name, &entry, None, Existing::Refuse)?;
        }
        let mut entries = fs::read_dir(source)?.collect::<std::io::Result<Vec<_>>>()?;
        entries.sort_by_key(fs_err::DirEntry::file_name);
        for entry in entries {
            let name = name.join(entry.file_name());
            match entry.file_type()?.is_dir() {
                true => self.directory(&entry.path(), &name)?,
                false => self.file(&entry.path(), &name)?,
            }
        }
        Ok(())
    }

    /// Copies one file or link, so that a reader of the volume never sees half of it. Replaces an existing entry only
    /// if an export wrote it.
    fn file(&mut self, source: &Path, name: &Path) -> Result<()> {
        let entry = entry(source)?;
        let left = match &entry.content {
            Content::File { .. } => {
                Exported::File(hex::encode(checksum::sha256(fs::File::open(source)?)?.0))
            }
            Content::Symlink { target } => Exported::Link(target.clone()),
            Content::Directory { .. } | Content::Special(_) => {
                let source = source.display();
                return Err(step_failed!("`{source}` is not a file, directory or link"));
            }
        };
        self.manifest.may_replace(self.target, name, &left)?;
        self.manifest.announce(self.target, name, &left)?;
        let found = fs::symlink_metadata(source)?;
        match &left {
            Exported::File(sum) => {
                let from = fs::File::open(source)?;
                let from = from.file().as_fd();
                // Without other names, the inode number may be one that another file had.
                let file = (found.nlink() > 1).then(|| (found.dev(), found.ino(), sum.clone()));
                let first = file.as_ref().and_then(|file| self.first.get(file));
                let first = first.map(PathBuf::as_path);
                self.writer
                    .link_or_put(name, &entry, first, from, Existing::Replace)?;
                self.first.extend(file.map(|file| (file, name.to_owned())));
            }
            Exported::Link(_) => self.writer.put(name, &entry, None, Existing::Replace)?,
        }
        self.manifest.wrote(name, left);
        Ok(())
    }
}

fn entry(source: &Path) -> Result<ListingEntry> {
    let parent = source.parent().unwrap_or(Path::new("/"));
    let name = source.file_name().unwrap_or_default();
    match path_state(parent, Path::new(name))? {
        PathState::Taken(entry) => Ok(entry),
        PathState::Free | PathState::Blocked => {
            Err(step_failed!("nothing to export at `{}`", source.display()))
        }
    }
}

fn usage() -> Error {
    usage!("this subcommand is for rockenv's own use, inside an env")
}

fn parse<T: std::str::FromStr>(text: &str) -> Result<T> {
    text.parse().map_err(|_| usage())
}

#[cfg(test)]
mod tests {
    use fs_err::os::unix::fs::symlink;

    use std::os::unix::ffi::OsStrExt as _;

    use sha2::{Digest as _, Sha256};

    use super::super::sha256sums::{MANIFEST, lock};
    use super::*;
    use crate::sys::error::Kind;

    /// Returns a directory with an empty output volume, an item that does not exist yet, and the arguments that export
    /// it.
    fn item() -> (tempfile::TempDir, PathBuf, PathBuf, [String; 2]) {
        let directory = tempfile::tempdir().unwrap();
        let [from, to] = ["item", "out"].map(|name| directory.path().join(name));
        fs::create_dir(&to).unwrap();
        let arguments = [&to, &from].map(|path| path.display().to_string());
        (directory, from, to, arguments)
    }

    /// Checks the manifest with `sha256sum`.
    fn check_sums(volume: &Path) {
        let status = std::process::Command::new("sha256sum")
            .args(["--check", "--strict", MANIFEST])
            .current_dir(volume)
            .output()
            .unwrap();
        assert!(status.status.success(), "{status:?}");
    }

    #[test]
    fn a_killed_export_owns_what_it_had_written_and_what_it_had_not() {
        let (_directory, from, to, arguments) = item();
        fs::write(to.join(MANIFEST), b"somebody's\r\n\xff").unwrap();
        let first = Manifest::read(&to).unwrap();
        for text in ["one", "two", "three"] {
            fs::write(&from, text).unwrap();
            export(&arguments).unwrap();
            assert_eq!(fs::read_to_string(to.join("item")).unwrap(), text);
            // Killed before or after the rename.
            let sum = hex::encode(Sha256::digest("next"));
            let mut manifest = Manifest::read(&to).unwrap();
            let next = Exported::File(sum);
            manifest.announce(&to, Path::new("item"), &next).unwrap();
            if text == "two" {
                fs::write(to.join("item"), "next").unwrap();
            }
        }
        let second = Manifest::read(&to).unwrap();
        export(&arguments).unwrap();
        let text = fs::read(to.join(MANIFEST)).unwrap();
        let sum = hex::encode(Sha256::digest("three"));
        let line = format!("{sum}  item\n");
        let mark = hex::encode(Sha256::digest(&line));
        let wanted = format!("\n# exported by rockenv: 1 {mark}\n{line}").into_bytes();
        let wanted = [b"somebody's\r\n\xff", &wanted[..]].concat();
        assert_eq!(text, wanted);
        // Exports that began before these keep their lines.
        for earlier in [first, second] {
            earlier.write(&to).unwrap();
            assert_eq!(fs::read(to.join(MANIFEST)).unwrap(), wanted);
        }
    }

    #[test]
    fn a_file_with_the_inode_number_of_an_earlier_one_is_no_link_to_it() {
        let (_directory, from, to, _) = item();
        fs::write(&from, "ours").unwrap();
        fs::write(to.join("earlier"), "theirs").unwrap();
        let found = fs::metadata(&from).unwrap();
        let mut exporting = Exporting {
            target: &to,
            manifest: Manifest::read(&to).unwrap(),
            writer: Writer::open(&to, true).unwrap(),
            first: BTreeMap::new(),
        };
        // The number of a file with one name proves nothing, and that of one with several only with its content.
        for (name, sum) in [("one", "ours"), ("several", "theirs")] {
            let sum = hex::encode(Sha256::digest(sum));
            exporting.first = BTreeMap::from([((found.dev(), found.ino(), sum), "earlier".into())]);
            exporting.file(&from, Path::new(name)).unwrap();
            assert_eq!(fs::read(to.join(name)).unwrap(), b"ours");
            fs::hard_link(&from, from.with_file_name(name)).unwrap();
        }
    }

    #[test]
    fn a_manifest_waits_for_the_export_of_another_env() {
        let (_directory, from, to, arguments) = item();
        fs::write(&from, "one").unwrap();
        // The user's own lock is in no export's way.
        let directory = fs::File::open(&to).unwrap();
        directory.file().lock().unwrap();
        let target = to.clone();
        let works: [Box<dyn FnOnce() + Send>; 2] = [
            Box::new(move || Manifest::read(&target).unwrap().write(&target).unwrap()),
            Box::new(move || export(&arguments).unwrap()),
        ];
        for work in works {
            let other = lock(&to).unwrap();
            let work = std::thread::spawn(work);
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!work.is_finished() && !to.join("item").exists());
            drop(other);
            work.join().unwrap();
        }
        check_sums(&to);
    }

    #[test]
    fn a_manifest_has_any_name_and_none_of_a_file_that_is_gone() {
        let (_directory, from, to, arguments) = item();
        fs::create_dir(&from).unwrap();
        let names: [&[u8]; 5] = [b"a\nb", b"c\\nd", b"\xffe", b"\\", b"gone"];
        for name in names {
            fs::write(from.join(std::ffi::OsStr::from_bytes(name)), name).unwrap();
        }
        export(&arguments).unwrap();
        fs::remove_file(from.join("gone")).unwrap();
        fs::remove_file(to.join("item/gone")).unwrap();
        // The manifest is read again, and files that an export wrote are replaced.
        for name in &names[..4] {
            fs::write(from.join(std::ffi::OsStr::from_bytes(name)), "new").unwrap();
        }
        export(&arguments).unwrap();
        let text = fs::read(to.join(MANIFEST)).unwrap();
        assert_eq!(text.split(|byte| *byte == b'\n').count(), 6);
        check_sums(&to);
    }

    #[test]
    fn lines_of_somebody_else_are_never_an_exports() {
        let (directory, from, to, arguments) = item();
        let manifest = to.join(MANIFEST);
        fs::write(&from, "one").unwrap();
        export(&arguments).unwrap();
        let ours = fs::read_to_string(&manifest).unwrap();
        let (mark, line) = ours.split_once('\n').unwrap();
        let theirs = format!("{}  b\n", hex::encode(Sha256::digest("mine")));
        fs::write(to.join("b"), "mine").unwrap();
        fs::write(directory.path().join("b"), "other").unwrap();
        let other = [
            arguments[0].clone(),
            directory.path().join("b").display().to_string(),
        ];
        for text in [
            theirs.clone(),
            format!("{ours}{theirs}"),
            format!("{theirs}{ours}"),
            format!("{mark}\n{theirs}{line}"),
            format!("{theirs}{line}"),
        ] {
            fs::write(&manifest, &text).unwrap();
            assert_eq!(
                export(&other).unwrap_err().kind(),
                Kind::StepFailed,
                "{text}"
            );
            assert_eq!(fs::read_to_string(to.join("b")).unwrap(), "mine");
            assert_has!(fs::read_to_string(&manifest).unwrap(), &theirs);
        }
        // The last form is that of an older rockenv. Identical content needs no replacing.
        export(&arguments).unwrap();
        let text = fs::read_to_string(&manifest).unwrap();
        assert_eq!(text, format!("{theirs}{ours}"));
        fs::write(&from, "two").unwrap();
        export(&arguments).unwrap();
        assert_eq!(fs::read_to_string(to.join("item")).unwrap(), "two");
    }

    #[test]
    fn an_export_has_a_manifest_that_sha256sum_accepts() {
        let (_directory, from, to, arguments) = item();
        fs::create_dir_all(from.join("lib")).unwrap();
        fs::write(from.join("lib/a.so"), "code").unwrap();
        fs::write(from.join("lib/b.so"), "other").unwrap();
        fs::hard_link(from.join("lib/b.so"), from.join("lib/c.so")).unwrap();
        fs::create_dir(from.join("empty")).unwrap();
        let mode = std::fs::Permissions::from_mode(0o750);
        fs::set_permissions(from.join("empty"), mode).unwrap();
        symlink("a.so", from.join("lib/a b -> c")).unwrap();
        fs::write(to.join("kept"), "the user's own").unwrap();
        export(&arguments).unwrap();
        let out = |name: &str| fs::symlink_metadata(to.join("item").join(name)).unwrap();
        assert_eq!(out("lib/b.so").ino(), out("lib/c.so").ino());
        assert_eq!(out("empty").mode() & 0o777, 0o750);
        let made = fs::symlink_metadata(from.join("lib/a.so")).unwrap();
        assert_eq!(
            out("lib/a.so").modified().unwrap(),
            made.modified().unwrap()
        );
        let link = to.join("item/lib/a b -> c");
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("a.so"));
        // The user's own mode stays.
        let mode = std::fs::Permissions::from_mode(0o640);
        fs::set_permissions(to.join(MANIFEST), mode).unwrap();
        let text = fs::read_to_string(to.join(MANIFEST)).unwrap();
        assert_has!(text, "# item/lib/a\\x20b\\x20->\\x20c -> a.so\n");
        // A link that an export left is replaced; others are not.
        fs::remove_file(from.join("lib/a b -> c")).unwrap();
        symlink("b.so", from.join("lib/a b -> c")).unwrap();
        export(&arguments).unwrap();
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("b.so"));
        fs::remove_file(&link).unwrap();
        symlink("/etc/passwd", &link).unwrap();
        assert_eq!(export(&arguments).unwrap_err().kind(), Kind::StepFailed);
        assert_eq!(fs::read_link(&link).unwrap(), Path::new("/etc/passwd"));
        fs::remove_file(&link).unwrap();
        nix::unistd::mkfifo(&link, nix::sys::stat::Mode::S_IRWXU).unwrap();
        assert_eq!(export(&arguments).unwrap_err().kind(), Kind::StepFailed);
        fs::remove_file(&link).unwrap();
        fs::write(from.join("lib/a.so"), "code 2").unwrap();
        export(&arguments).unwrap();
        assert_eq!(out("../SHA256SUMS").mode() & 0o777, 0o640);
        check_sums(&to);
        for (name, text) in [("item/lib/a.so", "code 2"), ("kept", "the user's own")] {
            assert_eq!(fs::read_to_string(to.join(name)).unwrap(), text);
        }
    }

    #[test]
    fn each_item_has_its_own_volume_and_none_contains_it() {
        let directory = tempfile::tempdir().unwrap();
        let at = |name: &str| directory.path().join(name).display().to_string();
        for name in ["one", "two", "from/out"] {
            fs::create_dir_all(at(name)).unwrap();
        }
        fs::write(at("from/a"), "a").unwrap();
        export(&[at("one"), at("from/a"), at("two"), at("from")]).unwrap();
        assert!(Path::new(&at("one/a")).exists() && !Path::new(&at("one/two")).exists());
        assert!(Path::new(&at("two/from/a")).exists());
        let error = export(&[at("from/out"), at("from")]).unwrap_err();
        assert_has!(error.message(), "is inside it");
    }

    #[test]
    fn nothing_to_export_fails_the_step() {
        let (_directory, _, _, arguments) = item();
        assert_eq!(export(&arguments).unwrap_err().kind(), Kind::StepFailed);
    }
}
