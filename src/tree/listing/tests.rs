//! Tests of listings: how they are written down, which names are one file, and what changed.

use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::{PermissionsExt as _, symlink};

use fs_err as fs;

use super::*;

#[test]
fn every_name_survives_being_written_down() {
    for bytes in [
        b"a/b".as_slice(),
        b"\xff\\x\xfe",
        b"\\",
        "\u{e4}\n".as_bytes(),
    ] {
        let name = PathBuf::from(std::ffi::OsString::from_vec(bytes.to_vec()));
        assert_eq!(path::decode(&path::encode(&name)), Some(name));
    }
    for bad in ["\\", "\\x", "\\xg0", "\\n"] {
        assert_eq!(path::decode(bad), None, "{bad}");
    }
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    symlink("loop", root.join("loop")).unwrap();
    Listing::of(&root.join("loop")).unwrap_err();
    path_state(&root.join("loop"), Path::new("a")).unwrap_err();
    fs::remove_file(root.join("loop")).unwrap();
    fs::create_dir(root.join("d")).unwrap();
    let removed = beneath::open_path(&root.join("d")).unwrap();
    fs::remove_dir(root.join("d")).unwrap();
    let nothing = Listing::below(&removed, root).unwrap();
    assert_eq!(nothing, Listing::default());
    fs::create_dir(root.join("d")).unwrap();
    fs::write(root.join("d/a"), "a").unwrap();
    fs::hard_link(root.join("d/a"), root.join("d/b")).unwrap();
    symlink("/etc/passwd", root.join("l")).unwrap();
    let mut listing = Listing::of(root).unwrap();
    let text = serde_json::to_string(&listing).unwrap();
    for entry in listing.entries.values_mut() {
        entry.mark = Mark::default();
    }
    assert_eq!(serde_json::from_str::<Listing>(&text).unwrap(), listing);
    for bad in ["/a", "../a", "a/../b", ""] {
        let text = text.replace("\"l\"", &format!("{bad:?}"));
        assert!(serde_json::from_str::<Listing>(&text).is_err(), "{bad}");
    }
}

#[test]
fn files_with_one_name_each_are_no_hard_links() {
    let directory = tempfile::tempdir().unwrap();
    for name in ["a", "b"] {
        fs::write(directory.path().join(name), name).unwrap();
    }
    let mut listing = Listing::of(directory.path()).unwrap();
    // 9P gives files of two disks the same number, but they hardly have the same change time.
    for (is_linked, times, is_same) in [
        (false, [1, 1], false),
        (true, [1, 2], false),
        (true, [1, 1], true),
    ] {
        for (entry, time) in listing.entries.values_mut().zip(times) {
            entry.mark = Mark {
                inode: 7,
                is_linked,
                ctime: (time, 0),
                ..entry.mark
            };
        }
        listing.find_hard_links();
        let [a, b] = ["a", "b"].map(|name| &listing.entries[Path::new(name)]);
        let Content::File { hardlink, .. } = &b.content else {
            panic!("a file was written");
        };
        assert_eq!((hardlink.is_some(), a.is_same_file(b)), (is_same, is_same));
    }
}

#[test]
fn what_changed_is_told_from_what_stayed() {
    let directory = tempfile::tempdir().unwrap();
    let root = directory.path();
    for name in ["kept", "grown", "locked"] {
        fs::create_dir(root.join(name)).unwrap();
        fs::write(root.join(name).join("old"), "").unwrap();
    }
    let before = Listing::of(root).unwrap();
    std::thread::sleep(std::time::Duration::from_millis(20));
    fs::write(root.join("grown/new"), "").unwrap();
    let mode = std::fs::Permissions::from_mode(0o700);
    fs::set_permissions(root.join("locked"), mode).unwrap();
    symlink("grown/new", root.join("link")).unwrap();
    // A file system may have given an old entry another inode number, and its modification time as its change time.
    let (mut now, mut earlier) = (Listing::of(root).unwrap(), before.clone());
    let settled = ["kept/old", "grown/old"].map(PathBuf::from);
    for path in &settled {
        let old = earlier.entries.get_mut(path).unwrap();
        (old.mark.ctime, old.mark.inode) = ((1, 0), 7);
        let new = now.entries.get_mut(path).unwrap();
        new.mark = old.mark;
        new.mark.inode = 8;
    }
    let reread = now.entries.get_mut(&settled[1]).unwrap();
    reread.mark.ctime = reread.mtime;
    // A time of this moment proves nothing.
    let recent = now.entries.get_mut(Path::new("locked/old")).unwrap();
    recent.mark.inode = 8;
    // The record of a killed step agrees.
    let marks = Marks::of(&earlier, SystemTime::now(), false);
    let text = serde_json::to_string(&marks).unwrap();
    let marks: Marks = serde_json::from_str(&text).unwrap();
    let unchanged = marks.unchanged(&now);
    assert!(settled.iter().all(|path| unchanged.contains(path)));
    assert!(!unchanged.contains(Path::new("locked/old")));
    let since = now.since(&earlier, SystemTime::now());
    let paths: Vec<&Path> = since.entries.keys().map(PathBuf::as_path).collect();
    let wanted = ["grown", "grown/new", "link", "locked", "locked/old"].map(Path::new);
    assert_eq!(paths, wanted);
    // An existing directory is not a result, unless a step made it or changed its mode.
    let mut all = Listing::default();
    all.extend(since);
    assert!(!all.entries.contains_key(Path::new("grown")));
    assert!(all.entries.contains_key(Path::new("locked")));
    // A removal takes what is below, and no path beside it, in next to no time however many others there are.
    let file = before.entries[Path::new("kept/old")].clone();
    let names = (0..30_000).map(|number| PathBuf::from(format!("d/{number}")));
    let mut many = Listing {
        entries: names.map(|name| (name, file.clone())).collect(),
    };
    let begun = std::time::Instant::now();
    many.extend(many.clone());
    assert!(begun.elapsed() < std::time::Duration::from_secs(10));
    for name in ["d", "d-", "d.e", "e"] {
        many.entries.insert(name.into(), file.clone());
    }
    assert_eq!(many.entries.len(), 30_004);
    many.remove(Path::new("d"));
    let left: Vec<&Path> = many.entries.keys().map(PathBuf::as_path).collect();
    assert_eq!(left, ["d-", "d.e", "e"].map(Path::new));
}
