//! Special files, attributes and size (cases 5 and 6 of the catalogue), and the caller's options.

use std::io::Write as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use rockenv::testing::unpack::{Devices, Limits, UnpackOptions, unpack};

use super::{Place, is_refused, refused, tar};

// Case 5: special files and attributes.

#[test]
fn case_5_device_nodes_are_skipped_and_reported_unless_asked_for() {
    let archive = tar()
        .header(b"null", b'0', 0, b"", 0o644)
        .header(b"null", b'3', 0, b"", 0o666)
        .header(b"disk", b'4', 0, b"", 0o600)
        .header(b"fifo", b'6', 0, b"", 0o620)
        .end();
    let place = Place::new();
    let report = place.unpack(&archive).unwrap();
    assert_eq!(report.dropped["device node"], 2);
    assert_eq!(place.names(), ["fifo"]);
    let fifo = fs_err::metadata(place.root().join("fifo")).unwrap();
    assert!(fifo.file_type().is_fifo() && fifo.mode() & 0o777 == 0o620);

    let place = Place::new();
    let options = UnpackOptions {
        devices: Devices::Make,
        ..UnpackOptions::default()
    };
    place.unpack_with(&archive, &options).unwrap();
    let null = fs_err::metadata(place.root().join("null")).unwrap();
    assert!(null.file_type().is_char_device());
    assert_eq!((null.rdev(), null.mode() & 0o777), (0x103, 0o666));
}

#[test]
fn case_5_a_whiteout_is_never_made() {
    let mut block = [0_u8; 512];
    block[..3].copy_from_slice(b"etc");
    block[156] = b'3';
    let place = Place::new();
    let options = UnpackOptions {
        devices: Devices::Make,
        ..UnpackOptions::default()
    };
    let report = place
        .unpack_with(&tar().seal(block).end(), &options)
        .unwrap();
    assert_eq!((report.dropped["device node"], place.names().len()), (1, 0));
}

#[test]
fn case_5_setuid_and_capabilities_survive_for_root() {
    let capability = b"\x01\0\0\x02\0\x20\0\0\0\0\0\0\0\0\0\0\0\0\0\0";
    let archive = tar()
        .pax(&[
            (b"SCHILY.xattr.security.capability", capability),
            (b"uid", b"1234"),
            (b"gid", b"5678"),
        ])
        .header(b"ping", b'0', 4, b"", 0o4755)
        .data(b"data")
        .end();
    let place = Place::new();
    let report = place.unpack(&archive).unwrap();
    assert!(report.dropped.is_empty(), "{report:?}");
    let made = fs_err::metadata(place.root().join("ping")).unwrap();
    assert_eq!(
        (made.mode() & 0o7777, made.uid(), made.gid()),
        (0o4755, 1234, 5678)
    );
    let output = Command::new("getcap")
        .arg(place.root().join("ping"))
        .output()
        .unwrap();
    assert!(
        String::from_utf8_lossy(&output.stdout).contains("cap_net_raw"),
        "{output:?}"
    );
}

#[test]
fn case_5_without_ownership_files_are_ours_and_not_setuid() {
    let archive = tar()
        .pax(&[(b"uid", b"1234")])
        .header(b"su", b'0', 0, b"", 0o6755)
        .end();
    let place = Place::new();
    let options = UnpackOptions {
        ownership: false,
        ..UnpackOptions::default()
    };
    let report = place.unpack_with(&archive, &options).unwrap();
    let made = fs_err::metadata(place.root().join("su")).unwrap();
    assert_eq!((made.mode() & 0o7777, made.uid()), (0o755, 0));
    assert_eq!(report.dropped["setuid or setgid bit"], 1);
}

#[test]
fn case_5_dangerous_attributes_are_dropped_and_reported() {
    let records: [(&[u8], &[u8]); 6] = [
        (b"SCHILY.xattr.trusted.overlay.opaque", b"y"),
        (b"SCHILY.xattr.trusted.note", b"y"),
        (b"SCHILY.xattr.user.overlay.whiteout", b"y"),
        (b"SCHILY.xattr.security.selinux", b"label"),
        (b"SCHILY.acl.access", b"user::rw-"),
        (b"SCHILY.xattr.user.note", b"with = and \0 and \n in it"),
    ];
    let place = Place::new();
    let report = place
        .unpack(
            &tar()
                .pax(&records)
                .file(b"f", b"")
                .pax(&records)
                .dir(b"d")
                .end(),
        )
        .unwrap();
    for name in [
        "xattr trusted.overlay.opaque",
        "xattr trusted.note",
        "xattr user.overlay.whiteout",
        "acl as text",
    ] {
        assert_eq!(report.dropped[name], 2, "{report:?}");
    }
    for name in ["f", "d"] {
        let output = Command::new("getfattr")
            .args(["-d", "-m", "-", "-e", "hex"])
            .arg(place.root().join(name))
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let kept: Vec<_> = text.lines().filter(|line| line.contains('=')).collect();
        assert_eq!(kept.len(), 1, "{kept:?}");
        assert!(kept[0].starts_with("user.note=0x77697468"), "{kept:?}");
    }
}

// Case 6: size.

#[test]
fn case_6_a_ratio_bomb_stops_early() {
    let mut encoder = zstd::Encoder::new(Vec::new(), 3).unwrap();
    encoder
        .write_all(&tar().header(b"zeros", b'0', 1 << 32, b"", 0o644).0)
        .unwrap();
    let zeros = vec![0; 1 << 20];
    for _ in 0..256 {
        encoder.write_all(&zeros).unwrap();
    }
    let place = Place::new();
    let outcome = place.unpack(&encoder.finish().unwrap());
    refused(outcome, "grows more than 250 times");
    assert!(fs_err::metadata(place.root().join("zeros")).unwrap().len() < 80 << 20);
}

#[test]
fn case_6_limits_on_bytes_entries_and_depth() {
    let options = |limits: Limits| UnpackOptions {
        limits,
        ..UnpackOptions::default()
    };
    let mut many = tar();
    for index in 0..100 {
        many = many.file(format!("f{index}").as_bytes(), b"");
    }
    let many = many.end();
    let limits = Limits {
        entries: 50,
        ..Limits::default()
    };
    refused(
        Place::new().unpack_with(&many, &options(limits)),
        "more than 50 entries",
    );
    let limits = Limits {
        names: 200,
        ..Limits::default()
    };
    refused(
        Place::new().unpack_with(&many, &options(limits)),
        "its names and attributes have more than 200 bytes",
    );
    let limits = Limits {
        bytes: 1000,
        ..Limits::default()
    };
    refused(
        Place::new().unpack_with(&tar().file(b"f", &[1; 1001]).end(), &options(limits)),
        "more than 1000 bytes",
    );
    let deep = b"d/".repeat(1000);
    is_refused(tar().long_name(&deep).dir(b"x"), "1000 directories deep");
    // A name with 10,000 levels is longer than any path.
    let deepest = b"d/".repeat(10_000);
    is_refused(tar().long_name(&deepest).dir(b"x"), "20000 bytes");
}

#[test]
fn cancel_stops_the_extraction() {
    let place = Place::new();
    let outcome = unpack(
        &tar().file(b"x", b"").end()[..],
        &place.root(),
        &UnpackOptions::default(),
        &AtomicBool::new(true),
        &mut |_| {},
    );
    assert_eq!(
        outcome.unwrap_err().kind(),
        rockenv::testing::error::Kind::Signal(2)
    );
}

#[test]
fn strip_components_applies_to_names_and_hard_links() {
    let place = Place::new();
    let options = UnpackOptions {
        strip_components: 1,
        ..UnpackOptions::default()
    };
    let archive = tar()
        .dir(b"top")
        .file(b"top/a", b"x")
        .hard(b"top/b", b"top/a")
        .link(b"top/c", b"top/a")
        .end();
    place.unpack_with(&archive, &options).unwrap();
    assert_eq!(place.names(), ["a", "b", "c"]);
    assert_eq!(fs_err::metadata(place.root().join("a")).unwrap().nlink(), 2);
    // Components are counted as GNU tar counts them.
    let sample = tempfile::tempdir().unwrap();
    let at = |path: &str| sample.path().join(path);
    fs_err::create_dir_all(at("rootfs/bin")).unwrap();
    fs_err::write(at("rootfs/bin/f"), "f").unwrap();
    fs_err::hard_link(at("rootfs/bin/f"), at("rootfs/bin/hard")).unwrap();
    let gnu_tar = super::compared::gnu_tar;
    for name in [".", "./rootfs", "rootfs/./bin", "rootfs"] {
        let archive = gnu_tar(sample.path(), &["-c", name]);
        for strip in [1, 2, 3] {
            let (ours, theirs) = (Place::new(), Place::new());
            let options = UnpackOptions {
                strip_components: strip,
                ..UnpackOptions::default()
            };
            ours.unpack_with(&archive, &options).unwrap();
            let file = tempfile::NamedTempFile::new().unwrap();
            fs_err::write(file.path(), &archive).unwrap();
            let strip = format!("--strip-components={strip}");
            let file = file.path().to_str().unwrap();
            gnu_tar(&theirs.root(), &["-x", "-f", file, &strip]);
            assert_eq!(ours.names(), theirs.names(), "{name} {strip}");
        }
    }
}

#[test]
fn a_stream_may_be_read_in_pieces() {
    let place = Place::new();
    let archive = tar().file(b"x", &[5; 5000]).file(b"y", b"").end();
    struct Slow<'a>(&'a [u8]);
    impl std::io::Read for Slow<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let length = buffer.len().min(7);
            self.0.read(&mut buffer[..length])
        }
    }
    unpack(
        Slow(&archive),
        &place.root(),
        &UnpackOptions::default(),
        &AtomicBool::new(false),
        &mut |_| {},
    )
    .unwrap();
    assert_eq!(fs_err::read(place.root().join("x")).unwrap(), [5; 5000]);
}
