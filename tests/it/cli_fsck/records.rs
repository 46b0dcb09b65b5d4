//! Damaged and missing metadata: the store's format, records, specs.

use super::*;
use crate::support::loopfs::bind;

#[test]
fn a_damaged_or_lost_format_is_made_again() {
    let lab = Lab::new();
    let good = fs::read_to_string(lab.at("format")).unwrap();
    spoil(&lab.at("format"));
    let text = lab.finds_and_mends(&["format", "damaged"]);
    assert!(text.contains("repaired"), "{text}");
    assert_eq!(fs::read_to_string(lab.at("format")).unwrap(), good);
    fs::remove_file(lab.at("format")).unwrap();
    // No command takes the store for a new or empty one.
    insta::assert_snapshot!(lab.shows("ls\nup hip-smoke"), @"
    $ rockenv ls
    error: the store at `STORE` lost its file `format`
    help: rockenv fsck --repair
    exit code 3
    $ rockenv up hip-smoke
    error: the store at `STORE` lost its file `format`
    help: rockenv fsck --repair
    exit code 3
    ");
    // An entry of the trash that cannot be removed hides no repair.
    let entry = lab.at("trash/0123456789abcdef");
    fs::create_dir(&entry).unwrap();
    let mounted = bind(&lab.at("caches"), &entry);
    let text = lab.finds_and_mends(&["format", "missing"]);
    assert!(text.contains("repaired"), "{text}");
    drop(mounted);
    // The store's path may be a link, for `fsck` as for other commands.
    let link = lab.root.with_file_name("link");
    fs::os::unix::fs::symlink(&lab.root, &link).unwrap();
    let output = program(&link).arg("fsck").output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{output:?}");
}

#[test]
fn a_damaged_record_is_made_again_from_the_layers() {
    let lab = Lab::new();
    let old = lab.record();
    let tree = old.head.tree.clone().unwrap();
    let volume = old.head.volumes["build"].clone();
    let spec = lab.at("envs/one/spec.toml");
    let text = fs::read_to_string(&spec).unwrap();
    fs::write(&spec, text + "\n[params]\ncomponent = 'two words'\n").unwrap();
    spoil(&lab.at("envs/one/record.json"));
    // The kernel kills a repair that writes a larger file, such as the new record.
    lab.wait_for_locks();
    let limited = "ulimit -c 0; ulimit -f 1; exec \"$0\" fsck --repair";
    let mut killed = Command::new("/bin/sh");
    killed
        .args(["-c", limited, env!("CARGO_BIN_EXE_rockenv")])
        .env_clear()
        .env("ROCKENV_HOME", &lab.root)
        .env("HOME", "/nonexistent")
        .env("XDG_CONFIG_HOME", "/nonexistent")
        .current_dir("/");
    assert_eq!(killed.output().unwrap().status.code(), None);
    lab.finds_and_mends(&["env `one`", "record is damaged"]);
    let new = lab.record();
    assert_eq!(new.snapshots, old.snapshots);
    assert_eq!(new.head.layer, old.head.layer);
    assert_eq!((new.id, new.image_key), (old.id, old.image_key));
    // The suggested command is about this env.
    let command = new.command.unwrap();
    assert!(command.starts_with("rockenv up rocm-library "), "{command}");
    assert!(command.contains(" --name one "), "{command}");
    let param = " --param 'component=two words' ";
    assert!(command.contains(param), "{command}");
    // The env has its build volume, with hours of work, again.
    assert_eq!(new.head.volumes["build"], volume);
    assert!(lab.store.volume_dir(&volume).join("object.o").exists());
    let kept = fs::read_dir(lab.at("envs/one")).unwrap();
    let kept: Vec<PathBuf> = kept.map(|entry| entry.unwrap().path()).collect();
    let aside = |start: &str| {
        kept.iter()
            .find(|path| path.to_string_lossy().contains(start))
            .cloned()
    };
    assert!(aside("record.json.damaged-").is_some(), "{kept:?}");
    let trees = aside("trees.damaged-").unwrap();
    assert!(trees.join(tree).exists());
}

#[test]
fn nobody_is_told_to_delete_a_volume_that_a_repair_gives_back() {
    let lab = Lab::new();
    let volume = lab.record().head.volumes["build"].clone();
    spoil(&lab.at("envs/one/record.json"));
    lab.wait_for_locks();
    for words in [&["fsck"][..], &["gc", "--dry-run"], &["du"]] {
        let output = program(&lab.root).args(words).output().unwrap();
        let [out, err] =
            [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
        let text = format!("{out}{err}");
        let says = "may belong to an env whose record ";
        assert!(text.contains(says), "{words:?}\n{text}");
        assert!(!text.contains("rm -r"), "{words:?}\n{text}");
        assert!(!text.contains("no env needs it"), "{words:?}\n{text}");
    }
    lab.fsck(&["--repair"], 0);
    assert_eq!(lab.record().head.volumes["build"], volume);
    // A link to itself stands for a file on a bad sector.
    let record = lab.at("envs/one/record.json");
    fs::remove_file(&record).unwrap();
    fs::os::unix::fs::symlink(&record, &record).unwrap();
    lab.fsck(&["--repair"], 0);
    assert_eq!(lab.record().head.volumes["build"], volume);
}

#[test]
fn a_damaged_record_on_pulled_layers_gets_an_id() {
    let lab = Lab::new();
    let old = lab.record();
    for layer in old.layers() {
        let path = lab.at(&format!("layers/{layer}/layer.json"));
        let text = fs::read_to_string(&path).unwrap();
        let mut layer: serde_json::Value = serde_json::from_str(&text).unwrap();
        // No env of this store made a pulled layer.
        layer["env"] = "".into();
        fs::write(&path, layer.to_string()).unwrap();
    }
    spoil(&lab.at("envs/one/record.json"));
    lab.finds_and_mends(&["env `one`", "record is damaged"]);
    assert!(!lab.record().id.is_empty());
}

#[test]
fn a_damaged_record_without_a_spec_is_set_aside_and_its_volumes_stay() {
    let lab = Lab::new();
    let volume = lab.record().head.volumes["build"].clone();
    spoil(&lab.at("envs/one/record.json"));
    fs::remove_file(lab.at("envs/one/spec.toml")).unwrap();
    let text = lab.finds_and_mends(&["record is damaged"]);
    assert!(text.contains("rockenv up"), "{text}");
    assert!(lab.store.record(&"one".parse().unwrap()).unwrap().is_none());
    assert!(lab.store.volume_dir(&volume).join("object.o").exists());
}

#[test]
fn one_damaged_file_hides_one_thing_and_stops_no_command() {
    let lab = Lab::new();
    lab.env("two");
    let id = lab.record().snapshots[0].layer.clone();
    let run = |arguments: &[&str]| {
        let output = program(&lab.root).args(arguments).output().unwrap();
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        let (out, err) = (text(&output.stdout), text(&output.stderr));
        // A small disk may not satisfy the policy's limits.
        let code = output.status.code();
        assert!(matches!(code, Some(0 | 10)), "{arguments:?}\n{out}{err}");
        (out, err)
    };
    let layers = || fs::read_dir(lab.at("layers")).unwrap().count();
    let all = layers();
    let files = [
        ("envs/one/record.json".to_owned(), "env `one`"),
        (format!("layers/{id}/layer.json"), "layer `"),
        (format!("images/{KEY}/image.json"), "image"),
        ("envs/one/lease".to_owned(), "lease"),
        ("images/refs/x.json".to_owned(), "reference"),
    ];
    for (file, what) in files {
        let whole = fs::read(lab.at(&file)).ok();
        for text in ["{\"version\":1}", "null", "[]", "", "{\"id\":\"../..\"}"] {
            fs::write(lab.at(&file), text).unwrap();
            let (out, err) = run(&["ls"]);
            assert!(out.contains("two"), "{out}");
            let of_env = what.starts_with("env");
            assert_eq!(out.contains("one"), !of_env, "{file} {text}\n{out}");
            assert_eq!(err.contains("details: rockenv fsck"), of_env, "{err}");
            let (_, err) = run(&["du"]);
            let is_named = of_env || what.starts_with("layer");
            assert_eq!(err.contains(what), is_named, "{file} {text}\n{err}");
            let (_, err) = run(&["--yes", "gc", "--preset", "ci"]);
            assert_eq!(
                err.contains("details: rockenv fsck"),
                is_named,
                "{file} {text}\n{err}"
            );
            assert_eq!(layers(), all, "{file} {text}");
            assert!(lab.at(&format!("images/{KEY}/root")).exists());
        }
        match whole {
            Some(whole) => fs::write(lab.at(&file), whole).unwrap(),
            // Only a running command has this file, so the next command may have removed it.
            None => drop(fs::remove_file(lab.at(&file))),
        }
        lab.fsck(&[], 0);
    }
    for text in ["{\"version\":1}", "null", "[]"] {
        fs::write(lab.at("envs/one/record.json"), text).unwrap();
        lab.finds_and_mends(&["record is damaged"]);
        assert_eq!(lab.record().snapshots.len(), 3);
        fs::write(lab.layer(2).join("layer.json"), text).unwrap();
        lab.finds_and_mends(&["layer.json is damaged"]);
        lab.env("one");
    }
}

#[test]
fn after_a_repair_gc_works_and_keeps_what_the_env_had() {
    let lab = Lab::new();
    let old = lab.record();
    spoil(&lab.at("envs/one/record.json"));
    let help = lab.gc(10);
    assert!(help.contains("env `one` is skipped"), "{help}");
    assert!(help.contains("details: rockenv fsck"), "{help}");
    lab.finds_and_mends(&["record is damaged"]);
    lab.gc(10);
    let new = lab.record();
    assert_eq!(new.snapshots, old.snapshots);
    let volume = lab.store.volume_dir(&old.head.volumes["build"]);
    assert!(volume.join("object.o").exists());
    // `fsck` reports what the repair set aside, and another `gc` removes nothing of the env.
    let text = lab.fsck(&[], 0);
    assert!(text.contains("set aside by a repair"), "{text}");
    lab.gc(10);
    assert_eq!(lab.record().snapshots, new.snapshots);
    assert!(volume.join("object.o").exists());
}

#[test]
fn a_lost_record_costs_no_layer_until_somebody_decides_and_no_build_tree() {
    let lab = Lab::new();
    let old = lab.record();
    spoil(&lab.at("envs/one/record.json"));
    fs::remove_file(lab.at("envs/one/spec.toml")).unwrap();
    lab.finds_and_mends(&["record is damaged"]);
    let refused = lab.gc(10);
    assert!(
        refused.contains("env `one` has lost its record"),
        "{refused}"
    );
    assert!(
        refused.contains("rockenv up PROFILE --name one"),
        "{refused}"
    );
    assert!(!refused.contains("fsck"), "{refused}");
    let layers = || fs::read_dir(lab.at("layers")).unwrap().count();
    assert_eq!(layers(), 3);
    // Takes the other way that both commands suggest.
    let text = lab.fsck(&[], 0);
    let told = |text: &str| {
        text.rsplit("rm ")
            .next()
            .unwrap()
            .lines()
            .next()
            .unwrap()
            .to_owned()
    };
    let aside = text
        .lines()
        .find(|line| line.contains("--name one"))
        .unwrap();
    let mut lines = refused.lines();
    let advice = lines.find(|line| line.contains("--name one")).unwrap();
    assert_eq!(told(aside), told(advice));
    fs::remove_file(told(aside)).unwrap();
    let note = lab.gc(10);
    // `gc` keeps hours of work, the user's snapshot, and the steps below it.
    let volume = lab.store.volume_dir(&old.head.volumes["build"]);
    assert!(volume.join("object.o").exists());
    assert!(
        note.contains(&format!("to remove it: rm -r {}", volume.display())),
        "{note}"
    );
    assert_eq!(layers(), 3);
    let mut roots = program(&lab.root);
    let roots = roots.args(["gc", "--roots"]).output().unwrap();
    let roots = String::from_utf8_lossy(&roots.stdout).into_owned();
    assert!(roots.contains("an env may have lost it"), "{roots}");
}

#[test]
fn an_id_that_only_an_own_snapshot_tells_is_found() {
    let lab = Lab::new();
    let old = lab.record();
    // The steps' layers come from another env, and the build volume is missing.
    for index in 0..2 {
        let place = lab.layer(index).join("layer.json");
        let text = fs::read_to_string(&place).unwrap();
        let mut layer: serde_json::Value = serde_json::from_str(&text).unwrap();
        layer["env"] = "0123456789abcdef".into();
        fs::write(place, layer.to_string()).unwrap();
    }
    let other = lab.at("envs/other");
    fs::create_dir(&other).unwrap();
    let mut record = old.clone();
    record.id = "0123456789abcdef".parse().unwrap();
    record.snapshots.truncate(2);
    record.head = Head {
        layer: Some(record.snapshots[1].layer.clone()),
        ..Head::default()
    };
    let text = serde_json::to_string(&record).unwrap();
    fs::write(other.join("record.json"), text).unwrap();
    fs::remove_dir_all(lab.store.volume_dir(&old.head.volumes["build"])).unwrap();
    spoil(&lab.at("envs/one/record.json"));
    lab.fsck(&["--repair"], 0);
    assert_eq!(lab.record().id, old.id);
    assert_eq!(lab.record().snapshots, old.snapshots);
}
