//! Downloads from servers that lie, stall and disconnect.

use super::*;
use sha2::{Digest as _, Sha256};
use std::io::{BufRead as _, BufReader};
use std::net::TcpListener;

/// The response to a request for what follows `con`.
const REST: &[u8] = b"HTTP/1.1 206 x\r\nconnection: close\r\ncontent-range: bytes 3-6/7\r\ncontent-length: 4\r\n\r\ntent";

/// Limit in bytes for the downloads.
const MOST: u64 = 1 << 20;

/// Serves one response per request. `answer` gets the request's head.
pub(super) fn serve(requests: usize, answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> String {
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

pub(super) fn ok(body: &[u8]) -> Vec<u8> {
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

/// Downloads a file that has `content`.
fn get(url: &str, blobs: &Path) -> Result<PathBuf> {
    get_with(url, blobs, &mut |_, _| {})
}

fn get_with(
    url: &str,
    blobs: &Path,
    progress: &mut dyn FnMut(u64, Option<u64>),
) -> Result<PathBuf> {
    let (sha256, cancel) = (content_sha256(), AtomicBool::new(false));
    fetch_by(url, &sha256, MOST, blobs, false, &cancel, progress)
}

fn content_sha256() -> String {
    hex::encode(Sha256::digest(b"content"))
}

/// Returns the error of a download from nowhere, with the rules for users.
fn refused(url: &str) -> Error {
    let dir = tempfile::tempdir().unwrap();
    let (sha256, cancel) = ("0".repeat(64), AtomicBool::new(false));
    fetch(url, &sha256, MOST, dir.path(), &cancel, &mut |_, _| {}).unwrap_err()
}

/// Writes the partial file of an earlier attempt.
fn leave_behind(partial: &str, blobs: &Path) {
    let directory = blobs.join("sha256");
    fs_err::create_dir_all(&directory).unwrap();
    let name = format!(".{}.partial", content_sha256());
    fs_err::write(directory.join(name), partial).unwrap();
}

#[test]
fn the_end_of_work_ends_the_wait_for_it() {
    let work = || {
        std::thread::sleep(POLL / 20);
        Ok(())
    };
    // A busy machine may need several attempts.
    assert!((0..20).any(|_| {
        let began = Instant::now();
        in_thread(work, || {}).unwrap();
        began.elapsed() < POLL
    }));
}

#[test]
fn a_server_that_is_overloaded_for_a_moment_is_asked_again() {
    let dir = tempfile::tempdir().unwrap();
    let asked = AtomicBool::new(false);
    let url = serve(2, move |_| match asked.swap(true, Ordering::Relaxed) {
        true => ok(b"content"),
        false => b"HTTP/1.1 503 x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n".to_vec(),
    });
    get(&url, dir.path()).unwrap();
}

#[test]
fn a_damaged_blob_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = serve(2, |_| ok(b"content"));
    let blob = get(&url, dir.path()).unwrap();
    fs_err::write(&blob, "rotten!").unwrap();
    let wanted = Download {
        name: "file",
        algorithm: Algorithm::Sha256,
        digest: &content_sha256(),
        size: Size::AtMost(7),
    };
    let cancel = AtomicBool::new(false);
    let found = run(&cancel, present(&blob, &wanted, &ByteCounter::default()));
    // Another process may have put a good one there since.
    assert!(!found.unwrap() && blob.exists());
    let blob = get(&url, dir.path()).unwrap();
    assert_eq!(fs_err::read(&blob).unwrap(), b"content");
    // `gc` sees that a good one is used.
    let file = fs_err::File::open(&blob).unwrap();
    file.file().set_modified(SystemTime::UNIX_EPOCH).unwrap();
    let found = run(&cancel, present(&blob, &wanted, &ByteCounter::default()));
    let modified = file.metadata().unwrap().modified().unwrap();
    assert!(found.unwrap() && modified > SystemTime::UNIX_EPOCH);
}

#[test]
fn a_server_without_ranges_starts_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = serve(1, |_| ok(b"content"));
    leave_behind("garbage that is longer", dir.path());
    let mut totals = Vec::new();
    let mut progress = |_: u64, total: Option<u64>| totals.push(total);
    get_with(&url, dir.path(), &mut progress).unwrap();
    // The progress does not count what was thrown away.
    assert!(totals.into_iter().flatten().all(|total| total == 7));
}

#[test]
fn a_damaged_beginning_is_fetched_again() {
    let dir = tempfile::tempdir().unwrap();
    let url = serve(2, |head| match head.contains("range: bytes=3-") {
        true => REST.to_vec(),
        false => ok(b"content"),
    });
    leave_behind("\0\0\0", dir.path());
    let blob = get(&url, dir.path()).unwrap();
    assert_eq!(fs_err::read(blob).unwrap(), b"content");
}

#[test]
fn another_content_is_refused_and_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let url = serve(1, |_| ok(b"<html>please log in</html>"));
    let error = get(&url, dir.path()).unwrap_err();
    assert_eq!(error.kind(), Kind::Drift);
    assert!(error.chain().join(" ").contains("web page"));
    assert_eq!(
        fs_err::read_dir(dir.path().join("sha256")).unwrap().count(),
        0
    );
}

#[test]
fn a_server_without_end_fills_no_disk() {
    let dir = tempfile::tempdir().unwrap();
    let url = serve(1, |_| {
        let head = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n";
        [head.as_slice(), &[b' '; 2 << 20]].concat()
    });
    let error = get(&url, dir.path()).unwrap_err();
    assert_eq!(error.kind(), Kind::Invalid);
    assert_has!(error.message(), "has more than 1048576 bytes");
    let mut left = fs_err::read_dir(dir.path().join("sha256")).unwrap();
    let partial = left.next().unwrap().unwrap();
    assert_eq!(partial.metadata().unwrap().len(), 0);
}

#[test]
fn plain_http_is_refused() {
    let chain = refused("http://127.0.0.1:9/x").chain().join(": ");
    assert_has!(chain, "scheme");
}

#[test]
fn cancel_does_not_wait_for_a_lookup_of_a_host_name() {
    static CANCEL: AtomicBool = AtomicBool::new(false);
    let (answer, resolver) = std::sync::mpsc::channel::<()>();
    let begun = Instant::now();
    let outcome = run(&CANCEL, async {
        // The HTTP client asks the system's resolver in this way. Nothing interrupts that.
        let lookup = move || {
            CANCEL.store(true, Ordering::Relaxed);
            resolver.recv_timeout(PATIENCE)
        };
        drop(tokio::task::spawn_blocking(lookup).await);
        Ok(())
    });
    assert_eq!(outcome.unwrap_err().kind(), Kind::Signal(2));
    assert!(begun.elapsed() < PATIENCE / 2);
    drop(answer);
}

#[test]
fn a_login_is_in_no_message() {
    let error = refused("https://me:secret@127.0.0.1:9/x?token=secret");
    let chain = error.chain().join(": ");
    assert_has!(chain, "cannot download `https://127.0.0.1:9/x?token=***`");
    assert!(!chain.contains("secret") && error.help_text().is_some());
}

#[test]
fn a_redirect_does_not_tell_where_it_comes_from() {
    let dir = tempfile::tempdir().unwrap();
    let target = serve(1, |head| {
        assert!(!head.contains("secret"), "{head}");
        ok(b"content")
    });
    let url = serve(1, move |_| {
        let head = "HTTP/1.1 302 x\r\nconnection: close\r\ncontent-length: 0\r\n";
        format!("{head}location: {target}\r\n\r\n").into_bytes()
    });
    get(&format!("{url}?token=secret"), dir.path()).unwrap();
}
