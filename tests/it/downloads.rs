//! Tests of the files that rockenv fetches ahead of a build: once for all envs, by digest, and without a network once
//! they are in the store.

use std::path::PathBuf;
use std::process::Command;
use std::sync::{Arc, Mutex};

use crate::image_oci::make::{Server, response};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::wait_until;
use fs_err as fs;
use nix::sys::signal::Signal;

/// A web server with a list of files that tests can replace. It records the requests.
struct Web {
    server: Server,
    files: Arc<Mutex<Vec<(&'static str, &'static str)>>>,
}

fn path(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}

impl Web {
    fn start() -> Self {
        let files = Arc::new(Mutex::new(vec![
            ("one-1.0.tar.gz", "first\n"),
            ("two.zip", "second\n"),
        ]));
        let have = files.clone();
        let server = Server::start(move |head| {
            let name = path(head).rsplit('/').next().unwrap_or_default();
            let have = have.lock().unwrap();
            match have.iter().find(|(file, _)| *file == name) {
                Some((_, body)) => response("200 OK", "", body.as_bytes()),
                None => response("404 Not Found", "", b""),
            }
        });
        Self { server, files }
    }

    fn asked(&self) -> Vec<String> {
        let asked = self.server.asked();
        let mut asked: Vec<String> = asked.iter().map(|head| path(head).to_owned()).collect();
        asked.sort();
        asked
    }

    /// Replaces the list of files.
    fn serve(&self, files: &[(&'static str, &'static str)]) {
        *self.files.lock().unwrap() = files.to_vec();
    }
}

/// Makes a source that declares two archives on that host, and a profile with a step that shows the files that it
/// finds.
fn project(store: &TestStore, host: &str) -> PathBuf {
    let source = store.work().join("src");
    fs::create_dir_all(source.join("third-party/one")).unwrap();
    let sum = |program: &str, text: &str| {
        let file = store.work().join("sum");
        fs::write(&file, text).unwrap();
        let said = run(Command::new(program).arg(&file));
        said.split(' ').next().unwrap().to_owned()
    };
    let one = format!(
        "set(VERSION 1.0)\ntherock_subproject_fetch(one-sources\n  # from afar\n  URL http://{host}/x/one-${{VERSION}}.tar.gz\n  \
         URL_HASH SHA512={}\n)\n",
        sum("sha512sum", "first\n")
    );
    fs::write(source.join("third-party/one/CMakeLists.txt"), one).unwrap();
    let two = format!(
        "add_subdirectory(third-party/one)\ntherock_subproject_fetch(two-sources URL \"http://{host}/two.zip\" \
         URL_HASH \"SHA256={}\")\n",
        sum("sha256sum", "second\n").to_uppercase()
    );
    fs::write(source.join("CMakeLists.txt"), two).unwrap();
    store.profile(&format!(
        r#"
[[volume]]
name = "src"
kind = "source"
path = "{}"
target = "/v/src"
[[volume]]
name = "archives"
kind = "cache"
locked = true
downloads = "src"
needed-by = ["use"]
target = "/v/archives"
[[step]]
name = "before"
run = "true"
[[step]]
name = "use"
network = false
run = "cat /v/archives/*/* > $HOME/all; echo own > /v/archives/two-sources/own"
"#,
        source.display()
    ));
    source
}

#[test]
fn what_a_source_declares_is_fetched_once_and_locked() {
    let store = TestStore::new();
    let web = Web::start();
    project(&store, &web.server.host);
    let name = store.env();
    // Only the step that needs the archives makes `up` fetch them.
    store.rockenv(&["up", name, "--until", "before"]).ok();
    assert!(web.asked().is_empty());
    let mut said = store.shows("up ENV --offline");
    // `lock` fetches before that step has run, and also locks an archive that is declared by its SHA-512 only.
    store.rockenv(&["lock", name]).ok();
    let both = ["/two.zip", "/x/one-1.0.tar.gz"];
    assert_eq!(web.asked(), both);
    let lock = store.work().join(format!("profiles/{name}.lock"));
    let text = fs::read_to_string(&lock).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let file = &table["files"]["archives"]["one-sources/one-1.0.tar.gz"];
    let sha256 = file["sha256"].as_str().unwrap();
    assert_eq!(
        file["url"].as_str().unwrap(),
        format!("http://{}/x/one-1.0.tar.gz", web.server.host)
    );
    let blob = store.home().join("blobs/sha256").join(sha256);
    assert_eq!(fs::read_to_string(&blob).unwrap(), "first\n");

    // From here on, the server has no files.
    web.serve(&[]);
    store.rockenv(&["up", name, "--locked", "--offline"]).ok();
    store.sh("cat $HOME/all").ok().prints("first\nsecond");
    let kept = store
        .home()
        .join("caches/archives/one-sources/one-1.0.tar.gz");
    // The build user owns the cache and its files. They are no hard links to the store's blobs.
    let owner = run(Command::new("stat").args(["-c", "%u %h"]).arg(&kept));
    if !crate::support::env::is_service() {
        assert_eq!(owner.trim(), "1234 1");
        // A step may have left a file of any size there.
        let file = fs::OpenOptions::new().write(true).open(&kept).unwrap();
        file.set_len(1 << 40).unwrap();
        let up = store.start(&["up", name, "--locked", "--offline", "--rerun", "use"]);
        wait_until("it reads the file", || {
            let open = fs::read_dir(format!("/proc/{}/fd", up.pid())).unwrap();
            let mut open = open
                .flatten()
                .filter_map(|fd| fs::read_link(fd.path()).ok());
            open.any(|open| open == kept)
        });
        up.signal(Signal::SIGINT);
        up.wait().exits(130);
    }
    store.rockenv(&["down", name]).ok();
    store.rockenv(&["--yes", "gc", "--preset", "ci"]).ok();
    assert!(blob.is_file(), "the lock file names it");
    store.rockenv(&["--yes", "cache", "clear", "archives"]).ok();
    assert!(!kept.exists());
    let again = ["up", name, "--locked", "--offline", "--rerun", "use"];
    store.rockenv(&again).ok();
    // A damaged file in the cache is replaced.
    fs::write(&kept, "fir").unwrap();
    store.rockenv(&again).ok();
    assert_eq!(fs::read_to_string(&kept).unwrap(), "first\n");
    assert_eq!(web.asked(), both);
    // A blob that a power failure truncated does not get into the cache.
    fs::write(&blob, "fir").unwrap();
    store.rockenv(&["down", name]).ok();
    store.rockenv(&["--yes", "cache", "clear", "archives"]).ok();
    let offline = "up ENV --locked --offline --rerun use";
    said += &store.shows(offline);
    // Without the blob, `up` names the missing file before the build.
    fs::remove_file(&blob).unwrap();
    said += &store.shows(offline);
    insta::assert_snapshot!(said, @"
    error: `--offline` is set, but these are missing: `one-1.0.tar.gz` from `http://127.0.0.1:PORT/x/one-1.0.tar.gz`; `two.zip` from `http://127.0.0.1:PORT/two.zip`
    help: run once without --offline
    exit code 4
    error: `--offline` is set, but these are missing: `one-1.0.tar.gz` from `http://127.0.0.1:PORT/x/one-1.0.tar.gz`
    help: run once without --offline
    exit code 4
    error: `--offline` is set, but these are missing: file `one-sources/one-1.0.tar.gz` of cache `archives` from `http://127.0.0.1:PORT/x/one-1.0.tar.gz`
    help: run once without --offline
    exit code 4
    ");
    store.assert_clean();
}

#[test]
fn a_source_that_changes_while_it_is_locked_is_refused() {
    let store = TestStore::new();
    let (declares, large) = ("src/CMakeLists.txt", store.work().join("large"));
    let (source, is_large) = (store.work().join(declares), large.clone());
    let server = Server::start(move |head| {
        fs::write(&source, "# As of another branch.\n").unwrap();
        if is_large.exists() {
            let file = fs::OpenOptions::new().write(true).open(&source).unwrap();
            file.set_len(1 << 40).unwrap();
        }
        let body = match path(head).ends_with("two.zip") {
            true => "second\n",
            false => "first\n",
        };
        response("200 OK", "", body.as_bytes())
    });
    project(&store, &server.host);
    let name = store.env();
    let said = ["source `src` in `", "differs from the locked content"];
    store.rockenv(&["lock", name]).exits(8).says(&said);
    // Ctrl-C ends the comparison.
    project(&store, &server.host);
    fs::write(&large, "").unwrap();
    for blob in fs::read_dir(store.home().join("blobs/sha256")).unwrap() {
        let blob = blob.unwrap().path();
        if fs::read(&blob).is_ok_and(|text| text == b"second\n") {
            fs::remove_file(blob).unwrap();
        }
    }
    let asked = server.asked().len();
    let locking = store.start(&["lock", name]);
    wait_until("it does not fetch", || server.asked().len() > asked);
    wait_until("it does not compare", || {
        let open = fs::read_dir(format!("/proc/{}/fd", locking.pid())).unwrap();
        let mut open = open
            .flatten()
            .filter_map(|fd| fs::read_link(fd.path()).ok());
        open.any(|open| open.ends_with(declares))
    });
    locking.signal(Signal::SIGINT);
    locking.wait().exits(130);
    let lock = store.work().join(format!("profiles/{name}.lock"));
    assert!(!lock.exists());
}

#[test]
fn what_cannot_be_had_is_named_and_mirrors_are_asked() {
    let store = TestStore::new();
    let web = Web::start();
    project(&store, "far.invalid");
    let name = store.env();
    web.serve(&[("two.zip", "second\n")]);
    let mirror = format!(
        "[mirror]\n\"far.invalid\" = \"http://{}/mirror/\"\n",
        web.server.host
    );
    store.configure(&mirror);
    insta::assert_snapshot!(store.shows("up ENV"), @"
    2 files that the build downloads … 0 B
    error: cannot fetch `one-1.0.tar.gz` from `http://127.0.0.1:PORT/mirror/x/one-1.0.tar.gz`
      caused by: cannot download `http://127.0.0.1:PORT/mirror/x/one-1.0.tar.gz`
      caused by: the server answered 404 Not Found
    help: run the command again to resume, or set a mirror of that host: [mirror] in the configuration
    exit code 4
    ");
    // Other content is refused.
    web.serve(&[("two.zip", "second\n"), ("one-1.0.tar.gz", "other\n")]);
    insta::assert_snapshot!(store.shows("up ENV"), @"
    1 file that the build downloads … 0 B
    error: cannot fetch `one-1.0.tar.gz` from `http://127.0.0.1:PORT/mirror/x/one-1.0.tar.gz`
      caused by: `http://127.0.0.1:PORT/mirror/x/one-1.0.tar.gz` sent an invalid response
      caused by: `STORE/blobs/sha512/.ID.partial` has SHA-512 ID, not ID
    help: try a mirror of that host: [mirror] in the configuration
    exit code 8
    ");
    web.serve(&[("one-1.0.tar.gz", "first\n"), ("two.zip", "second\n")]);
    let said = store
        .rockenv(&["up", name, "--progress", "json"])
        .ok()
        .text();
    assert!(said.contains("\"event\":\"transfer-finished\""), "{said}");
    store.sh("cat $HOME/all").ok().prints("first\nsecond");
    let twice = web
        .asked()
        .iter()
        .filter(|path| path.ends_with("two.zip"))
        .count();
    assert_eq!(twice, 1, "{:?}", web.asked());
    store.assert_clean();
}

#[test]
fn a_profile_that_extends_another_takes_its_downloads_away() {
    let store = TestStore::new();
    let web = Web::start();
    project(&store, &web.server.host);
    let (name, other) = (store.env(), format!("{}-own", store.env()));
    let own = |change: &str| {
        let body = format!(
            "extends = \"{name}\"\n[[volume]]\nname = \"archives\"\n{change}\n\
             [[step]]\nname = \"use\"\nrun = \"ls -A /v/archives > $HOME/all\"\n"
        );
        store.profile_named(&other, &body);
    };
    own("downloads = \"\"");
    store.rockenv(&["up", &other, "--offline"]).ok();
    let seen = store.rockenv(&["exec", &other, "--", "cat", "/home/builder/all"]);
    seen.ok().prints("");
    assert!(web.asked().is_empty());
    // Any other change of the volume keeps the inherited downloads.
    own("max = \"1G\"");
    store
        .rockenv(&["up", &other, "--offline", "--rerun", "use"])
        .exits(4);
    store.rockenv(&["up", &other, "--rerun", "use"]).ok();
    assert_eq!(web.asked(), ["/two.zip", "/x/one-1.0.tar.gz"]);
}
