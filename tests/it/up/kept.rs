//! Work in build volumes survives a new image, a rollback and a changed step.

use std::io::Write as _;
use std::process::{Command, Stdio};

use fs_err as fs;

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs, run};
use crate::support::ordinary::Ordinary;
use crate::support::rootfs::rootfs;
use crate::support::run::{Background, wait_until};
use crate::support::skip::skip;
use crate::support::template::write_recipe;

const VOLUME: &str = "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n";

/// Writes the profile with an image of this name.
fn profile_on(store: &TestStore, image: &str, body: &str) {
    store.profile(body);
    let path = store.work().join(format!("profiles/{}.toml", store.env()));
    let text = fs::read_to_string(&path).unwrap();
    let text = text.replace("\"base\"", &format!("\"{image}\""));
    fs::write(path, text).unwrap();
}

/// Adds the recipe of image `other`, made from another tree.
fn add_image(store: &TestStore) {
    let tree = store.work().join("tree");
    run(Command::new("cp").arg("-al").arg(rootfs()).arg(&tree));
    fs::write(tree.join("etc/other"), "").unwrap();
    write_recipe(&store.work().join("images/other.toml"), &tree);
}

/// Runs a script in a shell in the tree that the failed step left.
fn in_failed(store: &TestStore, script: &str) {
    let mut command = store.command(&["shell", "--failed", store.env()]);
    command.stdin(Stdio::piped());
    let mut shell = Background::start(command);
    let line = format!("{script}\n");
    shell.stdin().write_all(line.as_bytes()).unwrap();
    shell.wait().ok();
}

fn snapshots(store: &TestStore, env: &str) -> String {
    store.rockenv(&["snapshot", "ls", env]).ok().text()
}

#[test]
fn what_a_user_changes_in_the_tree_of_a_failed_step_is_kept() {
    on_overlay_and_btrfs(|store, method| {
        let steps = |more: &str| {
            format!(
                "[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n\
                 [[step]]\nname = 'two'\nrun = 'echo half > ~/half; {more}false'\n"
            )
        };
        store.profile(&steps(""));
        let (env, free) = (store.env(), ["gc", "--free", "1M"]);
        store.rockenv(&["up", env]).exits(5);
        // A command that only reads is no reason to keep the tree.
        in_failed(store, "cat ~/half");
        store.rockenv(&["up", env]).exits(5);
        assert!(!snapshots(store, env).contains("before-up"), "{method}");
        in_failed(store, "cat ~/half");
        // Space that other tests free on the same disk counts as freed, so `gc` may have nothing left to remove.
        wait_until("`gc` removes the tree of the failed step", || {
            store.rockenv(&free).text().contains("removed 1 item")
        });
        store.rockenv(&["up", env]).exits(5);

        in_failed(store, "echo precious > ~/mine");
        // A record of an older version has no command.
        let record = store.home().join(format!("envs/{env}/record.json"));
        let text = fs::read_to_string(&record).unwrap();
        let command = format!("\"command\": \"rockenv up {env}\"");
        assert!(text.contains(&command), "{text}");
        fs::write(&record, text.replace(&command, "\"command\": null")).unwrap();
        let gc = store.rockenv(&free);
        gc.says(&[&format!(
            "tree of failed step {env}/two stays: `shell --failed` changed it; to keep it as a snapshot: rockenv up {env}"
        )]);
        in_failed(store, "cat ~/mine");
        store
            .rockenv(&["up", env])
            .exits(5)
            .says(&["changes made by `shell --failed` are kept as snapshot `before-up`"]);
        store.sh("ls ~").ok().prints("one");
        store.rockenv(&["rollback", "--yes", env, "before-up"]).ok();
        let read = "cat ~/one ~/half ~/mine";
        store.sh(read).ok().prints("one\nhalf\nprecious");
        store.rockenv(&["fsck"]).ok();
    });
}

#[test]
fn a_new_image_costs_no_work_in_build_volumes() {
    if Ordinary::get().is_some() {
        return skip(
            "a_new_image_costs_no_work_in_build_volumes",
            "an ordinary user has no image of a directory",
        );
    }
    on_overlay_and_btrfs(|store, method| {
        let body = format!(
            "{VOLUME}[[step]]\nname = 'one'\nrun = 'echo >> /v/build/made; echo > ~/made'\n"
        );
        add_image(store);
        store.up_with(&body);
        store
            .sh("echo handwork > /v/build/mine.c; echo mine > ~/mine")
            .ok();
        let frozen = method != "overlay";
        profile_on(store, "other", &body);
        let plan = store.rockenv(&["plan", store.env()]).ok();
        plan.says(&[match frozen {
            true => "build volumes start empty",
            false => "build volumes are kept",
        }]);
        let up = store.up().says(&["kept as snapshot `before-image`"]);
        assert_eq!(up.err.contains("steps continue with"), !frozen, "{method}");
        let list = snapshots(store, store.env());
        assert!(list.contains("before-image"), "{list}");
        // A step that continues with another image's files is no clean build.
        let last = list.lines().last().unwrap();
        assert_eq!(last.contains("incremental"), !frozen, "{list}");
        let read = "cat /v/build/mine.c; wc -l < /v/build/made; ls /etc/other ~/mine 2>/dev/null";
        match frozen {
            true => {
                let back = ["rollback", "--yes", store.env(), "before-image"];
                store.rockenv(&back).ok();
                let home = "cat /v/build/mine.c ~/mine";
                store.sh(home).ok().prints("handwork\nmine");
            }
            false => {
                store
                    .sh(&format!("{read}; true"))
                    .ok()
                    .prints("handwork\n2\n/etc/other");
                // Switches back and forth between the images.
                profile_on(store, "base", &body);
                store.up();
                store.sh("cat /v/build/mine.c").ok().prints("handwork");
                profile_on(store, "other", &body);
                store.up();
                store.sh("cat /v/build/mine.c").ok().prints("handwork");
                let new = format!("{}-new", store.env());
                store.rockenv(&["up", store.env(), "--name", &new]).ok();
                assert!(!snapshots(store, &new).contains("incremental"));
                // `--clean` gets a clean build.
                profile_on(store, "base", &body);
                let clean = store.rockenv(&["up", store.env(), "--clean"]).ok();
                assert!(!clean.err.contains("continue"), "{}", clean.err);
                store.sh("ls /v/build").ok().prints("made");
            }
        }
    });
}

#[test]
fn work_in_a_failed_step_is_kept_before_volumes_are_restored() {
    on_overlay_and_btrfs(|store, method| {
        let profile = |run: &str| {
            format!(
                "{VOLUME}[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = '{run}'\n"
            )
        };
        store.profile(&profile("echo half > /v/build/half; exit 1"));
        store.rockenv(&["up", store.env()]).exits(5);
        in_failed(store, "cat /v/build/half");
        in_failed(store, "echo handwork > /v/build/mine.c");
        store.profile(&profile("echo whole > /v/build/whole"));
        let up = store.up();
        if method == "overlay" {
            // The volumes stay as they are.
            assert!(!up.err.contains("before-up"), "{}", up.err);
        } else {
            up.says(&["kept as snapshot `before-up`"]);
            store.sh("ls /v/build").ok().prints("whole");
            let back = ["rollback", "--yes", store.env(), "before-up"];
            store.rockenv(&back).ok();
        }
        store.sh("cat /v/build/mine.c").ok().prints("handwork");
    });
}

/// Volumes of a store that cannot freeze them, and snapshots from one that can.
#[test]
fn volumes_from_elsewhere_replace_none_that_is_the_only_copy() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    let (from, store) = (TestStore::on(&disk), TestStore::new());
    let name = from.env().to_owned();
    let profile = |run: &str| {
        format!(
            "{VOLUME}[[step]]\nname = 'one'\nrun = 'echo one > /v/build/one'\n\
             [[step]]\nname = 'two'\nrun = '{run}'\n"
        )
    };
    for store in [&from, &store] {
        store.profile_named(&name, &profile("true"));
    }
    from.rockenv(&["up", &name, "--until", "one"]).ok();
    let file = from.work().join("one.oci.tar");
    from.rockenv(&["export", &name, "--snapshots", file.to_str().unwrap()])
        .ok();
    store.rockenv(&["import", file.to_str().unwrap()]).ok();
    let sh = |script: &str| store.sh_in(&name, script);
    // The first time there is nothing to lose.
    store.rockenv(&["up", &name]).ok();
    sh("cat /v/build/one; echo handwork > /v/build/mine.c")
        .ok()
        .prints("one");
    store
        .rockenv(&["rollback", "--yes", &name, "one"])
        .ok()
        .says(&["build volumes unchanged"]);
    sh("cat /v/build/mine.c").ok().prints("handwork");
    // A changed step continues with the user's files.
    store.profile_named(&name, &profile("echo other"));
    let plan = store.rockenv(&["plan", &name]).ok();
    plan.says(&["build volumes are kept"]);
    store.rockenv(&["up", &name]).ok();
    sh("cat /v/build/mine.c").ok().prints("handwork");
    assert!(snapshots(&store, &name).contains("incremental"));
    // A volume that only steps wrote to is restored.
    let new = format!("{name}-new");
    let run = |run: &str| {
        store.profile_named(&name, &profile(run));
        store.rockenv(&["up", &name, "--name", &new]).ok()
    };
    run("echo > /v/build/two");
    run("ls /v/build > ~/list");
    store.sh_in(&new, "cat ~/list").ok().prints("one");
    store.rockenv(&["rm", "--yes", &name, &new]).ok();
}
