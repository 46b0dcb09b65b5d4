//! `setup`: what it would install, and a store image.

use std::os::unix::fs::PermissionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use fs_err as fs;

use super::{Place, Ran};
use crate::support::loopfs::{Kind, LoopFs, bind};
use crate::support::run::copy_program;

#[test]
fn setup_says_what_it_would_do() {
    let place = Place::new();
    let json = place.look(&["setup", "--dry-run", "--json"]).json();
    assert_eq!(json["schema"], "rockenv/setup/1");
    assert!(json["missing"].is_array());
    insta::assert_snapshot!(place.shows("setup --store-image lots\nsetup --store-image 10M"), @"
    $ rockenv setup --store-image lots
    error: bad size `lots`
    help: rockenv setup --store-image 300G
    exit code 2
    $ rockenv setup --store-image 10M
    error: 10.0 MiB is too small for a store
    help: rockenv setup --store-image 300G
    exit code 2
    ");
}

#[test]
fn setup_does_without_a_tool_that_the_distribution_has_no_package_of() {
    let place = Place::new();
    fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let file = |name: &str, text: &str, mode: u32| {
        let path = place.path().join(name);
        fs::write(&path, text).unwrap();
        fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    let over = |path: &Path, at: &str| bind(path, &fs::canonicalize(at).unwrap());
    let _mmdebstrap = over(&file("hidden", "", 0o644), "/usr/bin/mmdebstrap");
    let program = place.path().join("rockenv");
    copy_program(&program);
    let ran = Ran::of(
        Command::new(&program)
            .args(["setup", "--for", "images"])
            .env_clear()
            .env("HOME", place.path())
            .env("XDG_CONFIG_HOME", place.path())
            .uid(1000)
            .gid(1000),
    );
    ran.fails_after_notes(4, "help: sudo rockenv setup --for images\n");
    let _apt = over(
        &file("apt", "#!/bin/sh\nexit 100\n", 0o755),
        "/usr/bin/apt-get",
    );
    let ran = place.run(&["setup", "--for", "images", "--yes"]);
    ran.fails_after_notes(4, "help: apt-get install --yes ");

    let _os = over(&file("os", "ID=arch\n", 0o644), "/etc/os-release");
    let _pacman = over(&file("pacman", "#!/bin/sh\n", 0o755), "/usr/bin/pacman");
    let ran = place.run(&["setup", "--yes"]);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.err.contains("no package of mmdebstrap"), "{}", ran.err);
    // This env needs nothing that is missing.
    place
        .run(&["up", "none", "--setup"])
        .fails(7, "no profile or target `none`");
    let disk = LoopFs::new(Kind::Ext4);
    let place = Place(tempfile::tempdir_in(disk.path()).unwrap());
    place
        .run(&["image", "build", "debian-forky"])
        .fails_after_notes(4, "docker.io/debian:forky");
}

#[test]
fn a_store_image_is_made_mounted_and_taken_back_when_that_fails() {
    // A store on btrfs would need no image.
    let disk = LoopFs::new(Kind::Ext4);
    let place = Place(tempfile::tempdir_in(disk.path()).unwrap());
    // The test has its own mount namespace, and mounts its own `/etc` there.
    let etc = place.path().join("etc");
    let copied = Command::new("cp").arg("-a").arg("/etc").arg(&etc).status();
    assert!(copied.unwrap().success());
    let bind = nix::mount::MsFlags::MS_BIND;
    nix::mount::mount(Some(&etc), "/etc", None::<&str>, bind, None::<&str>).unwrap();
    let before = "# mine, without an end of line";
    fs::write("/etc/fstab", before).unwrap();
    fs::set_permissions("/etc/fstab", std::fs::Permissions::from_mode(0o640)).unwrap();
    let (store, image) = (place.path().join("store"), place.path().join("store.img"));
    let arguments = ["setup", "--for", "btrfs", "--store-image", "1G", "--yes"];

    // Without a terminal, the command needs `--yes`.
    place
        .run(&["setup", "--for", "btrfs", "--store-image", "1G"])
        .fails_after_notes(2, "--yes");
    assert!(!image.exists());
    let ran = place.run(&["setup", "--store-image", "1000T", "-n", "--json"]);
    assert_eq!(ran.json()["schema"], "rockenv/setup/1");
    assert!(ran.err.contains("the file may grow to"), "{}", ran.err);
    assert!(!image.exists());

    // A step that fails undoes the ones before it. Here `mount` fails as if loop devices were missing.
    let broken = place.path().join("mount");
    fs::write(&broken, "#!/bin/sh\necho no loop devices >&2\nexit 32\n").unwrap();
    fs::set_permissions(&broken, std::fs::Permissions::from_mode(0o755)).unwrap();
    let real = fs::canonicalize("/usr/bin/mount").unwrap();
    nix::mount::mount(Some(&broken), &real, None::<&str>, bind, None::<&str>).unwrap();
    let ran = place.run(&arguments);
    assert_eq!(ran.code, 1, "{}", ran.err);
    assert!(ran.err.contains("no loop devices"), "{}", ran.err);
    assert!(!image.exists() && !store.exists());
    assert_eq!(fs::read_to_string("/etc/fstab").unwrap(), before);
    nix::mount::umount2(&real, nix::mount::MntFlags::MNT_DETACH).unwrap();

    let ran = place.run(&arguments);
    assert_eq!(ran.code, 0, "{}", ran.err);
    assert!(ran.err.contains("to undo"), "{}", ran.err);
    assert!(
        fs::read_to_string(store.join("format"))
            .unwrap()
            .contains("btrfs")
    );
    // The store has no more room than the disk of its file.
    let filler = place.path().join("filler");
    let disk = nix::sys::statvfs::statvfs(place.path()).unwrap();
    let size = disk.blocks_available() * disk.fragment_size() - (64 << 20);
    let mut fill = Command::new("fallocate");
    fill.args(["-l", &size.to_string()]).arg(&filler);
    assert!(fill.status().unwrap().success());
    let du = place.run(&["du", "--json"]).json();
    let free = du["file_system"]["free"].as_u64().unwrap();
    assert!(free < 256 << 20, "{free}");
    fs::remove_file(&filler).unwrap();

    let table = fs::read_to_string("/etc/fstab").unwrap();
    assert!(
        table.starts_with(before) && table.ends_with(",x-rockenv.store 0 0\n"),
        "{table}"
    );
    assert_eq!(table.lines().count(), 2);
    let mode = fs::metadata("/etc/fstab").unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    // The undo command removes its own line of fstab, and leaves the lines of other stores.
    let name = image.to_string_lossy();
    let other = table.replace(&*name, &name.replace('.', "-"));
    let other = other.lines().last().unwrap();
    fs::write("/etc/fstab", format!("{table}{other}\n")).unwrap();
    let undo = ran.err.split(" && ").find(|part| part.starts_with("sed "));
    let edited = Command::new("sh").arg("-c").arg(undo.unwrap()).status();
    assert!(edited.unwrap().success());
    let edited = fs::read_to_string("/etc/fstab").unwrap();
    assert_eq!(edited, format!("{before}\n{other}\n"));
    fs::write("/etc/fstab", &table).unwrap();

    // A second call refuses to mount again.
    place
        .run(&arguments)
        .fails_after_notes(2, "is a mount point already");
    nix::mount::umount2(&store, nix::mount::MntFlags::empty()).unwrap();
    let ran = place.run(&arguments);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(
        ran.err.contains("/etc/fstab mounts something"),
        "{}",
        ran.err
    );
    std::os::unix::fs::symlink(place.path(), place.path().join("link")).unwrap();
    for home in ["store", "link/store"] {
        let home = place.path().join(home);
        let mut doctor = place.command();
        let doctor = Ran::of(doctor.env("ROCKENV_HOME", home).arg("doctor"));
        assert!(doctor.out.contains("it is not mounted"), "{}", doctor.out);
        assert_eq!(doctor.code, 4);
    }
    // No store is made below the mount point, at it or in it.
    for home in [store.clone(), store.join("deeper")] {
        // And its envs are not gone.
        for words in [&["image", "build", "none"][..], &["ls"]] {
            let mut command = place.command();
            let command = command.env("ROCKENV_HOME", &home);
            Ran::of(command.args(words)).fails(4, "is not mounted at `");
        }
    }
    assert_eq!(fs::read_dir(&store).unwrap().count(), 0);
    // Another file system may be mounted below it.
    let (other, inner) = (place.path().join("other"), store.join("inner"));
    for directory in [&other, &inner] {
        fs::create_dir(directory).unwrap();
    }
    nix::mount::mount(Some(&other), &inner, None::<&str>, bind, None::<&str>).unwrap();
    let mut build = place.command();
    let build = build.env("ROCKENV_HOME", inner.join("home"));
    let ran = Ran::of(build.args(["image", "build", "none"]));
    assert!(other.join("home/format").exists(), "{}", ran.err);
    nix::mount::umount2(&inner, nix::mount::MntFlags::MNT_DETACH).unwrap();
    fs::remove_dir(&inner).unwrap();

    // It also refuses a mount point that is not empty.
    fs::write("/etc/fstab", before).unwrap();
    fs::remove_file(&image).unwrap();
    fs::write(store.join("file"), "").unwrap();
    let ran = place.run(&arguments);
    assert_eq!(ran.code, 2);
    assert!(
        ran.err.contains("is not empty") && ran.err.contains("help: mv "),
        "{}",
        ran.err
    );
    fs::remove_dir_all(&store).unwrap();
    fs::write(&store, "").unwrap();
    let ran = place.run(&arguments);
    assert_eq!(ran.code, 2, "{}", ran.err);
    assert!(
        ran.err.contains("is not a directory") && ran.err.contains("help: mv "),
        "{}",
        ran.err
    );
}
