//! Names, links, and one name with several types (cases 1 to 3 of the catalogue).

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;

use super::{Place, is_refused, refused, tar};

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
    is_refused(tar().file(b"", b"x"), "empty name");
    is_refused(tar().pax(&[(b"path", b"")]).file(b"x", b"x"), "empty name");
    is_refused(tar().pax(&[(b"path", b"a\0b")]).file(b"x", b"x"), "NUL");
    is_refused(tar().pax(&[(b"linkpath", b"a\0b")]).link(b"x", b"y"), "NUL");
}

#[test]
fn case_1_long_components_and_paths_are_refused_and_the_limits_work() {
    let component = vec![b'a'; 256];
    is_refused(tar().long_name(&component).file(b"x", b""), "256 bytes");
    let long = [vec![b'b'; 255], b"/".to_vec()].concat().repeat(17);
    is_refused(tar().long_name(&long).file(b"x", b""), "4352 bytes");
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
    is_refused(tar().file(b"f/", b"data"), "wrong checksum");
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
    for to in [&b"../outside"[..], b"."] {
        let archive = tar().link(b"foo", to).file(b"foo/bar", b"x");
        is_refused(archive, "goes through `foo`");
    }
    let up = tar().dir(b"d").link(b"d/up", b"../../outside");
    is_refused(up.file(b"d/up/file", b"x"), "goes through `d/up`");
}

#[test]
fn case_2_a_directory_over_a_symbolic_link_replaces_it_and_changes_no_mode() {
    // RUSTSEC-2026-0067: `tar` changed the mode of the link's target.
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
        missing,
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
    is_refused(archive.file(b"a/x", b""), "goes through `a`");
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
    // Open parent directories are cached between entries, and must not outlive their names.
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
