//! Transfers that fail: commands that are killed, disks that fill up, registries that refuse or die.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use fs_err as fs;
use nix::sys::signal::Signal;
use rockenv::testing::Store;
use serde_json::Value;

use super::proxy::{Fault, Proxy, is_layer};
use super::{Two, other_key, without_volume};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{Background, wait_until};

/// Fails if something that was pulled only in part has a name.
fn assert_nothing_half(store: &TestStore) {
    let images = fs::read_dir(store.home().join("images")).unwrap();
    let names = images.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let half: Vec<String> = names.filter(|name| name.starts_with("tmp-")).collect();
    assert!(half.is_empty(), "{half:?}");
    store.rockenv(&["fsck"]).ok();
}

#[test]
fn a_push_that_was_killed_is_finished_by_the_next() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile("[[step]]\nname = 'one'\nrun = 'head -c 8M /dev/urandom > $HOME/one'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    two.one.rockenv(&["up", name]).ok();
    let uploads = AtomicUsize::new(0);
    let proxy = Proxy::start(&two.registry.host, move |head| {
        // The image arrives, and then half of the next layer.
        let later = head.starts_with("PATCH ") && uploads.fetch_add(1, Ordering::Relaxed) > 0;
        Fault::Hangs(4 << 20).when(later)
    });
    let mut command = two.one.command(&["push", name]);
    command.env("ROCKENV_REGISTRY", proxy.repository());
    let push = Background::start(command);
    wait_until("half of a layer has arrived", || {
        proxy.hangs.load(Ordering::Relaxed)
    });
    push.signal(Signal::SIGKILL);
    push.wait().exits(137);
    // No tag points to an incomplete snapshot.
    two.run(
        &two.other,
        &[
            "pull",
            &format!("{}:{}", two.repository(), other_key(&two.one, name)),
        ],
    )
    .exits(7);
    insta::assert_snapshot!(two.shows("one: push ENV"), @"
    one$ rockenv push ENV
    push to REPOSITORY … SIZE
    ENV: 2 snapshots at REPOSITORY; 2 layers sent (SIZE), 1 already there, in TIME
    ");
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["2 done before"]);
    two.assert_same(name);
    for store in [&two.one, &two.other] {
        assert_nothing_half(store);
    }
}

#[test]
fn a_full_disk_stops_a_pull_and_the_next_one_goes_on() {
    let disk = LoopFs::sized(Kind::Ext4, 600 << 20);
    let two = Two::new(TestStore::new(), TestStore::on(&disk));
    let name =
        two.pushed("[[step]]\nname = 'one'\nrun = 'seq 30000000 | head -c 200M > $HOME/one'\n");
    let filler = disk.join("filler");
    let file = fs::File::create(&filler).unwrap();
    let free = nix::sys::statvfs::statvfs(disk.path()).unwrap();
    let free = free.blocks_available() * free.fragment_size();
    // The image and the compressed layers fit, but the unpacked step does not. `up` says so before it downloads
    // anything.
    let room = i64::try_from(free).unwrap() - (200 << 20);
    nix::fcntl::fallocate(&file, nix::fcntl::FallocateFlags::empty(), 0, room).unwrap();
    drop(file);
    let up = || {
        let mut command = two.other.command(&["up", name, "--pull"]);
        command
            .env("ROCKENV_REGISTRY", two.repository())
            .env("ROCKENV_DISK_FLOOR", "0");
        crate::support::run::finish("up --pull".into(), command)
    };
    up().exits(10)
        .says(&["it needs", "compressed", "unpacked", "rockenv gc"]);
    // Older versions of rockenv did not record the size. Only the full disk stops a pull of their snapshots.
    let (_, key) = two.one.keys(name).remove(0);
    let mut manifest: Value = serde_json::from_slice(&two.manifest(&key)).unwrap();
    for layer in manifest["layers"].as_array_mut().unwrap() {
        let annotations = layer.as_object_mut().unwrap().remove("annotations");
        assert!(annotations.unwrap()["rockenv.unpacked"].is_string());
    }
    two.put_manifest(&key, manifest.to_string().as_bytes());
    up().exits(10).says(&["No space left on device"]);
    let store = Store::open_existing(two.other.home()).unwrap().unwrap();
    assert!(store.layers().unwrap().is_empty());
    drop(store);
    assert_nothing_half(&two.other);
    fs::remove_file(&filler).unwrap();
    up().ok()
        .says(&["pulled the image and one", "1 done before"]);
    two.assert_same(name);
    assert_nothing_half(&two.other);
}

#[test]
fn a_registry_that_refuses_everything_is_said_and_gone_without() {
    let store = TestStore::new();
    let name = store.env();
    for status in [401, 403, 429, 500] {
        let proxy = Proxy::start("127.0.0.1:9", move |_| {
            Fault::Says(status, String::new(), String::new())
        });
        let run = |words: &[&str]| {
            let mut command = store.command(words);
            command.env("ROCKENV_REGISTRY", proxy.repository());
            crate::support::run::finish(words.join(" "), command)
        };
        let why = match status {
            401 | 403 => "authentication required".to_owned(),
            _ => format!("the registry answered {status}"),
        };
        store.profile(&format!("[[step]]\nname = 'one'\nrun = 'echo {status}'\n"));
        let up = run(&["up", name, "--pull"]).ok();
        assert_eq!(up.err.matches("building it here").count(), 1, "{}", up.err);
        up.says(&["warning:", &why, "step 1/1 one"]);
        let push = run(&["push", name]).exits(4);
        assert!(push.err.contains("error: cannot push to"), "{}", push.err);
    }
}

#[test]
fn a_registry_that_dies_in_a_layer_is_asked_for_the_rest() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed("[[step]]\nname = 'one'\nrun = 'head -c 3M /dev/urandom > $HOME/one'\n");
    // A registry that dies on every request for a layer counts as unreachable.
    let dead = Proxy::start(&two.registry.host, |head| {
        Fault::Dies(0).when(is_layer(head))
    });
    let changed = "[[step]]\nname = 'one'\nrun = 'head -c 3M /dev/urandom > $HOME/one'\n[[step]]\nname = 'two'\nrun = 'true'\n";
    two.other.profile_named(name, changed);
    two.with(&two.other, &["up", name, "--pull"], &dead.repository())
        .ok()
        .says(&["warning:", "building it here", "step 1/2 one"]);
    assert_nothing_half(&two.other);
    // With a registry that dies now and then, the download resumes where it was.
    let fresh = TestStore::new();
    fresh.profile_named(
        name,
        "[[step]]\nname = 'one'\nrun = 'head -c 3M /dev/urandom > $HOME/one'\n",
    );
    let asked = Arc::new(AtomicUsize::new(0));
    let counter = Arc::clone(&asked);
    let tired = Proxy::start(&two.registry.host, move |head| {
        let early = is_layer(head) && counter.fetch_add(1, Ordering::Relaxed) < 3;
        Fault::Dies(1 << 20).when(early)
    });
    two.with(&fresh, &["up", name, "--pull"], &tired.repository())
        .ok()
        .says(&["pulled one", "1 done before"]);
    assert!(asked.load(Ordering::Relaxed) > 3);
    assert_nothing_half(&fresh);
}

#[test]
fn what_is_locked_is_pulled_and_nothing_is_built() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let two = Two::new(TestStore::new(), TestStore::at(&place.path().join("store")));
    let name = two.profile(without_volume());
    two.one.rockenv(&["lock", name]).ok();
    two.run(&two.one, &["up", name, "--locked", "--push"]).ok();
    let lock = format!("profiles/{name}.lock");
    fs::copy(two.one.work().join(&lock), two.other.work().join(&lock)).unwrap();
    let up = two
        .run(&two.other, &["up", name, "--locked", "--pull"])
        .ok()
        .says(&["pulled the image and one, two, three from", "3 done before"]);
    assert!(!up.err.contains("step 1/3"), "{}", up.err);
    two.assert_same(name);
    // A mismatch with the lock file is still refused, whatever the registry has.
    let changed = without_volume().replace("echo three >", "echo other >");
    two.other.profile_named(name, &changed);
    two.run(&two.other, &["up", name, "--locked", "--pull"])
        .exits(8);
    assert_nothing_half(&two.other);
}
