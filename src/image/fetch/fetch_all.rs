//! Owns fetching several files at once into the download cache. Each file comes from the first of its addresses, or
//! their mirrors, that has it.
//!
//! Plain `http` is accepted, because the digest decides whether a file is right, not the server.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt as _;
use reqwest::{Response, StatusCode};

use crate::image::fetch::{self, ByteCounter, Download, Size};
use crate::sys::address::without_login;
use crate::sys::checksum::Checksum;
use crate::sys::error::{Error, Kind, Result};

const PARALLEL: usize = 6;
/// Maximum size of source code, in bytes.
const LARGEST: u64 = 4 << 30;
/// Longest wait for a server that is overloaded.
const LONGEST: Duration = Duration::from_secs(4);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct FetchItem {
    /// The file's name in messages.
    pub(crate) name: String,
    pub(crate) urls: Vec<String>,
    pub(crate) checksum: Checksum,
}

/// Fetches missing files; returns the paths, in the order of `pieces`.
pub(crate) fn fetch_all(
    pieces: &[FetchItem],
    blobs: &Path,
    mirrors: &BTreeMap<String, String>,
    cancel: &AtomicBool,
    progress: &mut dyn FnMut(u64),
) -> Result<Vec<PathBuf>> {
    let counter = ByteCounter::default();
    let work = || {
        fetch::run(cancel, async {
            let client = fetch::client(false, false)?;
            // After a failure no further download starts. Running downloads finish.
            let failed = AtomicBool::new(false);
            let found: Vec<Option<Result<PathBuf>>> = futures_util::stream::iter(pieces)
                .map(async |piece| {
                    if failed.load(Ordering::Relaxed) {
                        return None;
                    }
                    let found = one(piece, &client, blobs, mirrors, &counter).await;
                    failed.fetch_or(found.is_err(), Ordering::Relaxed);
                    Some(found)
                })
                .buffered(PARALLEL)
                .collect()
                .await;
            found.into_iter().flatten().collect()
        })
    };
    fetch::in_thread(work, || progress(counter.done.load(Ordering::Relaxed)))
}

async fn one(
    piece: &FetchItem,
    client: &reqwest::Client,
    blobs: &Path,
    mirrors: &BTreeMap<String, String>,
    counter: &ByteCounter,
) -> Result<PathBuf> {
    let mut last = None;
    for url in &piece.urls {
        let url = &mirrored(url, mirrors);
        let shown = without_login(url);
        let wanted = Download {
            name: &shown,
            algorithm: piece.checksum.algorithm,
            digest: &piece.checksum.digits,
            size: Size::AtMost(LARGEST),
        };
        let open = async |from| get(client, url, from, &shown).await;
        match fetch::download(&wanted, open, blobs, counter).await {
            Ok(path) => return Ok(path),
            Err(error) => last = Some((shown, error)),
        }
    }
    let Some((url, error)) = last else {
        return Err(unexpected!("`{}` has no address", piece.name));
    };
    let help = match error.kind() {
        Kind::Drift => "try a mirror of that host: [mirror] in the configuration",
        _ => {
            "run the command again to resume, or set a mirror of that host: [mirror] in the configuration"
        }
    };
    let what = format!("cannot fetch `{}` from `{url}`", piece.name);
    Err(Error::new(error.kind(), what).source(error).help(help))
}

/// Requests a file's content after the first `from` bytes. GitHub and S3 refuse some requests with 503 and the like while
/// they answer others, so a few more attempts follow.
pub(super) async fn get(
    client: &reqwest::Client,
    url: &str,
    from: u64,
    name: &str,
) -> Result<Response> {
    let mut wait = fetch::POLL * 5;
    loop {
        let request = fetch::ranged(client.get(url), from);
        let response = request.send().await;
        let response = response.map_err(|error| fetch::failed(name, error))?;
        let status = response.status();
        let is_busy = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        if !is_busy || wait > LONGEST {
            return Ok(response);
        }
        tokio::time::sleep(wait).await;
        wait *= 2;
    }
}

/// Returns the address at the user's mirror of the host, or the unchanged address.
fn mirrored(url: &str, mirrors: &BTreeMap<String, String>) -> String {
    let parts = url.split_once("://").map(|(_, rest)| rest);
    let parts = parts.map(|rest| rest.split_once('/').unwrap_or((rest, "")));
    match parts.and_then(|(host, path)| Some((mirrors.get(host)?, path))) {
        Some((mirror, path)) => format!("{}/{path}", mirror.trim_end_matches('/')),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use sha2::{Digest as _, Sha256, Sha512};

    use super::*;
    use crate::image::fetch::tests::{self, ok};

    /// Serves `/a` and `/b` with their own names as content, and nothing else. Records the requests.
    fn serve() -> (String, Arc<Mutex<Vec<String>>>) {
        let seen = Arc::new(Mutex::new(Vec::new()));
        let notes = seen.clone();
        let url = tests::serve(usize::MAX, move |head| {
            let path = head.split(' ').nth(1).unwrap();
            notes.lock().unwrap().push(path.to_owned());
            match path.rsplit_once('/').unwrap().1 {
                name @ ("a" | "b") => ok(name.as_bytes()),
                _ => b"HTTP/1.1 404 x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec(),
            }
        });
        (url.split('/').nth(2).unwrap().to_owned(), seen)
    }

    fn piece(url: String, algorithm: &str, content: &str) -> FetchItem {
        let digits = match algorithm {
            "SHA256" => hex::encode(Sha256::digest(content)),
            _ => hex::encode(Sha512::digest(content)),
        };
        FetchItem {
            name: "n".to_owned(),
            urls: vec![url],
            checksum: Checksum::new(algorithm, &digits).unwrap(),
        }
    }

    fn fetch(
        pieces: &[FetchItem],
        blobs: &Path,
        mirror: Option<(&str, &str)>,
    ) -> Result<Vec<PathBuf>> {
        let mirrors = mirror.into_iter().map(|(k, v)| (k.into(), v.into()));
        fetch_all(
            pieces,
            blobs,
            &mirrors.collect(),
            &AtomicBool::new(false),
            &mut |_| {},
        )
    }

    #[test]
    fn a_file_that_gc_removed_is_fetched_again_though_a_link_to_it_remains() {
        let (host, seen) = serve();
        let blobs = tempfile::tempdir().unwrap();
        let pieces = [piece(format!("http://{host}/b"), "SHA512", "b")];
        let kept = blobs.path().join("sha256");
        for _ in 0..2 {
            fetch(&pieces, blobs.path(), None).unwrap();
            assert_eq!(fs_err::read_dir(&kept).unwrap().count(), 1);
            let known = kept.join(hex::encode(Sha256::digest("b")));
            assert_eq!(fs_err::read_to_string(&known).unwrap(), "b");
            fs_err::remove_file(&known).unwrap();
        }
        assert_eq!(*seen.lock().unwrap(), ["/b", "/b"]);
    }

    #[test]
    fn other_addresses_and_mirrors_are_tried() {
        let (host, seen) = serve();
        let blobs = tempfile::tempdir().unwrap();
        let mut twice = piece(format!("http://{host}/gone"), "SHA256", "a");
        twice.urls.push(format!("http://{host}/a"));
        fetch(&[twice], blobs.path(), None).unwrap();
        let far = piece("https://far.invalid/x/b".to_owned(), "SHA256", "b");
        let mirror = format!("http://{host}/m/");
        let mirror = ("far.invalid", mirror.as_str());
        fetch(&[far], blobs.path(), Some(mirror)).unwrap();
        assert_eq!(*seen.lock().unwrap(), ["/gone", "/a", "/m/x/b"]);
    }

    #[test]
    fn the_login_of_a_mirror_is_in_no_message() {
        let (host, _) = serve();
        let blobs = tempfile::tempdir().unwrap();
        let far = piece("https://far.invalid/x/gone".to_owned(), "SHA256", "b");
        let mirror = format!("http://bob:secret@{host}/m");
        let mirror = ("far.invalid", mirror.as_str());
        let error = fetch(&[far], blobs.path(), Some(mirror)).unwrap_err();
        assert_eq!(
            error.message(),
            format!("cannot fetch `n` from `http://{host}/m/x/gone`")
        );
        assert!(!error.chain().join(" ").contains("secret"));
    }
}
