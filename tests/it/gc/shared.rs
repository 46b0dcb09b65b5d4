//! The space that a removal gives back where trees share blocks: the blocks that nothing else holds, whichever step
//! wrote them.

use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{MIB, json, used};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs, run};

const VOLUME: &str = "volume = [{ name = 'b', kind = 'build', target = '/b' }]\n";

/// Returns a step that continues with the build volume as it is.
fn step(name: &str, run: &str) -> String {
    format!("[[step]]\nname = '{name}'\nincremental = true\nrun = '{run}'\n")
}

/// Returns the names and the MiB of the items that `gc` would remove.
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

/// Expects that overwritten blocks count: each step writes the same file of a build volume again, with the same size.
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
    // Steps with other names: the earlier snapshots stay in the record, and nothing needs them.
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
    // Includes the inodes of three trees, where inodes take space of their own.
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

/// Expects that blocks do not count if a replaced step wrote them and the live volume holds them.
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
    // The failed tree is a clone of a larger image, which does not count.
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

/// Expects that emptying the trash frees no blocks that other trees share.
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
