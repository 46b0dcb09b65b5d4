//! Test archives of other projects: GNU tar decides the content of those that it accepts.

use std::path::{Path, PathBuf};
use std::process::Command;

use super::Place;
use super::dialects::{as_gnu_tar, extract};
use crate::support::skip::skip;

/// The archives of Go's library, from Debian's and Ubuntu's `golang-src`. tar-split has the same ones.
const GO: &str = "/usr/share/go/src/archive/tar/testdata";

/// Archives that must be accepted.
const VALID: [&str; 30] = [
    "file-and-dir",
    "gnu",
    "gnu-incremental",
    "gnu-long-nul",
    "gnu-multi-hdrs",
    "gnu-nil-sparse-data",
    "gnu-nil-sparse-hole",
    "gnu-not-utf8",
    "gnu-sparse-big",
    "gnu-utf8",
    "hardlink",
    "hdr-only",
    "invalid-go17",
    "nil-uid",
    "pax",
    "pax-multi-hdrs",
    "pax-nil-sparse-data",
    "pax-nil-sparse-hole",
    "pax-nul-path",
    "pax-pos-size-file",
    "pax-records",
    "pax-sparse-big",
    "star",
    "trailing-slash",
    "ustar",
    "ustar-file-devs",
    "ustar-file-reg",
    "v7",
    "writer",
    "xattrs",
];

/// Archives that lie or are damaged.
const REFUSED: [&str; 9] = [
    "issue10968",
    "issue11169",
    "issue12435",
    "neg-size",
    "pax-bad-hdr-file",
    "pax-bad-mtime-file",
    "pax-nul-xattrs",
    // No entry follows the header.
    "pax-path-hdr",
    "writer-big",
];

#[test]
fn what_go_s_library_is_tested_with_makes_the_tree_of_gnu_tar() {
    if !Path::new(GO).exists() {
        skip("archives of Go's library", "golang-src is not installed");
        return;
    }
    let read = |name: &str| fs_err::read(Path::new(GO).join(format!("{name}.tar"))).unwrap();
    for name in VALID {
        as_gnu_tar(&read(name));
    }
    for name in REFUSED {
        let outcome = extract(&Place::new(), &read(name));
        assert!(outcome.is_err(), "{name}");
    }
}

/// Some installations of Python lack its tests, so `dialects` covers the same kinds of members.
#[test]
fn what_python_s_library_is_tested_with_makes_the_tree_of_gnu_tar() {
    if let Some(archive) = python_s() {
        as_gnu_tar(&fs_err::read(archive).unwrap());
    }
}

fn python_s() -> Option<PathBuf> {
    let look = "import os; print(os.path.dirname(os.__file__))";
    let output = Command::new("python3").args(["-c", look]).output().unwrap();
    let library = String::from_utf8(output.stdout).unwrap();
    let tests = Path::new(library.trim()).join("test");
    ["testtar.tar", "archivetestdata/testtar.tar"]
        .into_iter()
        .map(|name| tests.join(name))
        .find(|path| path.exists())
}
