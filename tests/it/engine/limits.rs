//! Limits of memory, processes, time and disk: where steps fail, how rockenv reports it, and what stays.

use std::io::Write as _;
use std::time::{Duration, Instant};

use fs_err as fs;
use nix::mount::{MsFlags, mount};

use super::logs::{OUT, release};
use crate::support::env::{TestStore, patience};
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{HANGS, processes_called, wait_for_process, wait_until};

#[test]
fn a_step_that_takes_too_much_memory_is_named() {
    let store = TestStore::new();
    store.profile(
        "resources = { memory-max = '64M' }
         [[step]]\nname = 'before'\nrun = 'true'
         [[step]]\nname = 'hog'\nrun = 'tail /dev/zero'\n",
    );
    let ran = store.rockenv(&["up", store.env(), "--jobs", "2"]).exits(10);
    ran.says(&[
        "step `hog` ran out of memory",
        "64.0 MiB",
        "with 2 jobs; retrying with 1",
        "with 1 job: one job alone needs more",
        "log:",
        "resume with: rockenv up",
    ]);
    // The step's shell lives on after its child, and a file takes the memory.
    store.profile(
        "resources = { memory-max = '64M' }
         [[step]]\nname = 'hog'\nrun = 'head -c 200M /dev/zero > /dev/shm/x; exit 5'\n",
    );
    store
        .rockenv(&["up", store.env()])
        .exits(10)
        .says(&["step `hog` ran out of memory"]);
    // `up` reports the killed process of a step that succeeds.
    let cut = "resources = { memory-max = '64M' }\n[[step]]\nname = 'hog'\nrun = 'tail /dev/zero | cat'\n";
    store
        .up_with(cut)
        .says(&["a process of step `hog` was killed for lack of memory, but the step succeeded"]);
    // Such a step does not start again after `down`.
    let sleeper = store.sleeper();
    store.profile(&cut.replace("cat", &format!("cat; {sleeper}")));
    let up = store.start(&["up", store.env(), "--jobs", "2"]);
    wait_for_process(&sleeper);
    store.rockenv(&["down", store.env()]).ok();
    up.wait().exits(143).says(&["interrupted"]);
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(!plan.contains("ran out of memory"), "{plan}");
    store.profile("resources = { memory-max = '256M' }\n[[step]]\nname = 'hog'\nrun = 'head -c 100M /dev/zero > /dev/shm/x'\n");
    store.up();
    let ran = store.rockenv(&["status", "--json", store.env()]);
    let json = ran.ok().json();
    let peak = json
        .pointer("/record/steps/0/cost/usage/memory_peak")
        .or(json.pointer("/record/steps/0/cost/memory_peak"));
    assert!(
        peak.and_then(serde_json::Value::as_u64)
            .is_some_and(|peak| peak > 100 << 20),
        "{json:#}"
    );
}

#[test]
fn a_second_attempt_for_lack_of_memory_is_the_same_step() {
    let store = TestStore::new();
    store.profile(&format!(
        "{OUT}resources = {{ memory-max = '64M', memory-per-job = '16M' }}
         [[step]]\nname = 'eat'\nrun = '''echo jobs ${{jobs}}
         if [ ${{jobs}} -gt 1 ]; then head -c 200M /dev/zero > /dev/shm/x; exit 5; fi
         until test -e /out/go; do sleep 0.05; done; echo end'''\n"
    ));
    let up = store.start(&["up", store.env(), "--jobs", "2"]);
    let log = || store.rockenv(&["logs", store.env(), "eat"]);
    wait_until("both attempts", || {
        let runs = fs::read_dir(store.env_dir().join("logs"));
        let files = runs.into_iter().flatten().flatten().map(|run| {
            let files = fs::read_dir(run.path()).unwrap().flatten();
            files
                .filter(|file| file.path().extension().is_some_and(|end| end == "log"))
                .count()
        });
        files.sum::<usize>() == 2
    });
    wait_until("output", || {
        log().err.is_empty() && !log().text().is_empty()
    });
    let early = log().ok().text();
    let follow = store.start(&["logs", "-f", store.env()]);
    std::thread::sleep(Duration::from_millis(300));
    release(&store);
    up.wait().ok();
    follow.wait().ok().prints("jobs 1\nend");
    assert_eq!(early, "jobs 1\n");
    for step in [&["eat"][..], &[]] {
        let words = [&["logs", store.env()], step].concat();
        store.rockenv(&words).ok().prints("jobs 1\nend");
    }
}

#[test]
fn a_fork_bomb_stays_in_its_container() {
    let store = TestStore::new();
    store.profile(
        "resources = { tasks-max = 50 }
         [[step]]\nname = 'bomb'\ntimeout = '5s'\nshell = ['/bin/bash', '-c']\nrun = 'b() { b | b & }; (b) & exec sleep 1000'\n",
    );
    let up = store.start(&["up", store.env()]);
    let mut most = 0;
    wait_until("the bomb explodes", || {
        most = most.max(store.contained().len());
        most >= 40
    });
    up.wait()
        .exits(5)
        .says(&["step `bomb` timed out after 5.0 s"]);
    assert!(most <= 50, "{most} processes");
    assert!(store.contained().is_empty());
}

#[test]
fn a_timeout_ends_whatever_the_step_started() {
    let store = TestStore::new();
    let (plain, deaf) = (store.sleeper(), store.sleeper());
    store.profile(&format!(
        "[[step]]\nname = 'slow'\ntimeout = '1s'\nrun = '''
         setsid sh -c \"trap '' TERM INT HUP; {deaf}; sleep 100\" &
         ({plain} &)
         trap '' TERM
         while :; do sleep 1; done'''\n"
    ));
    let started = Instant::now();
    let ran = store.rockenv(&["up", store.env()]).exits(5);
    ran.says(&[
        "step `slow` timed out after 1.0 s",
        "log:",
        "rockenv shell --failed",
    ]);
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
    for sleeper in [plain, deaf] {
        assert!(processes_called(&sleeper).is_empty());
    }
    // A step that ends on request ends at once.
    store.profile("[[step]]\nname = 'slow'\ntimeout = '1s'\nrun = 'echo begun; sleep 100'\n");
    let at_once = |_| {
        store
            .rockenv(&["up", store.env()])
            .exits(5)
            .says(&["begun"]);
        // A step that does not end on request would get 5 more seconds in every attempt. The rest of `up` may wait for
        // the disk.
        let took = store.record()["steps"][0]["cost"]["wall_ms"].as_u64();
        u128::from(took.unwrap()) < patience(6).as_millis()
    };
    assert!((0..super::ending::TRIES).any(at_once));
}

#[test]
fn a_timeout_is_for_one_run_of_one_step() {
    // With a common timeout, the first run of `slow` would leave no time, and the second one too little for `next`. A
    // busy machine may take longer, but not in every attempt.
    let in_time = |_| {
        let store = TestStore::new();
        store.profile(
            "volume = [{ name = 'b', kind = 'build', target = '/b' }]
             [[step]]\nname = 'slow'\ntimeout = '3s'\nrun = 'if mkdir /b/begun; then sleep 100; fi; sleep 1.5'
             [[step]]\nname = 'next'\ntimeout = '3s'\nrun = 'sleep 1.6'\n",
        );
        store
            .rockenv(&["up", store.env()])
            .exits(5)
            .says(&["step `slow` timed out after 3.0 s"]);
        store.rockenv(&["up", store.env()]).code == 0
    };
    assert!((0..super::ending::TRIES).any(in_time));
}

#[test]
fn a_full_disk_is_said_and_survived() {
    let disk = LoopFs::sized(Kind::Ext4, 400 << 20);
    let store = TestStore::on(&disk);
    // Without this, `up` would pause the step before the disk is full.
    fs::write(store.work().join("rockenv.toml"), "disk-floor = '0'\n").unwrap();
    store.up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
    let two = "[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'head -c 60M /dev/zero > ~/big'\n";
    store.profile(two);
    let filler = disk.join("filler");
    let fill = |keep: u64| {
        let free = nix::sys::statvfs::statvfs(disk.path()).unwrap();
        // Includes the blocks that are reserved for root.
        let more = (free.blocks_free() * free.fragment_size()).saturating_sub(keep);
        let mut file = fs::OpenOptions::new()
            .append(true)
            .create(true)
            .open(&filler)
            .unwrap();
        let block = vec![1; 64 << 10];
        let mut written = 0;
        while written < more && file.write_all(&block).is_ok() {
            written += block.len() as u64;
        }
        drop(file.sync_all());
    };
    fill(40 << 20);
    let ran = store.rockenv(&["up", store.env()]).exits(10).says(&[
        "step `two` ran out of disk",
        "No space left on device",
        "and the step used",
    ]);
    // The error suggests `shell --failed` only if the failed tree exists.
    let status = store.rockenv(&["status", store.env()]).ok();
    let failed = "shell --failed";
    assert_eq!(
        ran.err.contains(failed),
        status.err.contains(failed),
        "{}",
        ran.err
    );
    // Not even rockenv can write any more.
    fill(0);
    for _ in 0..2 {
        let ran = store.rockenv(&["up", store.env()]).exits(10);
        assert!(
            ran.err.to_lowercase().contains("no space left"),
            "{}",
            ran.err
        );
    }
    store.rockenv(&["status", store.env()]).ok();
    fs::remove_file(&filler).unwrap();
    store.up();
    store.sh("stat -c %s ~/big").ok().prints("62914560");
    assert!(store.up().err.contains("nothing to do"));
    store.assert_clean();
    drop(store);
}

#[test]
fn what_a_step_uses_over_time_is_recorded() {
    let store = TestStore::new();
    store.profile(
        "[[step]]\nname = 'busy'\nrun = '''head -c 40M /dev/urandom > $HOME/x
         perl -e 'my $held = \"x\" x (64 << 20); my $end = time + 2; 1 while time < $end || (times)[0] < 0.5' '''\n",
    );
    store.up();
    let logs = store.env_dir().join("logs");
    let run = fs::read_dir(logs).unwrap().flatten().next().unwrap().path();
    let text = fs::read_to_string(run.join("01-busy.samples")).unwrap();
    // The columns: time in ms, memory in KiB, processor time in ms, jobs, disk in KiB.
    let rows: Vec<Vec<Option<i64>>> = text
        .lines()
        .map(|line| line.split(' ').map(|field| field.parse().ok()).collect())
        .collect();
    let most = |field: usize| rows.iter().filter_map(|row| row[field]).max();
    assert!(rows.len() >= 4, "{text}");
    assert!(rows.iter().is_sorted_by_key(|row| row[0]), "{text}");
    assert!(most(1) >= Some(64 << 10), "{text}");
    assert!(most(2) >= Some(200) && most(3) == Some(1), "{text}");
    // Other processes may write to this disk too, and a service may keep its trees on another one, so only the presence
    // of the value is checked.
    assert!(rows.iter().all(|row| row[4].is_some()), "{text}");
}

#[test]
fn a_full_disk_is_one_that_the_step_filled() {
    let disk = LoopFs::in_memory(30 << 20);
    let store = TestStore::new();
    let out = disk.path().display();
    // Without this, `up` would pause the step before the disk is full.
    fs::write(store.work().join("rockenv.toml"), "disk-floor = '0'\n").unwrap();
    std::os::unix::fs::chown(disk.path(), Some(1234), Some(1234)).unwrap();
    let steps = |script: &str| {
        format!(
            "volume = [{{ name = 'out', kind = 'output', path = '{out}', target = '/out' }}]
             [[step]]\nname = 'one'\nrun = '{script}'\n"
        )
    };
    store.profile(&steps("echo tiny > /out/x; exit 3"));
    store
        .rockenv(&["up", store.env()])
        .exits(5)
        .says(&["step `one` failed with exit code 3"]);
    store.profile(&steps("head -c 40M /dev/zero > /out/x"));
    store
        .rockenv(&["up", store.env()])
        .exits(10)
        .says(&["step `one` ran out of disk"]);
    // The disk has no room for a file of metrics either.
    let allow_no_more_files = || {
        let found = nix::sys::statvfs::statvfs(disk.path()).unwrap();
        let full = format!("nr_inodes={}", found.files() - found.files_free());
        let (none, full) = (None::<&str>, Some(full.as_str()));
        mount(none, disk.path(), none, MsFlags::MS_REMOUNT, full).unwrap();
    };
    allow_no_more_files();
    let rows = disk.join("rows");
    store
        .rockenv(&["up", store.env(), "--metrics", rows.to_str().unwrap()])
        .exits(10)
        .says(&["cannot write in", "help: rockenv gc"]);
    // All bytes are free, but there is no room for a file.
    fs::remove_file(disk.join("x")).unwrap();
    allow_no_more_files();
    store.profile(&steps("touch /out/y"));
    store
        .rockenv(&["up", store.env()])
        .exits(10)
        .says(&["step `one` ran out of disk"]);
}
