//! Builds that are interrupted or fail.

use fs_err as fs;
use nix::sys::signal::Signal;
use serde_json::json;

use super::{recipe, sh};
use crate::image_oci::make::{Image, Tar, descriptor, write_index};
use crate::support::env::TestStore;
use crate::support::run::{sha256, wait_until};

/// Large enough to be read for minutes, and without a block on the disk.
const LARGE: u64 = 64 << 30;

fn is_building(store: &TestStore) -> bool {
    let mut images = fs::read_dir(store.home().join("images")).unwrap();
    images.any(|entry| {
        entry
            .unwrap()
            .path()
            .join("root")
            .read_dir()
            .is_ok_and(|mut tree| tree.next().is_none())
    })
}

#[test]
fn signals_end_a_build_while_it_reads_a_large_file() {
    let store = TestStore::new();
    let images = store.work().join("images");
    let large = |path: &str| {
        fs::File::create(images.join(path))
            .unwrap()
            .set_len(LARGE)
            .unwrap();
    };
    large("large.tar");
    let mut image = Image::new(&[Tar::default().file("a", "").end()]);
    let mut manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    let mut layer = descriptor("application/vnd.oci.image.layer.v1.tar", b"");
    layer["size"] = json!(LARGE);
    manifest["layers"] = json!([layer]);
    image.manifest = manifest.to_string().into_bytes();
    image.store(&images.join("layout"));
    write_index(&images.join("layout"), &[image.descriptor()]);
    large(&format!(
        "layout/blobs/sha256/{}",
        &layer["digest"].as_str().unwrap()[7..]
    ));
    let digest = "0".repeat(64);
    for (provider, table, signal, code) in [
        (
            "tarball",
            format!("path = \"large.tar\"\nsha256 = \"{digest}\""),
            Signal::SIGTERM,
            143,
        ),
        ("oci", "path = \"layout\"".to_owned(), Signal::SIGINT, 130),
    ] {
        recipe(&store, provider, &table);
        let running = store.start(&["image", "build", "x"]);
        wait_until("the build has begun", || is_building(&store));
        std::thread::sleep(std::time::Duration::from_millis(500));
        running.signal(signal);
        running.wait().exits(code).says(&["interrupted"]);
    }
}

#[test]
fn a_build_that_fails_leaves_nothing_in_the_trash() {
    let store = TestStore::new();
    let images = store.work().join("images");
    sh(
        "truncate -s 100k a; tar -cf x.tar a; truncate -s 50k x.tar; rm a",
        &images,
    );
    let digest = sha256(&images.join("x.tar"));
    recipe(
        &store,
        "tarball",
        &format!("path = \"x.tar\"\nsha256 = \"{digest}\""),
    );
    store.rockenv(&["image", "build", "x"]).exits(3);
    wait_until("the trash is empty", || {
        let trash = fs::read_dir(store.home().join("trash"));
        trash.map_or(0, Iterator::count) == 0
    });
}
