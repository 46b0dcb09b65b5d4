//! A root step leaves setuid-root programs and devices in its volumes: no other user of the machine can reach them, and
//! inside containers they give no rights.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;

use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::ordinary::MadeUp;
use crate::support::rootfs;
use crate::support::template::write_recipe;

/// Another user of the machine.
const OTHER: u32 = 4322;

fn programs(directory: &Path) -> Vec<PathBuf> {
    let text = run(Command::new("find")
        .arg(directory)
        .args(["-xdev", "-perm", "-4000", "-name", "mine"]));
    text.lines().map(PathBuf::from).collect()
}

#[test]
fn what_root_steps_leave_gives_nobody_else_rights() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = MadeUp::at(disk.join("home"));
    let images = user.home.join("images");
    fs::create_dir(&images).unwrap();
    write_recipe(&images.join("base.toml"), &rootfs());
    let leave = "for v in /v/*; do cp /usr/bin/id $v/mine; chmod 4755 $v/mine; chmod 755 $v; done; for v in build cache; do mknod -m 666 /v/$v/null c 1 3; done";
    // The build user gets neither the owner's rights nor the device.
    let use_them = "for v in /v/*; do test $($v/mine -u) != 0; done; \
                    for v in build cache; do if true > /v/$v/null; then exit 1; fi; done";
    let profile = format!(
        "schema = 1\nimage = 'base'\nvolume = [
         {{ name = 'build', kind = 'build', target = '/v/build' }},
         {{ name = 'cache', kind = 'cache', target = '/v/cache' }},
         {{ name = 'out', kind = 'output', target = '/v/out' }}]
         [[step]]\nname = 'leave'\nuser = 'root'\nrun = '''{leave}'''
         [[step]]\nname = 'use'\nrun = '''{use_them}'''\n"
    );
    fs::write(user.home.join("left.toml"), profile).unwrap();
    let path = |name: &str| user.home.join(name).to_string_lossy().into_owned();
    let up = [
        "up",
        "--name",
        "left",
        "--engine",
        "nspawn",
        &path("left.toml"),
    ];
    // The user owns the directory and trusts its image.
    let trusted = format!("ROCKENV_TRUSTED_DIRS={}", user.home.display());
    let program = path("program");
    let words: Vec<&str> = [trusted.as_str(), program.as_str()]
        .into_iter()
        .chain(up)
        .collect();
    run(&mut user.sudo("env", &words));
    let left = programs(&user.store());
    assert!(left.len() >= 3, "{left:?}");
    // The modes of the home and of the disk must not be the reason for a refusal.
    for directory in [disk.path(), &user.home] {
        fs::set_permissions(directory, std::fs::Permissions::from_mode(0o755)).unwrap();
    }
    let as_user = |uid: u32, words: &[&str]| {
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).uid(uid).gid(uid).current_dir("/");
        command.output()
    };
    for program in &left {
        let program = program.to_str().unwrap();
        let error = as_user(OTHER, &[program, "-u"]).unwrap_err();
        assert_eq!(
            error.kind(),
            std::io::ErrorKind::PermissionDenied,
            "{program}"
        );
    }
    // Users can still read their own files.
    for below in ["outputs/left/out", "caches/cache"] {
        let file = user.store().join(below).join("mine");
        let found = as_user(MadeUp::UID, &["cat", file.to_str().unwrap()]).unwrap();
        assert!(found.status.success(), "{below}: {found:?}");
    }
    // The next command that changes the store closes the directories of a store from an earlier version.
    for name in ["volumes", "outputs", "caches", "sources", "layers"] {
        let (path, old) = (user.store().join(name), user.store().join("old"));
        fs::rename(&path, &old).unwrap();
        fs::create_dir(&path).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
        for entry in fs::read_dir(&old).unwrap() {
            let entry = entry.unwrap();
            fs::rename(entry.path(), path.join(entry.file_name())).unwrap();
        }
        fs::remove_dir(&old).unwrap();
    }
    run(&mut user.sudo(user.program(), &["down", "left"]));
    for program in &left {
        let refused = as_user(OTHER, &[program.to_str().unwrap(), "-u"]);
        assert!(refused.is_err(), "{}", program.display());
    }
    let out = user.store().join("outputs/left/out/mine");
    let found = as_user(MadeUp::UID, &["cat", out.to_str().unwrap()]).unwrap();
    assert!(found.status.success(), "{found:?}");
    // The configured build user may not be the person behind sudo.
    let sources = user.store().join("sources");
    fs::remove_dir(&sources).unwrap();
    let configured = [
        "ROCKENV_BUILD_USER=1234:1234",
        program.as_str(),
        "down",
        "left",
    ];
    run(&mut user.sudo("env", &configured));
    for (uid, enters) in [(MadeUp::UID, true), (1234, true), (OTHER, false)] {
        let found = as_user(uid, &["ls", sources.to_str().unwrap()]).unwrap();
        assert_eq!(found.status.success(), enters, "{uid}: {found:?}");
    }
    run(&mut user.sudo(user.program(), &["rm", "--yes", "left"]));
}

#[test]
fn what_is_mounted_in_a_volume_gives_no_rights_either() {
    use nix::mount::{MntFlags, MsFlags, mount, umount2};

    let store = crate::support::env::TestStore::new();
    let nested = store.work().join("host/nested");
    fs::create_dir_all(&nested).unwrap();
    mount(
        Some("tmpfs"),
        &nested,
        Some("tmpfs"),
        MsFlags::empty(),
        Some("size=64k"),
    )
    .unwrap();
    let up = std::panic::catch_unwind(|| {
        store.up_with(
            "volume = [{ name = 'v', kind = 'host', path = '../host', target = '/v/v', access = 'rw' }]
             [[step]]\nname = 'look'\nrun = 'grep /v/v /proc/self/mounts'\n",
        )
    });
    umount2(&nested, MntFlags::MNT_DETACH).unwrap();
    up.unwrap_or_else(|failed| std::panic::resume_unwind(failed))
        .ok();
    let log = store.rockenv(&["logs", store.env(), "look"]).ok().text();
    assert!(log.contains("/v/v/nested"), "{log}");
    for line in log.lines() {
        assert!(line.contains("nosuid") && line.contains("nodev"), "{line}");
    }
}
