//! What a step of another key left in build volumes stays with its env: it never passes for the result of a clean
//! build.

use fs_err as fs;

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;
use crate::support::transcript::measured;

/// Returns a step that adds a line to the build volume, and one that keeps a copy of it.
fn profile(line: &str) -> String {
    format!(
        "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
         [[step]]\nname = 'base'\nrun = 'true'\n\
         [[step]]\nname = 'one'\nincremental = true\nrun = 'echo {line} >> /v/build/log'\n\
         [[step]]\nname = 'two'\nrun = 'cp /v/build/log $HOME/log'\n"
    )
}

/// Returns the content of an env's build volume, and the copy that its last step made.
fn left(store: &TestStore, env: &str) -> String {
    let command = "tr '\\n' ' ' < /v/build/log; tr '\\n' ' ' < $HOME/log";
    store.sh_in(env, command).ok().text().trim_end().to_owned()
}

#[test]
fn a_new_env_gets_what_a_clean_build_makes() {
    on_overlay_and_btrfs(|store, method| {
        let (old, new) = (store.env(), format!("{}-new", store.env()));
        let up = |name: &str, more: &[&str]| {
            store.rockenv(&[&["up", old, "--name", name], more].concat())
        };
        store.profile(&profile("1"));
        up(old, &[]).ok();
        store.profile(&profile("2"));
        up(old, &[]).ok();
        assert_eq!(left(store, old), "1 2 1 2", "{method}");
        up(&new, &[]).ok();
        assert_eq!(left(store, &new), "2 2", "{method}");
        // The env that made the files continues with its own.
        up(old, &[]).ok().says(&["nothing to do"]);
        assert_eq!(left(store, old), "1 2 1 2", "{method}");
        up(old, &["--clean"]).ok();
        assert_eq!(left(store, old), "2 2", "{method}");
        up(old, &[]).ok().says(&["nothing to do"]);
    });
}

#[test]
fn a_step_of_another_env_brings_its_build_volumes() {
    on_overlay_and_btrfs(|store, method| {
        let (old, new) = (store.env(), format!("{}-new", store.env()));
        let steps = ["one", "two", "three"].map(|name| {
            format!(
                "[[step]]\nname = '{name}'\nincremental = true\n\
                 run = 'echo {name} >> /v/build/log; cp /v/build/log $HOME'\n"
            )
        });
        let volume = "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n";
        store.profile(&(volume.to_owned() + &steps.concat()));
        for (name, last) in [(old, "one"), (&*new, "two"), (old, "three")] {
            let words = ["up", old, "--name", name, "--until", last];
            store.rockenv(&words).ok();
        }
        let expected = "one two three one two three";
        assert_eq!(left(store, old), expected, "{method}");
    });
}

#[test]
fn what_failed_in_an_old_tree_fails_in_no_new_one() {
    on_overlay_and_btrfs(|store, method| {
        let (old, fork) = (store.env(), format!("{}-fork", store.env()));
        let new = format!("{}-new", store.env());
        let target = |name: &str| {
            format!(
                "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
                 [[step]]\nname = 'configure'\nincremental = true\nrun = 'echo {name} > /v/build/target'\n\
                 [[step]]\nname = 'compile'\nincremental = true\n\
                 run = 'test ! -e /v/build/tree || grep {name} /v/build/tree; echo {name} > /v/build/tree'\n"
            )
        };
        store.profile(&target("a"));
        store.up();
        store.rockenv(&["fork", old, &fork]).ok();
        store.profile(&target("b"));
        let up = |name: &str, more: &[&str]| {
            store.rockenv(&[&["up", old, "--name", name], more].concat())
        };
        // Where volumes cannot be copied, the fork's are empty.
        let again = format!("rockenv up {old} --name {fork} --clean");
        match method {
            "overlay" => drop(up(&fork, &[]).ok()),
            _ => drop(up(&fork, &[]).exits(5).says(&["start clean", &again])),
        }
        up(&new, &[]).ok();
        up(&fork, &["--clean"]).ok();
        for env in [&fork, &new] {
            let words = ["exec", env, "--", "cat", "/v/build/tree"];
            store.rockenv(&words).ok().prints("b");
        }
    });
}

#[test]
fn a_step_that_goes_on_after_a_failure_is_as_clean_as_one_that_did_not_fail() {
    on_overlay_and_btrfs(|store, method| {
        let (env, new) = (store.env(), format!("{}-new", store.env()));
        let flags = store.work().join("flags");
        fs::create_dir(&flags).unwrap();
        let steps = |line: &str| {
            format!(
                "[[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
                 [[volume]]\nname = 'flags'\nkind = 'host'\npath = '{}'\ntarget = '/flags'\n\
                 [[step]]\nname = 'one'\nincremental = true\n\
                 run = 'echo {line} >> /v/build/log; test -e /flags/{line}'\n",
                flags.display()
            )
        };
        let ran = |name: &str| {
            let words = ["exec", name, "--", "cat", "/v/build/log"];
            store.rockenv(&words).ok().text().replace('\n', "")
        };
        store.profile(&steps("1"));
        store.rockenv(&["up", env]).exits(5);
        // The files of a step are synced to disk only after the step has succeeded.
        let running = store.env_dir().join("running");
        assert!(running.exists());
        fs::write(flags.join("1"), "").unwrap();
        store.up();
        assert!(!running.exists());
        assert_eq!(ran(env), "11", "{method}");
        let up_new = || store.rockenv(&["up", env, "--name", &new]).ok();
        up_new();
        let expected = if method == "overlay" { "1" } else { "11" };
        assert_eq!(ran(&new), expected, "{method}");
        store.rockenv(&["rm", "--yes", &new]).ok();
        // A step of another key failed in between, so the resumed step continues another build's files as well.
        store.profile(&steps("2"));
        store.rockenv(&["up", env]).exits(5);
        store.rockenv(&["up", env]).exits(5);
        fs::write(flags.join("2"), "").unwrap();
        store.up();
        assert_eq!(ran(env), "11222", "{method}");
        up_new();
        assert_eq!(ran(&new), "2", "{method}");
    });
}

#[test]
fn plan_says_what_changed_in_a_step() {
    let store = TestStore::new();
    let source = store.work().join("source");
    fs::create_dir(&source).unwrap();
    fs::write(source.join("file"), "1").unwrap();
    let step = "name = 'one'\ninputs = ['src']\nenv = { A = '1' }\nrun = 'true'\n";
    let head = format!(
        "[[volume]]\nname = 'src'\nkind = 'source'\npath = '{}'\ntarget = '/src'\n[[step]]\n",
        source.display()
    );
    let last = "[[step]]\nname = 'two'\nrun = 'true'\n";
    let planned = |step: &str| {
        store.profile(&format!("{head}{step}{last}"));
        let plan = store.rockenv(&["plan", store.env()]).ok().text();
        let line = plan.lines().find(|line| line.starts_with("one "));
        format!("{}\n", line.unwrap())
    };
    let mut said = planned(step);
    store.up();
    said += &planned(&step.replace("'1'", "'2'"));
    said += &planned(&step.replace("true", "exit 0"));
    said += &planned(&format!("network = false\n{step}"));
    fs::write(source.join("file"), "2").unwrap();
    said += &planned(step);
    fs::write(source.join("file"), "1").unwrap();
    said += &planned(step);
    insta::assert_snapshot!(measured(said), @"
    one  run  new
    one  run  changed: variable `A`
    one  run  changed: script
    one  run  changed: setting `network`
    one  run  changed: input `src`
    one  have  snapshot is there
    ");
}
