//! Root of a container left a trap in its tree where rockenv reads or writes from outside, or stopped the process that
//! watches the container: no command hangs, and only the tree changes.

use std::os::unix::fs::MetadataExt as _;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::Instant;

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::support::env::{TestStore, is_service};
use crate::support::run::{HANGS, processes, wait_for_process};

#[test]
fn traps_where_accounts_are_written_are_not_opened() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = \"a\"\nrun = \"true\"\n");
    for trap in [
        "mkfifo",
        "ln -s /etc/hostname",
        "ln -s /proc/self/mem",
        "mkdir",
        "truncate -s 1G",
    ] {
        store
            .root_sh(&format!(
                "sed -i /builder/d /etc/passwd /etc/group; \
                 for file in passwd group; do rm -rf /etc/.$file.rockenv; {trap} /etc/.$file.rockenv; done"
            ))
            .ok();
        let begun = Instant::now();
        let ran = store.sh("id -un");
        assert!(begun.elapsed() < HANGS, "{trap}");
        match trap {
            "mkdir" => {
                assert_ne!(ran.code, 0);
                // A service's log keeps the output of the container's first process, so the error does not show it.
                ran.says(&[match is_service() {
                    true => "before it was ready",
                    false => "group.rockenv",
                }]);
                store.rockenv(&["up", store.env(), "--rerun", "a"]).ok();
            }
            _ => assert_eq!(ran.ok().text().trim(), "builder", "{trap}"),
        }
    }
    // A service reads `/etc/passwd` itself, in its own way.
    let traps: &[&str] = &[
        "mkfifo /etc/passwd",
        "truncate -s 2G /etc/passwd",
        "ln -s /dev/zero /etc/passwd",
        "mknod /etc/passwd c 1 5",
    ];
    for trap in traps.iter().filter(|_| !is_service()) {
        store.rockenv(&["up", store.env(), "--rerun", "a"]).ok();
        store.root_sh(&format!("rm /etc/passwd; {trap}")).ok();
        let begun = Instant::now();
        let ran = store.sh("true");
        assert_ne!(ran.code, 0);
        ran.says(&["passwd"]);
        assert!(begun.elapsed() < HANGS, "{trap}");
    }
    store.assert_clean();
}

/// A loop device of the host, which exists as long as this value.
struct Disk {
    device: fs::File,
    content: PathBuf,
}

impl Disk {
    const BYTES: usize = 1 << 20;

    fn new(store: &TestStore) -> Self {
        let content = store.work().join("disk");
        fs::write(&content, vec![b'x'; Self::BYTES]).expect("a file");
        let losetup = |words: &[&str]| {
            let output = Command::new("losetup").args(words).output();
            let output = output.expect("losetup");
            assert!(output.status.success(), "{words:?}: {output:?}");
            String::from_utf8_lossy(&output.stdout).trim().to_owned()
        };
        let file = content.to_str().expect("a path");
        let name = losetup(&["--find", "--show", file]);
        let device = fs::File::open(&name).expect("a device");
        // The kernel frees the device when the last process closes it.
        losetup(&["--detach", &name]);
        Self { device, content }
    }

    /// Returns a command that makes a node of the device at a path in the container.
    fn node(&self, path: &str) -> String {
        let number = self.device.metadata().expect("a device").rdev();
        let (major, minor) = (nix::sys::stat::major(number), nix::sys::stat::minor(number));
        format!("mknod -m 666 {path} b {major} {minor}")
    }

    #[track_caller]
    fn assert_untouched(&self) {
        self.device.sync_all().expect("a device");
        let found = fs::read(&self.content).expect("a file");
        assert!(found == vec![b'x'; Self::BYTES], "the disk was written to");
    }
}

/// A file is part of the tree, but a write to a device node changes the host's disk.
#[test]
fn a_disk_where_accounts_are_written_is_neither_written_nor_read() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = \"a\"\nrun = \"true\"\n");
    let disk = Disk::new(&store);
    for file in ["passwd", "group"] {
        let path = format!("/etc/.{file}.rockenv");
        store
            .root_sh(&format!(
                "sed -i /builder/d /etc/passwd /etc/group; rm -rf {path}; {}; test -b {path}",
                disk.node(&path)
            ))
            .ok();
        assert_eq!(store.sh("id -un").ok().text().trim(), "builder", "{file}");
        store.root_sh(&format!("test ! -b {path}")).ok();
        disk.assert_untouched();
        if is_service() {
            continue;
        }
        let path = format!("/etc/{file}");
        store
            .root_sh(&format!("rm {path}; {}", disk.node(&path)))
            .ok();
        let begun = Instant::now();
        let ran = store.sh("true");
        assert!(begun.elapsed() < HANGS);
        assert_ne!(ran.code, 0);
        ran.says(&[file]);
        disk.assert_untouched();
        store.rockenv(&["up", store.env(), "--rerun", "a"]).ok();
    }
    store.assert_clean();
}

/// Stops the process that holds the store's container. Other stores' holders keep running.
fn stop_holder(store: &TestStore) -> Pid {
    let home = store.home().to_string_lossy().into_owned();
    let is_ours = |pid: i32| {
        let open = fs::read_dir(format!("/proc/{pid}/fd"))
            .into_iter()
            .flatten();
        open.flatten().any(|open| {
            fs::read_link(open.path()).is_ok_and(|to| to.to_string_lossy().starts_with(&home))
        })
    };
    let mut all = processes().into_iter();
    let (pid, _) = all
        .find(|(pid, line)| line.contains("__hold") && is_ours(*pid))
        .expect("a holder");
    let pid = Pid::from_raw(pid);
    kill(pid, Signal::SIGSTOP).expect("a stopped holder");
    pid
}

#[test]
fn a_holder_that_does_not_answer_is_ended() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = \"a\"\nrun = \"true\"\n");
    let sleeper = store.sleeper();
    for arguments in [
        ["down", store.env()].as_slice(),
        &["rm", "--force", store.env()],
    ] {
        let job = store.start(&["exec", store.env(), "--", "sh", "-c", &sleeper]);
        wait_for_process(&sleeper);
        stop_holder(&store);
        let begun = Instant::now();
        store
            .rockenv(arguments)
            .ok()
            .says(&["waiting for env", "held by `rockenv exec`"]);
        assert!(begun.elapsed() < HANGS, "{arguments:?}");
        drop(job);
    }
    store.assert_clean();
}

/// Stops rockenv's agent in the container, which forwards signals and reports how commands end.
const STOP_AGENT: &str = "for process in /proc/[0-9]*; do
    case $(tr '\\0' ' ' < $process/cmdline) in *rockenv\\ __agent*) kill -STOP ${process#/proc/};; esac; done";

#[test]
fn a_command_whose_container_was_stopped_ends_when_it_is_told_to() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = \"a\"\nrun = \"true\"\n");
    store.sh("true").ok();
    // The stopped process keeps the pipes that it was sent open, so a reader would wait for their end.
    let start = |arguments: &[&str]| {
        let mut command = store.command(&[&["exec", "--root"], arguments].concat());
        command.stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().expect("rockenv")
    };
    let sleeper = store.sleeper();
    let script = format!("{STOP_AGENT}; {sleeper}");
    let mut job = start(&[store.env(), "--", "sh", "-c", &script]);
    wait_for_process(&sleeper);
    let begun = Instant::now();
    // More bytes than a socket buffers while its peer does not read.
    let long = (0..8).map(|n| format!("--env=A{n}={}", "x".repeat(100_000)));
    let long: Vec<String> = long.collect();
    let long: Vec<&str> = long.iter().map(String::as_str).collect();
    let refused = start(&[&long[..], &[store.env(), "--", "true"]].concat()).wait();
    let refused = refused.expect("an end").code();
    assert!(matches!(refused, Some(4 | 6)), "{refused:?}");
    kill(Pid::from_raw(job.id().cast_signed()), Signal::SIGTERM).expect("a signal");
    let ended = job.wait().expect("an end").code();
    assert_eq!(ended, Some(143));
    assert!(begun.elapsed() < HANGS);
    store.rockenv(&["down", store.env()]).ok();
    store.sh("true").ok();
    store.assert_clean();
}

#[test]
fn a_command_that_waits_for_a_stopped_holder_ends_when_it_is_told_to() {
    let store = TestStore::new();
    store.up_with("[[step]]\nname = \"a\"\nrun = \"true\"\n");
    let sleeper = store.sleeper();
    let job = store.start(&["exec", store.env(), "--", "sh", "-c", &sleeper]);
    wait_for_process(&sleeper);
    stop_holder(&store);
    let begun = Instant::now();
    job.signal(Signal::SIGTERM);
    job.wait();
    assert!(begun.elapsed() < HANGS);
    store.assert_clean();
}
