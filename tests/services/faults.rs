//! A service that fails at the n-th request: a relay between rockenv and the real service refuses, hangs, closes,
//! answers nonsense or 500, or kills rockenv. Afterwards the next `up` must converge.

use std::io::{Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use fs_err as fs;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use rockenv::testing::Flavour;

use crate::support::env::TestStore;
use crate::support::ordinary::Ordinary;
use crate::support::run::Background;
use crate::{TWO, assert_nothing_left, on_image_of, socket};

/// The fault at the n-th request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fault {
    None,
    /// From this request on, every connection is closed.
    Refuse,
    /// No answer arrives, and rockenv gets SIGINT.
    Hang,
    /// The first matching request does not reach the service, and its connection stays open.
    Lose,
    /// The connection closes before the answer.
    Close,
    Garbage,
    Error500,
    /// The request reaches the service, and rockenv is killed.
    Kill,
    /// The request does not reach the service, rockenv is killed, and no answer ever arrives.
    Deaf,
}

/// The relay: its socket, and the planned fault.
struct Relay {
    path: PathBuf,
    _directory: tempfile::TempDir,
    plan: Arc<Plan>,
}

#[derive(Debug)]
struct Plan {
    fault: Mutex<Fault>,
    at: AtomicUsize,
    /// Text of the request to fail at, instead of a number.
    to: Mutex<Option<&'static str>>,
    seen: AtomicUsize,
    /// The process to signal.
    pid: AtomicI32,
}

impl Relay {
    fn start() -> Self {
        let directory = tempfile::Builder::new()
            .prefix("relay")
            .tempdir_in("/tmp")
            .unwrap();
        let path = directory.path().join("socket");
        let listener = UnixListener::bind(&path).unwrap();
        if let Some(user) = Ordinary::get() {
            user.own(directory.path());
            user.own(&path);
        }
        let plan = Arc::new(Plan {
            fault: Mutex::new(Fault::None),
            at: AtomicUsize::new(usize::MAX),
            to: Mutex::new(None),
            seen: AtomicUsize::new(0),
            pid: AtomicI32::new(0),
        });
        let theirs = plan.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                let plan = theirs.clone();
                std::thread::spawn(move || relay(client, &plan));
            }
        });
        Self {
            path,
            _directory: directory,
            plan,
        }
    }

    /// Plans a fault at the n-th request from now, counting from 1.
    fn plan(&self, fault: Fault, at: usize) {
        self.plan.seen.store(0, Ordering::SeqCst);
        self.plan.at.store(at, Ordering::SeqCst);
        *self.plan.fault.lock().unwrap() = fault;
    }

    fn up(&self, store: &TestStore) -> Background {
        let mut command = store.command(&["up", store.env()]);
        for name in ["DOCKER_HOST", "CONTAINER_HOST"] {
            command.env(name, format!("unix://{}", self.path.display()));
        }
        let up = Background::start(command);
        self.plan.pid.store(up.pid(), Ordering::SeqCst);
        up
    }
}

/// Relays one connection until its fault.
fn relay(mut client: UnixStream, plan: &Plan) {
    let Ok(mut server) = UnixStream::connect(socket()) else {
        return;
    };
    let (mut from, mut to) = (server.try_clone().unwrap(), client.try_clone().unwrap());
    std::thread::spawn(move || {
        drop(std::io::copy(&mut from, &mut to));
        drop(to.shutdown(std::net::Shutdown::Both));
    });
    let mut buffer = vec![0; 64 << 10];
    while let Ok(count @ 1..) = client.read(&mut buffer) {
        let piece = &buffer[..count];
        let request = ["GET /", "POST /", "DELETE /", "HEAD /"]
            .iter()
            .any(|method| piece.starts_with(method.as_bytes()));
        let seen = if request {
            plan.seen.fetch_add(1, Ordering::SeqCst) + 1
        } else {
            0
        };
        let fault = *plan.fault.lock().unwrap();
        let at = plan.at.load(Ordering::SeqCst);
        let to = *plan.to.lock().unwrap();
        let due = match fault {
            _ if to.is_some_and(|to| String::from_utf8_lossy(piece).contains(to)) => true,
            Fault::Refuse => seen >= at,
            _ => seen == at,
        };
        if request && due {
            let answer: &[u8] = match fault {
                Fault::None => b"",
                Fault::Refuse | Fault::Close => {
                    drop(client.shutdown(std::net::Shutdown::Both));
                    return;
                }
                Fault::Hang => {
                    std::thread::sleep(Duration::from_millis(300));
                    signal(plan, Signal::SIGINT);
                    std::thread::sleep(Duration::from_secs(5));
                    return;
                }
                Fault::Lose => {
                    *plan.fault.lock().unwrap() = Fault::None;
                    *plan.to.lock().unwrap() = None;
                    std::thread::park();
                    return;
                }
                Fault::Deaf => {
                    signal(plan, Signal::SIGKILL);
                    std::thread::park();
                    return;
                }
                Fault::Garbage => b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n\x00nonsense",
                Fault::Error500 => b"HTTP/1.1 500 Oops\r\nContent-Type: application/json\r\nContent-Length: 22\r\n\r\n{\"message\":\"on fire\"}\n",
                Fault::Kill => {
                    drop(server.write_all(piece));
                    signal(plan, Signal::SIGKILL);
                    continue;
                }
            };
            if !answer.is_empty() {
                drop(client.write_all(answer));
                drop(client.shutdown(std::net::Shutdown::Both));
                return;
            }
        }
        if server.write_all(piece).is_err() {
            return;
        }
    }
    drop(server.shutdown(std::net::Shutdown::Write));
}

fn signal(plan: &Plan, signal: Signal) {
    // The process may have ended by itself.
    let _: nix::Result<()> = kill(Pid::from_raw(plan.pid.load(Ordering::SeqCst)), signal);
}

#[test]
fn whatever_the_service_does_the_next_up_converges() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    let user = store.work().join("mine");
    fs::write(&user, "mine").unwrap();
    // Counts the requests of a run without a fault.
    relay.plan(Fault::None, usize::MAX);
    relay.up(&store).wait().ok();
    let requests = relay.plan.seen.load(Ordering::SeqCst);
    // A slow machine polls more often.
    assert!((20..5000).contains(&requests), "{requests} requests");
    let faults = [
        Fault::Error500,
        Fault::Kill,
        Fault::Close,
        Fault::Garbage,
        Fault::Hang,
        Fault::Refuse,
    ];
    // Neighbouring requests get different faults; each fault occurs about twice.
    let step = (requests / (2 * faults.len())).max(1);
    for (turn, at) in (1..=requests).step_by(step).enumerate() {
        let fault = faults[turn % faults.len()];
        store.rockenv(&["rm", "--yes", store.env()]).ok();
        relay.plan(fault, at);
        let ran = relay.up(&store).wait();
        eprintln!("{fault:?} at {at} of {requests}: exit code {}", ran.code);
        relay.plan(Fault::None, usize::MAX);
        match fault {
            Fault::Kill => assert!(matches!(ran.code, 0 | 137), "{fault:?} at {at}: {ran:?}"),
            Fault::Hang => assert!(
                matches!(ran.code, 0 | 1 | 4 | 130),
                "{fault:?} at {at}: {ran:?}"
            ),
            _ => {
                assert!(
                    matches!(ran.code, 0 | 1 | 4 | 7),
                    "{fault:?} at {at}: {ran:?}"
                );
                assert!(!ran.text().contains("panicked"), "{ran:?}");
            }
        }
        let again = relay.up(&store).wait();
        assert_eq!(again.code, 0, "after {fault:?} at {at}: {again:?}");
        store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
        assert_eq!(fs::read_to_string(&user).unwrap(), "mine");
    }
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    assert!(Path::new(&user).exists());
}

#[test]
fn an_import_that_hangs_can_be_interrupted() {
    let relay = Relay::start();
    let store = TestStore::new();
    // An image that no other test has imported, and larger than the buffers on the way.
    let tree = store.work().join("tree");
    fs::create_dir_all(tree.join("etc")).unwrap();
    fs::write(tree.join("big"), vec![7; 16 << 20]).unwrap();
    on_image_of(&store, &tree);
    *relay.plan.to.lock().unwrap() = Some("/images/create");
    relay.plan(Fault::Hang, usize::MAX);
    relay.up(&store).wait().exits(130);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}

/// A holder makes the container while `up` waits for it.
#[test]
fn a_container_that_nobody_answers_for_can_be_given_up() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    *relay.plan.to.lock().unwrap() = Some("/containers/create");
    relay.plan(Fault::Hang, usize::MAX);
    relay.up(&store).wait().exits(130);
    *relay.plan.to.lock().unwrap() = None;
    relay.plan(Fault::None, usize::MAX);
    relay.up(&store).wait().ok();
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn a_request_for_a_container_that_is_lost_is_made_again() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    *relay.plan.to.lock().unwrap() = Some("/containers/create");
    relay.plan(Fault::Lose, usize::MAX);
    let up = relay.up(&store).wait().ok();
    up.says(&["is taking longer than 10 s to make a container"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

/// The background process deletes, and all other deletions wait for it.
#[test]
fn a_removal_that_is_lost_is_made_again() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    relay.up(&store).wait().ok();
    *relay.plan.to.lock().unwrap() = Some("DELETE /");
    relay.plan(Fault::Lose, usize::MAX);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    assert_eq!(*relay.plan.fault.lock().unwrap(), Fault::None);
}

#[test]
fn a_holder_does_not_outlive_a_killed_up_at_a_service_that_hangs() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    *relay.plan.to.lock().unwrap() = Some("/start");
    relay.plan(Fault::Deaf, usize::MAX);
    relay.up(&store).wait().exits(137);
    store.assert_clean();
    *relay.plan.to.lock().unwrap() = None;
    relay.plan(Fault::None, usize::MAX);
    relay.up(&store).wait().ok();
}

#[test]
fn a_service_that_is_down_is_said_to_be() {
    let store = TestStore::new();
    store.profile(TWO);
    for name in ["DOCKER_HOST", "CONTAINER_HOST"] {
        let mut command = store.command(&["up", store.env()]);
        command.env(name, "unix:///nowhere/socket").env(
            "ROCKENV_ENGINE",
            match name {
                "DOCKER_HOST" => "docker",
                _ => "podman",
            },
        );
        Background::start(command)
            .wait()
            .exits(4)
            .says(&["no service answers at `/nowhere/socket`", "restart"]);
    }
}

/// The process next to a container is root of a namespace, although its starter is not root.
#[test]
fn the_service_to_start_again_is_the_user_s_own() {
    let relay = Relay::start();
    let store = TestStore::new();
    store.profile(TWO);
    *relay.plan.to.lock().unwrap() = Some("/start");
    relay.plan(Fault::Close, usize::MAX);
    let rootless = std::env::vars_os().any(|(name, _)| name == "ROCKENV_TEST_USER");
    let systemd = Path::new("/run/systemd/system").is_dir();
    let init = Path::new("/etc/init.d/docker").exists();
    let restart = match (crate::service().flavour, rootless) {
        (Flavour::Docker, _) if systemd => "help: systemctl restart docker",
        (Flavour::Docker, _) if init => "help: service docker restart",
        (Flavour::Docker, _) => "help: dockerd &",
        (Flavour::Podman, false) if systemd => "help: systemctl restart podman.socket",
        (Flavour::Podman, false) => "help: podman system service --time=0 unix:",
        (Flavour::Podman, true) if systemd => "help: systemctl --user restart podman.socket",
        (Flavour::Podman, true) => "help: podman system service --time=0 &",
    };
    relay
        .up(&store)
        .wait()
        .exits(4)
        .says(&["closed the connection", restart]);
    *relay.plan.to.lock().unwrap() = None;
    relay.plan(Fault::None, usize::MAX);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
}
