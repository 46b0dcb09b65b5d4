//! Results are trees: links, hard links, empty directories, modes and times come back, on every kind of store.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, symlink};
use std::path::{Path, PathBuf};

use fs_err as fs;
use serde_json::Value;

use super::Two;
use crate::support::env::{TestStore, is_service};
use crate::support::loopfs::{Kind, LoopFs};

const STEPS: &str = r#"
[[volume]]
name = "out"
kind = "output"
target = "/v/out"
[[step]]
name = "make"
run = '''
cd /v/out; mkdir -p lib bin empty/inner private was
echo code > lib/libx.so.1.0; ln -s libx.so.1.0 lib/libx.so; ln -s lib lib64; ln -s /etc/shadow away
echo tool > bin/tool; ln bin/tool bin/again; chmod 750 bin/tool; echo x > was/x; echo old > gone
chmod 700 empty/inner; chmod 2750 private
find . -mindepth 1 | sort -r | xargs touch -h -d @1700000000.123456789
'''
[[step]]
name = "change"
run = '''
cd /v/out; rm -r gone was; ln -s lib was; echo more > private/more; cat lib64/libx.so > /dev/null
'''
"#;

fn out(store: &TestStore, env: &str) -> PathBuf {
    store.home().join("outputs").join(env).join("out")
}

/// Returns what defines a tree, by path: type, permissions, time, content or target, and the first name of the file.
fn tree(root: &Path) -> BTreeMap<String, String> {
    let (mut found, mut first) = (BTreeMap::new(), BTreeMap::new());
    let mut waiting = vec![root.to_owned()];
    while let Some(directory) = waiting.pop() {
        let mut entries: Vec<PathBuf> = fs::read_dir(&directory)
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect();
        entries.sort();
        for path in entries {
            let data = fs::symlink_metadata(&path).unwrap();
            let name = path.strip_prefix(root).unwrap().display().to_string();
            let what = match data.file_type() {
                kind if kind.is_dir() => {
                    waiting.push(path.clone());
                    "directory".to_owned()
                }
                kind if kind.is_symlink() => fs::read_link(&path).unwrap().display().to_string(),
                _ => fs::read_to_string(&path).unwrap(),
            };
            let same = first.entry(data.ino()).or_insert(name.clone()).clone();
            let (mode, s, ns) = (data.mode() & 0o170_777, data.mtime(), data.mtime_nsec());
            found.insert(name, format!("{mode:o} {s}.{ns:09} {same} {what:?}"));
        }
    }
    found
}

/// Compares everything except owners, which are those of the output directory.
fn assert_whole(store: &TestStore, env: &str, whole: &BTreeMap<String, String>) {
    assert_eq!(&tree(&out(store, env)), whole, "{env}");
    store.rockenv(&["status", "--check", env]).ok();
}

fn notices(store: &TestStore, words: &[&str], code: i32, what: &str) {
    let text = store.rockenv(words).exits(code).text();
    assert!(text.contains(what), "{text}");
}

#[test]
fn what_a_step_leaves_comes_back_as_it_was() {
    // A service does not see the test's mounts, and has one kind of store.
    let disks = (!is_service()).then(|| [Kind::Btrfs, Kind::Xfs].map(LoopFs::with_base));
    let store_on = |at: usize| {
        let disks = disks.as_ref();
        disks.map_or_else(TestStore::new, |disks| TestStore::on(&disks[at]))
    };
    let two = Two::new(TestStore::new(), store_on(0));
    let name = two.pushed(STEPS);
    let whole = tree(&out(&two.one, name));
    let has = |path: &str, text: &str| {
        assert!(whole[path].contains(text), "{path}: {}", whole[path]);
    };
    has("lib64", "\"lib\"");
    has("was", "\"lib\"");
    has("away", "\"/etc/shadow\"");
    has("bin/tool", "bin/again");
    has("bin/tool", "100750 1700000000.123456789");
    has("empty/inner", "40700 1700000000.123456789");
    assert!(!whole.contains_key("gone"));
    let up = |env: &str| two.one.rockenv(&["up", name, "--name", env]);
    // `up` has nothing to do for an unchanged output, and a result that a step removed stays away.
    up(name).ok().says(&["nothing to do"]);
    assert_whole(&two.one, name, &whole);

    // Lost results come back, whether all or some are lost.
    fs::remove_dir_all(out(&two.one, name)).unwrap();
    two.one.rockenv(&["status", "--check", name]).exits(8);
    up(name).ok();
    assert_whole(&two.one, name, &whole);
    for path in ["lib64", "bin/tool", "bin/again", "empty/inner", "private"] {
        let place = out(&two.one, name).join(path);
        match fs::symlink_metadata(&place).unwrap().is_dir() {
            true => fs::remove_dir_all(&place).unwrap(),
            false => fs::remove_file(&place).unwrap(),
        }
        notices(
            &two.one,
            &["status", "--check", name],
            8,
            &format!("out: {path} is missing"),
        );
        notices(&two.one, &["fsck"], 1, &format!("`{path}` is missing"));
        up(name).ok();
        assert_whole(&two.one, name, &whole);
    }
    // Copies of one file become hard links again. A user's link stays.
    let place = out(&two.one, name);
    fs::remove_file(place.join("bin/tool")).unwrap();
    fs::copy(place.join("bin/again"), place.join("bin/tool")).unwrap();
    up(name).ok();
    assert_whole(&two.one, name, &whole);
    fs::remove_file(place.join("lib64")).unwrap();
    symlink("/etc", place.join("lib64")).unwrap();
    up(name).exits(8).says(&["1 result is not this build's"]);
    assert_eq!(
        fs::read_link(place.join("lib64")).unwrap(),
        Path::new("/etc")
    );
    let what = "lib64 links to `/etc`, not to `lib`";
    notices(&two.one, &["status", "--check", name], 8, what);
    fs::remove_file(place.join("lib64")).unwrap();
    up(name).ok();

    // The same for another env, a fork, a machine with another kind of store, and files.
    let (second, fork) = (format!("{name}-b"), format!("{name}-f"));
    up(&second).ok();
    assert_whole(&two.one, &second, &whole);
    two.one.rockenv(&["fork", name, &fork]).ok();
    up(&fork).ok();
    assert_whole(&two.one, &fork, &whole);
    two.run(&two.other, &["up", name, "--pull"]).ok();
    assert_whole(&two.other, name, &whole);
    let third = store_on(1);
    third.profile_named(name, STEPS);
    let file = two.other.work().join("snapshots");
    let file = file.to_str().unwrap();
    two.other
        .rockenv(&["export", name, "--snapshots", file])
        .ok();
    third.rockenv(&["import", file]).ok();
    third.rockenv(&["up", name]).ok().says(&["2 done before"]);
    assert_whole(&third, name, &whole);
    for store in [&two.one, &two.other, &third] {
        store.rockenv(&["fsck"]).ok();
    }
    // `fsck` also checks the results that a snapshot keeps.
    let id = fs::read_dir(third.home().join("layers")).unwrap();
    let kept = id
        .map(|entry| entry.unwrap().path().join("results/out/lib64"))
        .find(|link| fs::symlink_metadata(link).is_ok())
        .unwrap();
    fs::remove_file(kept).unwrap();
    notices(&third, &["fsck"], 1, "`out/lib64` is missing");
}

#[test]
fn a_tree_is_handed_out_whole() {
    let store = TestStore::new();
    let name = store.env();
    store.profile_named(name, STEPS);
    store.rockenv(&["up", name]).ok();
    let whole = tree(&out(&store, name));
    insta::assert_snapshot!(store.shows("export ENV to"), @"
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV`, then `rockenv up ENV --locked`
    exported 4 files, 4 links, 1 empty directory; to/ENV.provenance.json describes them
    ");
    let to = store.work().join("to");
    assert_eq!(tree(&to.join("out")), whole);
    let text = fs::read(to.join(format!("{name}.provenance.json"))).unwrap();
    let manifest: Value = serde_json::from_slice(&text).unwrap();
    let subject = |name: &str| {
        let mut all = manifest["subject"].as_array().unwrap().iter();
        all.find(|one| one["name"] == name).unwrap()["annotations"].clone()
    };
    assert_eq!(subject("out/lib64")["target"], "lib");
    assert_eq!(subject("out/empty/inner")["type"], "directory");
    assert_eq!(subject("out/lib/libx.so.1.0"), Value::Null);
    let check = || store.rockenv(&["export", "--check", "to"]);
    check().ok();
    store.rockenv(&["export", name, "to"]).ok();
    for path in ["lib64", "empty/inner", "lib/libx.so.1.0"] {
        let place = to.join("out").join(path);
        match place.is_dir() && !place.is_symlink() {
            true => fs::remove_dir(place).unwrap(),
            false => fs::remove_file(place).unwrap(),
        }
        check().exits(8).prints(&format!("out/{path} is missing"));
        store.rockenv(&["export", name, "to"]).ok();
        check().ok();
    }
    fs::remove_file(to.join("out/lib64")).unwrap();
    symlink("/etc", to.join("out/lib64")).unwrap();
    insta::assert_snapshot!(store.shows("export --check to\nexport ENV to"), @"
    $ rockenv export --check to
    out/lib64 is not a symbolic link to `lib`
    to/ENV.provenance.json: 8 of 9 files match
    exit code 8
    $ rockenv export ENV to
    error: `to/out/lib64` exists with other content; refusing to overwrite it
    help: rockenv export ENV NEW-DIRECTORY
    exit code 2
    ");
}

#[test]
fn what_cannot_be_kept_fails_the_step() {
    let store = TestStore::new();
    let name = store.env();
    let bind = "perl -MSocket -e \"socket(S, PF_UNIX, SOCK_STREAM, 0); bind(S, sockaddr_un(shift)) or die\"";
    let mut all = vec![("mkfifo", "a FIFO"), (bind, "a socket")];
    // Podman does not let a step make a device.
    if !is_service() {
        all.push(("device() { mknod \"$1\" c 1 3; }; device", "a device"));
    }
    for (make, what) in all {
        store.profile_named(
            name,
            &format!(
                "[[volume]]\nname = \"out\"\nkind = \"output\"\ntarget = \"/v/out\"\n\
                 [[step]]\nname = \"make\"\nuser = \"root\"\n\
                 run = '''rm -rf /v/out/a; mkdir -p /v/out/a; {make} /v/out/a/it'''\n"
            ),
        );
        store
            .rockenv(&["up", name])
            .exits(5)
            .says(&["step `make`", &format!("out/a/it` is {what}")]);
        store.rockenv(&["status", "--check", name]).exits(8);
    }
}
