//! The core under systemd as PID 1 and cgroup v2, in the virtual machine of `tests/vm`. Needs root.

mod support;

use std::path::Path;
use std::process::Command;

use fs_err as fs;

/// Profiles and the script that runs in the machine, which names each case before it begins.
const SCENARIO: [(&str, &str); 6] = [
    ("work/images/base.toml", "schema = 1\nprovider = \"tarball\"\n[tarball]\npath = \"/srv/rootfs.tar.zst\"\nsha256 = \"@SHA256@\"\n"),
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

#[test]
fn the_core_works_under_systemd() {
    support::loopfs::need_root();
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for (name, text) in SCENARIO {
        let path = place.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    let program = Path::new(env!("CARGO_BIN_EXE_rockenv"));
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/run");
    let output = Command::new(run)
        .args(["--timeout", "240", "--share"])
        .arg(format!("{}=/test", place.path().display()))
        .arg("--share")
        .arg(format!("{}=/program", program.parent().unwrap().display()))
        .args(["--", "bash", "/test/scenario", "/program/rockenv"])
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(
        output.status.success() && text.contains("all cases passed"),
        "{}\n{text}",
        output.status
    );
}
