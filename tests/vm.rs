//! rockenv under systemd as PID 1 and cgroup v2, and with GPU drivers, in the virtual machine of `tests/vm`. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

use std::path::Path;
use std::process::Command;
use std::sync::{Mutex, PoisonError};

use fs_err as fs;

/// A file of a scenario: its path and text.
type File = (&'static str, &'static str);

/// What the scripts share.
const CASES: File = ("cases", include_str!("vm/cases"));

/// Profiles and the script that runs in the machine, which names each case before it begins.
const ENGINE: [File; 6] = [
    (
        "work/images/base.toml",
        "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = \"/srv/rootfs.tar.zst\"\nsha256 = \"@SHA256@\"\n",
    ),
    (
        "work/profiles/one.toml",
        "schema = 1\nimage = \"base\"\n
         volume = [{ name = 'out', kind = 'output', path = '/var/tmp/out', target = '/out' },
                   { name = 'host', kind = 'host', path = '/usr/share', target = '/host' }]\n
         [[step]]\nname = 'first'\nrun = 'id -u > ~/first; id -u > /out/first'\n
         [[step]]\nname = 'off'\nnetwork = false\nrun = 'ls /sys/class/net > ~/net'\n
         [[step]]\nname = 'root'\nuser = 'root'\nrun = 'dpkg -V coreutils; touch /etc/root'\n",
    ),
    (
        "work/profiles/hog.toml",
        "schema = 1\nimage = \"base\"\nresources = { memory-max = '64M' }\n[[step]]\nname = 'hog'\nrun = 'tail /dev/zero'\n",
    ),
    (
        "work/profiles/bomb.toml",
        "schema = 1\nimage = \"base\"\nresources = { tasks-max = 40 }\n
         [[step]]\nname = 'bomb'\ntimeout = '2s'\nshell = ['/bin/bash', '-c']\nrun = 'b() { b | b & }; (b) & exec sleep 1000'\n",
    ),
    (
        "work/profiles/long.toml",
        "schema = 1\nimage = \"base\"\n[[step]]\nname = 'long'\nrun = '''trap \"\" TERM; setsid sleep 4711 & sleep 4711 & wait; wait'''\n",
    ),
    ("scenario", include_str!("vm/engine")),
];

const GPU: [File; 6] = [
    // Each engine, and the ordinary user's store, has a copy of its own.
    (
        "work/images/base.toml",
        "schema = 1\nprovider = \"directory\"\n[directory]\npath = \"/srv/small\"\n",
    ),
    // Nothing is left at once.
    ("work/rockenv.toml", "idle = \"never\"\n"),
    (
        "work/profiles/gpu.toml",
        "schema = 1\nimage = \"base\"\n
         [[step]]\nname = 'look'\nrun = 'ls -d /dev/kfd /dev/dri /dev/accel > ~/off 2>/dev/null || true'\n
         [[step]]\nname = 'use'\ngpu = true\nrun = '''
         ls -d /dev/kfd /dev/dri/* > ~/on; id -G > ~/groups; exec 3<>/dev/kfd 4<>/dev/dri/renderD128'''\n",
    ),
    (
        "work/profiles/hog.toml",
        "schema = 1\nimage = \"base\"\nresources = { memory-max = '64M' }\n[[step]]\nname = 'hog'\ngpu = true\nrun = 'x=x; while :; do x=$x$x; done'\n",
    ),
    (
        "work/profiles/hold.toml",
        "schema = 1\nimage = \"base\"\n[[step]]\nname = 'hold'\ngpu = true\nrun = 'exec 3<>/dev/kfd; sleep 4711'\n",
    ),
    ("scenario", include_str!("vm/gpu")),
];

/// Runs a scenario in the machine; it says at its end that all cases passed.
///
/// `ROCKENV_TEST_CASES` chooses some of the scenario's, to look at these: it then says nothing of the kind, and the test fails.
#[expect(
    clippy::print_stdout,
    reason = "the test program captures it, and shows it with --nocapture"
)]
fn run(files: &[File]) {
    // One machine at a time: emulated, it takes every processor there is.
    static MACHINE: Mutex<()> = Mutex::new(());
    let _one = MACHINE.lock().unwrap_or_else(PoisonError::into_inner);
    support::loopfs::need_root();
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    // A list of GPUs; device nodes are the machine's own.
    let machine = include_str!("gpu/780m").split(">>> ").skip(1);
    let machine = machine
        .filter_map(|file| file.split_once('\n'))
        .filter(|(path, _)| !path.starts_with("dev/"))
        .map(|(path, text)| (Path::new("machine").join(path), text));
    let files = std::iter::once(&CASES).chain(files);
    let files = files.map(|(path, text)| (Path::new(path).to_owned(), *text));
    for (path, text) in files.chain(machine) {
        let path = place.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    // Without debug information: the machine copies it slowly.
    support::loopfs::run(
        Command::new("strip")
            .arg("-o")
            .arg(place.path().join("rockenv"))
            .arg(env!("CARGO_BIN_EXE_rockenv")),
    );
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/run");
    let chosen = std::env::vars_os().find(|(name, _)| name == "ROCKENV_TEST_CASES");
    let chosen = chosen.map(|(_, cases)| cases.into_string().unwrap());
    let output = Command::new(run)
        .args(["--timeout", "3000", "--share"])
        .arg(format!("{}=/test", place.path().display()))
        .args(["--", "bash", "/test/scenario", "/test/rockenv"])
        .args(chosen.iter().flat_map(|cases| cases.split(' ')))
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // Each case with the seconds before it.
    println!("{text}");
    assert!(
        output.status.success() && text.contains("all cases passed"),
        "{}",
        output.status
    );
}

#[test]
fn the_core_works_under_systemd() {
    run(&ENGINE);
}

#[test]
fn a_gpu_arrives_inside_or_the_layer_that_said_no_is_named() {
    run(&GPU);
}
