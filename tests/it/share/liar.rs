//! Registries that lie, send without end or next to nothing, and lead elsewhere: each error names its registry, and
//! nothing of it stays in the store.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fs_err as fs;
use rockenv::testing::Store;
use serde_json::{Value, json};

use super::proxy::{Fault, Proxy, is_layer};
use super::{MANIFEST, Two, sha256};
use crate::support::env::TestStore;
use crate::support::registry::{LOGIN, http};
use crate::support::run::{Ran, finish};

const STEP: &str = "[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n";
/// How long a server may stall in these tests, and how long a command may take then.
const PATIENCE: &str = "2s";
const SOON: Duration = Duration::from_secs(40);

fn run(store: &TestStore, words: &[&str], proxy: &Proxy) -> Ran {
    let mut command = store.command(words);
    command
        .env("ROCKENV_REGISTRY", proxy.repository())
        .env("ROCKENV_HTTP_TIMEOUT", PATIENCE);
    let started = Instant::now();
    let ran = finish(words.join(" "), command);
    assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    ran
}

#[track_caller]
pub(super) fn assert_nothing(store: &TestStore) {
    let opened = Store::open_existing(store.home()).unwrap().unwrap();
    assert!(opened.layers().unwrap().is_empty());
    let images = fs::read_dir(store.home().join("images")).unwrap();
    let names = images.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let half: Vec<String> = names.filter(|name| name.starts_with("tmp-")).collect();
    assert!(half.is_empty(), "{half:?}");
    // Every file that is named by a digest has that digest.
    for entry in fs::read_dir(store.home().join("blobs/sha256"))
        .into_iter()
        .flatten()
    {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(
            name.starts_with('.') || name == sha256(&fs::read(&path).unwrap()),
            "{name}"
        );
    }
}

fn key(two: &Two, name: &str) -> String {
    two.one.keys(name).remove(0).1
}

fn is_manifest(head: &str) -> bool {
    head.starts_with("GET ") && head.contains("/manifests/")
}

fn path(head: &str) -> &str {
    head.split(' ').nth(1).unwrap_or_default()
}

fn field<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let mut lines = head.lines().filter_map(|line| line.split_once(": "));
    let found = lines.find(|(found, _)| found.eq_ignore_ascii_case(name));
    found.map(|(_, value)| value)
}

/// Answers a request without a token with the address of a token server.
fn asks(head: &str, realm: &str) -> Fault {
    match field(head, "authorization") {
        Some(_) => Fault::None,
        None => Fault::Says(
            401,
            format!("www-authenticate: Bearer realm=\"{realm}\",service=\"s\"\r\n"),
            String::new(),
        ),
    }
}

/// Answers as a registry that is its own token server, with this fault for token requests.
fn gives_tokens(head: &str, fault: Fault) -> Fault {
    match path(head).starts_with("/token") {
        true => fault,
        false => asks(
            head,
            &format!("http://{}/token", field(head, "host").unwrap()),
        ),
    }
}

type Judge = fn(&str) -> Fault;

/// Faults of a registry, with the exit code of `pull` and what it says.
const PULLS: [(Judge, i32, &[&str]); 13] = [
    // A layer that is too short, has no end, stops in the middle, or hardly arrives.
    (
        |head| Fault::Says(200, String::new(), "short".to_owned()).when(is_layer(head)),
        8,
        &[
            "/team/rocm@sha256:",
            "has SHA-256",
            "help: remove it from the registry, then push it again",
        ],
    ),
    (
        |head| Fault::Endless.when(is_layer(head)),
        3,
        &["/team/rocm@sha256:", "has more than"],
    ),
    (
        |head| Fault::Stops(40 << 10).when(is_layer(head)),
        4,
        &["cannot download `", "/team/rocm@sha256:", "help: "],
    ),
    (
        |head| Fault::Drips.when(is_layer(head)),
        4,
        &[
            "cannot download `",
            "/team/rocm@sha256:",
            "bytes in 2 seconds",
        ],
    ),
    // The same for a manifest.
    (
        |head| Fault::Endless.when(is_manifest(head)),
        3,
        &["/team/rocm:", "has more than 4194304 bytes"],
    ),
    (
        |head| Fault::Drips.when(is_manifest(head)),
        4,
        &["/team/rocm:", "bytes in 2 seconds"],
    ),
    (
        |head| match is_manifest(head) {
            true => Fault::Says(
                200,
                "content-type: application/vnd.oci.image.index.v1+json\r\n".to_owned(),
                json!({ "schemaVersion": 2, "mediaType": MANIFEST }).to_string(),
            ),
            false => Fault::None,
        },
        3,
        &[
            "/team/rocm:",
            "its registry declares it as",
            "declares itself as",
            "help: ",
        ],
    ),
    // Redirects in a circle, or to something other than the web.
    (
        |head| {
            let location = format!("location: {}\r\n", path(head));
            Fault::Says(307, location, String::new())
        },
        4,
        &["registry `127.0.0.1:", "redirect", "help: "],
    ),
    (
        |_| {
            Fault::Says(
                307,
                "location: file:///etc/passwd\r\n".to_owned(),
                String::new(),
            )
        },
        4,
        &["127.0.0.1:"],
    ),
    // Token servers that are not on the web, answer without end, hardly, or not at all.
    (
        |head| asks(head, "file:///etc/passwd"),
        3,
        &[
            "registry `127.0.0.1:",
            "sends logins to `file:///etc/passwd`",
        ],
    ),
    (
        |head| gives_tokens(head, Fault::Endless),
        3,
        &[
            "cannot get a token for registry `127.0.0.1:",
            "has more than",
        ],
    ),
    (
        |head| gives_tokens(head, Fault::Drips),
        4,
        &["cannot get a token for registry `127.0.0.1:"],
    ),
    (
        |head| gives_tokens(head, Fault::Stops(0)),
        4,
        &["cannot get a token for registry `127.0.0.1:"],
    ),
];

#[test]
fn nothing_is_taken_from_a_registry_that_lies_and_nobody_waits_for_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(STEP);
    let key = key(&two, name);
    for (judge, code, said) in PULLS {
        let proxy = Proxy::start(&two.registry.host, judge);
        let reference = format!("{}:{key}", proxy.repository());
        run(&two.other, &["pull", &reference], &proxy)
            .exits(code)
            .says(said);
        assert_nothing(&two.other);
    }
    two.other.rockenv(&["fsck"]).ok();
    up_builds_where_a_registry_is_slow_and_stops_where_it_lies(&two, name);
}

fn up_builds_where_a_registry_is_slow_and_stops_where_it_lies(two: &Two, name: &str) {
    let lies = Proxy::start(&two.registry.host, |head| {
        Fault::Endless.when(is_layer(head))
    });
    run(&two.other, &["up", name, "--pull"], &lies)
        .exits(3)
        .says(&["has more than"]);
    assert_nothing(&two.other);
    let slow = Proxy::start(&two.registry.host, |head| {
        Fault::Drips.when(is_manifest(head))
    });
    run(&two.other, &["up", name, "--pull"], &slow).ok().says(&[
        "warning:",
        "building it here",
        "step 1/1 one",
    ]);
}

#[test]
fn a_password_goes_to_no_other_host_without_encryption() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let key = key(&two, two.pushed(STEP));
    let heads = Arc::new(Mutex::new(Vec::new()));
    let list = Arc::clone(&heads);
    let stranger = Proxy::start(&two.registry.host, move |head| {
        list.lock().unwrap().push(head.to_owned());
        Fault::Says(200, String::new(), r#"{"token":"t"}"#.to_owned())
    });
    // Another name of this machine counts as another host.
    let repository = stranger.repository();
    let port = repository.split([':', '/']).nth(1).unwrap().to_owned();
    let logins = two.other.work().join("auth.json");
    let pull = |proxy: &Proxy| {
        let host = proxy.repository().replace("/team/rocm", "");
        let text = json!({ "auths": { host: { "auth": LOGIN } } });
        fs::write(&logins, text.to_string()).unwrap();
        let reference = format!("{}:{key}", proxy.repository());
        let mut command = two.other.command(&["pull", &reference]);
        command.env("REGISTRY_AUTH_FILE", &logins);
        // A registry on this machine is not asked through a proxy, which would get the password.
        command.env("HTTP_PROXY", "http://127.0.0.1:9");
        finish("pull".into(), command)
    };
    let realm = format!("http://localhost:{port}/token");
    let proxy = Proxy::start(&two.registry.host, move |head| asks(head, &realm));
    pull(&proxy).exits(3).says(&[
        "wants its password sent to `localhost:",
        "without encryption",
    ]);
    assert!(heads.lock().unwrap().is_empty());
    // The login does not follow a token server's redirect either.
    let elsewhere = format!("location: http://localhost:{port}/token\r\n");
    let proxy = Proxy::start(&two.registry.host, move |head| {
        match path(head).starts_with("/token") {
            true => Fault::Says(307, elsewhere.clone(), String::new()),
            false => asks(
                head,
                &format!("http://{}/token", field(head, "host").unwrap()),
            ),
        }
    });
    pull(&proxy).ok();
    let heads = heads.lock().unwrap();
    assert_eq!(heads.len(), 1, "{heads:?}");
    assert!(field(&heads[0], "authorization").is_none(), "{heads:?}");
}

#[test]
fn a_push_is_done_when_the_registry_has_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(STEP);
    two.one.rockenv(&["up", name]).ok();
    let wrong = format!("docker-content-digest: sha256:{}\r\n", "0".repeat(64));
    let is_blob = |head: &str| head.starts_with("PUT ") && head.contains("/blobs/uploads/");
    let is_manifest = |head: &str| head.starts_with("PUT ") && head.contains("/manifests/");
    // A layer or a manifest that the registry accepts and forgets, or replaces.
    let forgets = Proxy::start(&two.registry.host, move |head| {
        Fault::Says(201, String::new(), String::new()).when(is_blob(head))
    });
    let push = |proxy: &Proxy, code, said: &[&str]| {
        two.with(&two.one, &["push", name], &proxy.repository())
            .exits(code)
            .says(said);
        // No tag points to an incomplete snapshot.
        let tag = format!("{}:{}", two.repository(), key(&two, name));
        two.run(&two.other, &["pull", &tag]).exits(7);
    };
    push(
        &forgets,
        4,
        &[
            "claims to have stored `127.0.0.1:",
            "/team/rocm@sha256:",
            "does not have it",
        ],
    );
    let other = Proxy::start(&two.registry.host, |head| {
        let is_asked = head.starts_with("HEAD ") && head.contains("/blobs/");
        Fault::Says(200, String::new(), "other".to_owned()).when(is_asked)
    });
    push(
        &other,
        3,
        &[
            "registry `127.0.0.1:",
            "has 5 bytes as `127.0.0.1:",
            "/team/rocm@sha256:",
        ],
    );
    let calls = Proxy::start(&two.registry.host, move |head| {
        Fault::Says(201, wrong.clone(), String::new()).when(is_manifest(head))
    });
    push(
        &calls,
        8,
        &[
            "what registry `127.0.0.1:",
            "stored as `127.0.0.1:",
            "has SHA-256 000",
        ],
    );
    let loses = Proxy::start(&two.registry.host, move |head| {
        Fault::Says(201, String::new(), String::new()).when(is_manifest(head))
    });
    push(&loses, 4, &["claims to have stored", "does not have it"]);
    // The configuration is taken, but never answered. It is the only blob that is sent with its digest.
    let silent = Proxy::start(&two.registry.host, move |head| {
        let is_empty = field(head, "content-length") == Some("0");
        Fault::Hangs(0).when(is_blob(head) && !is_empty)
    });
    let mut command = two.one.command(&["push", name]);
    command
        .env("ROCKENV_REGISTRY", silent.repository())
        .env("ROCKENV_HTTP_TIMEOUT", "1s");
    finish("push".into(), command).exits(4).says(&["timed out"]);
    two.run(&two.one, &["push", name]).ok();
}

/// A snapshot at a registry, with changes to its last layer and its config.
pub(super) struct Forged<'a> {
    host: &'a str,
    /// The tag that `publish` sets.
    pub(super) key: String,
    manifest: Value,
    pub(super) config: Value,
}

impl<'a> Forged<'a> {
    pub(super) fn of(host: &'a str, key: &str) -> Self {
        let get =
            |path: &str| -> Value { serde_json::from_slice(&super::get(host, path)).unwrap() };
        let manifest = get(&format!("manifests/{key}"));
        let config = get(&format!(
            "blobs/{}",
            manifest["config"]["digest"].as_str().unwrap()
        ));
        Self {
            host,
            key: key.to_owned(),
            manifest,
            config,
        }
    }

    /// Uploads bytes, and returns their digest and size.
    fn put(&self, bytes: &[u8]) -> (String, usize) {
        let digest = format!("sha256:{}", sha256(bytes));
        let begin = http(self.host, "POST", "/v2/team/rocm/blobs/uploads/", "", b"");
        let place = begin
            .head
            .lines()
            .find_map(|line| line.strip_prefix("Location: "));
        let place = place.unwrap();
        let place = &place[place.find("/v2/").unwrap()..];
        let put = http(
            self.host,
            "PUT",
            &format!("{place}&digest={digest}"),
            "",
            bytes,
        );
        assert_eq!(put.status, 201, "{}", put.head);
        (digest, bytes.len())
    }

    /// Replaces the last layer with an archive, which claims this unpacked size.
    fn layer(&mut self, archive: &[u8], unpacked: Option<&str>) {
        let (digest, size) = self.put(&zstd::encode_all(archive, 3).unwrap());
        let layer = self.manifest["layers"]
            .as_array_mut()
            .unwrap()
            .last_mut()
            .unwrap();
        layer["digest"] = digest.into();
        layer["size"] = size.into();
        layer["annotations"] = match unpacked {
            Some(unpacked) => json!({ "rockenv.unpacked": unpacked }),
            None => json!({}),
        };
        let ids = self.config["rootfs"]["diff_ids"].as_array_mut().unwrap();
        *ids.last_mut().unwrap() = format!("sha256:{}", sha256(archive)).into();
    }

    pub(super) fn publish(mut self) {
        let (digest, size) = self.put(self.config.to_string().as_bytes());
        self.manifest["config"]["digest"] = digest.into();
        self.manifest["config"]["size"] = size.into();
        let manifest = self.manifest.to_string();
        super::put(self.host, &self.key, MANIFEST, manifest.as_bytes());
    }
}

/// Returns an archive with one entry of any name, after a symlink `way` to the link's target if there is one.
fn archive(name: &str, link: Option<&str>, data: &[u8]) -> Vec<u8> {
    let mut archive = Vec::new();
    let mut entry = |name: &str, kind: tar::EntryType, link: &str, data: &[u8]| {
        let mut header = tar::Header::new_ustar();
        // Writes the raw bytes: the crate's setters refuse malicious names.
        let bytes = header.as_mut_bytes();
        bytes[..name.len()].copy_from_slice(name.as_bytes());
        bytes[157..157 + link.len()].copy_from_slice(link.as_bytes());
        header.set_entry_type(kind);
        header.set_mode(0o755);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(data.len() as u64);
        header.set_cksum();
        archive.extend_from_slice(header.as_bytes());
        archive.extend_from_slice(data);
        archive.resize(archive.len().next_multiple_of(512), 0);
    };
    if let Some(target) = link {
        entry("way", tar::EntryType::Symlink, target, b"");
    }
    entry(name, tar::EntryType::Regular, "", data);
    archive.resize(archive.len() + 1024, 0);
    archive
}

#[test]
fn what_a_snapshot_says_leads_nowhere_and_fills_no_disk() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let key = key(&two, two.pushed(STEP));
    let good = Forged::of(&two.registry.host, &key);
    let outside = tempfile::tempdir_in("/var/tmp").unwrap();
    let target = outside.path().display().to_string();
    let refused = |change: &dyn Fn(&mut Forged<'_>), code, said: &[&str]| {
        let mut forged = Forged {
            manifest: good.manifest.clone(),
            config: good.config.clone(),
            key: key.clone(),
            ..good
        };
        change(&mut forged);
        forged.publish();
        let reference = format!("{}:{key}", two.repository());
        let said = [&["cannot pull `", two.registry.host.as_str()], said].concat();
        two.run(&two.other, &["pull", &reference])
            .exits(code)
            .says(&said);
        assert_nothing(&two.other);
        assert_eq!(fs::read_dir(outside.path()).unwrap().count(), 0);
    };
    for name in ["../../../outside", "/", ".", "a/b", ""] {
        let set =
            |forged: &mut Forged<'_>| forged.config["rockenv"]["steps"][0]["name"] = name.into();
        refused(&set, 3, &["it contains an invalid name"]);
        let set = |forged: &mut Forged<'_>| {
            forged.config["rockenv"]["steps"][0]["volumes"] = json!({ name: "empty" });
        };
        refused(&set, 3, &["is empty or leads out of its directory"]);
    }
    let digest = |forged: &mut Forged<'_>| {
        forged.config["rootfs"]["diff_ids"][0] = "sha256:../../../outside".into();
    };
    refused(&digest, 3, &["not identified by a SHA-256"]);
    let cost = |forged: &mut Forged<'_>| {
        let cost = json!({ "bytes": u64::MAX, "wall_ms": 1 });
        forged.config["rockenv"]["steps"][0]["cost"] = cost;
    };
    refused(&cost, 3, &["a step claims an impossible cost"]);
    let took = |forged: &mut Forged<'_>| {
        forged.config["rockenv"]["image"]["took_ms"] = u64::MAX.into();
    };
    refused(&took, 3, &["its image claims an impossible cost"]);
    let distribution = |forged: &mut Forged<'_>| {
        forged.config["rockenv"]["image"]["distribution"] = "a\nb".into();
    };
    refused(&distribution, 3, &["has control characters"]);
    // A layer with files that lead out of the tree.
    let escape = archive(&format!("..{target}/file"), None, b"out");
    refused(
        &|forged| forged.layer(&escape, None),
        3,
        &["cannot unpack layer"],
    );
    let escape = archive("way/file", Some(&target), b"out");
    refused(
        &|forged| forged.layer(&escape, None),
        3,
        &["cannot unpack layer"],
    );
    // A layer that is larger than it claims, or has an implausible compression ratio.
    let bomb = archive("zeros", None, &vec![0; 200 << 20]);
    refused(
        &|forged| forged.layer(&bomb, Some("4096")),
        3,
        &["more than the announced 4096 bytes"],
    );
    refused(
        &|forged| forged.layer(&bomb, None),
        3,
        &["grows more than 250 times"],
    );
    let whole = bomb.len().to_string();
    let mut honest = Forged::of(&two.registry.host, &key);
    honest.manifest = good.manifest.clone();
    honest.config = good.config.clone();
    honest.layer(&bomb, Some(&whole));
    honest.publish();
    two.run(
        &two.other,
        &["pull", &format!("{}:{key}", two.repository())],
    )
    .ok();
    two.other.rockenv(&["fsck"]).ok();
}
