//! Behaviour that only engines with a service have: other clients can delete images and containers, and the socket can
//! fail in any way. `tests/service docker|podman cargo test --test services` runs these tests with a real service.

#![expect(
    clippy::unwrap_used,
    reason = "a test that cannot be set up has failed"
)]

mod support;

#[path = "services/du.rs"]
mod du;
#[path = "services/faults.rs"]
mod faults;
#[path = "services/repair.rs"]
mod repair;
#[path = "services/restart.rs"]
mod restart;
#[path = "services/setuid.rs"]
mod setuid;
#[path = "services/share.rs"]
mod share;
#[path = "services/volumes.rs"]
mod volumes;

use std::path::{Path, PathBuf};
use std::process::Command;

use fs_err as fs;
use rockenv::testing::Service;
use support::env::TestStore;
use support::loopfs::{bind, run};
use support::template::write_recipe;

/// Two steps, with a build volume, user files and an output that both steps touch.
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

/// Fails if the service has anything of the store except its images.
fn assert_nothing_left(store: &TestStore) {
    assert_nothing_left_at(&service(), store);
}

fn assert_nothing_left_at(service: &Service, store: &TestStore) {
    let home = store.home().to_str().unwrap();
    support::run::wait_for("something is left at the service", || {
        let containers = service.containers("store", home).unwrap();
        let images = service.images("store", home).unwrap();
        if containers.is_empty() && images.is_empty() {
            return Ok(());
        }
        // The next command retries failed removals.
        store.rockenv(&["fsck", "--repair"]);
        Err(format!("{containers:?} {images:?}"))
    });
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
    own_image(&store);
    store.up().ok();
    store.sh("echo mine > ~/mine").ok();
    let service = service();
    let home = store.home().to_str().unwrap();
    // Removes the container, and with it the changes since the last snapshot.
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
    assert!(plan.contains("outside rockenv"), "{plan}");
    store.up().ok();
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    // Now the base image as well.
    let image = image_name(&store);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    // Podman may still be removing the last container on it.
    support::run::wait_for("the image stays", || {
        let removed = service.remove_image(&image);
        removed.map_err(|error| error.chain().join(": "))
    });
    store.up().ok().says(&["copying the image"]);
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn an_image_that_cannot_be_packed_is_not_imported() {
    let (service, name) = (service(), "rockenv/image-half");
    // Root cannot read some files of the kernel either: tar leaves them out, and fails at its end.
    for tree in ["/missing", "/sys/bus/cpu"] {
        let error = service.import(Path::new(tree), name, "half").unwrap_err();
        assert!(error.chain().concat().contains("`tar` failed"), "{error:?}");
        assert_eq!(service.image(name).unwrap(), None);
    }
}

#[test]
fn builds_that_begin_together_copy_the_image_once() {
    let store = TestStore::new();
    own_image(&store);
    let other = format!("{}-other", store.env());
    let both = std::thread::scope(|scope| {
        [store.env(), &other]
            .map(|name| {
                scope
                    .spawn(|| store.rockenv(&["up", store.env(), "--name", name, "--until", "one"]))
            })
            .map(|up| up.join().unwrap().ok().err)
    });
    let copies = both.iter().filter(|err| err.contains("copying the image"));
    assert_eq!(copies.count(), 1, "{both:?}");
    store.rockenv(&["rm", "--yes", store.env(), &other]).ok();
    assert_nothing_left(&store);
}

#[test]
fn changes_survive_a_container_that_is_set_up_anew() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.sh("echo mine > ~/mine").ok();
    let (service, home) = (service(), store.home().to_str().unwrap());
    let (container, labels) = service.containers("store", home).unwrap().remove(0);
    // A rockenv killed between freezing the old container and making the new one leaves this state.
    let name = format!("rockenv/carried-{}", labels["rockenv.tree"]);
    service.commit(&container, &name, None).unwrap();
    service.remove_container(&container).unwrap();
    store.sh("cat ~/mine").ok().prints("mine");
    let create = ["snapshot", "create", store.env(), "kept"];
    // The service makes the snapshot's image, and the store cannot record it.
    let layers = store.home().join("layers");
    let mounted = bind(&layers, &layers);
    store.rockenv(&create).exits(1);
    drop(mounted);
    store.sh("cat ~/mine").ok().prints("mine");
    store.rockenv(&create).ok();
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

/// Root in a container can write to the directory of its agent's socket. Without root, other owners inside have the
/// user's subordinate ids.
#[test]
fn a_directory_in_place_of_the_agents_socket_is_removed() {
    let store = TestStore::new();
    store.up_with(
        "[[step]]\nname = 'one'\nuser = 'root'\nrun = '''cd /run/rockenv/agent; mkdir -p socket/below
         chown -R 1000:1000 socket; chmod -R 700 socket'''
         [[step]]\nname = 'two'\nrun = 'true'\n",
    );
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

/// Writes profile [`TWO`] with an image that no other test's store has. It is small, because the service copies it.
fn own_image(store: &TestStore) {
    let tree = store.work().join("tree");
    let script = r#"
        mkdir -p "$2/root" "$2/tmp" "$2/var/tmp"
        cd "$1"
        cp -a --parents -t "$2" bin lib lib64 etc/passwd etc/group etc/os-release usr/lib/os-release usr/bin/sh \
            usr/bin/dash usr/bin/cat usr/lib64/ld-linux-x86-64.so.2 usr/lib/*/ld-linux-x86-64.so.2 usr/lib/*/libc.so.6"#;
    let mut copy = Command::new("sh");
    run(copy
        .args(["-euc", script, "sh"])
        .args([&support::rootfs(), &tree]));
    on_image_of(store, &tree);
}

/// Writes profile [`TWO`] with image `own`, which is a copy of this tree.
fn on_image_of(store: &TestStore, tree: &Path) {
    write_recipe(&store.work().join("images/own.toml"), tree);
    let profile = format!("schema = 1\nimage = \"own\"\n{TWO}");
    let path = format!("profiles/{}.toml", store.env());
    fs::write(store.work().join(path), profile).unwrap();
}

/// Returns the service's name for the env's image.
fn image_name(store: &TestStore) -> String {
    let record = store.record();
    format!(
        "rockenv/image-{}-{}",
        &record["image_key"].as_str().unwrap()[..32],
        fs::read_to_string(store.home().join("id")).unwrap().trim()
    )
}

/// Gives a name to an image that contains only one file.
fn take_name(store: &TestStore, name: &str) -> String {
    let tree = store.work().join("theirs");
    fs::create_dir_all(&tree).unwrap();
    fs::write(tree.join("file"), name).unwrap();
    service().import(&tree, name, "theirs").unwrap()
}

#[test]
fn a_name_given_to_another_image_is_not_used_and_stays_with_it() {
    let store = TestStore::new();
    own_image(&store);
    store.up().ok();
    let (service, home) = (service(), store.home().to_str().unwrap());
    let mut taken = Vec::new();
    for (_, labels) in service.images("store", home).unwrap() {
        taken.push(format!("rockenv/snapshot-{}", labels["rockenv.tree"]));
    }
    assert_eq!(taken.len(), 2);
    taken.push(image_name(&store));
    let theirs: Vec<String> = taken.iter().map(|name| take_name(&store, name)).collect();
    // Containers start, which would fail with any of these images.
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    store
        .rockenv(&["--yes", "rollback", store.env(), "one"])
        .ok();
    store.sh("cat ~/one; test ! -e ~/two").ok().prints("one");
    store.rockenv(&["up", store.env(), "--rerun", "one"]).ok();
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    // The image that carries changes while a container is set up anew is found by its name, which is verified.
    let (container, labels) = service.containers("store", home).unwrap().remove(0);
    let carried = format!("rockenv/carried-{}", labels["rockenv.tree"]);
    take_name(&store, &carried);
    service.remove_container(&container).unwrap();
    store
        .sh("true")
        .exits(1)
        .says(&["reassigned outside rockenv", &carried, "rmi"]);
    service.remove_image(&carried).unwrap();
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    for (name, id) in taken.iter().zip(&theirs) {
        assert_eq!(service.image(name).unwrap().unwrap().id, *id, "{name}");
        service.remove_image(name).unwrap();
    }
}

/// Steps that leave nothing outside their root file system.
const PLAIN: &str = "volume = [{ name = 'out', kind = 'output', target = '/out' }]
     [[step]]\nname = 'one'\nrun = 'echo one > ~/one; echo 1 >> /out/log'
     [[step]]\nname = 'two'\nrun = 'cat ~/one; echo two > ~/two; echo 2 >> /out/log'
     [[step]]\nname = 'three'\nrun = 'cat ~/two; echo three > ~/three; echo 3 >> /out/log'\n";

impl TestStore {
    /// Deletes everything that the store knows except its images.
    fn lose(&self) {
        // A background process may still mark layers, and a directory that it writes to cannot be removed.
        self.settle();
        for name in ["envs", "layers", "volumes"] {
            fs::remove_dir_all(self.home().join(name)).unwrap();
            fs::create_dir(self.home().join(name)).unwrap();
        }
    }

    /// Returns the action that `plan` shows for each step.
    fn plan(&self) -> Vec<String> {
        let plan = self.rockenv(&["plan", "--json", self.env()]).ok().json();
        let steps = plan["plan"]["steps"].as_array().unwrap();
        let action = |step: &serde_json::Value| step["action"].as_str().unwrap().to_owned();
        steps.iter().map(action).collect()
    }
}

#[test]
fn snapshots_that_the_store_forgot_are_found_by_their_keys() {
    let store = TestStore::new();
    store.profile(PLAIN);
    store.rockenv(&["up", store.env(), "--until", "two"]).ok();
    let log = || {
        let outputs = store.home().join("outputs").join(store.env());
        fs::read_to_string(outputs.join("out/log")).unwrap()
    };
    store.lose();
    assert_eq!(store.plan(), ["hit", "hit", "run"]);
    store.up().ok().says(&["found 2 lost snapshots at "]);
    assert_eq!(log(), "1\n2\n3\n");
    store
        .sh("cat ~/one ~/two ~/three")
        .ok()
        .prints("one\ntwo\nthree");
    store.up().ok().says(&["nothing to do"]);
    store
        .rockenv(&["--yes", "rollback", store.env(), "one"])
        .ok();
    store.sh("test ! -e ~/two").ok();
    // Snapshots that are being removed are not found again.
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    store.up().ok();
    assert_eq!(log(), "1\n2\n3\n1\n2\n3\n");
    store.settle();
    // Another user reassigns the last snapshot's name to a changed image.
    store.sh("echo changed > ~/three").ok();
    let (service, home) = (service(), store.home().to_str().unwrap());
    let (container, _) = service.containers("store", home).unwrap().remove(0);
    let images = service.images("store", home).unwrap();
    let last = images
        .iter()
        .map(|(id, _)| service.image(id).unwrap().unwrap())
        .max_by_key(|image| image.layers)
        .unwrap();
    let name = format!("rockenv/snapshot-{}", last.labels["rockenv.tree"]);
    service.commit(&container, &name, None).unwrap();
    service.remove_container(&container).unwrap();
    store.lose();
    assert_eq!(store.plan(), ["hit", "hit", "run"]);
    store.up().ok();
    store.sh("cat ~/three").ok().prints("three");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    for id in [&name, &last.id] {
        service.remove_image(id).unwrap();
    }
    assert_nothing_left(&store);
}

#[test]
fn a_snapshot_of_another_store_is_not_this_one_s() {
    let store = TestStore::new();
    store.profile(PLAIN);
    store.rockenv(&["up", store.env(), "--until", "one"]).ok();
    store.lose();
    // An image from elsewhere can have this store's path and a step's key, but not this store's id.
    let file = store.home().join("id");
    let own = fs::read_to_string(&file).unwrap();
    fs::write(&file, "0".repeat(own.trim().len())).unwrap();
    assert_eq!(store.plan(), ["run", "run", "run"]);
    fs::write(&file, own).unwrap();
    assert_eq!(store.plan(), ["hit", "run", "run"]);
    store.up().ok();
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn a_base_image_of_another_store_is_not_this_one_s() {
    let store = TestStore::new();
    own_image(&store);
    store.up().ok().says(&["copying the image"]);
    let (first, id) = (image_name(&store), store.home().join("id"));
    let again = || {
        store.rockenv(&["rm", "--yes", store.env()]).ok();
        let up = store.up().ok();
        up.err.contains("copying the image")
    };
    for image in fs::read_dir(store.home().join("images")).unwrap() {
        // Otherwise the store finds the image by the id in this file.
        drop(fs::remove_file(image.unwrap().path().join("objects.json")));
    }
    assert!(!again());
    let own = fs::read_to_string(&id).unwrap();
    fs::write(&id, "0".repeat(own.trim().len())).unwrap();
    // The file has the first image's id with a name that is not this store's, as version 0.1.0 wrote it.
    assert!(again());
    service().remove_image(&first).unwrap();
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
    fs::write(&id, own).unwrap();
}

#[test]
fn a_forgotten_snapshot_without_its_build_volumes_is_built_again() {
    let store = TestStore::new();
    store.up_with(TWO);
    store.lose();
    assert_eq!(store.plan(), ["run", "run"]);
    store.up().ok();
    store.sh("cat ~/one ~/two; cat /b/pid").ok();
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
        .says(&["was created with", "--name NEW"]);
    // The two engines share no steps, because their trees differ.
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
    let step = |n: u32| format!("[[step]]\nname = 's{n}'\nrun = 'echo {n} >> ~/n'\n");
    let steps: String = (0..100).map(step).collect();
    store.up_with(&format!("{TWO}{steps}"));
    for n in 100..103 {
        store.sh(&format!("echo {n} >> ~/n")).ok();
        store
            .rockenv(&["snapshot", "create", store.env(), &format!("s{n}")])
            .ok();
    }
    store
        .sh("wc -l < ~/n; cat ~/one; id -un")
        .ok()
        .prints("103\none\nbuilder");
    // Docker's overlays allow 125.
    let (service, home) = (service(), store.home().to_str().unwrap());
    let images = service.images("store", home).unwrap().into_iter();
    let layers = images.map(|(id, _)| service.image(&id).unwrap().unwrap().layers);
    let layers: Vec<usize> = layers.collect();
    assert!(
        layers.len() > 100 && layers.iter().all(|count| *count <= 100),
        "{layers:?}"
    );
    store
        .rockenv(&["--yes", "rollback", store.env(), "s7"])
        .ok();
    store.sh("wc -l < ~/n").ok().prints("8");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn what_gc_gives_up_goes_at_the_service_too() {
    let store = TestStore::new();
    store.up_with(TWO);
    let other = [
        ("'one'", "'three'"),
        ("'two'", "'four'"),
        ("echo 1", "echo 3"),
    ];
    let other = other
        .iter()
        .fold(TWO.to_owned(), |text, (old, new)| text.replace(old, new));
    store.up_with(&other);
    let home = store.home().to_str().unwrap();
    let images = || service().images("store", home).unwrap().len();
    assert_eq!(images(), 4);
    let gc = ["--yes", "gc", "--preset", "ci", "--free", "1T"];
    let ran = store.rockenv(&gc).exits(10);
    assert!(ran.text().contains("removed 2 items"), "{ran:?}");
    assert_eq!(images(), 2);
    store.sh("cat ~/one ~/two").ok().prints("one\ntwo");
    store.rockenv(&["rm", "--yes", store.env()]).ok();
    assert_nothing_left(&store);
}

#[test]
fn containers_of_an_env_that_is_gone_are_found_by_their_labels() {
    let (store, other) = (TestStore::new(), TestStore::new());
    for store in [&store, &other] {
        store.up_with("[[step]]\nname = 'one'\nrun = 'true'\n");
        store.sh("echo kept > ~/live").ok();
        store.rockenv(&["down", store.env()]);
    }
    let containers = |store: &TestStore| {
        let home = store.home().to_str().unwrap();
        service().containers("store", home).unwrap().len()
    };
    store.rockenv(&["fsck"]).ok();
    fs::remove_dir_all(store.env_dir()).unwrap();
    // The container may belong to another store that was at this path, and whose file system is not mounted now.
    let id = store.home().join("id");
    let own = fs::read_to_string(&id).unwrap();
    fs::write(&id, "another").unwrap();
    assert!(!store.rockenv(&["fsck"]).text().contains("container"));
    fs::write(&id, own).unwrap();
    let gone = "belongs to an env that was removed";
    let ran = store.rockenv(&["fsck"]).exits(1);
    assert_eq!(ran.text().matches(gone).count(), 1, "{ran:?}");
    assert_eq!(containers(&store), 1);
    let ran = store.rockenv(&["fsck", "--repair"]).ok();
    assert!(ran.text().contains(gone), "{ran:?}");
    assert_eq!((containers(&store), containers(&other)), (0, 1));
    other.sh("cat ~/live").ok().prints("kept");
    other.rockenv(&["rm", "--yes", other.env()]).ok();
    assert_nothing_left(&other);
    store.rockenv(&["--yes", "gc"]).ok();
    assert_nothing_left(&store);
}
