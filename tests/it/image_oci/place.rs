//! The directories in which tests build images, and the files that such a build must not touch.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use rockenv::testing::digest::compare;
use rockenv::testing::error::{Error, Kind, Result};
use rockenv::testing::{BuildContext, BuildProgress, Built, Logins, Recipe, TaskContext, build};

use super::make::{Image, Tar, noise};
use crate::support::transcript::masked;

/// A place to build in, beside a directory that must never change.
pub(crate) struct Place {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) mirrors: BTreeMap<String, String>,
    pub(crate) logins: Logins,
    pub(crate) cancel: AtomicBool,
}

impl Place {
    pub(crate) fn new() -> Self {
        let dir = tempfile::tempdir_in("/var/tmp").unwrap();
        fs_err::create_dir(dir.path().join("outside")).unwrap();
        fs_err::write(dir.path().join("outside/file"), "untouched").unwrap();
        Self {
            dir,
            mirrors: BTreeMap::new(),
            logins: Logins::default(),
            cancel: AtomicBool::new(false),
        }
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Builds an image from the lines of an `[oci]` table.
    pub(crate) fn build(&self, table: &str, into: &str) -> Result<Built> {
        self.build_with(table, into, &mut |_| {})
    }

    pub(crate) fn build_with(
        &self,
        table: &str,
        into: &str,
        progress: &mut dyn FnMut(BuildProgress<'_>),
    ) -> Result<Built> {
        let tree = self.path(into);
        fs_err::create_dir(&tree).unwrap();
        let text = format!("schema = 1\nprovider = \"oci\"\n[oci]\n{table}\n");
        let recipe = Recipe::parse(&text, "test.toml", self.dir.path()).unwrap();
        let built = build(
            &recipe,
            &mut BuildContext {
                into: &tree,
                blobs: &self.path("blobs"),
                source_date: Some(1_790_000_000),
                task: TaskContext {
                    mirrors: &self.mirrors,
                    logins: &self.logins,
                    notice: rockenv::testing::Notice::default(),
                    env: &BTreeMap::new(),
                    cancel: &self.cancel,
                    progress,
                },
            },
        );
        let outside: Vec<_> = fs_err::read_dir(self.path("outside")).unwrap().collect();
        assert_eq!(outside.len(), 1);
        let file = self.path("outside/file");
        assert_eq!(fs_err::read_to_string(&file).unwrap(), "untouched");
        assert_eq!(fs_err::metadata(&file).unwrap().nlink(), 1);
        let left = fs_err::read_dir(self.dir.path()).unwrap().any(|entry| {
            let name = entry.unwrap().file_name();
            name.to_string_lossy().starts_with(".unpacked")
        });
        assert!(!left, "an unpacked archive is left");
        built
    }

    /// Builds from the lines of an `[oci]` table, and returns the error as commands print it.
    #[track_caller]
    pub(crate) fn refused(&self, table: &str) -> String {
        let error = self.build(table, "refused").unwrap_err();
        fs_err::remove_dir_all(self.path("refused")).unwrap();
        let help = error.help_text();
        let said = format!(
            "error: {}\n{}exit code {}\n",
            error.chain().join("\n  caused by: "),
            help.map_or_else(String::new, |help| format!("help: {help}\n")),
            error.kind().exit_code()
        );
        let place = self.dir.path().display().to_string();
        masked(&said, &[(&place, "PLACE")])
    }

    /// Builds an image from layers' archives, and returns the names in its tree.
    pub(crate) fn layers(&self, archives: &[Vec<u8>]) -> Result<Vec<String>> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let name = format!("l{}", COUNT.fetch_add(1, Ordering::Relaxed));
        Image::new(archives).layout(&self.path(&name));
        let into = format!("{name}.tree");
        self.build(&format!("path = \"{name}\""), &into)?;
        Ok(names(&self.path(&into)))
    }

    #[track_caller]
    pub(crate) fn assert_same(&self, a: &str, b: &str) {
        let found = compare(&self.path(a), &self.path(b), 20, &AtomicBool::new(false)).unwrap();
        assert!(found.is_empty(), "{found:#?}");
    }
}

pub(crate) fn names(root: &Path) -> Vec<String> {
    fn walk(directory: &Path, root: &Path, names: &mut Vec<String>) {
        for entry in fs_err::read_dir(directory).unwrap() {
            let path = entry.unwrap().path();
            let name = path.strip_prefix(root).unwrap();
            names.push(name.to_string_lossy().into_owned());
            if path.is_dir() && !path.is_symlink() {
                walk(&path, root, names);
            }
        }
    }
    let mut names = Vec::new();
    walk(root, root, &mut names);
    names.sort();
    names
}

#[track_caller]
pub(crate) fn fails<T: std::fmt::Debug>(outcome: Result<T>, kind: Kind, part: &str) -> Error {
    let error = outcome.unwrap_err();
    let chain = error.chain().join(": ");
    assert!(chain.contains(part), "{chain}");
    assert_eq!(error.kind(), kind, "{chain}");
    error
}

/// Returns an image of three layers, as a build would make them: a base, a change, an addition.
pub(crate) fn sample() -> Image {
    Image::new(&[
        Tar::default()
            .dir("etc/")
            .file("etc/os-release", "ID=sample\nVERSION_ID=3\n")
            .dir("d/")
            .file("d/old", "1")
            .file("gone", "1")
            .end(),
        Tar::default()
            .file("d/new", "2")
            .file(".wh.gone", "")
            .bytes("noise", &noise(300_000))
            .end(),
        Tar::default().hard("d/hard", "d/old").end(),
    ])
}
