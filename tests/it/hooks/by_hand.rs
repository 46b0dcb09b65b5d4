//! Manual changes in a view survive the steps, and the view itself.

use std::path::PathBuf;

use fs_err as fs;

use super::{EDIT, STEPS, hook, source};
use crate::support::env::TestStore;
use crate::support::terminal::Terminal;

/// Returns a profile whose second step changes the mode of every file to `mode`.
fn profile(mode: &str) -> String {
    format!(
        "hooks = ['fix']\n\
         [[volume]]\nname = 'src'\nkind = 'source'\npath = '../src'\ntarget = '/v/src'\naccess = 'rw'\n\
         [[step]]\nname = 'a'\ninputs = ['src']\nrun = 'cat /v/src/a.txt > ~/a; echo step > /v/src/made'\n\
         [[step]]\nname = 'b'\nuser = 'root'\nrun = 'chmod -R {mode} /v/src; ln -f /v/src/b.txt /v/src/link'\n"
    )
}

/// Returns the files of this name in an env's `kept-` directories.
fn kept(store: &TestStore, env: &str, name: &str) -> Vec<PathBuf> {
    let view = store.home().join("envs").join(env).join("views/src");
    let entries = fs::read_dir(view).unwrap().map(|entry| entry.unwrap());
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with("kept-"))
        .map(|entry| entry.path().join(name))
        .filter(|path| path.exists())
        .collect()
}

#[test]
fn a_step_that_touches_everything_makes_nothing_its_own() {
    let store = TestStore::new();
    source(&store);
    hook(&store, "fix", EDIT);
    store.up_with(&profile("a+r"));
    store
        .sh("echo mine > /v/src/hand; echo mine >> /v/src/b.txt; mkdir /v/src/new; echo mine > /v/src/new/file")
        .ok();
    let fork = format!("{}-fork", store.env());
    // An unfinished step on build volumes that a rollback replaced: its partial work is in the view.
    let attempt = |env: &str| store.home().join("envs").join(env).join("attempt");
    let begun = "step replaced\n\n\n2026-01-02T03:04:05Z";
    fs::write(attempt(store.env()), begun).unwrap();
    store.rockenv(&["fork", store.env(), &fork]).ok();
    assert_eq!(fs::read_to_string(attempt(&fork)).unwrap(), begun);
    // In the fork, unchanged files have the times of their copies.
    for env in [store.env(), &fork] {
        let up = |mode: &str| {
            store.profile(&profile(mode));
            store.rockenv(&["up", store.env(), "--name", env]).ok()
        };
        hook(&store, "fix", EDIT);
        up("a+r,u+w");
        hook(&store, "fix", &EDIT.replace("ONE", &format!("{env}-2")));
        up("a+r,u+w").says(&["manually edited files", "views/src/kept-"]);
        for (name, text) in [
            ("hand", "mine\n"),
            ("b.txt", "two\nmine\n"),
            ("new/file", "mine\n"),
        ] {
            let kept = kept(&store, env, name);
            assert_eq!(kept.len(), 1, "{env}: {name}");
            assert_eq!(fs::read_to_string(&kept[0]).unwrap(), text);
        }
        // A step makes its own files again, so they are not kept. The next view begins without manual changes.
        assert!(kept(&store, env, "made").is_empty());
        hook(&store, "fix", &EDIT.replace("ONE", &format!("{env}-3")));
        let said = up("a+r,u+w").err;
        assert!(!said.contains("kept-"), "{said}");
    }
    // `rm` warns about the manual changes.
    let mut asked = Terminal::start(store.command(&["rm", &fork]), 33, 101);
    let view = store.home().join("envs").join(&fork).join("views/src");
    asked.expect(" files changed by hand in `");
    asked.expect(&format!("{}` are deleted", view.display()));
    asked.write("n\n");
    asked.wait(2);
    assert_eq!(kept(&store, &fork, "hand").len(), 1);
    // The answer is about the changes that the question named.
    let mut asked = Terminal::start(store.command(&["rm", &fork]), 33, 101);
    asked.expect("` are deleted");
    let hand = kept(&store, &fork, "hand").remove(0);
    fs::write(hand.with_file_name("more"), "mine\n").unwrap();
    asked.write("y\n");
    asked.expect("were changed by hand meanwhile");
    asked.wait(6);
    assert!(hand.exists());
    store.rockenv(&["rm", "--yes", &fork]).ok();

    // A view whose layers were deleted begins anew.
    let text = format!("{}-3", store.env());
    hook(&store, "fix", &EDIT.replace("ONE", &text));
    for entry in fs::read_dir(store.env_dir().join("views/src")).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            fs::remove_dir_all(path).unwrap();
        }
    }
    store.rockenv(&["up", store.env(), "--rerun", "b"]).ok();
    store.sh("cat /v/src/a.txt").ok().prints(&text);
}

#[test]
fn manual_edits_outlive_their_view() {
    let store = TestStore::new();
    let src = source(&store);
    hook(&store, "fix", EDIT);
    store.up_with(STEPS);
    store
        .sh("echo precious >> /v/src/a.txt; mkdir /v/src/new; echo precious > /v/src/new/mine")
        .ok();
    fs::write(src.join("d/c.txt"), "changed").unwrap();
    store
        .up()
        .says(&["manually edited files", "views/src/kept-"]);
    let views = store.env_dir().join("views/src");
    let kept = || {
        let entries = fs::read_dir(&views).unwrap().map(|entry| entry.unwrap());
        let mut kept: Vec<PathBuf> = entries
            .filter(|entry| entry.file_name().to_string_lossy().starts_with("kept-"))
            .map(|entry| entry.path())
            .collect();
        assert_eq!(kept.len(), 1);
        kept.remove(0)
    };
    for (name, end) in [("a.txt", "ONE\nprecious\n"), ("new/mine", "precious\n")] {
        assert_eq!(fs::read_to_string(kept().join(name)).unwrap(), end);
    }
    // Files that steps write again are no manual edits, and a command that only reads makes none.
    store.sh("cat /v/src/a.txt").ok();
    fs::write(src.join("d/c.txt"), "changed again").unwrap();
    let said = store.up().err;
    assert!(!said.contains("kept-"), "{said}");
    kept();
    // A command that is killed between two hooks leaves no layer for writes.
    let stack = views.join("stack.json");
    let mut left: serde_json::Value = serde_json::from_slice(&fs::read(&stack).unwrap()).unwrap();
    left["upper"] = serde_json::Value::Null;
    fs::write(&stack, left.to_string()).unwrap();
    store.sh("touch /v/src/mine").exits(1);
    assert!(!src.join("mine").exists());
}
