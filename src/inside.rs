//! Owns what rockenv does inside an env, as hidden subcommands of the binary that is mounted there: files of
//! `copy` steps are unpacked and results of `export` steps are gathered where links can lead nowhere else.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::fcntl::AtFlags;
use sha2::{Digest as _, Sha256};

use crate::error::{Error, Kind, Result, ResultExt as _};
use crate::export;
use crate::image::layers::{Deletions, Layers};
use crate::image::unpack::{Devices, Limits, Options};
use crate::profile::hex;

/// Name of the manifest that an export writes, in the format of `sha256sum`.
pub const MANIFEST: &str = "SHA256SUMS";

/// Name of the subcommand that unpacks a layer.
pub const LAYER: &str = "__layer";

/// What a service makes in every container by itself: none of it gets into a snapshot.
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

/// `__layer ARCHIVE SHA256 REPORT`: unpacks a layer on the root file system; what goes wrong is written to the file `REPORT`.
pub fn layer(arguments: &[String]) -> Result<()> {
    let [archive, diff_id, report] = arguments else {
        return Err(usage());
    };
    let options = Options {
        devices: Devices::Make,
        limits: Limits::SNAPSHOT,
        left_out: &MADE,
        ..Options::default()
    };
    let unpack = || {
        let archive = fs::File::open(archive)?.into_file();
        let mut layers = Layers::upon(Path::new("/"), &options, Deletions::Apply)?;
        layers.apply(archive, diff_id, &AtomicBool::new(false), &mut |_| {})?;
        layers.finish()
    };
    let outcome = unpack();
    if let Err(error) = &outcome {
        fs::write(report, error.chain().join(": "))?;
    }
    outcome.map(drop)
}

/// `__copy UID GID [THEIRS]...`: unpacks the archive on standard input; everything made belongs to the build user. Nothing is
/// written below `THEIRS`, wherever links lead.
pub fn copy(arguments: &[String]) -> Result<()> {
    let [uid, gid, theirs @ ..] = arguments else {
        return Err(usage());
    };
    let (uid, gid): (u32, u32) = (parse(uid)?, parse(gid)?);
    let theirs: Vec<_> = theirs
        .iter()
        .map(fs::canonicalize)
        .collect::<std::io::Result<_>>()?;
    let mut archive = tar::Archive::new(std::io::stdin().lock());
    for entry in archive.entries()? {
        let mut entry = entry?;
        let target = Path::new("/").join(entry.path()?);
        refuse_theirs(&target, &theirs)?;
        make_parents(&target, uid, gid)?;
        match entry.header().entry_type() {
            tar::EntryType::Directory => match fs::create_dir(&target) {
                Err(error)
                    if error.kind() == std::io::ErrorKind::AlreadyExists && target.is_dir() => {}
                other => other?,
            },
            tar::EntryType::Symlink => {
                remove_old(&target)?;
                let to = entry
                    .link_name()?
                    .ok_or_else(|| Error::unexpected("a link without target"))?;
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

/// Refuses a path that is below a directory of the user's when the links on its way are followed.
fn refuse_theirs(target: &Path, theirs: &[PathBuf]) -> Result<()> {
    // From below: what is not there yet is made where the last directory is that is there.
    for above in target.ancestors().skip(1) {
        let Ok(real) = fs::canonicalize(above) else {
            continue;
        };
        let rest = target.strip_prefix(above).unwrap_or(target);
        let place = real.join(rest);
        let Some(volume) = theirs.iter().find(|volume| place.starts_with(volume)) else {
            return Ok(());
        };
        return Err(Error::new(
            Kind::StepFailed,
            format!(
                "`copy` does not write to `{}`: what is in `{}` is not rockenv's",
                target.display(),
                volume.display()
            ),
        )
        .help("copy to another path, and let a `run` step put it there if it must"));
    }
    Ok(())
}

/// A new file takes the name; a directory in its place is not thrown away.
fn remove_old(path: &Path) -> Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.is_dir() => Err(Error::new(
            Kind::StepFailed,
            format!("`{}` is a directory", path.display()),
        )
        .help("copy to a path that is free, or remove the directory in a step before")),
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
    nix::unistd::fchownat(
        nix::fcntl::AT_FDCWD,
        path,
        Some(uid.into()),
        Some(gid.into()),
        AtFlags::AT_SYMLINK_NOFOLLOW,
    )
    .context(|| format!("cannot give `{}` to the build user", path.display()))
}

/// `__export [TARGET FROM]...`: copies files and directories into output volumes and writes their manifests.
pub fn export(arguments: &[String]) -> Result<()> {
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
        Error::new(
            Kind::StepFailed,
            format!("nothing to export at `{}`", source.display()),
        )
        .source(error)
    })?;
    let mut manifest = Manifest::read(target)?;
    let exported = if found.is_dir() {
        if fs::canonicalize(target)?.starts_with(fs::canonicalize(source)?) {
            return Err(Error::new(
                Kind::StepFailed,
                format!(
                    "cannot export `{}`: the output volume `{}` is inside it",
                    source.display(),
                    target.display()
                ),
            ));
        }
        export_directory(source, Path::new(name), target, &mut manifest)
    } else {
        export_file(source, Path::new(name), target, &mut manifest)
    };
    manifest.write(target)?;
    exported
}

fn export_directory(
    source: &Path,
    name: &Path,
    target: &Path,
    manifest: &mut Manifest,
) -> Result<()> {
    match fs::create_dir(target.join(name)) {
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
        other => other?,
    }
    let mut entries = fs::read_dir(source)?.collect::<std::io::Result<Vec<_>>>()?;
    entries.sort_by_key(fs_err::DirEntry::file_name);
    for entry in entries {
        let name = name.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            export_directory(&entry.path(), &name, target, manifest)?;
        } else {
            export_file(&entry.path(), &name, target, manifest)?;
        }
    }
    Ok(())
}

/// Copies one file under a temporary name, then renames: a reader of the volume never sees half of it. A file that is there is
/// replaced if an export left it.
fn export_file(source: &Path, name: &Path, target: &Path, manifest: &mut Manifest) -> Result<()> {
    let found = fs::symlink_metadata(source)?;
    let place = target.join(name);
    if found.is_symlink() {
        if fs::symlink_metadata(&place).is_ok_and(|old| !old.is_dir()) {
            manifest.may_replace(target, name, None)?;
            fs::remove_file(&place)?;
        }
        fs_err::os::unix::fs::symlink(fs::read_link(source)?, &place)?;
        return Ok(());
    }
    if !found.is_file() {
        return Err(Error::new(
            Kind::StepFailed,
            format!("`{}` is not a file, directory or link", source.display()),
        ));
    }
    let parent = place.parent().unwrap_or(target);
    let mut temporary = tempfile::Builder::new()
        .prefix(".rockenv-")
        .tempfile_in(parent)
        .context(|| format!("cannot write in `{}`", parent.display()))?;
    let mut hash = Sha256::new();
    let mut file = fs::File::open(source)?;
    let mut buffer = vec![0u8; 256 << 10];
    loop {
        let count = file.read(&mut buffer)?;
        if count == 0 {
            break;
        }
        hash.update(&buffer[..count]);
        temporary
            .write_all(&buffer[..count])
            .context(|| format!("cannot write `{}`", place.display()))?;
    }
    temporary
        .as_file()
        .set_permissions(std::fs::Permissions::from_mode(found.mode() & 0o777))
        .context(|| format!("cannot write `{}`", place.display()))?;
    temporary
        .as_file()
        .set_modified(
            std::time::SystemTime::UNIX_EPOCH
                + std::time::Duration::new(
                    u64::try_from(found.mtime()).unwrap_or(0),
                    u32::try_from(found.mtime_nsec()).unwrap_or(0),
                ),
        )
        .context(|| format!("cannot write `{}`", place.display()))?;
    temporary
        .as_file()
        .sync_data()
        .context(|| format!("cannot write `{}`", place.display()))?;
    let sum = hex(&hash.finalize());
    manifest.may_replace(target, name, Some(&sum))?;
    manifest.announce(target, name, &sum)?;
    temporary
        .persist(&place)
        .map_err(|error| error.error)
        .context(|| format!("cannot replace `{}`", place.display()))?;
    manifest
        .sums
        .insert(name.to_string_lossy().into_owned(), vec![sum]);
    Ok(())
}

/// The manifest of an output volume: what exports left there.
struct Manifest {
    /// Lines that no export wrote.
    others: Vec<String>,
    /// Digests of each file: of one that an export was about to replace when it was killed, two.
    sums: BTreeMap<String, Vec<String>>,
    /// Its last line has no end.
    is_open: bool,
}

impl Manifest {
    fn read(target: &Path) -> Result<Self> {
        let text = match fs::read_to_string(target.join(MANIFEST)) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
            other => other?,
        };
        let mut manifest = Self {
            others: Vec::new(),
            sums: BTreeMap::new(),
            is_open: !text.is_empty() && !text.ends_with('\n'),
        };
        for line in text.lines() {
            match line.split_once("  ") {
                Some((sum, name)) if is_sha256(sum) => {
                    let sums = manifest.sums.entry(name.to_owned()).or_default();
                    sums.push(sum.to_owned());
                }
                _ => manifest.others.push(line.to_owned()),
            }
        }
        Ok(manifest)
    }

    /// Refuses to replace a file that no export left, or that somebody changed since, unless by the same.
    fn may_replace(&self, target: &Path, name: &Path, with: Option<&str>) -> Result<()> {
        let place = target.join(name);
        if !fs::symlink_metadata(&place).is_ok_and(|old| old.is_file()) {
            return Ok(());
        }
        let there = export::digest(target, name)?;
        let left = self.sums.get(&*name.to_string_lossy());
        if with == Some(&there) || left.is_some_and(|sums| sums.contains(&there)) {
            return Ok(());
        }
        Err(Error::new(
            Kind::StepFailed,
            format!(
                "`{}` is there already, and is not what an export left: nothing is written over it",
                place.display()
            ),
        )
        .help("move it away in the output volume, and run `up` again"))
    }

    /// Adds a line before the file is there: one that is in no line is taken for somebody else's the next time.
    fn announce(&mut self, target: &Path, name: &Path, sum: &str) -> Result<()> {
        let mut file = fs::OpenOptions::new()
            .create(true)
            .append(true)
            .custom_flags(nix::libc::O_NOFOLLOW)
            .open(target.join(MANIFEST))?;
        let end = if self.is_open { "\n" } else { "" };
        self.is_open = false;
        Ok(file.write_all(format!("{end}{sum}  {}\n", name.to_string_lossy()).as_bytes())?)
    }

    /// Writes it: lines of this export replace old ones of the same files, others stay.
    fn write(&self, target: &Path) -> Result<()> {
        let path = target.join(MANIFEST);
        let others = self.others.iter().map(|line| format!("{line}\n"));
        let sums = self
            .sums
            .iter()
            .flat_map(|(name, sums)| sums.iter().map(move |sum| format!("{sum}  {name}\n")));
        let text: String = others.chain(sums).collect();
        crate::store::atomic::write(&path, text.as_bytes())?;
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644))?;
        Ok(())
    }
}

fn is_sha256(text: &str) -> bool {
    text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

fn usage() -> Error {
    Error::new(
        Kind::Usage,
        "this subcommand is rockenv's own, inside an env",
    )
}

fn parse(text: &str) -> Result<u32> {
    text.parse().map_err(|_| usage())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_export_owns_what_it_had_written_and_what_it_had_not() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (directory.path().join("a"), directory.path().join("out"));
        fs::create_dir(&to).unwrap();
        fs::write(to.join(MANIFEST), "somebody's").unwrap();
        let arguments = [to.display().to_string(), from.display().to_string()];
        for text in ["one", "two", "three"] {
            fs::write(&from, text).unwrap();
            export(&arguments).unwrap();
            assert_eq!(fs::read_to_string(to.join("a")).unwrap(), text);
            // Killed before the file had its name, or after it.
            let sum = hex(&Sha256::digest("next"));
            let mut manifest = Manifest::read(&to).unwrap();
            manifest.announce(&to, Path::new("a"), &sum).unwrap();
            if text == "two" {
                fs::write(to.join("a"), "next").unwrap();
            }
        }
        export(&arguments).unwrap();
        let text = fs::read_to_string(to.join(MANIFEST)).unwrap();
        let sum = hex(&Sha256::digest("three"));
        assert_eq!(text, format!("somebody's\n{sum}  a\n"));
    }

    #[test]
    fn an_export_has_a_manifest_that_sha256sum_accepts() {
        let directory = tempfile::tempdir().unwrap();
        let (from, to) = (
            directory.path().join("result"),
            directory.path().join("out"),
        );
        fs::create_dir_all(from.join("lib")).unwrap();
        fs::create_dir(&to).unwrap();
        fs::write(from.join("lib/a.so"), "code").unwrap();
        fs::write(to.join("kept"), "the user's own").unwrap();
        let arguments = [to.display().to_string(), from.display().to_string()];
        export(&arguments).unwrap();
        fs::write(from.join("lib/a.so"), "code 2").unwrap();
        export(&arguments).unwrap();
        let status = std::process::Command::new("sha256sum")
            .arg("-c")
            .arg(MANIFEST)
            .current_dir(&to)
            .output()
            .unwrap();
        assert!(status.status.success());
        assert_eq!(
            fs::read_to_string(to.join("result/lib/a.so")).unwrap(),
            "code 2"
        );
        assert_eq!(
            fs::read_to_string(to.join("kept")).unwrap(),
            "the user's own"
        );
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
        assert!(error.message().contains("is inside it"), "{error}");
    }

    #[test]
    fn nothing_to_export_fails_the_step() {
        let directory = tempfile::tempdir().unwrap();
        let error = export(&[
            directory.path().display().to_string(),
            "/nowhere/at/all".into(),
        ])
        .unwrap_err();
        assert_eq!(error.kind(), Kind::StepFailed);
    }
}
