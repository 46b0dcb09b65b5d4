//! Undone edits: a step does not count as done if another build has since written to its build volume.

use fs_err as fs;

use super::on_overlay_and_btrfs;
use crate::support::env::TestStore;
use crate::support::run::Ran;

const PROFILE: &str = "[params]\nv = '1'\nw = '1'\n\
    [[volume]]\nname = 'build'\nkind = 'build'\ntarget = '/v/build'\n\
    [[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/v/out'\n\
    [[step]]\nname = 'configure'\nrun = 'echo ${v} > /v/build/x; test ${v} != bad'\n\
    [[step]]\nname = 'build'\nrun = 'echo ${w} >> /v/build/log; cp /v/build/x /v/out/res; test ${w} != bad'\n";

fn up(store: &TestStore, params: &[&str]) -> Ran {
    let params = params.iter().flat_map(|param| ["--param", param]);
    let words: Vec<&str> = ["up", store.env()].into_iter().chain(params).collect();
    store.rockenv(&words)
}

/// Returns what `up` would do to each step.
fn actions(store: &TestStore, params: &[&str]) -> Vec<String> {
    let params = params.iter().flat_map(|param| ["--param", param]);
    let words = ["plan", store.env(), "--json"].into_iter().chain(params);
    let plan = store.rockenv(&words.collect::<Vec<_>>()).ok().json();
    let steps = plan["plan"]["steps"].as_array().unwrap().iter();
    steps
        .map(|step| step["action"].as_str().unwrap().to_owned())
        .collect()
}

fn result(store: &TestStore) -> String {
    let out = store.home().join("outputs").join(store.env());
    fs::read_to_string(out.join("out/res")).unwrap()
}

#[test]
fn an_undone_edit_leaves_the_volume_of_the_build_that_it_goes_back_to() {
    on_overlay_and_btrfs(|store, method| {
        store.profile(PROFILE);
        up(store, &[]).ok();
        up(store, &["v=bad"]).exits(5);
        if method == "overlay" {
            let plan = store.rockenv(&["plan", store.env(), "--json"]).ok().text();
            assert!(
                plan.contains("build volume `build` has changed since"),
                "{plan}"
            );
        }
        up(store, &[]).ok();
        store.sh("cat /v/build/x").ok().prints("1");
        up(store, &[]).ok().says(&["nothing to do"]);
        up(store, &["w=2"]).ok();
        assert_eq!(result(store), "1\n", "{method}");
        // The other build succeeded, and a snapshot keeps the layers of this one.
        store
            .rockenv(&["snapshot", "create", store.env(), "mine"])
            .ok();
        up(store, &["v=2", "w=2"]).ok();
        up(store, &["w=2"]).ok();
        store.sh("cat /v/build/x").ok().prints("1");
        up(store, &["w=3"]).ok();
        assert_eq!(result(store), "1\n", "{method}");
        // The same after a rollback.
        up(store, &["v=bad", "w=3"]).exits(5);
        store
            .rockenv(&["rollback", "--yes", store.env(), "build"])
            .ok();
        up(store, &["w=3"]).ok();
        store.sh("cat /v/build/x").ok().prints("1");
    });
}

/// `packages` steps see no build volume.
#[test]
fn a_failed_step_that_sees_no_volume_changes_nothing_and_hides_nothing() {
    let store = TestStore::new();
    let step = "[[step]]\nname = 'tools'\npackages = ['rockenv-has-no-such-package']\n[[step]]";
    let with_tools = PROFILE.replacen("[[step]]", step, 1);
    store.profile(PROFILE);
    up(&store, &[]).ok();
    for fails in [false, true] {
        if fails {
            up(&store, &["v=bad"]).exits(5);
        }
        store.profile(&with_tools);
        let said = up(&store, &[]);
        assert!(
            said.code != 0 && said.err.contains("step 1/3 tools"),
            "{}",
            said.err
        );
        store.profile(PROFILE);
        let action = if fails { "run" } else { "hit" };
        assert_eq!(actions(&store, &[]), [action, action]);
    }
}

#[test]
fn a_later_step_that_wrote_to_the_volume_makes_no_earlier_one_run_again() {
    on_overlay_and_btrfs(|store, method| {
        store.profile(PROFILE);
        up(store, &[]).ok();
        up(store, &["w=bad"]).exits(5);
        // The failed step is resumed, changed, undone, and rolled back.
        assert_eq!(actions(store, &["w=bad"]), ["hit", "run"], "{method}");
        assert_eq!(actions(store, &["w=2"]), ["hit", "run"], "{method}");
        let build = if method == "overlay" { "run" } else { "hit" };
        assert_eq!(actions(store, &[]), ["hit", build], "{method}");
        store
            .rockenv(&["rollback", "--yes", store.env(), "configure"])
            .ok();
        assert_eq!(actions(store, &["w=2"]), ["hit", "run"], "{method}");
        up(store, &["w=2"]).ok();
        up(store, &["w=2"]).ok().says(&["nothing to do"]);
        // The same if the profile drops the step.
        let (first, _) = PROFILE.rsplit_once("[[step]]").unwrap();
        store.profile(first);
        assert_eq!(actions(store, &[]), ["hit"], "{method}");
        up(store, &[]).ok();
        store.profile(PROFILE);
        assert_eq!(actions(store, &["w=2"]), ["hit", "hit"], "{method}");
    });
}

#[test]
fn an_env_without_its_last_step_is_not_ready() {
    let store = TestStore::new();
    let steps = "[[volume]]\nname = 'out'\nkind = 'output'\ntarget = '/out'\n\
                 [[step]]\nname = 'one'\nrun = 'echo 1 > /out/one'\n\
                 [[step]]\nname = 'two'\nrun = 'echo 2 > /out/two'\n";
    store.up_with(steps);
    let env = store.env();
    store.rockenv(&["snapshot", "rm", "--yes", env, "two"]).ok();
    store.rockenv(&["rollback", "--yes", env, "one"]).ok();
    store.rockenv(&["status", env, "--check"]).exits(8);
    store.rockenv(&["export", env, "made"]).exits(8);
    let snapshots = ["export", env, "--snapshots", "some.oci.tar"];
    store
        .rockenv(&snapshots)
        .ok()
        .says(&["step `two` has no snapshot any more"]);
    store.up();
    store.rockenv(&["status", env, "--check"]).ok();
    // A step that failed, and that the profile no longer has.
    store.profile(&format!("{steps}[[step]]\nname = 'three'\nrun = 'false'\n"));
    store.rockenv(&["up", env]).exits(5);
    store.profile(&steps.replace("'two'", "'second'"));
    store.up();
    let status = store.rockenv(&["status", env]).ok().text();
    assert!(
        status.contains("ready") && status.contains("second") && !status.contains("three"),
        "{status}"
    );
    store.up().says(&["nothing to do"]);
}
