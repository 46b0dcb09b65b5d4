//! Login shells of other machines that are not Bourne shells.

use std::os::unix::fs::PermissionsExt as _;
use std::path::PathBuf;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::run::finish;

/// Writes an ssh that acts like sshd: it joins the words of the command into one argument of the login shell.
pub(super) fn fake_ssh(store: &TestStore, name: &str, shell: &str) -> PathBuf {
    let ssh = store.work().join(format!("ssh-{name}"));
    let script = "#!/bin/bash\nwhile [ \"$1\" != -- ]; do shift; done\nshift 2\n";
    fs::write(&ssh, format!("{script}{shell} -c \"$*\"\n")).unwrap();
    fs::set_permissions(&ssh, std::fs::Permissions::from_mode(0o755)).unwrap();
    ssh
}

#[test]
fn any_login_shell_runs_what_is_sent() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    for shell in ["sh", "bash", "zsh", "tcsh", "fish"] {
        let ssh = fake_ssh(&store, shell, &format!("exec {shell}"));
        let on = |words: &[&str]| {
            let mut command = store.command(&[&["on", "ssh://there"], words].concat());
            command.env_remove("SUDO_UID").env_remove("SUDO_GID");
            command.env("ROCKENV_SSH", &ssh).env("HOME", home.path());
            finish(format!("{shell}: {}", words.join(" ")), command)
        };
        on(&["ls", "--json"]).ok().prints("[]");
        // An argument with characters that shells interpret.
        let refused = on(&["status", "a!b\n'\\c' $HOME `x`"]);
        insta::allow_duplicates! {
            insta::assert_snapshot!(refused.shown(), @r"
            error: invalid value 'a!b
            '\c' $HOME `x`' for '[ENV]': a name is up to 64 of a-z, 0-9, `.`, `_` and `-`, starting with a letter or digit

            For more information, try '--help'.
            exit code 2
            ");
        }
    }
}

#[test]
fn a_login_shell_may_print_something() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let ssh = fake_ssh(&store, "noisy", "echo welcome; printf 'on there'; exec sh");
    let on = |words: &[&str]| {
        let mut command = store.command(&[&["on", "ssh://there"], words].concat());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", &ssh).env("HOME", home.path());
        finish(words.join(" "), command)
    };
    fs::create_dir(store.work().join("data")).unwrap();
    fs::write(store.work().join("data/a"), "text").unwrap();
    on(&["--send", "data"]).ok().prints("");
    fs::remove_dir_all(store.work().join("data")).unwrap();
    on(&["--fetch", "data"]).ok().prints("");
    let fetched = fs::read_to_string(store.work().join("data/a"));
    assert_eq!(fetched.unwrap(), "text");
    on(&["ls", "--json"]).ok().prints("[]");
    // A login shell that runs no command. An SFTP server would wait for input the next time. `nologin` fails.
    let calls = store.work().join("calls");
    for (program, words) in [
        ("cat", &["ls"][..]),
        ("echo 'This account is not available.'; exit 1", &["ls"]),
        ("echo closed", &["--fetch", "data"]),
        ("echo closed; exit 1", &["--fetch", "data"]),
    ] {
        let shell = format!("echo >> '{}'; {program}; exit 0; exec sh", calls.display());
        let mut command = store.command(&[&["on", "ssh://there"], words].concat());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", fake_ssh(&store, "other", &shell));
        let ran = finish(program.to_owned(), command);
        insta::allow_duplicates! {
            insta::assert_snapshot!(store.shown(&ran), @"
            error: the login shell on there ends before it runs the command of rockenv
            help: WORK/ssh-other ssh://there true
            exit code 4
            ");
        }
    }
    assert_eq!(fs::read_to_string(calls).unwrap(), "\n".repeat(4));
}

#[test]
fn the_program_there_is_on_disk_and_can_run() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let on = |name: &str, shell: &str, words: &[&str]| {
        let mut command = store.command(&[&["on", "ssh://there"], words].concat());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", fake_ssh(&store, name, shell));
        command.env("HOME", home.path());
        finish(name.to_owned(), command)
    };
    let mount = "mount -t tmpfs -o noexec none \"$HOME\"; exec sh \"$@\"";
    let shell = format!("exec unshare -m sh -c '{mount}' sh");
    on("noexec", &shell, &["ls"])
        .exits(4)
        .says(&["is mounted noexec", "cannot store rockenv on there"]);
    // A `sync` that fails stands for a disk that does.
    let tools = home.path().join("tools");
    fs::create_dir(&tools).unwrap();
    fs::write(tools.join("sync"), "#!/bin/sh\nexit 1\n").unwrap();
    let executable = std::fs::Permissions::from_mode(0o755);
    fs::set_permissions(tools.join("sync"), executable).unwrap();
    let path = format!("PATH='{}':$PATH exec sh", tools.display());
    on("disk", &path, &["ls"]).exits(4);
    let programs = fs::read_dir(home.path().join(".cache/rockenv/bin"));
    assert_eq!(programs.unwrap().count(), 0);
    // Root may not be able to read a home on NFS.
    fs::rename(tools.join("sync"), tools.join("sudo")).unwrap();
    fs::write(tools.join("sudo"), "#!/bin/sh\n[ $2 = true ]\n").unwrap();
    let squashed = "root on there runs no program in the user's home";
    on("squashed", &path, &["--sudo", "ls"])
        .exits(4)
        .says(&[squashed, "root_squash"]);
}

#[test]
fn what_is_missing_here_is_named() {
    let store = TestStore::new();
    let on = |ssh: &str| {
        let mut command = store.command(&["on", "ssh://there", "ls"]);
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", ssh);
        command
    };
    insta::assert_snapshot!(finish("on".to_owned(), on("nossh -v")).shown(), @"
    error: cannot start `nossh`, the program in ROCKENV_SSH
      caused by: No such file or directory (os error 2)
    help: unset ROCKENV_SSH, or set it to an ssh command: ROCKENV_SSH='ssh -i KEY'
    exit code 4
    ");
    let gone = store.work().join("gone");
    let script = "cd \"$1\" && rmdir \"$1\" && shift && exec \"$@\"";
    for words in [&["on", "ssh://there", "ls"][..], &["trust"]] {
        fs::create_dir(&gone).unwrap();
        let mut command = std::process::Command::new("sh");
        command.args(["-c", script, "sh"]).arg(&gone);
        command.arg(env!("CARGO_BIN_EXE_rockenv")).args(words);
        command.env("ROCKENV_HOME", store.home());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        insta::allow_duplicates! {
            insta::assert_snapshot!(finish(words.join(" "), command).shown(), @"
            error: the working directory does not exist any more
            help: cd to another one
            exit code 7
            ");
        }
    }
}
