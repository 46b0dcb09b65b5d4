//! `rockenv du` on real stores: the total is that of GNU `du`, or the blocks really in use where clones share them.
//! Space that two envs share is counted once and shown as shared.

mod figures;
mod ordinary;
mod therock;

use std::cmp::Reverse;
use std::path::Path;
use std::process::Command;

use crate::support::background::while_repeating;
use crate::support::env::TestStore;
use crate::support::git::{Daemon, repository};
use crate::support::loopfs::{Kind, LoopFs, bind, run};
use crate::support::random::Random;
use fs_err as fs;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// A store with two envs, `one` and `two`, that share the steps of one profile.
struct Ground(TestStore);

/// Two steps, and a cache.
const PROFILE: &str = r#"
schema = 1
image = "base"
[[volume]]
name = "ccache"
kind = "cache"
target = "/cache"
[[step]]
name = "first"
run = "head -c 16M /dev/urandom > $HOME/first; echo small > $HOME/small; ln $HOME/first $HOME/link; head -c 1M /dev/urandom > /cache/one"
[[step]]
name = "second"
run = "head -c 8M /dev/urandom > $HOME/second"
"#;

impl Ground {
    fn new(store: TestStore) -> Self {
        let ground = Self::of(store, PROFILE);
        for env in ["one", "two"] {
            ground.ok(&["up", "p", "--name", env]);
        }
        ground
    }

    fn of(store: TestStore, profile: &str) -> Self {
        fs::write(store.work().join("profiles/p.toml"), profile).unwrap();
        Self(store)
    }

    fn home(&self) -> &Path {
        self.0.home()
    }

    fn ok(&self, arguments: &[&str]) -> String {
        self.0.rockenv(arguments).ok().text()
    }

    fn exec(&self, env: &str, script: &str) {
        self.ok(&["exec", env, "--", "sh", "-c", script]);
    }

    /// Waits until all deletions have finished and all files have their blocks on disk.
    fn settle(&self) {
        self.0.settle();
        run(Command::new("sync").arg("-f").arg(self.home()));
    }

    fn du(&self, env: Option<&str>) -> Value {
        self.du_with(env.as_slice())
    }

    fn du_with(&self, more: &[&str]) -> Value {
        self.settle();
        let mut arguments = vec!["du", "--json"];
        arguments.extend(more);
        serde_json::from_str(&self.ok(&arguments)).unwrap()
    }
}

fn gnu_du(path: &Path) -> u64 {
    let text = run(Command::new("du").args(["-s", "--block-size=1"]).arg(path));
    text.split('\t').next().unwrap().parse().unwrap()
}

fn number(value: &Value) -> u64 {
    value
        .as_u64()
        .unwrap_or_else(|| panic!("not a number: {value}"))
}

/// Sums the allocated bytes of a class's rows that belong to exactly these envs.
fn sum(report: &Value, class: &str, envs: &[&str]) -> u64 {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["class"] == class && row["envs"] == serde_json::json!(envs))
        .map(|row| number(&row["size"]["allocated"]))
        .sum()
}

/// Checks the invariants of every report of a whole store.
fn check(report: &Value) {
    let rows = report["rows"].as_array().unwrap();
    let sum: u64 = rows
        .iter()
        .map(|row| number(&row["size"]["allocated"]))
        .sum();
    assert_eq!(sum, number(&report["total"]["allocated"]));
    assert!(sum <= number(&report["file_system"]["used"]), "{report}");
    assert_eq!(
        (number(&report["unreadable"]), number(&report["unshared"])),
        (0, 0),
        "{report}"
    );
}

fn near(value: u64, expected: u64, slack: u64) {
    assert!(
        value.abs_diff(expected) <= slack,
        "{value} is not {expected} ± {slack}"
    );
}

#[test]
fn an_overlay_store_is_what_gnu_du_says() {
    let ground = Ground::new(TestStore::new());
    let report = ground.du(None);
    check(&report);
    assert_eq!(report["method"], "overlay");
    assert_eq!(
        number(&report["total"]["allocated"]),
        gnu_du(ground.home()),
        "{report:#}"
    );
    // Both envs use the same two layers.
    near(
        sum(&report, "snapshots", &["one", "two"]),
        24 * MIB,
        MIB / 2,
    );
    assert_eq!(sum(&report, "snapshots", &["one"]), 0);
    assert!(sum(&report, "image", &["one", "two"]) > 50 * MIB);
    near(sum(&report, "cache", &["one", "two"]), MIB, 64 << 10);

    // The chain is long enough to be merged, by hard links.
    ground.exec("one", "head -c 4M /dev/urandom > $HOME/own");
    for round in 0..20 {
        ground.ok(&["snapshot", "create", "one", &format!("s{round}")]);
    }
    ground.exec("one", "head -c 2M /dev/urandom > $HOME/live");
    let merged = fs::read_dir(ground.home().join("layers"))
        .unwrap()
        .flatten()
        .any(|layer| layer.path().join("flat/home").exists());
    assert!(merged, "no chain was merged");
    let report = ground.du(None);
    check(&report);
    assert_eq!(number(&report["total"]["allocated"]), gnu_du(ground.home()));
    near(
        sum(&report, "snapshots", &["one", "two"]),
        24 * MIB,
        MIB / 2,
    );
    near(sum(&report, "snapshots", &["one"]), 4 * MIB, 2 * MIB);
    near(sum(&report, "live", &["one"]), 2 * MIB, MIB / 2);

    // `rm` frees as much as `du` promises, except for the lock file, which stays.
    let frees = number(&report["freed"]["one"]);
    let before = gnu_du(ground.home());
    ground.ok(&["rm", "--yes", "one"]);
    let report = ground.du(None);
    check(&report);
    near(before - gnu_du(ground.home()), frees, 64 << 10);
    near(sum(&report, "snapshots", &["two"]), 24 * MIB, MIB / 2);
    assert!(ground.ok(&["du"]).contains("snapshots"));
    assert!(ground.ok(&["du", "two"]).contains("snapshot first"));
}

#[test]
fn clones_on_btrfs_are_counted_once() {
    clones(Kind::Btrfs, "btrfs");
}

#[test]
fn clones_on_xfs_are_counted_once() {
    clones(Kind::Xfs, "reflink");
}

#[test]
fn small_files_on_btrfs_take_what_they_take() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let ground = Ground::new(TestStore::on(&disk));
    // Reading updates access times, and so changes whole blocks of btrfs's trees. This read comes before the
    // measurement.
    ground.exec("one", "true");
    let before = ground.du(None);
    // `du` reads a subvolume as a whole, but the files of a cache one by one.
    for place in ["$HOME/small", "/cache/small"] {
        let write = format!("mkdir {place}; cd {place}; seq 10000 | split -l 1 -a 4 -d - f");
        ground.exec("one", &write);
    }
    let report = ground.du(None);
    check(&report);
    let grown = |class, envs: &[&str]| sum(&report, class, envs) - sum(&before, class, envs);
    let all = sum(&report, "live", &["one"]);
    let (live, cache) = (grown("live", &["one"]), grown("cache", &["one", "two"]));
    near(cache, live, 64 << 10);
    // btrfs keeps such small files in its trees, not in blocks of 4 KiB.
    assert!((10_000 * 5..10_000 * 200).contains(&cache), "{cache}");
    ground.ok(&["snapshot", "create", "one", "small"]);
    ground.exec("one", "true");
    let again = ground.du(None);
    check(&again);
    near(sum(&again, "snapshots", &["one"]), all, 64 << 10);
    let left = sum(&again, "live", &["one"]);
    assert!(left < all / 4, "{left}");
}

fn clones(kind: Kind, method: &str) {
    let disk = LoopFs::with_base(kind);
    let ground = Ground::new(TestStore::on(&disk));
    let report = ground.du(None);
    check(&report);
    assert_eq!(report["method"], method);
    let base = number(&report["total"]["allocated"]);
    let used = number(&report["file_system"]["used"]);
    near(
        sum(&report, "snapshots", &["one", "two"]),
        24 * MIB,
        4 * MIB,
    );

    ground.exec("one", "head -c 64M /dev/urandom > $HOME/own");
    for round in 0..4 {
        ground.ok(&["snapshot", "create", "one", &format!("s{round}")]);
        // Overwrites a part of a shared file. The rest stays shared.
        ground.exec(
            "one",
            "dd if=/dev/urandom of=$HOME/own bs=1M count=4 seek=8 conv=notrunc status=none",
        );
    }
    ground.ok(&["fork", "one", "three"]);
    let report = ground.du(None);
    check(&report);
    let grown = number(&report["total"]["allocated"]) - base;
    // btrfs keeps a whole extent as long as a part of it is used. Metadata counts only as `used`.
    near(grown, (64 + 4 * 4) * MIB, 4 * MIB);
    let really = number(&report["file_system"]["used"]) - used;
    near(really, grown, 12 * MIB);
    assert!(gnu_du(ground.home()) > number(&report["total"]["allocated"]) + 300 * MIB);

    // Removing `three` frees only what `three` wrote, and `du` promises no more.
    ground.exec("three", "head -c 32M /dev/urandom > $HOME/three");
    let report = ground.du(None);
    near(number(&report["freed"]["three"]), 32 * MIB, MIB);
    let own = ground.du(Some("three"));
    assert_eq!(own["freed"]["three"], report["freed"]["three"]);
    assert!(ground.ok(&["du", "three"]).contains("also needed by one"));
    let before = number(&report["total"]["allocated"]);
    ground.ok(&["rm", "--yes", "three"]);
    let report = ground.du(None);
    check(&report);
    near(
        before - number(&report["total"]["allocated"]),
        32 * MIB,
        MIB,
    );
}

#[test]
fn what_vanishes_meanwhile_is_no_error() {
    let ground = Ground::of(TestStore::new(), PROFILE);
    let busy = ground.home().join("caches/busy");
    let come_and_go = || {
        for number in 0..50 {
            let inner = busy.join(format!("d{number}"));
            fs::create_dir_all(&inner).unwrap();
            fs::write(inner.join("file"), "x").unwrap();
        }
        run(Command::new("rm").arg("-rf").arg(&busy));
    };
    let measure = || (0..10).map(|_| ground.ok(&["du", "--json"]));
    let reports: Vec<String> = while_repeating(come_and_go, || measure().collect());
    for report in reports {
        let report: Value = serde_json::from_str(&report).unwrap();
        assert_eq!(number(&report["unreadable"]), 0, "{report}");
    }
}

/// After any sequence of commands, the parts are no larger than what the file system uses.
fn parts_never_exceed_the_whole(kind: Kind) {
    let mut random = Random::seeded();
    let disk = LoopFs::with_base(kind);
    let ground = Ground::new(TestStore::on(&disk));
    let scripts = [
        "head -c 5M /dev/urandom > $HOME/f$N",
        "ln -f $HOME/first $HOME/h$N",
        "cp --reflink=auto $HOME/second $HOME/c$N",
        "truncate -s 1G $HOME/hole$N",
        "dd if=/dev/urandom of=$HOME/first bs=64K count=9 seek=$N conv=notrunc status=none",
        "mkdir -p $HOME/d$N; cd $HOME/d$N; seq 500 | split -l 1 -a 3 - s",
        "rm -rf $HOME/d* $HOME/second; head -c 1M /dev/zero > $HOME/second",
        "mv $HOME/first $HOME/moved; cp $HOME/moved $HOME/first; head -c 3M /dev/urandom > /cache/c$N",
    ];
    let mut forks = 0;
    for round in 0..10 {
        let env = ["one", "two"][random.below(2) as usize];
        match random.below(10) {
            0..6 => {
                let script = scripts[random.below(scripts.len() as u64) as usize];
                ground.exec(env, &format!("N={round}; {script}"));
            }
            6 | 7 => {
                ground.ok(&["snapshot", "create", env, &format!("s{round}")]);
            }
            8 => {
                forks += 1;
                ground.ok(&["fork", env, &format!("fork{forks}")]);
            }
            _ => {
                ground.ok(&["--yes", "gc", "--preset", "ci"]);
            }
        }
        if round % 5 == 4 {
            check(&ground.du(None));
        }
    }
}

#[test]
fn parts_never_exceed_the_whole_on_overlay() {
    parts_never_exceed_the_whole(Kind::Ext4);
}

#[test]
fn parts_never_exceed_the_whole_on_btrfs() {
    parts_never_exceed_the_whole(Kind::Btrfs);
}

#[test]
fn parts_never_exceed_the_whole_on_xfs() {
    parts_never_exceed_the_whole(Kind::Xfs);
}

#[test]
fn directories_add_up_and_what_is_known_is_named() {
    let ground = Ground::new(TestStore::new());
    let cache = ground.home().join("caches/ccache");
    // A real ccache, with a miss and then two hits.
    fs::write(ground.0.work().join("a.c"), "int a;\n").unwrap();
    for _ in 0..3 {
        run(Command::new("ccache")
            .args(["cc", "-c", "a.c", "-o", "a.o"])
            .env("CCACHE_DIR", &cache)
            .current_dir(ground.0.work()));
    }
    fs::create_dir_all(cache.join("big/deep")).unwrap();
    fs::write(cache.join("big/deep/x"), vec![1; 3 << 20]).unwrap();
    // `du` does not count the target of a link.
    let linked = cache.with_file_name("linked");
    std::os::unix::fs::symlink(ground.0.work(), &linked).unwrap();
    fs::create_dir(ground.0.work().join("large")).unwrap();
    fs::write(ground.0.work().join("large/x"), vec![1; 3 << 20]).unwrap();
    let whole = ground.du(None);
    ground.settle();
    let asked = ["du", "--json", "--depth", "2", "--sort", "size"];
    let deep = serde_json::from_str(&ground.ok(&asked)).unwrap();
    check(&deep);
    assert_eq!(deep["total"], whole["total"]);
    let rows = deep["rows"].as_array().unwrap();
    let largest_first = |row: &Value| Reverse(number(&row["size"]["allocated"]));
    assert!(rows.is_sorted_by_key(largest_first), "{deep:#}");
    let part = |inside: Value| {
        rows.iter()
            .find(|row| row["name"] == "ccache" && row["inside"] == inside)
            .unwrap_or_else(|| panic!("no row of {inside}"))
    };
    assert_eq!(part(Value::Null)["content"], "ccache, 66 % hits");
    let big = number(&part("big/deep".into())["size"]["allocated"]);
    assert!(big >= 3 << 20, "{big}");
    assert!(number(&part("big".into())["size"]["allocated"]) < 64 << 10);
    let text = ground.ok(&["du", "--depth", "1", "--sort", "size"]);
    let lines: Vec<&str> = text.lines().collect();
    let at = |start: &str| {
        let found = lines.iter().position(|line| line.starts_with(start));
        found.unwrap_or_else(|| panic!("no `{start}` in\n{text}"))
    };
    assert!(at("image base") < at("cache ccache"), "{text}");
    assert_eq!(at("  big"), at("cache ccache") + 1, "{text}");
    assert!(
        lines[at("cache ccache")].ends_with("ccache, 66 % hits"),
        "{text}"
    );
}

#[test]
fn an_env_is_shown_with_what_it_does_not_own() {
    let sources = tempfile::tempdir().unwrap();
    let (daemon, payload) = (Daemon::start(sources.path()), "x".repeat(3 << 20));
    repository(&sources.path().join("project"), "big", &payload);
    let port = daemon.port();
    let profile = format!(
        r#"{PROFILE}
[[volume]]
name = "project"
kind = "source"
git = "git://127.0.0.1:{port}/project"
target = "/src"
[[volume]]
name = "out"
kind = "output"
target = "/out"
[[step]]
name = "export"
run = "head -c 2M /dev/urandom > /out/wheel"
"#
    );
    let ground = Ground::of(TestStore::new(), &profile);
    ground.ok(&["up", "p", "--name", "one"]);
    let whole = ground.du(None);
    check(&whole);
    let report = ground.du(Some("one"));
    for (class, bytes) in [("cache", MIB), ("source", 3 * MIB), ("output", 2 * MIB)] {
        let found = sum(&report, class, &["one"]);
        near(found, bytes, MIB / 4);
        assert_eq!(found, sum(&whole, class, &["one"]), "{class}");
    }
    assert_eq!(report["freed"], whole["freed"]);
    // The report of an env leaves out the rest of the store.
    assert_eq!(sum(&report, "other", &[]), 0);
    let text = ground.ok(&["du", "one"]);
    for line in ["cache ccache ", "source project-", "output out "] {
        let line = text.lines().find(|shown| shown.starts_with(line)).unwrap();
        assert!(line.ends_with("kept by `rm`"), "{text}");
    }
    let page: Value = serde_json::from_str(&ground.ok(&["report", "one", "--json"])).unwrap();
    let largest = page["space"].as_array().unwrap();
    let find = |name: &str| {
        let mut named = largest.iter();
        named.find(|space| space["name"].as_str().unwrap().starts_with(name))
    };
    for name in ["cache ccache", "source project-", "output out"] {
        let space = find(name).unwrap_or_else(|| panic!("{page:#}"));
        assert_eq!(space["note"], "kept by `rm`");
    }

    // Now both envs mount the cache and use the same steps.
    ground.ok(&["up", "p", "--name", "two"]);
    let report = ground.du(Some("two"));
    near(sum(&report, "cache", &["one", "two"]), MIB, MIB / 4);
    assert_eq!(sum(&report, "output", &["one"]), 0);
    let text = ground.ok(&["du", "two", "--shared"]);
    assert!(text.contains("also needed by one; kept by `rm`"), "{text}");
    let header: Vec<&str> = text.lines().next().unwrap().split_whitespace().collect();
    assert_eq!(
        header,
        ["what", "on", "disk", "exclusive", "shared", "apparent"]
    );
    // Data on another disk takes no space on the store's disk.
    let elsewhere = tempfile::tempdir().unwrap();
    fs::write(elsewhere.path().join("x"), vec![1; 1 << 20]).unwrap();
    let at = |name: &str| bind(elsewhere.path(), &ground.home().join(name));
    let _bound = [at("blobs"), at("caches/ccache")];
    let report = ground.du(None);
    assert_eq!(sum(&report, "cache", &["one", "two"]), 0);
    assert_eq!(sum(&report, "blobs", &[]), 0);
    let du = ground.0.rockenv(&["du"]).ok();
    du.says(&[
        "not counted: 2 mounts in the store: `",
        "/blobs`, `",
        "/caches/ccache`",
    ]);
}
