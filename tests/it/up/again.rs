//! Where the next `up` resumes: after a failure, `--until`, `--rerun`, changes by hand, or another build of the same
//! env.

use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;

use super::{STEPS, on_each, on_overlay_and_btrfs};
use crate::support::env::{TestStore, other_engine};
use crate::support::run::{Background, wait_until};
use crate::support::transcript::measured;

#[test]
fn a_failed_step_costs_only_itself_and_goes_on_where_it_stopped() {
    on_each(|store, method| {
        let failing = STEPS.replace("run = \"cat", "run = \"echo half >> /v/build/half; echo half > $HOME/half; test -e /v/build/mended; cat");
        store.profile(&failing);
        store.rockenv(&["up", store.env()]).exits(5).says(&[
            "step `three` failed with exit code 1",
            ".log",
            "rockenv shell --failed",
            &format!("rockenv up {}", store.env()),
        ]);
        // A rollback keeps what the step has built, and the step continues from that.
        let rollback = |to: &str| store.rockenv(&["rollback", store.env(), to]).ok();
        let (kept, is_kept) = ("before-rollback", method != "overlay");
        let said = rollback("one").err;
        assert_eq!(said.contains(kept), is_kept, "{method}: {said}");
        rollback(if is_kept { kept } else { "two" });
        // The env's root is that of the step before. The failed tree is beside it.
        store
            .sh("test ! -e $HOME/half && test -e $HOME/two && touch /v/build/mended")
            .ok();
        let status = store.rockenv(&["status", store.env()]).ok().text();
        assert!(status.contains("failed"), "{status}");
        store.up().says(&["step 3/3 three"]);
        // There is no failed tree any more, and a command that looks for one changes nothing.
        let record = || fs::read(store.env_dir().join("record.json")).unwrap();
        let before = record();
        store.rockenv(&["shell", "--failed", store.env()]).exits(7);
        assert_eq!(record(), before, "{method}");
        store
            .sh("cat /v/build/half; cat $HOME/half")
            .ok()
            .prints("half\nhalf\nhalf");
        let status = store
            .rockenv(&["status", store.env(), "--check"])
            .ok()
            .text();
        assert!(status.contains("ready"), "{status}");
    });
}

/// The new layer is not the first with its key.
#[test]
fn what_was_built_again_is_found_by_other_envs() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    store.up();
    for again in [&["--rerun", "one"][..], &["--clean"]] {
        let up = [&["up", store.env()], again].concat();
        store.rockenv(&up).ok();
        let plan = ["plan", store.env(), "--name", "second", "--json"];
        let plan = store.rockenv(&plan).ok().json();
        for step in plan["plan"]["steps"].as_array().unwrap() {
            assert_eq!(step["action"], "hit", "{again:?} {plan:#}");
        }
    }
}

#[test]
fn rerun_and_until() {
    let store = TestStore::new();
    let steps = STEPS.replace("ln /v", "ln -f /v");
    store.profile(&steps);
    let mut said = store.shows("up ENV --until one");
    store.rockenv(&["status", store.env(), "--check"]).exits(8);
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(plan.contains("not built yet"), "{plan}");
    // After `three`, the env has the later steps already.
    said += &store.shows(
        "up ENV --until two
        up ENV
        up ENV --rerun three
        up ENV --until one
        up ENV
        up ENV --rerun tow
        up ENV --rerun two --until one
        shell --failed ENV",
    );
    // A step that the profile has got since is left to do.
    store.profile(&format!("{steps}[[step]]\nname = 'four'\nrun = 'true'\n"));
    said += &store.shows("up ENV --until three");
    insta::assert_snapshot!(measured(said), @"
    ENV: 3 steps, 0 done before; engine nspawn (root, and systemd-nspawn is installed)
    step 1/3 one …
    step 1/3 one … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; 2 steps after `one` are left
    $ rockenv up ENV --until two
    ENV: 3 steps, 1 done before
    step 2/3 two …
    step 2/3 two … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; 1 step after `two` is left
    $ rockenv up ENV
    ENV: 3 steps, 2 done before
    step 3/3 three …
    step 3/3 three … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; to enter it: rockenv shell ENV
    $ rockenv up ENV --rerun three
    ENV: 3 steps, 2 done before
    warning: this store cannot restore build volumes (overlay): the step continues with the current ones; `--clean` empties them and runs every step again
    step 3/3 three …
    step 3/3 three … done in TIME, cpu TIME, memory SIZE, disk +SIZE
    ENV: done; to enter it: rockenv shell ENV
    $ rockenv up ENV --until one
    ENV: nothing to do
    $ rockenv up ENV
    ENV: nothing to do
    $ rockenv up ENV --rerun tow
    error: profile `ENV` has no step `tow`
    help: did you mean `two`? its steps are: one, two, three
    exit code 7
    $ rockenv up ENV --rerun two --until one
    error: `--rerun two` is after `--until one`, so nothing would run
    help: --rerun two, or --until two
    exit code 2
    $ rockenv shell --failed ENV
    error: no step of env `ENV` failed
    help: rockenv shell ENV
    exit code 7
    ENV: nothing to do; 1 step after `three` is left
    ");
    store.rockenv(&["status", store.env(), "--check"]).exits(8);
}

#[test]
fn what_was_run_again_is_never_taken_back() {
    on_overlay_and_btrfs(|store, method| {
        let flags = store.work().join("flags");
        fs::create_dir(&flags).unwrap();
        let volume = "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n";
        store.profile(&format!(
            "{volume}[[volume]]\nname = 'flags'\nkind = 'host'\npath = '{}'\ntarget = '/flags'\n\
             [[step]]\nname = 'one'\nrun = 'date +%N > /v/build/one; test ! -e /flags/one; cp /v/build/one $HOME/one'\n\
             [[step]]\nname = 'two'\nrun = 'test ! -e /flags/two; cp $HOME/one $HOME/two'\n",
            flags.display()
        ));
        let env = store.env();
        // Returns what both steps left, which must be the same.
        let state = || {
            let both = store.sh("cat $HOME/one $HOME/two | uniq").ok().text();
            assert_eq!(both.lines().count(), 1, "{method}: {both}");
            both
        };
        let again = ["up", env, "--rerun", "one"];
        let goes_on = |before: &str| {
            store.up();
            store.up().says(&["nothing to do"]);
            let now = state();
            assert_ne!(now, before, "{method}");
            now
        };
        let mut now = goes_on("");
        for fails in ["two", "one"] {
            fs::write(flags.join(fails), "").unwrap();
            store
                .rockenv(&again)
                .exits(5)
                .says(&[&format!("resume with: rockenv up {env}")]);
            fs::remove_file(flags.join(fails)).unwrap();
            let plan = store.rockenv(&["plan", env]).ok().text();
            assert!(
                plan.contains("did not finish last time"),
                "{method}: {plan}"
            );
            now = goes_on(&now);
        }
        let until = [&again[..], &["--until", "one"]].concat();
        store.rockenv(&until).ok();
        let plan = store.rockenv(&["plan", env]).ok().text();
        assert!(
            plan.contains("`one` was built again since"),
            "{method}: {plan}"
        );
        now = goes_on(&now);
        // After a rollback to the earlier build, the env stays there.
        store.rockenv(&until).ok();
        store.rockenv(&["rollback", "--yes", env, "two"]).ok();
        for said in ["2 steps, 2 done before", "nothing to do"] {
            store.up().says(&[said]);
            assert_eq!(state(), now, "{method}");
        }
    });
}

#[test]
fn until_keeps_what_a_later_step_has_built() {
    on_overlay_and_btrfs(|store, method| {
        let env = store.env();
        store.profile(&STEPS.replace(
            "echo two >> $HOME/two",
            "echo objects > /v/build/objects; exit 1",
        ));
        store.rockenv(&["up", env]).exits(5);
        store.rockenv(&["up", env, "--until", "one"]).ok();
        let built = store.sh("cat /v/build/objects").ok().text();
        assert_eq!(built, "objects\n", "{method}");
    });
}

#[test]
fn a_step_never_runs_on_what_was_changed_by_hand() {
    on_overlay_and_btrfs(|store, method| {
        let env = store.env();
        store.profile(&STEPS.replace("echo one > $HOME/one", "exit 1"));
        store.rockenv(&["up", env]).exits(5);
        store.profile(STEPS);
        // On the image, before the first step runs, and on a snapshot.
        for step in ["one", "two"] {
            let script = format!("echo mine > $HOME/mine; echo mine > /v/build/before-{step}");
            store.sh(&script).ok();
            let up = store.rockenv(&["up", env, "--until", step]).ok();
            up.says(&["are kept as snapshot `before-up"]);
            store.sh("test ! -e $HOME/mine").ok();
        }
        let by_hand = store.sh("cd /v/build; ls before-* || true").ok().text();
        let stays = if method == "overlay" { 2 } else { 0 };
        assert_eq!(by_hand.lines().count(), stays, "{method}: {by_hand}");
        let back = ["rollback", "--yes", env, "before-up-2"];
        store.rockenv(&back).ok();
        store
            .sh("cat $HOME/mine /v/build/before-two")
            .ok()
            .prints("mine\nmine");
    });
}

#[test]
fn a_last_step_that_was_removed_from_the_profile_is_undone() {
    let store = TestStore::new();
    store.up_with(STEPS);
    let (first, _) = STEPS.split_once("[[step]]\nname = \"three\"").unwrap();
    store.up_with(first);
    store.sh("test -e $HOME/one && ! test -e $HOME/three").ok();
    store.up().says(&["nothing to do"]);
    store.up_with(STEPS).says(&["3 steps, 3 done before"]);
    store.sh("! test -e $HOME/one && test -e $HOME/three").ok();
}

#[test]
fn the_output_is_of_the_build_that_the_env_stands_on() {
    let store = TestStore::new();
    let env = store.env();
    let profile = |build: &str| {
        store.profile(&format!(
            "[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
             [[step]]\nname = 'one'\nrun = 'echo one > /v/out/both; echo {build} > /v/out/one'\n\
             [[step]]\nname = 'two'\nrun = 'cat /v/out/one > $HOME/two; cat /v/out/one > /v/out/both'\n"
        ));
    };
    let out = store.home().join("outputs").join(env).join("out");
    let state = || {
        let files = ["one", "both"].map(|name| fs::read_to_string(out.join(name)).unwrap());
        files.concat() + &store.sh("cat $HOME/two").ok().text()
    };
    profile("old");
    store.up();
    store.rockenv(&["snapshot", "create", env, "mine"]).ok();
    for goes_back in [false, true] {
        profile("new");
        store.up();
        assert_eq!(state(), "new\nnew\nnew\n");
        fs::write(out.join("other"), "somebody's").unwrap();
        if goes_back {
            store.rockenv(&["rollback", "--yes", env, "mine"]).ok();
        }
        profile("old");
        store.up().says(&["2 steps, 2 done before"]);
        assert_eq!(state(), "old\nold\nold\n");
        assert_eq!(fs::read(out.join("other")).unwrap(), b"somebody's");
        store.up().says(&["nothing to do"]);
        // `--until` does not undo what the last step did to the output.
        let until = ["up", env, "--until", "one"];
        store.rockenv(&until).ok().says(&["nothing to do"]);
        fs::remove_file(out.join("one")).unwrap();
        store.rockenv(&until).ok();
        assert_eq!(state(), "old\nold\nold\n");
    }
    // A user's change to the file stays.
    fs::write(out.join("one"), "somebody's").unwrap();
    insta::assert_snapshot!(store.shows("up ENV"), @"
    ENV: 2 steps, 2 done before
    error: env `ENV` is done, but 1 result is not this build's: `one` in output volume `out`
    help: move the files away, then run: rockenv up ENV; or make them again: rockenv up ENV --rerun one
    exit code 8
    ");
    assert_eq!(fs::read(out.join("one")).unwrap(), b"somebody's");
}

#[test]
fn what_a_forgotten_snapshot_stands_on_stays() {
    on_overlay_and_btrfs(|store, _| {
        let env = store.env();
        let steps = STEPS.replace("ln /v", "ln -f /v");
        let changed = |from: &str| steps.replace(from, &format!("true; {from}"));
        store.up_with(&steps);
        store.rockenv(&["snapshot", "rm", env, "three"]).ok();
        store.up_with(&changed("cat $HOME/two"));
        store.up_with(&changed("echo one > $HOME/one"));
        store.rockenv(&["fsck"]).ok();
        // The state after an `up` that was killed before it removed the replaced snapshots.
        let path = store.env_dir().join("record.json");
        let mut record: serde_json::Value =
            serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let snapshots = record["snapshots"].as_array_mut().unwrap();
        let last = snapshots.pop().unwrap();
        record["head"]["layer"] = snapshots.last().unwrap()["layer"].clone();
        fs::write(&path, record.to_string()).unwrap();
        store.up_with(&steps);
        store.rockenv(&["fsck"]).ok();
        let layers = store.home().join("layers");
        assert!(layers.join(last["layer"].as_str().unwrap()).exists());
        store.rockenv(&["--yes", "gc"]).ok();
        assert_eq!(fs::read_dir(layers).unwrap().count(), 3);
    });
}

#[test]
fn changes_made_by_hand_are_kept_before_a_step_would_drop_them() {
    on_each(|store, method| {
        store.up_with(STEPS);
        store.root_sh("echo precious > /etc/precious").ok();
        store.profile(&STEPS.replace("rm $HOME/one", "rm -f $HOME/one"));
        store.up().says(&["kept as snapshot `before-up`"]);
        store.sh("test ! -e /etc/precious").ok();
        store.rockenv(&["rollback", store.env(), "before-up"]).ok();
        store.sh("cat /etc/precious").ok().prints("precious");
        // With shared extents, the command before the first rollback counts too.
        let kept = match method {
            "reflink" => "before-rollback-2",
            _ => "before-rollback",
        };
        store.root_sh("echo more > /etc/more").ok();
        store
            .rockenv(&["rollback", store.env(), "two"])
            .ok()
            .says(&[&format!("kept as snapshot `{kept}`")]);
        store.sh("test ! -e /etc/more").ok();
        store.rockenv(&["rollback", store.env(), kept]).ok();
        store.sh("cat /etc/more").ok().prints("more");
    });
}

#[test]
fn what_was_run_again_is_what_later_steps_stand_on() {
    let store = TestStore::new();
    let flags = store.work().join("flags");
    fs::create_dir(&flags).unwrap();
    store.profile(&format!(
        "[[volume]]\nname = 'flags'\nkind = 'host'\npath = '{}'\ntarget = '/flags'\n\
         [[step]]\nname = 'one'\nrun = 'date +%s%N > $HOME/one; test ! -e /flags/one'\n\
         [[step]]\nname = 'two'\nrun = 'test ! -e /flags/two; cp $HOME/one $HOME/two'\n",
        flags.display()
    ));
    let (env, other) = (store.env(), format!("{}-other", store.env()));
    let both = |name: &str| store.sh_in(name, "cat $HOME/one $HOME/two").ok().text();
    store.rockenv(&["up", env, "--name", &other]).ok();
    store.rockenv(&["up", env, "--until", "one"]).ok();
    for fails in ["two", "one"] {
        fs::write(flags.join(fails), "").unwrap();
        store.rockenv(&["up", env, "--rerun", "one"]).exits(5);
        fs::remove_file(flags.join(fails)).unwrap();
        let before = match fails {
            "two" => store.sh("cat $HOME/one").ok().text(),
            _ => String::new(),
        };
        store.up();
        let (mine, others) = (both(env), both(&other));
        let lines: Vec<&str> = mine.lines().collect();
        assert!(lines[0] == lines[1] && mine != others, "{mine}{others}");
        assert!(mine.starts_with(&before), "{before}{mine}");
        store.up().says(&["nothing to do"]);
        // Another env still has the first build's files.
        store.rockenv(&["up", env, "--name", &other]).ok();
        assert_eq!(both(&other), others);
        store
            .rockenv(&["up", env, "--until", "one", "--rerun", "one"])
            .ok();
    }
}

#[test]
fn a_fork_of_a_failed_env_has_the_step_left_to_do() {
    let store = TestStore::new();
    store.profile(
        "[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'exit 3'\n\
         [[step]]\nname = 'three'\nrun = 'true'\n",
    );
    let (env, fork) = (store.env(), format!("{}-fork", store.env()));
    store.rockenv(&["up", env]).exits(5);
    let made = store.home().join("envs").join(&fork);
    // `fork` creates nothing if it cannot read what it copies.
    let spec = store.env_dir().join("spec.toml");
    let good = fs::read(&spec).unwrap();
    fs::write(&spec, "version = ").unwrap();
    store
        .rockenv(&["fork", env, &fork])
        .exits(1)
        .says(&["spec.toml` is damaged", "rockenv fsck"]);
    for file in ["record.json", "journal.jsonl"] {
        assert!(!made.join(file).exists(), "{file}");
    }
    fs::write(&spec, good).unwrap();
    store.rockenv(&["fork", env, &fork]).ok();
    let record = fs::read(made.join("record.json")).unwrap();
    let record: serde_json::Value = serde_json::from_slice(&record).unwrap();
    let steps = record["steps"].as_array().unwrap().iter();
    let outcomes: Vec<_> = steps
        .map(|step| step["outcome"].as_str().unwrap())
        .collect();
    assert_eq!(outcomes, ["done", "pending", "pending"]);
    let status = store.rockenv(&["status", &fork]).ok().text();
    assert!(!status.contains("exit code 3"), "{status}");
    let command = record["command"].as_str().unwrap();
    assert!(command.ends_with(&format!(" --name {fork}")), "{command}");
    store.rockenv(&["rm", "--yes", env, &fork]).ok();
}

/// The keys of later steps depend on the first one, which another `up` runs while this one waits for the env.
#[test]
fn a_step_that_another_command_ran_meanwhile_is_not_the_end() {
    let store = TestStore::new();
    let env = store.env();
    let (source, flags) = (store.work().join("source"), store.work().join("flags"));
    fs::create_dir(&source).unwrap();
    fs::create_dir(&flags).unwrap();
    fs::set_permissions(&flags, std::fs::Permissions::from_mode(0o777)).unwrap();
    store.profile(&format!(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '{}'\ntarget = '/v/src'\n\
         [[volume]]\nname = 'flags'\nkind = 'host'\naccess = 'rw'\npath = '{}'\ntarget = '/flags'\n\
         [[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[step]]\nname = 'configure'\ninputs = ['src']\nfingerprints = '/v/build'\n\
         run = 'touch /flags/begun; until test -e /flags/go; do sleep 0.1; done'\n\
         [[step]]\nname = 'last'\nrun = 'touch $HOME/last'\n",
        source.display(),
        flags.display()
    ));
    let first = store.start(&["up", env, "--until", "configure"]);
    wait_until("the step does not run", || flags.join("begun").exists());
    let said = store.work().join("said");
    let waits_for_env = || {
        let mut up = store.command(&["up", env]);
        up.stderr(fs::File::create(&said).unwrap().into_parts().0);
        let up = Background::start(up);
        wait_until("it does not wait", || {
            fs::read_to_string(&said)
                .unwrap()
                .contains("waiting for env")
        });
        up
    };
    let second = waits_for_env();
    fs::write(flags.join("go"), "").unwrap();
    first.wait().ok();
    let second = second.wait();
    // On a slow machine, the second command gives up before the first one ends.
    if second.code != 6 {
        second.ok();
        store.sh("test -e $HOME/last").ok();
    }
    // The other command may also have made the env with another engine.
    store.rockenv(&["down", env]).ok();
    let lock = fs::File::open(store.env_dir().join("lock")).unwrap();
    lock.file().try_lock().unwrap();
    let third = waits_for_env();
    let record = store.env_dir().join("record.json");
    let own = fs::read(&record).unwrap();
    let mut other: serde_json::Value = serde_json::from_slice(&own).unwrap();
    other["engine"] = other_engine().into();
    fs::write(&record, other.to_string()).unwrap();
    drop(lock);
    third.wait().exits(2);
    let said = fs::read_to_string(&said).unwrap();
    assert!(said.contains("cannot change its engine"), "{said}");
    fs::write(&record, own).unwrap();
}
