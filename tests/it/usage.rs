//! `measure::scan` against GNU `du`, and what `du` cannot say: classes, nested roots, mounts, trees that change.

use std::ffi::OsStr;
use std::num::NonZero;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::support::background::while_repeating;
use crate::support::loopfs::private_mounts;
use fs_err as fs;
use nix::fcntl::{OFlag, openat};
use nix::mount::{MntFlags, MsFlags, mount, umount2};
use nix::sys::stat::{Mode, mkdirat};
use rockenv::testing::measure::{DiskUsage, MeasureOptions, Root, Usage, scan, scan_one};
use tempfile::TempDir;

/// Creates a directory on a disk: `/tmp` may be a tmpfs, which has no real blocks.
fn dir() -> TempDir {
    tempfile::Builder::new()
        .prefix("usage-")
        // Not below the checkout, which other users may not be able to enter.
        .tempdir_in("/var/tmp")
        .unwrap()
}

fn du(paths: &[&Path]) -> u64 {
    let output = Command::new("du")
        .args(["-s", "-c", "--block-size=1"])
        .args(paths)
        .output()
        .unwrap();
    assert!(output.status.success());
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let total = text.lines().last().unwrap();
    total.split('\t').next().unwrap().parse().unwrap()
}

fn threads(threads: usize) -> MeasureOptions {
    MeasureOptions {
        threads: NonZero::new(threads),
        ..MeasureOptions::default()
    }
}

fn assert_clean(usage: &Usage) {
    assert_eq!((usage.unreadable, usage.vanished), (0, 0), "{usage:?}");
}

/// Creates every kind of entry, in four directories. Returns the number of inodes.
fn zoo(root: &Path) -> u64 {
    fs::create_dir_all(root.join("a/b")).unwrap();
    fs::create_dir_all(root.join("c")).unwrap();
    fs::write(root.join("a/full"), vec![1; 100_000]).unwrap();
    fs::write(root.join("a/empty"), "").unwrap();
    let sparse = fs::File::create(root.join("a/b/sparse")).unwrap();
    sparse.set_len(1 << 30).unwrap();
    fs::hard_link(root.join("a/full"), root.join("c/full")).unwrap();
    fs::hard_link(root.join("a/full"), root.join("a/b/again")).unwrap();
    symlink("nowhere", root.join("c/dangling")).unwrap();
    symlink("..", root.join("c/loop")).unwrap();
    symlink("/", root.join("c/slash")).unwrap();
    fs::write(root.join(OsStr::from_bytes(b"c/\xff\n\x1b[31m")), "x").unwrap();
    nix::unistd::mkfifo(&root.join("c/fifo"), Mode::S_IRWXU).unwrap();
    drop(std::os::unix::net::UnixListener::bind(root.join("c/socket")).unwrap());
    4 + 3 + 3 + 1 + 2
}

#[test]
fn one_root_is_what_du_says() {
    let dir = dir();
    let inodes = zoo(dir.path());
    for threads_used in [1, 2, 7] {
        let usage = scan(&[Root::new(dir.path(), 3)], &threads(threads_used));
        assert_clean(&usage);
        let sums = usage.class(3);
        assert_eq!(sums.allocated, du(&[dir.path()]));
        assert_eq!(sums.exclusive, sums.allocated);
        assert_eq!(sums.entries, inodes);
        assert_eq!(sums.apparent, 100_000 + (1 << 30) + 7 + 2 + 1 + 1);
        assert_eq!(usage.total(), sums);
    }
}

#[test]
fn the_order_of_roots_decides_who_has_the_hard_links() {
    let dir = dir();
    zoo(dir.path());
    let (a, c) = (dir.path().join("a"), dir.path().join("c"));
    let full = 102_400;
    for round in 0..20 {
        let options = threads(1 + round % 4);
        let forward = scan(&[Root::new(&a, 0), Root::new(&c, 1)], &options);
        assert_eq!(forward.class(0).allocated, du(&[&a]));
        assert_eq!(forward.class(1).counted_elsewhere, full);
        assert_eq!(forward.class(1).allocated + full, du(&[&c]));
        assert_eq!(
            forward.class(0).exclusive,
            forward.class(0).allocated - full
        );
        let backward = scan(&[Root::new(&c, 1), Root::new(&a, 0)], &options);
        assert_eq!(backward.class(1).allocated, du(&[&c]));
        assert_eq!(backward.class(0).allocated + full, du(&[&a]));
        assert_eq!(backward.class(0).counted_elsewhere, full);
        let both = du(&[&a, &c]);
        assert_eq!(forward.total().allocated, both);
        assert_eq!(backward.total().allocated, both);
        // With one class for both roots, all names of a file are inside it.
        let one = scan(&[Root::new(&a, 5), Root::new(&c, 5)], &options);
        assert_eq!(one.class(5).exclusive, both);
        assert_eq!(one.class(5).counted_elsewhere, 0);
    }
}

#[test]
fn nested_and_repeated_roots_count_every_byte_once() {
    let dir = dir();
    zoo(dir.path());
    let whole = du(&[dir.path()]);
    let roots = [
        Root::new(dir.path(), 0),
        Root::new(dir.path().join("a/b"), 1),
        Root::new(dir.path().join("a"), 2),
        Root::new(dir.path().join("c/dangling"), 3),
        Root::new(dir.path().join("a/empty"), 4),
        Root::new(dir.path().join("a/full"), 5),
        Root::new(dir.path().join("a"), 6),
    ];
    let usage = scan(&roots, &MeasureOptions::default());
    assert_clean(&usage);
    assert_eq!(usage.total().allocated, whole);
    assert_eq!(usage.total().entries, scan_one(dir.path()).total().entries);
    // The outermost root meets the file of `again` first through `c/full`.
    assert_eq!(usage.class(1).counted_elsewhere, 102_400);
    assert_eq!(usage.class(2).entries, 1);
    assert_eq!((usage.class(3).entries, usage.class(3).apparent), (1, 7));
    assert_eq!(usage.class(4).entries, 1);
    assert_eq!(usage.class(5).allocated, 0);
    assert_eq!(usage.class(5).counted_elsewhere, 102_400);
    assert_eq!(usage.class(6), DiskUsage::default());
}

#[test]
fn a_large_directory_is_shared_out() {
    let dir = dir();
    for number in 0..20_000 {
        let file = fs::File::create(dir.path().join(format!("file-{number}"))).unwrap();
        if number % 100 == 0 {
            file.set_len(1).unwrap();
        }
    }
    for threads_used in [1, 2, 8] {
        let usage = scan(&[Root::new(dir.path(), 0)], &threads(threads_used));
        assert_clean(&usage);
        assert_eq!(usage.total().allocated, du(&[dir.path()]));
        assert_eq!(usage.total().entries, 20_001);
        assert_eq!(usage.total().apparent, 200);
    }
}

/// With two directories at each level, one waits at each level: more than a process may have open.
#[test]
fn a_deep_tree_needs_few_descriptors() {
    let dir = dir();
    let levels = 3000;
    // Creates one level after the other by descriptor: the path is longer than the kernel takes.
    let mode = Mode::S_IRWXU;
    let flags = OFlag::O_DIRECTORY | OFlag::O_CLOEXEC;
    let mut at = nix::fcntl::open(dir.path(), flags, Mode::empty()).unwrap();
    for _ in 0..levels {
        for name in ["a", "b"] {
            mkdirat(&at, name, mode).unwrap();
            let file = format!("{name}/f");
            drop(openat(&at, file.as_str(), OFlag::O_CREAT | OFlag::O_WRONLY, mode).unwrap());
        }
        at = openat(&at, "b", flags, Mode::empty()).unwrap();
    }
    for threads_used in [1, 4] {
        let usage = scan(&[Root::new(dir.path(), 0)], &threads(threads_used));
        assert_clean(&usage);
        assert_eq!(usage.total().entries, 1 + 4 * levels);
        assert_eq!(usage.total().allocated, du(&[dir.path()]));
    }
    // The standard library's removal opens all levels at once.
    let removed = Command::new("rm").arg("-rf").arg(dir.path()).status();
    assert!(removed.unwrap().success());
}

#[test]
fn a_tree_that_shrinks_and_grows_is_no_error() {
    let dir = dir();
    let come_and_go = || {
        for number in 0..40 {
            let sub = dir.path().join(format!("d{number}/e"));
            fs::create_dir_all(&sub).unwrap();
            fs::write(sub.join("f"), "x").unwrap();
        }
        for number in 0..40 {
            let sub = dir.path().join(format!("d{number}"));
            fs::remove_file(sub.join("e/f")).unwrap();
            fs::remove_dir(sub.join("e")).unwrap();
            fs::remove_dir(&sub).unwrap();
            // A file in the place of a directory.
            fs::write(&sub, "").unwrap();
            fs::remove_file(&sub).unwrap();
        }
    };
    while_repeating(come_and_go, || {
        for _ in 0..500 {
            let usage = scan(&[Root::new(dir.path(), 0)], &threads(2));
            assert_eq!(usage.unreadable, 0, "{usage:?}");
        }
    });
}

#[test]
fn what_cannot_be_read_is_named() {
    let dir = dir();
    let gone = dir.path().join("gone");
    let usage = scan(&[Root::new(&gone, 0)], &MeasureOptions::default());
    assert_eq!(usage.unreadable, 1);
    assert_eq!(usage.problems[0].path, gone);
    assert_eq!(usage.total(), DiskUsage::default());
    assert!(usage.classes.contains_key(&0));

    fs::create_dir_all(dir.path().join("open/closed/inner")).unwrap();
    let closed = dir.path().join("open/closed");
    std::os::unix::fs::chown(dir.path(), Some(12345), Some(12345)).ok();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o000);
    fs::set_permissions(&closed, mode).unwrap();
    // The file system user belongs to the thread, and the walker's own threads inherit it.
    let usage = std::thread::spawn({
        let root = dir.path().to_owned();
        move || {
            nix::unistd::setfsuid(nix::unistd::Uid::from_raw(12345));
            scan(&[Root::new(root, 0)], &MeasureOptions::default())
        }
    })
    .join()
    .unwrap();
    let mode = std::os::unix::fs::PermissionsExt::from_mode(0o700);
    fs::set_permissions(&closed, mode).unwrap();
    assert_eq!(usage.unreadable, 1, "{usage:?}");
    assert_eq!(usage.problems[0].path, closed);
    assert_eq!(
        usage.problems[0].error.kind(),
        std::io::ErrorKind::PermissionDenied
    );
    // The closed directory itself is counted.
    assert_eq!(usage.total().entries, 3);
}

#[test]
fn mounts_are_left_out() {
    let dir = dir();
    zoo(dir.path());
    let at = |name: &str| -> PathBuf { dir.path().join(name) };
    for name in ["other", "same"] {
        fs::create_dir(at(name)).unwrap();
    }
    fs::write(at("file"), "").unwrap();
    let before = scan_one(dir.path()).total();
    private_mounts();
    mount(
        Some("tmpfs"),
        &at("other"),
        Some("tmpfs"),
        MsFlags::empty(),
        None::<&str>,
    )
    .unwrap();
    fs::write(at("other/big"), vec![1; 1 << 20]).unwrap();
    for (from, to) in [("a", "same"), ("a/full", "file")] {
        mount(
            Some(&at(from)),
            &at(to),
            None::<&str>,
            MsFlags::MS_BIND,
            None::<&str>,
        )
        .unwrap();
    }
    let usage = scan_one(dir.path());
    assert_clean(&usage);
    assert_eq!(usage.mounts_skipped, 3);
    // The covered directories are not counted, and the rest is as before.
    assert_eq!(usage.total().entries, before.entries - 3);
    assert_eq!(usage.total().allocated, before.allocated - 2 * 4096);

    // A mount given as a root is counted.
    let usage = scan(
        &[Root::new(dir.path(), 0), Root::new(at("other"), 1)],
        &MeasureOptions::default(),
    );
    assert_eq!(usage.class(1).allocated, 1 << 20);
    for name in ["other", "same", "file"] {
        umount2(&at(name), MntFlags::MNT_DETACH).unwrap();
    }
}
