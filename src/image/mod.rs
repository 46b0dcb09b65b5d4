//! Owns images: recipes for base root file systems (`recipe`), building them (here, and one file per provider), and
//! safe extraction (`tar::unpack`).
//!
//! Everything here blocks, so call it only from threads that may wait.

pub(crate) mod certificates;
pub(crate) mod provider;

pub mod catalog;
pub(crate) mod compression;
pub(crate) mod fetch;
pub(crate) mod normalise;
pub(crate) mod oci;
mod packages;
pub(crate) mod recipe;
pub(crate) mod tar;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::Metadata;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

pub(crate) use packages::{DPKG_STATUS, MAX_DATABASE, OsRelease, Package, gpu_code};
pub use recipe::Recipe;

use crate::sys::error::{Result, ResultExt as _, is_absent};
use crate::tree::root_fs::Tree;
use recipe::{Source, Tarball};
use tar::unpack::{UnpackOptions, unpack};

/// The tools' scratch directory. It is inside the tree being built, so that removing a half-built tree removes it too.
const WORK: &str = ".rockenv-build";

#[derive(Debug)]
pub enum BuildProgress<'a> {
    /// A line of a tool's output.
    Line(&'a str),
    /// Bytes downloaded, extracted or copied.
    Bytes { done: u64, total: Option<u64> },
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Logins {
    /// Files with logins, in order of precedence.
    pub files: Vec<PathBuf>,
    /// Search path, as in `PATH`, for the credential helpers that these files name.
    pub programs: OsString,
    /// The home directory for the helpers.
    pub home: PathBuf,
}

/// The inputs of a task on images or snapshots from outside the store.
pub struct TaskContext<'a> {
    /// The user's mirrors: `debian`, `debian-security`, `ubuntu`, `arch`, and each with `-snapshot`, where
    /// `@SNAPSHOTID@` (for Arch also `@DATE@`, such as `2026/01/31`) is replaced by the time; `debian-signed-by`,
    /// `ubuntu-signed-by`, `arch-signatures`; and registries' mirrors by host.
    pub mirrors: &'a BTreeMap<String, String>,
    pub logins: &'a Logins,
    /// Receives the reason why the user has to wait.
    pub notice: oci::Notice,
    /// Additional environment variables for the tools, such as the proxy variables.
    pub env: &'a BTreeMap<String, String>,
    pub cancel: &'a AtomicBool,
    pub progress: &'a mut dyn FnMut(BuildProgress<'_>),
}

impl std::fmt::Debug for TaskContext<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TaskContext")
            .field("mirrors", self.mirrors)
            .finish_non_exhaustive()
    }
}

#[derive(Debug)]
pub struct BuildContext<'a> {
    /// An existing empty directory that becomes the root file system.
    pub into: &'a Path,
    /// The store's `blobs` directory, which caches downloads.
    pub blobs: &'a Path,
    /// Timestamp for files made by the build, unless the recipe names a snapshot. Default: last midnight (UTC).
    pub source_date: Option<i64>,
    pub task: TaskContext<'a>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Built {
    /// Timestamp of files made by the build.
    pub source_date: i64,
    /// Packages in the package manager's database, sorted.
    pub packages: Vec<Package>,
    /// Digest of the manifest that a container image's recipe resolved to.
    pub resolved: Option<String>,
    /// Environment variables of a container image.
    pub env: Option<BTreeMap<String, String>>,
    pub digest: String,
    /// Number of files and directories.
    pub entries: u64,
    /// Sum of file sizes.
    pub bytes: u64,
    /// The distribution that the tree's os-release names.
    pub os_release: OsRelease,
}

/// Builds a recipe's root file system. After an error the content of `into` is unusable.
pub fn build(recipe: &Recipe, cx: &mut BuildContext<'_>) -> Result<Built> {
    let tree = Tree::open(cx.into)?;
    if !tree.list(".")?.is_empty() {
        return Err(unexpected!("`{}` is not empty", cx.into.display()));
    }
    let source_date = source_date(recipe, cx);
    let mut resolved = None;
    match &recipe.source {
        Source::Mmdebstrap(table) => {
            make_work_directory(cx.into)?;
            provider::mmdebstrap::build(table, source_date, cx)?;
            tree.remove_all(WORK)?;
            normalise::normalise(&tree, source_date, true)?;
        }
        Source::Pacstrap(table) => {
            make_work_directory(cx.into)?;
            provider::pacstrap::build(table, source_date, cx)?;
            tree.remove_all(WORK)?;
            normalise::normalise(&tree, source_date, false)?;
        }
        // A container image must stay byte-identical, so it is not normalised.
        Source::Oci(table) => resolved = Some(oci::build(table, cx)?),
        Source::Tarball(table) => {
            tarball(table, cx)?;
            let strip = table.strip_components;
            if strip > 0 && tree.list(".")?.is_empty() {
                let message = "nothing is left of the archive after `strip-components";
                return Err(invalid!("{message} = {strip}`").help("tar -tf FILE shows its paths"));
            }
        }
        Source::Directory(table) => {
            let from = input(&table.path, "directory", "a directory", Metadata::is_dir)?;
            let progress = &mut *cx.task.progress;
            let mut report = |done| progress(BuildProgress::Bytes { done, total: None });
            crate::tree::copy_tree::copy(&from, cx.into, cx.task.cancel, &mut report)?;
        }
    }
    let summary = crate::tree::digest::digest(cx.into, cx.task.cancel)?;
    let (resolved, env) = resolved.map(|image| (image.digest, image.env)).unzip();
    Ok(Built {
        source_date,
        packages: packages::installed(&tree)?,
        resolved,
        env,
        digest: summary.digest,
        entries: summary.entries,
        bytes: summary.bytes,
        os_release: packages::os_release(&tree)?,
    })
}

fn source_date(recipe: &Recipe, cx: &BuildContext<'_>) -> i64 {
    let named = recipe.snapshot().and_then(recipe::snapshot_time);
    named.or(cx.source_date).unwrap_or_else(|| {
        let now = jiff::Timestamp::now().as_second();
        now - now % 86_400
    })
}

fn make_work_directory(into: &Path) -> Result<()> {
    if !nix::unistd::geteuid().is_root() {
        return Err(unavailable!("building this image needs root")
            .help("sudo rockenv image build, or a tarball image"));
    }
    // The tools get this path, but run in another directory.
    if !into.is_absolute() {
        let into = into.display();
        return Err(unexpected!("`{into}` is not an absolute path"));
    }
    use std::os::unix::fs::PermissionsExt as _;
    let everyone_enters = || std::fs::Permissions::from_mode(0o755);
    fs_err::set_permissions(into, everyone_enters())?;
    fs_err::create_dir(into.join(WORK))?;
    Ok(fs_err::set_permissions(into.join(WORK), everyone_enters())?)
}

/// Resolves `path` of a provider's table, and refuses other file types: opening a FIFO would block forever.
fn input(
    path: &Path,
    provider: &str,
    what: &str,
    fits: impl Fn(&Metadata) -> bool,
) -> Result<PathBuf> {
    let wrong = |why: &str| {
        invalid!("`{}` {why}", path.display()).help(format!("correct `path` in [{provider}]"))
    };
    match fs_err::metadata(path) {
        Err(error) if is_absent(&error) => Err(wrong("does not exist")),
        Err(error) => Err(error.into()),
        Ok(found) if fits(&found) => Ok(fs_err::canonicalize(path)?),
        Ok(_) => Err(wrong(&format!("is not {what}"))),
    }
}

fn tarball(table: &Tarball, cx: &mut BuildContext<'_>) -> Result<()> {
    let progress = &mut *cx.task.progress;
    let (cancel, sha256) = (cx.task.cancel, &table.sha256);
    let options = UnpackOptions {
        strip_components: table.strip_components,
        ..UnpackOptions::default()
    };
    let path = match (&table.path, &table.url) {
        (Some(path), _) => {
            let path = input(path, "tarball", "a regular file", Metadata::is_file)?;
            fetch::verify(&path, sha256, cancel)?;
            path
        }
        (None, Some(url)) => {
            let mut report = |done, total| progress(BuildProgress::Bytes { done, total });
            let most = options.limits.bytes;
            fetch::fetch(url, sha256, most, cx.blobs, cancel, &mut report)?
        }
        (None, None) => return Err(unexpected!("a tarball recipe without path and url")),
    };
    let mut report = |done| progress(BuildProgress::Bytes { done, total: None });
    let archive = fs_err::File::open(&path)?.into_file();
    let report = unpack(archive, cx.into, &options, cancel, &mut report)
        .context(|| format!("cannot extract `{}`", path.display()))?;
    if table.path.is_some() {
        // The user's file may have changed in the meantime.
        fetch::verify(&path, sha256, cancel)?;
    }
    for (what, count) in report.dropped {
        progress(BuildProgress::Line(&format!("skipped: {what} ({count})")));
    }
    Ok(())
}
