//! Terminals, and commands without one.

use std::process::{Command, Stdio};
use std::time::Duration;

use nix::sys::signal::Signal;

use super::commands::ONE;
use crate::support::env::{TestStore, build_user};
use crate::support::run::{Background, processes_called, surround, wait_for_process, wait_until};
use crate::support::terminal::Terminal;

#[test]
fn a_shell_has_a_terminal() {
    let store = TestStore::new();
    store.up_with(ONE);
    let mut terminal = Terminal::start(store.command(&["shell", store.env()]), 33, 101);
    terminal.write("PS1='ready> '; stty -echo; tty; stty size; echo user $(id -u)\n");
    terminal.expect("/dev/pts/");
    terminal.expect("33 101");
    terminal.expect(&format!("user {}", build_user().1));
    assert!(!terminal.is_cooked());
    // Not at a prompt: before each one, bash reads the size and sets it again, which undoes a change in between.
    terminal.write("echo begun; while ! stty size | grep '44 99'; do sleep 0.1; done\n");
    terminal.expect("begun");
    terminal.resize(44, 99);
    terminal.expect("44 99");
    // Ctrl-C reaches the inner program.
    let sleeper = store.sleeper();
    terminal.write(&format!("{sleeper}\n"));
    wait_for_process(&sleeper);
    terminal.write("\x03");
    terminal.write("echo after $?\n");
    terminal.expect("after 130");
    assert!(processes_called(&sleeper).is_empty());
    // Job control works, because this is the controlling terminal.
    terminal.write("sleep 1000 & jobs; kill %1\n");
    terminal.expect("Running");
    // A second command joins the container.
    let words = ["exec", "-e", "TERM=mine", store.env(), "--"];
    let words = [&words[..], &["sh", "-c", "tty; echo $TERM"]].concat();
    let mut second = Terminal::start(store.command(&words), 10, 20);
    second.expect("/dev/pts/");
    second.expect("mine");
    second.wait(0);
    // A large paste into a program that also prints does not deadlock.
    terminal.write("stty raw; echo $((6 * 7)) now; head -c 300000 | tr -d '\\n' | wc -c; stty cooked; echo pasted\n");
    terminal.expect("42 now");
    let mut left = "0123456789".repeat(30_000);
    while !left.is_empty() {
        match std::io::Write::write(&mut terminal.outer, left.as_bytes()) {
            Ok(count) => drop(left.drain(..count)),
            Err(_) => std::thread::sleep(Duration::from_millis(1)),
        }
    }
    terminal.expect("300000");
    terminal.expect("pasted");
    terminal.write("exit 6\n");
    terminal.wait(6);
    // The prompt is on the terminal even if the messages of rockenv are not.
    let own = store.command(&["shell", store.env()]);
    let mut quiet = Command::new("sh");
    let words = ["-c", "\"$0\" shell \"$1\" 2>/dev/null"];
    quiet.args(words).arg(own.get_program()).arg(store.env());
    surround(&mut quiet, &own);
    store.become_user(&mut quiet);
    let mut quiet = Terminal::start(quiet, 24, 80);
    quiet.write("PS1=quiet'> '\n");
    quiet.expect("quiet> ");
    quiet.write("exit 3\n");
    quiet.wait(3);
}

#[test]
fn a_terminal_that_goes_away_ends_the_shell() {
    let store = TestStore::new();
    store.up_with(ONE);
    let sleeper = store.sleeper();
    let mut terminal = Terminal::start(store.command(&["shell", store.env()]), 24, 80);
    terminal.write(&format!("{sleeper}\n"));
    wait_for_process(&sleeper);
    let Terminal {
        mut child,
        outer,
        inner,
        ..
    } = terminal;
    drop((outer, inner));
    child.wait().unwrap();
    wait_until("the program ends", || processes_called(&sleeper).is_empty());
}

#[test]
fn there_may_be_no_terminal_no_input_and_no_reader() {
    let store = TestStore::new();
    store.up_with(
        "[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'echo two'\n",
    );
    let through_sh = |script: &str| {
        let mut command = Command::new("sh");
        let own = store.command::<&str>(&[]);
        command
            .args(["-c", script, "sh"])
            .arg(own.get_program())
            .arg(store.env());
        surround(&mut command, &own);
        store.become_user(&mut command);
        crate::support::run::finish(script.to_owned(), command)
    };
    through_sh("\"$1\" exec \"$2\" -- sh -c 'cat; echo end' <&-")
        .ok()
        .prints("end");
    through_sh("\"$1\" up \"$2\" --rerun one <&- >&- 2>&-").ok();
    // A reader that takes only the first line gets it, and rockenv prints no error.
    let ran = through_sh("{ \"$1\" exec \"$2\" -- yes; echo $? >&2; } | head -1")
        .ok()
        .prints("y");
    assert_eq!(ran.err, "141\n");
    let ran = through_sh("\"$1\" ls | head -c 0; \"$1\" status \"$2\" | head -1 >/dev/null; \"$1\" logs \"$2\" | true").ok();
    assert_eq!(ran.err, "");
    let ran =
        through_sh("\"$1\" up \"$2\" --rerun one 2>&1 >/dev/null | head -c 1 >/dev/null").ok();
    assert_eq!(ran.err, "");
    store.up();
    // A shell without a terminal reads its commands from stdin. It has the variables of `exec`, whatever a distribution
    // sets for login shells.
    store
        .root_sh("echo PATH=/usr/bin:/bin >> /etc/profile")
        .ok();
    through_sh("echo 'tty; id -u; echo ${PATH%%:*}' | \"$1\" shell \"$2\"")
        .prints(&format!("not a tty\n{}\n/run/rockenv/bin", build_user().1));
}

#[test]
fn nohup_survives_a_hangup() {
    let store = TestStore::new();
    let sleeper = store.sleeper();
    store.profile(&format!(
        "[[step]]\nname = 'long'\nrun = '{sleeper} & wait; echo done'\n"
    ));
    let mut command = Command::new("nohup");
    let own = store.command(&["up", store.env()]);
    command.arg(own.get_program()).args(own.get_args());
    surround(&mut command, &own)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    store.become_user(&mut command);
    let mut up = Background::start(command);
    wait_for_process(&sleeper);
    up.signal(Signal::SIGHUP);
    std::thread::sleep(Duration::from_millis(200));
    assert!(up.runs() && !processes_called(&sleeper).is_empty());
    for pid in processes_called(&sleeper) {
        nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    }
    up.wait().ok();
}
