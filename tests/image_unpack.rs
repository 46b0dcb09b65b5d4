//! Extraction against the attack catalogue (cases 1 to 6) and against GNU tar.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::ffi::OsStr;
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::AtomicBool;

use proptest::prelude::*;
use rockenv::error::Result;
use rockenv::image::digest::compare;
use rockenv::image::unpack::{Devices, Limits, Options, Report, unpack};

/// A directory to extract into, beside one that must never change.
struct Place {
    dir: tempfile::TempDir,
}

impl Place {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        fs_err::create_dir(dir.path().join("root")).unwrap();
        fs_err::create_dir(dir.path().join("outside")).unwrap();
        fs_err::write(dir.path().join("outside/file"), "untouched").unwrap();
        Self { dir }
    }

    fn root(&self) -> PathBuf {
        self.dir.path().join("root")
    }

    fn outside(&self) -> PathBuf {
        self.dir.path().join("outside")
    }

    fn unpack(&self, archive: &[u8]) -> Result<Report> {
        self.unpack_with(archive, &Options::default())
    }

    fn unpack_with(&self, archive: &[u8], options: &Options) -> Result<Report> {
        let outcome = unpack(
            archive,
            &self.root(),
            options,
            &AtomicBool::new(false),
            &mut |_| {},
        );
        self.assert_untouched();
        outcome
    }

    fn assert_untouched(&self) {
        let names: Vec<_> = fs_err::read_dir(self.dir.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(names.len(), 2, "{names:?}");
        let inside: Vec<_> = fs_err::read_dir(self.outside())
            .unwrap()
            .map(|entry| entry.unwrap().file_name())
            .collect();
        assert_eq!(inside, ["file"]);
        assert_eq!(
            fs_err::read_to_string(self.outside().join("file")).unwrap(),
            "untouched"
        );
        assert_eq!(
            fs_err::metadata(self.outside()).unwrap().mode() & 0o7777,
            0o755
        );
        assert_eq!(
            fs_err::metadata(self.outside().join("file"))
                .unwrap()
                .nlink(),
            1
        );
    }

    fn names(&self) -> Vec<String> {
        let mut names = Vec::new();
        fn walk(dir: &Path, root: &Path, names: &mut Vec<String>) {
            for entry in fs_err::read_dir(dir).unwrap() {
                let path = entry.unwrap().path();
                names.push(
                    path.strip_prefix(root)
                        .unwrap()
                        .to_string_lossy()
                        .into_owned(),
                );
                if path.is_dir() && !path.is_symlink() {
                    walk(&path, root, names);
                }
            }
        }
        walk(&self.root(), &self.root(), &mut names);
        names.sort();
        names
    }
}

#[track_caller]
fn refused(outcome: Result<Report>, part: &str) {
    let error = outcome.unwrap_err();
    let chain = error.chain().join(": ");
    assert!(chain.contains(part), "{chain}");
}

/// Writes archives byte by byte, so that they may say what no archiver would.
#[derive(Clone, Default)]
struct Tar(Vec<u8>);

impl Tar {
    fn header(self, name: &[u8], kind: u8, size: u64, link: &[u8], mode: u32) -> Self {
        let mut block = [0_u8; 512];
        block[..name.len()].copy_from_slice(name);
        let mut field =
            |at: usize, text: String| block[at..at + text.len()].copy_from_slice(text.as_bytes());
        field(100, format!("{mode:07o}"));
        field(108, "0000000".into());
        field(116, "0000000".into());
        field(124, format!("{size:011o}"));
        field(136, "14000000000".into());
        field(257, "ustar".into());
        field(263, "00".into());
        field(329, "0000001".into());
        field(337, "0000003".into());
        block[156] = kind;
        block[157..157 + link.len()].copy_from_slice(link);
        self.seal(block)
    }

    fn seal(mut self, mut block: [u8; 512]) -> Self {
        block[148..156].copy_from_slice(b"        ");
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
        self.0.extend_from_slice(&block);
        self
    }

    fn data(mut self, data: &[u8]) -> Self {
        self.0.extend_from_slice(data);
        self.0.resize(self.0.len().next_multiple_of(512), 0);
        self
    }

    fn file(self, name: &[u8], data: &[u8]) -> Self {
        self.header(name, b'0', data.len() as u64, b"", 0o644)
            .data(data)
    }

    fn dir(self, name: &[u8]) -> Self {
        self.header(name, b'5', 0, b"", 0o755)
    }

    fn link(self, name: &[u8], target: &[u8]) -> Self {
        self.header(name, b'2', 0, target, 0o777)
    }

    fn hard(self, name: &[u8], target: &[u8]) -> Self {
        self.header(name, b'1', 0, target, 0o644)
    }

    fn pax(self, records: &[(&[u8], &[u8])]) -> Self {
        self.pax_kind(b'x', records)
    }

    fn pax_kind(self, kind: u8, records: &[(&[u8], &[u8])]) -> Self {
        let mut data = Vec::new();
        for (key, value) in records {
            let rest = key.len() + value.len() + 3;
            let mut length = rest + 1;
            while length != rest + length.to_string().len() {
                length = rest + length.to_string().len();
            }
            data.extend_from_slice(format!("{length} ").as_bytes());
            data.extend_from_slice(key);
            data.push(b'=');
            data.extend_from_slice(value);
            data.push(b'\n');
        }
        self.header(b"pax", kind, data.len() as u64, b"", 0o644)
            .data(&data)
    }

    fn long_name(self, name: &[u8]) -> Self {
        let data = [name, b"\0"].concat();
        self.header(b"././@LongLink", b'L', data.len() as u64, b"", 0o644)
            .data(&data)
    }

    fn end(mut self) -> Vec<u8> {
        self.0.extend_from_slice(&[0; 1024]);
        self.0
    }
}

fn tar() -> Tar {
    Tar::default()
}

// Case 1: names.

#[test]
fn case_1_dot_dot_is_refused() {
    for name in [&b"../x"[..], b"./../x", b"a/../../x", b"a/..", b".."] {
        let place = Place::new();
        refused(
            place.unpack(&tar().file(name, b"x").end()),
            "leaves the directory",
        );
        assert_eq!(place.names(), Vec::<String>::new());
    }
}

#[test]
fn case_1_absolute_names_are_relative_to_the_root() {
    let place = Place::new();
    let outside = place.outside().join("file");
    let name = outside.as_os_str().as_bytes();
    place.unpack(&tar().file(name, b"owned").end()).unwrap();
    assert_eq!(
        fs_err::read(place.root().join(outside.strip_prefix("/").unwrap())).unwrap(),
        b"owned"
    );
}

#[test]
fn case_1_empty_names_and_nul_are_refused() {
    refused(
        Place::new().unpack(&tar().file(b"", b"x").end()),
        "empty name",
    );
    refused(
        Place::new().unpack(&tar().pax(&[(b"path", b"")]).file(b"x", b"x").end()),
        "empty name",
    );
    refused(
        Place::new().unpack(&tar().pax(&[(b"path", b"a\0b")]).file(b"x", b"x").end()),
        "NUL",
    );
    refused(
        Place::new().unpack(&tar().pax(&[(b"linkpath", b"a\0b")]).link(b"x", b"y").end()),
        "NUL",
    );
}

#[test]
fn case_1_long_components_and_paths_are_refused_and_the_limits_work() {
    let component = vec![b'a'; 256];
    refused(
        Place::new().unpack(&tar().long_name(&component).file(b"x", b"").end()),
        "256 bytes",
    );
    let long = [vec![b'b'; 255], b"/".to_vec()].concat().repeat(17);
    refused(
        Place::new().unpack(&tar().long_name(&long).file(b"x", b"").end()),
        "4352 bytes",
    );
    let good = &long[..256 * 15 + 200];
    let place = Place::new();
    place
        .unpack(&tar().long_name(good).file(b"x", b"deep").end())
        .unwrap();
    assert_eq!(place.names().len(), 16);
}

#[test]
fn case_1_non_utf8_names_survive() {
    let place = Place::new();
    let name = b"caf\xe9/\xff\xfe\x01";
    place.unpack(&tar().file(name, b"x").end()).unwrap();
    assert_eq!(
        fs_err::read(place.root().join(OsStr::from_bytes(name))).unwrap(),
        b"x"
    );
}

#[test]
fn case_1_a_slash_after_a_file_makes_a_directory_or_is_refused() {
    let place = Place::new();
    place.unpack(&tar().file(b"old/", b"").end()).unwrap();
    assert!(place.root().join("old").is_dir());
    refused(
        Place::new().unpack(&tar().file(b"f/", b"data").end()),
        "ends in a slash",
    );
}

// Case 2: links.

#[test]
fn case_2_nothing_is_written_through_a_symbolic_link() {
    let place = Place::new();
    let target = place.outside();
    let link = tar().link(b"foo", target.as_os_str().as_bytes());
    refused(
        place.unpack(&link.clone().file(b"foo/bar", b"x").end()),
        "goes through `foo`",
    );
    refused(
        Place::new().unpack(
            &tar()
                .link(b"foo", b"../outside")
                .file(b"foo/bar", b"x")
                .end(),
        ),
        "goes through `foo`",
    );
    refused(
        Place::new().unpack(&tar().link(b"foo", b".").file(b"foo/bar", b"x").end()),
        "goes through `foo`",
    );
    refused(
        Place::new().unpack(
            &tar()
                .dir(b"d")
                .link(b"d/up", b"../../outside")
                .file(b"d/up/file", b"x")
                .end(),
        ),
        "goes through `d/up`",
    );
}

#[test]
fn case_2_a_directory_over_a_symbolic_link_replaces_it_and_changes_no_mode() {
    // RUSTSEC-2026-0067: `tar` changed the mode of what the link points to.
    let place = Place::new();
    let target = place.outside();
    let archive = tar()
        .link(b"foo", target.as_os_str().as_bytes())
        .header(b"foo", b'5', 0, b"", 0o777)
        .end();
    place.unpack(&archive).unwrap();
    let made = fs_err::symlink_metadata(place.root().join("foo")).unwrap();
    assert!(made.is_dir() && made.mode() & 0o777 == 0o777);
}

#[test]
fn case_2_a_file_over_a_symbolic_link_replaces_it() {
    let place = Place::new();
    let target = place.outside().join("file");
    let archive = tar()
        .link(b"foo", target.as_os_str().as_bytes())
        .file(b"foo", b"owned")
        .end();
    place.unpack(&archive).unwrap();
    assert!(
        fs_err::symlink_metadata(place.root().join("foo"))
            .unwrap()
            .is_file()
    );
}

#[test]
fn case_2_hard_links_stay_inside() {
    let missing = "not in the archive before it";
    let place = Place::new();
    let outside = place.outside().join("file");
    refused(
        place.unpack(&tar().hard(b"h", outside.as_os_str().as_bytes()).end()),
        missing,
    );
    refused(
        place.unpack(&tar().hard(b"h", b"/etc/passwd").end()),
        missing,
    );
    refused(
        place.unpack(&tar().hard(b"h", b"../outside/file").end()),
        "leaves the directory",
    );
    refused(
        place.unpack(&tar().hard(b"h", b"later").file(b"later", b"x").end()),
        missing,
    );
    let through = tar()
        .link(b"out", place.outside().as_os_str().as_bytes())
        .hard(b"h", b"out/file");
    refused(place.unpack(&through.end()), missing);
    refused(place.unpack(&tar().hard(b"h", b"").end()), "empty name");
    refused(
        place.unpack(&tar().dir(b"dir").hard(b"h", b"dir").end()),
        "cannot make `h`",
    );
}

#[test]
fn case_2_a_hard_link_to_a_symbolic_link_links_the_link() {
    let place = Place::new();
    let target = place.outside().join("file");
    let archive = tar()
        .link(b"l", target.as_os_str().as_bytes())
        .hard(b"h", b"l")
        .file(b"h", b"new")
        .end();
    place.unpack(&archive).unwrap();
    assert_eq!(fs_err::read(place.root().join("h")).unwrap(), b"new");
}

#[test]
fn case_2_a_hard_link_to_itself_keeps_the_file() {
    let place = Place::new();
    let archive = tar()
        .file(b"a", b"kept")
        .hard(b"a", b"./a")
        .hard(b"b", b"a")
        .hard(b"b", b"a")
        .end();
    place.unpack(&archive).unwrap();
    assert_eq!(fs_err::metadata(place.root().join("b")).unwrap().nlink(), 2);
}

#[test]
fn case_2_symbolic_link_loops_are_only_links() {
    let place = Place::new();
    let archive = tar().link(b"a", b"b").link(b"b", b"a").link(b"c", b"c");
    place.unpack(&archive.clone().end()).unwrap();
    assert_eq!(place.names(), ["a", "b", "c"]);
    refused(
        Place::new().unpack(&archive.file(b"a/x", b"").end()),
        "goes through `a`",
    );
}

// Case 3: one name, several types.

#[test]
fn case_3_the_last_entry_of_a_name_wins() {
    let place = Place::new();
    let target = place.outside();
    let archive = tar()
        .file(b"x", b"first")
        .link(b"x", target.as_os_str().as_bytes())
        .dir(b"x")
        .file(b"x/inside", b"y")
        .dir(b"y")
        .file(b"y", b"now a file")
        .header(b"z", b'6', 0, b"", 0o600)
        .file(b"z", b"no longer a fifo")
        .end();
    place.unpack(&archive).unwrap();
    assert_eq!(place.names(), ["x", "x/inside", "y", "z"]);
    assert_eq!(fs_err::read(place.root().join("y")).unwrap(), b"now a file");
    assert!(
        fs_err::symlink_metadata(place.root().join("z"))
            .unwrap()
            .is_file()
    );
}

#[test]
fn case_3_a_file_never_replaces_a_full_directory() {
    for last in [
        tar().file(b"d", b"x"),
        tar().link(b"d", b"/"),
        tar().header(b"d", b'6', 0, b"", 0o600),
    ] {
        let place = Place::new();
        let archive = [tar().dir(b"d").file(b"d/f", b"kept").0, last.end()].concat();
        refused(place.unpack(&archive), "not empty");
        assert_eq!(fs_err::read(place.root().join("d/f")).unwrap(), b"kept");
    }
}

#[test]
fn case_3_a_directory_swapped_for_a_link_is_not_entered_from_memory() {
    // The open parents are kept between entries: they must not outlive the names.
    let place = Place::new();
    let target = place.outside();
    let archive = tar()
        .dir(b"d")
        .dir(b"d/e")
        .dir(b"q")
        .link(b"d/e", target.as_os_str().as_bytes())
        .file(b"d/e/f", b"x");
    refused(place.unpack(&archive.end()), "goes through `d/e`");
}

// Case 4: headers that disagree.

#[test]
fn case_4_the_pax_size_wins_and_the_next_entry_is_found() {
    // RUSTSEC-2026-0068 and CVE-2025-62518: the reader that believes the other size finds entries in file data.
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
fn case_4_entries_that_have_no_data_must_say_so() {
    for kind in [b'1', b'2', b'3', b'5', b'6'] {
        let archive = tar()
            .file(b"t", b"")
            .header(b"x", kind, 512, b"t", 0o644)
            .data(b"data")
            .end();
        refused(Place::new().unpack(&archive), "bytes of data");
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
    refused(
        Place::new().unpack(&tar().long_name(b"a").long_name(b"b").file(b"x", b"").end()),
        "two extended headers",
    );
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
        refused(
            Place::new().unpack(&tar().pax_kind(b'g', &[(key, b"1")]).file(b"x", b"").end()),
            "for all entries",
        );
    }
}

#[test]
fn case_4_malformed_extended_headers_are_refused() {
    let raw = |data: &[u8]| {
        tar()
            .header(b"p", b'x', data.len() as u64, b"", 0o644)
            .data(data)
            .file(b"x", b"")
            .end()
    };
    for data in [
        &b"5 a=b\n"[..],
        b"99 path=x\n",
        b"path=x\n",
        b"-6 a=b\n",
        b"18446744073709551616 a=b\n",
        b"\0\0",
    ] {
        refused(Place::new().unpack(&raw(data)), "malformed");
    }
    refused(Place::new().unpack(&raw(b"9 size=x\n")), "not a number");
    refused(Place::new().unpack(&raw(b"10 size=-1\n")), "malformed");
    refused(Place::new().unpack(&raw(b"11 size=-1\n")), "not a number");
    let huge = tar().header(b"p", b'x', 1 << 33, b"", 0o644).end();
    refused(
        Place::new().unpack(&huge),
        "an extended header has 8589934592 bytes",
    );
    refused(
        Place::new().unpack(&tar().pax(&[(b"path", b"x")]).end()),
        "does not follow",
    );
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
    refused(
        Place::new().unpack(&tar().header(b"x", b'Q', 0, b"", 0).end()),
        "not known",
    );
    // uid -1 would tell chown to leave the owner alone.
    refused(
        Place::new().unpack(&tar().pax(&[(b"uid", b"4294967295")]).file(b"x", b"").end()),
        "not a user",
    );
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
    for (map, real, size, expected) in cases {
        refused(
            Place::new().unpack(&old_sparse(map, real, size, false).data(&[1; 1024]).end()),
            expected,
        );
    }
    refused(
        Place::new().unpack(&old_sparse(&[], 0, 0, true).0),
        "sparse map",
    );
}

#[test]
fn case_4_sparse_bombs_count_against_the_limit() {
    let options = Options {
        limits: Limits {
            bytes: 1 << 30,
            ..Limits::default()
        },
        ..Options::default()
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
        tar().pax(&records).file(b"x", &block).end()
    };
    refused(
        Place::new().unpack_with(&pax(b"0\n", b"9000000000"), &options),
        "more than 1073741824 bytes",
    );
    refused(
        Place::new().unpack(&pax(b"99999999\n", b"1")),
        "too many fragments",
    );
    refused(Place::new().unpack(&pax(b"1\n0\n", b"1")), "sparse map");
    refused(Place::new().unpack(&pax(b"x\n", b"1")), "not a number");
    refused(
        Place::new().unpack(&pax(b"99999999999999999999999\n", b"1")),
        "too large",
    );
    refused(
        Place::new().unpack(&pax(b"0\n", b"99999999999999999999")),
        "not a number",
    );
    refused(
        Place::new().unpack(&pax(b"1\n18446744073709551615\n2\n", b"9")),
        "refused archive",
    );
}

// Case 5: special files and attributes.

#[test]
fn case_5_device_nodes_are_skipped_and_reported_unless_asked_for() {
    let archive = tar()
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
    let options = Options {
        devices: Devices::Make,
        ..Options::default()
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
    let options = Options {
        devices: Devices::Make,
        ..Options::default()
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
    let options = Options {
        ownership: false,
        ..Options::default()
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
    let options = |limits: Limits| Options {
        limits,
        ..Options::default()
    };
    let mut many = tar();
    for index in 0..100 {
        many = many.file(format!("f{index}").as_bytes(), b"");
    }
    let limits = Limits {
        entries: 50,
        ..Limits::default()
    };
    refused(
        Place::new().unpack_with(&many.end(), &options(limits)),
        "more than 50 entries",
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
    refused(
        Place::new().unpack(&tar().long_name(&deep).dir(b"x").end()),
        "1000 directories deep",
    );
    // 10,000 levels do not even fit into a path.
    refused(
        Place::new().unpack(&tar().long_name(&b"d/".repeat(10_000)).dir(b"x").end()),
        "20000 bytes",
    );
}

#[test]
fn cancel_stops_the_extraction() {
    let place = Place::new();
    let outcome = unpack(
        &tar().file(b"x", b"").end()[..],
        &place.root(),
        &Options::default(),
        &AtomicBool::new(true),
        &mut |_| {},
    );
    assert_eq!(outcome.unwrap_err().kind(), rockenv::error::Kind::Signal(2));
}

#[test]
fn strip_components_applies_to_names_and_hard_links() {
    let place = Place::new();
    let options = Options {
        strip_components: 1,
        ..Options::default()
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
}

// The same result as GNU tar on archives that GNU tar makes.

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

fn gnu_tar(directory: &Path, args: &[&str]) -> Vec<u8> {
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
    // ustar cannot hold most of the sample: a small tree for that one.
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
        let options = Options {
            devices: Devices::Make,
            ..Options::default()
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

// Random archives.

fn seed() -> Vec<u8> {
    tar()
        .dir(b"./")
        .dir(b"d")
        .file(b"d/file", b"some data")
        .link(b"d/link", b"../outside")
        .hard(b"d/hard", b"d/file")
        .pax(&[
            (b"path", b"d/pax"),
            (b"size", b"4"),
            (b"mtime", b"1.5"),
            (b"SCHILY.xattr.user.a", b"b"),
        ])
        .file(b"x", b"data")
        .long_name(b"d/a-long-name")
        .file(b"y", b"data")
        .header(b"fifo", b'6', 0, b"", 0o600)
        .end()
}

/// Mutations that keep checksums right, so that they get past the first check.
fn mutated() -> impl Strategy<Value = Vec<u8>> {
    let names: Vec<&[u8]> = vec![
        b"..",
        b"../outside",
        b"../outside/file",
        b"d/link",
        b"d/link/file",
        b"/",
        b".",
        b"d",
    ];
    let mutation = (
        0..14_usize,
        prop_oneof![Just(0_usize), Just(157), Just(156), Just(124), Just(345)],
        prop::sample::select(names),
        any::<u8>(),
    );
    (
        prop::collection::vec(mutation, 1..6),
        prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
    )
        .prop_map(|(fields, bytes)| {
            let mut archive = seed();
            for (index, byte) in bytes {
                let at = index.index(archive.len());
                archive[at] = byte;
            }
            for (block, at, name, byte) in fields {
                let Some(block) = archive.chunks_exact_mut(512).nth(block) else {
                    continue;
                };
                match at {
                    156 => block[156] = b"0123456LKSxg"[usize::from(byte) % 12],
                    124 => block[124..135]
                        .copy_from_slice(format!("{:011o}", u32::from(byte) * 7).as_bytes()),
                    at => block[at..at + name.len()].copy_from_slice(name),
                }
            }
            for block in archive
                .chunks_exact_mut(512)
                .filter(|block| &block[257..262] == b"ustar")
            {
                block[148..156].copy_from_slice(b"        ");
                let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
                block[148..156].copy_from_slice(format!("{sum:06o}\0 ").as_bytes());
            }
            archive
        })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1500, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn mutated_archives_never_write_outside(archive in mutated()) {
        let place = Place::new();
        // Refused or not does not matter here; `unpack` checks what is outside.
        drop(place.unpack(&archive));
    }

    #[test]
    fn noise_never_panics(archive in prop::collection::vec(any::<u8>(), 0..3000)) {
        drop(Place::new().unpack(&archive));
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
        &Options::default(),
        &AtomicBool::new(false),
        &mut |_| {},
    )
    .unwrap();
    assert_eq!(fs_err::read(place.root().join("x")).unwrap(), [5; 5000]);
}
