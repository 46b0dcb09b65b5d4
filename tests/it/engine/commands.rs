//! What a command in a container gets and sees, and what it returns.

use std::ffi::OsStr;
use std::io::{Read as _, Write as _};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::process::Stdio;

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use rockenv::testing::Lock;
use sha2::{Digest as _, Sha256};

use crate::support::env::{TestStore, build_user};
use crate::support::run::{
    Background, HANGS, finish, own_memory, processes_called, wait_for_process, wait_until,
};

/// A step that does almost nothing.
pub(crate) const ONE: &str = "[[step]]\nname = 'one'\nrun = 'true'\n";

#[test]
fn exit_codes_pass_through() {
    let store = TestStore::new();
    store.up_with(ONE);
    for code in [0, 1, 7, 126, 127, 200, 255] {
        store.sh(&format!("exit {code}")).exits(code);
    }
    for signal in [1, 2, 9, 15] {
        store.sh(&format!("kill -{signal} $$")).exits(128 + signal);
    }
    let cannot = |program: &str, code, why: &str| {
        let message = format!("cannot run `{program}`: {why}");
        store
            .rockenv(&["exec", store.env(), "--", program])
            .exits(code)
            .says(&[&message]);
        // The env is free at once: no process waits for a command that did not start.
        store
            .rockenv(&["snapshot", "create", store.env(), &format!("s{code}")])
            .ok();
    };
    cannot("no-such-program", 127, "no such file or directory");
    cannot("/etc/passwd", 126, "permission denied");
    let cd = ["exec", "-C", "/no/where", store.env(), "--", "true"];
    store
        .rockenv(&cd)
        .exits(126)
        .says(&["cannot start in directory `/no/where`: no such file or directory"]);
    let script = "pwd; echo $HOME";
    let moved = ["exec", "-e", "HOME=/x", store.env(), "sh", "-c", script];
    store.rockenv(&moved).ok().prints("/home/builder\n/x");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert!(store.env_dir().read_dir().unwrap().count() <= 1);
}

#[test]
fn a_command_in_the_place_of_the_only_env_gets_the_form_without_one() {
    let store = TestStore::new();
    store.up_with(ONE);
    let words = ["--root", "-e", "A=b c", "printf", "a b"];
    let help = "help: rockenv exec --root --env 'A=b c' -- printf 'a b'\n";
    let first = store.rockenv(&[&["exec"], &words[..]].concat());
    first.exits(7).says(&["no env `printf`", help]);
    let close = format!("{}x", store.env());
    store
        .rockenv(&["exec", &close, "true"])
        .exits(7)
        .says(&["did you mean"]);
}

#[test]
fn streams_are_apart_and_byte_exact() {
    let store = TestStore::new();
    store.up_with(ONE);
    // Starts the container first, because a slow start prints a notice on stderr.
    store.sh("true").ok();
    let ran = store
        .sh(r"printf 'out\000\377\r\n'; printf 'err\n' >&2; printf end")
        .ok();
    assert_eq!(ran.out, b"out\0\xff\r\nend");
    assert_eq!(ran.err, "err\n");
    let words = ["exec", store.env(), "--", "printf", "%s"].map(OsStr::new);
    let bytes = OsStr::from_bytes(b"a\xffb");
    let ran = store.rockenv(&[&words[..], &[bytes]].concat()).ok();
    assert_eq!(ran.out, b"a\xffb");
    let words = [
        OsStr::new("exec"),
        "--env".as_ref(),
        bytes,
        "e".as_ref(),
        "true".as_ref(),
    ];
    let refused = store.rockenv(&words).exits(2);
    refused.says(&[r"argument `a\xffb` is not UTF-8"]);
    // The process that empties the trash takes any store.
    store.rockenv(&[OsStr::new("__reap"), bytes]).ok();

    // Sends 32 MB of every byte value there and back, through descriptors that rockenv itself never reads.
    let size = 32 << 20;
    let mut command = store.command(&["exec", store.env(), "--", "cat"]);
    command.stdin(Stdio::piped());
    let mut child = command.spawn().unwrap();
    let pid = child.id().cast_signed();
    let (mut stdin, mut stdout) = (child.stdin.take().unwrap(), child.stdout.take().unwrap());
    let sent = std::thread::spawn(move || {
        let block: Vec<u8> = (0..=u8::MAX)
            .cycle()
            .map(|byte| byte.rotate_left(3))
            .take((1 << 20) - 7)
            .collect();
        let (mut hash, mut left) = (Sha256::new(), size);
        while left > 0 {
            let part = &block[..left.min(block.len())];
            hash.update(part);
            stdin.write_all(part).unwrap();
            left -= part.len();
        }
        hash.finalize()
    });
    let (mut hash, mut count, mut buffer, mut peak) = (Sha256::new(), 0, vec![0; 1 << 20], 0);
    loop {
        let read = stdout.read(&mut buffer).unwrap();
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        count += read;
        // Excludes the program's own pages, which the kernel may keep or drop. A debug build has many of them.
        peak = peak.max(own_memory(pid));
    }
    assert_eq!((count, hash.finalize()), (size, sent.join().unwrap()));
    assert!(child.wait().unwrap().success());
    assert!(
        (1..8 << 20).contains(&peak),
        "exec took {peak} bytes of memory"
    );
}

#[test]
fn arguments_and_variables_arrive_as_they_are() {
    let store = TestStore::new();
    store.up_with(&format!("env = {{ FROM_PROFILE = 'a b' }}\n{ONE}"));
    let odd = [
        "",
        " a  b ",
        "it's \"quoted\"",
        "two\nlines\t",
        "größe 日本語 🦀",
        "$(id)`id`$HOME*?",
        "--root",
        "\\",
        "a=b",
    ];
    let mut arguments = vec!["exec", store.env(), "--", "printf", "%s\\0"];
    arguments.extend(odd);
    let out = store.rockenv(&arguments).ok().text();
    assert_eq!(
        out.strip_suffix('\0')
            .unwrap()
            .split('\0')
            .collect::<Vec<_>>(),
        odd
    );

    let mut command = store.command(&[
        "exec",
        "--env",
        "GIVEN=x=y z",
        store.env(),
        "--",
        "env",
        "-0",
    ]);
    command.env("SECRET_OF_THE_HOST", "1");
    let out = finish("env".into(), command).ok().text();
    let mut names: Vec<&str> = out
        .split_terminator('\0')
        .map(|line| line.split_once('=').unwrap().0)
        .collect();
    names.sort_unstable();
    let known = [
        "FROM_PROFILE",
        "GIVEN",
        "HOME",
        "LANG",
        "LOGNAME",
        "MAKEFLAGS",
        "PATH",
        "ROCKENV_ENV",
        "USER",
        "container",
    ];
    assert_eq!(names, known);
    assert!(out.contains("GIVEN=x=y z\0") && out.contains("FROM_PROFILE=a b\0"));
    assert!(out.contains("USER=builder\0") && out.contains("HOME=/home/builder\0"));

    store
        .rockenv(&["exec", "-C", "/usr/share", store.env(), "--", "pwd"])
        .ok()
        .prints("/usr/share");
    store
        .sh("pwd; cat /proc/sys/kernel/hostname")
        .ok()
        .prints("/home/builder\nrockenv");
    // A command would inherit blocked or ignored signals. One that waits for its children would then wait forever.
    let signals = store
        .sh("grep -E 'Sig(Blk|Ign)' /proc/self/status | cut -f2")
        .ok()
        .text();
    for mask in signals.lines() {
        // Signals 32 and 33 belong to the C library, and programs cannot set them.
        assert_eq!(
            u64::from_str_radix(mask, 16).unwrap() & !(3 << 31),
            0,
            "{signals}"
        );
    }
    store
        .sh("ls -l /proc/self/fd | grep -c ' -> '")
        .ok()
        .prints("4");
}

#[test]
fn copied_directories_leave_existing_ones_to_their_owners() {
    let store = TestStore::new();
    let profiles = store.work().join("profiles");
    fs::create_dir_all(profiles.join("tree/made")).unwrap();
    fs::write(profiles.join("tree/made/file"), "").unwrap();
    store.up_with(
        "[[step]]\nname = 'copy'\ncopy = [{ from = 'tree', to = '/etc' }]
         [[step]]\nname = 'root'\nuser = 'root'\ncopy = [{ from = 'tree', to = '/srv/new' }]
         [[step]]\nname = 'look'\nrun = 'stat -c %u /etc /etc/made /etc/made/file /srv/new /srv/new/made/file'\n",
    );
    let (_, builder) = build_user();
    store
        .rockenv(&["logs", store.env(), "look"])
        .ok()
        .prints(&format!("0\n{builder}\n{builder}\n0\n0"));
}

#[test]
fn steps_and_their_files_belong_to_the_invoking_user() {
    let store = TestStore::new();
    fs::write(store.work().join("profiles/given.txt"), "given\n").unwrap();
    store.up_with(
        "volume = [{ name = 'out', kind = 'output', path = '../out', target = '/out' },
                   { name = 'build', kind = 'build', target = '/build' }]
         [[step]]\nname = 'copy'\ncopy = [{ from = 'given.txt', to = '/srv/in/given.txt' }]
         [[step]]\nname = 'made'\nrun = 'id > /build/id; echo made > ~/made; cp /srv/in/given.txt ~; mkdir /out/d'
         [[step]]\nname = 'root'\nuser = 'root'\nrun = '''id > /root/id; cp /usr/bin/id /usr/bin/suid; chmod 4755 /usr/bin/suid
             cp /usr/bin/id /usr/bin/other; chown nobody /usr/bin/other; chmod 4755 /usr/bin/other'''
         [[step]]\nname = 'export'\nexport = [{ from = '/home/builder/made', to = 'out' }, { from = '/srv/in', to = 'out' }]\n",
    );
    let out = store.work().join("out");
    let (outside, inside) = build_user();
    for name in ["", "made", "d", "in", "in/given.txt", "SHA256SUMS"] {
        let found = fs::metadata(out.join(name)).unwrap();
        assert_eq!(
            (found.uid(), found.gid()),
            (outside, outside),
            "/out/{name}"
        );
    }
    store.sh("cat /build/id").ok().prints(match inside {
        0 => "uid=0(root) gid=0(root) groups=0(root)",
        _ => "uid=1234(builder) gid=1234(builder) groups=1234(builder)",
    });
    store
        .sh("stat -c '%u %g' /build /build/id /srv/in ~ ~/given.txt | sort -u")
        .ok()
        .prints(&format!("{inside} {inside}"));
    store.root_sh("cat /root/id; id; echo $USER $HOME").ok().prints(
        "uid=0(root) gid=0(root) groups=0(root)\nuid=0(root) gid=0(root) groups=0(root)\nroot /root",
    );

    // `no_new_privs`: a setuid program gains nothing for the build user, and works for root.
    store
        .sh("suid -u; other -u")
        .ok()
        .prints(&format!("{inside}\n{inside}"));
    store.root_sh("other -u").ok().prints("65534");
    if inside != 0 {
        store
            .sh("echo x > /etc/x")
            .exits(2)
            .says(&["Permission denied"]);
    }
}

#[test]
fn packages_are_installed_by_root() {
    let store = TestStore::new();
    store.up_with(
        "[[step]]\nname = 'tools'\npackages = ['make']\n[[step]]\nname = 'use'\nrun = 'make --version > ~/version'\n",
    );
    store
        .sh("stat -c '%u %g' /usr/bin/make; head -1 ~/version | cut -c1-8; ls /var/lib/apt/lists")
        .ok()
        .prints("0 0\nGNU Make");
}

#[test]
fn temporary_directories_are_on_disk_and_empty_each_time() {
    let store = TestStore::new();
    let look = "find /tmp /var/tmp -mindepth 1 | wc -l; stat -f -c %T /tmp /var/tmp | sort -u; stat -c '%a %u' /tmp";
    store.up_with(&format!(
        "[[step]]\nname = 'one'\nrun = \"{look}; touch /tmp/a /var/tmp/b; mkdir -p /tmp/d/e\"\n\
         [[step]]\nname = 'two'\nrun = \"{look}\"\n"
    ));
    let disk = store.rockenv(&["logs", store.env(), "two"]).ok().text();
    let lines: Vec<&str> = disk.lines().collect();
    assert_eq!((lines[0], lines[2]), ("0", "1777 0"), "{disk}");
    assert_ne!(lines[1], "tmpfs");
    store
        .sh("find /tmp /var/tmp -mindepth 1 | wc -l; touch /tmp/c")
        .ok()
        .prints("0");
    assert!(!store.env_dir().join("run/tmp").exists());
    // Only `/dev/shm` is in memory, where files count against the memory limit.
    store.sh("stat -f -c %T /dev/shm").ok().prints("tmpfs");
    let tenths = "all=$(sed -n 's/^MemTotal: *\\([0-9]*\\) kB/\\1/p' /proc/meminfo); \
         echo $(( ($(stat -f -c '%b * %S' /dev/shm) * 10 / 1024 + all / 2) / all ))";
    store.sh(tenths).ok().prints("1");
    // The image has a directory `/run/lock`.
    store
        .root_sh("ls -d /run/lock 2>/dev/null; cp /bin/true /run/program && /run/program")
        .ok()
        .prints("");
}

#[test]
fn a_command_joins_the_container_that_runs() {
    let store = TestStore::new();
    store.up_with(ONE);
    let sleeper = store.sleeper();
    let script = format!("echo here > /tmp/here; {sleeper}");
    let first = store.start(&["exec", store.env(), "--", "sh", "-c", &script]);
    wait_for_process(&sleeper);
    store.sh("cat /tmp/here; exit 3").exits(3).prints("here");
    // The first command ends, the one that joined goes on, and the container ends with the last command.
    let mut second = Background::start({
        let mut command = store.command(&[
            "exec",
            store.env(),
            "--",
            "sh",
            "-c",
            "echo in; read line; echo $line",
        ]);
        command.stdin(Stdio::piped());
        command
    });
    wait_until("the second command runs", || {
        store
            .contained()
            .iter()
            .any(|(_, line)| line.contains("read line"))
    });
    first.signal(Signal::SIGTERM);
    first.wait().exits(143);
    assert!(second.runs());
    second.stdin().write_all(b"still here\n").unwrap();
    second.wait().ok().prints("in\nstill here");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn a_killed_command_takes_its_jobs_with_it_and_leaves_the_others() {
    let store = TestStore::new();
    store.up_with(ONE);
    let (first, job, away) = (store.sleeper(), store.sleeper(), store.sleeper());
    let stays = store.start(&["exec", store.env(), "--", "sh", "-c", &first]);
    let runs = |line: &str| !processes_called(line).is_empty();
    wait_until("the first command runs", || runs(&first));
    let script = format!("set -m; {job} & setsid {away} & wait; wait");
    let joined = store.start(&["exec", store.env(), "--", "sh", "-c", &script]);
    wait_until("its jobs run", || runs(&job) && runs(&away));
    joined.signal(Signal::SIGKILL);
    joined.wait();
    wait_until("its jobs are gone", || !runs(&job) && !runs(&away));
    assert!(runs(&first));
    stays.signal(Signal::SIGTERM);
    stays.wait().exits(143);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn waiting_for_a_container_that_was_stopped_can_be_given_up() {
    let store = TestStore::new();
    store.up_with(ONE);
    let sleeper = store.sleeper();
    let first = store.start(&["exec", store.env(), "--", "sh", "-c", &sleeper]);
    wait_for_process(&sleeper);
    let contained = store.contained();
    let agent = contained
        .iter()
        .find(|(_, line)| line.starts_with("/run/rockenv/bin/rockenv __agent"));
    let agent = nix::unistd::Pid::from_raw(agent.unwrap().0);
    kill(agent, Signal::SIGSTOP).unwrap();
    let mut second = store.start(&["exec", store.env(), "--", "true"]);
    // From then on, the second command reads SIGINT instead of dying from it. It has read the signal when the signal is
    // no longer pending. While it starts a program, it blocks all signals.
    let status = format!("/proc/{}/status", second.pid());
    let has = |field: &str, signal: Signal| {
        let text = fs::read_to_string(&status).unwrap();
        let mut lines = text.lines();
        let set = lines.find_map(|line| line.strip_prefix(field)).unwrap();
        u64::from_str_radix(set.trim(), 16).unwrap() & (1 << (signal as u32 - 1)) != 0
    };
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        wait_until("it reads signals", || {
            has("SigBlk:", Signal::SIGINT) && !has("SigBlk:", Signal::SIGALRM)
        });
        second.signal(Signal::SIGINT);
        wait_until("it has read the first", || !has("ShdPnd:", Signal::SIGINT));
        std::thread::sleep(std::time::Duration::from_millis(300));
        assert!(second.runs());
        second.signal(Signal::SIGINT);
        wait_until("the second command gives up", || !second.runs());
    }));
    // The descriptors that it sent stay open until the container receives them.
    kill(agent, Signal::SIGCONT).unwrap();
    ended.unwrap();
    second.wait().exits(130).says(&["does not answer"]);
    store.sh("true").ok();
    first.signal(Signal::SIGTERM);
    first.wait().exits(143);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

#[test]
fn a_copy_leads_into_no_directory_of_the_users() {
    let store = TestStore::new();
    let profiles = store.work().join("profiles");
    let own = store.work().join("own");
    for directory in [&own, &profiles.join("tree/own")] {
        fs::create_dir_all(directory).unwrap();
    }
    fs::write(own.join("f"), "mine\n").unwrap();
    fs::write(profiles.join("tree/own/f"), "other\n").unwrap();
    for (from, to) in [
        ("tree/own/f", "/srv/link/f"),
        ("tree/own/f", "/srv/link/new/f"),
        ("tree/own", "/srv/link"),
        ("tree", "/v"),
    ] {
        store.profile(&format!(
            "volume = [{{ name = 'own', kind = 'host', path = '../own', target = '/v/own', access = 'rw' }}]
             [[step]]\nname = 'link'\nuser = 'root'\nrun = 'ln -s ../v/own /srv/link'
             [[step]]\nname = 'copy'\ncopy = [{{ from = '{from}', to = '{to}' }}]\n"
        ));
        store.rockenv(&["up", store.env()]).exits(5).says(&[
            "`copy` cannot write to `",
            "`/v/own` does not belong to rockenv",
        ]);
        assert_eq!(fs::read_to_string(own.join("f")).unwrap(), "mine\n");
        assert_eq!(fs::read_dir(&own).unwrap().count(), 1, "{to}");
    }
}

#[test]
fn a_command_that_waits_for_the_store_says_who_has_it() {
    let store = TestStore::new();
    store.up_with(ONE);
    let copy = format!("{}-copy", store.env());
    // A process that a concurrent test has just forked holds the lock's previous file until it calls exec.
    let held = Lock::exclusive(&store.home().join("lock"), "it", "gc", HANGS).unwrap();
    let said = store.work().join("said");
    let read = || fs::read_to_string(&said).unwrap();
    let waits = "waiting for the store, held by `";
    let waiting = |words: &[&str]| {
        let mut command = store.command(words);
        command.stderr(fs::File::create(&said).unwrap().into_parts().0);
        let waiting = Background::start(command);
        wait_until("it waits", || read().contains(waits));
        waiting
    };
    let up = waiting(&["up", store.env(), "--rerun", "one"]);
    up.signal(Signal::SIGINT);
    up.wait().exits(130);
    let fork = waiting(&["fork", store.env(), &copy]);
    drop(held);
    fork.wait().ok();
    let said = read();
    assert_eq!(said.matches(waits).count(), 1, "{said}");
    let holder = format!("rockenv gc` (process {}, since ", std::process::id());
    assert!(said.contains(&holder), "{said}");
}
