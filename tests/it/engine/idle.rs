//! A container that waits for the next command: reused while nothing tells it from a fresh one, never an obstacle for
//! other commands, and gone without a trace whatever ends it.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::process::Command;
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::mount::{MsFlags, mount, umount};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::env::{TestStore, is_service};
use crate::support::loopfs::private_mounts;
use crate::support::run::{
    Background, HANGS, children, finish, own_memory, processes, processes_called, surround,
    wait_for_process, wait_until,
};

const TWO: &str = "volume = [{ name = 'b', kind = 'build', target = '/b' }, { name = 'out', kind = 'output', target = '/out' }]
     [[step]]\nname = 'one'\nrun = 'echo one > ~/one; echo $$ > /b/pid; echo 1 >> /out/log'
     [[step]]\nname = 'two'\nrun = 'cat ~/one; echo two > ~/two; echo 2 >> /out/log'\n";

/// Makes a store whose containers wait for longer than any test takes.
fn patient() -> TestStore {
    let store = TestStore::new();
    fs::write(store.work().join("rockenv.toml"), "idle = '1h'\n").unwrap();
    store
}

/// Returns the id of the container that waits in the env.
fn waiting(store: &TestStore) -> Option<String> {
    let state = fs::read(store.env_dir().join("run/state.json")).ok()?;
    let state: serde_json::Value = serde_json::from_slice(&state).ok()?;
    let waits = state["idle"] == true && holder(store).is_some();
    waits.then(|| state["id"].as_str().unwrap().to_owned())
}

/// Returns the process that holds the env's container.
fn holder(store: &TestStore) -> Option<i32> {
    let lock = store.env_dir().join("lock");
    let holds = |pid: i32| {
        fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten()
            .flatten()
            .any(|fd| fs::read_link(fd.path()).is_ok_and(|path| path == lock))
    };
    let all = processes().into_iter();
    all.filter(|(_, line)| line.ends_with("__hold"))
        .find_map(|(pid, _)| holds(pid).then_some(pid))
}

/// Returns the env's agent, by its process id outside.
fn agent(store: &TestStore) -> i32 {
    let inside = store.contained();
    let agent = inside
        .iter()
        .find(|(_, line)| line.starts_with("/run/rockenv/bin/rockenv __agent"));
    agent.unwrap_or_else(|| panic!("{inside:?}")).0
}

/// Runs a command after which its container waits, and returns the container's id.
fn wait_after(store: &TestStore, script: &str) -> String {
    store.sh(script).ok();
    waiting(store).unwrap_or_else(|| panic!("nothing waits after `{script}`"))
}

fn state(store: &TestStore) -> String {
    let ran = store.rockenv(&["status", store.env(), "--json"]);
    let status = ran.ok().json();
    status["state"].as_str().unwrap().to_owned()
}

#[test]
fn the_next_command_runs_in_the_same_container() {
    let store = TestStore::new();
    store.up_with(TWO);
    let open = fs::canonicalize(store.work()).unwrap().join("open");
    fs::write(&open, "").unwrap();
    let script = "echo 1 > ~/one; exit 3";
    let command = store.command(&["exec", store.env(), "--", "sh", "-c", script]);
    let mut shell = Command::new("sh");
    shell
        .args(["-c", "exec 9< open; exec \"$@\"", "sh"])
        .arg(command.get_program())
        .args(command.get_args());
    surround(&mut shell, &command);
    store.become_user(&mut shell);
    finish("exec".to_owned(), shell).exits(3);
    let first = waiting(&store).unwrap();
    // The reader of a pipe that the caller's shell has open would wait for the container to end.
    let mut held = fs::read_dir(format!("/proc/{}/fd", holder(&store).unwrap())).unwrap();
    assert!(!held.any(|fd| fs::read_link(fd.unwrap().path()).is_ok_and(|path| path == open)));
    for _ in 0..5 {
        store.sh("cat ~/one").ok().prints("1");
        assert_eq!(waiting(&store).as_ref(), Some(&first));
        // The container is ready as soon as the command has returned.
        assert_eq!(state(&store), "ready");
    }
    let record = store.env_dir().join("run/state.json");
    // Another build of the same version may have another protocol.
    let from_other_build = || {
        let text = fs::read_to_string(&record).unwrap();
        let other = text.replace("\"protocol\":\"", "\"protocol\":\"0");
        let other = other.replace("\"made_of\":\"", "\"made_of\":\"0");
        fs::write(&record, other).unwrap();
        text
    };
    // A command waits for the end of a container that another build started.
    from_other_build();
    let ending = Pid::from_raw(agent(&store));
    kill(ending, Signal::SIGSTOP).unwrap();
    let mut next = store.start(&["exec", store.env(), "--", "true"]);
    std::thread::sleep(Duration::from_secs(2));
    assert!(next.runs(), "it was refused");
    kill(ending, Signal::SIGCONT).unwrap();
    next.wait().ok();
    // Two commands at once, of which the second one ends first.
    let sleeper = store.sleeper();
    let script = format!("{sleeper}; true");
    let long = Background::start(store.command(&["exec", store.env(), "--", "sh", "-c", &script]));
    wait_for_process(&sleeper);
    assert_eq!(state(&store), "in use");
    store.sh("true").ok();
    store
        .rockenv(&["rm", "--yes", store.env()])
        .exits(6)
        .says(&["held by", "rm --force"]);
    // A container that another build started, with a shell in it, knows other requests.
    let text = from_other_build();
    store
        .sh("true")
        .exits(6)
        .says(&["another build of rockenv", "rockenv down"]);
    fs::write(&record, text).unwrap();
    drop(long);
    // A command on a tree that ends with it shares its container with no other one.
    let sleeper = store.sleeper();
    let script = format!("{sleeper}; true");
    let apart = store.start(&["exec", "--apart", store.env(), "--", "sh", "-c", &script]);
    wait_for_process(&sleeper);
    let mut other = store.start(&["exec", store.env(), "--", "sh", "-c", "echo 2 > ~/two"]);
    std::thread::sleep(Duration::from_secs(1));
    assert!(other.runs(), "it joined the private tree");
    drop(apart);
    other.wait().ok();
    store.sh("cat ~/two").ok().prints("2");
    store.rockenv(&["rm", "--yes", "--force", store.env()]).ok();
    store.assert_clean();
}

#[test]
fn whoever_needs_the_env_gets_it_at_once() {
    let store = patient();
    store.up_with(TWO);
    let (env, copy) = (store.env().to_owned(), format!("{}-copy", store.env()));
    let own = fs::read_to_string(store.work().join(format!("profiles/{env}.toml"))).unwrap();
    let changed = own.replace("echo two", "echo 2");
    for (round, arguments) in [
        &["snapshot", "create", &env, "kept"][..],
        &["rollback", &env, "kept"],
        &["fork", &env, &copy],
        &["up", &env],
        &["down", &env],
        &["exec", "--root", "--apart", &env, "--", "true"],
        &["rm", "--yes", &env],
    ]
    .into_iter()
    .enumerate()
    {
        let first = wait_after(&store, &format!("echo {round} >> ~/mine"));
        fs::write(
            store.work().join(format!("profiles/{env}.toml")),
            match arguments[0] {
                "up" => &changed,
                _ => &own,
            },
        )
        .unwrap();
        let began = Instant::now();
        store.rockenv(arguments).ok();
        assert!(began.elapsed() < HANGS, "{arguments:?}");
        assert_ne!(waiting(&store), Some(first), "{arguments:?}");
        match arguments[0] {
            "up" => store.sh("cat ~/two; ls ~").ok().prints("2\none\ntwo"),
            "rm" => break,
            "rollback" => store.sh("cat ~/mine").ok().prints("0"),
            _ => store.sh("tail -n 1 ~/mine").ok().prints(&round.to_string()),
        };
    }
    store.rockenv(&["rm", "--yes", &copy]).ok();
    store.assert_clean();
}

#[test]
fn it_is_no_reason_for_gc_to_keep_anything() {
    let store = patient();
    // The steps of the second round have other names, so the snapshots of the first round stay in the record.
    for round in [1, 2] {
        store.up_with(&format!(
            "volume = [{{ name = 'c', kind = 'cache', target = '/c' }}]
             [[step]]\nname = 'a{round}'\nrun = 'head -c 3000000 /dev/urandom > ~/a; echo {round} > /c/c'
             [[step]]\nname = 'b{round}'\nrun = 'echo {round} > ~/b'\n"
        ));
    }
    let waits = wait_after(&store, "echo mine > ~/mine");
    let gc = |arguments: &[&str], list: &str| {
        let mut words = vec!["--yes", "--json", "gc", "--free", "1T", "--preset", "ci"];
        words.extend(arguments);
        let report = store.rockenv(&words).json();
        let names = report[list].as_array().unwrap().iter();
        let mut names: Vec<String> = names.map(|item| item["name"].to_string()).collect();
        names.sort();
        names
    };
    let dry = gc(&["--dry-run"], "items");
    assert!(dry.iter().any(|name| name.contains("/a1")), "{dry:?}");
    let roots = store.rockenv(&["gc", "--roots"]).ok().text();
    assert!(!roots.contains("runs in"), "{roots}");
    store.rockenv(&["--yes", "cache", "clear", "c"]).ok();
    // None of the commands above ends the container.
    assert_eq!(waiting(&store), Some(waits));
    assert_eq!(gc(&[], "removed"), dry);
    assert_eq!(waiting(&store), None);
    store.sh("cat ~/mine ~/b; ls /c").ok().prints("mine\n2");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    store.assert_clean();
}

#[test]
fn what_would_tell_it_from_a_fresh_one_ends_it() {
    let store = TestStore::new();
    store.up_with(TWO);
    let sleeper = store.sleeper();
    // This is `root` in a rootless service's container, where the caller is root.
    let user = store.sh("id -un").ok().text();
    for trace in [
        "touch /tmp/trace",
        "mkdir /var/tmp/trace",
        "touch /dev/shm/trace",
        &format!("setsid {sleeper} >/dev/null 2>&1 & echo $! > ~/pid"),
    ] {
        // Runs it as the container's first command, and as a later one.
        for before in ["", "true"] {
            if !before.is_empty() {
                wait_after(&store, before);
            }
            store.sh(trace).ok();
            assert_eq!(waiting(&store), None, "after `{trace}`");
            assert!(processes_called(&sleeper).is_empty());
            store
                .sh("ls -A /tmp /var/tmp /dev/shm | grep trace; pgrep sleep; true")
                .ok()
                .prints("");
            store.rockenv(&["down", store.env()]).ok();
        }
    }
    for trace in [
        "touch /run/trace",
        "ln -s null /dev/trace",
        "sed -i /builder/d /etc/passwd",
    ] {
        store.root_sh(trace).ok();
        assert_eq!(waiting(&store), None, "after `{trace}`");
    }
    store.sh("id -un").ok().prints(user.trim_end());
    assert!(waiting(&store).is_some());
    // System V objects belong to no process and no file.
    if store.sh("command -v ipcmk").code == 0 {
        store.sh("ipcmk -M 4096").ok();
        assert_eq!(waiting(&store), None);
        store
            .sh("tail -n +2 /proc/sysvipc/shm | wc -l")
            .ok()
            .prints("0");
    }
}

#[test]
fn what_another_would_be_made_of_ends_it() {
    let store = TestStore::new();
    let source = store.work().join("source");
    let make = |text: &str| {
        fs::create_dir_all(&source).unwrap();
        fs::write(source.join("file"), text).unwrap();
    };
    make("1");
    store.up_with(&format!(
        "volume = [{{ name = 's', kind = 'source', target = '/s', path = '{}' }},
                   {{ name = 'out', kind = 'output', target = '/out' }}]
         [[step]]\nname = 'one'\nrun = 'true'\n",
        source.display()
    ));
    let first = wait_after(&store, "cat /s/file");
    // First another file in the same directory, and then another directory.
    make("2");
    store.sh("cat /s/file").ok().prints("2");
    assert_eq!(waiting(&store).as_ref(), Some(&first));
    fs::rename(&source, store.work().join("old")).unwrap();
    make("3");
    store.sh("cat /s/file").ok().prints("3");
    let second = waiting(&store).unwrap();
    assert_ne!(second, first);
    let out = store.out();
    fs::remove_dir_all(&out).unwrap();
    store.sh("echo mine > /out/mine").ok();
    assert_eq!(fs::read_to_string(out.join("mine")).unwrap(), "mine\n");
    let third = waiting(&store).unwrap();
    assert_ne!(third, second);
    // Another file system in the directory, and then without it.
    private_mounts();
    let inner = source.join("inner");
    fs::create_dir(&inner).unwrap();
    let (none, tmpfs) = (Some("none"), Some("tmpfs"));
    mount(none, &inner, tmpfs, MsFlags::empty(), None::<&str>).unwrap();
    let fourth = wait_after(&store, "true");
    assert_ne!(fourth, third);
    umount(&inner).unwrap();
    assert_ne!(wait_after(&store, "true"), fourth);
    for text in ["idle = '3m'\n", "idle = '3m'\njobs = 3\n"] {
        let before = waiting(&store);
        fs::write(store.work().join("rockenv.toml"), text).unwrap();
        assert_ne!(Some(wait_after(&store, "true")), before, "{text}");
    }
    // A device cannot be added to a running container.
    let before = waiting(&store);
    store
        .rockenv(&["exec", "--gpu=none", store.env(), "--", "true"])
        .ok();
    assert_ne!(waiting(&store), before);
    // Limits come from the spec, and only `up` writes it.
    let profile = store.work().join(format!("profiles/{}.toml", store.env()));
    let text = fs::read_to_string(&profile).unwrap() + "[resources]\ntasks-max = 77\n";
    fs::write(profile, text).unwrap();
    let before = wait_after(&store, "true");
    store.up();
    assert_ne!(wait_after(&store, "true"), before);
}

#[test]
fn a_waiting_container_sleeps_and_no_command_that_only_reads_ends_it() {
    let store = patient();
    store.up_with(TWO);
    let first = wait_after(&store, "echo mine > ~/mine");
    for arguments in [
        &["ls"][..],
        &["status", store.env()],
        &["plan", store.env()],
        &["snapshot", "ls", store.env()],
        &["logs", store.env(), "two"],
        &["du"],
        &["fsck"],
        &["gc", "--dry-run"],
    ] {
        store.rockenv(arguments).ok();
        assert_eq!(waiting(&store).as_ref(), Some(&first), "{arguments:?}");
    }
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&["down", store.env()]).ok();
    // The second command reuses the container of the first one.
    let fresh = wait_after(&store, "true");
    assert_eq!(wait_after(&store, "true"), fresh);
    let mut all: Vec<i32> = store.contained().into_iter().map(|(pid, _)| pid).collect();
    all.push(holder(&store).unwrap());
    let count = || all.iter().map(|pid| switches(*pid)).collect::<Vec<_>>();
    let sleep = |_| {
        let before = count();
        std::thread::sleep(Duration::from_secs(5));
        before == count()
    };
    // A process may still be finishing its work, for long on a busy machine. After that, no process may wake up.
    assert!((0..10).any(sleep), "processes wake up: {all:?}");
    let memory: u64 = all.iter().map(|pid| own_memory(*pid)).sum();
    assert!(memory < 8 << 20, "{memory} bytes");
    assert_eq!(state(&store), "ready");
}

/// Returns the number of context switches of all threads of a process.
fn switches(pid: i32) -> u64 {
    let tasks = fs::read_dir(format!("/proc/{pid}/task")).unwrap();
    tasks
        .flatten()
        .map(|task| fs::read_to_string(task.path().join("status")).unwrap_or_default())
        .map(|status| {
            let lines = status
                .lines()
                .filter_map(|line| line.split_once("ctxt_switches:"));
            lines
                .map(|(_, count)| count.trim().parse::<u64>().unwrap())
                .sum::<u64>()
        })
        .sum()
}

#[test]
fn it_ends_by_itself() {
    let store = TestStore::new();
    store.up_with(TWO);
    // SIGTERM ends it at once, because there is no command to wait for.
    let is_quick = (0..super::ending::TRIES).any(|_| {
        wait_after(&store, "true");
        let began = Instant::now();
        kill(Pid::from_raw(agent(&store)), Signal::SIGTERM).unwrap();
        wait_until("it has ended", || holder(&store).is_none());
        began.elapsed() < Duration::from_secs(4)
    });
    assert!(is_quick);
    fs::write(store.work().join("rockenv.toml"), "idle = \"1s\"\n").unwrap();
    // A slow machine may look after the container has ended.
    wait_until("one waits", || {
        store.sh("true").ok();
        waiting(&store).is_some()
    });
    wait_until("it has ended", || holder(&store).is_none());
    assert!(store.contained().is_empty());
    fs::write(store.work().join("rockenv.toml"), "idle = \"never\"\n").unwrap();
    store.sh("true").ok();
    assert_eq!(waiting(&store), None);
    fs::write(store.work().join("rockenv.toml"), "idle = \"1\"\n").unwrap();
    store
        .rockenv(&["exec", store.env(), "--", "true"])
        .exits(3)
        .says(&["`idle`", "never"]);
    fs::remove_file(store.work().join("rockenv.toml")).unwrap();
}

#[test]
fn killed_in_any_part_it_leaves_nothing() {
    let store = TestStore::new();
    store.up_with(TWO);
    let parts: &[&str] = match is_service() {
        true => &["holder", "agent"],
        false => &["holder", "agent", "engine", "init", "all"],
    };
    for (round, part) in parts.iter().enumerate() {
        for joined in [false, true] {
            wait_after(
                &store,
                &format!("echo {round} > ~/mine; echo {round} > /b/mine"),
            );
            if joined {
                wait_after(&store, "true");
            }
            let held = holder(&store).unwrap();
            let inside = store.contained();
            let agent = agent(&store);
            let engine = || children(held)[0];
            let pids = match *part {
                "holder" => vec![held],
                "agent" => vec![agent],
                "engine" => vec![engine()],
                // The container has two processes, of which the agent is the second.
                "init" => children(engine()),
                _ => [
                    vec![held, engine()],
                    inside.into_iter().map(|one| one.0).collect(),
                ]
                .concat(),
            };
            assert!(!pids.is_empty(), "no {part}");
            for pid in pids {
                // The process may have ended with the previous one.
                let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
            // The next command runs at once in one round, and after a while in the other.
            if joined {
                wait_until("it has ended", || {
                    holder(&store).is_none() && store.contained().is_empty()
                });
                // The holder cleans up. If the holder was killed, the next command does.
                if !matches!(*part, "holder" | "all") {
                    store.assert_clean();
                }
            }
            let read = || store.sh("cat ~/mine /b/mine");
            let mut mine = read();
            // It ran in the container just before that ended.
            if mine.code == 137 {
                mine.says(&["the container ended, and the command with it"]);
                mine = read();
            }
            mine.ok().prints(&format!("{round}\n{round}"));
            store.assert_clean();
        }
    }
    if is_service() {
        lost_changes_are_reported(&store);
    }
    store.rockenv(&["fsck"]).ok();
}

fn lost_changes_are_reported(store: &TestStore) {
    let read = |file: &str| -> serde_json::Value {
        serde_json::from_slice(&fs::read(store.env_dir().join(file)).unwrap()).unwrap()
    };
    let lost = &["has no container of env"];
    wait_after(store, "echo lost > ~/lost");
    let (state, record) = (read("run/state.json"), read("record.json"));
    let place = |name: &str| state["place"][name].as_str().unwrap();
    let (socket, name) = (place("socket"), place("name"));
    store.rockenv(&["down", store.env()]).ok();
    remove_container(socket, name);
    store.sh("ls ~/lost").says(lost);
    let ran = store.sh("true").ok();
    assert!(!ran.err.contains(lost[0]), "{}", ran.err);
    store.rockenv(&["down", store.env()]).ok();
    remove_container(socket, name);
    let create = ["snapshot", "create", store.env(), "later"];
    store.rockenv(&create).ok().says(lost);
    store.profile(&format!("{TWO}[[step]]\nname = 'fails'\nrun = 'false'\n"));
    store.rockenv(&["up", store.env()]).exits(5);
    let failed = read("record.json");
    let tree = |value: &serde_json::Value| value["tree"].as_str().unwrap().to_owned();
    let name = name.replace(&tree(&record["head"]), &tree(&failed["failed"]));
    remove_container(socket, &name);
    store
        .rockenv(&["shell", "--failed", store.env()])
        .ok()
        .says(lost);
    // A snapshot of the tree below it would not have the changes.
    remove_container(socket, &name);
    let up = store.rockenv(&["up", store.env()]).exits(5);
    assert!(!up.err.contains("kept as snapshot"), "{}", up.err);
}

/// Removes a container as `docker system prune` does once it has ended.
fn remove_container(socket: &str, name: &str) {
    let mut service = UnixStream::connect(socket).unwrap();
    let request = format!("DELETE /containers/{name} HTTP/1.1");
    let request = format!("{request}\r\nHost: rockenv\r\nConnection: close\r\n\r\n");
    service.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    service.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 20"), "{answer}");
}

#[test]
fn a_killed_command_is_gone_with_its_processes() {
    let store = TestStore::new();
    store.up_with(TWO);
    let sleeper = store.sleeper();
    for joined in [false, true] {
        if joined {
            wait_after(&store, "true");
        }
        let script = format!("{sleeper}; true");
        let long = store.start(&["exec", store.env(), "--", "sh", "-c", &script]);
        wait_for_process(&sleeper);
        long.signal(Signal::SIGKILL);
        drop(long);
        wait_until("it is gone", || processes_called(&sleeper).is_empty());
        // The container waits, or ends if it saw one of its processes die.
        store
            .sh("echo mine > ~/mine; cat ~/mine")
            .ok()
            .prints("mine");
        store.rockenv(&["down", store.env()]).ok();
        store.assert_clean();
    }
}
