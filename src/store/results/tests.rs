//! Tests of keeping a step's results, and of detecting changes to them.

use std::collections::BTreeSet;
use std::os::fd::AsFd as _;
use std::os::unix::fs::symlink;

use fs_err as fs;

use super::*;
use crate::sys::account::Existing;
use crate::sys::beneath;
use crate::tree::file;

#[test]
fn what_a_step_left_is_kept_and_nothing_else() {
    let directory = tempfile::tempdir().unwrap();
    let [out, results] = &["out", "kept"].map(|name| directory.path().join(name));
    fs::create_dir_all(out.join("sub")).unwrap();
    for name in ["old", "rewritten", "sub/gone", "theirs"] {
        fs::write(out.join(name), "before").unwrap();
    }
    let before = OutputBefore {
        volume: "out".to_owned(),
        opened: beneath::open_path(out).unwrap(),
        in_store: true,
        taken: std::time::SystemTime::now(),
        listing: Listing::of(out).unwrap(),
        unsure: BTreeSet::new(),
    };
    let earlier = Listing {
        entries: [("sub/gone", "sub/gone"), ("theirs", "old")]
            .map(|(name, of)| (name.into(), before.listing.entries[Path::new(of)].clone()))
            .into(),
    };
    let mut left = StepResults::default();
    let now = || Listing::of(out).unwrap();
    let written = left.keep(results, out, now(), &before, &earlier);
    assert_eq!(written.unwrap(), None);
    left.write(results).unwrap();
    assert!(!results.exists());
    fs::write(out.join("rewritten"), "after").unwrap();
    fs::remove_file(out.join("sub/gone")).unwrap();
    fs::write(out.join("sub/new"), "after").unwrap();
    fs::hard_link(out.join("sub/new"), out.join("also")).unwrap();
    fs::create_dir(out.join("empty")).unwrap();
    symlink("/etc/passwd", out.join("link")).unwrap();
    // An export was killed while it copied this file.
    fs::write(out.join(".rockenv-0123456789abcdef"), "hal").unwrap();
    let written = left.keep(results, out, now(), &before, &earlier);
    assert_eq!(written.unwrap(), None);
    left.write(results).unwrap();
    assert_eq!(left.check(results).unwrap(), [""; 0]);
    let left_in = StepResults::read(results).unwrap().take("out");
    let names = left_in.entries.entries.keys().map(PathBuf::as_path);
    let wanted = ["also", "empty", "link", "rewritten", "sub", "sub/new"].map(Path::new);
    assert!(names.eq(wanted), "{left_in:?}");
    assert_eq!(left_in.removed.0, [Path::new("sub/gone")]);
    // It was there before, and no step is known to have left it.
    assert_eq!(left_in.unsure.0, [Path::new("rewritten")]);
    let differ = |path: &str| {
        let path = Path::new(path);
        let state = compare(&left_in.entries.entries[path], out, path, true).unwrap();
        state.words().unwrap_or_default().to_owned()
    };
    assert_eq!(differ("sub/new"), "");
    fs::remove_file(out.join("sub/new")).unwrap();
    fs::write(out.join("sub/new"), "after").unwrap();
    let unlinked = "is no longer a hard link to the same file";
    assert_eq!(differ("sub/new"), unlinked);
    fs::write(out.join("sub/new"), "other").unwrap();
    assert_eq!(differ("sub/new"), "has different content");
    fs::remove_dir(out.join("empty")).unwrap();
    symlink("sub", out.join("empty")).unwrap();
    assert_eq!(differ("empty"), "is a symbolic link, not a directory");
    // The kept copies are checked as well.
    fs::remove_file(results.join("out/link")).unwrap();
    symlink("/etc/shadow", results.join("out/link")).unwrap();
    let fault = "`out/link` links to `/etc/shadow`, not to `/etc/passwd`";
    assert_eq!(left.check(results).unwrap(), [fault]);
    // Inode numbers change on some FUSE file systems. That is no edit.
    let (seen, file, saved) = (now(), out.join("sub/new"), out.join("saved"));
    let time = fs::metadata(&file).unwrap().modified().unwrap();
    fs::copy(&file, &saved).unwrap();
    let copy = fs::OpenOptions::new().write(true).open(&saved).unwrap();
    copy.file().set_modified(time).unwrap();
    fs::rename(&saved, &file).unwrap();
    let mut left = StepResults::default();
    let copied = directory.path().join("copied");
    let written = left.keep(&copied, out, seen, &before, &earlier);
    assert_eq!(written.unwrap(), None);
    // An editor saves a result before it is kept. The copy still matches its listing.
    let seen = now();
    fs::write(&saved, "by an editor").unwrap();
    fs::rename(&saved, &file).unwrap();
    let again = directory.path().join("again");
    let mut left = StepResults::default();
    let written = left.keep(&again, out, seen, &before, &earlier);
    assert_eq!(written.unwrap(), Some(file));
    assert_eq!(left.check(&again).unwrap(), [""; 0]);
}

#[test]
fn results_of_another_machine_have_permissions_only() {
    use std::os::unix::fs::PermissionsExt as _;
    let directory = tempfile::tempdir().unwrap();
    let (results, out) = (directory.path().join("kept"), directory.path().join("out"));
    fs::create_dir_all(results.join("out/d")).unwrap();
    fs::create_dir(&out).unwrap();
    // New directories have its group.
    fs::set_permissions(&out, std::fs::Permissions::from_mode(0o2755)).unwrap();
    fs::write(results.join("out/d/program"), "x").unwrap();
    let listing = r#"{"volumes": {"out": {"entries": [
        {"path": "d", "type": "directory", "mode": 1023, "mtime": [0, 0]},
        {"path": "d/program", "type": "file", "size": 1, "mode": 3565, "mtime": [0, 0]}]}}}"#;
    fs::write(results.join(".listing.json"), listing).unwrap();
    let left = StepResults::read(&results).unwrap().take("out");
    let mut entries = left.entries.entries;
    for read in [true, false] {
        let mut writer = Writer::open(&out, false).unwrap();
        for (path, bits) in [("d", 0o1777), ("d/program", 0o6755)] {
            let entry = entries.get_mut(Path::new(path)).unwrap();
            match read {
                true => assert_eq!(entry.mode, bits & 0o777),
                false => entry.mode = bits,
            }
            let from = file::open(&results, &Path::new("out").join(path)).unwrap();
            let from = from.as_ref().map(|file| file.as_fd());
            writer
                .put(Path::new(path), entry, from, Existing::Replace)
                .unwrap();
        }
        let have_modes = || {
            for (path, mode) in [("d", 0o2777), ("d/program", 0o755)] {
                let made = fs::metadata(out.join(path)).unwrap().permissions();
                assert_eq!(made.mode() & 0o7777, mode, "{path}");
            }
        };
        // A killed command does not reach `finish`.
        have_modes();
        writer.finish().unwrap();
        have_modes();
    }
}

#[test]
fn a_listing_of_any_size_is_not_read() {
    let directory = tempfile::tempdir().unwrap();
    let listing = fs::File::create(directory.path().join(".listing.json")).unwrap();
    listing.set_len(1 << 40).unwrap();
    let error = StepResults::read(directory.path()).unwrap_err();
    assert_has!(error.message(), "has more than 64.0 MiB");
}

#[test]
fn results_of_another_machine_lead_nowhere() {
    let directory = tempfile::tempdir().unwrap();
    let results = directory.path();
    // A volume that is a link, with a listing and without one.
    symlink("/etc", results.join("out")).unwrap();
    assert!(StepResults::read(results).is_err());
    let listing = r#"{"volumes": {"out": {"entries": [
        {"path": "passwd", "type": "file", "size": 1, "mode": 420, "mtime": [0, 0]}]}}}"#;
    fs::write(results.join(".listing.json"), listing).unwrap();
    let left = StepResults::read(results).unwrap();
    assert_eq!(left.check(results).unwrap(), ["`out` is missing"]);
    let found = file::open(results, Path::new("out/passwd"));
    assert!(found.unwrap().is_none());
    for bad in ["../passwd", "/etc/passwd", "a/../../b"] {
        let text = listing.replace("passwd", bad);
        fs::write(results.join(".listing.json"), text).unwrap();
        assert!(StepResults::read(results).is_err(), "{bad}");
    }
    fs::remove_file(results.join(".listing.json")).unwrap();
    symlink("/etc/hostname", results.join(".listing.json")).unwrap();
    assert!(StepResults::read(results).is_err());
}
