//! Owns the downloads of a build that a source declares, for `up` and `lock`: fetches each once into the store's
//! `blobs`, and places it in the cache from which steps serve every build directory.

use std::collections::BTreeMap;
use std::io::Read;
use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::time::Instant;

use crate::engine::ninja;
use crate::execute::container;
use crate::image::fetch::fetch_all::{FetchItem, fetch_all};
use crate::image::{BuildProgress, fetch};
use crate::plan::Plan;
use crate::plan::ids::ImageKey;
use crate::plan::lockfile::{CacheFile, Fetched, Lockfile};
use crate::plan::resolve::Spec;
use crate::rocm::therock::tarballs;
use crate::store::{LockedEnv, Store};
use crate::sys::address::without_login;
use crate::sys::checksum::{Algorithm, Checksum};
use crate::sys::error::{Result, ResultExt as _, if_exists};
use crate::sys::signals::Cancel;
use crate::tree::file;
use crate::ui::size;
use crate::up::offline;
use crate::up::select::Selection;
use crate::up::task::{Subject, Task};

/// A file that a cache must contain.
#[derive(Clone, Debug)]
struct Download {
    cache: String,
    /// Its path in the cache: the source's name for it, then the file's own name.
    path: String,
    /// Its checksum and addresses.
    piece: FetchItem,
}

/// The context of fetching, for `up`, `lock` and `verify`.
#[derive(Clone, Copy)]
pub(crate) struct Fetching<'a> {
    pub(crate) task: &'a Task<'a>,
    pub(crate) store: &'a Store,
    pub(crate) offline: bool,
}

impl Fetching<'_> {
    /// Prepares what an env's containers need: the image at its service, and Ninja.
    pub(crate) fn prepare_containers(
        &self,
        env: &LockedEnv<'_>,
        spec: &Spec,
        image: &ImageKey,
    ) -> Result<()> {
        let mut note = |message: &str| self.task.reporter.note(message);
        if let Some(service) = env.service()? {
            self.store.import_image(&service, image, &mut note)?;
        }
        if spec.resources.ninja {
            let _downloads = self.store.keep_downloads()?;
            let cancel = Cancel::new(&self.task.signals);
            let (run_dir, blobs) = (env.run_dir(), self.store.root().join("blobs"));
            let own = self.task.cx.config.ninja.as_deref();
            let root = self.store.image_root(image);
            let (offline, cancelled) = (self.offline, cancel.flag());
            let placed =
                cancel.watch(|| ninja::place(&run_dir, own, &blobs, &root, offline, cancelled));
            if let Some(message) = cancel.outcome(placed)? {
                note(&message);
            }
        }
        Ok(())
    }

    /// Fills caches for the steps that are about to run; returns notes for the user.
    pub(crate) fn provide(
        &self,
        selection: &Selection,
        spec: &Spec,
        plan: &Plan,
        sources: &BTreeMap<String, PathBuf>,
    ) -> Result<Vec<String>> {
        let runs: Vec<&str> = plan.running().map(|step| step.name.as_str()).collect();
        let (wanted, notes) = match &selection.locked {
            None => declared(selection, sources, &runs)?,
            Some(file) => (locked(selection, &file.lock, &runs), Vec::new()),
        };
        let mut lacking = Vec::new();
        for wanted in wanted {
            let cache = container::cache_directory(self.store, spec, &wanted.cache)?;
            if !self.holds(&cache, &wanted)? {
                lacking.push((cache, wanted));
            }
        }
        if lacking.is_empty() {
            return Ok(notes);
        }
        let _downloads = self.store.keep_downloads()?;
        let pieces: Vec<FetchItem> = lacking.iter().map(|(_, one)| one.piece.clone()).collect();
        let blobs = self.fetch(&pieces)?;
        for ((cache, wanted), blob) in lacking.iter().zip(blobs) {
            let blob = fs_err::File::open(blob)?;
            file::place(cache, Path::new(&wanted.path), blob.as_fd())?;
        }
        Ok(notes)
    }

    /// Adds the source's declared downloads to a lock file if a step needs them, and fetches them; returns notes for
    /// the user.
    pub(crate) fn lock(
        &self,
        selection: &Selection,
        sources: &BTreeMap<String, PathBuf>,
        lock: &mut Lockfile,
    ) -> Result<Vec<String>> {
        let steps: Vec<&str> = lock.steps.iter().map(|step| step.name.as_str()).collect();
        let (wanted, notes) = declared(selection, sources, &steps)?;
        let _downloads = self.store.keep_downloads()?;
        for wanted in &wanted {
            self.take_over(wanted)?;
        }
        let pieces: Vec<FetchItem> = wanted.iter().map(|one| one.piece.clone()).collect();
        for (wanted, blob) in wanted.into_iter().zip(self.fetch(&pieces)?) {
            let checksum = wanted.piece.checksum;
            let sha256 = match checksum.algorithm {
                Algorithm::Sha256 => checksum.digits,
                _ => self.digest(fs_err::File::open(blob)?, Algorithm::Sha256)?,
            };
            let file = CacheFile::Fetched(Fetched {
                url: wanted.piece.urls.into_iter().next(),
                sha256,
            });
            let files = lock.files.entry(wanted.cache).or_default();
            files.insert(wanted.path, file);
        }
        Ok(notes)
    }

    fn holds(&self, cache: &Path, wanted: &Download) -> Result<bool> {
        let Some(there) = file::open(cache, Path::new(&wanted.path))? else {
            return Ok(false);
        };
        let checksum = &wanted.piece.checksum;
        Ok(self.digest(there, checksum.algorithm)? == checksum.digits)
    }

    /// Returns the digest of a file. A signal interrupts it: a step may leave a sparse file that exceeds any disk.
    fn digest(&self, mut file: impl Read, algorithm: Algorithm) -> Result<String> {
        let cancel = Cancel::new(&self.task.signals);
        cancel.outcome(cancel.watch(|| fetch::digest_of(&mut file, algorithm, cancel.flag())))
    }

    /// Copies a file of an earlier build from the cache to the downloads, so that it need not be fetched.
    fn take_over(&self, wanted: &Download) -> Result<()> {
        let cache = self.store.root().join("caches").join(&wanted.cache);
        if self.find(&wanted.piece.checksum)?.is_some()
            || !cache.is_dir()
            || !self.holds(&cache, wanted)?
        {
            return Ok(());
        }
        let path = Path::new(&wanted.path);
        if let (Some(whole), Some(there)) = (file::open(&cache, path)?, file::open(&cache, path)?) {
            let sha256 = self.digest(whole, Algorithm::Sha256)?;
            let blobs = self.store.root().join("blobs/sha256");
            let name = Path::new(&sha256);
            file::place(&blobs, name, there.as_fd())?;
            // Verifies the copy: a step may write to the cache meanwhile.
            let copy = fs_err::File::open(blobs.join(name))?;
            if self.digest(copy, Algorithm::Sha256)? != sha256 {
                file::remove(&blobs, name)?;
            }
        }
        Ok(())
    }

    /// Returns the download with this digest, if the store has it. A power failure may have truncated it.
    fn find(&self, checksum: &Checksum) -> Result<Option<PathBuf>> {
        let blobs = self.store.root().join("blobs");
        let place = blobs.join(checksum.algorithm.name()).join(&checksum.digits);
        let Some(blob) = if_exists(fs_err::File::open(&place))? else {
            return Ok(None);
        };
        let found = self.digest(blob, checksum.algorithm)?;
        Ok((found == checksum.digits).then_some(place))
    }

    /// Returns the path of each file in the store, fetching missing ones.
    fn fetch(&self, pieces: &[FetchItem]) -> Result<Vec<PathBuf>> {
        let found = pieces.iter().map(|piece| self.find(&piece.checksum));
        let found = found.collect::<Result<Vec<Option<PathBuf>>>>()?;
        let absent = pieces.iter().zip(&found);
        let absent = absent.filter_map(|(piece, found)| found.is_none().then_some(piece));
        let absent: Vec<&FetchItem> = absent.collect();
        if self.offline {
            let shown = absent.iter().map(|piece| {
                let from = piece.urls.first().map(String::as_str).unwrap_or_default();
                format!("`{}` from `{}`", piece.name, without_login(from))
            });
            let shown: Vec<String> = shown.collect();
            offline::refuse(&shown)?;
        }
        if absent.is_empty() {
            return Ok(found.into_iter().flatten().collect());
        }
        let files = size::count(absent.len(), "file");
        let what = format!("{files} that the build downloads");
        let started = Instant::now();
        let blobs = self.store.root().join("blobs");
        let shown = Subject::Transfer(&what);
        let found = self.task.with_progress(shown, |cx| {
            let mut report = |done| (cx.progress)(BuildProgress::Bytes { done, total: None });
            fetch_all(pieces, &blobs, cx.mirrors, cx.cancel, &mut report)
        })?;
        self.task.transfer_finished(what, started);
        Ok(found)
    }
}

/// Returns the downloads that sources declare for these steps' caches, and notes on unknown ones.
fn declared(
    selection: &Selection,
    sources: &BTreeMap<String, PathBuf>,
    steps: &[&str],
) -> Result<(Vec<Download>, Vec<String>)> {
    let (mut all, mut notes) = (Vec::new(), Vec::new());
    for (cache, source) in needed(selection, steps) {
        let Some(directory) = sources.get(source) else {
            continue;
        };
        let found = tarballs::read(directory)
            .context(|| format!("cannot read the downloads of source `{source}`"))?;
        if let Some(first) = found.unclear.first() {
            notes.push(format!(
                "source `{source}`: {} of its downloads are not known in advance, so the build fetches them: {first}",
                found.unclear.len()
            ));
        }
        all.extend(found.found.into_iter().map(|tarball| Download {
            cache: cache.to_owned(),
            path: format!("{}/{}", tarball.name, tarball.file),
            piece: FetchItem {
                name: tarball.file,
                urls: tarball.urls,
                checksum: tarball.checksum,
            },
        }));
    }
    Ok((all, notes))
}

/// Returns the downloads that a lock file names for these steps' caches.
fn locked(selection: &Selection, lock: &Lockfile, steps: &[&str]) -> Vec<Download> {
    let caches = needed(selection, steps);
    let files = caches.filter_map(|(cache, _)| Some((cache, lock.files.get(cache)?)));
    let files = files.flat_map(|(cache, files)| files.iter().map(move |file| (cache, file)));
    let wanted = files.filter_map(|(cache, (path, file))| {
        let checksum = Checksum::new(Algorithm::Sha256.name(), file.sha256())?;
        Some(Download {
            cache: cache.to_owned(),
            path: path.clone(),
            piece: FetchItem {
                name: path.rsplit('/').next().unwrap_or(path).to_owned(),
                urls: vec![file.url()?.clone()],
                checksum,
            },
        })
    });
    wanted.collect()
}

/// Returns the caches to fill in advance that one of these steps needs, each with the source that declares its
/// downloads.
fn needed<'a>(
    selection: &'a Selection,
    steps: &'a [&str],
) -> impl Iterator<Item = (&'a str, &'a str)> {
    let volumes = selection.profile.volumes.iter();
    volumes.filter_map(|volume| {
        let downloads = volume.downloads.as_ref()?;
        let needed = steps.iter().any(|step| downloads.needed_by(step));
        needed.then_some((volume.name.as_str(), downloads.source.as_str()))
    })
}
