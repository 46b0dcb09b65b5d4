//! Very deep directories.

use std::process::Command;

use super::Place;

#[test]
fn a_deep_directory_is_copied_and_compared() {
    let place = Place::new();
    let make = "import os\nos.mkdir('from'); os.chdir('from')\n\
                name = 'd' * 20\n\
                for _ in range(1500): os.mkdir(name); os.chdir(name)\n\
                open('file', 'w').write('text')";
    let made = Command::new("python3")
        .args(["-c", make])
        .current_dir(place.dir.path())
        .status();
    assert!(made.unwrap().success());
    let recipe = "schema=1\nprovider=\"directory\"\n[directory]\npath=\"from\"";
    let built = place.build(recipe, "copy").unwrap();
    // The top directory counts too.
    assert_eq!(built.entries, 1502);
    place.assert_same("from", "copy");
    for name in ["from", "copy"] {
        rockenv::testing::remove_tree(&place.path(name)).unwrap();
    }
}
