//! Deletion is complete, and never touches anything outside the tree.

use std::ffi::OsStr;
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::Command;

use nix::fcntl::{OFlag, open, openat};
use nix::sys::stat::{Mode, SFlag, mkdirat, mknod};
use rockenv::testing::error::Kind as ErrorKind;
use rockenv::testing::remove_tree;

use crate::support::loopfs::{Kind, LoopFs, bind, need_root, run};

const DIRECTORY: OFlag = OFlag::O_DIRECTORY
    .union(OFlag::O_RDONLY)
    .union(OFlag::O_CLOEXEC);

fn temporary() -> tempfile::TempDir {
    need_root();
    // In memory: these tests do not depend on the file system, and disks are slow with directories.
    tempfile::tempdir_in("/dev/shm").unwrap()
}

#[test]
fn what_is_missing_is_removed_already() {
    let place = temporary();
    remove_tree(&place.path().join("no")).unwrap();
    remove_tree(&place.path().join("no/where")).unwrap();
    symlink("loop", place.path().join("loop")).unwrap();
    remove_tree(&place.path().join("loop/where")).unwrap_err();
}

#[test]
fn every_kind_of_entry_goes() {
    for kind in Kind::ALL {
        let fs = LoopFs::sized(kind, 512 << 20);
        let tree = fs.join("tree");
        fs_err::create_dir_all(tree.join("a/b/empty")).unwrap();
        fs_err::write(
            tree.join(OsStr::from_bytes(b"a/\xff\xfe\n")),
            vec![7; 100_000],
        )
        .unwrap();
        for (name, kind) in [
            ("fifo", SFlag::S_IFIFO),
            ("socket", SFlag::S_IFSOCK),
            ("char", SFlag::S_IFCHR),
        ] {
            mknod(&tree.join(name), kind, Mode::S_IRUSR, 0).unwrap();
        }
        symlink("/", tree.join("a/root")).unwrap();
        symlink("nowhere", tree.join("a/dangling")).unwrap();
        fs_err::File::create(tree.join("sparse"))
            .unwrap()
            .set_len(10 << 30)
            .unwrap();
        fs_err::create_dir(tree.join("locked")).unwrap();
        fs_err::write(tree.join("locked/file"), "").unwrap();
        fs_err::set_permissions(tree.join("locked"), PermissionsExt::from_mode(0o0)).unwrap();
        // One inode also has a name outside, which keeps its content.
        fs_err::write(fs.join("outside"), vec![7; 500_000]).unwrap();
        fs_err::hard_link(fs.join("outside"), tree.join("inside")).unwrap();
        nix::unistd::syncfs(open(fs.path(), DIRECTORY, Mode::empty()).unwrap()).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
        assert_eq!(fs_err::read(fs.join("outside")).unwrap().len(), 500_000);
    }
}

#[test]
fn a_link_or_file_is_removed_itself() {
    let place = temporary();
    let (target, link) = (place.path().join("target"), place.path().join("link"));
    fs_err::create_dir(&target).unwrap();
    fs_err::write(target.join("kept"), "").unwrap();
    symlink(&target, &link).unwrap();
    remove_tree(&link).unwrap();
    assert!(target.join("kept").exists() && fs_err::symlink_metadata(&link).is_err());
    remove_tree(&target.join("kept")).unwrap();
    assert!(!target.join("kept").exists());
}

/// Case 13 of the catalogue: a bind mount has the tree's device number, so only openat2 sees the border.
#[test]
fn a_bind_mount_of_the_same_file_system_is_refused_before_anything_is_lost() {
    for kind in Kind::ALL {
        let fs = LoopFs::sized(kind, 512 << 20);
        let (source, tree) = (fs.join("source"), fs.join("tree"));
        fs_err::create_dir(&source).unwrap();
        fs_err::write(source.join("sentinel"), "precious").unwrap();
        fs_err::create_dir_all(tree.join("a/mount point")).unwrap();
        fs_err::write(tree.join("a/file"), "").unwrap();
        let mount = bind(&source, &tree.join("a/mount point"));
        let error = remove_tree(&tree).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.message().contains("a/mount point"), "{error}");
        assert!(error.help_text().unwrap().contains("umount"));
        assert!(tree.join("a/file").exists(), "nothing is touched");
        assert_eq!(remove_tree(&mount.0).unwrap_err().kind(), ErrorKind::Busy);
        assert_eq!(
            fs_err::read_to_string(source.join("sentinel")).unwrap(),
            "precious"
        );
        drop(mount);
        remove_tree(&tree).unwrap();
        assert_eq!(
            fs_err::read_to_string(source.join("sentinel")).unwrap(),
            "precious"
        );
    }
}

#[test]
fn a_bind_mounted_file_is_refused() {
    let place = LoopFs::sized(Kind::Ext4, 64 << 20);
    let (source, tree) = (place.join("source"), place.join("tree"));
    fs_err::write(&source, "precious").unwrap();
    fs_err::create_dir(&tree).unwrap();
    fs_err::write(tree.join("file"), "").unwrap();
    let _mount = bind(&source, &tree.join("file"));
    assert_eq!(remove_tree(&tree).unwrap_err().kind(), ErrorKind::Busy);
    assert_eq!(fs_err::read_to_string(&source).unwrap(), "precious");
}

/// The check of the mount list is only a courtesy: these mounts appear during the deletion.
#[test]
fn a_mount_that_appears_meanwhile_is_not_crossed() {
    let fs = LoopFs::sized(Kind::Ext4, 512 << 20);
    let (source, tree) = (fs.join("source"), fs.join("tree"));
    fs_err::create_dir(&source).unwrap();
    for n in 0..50 {
        fs_err::write(source.join(format!("sentinel{n}")), "precious").unwrap();
    }
    let at = |n: usize| tree.join(format!("{n}/x/y"));
    let mut refused = 0;
    for _ in 0..10 {
        for n in 0..200 {
            fs_err::create_dir_all(at(n)).unwrap();
            for f in 0..20 {
                fs_err::write(tree.join(format!("{n}/x/{f}")), "").unwrap();
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let gone = |n: &usize| !at(*n).exists();
                while !(0..200).step_by(10).any(|n| gone(&n)) {}
                for n in 0..200 {
                    let flags = nix::mount::MsFlags::MS_BIND;
                    let _ =
                        nix::mount::mount(Some(&source), &at(n), None::<&str>, flags, None::<&str>);
                }
            });
            if let Err(error) = remove_tree(&tree) {
                refused += 1;
                assert_eq!(error.kind(), ErrorKind::Busy, "{error:?}");
                assert!(error.message().contains("/x/y"), "{error}");
            }
        });
        for n in 0..200 {
            let _ = nix::mount::umount2(&at(n), nix::mount::MntFlags::MNT_DETACH);
        }
        assert_eq!(fs_err::read_dir(&source).unwrap().count(), 50);
        remove_tree(&tree).unwrap();
    }
    assert!(refused > 0, "no mount was in time");
}

/// The deletion lists all directories first. The test swaps them before the deletion opens them.
#[test]
fn a_directory_swapped_for_a_link_leads_nowhere() {
    let place = temporary();
    let (victim, tree) = (place.path().join("victim"), place.path().join("tree"));
    for n in 0..20 {
        fs_err::create_dir_all(victim.join(format!("d{n}"))).unwrap();
        fs_err::write(victim.join(format!("d{n}/precious")), "").unwrap();
        fs_err::write(victim.join(format!("{n}")), "precious").unwrap();
    }
    let at = |n: usize| tree.join(n.to_string());
    let mut swapped = 0;
    for _ in 0..10 {
        for n in 0..300 {
            fs_err::create_dir_all(at(n)).unwrap();
            for f in 0..20 {
                fs_err::write(at(n).join(f.to_string()), "").unwrap();
            }
        }
        std::thread::scope(|scope| {
            scope.spawn(|| {
                while (0..300).step_by(10).all(|n| at(n).exists()) {}
                for n in 0..300 {
                    let aside = tree.join(format!("aside-{n}"));
                    if fs_err::rename(at(n), aside).is_ok() {
                        swapped += usize::from(symlink(&victim, at(n)).is_ok());
                    }
                }
            });
            // A tree that changes may stay in part. What counts is where the deletion went.
            drop(remove_tree(&tree));
        });
        for n in 0..20 {
            assert!(victim.join(format!("d{n}/precious")).exists());
            assert!(victim.join(format!("{n}")).exists());
        }
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }
    assert!(swapped > 0, "nothing was swapped in time");
}

#[test]
fn immutable_and_append_only_entries_are_removed() {
    let fs = LoopFs::sized(Kind::Ext4, 128 << 20);
    let tree = fs.join("tree");
    fs_err::create_dir_all(tree.join("fixed/inner")).unwrap();
    fs_err::create_dir_all(tree.join("grows")).unwrap();
    for name in ["fixed/file", "fixed/inner/file", "grows/file"] {
        fs_err::write(tree.join(name), "").unwrap();
    }
    fs_err::write(fs.join("outside"), "").unwrap();
    fs_err::hard_link(fs.join("outside"), tree.join("shared")).unwrap();
    for (flag, name) in [
        ("+i", "fixed/file"),
        ("+i", "shared"),
        ("+a", "grows/file"),
        ("+i", "fixed/inner"),
        ("+i", "fixed"),
        ("+a", "grows"),
        ("+i", "."),
    ] {
        run(Command::new("chattr").arg(flag).arg(tree.join(name)));
    }
    remove_tree(&tree).unwrap();
    assert!(!tree.exists());
    let flags = run(Command::new("lsattr").arg(fs.join("outside")));
    assert!(flags.split(' ').next().unwrap().contains('i'), "{flags}");
    run(Command::new("chattr").arg("-i").arg(fs.join("outside")));
}

fn make_chain(top: &Path, depth: usize, comb: bool) {
    fs_err::create_dir(top).unwrap();
    let mut at: OwnedFd = open(top, DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..depth {
        if comb {
            mkdirat(at.as_fd(), c"a", Mode::S_IRWXU).unwrap();
            mkdirat(at.as_fd(), c"z", Mode::S_IRWXU).unwrap();
        }
        mkdirat(at.as_fd(), c"deep", Mode::S_IRWXU).unwrap();
        at = openat(at.as_fd(), c"deep", DIRECTORY, Mode::empty()).unwrap();
    }
}

#[test]
fn depth_costs_neither_stack_nor_descriptors() {
    let place = temporary();
    let limit = nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap();
    for comb in [false, true] {
        let tree = place.path().join("tree");
        make_chain(&tree, 10_000, comb);
        // The name that the deletion would give a subtree that it moves up.
        fs_err::create_dir(tree.join(".rockenv-deep-0")).unwrap();
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }
    assert_eq!(
        limit,
        nix::sys::resource::getrlimit(nix::sys::resource::Resource::RLIMIT_NOFILE).unwrap()
    );
}

#[test]
fn many_deep_branches_stay_within_the_usual_descriptor_limit() {
    let place = temporary();
    let tree = place.path().join("tree");
    fs_err::create_dir(&tree).unwrap();
    for n in 0..60 {
        make_chain(&tree.join(format!("branch{n}")), 120, n % 2 == 0);
    }
    let child = helper("remove", &tree)
        .env("ROCKENV_TEST_NOFILE", "256")
        .output()
        .unwrap();
    assert!(
        child.status.success(),
        "{}",
        String::from_utf8_lossy(&child.stderr)
    );
    assert!(!tree.exists());
}

#[test]
fn a_killed_deletion_is_finished_by_the_next() {
    let place = temporary();
    let tree = place.path().join("tree");
    let mut partial = 0;
    for round in 0..12 {
        for d in 0..150 {
            let directory = tree.join(format!("{d}/x"));
            fs_err::create_dir_all(&directory).unwrap();
            for f in 0..40 {
                fs_err::write(directory.join(f.to_string()), "").unwrap();
            }
        }
        make_chain(&tree.join("chain"), 500, true);
        let mut child = helper("remove", &tree).spawn().unwrap();
        // Killed at another point of the deletion each time, however long the process takes to start.
        let gone = |d: &usize| !tree.join(format!("{d}/x")).exists();
        while (0..150).filter(gone).count() <= 12 * round && child.try_wait().unwrap().is_none() {}
        child.kill().unwrap();
        child.wait().unwrap();
        partial += usize::from(tree.exists());
        remove_tree(&tree).unwrap();
        assert!(!tree.exists());
    }
    assert!(partial > 0, "no deletion was caught in the middle");
}

/// Starts this program again to do one thing in a child process.
fn helper(what: &str, path: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command
        .args(["--exact", "rootfs::remove::helper_process", "--nocapture"])
        .env("ROCKENV_TEST_HELPER", what)
        .env("ROCKENV_TEST_PATH", path)
        .stdout(std::process::Stdio::null());
    command
}

#[test]
fn helper_process() {
    let variable = |name: &str| {
        std::env::vars_os()
            .find(|(key, _)| key == name)
            .map(|(_, value)| value)
    };
    if variable("ROCKENV_TEST_HELPER").is_none() {
        return;
    }
    if let Some(limit) = variable("ROCKENV_TEST_NOFILE") {
        let limit = limit.to_str().unwrap().parse().unwrap();
        let resource = nix::sys::resource::Resource::RLIMIT_NOFILE;
        nix::sys::resource::setrlimit(resource, limit, limit).unwrap();
    }
    remove_tree(Path::new(&variable("ROCKENV_TEST_PATH").unwrap())).unwrap();
}
