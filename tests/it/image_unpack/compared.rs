//! Extracts archives that GNU tar makes, and expects the same result as from GNU tar.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::AtomicBool;

use rockenv::testing::digest::compare;
use rockenv::testing::unpack::{Devices, UnpackOptions};

use super::Place;

fn sample(root: &Path) {
    let write = |name: &[u8], data: &[u8], mode: u32| {
        let path = root.join(OsStr::from_bytes(name));
        fs_err::create_dir_all(path.parent().unwrap()).unwrap();
        fs_err::write(&path, data).unwrap();
        fs_err::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        path
    };
    write(b"plain", b"text", 0o644);
    write(b"empty", b"", 0o400);
    write(b"block", &[9; 512], 0o640);
    write(b"large", &vec![b'L'; 3 << 20], 0o600);
    write(b"caf\xe9/\xff", b"not utf-8", 0o644);
    write(
        &[b"long-".repeat(40), b"/".to_vec(), b"name-".repeat(45)].concat(),
        b"long",
        0o644,
    );
    let deep: Vec<u8> = [vec![b'd'; 240], b"/".to_vec()].concat().repeat(15);
    // The temporary directory's own path counts against PATH_MAX here, not in the extraction.
    write(&[&deep[..], b"file"].concat(), b"deep", 0o644);
    let su = write(b"su", b"binary", 0o755);
    std::os::unix::fs::chown(&su, Some(70_000), Some(3_000_000)).unwrap();
    fs_err::set_permissions(&su, std::fs::Permissions::from_mode(0o6755)).unwrap();
    fs_err::hard_link(root.join("plain"), root.join("z-hard")).unwrap();
    symlink("plain", root.join("link")).unwrap();
    symlink("/absolute/".repeat(30), root.join("long-link")).unwrap();
    symlink("../../outside", root.join("dangling")).unwrap();
    fs_err::hard_link(root.join("link"), root.join("z-hard-link")).unwrap();
    fs_err::create_dir(root.join("sticky")).unwrap();
    fs_err::set_permissions(root.join("sticky"), std::fs::Permissions::from_mode(0o3777)).unwrap();
    fs_err::create_dir(root.join("readonly")).unwrap();
    fs_err::write(root.join("readonly/f"), "f").unwrap();
    fs_err::set_permissions(
        root.join("readonly"),
        std::fs::Permissions::from_mode(0o555),
    )
    .unwrap();
    let run = |program: &str, args: &[&OsStr]| {
        let status = Command::new(program).args(args).status().unwrap();
        assert!(status.success(), "{program}");
    };
    run("mkfifo", &[root.join("fifo").as_os_str()]);
    run(
        "mknod",
        &[
            root.join("node").as_os_str(),
            "c".as_ref(),
            "1".as_ref(),
            "3".as_ref(),
        ],
    );
    let ping = write(b"ping", b"binary", 0o755);
    run("setcap", &["cap_net_raw+ep".as_ref(), ping.as_os_str()]);
    run(
        "setfattr",
        &[
            "-n".as_ref(),
            "user.note".as_ref(),
            "-v".as_ref(),
            "v".as_ref(),
            ping.as_os_str(),
        ],
    );
    run(
        "touch",
        &[
            "-d".as_ref(),
            "1960-01-01 00:00:00.25Z".as_ref(),
            root.join("empty").as_os_str(),
        ],
    );
    for (name, count) in [("sparse", 3_u64), ("very-sparse", 30)] {
        let path = root.join(name);
        let file = fs_err::File::create(&path).unwrap();
        for index in 0..count {
            use std::os::unix::fs::FileExt as _;
            file.file()
                .write_at(&[b'S'; 4096], index * (1 << 20) + 65536)
                .unwrap();
        }
        file.set_len(count * (1 << 20) + 12_345).unwrap();
    }
}

pub(crate) fn gnu_tar(directory: &Path, args: &[&str]) -> Vec<u8> {
    let output = Command::new("tar")
        .current_dir(directory)
        .args(args)
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{args:?}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    output.stdout
}

#[test]
fn the_same_tree_as_gnu_tar() {
    // ustar cannot hold most of the sample, so it gets a small tree.
    let sample_dir = tempfile::tempdir().unwrap();
    sample(sample_dir.path());
    let small = tempfile::tempdir().unwrap();
    fs_err::create_dir(small.path().join("d")).unwrap();
    fs_err::write(small.path().join("d/file"), "x").unwrap();
    symlink("d/file", small.path().join("link")).unwrap();
    let xattrs = ["--xattrs", "--xattrs-include=*"];
    let cases: [(&Path, &[&str]); 9] = [
        (sample_dir.path(), &["--format=gnu"]),
        (sample_dir.path(), &["--format=gnu", "--sparse"]),
        (sample_dir.path(), &["--format=pax", xattrs[0], xattrs[1]]),
        (
            sample_dir.path(),
            &[
                "--format=pax",
                "--sparse",
                "--sparse-version=1.0",
                xattrs[0],
                xattrs[1],
            ],
        ),
        (
            sample_dir.path(),
            &["--format=pax", "--sparse", "--sparse-version=0.1"],
        ),
        (
            sample_dir.path(),
            &["--format=pax", "--sparse", "--sparse-version=0.0", "--zstd"],
        ),
        (small.path(), &["--format=ustar", "--gzip"]),
        (small.path(), &["--format=v7"]),
        (small.path(), &["--format=oldgnu", "--xz"]),
    ];
    for (directory, how) in cases {
        let mut args = vec!["-c", "--numeric-owner", "--sort=name"];
        args.extend(how);
        args.push(".");
        let archive = gnu_tar(directory, &args);
        let theirs = tempfile::tempdir().unwrap();
        let file = theirs.path().join("archive");
        fs_err::write(&file, &archive).unwrap();
        let root = theirs.path().join("root");
        fs_err::create_dir(&root).unwrap();
        let mut extract = vec![
            "-x",
            "-p",
            "--numeric-owner",
            "--xattrs",
            "--xattrs-include=*",
        ];
        extract.extend(
            how.iter()
                .filter(|arg| ["--zstd", "--gzip", "--xz"].contains(arg)),
        );
        let name = file.to_str().unwrap();
        extract.extend(["-f", name]);
        gnu_tar(&root, &extract);

        let ours = Place::new();
        let options = UnpackOptions {
            devices: Devices::Make,
            ..UnpackOptions::default()
        };
        let report = ours.unpack_with(&archive, &options).unwrap();
        assert!(report.dropped.is_empty(), "{how:?}: {report:?}");
        let differences = compare(&root, &ours.root(), 20, &AtomicBool::new(false)).unwrap();
        assert!(differences.is_empty(), "{how:?}: {differences:#?}");
        if how.contains(&"--sparse") {
            let made = fs_err::metadata(ours.root().join("very-sparse")).unwrap();
            assert!(made.blocks() * 512 < 1 << 20, "{how:?}: {}", made.blocks());
        }
    }
}
