//! Files that a root step leaves with root's rights: services do not mount volumes `nosuid,nodev`, so other users on
//! the host must not reach these files.

use std::os::unix::fs::{FileTypeExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use fs_err as fs;

use crate::assert_nothing_left;
use crate::support::env::TestStore;
use crate::support::loopfs::run;

/// Another user on the machine, and the user that the tests call rockenv for.
const OTHER: u32 = 4322;
const CALLER: u32 = 1234;

fn as_user(uid: u32, program: &Path, argument: &str) -> std::io::Result<Output> {
    let mut command = Command::new(program);
    command.arg(argument).uid(uid).gid(uid).current_dir("/");
    command.output()
}

fn found(directory: &Path, what: &[&str]) -> Vec<PathBuf> {
    let text = run(Command::new("find").arg(directory).arg("-xdev").args(what));
    text.lines().map(PathBuf::from).collect()
}

#[test]
fn what_root_steps_leave_gives_nobody_else_rights() {
    let store = TestStore::new();
    let leave = "for v in /v/*; do cp /usr/bin/id $v/mine; chmod 4755 $v/mine; chmod 755 $v; mknod -m 666 $v/null c 1 3 || true; done";
    let steps = |more: &str| {
        format!(
            "volume = [{{ name = 'build', kind = 'build', target = '/v/build' }},
             {{ name = 'cache', kind = 'cache', target = '/v/cache' }}, {{ name = 'out', kind = 'output', target = '/v/out' }}]
             [[step]]\nname = 'leave'\nuser = 'root'\nrun = '''{leave}{more}'''\n"
        )
    };
    // A device is refused as a result, the program is accepted.
    store.profile(&steps(""));
    store.rockenv(&["up", store.env()]);
    store.up_with(&steps("; rm -f /v/out/null"));
    let left = found(store.home(), &["-perm", "-4000", "-name", "mine"]);
    for below in ["volumes", "caches", "outputs"] {
        let place = store.home().join(below);
        assert!(
            left.iter().any(|path| path.starts_with(&place)),
            "{below}: {left:?}"
        );
    }
    // Control: outside those directories such a program does run as root.
    let control = store.work().join("control");
    fs::copy("/usr/bin/id", &control).unwrap();
    fs::set_permissions(&control, std::fs::Permissions::from_mode(0o4755)).unwrap();
    let ran = as_user(OTHER, &control, "-u").unwrap();
    assert_eq!(String::from_utf8_lossy(&ran.stdout).trim(), "0");
    for program in &left {
        let refused = as_user(OTHER, program, "-u").expect_err("a program of root's ran");
        assert_eq!(
            refused.kind(),
            std::io::ErrorKind::PermissionDenied,
            "{}",
            program.display()
        );
    }
    let devices = found(store.home(), &["-type", "c", "-name", "null"]);
    for device in devices {
        let is_device = fs::symlink_metadata(&device)
            .unwrap()
            .file_type()
            .is_char_device();
        let read = as_user(OTHER, Path::new("/bin/cat"), device.to_str().unwrap()).unwrap();
        assert!(is_device && !read.status.success(), "{}", device.display());
    }
    // The caller can still reach results and caches.
    for below in [
        format!("outputs/{}/out", store.env()),
        "caches/cache".to_owned(),
    ] {
        let file = store.home().join(below).join("mine");
        let read = as_user(CALLER, Path::new("/bin/cat"), file.to_str().unwrap()).unwrap();
        assert!(read.status.success(), "{read:?}");
    }
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}
