//! TheRock's build tree, shown by its parts on every kind of store.

use serde_json::Value;

use super::{Ground, MIB, check, near, number, sum};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};

/// A tree in TheRock's layout: two steps compile, and the files that one of them installs are also present as links and
/// as a copy.
const THEROCK: &str = r#"
schema = 1
image = "base"
[[volume]]
name = "build"
kind = "build"
target = "/build"
[[step]]
name = "compile"
run = """
set -e
cd /build
echo CMAKE_PROJECT_NAME:STATIC=THEROCK > CMakeCache.txt
p=math-libs/BLAS/rocBLAS
mkdir -p $p/build $p/stage $p/dist $p/stamp artifacts-unsplit/blas artifacts/blas
head -c 6M /dev/urandom > $p/build/object.o
head -c 4M /dev/urandom > $p/stage/lib.so
ln $p/stage/lib.so $p/dist/lib.so
ln $p/stage/lib.so artifacts-unsplit/blas/lib.so
head -c 3M /dev/urandom > artifacts/blas/lib.so
"""
[[step]]
name = "more"
run = "head -c 2M /dev/urandom > /build/math-libs/BLAS/rocBLAS/build/more.o"
"#;

/// The sizes of TheRock's parts, in order: objects, stage, two sets of links to it, artifacts.
const PARTS: [(&str, u64); 5] = [
    ("build", 8 * MIB),
    ("stage", 4 * MIB),
    ("dist", 0),
    ("artifacts-unsplit", 0),
    ("artifacts", 3 * MIB),
];

fn seen_by_its_parts(kind: Kind) {
    let disk = LoopFs::with_base(kind);
    let ground = Ground::of(TestStore::on(&disk), THEROCK);
    ground.ok(&["up", "p", "--name", "one"]);
    let part = |report: &Value, class: &str, envs: &[&str], part: &str| -> u64 {
        let rows = report["rows"].as_array().unwrap().iter();
        let like = |row: &&Value| row["class"] == class && row["envs"] == serde_json::json!(envs);
        rows.filter(like)
            .filter(|row| row["part"] == part)
            .map(|row| number(&row["size"]["allocated"]))
            .sum()
    };
    // Each step froze the volume if the store can do that, so the live volume has the bytes.
    let report = ground.du(None);
    check(&report);
    for (name, bytes) in PARTS {
        near(part(&report, "build", &["one"], name), bytes, MIB / 2);
    }
    near(sum(&report, "frozen", &["one"]), 0, MIB / 2);
    let text = ground.ok(&["du"]);
    let line = text.lines().find(|line| line.contains("*/stage")).unwrap();
    assert!(line.contains("4.0 MiB"), "{text}");

    let deep = ground.du_with(&["--depth", "4"]);
    check(&deep);
    // Reading updates access times, and so changes blocks of btrfs's trees that hold small files.
    let total = |report: &Value| number(&report["total"]["allocated"]);
    near(total(&deep), total(&report), 64 << 10);
    let rows = deep["rows"].as_array().unwrap();
    let stage = "math-libs/BLAS/rocBLAS/stage";
    let is_stage = |row: &&Value| row["class"] == "build" && row["inside"] == stage;
    let row = rows.iter().find(is_stage).unwrap();
    near(number(&row["size"]["allocated"]), 4 * MIB, MIB / 2);
    assert_eq!(row["content"], "what the project installs");
    let page: Value = serde_json::from_str(&ground.ok(&["report", "one", "--json"])).unwrap();
    let largest = &page["space"].as_array().unwrap();
    let find = |name: &str| largest.iter().find(|space| space["name"] == name);
    let blas = find("build volume build/math-libs/BLAS").unwrap_or_else(|| panic!("{page:#}"));
    near(number(&blas["bytes"]), 12 * MIB, MIB / 2);

    // Space that two envs share belongs to neither, and `du` shows it in the same detail.
    if kind != Kind::Ext4 {
        ground.ok(&["fork", "one", "two"]);
        let report = ground.du(None);
        check(&report);
        for (name, bytes) in PARTS {
            let shared = part(&report, "frozen", &["one", "two"], name);
            near(shared, bytes, MIB / 2);
        }
        near(sum(&report, "build", &["one"]), 0, MIB / 2);
        let text = ground.ok(&["du"]);
        let line = text.lines().find(|line| line.contains("*/stage")).unwrap();
        assert!(line.contains("4.0 MiB"), "{text}");
        assert!(
            ground
                .ok(&["du", "two"])
                .contains("volume build in snapshot compile")
        );
    }
}

#[test]
fn therocks_tree_is_seen_by_its_parts_on_overlay() {
    seen_by_its_parts(Kind::Ext4);
}

#[test]
fn therocks_tree_is_seen_by_its_parts_on_btrfs() {
    seen_by_its_parts(Kind::Btrfs);
}

#[test]
fn therocks_tree_is_seen_by_its_parts_on_xfs() {
    seen_by_its_parts(Kind::Xfs);
}
