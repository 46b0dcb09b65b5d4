//! Results that are not of the build that the env stands on are moved aside, or `up` says so and fails.

use std::path::PathBuf;

use fs_err as fs;

use crate::support::env::TestStore;
use crate::support::run::Ran;

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
