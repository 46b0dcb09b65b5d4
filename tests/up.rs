//! Owns the tests of what `up`, snapshots, rollback and fork mean, on each store method.

mod support;

use std::os::unix::fs::PermissionsExt as _;

use fs_err as fs;
use support::env::TestStore;
use support::loopfs::{Kind, LoopFs};

const STEPS: &str = r#"
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
[[step]]
name = "one"
run = "echo one > $HOME/one; echo one > /v/build/one"
[[step]]
name = "two"
run = "test -e $HOME/one; echo two >> $HOME/two; echo two >> /v/build/two; ln /v/build/two /v/build/link"
[[step]]
name = "three"
run = "cat $HOME/two > $HOME/three; rm $HOME/one"
"#;

/// Runs the same case on an overlay, a btrfs and a reflink store.
fn on_each(case: impl Fn(&TestStore, &str)) {
    case(&TestStore::new(), "overlay");
    for (kind, method) in [(Kind::Btrfs, "btrfs"), (Kind::Xfs, "reflink")] {
        let disk = LoopFs::new(kind);
        case(&TestStore::on(&disk), method);
    }
}

#[test]
fn an_engine_that_was_chosen_is_shown_with_its_reason_once() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    let chosen = match support::ordinary::Ordinary::get() {
        None => "engine nspawn (root, and systemd-nspawn is installed)",
        Some(_) => {
            "engine podman (systemd-nspawn needs root and to be installed; this service answers)"
        }
    };
    let up = |engine: &str, more: &[&str]| {
        let mut words = vec!["up", store.env(), "--engine", engine];
        words.extend(more);
        store.rockenv(&words).ok()
    };
    let first = up("auto", &["--until", "one"]);
    first.says(&[&format!("2 steps, 0 done before; {chosen}\n")]);
    // The env stays with it, as it would with one that was asked for.
    up("auto", &[]).says(&["2 steps, 1 done before\n"]);
}

#[test]
fn up_converges_and_then_does_nothing() {
    on_each(|store, method| {
        store.up_with(STEPS).says(&["step 3/3 three"]);
        store.up().says(&["nothing to do"]);
        store
            .sh("cat $HOME/three; ls /v/build")
            .ok()
            .prints("two\nlink\none\ntwo");
        let status = store.rockenv(&["status", store.env()]).ok();
        assert!(status.text().contains(method), "{}", status.text());
        // `exec` changed nothing that a plan cares for.
        store.up().says(&["nothing to do"]);
    });
}

#[test]
fn a_changed_step_starts_from_its_parents_snapshot_volumes_included() {
    on_each(|store, method| {
        store.up_with(STEPS);
        store.profile(&STEPS.replace("echo two >> $HOME/two", "echo new >> $HOME/two"));
        let plan = store.rockenv(&["plan", store.env()]).ok();
        assert!(
            plan.text().contains("have") && plan.text().contains("changed"),
            "{}",
            plan.text()
        );
        let again = store.rockenv(&["up", store.env()]);
        if method == "overlay" {
            // The volume could not be taken back, the plan said so, and `ln` finds its name taken.
            plan.says(&["cannot restore build volumes"]);
            again.exits(5).says(&["step `two` failed", "rockenv up"]);
            store.rockenv(&["up", store.env(), "--clean"]).ok();
        } else {
            plan.says(&["are restored from the snapshot before"]);
            again.ok();
        }
        store
            .sh("cat $HOME/two $HOME/three /v/build/two")
            .ok()
            .prints("new\nnew\ntwo");
    });
}

#[test]
fn an_incremental_step_keeps_its_volumes() {
    on_each(|store, _| {
        let steps = STEPS
            .replace("name = \"two\"", "name = \"two\"\nincremental = true")
            .replace("ln /v", "ln -f /v");
        store.up_with(&steps);
        store.profile(&steps.replace("echo two >> $HOME/two", "echo new >> $HOME/two"));
        store.up();
        store
            .sh("cat $HOME/two /v/build/two")
            .ok()
            .prints("new\ntwo\ntwo");
        store
            .rockenv(&["up", store.env(), "--clean", "--rerun", "two"])
            .ok();
        let lines = store.sh("wc -l < /v/build/two").ok().text();
        assert!(lines.trim() == "1", "--clean left {lines}");
    });
}

#[test]
fn a_failed_step_costs_only_itself_and_goes_on_where_it_stopped() {
    on_each(|store, _| {
        let failing = STEPS.replace("run = \"cat", "run = \"echo half >> /v/build/half; echo half > $HOME/half; test -e /v/build/mended; cat");
        store.profile(&failing);
        store.rockenv(&["up", store.env()]).exits(5).says(&[
            "step `three` failed with exit code 1",
            ".log",
            "rockenv shell --failed",
            &format!("rockenv up {}", store.env()),
        ]);
        // The env stands on the step before; the failed tree is beside it.
        store
            .sh("test ! -e $HOME/half && test -e $HOME/two && touch /v/build/mended")
            .ok();
        let status = store.rockenv(&["status", store.env()]).ok().text();
        assert!(status.contains("failed"), "{status}");
        store.up().says(&["step 3/3 three"]);
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

#[test]
fn rerun_and_until() {
    let store = TestStore::new();
    store.profile(&STEPS.replace("ln /v", "ln -f /v"));
    store
        .rockenv(&["up", store.env(), "--until", "one"])
        .ok()
        .says(&["step 1/3 one"]);
    store.rockenv(&["status", store.env(), "--check"]).exits(8);
    store.up().says(&["step 3/3 three"]);
    store
        .rockenv(&["up", store.env(), "--rerun", "three"])
        .ok()
        .says(&["step 3/3 three"]);
    store.up().says(&["nothing to do"]);
    store
        .rockenv(&["up", store.env(), "--rerun", "tow"])
        .exits(7)
        .says(&["has no step `tow`", "one, two, three"]);
}

#[test]
fn a_source_directory_that_is_not_there_is_named() {
    let store = TestStore::new();
    store.profile(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '/nowhere/src'\ntarget = '/src'\n\
         [[step]]\nname = 'one'\ninputs = ['src']\nrun = 'true'\n",
    );
    let named = "source `src` is not in `/nowhere/src`";
    for verb in ["up", "lock"] {
        let ran = store.rockenv(&[verb, store.env()]).exits(3);
        ran.says(&[named, "help: correct `path` of the volume"]);
    }
    let plan = store.rockenv(&["plan", store.env()]).ok();
    plan.says(&[&format!("`up` would refuse: {named}")]);
}

#[test]
fn what_was_run_again_is_never_taken_back() {
    on_each(|store, method| {
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
        // What both steps left, which is the same.
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
                .says(&[&format!("go on with: rockenv up {env}")]);
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
        // Whoever goes back to what it was before stays there.
        store.rockenv(&until).ok();
        store.rockenv(&["rollback", "--yes", env, "two"]).ok();
        store.up().says(&["nothing to do"]);
        assert_eq!(state(), now, "{method}");
    });
}

#[test]
fn a_step_never_runs_on_what_was_changed_by_hand() {
    on_each(|store, method| {
        let env = store.env();
        store.profile(&STEPS.replace("echo one > $HOME/one", "exit 1"));
        store.rockenv(&["up", env]).exits(5);
        store.profile(STEPS);
        // On the image, where the first step is to run, and on a snapshot.
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
    on_each(|store, _| {
        store.up_with(STEPS);
        let (first, _) = STEPS.split_once("[[step]]\nname = \"three\"").unwrap();
        store.up_with(first);
        store.sh("test -e $HOME/one && ! test -e $HOME/three").ok();
        store.up().says(&["nothing to do"]);
        store.up_with(STEPS).says(&["3 steps, 3 done before"]);
        store.sh("! test -e $HOME/one && test -e $HOME/three").ok();
    });
}

#[test]
fn the_output_is_of_the_build_that_the_env_stands_on() {
    on_each(|store, method| {
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
            assert_eq!(state(), "new\nnew\nnew\n", "{method}");
            fs::write(out.join("other"), "somebody's").unwrap();
            if goes_back {
                store.rockenv(&["rollback", "--yes", env, "mine"]).ok();
            }
            profile("old");
            store.up().says(&["2 steps, 2 done before"]);
            assert_eq!(state(), "old\nold\nold\n", "{method}");
            assert_eq!(fs::read(out.join("other")).unwrap(), b"somebody's");
            store.up().says(&["nothing to do"]);
            // What the last step made of it is not taken back.
            let until = ["up", env, "--until", "one"];
            store.rockenv(&until).ok().says(&["nothing to do"]);
            fs::remove_file(out.join("one")).unwrap();
            store.rockenv(&until).ok();
            assert_eq!(state(), "old\nold\nold\n", "{method}");
        }
        // What somebody made of it stays.
        fs::write(out.join("one"), "somebody's").unwrap();
        store.up().says(&["nothing to do"]);
        assert_eq!(fs::read(out.join("one")).unwrap(), b"somebody's");
    });
}

#[test]
fn what_a_forgotten_snapshot_stands_on_stays() {
    on_each(|store, _| {
        let env = store.env();
        let steps = STEPS.replace("ln /v", "ln -f /v");
        let changed = |from: &str| steps.replace(from, &format!("true; {from}"));
        store.up_with(&steps);
        store.rockenv(&["snapshot", "rm", env, "three"]).ok();
        store.up_with(&changed("cat $HOME/two"));
        store.up_with(&changed("echo one > $HOME/one"));
        store.rockenv(&["fsck"]).ok();
        // As one leaves it that was killed before it removed what it had replaced.
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
fn snapshots_roll_back_and_differ() {
    on_each(|store, method| {
        store.up_with(STEPS);
        store
            .root_sh("echo kept > /etc/kept; rm -r /usr/share/doc; echo more >> /v/build/one")
            .ok();
        store
            .rockenv(&["snapshot", "create", store.env(), "mine"])
            .ok();
        store
            .rockenv(&["snapshot", "create", store.env(), "mine"])
            .exits(2)
            .says(&["already", "rockenv snapshot rm"]);
        let diff = store
            .rockenv(&["snapshot", "diff", store.env(), "three", "mine"])
            .ok()
            .text();
        assert!(
            diff.contains("A /etc/kept") && diff.contains("D /usr/share/doc\n"),
            "{diff}"
        );
        store.rockenv(&["rollback", store.env(), "two"]).ok();
        store
            .sh("test -e $HOME/one && test ! -e /etc/kept && test -d /usr/share/doc")
            .ok();
        let one = store.sh("cat /v/build/one").ok().text();
        assert_eq!(
            one,
            if method == "overlay" {
                "one\nmore\n"
            } else {
                "one\n"
            }
        );
        store.rockenv(&["rollback", store.env(), "mine"]).ok();
        store
            .sh("cat /etc/kept; test ! -e /usr/share/doc")
            .ok()
            .prints("kept");
        store.sh("cat /v/build/one").ok().prints("one\nmore");
        // Going on from one's own snapshot is no reason to build anything.
        store.up().says(&["nothing to do"]);
        store
            .rockenv(&["rollback", store.env(), "nowhere"])
            .exits(7)
            .says(&["rockenv snapshot ls"]);
        store.rockenv(&["snapshot", "rm", store.env(), "mine"]).ok();
        let list = store.rockenv(&["snapshot", "ls", store.env()]).ok().text();
        assert!(!list.contains("mine") && list.contains("three"), "{list}");
    });
}

#[test]
fn a_step_replaces_no_snapshot_that_somebody_took() {
    on_each(|store, _| {
        store.up_with(STEPS);
        store.root_sh("echo precious > /etc/precious").ok();
        store
            .rockenv(&["snapshot", "create", store.env(), "four"])
            .ok();
        store
            .up_with(&format!(
                "{STEPS}\n[[step]]\nname = \"four\"\nrun = \"true\"\n"
            ))
            .says(&["snapshot `four` is `four-2` now"]);
        store.rockenv(&["rollback", store.env(), "four-2"]).ok();
        store.sh("cat /etc/precious").ok().prints("precious");
    });
}

#[test]
fn a_fork_is_a_copy_and_shares_what_it_did_not_change() {
    on_each(|store, method| {
        store.up_with(STEPS);
        store.root_sh("echo mine > /etc/mine").ok();
        let copy = format!("{}-copy", store.env());
        store.rockenv(&["fork", store.env(), &copy]).ok();
        store
            .rockenv(&["exec", &copy, "--", "cat", "/etc/mine"])
            .ok()
            .prints("mine");
        store
            .rockenv(&[
                "exec",
                "--root",
                &copy,
                "--",
                "sh",
                "-c",
                "echo other > /etc/mine",
            ])
            .ok();
        store.sh("cat /etc/mine").ok().prints("mine");
        if method != "overlay" {
            store
                .rockenv(&["exec", &copy, "--", "cat", "/v/build/two"])
                .ok()
                .prints("two");
            store
                .rockenv(&["up", store.env(), "--name", &copy])
                .ok()
                .says(&["nothing to do"]);
        }
        store
            .rockenv(&["fork", store.env(), &copy])
            .exits(2)
            .says(&["exists already"]);
        store.rockenv(&["rm", store.env()]).ok();
        store
            .rockenv(&[
                "exec",
                &copy,
                "--",
                "sh",
                "-c",
                "cat /etc/mine; test -e $HOME/three",
            ])
            .ok()
            .prints("other");
        store.rockenv(&["rm", &copy]).ok();
    });
}

#[test]
fn steps_before_the_first_target_are_built_once_for_all_targets() {
    on_each(|store, _| {
        let steps = r#"
targets = ["gfx1103"]
[[step]]
name = "common"
run = "head -c 8 /dev/urandom | od -An -tx1 > $HOME/common"
[[step]]
name = "own"
run = "echo ${target} > $HOME/own"
"#;
        store.profile(steps);
        let (a, b) = (
            format!("{}-gfx1103", store.env()),
            format!("{}-gfx1201", store.env()),
        );
        store
            .rockenv(&["up", store.env(), "--target", "gfx1103"])
            .ok();
        store
            .rockenv(&["up", store.env(), "--target", "gfx1201"])
            .ok()
            .says(&["2 steps, 1 done before"]);
        let read = |env: &str, file: &str| {
            store
                .rockenv(&["exec", env, "--", "cat", &format!("/home/builder/{file}")])
                .ok()
                .text()
        };
        assert_eq!(read(&a, "common"), read(&b, "common"));
        assert_eq!(
            (read(&a, "own"), read(&b, "own")),
            ("gfx1103\n".into(), "gfx1201\n".into())
        );
        store.rockenv(&["rm", &a]).ok();
        assert_eq!(read(&b, "own"), "gfx1201\n");
    });
}

#[test]
fn more_than_128_snapshots_of_one_env_work() {
    for kind in [None, Some(Kind::Btrfs)] {
        let disk = kind.map(LoopFs::new);
        let store = disk.as_ref().map_or_else(TestStore::new, TestStore::on);
        store.up_with(
            "[[step]]\nname = \"first\"\nrun = \"echo 0 > $HOME/0; echo start > $HOME/changing\"",
        );
        for number in 1..=140 {
            let script = format!(
                "echo {number} > $HOME/{number}; echo {number} > $HOME/changing; rm -f $HOME/{}",
                number - 2
            );
            store.sh(&script).ok();
            store
                .rockenv(&["snapshot", "create", store.env(), &format!("s{number}")])
                .ok();
        }
        store
            .sh("cat $HOME/changing; ls $HOME | sort -n | tr '\\n' ' '")
            .ok()
            .prints("140\nchanging 139 140 ");
        store.rockenv(&["rollback", store.env(), "s70"]).ok();
        store
            .sh("cat $HOME/changing; ls $HOME | sort -n | tr '\\n' ' '")
            .ok()
            .prints("70\nchanging 69 70 ");
        store.rockenv(&["rollback", store.env(), "s140"]).ok();
        store.sh("cat $HOME/changing").ok().prints("140");
        let list = store
            .rockenv(&["snapshot", "ls", store.env(), "--json"])
            .ok()
            .text();
        assert_eq!(list.matches("\"layer\"").count(), 141);
    }
}

#[test]
fn changes_made_by_hand_are_kept_before_a_step_would_drop_them() {
    on_each(|store, _| {
        store.up_with(STEPS);
        store.root_sh("echo precious > /etc/precious").ok();
        store.profile(&STEPS.replace("rm $HOME/one", "rm -f $HOME/one"));
        store.up().says(&["kept as snapshot `before-up`"]);
        store.sh("test ! -e /etc/precious").ok();
        store.rockenv(&["rollback", store.env(), "before-up"]).ok();
        store.sh("cat /etc/precious").ok().prints("precious");
    });
}

#[test]
fn a_command_that_only_looks_leaves_no_snapshot() {
    let disk = LoopFs::new(Kind::Btrfs);
    for store in [TestStore::new(), TestStore::on(&disk)] {
        let volume = "[[volume]]\nname = \"build\"\nkind = \"build\"\ntarget = \"/build\"\n";
        let profile = |last: &str| {
            let steps = "[[step]]\nname = \"one\"\nrun = \"echo 1 > /build/1\"";
            store.profile(&format!(
                "{volume}{steps}\n[[step]]\nname = \"two\"\nrun = \"{last}\"\n"
            ));
        };
        profile("true");
        store.up();
        store
            .sh("cat /etc/os-release /build/1 > /dev/null; ls -lR /usr/share > /dev/null")
            .ok();
        profile("true # again");
        let said = store.up().err;
        assert!(!said.contains("before-up"), "{said}");
        let list = store.rockenv(&["snapshot", "ls", store.env()]).ok().text();
        assert!(!list.contains("before-up"), "{list}");
        if store.home().starts_with(disk.path()) {
            // A build volume goes back with the root file system here, and so it is kept.
            store.sh("echo mine > /build/mine").ok();
            profile("true # once more");
            store.up().says(&["kept as snapshot `before-up`"]);
            store.rockenv(&["rollback", store.env(), "before-up"]).ok();
            store.sh("cat /build/mine").ok().prints("mine");
        }
    }
}

#[test]
fn rm_takes_what_is_the_envs_and_nothing_else() {
    on_each(|store, _| {
        let out = store.work().join("out");
        fs::create_dir(&out).unwrap();
        fs::write(out.join("mine"), "mine").unwrap();
        let volumes = format!(
            "[[volume]]\nname = \"out\"\nkind = \"output\"\ntarget = \"/v/out\"\npath = \"{}\"\n\
             [[volume]]\nname = \"cache\"\nkind = \"cache\"\ntarget = \"/v/cache\"\n\
             [[volume]]\nname = \"result\"\nkind = \"output\"\ntarget = \"/v/result\"\n",
            out.display()
        );
        let steps = format!(
            "{volumes}{STEPS}\n[[step]]\nname = \"export\"\nexport = [{{ from = \"/home/builder/three\", to = \"result\" }}]\n\
             [[step]]\nname = \"fill\"\nrun = \"echo c > /v/cache/c\""
        );
        std::os::unix::fs::chown(&out, Some(1234), Some(1234)).unwrap();
        store.up_with(&steps);
        store.rockenv(&["rm", store.env()]).ok().says(&["removed"]);
        assert_eq!(fs::read_to_string(out.join("mine")).unwrap(), "mine");
        assert_eq!(
            fs::read_to_string(store.home().join("caches/cache/c")).unwrap(),
            "c\n"
        );
        let result = store
            .home()
            .join("outputs")
            .join(store.env())
            .join("result");
        assert_eq!(fs::read_to_string(result.join("three")).unwrap(), "two\n");
        assert!(
            fs::read_to_string(result.join("SHA256SUMS"))
                .unwrap()
                .ends_with("  three\n")
        );
        support::run::wait_until("the store still holds the env", || {
            ["layers", "volumes"].iter().all(|name| {
                fs::read_dir(store.home().join(name))
                    .unwrap()
                    .next()
                    .is_none()
            })
        });
        store
            .rockenv(&["rm", store.env()])
            .exits(7)
            .says(&["no env", "rockenv ls"]);
        // And it can be built again.
        store.up();
    });
}

#[test]
fn a_layer_that_was_not_on_disk_when_power_was_lost_is_built_again() {
    let store = TestStore::new();
    store.up_with(STEPS);
    for layer in fs::read_dir(store.home().join("layers")).unwrap() {
        let path = layer.unwrap().path();
        let text = fs::read_to_string(path.join("layer.json")).unwrap();
        if text.contains("\"title\": \"three\"") {
            // As after a reset: another boot, and no word that the layer was written out.
            fs::remove_file(path.join("durable")).unwrap();
            let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap();
            fs::write(
                path.join("layer.json"),
                text.replace(boot.trim(), "another-boot"),
            )
            .unwrap();
        }
    }
    let plan = store.rockenv(&["plan", store.env()]).ok().text();
    assert!(plan.contains("not safely on disk"), "{plan}");
    store.up().says(&["step 3/3 three"]);
    store.up().says(&["nothing to do"]);
}

#[test]
fn a_source_that_changed_runs_its_steps_again_and_is_never_written() {
    on_each(|store, _| {
        let source = store.work().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("a"), "one").unwrap();
        let steps = format!(
            "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
             [[step]]\nname = \"before\"\nrun = \"true\"\n\
             [[step]]\nname = \"read\"\ninputs = [\"src\"]\nrun = \"cat /v/src/a > $HOME/a\"\n",
            source.display()
        );
        store.up_with(&steps);
        store.up().says(&["nothing to do"]);
        fs::write(source.join("a"), "two").unwrap();
        store.up().says(&["2 steps, 1 done before"]);
        store.sh("cat $HOME/a").ok().prints("two");
        fs::write(source.join("a"), "one").unwrap();
        store.up();
        store.sh("cat $HOME/a").ok().prints("one");
    });
}

#[test]
fn a_step_that_fetches_into_a_source_decides_what_later_steps_are_made_from() {
    on_each(|store, _| {
        let source = store.work().join("source");
        fs::create_dir(&source).unwrap();
        fs::write(source.join("a"), "a").unwrap();
        fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
        let fetching = format!(
            "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
             [[step]]\nname = \"fetch\"\nrun = \"echo new > /v/src/fetched\"\n\
             [[step]]\nname = \"build\"\ninputs = [\"src\"]\nrun = \"cat /v/src/* > $HOME/built\"\n\
             [[step]]\nname = \"last\"\ninputs = [\"src\"]\nrun = \"true\"\n",
            source.display()
        );
        store
            .up_with(&fetching)
            .says(&["step 1/3 fetch", "step 3/3 last"]);
        store.up().says(&["nothing to do"]);
        // What was built with the file is not what there is without it.
        fs::remove_file(source.join("fetched")).unwrap();
        store.up().says(&["step 2/3 build"]);
        store.sh("cat $HOME/built").ok().prints("a");
    });
}

#[test]
fn a_step_that_changes_what_it_is_made_from_is_named() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::set_permissions(&source, std::fs::Permissions::from_mode(0o777)).unwrap();
    let steps = format!(
        "[[volume]]\nname = \"src\"\nkind = \"source\"\ntarget = \"/v/src\"\npath = \"{}\"\n\
         [[step]]\nname = \"one\"\ninputs = [\"src\"]\nrun = \"echo >> /v/src/log\"\n\
         [[step]]\nname = \"two\"\ninputs = [\"src\"]\nrun = \"true\"\n",
        source.display()
    );
    // It would go on for ever if each change began all over.
    let said = ["step 2/2 two", "`src` was changed since step `one` began"];
    store.up_with(&steps).says(&said);
    store.up().says(&said);
}

#[test]
fn ninja_finds_nothing_to_do_after_a_rollback() {
    // The rest of a tree's fidelity is tested where trees are cloned; this is the whole way, with real Ninja.
    for kind in [Kind::Btrfs, Kind::Xfs] {
        let disk = LoopFs::new(kind);
        let store = TestStore::on(&disk);
        store.up_with(
            r#"
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
[[step]]
name = "tool"
packages = ["ninja-build"]
[[step]]
name = "build"
workdir = "/v/build"
run = '''
mkdir src
echo a > src/a
printf 'rule cp\n  command = cp $in $out && ln -f $out $out.link\nbuild a: cp src/a\nbuild b: cp a\n' > build.ninja
ninja
'''
"#,
        );
        store.sh("cd /v/build && touch src/a && ninja && rm a").ok();
        store.rockenv(&["rollback", store.env(), "build"]).ok();
        let made = store.sh("cd /v/build && ninja && stat -c %h b").ok().text();
        assert!(
            made.contains("no work to do") && made.contains("\n2"),
            "{made}"
        );
    }
}
