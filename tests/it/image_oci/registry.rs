//! Registries: Debian's own, and servers that break off, lie, redirect and ask for logins.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt as _;
use std::process::Command;
use std::sync::atomic::{AtomicUsize, Ordering};

use fs_err::os::unix::fs::chown;
use rockenv::testing::error::Kind;
use rockenv::testing::{BuildProgress, Logins};
use serde_json::json;

use super::make::{
    self, Answer, Image, LOGIN, Registry, Server, Tar, digest, http, index, noise, range_of,
    response, serve,
};
use super::place::{Place, fails, names, sample};
use crate::support::loopfs::run;

fn pinned(host: &str, image: &Image) -> String {
    format!("ref = \"{host}/team/sample@{}\"", image.digest())
}

/// Forwards a request.
fn forward(to: &str, head: &str) -> Answer {
    let path = head.split(' ').nth(1).unwrap();
    let kept: String = head
        .lines()
        .filter(|line| {
            line.starts_with("accept:")
                || line.starts_with("range:")
                || line.starts_with("authorization:")
        })
        .map(|line| format!("{line}\r\n"))
        .collect();
    http(to, "GET", path, &kept, b"")
}

fn pass(answer: &Answer) -> Vec<u8> {
    [answer.head.as_bytes(), b"\r\n\r\n", &answer.body].concat()
}

#[test]
fn a_registry_gives_the_tree_of_the_layout() {
    let place = Place::new();
    let registry = Registry::start(false);
    let image = sample();
    registry.push("team/sample", "1", &image);
    image.layout(&place.path("x"));
    let layout = place.build("path = \"x\"", "layout").unwrap();
    let mut most = (0, None);
    let tag = format!("ref = \"{}/team/sample:1\"", registry.host);
    let built = place
        .build_with(&tag, "a", &mut |progress| {
            if let BuildProgress::Bytes { done, total } = progress {
                most = most.max((done, total));
            }
        })
        .unwrap();
    assert_eq!(
        (&built.digest, &built.resolved),
        (&layout.digest, &Some(image.digest()))
    );
    place.assert_same("layout", "a");
    let layers: usize = image.layers.iter().map(|(_, data)| data.len()).sum();
    assert_eq!(most, (layers as u64, Some(layers as u64)));
    // A pinned image whose blobs are all in the store needs no registry.
    drop(registry);
    let nobody = "127.0.0.1:9";
    let again = place.build(&pinned(nobody, &image), "b").unwrap();
    assert_eq!(again, built);
    fails(
        place.build(&format!("ref = \"{nobody}/team/sample:1\""), "c"),
        Kind::Unavailable,
        "cannot reach registry",
    );
}

#[test]
fn docker_s_documents_and_an_index_are_understood() {
    let place = Place::new();
    let registry = Registry::start(false);
    let [amd, arm] = ["amd64", "arm64"].map(|name| Image::of_architecture(name, true));
    registry.push("a", "amd", &amd);
    registry.push("a", "arm", &arm);
    let list = json!({
        "schemaVersion": 2, "mediaType": "application/vnd.docker.distribution.manifest.list.v2+json",
        "manifests": [arm.for_platform("linux/arm64"), amd.for_platform("linux/amd64")]
    });
    let list = list.to_string().into_bytes();
    registry.push_manifest(
        "a",
        "both",
        "application/vnd.docker.distribution.manifest.list.v2+json",
        &list,
    );
    for (name, reference) in [
        ("tag", "a:both".to_owned()),
        ("digest", format!("a@{}", digest(&list))),
    ] {
        let built = place
            .build(&format!("ref = \"{}/{reference}\"", registry.host), name)
            .unwrap();
        assert_eq!(built.resolved, Some(amd.digest()));
        assert_eq!(names(&place.path(name)), ["amd64"]);
    }
    let oci = index(&[amd.for_platform("linux/amd64")]);
    registry.push_manifest("a", "oci", make::INDEX, &oci);
    place
        .build(&format!("ref = \"{}/a:oci\"", registry.host), "oci")
        .unwrap();
    let refused = ["both\"\nplatform = \"linux/s390x", "none"]
        .map(|tag| place.refused(&format!("ref = \"{}/a:{tag}\"", registry.host)));
    insta::assert_snapshot!(refused.concat(), @r#"
    error: cannot pull `127.0.0.1:PORT/a:both`
      caused by: the image is not available for linux/s390x
    help: platform = "linux/amd64" (there are: linux/amd64, linux/arm64)
    exit code 7
    error: cannot pull `127.0.0.1:PORT/a:none`
      caused by: there is no image `127.0.0.1:PORT/a:none`
    help: check `ref` in the recipe
    exit code 7
    "#);
}

#[test]
fn a_digest_holds_though_the_tag_moved() {
    let place = Place::new();
    let registry = Registry::start(false);
    let image = sample();
    registry.push("a", "1", &image);
    registry.push(
        "a",
        "1",
        &Image::new(&[Tar::default().file("other", "").end()]),
    );
    let both = format!("ref = \"{}/a:1@{}\"", registry.host, image.digest());
    assert_eq!(
        place.build(&both, "tree").unwrap().resolved,
        Some(image.digest())
    );
}

#[test]
fn a_password_is_asked_for_and_found() {
    let mut place = Place::new();
    let registry = Registry::start(true);
    let image = sample();
    registry.push("team/sample", "1", &image);
    let without = place.refused(&pinned(&registry.host, &image));
    let wrong = make::auth_file(place.dir.path(), &registry.host, "dXNlcjp3cm9uZw==");
    place.logins.files = vec![wrong];
    insta::assert_snapshot!(without + &place.refused(&pinned(&registry.host, &image)), @"
    error: cannot pull `127.0.0.1:PORT/team/sample@sha256:ID`
      caused by: authentication required to pull `127.0.0.1:PORT/team/sample` at registry `127.0.0.1:PORT`
    help: podman login 127.0.0.1:PORT, or docker login 127.0.0.1:PORT
    exit code 4
    error: cannot pull `127.0.0.1:PORT/team/sample@sha256:ID`
      caused by: registry `127.0.0.1:PORT` refuses user `user` (from `PLACE/auth.json`)
      caused by: the registry answered 401 Unauthorized: UNAUTHORIZED: authentication required
    help: podman login 127.0.0.1:PORT, or docker login 127.0.0.1:PORT
    exit code 4
    ");
    place.logins.files = vec![
        place.path("absent.json"),
        make::auth_file(place.dir.path(), &registry.host, LOGIN),
    ];
    place.build(&pinned(&registry.host, &image), "c").unwrap();
}

#[test]
fn a_password_is_asked_of_the_program_that_keeps_it() {
    let mut place = Place::new();
    let registry = Registry::start(true);
    let image = sample();
    registry.push("team/sample", "1", &image);
    let table = pinned(&registry.host, &image);
    let host = &registry.host;
    // A user who is not root owns the file and the program.
    let (somebody, directory) = (1234, place.path("somebody"));
    fs_err::create_dir(&directory).unwrap();
    for path in [place.dir.path(), &directory] {
        fs_err::set_permissions(path, Permissions::from_mode(0o755)).unwrap();
    }
    chown(&directory, Some(somebody), Some(somebody)).unwrap();
    let program = |name: &str, script: &str| {
        let path = directory.join(format!("docker-credential-{name}"));
        // Another program writes the file: a process that a concurrent test forks would inherit this one's open
        // descriptor.
        let write = r#"printf '#!/bin/sh\n%s\n' "$2" > "$1"; chmod 755 "$1""#;
        run(Command::new("sh")
            .args(["-c", write, "sh"])
            .arg(&path)
            .arg(script));
    };
    let asked = directory.join("asked").display().to_string();
    let answer = r#"{"ServerURL":"x","Username":"user","Secret":"se:cret"}"#;
    program(
        "has",
        &format!("echo $(id -u) $1 $(cat) $HOME >> {asked}; echo '{answer}'"),
    );
    program(
        "hasnot",
        "echo credentials not found in native keychain; exit 1",
    );
    program("locked", "echo the keyring is locked; exit 1");
    let file = directory.join("config.json");
    let mut build = |text: String, into: &str| {
        fs_err::write(&file, text).unwrap();
        chown(&file, Some(somebody), Some(somebody)).unwrap();
        place.logins = Logins {
            files: vec![file.clone()],
            programs: directory.clone().into(),
            home: "/home/somebody".into(),
        };
        place.build(&table, into)
    };
    let entry = format!(r#"{{"auths":{{"{host}":{{}}}},"credsStore":"#);
    // Nothing of the image is in the store yet.
    let mut refused =
        |text: String, into: &str, words: &str| fails(build(text, into), Kind::Unavailable, words);
    refused(
        r#"{"credsStore":"hasnot"}"#.into(),
        "d",
        "authentication required",
    );
    refused(
        r#"{"credsStore":"absent"}"#.into(),
        "e",
        "authentication required",
    );
    let error = refused(
        format!(r#"{entry}"absent"}}"#),
        "f",
        "docker-credential-absent",
    );
    assert!(
        error.help_text().unwrap().contains("--authfile"),
        "{error:?}"
    );
    refused(
        format!(r#"{entry}"locked"}}"#),
        "g",
        "the keyring is locked",
    );
    build(r#"{"credsStore":"has"}"#.into(), "a").unwrap();
    build(format!(r#"{entry}"has"}}"#), "b").unwrap();
    let helpers = format!(r#"{{"credsStore":"hasnot","credHelpers":{{"{host}":"#);
    build(format!(r#"{helpers}"has"}}}}"#), "c").unwrap();
    let said = fs_err::read_to_string(&asked).unwrap();
    let line = format!("{somebody} get {host} /home/somebody\n");
    assert_eq!(said, line.repeat(3));
}

#[test]
fn a_token_is_fetched_from_where_the_registry_says() {
    let place = Place::new();
    let image = sample();
    let inner = image.clone();
    let tokens = Server::start(|_| response("200 OK", "", b"{\"token\":\"abc\"}"));
    let realm = format!("http://{}/token", tokens.host);
    let registry = Server::start(
        move |head| match head.contains("authorization: bearer abc") {
            true => serve(&inner, head),
            false => {
                let challenge =
                    format!("www-authenticate: Bearer realm=\"{realm}\",service=\"test\"\r\n");
                response("401 Unauthorized", &challenge, b"{}")
            }
        },
    );
    place.build(&pinned(&registry.host, &image), "a").unwrap();
    let asked = tokens.asked();
    assert_eq!(asked.len(), 1);
    assert!(
        asked[0].contains("scope=repository%3ateam%2fsample%3apull"),
        "{}",
        asked[0]
    );
    assert!(!asked[0].contains("authorization"), "{}", asked[0]);
    // A token that would break the header's lines is only an error.
    let broken = Server::start(|_| response("200 OK", "", b"{\"token\":\"a\\nb\"}"));
    let realm = format!("http://{}/token", broken.host);
    let registry = Server::start(move |_| {
        response(
            "401 Unauthorized",
            &format!("www-authenticate: Bearer realm=\"{realm}\"\r\n"),
            b"",
        )
    });
    let mut place = Place::new();
    fails(
        place.build(&pinned(&registry.host, &image), "b"),
        Kind::Invalid,
        "an invalid token",
    );
    // Only a token server gets an identity token.
    let challenge = "www-authenticate: Basic realm=\"x\"\r\n";
    let registry = Server::start(move |_| response("401 Unauthorized", challenge, b""));
    let token = make::auth_file(place.dir.path(), &registry.host, "PHRva2VuPjpz");
    place.logins.files = vec![token];
    let said = place.refused(&pinned(&registry.host, &image));
    assert!(said.contains("refuses the identity token (from"), "{said}");
    assert_eq!(registry.asked().len(), 1);
}

#[test]
fn what_breaks_off_goes_on() {
    let place = Place::new();
    let registry = Registry::start(false);
    let (archive, image) = Image::big();
    registry.push("team/sample", "1", &image);
    let (to, blob) = (registry.host.clone(), digest(&archive));
    let times = AtomicUsize::new(0);
    // The first two answers with the layer end early.
    let proxy = Server::start(move |head| {
        let mut answer = forward(&to, head);
        if head.contains(&blob) && times.fetch_add(1, Ordering::Relaxed) < 2 {
            let half = answer.body.len() / 2;
            answer.body.truncate(half);
        }
        pass(&answer)
    });
    place.build(&pinned(&proxy.host, &image), "a").unwrap();
    let ranges: Vec<_> = proxy
        .asked()
        .iter()
        .filter(|head| head.contains(&digest(&archive)))
        .map(|head| range_of(head))
        .collect();
    let half = archive.len() / 2;
    assert_eq!(
        ranges,
        [None, Some(half), Some(half + archive.len().div_ceil(2) / 2)]
    );
}

#[test]
fn what_was_interrupted_goes_on_in_the_next_run() {
    let place = Place::new();
    let registry = Registry::start(false);
    let (archive, image) = Image::big();
    registry.push("team/sample", "1", &image);
    let (to, blob) = (registry.host.clone(), digest(&archive));
    // The server sends half of the layer, and after that only errors.
    let broken = Server::start(move |head| match (head.contains(&blob), range_of(head)) {
        (true, None) => {
            let mut answer = forward(&to, head);
            answer.body.truncate(1_500_000);
            pass(&answer)
        }
        (true, Some(_)) => response("503 Busy", "", b""),
        _ => pass(&forward(&to, head)),
    });
    fails(
        place.build(&pinned(&broken.host, &image), "a"),
        Kind::Unavailable,
        "503",
    );
    let to = registry.host.clone();
    let proxy = Server::start(move |head| pass(&forward(&to, head)));
    place.build(&pinned(&proxy.host, &image), "b").unwrap();
    let asked = proxy.asked();
    // The store has the manifest, the configuration and half of the layer.
    assert_eq!(asked.len(), 1, "{asked:#?}");
    assert_eq!(range_of(&asked[0]), Some(1_500_000));
}

#[test]
fn what_a_registry_makes_up_is_refused() {
    let image = sample();
    let refused =
        |name: &str,
         kind: Kind,
         part: &str,
         answer: &'static (dyn Fn(&Image, &str) -> Option<Vec<u8>> + Send + Sync)| {
            let inner = image.clone();
            let server = Server::start(move |head| {
                answer(&inner, head).unwrap_or_else(|| serve(&inner, head))
            });
            let fresh = Place::new();
            let error = fails(fresh.build(&pinned(&server.host, &image), name), kind, part);
            let help = error.help_text().unwrap_or_default();
            assert!(kind != Kind::Drift || help.ends_with("use another"));
            let blobs = fresh.path("blobs/sha256");
            for entry in fs_err::read_dir(blobs).into_iter().flatten() {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_string_lossy().into_owned();
                assert!(
                    name.starts_with('.') || digest(&fs_err::read(&path).unwrap()).ends_with(&name),
                    "{name}"
                );
            }
        };
    refused("page", Kind::Drift, "it is a web page", &|_, _| {
        Some(response("200 OK", "", b"<html>log in</html>"))
    });
    refused("blob", Kind::Drift, "has SHA-256", &|image, head| {
        head.contains(&digest(&image.blobs[1])).then(|| {
            let mut data = image.blobs[1].clone();
            data[100] ^= 1;
            response("200 OK", "", &data)
        })
    });
    refused("endless", Kind::Invalid, "has more than", &|image, head| {
        head.contains(&digest(&image.blobs[0]))
            .then(|| response("200 OK", "", &noise(8_000_000)))
    });
    refused("huge", Kind::Invalid, "has more than", &|_, head| {
        head.contains("/manifests/")
            .then(|| response("200 OK", "", &noise(8_000_000)))
    });
    refused("away", Kind::Unavailable, "404", &|image, head| {
        head.contains(&digest(&image.blobs[0]))
            .then(|| response("404 Not Found", "", b""))
    });
    // Docker Hub's limit also applies to pinned images, and its reason tells the user what to do.
    let limit = "429 Too Many Requests: TOOMANYREQUESTS: You have reached your pull rate limit.; it asks to wait 6 h";
    refused("limit", Kind::Unavailable, limit, &|_, _| {
        let reason = br#"{"errors":[{"code":"TOOMANYREQUESTS","message":"You have reached your pull rate limit."}]}"#;
        let status = "429 Too Many Requests";
        Some(response(status, "retry-after: 21600\r\n", reason))
    });
    // Content with a wrong media type, and indexes that lead only to indexes.
    let nested = |levels, kind: &str| {
        let mut entry = make::descriptor(kind, &index(&[]));
        let mut all = vec![index(&[])];
        for _ in 0..levels {
            let outer = index(&[entry]);
            entry = make::descriptor(kind, &outer);
            all.push(outer);
        }
        let last = all.last().unwrap().clone();
        Server::start(move |head| {
            let path = head.split(' ').nth(1).unwrap();
            let found = all.iter().find(|one| path.ends_with(&digest(one)));
            let kind = format!("content-type: {}\r\n", make::INDEX);
            response("200 OK", &kind, found.unwrap_or(&last))
        })
    };
    let lies = |server: &Server, kind: Kind, part: &str| {
        let table = format!("ref = \"{}/a:1\"", server.host);
        fails(Place::new().build(&table, "tree"), kind, part);
    };
    lies(
        &nested(9, make::INDEX),
        Kind::Invalid,
        "leads to indexes only",
    );
    lies(
        &nested(2, make::MANIFEST),
        Kind::Invalid,
        "it is an index, but declared as `application/vnd.oci.image.manifest.v1+json`",
    );
    let inner = image.clone();
    let index_of_one = Server::start(move |_| {
        let kind = format!("content-type: {}\r\n", make::INDEX);
        response("200 OK", &kind, &inner.manifest)
    });
    lies(&index_of_one, Kind::Invalid, "its registry declares it as");
    // A tag promises no digest, so its content has to be a manifest of a sane size.
    let page = Server::start(|_| response("200 OK", "", b"<html>"));
    lies(&page, Kind::Invalid, "it is a web page");
    let huge = Server::start(|_| response("200 OK", "", &noise(8_000_000)));
    lies(&huge, Kind::Invalid, "more than");
    let inner = image.clone();
    let liar = Server::start(move |_| {
        response(
            "200 OK",
            &format!("docker-content-digest: {}\r\n", digest(b"")),
            &inner.manifest,
        )
    });
    lies(&liar, Kind::Drift, "the manifest of");
}

#[test]
fn a_redirect_is_followed_without_the_password() {
    let mut place = Place::new();
    let image = sample();
    let (inner, registry_image) = (image.clone(), image.clone());
    let storage = Server::start(move |head| serve(&inner, head));
    let target = storage.host.clone();
    let registry = Server::start(move |head| {
        let path = head.split(' ').nth(1).unwrap_or_default();
        match (
            head.contains("authorization: basic"),
            path.contains("/blobs/"),
        ) {
            (false, _) => response(
                "401 Unauthorized",
                "www-authenticate: Basic realm=\"x\"\r\n",
                b"",
            ),
            // Another name for this machine is another host.
            (true, true) => {
                let port = target.split(':').nth(1).unwrap();
                response(
                    "307 Elsewhere",
                    &format!("location: http://localhost:{port}{path}\r\n"),
                    b"",
                )
            }
            (true, false) => serve(&registry_image, head),
        }
    });
    place.logins.files = vec![make::auth_file(place.dir.path(), &registry.host, LOGIN)];
    place.build(&pinned(&registry.host, &image), "a").unwrap();
    let asked = storage.asked();
    assert_eq!(asked.len(), 4);
    assert!(
        asked.iter().all(|head| !head.contains("authorization")),
        "{asked:#?}"
    );
    // The other host cannot ask for it either.
    let tokens = Server::start(|_| response("200 OK", "", b"{\"token\":\"abc\"}"));
    let challenge = format!(
        "www-authenticate: Bearer realm=\"http://{}/token\"\r\n",
        tokens.host
    );
    let storage = Server::start(move |_| response("401 Unauthorized", &challenge, b""));
    let redirects = "where the registry redirects, answered 401";
    for (part, said) in [("/blobs/", "answered 401"), ("/manifests/", redirects)] {
        let (inner, host) = (image.clone(), storage.host.clone());
        let registry = Server::start(move |head| {
            let path = head.split(' ').nth(1).unwrap_or_default();
            match path.contains(part) {
                true => {
                    let elsewhere = format!("location: http://{host}{path}\r\n");
                    response("307 Elsewhere", &elsewhere, b"")
                }
                false => serve(&inner, head),
            }
        });
        let mut place = Place::new();
        place.logins.files = vec![make::auth_file(place.dir.path(), &registry.host, LOGIN)];
        let tag = format!("ref = \"{}/team/sample:1\"", registry.host);
        fails(place.build(&tag, "a"), Kind::Unavailable, said);
    }
    assert!(tokens.asked().is_empty(), "{:#?}", tokens.asked());
}

#[test]
fn a_mirror_stands_in_for_a_registry() {
    let mut place = Place::new();
    let registry = Registry::start(true);
    let image = sample();
    registry.push("proxy/team/sample", "1", &image);
    let table = pinned("registry.example.org", &image);
    place.mirrors.insert(
        "registry.example.org".into(),
        format!("http://{}/proxy", registry.host),
    );
    // The login is for the mirror's repositories, not for those of the registry.
    let proxy = format!("{}/proxy", registry.host);
    place.logins.files = vec![make::auth_file(place.dir.path(), &proxy, LOGIN)];
    place.build(&table, "a").unwrap();
}

#[test]
fn two_at_once_share_what_they_download() {
    let place = Place::new();
    let image = sample();
    let inner = image.clone();
    let server = Server::start(move |head| {
        std::thread::sleep(std::time::Duration::from_millis(100));
        serve(&inner, head)
    });
    let table = pinned(&server.host, &image);
    std::thread::scope(|scope| {
        for name in ["a", "b"] {
            let (place, table) = (&place, &table);
            scope.spawn(move || place.build(table, name).unwrap());
        }
    });
    place.assert_same("a", "b");
    assert_eq!(server.asked().len(), 5, "{:#?}", server.asked());
}

#[test]
fn a_pull_can_be_cancelled() {
    let place = Place::new();
    let image = sample();
    let inner = image.clone();
    let server = Server::start(move |head| {
        if head.contains("/blobs/") && head.contains(&digest(&inner.blobs[0])) {
            std::thread::sleep(std::time::Duration::from_secs(30));
        }
        serve(&inner, head)
    });
    let started = std::time::Instant::now();
    let outcome = place.build_with(&pinned(&server.host, &image), "a", &mut |progress| {
        if matches!(progress, BuildProgress::Bytes { done, .. } if done > 0) {
            place.cancel.store(true, Ordering::Relaxed);
        }
    });
    assert_eq!(outcome.unwrap_err().kind(), Kind::Signal(2));
    assert!(started.elapsed() < std::time::Duration::from_secs(30));
}
