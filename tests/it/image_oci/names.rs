//! Which of several images in a file a reference selects, and what a digest in the reference pins.

use rockenv::testing::Recipe;
use rockenv::testing::error::Kind;
use serde_json::{Value, json};

use super::make::{Image, Tar, digest, gzip, write_index};
use super::place::{Place, fails, names};

const CONTAINERD: &str = "io.containerd.image.name";
const REF: &str = "org.opencontainers.image.ref.name";

fn image(file: &str) -> Image {
    Image::new(&[Tar::default().file(file, "").end()])
}

fn described(image: &Image, annotations: &[(&str, &str)]) -> Value {
    let mut described = image.descriptor();
    described["annotations"] = annotations.iter().copied().collect();
    described
}

#[test]
fn an_archive_cannot_pass_off_another_image_as_the_pinned_one() {
    let place = Place::new();
    let (wanted, other) = (image("wanted"), image("other"));
    let pinned = digest(&wanted.config);
    let config = format!("{}/config.json", &pinned[7..]);
    let list = json!([{
        "Config": config, "RepoTags": ["team/build:1.4"], "Layers": ["layer.tar"]
    }]);
    let archive = Tar::default()
        .bytes(&config, &other.config)
        .bytes("layer.tar", &other.layers[0].0)
        .file("manifest.json", &list.to_string())
        .end();
    fs_err::write(place.path("x.tar"), archive).unwrap();
    let reference = format!("path = \"x.tar\"\nref = \"team/build:1.4@{pinned}\"");
    let error = fails(
        place.build(&reference, "a"),
        Kind::NotFound,
        "contains no image named",
    );
    let there = format!("team/build:1.4@{}", digest(&other.config));
    assert!(error.help_text().unwrap().contains(&there), "{error:?}");
    fs_err::write(place.path("y.tar"), wanted.docker_save("team/build:1.4")).unwrap();
    place
        .build(&reference.replace("x.tar", "y.tar"), "b")
        .unwrap();
    assert_eq!(names(&place.path("b")), ["wanted"]);
}

#[test]
fn a_malformed_digest_of_an_image_in_a_file_is_refused() {
    let digits = "5f70bf18a086007016e948b04aed3b82103a36bea41755b6cddfaf10ace3c6ef";
    for reference in [
        format!("team/build:1.4@sha256:{}", &digits[..53]),
        format!("team/build:1.4@sha256:{}", digits.to_uppercase()),
        "1.4@sha256:3d9ee54b737a".to_owned(),
        "sha256:3d9ee54b737a".to_owned(),
        "1.4@".to_owned(),
    ] {
        let text =
            format!("schema = 1\nprovider = \"oci\"\n[oci]\npath = \"x\"\nref = \"{reference}\"\n");
        let parsed = Recipe::parse(&text, "test.toml", std::path::Path::new("/"));
        fails(parsed, Kind::Invalid, "has a digest that is not");
    }
}

#[test]
fn a_whole_name_selects_its_image_and_no_other_with_the_same_tag() {
    let place = Place::new();
    let (one, other, bare) = (image("one"), image("other"), image("bare"));
    for image in [&one, &other, &bare] {
        image.store(&place.path("x"));
    }
    let full = |image: &Image, name: &str| {
        described(
            image,
            &[(CONTAINERD, &format!("docker.io/{name}:1.4")), (REF, "1.4")],
        )
    };
    let mut count = 0;
    let mut build = |entries: &[Value], reference: &str| {
        write_index(&place.path("x"), entries);
        count += 1;
        let into = format!("t{count}");
        let built = place.build(&format!("path = \"x\"\nref = \"{reference}\""), &into);
        built.map(|_| names(&place.path(&into)).join(" "))
    };
    let others = [full(&other, "other/b")];
    for reference in ["docker.io/team/build:1.4", "team/build:1.4"] {
        fails(build(&others, reference), Kind::NotFound, "no image named");
    }
    let both = [full(&other, "other/b"), full(&one, "team/build")];
    for reference in ["docker.io/team/build:1.4", "team/build:1.4"] {
        assert_eq!(build(&both, reference).unwrap(), "one");
    }
    let error = fails(build(&both, "1.4"), Kind::Invalid, "it contains 2 images");
    let help = error.help_text().unwrap();
    assert!(
        help.contains("(there are: docker.io/other/b:1.4, docker.io/team/build:1.4)"),
        "{help}"
    );
    // An entry with only a tag may have any name.
    let tagged = [full(&other, "other/b"), described(&bare, &[(REF, "1.4")])];
    for reference in ["docker.io/team/build:1.4", "team/build:1.4"] {
        assert_eq!(build(&tagged, reference).unwrap(), "bare");
    }
    let library = [full(&other, "other/b"), full(&one, "library/debian")];
    for reference in ["debian:1.4", "docker.io/library/debian:1.4"] {
        assert_eq!(build(&library, reference).unwrap(), "one");
    }
    // Two names of one image.
    let twice = [full(&one, "team/build"), full(&one, "team/latest")];
    assert_eq!(build(&twice, "1.4").unwrap(), "one");
}

#[test]
fn of_several_images_without_names_none_is_chosen() {
    let place = Place::new();
    let (one, two) = (image("one"), image("two"));
    let layout = place.path("x");
    one.store(&layout);
    two.store(&layout);
    let refused = |path: &str, into: &str, digests: [String; 2]| {
        let error = fails(
            place.build(&format!("path = \"{path}\""), into),
            Kind::Invalid,
            "it contains 2 images",
        );
        let help = error.help_text().unwrap().to_owned();
        assert!(digests.iter().all(|digest| help.contains(digest)), "{help}");
    };
    write_index(&layout, &[one.descriptor(), two.descriptor()]);
    refused("x", "a", [one.digest(), two.digest()]);
    place
        .build(&format!("path = \"x\"\nref = \"{}\"", two.digest()), "b")
        .unwrap();
    assert_eq!(names(&place.path("b")), ["two"]);
    // One name for two images, and an image without a name.
    let named = |image: &Image| described(image, &[(REF, "1")]);
    write_index(&layout, &[named(&one), named(&two)]);
    refused("x", "c", [one.digest(), two.digest()]);
    write_index(&layout, &[named(&one), two.descriptor()]);
    refused("x", "d", ["ref = \"1\"".into(), two.digest()]);
    // The other images are for other platforms.
    let arm = Tar::default().file("arm", "").end();
    let arm = Image::of(vec![(arm.clone(), gzip(&arm))], "arm64", &json!({}), false);
    arm.store(&layout);
    write_index(
        &layout,
        &[
            arm.for_platform("linux/arm64"),
            one.for_platform("linux/amd64"),
        ],
    );
    place.build("path = \"x\"", "e").unwrap();
    assert_eq!(names(&place.path("e")), ["one"]);

    let mut archive = Tar::default();
    let mut list = Vec::new();
    for (name, image) in [("1", &one), ("2", &two)] {
        let (config, layer) = (format!("{name}.json"), format!("{name}.tar"));
        archive = archive
            .bytes(&config, &image.config)
            .bytes(&layer, &image.layers[0].0);
        list.push(json!({ "Config": config, "RepoTags": null, "Layers": [layer] }));
    }
    let archive = archive
        .file("manifest.json", &json!(list).to_string())
        .end();
    fs_err::write(place.path("saved.tar"), archive).unwrap();
    let digests = [digest(&one.config), digest(&two.config)];
    refused("saved.tar", "f", digests.clone());
    place
        .build(
            &format!("path = \"saved.tar\"\nref = \"{}\"", digests[1]),
            "g",
        )
        .unwrap();
    assert_eq!(names(&place.path("g")), ["two"]);
}
