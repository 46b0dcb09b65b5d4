//! Two people with sudo build in one store, each with their own build user.

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::ordinary::Ordinary;
use crate::support::run::{Ran, finish};

fn by_another(store: &TestStore, arguments: &[&str]) -> Ran {
    let mut command = store.command(arguments);
    command.env("SUDO_UID", "4321").env("SUDO_GID", "4321");
    finish(arguments.join(" "), command)
}

#[test]
fn another_user_s_env_is_not_continued_and_a_new_one_shares_the_steps_of_root() {
    // Without root, each user has a store of their own.
    if Ordinary::get().is_some() {
        return;
    }
    let disk = LoopFs::with_base(Kind::Btrfs);
    let store = TestStore::on(&disk);
    store.profile(
        "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[volume]]\nname = 'cache'\nkind = 'cache'\ntarget = '/v/cache'\n\
         [[step]]\nname = 'one'\nuser = 'root'\nrun = 'true'\n\
         [[step]]\nname = 'two'\nincremental = true\nrun = 'touch /v/build/two'\n",
    );
    store.up();
    let env = store.env();
    let record = || fs::read(store.env_dir().join("record.json")).unwrap();
    let before = record();
    insta::assert_snapshot!(store.shown(&by_another(&store, &["up", env])), @r#"
    warning: cache `cache` belongs to user 1234: steps that run as user 4321 cannot write to it; to build as user 1234 too: build-user = "1234:1234" in the configuration
    error: build volume `build` belongs to user 1234: steps that run as user 4321 cannot write to it
    help: rockenv up ENV --name NEW; to build as user 1234 too: build-user = "1234:1234" in the configuration
    exit code 9
    "#);
    by_another(&store, &["plan", env, "--check"]).exits(9);
    assert_eq!(record(), before);
    // A build volume that a root step gave to root is no reason to refuse.
    store.root_sh("chown 0 /v/build").ok();
    store.rockenv(&["up", env, "--rerun", "two"]).ok();
    // The frozen build volume below step `two` is empty, and belongs to the first user.
    let name = format!("{env}-b");
    let said = by_another(&store, &["up", env, "--name", &name]).ok();
    said.says(&[
        "2 steps, 1 done before",
        "cache `cache` belongs to user 1234",
    ]);

    // An `up` with nothing to do does not make its user the owner of the env.
    let volume = "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n";
    let one = "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'touch /v/build/one'\n";
    let two = "[[step]]\nname = 'two'\nincremental = true\nrun = 'touch /v/build/two'\n";
    let name = format!("{env}-c");
    store.profile(&format!("{volume}{one}"));
    store.rockenv(&["up", env, "--name", &name]).ok();
    by_another(&store, &["up", env, "--name", &name]).ok();
    store.profile(&format!("{volume}{one}{two}"));
    let said = by_another(&store, &["up", env, "--name", &name]).exits(9);
    said.says(&["build volume `build` belongs to user 1234"]);
    // Without build volumes, commands run as the user of the last `up`.
    let name = format!("{env}-d");
    store.profile("[[step]]\nname = 'one'\nuser = 'root'\nrun = 'true'\n");
    store.rockenv(&["up", env, "--name", &name]).ok();
    by_another(&store, &["up", env, "--name", &name]).ok();
    let exec = ["exec", &name, "--", "id", "-u"];
    by_another(&store, &exec).ok().prints("4321");
}
