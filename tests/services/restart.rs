//! A service that restarts while a step runs. The test starts its own, because other tests use the usual one.

use std::io::{BufRead as _, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use rockenv::testing::Service;

use crate::assert_nothing_left_at;
use crate::support::env::TestStore;
use crate::support::run::{Background, Ran, processes, wait_until};

/// The second step runs until the test releases it.
const WAITS: &str = "volume = [{ name = 'b', kind = 'build', target = '/b' }, { name = 'out', kind = 'output', target = '/out' },
        { name = 'log', kind = 'cache', target = '/log' }]
     [[step]]\nname = 'one'\nrun = 'echo one > ~/one; echo 1 >> /log/log'
     [[step]]\nname = 'two'\nrun = '''echo 2 >> /log/log; echo b >> /b/b; touch /out/began
     until [ -e /out/go ]; do sleep 0.05; done; cat ~/one; echo two > ~/two'''\n";

/// A service of the test's own.
pub(crate) struct Own {
    child: Child,
    directory: PathBuf,
    engine: String,
}

impl Own {
    pub(crate) fn start() -> Self {
        let engine = std::env::vars_os()
            .find(|(name, _)| name == "ROCKENV_TEST_ENGINE")
            .expect("run by tests/service")
            .1
            .into_string()
            .unwrap();
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/service");
        let rootless = std::env::vars_os().any(|(name, _)| name == "ROCKENV_TEST_USER");
        let service = if rootless { "rootless" } else { &engine };
        let mut child = Command::new(script)
            .args([service, "sh", "-c", "echo $ROCKENV_TEST_SERVICE; exec cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap())
            .read_line(&mut line)
            .unwrap();
        Self {
            child,
            directory: line.trim().into(),
            engine,
        }
    }

    pub(crate) fn socket(&self) -> PathBuf {
        self.directory.join(format!("{}.sock", self.engine))
    }

    /// Makes a command use this service.
    pub(crate) fn lead(&self, command: &mut Command) {
        for name in ["DOCKER_HOST", "CONTAINER_HOST"] {
            command.env(name, format!("unix://{}", self.socket().display()));
        }
    }

    fn begin(&self, store: &TestStore, arguments: &[&str]) -> Background {
        let mut command = store.command(arguments);
        self.lead(&mut command);
        Background::start(command)
    }

    pub(crate) fn run(&self, store: &TestStore, arguments: &[&str]) -> Ran {
        self.begin(store, arguments).wait()
    }

    /// Ends the service; [`Own::come_back`] restarts it.
    fn go_down(&self, signal: Signal) {
        fs::write(self.directory.join("down"), "").unwrap();
        // An ordinary user's Podman has a second process, with the same arguments, that survives if only the first is
        // killed, answers in place of the next service, and removes the next service's socket when it ends.
        let address = format!("unix://{}", self.socket().display());
        let serving = || {
            let mut all = processes();
            all.retain(|(_, line)| line.contains(&address));
            all
        };
        for (pid, _) in serving() {
            // It may have ended with the other one.
            let _: nix::Result<()> = kill(Pid::from_raw(pid), signal);
        }
        wait_until("the service has ended", || serving().is_empty());
        // A killed service leaves its socket.
        drop(fs::remove_file(self.socket()));
    }

    fn come_back(&self) {
        fs::remove_file(self.directory.join("down")).unwrap();
        wait_until("the service is back", || {
            Service::connect(&self.socket()).is_ok()
        });
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        // The service runs until its command reaches the end of standard input.
        drop(self.child.stdin.take());
        drop(self.child.wait());
    }
}

#[test]
fn a_service_that_is_started_again_loses_nothing() {
    let own = Own::start();
    let store = TestStore::new();
    store.profile(WAITS);
    let out = store.out();
    let log = || fs::read_to_string(store.home().join("caches/log/log")).unwrap();
    let begun = || wait_until("the step has begun", || out.join("began").exists());

    // The service is down when the step ends, so the result of the step waits for it.
    let up = own.begin(&store, &["up", store.env()]);
    begun();
    own.go_down(Signal::SIGKILL);
    fs::write(out.join("go"), "").unwrap();
    std::thread::sleep(std::time::Duration::from_secs(1));
    own.come_back();
    up.wait().ok();
    let cat = ["exec", store.env(), "--", "cat", "one", "two", "/b/b"];
    own.run(&store, &cat).ok().prints("one\ntwo\nb");
    assert_eq!(log(), "1\n2\n");

    // Docker ends its containers on SIGTERM; Podman's keep running.
    for file in ["began", "go"] {
        fs::remove_file(out.join(file)).unwrap();
    }
    let up = own.begin(&store, &["up", store.env(), "--rerun", "two"]);
    begun();
    own.go_down(Signal::SIGTERM);
    own.come_back();
    if own.engine == "docker" {
        up.wait().exits(4).says(&[
            "the container of step `two` was stopped by another process",
            "help: rockenv up",
        ]);
        fs::write(out.join("go"), "").unwrap();
        own.run(&store, &["up", store.env(), "--rerun", "two"]).ok();
        assert_eq!(log(), "1\n2\n2\n2\n");
    } else {
        fs::write(out.join("go"), "").unwrap();
        up.wait().ok();
        assert_eq!(log(), "1\n2\n2\n");
    }
    own.run(&store, &cat[..5]).ok().prints("one");
    own.run(&store, &["rm", "--yes", store.env()]).ok();
    let service = Service::connect(&own.socket()).unwrap();
    assert_nothing_left_at(&service, &store);
}
