//! File transfers: their progress messages, and which programs stay on the other machine.

use std::path::Path;
use std::process::Command;

use fs_err as fs;

use super::Other;
use super::login_shell::fake_ssh;
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::finish;

#[test]
fn what_takes_long_is_told() {
    let store = TestStore::new();
    let home = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let fast = fake_ssh(&store, "fast", "exec sh");
    let slow = fake_ssh(&store, "slow", "sleep 3; exec sh");
    let on = |ssh: &Path, words: &[&str]| {
        let mut command = store.command(&[&["on", "ssh://there"], words].concat());
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", ssh).env("HOME", home.path());
        finish(words.join(" "), command).ok()
    };
    let data = store.work().join("data");
    fs::write(&data, vec![0_u8; 2 << 20]).unwrap();
    let sending = "sending 2.0 MiB to there";
    on(&fast, &["--send", "data"]).says(&[sending]);
    let again = on(&fast, &["--send", "data"]);
    assert!(!again.err.contains(sending), "{}", again.err);
    let fetching = "fetching `data` from there";
    // It takes more than two seconds on a busy machine, but not in every attempt.
    let mut attempts = (0..20).map(|_| on(&fast, &["--fetch", "data"]));
    assert!(attempts.any(|at_once| !at_once.err.contains(fetching)));
    on(&slow, &["--fetch", "data"]).says(&[fetching]);
}

#[test]
fn a_new_program_replaces_those_that_nobody_uses() {
    let other = Other::new();
    let programs = other.place.path().join("home/.cache/rockenv/bin");
    fs::create_dir_all(&programs).unwrap();
    let [old, recent] = ["0", "1"].map(|digit| programs.join(digit.repeat(64)));
    let mine = programs.join("mine");
    for (file, days) in [(&old, 40), (&recent, 20), (&mine, 40)] {
        let date = format!("--date={days} days ago");
        run(Command::new("touch").arg(date).arg(file));
    }
    other.on(&["ls"]).ok().says(&["sending rockenv to"]);
    let stay = [old, recent, mine].map(|file| file.exists());
    assert_eq!(stay, [false, true, true]);
}
