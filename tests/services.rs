//! What only engines that are services have: images and containers that somebody else can delete, and a socket on which
//! anything may happen. `tests/service docker|podman cargo test --test services` runs them beside a real one.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

#[path = "services/faults.rs"]
mod faults;
#[path = "services/idle.rs"]
mod idle;
#[path = "services/restart.rs"]
mod restart;

use std::path::PathBuf;

use fs_err as fs;
use rockenv::engine::docker::Service;
use support::env::TestStore;

/// One step with a build volume, which user files and an output go through.
const TWO: &str = "volume = [{ name = 'b', kind = 'build', target = '/b' }, { name = 'out', kind = 'output', target = '/out' }]
     [[step]]\nname = 'one'\nrun = 'echo one > ~/one; echo $$ > /b/pid; echo 1 >> /out/log'
     [[step]]\nname = 'two'\nrun = 'cat ~/one; echo two > ~/two; echo 2 >> /out/log'\n";

/// Returns the service that `tests/service` started.
fn service() -> Service {
    Service::connect(&socket()).unwrap()
}

fn socket() -> PathBuf {
    let host = std::env::vars_os()
        .find(|(name, _)| name == "DOCKER_HOST" || name == "CONTAINER_HOST")
        .expect("run by tests/service")
        .1;
    PathBuf::from(host.to_str().unwrap().strip_prefix("unix://").unwrap())
}

/// Fails unless the service has nothing of the store but its images.
fn assert_nothing_left(store: &TestStore) {
    assert_nothing_left_at(&service(), store);
}

fn assert_nothing_left_at(service: &Service, store: &TestStore) {
    let home = store.home().to_str().unwrap();
    support::env::wait_for(
        std::time::Duration::from_secs(60),
        "something is left at the service",
        || {
            let containers = service.containers("store", home).unwrap();
            let images = service.images("store", home).unwrap();
            if containers.is_empty() && images.is_empty() {
                return Ok(());
            }
            // Whatever could not be removed is tried again by the next command.
            store.rockenv(&["fsck", "--repair"]);
            Err(format!("{containers:?} {images:?}"))
        },
    );
}

#[test]
fn differences_are_of_content() {
    let store = TestStore::new();
    store.up_with(TWO);
    store
        .sh("rm ~/one; mkdir ~/d; echo a > ~/d/a; chmod 700 ~/two")
        .ok();
    let of = |arguments: &[&str]| {
        let mut words = vec!["snapshot", "diff", store.env()];
        words.extend(arguments);
        store.rockenv(&words).ok().text()
    };
    let text = of(&["two"]);
    for line in [
        "D /home/builder/one",
        "A /home/builder/d",
        "A /home/builder/d/a",
        "C /home/builder/two",
    ] {
        assert!(text.lines().any(|found| found == line), "{line}: {text}");
    }
    let text = of(&["one", "two"]);
    assert!(
        text.contains("A /home/builder/two") && !text.contains("/etc"),
        "{text}"
    );
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn what_somebody_deleted_is_said_and_built_again() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    let service = service();
    let home = store.home().to_str().unwrap();
    // The container, and with it what was changed since the last snapshot.
    for (container, _) in service.containers("store", home).unwrap() {
        service.remove_container(&container).unwrap();
    }
    store.sh("cat ~/two; test ! -e ~/mine").ok().prints("two");
    for (container, _) in service.containers("store", home).unwrap() {
        service.remove_container(&container).unwrap();
    }
    for (image, _) in service.images("store", home).unwrap() {
        service.remove_image(&image).unwrap();
    }
    store
        .sh("true")
        .exits(7)
        .says(&["deleted from", "rockenv up"]);
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(plan.contains("behind rockenv's back"), "{plan}");
    store.up().ok();
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    // The base image too.
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    let images = fs::read_dir(store.home().join("images")).unwrap();
    for entry in images.flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.len() == 64 {
            let name = format!("rockenv/image-{}", &name[..32]);
            // Podman may still be busy with the last container on it.
            let patience = std::time::Duration::from_secs(30);
            support::env::wait_for(patience, "the image stays", || {
                let removed = service.remove_image(&name);
                removed.map_err(|error| error.chain().join(": "))
            });
        }
    }
    store.up().ok().says(&["copying the image"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn changes_survive_a_container_that_is_set_up_anew() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    let (service, home) = (service(), store.home().to_str().unwrap());
    let (container, labels) = service.containers("store", home).unwrap().remove(0);
    // As when rockenv is killed between freezing the old container and making the new one.
    let name = format!("rockenv/carried-{}", labels["rockenv.tree"]);
    service.commit(&container, &name).unwrap();
    service.remove_container(&container).unwrap();
    store.sh("cat ~/mine").ok().prints("mine");
    store
        .rockenv(&["snapshot", "create", store.env(), "kept"])
        .ok();
    store
        .rockenv(&["--yes", "rollback", store.env(), "two"])
        .ok();
    store.sh("test ! -e ~/mine").ok();
    store
        .rockenv(&["--yes", "rollback", store.env(), "kept"])
        .ok();
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn an_env_stays_with_its_engine() {
    let store = TestStore::new();
    store.up_with(TWO);
    store
        .rockenv(&["up", store.env(), "--engine", "nspawn"])
        .exits(2)
        .says(&["was made with", "--name NEW"]);
    // Its steps are not the other's: two engines, two trees.
    let other = format!("{}-n", store.env());
    store
        .rockenv(&["up", store.env(), "--engine", "nspawn", "--name", &other])
        .ok();
    store
        .rockenv(&["exec", &other, "--", "cat", "two"])
        .ok()
        .prints("two");
    store.rockenv(&["rm", "--yes", store.env(), &other]).ok();
    assert_nothing_left(&store);
}

#[test]
fn more_snapshots_than_an_image_has_layers() {
    let store = TestStore::new();
    store.up_with(TWO);
    for n in 0..130 {
        store.sh(&format!("echo {n} >> ~/n")).ok();
        store
            .rockenv(&["snapshot", "create", store.env(), &format!("s{n}")])
            .ok();
    }
    store
        .sh("wc -l < ~/n; cat ~/one; id -un")
        .ok()
        .prints("130\none\nbuilder");
    store
        .rockenv(&["--yes", "rollback", store.env(), "s7"])
        .ok();
    store.sh("wc -l < ~/n").ok().prints("8");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}
