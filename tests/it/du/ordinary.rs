//! An ordinary user's store: on btrfs, which tells such a user less, and with files of the user's subordinate ids.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::{MIB, check, near, number};
use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::ordinary::MadeUp;
use crate::support::run::{sha256, wait_until};

/// Returns a user with a store on this disk.
fn user(disk: &LoopFs) -> MadeUp {
    // The mount point's parent belongs to root, so others need permission to enter it.
    let above = disk.path().parent().unwrap();
    fs::set_permissions(above, std::fs::Permissions::from_mode(0o755)).unwrap();
    let user = MadeUp::at(disk.join("home"));
    let tree = user.home.join("tree");
    let make = "mkdir -p $1/etc $1/bin; echo ID=tiny > $1/etc/os-release; cp /bin/true $1/bin/sh; tar -C $1 -cf tiny.tar .";
    let tree = tree.display().to_string();
    run(&mut user.command("sh", &["-euc", make, "sh", &tree]));
    let archive = user.home.join("tiny.tar");
    let recipe = format!(
        "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = '{}'\nsha256 = '{}'\n",
        archive.display(),
        sha256(&archive)
    );
    let images = user.home.join(".config/rockenv/images");
    fs::create_dir_all(&images).unwrap();
    fs::write(images.join("tiny.toml"), recipe).unwrap();
    let build = "umask 077; exec \"$0\" image build tiny";
    run(&mut user.command("sh", &["-c", build, user.program().to_str().unwrap()]));
    // The build user, who is another one, must be able to read what root of the user namespace makes.
    let made = fs::metadata(user.store().join("images/refs")).unwrap();
    assert_eq!(made.permissions().mode() & 0o777, 0o755);
    user
}

fn subvolumes(disk: &LoopFs) -> String {
    run(Command::new("btrfs")
        .args(["subvolume", "list"])
        .arg(disk.path()))
}

fn du(user: &MadeUp) -> Value {
    run(Command::new("sync").arg("-f").arg(user.store()));
    serde_json::from_str(&user.rockenv(&["du", "--json"])).unwrap()
}

fn cache(report: &Value, name: &str) -> u64 {
    let rows = report["rows"].as_array().unwrap().iter();
    rows.filter(|row| row["class"] == "cache" && row["name"] == name)
        .map(|row| number(&row["size"]["allocated"]))
        .sum()
}

fn a_users_store_on_btrfs(options: &str) {
    let disk = LoopFs::new(Kind::Btrfs);
    run(Command::new("mount")
        .arg("-o")
        .arg(format!("remount,{options}"))
        .arg(disk.path()));
    let user = user(&disk);
    // rockenv chose a method that the user may use, and its attempts left no subvolume.
    let format: Value =
        serde_json::from_slice(&fs::read(user.store().join("format")).unwrap()).unwrap();
    assert_eq!(format["method"], "reflink");
    assert_eq!(subvolumes(&disk), "");
    let mut doctor = user.command(user.program(), &["doctor"]);
    let said = doctor.output().unwrap();
    let said = String::from_utf8_lossy(&said.stdout).into_owned();
    assert!(said.contains("on btrfs: reflink snapshots"), "{said}");
    assert!(said.contains("btrfs: only root can inspect"), "{said}");
    assert_eq!(subvolumes(&disk), "");

    // Whole and partial clones, and small files and links, which btrfs keeps in its trees.
    let fill = "cd store/caches; mkdir clones small; cd clones; head -c 32M /dev/urandom > a; \
        for n in 1 2 3 4; do cp --reflink=always a b$n; done; \
        dd if=/dev/urandom of=b1 bs=1M count=4 seek=8 conv=notrunc status=none; \
        cd ../small; seq 4000 | split -l 1 -a 4 -d - f; for n in $(seq 1000); do ln -s f$n l$n; done";
    run(&mut user.command("sh", &["-euc", fill]));
    let report = du(&user);
    check(&report);
    near(cache(&report, "clones"), 36 * MIB, MIB / 2);
    assert!(cache(&report, "small") < MIB, "{report:#}");

    // Compressed files do not tell their size on disk, and the report says so.
    let squeezed = user.store().join("caches/squeezed");
    fs::create_dir(&squeezed).unwrap();
    run(Command::new("btrfs")
        .args(["property", "set"])
        .arg(&squeezed)
        .args(["compression", "zstd"]));
    let write = format!("yes | head -c 8M > {}/file", squeezed.display());
    run(Command::new("sh").args(["-c", &write]));
    assert_eq!(number(&du(&user)["unshared"]), 1);

    // Subvolumes that the user made are removed, including read-only and nested ones.
    let make = "cd store/caches; mkdir own; btrfs subvolume create own/a; btrfs subvolume create own/a/b; \
        echo x > own/a/b/file; btrfs property set own/a/b ro true; btrfs subvolume create own/c; echo y > own/c/file";
    run(&mut user.command("sh", &["-euc", make]));
    assert_eq!(subvolumes(&disk).lines().count(), 3);
    user.rockenv(&["--yes", "cache", "clear", "own"]);
    wait_until("the subvolumes are gone", || subvolumes(&disk).is_empty());

    user.rockenv(&["--yes", "gc"]);
    // An ordinary user may come to have a store of subvolumes. btrfs does not tell such a user when the space is free
    // again.
    let text = fs::read_to_string(user.store().join("format")).unwrap();
    fs::write(
        user.store().join("format"),
        text.replace("reflink", "btrfs"),
    )
    .unwrap();
    user.rockenv(&["--yes", "gc"]);
}

#[test]
fn a_users_store_on_btrfs_counts_and_leaves_nothing() {
    a_users_store_on_btrfs("rw");
}

#[test]
fn so_does_one_where_users_may_delete_subvolumes() {
    a_users_store_on_btrfs("user_subvol_rm_allowed");
}

#[test]
fn what_belongs_to_subordinate_ids_is_read() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = user(&disk);
    let private = user.store().join("caches/private/build");
    fs::create_dir_all(&private).unwrap();
    fs::write(private.join("file"), vec![1; 3 << 20]).unwrap();
    for path in [private.join("file"), private.clone()] {
        let owner = Some(MadeUp::SUBORDINATE + 999);
        chown(&path, owner, owner).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o700)).unwrap();
    }
    let report = du(&user);
    check(&report);
    near(cache(&report, "private"), 3 * MIB, 64 << 10);
    let listed: Value = serde_json::from_str(&user.rockenv(&["cache", "ls", "--json"])).unwrap();
    assert!(number(&listed[0]["bytes"]) >= 3 * MIB, "{listed}");
    for arguments in [&["gc", "--dry-run"][..], &["gc", "--roots"]] {
        user.rockenv(arguments);
    }
}
