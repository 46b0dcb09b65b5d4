//! An ordinary user's store, with files of the user's subordinate ids.

use std::os::unix::fs::{PermissionsExt as _, chown};
use std::process::Command;

use fs_err as fs;
use serde_json::Value;

use super::support::loopfs::{Kind, LoopFs, run};
use super::support::ordinary::MadeUp;
use super::support::run::sha256;
use super::{MIB, check, near, number};

/// Returns a user with a store on a disk of this kind.
fn user(disk: &LoopFs) -> MadeUp {
    // What a test mounts is root's.
    let above = disk.path().parent().unwrap();
    fs::set_permissions(above, std::fs::Permissions::from_mode(0o755)).unwrap();
    let user = MadeUp::at(disk.join("home"));
    let tree = user.home.join("tree");
    let make = "mkdir -p $1/etc $1/bin images; echo ID=tiny > $1/etc/os-release; cp /bin/true $1/bin/sh; tar -C $1 -cf tiny.tar .";
    let tree = tree.display().to_string();
    run(&mut user.command("sh", &["-euc", make, "sh", &tree]));
    let archive = user.home.join("tiny.tar");
    let recipe = format!(
        "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = '{}'\nsha256 = '{}'\n",
        archive.display(),
        sha256(&archive)
    );
    fs::write(user.home.join("images/tiny.toml"), recipe).unwrap();
    user.rockenv(&["image", "build", "tiny"]);
    user
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
