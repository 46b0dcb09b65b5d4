//! Layers that another command removes while `up` plans with them.

use std::io::Write as _;
use std::path::{Path, PathBuf};

use fs_err as fs;
use fs_err::os::unix::fs::OpenOptionsExt as _;
use nix::sys::stat::Mode;

use crate::support::env::TestStore;
use crate::support::run::Ran;

const STEPS: &str = "[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
    [[step]]\nname = 'one'\nrun = 'echo one > /v/out/one'\n\
    [[step]]\nname = 'two'\nrun = 'echo two > /v/out/two'\n";

/// Returns the directories of the env's layers, topmost first.
fn layers(store: &TestStore) -> Vec<PathBuf> {
    let record = store.record();
    let ids = record["snapshots"].as_array().unwrap().iter().rev();
    let layers = store.home().join("layers");
    ids.map(|one| layers.join(one["layer"].as_str().unwrap()))
        .collect()
}

/// Puts a FIFO in the place of a file: a reader waits until the test writes to it.
fn put_fifo(path: &Path) {
    let new = path.with_file_name("new");
    nix::unistd::mkfifo(&new, Mode::S_IRWXU).unwrap();
    fs::rename(new, path).unwrap();
}

/// Runs `up` for a new env, and removes the layers during its `look`th read of the topmost layer's description. Returns
/// how it ended, and whether they were removed. No command removes layers that an env has leased, so they stay after
/// that.
fn up_without(store: &TestStore, env: &str, look: usize) -> (Ran, bool) {
    let layers = layers(store);
    let file = layers[0].join("layer.json");
    let text = fs::read(&file).unwrap();
    put_fifo(&file);
    let mut up = store.start(&["up", store.env(), "--name", env]);
    let (mut looks, mut removed) = (0, false);
    while up.runs() && !removed {
        let mut to = fs::OpenOptions::new();
        to.write(true).custom_flags(nix::libc::O_NONBLOCK);
        // A FIFO cannot be opened for writing until a reader has opened it.
        let Ok(mut to) = to.open(&file) else {
            std::thread::sleep(std::time::Duration::from_millis(1));
            continue;
        };
        looks += 1;
        // Replaces the FIFO before the answer, so that this reader's next look is at another one.
        put_fifo(&file);
        let lease = store.home().join("envs").join(env).join("lease");
        if looks == look && !lease.exists() {
            for (number, layer) in layers.iter().enumerate() {
                fs::rename(layer, store.work().join(format!("{look}-{number}"))).unwrap();
            }
            removed = true;
        }
        to.write_all(&text).unwrap();
    }
    let ran = up.wait();
    if !removed {
        fs::remove_file(&file).unwrap();
        fs::write(&file, text).unwrap();
    }
    (ran, removed)
}

#[test]
fn layers_that_go_before_they_are_leased_are_built_again() {
    let store = TestStore::new();
    let new = format!("{}-new", store.env());
    store.up_with(STEPS);
    for look in 1.. {
        let (ran, removed) = up_without(&store, &new, look);
        let said = if removed { "" } else { "2 done before" };
        ran.ok().says(&[said]);
        let out = store.home().join("outputs").join(&new).join("out");
        assert!(out.join("one").exists() && out.join("two").exists());
        if !removed {
            assert!(look > 2, "{look}");
            break;
        }
        store.rockenv(&["rm", "--yes", &new]).ok();
    }
    store.rockenv(&["fsck"]).ok();
}
