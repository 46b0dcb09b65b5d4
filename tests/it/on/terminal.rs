//! Input, terminals and lost connections of commands on another machine.

use std::io::Write as _;
use std::process::{Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::{Other, ssh_of};
use crate::support::run::{
    Background, finish, processes_called, surround, wait_for_process, wait_until,
};
use crate::support::terminal::Terminal;

#[test]
fn exec_and_shell_have_input_and_a_terminal() {
    let other = Other::new();
    let env = other.here.env();
    other.here.profile("[[step]]\nname = 'one'\nrun = 'true'\n");
    other.on(&["up", env]).ok();
    // Arbitrary bytes come through, and so does the end of input.
    let mut bytes: Vec<u8> = (0..=255u8).cycle().take(1 << 20).collect();
    bytes.extend(b"end");
    let mut command = other.command(&["exec", env, "--", "cat"]);
    command.stdin(Stdio::piped());
    let mut cat = Background::start(command);
    let mut stdin = cat.stdin();
    let sent = bytes.clone();
    let writer = std::thread::spawn(move || stdin.write_all(&sent).unwrap());
    let ran = cat.wait().ok();
    writer.join().unwrap();
    assert!(ran.out == bytes, "{} bytes came back", ran.out.len());
    other
        .on(&["exec", env, "--", "sh", "-c", "tty; echo wrong >&2; exit 7"])
        .exits(7)
        .prints("not a tty")
        .says(&["wrong"]);
    // Commands that read no input leave it to the next program.
    let script = format!(
        "while read line; do echo \"$line\"; {} >/dev/null; done",
        "\"$@\""
    );
    let ls = other.command(&["ls"]);
    let mut reader = Command::new("sh");
    reader
        .args(["-c", &script, "sh"])
        .arg(ls.get_program())
        .args(ls.get_args());
    surround(&mut reader, &ls)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    let mut reader = Background::start(reader);
    reader.stdin().write_all(b"one\ntwo\n").unwrap();
    reader.wait().ok().prints("one\ntwo");
    // A lost connection ends a command, whether or not it waits for input.
    let sleeper = other.here.sleeper();
    for script in [sleeper.clone(), format!("{sleeper} & cat; wait")] {
        let mut command = other.command(&["exec", env, "--", "sh", "-c", &script]);
        command.stdin(Stdio::piped());
        let exec = Background::start(command);
        wait_for_process(&sleeper);
        kill(Pid::from_raw(ssh_of(exec.pid())), Signal::SIGKILL).unwrap();
        wait_until("it ends there", || processes_called(&sleeper).is_empty());
        drop(exec);
    }
    // Interactive shells ignore SIGTERM.
    let mut terminal = Terminal::start(other.command(&["shell", env]), 24, 80);
    terminal.write(&format!("{sleeper}\n"));
    wait_for_process(&sleeper);
    kill(
        Pid::from_raw(ssh_of(terminal.child.id().cast_signed())),
        Signal::SIGKILL,
    )
    .unwrap();
    wait_until("it ends there", || processes_called(&sleeper).is_empty());
    drop(terminal);
    let mut terminal = Terminal::start(other.command(&["shell", env]), 33, 101);
    terminal.write("PS1='ready> '; stty -echo; tty; stty size; echo $TERM\n");
    terminal.expect("/dev/pts/");
    terminal.expect("33 101");
    terminal.expect("xterm");
    // Resizes while a program runs. Before each prompt bash reads the size and sets it again, which undoes a resize in
    // between.
    terminal.write("echo begun; while ! stty size | grep '44 99'; do sleep 0.1; done\n");
    terminal.expect("begun");
    terminal.resize(44, 99);
    terminal.expect("44 99");
    // Ctrl-C reaches the inner program.
    terminal.write(&format!("{sleeper}\n"));
    wait_for_process(&sleeper);
    terminal.write("\x03");
    terminal.write("echo after $?\n");
    terminal.expect("after 130");
    terminal.write("exit 6\n");
    terminal.wait(6);
    // Ctrl-C reaches a step too, and `up` says so before its connection ends.
    other
        .here
        .profile(&format!("[[step]]\nname = 'one'\nrun = '{sleeper}'\n"));
    let mut terminal = Terminal::start(other.command(&["up", env]), 33, 101);
    wait_for_process(&sleeper);
    terminal.write("\x03");
    terminal.expect("finished steps are kept");
    terminal.wait(130);
    wait_until("the step has ended", || {
        processes_called(&sleeper).is_empty()
    });
    // Questions reach the terminal.
    let mut terminal = Terminal::start(other.command(&["rm", env]), 33, 101);
    terminal.expect("remove");
    terminal.write("n\n");
    terminal.wait(2);
    other.on(&["rm", "--yes", env]).ok();
}

#[test]
fn colours_there_are_as_asked_for_here() {
    let other = Other::new();
    let with = |name: &str| {
        let mut command = other.command(&["status", "absent"]);
        command.env(name, "1");
        command
    };
    let red = "\x1b[1;31merror:";
    for (name, shown) in [("NO_COLOR", "error: "), ("LANG", red)] {
        let mut terminal = Terminal::start(with(name), 33, 101);
        terminal.expect(shown);
        terminal.wait(7);
    }
    for (name, shown) in [("CLICOLOR_FORCE", red), ("LANG", "error: ")] {
        finish(name.to_owned(), with(name)).exits(7).says(&[shown]);
    }
}
