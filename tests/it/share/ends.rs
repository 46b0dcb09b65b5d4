//! What `up --push` pushes before its end, and when it does not finish.

use std::sync::atomic::Ordering;

use fs_err as fs;
use nix::sys::signal::Signal;

use super::Two;
use super::proxy::{Fault, Proxy};
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{Background, finish, wait_until};

const ONE: &str = "[[step]]\nname = 'one'\nrun = 'echo one > $HOME/one'\n";

/// Returns a profile whose second step runs this.
fn then(run: &str) -> String {
    format!("{ONE}[[step]]\nname = 'two'\nrun = '{run}'\n")
}

#[test]
fn the_steps_before_one_that_failed_are_pushed() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(&then("exit 3"));
    // An ephemeral env goes with its command, so no later push can share its steps.
    let up = two.run(&two.one, &["up", name, "--push", "--ephemeral"]);
    up.exits(5).says(&[
        "1 snapshot at",
        "step `two` failed",
        "removed (--ephemeral)",
    ]);
    let up = two.run(&two.other, &["up", name, "--pull"]).exits(5);
    up.says(&["pulled one from", "2 steps, 1 done before"]);
    // A failed push is a warning and does not change the exit code.
    let up = two.with(&two.other, &["up", name, "--push"], "127.0.0.1:9/team/rocm");
    let up = up
        .exits(5)
        .says(&["warning: cannot push to", "cannot reach registry"]);
    let last = up.err.rfind("error: step `two` failed");
    assert!(last > up.err.find("warning:"), "{}", up.err);
    // With no finished step, `up` does not mention the push.
    two.one.profile("[[step]]\nname = 'none'\nrun = 'exit 3'\n");
    let up = two.run(&two.one, &["up", name, "--push"]).exits(5);
    let said = up.err.replace(&format!("rockenv up {name} --push\n"), "");
    assert!(!said.contains("push"), "{}", up.err);
    // While steps are built again, no push sends the snapshots that they replace, or moves the user's tag.
    two.one
        .profile(&then("sleep 1").replace("echo one", "echo new"));
    two.run(&two.one, &["up", name]).ok();
    let again = ["up", name, "--rerun", "one", "--push"];
    let tagged = format!("{}:mine", two.repository());
    two.with(&two.one, &again, &tagged)
        .ok()
        .says(&["2 snapshots at", "as `mine`; 2 layers sent"]);
    let set = two.registry.answered("PUT");
    let set = set.iter().filter(|path| path.ends_with("/manifests/mine"));
    assert_eq!(set.count(), 1);
}

#[test]
fn a_step_is_pushed_while_the_next_one_runs_and_a_signal_stops_the_push() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(&then("echo begun; sleep 1000"));
    let mut command = two.one.command(&["up", name, "--push"]);
    command.env("ROCKENV_REGISTRY", two.repository());
    let up = Background::start(command);
    wait_until("the second step has begun", || {
        let runs = fs::read_dir(two.one.env_dir().join("logs"));
        let mut runs = runs.into_iter().flatten().flatten();
        runs.any(|run| {
            let log = fs::read_to_string(run.path().join("02-two.log"));
            log.is_ok_and(|log| log.contains("begun"))
        })
    });
    let tag = format!("/v2/team/rocm/manifests/{}", two.one.keys(name)[0].1);
    wait_until("the first step is pushed", || {
        two.registry.answered("PUT").contains(&tag)
    });
    up.signal(Signal::SIGTERM);
    up.wait().exits(143);
    two.run(&two.other, &["up", name, "--pull", "--until", "one"])
        .ok()
        .says(&["pulled one from", "1 done before"]);
    // After a failed step the push can be stopped, and `up` reports the failure.
    two.one
        .profile(&then("exit 3").replace("echo one", "echo other"));
    let proxy = Proxy::start(&two.registry.host, |head| {
        Fault::Hangs(0).when(head.starts_with("PATCH "))
    });
    let mut command = two.one.command(&["up", name, "--push"]);
    command.env("ROCKENV_REGISTRY", proxy.repository());
    let up = Background::start(command);
    wait_until("the push hangs after the second step failed", || {
        proxy.hangs.load(Ordering::Relaxed) && !two.one.record()["failed"].is_null()
    });
    up.signal(Signal::SIGINT);
    up.wait().exits(5).says(&["step `two` failed"]);
    two.run(&two.one, &["push", name])
        .ok()
        .says(&["1 snapshot at"]);
}

#[test]
fn a_full_disk_keeps_nobody_from_handing_on() {
    let disk = LoopFs::sized(Kind::Ext4, 400 << 20);
    let two = Two::new(TestStore::on(&disk), TestStore::new());
    let name = two.profile(&then("cat /dev/zero > $HOME/zero"));
    let mut command = two.one.command(&["up", name, "--push"]);
    command
        .env("ROCKENV_REGISTRY", two.repository())
        .env("ROCKENV_DISK_FLOOR", "0");
    finish("up --push".into(), command)
        .exits(10)
        .says(&["1 snapshot at", "is full"]);
    let disk = nix::sys::statvfs::statvfs(disk.path()).unwrap();
    assert_eq!(disk.blocks_available(), 0);
    two.other.profile_named(name, ONE);
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one from", "1 done before"]);
}

#[test]
fn a_snapshot_that_was_removed_is_shared_while_the_env_stands_on_it() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.profile(&then("echo two > $HOME/two"));
    two.one.rockenv(&["up", name]).ok();
    two.one.rockenv(&["snapshot", "rm", name, "two"]).ok();
    // It would not bring the snapshot back.
    two.one.rockenv(&["up", name]).ok().says(&["nothing to do"]);
    let push = two.run(&two.one, &["push", name]).ok();
    let push = push.says(&["2 snapshots at"]);
    assert!(!push.err.contains("warning"), "{}", push.err);
    // A machine without a store has no env to pull for.
    let pull = ["--home", "absent", "pull", name];
    let pull = two.run(&two.other, &pull).exits(7);
    pull.says(&["no store at", " up PROFILE --pull, or "]);
    two.one.rockenv(&["rollback", name, "one"]).ok();
    let push = two.run(&two.one, &["push", name]).ok();
    push.says(&["step `two` has no snapshot any more", "1 snapshot at"]);
    two.one.rockenv(&["up", name]).ok();
    let push = two.run(&two.one, &["push", name]).ok();
    push.says(&["2 snapshots at"]);
}
