//! The behaviour of commands when a part of the store is missing, or all of it is read-only.

use super::*;
use rockenv::testing::btrfs;

use crate::support::loopfs::{bind, run};

#[test]
fn a_live_tree_without_its_files_blocks_no_command() {
    let lab = Lab::new();
    let place = |tree: &str| lab.at("envs/one/trees").join(tree);
    let tree = lab.record().head.tree.unwrap();
    fs::remove_dir_all(place(&tree).join("diff")).unwrap();
    lab.finds_and_mends(&["its live tree", "is missing"]);
    assert_eq!(lab.record().head.tree, None);
    assert!(!place(&tree).exists());
    // Every other command repairs it as well.
    let tree = lab.locked("one").live_tree().unwrap();
    fs::remove_dir_all(lab.at("envs/one/trees")).unwrap();
    let new = lab.locked("one").live_tree().unwrap();
    assert_ne!(new, tree);
    assert!(place(&new).join("diff").exists());
    lab.wait_for_locks();
    lab.fsck(&[], 0);
}

#[test]
fn a_rollback_to_a_snapshot_without_its_layer_names_the_repair() {
    let lab = Lab::new();
    // A command that is killed after its first commit leaves no earlier state that passes for complete.
    let first = lab.record().snapshots[0].layer.clone();
    let mut env = lab.locked("one");
    env.move_to_layer(Vec::new(), &first, false).unwrap();
    drop(env);
    assert!(!lab.record().complete);
    // A layer between it and the env, and its own.
    for lost in [1, 2] {
        fs::remove_dir_all(lab.layer(lost)).unwrap();
        let error = lab.locked("one").rollback("mine").unwrap_err();
        assert_eq!(error.message(), "snapshot `mine` has lost a layer");
        assert_eq!(error.help_text(), Some("rockenv fsck --repair"));
        assert_eq!(lab.record().head.layer.as_ref(), Some(&first));
    }
}

#[test]
fn a_snapshot_that_a_service_keeps_does_not_need_the_one_below() {
    let lab = Lab::new();
    let old = lab.record();
    let path = lab.layer(1).join("layer.json");
    let text = fs::read_to_string(&path).unwrap();
    let mut layer: serde_json::Value = serde_json::from_str(&text).unwrap();
    layer["kept"] = serde_json::json!({"socket": "/nowhere", "image": "sha256:1"});
    fs::write(&path, layer.to_string()).unwrap();
    fs::remove_dir_all(lab.layer(0)).unwrap();
    lab.finds_and_mends(&["depends on layer", "is missing"]);
    assert_eq!(lab.record().snapshots, old.snapshots[1..]);
}

#[test]
fn changes_on_an_image_that_is_gone_are_kept() {
    let lab = Lab::on(LoopFs::new(Kind::Btrfs));
    let mut env = lab.locked("one");
    env.reset_root().unwrap();
    env.live_tree().unwrap();
    drop(env);
    fs::remove_dir_all(lab.at("images").join(KEY)).unwrap();
    let kept = lab.locked("one").rollback("mine").unwrap();
    assert_eq!(kept.as_deref(), Some("before-rollback"));
}

#[test]
fn a_read_only_store_is_named() {
    let lab = Lab::new();
    let root = lab.store.root();
    let _mount = bind(root, root);
    run(Command::new("mount")
        .args(["-o", "remount,bind,ro"])
        .arg(root));
    // The env exists, or is new.
    for name in ["one", "new"] {
        let locked = lab
            .store
            .lock_env(&name.parse().unwrap(), "test", Duration::ZERO);
        let error = locked.unwrap_err();
        let says = format!("the store at `{}` is mounted read-only", root.display());
        assert_eq!(error.message(), says, "{name}");
        assert_eq!(error.kind().exit_code(), 4, "{name}");
        let help = format!("mount -o remount,rw {};", root.display());
        assert!(error.help_text().unwrap().starts_with(&help), "{error:?}");
    }
}

#[test]
fn the_tree_of_a_failed_step_that_became_a_layer_unrecorded_is_recorded() {
    let lab = Lab::new();
    let mut record = lab.record();
    let kept = record.snapshots.pop().unwrap();
    let tree = lab.store.layer(&kept.layer).unwrap().unwrap().tree;
    let mut text = serde_json::to_value(&record).unwrap();
    text["failed"] =
        serde_json::json!({"step": "build", "tree": tree, "log": "logs/1/build.log", "code": 1});
    fs::write(lab.at("envs/one/record.json"), text.to_string()).unwrap();
    let entry = serde_json::json!({"freeze": {"tree": tree, "snapshot": kept}});
    fs::write(lab.at("envs/one/journal.jsonl"), format!("{entry}\n")).unwrap();
    drop(lab.locked("one"));
    let new = lab.record();
    assert_eq!(new.snapshots.last(), Some(&kept));
    assert_eq!(new.failed, None);
    assert_eq!(new.head, record.head);
}

/// As Timeshift and Snapper leave it when they go back to such a snapshot.
#[test]
fn a_store_in_a_snapshot_of_its_file_system_lacks_its_subvolumes() {
    let mut lab = Lab::on(LoopFs::new(Kind::Btrfs));
    let top = lab.root.ancestors().nth(2).unwrap().to_owned();
    btrfs::snapshot(&top, &top.join("back"), false).unwrap();
    lab.root = top.join("back").join(lab.root.strip_prefix(&top).unwrap());
    lab.store = Store::open(&lab.root).unwrap();
    let mut record = serde_json::to_value(lab.record()).unwrap();
    let tree = record["head"]["tree"].clone();
    record["failed"] =
        serde_json::json!({"step": "build", "tree": tree, "log": "logs/1/build.log"});
    fs::write(lab.at("envs/one/record.json"), record.to_string()).unwrap();
    let mut env = lab.locked("one");
    assert_eq!(env.record().unwrap().head.tree, None);
    let tree = env.live_tree().map(drop);
    let volumes = env.ensure_volumes(&["build".into()], &BuildUser::new(0, 0));
    for outcome in [tree, volumes] {
        let error = outcome.unwrap_err();
        assert_eq!(error.kind().exit_code(), 7, "{error:?}");
        assert_eq!(error.help_text(), Some("rockenv fsck --repair"));
    }
    drop(env);
    // A layer that a service keeps has no subvolume but those of its build volumes.
    let root = lab.layer(2).join("root");
    fs::remove_dir(&root).unwrap();
    fs::create_dir(&root).unwrap();
    lab.finds_and_mends(&[
        "has no tree",
        "its frozen volume `build` is missing",
        "its build volume `build`",
        "the tree of its failed step",
    ]);
    let mut env = lab.locked("one");
    assert_eq!(fs::read_dir(lab.at("volumes")).unwrap().count(), 0);
    env.live_tree().unwrap();
}
