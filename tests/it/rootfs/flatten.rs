//! Merged layers show what their stack shows, for random changes on real mounts.

use std::cell::Cell;
use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::sys::stat::{Mode, SFlag, UtimensatFlags, makedev, mknod, utimensat};
use nix::sys::time::TimeSpec;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use rockenv::testing::{copy_tree, flatten, overlay, remove_tree};

use super::walk::{What, assert_same, walk};
use crate::support::loopfs::{Kind, LoopFs, Mount, run};

/// The merged layer shares its files with the old layers, so link counts differ.
const MERGED: What = What {
    blocks: true,
    link_counts: false,
};

/// A change that a step could make. A change that does not apply, such as one without a parent directory, is left out.
#[derive(Clone, Debug)]
enum Change {
    Write(PathBuf, u8),
    Append(PathBuf),
    Directory(PathBuf),
    Remove(PathBuf),
    /// Replaces a directory by an empty one, which is opaque.
    EmptyAgain(PathBuf),
    Rename(PathBuf, PathBuf),
    Link(PathBuf, PathBuf),
    Symlink(PathBuf, u8),
    Special(PathBuf, bool),
    Mode(PathBuf, u32),
    Owner(PathBuf, u32),
    Attribute(PathBuf, u8),
    Time(PathBuf, i64),
}

fn path() -> impl Strategy<Value = PathBuf> {
    // Few names, so that changes collide.
    prop::collection::vec(prop::sample::select(vec!["a", "b", "c"]), 1..4)
        .prop_map(|parts| parts.into_iter().collect())
}

fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        4 => (path(), any::<u8>()).prop_map(|(p, n)| Change::Write(p, n)),
        2 => path().prop_map(Change::Append),
        5 => path().prop_map(Change::Directory),
        4 => path().prop_map(Change::Remove),
        3 => path().prop_map(Change::EmptyAgain),
        3 => (path(), path()).prop_map(|(a, b)| Change::Rename(a, b)),
        2 => (path(), path()).prop_map(|(a, b)| Change::Link(a, b)),
        1 => (path(), any::<u8>()).prop_map(|(p, n)| Change::Symlink(p, n)),
        1 => (path(), any::<bool>()).prop_map(|(p, n)| Change::Special(p, n)),
        1 => (path(), 0..0o7777_u32).prop_map(|(p, n)| Change::Mode(p, n)),
        1 => (path(), 0..9_u32).prop_map(|(p, n)| Change::Owner(p, n)),
        2 => (path(), any::<u8>()).prop_map(|(p, n)| Change::Attribute(p, n)),
        1 => (path(), 0..1_000_000_i64).prop_map(|(p, n)| Change::Time(p, n)),
    ]
}

impl Change {
    /// Applies the change, and returns whether that was possible.
    fn apply(&self, top: &Path) -> bool {
        let at = |path: &Path| top.join(path);
        match self {
            Self::Write(path, n) => write(&at(path), true, &[*n; 10]),
            Self::Append(path) => write(&at(path), false, b"more"),
            Self::Directory(path) => fs_err::create_dir(at(path)).is_ok(),
            Self::Remove(path) => remove(&at(path)),
            Self::EmptyAgain(path) => {
                fs_err::symlink_metadata(at(path)).is_ok_and(|stat| stat.is_dir())
                    && remove(&at(path))
                    && fs_err::create_dir(at(path)).is_ok()
            }
            Self::Rename(from, to) => {
                if fs_err::rename(at(from), at(to)).is_ok() {
                    return true;
                }
                // Does what mv(1) does with a directory of a lower layer.
                fs_err::symlink_metadata(at(from)).is_ok_and(|stat| stat.is_dir())
                    && !to.starts_with(from)
                    && fs_err::symlink_metadata(at(to)).is_err()
                    && copy_tree(&at(from), &at(to)).is_ok()
                    && remove(&at(from))
            }
            Self::Link(from, to) => fs_err::hard_link(at(from), at(to)).is_ok(),
            Self::Symlink(path, n) => symlink(format!("to-{n}"), at(path)).is_ok(),
            Self::Special(path, fifo) => {
                let (kind, device) = if *fifo {
                    (SFlag::S_IFIFO, 0)
                } else {
                    (SFlag::S_IFCHR, makedev(1, 5))
                };
                mknod(&at(path), kind, Mode::S_IRUSR, device).is_ok()
            }
            Self::Mode(path, mode) => {
                fs_err::symlink_metadata(at(path)).is_ok_and(|stat| !stat.is_symlink())
                    && fs_err::set_permissions(at(path), PermissionsExt::from_mode(*mode)).is_ok()
            }
            Self::Owner(path, id) => {
                std::os::unix::fs::lchown(at(path), Some(*id), Some(id * 2)).is_ok()
            }
            Self::Attribute(path, n) => {
                let (name, value) = (format!("trusted.t{}", n % 3), n.to_string());
                let flags = rustix::fs::XattrFlags::empty();
                rustix::fs::lsetxattr(at(path), name, value.as_bytes(), flags).is_ok()
            }
            Self::Time(path, seconds) => {
                let time = TimeSpec::new(*seconds, 987_654_321);
                let flag = UtimensatFlags::NoFollowSymlink;
                utimensat(nix::fcntl::AT_FDCWD, &at(path), &time, &time, flag).is_ok()
            }
        }
    }
}

fn write(path: &Path, create: bool, content: &[u8]) -> bool {
    let mut options = fs_err::OpenOptions::new();
    options
        .write(create)
        .append(!create)
        .create(create)
        .truncate(create);
    // A FIFO may have this name.
    options.custom_flags(nix::libc::O_NONBLOCK | nix::libc::O_NOFOLLOW);
    options
        .open(path)
        .is_ok_and(|mut file| file.write_all(content).is_ok())
}

fn remove(path: &Path) -> bool {
    fs_err::symlink_metadata(path).is_ok() && remove_tree(path).is_ok()
}

/// How often the random changes made something that is hard to merge.
#[derive(Debug, Default)]
struct Seen {
    whiteouts: Cell<u64>,
    opaque: Cell<u64>,
    kept_whiteouts: Cell<u64>,
    kept_opaque: Cell<u64>,
}

#[test]
fn merged_layers_show_what_their_stack_shows() {
    let fs = LoopFs::sized(Kind::Ext4, 512 << 20);
    let layers = prop::collection::vec(prop::collection::vec(change(), 1..14), 2..6);
    let image = prop::collection::vec(change(), 0..40);
    let config = Config {
        cases: 200,
        failure_persistence: None,
        ..Config::default()
    };
    let seen = Seen::default();
    TestRunner::new(config)
        .run(
            &(image, layers, any::<(u8, u8)>()),
            |(image, layers, range)| {
                let case = fs.join("case");
                remove_tree(&case).unwrap();
                check(&case, &image, &layers, range, &seen);
                Ok(())
            },
        )
        .unwrap();
    let Seen {
        whiteouts,
        opaque,
        kept_whiteouts,
        kept_opaque,
    } = &seen;
    for count in [whiteouts, opaque, kept_whiteouts, kept_opaque] {
        assert!(count.get() >= 5, "{seen:?}");
    }
}

fn check(case: &Path, image: &[Change], layers: &[Vec<Change>], range: (u8, u8), seen: &Seen) {
    let at = case.join("at");
    let base = case.join("image");
    fs_err::create_dir_all(&at).unwrap();
    fs_err::create_dir(&base).unwrap();
    for change in image {
        change.apply(&base);
    }
    let mut diffs: Vec<PathBuf> = Vec::new();
    for (n, changes) in layers.iter().enumerate() {
        let (diff, work) = (case.join(format!("diff{n}")), case.join(format!("work{n}")));
        let upper = overlay::Upper {
            diff: &diff,
            work: &work,
        };
        let lowers = stack(&diffs, &base);
        overlay::create_upper(upper, &lowers[0]).unwrap();
        overlay::mount(&lowers, Some(upper), &at).unwrap();
        let _mount = Mount(at.clone());
        for change in changes {
            change.apply(&at);
        }
        diffs.push(diff);
    }
    for diff in &diffs {
        count(diff, &seen.whiteouts, &seen.opaque);
    }
    let show = |diffs: &[PathBuf]| {
        overlay::mount(&stack(diffs, &base), None, &at).unwrap();
        let _mount = Mount(at.clone());
        walk(&at, MERGED)
    };
    let expected = show(&diffs);
    let all = case.join("all");
    flatten(std::slice::from_ref(&base), &diffs, &all).unwrap();
    count(&all, &seen.kept_whiteouts, &seen.kept_opaque);
    assert_same(&expected, &show(std::slice::from_ref(&all)), "all layers");
    // Merges any neighbours, with layers left below and above.
    let first = usize::from(range.0) % diffs.len();
    let last = first + usize::from(range.1) % (diffs.len() - first);
    let part = case.join("part");
    let mut below = vec![base.clone()];
    below.extend_from_slice(&diffs[..first]);
    flatten(&below, &diffs[first..=last], &part).unwrap();
    let mut mixed = diffs.clone();
    mixed.splice(first..=last, [part]);
    assert_same(&expected, &show(&mixed), "neighbours");
    // A merged layer does not need its sources, and can be merged again.
    flatten(&below[..1], &mixed, &case.join("again")).unwrap();
    for diff in &diffs {
        remove_tree(diff).unwrap();
    }
    assert_same(&expected, &show(&[all]), "layers removed");
    assert_same(&expected, &show(&[case.join("again")]), "merged again");
}

/// Returns the lower directories, top first and the image last.
fn stack(diffs: &[PathBuf], image: &Path) -> Vec<PathBuf> {
    let mut lowers: Vec<_> = diffs.iter().rev().cloned().collect();
    lowers.push(image.to_owned());
    lowers
}

fn count(directory: &Path, whiteouts: &Cell<u64>, opaque: &Cell<u64>) {
    let mut value = [0];
    // Most directories lack this attribute.
    let found = rustix::fs::lgetxattr(directory, "trusted.overlay.opaque", &mut value[..]);
    opaque.set(opaque.get() + u64::from(found == Ok(1) && value == *b"y"));
    for entry in fs_err::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        let stat = fs_err::symlink_metadata(&path).unwrap();
        if stat.is_dir() {
            count(&path, whiteouts, opaque);
        } else if stat.file_type().is_char_device() && stat.rdev() == 0 {
            whiteouts.set(whiteouts.get() + 1);
        }
    }
}

#[test]
fn a_layer_that_refers_to_others_is_not_merged() {
    let fs = LoopFs::sized(Kind::Ext4, 64 << 20);
    let diff = fs.join("diff");
    fs_err::create_dir_all(diff.join("moved")).unwrap();
    run(Command::new("setfattr")
        .args(["-n", "trusted.overlay.redirect", "-v", "/etc"])
        .arg(diff.join("moved")));
    let error = flatten(&[], &[diff], &fs.join("flat")).unwrap_err();
    assert!(error.message().contains("flat/moved"), "{error}");
    assert!(error.help_text().is_some());
}

/// The kernel hides whiteouts only in directories that several layers have. Elsewhere it would list them.
#[test]
fn a_deletion_of_what_nothing_below_has_leaves_no_ghost() {
    let fs = LoopFs::sized(Kind::Ext4, 64 << 20);
    let changes = [
        vec![
            Change::Directory("new".into()),
            Change::Write("new/file".into(), 1),
        ],
        vec![Change::Write("new/other".into(), 2)],
        vec![
            Change::Remove("new/file".into()),
            Change::Remove("new/other".into()),
        ],
    ];
    check(&fs.join("case"), &[], &changes, (0, 2), &Seen::default());
    let entries = fs_err::read_dir(fs.join("case/all/new")).unwrap().count();
    assert_eq!(entries, 0);
}
