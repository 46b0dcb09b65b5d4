//! Tests a lock file together with a dated, signed archive that publishes new versions, expires and is tampered with.

pub(crate) mod service;
use std::path::Path;

use crate::support::env::{TestStore, is_service};
use crate::support::loopfs::LoopFs;
use fs_err as fs;
use service::{Archive, SUITE};

/// A moment of the archive that is older than every lock file in these tests.
const FIRST: &str = "20240801T000000Z";

/// Makes a store whose image has one package of the archive and whose step installs another one.
fn user(disk: &LoopFs, name: &str, archive: &Archive) -> TestStore {
    let store = TestStore::at(&disk.join(name));
    let recipe = format!(
        "schema = 1\nprovider = \"mmdebstrap\"\n[mmdebstrap]\ndistribution = \"debian\"\nsuite = \"{SUITE}\"\n\
         variant = \"apt\"\npackages = [\"greeting\"]\n"
    );
    fs::write(store.work().join("images/dated.toml"), recipe).unwrap();
    let profile =
        "schema = 1\nimage = \"dated\"\n[[step]]\nname = \"install\"\npackages = [\"parting\"]\n";
    fs::write(store.work().join("profiles/locked.toml"), profile).unwrap();
    mirrors(&store, archive, "debian");
    store
}

/// Configures the archive as the mirror. `present` is the path of its current state.
fn mirrors(store: &TestStore, archive: &Archive, present: &str) {
    let host = &archive.host;
    let key = archive.key("ours");
    let text = format!(
        "disk-floor = '0'\n[mirror]\ndebian = 'http://{host}/{present}'\n\
         debian-snapshot = 'http://{host}/archive/debian/@SNAPSHOTID@/'\ndebian-signed-by = '{}'\n",
        key.display()
    );
    store.configure(&text);
}

/// Returns the tree digests of the store's images.
fn images(store: &TestStore) -> Vec<String> {
    let entries = fs::read_dir(store.home().join("images")).unwrap();
    let mut digests: Vec<String> = entries
        .filter_map(|entry| fs::read(entry.unwrap().path().join("image.json")).ok())
        .map(|image| serde_json::from_slice::<serde_json::Value>(&image).unwrap())
        .map(|image| image["digest"].as_str().unwrap().to_owned())
        .collect();
    digests.sort();
    digests
}

fn flip_a_byte(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    fs::write(path, bytes).unwrap();
}

#[test]
fn a_locked_image_comes_from_its_moment_and_is_what_was_signed() {
    if is_service() {
        // Nothing here depends on the engine.
        return;
    }
    let archive = Archive::start();
    archive.publish(FIRST, "1.0", true);
    let disk = LoopFs::in_memory(3 << 30);
    let lock = "profiles/locked.lock";
    let installed = ["exec", "locked", "--", "sh", "-c"];
    let installed = [
        &installed[..],
        &["cat /usr/share/*ting /usr/share/greeting.host"],
    ]
    .concat();

    // The lock file records the present moment. The archive's newest moment is older, and its Release file has expired.
    let a = user(&disk, "a", &archive);
    a.rockenv(&["lock", "locked"])
        .ok()
        .says(&["image dated with "]);
    let text = fs::read_to_string(a.work().join(lock)).unwrap();
    assert!(text.contains("\ngreeting = \"1.0 all\"\n"), "{text}");
    let moment = text
        .lines()
        .find_map(|line| line.strip_prefix("snapshot = "))
        .unwrap()
        .trim_matches('"');
    a.rockenv(&["up", "locked", "--locked"]).ok();

    // The archive publishes a new version one second later. The lock file still selects the old one on another machine.
    let second = moment[9..15].parse::<u32>().unwrap();
    archive.publish(&format!("{}{:06}Z", &moment[..9], second + 1), "2.0", false);
    let b = user(&disk, "b", &archive);
    fs::copy(a.work().join(lock), b.work().join(lock)).unwrap();
    b.rockenv(&["up", "locked", "--locked"]).ok();
    for store in [&a, &b] {
        store
            .rockenv(&installed)
            .ok()
            .prints("greeting 1.0\nparting 1.0\nrockenv\nrockenv");
    }
    assert_eq!(images(&a), images(&b));
    assert_eq!(a.keys("locked"), b.keys("locked"));
    // Without the lock file, the image and the step get the current versions.
    b.rockenv(&["up", "locked"]).ok();
    b.rockenv(&installed)
        .ok()
        .prints("greeting 2.0\nparting 2.0\nrockenv\nrockenv");
    assert_ne!(a.keys("locked"), b.keys("locked"));

    refused(&archive, &disk, &a.work().join(lock));
}

/// Expects each build from the first moment to fail while one of its files differs from what was signed.
fn refused(archive: &Archive, disk: &LoopFs, lock: &Path) {
    let store = user(disk, "c", archive);
    fs::copy(lock, store.work().join("profiles/locked.lock")).unwrap();
    let refuses = |words: &[&str]| {
        store.rockenv(&["up", "locked", "--locked"]).exits(1).says(
            &[
                &["cannot build image `dated`", "caused by: apt says: "],
                words,
            ]
            .concat(),
        );
        assert_eq!(images(&store), [""; 0]);
    };
    let package = archive.at(FIRST).join("pool/own/greeting_1.0_all.deb");
    let release = archive.at(FIRST).join(format!("dists/{SUITE}/InRelease"));
    flip_a_byte(&package);
    refuses(&["/pool/own/greeting_1.0_all.deb", "Hash Sum mismatch"]);
    flip_a_byte(&package);
    // Another key signed the Release file.
    archive.make_key("theirs");
    archive.sign(FIRST, "theirs");
    refuses(&[&format!(" {SUITE} InRelease: "), "debian-signed-by = "]);
    // The Release file was changed after it was signed.
    archive.sign(FIRST, "ours");
    let text = fs::read_to_string(&release).unwrap();
    fs::write(
        &release,
        text.replace("Components: main", "Components: mine"),
    )
    .unwrap();
    refuses(&[&format!(" {SUITE} InRelease: ")]);
    fs::remove_file(&release).unwrap();
    refuses(&[&format!(" {SUITE} Release' is not signed")]);
    // Only a dated archive may serve an expired Release file. From any other mirror, one may hide newer versions.
    archive.sign(FIRST, "ours");
    mirrors(&store, archive, &format!("archive/debian/{FIRST}"));
    store
        .rockenv(&["up", "locked"])
        .exits(1)
        .says(&["apt says: Release file for ", "is expired"]);
}
