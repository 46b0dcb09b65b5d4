//! The probe, subvolumes, and overlay mounts.

use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use rockenv::testing::error::Kind as ErrorKind;
use rockenv::testing::{Method, btrfs, create_tree, overlay, probe, remove_tree};

use crate::support::loopfs::{Kind, LoopFs, Mount, private_mounts, run};

#[test]
fn probe_finds_the_best_method() {
    for (kind, method) in [
        (Kind::Ext4, Method::Overlay),
        (Kind::Btrfs, Method::Btrfs),
        (Kind::Xfs, Method::Reflink),
    ] {
        let fs = LoopFs::sized(kind, 512 << 20);
        let before = fs_err::read_dir(fs.path()).unwrap().count();
        let found = probe(fs.path()).unwrap();
        assert_eq!(found.method, method);
        assert_eq!(found.file_system, kind.name());
        assert_eq!(found.reasons.is_empty(), method == Method::Btrfs);
        assert_eq!(fs_err::read_dir(fs.path()).unwrap().count(), before);
    }
}

#[test]
fn a_store_on_an_overlay_is_refused_with_help() {
    let fs = LoopFs::sized(Kind::Ext4, 256 << 20);
    let (_mount, at) = stacked(&fs, 1);
    let error = probe(&at).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unavailable);
    assert!(
        error.chain().join(" ").contains("overlay itself"),
        "{error:?}"
    );
    assert!(error.help_text().unwrap().contains("ROCKENV_HOME"));
}

#[test]
fn overlay_shows_top_layers_first_and_takes_any_path() {
    let fs = LoopFs::sized(Kind::Ext4, 256 << 20);
    let (_mount, at) = stacked(&fs, 100);
    assert_eq!(fs_err::read_to_string(at.join("same")).unwrap(), "99");
    assert_eq!(fs_err::read_dir(&at).unwrap().count(), 101);
    fs_err::write(at.join("new"), "").unwrap();
    let diff = fs.join("diff:,\\\n\"");
    assert!(diff.join("new").exists());
    assert!(!overlay::is_clean(&diff).unwrap());
}

#[test]
fn overlay_without_an_upper_is_read_only() {
    let fs = LoopFs::sized(Kind::Ext4, 256 << 20);
    let lowers: Vec<PathBuf> = (0..2).map(|n| fs.join(format!("l{n}"))).collect();
    let at = fs.join("at");
    for directory in lowers.iter().chain([&at]) {
        fs_err::create_dir(directory).unwrap();
    }
    fs_err::write(lowers[0].join("file"), "").unwrap();
    for count in [1, 2] {
        overlay::mount(&lowers[..count], None, &at).unwrap();
        let _mount = Mount(at.clone());
        assert!(at.join("file").exists());
        let error = fs_err::write(at.join("new"), "").unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    }
}

#[test]
fn btrfs_tells_a_change_from_a_look() {
    let fs = LoopFs::sized(Kind::Btrfs, 256 << 20);
    let (tree, frozen) = (fs.join("tree"), fs.join("frozen"));
    create_tree(Method::Btrfs, &tree).unwrap();
    // More inodes than the kernel returns at once.
    for n in 0..500 {
        fs_err::write(tree.join(format!("file{n}")), "content").unwrap();
    }
    btrfs::snapshot(&tree, &frozen, true).unwrap();
    assert!(btrfs::is_subvolume(&frozen).unwrap());
    let refused = fs_err::write(frozen.join("new"), "").unwrap_err();
    assert_eq!(refused.kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    fs_err::write(fs.join("outside"), "").unwrap();
    // `frozen` is younger than `tree`, and `again` is a writable snapshot of it, as after a rollback.
    let again = fs.join("again");
    btrfs::snapshot(&frozen, &again, false).unwrap();
    let accessed = |path: &Path| {
        let found = fs_err::metadata(path.join("file7")).unwrap();
        (found.atime(), found.atime_nsec())
    };
    for live in [&tree, &again] {
        let before = accessed(live);
        std::thread::sleep(std::time::Duration::from_millis(20));
        for n in 0..500 {
            fs_err::read(live.join(format!("file{n}"))).unwrap();
        }
        assert!(accessed(live) > before, "no access is counted here");
        assert!(!btrfs::differs(live, &frozen).unwrap(), "{live:?}");
    }
    let mut undone = 0;
    let mut differs = |change: &dyn Fn(&Path)| {
        undone += 1;
        let live = fs.join(format!("live{undone}"));
        btrfs::snapshot(&frozen, &live, false).unwrap();
        assert!(!btrfs::differs(&live, &frozen).unwrap());
        change(&live);
        assert!(btrfs::differs(&live, &frozen).unwrap(), "change {undone}");
    };
    differs(&|live| fs_err::write(live.join("file499"), "CONTENT").unwrap());
    differs(&|live| fs_err::remove_file(live.join("file3")).unwrap());
    differs(&|live| fs_err::create_dir(live.join("new")).unwrap());
    differs(&|live| fs_err::rename(live.join("file3"), live.join("file4")).unwrap());
    differs(&|live| fs_err::hard_link(live.join("file3"), live.join("link")).unwrap());
    differs(&|live| {
        let run = Command::new("setfattr")
            .args(["-n", "user.x", "-v", "1"])
            .arg(live.join("file3"))
            .status();
        assert!(run.unwrap().success());
    });
    // Keeps the old content's length and time, as a careful editor does.
    differs(&|live| {
        let path = live.join("file250");
        let time = fs_err::metadata(&path).unwrap().modified().unwrap();
        fs_err::write(&path, "CONTENT").unwrap();
        fs_err::OpenOptions::new()
            .append(true)
            .open(&path)
            .unwrap()
            .set_modified(time)
            .unwrap();
    });
    // An unrelated subvolume always differs, whatever it holds.
    let stranger = fs.join("stranger");
    btrfs::create(&stranger).unwrap();
    assert!(btrfs::differs(&stranger, &frozen).unwrap());
}

#[test]
fn btrfs_tells_what_was_written_since_the_snapshot() {
    let fs = LoopFs::new(Kind::Btrfs);
    let (from, tree) = (fs.join("from"), fs.join("tree"));
    btrfs::create(&from).unwrap();
    // More files than the kernel returns at once, and names that lie between them in its tree.
    for n in 0..3000 {
        fs_err::write(from.join(format!("small{n}")), [7; 100]).unwrap();
        fs_err::write(from.join(format!("whole{n}")), [8; 8192]).unwrap();
    }
    assert_eq!(btrfs::written(&from).unwrap(), 3000 * (100 + 8192));
    btrfs::snapshot(&from, &tree, false).unwrap();
    assert_eq!(btrfs::written(&tree).unwrap(), 0);
    let touch = |n: u32| {
        fs_err::OpenOptions::new()
            .append(true)
            .open(tree.join(format!("small{n}")))
            .unwrap()
            .set_modified(std::time::SystemTime::UNIX_EPOCH)
            .unwrap();
    };
    (0..3000).step_by(100).for_each(touch);
    fs_err::remove_file(tree.join("whole0")).unwrap();
    fs_err::rename(tree.join("whole1"), tree.join("moved")).unwrap();
    assert_eq!(btrfs::written(&tree).unwrap(), 0);
    fs_err::write(tree.join("new"), vec![1; 5 << 20]).unwrap();
    fs_err::write(tree.join("whole2"), [9; 8192]).unwrap();
    fs_err::hard_link(tree.join("new"), tree.join("same")).unwrap();
    rockenv::testing::copy_tree(&tree, &fs.join("copy")).unwrap();
    assert_eq!(btrfs::written(&tree).unwrap(), (5 << 20) + 8192);
    assert_eq!(btrfs::written(&from).unwrap(), 3000 * (100 + 8192));
    // Files that are written again or truncated count by what they hold.
    fs_err::write(tree.join("new"), vec![2; 1 << 20]).unwrap();
    assert_eq!(btrfs::written(&tree).unwrap(), (1 << 20) + 8192);
}

#[test]
fn btrfs_nested_subvolumes_are_removed_with_their_tree() {
    let fs = LoopFs::sized(Kind::Btrfs, 256 << 20);
    let plain = fs.join("plain");
    fs_err::create_dir_all(plain.join("a")).unwrap();
    let tree = plain.join("a/tree");
    btrfs::create(&tree).unwrap();
    fs_err::create_dir_all(tree.join("var/lib")).unwrap();
    let nested = tree.join("var/lib/machines");
    btrfs::create(&nested).unwrap();
    // More subvolumes than the kernel lists at once, and a third level. Read-only ones refuse their children's
    // deletion.
    for n in 0..300 {
        btrfs::create(&nested.join(format!("n{n}"))).unwrap();
    }
    btrfs::create(&nested.join("n7/deep")).unwrap();
    fs_err::write(nested.join("n7/deep/file"), "x").unwrap();
    for path in [nested.join("n7"), nested] {
        let mut command = Command::new("btrfs");
        run(command
            .args(["property", "set", "-ts"])
            .arg(path)
            .args(["ro", "true"]));
    }
    btrfs::create(&fs.join("other")).unwrap();
    remove_tree(&plain).unwrap();
    assert!(!plain.exists());
    assert!(fs.join("other").exists());
}

/// Mounts `count` layers with a file of their own and one that all have, at paths that mount options could not carry.
fn stacked(fs: &LoopFs, count: usize) -> (Mount, PathBuf) {
    private_mounts();
    let mut lowers = Vec::new();
    for n in 0..count {
        let lower = fs.join(format!("lower{n}:,\\ \n"));
        fs_err::create_dir(&lower).unwrap();
        fs_err::write(lower.join(format!("f{n}")), "").unwrap();
        fs_err::write(lower.join("same"), n.to_string()).unwrap();
        lowers.insert(0, lower);
    }
    let [diff, work, at] = ["diff:,\\\n\"", "work", "at"].map(|name| fs.join(name));
    for directory in [&diff, &work, &at] {
        fs_err::create_dir(directory).unwrap();
    }
    let upper = overlay::Upper {
        diff: &diff,
        work: &work,
    };
    overlay::mount(&lowers, Some(upper), &at).unwrap();
    (Mount(at.clone()), at)
}
