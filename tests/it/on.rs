//! `rockenv on` with a real sshd on loopback. A separate home and store stand for the other machine. Needs root.

mod ending;
mod login_shell;
mod terminal;
mod transfer;

use std::os::fd::AsFd as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::{
    Background, Ran, children, finish, processes, processes_called, wait_for_process, wait_until,
};
use crate::support::server::Server;
use crate::support::terminal::Terminal;
use crate::support::transcript::{measured, transcript};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use fs_err as fs;
use nix::fcntl::AT_FDCWD;
use nix::poll::{PollFd, PollFlags, PollTimeout};
use nix::sys::fanotify::{
    EventFFlags, Fanotify, FanotifyResponse, InitFlags, MarkFlags, MaskFlags, Response,
};
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// The other machine.
struct Other {
    // Declared before the stores, which the sessions of a running sshd may use.
    sshd: Server,
    here: TestStore,
    there: TestStore,
    place: tempfile::TempDir,
    user: &'static str,
}

/// The ordinary user there, with a name and uid that no machine uses.
const USER: (&str, u32) = ("rockenv-on", 43_210);

impl Other {
    fn new() -> Self {
        Self::start("root", &["/usr/sbin/sshd", "-D", "-f"])
    }

    /// Starts a machine where an ordinary user logs in, with these sudo rules. Only sshd and its children see that
    /// user.
    fn with_sudo(rules: &str) -> Self {
        let script = r#"
            # All of it: a mount on one file ends when somebody adds a user to the machine.
            etc=$(mktemp -d); mount -t tmpfs -o mode=755 none "$etc"
            cp -a /etc/. "$etc"; cd "$etc"
            echo "$1:x:$2:$2::${4%/*}/home:/bin/sh" >> passwd; echo "$1:*:20000::::::" >> shadow
            (umask 227; printf '%s\n' 'Defaults env_keep += "ROCKENV_HOME"' "$3" > sudoers)
            cd /; mount --bind "$etc" /etc; umount -l "$etc"; rmdir "$etc"
            chown "$2:$2" "${4%/*}/home"; chmod 755 "${4%/*}"
            exec /usr/sbin/sshd -D -f "$4""#;
        let (user, uid) = USER;
        let uid = uid.to_string();
        let unshare = ["unshare", "-m", "--propagation", "private", "sh", "-euc"];
        let words = [&unshare[..], &[script, "sh", user, &uid, rules]].concat();
        Self::start(user, &words)
    }

    fn start(user: &'static str, sshd: &[&str]) -> Self {
        let (here, there) = (TestStore::new(), TestStore::new());
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = place.path().display();
        for key in ["host", "user"] {
            run(Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(place.path().join(key)));
        }
        fs::create_dir(place.path().join("home")).unwrap();
        // sshd's privilege separation directory. Debian creates it when the service starts.
        fs::create_dir_all("/run/sshd").unwrap();
        let server = Server::start(|port| {
            let config = format!(
                "ListenAddress 127.0.0.1\nPort {port}\nHostKey {at}/host\nAuthorizedKeysFile {at}/user.pub\n\
                 StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\n\
                 SetEnv HOME={at}/home ROCKENV_HOME={} ROCKENV_BUILD_USER=1234:1234\n",
                there.home().display()
            );
            fs::write(place.path().join("config"), config).unwrap();
            // A client's configuration for logins.
            let client = "RequestTTY force\nRemoteCommand tmux new-session\n";
            fs::write(place.path().join("client"), client).unwrap();
            // `-D` keeps sshd in the foreground, so that the test can kill it by its pid.
            let mut command = Command::new(sshd[0]);
            command
                .args(&sshd[1..])
                .arg(place.path().join("config"))
                .stdin(Stdio::null())
                .stdout(Stdio::null())
                .stderr(Stdio::null());
            command
        });
        Self {
            sshd: server,
            here,
            there,
            place,
            user,
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let machine = format!("ssh://{}@127.0.0.1:{}", self.user, self.sshd.port);
        let mut all = vec!["on", machine.as_str()];
        all.extend(words);
        let mut command = self.here.command(&all);
        // Under sudo, rockenv would use the calling user's ssh keys.
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        let at = self.place.path().display();
        command.env(
            "ROCKENV_SSH",
            format!(
                "ssh -F '{at}/client' -i '{at}/user' -o IdentitiesOnly=yes -o LogLevel=ERROR -o BatchMode=yes \
                 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
            ),
        );
        command
    }

    fn on(&self, words: &[&str]) -> Ran {
        finish(words.join(" "), self.command(words))
    }

    /// Runs commands there, one per line, and returns what each prints.
    fn shows(&self, commands: &str) -> String {
        let paths = [self.there.home(), self.here.work(), self.place.path()];
        let [home, work, place] = paths.map(|path| path.display().to_string());
        let masks = [
            (home.as_str(), "STORE"),
            (&work, "WORK"),
            (&place, "PLACE"),
            (self.here.env(), "ENV"),
        ];
        let shown = measured(transcript(commands.trim(), &masks, |words| {
            let words: Vec<&str> = words.iter().map(String::as_str).collect();
            self.on(&words)
        }));
        // A fetch of more than two seconds is reported.
        let lines = shown.split_inclusive('\n');
        lines
            .filter(|line| !line.starts_with("fetching `"))
            .collect()
    }

    /// Returns the directory there that the last files were sent to.
    fn work(&self) -> PathBuf {
        let places = self.place.path().join("home/.cache/rockenv/on");
        let place = fs::read_dir(places).unwrap().next().unwrap().unwrap();
        fs::canonicalize(place.path().join("latest")).unwrap()
    }
}

/// Returns the pid of the ssh that a command started.
fn ssh_of(command: i32) -> i32 {
    let mut found = 0;
    let runs = |word: &str| {
        let script = BASE64.decode(word).unwrap_or_default();
        String::from_utf8_lossy(&script).contains("__remote-exec")
    };
    wait_until("ssh runs", || {
        let all = processes();
        let of = |pid: &i32| {
            all.iter()
                .any(|(other, line)| other == pid && line.split_whitespace().any(runs))
        };
        found = children(command).into_iter().find(of).unwrap_or(0);
        found != 0
    });
    found
}

#[test]
fn a_profile_is_built_there_and_what_it_made_is_fetched() {
    let other = Other::new();
    let env = other.here.env();
    let body = "volume = [{ name = 'out', kind = 'output', target = '/out' }]
        [[step]]\nname = 'copy'\ncopy = [{ from = 'it''s.txt', to = '/work/copied' }]
        [[step]]\nname = 'use'\nrun = 'cat /work/copied; cp /work/copied /out/made'\n"
        .replace("it''s", "its");
    other.here.profile(&body);
    let file = other.here.work().join("profiles/its.txt");
    fs::write(&file, "from here\n").unwrap();
    insta::assert_snapshot!(other.shows("
        up ENV
        up ENV
        --fetch results export ENV results
    "), @"
    $ rockenv up ENV
    sending rockenv to root@127.0.0.1
    ENV: 2 steps, 0 done before; engine nspawn (root, and systemd-nspawn is installed)
    step 1/2 copy …
    step 1/2 copy … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    step 2/2 use …
    step 2/2 use … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; to enter it: rockenv shell ENV
    results: STORE/outputs/ENV/out (SIZE)
    $ rockenv up ENV
    ENV: nothing to do
    results: STORE/outputs/ENV/out (SIZE)
    $ rockenv --fetch results export ENV results
    warning: env `ENV` was not built from a lock file, so its manifest has no exact inputs: `rockenv lock ENV`, then `rockenv up ENV --locked`
    exported 1 file; results/ENV.provenance.json describes them
    ");
    // The env is there, and nothing of it is here.
    assert!(other.there.home().join("envs").join(env).exists());
    assert_eq!(
        fs::read_dir(other.here.home().join("envs"))
            .unwrap()
            .count(),
        0
    );
    // Results arrive unchanged, and replace no file here.
    let made = other.here.work().join("results/out/made");
    assert_eq!(fs::read_to_string(&made).unwrap(), "from here\n");
    fs::write(&made, "mine\n").unwrap();
    insta::assert_snapshot!(other.shows("--fetch results ls"), @"
    env  state  profile  targets  image  snapshots  used
    ENV  ready  ENV  base  2  AGE
    error: cannot fetch `results` from root@127.0.0.1
      caused by: `results/out/made` exists already, with different content
    help: mv results/out/made results/out/made.mine
    exit code 2
    ");
    assert_eq!(fs::read_to_string(&made).unwrap(), "mine\n");
    // Changed files go to a new directory there. Results in the first directory stay.
    let first = other.work();
    fs::write(&file, "changed\n").unwrap();
    other.on(&["up", env]).ok().says(&["step 1/2 copy"]);
    let log = other.on(&["logs", env, "use"]).ok().text();
    assert!(log.contains("changed"), "{log}");
    let profile = other
        .here
        .work()
        .join("profiles")
        .join(format!("{env}.toml"));
    fs::remove_file(&profile).unwrap();
    other.on(&["plan", env]).exits(7);
    let listed = other.on(&["ls", "--json"]).ok().text();
    assert!(listed.contains(env), "{listed}");
    assert_ne!(other.work(), first);
    assert!(first.join("results/out/made").exists());
    other.on(&["rm", "--yes", env]).ok();
}

#[test]
fn exit_codes_come_through_and_nothing_goes_on_unseen() {
    let other = Other::new();
    let env = other.here.env();
    other.on(&["bogus"]).exits(2).says(&["Usage: rockenv "]);
    other
        .here
        .profile("[[step]]\nname = 'one'\nrun = 'echo no; exit 3'\n");
    other
        .on(&["up", env])
        .exits(5)
        .says(&["step `one` failed with exit code 3"]);
    let sleeper = other.here.sleeper();
    other
        .here
        .profile(&format!("[[step]]\nname = 'one'\nrun = '{sleeper}'\n"));
    let up = Background::start(other.command(&["up", env]));
    wait_for_process(&sleeper);
    // Killing ssh cuts the connection. Ctrl-C in a terminal reaches ssh as well.
    kill(Pid::from_raw(ssh_of(up.pid())), Signal::SIGKILL).unwrap();
    wait_until("it ends there", || processes_called(&sleeper).is_empty());
    drop(up);
    wait_until("the env is free", || {
        other.on(&["rm", "--yes", env]).code == 0
    });
    // An unreachable machine.
    let words = ["on", "ssh://127.0.0.1:1", "ls"];
    let mut command = other.here.command(&words);
    command.env("ROCKENV_SSH", "ssh -F /dev/null -o BatchMode=yes");
    finish(words.join(" "), command)
        .exits(4)
        .says(&["cannot reach 127.0.0.1 by ssh"]);
    insta::assert_snapshot!(other.shows("--fetch /etc/passwd ls\n--fetch ../x ls"), @"
    $ rockenv --fetch /etc/passwd ls
    error: `/etc/passwd` is not below the working directory
    help: name it relative to the working directory, without `..`
    exit code 2
    $ rockenv --fetch ../x ls
    error: `../x` is not below the working directory
    help: name it relative to the working directory, without `..`
    exit code 2
    ");
}

/// GitHub's runner obeys commands in the output, even if the step ran on another machine.
#[test]
fn no_step_there_commands_a_ci_system_here() {
    let other = Other::new();
    let env = other.here.env();
    let body = "[[step]]\nname = 'one'\nrun = 'echo ::error::mine; echo ::error::mine >&2'\n";
    other.here.profile(body);
    let in_job = |words: &[&str]| {
        let mut command = other.command(words);
        command.env("GITHUB_ACTIONS", "true");
        finish(words.join(" "), command).ok()
    };
    let up = in_job(&["-v", "up", env]);
    assert!(up.err.contains("::group::"), "{}", up.err);
    let shown = [up, in_job(&["logs", env, "one"])].map(|ran| ran.text() + &ran.err);
    for shown in shown {
        assert!(shown.contains("error::mine"), "{shown}");
        let mut obeyed = true;
        for line in shown.lines() {
            match line.trim_start() {
                line if line.starts_with("::stop-commands::") => obeyed = false,
                line if line.starts_with("::rockenv-") => obeyed = true,
                line => assert!(!obeyed || !line.starts_with("::error::"), "{shown}"),
            }
        }
    }
    other.on(&["rm", "--yes", env]).ok();
}

#[test]
fn another_machine_brings_nothing_but_what_was_requested() {
    let store = TestStore::new();
    let evil = tempfile::tempdir().unwrap();
    for path in [
        "out/a",
        ".git/hooks/pre-commit",
        "GNUmakefile",
        "rockenv.toml",
    ] {
        let path = evil.path().join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, "text").unwrap();
    }
    let ssh = evil.path().join("ssh");
    let fetch = |files: &str| {
        // The script neither exits nor closes its output.
        let script = format!(
            "cd '{}' && printf '\nrockenv: output of the script\n' && tar -c -f - -- {files} && exec sleep 100",
            evil.path().display()
        );
        fs::write(&ssh, script).unwrap();
        let words = ["on", "ssh://evil", "--fetch", "out"];
        let mut command = store.command(&words);
        command.env_remove("SUDO_UID").env_remove("SUDO_GID");
        command.env("ROCKENV_SSH", format!("sh '{}'", ssh.display()));
        finish(words.join(" "), command)
    };
    let before = fs::read_dir(store.work()).unwrap().count();
    for (files, other) in [
        (".", "./"),
        ("out .git", ".git/"),
        ("out GNUmakefile", "GNUmakefile"),
        ("rockenv.toml out", "rockenv.toml"),
    ] {
        fetch(files).exits(3).says(&[
            "cannot fetch `out` from evil",
            &format!("it sent `{other}`, which was not requested"),
        ]);
        assert_eq!(fs::read_dir(store.work()).unwrap().count(), before);
    }
}

#[test]
fn what_was_changed_there_is_neither_replaced_nor_removed() {
    let other = Other::new();
    let here = other.here.work().to_owned();
    let write = |name: &str, text: &str| fs::write(here.join(name), text).unwrap();
    let read = |path: &std::path::Path| fs::read_to_string(path).unwrap();
    fs::create_dir(here.join("data")).unwrap();
    write("data/in", "from here\n");
    write("data/same", "from here\n");
    fs::create_dir_all(other.place.path().join("home")).unwrap();
    other.on(&["--send", "data", "ls"]).ok();
    // A command there replaces a sent file, adds one and removes one.
    let work = other.work();
    fs::write(work.join("data/in"), "result\n").unwrap();
    fs::write(work.join("data/made"), "made\n").unwrap();
    fs::remove_file(work.join("data/same")).unwrap();
    // The results can be fetched until the next send, which gets a fresh directory.
    insta::assert_snapshot!(other.shows("--fetch data/in"), @"
    error: cannot fetch `data/in` from root@127.0.0.1
      caused by: `data/in` exists already, with different content
    help: mv data/in data/in.mine
    exit code 2
    ");
    fs::rename(here.join("data/in"), here.join("data/in.mine")).unwrap();
    other.on(&["--fetch", "data"]).ok();
    assert_eq!(read(&here.join("data/in")), "result\n");
    assert_eq!(read(&here.join("data/made")), "made\n");
    fs::remove_file(here.join("data/made")).unwrap();
    fs::rename(here.join("data/in.mine"), here.join("data/in")).unwrap();
    other
        .on(&["--send", "data", "ls"])
        .ok()
        .says(&["`data/in` was changed on root@127.0.0.1 since it was sent: keeping it in `~/.cache/rockenv/on/"]);
    let fresh = other.work();
    assert_eq!(read(&fresh.join("data/in")), "from here\n");
    assert_eq!(read(&fresh.join("data/same")), "from here\n");
    assert_eq!(read(&work.join("data/in")), "result\n");
    // Changes and deletions here go to a new directory there.
    write("data/in", "changed here\n");
    fs::remove_file(here.join("data/same")).unwrap();
    other.on(&["--send", "data", "ls"]).ok();
    assert_eq!(read(&other.work().join("data/in")), "changed here\n");
    assert!(!other.work().join("data/same").exists());
    assert_eq!(read(&fresh.join("data/same")), "from here\n");
    assert_eq!(read(&work.join("data/made")), "made\n");
    insta::assert_snapshot!(other.shows("--send absent ls"), @"
    error: cannot send `absent`
      caused by: `absent` does not exist
    help: --send takes a path below the working directory
    exit code 7
    ");
}

#[test]
fn a_sender_that_is_killed_leaves_no_half_of_a_directory() {
    let other = Other::new();
    let here = other.here.work().to_owned();
    let files: Vec<String> = (0..200).map(|number| format!("data/{number}")).collect();
    fs::create_dir(here.join("data")).unwrap();
    let write = |text: &str| {
        for file in &files {
            fs::write(here.join(file), text.repeat(1000)).unwrap();
        }
    };
    write("first");
    other.on(&["--send", "data"]).ok();
    let (work, first) = (other.work(), "first".repeat(1000));
    let arrived = || fs::read_dir(work.with_file_name("new/data")).map_or(0, Iterator::count);
    for (round, count) in [1, 20, 100, 195].into_iter().enumerate() {
        write(&format!("round {round}"));
        let mut sending = Background::start(other.command(&["--send", "data"]));
        while sending.runs() && arrived() < count {
            std::thread::yield_now();
        }
        // Kills the receiver and the sender. The path tells them from those of other tests.
        for (pid, line) in processes() {
            if line.contains("__receive") && line.contains(&*other.place.path().to_string_lossy()) {
                let _: nix::Result<()> = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        drop(sending);
        for file in &files {
            assert_eq!(fs::read_to_string(work.join(file)).unwrap(), first);
        }
    }
    write("last");
    other.on(&["--send", "data"]).ok();
    let of = |directory: &PathBuf| {
        let texts = fs::read_dir(directory.join("data")).unwrap();
        let read = |entry: std::io::Result<fs::DirEntry>| fs::read_to_string(entry.unwrap().path());
        texts.map(|entry| read(entry).unwrap()).collect::<Vec<_>>()
    };
    assert_eq!(of(&other.work()), vec!["last".repeat(1000); files.len()]);
    // Only whole directories are there: a round was too late to stop its sender, or left nothing.
    for entry in fs::read_dir(work.parent().unwrap()).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        if !["lock", "latest"].contains(&name) {
            let texts = of(&path);
            assert_eq!(texts.len(), files.len(), "{name}");
            assert!(texts.iter().all(|text| *text == texts[0]), "{name}");
        }
    }
}

#[test]
fn with_sudo_an_ordinary_user_is_root_there() {
    let other = Other::with_sudo(&format!("{} ALL=(root) NOPASSWD: ALL", USER.0));
    let env = other.here.env();
    let sudo = |words: &[&str]| other.on(&[&["--sudo"], words].concat());
    other.here.profile(
        "volume = [{ name = 'out', kind = 'output', target = '/out' }]
        [[step]]\nname = 'one'\nrun = 'umask 077; id -u > /out/user; mkdir /out/deep; echo deep > /out/deep/file'\n",
    );
    sudo(&["up", env]).ok();
    assert!(other.there.home().join("envs").join(env).exists());
    sudo(&["--fetch", "results", "export", env, "results"]).ok();
    let results = other.here.work().join("results/out");
    let user = fs::read_to_string(results.join("user")).unwrap();
    assert_eq!(user, format!("{}\n", USER.1));
    assert_eq!(
        fs::read_to_string(results.join("deep/file")).unwrap(),
        "deep\n"
    );
    for (code, passed_on) in [(1, 1), (7, 7), (255, 254)] {
        let script = format!("exit {code}");
        let ran = sudo(&["exec", env, "--", "sh", "-c", &script]).exits(passed_on);
        assert!(!ran.err.contains("sudo"), "{}", ran.err);
    }
    insta::assert_snapshot!(other.shows("--fetch nothing"), @"
    error: cannot fetch `nothing` from rockenv-on@127.0.0.1
      caused by: there is no such file
    help: --fetch takes a path below ~/.cache/rockenv/on/ID/latest there, which corresponds to the working directory
    exit code 7
    ");
    // A command under sudo ends with its connection and on Ctrl-C, although the user cannot signal root's processes.
    let sleeper = other.here.sleeper();
    other
        .here
        .profile(&format!("[[step]]\nname = 'one'\nrun = '{sleeper}'\n"));
    let up = Background::start(other.command(&["--sudo", "up", env]));
    wait_for_process(&sleeper);
    kill(Pid::from_raw(ssh_of(up.pid())), Signal::SIGKILL).unwrap();
    wait_until("it ends there", || processes_called(&sleeper).is_empty());
    drop(up);
    let mut terminal = Terminal::start(other.command(&["--sudo", "up", env]), 33, 101);
    wait_for_process(&sleeper);
    terminal.write("\x03");
    terminal.expect("finished steps are kept");
    terminal.wait(130);
    sudo(&["rm", "--yes", env]).ok();
}

#[test]
fn a_sudo_that_refuses_is_told_from_a_command_that_failed() {
    let other = Other::with_sudo("");
    other.on(&["--sudo", "ls"]).exits(4).says(&[
        "sudo: a password is required",
        "does not run rockenv",
        "NOPASSWD",
    ]);
}

/// Blocks every open of a file until `meanwhile` allows it.
pub(crate) struct OpenGuard(Fanotify);

impl OpenGuard {
    pub(crate) fn new(file: &Path) -> Self {
        let flags = InitFlags::FAN_CLASS_CONTENT | InitFlags::FAN_CLOEXEC;
        let group = Fanotify::init(flags, EventFFlags::O_RDONLY).unwrap();
        let (add, open) = (MarkFlags::FAN_MARK_ADD, MaskFlags::FAN_OPEN_PERM);
        group.mark(add, open, AT_FDCWD, Some(file)).unwrap();
        Self(group)
    }

    /// Waits until a process opens the file, does the work, and then allows all opens.
    pub(crate) fn meanwhile(self, work: impl FnOnce()) {
        let mut poll = [PollFd::new(self.0.as_fd(), PollFlags::POLLIN)];
        let ready = nix::poll::poll(&mut poll, PollTimeout::from(60_000_u16)).unwrap();
        assert_eq!(ready, 1, "nobody opens it");
        work();
        for event in self.0.read_events().unwrap() {
            let allow = FanotifyResponse::new(event.fd().unwrap(), Response::FAN_ALLOW);
            self.0.write_response(allow).unwrap();
        }
    }
}

/// A profile that changes after the check against the trusted files is sent, but does not apply there.
#[test]
fn what_was_trusted_is_what_applies_there() {
    let other = Other::new();
    let work = other.here.work();
    let trusting = |mut command: Command| {
        command.env_remove("ROCKENV_TRUSTED_DIRS");
        command
    };
    let profiles = work.join("profiles");
    let own = profiles.join("a.toml");
    let good = "schema = 1\nimage = 'base'\ndescription = 'as trusted'\n[[step]]\nname = 'a'\nrun = 'true'\n";
    fs::write(&own, good).unwrap();
    std::os::unix::fs::symlink("a.toml", profiles.join("link.toml")).unwrap();
    // `zzz` is read after the profile.
    let last = profiles.join("zzz");
    fs::write(&last, "").unwrap();
    let mut trust = trusting(other.here.command(&["trust", "--yes"]));
    trust.env_remove("SUDO_UID").env_remove("SUDO_GID");
    finish("trust".to_owned(), trust).ok();
    let show = |name| trusting(other.command(&["profile", "show", name]));
    for name in ["a", "link"] {
        let shown = finish(name.to_owned(), show(name)).ok();
        assert!(shown.text().contains("as trusted"), "{}", shown.text());
    }
    fs::write(work.join("aside"), good.replace("as trusted", "swapped")).unwrap();
    let guard = OpenGuard::new(&last);
    let showing = Background::start(show("a"));
    guard.meanwhile(|| fs::rename(work.join("aside"), &own).unwrap());
    let shown = showing.wait();
    insta::assert_snapshot!(shown.shown(), @"
    error: the received profiles, images, hooks and rockenv.toml differ from the trusted files
    help: rockenv trust, then run it again; a link must not lead out of the directory
    exit code 3
    ");
    // By now the profile has changed, and this side refuses it.
    finish("a".to_owned(), show("a"))
        .exits(7)
        .says(&["has changed: profiles/"]);
}
