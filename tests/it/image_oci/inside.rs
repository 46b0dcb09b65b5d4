//! What an image brings into an env: its tree, its variables (see `environment`), and nothing else that its author
//! wrote (case 9 of the catalogue). On every engine: `tests/service docker|podman cargo test --test it
//! an_image_brings`.

use nix::sys::signal::Signal;
use serde_json::json;

use super::make::{HOLD, Image, Registry, Server, Tar, digest, gzip, range_of, response, serve};
use super::place::sample;
use crate::support::env::TestStore;
use crate::support::run::wait_until;

/// Packs the tree of the tests' own image as one layer, with the additions in `more`.
pub(crate) fn base(more: Tar) -> Vec<u8> {
    let output = std::process::Command::new("tar")
        .args([
            "-C",
            &crate::support::rootfs().display().to_string(),
            "--numeric-owner",
            "-cf",
            "-",
            ".",
        ])
        .output()
        .unwrap();
    assert!(output.status.success());
    // An archive ends with empty blocks, which the additions have to replace.
    let mut archive = output.stdout;
    let end = archive.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    archive.truncate(end.next_multiple_of(512));
    archive.extend_from_slice(&more.end());
    archive
}

#[test]
fn an_image_brings_its_tree_and_variables_and_no_settings() {
    let store = TestStore::new();
    fs_err::create_dir(store.work().join("evil")).unwrap();
    // systemd-nspawn would take paths and privileges from these files if it read them.
    let nspawn = "[Exec]\nPrivateUsers=no\nWorkingDirectory=/nowhere\nEnvironment=EVIL=1\n[Files]\nBind=/etc:/stolen\n";
    fs_err::write(store.work().join("evil.nspawn"), nspawn).unwrap();
    let archive = base(
        Tar::default()
            .file("root.nspawn", nspawn)
            .file(".nspawn", nspawn),
    );
    let run = json!({
        "User": "0:0\nroot:x", "WorkingDir": "/proc/self/fd/7", "Cmd": ["/bin/false"], "Entrypoint": ["/bin/false"],
        "Env": ["HOME=/evil", "USER=evil", "container=evil", "ROCKENV_ENV=evil", "MAKEFLAGS=--evil", "e.vil=1", "=evil", "evil"],
        "Labels": { "io.rockenv.env": "other", "io.rockenv.step": "x" }, "Volumes": { "/etc": {} }
    });
    let image = Image::of(
        vec![(archive.clone(), gzip(&archive))],
        "amd64",
        &run,
        false,
    );
    image.layout(&store.work().join("evil"));
    let recipe = "schema = 1\nprovider = \"oci\"\n[oci]\npath = \"../evil\"\n";
    fs_err::write(store.work().join("images/base.toml"), recipe).unwrap();
    store.up_with(
        "[[step]]\nname = 'look'\nrun = 'env; pwd; id -u; ls / /stolen 2>&1 || true'
         [[step]]\nname = 'write'\nuser = 'root'\nrun = 'echo kept > /etc/written'\n",
    );
    // A service would have made a volume of `/etc`, which is in no snapshot.
    store.sh("cat /etc/written").ok().prints("kept");
    let log = store.rockenv(&["logs", store.env(), "look"]).ok().text();
    for evil in ["evil", "e.vil", "/proc/self"] {
        assert!(!log.contains(evil), "{log}");
    }
    assert!(log.contains("\n1234\n") && log.contains("/stolen"), "{log}");
    assert!(log.contains("No such file"), "{log}");
    let images = store.rockenv(&["image", "ls", "--json"]).ok().text();
    assert!(images.contains(&image.digest()), "{images}");
    store.rockenv(&["--yes", "rm", store.env()]).ok();
    store.assert_clean();
}

#[test]
fn a_tag_is_looked_up_again_when_asked_to() {
    let store = TestStore::new();
    let registry = Registry::start(false);
    registry.push("team/sample", "1", &sample());
    let recipe = format!(
        "schema = 1\nprovider = \"oci\"\n[oci]\nref = \"{}/team/sample:1\"\n",
        registry.host
    );
    fs_err::write(store.work().join("images/sample.toml"), recipe).unwrap();
    let built = store.rockenv(&["image", "build", "sample"]).ok();
    built.says(&[&format!("from {}", sample().digest())]);
    let resolved = |image: &Image| {
        let text = store.rockenv(&["image", "ls", "--json"]).ok().text();
        assert!(text.contains(&image.digest()), "{text}");
    };
    resolved(&sample());
    let moved = Image::new(&[Tar::default().file("moved", "").end()]);
    registry.push("team/sample", "1", &moved);
    store.rockenv(&["image", "build", "sample"]).ok();
    resolved(&sample());
    store
        .rockenv(&["image", "build", "sample", "--refresh"])
        .ok();
    resolved(&moved);
    store.rockenv(&["image", "verify", "sample"]).ok();
}

#[test]
fn a_killed_pull_goes_on_where_it_was() {
    let store = TestStore::new();
    let (archive, image) = Image::big();
    let (inner, blob) = (image.clone(), digest(&archive));
    let server = Server::start(move |head| {
        let layer = &inner.blobs[0];
        match (head.contains(&blob), range_of(head)) {
            (false, _) => serve(&inner, head),
            (true, None) => {
                let mut half = response("200 OK", HOLD, layer);
                half.truncate(half.len() - layer.len() / 2);
                half
            }
            (true, Some(from)) => {
                let range = format!(
                    "content-range: bytes {from}-{}/{}\r\n",
                    layer.len() - 1,
                    layer.len()
                );
                response("206 Partial Content", &range, &layer[from..])
            }
        }
    });
    let recipe = format!(
        "schema = 1\nprovider = \"oci\"\n[oci]\nref = \"{}/a@{}\"\n",
        server.host,
        image.digest()
    );
    fs_err::write(store.work().join("images/big.toml"), recipe).unwrap();
    let blobs = store.home().join("blobs/sha256");
    let partial = blobs.join(format!(".{}.partial", &digest(&archive)[7..]));
    let pull = store.start(&["image", "build", "big"]);
    let half = archive.len() - archive.len() / 2;
    wait_until("half of the layer is there", || {
        fs_err::metadata(&partial).is_ok_and(|file| file.len() == half as u64)
    });
    pull.signal(Signal::SIGKILL);
    drop(pull.wait());
    store.rockenv(&["image", "build", "big"]).ok();
    let asked = server.asked();
    assert_eq!(range_of(asked.last().unwrap()), Some(half), "{asked:#?}");
    // The first attempt left nothing beside the image.
    let left = |directory: &std::path::Path| {
        fs_err::read_dir(directory)
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .filter(|name| name.starts_with("tmp-") || name.starts_with('.'))
            .count()
    };
    assert_eq!((left(&store.home().join("images")), left(&blobs)), (0, 0));
}
