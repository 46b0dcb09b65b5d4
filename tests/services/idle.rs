//! A container that waits for another command: used again while nothing tells it from a fresh one, and in nobody's way.

use std::time::Duration;

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::env::TestStore;
use crate::support::run::{Background, processes, wait_until};
use crate::{TWO, assert_nothing_left, service};

/// Returns the first process of the env's container, as the host numbers it; 0 when it does not run.
fn process(store: &TestStore) -> i64 {
    let (service, home) = (service(), store.home().to_str().unwrap());
    // A snapshot takes the container along.
    let containers = service.containers("store", home).unwrap();
    containers
        .first()
        .map_or(0, |(id, _)| service.state(id).unwrap().unwrap().pid)
}

fn state(store: &TestStore) -> String {
    let text = store
        .rockenv(&["status", store.env(), "--json"])
        .ok()
        .text();
    let status: serde_json::Value = serde_json::from_str(&text).unwrap();
    status["state"].as_str().unwrap().to_owned()
}

#[test]
fn the_next_command_runs_in_the_same_container() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo 1 > ~/one; exit 3").exits(3);
    let first = process(&store);
    assert_ne!(first, 0);
    wait_until("the env is free to see", || state(&store) == "ready");
    store.sh("cat ~/one").ok().prints("1");
    assert_eq!(process(&store), first);
    // Nothing that needs the env's lock is held up, or loses what was changed.
    store
        .rockenv(&["snapshot", "create", store.env(), "kept"])
        .ok();
    assert_eq!(process(&store), 0);
    store.sh("cat ~/one").ok().prints("1");
    assert_ne!(process(&store), first);
    // Two at once, and the first of them ends first.
    let sleeper = store.sleeper();
    let long = Background::start(store.command(&[
        "exec",
        store.env(),
        "--",
        "sh",
        "-c",
        &format!("{sleeper}; true"),
    ]));
    wait_until("it runs", || {
        processes().iter().any(|(_, line)| *line == sleeper)
    });
    assert_eq!(state(&store), "in use");
    store.sh("true").ok();
    store
        .rockenv(&["rm", "--yes", store.env()])
        .exits(6)
        .says(&["held by", "rm --force"]);
    drop(long);
    store.rockenv(&["rm", "--yes", "--force", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn it_is_no_reason_for_gc_to_keep_anything() {
    let store = TestStore::new();
    // Steps of other names: the snapshots of those before stay in the record.
    for round in [1, 2] {
        store.up_with(&format!(
            "volume = [{{ name = 'c', kind = 'cache', target = '/c' }}]
             [[step]]\nname = 'a{round}'\nrun = 'head -c 3000000 /dev/urandom > ~/a; echo {round} > /c/c'
             [[step]]\nname = 'b{round}'\nrun = 'echo {round} > ~/b'\n"
        ));
    }
    store.sh("echo mine > ~/mine").ok();
    let gc = |arguments: &[&str], list: &str| {
        let mut words = vec!["--yes", "--json", "gc", "--free", "1T", "--preset", "ci"];
        words.extend(arguments);
        let report: serde_json::Value = serde_json::from_slice(&store.rockenv(&words).out).unwrap();
        let names = report[list].as_array().unwrap().iter();
        let mut names: Vec<String> = names.map(|item| item["name"].to_string()).collect();
        names.sort();
        names
    };
    let waits = process(&store);
    assert_ne!(waits, 0);
    let dry = gc(&["--dry-run"], "items");
    assert!(dry.iter().any(|name| name.contains("/a1")), "{dry:?}");
    let roots = store.rockenv(&["gc", "--roots"]).ok().text();
    assert!(!roots.contains("runs in"), "{roots}");
    store.rockenv(&["--yes", "cache", "clear", "c"]).ok();
    // Nobody who only looks ends it.
    assert_eq!(process(&store), waits);
    assert_eq!(gc(&[], "removed"), dry);
    assert_eq!(process(&store), 0);
    store.sh("cat ~/mine ~/b; ls /c").ok().prints("mine\n2");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn what_would_tell_it_from_a_fresh_one_ends_it() {
    let store = TestStore::new();
    store.up_with(TWO);
    let sleeper = store.sleeper();
    for trace in [
        "touch /tmp/trace",
        "mkdir /var/tmp/trace",
        "touch /dev/shm/trace",
        &format!("setsid {sleeper} >/dev/null 2>&1 & echo $! > ~/pid"),
    ] {
        store.sh(trace).ok();
        assert_eq!(process(&store), 0, "after `{trace}`");
        store
            .sh("ls -A /tmp /var/tmp /dev/shm | grep trace; pgrep sleep; true")
            .ok()
            .prints("");
    }
    let root = ["exec", "--root", store.env(), "--", "touch", "/run/trace"];
    store.rockenv(&root).ok();
    assert_eq!(process(&store), 0);
    assert!(!processes().iter().any(|(_, line)| *line == sleeper));
}

#[test]
fn it_ends_by_itself_and_when_its_holder_is_killed() {
    let store = TestStore::new();
    store.up_with(TWO);
    fs::write(store.work().join("rockenv.toml"), "idle = \"1s\"\n").unwrap();
    store.sh("true").ok();
    assert_ne!(process(&store), 0);
    wait_until("it has ended", || process(&store) == 0);
    fs::write(store.work().join("rockenv.toml"), "idle = \"never\"\n").unwrap();
    store.sh("true").ok();
    assert_eq!(process(&store), 0);
    fs::write(store.work().join("rockenv.toml"), "idle = \"1\"\n").unwrap();
    store
        .rockenv(&["exec", store.env(), "--", "true"])
        .exits(3)
        .says(&["`idle`", "never"]);
    fs::remove_file(store.work().join("rockenv.toml")).unwrap();

    store.sh("echo mine > ~/mine").ok();
    let lock = store.env_dir().join("lock");
    let holds = |pid: i32| {
        fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == lock))
    };
    let holder = processes()
        .into_iter()
        .find(|(pid, line)| line.contains("__hold") && holds(*pid));
    kill(Pid::from_raw(holder.unwrap().0), Signal::SIGKILL).unwrap();
    std::thread::sleep(Duration::from_millis(100));
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}
