//! Sizes: none is negative or larger than its disk, whatever steps leave there.

use fs_err as fs;
use rockenv::testing::btrfs;
use serde_json::Value;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};

/// Names of sizes that are not on the disk: lengths of files, limits, and requests.
const OTHERS: [&str; 6] = [
    "apparent",
    "keep_at_least",
    "max",
    "missing",
    "older_than",
    "value",
];

/// Names of sizes in bytes, at any depth, and of the objects that contain them.
const BYTES: [&str; 15] = [
    "allocated",
    "bytes",
    "counted_elsewhere",
    "disk",
    "disk_delta",
    "estimate",
    "exclusive",
    "free",
    "freed",
    "frees",
    "min_free",
    "spare",
    "trash",
    "unshared",
    "used",
];

fn look(words: &str, name: &str, value: &Value, size: f64, seen: &mut usize) {
    match value {
        Value::Object(rows) => {
            for (name, value) in rows {
                look(words, name, value, size, seen);
            }
        }
        Value::Array(rows) => {
            for value in rows {
                look(words, name, value, size, seen);
            }
        }
        Value::Number(number) if !OTHERS.contains(&name) => {
            let number = number.as_f64().unwrap();
            assert!(number >= 0.0, "`{words}`: {name} is {number}");
            if BYTES.contains(&name) {
                *seen += 1;
                assert!(
                    number <= size,
                    "`{words}`: {name} is {number} on a disk of {size}"
                );
            }
        }
        Value::Number(_) | Value::Null | Value::Bool(_) | Value::String(_) => {}
    }
}

/// Steps leave files with holes that are larger than the disk, hard links, and blocks that snapshots, volumes and
/// results share.
#[test]
fn none_is_negative_or_larger_than_the_disk() {
    for kind in [Kind::Ext4, Kind::Btrfs] {
        let bytes = f64::from(700 << 20);
        let disk = LoopFs::sized(kind, 700 << 20);
        let store = TestStore::on(&disk);
        store.profile(
            "volume = [{ name = 'b', kind = 'build', target = '/b' }, { name = 'out', kind = 'output', target = '/out' },
                { name = 'c', kind = 'cache', target = '/c', max = '1G' }]
             [[step]]\nname = 'one'\nrun = '''for p in ~ /b /c /out; do
                 head -c 3000000 /dev/urandom > $p/a; for n in $(seq 300); do ln $p/a $p/$n; done; done
                 for p in ~ /b /c; do truncate -s 900G $p/hole; done'''
             [[step]]\nname = 'two'\nrun = 'rm ~/a /b/a /out/a; cp /b/1 ~/copy; rm ~/hole'\n",
        );
        store.up();
        let fork = format!("{}-fork", store.env());
        store.rockenv(&["fork", store.env(), &fork]).ok();
        store
            .sh("rm ~/[0-9]*; echo more > ~/more; truncate -s 1G /b/a")
            .ok();
        let env = store.env();
        let mut seen = 0;
        for words in [
            &["du"][..],
            &["du", env],
            &["du", "--shared"],
            &["du", "--depth", "3", "--sort", "size"],
            &["ls"],
            &["status", env],
            &["plan", env],
            &["report", env],
            &["cache", "ls"],
            &["image", "ls"],
            &["gc", "--dry-run"],
            &["gc", "--dry-run", "--free", "900G", "--preset", "ci"],
        ] {
            let json = [words, &["--json"]].concat();
            let ran = store.rockenv(&json);
            let line = words.join(" ");
            let value: Value = serde_json::from_slice(&ran.out)
                .unwrap_or_else(|error| panic!("`{line}`: {error}: {ran:?}"));
            look(&line, "", &value, bytes, &mut seen);
        }
        assert!(seen > 50, "{seen}");
        store.rockenv(&["rm", "--yes", env]).ok();
        let ran = store.rockenv(&["gc", "--yes", "--json", "--free", "900G", "--preset", "ci"]);
        look(
            "gc",
            "",
            &serde_json::from_slice(&ran.out).unwrap(),
            bytes,
            &mut seen,
        );
    }
}

/// Each subvolume has its own device number, but all share the free space.
#[test]
fn subvolumes_of_one_btrfs_are_one_disk() {
    let disk = LoopFs::sized(Kind::Btrfs, 2 << 30);
    let store = TestStore::on(&disk);
    let out = disk.join("out");
    btrfs::create(&out).unwrap();
    std::os::unix::fs::chown(&out, Some(1234), Some(1234)).unwrap();
    let profile = |needed: &str| {
        format!(
            "[[volume]]\nname = 'one'\nkind = 'build'\ntarget = '/v/one'\n\
             [[volume]]\nname = 'two'\nkind = 'build'\ntarget = '/v/two'\n{needed}\
             [[volume]]\nname = 'out'\nkind = 'output'\npath = '{}'\ntarget = '/v/out'\n{needed}\
             [[step]]\nname = 'write'\nrun = 'head -c 60M /dev/urandom > /v/one/f; sync -f /v/one/f; sleep 1'\n",
            out.display()
        )
    };
    store.up_with(&profile(""));
    let rows = fs::read_to_string(store.env_dir().join("metrics.jsonl")).unwrap();
    let row: Value = serde_json::from_str(rows.lines().last().unwrap()).unwrap();
    let peak = row["cost"]["disk_peak"].as_u64().unwrap() >> 20;

    // Each volume's requirement alone would fit.
    store.profile(&profile("disk = '1100M'\n"));
    let refused = store.rockenv(&["up", store.env(), "--rerun", "write"]);

    // A copied store has plain directories in place of subvolumes. Their size must not include other files of the disk.
    fs::write(disk.join("other"), vec![1; 50 << 20]).unwrap();
    let copied = store.home().join("trash/copied/root");
    fs::create_dir_all(&copied).unwrap();
    fs::write(copied.join("file"), vec![1; 1 << 20]).unwrap();
    let found = store.rockenv(&["gc", "--dry-run", "--json"]).ok().json();
    let trash = found["trash"].as_u64().unwrap() >> 20;

    assert!(
        (50..110).contains(&peak) && refused.code == 9 && trash < 10,
        "{peak} MiB, {trash} MiB, {refused:?}"
    );
}
