//! Owns the download cache `blobs/sha256/<digest>`: what is there under its digest has been verified, and what is
//! being downloaded has another name, from which an interrupted download goes on.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use nix::fcntl::{Flock, FlockArg};
use reqwest::StatusCode;
use sha2::{Digest as _, Sha256};

use super::hex;
use super::unpack::stop_if;
use crate::error::{Error, Kind, Result, ResultExt as _};

const POLL: Duration = Duration::from_millis(100);

/// How far a download is; shared with the thread that waits for it.
#[derive(Debug, Default)]
struct Meter {
    done: AtomicU64,
    /// 0: not known.
    total: AtomicU64,
}

/// Returns the path of the blob with this SHA-256, downloading it if need be.
pub(super) fn fetch(
    url: &str,
    sha256: &str,
    blobs: &Path,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<PathBuf> {
    fetch_by(url, sha256, blobs, true, cancel, progress)
}

fn fetch_by(
    url: &str,
    sha256: &str,
    blobs: &Path,
    https_only: bool,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<PathBuf> {
    let directory = blobs.join("sha256");
    fs_err::create_dir_all(&directory)?;
    let blob = directory.join(sha256);
    if blob.exists() {
        return Ok(blob);
    }
    let partial = directory.join(format!(".{sha256}.partial"));
    let file = lock(&partial, cancel)?;
    // Another process may have finished it while this one waited.
    if blob.exists() {
        fs_err::remove_file(&partial)?;
        return Ok(blob);
    }
    let meter = Meter::default();
    // A thread of its own: the caller's may already be running a tokio runtime.
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            let runtime = tokio::runtime::Builder::new_current_thread()
                .enable_all()
                .build()?;
            runtime.block_on(async {
                tokio::select! {
                    outcome = transfer(url, &partial, https_only, &meter) => outcome,
                    () = cancelled(cancel) => Err(Error::new(Kind::Signal(2), "interrupted")),
                }
            })
        });
        while !worker.is_finished() {
            let total = Some(meter.total.load(Ordering::Relaxed)).filter(|total| *total > 0);
            progress(meter.done.load(Ordering::Relaxed), total);
            std::thread::sleep(POLL);
        }
        worker
            .join()
            .unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })?;
    if let Err(error) = verify(&partial, sha256, cancel) {
        if error.kind() == Kind::Drift {
            fs_err::remove_file(&partial)?;
        }
        return Err(error).context(|| format!("cannot use what `{url}` sent"));
    }
    fs_err::OpenOptions::new()
        .write(true)
        .open(&partial)?
        .sync_all()?;
    fs_err::rename(&partial, &blob)?;
    drop(file);
    Ok(blob)
}

async fn cancelled(cancel: &AtomicBool) {
    while !cancel.load(Ordering::Relaxed) {
        tokio::time::sleep(POLL).await;
    }
}

/// Takes the partial file for this process; the kernel frees it if the process dies.
fn lock(partial: &Path, cancel: &AtomicBool) -> Result<Flock<std::os::fd::OwnedFd>> {
    loop {
        stop_if(cancel)?;
        let file = fs_err::OpenOptions::new()
            .create(true)
            .append(true)
            .open(partial)?;
        match Flock::lock(
            std::os::fd::OwnedFd::from(file.into_file()),
            FlockArg::LockExclusiveNonblock,
        ) {
            Ok(lock) => return Ok(lock),
            Err((_, nix::errno::Errno::EWOULDBLOCK)) => std::thread::sleep(POLL),
            Err((_, error)) => {
                return Err(error).context(|| format!("cannot lock `{}`", partial.display()));
            }
        }
    }
}

async fn transfer(url: &str, partial: &Path, https_only: bool, meter: &Meter) -> Result<()> {
    let fail = || format!("cannot download `{url}`");
    let wrap = |error: reqwest::Error| Error::unexpected(fail()).source(error.without_url());
    // Fails only if somebody else has installed one already, which is as good.
    drop(rustls::crypto::ring::default_provider().install_default());
    let client = reqwest::Client::builder()
        // Holds for redirects too.
        .https_only(https_only)
        .connect_timeout(Duration::from_secs(30))
        .read_timeout(Duration::from_secs(60))
        .user_agent(concat!("rockenv/", env!("CARGO_PKG_VERSION")))
        .build()
        .map_err(wrap)?;
    let mut have = fs_err::metadata(partial)?.len();
    let request = |from: u64| match from {
        0 => client.get(url),
        from => client
            .get(url)
            .header(reqwest::header::RANGE, format!("bytes={from}-")),
    };
    let mut response = request(have).send().await.map_err(wrap)?;
    let resumes = response.status() == StatusCode::PARTIAL_CONTENT && {
        let range = response
            .headers()
            .get(reqwest::header::CONTENT_RANGE)
            .and_then(|range| range.to_str().ok());
        range.is_some_and(|range| range.starts_with(&format!("bytes {have}-")))
    };
    if have > 0 && !resumes {
        have = 0;
        fs_err::OpenOptions::new()
            .write(true)
            .open(partial)?
            .set_len(0)?;
        if !response.status().is_success() || response.status() == StatusCode::PARTIAL_CONTENT {
            response = request(0).send().await.map_err(wrap)?;
        }
    }
    if !response.status().is_success() {
        return Err(
            Error::unexpected(fail()).source(format!("the server answered {}", response.status()))
        );
    }
    meter.done.store(have, Ordering::Relaxed);
    meter.total.store(
        response.content_length().map_or(0, |length| have + length),
        Ordering::Relaxed,
    );
    let mut file = fs_err::OpenOptions::new().append(true).open(partial)?;
    while let Some(chunk) = response.chunk().await.map_err(wrap)? {
        std::io::Write::write_all(&mut file, &chunk)?;
        meter.done.fetch_add(chunk.len() as u64, Ordering::Relaxed);
    }
    Ok(())
}

/// Fails with `Kind::Drift` unless the file has this SHA-256.
pub(super) fn verify(path: &Path, sha256: &str, cancel: &AtomicBool) -> Result<()> {
    use std::io::Read as _;
    let mut file = fs_err::File::open(path)?;
    let mut sha = Sha256::new();
    let mut buffer = vec![0; 256 << 10];
    let mut start = Vec::new();
    loop {
        stop_if(cancel)?;
        match file.read(&mut buffer)? {
            0 => break,
            amount => {
                if start.is_empty() {
                    start = buffer[..amount.min(64)].to_vec();
                }
                sha.update(&buffer[..amount]);
            }
        }
    }
    let found = hex(&sha.finalize());
    if found == sha256 {
        return Ok(());
    }
    let page = if start.trim_ascii_start().starts_with(b"<") {
        " (it is a web page)"
    } else {
        ""
    };
    Err(Error::new(Kind::Drift, format!("`{}` has SHA-256 {found}, not {sha256}{page}", path.display()))
        .help("check where the file comes from; if the change is wanted, write its sha256 into the recipe"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{BufRead as _, BufReader, Write as _};
    use std::net::TcpListener;

    /// Serves one response per request, with the request's head passed to `answer`.
    fn serve(requests: usize, answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/file", listener.local_addr().unwrap());
        std::thread::spawn(move || {
            for _ in 0..requests {
                let (mut stream, _) = listener.accept().unwrap();
                let mut head = String::new();
                let mut reader = BufReader::new(stream.try_clone().unwrap());
                while !head.ends_with("\r\n\r\n") {
                    reader.read_line(&mut head).unwrap();
                }
                stream.write_all(&answer(&head.to_lowercase())).unwrap();
            }
        });
        url
    }

    fn ok(body: &[u8]) -> Vec<u8> {
        [
            format!(
                "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: {}\r\n\r\n",
                body.len()
            )
            .as_bytes(),
            body,
        ]
        .concat()
    }

    fn get(url: &str, body: &[u8], blobs: &Path) -> Result<PathBuf> {
        let sha256 = hex(&Sha256::digest(body));
        fetch_by(
            url,
            &sha256,
            blobs,
            false,
            &AtomicBool::new(false),
            &mut |_, _| {},
        )
    }

    #[test]
    fn a_download_is_verified_and_kept() {
        let dir = tempfile::tempdir().unwrap();
        let url = serve(1, |_| ok(b"content"));
        for _ in 0..2 {
            let blob = get(&url, b"content", dir.path()).unwrap();
            assert_eq!(fs_err::read(blob).unwrap(), b"content");
        }
        assert_eq!(
            fs_err::read_dir(dir.path().join("sha256")).unwrap().count(),
            1
        );
    }

    #[test]
    fn an_interrupted_download_goes_on() {
        let dir = tempfile::tempdir().unwrap();
        let url = serve(2, |head| {
            if head.contains("range: bytes=3-") {
                return b"HTTP/1.1 206 x\r\nconnection: close\r\ncontent-range: bytes 3-6/7\r\ncontent-length: 4\r\n\r\ntent".to_vec();
            }
            b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: 7\r\n\r\ncon".to_vec()
        });
        assert!(get(&url, b"content", dir.path()).is_err());
        let blob = get(&url, b"content", dir.path()).unwrap();
        assert_eq!(fs_err::read(blob).unwrap(), b"content");
    }

    #[test]
    fn a_server_without_ranges_starts_again() {
        let dir = tempfile::tempdir().unwrap();
        let url = serve(1, |_| ok(b"content"));
        let partial = dir
            .path()
            .join("sha256")
            .join(format!(".{}.partial", hex(&Sha256::digest(b"content"))));
        fs_err::create_dir_all(partial.parent().unwrap()).unwrap();
        fs_err::write(&partial, "garbage that is longer").unwrap();
        get(&url, b"content", dir.path()).unwrap();
    }

    #[test]
    fn another_content_is_refused_and_forgotten() {
        let dir = tempfile::tempdir().unwrap();
        let url = serve(1, |_| ok(b"<html>please log in</html>"));
        let error = get(&url, b"content", dir.path()).unwrap_err();
        assert_eq!(error.kind(), Kind::Drift);
        assert!(error.chain().join(" ").contains("web page"));
        assert_eq!(
            fs_err::read_dir(dir.path().join("sha256")).unwrap().count(),
            0
        );
    }

    #[test]
    fn plain_http_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let cancel = AtomicBool::new(false);
        let outcome = fetch(
            "http://127.0.0.1:9/x",
            &"0".repeat(64),
            dir.path(),
            &cancel,
            &mut |_, _| {},
        );
        let chain = outcome.unwrap_err().chain().join(": ");
        assert!(chain.contains("scheme"), "{chain}");
    }

    #[test]
    fn cancel_stops_a_server_that_is_silent() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/x", listener.local_addr().unwrap());
        let dir = tempfile::tempdir().unwrap();
        let cancel = AtomicBool::new(false);
        let outcome = fetch_by(
            &url,
            &"0".repeat(64),
            dir.path(),
            false,
            &cancel,
            &mut |_, _| {
                cancel.store(true, Ordering::Relaxed);
            },
        );
        assert_eq!(outcome.unwrap_err().kind(), Kind::Signal(2));
    }
}
