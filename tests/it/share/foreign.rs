//! Snapshots that bring more than what was asked for: steps under keys that their maker chose.

use super::Two;
use super::liar::{Forged, assert_nothing};
use crate::support::env::TestStore;

const STEPS: &str = "[[step]]\nname = 'one'\nrun = 'echo one > $HOME/one'\n\
                     [[step]]\nname = 'two'\nrun = 'echo two > $HOME/two'\n";
const SAID: &str = "contains a step with an unexpected key: `foreign`, 5555";

/// A snapshot with one more step, whose key is that of another profile.
fn forged<'a>(two: &'a Two, name: &str) -> Forged<'a> {
    let key = two.one.keys(name).pop().unwrap().1;
    let mut forged = Forged::of(&two.registry.host, &key);
    let steps = forged.config["rockenv"]["steps"].as_array_mut().unwrap();
    let mut foreign = steps[0].clone();
    foreign["key"] = "5".repeat(64).into();
    foreign["name"] = "foreign".into();
    steps.insert(0, foreign);
    forged
}

#[test]
fn a_wanted_snapshot_brings_no_steps_of_others() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let name = two.pushed(STEPS);
    forged(&two, name).publish();
    let up = two.run(&two.other, &["up", name, "--pull"]);
    up.exits(8).says(&["cannot pull `", SAID]);
    assert_nothing(&two.other);
    // An env knows its keys as well.
    two.other.rockenv(&["up", name]).ok();
    let pull = two.run(&two.other, &["pull", name]);
    pull.exits(8).says(&[SAID]);
    // One step less is not what is wanted either.
    let mut short = forged(&two, name);
    let steps = short.config["rockenv"]["steps"].as_array_mut().unwrap();
    steps.drain(..3);
    short.publish();
    let pull = two.run(&two.other, &["pull", name]);
    pull.exits(8).says(&["with an unexpected key: `two`"]);
    two.run(&two.one, &["push", name]).ok();
}

#[test]
fn the_image_of_a_recipe_brings_no_steps() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let other = TestStore::at(&place.path().join("store"));
    let two = Two::new(TestStore::new(), other);
    let name = two.pushed(STEPS);
    let mut forged = forged(&two, name);
    let recipe = forged.config["rockenv"]["image"]["recipe"].as_str();
    forged.key = format!("recipe-{}", recipe.unwrap());
    let reference = format!("{}:{}", two.repository(), forged.key);
    forged.publish();
    two.run(&two.other, &["up", name, "--pull"])
        .exits(8)
        .says(&[SAID]);
    two.run(&two.other, &["pull", &reference])
        .exits(8)
        .says(&["cannot pull `recipe-", SAID]);
    assert_nothing(&two.other);
}
