//! rockenv under systemd as PID 1 with cgroup v2, and with GPU drivers, in the machine of `tests/vm`. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

use std::path::Path;
use std::process::Command;

use fs_err as fs;

/// A file of a scenario: its path and text.
type File = (&'static str, &'static str);

/// Functions that the scripts share.
const CASES: File = ("cases", include_str!("vm/cases"));

/// A tree with one program, because each engine and the ordinary user's store copies it.
const IMAGE: File = (
    "work/images/base.toml",
    "schema = 1\nprovider = \"directory\"\n[directory]\npath = \"/srv/small\"\n",
);

/// Profiles, and the script that runs in the machine, which names each case before it begins.
const ENGINE: [File; 5] = [
    (
        "work/profiles/one.toml",
        "schema = 1\nimage = \"base\"\n
         volume = [{ name = 'out', kind = 'output', path = '/var/tmp/out', target = '/out' },
                   { name = 'host', kind = 'host', path = '/usr/share', target = '/host' }]\n
         [[step]]\nname = 'first'\nrun = 'id -u > ~/first; id -u > /out/first'\n
         [[step]]\nname = 'off'\nnetwork = false\nrun = 'ls /sys/class/net > ~/net'\n
         [[step]]\nname = 'root'\nuser = 'root'\nrun = 'touch /etc/root'\n",
    ),
    (
        "work/profiles/hog.toml",
        "schema = 1\nimage = \"base\"\nresources = { memory-max = '64M' }\n[[step]]\nname = 'hog'\nrun = 'x=x; while :; do x=$x$x; done'\n",
    ),
    (
        "work/profiles/bomb.toml",
        "schema = 1\nimage = \"base\"\nresources = { tasks-max = 40 }\n
         [[step]]\nname = 'bomb'\ntimeout = '2s'\nrun = 'b() { b | b & }; (b) & exec sleep 1000'\n",
    ),
    (
        "work/profiles/long.toml",
        "schema = 1\nimage = \"base\"\n[[step]]\nname = 'long'\nrun = '''trap \"\" TERM; setsid sleep 4711 & sleep 4711 & wait; wait'''\n",
    ),
    ("scenario", include_str!("vm/engine")),
];

const GPU: [File; 5] = [
    // Containers end with their command, so the cases can check at once that nothing is left.
    ("work/rockenv.toml", "idle = \"never\"\n"),
    (
        "work/profiles/gpu.toml",
        "schema = 1\nimage = \"base\"\n
         [[step]]\nname = 'look'\nrun = 'ls -d /dev/kfd /dev/dri /dev/accel 2>/dev/null || echo none'\n
         [[step]]\nname = 'use'\ngpu = true\nrun = '''
         ls -d /dev/kfd /dev/dri/*; id -G; exec 3<>/dev/kfd 4<>/dev/dri/renderD128'''\n",
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

fn lay_out(place: &Path, files: &[File]) {
    for (path, text) in files.iter().chain([&CASES, &IMAGE]) {
        write(&place.join(path), text);
    }
}

fn write(path: &Path, text: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

/// Runs both scenarios in one machine, which takes minutes to boot if it is emulated; each scenario reports at its end
/// that all cases passed.
///
/// `ROCKENV_TEST_CASES` selects some of the GPU's cases for debugging. The report is then missing, and the test fails.
#[test]
fn engines_work_under_systemd_and_a_gpu_arrives_inside() {
    support::loopfs::need_root();
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let [engine, gpu] = ["engine", "gpu"].map(|name| place.path().join(name));
    lay_out(&engine, &ENGINE);
    lay_out(&gpu, &GPU);
    // The list of GPUs; the machine has its own device nodes.
    let machine = gpu.join("machine");
    support::machine::lay_out(&machine, include_str!("gpu/780m"));
    fs::remove_dir_all(machine.join("dev")).unwrap();
    // Stripped of debug information, because copying into the machine is slow.
    support::loopfs::run(
        Command::new("strip")
            .arg("-o")
            .arg(place.path().join("rockenv"))
            .arg(env!("CARGO_BIN_EXE_rockenv")),
    );
    let run = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vm/run");
    let chosen = std::env::vars_os().find(|(name, _)| name == "ROCKENV_TEST_CASES");
    let script = match chosen {
        Some((_, cases)) => format!(
            "bash /test/gpu/scenario /test/rockenv {}",
            cases.into_string().unwrap()
        ),
        None => ["engine", "gpu"]
            .map(|name| format!("bash /test/{name}/scenario /test/rockenv"))
            .join(" && "),
    };
    let output = Command::new(run)
        .args(["--timeout", "6000", "--share"])
        .arg(format!("{}=/test", place.path().display()))
        .args(["--", "bash", "-c", &script])
        .output()
        .unwrap();
    let text = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    );
    // Prints each case with the seconds before it.
    println!("{text}");
    let passed = text.matches("all cases passed").count();
    assert!(
        output.status.success() && passed == 2,
        "{}, {passed} of 2",
        output.status
    );
}
