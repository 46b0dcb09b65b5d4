//! Results of another build than the env's are moved aside, or `up` reports them and fails.

use std::path::PathBuf;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::loopfs::{Kind, LoopFs};
use crate::support::run::{Ran, wait_until};

const PROFILE: &str = "[params]\nv = '1'\n[[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\n\
    [[step]]\nname = 'x'\nrun = 'echo ${v} > /o/r; echo ${v} > /o/r-${v}'\n";

fn up(store: &TestStore, v: &str, env: &str) -> Ran {
    let param = format!("v={v}");
    store.rockenv(&["up", store.env(), "--param", &param, "--name", env])
}

fn out(store: &TestStore, env: &str) -> PathBuf {
    store.home().join("outputs").join(env)
}

fn read(store: &TestStore, env: &str, path: &str) -> String {
    fs::read_to_string(out(store, env).join(path)).unwrap_or_default()
}

#[test]
fn results_of_a_removed_snapshot_are_still_the_envs_own() {
    let store = TestStore::new();
    let [a, b] = ["a", "b"].map(|name| format!("{}-{name}", store.env()));
    store.profile(PROFILE);
    up(&store, "1", &a).ok();
    up(&store, "2", &b).ok();
    store.rockenv(&["snapshot", "rm", "--yes", &a, "x"]).ok();
    let said = up(&store, "2", &a).ok();
    let said = said.says(&["1 step, 1 done before"]);
    assert_eq!(read(&store, &a, "o/r"), "2\n", "{}", said.err);
    assert_eq!(read(&store, &a, ".earlier/o/r-1"), "1\n");
    store.rockenv(&["status", "--check", &a]).ok();
    store.rockenv(&["--yes", "rm", &a, &b]).ok();
}

#[test]
fn results_that_are_not_the_builds_own_are_no_success() {
    let store = TestStore::new();
    let [a, b] = ["a", "b"].map(|name| format!("{}-{name}", store.env()));
    store.profile(PROFILE);
    up(&store, "2", &b).ok();
    up(&store, "1", &a).ok();
    store.rockenv(&["--yes", "rm", &a]).ok();
    // No record tells which build left the file.
    let name = ["--param", "v=2", "--name", &a];
    let plan = [&["plan", store.env()], &name[..]].concat();
    let not = "1 result is not this build's: `r` in output volume `o`";
    store.rockenv(&plan).ok().says(&[not]);
    let command = "up ENV --param v=2 --name ENV-a";
    insta::assert_snapshot!(store.shows(&format!("{command}\n{command}")), @"
    $ rockenv up ENV --param v=2 --name ENV-a
    ENV-a: 1 step, 1 done before; engine nspawn (root, and systemd-nspawn is installed)
    warning: `r` in output volume `o` is not as step `x` left it; leaving it as it is
    error: env `ENV-a` is done, but 1 result is not this build's: `r` in output volume `o`
    help: move the files away, then run: rockenv up ENV --param 'v=2' --name ENV-a; or make them again: rockenv up ENV --param 'v=2' --name ENV-a --rerun x
    exit code 8
    $ rockenv up ENV --param v=2 --name ENV-a
    warning: `r` in output volume `o` is not as step `x` left it
    error: env `ENV-a` is done, but 1 result is not this build's: `r` in output volume `o`
    help: move the files away, then run: rockenv up ENV --param 'v=2' --name ENV-a; or make them again: rockenv up ENV --param 'v=2' --name ENV-a --rerun x
    exit code 8
    ");
    assert_eq!(read(&store, &a, "o/r"), "1\n");
    assert_eq!(read(&store, &a, "o/r-2"), "2\n");
    store.rockenv(&plan).ok().says(&[not]);
    fs::remove_file(out(&store, &a).join("o/r")).unwrap();
    up(&store, "2", &a).ok();
    assert_eq!(read(&store, &a, "o/r"), "2\n");
    store.rockenv(&["--yes", "rm", &a, &b]).ok();
}

/// An export does not overwrite changed files, so running its step again is no way out.
#[test]
fn changed_files_of_an_export_are_only_to_be_moved_away() {
    let store = TestStore::new();
    store.up_with(
        "[[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\n[[step]]\nname = 'make'\nrun = 'echo 1 > ~/r'\n\
         [[step]]\nname = 'export'\nexport = [{ from = '/home/builder/r', to = 'o' }]\n\
         [[step]]\nname = 'use'\nrun = 'cat /o/r'\n",
    );
    let file = out(&store, store.env()).join("o/r");
    fs::write(&file, "other").unwrap();
    insta::assert_snapshot!(store.shows("up ENV\nup ENV --rerun use"), @"
    $ rockenv up ENV
    warning: `r` in output volume `o` is not as step `export` left it
    error: env `ENV` is done, but 1 result is not this build's: `r` in output volume `o`
    help: move the files away, then run: rockenv up ENV
    exit code 8
    $ rockenv up ENV --rerun use
    ENV: 3 steps, 2 done before
    error: `r` in output volume `o` is not as step `export` left it; step `use` would use the changed file
    help: move it away, then run: rockenv up ENV
    exit code 8
    ");
    fs::remove_file(&file).unwrap();
    store.up();
    assert_eq!(read(&store, store.env(), "o/r"), "1\n");
}

#[test]
fn a_step_whose_output_was_renamed_meanwhile_gets_no_snapshot() {
    let store = TestStore::new();
    store.profile(
        "[[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\n[[step]]\nname = 'make'\n\
         run = 'touch /o/began; while test -e /o/began; do sleep 0.02; done; echo 1 > /o/r'\n",
    );
    let env = store.env();
    for to in ["renamed", "renamed-and-made-again"] {
        let up = store.start(&["up", env]);
        let [now, renamed] = ["o", to].map(|name| out(&store, env).join(name));
        wait_until("the step does not run", || now.join("began").exists());
        fs::rename(&now, &renamed).unwrap();
        if to != "renamed" {
            fs::create_dir(&now).unwrap();
            fs::write(now.join("theirs"), "").unwrap();
        }
        fs::remove_file(renamed.join("began")).unwrap();
        up.wait()
            .exits(5)
            .says(&["was removed or renamed while the step ran"]);
        assert_eq!(fs::read_to_string(renamed.join("r")).unwrap(), "1\n");
        let layers = fs::read_dir(store.home().join("layers")).unwrap();
        assert_eq!(layers.count(), 0);
    }
    // The resumed step does not take the files in the new directory for its own, but those that it left, if the user
    // moves their directory back.
    let unfinished = store.home().join("envs").join(env).join("unfinished.json");
    let unfinished = fs::read_to_string(unfinished).unwrap();
    assert!(unfinished.contains("\"r\"") && !unfinished.contains("theirs"));
}

#[test]
fn plan_knows_the_results_that_up_refuses() {
    let store = TestStore::new();
    store.profile(
        "[[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\n[[step]]\nname = 'make'\nrun = 'echo 1 > /o/r'\n\
         [[step]]\nname = 'use'\nrun = 'cat /o/r'\n",
    );
    let env = format!("{}-a", store.env());
    let name = ["--name", env.as_str()];
    store
        .rockenv(&[&["up", store.env()], &name[..]].concat())
        .ok();
    fs::write(out(&store, &env).join("o/r"), "other").unwrap();
    let again = [store.env(), "--name", &env, "--rerun", "use"];
    let why = "`r` in output volume `o` is not as step `make` left it; step `use` would use the changed file";
    let help = format!("rockenv up {} --name {env} --rerun make", store.env());
    for (verb, code) in [(&["up"][..], 8), (&["plan", "--json"], 0)] {
        let said = store.rockenv(&[verb, &again[..]].concat()).exits(code);
        let text = format!("{}{}", said.text(), said.err);
        assert!(
            text.contains(why) && text.contains(&help),
            "{verb:?}: {text}"
        );
    }
    let check = [&["plan", "--check"], &again[..]].concat();
    store.rockenv(&check).exits(9);
    store
        .rockenv(&["up", store.env(), "--name", &env, "--rerun", "make"])
        .ok();
    store.rockenv(&check).ok();
    store.rockenv(&["--yes", "rm", &env]).ok();
}

#[test]
fn a_fork_has_the_results_of_the_env() {
    let disk = LoopFs::with_base(Kind::Btrfs);
    for store in [TestStore::new(), TestStore::on(&disk)] {
        store.profile(PROFILE);
        store.up();
        let fork = format!("{}-fork", store.env());
        store.rockenv(&["fork", store.env(), &fork]).ok();
        assert_eq!(read(&store, &fork, "o/r"), "1\n");
        store.rockenv(&["status", "--check", &fork]).ok();
        let directory = store.work().join("exported");
        store
            .rockenv(&["export", &fork, directory.to_str().unwrap()])
            .ok();
        assert_eq!(fs::read(directory.join("o/r")).unwrap(), b"1\n");
        store
            .rockenv(&["up", store.env(), "--name", &fork])
            .ok()
            .says(&["nothing to do"]);
        store.rockenv(&["--yes", "rm", &fork]).ok();
    }
}

#[test]
fn the_place_of_earlier_results_is_named_where_no_step_ran() {
    let store = TestStore::new();
    let [a, b, c] = ["a", "b", "c"].map(|name| format!("{}-{name}", store.env()));
    store.profile(PROFILE);
    up(&store, "1", &a).ok();
    up(&store, "2", &b).ok();
    up(&store, "1", &c).ok();
    let named = "results of earlier builds are in";
    for (now, other) in [("2", "1"), ("1", "2")] {
        up(&store, now, &c)
            .ok()
            .says(&["1 step, 1 done before", named]);
        assert_eq!(read(&store, &c, "o/r"), format!("{now}\n"));
        assert_eq!(
            read(&store, &c, &format!(".earlier/o/r-{other}")),
            format!("{other}\n")
        );
        assert_eq!(read(&store, &c, &format!(".earlier/o/r-{now}")), "");
    }
    store.rockenv(&["--yes", "rm", &a, &b, &c]).ok();
}

#[test]
fn what_a_user_changes_among_earlier_results_is_kept() {
    let store = TestStore::new();
    let env = store.env();
    store.profile(PROFILE);
    up(&store, "1", env).ok();
    up(&store, "2", env).ok();
    let file = out(&store, env).join(".earlier/o/r-1");
    fs::write(&file, "mine").unwrap();
    // The build makes it again.
    up(&store, "1", env).ok();
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    assert_eq!(read(&store, env, ".earlier/o/r-2"), "2\n");
    // The result would be moved there.
    up(&store, "2", env)
        .exits(8)
        .says(&[".earlier/o/r-1`: another file is there"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "mine");
    fs::remove_file(&file).unwrap();
    up(&store, "2", env).ok();
    assert_eq!(read(&store, env, ".earlier/o/r-1"), "1\n");
    assert_eq!(read(&store, env, ".earlier/o/r-2"), "");
    // A backup that was put back is still the result.
    fs::remove_file(&file).unwrap();
    fs::write(&file, "1\n").unwrap();
    up(&store, "1", env).ok();
    assert_eq!(read(&store, env, ".earlier/o/r-1"), "");
    assert_eq!(read(&store, env, ".earlier/o/r-2"), "2\n");
}

/// A layer carries the step name of the env that made it.
#[test]
fn help_has_the_steps_name_of_this_profile() {
    let store = TestStore::new();
    let [a, b] = ["a", "b"].map(|name| format!("{}-{name}", store.env()));
    for (env, step) in [(&a, "alpha"), (&b, "beta")] {
        store.profile_named(
            env,
            &format!(
                "[[volume]]\nname = 'o'\nkind = 'output'\ntarget = '/o'\n\
                 [[step]]\nname = '{step}'\nrun = 'echo 1 > /o/r'\n[[step]]\nname = 'use'\nrun = 'cat /o/r'\n"
            ),
        );
        store.rockenv(&["up", env]).ok();
    }
    fs::write(out(&store, &b).join("o/r"), "other").unwrap();
    insta::assert_snapshot!(store.shows("up ENV-b --rerun use"), @"
    ENV-b: 2 steps, 1 done before
    error: `r` in output volume `o` is not as step `beta` left it; step `use` would use the changed file
    help: move it away, or make it again: rockenv up ENV-b --rerun beta
    exit code 8
    ");
    let status = store.rockenv(&["status", "--check", "--json", &b]).exits(8);
    assert!(status.text().contains("\"beta\""), "{}", status.text());
    store.rockenv(&["up", &b, "--rerun", "beta"]).ok();
    store.rockenv(&["--yes", "rm", &a, &b]).ok();
}

#[test]
fn an_output_s_path_is_a_directory_or_a_link_to_one() {
    let store = TestStore::new();
    let path = store.work().join("results");
    store.profile(&format!(
        "[[volume]]\nname = 'o'\nkind = 'output'\npath = '{}'\ntarget = '/o'\n\
         [[step]]\nname = 'x'\nrun = 'echo 1 > /o/r'\n",
        path.display()
    ));
    let refused = "the `path` of volume `o`, is not a directory";
    let env = store.env();
    fs::write(&path, "mine").unwrap();
    store.rockenv(&["up", env]).exits(3).says(&[refused]);
    let real = store.work().join("real");
    fs::rename(&path, store.work().join("mine")).unwrap();
    fs::create_dir(&real).unwrap();
    std::os::unix::fs::chown(&real, Some(1234), Some(1234)).unwrap();
    fs_err::os::unix::fs::symlink(&real, &path).unwrap();
    let said = store.up();
    assert!(!said.err.contains("(0 B)"), "{}", said.err);
    fs::remove_file(&path).unwrap();
    fs::write(&path, "mine").unwrap();
    store.rockenv(&["plan", env]).exits(3).says(&[refused]);
}
