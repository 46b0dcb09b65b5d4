//! Tests for releases: a checkout of a version that the profile is not set to, and how a release is chosen.

use crate::support::env::TestStore;
use fs_err as fs;

const PROFILE: &str = r#"
release-param = "version"
[params]
version = "7.10"
[releases."7.9"]
description = "old"
[releases."7.10"]
description = "new"
[[volume]]
name = "therock"
kind = "source"
path = "../checkout"
target = "/v/therock"
[[step]]
name = "one"
run = "true"
"#;

/// Makes a profile with two releases, and a checkout of TheRock at this version.
fn project(store: &TestStore, version: Option<&str>) {
    let directory = store.work().join("checkout");
    fs::create_dir_all(directory.join("cmake")).unwrap();
    let table = "therock_add_amdgpu_target(gfx1103 \"A laptop\" FAMILY igpu-all)\n";
    fs::write(directory.join("cmake/therock_amdgpu_targets.cmake"), table).unwrap();
    let file = directory.join("version.json");
    match version {
        Some(version) => fs::write(file, format!("{{\"rocm-version\": \"{version}\"}}")).unwrap(),
        None => drop(fs::remove_file(file)),
    }
    store.profile(PROFILE);
}

#[test]
fn a_checkout_of_another_version_is_named_and_an_older_one_is_refused() {
    let store = TestStore::new();
    let env = store.env();
    let of_version = |text: &str| text.contains("is TheRock");
    for version in ["7.10", "7.10.2"] {
        project(&store, Some(version));
        let ran = store.rockenv(&["plan", env]).ok();
        assert!(!of_version(&ran.err), "{version}: {}", ran.err);
    }
    project(&store, Some("7.9.1"));
    let said = "source `therock` is TheRock 7.9.1, but image and parameters are those of 7.10: `--release 7.9` fits";
    store.rockenv(&["plan", env]).ok().says(&[said]);
    let ran = store.rockenv(&["plan", env, "--release", "7.9"]).ok();
    assert!(!of_version(&ran.err), "{}", ran.err);
    // 7.100 is not a 7.10.
    for version in ["7.11.0", "7.100.0", "10.1"] {
        project(&store, Some(version));
        let said = format!(
            "source `therock` is TheRock {version}, which profile `{env}` does not know: it fits 7.9 to 7.10"
        );
        store.rockenv(&["plan", env]).ok().says(&[&said]);
    }
    let mut said = String::new();
    for version in [None, Some("7.8.3")] {
        project(&store, version);
        said += &store.shows("plan ENV\nup ENV");
        assert!(!store.env_dir().join("record.json").exists(), "begun");
    }
    insta::assert_snapshot!(said, @r#"
    $ rockenv plan ENV
    error: source `therock` is TheRock older than 2025-04: profile `ENV` fits 7.9 to 7.10
    help: choose a commit of one of these (`--release 7.9` has one), or write a profile for this checkout: rockenv profile new NAME
    exit code 3
    $ rockenv up ENV
    error: source `therock` is TheRock older than 2025-04: profile `ENV` fits 7.9 to 7.10
    help: choose a commit of one of these (`--release 7.9` has one), or write a profile for this checkout: rockenv profile new NAME
    exit code 3
    $ rockenv plan ENV
    error: source `therock` is TheRock 7.8.3: profile `ENV` fits 7.9 to 7.10
    help: choose a commit of one of these (`--release 7.9` has one), or name this one a release of your own, `[releases."7.8"]` in a profile that extends `ENV`
    exit code 3
    $ rockenv up ENV
    error: source `therock` is TheRock 7.8.3: profile `ENV` fits 7.9 to 7.10
    help: choose a commit of one of these (`--release 7.9` has one), or name this one a release of your own, `[releases."7.8"]` in a profile that extends `ENV`
    exit code 3
    "#);
    // With a release of its own, this version is like any other.
    let own = "schema = 1\nextends = \"ENV\"\n[params]\nversion = \"7.8\"\n[releases.\"7.8\"]\ndescription = \"own\"\n";
    let file = store.work().join("profiles/own.toml");
    fs::write(file, own.replace("ENV", env)).unwrap();
    let ran = store.rockenv(&["plan", "own", "--name", env]).ok();
    assert!(!of_version(&ran.err), "{}", ran.err);
}

#[test]
fn a_release_is_chosen_once() {
    let store = TestStore::new();
    project(&store, Some("7.9"));
    let env = store.env();
    for (words, name) in [
        (&[][..], env.to_owned()),
        (&["--release", "7.9"], format!("{env}-7.9")),
        (&["--param", "version=7.9"], format!("{env}-7.9")),
        (
            &["--release", "7.9", "--param", "version=7.9"],
            format!("{env}-7.9"),
        ),
        (&["--release", "7.10"], env.to_owned()),
    ] {
        let ran = store.rockenv(&[&["plan", env, "--json"], words].concat());
        let plan = ran.ok().json();
        assert_eq!(plan["env"].as_str(), Some(&*name), "{words:?}");
    }
    let said = store.shows(
        "plan ENV --release 7.9 --param version=7.10
        up ENV --release 7.9 --param version=7.10
        plan ENV --release 7.8",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv plan ENV --release 7.9 --param version=7.10
    error: `--release 7.9` contradicts `--param version=7.10`
    help: leave out one of them
    exit code 2
    $ rockenv up ENV --release 7.9 --param version=7.10
    error: `--release 7.9` contradicts `--param version=7.10`
    help: leave out one of them
    exit code 2
    $ rockenv plan ENV --release 7.8
    error: profile `ENV` has no release `7.8`
    help: did you mean `7.9`?
    exit code 2
    ");
    store.profile("[[step]]\nname = 'one'\nrun = 'true'\n");
    insta::assert_snapshot!(store.shows("plan ENV --release 7.9"), @"
    error: profile `ENV` has no releases
    help: leave out --release
    exit code 2
    ");
}
