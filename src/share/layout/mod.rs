//! Owns snapshots in files: an OCI image layout, as a directory, or as one tar file of the same.

mod read;
mod write;

use std::path::Path;

use crate::image::oci::sha256;
use crate::sys::error::{Error, Kind, Result};

pub(super) use read::{Layout, Piece};
pub(super) use write::Draft;

/// Says that it is a layout, and of which version.
const MARK: &str = "oci-layout";
const MARK_TEXT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
/// Says which images are in it.
const INDEX: &str = "index.json";
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// Where everything else is, by its digest.
const BLOBS: &str = "blobs/sha256";
/// What an index calls an image: its tag, and what those who load it are to call it.
const TAG: &str = "org.opencontainers.image.ref.name";
const NAME: &str = "io.containerd.image.name";

/// What a layout is on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// A directory with its files.
    Directory,
    /// One tar file.
    Archive,
}

impl Form {
    /// Returns what a path is to become, by its name.
    pub fn of(path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(
                Error::new(Kind::Usage, format!("`{}` names no file", path.display()))
                    .help("--snapshots NAME.oci.tar, or --snapshots NAME.oci for a directory"),
            );
        };
        let name = name.to_string_lossy();
        let packed = [".gz", ".tgz", ".zst", ".xz", ".bz2", ".zip"];
        if let Some(end) = packed.iter().find(|end| name.ends_with(**end)) {
            return Err(Error::new(
                Kind::Usage,
                format!(
                    "`{}` would be compressed twice: its layers are already",
                    path.display()
                ),
            )
            .help(format!(
                "--snapshots {}.tar",
                name.trim_end_matches(end).trim_end_matches(".tar")
            )));
        }
        Ok(match name.ends_with(".tar") {
            true => Self::Archive,
            false => Self::Directory,
        })
    }
}

/// Returns where the bytes with this SHA-256 are.
fn blob(sha256: &str) -> String {
    format!("{BLOBS}/{sha256}")
}

/// Returns whether a file has a place in a layout.
fn is_part(name: &str) -> bool {
    let is_digest = |digits: &str| sha256(&format!("sha256:{digits}")) == Some(digits);
    match name.strip_prefix(BLOBS) {
        Some(rest) => rest.strip_prefix('/').is_some_and(is_digest),
        None => name == MARK || name == INDEX,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_says_what_it_becomes() {
        let form = |name: &str| Form::of(Path::new(name));
        assert_eq!(form("/mnt/demo.oci.tar").unwrap(), Form::Archive);
        assert_eq!(form("demo.tar").unwrap(), Form::Archive);
        assert_eq!(form("demo.oci").unwrap(), Form::Directory);
        assert_eq!(form("demo/").unwrap(), Form::Directory);
        for (name, help) in [
            ("x/demo.tar.gz", "--snapshots demo.tar"),
            ("demo.tgz", "--snapshots demo.tar"),
            ("demo.zst", "--snapshots demo.tar"),
            (
                "..",
                "--snapshots NAME.oci.tar, or --snapshots NAME.oci for a directory",
            ),
            (
                "/",
                "--snapshots NAME.oci.tar, or --snapshots NAME.oci for a directory",
            ),
        ] {
            let error = form(name).unwrap_err();
            assert_eq!((error.kind(), error.help_text()), (Kind::Usage, Some(help)));
        }
    }

    #[test]
    fn only_a_layouts_own_files_are_parts_of_it() {
        let digits = "0123456789abcdef".repeat(4);
        for part in [MARK, INDEX, &blob(&digits)] {
            assert!(is_part(part), "{part}");
        }
        for other in [
            "",
            "manifest.json",
            "oci-layout/x",
            "blobs/sha256",
            "blobs/sha256/",
            "blobs/sha256/../../index.json",
            "blobs/sha512/00",
            &format!("/{}", blob(&digits)),
            &format!("{}/x", blob(&digits)),
            &blob(&digits[1..]),
            &blob(&digits.to_uppercase()),
        ] {
            assert!(!is_part(other), "{other}");
        }
    }
}
