//! Other commands that work in a store during a pull.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fs_err as fs;
use nix::sys::signal::Signal;
use rockenv::testing::catalog;
use rockenv::testing::{Lock, Store};

use super::Two;
use super::proxy::{Fault, Proxy};
use crate::support::env::TestStore;
use crate::support::loopfs::run;
use crate::support::run::{Background, HANGS, wait_until};

const ONE: &str = "[[step]]\nname = 'one'\nrun = 'head -c 1M /dev/urandom > $HOME/one'\n";
const TWO: &str = "[[step]]\nname = 'two'\nrun = 'head -c 1M /dev/urandom > $HOME/two'\n";

/// Two machines, and two steps that the first one has pushed.
struct Pushed {
    two: Two,
    name: String,
    /// The registry's digest of each step's layer.
    layers: [String; 2],
}

impl Pushed {
    fn new() -> Self {
        let two = Two::new(TestStore::new(), TestStore::new());
        let name = two.pushed(&format!("{ONE}{TWO}")).to_owned();
        let store = Store::open_existing(two.one.home()).unwrap().unwrap();
        let layers = two.one.keys(&name).into_iter().map(|(_, key)| {
            let shared = store.shared_layer(&key.parse().unwrap()).unwrap().unwrap();
            shared.tree.unwrap().sha256.to_string()
        });
        let layers: Vec<String> = layers.collect();
        Self {
            two,
            name,
            layers: layers.try_into().unwrap(),
        }
    }

    /// Starts `up --pull` on the other machine, where one layer arrives only after the flag is set.
    fn pull_without(&self, layer: &str) -> (Background, Arc<AtomicBool>) {
        let (go, layer) = (Arc::new(AtomicBool::new(false)), format!("sha256:{layer} "));
        let flag = Arc::clone(&go);
        let proxy = Proxy::start(&self.two.registry.host, move |head| {
            let is_layer = head.starts_with("GET ") && head.contains(&layer);
            Fault::Crawls(Arc::clone(&flag)).when(is_layer)
        });
        let mut command = self.two.other.command(&["up", &self.name, "--pull"]);
        command.env("ROCKENV_REGISTRY", proxy.repository());
        // The other commands may take longer than the minute for which a server may be slow by default.
        command.env("ROCKENV_HTTP_TIMEOUT", "600s");
        (Background::start(command), go)
    }
}

#[test]
fn gc_leaves_downloads_to_a_pull() {
    let pushed = Pushed::new();
    let other = &pushed.two.other;
    let (pull, go) = pushed.pull_without(&pushed.layers[0]);
    let second = other.home().join("blobs/sha256").join(&pushed.layers[1]);
    wait_until("the second layer is there", || second.exists());
    // Old enough for `gc` to remove it, however much space is free.
    let policy = "[gc]\nkeep-at-least = '0'\nmin-free = '0'\nolder-than = '7d'\n";
    fs::write(other.work().join("rockenv.toml"), policy).unwrap();
    run(Command::new("touch").args(["-d", "@1"]).arg(&second));
    other.rockenv(&["gc"]).ok();
    assert!(second.exists());
    go.store(true, Ordering::Relaxed);
    let up = pull.wait().ok();
    up.says(&["pulled one, two from", "2 steps, 2 done before"]);
    pushed.two.assert_same(&pushed.name);
    assert!(!second.exists());
}

#[test]
fn what_another_up_finishes_meanwhile_is_in_nobodys_way() {
    let pushed = Pushed::new();
    let other = &pushed.two.other;
    let (pull, go) = pushed.pull_without(&pushed.layers[1]);
    wait_until("the first step is unpacked", || {
        let images = fs::read_dir(other.home().join("images"));
        let mut images = images.into_iter().flatten().flatten();
        images.any(|work| work.path().join("step-1").is_dir())
    });
    let own = format!("{}-own", other.env());
    other.profile_named(&own, ONE);
    other.rockenv(&["up", &own]).ok().says(&["step 1/1 one"]);
    go.store(true, Ordering::Relaxed);
    let up = pull.wait().ok();
    up.says(&["pulled one, two from", "2 steps, 2 done before"]);
    pushed.two.assert_same(&pushed.name);
    // The store has both layers, each with its own content.
    let store = Store::open_existing(other.home()).unwrap().unwrap();
    let key = &other.keys(&own)[0].1;
    let layers = store.layers().unwrap();
    let same = layers
        .iter()
        .filter(|layer| layer.key.as_deref() == Some(key.as_str()));
    assert_eq!(same.count(), 2);
    let print = |env: &str| {
        let inside = other.sh_in(env, "sha256sum $HOME/one");
        inside.ok().text()
    };
    assert_ne!(print(&own), print(&pushed.name));
    other.rockenv(&["fsck"]).ok();
}

/// Runs a command that waits for a lock that the test holds. Stops it once it says so, and returns its output.
fn stopped(mut command: Command, lock: &Path, verb: &str, signal: Signal) -> String {
    // A child process of another test may hold the open lock file until it calls exec.
    let _lock = Lock::exclusive(lock, "it", verb, HANGS).unwrap();
    let said = tempfile::NamedTempFile::new().unwrap();
    command.stderr(said.reopen().unwrap());
    let mut waiting = Background::start(command);
    let says = format!(
        "waits for `rockenv {verb}` (process {}, ",
        std::process::id()
    );
    let read = || fs::read_to_string(said.path()).unwrap();
    wait_until("it waits", || {
        assert!(waiting.runs(), "{}", read());
        read().contains(&says)
    });
    waiting.signal(signal);
    waiting.wait().exits(128 + signal as i32);
    assert_eq!(read().matches(&says).count(), 1, "{}", read());
    read()
}

#[test]
fn a_pull_that_waits_for_another_one_can_be_stopped() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(ONE);
    let lock = two.other.home().join("images/refs/pull.lock");
    let mut command = two.other.command(&["up", name, "--pull"]);
    command.env("ROCKENV_REGISTRY", two.repository());
    stopped(command, &lock, "pull", Signal::SIGINT);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one from"]);
}

#[test]
fn an_image_build_that_waits_for_another_one_can_be_stopped() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let store = TestStore::at(&place.path().join("store"));
    drop(Store::open(store.home()).unwrap());
    let recipe = catalog::find(&[store.work().join("images").into()], "base").unwrap();
    let refs = store.home().join("images/refs");
    fs::create_dir_all(&refs).unwrap();
    let lock = refs.join(format!("{}.lock", recipe.digest()));
    let command = store.command(&["image", "build", "base"]);
    stopped(command, &lock, "image build", Signal::SIGTERM);
    store.profile(ONE);
    let again = ["up", store.env(), "--rerun", "one"];
    let said = stopped(store.command(&again), &lock, "image build", Signal::SIGINT);
    assert!(said.contains(&again.join(" ")), "{said}");
}
