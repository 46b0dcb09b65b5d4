//! Owns the download cache `blobs/sha256/<digest>`. A file's digest is verified before the file enters the cache and,
//! because disks fail, again before use. A partial download has another name, and the next attempt resumes it. A file
//! requested by another kind of digest also has a link under that digest.

pub(crate) mod fetch_all;
mod names;

use std::io::{Read, Write as _};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::{Duration, Instant, SystemTime};

use crate::image::certificates::{self, Authorities};
use crate::sys::address::without_login;
use crate::sys::atomic::{self, Survives};
use crate::sys::checksum::Algorithm;
use crate::sys::error::{Error, Kind, Result, ResultExt as _, if_exists};
use crate::sys::signals::stop_if;
use crate::sys::thread;
use bytes::Bytes;
use nix::fcntl::{Flock, FlockArg};
use reqwest::{ClientBuilder, Response, StatusCode};
use sha2::digest::DynDigest;

pub(crate) const POLL: Duration = Duration::from_millis(100);

/// Default time that a server may send almost nothing.
const PATIENCE: Duration = Duration::from_secs(60);
const AGAIN: &str = "run the command again: what has arrived is kept";
/// Minimum rate in bytes per second. A slower server counts as sending almost nothing.
const SLOWEST: u64 = 1 << 10;
/// Bytes that justify another attempt. `MOST_POOR` limits the attempts that bring less.
const WORTHWHILE: u64 = 64 << 10;
const MOST_POOR: u32 = 2;

static CONFIGURED: OnceLock<Duration> = OnceLock::new();

/// Sets the time that a server may send almost nothing. Only the first call has an effect.
pub(crate) fn configure(patience: Option<Duration>) {
    if let Some(patience) = patience {
        // A second caller has read the same configuration.
        CONFIGURED.set(patience).ok();
    }
}

pub(crate) fn patience() -> Duration {
    CONFIGURED.get().copied().unwrap_or(PATIENCE)
}

/// Returns the time that a registry may accept nothing, or process an upload. Some hash all of it again.
pub(crate) fn long_patience() -> Duration {
    patience() * 10
}

/// Progress of downloads, shared with the thread that waits for them.
#[derive(Debug, Default)]
pub(crate) struct ByteCounter {
    pub(crate) done: AtomicU64,
    /// 0 if unknown.
    pub(crate) total: AtomicU64,
}

impl ByteCounter {
    /// Returns the bytes downloaded so far, and the total if known.
    pub(crate) fn read(&self) -> (u64, Option<u64>) {
        let total = Some(self.total.load(Ordering::Relaxed)).filter(|total| *total > 0);
        (self.done.load(Ordering::Relaxed), total)
    }
}

#[derive(Debug)]
pub(super) struct Download<'a> {
    /// The file's name in messages.
    pub(super) name: &'a str,
    pub(super) algorithm: Algorithm,
    /// The file's digest in hexadecimal digits.
    pub(super) digest: &'a str,
    pub(super) size: Size,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Size {
    /// The size that the referring document declares. Any other size is refused.
    Exactly(u64),
    AtMost(u64),
}

impl Size {
    fn check(self, name: &str, found: u64) -> Result<()> {
        let wrong = match self {
            Self::Exactly(size) if found != size => format!("not {size} as the image says"),
            Self::AtMost(limit) if found > limit => format!("more than the limit of {limit}"),
            Self::Exactly(_) | Self::AtMost(_) => return Ok(()),
        };
        Err(invalid!("`{name}` has {found} bytes, {wrong}")
            .help("it is damaged or was tampered with; use another"))
    }

    fn most(self) -> u64 {
        let (Self::Exactly(size) | Self::AtMost(size)) = self;
        size
    }
}

/// Returns the path of the blob with this SHA-256, downloading it if necessary. Refuses more than `most` bytes.
pub(crate) fn fetch(
    url: &str,
    sha256: &str,
    most: u64,
    blobs: &Path,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<PathBuf> {
    fetch_by(url, sha256, most, blobs, true, cancel, progress)
}

fn fetch_by(
    url: &str,
    sha256: &str,
    most: u64,
    blobs: &Path,
    https_only: bool,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<PathBuf> {
    let counter = ByteCounter::default();
    let name = &without_login(url);
    let wanted = Download {
        name,
        algorithm: Algorithm::Sha256,
        digest: sha256,
        size: Size::AtMost(most),
    };
    let work = || {
        run(cancel, async {
            let client = client(https_only, false)?;
            let open = async |from| {
                let response = fetch_all::get(&client, url, from, name).await?;
                // A server without ranges sends everything again.
                let before = match response.status() {
                    StatusCode::PARTIAL_CONTENT => from,
                    _ => 0,
                };
                let length = response.content_length();
                let total = length.map_or(0, |length| before.saturating_add(length));
                counter.total.store(total, Ordering::Relaxed);
                Ok(response)
            };
            download(&wanted, open, blobs, &counter).await
        })
    };
    in_thread(work, || {
        let (done, total) = counter.read();
        progress(done, total);
    })
}

/// Runs `work` in its own thread, because the caller's thread may already be running a tokio runtime. Calls `tick`
/// while it waits.
pub(crate) fn in_thread<T: Send>(
    work: impl FnOnce() -> Result<T> + Send,
    mut tick: impl FnMut(),
) -> Result<T> {
    let (running, ended) = channel::<()>();
    std::thread::scope(|scope| {
        // When `work` ends, even by a panic, `running` is dropped, which ends the wait.
        let worker = thread::start_in(scope, || (work(), drop(running)).0)?;
        tick();
        while ended.recv_timeout(POLL) == Err(RecvTimeoutError::Timeout) {
            tick();
        }
        tick();
        thread::joined(worker.join())
    })
}

pub(crate) fn run<T>(cancel: &AtomicBool, work: impl Future<Output = Result<T>>) -> Result<T> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    let outcome = runtime.block_on(async {
        tokio::select! {
            outcome = work => outcome,
            () = until_set(cancel) => Err(Error::new(Kind::Signal(2), "interrupted")),
        }
    });
    // Dropping it would wait for a lookup of a host name, and resolvers may take minutes to give up.
    runtime.shutdown_background();
    outcome
}

pub(crate) async fn until_set(flag: &AtomicBool) {
    while !flag.load(Ordering::Relaxed) {
        tokio::time::sleep(POLL).await;
    }
}

/// Returns an HTTP client. It honours the user's proxy variables, except for servers that are `local`: a proxy would
/// look for them on its own machine, and get passwords that are only sent to this one.
pub(super) fn client(https_only: bool, local: bool) -> Result<reqwest::Client> {
    client_with(https_only, local, |builder| {
        builder.read_timeout(patience())
    })
}

/// Returns a client for uploads. It has no read timeout: nothing arrives until everything is sent, and a server with a
/// busy disk may accept nothing for a while.
pub(super) fn upload_client(https_only: bool, local: bool) -> Result<reqwest::Client> {
    client_with(https_only, local, |builder| {
        builder.tcp_user_timeout(long_patience())
    })
}

fn client_with(
    https_only: bool,
    local: bool,
    with: impl FnOnce(ClientBuilder) -> ClientBuilder,
) -> Result<reqwest::Client> {
    // Fails only if a provider is already installed, which serves as well.
    drop(rustls::crypto::ring::default_provider().install_default());
    let builder = match local {
        true => reqwest::Client::builder().no_proxy(),
        false => reqwest::Client::builder(),
    };
    let builder = builder
        .dns_resolver(names::Names)
        .tls_certs_merge(Authorities::of_clients()?)
        // Applies to redirects, too.
        .https_only(https_only)
        // It would tell the next server the parameters of an address, such as a token.
        .referer(false)
        .connect_timeout(patience() / 2)
        .user_agent(concat!("rockenv/", env!("CARGO_PKG_VERSION")));
    let client = with(builder).build();
    client.map_err(|error| unexpected!("cannot make an HTTP client").source(error))
}

/// Requests the content after the first `from` bytes.
pub(super) fn ranged(request: reqwest::RequestBuilder, from: u64) -> reqwest::RequestBuilder {
    match from {
        0 => request,
        from => request.header(reqwest::header::RANGE, format!("bytes={from}-")),
    }
}

pub(super) fn failed(name: &str, error: reqwest::Error) -> Error {
    let help = certificates::help(&error).unwrap_or(AGAIN);
    unavailable!("cannot download `{name}`")
        .source(error.without_url())
        .help(help)
}

/// A server's response, which must not arrive too slowly.
pub(super) struct Body<'a> {
    response: Response,
    /// Name of the content in messages.
    name: &'a str,
    /// Start of the interval in which `bytes` arrived.
    since: Instant,
    bytes: u64,
}

impl<'a> Body<'a> {
    pub(super) fn new(response: Response, name: &'a str) -> Self {
        Self {
            response,
            name,
            since: Instant::now(),
            bytes: 0,
        }
    }

    /// Returns the next chunk; `None` at the end.
    async fn chunk(&mut self) -> Result<Option<Bytes>> {
        let patience = patience();
        let left = patience.saturating_sub(self.since.elapsed());
        let Ok(chunk) = tokio::time::timeout(left, self.response.chunk()).await else {
            return Err(unavailable!("cannot download `{}`", self.name)
                .source(format!(
                    "the server sent {} bytes in {} seconds",
                    self.bytes,
                    patience.as_secs()
                ))
                .help(AGAIN));
        };
        let chunk = chunk.map_err(|error| failed(self.name, error))?;
        self.bytes += chunk.as_ref().map_or(0, |chunk| chunk.len() as u64);
        if self.bytes >= SLOWEST * patience.as_secs() {
            (self.since, self.bytes) = (Instant::now(), 0);
        }
        Ok(chunk)
    }

    /// Reads the whole response. Refuses more than `most` bytes.
    pub(super) async fn whole(mut self, most: u64) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while let Some(chunk) = self.chunk().await? {
            bytes.extend_from_slice(&chunk);
            if bytes.len() as u64 > most {
                return Err(too_long(self.name, most));
            }
        }
        Ok(bytes)
    }
}

fn too_long(name: &str, most: u64) -> Error {
    invalid!("`{name}` has more than {most} bytes")
        .help("it is damaged or was tampered with; use another")
}

/// Returns the path of a blob, downloading it if necessary. `open` sends the request for the content after a number of
/// bytes.
pub(super) async fn download(
    wanted: &Download<'_>,
    open: impl AsyncFn(u64) -> Result<Response>,
    blobs: &Path,
    counter: &ByteCounter,
) -> Result<PathBuf> {
    let directory = blobs.join(wanted.algorithm.name());
    fs_err::create_dir_all(&directory)?;
    let blob = directory.join(wanted.digest);
    if present(&blob, wanted, counter).await? {
        return Ok(blob);
    }
    let partial = directory.join(format!(".{}.partial", wanted.digest));
    let file = lock(&partial).await?;
    // Another process may have finished the download while this process waited for the lock.
    if present(&blob, wanted, counter).await? {
        fs_err::remove_file(&partial)?;
        return Ok(blob);
    }
    // Damaged, or a link whose target `gc` removed. Only under the lock, or a new download would be removed.
    if_exists(fs_err::remove_file(&blob))?;
    let is_begun = fs_err::metadata(&partial)?.len() > 0;
    let mut found = complete(wanted, &open, &partial, counter).await?;
    if is_begun && found != wanted.digest {
        // A power failure or another server may have left anything in the partial file.
        let size = fs_err::metadata(&partial)?.len();
        counter.done.fetch_sub(size, Ordering::Relaxed);
        empty(&partial)?;
        found = complete(wanted, &open, &partial, counter).await?;
    }
    if found != wanted.digest {
        let error = mismatch(&partial, wanted.algorithm, &found, wanted.digest);
        fs_err::remove_file(&partial)?;
        return Err(error).context(|| format!("`{}` sent an invalid response", wanted.name));
    }
    let size = fs_err::metadata(&partial)?.len();
    if let Err(error) = wanted.size.check(wanted.name, size) {
        fs_err::remove_file(&partial)?;
        return Err(error);
    }
    match wanted.algorithm {
        Algorithm::Sha256 => fs_err::rename(&partial, &blob)?,
        _ => file_under_sha256(&partial, &blob, blobs).await?,
    }
    drop(file);
    Ok(blob)
}

/// Completes the partial file over several connections if necessary; returns the digest of the whole file.
async fn complete(
    wanted: &Download<'_>,
    open: &impl AsyncFn(u64) -> Result<Response>,
    partial: &Path,
    counter: &ByteCounter,
) -> Result<String> {
    let (mut had, mut poor) = (0, 0);
    loop {
        match transfer(wanted, open, partial, counter).await {
            Ok(found) => return Ok(found),
            Err(error) if [Kind::Drift, Kind::Invalid].contains(&error.kind()) => {
                return Err(error);
            }
            Err(error) => {
                // A broken connection is worth a retry as long as each attempt brings data. Only a few attempts may
                // bring little.
                let have = fs_err::metadata(partial).map_or(0, |partial| partial.len());
                poor += u32::from(have < had + WORTHWHILE);
                if have <= had || poor > MOST_POOR {
                    return Err(error);
                }
                had = have;
            }
        }
    }
}

fn empty(partial: &Path) -> Result<()> {
    let file = fs_err::OpenOptions::new().write(true).open(partial)?;
    Ok(file.set_len(0)?)
}

/// Stores a finished download under its SHA-256, with a link under the requested digest.
async fn file_under_sha256(partial: &Path, blob: &Path, blobs: &Path) -> Result<()> {
    let file = fs_err::File::open(partial)?;
    let (hash, _) = hashed(file, Algorithm::Sha256, |_| ()).await?;
    let sha256 = hex::encode(hash.finalize());
    fs_err::create_dir_all(blobs.join("sha256"))?;
    fs_err::rename(partial, blobs.join("sha256").join(&sha256))?;
    Ok(fs_err::os::unix::fs::symlink(
        Path::new("../sha256").join(sha256),
        blob,
    )?)
}

pub(super) fn keep(bytes: &[u8], sha256: &str, blobs: &Path) -> Result<()> {
    let directory = blobs.join("sha256");
    fs_err::create_dir_all(&directory)?;
    atomic::replace(&directory.join(sha256), bytes, Survives::Either)
}

/// Returns whether an undamaged blob exists.
async fn present(blob: &Path, wanted: &Download<'_>, counter: &ByteCounter) -> Result<bool> {
    let Some(file) = if_exists(fs_err::File::open(blob))? else {
        return Ok(false);
    };
    let (hash, size) = hashed(&file, wanted.algorithm, |_| ()).await?;
    if hex::encode(hash.finalize()) != wanted.digest {
        return Ok(false);
    }
    wanted.size.check(wanted.name, size)?;
    counter.done.fetch_add(size, Ordering::Relaxed);
    // `gc` removes unused downloads, and a file system that is mounted `noatime` records no reading.
    drop(file.file().set_modified(SystemTime::now()));
    Ok(true)
}

/// Hashes the rest of a file; returns the hash and the number of bytes. Yields to other tasks of this thread, such as
/// one that checks for cancellation.
pub(crate) async fn hashed(
    mut file: impl Read,
    algorithm: Algorithm,
    progress: impl Fn(u64),
) -> Result<(Box<dyn DynDigest + Send>, u64)> {
    let (mut hash, mut size) = (algorithm.hasher(), 0);
    let mut buffer = vec![0; 256 << 10];
    loop {
        let amount = file.read(&mut buffer)?;
        if amount == 0 {
            return Ok((hash, size));
        }
        hash.update(&buffer[..amount]);
        size += amount as u64;
        progress(amount as u64);
        tokio::task::yield_now().await;
    }
}

/// Locks the partial file for this process. The kernel unlocks it when the process dies.
async fn lock(partial: &Path) -> Result<Flock<std::os::fd::OwnedFd>> {
    loop {
        let file = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(partial)?;
        match Flock::lock(
            std::os::fd::OwnedFd::from(file.into_file()),
            FlockArg::LockExclusiveNonblock,
        ) {
            // The previous lock holder may have renamed or removed the file in the meantime.
            Ok(lock) if names(partial, &lock)? => return Ok(lock),
            Ok(_) => {}
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => tokio::time::sleep(POLL).await,
            Err((_, error)) => {
                return Err(error).context(|| format!("cannot lock `{}`", partial.display()));
            }
        }
    }
}

fn names(path: &Path, file: &Flock<std::os::fd::OwnedFd>) -> Result<bool> {
    use std::os::unix::fs::MetadataExt as _;
    let open = nix::sys::stat::fstat(&**file)?;
    let named = fs_err::metadata(path);
    Ok(named.is_ok_and(|named| (named.dev(), named.ino()) == (open.st_dev, open.st_ino)))
}

/// Completes the partial file over one connection; returns the digest of the whole file.
async fn transfer(
    wanted: &Download<'_>,
    open: &impl AsyncFn(u64) -> Result<Response>,
    partial: &Path,
    counter: &ByteCounter,
) -> Result<String> {
    let file = fs_err::File::open(partial)?;
    let (mut hash, mut have) = hashed(file, wanted.algorithm, |_| ()).await?;
    // A process was killed between the last byte and the rename.
    if have > 0 && hex::encode(hash.box_clone().finalize()) == wanted.digest {
        counter.done.fetch_add(have, Ordering::Relaxed);
        return Ok(wanted.digest.to_owned());
    }
    let mut response = open(have).await?;
    let starts_again = match response.status() {
        StatusCode::PARTIAL_CONTENT => {
            let range = response.headers().get(reqwest::header::CONTENT_RANGE);
            let range = range.and_then(|range| range.to_str().ok());
            !range.is_some_and(|range| range.starts_with(&format!("bytes {have}-")))
        }
        // The partial file is longer than the server's file, or the server does not support ranges.
        status => status == StatusCode::RANGE_NOT_SATISFIABLE || status.is_success(),
    };
    if have > 0 && starts_again {
        have = 0;
        hash.reset();
        empty(partial)?;
        if !response.status().is_success() || response.status() == StatusCode::PARTIAL_CONTENT {
            response = open(0).await?;
        }
    }
    if !response.status().is_success() {
        return Err(unavailable!("cannot download `{}`", wanted.name)
            .source(format!("the server answered {}", response.status())));
    }
    let mut counted = have;
    counter.done.fetch_add(have, Ordering::Relaxed);
    let outcome = async {
        let mut file = fs_err::OpenOptions::new().append(true).open(partial)?;
        let mut body = Body::new(response, wanted.name);
        while let Some(chunk) = body.chunk().await? {
            let amount = chunk.len() as u64;
            if counted + amount > wanted.size.most() {
                file.set_len(0)?;
                return Err(too_long(wanted.name, wanted.size.most()));
            }
            file.write_all(&chunk)?;
            hash.update(&chunk);
            counted += amount;
            counter.done.fetch_add(amount, Ordering::Relaxed);
        }
        Ok(())
    }
    .await;
    if outcome.is_err() {
        // The next attempt counts the existing bytes again.
        counter.done.fetch_sub(counted, Ordering::Relaxed);
    }
    outcome.map(|()| hex::encode(hash.finalize()))
}

/// Fails with `Kind::Drift` unless the file has this SHA-256.
pub(crate) fn verify(path: &Path, sha256: &str, cancel: &AtomicBool) -> Result<()> {
    let found = sha256_of(fs_err::File::open(path)?, cancel)?;
    match found == sha256 {
        true => Ok(()),
        false => Err(mismatch(path, Algorithm::Sha256, &found, sha256)),
    }
}

pub(crate) fn sha256_of(mut file: impl Read, cancel: &AtomicBool) -> Result<String> {
    digest_of(&mut file, Algorithm::Sha256, cancel)
}

pub(crate) fn digest_of(
    file: &mut impl Read,
    algorithm: Algorithm,
    cancel: &AtomicBool,
) -> Result<String> {
    let mut hash = algorithm.hasher();
    let mut buffer = vec![0; 256 << 10];
    loop {
        stop_if(cancel)?;
        match file.read(&mut buffer)? {
            0 => return Ok(hex::encode(hash.finalize())),
            amount => hash.update(&buffer[..amount]),
        }
    }
}

fn mismatch(path: &Path, algorithm: Algorithm, found: &str, wanted: &str) -> Error {
    let mut start = [0; 64];
    let amount = fs_err::File::open(path).and_then(|mut file| file.read(&mut start));
    let start = &start[..amount.unwrap_or(0)];
    let page = if start.trim_ascii_start().starts_with(b"<") {
        " (it is a web page)"
    } else {
        ""
    };
    drift!(
        "`{}` has {algorithm} {found}, not {wanted}{page}",
        path.display()
    )
    .help(
        "check the origin of the file; if the change is intended, write its sha256 into the recipe",
    )
}

#[cfg(test)]
mod tests;
