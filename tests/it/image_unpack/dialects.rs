//! Archives from old and careless archivers that GNU tar accepts: the extracted tree is the same.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant, SystemTime};

use rockenv::testing::digest::{compare, digest};
use rockenv::testing::error::Result;
use rockenv::testing::unpack::{Devices, UnpackOptions, UnpackReport};

use super::compared::gnu_tar;
use super::{Place, Tar, tar};

/// Extracts an archive here and with GNU tar, and expects the same tree.
pub(super) fn as_gnu_tar(archive: &[u8]) -> Place {
    let began = SystemTime::now() - Duration::from_secs(1);
    let theirs = tempfile::tempdir().unwrap();
    fs_err::write(theirs.path().join("archive"), archive).unwrap();
    let root = theirs.path().join("root");
    fs_err::create_dir(&root).unwrap();
    let how = [
        "-x",
        "-p",
        "--numeric-owner",
        "--xattrs",
        "--xattrs-include=*",
        "-f",
        "../archive",
    ];
    gnu_tar(&root, &how);
    let ours = Place::new();
    extract(&ours, archive).unwrap();
    let differences = compare(&root, &ours.root(), 1000, &AtomicBool::new(false)).unwrap();
    // GNU tar leaves a directory that the archive does not list with the time of the extraction.
    let is_made_now = |path: &Path| {
        let made = fs_err::symlink_metadata(root.join(path)).unwrap();
        made.is_dir() && made.modified().unwrap() >= began
    };
    let differences: Vec<_> = differences
        .into_iter()
        .filter(|one| !(one.what.starts_with("mtime ") && is_made_now(one.path.as_ref())))
        .collect();
    assert!(differences.is_empty(), "{differences:#?}");
    ours
}

/// Extracts everything in an archive, including devices.
pub(super) fn extract(place: &Place, archive: &[u8]) -> Result<UnpackReport> {
    let options = UnpackOptions {
        devices: Devices::Make,
        ..UnpackOptions::default()
    };
    place.unpack_with(archive, &options)
}

/// Returns an archive whose first entry is the directory itself.
fn start() -> Tar {
    tar().dir(b"./")
}

/// Returns an archive with changed bytes in its header, and the checksum that `sum` computes.
fn changed(at: usize, bytes: &[u8], sum: impl Fn(&[u8]) -> i64) -> Tar {
    let mut archive = tar().header(b"file-\xc4\xd6", b'0', 4, b"", 0o640).0;
    archive[at..at + bytes.len()].copy_from_slice(bytes);
    archive[148..156].copy_from_slice(b"        ");
    let sum = sum(&archive);
    archive[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
    Tar([start().0, archive].concat()).data(b"data")
}

fn unsigned(header: &[u8]) -> i64 {
    header.iter().map(|byte| i64::from(*byte)).sum()
}

#[test]
fn a_size_of_what_has_no_data_means_nothing() {
    let place = as_gnu_tar(
        &start()
            .header(b"d/", b'5', 255, b"", 0o750)
            .file(b"file", b"text")
            .header(b"fifo", b'6', 5, b"", 0o640)
            .header(b"hard", b'1', 5, b"file", 0o640)
            .header(b"null", b'3', 5, b"", 0o666)
            .header(b"link", b'2', 5, b"missing", 0o777)
            .header(b"disk", b'4', 5, b"", 0o660)
            .header(b"old/", b'0', 5, b"", 0o755)
            .pax(&[(b"size", b"1000000")])
            .header(b"d2/", b'5', 0, b"", 0o755)
            .file(b"last", b"more")
            .end(),
    );
    assert_eq!(
        place.names(),
        [
            "d", "d2", "disk", "fifo", "file", "hard", "last", "link", "null", "old"
        ]
    );
}

#[test]
fn an_incremental_archive_lists_files_in_its_directories() {
    let list = b"Yfile\0Nother\0\0";
    let place = as_gnu_tar(
        &start()
            .header(b"d/", b'D', list.len() as u64, b"", 0o750)
            .data(list)
            .file(b"d/file", b"text")
            // The directory's time again.
            .header(b"d/", b'D', 0, b"", 0o750)
            .end(),
    );
    assert_eq!(place.names(), ["d", "d/file"]);
}

#[test]
fn of_several_headers_of_one_kind_the_last_one_counts() {
    let place = as_gnu_tar(
        &start()
            .dir(b"two")
            .long_name(b"one/long")
            .long_name(b"two/long")
            .header(b"././@LongLink", b'K', 6, b"", 0o644)
            .data(b"first\0")
            .header(b"././@LongLink", b'K', 7, b"", 0o644)
            .data(b"second\0")
            .link(b"bar", b"foo")
            .pax(&[(b"path", b"one/pax"), (b"linkpath", b"first")])
            .pax(&[(b"linkpath", b"second")])
            .link(b"baz", b"foo")
            .dir(b"two")
            .end(),
    );
    assert_eq!(place.names(), ["baz", "two", "two/long"]);
}

#[test]
fn a_long_name_ends_at_its_first_nul() {
    let place = as_gnu_tar(
        &start()
            .long_name(b"0123456789\x00123456789")
            .file(b"x", b"text")
            .end(),
    );
    assert_eq!(place.names(), ["0123456789"]);
}

#[test]
fn the_nul_that_ends_a_text_in_c_is_no_part_of_a_name() {
    let place = as_gnu_tar(
        &start()
            .pax(&[(b"path", b"0123456789\0")])
            .file(b"x", b"text")
            .pax(&[(b"linkpath", b"0123456789\0\0")])
            .link(b"link", b"x")
            .end(),
    );
    assert_eq!(place.names(), ["0123456789", "link"]);
}

/// GNU tar accepts these, but it has to guess, and other readers guess differently.
#[test]
fn what_only_guesses_could_complete_is_refused() {
    let refuse = |archive: &[u8], part: &str| super::refused(Place::new().unpack(archive), part);
    for time in [&b"999xxx9324.432432444444"[..], b"1.5x", b""] {
        let archive = tar().pax(&[(b"mtime", time)]).file(b"x", b"");
        refuse(&archive.end(), "is not a time");
    }
    for name in [&b"file.txt\0.exe"[..], b"\0"] {
        let archive = tar().pax(&[(b"path", name)]).file(b"x", b"");
        assert!(Place::new().unpack(&archive.end()).is_err(), "{name:?}");
    }
    let headers = [
        tar().pax(&[(b"path", b"long")]),
        tar().long_name(b"long"),
        start().file(b"x", b"").pax(&[(b"path", b"long")]),
    ];
    for headers in headers {
        for archive in [headers.0.clone(), headers.end()] {
            refuse(&archive, "an entry that does not follow");
        }
    }
}

#[test]
fn a_checksum_may_be_of_signed_bytes() {
    let signed = |header: &[u8]| {
        let bytes = header.iter();
        bytes.map(|byte| i64::from(byte.cast_signed())).sum()
    };
    as_gnu_tar(&changed(0, b"", signed).end());
    as_gnu_tar(&changed(0, b"", unsigned).end());
    let neither = changed(0, b"", |header| unsigned(header) + 1);
    super::refused(Place::new().unpack(&neither.end()), "wrong checksum");
}

#[test]
fn the_owner_that_chown_leaves_alone_is_root() {
    let last = b"\x80\0\0\0\xff\xff\xff\xff\x80\0\0\0\xff\xff\xff\xff";
    let place = as_gnu_tar(&changed(108, last, unsigned).end());
    let pax = start()
        .pax(&[(b"uid", b"4294967295"), (b"gid", b"7")])
        .file(b"pax", b"");
    as_gnu_tar(&pax.end());
    let mut entries = fs_err::read_dir(place.root()).unwrap();
    let made = entries.next().unwrap().unwrap().metadata().unwrap();
    assert_eq!((made.uid(), made.gid()), (0, 0));
}

#[test]
fn solaris_had_extended_headers_first() {
    let place = as_gnu_tar(
        &start()
            .pax_kind(b'X', &[(b"path", b"long")])
            .file(b"short", b"text")
            .end(),
    );
    assert_eq!(place.names(), ["long"]);
}

#[test]
fn a_sparse_file_larger_than_the_disk_takes_no_time() {
    let size = 60_000_000_000_u64;
    let map = format!("1\n{}\n512\n", size - 512);
    let block = [
        map.as_bytes(),
        &vec![0; 512 - map.len()],
        &b"x".repeat(512)[..],
    ]
    .concat();
    let (text, name) = (size.to_string(), b"sparse".as_slice());
    let pax = |archive: Tar| {
        archive
            .pax(&[
                (b"GNU.sparse.major", b"1"),
                (b"GNU.sparse.minor", b"0"),
                (b"GNU.sparse.name", name),
                (b"GNU.sparse.realsize", text.as_bytes()),
            ])
            .file(b"x", &block)
    };
    let began = Instant::now();
    let place = as_gnu_tar(&pax(start()).end());
    let one = digest(&place.root(), &AtomicBool::new(false)).unwrap();
    assert!(
        began.elapsed() < Duration::from_secs(60),
        "{:?}",
        began.elapsed()
    );
    assert_eq!(one.bytes, size);
    let made = fs_err::metadata(place.root().join("sparse")).unwrap();
    assert_eq!((made.len(), made.blocks() <= 16), (size, true));
}
