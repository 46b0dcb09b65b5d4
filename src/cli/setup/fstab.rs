//! Owns the line that rockenv may add to `/etc/fstab`.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, fchown};
use std::path::Path;

use fs_err as fs;

use crate::sys::error::{Result, ResultExt as _};
use crate::tree::mounts::escape;

/// Marks rockenv's line. The kernel ignores options that begin with `x-`.
pub(crate) const MARK: &str = "x-rockenv.store";

pub(crate) fn line(image: &Path, at: &Path) -> String {
    format!(
        "{} {} btrfs loop,nofail,noatime,discard=async,{MARK} 0 0\n",
        escape(image),
        escape(at)
    )
}

/// Returns a basic regular expression, delimited by `|`, that matches only rockenv's line for this image.
pub(crate) fn pattern(image: &Path) -> String {
    let mut letters = String::new();
    for letter in escape(image).chars() {
        if ".*[]^$\\|".contains(letter) {
            letters.push('\\');
        }
        letters.push(letter);
    }
    format!("|^{letters} .*{MARK}|")
}

/// Returns the table with `line` appended; all other bytes stay the same.
pub(crate) fn with(table: &[u8], line: &str) -> Vec<u8> {
    let mut text = table.to_vec();
    if text.last().is_some_and(|last| *last != b'\n') {
        text.push(b'\n');
    }
    text.extend_from_slice(line.as_bytes());
    text
}

/// Replaces the table atomically and keeps its owner and mode: temporary file, sync, rename.
pub(crate) fn replace(path: &Path, bytes: &[u8]) -> Result<()> {
    let path = match fs::canonicalize(path) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => path.to_owned(),
        other => other?,
    };
    let parent = path
        .parent()
        .ok_or_else(|| unexpected!("a file needs a directory"))?;
    let failed = || format!("cannot write `{}`", path.display());
    let mut file = tempfile::Builder::new()
        .prefix(".fstab-")
        .tempfile_in(parent)
        .context(failed)?;
    file.write_all(bytes).context(failed)?;
    let (mode, owner) = match fs::metadata(&path) {
        Ok(old) => (old.permissions(), (old.uid(), old.gid())),
        Err(_) => (std::os::unix::fs::PermissionsExt::from_mode(0o644), (0, 0)),
    };
    file.as_file().set_permissions(mode).context(failed)?;
    fchown(file.as_file(), Some(owner.0), Some(owner.1)).context(failed)?;
    file.as_file().sync_all().context(failed)?;
    file.persist(&path)
        .map_err(|error| error.error)
        .context(failed)?;
    fs::File::open(parent)?.sync_all()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tree::mounts::is_in_table;
    use std::os::unix::fs::PermissionsExt as _;

    #[test]
    fn a_pattern_matches_its_image_alone() {
        let images = [
            "/a.img",
            "/a-img",
            "/a|b *[c]^d$\\.img",
            "/ab *[c]^d$\\.img",
        ];
        let lines = images.map(|image| line(Path::new(image), Path::new("/store")));
        for (image, own) in images.iter().zip(&lines) {
            let mut sed = std::process::Command::new("sed");
            let file = tempfile::NamedTempFile::new().unwrap();
            fs::write(file.path(), lines.concat()).unwrap();
            sed.arg("-n")
                .arg(format!("\\{}p", pattern(Path::new(image))));
            let found = sed.arg(file.path()).output().unwrap();
            assert_eq!(String::from_utf8(found.stdout).unwrap(), *own);
        }
    }

    #[test]
    fn every_other_byte_stays() {
        let line = line(Path::new("/srv/my store.img"), Path::new("/srv/my store"));
        assert_eq!(
            line,
            "/srv/my\\040store.img /srv/my\\040store btrfs loop,nofail,noatime,discard=async,x-rockenv.store 0 0\n"
        );
        for table in [
            &b""[..],
            b"# a\n",
            b"/dev/sda1 / ext4 defaults 0 1",
            b"\xff\xfe\n",
        ] {
            let new = with(table, &line);
            assert!(new.starts_with(table) && new.ends_with(line.as_bytes()));
            assert!(is_in_table(&new, Path::new("/srv/my store")));
            assert!(!is_in_table(table, Path::new("/srv/my store")));
        }
        assert!(!is_in_table(b"# /a /b btrfs\n", Path::new("/b")));
        // Only blanks and tabs separate fields.
        let (table, at) = ("\t/a  /b\u{a0}c btrfs\n", Path::new("/b\u{a0}c"));
        assert!(
            is_in_table(table.as_bytes(), at) && !is_in_table(table.as_bytes(), Path::new("/b"))
        );
    }

    #[test]
    fn mode_stays_and_a_link_is_followed() {
        let directory = tempfile::tempdir().unwrap();
        let (real, link) = (
            directory.path().join("real"),
            directory.path().join("fstab"),
        );
        fs::write(&real, "old\n").unwrap();
        fs::set_permissions(&real, std::fs::Permissions::from_mode(0o640)).unwrap();
        std::os::unix::fs::symlink(&real, &link).unwrap();
        replace(&link, b"new\n").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new\n");
        assert_eq!(
            fs::metadata(&real).unwrap().permissions().mode() & 0o777,
            0o640
        );
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    }
}
