//! Snapshots with more than was requested: steps under keys that their publisher chose.

use super::Two;
use super::liar::{Forged, assert_nothing};
use crate::support::env::TestStore;

const STEPS: &str = "[[step]]\nname = 'one'\nrun = 'echo one > $HOME/one'\n\
                     [[step]]\nname = 'two'\nrun = 'echo two > $HOME/two'\n";
const SAID: &str = "contains a step with an unexpected key: `foreign`, 5555";

/// Returns a snapshot with an extra step under another profile's key.
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
    // `pull` for an existing env checks the keys as well.
    two.other.rockenv(&["up", name]).ok();
    let pull = two.run(&two.other, &["pull", name]);
    pull.exits(8).says(&[SAID]);
    // A snapshot with missing steps is refused as well.
    let mut short = forged(&two, name);
    let steps = short.config["rockenv"]["steps"].as_array_mut().unwrap();
    steps.drain(..3);
    short.publish();
    let pull = two.run(&two.other, &["pull", name]);
    pull.exits(8).says(&["with an unexpected key: `two`"]);
    let pushed = two.run(&two.one, &["push", name, "--json"]).ok().json();
    assert_eq!(pushed["schema"], "rockenv/push/1");
}

#[test]
fn the_image_of_a_recipe_brings_no_steps() {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let other = TestStore::at(&place.path().join("store"));
    let two = Two::new(TestStore::new(), other);
    let name = two.pushed(STEPS);
    let mut forged = forged(&two, name);
    let recipe = forged.config["rockenv"]["image"]["recipe"].as_str();
    let tag = format!("recipe-{}", recipe.unwrap());
    forged.key.clone_from(&tag);
    let reference = format!("{}:{tag}", two.repository());
    forged.publish();
    two.run(&two.other, &["up", name, "--pull"])
        .exits(8)
        .says(&[SAID]);
    two.run(&two.other, &["pull", &reference])
        .exits(8)
        .says(&["cannot pull `recipe-", SAID]);
    assert_nothing(&two.other);
    // A machine of another architecture has pushed the same recipe since.
    let mut forged = Forged::of(&two.registry.host, &tag);
    forged.config["architecture"] = "other".into();
    forged.publish();
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["it is for other, but this machine is", "building it here"]);
}

/// If a step is skipped here, its name alone makes it part of another machine's snapshot.
#[test]
fn a_step_that_is_skipped_here_brings_nothing_under_another_profile_s_key() {
    let two = Two::new(TestStore::new(), TestStore::new());
    let victim = format!("{}-victim", two.one.env());
    for store in [&two.one, &two.other] {
        store.profile_named(
            &victim,
            "[[step]]\nname = 'own'\nrun = 'echo own > ~/own'\n",
        );
    }
    two.one.rockenv(&["up", &victim]).ok();
    let name = two.pushed(
        "[[step]]\nname = 'one'\nrun = 'echo one > ~/one'\n\
         [[step]]\nname = 'test'\ngpu = true\nrun = 'true'\n\
         [[step]]\nname = 'two'\nrun = 'echo two > ~/two'\n",
    );
    let mut forged = Forged::of(&two.registry.host, &two.one.keys(name).pop().unwrap().1);
    let steps = forged.config["rockenv"]["steps"].as_array_mut().unwrap();
    assert_eq!(steps.len(), 2);
    let mut foreign = steps[0].clone();
    foreign["name"] = "test".into();
    foreign["key"] = two.one.keys(&victim).remove(0).1.into();
    steps.insert(1, foreign);
    forged.publish();
    two.run(&two.other, &["up", name, "--pull"])
        .ok()
        .says(&["pulled one, test, two from"]);
    two.other
        .rockenv(&["up", &victim])
        .ok()
        .says(&["1 step, 0 done before"]);
    two.other.rockenv(&["exec", &victim, "cat", "own"]).ok();
}
