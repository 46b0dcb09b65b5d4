//! A store that a stranger prepared, or whose files lie: commands kill, remove, unmount or write nothing outside the
//! store.

use std::os::unix::fs::{PermissionsExt as _, lchown};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use fs_err as fs;
use nix::mount::{MsFlags, mount};
use rockenv::testing::Hierarchies;
use rockenv::testing::Store;
use serde_json::{Value, json};

use crate::support::loopfs::{Kind, LoopFs, Mount};
use crate::support::ordinary::MadeUp;
use crate::support::run::wait_until;

const KEY: &str = "1111111111111111111111111111111111111111111111111111111111111111";
const NOW: &str = "2026-01-01T00:00:00Z";

/// Targets that no command may touch: a file, a directory, a mount, and a process in a control group.
struct Victims {
    file: PathBuf,
    tree: PathBuf,
    mounted: PathBuf,
    _mount: Mount,
    process: Child,
    groups: Vec<PathBuf>,
}

impl Victims {
    fn new(directory: &Path) -> Self {
        let [file, tree, mounted] = ["file", "tree", "mounted"].map(|name| directory.join(name));
        fs::create_dir_all(tree.join("below")).unwrap();
        fs::write(&file, "precious").unwrap();
        fs::write(tree.join("below/file"), "precious").unwrap();
        fs::create_dir(&mounted).unwrap();
        let tmpfs = Some("tmpfs");
        mount(tmpfs, &mounted, tmpfs, MsFlags::empty(), None::<&str>).unwrap();
        fs::write(mounted.join("file"), "precious").unwrap();
        let process = Command::new("sleep").arg("600").spawn().unwrap();
        let found = Hierarchies::probe().unwrap();
        let tops = found.v1.into_iter().map(|(_, top)| top);
        let tops = tops.chain(found.v2);
        let mut groups = Vec::new();
        for top in tops {
            let group = top.join(format!("victim-{}", process.id()));
            if fs::create_dir(&group).is_ok() {
                fs::write(group.join("cgroup.procs"), process.id().to_string()).unwrap();
                groups.push(group);
            }
        }
        assert!(!groups.is_empty(), "no control group can be made");
        Self {
            file,
            tree,
            _mount: Mount(mounted.clone()),
            mounted,
            process,
            groups,
        }
    }

    fn check(&mut self, after: &str) {
        for file in [
            &self.file,
            &self.tree.join("below/file"),
            &self.mounted.join("file"),
        ] {
            let text = fs::read_to_string(file).unwrap_or_default();
            assert_eq!(text, "precious", "{} after {after}", file.display());
        }
        let ended = self.process.try_wait().unwrap();
        assert!(ended.is_none(), "the process was ended by {after}");
        for group in &self.groups {
            let frozen = fs::read_to_string(group.join("cgroup.freeze")).unwrap_or_default();
            assert!(group.is_dir() && frozen.trim() != "1", "after {after}");
        }
    }
}

impl Drop for Victims {
    fn drop(&mut self) {
        drop(self.process.kill());
        drop(self.process.wait());
        for group in &self.groups {
            wait_until("a control group stays", || {
                fs::remove_dir(group).is_ok() || !group.exists()
            });
        }
    }
}

/// Makes a store with an env `one`, which the lies are about.
fn store(root: &Path) {
    let store = Store::open(root).unwrap();
    let write = |path: &str, value: &Value| {
        let path = store.root().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, value.to_string()).unwrap();
    };
    fs::create_dir_all(root.join("images").join(KEY).join("root/etc")).unwrap();
    write(
        &format!("images/{KEY}/image.json"),
        &json!({"key": KEY, "name": "base", "recipe": KEY, "digest": KEY, "built": NOW, "source_date": 0,
            "distribution": "", "packages": [], "bytes": 0}),
    );
    fs::create_dir_all(root.join("layers/aa/diff")).unwrap();
    write("layers/aa/layer.json", &layer("aa"));
    write("envs/one/record.json", &record());
    fs::create_dir_all(root.join("envs/one/trees/bb/diff")).unwrap();
    fs::create_dir_all(root.join("envs/one/run")).unwrap();
}

fn layer(id: &str) -> Value {
    json!({"id": id, "key": KEY, "parent": null, "env": "0123456789abcdef", "image_key": KEY, "tree": "bb", "title": "one",
        "created": NOW, "boot": "", "volumes": {}, "history": "clean"})
}

fn record() -> Value {
    json!({"version": 1, "id": "0123456789abcdef", "created": NOW, "used": NOW, "profile": "p", "targets": [], "image": "base",
        "image_key": KEY, "engine": "nspawn", "head": {"layer": "aa", "tree": "bb", "volumes": {}},
        "snapshots": [{"name": "one", "layer": "aa", "key": KEY, "origin": "step", "created": NOW}],
        "steps": [], "failed": null, "complete": true})
}

/// Returns the lies as pairs of a file and its content. `way` leads from `layers/`, `volumes/` or `envs/one/trees/` to
/// `/`.
fn lies(victims: &Victims) -> Vec<(&'static str, String)> {
    let way = |to: &Path| format!("{}{}", "../".repeat(30), &to.to_string_lossy()[1..]);
    let tree = way(&victims.tree);
    let with = |change: &dyn Fn(&mut Value)| {
        let mut record = record();
        change(&mut record);
        record.to_string()
    };
    let groups: Vec<Value> = victims
        .groups
        .iter()
        .map(|group| json!(["", group]))
        .collect();
    let state = |id: &str, groups: &[Value], lock: &Value| {
        json!({"id": id, "cgroup": {"unit": null, "directories": groups}, "lock": lock, "place": null}).to_string()
    };
    let record_file = "envs/one/record.json";
    let journal = "envs/one/journal.jsonl";
    let run = "envs/one/run/state.json";
    let line = |value: Value| format!("{value}\n");
    vec![
        (run, state("rockenv-one-1", &[], &json!(victims.file))),
        (run, state("rockenv-one-1", &groups, &Value::Null)),
        (run, state(&way(&victims.mounted), &[], &Value::Null)),
        (
            journal,
            line(json!({"remove": {"id": "0123456789abcdef", "layers": [tree]}})),
        ),
        (journal, line(json!({"forget": {"layers": [tree, ".."]}}))),
        (
            journal,
            line(json!({"expunge": {"volume": tree, "project": "below"}})),
        ),
        (record_file, with(&|it| it["head"]["tree"] = json!(tree))),
        (record_file, with(&|it| it["head"]["layer"] = json!(tree))),
        (
            record_file,
            with(&|it| it["head"]["volumes"] = json!({"build": tree})),
        ),
        (
            record_file,
            with(&|it| {
                it["failed"] =
                    json!({"step": "s", "tree": tree, "parent": null, "log": tree, "code": 1});
            }),
        ),
        (
            record_file,
            with(&|it| it["snapshots"][0]["layer"] = json!(tree)),
        ),
        (record_file, with(&|it| it["image_key"] = json!(tree))),
        ("layers/aa/layer.json", layer(&tree).to_string()),
        ("layers/aa/layer.json", {
            let mut layer = layer("aa");
            layer["parent"] = json!(tree);
            layer.to_string()
        }),
        (
            "envs/one/lease",
            json!({"layers": [tree], "image": tree}).to_string(),
        ),
        (
            "envs/one/ephemeral",
            json!({"boot": "", "pid": victims.process.id(), "start": 0}).to_string(),
        ),
        (
            "images/refs/1111111111111111.json",
            json!({"key": tree}).to_string(),
        ),
    ]
}

const COMMANDS: [&[&str]; 8] = [
    &["ls"],
    &["du"],
    &["--yes", "gc", "--preset", "ci", "--free", "1T"],
    &["exec", "one", "--", "true"],
    &[
        "up",
        "hip-smoke",
        "--target",
        "gfx1103",
        "--name",
        "one",
        "--offline",
    ],
    &["down", "one"],
    &["fsck", "--repair"],
    &["rm", "--yes", "one"],
];

/// Gives a store to a user. A background process may still be deleting files of the store, so errors do not matter.
fn give(path: &Path, owner: u32) {
    drop(lchown(path, Some(owner), Some(owner)));
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            true => give(&entry.path(), owner),
            false => drop(lchown(entry.path(), Some(owner), Some(owner))),
        }
    }
}

#[test]
fn nothing_that_lies_in_a_store_leads_out_of_it() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = MadeUp::at(disk.join("home"));
    let mut victims = Victims::new(disk.path());
    let root = user.store();
    let lies = lies(&victims);
    for (at, (file, text)) in lies.iter().enumerate() {
        for command in COMMANDS {
            drop(fs::remove_dir_all(&root));
            store(&root);
            let path = root.join(file);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(&path, text).unwrap();
            let name = format!("{command:?} with lie {at}: {file} {text}");
            let output = user.sudo(user.program(), command).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert!(
                output.status.code().is_some_and(|code| code != 101),
                "{said}"
            );
            victims.check(&format!("{name}\n{said}"));
            if at > 0 {
                continue;
            }
            // If a stranger owns the store, the command refuses it before it reads the lie.
            give(&root, MadeUp::UID);
            let output = user.sudo(user.program(), command).output().unwrap();
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            assert_eq!(output.status.code(), Some(4), "{name}\n{said}");
            assert!(said.contains("belongs to user 4321"), "{name}\n{said}");
            victims.check(&format!("{name}, a stranger's"));
            give(&root, 0);
        }
    }
}

#[test]
fn a_store_that_others_own_or_may_write_to_is_refused() {
    let disk = LoopFs::new(Kind::Ext4);
    let user = MadeUp::at(disk.join("home"));
    let root = user.store();
    let refused = |mut command: Command, says: &str| {
        let output = command.output().unwrap();
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(4), "{said}");
        assert!(said.contains(says) && said.contains("help: "), "{said}");
    };
    // Root does not use a stranger's empty directory as a store.
    fs::create_dir(&root).unwrap();
    give(&root, MadeUp::UID);
    let build = ["image", "build", "debian-forky"];
    refused(user.sudo(user.program(), &build), "belongs to user 4321");
    assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    fs::remove_dir(&root).unwrap();
    store(&root);
    for below in ["", "format", "envs"] {
        let path = root.join(below);
        lchown(&path, Some(MadeUp::UID), None).unwrap();
        refused(user.sudo(user.program(), &["ls"]), "belongs to user 4321");
        lchown(&path, Some(0), None).unwrap();
        let mode = fs::metadata(&path).unwrap().permissions();
        for open in [0o777, 0o770] {
            fs::set_permissions(&path, std::fs::Permissions::from_mode(open)).unwrap();
            refused(
                user.sudo(user.program(), &["ls"]),
                "writable by other users",
            );
            refused(user.sudo(user.program(), &["ls"]), "run `chmod go-w ");
        }
        fs::set_permissions(&path, mode).unwrap();
    }
    // The user may not use root's store.
    refused(user.command(user.program(), &["ls"]), "by its owner only");
    refused(
        user.command(user.program(), &["fsck"]),
        "help: sudo rockenv",
    );
    let output = user.sudo(user.program(), &["ls"]).output().unwrap();
    assert!(output.status.success(), "{output:?}");
}
