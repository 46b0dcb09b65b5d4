//! rockenv on another machine, by a real sshd on loopback: a home and a store of its own stand for the other machine. Needs root.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

use std::net::{TcpListener, TcpStream};
use std::process::{Child, Command, Stdio};

use fs_err as fs;
use support::env::TestStore;
use support::loopfs::run;
use support::run::{Background, Ran, finish, processes_called, wait_until};

/// The other machine.
struct Other {
    here: TestStore,
    there: TestStore,
    place: tempfile::TempDir,
    port: u16,
    sshd: Child,
}

impl Drop for Other {
    fn drop(&mut self) {
        drop(self.sshd.kill());
        drop(self.sshd.wait());
    }
}

impl Other {
    fn new() -> Self {
        let (here, there) = (TestStore::new(), TestStore::new());
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
        let at = place.path().display();
        for key in ["host", "user"] {
            run(Command::new("ssh-keygen")
                .args(["-q", "-t", "ed25519", "-N", "", "-f"])
                .arg(place.path().join(key)));
        }
        fs::create_dir(place.path().join("home")).unwrap();
        // Where sshd locks itself up; Debian makes it when its service starts.
        fs::create_dir_all("/run/sshd").unwrap();
        let port = {
            let listener = TcpListener::bind("127.0.0.1:0").unwrap();
            listener.local_addr().unwrap().port()
        };
        let config = format!(
            "ListenAddress 127.0.0.1\nPort {port}\nHostKey {at}/host\nAuthorizedKeysFile {at}/user.pub\n\
             StrictModes no\nUsePAM no\nPidFile none\nPermitRootLogin yes\nPasswordAuthentication no\n\
             SetEnv HOME={at}/home ROCKENV_HOME={} ROCKENV_BUILD_USER=1234:1234\n",
            there.home().display()
        );
        fs::write(place.path().join("config"), config).unwrap();
        // Not a child of sshd's own making: `-D` stays, and is ended by its number.
        let sshd = Command::new("/usr/sbin/sshd")
            .args(["-D", "-f"])
            .arg(place.path().join("config"))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        wait_until("sshd listens", || {
            TcpStream::connect(("127.0.0.1", port)).is_ok()
        });
        Self {
            here,
            there,
            place,
            port,
            sshd,
        }
    }

    fn command(&self, words: &[&str]) -> Command {
        let machine = format!("ssh://root@127.0.0.1:{}", self.port);
        let mut all = vec!["on", machine.as_str()];
        all.extend(words);
        let mut command = self.here.command(&all);
        command.env(
            "ROCKENV_SSH",
            format!(
                "ssh -F /dev/null -i '{}' -o IdentitiesOnly=yes -o LogLevel=ERROR -o BatchMode=yes \
                 -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null",
                self.place.path().join("user").display()
            ),
        );
        command
    }

    fn on(&self, words: &[&str]) -> Ran {
        finish(words.join(" "), self.command(words))
    }
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
    other
        .on(&["up", env])
        .ok()
        .says(&["sending rockenv to root@127.0.0.1"]);
    // It is there, and nothing of it here.
    assert!(other.there.home().join("envs").join(env).exists());
    assert_eq!(
        fs::read_dir(other.here.home().join("envs"))
            .unwrap()
            .count(),
        0
    );
    let again = other.on(&["up", env]).ok().says(&["nothing to do"]);
    assert!(!again.err.contains("sending"), "{}", again.err);
    // Results come as they are, and replace nothing here.
    let words = ["--fetch", "results", "export", env, "results"];
    other.on(&words).ok();
    let made = other.here.work().join("results/out/made");
    assert_eq!(fs::read_to_string(&made).unwrap(), "from here\n");
    fs::write(&made, "mine\n").unwrap();
    other
        .on(&["--fetch", "results", "ls"])
        .exits(1)
        .says(&["cannot fetch `results`"]);
    assert_eq!(fs::read_to_string(&made).unwrap(), "mine\n");
    // What changed here changes there, what is gone here goes, and what was made there stays.
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
    let works = other.place.path().join("home/.cache/rockenv/on");
    let work = fs::read_dir(works).unwrap().next().unwrap().unwrap().path();
    assert!(work.join("work/results/out/made").exists());
    other.on(&["rm", "--yes", env]).ok();
}

#[test]
fn exit_codes_come_through_and_nothing_goes_on_unseen() {
    let other = Other::new();
    let env = other.here.env();
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
    wait_until("the step runs", || !processes_called(&sleeper).is_empty());
    // Killed here, and its ssh is told nothing.
    drop(up);
    wait_until("it ends there", || processes_called(&sleeper).is_empty());
    wait_until("the env is free", || {
        other.on(&["rm", "--yes", env]).code == 0
    });
    // A machine that is not there.
    let words = ["on", "ssh://127.0.0.1:1", "ls"];
    let mut command = other.here.command(&words);
    command.env("ROCKENV_SSH", "ssh -F /dev/null -o BatchMode=yes");
    finish(words.join(" "), command)
        .exits(4)
        .says(&["cannot reach 127.0.0.1 by ssh"]);
    for path in ["/etc/passwd", "../x"] {
        other
            .on(&["--fetch", path, "ls"])
            .exits(2)
            .says(&["is not below the working directory"]);
    }
}
