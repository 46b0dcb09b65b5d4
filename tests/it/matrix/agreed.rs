//! One `--yes` answers the questions of every env.

use fs_err as fs;

use super::{STEPS, TARGETS, remove};
use crate::support::env::TestStore;

#[test]
fn what_is_agreed_to_is_so_for_each_env() {
    let store = TestStore::new();
    // A directory outside the profile's directory and any home, so `up` asks before steps write to it.
    let asked = tempfile::tempdir().unwrap();
    let everybody = std::os::unix::fs::PermissionsExt::from_mode(0o777);
    fs::set_permissions(asked.path(), everybody).unwrap();
    store.profile(&STEPS.replace("OUT", asked.path().to_str().unwrap()));
    let elsewhere = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let name = format!("{}.toml", store.env());
    let file = elsewhere.path().join(&name);
    fs::rename(store.work().join("profiles").join(&name), &file).unwrap();
    let up = ["matrix", "up", "--profile", file.to_str().unwrap()];
    let up = [&up[..], &TARGETS].concat();
    store
        .rockenv(&up)
        .exits(2)
        .says(&["pass `--yes` to allow it"]);
    store.rockenv(&[&["--yes"], &up[..]].concat()).ok();
    remove(&store);
}
