//! Layers over each other: what they delete and replace, and what hostile ones try (cases 7 and 8 of the catalogue).

use std::cell::Cell;
use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;

use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rockenv::testing::error::Kind;

use super::make::{Image, Tar};
use super::place::{Place, fails};

#[test]
fn deletions_mean_the_layers_below() {
    let place = Place::new();
    let base = || {
        Tar::default()
            .dir("a/")
            .file("a/1", "1")
            .dir("a/b/")
            .file("a/b/2", "2")
            .file("c", "c")
            .end()
    };
    let tree = |upper: Tar| place.layers(&[base(), upper.end()]).unwrap();
    assert_eq!(
        tree(Tar::default().file("a/.wh.1", "")),
        ["a", "a/b", "a/b/2", "c"]
    );
    assert_eq!(tree(Tar::default().file(".wh.a", "")), ["c"]);
    assert_eq!(
        tree(Tar::default().file(".wh.nothing", "").file("x/y/.wh.z", "")),
        ["a", "a/1", "a/b", "a/b/2", "c"]
    );
    assert_eq!(
        tree(
            Tar::default()
                .dir("a/")
                .file("a/.wh..wh..opq", "")
                .file("a/3", "3")
        ),
        ["a", "a/3", "c"]
    );
    // A layer's own files stay, wherever in the layer the opaque marker is.
    assert_eq!(
        tree(Tar::default().file("a/b/3", "3").file("a/.wh..wh..opq", "")),
        ["a", "a/b", "a/b/3", "c"]
    );
    assert_eq!(
        tree(Tar::default().file("a/1", "new").file("a/.wh.1", "")),
        ["a", "a/1", "a/b", "a/b/2", "c"]
    );
    assert_eq!(
        tree(Tar::default().dir("a/b/").file(".wh.a", "")),
        ["a", "a/b", "c"]
    );
    assert_eq!(
        tree(Tar::default().file(".wh..wh..opq", "").file("n", "")),
        ["n"]
    );
    // The lowest layer has nothing to delete, and aufs's own files are no content.
    let lowest = Tar::default()
        .file(".wh.a", "")
        .file("a", "")
        .file(".wh..wh.plnk", "")
        .file(".wh..wh.aufs", "");
    assert_eq!(place.layers(&[lowest.end()]).unwrap(), ["a"]);
    // A deletion affects the layers below it, not those above.
    let third = Tar::default().file("a/again", "").end();
    let tree = place
        .layers(&[base(), Tar::default().file(".wh.a", "").end(), third])
        .unwrap();
    assert_eq!(tree, ["a", "a/again", "c"]);
}

#[test]
fn one_kind_replaces_another() {
    let place = Place::new();
    let base = Tar::default()
        .dir("d/")
        .file("d/in", "")
        .file("f", "")
        .link("l", "d")
        .end();
    let tree = |upper: Tar| place.layers(&[base.clone(), upper.end()]);
    assert_eq!(tree(Tar::default().file("d", "")).unwrap(), ["d", "f", "l"]);
    assert_eq!(
        tree(Tar::default().link("d", "f")).unwrap(),
        ["d", "f", "l"]
    );
    assert_eq!(
        tree(Tar::default().dir("f/").file("f/x", "")).unwrap(),
        ["d", "d/in", "f", "f/x", "l"]
    );
    assert_eq!(
        tree(Tar::default().dir("l/").file("l/x", "")).unwrap(),
        ["d", "d/in", "f", "l", "l/x"]
    );
    assert_eq!(
        tree(Tar::default().hard("d", "f")).unwrap(),
        ["d", "f", "l"]
    );
    assert_eq!(
        tree(Tar::default().dir("d/")).unwrap(),
        ["d", "d/in", "f", "l"]
    );
    // A layer that contradicts itself is refused, like such an archive.
    let both = Tar::default().file("d/x", "").file("d", "");
    fails(tree(both), Kind::Invalid, "not empty");
}

#[test]
fn attributes_of_directories_outlive_later_layers() {
    let place = Place::new();
    let base = Tar::default().dir("d/").file("d/1", "").end();
    place
        .layers(&[
            base.clone(),
            Tar::default().file("d/2", "").file("d/.wh.1", "").end(),
        ])
        .unwrap();
    Image::new(&[base, Tar::default().file("d/2", "").end()]).layout(&place.path("x"));
    for name in ["a", "b"] {
        place.build("path = \"x\"", name).unwrap();
        let directory = fs_err::metadata(place.path(name).join("d")).unwrap();
        assert_eq!(
            (directory.mtime(), directory.mode() & 0o7777),
            (1_600_000_000, 0o755)
        );
    }
}

#[test]
fn layers_cannot_reach_outside() {
    let place = Place::new();
    let outside = place.path("outside").display().to_string();
    let base = Tar::default()
        .link("abs", &outside)
        .link("rel", "../outside")
        .link("etc", "/etc")
        .dir("d/")
        .file("d/x", "")
        .end();
    let upper = |upper: Tar| place.layers(&[base.clone(), upper.end()]);
    let refused = |tar: Tar, part: &str| drop(fails(upper(tar), Kind::Invalid, part));
    for name in ["abs", "rel"] {
        for deletion in [".wh.file", ".wh..wh..opq"] {
            let deletes = Tar::default().file(&format!("{name}/{deletion}"), "");
            refused(deletes, "which is not a directory");
        }
        let file = format!("{name}/file");
        refused(Tar::default().file(&file, "owned"), "not a directory");
        refused(Tar::default().hard("h", &file), "not in the archive");
    }
    let leaves = "leaves the directory";
    refused(Tar::default().file("../.wh.outside", ""), leaves);
    refused(Tar::default().hard("h", "../outside/file"), leaves);
    for name in ["d/.wh...", "d/.wh..", "d/.wh."] {
        refused(Tar::default().file(name, ""), "nothing that can be named");
    }
    refused(
        Tar::default().dir(".wh.d/").file(".wh.d/x", ""),
        "is inside a deleted directory",
    );
    // A deletion removes the link itself, and a directory in its place belongs to the image.
    assert_eq!(
        upper(
            Tar::default()
                .file(".wh.abs", "")
                .file(".wh.rel", "")
                .file(".wh.etc", "")
        )
        .unwrap(),
        ["d", "d/x"]
    );
    let replaced = upper(Tar::default().dir("etc/").file("etc/passwd", "own")).unwrap();
    assert!(replaced.contains(&"etc/passwd".to_owned()));
    // Deleting a directory deletes the links in it.
    let inside = Tar::default()
        .dir("k/")
        .link("k/abs", &outside)
        .link("k/up", "..")
        .end();
    let tree = place.layers(&[inside, Tar::default().file(".wh.k", "").file("n", "").end()]);
    assert_eq!(tree.unwrap(), ["n"]);
}

#[test]
fn trees_that_are_odd_are_read_without_leaving_them() {
    let place = Place::new();
    fs_err::create_dir(place.path("host")).unwrap();
    fs_err::write(place.path("host/os-release"), "ID=host\n").unwrap();
    let outside = place.path("host");
    let read = |layer: Tar, name: &str| {
        Image::new(&[layer.end()]).layout(&place.path(name));
        let table = format!("path = \"{name}\"");
        let tree = format!("{name}.tree");
        place.build(&table, &tree).unwrap().os_release.id
    };
    let to = |name: &str| outside.join(name).display().to_string();
    let etc = Tar::default().link("etc", &to("")).link("usr", "../host");
    assert_eq!(read(etc, "etc"), "");
    let file = Tar::default()
        .dir("etc/")
        .link("etc/os-release", &to("os-release"));
    assert_eq!(read(file, "file"), "");
    let fifo = Tar::default()
        .dir("etc/")
        .fifo("etc/os-release")
        .fifo("etc/passwd");
    assert_eq!(read(fifo, "fifo"), "");
    let absolute = Tar::default()
        .dir("etc/")
        .link("etc/os-release", "/lib/os")
        .dir("lib/")
        .file("lib/os", "ID=own\n");
    assert_eq!(read(absolute, "absolute"), "own");
}

/// One entry of a random layer.
#[derive(Clone, Debug)]
enum Change {
    Directory(String),
    File(String),
    Delete(String),
    Empty(String),
}

fn changes() -> impl Strategy<Value = Vec<Vec<Change>>> {
    let path = prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|parts| parts.join("/"));
    let change = (0..6_u8, path).prop_map(|(kind, path)| match kind {
        0 | 1 => Change::Directory(path),
        2 | 3 => Change::File(path),
        4 => Change::Delete(path),
        _ => Change::Empty(path),
    });
    prop::collection::vec(prop::collection::vec(change, 0..7), 1..5)
}

/// Applies layers as the specification says: first the deletions in lower layers, then everything else.
fn model(layers: &[Vec<Change>]) -> BTreeSet<String> {
    let mut tree = BTreeSet::new();
    let below = |path: &str, of: &str| path.starts_with(&format!("{of}/"));
    for layer in layers {
        for change in layer {
            match change {
                Change::Delete(of) => tree.retain(|path: &String| path != of && !below(path, of)),
                Change::Empty(of) => tree.retain(|path| !below(path, of)),
                Change::Directory(_) | Change::File(_) => {}
            }
        }
        for change in layer {
            let path = match change {
                Change::Directory(path) => path,
                Change::File(path) => {
                    tree.retain(|other| !below(other, path));
                    path
                }
                Change::Delete(_) | Change::Empty(_) => continue,
            };
            tree.extend(path.match_indices('/').map(|(at, _)| path[..at].to_owned()));
            tree.insert(path.clone());
        }
    }
    tree
}

#[test]
fn random_layers_give_what_the_specification_says() {
    let place = Place::new();
    let built = Cell::new(0);
    let mut runner = TestRunner::new(Config::with_cases(400));
    let outcome = runner.run(&changes(), |layers| {
        let archives: Vec<Vec<u8>> = layers
            .iter()
            .map(|layer| {
                let archive = layer
                    .iter()
                    .fold(Tar::default(), |tar, change| match change {
                        Change::Directory(path) => tar.dir(&format!("{path}/")),
                        Change::File(path) => tar.file(path, "x"),
                        Change::Delete(path) => match path.rsplit_once('/') {
                            Some((parent, name)) => tar.file(&format!("{parent}/.wh.{name}"), ""),
                            None => tar.file(&format!(".wh.{path}"), ""),
                        },
                        Change::Empty(path) => tar.file(&format!("{path}/.wh..wh..opq"), ""),
                    });
                archive.end()
            })
            .collect();
        // Layers that go through a file or contradict themselves are refused.
        match place.layers(&archives) {
            Ok(names) => {
                built.set(built.get() + 1);
                let expected: Vec<String> = model(&layers).into_iter().collect();
                prop_assert_eq!(names, expected);
            }
            Err(error) => prop_assert_eq!(error.kind(), Kind::Invalid, "{:?}", error.chain()),
        }
        Ok(())
    });
    outcome.unwrap();
    assert!(built.get() > 100, "{built:?}");
}
