//! Mirrors of registries, and the names of Docker Hub.

use rockenv::testing::error::Kind;

use super::make::Registry;
use super::place::{Place, fails, sample};

#[test]
fn the_entry_for_a_mirror_is_named_that_rockenv_reads() {
    let mut place = Place::new();
    let unreachable = |place: &Place, host: &str, entry: &str| {
        let reference = format!("ref = \"{host}/team/sample:1\"");
        let words = "cannot reach registry `127.0.0.1:9`";
        let error = fails(place.build(&reference, host), Kind::Unavailable, words);
        let help = error.help_text().unwrap();
        assert!(help.contains(entry), "{help}");
    };
    let entry = "`\"127.0.0.1:9\" = \"...\"` under [mirror]";
    unreachable(&place, "127.0.0.1:9", entry);
    let mirror = ("docker.io".into(), "http://127.0.0.1:9/hub".into());
    place.mirrors.extend([mirror]);
    let entry = "`\"docker.io\" = \"http://127.0.0.1:9/hub\"` under [mirror]";
    unreachable(&place, "docker.io", entry);
}

#[test]
fn an_official_image_of_docker_hub_is_in_its_library() {
    let mut place = Place::new();
    let registry = Registry::start(false);
    registry.push("library/sample", "1", &sample());
    let mirror = ("docker.io".into(), format!("http://{}", registry.host));
    place.mirrors.extend([mirror]);
    place.build("ref = \"docker.io/sample:1\"", "a").unwrap();
}
