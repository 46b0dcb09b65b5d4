//! The files and directories that recipes name.

use super::{recipe, sh};
use crate::image_oci::make::{Image, Tar};
use crate::support::env::TestStore;

#[test]
fn a_fifo_in_place_of_an_image_s_file_is_refused() {
    let store = TestStore::new();
    sh("mkfifo x.tar", &store.work().join("images"));
    for (provider, table) in [
        (
            "tarball",
            format!("path = \"x.tar\"\nsha256 = \"{}\"", "0".repeat(64)),
        ),
        ("oci", "path = \"x.tar\"".to_owned()),
        ("directory", "path = \"x.tar\"".to_owned()),
    ] {
        recipe(&store, provider, &table);
        let help = format!("help: correct `path` in [{provider}]");
        store
            .rockenv(&["image", "build", "x"])
            .exits(3)
            .says(&["images/x.tar` is not a ", &help]);
    }
}

#[test]
fn what_a_recipe_names_and_is_not_there_is_said() {
    let store = TestStore::new();
    let images = store.work().join("images");
    sh(
        "mkdir tree; touch tree/a; ln -s tree link; ln -s gone dangling",
        &images,
    );
    Image::new(&[Tar::default().file("a", "").end()]).layout(&images.join("layout"));
    std::os::unix::fs::symlink("layout", images.join("layout-link")).unwrap();
    let sum = format!("\nsha256 = \"{}\"", "0".repeat(64));
    for (provider, path, rest, why) in [
        ("tarball", "gone", sum.as_str(), "does not exist"),
        ("tarball", "tree", &sum, "is not a regular file"),
        ("directory", "gone", "", "does not exist"),
        ("directory", "dangling", "", "does not exist"),
        ("directory", "tree/a", "", "is not a directory"),
        ("oci", "gone", "", "does not exist"),
        ("oci", "tree/a/b", "", "does not exist"),
    ] {
        recipe(&store, provider, &format!("path = \"{path}\"{rest}"));
        let named = format!("images/{path}` {why}");
        let help = format!("help: correct `path` in [{provider}]");
        store.rockenv(&["image", "build", "x"]).exits(3).says(&[
            "cannot build image `x`",
            &named,
            &help,
        ]);
    }
    for (provider, path) in [("directory", "link"), ("oci", "layout-link")] {
        recipe(&store, provider, &format!("path = \"{path}\""));
        store.rockenv(&["image", "build", "x"]).ok();
    }
}
