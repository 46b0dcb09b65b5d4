//! Unexpected ends: signals, kills, `down`. No process is ever left.

use std::time::{Duration, Instant};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::commands::ONE;
use crate::support::env::{TestStore, build_user, is_service, patience};
use crate::support::run::{
    Background, HANGS, children, processes, processes_called, wait_for, wait_for_process,
    wait_until,
};

/// Attempts for a check that must be fast at least once.
pub(super) const TRIES: u32 = 20;

fn start_step(store: &TestStore, script: &str, sleeper: &str) -> Background {
    let volume = "volume = [{ name = 'out', kind = 'output', target = '/out' }]\n";
    store.profile(&format!(
        "{volume}[[step]]\nname = 'long'\nrun = '''{script}\n{sleeper} &\nwait'''\n"
    ));
    let up = store.start(&["up", store.env()]);
    wait_for_process(sleeper);
    up
}

fn gone(what: &str, sleeper: &str) {
    wait_for(what, || match processes_called(sleeper) {
        left if left.is_empty() => Ok(()),
        left => Err(format!("{left:?}")),
    });
}

#[test]
fn once_asks_and_twice_forces() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    for (signal, code) in [
        (Signal::SIGINT, 130),
        (Signal::SIGTERM, 143),
        (Signal::SIGHUP, 129),
    ] {
        let up = start_step(
            &store,
            "trap 'echo asked >> /out/asked; exit 3' TERM",
            &sleeper,
        );
        up.signal(signal);
        let said = ["step 1/1 long … interrupted after ", "rockenv up"];
        let up = up.wait().exits(code).says(&said);
        assert!(!up.err.contains("failed"), "{}", up.err);
        for asked in ["status", "ls"] {
            let shown = store.rockenv(&[asked]).ok().text();
            assert!(shown.contains(" interrupted "), "{shown}");
        }
        assert!(processes_called(&sleeper).is_empty());
    }
    let asked = store.out().join("asked");
    assert_eq!(fs::read_to_string(asked).unwrap(), "asked\n".repeat(3));

    // After one signal, the step would get 5 seconds in every attempt. A slow machine may need as long, but not in
    // every attempt, and the rest of `up` may wait for the disk.
    let forced = |_| {
        let up = start_step(&store, "trap '' TERM INT HUP", &sleeper);
        let started = Instant::now();
        up.signal(Signal::SIGINT);
        std::thread::sleep(Duration::from_millis(300));
        assert!(!processes_called(&sleeper).is_empty());
        up.signal(Signal::SIGINT);
        gone("the step", &sleeper);
        let elapsed = started.elapsed();
        up.wait().exits(130);
        elapsed < patience(5)
    };
    assert!((0..TRIES).any(forced));

    // The signal may come at any moment of the command.
    store.profile(&format!("[[step]]\nname = 'long'\nrun = '{sleeper}'\n"));
    for delay in [0, 10, 50, 100, 200, 400] {
        let up = store.start(&["up", store.env()]);
        std::thread::sleep(Duration::from_millis(delay));
        up.signal(Signal::SIGINT);
        let ran = up.wait();
        // Until rockenv has read its configuration, the signal's default action ends it.
        assert_eq!(ran.code, 130, "after {delay} ms: {ran:?}");
        assert!(processes_called(&sleeper).is_empty());
        store.assert_clean();
    }
}

#[test]
fn whoever_is_killed_leaves_no_process() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    for (who, delay) in ["up", "holder", "nspawn", "init", "agent"]
        .into_iter()
        .filter(|who| !is_service() || !matches!(*who, "nspawn" | "init"))
        .flat_map(|who| [(who, 0), (who, 70)])
    {
        let up = start_step(
            &store,
            "trap '' TERM\n(setsid sh -c \"trap '' TERM; sleep 1000\" &)",
            &sleeper,
        );
        std::thread::sleep(Duration::from_millis(delay));
        let lock = store.env_dir().join("run/state.json");
        let state: serde_json::Value = serde_json::from_slice(&fs::read(lock).unwrap()).unwrap();
        let lock = state["lock"].as_str().unwrap_or_default().to_owned();
        assert_eq!(lock.is_empty(), is_service());
        let holder = children(up.pid())[0];
        let agent = store
            .contained()
            .into_iter()
            .find(|(_, line)| line.contains("__agent") && !line.contains("nspawn"));
        let agent = agent.unwrap().0;
        let nspawn = || children(holder)[0];
        let victim = match who {
            "up" => up.pid(),
            "holder" => holder,
            "nspawn" => nspawn(),
            "init" => *children(nspawn()).last().unwrap(),
            _ => agent,
        };
        kill(Pid::from_raw(victim), Signal::SIGKILL).unwrap();
        let ran = up.wait();
        assert_eq!(
            ran.code,
            if who == "up" { 137 } else { 4 },
            "{who}: {ran:?}"
        );
        gone(&format!("payload is left after killing {who}"), &sleeper);
        wait_for(who, || match store.contained() {
            left if left.is_empty() => Ok(()),
            left => Err(format!("{left:?}")),
        });
        store.rockenv(&["down", store.env()]).ok();
        store.assert_clean();
        assert!(!std::path::Path::new(&lock).exists(), "{who}: {lock}");
    }
    store.up_with(ONE);
    store.sh("true").ok();
}

#[test]
fn a_step_whose_container_is_lost_ends_in_events_metrics_and_words() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    store.profile(&format!(
        "[[step]]\nname = 'long'\nrun = '''echo important message\n{sleeper} & wait'''\n"
    ));
    let lost = |victim: &str, words: &[&str]| {
        let up = store.start(&[&["up", store.env()], words].concat());
        wait_for_process(&sleeper);
        wait_until("its output is there", || {
            let log = store.rockenv(&["logs", store.env()]);
            log.code == 0 && log.text().contains("important")
        });
        let own = children(up.pid());
        let mut found = match victim {
            "__hold" => processes(),
            _ => store.contained(),
        };
        found.retain(|(pid, line)| {
            line.contains(victim)
                && !line.contains("nspawn")
                && (victim != "__hold" || own.contains(pid))
        });
        kill(Pid::from_raw(found[0].0), Signal::SIGKILL).unwrap();
        up.wait().exits(4)
    };
    let rows = store.work().join("metrics");
    fs::create_dir(&rows).unwrap();
    std::os::unix::fs::chown(&rows, Some(build_user().0), None).unwrap();
    let rows = rows.join("rows");
    let metrics = ["--metrics", rows.to_str().unwrap()];
    let ran = lost("__agent", &[&["--progress", "json"], &metrics[..]].concat());
    let text = ran.text() + &ran.err;
    let events = text
        .lines()
        .filter_map(|line| serde_json::from_str(line).ok());
    let events: Vec<serde_json::Value> = events.collect();
    for kind in ["step-finished", "finished"] {
        let mut all = events.iter().filter(|event| event["event"] == kind);
        assert_eq!(all.next().expect(kind)["outcome"], "failed", "{text}");
        assert_eq!(all.next(), None, "{text}");
    }
    for rows in [rows, store.env_dir().join("metrics.jsonl")] {
        let row = fs::read_to_string(&rows).unwrap();
        assert_eq!(row.lines().count(), 1, "{row}\n{text}");
        assert!(row.contains("failed"), "{row}");
    }
    for victim in ["__agent", "__hold"] {
        let words = ["step 1/1 long … failed", "  important message", "log: "];
        let said = lost(victim, &[]).says(&words).err;
        assert!(said.contains("was stopped by another process"), "{said}");
    }
    let rows = fs::read_to_string(store.env_dir().join("metrics.jsonl")).unwrap();
    assert_eq!(rows.lines().count(), 3, "{rows}");
    store.up_with(ONE);
}

#[test]
fn all_of_it_killed_at_once_is_cleaned_up_by_the_next_command() {
    let store = TestStore::new();
    store.up_with(ONE);
    let sleeper = store.sleeper();
    let mut words: Vec<&str> = vec!["exec", store.env(), "--"];
    words.extend(sleeper.split(' '));
    for _ in 0..3 {
        let mut command = store.command(&words);
        // The processes that are stopped below would hold pipes open.
        command
            .stdout(std::process::Stdio::null())
            .stderr(std::process::Stdio::null());
        let exec = Background::start(command);
        wait_for_process(&sleeper);
        let own: Vec<i32> = processes()
            .into_iter()
            .filter(|(pid, line)| line.contains("__hold") && children(exec.pid()).contains(pid))
            .map(|(pid, _)| pid)
            .collect();
        // All are stopped first, so that none can react to the end of another.
        for (pid, _) in store.contained().iter().chain(
            own.iter()
                .map(|pid| (*pid, String::new()))
                .collect::<Vec<_>>()
                .iter(),
        ) {
            let _: nix::Result<()> = kill(Pid::from_raw(*pid), Signal::SIGSTOP);
        }
        for pid in own.iter().chain(&[exec.pid()]) {
            kill(Pid::from_raw(*pid), Signal::SIGKILL).unwrap();
        }
        exec.wait();
        // The kernel releases the holder's lock when the process has ended. Until then, another command would join the
        // container.
        wait_until("the holder is gone", || {
            own.iter()
                .all(|pid| !std::path::Path::new(&format!("/proc/{pid}")).exists())
        });
        store.sh("echo works").ok().prints("works");
        assert!(processes_called(&sleeper).is_empty());
        store.assert_clean();
    }
}

#[test]
fn nobody_waits_for_a_paused_step_whose_up_is_gone() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    let up = start_step(&store, "", &sleeper);
    // Pauses the step as `up` does when the disk is nearly full. An ordinary user's container has no control groups
    // here.
    let state = store.state();
    let mut directories = state["cgroup"]["directories"].as_array().unwrap().iter();
    let frozen = directories.find_map(|directory| {
        let at = std::path::Path::new(directory[1].as_str()?);
        match directory[0].as_str()? {
            "" => Some((at.join("cgroup.freeze"), "1")),
            "freezer" => Some((at.join("freezer.state"), "FROZEN")),
            _ => None,
        }
    });
    if let Some((file, value)) = frozen {
        fs::write(file, value).unwrap();
    }
    up.signal(Signal::SIGKILL);
    up.wait();
    let begun = Instant::now();
    store.rockenv(&["down", store.env()]).ok();
    let waited = begun.elapsed();
    assert!(waited < Duration::from_secs(90), "{waited:?}");
    gone("the paused step", &sleeper);
}

#[test]
fn a_step_can_be_joined() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    let up = start_step(&store, "echo mine > /tmp/mine", &sleeper);
    store
        .sh("cat /tmp/mine; id -u; echo joined > /out/joined; ls /proc | grep -c '^[0-9]'")
        .ok();
    store
        .rockenv(&["exec", "--root", store.env(), "--", "sh", "-c", "exit 9"])
        .exits(9);
    store
        .rockenv(&["rm", "--yes", store.env()])
        .exits(6)
        .says(&["held by `rockenv up`", "rm --force"]);
    // The joined command ends with the step, and does not run again in another container.
    let other = store.sleeper();
    let joined = store.start(&[
        "exec",
        store.env(),
        "--",
        "sh",
        "-c",
        &format!("echo run >> /out/run; {other}"),
    ]);
    wait_for_process(&other);
    kill(
        Pid::from_raw(processes_called(&sleeper)[0]),
        Signal::SIGTERM,
    )
    .unwrap();
    up.wait().exits(0);
    joined.wait().exits(137).says(&["the container ended"]);
    assert!(processes_called(&other).is_empty());
    let out = store.out();
    assert_eq!(fs::read_to_string(out.join("run")).unwrap(), "run\n");
    assert_eq!(fs::read_to_string(out.join("joined")).unwrap(), "joined\n");
}

/// A script may retry a command that did not start, so it must know whether the command did.
#[test]
fn a_command_that_ends_its_container_has_run() {
    let store = TestStore::new();
    store.up_with(ONE);
    for _ in 0..8 {
        let ran = store.root_sh("kill -9 -1; exit 3");
        match is_service() {
            // With a service, the agent is the container's first process, which no command inside can kill.
            true => ran.exits(3),
            false => ran
                .exits(137)
                .says(&["the container ended, and the command with it"]),
        };
    }
}

/// A step that got SIGTERM from outside did not succeed, whatever its exit code. `down` sends one if `up` does not
/// answer.
#[test]
fn a_step_that_was_stopped_from_outside_is_not_done() {
    let store = TestStore::new();
    let (sleeper, other) = (store.sleeper(), store.sleeper());
    let script = "trap 'echo asked > /out/asked; exit 0' TERM";
    for is_joined in [false, true] {
        let up = start_step(&store, script, &sleeper);
        let joined = is_joined.then(|| {
            let line = format!("trap '' TERM; {other}");
            let joined = store.start(&["exec", store.env(), "--", "sh", "-c", &line]);
            wait_for_process(&other);
            joined
        });
        // Signal the agent first. If a step exits with 0 before the agent gets its own signal, the agent takes the step
        // for finished. Process ids wrap around, so their order is not the order of the processes' start.
        let mut inside = store.contained();
        inside.sort_by_key(|(pid, line)| (!line.contains("__agent"), *pid));
        for (pid, _) in inside {
            let line = fs::read_to_string(format!("/proc/{pid}/comm")).unwrap_or_default();
            if line.trim_end() != "systemd-nspawn" {
                let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGTERM);
            }
        }
        up.wait()
            .exits(4)
            .says(&["stopped by another process", "rockenv up"]);
        if let Some(joined) = joined {
            joined.wait().exits(137);
        }
        assert!(processes_called(&sleeper).is_empty());
    }
}

#[test]
fn down_stops_steps_and_commands() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    let up = start_step(
        &store,
        "trap 'echo asked > /out/asked; exit 0' TERM",
        &sleeper,
    );
    store
        .rockenv(&["down", store.env()])
        .ok()
        .says(&["stopped"]);
    assert!(processes_called(&sleeper).is_empty());
    up.wait().exits(143);
    assert!(store.out().join("asked").exists());

    store.up_with(ONE);
    store
        .rockenv(&["down", store.env()])
        .ok()
        .says(&["nothing runs"]);
    let script = format!("trap '' TERM; {sleeper} & while :; do wait; done");
    let first = store.start(&["exec", store.env(), "--", "sh", "-c", &script]);
    wait_for_process(&sleeper);
    let second = store.start(&["exec", store.env(), "--", "sleep", "1000"]);
    wait_until("the second command runs", || {
        store
            .contained()
            .iter()
            .any(|(_, line)| line == "sleep 1000")
    });
    let started = Instant::now();
    store
        .rockenv(&["down", store.env()])
        .ok()
        .says(&["stopped"]);
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
    assert!(processes_called(&sleeper).is_empty());
    assert_ne!(first.wait().code, 0);
    assert_ne!(second.wait().code, 0);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

/// The time for a digest grows with the file, and a sparse file may be larger than the disk.
#[test]
fn a_signal_ends_the_digest_of_a_result() {
    let store = TestStore::new();
    store.profile(
        "volume = [{ name = 'out', kind = 'output', target = '/out' }]
         [[step]]\nname = 'one'\nrun = 'truncate -s 1T /out/sparse'\n",
    );
    let up = store.start(&["up", store.env()]);
    let trees = store.env_dir().join("trees");
    wait_until("the result is kept", || {
        let trees = fs::read_dir(&trees).into_iter().flatten().flatten();
        let mut kept = trees.map(|tree| tree.path().join("results/out/sparse"));
        kept.any(|file| file.exists())
    });
    let started = Instant::now();
    up.signal(Signal::SIGTERM);
    up.wait().exits(143).says(&["interrupted"]);
    // A complete digest takes longer than that on any machine.
    assert!(started.elapsed() < patience(60), "{:?}", started.elapsed());
}
