//! Build volumes of an env at a service: the store freezes them with its snapshots, and the service only mounts them.

use crate::assert_nothing_left_at;
use crate::restart::Own;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use rockenv::testing::Service;

#[test]
fn they_go_back_and_are_forked_with_the_snapshots() {
    // Mounted before the service starts, which would not see it otherwise.
    let disk = LoopFs::new(Kind::Btrfs);
    let own = Own::start();
    let store = TestStore::on(&disk);
    store.profile(
        "volume = [{ name = 'b', kind = 'build', target = '/b' }]
         [[step]]\nname = 'one'\nrun = 'echo one > /b/state; echo one > ~/state'
         [[step]]\nname = 'two'\nrun = 'echo two > /b/state; echo two > ~/state'\n",
    );
    let fork = format!("{}-fork", store.env());
    let env = store.env();
    let both = |name: &str| {
        let cat = ["exec", name, "--", "cat", "/b/state", "state"];
        own.run(&store, &cat).ok().text()
    };
    own.run(&store, &["up", env]).ok();
    own.run(&store, &["--yes", "rollback", env, "one"]).ok();
    assert_eq!(both(env), "one\none\n");
    own.run(&store, &["fork", env, &fork]).ok();
    let write = "echo mine > /b/state";
    own.run(&store, &["exec", env, "--", "sh", "-c", write])
        .ok();
    assert_eq!(
        (both(env), both(&fork)),
        ("mine\none\n".into(), "one\none\n".into())
    );
    // An existing snapshot, with its volume, is not built again.
    let up = own.run(&store, &["up", env]).ok();
    assert!(!up.err.contains("step 2/2 two … done"), "{up:?}");
    assert_eq!(both(env), "two\ntwo\n");
    own.run(&store, &["rm", "--yes", env, &fork]).ok();
    let service = Service::connect(&own.socket()).unwrap();
    assert_nothing_left_at(&service, &store);
}
