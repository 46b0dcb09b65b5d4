//! Envs that end with the command that made them, however it ends: only outputs and caches stay.

use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fs_err as fs;
use nix::sys::signal::{Signal, kill, killpg};
use nix::unistd::Pid;

use crate::support::env::{TestStore, is_service};
use crate::support::ordinary::Ordinary;
use crate::support::random::Random;
use crate::support::run::{
    Background, children, processes, processes_called, wait_for, wait_for_process, wait_until,
};

const VOLUMES: &str = "volume = [{ name = 'out', kind = 'output', target = '/out' },
    { name = 'b', kind = 'build', target = '/b' }, { name = 'c', kind = 'cache', target = '/c' }]\n";

fn step(name: &str, script: &str) -> String {
    format!("[[step]]\nname = '{name}'\nrun = '''{script}'''\n")
}

/// Returns a profile with a first step that writes to the tree and to every volume, and a last step.
fn steps(last: &str) -> String {
    let first = step(
        "first",
        "echo 1 > ~/one; echo 1 > /b/one; echo 1 >> /out/one; echo 1 >> /c/one",
    );
    format!("{VOLUMES}{first}{}", step("last", last))
}

fn file(store: &TestStore, volume: &str) -> PathBuf {
    let place = match volume {
        "out" => store.out(),
        _ => store.home().join("caches/c"),
    };
    place.join("one")
}

fn entries(directory: &Path) -> Vec<String> {
    let entries = fs::read_dir(directory).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .filter(|name| name != "lock")
        .collect()
}

/// Returns what is left of the store's envs.
fn left(store: &TestStore) -> Vec<String> {
    let envs = entries(&store.home().join("envs"));
    let mut left: Vec<String> = envs
        .iter()
        .flat_map(|env| entries(&store.home().join("envs").join(env)))
        .collect();
    for place in ["layers", "volumes", "trash"] {
        left.extend(entries(&store.home().join(place)));
    }
    left
}

fn ephemeral(store: &TestStore) -> Background {
    store.start(&["up", store.env(), "--ephemeral"])
}

#[test]
fn whatever_its_end_only_outputs_and_caches_stay() {
    let store = TestStore::new();
    let up = || store.rockenv(&["up", store.env(), "--ephemeral"]);
    let out = file(&store, "out").parent().unwrap().display().to_string();
    store.profile(&steps("cat ~/one /b/one"));
    up().ok().says(&[&format!(
        "{}: done; removed (--ephemeral); outputs kept: {out}",
        store.env()
    )]);
    assert_eq!(left(&store), [""; 0]);
    store.profile(&steps("echo what is wrong; exit 3"));
    up().exits(5).says(&[
        "what is wrong",
        "failed; removed (--ephemeral)",
        "run again without --ephemeral",
    ]);
    assert_eq!(left(&store), [""; 0]);
    let sleeper = store.sleeper();
    store.profile(&steps(&sleeper));
    for (signal, code) in [(Signal::SIGINT, 130), (Signal::SIGTERM, 143)] {
        let up = ephemeral(&store);
        wait_for_process(&sleeper);
        up.signal(signal);
        up.wait().exits(code).says(&["stopped; removed"]);
        assert_eq!(left(&store), [""; 0]);
    }
    for place in ["out", "c"] {
        assert_eq!(
            fs::read_to_string(file(&store, place)).unwrap(),
            "1\n".repeat(4)
        );
    }
    let listed = store.rockenv(&["ls", "--json"]).ok().text();
    assert_eq!(listed.trim(), "[]");
}

#[test]
fn nobody_takes_it_while_its_command_lives_and_it_takes_no_other() {
    let store = TestStore::new();
    let other = format!("{}-other", store.env());
    let sleeper = store.sleeper();
    store.profile_named(&other, &step("one", "echo kept > ~/kept"));
    store.rockenv(&["up", &other]).ok();
    store
        .rockenv(&["up", &other, "--ephemeral"])
        .exits(2)
        .says(&[
            "exists and is not ephemeral",
            &format!("rockenv rm {other}"),
        ]);
    store.profile(&steps(&sleeper));
    let up = ephemeral(&store);
    wait_for_process(&sleeper);
    // Commands that clean up leave the env alone while its command lives.
    store.rockenv(&["gc", "--yes"]).ok();
    store.rockenv(&["exec", &other, "--", "cat", "kept"]).ok();
    store.sh("cat /b/one").ok().prints("1");
    store.rockenv(&["fork", &other, store.env()]).exits(6);
    for more in [&[][..], &["--ephemeral"]] {
        let mut words = vec!["up", store.env()];
        words.extend(more);
        store.rockenv(&words).exits(6);
    }
    assert!(!processes_called(&sleeper).is_empty());
    up.signal(Signal::SIGTERM);
    up.wait().exits(143);
    let listed = store.rockenv(&["ls"]).ok().text();
    assert!(listed.contains(&other), "{listed}");
    // The same env stays if `up` makes it without `--ephemeral`.
    store.profile(&steps("true"));
    store.up();
    store.rockenv(&["gc", "--yes"]).ok();
    store.sh("cat /b/one").ok().prints("1");
    store.rockenv(&["rm", "--yes", store.env(), &other]).ok();
}

/// Gives the env's files to the user who owns the store.
fn own(store: &TestStore) {
    if let Some(user) = Ordinary::get() {
        user.own_all(&store.env_dir());
    }
}

#[test]
fn killed_at_any_moment_it_is_removed_by_the_next_command() {
    let store = TestStore::new();
    let mut random = Random::seeded();
    store.profile(&steps(
        "cat ~/one; for i in 1 2 3 4 5 6 7 8 9; do sleep 0.05; done",
    ));
    // A command that is killed while it writes the mark of an ephemeral env, or the first record, leaves such a file.
    for half in [".tmp-ephemeral", ".tmp-x1Y2z3"] {
        fs::create_dir_all(store.env_dir()).unwrap();
        fs::write(store.env_dir().join(half), "{").unwrap();
        own(&store);
        store.rockenv(&["gc", "--yes"]).ok();
        assert_eq!(left(&store), [""; 0]);
    }
    // It may also leave half a lease, which must not make `gc` fail.
    fs::write(store.env_dir().join("lease"), "{\"ima").unwrap();
    own(&store);
    store.rockenv(&["gc", "--yes"]).ok();
    assert_eq!(left(&store), [""; 0]);
    for _ in 0..5 {
        use std::os::unix::process::CommandExt as _;
        let mut command = store.command(&["up", store.env(), "--ephemeral"]);
        let null = std::process::Stdio::null;
        command.process_group(0).stdout(null()).stderr(null());
        let up = Background::start(command);
        std::thread::sleep(Duration::from_millis(random.below(900)));
        // Kills the holder too, as a CI system does when it ends a job.
        if random.below(2) == 0 {
            killpg(Pid::from_raw(up.pid()), Signal::SIGKILL).unwrap();
        }
        drop(up);
        if store.env_dir().join("ephemeral").exists() {
            let doctor = store.rockenv(&["doctor"]);
            let known = doctor.text() + &doctor.err;
            assert!(
                known.contains("left by a killed `up --ephemeral`"),
                "{known}"
            );
        }
        wait_for("something is left", || {
            store.rockenv(&["gc", "--yes"]).ok();
            match left(&store) {
                left if left.is_empty() => Ok(()),
                left => Err(left.join(" ")),
            }
        });
    }
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn processes_that_outlived_all_are_ended_and_nobody_elses() {
    let store = TestStore::new();
    let other = format!("{}-other", store.env());
    let (mine, its) = (store.sleeper(), store.sleeper());
    // Both commands have the same device open.
    let open = |sleeper: &str| format!("exec 3<>/dev/full; {sleeper} & wait");
    store.profile_named(&other, &step("one", "true"));
    store.rockenv(&["up", &other]).ok();
    let bystander = store.start(&["exec", &other, "--", "sh", "-c", &open(&its)]);
    wait_for_process(&its);
    let spared = store.contained();
    store.profile(&steps(&open(&mine)));
    let mut command = store.command(&["up", store.env(), "--ephemeral"]);
    let null = std::process::Stdio::null;
    command.stdout(null()).stderr(null());
    let up = Background::start(command);
    wait_for_process(&mine);
    let holders: Vec<i32> = children(up.pid())
        .into_iter()
        .filter(|pid| {
            processes()
                .iter()
                .any(|(found, line)| found == pid && line.contains("__hold"))
        })
        .collect();
    // All are stopped first, so that none can react to the end of another. Then those are killed that would clean up.
    let inside = store
        .contained()
        .into_iter()
        .filter(|one| !spared.contains(one));
    for pid in inside.map(|(pid, _)| pid).chain(holders.iter().copied()) {
        let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGSTOP);
    }
    let stray = (!is_service()).then(|| stray(&store));
    // `up` goes first, because it would clean up after its holder.
    drop(up);
    for pid in &holders {
        kill(Pid::from_raw(*pid), Signal::SIGKILL).unwrap();
    }
    wait_until("the holder is gone", || {
        holders
            .iter()
            .all(|pid| !Path::new(&format!("/proc/{pid}")).exists())
    });
    let said = store.rockenv(&["exec", &other, "--", "true"]).ok();
    let said = said.says(&[&format!(
        "{}: removed; its `rockenv up --ephemeral` (process",
        store.env()
    )]);
    if let Some(mut stray) = stray {
        said.says(&["was killed, and left"]);
        assert_eq!(stray.wait().unwrap().signal(), Some(9));
    }
    assert!(processes_called(&mine).is_empty());
    assert!(!processes_called(&its).is_empty());
    assert_eq!(entries(&store.env_dir()), [""; 0]);
    drop(bystander);
    store.rockenv(&["rm", "--yes", "--force", &other]).ok();
}

/// Starts a process in the control group of the env's container. The kernel does not end it together with the holder.
fn stray(store: &TestStore) -> std::process::Child {
    let state = store.state();
    let stray = std::process::Command::new("sleep")
        .arg("1000")
        .spawn()
        .unwrap();
    let directories = state["cgroup"]["directories"].as_array().unwrap();
    for directory in directories {
        let file = Path::new(directory[1].as_str().unwrap()).join("cgroup.procs");
        fs::write(file, stray.id().to_string()).unwrap();
    }
    stray
}
