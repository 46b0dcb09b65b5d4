//! What a removal gives back where trees share blocks: what nothing else holds, whoever wrote it.

use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{MIB, json, used};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs, run};

const VOLUME: &str = "volume = [{ name = 'b', kind = 'build', target = '/b' }]\n";

/// Makes a step that goes on in the build volume as it is.
fn step(name: &str, run: &str) -> String {
    format!("[[step]]\nname = '{name}'\nincremental = true\nrun = '{run}'\n")
}

/// Returns name and MiB of what would go.
fn would_go(store: &TestStore) -> Vec<(String, u64)> {
    let dry = json(store, &["--dry-run", "--free", "1T", "--preset", "ci"]);
    let items = dry["items"].as_array().unwrap().iter();
    let mut sizes: Vec<(String, u64)> = items
        .map(|item| {
            let name = item["name"]
                .as_str()
                .unwrap()
                .split('/')
                .next_back()
                .unwrap();
            (name.to_owned(), item["bytes"].as_u64().unwrap() / MIB)
        })
        .collect();
    sizes.sort();
    sizes
}

fn gc(store: &TestStore, free: &str) -> Value {
    let words = ["--yes", "--json", "gc", "--free", free, "--preset", "ci"];
    store.rockenv(&words).json()
}

/// Steps that write the same file of a build volume anew, each as large as before.
fn what_was_written_over_counts(kind: Kind) {
    let disk = LoopFs::with_base(kind);
    let store = TestStore::on(&disk);
    let over = "head -c 10M /dev/urandom > /b/x";
    let steps = [
        step("a1", &format!("head -c 4M /dev/urandom > ~/a; {over}")),
        step("b1", over),
        step("c1", over),
    ];
    store.up_with(&format!("{VOLUME}{}", steps.concat()));
    // Of other names: those before stay in the record, and nobody needs them.
    let others = [step("a2", "rm -f /b/x"), step("b2", "true")];
    store.up_with(&format!("{VOLUME}{}", others.concat()));
    let sizes = would_go(&store);
    let sizes: Vec<(&str, u64)> = sizes
        .iter()
        .map(|(name, size)| (name.as_str(), *size))
        .collect();
    assert_eq!(sizes, [("a1", 14), ("b1", 10), ("c1", 10)]);
    let before = used(disk.path());
    let one = gc(&store, "8M");
    assert_eq!(one["removed"].as_array().unwrap().len(), 1, "{one:#}");
    let rest = gc(&store, "1T");
    assert_eq!(rest["removed"].as_array().unwrap().len(), 2, "{rest:#}");
    let really = (before - used(disk.path())) / MIB;
    // With the inodes of three trees, where these take space of their own.
    assert!((33..45).contains(&really), "{really}");
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn what_was_written_over_counts_on_btrfs() {
    what_was_written_over_counts(Kind::Btrfs);
}

#[test]
fn what_was_written_over_counts_on_xfs() {
    what_was_written_over_counts(Kind::Xfs);
}

/// A step that was replaced, of which the live volume holds what it wrote.
fn what_a_live_volume_holds_does_not_count(kind: Kind) {
    let disk = LoopFs::with_base(kind);
    let store = TestStore::on(&disk);
    let first = step("a", "head -c 2M /dev/urandom > /b/a");
    let old = step(
        "old",
        "head -c 10M /dev/urandom > /b/x; head -c 3M /dev/urandom > ~/old",
    );
    store.up_with(&format!("{VOLUME}{first}{old}"));
    let new =
        step("next", "test -s /b/x") + &step("new", "head -c 5M /dev/urandom > ~/lost; exit 1");
    store.profile(&format!("{VOLUME}{first}{new}"));
    store.rockenv(&["up", store.env()]).exits(5);
    let sizes = would_go(&store);
    // The failed tree is a clone of an image with more in it than that.
    let sizes: Vec<(&str, u64)> = sizes
        .iter()
        .map(|(name, size)| (name.as_str(), *size))
        .collect();
    assert_eq!(sizes, [("new", 5), ("old", 3)]);
}

#[test]
fn what_a_live_volume_holds_does_not_count_on_btrfs() {
    what_a_live_volume_holds_does_not_count(Kind::Btrfs);
}

#[test]
fn what_a_live_volume_holds_does_not_count_on_xfs() {
    what_a_live_volume_holds_does_not_count(Kind::Xfs);
}

/// What was removed shares its blocks with what stays: emptying the trash frees none of them.
fn the_trash_frees_what_nothing_else_holds(kind: Kind) {
    let disk = LoopFs::with_base(kind);
    let store = TestStore::on(&disk);
    store.up_with(&step("one", "head -c 24M /dev/urandom > ~/one"));
    let layers = fs::read_dir(store.home().join("layers")).unwrap();
    let layer = layers.map(|layer| layer.unwrap().path()).next().unwrap();
    let mut copy = Command::new("cp");
    let waits = store.home().join("trash/0123456789abcdef");
    run(copy.args(["-a", "--reflink=always"]).arg(layer).arg(&waits));
    fs::write(waits.join("own"), vec![7; 8 << 20]).unwrap();
    let dry = json(&store, &["--dry-run"]);
    let trash = dry["trash"].as_u64().unwrap() / MIB;
    assert!((8..16).contains(&trash), "{dry:#}");
}

#[test]
fn the_trash_frees_what_nothing_else_holds_on_xfs() {
    the_trash_frees_what_nothing_else_holds(Kind::Xfs);
}

#[test]
fn the_trash_frees_what_nothing_else_holds_on_btrfs() {
    the_trash_frees_what_nothing_else_holds(Kind::Btrfs);
}
