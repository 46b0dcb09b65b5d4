//! What counts as a use: every command that works with an env or an image, with or without changes, but no command that
//! only cleans up.

use std::path::Path;
use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{json, names, round};
use crate::support::env::TestStore;
use crate::support::loopfs::run;

const LONG_AGO: &str = "2020-01-01T00:00:00Z";

/// Sets a time in a description. The file may be a link to the template's, so it is replaced.
fn set(path: &Path, field: &str) {
    let mut value: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    value[field] = LONG_AGO.into();
    fs::remove_file(path).unwrap();
    fs::write(path, serde_json::to_vec(&value).unwrap()).unwrap();
}

fn forget(directory: &Path) {
    if directory.join("used").exists() {
        fs::remove_file(directory.join("used")).unwrap();
    }
}

fn each(directory: &Path) -> Vec<std::path::PathBuf> {
    let entries = fs::read_dir(directory).unwrap().flatten();
    entries.map(|entry| entry.path()).collect()
}

/// Makes the env, its snapshots and the images as old as possible.
fn age(store: &TestStore) {
    if store.env_dir().join("record.json").exists() {
        set(&store.env_dir().join("record.json"), "used");
        forget(&store.env_dir());
    }
    for layer in each(&store.home().join("layers")) {
        set(&layer.join("layer.json"), "created");
    }
    for image in each(&store.home().join("images")) {
        if image.join("image.json").exists() {
            set(&image.join("image.json"), "built");
            forget(&image);
        }
    }
}

/// Returns the items that `gc` would remove for their age alone.
fn old(store: &TestStore) -> Vec<String> {
    fs::write(store.work().join("rockenv.toml"), "[gc]\nmin-free = '0'\n").unwrap();
    let dry = json(store, &["--dry-run", "--preset", "ci"]);
    let items = dry["items"].as_array().unwrap().iter();
    assert!(
        items.clone().all(|item| item["rule"] == "older-than"),
        "{dry:#}"
    );
    names(&dry, "items")
}

fn is_old(store: &TestStore) -> bool {
    let listed = store.rockenv(&["ls", "--json"]).ok().json();
    let ran = store.rockenv(&["status", "--json", store.env()]);
    let status = ran.ok().json();
    assert_eq!(listed[0]["used"], status["record"]["used"]);
    listed[0]["used"] == LONG_AGO
}

#[test]
fn an_env_is_used_by_whatever_works_with_it_and_not_by_gc() {
    let store = TestStore::new();
    for number in 0..3 {
        round(&store, number, 2);
        store.up();
    }
    // After this command, the next one changes nothing.
    store.sh("true").ok();
    let own = |step: &str| format!("snapshot {}/{step}", store.env());
    let superseded = ["a0", "a1", "b0", "b1"].map(own);
    for uses in [
        &["exec", store.env(), "--", "true"][..],
        &["up", store.env()],
    ] {
        age(&store);
        assert_eq!(old(&store), superseded);
        assert!(is_old(&store));
        let record = fs::read(store.env_dir().join("record.json")).unwrap();
        store.rockenv(uses).ok();
        let same = record == fs::read(store.env_dir().join("record.json")).unwrap();
        assert!(same, "{uses:?} had something to write");
        assert!(old(&store).is_empty(), "{uses:?}");
        assert!(!is_old(&store));
    }
    age(&store);
    // More than the store has, so that space freed by other processes does not matter.
    let words = [
        "--yes", "--json", "gc", "--free", "1T", "--preset", "laptop",
    ];
    let done = store.rockenv(&words).exits(10).json();
    assert!(!done["removed"].as_array().unwrap().is_empty(), "{done:#}");
    assert!(is_old(&store), "gc made it young");
}

#[test]
fn an_image_is_used_by_the_envs_that_came_and_went() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'a'\nrun = 'true'\n");
    age(&store);
    assert_eq!(old(&store), ["image base"]);
    // A small file takes a whole block on disk.
    let dry = json(&store, &["--dry-run", "--preset", "ci"]);
    let images = each(&store.home().join("images"));
    let image = images
        .iter()
        .find(|path| path.join("root").exists())
        .unwrap();
    let on_disk = run(Command::new("du").args(["-s", "--block-size=1"]).arg(image));
    assert_eq!(
        on_disk.split_once('\t').unwrap().0,
        dry["items"][0]["bytes"].to_string()
    );
    store.rockenv(&["up", "--ephemeral", store.env()]).ok();
    assert!(old(&store).is_empty());
    age(&store);
    assert_eq!(old(&store), ["image base"]);
    store.rockenv(&["image", "build", "base"]).ok();
    assert!(old(&store).is_empty());
}
