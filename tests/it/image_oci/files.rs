//! Layouts, archives and their documents: every byte is verified, and no claim is believed that cannot be true.

use std::collections::BTreeSet;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use rockenv::testing::digest::compare;
use serde_json::json;

use super::make::{self, Image, Tar, digest, gzip, index, noise, write_index};
use super::place::{Place, names, sample};

#[test]
fn every_byte_is_verified() {
    let place = Place::new();
    let image = sample();
    let damage = |name: &str, change: &dyn Fn(&Path)| {
        image.layout(&place.path(name));
        change(&place.path(name));
        place.refused(&format!("path = \"{name}\""))
    };
    let mut said = String::new();
    let blob =
        |directory: &Path, data: &[u8]| directory.join("blobs/sha256").join(&digest(data)[7..]);
    for (name, data) in [
        ("layer", &image.blobs[1]),
        ("config", &image.config),
        ("manifest", &image.manifest),
    ] {
        said += &damage(name, &|directory| {
            let mut bytes = data.clone();
            *bytes.last_mut().unwrap() ^= 1;
            fs_err::write(blob(directory, data), bytes).unwrap();
        });
    }
    // The layer's content differs from the configuration's digest, though its own digest is right.
    let mut layers = image.layers.clone();
    layers[0].1 = gzip(&Tar::default().file("etc/os-release", "ID=evil\n").end());
    let config_says = image.layers[0].0.clone();
    let swapped = Image::of(
        vec![(config_says, layers[0].1.clone())],
        "amd64",
        &json!({}),
        false,
    );
    swapped.layout(&place.path("swapped"));
    said += &place.refused("path = \"swapped\"");
    said += &damage("gone", &|directory| {
        fs_err::remove_file(blob(directory, &image.blobs[0])).unwrap();
    });
    insta::assert_snapshot!(said, @"
    error: layer `blobs/sha256/ID` has SHA-256 ID, not ID
    help: the image is damaged or was tampered with; use another
    exit code 8
    error: `blobs/sha256/ID` has SHA-256 ID, not ID
    help: the image is damaged or was tampered with; use another
    exit code 8
    error: `blobs/sha256/ID` has SHA-256 ID, not ID
    help: the image is damaged or was tampered with; use another
    exit code 8
    error: cannot extract layer ID of `PLACE/swapped`
      caused by: the layer's content has SHA-256 ID, but the image's configuration says ID
    help: the image is damaged or was tampered with; use another
    exit code 8
    error: refused image: `blobs/sha256/ID` is not in it
    help: the image is damaged or was tampered with; use another
    exit code 3
    ");
}

#[test]
fn documents_that_are_not_what_they_should_be_are_refused() {
    let place = Place::new();
    let image = sample();
    let manifest: serde_json::Value = serde_json::from_slice(&image.manifest).unwrap();
    let mut said = String::new();
    let mut helps = BTreeSet::new();
    let mut refused = |change: &dyn Fn(&mut serde_json::Value)| {
        let mut image = image.clone();
        let mut changed = manifest.clone();
        change(&mut changed);
        image.manifest = changed.to_string().into_bytes();
        image.layout(&place.path("x"));
        let all = place.refused("path = \"x\"");
        let (message, rest) = all.split_once('\n').unwrap();
        said.extend([message, "\n"]);
        helps.insert(rest.rsplit_once("help: ").unwrap().1.to_owned());
    };
    refused(&|m| m["schemaVersion"] = json!(1));
    refused(&|m| m["manifests"] = json!([]));
    refused(&|m| drop(m.as_object_mut().unwrap().remove("layers")));
    refused(&|m| m["layers"][0]["digest"] = json!("sha256:../../../etc/passwd"));
    refused(&|m| m["config"]["digest"] = json!("/etc/passwd"));
    refused(&|m| m["layers"][0]["mediaType"] = json!("application/wasm"));
    refused(&|m| drop(m["layers"].as_array_mut().unwrap().pop()));
    refused(&|m| {
        let layer = m["layers"][0].clone();
        m["layers"] = json!(vec![layer; 2000]);
    });
    refused(&|m| m["layers"][0]["size"] = json!(-1));
    for size in [1, 1 << 30] {
        refused(&|m| m["layers"][0]["size"] = json!(size));
        refused(&|m| m["config"]["size"] = json!(size));
    }
    for (data, name) in [(&image.blobs[0], "LAYER"), (&image.config, "CONFIG")] {
        said = said.replace(
            &format!("has {} bytes", data.len()),
            &format!("has {name} bytes"),
        );
    }
    insta::assert_snapshot!(said, @"
    error: refused image: its manifest has version 1, not 2
    error: refused image: its manifest is neither an image nor an index
    error: refused image: its manifest is neither an image nor an index
    error: refused image: digest `sha256:../../../etc/passwd` is not a SHA-256
    error: refused image: digest `/etc/passwd` is not a SHA-256
    error: refused image: layer type `application/wasm` is not a file system
    error: refused image: its manifest has 2 layers, its configuration 3
    error: refused image: it has 2000 layers (limit 1024)
    error: refused image: its manifest is invalid
    error: `blobs/sha256/ID` has LAYER bytes, not 1 as the image says
    error: `blobs/sha256/ID` has CONFIG bytes, not 1 as the image says
    error: `blobs/sha256/ID` has LAYER bytes, not 1073741824 as the image says
    error: refused image: `blobs/sha256/ID` has 1073741824 bytes (limit 16777216)
    ");
    insta::assert_snapshot!(helps.into_iter().collect::<String>(), @"
    it is damaged, or was not copied to its end; copy it again
    exit code 3
    push it again with a tool that writes version 2
    exit code 3
    the image is damaged or was tampered with; use another
    exit code 3
    ");
}

#[test]
fn zstd_with_frames_of_its_own_is_read() {
    let place = Place::new();
    let archive = Tar::default()
        .file("a", "1")
        .bytes("noise", &noise(200_000))
        .end();
    // As in zstd:chunked: several frames, and at the end one that decoders skip.
    let (first, second) = archive.split_at(1024);
    let mut chunked = [make::zstd(first), make::zstd(second)].concat();
    chunked.extend_from_slice(&[0x50, 0x2a, 0x4d, 0x18, 8, 0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8]);
    let image = Image::of(vec![(archive, chunked)], "amd64", &json!({}), false);
    image.layout(&place.path("x"));
    place.build("path = \"x\"", "tree").unwrap();
    assert_eq!(names(&place.path("tree")), ["a", "noise"]);
}

#[test]
fn an_index_is_asked_for_the_platform() {
    let place = Place::new();
    let [amd, arm] = ["amd64", "arm64"].map(|name| Image::of_architecture(name, false));
    let layout = place.path("x");
    amd.store(&layout);
    arm.store(&layout);
    let inner = index(&[
        arm.for_platform("linux/arm64"),
        amd.for_platform("linux/amd64"),
    ]);
    fs_err::write(
        layout.join("blobs/sha256").join(&digest(&inner)[7..]),
        &inner,
    )
    .unwrap();
    write_index(&layout, &[make::descriptor(make::INDEX, &inner)]);
    let built = place.build("path = \"x\"", "own").unwrap();
    assert_eq!(names(&place.path("own")), ["amd64"]);
    assert_eq!(built.resolved, Some(amd.digest()));
    place
        .build("path = \"x\"\nplatform = \"linux/arm64\"", "arm")
        .unwrap();
    assert_eq!(names(&place.path("arm")), ["arm64"]);
    let absent = place.refused("path = \"x\"\nplatform = \"linux/s390x\"");
    // Without an index, the configuration names the platform.
    arm.layout(&place.path("alone"));
    insta::assert_snapshot!(absent + &place.refused("path = \"alone\""), @r#"
    error: the image is not available for linux/s390x
    help: platform = "linux/amd64" (there are: linux/amd64, linux/arm64)
    exit code 7
    error: the image is for linux/arm64, not for linux/amd64
    help: platform = "linux/arm64"
    exit code 7
    "#);
}

#[test]
fn layouts_and_archives_give_one_tree() {
    let place = Place::new();
    let image = sample();
    image.layout(&place.path("x"));
    let layout = place.build("path = \"x\"", "a").unwrap();
    assert_eq!(layout.resolved, Some(image.digest()));
    assert_eq!(
        (
            layout.os_release.id.as_str(),
            layout.os_release.version_id.as_str()
        ),
        ("sample", "3")
    );
    assert_eq!(
        names(&place.path("a")),
        [
            "d",
            "d/hard",
            "d/new",
            "d/old",
            "etc",
            "etc/os-release",
            "noise"
        ]
    );
    assert_eq!(fs_err::metadata(place.path("a/d/old")).unwrap().nlink(), 2);
    let tar = Command::new("tar")
        .args(["-C", "x", "-cf", "x.tar", "."])
        .current_dir(place.dir.path())
        .status();
    assert!(tar.unwrap().success());
    let saved = image.docker_save("h.example/sample:1");
    fs_err::write(place.path("saved.tar"), &saved).unwrap();
    fs_err::write(place.path("saved.tar.gz"), gzip(&saved)).unwrap();
    fs_err::write(
        place.path("x.tar.zst"),
        make::zstd(&fs_err::read(place.path("x.tar")).unwrap()),
    )
    .unwrap();
    for name in ["x.tar", "x.tar.zst", "saved.tar", "saved.tar.gz"] {
        let tree = format!("{name}.tree");
        let built = place.build(&format!("path = \"{name}\""), &tree).unwrap();
        assert_eq!(built.digest, layout.digest, "{name}");
        place.assert_same("a", &tree);
        let resolved = if name.starts_with('x') {
            image.digest()
        } else {
            digest(&image.config)
        };
        assert_eq!(built.resolved, Some(resolved), "{name}");
    }
    fs_err::write(place.path("else.tar"), Tar::default().file("a", "").end()).unwrap();
    insta::assert_snapshot!(place.refused("path = \"else.tar\""), @"
    error: `PLACE/else.tar` is neither an OCI layout nor what `docker save` writes
    help: skopeo copy FROM oci:DIR, or docker save -o FILE.tar NAME
    exit code 3
    ");
}

#[test]
fn one_of_several_images_has_to_be_named() {
    let place = Place::new();
    let image = |name: &str| Image::new(&[Tar::default().file(name, "").end()]);
    let named = |image: &Image, name: &str| {
        let mut described = image.descriptor();
        described["annotations"] = json!({ "org.opencontainers.image.ref.name": name });
        described
    };
    let (one, two) = (image("one"), image("two"));
    one.store(&place.path("x"));
    two.store(&place.path("x"));
    write_index(&place.path("x"), &[named(&one, "1"), named(&two, "2")]);
    let said = ["path = \"x\"", "path = \"x\"\nref = \"3\""].map(|table| place.refused(table));
    insta::assert_snapshot!(said.concat(), @r#"
    error: it contains 2 images
    help: ref = "1" (there are: 1, 2)
    exit code 3
    error: it contains no image named `3`
    help: ref = "1" (there are: 1, 2)
    exit code 7
    "#);
    place.build("path = \"x\"\nref = \"2\"", "b").unwrap();
    assert_eq!(names(&place.path("b")), ["two"]);
    place
        .build(
            &format!("path = \"x\"\nref = \"h.example/x@{}\"", one.digest()),
            "c",
        )
        .unwrap();
    assert_eq!(names(&place.path("c")), ["one"]);
}

#[test]
fn an_archive_with_links_out_is_contained() {
    let place = Place::new();
    let image = sample();
    let target = place.path("outside/file").display().to_string();
    let list = json!([{ "Config": "c.json", "RepoTags": [], "Layers": ["a/layer.tar", "../outside/file", "/etc/passwd"] }]);
    let archive = Tar::default()
        .bytes("c.json", &image.config)
        .dir("a/")
        .link("a/layer.tar", &target)
        .file("manifest.json", &list.to_string())
        .end();
    fs_err::write(place.path("x.tar"), archive).unwrap();
    insta::assert_snapshot!(place.refused("path = \"x.tar\""), @"
    error: refused image: `a/layer.tar` is not in it
    help: the image is damaged or was tampered with; use another
    exit code 3
    ");
    // Older Docker versions wrote equal layers once and linked to them. Such links stay inside the archive.
    let layer = Tar::default().file("a", "1").end();
    let twice = Image::new(&[layer.clone(), Tar::default().file("b", "").end(), layer]);
    fs_err::write(place.path("y.tar"), twice.docker_save("x:1")).unwrap();
    place.build("path = \"y.tar\"", "b").unwrap();
    assert_eq!(names(&place.path("b")), ["a", "b"]);
}

/// umoci unpacks layouts too, and is an independent implementation of the specification.
#[test]
fn the_tree_is_the_one_that_umoci_makes() {
    let place = Place::new();
    let mut upper = Tar::default()
        .dir("d/")
        .file("d/.wh.1", "")
        .file(".wh.e", "")
        .dir("e2/")
        .file("e2/x", "2");
    upper = upper
        .dir("o/")
        .file("o/.wh..wh..opq", "")
        .file("o/new", "")
        .hard("h2", "h1")
        .link("l", "d/2")
        .file("f", "dir before");
    let image = Image::of(
        [
            Tar::default()
                .dir("d/")
                .file("d/1", "1")
                .file("d/2", "2")
                .dir("e/")
                .file("e/x", "")
                .dir("o/")
                .dir("o/p/")
                .file("o/p/q", "")
                .file("h1", "linked")
                .dir("f/")
                .file("f/in", "")
                .link("l", "/nowhere")
                .file("g", "file before")
                .end(),
            upper.dir("g/").file("g/in", "").end(),
            Tar::default()
                .file("d/3", "")
                .file("o/.wh.new", "")
                .file("o/p/r", "")
                .end(),
        ]
        .map(|archive| (archive.clone(), gzip(&archive)))
        .to_vec(),
        "amd64",
        &json!({}),
        false,
    );
    let layout = place.path("x");
    image.store(&layout);
    let mut described = image.descriptor();
    described["annotations"] = json!({ "org.opencontainers.image.ref.name": "t" });
    write_index(&layout, &[described]);
    place.build("path = \"x\"", "own").unwrap();
    let umoci = Command::new("umoci")
        .args(["unpack", "--image", "x:t", "bundle"])
        .current_dir(place.dir.path())
        .output();
    let output = umoci.unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(
        names(&place.path("own")),
        names(&place.path("bundle/rootfs"))
    );
    // Directories' times differ by design: what a layer does not mention keeps the time it had.
    let differences = compare(
        &place.path("own"),
        &place.path("bundle/rootfs"),
        50,
        &AtomicBool::new(false),
    )
    .unwrap();
    let content: Vec<_> = differences
        .iter()
        .filter(|difference| !difference.what.contains("time"))
        .collect();
    assert!(content.is_empty(), "{content:#?}");
}
