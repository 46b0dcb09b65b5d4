//! Faults around `gc`: it is killed, the disk is full, and builds run beside it.

use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use fs_err as fs;
use nix::fcntl::FallocateFlags;
use rockenv::testing::Store;

use super::{fill, json, killed_at, names, round, snapshots, untouched};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs, bind};
use crate::support::random::Random;
use crate::support::run::finish;
use crate::support::terminal::Terminal;

fn killed_at_any_moment(kind: Kind) {
    let disk = LoopFs::with_base(kind);
    let store = TestStore::on(&disk);
    let mut random = Random::seeded();
    round(&store, 0, 1);
    store.up();
    fill(&store);
    store
        .rockenv(&["snapshot", "create", store.env(), "mine"])
        .ok();
    let mut killed = 0;
    for number in 1..4 {
        round(&store, number, 1);
        store.up();
        for _ in 0..3 {
            let mut command = store.command(&["--yes", "gc", "--free", "1T", "--preset", "ci"]);
            let mut child = command
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            std::thread::sleep(Duration::from_millis(random.below(100)));
            killed += u32::from(child.try_wait().unwrap().is_none());
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }
    assert!(killed > 0, "no gc was killed in the middle");
    json(&store, &["--preset", "ci"]);
    let asked = ["--yes", "gc", "--free", "1T", "--preset", "ci"];
    store.rockenv(&asked).exits(10);
    assert_eq!(snapshots(&store), ["a0", "b0", "mine", "a3", "b3"]);
    let layers = fs::read_dir(store.home().join("layers")).unwrap().count();
    assert_eq!(layers, 5, "layers of no snapshot are left");
    let left = json(&store, &["--dry-run", "--free", "1T", "--preset", "ci"]);
    assert!(names(&left, "items").is_empty(), "{left:#}");
    store.rockenv(&["fsck"]).ok();
    store
        .sh("test -s ~/a && tail -n 1 /v/build/log")
        .ok()
        .prints("3");
    store
        .rockenv(&["rollback", "--yes", store.env(), "mine"])
        .ok();
    store.sh("test -s ~/a").ok();
    untouched(&store);
}

#[test]
fn killed_on_overlay_it_loses_nothing_and_the_next_one_finishes() {
    killed_at_any_moment(Kind::Ext4);
}

#[test]
fn killed_on_btrfs_it_loses_nothing_and_the_next_one_finishes() {
    killed_at_any_moment(Kind::Btrfs);
}

#[test]
fn a_fork_that_is_killed_leaves_no_volume_that_nobody_has() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    round(&store, 0, 1);
    store.up();
    let new = format!("{}-new", store.env());
    let count = |path: &str| fs::read_dir(store.home().join(path)).unwrap().count();
    let mut cut = 0;
    let mut nth = 1;
    while killed_at(
        &store,
        &["fork", store.env(), &new],
        "rename,renameat,renameat2",
        nth,
    ) {
        cut += u32::from(count("volumes") > 1);
        // `gc` cleans up the interrupted fork, and removes no other volumes by itself.
        json(&store, &[]);
        if store
            .home()
            .join("envs")
            .join(&new)
            .join("record.json")
            .exists()
        {
            store.rockenv(&["rm", "--yes", &new]).ok();
        }
        assert_eq!(count("volumes"), 1, "killed at rename {nth}");
        nth += 1;
    }
    assert!(cut > 0, "no fork was killed that had made its volumes");
    assert_eq!(count("volumes"), 2);
    store.rockenv(&["fsck"]).ok();
}

/// Fills a disk to the last byte that root may write.
fn hog(disk: &LoopFs, name: &str) -> PathBuf {
    use std::io::{Seek as _, SeekFrom, Write as _};
    let path = disk.join(name);
    let mut options = fs::OpenOptions::new();
    let mut hog = options
        .create(true)
        .truncate(false)
        .write(true)
        .open(&path)
        .unwrap();
    // Allocates large pieces first, then writes blocks, and then ever smaller ones.
    let mut piece: i64 = 1 << 30;
    let mut length: i64 = 0;
    while piece >= 1 << 20 {
        match nix::fcntl::fallocate(&hog, FallocateFlags::empty(), length, piece) {
            Ok(()) => length += piece,
            Err(_) => piece /= 2,
        }
    }
    hog.seek(SeekFrom::End(0)).unwrap();
    let mut block = vec![7; 1 << 20];
    while !block.is_empty() {
        while hog.write_all(&block).is_ok() && hog.sync_data().is_ok() {}
        block.truncate(block.len() / 4);
    }
    path
}

fn full_disk(kind: Kind) {
    let disk = LoopFs::sized(kind, 2 << 30);
    let store = TestStore::on(&disk);
    round(&store, 0, 20);
    store.up();
    fill(&store);
    // With shared extents, every command inside counts as a change, so the rollback keeps a snapshot.
    store.rockenv(&["rollback", store.env(), "b0"]).ok();
    let forget = ["snapshot", "rm", store.env(), "before-rollback"];
    let kept = matches!(kind, Kind::Xfs);
    store.rockenv(&forget).exits(if kept { 0 } else { 7 });
    round(&store, 1, 20);
    store.up();
    assert!(store.home().join(".ballast").exists());
    store.settle();
    let hog = hog(&disk, "hog");
    let ballast = store.home().join(".ballast");
    assert!(fs::write(store.home().join("more"), vec![1; 1 << 16]).is_err());
    // Declining removes nothing.
    let mut asked = Terminal::start(
        store.command(&["gc", "--free", "30M", "--preset", "ci"]),
        33,
        101,
    );
    asked.expect("remove 2 items");
    asked.write("n\n");
    asked.wait(2);
    assert_eq!(snapshots(&store).len(), 4);
    assert!(ballast.exists(), "the ballast is gone for nothing");
    // Space from the ballast, which `gc` gives up to be able to work, does not count as freed.
    let done = json(&store, &[]);
    assert!(done["freed"].as_i64().unwrap() < 1 << 20, "{done:#}");
    assert!(ballast.exists(), "no new ballast where nothing was freed");
    let done = json(&store, &["--free", "30M", "--preset", "ci"]);
    assert_eq!(done["removed"].as_array().unwrap().len(), 2, "{done:#}");
    assert_eq!(snapshots(&store), ["a1", "b1"]);
    assert!(ballast.exists(), "no new ballast");
    fs::remove_file(&hog).unwrap();
    store.sh("test -s ~/a").ok();
    untouched(&store);
    store.rockenv(&["fsck"]).ok();
    // The commands that `gc` suggests when it cannot remove more work on a full disk too.
    let name = store.env();
    store.rockenv(&["snapshot", "create", name, "mine"]).ok();
    // An entry of the trash that cannot be removed does not fail them.
    store.settle();
    let stuck = store.home().join("trash/0123456789abcdef");
    fs::create_dir(&stuck).unwrap();
    let bound = bind(&store.home().join("caches"), &stuck);
    for words in [
        &["snapshot", "rm", name, "mine"][..],
        &["rm", "--yes", name],
    ] {
        self::hog(&disk, "hog");
        store.rockenv(words).ok();
        assert!(ballast.exists(), "no new ballast after {words:?}");
        fs::remove_file(&hog).unwrap();
    }
    drop(bound);
    assert!(
        !store
            .home()
            .join("envs")
            .join(name)
            .join("record.json")
            .exists()
    );
    assert_eq!(
        fs::read_dir(store.home().join("layers")).unwrap().count(),
        0
    );
    untouched(&store);
    store.rockenv(&["fsck"]).ok();
}

/// A step fills a small disk to the last byte. Commands that remove still work, even without ballast.
fn small_disk(kind: Kind) {
    let disk = LoopFs::sized(kind, 400 << 20);
    let store = TestStore::on(&disk);
    let name = store.env();
    let fill = "i=0; for size in 20M 1M 64k 4k; do
        while dd if=/dev/zero of=$i bs=$size count=1 2>/dev/null; do i=$((i+1)); done; done; false";
    let steps = |then: &str| {
        format!(
            "volume = [{{ name = 'build', kind = 'build', target = '/v' }}]
            [[step]]\nname = 'one'\nrun = 'echo one > ~/one'
            [[step]]\nname = 'two'\nworkdir = '/v'\nrun = '''{then}'''\n"
        )
    };
    let up = || {
        let mut command = store.command(&["up", name]);
        // Without this, `up` would pause the step before the disk is full.
        command.env("ROCKENV_DISK_FLOOR", "0");
        finish("up".to_owned(), command)
    };
    let ballast = store.home().join(".ballast");
    let count = |what: &str| fs::read_dir(store.home().join(what)).unwrap().count();
    for has_ballast in [true, false] {
        // XFS has no room for a new file long before the last block is used.
        fs::write(disk.join("hog"), "").unwrap();
        store.profile(&steps(fill));
        up().exits(10);
        assert!(ballast.exists(), "no ballast on {kind:?}");
        let mut hogs = vec![hog(&disk, "hog")];
        if !has_ballast {
            fs::remove_file(&ballast).unwrap();
            hogs.push(hog(&disk, "hog-2"));
        }
        // `gc` has nothing to remove here, so its exit code does not matter.
        store.rockenv(&["gc", "--yes", "--preset", "ci"]);
        store.rockenv(&["fsck", "--repair"]).ok();
        store.rockenv(&["rm", "--yes", name]).ok();
        assert_eq!((count("layers"), count("volumes")), (0, 0));
        for hog in hogs {
            fs::remove_file(hog).unwrap();
        }
        store.rockenv(&["fsck"]).ok();
    }
    store.rockenv(&["gc", "--yes"]);
    assert!(ballast.exists(), "no ballast on {kind:?}");
    store.profile(&steps("true"));
    up().ok();
    for has_ballast in [true, false] {
        store.sh("echo mine > ~/mine").ok();
        for snapshot in ["mine", "kept"] {
            store.rockenv(&["snapshot", "create", name, snapshot]).ok();
        }
        let mut hogs = vec![hog(&disk, "hog")];
        if !has_ballast {
            fs::remove_file(&ballast).unwrap();
            hogs.push(hog(&disk, "hog-2"));
        }
        let is_gone = |when: &str| {
            let listed = store.rockenv(&["snapshot", "ls", name]).ok().text();
            assert!(
                !listed.contains("mine") && listed.contains("kept"),
                "{when}: {listed}"
            );
            store.rockenv(&["snapshot", "rm", name, "mine"]).exits(7);
        };
        store.rockenv(&["snapshot", "rm", name, "mine"]).ok();
        is_gone("on a full disk");
        store.rockenv(&["snapshot", "rm", name, "kept"]).ok();
        for hog in hogs {
            fs::remove_file(hog).unwrap();
        }
        store.rockenv(&["fsck"]).ok();
        // A new snapshot may have the name of a removed one.
        for snapshot in ["mine", "kept"] {
            store.rockenv(&["snapshot", "create", name, snapshot]).ok();
        }
        store.rockenv(&["snapshot", "rm", name, "mine"]).ok();
        is_gone("later");
        store.rockenv(&["snapshot", "rm", name, "kept"]).ok();
        store.rockenv(&["gc", "--yes"]);
    }
    store.rockenv(&["rm", "--yes", name]).ok();
    store.rockenv(&["fsck"]).ok();
}

/// Removes `count` snapshots on a full disk. Their removal frees no space. With `older`, the env lacks the directory
/// `gone`, as older versions did not create it.
fn many_snapshots(disk: &LoopFs, store: &TestStore, count: usize, older: bool) {
    let name = store.env();
    let mine: Vec<String> = (0..count).map(|number| format!("mine-{number}")).collect();
    for snapshot in mine.iter().chain([&"kept".to_owned()]) {
        store.rockenv(&["snapshot", "create", name, snapshot]).ok();
    }
    if older {
        fs::remove_dir(store.env_dir().join("gone")).unwrap();
    }
    let mut hogs = vec![hog(disk, "hog")];
    fs::remove_file(store.home().join(".ballast")).unwrap();
    hogs.push(hog(disk, "hog-2"));
    for snapshot in &mine {
        store.rockenv(&["snapshot", "rm", name, snapshot]).ok();
    }
    let left = ["one", "kept"];
    assert_eq!(snapshots(store), left);
    for hog in hogs {
        fs::remove_file(hog).unwrap();
    }
    store.rockenv(&["fsck"]).ok();
    store.rockenv(&["snapshot", "create", name, "mine-0"]).ok();
    store.rockenv(&["snapshot", "rm", name, "kept"]).ok();
    assert_eq!(snapshots(store), ["one", "mine-0"]);
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn many_snapshots_are_removed_on_a_full_disk() {
    // XFS keeps a directory of fewer names in its inode, and a full disk has no block for a larger one.
    for (kind, count) in [(Kind::Ext4, 4), (Kind::Btrfs, 4), (Kind::Xfs, 24)] {
        let disk = LoopFs::sized(kind, 400 << 20);
        let store = TestStore::on(&disk);
        store.up_with("[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n");
        for older in [true, false] {
            many_snapshots(&disk, &store, count, older);
            let last = ["snapshot", "rm", store.env(), "mine-0"];
            store.rockenv(&last).ok();
            // Now there is room for new ballast.
            store.rockenv(&["gc", "--yes"]);
        }
    }
}

#[test]
fn the_tree_of_a_failed_step_is_removed_on_a_full_disk() {
    for kind in [Kind::Ext4, Kind::Btrfs, Kind::Xfs] {
        let disk = LoopFs::sized(kind, 400 << 20);
        let store = TestStore::on(&disk);
        store.profile(
            "[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n\
             [[step]]\nname = 'two'\nrun = 'head -c 30M /dev/urandom > ~/two; exit 1'\n",
        );
        store.rockenv(&["up", store.env()]).exits(5);
        hog(&disk, "hog");
        fs::remove_file(store.home().join(".ballast")).unwrap();
        hog(&disk, "hog-2");
        let done = json(&store, &["--free", "20M", "--preset", "ci"]);
        let removed = done["removed"].as_array().unwrap();
        assert_eq!(removed.len(), 1, "{done:#}");
        assert_eq!(removed[0]["kind"], "failed", "{done:#}");
        store.rockenv(&["fsck"]).ok();
    }
}

/// A full disk may have no room for the marks of durable layers.
#[test]
fn the_trash_is_emptied_where_no_layer_can_be_marked() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n");
    store.settle();
    let layers = fs::read_dir(store.home().join("layers")).unwrap();
    for layer in layers.map(|entry| entry.unwrap().path()) {
        fs::remove_file(layer.join("durable")).unwrap();
        // A write to a symlink that names itself fails.
        fs_err::os::unix::fs::symlink("durable", layer.join("durable")).unwrap();
    }
    let trash = store.home().join("trash");
    fs::create_dir(trash.join("old")).unwrap();
    let home = store.home().to_str().unwrap();
    assert_ne!(store.rockenv(&["__reap", home]).code, 0);
    assert_eq!(fs::read_dir(trash).unwrap().count(), 0);
}

#[test]
fn a_step_may_fill_a_small_btrfs_with_names() {
    let disk = LoopFs::sized(Kind::Btrfs, 400 << 20);
    let store = TestStore::on(&disk);
    store.up_with(
        "volume = [{ name = 'build', kind = 'build', target = '/v' }]
        [[step]]\nname = 'one'\nworkdir = '/v'\nrun = 'echo one > one'\n",
    );
    let hog = hog(&disk, "hog");
    let volumes = fs::read_dir(store.home().join("volumes")).unwrap();
    let volume = volumes.map(|entry| entry.unwrap().path()).next().unwrap();
    // btrfs keeps symlinks in its metadata. When that is full, no file can be renamed.
    for length in [900, 90, 9] {
        let mut links = (0..1_000_000).map(|number| {
            let name = volume.join(format!("{length}-{number}"));
            std::os::unix::fs::symlink("x".repeat(length), name)
        });
        assert!(links.any(|link| link.is_err()));
    }
    assert!(fs::rename(volume.join("900-0"), volume.join("other")).is_err());
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    for what in ["layers", "volumes"] {
        let left = fs::read_dir(store.home().join(what)).unwrap().count();
        assert_eq!(left, 0, "{what}");
    }
    fs::remove_file(hog).unwrap();
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn a_step_may_fill_a_small_ext4() {
    small_disk(Kind::Ext4);
}

#[test]
fn a_step_may_fill_a_small_btrfs() {
    small_disk(Kind::Btrfs);
}

#[test]
fn a_step_may_fill_a_small_xfs() {
    small_disk(Kind::Xfs);
}

#[test]
fn it_works_on_a_full_ext4() {
    full_disk(Kind::Ext4);
}

#[test]
fn it_works_on_a_full_btrfs() {
    full_disk(Kind::Btrfs);
}

#[test]
fn it_works_on_a_full_xfs() {
    full_disk(Kind::Xfs);
}

#[test]
fn builds_beside_it_find_what_they_stand_on() {
    let store = TestStore::new();
    round(&store, 0, 1);
    store.up();
    fill(&store);
    let stop = AtomicBool::new(false);
    let mut sweeps = 0;
    std::thread::scope(|scope| {
        let sweeper = scope.spawn(|| {
            let mut count = 0;
            while !stop.load(Ordering::Relaxed) {
                let words = ["--yes", "gc", "--free", "1T", "--preset", "ci"];
                let ran = store.rockenv(&words);
                // `rm --force` ends any command that holds its env, and so may end `gc`.
                assert!([0, 10, 143].contains(&ran.code), "{ran:?}");
                count += 1;
            }
            count
        });
        // Two envs share their first steps. Each is made, removed and made again from the other's layers.
        let builders: Vec<_> = ["x", "y"]
            .into_iter()
            .map(|letter| {
                let store = &store;
                scope.spawn(move || {
                    let name = format!("{}-{letter}", store.env());
                    for turn in 0..4 {
                        store.rockenv(&["up", store.env(), "--name", &name]).ok();
                        store.sh_in(&name, "test -s ~/a && test -s ~/b").ok();
                        if turn % 2 == 1 {
                            store.rockenv(&["rm", "--yes", "--force", &name]).ok();
                        }
                    }
                })
            })
            .collect();
        let ends: Vec<_> = builders.into_iter().map(|builder| builder.join()).collect();
        stop.store(true, Ordering::Relaxed);
        sweeps = sweeper.join().unwrap();
        for end in ends {
            end.unwrap();
        }
    });
    assert!(sweeps > 2, "{sweeps} sweeps");
    untouched(&store);
    store.rockenv(&["fsck"]).ok();
}

/// The ballast is less than 16 MiB on a disk of 400 MB, and never more on a larger one.
#[test]
fn the_ballast_is_proportional_to_the_disk() {
    for (megabytes, sizes) in [(400, 5..=7), (700, 9..=11), (4096, 16..=16)] {
        let disk = LoopFs::sized(Kind::Ext4, megabytes << 20);
        let store = TestStore::on(&disk);
        drop(Store::open(store.home()).unwrap());
        store.rockenv(&["gc", "--yes"]).ok();
        let size = fs::metadata(store.home().join(".ballast")).unwrap().len();
        assert!(sizes.contains(&(size >> 20)), "{megabytes} MB: {size}");
    }
}
