//! A repair loses nothing: it keeps build volumes, and files that are not the store's.

use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::process::Stdio;

use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::sys::stat::Mode;

use super::*;
use crate::support::run::wait_until;

/// Returns the names of the store's build volumes.
fn volumes(lab: &Lab) -> Vec<String> {
    let entries = fs::read_dir(lab.at("volumes")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> = names.collect();
    names.sort();
    names
}

#[test]
fn volumes_that_the_profile_does_not_name_any_more_stay() {
    let lab = Lab::new();
    let mut old = lab.record();
    let mut env = lab.locked("one");
    env.ensure_volumes(&["objects-2".into()], &BuildUser::new(0, 0))
        .unwrap();
    old.head.volumes = env.record().unwrap().head.volumes.clone();
    let mut spec = lab.spec();
    for volume in &mut spec.volumes {
        if volume.name == "build" {
            volume.name = "objects-2".parse().unwrap();
        }
    }
    env.save_spec(&spec).unwrap();
    drop(env);
    spoil(&lab.at("envs/one/record.json"));
    lab.finds_and_mends(&["record is damaged"]);
    assert_eq!(lab.record().head.volumes, old.head.volumes);
    let file = lab.store.volume_dir(&old.head.volumes["build"]);
    assert!(file.join("object.o").exists());
}

#[test]
fn of_two_volumes_with_one_name_none_is_lost() {
    for cut in [true, false] {
        let lab = Lab::new();
        let record = lab.record();
        let live = record.head.volumes["build"].clone();
        let other = format!("{}-build-ffffffffffffffff", record.id);
        let without_end = format!("{}-build", record.id);
        for name in [&other, &without_end] {
            fs::create_dir(lab.at("volumes").join(name)).unwrap();
            fs::write(lab.at("volumes").join(name).join("work"), name).unwrap();
        }
        let path = lab.at("envs/one/record.json");
        match cut {
            // The damaged record still names the live volume.
            true => {
                let text = fs::read_to_string(&path).unwrap();
                fs::write(&path, &text[..text.len() - 4]).unwrap();
            }
            // The layers name it.
            false => spoil(&path),
        }
        let text = lab.finds_and_mends(&["record is damaged"]);
        assert!(text.contains("another build volume of that name"), "{text}");
        let new = lab.record();
        assert_eq!(new.head.volumes["build"], live, "{cut}");
        let found = volumes(&lab);
        assert_eq!(found.len(), 3, "{found:?}");
        let note = lab.fsck(&[], 0);
        for name in found.iter().filter(|name| **name != *live) {
            assert!(!name.starts_with(new.id.as_str()), "{name}");
            let told = format!("volume `{name}` belongs to no known env");
            assert!(note.contains(&told), "{note}");
            assert!(lab.at("volumes").join(name).join("work").exists());
        }
    }
}

#[test]
fn a_record_that_was_repaired_meanwhile_is_not_rebuilt() {
    let lab = Lab::new();
    let path = lab.at("envs/one/record.json");
    let good = fs::read(&path).unwrap();
    spoil(&path);
    // The repair reads the envs, and then blocks on this fifo.
    let reference = lab.at(&format!("images/refs/{}.json", "5".repeat(64)));
    let text = format!("{{\"key\":\"{KEY}\"}}");
    nix::unistd::mkfifo(&reference, Mode::S_IRWXU).unwrap();
    let mut repair = program(&lab.root);
    let repair = repair.args(["fsck", "--repair"]);
    let repair = repair.stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut repair = repair.spawn().unwrap();
    let mut to = None;
    wait_until("the repair reads the references", || {
        let mut options = fs::OpenOptions::new();
        options.write(true).custom_flags(nix::libc::O_NONBLOCK);
        to = options.open(&reference).ok();
        to.is_some() || repair.try_wait().unwrap().is_some()
    });
    let mut to = to.expect("it ended");
    fs::write(lab.at("new"), &text).unwrap();
    fs::rename(lab.at("new"), &reference).unwrap();
    // Another command repairs the record, and `up` makes another volume.
    fs::write(&path, good).unwrap();
    let mut env = lab.locked("one");
    env.update(|record| record.head.volumes.clear()).unwrap();
    env.ensure_volumes(&["build".into()], &BuildUser::new(0, 0))
        .unwrap();
    drop(env);
    let expected = lab.record();
    to.write_all(text.as_bytes()).unwrap();
    drop(to);
    let output = repair.wait_with_output().unwrap();
    assert!(output.status.success(), "{output:?}");
    let now = lab.record();
    assert_eq!(now.head, expected.head);
    assert_eq!(now.snapshots, expected.snapshots);
    assert!(lab.store.volume_dir(&now.head.volumes["build"]).exists());
    let names = fs::read_dir(lab.at("envs/one")).unwrap();
    let mut names = names.map(|entry| entry.unwrap().file_name());
    assert!(!names.any(|name| name.to_string_lossy().contains(".damaged-")));
}

#[test]
fn a_link_in_place_of_a_directory_is_not_followed() {
    let names = ["outputs", "volumes", "trash", "layers", "images/refs"];
    let blobs = ["blobs/sha256", "blobs/sha512", "blobs/fingerprints"];
    for name in names.into_iter().chain(blobs) {
        let lab = Lab::new();
        fs::create_dir_all(lab.at(name)).unwrap();
        lab.fsck(&["--repair"], 0);
        let mine = lab.root.with_file_name("mine");
        fs::create_dir(&mine).unwrap();
        let file = mine.join("0".repeat(64));
        fs::write(&file, "mine").unwrap();
        fs::write(mine.join("a.json"), "mine").unwrap();
        nix::unistd::chown(&mine, Some(1234.into()), Some(1234.into())).unwrap();
        fs::set_permissions(&mine, std::fs::Permissions::from_mode(0o755)).unwrap();
        fs::rename(lab.at(name), lab.at("elsewhere")).unwrap();
        symlink(&mine, lab.at(name)).unwrap();
        let before = lab.listing();
        let says = format!("is a link to `{}`", mine.display());
        for words in [&[][..], &["--repair"]] {
            let text = lab.fsck(words, 1);
            assert!(text.contains(&says), "{name}: {text}");
            assert!(text.contains("move the link away"), "{name}: {text}");
            assert!(!text.contains("repaired"), "{name}: {text}");
        }
        let refused = lab.gc(4);
        assert!(refused.contains(&says), "{refused}");
        assert_eq!(before, lab.listing(), "{name}");
        assert_eq!(lab.store.empty_trash().is_err(), name == "trash");
        let unused = lab.at("unused");
        fs::write(&unused, "").unwrap();
        assert_eq!(lab.store.discard(&unused).is_err(), name == "trash");
        let found = fs::metadata(&mine).unwrap();
        let found = (found.uid(), found.gid(), found.mode() & 0o777);
        assert_eq!(found, (1234, 1234, 0o755), "{name}");
        assert_eq!(fs::read_dir(&mine).unwrap().count(), 2, "{name}");
        assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
        fs::remove_file(lab.at(name)).unwrap();
        fs::rename(lab.at("elsewhere"), lab.at(name)).unwrap();
        lab.fsck(&["--repair"], 0);
        lab.fsck(&[], 0);
    }
}

#[test]
fn a_file_in_place_of_a_directory_is_left_alone() {
    let lab = Lab::new();
    fs::remove_dir(lab.at("outputs")).unwrap();
    fs::write(lab.at("outputs"), "mine").unwrap();
    insta::assert_snapshot!(lab.shows("fsck --repair"), @"
    directory `STORE/outputs`: is not a directory
    STORE: 1 problem
    help: move it away: mv STORE/outputs STORE/outputs.old
    exit code 1
    ");
    assert_eq!(fs::read_to_string(lab.at("outputs")).unwrap(), "mine");
}

/// A user's files among the store's directories stop no command and hide nothing.
#[test]
fn a_file_among_layers_or_envs_stops_nothing() {
    let lab = Lab::new();
    fs::write(lab.at("layers/readme"), "mine").unwrap();
    fs::write(lab.at("envs/readme"), "mine").unwrap();
    let text = lab.gc(10);
    assert!(!text.contains("readme"), "{text}");
    lab.finds_and_mends(&["layer.json is damaged"]);
    assert_eq!(fs::read_to_string(lab.at("envs/readme")).unwrap(), "mine");
}

#[test]
fn a_directory_that_never_was_a_store_does_not_become_one() {
    let disk = LoopFs::new(Kind::Ext4);
    let root = disk.join("project");
    for path in [
        "envs",
        "layers/conv1",
        "images/tmp-holiday",
        "images/cats",
        "trash",
    ] {
        fs::create_dir_all(root.join(path)).unwrap();
    }
    let files = [
        "images/tmp-holiday/beach.jpg",
        "trash/letter",
        "layers/conv1/layer.json",
        "format",
        "id",
        "CACHEDIR.TAG",
    ];
    // Also with another program's file `format`, or with file names that other programs use too.
    for count in [2, 3, 4, 5, 6] {
        for file in &files[..count] {
            fs::write(root.join(file), "mine").unwrap();
        }
        for words in [&["fsck"][..], &["fsck", "--repair"]] {
            let mut command = program(&root);
            command.arg("--yes").args(words);
            let shown = finish(words.join(" "), command).shown();
            let place = root.display().to_string();
            insta::allow_duplicates! {
                insta::assert_snapshot!(masked(&shown, &[(&place, "PLACE")]), @"
                error: `PLACE` is not a rockenv store: rockenv has written nothing in it
                help: name the store's directory: rockenv --home DIR fsck
                exit code 7
                ");
            }
        }
        for file in &files[..count] {
            let text = fs::read_to_string(root.join(file)).unwrap();
            assert_eq!(text, "mine", "{file}");
        }
        assert!(root.join("images/cats").exists());
        assert_eq!(root.join("format").exists(), count > 3);
    }
}

#[test]
fn a_store_without_its_format_is_known_by_what_rockenv_wrote() {
    for left in ["id", "record", "layer", "image"] {
        let lab = Lab::new();
        let good = fs::read_to_string(lab.at("format")).unwrap();
        fs::remove_file(lab.at("format")).unwrap();
        if left != "id" {
            fs::remove_file(lab.at("id")).unwrap();
        }
        let image = lab.at("images").join(KEY).join("image.json");
        let mut spoilt = vec![("record", lab.at("envs/one/record.json")), ("image", image)];
        for entry in fs::read_dir(lab.at("layers")).unwrap() {
            spoilt.push(("layer", entry.unwrap().path().join("layer.json")));
        }
        for (what, path) in spoilt {
            if what != left {
                spoil(&path);
            }
        }
        let text = lab.fsck(&[], 1);
        assert!(text.contains("format"), "{left}: {text}");
        let mut repair = program(&lab.root);
        let said = repair.args(["fsck", "--repair"]).output().unwrap();
        assert!(lab.at("format").exists(), "{left}: {said:?}");
        let made = fs::read_to_string(lab.at("format")).unwrap();
        assert_eq!(made, good, "{left}");
    }
}

#[test]
fn a_format_is_repaired_once_another_command_ends() {
    let lab = Lab::new();
    fs::remove_file(lab.at("format")).unwrap();
    let mut other = Command::new("flock");
    let other = other.arg(lab.at("lock")).args(["sleep", "1"]);
    let mut other = other.spawn().unwrap();
    wait_until("the store is held", || {
        let mut take = Command::new("flock");
        let take = take.arg("--nonblock").arg(lab.at("lock")).arg("true");
        !take.status().unwrap().success()
    });
    lab.fsck(&["--repair"], 0);
    assert!(other.wait().unwrap().success());
}

#[test]
fn files_of_another_version_are_left_alone() {
    let lab = Lab::new();
    fs::write(lab.at("envs/one/record.json"), "{\"version\": 2}").unwrap();
    fs::create_dir_all(lab.at("volumes/fedcba9876543210-build-0123456789abcdef")).unwrap();
    let before = lab.listing();
    insta::assert_snapshot!(lab.shows("fsck --repair\nstatus one\nls"), @"
    $ rockenv fsck --repair
    `STORE/envs/one/record.json`: was written by another version of rockenv: its version is 2
    STORE: 1 problem
    help: use the version that wrote it, or move the store away and begin a new one
    exit code 1
    $ rockenv status one
    error: env `one` has format 2, but this rockenv supports only 1
    help: use the newer rockenv that made it
    exit code 3
    $ rockenv ls
    warning: env `one` is skipped: env `one` has format 2, but this rockenv supports only 1; details: rockenv fsck
    ");
    assert_eq!(before, lab.listing());
    // A format file with an unknown method is not damaged.
    let format = "{\"version\": 2, \"method\": \"newer\"}";
    fs::write(lab.at("format"), format).unwrap();
    insta::assert_snapshot!(lab.shows("fsck --repair"), @"
    error: store `STORE` has format 2, but this rockenv supports only 1
    help: use the newer rockenv that made it
    exit code 3
    ");
    assert_eq!(fs::read_to_string(lab.at("format")).unwrap(), format);
}

#[test]
fn an_env_directory_with_an_invalid_name_is_left_alone() {
    let lab = Lab::new();
    let (good, bad) = (lab.at("envs/one"), lab.at("envs/my env"));
    fs::rename(&good, &bad).unwrap();
    // `gc` may empty the trash and restore the ballast.
    let kept = || {
        let mut listing = lab.listing();
        let passing = [lab.at(".ballast"), lab.at("trash")];
        listing.retain(|path, _| !passing.iter().any(|one| path.starts_with(one)));
        listing
    };
    let before = kept();
    insta::assert_snapshot!(lab.shows("fsck --repair\ngc --yes"), @"
    $ rockenv fsck --repair
    `STORE/envs/my env`: was written by another version of rockenv: no env has such a name; if you renamed it, rename it back
    STORE: 1 problem
    help: use the version that wrote it, or move the store away and begin a new one
    exit code 1
    $ rockenv gc --yes
    error: `STORE/envs/my env` was written by another version of rockenv: no env has such a name; if you renamed it, rename it back
    help: use the version that wrote it
    exit code 3
    ");
    assert_eq!(before, kept());
    fs::rename(&bad, &good).unwrap();
    lab.fsck(&[], 0);
}

#[test]
fn changes_on_a_lost_layer_are_kept() {
    let lab = Lab::new();
    let tree = lab.record().head.tree.unwrap();
    let diff = lab.at("envs/one/trees").join(&tree).join("diff");
    fs::write(diff.join("note"), "mine").unwrap();
    fs::remove_dir_all(lab.layer(2)).unwrap();
    insta::assert_snapshot!(lab.masked(&lab.mends().concat()), @"
    env `one`: snapshot `mine` is lost: layer `ID` is missing
    env `one`: a layer below it is lost: layer `ID` is missing
    note: the trash contains 3 items to delete
      rockenv gc
    STORE: 2 problems
    help: rockenv fsck --repair
    repaired: env `one`: snapshot `mine` is lost: layer `ID` is missing
      its changes since then are now `STORE/envs/one/tree-ID.damaged-DATE`
    repaired: env `one`: a layer below it is lost: layer `ID` is missing
    note: `STORE/envs/one/tree-ID.damaged-DATE` was set aside by a repair
      rm -r STORE/envs/one/tree-ID.damaged-DATE
    STORE: repaired everything
    ");
    let kept = fs::read_dir(lab.at("envs/one"))
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .find(|path| path.to_string_lossy().contains(tree.as_str()))
        .unwrap();
    assert_eq!(fs::read_to_string(kept.join("diff/note")).unwrap(), "mine");
}
