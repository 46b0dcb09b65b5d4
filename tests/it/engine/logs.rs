//! Which log belongs to which step and to which run.

use std::collections::BTreeSet;

use fs_err as fs;
use serde_json::Value;

use crate::support::env::TestStore;
use crate::support::run::{Background, wait_until};

pub(super) const OUT: &str = "volume = [{ name = 'out', kind = 'output', target = '/out' }]\n";

/// Lets steps continue that wait for `/out/go`.
pub(super) fn release(store: &TestStore) {
    let out = store.out();
    fs::write(out.join("go"), "").unwrap();
}

#[test]
fn steps_from_the_hundredth_on_have_logs() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = 'n1'\nrun = 'echo first'\n");
    let runs = fs::read_dir(store.env_dir().join("logs")).unwrap();
    let run = runs.flatten().next().unwrap().path();
    for number in [99, 100, 101] {
        let line = format!("2026-11-20T18:49:53.123Z | this is {number}\n");
        fs::write(run.join(format!("{number}-n{number}.log")), line).unwrap();
    }
    // A run that was removed after its directory was listed.
    let gone = run.with_file_name("gone");
    std::os::unix::fs::symlink("absent", &gone).unwrap();
    let show = |words: &[&str]| store.rockenv(&[&["logs", store.env()], words].concat());
    show(&[]).ok().prints("this is 101");
    fs::remove_file(gone).unwrap();
    show(&["n100"]).ok().prints("this is 100");
    show(&["n1"]).ok().prints("first");
    show(&["--", "-n100"]).exits(7);
}

#[test]
fn a_step_that_waits_is_not_shown_with_the_figures_of_an_earlier_run() {
    let store = TestStore::new();
    let other = format!("{}-b", store.env());
    store.profile(&format!(
        "{OUT}[[step]]\nname = 'slow'\nrun = 'until test -e /out/go; do sleep 0.05; done'\n"
    ));
    store.profile_named(
        &other,
        "[[step]]\nname = 's'\nrun = 'sleep 1; exit 3'\n[[step]]\nname = 'after'\nrun = 'true'\n",
    );
    let start = |name: &str| {
        let mut command = store.command(&["up", name]);
        command.env("ROCKENV_JOBS", "1");
        Background::start(command)
    };
    start(&other).wait().exits(5);
    let slow = start(store.env());
    wait_until("the slot is taken", || {
        let shown = store.rockenv(&["status", store.env()]);
        shown.code == 0 && shown.text().contains("now ")
    });
    let waiting = start(&other);
    wait_until("the step is to run", || {
        let shown = store.rockenv(&["status", &other, "--json"]).ok().json();
        shown["record"]["steps"][0]["outcome"] == "pending"
    });
    let shown = store.rockenv(&["status", &other]).ok().text();
    release(&store);
    slow.wait().ok();
    waiting.wait().exits(5);
    assert!(!shown.contains("\nnow "), "{shown}");
    let states: Vec<Vec<&str>> = shown
        .lines()
        .map(|line| line.split_whitespace().collect())
        .collect();
    assert!(states.contains(&vec!["s", "waiting"]), "{shown}");
    assert!(states.contains(&vec!["after", "not", "done"]), "{shown}");
}

fn wait_until_slow_runs(store: &TestStore) {
    wait_until("the step `slow` runs", || {
        let shown = store.rockenv(&["status", store.env()]);
        shown.code == 0 && shown.text().contains("now      step slow")
    });
}

#[test]
fn who_follows_one_step_is_done_when_it_is() {
    let store = TestStore::new();
    store.profile(&format!(
        "{OUT}[[step]]\nname = 'first'\nrun = 'echo one'
         [[step]]\nname = 'slow'\nrun = 'echo begun; until test -e /out/go; do sleep 0.05; done'\n"
    ));
    // `first` runs in this run, and then only in an earlier one.
    for words in [
        &["up", store.env()][..],
        &["up", store.env(), "--rerun", "slow"],
    ] {
        let up = store.start(words);
        wait_until_slow_runs(&store);
        let mut follow = store.start(&["logs", "-f", store.env(), "first"]);
        wait_until("it ends before `up`", || !follow.runs());
        release(&store);
        up.wait().ok();
        follow.wait().ok().prints("one");
        let out = store.out();
        fs::remove_file(out.join("go")).unwrap();
    }
}

#[test]
fn a_step_can_be_followed_before_it_begins() {
    let store = TestStore::new();
    store.profile(&format!(
        "{OUT}[[step]]\nname = 'slow'\nrun = 'until test -e /out/go; do sleep 0.05; done'
         [[step]]\nname = 'last'\nrun = 'echo two'\n"
    ));
    let up = store.start(&["up", store.env()]);
    wait_until_slow_runs(&store);
    let mut follow = store.start(&["logs", "-f", store.env(), "last"]);
    store
        .rockenv(&["logs", "-f", store.env(), "lst"])
        .exits(7)
        .says(&["has no log of step `lst`"]);
    assert!(follow.runs(), "it ended before the step");
    release(&store);
    up.wait().ok();
    follow.wait().ok().prints("two");
}

#[test]
fn runs_that_begin_in_one_second_have_logs_of_their_own() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 's'\nrun = 'exit 3'\n");
    for _ in 0..3 {
        store.rockenv(&["up", store.env()]).exits(5);
    }
    let rows = fs::read_to_string(store.env_dir().join("metrics.jsonl")).unwrap();
    let rows = rows
        .lines()
        .map(|row| serde_json::from_str::<Value>(row).unwrap());
    let logs: BTreeSet<String> = rows.map(|row| row["log"].to_string()).collect();
    assert_eq!(logs.len(), 3, "{logs:?}");
}
