//! Snapshots that move from a service to a registry or into files, and into another store at a service that has none of
//! them.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use fs_err as fs;
use rockenv::testing::Service;
use rockenv::testing::Store;
use rockenv::testing::digest::digest;

use crate::restart::Own;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::registry::Registry;
use crate::support::run::{Ran, finish};
use crate::{assert_nothing_left, assert_nothing_left_at, service};

/// Deletions, replaced directories, hard links, owners, times, attributes, build volumes, and a step without changes.
const STEPS: &str = r#"
volume = [{ name = 'b', kind = 'build', target = '/b' }]
[[step]]
name = "one"
user = "root"
run = '''
mkdir -p /opt/a/b /opt/gone /opt/again/old && cd /opt
echo one > a/one; ln a/one a/b/two; echo gone > gone/file; echo old > again/old/file
truncate -s 4M sparse; cp /bin/true capable; ln -s nowhere link; mkfifo fifo
chown 1234:1234 fifo; chmod 4755 capable; touch -d @1000000000 a/one
[ ! -d /b ] || { echo one > /b/one; ln /b/one /b/same; touch -d @1700000000.5 /b/one; }
'''
[[step]]
name = "two"
user = "root"
run = '''
cd /opt; rm -r gone again; mkdir again; echo new > again/new; rm link /bin/false; mkdir link; touch link/inside
echo two > a/three; ln a/three a/four; chmod 700 a
[ ! -d /b ] || { echo two > /b/two; rm /b/same; }
'''
[[step]]
name = "idle"
run = "true"
[[step]]
name = "last"
run = "echo last > $HOME/last"
"#;

/// Lists everything in the image except what a service makes itself, such as the root directory's mode.
const LOOK: &str = "cd /; find . -xdev -mindepth 1 -path ./proc -prune -o -path ./sys -prune -o -path ./dev -prune -o -path ./run -prune \
    -o -path ./tmp -prune -o -path ./var/tmp -prune -o -path ./etc/hostname -o -path ./etc/hosts -o -path ./etc/mtab -o -path ./etc/resolv.conf \
    -o -path ./b -prune -o -name .dockerenv -o -type f -printf '%P %m %U:%G %s %T@\\n' -exec sha256sum {} + \
    -o -type d -printf '%P %m %U:%G\\n' -o -printf '%P %y %m %U:%G %l\\n' | sed -E 's/\\.[0-9]{10}$//' | sort";

fn without_volume() -> String {
    STEPS.replacen(
        "volume = [{ name = 'b', kind = 'build', target = '/b' }]",
        "",
        1,
    )
}

/// Two machines and a registry. Both stores use one service, which has nothing of the first when the second begins.
struct Two {
    registry: Registry,
    one: TestStore,
    other: TestStore,
}

impl Two {
    fn new(one: TestStore, other: TestStore, body: &str) -> Self {
        for store in [&one, &other] {
            store.profile_named(one.env(), body);
        }
        Self {
            registry: Registry::start(false),
            one,
            other,
        }
    }

    fn name(&self) -> &str {
        self.one.env()
    }

    fn command(&self, store: &TestStore, words: &[&str]) -> std::process::Command {
        let mut command = store.command(words);
        let repository = format!("{}/team/rocm", self.registry.host);
        command.env("ROCKENV_REGISTRY", repository);
        command
    }

    fn run(&self, store: &TestStore, words: &[&str]) -> Ran {
        finish(words.join(" "), self.command(store, words))
    }

    fn inside(&self, store: &TestStore, script: &str) -> String {
        let words = ["exec", "--root", self.name(), "--", "sh", "-c", script];
        store.rockenv(&words).ok().text()
    }

    /// Removes everything that a store has at the service.
    fn remove(&self, store: &TestStore) {
        store.rockenv(&["rm", "--yes", self.name()]).ok();
        assert_nothing_left(store);
    }
}

fn volumes(store: &TestStore, name: &str) -> Vec<String> {
    let store = Store::open_existing(store.home()).unwrap().unwrap();
    let record = store.record(&name.parse().unwrap()).unwrap().unwrap();
    let chain = store.chain(record.head.layer.as_ref().unwrap()).unwrap();
    let of = |path: &Path| digest(path, &AtomicBool::new(false)).unwrap().digest;
    let volumes = chain
        .iter()
        .map(|layer| store.layer_dir(&layer.id).join("volumes/b"));
    volumes.map(|volume| of(&volume)).collect()
}

#[track_caller]
fn assert_same(found: &str, expected: &str) {
    let missing = |from: &str, other: &str| -> Vec<String> {
        let other: std::collections::BTreeSet<&str> = other.lines().collect();
        let lines = from.lines().filter(|line| !other.contains(line));
        lines.map(str::to_owned).collect()
    };
    let differs = (missing(found, expected), missing(expected, found));
    assert_eq!(differs, (Vec::new(), Vec::new()), "found, and expected");
    assert!(found.lines().count() > 100, "{found}");
}

#[test]
fn what_one_store_pushed_another_pulls_and_builds_nothing() {
    let two = Two::new(TestStore::new(), TestStore::new(), &without_volume());
    let (one, other, name) = (&two.one, &two.other, two.name());
    one.rockenv(&["up", name]).ok();
    let push = |words: &[&str]| two.run(one, &[&["push", name], words].concat()).ok();
    push(&["--until", "two"]).says(&["2 snapshots at", "3 layers sent"]);
    push(&[]).says(&["4 snapshots at", "2 layers sent", "3 already there"]);
    push(&[]).says(&["0 layers sent", "5 already there"]);
    let tree = two.inside(one, LOOK);
    two.remove(one);
    let plan = two.run(other, &["plan", name, "--pull"]).ok().text();
    assert_eq!(plan.matches("pulled from").count(), 4, "{plan}");
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, two, idle, last from", "4 done before"]);
    assert_same(&two.inside(other, LOOK), &tree);
    two.inside(
        other,
        "test ! -e /opt/gone && test ! -e /bin/false && test /opt/a/one -ef /opt/a/b/two",
    );
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["nothing to do"]);
    two.run(other, &["pull", name])
        .ok()
        .says(&["the store already has all of it"]);
    other.rockenv(&["fsck"]).ok();
    // Pulled snapshots can be pushed unchanged, and serve as the base of new ones.
    two.run(other, &["push", name])
        .ok()
        .says(&["0 layers sent", "5 already there"]);
    let changed = without_volume().replace("echo last", "echo other");
    other.profile_named(name, &changed);
    two.run(other, &["up", name, "--pull", "--push"])
        .ok()
        .says(&["3 done before", "4 snapshots at", "1 layer sent"]);
    two.remove(other);
}

/// All engines share one format: a tree does not show which engine made it.
#[test]
fn snapshots_cross_engines() {
    let two = Two::new(TestStore::new(), TestStore::new(), &without_volume());
    let (one, other, name) = (&two.one, &two.other, two.name());
    one.rockenv(&["up", name, "--engine", "nspawn"]).ok();
    two.run(one, &["push", name]).ok();
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, two, idle, last from", "4 done before"]);
    let own = two.inside(one, LOOK);
    assert_same(&two.inside(other, LOOK), &own);
    // Back again, through a repository that has none of the layers.
    let again = format!("{}/again", two.registry.host);
    two.run(other, &["push", name, &again])
        .ok()
        .says(&["5 layers sent"]);
    one.rockenv(&["rm", "--yes", name]).ok();
    one.rockenv(&["gc", "--yes"]).ok();
    let words = ["up", name, "--engine", "nspawn", "--pull"];
    let mut command = two.command(one, &words);
    command.env("ROCKENV_REGISTRY", &again);
    finish("up".into(), command).ok().says(&["4 done before"]);
    assert_same(&two.inside(one, LOOK), &own);
    // A file contains the same layers.
    let file = other.work().join("snapshots.oci.tar");
    let file = file.to_str().unwrap();
    other.rockenv(&["export", name, "--snapshots", file]).ok();
    one.rockenv(&["import", "--engine", "nspawn", file])
        .ok()
        .says(&["the store already has all"]);
    two.remove(other);
    // Snapshots that the store got from the file without a service also reach the service.
    let file = one.work().join("snapshots");
    let file = file.to_str().unwrap();
    one.rockenv(&["export", name, "--snapshots", file]).ok();
    other
        .rockenv(&["import", file])
        .ok()
        .says(&["imported one, two, idle, last from"]);
    other.rockenv(&["up", name]).ok().says(&["4 done before"]);
    assert_same(&two.inside(other, LOOK), &own);
    two.remove(other);
}

/// A store may have a snapshot of each engine for one key. None hides another, whichever was first.
#[test]
fn each_engine_finds_its_own_snapshots() {
    let two = Two::new(TestStore::new(), TestStore::new(), &without_volume());
    let (one, other, name) = (&two.one, &two.other, two.name());
    other.rockenv(&["up", name]).ok();
    let up = |env: &str, more: &[&str]| {
        let words = [&["up", name, "--name", env], more].concat();
        two.run(other, &words).ok().says(&["4 done before"]);
    };
    let envs = ["pulled", "second", "third"].map(|end| format!("{name}-{end}"));
    one.rockenv(&["up", name, "--engine", "nspawn"]).ok();
    two.run(one, &["push", name]).ok();
    up(&envs[0], &["--engine", "nspawn", "--pull"]);
    up(&envs[1], &["--engine", "nspawn"]);
    up(&envs[2], &[]);
    for env in &envs {
        other.rockenv(&["rm", "--yes", env]).ok();
    }
    two.remove(other);
    two.remove(one);
}

/// From a file, a directory, and by name from a registry: each import uses the engine that a new env would have.
#[test]
fn a_new_store_takes_what_a_file_has_and_builds_nothing() {
    let two = Two::new(TestStore::new(), TestStore::new(), &without_volume());
    let (one, other, name) = (&two.one, &two.other, two.name());
    one.rockenv(&["up", name]).ok();
    let tree = two.inside(one, LOOK);
    for form in ["snapshots.oci.tar", "snapshots"] {
        let file = one.work().join(form);
        let file = file.to_str().unwrap();
        one.rockenv(&["export", name, "--until", "two", "--snapshots", file])
            .ok();
        other
            .rockenv(&["import", file])
            .ok()
            .says(&["one, two from"]);
        let all = format!("{file}-all.tar");
        one.rockenv(&["export", name, "--snapshots", &all]).ok();
        other
            .rockenv(&["import", &all])
            .ok()
            .says(&["imported idle, last from"]);
        other
            .rockenv(&["import", &all])
            .ok()
            .says(&["the store already has all of it"]);
        other.rockenv(&["up", name]).ok().says(&["4 done before"]);
        assert_same(&two.inside(other, LOOK), &tree);
        other.rockenv(&["fsck"]).ok();
        two.remove(other);
    }
    let tag = format!("{}/team/rocm:last", two.registry.host);
    one.rockenv(&["push", name, &tag]).ok();
    other.rockenv(&["pull", &tag]).ok();
    other.rockenv(&["up", name]).ok().says(&["4 done before"]);
    other
        .rockenv(&["pull", name, "--engine", "nspawn"])
        .exits(2)
        .says(&["cannot change its engine"]);
    two.remove(one);
    two.remove(other);
}

/// Two real machines: each store has its own service.
#[test]
fn build_volumes_come_with_them() {
    // Mounted before the services start, which would not see them otherwise.
    let disks = [LoopFs::with_base(Kind::Btrfs), LoopFs::new(Kind::Btrfs)];
    let services = [Own::start(), Own::start()];
    let stores = [&disks[0], &disks[1]].map(TestStore::on);
    let [one, other] = stores;
    let two = Two::new(one, other, STEPS);
    let name = two.name();
    let run = |at: usize, words: &[&str]| {
        let mut command = two.command([&two.one, &two.other][at], words);
        services[at].lead(&mut command);
        finish(words.join(" "), command).ok()
    };
    run(0, &["up", name, "--push"]).says(&["4 snapshots at"]);
    run(1, &["up", name, "--pull"]).says(&[
        "pulled the image and one, two, idle, last from",
        "4 done before",
    ]);
    assert_eq!(volumes(&two.other, name), volumes(&two.one, name));
    let look = "cat /b/one /b/two /home/*/last; ls /b";
    let look = ["exec", name, "--", "sh", "-c", look];
    run(1, &look).prints("one\ntwo\nlast\none\ntwo");
    // The same through a file.
    let file = two.one.work().join("snapshots.oci.tar");
    let file = file.to_str().unwrap();
    run(0, &["export", name, "--snapshots", file]);
    run(1, &["rm", "--yes", name]);
    assert_nothing_left_at(
        &Service::connect(&services[1].socket()).unwrap(),
        &two.other,
    );
    run(1, &["import", file]).says(&["one, two, idle, last from"]);
    run(1, &["up", name]).says(&["4 done before"]);
    assert_eq!(volumes(&two.other, name), volumes(&two.one, name));
    run(1, &look).prints("one\ntwo\nlast\none\ntwo");
    for (at, store) in [&two.one, &two.other].into_iter().enumerate() {
        run(at, &["rm", "--yes", name]);
        assert_nothing_left_at(&Service::connect(&services[at].socket()).unwrap(), store);
    }
}

/// Commands are killed at random points; the next one continues, and leaves nothing of theirs.
#[test]
fn whoever_is_killed_leaves_nothing_and_the_next_one_converges() {
    let body = "[[step]]\nname = 'one'\nrun = 'head -c 20M /dev/urandom > $HOME/one'\n\
        [[step]]\nname = 'two'\nrun = 'head -c 20M /dev/urandom > $HOME/two'\n";
    let two = Two::new(TestStore::new(), TestStore::new(), body);
    let (one, other, name) = (&two.one, &two.other, two.name());
    one.rockenv(&["up", name]).ok();
    let kill = |store: &TestStore, words: &[&str]| {
        let mut killed = 0;
        for wait in [150, 300, 600, 1000] {
            let mut running = two.command(store, words).spawn().unwrap();
            std::thread::sleep(std::time::Duration::from_millis(wait));
            killed += usize::from(running.try_wait().unwrap().is_none());
            running.kill().unwrap();
            running.wait().unwrap();
        }
        assert!(killed > 0, "{words:?} was never killed");
    };
    kill(one, &["push", name]);
    two.run(one, &["push", name]).ok().says(&["2 snapshots at"]);
    let sums = two.inside(one, "cd /home/*; sha256sum one two");
    let file = one.work().join("snapshots.oci.tar");
    let file = file.to_str().unwrap();
    one.rockenv(&["export", name, "--snapshots", file]).ok();
    two.remove(one);
    let import = &["import", file][..];
    let pull = &["up", name, "--pull"];
    for (from, then) in [(import, Some(["up", name])), (pull, None)] {
        kill(other, from);
        let brought = two.run(other, from).ok();
        let up = then.map_or(brought, |then| other.rockenv(&then).ok());
        up.says(&["2 done before"]);
        assert_eq!(two.inside(other, "cd /home/*; sha256sum one two"), sums);
        assert_nothing_half(&two);
        two.remove(other);
    }
}

/// Checks that killed commands left nothing unfinished in the store or at the service.
#[track_caller]
fn assert_nothing_half(two: &Two) {
    let (other, name) = (&two.other, two.name());
    let left = fs::read_dir(other.home().join("images")).unwrap();
    let left = left.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    assert_eq!(left.filter(|name| name.starts_with("tmp-")).count(), 0);
    other.rockenv(&["down", name]).ok();
    let home = other.home().to_str().unwrap().to_owned();
    crate::support::run::wait_for("containers of killed pulls are left", || {
        let containers = service().containers("store", &home).unwrap();
        let pulls = containers
            .iter()
            .filter(|(_, labels)| labels["rockenv.env"].is_empty());
        match pulls.count() {
            0 => Ok(()),
            count => Err(count.to_string()),
        }
    });
}

#[test]
fn what_was_tampered_with_is_refused() {
    let body = "[[step]]\nname = 'one'\nrun = 'echo one > $HOME/one'\n";
    let two = Two::new(TestStore::new(), TestStore::new(), body);
    let (one, other, name) = (&two.one, &two.other, two.name());
    two.run(one, &["up", name, "--push"]).ok();
    let store = Store::open_existing(one.home()).unwrap().unwrap();
    let key = store
        .record(&name.parse().unwrap())
        .unwrap()
        .unwrap()
        .steps
        .pop()
        .unwrap()
        .key
        .unwrap();
    let shared = store
        .shared_layer(&key.into())
        .unwrap()
        .unwrap()
        .tree
        .unwrap();
    let (blob, good) = two.registry.spoil(&shared.sha256);
    two.run(other, &["up", name, "--pull"])
        .exits(8)
        .says(&["has SHA-256"]);
    let theirs = Store::open_existing(other.home()).unwrap().unwrap();
    assert!(theirs.layers().unwrap().is_empty());
    fs::write(&blob, good).unwrap();
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["1 done before"]);
    // The record names a snapshot that the service has lost, so the plan refuses it however often it is pulled.
    let (service, home) = (service(), other.home().to_str().unwrap());
    let lose = || {
        for (container, _) in service.containers("store", home).unwrap() {
            service.remove_container(&container).unwrap();
        }
        for (image, _) in service.images("store", home).unwrap() {
            service.remove_image(&image).unwrap();
        }
    };
    lose();
    two.run(other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one from", "1 step, 0 done before"]);
    other.rockenv(&["rm", "--yes", name]).ok();
    // The pulled snapshot, which no env uses.
    lose();
    assert_nothing_left(other);
    two.remove(one);
}
