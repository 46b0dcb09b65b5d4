//! Commands on another machine that end early.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use fs_err as fs;
use nix::sys::signal::Signal;

use super::login_shell::fake_ssh;
use super::{Other, ssh_of};
use crate::support::env::TestStore;
use crate::support::run::{
    Background, finish, processes, processes_called, wait_for_process, wait_until,
};

#[test]
fn a_command_there_ends_with_the_one_here() {
    let other = Other::new();
    let env = other.here.env();
    let sleeper = other.here.sleeper();
    other
        .here
        .profile(&format!("[[step]]\nname = 'one'\nrun = '{sleeper}'\n"));
    for signal in [Signal::SIGTERM, Signal::SIGKILL] {
        let up = Background::start(other.command(&["up", env]));
        wait_for_process(&sleeper);
        let ssh = ssh_of(up.pid());
        up.signal(signal);
        wait_until("it ends there", || processes_called(&sleeper).is_empty());
        wait_until("ssh ends", || {
            !processes().iter().any(|(pid, _)| *pid == ssh)
        });
        assert_eq!(up.wait().code, 128 + signal as i32);
    }
    wait_until("the env is free", || {
        other.on(&["rm", "--yes", env]).code == 0
    });
}

/// Returns the directories that fetched files arrive in.
fn arriving(store: &TestStore) -> Vec<PathBuf> {
    let all = fs::read_dir(store.work()).unwrap();
    let all = all.map(|entry| entry.unwrap().path());
    all.filter(|path| path.to_string_lossy().contains("/.rockenv-fetch-"))
        .collect()
}

#[test]
fn a_fetch_that_ends_early_leaves_nothing() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ssh = fake_ssh(&store, "fake", "exec sh");
    let on = |path: &Path, words: &[&str]| -> Command {
        let mut command = store.command(&[&["on", "ssh://there"], words].concat());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", &ssh).env("HOME", home.path());
        command.env("PATH", format!("{}:/usr/bin:/bin", path.display()));
        command
    };
    let fetch = |path: &Path| on(path, &["--fetch", "data"]);
    let data = store.work().join("data");
    fs::create_dir(&data).unwrap();
    fs::write(data.join("a"), "text").unwrap();
    let usual = Path::new("/usr/bin");
    finish("send".to_owned(), on(usual, &["--send", "data"])).ok();
    fs::remove_dir_all(&data).unwrap();
    // This tar sends everything, and then does not exit.
    let slow = home.path().join("slow");
    fs::create_dir(&slow).unwrap();
    let tar = "#!/bin/sh\n/usr/bin/tar \"$@\"\nexec sleep 1000\n";
    fs::write(slow.join("tar"), tar).unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    fs::set_permissions(slow.join("tar"), executable).unwrap();
    // A user's directory with a name like that of a fetch.
    let own = store.work().join(".rockenv-fetch-notes");
    fs::create_dir(&own).unwrap();
    let start = |stderr: Stdio| {
        let before = arriving(&store);
        let mut command = fetch(&slow);
        command.stderr(stderr);
        let fetching = Background::start(command);
        wait_until("files arrive", || {
            let all = arriving(&store);
            all.iter()
                .any(|path| !before.contains(path) && path.join("data/a").exists())
        });
        fetching
    };
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        let fetching = start(Stdio::piped());
        fetching.signal(signal);
        let ended = fetching.wait().exits(128 + signal as i32);
        assert_eq!(
            arriving(&store),
            std::slice::from_ref(&own),
            "{}",
            ended.err
        );
    }
    // The next fetch removes what a killed fetch left, but nothing of a fetch that runs.
    let fetching = start(Stdio::piped());
    fetching.signal(Signal::SIGKILL);
    drop(fetching);
    assert_eq!(arriving(&store).len(), 2);
    let said = home.path().join("said");
    let file = fs::File::create(&said).unwrap().into_parts().0;
    let fetching = start(Stdio::from(file));
    finish("fetch".to_owned(), fetch(usual)).ok();
    assert_eq!(fs::read_to_string(data.join("a")).unwrap(), "text");
    assert_eq!(arriving(&store).len(), 2);
    // The wait is reported even though no more data arrives.
    wait_until("the wait is reported", || {
        let said = fs::read_to_string(&said).unwrap();
        said.contains("fetching `data` from there")
    });
    fetching.signal(Signal::SIGTERM);
    fetching.wait().exits(143);
    assert_eq!(arriving(&store), [own]);
}
