//! `fsck` on stores with each kind of damage that it knows. Needs root, as stores do.

use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread;
use std::time::{Duration, Instant};

use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::finish;
use crate::support::transcript::{masked, transcript};
use fs_err as fs;
use jiff::Timestamp;
use rockenv::testing::Freeze;
use rockenv::testing::Image;
use rockenv::testing::StepKey;
use rockenv::testing::random_id;
use rockenv::testing::record;
use rockenv::testing::record::{Head, Origin, Record};
use rockenv::testing::{BuildUser, Spec};
use rockenv::testing::{LockedEnv, Store};

mod keeps;
mod lost;
mod records;

const KEY: &str = "1111111111111111111111111111111111111111111111111111111111111111";

/// A store with env `one`: snapshots of two steps, one that the user made, a live tree and a build volume.
struct Lab {
    _directory: tempfile::TempDir,
    root: PathBuf,
    store: Store,
    // Dropped last, because the fields above have files open on it.
    _disk: LoopFs,
}

fn program(root: &Path) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rockenv"));
    command
        .env_clear()
        .env("ROCKENV_HOME", root)
        .env("HOME", "/nonexistent")
        .env("XDG_CONFIG_HOME", "/nonexistent")
        .current_dir("/");
    command
}

impl Lab {
    /// An overlay store.
    fn new() -> Self {
        Self::on(LoopFs::new(Kind::Ext4))
    }

    fn on(disk: LoopFs) -> Self {
        let directory = tempfile::tempdir_in(disk.path()).unwrap();
        let root = directory.path().join("store");
        let store = Store::open(&root).unwrap();
        let lab = Self {
            _directory: directory,
            root,
            store,
            _disk: disk,
        };
        lab.image();
        lab.env("one");
        lab.wait_for_locks();
        lab
    }

    fn image(&self) {
        let place = self.root.join("images").join(KEY);
        fs::create_dir_all(place.join("root/etc")).unwrap();
        let image = Image {
            key: KEY.parse().unwrap(),
            name: "debian-forky".into(),
            recipe: "4".repeat(64).parse().unwrap(),
            resolved: None,
            env: None,
            digest: "d".repeat(64),
            built: Timestamp::now(),
            source_date: 0,
            distribution: "debian 14".into(),
            packages: Vec::new(),
            bytes: 0,
            took_ms: None,
        };
        let text = serde_json::to_string(&image).unwrap();
        fs::write(place.join("image.json"), text).unwrap();
        fs::create_dir_all(self.root.join("images/refs")).unwrap();
        fs::write(self.reference(), format!("{{\"key\":\"{KEY}\"}}")).unwrap();
    }

    fn reference(&self) -> PathBuf {
        let file = format!("images/refs/{}.json", "4".repeat(64));
        self.root.join(file)
    }

    fn spec(&self) -> Spec {
        let mut command = program(&self.root);
        command.args(["profile", "show", "rocm-library", "--resolved", "--json"]);
        let output = command.output().unwrap();
        serde_json::from_slice(&output.stdout).unwrap()
    }

    fn env(&self, name: &str) {
        let spec = self.spec();
        let mut env = self.locked(name);
        let now = Timestamp::now();
        env.commit(Record {
            version: record::VERSION,
            id: random_id().unwrap().try_into().unwrap(),
            created: now,
            used: now,
            profile: "rocm-library".into(),
            targets: vec!["gfx1103".into()],
            image: "debian-forky".into(),
            image_key: KEY.parse().unwrap(),
            engine: "nspawn".into(),
            service: None,
            head: Head::default(),
            snapshots: Vec::new(),
            steps: Vec::new(),
            failed: None,
            complete: true,
            command: None,
        })
        .unwrap();
        env.save_spec(&spec).unwrap();
        let volume = spec.volumes.iter().find(|volume| volume.name == "build");
        assert!(volume.is_some(), "rocm-library has a build volume");
        env.ensure_volumes(&["build".into()], &BuildUser::new(0, 0))
            .unwrap();
        let id = env.record().unwrap().head.volumes["build"].clone();
        fs::write(self.store.volume_dir(&id).join("object.o"), "hours of work").unwrap();
        for step in &spec.steps[..2] {
            freeze(&mut env, &step.name, Some(&step.key));
        }
        freeze(&mut env, "mine", None);
        env.live_tree().unwrap();
    }

    fn locked(&self, name: &str) -> LockedEnv<'_> {
        // A process that a concurrent test has just forked holds this process's locks until it calls exec.
        let patience = crate::support::run::HANGS;
        self.store
            .lock_env(&name.parse().unwrap(), "test", patience)
            .unwrap()
    }

    fn record(&self) -> Record {
        self.store.record(&"one".parse().unwrap()).unwrap().unwrap()
    }

    fn at(&self, path: &str) -> PathBuf {
        self.root.join(path)
    }

    fn layer(&self, index: usize) -> PathBuf {
        self.store.layer_dir(&self.record().snapshots[index].layer)
    }

    /// Runs `fsck` with `arguments` and expects `code`. Returns its output.
    fn fsck(&self, arguments: &[&str], code: i32) -> String {
        let run = || {
            let output = program(&self.root)
                .arg("fsck")
                .args(arguments)
                .output()
                .unwrap();
            let [out, err] =
                [&output.stdout, &output.stderr].map(|bytes| String::from_utf8_lossy(bytes));
            (output.status.code(), format!("{out}{err}"))
        };
        let (mut ended, mut text) = run();
        // A process that a concurrent test has just forked holds the lock too, until it calls exec.
        let limit = Instant::now() + crate::support::run::HANGS;
        let held = "is held by `rockenv test`";
        while ended != Some(code) && text.contains(held) && Instant::now() < limit {
            thread::sleep(Duration::from_millis(20));
            (ended, text) = run();
        }
        assert_eq!(ended, Some(code), "fsck {arguments:?}\n{text}");
        text
    }

    /// Runs a `gc` that may remove whatever the policy allows, and expects `code`. Returns its output.
    fn gc(&self, code: i32) -> String {
        let words = ["--yes", "gc", "--preset", "ci", "--free", "1T"];
        let output = program(&self.root).args(words).output().unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{text}");
        text
    }

    /// Expects that `fsck` reports the damage without a change, repairs it on request, and then finds nothing. Returns
    /// both outputs.
    fn mends(&self) -> [String; 2] {
        self.wait_for_locks();
        let before = self.listing();
        let text = self.fsck(&[], 1);
        assert_eq!(
            before,
            self.listing(),
            "fsck without --repair changed something"
        );
        let mended = self.fsck(&["--repair"], 0);
        self.fsck(&[], 0);
        [text, mended]
    }

    /// Does the same as `mends`, and expects `words` in the report. Returns the output of the repair.
    fn finds_and_mends(&self, words: &[&str]) -> String {
        let [text, mended] = self.mends();
        for word in words {
            assert!(text.contains(word), "`{word}` is not in\n{text}");
        }
        assert!(text.contains("help: "), "{text}");
        mended
    }

    fn masked(&self, text: &str) -> String {
        masked(text, &[(&self.root.display().to_string(), "STORE")])
    }

    /// Runs commands, one on each line, and returns what they print.
    fn shows(&self, commands: &str) -> String {
        self.wait_for_locks();
        let root = self.root.display().to_string();
        transcript(commands, &[(&root, "STORE")], |words| {
            let mut command = program(&self.root);
            command.args(words);
            finish(words.join(" "), command)
        })
    }

    /// Waits until no process holds a lock of the store or of its envs. A process that a concurrent test has just
    /// forked holds this test's locks until it calls exec, and `fsck` skips the files of an env in use.
    fn wait_for_locks(&self) {
        let envs = fs::read_dir(self.at("envs")).unwrap();
        let locks = envs.map(|env| env.unwrap().path().join("lock"));
        for lock in locks.chain([self.at("lock")]).filter(|lock| lock.exists()) {
            let seconds = crate::support::run::HANGS.as_secs().to_string();
            let mut flock = Command::new("flock");
            flock.args(["--timeout", &seconds]).arg(&lock).arg("true");
            assert!(flock.status().unwrap().success(), "{}", lock.display());
        }
    }

    fn listing(&self) -> BTreeMap<PathBuf, (u32, u64)> {
        let mut found = BTreeMap::new();
        let mut left = vec![self.root.clone()];
        while let Some(path) = left.pop() {
            let metadata = fs::symlink_metadata(&path).unwrap();
            if metadata.is_dir() {
                left.extend(fs::read_dir(&path).unwrap().map(|one| one.unwrap().path()));
            }
            found.insert(path, (metadata.permissions().mode(), metadata.len()));
        }
        found
    }
}

fn freeze(env: &mut LockedEnv<'_>, name: &str, key: Option<&StepKey>) {
    let tree = env.live_tree().unwrap();
    let parent = env.record().unwrap().head.layer.clone();
    env.freeze(
        &Freeze {
            tree: &tree,
            parent: parent.as_ref(),
            name,
            key,
            origin: if key.is_some() {
                Origin::Step
            } else {
                Origin::User
            },
            again: false,
            cost: None,
            prints: None,
            pins: std::collections::BTreeMap::new(),
            history: None,
        },
        |_| {},
    )
    .unwrap();
}

fn spoil(path: &Path) {
    fs::write(path, "{\"version\": 1, \"id").unwrap();
}

#[test]
fn a_good_store_has_no_problems() {
    let lab = Lab::new();
    // The tree that a freeze replaced is in the trash. No reaper runs here, and `fsck` does not count the trash as a
    // problem.
    assert!(lab.store.has_trash());
    insta::assert_snapshot!(lab.shows("fsck\nfsck --repair\nfsck"), @"
    $ rockenv fsck
    note: the trash contains 3 items to delete
      rockenv gc
    STORE: no problems
    $ rockenv fsck --repair
    STORE: no problems
    $ rockenv fsck
    STORE: no problems
    ");
    assert!(!lab.store.has_trash());
    let json: serde_json::Value = serde_json::from_str(&lab.fsck(&["--json"], 0)).unwrap();
    assert_eq!(json["clean"], true);
    assert_eq!(json["schema"], "rockenv/fsck/1");
}

#[test]
fn no_store_is_not_found() {
    let directory = tempfile::tempdir().unwrap();
    let place = directory.path().display().to_string();
    fs::write(directory.path().join("file"), "").unwrap();
    let said = transcript(
        "fsck --home PLACE\nfsck --home PLACE/file",
        &[(&place, "PLACE")],
        |words| {
            let mut command = program(Path::new("/nonexistent"));
            command.args(words);
            finish(words.join(" "), command)
        },
    );
    insta::assert_snapshot!(said, @"
    $ rockenv fsck --home PLACE
    error: no store at `PLACE`
    help: rockenv --home PLACE up hip-smoke
    exit code 7
    $ rockenv fsck --home PLACE/file
    error: `PLACE/file` is not a directory
    help: choose another directory with --home or ROCKENV_HOME
    exit code 2
    ");
}

#[test]
fn a_missing_layer_costs_only_the_snapshots_that_stand_on_it() {
    let lab = Lab::new();
    let old = lab.record();
    fs::remove_dir_all(lab.layer(1)).unwrap();
    insta::assert_snapshot!(lab.masked(&lab.mends()[0]), @"
    layer `ID`: depends on layer `ID`, which is missing
    env `one`: snapshot `fetch` is lost: layer `ID` is missing
    env `one`: snapshot `mine` is lost: layer `ID` depends on layer `ID`, which is missing
    env `one`: a layer below it is lost: layer `ID` depends on layer `ID`, which is missing
    note: the trash contains 3 items to delete
      rockenv gc
    STORE: 4 problems
    help: rockenv fsck --repair
    ");
    let new = lab.record();
    assert_eq!(new.snapshots, old.snapshots[..1]);
    assert_eq!(new.head.layer.as_ref(), Some(&old.snapshots[0].layer));
    assert_eq!(new.head.volumes, old.head.volumes);
    assert!(!new.complete);
}

#[test]
fn trees_that_are_whole_do_not_need_the_layer_they_were_made_from() {
    let lab = Lab::on(LoopFs::new(Kind::Btrfs));
    let old = lab.record();
    rockenv::testing::remove_tree(&lab.layer(0)).unwrap();
    lab.finds_and_mends(&["depends on layer", "is missing"]);
    let new = lab.record();
    assert_eq!(new.snapshots, old.snapshots[1..]);
    assert_eq!(new.head, old.head);
    assert!(lab.store.chain(&new.snapshots[1].layer).is_ok());
    // A build volume that is gone comes from the env's snapshot again, once the loss is known.
    let ensure = || {
        let mut env = lab.locked("one");
        env.ensure_volumes(&["build".into()], &BuildUser::new(0, 0))
    };
    let lost = lab.store.volume_dir(&new.head.volumes["build"]);
    rockenv::testing::remove_tree(&lost).unwrap();
    let error = ensure().unwrap_err();
    let says = "build volume `build` of env `one` is missing from the store";
    assert_eq!(error.message(), says);
    assert_eq!(error.help_text(), Some("rockenv fsck --repair"));
    lab.finds_and_mends(&["build volume `build`"]);
    ensure().unwrap();
    let again = lab.store.volume_dir(&lab.record().head.volumes["build"]);
    assert!(again.join("object.o").exists());
    // `fsck` finds out the method from the trees.
    let good = fs::read_to_string(lab.at("format")).unwrap();
    fs::remove_file(lab.at("format")).unwrap();
    lab.finds_and_mends(&["format"]);
    assert_eq!(fs::read_to_string(lab.at("format")).unwrap(), good);
    assert!(good.contains("btrfs"));
}

#[test]
fn a_layer_without_a_tree_or_with_damaged_json_is_set_aside() {
    for (path, words) in [
        ("diff", "has no tree"),
        ("layer.json", "layer.json is damaged"),
    ] {
        let lab = Lab::new();
        let layer = lab.layer(2);
        if path == "diff" {
            fs::remove_dir_all(layer.join(path)).unwrap();
        } else {
            spoil(&layer.join(path));
        }
        lab.finds_and_mends(&[words]);
        assert!(!layer.exists());
        let aside = fs::read_dir(lab.at("layers"))
            .unwrap()
            .filter(|entry| {
                let name = entry.as_ref().unwrap().file_name();
                name.to_string_lossy().contains(".damaged-")
            })
            .count();
        assert_eq!(aside, 1);
        assert_eq!(lab.record().snapshots.len(), 2);
    }
}

#[test]
fn missing_trees_and_volumes_are_forgotten() {
    let lab = Lab::new();
    fs::remove_dir_all(lab.at("envs/one/trees")).unwrap();
    let volume = lab.record().head.volumes["build"].clone();
    fs::remove_dir_all(lab.store.volume_dir(&volume)).unwrap();
    lab.finds_and_mends(&["live tree", "build volume `build`"]);
    let record = lab.record();
    assert_eq!((record.head.tree, record.head.volumes.len()), (None, 0));
}

#[test]
fn a_tree_that_became_a_layer_unrecorded_is_recorded() {
    let lab = Lab::new();
    let old = lab.record();
    let lost = old.snapshots[2].clone();
    let mut record = old;
    record.snapshots.truncate(2);
    record.head.layer = Some(record.snapshots[1].layer.clone());
    record.head.tree = lab.store.layer(&lost.layer).unwrap().unwrap().tree;
    let text = serde_json::to_string(&record).unwrap();
    fs::write(lab.at("envs/one/record.json"), text).unwrap();
    fs::remove_dir_all(lab.at("envs/one/trees")).unwrap();
    lab.finds_and_mends(&["live tree"]);
    assert_eq!(lab.record().snapshots[2], lost);
    assert_eq!(lab.record().head.layer, Some(lost.layer));
}

#[test]
fn orphans_go_to_the_trash() {
    let lab = Lab::new();
    let id = lab.record().id;
    for path in [
        "envs/one/trees/0123456789abcdef/diff".to_owned(),
        "volumes/fedcba9876543210-build-0123456789abcdef/x".to_owned(),
        format!("volumes/{id}-build-0123456789abcdef/x"),
        format!("images/tmp-{}-0123", "4".repeat(16)),
        "sources/therock-123456789abc.part/.git".to_owned(),
    ] {
        fs::create_dir_all(lab.at(&path)).unwrap();
    }
    fs::create_dir_all(lab.layer(0).join("flat-0123")).unwrap();
    insta::assert_snapshot!(lab.masked(&lab.mends()[0]), @"
    layer `ID`: `flat-0123` was left by an interrupted merge
    `images/tmp-ID-0123`: was left by an interrupted image build
    env `one`: 1 tree left by a killed command
    volume `ID-build-ID`: was left by an earlier state of env `one`
    note: volume `ID-build-ID` belongs to no known env
      rm -r STORE/volumes/ID-build-ID
    note: `STORE/sources/therock-ID.part` is an interrupted clone; the next `up` that needs it starts it again
      rm -r STORE/sources/therock-ID.part
    note: the trash contains 3 items to delete
      rockenv gc
    STORE: 4 problems
    help: rockenv fsck --repair
    ");
    assert!(!lab.layer(0).join("flat-0123").exists());
    // The volume may hold hours of work of a lost env, so only an explicit command removes it.
    let volume = lab.at("volumes/fedcba9876543210-build-0123456789abcdef");
    assert!(volume.join("x").exists());
    // A repair never removes a source, even an incomplete one.
    assert!(lab.at("sources/therock-123456789abc.part/.git").exists());
    assert_eq!(lab.record().head.volumes.len(), 1);
    assert!(!lab.store.has_trash());
}

#[test]
fn a_killed_command_is_cleaned_up_after() {
    let lab = Lab::new();
    fs::create_dir_all(lab.at("envs/one/run")).unwrap();
    let state = r#"{"id":"rockenv-none-0","cgroup":{"unit":null,"directories":[]}}"#;
    fs::write(lab.at("envs/one/run/state.json"), state).unwrap();
    let layer = &lab.record().snapshots[0];
    let entry = serde_json::json!({"freeze": {"tree": "gone", "snapshot": layer}});
    fs::write(lab.at("envs/one/journal.jsonl"), format!("{entry}\n")).unwrap();
    lab.finds_and_mends(&["run/state.json", "journal is not empty"]);
    assert!(!lab.at("envs/one/run/state.json").exists());
    fs::write(lab.at("envs/one/journal.jsonl"), "nonsense\n").unwrap();
    lab.finds_and_mends(&["journal is damaged"]);
    assert_eq!(lab.record().snapshots.len(), 3);
}

#[test]
fn a_damaged_spec_is_set_aside_and_up_will_write_another() {
    let lab = Lab::new();
    fs::write(lab.at("envs/one/spec.toml"), "version = ").unwrap();
    lab.finds_and_mends(&["its resolved spec is damaged"]);
    assert!(!lab.at("envs/one/spec.toml").exists());
    assert!(!lab.record().complete);
    let error = lab.store.spec(&"one".parse().unwrap()).unwrap_err();
    assert_eq!(error.help_text(), Some("rockenv up rocm-library"));
    // Without a spec, every file in the live tree counts as a change.
    let tree = lab.record().head.tree.unwrap();
    let diff = lab.at("envs/one/trees").join(&tree).join("diff");
    fs::write(diff.join("note"), "mine").unwrap();
    let kept = lab.locked("one").rollback("mine").unwrap();
    assert_eq!(kept.as_deref(), Some("before-rollback"));
}

#[test]
fn images_and_references() {
    let lab = Lab::new();
    spoil(&lab.at("images").join(KEY).join("image.json"));
    lab.finds_and_mends(&["image.json is damaged"]);
    assert!(lab.at("images").join(KEY).join("root").exists());
    lab.image();
    spoil(&lab.reference());
    lab.finds_and_mends(&["image reference"]);
    fs::write(lab.reference(), "{\"key\":\"other\"}").unwrap();
    lab.finds_and_mends(&["names image `other`, which is missing"]);
    fs::rename(lab.at("images").join(KEY), lab.at("elsewhere")).unwrap();
    let text = lab.fsck(&["--repair"], 1);
    let help = "rockenv up rocm-library";
    assert!(text.contains(help), "{text}");
    let helps = |help| {
        let error = lab.store.lowers(None, &KEY.parse().unwrap()).unwrap_err();
        assert_eq!(error.help_text(), Some(help));
    };
    helps(help);
    fs::rename(lab.at("elsewhere"), lab.at("images").join(KEY)).unwrap();
    lab.fsck(&[], 0);
    fs::remove_dir_all(lab.at("images").join(KEY).join("root")).unwrap();
    helps("rockenv fsck --repair");
    lab.fsck(&["--repair"], 1);
    helps(help);
}

#[test]
fn private_directories_are_private_again() {
    let lab = Lab::new();
    let mode = |mode| std::fs::Permissions::from_mode(mode);
    fs::set_permissions(lab.at("envs"), mode(0o755)).unwrap();
    fs::set_permissions(lab.at("sources"), mode(0o777)).unwrap();
    nix::unistd::chown(&lab.at("layers"), Some(1234.into()), None).unwrap();
    fs::remove_dir(lab.at("outputs")).unwrap();
    insta::assert_snapshot!(lab.masked(&lab.mends()[0]), @"
    directory `envs`: others may look into it: its mode is 0755
    directory `layers`: belongs to user 1234, not to 0
    directory `outputs`: is missing
    directory `sources`: others may write to it: its mode is 0777
    note: the trash contains 3 items to delete
      rockenv gc
    STORE: 4 problems
    help: rockenv fsck --repair
    ");
    let now = fs::metadata(lab.at("envs")).unwrap().permissions().mode();
    assert_eq!(now & 0o777, 0o700);
}

#[test]
fn a_busy_env_is_skipped_and_said_to_be() {
    let lab = Lab::new();
    let held = lab.locked("one");
    // Files that belong to a running command are no problem.
    fs::create_dir_all(lab.at("envs/one/trees/0123456789abcdef/diff")).unwrap();
    fs::create_dir_all(lab.at("volumes/fedcba9876543210-build-0123456789abcdef")).unwrap();
    lab.fsck(&["--repair"], 0);
    fs::remove_dir_all(lab.layer(2)).unwrap();
    let text = lab.fsck(&["--repair"], 1);
    assert!(
        text.contains("skipped: env `one` is held by `rockenv test`"),
        "{text}"
    );
    drop(held);
    lab.fsck(&["--repair"], 0);
    lab.fsck(&[], 0);
}
