//! Headers that disagree with each other or with the data (case 4 of the catalogue).

use std::os::unix::fs::MetadataExt as _;

use rockenv::testing::unpack::{Limits, UnpackOptions};

use super::{Place, Tar, is_refused, refused, tar};

// Case 4: headers that disagree.

#[test]
fn case_4_the_pax_size_wins_and_the_next_entry_is_found() {
    // RUSTSEC-2026-0068 and CVE-2025-62518: a reader that believes the other size finds entries in file data.
    for stated in [0, 512, 1 << 20] {
        let hidden = tar().file(b"hidden", b"smuggled").0;
        let place = Place::new();
        let archive = tar()
            .pax(&[(b"size", hidden.len().to_string().as_bytes())])
            .header(b"outer", b'0', stated, b"", 0o644)
            .data(&hidden)
            .file(b"after", b"x")
            .end();
        place.unpack(&archive).unwrap();
        assert_eq!(place.names(), ["after", "outer"]);
        assert_eq!(fs_err::read(place.root().join("outer")).unwrap(), hidden);
    }
}

#[test]
fn case_4_entries_that_have_no_data_are_followed_by_a_header() {
    for kind in [b'1', b'2', b'3', b'5', b'6'] {
        let archive = tar()
            .file(b"t", b"")
            .header(b"x", kind, 512, b"t", 0o644)
            .data(b"data")
            .end();
        refused(Place::new().unpack(&archive), "wrong checksum");
    }
}

#[test]
fn case_4_long_name_beside_a_different_pax_path_is_refused() {
    let both = |pax: &[u8]| {
        tar()
            .long_name(b"one")
            .pax(&[(b"path", pax)])
            .file(b"x", b"")
            .end()
    };
    refused(Place::new().unpack(&both(b"two")), "two different names");
    Place::new().unpack(&both(b"one")).unwrap();
}

#[test]
fn case_4_global_headers_give_no_names() {
    let place = Place::new();
    let archive = tar()
        .pax_kind(b'g', &[(b"comment", b"a commit")])
        .pax_kind(b'g', &[(b"mtime", b"7")])
        .file(b"x", b"");
    place.unpack(&archive.end()).unwrap();
    assert_eq!(fs_err::metadata(place.root().join("x")).unwrap().mtime(), 7);
    for key in [
        &b"path"[..],
        b"linkpath",
        b"size",
        b"SCHILY.xattr.user.x",
        b"GNU.sparse.major",
    ] {
        let archive = tar().pax_kind(b'g', &[(key, b"1")]).file(b"x", b"");
        is_refused(archive, "for all entries");
    }
}

#[test]
fn case_4_malformed_extended_headers_are_refused() {
    let raw = |data: &[u8]| {
        tar()
            .header(b"p", b'x', data.len() as u64, b"", 0o644)
            .data(data)
            .file(b"x", b"")
    };
    for data in [
        &b"5 a=b\n"[..],
        b"99 path=x\n",
        b"path=x\n",
        b"-6 a=b\n",
        b"18446744073709551616 a=b\n",
        b"\0\0",
    ] {
        is_refused(raw(data), "malformed");
    }
    is_refused(raw(b"9 size=x\n"), "not a number");
    is_refused(raw(b"10 size=-1\n"), "malformed");
    is_refused(raw(b"11 size=-1\n"), "not a number");
    let huge = tar().header(b"p", b'x', 1 << 33, b"", 0o644);
    is_refused(huge, "an extended header has 8589934592 bytes");
    is_refused(tar().pax(&[(b"path", b"x")]), "does not follow");
}

#[test]
fn case_4_damaged_archives_are_refused() {
    let mut archive = tar().file(b"x", b"data").end();
    archive[3] ^= 1;
    refused(Place::new().unpack(&archive), "checksum");
    refused(
        Place::new().unpack(&tar().file(b"x", b"data").0[..700]),
        "ends inside the data",
    );
    refused(Place::new().unpack(b""), "empty");
    refused(Place::new().unpack(b"<html>"), "ends inside a block");
    is_refused(tar().header(b"x", b'Q', 0, b"", 0), "unknown entry type");
    let user = tar().pax(&[(b"uid", b"4294967296")]).file(b"x", b"");
    is_refused(user, "not a user");
}

fn old_sparse(map: &[(u64, u64)], real: u64, size: u64, extended: bool) -> Tar {
    let mut block = [0_u8; 512];
    block[..1].copy_from_slice(b"s");
    block[100..107].copy_from_slice(b"0000644");
    block[124..135].copy_from_slice(format!("{size:011o}").as_bytes());
    block[156] = b'S';
    block[257..265].copy_from_slice(b"ustar  \0");
    for (index, (offset, length)) in map.iter().enumerate() {
        block[386 + index * 24..][..11].copy_from_slice(format!("{offset:011o}").as_bytes());
        block[398 + index * 24..][..11].copy_from_slice(format!("{length:011o}").as_bytes());
    }
    block[482] = u8::from(extended);
    block[483..494].copy_from_slice(format!("{real:011o}").as_bytes());
    tar().seal(block)
}

#[test]
fn case_4_sparse_maps_are_checked() {
    let place = Place::new();
    let archive = old_sparse(&[(4096, 512), (1 << 20, 0)], 1 << 20, 512, false)
        .data(&[7; 512])
        .file(b"after", b"x")
        .end();
    place.unpack(&archive).unwrap();
    let made = fs_err::metadata(place.root().join("s")).unwrap();
    assert_eq!(made.len(), 1 << 20);
    assert!(made.blocks() < 64, "{}", made.blocks());
    type Case<'a> = (&'a [(u64, u64)], u64, u64, &'a str);
    let cases: [Case; 5] = [
        (&[(512, 512), (0, 512)], 1024, 1024, "overlap"),
        (&[(0, 512), (256, 512)], 1024, 1024, "overlap"),
        (&[(0, 512)], 100, 512, "beyond"),
        (&[(0, 512)], 512, 1024, "does not match"),
        (&[(0, 100), (512, 512)], 1024, 612, "whole number of blocks"),
    ];
    for (map, real, size, part) in cases {
        is_refused(old_sparse(map, real, size, false).data(&[1; 1024]), part);
    }
    refused(
        Place::new().unpack(&old_sparse(&[], 0, 0, true).0),
        "sparse map",
    );
}

#[test]
fn case_4_sparse_bombs_count_against_the_limit() {
    let options = UnpackOptions {
        limits: Limits {
            bytes: 1 << 30,
            ..Limits::default()
        },
        ..UnpackOptions::default()
    };
    let bomb = old_sparse(&[(4 << 30, 0)], 4 << 30, 0, false).end();
    refused(
        Place::new().unpack_with(&bomb, &options),
        "more than 1073741824 bytes",
    );
    let pax = |map: &[u8], size: &[u8]| {
        let records: [(&[u8], &[u8]); 4] = [
            (b"GNU.sparse.major", b"1"),
            (b"GNU.sparse.minor", b"0"),
            (b"GNU.sparse.name", b"sparse"),
            (b"GNU.sparse.realsize", size),
        ];
        let block = [map, &vec![0; 512 - map.len()]].concat();
        tar().pax(&records).file(b"x", &block)
    };
    refused(
        Place::new().unpack_with(&pax(b"0\n", b"9000000000").end(), &options),
        "more than 1073741824 bytes",
    );
    is_refused(pax(b"99999999\n", b"1"), "too many fragments");
    is_refused(pax(b"1\n0\n", b"1"), "sparse map");
    is_refused(pax(b"x\n", b"1"), "not a number");
    is_refused(pax(b"99999999999999999999999\n", b"1"), "too large");
    is_refused(pax(b"0\n", b"99999999999999999999"), "not a number");
    let map = b"1\n18446744073709551615\n2\n";
    is_refused(pax(map, b"9"), "refused archive");
}
