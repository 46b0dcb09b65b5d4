//! Owns snapshots in files: an OCI image layout, as a directory or as a tar file of it.

mod read;
mod write;

use std::path::Path;

use crate::sys::error::Result;
use crate::sys::shell::quoted_path;

pub(super) use read::Layout;
pub(super) use write::LayoutDraft;

const MARK_TEXT: &[u8] = br#"{"imageLayoutVersion":"1.0.0"}"#;
const INDEX_TYPE: &str = "application/vnd.oci.image.index.v1+json";
/// Annotations with an image's names in an index: its tag, and the name to load it under.
const TAG: &str = "org.opencontainers.image.ref.name";
const NAME: &str = "io.containerd.image.name";

/// The form of a layout on the disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Form {
    Directory,
    Archive,
}

impl Form {
    /// Returns the form that a path's name asks for.
    pub(crate) fn of(path: &Path) -> Result<Self> {
        let Some(name) = path.file_name() else {
            return Err(usage!("`{}` is not a file name", path.display())
                .help("--snapshots NAME.oci.tar, or --snapshots NAME.oci for a directory"));
        };
        let name = name.to_string_lossy();
        let packed = [".gz", ".tgz", ".zst", ".xz", ".bz2", ".zip"];
        if let Some(end) = packed.iter().find(|end| name.ends_with(**end)) {
            let shown = path.display();
            let name = name.trim_end_matches(end).trim_end_matches(".tar");
            let plain = path.with_file_name(format!("{name}.tar"));
            return Err(
                usage!("`{shown}` would be compressed twice: its layers are already")
                    .help(format!("--snapshots {}", quoted_path(&plain))),
            );
        }
        Ok(match name.ends_with(".tar") {
            true => Self::Archive,
            false => Self::Directory,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sys::error::Kind;

    #[test]
    fn the_name_says_what_it_becomes() {
        let form = |name: &str| Form::of(Path::new(name));
        assert_eq!(form("/mnt/demo.oci.tar").unwrap(), Form::Archive);
        assert_eq!(form("demo.tar").unwrap(), Form::Archive);
        assert_eq!(form("demo.oci").unwrap(), Form::Directory);
        assert_eq!(form("demo/").unwrap(), Form::Directory);
        let no_name = "--snapshots NAME.oci.tar, or --snapshots NAME.oci for a directory";
        for (name, help) in [
            ("x/demo.tar.gz", "--snapshots x/demo.tar"),
            ("my demo.zip", "--snapshots 'my demo.tar'"),
            ("demo.tgz", "--snapshots demo.tar"),
            ("demo.zst", "--snapshots demo.tar"),
            ("..", no_name),
            ("/", no_name),
        ] {
            let error = form(name).unwrap_err();
            assert_eq!((error.kind(), error.help_text()), (Kind::Usage, Some(help)));
        }
    }
}
