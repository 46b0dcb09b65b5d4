//! `verify`: a clean rebuild matches the snapshots, or the paths that differ are named. The env stays as it is.

use std::collections::BTreeMap;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use nix::sys::signal::{Signal, killpg};
use nix::unistd::Pid;
use sha2::{Digest as _, Sha256};

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;
use crate::support::run::{Background, Ran, processes_called, wait_for, wait_for_process};

const VOLUMES: &str = "volume = [{ name = 'out', kind = 'output', target = '/out' },
    { name = 'b', kind = 'build', target = '/b' }, { name = 'c', kind = 'cache', target = '/c' }]\n";

/// A tree with an entry of each kind.
const TREE: &str = "mkdir -p lib empty closed; echo x > lib/x.1; ln -s x.1 lib/x; ln lib/x.1 lib/same; chmod 0750 closed; \
     chmod 0755 lib/x.1";

fn step(name: &str, script: &str) -> String {
    format!("[[step]]\nname = '{name}'\nrun = '''{script}'''\n")
}

/// Returns three steps that leave something everywhere, each on what the one before left.
fn steps() -> String {
    let places = ["~", "/b", "/out"].map(|place| format!("cd {place}; {TREE}"));
    let two = "cat ~/lib/x /b/lib/x /out/lib/x > ~/two; echo two >> /b/two; echo two > /out/two; rm /out/lib/same; \
               date +%N > ~/.ninja_log; date +%N > /b/CMakeConfigureLog.yaml";
    [
        VOLUMES,
        &step("one", &places.join("; ")),
        &step("two", two),
        &step("three", "cat /b/two > ~/three; rm -r ~/closed"),
    ]
    .concat()
}

/// Returns steps that never come out twice the same.
fn random() -> String {
    let now = "date +%s.%N";
    let one = format!(
        "{now} > ~/when; mkdir -p /b/sub /out/sub; {now} > /b/sub/when; {now} > /out/sub/when"
    );
    [
        VOLUMES,
        &step("one", &one),
        &step("two", "echo two > ~/two"),
    ]
    .concat()
}

fn verify(store: &TestStore, more: &[&str]) -> Ran {
    store.rockenv(&[&["verify", store.env()], more].concat())
}

/// Collects the state of each path below a directory, in which any write would show.
fn state(directory: &Path, found: &mut BTreeMap<PathBuf, String>) {
    for entry in fs::read_dir(directory).into_iter().flatten().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let data = entry.metadata().expect("an entry");
        // Any command changes these: the lock holder, files of a running container, and the lease of the last `up`.
        if ["lock", "run", "lease"]
            .map(AsRef::as_ref)
            .contains(&&*name)
        {
            continue;
        }
        let mut content = None;
        if data.is_dir() {
            state(&path, found);
        } else if data.is_file() {
            let bytes = fs::read(&path).expect("a file");
            content = Some(hex::encode(Sha256::digest(bytes)));
        }
        let (mode, time) = (data.mode(), (data.mtime(), data.mtime_nsec()));
        found.insert(
            path,
            format!("{mode:o} {} {time:?} {content:?}", data.ino()),
        );
    }
}

fn states(store: &TestStore) -> BTreeMap<PathBuf, String> {
    let mut found = BTreeMap::new();
    state(&store.env_dir(), &mut found);
    for place in ["layers", "volumes", "outputs", "caches", "sources"] {
        state(&store.home().join(place), &mut found);
    }
    found
}

/// Returns the paths at which something changed.
fn changed(store: &TestStore, before: &BTreeMap<PathBuf, String>) -> Vec<PathBuf> {
    let now = states(store);
    let paths = before.keys().chain(now.keys());
    paths
        .filter(|path| before.get(*path) != now.get(*path))
        .cloned()
        .collect()
}

#[track_caller]
fn unchanged(store: &TestStore, before: &BTreeMap<PathBuf, String>) {
    let changed = changed(store, before);
    assert!(changed.is_empty(), "{changed:?}");
}

/// Fails if another env is left.
#[track_caller]
fn nothing_else(store: &TestStore) {
    let envs = fs::read_dir(store.home().join("envs"))
        .expect("envs")
        .flatten();
    for env in envs.filter(|env| env.file_name().to_str() != Some(store.env())) {
        let left = fs::read_dir(env.path()).expect("a directory").flatten();
        let left: Vec<_> = left
            .map(|entry| entry.file_name())
            .filter(|name| name != "lock")
            .collect();
        assert!(left.is_empty(), "{:?}: {left:?}", env.path());
    }
}

fn layer(store: &TestStore, step: &str) -> PathBuf {
    let record = store.record();
    let mut snapshots = record["snapshots"].as_array().into_iter().flatten();
    let snapshot = snapshots.find(|snapshot| snapshot["name"] == step);
    let layer = snapshot.and_then(|snapshot| snapshot["layer"].as_str());
    store.home().join("layers").join(layer.expect("a layer"))
}

#[test]
fn what_comes_out_the_same_is_the_same_and_the_env_stays_as_it_is() {
    on_overlay_and_btrfs(|store, method| {
        store.profile(&steps());
        store.up();
        let built = "build volume `b`: not in snapshots of an overlay store";
        let lost = match method {
            "overlay" => format!("\n  not compared: {built}"),
            _ => String::new(),
        };
        // The last step's build volume is still there.
        let all = format!("one: the same{lost}\ntwo: the same{lost}\nthree: the same");
        verify(store, &[]).ok().says(&["reproduced"]).prints(&all);
        store.sh("echo mine > ~/mine").ok();
        let before = states(store);
        let two = format!("two: the same{lost}");
        verify(store, &["two"]).ok().prints(&two);
        unchanged(store, &before);
        nothing_else(store);
        store.sh("cat ~/mine").ok().prints("mine");
        store.up().says(&["nothing to do"]);
        store.rockenv(&["fsck"]).ok();
    });
}

#[test]
fn what_comes_out_differently_is_named() {
    on_overlay_and_btrfs(|store, method| {
        store.profile(&random());
        store.up();
        let before = states(store);
        let text = verify(store, &[]).exits(8).text();
        for place in ["/home/builder", "/b/sub", "/out/sub"] {
            let line = format!("{place}/when: content");
            assert!(text.contains(&line), "{method}: {text}");
        }
        // The second step starts from the snapshot of the first, if that has the build volume.
        let is_same = text.contains("two: the same");
        assert_eq!(is_same, method != "overlay", "{text}");
        let json = verify(store, &["--json", "one"]).exits(8).json();
        assert_eq!(
            (&json["env"], &json["same"]),
            (&store.env().into(), &false.into())
        );
        assert_eq!(json["schema"], "rockenv/verify/1");
        let step = &json["steps"][0];
        assert_eq!(
            (&step["step"], &step["same"], &step["more"]),
            (&"one".into(), &false.into(), &0.into())
        );
        assert_eq!(
            step["layer"],
            layer(store, "one").file_name().unwrap().to_str().unwrap()
        );
        let found = step["differences"].as_array().unwrap();
        let wanted =
            serde_json::json!({"path": "/home/builder/when", "volume": null, "what": "content"});
        assert!(found.contains(&wanted), "{json}");
        let wanted =
            serde_json::json!({"path": "/out/sub/when", "volume": "out", "what": "content"});
        assert!(found.contains(&wanted), "{json}");
        let code = if method == "overlay" { 8 } else { 0 };
        verify(store, &["two"]).exits(code);
        unchanged(store, &before);
        nothing_else(store);
    });
}

#[test]
fn what_was_changed_by_hand_in_the_store_is_found() {
    let disk = super::LoopFs::with_base(super::Kind::Btrfs);
    let store = TestStore::on(&disk);
    store.profile(&steps());
    store.up();
    verify(&store, &["--strict"])
        .exits(8)
        .says(&["steps differ"]);
    let layer = layer(&store, "one");
    let home = layer.join("root/home/builder");
    fs::write(home.join("lib/x.1"), "other\n").unwrap();
    fs::remove_dir(home.join("empty")).unwrap();
    fs::set_permissions(home.join("closed"), std::fs::Permissions::from_mode(0o700)).unwrap();
    fs::remove_file(layer.join("volumes/b/lib/x")).unwrap();
    symlink("elsewhere", layer.join("volumes/b/lib/x")).unwrap();
    fs::remove_file(layer.join("results/out/lib/same")).unwrap();
    fs::copy(
        layer.join("results/out/lib/x.1"),
        layer.join("results/out/lib/same"),
    )
    .unwrap();
    for number in 0..30 {
        fs::write(layer.join(format!("root/opt/{number}")), "").unwrap();
    }
    let text = verify(&store, &["one"]).exits(8).text();
    assert!(text.contains("\n  and 15 more\n"), "{text}");
    for number in 0..30 {
        fs::remove_file(layer.join(format!("root/opt/{number}"))).unwrap();
    }
    insta::assert_snapshot!(verify(&store, &["one"]).exits(8).text(), @"
    one: 5 paths differ
      /home/builder/closed: mode 0700, 0750
      /home/builder/empty: only in the new build
      /home/builder/lib/same: size 6, 2
      /b/lib/x: links to `elsewhere`, `x.1`; owner 0:0, 1234:1234
      /out/lib/x.1: file, another name of an earlier file
    ");
}

#[test]
fn steps_start_clean_whatever_the_env_went_on_with() {
    on_overlay_and_btrfs(|store, method| {
        let profile = |line: &str| {
            format!(
                "{VOLUMES}[[step]]\nname = 'base'\nrun = 'true'\n[[step]]\nname = 'one'\nincremental = true\n\
                 run = 'echo {line} >> /b/log; test ! -e /c/hit || echo hit >> ~/hit; touch /c/hit'\n\
                 [[step]]\nname = 'two'\nrun = 'cp /b/log ~/log'\n"
            )
        };
        store.profile(&profile("1"));
        store.up();
        verify(store, &[]).ok();
        store.profile(&profile("2"));
        store.up();
        // In the env, the step had found a line in the build volume, and a full cache.
        let text = verify(store, &["one", "two"]).exits(8).text();
        for line in [
            "/home/builder/hit: only in the snapshot",
            "/home/builder/log: size 4, 2",
        ] {
            assert!(text.contains(line), "{method}: {text}");
        }
        // With the caches, the step sees what it saw when it ran.
        let text = verify(store, &["one", "--with-caches"]).text();
        assert!(!text.contains("hit"), "{method}: {text}");
        store.rockenv(&["up", store.env(), "--clean"]).ok();
        verify(store, &["--with-caches"]).ok();
    });
}

#[test]
fn a_changed_source_is_found_before_anything_is_built_again() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("input"), "1").unwrap();
    let volume =
        format!("[[volume]]\nname = 'src'\nkind = 'source'\ntarget = '/src'\npath = {source:?}\n");
    let two = format!("{}inputs = ['src']\n", step("two", "cat /src/input"));
    store.profile(&format!("{volume}{}{two}", step("one", "true")));
    store.up();
    fs::write(source.join("input"), "2").unwrap();
    insta::assert_snapshot!(store.shows("verify ENV"), @"
    error: step `two` cannot be built again: its inputs have changed since: src
    help: to build with the current inputs, run: rockenv up ENV
    exit code 3
    ");
    nothing_else(&store);
}

#[test]
fn what_cannot_be_verified_is_refused() {
    let store = TestStore::new();
    let flag = store.runs().join("fail");
    let host = format!(
        "[[volume]]\nname = 'host'\nkind = 'host'\ntarget = '/host'\npath = '{}'\n",
        store.runs().display()
    );
    let profile = |last: &str| {
        [
            host.clone(),
            step("one", "test ! -e /host/fail || { echo so it is; false; }"),
            step("two", last),
        ]
        .concat()
    };
    store.profile(&profile("false"));
    store.rockenv(&["up", store.env()]).exits(5);
    verify(&store, &["one"]).ok();
    verify(&store, &[]).ok().prints("one: the same");
    insta::assert_snapshot!(store.shows("verify none\nverify ENV two\nverify ENV three"), @"
    $ rockenv verify none
    error: no env `none`
    help: rockenv ls
    exit code 7
    $ rockenv verify ENV two
    error: step `two` of env `ENV` has no snapshot
    help: steps with a snapshot: one
    exit code 7
    $ rockenv verify ENV three
    error: env `ENV` has no step `three`
    help: steps with a snapshot: one
    exit code 7
    ");
    fs::write(&flag, "").unwrap();
    let before = states(&store);
    verify(&store, &[])
        .exits(5)
        .says(&["so it is", "built again, step `one`"]);
    unchanged(&store, &before);
    nothing_else(&store);
    let sleeper = store.sleeper();
    fs::remove_file(&flag).unwrap();
    store.profile(&profile(&sleeper));
    let up = store.start(&["up", store.env()]);
    wait_for_process(&sleeper);
    verify(&store, &["one"]).exits(6);
    up.signal(Signal::SIGTERM);
    up.wait();
}

#[test]
fn killed_in_the_middle_it_leaves_nothing() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    let wait = format!("test ! -e /host/wait || {sleeper}");
    let host = format!(
        "[[volume]]\nname = 'host'\nkind = 'host'\ntarget = '/host'\npath = '{}'\n",
        store.runs().display()
    );
    store.profile(&format!("{host}{}", step("one", &wait)));
    store.up();
    fs::write(store.runs().join("wait"), "").unwrap();
    let before = states(&store);
    for (signal, group) in [
        (Signal::SIGKILL, false),
        (Signal::SIGKILL, true),
        (Signal::SIGINT, false),
    ] {
        let mut command = store.command(&["verify", store.env()]);
        let null = std::process::Stdio::null;
        command.process_group(0).stdout(null()).stderr(null());
        let verify = Background::start(command);
        wait_for_process(&sleeper);
        match group {
            true => killpg(Pid::from_raw(verify.pid()), signal).unwrap(),
            false => verify.signal(signal),
        }
        let code = verify.wait().code;
        assert_eq!(code, 128 + signal as i32);
        wait_for("something is left", || {
            store.rockenv(&["gc", "--yes"]).ok();
            let (processes, changed) = (processes_called(&sleeper), changed(&store, &before));
            let trash = fs::read_dir(store.home().join("trash")).unwrap().count();
            match processes.is_empty() && changed.is_empty() && trash == 0 {
                true => Ok(()),
                false => Err(format!("{processes:?} {changed:?} {trash} in the trash")),
            }
        });
        nothing_else(&store);
    }
    fs::remove_file(store.runs().join("wait")).unwrap();
    verify(&store, &[]).ok();
}
