//! Tests for what `up`, snapshots, rollback and fork mean, on each store method.

mod again;
mod by_hand;
mod histories;
mod kept;
mod origin;
mod removed;
mod results;
mod sources;
mod undone;
mod users;
mod verify;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use fs_err as fs;

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

/// Runs a case on an overlay, a btrfs and a reflink store.
fn on_each(case: impl Fn(&TestStore, &str)) {
    on_overlay_and_btrfs(&case);
    case(&TestStore::on(&LoopFs::with_base(Kind::Xfs)), "reflink");
}

/// Runs a case on a store that freezes build volumes and on one that does not. Plans know no other difference.
fn on_overlay_and_btrfs(case: impl Fn(&TestStore, &str)) {
    case(&TestStore::new(), "overlay");
    case(&TestStore::on(&LoopFs::with_base(Kind::Btrfs)), "btrfs");
}

#[test]
fn an_engine_that_was_chosen_is_shown_with_its_reason_once() {
    let store = TestStore::new();
    store.profile("[[step]]\nname = 'one'\nrun = 'true'\n[[step]]\nname = 'two'\nrun = 'true'\n");
    let chosen = match crate::support::ordinary::Ordinary::get() {
        None => "engine nspawn (root, and systemd-nspawn is installed)",
        Some(_) => {
            "engine podman (systemd-nspawn is not installed or needs root; this service answers)"
        }
    };
    let up = |engine: &str, more: &[&str]| {
        let mut words = vec!["up", store.env(), "--engine", engine];
        words.extend(more);
        store.rockenv(&words).ok()
    };
    let first = up("auto", &["--until", "one"]);
    first.says(&[&format!("2 steps, 0 done before; {chosen}\n")]);
    // The env keeps the chosen engine, as it would keep a requested one.
    up("auto", &[]).says(&["2 steps, 1 done before\n"]);
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
            // The volume cannot be restored, as the plan says, and `ln` finds its name taken.
            plan.says(&["cannot restore build volumes"]);
            again.exits(5).says(&["step `two` failed", "rockenv up"]);
            store.rockenv(&["up", store.env(), "--clean"]).ok();
        } else {
            plan.says(&["are restored from the previous snapshot"]);
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
    on_overlay_and_btrfs(|store, _| {
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
fn up_converges_and_snapshots_roll_back_and_differ() {
    on_each(|store, method| {
        store.up_with(STEPS).says(&["step 3/3 three"]);
        store.up().says(&["nothing to do"]);
        store
            .sh("cat $HOME/three; ls /v/build")
            .ok()
            .prints("two\nlink\none\ntwo");
        let status = store.rockenv(&["status", store.env()]).ok();
        assert!(status.text().contains(method), "{}", status.text());
        // `exec` changed nothing that a plan depends on.
        store.up().says(&["nothing to do"]);
        store
            .root_sh("echo kept > /etc/kept; rm -r /usr/share/doc; echo more >> /v/build/one")
            .ok();
        store
            .rockenv(&["snapshot", "create", store.env(), "mine"])
            .ok();
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
        // A rollback to a user's snapshot is no reason to build anything.
        store.up().says(&["nothing to do"]);
        store.rockenv(&["snapshot", "rm", store.env(), "mine"]).ok();
        let list = store.rockenv(&["snapshot", "ls", store.env()]).ok().text();
        assert!(!list.contains("mine") && list.contains("three"), "{list}");
    });
}

#[test]
fn a_step_replaces_no_snapshot_that_somebody_took() {
    let store = TestStore::new();
    store.up_with(STEPS);
    store.root_sh("echo precious > /etc/precious").ok();
    let said = store.shows(
        "snapshot create ENV four
        snapshot create ENV four
        rollback ENV nowhere
        fork ENV ENV",
    );
    insta::assert_snapshot!(said, @"
    $ rockenv snapshot create ENV four
    ENV: snapshot `four`
    warning: without build volumes: an overlay store freezes only the root file system
    $ rockenv snapshot create ENV four
    error: env `ENV` already has a snapshot `four`
    help: rockenv snapshot create ENV NAME, with a name that is free
    exit code 2
    $ rockenv rollback ENV nowhere
    error: env `ENV` has no snapshot `nowhere`
    help: rockenv snapshot ls ENV
    exit code 7
    $ rockenv fork ENV ENV
    error: env `ENV` exists already
    help: rockenv fork ENV NEW, with a name that is free
    exit code 2
    ");
    store
        .up_with(&format!(
            "{STEPS}\n[[step]]\nname = \"four\"\nrun = \"true\"\n"
        ))
        .says(&["snapshot `four` renamed to `four-2`"]);
    store.rockenv(&["rollback", store.env(), "four-2"]).ok();
    store.sh("cat /etc/precious").ok().prints("precious");
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
        store.rockenv(&["fork", store.env(), &copy]).exits(2);
        store.rockenv(&["rm", store.env()]).ok();
        store
            .sh_in(&copy, "cat /etc/mine; test -e $HOME/three")
            .ok()
            .prints("other");
        store.rockenv(&["rm", &copy]).ok();
    });
}

#[test]
fn steps_before_the_first_target_are_built_once_for_all_targets() {
    let store = TestStore::new();
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
}

#[test]
fn more_than_128_snapshots_of_one_env_work() {
    // The kernel stacks at most 128 lower directories; the other methods stack none.
    let store = TestStore::new();
    let step = |number: u32| {
        format!(
            "[[step]]\nname = 's{number}'\n\
             run = 'echo {number} > ~/{number}; echo {number} > ~/changing; rm -f ~/{}'\n",
            number.saturating_sub(2)
        )
    };
    // `up` merges a long chain of layers too.
    store.up_with(&(1..=22).map(step).collect::<String>());
    for number in 23..=140 {
        // Containers take long, so most snapshots are made without one.
        if number % 20 == 0 {
            let script = format!(
                "rm -f $HOME/[0-9]*; echo {number} > $HOME/{number}; echo {number} > $HOME/changing"
            );
            store.sh(&script).ok();
        }
        store
            .rockenv(&["snapshot", "create", store.env(), &format!("s{number}")])
            .ok();
    }
    let found = "cat $HOME/changing; ls $HOME | sort -n | tr '\\n' ' '";
    store.sh(found).ok().prints("140\nchanging 140 ");
    for (snapshot, files) in [("s75", "60\nchanging 60 "), ("s6", "6\nchanging 5 6 ")] {
        store.rockenv(&["rollback", store.env(), snapshot]).ok();
        store.sh(found).ok().prints(files);
    }
    store.rockenv(&["rollback", store.env(), "s140"]).ok();
    store.sh("cat $HOME/changing").ok().prints("140");
    let list = store
        .rockenv(&["snapshot", "ls", store.env(), "--json"])
        .ok()
        .text();
    assert_eq!(list.matches("\"layer\"").count(), 140);
}

#[test]
fn a_command_that_only_looks_leaves_no_snapshot() {
    let disk = LoopFs::with_base(Kind::Btrfs);
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
            // This store restores build volumes too, so `up` keeps the changed one.
            store.sh("echo mine > /build/mine").ok();
            profile("true # once more");
            store.up().says(&["kept as snapshot `before-up`"]);
            store.rockenv(&["rollback", store.env(), "before-up"]).ok();
            store.sh("cat /build/mine").ok().prints("mine");
        }
    }
}

/// The first command creates the build user's home if no step ran as that user.
#[test]
fn a_command_that_only_looks_leaves_no_snapshot_of_a_home() {
    on_each(|store, method| {
        let steps = "[[step]]\nname = 'one'\nuser = 'root'\nrun = 'true'\n";
        store.up_with(steps);
        for as_root in [true, false] {
            match as_root {
                true => store.root_sh("ls / > /dev/null").ok(),
                false => store.sh("ls / > /dev/null").ok(),
            };
            let up = store.rockenv(&["up", store.env(), "--rerun", "one"]).ok();
            let is_kept = up.err.contains("before-up");
            assert_eq!(is_kept, method == "reflink", "{method}: {}", up.err);
        }
        store.sh("echo mine > ~/mine").ok();
        let up = store.rockenv(&["up", store.env(), "--rerun", "one"]).ok();
        up.says(&["kept as snapshot `before-up"]);
    });
}

#[test]
fn rm_takes_what_is_the_envs_and_nothing_else() {
    on_overlay_and_btrfs(|store, _| {
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
        crate::support::run::wait_until("the store still holds the env", || {
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
        // The env can be built again.
        store.up();
    });
}

#[test]
fn a_layer_that_was_not_on_disk_when_power_was_lost_is_built_again() {
    let store = TestStore::new();
    store.up_with(STEPS);
    store.settle();
    for layer in fs::read_dir(store.home().join("layers")).unwrap() {
        let path = layer.unwrap().path();
        let text = fs::read_to_string(path.join("layer.json")).unwrap();
        if text.contains("\"title\": \"three\"") {
            // As after a reset: another boot, and no record that the layer was written out.
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
    let fsck = store.rockenv(&["fsck"]).text();
    assert!(fsck.contains("\n  rockenv up PROFILE\n"), "{fsck}");
    store.up().says(&["step 3/3 three"]);
    store.up().says(&["nothing to do"]);
}

#[test]
fn ninja_finds_nothing_to_do_after_a_rollback() {
    // `rootfs::fidelity` tests the clones themselves. This is the whole way, with real Ninja.
    for kind in [Kind::Btrfs, Kind::Xfs] {
        let disk = LoopFs::with_base(kind);
        let store = TestStore::on(&disk);
        let ninja = crate::support::wheels::ninja();
        store.configure(&format!("ninja = \"{}\"\n", ninja.display()));
        store.up_with(
            r#"
resources = { ninja = true }
[[volume]]
name = "build"
kind = "build"
target = "/v/build"
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
