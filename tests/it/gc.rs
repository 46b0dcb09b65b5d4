//! `rockenv gc` on real stores: it does what it announces, also when it is killed at random moments, on a full disk,
//! and beside running builds.

mod age;
mod faults;
mod prune_build_tree;
mod shared;
mod tools;

use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Command, Stdio};

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs, bind, run};
use crate::support::run::{surround, wait_until};
use crate::support::terminal::Terminal;
use crate::support::transcript::measured;
use fs_err as fs;
use serde_json::Value;

const MIB: u64 = 1 << 20;

/// Volumes of every kind that can hold a user's files.
const VOLUMES: &str = "
[[volume]]
name = 'src'
kind = 'source'
path = 'WORK/src'
target = '/v/src'
[[volume]]
name = 'build'
kind = 'build'
target = '/v/build'
[[volume]]
name = 'cache'
kind = 'cache'
target = '/v/cache'
[[volume]]
name = 'out'
kind = 'output'
target = '/v/out'
[[volume]]
name = 'host'
kind = 'host'
path = 'WORK/host'
target = '/v/host'
access = 'rw'
";

/// Writes a profile whose steps have other names and content in each `round`, so that earlier snapshots stay in the
/// record.
fn round(store: &TestStore, round: u32, mib: u64) {
    let work = store.work().display().to_string();
    for directory in ["src", "host"] {
        let directory = store.work().join(directory);
        if !directory.exists() {
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("mine"), "the user's").unwrap();
        }
    }
    let steps: String = ["a", "b"]
        .iter()
        .map(|step| {
            format!(
                "[[step]]\nname = '{step}{round}'\nrun = 'head -c {mib}M /dev/urandom > ~/{step}; echo {round} >> /v/build/log'\n"
            )
        })
        .collect();
    store.profile(&format!("{}{steps}", VOLUMES.replace("WORK", &work)));
}

/// Writes a user's file into the cache and the output, for [`untouched`].
fn fill(store: &TestStore) {
    store
        .sh("for v in cache out; do echo mine > /v/$v/mine; done")
        .ok();
}

fn untouched(store: &TestStore) {
    let output = store.out();
    let host = |name: &str| store.work().join(name);
    for (place, text) in [
        (host("src"), "the user's"),
        (host("host"), "the user's"),
        (store.home().join("caches/cache"), "mine\n"),
        (output, "mine\n"),
    ] {
        assert_eq!(fs::read_to_string(place.join("mine")).unwrap(), text);
    }
}

fn json(store: &TestStore, arguments: &[&str]) -> Value {
    let mut words = vec!["--yes", "--json", "gc"];
    words.extend(arguments);
    store.rockenv(&words).ok().json()
}

fn names(report: &Value, list: &str) -> Vec<String> {
    let items = report[list].as_array().unwrap().iter();
    let mut names: Vec<String> = items
        .map(|item| item["name"].as_str().unwrap().to_owned())
        .collect();
    names.sort();
    names
}

fn snapshots(store: &TestStore) -> Vec<String> {
    let ran = store.rockenv(&["snapshot", "ls", "--json", store.env()]);
    let rows = ran.ok().json();
    let rows = rows.as_array().unwrap().iter();
    rows.map(|row| row["name"].as_str().unwrap().to_owned())
        .collect()
}

fn used(path: &Path) -> u64 {
    let found = nix::sys::statvfs::statvfs(path).unwrap();
    (found.blocks() - found.blocks_free()) * found.fragment_size()
}

/// Kills a command when it is about to make a system call for the `nth` time. Returns whether it got that far.
fn killed_at(store: &TestStore, words: &[&str], call: &str, nth: usize) -> bool {
    let command = store.command(words);
    let mut traced = Command::new("strace");
    traced
        .args(["-f", "-qq", "-o", "/dev/null", "-e"])
        .arg(format!("trace={call}"))
        .arg(format!("--inject={call}:signal=KILL:when={nth}"))
        .arg(command.get_program())
        .args(command.get_args());
    surround(&mut traced, &command)
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let status = traced.status().unwrap();
    assert!(status.success() || status.signal() == Some(9), "{status}");
    !status.success()
}

/// Expects that `gc` frees what its dry run announces, and returns the output of the dry run.
fn frees_what_it_says(kind: Kind) -> String {
    let disk = LoopFs::with_base(kind);
    let store = TestStore::on(&disk);
    round(&store, 0, 6);
    store.up();
    fill(&store);
    store
        .rockenv(&["snapshot", "create", store.env(), "mine"])
        .ok();
    for number in 1..4 {
        round(&store, number, 6);
        store.up();
    }
    let own = |step: &str| format!("snapshot {}/{step}", store.env());
    let dry = json(&store, &["--dry-run", "--free", "1T", "--preset", "ci"]);
    // `a0` and `b0` are below the user's snapshot, and `a3` and `b3` are the env's state.
    let goes = ["a1", "a2", "b1", "b2"].map(own);
    assert_eq!(names(&dry, "items"), goes, "{dry:#}");
    for item in dry["items"].as_array().unwrap() {
        assert_eq!(item["rule"], "free");
        assert!(
            item["reason"].as_str().unwrap().contains("second"),
            "{item}"
        );
        let bytes = item["bytes"].as_u64().unwrap();
        assert!((6 * MIB..7 * MIB).contains(&bytes), "{item}");
    }
    assert_eq!(snapshots(&store).len(), 9, "a dry run changes nothing");
    let said = store.shows("gc --dry-run --free 1T --preset ci");
    let roots = store.rockenv(&["gc", "--roots"]).ok().text();
    assert!(roots.contains("mine of env"), "{roots}");

    let before = used(disk.path());
    let one = json(&store, &["--free", "5M", "--preset", "ci"]);
    assert_eq!(one["removed"].as_array().unwrap().len(), 1, "{one:#}");
    let freed = one["freed"].as_i64().unwrap();
    assert!((5..8).contains(&(freed >> 20)), "{one:#}");
    let asked = ["--yes", "--json", "gc", "--free", "1T", "--preset", "ci"];
    let rest = store.rockenv(&asked).exits(10).says(&["rockenv rm ENV"]);
    let rest = rest.json();
    assert_eq!(rest["removed"].as_array().unwrap().len(), 3, "{rest:#}");
    let really = before - used(disk.path());
    let told = u64::try_from(rest["freed"].as_i64().unwrap() + freed).unwrap();
    assert!(really.abs_diff(told) < 2 * MIB, "{really} {told}");
    let estimate = rest["estimate"].as_u64().unwrap() + one["estimate"].as_u64().unwrap();
    assert!(told.abs_diff(estimate) < 3 * MIB, "{told} {estimate}");

    assert_eq!(snapshots(&store), ["a0", "b0", "mine", "a3", "b3"]);
    assert!(store.home().join("layers").read_dir().unwrap().count() == 5);
    store
        .rockenv(&["rollback", "--yes", store.env(), "mine"])
        .ok();
    store.sh("test -s ~/a && grep -qx 0 /v/build/log").ok();
    store.up();
    untouched(&store);
    store.rockenv(&["fsck"]).ok();
    // The order of the lines depends on how long the steps took.
    let said = measured(said);
    let mut lines: Vec<&str> = said.lines().collect();
    lines[1..=goes.len()].sort_unstable();
    lines.join("\n")
}

#[test]
fn it_frees_what_it_says_on_overlay() {
    insta::assert_snapshot!(frees_what_it_says(Kind::Ext4), @"
    what  frees  again in  rule  why
    snapshot ENV/a1  SIZE  TIME  --free  SIZE for each second of rebuild time
    snapshot ENV/a2  SIZE  TIME  --free  SIZE for each second of rebuild time
    snapshot ENV/b1  SIZE  TIME  --free  SIZE for each second of rebuild time
    snapshot ENV/b2  SIZE  TIME  --free  SIZE for each second of rebuild time
    SIZE in total; SIZE free now
    SIZE short: everything else is in use or not managed by rockenv; `rockenv du` shows disk usage, `rockenv rm ENV` and `rockenv cache clear NAME` free more
    ");
}

#[test]
fn it_frees_what_it_says_on_btrfs() {
    frees_what_it_says(Kind::Btrfs);
}

#[test]
fn what_nobody_can_use_goes_and_other_things_are_not_looked_at() {
    let disk = LoopFs::with_base(Kind::Ext4);
    let store = TestStore::on(&disk);
    round(&store, 0, 1);
    store.up();
    fill(&store);
    let home = store.home();
    let elsewhere = store.work().join("elsewhere");
    fs::create_dir(&elsewhere).unwrap();
    fs::write(elsewhere.join("mine"), "x").unwrap();
    // A killed image build left one of these. A lost env may have left the other.
    let volume = home.join("volumes/0123456789abcdef-build-1");
    fs::create_dir_all(volume.join("deep")).unwrap();
    fs::create_dir_all(home.join("images/tmp-0123456789abcdef-1/root")).unwrap();
    // Not rockenv's: a link in place of a cache, and files where rockenv makes none.
    fs_err::os::unix::fs::symlink(&elsewhere, home.join("caches/link")).unwrap();
    fs::write(home.join("mine"), "x").unwrap();
    fs::write(home.join("sources/mine"), "x").unwrap();
    // A clone of a revision that the profile had before.
    let clone = home.join("sources/old-0123456789ab");
    fs::create_dir_all(clone.join(".git")).unwrap();
    let partial = home.join("sources/new-0123456789ab.part");
    fs::create_dir(&partial).unwrap();
    let download = home.join("blobs/sha256").join("feed".repeat(16));
    fs::write(&download, vec![1; 64 << 20]).unwrap();
    fs::write(home.join("blobs/sha256/notes"), "mine").unwrap();
    let done = json(&store, &["--preset", "laptop"]);
    let gone = names(&done, "removed");
    assert_eq!(gone, ["images/tmp-0123456789abcdef-1"], "{done:#}");
    let told = format!("to remove it: rm -r {}", volume.display());
    assert!(done["notes"].to_string().contains(&told), "{done:#}");
    let told = format!("if it holds no work of yours: rm -r {}", clone.display());
    assert!(done["notes"].to_string().contains(&told), "{done:#}");
    let told = format!("is kept; to remove it: rm -r {}", partial.display());
    assert!(done["notes"].to_string().contains(&told), "{done:#}");
    assert!(volume.join("deep").exists() && clone.exists() && partial.exists());
    for path in ["mine", "sources/mine", "caches/link"] {
        assert!(home.join(path).exists(), "{path}");
    }
    assert!(download.exists());
    let caches = store.rockenv(&["cache", "ls"]).ok().text();
    assert!(
        !caches.contains("link") && caches.contains(store.env()),
        "{caches}"
    );
    let said = store
        .shows("cache clear --yes link\ncache clear --yes ../sources\ncache clear --yes cahce");
    insta::assert_snapshot!(said, @"
    $ rockenv cache clear --yes link
    error: no cache `link`
    help: rockenv cache ls
    exit code 7
    $ rockenv cache clear --yes ../sources
    error: no cache `../sources`
    help: rockenv cache ls
    exit code 7
    $ rockenv cache clear --yes cahce
    error: no cache `cahce`
    help: did you mean `cache`?
    exit code 7
    ");
    assert!(elsewhere.join("mine").exists());
    untouched(&store);
    store
        .rockenv(&["--yes", "gc", "--free", "32M", "--preset", "ci"])
        .ok();
    assert!(!download.exists());
    assert!(home.join("blobs/sha256/notes").exists());
    let bound = bind(&home.join("caches/cache"), &home.join("caches/cache"));
    insta::assert_snapshot!(store.shows("cache clear --yes cache"), @"
    error: cache `cache` cannot be cleared: `STORE/caches/cache` is a mount point
    help: umount STORE/caches/cache
    exit code 6
    ");
    drop(bound);
    // An entry of the trash that cannot be removed keeps nothing else. No earlier command empties the trash meanwhile.
    store.settle();
    let trash = home.join("trash");
    let entries = (0..20).map(|number| trash.join(format!("{number:016x}")));
    let entries = entries.collect::<Vec<_>>();
    for entry in &entries {
        fs::create_dir(entry).unwrap();
    }
    let bound = bind(&home.join("caches/cache"), &entries[10]);
    fs::write(&download, vec![1; 64 << 20]).unwrap();
    let done = store
        .rockenv(&["--yes", "gc", "--free", "32M", "--preset", "ci"])
        .exits(6)
        .says(&["cannot empty the trash", "is a mount point"])
        .text();
    assert!(done.starts_with("removed "), "{done}");
    assert!(!download.exists());
    let left = entries.iter().filter(|entry| entry.exists());
    assert_eq!(left.collect::<Vec<_>>(), [&entries[10]]);
    let other = format!("{}-other", store.env());
    store.profile_named(&other, "[[step]]\nname = 'a'\nrun = 'true'\n");
    store.rockenv(&["up", &other, "--ephemeral"]).ok();
    drop(bound);
    store.rockenv(&["cache", "clear", "--yes", "--all"]).ok();
    assert!(
        home.join("caches/cache")
            .read_dir()
            .unwrap()
            .next()
            .is_none()
    );
    fs::write(home.join("caches/cache/mine"), "mine\n").unwrap();
    untouched(&store);
}

#[test]
fn a_dry_run_counts_the_trash_as_the_real_one_does() {
    let disk = LoopFs::with_base(Kind::Ext4);
    let store = TestStore::on(&disk);
    round(&store, 0, 6);
    store.up();
    round(&store, 1, 6);
    store.up();
    // Empties the trash now, so that no other process does so later.
    json(&store, &[]);
    store.settle();
    let dry = json(&store, &["--dry-run"]);
    assert_eq!(dry["trash"], 0, "{dry:#}");
    // `rm` leaves this if the machine stops before the trash is empty.
    let waits = store.home().join("trash/0123456789abcdef");
    fs::create_dir(&waits).unwrap();
    fs::write(waits.join("x"), vec![1; 64 << 20]).unwrap();
    let dry = json(&store, &["--dry-run", "--free", "32M", "--preset", "ci"]);
    assert!(names(&dry, "items").is_empty(), "{dry:#}");
    assert!(dry["trash"].as_u64().unwrap() >= 64 * MIB, "{dry:#}");
    let text = store.rockenv(&["gc", "--dry-run", "--free", "32M"]).ok();
    assert!(text.text().contains("the trash  6"), "{text:?}");
    let more = json(&store, &["--dry-run", "--free", "68M", "--preset", "ci"]);
    assert_eq!(names(&more, "items").len(), 1, "{more:#}");
    let words = ["gc", "--yes", "--free", "32M", "--preset", "ci"];
    let done = store.rockenv(&words).ok().text();
    assert!(done.starts_with("emptied the trash: "), "{done}");
}

#[test]
fn what_a_later_look_adds_is_asked_for_too() {
    let disk = LoopFs::with_base(Kind::Ext4);
    let store = TestStore::on(&disk);
    for number in 0..3 {
        round(&store, number, 6);
        store.up();
    }
    // One layer's recorded size is much larger than the real one.
    for entry in fs::read_dir(store.home().join("layers")).unwrap() {
        let file = entry.unwrap().path().join("layer.json");
        let mut layer: Value = serde_json::from_slice(&fs::read(&file).unwrap()).unwrap();
        if layer["title"] == "b0" {
            layer["cost"]["bytes"] = (1_u64 << 30).into();
            fs::write(&file, layer.to_string()).unwrap();
        }
    }
    let words = ["gc", "--free", "200M", "--preset", "ci"];
    let mut asked = Terminal::start(store.command(&words), 33, 101);
    asked.expect("remove 1 item ");
    asked.write("y\n");
    asked.expect("less was freed than estimated: remove");
    asked.write("n\n");
    asked.expect("removed 1 item");
    asked.wait(10);
    assert_eq!(snapshots(&store), ["a0", "a1", "b1", "a2", "b2"]);
}

#[test]
fn a_damaged_store_is_left_alone() {
    let store = TestStore::new();
    round(&store, 0, 1);
    store.up();
    round(&store, 1, 1);
    store.up();
    let layer = fs::read_dir(store.home().join("layers")).unwrap();
    let layer = layer.flatten().next().unwrap().path().join("layer.json");
    let text = fs::read(&layer).unwrap();
    fs::write(&layer, "{").unwrap();
    // The second command cannot free enough, because it keeps every layer that the damaged one may depend on.
    for (words, code) in [
        (&["gc", "--dry-run"][..], 0),
        (&["--yes", "gc", "--free", "1T"], 10),
    ] {
        store
            .rockenv(words)
            .exits(code)
            .says(&["details: rockenv fsck"]);
    }
    assert_eq!(snapshots(&store).len(), 4);
    fs::write(&layer, text).unwrap();
    json(&store, &[]);
}

#[test]
fn a_cache_s_own_tool_shrinks_it() {
    let store = TestStore::new();
    store.up_with(
        "[[volume]]\nname = 'apt'\nkind = 'cache'\ntarget = '/var/cache/apt'\nmax = '1M'\n
         [[volume]]\nname = 'odd'\nkind = 'cache'\ntarget = '/odd'\n[[step]]\nname = 'a'\nrun = 'true'\n",
    );
    let caches = store.home().join("caches");
    fs::create_dir_all(caches.join("apt/archives/partial")).unwrap();
    fs::write(caches.join("apt/archives/x_1_amd64.deb"), vec![1; 3 << 20]).unwrap();
    fs::write(caches.join("odd/archive-v2.tar"), vec![1; 3 << 20]).unwrap();
    fs::write(
        store.work().join("rockenv.toml"),
        "[gc]\ncache.odd.max = '2M'\ncache.typo.max = '1M'\n",
    )
    .unwrap();
    let dry = json(&store, &["--dry-run"]);
    assert_eq!(names(&dry, "items"), ["cache apt"], "{dry:#}");
    let item = &dry["items"][0];
    assert_eq!(item["rule"], "cache-max");
    assert!(
        item["reason"]
            .as_str()
            .unwrap()
            .contains("`apt-get` in env"),
        "{item}"
    );
    let notes = dry["notes"].to_string();
    assert!(notes.contains("rockenv cache clear odd"), "{notes}");
    assert!(notes.contains("[gc.cache.typo]"), "{notes}");
    let done = json(&store, &[]);
    assert_eq!(names(&done, "removed"), ["cache apt"], "{done:#}");
    assert!(!caches.join("apt/archives/x_1_amd64.deb").exists());
    assert!(caches.join("odd/archive-v2.tar").exists());
    let rows = store.rockenv(&["cache", "ls", "--json"]).ok().json();
    assert_eq!(rows[0]["tool"], "apt");
    assert_eq!(rows[0]["max"], MIB);
    assert_eq!(rows[1]["max"], 2 * MIB);
}

/// Writes a profile with a small limit for its apt cache, and a step with this name.
fn with_apt(store: &TestStore, step: &str) {
    store.profile(&format!(
        "[[volume]]\nname = 'apt'\nkind = 'cache'\ntarget = '/var/cache/apt'\nmax = '1M'\n
         [[step]]\nname = '{step}'\nrun = 'echo {step}'\n"
    ));
}

fn overfill(store: &TestStore) {
    let archives = store.home().join("caches/apt/archives");
    fs::create_dir_all(archives.join("partial")).unwrap();
    fs::write(archives.join("x_1_amd64.deb"), vec![1; 3 << 20]).unwrap();
}

#[test]
fn a_cache_stays_as_it_is_while_another_env_builds_on_it() {
    let store = TestStore::new();
    with_apt(&store, "a");
    store.up();
    let other = format!("{}-other", store.env());
    store.rockenv(&["up", store.env(), "--name", &other]).ok();
    overfill(&store);
    let wait = "touch /var/cache/apt/begun; while test -e /var/cache/apt/begun; do sleep 0.1; done";
    let begun = store.home().join("caches/apt/begun");
    let deb = store.home().join("caches/apt/archives/x_1_amd64.deb");
    let build = || {
        let running = store.start(&["exec", "--root", &other, "--", "sh", "-c", wait]);
        wait_until("a command that builds", || begun.exists());
        running
    };
    // The build begins while `gc` waits for an answer.
    let mut asked = Terminal::start(store.command(&["gc"]), 33, 101);
    asked.expect("remove 1 item ");
    let running = build();
    asked.write("y\n");
    asked.expect(&format!(
        "cache apt stays: in use by a command in env {other}"
    ));
    asked.wait(0);
    assert!(deb.exists());
    for words in [&["--dry-run"][..], &[]] {
        let report = json(&store, words);
        let notes = report["notes"].to_string();
        assert!(
            notes.contains(&format!("in use by a command in env {other}")),
            "{report:#}"
        );
        assert!(deb.exists());
    }
    fs::remove_file(&begun).unwrap();
    drop(running.wait());
    let done = json(&store, &[]);
    assert_eq!(names(&done, "removed"), ["cache apt"], "{done:#}");
}

#[test]
fn a_tool_that_leaves_too_much_is_asked_once() {
    let store = TestStore::new();
    with_apt(&store, "a");
    store.up();
    overfill(&store);
    fs::write(
        store.home().join("caches/apt/archives/lock"),
        vec![1; 2 << 20],
    )
    .unwrap();
    let words = ["--yes", "--json", "gc", "--free", "1T"];
    let done = store.rockenv(&words).exits(10).json();
    assert_eq!(names(&done, "removed"), ["cache apt"], "{done:#}");
}

#[test]
fn a_tool_that_shrank_a_cache_is_no_change_by_hand() {
    let disk = LoopFs::with_base(Kind::Xfs);
    let store = TestStore::on(&disk);
    with_apt(&store, "a");
    store.up();
    overfill(&store);
    let done = json(&store, &[]);
    assert_eq!(names(&done, "removed"), ["cache apt"], "{done:#}");
    let trees = store.env_dir().join("trees");
    assert_eq!(trees.read_dir().map_or(0, Iterator::count), 0);
    with_apt(&store, "b");
    store.up();
    assert_eq!(snapshots(&store), ["a", "b"]);
}

#[test]
fn the_timer_s_units_are_what_systemd_reads() {
    crate::support::loopfs::private_mounts();
    let directory = tempfile::tempdir().unwrap();
    fs::create_dir_all("/etc/systemd/system").unwrap();
    let _bound = bind(directory.path(), Path::new("/etc/systemd/system"));
    let store = TestStore::new();
    let shown = store.rockenv(&["setup", "--dry-run", "--timer", "--json"]);
    let shown = shown.ok().json();
    let service = &shown["units"]["/etc/systemd/system/rockenv-gc.service"];
    // The timer applies the configuration's policy.
    assert!(service.as_str().unwrap().contains(" gc\n"), "{service}");
    assert_eq!(directory.path().read_dir().unwrap().count(), 0);
    store.rockenv(&["setup", "--yes", "--timer=ci"]).ok();
    let service = directory.path().join("rockenv-gc.service");
    let text = fs::read_to_string(&service).unwrap();
    let start = text
        .lines()
        .find_map(|line| line.strip_prefix("ExecStart="))
        .unwrap();
    assert!(
        start.contains(&store.home().display().to_string()),
        "{start}"
    );
    let told = Command::new("systemd-analyze")
        .args(["verify", "--man=no"])
        .args([&service, &directory.path().join("rockenv-gc.timer")])
        .output()
        .unwrap();
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&told.stdout),
        String::from_utf8_lossy(&told.stderr)
    );
    assert!(!told.contains("rockenv-gc"), "{told}");
    // The command of the timer works.
    let words: Vec<&str> = start.split(' ').collect();
    run(Command::new(words[0]).args(&words[1..]).env_clear());
}

#[test]
fn gc_has_the_short_option_of_make_and_rsync() {
    let store = TestStore::new();
    // Other processes change the free space, so it is left out.
    let said = |option| measured(store.rockenv(&["gc", option]).ok().text());
    for short in ["-n", "-d"] {
        assert_eq!(said(short), said("--dry-run"));
    }
}
