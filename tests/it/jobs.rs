//! Tests for the machine's job budget: how many compilers run at once in nested builds, in one env and across envs, and
//! what happens to the job slots of a killed process. `tests/service` runs most of these against services too, except
//! where a test mounts something, which a service does not see.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::support::env::{TestStore, build_user};
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{Background, HANGS, wait_for, wait_for_process, wait_until};
use crate::support::wheels::ninja;
use fs_err as fs;
use nix::sys::signal::Signal;

/// Shell function that lays out nested ninja builds in the working directory: `$1` builds below one, each with `$2`
/// compilers that take `$3` seconds, or no time once the test has created `/log/enough`.
const TREE: &str = r#"
tree() {
    cat > cc <<'END'
#!/bin/sh
echo + $ROCKENV_ENV >> /log/events
test -e /log/enough || sleep $1
echo - $ROCKENV_ENV >> /log/events
touch $2
END
    chmod +x cc
    { printf 'rule sub\n  command = ninja -C $out\n'; for i in $(seq $1); do echo "build sub$i: sub"; done; } > build.ninja
    for i in $(seq $1); do
        mkdir -p sub$i
        { printf 'rule cc\n  command = ../cc %s $out\n' $3; for j in $(seq $2); do echo "build o$j: cc"; done; } > sub$i/build.ninja
    done
}
"#;

/// A store whose envs all write their events to one directory.
struct Watched {
    store: TestStore,
    log: PathBuf,
}

impl Watched {
    fn new() -> Self {
        let store = TestStore::new();
        let log = store.work().join("log");
        fs::create_dir(&log).expect("a directory");
        let user = build_user().0;
        std::os::unix::fs::chown(&log, Some(user), Some(user)).expect("an owner");
        Self { store, log }
    }

    /// Writes the profile of env number `index`, with a step for each of `scripts`.
    fn profile(&self, index: usize, resources: &str, scripts: &[&str]) -> String {
        let name = format!("{}-{index}", self.store.env());
        let mut text = format!(
            "resources = {{ {resources} }}
             [[volume]]\nname = 'log'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/log'\n",
            self.log.display()
        );
        for (step, script) in scripts.iter().enumerate() {
            // The name in the script keeps envs from sharing a step.
            write!(
                text,
                "[[step]]\nname = 's{step}'\nworkdir = '/tmp'\nrun = '''\n# {name}\n{TREE}{script}'''\n"
            )
            .expect("a string");
        }
        self.store.profile_named(&name, &text);
        name
    }

    fn command(&self, jobs: u32, arguments: &[&str]) -> Command {
        let mut command = self.store.command(arguments);
        command
            .env("ROCKENV_JOBS", jobs.to_string())
            .env("ROCKENV_NINJA", ninja());
        command
    }

    /// Starts `up`, and returns it with the file that collects its stderr.
    fn up(&self, jobs: u32, name: &str) -> (Background, PathBuf) {
        let said = self.store.work().join(format!("{name}.said"));
        let mut command = self.command(jobs, &["up", name]);
        command.stderr(Stdio::from(
            fs::File::create(&said).expect("a file").into_parts().0,
        ));
        (Background::start(command), said)
    }

    /// Runs `up` for all names at once.
    fn all(&self, jobs: u32, names: &[String]) {
        let runs: Vec<_> = names.iter().map(|name| self.up(jobs, name)).collect();
        for (run, said) in runs {
            assert_eq!(
                run.wait().code,
                0,
                "{}",
                fs::read_to_string(said).expect("a file")
            );
        }
    }

    /// Returns the highest number of compilers at once and their total number, and clears the log.
    fn events(&self) -> (usize, usize) {
        let path = self.log.join("events");
        let text = fs::read_to_string(&path).unwrap_or_default();
        drop(fs::remove_file(path));
        let (mut now, mut most, mut all) = (0, 0, 0);
        for line in text.lines() {
            if line.starts_with('+') {
                now += 1;
                all += 1;
                most = most.max(now);
            } else {
                now -= 1;
            }
        }
        (most, all)
    }
}

/// Repeats an attempt that needs all tokens until it succeeds: rockenv withholds tokens while memory is short,
/// whichever process uses it. An attempt that fails with memory free fails the test.
fn until_memory_is_free(what: &str, mut attempt: impl FnMut() -> bool) {
    let stalled = || -> f64 {
        let text = fs::read_to_string("/proc/pressure/memory").unwrap_or_default();
        let share = text.split("avg10=").nth(1).unwrap_or_default();
        let share = share.split(' ').next().unwrap_or_default();
        share.parse().unwrap_or(0.0)
    };
    for _ in 0..20 {
        let before = stalled();
        if attempt() {
            return;
        }
        let most = before.max(stalled());
        assert!(most >= 1.0, "{what}, with memory free");
        std::thread::sleep(Duration::from_secs(3));
    }
    panic!("{what}, and memory is short all the time");
}

#[test]
fn nested_builds_never_run_more_compilers_than_the_budget() {
    let watched = Watched::new();
    let build = "tree 4 4 0.3; ninja";
    let mut index = 0;
    for (budget, envs, least) in [(4, 1, 4), (4, 4, 3), (2, 2, 2)] {
        until_memory_is_free("too few compilers at once", || {
            let names: Vec<String> = (0..envs)
                .map(|_| {
                    index += 1;
                    watched.profile(index, "ninja = true", &[build])
                })
                .collect();
            watched.all(budget, &names);
            let (most, all) = watched.events();
            assert_eq!(all, 16 * envs, "{budget} {envs}");
            assert!(
                most <= budget as usize,
                "{most} compilers at once in {envs} envs with a budget of {budget}"
            );
            most >= least
        });
    }
    // Control: without the jobserver, the same build exceeds the budget.
    let name = watched.profile(
        0,
        "ninja = true",
        &["tree 4 4 0.3; unset MAKEFLAGS; ninja -j 8"],
    );
    watched.all(4, &[name]);
    let (most, _) = watched.events();
    assert!(most > 4, "{most}");
}

#[test]
fn a_build_gives_way_to_another() {
    let watched = Watched::new();
    let events = || fs::read_to_string(watched.log.join("events")).unwrap_or_default();
    let mut index = 0;
    until_memory_is_free("equal shares were not reached", || {
        index += 2;
        // The first build must last until the second starts, even on a busy machine: alone, the second may use all
        // jobs.
        let first = watched.profile(index, "ninja = true", &["tree 1 1000 0.2; ninja"]);
        let second = watched.profile(index + 1, "ninja = true", &["tree 1 20 0.2; ninja"]);
        let (long, _) = watched.up(4, &first);
        wait_until("the first runs", || events().lines().count() > 8);
        watched.all(4, std::slice::from_ref(&second));
        let both = events();
        let enough = watched.log.join("enough");
        fs::write(&enough, "").expect("a file");
        assert_eq!(long.wait().code, 0);
        fs::remove_file(enough).expect("it is there");
        // The second build's highest number of compilers at once.
        let (mut now, mut most) = (0, 0);
        for line in both.lines().filter(|line| line.ends_with(&second)) {
            now += if line.starts_with('+') { 1 } else { -1 };
            most = most.max(now);
        }
        assert!(most <= 2, "{both}");
        let (at_once, all) = watched.events();
        assert!(at_once <= 4, "{at_once}");
        assert_eq!(all, 1020);
        (most, at_once) == (2, 4)
    });
}

#[test]
fn tokens_of_a_killed_client_come_back() {
    let watched = Watched::new();
    let script = "tree 1 8 0.5; (cd sub1; ninja & sleep 0.3; kill -9 $!; wait $! || true); sleep 3
        echo again > /log/again; rm -f /log/events; tree 1 8 0.6; rm -f sub1/o*; ninja";
    let mut index = 0;
    until_memory_is_free("tokens that a killed client had are lost", || {
        index += 1;
        let name = watched.profile(index, "ninja = true", &[script]);
        watched.all(4, &[name]);
        fs::remove_file(watched.log.join("again")).expect("the second build began");
        watched.events() == (4, 8)
    });
}

#[test]
fn who_waits_is_told_by_whom_and_goes_on_when_that_is_killed() {
    let watched = Watched::new();
    let sleeper = watched.store.sleeper();
    let first = watched.profile(1, "", &[&sleeper]);
    let second = watched.profile(2, "", &["echo done"]);
    let (up, _) = watched.up(1, &first);
    wait_for_process(&sleeper);
    let (waits, said) = watched.up(1, &second);
    let says = |text: &str| fs::read_to_string(&said).unwrap().contains(text);
    wait_until("the second says that it waits", || {
        says(&format!(
            "step `s0` is waiting for a job slot: the only one of this machine is in use by `{first}`"
        ))
    });
    // Ctrl-C ends the wait.
    waits.signal(Signal::SIGINT);
    assert_eq!(waits.wait().code, 130);
    let (waits, _) = watched.up(1, &second);
    let started = Instant::now();
    up.signal(Signal::SIGKILL);
    assert_eq!(up.wait().code, 137);
    assert_eq!(waits.wait().code, 0);
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
}

#[test]
fn make_takes_part_when_it_is_asked_for_several_jobs() {
    let watched = Watched::new();
    let make = "/usr/bin/make";
    assert!(fs::metadata(make).is_ok(), "{make} is needed");
    let script = r"
        echo 'all: a b c d e f' > Makefile
        printf 'a b c d e f: ; @echo + >> /log/events; sleep SECONDS; echo - >> /log/events\n' >> Makefile
        printf 'deep: ; $(MAKE) all\n' >> Makefile
        make $1";
    let mut index = 0;
    for (what, allowed) in [("", 1), ("-j8", 3), ("-j 8 deep", 3), ("-j1", 1)] {
        // Jobs that overlap show in the log however short they are. Jobs that are expected to overlap need time for it.
        let seconds = if allowed == 1 { "0.1" } else { "0.6" };
        let script = format!("set -- '{what}'\n{script}").replace("$1", what);
        let script = script.replace("SECONDS", seconds);
        until_memory_is_free("make does not take part", || {
            index += 1;
            let name = watched.profile(index, "", &[&script]);
            let path = watched.store.work().join(format!("profiles/{name}.toml"));
            let volume = format!(
                "[[volume]]\nname = 'make'\nkind = 'host'\npath = '{make}'\ntarget = '/usr/local/bin/make'\n"
            );
            let text = fs::read_to_string(&path).unwrap();
            fs::write(&path, text + &volume).unwrap();
            watched.all(3, &[name]);
            let (most, all) = watched.events();
            assert_eq!(all, 6, "make {what}");
            assert!(most <= allowed, "{most} at once by make {what}");
            most == allowed
        });
    }
}

#[test]
fn tokens_are_held_back_while_memory_is_short() {
    let watched = Watched::new();
    let script = r#"
        tokens() {
            perl -e 'use Fcntl; sysopen(my $f, "/run/rockenv/jobserver", O_RDWR | O_NONBLOCK) or die;
                my $n = sysread($f, my $x, 99) // 0; syswrite($f, $x) if $n; print "$n\n"' >> /log/tokens
        }
        for i in $(seq 60); do tokens; [ "$(cat /log/tokens)" != 3 ] || break; rm /log/tokens; sleep 0.5; done
        perl -e 'my @x = map { $_ . "x" x (1 << 20) } 1..236; sleep 600' &
        for i in $(seq 120); do sleep 0.5; tokens; [ "$(tail -n 1 /log/tokens)" -gt 1 ] || break; done
        kill $!; wait; echo freed >> /log/tokens
        for i in $(seq 60); do sleep 0.5; tokens; [ "$(tail -n 1 /log/tokens)" != 3 ] || break; done"#;
    let mut index = 0;
    until_memory_is_free("tokens do not come back", || {
        index += 1;
        let name = watched.profile(index, "memory-max = '256M'", &[script]);
        watched.all(4, &[name]);
        let path = watched.log.join("tokens");
        let tokens = fs::read_to_string(&path).unwrap();
        fs::remove_file(path).unwrap();
        let (full, freed) = tokens.split_once("freed\n").unwrap();
        assert!(matches!(full.lines().last(), Some("0" | "1")), "{tokens}");
        full.starts_with("3\n") && freed.ends_with("3\n")
    });
}

#[test]
fn out_of_memory_is_tried_again_with_half_the_jobs() {
    let watched = Watched::new();
    let script = "echo ${jobs} >> /log/jobs; [ ${jobs} -lt 3 ] || tail /dev/zero";
    let name = watched.profile(1, "memory-max = '64M'", &[script]);
    let (up, said) = watched.up(4, &name);
    assert_eq!(up.wait().code, 0);
    let said = fs::read_to_string(said).unwrap();
    for text in [
        "step `s0` ran out of memory",
        "64.0 MiB",
        "with 4 jobs",
        "retrying with 2",
    ] {
        assert!(said.contains(text), "{said}");
    }
    assert_eq!(
        fs::read_to_string(watched.log.join("jobs")).unwrap(),
        "4\n2\n"
    );
    // The step is retried once. The next `up` plans fewer jobs from the start.
    let greedy = "echo ${jobs} >> /log/greedy; tail /dev/zero";
    let name = watched.profile(2, "memory-max = '64M'", &[greedy]);
    let (up, said) = watched.up(8, &name);
    assert_eq!(up.wait().code, 10);
    let said = fs::read_to_string(said).unwrap();
    assert!(said.contains("with 4 jobs; try `--jobs 2`"), "{said}");
    assert_eq!(
        fs::read_to_string(watched.log.join("greedy")).unwrap(),
        "8\n4\n"
    );
    let plan = watched.command(8, &["plan", &name]).output().unwrap();
    let plan = String::from_utf8_lossy(&plan.stdout).into_owned();
    assert!(
        plan.contains("2 (step `s0` ran out of memory with 4)"),
        "{plan}"
    );
}

#[test]
fn a_step_pauses_before_the_disk_is_full() {
    let disk = LoopFs::sized(Kind::Ext4, 600 << 20);
    let store = TestStore::on(&disk);
    let script = "for i in $(seq 120); do head -c 512K /dev/zero >> big; sleep 0.05; done; stat -c %s big > size";
    let steps = |more: &str| {
        format!(
            "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/build'\n[[step]]\nname = 'one'\nrun = 'true'\n{more}"
        )
    };
    store.up_with(&steps(""));
    let two = |name: &str| {
        format!("[[step]]\nname = '{name}'\nworkdir = '/build'\nrun = 'rm -f big; {script}'\n")
    };
    let fill = |name: &str, keep: u64| {
        let found = nix::sys::statvfs::statvfs(disk.path()).unwrap();
        let more = (found.blocks_available() * found.fragment_size()).saturating_sub(keep);
        let file = fs::File::create(disk.join(name)).unwrap();
        nix::fcntl::fallocate(
            file.file(),
            nix::fcntl::FallocateFlags::empty(),
            0,
            more.cast_signed(),
        )
        .unwrap();
    };
    let said = store.work().join("said");
    let start = || {
        let mut command = store.command(&["up", store.env()]);
        command.stderr(Stdio::from(fs::File::create(&said).unwrap().into_parts().0));
        Background::start(command)
    };
    let says = |text: &str| {
        wait_for(text, || {
            let said = fs::read_to_string(&said).unwrap();
            if said.contains(text) {
                Ok(())
            } else {
                Err(said)
            }
        });
    };
    store.profile(&steps(&two("two")));
    fill("filler", 45 << 20);
    // Ctrl-C stops a paused step.
    let up = start();
    says("step `two` is paused");
    for words in [&["ls"][..], &["status", store.env()]] {
        let text = store.rockenv(words).ok().text();
        assert!(text.contains("paused"), "{text}");
    }
    let told = [
        "is paused: the disk is full",
        "help: rockenv gc",
        "resumes by itself",
    ];
    store.sh("true").exits(6).says(&told);
    let started = Instant::now();
    up.signal(Signal::SIGINT);
    assert_eq!(up.wait().code, 130);
    assert!(started.elapsed() < HANGS, "{:?}", started.elapsed());
    // A paused step also ends when `up` is killed.
    let up = start();
    says("step `two` is paused");
    up.signal(Signal::SIGKILL);
    up.wait();
    wait_until("its container is gone", || store.contained().is_empty());
    let mut up = start();
    says("`rockenv gc` cannot free anything");
    says("step `two` is paused");
    std::thread::sleep(Duration::from_millis(500));
    assert!(up.runs());
    fs::remove_file(disk.join("filler")).unwrap();
    says("step `two` resumes");
    up.wait().exits(0);
    store.sh("cat /build/size").ok().prints("62914560");
    store.assert_clean();
    drop(store);
}

#[test]
fn what_cannot_work_is_refused_before_it_starts() {
    let store = TestStore::new();
    store.profile("resources = { memory = '900G' }\n[[step]]\nname = 'one'\nrun = 'true'\n");
    store.rockenv(&["up", store.env()]).exits(9).says(&[
        "needs 900.0 GiB of memory, this machine has",
        "help:",
        "--force",
    ]);
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(plan.contains("`up` would refuse"), "{plan}");
    store.rockenv(&["plan", store.env(), "--check"]).exits(9);
    store.rockenv(&["up", store.env(), "--force"]).ok();
    // `up` needs no resources when there is nothing to do.
    store.up();
    store.profile(
        "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/b'\ndisk = '900T'\n[[step]]\nname = 'two'\nrun = 'true #'\n",
    );
    store.rockenv(&["up", store.env()]).exits(9).says(&[
        "of disk",
        "free",
        "`home` in config.toml",
        "--force",
    ]);
    let json = store.rockenv(&["plan", "--json", store.env()]).ok().json();
    assert_eq!(json["needs"]["disk"][0]["volumes"]["build"], 900_u64 << 40);
    store.rockenv(&["up", store.env(), "--force"]).ok();
    let plan = store
        .rockenv(&["plan", store.env(), "--rerun", "two"])
        .ok()
        .text();
    assert!(plan.contains("1 of 1 step, by earlier runs"), "{plan}");
}
