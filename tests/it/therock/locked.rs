//! What a lock file records of TheRock, and what follows from it: tarballs, pip's packages, and TheRock's fingerprints.

use std::process::Command;

use fs_err as fs;

use super::Case;
use crate::support::loopfs::run;
use crate::support::run::sha256;

/// The source names the tarballs, so the lock file has them as soon as the source is there.
pub(super) fn tarballs_are_locked_before_anything_is_built(case: &Case) {
    let file = case.store.work().join("first.lock");
    let path = file.to_str().unwrap();
    let lock = ["lock", "gfx1103", "--file", path];
    case.store.rockenv(&lock).ok();
    let text = fs::read_to_string(&file).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let files = table["files"]["therock-tarballs"].as_table().unwrap();
    let names: Vec<&String> = files.keys().collect();
    assert_eq!(
        names,
        [
            "therock-expat-sources/expat-2.7.5.tar.gz",
            "therock-zlib-sources/zlib.tar.gz"
        ]
    );
    for file in files.values() {
        let (url, sha256) = (&file["url"], file["sha256"].as_str().unwrap());
        assert!(url.as_str().unwrap().starts_with("http://127.0.0.1:"));
        let blob = case.store.home().join("blobs/sha256").join(sha256);
        assert!(blob.is_file(), "{text}");
    }
    // Finished wheels need no tarballs.
    let wheels = [
        "lock",
        "gfx1103",
        "--from",
        "wheels",
        "--file",
        "wheels.lock",
    ];
    case.store.rockenv(&wheels).ok();
    let text = fs::read_to_string(case.store.work().join("wheels.lock")).unwrap();
    assert!(!text.contains("therock-tarballs"), "{text}");
    case.store.rockenv(&lock).ok().says(&["nothing changed"]);
}

/// Fails unless each tarball was requested once, and is in the store under its digest.
pub(super) fn fetched_once(case: &Case) {
    for (name, file) in [
        ("therock-zlib-sources", "zlib.tar.gz"),
        ("therock-expat-sources", "expat-2.7.5.tar.gz"),
    ] {
        assert_eq!(case.upstream.requests(&format!("/{file}")), 1, "{file}");
        let kept = case.store.home().join("caches/therock-tarballs");
        let digest = sha256(&kept.join(name).join(file));
        let blobs = case.store.home().join("blobs/sha256");
        assert!(blobs.join(digest).is_file(), "{file}");
    }
}

/// The lock file has what pip took from an index. The index then has another wheel of that version.
pub(super) fn wheels_of_an_index_are_locked(case: &Case) {
    let file = case.store.work().join("w.lock");
    let path = file.to_str().unwrap();
    let what = ["gfx1103", "--from", "wheels"];
    let lock = [&["lock"], &what[..], &["--file", path]].concat();
    case.store.rockenv(&lock).ok();
    let text = fs::read_to_string(&file).unwrap();
    let table: toml::Table = text.parse().unwrap();
    let pinned = |step: &str, package: &str| {
        let steps = table["step"].as_array().unwrap().iter();
        let mut steps = steps.filter(|found| found["name"].as_str() == Some(step));
        steps.next().unwrap()["pins"][package]
            .as_str()
            .unwrap()
            .to_owned()
    };
    assert!(pinned("install-index", "rocm").contains(" sha256:"));
    let torch = pinned("install-wheels", "torch");
    let wheels = case.store.work().join("out/torch");
    let wheel = fs::read_dir(&wheels)
        .unwrap()
        .map(|entry| entry.unwrap().path());
    let wheel = wheel.filter(|path| path.to_str().unwrap().contains("/torch-"));
    let wheel = wheel.last().unwrap();
    let digest = sha256(&wheel);
    assert!(torch.ends_with(&digest), "{torch} {digest}");
    let env = case.env("w");
    let up = [
        "up",
        "--name",
        &env,
        "--locked",
        "--lock-file",
        path,
        "--rerun",
        "install-wheels",
    ];
    let up = [&up[..], &what].concat();
    case.store.rockenv(&up).ok();
    run(Command::new("python3").args(["-c", OTHER]).arg(&wheel));
    case.store.rockenv(&up).exits(8).says(&[
        "`torch` ",
        "of step `install-wheels` differs from the locked content",
    ]);
}

/// Changes a wheel's bytes by a comment at its end, which is part of no file in it.
const OTHER: &str = "import sys, zipfile\nwith zipfile.ZipFile(sys.argv[1], 'a') as wheel: wheel.comment = b'other'";

/// The lock file has the fingerprints that TheRock wrote during the build, and the keys of the snapshots.
pub(super) fn what_was_built_is_locked(case: &Case) {
    let file = case.store.work().join("a.lock");
    let path = file.to_str().unwrap();
    case.store
        .rockenv(&["lock", "gfx1103", "--file", path])
        .ok();
    let text = fs::read_to_string(&file).unwrap();
    let lock: toml::Table = text.parse().unwrap();
    let steps = lock["step"].as_array().unwrap();
    let step = |name: &str| {
        steps
            .iter()
            .find(|step| step["name"].as_str() == Some(name))
    };
    let prints = &step("configure-generic").unwrap()["prints"]["artifacts"];
    assert_eq!(prints["base"].as_str().unwrap().len(), 64, "{text}");
    let env = case.env("a");
    let up = [
        "up",
        "--name",
        &env,
        "gfx1103",
        "--locked",
        "--lock-file",
        path,
    ];
    case.store.rockenv(&up).ok().says(&["nothing to do"]);
    what_pytorch_installs_is_locked(case, &up, &text);
    // The lock file has the key of every step that runs here. Steps that need a GPU have none.
    let keys = case.keys(&["gfx1103", "--name", &env]);
    assert!(keys["rocm-test"].is_empty() && !keys["checksums"].is_empty());
    for (name, key) in keys.iter().filter(|(_, key)| !key.is_empty()) {
        assert_eq!(
            step(name).unwrap()["key"].as_str(),
            Some(key.as_str()),
            "{name}"
        );
    }
    let words = ["lock", "gfx1103", "--file", path];
    case.store.rockenv(&words).ok().says(&["nothing changed"]);
    // The keys of later steps depend on TheRock's fingerprints.
    let base = prints["base"].as_str().unwrap();
    fs::write(&file, text.replace(base, &"0".repeat(64))).unwrap();
    case.store
        .rockenv(&up)
        .exits(8)
        .says(&["step `compiler-runtime` differs from the lock file"]);
}

/// The lock file has what PyTorch's own build installs with pip. The build gets the same again even if upstream has a
/// newer version.
fn what_pytorch_installs_is_locked(case: &Case, up: &[&str], text: &str) {
    assert!(text.contains("tokens-double = \"1.0 sha256:"), "{text}");
    assert!(text.contains("pytest = \"9.0.3 sha256:"), "{text}");
    let links = case.store.work().join("upstream/links.html");
    let newer = "<a href=\"tokens_double-1.1-py3-none-any.whl\">1.1</a>";
    fs::write(&links, fs::read_to_string(&links).unwrap() + newer).unwrap();
    let again = [up, &["--rerun", "torch"]].concat();
    case.store.rockenv(&again).ok();
    let which = "~/venv/bin/python -c 'import tokens_double; print(tokens_double.VERSION)'";
    case.sh("a", which).ok().prints("1.0");
    let ran = [&["up", "--name", up[2], "gfx1103"], &again[up.len()..]].concat();
    case.store.rockenv(&ran).ok();
    case.sh("a", which).ok().prints("1.1");
    case.store.rockenv(up).exits(8).says(&[
        "`tokens-double` of step `torch` is 1.0 in the lock file, but 1.1 was installed",
        "--rerun torch",
    ]);
    case.store.rockenv(&again).ok();
}
