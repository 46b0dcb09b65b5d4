//! Several targets with one command: shared steps are built once, and no failure stops another env. Needs root.

mod agreed;
mod jobs;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{finish, processes_called, wait_until};
use fs_err as fs;
use nix::sys::signal::Signal;
use serde_json::Value;

/// Two steps that do not depend on the target, and one that does. Each step records that it ran.
const STEPS: &str = "
[[volume]]
name = 'runs'
kind = 'host'
access = 'rw'
path = 'OUT'
target = '/runs'
[[step]]
name = 'one'
run = 'echo one >> /runs/log; head -c 4M /dev/urandom > ~/one'
[[step]]
name = 'two'
run = 'echo two >> /runs/log; head -c 4M /dev/urandom > ~/two'
[[step]]
name = 'own'
run = '''
echo ${target} >> /runs/log
test ! -e /runs/no-${target}
head -c 4M /dev/urandom > ~/${target}
'''
";

const TARGETS: [&str; 3] = ["gfx1100", "gfx1103", "gfx1201"];

fn steps(store: &TestStore, text: &str) {
    store.profile(&text.replace("OUT", &store.runs().display().to_string()));
}

fn matrix<'a>(store: &'a TestStore, more: &[&'a str]) -> Vec<&'a str> {
    let up = ["--json", "matrix", "up", "--profile", store.env()];
    [&up[..], &TARGETS, more].concat()
}

fn outcomes(json: &Value) -> Vec<&str> {
    let rows = json["envs"].as_array().unwrap().iter();
    rows.map(|row| row["outcome"].as_str().unwrap()).collect()
}

fn remove(store: &TestStore) {
    remove_all(store, &TARGETS);
}

/// Removes the envs with these name suffixes.
fn remove_all(store: &TestStore, names: &[&str]) {
    for name in names {
        let env = format!("{}-{name}", store.env());
        if store
            .home()
            .join("envs")
            .join(&env)
            .join("record.json")
            .exists()
        {
            // The holder of a killed command may not have released the env yet.
            store.rockenv(&["down", &env]).ok();
            store.rockenv(&["--yes", "rm", &env]).ok();
        }
    }
}

#[test]
fn two_envs_do_not_write_to_one_output_directory() {
    let store = TestStore::new();
    let profile = |path: &str| {
        let out = store.runs().join(path);
        store.profile(&format!(
            "[[volume]]\nname = 'out'\nkind = 'output'\npath = '{}'\ntarget = '/out'\n\
             [[step]]\nname = 'one'\nrun = 'echo ${{target}} > /out/one'\n",
            out.display()
        ));
    };
    let up = [
        "matrix",
        "up",
        "--profile",
        store.env(),
        "gfx1100",
        "gfx1103",
    ];
    profile("same");
    insta::assert_snapshot!(store.shows("matrix up --profile ENV gfx1100 gfx1103"), @"
    error: envs `ENV-gfx1100` and `ENV-gfx1103` have the same output directory `WORK/runs/same`
    help: use `${target}` in the `path` of the volume, or no `path`
    exit code 2
    ");
    assert!(!store.runs().join("same").exists());
    profile("${target}");
    let done = store.rockenv(&[&up[..], &["--ephemeral"]].concat()).ok();
    let places = ["gfx1100", "gfx1103"].map(|target| store.runs().join(target));
    let [one, two] = places.each_ref().map(|place| place.display());
    let kept = format!("2 envs removed (--ephemeral); outputs kept: {one}, {two}");
    done.says(&[&kept]);
    for place in &places {
        let text = fs::read_to_string(place.join("one")).unwrap();
        assert!(place.ends_with(text.trim()), "{text}");
    }
}

fn what_is_common_is_built_once(store: &TestStore) {
    steps(store, STEPS);
    let text = store.rockenv(&matrix(store, &["--parallel", "3"])).ok();
    let json = text.says(&["common to all up to step `two`"]).json();
    assert_eq!(store.ran(), ["gfx1100", "gfx1103", "gfx1201", "one", "two"]);
    assert_eq!(outcomes(&json), ["done"; 3], "{json:#}");
    assert_eq!(json["common"][0]["steps"], 2);
    // Shared layers are on the disk once.
    let disk = |row: &Value| row["disk_delta"].as_i64().unwrap() >> 20;
    assert!((8..10).contains(&disk(&json["common"][0])), "{json:#}");
    for row in json["envs"].as_array().unwrap() {
        assert!((4..6).contains(&disk(row)), "{json:#}");
    }
    let again = store.rockenv(&matrix(store, &[])).ok().json();
    assert_eq!(outcomes(&again), ["hit"; 3]);
    assert!(
        again["common"] == serde_json::json!([]) && store.ran().is_empty(),
        "{again:#}"
    );
    remove(store);
}

#[test]
fn what_is_common_is_built_once_on_overlay() {
    what_is_common_is_built_once(&TestStore::new());
}

#[test]
fn what_is_common_is_built_once_on_btrfs() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    what_is_common_is_built_once(&TestStore::on(&disk));
}

/// Writes profiles `a`, `b` and so on with these steps, which record that they ran. Returns the arguments that
/// `matrix up` needs for them.
fn profiles(store: &TestStore, all: &[&[&str]]) -> Vec<String> {
    let out = store.runs();
    let out = out.display();
    let mut asked: Vec<String> = ["--json", "matrix", "up", "--parallel", "3", "gfx1103"]
        .map(str::to_owned)
        .to_vec();
    for (letter, own) in ('a'..).zip(all) {
        let name = format!("{}-{letter}", store.env());
        let mut body = vec![format!(
            "[[volume]]\nname = 'runs'\nkind = 'host'\naccess = 'rw'\npath = '{out}'\ntarget = '/runs'\n"
        )];
        body.extend(own.iter().map(|step| {
            format!(
                "[[step]]\nname = '{step}'\nrun = 'echo {step} >> /runs/log; test ! -e /runs/no-{step}; sh -c \"$(cat /runs/wait 2> /dev/null)\"'\n"
            )
        }));
        store.profile_named(&name, &body.concat());
        asked.extend(["--profile".to_owned(), name]);
    }
    asked
}

/// Returns, for each group of envs that share steps: the env that builds them, all envs, the last step, and the number
/// of steps.
fn shared(store: &TestStore, json: &Value) -> Vec<String> {
    let short = |name: &Value| {
        let name = name.as_str().unwrap().strip_prefix(store.env()).unwrap();
        name.split('-').nth(1).unwrap().to_owned()
    };
    let mut shared: Vec<String> = json["common"]
        .as_array()
        .unwrap()
        .iter()
        .map(|row| {
            let all: String = row["envs"].as_array().unwrap().iter().map(short).collect();
            let (env, until) = (short(&row["env"]), row["until"].as_str().unwrap());
            format!("{env} for {all} up to {until}, {}", row["steps"])
        })
        .collect();
    shared.sort();
    shared
}

const LETTERS: [&str; 3] = ["a-gfx1103", "b-gfx1103", "c-gfx1103"];

#[test]
fn what_some_share_is_built_once_too() {
    let store = TestStore::new();
    // The first two profiles share two steps. The third shares none with them.
    let asked = profiles(
        &store,
        &[
            &["one", "two", "own-a"],
            &["one", "two", "own-b"],
            &["other", "two", "own-c"],
        ],
    );
    let json = store.rockenv(&asked).ok().json();
    assert_eq!(outcomes(&json), ["done"; 3], "{json:#}");
    // `two` after `other` is a different step.
    assert_eq!(
        store.ran(),
        ["one", "other", "own-a", "own-b", "own-c", "two", "two"]
    );
    assert_eq!(shared(&store, &json), ["a for ab up to two, 2"]);
    let mut table = asked.clone();
    table.remove(0);
    let table = store.rockenv(&table).ok().text();
    assert!(!table.contains("common steps"), "{table}");
    remove_all(&store, &LETTERS);
}

#[test]
fn what_some_share_after_what_all_share_is_built_once_too() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    let all: [&[&str]; 3] = [
        &["one", "two", "three", "own-a"],
        &["one", "two", "three", "own-b"],
        &["one", "own-c"],
    ];
    let asked = profiles(&store, &all);
    // A failed step that two envs share stops only these two.
    let forbidden = store.work().join("runs/no-three");
    fs::write(&forbidden, "").unwrap();
    let json = store.rockenv(&asked).exits(5).json();
    assert_eq!(outcomes(&json), ["failed", "not-run", "done"], "{json:#}");
    let why = json["envs"][1]["why"].as_str().unwrap();
    assert!(why.contains("step `three` failed in env"), "{why}");
    assert_eq!(store.ran(), ["one", "own-c", "three", "two"]);
    assert_eq!(shared(&store, &json), ["a for abc up to one, 1"]);
    // Both resume at the failed step.
    fs::remove_file(&forbidden).unwrap();
    let table = store.rockenv(&asked[1..]).ok().says(&["common to"]);
    assert!(table.text().contains("2 of 3"), "{}", table.text());
    assert_eq!(store.ran(), ["own-a", "own-b", "three"]);
    // The same from scratch.
    remove_all(&store, &LETTERS);
    let json = store.rockenv(&asked).ok().json();
    assert_eq!(outcomes(&json), ["done"; 3], "{json:#}");
    assert_eq!(
        store.ran(),
        ["one", "own-a", "own-b", "own-c", "three", "two"]
    );
    assert_eq!(
        shared(&store, &json),
        ["a for ab up to three, 2", "a for abc up to one, 1"]
    );
    remove_all(&store, &LETTERS);
}

#[test]
fn ctrl_c_ends_what_is_built_for_others() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    let asked = profiles(&store, &[&["one", "a"], &["one", "b"], &["c"]]);
    let wait = store.work().join("runs/wait");
    fs::write(&wait, format!("exec {sleeper}")).unwrap();
    let up = store.start(&asked);
    // The third env does not wait while the first builds for the second.
    wait_until("two of them run", || processes_called(&sleeper).len() == 2);
    assert_eq!(store.ran(), ["c", "one"]);
    up.signal(Signal::SIGINT);
    wait_until("none runs", || processes_called(&sleeper).is_empty());
    up.wait().exits(130).says(&["finished steps are kept"]);
    assert!(store.ran().is_empty());
    remove_all(&store, &LETTERS);
}

#[test]
fn one_failure_does_not_stop_the_others() {
    let store = TestStore::new();
    store.profile("steps = 1\n");
    let wrong = store.rockenv(&matrix(&store, &[])).exits(3);
    // An error in the profile is reported once.
    assert_eq!(wrong.err.matches("is invalid").count(), 1, "{}", wrong.err);
    wrong.says(&["gfx1100: error: profile", "steps = 1"]);
    steps(&store, STEPS);
    let forbidden = store.work().join("runs/no-gfx1103");
    fs::write(&forbidden, "").unwrap();
    let failed = store
        .rockenv(&matrix(&store, &["--parallel", "1"]))
        .exits(5);
    let json = failed.json();
    assert_eq!(outcomes(&json), ["done", "failed", "done"], "{json:#}");
    let why = json["envs"][1]["why"].as_str().unwrap();
    assert!(why.contains("step `own` failed"), "{why}");
    failed.says(&["resume with: rockenv up"]);
    fs::remove_file(forbidden).unwrap();
    store.ran();
    let mended = store.rockenv(&["matrix", "up", "-p", store.env(), "gfx1100", "gfx1103"]);
    let table = mended.ok().text();
    assert!(
        table.contains("gfx1103") && table.contains("done"),
        "{table}"
    );
    assert_eq!(store.ran(), ["gfx1103"]);
    // The other envs do not retry a failed shared step.
    steps(&store, &STEPS.replace("echo two", "false; echo two"));
    let first = format!("{}-gfx1100", store.env());
    store.sh_in(&first, "echo > ~/mine").ok();
    let mut command = store.command(&[&["--quiet"], &matrix(&store, &[])[..]].concat());
    command.env("CLICOLOR_FORCE", "1");
    let failed = finish("matrix up".to_owned(), command).exits(5);
    let json = failed.json();
    assert_eq!(
        outcomes(&json),
        ["failed", "not-run", "not-run"],
        "{json:#}"
    );
    let why = json["envs"][0]["why"].as_str().unwrap();
    assert!(why.contains("step `two` failed"), "{why}");
    let warning = format!("{first}: changes made by `exec` or `shell` are kept");
    failed.says(&[&warning]);
    remove(&store);
}

#[test]
fn an_env_that_somebody_holds_stops_no_other() {
    let store = TestStore::new();
    steps(&store, STEPS);
    store
        .rockenv(&["up", store.env(), "--target", "gfx1100"])
        .ok();
    store.ran();
    let held = format!("{}-gfx1100", store.env());
    let sleeper = store.sleeper();
    let command: Vec<&str> = sleeper.split(' ').collect();
    let _exec = store.start(&[&["exec", &held, "--"], &command[..]].concat());
    wait_until("it runs", || processes_called(&sleeper).len() == 1);
    // The held env comes first, so it would build the shared steps.
    steps(&store, &STEPS.replace("echo one", "echo two thirds"));
    let json = store.rockenv(&matrix(&store, &[])).exits(6).json();
    assert_eq!(outcomes(&json), ["failed", "done", "done"], "{json:#}");
    let why = json["envs"][0]["why"].as_str().unwrap();
    assert!(why.contains("is held by"), "{why}");
    // The other envs still built their shared steps once.
    assert_eq!(store.ran(), ["gfx1103", "gfx1201", "two", "two thirds"]);
    let common = &json["common"][0];
    assert_eq!(common["env"], format!("{}-gfx1103", store.env()));
    assert_eq!(common["envs"].as_array().unwrap().len(), 2);
    remove(&store);
}

#[test]
fn what_cannot_be_planned_is_said_and_the_others_are_built() {
    let store = TestStore::new();
    steps(&store, STEPS);
    let said = store.shows(
        "matrix up -p ENV gfx1100 gfx9999
        matrix up -p ENV gfx1100 -- --until none
        matrix up -p none.toml gfx1100
        matrix json -p none.toml gfx1100
        matrix github -p none.toml gfx1100
        matrix slurm -p ENV gfx1100 -- --until none
        matrix slurm -p ENV gfx1100 -- --help
        matrix up rocm-libs gfx1103",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv matrix up -p ENV gfx1100 gfx9999
    error: unknown target `gfx9999`
    help: did you mean `gfx900`? `rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock
    exit code 7
    $ rockenv matrix up -p ENV gfx1100 -- --until none
    target   env  outcome  time  disk  why
    gfx1100       failed   TIME   0 B  profile `ENV` has no step `none`
    gfx1100: error: profile `ENV` has no step `none`
    gfx1100: help: did you mean `one`? its steps are: one, two, own
    exit code 7
    $ rockenv matrix up -p none.toml gfx1100
    target   env  outcome  time  disk  why
    gfx1100       failed   TIME   0 B  no profile file `none.toml`
    gfx1100: error: no profile file `none.toml`
    gfx1100: help: `rockenv profile ls` lists the profiles that have names
    exit code 7
    $ rockenv matrix json -p none.toml gfx1100
    error: no profile file `none.toml`
    help: `rockenv profile ls` lists the profiles that have names
    exit code 7
    $ rockenv matrix github -p none.toml gfx1100
    error: no profile file `none.toml`
    help: `rockenv profile ls` lists the profiles that have names
    exit code 7
    $ rockenv matrix slurm -p ENV gfx1100 -- --until none
    error: cannot plan `rockenv up ENV --target gfx1100`
      caused by: error: profile `ENV` has no step `none`
        help: did you mean `one`? its steps are: one, two, own
    exit code 7
    $ rockenv matrix slurm -p ENV gfx1100 -- --help
    error: `--help` cannot be passed to each `up`
    help: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    exit code 2
    $ rockenv matrix up rocm-libs gfx1103
    error: unknown target `rocm-libs`
    help: `rockenv target ls` shows them all, `rockenv target learn --source DIR` imports those of a newer TheRock; `--profile rocm-libs` names a profile
    exit code 7
    ");
    let options = "--dry-run -d --json --progress=json -h --home=/s";
    let refused = options.split(' ').map(|option| {
        let refused = store.rockenv(&matrix(&store, &["--", option])).exits(2);
        refused.err.replace("\nhelp:", ":")
    });
    insta::assert_snapshot!(refused.collect::<String>(), @"
    error: `--dry-run` cannot be passed to each `up`: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    error: `-d` cannot be passed to each `up`: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    error: `--json` cannot be passed to each `up`: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    error: `--progress` cannot be passed to each `up`: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    error: `-h` cannot be passed to each `up`: `rockenv plan TARGET` shows one env; `rockenv up --help` the options
    error: `--home` cannot be passed to each `up`: all envs are in one store: rockenv --home DIR matrix ...
    ");
    // Each env may go with its own `up`, which needs no root and less space, but shares nothing.
    let alone = ["--", "--ephemeral", "--until", "none"];
    let alone = store.rockenv(&matrix(&store, &alone)).exits(7);
    alone.says(&["warning: with `-- --ephemeral` each env builds the common steps again"]);
    assert!(store.ran().is_empty());
}

#[test]
fn options_for_each_up_may_name_a_last_step_or_one_to_run_again_or_a_file() {
    let store = TestStore::new();
    steps(&store, STEPS);
    let rows = store.work().join("rows.jsonl");
    let asked = |option: &str, step: &str| {
        let up = store.rockenv(&matrix(&store, &["--", option, step])).ok();
        up.json()
    };
    let json = asked("--until", "two");
    assert_eq!(store.ran(), ["one", "two"], "{json:#}");
    asked("--until", "own");
    assert_eq!(store.ran(), TARGETS);
    asked("--metrics", rows.to_str().unwrap());
    let rows = fs::read_to_string(rows).unwrap();
    for target in TARGETS {
        assert!(rows.contains(&format!("\"target\":\"{target}\"")), "{rows}");
    }
    // Each env reruns the step for itself.
    let json = asked("--rerun", "two");
    assert_eq!(json["common"], serde_json::json!([]));
    assert_eq!(store.ran(), [&TARGETS[..], &["two"; 3]].concat());
    remove(&store);
}

/// In an empty store, all envs share the steps before the one to rerun. These are built once.
#[test]
fn a_step_to_run_again_may_come_after_what_is_shared() {
    let store = TestStore::new();
    steps(&store, STEPS);
    let up = store.rockenv(&matrix(&store, &["--", "--rerun", "own"]));
    let json = up.ok().json();
    assert_eq!(json["common"][0]["steps"], 2, "{json:#}");
    assert_eq!(store.ran(), [&TARGETS[..], &["one", "two"]].concat());
    remove(&store);
}

#[test]
fn profiles_that_name_their_targets_need_no_others() {
    let store = TestStore::new();
    let names = ["a", "b", "c"].map(|letter| format!("{}-{letter}", store.env()));
    let [a, b, c] = names.each_ref().map(String::as_str);
    let own = "[[step]]\nname = 'own'\nrun = 'echo ${target} > ~/own'\n";
    store.profile_named(a, &format!("targets = ['gfx1103']\n{own}"));
    let test = "[[step]]\nname = 'test'\ngpu = true\nrun = 'true'\n";
    store.profile_named(b, &format!("targets = ['gfx1201']\n{own}{test}"));
    store.profile_named(c, "[[step]]\nname = 'own'\nrun = 'true'\n");
    let up = [
        "--json", "matrix", "up", "-p", a, "-p", b, "--", "--gpu", "none",
    ];
    let json = store.rockenv(&up).ok().json();
    let lacking = "1 step skipped because `--gpu none` is set: test";
    assert_eq!(json["envs"][1]["why"], lacking, "{json:#}");
    assert!(json["envs"][0]["why"].is_null(), "{json:#}");
    for (row, (env, target)) in [(a, "gfx1103"), (b, "gfx1201")].iter().enumerate() {
        assert_eq!(json["envs"][row]["env"], *env, "{json:#}");
        assert_eq!(json["envs"][row]["target"], *target);
        store.sh_in(env, "cat ~/own").ok().prints(target);
    }
    let jobs = store.rockenv(&["matrix", "json", "-p", a, "-p", b]);
    let jobs = jobs.ok().json();
    assert_eq!(jobs["include"][1]["name"], b, "{jobs:#}");
    assert_eq!(jobs["include"][1]["target"], "gfx1201");
    assert_eq!(jobs["include"][1]["up"][0], b);
    // A profile without targets is reported before anything is built.
    for verb in ["up", "json", "github", "slurm"] {
        let refused = store.shows(&format!("matrix {verb} -p ENV-a -p ENV-c"));
        insta::allow_duplicates! {
            insta::assert_snapshot!(refused, @r#"
            error: profile `ENV-c` names no targets and none are given
            help: name a target, such as gfx1103, or add `targets = ["gfx1103"]` to the profile
            exit code 2
            "#);
        }
    }
    store.rockenv(&["matrix", "up"]).exits(2);
    // Two builds cannot use the same env.
    insta::assert_snapshot!(store.shows("matrix up -p ENV-a -p ENV-b -- --name both"), @"
    error: `up ENV-a` and `up ENV-b` are both env `both`
    help: use profiles with different names, and no `--name` for all envs
    exit code 2
    ");
    remove_all(&store, &["a", "b"]);
}

#[test]
fn ctrl_c_ends_all_of_them() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    steps(
        &store,
        &STEPS.replace("test ! -e", &format!("{sleeper}; test ! -e")),
    );
    let up = store.start(&matrix(&store, &["--parallel", "2"]));
    wait_until("two of them run", || processes_called(&sleeper).len() == 2);
    up.signal(Signal::SIGINT);
    wait_until("none runs", || processes_called(&sleeper).is_empty());
    up.wait().exits(130).says(&["finished steps are kept"]);
    // A killed `matrix up` leaves no step running either.
    let up = store.start(&matrix(&store, &[]));
    wait_until("two run again", || processes_called(&sleeper).len() == 2);
    up.signal(Signal::SIGKILL);
    wait_until("none runs", || processes_called(&sleeper).is_empty());
    drop(up);
    assert!(store.ran().contains(&"two".to_owned()));
    remove(&store);
}

#[test]
fn ephemeral_envs_share_what_they_have_in_common_and_leave_nothing() {
    let store = TestStore::new();
    steps(&store, STEPS);
    let other = format!("{}-gfx1103", store.env());
    let up = store.rockenv(&matrix(&store, &["--ephemeral"])).ok();
    let up = up.says(&["3 envs removed (--ephemeral)"]);
    assert!(!up.err.contains("rockenv shell"), "{}", up.err);
    let json = up.json();
    assert_eq!(outcomes(&json), ["done"; 3]);
    assert_eq!(store.ran(), ["gfx1100", "gfx1103", "gfx1201", "one", "two"]);
    let nothing = |what: &str| {
        assert_eq!(
            store.rockenv(&["ls", "--json"]).ok().text().trim(),
            "[]",
            "{what}"
        );
        for place in ["layers", "volumes"] {
            let left = fs::read_dir(store.home().join(place)).unwrap().count();
            assert_eq!(left, 0, "{what}: {place}");
        }
    };
    nothing("done");
    fs::write(store.work().join("runs/no-gfx1103"), "").unwrap();
    let failed = store.rockenv(&matrix(&store, &["--ephemeral"])).exits(5);
    let failed = failed.says(&["3 envs removed (--ephemeral)", "without --ephemeral"]);
    for gone in ["log: ", "rockenv shell"] {
        assert!(!failed.err.contains(gone), "{}", failed.err);
    }
    nothing("failed");
    // `--ephemeral` never removes an env that existed before.
    fs::remove_file(store.work().join("runs/no-gfx1103")).unwrap();
    store
        .rockenv(&["up", store.env(), "--target", "gfx1103"])
        .ok();
    let refused = store.rockenv(&matrix(&store, &["--ephemeral"]));
    insta::assert_snapshot!(store.shown(&refused), @"
    error: env `ENV-gfx1103` exists and is not ephemeral
    help: rockenv up ... --ephemeral --name NEW, or first: rockenv rm ENV-gfx1103
    exit code 2
    ");
    // The envs before it were not created either.
    let listed = store.rockenv(&["ls", "--json"]).ok().text();
    assert_eq!(listed.matches("\"env\": ").count(), 1, "{listed}");
    let first = store.home().join(format!("envs/{}-gfx1100", store.env()));
    assert!(!first.join("ephemeral").exists());
    store.rockenv(&["exec", &other, "--", "true"]).ok();
    store.rockenv(&["rm", "--yes", &other]).ok();
}
