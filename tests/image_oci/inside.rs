//! What of an image reaches an environment: its tree, and nothing else that its author wrote (case 9 of the catalogue).

use serde_json::json;

use crate::make::{Image, Registry, Tar, gzip};
use crate::place::sample;
use crate::support::env::TestStore;

/// Packs the tree of the tests' own image as one layer, with what `more` adds to it.
fn base(more: Tar) -> Vec<u8> {
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
    // An archive ends with empty blocks, which what follows has to replace.
    let mut archive = output.stdout;
    let end = archive.iter().rposition(|byte| *byte != 0).unwrap() + 1;
    archive.truncate(end.next_multiple_of(512));
    archive.extend_from_slice(&more.end());
    archive
}

#[test]
fn an_image_brings_its_tree_and_no_settings() {
    let store = TestStore::new();
    fs_err::create_dir(store.work().join("evil")).unwrap();
    // Of these systemd-nspawn would take paths and privileges, did it read them.
    let nspawn = "[Exec]\nPrivateUsers=no\nWorkingDirectory=/nowhere\nEnvironment=EVIL=1\n[Files]\nBind=/etc:/stolen\n";
    fs_err::write(store.work().join("evil.nspawn"), nspawn).unwrap();
    let archive = base(
        Tar::default()
            .file("root.nspawn", nspawn)
            .file(".nspawn", nspawn),
    );
    let run = json!({
        "User": "0:0\nroot:x", "WorkingDir": "/proc/self/fd/7", "Cmd": ["/bin/false"], "Entrypoint": ["/bin/false"],
        "Env": ["LD_PRELOAD=/evil.so", "EVIL=1\nMORE=2", "PATH=/evil"],
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
    store.up_with("[[step]]\nname = 'look'\nrun = 'env; pwd; id -u; ls / /stolen 2>&1 || true'\n");
    let log = store.rockenv(&["logs", store.env(), "look"]).ok().text();
    for evil in ["EVIL", "LD_PRELOAD", "PATH=/evil", "/proc/self", "MORE"] {
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
    store.rockenv(&["image", "build", "sample"]).ok();
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
