//! The comparison of `image verify`.

use serde_json::json;

use super::recipe;
use crate::image_oci::make::{Image, Tar};
use crate::support::env::TestStore;

#[test]
fn a_variable_that_changed_is_a_difference() {
    let store = TestStore::new();
    let layout = store.work().join("images/layout");
    let give = |value: &str| {
        let archive = Tar::default().file("a", "").end();
        let run = json!({ "Env": [format!("GREETING={value}"), "SAME=x".to_owned()] });
        Image::of(vec![(archive.clone(), archive)], "amd64", &run, false).layout(&layout);
    };
    give("one");
    recipe(&store, "oci", "path = \"layout\"");
    store.rockenv(&["image", "build", "x"]).ok();
    let verify = || store.rockenv(&["image", "verify", "x"]);
    let ran = store.rockenv(&["image", "verify", "x", "--json"]).ok();
    assert_eq!(ran.json()["same"], true);
    ran.says(&["reproduced"]);
    give("two");
    let ran = verify().exits(8);
    assert_eq!(ran.text(), "variable `GREETING`: value differs\n");
    let ran = store.rockenv(&["--json", "image", "verify", "x"]).exits(8);
    assert_eq!(ran.json()["variables"], json!(["GREETING"]));
}
